//! What applications and the daemon of their host say to each other: JSON, one value in each record of a Unix socket of type
//! SEQPACKET. A connection is one session, or one listener, and ends with it.

pub use millrace_base::control::RECORD_MAX;
use serde::{Deserialize, Serialize};

use super::want::Want;

/// Of names of peers and services.
pub const NAME_MAX: usize = 64;

#[derive(Clone, Debug, Serialize, Deserialize, PartialEq)]
#[serde(tag = "do", rename_all = "snake_case", deny_unknown_fields)]
pub enum Request {
    /// Answered by [`Word::Opened`] or [`Word::Refused`].
    Open {
        peer: String,
        service: String,
        #[serde(default)]
        want: Want,
    },
    /// Answered by [`Word::Listening`] or [`Word::Refused`]; then [`Word::Accepted`] for each session.
    Listen { peer: String, service: String },
    /// Answered by [`Word::Changed`] or [`Word::Refused`].
    Renegotiate { want: Want },
    /// This end has sent so many messages, modulo 2^32, and sends no more.
    Finish { messages: u32 },
}

#[derive(Clone, Debug, Serialize, Deserialize, PartialEq)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Word {
    /// With the session's socket.
    Opened(Opened),
    Listening,
    /// With the session's socket, and a connection of its own to the daemon.
    Accepted(Opened),
    /// Of what was asked for: all stays as it was.
    Refused {
        why: Why,
        reason: String,
    },
    /// Both ends use another graft.
    Changed {
        graft: String,
        services: Vec<String>,
        by: By,
    },
    /// A datagram was refused as the window was full, and there is room now.
    Room,
    /// What was asked for is not kept to.
    Violated(Violation),
    /// The other end has sent so many messages, modulo 2^32, and sends no more.
    Finished {
        messages: u32,
    },
    /// The session is over. What has come can still be read.
    Closed {
        reason: String,
    },
}

#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq)]
pub struct Opened {
    pub peer: String,
    pub service: String,
    pub graft: String,
    pub services: Vec<String>,
    pub is_sealed: bool,
    /// The library puts messages in order: their graft does not.
    #[serde(default)]
    pub in_order: bool,
    /// Bytes that the session's datagrams may have.
    pub datagram_bytes: usize,
    /// Addresses and ports of its datagrams.
    pub local: String,
    pub remote: String,
}

#[derive(Clone, Copy, Debug, Serialize, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub enum Why {
    /// It is no request, or not one for this connection.
    Malformed,
    /// No such peer or service.
    Unknown,
    NotAllowed,
    /// The session has it anyway.
    Redundant,
    /// No graft can, or the path cannot.
    Impossible,
    /// All sessions are in use, or as many as a user may have.
    Exhausted,
    /// The other end does not answer, or does not want it.
    Unreachable,
    /// Something is under way.
    Busy,
}

impl Why {
    /// As records have it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Malformed => "malformed",
            Self::Unknown => "unknown",
            Self::NotAllowed => "not_allowed",
            Self::Redundant => "redundant",
            Self::Impossible => "impossible",
            Self::Exhausted => "exhausted",
            Self::Unreachable => "unreachable",
            Self::Busy => "busy",
        }
    }
}

/// Who has changed a session's graft.
#[derive(Clone, Copy, Debug, Serialize, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub enum By {
    /// The application, by `renegotiate`.
    Application,
    /// The daemon, since what was asked for was not kept to.
    Adaption,
    /// The other end, or an operator.
    Other,
}

#[derive(Clone, Debug, Serialize, Deserialize, PartialEq)]
pub struct Violation {
    /// `max_delay`, `min_throughput` or `max_loss`.
    pub what: String,
    /// In ms, Mbit/s, per cent.
    pub asked: f64,
    pub measured: f64,
}
