//! What a runtime is doing, as data.

use std::{
    collections::BTreeMap,
    fmt,
    net::{IpAddr, SocketAddr},
};

pub use millrace_base::Reload;
pub use millrace_graft_proto::message::{Host, Nat, Verdict};
use millrace_graft_proto::select::{
    kind::{Expected, Kind},
    online,
};
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
    /// What is chosen, if anything is to be.
    pub selection: Option<Selection>,
    /// What is known of kinds of connections, the latest first.
    pub purposes: Vec<Purpose>,
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
    /// For hosts behind this one, if there are to be any.
    pub gateway: Option<Gateway>,
    /// Reports of connections to who chooses, that were lost.
    pub untold: u64,
    /// Verdicts of this host's firewall on carried connections.
    pub firewall: Option<Firewall>,
}

/// A host's firewall, and connections that are to be carried.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq)]
#[serde(default)]
pub struct Firewall {
    /// Whether there is one, which is asked.
    pub is_there: bool,
    /// Rules for which connections are plain TCP, and what they look at.
    pub rules: Vec<String>,
    /// Connections, by the name of what was found out.
    pub openings: BTreeMap<String, u64>,
    /// First packets, by the name of their fate behind the firewall.
    pub packets: BTreeMap<String, u64>,
}

/// Connections of hosts behind this one.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq)]
#[serde(default)]
pub struct Gateway {
    pub interfaces: Vec<String>,
    /// That these hosts are in.
    pub networks: Vec<String>,
    /// SYNs that are held back now.
    pub waiting: u64,
    /// Packets of these hosts, by the name of what became of them.
    pub verdicts: BTreeMap<String, u64>,
    /// What is not as it should be.
    pub trouble: Option<String>,
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
    /// Networks behind the peer.
    pub networks: Vec<String>,
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
    /// Whose connections, in words; empty: everybody's.
    pub who: String,
    /// Its cgroup is not there: it fits nobody.
    pub missing: bool,
    pub agree: bool,
    /// Only with who is bound.
    pub bound: bool,
    /// It has no graft yet.
    pub waits: bool,
    pub congestion: Option<String>,
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
    /// What its connections are for, by rule.
    pub purposes: Vec<Purpose>,
}

/// What connections are for.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq)]
#[serde(default)]
pub struct Purpose {
    /// Of `why`.
    pub rule: String,
    /// Of `status`: `client` or `server`, with the server's port and the command that connects.
    pub side: String,
    pub port: u16,
    pub command: String,
    pub profile: String,
    pub size_kib: Option<u32>,
    /// `configured`, `learned`, `port`, `default`.
    pub source: String,
    /// Share of the connections that were like that.
    pub sure: f64,
    /// Why, in words.
    pub why: String,
}

impl Purpose {
    pub(crate) fn of(rule: &crate::Rule, expected: &Expected) -> Self {
        Self { rule: rule.name.clone(), ..Self::from(expected) }
    }

    pub(crate) fn of_kind(kind: &Kind, expected: &Expected) -> Self {
        let side = if kind.is_client { "client" } else { "server" }.to_owned();
        Self { side, port: kind.port, command: kind.command.clone(), ..Self::from(expected) }
    }
}

/// `loss, 64 KiB (learned): 4 of the latest 4 were bulk, their median is 64 KiB`.
impl fmt::Display for Purpose {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let size = self.size_kib.map_or(String::new(), |kib| format!(", {kib} KiB"));
        write!(out, "{}{size} ({}): {}", self.profile, self.source, self.why)
    }
}

impl From<&Expected> for Purpose {
    fn from(expected: &Expected) -> Self {
        Self {
            profile: expected.profile.name().to_owned(),
            size_kib: expected.size_kib,
            source: expected.source.name().to_owned(),
            sure: expected.sure,
            why: expected.words.clone(),
            ..Self::default()
        }
    }
}

/// What was chosen for the connections of a rule over a path.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq)]
#[serde(default)]
pub struct Chosen {
    pub rule: String,
    pub peer: Option<IpAddr>,
    /// A congestion control, or a way to be carried.
    pub arm: String,
    /// `learned`; `doubted`: what was learned was bad here; `found`: another was better here.
    pub why: String,
    pub profile: String,
    /// Share of the cases like this in the training for which the model's arm was right.
    pub right: f64,
    /// Through the tree, in words.
    pub way: Vec<String>,
    /// The features that it went by, and the path's best rate.
    pub known: String,
    /// That have ended where this leads, and those that were to try another arm.
    pub connections: u64,
    pub explored: u64,
    pub tried: Vec<Tried>,
    /// How many times as long plain TCP takes here, of what was tried of both.
    pub gain: Option<f64>,
}

/// What has come of an arm, of late.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq)]
#[serde(default)]
pub struct Tried {
    pub arm: String,
    pub outcomes: usize,
    pub bad: usize,
    /// By what the path would have allowed; the median.
    pub cost: Option<f64>,
}

impl From<online::Tried> for Tried {
    fn from(it: online::Tried) -> Self {
        Self { arm: it.arm, outcomes: it.outcomes, bad: it.bad, cost: it.cost }
    }
}

/// What rules with `select` do.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq)]
#[serde(default)]
pub struct Selection {
    /// TCP as it is here.
    pub plain: String,
    /// Paths with a choice, by rule.
    pub chosen: u64,
    /// Paths of which something was learned, by leaf.
    pub learned_places: u64,
    /// Connections that live, by tier and arm (`in-place/bbr`).
    pub live: BTreeMap<String, u64>,
    /// And all that were begun.
    pub connections: BTreeMap<String, u64>,
    /// Begun, by why they got what they got.
    pub reasons: BTreeMap<String, u64>,
    /// Ended: `good`, `bad`, `not-judged`.
    pub outcomes: BTreeMap<String, u64>,
    /// Live ones that were not remembered, or whose end was not told.
    pub forgotten: u64,
    /// Paths of which it is known what plain TCP would do, and how many times as long that takes there, on average.
    pub gain_paths: u64,
    pub gain: Option<f64>,
    /// Those with the most connections.
    pub paths: Vec<Chosen>,
}

impl Selection {
    /// That are told of one by one.
    pub const PATHS_MAX: usize = 64;
}

/// One connection, and why it goes as it does.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq)]
#[serde(default)]
pub struct Connection {
    pub local: Option<SocketAddr>,
    pub remote: Option<SocketAddr>,
    pub side: String,
    pub rule: String,
    /// `in-place`, `carried`.
    pub tier: String,
    pub arm: String,
    /// By which it is carried.
    pub carrier: Option<String>,
    /// `learned`, `explored`, `doubted`, `found`; `first`: nothing was chosen yet; `fallback`: it was to be carried, and could not be.
    pub why: String,
    pub age_s: f64,
    pub ended: Option<Ended>,
    /// How many times as long plain TCP takes here, if that is known.
    pub gain: Option<f64>,
    pub plain: String,
    /// What it was taken to be for when it began.
    pub purpose: Option<Purpose>,
    /// `None`: nothing was chosen for it.
    pub chosen: Option<Chosen>,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq)]
#[serde(default)]
pub struct Ended {
    pub sent: u64,
    pub received: u64,
    pub duration_ms: f64,
    /// By what the path would have allowed; `None`: it was not judged.
    pub cost: Option<f64>,
    pub is_bad: Option<bool>,
}
