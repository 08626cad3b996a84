//! What quinn and the data plane of one connection have in common.
//!
//! Everything that both must agree on is behind one lock, [`Shared::state`], held for the length of a packet
//! by whoever sends or receives one. quinn calls in here with its own lock held; nothing in here calls
//! quinn. Packet numbers are outside of the lock, in one atomic word, since the kernel draws from it too.

mod kernel;
mod quiet;
mod trial;

use std::{
    cell::RefCell,
    net::{IpAddr, SocketAddr},
    ops::RangeInclusive,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use bytes::BytesMut;
use millrace_proto::{
    quic::{
        ack::{self, NumberMap},
        credit::Credit,
        frame::{self, Direction, Frame, Walker},
        keys::{HeaderKey, PacketKey, Secret, Suite},
        number::PacketNumbers,
        packet::{self, ConnectionId},
        params::{self, Malformed, Params},
        varint,
    },
    relay::downstream::{self, Ack, Downstream, PeerLimits},
};
use parking_lot::{MappedMutexGuard, Mutex, MutexGuard};
use quinn::Side;
use tokio::sync::Notify;

use kernel::Part;
pub(super) use kernel::Word;

use super::{endpoint::Config, keeper::Alarm, path::Path, seam::Secrets, stats::Counters, tap::Tap};
use crate::engine::{Batch, Flow, Sender, kernel::Line};

/// The last key generation that is used: quinn cannot be told to stop, so the connection is closed well
/// before the 16 bits in the packet number word run out.
const LAST_GENERATION: u16 = u16::MAX - 16;

/// Packets of what may be sealed with one key that are left to quinn: it has to send to move on.
const KEY_RESERVE: u64 = 1 << 16;

/// What the keeper has to do for a connection, outside of quinn's lock.
pub(super) mod attention {
    /// Ask quinn where the peer is.
    pub const ADDRESS: u8 = 1;
    /// Ask quinn for new keys.
    pub const KEY_UPDATE: u8 = 2;
    /// Close: no key generation is left.
    pub const KEYS_EXHAUSTED: u8 = 4;
}

/// A packet that was opened.
#[derive(Clone, Copy)]
pub(super) struct Arrival {
    pub now: Instant,
    /// UDP payload, bytes.
    pub size: usize,
    /// The last bytes of it, by which the kernel knows it.
    pub end: [u8; 8],
}

/// What a packet held for the data plane.
#[derive(Default)]
struct Contents {
    any: bool,
    /// ACK Delay of the last acknowledgement.
    ack: Option<u64>,
    /// There was more than acknowledgements and PADDING.
    others: bool,
}

pub(super) struct Shared {
    numbers: PacketNumbers<Word>,
    state: Mutex<State>,
    /// The data plane may send: quinn has opened its streams, and the connection is open.
    open: AtomicBool,
    attention: AtomicU8,
    /// When [`Shared::on_timeout`] is due, in the keeper's time.
    pub deadline: AtomicU64,
    pub alarm: Arc<Alarm>,
    pub secrets: Arc<Secrets>,
    pub sender: Arc<Sender>,
    /// Fires when [`Downstream::poll_event`] has something.
    pub events: Notify,
    /// Fires when quinn has sent stream data.
    pub control: Notify,
    pub counters: Counters,
    tap: Arc<Tap>,
    /// Of [`Tap`].
    session: AtomicU32,
}

struct State {
    downstream: Downstream,
    config: downstream::Config,
    path: Path,
    /// With engine `kernel`.
    kernel: Option<Part>,
    keys: Option<Keys>,
    /// Of quinn's packets.
    map: NumberMap,
    credit: Credit,
    peer: Option<Params>,
    /// Unidirectional streams that quinn opens, the first ones.
    control_streams: u64,
    max_packets_per_key: u64,
    /// The largest packet number received; what is above it is no duplicate.
    received: Option<u64>,
    /// The data plane has used its keys up and waits for quinn to move on.
    stalled: bool,
    // Reused from ACK to ACK.
    ack: Ack,
    virtuals: Vec<RangeInclusive<u64>>,
    rewritten: Vec<u8>,
}

/// Sending keys of the data plane: those of the newest generation drawn.
struct Keys {
    header: HeaderKey,
    secret: Secret,
    packet: PacketKey,
    generation: u16,
    /// The first number sealed with them, by either sender.
    since: u64,
    /// Numbers that the data plane may go up to after `since`.
    limit: u64,
    /// quinn has been asked for newer ones.
    requested: bool,
}

impl Keys {
    fn new(secret: Secret, max_packets: u64) -> Self {
        let (header, packet) = (secret.header_key(), secret.packet_key());
        let max_packets = max_packets.min(secret.suite().confidentiality_limit());
        let limit = max_packets - KEY_RESERVE.min(max_packets / 4);
        Self { header, secret, packet, generation: 0, since: 0, limit, requested: false }
    }

    fn advance(&mut self, generation: u16, number: u64) {
        while self.generation < generation {
            self.secret = self.secret.next();
            self.packet = self.secret.packet_key();
            self.generation += 1;
            self.since = number;
            self.requested = false;
        }
    }
}

impl Shared {
    pub fn new(
        path: Path,
        config: &Config,
        secrets: Arc<Secrets>,
        alarm: Arc<Alarm>,
        sender: Arc<Sender>,
        kernel: Option<(Arc<Line>, SocketAddr)>,
    ) -> Self {
        let word = match &kernel {
            Some((line, _)) => Word::Kernel(Arc::clone(line)),
            None => Word::Own(AtomicU64::new(0)),
        };
        let state = State {
            downstream: Downstream::new(config.downstream, PeerLimits::default(), Instant::now()),
            config: config.downstream,
            path,
            kernel: kernel.map(|(line, local)| Part::new(line, local)),
            keys: None,
            map: NumberMap::default(),
            credit: Credit::new(0),
            peer: None,
            control_streams: config.control_streams,
            max_packets_per_key: config.max_packets_per_key,
            received: None,
            stalled: false,
            ack: Ack { delay: Duration::ZERO, ranges: Vec::new() },
            virtuals: Vec::new(),
            rewritten: Vec::new(),
        };
        Self {
            numbers: PacketNumbers::over(word),
            state: Mutex::new(state),
            open: AtomicBool::new(false),
            attention: AtomicU8::new(0),
            deadline: AtomicU64::new(u64::MAX),
            alarm,
            secrets,
            sender,
            events: Notify::new(),
            control: Notify::new(),
            counters: Counters::default(),
            tap: Arc::clone(&config.tap),
            session: AtomicU32::new(0),
        }
    }

    pub fn downstream(&self) -> MappedMutexGuard<'_, Downstream> {
        MutexGuard::map(self.state.lock(), |state| &mut state.downstream)
    }

    /// How traces name the connection.
    pub fn set_session(&self, session: u32) {
        self.session.store(session, Ordering::Relaxed);
        if let Some(part) = &mut self.state.lock().kernel {
            part.set_session(session);
        }
    }

    /// Packets have to come from the address that the peer connected to.
    pub fn set_local(&self, local: Option<IpAddr>) {
        self.state.lock().path.local = local;
    }

    pub fn open(&self) {
        self.open.store(true, Ordering::Release);
    }

    /// Nothing is sent any more: after CONNECTION_CLOSE only quinn has something to say.
    pub fn close(&self) {
        self.open.store(false, Ordering::SeqCst);
        if let Word::Kernel(line) = self.numbers.owner() {
            line.downstream.set_max_bytes(0);
        }
        self.deadline.store(u64::MAX, Ordering::Release);
    }

    /// What the keeper has to do, once.
    pub fn take_attention(&self) -> u8 {
        self.attention.swap(0, Ordering::AcqRel)
    }

    fn request(&self, what: u8) {
        self.attention.fetch_or(what, Ordering::AcqRel);
        self.alarm.ring();
    }

    /// Has the keeper run [`Shared::on_timeout`] now.
    fn hurry(&self) {
        self.deadline.store(0, Ordering::Release);
        self.alarm.at(0);
    }

    /// Before the lock is let go: says when there is something to do, and what the kernel may do meanwhile.
    fn arm(&self, state: &mut State, now: Instant) {
        self.hand_out(state, now);
        if self.open.load(Ordering::Relaxed) {
            let at = state.downstream.timeout().map_or(u64::MAX, |at| self.alarm.time(at));
            self.deadline.store(at, Ordering::Release);
            self.alarm.at(at);
        }
    }
}

/// Sending.
impl Shared {
    /// Puts as many packets into `batch` as there are bytes owed, credit, window and pacing.
    pub fn transmit(&self, now: Instant, batch: &mut Batch) {
        if !self.open.load(Ordering::Acquire) {
            return;
        }
        let mut guard = self.state.lock();
        let state = &mut *guard;
        self.take_in(state, now);
        self.take_share(state);
        let flow = Flow { to: state.path.remote, from: state.path.local };
        while batch.packet(flow, |out| self.build(state, now, out)) {}
        if state.downstream.has_events() {
            self.events.notify_one();
        }
        self.arm(state, now);
    }

    /// Appends one sealed packet to `out`; returns whether there was one to send.
    fn build(&self, state: &mut State, now: Instant, out: &mut Vec<u8>) -> bool {
        let Some(keys) = &mut state.keys else { return false };
        let overhead = packet::overhead(state.path.id.len());
        let mtu = state.downstream.mtu();
        state.stalled = self.is_used_up(keys);
        if state.stalled || !state.path.may_send(mtu) {
            return false;
        }
        let at = out.len();
        packet::start(&state.path.id, out);
        let room = mtu.saturating_sub(overhead);
        let Some(content) = state.downstream.poll_frames(now, room, out) else {
            out.truncate(at);
            return false;
        };
        let (generation, number) = self.numbers.draw();
        packet::finish(out, at, state.path.id.len(), (generation, number), &keys.packet, &keys.header);
        let size = out.len() - at;
        if self.tap.is_on() {
            let session = self.session.load(Ordering::Relaxed);
            self.tap.add(session, number, size, state.downstream.pieces(&content));
        }
        state.downstream.on_sent(now, number, size, content);
        state.path.on_sent(size);
        self.counters.data_plane_packets.add(1);
        self.counters.data_plane_bytes.add(size as u64);
        true
    }

    pub fn on_timeout(&self, now: Instant, batch: &mut Batch) {
        {
            let mut state = self.state.lock();
            self.take_in(&mut state, now);
            if state.downstream.misses_ack(now) && state.kernel.as_mut().is_some_and(Part::reads_first) {
                // The next tick but one: whoever was woken for that has a whole tick.
                let at = self.alarm.time(now) + 1;
                self.deadline.store(at, Ordering::Release);
                self.alarm.at(at);
                return;
            }
            state.downstream.on_timeout(now);
            if state.downstream.has_events() {
                self.events.notify_one();
            }
            self.arm(&mut state, now);
        }
        self.transmit(now, batch);
    }

    /// quinn seals a packet of `size` bytes with the keys of `generation` and its own number: returns the
    /// number for the wire.
    pub fn on_quinn_packet(
        &self,
        now: Instant,
        (generation, number): (u16, u64),
        remote_id: &[u8],
        payload: &[u8],
        size: usize,
    ) -> u64 {
        let mut guard = self.state.lock();
        let state = &mut *guard;
        // quinn leaves numbers out to catch peers that acknowledge what they did not receive. So does the
        // wire, and the peer's ACK ranges stay what quinn's would be.
        while state.map.next() < number {
            state.map.push(self.numbers.skip(), None);
            self.counters.skipped_numbers.add(1);
        }
        // quinn never goes back to old keys. If it did, the peer would drop the packet and quinn repeat it.
        let wire = self.numbers.draw_in(generation).unwrap_or_else(|_| self.numbers.skip());
        state.map.push(wire, Some(now));
        if let Some(keys) = state.keys.as_mut().filter(|keys| generation > keys.generation) {
            keys.advance(generation, wire);
            self.counters.key_updates.add(1);
            if let Some(part) = &mut state.kernel {
                part.on_seal_keys(generation, &keys.secret);
            }
        }
        if *state.path.id != *remote_id {
            state.path.id = ConnectionId::new(remote_id).unwrap_or_default();
        }
        let ack_eliciting = self.inspect(state, payload);
        state.downstream.on_foreign_sent(now, wire, size, ack_eliciting);
        self.counters.quinn_packets.add(1);
        self.counters.quinn_bytes.add(size as u64);
        self.arm(state, now);
        if std::mem::take(&mut state.stalled) {
            self.hurry();
        }
        wire
    }

    /// Notes what matters here of what quinn sends; returns whether the packet is ack-eliciting.
    fn inspect(&self, state: &mut State, payload: &[u8]) -> bool {
        let mut ack_eliciting = false;
        for (_, frame) in Walker::new(payload).map_while(Result::ok) {
            ack_eliciting |= frame.is_ack_eliciting();
            match frame {
                Frame::Stream(stream) => {
                    state.credit.on_sent(stream.id, stream.offset + stream.data.len() as u64);
                    self.control.notify_waiters();
                }
                Frame::PathChallenge(challenge) if state.path.on_challenge(challenge) => {
                    self.request(attention::ADDRESS);
                }
                Frame::ConnectionClose { .. } | Frame::ApplicationClose { .. } => self.close(),
                _ => {}
            }
        }
        ack_eliciting
    }

    /// Without what was left to the kernel.
    pub fn quinn_window(&self) -> u64 {
        let state = self.state.lock();
        let share = state.kernel.as_ref().map_or(0, |part| part.share().bytes);
        let least = 2 * state.downstream.mtu() as u64;
        state.downstream.quinn_window().saturating_sub(share).max(least)
    }
}

/// Receiving.
impl Shared {
    /// A packet was opened, sealed for `id` with keys of `generation`: takes what is meant for the data plane out of
    /// `payload`, translates what is meant for quinn, and sends what has become possible.
    pub fn on_received(
        &self,
        arrival: Arrival,
        (generation, number): (u16, u64),
        id: &[u8],
        payload: &mut BytesMut,
    ) {
        let now = arrival.now;
        let news = {
            let mut guard = self.state.lock();
            let state = &mut *guard;
            state.path.on_received(arrival.size);
            let mut arrived = now;
            if let Some(part) = &mut state.kernel {
                part.on_received(number, generation, id);
                arrived = part.arrived(&arrival);
            }
            let contents = self.walk(state, now, arrived, payload);
            learn_ack(state, arrival.size, &contents);
            let mut news = contents.any;
            // quinn drops duplicates, and with them what is put in here.
            let fresh = state.received.is_none_or(|received| number > received);
            state.received = state.received.max(Some(number));
            if fresh && self.open.load(Ordering::Relaxed) {
                news |= self.top_up(state, payload);
            }
            if state.downstream.has_events() {
                self.events.notify_one();
            }
            if news {
                self.arm(state, now);
            }
            news
        };
        if news {
            with_batch(|batch| {
                self.transmit(now, batch);
                self.sender.flush(batch);
            });
        }
    }

    /// `arrived`: before the packet was read.
    fn walk(&self, state: &mut State, now: Instant, arrived: Instant, payload: &mut [u8]) -> Contents {
        let mut contents = Contents::default();
        let news = &mut contents.any;
        let mut at = 0;
        // What is malformed stays as it is, and quinn closes the connection over it.
        while let Ok(Some((range, frame))) = frame::next(payload, at) {
            at = range.end;
            contents.others |= !matches!(frame, Frame::Ack(_) | Frame::Padding);
            match frame {
                Frame::Ack(ack) => {
                    contents.ack = Some(ack.delay);
                    if self.on_ack(state, now, arrived, &ack, range.len()) {
                        payload[range].copy_from_slice(&state.rewritten);
                    }
                    *news = true;
                }
                Frame::MaxData(limit) => {
                    state.credit.on_max_data(limit);
                    let granted = state.credit.granted();
                    write_max_data(granted, &mut payload[range]);
                    state.downstream.on_max_data(state.credit.rest());
                    *news = true;
                }
                Frame::MaxStreams(Direction::Unidirectional, limit) => {
                    state.downstream.on_max_streams_uni(limit);
                    *news = true;
                }
                // A stream that nobody opened is left to quinn, which closes the connection over it.
                Frame::MaxStreamData { id, limit } if state.downstream.owns(id) => {
                    if state.downstream.on_max_stream_data(id, limit).is_ok() {
                        self.consume(&mut payload[range]);
                        if let Some(part) = &state.kernel {
                            part.on_max_stream_data(id, limit);
                        }
                    }
                    *news = true;
                }
                Frame::StopSending { id, code } if state.downstream.owns(id) => {
                    if state.downstream.on_stop_sending(id, code).is_ok() {
                        self.consume(&mut payload[range]);
                    }
                    *news = true;
                }
                Frame::PathResponse(response) => {
                    state.path.on_response(response);
                    *news = true;
                }
                Frame::ConnectionClose { .. } | Frame::ApplicationClose { .. } => self.close(),
                _ => {}
            }
        }
        contents
    }

    fn consume(&self, frame: &mut [u8]) {
        frame::blank(frame);
        self.counters.stream_frames_consumed.add(1);
    }

    /// Splits an ACK frame of `len` bytes. Returns whether `state.rewritten` holds what quinn may see.
    fn on_ack(
        &self,
        state: &mut State,
        now: Instant,
        arrived: Instant,
        ack: &ack::Frame<'_>,
        len: usize,
    ) -> bool {
        if ack.largest >= self.numbers.peek().1 {
            // Larger than any number of quinn's too: it closes the connection.
            self.counters.acks_refused.add(1);
            return false;
        }
        let exponent = state.peer.unwrap_or_default().ack_delay_exponent;
        state.ack.delay = Duration::from_micros(ack.delay.saturating_mul(1 << exponent));
        state.ack.ranges.clear();
        state.ack.ranges.extend(ack.ranges());
        self.take_in(state, now);
        if state.downstream.on_ack(arrived, &state.ack).is_err() {
            // One that the kernel was registering on another CPU; by now it has.
            self.take_in(state, now);
            if state.downstream.on_ack(arrived, &state.ack).is_err() {
                // A number that was skipped. If it was quinn's trap, quinn finds it in what follows.
                self.counters.acks_refused.add(1);
            }
        }

        self.judge(state, now);

        ack.translate(&state.map, &mut state.virtuals);
        let mut delay = ack.delay;
        match state.virtuals.first().map(|range| *range.end()) {
            Some(largest) => {
                let sent = state.map.sent(largest);
                let news = state.map.on_acked(largest);
                let counters = &self.counters;
                if news { &counters.acks_for_quinn } else { &counters.acks_for_data_plane }.add(1);
                if news {
                    let round_trip = match state.map.translate(ack.largest..=ack.largest) {
                        Some(_) => {
                            sent.map_or(Duration::ZERO, |sent| arrived.saturating_duration_since(sent))
                        }
                        None => state.downstream.latest_rtt(),
                    };
                    delay += excess_delay(now, sent, round_trip) >> exponent;
                }
            }
            None => {
                self.counters.acks_for_data_plane.add(1);
                // Said again, an acknowledgement tells quinn nothing. Without it the packet would look like
                // a probe of the path, and a peer that moved would not be followed (RFC 9000, section 9.1).
                state.virtuals.extend(state.map.acked().map(|number| number..=number));
            }
        }
        ack.rewrite(len, &state.virtuals, delay.min(varint::MAX), &mut state.rewritten);
        if state.rewritten.len() > len {
            state.rewritten.clear();
        }
        state.rewritten.resize(len, 0);
        true
    }

    /// Tells quinn about more connection credit when it has used half of what it had; returns whether it did.
    fn top_up(&self, state: &mut State, payload: &mut BytesMut) -> bool {
        let State { downstream, credit, kernel, .. } = state;
        let limit = credit.top_up(|wanted| {
            if let Some(part) = kernel {
                downstream.set_outstanding(part.take_share());
            }
            downstream.take_max_data(wanted)
        });
        let Some(limit) = limit else { return false };
        self.counters.credit_grants.add(1);
        // In front: behind the last frame it could become that frame's data.
        let mut frame = Vec::with_capacity(9 + payload.len());
        frame::write_max_data(limit, &mut frame);
        frame.extend_from_slice(payload);
        *payload = BytesMut::from(frame.as_slice());
        true
    }
}

/// The handshake, and what quinn and the keeper find out.
impl Shared {
    /// Takes the peer's transport parameters, once; returns them with quinn's share of the credit.
    pub fn on_peer_params(&self, encoded: &[u8], is_server: bool) -> Result<Vec<u8>, Malformed> {
        let peer = Params::parse(encoded)?;
        let mut state = self.state.lock();
        if state.peer.is_none() {
            let credit = Credit::new(peer.initial_max_data);
            let limits = PeerLimits {
                max_data: credit.rest(),
                max_stream_data_uni: peer.initial_max_stream_data_uni,
                max_streams_uni: peer.initial_max_streams_uni,
                first_stream_uni: state.control_streams,
                max_datagram_frame_size: peer.max_datagram_frame_size,
                max_ack_delay: peer.max_ack_delay,
                is_server,
            };
            let config = downstream::Config { mtu: state.downstream.mtu(), ..state.config };
            state.downstream = Downstream::new(config, limits, Instant::now());
            state.credit = credit;
            if let Some(part) = &state.kernel {
                part.set_max_datagram(peer.max_datagram_frame_size);
            }
            state.peer = Some(peer);
        }
        params::cap_initial_max_data(encoded, state.credit.granted())
    }

    /// The 1-RTT keys are there: derives the data plane's from the traffic secret that `side` sends with.
    pub fn on_keys(&self, side: Side, integrity_limit: u64) {
        let secret = self.secrets.take(side).and_then(|secret| {
            let suite = identify(secret.len(), integrity_limit)?;
            Secret::new(suite, &secret)
        });
        let received = self.secrets.take(!side).and_then(|received| {
            let suite = secret.as_ref()?.suite();
            Secret::new(suite, &received)
        });
        let mut state = self.state.lock();
        let max_packets = state.max_packets_per_key;
        if let Some(part) = &mut state.kernel {
            part.on_keys(secret.as_ref(), received);
        }
        state.keys = secret.map(|secret| Keys::new(secret, max_packets));
    }

    pub fn suite(&self) -> Option<Suite> {
        self.state.lock().keys.as_ref().map(|keys| keys.secret.suite())
    }

    /// The generation after `generation`, whose keys quinn derives ahead of time.
    pub fn next_generation(&self, generation: u16) -> u16 {
        if generation >= LAST_GENERATION {
            self.close();
            self.request(attention::KEYS_EXHAUSTED);
        }
        generation.saturating_add(1)
    }

    /// Whether quinn has been asked for newer keys and has not used any yet.
    pub fn wants_keys(&self) -> bool {
        self.state.lock().keys.as_ref().is_some_and(|keys| keys.requested)
    }

    pub fn on_mtu(&self, mtu: u16) {
        self.state.lock().downstream.on_mtu(usize::from(mtu));
    }

    /// quinn says where the peer is. Returns whether it waits for an answer from there.
    pub fn on_remote(&self, now: Instant, remote: SocketAddr) -> bool {
        let mut state = self.state.lock();
        if remote != state.path.remote {
            self.counters.address_changes.add(1);
            if state.path.on_remote(remote) {
                state.downstream.on_path_change(now);
            }
        }
        !state.path.is_validated()
    }
}

/// Tells AEADs apart by their secret's length and their integrity limit (RFC 9001, section 6.6).
fn identify(secret_len: usize, integrity_limit: u64) -> Option<Suite> {
    match (secret_len, integrity_limit) {
        (48, _) => Some(Suite::Aes256Gcm),
        (32, 0x10_0000_0000) => Some(Suite::ChaCha20Poly1305),
        (32, _) => Some(Suite::Aes128Gcm),
        _ => None,
    }
}

/// Notes what an acknowledgement without news looks like, if this was one.
fn learn_ack(state: &mut State, size: usize, contents: &Contents) {
    if let (Some(part), Some(delay), false) = (&mut state.kernel, contents.ack, contents.others)
        && state.downstream.is_calm()
    {
        part.learn_ack(size, delay);
    }
}

/// Microseconds by which an acknowledgement came late for quinn's newest packet, because it was sent for a
/// later one of the data plane, or was read late: `round_trip` is what it would have been otherwise.
fn excess_delay(now: Instant, sent: Option<Instant>, round_trip: Duration) -> u64 {
    let waited = sent.map_or(Duration::ZERO, |sent| now.saturating_duration_since(sent));
    u64::try_from(waited.saturating_sub(round_trip).as_micros()).unwrap_or(0)
}

/// Puts another limit into a MAX_DATA frame, in as many bytes. It is not above the one that was there, so
/// it fits.
fn write_max_data(limit: u64, frame: &mut [u8]) {
    frame::blank(frame);
    let len = frame.len();
    let width = [8, 4, 2, 1].into_iter().find(|width| *width < len).unwrap_or(0);
    if varint::fill(limit, &mut frame[1..1 + width]) {
        frame[0] = frame::MAX_DATA as u8;
    }
}

/// One batch per thread, for what is sent from inside quinn's calls.
fn with_batch(work: impl FnOnce(&mut Batch)) {
    thread_local!(static BATCH: RefCell<Batch> = RefCell::new(Batch::default()));
    BATCH.with_borrow_mut(work);
}

#[cfg(test)]
#[path = "shared_tests.rs"]
pub(super) mod tests;
