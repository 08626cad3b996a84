//! Engine `kernel`: media of the streams that were handed to it is forwarded at TC ingress, before any process
//! wakes (`millrace_bpf::relay`).
//!
//! [`Kernel`] is the engine; each connection that it sends on has a [`Line`]. The kernel says afterwards what it
//! sent, for all connections in one place: whoever looks there puts what belongs to others into their lines, where
//! each connection finds its own under its own lock. What has to wait for the kernel is done by one thread, which
//! calls the connection back. Another one computes keystreams ([`ahead`]).

mod ahead;
mod interfaces;
mod quiet;

use std::{
    any::Any,
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket},
    sync::{
        Arc, OnceLock, Weak,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
        mpsc,
    },
    time::{Duration, Instant},
};

use millrace_bpf::{
    crypto::QuicKeys,
    relay::{self as bpf, Counters, Forwarded, LegKey, Slot, Supply},
};
use millrace_proto::{quic::keys::Secret, relay::downstream::StreamKey};
use nix::time::{ClockId, clock_gettime};
use parking_lot::{Mutex, RwLock};
use thiserror::Error;
use tracing::{debug, warn};

use ahead::{Ahead, Computer};
pub use interfaces::Attached;
use interfaces::Interfaces;
pub use quiet::Quiet;

/// How often connections find out what was sent on them if nothing else happens there.
const TICK: Duration = Duration::from_millis(10);

/// How often interfaces are looked at: a system call each.
const LOOK: Duration = Duration::from_secs(1);

/// Receive buffer of a quiet socket, bytes.
const QUIET_BUFFER: usize = 4 << 20;

#[derive(Debug, Error)]
pub enum Error {
    #[error("the kernel's fast path cannot be loaded: {0}")]
    Load(#[source] millrace_bpf::Error),
    #[error("the kernel's fast path needs CAP_BPF, CAP_PERFMON and CAP_NET_ADMIN: {0}")]
    Denied(#[source] millrace_bpf::Error),
    #[error("there is no interface {name}: {source}")]
    Interface { name: String, source: io::Error },
    #[error("interface {name}: {source}")]
    Attach { name: String, source: millrace_bpf::Error },
    #[error("no interface is named to forward from, and none has a listen address of its own")]
    NoInterface,
    #[error("the kernel's fast path needs listen addresses with a port")]
    NoPort,
    #[error("interface {name} does not carry Ethernet frames: tunnels cannot be forwarded from")]
    NotEthernet { name: String },
    #[error("interface {name} is loopback: the kernel forwards between hosts")]
    Loopback { name: String },
    #[error("nothing was loaded at start-up: restart the relay with engine kernel")]
    NotLoaded,
    #[error("the engine has stopped")]
    Stopped,
    #[error("cannot start a thread: {0}")]
    Thread(#[source] io::Error),
}

/// What the engine is made for.
#[derive(Clone, Debug)]
pub struct Setup<'a> {
    /// UDP ports that the relay listens on.
    pub ports: Vec<u16>,
    /// Length of this end's connection IDs.
    pub id_len: usize,
    /// Of the calling thread's network namespace.
    pub interfaces: &'a [String],
    /// Attach again where somebody else detaches the program.
    pub reattach: bool,
    /// Memory for keystreams that are computed ahead.
    pub keystream_bytes: u64,
    pub limits: Limits,
}

/// How much the engine has room for, and how long it may take at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Connections that media arrives on.
    pub publishers: u32,
    /// Connections in all, each of which media may leave on.
    pub sessions: u32,
    /// Streams to subscribers at a time.
    pub streams: u32,
    /// Packets that one received packet may become in one run of the program.
    pub copies_per_run: u32,
    /// Runs that one received packet may take.
    pub runs: u32,
}

impl Default for Limits {
    fn default() -> Self {
        Self { publishers: 256, sessions: 4096, streams: 1 << 15, copies_per_run: 64, runs: 64 }
    }
}

/// The fast path, attached until it is dropped.
pub struct Kernel {
    relay: bpf::Relay,
    interfaces: Interfaces,
    /// By index of the downstream.
    lines: RwLock<Vec<Weak<Line>>>,
    clock: Clock,
    commands: mpsc::Sender<Command>,
    computer: Computer,
    quiet: RwLock<Vec<Weak<Quiet>>>,
    /// Streams that are handed to the kernel.
    legs: AtomicUsize,
    /// Registrations that no connection wanted any more.
    orphans: AtomicU64,
}

/// What is done on the engine's thread, since it waits for runs of the program.
enum Command {
    /// Also since the thread is in the network namespace that the engine was started in.
    Interfaces {
        names: Vec<String>,
        done: mpsc::SyncSender<Result<(), Error>>,
    },
    /// There are legs again.
    Wake,
    Recall {
        line: Arc<Line>,
        key: StreamKey,
        leg: Option<Leg>,
    },
    Path {
        line: Arc<Line>,
        path: Box<bpf::Path>,
    },
    Keys {
        line: Arc<Line>,
        generation: u16,
        keys: Box<QuicKeys>,
    },
}

/// A stream of an upstream connection, or the datagrams of a track, that the kernel may forward. Dropping it takes all its legs back.
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

/// The connection behind a line.
pub trait Owner: Send + Sync {
    /// Something was sent on the line.
    fn on_forwarded(&self, now: Instant);
    /// The kernel sends no more on these streams.
    fn on_returned(&self, now: Instant, keys: &[StreamKey]);
    /// The kernel sends there from now on.
    fn on_path(&self, now: Instant, path: &bpf::Path);
}

/// A connection that the kernel may send on, and whose packets it may open.
pub struct Line {
    pub downstream: bpf::Downstream,
    /// Once a stream of the peer may be forwarded.
    upstream: OnceLock<bpf::Upstream>,
    /// Of the connection's endpoint.
    quiet: Option<Arc<Quiet>>,
    seal: Ahead,
    open: Ahead,
    kernel: Arc<Kernel>,
    owner: OnceLock<Weak<dyn Owner>>,
    inbox: Mutex<Vec<Forwarded>>,
    /// The inbox is not empty.
    waiting: AtomicBool,
}

impl Kernel {
    /// Loads the fast path, and attaches it.
    pub fn start(setup: Setup<'_>) -> Result<Arc<Self>, Error> {
        let Setup { ports, id_len, interfaces: names, reattach, keystream_bytes, limits } = setup;
        let config = bpf::Config {
            ports,
            id_len,
            keystream_bytes,
            max_upstreams: limits.publishers,
            max_downstreams: limits.sessions,
            max_slots: limits.streams,
            max_legs: limits.streams,
            max_legs_per_run: limits.copies_per_run,
            max_runs: limits.runs,
            ..bpf::Config::default()
        };
        let relay = bpf::Relay::load(&config)
            .map_err(|error| if error.is_denied() { Error::Denied(error) } else { Error::Load(error) })?;
        let interfaces = Interfaces::new(reattach);
        interfaces.set(&relay, names)?;
        let (commands, todo) = mpsc::channel();
        let kernel = Arc::new(Self {
            relay,
            interfaces,
            lines: RwLock::default(),
            clock: Clock::new(),
            commands,
            computer: Computer::default(),
            quiet: RwLock::default(),
            legs: AtomicUsize::new(0),
            orphans: AtomicU64::new(0),
        });
        let weak = Arc::downgrade(&kernel);
        std::thread::Builder::new()
            .name("kernel-engine".to_owned())
            .spawn(move || work(&weak, &todo))
            .map_err(Error::Thread)?;
        Computer::start(&kernel)?;
        Ok(kernel)
    }

    /// The interfaces that media is to be forwarded from.
    pub fn attached(&self) -> Vec<Attached> {
        self.interfaces.list()
    }

    /// Whether anything can be forwarded at the moment.
    pub fn is_attached(&self) -> bool {
        self.interfaces.any()
    }

    /// Forwards from these interfaces and from no others; waits for that. Where the program is missing it is attached
    /// again.
    ///
    /// # Errors
    /// One of them cannot be attached to; then nothing has changed.
    pub fn set_interfaces(&self, names: Vec<String>) -> Result<(), Error> {
        let (done, result) = mpsc::sync_channel(1);
        self.send(Command::Interfaces { names, done });
        result.recv().unwrap_or(Err(Error::Stopped))
    }

    pub fn counters(&self) -> Option<Counters> {
        self.relay.counters().ok()
    }

    /// Streams that are handed to the kernel at the moment.
    pub fn legs(&self) -> usize {
        self.legs.load(Ordering::Relaxed)
    }

    /// A connection that begins, with packet number `number`; the kernel may not send anything on it yet.
    /// `quiet`: of its endpoint.
    pub fn line(
        self: &Arc<Self>,
        remote: SocketAddr,
        number: u64,
        quiet: Option<Arc<Quiet>>,
    ) -> Result<Arc<Line>, millrace_bpf::Error> {
        let nowhere = bpf::Path { local: remote, remote, id: Vec::new(), traffic_class: 0, flow_label: 0 };
        let downstream = self.relay.downstream(&nowhere, 0, number)?;
        let index = downstream.id().index as usize;
        let line = Arc::new(Line {
            downstream,
            upstream: OnceLock::new(),
            quiet,
            seal: Ahead::default(),
            open: Ahead::default(),
            kernel: Arc::clone(self),
            owner: OnceLock::new(),
            inbox: Mutex::default(),
            waiting: AtomicBool::new(false),
        });
        let mut lines = self.lines.write();
        if lines.len() <= index {
            lines.resize_with(index + 1, Weak::new);
        }
        lines[index] = Arc::downgrade(&line);
        Ok(line)
    }

    /// As [`bpf::Relay::set_tracing`].
    pub fn set_tracing(&self, tracing: Option<bpf::Tracing>) {
        self.relay.set_tracing(tracing);
    }

    /// As [`bpf::Relay::drain_events`].
    pub fn drain_events(&self, read: impl FnMut(bpf::Event)) -> u64 {
        self.relay.drain_events(read)
    }

    /// A socket for packets that arrive at one of `like`'s family and are no hurry. It is bound to the loopback
    /// address: nobody else has anything to send there.
    pub fn quiet(&self, like: IpAddr) -> Option<Arc<Quiet>> {
        let quiet = self.make_quiet(like);
        quiet.inspect_err(|error| debug!(%error, "every packet wakes the relay")).ok()
    }

    fn make_quiet(&self, like: IpAddr) -> Result<Arc<Quiet>, Box<dyn std::error::Error>> {
        let at: IpAddr = if like.is_ipv4() { Ipv4Addr::LOCALHOST.into() } else { Ipv6Addr::LOCALHOST.into() };
        let socket = UdpSocket::bind((at, 0))?;
        socket.set_nonblocking(true)?;
        // The kernel's limit may be lower, and says nothing then.
        socket2::SockRef::from(&socket).set_recv_buffer_size(QUIET_BUFFER)?;
        let quiet = Arc::new(Quiet::new(self.relay.quiet_socket(&socket)?, socket));
        self.quiet.write().push(Arc::downgrade(&quiet));
        Ok(quiet)
    }

    /// Packets that did not wake this process when they came.
    pub fn quiet_packets(&self) -> u64 {
        self.quiet.read().iter().filter_map(Weak::upgrade).map(|quiet| quiet.packets()).sum()
    }

    /// Has quiet sockets read; returns whether there was something.
    fn look_at_quiet(&self) -> bool {
        let sockets = self.quiet.read();
        sockets.iter().filter_map(Weak::upgrade).filter(|quiet| quiet.tick()).count() > 0
    }

    /// Puts everything that was registered into the lines' inboxes.
    fn sort(&self) {
        let lines = self.lines.read();
        self.relay.drain(|forwarded| {
            let line = lines.get(forwarded.downstream.index as usize).and_then(Weak::upgrade);
            match line.filter(|line| line.downstream.id() == forwarded.downstream) {
                Some(line) => {
                    line.inbox.lock().push(forwarded);
                    line.waiting.store(true, Ordering::Release);
                }
                None => drop(self.orphans.fetch_add(1, Ordering::Relaxed)),
            }
        });
    }

    /// All connections.
    fn lines(&self) -> Vec<Arc<Line>> {
        self.lines.read().iter().filter_map(Weak::upgrade).collect()
    }

    fn send(&self, command: Command) {
        // The thread lives as long as the engine.
        let _ = self.commands.send(command);
    }

    /// Tells connections what was sent on them, where nothing else has done so.
    fn tick(&self) {
        self.sort();
        let lines = self.lines();
        let waiting = lines.iter().filter(|line| line.waiting.load(Ordering::Acquire));
        let now = Instant::now();
        waiting.filter_map(|line| line.owner()).for_each(|owner| owner.on_forwarded(now));
    }
}

impl Drop for Kernel {
    fn drop(&mut self) {
        self.computer.wake();
    }
}

impl Line {
    /// To be called once, before anything is handed to the kernel.
    pub fn set_owner(&self, owner: Weak<dyn Owner>) {
        let _ = self.owner.set(owner); // there is one already
    }

    fn owner(&self) -> Option<Arc<dyn Owner>> {
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
            let _ = self.upstream.set(upstream); // another was faster
        }
        self.upstream().ok_or(millrace_bpf::Error::Full { what: "upstreams" })
    }

    /// The connection as one that media arrives on, if it is.
    pub fn upstream(&self) -> Option<&bpf::Upstream> {
        self.upstream.get()
    }

    /// Where the keystreams of packets came from that the kernel sealed.
    pub fn sealed(&self) -> Supplies {
        Supplies::new(|supply| self.downstream.supply(supply))
    }

    /// Of those that it opened.
    pub fn opened(&self) -> Supplies {
        Supplies::new(|supply| self.upstream.get().map_or(0, |upstream| upstream.supply(supply)))
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

impl Supplies {
    fn new(count: impl Fn(Supply) -> u64) -> Self {
        Self { ahead: count(Supply::Ahead), stale: count(Supply::Stale), dry: count(Supply::Dry) }
    }
}

impl Feed {
    /// Whether nobody waits for the stream but those whom the kernel sends it to.
    pub fn set_alone(&self, alone: bool) {
        if self.alone.swap(alone, Ordering::Relaxed) != alone {
            self.slot.lock().set_alone(alone);
        }
    }

    /// A stream of the connection behind `line`, which lives as long as `owner`.
    pub fn new(slot: Slot, line: Arc<Line>, owner: Arc<dyn Any + Send + Sync>) -> Arc<Self> {
        Arc::new(Self { slot: Mutex::new(slot), alone: AtomicBool::new(false), line, _upstream: owner })
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

/// The engine's thread, until the engine is gone.
fn work(kernel: &Weak<Kernel>, todo: &mpsc::Receiver<Command>) {
    let (mut looked, mut waiting) = (Instant::now(), false);
    loop {
        let idle = kernel.upgrade().is_none_or(|kernel| kernel.legs() == 0) && !waiting;
        let first = match todo.recv_timeout(if idle { LOOK } else { TICK }) {
            Ok(command) => Some(command),
            Err(mpsc::RecvTimeoutError::Timeout) => None,
            Err(mpsc::RecvTimeoutError::Disconnected) => return,
        };
        let Some(kernel) = kernel.upgrade() else { return };
        let mut returned = Vec::new();
        first.into_iter().chain(todo.try_iter()).for_each(|command| run(&kernel, command, &mut returned));
        if !returned.is_empty() {
            give_back(&kernel, returned);
        } else if kernel.relay.needs_settling() {
            settle(&kernel);
        }
        kernel.tick();
        waiting = kernel.look_at_quiet();
        if looked.elapsed() >= LOOK {
            kernel.interfaces.look(&kernel.relay);
            looked = Instant::now();
        }
    }
}

fn run(kernel: &Kernel, command: Command, returned: &mut Vec<(Arc<Line>, StreamKey)>) {
    match command {
        Command::Wake => {}
        Command::Interfaces { names, done } => {
            let _ = done.send(kernel.interfaces.set(&kernel.relay, &names)); // nobody waits any more
        }
        Command::Recall { line, key, leg } => {
            drop(leg);
            returned.push((line, key));
        }
        Command::Path { line, path } => match line.downstream.set_path(&path) {
            Ok(()) => line.owner().into_iter().for_each(|owner| owner.on_path(Instant::now(), &path)),
            Err(error) => debug!(?path, %error, "the kernel cannot send there"),
        },
        Command::Keys { line, generation, keys } => {
            if let Err(error) = line.downstream.set_keys(generation, &keys) {
                warn!(%error, "keys cannot be installed: this connection is served from userspace");
            }
        }
    }
}

fn settle(kernel: &Kernel) {
    if let Err(error) = kernel.relay.settle() {
        warn!(%error, "cannot wait for the kernel");
    }
}

/// Waits once for all of them.
fn give_back(kernel: &Kernel, mut returned: Vec<(Arc<Line>, StreamKey)>) {
    settle(kernel);
    returned.sort_by_key(|(line, _)| line.downstream.id().index);
    for group in returned.chunk_by(|(one, _), (other, _)| Arc::ptr_eq(one, other)) {
        let keys: Vec<_> = group.iter().map(|(_, key)| *key).collect();
        if let Some(owner) = group.first().and_then(|(line, _)| line.owner()) {
            owner.on_returned(Instant::now(), &keys);
        }
    }
}

/// `Instant` is of the same clock, CLOCK_MONOTONIC, but does not say its time.
struct Clock {
    base: Instant,
    base_ns: u64,
}

impl Clock {
    fn new() -> Self {
        let base_ns =
            clock_gettime(ClockId::CLOCK_MONOTONIC).map_or(0, |time| Duration::from(time).as_nanos());
        Self { base: Instant::now(), base_ns: base_ns as u64 }
    }

    /// Too late by the time that passed between the two readings in `new`.
    fn instant(&self, time_ns: u64) -> Instant {
        self.base + Duration::from_nanos(time_ns.saturating_sub(self.base_ns))
    }
}
