//! What a fan-out says of itself.

use std::{collections::BTreeMap, net::SocketAddr};

use millrace_base::Reload;
use serde::{Deserialize, Serialize};

/// By the name of what was counted.
pub type Counts = BTreeMap<String, u64>;

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Status {
    pub uptime_s: f64,
    pub interfaces: Vec<Interface>,
    pub streams: Vec<Stream>,
    /// Packets on these interfaces, by what became of them in the kernel.
    pub packets: Counts,
    /// Copies, by what became of them.
    pub copies: Counts,
    /// Runs of the program after a packet's first.
    pub runs: Counts,
    /// What is not as it should be.
    pub trouble: Vec<String>,
    /// The latest reading of the settings.
    #[serde(default)]
    pub reload: Option<Reload>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Interface {
    pub name: String,
    pub attached: bool,
    /// How: `tcx` or `clsact`.
    pub mechanism: String,
    /// Since somebody else has detached it, or the interface was gone.
    pub reattached: u64,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Stream {
    pub name: String,
    pub listen: String,
    pub sender: String,
    /// The one that is forwarded, hexadecimal, where it is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ssrc: Option<String>,
    /// Of the sender, fanned out.
    pub packets: u64,
    /// UDP payload.
    pub bytes: u64,
    /// Since the latest of them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub idle_s: Option<f64>,
    pub receivers: Vec<Receiver>,
    /// Who was cut off.
    pub paused: Vec<Paused>,
    /// Requests, answers, reports, what userspace has sent, what was cut off.
    pub events: Counts,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Receiver {
    pub address: SocketAddr,
    /// Named by the operator.
    pub pinned: bool,
    pub packets: u64,
    /// UDP payload.
    pub bytes: u64,
    /// Of the latest report, in percent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lost_percent: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub round_trip_ms: Option<f64>,
    /// Copies that were not sent, by the reason.
    pub dropped: Counts,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Paused {
    pub address: SocketAddr,
    pub seconds: u64,
}
