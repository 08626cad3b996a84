//! Builds datagrams as applications send them, and defines the programs' return values by name.

use std::net::{IpAddr, SocketAddr};

use millrace_graft_kernel::packet::SessionEnds;

use crate::ends;

pub const PASS_ON: i32 = -1;
pub const SHOT: i32 = 2;
pub const REDIRECT: i32 = 7;
pub const XDP_DROP: i32 = 1;
pub const XDP_PASS: i32 = 2;
pub const ETHERNET: usize = 14;

pub fn v4() -> SessionEnds {
    ends("10.0.0.1:7000", "10.0.0.2:6000")
}

pub fn v6() -> SessionEnds {
    ends("[2001:db8::1]:7000", "[2001:db8::2]:6000")
}

fn sum(parts: &[&[u8]]) -> u16 {
    let bytes = parts.concat();
    let words = bytes.chunks(2).map(|pair| u32::from(pair[0]) << 8 | u32::from(*pair.get(1).unwrap_or(&0)));
    let sum = words.fold(0u64, |sum, word| sum + u64::from(word));
    let sum = (sum & 0xffff) + (sum >> 16);
    ((sum & 0xffff) + (sum >> 16)) as u16
}

fn octets(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(address) => address.octets().to_vec(),
        IpAddr::V6(address) => address.octets().to_vec(),
    }
}

/// Returns the Ethernet frame of a datagram, with correct checksums.
pub fn datagram(ends: &SessionEnds, payload: &[u8]) -> Vec<u8> {
    let SessionEnds { local, remote } = *ends;
    let addresses = [octets(local.ip()), octets(remote.ip())].concat();
    let udp_len = (payload.len() as u16 + 8).to_be_bytes();
    let mut udp = [&local.port().to_be_bytes()[..], &remote.port().to_be_bytes(), &udp_len, &[0; 2]].concat();
    let check = !sum(&[&addresses, &[0, 17], &udp_len, &udp, payload]);
    udp[6..8].copy_from_slice(&if check == 0 { 0xffffu16 } else { check }.to_be_bytes());
    let mut ip = match local {
        SocketAddr::V4(_) => {
            let len = (payload.len() as u16 + 28).to_be_bytes();
            [&[0x45, 0], &len[..], &[0, 1, 0x40, 0, 64, 17, 0, 0], &addresses].concat()
        }
        SocketAddr::V6(_) => [&[0x60, 0, 0, 0], &udp_len[..], &[17, 64], &addresses].concat(),
    };
    if local.is_ipv4() {
        let check = (!sum(&[&ip])).to_be_bytes();
        ip[10..12].copy_from_slice(&check);
    }
    let kind = if local.is_ipv4() { [8, 0] } else { [0x86, 0xdd] };
    [&[2, 0, 0, 0, 0, 1], &[2, 0, 0, 0, 0, 2], &kind[..], &ip, &udp, payload].concat()
}
