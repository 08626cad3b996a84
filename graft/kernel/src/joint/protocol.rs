//! What a session's datagrams are on the wire (`bpf/joint_wire.h`).

use std::fmt;

/// What is between IP and a session's payloads on the wire. To applications and functions it is UDP in any case.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Protocol {
    #[default]
    Udp,
    /// IP protocol 253, which is for experiments (RFC 3692).
    Ip253,
}

impl Protocol {
    pub const ALL: [Self; 2] = [Self::Udp, Self::Ip253];

    /// As settings and status call it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Udp => "udp",
            Self::Ip253 => "253",
        }
    }

    /// As IP does.
    pub fn number(self) -> u8 {
        match self {
            Self::Udp => 17,
            Self::Ip253 => 253,
        }
    }
}

impl fmt::Display for Protocol {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name())
    }
}
