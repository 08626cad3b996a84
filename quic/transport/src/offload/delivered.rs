//! Datagrams that the offload has sent, until they come by in userspace.

use std::collections::{HashSet, VecDeque};

/// Tag, group and object.
pub(super) type DatagramId = (u64, u64, u64);

#[derive(Default)]
pub(super) struct DeliveredDatagrams {
    waiting: HashSet<DatagramId>,
    order: VecDeque<DatagramId>,
}

impl DeliveredDatagrams {
    /// Some never come by, since the QUIC stack's buffer for datagrams overflows. It has room for fewer of those that do.
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

    /// Removes a datagram, and returns whether it was there.
    pub fn take(&mut self, datagram: DatagramId) -> bool {
        // Most come by in the order in which they were sent.
        if self.order.front() == Some(&datagram) {
            self.order.pop_front();
        }
        self.waiting.remove(&datagram)
    }
}
