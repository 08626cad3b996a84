//! Connections that have ended, as this host has seen them.

use std::{net::SocketAddr, time::Duration};

use millrace_graft_proto::select::kind::{self, Expected, TrafficClass};

use crate::SideSetting;

/// A connection that matched a rule with `select`, in place or tunnelled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SelectedFlow {
    /// The side that this host had.
    pub side: SideSetting,
    /// Address and port of the application's own socket, also for a tunnelled connection.
    pub local: SocketAddr,
    /// Address and port of the other end.
    pub remote: SocketAddr,
    /// Cgroup of the process that connected, if known: the ID of the cgroup that the rule names.
    pub cgroup: Option<u64>,
    /// Name of the process.
    pub command: Option<String>,
    /// Port of the server.
    pub port: u16,
    /// Bytes of the application that the other end has confirmed.
    pub sent: u64,
    /// Bytes that the application has received.
    pub received: u64,
    /// Time since the SYN.
    pub duration: Duration,
    /// Number of times that the client has sent again after it had received something, if known.
    pub turns: Option<u32>,
    /// Time in which bytes were to be sent or confirmed, so without the time that the application was idle.
    pub busy: Option<Duration>,
    /// Time from the SYN to the latest received data.
    pub heard: Option<Duration>,
    /// Name of a congestion control or of a kind of carrier.
    pub arm: String,
}

impl SelectedFlow {
    /// Returns the traffic class under which the flow is remembered.
    pub fn kind(&self) -> TrafficClass {
        TrafficClass {
            is_client: self.side == SideSetting::Client,
            port: self.port,
            command: self.command.clone().unwrap_or_default(),
            cgroup: self.cgroup.unwrap_or_default(),
        }
    }

    /// Returns the bytes of both directions, as the client and the server have sent them.
    pub fn passed(&self) -> kind::FlowFigures {
        let (asked, answered) = match self.side {
            SideSetting::Client => (self.sent, self.received),
            SideSetting::Server => (self.received, self.sent),
        };
        kind::FlowFigures { asked, answered, turns: self.turns }
    }

    /// Returns the time that the path and the congestion control have taken, and for how many bytes. `None` if it
    /// cannot be told from the time that the application was idle.
    ///
    /// `handshake` is the time of the TCP handshake in place. Received bytes are judged only if this host chooses how
    /// they are sent (`judges_received`): in place, the other end's congestion control does.
    pub fn cost(&self, handshake: Duration, judges_received: bool) -> Option<(Duration, u64)> {
        // The direction with more bytes decides about the cost.
        if self.sent >= self.received {
            return Some((handshake + self.busy?, self.sent)).filter(|(_, bytes)| *bytes > 0);
        }
        judges_received.then_some((self.heard?, self.received))
    }
}

/// Events of the broker about redirected connections. Their IDs differ from the kernel's socket cookies.
#[derive(Clone, Debug, PartialEq)]
pub enum CarriedFlow {
    /// A redirected connection began.
    Began {
        /// ID of the connection.
        id: u64,
        /// This host's address and port.
        local: SocketAddr,
        /// The other end's address and port.
        remote: SocketAddr,
        /// Number of the rule that chose, as in the kernel, or 0 if no choice was made.
        choice: u32,
        /// Serial number of the choice.
        serial: u32,
        /// True if the connection tries another candidate to learn, rather than the best one.
        explored: bool,
        /// Name of the carrier, or `None` if the connection began without one.
        carrier: Option<String>,
        /// Expected purpose of the connection.
        expected: Expected,
        /// Command of the process that connected, as in [`SelectedFlow`].
        command: Option<String>,
        /// ID of the cgroup that the rule names.
        cgroup: Option<u64>,
        /// Start of the connection, in ns of `CLOCK_MONOTONIC`.
        began_ns: u64,
    },
    /// A redirected connection is over.
    Ended {
        /// ID of the connection.
        id: u64,
        /// The connection with its figures.
        flow: SelectedFlow,
    },
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
            arm: "bbr".to_owned(),
        }
    }

    #[test]
    fn application_time_is_not_charged_to_a_flow() {
        let ms = Duration::from_millis;
        let rtt = Duration::from_millis(100);
        assert_eq!(flow(5000, 10, 300, 9000).cost(rtt, false), Some((ms(400), 5000)));
        assert_eq!(flow(10, 5000, 100, 900).cost(rtt, false), None, "the other end has sent it");
        assert_eq!(flow(10, 5000, 100, 900).cost(rtt, true), Some((ms(900), 5000)));
        assert_eq!(flow(0, 0, 0, 0).cost(rtt, true), None, "nothing was said");
        assert_eq!(SelectedFlow { busy: None, ..flow(5000, 0, 0, 0) }.cost(rtt, true), None);
    }
}
