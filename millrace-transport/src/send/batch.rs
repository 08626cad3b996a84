use std::{
    net::{IpAddr, SocketAddr},
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use super::handover::Handover;

/// The most segments that the kernel takes in one message (UDP_MAX_SEGMENTS of the oldest kernels).
const MAX_SEGMENTS: usize = 64;
/// The most bytes: an IPv4 packet's 65,535, less headers and some options.
const MAX_MESSAGE: usize = 65_000;

/// Where packets go, and which of this host's addresses they come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Flow {
    pub to: SocketAddr,
    /// `None`: the socket's address, or the one that goes with the route.
    pub from: Option<IpAddr>,
    /// DSCP and ECN: IPv4's TOS, IPv6's traffic class.
    pub traffic_class: u8,
}

impl From<SocketAddr> for Flow {
    fn from(to: SocketAddr) -> Self {
        Self { to, from: None, traffic_class: 0 }
    }
}

/// Sealed packets on their way out, in one buffer that is used again and again.
#[derive(Debug)]
pub struct Batch {
    /// Tells it from every other one.
    id: u64,
    packets: Packets,
    /// Connections of which no other batch has packets.
    connections: Vec<Arc<Handover>>,
}

/// One behind the other.
#[derive(Debug, Default)]
pub(super) struct Packets {
    bytes: Vec<u8>,
    packets: Vec<Packet>,
}

#[derive(Debug)]
struct Packet {
    flow: Flow,
    end: usize,
}

/// Packets of one flow that are one message to the kernel. All but the last have `segment` bytes,
/// the last has no more.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Message {
    pub flow: Flow,
    pub bytes: Range<usize>,
    pub segment: usize,
    pub packets: usize,
}

impl Default for Batch {
    fn default() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        Self { id, packets: Packets::default(), connections: Vec::new() }
    }
}

impl Drop for Batch {
    fn drop(&mut self) {
        self.connections.iter().for_each(|connection| connection.give_up());
    }
}

impl Packets {
    pub fn is_empty(&self) -> bool {
        self.packets.is_empty()
    }

    fn clear(&mut self) {
        self.bytes.clear();
        self.packets.clear();
    }

    /// Moves the packets from `from` on to the end of `to`.
    fn move_to(&mut self, from: usize, to: &mut Self) {
        let start = from.checked_sub(1).and_then(|last| self.packets.get(last)).map_or(0, |last| last.end);
        let before = to.bytes.len();
        to.bytes.extend(self.bytes.drain(start..));
        let packets = self.packets.drain(from..);
        to.packets.extend(packets.map(|packet| Packet { end: packet.end - start + before, ..packet }));
    }
}

impl Batch {
    pub(super) fn id(&self) -> u64 {
        self.id
    }

    /// Adds the packets of one connection that `build` adds, or leaves them to whoever has others of the connection that are not
    /// sent yet. Under the connection's lock.
    pub(crate) fn of_connection(&mut self, handover: &Arc<Handover>, build: impl FnOnce(&mut Self)) {
        let from = self.len();
        build(self);
        if self.len() > from && handover.settle(self, from) {
            self.connections.push(Arc::clone(handover));
        }
    }

    /// Takes out packets from `from` on.
    pub(super) fn take_from(&mut self, from: usize, to: &mut Packets) {
        self.packets.move_to(from, to);
    }

    pub(super) fn add(&mut self, packets: &mut Packets) {
        packets.move_to(0, &mut self.packets);
    }

    pub(super) fn take_connections(&mut self) -> Vec<Arc<Handover>> {
        std::mem::take(&mut self.connections)
    }

    /// Adds the packet that `build` appends to the buffer, if it says that there is one, and says so too.
    pub fn packet(&mut self, flow: impl Into<Flow>, build: impl FnOnce(&mut Vec<u8>) -> bool) -> bool {
        let Packets { bytes, packets } = &mut self.packets;
        let start = bytes.len();
        let built = build(bytes) && bytes.len() > start;
        if built {
            packets.push(Packet { flow: flow.into(), end: bytes.len() });
        } else {
            bytes.truncate(start);
        }
        built
    }

    /// Packets in the batch.
    pub fn len(&self) -> usize {
        self.packets.packets.len()
    }

    pub fn is_empty(&self) -> bool {
        self.packets.is_empty()
    }

    pub fn clear(&mut self) {
        self.packets.clear();
    }

    pub fn iter(&self) -> impl Iterator<Item = (SocketAddr, &[u8])> {
        self.ranges().map(|(flow, range)| (flow.to, self.slice(&range)))
    }

    pub(super) fn slice(&self, range: &Range<usize>) -> &[u8] {
        self.packets.bytes.get(range.clone()).unwrap_or_default()
    }

    /// The packets as messages, in order; with `gso`, runs of one flow are joined.
    pub(super) fn messages(&self, gso: bool) -> Vec<Message> {
        let mut messages: Vec<Message> = Vec::with_capacity(self.len());
        for (flow, bytes) in self.ranges() {
            match messages.last_mut().filter(|last| gso && last.takes(flow, bytes.len())) {
                Some(last) => {
                    last.bytes.end = bytes.end;
                    last.packets += 1;
                }
                None => messages.push(Message { flow, segment: bytes.len(), packets: 1, bytes }),
            }
        }
        messages
    }

    fn ranges(&self) -> impl Iterator<Item = (Flow, Range<usize>)> {
        let packets = &self.packets.packets;
        let starts = std::iter::once(0).chain(packets.iter().map(|packet| packet.end));
        starts.zip(packets).map(|(start, packet)| (packet.flow, start..packet.end))
    }
}

impl Message {
    /// The message's packets one by one.
    pub fn split(&self) -> impl Iterator<Item = Message> + use<> {
        let Self { flow, bytes, segment, .. } = self.clone();
        bytes.clone().step_by(segment.max(1)).map(move |start| {
            let bytes = start..(start + segment).min(bytes.end);
            Message { flow, segment: bytes.len(), packets: 1, bytes }
        })
    }

    fn takes(&self, flow: Flow, len: usize) -> bool {
        let whole = self.bytes.len() == self.packets * self.segment;
        let room = self.packets < MAX_SEGMENTS && self.bytes.len() + len <= MAX_MESSAGE;
        self.flow == flow && len <= self.segment && whole && room
    }
}
