//! A record of datagrams that the kernel offload has sent, so that userspace, which receives the same datagrams, does
//! not send them again.

use std::collections::{HashSet, VecDeque};

/// Identifies a sent datagram: tag of the copy, group ID and object ID.
pub(super) type DatagramId = (u64, u64, u64);

#[derive(Default)]
pub(super) struct DeliveredDatagrams {
    waiting: HashSet<DatagramId>,
    order: VecDeque<DatagramId>,
}

impl DeliveredDatagrams {
    /// Largest number of datagrams in the record. The record needs a bound, because userspace never reads some
    /// datagrams: the QUIC stack's datagram buffer, which holds fewer than this number, may overflow.
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

    /// Removes a datagram from the record, and returns whether the record contained it, so that the kernel offload has
    /// sent it.
    pub fn take(&mut self, datagram: DatagramId) -> bool {
        // Userspace reads most datagrams in the order in which the kernel offload sent them.
        if self.order.front() == Some(&datagram) {
            self.order.pop_front();
        }
        self.waiting.remove(&datagram)
    }
}
