//! Connections that have ended, with the measurements of this host.

use std::{net::SocketAddr, time::Duration};

use millrace_graft_proto::select::kind::{self, Expected, TrafficClass};
use serde::{Deserialize, Serialize};

use crate::SideSetting;

/// A connection, tunnelled or not, that matched a rule with `select`: a model chose its congestion control, or a
/// carrier that tunnels it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SelectedFlow {
    /// The side of the connection on which this host was: client or server.
    pub side: SideSetting,
    /// Address and port of the application's own socket, also for a tunnelled connection.
    pub local: SocketAddr,
    /// Address and port at the other end of the connection.
    pub remote: SocketAddr,
    /// ID of the cgroup that the rule names and that contains the process that connected, if known.
    pub cgroup: Option<u64>,
    /// Command name of the process that connected, if known.
    pub command: Option<String>,
    /// Port of the server.
    pub port: u16,
    /// Number of the application's bytes that the other end has confirmed.
    pub sent: u64,
    /// Number of bytes that the application has received.
    pub received: u64,
    /// Time from the SYN to the end of the connection.
    pub duration: Duration,
    /// Number of turns: how often the client has sent again after it had received something, if known.
    pub turns: Option<u32>,
    /// Time during which bytes waited to be sent or confirmed, without the time in which the application was idle.
    pub busy: Option<Duration>,
    /// Time from the SYN to the latest received data.
    pub heard: Option<Duration>,
    /// Name of the congestion control that the connection used, or of the kind of carrier that tunnelled it.
    pub candidate: String,
}

impl SelectedFlow {
    /// Returns the traffic class of the connection: whether this host was the client, the server's port, the process
    /// and its cgroup.
    pub fn kind(&self) -> TrafficClass {
        TrafficClass {
            is_client: self.side == SideSetting::Client,
            port: self.port,
            command: self.command.clone().unwrap_or_default(),
            cgroup: self.cgroup.unwrap_or_default(),
        }
    }

    /// Returns the numbers of bytes that the client and the server have sent.
    pub fn passed(&self) -> kind::FlowFigures {
        let (asked, answered) = match self.side {
            SideSetting::Client => (self.sent, self.received),
            SideSetting::Server => (self.received, self.sent),
        };
        kind::FlowFigures { asked, answered, turns: self.turns }
    }

    /// Returns the time that the path and the congestion control have taken for the transfer, and the number of
    /// transferred bytes. `None` if that time cannot be separated from the time in which the application was idle.
    ///
    /// `handshake` is the time of the TCP handshake of a connection that is not tunnelled. If more bytes were received
    /// than sent, the result is `None` unless `judges_received`. It is true if this host chooses how the other end
    /// sends: by the carrier of the tunnel. Without a tunnel, the other end's congestion control determines the time.
    pub fn cost(&self, handshake: Duration, judges_received: bool) -> Option<(Duration, u64)> {
        // Time and bytes are those of the direction in which more bytes were transferred.
        if self.sent >= self.received {
            return Some((handshake + self.busy?, self.sent)).filter(|(_, bytes)| *bytes > 0);
        }
        judges_received.then_some((self.heard?, self.received))
    }
}

/// Events of the broker (the local proxy) about TCP connections that the kernel redirected to it. The IDs of these
/// connections never equal the socket cookies of the kernel.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CarriedFlow {
    /// The broker has accepted a redirected connection.
    Began(CarriedStart),
    /// A redirected connection has ended.
    Ended {
        /// ID of the connection.
        id: u64,
        /// The connection with its measurements.
        flow: SelectedFlow,
    },
}

/// A redirected connection that the broker has accepted.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CarriedStart {
    /// ID of the connection.
    pub id: u64,
    /// This host's address and port.
    pub local: SocketAddr,
    /// The other end's address and port.
    pub remote: SocketAddr,
    /// Key under which the kernel stores the model's choice of a carrier or congestion control for the connection's
    /// rule, or 0 if no model chose.
    pub choice: u32,
    /// Serial number of the model's choice of a carrier or congestion control for the connection.
    pub serial: u32,
    /// True if the model chose another carrier or congestion control than the best one, in order to learn.
    pub explored: bool,
    /// Name of the carrier that tunnels the connection, or `None` if the connection began without a tunnel.
    pub carrier: Option<String>,
    /// Traffic profile and size that were predicted for the connection.
    pub expected: Expected,
    /// Command name of the process that connected, as in [`SelectedFlow`].
    pub command: Option<String>,
    /// ID of the cgroup that the rule names and that contains the process.
    pub cgroup: Option<u64>,
    /// Start time of the connection, in ns of `CLOCK_MONOTONIC`.
    pub began_ns: u64,
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn flow(sent: u64, received: u64, busy_ms: u64, heard_ms: u64) -> SelectedFlow {
        let ms = Duration::from_millis;
        SelectedFlow {
            side: SideSetting::Client,
            local: "10.0.0.2:5000".parse().expect("an address"),
            remote: "10.0.0.1:80".parse().expect("an address"),
            cgroup: None,
            command: None,
            port: 80,
            sent,
            received,
            duration: ms(60_000),
            turns: None,
            busy: Some(ms(busy_ms)),
            heard: Some(ms(heard_ms)),
            candidate: "bbr".to_owned(),
        }
    }

    #[test]
    fn idle_time_of_the_application_is_no_cost_of_a_connection() {
        let ms = Duration::from_millis;
        let rtt = Duration::from_millis(100);
        assert_eq!(flow(5000, 10, 300, 9000).cost(rtt, false), Some((ms(400), 5000)));
        assert_eq!(flow(10, 5000, 100, 900).cost(rtt, false), None, "the other end has sent it");
        assert_eq!(flow(10, 5000, 100, 900).cost(rtt, true), Some((ms(900), 5000)));
        assert_eq!(flow(0, 0, 0, 0).cost(rtt, true), None, "nothing was said");
        assert_eq!(SelectedFlow { busy: None, ..flow(5000, 0, 0, 0) }.cost(rtt, true), None);
    }
}
