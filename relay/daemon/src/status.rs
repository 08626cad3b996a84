//! The body of `/status`, which `/metrics` is derived from: what the relay says about itself, and its gate.

use std::{collections::BTreeMap, net::IpAddr, ops::Deref};

use millrace_base::Reload;
use millrace_gate::status as gate;
use serde::{Deserialize, Serialize};

pub use millrace_relay::status::*;

use millrace_daemon::http::push;

/// Gives a snapshot of a running relay. Called a few times a second at most; may lock briefly.
pub trait StatusSource: Send + Sync + 'static {
    fn status(&self) -> Status;
    /// Whether the relay is draining; cheaper than a whole snapshot.
    fn draining(&self) -> bool;
    /// How many files of the settings could not be read when they were read last; cheaper than a whole snapshot.
    fn unread(&self) -> usize;
    /// SHA-256 of the certificate that new sessions are shown, lower-case hexadecimal.
    fn fingerprint(&self) -> String;
    /// Where browsers connect.
    fn web(&self) -> Web;
}

/// Where WebTransport clients find the relay, for the page.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Web {
    /// Of the first address that is served; UDP. `None` if the relay is not to serve WebTransport.
    pub port: Option<u16>,
    /// Its address for who is on this machine: what browsers take `localhost` for may be another of IPv4 and IPv6.
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
    pub gate: Gate,
    /// The relay's process.
    #[serde(default)]
    pub pid: u32,
    /// Who listens to `/events`.
    #[serde(default)]
    pub events: push::Counts,
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

/// What guards the relay's ports.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gate {
    /// It guards some interface at the moment.
    pub on: bool,
    /// Where, and why not elsewhere.
    pub reason: String,
    /// Packets that were refused, by rule.
    pub refused: BTreeMap<String, u64>,
    /// Where it is to guard.
    #[serde(default)]
    pub interfaces: Vec<gate::Interface>,
    /// As a gate's own status has them; the relay's is "relay".
    #[serde(default)]
    pub scopes: Vec<gate::Scope>,
    #[serde(default)]
    pub events: BTreeMap<String, u64>,
    #[serde(default)]
    pub tables: Vec<gate::Table>,
}
