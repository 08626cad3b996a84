//! IP sockets: UDP sockets that never fragment, and raw sockets. A raw socket has the Rust type of a UDP socket here,
//! since both kinds send and receive datagrams.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
};

use rustix::net::sockopt::{
    Ipv4PathMtuDiscovery, Ipv6PathMtuDiscovery, set_ip_mtu_discover, set_ipv6_mtu_discover,
};
use socket2::{Domain, Protocol, Socket, Type};
use tokio::net::UdpSocket;

/// Opens a UDP socket that can send to this address.
pub fn udp(to: SocketAddr) -> io::Result<UdpSocket> {
    let any: IpAddr = if to.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let socket = std::net::UdpSocket::bind((any, 0))?;
    socket.set_nonblocking(true)?;
    let socket = UdpSocket::from_std(socket)?;
    send_whole(&socket, to.ip())?;
    Ok(socket)
}

/// Opens a raw socket for this address's family, which requires CAP_NET_RAW.
pub fn raw(of: SocketAddr, protocol: i32) -> io::Result<UdpSocket> {
    let socket = Socket::new(Domain::for_address(of), Type::RAW, Some(Protocol::from(protocol)))?;
    socket.set_nonblocking(true)?;
    UdpSocket::from_std(socket.into())
}

/// Makes the socket send whole datagrams only, even if they exceed the path MTU that the kernel has cached.
fn send_whole(socket: &UdpSocket, family: IpAddr) -> io::Result<()> {
    // PMTUDISC_PROBE sets the don't-fragment bit, and ignores the path MTU that the kernel has cached.
    match family {
        IpAddr::V4(_) => set_ip_mtu_discover(socket, Ipv4PathMtuDiscovery::PROBE)?,
        IpAddr::V6(_) => set_ipv6_mtu_discover(socket, Ipv6PathMtuDiscovery::PROBE)?,
    }
    Ok(())
}

/// Returns the payload of a packet that a raw socket has received. Raw IPv4 sockets deliver the IP header in front of
/// it.
pub fn payload(family: IpAddr, packet: &[u8]) -> &[u8] {
    // The low half of the first byte is the IP header's length in words of 4 bytes (RFC 791, section 3.1).
    let header = match (family.is_ipv4(), packet.first()) {
        (true, Some(first)) => usize::from(first & 15) * 4,
        _ => 0,
    };
    packet.get(header..).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ip_header_of_raw_ipv4_packets_is_removed() {
        let v4 = Ipv4Addr::LOCALHOST.into();
        let v6 = Ipv6Addr::LOCALHOST.into();
        let packet = [&[0x45; 20][..], b"data"].concat();
        assert_eq!(payload(v4, &packet), b"data");
        assert_eq!(payload(v4, &packet[..10]), b"", "cut off");
        assert_eq!(payload(v4, b""), b"");
        assert_eq!(payload(v6, b"data"), b"data");
    }
}
