//! Rules that select TCP connections and settings for their sockets.

use std::net::{IpAddr, Ipv6Addr};
use std::ops::RangeInclusive;

use libbpf_rs::{MapCore as _, MapHandle};
use millrace_kernel::prefix::Prefix;

use super::{CallerRule, Error, intf};

/// Maximum number of TCP rules in a list.
pub const RULES: usize = intf::RULES;

/// Whether this host is client or server of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RuleSide {
    /// This host opens the connection; a rule's ports are those of the peer.
    Client,
    /// This host accepts the connection; a rule's ports are those of this host.
    Server,
}

/// Settings for a socket. A field that is `None` leaves the socket's own value.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Settings {
    /// Name of the congestion control in TCP, at most 15 bytes.
    pub congestion: Option<String>,
    /// Pacing rate in bytes per second (SO_MAX_PACING_RATE).
    pub pacing: Option<u32>,
    /// Send buffer in bytes (SO_SNDBUF); the kernel doubles it.
    pub send_buffer: Option<i32>,
    /// Receive buffer in bytes (SO_RCVBUF); the kernel doubles it.
    pub receive_buffer: Option<i32>,
    /// Initial congestion window in packets.
    pub window: Option<i32>,
}

/// A rule that matches connections, and the settings for this host's sockets of these connections. The first rule of
/// the list that matches applies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TcpRule {
    /// Whether this host has to be client or server of the connection.
    pub side: RuleSide,
    /// Addresses of the peers that the rule matches.
    pub peer: Prefix,
    /// Server ports that the rule matches.
    pub ports: RangeInclusive<u16>,
    /// Condition on the connecting process. It applies only if this host is the client.
    pub caller: CallerRule,
    /// True if the rule applies only to peers that have agreed to it in TCP options.
    pub agree: bool,
    /// If `agree` is set: true if the rule applies only to peers that userspace has bound to it for a limited time
    /// ([`Tcp::bind`](super::Tcp::bind)).
    pub bound: bool,
    /// First bytes of the hash that identifies the loadable congestion control of this rule; zero if the rule uses
    /// one that is built into the kernel.
    pub graft: [u8; 4],
    /// Key under which userspace stores the congestion control that its model chose for connections of this rule
    /// ([`Tcp::choose`](super::Tcp::choose)). 0: the rule's congestion control is fixed, and no events are sent about
    /// its connections.
    pub choice: u32,
    /// Settings for the sockets of matching connections.
    pub settings: Settings,
}

impl TcpRule {
    /// Returns the rule as the BPF program reads it. `generation` is the number of the list that contains the rule.
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
                RuleSide::Client => intf::CLIENT,
                RuleSide::Server => intf::SERVER,
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

/// Returns the prefix ::/0, which covers all addresses of IPv6 and IPv4.
pub fn everybody() -> Prefix {
    Prefix::new(Ipv6Addr::UNSPECIFIED.into(), 0)
        .unwrap_or_else(|| unreachable!("a prefix of 0 bits is valid"))
}

/// Returns whether a rule with this prefix applies to this peer.
pub fn covers(prefix: Prefix, address: IpAddr) -> bool {
    let (peer, mask) = masked(prefix);
    let masked = words(address).into_iter().zip(mask).map(|(byte, mask)| byte & mask);
    masked.eq(peer)
}

/// Returns a name as an array that ends with a zero byte. A name that is too long is cut off.
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

/// Returns the 16 bytes of an address; IPv4 is mapped to `::ffff:a.b.c.d`.
pub(super) fn words(address: IpAddr) -> [u8; 16] {
    match address {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        IpAddr::V6(v6) => v6.octets(),
    }
}

pub(super) fn address(words: [u8; 16]) -> IpAddr {
    // IPv4 addresses in mapped form are returned as IPv4.
    Ipv6Addr::from(words).to_canonical()
}

/// Returns the address and the mask of a prefix, as 16 bytes each. The prefix 0.0.0.0/0 covers IPv4 only; ::/0 covers
/// both families.
pub(super) fn masked(prefix: Prefix) -> ([u8; 16], [u8; 16]) {
    let bits = match prefix.address() {
        IpAddr::V4(_) => 96 + u32::from(prefix.bits()),
        IpAddr::V6(_) => u32::from(prefix.bits()),
    };
    // A prefix of 0 bits would need a shift by 128, which overflows u128.
    let mask = u128::MAX.checked_shl(128 - bits).unwrap_or(0).to_be_bytes();
    let mut peer = words(prefix.address());
    peer.iter_mut().zip(mask).for_each(|(byte, mask)| *byte &= mask);
    (peer, mask)
}

/// Removes an entry of a map. A missing entry is no error.
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
    fn graft_rule_prefix_becomes_a_masked_ipv6_address() {
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
    fn rule_addresses_match_as_in_the_kernel() {
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
    fn graft_name_is_cut_to_fifteen_bytes_and_ends_with_a_zero_byte() {
        assert_eq!(text(&name("mr_hybla")), "mr_hybla");
        assert_eq!(text(&name("sixteen letters!")), "sixteen letters");
        assert_eq!(text(&[b'a'; 16]).len(), 16);
    }
}
