//! Sends the daemon's own datagrams of a session, which contain messages instead of application data.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, OwnedFd};

use millrace_kernel::netlink::octets;
use nix::sys::socket::{
    AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, SockaddrStorage, bind, sendto, setsockopt,
    socket, sockopt,
};

use millrace_kernel::checksum::checksum;

use super::SessionEnds;

/// Returns the packet mark (skb->mark) of the daemon's messages. It differs from the mark of functions' packets, and
/// its lowest three bits are the number of a network path.
pub(super) fn message_mark(mark: u32) -> u32 {
    (mark ^ 1 << 30) & !7
}

/// Sends a datagram by every network path of the session, from the session's local address and port. It uses a raw
/// socket, since an application's socket may use the port. The packet mark tells the dispatcher that the datagram
/// already has a graft frame.
pub(super) fn send_by_all(ends: &SessionEnds, paths: u8, mark: u32, payload: &[u8]) -> io::Result<()> {
    let socket = raw(ends)?;
    let datagram = datagram(ends, payload);
    let without_port = |address: SocketAddr| SockaddrStorage::from(SocketAddr::new(address.ip(), 0));
    bind(socket.as_raw_fd(), &without_port(ends.local))?;
    for path in 0..u32::from(paths.max(1)) {
        setsockopt(&socket, sockopt::Mark, &(mark + path))?;
        sendto(socket.as_raw_fd(), &datagram, &without_port(ends.remote), MsgFlags::empty())?;
    }
    Ok(())
}

fn raw(ends: &SessionEnds) -> io::Result<OwnedFd> {
    let family = if ends.local.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 };
    Ok(socket(family, SockType::Raw, SockFlag::SOCK_CLOEXEC, SockProtocol::Udp)?)
}

fn datagram(ends: &SessionEnds, payload: &[u8]) -> Vec<u8> {
    let bytes = (8 + payload.len() as u16).to_be_bytes();
    let ports = [ends.local.port().to_be_bytes(), ends.remote.port().to_be_bytes()].concat();
    let addresses = [octets(ends.local.ip()), octets(ends.remote.ip())].concat();
    let all = [&addresses, &[0, 17][..], &bytes, &ports, &bytes, payload].concat();
    let check = checksum(&all);
    // A UDP checksum of 0 means "no checksum", so 0xffff is sent instead.
    let check = if check == 0 { u16::MAX } else { check }.to_be_bytes();
    [&ports[..], &bytes, &check, payload].concat()
}
