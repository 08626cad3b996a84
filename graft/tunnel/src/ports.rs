//! Local ports for the tunnel broker's connections to servers of its host. If the broker closes a connection first, the
//! kernel reserves the port for a minute, and Linux has 28,232 local ports by default. A port that a socket names
//! explicitly can be used again as soon as the connection is over, since TCP timestamps identify old packets (RFC
//! 6191). The broker therefore chooses the ports itself, one after the other.

use std::{
    io,
    net::{IpAddr, SocketAddr},
    ops::RangeInclusive,
};

use parking_lot::Mutex;
use tokio::net::TcpSocket;

/// Limit of used ports that are tried before binding a socket fails.
const TRIES: usize = 4096;

/// Local ports that were not yet used in the present pass through the network namespace's local port range.
pub struct PortRange(Mutex<Vec<u16>>);

impl PortRange {
    pub fn new() -> Self {
        Self(Mutex::default())
    }

    /// Binds the socket to the next port of `address` that is free in the kernel and that `is_used` does not exclude.
    ///
    /// # Errors
    /// No port is free, or the address is not this host's.
    pub fn bind(
        &self,
        socket: &TcpSocket,
        address: IpAddr,
        is_used: impl Fn(SocketAddr) -> bool,
    ) -> io::Result<()> {
        socket.set_reuseaddr(true)?;
        for _ in 0..TRIES {
            let at = SocketAddr::new(address, self.next()?);
            if is_used(at) {
                continue;
            }
            match socket.bind(at) {
                Err(error) if error.kind() == io::ErrorKind::AddrInUse => {}
                done => return done,
            }
        }
        Err(io::ErrorKind::AddrInUse.into())
    }

    /// Returns the next port. After the last port of the range, the kernel's port settings are read again, and the
    /// ports are used from the beginning.
    fn next(&self) -> io::Result<u16> {
        let mut left = self.0.lock();
        if left.is_empty() {
            let read = |name: &str| std::fs::read_to_string(format!("/proc/sys/net/ipv4/{name}"));
            *left = round(&read("ip_local_port_range")?, &read("ip_local_reserved_ports")?);
        }
        left.pop()
            .ok_or_else(|| io::Error::other("all local ports are reserved: net.ipv4.ip_local_reserved_ports"))
    }
}

/// Returns the ports of the range that are not reserved, in descending order.
fn round(range: &str, reserved: &str) -> Vec<u16> {
    let mut ends = range.split_whitespace().filter_map(|text| text.parse().ok());
    let first = ends.next().unwrap_or(32_768);
    let last = ends.next().unwrap_or(60_999);
    let reserved: Vec<RangeInclusive<u16>> = reserved.trim().split(',').filter_map(ports).collect();
    (first..=last).rev().filter(|port| !reserved.iter().any(|ports| ports.contains(port))).collect()
}

fn ports(text: &str) -> Option<RangeInclusive<u16>> {
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    Some(first.parse().ok()?..=last.parse().ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_that_the_kernel_reserves_are_not_used_for_connections() {
        let table = [
            ("10\t14\n", "\n", &[14, 13, 12, 11, 10][..]),
            ("10 14", "11-12,14", &[13, 10]),
            ("10 12", "1-9,13", &[12, 11, 10]),
            ("10 12", "1-65535", &[]),
        ];
        for (range, reserved, wanted) in table {
            assert_eq!(round(range, reserved), wanted, "{range} {reserved}");
        }
    }

    #[tokio::test]
    async fn local_ports_are_bound_in_turn_and_used_ports_are_skipped() {
        let ports = PortRange::new();
        let address = "127.0.0.1".parse().expect("an address");
        let bind = |used: Option<u16>| {
            let socket = TcpSocket::new_v4().expect("a socket");
            ports.bind(&socket, address, |at| Some(at.port()) == used).expect("a port");
            let port = socket.local_addr().expect("an address").port();
            (socket, port)
        };
        let (_first, port) = bind(None);
        let (_second, next) = bind(Some(port + 1));
        assert!(next > port + 1, "{port} {next}");
        let nobody = TcpSocket::new_v4().expect("a socket");
        let refused = ports.bind(&nobody, "192.0.2.1".parse().expect("an address"), |_| false);
        assert_eq!(refused.map_err(|error| error.kind()), Err(io::ErrorKind::AddrNotAvailable));
    }
}
