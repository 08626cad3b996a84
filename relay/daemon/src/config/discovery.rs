//! Reads the `[discovery]` table, which names the store that lists the cluster's relays. Only the settings file can
//! have this table.

use std::{path::PathBuf, time::Duration};

use millrace_daemon::duration;
use millrace_relay::access::pattern::Pattern;
use millrace_relay_discovery::ListPlace;
use serde::Deserialize;
use toml::{
    Spanned,
    de::{DeValue, ValueDeserializer},
};
use url::Url;

/// The name of the `[discovery]` table in the settings file.
pub const DISCOVERY: &str = "discovery";

const PREFIX: &str = "/millrace/relays/";
const LEASE: Duration = Duration::from_secs(10);
/// Allowed lengths of a lease. etcd grants no lease shorter than about 2 s, and a long lease keeps records of dead
/// relays.
const LEASES: std::ops::RangeInclusive<Duration> = Duration::from_secs(2)..=Duration::from_secs(3600);
const INTERVAL: Duration = Duration::from_secs(10);
const REGION_COST: u64 = 10;
const IDLE: Duration = Duration::from_secs(30);
const LOOKUP_RATE: u32 = 50;

/// The store that lists the relays of the cluster, and the settings for connecting to those relays.
#[derive(Clone, Debug)]
pub struct DiscoveryConfig {
    /// The store that lists the cluster's relays.
    pub store: DiscoveryStore,
    /// The URL by which other relays connect to this one (`cluster-url`).
    pub url: Option<Url>,
    /// Name of the location (site) of this relay, such as a data center.
    pub region: Option<String>,
    /// Cost of receiving from a relay of another site.
    pub region_cost: u64,
    /// Namespaces that relays found in the store may announce; empty for all.
    pub namespaces: Vec<Pattern>,
    /// How namespaces are looked up in the store. `None` if relays announce them to each other.
    pub lookup: Option<LookupConfig>,
    /// File with root certificates for the store's server; `None` for the system's.
    pub tls_root: Option<PathBuf>,
    /// Files with the certificate and private key of this relay as a client of the store.
    pub identity: Option<(PathBuf, PathBuf)>,
}

/// How a relay looks up namespaces in the store, and how long it keeps the sessions that it begins for them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LookupConfig {
    /// Time after which a session that nobody needs is closed.
    pub idle: Duration,
    /// Largest number of requests to the store in a second.
    pub rate: u32,
}

/// How a relay learns the namespaces of other relays.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum NamespaceRouting {
    /// Each relay has a session with each other one, and they announce namespaces in these.
    #[default]
    Mesh,
    /// Relays register namespaces in the store, look them up, and begin sessions on demand.
    Lookup,
}

/// The source of the list of the cluster's relays.
#[derive(Clone, Debug)]
#[allow(missing_docs, reason = "the variants describe their fields")]
pub enum DiscoveryStore {
    /// An etcd store at these URLs. It has a record for each relay, with a key that begins with `prefix`, and removes
    /// the record of a relay that has not renewed it for the time `lease`.
    /// The relay is the user of etcd with this name, and the password in this file.
    Etcd { endpoints: Vec<Url>, prefix: String, lease: Duration, user: Option<(String, PathBuf)> },
    /// A list of relays in a file or at a URL, read again every `interval`.
    List { place: ListPlace, interval: Duration },
}

/// The `[discovery]` table of the settings file.
#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct DiscoveryEntry {
    #[serde(default)]
    etcd: Vec<Url>,
    prefix: Option<String>,
    user: Option<String>,
    password_file: Option<PathBuf>,
    lease: Option<String>,
    list: Option<String>,
    interval: Option<String>,
    region: Option<String>,
    region_cost: Option<u64>,
    #[serde(default)]
    namespaces: Vec<String>,
    #[serde(default)]
    routing: NamespaceRouting,
    idle: Option<String>,
    lookup_rate: Option<u32>,
    tls_root: Option<PathBuf>,
    tls_cert: Option<PathBuf>,
    tls_key: Option<PathBuf>,
}

impl DiscoveryConfig {
    /// Reads and checks the `[discovery]` table.
    pub fn read(value: Spanned<DeValue<'_>>) -> Result<Self, String> {
        let entry = DiscoveryEntry::deserialize(ValueDeserializer::from(value));
        entry.map_err(|error| error.message().to_owned()).and_then(checked)
    }
}

fn checked(entry: DiscoveryEntry) -> Result<DiscoveryConfig, String> {
    let web = |url: &Url| match matches!(url.scheme(), "http" | "https") && url.host_str().is_some() {
        true => Ok(()),
        false => Err(format!("{url} begins with neither http:// nor https://")),
    };
    let time =
        |name: &str, text: &Option<String>, default: Duration| match text.as_deref().map(duration::parse) {
            None => Ok(default),
            Some(Ok(Duration::ZERO)) => Err(format!("{name} is zero")),
            Some(time) => time.map_err(|error| format!("{name}: {error}")),
        };
    let lease = time("lease", &entry.lease, LEASE)?;
    let interval = time("interval", &entry.interval, INTERVAL)?;
    let idle = time("idle", &entry.idle, IDLE)?;
    if entry.lookup_rate == Some(0) {
        return Err("lookup-rate is zero".into());
    }
    let lookup = LookupConfig { idle, rate: entry.lookup_rate.unwrap_or(LOOKUP_RATE) };
    let lookup = (entry.routing == NamespaceRouting::Lookup).then_some(lookup);
    let for_lookup = [("idle", entry.idle.is_some()), ("lookup-rate", entry.lookup_rate.is_some())];
    if let (Some((name, _)), None) = (for_lookup.into_iter().find(|(_, given)| *given), lookup) {
        return Err(format!("{name} has no effect without routing = \"lookup\""));
    }
    let store = match (entry.etcd.is_empty(), entry.list) {
        (false, None) => {
            entry.etcd.iter().try_for_each(web)?;
            if !LEASES.contains(&lease) {
                return Err("lease is not from 2s to 1h".into());
            }
            let prefix = entry.prefix.clone().unwrap_or_else(|| PREFIX.to_owned());
            // etcd's range ends at the prefix with its last byte plus one, and a slash as the last byte cannot
            // overflow.
            if !prefix.is_ascii() || !prefix.ends_with('/') {
                return Err(format!(
                    "prefix {prefix:?} does not end with a slash, or has other characters than ASCII"
                ));
            }
            let user = match (entry.user.clone(), entry.password_file) {
                (Some(user), Some(file)) => Some((user, file)),
                (None, None) => None,
                _ => return Err("user and password-file need each other".into()),
            };
            DiscoveryStore::Etcd { endpoints: entry.etcd, prefix, lease, user }
        }
        (true, Some(list)) => {
            let place = match list.parse::<Url>() {
                Ok(url) if matches!(url.scheme(), "http" | "https") => ListPlace::Url(url),
                _ if list.starts_with('/') => ListPlace::File(list.into()),
                _ => {
                    return Err(format!(
                        "list {list:?} is neither an http:// or https:// URL nor an absolute path"
                    ));
                }
            };
            if lookup.is_some() {
                return Err("routing = \"lookup\" needs etcd: a list has no namespaces".into());
            }
            DiscoveryStore::List { place, interval }
        }
        _ => return Err("needs one of etcd and list".into()),
    };
    let foreign = match &store {
        DiscoveryStore::Etcd { .. } => [("interval", entry.interval.is_some())].to_vec(),
        DiscoveryStore::List { .. } => {
            let etcd = [("prefix", entry.prefix.is_some()), ("user", entry.user.is_some())];
            [&etcd[..], &[("lease", entry.lease.is_some())]].concat()
        }
    };
    if let Some((name, _)) = foreign.into_iter().find(|(_, given)| *given) {
        return Err(format!("{name} has no effect with this store"));
    }
    let identity = match (entry.tls_cert, entry.tls_key) {
        (Some(cert), Some(key)) => Some((cert, key)),
        (None, None) => None,
        _ => return Err("tls-cert and tls-key need each other".into()),
    };
    let pattern = |text: &String| text.parse::<Pattern>().map_err(|error| format!("{text:?}: {error}"));
    let namespaces = entry.namespaces.iter().map(pattern).collect::<Result<_, _>>()?;
    Ok(DiscoveryConfig {
        store,
        url: None,
        region: entry.region,
        region_cost: entry.region_cost.unwrap_or(REGION_COST),
        namespaces,
        lookup,
        tls_root: entry.tls_root,
        identity,
    })
}
