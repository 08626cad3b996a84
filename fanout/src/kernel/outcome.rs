//! What became of packets and their copies, by the program's names.

use millrace_kernel::outcomes;

outcomes! {
    /// What became of a received packet.
    Outcome {
        /// Every copy was tried, each with a [`LegOutcome`] of its own.
        Forwarded = "forwarded",
        /// So many copies as one run makes were. Each [`FurtherRun`] goes on.
        Continued = "continued",
        /// Some copies were tried, the others are lost: it gets no further run.
        OverBudget = "over_budget",
        /// The same, for want of memory.
        NotRestored = "not_restored",
        /// Of the sender, but not the one that is forwarded: dropped.
        OtherSsrc = "other_ssrc",
        /// Of the sender, but neither RTP nor RTCP: dropped.
        NotRtp = "not_rtp",
        NotUdp = "not_udp",
        Fragment = "fragment",
        /// Bad link, IP or UDP header.
        Malformed = "malformed",
        /// To no stream.
        Other = "other",
        /// To a stream, from somebody else: left to userspace.
        NotSender = "not_sender",
        /// Merged by GRO, or from a local sender with GSO: left to userspace.
        SuperPacket = "super_packet",
        /// IPv4 options, IPv6 extension headers, stacked VLAN tags: left to userspace.
        OddHeaders = "odd_headers",
        /// A run was interrupted by this one, which had nothing to work with: left to userspace.
        Busy = "busy",
    }
}

outcomes! {
    /// What became of a copy. What was not sent is lost, as with RTP on any network.
    LegOutcome {
        Sent = "sent",
        /// The lease had ended.
        Ended = "ended",
        /// Beyond the receiver's cap.
        Rate = "rate",
        /// For the route's MTU.
        TooLarge = "too_large",
        /// Or the receiver is on this host.
        NoRoute = "no_route",
        /// The next hop's link address is not known.
        NoNeighbour = "no_neighbour",
        /// The receiver was just taken away.
        Changed = "changed",
        /// It could not be written or queued.
        Lost = "lost",
    }
}

outcomes! {
    /// What became of a packet in a run after its first.
    FurtherRun {
        Last = "last",
        Continued = "continued",
        /// The other copies are lost.
        Left = "left",
    }
}

/// Packets, since the program was loaded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Counters {
    packets: [u64; Outcome::ALL.len()],
    copies: [u64; LegOutcome::ALL.len()],
    runs: [u64; FurtherRun::ALL.len()],
}

impl Counters {
    /// `None`: not one counter for each outcome.
    pub(super) fn new(raw: &[u64]) -> Option<Self> {
        let (packets, rest) = raw.split_first_chunk()?;
        let (copies, rest) = rest.split_first_chunk()?;
        Some(Self { packets: *packets, copies: *copies, runs: rest.try_into().ok()? })
    }

    pub fn packets(&self, outcome: Outcome) -> u64 {
        self.packets[outcome as usize]
    }

    pub fn copies(&self, outcome: LegOutcome) -> u64 {
        self.copies[outcome as usize]
    }

    pub fn runs(&self, outcome: FurtherRun) -> u64 {
        self.runs[outcome as usize]
    }
}
