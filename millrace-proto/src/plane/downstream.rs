//! What one subscriber connection is owed, has been sent and has acknowledged.
//!
//! [`Downstream`] is the send side of many unidirectional streams and of datagrams, over bytes that it
//! does not own, sharing the connection with a QUIC stack. What is neither acknowledged nor in flight is a
//! hole, and holes are sent in priority order.

mod api;
mod offload;
mod pieces;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, VecDeque},
    time::{Duration, Instant},
};

use smallvec::SmallVec;

use super::{
    pacing::Pacer,
    queues::StreamQueues,
    recovery::{self, Outcome, Recovery},
    slots::Slots,
    source::End,
    stream::{Chunk, Need, Queue, Stream},
};
use crate::quic::{frame, varint};

pub use super::{
    stream::NewStream,
    types::{Ack, Label, Level, Priority, StreamKey},
};
pub use api::*;
pub use offload::{Budget, Delegation, OffloadedPacket};
pub use pieces::{Carried, Piece};

/// Stream frames shorter than this are not worth splitting off a longer rest.
const MIN_ROOM: usize = 32;

/// What a packet carries, between [`Downstream::poll_frames`] and its fate.
#[derive(Clone, Debug, Default)]
pub struct Content(SmallVec<[Sent; 2]>);

#[derive(Clone, Copy, Debug)]
enum Sent {
    Bytes { key: StreamKey, offset: u64, len: u16, fin: bool, again: bool },
    Reset { key: StreamKey },
    Datagram { label: Label },
    Ping,
}

#[derive(Clone, Copy, Debug)]
enum Cause {
    Source,
    Requested,
    Stopped,
    ObjectTimeout,
    SubgroupTimeout,
    Evicted,
    Overflow,
}

/// The data plane of one connection. Sans-I/O: `now` is an argument and never goes back.
pub struct Downstream {
    config: Config,
    peer: PeerLimits,
    recovery: Recovery<Content>,
    pacer: Pacer,
    streams: Slots,
    by_id: HashMap<u64, StreamKey>,
    owners: HashMap<u64, Owned>,
    ready: StreamQueues,
    unopened: StreamQueues,
    blocked: StreamQueues,
    datagrams: BTreeMap<(Priority, u64), NewDatagram>,
    datagram_bytes: usize,
    datagrams_queued: u64,
    /// Datagrams and streams of the same level take turns.
    datagrams_turn: bool,
    /// Subgroup delivery timeouts that run.
    deadlines: BTreeSet<(Instant, StreamKey)>,
    /// Index of the next stream to open.
    next_stream: u64,
    /// Connection credit used, bytes.
    data_sent: u64,
    /// Of another sender, not registered yet.
    outstanding: Budget,
    recalls: Vec<StreamKey>,
    /// The window was open when there was last nothing to send.
    app_limited: bool,
    paced_until: Option<Instant>,
    events: VecDeque<Event>,
    outcome: Outcome<Content>,
    stats: Stats,
}

impl Downstream {
    pub fn new(config: Config, peer: PeerLimits, now: Instant) -> Self {
        let recovery = recovery::Config {
            algorithm: config.algorithm,
            mtu: config.mtu as u64,
            initial_rtt: config.initial_rtt,
            max_ack_delay: peer.max_ack_delay,
        };
        Self {
            config,
            peer,
            recovery: Recovery::new(recovery, now),
            pacer: Pacer::new(config.mtu as u64, now),
            streams: Slots::default(),
            by_id: HashMap::new(),
            owners: HashMap::new(),
            ready: StreamQueues::default(),
            unopened: StreamQueues::default(),
            blocked: StreamQueues::default(),
            datagrams: BTreeMap::new(),
            datagram_bytes: 0,
            datagrams_queued: 0,
            datagrams_turn: true,
            deadlines: BTreeSet::new(),
            next_stream: peer.first_stream_uni,
            data_sent: 0,
            outstanding: Budget::default(),
            recalls: Vec::new(),
            app_limited: true,
            paced_until: None,
            events: VecDeque::new(),
            outcome: Outcome::default(),
            stats: Stats::default(),
        }
    }

    /// Adds a stream; it gets its ID when it is first sent, by priority, once the peer allows it.
    pub fn open(&mut self, stream: NewStream) -> StreamKey {
        self.owners.entry(stream.owner).or_default().live += 1;
        let key = self.streams.insert(Stream::new(stream, self.peer.max_stream_data_uni));
        self.wake(key);
        key
    }

    /// The source has more bytes, or ended. Without effect on a key that is gone.
    pub fn wake(&mut self, key: StreamKey) {
        let Some(stream) = self.streams.get_mut(key) else { return };
        // A stream without credit would never find out by reading.
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
            // The other sender goes by the one that the stream had.
            self.recall(key);
        }
    }

    /// Queues an object datagram: its whole payload, MoQ header included.
    pub fn send_datagram(&mut self, datagram: NewDatagram) -> Result<(), TooLarge> {
        let (size, limit) = (datagram_size(&datagram.payload) as u64, self.peer.max_datagram_frame_size);
        if size > limit {
            self.stats.datagrams_too_large += 1;
            return Err(TooLarge { size, limit });
        }
        self.datagram_bytes += datagram.payload.len();
        self.datagrams.insert((datagram.priority, self.datagrams_queued), datagram);
        self.datagrams_queued += 1;
        while self.datagram_bytes > self.config.max_datagram_bytes
            && let Some((_, dropped)) = self.datagrams.pop_last()
        {
            self.datagram_bytes -= dropped.payload.len();
            self.stats.datagrams_overflowed += 1;
        }
        Ok(())
    }

    pub fn poll_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    /// Whether [`Self::poll_event`] has something.
    pub fn has_events(&self) -> bool {
        !self.events.is_empty()
    }

    /// How many streams an owner has and had.
    pub fn owned(&self, owner: u64) -> Owned {
        self.owners.get(&owner).copied().unwrap_or_default()
    }

    /// Ends the count of an owner whose streams are all gone and that opens no more, and returns it.
    pub fn forget_owner(&mut self, owner: u64) -> Owned {
        self.owners.remove(&owner).unwrap_or_default()
    }

    pub fn stats(&self) -> Stats {
        Stats {
            recovery: self.recovery.counts(),
            live_streams: self.streams.len() as u64,
            pending_bytes: self.streams.iter().map(|(_, stream)| stream.pending()).sum(),
            window: self.recovery.window(),
            bytes_in_flight: self.recovery.in_flight(),
            smoothed_rtt: self.recovery.rtt.smoothed(),
            min_rtt: self.recovery.rtt.min(),
            ..self.stats.clone()
        }
    }
}

/// Sending.
impl Downstream {
    /// Appends the frames of one packet to `out`, at most `room` bytes, or returns `None` when there is
    /// nothing to send, or nothing may be sent before an acknowledgement, credit or [`Self::timeout`].
    ///
    /// The content belongs to the packet: hand it to [`Self::on_sent`], or to [`Self::on_not_sent`].
    pub fn poll_frames(&mut self, now: Instant, room: usize, out: &mut Vec<u8>) -> Option<Content> {
        let probing = self.recovery.probes() > 0;
        self.paced_until = None;
        if !probing {
            if !self.has_work() {
                self.app_limited = true;
                return None;
            }
            if !self.recovery.window_open(self.outstanding.bytes) {
                self.app_limited = false;
                return None;
            }
            if self.config.pacing
                && let Err(at) = self.pacer.ready(now, self.recovery.pacing_rate())
            {
                self.paced_until = Some(at);
                return None;
            }
        }
        // A probe has to arrive even where the path has become narrower (RFC 9000, section 14.4).
        let excess = if probing { self.config.mtu.saturating_sub(recovery::BASE_MTU as usize) } else { 0 };
        let room = room.saturating_sub(excess);
        let mut content = Content::default();
        self.fill(now, room, out, &mut content);
        if content.0.is_empty() && probing && room > 0 {
            frame::write_ping(out);
            content.0.push(Sent::Ping);
        }
        if content.0.is_empty() {
            self.app_limited = true;
            return None;
        }
        Some(content)
    }

    /// The packet left, or will: `size` is its UDP payload.
    pub fn on_sent(&mut self, now: Instant, number: u64, size: usize, content: Content) {
        self.pacer.on_sent(size as u64);
        self.recovery.on_sent(now, number, size, content);
    }

    /// The packet was not built after all: its content is owed again.
    pub fn on_not_sent(&mut self, content: Content) {
        self.lose(&content);
    }

    /// The QUIC stack sent a packet of `size` bytes, the UDP payload.
    pub fn on_stack_sent(&mut self, now: Instant, number: u64, size: usize, ack_eliciting: bool) {
        self.recovery.on_stack_sent(now, number, size, ack_eliciting);
    }

    /// Whether [`Self::poll_frames`] has something to send, if it may.
    pub fn has_work(&self) -> bool {
        !self.ready.is_empty() || !self.datagrams.is_empty() || self.recovery.probes() > 0
    }

    fn fill(&mut self, now: Instant, room: usize, out: &mut Vec<u8>, content: &mut Content) {
        let end = out.len() + room;
        loop {
            let left = end - out.len();
            let stream = self.ready.first();
            let datagram = self.datagrams.first_key_value().map(|((priority, _), _)| priority.level());
            let more = match (stream, datagram) {
                (None, None) => false,
                (Some((level, key)), other) if self.stream_goes_first(level, other) => {
                    self.write_stream(now, key, left, out, content)
                }
                (_, _) => self.write_datagram(now, left, out, content),
            };
            if !more {
                return;
            }
        }
    }

    fn stream_goes_first(&self, level: Level, datagram: Option<Level>) -> bool {
        datagram.is_none_or(|datagram| level < datagram || (level == datagram && !self.datagrams_turn))
    }

    /// Writes the first datagram; returns whether the packet may take more.
    fn write_datagram(
        &mut self,
        now: Instant,
        room: usize,
        out: &mut Vec<u8>,
        content: &mut Content,
    ) -> bool {
        let Some(first) = self.datagrams.first_entry() else { return false };
        let expired = first.get().expires.is_some_and(|at| at <= now);
        let fits = datagram_size(&first.get().payload) <= room;
        if !expired && !fits && !content.0.is_empty() {
            return false;
        }
        let NewDatagram { payload, label, .. } = first.remove();
        self.datagrams_turn = false;
        self.datagram_bytes -= payload.len();
        if expired {
            self.stats.datagrams_expired += 1;
        } else if !fits {
            self.stats.datagrams_too_large += 1;
        } else {
            frame::write_datagram(&payload, out);
            content.0.push(Sent::Datagram { label });
            self.stats.datagrams_sent += 1;
        }
        true
    }

    /// Writes one frame of the first ready stream; returns whether the packet may take more.
    fn write_stream(
        &mut self,
        now: Instant,
        key: StreamKey,
        room: usize,
        out: &mut Vec<u8>,
        content: &mut Content,
    ) -> bool {
        if room < MIN_ROOM {
            return false;
        }
        // What the peer's limits hold back waits elsewhere.
        self.place(key);
        let Some(stream) = self.streams.get(key).filter(|stream| stream.queue == Queue::Ready) else {
            return true;
        };
        let id = stream.id.unwrap_or_else(|| self.stream_id(self.next_stream));
        let credit = self.data_credit();
        let Some(chunk) = stream.next(room as u64, credit) else { return false };
        let written = match chunk {
            Chunk::Reset { code, size } => write_reset(id, code, size, room, out).map(|()| chunk),
            Chunk::Bytes { offset, len, .. } => {
                // FIN alone carries no object.
                if len > 0 && stream.is_late(offset, now) {
                    self.begin_reset(key, self.config.reset_codes.late, Cause::ObjectTimeout);
                    return true;
                }
                match write_bytes(stream, id, chunk, room, out) {
                    Some(chunk) => Some(chunk),
                    None => {
                        self.begin_reset(key, self.config.reset_codes.behind, Cause::Evicted);
                        return true;
                    }
                }
            }
        };
        let Some(chunk) = written else { return false };
        self.record(key, id, &chunk, content);
        true
    }

    fn record(&mut self, key: StreamKey, id: u64, chunk: &Chunk, content: &mut Content) {
        let Some(stream) = self.streams.get_mut(key) else { return };
        stream.on_sent(chunk);
        self.ready.rotate(stream.place(key));
        self.datagrams_turn = true;
        if stream.id.is_none() {
            stream.id = Some(id);
            let owner = stream.owner;
            self.next_stream += 1;
            self.by_id.insert(id, key);
            if let Some(owned) = self.owners.get_mut(&owner) {
                owned.opened += 1;
            }
            self.stats.streams_opened += 1;
            self.events.push_back(Event { key, owner, kind: EventKind::Opened });
        }
        content.0.push(match *chunk {
            Chunk::Reset { .. } => Sent::Reset { key },
            Chunk::Bytes { offset, len, fin, fresh } => {
                if fresh {
                    self.data_sent += len;
                    self.stats.stream_bytes += len;
                } else {
                    self.stats.retransmitted_bytes += len;
                }
                Sent::Bytes { key, offset, len: len as u16, fin, again: !fresh }
            }
        });
        self.place(key);
    }

    fn stream_id(&self, index: u64) -> u64 {
        index << 2 | 0x2 | u64::from(self.peer.is_server)
    }
}

/// What the seam saw.
impl Downstream {
    pub fn on_ack(&mut self, now: Instant, ack: &Ack) -> Result<(), Violation> {
        let mut outcome = std::mem::take(&mut self.outcome);
        let result = self.recovery.on_ack(now, ack, self.app_limited, &mut outcome);
        self.settle(outcome);
        if self.recovery.black_hole() {
            self.on_mtu(recovery::BASE_MTU as usize);
        }
        Ok(result?)
    }

    /// `max`: bytes that the data plane may send on the connection, without quinn's grant.
    pub fn on_max_data(&mut self, max: u64) {
        if max <= self.peer.max_data {
            return;
        }
        self.peer.max_data = max;
        for key in self.blocked.drain() {
            if let Some(stream) = self.streams.get_mut(key) {
                stream.queue = Queue::None;
            }
            self.place(key);
        }
    }

    /// Gives up to `wanted` bytes of unused connection credit away and returns how many.
    pub fn take_max_data(&mut self, wanted: u64) -> u64 {
        let taken = wanted.min(self.data_credit());
        self.peer.max_data -= taken;
        taken
    }

    pub fn on_max_stream_data(&mut self, id: u64, max: u64) -> Result<(), Violation> {
        let Some(key) = self.find(id)? else { return Ok(()) };
        if let Some(stream) = self.streams.get_mut(key)
            && max > stream.credit
        {
            stream.credit = max;
            self.place(key);
        }
        Ok(())
    }

    /// `max`: the frame's value, unidirectional streams of both senders together.
    pub fn on_max_streams_uni(&mut self, max: u64) {
        if max <= self.peer.max_streams_uni {
            return;
        }
        self.peer.max_streams_uni = max;
        for _ in self.next_stream..max {
            let Some((_, key)) = self.unopened.first() else { return };
            if let Some(stream) = self.streams.get(key) {
                self.unopened.rotate(stream.place(key));
            }
            self.place(key);
        }
    }

    pub fn on_stop_sending(&mut self, id: u64, code: u64) -> Result<(), Violation> {
        let Some(key) = self.find(id)? else { return Ok(()) };
        if let Some(stream) = self.streams.get(key).filter(|stream| !stream.is_reset()) {
            self.events.push_back(Event { key, owner: stream.owner, kind: EventKind::Stopped(code) });
            self.begin_reset(key, code, Cause::Stopped);
        }
        Ok(())
    }

    /// Whether frames about stream `id` are for the data plane: one of this end's unidirectional streams
    /// that the QUIC stack did not open.
    pub fn owns(&self, id: u64) -> bool {
        id & 0x3 == self.stream_id(0) & 0x3 && id >> 2 >= self.peer.first_stream_uni
    }

    /// The largest UDP payload that the path is thought to take, bytes.
    pub fn mtu(&self) -> usize {
        self.config.mtu
    }

    /// The path takes UDP payloads of `size` bytes.
    pub fn on_mtu(&mut self, size: usize) {
        self.config.mtu = size;
        self.recovery.set_mtu(size as u64);
        self.pacer.set_mtu(size as u64);
    }

    /// The peer's address changed for more than a NAT's sake (RFC 9000, section 9.4).
    pub fn on_path_change(&mut self, now: Instant) {
        self.recovery.on_path_change(now);
        self.pacer = Pacer::new(self.config.mtu as u64, now);
    }

    /// The round trip that the newest acknowledgement showed.
    pub fn latest_rtt(&self) -> Duration {
        self.recovery.rtt.latest()
    }

    /// The congestion window, bytes.
    pub fn window(&self) -> u64 {
        self.recovery.window()
    }

    /// The congestion window that is left to the QUIC stack, bytes.
    pub fn stack_window(&self) -> u64 {
        self.recovery.stack_window()
    }

    /// The stream with this ID; none when it is over.
    fn find(&self, id: u64) -> Result<Option<StreamKey>, Violation> {
        if !self.owns(id) || id >> 2 >= self.next_stream {
            return Err(Violation::NeverOpened(id));
        }
        Ok(self.by_id.get(&id).copied())
    }
}

/// Time.
impl Downstream {
    /// When [`Self::on_timeout`] is due, if nothing happens before.
    pub fn timeout(&self) -> Option<Instant> {
        let deadline = self.deadlines.first().map(|(at, _)| *at);
        [self.recovery.timeout(), self.paced_until, deadline].into_iter().flatten().min()
    }

    /// Whether [`Self::on_timeout`] is due for want of an acknowledgement.
    pub fn misses_ack(&self, now: Instant) -> bool {
        self.recovery.timeout().is_some_and(|at| at <= now)
    }

    /// Afterwards there may be more to send.
    pub fn on_timeout(&mut self, now: Instant) {
        while let Some((at, key)) = self.deadlines.first().copied()
            && at <= now
        {
            self.begin_reset(key, self.config.reset_codes.late, Cause::SubgroupTimeout);
        }
        if self.paced_until.is_some_and(|at| at <= now) {
            self.paced_until = None;
        }
        let mut outcome = std::mem::take(&mut self.outcome);
        if self.recovery.on_timeout(now, &mut outcome) {
            // A probe carries the oldest data that is not acknowledged (RFC 9002, section 6.2.4).
            outcome.lost.extend(self.recovery.own_in_flight().take(1).cloned());
        }
        self.settle(outcome);
    }
}

/// Streams.
impl Downstream {
    /// Applies what recovery found out, and keeps the lists for the next time.
    fn settle(&mut self, mut outcome: Outcome<Content>) {
        for content in outcome.acked.drain(..) {
            self.acknowledge(&content);
        }
        for content in outcome.lost.drain(..) {
            self.lose(&content);
        }
        self.outcome = outcome;
    }

    fn acknowledge(&mut self, content: &Content) {
        for sent in &content.0 {
            match *sent {
                Sent::Bytes { key, offset, len, fin, .. } => {
                    let Some(stream) = self.streams.get_mut(key) else { continue };
                    if stream.on_acked(offset..offset + u64::from(len), fin) {
                        self.stats.streams_finished += 1;
                        self.close(key, EventKind::Finished);
                    } else if stream.queue != Queue::None {
                        self.place(key);
                    }
                }
                Sent::Reset { key } => {
                    if let Some(code) = self.streams.get(key).and_then(Stream::reset_code) {
                        self.close(key, EventKind::Reset(code));
                    }
                }
                Sent::Datagram { .. } | Sent::Ping => {}
            }
        }
    }

    fn lose(&mut self, content: &Content) {
        for sent in &content.0 {
            let key = match *sent {
                Sent::Bytes { key, offset, len, fin, .. } => {
                    let Some(stream) = self.streams.get_mut(key) else { continue };
                    stream.on_lost(offset..offset + u64::from(len), fin);
                    key
                }
                Sent::Reset { key } => {
                    let Some(stream) = self.streams.get_mut(key) else { continue };
                    stream.on_reset_lost();
                    key
                }
                Sent::Datagram { .. } | Sent::Ping => continue,
            };
            self.place(key);
        }
    }

    fn begin_reset(&mut self, key: StreamKey, code: u64, cause: Cause) {
        let Some(stream) = self.streams.get_mut(key).filter(|stream| !stream.is_reset()) else { return };
        let opened = stream.id.is_some();
        stream.reset(code);
        self.recall(key);
        self.disarm(key);
        // A few bytes that free the peer's resources: they go first.
        self.set_priority(key, Priority::default());
        let resets = &mut self.stats.resets;
        *match cause {
            Cause::Source => &mut resets.source,
            Cause::Requested => &mut resets.requested,
            Cause::Stopped => &mut resets.stopped,
            Cause::ObjectTimeout => &mut resets.object_timeout,
            Cause::SubgroupTimeout => &mut resets.subgroup_timeout,
            Cause::Evicted => &mut resets.evicted,
            Cause::Overflow => &mut resets.overflow,
        } += 1;
        if opened {
            return self.place(key);
        }
        resets.unopened += 1;
        self.close(key, EventKind::Reset(code));
    }

    fn close(&mut self, key: StreamKey, kind: EventKind) {
        self.unplace(key);
        self.disarm(key);
        self.recall(key);
        let Some(stream) = self.streams.remove(key) else { return };
        if let Some(id) = stream.id {
            self.by_id.remove(&id);
        }
        if let Some(owned) = self.owners.get_mut(&stream.owner) {
            owned.live -= 1;
        }
        self.events.push_back(Event { key, owner: stream.owner, kind });
    }

    /// Starts the subgroup's delivery timeout, once.
    fn arm(&mut self, key: StreamKey, fin_at: Instant) {
        let Some(stream) = self.streams.get_mut(key) else { return };
        if stream.deadline.is_none()
            && let Some(timeout) = stream.subgroup_timeout()
            && let Some(at) = fin_at.checked_add(timeout)
        {
            stream.deadline = Some(at);
            self.deadlines.insert((at, key));
        }
    }

    fn disarm(&mut self, key: StreamKey) {
        if let Some(at) = self.streams.get_mut(key).and_then(|stream| stream.deadline.take()) {
            self.deadlines.remove(&(at, key));
        }
    }

    /// Puts the stream into the queue that its needs and the peer's limits call for.
    fn place(&mut self, key: StreamKey) {
        let Some(stream) = self.streams.get_mut(key) else { return };
        let queue = match stream.need() {
            Need::Nothing => Queue::None,
            _ if stream.id.is_none() && self.next_stream >= self.peer.max_streams_uni => Queue::Unopened,
            Need::Fresh if self.data_sent >= self.peer.max_data => Queue::Blocked,
            Need::Fresh | Need::Repair => Queue::Ready,
        };
        if queue == stream.queue {
            return;
        }
        let place = stream.place(key);
        let old = std::mem::replace(&mut stream.queue, queue);
        if let Some(queues) = self.queue(old) {
            queues.remove(place);
        }
        if let Some(queues) = self.queue(queue) {
            queues.insert(place);
        }
    }

    fn unplace(&mut self, key: StreamKey) {
        let Some(stream) = self.streams.get_mut(key) else { return };
        let place = stream.place(key);
        let old = std::mem::take(&mut stream.queue);
        if let Some(queues) = self.queue(old) {
            queues.remove(place);
        }
    }

    fn queue(&mut self, queue: Queue) -> Option<&mut StreamQueues> {
        match queue {
            Queue::None => None,
            Queue::Ready => Some(&mut self.ready),
            Queue::Unopened => Some(&mut self.unopened),
            Queue::Blocked => Some(&mut self.blocked),
        }
    }

    /// Resets the streams whose turn is furthest off while too many have bytes to send.
    fn shed(&mut self) {
        let queues = [&self.ready, &self.unopened, &self.blocked];
        if queues.iter().map(|queues| queues.len()).sum::<usize>() <= self.config.max_pending_streams {
            return;
        }
        let last = queues.iter().filter_map(|queues| queues.last()).max();
        if let Some((_, key)) = last {
            self.begin_reset(key, self.config.reset_codes.behind, Cause::Overflow);
        }
    }
}

fn datagram_size(payload: &[u8]) -> usize {
    1 + varint::len(payload.len() as u64) + payload.len()
}

fn write_reset(id: u64, code: u64, size: u64, room: usize, out: &mut Vec<u8>) -> Option<()> {
    let len = 1 + varint::len(id) + varint::len(code) + varint::len(size);
    (len <= room).then(|| frame::write_reset_stream(id, code, size, out))
}

/// Appends a STREAM frame of as much of `chunk` as fits into `room` and returns what it became; `None`
/// when the source no longer has the bytes.
fn write_bytes(stream: &Stream, id: u64, chunk: Chunk, room: usize, out: &mut Vec<u8>) -> Option<Chunk> {
    let Chunk::Bytes { offset, len, fin, fresh } = chunk else { return None };
    let space = room.saturating_sub(frame::stream_overhead(id, offset, room)) as u64;
    let mut chunk = Chunk::Bytes { offset, len: len.min(space), fin: fin && len <= space, fresh };
    let start = out.len();
    loop {
        let Chunk::Bytes { len, fin, .. } = chunk else { return None };
        frame::write_stream_header(id, offset, len as usize, fin, out);
        let data = out.len();
        out.resize(data + len as usize, 0);
        let read = match len {
            0 => 0,
            _ => stream.read(offset, out.get_mut(data..)?) as u64,
        };
        if read == len {
            return Some(chunk);
        }
        out.truncate(start);
        if read == 0 {
            return None;
        }
        chunk = Chunk::Bytes { offset, len: read, fin: false, fresh };
    }
}

#[cfg(test)]
pub(super) mod sim;
#[cfg(test)]
mod tests;
