//! The body of `/status`, which `/metrics` is derived from: what the relay says about itself, and its gate.

use std::{collections::BTreeMap, net::IpAddr, ops::Deref};

use millrace_base::Reload;
use millrace_gate::status as gate;
use millrace_moq::Namespace;
use serde::{Deserialize, Serialize};

pub use millrace_relay::status::*;

use millrace_daemon::http::push;

/// Gives a snapshot of a running relay. Called a few times a second at most; may lock briefly.
pub trait StatusSource: Send + Sync + 'static {
    fn status(&self) -> Status;
    /// Returns the routes to namespaces below `prefix`; `None` if the relay is in no cluster.
    fn routes(&self, prefix: &Namespace) -> Option<RoutesStatus>;
    /// Whether the relay is draining; cheaper than a whole snapshot.
    fn draining(&self) -> bool;
    /// How many files of the settings could not be read when they were read last; cheaper than a whole snapshot.
    fn unread(&self) -> usize;
    /// SHA-256 of the certificate that new sessions are shown, lower-case hexadecimal.
    fn fingerprint(&self) -> String;
    /// Returns where browsers connect to.
    fn web(&self) -> Web;
}

/// Addresses at which WebTransport clients find the relay, for the page.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Web {
    /// UDP port of the first address that is served. `None` if the relay does not serve WebTransport.
    pub port: Option<u16>,
    /// Address for browsers on this machine. A browser may resolve `localhost` to the other one of IPv4 and IPv6.
    pub local: Option<IpAddr>,
    /// SHA-256 of the certificate in lower-case hexadecimal, if no authority has signed it. Browsers take one of at most 14
    /// days by that (`serverCertificateHashes`).
    pub sha256: Option<String>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Status {
    #[serde(flatten)]
    pub relay: millrace_relay::status::Status,
    #[serde(default)]
    pub gate: GateStatusReport,
    /// The kernel's part in the media of the last ten seconds.
    #[serde(default)]
    pub shares: MediaShares,
    /// The relay's process.
    #[serde(default)]
    pub pid: u32,
    /// Listeners to `/events`.
    #[serde(default)]
    pub events: push::PushCounts,
    /// The latest reading of the settings.
    #[serde(default)]
    pub reload: Option<Reload>,
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

/// The kernel's part in media that was sent in the last ten seconds; of what nothing was sent there is none.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MediaShares {
    /// Shares by the interface that the media left by.
    pub interfaces: BTreeMap<String, MediaShare>,
    pub sessions: BTreeMap<u64, MediaShare>,
}

/// Media that was sent.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MediaShare {
    /// UDP payload bytes, of kernel and userspace.
    pub bytes: u64,
    pub by_kernel: u64,
    /// Reason for most of the rest: one of the outcomes that the kernel counts, or why the session has no record; empty if there is no
    /// rest.
    pub reason: String,
    /// Command or setting that mends it; empty if nothing does, or nothing has to.
    pub remedy: String,
}

impl MediaShare {
    /// Returns the kernel's part, 0 to 1.
    pub fn ratio(&self) -> f64 {
        self.by_kernel as f64 / self.bytes.max(1) as f64
    }

    /// Returns the kernel's part in per cent, rounded down.
    pub fn percent(&self) -> u64 {
        self.by_kernel.saturating_mul(100) / self.bytes.max(1)
    }
}

/// The gate of the relay's ports.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GateStatusReport {
    /// True while it guards some interface.
    pub on: bool,
    /// Interfaces that it guards, and why it does not guard others.
    pub reason: String,
    /// Packets that were refused, by rule.
    pub refused: BTreeMap<String, u64>,
    /// Interfaces that it should guard.
    #[serde(default)]
    pub interfaces: Vec<gate::GateInterfaceStatus>,
    /// Scopes as in a gate's own status. The relay's is "relay".
    #[serde(default)]
    pub scopes: Vec<gate::ScopeStatus>,
    #[serde(default)]
    pub events: BTreeMap<String, u64>,
    #[serde(default)]
    pub tables: Vec<gate::TableStatus>,
}
