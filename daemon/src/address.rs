//! Addresses as users write them: `127.0.0.1:4443`, `[::1]:4443`, and `:4443`.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};

/// Where to listen, one of each family: a port alone is on all addresses.
///
/// # Errors
/// It is none; the error says what would be.
pub fn listen(text: &str) -> Result<Vec<SocketAddr>, String> {
    match port(text) {
        Some(port) => Ok(vec![(Ipv4Addr::UNSPECIFIED, port).into(), (Ipv6Addr::UNSPECIFIED, port).into()]),
        None => one(text).map(|addr| vec![addr]),
    }
}

/// The same for what serves both families with one socket.
///
/// # Errors
/// As [`listen`].
pub fn listen_once(text: &str) -> Result<SocketAddr, String> {
    port(text).map_or_else(|| one(text), |port| Ok((Ipv6Addr::UNSPECIFIED, port).into()))
}

/// Whom to ask: a port alone is on this machine.
///
/// # Errors
/// As [`listen`].
pub fn ask(text: &str) -> Result<SocketAddr, String> {
    port(text).map_or_else(|| one(text), |port| Ok((Ipv4Addr::LOCALHOST, port).into()))
}

fn port(text: &str) -> Option<u16> {
    text.strip_prefix(':').filter(|digits| digits.starts_with(|c: char| c.is_ascii_digit()))?.parse().ok()
}

fn one(text: &str) -> Result<SocketAddr, String> {
    text.parse().map_err(|_| {
        format!(
            "`{text}` is not ADDR:PORT, such as 127.0.0.1:4443 (this machine only), 0.0.0.0:4443 (all of IPv4), [::]:4443 (all \
             of IPv6) or :4443 (all addresses)"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_alone_is_everywhere_or_here() {
        let addr = |text: &str| text.parse::<SocketAddr>().unwrap();
        assert_eq!(listen(":4443"), Ok(vec![addr("0.0.0.0:4443"), addr("[::]:4443")]));
        assert_eq!(listen("[::1]:80"), Ok(vec![addr("[::1]:80")]));
        assert_eq!(listen_once(":80"), Ok(addr("[::]:80")));
        assert_eq!(ask(":9184"), Ok(addr("127.0.0.1:9184")));
        assert_eq!(ask("192.0.2.1:80"), Ok(addr("192.0.2.1:80")));
        for wrong in ["", ":", ":+1", ":65536", "4443", "localhost:4443", "1.2.3.4", "::1:80"] {
            for error in [listen(wrong).err(), listen_once(wrong).err(), ask(wrong).err()] {
                assert!(error.is_some_and(|error| error.contains("127.0.0.1:4443")), "{wrong}");
            }
        }
    }
}
