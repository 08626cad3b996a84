use std::{
    net::{IpAddr, SocketAddr},
    ops::Range,
};

/// The destination of packets, their source address on this host, and their traffic class.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PacketFlow {
    /// The peer's address.
    pub to: SocketAddr,
    /// The source address. `None` stands for the socket's own address or, if the socket is bound to all addresses, the
    /// one that the route selects.
    pub from: Option<IpAddr>,
    /// DSCP and ECN, encoded as in IPv4's TOS and IPv6's Traffic Class field.
    pub traffic_class: u8,
}

impl From<SocketAddr> for PacketFlow {
    fn from(to: SocketAddr) -> Self {
        Self { to, from: None, traffic_class: 0 }
    }
}

/// Sealed packets, one after the other in one buffer.
#[derive(Debug, Default)]
pub(super) struct SealedPackets {
    bytes: Vec<u8>,
    packets: Vec<SealedPacket>,
}

#[derive(Debug)]
struct SealedPacket {
    flow: PacketFlow,
    end: usize,
}

impl SealedPackets {
    /// Adds the packet that `build` appends to the buffer. Returns the result of `build`, which tells whether it
    /// appended a packet.
    pub fn push(&mut self, flow: PacketFlow, build: impl FnOnce(&mut Vec<u8>) -> bool) -> bool {
        let start = self.bytes.len();
        let built = build(&mut self.bytes) && self.bytes.len() > start;
        if built {
            self.packets.push(SealedPacket { flow, end: self.bytes.len() });
        } else {
            self.bytes.truncate(start);
        }
        built
    }

    pub fn len(&self) -> usize {
        self.packets.len()
    }

    pub fn is_empty(&self) -> bool {
        self.packets.is_empty()
    }

    #[cfg(test)]
    pub fn capacity(&self) -> usize {
        self.bytes.capacity()
    }

    pub fn clear(&mut self) {
        self.bytes.clear();
        self.packets.clear();
    }

    pub fn slice(&self, range: &Range<usize>) -> &[u8] {
        self.bytes.get(range.clone()).unwrap_or_default()
    }

    /// Returns each packet's flow and its range in the buffer.
    pub fn ranges(&self) -> impl Iterator<Item = (PacketFlow, Range<usize>)> {
        let starts = std::iter::once(0).chain(self.packets.iter().map(|packet| packet.end));
        starts.zip(&self.packets).map(|(start, packet)| (packet.flow, start..packet.end))
    }

    /// Moves all packets whose index is at least `from`, and appends them to `to`.
    pub fn move_to(&mut self, from: usize, to: &mut Self) {
        let start = from.checked_sub(1).and_then(|last| self.packets.get(last)).map_or(0, |last| last.end);
        let before = to.bytes.len();
        to.bytes.extend(self.bytes.drain(start..));
        let packets = self.packets.drain(from..);
        to.packets.extend(packets.map(|packet| SealedPacket { end: packet.end - start + before, ..packet }));
    }
}
