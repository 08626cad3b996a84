//! Reports the results of tunnelled connections to the part of the daemon that chooses congestion controls for
//! connections, and that learns from results.

use std::{
    net::SocketAddr,
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    time::Duration,
};

use millrace_graft::{CarriedFlow, CarriedStart, SelectedFlow, SideSetting};
use millrace_graft_kernel::hook::RedirectedConnection;
use millrace_graft_proto::select::{candidates::CARRIED_WARM, kind::Expected};
use millrace_kernel::clock;
use parking_lot::Mutex;

/// Limit of queued events about the beginning and end of connections. Beyond it, new connections are not reported but
/// counted as lost. If the beginning of a connection was reported, its end is reported, too.
const MOST: usize = 8192;
/// First ID of a tunnelled connection. Socket cookies, which are the IDs of other connections, are smaller.
const FIRST: u64 = 1 << 63;

/// Measurements of a tunnelled connection.
#[derive(Debug, Default)]
pub struct TunnelRecord {
    /// Number of bytes that this host has sent.
    pub sent: u64,
    /// Number of bytes that this host has received.
    pub received: u64,
    /// Total time during which there were sent bytes that the peer had not acknowledged.
    pub busy: Duration,
    /// Time from the connection's beginning until data last arrived from the peer.
    pub heard: Option<Duration>,
    /// Number of turns: how often the client has sent again after an answer.
    pub turns: u32,
}

/// The queue of events about the beginning and the end of tunnelled connections. The daemon takes them with
/// [`Self::take`].
#[derive(Default)]
pub struct TunnelWatch {
    flows: Mutex<Vec<CarriedFlow>>,
    next: AtomicU64,
    lost: AtomicU64,
}

/// A tunnelled connection. Its end is reported only if its beginning was reported, too.
pub struct WatchedTunnel {
    id: u64,
    local: SocketAddr,
    remote: SocketAddr,
    command: Option<String>,
    cgroup: Option<u64>,
    began_ns: u64,
    is_reported: bool,
}

impl TunnelWatch {
    /// Reports the beginning of a connection, with the carrier that it should use and the predicted use of the
    /// connection.
    pub fn begin(
        &self,
        arrival: &RedirectedConnection,
        port: u16,
        carrier: Option<String>,
        expected: Expected,
    ) -> WatchedTunnel {
        let mut watched = WatchedTunnel {
            id: FIRST | self.next.fetch_add(1, Relaxed),
            local: SocketAddr::new(arrival.local, port),
            remote: arrival.server,
            command: Some(arrival.command.clone()).filter(|name| !name.is_empty()),
            cgroup: Some(arrival.cgroup).filter(|id| *id > 0),
            began_ns: clock::monotonic_ns(),
            is_reported: false,
        };
        // The lock is held until the event is queued, so that events are queued in the order in which they happen.
        let mut flows = self.flows.lock();
        watched.is_reported = flows.len() < MOST;
        if !watched.is_reported {
            self.lost.fetch_add(1, Relaxed);
            return watched;
        }
        flows.push(CarriedFlow::Began(CarriedStart {
            id: watched.id,
            local: watched.local,
            remote: watched.remote,
            choice: arrival.choice,
            serial: arrival.serial,
            explored: arrival.explored,
            carrier,
            expected,
            command: watched.command.clone(),
            cgroup: watched.cgroup,
            began_ns: watched.began_ns,
        }));
        watched
    }

    /// Reports the end of a connection. `seen` is `None` if none of its bytes were tunnelled.
    pub fn end(&self, watched: &WatchedTunnel, seen: Option<TunnelRecord>) {
        if !watched.is_reported {
            return;
        }
        // If nothing was tunnelled (`seen` is `None`), the tunnel broker has connected to the server by plain TCP.
        let candidate = if seen.is_some() { CARRIED_WARM } else { "in-place-by-broker" };
        let was_carried = seen.is_some();
        let seen = seen.unwrap_or_default();
        let flow = SelectedFlow {
            side: SideSetting::Client,
            local: watched.local,
            remote: watched.remote,
            cgroup: watched.cgroup,
            command: watched.command.clone(),
            port: watched.remote.port(),
            sent: seen.sent,
            received: seen.received,
            duration: Duration::from_nanos(clock::monotonic_ns().saturating_sub(watched.began_ns)),
            turns: was_carried.then_some(seen.turns),
            busy: was_carried.then_some(seen.busy),
            heard: seen.heard,
            candidate: candidate.to_owned(),
        };
        self.flows.lock().push(CarriedFlow::Ended { id: watched.id, flow });
    }

    /// Returns all queued events, and empties the queue.
    pub fn take(&self) -> Vec<CarriedFlow> {
        std::mem::take(&mut *self.flows.lock())
    }

    /// Returns the number of connections that were not reported, because the queue was full.
    pub fn lost(&self) -> u64 {
        self.lost.load(Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use millrace_graft_kernel::hook::SocketOwner;
    use millrace_graft_proto::select::kind::{Kinds, Question};

    use super::*;

    #[test]
    fn unread_connection_events_are_bounded_and_counted() {
        let watch = TunnelWatch::default();
        let arrival = RedirectedConnection {
            server: "192.0.2.1:80".parse().unwrap(),
            local: "192.0.2.2".parse().unwrap(),
            choice: 0,
            serial: 0,
            explored: false,
            command: "curl".to_owned(),
            cgroup: 0,
            owner: SocketOwner::default(),
        };
        let expected = Kinds::default().expect(&Question::default());
        let all: Vec<_> = (0..=MOST).map(|_| watch.begin(&arrival, 5000, None, expected.clone())).collect();
        assert_eq!(watch.lost(), 1);
        watch.end(&all[0], None);
        watch.end(&all[MOST], None);
        let flows = watch.take();
        assert_eq!((watch.lost(), flows.len()), (1, MOST + 1));
        assert!(matches!(flows.last(), Some(CarriedFlow::Ended { id, .. }) if *id == FIRST));
        watch.end(&all[1], Some(TunnelRecord { sent: 7, ..TunnelRecord::default() }));
        let flows = watch.take();
        let [CarriedFlow::Ended { id, flow }] = &flows[..] else { panic!("{flows:?}") };
        assert_eq!((*id, flow.sent, flow.candidate.as_str()), (FIRST + 1, 7, CARRIED_WARM));
        assert_eq!((flow.command.as_deref(), flow.cgroup), (Some("curl"), None));
    }
}
