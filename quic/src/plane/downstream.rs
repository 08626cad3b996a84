//! The send side of one connection's unidirectional streams and datagrams.
//!
//! [`Downstream`] tracks which bytes are still to be sent, which are in flight, and which the peer has acknowledged. It
//! does not store the bytes of streams, but reads them from [sources](super::source::Source). Bytes that are neither
//! acknowledged nor in flight are a *hole*. New data, lost data, and old data that a receiver requested are all holes,
//! and are sent in order of priority.
//!
//! The modules: `send` fills packets ([`Downstream::poll_frames`]), and `feedback` takes the peer's frames
//! ([`Downstream::on_ack`] and others). `lifecycle` has queues, deadlines and ends of streams. `offload` has the
//! interface for another sender on the same streams, and `opened` the streams that this sender opens.

mod api;
mod feedback;
mod lifecycle;
mod offload;
mod opened;
mod pieces;
mod review;
mod send;

use std::{
    collections::{BTreeSet, HashMap, VecDeque},
    time::Instant,
};

use smallvec::SmallVec;

use crate::webtransport::Binding;

use super::{
    datagrams::WaitingDatagrams,
    pacing::Pacer,
    policy::QueuePolicy,
    queues::StreamQueues,
    recovery::{self, Recovery, RecoveryOutcome},
    slots::StreamSlots,
    source::SourceEnd,
    stream::PlaneStream,
};

pub use super::{
    datagrams::{DatagramPool, NewDatagram},
    policy,
    stream::{AskedRange, NewStream},
    types::{AckRanges, Label, Priority, PriorityLevel, StreamKey},
};
pub use api::*;
pub use offload::{OffloadBudget, OffloadedPacket, StreamGrant};
pub use pieces::{FrameContent, PacketFrame};

/// The content of a packet, kept from [`Downstream::poll_frames`] until the packet is acknowledged or lost.
#[derive(Clone, Debug, Default)]
pub struct PacketContent(SmallVec<[SentFrame; 2]>);

#[derive(Clone, Copy, Debug)]
enum SentFrame {
    Bytes { key: StreamKey, offset: u64, len: u16, fin: bool, again: bool },
    Reset { key: StreamKey },
    Datagram { label: Label },
    Ping,
}

/// The reason why a stream is reset; counted in [`Resets`].
#[derive(Clone, Copy, Debug)]
enum Cause {
    Source,
    Requested,
    Stopped,
    ObjectTimeout,
    SubgroupTimeout,
    Evicted,
    Overflow,
    Late,
    Hopeless,
    QueueFull,
}

/// The owner of streams, such as a subscription.
#[derive(Default)]
struct StreamOwner {
    owned: Owned,
    newest: Option<Newest>,
    /// Time when a stream of this owner last had old data to send that the receiver had requested.
    caught_up: Option<Instant>,
}

/// The newest group among the streams of one owner.
#[derive(Clone, Copy)]
struct Newest {
    group: u64,
    /// Publisher priority and ID of the group's most urgent subgroup.
    first: (u8, u64),
}

/// The data plane of one connection. It does no I/O: time is an argument, `now`, and never goes back.
///
/// A stream is opened ([`Self::open`]), gets an ID when its first frame is written, and ends when the peer has
/// acknowledged its FIN or its reset; [`Self::poll_event`] reports when the stream gets its ID and when it ends. To
/// send, call [`Self::poll_frames`] until it returns `None`, and pass each returned packet content on to
/// [`Self::on_sent`] or [`Self::on_not_sent`]. Frames of the peer go to [`Self::on_ack`] and the other `on_...` methods
/// in the order of their arrival. [`Self::timeout`] tells when to call [`Self::on_timeout`]; any other call may change
/// that time. At any time each byte of a stream is acknowledged, in flight, or part of a hole (bytes still to be sent).
///
/// ```
/// use std::time::{Duration, Instant};
/// use bytes::Bytes;
/// use millrace_quic::plane::downstream::{
///     AckRanges, Config, Downstream, Label, NewDatagram, PeerLimits, Priority, ResetCodes,
/// };
///
/// let now = Instant::now();
/// let config = Config::new(ResetCodes { late: 1, behind: 2, gone: 3 });
/// let peer = PeerLimits { max_datagram_frame_size: 1200, ..PeerLimits::default() };
/// let mut plane = Downstream::new(config, peer, now);
/// let payload = Bytes::from_static(b"an object");
/// let (priority, label) = (Priority::default(), Label::default());
/// plane.send_datagram(NewDatagram { payload, priority, expires: None, late: None, label })?;
///
/// // The caller seals the frames, sends them as packet 0, and says so.
/// let mut frames = Vec::new();
/// let content = plane.poll_frames(now, 1150, &mut frames).ok_or("nothing may be sent")?;
/// plane.on_sent(now, 0, frames.len(), content);
///
/// let ack = AckRanges { delay: Duration::ZERO, ranges: vec![0..=0], ecn: None };
/// plane.on_ack(now + Duration::from_millis(30), &ack)?;
/// assert_eq!(plane.stats().datagrams_sent, 1);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Downstream {
    config: Config,
    peer: PeerLimits,
    recovery: Recovery<PacketContent>,
    pacer: Pacer,
    streams: StreamSlots,
    by_id: HashMap<u64, StreamKey>,
    owners: HashMap<u64, StreamOwner>,
    /// Streams that can send now. The fields `unopened`, `blocked` and `starved` hold the streams that cannot send, by
    /// reason (see `SchedulerQueue`).
    ready: StreamQueues,
    unopened: StreamQueues,
    blocked: StreamQueues,
    starved: StreamQueues,
    /// Number of streams whose RESET_STREAM has to be sent.
    resets_owed: usize,
    datagrams: WaitingDatagrams,
    /// True if the next frame of a priority level is a datagram rather than stream data. The two alternate within a
    /// level.
    datagrams_turn: bool,
    /// Times at which streams are reset: running subgroup delivery timeouts, and deadlines of streams that are dropped
    /// after their current object.
    deadlines: BTreeSet<(Instant, StreamKey)>,
    policy: Box<dyn QueuePolicy>,
    /// Time at which to check next whether unsent data is too late and has to be dropped.
    review_at: Option<Instant>,
    /// Time before which unsent data is not checked for lateness again, to limit the CPU time of the checks.
    reviewed_until: Option<Instant>,
    /// True if a subscription has begun a newer group since unsent data was last checked, so that its older groups may
    /// be dropped.
    superseded: bool,
    /// Index of the next stream to open (its ID without the two low bits).
    next_stream: u64,
    /// Bytes of connection flow control credit used, by the data plane or by the offload (another sender on this
    /// connection).
    data_sent: u64,
    /// Bytes of congestion window and flow control credit that the offload (another sender on this connection) may have
    /// used for packets not reported yet.
    outstanding: OffloadBudget,
    /// Streams on which the offload, another sender on this connection, has to stop sending.
    recalls: Vec<StreamKey>,
    /// True if sending last stopped for lack of data, and not because the congestion window was full.
    app_limited: bool,
    paced_until: Option<Instant>,
    events: VecDeque<DownstreamEvent>,
    outcome: RecoveryOutcome<PacketContent>,
    stats: DownstreamStats,
    binding: Binding,
}

impl Downstream {
    /// Creates the data plane of a connection.
    pub fn new(config: Config, peer: PeerLimits, now: Instant) -> Self {
        let recovery = recovery::Config {
            algorithm: config.algorithm,
            mtu: config.mtu as u64,
            initial_rtt: config.initial_rtt,
            max_ack_delay: peer.max_ack_delay,
            ecn: config.ecn,
        };
        Self {
            datagrams: WaitingDatagrams::new(config.datagram_pool.clone()),
            policy: config.policy.build(),
            peer,
            recovery: Recovery::new(recovery, now),
            pacer: Pacer::new(config.mtu as u64, now),
            streams: StreamSlots::default(),
            by_id: HashMap::new(),
            owners: HashMap::new(),
            ready: StreamQueues::default(),
            unopened: StreamQueues::default(),
            blocked: StreamQueues::default(),
            starved: StreamQueues::default(),
            resets_owed: 0,
            datagrams_turn: true,
            deadlines: BTreeSet::new(),
            review_at: None,
            reviewed_until: None,
            superseded: false,
            next_stream: peer.first_stream_uni,
            data_sent: 0,
            outstanding: OffloadBudget::default(),
            recalls: Vec::new(),
            app_limited: true,
            paced_until: None,
            events: VecDeque::new(),
            outcome: RecoveryOutcome::default(),
            stats: DownstreamStats::default(),
            binding: Binding::default(),
            config,
        }
    }

    /// Sets whether the application's streams are plain QUIC streams or belong to a WebTransport session. The caller
    /// writes the headers that WebTransport puts before streams and datagrams. `streams` is the number of
    /// unidirectional streams that the QUIC stack opens for itself in addition. This must be called before any stream
    /// is opened.
    pub fn bind(&mut self, binding: Binding, streams: u64) {
        self.binding = binding;
        self.peer.first_stream_uni += streams;
        self.next_stream = self.next_stream.max(self.peer.first_stream_uni);
    }

    /// Returns whether the application's streams are plain QUIC streams or belong to a WebTransport session.
    pub fn binding(&self) -> Binding {
        self.binding
    }

    /// Adds a stream. It gets its QUIC stream ID with its first frame, because the peer's limit of streams is used in
    /// order of priority.
    pub fn open(&mut self, stream: NewStream) -> StreamKey {
        self.superseded |= self.owners.entry(stream.owner).or_default().open(&stream);
        let key = self.streams.insert(PlaneStream::new(stream, self.peer.max_stream_data_uni));
        self.wake(key);
        key
    }

    /// Notes that the stream's source has more bytes, or has ended. The call has no effect after the stream has ended.
    pub fn wake(&mut self, key: StreamKey) {
        let Some(stream) = self.streams.get_mut(key) else { return };
        // A stream without flow control credit never reads its source, so evicted bytes of the source are detected
        // here.
        if stream.lost_its_source() {
            let code = self.config.reset_codes.behind;
            return self.begin_reset(key, code, Cause::Evicted);
        }
        match stream.refresh() {
            Some(SourceEnd::Open) => {}
            Some(SourceEnd::Fin { at }) => self.arm(key, at),
            Some(SourceEnd::Reset(code)) => return self.begin_reset(key, code, Cause::Source),
            None => return,
        }
        self.place(key);
        self.shed();
    }

    /// Resets the stream with an application error code. A stream that only waits for acknowledgements is not reset,
    /// because its receiver may still be reading it.
    pub fn reset(&mut self, key: StreamKey, code: u64) {
        if self.streams.get(key).is_some_and(|stream| !stream.is_sent()) {
            self.begin_reset(key, code, Cause::Requested);
        }
    }

    /// Returns the number of datagrams that wait to be sent.
    pub fn queued_datagrams(&self) -> usize {
        self.datagrams.len()
    }

    /// Changes the priority of a stream.
    pub fn set_priority(&mut self, key: StreamKey, priority: Priority) {
        let Some(stream) = self.streams.get_mut(key) else { return };
        if stream.priority != priority {
            self.unplace(key);
            if let Some(stream) = self.streams.get_mut(key) {
                stream.priority = priority;
            }
            self.place(key);
            // The kernel offload still uses the priority that the stream had when the offload was allowed to send on
            // it. The offload therefore has to return the stream.
            self.recall(key);
        }
    }

    /// Queues the payload of a DATAGRAM frame.
    pub fn send_datagram(&mut self, datagram: NewDatagram) -> Result<(), TooLarge> {
        let size = send::datagram_size(&datagram.payload) as u64;
        let limit = self.peer.max_datagram_frame_size;
        if size > limit {
            self.stats.datagrams_too_large += 1;
            return Err(TooLarge { size, limit });
        }
        self.datagrams.push(datagram);
        let end = self.policy.datagrams();
        self.stats.datagrams_overflowed += self.datagrams.trim(self.config.max_datagram_bytes, end);
        Ok(())
    }

    /// Returns the next event of a stream.
    pub fn poll_event(&mut self) -> Option<DownstreamEvent> {
        self.events.pop_front()
    }

    /// Returns whether [`Self::poll_event`] has an event.
    pub fn has_events(&self) -> bool {
        !self.events.is_empty()
    }

    /// Returns how many streams an owner (a subscription) has now, and how many were opened for it in all.
    pub fn owned(&self, owner: u64) -> Owned {
        self.owners.get(&owner).map(|owner| owner.owned).unwrap_or_default()
    }

    /// Returns and removes the stream counts of an owner (a subscription) that opens no more streams.
    pub fn forget_owner(&mut self, owner: u64) -> Owned {
        self.owners.remove(&owner).unwrap_or_default().owned
    }

    /// Returns the connection's throughput, and the time for which data has waited to be sent.
    pub fn room(&self, now: Instant) -> ConnectionRoom {
        ConnectionRoom {
            delivered: self.recovery.delivered(),
            bandwidth: self.bandwidth(),
            fastest: self.recovery.fastest(),
            waiting: self.queue_delay(now),
            round_trip: self.recovery.rtt.smoothed(),
        }
    }

    /// Returns the estimated bandwidth of the path, bytes per second.
    fn bandwidth(&self) -> u64 {
        let round_trip = self.recovery.rtt.smoothed();
        let per_round = || (self.recovery.window() as f64 / round_trip.as_secs_f64().max(1e-6)) as u64;
        self.recovery.bandwidth().unwrap_or_else(per_round)
    }

    /// Returns the connection's counters and its current state.
    pub fn stats(&self) -> DownstreamStats {
        DownstreamStats {
            recovery: self.recovery.counts(),
            live_streams: self.streams.len() as u64,
            pending_bytes: self.streams.iter().map(|(_, stream)| stream.pending()).sum(),
            window: self.recovery.window(),
            bandwidth: self.recovery.bandwidth(),
            ecn: self.recovery.ecn().state(),
            bytes_in_flight: self.recovery.in_flight(),
            smoothed_rtt: self.recovery.rtt.smoothed(),
            min_rtt: self.recovery.rtt.min(),
            ..self.stats.clone()
        }
    }
}

#[cfg(any(test, feature = "simulator"))]
#[allow(missing_docs, reason = "a simulator for tests")]
pub mod sim;
#[cfg(test)]
mod tests;
