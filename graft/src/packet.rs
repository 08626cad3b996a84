//! Packet grafts: lists of functions that run on the datagrams of sessions, and how lists are changed while they do.
//!
//! A [`Settings`] file names interfaces, grafts as lists of functions, and sessions. A [`Runtime`] holds them in the kernel.
//! The design is in `docs/design/0016-joints.md`, the guide in `docs/packet-grafts.md`.

mod agenda;
pub mod agree;
mod budget;
pub mod choose;
mod function;
pub mod keys;
mod losses;
mod paths;
mod runtime;
mod settings;
mod versions;
mod when;

pub use function::{Function, Functions, Service};
pub use keys::Cipher;
pub use losses::Losses;
pub use runtime::{Event, Runtime, Seen, Traffic};
pub use settings::{CANONICAL, Graft, Peer, Session, Settings};
pub use versions::Version;
pub use when::When;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::status::Reload;

/// What a runtime of packet grafts is doing, as data.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq)]
#[serde(default)]
pub struct Status {
    pub uptime_s: f64,
    pub reload: Option<Reload>,
    /// Interface, and `native` or `generic`.
    pub interfaces: BTreeMap<String, String>,
    pub sessions: Vec<SessionStatus>,
    /// For which there is room.
    pub sessions_max: u32,
    /// That all of them take in the kernel, whether they are there or not; but for keys, which come with sealed ones.
    pub memory_bytes: u64,
    pub peers: Vec<PeerStatus>,
    /// Requests of applications that were refused, by the reason.
    pub refusals: BTreeMap<String, u64>,
    /// What is not as it should be.
    pub trouble: Vec<String>,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq)]
#[serde(default)]
pub struct SessionStatus {
    pub name: String,
    pub local: String,
    pub remote: String,
    pub graft: String,
    /// That takes its place, as soon as both ends have agreed.
    pub changing_to: Option<String>,
    pub functions: Vec<String>,
    /// Smoothed, where a function of its graft says what has come.
    pub round_trip_us: Option<u64>,
    /// On the wire: `udp`, or `253`, the IP protocol.
    pub protocol: String,
    /// The cipher, or `clear`.
    pub sealed: String,
    /// Nothing passes a sealed session before its ends have agreed on keys.
    pub has_keys: bool,
    /// Packets, by the name of what became of them.
    pub packets: BTreeMap<String, u64>,
    pub budget_ns: u32,
    /// By joint, of the latest second.
    pub mean_ns: BTreeMap<String, u64>,
    /// Samples above the budget, since it was opened.
    pub over_budget: u64,
    /// Changes of its graft, and those that came to nothing.
    pub swaps: u64,
    pub swaps_failed: u64,
    /// The latest change.
    pub changed: Option<Change>,
    /// Of the application's datagrams, those that did not come by the graft before, where a change was stateless: of what this end has
    /// sent, and of what the other one has.
    pub lost_sent: u64,
    pub lost_received: u64,
    /// If it has several.
    pub paths: Vec<PathStatus>,
}

/// One of several paths of a session.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq, Eq)]
#[serde(default)]
pub struct PathStatus {
    pub interface: String,
    /// On the wire, instead of the session's own.
    pub local: String,
    pub remote: String,
    /// What is sent by it comes, as far as is known.
    pub is_up: bool,
    /// How much of the session it carries, beside the others: 0, nothing, to 16.
    pub weight: u32,
    /// Packets, of the daemons, too.
    pub sent: u64,
    pub came: u64,
}

/// A peer with which applications have sessions.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq)]
#[serde(default)]
pub struct PeerStatus {
    pub name: String,
    pub remote: String,
    /// Its daemon was heard of late.
    pub is_there: bool,
    /// The least of late; not known as long as nothing has come back.
    pub round_trip_us: Option<u64>,
    /// One way.
    pub loss_percent: Option<f64>,
    /// Sessions of the pool, and those that applications have.
    pub seats: usize,
    pub lent: usize,
    /// That applications here have got since the start.
    pub opened: u64,
}

/// How a session has changed its graft.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq, Eq)]
#[serde(default)]
pub struct Change {
    /// It has begun anew; else it has gone on with what it knew.
    pub stateless: bool,
    /// Functions whose state was made out of another version's.
    pub migrated: Vec<String>,
    /// Where it was stateless and both ends have heard of each other since.
    pub lost_sent: Option<u64>,
    pub lost_received: Option<u64>,
    /// Where a rule of its settings (`when`) wanted it at this end.
    pub why: Option<String>,
}
