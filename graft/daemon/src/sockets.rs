//! Sockets of IP: UDP that fragments nothing, and raw ones. A raw socket is a UDP socket to everything but the kernel: it has
//! addresses, and datagrams.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
};

use rustix::net::sockopt::{
    Ipv4PathMtuDiscovery, Ipv6PathMtuDiscovery, set_ip_mtu_discover, set_ipv6_mtu_discover,
};
use socket2::{Domain, Protocol, Socket, Type};
use tokio::net::UdpSocket;

/// For experiments (RFC 3692).
pub const PROTOCOL_253: i32 = 253;

/// To send to this address.
pub fn udp(to: SocketAddr) -> io::Result<UdpSocket> {
    let any: IpAddr = if to.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let socket = std::net::UdpSocket::bind((any, 0))?;
    socket.set_nonblocking(true)?;
    let socket = UdpSocket::from_std(socket)?;
    send_whole(&socket, to.ip())?;
    Ok(socket)
}

/// Needs CAP_NET_RAW. `of`: an address of the family.
pub fn raw(of: SocketAddr, protocol: i32) -> io::Result<UdpSocket> {
    let socket = Socket::new(Domain::for_address(of), Type::RAW, Some(Protocol::from(protocol)))?;
    socket.set_nonblocking(true)?;
    UdpSocket::from_std(socket.into())
}

/// Packets go out as they are or not at all, whatever is known of the path's MTU.
pub fn send_whole(socket: &UdpSocket, family: IpAddr) -> io::Result<()> {
    match family {
        IpAddr::V4(_) => set_ip_mtu_discover(socket, Ipv4PathMtuDiscovery::PROBE)?,
        IpAddr::V6(_) => set_ipv6_mtu_discover(socket, Ipv6PathMtuDiscovery::PROBE)?,
    }
    Ok(())
}

/// Behind the IP header, which raw sockets of IPv4 have in front.
pub fn payload(family: IpAddr, is_raw: bool, packet: &[u8]) -> &[u8] {
    let header = match (is_raw && family.is_ipv4(), packet.first()) {
        (true, Some(first)) => usize::from(first & 15) * 4,
        _ => 0,
    };
    packet.get(header..).unwrap_or_default()
}

/// RFC 1071.
pub fn checksum(packet: &[u8]) -> u16 {
    let byte = |pair: &[u8], at: usize| u32::from(pair.get(at).copied().unwrap_or(0));
    let mut sum: u32 = packet.chunks(2).map(|pair| byte(pair, 0) << 8 | byte(pair, 1)).sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_header_is_taken_off_where_there_is_one() {
        let (v4, v6) = (Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into());
        let packet = [&[0x45; 20][..], b"data"].concat();
        assert_eq!(payload(v4, true, &packet), b"data");
        assert_eq!(payload(v4, true, &packet[..10]), b"", "cut off");
        assert_eq!(payload(v4, true, b""), b"");
        assert_eq!((payload(v4, false, b"data"), payload(v6, true, b"data")), (&b"data"[..], &b"data"[..]));
    }
}
