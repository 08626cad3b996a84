//! Outcomes of packets and their copies, under the names that the BPF program uses.

use millrace_kernel::outcomes;

outcomes! {
    /// The outcome of a packet that arrived on an interface of engine `kernel`. Every packet goes on to userspace,
    /// except those with the outcome `not_restored`.
    Outcome {
        /// A copy was tried for every subscriber; each copy has an outcome of its own.
        Forwarded = "forwarded",
        /// The packet has more subscribers than `kernel-copies-per-run`: further runs of the program make the other
        /// copies.
        Continued = "continued",
        /// The packet has too many streams, or more subscribers than all its runs may serve: userspace sends the other
        /// copies.
        OverBudget = "over_budget",
        /// The packet was rewritten for a subscriber's copy, and could not be restored for lack of memory: the kernel
        /// drops it.
        NotRestored = "not_restored",
        /// The packet is not UDP over IP.
        NotUdp = "not_udp",
        /// The packet is an IP fragment.
        Fragment = "fragment",
        /// The packet's link, IP or UDP header is malformed.
        Malformed = "malformed",
        /// The packet is not addressed to a port of the relay.
        OtherPort = "other_port",
        /// The super-packet, merged by GRO or from a local sender with GSO, could not be segmented: there was no
        /// memory, or the program at the loopback interface had been detached.
        SuperPacket = "super_packet",
        /// The super-packet was segmented. Each segment counts as a packet of its own.
        Segmented = "segmented",
        /// The packet has IPv4 options, IPv6 extension headers, or a VLAN tag in the frame. For VLANs, the setting
        /// `interface` has to name the VLAN's own interface.
        OddHeaders = "odd_headers",
        /// The packet has a long header: it belongs to a handshake.
        LongHeader = "long_header",
        /// The packet is too short for a 1-RTT packet.
        BadSize = "bad_size",
        /// The QUIC packet has more than 1536 bytes, which the relay's transport parameters forbid.
        TooLong = "too_long",
        /// The connection ID is not, or no longer, one that media is forwarded from or to.
        UnknownId = "unknown_id",
        /// The keys of the packet's generation are not installed: a key update is under way.
        NoKeys = "no_keys",
        /// The packet's authentication tag is wrong.
        NotAuthentic = "not_authentic",
        /// A packet with this number came before, or the number is too old to tell.
        Replayed = "replayed",
        /// The packet's frames are malformed: the relay's QUIC stack reports the error.
        BadFrames = "bad_frames",
        /// The packet has nothing to forward, only acknowledgements, control frames or the beginning of a stream.
        NoSlot = "no_slot",
        /// A stream's bytes are malformed, or beyond its final size: nothing in the packet is forwarded, and the relay
        /// closes the connection.
        BadStream = "bad_stream",
        /// No frame of the packet may be forwarded: the outcomes of its frames have the reasons.
        Declined = "declined",
        /// The packet came while its CPU processed another one, which only happens on kernels with PREEMPT_RT.
        Busy = "busy",
        /// The packet belongs to a connection that only subscribes, and was not decrypted.
        FromSubscriber = "from_subscriber",
    }
}

outcomes! {
    /// The outcome of a copy of a frame for one subscriber. Userspace sends the copies that the kernel did not send.
    EgressOutcome {
        /// The kernel sent the copy.
        Sent = "sent",
        /// The subscriber has just left, or has finished the stream.
        Gone = "gone",
        /// Userspace has sent the bytes already or is about to, or a datagram is outside of the range that the
        /// subscriber asked for.
        Before = "before",
        /// Userspace opens this stream, and has not delegated it to the kernel yet.
        Unopened = "unopened",
        /// The subscriber allows no more streams for now (MAX_STREAMS), or userspace was about to open some.
        StreamLimit = "stream_limit",
        /// The copy exceeds the MTU of the subscriber's path or route.
        TooLarge = "too_large",
        /// The copy exceeds the subscriber's flow control of the stream (MAX_STREAM_DATA).
        StreamCredit = "stream_credit",
        /// The copy exceeds the subscriber's flow control of the connection (MAX_DATA).
        DataCredit = "data_credit",
        /// The subscriber's congestion window is full: its path is slower than the track for now.
        Window = "window",
        /// Media of the same or a higher urgency waits in userspace, and goes first.
        Behind = "behind",
        /// The program does not have the send keys of the current generation: a key update is under way.
        NoKeys = "no_keys",
        /// The host has no route to the subscriber, or the subscriber is on this host.
        NoRoute = "no_route",
        /// The next hop's link address is not known; userspace's packet makes the kernel ask for it.
        NoNeighbour = "no_neighbour",
        /// The ring buffer for reports about sent copies is full, because the relay's process did not run for a long
        /// time.
        RingFull = "ring_full",
        /// The interface's queue was full, or the copy could not be written. It is recovered like any loss.
        Lost = "lost",
    }
}

outcomes! {
    /// The outcome of a further run for a packet with more subscribers than `kernel-copies-per-run`.
    FurtherRun {
        /// The program has tried to send every copy of the packet.
        Last = "last",
        /// A further run makes more copies of the packet.
        Continued = "continued",
        /// Userspace sends the packet's other copies: the queue for further runs is full, or the packet has had
        /// `kernel-runs` runs.
        Left = "left",
    }
}

outcomes! {
    /// The outcome of a frame of a stream that the kernel forwards. Userspace sends the frames whose outcome is not
    /// `good`.
    FrameOutcome {
        /// The frame's bytes are valid, so the kernel may forward the frame.
        Good = "good",
        /// Some bytes of the frame may have arrived in an earlier packet: the publisher retransmitted them. Or a
        /// datagram's object has arrived before, or is in an earlier group than another datagram that has arrived.
        Repeated = "repeated",
        /// Earlier bytes of the stream were lost, or came in a packet that the kernel did not decrypt. The kernel
        /// continues once userspace has them.
        Ahead = "ahead",
        /// Another CPU, or userspace, worked on the same stream at that moment, and held its lock.
        Busy = "busy",
        /// The frame has more small objects than the program parses in one frame.
        Long = "long",
        /// The frame has malformed objects, or bytes beyond the stream's final size.
        Malformed = "malformed",
    }
}

outcomes! {
    /// The outcome for a stream that a publisher has begun. Unless the outcome is `bound`, userspace opens the
    /// subscribers' streams.
    OpeningOutcome {
        /// The kernel opens the subscribers' streams. It opens each by sending the first copy on it.
        Bound = "bound",
        /// The stream does not begin with a whole SUBGROUP_HEADER in its shortest form: userspace begins the stream,
        /// and the kernel continues after the header.
        Other = "other",
        /// Only the preamble of a WebTransport stream has arrived. The stream is counted again when its MOQT bytes
        /// arrive.
        Preamble = "preamble",
        /// The kernel opens no streams for this track: the track has no subscribers, has just begun, is taken from
        /// another publisher, or exceeds the setting `kernel-tracks`.
        NoTrack = "no_track",
        /// The stream's group or subgroup is earlier than one that has begun.
        Order = "order",
        /// A track's streams began faster than userspace prepared entries for them in the kernel. Userspace then
        /// prepares more, as far as `kernel-streams` allows.
        Missed = "missed",
        /// Userspace had the stream already, or a later part of the stream arrived first.
        Taken = "taken",
        /// Another CPU, or userspace, worked on the same track at that moment, and held its lock.
        Busy = "busy",
        /// All streams that the setting `kernel-streams` allows are in use.
        Full = "full",
    }
}

outcomes! {
    /// The result of the look-up of a packet's precomputed keystream. Unless it was found, the program computes the
    /// keystream itself.
    Lookup {
        /// A precomputed keystream was found and used.
        Hit = "hit",
        /// The keystream entry belongs to another packet, is too short, or is just being replaced.
        Stale = "stale",
        /// The connection has no keystream entries, or the packet's entry is still empty.
        Miss = "miss",
    }
}

/// Counts of each outcome since the program was loaded, as sums over all CPUs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RelayCounters {
    pub(super) packets: [u64; Outcome::ALL.len()],
    pub(super) egresses: [u64; EgressOutcome::ALL.len()],
    pub(super) further_runs: [u64; FurtherRun::ALL.len()],
    pub(super) frames: [u64; FrameOutcome::ALL.len()],
    pub(super) openings: [u64; OpeningOutcome::ALL.len()],
}

impl RelayCounters {
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

    /// Returns the number of received packets with this outcome.
    pub fn packets(&self, outcome: Outcome) -> u64 {
        self.packets[outcome as usize]
    }

    /// Returns the number of copies with this outcome.
    pub fn egresses(&self, outcome: EgressOutcome) -> u64 {
        self.egresses[outcome as usize]
    }

    /// Returns how often a further run for a packet had this outcome. A packet's first run is not counted.
    pub fn further_runs(&self, outcome: FurtherRun) -> u64 {
        self.further_runs[outcome as usize]
    }

    /// Returns the number of frames with this outcome. Only frames of streams that the kernel forwards are counted.
    pub fn frames(&self, outcome: FrameOutcome) -> u64 {
        self.frames[outcome as usize]
    }

    /// Returns the number of publishers' new streams with this outcome. Only streams for which userspace had not set up
    /// forwarding are counted.
    pub fn openings(&self, outcome: OpeningOutcome) -> u64 {
        self.openings[outcome as usize]
    }

    /// Returns how much each outcome's count has grown since `earlier`.
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
