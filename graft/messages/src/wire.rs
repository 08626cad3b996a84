//! The messages between applications and the daemon of their host: JSON, one value in each record of a Unix socket of
//! type SEQPACKET. A connection stands for one session or one listener, and ends with it.

pub use millrace_base::control::RECORD_MAX;
use serde::{Deserialize, Serialize};

use crate::want::Want;

/// Longest name of a peer or service, in bytes.
pub const NAME_MAX: usize = 64;

/// A request of an application.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq)]
#[serde(tag = "do", rename_all = "snake_case", deny_unknown_fields)]
pub enum BrokerRequest {
    /// Asks for a session. The answer is [`BrokerReply::Opened`] or [`BrokerReply::Refused`].
    Open {
        /// Name of the peer in the daemon's settings.
        peer: String,
        /// Name of the service.
        service: String,
        /// The services and the quality that the session needs.
        #[serde(default)]
        want: Want,
    },
    /// Asks to listen. The answer is [`BrokerReply::Listening`] or [`BrokerReply::Refused`], and then
    /// [`BrokerReply::Accepted`] for each session.
    Listen {
        /// Name of the peer in the daemon's settings.
        peer: String,
        /// Name of the service.
        service: String,
    },
    /// Asks for another graft during the session. The answer is [`BrokerReply::Changed`] or [`BrokerReply::Refused`].
    Renegotiate {
        /// The services and the quality that the session needs from now on.
        want: Want,
    },
    /// The application has sent this number of messages, modulo 2^32, and sends no more.
    Finish {
        /// Number of messages that were sent.
        messages: u32,
    },
}

/// A message of the daemon: an answer or an event.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum BrokerReply {
    /// The session is open. The record also has the descriptor of its socket.
    Opened(OpenedSession),
    /// The daemon listens for the service.
    Listening,
    /// The next session for a listener. The record also has the descriptors of its socket and of its own connection
    /// to the daemon.
    Accepted(OpenedSession),
    /// The request is refused. An open session stays as it was.
    Refused {
        /// The kind of reason.
        why: SessionRefusal,
        /// The reason, as text for people.
        reason: String,
    },
    /// Both ends use another graft now.
    Changed {
        /// Name of the graft.
        graft: String,
        /// Services of the graft.
        services: Vec<String>,
        /// The side that has asked for the change.
        by: ChangeOrigin,
    },
    /// The window has room again, after it had refused a datagram.
    Room,
    /// The session does not have the requested quality.
    Violated(QualityViolation),
    /// The other end has sent this number of messages, modulo 2^32, and sends no more.
    Finished {
        /// Number of messages that the other end has sent.
        messages: u32,
    },
    /// The session is over. Messages that have arrived can still be read.
    Closed {
        /// The reason, as text for people.
        reason: String,
    },
}

/// The terms that both ends of a session agreed on.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq)]
pub struct OpenedSession {
    /// Name of the peer.
    pub peer: String,
    /// Name of the service.
    pub service: String,
    /// Name of the graft.
    pub graft: String,
    /// Services of the graft.
    pub services: Vec<String>,
    /// True if datagrams are encrypted and authenticated.
    pub is_sealed: bool,
    /// True if the library puts messages in order, because the graft does not.
    #[serde(default)]
    pub in_order: bool,
    /// Largest size of the session's datagrams, in bytes.
    pub datagram_bytes: usize,
    /// This end's address and port.
    pub local: String,
    /// The other end's address and port.
    pub remote: String,
}

/// The kind of reason for a refusal.
#[derive(Clone, Copy, Debug, Serialize, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub enum SessionRefusal {
    /// The request is not valid, or does not fit this connection.
    Malformed,
    /// There is no such peer or service.
    Unknown,
    /// The settings do not allow sessions to this user.
    NotAllowed,
    /// The session has the requested service in any case.
    Redundant,
    /// No graft of the settings provides what was requested, or the path cannot.
    Impossible,
    /// No session of the pool is free, or the user has as many as allowed.
    Exhausted,
    /// The other end does not answer, or refuses.
    Unreachable,
    /// Another change of the session is under way.
    Busy,
}

impl SessionRefusal {
    /// Returns the name in records.
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

/// The side that has changed the graft of a session.
#[derive(Clone, Copy, Debug, Serialize, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub enum ChangeOrigin {
    /// The application has asked for the change by `renegotiate`.
    Application,
    /// The daemon has changed the graft, because it violated the quality.
    Adaption,
    /// The other end or an operator has changed the graft.
    Other,
}

/// A requested quality that the session does not have.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq)]
pub struct QualityViolation {
    /// Name of the quality: `max_delay`, `min_throughput` or `max_loss`.
    pub what: String,
    /// Requested value, in ms, Mbit/s or per cent.
    pub asked: f64,
    /// Measured value, in the same unit.
    pub measured: f64,
}
