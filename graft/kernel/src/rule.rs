//! Which connections get what.

use std::net::{IpAddr, Ipv6Addr};
use std::ops::RangeInclusive;

use libbpf_rs::{MapCore as _, MapHandle};
use millrace_kernel::prefix::Prefix;

use super::{Caller, Error, intf};

/// Rules that there is room for.
pub const RULES: usize = intf::RULES;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// This host connects: ports are the peer's.
    Client,
    /// This host accepts: ports are its own.
    Server,
}

/// What a socket gets; `None` leaves it as it is.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Settings {
    /// As TCP knows it, at most 15 bytes.
    pub congestion: Option<String>,
    /// Bytes per second.
    pub pacing: Option<u32>,
    /// Bytes, which the kernel doubles.
    pub send_buffer: Option<i32>,
    /// Likewise.
    pub receive_buffer: Option<i32>,
    /// Packets: the first congestion window.
    pub window: Option<i32>,
}

/// Connections, and what this side's sockets get. The first that fits counts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rule {
    pub side: Side,
    pub peer: Prefix,
    pub ports: RangeInclusive<u16>,
    /// Of a client.
    pub caller: Caller,
    /// Only with a peer that has agreed in TCP options.
    pub agree: bool,
    /// If it asks: only a peer that is bound by an agreement on this rule ([`Tcp::bind`](super::Tcp::bind)).
    pub bound: bool,
    /// First bytes of the identity of what this side would use; zero: what its kernel has.
    pub graft: [u8; 4],
    /// By which its paths are found among what is chosen ([`Tcp::choose`](super::Tcp::choose)); 0: nothing is, and nothing is told of
    /// its connections.
    pub choice: u32,
    pub settings: Settings,
}

impl Rule {
    /// `generation`: of the list that it is in.
    pub(super) fn raw(&self, generation: u32) -> intf::Rule {
        let Settings { congestion, pacing, send_buffer, receive_buffer, window } = &self.settings;
        let bit = |is_set: bool, bit: u16| if is_set { bit } else { 0 };
        let set = bit(congestion.is_some(), intf::SET_CONGESTION)
            | bit(pacing.is_some(), intf::SET_PACING)
            | bit(send_buffer.is_some(), intf::SET_SEND_BUFFER)
            | bit(receive_buffer.is_some(), intf::SET_RECEIVE_BUFFER)
            | bit(window.is_some(), intf::SET_WINDOW);
        let (peer, mask) = masked(self.peer);
        intf::Rule {
            peer,
            mask,
            first_port: *self.ports.start(),
            last_port: *self.ports.end(),
            side: match self.side {
                Side::Client => intf::CLIENT,
                Side::Server => intf::SERVER,
            },
            agree: match (self.agree, self.bound) {
                (false, _) => 0,
                (true, false) => intf::ASK,
                (true, true) => intf::ASK_BOUND,
            },
            set,
            graft: self.graft,
            pacing_bytes_s: pacing.unwrap_or_default(),
            send_buffer_bytes: send_buffer.unwrap_or_default(),
            receive_buffer_bytes: receive_buffer.unwrap_or_default(),
            window_packets: window.unwrap_or_default(),
            generation,
            choice: self.choice,
            pad: 0,
            congestion: name(congestion.as_deref().unwrap_or_default()),
            caller: self.caller.raw(),
        }
    }
}

/// The prefix of all addresses, of IPv4 too.
pub fn everybody() -> Prefix {
    Prefix::new(Ipv6Addr::UNSPECIFIED.into(), 0).unwrap_or_else(|| unreachable!("no bits are too few"))
}

/// Whether a rule with this prefix is for this peer.
pub fn covers(prefix: Prefix, address: IpAddr) -> bool {
    let (peer, mask) = masked(prefix);
    let masked = words(address).into_iter().zip(mask).map(|(byte, mask)| byte & mask);
    masked.eq(peer)
}

/// Cut off where there is no room, with a zero behind it.
pub(super) fn name(text: &str) -> [u8; intf::NAME_BYTES] {
    let mut bytes = [0; intf::NAME_BYTES];
    let room = bytes.len() - 1;
    bytes.iter_mut().take(room).zip(text.bytes()).for_each(|(to, from)| *to = from);
    bytes
}

pub(super) fn text(bytes: &[u8; intf::NAME_BYTES]) -> String {
    let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    String::from_utf8_lossy(&bytes[..end]).into_owned()
}

/// IPv4 is `::ffff:a.b.c.d` here.
pub(super) fn words(address: IpAddr) -> [u8; 16] {
    match address {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        IpAddr::V6(v6) => v6.octets(),
    }
}

pub(super) fn address(words: [u8; 16]) -> IpAddr {
    Ipv6Addr::from(words).to_canonical()
}

/// The prefix 0.0.0.0/0 is all of IPv4, and ::/0 is all there is.
pub(super) fn masked(prefix: Prefix) -> ([u8; 16], [u8; 16]) {
    let bits = match prefix.address() {
        IpAddr::V4(_) => 96 + u32::from(prefix.bits()),
        IpAddr::V6(_) => u32::from(prefix.bits()),
    };
    let mask = u128::MAX.checked_shl(128 - bits).unwrap_or(0).to_be_bytes();
    let mut peer = words(prefix.address());
    peer.iter_mut().zip(mask).for_each(|(byte, mask)| *byte &= mask);
    (peer, mask)
}

/// One that is not there any more is no error.
pub(super) fn remove(map: &MapHandle, what: &'static str, key: &[u8]) -> Result<(), Error> {
    match map.delete(key) {
        Err(error) if error.kind() != libbpf_rs::ErrorKind::NotFound => {
            Err(millrace_kernel::Error::Write { what, source: error }.into())
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prefixes_cover_what_they_say() {
        let table = [
            ("10.1.2.3/8", "::ffff:10.0.0.0", 104),
            ("0.0.0.0/0", "::ffff:0.0.0.0", 96),
            ("2001:db8::1/32", "2001:db8::", 32),
            ("::/0", "::", 0),
            ("::1/128", "::1", 128),
        ];
        for (text, peer, bits) in table {
            let wanted: Ipv6Addr = peer.parse().expect("an address");
            let (peer, mask) = masked(text.parse().expect("a prefix"));
            assert_eq!(Ipv6Addr::from(peer), wanted, "{text}");
            assert_eq!(u128::from_be_bytes(mask).leading_ones(), bits, "{text}");
            assert_eq!(u128::from_be_bytes(mask).count_ones(), bits, "{text}");
        }
    }

    #[test]
    fn addresses_are_covered_as_in_the_kernel() {
        let table = [
            ("10.0.0.0/8", "10.200.0.1", true),
            ("10.0.0.0/8", "11.0.0.1", false),
            ("0.0.0.0/0", "11.0.0.1", true),
            ("0.0.0.0/0", "2001:db8::1", false),
            ("::/0", "11.0.0.1", true),
            ("2001:db8::/32", "2001:db9::1", false),
        ];
        for (prefix, address, wanted) in table {
            let prefix = prefix.parse().expect("a prefix");
            assert_eq!(covers(prefix, address.parse().expect("an address")), wanted, "{prefix} {address}");
        }
    }

    #[test]
    fn names_end_with_a_zero() {
        assert_eq!(text(&name("mr_hybla")), "mr_hybla");
        assert_eq!(text(&name("sixteen letters!")), "sixteen letters");
        assert_eq!(text(&[b'a'; 16]).len(), 16);
    }
}
