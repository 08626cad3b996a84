//! Says when an address of this host comes or goes: who had a session by it cannot be reached any more.

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

/// linux/rtnetlink.h: RTMGRP_IPV4_IFADDR and RTMGRP_IPV6_IFADDR.
const GROUPS: u32 = 0x10 | 0x100;

pub struct Addresses(OwnedFd);

impl Addresses {
    /// Of the calling thread's network namespace.
    pub fn watch() -> io::Result<Self> {
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let told = socket(AddressFamily::Netlink, SockType::Raw, flags, SockProtocol::NetlinkRoute)?;
        bind(told.as_raw_fd(), &NetlinkAddr::new(0, GROUPS))?;
        Ok(Self(told))
    }

    /// Since the last time.
    pub fn have_changed(&self) -> bool {
        let (mut buffer, mut have_changed) = ([0; 4096], false);
        loop {
            match recv(self.0.as_raw_fd(), &mut buffer, MsgFlags::empty()) {
                // More than was kept for us.
                Ok(1..) | Err(Errno::ENOBUFS) => have_changed = true,
                Err(Errno::EINTR) => {}
                Ok(_) | Err(_) => return have_changed,
            }
        }
    }
}

/// Whether this host has it.
pub fn is_here(address: SocketAddr) -> bool {
    let any_port = SocketAddr::new(address.ip(), 0);
    !UdpSocket::bind(any_port).is_err_and(|error| error.kind() == io::ErrorKind::AddrNotAvailable)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_here_is_here() {
        assert!(is_here("127.0.0.1:9".parse().unwrap()));
        // RFC 5737, and the discard prefix of RFC 6666.
        assert!(!is_here("192.0.2.1:9".parse().unwrap()));
        assert!(!is_here("[100::1]:9".parse().unwrap()));
    }
}
