//! Watches the addresses of this host by rtnetlink: a session on a removed address can no longer be reached.

use std::{
    io,
    net::{SocketAddr, UdpSocket},
    os::fd::{AsRawFd as _, OwnedFd},
};

use nix::{
    errno::Errno,
    sys::socket::{
        AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, bind, recv, socket,
    },
};

/// RTMGRP_IPV4_IFADDR and RTMGRP_IPV6_IFADDR in linux/rtnetlink.h.
const GROUPS: u32 = 0x10 | 0x100;

pub struct Addresses(OwnedFd);

impl Addresses {
    /// Subscribes to address changes in the calling thread's network namespace.
    pub fn watch() -> io::Result<Self> {
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let told = socket(AddressFamily::Netlink, SockType::Raw, flags, SockProtocol::NetlinkRoute)?;
        bind(told.as_raw_fd(), &NetlinkAddr::new(0, GROUPS))?;
        Ok(Self(told))
    }

    /// Reports whether an address has changed since the last call.
    pub fn have_changed(&self) -> bool {
        let mut buffer = [0; 4096];
        let mut have_changed = false;
        loop {
            match recv(self.0.as_raw_fd(), &mut buffer, MsgFlags::empty()) {
                // ENOBUFS: the socket's buffer was full, so the notification of a change was lost.
                Ok(1..) | Err(Errno::ENOBUFS) => have_changed = true,
                Err(Errno::EINTR) => {}
                Ok(_) | Err(_) => return have_changed,
            }
        }
    }
}

/// Reports whether this host has the address.
pub fn is_here(address: SocketAddr) -> bool {
    let any_port = SocketAddr::new(address.ip(), 0);
    // Binding fails with EADDRNOTAVAIL if no interface has the address.
    !UdpSocket::bind(any_port).is_err_and(|error| error.kind() == io::ErrorKind::AddrNotAvailable)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn local_addresses_are_recognised() {
        assert!(is_here("127.0.0.1:9".parse().unwrap()));
        // No host has these addresses: 192.0.2.1 is for documentation (RFC 5737), and 100::1 is from the discard prefix
        // (RFC 6666).
        assert!(!is_here("192.0.2.1:9".parse().unwrap()));
        assert!(!is_here("[100::1]:9".parse().unwrap()));
    }
}
