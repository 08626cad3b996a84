//! State that all senders of one connection share: the plane, the QUIC stack's view, and the offload.
//!
//! One lock protects everything that they must agree on. A sender or receiver holds it for the length of a packet. quinn calls in here with
//! its own lock held; nothing in here calls quinn. Packet numbers come from one atomic word, since an offload draws from it too. The
//! location of that word is behind the lock, and so is everything in this process that draws from it.

mod handshake;
mod offloading;
mod receiving;
mod sending;

use std::{
    cell::RefCell,
    net::{IpAddr, SocketAddr},
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use bytes::BytesMut;
use millrace_quic::{
    keys::KeySuite,
    plane::downstream::{AckRanges, Downstream},
    received::{ReceivedNumbers, ReceivedStreams, RepeatedFrame},
};
use parking_lot::{MappedMutexGuard, Mutex, MutexGuard};
use tokio::sync::Notify;

use crate::{
    alarm::{Alarm, AlarmTurn},
    config::Config,
    numbers::{NumberAllocator, NumberWord},
    offload::{Offload, OffloadClaim, Worth, state::Offloaded},
    path::PeerAddress,
    paths::{PathReporter, PathReports},
    plane::Plane,
    secrets::HandshakeSecrets,
    send::{BatchSender, PacketBatch, SendHandover},
    stack::{AckTimes, QuinnStack},
    stats::SeamCounters,
    tap::Tap,
    traps::Traps,
    windows::ConnectionWindow,
};

/// The last key generation that is used: quinn cannot be told to stop, so the connection is closed well
/// before the 16 bits in the packet number word run out.
const LAST_GENERATION: u16 = u16::MAX - 16;

/// Streams of the peer whose bytes are noted, for each that quinn has under way: quinn is done with one that was stopped before all
/// its bytes have come.
const STREAMS_FACTOR: usize = 4;

/// The driver's tasks for a connection, which are done outside of quinn's lock.
pub(crate) mod attention {
    /// Ask quinn where the peer is.
    pub const ADDRESS: u8 = 1;
    /// Ask quinn for new keys.
    pub const KEY_UPDATE: u8 = 2;
    /// Close: no key generation is left.
    pub const KEYS_EXHAUSTED: u8 = 4;
    /// Close: the peer acknowledges nothing.
    pub const UNANSWERED: u8 = 8;
    /// Tell quinn how large the receive window is.
    pub const WINDOW: u8 = 16;
}

/// A packet that was opened.
#[derive(Clone, Copy)]
pub(crate) struct OpenedArrival {
    pub now: Instant,
    /// UDP payload, bytes.
    pub size: usize,
    /// The last bytes of it, by which an offload knows it.
    pub end: [u8; 8],
}

/// The contents of a packet that concern the data plane.
#[derive(Default)]
struct Contents {
    any: bool,
    /// ACK Delay of the last acknowledgement.
    ack: Option<u64>,
    /// There was more than acknowledgements and PADDING.
    others: bool,
    /// An acknowledgement named a number that was left out, or the peer has more under way than it may.
    lies: bool,
    /// STREAM frames that repeat bytes.
    repeats: Vec<RepeatedFrame>,
}

/// The state that both senders of a connection share with quinn's crypto.
///
/// It begins with the handshake, closed to the data plane. [`Self::open`] lets the data plane send, once. [`Self::close`] ends that for good.
/// Lock order: quinn's own lock, then `state`, then `offload` or a [`SendHandover`]. [`Self::close`] needs no more than `offload`, so it never waits
/// for a thread that sends. A change of `state` ends with [`Self::arm`], at once or in the [`Self::transmit`] that follows. While the connection
/// is open, `deadline` is then no later than the plane's next timeout, and the offload's budget is what the plane does not use.
///
/// `attention` and `follows` need no lock. The bits of `attention` are set by anybody and taken by the driver alone. `follows` is set by
/// whoever starts to follow the peer to a new address, so that one task does.
pub(crate) struct SharedConnection {
    state: Mutex<SharedState>,
    /// The claim to an offload, where there are any.
    claim: OnceLock<Box<dyn OffloadClaim>>,
    /// The current offload, to be stopped without the state's lock.
    offload: Mutex<Option<Arc<dyn Offload>>>,
    /// The data plane may send: quinn has opened its streams, and the connection is open.
    open: AtomicBool,
    attention: AtomicU8,
    /// A task waits for the peer to answer from a new address.
    follows: AtomicBool,
    /// The time when [`SharedConnection::on_timeout`] is due, on the driver's clock.
    pub deadline: AtomicU64,
    pub alarm: Arc<Alarm>,
    /// The connection's turn at the driver.
    pub turn: AlarmTurn,
    pub secrets: Arc<HandshakeSecrets>,
    pub sender: Arc<BatchSender>,
    /// Fires when [`Downstream::poll_event`] has something.
    pub events: Notify,
    /// Fires when quinn has sent stream data.
    pub control: Notify,
    pub counters: SeamCounters,
    pub window: ConnectionWindow,
    /// Streams of the peer that may be under way.
    max_streams: usize,
    handover: Arc<SendHandover>,
    tap: Arc<Tap>,
    paths: Arc<PathReports>,
    /// The session's number in [`Tap`] and [`PathReports`].
    session: AtomicU32,
}

struct SharedState {
    numbers: NumberAllocator,
    plane: Plane,
    stack: QuinnStack,
    offload: Option<Offloaded>,
    traps: Traps,
    /// Unidirectional streams that quinn opens, the first ones.
    control_streams: u64,
    received: ReceivedNumbers,
    /// The peer's streams, of a connection that may have an offload, from when the handshake is complete: quinn drops what it opens
    /// before.
    streams: Option<ReceivedStreams>,
    /// The packet that is being taken was not opened by the offload: it came by another way, or in a form that the offload does not
    /// understand.
    unseen: bool,
    teller: PathReporter,
    /// Reused from ACK to ACK.
    ack: AckRanges,
}

impl SharedConnection {
    /// `offloads`: the address of this end's socket and the suites that an offload supports, if the connection may have one.
    pub fn new(
        path: PeerAddress,
        window: ConnectionWindow,
        config: &Config,
        secrets: Arc<HandshakeSecrets>,
        alarm: Arc<Alarm>,
        sender: Arc<BatchSender>,
        offloads: Option<(SocketAddr, &'static [KeySuite])>,
    ) -> Self {
        let state = SharedState {
            numbers: NumberAllocator::from_word(NumberWord::own()),
            plane: Plane::new(config.downstream.clone(), config.max_packets_per_key, path, config.dscp),
            stack: QuinnStack::new(),
            offload: offloads.map(|(local, suites)| Offloaded::new(local, suites)),
            traps: Traps::new(),
            control_streams: config.control_streams,
            received: ReceivedNumbers::default(),
            streams: None,
            unseen: false,
            teller: PathReporter::default(),
            ack: AckRanges { delay: Duration::ZERO, ranges: Vec::new(), ecn: None },
        };
        Self {
            state: Mutex::new(state),
            claim: OnceLock::new(),
            offload: Mutex::default(),
            open: AtomicBool::new(false),
            attention: AtomicU8::new(0),
            follows: AtomicBool::new(false),
            deadline: AtomicU64::new(u64::MAX),
            turn: AlarmTurn::new(Arc::clone(&alarm)),
            alarm,
            secrets,
            sender,
            events: Notify::new(),
            control: Notify::new(),
            counters: SeamCounters::default(),
            window,
            max_streams: STREAMS_FACTOR * config.max_uni_streams as usize,
            handover: Arc::default(),
            tap: Arc::clone(&config.tap),
            paths: Arc::clone(&config.paths),
            session: AtomicU32::new(0),
        }
    }

    pub fn downstream(&self) -> MappedMutexGuard<'_, Downstream> {
        MutexGuard::map(self.state.lock(), |state| &mut state.plane.downstream)
    }

    /// Sets the session's number in traces.
    pub fn set_session(&self, session: u32) {
        self.session.store(session, Ordering::Relaxed);
        let mut state = self.state.lock();
        // Earlier reports were for no session.
        state.teller = PathReporter::default();
        if let Some(offload) = &mut state.offload {
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

    /// Stops the data plane and the offload: after CONNECTION_CLOSE only quinn may send.
    pub fn close(&self) {
        self.open.store(false, Ordering::SeqCst);
        if let Some(offload) = &*self.offload.lock() {
            offload.stop();
        }
        self.claim.get().into_iter().for_each(|claim| claim.end());
        self.deadline.store(u64::MAX, Ordering::Release);
    }

    /// The connection's claim to an offload.
    pub fn set_claim(&self, claim: Box<dyn OffloadClaim>) {
        let _ = self.claim.set(claim); // called once
    }

    /// Says what an offload is worth to the connection.
    pub fn set_worth(&self, worth: Worth) {
        let is_usable = self.state.lock().offload.as_ref().is_some_and(Offloaded::is_usable);
        if let Some(claim) = self.claim.get().filter(|_| is_usable) {
            claim.set_worth(worth);
        }
    }

    /// Takes the driver's pending tasks, a bit each.
    pub fn take_attention(&self) -> u8 {
        self.attention.swap(0, Ordering::SeqCst)
    }

    /// Returns whether nobody waits yet for the peer to answer from a new address: the caller does from now on.
    pub fn begin_following(&self) -> bool {
        !self.follows.swap(true, Ordering::AcqRel)
    }

    pub fn end_following(&self) {
        self.follows.store(false, Ordering::Release);
    }

    fn request(&self, what: u8) {
        self.attention.fetch_or(what, Ordering::SeqCst);
        self.turn.wake_by(0);
    }

    /// Asks the driver to run [`SharedConnection::on_timeout`] now.
    fn hurry(&self) {
        self.set_deadline(0);
    }

    /// Reports the path's estimate to listeners.
    fn tell(&self, state: &mut SharedState, now: Instant) {
        let SharedState { teller, plane, .. } = state;
        let session = self.session.load(Ordering::Relaxed);
        self.paths.tell(now, session, teller, || plane.downstream.estimate(now));
    }

    /// Sets the driver's deadline, and the offload's budget. Called before the lock is released.
    fn arm(&self, state: &mut SharedState, now: Instant) {
        self.hand_out(state, now);
        if self.open.load(Ordering::Relaxed) {
            let at = state.plane.downstream.timeout().map_or(u64::MAX, |at| self.alarm.time(at));
            self.set_deadline(at);
        }
    }

    fn set_deadline(&self, at: u64) {
        self.deadline.store(at, Ordering::SeqCst);
        self.turn.wake_by(at);
    }
}

impl SharedState {
    /// Takes note of what the offload has sent.
    fn drain_offload(&mut self, now: Instant) {
        if let Some(offload) = &mut self.offload {
            offload.drain(now, &mut self.plane.downstream);
        }
    }

    /// Stops the offload from sending. Called before something is sent from here.
    fn reclaim_budget(&mut self) {
        let downstream = &mut self.plane.downstream;
        if let Some(offload) = self.offload.as_mut().filter(|_| downstream.has_work()) {
            offload.reclaim_budget(downstream);
        }
    }

    /// `self.ack` arrived; returns whether it names only packets that were sent.
    fn acknowledge(&mut self, times: AckTimes) -> bool {
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

    /// The peer names a stream, which the offload may have opened.
    fn know_stream(&mut self, now: Instant, id: u64) {
        if self.offload.is_some() && !self.plane.downstream.knows(id) {
            self.drain_offload(now);
        }
        if !self.plane.downstream.knows(id) {
            // Another CPU was registering something.
            self.drain_offload(now);
        }
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
                offload.reclaim_budget(downstream);
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

/// Calls `work` with this thread's batch, for packets that are sent from inside quinn's calls.
fn with_batch(work: impl FnOnce(&mut PacketBatch)) {
    thread_local!(static BATCH: RefCell<PacketBatch> = RefCell::new(PacketBatch::default()));
    BATCH.with_borrow_mut(work);
}

#[cfg(test)]
pub(crate) mod tests;
