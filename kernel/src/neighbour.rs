//! Next hops and their link addresses, from the kernel's routes and neighbour table (ARP, RFC 4861). All functions use
//! the calling thread's network namespace.

use std::io;
use std::net::IpAddr;

use nix::libc;

use crate::netlink::{
    REPLACE, RTA_OIF, RTM_GETROUTE, RTM_NEWROUTE, attribute, attribute_of, change, get, octets,
};

// Constants from linux/rtnetlink.h.
const RTM_NEWLINK: u16 = 16;
const RTM_GETLINK: u16 = 18;
const RTM_NEWNEIGH: u16 = 28;
const RTM_GETNEIGH: u16 = 30;
/// Length of `struct rtmsg` in bytes.
const RTMSG: usize = 12;
const RTA_DST: u16 = 1;
const RTA_SRC: u16 = 2;
const RTA_GATEWAY: u16 = 5;
const RTA_VIA: u16 = 18;
// Constants from linux/if_link.h.
/// Length of `struct ifinfomsg` in bytes.
const IFINFOMSG: usize = 16;
const IFLA_ADDRESS: u16 = 1;
// Constants from linux/neighbour.h.
/// Length of `struct ndmsg` in bytes.
const NDMSG: usize = 12;
const NDA_DST: u16 = 1;
const NDA_LLADDR: u16 = 2;
const NUD_REACHABLE: u16 = 0x02;
const NUD_STALE: u16 = 0x04;
const NUD_DELAY: u16 = 0x08;
const NUD_NOARP: u16 = 0x40;
const NUD_PERMANENT: u16 = 0x80;
/// States in which the kernel uses the link address, and will use it for some time. `NUD_PROBE` is not among them,
/// because the neighbour has not answered yet.
const USED: u16 = NUD_REACHABLE | NUD_STALE | NUD_DELAY | NUD_NOARP | NUD_PERMANENT;

/// The next hop of packets: a neighbour on one of this host's interfaces.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NextHop {
    address: IpAddr,
    ifindex: u32,
}

/// A link address. Its length depends on the kind of interface.
pub type LinkAddress = Vec<u8>;

impl NextHop {
    /// Returns the next hop of packets from `local` to `remote`.
    ///
    /// # Errors
    /// Fails if there is no route, or if `local` is not an address of this host.
    pub fn find_route(local: IpAddr, remote: IpAddr) -> io::Result<Self> {
        let bits = (octets(remote).len() * 8) as u8;
        let mut body = vec![family(remote), bits, bits];
        body.resize(RTMSG, 0);
        body.extend(attribute_of(RTA_DST, &octets(remote)));
        body.extend(attribute_of(RTA_SRC, &octets(local)));
        let answer = get(RTM_GETROUTE, &body, RTM_NEWROUTE)?;
        parse_route(&answer, remote).ok_or_else(|| io::ErrorKind::InvalidData.into())
    }

    /// Returns the index of the interface that the next hop is on.
    pub fn interface(&self) -> u32 {
        self.ifindex
    }

    /// Returns the link address of this host's interface towards the next hop, or `None` if interfaces of this kind
    /// have none.
    ///
    /// # Errors
    /// Fails if the interface is gone.
    pub fn own_link_address(&self) -> io::Result<Option<LinkAddress>> {
        let mut body = vec![0; IFINFOMSG];
        body[4..8].copy_from_slice(&self.ifindex.to_ne_bytes());
        let answer = get(RTM_GETLINK, &body, RTM_NEWLINK)?;
        let address = answer.get(IFINFOMSG..).and_then(|rest| attribute(rest, IFLA_ADDRESS));
        Ok(address.map(<[u8]>::to_vec))
    }

    /// Returns the link address of the next hop, or `None` if the kernel does not know it or is verifying it.
    ///
    /// # Errors
    /// Fails if the kernel does not answer.
    pub fn link_address(&self) -> io::Result<Option<LinkAddress>> {
        match get(RTM_GETNEIGH, &self.neighbour(0, None), RTM_NEWNEIGH) {
            Ok(answer) => Ok(parse_neighbour(&answer)),
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Sets the link address of this neighbour that the kernel uses from now on. When the kernel uses the address, it
    /// verifies it, and corrects it if the neighbour has another one.
    ///
    /// # Errors
    /// Fails if the address has the wrong length for the interface.
    pub fn set_link_address(&self, address: &[u8]) -> io::Result<()> {
        change(RTM_NEWNEIGH, REPLACE, &self.neighbour(NUD_STALE, Some(address)))
    }

    fn neighbour(&self, state: u16, address: Option<&[u8]>) -> Vec<u8> {
        let mut body = vec![family(self.address), 0, 0, 0];
        body.extend(self.ifindex.to_ne_bytes());
        body.extend(state.to_ne_bytes());
        body.resize(NDMSG, 0);
        body.extend(attribute_of(NDA_DST, &octets(self.address)));
        body.extend(address.into_iter().flat_map(|address| attribute_of(NDA_LLADDR, address)));
        body
    }
}

fn family(address: IpAddr) -> u8 {
    match address {
        IpAddr::V4(_) => libc::AF_INET as u8,
        IpAddr::V6(_) => libc::AF_INET6 as u8,
    }
}

fn address(octets: &[u8]) -> Option<IpAddr> {
    let v4 = <[u8; 4]>::try_from(octets).map(IpAddr::from);
    v4.ok().or_else(|| <[u8; 16]>::try_from(octets).map(IpAddr::from).ok())
}

/// Parses a route. If the route has no gateway, the next hop is the remote host itself.
fn parse_route(body: &[u8], remote: IpAddr) -> Option<NextHop> {
    let attributes = body.get(RTMSG..)?;
    let ifindex = u32::from_ne_bytes(*attribute(attributes, RTA_OIF)?.first_chunk()?);
    // RTA_VIA is a gateway of another address family than the route. Its first two bytes are the family.
    let via = attribute(attributes, RTA_VIA).map(|via| via.get(2..).unwrap_or_default());
    let address = match attribute(attributes, RTA_GATEWAY).or(via) {
        Some(octets) => address(octets)?,
        None => remote,
    };
    Some(NextHop { address, ifindex })
}

fn parse_neighbour(body: &[u8]) -> Option<LinkAddress> {
    let state = u16::from_ne_bytes(*body.get(8..)?.first_chunk()?);
    let address = attribute(body.get(NDMSG..)?, NDA_LLADDR)?;
    (state & USED != 0).then(|| address.to_vec())
}

#[cfg(test)]
mod tests {
    use super::*;

    const NUD_PROBE: u16 = 0x10;

    #[test]
    fn next_hop_is_parsed_from_a_netlink_route() {
        type Attributes<'a> = &'a [(u16, &'a [u8])];
        let remote: IpAddr = "192.0.2.7".parse().unwrap();
        let route = |attributes: Attributes<'_>| {
            let mut body = vec![0; RTMSG];
            body.extend(attribute_of(RTA_OIF, &3_u32.to_ne_bytes()));
            body.extend(attributes.iter().flat_map(|(kind, value)| attribute_of(*kind, value)));
            body
        };
        let v6: IpAddr = "fe80::1".parse().unwrap();
        let via = [&[10, 0][..], &octets(v6)].concat();
        let table: [(Attributes<'_>, _); 4] = [
            (&[], Some(remote)),
            (&[(RTA_GATEWAY, &[192, 0, 2, 1])], "192.0.2.1".parse().ok()),
            (&[(RTA_VIA, &via)], Some(v6)),
            (&[(RTA_GATEWAY, &[1, 2, 3])], None),
        ];
        for (attributes, wanted) in table {
            let body = route(attributes);
            let wanted = wanted.map(|address| NextHop { address, ifindex: 3 });
            assert_eq!(parse_route(&body, remote), wanted, "{attributes:?}");
            for cut in 0..RTMSG + 8 {
                assert_eq!(parse_route(&body[..cut], remote), None, "{cut}");
            }
        }
    }

    #[test]
    fn unverified_neighbour_has_no_known_link_address() {
        let link = [2, 0, 0, 0, 0, 9];
        let answer = |state: u16, link: Option<&[u8]>| {
            NextHop { address: "192.0.2.1".parse().unwrap(), ifindex: 3 }.neighbour(state, link)
        };
        for (state, is_known) in [
            (NUD_REACHABLE, true),
            (NUD_STALE, true),
            (NUD_DELAY, true),
            (NUD_PROBE, false),
            (NUD_PERMANENT, true),
        ] {
            let whole = answer(state, Some(&link));
            assert_eq!(parse_neighbour(&whole), is_known.then(|| link.to_vec()), "{state}");
            for cut in 0..whole.len() - 2 {
                assert_eq!(parse_neighbour(&whole[..cut]), None, "{cut}");
            }
            assert_eq!(parse_neighbour(&answer(state, None)), None);
        }
    }

    #[test]
    fn loopback_address_has_no_or_an_all_zero_link_address() {
        for address in ["127.0.0.1", "::1"] {
            let address = address.parse().unwrap();
            let Ok(hop) = NextHop::find_route(address, address) else { continue };
            assert_eq!(hop.address, address);
            assert!(hop.link_address().unwrap().is_none_or(|link| link == [0; 6]));
        }
    }
}
