//! Network interfaces by their addresses, routes and link types.

use std::{
    collections::HashMap,
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket},
};

use nix::{
    ifaddrs::{InterfaceAddress, getifaddrs},
    libc,
    net::if_::InterfaceFlags,
};

/// Returns the names of the network interfaces that have one of the addresses.
pub fn with_addresses(addresses: impl Iterator<Item = IpAddr>) -> Vec<String> {
    // The loopback interface is left out, because no media arrives on it.
    let wanted: Vec<_> = addresses.filter(|ip| !ip.is_unspecified() && !ip.is_loopback()).collect();
    let all = all().unwrap_or_default();
    names(all.iter().filter(|it| ip_of(it).is_some_and(|ip| wanted.contains(&ip))))
}

/// Returns the Ethernet interfaces that receive packets for `listen`: those that have one of its addresses. An
/// unspecified address stands for all interfaces that are up and have an address, except a link-local one.
///
/// # Errors
/// Fails if the kernel does not list the interfaces.
pub fn list_interfaces(listen: &[SocketAddr]) -> nix::Result<Vec<String>> {
    let all = all()?;
    let is_served = |it: &&InterfaceAddress| {
        let Some(ip) = ip_of(it) else { return false };
        let is_usual = it.flags.contains(InterfaceFlags::IFF_UP) && !is_link_local(ip);
        listen.iter().map(SocketAddr::ip).any(|wanted| match wanted.is_unspecified() {
            true => is_usual && wanted.is_ipv4() == ip.is_ipv4(),
            false => wanted == ip,
        })
    };
    let is_ethernet =
        |it: &&InterfaceAddress| kind_among(&all, &it.interface_name) == Some(libc::ARPHRD_ETHER);
    Ok(names(all.iter().filter(is_served).filter(is_ethernet)))
}

/// A cache of routes: the interface by which an address is reached, in the network namespace of the calling thread.
#[derive(Default)]
pub struct InterfaceRoutes {
    /// Names of network interfaces, by the IP addresses that they have.
    names: HashMap<IpAddr, String>,
    found: HashMap<IpAddr, Option<String>>,
}

impl InterfaceRoutes {
    /// Reads the list of interfaces again, and clears the cached routes.
    pub fn refresh(&mut self) {
        let all = all().unwrap_or_default();
        self.names = all.iter().filter_map(|it| Some((ip_of(it)?, it.interface_name.clone()))).collect();
        self.found.clear();
    }

    /// Returns the interface that has the source address which the kernel selects for packets to `ip`.
    pub fn interface_to(&mut self, ip: IpAddr) -> Option<String> {
        let names = &self.names;
        let find = || names.get(&source_towards(ip).ok()?).cloned();
        self.found.entry(ip).or_insert_with(find).clone()
    }
}

/// Returns the source address that the kernel selects for packets to `ip`. Connecting a UDP socket sends no packet.
fn source_towards(ip: IpAddr) -> io::Result<IpAddr> {
    let any: IpAddr = if ip.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let socket = UdpSocket::bind((any, 0))?;
    // The port does not matter, because nothing is sent.
    socket.connect((ip, 9))?;
    Ok(socket.local_addr()?.ip())
}

/// Returns the link type of an interface, such as `ARPHRD_ETHER`.
///
/// # Errors
/// Fails if the kernel does not list the interfaces.
pub fn kind(name: &str) -> nix::Result<Option<u16>> {
    Ok(kind_among(&all()?, name))
}

fn kind_among(all: &[InterfaceAddress], name: &str) -> Option<u16> {
    let kind = |it: &InterfaceAddress| Some(it.address?.as_link_addr()?.hatype());
    all.iter().filter(|it| it.interface_name == name).find_map(kind)
}

/// Returns all interfaces of the host: one entry for each address of an interface, and one for its link layer.
fn all() -> nix::Result<Vec<InterfaceAddress>> {
    getifaddrs().map(Iterator::collect)
}

fn ip_of(it: &InterfaceAddress) -> Option<IpAddr> {
    let address = it.address?;
    let v4 = address.as_sockaddr_in().map(|address| IpAddr::V4(address.ip()));
    v4.or(address.as_sockaddr_in6().map(|address| IpAddr::V6(address.ip())))
}

fn is_link_local(ip: IpAddr) -> bool {
    match ip {
        IpAddr::V4(v4) => v4.is_link_local(),
        IpAddr::V6(v6) => v6.is_unicast_link_local(),
    }
}

fn names<'a>(of: impl Iterator<Item = &'a InterfaceAddress>) -> Vec<String> {
    let mut names: Vec<_> = of.map(|it| it.interface_name.clone()).collect();
    names.sort_unstable();
    names.dedup();
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn listed_interfaces_exclude_loopback() {
        let listen = ["127.0.0.1:1", "[::1]:1"].map(|addr| addr.parse().unwrap());
        assert_eq!(list_interfaces(&listen), Ok(Vec::new()));
        let all = ["0.0.0.0:1", "[::]:1"].map(|addr| addr.parse().unwrap());
        assert!(!list_interfaces(&all).unwrap().contains(&"lo".to_owned()));
        assert_eq!(with_addresses(listen.iter().map(SocketAddr::ip)), Vec::<String>::new());
    }
}
