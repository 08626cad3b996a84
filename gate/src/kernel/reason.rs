//! Why a packet was refused or passed, by the program's names.

use millrace_kernel::outcomes;

outcomes! {
    /// What can be objected to a packet, in the order in which it is looked at.
    #[derive(PartialOrd, Ord)]
    Rule {
        /// IP fragments.
        Fragment = "fragment",
        /// IP and UDP lengths that contradict each other; more headers than are followed.
        Headers = "headers",
        /// IPv4 options, IPv6 extension headers.
        Options = "options",
        /// The list says so.
        Block = "block",
        /// Too short for any QUIC packet.
        Short = "short",
        /// A long header that no client sends.
        Malformed = "malformed",
        /// Not one that the server speaks.
        Version = "version",
        /// An Initial in a datagram under 1200 bytes.
        InitialSize = "initial_size",
        /// Packets of live connections, per client or published ID.
        LivePackets = "live_packets",
        /// Bytes of live connections, per client or published ID.
        LiveBytes = "live_bytes",
        /// From port 0, or from one that reflectors answer from.
        SourcePort = "source_port",
        /// A short header or a Handshake packet whose ID was not published.
        UnknownId = "unknown_id",
        /// A new connection of a client that has as many as it may; or a handshake of one that it has opened meanwhile.
        Quota = "quota",
        /// The same of a wider network that the client is in.
        NetworkQuota = "network_quota",
        /// A new connection without a token, under load; or a packet of one that nobody has opened.
        Retry = "retry",
        /// New connections of all unknown clients together.
        UnknownInitials = "unknown_initials",
        /// Packets of all unknown clients together.
        UnknownPackets = "unknown_packets",
        /// Bytes of all unknown clients together.
        UnknownBytes = "unknown_bytes",
        /// New connections of one client.
        ClientInitials = "client_initials",
        /// Packets of one client, without those of live connections.
        ClientPackets = "client_packets",
        /// Bytes of one client, without those of live connections.
        ClientBytes = "client_bytes",
        /// New connections of a wider network that the client is in.
        NetworkInitials = "network_initials",
        /// Packets of a wider network, without those of live connections.
        NetworkPackets = "network_packets",
        /// Bytes of a wider network, without those of live connections.
        NetworkBytes = "network_bytes",
    }
}

impl Rule {
    /// Returns the rule on one client that this one is the same as for a wider network. It has that rule's mode and a multiple of its numbers.
    pub fn of_client(self) -> Option<Self> {
        match self {
            Self::NetworkQuota => Some(Self::Quota),
            Self::NetworkInitials => Some(Self::ClientInitials),
            Self::NetworkPackets => Some(Self::ClientPackets),
            Self::NetworkBytes => Some(Self::ClientBytes),
            _ => None,
        }
    }
}

outcomes! {
    /// Why a packet passed.
    Pass {
        /// UDP, but in no scope; counted for scope "interface".
        Other = "other",
        /// It carries a live connection's ID.
        Live = "live",
        /// It comes from a live connection's address and port, with another ID.
        LivePath = "live_path",
        /// It carries the ID with which the server answered, from where that went.
        Handshake = "handshake",
        /// The list says so.
        Allowed = "allowed",
        /// A new connection with a valid token.
        Proved = "proved",
        /// A new connection.
        New = "new",
        /// None of all that, and no rule objects.
        Unknown = "unknown",
        /// Not UDP over IP; counted for scope "interface".
        NotUdp = "not_udp",
    }
}

outcomes! {
    /// What else happened.
    Event {
        ConnectionTracked = "connection_tracked",
        ConnectionExpired = "connection_expired",
        /// A client proved itself, but there was no room to remember it, or no more for this client. Its packets pass, but
        /// are not counted.
        ConnectionsFull = "connections_full",
        /// Of this gate's form, but forged, too old, or of another address.
        TokenInvalid = "token_invalid",
        /// Retry or Version Negotiation was sent.
        Answered = "answered",
        /// Dropped in place of an answer that could not be made.
        NotAnswered = "not_answered",
        /// Samples that nobody read in time.
        SamplesLost = "samples_lost",
        /// Passed unjudged: it came in the middle of another run, on a kernel with PREEMPT_RT.
        Busy = "busy",
        /// A client's rates began with room for two packets, since more clients had come than the table remembers for as long as rates
        /// take to fill.
        RatesCrowded = "rates_crowded",
    }
}

outcomes! {
    /// What a QUIC packet is, by its header.
    Kind {
        Short = "short",
        Initial = "initial",
        ZeroRtt = "zero_rtt",
        Handshake = "handshake",
        /// Of a version of which only the form is known (RFC 8999).
        OtherVersion = "other_version",
        /// A long header that no client sends.
        Impossible = "impossible",
    }
}

impl Kind {
    /// By the program's `enum quic_kind`; `None`: it was not read, or is too short to say.
    pub(super) fn new(raw: u8) -> Option<Self> {
        Self::ALL.get(usize::from(raw).checked_sub(1)?).copied()
    }
}

/// The verdict on a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Reason {
    Refused(Rule),
    Passed(Pass),
}

impl Reason {
    pub(super) fn new(raw: u8) -> Option<Self> {
        let raw = usize::from(raw);
        let passed = || Pass::ALL.get(raw - Rule::ALL.len()).copied().map(Self::Passed);
        Rule::ALL.get(raw).copied().map(Self::Refused).or_else(passed)
    }

    /// For logs and metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Refused(rule) => rule.name(),
            Self::Passed(pass) => pass.name(),
        }
    }
}
