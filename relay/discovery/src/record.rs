//! The record of a relay, in the form in which a store keeps it.

use serde::{Deserialize, Serialize};
use url::Url;

/// Largest number of relays that are used from a store.
pub const MAX_RELAYS: usize = 1000;
/// Largest size of a record that is accepted, in bytes. The records that this relay writes are smaller.
const MAX_RECORD: usize = 4096;
const MAX_REGION: usize = 64;

/// A relay of the cluster, as a discovery store lists it.
///
/// ```
/// use millrace_relay_discovery::RelayRecord;
///
/// let record = RelayRecord::from_json(br#"{"url":"moqt://relay-a.example:4443","region":"eu"}"#)?;
/// assert_eq!((record.url.as_str(), record.region.as_deref()), ("moqt://relay-a.example:4443", Some("eu")));
/// assert!(RelayRecord::from_json(br#"{"url":"http://relay-a.example"}"#).is_err());
/// # Ok::<(), millrace_relay_discovery::RecordError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct RelayRecord {
    /// The address for other relays: `moqt://HOST:PORT`, or `https://` for WebTransport.
    pub url: Url,
    /// The region of the relay. Receiving from a relay of another region costs more.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub region: Option<String>,
    /// A random number that each run of a relay chooses, so that it can tell its own record from that of another run or
    /// relay.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub run: u64,
    /// True once the relay is shutting down. Other relays do not connect to it any more.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub draining: bool,
    /// True once the relay has had a publisher. Only such relays are looked at for registered namespaces.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub publishes: bool,
    /// True while the relay has nearly as many sessions as it may have. Relays connect to another one if they can.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub full: bool,
    /// The cost of receiving from the relay; 1 without it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cost: Option<u64>,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes references")]
fn is_zero(run: &u64) -> bool {
    *run == 0
}

/// The reason why a record cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    /// The record is not a relay's record in JSON.
    #[error("not a relay's record: {0}")]
    Json(#[from] serde_json::Error),
    /// The URL in the record is not a valid URL of a relay.
    #[error(transparent)]
    Url(#[from] RelayUrlError),
    /// The record has too many bytes.
    #[error("a record has {0} bytes, and may have {MAX_RECORD}")]
    TooLong(usize),
    /// The name of the relay's region has too many bytes.
    #[error("the region's name has {0} bytes, and may have {MAX_REGION}")]
    LongRegion(usize),
    /// The record is under a key that belongs to another relay's URL.
    #[error("the record of {url} stands under the key {key}, which is another relay's")]
    WrongKey {
        /// The URL in the record.
        url: Url,
        /// The key under which the record was found.
        key: String,
    },
}

/// The reason why a URL is not a valid URL of a relay.
#[derive(Debug, thiserror::Error)]
pub enum RelayUrlError {
    /// The URL's scheme is neither `moqt` nor `https`.
    #[error("{0} is no relay's URL: it begins with moqt:// or https://")]
    Scheme(Url),
    /// The URL has no host.
    #[error("{0} has no host")]
    Host(Url),
    /// The URL has a user name, password, query or fragment, which may be secret.
    #[error("{0} has more than a host, a port and a path")]
    Parts(String),
}

/// Checks that a URL is a valid URL of a relay, and contains no secret.
///
/// # Errors
/// Fails for the reasons that [`RelayUrlError`] lists.
pub fn check_url(url: &Url) -> Result<(), RelayUrlError> {
    if !matches!(url.scheme(), "moqt" | "https") {
        return Err(RelayUrlError::Scheme(url.clone()));
    }
    if url.host_str().is_none_or(str::is_empty) {
        return Err(RelayUrlError::Host(url.clone()));
    }
    let is_bare = url.username().is_empty() && url.password().is_none();
    // User names, passwords, queries and fragments may be secrets, and all relays of the cluster read the record.
    if !is_bare || url.query().is_some() || url.fragment().is_some() {
        return Err(RelayUrlError::Parts(url.authority().to_owned()));
    }
    Ok(())
}

impl RelayRecord {
    /// Reads a record.
    ///
    /// # Errors
    /// Fails if the record is too long, is not the JSON of a relay, or has an invalid URL.
    pub fn from_json(json: &[u8]) -> Result<Self, RecordError> {
        if json.len() > MAX_RECORD {
            return Err(RecordError::TooLong(json.len()));
        }
        let record: Self = serde_json::from_slice(json)?;
        record.checked()
    }

    /// Returns the record of a relay from its URL alone.
    ///
    /// # Errors
    /// Fails if the URL is not a valid URL of a relay.
    pub fn from_url(url: Url) -> Result<Self, RecordError> {
        Self { url, region: None, run: 0, draining: false, publishes: false, full: false, cost: None }
            .checked()
    }

    pub(crate) fn checked(self) -> Result<Self, RecordError> {
        check_url(&self.url)?;
        match &self.region {
            Some(region) if region.len() > MAX_REGION => Err(RecordError::LongRegion(region.len())),
            _ => Ok(self),
        }
    }

    /// Returns the last part of the record's key: host and port. So a role in etcd can be limited to the record of one
    /// relay.
    pub fn key(&self) -> String {
        self.url.authority().to_owned()
    }

    /// Returns the rank of the relay among those that have the same namespace, for a relay of the region `own`: the
    /// smallest is the nearest. Receiving from another region costs `region_cost` in addition.
    pub fn rank(&self, own: Option<&str>, region_cost: u64) -> impl Ord + use<> {
        // A relay without a region counts as near, so clusters that name no regions have no additional cost.
        let is_far = matches!((&self.region, own), (Some(its), Some(own)) if its != own);
        let cost = self.cost.unwrap_or(1).saturating_add(if is_far { region_cost } else { 0 });
        (self.draining, self.full, cost, self.run)
    }

    /// Reports whether this relay is the one that connects, so that two relays have one session between them. The relay
    /// whose URL is later in alphabetical order connects. A relay without a URL of its own connects to all others.
    pub fn is_dialed_by(&self, own: Option<&Url>) -> bool {
        !self.draining && own.is_none_or(|own| own.as_str() > self.url.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(url: &str) -> RelayRecord {
        RelayRecord::from_url(url.parse().unwrap()).unwrap()
    }

    #[test]
    fn relay_discovery_record_survives_json_round_trip() {
        let own = RelayRecord { region: Some("eu".into()), run: u64::MAX, ..record("moqt://relay-a:4443") };
        let json = serde_json::to_vec(&own).unwrap();
        assert_eq!(RelayRecord::from_json(&json).unwrap(), own);
        assert_eq!(own.key(), "relay-a:4443");
        let draining = RelayRecord { draining: true, ..own };
        assert!(RelayRecord::from_json(&serde_json::to_vec(&draining).unwrap()).unwrap().draining);
    }

    #[test]
    fn unusable_records_are_refused_with_the_reason() {
        let long = format!(r#"{{"url":"moqt://a","region":"{}"}}"#, "x".repeat(MAX_REGION + 1));
        let longer = format!(r#"{{"url":"moqt://a","note":"{}"}}"#, "x".repeat(MAX_RECORD));
        let cases = [
            ("", "not a relay's record"),
            ("[]", "not a relay's record"),
            (r#"{"url":"no url"}"#, "not a relay's record"),
            (r#"{"url":"http://a"}"#, "begins with moqt:// or https://"),
            (r#"{"url":"moqt:///path"}"#, "has no host"),
            (r#"{"url":"moqt://user:secret@a"}"#, "has more than a host"),
            (r#"{"url":"https://a/?jwt=secret"}"#, "has more than a host"),
            (r#"{"url":"moqt://a","run":-1}"#, "not a relay's record"),
            (&long, "region's name has 65 bytes"),
            (&longer, "may have 4096"),
        ];
        for (json, wanted) in cases {
            let error = RelayRecord::from_json(json.as_bytes()).unwrap_err().to_string();
            assert!(error.contains(wanted), "{json}: {error}");
            assert!(!error.contains("jwt"), "{error}");
        }
    }

    #[test]
    fn of_two_discovered_relays_only_the_one_with_the_greater_url_dials() {
        let a = record("moqt://a:1");
        let b = record("moqt://b:1");
        assert!(a.is_dialed_by(Some(&b.url)) && !b.is_dialed_by(Some(&a.url)));
        assert!(!a.is_dialed_by(Some(&a.url)), "never itself");
        assert!(a.is_dialed_by(None));
        assert!(!RelayRecord { draining: true, ..a }.is_dialed_by(None));
    }
}
