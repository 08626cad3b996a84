//! What receivers and the relay say to each other: one datagram each, on the port that the stream's packets come from.
//!
//! ```text
//!  0        4      5      6         8        16           20
//! +--------+------+------+---------+--------+------------+------------------------+
//! | "MRF1" | kind | more | seconds | token  | transaction| name, zeroes to 64 ... |
//! +--------+------+------+---------+--------+------------+------------------------+
//! ```
//!
//! All numbers are big-endian. A request has the stream's name, of `more` bytes, and is filled up to [`REQUEST_BYTES`]; an answer
//! ends behind the transaction, so it is always shorter than what it answers: nobody gains by forging where a request comes
//! from. `M` is no first byte of RTP, RTCP, STUN or DTLS (RFC 7983).

use super::token::Token;

pub const MAGIC: [u8; 4] = *b"MRF1";
/// Of a request, at least.
pub const REQUEST_BYTES: usize = 64;
pub const ANSWER_BYTES: usize = 20;
/// Of a stream's name.
pub const NAME_MAX: usize = REQUEST_BYTES - ANSWER_BYTES;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    pub what: Ask,
    /// That of the latest answer; 0 if there was none.
    pub token: Token,
    /// The asker's; the answer repeats it.
    pub transaction: u32,
    pub stream: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ask {
    /// For a lease of so many seconds, or to renew one.
    Subscribe { seconds: u16 },
    /// To end it.
    Unsubscribe,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answer {
    pub what: Say,
    pub transaction: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Say {
    /// To be asked again with this.
    Prove(Token),
    /// For so many seconds. To be renewed with this.
    Lease { seconds: u16, token: Token },
    /// It has ended.
    Ended,
    /// Not before so many seconds.
    Refused { why: Refusal, seconds: u16 },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Refusal {
    /// No stream of that name is here.
    Unknown,
    /// The stream has as many receivers as it may.
    Full,
    /// The address has.
    FullAddress,
    /// What it reported has cut it off.
    Cut,
}

impl Refusal {
    pub const ALL: [Self; 4] = [Self::Unknown, Self::Full, Self::FullAddress, Self::Cut];

    /// For metrics: lower case, with underscores.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Unknown => "unknown",
            Self::Full => "full",
            Self::FullAddress => "full_address",
            Self::Cut => "cut",
        }
    }

    pub const fn text(self) -> &'static str {
        match self {
            Self::Unknown => "there is no stream of that name at this address",
            Self::Full => "the stream has as many receivers as it may have",
            Self::FullAddress => "this address has as many receivers as it may have",
            Self::Cut => "it was cut off: too much was lost on the way, or its reports stayed away",
        }
    }

    fn code(self) -> u8 {
        self as u8 + 1
    }

    fn of(code: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|refusal| refusal.code() == code)
    }
}

const SUBSCRIBE: u8 = 1;
const UNSUBSCRIBE: u8 = 2;
const PROVE: u8 = 0x81;
const LEASE: u8 = 0x82;
const ENDED: u8 = 0x83;
const REFUSED: u8 = 0x84;

impl Request {
    /// Whether a datagram is meant as one, readable or not.
    pub fn is_meant(bytes: &[u8]) -> bool {
        bytes.starts_with(&MAGIC)
    }

    /// `None`: it is none, or too short for its answer.
    pub fn read(bytes: &[u8]) -> Option<Self> {
        if bytes.len() < REQUEST_BYTES {
            return None;
        }
        let (head, rest) = bytes.split_first_chunk()?;
        let Head { kind, more, seconds, token, transaction } = Head::read(head)?;
        let name = rest.get(..usize::from(more)).filter(|name| name.len() <= NAME_MAX)?;
        let what = match kind {
            SUBSCRIBE => Ask::Subscribe { seconds },
            UNSUBSCRIBE => Ask::Unsubscribe,
            _ => return None,
        };
        Some(Self { what, token, transaction, stream: str::from_utf8(name).ok()?.to_owned() })
    }

    /// Of a name that is longer than [`NAME_MAX`], what fits.
    pub fn encode(&self) -> [u8; REQUEST_BYTES] {
        let (kind, seconds) = match self.what {
            Ask::Subscribe { seconds } => (SUBSCRIBE, seconds),
            Ask::Unsubscribe => (UNSUBSCRIBE, 0),
        };
        let mut bytes = [0; REQUEST_BYTES];
        let (head, rest) = bytes.split_at_mut(ANSWER_BYTES);
        let name = self.stream.as_bytes();
        let more = rest.iter_mut().zip(name).map(|(to, from)| *to = *from).count() as u8;
        let written = Head { kind, more, seconds, token: self.token, transaction: self.transaction };
        head.copy_from_slice(&written.encode());
        bytes
    }
}

impl Answer {
    pub fn read(bytes: &[u8]) -> Option<Self> {
        let Head { kind, more, seconds, token, transaction } = Head::read(bytes.try_into().ok()?)?;
        let what = match kind {
            PROVE => Say::Prove(token),
            LEASE => Say::Lease { seconds, token },
            ENDED => Say::Ended,
            REFUSED => Say::Refused { why: Refusal::of(more)?, seconds },
            _ => return None,
        };
        Some(Self { what, transaction })
    }

    pub fn encode(&self) -> [u8; ANSWER_BYTES] {
        let none = Token::default();
        let (kind, more, seconds, token) = match self.what {
            Say::Prove(token) => (PROVE, 0, 0, token),
            Say::Lease { seconds, token } => (LEASE, 0, seconds, token),
            Say::Ended => (ENDED, 0, 0, none),
            Say::Refused { why, seconds } => (REFUSED, why.code(), seconds, none),
        };
        Head { kind, more, seconds, token, transaction: self.transaction }.encode()
    }
}

/// What all have in common.
struct Head {
    kind: u8,
    more: u8,
    seconds: u16,
    token: Token,
    transaction: u32,
}

impl Head {
    fn read(bytes: &[u8; ANSWER_BYTES]) -> Option<Self> {
        let [m, r, f, one, kind, more, s0, s1, t0, t1, t2, t3, t4, t5, t6, t7, transaction @ ..] = *bytes;
        ([m, r, f, one] == MAGIC).then(|| Self {
            kind,
            more,
            seconds: u16::from_be_bytes([s0, s1]),
            token: Token([t0, t1, t2, t3, t4, t5, t6, t7]),
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

    const TOKEN: Token = Token([1, 2, 3, 4, 5, 6, 7, 8]);

    fn request(what: Ask, stream: &str) -> Request {
        Request { what, token: TOKEN, transaction: 0x0a0b_0c0d, stream: stream.to_owned() }
    }

    #[test]
    fn requests_are_read_as_they_were_written() {
        for what in [Ask::Subscribe { seconds: 30 }, Ask::Unsubscribe] {
            for name in ["", "live", &"n".repeat(NAME_MAX)] {
                let request = request(what, name);
                assert_eq!(Request::read(&request.encode()), Some(request));
            }
        }
        let cut = request(Ask::Unsubscribe, &"n".repeat(NAME_MAX + 1));
        assert_eq!(Request::read(&cut.encode()).map(|it| it.stream.len()), Some(NAME_MAX));
    }

    #[test]
    fn answers_are_read_as_they_were_written_and_shorter_than_requests() {
        let refused = |why| Say::Refused { why, seconds: 9 };
        let said = [Say::Prove(TOKEN), Say::Lease { seconds: 30, token: TOKEN }, Say::Ended];
        for what in said.into_iter().chain(Refusal::ALL.map(refused)) {
            let answer = Answer { what, transaction: 7 };
            let bytes = answer.encode();
            assert_eq!(Answer::read(&bytes), Some(answer));
            assert!(bytes.len() < REQUEST_BYTES);
            assert_eq!(Request::read(&bytes), None);
        }
    }

    #[test]
    fn what_is_no_request_is_none() {
        let good = request(Ask::Subscribe { seconds: 30 }, "live").encode();
        let with = |at: usize, value: u8| {
            let mut bytes = good;
            bytes[at] = value;
            bytes
        };
        assert_eq!(Request::read(&good[..63]), None, "shorter than its answers may be");
        for (what, bytes) in [
            ("magic", with(0, b'N')),
            ("kind", with(4, 3)),
            ("an answer's kind", with(4, PROVE)),
            ("a name beyond the end", with(5, NAME_MAX as u8 + 1)),
            ("a name that is no text", with(20, 0xff)),
        ] {
            assert_eq!(Request::read(&bytes), None, "{what}");
        }
    }
}
