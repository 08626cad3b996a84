//! Status of a fan-out, as JSON.

use std::{collections::BTreeMap, net::SocketAddr};

use millrace_base::Reload;
use serde::{Deserialize, Serialize};

/// The values of counters, by the counter's name.
pub type CounterStatus = BTreeMap<String, u64>;

/// Status of the daemon.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// Time since start, in seconds.
    pub uptime_s: f64,
    /// Interfaces that senders' packets arrive on.
    pub interfaces: Vec<FanoutInterfaceStatus>,
    /// The RTP streams that are forwarded to receivers.
    pub streams: Vec<StreamStatus>,
    /// Packets that arrived on the attached interfaces, by what the kernel did with them.
    pub packets: CounterStatus,
    /// Copies of packets for the receivers, by what the kernel did with them.
    pub copies: CounterStatus,
    /// Further runs of the BPF program for packets that the first run could not copy to all receivers. They are counted
    /// by their result.
    pub runs: CounterStatus,
    /// Messages for the operator about each thing that does not work.
    pub trouble: Vec<String>,
    /// The outcome of the latest reload of the settings.
    pub reload: Option<Reload>,
}

/// Status of an interface.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FanoutInterfaceStatus {
    /// Name of the interface.
    pub name: String,
    /// Whether the BPF program is attached to the interface.
    pub attached: bool,
    /// Hook that the BPF program is attached to: `tcx` or `clsact`.
    pub mechanism: String,
    /// Number of times that the BPF program was attached again, because it was detached or the interface was gone.
    pub reattached: u64,
}

/// Status of a stream.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StreamStatus {
    /// Name of the stream.
    pub name: String,
    /// Address and port of this host to which the sender sends, and from which receivers get the packets.
    pub listen: String,
    /// The sender's address and port.
    pub sender: String,
    /// The forwarded SSRC in hexadecimal, if only one SSRC is forwarded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ssrc: Option<String>,
    /// Packets of the sender that were fanned out.
    pub packets: u64,
    /// Bytes of UDP payload of the packets that were fanned out.
    pub bytes: u64,
    /// Time since the latest packet, in seconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub idle_s: Option<f64>,
    /// Receivers that have a lease, and those that the operator has named.
    pub receivers: Vec<ReceiverStatus>,
    /// Receivers that were cut off and may not ask for the stream yet.
    pub paused: Vec<Paused>,
    /// Counters of events: requests, answers, RTCP reports, packets that userspace has sent, and receivers that were
    /// cut off.
    pub events: CounterStatus,
}

/// Status of a receiver with a lease.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ReceiverStatus {
    /// The receiver's address and port.
    pub address: SocketAddr,
    /// Whether the operator has named the receiver in the settings.
    pub pinned: bool,
    /// Number of packets that were sent to the receiver.
    pub packets: u64,
    /// Bytes of UDP payload that were sent to the receiver.
    pub bytes: u64,
    /// Loss in percent according to the receiver's latest report.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lost_percent: Option<f64>,
    /// Round-trip time in milliseconds, if the receiver's report refers to a sender report.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub round_trip_ms: Option<f64>,
    /// Numbers of packets that were not sent to the receiver, by the reason.
    pub dropped: CounterStatus,
}

/// A receiver that was cut off, and the seconds until it may ask for the stream again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Paused {
    /// The receiver's address and port.
    pub address: SocketAddr,
    /// Seconds until the receiver may ask for the stream again.
    pub seconds: u64,
}
