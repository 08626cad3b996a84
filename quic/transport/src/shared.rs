//! State that all senders of one connection share: the data plane, the QUIC stack's view, and the kernel offload.
//!
//! One lock protects everything that the senders must agree on. A sender or receiver holds this lock while it processes
//! one packet. quinn calls this module with its own lock held, so this module never calls quinn. Packet numbers come
//! from one atomic counter, because an offload draws from it without the lock. This process draws numbers, and replaces
//! the counter, only under the lock.

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

/// The last key generation that a connection uses. quinn cannot be stopped from updating keys, so the connection is
/// closed before the 16 bits of the generation overflow.
const LAST_GENERATION: u16 = u16::MAX - 16;

/// Factor by which tracked streams of the peer may exceed the number of open streams that quinn allows. quinn forgets a
/// stopped stream before all its bytes have arrived, so more streams have to be tracked.
const STREAMS_FACTOR: usize = 4;

/// Tasks that the driver has to do for a connection, as bits. These tasks must not run while quinn's lock is held.
pub(crate) mod attention {
    /// Read the peer's address from quinn.
    pub const ADDRESS: u8 = 1;
    /// Request a key update from quinn.
    pub const KEY_UPDATE: u8 = 2;
    /// Close the connection, because no key generation is left.
    pub const KEYS_EXHAUSTED: u8 = 4;
    /// Close the connection, because the peer acknowledges nothing.
    pub const UNANSWERED: u8 = 8;
    /// Set quinn's receive window.
    pub const WINDOW: u8 = 16;
}

/// The size, arrival time and last bytes of a received packet that was decrypted.
#[derive(Clone, Copy)]
pub(crate) struct OpenedArrival {
    pub now: Instant,
    /// Size of the UDP payload, bytes.
    pub size: usize,
    /// The last bytes of the payload, by which a kernel offload identifies the packet.
    pub end: [u8; 8],
}

/// The contents of a packet that concern the data plane.
#[derive(Default)]
struct Contents {
    any: bool,
    /// Value of the ACK Delay field in the packet's last ACK frame; `None` if it has no ACK frame.
    ack: Option<u64>,
    /// True if the packet has frames other than ACK and PADDING.
    others: bool,
    /// True if an ACK frame acknowledged a skipped packet number, or the peer exceeded its limit of streams.
    lies: bool,
    /// STREAM frames with bytes that were received before.
    repeats: Vec<RepeatedFrame>,
}

/// The state that all senders of a connection share with quinn's crypto.
///
/// It is created for the handshake, when the data plane may not send. [`Self::open`] lets the data plane send, once.
/// [`Self::close`] stops it permanently. Lock order: quinn's own lock, then `state`, then `offload` or a
/// [`SendHandover`]. [`Self::close`] takes only the lock of `offload`, so it never waits for a thread that sends. Each
/// change of `state` is followed by [`Self::arm`], directly or in [`Self::transmit`]. Afterwards, while the connection
/// is open, `deadline` is not later than the data plane's next timeout, and the offload has the budget that the data
/// plane does not use.
///
/// `attention` and `follows` need no lock. Any thread may set bits of `attention`, and only the driver clears them.
/// `follows` is true while a task waits for the peer to answer a PATH_CHALLENGE from a new address, so that there is
/// only one such task.
pub(crate) struct SharedConnection {
    state: Mutex<SharedState>,
    /// The registration by which the connection may get a kernel offload, if the endpoint has an engine.
    claim: OnceLock<Box<dyn OffloadClaim>>,
    /// The current kernel offload, which can be stopped without the lock of `state`.
    offload: Mutex<Option<Arc<dyn Offload>>>,
    /// True while the data plane may send: quinn has opened its streams, and the connection is not closed.
    open: AtomicBool,
    attention: AtomicU8,
    /// True while a task waits for the peer to answer a PATH_CHALLENGE from a new address.
    follows: AtomicBool,
    /// The time at which [`SharedConnection::on_timeout`] is due, in ticks of the driver's alarm.
    pub deadline: AtomicU64,
    pub alarm: Arc<Alarm>,
    /// The time at which the endpoint's driver task serves this connection next.
    pub turn: AlarmTurn,
    pub secrets: Arc<HandshakeSecrets>,
    pub sender: Arc<BatchSender>,
    /// Notifies a waiting task that [`Downstream::poll_event`] has an event.
    pub events: Notify,
    /// Notifies a waiting task that quinn has sent stream data.
    pub control: Notify,
    pub counters: SeamCounters,
    pub window: ConnectionWindow,
    /// Largest number of the peer's streams that are tracked at a time.
    max_streams: usize,
    handover: Arc<SendHandover>,
    tap: Arc<Tap>,
    paths: Arc<PathReports>,
    /// The number by which [`Tap`] and [`PathReports`] identify the connection's MoQ session.
    session: AtomicU32,
}

struct SharedState {
    numbers: NumberAllocator,
    plane: Plane,
    stack: QuinnStack,
    offload: Option<Offloaded>,
    traps: Traps,
    /// Number of unidirectional streams that quinn opens. These streams have the smallest IDs.
    control_streams: u64,
    received: ReceivedNumbers,
    /// The received bytes of the peer's streams, on a connection that may have a kernel offload. Tracking begins when
    /// the handshake is complete, because quinn drops 1-RTT packets that arrive earlier.
    streams: Option<ReceivedStreams>,
    /// True if the kernel offload did not decrypt the packet being processed, because the packet took another path, or
    /// because the offload does not support the packet's form.
    unseen: bool,
    teller: PathReporter,
    /// One more than the largest packet number that the peer has acknowledged.
    acked: u64,
    /// Buffer that is reused for each ACK frame.
    ack: AckRanges,
}

impl SharedConnection {
    /// Creates the state of a connection. If the connection may have a kernel offload, `offloads` has the address of
    /// this endpoint's socket.
    pub fn new(
        path: PeerAddress,
        window: ConnectionWindow,
        config: &Config,
        secrets: Arc<HandshakeSecrets>,
        alarm: Arc<Alarm>,
        sender: Arc<BatchSender>,
        offloads: Option<SocketAddr>,
    ) -> Self {
        let state = SharedState {
            numbers: NumberAllocator::from_word(NumberWord::own()),
            plane: Plane::new(config.downstream.clone(), config.max_packets_per_key, path, config.dscp),
            stack: QuinnStack::new(),
            offload: offloads.map(Offloaded::new),
            traps: Traps::new(),
            control_streams: config.control_streams,
            received: ReceivedNumbers::default(),
            streams: None,
            unseen: false,
            teller: PathReporter::default(),
            acked: 0,
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

    /// Returns the number of the next packet.
    pub fn next_number(&self) -> u64 {
        self.state.lock().numbers.peek().1
    }

    /// Returns whether the peer has acknowledged packet `number` or a later one.
    pub fn is_acked(&self, number: u64) -> bool {
        self.state.lock().acked > number
    }

    /// Sets the number by which packet traces identify the MoQ session on this connection.
    pub fn set_session(&self, session: u32) {
        self.session.store(session, Ordering::Relaxed);
        let mut state = self.state.lock();
        // Path estimates that were reported before this call had no session number, so the estimate is reported again.
        state.teller = PathReporter::default();
        if let Some(offload) = &mut state.offload {
            offload.set_session(session);
        }
    }

    /// Sets this endpoint's address. Packets to the peer have to have the source address to which the peer connected.
    pub fn set_local(&self, local: Option<IpAddr>) {
        self.state.lock().plane.path.local = local;
    }

    pub fn open(&self) {
        self.open.store(true, Ordering::Release);
    }

    /// Stops the data plane and the kernel offload: after CONNECTION_CLOSE only quinn may send.
    pub fn close(&self) {
        // `hand_out` grants a budget and reads `open` afterwards. Since both accesses are sequentially consistent, at
        // least one of `hand_out` and `close` withdraws the budget.
        self.open.store(false, Ordering::SeqCst);
        if let Some(offload) = &*self.offload.lock() {
            offload.stop();
        }
        self.claim.get().into_iter().for_each(|claim| claim.end());
        self.deadline.store(u64::MAX, Ordering::Release);
    }

    /// Sets the registration by which the connection may get a kernel offload.
    pub fn set_claim(&self, claim: Box<dyn OffloadClaim>) {
        let _ = self.claim.set(claim); // only the first call sets the value; the error of later calls is ignored
    }

    /// Sets how valuable a kernel offload is for the connection.
    pub fn set_worth(&self, worth: Worth) {
        self.claim.get().into_iter().for_each(|claim| claim.set_worth(worth));
    }

    /// Removes and returns the driver's pending tasks, one bit each.
    pub fn take_attention(&self) -> u8 {
        self.attention.swap(0, Ordering::SeqCst)
    }

    /// Returns true if no task waits yet for the peer to answer a PATH_CHALLENGE from a new address. Then the caller
    /// has to start such a task.
    pub fn begin_following(&self) -> bool {
        !self.follows.swap(true, Ordering::AcqRel)
    }

    pub fn end_following(&self) {
        self.follows.store(false, Ordering::Release);
    }

    fn request(&self, what: u8) {
        // The task's bit is set before the driver is woken, so that the driver finds it.
        self.attention.fetch_or(what, Ordering::SeqCst);
        self.turn.wake_by(0);
    }

    /// Asks the driver to run [`SharedConnection::on_timeout`] now.
    fn hurry(&self) {
        self.set_deadline(0);
    }

    /// Reports the estimate of the path's bandwidth, delay and loss to the receivers from [`PathReports::listen`].
    fn tell(&self, state: &mut SharedState, now: Instant) {
        let SharedState { teller, plane, .. } = state;
        let session = self.session.load(Ordering::Relaxed);
        self.paths.tell(now, session, teller, || plane.downstream.estimate(now));
    }

    /// Sets the driver's deadline and the kernel offload's budget. This is called before the lock is released.
    fn arm(&self, state: &mut SharedState, now: Instant) {
        self.hand_out(state, now);
        if self.open.load(Ordering::Relaxed) {
            let at = state.plane.downstream.timeout().map_or(u64::MAX, |at| self.alarm.time(at));
            self.set_deadline(at);
        }
    }

    fn set_deadline(&self, at: u64) {
        // The deadline is stored before the driver is woken, so that the driver reads it.
        self.deadline.store(at, Ordering::SeqCst);
        self.turn.wake_by(at);
    }
}

impl SharedState {
    /// Processes the kernel offload's reports of sent packets.
    fn drain_offload(&mut self, now: Instant) {
        if let Some(offload) = &mut self.offload {
            offload.drain(now, &mut self.plane.downstream);
        }
    }

    /// Reclaims the kernel offload's budget if the data plane has data to send. This is called before the data plane
    /// sends.
    fn reclaim_budget(&mut self) {
        let downstream = &mut self.plane.downstream;
        if let Some(offload) = self.offload.as_mut().filter(|_| downstream.has_work()) {
            offload.reclaim_budget(downstream);
        }
    }

    /// Processes the ACK frame in `self.ack`. Returns whether it acknowledges only packets that were sent.
    fn acknowledge(&mut self, times: AckTimes) -> bool {
        self.drain_offload(times.now);
        let mut known = self.plane.downstream.on_ack(times.arrived, &self.ack).is_ok();
        if !known {
            // The frame may acknowledge a packet whose report the kernel offload was just writing on another CPU. That
            // report is complete by now, so the reports are read again.
            self.drain_offload(times.now);
            known = self.plane.downstream.on_ack(times.arrived, &self.ack).is_ok();
        }
        if let Some(offload) = &mut self.offload {
            offload.on_ack(times.now, &self.ack.ranges, self.plane.path.remote);
        }
        known
    }

    /// Processes the kernel offload's reports if a frame of the peer names an unknown stream, because the offload may
    /// have opened that stream.
    fn know_stream(&mut self, now: Instant, id: u64) {
        if self.offload.is_some() && !self.plane.downstream.knows(id) {
            self.drain_offload(now);
        }
        if !self.plane.downstream.knows(id) {
            // The kernel offload may have been writing the report on another CPU, so the reports are read once more.
            self.drain_offload(now);
        }
    }

    fn on_max_data(&mut self, limit: u64, frame: &mut [u8]) {
        self.stack.on_max_data(limit, frame);
        self.plane.downstream.on_max_data(self.stack.other_credit());
    }

    /// Processes a MAX_STREAM_DATA frame. Returns false if the stream was never opened.
    fn on_max_stream_data(&mut self, id: u64, limit: u64) -> bool {
        let known = self.plane.downstream.on_max_stream_data(id, limit).is_ok();
        if let Some(offload) = self.offload.as_ref().filter(|_| known) {
            offload.on_max_stream_data(id, limit);
        }
        known
    }

    /// Adds a MAX_DATA frame for quinn to the payload once quinn has used half of its credit. Returns whether a frame
    /// was added.
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

    /// If this packet only had an ACK that requires no action, notes its size, so that later packets of this size need
    /// not wake the process.
    fn learn_ack(&mut self, size: usize, contents: &Contents) {
        if let (Some(offload), Some(delay), false) = (&mut self.offload, contents.ack, contents.others)
            && self.plane.downstream.is_steady()
        {
            offload.learn_ack(size, delay);
        }
    }
}

/// Calls `work` with this thread's packet batch, which is used when packets are sent during calls from quinn.
fn with_batch(work: impl FnOnce(&mut PacketBatch)) {
    thread_local!(static BATCH: RefCell<PacketBatch> = RefCell::new(PacketBatch::default()));
    BATCH.with_borrow_mut(work);
}

#[cfg(test)]
pub(crate) mod tests;
