//! Records of relays in etcd, through its JSON gateway (etcd 3.4 and later).
//!
//! Each relay keeps one record, `PREFIX` followed by the host and port of its URL, bound to a lease. The lease is kept
//! alive for as long as the relay runs. If the relay dies, etcd removes the record when the lease ends.
//!
//! | what happens | what the relay does |
//! | --- | --- |
//! | an endpoint does not answer | asks the next one |
//! | no endpoint answers | keeps what it knows, and tries again |
//! | the lease is over, as after a pause | takes a new lease and writes its record again |
//! | another run writes the record of this URL | leaves it there: the one that started last is the one that runs |
//! | the relay drains | marks its record, and removes it at the end |

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use millrace_moq::Namespace;
use millrace_relay_cluster::LookupLimits;
use tokio::{
    sync::{mpsc, watch},
    time,
};
use tracing::info;

use crate::{
    directory::EtcdDirectory,
    http::{HttpClient, StoreError},
    record::{RecordError, RelayRecord},
    state::{DiscoveryState, note_found, note_registered, note_unread, note_unregistered},
    store::{EtcdConfig, EtcdNumber, EtcdStore, FIRST_PAUSE, LONGEST_PAUSE, OBSERVATION},
};

/// Time after a reported change in which further changes are awaited, so that they are read together.
const GATHER: Duration = Duration::from_millis(100);

/// Keeps this relay's record in etcd, and follows the records of other relays.
#[derive(Debug)]
pub struct EtcdDiscovery {
    store: Arc<EtcdStore>,
    lease: Duration,
    /// Registers the namespaces of this relay. `None` if relays announce namespaces in their sessions.
    directory: Option<Arc<EtcdDirectory>>,
    /// The record that this relay should have in etcd; `None` if it should have none.
    own: watch::Receiver<Option<RelayRecord>>,
}

impl EtcdDiscovery {
    /// Creates an [`EtcdDiscovery`] that keeps `own` in etcd.
    pub fn new(client: HttpClient, config: EtcdConfig, own: watch::Receiver<Option<RelayRecord>>) -> Self {
        let store = Arc::new(EtcdStore::new(client, &config));
        Self { store, lease: config.lease, directory: None, own }
    }

    /// Makes this also register namespaces in etcd, and look up those of other relays. Returns the directory for both,
    /// and a receiver of namespaces that were looked up in vain and have a registration later. The empty one stands for
    /// all.
    pub fn with_directory(
        mut self,
        limits: LookupLimits,
    ) -> (Self, Arc<EtcdDirectory>, mpsc::Receiver<Namespace>) {
        let (directory, appeared) = EtcdDirectory::new(Arc::clone(&self.store), limits);
        self.directory = Some(Arc::clone(&directory));
        (self, directory, appeared)
    }

    /// Keeps the discovered relays in `found` up to date until all receivers of `found` are dropped.
    pub async fn run(self, found: &watch::Sender<DiscoveryState>) {
        tokio::join!(self.register(found), self.observe(found), self.follow(found));
    }

    async fn follow(&self, found: &watch::Sender<DiscoveryState>) {
        let Some(directory) = &self.directory else { return };
        tokio::select! {
            never = directory.follow() => match never {},
            () = found.closed() => {}
        }
    }

    /// Keeps this relay's record in etcd.
    async fn register(&self, found: &watch::Sender<DiscoveryState>) {
        let mut own = self.own.clone();
        let mut pause = FIRST_PAUSE;
        // False until this run has written its record once. A run that starts replaces the record of an earlier one;
        // one that comes back after a pause does not replace the record of a later one.
        let mut returns = false;
        while !found.is_closed() {
            let record = own.borrow_and_update().clone();
            let Some(record) = record else {
                tokio::select! {
                    changed = own.changed() => match changed {
                        Ok(()) => continue,
                        Err(_) => return,
                    },
                    () = found.closed() => return,
                }
            };
            match self.hold(record, &mut own, found, &mut pause, &mut returns).await {
                Ok(()) => {
                    found.send_if_modified(|state| std::mem::take(&mut state.is_registered));
                    // `hold` has removed the record from etcd. If the sender of `own` is dropped, this relay writes no
                    // other record.
                    if own.has_changed().is_err() {
                        return;
                    }
                    continue;
                }
                Err(error) => note_unregistered(found, &error),
            }
            found.send_if_modified(|state| std::mem::take(&mut state.is_registered));
            tokio::select! {
                () = time::sleep(pause) => {}
                () = found.closed() => return,
            }
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    /// Writes the record under a new lease, and keeps the record and the registered namespaces. Returns once the record
    /// is withdrawn.
    async fn hold(
        &self,
        record: RelayRecord,
        own: &mut watch::Receiver<Option<RelayRecord>>,
        found: &watch::Sender<DiscoveryState>,
        pause: &mut Duration,
        returns: &mut bool,
    ) -> Result<(), StoreError> {
        let lease = self.store.grant(self.lease).await?;
        self.store.put(&record, &lease, *returns).await?;
        *returns = true;
        info!(key = record.key(), lease_s = self.lease.as_secs(), "wrote this relay's record to etcd");
        note_registered(found);
        // A success resets the pause, so that the next failure is followed by a quick attempt.
        *pause = FIRST_PAUSE;
        let register = async {
            match &self.directory {
                Some(directory) => directory.register(&record, &lease).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            kept = self.keep(&lease, own, found) => kept,
            never = register => match never {},
        }
    }

    /// Keeps the lease alive, and writes changes of the record. Returns once the record is withdrawn.
    async fn keep(
        &self,
        lease: &EtcdNumber,
        own: &mut watch::Receiver<Option<RelayRecord>>,
        found: &watch::Sender<DiscoveryState>,
    ) -> Result<(), StoreError> {
        // The lease is renewed three times within its length, so that one failed renewal does not end it.
        let mut looks = time::interval(self.lease / 3);
        // While etcd does not answer, the lease may still be valid: it is lost only if etcd says so, or once its time
        // is over.
        let mut alive = time::Instant::now();
        loop {
            let changed = tokio::select! {
                _ = looks.tick() => None,
                changed = own.changed() => Some(changed.is_ok()),
                () = found.closed() => Some(false),
            };
            let next = match changed {
                None => {
                    match self.store.keep_alive(lease).await {
                        Ok(()) => {
                            alive = time::Instant::now();
                            note_registered(found);
                        }
                        Err(StoreError::LeaseOver) => return Err(StoreError::LeaseOver),
                        Err(error) if alive.elapsed() >= self.lease => return Err(error),
                        Err(error) => note_unregistered(found, &error),
                    }
                    continue;
                }
                Some(true) => own.borrow_and_update().clone(),
                Some(false) => None,
            };
            match next {
                Some(record) => self.store.put(&record, lease, false).await?,
                None => {
                    // etcd removes the record together with its lease.
                    self.store.revoke(lease).await?;
                    info!("removed this relay's record from etcd");
                    return Ok(());
                }
            }
        }
    }

    /// Follows the records of other relays.
    async fn observe(&self, found: &watch::Sender<DiscoveryState>) {
        let mut pause = FIRST_PAUSE;
        loop {
            let observed = async {
                let (records, revision) = self.store.list().await?;
                let is_registered = found.borrow().is_registered;
                let (relays, unusable) = self.usable(records, is_registered);
                note_found(found, relays, unusable);
                self.directory.iter().for_each(|directory| directory.set_relays(&found.borrow().relays));
                // A timeout is no failure: all records are read again.
                time::timeout(OBSERVATION, self.store.until_change(revision)).await.unwrap_or(Ok(()))
            };
            let waited = tokio::select! {
                result = observed => match result {
                    Ok(()) => {
                        pause = FIRST_PAUSE;
                        GATHER
                    }
                    Err(error) => {
                        note_unread(found, &error);
                        let longer = (pause * 2).min(LONGEST_PAUSE);
                        std::mem::replace(&mut pause, longer)
                    }
                },
                () = found.closed() => return,
            };
            tokio::select! {
                () = time::sleep(waited) => {}
                () = found.closed() => return,
            }
        }
    }

    /// Returns the relays whose records can be used, without this relay, and the reasons why other records cannot be
    /// used. `is_registered` is true if this relay has written its record. A record of another process under this
    /// relay's key was then written later, and is reported as a mistake.
    fn usable(
        &self,
        records: BTreeMap<String, Vec<u8>>,
        is_registered: bool,
    ) -> (Vec<RelayRecord>, Vec<String>) {
        let own = self.own.borrow().clone();
        let mut relays = Vec::new();
        let mut unusable = Vec::new();
        for (key, json) in records {
            let record = RelayRecord::from_json(&json).and_then(|record| match record.key() == key {
                true => Ok(record),
                false => Err(RecordError::WrongKey { url: record.url, key: key.clone() }),
            });
            match (record, &own) {
                (Ok(record), Some(own)) if own.url.authority() == record.url.authority() => {
                    if is_registered && own.run != record.run {
                        unusable.push(format!(
                            "{key}: another relay has written the record of this relay's URL; give each relay a url of its own"
                        ));
                    }
                }
                (Ok(record), _) => relays.push(record),
                (Err(error), _) => unusable.push(format!("{key}: {error}")),
            }
        }
        (relays, unusable)
    }
}
