//! What a runtime is doing, as data.

use std::{
    collections::BTreeMap,
    net::{IpAddr, SocketAddr},
};

pub use millrace_proto::graft::message::{Host, Nat, Verdict};
use serde::{Deserialize, Serialize};

pub use crate::paths::Path;

#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq)]
#[serde(default)]
pub struct Status {
    pub uptime_s: f64,
    pub cgroup: String,
    pub loaded: Vec<Loaded>,
    pub rules: Vec<Rule>,
    /// By the name of what became of them.
    pub outcomes: BTreeMap<String, u64>,
    /// Not usable, with reasons.
    pub unusable: Vec<(String, String)>,
    pub reload: Option<Reload>,
    /// What is not as it should be.
    pub trouble: Vec<String>,
    /// Lines of the log that were not written.
    pub log_lines_dropped: u64,
    pub paths: Vec<Path>,
    /// With whom this host agrees by TLS.
    pub peers: Vec<Peer>,
    /// Negotiations by what became of them.
    pub negotiations: BTreeMap<String, u64>,
    /// Connections of which the two ends tell different things, by how.
    pub downgrades: BTreeMap<String, u64>,
    /// What is carried, if anything is to be.
    pub carry: Option<Carry>,
}

/// Connections of applications that go by carriers.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq)]
#[serde(default)]
pub struct Carry {
    /// Where peers' carriers come in.
    pub listen: Option<SocketAddr>,
    /// By the name of what became of them, at this host's applications.
    pub verdicts: BTreeMap<String, u64>,
    /// Packets at the sockets where SYNs are held back, by the name of what became of them.
    pub held: BTreeMap<String, u64>,
    pub carriers: Vec<Carrier>,
    /// Connections that are carried now; those of this host's applications, and those to its servers.
    pub connections: u64,
    pub connections_max: u64,
    /// How connections ended: `done`, or why not.
    pub ended: BTreeMap<String, u64>,
    /// Connections that went on with another carrier.
    pub resumed: u64,
    /// Of applications' bytes, those that were confirmed by the other end.
    pub sent_bytes: u64,
    pub received_bytes: u64,
    /// Sent and not confirmed.
    pub kept_bytes: u64,
}

/// To a peer.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq)]
#[serde(default)]
pub struct Carrier {
    pub peer: String,
    /// What it is: `quic`, `tcp`, `mptcp`.
    pub carrier: String,
    /// And where it goes to, or comes from.
    pub way: String,
    /// `warm`, `suspect` (nothing comes back: nothing is led), `full`, `cold`.
    pub state: String,
    /// Why it is not warm.
    pub detail: String,
    /// Since it is so.
    pub age_s: f64,
    /// Hosts that are reached by it.
    pub addresses: Vec<IpAddr>,
    pub rtt_us: u64,
    pub window_bytes: u64,
    pub mtu: u16,
    pub sent_packets: u64,
    pub lost_packets: u64,
    /// Its own, with its acknowledgements and what keeps it warm.
    pub sent_bytes: u64,
    pub received_bytes: u64,
    /// With the peer, by all of its carriers: the one that is used has it.
    pub connections: u64,
    /// Connections of a pool that wait for what is to be carried, and others.
    pub pool_idle: u64,
    pub pool_busy: u64,
}

/// A peer of the settings.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq)]
#[serde(default)]
pub struct Peer {
    pub name: String,
    /// `waiting`, `agreed`, `refused`, `absent`, `timed-out`, `untrusted`, `malformed`, `ended`.
    pub state: String,
    /// Why it is not agreed.
    pub detail: String,
    /// Since it is so.
    pub age_s: f64,
    /// From which, or to which, it has agreed last.
    pub address: Option<IpAddr>,
    pub host: Option<Host>,
    /// That it has.
    pub functions: usize,
    /// Of this host's, that are agreed on.
    pub rules: Vec<String>,
    /// What the path to it lets through.
    pub path: Verdict,
    /// Since any of it was found out.
    pub path_age_s: Option<f64>,
    pub downgrades: u64,
    pub latest_downgrades: Vec<Downgraded>,
    /// How long the latest negotiation took.
    pub negotiated: Negotiated,
}

/// A connection that got less, or other, than its ends have said.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq)]
pub struct Downgraded {
    /// `stripped`, `altered`, `forged`.
    pub kind: String,
    /// The server's.
    pub port: u16,
    pub age_s: f64,
}

/// The steps of a negotiation, as the caller has them; all 0 for who is called.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq)]
#[serde(default)]
pub struct Negotiated {
    /// TCP's handshake.
    pub connect_us: u64,
    pub tls_us: u64,
    /// From the offer to its answer.
    pub offer_us: u64,
    /// Until the rules hold.
    pub bind_us: u64,
}

/// A graft in the kernel.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq)]
#[serde(default)]
pub struct Loaded {
    pub name: String,
    pub congestion: String,
    /// SHA-256 of its object.
    pub identity: String,
    pub parameters: BTreeMap<String, u64>,
    /// Whether the kernel takes it back when this process is killed.
    pub by_link: bool,
    pub open_us: u64,
    pub load_us: u64,
    pub attach_us: u64,
    /// Live connections that use it, in this network namespace.
    pub connections: u64,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq)]
#[serde(default)]
pub struct Rule {
    pub name: String,
    pub side: String,
    pub ports: Vec<String>,
    pub peers: Vec<String>,
    pub agree: bool,
    /// Only with who is bound.
    pub bound: bool,
    /// It has no graft yet.
    pub waits: bool,
    pub congestion: Option<String>,
}

/// The latest reading of the settings.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq)]
pub struct Reload {
    /// Seconds since 1970.
    pub time_s: f64,
    pub error: Option<String>,
}

/// Why connections with a peer are as they are.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq)]
#[serde(default)]
pub struct Why {
    pub peer: String,
    /// Of the latest connection that a rule fits.
    pub outcome: Option<String>,
    /// That outcome in words.
    pub reason: String,
    pub rule: Option<String>,
    /// What the peer said that it uses: the first bytes of an identity, and the name if it is known here.
    pub peer_graft: Option<String>,
    pub agreed: u64,
    pub age_s: Option<f64>,
    pub path: Option<Path>,
    /// What was agreed on by TLS.
    pub agreement: Option<Peer>,
    /// By what its connections are carried, if they are to be.
    pub carrier: Option<Carrier>,
    /// What a model has chosen for it, by rule.
    pub chosen: Vec<Chosen>,
}

/// A congestion control that a model has chosen for connections with a peer.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq)]
pub struct Chosen {
    pub rule: String,
    pub congestion: String,
    /// Share of the cases like this in the training for which it was right.
    pub right: f64,
    /// Through the tree, in words.
    pub way: Vec<String>,
}
