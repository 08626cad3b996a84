//! Messages by which two hosts agree on grafts (congestion controls that are loaded into the kernel): a length of 32
//! bits (big-endian), and that many bytes of JSON.
//!
//! Every list and text that a peer can make long is bounded here, so a [`Statement`] is small. Unknown members are
//! ignored, so that later versions can add some.

use std::{fmt, net::SocketAddr};

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// ALPN name of this protocol. A version with another encoding gets another name.
pub const ALPN: &[u8] = b"graft/1";
/// Versions of the agreement protocol that this program supports. The TCP option has the same version numbers.
pub const VERSIONS: [u32; 1] = [1];
/// Most bytes of a message, without its length field.
pub const MESSAGE_MAX: usize = 256 << 10;
/// Maximum size in bytes of the object file of a congestion control (graft), which follows an
/// [`AgreementMessage::Object`].
pub const OBJECT_MAX: usize = 4 << 20;

const FUNCTIONS_MAX: usize = 256;
const RULES_MAX: usize = 64;
/// Most connections that a statement reports, which are the newest ones.
pub const CONNECTIONS_MAX: usize = 64;
const NAME_MAX: usize = 64;
const SERVICES_MAX: usize = 16;
const DETAIL_MAX: usize = 256;
const MANIFEST_MAX: usize = 64 << 10;

/// Why received bytes are not a valid message. The receiver then closes the connection.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[allow(missing_docs, reason = "the messages describe the variants")]
pub enum MalformedMessage {
    #[error("the message has {0} bytes, and {MESSAGE_MAX} is the limit")]
    TooLong(usize),
    #[error("not a message of a graft daemon: {0}")]
    Json(String),
    #[error("{0}")]
    Bound(&'static str),
}

/// A message between the daemons of two hosts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "say", rename_all = "kebab-case")]
pub enum AgreementMessage {
    /// Offers an agreement. The host that opened the connection sends this. It repeats the offer when its statement
    /// changes, and from time to time.
    Offer(Box<Statement>),
    /// Accepts an offer. The message contains the statement of the accepting host.
    Accept(Box<Statement>),
    /// Confirms an [`Accept`](Self::Accept). The host that opened the connection sends this. From now on both hosts
    /// have to keep to the agreement.
    Confirm,
    /// Refuses an agreement. A host may send this instead of an `Offer`, `Accept` or `Confirm`.
    Refuse(AgreementRefusal),
    /// Requests the object file of a congestion control (graft).
    Fetch {
        /// SHA-256 of the graft's object file.
        identity: Hash,
    },
    /// Answers a [`Fetch`](Self::Fetch). The object file follows as raw bytes behind this message.
    Object {
        /// The graft's manifest in TOML.
        manifest: String,
        /// Length of the object file in bytes.
        bytes: u32,
    },
}

/// A host's description of itself, its rules, and its view of the path to the peer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Statement {
    /// Versions of the agreement protocol that the sender supports.
    pub versions: Vec<u32>,
    /// Random number that the sending daemon chooses when it starts. If it changes, the daemon has restarted, and
    /// earlier agreements with it end.
    pub epoch: u64,
    /// Seconds for which the statement is valid if it is not repeated.
    pub hold_s: u32,
    /// Properties of the sending host.
    pub host: HostOffer,
    /// Local address of this connection at the sender's socket.
    pub local: SocketAddr,
    /// Remote address of this connection at the sender's socket.
    pub remote: SocketAddr,
    /// Loadable congestion controls (grafts) that the sender has.
    pub functions: Vec<GraftOffer>,
    /// The sender's rules for connections with the receiver.
    pub rules: Vec<RuleOffer>,
    /// Recent connections with the receiver, with what the sender saw in their handshakes.
    pub connections: Vec<ConnectionReport>,
    /// The sender's measurements of the path to the receiver.
    #[serde(default)]
    pub path: PathVerdict,
}

/// Properties of a host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostOffer {
    /// Version of Millrace.
    pub program: String,
    /// Kernel release, as `uname -r` prints it.
    pub kernel: String,
    /// Version of the ABI of loadable congestion controls (grafts) that the host supports.
    pub abi: u32,
    /// Number of online CPUs.
    pub cpus: u32,
    /// Memory in MiB.
    pub memory_mib: u64,
}

/// A loadable congestion control (graft) that the sender has.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GraftOffer {
    /// Name of the graft at the sender.
    pub name: String,
    /// SHA-256 of the graft's object file.
    pub identity: Hash,
    /// Version of the ABI of loadable congestion controls that the object file was built for.
    pub abi: u32,
    /// Services that the graft provides, by name.
    pub services: Vec<String>,
    /// True if the peer may fetch the graft's object file.
    #[serde(default)]
    pub given: bool,
}

/// Whether a host is client or server of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum OfferSide {
    /// The host that opens the connection.
    Client,
    /// The host that accepts the connection.
    Server,
}

/// A rule for connections between the two hosts, and the congestion control (graft) that the sender uses for them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RuleOffer {
    /// Whether the sender is client or server of the connections.
    pub side: OfferSide,
    /// First server port of the rule.
    pub first_port: u16,
    /// Last server port of the rule (inclusive).
    pub last_port: u16,
    /// SHA-256 of the object file of the graft that the sender uses; `None`: a congestion control of the sender's
    /// kernel.
    pub graft: Option<Hash>,
    /// SHA-256 of the object file of the graft that the receiver has to use; `None`: any.
    pub wants: Option<Hash>,
}

/// One host's view of a connection's handshake. Both hosts identify the connection by the sequence numbers of
/// its first data bytes, which are random and which address translators do not change.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConnectionReport {
    /// Sequence numbers of the first data byte of the client and of the server.
    pub sequence: [u32; 2],
    /// Whether the sender was client or server of the connection.
    pub side: OfferSide,
    /// Server port of the connection.
    pub port: u16,
    /// Whether the hosts agreed on a rule in TCP options, or the reason why not, as the sender saw it.
    pub outcome: OptionOutcome,
    /// True if the sender is a client that offered an agreement, or a server that would have answered an offer.
    pub spoke: bool,
    /// First bytes of the SHA-256 of the congestion control (graft) that the sender would use.
    pub own: u32,
    /// First bytes of the SHA-256 of the peer's congestion control (graft), which the sender received from the peer; 0
    /// without an agreement.
    pub heard: u32,
}

/// Whether the two hosts agreed on a rule in the TCP options of one connection, or the reason why not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum OptionOutcome {
    /// Both hosts agreed on a rule.
    Agreed,
    /// The peer sent neither an offer nor an answer.
    Silent,
    /// The peer answered only a SYN without the option.
    Resent,
    /// The peer uses another version of the option.
    Refused,
    /// The peer sent a malformed option.
    Malformed,
    /// This host did not offer an agreement to the peer.
    NotAsked,
}

/// Measured properties of a path. A field that is `None` is unknown.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PathVerdict {
    /// True if packets with the TCP option by which hosts agree on congestion controls pass the path.
    pub options: Option<bool>,
    /// True if UDP packets pass the path.
    pub udp: Option<bool>,
    /// Length in bytes of the longest IP packet that arrived without fragmentation.
    pub mtu: Option<u16>,
    /// The host whose address is translated (NAT).
    pub nat: Option<NatReport>,
}

/// The location of address translation (NAT) on a path, from the view of the reporting host: nowhere, at this host, at
/// the peer, or at both.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[allow(missing_docs, reason = "the type's documentation describes the values")]
pub enum NatReport {
    None,
    Ours,
    Theirs,
    Both,
}

/// A refusal of an agreement, with its reason.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AgreementRefusal {
    /// Category of the reason for the refusal.
    pub reason: RefusalReason,
    /// Details for the operator of the peer.
    pub detail: String,
}

/// Why an agreement was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RefusalReason {
    /// The two hosts support no common version of the agreement protocol.
    Version,
    /// The loadable congestion controls (grafts) of the two hosts have different ABI versions.
    Abi,
    /// A host lacks a congestion control (graft) that the peer requires.
    UnknownFunction,
    /// The peer's kernel is older than required.
    Kernel,
    /// The peer has fewer CPUs or less memory than required.
    Resources,
    /// No rule of one host matches a rule of the other.
    NoRule,
    /// Both hosts are behind address translation (NAT).
    Nat,
    /// The peer's key is known, but may not make agreements.
    NotAllowed,
    /// The host already handles as many negotiations as it may.
    Busy,
    /// The requested congestion control (graft) does not exist, or the peer may not fetch it.
    NotGiven,
}

impl AgreementRefusal {
    /// Makes a refusal. Details longer than 256 bytes are cut off.
    pub fn new(reason: RefusalReason, detail: impl Into<String>) -> Self {
        let mut detail = detail.into();
        // truncate() panics within a character, so the cut is moved to a character boundary.
        let end = (0..=DETAIL_MAX).rev().find(|at| detail.is_char_boundary(*at)).unwrap_or(0);
        detail.truncate(end);
        Self { reason, detail }
    }
}

impl AgreementMessage {
    /// Encodes a message as JSON, without the length field.
    ///
    /// # Errors
    /// The message is longer than [`MESSAGE_MAX`].
    pub fn encode(&self) -> Result<Vec<u8>, MalformedMessage> {
        let bytes = serde_json::to_vec(self).map_err(|error| MalformedMessage::Json(error.to_string()))?;
        if bytes.len() > MESSAGE_MAX { Err(MalformedMessage::TooLong(bytes.len())) } else { Ok(bytes) }
    }

    /// Decodes a message from JSON, and checks its limits.
    ///
    /// # Errors
    /// The bytes are not a valid message, or exceed a limit.
    pub fn decode(bytes: &[u8]) -> Result<Self, MalformedMessage> {
        // The length is checked before parsing, so a peer cannot make the parser use unbounded memory.
        if bytes.len() > MESSAGE_MAX {
            return Err(MalformedMessage::TooLong(bytes.len()));
        }
        let message: Self =
            serde_json::from_slice(bytes).map_err(|error| MalformedMessage::Json(error.to_string()))?;
        message.check()?;
        Ok(message)
    }

    fn check(&self) -> Result<(), MalformedMessage> {
        match self {
            Self::Offer(statement) | Self::Accept(statement) => statement.check(),
            Self::Refuse(refusal) => {
                bound(refusal.detail.len() <= DETAIL_MAX, "the detail of a refusal is too long")
            }
            Self::Object { manifest, bytes } => {
                bound(manifest.len() <= MANIFEST_MAX, "a manifest is too long")?;
                bound(*bytes as usize <= OBJECT_MAX, "an object file is too long")
            }
            Self::Confirm | Self::Fetch { .. } => Ok(()),
        }
    }

    /// Returns the kind of the message, for log lines and errors.
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
    /// Checks that no list or text of the statement is longer than its limit.
    ///
    /// # Errors
    /// The error names the limit.
    pub fn check(&self) -> Result<(), MalformedMessage> {
        bound(self.versions.len() <= 16, "too many versions")?;
        bound(self.functions.len() <= FUNCTIONS_MAX, "too many functions")?;
        bound(self.rules.len() <= RULES_MAX, "too many rules")?;
        bound(self.connections.len() <= CONNECTIONS_MAX, "too many connections")?;
        let texts = [&self.host.program, &self.host.kernel];
        let names = self.functions.iter().flat_map(|it| it.services.iter().chain([&it.name]));
        bound(texts.into_iter().chain(names).all(|text| text.len() <= NAME_MAX), "a name is too long")?;
        bound(self.functions.iter().all(|it| it.services.len() <= SERVICES_MAX), "too many services")?;
        // The comparison of rules assumes that port ranges are not empty, so empty ones are refused.
        bound(self.rules.iter().all(|it| it.first_port <= it.last_port), "a range of ports is empty")
    }
}

fn bound(holds: bool, what: &'static str) -> Result<(), MalformedMessage> {
    if holds { Ok(()) } else { Err(MalformedMessage::Bound(what)) }
}

/// A SHA-256 hash, written as hexadecimal digits.
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
        let rule =
            RuleOffer { side: OfferSide::Client, first_port: 80, last_port: 90, graft: None, wants: None };
        Statement {
            versions: VERSIONS.to_vec(),
            epoch: 7,
            hold_s: 30,
            host: HostOffer {
                program: "0.1.0".into(),
                kernel: "6.18.5".into(),
                abi: 1,
                cpus: 2,
                memory_mib: 4096,
            },
            local: "10.0.0.1:4000".parse().unwrap(),
            remote: "10.0.0.2:9187".parse().unwrap(),
            functions: vec![GraftOffer {
                name: "hybla".into(),
                identity: Hash([3; 32]),
                abi: 1,
                services: vec!["congestion-control".into()],
                given: false,
            }],
            rules: vec![rule],
            connections: Vec::new(),
            path: PathVerdict::default(),
        }
    }

    #[test]
    fn encoded_messages_are_decoded() {
        let messages = [
            AgreementMessage::Offer(Box::new(statement())),
            AgreementMessage::Accept(Box::new(statement())),
            AgreementMessage::Confirm,
            AgreementMessage::Refuse(AgreementRefusal::new(RefusalReason::UnknownFunction, "hybla")),
            AgreementMessage::Fetch { identity: Hash([255; 32]) },
            AgreementMessage::Object { manifest: "abi = 1".into(), bytes: 9 },
        ];
        for message in messages {
            assert_eq!(AgreementMessage::decode(&message.encode().unwrap()).as_ref(), Ok(&message));
        }
    }

    #[test]
    fn agreement_message_with_too_many_or_too_long_items_is_refused() {
        type Change = fn(&mut Statement);
        let many = |change: Change| {
            let mut statement = statement();
            change(&mut statement);
            let bytes = serde_json::to_vec(&AgreementMessage::Offer(Box::new(statement))).unwrap();
            AgreementMessage::decode(&bytes).expect_err("refused").to_string()
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
        assert_eq!(AgreementMessage::decode(&long), Err(MalformedMessage::TooLong(MESSAGE_MAX + 1)));
        for text in ["", "{", "{\"say\":\"hello\"}", "{\"say\":\"fetch\",\"identity\":\"é\"}", "[]"] {
            assert!(
                matches!(AgreementMessage::decode(text.as_bytes()), Err(MalformedMessage::Json(_))),
                "{text}"
            );
        }
    }

    #[test]
    fn long_refusal_detail_is_cut_at_a_character_boundary() {
        let refusal = AgreementRefusal::new(RefusalReason::Nat, "é".repeat(200));
        assert!(refusal.detail.len() <= DETAIL_MAX && refusal.detail.len() > DETAIL_MAX - 2);
        assert!(AgreementMessage::decode(&AgreementMessage::Refuse(refusal).encode().unwrap()).is_ok());
        assert_eq!(AgreementRefusal::new(RefusalReason::Nat, "short").detail, "short");
    }
}
