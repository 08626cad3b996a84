//! Address prefixes, and addresses in the form that BPF programs use.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr};
use std::str::FromStr;

/// An address prefix such as `10.0.0.0/8` or `2001:db8::/32`, or a single address. Bits after the prefix are 0.
///
/// ```
/// use millrace_kernel::prefix::Prefix;
///
/// let prefix: Prefix = "192.0.2.0/24".parse()?;
/// assert_eq!(prefix.to_string(), "192.0.2.0/24");
/// assert!("192.0.2.0/33".parse::<Prefix>().is_err());
/// # Ok::<(), millrace_kernel::prefix::ParseError>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Prefix {
    address: IpAddr,
    len: u8,
}

/// The error for a text that is not an address, or whose prefix length is larger than the address.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("\"{0}\" is no address prefix, such as 192.0.2.0/24 or 2001:db8::/32")]
pub struct ParseError(String);

impl Prefix {
    /// Makes a prefix of `len` bits. Returns `None` if the address has fewer bits.
    pub fn new(address: IpAddr, len: u8) -> Option<Self> {
        if len > width(address) {
            return None;
        }
        let masked = mask(mapped(address), mapped_len(address, len));
        Some(Self { address: Ipv6Addr::from(masked).to_canonical_as(address), len })
    }

    /// Returns the first address of the prefix.
    pub fn address(&self) -> IpAddr {
        self.address
    }

    /// Returns the length in bits, from 0 to 32 for IPv4.
    pub fn bits(&self) -> u8 {
        self.len
    }

    /// Returns the prefix itself and all prefixes that contain it. Each prefix is one bit shorter than the previous
    /// one.
    pub fn and_shorter(self) -> impl Iterator<Item = Self> {
        (0..=self.len).rev().filter_map(move |len| Self::new(self.address, len))
    }

    /// Makes a prefix from the values that [`raw`](Self::raw) returns, an IPv6 or IPv4-mapped address and a length.
    pub fn from_raw(address: [u8; 16], len: u8, is_v6: bool) -> Self {
        match Ipv6Addr::from(address) {
            address if is_v6 => Self { address: address.into(), len },
            address => Self { address: address.to_canonical(), len: len - 96 },
        }
    }

    /// Returns the form that BPF programs use: an IPv6 address (IPv4 is mapped), and the prefix length in that address.
    pub fn raw(&self) -> ([u8; 16], u8) {
        (mapped(self.address), mapped_len(self.address, self.len))
    }
}

impl From<IpAddr> for Prefix {
    fn from(address: IpAddr) -> Self {
        Self { address, len: width(address) }
    }
}

impl FromStr for Prefix {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Self, ParseError> {
        let error = || ParseError(text.to_owned());
        let Some((address, len)) = text.split_once('/') else {
            return text.parse::<IpAddr>().map(Self::from).map_err(|_| error());
        };
        let address = address.parse().map_err(|_| error())?;
        Self::new(address, len.parse().map_err(|_| error())?).ok_or_else(error)
    }
}

impl fmt::Display for Prefix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.len == width(self.address) {
            return self.address.fmt(f);
        }
        write!(f, "{}/{}", self.address, self.len)
    }
}

trait CanonicalAs {
    fn to_canonical_as(self, like: IpAddr) -> IpAddr;
}

impl CanonicalAs for Ipv6Addr {
    fn to_canonical_as(self, like: IpAddr) -> IpAddr {
        match (like, self.to_ipv4_mapped()) {
            (IpAddr::V4(_), Some(address)) => address.into(),
            _ => self.into(),
        }
    }
}

fn width(address: IpAddr) -> u8 {
    if address.is_ipv4() { 32 } else { 128 }
}

fn mapped_len(address: IpAddr, len: u8) -> u8 {
    if address.is_ipv4() { 96 + len } else { len }
}

/// Maps IPv4 to `::ffff:a.b.c.d`.
pub fn mapped(address: IpAddr) -> [u8; 16] {
    match address {
        IpAddr::V4(address) => address.to_ipv6_mapped().octets(),
        IpAddr::V6(address) => address.octets(),
    }
}

/// Returns the address in these bytes, as IPv4 if it is an IPv4-mapped one.
pub fn unmapped(bytes: [u8; 16]) -> IpAddr {
    Ipv6Addr::from(bytes).to_canonical()
}

/// Clears the bits after the first `len`.
pub fn mask(bytes: [u8; 16], len: u8) -> [u8; 16] {
    (u128::from_be_bytes(bytes) & bits(len)).to_be_bytes()
}

/// Returns a number with the top `len` bits set.
pub fn bits(len: u8) -> u128 {
    u128::MAX.checked_shl(128 - u32::from(len)).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn address_prefixes_round_trip_as_text() {
        for (text, want) in [
            ("10.1.2.3", Some("10.1.2.3")),
            ("10.1.2.3/8", Some("10.0.0.0/8")),
            ("10.1.2.3/32", Some("10.1.2.3")),
            ("0.0.0.0/0", Some("0.0.0.0/0")),
            ("2001:db8::1/64", Some("2001:db8::/64")),
            ("::/0", Some("::/0")),
            ("::ffff:10.0.0.1/104", Some("::ffff:10.0.0.0/104")),
            ("10.1.2.3/33", None),
            ("::1/129", None),
            ("10.1.2/8", None),
            ("10.1.2.3/-1", None),
            ("10.1.2.3/", None),
            ("", None),
        ] {
            let parsed = text.parse::<Prefix>();
            assert_eq!(parsed.as_ref().map(Prefix::to_string).ok().as_deref(), want, "{text}");
            assert!(parsed.is_ok() || parsed.unwrap_err().to_string().contains(text));
        }
    }

    #[test]
    fn prefix_mask_clears_bits_beyond_the_prefix_length() {
        assert_eq!(bits(0), 0);
        assert_eq!(bits(128), u128::MAX);
        assert_eq!(bits(64), u128::from(u64::MAX) << 64);
    }

    #[test]
    fn raw_ipv4_prefix_length_includes_the_mapped_96_bits() {
        let raw = |text: &str| text.parse::<Prefix>().expect("a prefix").raw();
        assert_eq!(raw("10.1.2.3/8"), ([0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 255, 255, 10, 0, 0, 0], 104));
        assert_eq!(raw("::/0"), ([0; 16], 0));
    }
}
