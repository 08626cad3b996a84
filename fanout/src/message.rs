//! Messages between receivers and the relay: one datagram each, on the port that the stream's packets come from.
//!
//! ```text
//!  0        4      5      6         8        16           20
//! +--------+------+------+---------+--------+------------+------------------------+
//! | "MRF1" | kind | more | seconds | token  | transaction| name, zeroes to 64 ... |
//! +--------+------+------+---------+--------+------------+------------------------+
//! ```
//!
//! All numbers are big-endian. A request has the stream's name, of `more` bytes, and is padded to [`REQUEST_BYTES`]. An
//! answer ends after the field `transaction`. It is thus shorter than its request, so an attacker with a forged source
//! address cannot amplify traffic. No packet of RTP, RTCP, STUN or DTLS begins with the byte `M` (RFC 7983).

use super::token::ReceiverToken;

/// First bytes of every message.
pub const MAGIC: [u8; 4] = *b"MRF1";
/// Least length of a request, in bytes.
pub const REQUEST_BYTES: usize = 64;
/// Length of an answer, in bytes.
pub const ANSWER_BYTES: usize = 20;
/// Longest name of a stream, in bytes.
pub const NAME_MAX: usize = REQUEST_BYTES - ANSWER_BYTES;

/// A request that a receiver sends to the relay.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReceiverRequest {
    /// The action that the receiver requests.
    pub what: ReceiverAction,
    /// Token of the latest answer to this receiver; 0 if there was none.
    pub token: ReceiverToken,
    /// A number that the client chooses. The answer repeats it.
    pub transaction: u32,
    /// The stream's name, at most [`NAME_MAX`] bytes.
    pub stream: String,
}

/// The action that a receiver requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReceiverAction {
    /// Asks for a lease of this many seconds, or renews one.
    Subscribe {
        /// Length of the lease, in seconds.
        seconds: u16,
    },
    /// Ends the lease.
    Unsubscribe,
}

/// The relay's answer to a receiver's request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RelayAnswer {
    /// The outcome of the request.
    pub what: RequestOutcome,
    /// The transaction number of the request.
    pub transaction: u32,
}

/// The outcome of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequestOutcome {
    /// The client has not proved its address, and has to ask again with this token.
    Prove(ReceiverToken),
    /// The lease lasts for this many seconds. The token renews it.
    Lease {
        /// Length of the lease, in seconds. It may be shorter than what was asked for.
        seconds: u16,
        /// The token for the next request.
        token: ReceiverToken,
    },
    /// The lease has ended, as the client requested.
    Ended,
    /// The request is refused. The client may ask again after this many seconds.
    Refused {
        /// The reason for the refusal.
        why: RequestRefusal,
        /// Time in seconds until the client may ask again.
        seconds: u16,
    },
}

/// Reason why a request is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum RequestRefusal {
    /// There is no stream of that name at this address.
    Unknown,
    /// The stream has reached its limit of receivers.
    Full,
    /// The client's IP address has reached its limit of receivers.
    FullAddress,
    /// The circuit breaker has cut the receiver off.
    Cut,
}

impl RequestRefusal {
    /// Every reason, in the order in which metrics list them.
    pub const ALL: [Self; 4] = [Self::Unknown, Self::Full, Self::FullAddress, Self::Cut];

    /// Returns the reason's name for metrics: lower case, with underscores.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Unknown => "unknown",
            Self::Full => "full",
            Self::FullAddress => "full_address",
            Self::Cut => "cut",
        }
    }

    /// Returns the reason in words, for the user.
    pub const fn text(self) -> &'static str {
        match self {
            Self::Unknown => "there is no stream of that name at this address",
            Self::Full => "the stream has as many receivers as it may have",
            Self::FullAddress => "this address has as many receivers as it may have",
            Self::Cut => "the relay cut this receiver off: it lost too many packets, or its reports stopped",
        }
    }

    fn code(self) -> u8 {
        self as u8 + 1
    }

    fn from_code(code: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|refusal| refusal.code() == code)
    }
}

const SUBSCRIBE: u8 = 1;
const UNSUBSCRIBE: u8 = 2;
const PROVE: u8 = 0x81;
const LEASE: u8 = 0x82;
const ENDED: u8 = 0x83;
const REFUSED: u8 = 0x84;

impl ReceiverRequest {
    /// Reports whether a datagram is meant as a request, well-formed or not.
    pub fn is_meant(bytes: &[u8]) -> bool {
        bytes.starts_with(&MAGIC)
    }

    /// Reads a request. Returns `None` if the datagram is no request, or is shorter than its answer would be.
    pub fn read(bytes: &[u8]) -> Option<Self> {
        if bytes.len() < REQUEST_BYTES {
            return None;
        }
        let (head, rest) = bytes.split_first_chunk()?;
        let MessageHead { kind, more, seconds, token, transaction } = MessageHead::read(head)?;
        let name = rest.get(..usize::from(more)).filter(|name| name.len() <= NAME_MAX)?;
        let what = match kind {
            SUBSCRIBE => ReceiverAction::Subscribe { seconds },
            UNSUBSCRIBE => ReceiverAction::Unsubscribe,
            _ => return None,
        };
        Some(Self { what, token, transaction, stream: str::from_utf8(name).ok()?.to_owned() })
    }

    /// Writes the request. A name longer than [`NAME_MAX`] is cut.
    pub fn encode(&self) -> [u8; REQUEST_BYTES] {
        let (kind, seconds) = match self.what {
            ReceiverAction::Subscribe { seconds } => (SUBSCRIBE, seconds),
            ReceiverAction::Unsubscribe => (UNSUBSCRIBE, 0),
        };
        let mut bytes = [0; REQUEST_BYTES];
        let (head, rest) = bytes.split_at_mut(ANSWER_BYTES);
        let name = self.stream.as_bytes();
        let more = rest.iter_mut().zip(name).map(|(to, from)| *to = *from).count() as u8;
        let written = MessageHead { kind, more, seconds, token: self.token, transaction: self.transaction };
        head.copy_from_slice(&written.encode());
        bytes
    }
}

impl RelayAnswer {
    /// Reads an answer. Returns `None` if the datagram is no answer.
    pub fn read(bytes: &[u8]) -> Option<Self> {
        let MessageHead { kind, more, seconds, token, transaction } =
            MessageHead::read(bytes.try_into().ok()?)?;
        let what = match kind {
            PROVE => RequestOutcome::Prove(token),
            LEASE => RequestOutcome::Lease { seconds, token },
            ENDED => RequestOutcome::Ended,
            REFUSED => RequestOutcome::Refused { why: RequestRefusal::from_code(more)?, seconds },
            _ => return None,
        };
        Some(Self { what, transaction })
    }

    /// Writes the answer.
    pub fn encode(&self) -> [u8; ANSWER_BYTES] {
        let none = ReceiverToken::default();
        let (kind, more, seconds, token) = match self.what {
            RequestOutcome::Prove(token) => (PROVE, 0, 0, token),
            RequestOutcome::Lease { seconds, token } => (LEASE, 0, seconds, token),
            RequestOutcome::Ended => (ENDED, 0, 0, none),
            RequestOutcome::Refused { why, seconds } => (REFUSED, why.code(), seconds, none),
        };
        MessageHead { kind, more, seconds, token, transaction: self.transaction }.encode()
    }
}

/// The header that all messages have.
struct MessageHead {
    kind: u8,
    more: u8,
    seconds: u16,
    token: ReceiverToken,
    transaction: u32,
}

impl MessageHead {
    fn read(bytes: &[u8; ANSWER_BYTES]) -> Option<Self> {
        let [m, r, f, one, kind, more, s0, s1, t0, t1, t2, t3, t4, t5, t6, t7, transaction @ ..] = *bytes;
        ([m, r, f, one] == MAGIC).then(|| Self {
            kind,
            more,
            seconds: u16::from_be_bytes([s0, s1]),
            token: ReceiverToken([t0, t1, t2, t3, t4, t5, t6, t7]),
            transaction: u32::from_be_bytes(transaction),
        })
    }

    fn encode(&self) -> [u8; ANSWER_BYTES] {
        let mut bytes = [0; ANSWER_BYTES];
        bytes[..4].copy_from_slice(&MAGIC);
        bytes[4..6].copy_from_slice(&[self.kind, self.more]);
        bytes[6..8].copy_from_slice(&self.seconds.to_be_bytes());
        bytes[8..16].copy_from_slice(&self.token.0);
        bytes[16..].copy_from_slice(&self.transaction.to_be_bytes());
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOKEN: ReceiverToken = ReceiverToken([1, 2, 3, 4, 5, 6, 7, 8]);

    fn request(what: ReceiverAction, stream: &str) -> ReceiverRequest {
        ReceiverRequest { what, token: TOKEN, transaction: 0x0a0b_0c0d, stream: stream.to_owned() }
    }

    #[test]
    fn requests_are_read_as_they_were_written() {
        for what in [ReceiverAction::Subscribe { seconds: 30 }, ReceiverAction::Unsubscribe] {
            for name in ["", "live", &"n".repeat(NAME_MAX)] {
                let request = request(what, name);
                assert_eq!(ReceiverRequest::read(&request.encode()), Some(request));
            }
        }
        let cut = request(ReceiverAction::Unsubscribe, &"n".repeat(NAME_MAX + 1));
        assert_eq!(ReceiverRequest::read(&cut.encode()).map(|it| it.stream.len()), Some(NAME_MAX));
    }

    #[test]
    fn answers_are_read_as_they_were_written_and_shorter_than_requests() {
        let refused = |why| RequestOutcome::Refused { why, seconds: 9 };
        let said = [
            RequestOutcome::Prove(TOKEN),
            RequestOutcome::Lease { seconds: 30, token: TOKEN },
            RequestOutcome::Ended,
        ];
        for what in said.into_iter().chain(RequestRefusal::ALL.map(refused)) {
            let answer = RelayAnswer { what, transaction: 7 };
            let bytes = answer.encode();
            assert_eq!(RelayAnswer::read(&bytes), Some(answer));
            assert!(bytes.len() < REQUEST_BYTES);
            assert_eq!(ReceiverRequest::read(&bytes), None);
        }
    }

    #[test]
    fn malformed_request_is_rejected() {
        let good = request(ReceiverAction::Subscribe { seconds: 30 }, "live").encode();
        let with = |at: usize, value: u8| {
            let mut bytes = good;
            bytes[at] = value;
            bytes
        };
        assert_eq!(ReceiverRequest::read(&good[..63]), None, "shorter than its answers may be");
        for (what, bytes) in [
            ("magic", with(0, b'N')),
            ("kind", with(4, 3)),
            ("an answer's kind", with(4, PROVE)),
            ("a name beyond the end", with(5, NAME_MAX as u8 + 1)),
            ("a name that is no text", with(20, 0xff)),
        ] {
            assert_eq!(ReceiverRequest::read(&bytes), None, "{what}");
        }
    }
}
