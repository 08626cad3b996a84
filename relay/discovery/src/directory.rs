//! The namespaces of a cluster in etcd, each with the relays that have a publisher of it.
//!
//! A relay registers the namespaces of its own publishers, under keys of its own: the prefix of registrations, host and
//! port of its URL, a slash, and the namespace as MoQ Transport writes it. Their value is the relay's run. They are
//! bound to the lease of the relay's record, and end with it.
//!
//! | what happens | what the relay does |
//! | --- | --- |
//! | publishers come and go | writes the changes together, every 100 ms at most |
//! | the lease was lost | writes all registrations again under the new one |
//! | another run has written this relay's record | etcd refuses the registrations of this run |
//! | a namespace is asked for | answers from memory, or asks etcd, once for all that ask at the same time |
//! | a registration is not of the present run of its relay | does not use it |
//! | etcd reports a change | corrects the answers in memory |
//! | etcd does not answer | uses registrations in memory; the absence of one is no answer any more |

use std::{
    collections::{BTreeSet, HashMap},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use millrace_moq::Namespace;
use millrace_relay_cluster::{LookupCache, LookupLimits, LookupStatus, RegistrationKey, RegistrationState};
use parking_lot::Mutex;
use tokio::{
    sync::{Mutex as Turn, Notify, mpsc},
    time,
};
use tracing::{info, warn};

use crate::{
    http::StoreError,
    record::RelayRecord,
    store::{EtcdNumber, EtcdStore, FIRST_PAUSE, LONGEST_PAUSE, MAX_OPERATIONS, OBSERVATION, StoredKey},
};

/// Largest number of namespaces that a relay registers.
pub const MAX_REGISTERED: usize = 10_000;
/// Largest length of a relay's host and port, in bytes.
const MAX_HOST: usize = 300;
/// Largest number of registrations that are written in one transaction.
const BATCH: usize = MAX_OPERATIONS - 28;
/// Time from one transaction to the next. Changes in the meantime are written together.
const BATCH_PAUSE: Duration = Duration::from_millis(100);
/// Time after a failed lookup in which etcd is not asked again.
const FAILURE_PAUSE: Duration = Duration::from_secs(1);
/// Largest number of namespaces that appeared and were not taken yet. The watch waits while there are more.
const MAX_APPEARED: usize = 1024;

/// Registers the namespaces of a relay's publishers in etcd, and looks up those of other relays.
#[derive(Debug)]
pub struct EtcdDirectory {
    store: Arc<EtcdStore>,
    cache: Mutex<LookupCache>,
    published: Mutex<Published>,
    /// Wakes the task that writes registrations.
    dirty: Notify,
    /// The lookups under way. Lookups of the same namespace take turns, and find the answer of the one before.
    turns: Mutex<HashMap<Namespace, LookupTurns>>,
    relays: Mutex<KnownRelays>,
    failure: Mutex<Option<(Instant, String)>>,
    is_followed: AtomicBool,
    appeared: mpsc::Sender<Namespace>,
    /// The counters of the status. Its gauges are 0 here.
    counts: Mutex<LookupStatus>,
}

#[derive(Debug, Default)]
struct Published {
    all: BTreeSet<Namespace>,
    /// The namespaces whose registration has to be written or removed.
    dirty: BTreeSet<Namespace>,
    /// The namespaces in etcd, as far as this relay knows.
    registered: BTreeSet<Namespace>,
    /// Why the last transaction failed. `None` if it succeeded.
    failure: Option<String>,
}

/// The relays whose registrations are used.
#[derive(Debug, Default)]
struct KnownRelays {
    all: Arc<[RelayRecord]>,
    /// Number of changes that may have brought registrations that were not looked for.
    changes: u64,
}

/// The reason why a lookup has no answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LookupError {
    /// The store did not answer.
    #[error("nothing is known of this namespace, and the discovery store does not answer: {0}")]
    Store(String),
    /// The limit of requests to the store is reached.
    #[error("too many namespaces are looked up at the moment: try again in a second")]
    TooMany,
}

/// The lookups of one namespace that are under way.
#[derive(Debug, Default)]
struct LookupTurns {
    turn: Arc<Turn<()>>,
    places: usize,
}

/// A place among the lookups of one namespace, which take turns. Dropping the last one, also by a request that was
/// cancelled, forgets the namespace.
struct LookupPlace<'a> {
    directory: &'a EtcdDirectory,
    namespace: &'a Namespace,
    turn: Arc<Turn<()>>,
}

impl<'a> LookupPlace<'a> {
    fn new(directory: &'a EtcdDirectory, namespace: &'a Namespace) -> Self {
        let mut turns = directory.turns.lock();
        let turns = turns.entry(namespace.clone()).or_default();
        turns.places += 1;
        Self { directory, namespace, turn: Arc::clone(&turns.turn) }
    }
}

impl Drop for LookupPlace<'_> {
    fn drop(&mut self) {
        let mut turns = self.directory.turns.lock();
        let Some(same) = turns.get_mut(self.namespace) else { return };
        same.places -= 1;
        if same.places == 0 {
            turns.remove(self.namespace);
        }
    }
}

/// A lookup that has its turn. Dropping it lets the next one begin.
struct Lookup<'a> {
    directory: &'a EtcdDirectory,
    namespace: &'a Namespace,
}

impl Drop for Lookup<'_> {
    fn drop(&mut self) {
        self.directory.cache.lock().abort(self.namespace);
    }
}

impl EtcdDirectory {
    /// Makes a directory for the records of `store`. Namespaces that were looked up in vain and have a registration
    /// later are sent to the receiver, and the empty namespace when relays appear, which may have any.
    pub(crate) fn new(store: Arc<EtcdStore>, limits: LookupLimits) -> (Arc<Self>, mpsc::Receiver<Namespace>) {
        let (appeared, receiver) = mpsc::channel(MAX_APPEARED);
        let directory = Self {
            store,
            cache: Mutex::new(LookupCache::new(limits)),
            published: Mutex::default(),
            dirty: Notify::new(),
            turns: Mutex::default(),
            relays: Mutex::default(),
            failure: Mutex::default(),
            is_followed: AtomicBool::new(false),
            appeared,
            counts: Mutex::default(),
        };
        (Arc::new(directory), receiver)
    }

    /// Notes whether a namespace has a publisher at this relay. The registration is written or removed soon.
    pub fn set_published(&self, namespace: &Namespace, is_published: bool) {
        let mut published = self.published.lock();
        let is_change = match is_published {
            true if published.all.contains(namespace) => false,
            true if published.all.len() >= MAX_REGISTERED => {
                let refused = &mut self.counts.lock().refused;
                if *refused == 0 {
                    warn!(namespace = %namespace.typed(), "not registering a namespace: {MAX_REGISTERED} are registered");
                }
                *refused += 1;
                false
            }
            true => published.all.insert(namespace.clone()),
            false => published.all.remove(namespace),
        };
        if is_change {
            published.dirty.insert(namespace.clone());
            self.dirty.notify_one();
        }
    }

    /// Keeps the registrations of the relay with this record under its lease. Never returns.
    pub(crate) async fn register(
        &self,
        record: &RelayRecord,
        lease: &EtcdNumber,
    ) -> std::convert::Infallible {
        {
            // etcd has removed what was bound to an earlier lease.
            let published = &mut *self.published.lock();
            published.registered.clear();
            published.dirty.clone_from(&published.all);
        }
        let mut pause = BATCH_PAUSE;
        loop {
            let batch = self.next_batch();
            if batch.is_empty() {
                self.dirty.notified().await;
                continue;
            }
            let changes: Vec<_> = batch
                .iter()
                .map(|(namespace, is_published)| (namespace.to_string(), *is_published))
                .collect();
            let written = self.store.write_namespaces(&record.key(), record.run, lease, &changes).await;
            pause = match &written {
                Ok(()) => BATCH_PAUSE,
                Err(_) => (pause.max(FIRST_PAUSE) * 2).min(LONGEST_PAUSE),
            };
            self.note_batch(batch, written);
            time::sleep(pause).await;
        }
    }

    /// Returns namespaces whose registration has to be written (true) or removed.
    fn next_batch(&self) -> Vec<(Namespace, bool)> {
        let published = &mut *self.published.lock();
        let dirty = std::iter::from_fn(|| published.dirty.pop_first()).take(BATCH);
        dirty.map(|namespace| (namespace.clone(), published.all.contains(&namespace))).collect()
    }

    fn note_batch(&self, batch: Vec<(Namespace, bool)>, written: Result<(), StoreError>) {
        let published = &mut *self.published.lock();
        let failure = written.err().map(|error| error.to_string());
        for (namespace, is_published) in batch {
            match (&failure, is_published) {
                (Some(_), _) => published.dirty.insert(namespace),
                (None, true) => published.registered.insert(namespace),
                (None, false) => published.registered.remove(&namespace),
            };
        }
        self.counts.lock().failed_writes += u64::from(failure.is_some());
        if let Some(error) = failure.as_ref().filter(|_| published.failure != failure) {
            warn!(error, "cannot register namespaces in the discovery store: trying again");
        }
        published.failure = failure;
    }

    /// Sets the relays whose registrations are used.
    pub(crate) fn set_relays(&self, found: &Arc<[RelayRecord]>) {
        let mut relays = self.relays.lock();
        let told = |relay: &RelayRecord| (relay.url.clone(), relay.run, relay.publishes);
        if !relays.all.iter().map(told).eq(found.iter().map(told)) {
            // A relay that was not known, or had no publishers, was not asked for its registrations.
            relays.changes += 1;
            self.cache.lock().forget_negatives();
            // All that waits asks again. This fails if so much has appeared already that it does so anyway.
            let _ = self.appeared.try_send(Namespace::default());
        }
        relays.all = Arc::clone(found);
    }

    /// Follows the changes of registrations. Never returns.
    pub(crate) async fn follow(&self) -> std::convert::Infallible {
        let mut pause = FIRST_PAUSE;
        // The first revision of etcd whose changes were not seen yet. `None` if that is unknown.
        let mut next = None;
        loop {
            let followed = self.follow_from(&mut next).await;
            match followed {
                Ok(()) => pause = FIRST_PAUSE,
                Err(error) => {
                    if self.is_followed.swap(false, Relaxed) {
                        info!(%error, "changes of registered namespaces do not arrive: asking again");
                    }
                    time::sleep(pause).await;
                    pause = (pause * 2).min(LONGEST_PAUSE);
                }
            }
        }
    }

    /// Follows changes until it is time for a new watch, since the connection may be dead.
    async fn follow_from(&self, next: &mut Option<u64>) -> Result<(), StoreError> {
        let from = match *next {
            Some(next) => next,
            None => {
                let from = self.store.revision().await? + 1;
                self.cache.lock().clear();
                *next.insert(from)
            }
        };
        let mut watch = self.store.watch_namespaces(from).await?;
        let confirmed = time::timeout(OBSERVATION, watch.next()).await;
        let confirmed = confirmed.map_err(|_| StoreError::Late("the watch".to_owned()))??;
        // A store that was restored from a copy is behind what it was.
        if confirmed.is_canceled || confirmed.revision + 1 < from {
            *next = None;
            return Ok(());
        }
        self.is_followed.store(true, Relaxed);
        let over = time::Instant::now() + OBSERVATION;
        let mut latest = from;
        while let Ok(message) = time::timeout_at(over, watch.next()).await {
            let message = message?;
            if message.is_canceled {
                *next = None;
                return Ok(());
            }
            for change in message.changes {
                latest = latest.max(change.revision + 1);
                self.take(change).await;
                *next = Some(latest);
            }
        }
        // What was written before the watch was confirmed has arrived by now.
        *next = Some(latest.max(confirmed.revision + 1));
        Ok(())
    }

    async fn take(&self, change: StoredKey) {
        let Some((key, state)) = registration(&change) else { return };
        let appeared = self.cache.lock().apply(&key, state);
        if appeared {
            let _ = self.appeared.send(key.namespace).await; // fails if nobody waits for namespaces
        }
    }

    /// Returns the relays that have a publisher of a namespace or of a prefix of it, each with the longest prefix that
    /// it has registered.
    ///
    /// # Errors
    /// Fails if neither memory nor etcd has an answer.
    pub async fn lookup(&self, namespace: &Namespace) -> Result<Vec<(Namespace, RelayRecord)>, LookupError> {
        if let Some(relays) = self.remembered(namespace) {
            return Ok(relays);
        }
        let place = LookupPlace::new(self, namespace);
        let _turn = place.turn.lock().await;
        self.look_up(namespace).await
    }

    async fn look_up(&self, namespace: &Namespace) -> Result<Vec<(Namespace, RelayRecord)>, LookupError> {
        if let Some(relays) = self.remembered(namespace) {
            return Ok(relays);
        }
        let recent = |(at, _): &&(Instant, String)| at.elapsed() < FAILURE_PAUSE;
        if let Some((_, reason)) = self.failure.lock().as_ref().filter(recent) {
            self.counts.lock().failed += 1;
            return Err(LookupError::Store(reason.clone()));
        }
        let (relays, changes) = {
            let relays = self.relays.lock();
            let publishing = relays.all.iter().filter(|relay| relay.publishes);
            (publishing.map(RelayRecord::key).collect::<Vec<_>>(), relays.changes)
        };
        let names: Vec<_> = namespace.prefixes().map(|prefix| prefix.to_string()).collect();
        let requests = (relays.len() * names.len()).div_ceil(MAX_OPERATIONS);
        if !self.cache.lock().admit(requests, Instant::now()) {
            self.counts.lock().limited += 1;
            return Err(LookupError::TooMany);
        }
        let lookup = Lookup { directory: self, namespace };
        self.cache.lock().begin(namespace);
        let found = match self.store.read_namespaces(&relays, &names).await {
            Ok(found) => found,
            Err(error) => {
                self.counts.lock().failed += 1;
                let reason = error.to_string();
                *self.failure.lock() = Some((Instant::now(), reason.clone()));
                return Err(LookupError::Store(reason));
            }
        };
        let mut cache = self.cache.lock();
        cache.answer(namespace, found.iter().filter_map(registration));
        let found = || {
            found.iter().filter_map(registration).filter_map(|(key, state)| Some((key, state.run?))).collect()
        };
        // The entry is missing if the cache was cleared in the meantime. The answer is good for this lookup.
        let known: Vec<_> = cache.recall(namespace).unwrap_or_else(found);
        if known.is_empty() && self.relays.lock().changes != changes {
            cache.forget(namespace);
        }
        drop(cache);
        drop(lookup);
        let usable = self.usable(&known);
        let counts = &mut *self.counts.lock();
        *(if usable.is_empty() { &mut counts.absent } else { &mut counts.found }) += 1;
        Ok(usable)
    }

    /// Answers a lookup from memory. The absence of registrations counts only while changes are followed.
    fn remembered(&self, namespace: &Namespace) -> Option<Vec<(Namespace, RelayRecord)>> {
        let known = self.cache.lock().known(namespace)?;
        let usable = self.usable(&known);
        if usable.is_empty() && !self.is_followed.load(Relaxed) {
            return None;
        }
        let counts = &mut *self.counts.lock();
        *(if usable.is_empty() { &mut counts.negatives } else { &mut counts.hits }) += 1;
        Some(usable)
    }

    /// Returns the relays whose present run has made one of these registrations, in their order.
    fn usable(&self, known: &[(RegistrationKey, u64)]) -> Vec<(Namespace, RelayRecord)> {
        let relays = Arc::clone(&self.relays.lock().all);
        let mut usable: Vec<(Namespace, RelayRecord)> = Vec::new();
        for (key, run) in known {
            let relay = relays.iter().find(|relay| relay.key() == key.relay && relay.run == *run);
            let is_new = |relay: &&RelayRecord| !usable.iter().any(|(_, other)| other.url == relay.url);
            if let Some(relay) = relay.filter(is_new) {
                usable.push((key.namespace.clone(), relay.clone()));
            }
        }
        usable
    }

    /// Returns the registrations of a namespace that are in memory, each with whether it is of its relay's present run.
    /// Returns `None` if the namespace is not in memory.
    pub fn recall(&self, namespace: &Namespace) -> Option<Vec<(RegistrationKey, bool)>> {
        let known = self.cache.lock().recall(namespace)?;
        let judge = |one: (RegistrationKey, u64)| {
            let is_usable = !self.usable(std::slice::from_ref(&one)).is_empty();
            (one.0, is_usable)
        };
        Some(known.into_iter().map(judge).collect())
    }

    /// Returns what the directory has done, and what it knows.
    pub fn status(&self) -> LookupStatus {
        let published = self.published.lock();
        let (known, known_absent, evicted) = self.cache.lock().size();
        LookupStatus {
            followed: self.is_followed.load(Relaxed),
            registered: published.registered.len() as u64,
            unwritten: published.dirty.len() as u64,
            known: known as u64,
            known_absent: known_absent as u64,
            evicted,
            ..*self.counts.lock()
        }
    }
}

/// Reads a registration. Keys and values that no relay writes are ignored.
fn registration(stored: &StoredKey) -> Option<(RegistrationKey, RegistrationState)> {
    let (relay, namespace) = stored.key.split_once('/')?;
    if relay.len() > MAX_HOST {
        return None; // keys in memory are bounded, whatever is in the store
    }
    let key = RegistrationKey { namespace: namespace.parse().ok()?, relay: relay.to_owned() };
    let run = match stored.is_removed {
        true => None,
        false => Some(str::from_utf8(&stored.value).ok()?.parse().ok()?),
    };
    Some((key, RegistrationState { revision: stored.revision, run }))
}

#[cfg(test)]
mod tests {
    use rustls::{ClientConfig, RootCertStore, crypto::ring};
    use tokio::net::TcpListener;

    use super::*;
    use crate::{http::HttpClient, store::EtcdConfig};

    #[tokio::test]
    async fn cancelled_lookups_leave_nothing() {
        let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let endpoint = format!("http://{}", silent.local_addr().unwrap()).parse().unwrap();
        let tls = ClientConfig::builder_with_provider(ring::default_provider().into());
        let tls = tls.with_safe_default_protocol_versions().unwrap();
        let tls = tls.with_root_certificates(RootCertStore::empty()).with_no_client_auth();
        let config = EtcdConfig {
            endpoints: vec![endpoint],
            prefix: "/relays/".into(),
            user: None,
            lease: Duration::from_secs(2),
        };
        let store = Arc::new(EtcdStore::new(HttpClient::new(Arc::new(tls)), &config));
        let (directory, _appeared) = EtcdDirectory::new(store, LookupLimits { entries: 10, per_second: 10 });
        let url = "moqt://other:4443".parse().unwrap();
        let other = RelayRecord { publishes: true, ..RelayRecord::from_url(url).unwrap() };
        directory.set_relays(&vec![other].into());
        let namespace = Namespace::from_path("live/cam").unwrap();
        tokio::select! {
            biased;
            // The second lookup of the namespace waits for its turn.
            _ = async { tokio::join!(directory.lookup(&namespace), directory.lookup(&namespace)) } => {
                panic!("etcd has not answered")
            }
            accepted = silent.accept() => drop(accepted.unwrap()),
        }
        assert!(directory.turns.lock().is_empty());
        assert_eq!(directory.cache.lock().size(), (0, 0, 0));
    }
}
