//! Builds frames as clients and servers send them, and malformed frames.

use std::net::{IpAddr, SocketAddr};

pub const VERSIONS: [u32; 2] = [0x0000_0001, 0x6b33_43cf];
/// Length of the UDP payload of an Initial, in bytes.
pub const FULL: usize = 1200;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LongPacketType {
    Initial,
    ZeroRtt,
    Handshake,
    Retry,
}

impl LongPacketType {
    /// Returns the bits for the type of a long header, which differ between the QUIC versions.
    fn bits(self, version: u32) -> u8 {
        let number = self as u8;
        (if version == VERSIONS[1] { number + 1 } else { number } & 3) << 4
    }
}

pub fn varint(value: usize) -> Vec<u8> {
    match value {
        0..64 => vec![value as u8],
        64..16384 => (0x4000 | value as u16).to_be_bytes().to_vec(),
        _ => (0x8000_0000 | value as u32).to_be_bytes().to_vec(),
    }
}

/// Returns a packet with a long header and padding up to `len` bytes. Its length field covers the padding.
pub fn long(kind: LongPacketType, version: u32, id: &[u8], from: &[u8], token: &[u8], len: usize) -> Vec<u8> {
    let mut packet = long_start(0xc0 | kind.bits(version), version, id, from);
    if kind == LongPacketType::Initial {
        packet.extend(varint(token.len()));
        packet.extend(token);
    }
    let rest = len.saturating_sub(packet.len() + 2);
    packet.extend((0x4000 | rest as u16).to_be_bytes());
    packet.resize(packet.len() + rest, 0xaa);
    packet
}

pub fn long_start(first: u8, version: u32, id: &[u8], from: &[u8]) -> Vec<u8> {
    let mut packet = vec![first];
    packet.extend(version.to_be_bytes());
    for id in [id, from] {
        packet.push(id.len() as u8);
        packet.extend(id);
    }
    packet
}

pub fn initial(version: u32, id: &[u8], from: &[u8], token: &[u8]) -> Vec<u8> {
    long(LongPacketType::Initial, version, id, from, token, FULL)
}

pub fn short(id: &[u8], len: usize) -> Vec<u8> {
    let mut packet = vec![0x40];
    packet.extend(id);
    packet.resize(len, 0xbb);
    packet
}

/// A frame of UDP over IP over Ethernet, with configurable faults.
#[derive(Clone, Debug)]
pub struct TestFrame {
    pub source: SocketAddr,
    pub destination: SocketAddr,
    /// EtherTypes of the VLAN tags.
    pub tags: Vec<u16>,
    /// Number of 32-bit words of IPv4 options.
    pub options: usize,
    /// Type and length field (in units of 8 bytes) of each IPv6 extension header.
    pub extensions: Vec<(u8, usize)>,
    /// Fragment offset in units of 8 bytes, and the bit "more fragments".
    pub fragment: Option<(u16, bool)>,
    pub protocol: u8,
    /// Error in bytes that is added to the correct length in the UDP header; 0 for a valid header.
    pub wrong_udp_len: i32,
    pub wrong_ip_len: i32,
    /// Number of bytes after the IP packet, such as Ethernet padding.
    pub trailer: usize,
    pub payload: Vec<u8>,
}

impl TestFrame {
    pub fn new(source: SocketAddr, destination: SocketAddr, payload: Vec<u8>) -> Self {
        Self {
            source,
            destination,
            tags: Vec::new(),
            options: 0,
            extensions: Vec::new(),
            fragment: None,
            protocol: 17,
            wrong_udp_len: 0,
            wrong_ip_len: 0,
            trailer: 0,
            payload,
        }
    }

    pub fn bytes(&self) -> Vec<u8> {
        let mut frame = [[2, 0, 0, 0, 0, 1], [2, 0, 0, 0, 0, 2]].concat();
        for kind in &self.tags {
            frame.extend(kind.to_be_bytes());
            frame.extend([0x00, 0x07]);
        }
        let udp = self.udp();
        match (self.source.ip(), self.destination.ip()) {
            (IpAddr::V4(from), IpAddr::V4(to)) => {
                frame.extend([8, 0]);
                let len = 20 + 4 * self.options + udp.len();
                let fragment = self.fragment.map_or(0, |(at, more)| at | if more { 0x2000 } else { 0 });
                let start = frame.len();
                frame.extend([0x45 + self.options as u8, 0]);
                frame.extend(((len as i32 + self.wrong_ip_len) as u16).to_be_bytes());
                frame.extend([0, 1]);
                frame.extend(fragment.to_be_bytes());
                frame.extend([64, self.protocol, 0, 0]);
                frame.extend([from.octets(), to.octets()].concat());
                frame.extend(vec![1; 4 * self.options]);
                let check = !sum(&frame[start..], 0);
                frame[start + 10..start + 12].copy_from_slice(&check.to_be_bytes());
            }
            (IpAddr::V6(from), IpAddr::V6(to)) => {
                frame.extend([0x86, 0xdd, 0x60, 0, 0, 0]);
                let extensions = self.extensions();
                let len = extensions.len() + udp.len();
                frame.extend(((len as i32 + self.wrong_ip_len) as u16).to_be_bytes());
                let first = self.extensions.first().map(|(kind, _)| *kind);
                let fragment = self.fragment.map(|_| 44);
                frame.extend([first.or(fragment).unwrap_or(self.protocol), 64]);
                frame.extend([from.octets(), to.octets()].concat());
                frame.extend(extensions);
            }
            families => panic!("{families:?}"),
        }
        frame.extend(udp);
        frame.resize(frame.len() + self.trailer, 0);
        frame
    }

    fn udp(&self) -> Vec<u8> {
        let len = (8 + self.payload.len() as i32 + self.wrong_udp_len) as u16;
        let mut udp = [self.source.port(), self.destination.port(), len, 0].map(u16::to_be_bytes).concat();
        udp.extend(&self.payload);
        udp
    }

    fn extensions(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        let kinds = self.extensions.iter().map(|(kind, _)| *kind).chain(self.fragment.map(|_| 44));
        let mut next = kinds.chain([self.protocol]).skip(1);
        for (kind, units) in &self.extensions {
            bytes.push(next.next().expect("a header follows"));
            if *kind == 44 {
                bytes.resize(bytes.len() + 7, 0);
                continue;
            }
            bytes.push(*units as u8);
            bytes.resize(bytes.len() + 6 + 8 * units, 0);
        }
        if let Some((at, more)) = self.fragment {
            bytes.extend([next.next().expect("a header follows"), 0]);
            bytes.extend((at << 3 | u16::from(more)).to_be_bytes());
            bytes.extend([0, 0, 0, 1]);
        }
        bytes
    }
}

pub fn sum(bytes: &[u8], start: u32) -> u16 {
    let words = bytes.chunks(2).map(|pair| u32::from(pair[0]) << 8 | u32::from(*pair.get(1).unwrap_or(&0)));
    let sum = words.fold(start, |sum, word| sum + word);
    let sum = (sum & 0xffff) + (sum >> 16);
    ((sum & 0xffff) + (sum >> 16)) as u16
}

/// Returns the UDP payload of the gate's answer to the frame `question`. Checks that all headers are right and lead
/// back to the sender.
pub fn payload_of_answer(question: &TestFrame, answer: &[u8]) -> Vec<u8> {
    let asked = question.bytes();
    let link = 12 + 4 * question.tags.len() + 2;
    assert_eq!(answer[..12], [&asked[6..12], &asked[..6]].concat(), "link addresses");
    assert_eq!(answer[12..link], asked[12..link], "tags and protocol");
    let ip = &answer[link..];
    let (addresses, udp) = match question.source.ip() {
        IpAddr::V4(_) => {
            assert_eq!(ip[0], 0x45);
            assert_eq!(sum(&ip[..20], 0), 0xffff, "IPv4 checksum");
            assert_eq!(usize::from(u16::from_be_bytes([ip[2], ip[3]])), ip.len(), "IPv4 length");
            assert_eq!(ip[9], 17);
            (&ip[12..20], &ip[20..])
        }
        IpAddr::V6(_) => {
            assert_eq!(ip[..4], [0x60, 0, 0, 0]);
            assert_eq!(usize::from(u16::from_be_bytes([ip[4], ip[5]])) + 40, ip.len(), "IPv6 length");
            assert_eq!(ip[6], 17);
            (&ip[8..40], &ip[40..])
        }
    };
    let octets = |address: IpAddr| match address {
        IpAddr::V4(address) => address.octets().to_vec(),
        IpAddr::V6(address) => address.octets().to_vec(),
    };
    let back = [octets(question.destination.ip()), octets(question.source.ip())].concat();
    assert_eq!(addresses, back, "addresses");
    assert_eq!(udp[..2], question.destination.port().to_be_bytes(), "source port");
    assert_eq!(udp[2..4], question.source.port().to_be_bytes(), "destination port");
    assert_eq!(usize::from(u16::from_be_bytes([udp[4], udp[5]])), udp.len(), "UDP length");
    let pseudo = u32::from(sum(addresses, 17 + udp.len() as u32));
    assert_ne!(udp[6..8], [0, 0], "no UDP checksum");
    assert_eq!(sum(udp, pseudo), 0xffff, "UDP checksum");
    udp[8..].to_vec()
}
