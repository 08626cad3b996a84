//! Connections that are over, as this host saw them.

use std::{net::SocketAddr, time::Duration};

use millrace_graft_proto::select::kind::{self, Expected, Kind};

use crate::Side;

/// One that a rule with `select` fitted, in place or carried.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Flow {
    pub side: Side,
    /// The true ends, also of one that was carried.
    pub local: SocketAddr,
    pub remote: SocketAddr,
    /// Whose it was, where that is known: the cgroup is that of the rule, by id.
    pub cgroup: Option<u64>,
    pub command: Option<String>,
    /// The server's.
    pub port: u16,
    /// Bytes of the applications that the other end has confirmed, and those that came.
    pub sent: u64,
    pub received: u64,
    /// Since the SYN.
    pub duration: Duration,
    /// How often the client has spoken again after it had heard something, where that is known.
    pub turns: Option<u32>,
    /// In which something was to be sent or confirmed: what of the duration was not the application's.
    pub busy: Option<Duration>,
    /// Since the SYN until data came last.
    pub heard: Option<Duration>,
    /// A congestion control, or a way to be carried.
    pub arm: String,
}

impl Flow {
    /// As what it is remembered.
    pub fn kind(&self) -> Kind {
        Kind {
            is_client: self.side == Side::Client,
            port: self.port,
            command: self.command.clone().unwrap_or_default(),
            cgroup: self.cgroup.unwrap_or_default(),
        }
    }

    /// What went through it.
    pub fn passed(&self) -> kind::Flow {
        let (asked, answered) = match self.side {
            Side::Client => (self.sent, self.received),
            Side::Server => (self.received, self.sent),
        };
        kind::Flow { asked, answered, turns: self.turns }
    }

    /// What the path and the arm have taken, and for how many bytes. `None`: that cannot be told from the application's own time.
    ///
    /// `handshake`: of what is in place. What came is judged only where that is this host's to choose (`judges_received`): in place the
    /// other end's congestion control sends it.
    pub fn cost(&self, handshake: Duration, judges_received: bool) -> Option<(Duration, u64)> {
        if self.sent >= self.received {
            return Some((handshake + self.busy?, self.sent)).filter(|(_, bytes)| *bytes > 0);
        }
        judges_received.then_some((self.heard?, self.received))
    }
}

/// What a broker tells of connections that were led to it. Its numbers are none of the kernel's cookies.
#[derive(Clone, Debug, PartialEq)]
pub enum Carried {
    Began {
        id: u64,
        local: SocketAddr,
        remote: SocketAddr,
        /// As the kernel has it: by which rule it was chosen, and what; 0: nothing was.
        choice: u32,
        serial: u32,
        explored: bool,
        carrier: Option<String>,
        /// What it is taken to be for.
        expected: Expected,
        /// As of a flow.
        command: Option<String>,
        cgroup: Option<u64>,
        /// `CLOCK_MONOTONIC`.
        began_ns: u64,
    },
    Ended {
        id: u64,
        flow: Flow,
    },
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn flow(sent: u64, received: u64, busy_ms: u64, heard_ms: u64) -> Flow {
        let ms = Duration::from_millis;
        Flow {
            side: Side::Client,
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
    fn the_applications_own_time_costs_nothing() {
        let (ms, rtt) = (Duration::from_millis, Duration::from_millis(100));
        assert_eq!(flow(5000, 10, 300, 9000).cost(rtt, false), Some((ms(400), 5000)));
        assert_eq!(flow(10, 5000, 100, 900).cost(rtt, false), None, "the other end has sent it");
        assert_eq!(flow(10, 5000, 100, 900).cost(rtt, true), Some((ms(900), 5000)));
        assert_eq!(flow(0, 0, 0, 0).cost(rtt, true), None, "nothing was said");
        assert_eq!(Flow { busy: None, ..flow(5000, 0, 0, 0) }.cost(rtt, true), None);
    }
}
