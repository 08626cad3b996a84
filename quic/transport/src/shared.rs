//! What all senders of one connection have in common: the plane, what the QUIC stack believes, and the offload.
//!
//! Everything that they must agree on is behind one lock, held for the length of a packet by whoever sends or receives
//! one. quinn calls in here with its own lock held; nothing in here calls quinn. Packet numbers come from one atomic word, since an
//! offload draws from it too. Where that word is, and everything that draws from it here, is behind the lock.

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
    keys::Suite,
    plane::downstream::{Ack, Downstream},
    received::{ReceivedNumbers, ReceivedStreams, Repeat},
};
use parking_lot::{MappedMutexGuard, Mutex, MutexGuard};
use tokio::sync::Notify;

use crate::{
    alarm::{Alarm, Turn},
    config::Config,
    numbers::{Numbers, Word},
    offload::{Claim, Offload, Worth, state::Offloaded},
    path::Path,
    paths::{Paths, Teller},
    plane::Plane,
    secrets::Secrets,
    send::{Batch, Handover, Sender},
    stack::{Stack, Times},
    stats::Counters,
    tap::Tap,
    traps::Traps,
    windows::Window,
};

/// The last key generation that is used: quinn cannot be told to stop, so the connection is closed well
/// before the 16 bits in the packet number word run out.
const LAST_GENERATION: u16 = u16::MAX - 16;

/// Streams of the peer whose bytes are noted, for each that quinn has under way: quinn is done with one that was stopped before all
/// its bytes have come.
const STREAMS_FACTOR: usize = 4;

/// What the driver has to do for a connection, outside of quinn's lock.
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
    /// An acknowledgement named a number that was left out, or the peer has more under way than it may.
    lies: bool,
    /// STREAM frames that repeat bytes.
    repeats: Vec<Repeat>,
}

pub(crate) struct Shared {
    state: Mutex<State>,
    /// To an offload, where there are any.
    claim: OnceLock<Box<dyn Claim>>,
    /// The one that it has, to be stopped without the state's lock.
    offload: Mutex<Option<Arc<dyn Offload>>>,
    /// The data plane may send: quinn has opened its streams, and the connection is open.
    open: AtomicBool,
    attention: AtomicU8,
    /// A task waits for the peer to answer from a new address.
    follows: AtomicBool,
    /// When [`Shared::on_timeout`] is due, in the driver's time.
    pub deadline: AtomicU64,
    pub alarm: Arc<Alarm>,
    /// When the driver looks at the connection.
    pub turn: Turn,
    pub secrets: Arc<Secrets>,
    pub sender: Arc<Sender>,
    /// Fires when [`Downstream::poll_event`] has something.
    pub events: Notify,
    /// Fires when quinn has sent stream data.
    pub control: Notify,
    pub counters: Counters,
    pub window: Window,
    /// Streams of the peer that may be under way.
    max_streams: usize,
    handover: Arc<Handover>,
    tap: Arc<Tap>,
    paths: Arc<Paths>,
    /// Of [`Tap`] and [`Paths`].
    session: AtomicU32,
}

struct State {
    numbers: Numbers,
    plane: Plane,
    stack: Stack,
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
    teller: Teller,
    /// Reused from ACK to ACK.
    ack: Ack,
}

impl Shared {
    /// `offloads`: the address of this end's socket and the suites that an offload supports, if the connection may have one.
    pub fn new(
        path: Path,
        window: Window,
        config: &Config,
        secrets: Arc<Secrets>,
        alarm: Arc<Alarm>,
        sender: Arc<Sender>,
        offloads: Option<(SocketAddr, &'static [Suite])>,
    ) -> Self {
        let state = State {
            numbers: Numbers::over(Word::own()),
            plane: Plane::new(config.downstream.clone(), config.max_packets_per_key, path, config.dscp),
            stack: Stack::new(),
            offload: offloads.map(|(local, suites)| Offloaded::new(local, suites)),
            traps: Traps::new(),
            control_streams: config.control_streams,
            received: ReceivedNumbers::default(),
            streams: None,
            unseen: false,
            teller: Teller::default(),
            ack: Ack { delay: Duration::ZERO, ranges: Vec::new(), ecn: None },
        };
        Self {
            state: Mutex::new(state),
            claim: OnceLock::new(),
            offload: Mutex::default(),
            open: AtomicBool::new(false),
            attention: AtomicU8::new(0),
            follows: AtomicBool::new(false),
            deadline: AtomicU64::new(u64::MAX),
            turn: Turn::new(Arc::clone(&alarm)),
            alarm,
            secrets,
            sender,
            events: Notify::new(),
            control: Notify::new(),
            counters: Counters::default(),
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

    /// How traces name the connection.
    pub fn set_session(&self, session: u32) {
        self.session.store(session, Ordering::Relaxed);
        let mut state = self.state.lock();
        // What was told was of nobody.
        state.teller = Teller::default();
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

    /// Nothing is sent any more: after CONNECTION_CLOSE only quinn has something to say.
    pub fn close(&self) {
        self.open.store(false, Ordering::SeqCst);
        if let Some(offload) = &*self.offload.lock() {
            offload.stop();
        }
        self.claim.get().into_iter().for_each(|claim| claim.end());
        self.deadline.store(u64::MAX, Ordering::Release);
    }

    /// The connection's claim to an offload.
    pub fn set_claim(&self, claim: Box<dyn Claim>) {
        let _ = self.claim.set(claim); // called once
    }

    /// Says what an offload is worth to the connection.
    pub fn set_worth(&self, worth: Worth) {
        let is_usable = self.state.lock().offload.as_ref().is_some_and(Offloaded::is_usable);
        if let Some(claim) = self.claim.get().filter(|_| is_usable) {
            claim.set_worth(worth);
        }
    }

    /// What the driver has to do, once.
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
        self.turn.by(0);
    }

    /// Has the driver run [`Shared::on_timeout`] now.
    fn hurry(&self) {
        self.set_deadline(0);
    }

    /// Tells whoever listens what the path carries now.
    fn tell(&self, state: &mut State, now: Instant) {
        let State { teller, plane, .. } = state;
        let session = self.session.load(Ordering::Relaxed);
        self.paths.tell(now, session, teller, || plane.downstream.estimate(now));
    }

    /// Before the lock is let go: says when there is something to do, and what the offload may do meanwhile.
    fn arm(&self, state: &mut State, now: Instant) {
        self.hand_out(state, now);
        if self.open.load(Ordering::Relaxed) {
            let at = state.plane.downstream.timeout().map_or(u64::MAX, |at| self.alarm.time(at));
            self.set_deadline(at);
        }
    }

    fn set_deadline(&self, at: u64) {
        self.deadline.store(at, Ordering::SeqCst);
        self.turn.by(at);
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
            offload.reclaim_budget(downstream);
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

/// One batch per thread, for what is sent from inside quinn's calls.
fn with_batch(work: impl FnOnce(&mut Batch)) {
    thread_local!(static BATCH: RefCell<Batch> = RefCell::new(Batch::default()));
    BATCH.with_borrow_mut(work);
}

#[cfg(test)]
pub(crate) mod tests;
