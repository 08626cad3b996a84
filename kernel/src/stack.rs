//! What interfaces are: stacked on others (VLANs, bonds, bridges), ends of tunnels, with or without a link-layer header.

#![allow(unsafe_code)]

use std::io;
use std::os::fd::AsRawFd;

use nix::errno::Errno;
use nix::libc;
use nix::net::if_::if_indextoname;
use nix::sys::socket::{AddressFamily, SockFlag, SockType, socket};

use crate::netlink::{attribute, dump};

// linux/rtnetlink.h, linux/if_link.h
const RTM_NEWLINK: u16 = 16;
const RTM_GETLINK: u16 = 18;
const IFLA_LINK: u16 = 5;
const IFLA_LINKINFO: u16 = 18;
const IFLA_INFO_KIND: u16 = 1;
/// struct ifinfomsg
const IFINFOMSG: usize = 16;
// linux/if_arp.h
const ARPHRD_ETHER: u16 = 1;
const ARPHRD_PPP: u16 = 512;
const ARPHRD_RAWIP: u16 = 519;
const ARPHRD_LOOPBACK: u16 = 772;
const ARPHRD_NONE: u16 = 0xfffe;

/// Kinds whose packets come from other interfaces, which may have merged them (GRO).
const STACKED: [&str; 11] = [
    "bond",
    "bridge",
    "ipvlan",
    "ipvtap",
    "macsec",
    "macvlan",
    "macvtap",
    "openvswitch",
    "team",
    "vlan",
    "vrf",
];

/// Kinds whose packets come out of packets of other interfaces, which may have merged them (GRO reads what is inside).
const TUNNELS: [&str; 12] = [
    "bareudp",
    "erspan",
    "geneve",
    "gre",
    "gretap",
    "ip6erspan",
    "ip6gre",
    "ip6gretap",
    "ip6tnl",
    "ipip",
    "sit",
    "vxlan",
];

#[derive(Debug, Default, PartialEq, Eq)]
struct Link {
    ifindex: i32,
    /// `ARPHRD_...`
    hardware: u16,
    /// Of virtual interfaces; others have none.
    kind: String,
    /// The interface that it is on; of a VETH its peer, which may be in another namespace.
    lower: i32,
}

/// The kind of an interface of the calling thread's namespace, if it is stacked on others.
pub fn kind(ifindex: i32) -> io::Result<Option<String>> {
    let is_meant = |link: &Link| link.ifindex == ifindex && STACKED.contains(&link.kind.as_str());
    Ok(links()?.into_iter().find(is_meant).map(|link| link.kind))
}

/// How frames of an interface begin.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Begin {
    Ethernet,
    /// With the IP header.
    Ip,
    Tunnel {
        kind: String,
    },
    /// With something else: a hardware type.
    Other {
        hardware: u16,
    },
}

/// Returns how frames of an interface of the calling thread's namespace begin.
///
/// # Errors
/// There is no such interface, or it cannot be asked for.
pub fn begin(ifindex: i32) -> io::Result<Begin> {
    let link = links()?.into_iter().find(|link| link.ifindex == ifindex);
    link.map(|link| link.begin()).ok_or_else(|| Errno::ENODEV.into())
}

/// Whether frames of an interface of the calling thread's namespace begin with an Ethernet header.
///
/// # Errors
/// There is no such interface, or it cannot be asked for.
pub fn has_ethernet(ifindex: i32) -> io::Result<bool> {
    let link = links()?.into_iter().find(|link| link.ifindex == ifindex).ok_or(Errno::ENODEV)?;
    Ok(matches!(link.hardware, ARPHRD_ETHER | ARPHRD_LOOPBACK))
}

impl Link {
    fn begin(self) -> Begin {
        match self.hardware {
            _ if TUNNELS.contains(&self.kind.as_str()) => Begin::Tunnel { kind: self.kind },
            ARPHRD_ETHER | ARPHRD_LOOPBACK => Begin::Ethernet,
            ARPHRD_NONE | ARPHRD_PPP | ARPHRD_RAWIP => Begin::Ip,
            hardware => Begin::Other { hardware },
        }
    }
}

/// Whether an interface of the calling thread's namespace has VLANs on it, in the same namespace, whose tags its driver takes
/// off before an XDP program sees the packets.
pub fn hides_tags(ifindex: i32) -> io::Result<bool> {
    let is_on_it = |link: &Link| link.kind == "vlan" && link.lower == ifindex;
    Ok(links()?.iter().any(is_on_it) && strips_tags(ifindex)?)
}

/// `rxvlan` of ethtool.
fn strips_tags(ifindex: i32) -> io::Result<bool> {
    // linux/sockios.h, linux/ethtool.h
    const SIOCETHTOOL: libc::Ioctl = 0x8946;
    const ETHTOOL_GFLAGS: u32 = 0x25;
    const ETH_FLAG_RXVLAN: u32 = 1 << 8;
    /// `struct ethtool_value`
    #[repr(C)]
    struct Flags {
        command: u32,
        value: u32,
    }
    let name = if_indextoname(ifindex.cast_unsigned())?;
    let mut flags = Flags { command: ETHTOOL_GFLAGS, value: 0 };
    // SAFETY: all zeroes are an empty request.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(name.to_bytes()).take(libc::IFNAMSIZ - 1) {
        *to = *from as libc::c_char;
    }
    request.ifr_ifru.ifru_data = (&raw mut flags).cast();
    let socket = socket(AddressFamily::Inet, SockType::Datagram, SockFlag::SOCK_CLOEXEC, None)?;
    // SAFETY: the request names its interface and points to what the command fills in; both outlive the call.
    match Errno::result(unsafe { libc::ioctl(socket.as_raw_fd(), SIOCETHTOOL, &raw mut request) }) {
        Ok(_) => Ok(flags.value & ETH_FLAG_RXVLAN != 0),
        // A driver that has no such flags strips nothing.
        Err(Errno::EOPNOTSUPP) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

fn links() -> io::Result<Vec<Link>> {
    let mut links = Vec::new();
    dump(RTM_GETLINK, &[0; IFINFOMSG], RTM_NEWLINK, |body| links.extend(parse(body)))?;
    Ok(links)
}

fn parse(body: &[u8]) -> Option<Link> {
    let hardware = u16::from_ne_bytes(*body.get(2..)?.first_chunk()?);
    let ifindex = i32::from_ne_bytes(*body.get(4..)?.first_chunk()?);
    let attributes = body.get(IFINFOMSG..)?;
    let kind = attribute(attributes, IFLA_LINKINFO).and_then(|info| attribute(info, IFLA_INFO_KIND));
    let kind = String::from_utf8_lossy(kind.unwrap_or_default()).trim_end_matches('\0').to_owned();
    let lower = attribute(attributes, IFLA_LINK).and_then(|lower| lower.first_chunk());
    Some(Link { ifindex, hardware, kind, lower: lower.map_or(0, |lower| i32::from_ne_bytes(*lower)) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::netlink::attribute_of;

    /// In whatever namespace the tests are: the loopback interface has no driver that could strip anything.
    #[test]
    fn the_loopback_interface_hides_nothing() {
        let loopback = nix::net::if_::if_nametoindex("lo").expect("it is there").cast_signed();
        assert!(!strips_tags(loopback).expect("flags"));
        assert!(!hides_tags(loopback).expect("links"));
        assert_eq!(kind(loopback).expect("links"), None);
        assert!(strips_tags(i32::MAX).is_err());
    }

    #[test]
    fn links_are_read_as_far_as_they_go() {
        let mut body = vec![0; IFINFOMSG];
        body[2..4].copy_from_slice(&ARPHRD_ETHER.to_ne_bytes());
        body[4..8].copy_from_slice(&7_i32.to_ne_bytes());
        body.extend(attribute_of(3, b"eth0.5\0"));
        body.extend(attribute_of(IFLA_LINK, &3_i32.to_ne_bytes()));
        body.extend(attribute_of(IFLA_LINKINFO | 0x8000, &attribute_of(IFLA_INFO_KIND, b"vlan\0")));
        let vlan = Link { ifindex: 7, hardware: ARPHRD_ETHER, kind: "vlan".to_owned(), lower: 3 };
        assert_eq!(parse(&body), Some(vlan));
        for len in 0..IFINFOMSG {
            assert_eq!(parse(&body[..len]), None, "cut at {len}");
        }
        // A card has no kind.
        let card = Link { ifindex: 7, hardware: ARPHRD_ETHER, ..Link::default() };
        assert_eq!(parse(&body[..IFINFOMSG]), Some(card));
        for len in IFINFOMSG..body.len() {
            assert!(parse(&body[..len]).is_some(), "cut at {len}");
        }
    }

    #[test]
    fn frames_begin_as_the_hardware_type_says() {
        let of = |hardware, kind: &str| Link { hardware, kind: kind.to_owned(), ..Link::default() }.begin();
        let tunnel = |kind: &str| Begin::Tunnel { kind: kind.to_owned() };
        for (hardware, kind, begin) in [
            (ARPHRD_ETHER, "", Begin::Ethernet),
            (ARPHRD_ETHER, "veth", Begin::Ethernet),
            (ARPHRD_ETHER, "tun", Begin::Ethernet),
            (ARPHRD_LOOPBACK, "", Begin::Ethernet),
            (ARPHRD_NONE, "tun", Begin::Ip),
            (ARPHRD_NONE, "wireguard", Begin::Ip),
            (ARPHRD_PPP, "ppp", Begin::Ip),
            (ARPHRD_RAWIP, "", Begin::Ip),
            (778, "gre", tunnel("gre")),
            (768, "ipip", tunnel("ipip")),
            (ARPHRD_ETHER, "vxlan", tunnel("vxlan")),
            (32, "", Begin::Other { hardware: 32 }),
        ] {
            assert_eq!(of(hardware, kind), begin, "{hardware} {kind}");
        }
    }
}
