//! What is told of the connections that are carried, for whoever chooses by what came of them.

use std::{
    net::SocketAddr,
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    time::Duration,
};

use millrace_graft::{Carried, Flow, Side};
use millrace_graft_kernel::hook::Arrival;
use millrace_graft_proto::select::{arms::CARRIED_WARM, kind::Expected};
use millrace_kernel::clock;
use parking_lot::Mutex;

/// That nobody has taken yet. What begins beyond is lost, and counted; who has heard of a beginning hears of the end.
const MOST: usize = 8192;
/// No socket's cookie.
const FIRST: u64 = 1 << 63;

/// How a carried connection went.
#[derive(Debug, Default)]
pub struct Seen {
    pub sent: u64,
    pub received: u64,
    pub busy: Duration,
    pub heard: Option<Duration>,
    pub turns: u32,
}

#[derive(Default)]
pub struct Watch {
    told: Mutex<Vec<Carried>>,
    next: AtomicU64,
    lost: AtomicU64,
}

/// One connection; that it is over is told when it is.
pub struct Watched {
    id: u64,
    local: SocketAddr,
    remote: SocketAddr,
    command: Option<String>,
    cgroup: Option<u64>,
    began_ns: u64,
    is_told: bool,
}

impl Watch {
    /// `carrier`: by which it is to go; `expected`: what it is taken to be for.
    pub fn begin(
        &self,
        arrival: &Arrival,
        port: u16,
        (carrier, expected): (Option<String>, Expected),
    ) -> Watched {
        let mut watched = Watched {
            id: FIRST | self.next.fetch_add(1, Relaxed),
            local: SocketAddr::new(arrival.near, port),
            remote: arrival.far,
            command: Some(arrival.command.clone()).filter(|name| !name.is_empty()),
            cgroup: Some(arrival.cgroup).filter(|id| *id > 0),
            began_ns: clock::monotonic_ns(),
            is_told: false,
        };
        let Watched { id, local, remote, began_ns, cgroup, .. } = watched;
        let command = watched.command.clone();
        let Arrival { choice, serial, explored, .. } = *arrival;
        let mut told = self.told.lock();
        watched.is_told = told.len() < MOST;
        if !watched.is_told {
            self.lost.fetch_add(1, Relaxed);
            return watched;
        }
        told.push(Carried::Began {
            id,
            local,
            remote,
            choice,
            serial,
            explored,
            carrier,
            expected,
            command,
            cgroup,
            began_ns,
        });
        watched
    }

    /// `seen`: as far as it was carried.
    pub fn end(&self, watched: &Watched, seen: Option<Seen>) {
        if !watched.is_told {
            return;
        }
        let arm = if seen.is_some() { CARRIED_WARM } else { "in-place-by-broker" };
        let was_carried = seen.is_some();
        let seen = seen.unwrap_or_default();
        let flow = Flow {
            side: Side::Client,
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
            arm: arm.to_owned(),
        };
        self.told.lock().push(Carried::Ended { id: watched.id, flow });
    }

    /// All since the last time.
    pub fn take(&self) -> Vec<Carried> {
        std::mem::take(&mut *self.told.lock())
    }

    pub fn lost(&self) -> u64 {
        self.lost.load(Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use millrace_graft_kernel::hook::Owner;
    use millrace_graft_proto::select::kind::{Kinds, Question};

    use super::*;

    #[test]
    fn what_nobody_takes_is_bounded_and_counted() {
        let watch = Watch::default();
        let arrival = Arrival {
            far: "192.0.2.1:80".parse().unwrap(),
            near: "192.0.2.2".parse().unwrap(),
            choice: 0,
            serial: 0,
            explored: false,
            command: "curl".to_owned(),
            cgroup: 0,
            owner: Owner::default(),
        };
        let expected = Kinds::default().expect(&Question::default());
        let all: Vec<_> = (0..=MOST).map(|_| watch.begin(&arrival, 5000, (None, expected.clone()))).collect();
        assert_eq!(watch.lost(), 1);
        watch.end(&all[0], None);
        watch.end(&all[MOST], None);
        let told = watch.take();
        assert_eq!((watch.lost(), told.len()), (1, MOST + 1));
        assert!(matches!(told.last(), Some(Carried::Ended { id, .. }) if *id == FIRST));
        watch.end(&all[1], Some(Seen { sent: 7, ..Seen::default() }));
        let told = watch.take();
        let [Carried::Ended { id, flow }] = &told[..] else { panic!("{told:?}") };
        assert_eq!((*id, flow.sent, flow.arm.as_str()), (FIRST + 1, 7, CARRIED_WARM));
        assert_eq!((flow.command.as_deref(), flow.cgroup), (Some("curl"), None));
    }
}
