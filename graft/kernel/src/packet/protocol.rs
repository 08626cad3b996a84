//! The protocol of a session's datagrams on the wire (`bpf/packet_wire.h`).

use std::fmt;

/// IP protocol of a session's datagrams on the wire. Applications and functions see UDP in either case.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum WireProtocol {
    /// UDP.
    #[default]
    Udp,
    /// IP protocol 253, which is for experiments (RFC 3692).
    Ip253,
}

impl WireProtocol {
    /// The protocols that a session may use.
    pub const ALL: [Self; 2] = [Self::Udp, Self::Ip253];

    /// Returns the protocol's name in settings and status.
    pub fn name(self) -> &'static str {
        match self {
            Self::Udp => "udp",
            Self::Ip253 => "253",
        }
    }

    /// Returns the IP protocol number.
    pub fn number(self) -> u8 {
        match self {
            Self::Udp => 17,
            Self::Ip253 => 253,
        }
    }
}

impl fmt::Display for WireProtocol {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name())
    }
}
