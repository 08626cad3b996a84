//! Addresses as users write them: `127.0.0.1:4443`, `[::1]:4443`, and `:4443`.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};

/// Returns addresses to listen on, at most one of each family. A port without an address means all local addresses.
///
/// # Errors
/// Fails if the text is no address. The error lists the possible forms.
pub fn listen(text: &str) -> Result<Vec<SocketAddr>, String> {
    match port(text) {
        Some(port) => Ok(vec![(Ipv4Addr::UNSPECIFIED, port).into(), (Ipv6Addr::UNSPECIFIED, port).into()]),
        None => parse_one(text).map(|addr| vec![addr]),
    }
}

/// Returns one address for a server whose socket accepts both IPv4 and IPv6.
///
/// # Errors
/// Fails for the same reasons as [`listen`].
pub fn listen_once(text: &str) -> Result<SocketAddr, String> {
    port(text).map_or_else(|| parse_one(text), |port| Ok((Ipv6Addr::UNSPECIFIED, port).into()))
}

/// Returns the address of a server to connect to. A port without an address means the loopback address.
///
/// # Errors
/// Fails for the same reasons as [`listen`].
pub fn ask(text: &str) -> Result<SocketAddr, String> {
    port(text).map_or_else(|| parse_one(text), |port| Ok((Ipv4Addr::LOCALHOST, port).into()))
}

fn port(text: &str) -> Option<u16> {
    text.strip_prefix(':').filter(|digits| digits.starts_with(|c: char| c.is_ascii_digit()))?.parse().ok()
}

fn parse_one(text: &str) -> Result<SocketAddr, String> {
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
    fn port_without_an_address_gets_the_default_address_of_its_setting() {
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
