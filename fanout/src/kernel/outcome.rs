//! Outcomes of packets and their copies, under the names that they have in the BPF program.

use millrace_kernel::outcomes;

outcomes! {
    /// The outcome of a received packet.
    Outcome {
        /// Sending was attempted for every copy, each with a [`CopyOutcome`] of its own.
        Forwarded = "forwarded",
        /// One run made as many copies as it may. The packet's next runs are counted by [`FurtherRun`].
        Continued = "continued",
        /// Sending was attempted for some copies. The others are lost, because the packet gets no further run.
        OverBudget = "over_budget",
        /// Sending was attempted for some copies. The others are lost for want of memory.
        NotRestored = "not_restored",
        /// The packet is from the sender but not of the SSRC that is forwarded: dropped.
        OtherSsrc = "other_ssrc",
        /// The packet is from the sender but neither RTP nor RTCP: dropped.
        NotRtp = "not_rtp",
        /// The packet is not UDP over IP.
        NotUdp = "not_udp",
        /// The packet is an IP fragment.
        Fragment = "fragment",
        /// A link, IP or UDP header is malformed.
        Malformed = "malformed",
        /// The packet is not addressed to a stream.
        Other = "other",
        /// The packet is addressed to a stream but not from its sender: left to userspace.
        NotSender = "not_sender",
        /// The packet was merged by GRO, or sent with GSO by a local process: left to userspace.
        SuperPacket = "super_packet",
        /// The packet has IPv4 options, IPv6 extension headers or stacked VLAN tags: left to userspace.
        OddHeaders = "odd_headers",
        /// The run of the program interrupted another run on its CPU and has no work area, so the packet is left to
        /// userspace.
        Busy = "busy",
    }
}

outcomes! {
    /// The outcome of a copy. A copy that was not sent is lost, as RTP packets may be on any network.
    CopyOutcome {
        /// The copy was sent.
        Sent = "sent",
        /// The receiver's lease had ended.
        Ended = "ended",
        /// The copy exceeds the receiver's rate limit.
        Rate = "rate",
        /// The copy is larger than the route's MTU.
        TooLarge = "too_large",
        /// There is no route, or the receiver is on this host.
        NoRoute = "no_route",
        /// The next hop's link address is not known.
        NoNeighbour = "no_neighbour",
        /// Userspace has just removed the receiver.
        Changed = "changed",
        /// The copy could not be written or queued.
        Lost = "lost",
    }
}

outcomes! {
    /// The outcome of a further run of the program for a packet, after a run that could not make all copies.
    FurtherRun {
        /// Sending was attempted for every remaining copy.
        Last = "last",
        /// Copies remain, and the packet gets one more run.
        Continued = "continued",
        /// The remaining copies are lost, because the packet gets no further run.
        Left = "left",
    }
}

/// Counts of packets, copies and further runs by outcome, since the program was loaded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FanoutCounters {
    packets: [u64; Outcome::ALL.len()],
    copies: [u64; CopyOutcome::ALL.len()],
    runs: [u64; FurtherRun::ALL.len()],
}

impl FanoutCounters {
    /// Splits the counters of the program's map. Returns `None` unless there is one counter for each outcome.
    pub(super) fn new(raw: &[u64]) -> Option<Self> {
        let (packets, rest) = raw.split_first_chunk()?;
        let (copies, rest) = rest.split_first_chunk()?;
        Some(Self { packets: *packets, copies: *copies, runs: rest.try_into().ok()? })
    }

    /// Returns the number of received packets with this outcome.
    pub fn packets(&self, outcome: Outcome) -> u64 {
        self.packets[outcome as usize]
    }

    /// Returns the number of copies with this outcome.
    pub fn copies(&self, outcome: CopyOutcome) -> u64 {
        self.copies[outcome as usize]
    }

    /// Returns the number of further runs with this outcome.
    pub fn runs(&self, outcome: FurtherRun) -> u64 {
        self.runs[outcome as usize]
    }
}
