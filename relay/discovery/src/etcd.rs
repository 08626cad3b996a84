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
//! | another run writes the record of this URL | leaves it there: the one that wrote last is the one that runs |
//! | the relay drains | marks its record, and removes it at the end |

use std::{
    collections::BTreeMap,
    sync::atomic::{AtomicUsize, Ordering::Relaxed},
    time::Duration,
};

use base64::{Engine as _, engine::general_purpose::STANDARD as BASE64};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use serde_json::json;
use tokio::{sync::watch, time};
use tracing::{debug, info};
use url::Url;

use crate::{
    http::{HttpClient, StoreError, StreamedAnswer},
    record::{RecordError, RelayRecord},
    state::{DiscoveryState, note_found, note_registered, note_unread, note_unregistered},
};

/// Longest wait for a change before all records are read again, since the connection to etcd may be dead.
const OBSERVATION: Duration = Duration::from_secs(30);
/// Time after a reported change in which further changes are awaited, so that they are read together.
const GATHER: Duration = Duration::from_millis(100);
/// The first pause between attempts to reach etcd after a failure. The pause doubles with each further failure, up to
/// [`LONGEST_PAUSE`].
const FIRST_PAUSE: Duration = Duration::from_millis(500);
const LONGEST_PAUSE: Duration = Duration::from_secs(10);

/// The addresses of etcd, and the settings of this relay's record in it.
#[derive(Clone, Debug)]
pub struct EtcdConfig {
    /// The URLs at which etcd's members answer clients, such as `https://etcd-1.example:2379`.
    pub endpoints: Vec<Url>,
    /// The beginning of the records' keys, such as `/millrace/relays/`.
    pub prefix: String,
    /// Length of the record's lease: the record remains for this long after this relay has died.
    pub lease: Duration,
}

/// Keeps this relay's record in etcd, and follows the records of other relays.
#[derive(Debug)]
pub struct EtcdDiscovery {
    store: EtcdStore,
    lease: Duration,
    /// The record that this relay should have in etcd; `None` if it should have none.
    own: watch::Receiver<Option<RelayRecord>>,
}

#[derive(Debug)]
struct EtcdStore {
    client: HttpClient,
    endpoints: Vec<Url>,
    /// Index of the endpoint that answered last.
    current: AtomicUsize,
    prefix: String,
}

/// A number in etcd's JSON, which the gateway writes as a string.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct EtcdNumber(String);

#[derive(Deserialize)]
struct Header {
    revision: EtcdNumber,
}

#[derive(Deserialize)]
struct Granted {
    #[serde(rename = "ID")]
    id: EtcdNumber,
}

/// The JSON object in which etcd's gateway wraps each message of a streaming response.
#[derive(Deserialize)]
struct Streamed<T> {
    result: T,
}

#[derive(Deserialize)]
struct KeptAlive {
    /// Seconds that are left of the lease. The field is missing if the lease has ended.
    #[serde(rename = "TTL")]
    ttl: Option<EtcdNumber>,
}

#[derive(Deserialize)]
struct Ranged {
    header: Header,
    #[serde(default)]
    kvs: Vec<KeyValue>,
}

#[derive(Deserialize)]
struct KeyValue {
    key: String,
    #[serde(default)]
    value: String,
}

#[derive(Deserialize)]
struct Done {}

impl EtcdStore {
    /// Asks one endpoint after the other, beginning with the one that answered last. Returns the first answer. If an
    /// endpoint refuses the request as faulty, no other endpoint is asked.
    async fn send(&self, path: &str, body: &impl Serialize) -> Result<StreamedAnswer, StoreError> {
        let body = serde_json::to_vec(body).unwrap_or_default();
        let mut failure = None;
        let first = self.current.load(Relaxed);
        for turn in 0..self.endpoints.len() {
            let index = (first + turn) % self.endpoints.len();
            let Ok(url) = self.endpoints[index].join(path) else { continue };
            match self.client.send(&url, Some(body.clone())).await {
                Ok(answer) => {
                    self.current.store(index, Relaxed);
                    return Ok(answer);
                }
                Err(error @ StoreError::Status { status, .. }) if status.is_client_error() => {
                    return Err(error);
                }
                Err(error) => {
                    debug!(%error, "a member of etcd does not answer");
                    failure = Some(error);
                }
            }
        }
        Err(failure.unwrap_or_else(|| StoreError::failed("etcd", "no endpoint has a usable URL")))
    }

    async fn call<T: DeserializeOwned>(&self, path: &str, body: &impl Serialize) -> Result<T, StoreError> {
        self.send(path, body).await?.json().await
    }

    async fn grant(&self, lease: Duration) -> Result<EtcdNumber, StoreError> {
        let granted: Granted =
            self.call("/v3/lease/grant", &json!({ "TTL": lease.as_secs().to_string() })).await?;
        Ok(granted.id)
    }

    /// Extends a lease.
    async fn keep_alive(&self, lease: &EtcdNumber) -> Result<(), StoreError> {
        let kept: Streamed<KeptAlive> = self.call("/v3/lease/keepalive", &json!({ "ID": lease })).await?;
        // etcd's JSON leaves out fields that are zero, so a missing TTL means that the lease has ended.
        match kept.result.ttl {
            Some(EtcdNumber(left)) if left != "0" => Ok(()),
            _ => Err(StoreError::LeaseOver),
        }
    }

    async fn revoke(&self, lease: &EtcdNumber) -> Result<(), StoreError> {
        let _: Done = self.call("/v3/lease/revoke", &json!({ "ID": lease })).await?;
        Ok(())
    }

    async fn put(&self, record: &RelayRecord, lease: &EtcdNumber) -> Result<(), StoreError> {
        // etcd's JSON gateway takes keys and values in Base64.
        let key = BASE64.encode(format!("{}{}", self.prefix, record.key()));
        let value = BASE64.encode(serde_json::to_vec(record).unwrap_or_default());
        let _: Done = self.call("/v3/kv/put", &json!({ "key": key, "value": value, "lease": lease })).await?;
        Ok(())
    }

    /// Returns all keys that begin with the prefix with their values, and the revision of etcd at which they were read.
    async fn list(&self) -> Result<(BTreeMap<String, Vec<u8>>, u64), StoreError> {
        let answer = self.send("/v3/kv/range", &self.range()).await?;
        let host = answer.host().to_owned();
        let Ranged { header, kvs } = answer.json().await?;
        let wrong = |problem| StoreError::failed(&host, problem);
        let revision = header.revision.0.parse().map_err(|_| wrong("a revision is no number"))?;
        let decode = |text: &str| BASE64.decode(text).map_err(|_| wrong("a key or value is not Base64"));
        let mut records = BTreeMap::new();
        for KeyValue { key, value } in kvs {
            let key = String::from_utf8_lossy(&decode(&key)?).into_owned();
            records.insert(key.strip_prefix(&self.prefix).unwrap_or_default().to_owned(), decode(&value)?);
        }
        Ok((records, revision))
    }

    fn range(&self) -> serde_json::Value {
        // etcd's ranges exclude their end, which is the prefix with its last byte plus one.
        let mut end = self.prefix.clone().into_bytes();
        if let Some(last) = end.last_mut() {
            *last += 1;
        }
        json!({ "key": BASE64.encode(&self.prefix), "range_end": BASE64.encode(end) })
    }

    /// Waits until a record changes in a revision of etcd after `revision`.
    async fn until_change(&self, revision: u64) -> Result<(), StoreError> {
        let mut request = self.range();
        // The watch begins at the revision after the listing, so that no change between the two calls is missed.
        request["start_revision"] = json!((revision + 1).to_string());
        let mut answer = self.send("/v3/watch", &json!({ "create_request": request })).await?;
        // The first message confirms the watch. Any further one means a change, or that the watch has ended.
        let mut messages = 0;
        while messages < 2 {
            match answer.piece().await? {
                Some(piece) => messages += piece.iter().filter(|byte| **byte == b'\n').count(),
                None => {
                    return Err(StoreError::failed(answer.host(), "the watch was ended"));
                }
            }
        }
        Ok(())
    }
}

impl EtcdDiscovery {
    /// Creates an [`EtcdDiscovery`] that keeps `own` in etcd.
    pub fn new(client: HttpClient, config: EtcdConfig, own: watch::Receiver<Option<RelayRecord>>) -> Self {
        let EtcdConfig { endpoints, prefix, lease } = config;
        Self { store: EtcdStore { client, endpoints, current: AtomicUsize::new(0), prefix }, lease, own }
    }

    /// Keeps the discovered relays in `found` up to date until all receivers of `found` are dropped.
    pub async fn run(self, found: &watch::Sender<DiscoveryState>) {
        tokio::join!(self.register(found), self.observe(found));
    }

    /// Keeps this relay's record in etcd.
    async fn register(&self, found: &watch::Sender<DiscoveryState>) {
        let mut own = self.own.clone();
        let mut pause = FIRST_PAUSE;
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
            match self.hold(record, &mut own, found, &mut pause).await {
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

    /// Writes the record under a new lease, and keeps the lease alive. Returns once the record is withdrawn.
    async fn hold(
        &self,
        record: RelayRecord,
        own: &mut watch::Receiver<Option<RelayRecord>>,
        found: &watch::Sender<DiscoveryState>,
        pause: &mut Duration,
    ) -> Result<(), StoreError> {
        let lease = self.store.grant(self.lease).await?;
        self.store.put(&record, &lease).await?;
        info!(key = record.key(), lease_s = self.lease.as_secs(), "wrote this relay's record to etcd");
        note_registered(found);
        // A success resets the pause, so that the next failure is followed by a quick attempt.
        *pause = FIRST_PAUSE;
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
                    match self.store.keep_alive(&lease).await {
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
                Some(record) => self.store.put(&record, &lease).await?,
                None => {
                    // etcd removes the record together with its lease.
                    self.store.revoke(&lease).await?;
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
