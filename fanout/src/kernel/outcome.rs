//! What the BPF program can do with a received packet and with its copies for receivers, under the names that it uses.

use millrace_kernel::outcomes;

outcomes! {
    /// The BPF program's outcome for a received packet.
    Outcome {
        /// Sending was attempted for every receiver's copy. [`CopyOutcome`] says what happened to each.
        Forwarded = "forwarded",
        /// One run of the program made as many copies of the packet as it may. Further runs make the remaining copies.
        /// [`FurtherRun`] counts these runs.
        Continued = "continued",
        /// Sending was attempted for some receivers' copies. The others are lost, because the program may not run once
        /// more for the packet.
        OverBudget = "over_budget",
        /// Sending was attempted for some receivers' copies. The others are lost for want of memory.
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
        /// The run of the program interrupted another run on its CPU, which still uses the CPU's only memory for runs.
        /// The packet is left to userspace.
        Busy = "busy",
    }
}

outcomes! {
    /// Outcome for the copy of a packet for one receiver. A copy that was not sent is lost.
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
    /// Outcome of a further run of the program for a packet, after a run that could not copy it to all receivers.
    FurtherRun {
        /// Sending was attempted for every remaining receiver's copy.
        Last = "last",
        /// Some receivers still lack their copy, and the program runs once more for the packet.
        Continued = "continued",
        /// The remaining receivers' copies are lost, because the program may not run once more for the packet.
        Left = "left",
    }
}

/// Counts of received packets, of their copies for receivers, and of further runs of the program for a packet. Each is
/// counted by what happened to it, since the program was loaded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FanoutCounters {
    packets: [u64; Outcome::ALL.len()],
    copies: [u64; CopyOutcome::ALL.len()],
    runs: [u64; FurtherRun::ALL.len()],
}

impl FanoutCounters {
    /// Splits the counters of the program's map. Returns `None` unless the map has one counter for each variant of
    /// [`Outcome`], [`CopyOutcome`] and [`FurtherRun`].
    pub(super) fn new(raw: &[u64]) -> Option<Self> {
        let (packets, rest) = raw.split_first_chunk()?;
        let (copies, rest) = rest.split_first_chunk()?;
        Some(Self { packets: *packets, copies: *copies, runs: rest.try_into().ok()? })
    }

    /// Returns the number of received packets with this outcome.
    pub fn packets(&self, outcome: Outcome) -> u64 {
        self.packets[outcome as usize]
    }

    /// Returns the number of copies for receivers with this outcome.
    pub fn copies(&self, outcome: CopyOutcome) -> u64 {
        self.copies[outcome as usize]
    }

    /// Returns the number of further runs of the program for a packet that ended in this way.
    pub fn runs(&self, outcome: FurtherRun) -> u64 {
        self.runs[outcome as usize]
    }
}
