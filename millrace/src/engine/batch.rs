use std::{net::SocketAddr, ops::Range};

/// The most segments that the kernel takes in one message (UDP_MAX_SEGMENTS of the oldest kernels).
const MAX_SEGMENTS: usize = 64;
/// The most bytes: an IPv4 packet's 65,535, less headers and some options.
const MAX_MESSAGE: usize = 65_000;

/// Sealed packets on their way out, in one buffer that is used again and again.
#[derive(Default)]
pub struct Batch {
    bytes: Vec<u8>,
    packets: Vec<Packet>,
}

struct Packet {
    to: SocketAddr,
    end: usize,
}

/// Packets for one destination that are one message to the kernel. All but the last have `segment` bytes,
/// the last has no more.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Message {
    pub to: SocketAddr,
    pub bytes: Range<usize>,
    pub segment: usize,
    pub packets: usize,
}

impl Batch {
    /// Adds the packet that `build` appends to the buffer, if it says that there is one, and says so too.
    pub fn packet(&mut self, to: SocketAddr, build: impl FnOnce(&mut Vec<u8>) -> bool) -> bool {
        let start = self.bytes.len();
        let built = build(&mut self.bytes) && self.bytes.len() > start;
        if built {
            self.packets.push(Packet { to, end: self.bytes.len() });
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
        self.ranges().map(|(to, range)| (to, self.slice(&range)))
    }

    pub(super) fn slice(&self, range: &Range<usize>) -> &[u8] {
        self.bytes.get(range.clone()).unwrap_or_default()
    }

    /// The packets as messages, in order; with `gso`, runs for one destination are joined.
    pub(super) fn messages(&self, gso: bool) -> Vec<Message> {
        let mut messages: Vec<Message> = Vec::with_capacity(self.packets.len());
        for (to, bytes) in self.ranges() {
            match messages.last_mut().filter(|last| gso && last.takes(to, bytes.len())) {
                Some(last) => {
                    last.bytes.end = bytes.end;
                    last.packets += 1;
                }
                None => messages.push(Message { to, segment: bytes.len(), packets: 1, bytes }),
            }
        }
        messages
    }

    fn ranges(&self) -> impl Iterator<Item = (SocketAddr, Range<usize>)> {
        let starts = std::iter::once(0).chain(self.packets.iter().map(|packet| packet.end));
        starts.zip(&self.packets).map(|(start, packet)| (packet.to, start..packet.end))
    }
}

impl Message {
    /// The message's packets one by one.
    pub fn split(&self) -> impl Iterator<Item = Message> + use<> {
        let Self { to, bytes, segment, .. } = self.clone();
        bytes.clone().step_by(segment.max(1)).map(move |start| {
            let bytes = start..(start + segment).min(bytes.end);
            Message { to, segment: bytes.len(), packets: 1, bytes }
        })
    }

    fn takes(&self, to: SocketAddr, len: usize) -> bool {
        let whole = self.bytes.len() == self.packets * self.segment;
        let room = self.packets < MAX_SEGMENTS && self.bytes.len() + len <= MAX_MESSAGE;
        self.to == to && len <= self.segment && whole && room
    }
}
