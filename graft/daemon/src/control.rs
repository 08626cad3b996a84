//! Requests and answers on the control socket of the running graft daemon and of its worker processes.
//! `docs/guide/graft.md` documents them.

use std::{
    collections::BTreeMap,
    net::{IpAddr, SocketAddr},
    path::{Path, PathBuf},
};

use millrace_daemon::{part::PartStatus, socket};
use millrace_graft::{SideSetting, packet, status};
use serde::{Deserialize, Serialize};

use super::probe::ProbeStatus;

/// Path of the daemon's control socket, if no other path is configured.
pub const DEFAULT_SOCKET: &str = "/run/millrace/graft.sock";

/// Name by which error messages refer to the daemon.
pub const WHO: &str = "daemon of grafts";

/// Name of the daemon's worker process for rules for TCP sockets.
pub const GRAFTS: &str = "grafts";
/// Name of the daemon's worker process that negotiates agreements with peers. It cannot use BPF.
pub const AGREEMENTS: &str = "agreements";
/// Name of the daemon's worker process that tunnels TCP connections. It cannot load BPF programs while it runs.
pub const TUNNEL: &str = "tunnel";
/// Name of the daemon's worker process for packet functions on UDP datagrams.
pub const SESSIONS: &str = "sessions";
/// Name of the daemon's worker process that connects to the daemons of peers about sessions. It cannot use BPF.
pub const PEERS: &str = "peers";

/// A request to the graft daemon. A request without a documented answer is answered by success or an error.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "snake_case", deny_unknown_fields)]
pub enum GraftRequest {
    /// Loads a graft into the kernel. The answer is [`GraftAnswer::Loaded`].
    Load {
        /// Name of the graft.
        graft: String,
        /// Values of the graft's parameters, by name. Parameters that are not named have their defaults.
        #[serde(default)]
        parameters: BTreeMap<String, u64>,
    },
    /// Unloads a graft. Connections that use it keep it until they close.
    Unload {
        /// Name of the graft.
        graft: String,
    },
    /// Moves live TCP connections from one graft to another. The answer is [`GraftAnswer::Swapped`].
    Swap {
        /// Name of the graft that the connections use.
        from: String,
        /// Name of the graft that they use afterwards. It is loaded if necessary.
        to: String,
        /// Values of the new graft's parameters, by name. Parameters that are not named have their defaults.
        #[serde(default)]
        parameters: BTreeMap<String, u64>,
    },
    /// Requests the status of all parts of the daemon. The answer is [`GraftAnswer::Status`].
    Status,
    /// Requests the report on one peer. The answer is [`GraftAnswer::Why`].
    Why {
        /// Address of the peer.
        peer: IpAddr,
    },
    /// Requests the report on one connection, which is named by its two addresses in either order.
    WhyConnection {
        /// Address of one end of the connection, with its port.
        local: SocketAddr,
        /// Address of the connection's other end, with its port.
        remote: SocketAddr,
    },
    /// Requests the measured paths to all peers. The answer is [`GraftAnswer::Paths`].
    Monitor,
    /// Starts a probe of the network path to a peer.
    Probe {
        /// Address of the peer.
        peer: IpAddr,
        /// UDP port to probe. With `None` the probe uses ICMP.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        udp_port: Option<u16>,
        /// Time between two packets of the probe, in milliseconds.
        period_ms: u64,
        /// Duration of the whole probe, in milliseconds.
        duration_ms: u64,
    },
    /// Requests the results of all probes. The answer is [`GraftAnswer::Probed`].
    Probes,
    /// Adds a rule for a cgroup: connections of its processes to these server ports are tunnelled, or (`side`)
    /// connections of peers to its servers at these ports.
    Hook {
        /// Path of the cgroup in the cgroup file system.
        cgroup: PathBuf,
        /// The end of the connections that is in the cgroup: the client or the server.
        side: SideSetting,
        /// First and last port of each range of ports.
        ports: Vec<(u16, u16)>,
        /// Addresses or prefixes of the peers to which the rule applies.
        peers: Vec<String>,
        /// If true, `connect()` of the cgroup's processes succeeds only once the server was reached.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        strict: bool,
    },
    /// Replaces a session's graft by another one. The answer is sent once both hosts have changed to the new graft, or
    /// have given up. If no state is transferred (`stateless`), the answer also waits until the lost datagrams are
    /// counted.
    SwapSession {
        /// Name of the session.
        session: String,
        /// Name of the new graft.
        graft: String,
        /// True if the session restarts with the new graft instead of keeping the state of its functions.
        #[serde(default)]
        stateless: bool,
    },
    /// Requests a page of metrics.
    Metrics,
    /// Makes the daemon read its settings again.
    Reload,
}

/// Status of all parts of the daemon. A part that does not run has no entries.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Status {
    /// Status of the part for TCP: grafts, rules, agreements with peers and tunnelled connections.
    #[serde(flatten)]
    pub in_place: status::Status,
    /// States of the worker processes.
    pub parts: Vec<PartStatus>,
    /// Status of the datagram sessions, or `None` if the settings have none.
    pub sessions: Option<packet::Status>,
}

/// Report on the connections and sessions of this host with another host.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct PeerReport {
    /// Report on the TCP connections with the host.
    #[serde(flatten)]
    pub in_place: status::PeerExplanation,
    /// Status of each datagram session with the host.
    pub sessions: Vec<packet::SessionStatus>,
    /// Parts of the daemon that have not answered, with the reasons.
    pub unknown: Vec<String>,
}

/// Durations of the three steps of loading a graft (open the object file, load it into the kernel, attach it), in
/// microseconds.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct LoadTimes {
    /// Time to open the object file.
    pub open_us: u64,
    /// Time to load the programs into the kernel, which verifies them.
    pub load_us: u64,
    /// Time to register the graft as a congestion control.
    pub attach_us: u64,
}

/// The result of moving live TCP connections to another graft.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct SwapAnswer {
    /// Number of connected sockets that were moved.
    pub connections: u64,
    /// Number of listening sockets that were moved.
    pub listeners: u64,
    /// Number of sockets whose change the kernel refused.
    pub refused: u64,
    /// Time for visiting all sockets, in microseconds.
    pub walk_us: u64,
}

/// The daemon's answer to a [`GraftRequest`].
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GraftAnswer {
    /// The graft was loaded. Contains the time that each step of loading took.
    Loaded(LoadTimes),
    /// Live TCP connections were moved to the other graft.
    Swapped(SwapAnswer),
    /// Status of the daemon.
    Status(Box<Status>),
    /// Report on the connections and sessions with one peer.
    Why(Box<PeerReport>),
    /// Report on one TCP connection.
    Connection(Box<status::GraftConnectionStatus>),
    /// Measured properties of the paths to peers.
    Paths(Vec<status::PeerPath>),
    /// Results of the probes, an entry for each path.
    Probed(Vec<ProbeStatus>),
    /// The session has changed to the other graft.
    SessionSwapped(Box<SessionSwapped>),
    /// The page of metrics, in the OpenMetrics text format.
    Metrics(String),
}

/// The result of [`GraftRequest::SwapSession`]: the session has changed to the new graft.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct SessionSwapped {
    /// Time from the request to replace the graft until both hosts had agreed on it, in microseconds.
    pub agreed_us: u64,
    /// Time that this host took to replace the graft after both hosts had agreed, in microseconds.
    pub cut_us: u64,
    /// Whether the session kept the state of its functions, and how many datagrams were lost otherwise.
    pub change: packet::SessionChange,
}

/// Sends one request to a running daemon, and returns its answer.
pub fn ask(socket: &Path, request: &GraftRequest) -> anyhow::Result<Option<GraftAnswer>> {
    socket::ask(socket, WHO, request)
}
