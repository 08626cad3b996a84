//! Which interfaces packets arrive on, and what they are.

use std::net::{IpAddr, SocketAddr};

use nix::{
    ifaddrs::{InterfaceAddress, getifaddrs},
    libc,
    net::if_::InterfaceFlags,
};

/// Interfaces that have one of the addresses.
pub fn with_addresses(addresses: impl Iterator<Item = IpAddr>) -> Vec<String> {
    // No media comes by loopback.
    let wanted: Vec<_> = addresses.filter(|ip| !ip.is_unspecified() && !ip.is_loopback()).collect();
    let all = all().unwrap_or_default();
    names(all.iter().filter(|it| ip_of(it).is_some_and(|ip| wanted.contains(&ip))))
}

/// Interfaces for what listens there: those that have one of the addresses; where all addresses are served, those that
/// are up and have any, link-local ones apart, which every interface has. Only those that carry Ethernet frames.
///
/// # Errors
/// The kernel does not say.
pub fn of(listen: &[SocketAddr]) -> nix::Result<Vec<String>> {
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

/// What an interface's frames begin with: `ARPHRD_ETHER` and others.
///
/// # Errors
/// The kernel does not say.
pub fn kind(name: &str) -> nix::Result<Option<u16>> {
    Ok(kind_among(&all()?, name))
}

fn kind_among(all: &[InterfaceAddress], name: &str) -> Option<u16> {
    let kind = |it: &InterfaceAddress| Some(it.address?.as_link_addr()?.hatype());
    all.iter().filter(|it| it.interface_name == name).find_map(kind)
}

/// Each interface once for each of its addresses, and for its link layer.
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
    fn loopback_is_not_among_them() {
        let listen = ["127.0.0.1:1", "[::1]:1"].map(|addr| addr.parse().unwrap());
        assert_eq!(of(&listen), Ok(Vec::new()));
        let all = ["0.0.0.0:1", "[::]:1"].map(|addr| addr.parse().unwrap());
        assert!(!of(&all).unwrap().contains(&"lo".to_owned()));
        assert_eq!(with_addresses(listen.iter().map(SocketAddr::ip)), Vec::<String>::new());
    }
}
