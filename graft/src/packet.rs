//! Packet grafts: lists of functions that run on the datagrams of sessions, and changes of these lists while
//! datagrams pass.
//!
//! A [`Settings`] file names interfaces, grafts as lists of functions, and sessions. A [`PacketRuntime`] holds them in
//! the kernel. The design is in `docs/notes/design/0016-packet-hooks.md`, the guide in `docs/guide/packet-grafts.md`.

mod agenda;
pub mod agree;
mod budget;
pub mod choose;
mod function;
pub mod keys;
mod losses;
mod paths;
mod runtime;
pub(crate) mod settings;
mod versions;
mod when;

pub use function::{FunctionPool, FunctionService, PacketFunction};
pub use keys::AeadCipher;
pub use losses::PacketLosses;
pub use runtime::{PacketEvent, PacketRuntime, SessionTraffic, SessionView};
pub use settings::{CANONICAL, GraftSetting, HostKey, PeerSetting, SessionSetting, Settings};
pub use versions::FunctionVersion;
pub use when::When;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// The status of the sessions and of their runtime.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq)]
#[serde(default)]
pub struct Status {
    /// Time since the start of the runtime, in seconds.
    pub uptime_s: f64,
    /// Mode in which XDP is attached, `native` or `generic`, by interface.
    pub interfaces: BTreeMap<String, String>,
    /// The sessions of the settings and those of applications.
    pub sessions: Vec<SessionStatus>,
    /// Number of sessions that fit in the kernel's tables.
    pub sessions_max: u32,
    /// Bytes of kernel memory that the tables of sessions take, whether the sessions exist or not. Keys are not
    /// counted, since they are allocated with sealed sessions.
    pub memory_bytes: u64,
    /// The peers of the settings.
    pub peers: Vec<PeerStatus>,
    /// Number of refused requests of applications, by the reason of the refusal.
    pub refusals: BTreeMap<String, u64>,
    /// Problems that need the operator's attention.
    pub trouble: Vec<String>,
}

/// The status of one session.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq)]
#[serde(default)]
pub struct SessionStatus {
    /// Name of the session.
    pub name: String,
    /// This end's address and port.
    pub local: String,
    /// The other end's address and port.
    pub remote: String,
    /// Name of the session's present graft (list of packet functions).
    pub graft: String,
    /// Name of the graft (list of packet functions) that replaces the present one as soon as both ends have agreed on
    /// it.
    pub changing_to: Option<String>,
    /// Names of the functions in the session's graft, in order.
    pub functions: Vec<String>,
    /// Smoothed round-trip time in microseconds, if a function of the graft acknowledges packets.
    pub round_trip_us: Option<u64>,
    /// Name of the session's cipher, or `clear` without encryption.
    pub sealed: String,
    /// True once both ends have agreed on keys. Before that, no datagram of a sealed session passes.
    pub has_keys: bool,
    /// Number of packets by the reason of their verdict (passed or dropped).
    pub packets: BTreeMap<String, u64>,
    /// Limit in ns of the time that each hook may take for a packet, or 0 for no limit.
    pub budget_ns: u32,
    /// Mean time in ns that each hook took for a packet in the latest second.
    pub mean_ns: BTreeMap<String, u64>,
    /// Number of measured packets that took longer than the limit, since the session was opened.
    pub over_budget: u64,
    /// Number of completed changes of the session's graft (list of packet functions).
    pub swaps: u64,
    /// Number of changes of the session's graft (list of packet functions) that failed.
    pub swaps_failed: u64,
    /// The latest change of the session's graft (list of packet functions).
    pub changed: Option<SessionChange>,
    /// Datagrams of this host's application that were lost when the session restarted to change the graft without its
    /// state.
    pub lost_sent: u64,
    /// Datagrams of the other host's application that were lost when the session restarted to change the graft without
    /// its state.
    pub lost_received: u64,
    /// The paths of the session, if it has several.
    pub paths: Vec<PathStatus>,
}

/// One path of a session that has several.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq, Eq)]
#[serde(default)]
pub struct PathStatus {
    /// Interface through which packets of this path leave this host.
    pub interface: String,
    /// This end's address in packets on this path, instead of the session's own address.
    pub local: String,
    /// The other end's address in packets on this path, instead of the session's own address.
    pub remote: String,
    /// True if packets on this path arrive at the other end, as far as is known.
    pub is_up: bool,
    /// Weight of this path, from 0 to 16: its share of the session's packets relative to the other paths.
    pub weight: u32,
    /// Number of packets sent on this path, including those of the daemons.
    pub sent: u64,
    /// Number of packets received on this path.
    pub came: u64,
}

/// A peer with which applications have sessions.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq)]
#[serde(default)]
pub struct PeerStatus {
    /// Name of the peer.
    pub name: String,
    /// Address and port of the peer's daemon.
    pub remote: String,
    /// True if a message of the peer's daemon arrived in the latest 10 seconds.
    pub is_there: bool,
    /// Reason why the peer's daemon is not connected, if it is not.
    pub trouble: Option<String>,
    /// Smallest recent round-trip time in microseconds. Unknown until the peer's daemon has answered.
    pub round_trip_us: Option<u64>,
    /// Packet loss in the direction to the peer, in per cent.
    pub loss_percent: Option<f64>,
    /// Number of sessions that applications can have with the peer: one for each port of the peer's pool that this end
    /// may use.
    pub pooled_sockets: usize,
    /// Number of pooled sessions that applications use now.
    pub lent: usize,
    /// Number of sessions that applications of this host have opened since the daemon's start.
    pub opened: u64,
}

/// The latest change of a session's graft (list of packet functions).
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq, Eq)]
#[serde(default)]
pub struct SessionChange {
    /// True if the change restarted the session, and false if the session has kept its state.
    pub stateless: bool,
    /// Functions whose state was migrated from another version.
    pub migrated: Vec<String>,
    /// Number of this end's datagrams that were lost because the change restarted the session. Known once both ends
    /// have reported their counts.
    pub lost_sent: Option<u64>,
    /// Number of the other end's datagrams that were lost because the change restarted the session. Known once both
    /// ends have reported their counts.
    pub lost_received: Option<u64>,
    /// Reason for the change, if a rule of the settings (`when`) has caused it.
    pub why: Option<String>,
}
