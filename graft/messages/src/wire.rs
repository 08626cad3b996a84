//! The messages between applications and the daemon of their host: JSON, one value in each record of a Unix socket of
//! type SEQPACKET. Each connection belongs to one session or one listener, and ends with it.

pub use millrace_base::control::RECORD_MAX;
use serde::{Deserialize, Serialize};

use crate::want::Want;

/// Longest name of a peer or service, in bytes.
pub const NAME_MAX: usize = 64;

/// A request of an application.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq)]
#[serde(tag = "do", rename_all = "snake_case", deny_unknown_fields)]
pub enum BrokerRequest {
    /// Requests a session. The daemon answers with [`BrokerReply::Opened`] or [`BrokerReply::Refused`].
    Open {
        /// Name of the peer in the daemon's settings.
        peer: String,
        /// Name of the service.
        service: String,
        /// The services and the quality that the session needs.
        #[serde(default)]
        want: Want,
    },
    /// Requests to listen. The daemon answers with [`BrokerReply::Listening`] or [`BrokerReply::Refused`], and then
    /// sends [`BrokerReply::Accepted`] for each session.
    Listen {
        /// Name of the peer in the daemon's settings.
        peer: String,
        /// Name of the service.
        service: String,
    },
    /// Requests other services or another quality during the session, which may need another graft (list of packet
    /// functions). The daemon answers with [`BrokerReply::Changed`] or [`BrokerReply::Refused`].
    Renegotiate {
        /// The services and the quality that the session needs from now on.
        want: Want,
    },
    /// The application has sent this number of messages, modulo 2^32, and sends no more.
    Finish {
        /// Number of messages that were sent, modulo 2^32.
        messages: u32,
    },
}

/// A message of the daemon: an answer or an event.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum BrokerReply {
    /// The session is open. The record also carries the file descriptor of the session's socket.
    Opened(OpenedSession),
    /// The daemon listens for the service.
    Listening,
    /// A session for a listener to accept. The record also carries two file descriptors: the session's socket, and the
    /// session's own connection to the daemon.
    Accepted(OpenedSession),
    /// The daemon refuses the request. A session that is open continues unchanged.
    Refused {
        /// The category of the reason, for programs that react to it.
        why: SessionRefusal,
        /// The reason, as text for people.
        reason: String,
    },
    /// Both hosts have changed the session to another graft (list of packet functions).
    Changed {
        /// Name of the new graft.
        graft: String,
        /// Services of the new graft.
        services: Vec<String>,
        /// Originator of the change of grafts.
        by: ChangeOrigin,
    },
    /// The flow-control window of the session has space again, after it had refused a datagram.
    Room,
    /// The measured quality of the session is worse than requested.
    Violated(QualityViolation),
    /// The other application has sent this number of messages, modulo 2^32, and sends no more.
    Finished {
        /// Number of messages that the other application has sent, modulo 2^32.
        messages: u32,
    },
    /// The session is over. Messages that have arrived can still be read.
    Closed {
        /// The reason, as text for people.
        reason: String,
    },
}

/// The terms that both hosts of a session agreed on.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq)]
pub struct OpenedSession {
    /// Name of the peer in the daemon's settings.
    pub peer: String,
    /// Name of the service.
    pub service: String,
    /// Name of the session's graft (list of packet functions).
    pub graft: String,
    /// Transport services that the session's graft provides.
    pub services: Vec<String>,
    /// True if datagrams are encrypted and authenticated.
    pub is_sealed: bool,
    /// True if the library puts messages in order, because the session's packet functions do not.
    #[serde(default)]
    pub in_order: bool,
    /// Largest size of the session's datagrams, in bytes.
    pub datagram_bytes: usize,
    /// This host's address and port.
    pub local: String,
    /// The peer's address and port.
    pub remote: String,
}

/// The kind of reason for which a request is refused.
#[derive(Clone, Copy, Debug, Serialize, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub enum SessionRefusal {
    /// The request is not valid, or not allowed on this connection.
    Malformed,
    /// The settings have no such peer or service.
    Unknown,
    /// The settings do not allow sessions to this user.
    NotAllowed,
    /// The request names a service that every session has anyway, so it must not be requested.
    Redundant,
    /// No graft (list of packet functions) in the daemon's settings provides the requested services or quality, or the
    /// network path cannot provide them.
    Impossible,
    /// All ports for sessions with this peer are in use, or the user already has as many sessions as allowed.
    Exhausted,
    /// The other host does not answer, or refuses.
    Unreachable,
    /// Another change of the session is in progress.
    Busy,
}

impl SessionRefusal {
    /// Returns the reason's name in JSON records.
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

/// Originator of a change of the session's graft.
#[derive(Clone, Copy, Debug, Serialize, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub enum ChangeOrigin {
    /// The application has requested another graft for the session by `renegotiate`.
    Application,
    /// The daemon has changed the graft, because the previous one did not provide the quality.
    Adaption,
    /// The other host or an operator has changed the session's graft (list of packet functions).
    Other,
}

/// A requested quality, and the worse value that was measured.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq)]
pub struct QualityViolation {
    /// Name of the quality: `max_delay`, `min_throughput` or `max_loss`.
    pub what: String,
    /// Requested value, in ms, Mbit/s or per cent.
    pub asked: f64,
    /// Measured value, in the same unit.
    pub measured: f64,
}
