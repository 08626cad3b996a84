//! ICMP errors about packets of IP protocol 253. Only a raw socket receives them. The kernel updates a path's MTU
//! from such an error only if some socket receives it.

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

use crate::packet::WireProtocol;

/// Number of bytes behind the failed packet's IP header that every ICMP error contains (RFC 792). The ports are in
/// these bytes.
const REPEATED: usize = 8;

/// A raw socket that receives ICMP errors about packets from one host to another, but no data packets.
#[derive(Debug)]
pub struct IcmpErrors(OwnedFd);

/// An ICMP error about a packet that this host has sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Error {
    /// Source and destination port of the packet. Protocol 253 has its ports at UDP's offsets.
    pub ports: [u16; 2],
    /// Address of the router or host that sent the ICMP error, if known.
    pub by: Option<IpAddr>,
    /// The kind of the error.
    pub what: IcmpErrorKind,
}

/// The kind of an ICMP error, as far as it concerns protocol 253.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IcmpErrorKind {
    /// The packet was longer than the MTU of the path.
    TooLong {
        /// The MTU of the path in bytes, IP header included; `None`: the error does not state it.
        mtu: Option<u32>,
    },
    /// The peer's host has no receiver for IP protocol 253, so no daemon runs there.
    NoProtocol,
    /// A firewall on the path or at the peer rejected the packet.
    Prohibited,
    /// There is no route or no such host, or the error has another code of "destination unreachable".
    Unreachable,
}

impl fmt::Display for IcmpErrorKind {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooLong { mtu: Some(mtu) } => {
                write!(formatter, "packets of more than {mtu} bytes do not pass")
            }
            Self::TooLong { mtu: None } => formatter.write_str("packets are longer than the path's MTU"),
            Self::NoProtocol => formatter.write_str("the host has no receiver for IP protocol 253"),
            Self::Prohibited => formatter.write_str("IP protocol 253 is prohibited"),
            Self::Unreachable => formatter.write_str("the other end cannot be reached"),
        }
    }
}

impl IcmpErrors {
    /// Opens a socket for ICMP errors about packets from `local` to `remote`, two addresses of the same family.
    ///
    /// # Errors
    /// The process lacks CAP_NET_RAW, or there is no route to `remote` yet.
    pub fn open(local: IpAddr, remote: IpAddr) -> io::Result<Self> {
        let family = if local.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
        let kind = libc::SOCK_RAW | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
        // SAFETY: the call takes no pointers, and returns a descriptor of this process or an error.
        let socket = unsafe { libc::socket(family, kind, WireProtocol::Ip253.number().into()) };
        if socket < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor was just opened, and has no other owner.
        let socket = unsafe { OwnedFd::from_raw_fd(socket) };
        // A raw socket also receives a copy of each packet of the protocol. The filter drops these copies; ICMP errors
        // still reach the error queue.
        drop_all(&socket)?;
        // IP_FREEBIND allows to bind before the interface has the address.
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

    /// Returns the next ICMP error without waiting; `None` if there is none.
    pub fn next(&self) -> io::Result<Option<Error>> {
        // The error queue returns the start of the packet that caused the error.
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
            let bytes = heard.bytes;
            let mut found = None;
            for message in heard.cmsgs()? {
                found = match message {
                    ControlMessageOwned::Ipv4RecvErr(error, by) => {
                        let by = by.map(|by| IpAddr::V4(u32::from_be(by.sin_addr.s_addr).into()));
                        parse_error(error).map(|what| (by, what))
                    }
                    ControlMessageOwned::Ipv6RecvErr(error, by) => {
                        let by = by.map(|by| IpAddr::V6(by.sin6_addr.s6_addr.into()));
                        parse_error(error).map(|what| (by, what))
                    }
                    // Other control messages, such as time stamps, are skipped.
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

/// Returns the kind of an ICMP error; `None` if the error does not concern the path.
fn parse_error(error: libc::sock_extended_err) -> Option<IcmpErrorKind> {
    let mtu = (error.ee_info > 0).then_some(error.ee_info);
    // Types and codes of RFC 792, 1191 and 1812, and of RFC 4443 for ICMPv6.
    Some(match (error.ee_origin, error.ee_type, error.ee_code) {
        (libc::SO_EE_ORIGIN_ICMP, 3, 4) | (libc::SO_EE_ORIGIN_ICMP6, 2, _) => IcmpErrorKind::TooLong { mtu },
        // The kernel of this host refused a packet as too long, since it knows the path's MTU already.
        (libc::SO_EE_ORIGIN_LOCAL, ..) if error.ee_errno == libc::EMSGSIZE as u32 => {
            IcmpErrorKind::TooLong { mtu }
        }
        (libc::SO_EE_ORIGIN_ICMP, 3, 2) | (libc::SO_EE_ORIGIN_ICMP6, 4, 1) => IcmpErrorKind::NoProtocol,
        (libc::SO_EE_ORIGIN_ICMP, 3, 9 | 10 | 13) | (libc::SO_EE_ORIGIN_ICMP6, 1, 1 | 5) => {
            IcmpErrorKind::Prohibited
        }
        (libc::SO_EE_ORIGIN_ICMP, 3, _) | (libc::SO_EE_ORIGIN_ICMP6, 1, _) => IcmpErrorKind::Unreachable,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn icmp_errors_are_distinguished() {
        let v4 = libc::SO_EE_ORIGIN_ICMP;
        let v6 = libc::SO_EE_ORIGIN_ICMP6;
        for (origin, kind, code, info, want) in [
            (v4, 3, 4, 1300, Some(IcmpErrorKind::TooLong { mtu: Some(1300) })),
            (v4, 3, 4, 0, Some(IcmpErrorKind::TooLong { mtu: None })),
            (v6, 2, 0, 1280, Some(IcmpErrorKind::TooLong { mtu: Some(1280) })),
            (v4, 3, 2, 0, Some(IcmpErrorKind::NoProtocol)),
            (v6, 4, 1, 6, Some(IcmpErrorKind::NoProtocol)),
            (v4, 3, 13, 0, Some(IcmpErrorKind::Prohibited)),
            (v6, 1, 1, 0, Some(IcmpErrorKind::Prohibited)),
            (v4, 3, 1, 0, Some(IcmpErrorKind::Unreachable)),
            (v6, 1, 3, 0, Some(IcmpErrorKind::Unreachable)),
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
            assert_eq!(parse_error(error), want, "{origin} {kind} {code}");
        }
        assert_eq!(ports_of(&[0x1b, 0x58, 0x17, 0x70, 0, 0, 0, 0]), Some([7000, 6000]));
        assert_eq!(ports_of(&[1, 2, 3]), None);
    }
}
