//! Engine `kernel`: media of the streams that were handed to it is forwarded at TC ingress, before any process
//! wakes (`millrace_bpf::relay`).
//!
//! [`Kernel`] is the engine; each connection that it sends on has a [`Line`]. The kernel says afterwards what it
//! sent, for all connections in one place: whoever looks there puts what belongs to others into their lines, where
//! each connection finds its own under its own lock. What has to wait for the kernel is done by one thread, which
//! calls the connection back. Another one computes keystreams ([`ahead`]).

mod ahead;
mod interfaces;
mod line;
mod quiet;

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket},
    sync::{
        Arc, Weak,
        atomic::{AtomicU64, AtomicUsize, Ordering},
        mpsc,
    },
    time::{Duration, Instant},
};

use millrace_bpf::{
    clock::monotonic_ns,
    crypto::QuicKeys,
    relay::{self as bpf, Counters},
};
use millrace_proto::relay::downstream::StreamKey;
use nix::sys::socket::{getsockopt, setsockopt, sockopt};
use parking_lot::RwLock;
use thiserror::Error;
use tracing::{debug, warn};

use ahead::Computer;
pub use interfaces::Attached;
use interfaces::Interfaces;
pub use line::{Feed, Leg, Line, Owner, Supplies};
pub use quiet::Quiet;

/// How often connections find out what was sent on them if nothing else happens there.
const TICK: Duration = Duration::from_millis(10);

/// The same while packets come fast. A publisher's congestion window may be all that waits in a quiet socket, and a
/// round trip as long as this then.
const FAST_TICK: Duration = Duration::from_millis(2);

/// Packets of publishers that wait in a quiet socket, from which on they come fast: of one some 1000 in a second.
const FAST: u64 = 8;

/// How often interfaces are looked at: a system call each.
const LOOK: Duration = Duration::from_secs(1);

/// Receive buffer of a quiet socket, bytes.
const QUIET_BUFFER: usize = 4 << 20;

/// What a packet takes of it at most: two pages of the network card's, and what describes it.
const QUIET_PACKET: usize = 4096 + 256;

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
        let line = Arc::new(Line::new(Arc::clone(self), downstream, quiet));
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
        // Who may attach programs may also go beyond the system's limit; the buffer says what it came to.
        let forced = setsockopt(&socket, sockopt::RcvBufForce, &QUIET_BUFFER);
        forced.or_else(|_| setsockopt(&socket, sockopt::RcvBuf, &QUIET_BUFFER))?;
        let room = getsockopt(&socket, sockopt::RcvBuf)? / QUIET_PACKET;
        let quiet = Arc::new(Quiet::new(self.relay.quiet_socket(&socket, room as u64)?, socket));
        self.quiet.write().push(Arc::downgrade(&quiet));
        Ok(quiet)
    }

    /// Packets that did not wake this process when they came.
    pub fn quiet_packets(&self) -> u64 {
        self.quiet.read().iter().filter_map(Weak::upgrade).map(|quiet| quiet.packets()).sum()
    }

    /// Packets that were lost since the socket for those had no room.
    pub fn quiet_dropped(&self) -> u64 {
        self.quiet.read().iter().filter_map(Weak::upgrade).map(|quiet| quiet.dropped()).sum()
    }

    /// When the packet arrived that ends with these bytes and was read now: before that, if it waited in a quiet
    /// socket.
    fn arrived(&self, now: Instant, end: [u8; 8]) -> Instant {
        self.relay.arrival(end).and_then(|at| self.clock.before(now, at)).unwrap_or(now)
    }

    /// Has quiet sockets read where something waits; returns the most packets of publishers that waited in one.
    fn look_at_quiet(&self) -> Option<u64> {
        let sockets = self.quiet.read();
        sockets.iter().filter_map(Weak::upgrade).filter_map(|quiet| quiet.tick()).max()
    }

    /// Puts everything that was registered into the lines' inboxes.
    fn sort(&self) {
        let lines = self.lines.read();
        self.relay.drain(|forwarded| {
            let line = lines.get(forwarded.downstream.index as usize).and_then(Weak::upgrade);
            match line.filter(|line| line.downstream.id() == forwarded.downstream) {
                Some(line) => line.put(forwarded),
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
        let waiting = lines.iter().filter(|line| line.is_waiting());
        let now = Instant::now();
        waiting.filter_map(|line| line.owner()).for_each(|owner| owner.on_forwarded(now));
    }
}

impl Drop for Kernel {
    fn drop(&mut self) {
        self.computer.wake();
    }
}

/// The engine's thread, until the engine is gone.
fn work(kernel: &Weak<Kernel>, todo: &mpsc::Receiver<Command>) {
    let (mut looked, mut needed, mut waiting) = (Instant::now(), Instant::now(), None);
    loop {
        // Quiet packets come for some time after the last stream.
        let idle = needed.elapsed() > LOOK;
        let tick = match waiting {
            Some(FAST..) => FAST_TICK,
            _ if idle => LOOK,
            _ => TICK,
        };
        let first = match todo.recv_timeout(tick) {
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
        if waiting.is_some() || kernel.legs() > 0 {
            needed = Instant::now();
        }
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

/// Microseconds.
const MOST_WAITING: u32 = 1_000_000;

/// `Instant` is of the same clock, CLOCK_MONOTONIC, but does not say its time.
struct Clock {
    base: Instant,
    base_ns: u64,
}

impl Clock {
    fn new() -> Self {
        let base_ns = monotonic_ns();
        Self { base: Instant::now(), base_ns }
    }

    /// Too late by the time that passed between the two readings in `new`.
    fn instant(&self, time_ns: u64) -> Instant {
        self.base + Duration::from_nanos(time_ns.saturating_sub(self.base_ns))
    }

    /// The time not long before `now` that is `micros` microseconds, modulo 2^32.
    fn before(&self, now: Instant, micros: u32) -> Option<Instant> {
        let now_ns = u128::from(self.base_ns) + now.saturating_duration_since(self.base).as_nanos();
        let passed = ((now_ns / 1000) as u32).wrapping_sub(micros);
        // Nothing waits for longer than that: another packet ended with the same bytes.
        (passed <= MOST_WAITING).then(|| now.checked_sub(Duration::from_micros(passed.into()))).flatten()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_in_32_bits_is_found_again() {
        let clock = Clock { base: Instant::now(), base_ns: 1_500 };
        let at = |micros| clock.base + Duration::from_micros(micros);
        let wraps = 1 << 32;
        for (now, micros, want) in [
            (at(9), 7, Some(at(6))),
            (at(9), 10, Some(at(9))),
            (at(wraps + 9), 7, Some(at(wraps + 6))),
            (at(wraps + 9), u32::MAX, Some(at(wraps - 2))),
            (at(MOST_WAITING.into()), 1, Some(at(0))),
            (at(MOST_WAITING.into()), 0, None),
            (at(9), 11, None),
        ] {
            assert_eq!(clock.before(now, micros), want, "{micros}");
        }
    }
}
