//! What became of packets and their copies, by the program's names.

use millrace_kernel::outcomes;

outcomes! {
    /// What became of a received packet. Only [`Self::NotRestored`] does not reach userspace.
    Outcome {
        /// Every copy was tried, each with an [`EgressOutcome`] of its own.
        Forwarded = "forwarded",
        /// The first [`Config::max_copies_per_run`](super::Config::max_copies_per_run) copies were. Each [`FurtherRun`] goes on.
        Continued = "continued",
        /// Some copies were left to userspace: there are too many streams in the packet, or it gets no further run.
        OverBudget = "over_budget",
        /// Copies were tried, but there was no memory to restore the packet: it is dropped.
        NotRestored = "not_restored",
        NotUdp = "not_udp",
        Fragment = "fragment",
        /// Bad link, IP or UDP header.
        Malformed = "malformed",
        OtherPort = "other_port",
        /// Merged by GRO, or from a local sender with GSO.
        SuperPacket = "super_packet",
        /// IPv4 options, IPv6 extension headers, stacked VLAN tags.
        OddHeaders = "odd_headers",
        /// Handshake.
        LongHeader = "long_header",
        /// Too short for a 1-RTT packet, or longer than any that is forwarded.
        BadSize = "bad_size",
        /// Of a connection that nothing is forwarded from or to.
        UnknownId = "unknown_id",
        NoKeys = "no_keys",
        NotAuthentic = "not_authentic",
        /// Or too old to tell.
        Replayed = "replayed",
        BadFrames = "bad_frames",
        /// No frame that has a slot.
        NoSlot = "no_slot",
        /// A stream's bytes are malformed, or beyond its final size: nothing in the packet is forwarded.
        BadStream = "bad_stream",
        /// There are slots, but no frame may be forwarded: [`FrameOutcome`] says why.
        Declined = "declined",
        /// A run was interrupted by this one, which had nothing to work with: on kernels with PREEMPT_RT.
        Busy = "busy",
        /// Of a connection that only subscribes: not opened.
        FromSubscriber = "from_subscriber",
    }
}

outcomes! {
    /// What became of a copy: one frame for one egress. Whatever was not sent is userspace's to send.
    EgressOutcome {
        Sent = "sent",
        /// The egress was removed, or the downstream.
        Gone = "gone",
        /// Begins before what the kernel may send; of datagrams: outside of what the subscriber wants.
        Before = "before",
        /// Its stream was not opened by the kernel, and userspace has not delegated it yet.
        Unopened = "unopened",
        /// Beyond the peer's MAX_STREAMS, or userspace was about to open streams: [`DownstreamRecord::set_streams`](super::DownstreamRecord::set_streams).
        StreamLimit = "stream_limit",
        /// For the path's or the route's MTU.
        TooLarge = "too_large",
        /// Beyond [`EgressRecord::max_offset`](super::EgressRecord::max_offset).
        StreamCredit = "stream_credit",
        /// Beyond [`DownstreamRecord::set_max_data`](super::DownstreamRecord::set_max_data).
        DataCredit = "data_credit",
        /// Beyond [`DownstreamRecord::set_max_bytes`](super::DownstreamRecord::set_max_bytes).
        Window = "window",
        /// Something as urgent waits in userspace: [`DownstreamRecord::set_waiting`](super::DownstreamRecord::set_waiting).
        Behind = "behind",
        /// The key generation in use is not installed.
        NoKeys = "no_keys",
        NoRoute = "no_route",
        /// The next hop's link address is not known; userspace's packet makes the kernel ask for it.
        NoNeighbour = "no_neighbour",
        /// Nobody drained the registrations.
        RingFull = "ring_full",
        /// Registered, but then could not be written or queued: a loss for loss recovery to find.
        Lost = "lost",
    }
}

outcomes! {
    /// What became of a packet in a run after its first.
    FurtherRun {
        /// Every copy has been tried.
        Last = "last",
        Continued = "continued",
        /// The other copies are left to userspace: the queue is full, or [`Config::max_runs`](super::Config::max_runs).
        Left = "left",
    }
}

outcomes! {
    /// What became of a frame of a stream that has a slot. Whatever is not good is userspace's.
    FrameOutcome {
        Good = "good",
        /// Some of it came before.
        Repeated = "repeated",
        /// Of what is before it, something has not come.
        Ahead = "ahead",
        /// Another CPU, or userspace, was at the same stream.
        Busy = "busy",
        /// More fields than are looked at.
        Long = "long",
        /// Or beyond the stream's final size.
        Malformed = "malformed",
    }
}

outcomes! {
    /// What became of the beginning of a stream, of an upstream with a [`TrackRecord`](super::TrackRecord). Whatever is not bound is userspace's.
    OpeningOutcome {
        /// It has one of the track's openings.
        Bound = "bound",
        /// No whole SUBGROUP_HEADER in the shortest form; or one whose subgroup is named by the first object, without that.
        Other = "other",
        /// Only the preamble of the WebTransport session has come: what follows may get one.
        Preamble = "preamble",
        NoTrack = "no_track",
        /// Not behind the subgroup that began last.
        Order = "order",
        /// No more openings were prepared yet.
        Missed = "missed",
        /// Userspace was faster, or the stream is an old one.
        Taken = "taken",
        /// Another CPU, or userspace, was at the same track.
        Busy = "busy",
        /// There was no slot left.
        Full = "full",
    }
}

outcomes! {
    /// How the look-up of a packet's precomputed keystream ended. After all but a hit the program computes it.
    Lookup {
        Hit = "hit",
        /// The entry is another packet's, too short, or just being replaced.
        Stale = "stale",
        /// There is no entry, or nothing in it yet.
        Miss = "miss",
    }
}

/// Totals since the program was loaded, all CPUs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counters {
    pub(super) packets: [u64; Outcome::ALL.len()],
    pub(super) egresses: [u64; EgressOutcome::ALL.len()],
    pub(super) further_runs: [u64; FurtherRun::ALL.len()],
    pub(super) frames: [u64; FrameOutcome::ALL.len()],
    pub(super) openings: [u64; OpeningOutcome::ALL.len()],
}

impl Counters {
    pub(super) fn new(raw: &[u64]) -> Option<Self> {
        let (packets, rest) = raw.split_first_chunk()?;
        let (egresses, rest) = rest.split_first_chunk()?;
        let (further_runs, rest) = rest.split_first_chunk()?;
        let (frames, rest) = rest.split_first_chunk()?;
        let openings = rest.try_into().ok()?;
        Some(Self {
            packets: *packets,
            egresses: *egresses,
            further_runs: *further_runs,
            frames: *frames,
            openings,
        })
    }

    /// Received packets with this outcome.
    pub fn packets(&self, outcome: Outcome) -> u64 {
        self.packets[outcome as usize]
    }

    /// Copies with this outcome.
    pub fn egresses(&self, outcome: EgressOutcome) -> u64 {
        self.egresses[outcome as usize]
    }

    /// Runs after a packet's first, with this outcome.
    pub fn further_runs(&self, outcome: FurtherRun) -> u64 {
        self.further_runs[outcome as usize]
    }

    /// Frames of streams that have a slot, with this outcome.
    pub fn frames(&self, outcome: FrameOutcome) -> u64 {
        self.frames[outcome as usize]
    }

    /// Beginnings of streams without a slot, with this outcome.
    pub fn openings(&self, outcome: OpeningOutcome) -> u64 {
        self.openings[outcome as usize]
    }

    /// What was counted since `earlier`.
    pub fn since(&self, earlier: &Self) -> Self {
        let mut difference = *self;
        difference.packets.iter_mut().zip(earlier.packets).for_each(|(now, then)| *now -= then);
        difference.egresses.iter_mut().zip(earlier.egresses).for_each(|(now, then)| *now -= then);
        difference.openings.iter_mut().zip(earlier.openings).for_each(|(now, then)| *now -= then);
        difference.frames.iter_mut().zip(earlier.frames).for_each(|(now, then)| *now -= then);
        difference.further_runs.iter_mut().zip(earlier.further_runs).for_each(|(now, then)| *now -= then);
        difference
    }
}
