//! Which sessions have had packets (`bpf/joint_active.h`).

use std::sync::atomic::Ordering;

use super::{Ends, Joints};

/// What was known of a session's packets at the latest look.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Seen(u64);

impl Joints {
    /// Sessions that have changed since the last call, or since they were opened: of which a joint has timed a packet, or a datagram
    /// did not open. No others have anything new in their [`times`](Self::times) and [`wear`](Self::wear), but for up to 63 packets of
    /// a joint and a CPU. It makes no system call.
    pub fn active(&mut self) -> Vec<Ends> {
        let active = &self.active;
        let changed = self.sessions.iter_mut().filter_map(|(ends, open)| {
            let now = Seen(active.get(open.raw.index).load(Ordering::Relaxed));
            (std::mem::replace(&mut open.seen, now) != now).then_some(*ends)
        });
        changed.collect()
    }

    pub(super) fn seen(&self, index: u32) -> Seen {
        Seen(self.active.get(index).load(Ordering::Relaxed))
    }
}
