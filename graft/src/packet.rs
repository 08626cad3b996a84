//! Packet grafts: lists of functions that run on the datagrams of sessions, and changes of these lists while
//! datagrams pass.
//!
//! A [`Settings`] file names interfaces, grafts as lists of functions, and sessions. A [`PacketRuntime`] holds them in the kernel.
//! The design is in `docs/notes/design/0016-packet-hooks.md`, the guide in `docs/guide/packet-grafts.md`.

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
    /// Time since start, seconds.
    pub uptime_s: f64,
    /// Mode in which XDP is attached, `native` or `generic`, by interface.
    pub interfaces: BTreeMap<String, String>,
    /// The sessions of the settings and those of applications.
    pub sessions: Vec<SessionStatus>,
    /// Number of sessions that there is room for.
    pub sessions_max: u32,
    /// Bytes that the sessions take in the kernel, whether they exist or not. Keys are not counted, since they come
    /// with sealed sessions.
    pub memory_bytes: u64,
    /// The peers of the settings.
    pub peers: Vec<PeerStatus>,
    /// Number of refused requests of applications, by the reason.
    pub refusals: BTreeMap<String, u64>,
    /// Problems that an operator should look at.
    pub trouble: Vec<String>,
}

/// The state of one session.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq)]
#[serde(default)]
pub struct SessionStatus {
    /// Name of the session.
    pub name: String,
    /// This end's address and port.
    pub local: String,
    /// The other end's address and port.
    pub remote: String,
    /// Name of the session's present graft.
    pub graft: String,
    /// Graft that replaces this one as soon as both ends have agreed.
    pub changing_to: Option<String>,
    /// Names of the graft's functions, in order.
    pub functions: Vec<String>,
    /// Smoothed round trip in microseconds, if a function of the graft acknowledges packets.
    pub round_trip_us: Option<u64>,
    /// Protocol between the hosts: `udp`, or `253` for the IP protocol of that number.
    pub protocol: String,
    /// Name of the cipher, or `clear`.
    pub sealed: String,
    /// True once both ends have agreed on keys. Before that, no datagram of a sealed session passes.
    pub has_keys: bool,
    /// Number of packets by the reason of the verdict on them.
    pub packets: BTreeMap<String, u64>,
    /// Time in ns that each hook may take for a packet, or 0 for no limit.
    pub budget_ns: u32,
    /// Mean time in ns that each hook took for a packet in the latest second.
    pub mean_ns: BTreeMap<String, u64>,
    /// Number of time samples above the budget since the session was opened.
    pub over_budget: u64,
    /// Number of completed changes of the graft.
    pub swaps: u64,
    /// Number of changes of the graft that failed.
    pub swaps_failed: u64,
    /// The latest change of the graft.
    pub changed: Option<SessionChange>,
    /// Datagrams of this host's application that were lost by stateless changes of the graft.
    pub lost_sent: u64,
    /// Datagrams of the other host's application that were lost by stateless changes of the graft.
    pub lost_received: u64,
    /// The paths of the session, if it has several.
    pub paths: Vec<PathStatus>,
}

/// One path of a session that has several.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq, Eq)]
#[serde(default)]
pub struct PathStatus {
    /// Interface by which packets of this path leave.
    pub interface: String,
    /// This end's address on the wire, in place of the session's own.
    pub local: String,
    /// The other end's address on the wire.
    pub remote: String,
    /// True if packets arrive on this path, as far as is known.
    pub is_up: bool,
    /// Share of the session's packets that leave by this path, relative to the other paths: from 0 to 16.
    pub weight: u32,
    /// Packets sent on this path, including those of the daemons.
    pub sent: u64,
    /// Packets received on this path.
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
    /// Reason why the peer's daemon is not connected.
    pub trouble: Option<String>,
    /// Smallest recent round trip in microseconds. Unknown until the peer's daemon has answered.
    pub round_trip_us: Option<u64>,
    /// Loss in the direction to the peer, in per cent.
    pub loss_percent: Option<f64>,
    /// Number of sessions in the peer's pool.
    pub pooled_sockets: usize,
    /// Number of pooled sessions that applications have now.
    pub lent: usize,
    /// Number of sessions that applications of this host have opened since the start.
    pub opened: u64,
}

/// The latest change of a session's graft.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq, Eq)]
#[serde(default)]
pub struct SessionChange {
    /// True if the session has restarted, and false if it has kept its state.
    pub stateless: bool,
    /// Functions whose state was migrated from another version.
    pub migrated: Vec<String>,
    /// Datagrams of this end that a stateless change has lost. Known once both ends have reported their counts.
    pub lost_sent: Option<u64>,
    /// Datagrams of the other end that a stateless change has lost, once that is known.
    pub lost_received: Option<u64>,
    /// Reason for the change, if a rule of the settings (`when`) wanted it.
    pub why: Option<String>,
}
