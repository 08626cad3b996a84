//! Kinds of interfaces: interfaces that are stacked on others (VLANs, bonds, bridges), ends of tunnels, and the first
//! header of an interface's frames.

#![allow(unsafe_code)]

use std::io;
use std::os::fd::AsRawFd;

use nix::errno::Errno;
use nix::libc;
use nix::net::if_::if_indextoname;
use nix::sys::socket::{AddressFamily, SockFlag, SockType, socket};

use crate::netlink::{attribute, dump};

// Constants from linux/rtnetlink.h and linux/if_link.h.
const RTM_NEWLINK: u16 = 16;
const RTM_GETLINK: u16 = 18;
const IFLA_LINK: u16 = 5;
const IFLA_MASTER: u16 = 10;
const IFLA_LINKINFO: u16 = 18;
const IFLA_INFO_KIND: u16 = 1;
/// Length of `struct ifinfomsg` in bytes.
const IFINFOMSG: usize = 16;
// Constants from linux/if_arp.h.
const ARPHRD_ETHER: u16 = 1;
const ARPHRD_PPP: u16 = 512;
const ARPHRD_RAWIP: u16 = 519;
const ARPHRD_LOOPBACK: u16 = 772;
const ARPHRD_NONE: u16 = 0xfffe;

/// Kinds of interfaces that get their packets from a lower interface, which may have merged several packets into one
/// (GRO).
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

/// Kinds of tunnel interfaces, whose packets arrive inside packets of another interface. That interface may have merged
/// several packets into one, because GRO also reads inner headers.
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
struct StackLink {
    ifindex: i32,
    /// Hardware type, `ARPHRD_*`.
    hardware: u16,
    /// Kind of a virtual interface, such as `vlan`; empty for a hardware interface.
    kind: String,
    /// Index of the interface on which this one is stacked. For a veth it is the peer, which may be in another
    /// namespace.
    lower: i32,
    /// Index of the bridge, bond or VRF that this interface belongs to, or 0.
    master: i32,
}

/// Returns the kind of an interface of the calling thread's namespace, if it is stacked on others.
pub fn kind(ifindex: i32) -> io::Result<Option<String>> {
    let is_meant = |link: &StackLink| link.ifindex == ifindex && STACKED.contains(&link.kind.as_str());
    Ok(links()?.into_iter().find(is_meant).map(|link| link.kind))
}

/// Returns the name of the VRF that an interface of the calling thread's namespace belongs to, or is. Its packets
/// follow the VRF's own routes.
///
/// # Errors
/// Fails if the kernel does not answer, or if the VRF is removed meanwhile.
pub fn vrf(ifindex: i32) -> io::Result<Option<String>> {
    let vrf = find_vrf(&links()?, ifindex).map(|vrf| if_indextoname(vrf.cast_unsigned())).transpose()?;
    Ok(vrf.map(|name| name.to_string_lossy().into_owned()))
}

fn find_vrf(links: &[StackLink], ifindex: i32) -> Option<i32> {
    let link = links.iter().find(|link| link.ifindex == ifindex)?;
    let is_vrf = |one: &&StackLink| one.kind == "vrf" && [link.ifindex, link.master].contains(&one.ifindex);
    links.iter().find(is_vrf).map(|vrf| vrf.ifindex)
}

/// The first header of an interface's frames.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FrameStart {
    /// Frames begin with an Ethernet header.
    Ethernet,
    /// Frames begin with the IP header.
    Ip,
    /// The interface is a tunnel.
    Tunnel {
        /// The kernel's name for tunnels of this kind, such as `gre`.
        kind: String,
    },
    /// Frames begin with another header, of this hardware type.
    Other {
        /// Hardware type, `ARPHRD_*` of linux/if_arp.h.
        hardware: u16,
    },
}

/// Returns the first header of frames of an interface in the calling thread's namespace.
///
/// # Errors
/// Fails if there is no such interface, or if the kernel does not answer.
pub fn begin(ifindex: i32) -> io::Result<FrameStart> {
    let link = links()?.into_iter().find(|link| link.ifindex == ifindex);
    link.map(|link| link.begin()).ok_or_else(|| Errno::ENODEV.into())
}

/// Reports whether frames of an interface in the calling thread's namespace begin with an Ethernet header.
///
/// # Errors
/// Fails if there is no such interface, or if the kernel does not answer.
pub fn has_ethernet(ifindex: i32) -> io::Result<bool> {
    let link = links()?.into_iter().find(|link| link.ifindex == ifindex).ok_or(Errno::ENODEV)?;
    Ok(matches!(link.hardware, ARPHRD_ETHER | ARPHRD_LOOPBACK))
}

/// Reports whether an interface in the calling thread's namespace is a tun device. A process sends and receives its
/// packets, which begin with the IP header.
///
/// # Errors
/// Fails if there is no such interface, or if the kernel does not answer.
pub fn is_tun(ifindex: i32) -> io::Result<bool> {
    let link = links()?.into_iter().find(|link| link.ifindex == ifindex).ok_or(Errno::ENODEV)?;
    Ok(link.kind == "tun" && link.hardware == ARPHRD_NONE)
}

impl StackLink {
    fn begin(self) -> FrameStart {
        match self.hardware {
            _ if TUNNELS.contains(&self.kind.as_str()) => FrameStart::Tunnel { kind: self.kind },
            ARPHRD_ETHER | ARPHRD_LOOPBACK => FrameStart::Ethernet,
            ARPHRD_NONE | ARPHRD_PPP | ARPHRD_RAWIP => FrameStart::Ip,
            hardware => FrameStart::Other { hardware },
        }
    }
}

/// Reports whether an interface has VLANs whose tags its driver removes before an XDP program sees the packets. Only
/// VLANs in the calling thread's namespace are found.
pub fn hides_tags(ifindex: i32) -> io::Result<bool> {
    let is_on_it = |link: &StackLink| link.kind == "vlan" && link.lower == ifindex;
    Ok(links()?.iter().any(is_on_it) && strips_tags(ifindex)?)
}

/// Reports whether the driver removes VLAN tags: the feature `rxvlan` of ethtool.
fn strips_tags(ifindex: i32) -> io::Result<bool> {
    // Constants from linux/sockios.h and linux/ethtool.h.
    const SIOCETHTOOL: libc::Ioctl = 0x8946;
    const ETHTOOL_GFLAGS: u32 = 0x25;
    const ETH_FLAG_RXVLAN: u32 = 1 << 8;
    /// `struct ethtool_value` of linux/ethtool.h.
    #[repr(C)]
    struct EthtoolValue {
        command: u32,
        value: u32,
    }
    let name = if_indextoname(ifindex.cast_unsigned())?;
    let mut flags = EthtoolValue { command: ETHTOOL_GFLAGS, value: 0 };
    // SAFETY: an `ifreq` of zeroes is a valid, empty request.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(name.to_bytes()).take(libc::IFNAMSIZ - 1) {
        *to = *from as libc::c_char;
    }
    request.ifr_ifru.ifru_data = (&raw mut flags).cast();
    let socket = socket(AddressFamily::Inet, SockType::Datagram, SockFlag::SOCK_CLOEXEC, None)?;
    // SAFETY: the request names an interface and points to the structure that the command fills in. The request and the
    // structure outlive the call.
    match Errno::result(unsafe { libc::ioctl(socket.as_raw_fd(), SIOCETHTOOL, &raw mut request) }) {
        Ok(_) => Ok(flags.value & ETH_FLAG_RXVLAN != 0),
        // A driver that does not support ETHTOOL_GFLAGS removes no VLAN tags.
        Err(Errno::EOPNOTSUPP) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

fn links() -> io::Result<Vec<StackLink>> {
    let mut links = Vec::new();
    dump(RTM_GETLINK, &[0; IFINFOMSG], RTM_NEWLINK, |body| links.extend(parse(body)))?;
    Ok(links)
}

fn parse(body: &[u8]) -> Option<StackLink> {
    let hardware = u16::from_ne_bytes(*body.get(2..)?.first_chunk()?);
    let ifindex = i32::from_ne_bytes(*body.get(4..)?.first_chunk()?);
    let attributes = body.get(IFINFOMSG..)?;
    let info = attribute(attributes, IFLA_LINKINFO).unwrap_or_default();
    let kind = attribute(info, IFLA_INFO_KIND).unwrap_or_default();
    let kind = String::from_utf8_lossy(kind).trim_end_matches('\0').to_owned();
    let index = |of| {
        attribute(attributes, of).and_then(<[u8]>::first_chunk).map_or(0, |raw| i32::from_ne_bytes(*raw))
    };
    Some(StackLink { ifindex, hardware, kind, lower: index(IFLA_LINK), master: index(IFLA_MASTER) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::netlink::attribute_of;

    /// Uses the loopback interface, which exists in every namespace and has no driver that could remove tags.
    #[test]
    fn loopback_interface_hides_no_vlan_tags() {
        let loopback = nix::net::if_::if_nametoindex("lo").expect("it is there").cast_signed();
        assert!(!strips_tags(loopback).expect("flags"));
        assert!(!hides_tags(loopback).expect("links"));
        assert_eq!(kind(loopback).expect("links"), None);
        assert!(strips_tags(i32::MAX).is_err());
    }

    #[test]
    fn truncated_netlink_message_about_a_link_is_read_to_its_end() {
        let mut body = vec![0; IFINFOMSG];
        body[2..4].copy_from_slice(&ARPHRD_ETHER.to_ne_bytes());
        body[4..8].copy_from_slice(&7_i32.to_ne_bytes());
        body.extend(attribute_of(3, b"eth0.5\0"));
        body.extend(attribute_of(IFLA_LINK, &3_i32.to_ne_bytes()));
        body.extend(attribute_of(IFLA_MASTER, &9_i32.to_ne_bytes()));
        body.extend(attribute_of(IFLA_LINKINFO | 0x8000, &attribute_of(IFLA_INFO_KIND, b"vlan\0")));
        let vlan =
            StackLink { ifindex: 7, hardware: ARPHRD_ETHER, kind: "vlan".to_owned(), lower: 3, master: 9 };
        assert_eq!(parse(&body), Some(vlan));
        for len in 0..IFINFOMSG {
            assert_eq!(parse(&body[..len]), None, "cut at {len}");
        }
        // The first `IFINFOMSG` bytes alone, without attributes, are a valid message about a hardware interface, for
        // which the kernel reports no kind.
        let card = StackLink { ifindex: 7, hardware: ARPHRD_ETHER, ..StackLink::default() };
        assert_eq!(parse(&body[..IFINFOMSG]), Some(card));
        for len in IFINFOMSG..body.len() {
            assert!(parse(&body[..len]).is_some(), "cut at {len}");
        }
    }

    #[test]
    fn interface_belongs_to_the_vrf_that_is_its_master() {
        let link = |ifindex, kind: &str, master| StackLink {
            ifindex,
            kind: kind.to_owned(),
            master,
            ..StackLink::default()
        };
        let links = [link(2, "vrf", 0), link(3, "", 2), link(4, "bridge", 0), link(5, "veth", 4)];
        for (ifindex, vrf) in [(2, Some(2)), (3, Some(2)), (4, None), (5, None), (6, None)] {
            assert_eq!(find_vrf(&links, ifindex), vrf, "{ifindex}");
        }
        let loopback = nix::net::if_::if_nametoindex("lo").expect("it is there").cast_signed();
        assert_eq!(vrf(loopback).expect("links"), None);
    }

    #[test]
    fn first_header_of_a_frame_follows_from_the_hardware_type() {
        let of = |hardware, kind: &str| {
            StackLink { hardware, kind: kind.to_owned(), ..StackLink::default() }.begin()
        };
        let tunnel = |kind: &str| FrameStart::Tunnel { kind: kind.to_owned() };
        for (hardware, kind, begin) in [
            (ARPHRD_ETHER, "", FrameStart::Ethernet),
            (ARPHRD_ETHER, "veth", FrameStart::Ethernet),
            (ARPHRD_ETHER, "tun", FrameStart::Ethernet),
            (ARPHRD_LOOPBACK, "", FrameStart::Ethernet),
            (ARPHRD_NONE, "tun", FrameStart::Ip),
            (ARPHRD_NONE, "wireguard", FrameStart::Ip),
            (ARPHRD_PPP, "ppp", FrameStart::Ip),
            (ARPHRD_RAWIP, "", FrameStart::Ip),
            (778, "gre", tunnel("gre")),
            (768, "ipip", tunnel("ipip")),
            (ARPHRD_ETHER, "vxlan", tunnel("vxlan")),
            (32, "", FrameStart::Other { hardware: 32 }),
        ] {
            assert_eq!(of(hardware, kind), begin, "{hardware} {kind}");
        }
    }
}
