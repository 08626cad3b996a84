//! Messages: a length of 32 bits, big-endian, and so many bytes of JSON.
//!
//! All that a peer can make long is bounded here, so that whoever holds a [`Statement`] holds something small. Unknown members
//! are passed over: what later versions add is not refused by this one.

use std::{fmt, net::SocketAddr};

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// Of TLS: another form of messages is another name.
pub const ALPN: &[u8] = b"graft/1";
/// What is agreed on has a version of its own: the TCP option's.
pub const VERSIONS: [u32; 1] = [1];
/// Of a message, without its length.
pub const MESSAGE_MAX: usize = 256 << 10;
/// Of a graft's object file, which follows its [`Message::Object`].
pub const OBJECT_MAX: usize = 4 << 20;

const FUNCTIONS_MAX: usize = 256;
const RULES_MAX: usize = 64;
/// Connections that are told of: the newest.
pub const CONNECTIONS_MAX: usize = 64;
const NAME_MAX: usize = 64;
const SERVICES_MAX: usize = 16;
const DETAIL_MAX: usize = 256;
const MANIFEST_MAX: usize = 64 << 10;

/// Why bytes are no message. It ends the connection.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum Malformed {
    #[error("a message of {0} bytes; there is room for {MESSAGE_MAX}")]
    TooLong(usize),
    #[error("no message: {0}")]
    Json(String),
    #[error("{0}")]
    Bound(&'static str),
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "say", rename_all = "kebab-case")]
pub enum Message {
    /// Of who has called; again whenever what it says has changed, and once in a while.
    Offer(Box<Statement>),
    /// The answer to it.
    Accept(Box<Statement>),
    /// The caller's, to an [`Accept`](Self::Accept). From now on both are bound.
    Confirm,
    /// Instead of any of these.
    Refuse(Refusal),
    /// Asks for a graft.
    Fetch { identity: Hash },
    /// The answer: so many bytes follow, as they are.
    Object { manifest: String, bytes: u32 },
}

/// All that one end says of itself and of the other.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Statement {
    /// Of agreements.
    pub versions: Vec<u32>,
    /// Another one after each start: agreements end with it.
    pub epoch: u64,
    /// How long what it says holds without being said again, in seconds.
    pub hold_s: u32,
    pub host: Host,
    /// Of this connection, as its speaker's sockets have it.
    pub local: SocketAddr,
    pub remote: SocketAddr,
    /// What it has.
    pub functions: Vec<Function>,
    /// Those that hold for the other.
    pub rules: Vec<Rule>,
    /// Of late, with the other.
    pub connections: Vec<Connection>,
    /// What it knows of the path to the other.
    #[serde(default)]
    pub path: Verdict,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Host {
    /// Of Millrace.
    pub program: String,
    /// As `uname -r` says.
    pub kernel: String,
    /// Of grafts.
    pub abi: u32,
    pub cpus: u32,
    pub memory_mib: u64,
}

/// A graft.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Function {
    pub name: String,
    pub identity: Hash,
    pub abi: u32,
    pub services: Vec<String>,
    /// Whether the other may have it.
    #[serde(default)]
    pub given: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Side {
    Client,
    Server,
}

/// Connections between the two, and what the speaker's side of them uses.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rule {
    pub side: Side,
    pub first_port: u16,
    pub last_port: u16,
    /// A graft of the speaker's; else its kernel's own.
    pub graft: Option<Hash>,
    /// What the other's side is to use.
    #[serde(default)]
    pub wants: Option<Hash>,
}

/// A connection as one end saw its beginning. Both know it by the numbers of the first bytes of data, client's and server's: they
/// are random, and who translates addresses leaves them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Connection {
    pub sequence: [u32; 2],
    pub side: Side,
    /// The server's.
    pub port: u16,
    pub outcome: Outcome,
    /// Of a client: it has offered. Of a server: it would have answered.
    pub spoke: bool,
    /// First bytes of its own graft's identity.
    pub own: u32,
    /// What it heard of the other's, if they have agreed.
    pub heard: u32,
}

/// What became of the TCP option.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Outcome {
    Agreed,
    /// Nothing was heard of the other.
    Silent,
    /// Only a SYN without the option came through.
    Resent,
    Refused,
    Malformed,
    /// It was not asked.
    NotAsked,
}

/// What a path lets through, as far as it is known.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Verdict {
    /// TCP options of ours.
    pub options: Option<bool>,
    pub udp: Option<bool>,
    /// IP protocol 253.
    pub protocol_253: Option<bool>,
    /// Bytes of the largest IP packet that came to the other whole.
    pub mtu: Option<u16>,
    /// Who is behind a translation of addresses.
    pub nat: Option<Nat>,
}

/// As the one sees it who says so.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Nat {
    None,
    Ours,
    Theirs,
    Both,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refusal {
    pub reason: Reason,
    /// In words, for the other's operator.
    pub detail: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Reason {
    /// No version in common.
    Version,
    /// Grafts of another ABI.
    Abi,
    /// A function that the one wants the other does not have.
    UnknownFunction,
    /// An older kernel than is wanted.
    Kernel,
    /// Less CPU or memory than is wanted.
    Resources,
    /// No rules that meet.
    NoRule,
    /// Both are behind a translation of addresses.
    Nat,
    /// The key is known, and not for this.
    NotAllowed,
    /// Too many at once.
    Busy,
    /// It has nothing to give, or does not give it.
    NotGiven,
}

impl Refusal {
    pub fn new(reason: Reason, detail: impl Into<String>) -> Self {
        let mut detail = detail.into();
        let end = (0..=DETAIL_MAX).rev().find(|at| detail.is_char_boundary(*at)).unwrap_or(0);
        detail.truncate(end);
        Self { reason, detail }
    }
}

impl Message {
    /// Without its length.
    ///
    /// # Errors
    /// It is longer than a reader takes.
    pub fn encode(&self) -> Result<Vec<u8>, Malformed> {
        let bytes = serde_json::to_vec(self).map_err(|error| Malformed::Json(error.to_string()))?;
        if bytes.len() > MESSAGE_MAX { Err(Malformed::TooLong(bytes.len())) } else { Ok(bytes) }
    }

    /// # Errors
    /// It is none, or says more than there is room for.
    pub fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        if bytes.len() > MESSAGE_MAX {
            return Err(Malformed::TooLong(bytes.len()));
        }
        let message: Self =
            serde_json::from_slice(bytes).map_err(|error| Malformed::Json(error.to_string()))?;
        message.check()?;
        Ok(message)
    }

    fn check(&self) -> Result<(), Malformed> {
        match self {
            Self::Offer(statement) | Self::Accept(statement) => statement.check(),
            Self::Refuse(refusal) => bound(refusal.detail.len() <= DETAIL_MAX, "a detail is too long"),
            Self::Object { manifest, bytes } => {
                bound(manifest.len() <= MANIFEST_MAX, "a manifest is too long")?;
                bound(*bytes as usize <= OBJECT_MAX, "an object is too long")
            }
            Self::Confirm | Self::Fetch { .. } => Ok(()),
        }
    }

    /// For errors: what it is.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Offer(_) => "offer",
            Self::Accept(_) => "accept",
            Self::Confirm => "confirm",
            Self::Refuse(_) => "refuse",
            Self::Fetch { .. } => "fetch",
            Self::Object { .. } => "object",
        }
    }
}

impl Statement {
    fn check(&self) -> Result<(), Malformed> {
        bound(self.versions.len() <= 16, "too many versions")?;
        bound(self.functions.len() <= FUNCTIONS_MAX, "too many functions")?;
        bound(self.rules.len() <= RULES_MAX, "too many rules")?;
        bound(self.connections.len() <= CONNECTIONS_MAX, "too many connections")?;
        let texts = [&self.host.program, &self.host.kernel];
        let names = self.functions.iter().flat_map(|it| it.services.iter().chain([&it.name]));
        bound(texts.into_iter().chain(names).all(|text| text.len() <= NAME_MAX), "a name is too long")?;
        bound(self.functions.iter().all(|it| it.services.len() <= SERVICES_MAX), "too many services")?;
        bound(self.rules.iter().all(|it| it.first_port <= it.last_port), "a range of ports is empty")
    }
}

fn bound(holds: bool, what: &'static str) -> Result<(), Malformed> {
    if holds { Ok(()) } else { Err(Malformed::Bound(what)) }
}

/// A SHA-256, in hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Hash(pub [u8; 32]);

impl fmt::Display for Hash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Hash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Serialize for Hash {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Hash {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let text = String::deserialize(from)?;
        digits(&text).map(Self).ok_or_else(|| de::Error::custom("a SHA-256 is 64 hexadecimal digits"))
    }
}

fn digits(text: &str) -> Option<[u8; 32]> {
    let text = text.as_bytes();
    if text.len() != 64 {
        return None;
    }
    let mut bytes = [0; 32];
    for (byte, pair) in bytes.iter_mut().zip(text.chunks_exact(2)) {
        let digit = |at: usize| pair.get(at).and_then(|digit| char::from(*digit).to_digit(16));
        *byte = u8::try_from(digit(0)? << 4 | digit(1)?).ok()?;
    }
    Some(bytes)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn statement() -> Statement {
        let rule = Rule { side: Side::Client, first_port: 80, last_port: 90, graft: None, wants: None };
        Statement {
            versions: VERSIONS.to_vec(),
            epoch: 7,
            hold_s: 30,
            host: Host {
                program: "0.1.0".into(),
                kernel: "6.18.5".into(),
                abi: 1,
                cpus: 2,
                memory_mib: 4096,
            },
            local: "10.0.0.1:4000".parse().unwrap(),
            remote: "10.0.0.2:9187".parse().unwrap(),
            functions: vec![Function {
                name: "hybla".into(),
                identity: Hash([3; 32]),
                abi: 1,
                services: vec!["congestion-control".into()],
                given: false,
            }],
            rules: vec![rule],
            connections: Vec::new(),
            path: Verdict::default(),
        }
    }

    #[test]
    fn what_is_written_is_read() {
        let messages = [
            Message::Offer(Box::new(statement())),
            Message::Accept(Box::new(statement())),
            Message::Confirm,
            Message::Refuse(Refusal::new(Reason::UnknownFunction, "hybla")),
            Message::Fetch { identity: Hash([255; 32]) },
            Message::Object { manifest: "abi = 1".into(), bytes: 9 },
        ];
        for message in messages {
            assert_eq!(Message::decode(&message.encode().unwrap()).as_ref(), Ok(&message));
        }
    }

    #[test]
    fn what_is_too_much_is_refused() {
        type Change = fn(&mut Statement);
        let many = |change: Change| {
            let mut statement = statement();
            change(&mut statement);
            let bytes = serde_json::to_vec(&Message::Offer(Box::new(statement))).unwrap();
            Message::decode(&bytes).expect_err("refused").to_string()
        };
        let table: [(Change, &str); 6] = [
            (|it| it.versions = vec![1; 17], "versions"),
            (|it| it.functions = vec![it.functions[0].clone(); 257], "functions"),
            (|it| it.functions[0].name = "a".repeat(65), "a name"),
            (|it| it.functions[0].services = vec!["a".into(); 17], "services"),
            (|it| it.rules = vec![it.rules[0].clone(); 65], "rules"),
            (|it| it.rules[0].last_port = 1, "ports"),
        ];
        for (change, wanted) in table {
            let error = many(change);
            assert!(error.contains(wanted), "{error}");
        }
        let long = vec![b' '; MESSAGE_MAX + 1];
        assert_eq!(Message::decode(&long), Err(Malformed::TooLong(MESSAGE_MAX + 1)));
        for text in ["", "{", "{\"say\":\"hello\"}", "{\"say\":\"fetch\",\"identity\":\"é\"}", "[]"] {
            assert!(matches!(Message::decode(text.as_bytes()), Err(Malformed::Json(_))), "{text}");
        }
    }

    #[test]
    fn details_are_cut_at_a_character() {
        let refusal = Refusal::new(Reason::Nat, "é".repeat(200));
        assert!(refusal.detail.len() <= DETAIL_MAX && refusal.detail.len() > DETAIL_MAX - 2);
        assert!(Message::decode(&Message::Refuse(refusal).encode().unwrap()).is_ok());
        assert_eq!(Refusal::new(Reason::Nat, "short").detail, "short");
    }
}
