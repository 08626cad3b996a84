//! Finds the sessions that had packets, without a system call (`bpf/packet_active.h`).

use std::sync::atomic::Ordering;

use super::{PacketHooks, SessionEnds};

/// A session's activity counter as last read.
///
/// The kernel does not increment the counter atomically, so increments of two CPUs may count as one. If the session had
/// packets, the value still differs from the one that was last read.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct SeenPackets(u64);

impl PacketHooks {
    /// Returns the sessions that were active since the last call, or since they were opened: the processing time of a
    /// packet was measured (every 64th), or a datagram could not be decrypted. For all other sessions, the values of
    /// [`times`](Self::times) and [`wear`](Self::wear) are unchanged, except for up to 63 packets for each hook and
    /// CPU. The call reads shared memory, without a system call.
    pub fn active(&mut self) -> Vec<SessionEnds> {
        let active = &self.active;
        let changed = self.sessions.iter_mut().filter_map(|(ends, open)| {
            let now = SeenPackets(active.get(open.raw.index).load(Ordering::Relaxed));
            (std::mem::replace(&mut open.seen, now) != now).then_some(*ends)
        });
        changed.collect()
    }

    pub(super) fn seen(&self, index: u32) -> SeenPackets {
        SeenPackets(self.active.get(index).load(Ordering::Relaxed))
    }
}
