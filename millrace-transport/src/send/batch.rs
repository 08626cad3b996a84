use std::{
    net::{IpAddr, SocketAddr},
    ops::Range,
};

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
#[derive(Default)]
pub struct Batch {
    bytes: Vec<u8>,
    packets: Vec<Packet>,
}

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

impl Batch {
    /// Adds the packet that `build` appends to the buffer, if it says that there is one, and says so too.
    pub fn packet(&mut self, flow: impl Into<Flow>, build: impl FnOnce(&mut Vec<u8>) -> bool) -> bool {
        let start = self.bytes.len();
        let built = build(&mut self.bytes) && self.bytes.len() > start;
        if built {
            self.packets.push(Packet { flow: flow.into(), end: self.bytes.len() });
        } else {
            self.bytes.truncate(start);
        }
        built
    }

    /// Packets in the batch.
    pub fn len(&self) -> usize {
        self.packets.len()
    }

    pub fn is_empty(&self) -> bool {
        self.packets.is_empty()
    }

    pub fn clear(&mut self) {
        self.bytes.clear();
        self.packets.clear();
    }

    pub fn iter(&self) -> impl Iterator<Item = (SocketAddr, &[u8])> {
        self.ranges().map(|(flow, range)| (flow.to, self.slice(&range)))
    }

    pub(super) fn slice(&self, range: &Range<usize>) -> &[u8] {
        self.bytes.get(range.clone()).unwrap_or_default()
    }

    /// The packets as messages, in order; with `gso`, runs of one flow are joined.
    pub(super) fn messages(&self, gso: bool) -> Vec<Message> {
        let mut messages: Vec<Message> = Vec::with_capacity(self.packets.len());
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
        let starts = std::iter::once(0).chain(self.packets.iter().map(|packet| packet.end));
        starts.zip(&self.packets).map(|(start, packet)| (packet.flow, start..packet.end))
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
