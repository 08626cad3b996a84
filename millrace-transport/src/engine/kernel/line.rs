//! Connections as the engine sees them, and the streams that it forwards from one to others.

use std::{
    any::Any,
    sync::{
        Arc, OnceLock, Weak,
        atomic::{AtomicBool, Ordering},
    },
    time::Instant,
};

use millrace_bpf::{
    crypto::QuicKeys,
    relay::{self as bpf, Forwarded, LegKey, Slot, Supply},
};
use millrace_proto::{quic::keys::Secret, relay::downstream::StreamKey};
use parking_lot::Mutex;
use tracing::{debug, warn};

use super::{Command, Kernel, Quiet, ahead::Ahead};

/// A connection that the kernel may send on, and whose packets it may open.
pub struct Line {
    pub downstream: bpf::Downstream,
    /// Once a stream of the peer may be forwarded.
    upstream: OnceLock<bpf::Upstream>,
    /// Of the connection's endpoint.
    quiet: Option<Arc<Quiet>>,
    pub(super) seal: Ahead,
    pub(super) open: Ahead,
    kernel: Arc<Kernel>,
    owner: OnceLock<Weak<dyn Owner>>,
    inbox: Mutex<Vec<Forwarded>>,
    /// The inbox is not empty.
    waiting: AtomicBool,
}

/// The connection behind a line.
pub trait Owner: Send + Sync {
    /// Something was sent on the line.
    fn on_forwarded(&self, now: Instant);
    /// The kernel sends no more on these streams.
    fn on_returned(&self, now: Instant, keys: &[StreamKey]);
    /// The kernel sends there from now on.
    fn on_path(&self, now: Instant, path: &bpf::Path);
}

/// A stream of an upstream connection, or the datagrams of a track, that the kernel may forward. Dropping it takes
/// all its legs back.
pub struct Feed {
    // Before the connection, whose place in the kernel it names.
    slot: Mutex<Slot>,
    alone: AtomicBool,
    line: Arc<Line>,
    _upstream: Arc<dyn Any + Send + Sync>,
}

/// A stream, or the datagrams of a track, handed to the kernel until this is dropped.
pub struct Leg {
    feed: Weak<Feed>,
    key: LegKey,
    from: Arc<Line>,
    to: Arc<Line>,
}

/// Packets by where their keystream came from ([`Supply`]).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Supplies {
    pub ahead: u64,
    pub stale: u64,
    pub dry: u64,
}

impl Line {
    pub(super) fn new(kernel: Arc<Kernel>, downstream: bpf::Downstream, quiet: Option<Arc<Quiet>>) -> Self {
        quiet.iter().for_each(|quiet| downstream.set_quiet_socket(&quiet.handle));
        Self {
            downstream,
            upstream: OnceLock::new(),
            quiet,
            seal: Ahead::default(),
            open: Ahead::default(),
            kernel,
            owner: OnceLock::new(),
            inbox: Mutex::default(),
            waiting: AtomicBool::new(false),
        }
    }

    /// To be called once, before anything is handed to the kernel.
    pub fn set_owner(&self, owner: Weak<dyn Owner>) {
        let _ = self.owner.set(owner); // there is one already
    }

    pub(super) fn owner(&self) -> Option<Arc<dyn Owner>> {
        self.owner.get()?.upgrade()
    }

    /// Whether the kernel forwards anything at the moment.
    pub fn is_served(&self) -> bool {
        self.kernel.is_attached()
    }

    /// Makes the kernel open the connection's packets, those from number `expected` on.
    pub fn open_from(&self, expected: u64) -> Result<&bpf::Upstream, millrace_bpf::Error> {
        if self.upstream.get().is_none() {
            let upstream = self.kernel.relay.upstream(expected)?;
            self.quiet.iter().for_each(|quiet| upstream.set_quiet_socket(&quiet.handle));
            self.downstream.remove_ids();
            let _ = self.upstream.set(upstream); // another was faster
        }
        self.upstream().ok_or(millrace_bpf::Error::Full { what: "upstreams" })
    }

    /// The connection as one that media arrives on, if it is.
    pub fn upstream(&self) -> Option<&bpf::Upstream> {
        self.upstream.get()
    }

    /// The peer's packets have this connection ID from now on.
    pub fn add_id(&self, id: &[u8]) {
        let added = match self.upstream() {
            Some(upstream) => upstream.add_id(id),
            None => self.downstream.add_id(id),
        };
        if let Err(error) = added {
            debug!(%error, "the kernel does not know a connection ID");
        }
    }

    pub fn remove_id(&self, id: &[u8]) {
        let removed = match self.upstream() {
            Some(upstream) => upstream.remove_id(id),
            None => self.downstream.remove_id(id),
        };
        if let Err(error) = removed {
            debug!(%error, "the kernel knows a connection ID still");
        }
    }

    /// When the packet arrived that ends with these bytes, which was read now.
    pub fn arrived(&self, now: Instant, end: [u8; 8]) -> Instant {
        self.kernel.arrived(now, end)
    }

    /// Has the quiet socket read if there is something; returns whether there was.
    pub fn read_quiet(&self) -> bool {
        self.quiet.as_ref().is_some_and(|quiet| quiet.tick().is_some())
    }

    /// Where the keystreams of packets came from that the kernel sealed.
    pub fn sealed(&self) -> Supplies {
        Supplies::new(|supply| self.downstream.supply(supply))
    }

    /// Of those that it opened.
    pub fn opened(&self) -> Supplies {
        Supplies::new(|supply| self.upstream.get().map_or(0, |upstream| upstream.supply(supply)))
    }

    /// Something was sent on the line, which [`Line::take`] will give.
    pub(super) fn put(&self, forwarded: Forwarded) {
        self.inbox.lock().push(forwarded);
        self.waiting.store(true, Ordering::Release);
    }

    /// Whether there is something to take.
    pub(super) fn is_waiting(&self) -> bool {
        self.waiting.load(Ordering::Acquire)
    }

    /// Takes what was sent on the line since the last call, each with the time when it was.
    pub fn take(&self, now: Instant, mut read: impl FnMut(Instant, Forwarded)) {
        self.kernel.sort();
        if self.waiting.swap(false, Ordering::AcqRel) {
            let forwarded = std::mem::take(&mut *self.inbox.lock());
            forwarded.into_iter().for_each(|one| read(self.kernel.clock.instant(one.time_ns).min(now), one));
        }
    }

    /// Hands a stream to the kernel. Never waits: where there is no room at the moment, it is an error.
    pub fn lend(self: &Arc<Self>, feed: &Arc<Feed>, leg: &bpf::Leg) -> Result<Leg, millrace_bpf::Error> {
        let added = feed.slot.lock().add(&self.downstream, leg);
        self.lent(feed, added)
    }

    /// Hands a track's datagrams to the kernel.
    pub fn lend_datagrams(
        self: &Arc<Self>,
        feed: &Arc<Feed>,
        leg: &bpf::Datagrams,
    ) -> Result<Leg, millrace_bpf::Error> {
        let added = feed.slot.lock().add_datagrams(&self.downstream, leg);
        self.lent(feed, added)
    }

    fn lent(
        self: &Arc<Self>,
        feed: &Arc<Feed>,
        added: Result<LegKey, millrace_bpf::Error>,
    ) -> Result<Leg, millrace_bpf::Error> {
        let key = match added {
            Err(error @ millrace_bpf::Error::Unsettled { .. }) => {
                self.kernel.send(Command::Wake);
                return Err(error);
            }
            added => added?,
        };
        if self.kernel.legs.fetch_add(1, Ordering::Relaxed) == 0 {
            self.kernel.send(Command::Wake);
        }
        if self.seal.add_stream() | feed.line.open.add_stream() {
            self.kernel.computer.wake();
        }
        Ok(Leg { feed: Arc::downgrade(feed), key, from: Arc::clone(&feed.line), to: Arc::clone(self) })
    }

    /// Takes a stream back: the kernel sends nothing more on it, save what it is about to send this very moment.
    /// [`Owner::on_returned`] says when that is over.
    pub fn recall(self: &Arc<Self>, key: StreamKey, leg: Option<Leg>) {
        if let Some(leg) = &leg {
            leg.set_max_offset(0);
        }
        self.kernel.send(Command::Recall { line: Arc::clone(self), key, leg });
    }

    /// Sends elsewhere; [`Owner::on_path`] says from when on.
    pub fn set_path(self: &Arc<Self>, path: bpf::Path) {
        self.kernel.send(Command::Path { line: Arc::clone(self), path: Box::new(path) });
    }

    /// Installs the keys of a generation to send with, in some moments. Until then the kernel does not use them.
    pub fn set_seal_keys(self: &Arc<Self>, generation: u16, keys: QuicKeys, secret: &Secret) {
        self.seal.set_keys(generation, secret);
        self.kernel.send(Command::Keys { line: Arc::clone(self), generation, keys: Box::new(keys) });
    }

    /// Installs the keys of a generation to open with, if the kernel opens the connection's packets.
    pub fn set_open_keys(
        &self,
        generation: u16,
        keys: &QuicKeys,
        secret: &Secret,
    ) -> Result<(), millrace_bpf::Error> {
        let Some(upstream) = self.upstream.get() else { return Ok(()) };
        self.open.set_keys(generation, secret);
        upstream.set_keys(generation, keys)
    }

    /// This end sends with new keys: what was computed ahead is stale.
    pub fn on_key_update(&self) {
        self.kernel.computer.wake();
    }

    /// The peer sends with keys of this generation.
    pub fn on_opened_generation(&self, generation: u16) {
        self.open.set_generation(generation);
        self.kernel.computer.wake();
    }
}

impl Feed {
    /// A stream of the connection behind `line`, which lives as long as `owner`.
    pub fn new(slot: Slot, line: Arc<Line>, owner: Arc<dyn Any + Send + Sync>) -> Arc<Self> {
        Arc::new(Self { slot: Mutex::new(slot), alone: AtomicBool::new(false), line, _upstream: owner })
    }

    /// Whether nobody waits for the stream but those whom the kernel sends it to.
    pub fn set_alone(&self, alone: bool) {
        if self.alone.swap(alone, Ordering::Relaxed) != alone {
            self.slot.lock().set_alone(alone);
        }
    }
}

impl Leg {
    pub fn is_of(&self, feed: &Arc<Feed>) -> bool {
        self.feed.as_ptr() == Arc::as_ptr(feed)
    }

    pub fn set_max_offset(&self, max: u64) {
        if let Some(feed) = self.feed.upgrade() {
            feed.slot.lock().set_max_offset(self.key, max);
        }
    }
}

impl Drop for Leg {
    fn drop(&mut self) {
        self.to.kernel.legs.fetch_sub(1, Ordering::Relaxed);
        self.to.seal.remove_stream();
        self.from.open.remove_stream();
        if let Some(feed) = self.feed.upgrade()
            && let Err(error) = feed.slot.lock().remove(self.key)
        {
            warn!(%error, "a stream cannot be taken back from the kernel");
        }
    }
}

impl Supplies {
    fn new(count: impl Fn(Supply) -> u64) -> Self {
        Self { ahead: count(Supply::Ahead), stale: count(Supply::Stale), dry: count(Supply::Dry) }
    }
}
