//! The reasons why packets are refused or pass, with the same names as in the BPF program.

use millrace_kernel::outcomes;

outcomes! {
    /// The rules, in the order of evaluation.
    #[derive(PartialOrd, Ord)]
    Rule {
        /// Refuses IP fragments.
        Fragment = "fragment",
        /// Refuses packets whose IP and UDP lengths contradict each other, or that have too many headers.
        Headers = "headers",
        /// Refuses packets with IPv4 options or IPv6 extension headers.
        Options = "options",
        /// Refuses packets from a source on the block list.
        Block = "block",
        /// Refuses packets that are too short for QUIC.
        Short = "short",
        /// Refuses long-header packets that no client sends, such as a Retry, or whose lengths are invalid.
        Malformed = "malformed",
        /// Refuses packets of a version that the server does not support.
        Version = "version",
        /// Refuses an Initial in a datagram under 1200 bytes.
        InitialSize = "initial_size",
        /// Limits packets of live connections, per client or per connection ID that the server has registered.
        LivePackets = "live_packets",
        /// Limits bytes of live connections, per client or per connection ID that the server has registered.
        LiveBytes = "live_bytes",
        /// Refuses packets from source port 0, or from a port that reflectors answer from.
        SourcePort = "source_port",
        /// Refuses a short header or a Handshake packet whose ID was not published.
        UnknownId = "unknown_id",
        /// Refuses a new connection of a client that is at its quota. Also refuses a handshake of a client that reached
        /// its quota after the handshake began.
        Quota = "quota",
        /// Refuses a new connection or a handshake, as `quota` does, from a network (a shorter prefix than a client's)
        /// that is at its quota.
        NetworkQuota = "network_quota",
        /// Refuses, under load, a new connection without a valid Retry token, and other packets of an unknown
        /// connection.
        Retry = "retry",
        /// Limits new connections of all unknown clients together.
        UnknownInitials = "unknown_initials",
        /// Limits packets of all unknown clients together.
        UnknownPackets = "unknown_packets",
        /// Limits bytes of all unknown clients together.
        UnknownBytes = "unknown_bytes",
        /// Limits new connections of one client.
        ClientInitials = "client_initials",
        /// Limits packets of one client, without those of live connections.
        ClientPackets = "client_packets",
        /// Limits bytes of one client, without those of live connections.
        ClientBytes = "client_bytes",
        /// Limits new connections from a network (a shorter prefix than a client's).
        NetworkInitials = "network_initials",
        /// Limits packets from a network (a shorter prefix than a client's), without those of live connections.
        NetworkPackets = "network_packets",
        /// Limits bytes from a network (a shorter prefix than a client's), without those of live connections.
        NetworkBytes = "network_bytes",
    }
}

impl Rule {
    /// Returns the rule on one client that corresponds to this rule on wider networks. The rule on networks has the
    /// same mode, and its limits are multiples of the limits of one client.
    pub fn client_reason(self) -> Option<Self> {
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
    /// The reasons why packets pass.
    Pass {
        /// The packet is UDP, and its destination is in no scope; counted for scope "interface".
        Other = "other",
        /// The packet has a live connection's ID.
        Live = "live",
        /// The packet comes from a live connection's address and port, with another ID.
        LivePath = "live_path",
        /// The packet has the ID that the server chose in its handshake packet. The packet comes from the address to
        /// which the server sent that handshake packet.
        Handshake = "handshake",
        /// The packet's source is on the allow list.
        Allowed = "allowed",
        /// The packet begins a connection and has a valid Retry token.
        Proved = "proved",
        /// The packet begins a connection.
        New = "new",
        /// The packet passes because no rule refuses it, and no more specific reason to pass applies.
        Unknown = "unknown",
        /// The packet is not UDP over IP; counted for scope "interface".
        NotUdp = "not_udp",
    }
}

outcomes! {
    /// Events that the gate counts in addition to its verdicts on packets.
    Event {
        /// A connection was added to the tracked ones.
        ConnectionTracked = "connection_tracked",
        /// A tracked connection was idle for too long.
        ConnectionExpired = "connection_expired",
        /// A client validated its address, but its connection could not be tracked: the gate's map is full, or the
        /// client has too many tracked connections. The connection's packets pass, but the connection does not count
        /// towards the client's quota.
        ConnectionsFull = "connections_full",
        /// A Retry token has this gate's format, but is forged, expired, or another address's.
        TokenInvalid = "token_invalid",
        /// A refused packet was answered with Retry or Version Negotiation.
        Answered = "answered",
        /// A refused packet was dropped, because the gate could not build the Retry or Version Negotiation packet that
        /// answers it.
        NotAnswered = "not_answered",
        /// A sample of a refused packet was lost, because userspace did not read it in time.
        SamplesLost = "samples_lost",
        /// A packet passed unchecked, because the gate's program was interrupted on this CPU while it checked another
        /// packet (on kernels with PREEMPT_RT).
        Busy = "busy",
        /// A new client's token buckets began with tokens for two packets only. Within the time in which such buckets
        /// fill, more new clients came than the map of token buckets holds.
        RatesCrowded = "rates_crowded",
    }
}

outcomes! {
    /// The type of a QUIC packet, as its header gives it.
    Kind {
        /// A packet with a short header.
        Short = "short",
        /// An Initial packet.
        Initial = "initial",
        /// A 0-RTT packet.
        ZeroRtt = "zero_rtt",
        /// A Handshake packet.
        Handshake = "handshake",
        /// A packet of an unknown version. Only the invariant fields of RFC 8999 are read.
        OtherVersion = "other_version",
        /// A long-header packet that no client sends, such as a Retry, or whose lengths are invalid.
        Impossible = "impossible",
    }
}

impl Kind {
    /// Converts the BPF program's `enum quic_kind`. Returns `None` if the type was not read, or the packet is too
    /// short.
    pub(super) fn new(raw: u8) -> Option<Self> {
        Self::ALL.get(usize::from(raw).checked_sub(1)?).copied()
    }
}

/// The verdict on a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum GateReason {
    /// A rule refused the packet.
    Refused(Rule),
    /// The packet passed.
    Passed(Pass),
}

impl GateReason {
    pub(super) fn new(raw: u8) -> Option<Self> {
        let raw = usize::from(raw);
        let passed = || Pass::ALL.get(raw - Rule::ALL.len()).copied().map(Self::Passed);
        Rule::ALL.get(raw).copied().map(Self::Refused).or_else(passed)
    }

    /// Returns the name of the rule or of the reason to pass, for logs and metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Refused(rule) => rule.name(),
            Self::Passed(pass) => pass.name(),
        }
    }
}
