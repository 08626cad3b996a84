//! The data model of `/status`: the status of the relay and of its gate. `/metrics` is derived from it.

use std::{collections::BTreeMap, net::IpAddr, ops::Deref};

use millrace_base::Reload;
use millrace_gate::status as gate;
use millrace_moq::Namespace;
use serde::{Deserialize, Serialize};

pub use millrace_relay::status::*;

use millrace_daemon::http::push;

/// A source of snapshots of a running relay. HTTP handlers call its methods a few times a second at most, so they may
/// hold a lock briefly.
pub trait StatusSource: Send + Sync + 'static {
    /// Returns a snapshot of the relay's status.
    fn status(&self) -> Status;
    /// Returns the routes to namespaces below `prefix`; `None` if the relay belongs to no cluster.
    fn routes(&self, prefix: &Namespace) -> Option<RoutesStatus>;
    /// Reports whether the relay is draining, without a whole snapshot.
    fn draining(&self) -> bool;
    /// Returns the number of the settings' files that could not be read, without a whole snapshot.
    fn unread(&self) -> usize;
    /// Returns the SHA-256 of the certificate for new sessions, in lower-case hexadecimal.
    fn fingerprint(&self) -> String;
    /// Returns the data that browsers need to connect.
    fn web(&self) -> Web;
}

/// The data with which the web page connects to the relay by WebTransport.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Web {
    /// UDP port of the first listen address, for WebTransport. `None` if the relay does not serve WebTransport.
    pub port: Option<u16>,
    /// Address for browsers on this machine. It is numeric, because `localhost` could resolve to the family (IPv4 or
    /// IPv6) on which the relay does not listen.
    pub local: Option<IpAddr>,
    /// SHA-256 of the certificate in lower-case hexadecimal, if it is self-signed. Browsers accept it by this hash if
    /// it is valid for at most 14 days (WebTransport, `serverCertificateHashes`).
    pub sha256: Option<String>,
}

/// The status of the relay's process.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Status {
    /// Status of the relay itself.
    #[serde(flatten)]
    pub relay: millrace_relay::status::Status,
    /// Status of the packet gate.
    pub gate: GateStatusReport,
    /// The kernel's share of the media of the last ten seconds.
    pub shares: MediaShares,
    /// Process ID of the relay.
    pub pid: u32,
    /// Counts of the HTTP clients that listen to `/events`.
    pub events: push::PushCounts,
    /// Result of the latest reading of the settings.
    pub reload: Option<Reload>,
    /// Result of the latest upgrade to a successor that has failed, or of the start. `None`: the relay is of a version
    /// that cannot be upgraded while it runs.
    pub upgrade: Option<Reload>,
}

impl Deref for Status {
    type Target = millrace_relay::status::Status;

    fn deref(&self) -> &Self::Target {
        &self.relay
    }
}

impl From<millrace_relay::status::Status> for Status {
    fn from(relay: millrace_relay::status::Status) -> Self {
        Self { relay, ..Self::default() }
    }
}

/// The kernel's shares of the media sent in the last ten seconds. Interfaces and sessions without media have no entry.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MediaShares {
    /// The kernel's share of the sent media, by the interface through which the media was sent.
    pub interfaces: BTreeMap<String, MediaShare>,
    /// The kernel's share of the sent media, by session ID.
    pub sessions: BTreeMap<u64, MediaShare>,
}

/// The sent media of an interface or session, and the kernel's share of it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MediaShare {
    /// UDP payload bytes sent by the kernel and by userspace.
    pub bytes: u64,
    /// UDP payload bytes sent by the kernel.
    pub by_kernel: u64,
    /// Main reason why userspace sent the rest of the media: the name of one of the kernel's counters, or why the
    /// kernel engine does not serve the session. Empty if the kernel sent all media.
    pub reason: String,
    /// Command or setting that lets the kernel send more of the media; empty if there is none.
    pub remedy: String,
}

impl MediaShare {
    /// Returns the kernel's share of the sent media, from 0 to 1.
    pub fn ratio(&self) -> f64 {
        self.by_kernel as f64 / self.bytes.max(1) as f64
    }

    /// Returns the kernel's share of the sent media in percent, rounded down.
    pub fn percent(&self) -> u64 {
        self.by_kernel.saturating_mul(100) / self.bytes.max(1)
    }
}

/// The packet gate, an XDP filter before the relay's ports.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct GateStatusReport {
    /// True while the packet gate runs on at least one interface.
    pub on: bool,
    /// Interfaces on which the packet gate runs, and the reasons why it does not run on others.
    pub reason: String,
    /// Number of packets that each rule of the packet gate has dropped.
    pub refused: BTreeMap<String, u64>,
    /// Interfaces on which the packet gate should run.
    pub interfaces: Vec<gate::GateInterfaceStatus>,
    /// Scopes of the packet gate (groups of ports with their own rules and counters), as in the status of a separate
    /// gate. The scope of the relay's ports is "relay".
    pub scopes: Vec<gate::ScopeStatus>,
    /// Number of the packet gate's events, by name.
    pub events: BTreeMap<String, u64>,
    /// Fill levels of the packet gate's tables in the kernel.
    pub tables: Vec<gate::TableStatus>,
}
