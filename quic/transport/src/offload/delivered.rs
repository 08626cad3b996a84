//! Datagrams that the offload has sent, until userspace reads the same datagrams.

use std::collections::{HashSet, VecDeque};

/// The tag of the copy, group ID and object ID.
pub(super) type DatagramId = (u64, u64, u64);

#[derive(Default)]
pub(super) struct DeliveredDatagrams {
    waiting: HashSet<DatagramId>,
    order: VecDeque<DatagramId>,
}

impl DeliveredDatagrams {
    /// Largest number of remembered datagrams. Userspace never reads some of them, because the QUIC stack's buffer for
    /// datagrams overflows. That buffer holds fewer than this number.
    const MOST: usize = 1 << 15;

    pub fn add(&mut self, datagram: DatagramId) {
        if self.waiting.insert(datagram) {
            self.order.push_back(datagram);
        }
        if self.order.len() > Self::MOST
            && let Some(oldest) = self.order.pop_front()
        {
            self.waiting.remove(&oldest);
        }
    }

    /// Removes a datagram, and returns whether the offload had sent it.
    pub fn take(&mut self, datagram: DatagramId) -> bool {
        // Userspace reads most datagrams in the order in which the offload sent them.
        if self.order.front() == Some(&datagram) {
            self.order.pop_front();
        }
        self.waiting.remove(&datagram)
    }
}
