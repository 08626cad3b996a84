//! Clients (newcomers) that connect to a relay one after the other, and the time until the kernel forwards to each.

use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use millrace_relay::status::Status;
use serde::Serialize;

use super::contender::PORT;
use super::engine;
use crate::hostile::peer::{HostilePeer, PeerTarget};
use crate::lab::LabNode;
use crate::stats::Percentiles;
use crate::transport::LabTransport;

/// Pause between the end of one newcomer and the start of the next.
const PAUSE: Duration = Duration::from_millis(100);
/// Pause between two readings of the relay's status.
const LOOK: Duration = Duration::from_millis(10);
/// Longest wait until the kernel can forward to a newcomer. A newcomer for which that takes longer counts with this
/// time.
const PATIENCE: Duration = Duration::from_secs(10);

/// Results of the newcomers (clients that connect) in one period, and values from the relay's status in that period.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Newcomers {
    pub count: usize,
    /// Time from the newcomer's first packet until the relay's status says that the kernel can forward to it
    /// (`kernel_ready`), ms; `None` if the relay forwards in userspace.
    pub ready_ms: Option<Percentiles>,
    /// Number of newcomers that could not connect, or to which the kernel could not forward within ten seconds.
    pub failed: usize,
    /// Largest number of sessions whose changes (path, keys) waited to be written to the kernel's tables, in any
    /// reading of the relay's status.
    pub queue: u64,
    /// Number of status readings in which more sessions waited for such a write than the relay had connections.
    pub queue_too_long: usize,
}

/// The lab's nodes (network namespaces) in which the newcomers and the relay run.
pub struct NewcomerRoute<'lab> {
    pub from: &'lab LabNode,
    pub relay: &'lab LabNode,
}

impl NewcomerRoute<'_> {
    /// Connects newcomers one after the other until `is_over` is set.
    pub fn watch(&self, is_over: &AtomicBool) -> anyhow::Result<Newcomers> {
        let mut seen = NewcomerResult::default();
        while !is_over.load(Ordering::Relaxed) {
            match self.one(&mut seen) {
                Ok(Some(ready)) => seen.ready_ms.push(ready.as_secs_f64() * 1e3),
                Ok(None) => {}
                Err(_) => seen.failed += 1,
            }
            seen.count += 1;
            std::thread::sleep(PAUSE);
        }
        Ok(Newcomers {
            count: seen.count,
            ready_ms: Percentiles::from_samples(seen.ready_ms),
            failed: seen.failed,
            queue: seen.queue,
            queue_too_long: seen.queue_too_long,
        })
    }

    /// Connects one newcomer. Returns the time until the kernel could forward to it; `None` if the relay forwards in
    /// userspace.
    fn one(&self, seen: &mut NewcomerResult) -> anyhow::Result<Option<Duration>> {
        let target = PeerTarget {
            addr: SocketAddr::new(IpAddr::V4(self.relay.addr_v4()), PORT),
            name: "localhost".to_owned(),
            path: String::new(),
            transport: LabTransport::Raw,
        };
        let began = Instant::now();
        let peer = self.from.enter(|| HostilePeer::establish(&target))??;
        let port = peer.local_addr()?.port();
        let ready = loop {
            let status = self.relay.enter(engine::ask)??;
            seen.look(&status);
            let own = status
                .sessions
                .iter()
                .find(|one| one.remote == SocketAddr::new(self.from.addr_v4().into(), port));
            match own.map(|own| own.kernel_ready) {
                Some(None) => break None,
                Some(Some(true)) => break Some(began.elapsed()),
                _ if began.elapsed() > PATIENCE => {
                    seen.failed += 1;
                    break Some(PATIENCE);
                }
                _ => std::thread::sleep(LOOK),
            }
        };
        peer.close()?;
        Ok(ready)
    }
}

#[derive(Default)]
struct NewcomerResult {
    count: usize,
    ready_ms: Vec<f64>,
    failed: usize,
    queue: u64,
    queue_too_long: usize,
}

impl NewcomerResult {
    fn look(&mut self, status: &Status) {
        let waiting = status.engine.commands_waiting;
        let connections = status.sessions.len() as u64 + status.handshakes;
        self.queue = self.queue.max(waiting);
        self.queue_too_long += usize::from(waiting > connections);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn command_queue_longer_than_number_of_handshakes_is_counted() {
        let mut status = Status::default();
        let mut seen = NewcomerResult::default();
        (status.handshakes, status.engine.commands_waiting) = (3, 3);
        seen.look(&status);
        assert_eq!((seen.queue, seen.queue_too_long), (3, 0));
        status.engine.commands_waiting = 4;
        seen.look(&status);
        assert_eq!((seen.queue, seen.queue_too_long), (4, 1));
    }
}
