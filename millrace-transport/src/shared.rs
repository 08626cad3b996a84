//! What all senders of one connection have in common: the plane, what the QUIC stack believes, and the offload.
//!
//! Everything that they must agree on is behind one lock, held for the length of a packet by whoever sends or receives
//! one. quinn calls in here with its own lock held; nothing in here calls quinn. Packet numbers are outside of the lock,
//! in one atomic word, since an offload draws from it too.

use std::{
    cell::RefCell,
    net::{IpAddr, SocketAddr},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use bytes::BytesMut;
use millrace_proto::{
    plane::downstream::{Ack, Downstream, PeerLimits, StreamKey},
    quic::{
        ack,
        frame::{self, Direction, Frame, Walker},
        keys::{Secret, Suite},
        packet::ConnectionId,
        params::{Malformed, Params},
    },
};
use parking_lot::{MappedMutexGuard, Mutex, MutexGuard};
use quinn::Side;
use tokio::sync::Notify;

use crate::{
    alarm::Alarm,
    config::Config,
    numbers::{Numbers, Word},
    offload::{
        self, ConnectionStatus, Datagrams, Delegation, Ingress, Offload, Origin, Owner, state::Offloaded,
    },
    path::Path,
    plane::{Builder, KeyUse, Plane},
    secrets::Secrets,
    send::{Batch, Flow, Sender},
    stack::{Stack, Times},
    stats::Counters,
    tap::Tap,
};

/// The last key generation that is used: quinn cannot be told to stop, so the connection is closed well
/// before the 16 bits in the packet number word run out.
const LAST_GENERATION: u16 = u16::MAX - 16;

/// What the driver has to do for a connection, outside of quinn's lock.
pub(crate) mod attention {
    /// Ask quinn where the peer is.
    pub const ADDRESS: u8 = 1;
    /// Ask quinn for new keys.
    pub const KEY_UPDATE: u8 = 2;
    /// Close: no key generation is left.
    pub const KEYS_EXHAUSTED: u8 = 4;
}

/// A packet that was opened.
#[derive(Clone, Copy)]
pub(crate) struct Arrival {
    pub now: Instant,
    /// UDP payload, bytes.
    pub size: usize,
    /// The last bytes of it, by which an offload knows it.
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

pub(crate) struct Shared {
    numbers: Numbers,
    state: Mutex<State>,
    /// The data plane may send: quinn has opened its streams, and the connection is open.
    open: AtomicBool,
    attention: AtomicU8,
    /// When [`Shared::on_timeout`] is due, in the driver's time.
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
    plane: Plane,
    stack: Stack,
    offload: Option<Offloaded>,
    /// Unidirectional streams that quinn opens, the first ones.
    control_streams: u64,
    /// The largest packet number received; what is above it is no duplicate.
    received: Option<u64>,
    /// Reused from ACK to ACK.
    ack: Ack,
}

impl Shared {
    /// `offload`: and the address of this end's socket.
    pub fn new(
        path: Path,
        config: &Config,
        secrets: Arc<Secrets>,
        alarm: Arc<Alarm>,
        sender: Arc<Sender>,
        offload: Option<(Arc<dyn Offload>, SocketAddr)>,
    ) -> Self {
        let word = match &offload {
            Some((offload, _)) => Word::Offload(Arc::clone(offload)),
            None => Word::Own(AtomicU64::new(0)),
        };
        let state = State {
            plane: Plane::new(config.downstream, config.max_packets_per_key, path),
            stack: Stack::new(),
            offload: offload.map(|(offload, local)| Offloaded::new(offload, local)),
            control_streams: config.control_streams,
            received: None,
            ack: Ack { delay: Duration::ZERO, ranges: Vec::new() },
        };
        Self {
            numbers: Numbers::over(word),
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
        MutexGuard::map(self.state.lock(), |state| &mut state.plane.downstream)
    }

    /// How traces name the connection.
    pub fn set_session(&self, session: u32) {
        self.session.store(session, Ordering::Relaxed);
        if let Some(offload) = &mut self.state.lock().offload {
            offload.set_session(session);
        }
    }

    /// Packets have to come from the address that the peer connected to.
    pub fn set_local(&self, local: Option<IpAddr>) {
        self.state.lock().plane.path.local = local;
    }

    pub fn open(&self) {
        self.open.store(true, Ordering::Release);
    }

    /// Nothing is sent any more: after CONNECTION_CLOSE only quinn has something to say.
    pub fn close(&self) {
        self.open.store(false, Ordering::SeqCst);
        if let Word::Offload(offload) = self.numbers.owner() {
            offload.stop();
        }
        self.deadline.store(u64::MAX, Ordering::Release);
    }

    /// What the driver has to do, once.
    pub fn take_attention(&self) -> u8 {
        self.attention.swap(0, Ordering::AcqRel)
    }

    fn request(&self, what: u8) {
        self.attention.fetch_or(what, Ordering::AcqRel);
        self.alarm.ring();
    }

    /// Has the driver run [`Shared::on_timeout`] now.
    fn hurry(&self) {
        self.deadline.store(0, Ordering::Release);
        self.alarm.at(0);
    }

    /// Before the lock is let go: says when there is something to do, and what the offload may do meanwhile.
    fn arm(&self, state: &mut State, now: Instant) {
        self.hand_out(state, now);
        if self.open.load(Ordering::Relaxed) {
            let at = state.plane.downstream.timeout().map_or(u64::MAX, |at| self.alarm.time(at));
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
        state.drain_offload(now);
        state.reclaim_budget();
        let builder = Builder {
            numbers: &self.numbers,
            counters: &self.counters,
            tap: &self.tap,
            session: self.session.load(Ordering::Relaxed),
        };
        let plane = &mut state.plane;
        let flow = Flow { to: plane.path.remote, from: plane.path.local };
        while batch.packet(flow, |out| self.may_seal(plane) && plane.build(now, &builder, out)) {}
        if plane.downstream.has_events() {
            self.events.notify_one();
        }
        self.arm(state, now);
    }

    /// Whether there are keys for one more packet of the plane; asks for newer ones well before there are not.
    fn may_seal(&self, plane: &mut Plane) -> bool {
        let usable = match plane.key_use(self.numbers.peek().1) {
            None => return false,
            Some(KeyUse::Fresh) => true,
            Some(KeyUse::Ageing) => {
                self.request(attention::KEY_UPDATE);
                true
            }
            Some(KeyUse::UsedUp { ask }) => {
                if ask {
                    self.request(attention::KEY_UPDATE);
                }
                false
            }
        };
        plane.set_stalled(!usable);
        usable
    }

    pub fn on_timeout(&self, now: Instant, batch: &mut Batch) {
        {
            let mut state = self.state.lock();
            state.drain_offload(now);
            let late = state.plane.downstream.misses_ack(now);
            if late && state.offload.as_mut().is_some_and(Offloaded::reads_first) {
                // The next tick but one: whoever was woken for that has a whole tick.
                let at = self.alarm.time(now) + 1;
                self.deadline.store(at, Ordering::Release);
                self.alarm.at(at);
                return;
            }
            state.plane.downstream.on_timeout(now);
            if state.plane.downstream.has_events() {
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
        let wire = state.stack.draw(now, (generation, number), &self.numbers, &self.counters);
        if let Some(keys) = state.plane.keys.as_mut().filter(|keys| generation > keys.generation) {
            keys.advance(generation, wire);
            self.counters.key_updates.add(1);
            if let Some(offload) = &mut state.offload {
                offload.on_seal_keys(generation, &keys.secret);
            }
        }
        if *state.plane.path.id != *remote_id {
            state.plane.path.id = ConnectionId::new(remote_id).unwrap_or_default();
        }
        let ack_eliciting = self.inspect(state, payload);
        state.plane.downstream.on_stack_sent(now, wire, size, ack_eliciting);
        self.counters.quinn_packets.add(1);
        self.counters.quinn_bytes.add(size as u64);
        self.arm(state, now);
        if state.plane.resume() {
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
                    state.stack.on_stream_frame(&stream);
                    self.control.notify_waiters();
                }
                Frame::PathChallenge(challenge) if state.plane.path.on_challenge(challenge) => {
                    self.request(attention::ADDRESS);
                }
                Frame::ConnectionClose { .. } | Frame::ApplicationClose { .. } => self.close(),
                _ => {}
            }
        }
        ack_eliciting
    }

    /// Without what was left to the offload.
    pub fn stack_window(&self) -> u64 {
        let state = self.state.lock();
        let budget = state.offload.as_ref().map_or(0, |offload| offload.budget().bytes);
        let least = 2 * state.plane.downstream.mtu() as u64;
        state.plane.downstream.stack_window().saturating_sub(budget).max(least)
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
            state.plane.path.on_received(arrival.size);
            let mut arrived = now;
            if let Some(offload) = &mut state.offload {
                offload.on_received(number, generation, id);
                arrived = offload.arrival(now, arrival.end);
            }
            let contents = self.walk(state, Times { now, arrived }, payload);
            state.learn_ack(arrival.size, &contents);
            let mut news = contents.any;
            // quinn drops duplicates, and with them what is put in here.
            let fresh = state.received.is_none_or(|received| number > received);
            state.received = state.received.max(Some(number));
            if fresh && self.open.load(Ordering::Relaxed) && state.top_up(payload) {
                self.counters.credit_grants.add(1);
                news = true;
            }
            if state.plane.downstream.has_events() {
                self.events.notify_one();
            }
            if news {
                self.arm(state, now);
            }
            news
        };
        if news {
            self.transmit_now(now);
        }
    }

    fn walk(&self, state: &mut State, times: Times, payload: &mut [u8]) -> Contents {
        let mut contents = Contents::default();
        let mut at = 0;
        // What is malformed stays as it is, and quinn closes the connection over it.
        while let Ok(Some((range, frame))) = frame::next(payload, at) {
            at = range.end;
            contents.others |= !matches!(frame, Frame::Ack(_) | Frame::Padding);
            match frame {
                Frame::Ack(ack) => {
                    contents.ack = Some(ack.delay);
                    if let Some(rewritten) = self.on_ack(state, times, &ack, range.len()) {
                        payload[range].copy_from_slice(rewritten);
                    }
                }
                Frame::MaxData(limit) => state.on_max_data(limit, &mut payload[range]),
                Frame::MaxStreams(Direction::Unidirectional, limit) => {
                    state.plane.downstream.on_max_streams_uni(limit);
                }
                // A stream that nobody opened is left to quinn, which closes the connection over it.
                Frame::MaxStreamData { id, limit } if state.plane.downstream.owns(id) => {
                    if state.on_max_stream_data(id, limit) {
                        self.consume(&mut payload[range]);
                    }
                }
                Frame::StopSending { id, code } if state.plane.downstream.owns(id) => {
                    if state.plane.downstream.on_stop_sending(id, code).is_ok() {
                        self.consume(&mut payload[range]);
                    }
                }
                Frame::PathResponse(response) => state.plane.path.on_response(response),
                Frame::ConnectionClose { .. } | Frame::ApplicationClose { .. } => {
                    self.close();
                    continue;
                }
                _ => continue,
            }
            contents.any = true;
        }
        contents
    }

    fn consume(&self, frame: &mut [u8]) {
        frame::blank(frame);
        self.counters.stream_frames_consumed.add(1);
    }

    /// Takes an ACK frame of `len` bytes; returns what quinn may see in its place, or `None`: what there is.
    fn on_ack<'a>(
        &self,
        state: &'a mut State,
        times: Times,
        ack: &ack::Frame<'_>,
        len: usize,
    ) -> Option<&'a [u8]> {
        if ack.largest >= self.numbers.peek().1 {
            // Larger than any number of quinn's too: it closes the connection.
            self.counters.acks_refused.add(1);
            return None;
        }
        let exponent = state.stack.ack_delay_exponent();
        state.ack.delay = Duration::from_micros(ack.delay.saturating_mul(1 << exponent));
        state.ack.ranges.clear();
        state.ack.ranges.extend(ack.ranges());
        if !state.acknowledge(times) {
            // A number that was skipped. If it was quinn's trap, quinn finds it in what follows.
            self.counters.acks_refused.add(1);
        }
        let latest_rtt = state.plane.downstream.latest_rtt();
        Some(state.stack.rewrite_ack(times, ack, len, latest_rtt, &self.counters))
    }
}

/// The handshake, and what quinn and the driver find out.
impl Shared {
    /// Takes the peer's transport parameters, once; returns them with quinn's part of the credit.
    pub fn on_peer_params(&self, encoded: &[u8], is_server: bool) -> Result<Vec<u8>, Malformed> {
        let peer = Params::parse(encoded)?;
        let mut state = self.state.lock();
        if state.stack.set_peer(peer) {
            let limits = PeerLimits {
                max_data: state.stack.other_credit(),
                max_stream_data_uni: peer.initial_max_stream_data_uni,
                max_streams_uni: peer.initial_max_streams_uni,
                first_stream_uni: state.control_streams,
                max_datagram_frame_size: peer.max_datagram_frame_size,
                max_ack_delay: peer.max_ack_delay,
                is_server,
            };
            state.plane.set_limits(limits);
            if let Some(offload) = &state.offload {
                offload.set_max_datagram(peer.max_datagram_frame_size);
            }
        }
        state.stack.cap(encoded)
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
        if let Some(offload) = &mut state.offload {
            offload.on_keys(secret.as_ref(), received);
        }
        state.plane.set_secret(secret);
    }

    pub fn suite(&self) -> Option<Suite> {
        self.state.lock().plane.keys.as_ref().map(|keys| keys.secret.suite())
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
        self.state.lock().plane.keys.as_ref().is_some_and(|keys| keys.requested)
    }

    pub fn on_mtu(&self, mtu: u16) {
        self.state.lock().plane.downstream.on_mtu(usize::from(mtu));
    }

    /// quinn says where the peer is. Returns whether it waits for an answer from there.
    pub fn on_remote(&self, now: Instant, remote: SocketAddr) -> bool {
        let mut state = self.state.lock();
        let Plane { path, downstream, .. } = &mut state.plane;
        if remote != path.remote {
            self.counters.address_changes.add(1);
            if path.on_remote(remote) {
                downstream.on_path_change(now);
            }
        }
        !path.is_validated()
    }
}

/// The offload.
impl Shared {
    /// Tells the offload what it may send now, and takes streams back that are over.
    fn hand_out(&self, state: &mut State, now: Instant) {
        if state.offload.is_none() {
            return;
        }
        let usable = state.plane.key_use(self.numbers.peek().1);
        if matches!(usable, Some(KeyUse::Ageing | KeyUse::UsedUp { ask: true })) {
            self.request(attention::KEY_UPDATE);
        }
        let has_keys = matches!(usable, Some(KeyUse::Fresh | KeyUse::Ageing));
        let State { offload: Some(offload), plane, .. } = state else { return };
        let open = has_keys && self.open.load(Ordering::Relaxed);
        offload.hand_out(now, &mut plane.downstream, &plane.path, open);
        if !self.open.load(Ordering::SeqCst) {
            // Closed meanwhile, without the lock.
            offload.reclaim_budget();
        }
    }

    /// What the peer sends as the offload may forward it from now on.
    pub fn ingress(self: &Arc<Self>, origin: Origin) -> Option<Arc<dyn Ingress>> {
        let mut guard = self.state.lock();
        let expected = guard.received.map_or(0, |received| received + 1);
        guard.offload.as_mut()?.ingress(origin, expected, Arc::clone(self) as _)
    }

    /// Has the offload forward a track's datagrams, until what it returns is dropped.
    pub fn delegate_datagrams(
        &self,
        ingress: &Arc<dyn Ingress>,
        datagrams: &Datagrams,
    ) -> Option<Box<dyn Delegation>> {
        self.state.lock().offload.as_ref()?.delegate_datagrams(ingress, datagrams)
    }

    /// Whether the offload has sent the datagram of a subscription, at this group and object; says so once.
    pub fn take_delivered(&self, now: Instant, tag: u64, at: (u64, u64)) -> bool {
        let mut state = self.state.lock();
        state.drain_offload(now);
        state.offload.as_mut().is_some_and(|offload| offload.take_delivered(tag, at))
    }

    /// Has the offload forward an ingress as stream `key`, once that owes nothing: from offset `from` of the ingress on,
    /// at an offset that is larger by `shift`. Returns whether it does.
    pub fn delegate(&self, key: StreamKey, ingress: &Arc<dyn Ingress>, shift: i64, from: u64) -> bool {
        let mut guard = self.state.lock();
        let State { offload: Some(offload), plane, .. } = &mut *guard else { return false };
        offload.delegate(&mut plane.downstream, key, ingress, (shift, from))
    }

    /// What the offload did; `None`: there is none.
    pub fn offload_status(&self) -> Option<ConnectionStatus> {
        Some(self.state.lock().offload.as_ref()?.status())
    }

    /// Packets that the offload sent without saying so. There are none but those that another CPU registers this moment.
    pub fn unregistered(&self) -> Option<u64> {
        let mut state = self.state.lock();
        let sent = state.offload.as_ref()?.status().sent;
        state.drain_offload(Instant::now());
        Some(sent.saturating_sub(state.plane.downstream.stats().offloaded_packets))
    }

    fn transmit_now(&self, now: Instant) {
        with_batch(|batch| {
            self.transmit(now, batch);
            self.sender.flush(batch);
        });
    }
}

impl Owner for Shared {
    fn on_sent(&self, now: Instant) {
        self.transmit_now(now);
    }

    fn on_returned(&self, now: Instant, keys: &[StreamKey]) {
        {
            let mut state = self.state.lock();
            state.drain_offload(now);
            keys.iter().for_each(|key| state.plane.downstream.on_returned(*key));
        }
        self.transmit_now(now);
    }

    fn on_path(&self, now: Instant, path: &offload::Path) {
        if let Some(offload) = &mut self.state.lock().offload {
            offload.on_path(path);
        }
        self.transmit_now(now);
    }
}

impl State {
    /// Takes note of what the offload has sent.
    fn drain_offload(&mut self, now: Instant) {
        if let Some(offload) = &mut self.offload {
            offload.drain(now, &mut self.plane.downstream);
        }
    }

    /// Before something is sent from here: the offload sends nothing meanwhile.
    fn reclaim_budget(&mut self) {
        let downstream = &mut self.plane.downstream;
        if let Some(offload) = self.offload.as_mut().filter(|_| downstream.has_work()) {
            downstream.set_outstanding(offload.reclaim_budget());
        }
    }

    /// `self.ack` arrived; returns whether it names only packets that were sent.
    fn acknowledge(&mut self, times: Times) -> bool {
        self.drain_offload(times.now);
        let mut known = self.plane.downstream.on_ack(times.arrived, &self.ack).is_ok();
        if !known {
            // One that the offload was registering on another CPU; by now it has.
            self.drain_offload(times.now);
            known = self.plane.downstream.on_ack(times.arrived, &self.ack).is_ok();
        }
        if let Some(offload) = &mut self.offload {
            offload.on_ack(times.now, &self.ack.ranges, self.plane.path.remote);
        }
        known
    }

    fn on_max_data(&mut self, limit: u64, frame: &mut [u8]) {
        self.stack.on_max_data(limit, frame);
        self.plane.downstream.on_max_data(self.stack.other_credit());
    }

    /// Returns whether the stream may have such a limit.
    fn on_max_stream_data(&mut self, id: u64, limit: u64) -> bool {
        let known = self.plane.downstream.on_max_stream_data(id, limit).is_ok();
        if let Some(offload) = self.offload.as_ref().filter(|_| known) {
            offload.on_max_stream_data(id, limit);
        }
        known
    }

    /// Tells quinn about more connection credit when it has used half of what it had; returns whether it did.
    fn top_up(&mut self, payload: &mut BytesMut) -> bool {
        let Self { plane, stack, offload, .. } = self;
        let downstream = &mut plane.downstream;
        let take = |wanted| {
            if let Some(offload) = offload {
                downstream.set_outstanding(offload.reclaim_budget());
            }
            downstream.take_max_data(wanted)
        };
        stack.top_up(take, payload)
    }

    /// Notes what an acknowledgement without news looks like, if this was one.
    fn learn_ack(&mut self, size: usize, contents: &Contents) {
        if let (Some(offload), Some(delay), false) = (&mut self.offload, contents.ack, contents.others)
            && self.plane.downstream.is_steady()
        {
            offload.learn_ack(size, delay);
        }
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

/// One batch per thread, for what is sent from inside quinn's calls.
fn with_batch(work: impl FnOnce(&mut Batch)) {
    thread_local!(static BATCH: RefCell<Batch> = RefCell::new(Batch::default()));
    BATCH.with_borrow_mut(work);
}

#[cfg(test)]
#[path = "shared_tests.rs"]
pub(crate) mod tests;
