//! What routers and hosts say by ICMP of packets of IP protocol 253. Nobody but a raw socket hears it, and the kernel learns what a path
//! carries from an error only where somebody does.

#![allow(unsafe_code)]

use std::fmt;
use std::io::{self, IoSliceMut};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use millrace_kernel::udp::{drop_all, set};
use nix::libc;
use nix::sys::socket::{
    ControlMessageOwned, MsgFlags, SockaddrStorage, bind, connect, recvmsg, setsockopt, sockopt,
};

use crate::joint::Protocol;

/// Of the packets that an error is about, behind IP's header: what routers repeat at least.
const REPEATED: usize = 8;

/// Errors about packets of one host to another. It receives nothing else.
#[derive(Debug)]
pub struct Errors(OwnedFd);

/// About a packet that this host has sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Error {
    /// Of the packet; its form on the wire has them where UDP has them.
    pub ports: [u16; 2],
    /// Who says so.
    pub by: Option<IpAddr>,
    pub what: What,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum What {
    /// The path carries packets of so many bytes with IP's header, or fewer than this one had.
    TooLong { mtu: Option<u32> },
    /// The host has nobody for the protocol: no daemon runs there.
    NoProtocol,
    /// A firewall, on the way or at the host.
    Prohibited,
    /// No route, no host, or some other code of type 3 (of IPv6: 1).
    Unreachable,
}

impl fmt::Display for What {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooLong { mtu: Some(mtu) } => {
                write!(formatter, "packets of more than {mtu} bytes do not pass")
            }
            Self::TooLong { mtu: None } => formatter.write_str("packets are too long for the path"),
            Self::NoProtocol => formatter.write_str("nobody is there for IP protocol 253"),
            Self::Prohibited => formatter.write_str("IP protocol 253 is prohibited"),
            Self::Unreachable => formatter.write_str("the other end cannot be reached"),
        }
    }
}

impl Errors {
    /// Of packets from `local` to `remote`, of the same family.
    ///
    /// # Errors
    /// Without CAP_NET_RAW, or where there is no route yet.
    pub fn open(local: IpAddr, remote: IpAddr) -> io::Result<Self> {
        let family = if local.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
        let kind = libc::SOCK_RAW | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
        // SAFETY: no pointers; what it returns is a descriptor of ours, or an error.
        let socket = unsafe { libc::socket(family, kind, Protocol::Ip253.number().into()) };
        if socket < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: it was just opened, and nobody else has it.
        let socket = unsafe { OwnedFd::from_raw_fd(socket) };
        drop_all(&socket)?;
        // The address may be on its way.
        match local {
            IpAddr::V4(_) => {
                setsockopt(&socket, sockopt::IpFreebind, &true)?;
                setsockopt(&socket, sockopt::Ipv4RecvErr, &true)?;
            }
            IpAddr::V6(_) => {
                set(&socket, libc::SOL_IPV6, libc::IPV6_FREEBIND, &1_i32)?;
                setsockopt(&socket, sockopt::Ipv6RecvErr, &true)?;
            }
        }
        bind(socket.as_raw_fd(), &SockaddrStorage::from(SocketAddr::new(local, 0)))?;
        connect(socket.as_raw_fd(), &SockaddrStorage::from(SocketAddr::new(remote, 0)))?;
        Ok(Self(socket))
    }

    /// The next one that was heard; `None`: no more for now.
    pub fn next(&self) -> io::Result<Option<Error>> {
        let mut repeated = [0; REPEATED];
        let mut space = nix::cmsg_space!(libc::sock_extended_err, libc::sockaddr_in6);
        loop {
            let mut slices = [IoSliceMut::new(&mut repeated)];
            let flags = MsgFlags::MSG_ERRQUEUE | MsgFlags::MSG_DONTWAIT;
            let heard =
                match recvmsg::<SockaddrStorage>(self.0.as_raw_fd(), &mut slices, Some(&mut space), flags) {
                    Ok(heard) => heard,
                    Err(nix::Error::EAGAIN) => return Ok(None),
                    Err(error) => return Err(error.into()),
                };
            let (bytes, mut found) = (heard.bytes, None);
            for message in heard.cmsgs()? {
                found = match message {
                    ControlMessageOwned::Ipv4RecvErr(error, by) => {
                        let by = by.map(|by| IpAddr::V4(u32::from_be(by.sin_addr.s_addr).into()));
                        told(error).map(|what| (by, what))
                    }
                    ControlMessageOwned::Ipv6RecvErr(error, by) => {
                        let by = by.map(|by| IpAddr::V6(by.sin6_addr.s6_addr.into()));
                        told(error).map(|what| (by, what))
                    }
                    _ => continue,
                };
            }
            let ports = ports_of(repeated.get(..bytes).unwrap_or_default());
            if let Some(((by, what), ports)) = found.zip(ports) {
                return Ok(Some(Error { ports, by, what }));
            }
        }
    }
}

fn ports_of(repeated: &[u8]) -> Option<[u16; 2]> {
    let [a, b, c, d] = *repeated.first_chunk()?;
    Some([u16::from_be_bytes([a, b]), u16::from_be_bytes([c, d])])
}

/// `None`: it says nothing of the path.
fn told(error: libc::sock_extended_err) -> Option<What> {
    let mtu = (error.ee_info > 0).then_some(error.ee_info);
    // RFC 792 with RFC 1191 and 1812, and RFC 4443.
    Some(match (error.ee_origin, error.ee_type, error.ee_code) {
        (libc::SO_EE_ORIGIN_ICMP, 3, 4) | (libc::SO_EE_ORIGIN_ICMP6, 2, _) => What::TooLong { mtu },
        // The kernel of this host, which knows the path.
        (libc::SO_EE_ORIGIN_LOCAL, ..) if error.ee_errno == libc::EMSGSIZE as u32 => What::TooLong { mtu },
        (libc::SO_EE_ORIGIN_ICMP, 3, 2) | (libc::SO_EE_ORIGIN_ICMP6, 4, 1) => What::NoProtocol,
        (libc::SO_EE_ORIGIN_ICMP, 3, 9 | 10 | 13) | (libc::SO_EE_ORIGIN_ICMP6, 1, 1 | 5) => What::Prohibited,
        (libc::SO_EE_ORIGIN_ICMP, 3, _) | (libc::SO_EE_ORIGIN_ICMP6, 1, _) => What::Unreachable,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_told_is_told_apart() {
        let (v4, v6) = (libc::SO_EE_ORIGIN_ICMP, libc::SO_EE_ORIGIN_ICMP6);
        for (origin, kind, code, info, want) in [
            (v4, 3, 4, 1300, Some(What::TooLong { mtu: Some(1300) })),
            (v4, 3, 4, 0, Some(What::TooLong { mtu: None })),
            (v6, 2, 0, 1280, Some(What::TooLong { mtu: Some(1280) })),
            (v4, 3, 2, 0, Some(What::NoProtocol)),
            (v6, 4, 1, 6, Some(What::NoProtocol)),
            (v4, 3, 13, 0, Some(What::Prohibited)),
            (v6, 1, 1, 0, Some(What::Prohibited)),
            (v4, 3, 1, 0, Some(What::Unreachable)),
            (v6, 1, 3, 0, Some(What::Unreachable)),
            (v4, 11, 0, 0, None),
            (v6, 4, 0, 0, None),
        ] {
            let error = libc::sock_extended_err {
                ee_errno: 0,
                ee_origin: origin,
                ee_type: kind,
                ee_code: code,
                ee_pad: 0,
                ee_info: info,
                ee_data: 0,
            };
            assert_eq!(told(error), want, "{origin} {kind} {code}");
        }
        assert_eq!(ports_of(&[0x1b, 0x58, 0x17, 0x70, 0, 0, 0, 0]), Some([7000, 6000]));
        assert_eq!(ports_of(&[1, 2, 3]), None);
    }
}
