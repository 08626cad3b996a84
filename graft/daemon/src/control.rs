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

use super::{
    daemon::{LoadTimes, SwapAnswer},
    probe::ProbeStatus,
};

pub const DEFAULT_SOCKET: &str = "/run/millrace/graft.sock";

/// Name by which error messages refer to the daemon.
pub const WHO: &str = "daemon of grafts";

/// Name of the daemon's worker process for TCP: rules for sockets, agreements with peers, and tunnelled connections.
pub const GRAFTS: &str = "grafts";
/// Name of the daemon's worker process for packet functions on UDP datagrams.
pub const SESSIONS: &str = "sessions";

#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "snake_case", deny_unknown_fields)]
pub enum GraftRequest {
    Load {
        graft: String,
        #[serde(default)]
        parameters: BTreeMap<String, u64>,
    },
    Unload {
        graft: String,
    },
    Swap {
        from: String,
        to: String,
        #[serde(default)]
        parameters: BTreeMap<String, u64>,
    },
    Status,
    Why {
        peer: IpAddr,
    },
    /// Requests the report on one connection, which is named by its two addresses in either order.
    WhyConnection {
        local: SocketAddr,
        remote: SocketAddr,
    },
    Monitor,
    Probe {
        peer: IpAddr,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        udp_port: Option<u16>,
        period_ms: u64,
        duration_ms: u64,
    },
    Probes,
    /// Adds a rule for a cgroup: connections of its processes to these server ports are tunnelled, or (`side`)
    /// connections of peers to its servers at these ports.
    Hook {
        cgroup: PathBuf,
        side: SideSetting,
        /// First and last port of each range of ports.
        ports: Vec<(u16, u16)>,
        peers: Vec<String>,
        /// If true, `connect()` of the cgroup's processes succeeds only once the server was reached.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        strict: bool,
    },
    /// Replaces a session's graft by another one. The answer is sent once both hosts have changed to the new graft, or
    /// have given up. If no state is transferred (`stateless`), the answer also waits until the lost datagrams are
    /// counted.
    SwapSession {
        session: String,
        graft: String,
        #[serde(default)]
        stateless: bool,
    },
    /// Requests a page of metrics.
    Metrics,
    Reload,
}

/// Status of all parts of the daemon. A part that does not run has no entries.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Status {
    #[serde(flatten)]
    pub in_place: status::Status,
    pub parts: Vec<PartStatus>,
    pub sessions: Option<packet::Status>,
}

/// Report on the connections and sessions of this host with another host.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct PeerReport {
    #[serde(flatten)]
    pub in_place: status::PeerExplanation,
    pub sessions: Vec<packet::SessionStatus>,
    /// Parts of the daemon that have not answered, with the reasons.
    pub unknown: Vec<String>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GraftAnswer {
    Loaded(LoadTimes),
    Swapped(SwapAnswer),
    Status(Box<Status>),
    Why(Box<PeerReport>),
    Connection(Box<status::GraftConnectionStatus>),
    Paths(Vec<status::PeerPath>),
    Probed(Vec<ProbeStatus>),
    SessionSwapped(Box<SessionSwapped>),
    Metrics(String),
}

#[derive(Debug, Default, Serialize, Deserialize)]
pub struct SessionSwapped {
    /// Time from the request to replace the graft until both hosts had agreed on it, in microseconds.
    pub agreed_us: u64,
    /// Time that this host took to replace the graft after both hosts had agreed, in microseconds.
    pub cut_us: u64,
    pub change: packet::SessionChange,
}

/// Sends one request to a running daemon, and returns its answer.
pub fn ask(socket: &Path, request: &GraftRequest) -> anyhow::Result<Option<GraftAnswer>> {
    socket::ask(socket, WHO, request)
}
