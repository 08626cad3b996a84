use std::{
    net::{IpAddr, SocketAddr},
    ops::Range,
};

/// Where packets go, which of this host's addresses they come from, and as what.
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

/// Sealed packets, one behind the other in one buffer.
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

impl Packets {
    /// Adds the packet that `build` appends to the buffer, if it says that there is one, and says so too.
    pub fn push(&mut self, flow: Flow, build: impl FnOnce(&mut Vec<u8>) -> bool) -> bool {
        let start = self.bytes.len();
        let built = build(&mut self.bytes) && self.bytes.len() > start;
        if built {
            self.packets.push(Packet { flow, end: self.bytes.len() });
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

    pub fn clear(&mut self) {
        self.bytes.clear();
        self.packets.clear();
    }

    pub fn slice(&self, range: &Range<usize>) -> &[u8] {
        self.bytes.get(range.clone()).unwrap_or_default()
    }

    /// Where in the buffer each is.
    pub fn ranges(&self) -> impl Iterator<Item = (Flow, Range<usize>)> {
        let starts = std::iter::once(0).chain(self.packets.iter().map(|packet| packet.end));
        starts.zip(&self.packets).map(|(start, packet)| (packet.flow, start..packet.end))
    }

    /// Moves the packets from `from` on to the end of `to`.
    pub fn move_to(&mut self, from: usize, to: &mut Self) {
        let start = from.checked_sub(1).and_then(|last| self.packets.get(last)).map_or(0, |last| last.end);
        let before = to.bytes.len();
        to.bytes.extend(self.bytes.drain(start..));
        let packets = self.packets.drain(from..);
        to.packets.extend(packets.map(|packet| Packet { end: packet.end - start + before, ..packet }));
    }
}
