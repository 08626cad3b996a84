//! What one connection is owed, has been sent and has acknowledged.
//!
//! [`Downstream`] is the send side of many unidirectional streams and of datagrams. It does not own their bytes but
//! reads them from [sources](super::source::Source). Bytes that are neither acknowledged nor in flight are a
//! *hole*. New data, lost data and the past that a late receiver catches up with are all holes, and are sent in
//! order of priority.
//!
//! Where to look: [`Downstream::poll_frames`] fills packets (`send`), [`Downstream::on_ack`] and its neighbours take
//! what the peer says (`feedback`), streams wait, expire and end (`lifecycle`), and an offload may send in the
//! plane's place (`offload`), and open streams (`opened`).

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
    datagrams::Datagrams,
    pacing::Pacer,
    policy::Policy,
    queues::StreamQueues,
    recovery::{self, Outcome, Recovery},
    slots::Slots,
    source::End,
    stream::Stream,
};

pub use super::{
    datagrams::{NewDatagram, Pool},
    policy,
    stream::{Asked, NewStream},
    types::{Ack, Label, Level, Priority, StreamKey},
};
pub use api::*;
pub use offload::{Budget, OffloadedPacket, StreamGrant};
pub use pieces::{Carried, Piece};

/// What a packet carries, kept from [`Downstream::poll_frames`] until it is acknowledged or lost.
#[derive(Clone, Debug, Default)]
pub struct Content(SmallVec<[Sent; 2]>);

#[derive(Clone, Copy, Debug)]
enum Sent {
    Bytes { key: StreamKey, offset: u64, len: u16, fin: bool, again: bool },
    Reset { key: StreamKey },
    Datagram { label: Label },
    Ping,
}

/// Why a stream is reset; counted in [`Resets`].
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

/// Whom streams belong to.
#[derive(Default)]
struct Owner {
    owned: Owned,
    newest: Option<Newest>,
    /// When it last had to be sent what it had asked for from the past.
    caught_up: Option<Instant>,
}

/// An owner's newest group.
#[derive(Clone, Copy)]
struct Newest {
    group: u64,
    /// Publisher priority and ID of its most urgent subgroup.
    first: (u8, u64),
}

/// The data plane of one connection. Sans-I/O: time is an argument, `now`, and never goes back.
pub struct Downstream {
    config: Config,
    peer: PeerLimits,
    recovery: Recovery<Content>,
    pacer: Pacer,
    streams: Slots,
    by_id: HashMap<u64, StreamKey>,
    owners: HashMap<u64, Owner>,
    ready: StreamQueues,
    unopened: StreamQueues,
    blocked: StreamQueues,
    starved: StreamQueues,
    /// Streams that are ready to be reset.
    resets_owed: usize,
    datagrams: Datagrams,
    /// It is the datagrams' turn: they take turns with the streams of their level.
    datagrams_turn: bool,
    /// Running subgroup delivery timeouts.
    deadlines: BTreeSet<(Instant, StreamKey)>,
    policy: Box<dyn Policy>,
    /// When what waits is looked at next.
    review_at: Option<Instant>,
    /// Before this it is not looked at again.
    reviewed_until: Option<Instant>,
    /// A group has begun that is its owner's newest.
    superseded: bool,
    /// Index of the next stream to open (its ID without the two low bits).
    next_stream: u64,
    /// Connection credit that was used, bytes.
    data_sent: u64,
    /// What the offload may have sent and has not reported yet.
    outstanding: Budget,
    recalls: Vec<StreamKey>,
    /// When sending last stopped, data was missing, not window.
    app_limited: bool,
    paced_until: Option<Instant>,
    events: VecDeque<Event>,
    outcome: Outcome<Content>,
    stats: Stats,
    binding: Binding,
}

impl Downstream {
    pub fn new(config: Config, peer: PeerLimits, now: Instant) -> Self {
        let recovery = recovery::Config {
            algorithm: config.algorithm,
            mtu: config.mtu as u64,
            initial_rtt: config.initial_rtt,
            max_ack_delay: peer.max_ack_delay,
            ecn: config.ecn,
        };
        Self {
            datagrams: Datagrams::new(config.datagram_pool.clone()),
            policy: config.policy.build(),
            peer,
            recovery: Recovery::new(recovery, now),
            pacer: Pacer::new(config.mtu as u64, now),
            streams: Slots::default(),
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
            outstanding: Budget::default(),
            recalls: Vec::new(),
            app_limited: true,
            paced_until: None,
            events: VecDeque::new(),
            outcome: Outcome::default(),
            stats: Stats::default(),
            binding: Binding::default(),
            config,
        }
    }

    /// How the application's streams lie on the connection: what the sources of streams and the datagrams begin with is the
    /// caller's. The QUIC stack opens `streams` more of its own. Called before anything is opened.
    pub fn bind(&mut self, binding: Binding, streams: u64) {
        self.binding = binding;
        self.peer.first_stream_uni += streams;
        self.next_stream = self.next_stream.max(self.peer.first_stream_uni);
    }

    pub fn binding(&self) -> Binding {
        self.binding
    }

    /// Adds a stream. It gets its ID when it is first sent: streams wait for IDs in order of priority.
    pub fn open(&mut self, stream: NewStream) -> StreamKey {
        self.superseded |= self.owners.entry(stream.owner).or_default().open(&stream);
        let key = self.streams.insert(Stream::new(stream, self.peer.max_stream_data_uni));
        self.wake(key);
        key
    }

    /// The source has more bytes, or ended. Has no effect once the stream is gone.
    pub fn wake(&mut self, key: StreamKey) {
        let Some(stream) = self.streams.get_mut(key) else { return };
        // Checked here because a stream without credit does not read.
        if stream.lost_its_source() {
            let code = self.config.reset_codes.behind;
            return self.begin_reset(key, code, Cause::Evicted);
        }
        match stream.refresh() {
            Some(End::Open) => {}
            Some(End::Fin { at }) => self.arm(key, at),
            Some(End::Reset(code)) => return self.begin_reset(key, code, Cause::Source),
            None => return,
        }
        self.place(key);
        self.shed();
    }

    /// Gives the stream up with an application error code. One that only waits for acknowledgements is left
    /// alone: its receiver may be reading it.
    pub fn reset(&mut self, key: StreamKey, code: u64) {
        if self.streams.get(key).is_some_and(|stream| !stream.is_sent()) {
            self.begin_reset(key, code, Cause::Requested);
        }
    }

    /// Datagrams that wait to be sent.
    pub fn queued_datagrams(&self) -> usize {
        self.datagrams.len()
    }

    pub fn set_priority(&mut self, key: StreamKey, priority: Priority) {
        let Some(stream) = self.streams.get_mut(key) else { return };
        if stream.priority != priority {
            self.unplace(key);
            if let Some(stream) = self.streams.get_mut(key) {
                stream.priority = priority;
            }
            self.place(key);
            // The offload goes by the priority that the stream had when it was delegated.
            self.recall(key);
        }
    }

    /// Queues the payload of a DATAGRAM frame.
    pub fn send_datagram(&mut self, datagram: NewDatagram) -> Result<(), TooLarge> {
        let (size, limit) =
            (send::datagram_size(&datagram.payload) as u64, self.peer.max_datagram_frame_size);
        if size > limit {
            self.stats.datagrams_too_large += 1;
            return Err(TooLarge { size, limit });
        }
        self.datagrams.push(datagram);
        let end = self.policy.datagrams();
        self.stats.datagrams_overflowed += self.datagrams.trim(self.config.max_datagram_bytes, end);
        Ok(())
    }

    pub fn poll_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    /// Whether [`Self::poll_event`] has something.
    pub fn has_events(&self) -> bool {
        !self.events.is_empty()
    }

    /// How many streams an owner has, and has had.
    pub fn owned(&self, owner: u64) -> Owned {
        self.owners.get(&owner).map(|owner| owner.owned).unwrap_or_default()
    }

    /// Returns the counts of an owner that opens no more streams, and forgets them.
    pub fn forget_owner(&mut self, owner: u64) -> Owned {
        self.owners.remove(&owner).unwrap_or_default().owned
    }

    /// What the connection carries.
    pub fn room(&self, now: Instant) -> Room {
        Room {
            delivered: self.recovery.delivered(),
            bandwidth: self.bandwidth(),
            fastest: self.recovery.fastest(),
            waiting: self.queue_delay(now),
            round_trip: self.recovery.rtt.smoothed(),
        }
    }

    /// What the path is thought to carry, bytes per second.
    fn bandwidth(&self) -> u64 {
        let round_trip = self.recovery.rtt.smoothed();
        let per_round = || (self.recovery.window() as f64 / round_trip.as_secs_f64().max(1e-6)) as u64;
        self.recovery.bandwidth().unwrap_or_else(per_round)
    }

    pub fn stats(&self) -> Stats {
        Stats {
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
pub mod sim;
#[cfg(test)]
mod tests;
