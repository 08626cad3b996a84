//! Builds and sends TCP segments: copies of SYNs that the kernel has held back, resets that refuse such SYNs, and test
//! packets that ask the firewall.

use std::{
    io,
    net::{IpAddr, SocketAddr},
};

use millrace_kernel::checksum::checksum;
use socket2::{Domain, Protocol, Socket, Type};

/// IPPROTO_RAW: a socket of this protocol sends packets that include their IP header.
const PROTOCOL_RAW: i32 = 255;
const TCP: u8 = 6;
const HOPS: u8 = 64;
const SYN: u8 = 0x02;
const ACK: u8 = 0x10;
const RST_ACK: u8 = 0x14;
/// TCP options of an ordinary SYN on Ethernet: maximum segment size, selective acknowledgements, a timestamp, and the
/// window scale.
const OPTIONS: [u8; 20] = [2, 4, 0x05, 0xb4, 4, 2, 8, 10, 0, 0, 0, 1, 0, 0, 0, 0, 1, 3, 3, 7];
const WINDOW: u16 = 64_240;
const HEADER: usize = 20;
const CHECKSUM: std::ops::Range<usize> = 16..18;

/// Raw sockets for TCP segments, which need CAP_NET_RAW.
pub struct SynSender {
    v4: Socket,
    /// Raw IPv6 socket. `None` if this host has no IPv6.
    v6: Option<Socket>,
}

impl SynSender {
    /// Opens the sockets. `mark` is set on all packets that they send.
    pub fn new(mark: Option<u32>) -> io::Result<Self> {
        let raw = |domain| {
            let socket = Socket::new(domain, Type::RAW, Some(Protocol::from(PROTOCOL_RAW)))?;
            mark.map_or(Ok(()), |mark| socket.set_mark(mark))?;
            Ok::<_, io::Error>(socket)
        };
        Ok(Self { v4: raw(Domain::IPV4)?, v6: raw(Domain::IPV6).ok() })
    }

    /// Sends the segment unchanged, except for its checksum.
    pub fn send(&self, from: SocketAddr, to: SocketAddr, segment: &[u8]) -> io::Result<()> {
        let packet = packet(from.ip(), to.ip(), segment).ok_or(io::ErrorKind::InvalidInput)?;
        let socket = if to.is_ipv4() { Some(&self.v4) } else { self.v6.as_ref() };
        let socket = socket.ok_or(io::ErrorKind::Unsupported)?;
        // The kernel rejects a port in the address of a raw IPv6 socket.
        socket.send_to(&packet, &SocketAddr::new(to.ip(), 0).into()).map(drop)
    }

    /// Refuses a SYN that the client at `to` has sent to the server at `from`. The refusal is the reset that RFC 9293
    /// requires for a port where nobody listens.
    pub fn refuse(&self, from: SocketAddr, to: SocketAddr, syn: &[u8]) -> io::Result<()> {
        let answer = refusal(from.port(), to.port(), syn).ok_or(io::ErrorKind::InvalidInput)?;
        self.send(from, to, &answer)
    }
}

fn refusal(from: u16, to: u16, syn: &[u8]) -> Option<[u8; HEADER]> {
    // The refusal acknowledges the sequence number of the SYN.
    let sequence = u32::from_be_bytes(*syn.get(4..)?.first_chunk()?);
    let mut answer = [0; HEADER];
    answer[..2].copy_from_slice(&from.to_be_bytes());
    answer[2..4].copy_from_slice(&to.to_be_bytes());
    answer[8..12].copy_from_slice(&sequence.wrapping_add(1).to_be_bytes());
    // The upper half of this byte is the TCP header's length in words of 4 bytes.
    answer[12] = (HEADER as u8 / 4) << 4;
    answer[13] = RST_ACK;
    Some(answer)
}

/// Returns a SYN with this sequence number, or a SYN-ACK for the SYN with the number `answers`.
pub fn first(from: u16, to: u16, number: u32, answers: Option<u32>) -> Vec<u8> {
    let flags = if answers.is_some() { SYN | ACK } else { SYN };
    let mut segment = Vec::with_capacity(HEADER + OPTIONS.len());
    segment.extend(from.to_be_bytes());
    segment.extend(to.to_be_bytes());
    segment.extend(number.to_be_bytes());
    segment.extend(answers.map_or(0, |number| number.wrapping_add(1)).to_be_bytes());
    segment.extend([((HEADER + OPTIONS.len()) as u8 / 4) << 4, flags]);
    segment.extend(WINDOW.to_be_bytes());
    segment.extend([0; 4]);
    segment.extend(OPTIONS);
    segment
}

/// Returns the complete packet with its IP header, or `None` if the two addresses are of different families or the
/// segment has no TCP header.
pub fn packet(from: IpAddr, to: IpAddr, segment: &[u8]) -> Option<Vec<u8>> {
    let length = u16::try_from(segment.len()).ok()?.to_be_bytes();
    let (mut packet, pseudo) = match (from, to) {
        (IpAddr::V4(from), IpAddr::V4(to)) => {
            let [high, low] = u16::try_from(HEADER + segment.len()).ok()?.to_be_bytes();
            let ends = [from.octets(), to.octets()].concat();
            let header = [0x45, 0, high, low, 0, 0, 0x40, 0, HOPS, TCP];
            let sum = checksum(&[&header[..], &[0, 0], &ends].concat()).to_be_bytes();
            ([&header[..], &sum, &ends].concat(), [&ends[..], &[0, TCP], &length].concat())
        }
        (IpAddr::V6(from), IpAddr::V6(to)) => {
            let header = [0x60, 0, 0, 0, length[0], length[1], TCP, HOPS];
            let ends = [from.octets(), to.octets()].concat();
            ([&header[..], &ends].concat(), [&ends[..], &[0, 0], &length, &[0, 0, 0, TCP]].concat())
        }
        _ => return None,
    };
    // The checksum also covers a pseudo header (RFC 9293, section 3.1).
    let mut segment = segment.to_vec();
    segment.get_mut(CHECKSUM)?.fill(0);
    let sum = checksum(&[&pseudo[..], &segment].concat());
    segment.get_mut(CHECKSUM)?.copy_from_slice(&sum.to_be_bytes());
    packet.extend(segment);
    Some(packet)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SENT: [u8; 24] =
        [0x9c, 0x40, 0x1b, 0xbc, 0, 0, 0, 255, 0, 0, 0, 0, 0x60, 2, 0xff, 0xff, 7, 7, 0, 0, 2, 4, 5, 0xb4];

    #[test]
    fn built_segments_have_valid_checksums() {
        for (from, to, header) in [("127.0.0.1", "127.0.0.2", 20), ("::1", "fd00::1", 40)] {
            let from = from.parse().unwrap();
            let to = to.parse().unwrap();
            let packet = packet(from, to, &SENT).unwrap();
            let segment = &packet[header..];
            assert!(header == 40 || checksum(&packet[..header]) == 0);
            assert_eq!((&segment[..16], &segment[18..]), (&SENT[..16], &SENT[18..]));
            let ends = if header == 20 { &packet[12..20] } else { &packet[8..40] };
            let pseudo = [ends, &[0, TCP, 0, SENT.len() as u8]].concat();
            assert_eq!(checksum(&[&pseudo[..], segment].concat()), 0);
        }
        let syn = first(7, 8, 9, None);
        let answer = first(8, 7, 1, Some(u32::MAX));
        assert_eq!(syn[..14], [0, 7, 0, 8, 0, 0, 0, 9, 0, 0, 0, 0, 0xa0, SYN]);
        assert_eq!(answer[..14], [0, 8, 0, 7, 0, 0, 0, 1, 0, 0, 0, 0, 0xa0, SYN | ACK]);
        assert_eq!(syn.len(), 40);
        let v4 = "127.0.0.1".parse().unwrap();
        let v6 = "::1".parse().unwrap();
        assert_eq!((packet(v4, v6, &SENT), packet(v4, v4, &SENT[..10])), (None, None));
    }

    #[test]
    fn tcp_reset_that_refuses_a_connection_acknowledges_the_syn() {
        let answer = refusal(7100, 40_000, &SENT).unwrap();
        assert_eq!(answer[..14], [0x1b, 0xbc, 0x9c, 0x40, 0, 0, 0, 0, 0, 0, 1, 0, 0x50, 0x14]);
        assert_eq!(refusal(1, 2, &SENT[..7]), None);
    }
}
