//! The status of the daemon's part for TCP, which `status` prints as JSON.

use std::{
    collections::BTreeMap,
    fmt,
    net::{IpAddr, SocketAddr},
};

pub use millrace_base::Reload;
pub use millrace_graft_proto::message::{HostOffer, NatReport, PathVerdict};
use millrace_graft_proto::select::{
    kind::{Expected, TrafficClass},
    online,
};
use serde::{Deserialize, Serialize};

pub use crate::paths::PeerPath;

/// The status of the daemon's part for TCP, as JSON.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq)]
#[serde(default)]
pub struct Status {
    /// Time since the start of the daemon, in seconds.
    pub uptime_s: f64,
    /// The cgroup to whose sockets the rules apply.
    pub cgroup: String,
    /// Grafts that are loaded in the kernel.
    pub loaded: Vec<LoadedStatus>,
    /// Rules of the settings.
    pub rules: Vec<RuleStatus>,
    /// Number of connections that match a rule, by the result of the negotiation in TCP options.
    pub outcomes: BTreeMap<String, u64>,
    /// Manifests of grafts that are not usable, with the reasons.
    pub unusable: Vec<(String, String)>,
    /// The result of the latest reload of the settings, if there was one.
    pub reload: Option<Reload>,
    /// Problems that need the operator's attention.
    pub trouble: Vec<String>,
    /// Number of log lines that were lost since the daemon's start.
    pub log_lines_dropped: u64,
    /// Paths that TCP connections have measured.
    pub paths: Vec<PeerPath>,
    /// Peers with which this host negotiates agreements over TLS.
    pub peers: Vec<GraftPeerStatus>,
    /// Number of negotiations of agreements, by outcome.
    pub negotiations: BTreeMap<String, u64>,
    /// Number of connections whose two ends saw different TCP options, by the kind of downgrade.
    pub downgrades: BTreeMap<String, u64>,
    /// Carriers and tunnelled connections, if the settings have [carry].
    pub carry: Option<CarryStatus>,
    /// Congestion controls and carriers that a model chose for rules with `select`, if there are such rules.
    pub selection: Option<SelectionStatus>,
    /// Known traffic classes (role, port, command and cgroup of connections) and their predicted purposes, the latest
    /// first.
    pub purposes: Vec<PurposeStatus>,
}

/// The status of tunnelled connections and their carriers.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq)]
#[serde(default)]
pub struct CarryStatus {
    /// Address at which this host accepts carriers that peers open.
    pub listen: Option<SocketAddr>,
    /// Number of connections of this host's applications, by the verdict of the BPF program that redirects connections
    /// into tunnels.
    pub verdicts: BTreeMap<String, u64>,
    /// Number of packets of tunnelled connections with `connect = "strict"`, whose SYNs are delayed until the server
    /// has answered, by the verdict on the packet.
    pub held: BTreeMap<String, u64>,
    /// Carriers to all peers, including those that are missing.
    pub carriers: Vec<CarrierStatus>,
    /// Number of connections that are tunnelled now: from this host's applications, and to its servers.
    pub connections: u64,
    /// Limit of connections that are tunnelled at the same time.
    pub connections_max: u64,
    /// Number of ended tunnelled connections: `done` if they ended normally, or else by the reason for their end.
    pub ended: BTreeMap<String, u64>,
    /// Number of connections that continued on another carrier.
    pub resumed: u64,
    /// Number of bytes from applications that the daemon at the other end of the tunnel has acknowledged.
    pub sent_bytes: u64,
    /// Number of bytes that were received for applications.
    pub received_bytes: u64,
    /// Number of bytes from applications that were sent through the tunnel and that its other end has not acknowledged
    /// yet.
    pub kept_bytes: u64,
    /// The gateway for hosts behind this one, if the settings have [gateway].
    pub gateway: Option<GatewayStatus>,
    /// Number of reports about connections that were lost because the selection of congestion controls did not read
    /// them in time.
    pub lost_reports: u64,
    /// This host's firewall, and how many connections it permits or refuses to tunnel.
    pub firewall: Option<FirewallStatus>,
}

/// The firewall of this host, and its verdicts on connections.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq)]
#[serde(default)]
pub struct FirewallStatus {
    /// True if this host has a firewall that may affect connections.
    pub is_there: bool,
    /// Firewall rules because of which connections are not tunnelled, each as text with the expression that causes
    /// this.
    pub rules: Vec<String>,
    /// Number of connections that were to be tunnelled, by what the firewall decided about them.
    pub openings: BTreeMap<String, u64>,
    /// Number of packets with which such connections begin, by what the firewall did with them.
    pub packets: BTreeMap<String, u64>,
}

/// The gateway, which tunnels connections of hosts behind this one.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq)]
#[serde(default)]
pub struct GatewayStatus {
    /// Interfaces through which the hosts behind the gateway are reached.
    pub interfaces: Vec<String>,
    /// Networks of the hosts behind the gateway.
    pub networks: Vec<String>,
    /// Number of SYNs of clients that the kernel holds back now, until the tunnelled server has answered.
    pub waiting: u64,
    /// Number of packets from the hosts behind the gateway, by what the gateway's BPF program did with them.
    pub verdicts: BTreeMap<String, u64>,
    /// A problem of the gateway that needs the operator's attention.
    pub trouble: Option<String>,
}

/// A carrier to a peer.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq)]
#[serde(default)]
pub struct CarrierStatus {
    /// Name of the peer to which the carrier leads.
    pub peer: String,
    /// Kind of the carrier: `quic`, `tcp`, `mptcp` or `sctp`.
    pub carrier: String,
    /// Address to which the carrier connects, or from which it comes.
    pub way: String,
    /// State: `warm` (ready), `suspect` (nothing arrives, so no connection is redirected), `full` (the limit of
    /// tunnelled connections is reached) or `cold` (not connected).
    pub state: String,
    /// Reason why the carrier is not ready.
    pub detail: String,
    /// Time since the carrier has been in this state, in seconds.
    pub age_s: f64,
    /// Addresses of the peer's host: connections to them are tunnelled by this carrier.
    pub addresses: Vec<IpAddr>,
    /// Networks behind the peer, if it is a gateway.
    pub networks: Vec<String>,
    /// Smoothed round-trip time of the carrier, in microseconds.
    pub rtt_us: u64,
    /// Congestion window of the carrier, in bytes.
    pub window_bytes: u64,
    /// Largest UDP payload that fits the path, in bytes.
    pub mtu: u16,
    /// Number of packets that the carrier has sent.
    pub sent_packets: u64,
    /// Number of packets of the carrier that were lost.
    pub lost_packets: u64,
    /// Number of bytes that the carrier has sent, including its acknowledgements and keep-alives.
    pub sent_bytes: u64,
    /// Number of bytes that the carrier has received.
    pub received_bytes: u64,
    /// Number of tunnelled connections with the peer, on all of its carriers. It is 0 for carriers that are not in use.
    pub connections: u64,
    /// Number of idle connections in the pool, if the carrier is a pool of TCP, MPTCP or SCTP connections.
    pub pool_idle: u64,
    /// Number of connections in use in the pool, if the carrier is a pool of TCP, MPTCP or SCTP connections.
    pub pool_busy: u64,
}

/// A peer of the settings, and the state of the agreement with it.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq)]
#[serde(default)]
pub struct GraftPeerStatus {
    /// Name of the peer.
    pub name: String,
    /// State of the agreement: `waiting`, `agreed`, `refused`, `absent`, `timed-out`, `untrusted`, `malformed` or
    /// `ended`.
    pub state: String,
    /// Reason why no agreement is in force.
    pub detail: String,
    /// Time since the agreement has been in this state, in seconds.
    pub age_s: f64,
    /// Address of the peer in the latest agreement with it.
    pub address: Option<IpAddr>,
    /// The peer's host, as its statement describes it.
    pub host: Option<HostOffer>,
    /// Number of grafts that the peer has.
    pub functions: usize,
    /// Names of this host's rules to which both ends have agreed.
    pub rules: Vec<String>,
    /// Kinds of packets that pass on the path to the peer, according to probes and connections.
    pub path: PathVerdict,
    /// Time since the path was last probed or used by a connection, in seconds.
    pub path_age_s: Option<f64>,
    /// Number of connections with the peer whose TCP options were changed or removed on the path (downgrades).
    pub downgrades: u64,
    /// The latest downgrades, with their times.
    pub latest_downgrades: Vec<Downgraded>,
    /// Durations of the steps of the latest negotiation with the peer.
    pub negotiated: Negotiated,
}

/// A connection whose TCP options were changed or removed on the path.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq)]
pub struct Downgraded {
    /// Kind of downgrade: `stripped`, `altered` or `forged`.
    pub kind: String,
    /// Server port of the connection.
    pub port: u16,
    /// Time since the downgrade was found, in seconds.
    pub age_s: f64,
}

/// Durations of the steps of a negotiation, measured by the host that connects. All are 0 on the host that accepts the
/// connection.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq)]
#[serde(default)]
pub struct Negotiated {
    /// Duration of the TCP handshake, in microseconds.
    pub connect_us: u64,
    /// Duration of the TLS handshake, in microseconds.
    pub tls_us: u64,
    /// Time from this host's offer of an agreement to the peer's answer, in microseconds.
    pub offer_us: u64,
    /// Time from the peer's answer until the agreed rules are in force on this host, in microseconds.
    pub bind_us: u64,
}

/// A graft that is loaded in the kernel.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq)]
#[serde(default)]
pub struct LoadedStatus {
    /// Name of the graft.
    pub name: String,
    /// Name of the graft's congestion control in TCP.
    pub congestion: String,
    /// SHA-256 of the graft's object file.
    pub identity: String,
    /// Values of the graft's parameters.
    pub parameters: BTreeMap<String, u64>,
    /// True if the kernel removes the graft when this process is killed, since it is not pinned.
    pub by_link: bool,
    /// Time for opening the object file, in microseconds.
    pub open_us: u64,
    /// Time for loading the object into the kernel, in microseconds.
    pub load_us: u64,
    /// Time for attaching the object in the kernel, in microseconds.
    pub attach_us: u64,
    /// Number of live connections in this network namespace that use the graft.
    pub connections: u64,
}

/// A rule of the settings, with its values as text.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq)]
#[serde(default)]
pub struct RuleStatus {
    /// Name of the rule.
    pub name: String,
    /// Role of this host in the rule's connections: `client` or `server`.
    pub side: String,
    /// Ports of the servers that the rule matches.
    pub ports: Vec<String>,
    /// Addresses of the peers that the rule matches.
    pub peers: Vec<String>,
    /// Condition on the connecting process, as text. It is empty if every process matches.
    pub process: String,
    /// True if the cgroup that the rule names does not exist, so that no process matches.
    pub missing: bool,
    /// True if the rule requires the peer's agreement.
    pub agree: bool,
    /// True if the rule applies only to peers that have an agreement over TLS.
    pub bound: bool,
    /// True if the rule is inactive because a peer has not sent the rule's graft yet.
    pub waits: bool,
    /// Congestion control that the rule sets.
    pub congestion: Option<String>,
}

/// Explains which congestion control or carrier connections with a peer use, and why.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq)]
#[serde(default)]
pub struct PeerExplanation {
    /// Address of the peer.
    pub peer: String,
    /// Result of the negotiation in TCP options, for the latest connection with the peer that matched a rule.
    pub outcome: Option<String>,
    /// Explanation of this result, `outcome`, as text.
    pub reason: String,
    /// Name of the rule that the latest connection matched.
    pub rule: Option<String>,
    /// Graft that the peer uses: the first bytes of the graft's SHA-256, and its name if this host knows it.
    pub peer_graft: Option<String>,
    /// Number of connections with the peer on which both ends agreed by TCP options.
    pub agreed: u64,
    /// Time since the latest connection with the peer, in seconds.
    pub age_s: Option<f64>,
    /// Measurements of the path to the peer.
    pub path: Option<PeerPath>,
    /// The state of the agreement with the peer over TLS.
    pub agreement: Option<GraftPeerStatus>,
    /// The carrier for the peer's connections, if they are tunnelled.
    pub carrier: Option<CarrierStatus>,
    /// Congestion controls or carriers that the model has chosen for the peer, by rule.
    pub chosen: Vec<ChosenStatus>,
    /// The predicted purposes (traffic profile and size) of the peer's connections, by rule.
    pub purposes: Vec<PurposeStatus>,
}

/// The predicted purpose (traffic profile and size) of the connections of a rule or a traffic class.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq)]
#[serde(default)]
pub struct PurposeStatus {
    /// Name of the rule. Only the output of the command `why` has it.
    pub rule: String,
    /// Role of this host in the connections: `client` or `server`. Only the output of the command `status` has it.
    pub side: String,
    /// Port of the server.
    pub port: u16,
    /// Name of the command that connects.
    pub command: String,
    /// Traffic profile, which states what delays matter to the application.
    pub profile: String,
    /// Predicted size in KiB, in the direction that has more bytes.
    pub size_kib: Option<u32>,
    /// Source of the prediction: `configured`, `learned`, `port` or `default`.
    pub source: String,
    /// Share of past connections that matched the prediction.
    pub sure: f64,
    /// Reason for the prediction, as text.
    pub why: String,
}

impl PurposeStatus {
    pub(crate) fn from_rule(rule: &crate::RuleSetting, expected: &Expected) -> Self {
        Self { rule: rule.name.clone(), ..Self::from(expected) }
    }

    pub(crate) fn from_kind(kind: &TrafficClass, expected: &Expected) -> Self {
        let side = if kind.is_client { "client" } else { "server" }.to_owned();
        Self { side, port: kind.port, command: kind.command.clone(), ..Self::from(expected) }
    }
}

/// Writes the traffic profile, the size, the source of the prediction and its reason, for example: `loss, 64 KiB
/// (learned): 4 of the latest 4 were bulk, their median is 64 KiB`.
impl fmt::Display for PurposeStatus {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let size = self.size_kib.map_or(String::new(), |kib| format!(", {kib} KiB"));
        write!(out, "{}{size} ({}): {}", self.profile, self.source, self.why)
    }
}

impl From<&Expected> for PurposeStatus {
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

/// A model's choice for the connections of a rule on the path to one peer.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq)]
#[serde(default)]
pub struct ChosenStatus {
    /// Name of the rule.
    pub rule: String,
    /// Address of the peer.
    pub peer: Option<IpAddr>,
    /// Name of the chosen candidate: a congestion control, or a kind of carrier.
    pub candidate: String,
    /// Reason for the choice: `learned`, by the model; `doubted`, if the model's candidate had too high costs on this
    /// path; `found`, if another candidate had lower costs.
    pub why: String,
    /// Traffic profile, which states what delays matter to the application.
    pub profile: String,
    /// Share of similar training cases in which the model's candidate was the best one.
    pub right: f64,
    /// Decisions in the model's decision tree that led to this choice, as text.
    pub way: Vec<String>,
    /// Features of the path that the model used, with the path's best rate.
    pub known: String,
    /// Number of connections that have ended on this path.
    pub connections: u64,
    /// Number of ended connections on this path that used another congestion control or carrier than the chosen one, so
    /// that its cost was measured.
    pub explored: u64,
    /// Congestion controls and carriers that were tried on this path.
    pub tried: Vec<CandidateStatus>,
    /// How many times as long a connection on this path takes with plain TCP as with the chosen congestion control or
    /// carrier. It is computed from the costs of past connections.
    pub gain: Option<f64>,
}

/// The costs of recent connections that used one candidate (congestion control or carrier) on one path.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq)]
#[serde(default)]
pub struct CandidateStatus {
    /// Name of the candidate: a congestion control, or a kind of carrier.
    pub candidate: String,
    /// Number of connections with this congestion control or carrier whose costs are remembered.
    pub outcomes: usize,
    /// Number of the remembered connections whose cost was higher than usual.
    pub bad: usize,
    /// Median cost of connections with this congestion control or carrier: their duration as a multiple of the shortest
    /// duration that is possible on the path.
    pub cost: Option<f64>,
}

impl From<online::CandidateRecord> for CandidateStatus {
    fn from(it: online::CandidateRecord) -> Self {
        Self { candidate: it.candidate, outcomes: it.outcomes, bad: it.bad, cost: it.cost }
    }
}

/// The state of rules with `select`, for whose connections a model chooses the congestion control or carrier.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq)]
#[serde(default)]
pub struct SelectionStatus {
    /// Default congestion control of this host.
    pub plain: String,
    /// Number of pairs of a rule and a path for which a congestion control or carrier is chosen.
    pub chosen: u64,
    /// Number of paths with measured costs of connections, counted separately for each leaf of the model's decision
    /// tree.
    pub learned_places: u64,
    /// Number of live connections by tier (tunnelled or not) and congestion control or carrier, such as `in-place/bbr`.
    pub live: BTreeMap<String, u64>,
    /// Number of connections that have begun since the daemon's start, by tier (tunnelled or not) and congestion
    /// control or carrier.
    pub connections: BTreeMap<String, u64>,
    /// Number of connections that have begun since the daemon's start, by the reason for their congestion control or
    /// carrier.
    pub reasons: BTreeMap<String, u64>,
    /// Number of ended connections by their cost: `good` (usual or lower), `bad` (higher than usual) or `not-judged`.
    pub outcomes: BTreeMap<String, u64>,
    /// Number of connections that were not recorded, or whose end was not reported.
    pub forgotten: u64,
    /// Number of paths on which plain TCP can be compared with the chosen congestion control or carrier.
    pub gain_paths: u64,
    /// How many times as long connections take with plain TCP as with the chosen congestion control or carrier: the
    /// geometric mean over the `gain_paths` paths.
    pub gain: Option<f64>,
    /// The paths with the most connections.
    pub paths: Vec<ChosenStatus>,
}

impl SelectionStatus {
    /// Limit of paths that are listed in the status.
    pub const PATHS_MAX: usize = 64;
}

/// One connection, and the reason for its congestion control or carrier.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq)]
#[serde(default)]
pub struct GraftConnectionStatus {
    /// Address and port of this host.
    pub local: Option<SocketAddr>,
    /// Address and port of the peer.
    pub remote: Option<SocketAddr>,
    /// Role of this host in the connection: `client` or `server`.
    pub side: String,
    /// Name of the rule that the connection matched.
    pub rule: String,
    /// Tier: `in-place` (not tunnelled) or `carried` (tunnelled).
    pub tier: String,
    /// Name of the congestion control, or kind of carrier, that the connection uses.
    pub candidate: String,
    /// Carrier that the connection uses, if it is tunnelled.
    pub carrier: Option<String>,
    /// Reason for the congestion control or carrier. `learned`: the model chose it. `explored`: the connection tried
    /// another one than the chosen one. `doubted`: the model's candidate had too high costs on this path. `found`:
    /// another candidate had lower costs. `first`: the model had not chosen yet. `fallback`: the connection should have
    /// been tunnelled and could not be.
    pub why: String,
    /// Time since the connection began, in seconds.
    pub age_s: f64,
    /// The measurements and the cost of the connection, once it has ended.
    pub ended: Option<EndedStatus>,
    /// How many times as long a connection on this path takes with plain TCP as with this connection's congestion
    /// control or carrier, if that is known.
    pub gain: Option<f64>,
    /// Default congestion control of this host, which is plain TCP.
    pub plain: String,
    /// Purpose (traffic profile and size) that was predicted when the connection began.
    pub purpose: Option<PurposeStatus>,
    /// The model's choice of a congestion control or carrier for the connection's path, if there was one.
    pub chosen: Option<ChosenStatus>,
}

/// The measurements of an ended connection, and its cost.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq)]
#[serde(default)]
pub struct EndedStatus {
    /// Number of bytes that the application has sent.
    pub sent: u64,
    /// Number of bytes that the application has received.
    pub received: u64,
    /// Duration of the connection, in milliseconds.
    pub duration_ms: f64,
    /// Cost of the connection: its duration as a multiple of the shortest duration that is possible on the path. `None`
    /// if the cost could not be computed.
    pub cost: Option<f64>,
    /// True if the cost is higher than the usual cost on similar paths.
    pub is_bad: Option<bool>,
}
