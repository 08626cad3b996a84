use std::{
    net::SocketAddr,
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use super::{
    handover::SendHandover,
    packets::{PacketFlow, SealedPackets},
};

/// Largest number of segments that the kernel takes in one message (UDP_MAX_SEGMENTS of old kernels).
const MAX_SEGMENTS: usize = 64;
/// Number of packets of a large batch. A system call for fewer costs more for each packet.
const LARGE: usize = 64;
/// Largest message, bytes: an IPv4 packet's 65,535 bytes minus headers and some options.
const MAX_MESSAGE: usize = 65_000;

/// Sealed packets that wait to be sent, in one reused buffer.
#[derive(Debug)]
pub struct PacketBatch {
    /// A number that is unique to this batch.
    id: u64,
    packets: SealedPackets,
    /// Connections with unsent packets in this batch. Other threads hand their sealed packets of these connections to
    /// this batch, by each connection's [`SendHandover`].
    connections: Vec<Arc<SendHandover>>,
}

/// Packets of one flow that are passed to the kernel as one message. All but the last have `segment` bytes, and the
/// last has at most `segment` bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct KernelMessage {
    pub flow: PacketFlow,
    pub bytes: Range<usize>,
    pub segment: usize,
    pub packets: usize,
}

impl Default for PacketBatch {
    fn default() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        Self { id, packets: SealedPackets::default(), connections: Vec::new() }
    }
}

impl Drop for PacketBatch {
    fn drop(&mut self) {
        self.connections.iter().for_each(|connection| connection.give_up());
    }
}

impl PacketBatch {
    /// Adds the packets that `build` appends for one connection. If another batch has unsent packets of the connection,
    /// the new packets are handed over to that batch. This is called under the connection's lock.
    pub(crate) fn add_connection(&mut self, handover: &Arc<SendHandover>, build: impl FnOnce(&mut Self)) {
        let from = self.len();
        build(self);
        if self.len() > from && handover.settle(self.id, &mut self.packets, from) {
            self.connections.push(Arc::clone(handover));
        }
    }

    /// Adds the packets that other threads have handed over for any connection of this batch.
    pub(super) fn add(&mut self, packets: &mut SealedPackets) {
        packets.move_to(0, &mut self.packets);
    }

    /// Adds the packets of one connection that other threads have handed over. Returns whether there were any.
    pub(super) fn take_from(&mut self, connection: &SendHandover) -> bool {
        connection.take(&mut self.packets)
    }

    pub(super) fn take_connections(&mut self) -> Vec<Arc<SendHandover>> {
        std::mem::take(&mut self.connections)
    }

    /// Adds the packet that `build` appends to the buffer. Returns the result of `build`, which tells whether it
    /// appended a packet.
    pub fn packet(&mut self, flow: impl Into<PacketFlow>, build: impl FnOnce(&mut Vec<u8>) -> bool) -> bool {
        self.packets.push(flow.into(), build)
    }

    /// Returns the number of packets in the batch.
    pub fn len(&self) -> usize {
        self.packets.len()
    }

    /// Returns whether the batch should be sent although more packets follow, so that its first packets do not wait for
    /// the last ones.
    pub fn is_large(&self) -> bool {
        self.len() >= LARGE
    }

    /// Returns whether the batch has no packets.
    pub fn is_empty(&self) -> bool {
        self.packets.is_empty()
    }

    /// Drops all packets of the batch without sending them.
    pub fn clear(&mut self) {
        self.packets.clear();
    }

    /// Returns the packets with their destinations, in the order in which they were added.
    pub fn iter(&self) -> impl Iterator<Item = (SocketAddr, &[u8])> {
        self.packets.ranges().map(|(flow, range)| (flow.to, self.slice(&range)))
    }

    pub(super) fn slice(&self, range: &Range<usize>) -> &[u8] {
        self.packets.slice(range)
    }

    /// Returns the packets as messages for the kernel, in order. With `gso`, consecutive packets of one flow become one
    /// message.
    pub(super) fn messages(&self, gso: bool) -> Vec<KernelMessage> {
        let mut messages: Vec<KernelMessage> = Vec::with_capacity(self.len());
        for (flow, bytes) in self.packets.ranges() {
            match messages.last_mut().filter(|last| gso && last.takes(flow, bytes.len())) {
                Some(last) => {
                    last.bytes.end = bytes.end;
                    last.packets += 1;
                }
                None => messages.push(KernelMessage { flow, segment: bytes.len(), packets: 1, bytes }),
            }
        }
        messages
    }
}

impl KernelMessage {
    /// Splits a message into one message for each of its packets.
    pub fn split(&self) -> impl Iterator<Item = KernelMessage> + use<> {
        let Self { flow, bytes, segment, .. } = self.clone();
        bytes.clone().step_by(segment.max(1)).map(move |start| {
            let bytes = start..(start + segment).min(bytes.end);
            KernelMessage { flow, segment: bytes.len(), packets: 1, bytes }
        })
    }

    fn takes(&self, flow: PacketFlow, len: usize) -> bool {
        // Only the last segment of a message may be shorter than the others, so no packet can be added after a shorter
        // one.
        let whole = self.bytes.len() == self.packets * self.segment;
        let room = self.packets < MAX_SEGMENTS && self.bytes.len() + len <= MAX_MESSAGE;
        self.flow == flow && len <= self.segment && whole && room
    }
}
