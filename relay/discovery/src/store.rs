//! Requests to etcd through its JSON gateway.

use std::{
    collections::BTreeMap,
    sync::atomic::{AtomicUsize, Ordering::Relaxed},
    time::Duration,
};

use base64::{Engine as _, engine::general_purpose::STANDARD as BASE64};
use hyper::StatusCode;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use serde_json::{Value, json};
use tracing::debug;
use url::Url;

use crate::{
    http::{HttpClient, StoreError, StreamedAnswer},
    record::RelayRecord,
};

/// Longest wait for a change before all records are read again, since the connection to etcd may be dead.
pub const OBSERVATION: Duration = Duration::from_secs(30);
/// The first pause between attempts to reach etcd after a failure. The pause doubles with each further failure, up to
/// [`LONGEST_PAUSE`].
pub const FIRST_PAUSE: Duration = Duration::from_millis(500);
pub const LONGEST_PAUSE: Duration = Duration::from_secs(10);
/// Largest size of one message of a watch, in bytes.
const MAX_MESSAGE: usize = 8 << 20;
/// Largest number of operations in one transaction of etcd with its default settings.
pub const MAX_OPERATIONS: usize = 128;

/// The addresses of etcd, and the settings of this relay's record in it.
#[derive(Clone, Debug)]
pub struct EtcdConfig {
    /// The URLs at which etcd's members answer clients, such as `https://etcd-1.example:2379`.
    pub endpoints: Vec<Url>,
    /// The beginning of the records' keys, such as `/millrace/relays/`.
    pub prefix: String,
    /// The user of etcd that requests are sent as. `None` if etcd asks for none.
    pub user: Option<EtcdUser>,
    /// Length of the record's lease: the record remains for this long after this relay has died.
    pub lease: Duration,
}

/// A user of etcd. etcd's gateway does not take a user's name from a certificate, so a password is needed.
#[derive(Clone, Serialize)]
pub struct EtcdUser {
    /// The user's name.
    pub name: String,
    /// The user's password.
    pub password: String,
}

impl std::fmt::Debug for EtcdUser {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EtcdUser").field("name", &self.name).finish_non_exhaustive()
    }
}

/// The members of etcd, and the beginnings of the keys in it.
#[derive(Debug)]
pub struct EtcdStore {
    client: HttpClient,
    user: Option<EtcdUser>,
    /// The token of the user, from the last time that it was asked for.
    token: Mutex<Option<String>>,
    endpoints: Vec<Url>,
    /// Index of the endpoint that answered last.
    current: AtomicUsize,
    /// The beginning of the keys of relays' records.
    records: String,
    /// The beginning of the keys of registered namespaces.
    namespaces: String,
}

/// A number in etcd's JSON, which the gateway writes as a string.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EtcdNumber(String);

impl EtcdNumber {
    fn value(&self) -> u64 {
        self.0.parse().unwrap_or_default()
    }
}

/// A key of etcd. In a change that removes the key, the value is empty.
#[derive(Debug)]
pub struct StoredKey {
    /// The key, without the prefix that it was asked for with.
    pub key: String,
    pub value: Vec<u8>,
    /// The revision of etcd that wrote or removed the key.
    pub revision: u64,
    pub is_removed: bool,
}

#[derive(Deserialize)]
struct Header {
    revision: EtcdNumber,
}

#[derive(Deserialize)]
struct Authenticated {
    token: String,
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
    mod_revision: EtcdNumber,
}

/// The outcome of a transaction. etcd's JSON leaves out fields that are false or empty.
#[derive(Deserialize)]
struct Transacted {
    #[serde(default)]
    succeeded: bool,
    #[serde(default)]
    responses: Vec<TransactionResponse>,
}

#[derive(Deserialize)]
struct TransactionResponse {
    response_range: Option<Ranged>,
}

#[derive(Deserialize)]
struct Watched {
    header: Header,
    #[serde(default)]
    canceled: bool,
    #[serde(default)]
    events: Vec<WatchEvent>,
}

#[derive(Deserialize)]
struct WatchEvent {
    #[serde(default, rename = "type")]
    kind: String,
    kv: KeyValue,
}

#[derive(Deserialize)]
struct Done {}

/// A watch on the registered namespaces.
pub struct EtcdWatch {
    answer: StreamedAnswer,
    unread: Vec<u8>,
    prefix: String,
}

/// A message of a watch.
pub struct WatchMessage {
    /// The revision of etcd when it sent the message.
    pub revision: u64,
    /// True if etcd has ended the watch, since it does not have the changes any more that the watch began with.
    pub is_canceled: bool,
    pub changes: Vec<StoredKey>,
}

impl KeyValue {
    fn decoded(self, host: &str, prefix: &str, is_removed: bool) -> Result<StoredKey, StoreError> {
        let decode = |text: &str| {
            BASE64.decode(text).map_err(|_| StoreError::failed(host, "a key or value is not Base64"))
        };
        let key = String::from_utf8_lossy(&decode(&self.key)?).into_owned();
        let key = key.strip_prefix(prefix).unwrap_or_default().to_owned();
        Ok(StoredKey { key, value: decode(&self.value)?, revision: self.mod_revision.value(), is_removed })
    }
}

fn range(prefix: &str) -> Value {
    // etcd's ranges exclude their end, which is the prefix with its last byte plus one.
    let mut end = prefix.as_bytes().to_vec();
    if let Some(last) = end.last_mut() {
        *last += 1;
    }
    json!({ "key": BASE64.encode(prefix), "range_end": BASE64.encode(end) })
}

impl EtcdStore {
    pub fn new(client: HttpClient, config: &EtcdConfig) -> Self {
        let EtcdConfig { endpoints, prefix, user, .. } = config.clone();
        // The registrations are not below the records' prefix, since each change of a record has all of them read.
        let namespaces = format!("{}-namespaces/", prefix.strip_suffix('/').unwrap_or(&prefix));
        let current = AtomicUsize::new(0);
        Self { client, user, token: Mutex::default(), endpoints, current, records: prefix, namespaces }
    }

    /// Asks one endpoint after the other, beginning with the one that answered last. Returns the first answer. If an
    /// endpoint refuses the request as faulty, no other endpoint is asked.
    async fn send(&self, path: &str, body: &impl Serialize) -> Result<StreamedAnswer, StoreError> {
        let body = serde_json::to_vec(body).unwrap_or_default();
        let mut failure = None;
        let first = self.current.load(Relaxed);
        for turn in 0..self.endpoints.len() {
            let index = (first + turn) % self.endpoints.len();
            match self.send_to(&self.endpoints[index], path, &body).await {
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

    async fn send_to(&self, endpoint: &Url, path: &str, body: &[u8]) -> Result<StreamedAnswer, StoreError> {
        let at = |path| endpoint.join(path).map_err(|error| StoreError::failed(endpoint.as_str(), error));
        let url = at(path)?;
        let known = self.token.lock().clone();
        let answer = match (&self.user, known) {
            (None, _) => return self.client.send(&url, Some(body.to_vec())).await,
            (Some(_), Some(token)) => {
                Some(self.client.send_as(&url, Some(body.to_vec()), Some(&token)).await)
            }
            (Some(_), None) => None,
        };
        // Tokens end after a while, and when a member of etcd starts again.
        let is_old =
            |error: &StoreError| matches!(error, StoreError::Status { status: StatusCode::UNAUTHORIZED, .. });
        match answer {
            Some(answer) if !answer.as_ref().is_err_and(is_old) => answer,
            _ => {
                let user = json!(self.user).to_string().into_bytes();
                let granted = self.client.send(&at("/v3/auth/authenticate")?, Some(user)).await?;
                let Authenticated { token } = granted.json().await?;
                *self.token.lock() = Some(token.clone());
                self.client.send_as(&url, Some(body.to_vec()), Some(&token)).await
            }
        }
    }

    async fn call<T: DeserializeOwned>(&self, path: &str, body: &impl Serialize) -> Result<T, StoreError> {
        self.send(path, body).await?.json().await
    }

    pub async fn grant(&self, lease: Duration) -> Result<EtcdNumber, StoreError> {
        let granted: Granted =
            self.call("/v3/lease/grant", &json!({ "TTL": lease.as_secs().to_string() })).await?;
        Ok(granted.id)
    }

    /// Extends a lease.
    pub async fn keep_alive(&self, lease: &EtcdNumber) -> Result<(), StoreError> {
        let kept: Streamed<KeptAlive> = self.call("/v3/lease/keepalive", &json!({ "ID": lease })).await?;
        // etcd's JSON leaves out fields that are zero, so a missing TTL means that the lease has ended.
        match kept.result.ttl {
            Some(EtcdNumber(left)) if left != "0" => Ok(()),
            _ => Err(StoreError::LeaseOver),
        }
    }

    pub async fn revoke(&self, lease: &EtcdNumber) -> Result<(), StoreError> {
        let _: Done = self.call("/v3/lease/revoke", &json!({ "ID": lease })).await?;
        Ok(())
    }

    /// Writes a relay's record. If `is_new`, only where no record stands under the relay's key.
    ///
    /// # Errors
    /// [`StoreError::Superseded`] if there is a record, and the record must be new.
    pub async fn put(
        &self,
        record: &RelayRecord,
        lease: &EtcdNumber,
        is_new: bool,
    ) -> Result<(), StoreError> {
        // etcd's JSON gateway takes keys and values in Base64.
        let key = self.record_key(&record.key());
        let value = BASE64.encode(serde_json::to_vec(record).unwrap_or_default());
        let free = json!({ "target": "VERSION", "key": key, "version": "0" });
        let put = json!({ "request_put": { "key": key, "value": value, "lease": lease } });
        let compare: Vec<_> = is_new.then_some(free).into_iter().collect();
        let done: Transacted =
            self.call("/v3/kv/txn", &json!({ "compare": compare, "success": [put] })).await?;
        if done.succeeded { Ok(()) } else { Err(StoreError::Superseded) }
    }

    fn record_key(&self, relay: &str) -> String {
        BASE64.encode(format!("{}{relay}", self.records))
    }

    /// Returns the relays' records by the ends of their keys, and the revision of etcd at which they were read.
    pub async fn list(&self) -> Result<(BTreeMap<String, Vec<u8>>, u64), StoreError> {
        let answer = self.send("/v3/kv/range", &range(&self.records)).await?;
        let host = answer.host().to_owned();
        let Ranged { header, kvs } = answer.json().await?;
        let mut records = BTreeMap::new();
        for stored in kvs {
            let StoredKey { key, value, .. } = stored.decoded(&host, &self.records, false)?;
            records.insert(key, value);
        }
        Ok((records, header.revision.value()))
    }

    /// Waits until a record changes in a revision of etcd after `revision`.
    pub async fn until_change(&self, revision: u64) -> Result<(), StoreError> {
        let mut watch = self.watch(&self.records, revision + 1).await?;
        // The first message confirms the watch. Any further one means a change, or that the watch has ended.
        watch.next().await?;
        watch.next().await.map(drop)
    }

    async fn watch(&self, prefix: &str, from: u64) -> Result<EtcdWatch, StoreError> {
        let mut request = range(prefix);
        request["start_revision"] = json!(from.to_string());
        let answer = self.send("/v3/watch", &json!({ "create_request": request })).await?;
        Ok(EtcdWatch { answer, unread: Vec::new(), prefix: prefix.to_owned() })
    }

    /// Watches the registered namespaces of all relays, from the revision `from` on.
    pub async fn watch_namespaces(&self, from: u64) -> Result<EtcdWatch, StoreError> {
        self.watch(&self.namespaces, from).await
    }

    /// Returns the present revision of etcd.
    pub async fn revision(&self) -> Result<u64, StoreError> {
        let mut request = range(&self.namespaces);
        request["count_only"] = true.into();
        let Ranged { header, .. } = self.call("/v3/kv/range", &request).await?;
        Ok(header.revision.value())
    }

    /// Writes and removes registrations of a relay in one transaction, at most [`MAX_OPERATIONS`]. Each change is the
    /// end of a key, and whether it is written. Keys are bound to `lease`.
    ///
    /// # Errors
    /// [`StoreError::Superseded`] if the relay's record is not bound to the lease, because another run wrote it.
    pub async fn write_namespaces(
        &self,
        relay: &str,
        run: u64,
        lease: &EtcdNumber,
        changes: &[(String, bool)],
    ) -> Result<(), StoreError> {
        let own = json!({ "target": "LEASE", "key": self.record_key(relay), "lease": lease });
        let value = BASE64.encode(run.to_string());
        let change = |(namespace, is_written): &(String, bool)| {
            let key = self.namespace_key(relay, namespace);
            match is_written {
                true => json!({ "request_put": { "key": key, "value": value, "lease": lease } }),
                false => json!({ "request_delete_range": { "key": key } }),
            }
        };
        let changes: Vec<_> = changes.iter().map(change).collect();
        let done: Transacted =
            self.call("/v3/kv/txn", &json!({ "compare": [own], "success": changes })).await?;
        if done.succeeded { Ok(()) } else { Err(StoreError::Superseded) }
    }

    fn namespace_key(&self, relay: &str, namespace: &str) -> String {
        BASE64.encode(format!("{}{relay}/{namespace}", self.namespaces))
    }

    /// Returns which of these relays have registered which of these namespaces. Each request to etcd asks for at most
    /// [`MAX_OPERATIONS`] keys.
    pub async fn read_namespaces(
        &self,
        relays: &[String],
        namespaces: &[String],
    ) -> Result<Vec<StoredKey>, StoreError> {
        let keys = relays
            .iter()
            .flat_map(|relay| namespaces.iter().map(|namespace| self.namespace_key(relay, namespace)));
        let gets: Vec<_> = keys.map(|key| json!({ "request_range": { "key": key } })).collect();
        let mut found = Vec::new();
        for gets in gets.chunks(MAX_OPERATIONS) {
            let answer = self.send("/v3/kv/txn", &json!({ "success": gets })).await?;
            let host = answer.host().to_owned();
            let Transacted { responses, .. } = answer.json().await?;
            let ranges = responses.into_iter().filter_map(|response| response.response_range);
            for stored in ranges.flat_map(|range| range.kvs) {
                found.push(stored.decoded(&host, &self.namespaces, false)?);
            }
        }
        Ok(found)
    }
}

impl EtcdWatch {
    /// Waits for the next message. The first one confirms the watch. Cancel safe.
    pub async fn next(&mut self) -> Result<WatchMessage, StoreError> {
        let Self { answer, unread, prefix } = self;
        let end = loop {
            if let Some(end) = unread.iter().position(|byte| *byte == b'\n') {
                break end;
            }
            match answer.piece().await? {
                Some(piece) if unread.len() + piece.len() <= MAX_MESSAGE => unread.extend(piece),
                Some(_) => {
                    return Err(StoreError::failed(answer.host(), "a message of the watch is too long"));
                }
                None => return Err(StoreError::failed(answer.host(), "the watch was ended")),
            }
        };
        let line: Vec<_> = unread.drain(..=end).collect();
        let host = answer.host();
        let message: Result<Streamed<Watched>, _> = serde_json::from_slice(&line);
        let message = message
            .map_err(|error| StoreError::failed(host, format_args!("not a message of a watch: {error}")))?;
        let Watched { header, canceled, events } = message.result;
        let changes = events.into_iter().map(|event| event.kv.decoded(host, prefix, event.kind == "DELETE"));
        let changes = changes.collect::<Result<_, _>>()?;
        Ok(WatchMessage { revision: header.revision.value(), is_canceled: canceled, changes })
    }
}
