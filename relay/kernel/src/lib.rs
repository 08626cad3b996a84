//! Engine `kernel`: media of the streams that were delegated to it is forwarded at TC ingress, before any process
//! wakes (`crate::program`).
//!
//! [`Kernel`] is the engine; each connection that it sends on has a record in the kernel (`connection`), of which there are fewer than
//! connections (`records`). The kernel says
//! afterwards what it sent, for all connections in one ring: whoever looks there puts what belongs to others into their
//! inboxes, where each connection finds its own under its own lock. Where nobody looks, a task does (`ticker`). What has to
//! wait for the kernel is done by one thread (`worker`), which calls the connection back, and waits its turn in `queue`. Another
//! one computes keystreams (`computer`).
//!
//! `KernelConnection` is the transport's [`offload::Offload`], and writes to the program's handles itself. Types have a word of their own
//! in each layer: none in the trait, `Kernel` in the engine, `Record` in the handles. What the program's C has is in `program::intf`, under
//! the names of C without `relay_`, and is written with `intf::` everywhere.
//!
//! | what | trait, [`offload`] | engine | handle, [`program`] | memory, `intf` |
//! | --- | --- | --- | --- | --- |
//! | a connection | `Offload` | `KernelConnection` | `DownstreamRecord`, and `UpstreamRecord` once media arrives on it | `Downstream`, `Upstream` |
//! | a stream of the peer, or a track's datagrams | `Ingress` | `KernelIngress` | `SlotRecord`, `IngressRecord` while there are copies | `Slot`, `Ingress` |
//! | a place in a stream | `millrace_moq`'s `Position` | | `PositionRecord` | `State` |
//! | one subscriber's copy of a stream | `StreamCopy` | `KernelEgress` | `EgressRecord` | `Egress` |
//! | one subscriber's copy of datagrams | `DatagramCopy` | `KernelEgress` | `DatagramRecord` | `Egress` |
//! | one subscriber's copy of a stream that begins | `OpeningRequest`, of `OpeningTerms` | `KernelEgress` | `OpeningRecord` | `Egress` |
//! | streams of the peer that begin | `Openings` | `KernelOpenings` | `TrackRecord` | `Track` |
//! | which end opens a stream | `OpeningSide` | | `OpeningRecordSide` | |
//! | what became of a stream that began | | | `OpeningOutcome` | |

mod clock;
mod computer;
mod connection;
mod deferred;
mod ingress;
mod interfaces;
mod keystream;
mod offloading;
mod openings;
pub mod program;
mod queue;
mod records;
mod room;
mod socket;
mod ticker;
mod worker;

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket},
    sync::{
        Arc, Weak,
        atomic::{AtomicU64, AtomicUsize, Ordering},
        mpsc,
    },
    time::Instant,
};

use millrace_quic::keys::Suite;

use crate::program::{self as bpf, EgressOutcome, FrameOutcome, FurtherRun, OpeningOutcome, Outcome};
use millrace_transport::{
    offload::{self, Attached, Owner, Status},
    trace,
};
use nix::sys::socket::{getsockopt, setsockopt, sockopt};
use parking_lot::RwLock;
use quinn::{Runtime as _, TokioRuntime};
use thiserror::Error;
use tracing::debug;

use self::{
    clock::Clock,
    computer::Computer,
    connection::{Claimed, KernelConnection},
    deferred::Deferred,
    interfaces::Interfaces,
    queue::Queue,
    records::{Decision, Records},
    room::Room,
    socket::Socket,
    ticker::Ticker,
    worker::SetInterfaces,
};

/// Receive buffer of a deferred socket, bytes.
const DEFERRED_BUFFER: usize = 4 << 20;

/// What a packet takes of it at most: two pages of the network card's, and what describes it.
const DEFERRED_PACKET: usize = 4096 + 256;

#[derive(Debug, Error)]
pub enum Error {
    #[error("the kernel's fast path cannot be loaded: {0}")]
    Load(#[source] millrace_kernel::Error),
    #[error("the kernel's fast path needs CAP_BPF, CAP_PERFMON and CAP_NET_ADMIN: {0}")]
    Denied(#[source] millrace_kernel::Error),
    #[error("there is no interface {name}: {source}")]
    Interface { name: String, source: io::Error },
    #[error("interface {name}: {source}")]
    Attach { name: String, source: millrace_kernel::Error },
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
    /// Tracks for whose streams it may open streams to subscribers.
    pub tracks: u32,
    /// Packets that one received packet may become in one run of the program.
    pub copies_per_run: u32,
    /// Runs that one received packet may take.
    pub runs: u32,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            publishers: 256,
            sessions: 4096,
            streams: 1 << 15,
            tracks: 1 << 10,
            copies_per_run: 64,
            runs: 64,
        }
    }
}

/// The suites that the program has.
const SUITES: &[Suite] = &[Suite::ChaCha20Poly1305, Suite::Aes128Gcm];

/// Whoever may have a record.
#[derive(Clone)]
struct Claimant {
    owner: Weak<dyn Owner>,
    /// Packets that its endpoint reads later.
    deferred: Option<Arc<Deferred>>,
}

/// The fast path, attached until it is dropped.
pub struct Kernel {
    relay: bpf::Relay,
    interfaces: Interfaces,
    /// By index of the downstream.
    connections: RwLock<Vec<Weak<KernelConnection>>>,
    clock: Clock,
    commands: Arc<Queue<KernelConnection, SetInterfaces>>,
    records: Records<Claimant>,
    computer: Computer,
    ticker: Ticker,
    deferred: RwLock<Vec<Weak<Deferred>>>,
    /// Streams that are delegated to the kernel.
    streams: AtomicUsize,
    /// Streams that it may open.
    prepared: AtomicUsize,
    max_streams: u32,
    /// Registrations that no connection wanted any more.
    orphans: AtomicU64,
    room: Room,
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
            max_egresses: limits.streams,
            max_tracks: limits.tracks,
            max_copies_per_run: limits.copies_per_run,
            max_runs: limits.runs,
            ..bpf::Config::default()
        };
        let relay = bpf::Relay::load(&config)
            .map_err(|error| if error.is_denied() { Error::Denied(error) } else { Error::Load(error) })?;
        let interfaces = Interfaces::new(reattach);
        interfaces.set(&relay, names)?;
        let (commands, taker) = Queue::new();
        let kernel = Arc::new(Self {
            relay,
            interfaces,
            connections: RwLock::default(),
            clock: Clock::new(),
            commands,
            records: Records::new(limits.sessions as usize),
            computer: Computer::default(),
            ticker: Ticker::default(),
            deferred: RwLock::default(),
            streams: AtomicUsize::new(0),
            prepared: AtomicUsize::new(0),
            max_streams: limits.streams,
            orphans: AtomicU64::new(0),
            room: Room::default(),
        });
        let weak = Arc::downgrade(&kernel);
        std::thread::Builder::new()
            .name("kernel-engine".to_owned())
            .spawn(move || worker::work(&weak, &taker))
            .map_err(Error::Thread)?;
        Computer::start(&kernel)?;
        Ok(kernel)
    }

    /// Whether anything can be forwarded at the moment.
    fn is_attached(&self) -> bool {
        self.interfaces.any()
    }

    /// Forwards from these interfaces and from no others; waits for that. Where the program is missing it is attached
    /// again.
    ///
    /// # Errors
    /// One of them cannot be attached to; then nothing has changed.
    pub fn set_interfaces(&self, names: Vec<String>) -> Result<(), Error> {
        let (done, result) = mpsc::sync_channel(1);
        self.commands.order(SetInterfaces { names, done });
        result.recv().unwrap_or(Err(Error::Stopped))
    }

    /// Streams that are delegated to the kernel at the moment.
    fn streams(&self) -> usize {
        self.streams.load(Ordering::Relaxed)
    }

    /// Makes records for the connections to which they are worth most, and recalls those of others. Called by the engine's thread only.
    fn decide(self: &Arc<Self>) {
        let decided = self.records.decide(Instant::now());
        if decided.is_short {
            self.room
                .explain(&millrace_kernel::Error::Full { what: "downstreams" }, "sessions wait for a record");
        }
        for decision in decided.decisions {
            match decision {
                Decision::Grant(claim, claimant) => self.grant(claim, claimant),
                Decision::Recall(Claimant { owner, .. }) => {
                    owner.upgrade().into_iter().for_each(|owner| owner.on_offload_recalled(Instant::now()));
                }
            }
        }
    }

    /// Makes a record for a claim. If that has gone meanwhile, the record goes with it.
    fn grant(self: &Arc<Self>, claim: u64, claimant: Claimant) {
        let record = match self.record(claim, &claimant) {
            // Those of connections that have ended are free in a moment.
            Err(millrace_kernel::Error::Unsettled { .. }) => {
                worker::settle(self);
                self.record(claim, &claimant)
            }
            made => made,
        };
        match record {
            Ok(record) => {
                let owner = claimant.owner.upgrade();
                owner
                    .into_iter()
                    .for_each(|owner| owner.on_offload(Instant::now(), Arc::clone(&record) as _));
            }
            Err(error) => {
                self.room.explain(&error, "served from userspace");
                self.records.returned(claim);
            }
        }
    }

    /// Makes a record on which the kernel may not send anything yet.
    fn record(
        self: &Arc<Self>,
        claim: u64,
        claimant: &Claimant,
    ) -> Result<Arc<KernelConnection>, millrace_kernel::Error> {
        let at = SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0));
        let nowhere = bpf::Path { local: at, remote: at, id: Vec::new(), traffic_class: 0, flow_label: 0 };
        let downstream = self.relay.downstream(&nowhere, 0, 0)?;
        let index = downstream.id().index as usize;
        let connection =
            Arc::new(KernelConnection::new(Arc::clone(self), downstream, claim, claimant.clone()));
        let mut connections = self.connections.write();
        if connections.len() <= index {
            connections.resize_with(index + 1, Weak::new);
        }
        connections[index] = Arc::downgrade(&connection);
        Ok(connection)
    }

    /// A socket for packets that arrive at one of `like`'s family and need not wake this process. It is bound to the
    /// loopback address: nobody else has anything to send there.
    fn deferred_socket(self: &Arc<Self>, like: IpAddr) -> Result<Arc<Deferred>, Box<dyn std::error::Error>> {
        let at: IpAddr = if like.is_ipv4() { Ipv4Addr::LOCALHOST.into() } else { Ipv6Addr::LOCALHOST.into() };
        let socket = UdpSocket::bind((at, 0))?;
        socket.set_nonblocking(true)?;
        // Who may attach programs may also go beyond the system's limit; the buffer says what it came to.
        let forced = setsockopt(&socket, sockopt::RcvBufForce, &DEFERRED_BUFFER);
        forced.or_else(|_| setsockopt(&socket, sockopt::RcvBuf, &DEFERRED_BUFFER))?;
        let room = getsockopt(&socket, sockopt::RcvBuf)? / DEFERRED_PACKET;
        let kernel = Arc::downgrade(self);
        let deferred = Arc::new(Deferred::new(
            self.relay.deferred_socket(&socket, room as u64)?,
            socket,
            Box::new(move || kernel.upgrade().into_iter().for_each(|kernel| kernel.ticker.wake())),
        ));
        self.deferred.write().push(Arc::downgrade(&deferred));
        Ok(deferred)
    }

    fn sum_deferred(&self, count: fn(&Deferred) -> u64) -> u64 {
        self.deferred.read().iter().filter_map(Weak::upgrade).map(|deferred| count(&deferred)).sum()
    }

    /// Has deferred sockets read where something waits; returns the most packets of publishers that waited in one.
    fn look_at_deferred(&self) -> Option<u64> {
        let sockets = self.deferred.read();
        sockets.iter().filter_map(Weak::upgrade).filter_map(|deferred| deferred.tick()).max()
    }

    /// Has every packet wake this process, and the next one the ticker.
    fn rest(&self) {
        self.deferred.read().iter().filter_map(Weak::upgrade).for_each(|deferred| deferred.rest());
    }

    /// Puts everything that was registered into the connections' inboxes.
    fn sort(&self) {
        let connections = self.connections.read();
        self.relay.drain(|forwarded| {
            let connection = connections.get(forwarded.downstream.index as usize).and_then(Weak::upgrade);
            match connection.filter(|connection| connection.downstream.id() == forwarded.downstream) {
                Some(connection) => connection.put(forwarded),
                None => drop(self.orphans.fetch_add(1, Ordering::Relaxed)),
            }
        });
    }

    fn connections(&self) -> Vec<Arc<KernelConnection>> {
        self.connections.read().iter().filter_map(Weak::upgrade).collect()
    }

    /// Has the thread wait for entries that cannot be handed out yet.
    fn settle(&self) {
        self.commands.wake();
    }

    /// Wakes the thread to decide which connections get a record, if there is something to decide.
    fn claims_changed(&self, is_to_decide: bool) {
        if is_to_decide {
            self.commands.wake();
        }
    }

    /// What streams were prepared for, or have been opened for, is gone.
    fn gone(&self, prepared: Vec<(Weak<KernelConnection>, u64)>) {
        let owners = prepared.into_iter().filter_map(|(connection, tag)| Some((connection.upgrade()?, tag)));
        owners.for_each(|(connection, tag)| self.commands.gone(connection, tag));
    }

    /// Tells connections what was sent on them, where nothing else has done so. Returns whether there was anything.
    fn look(&self) -> bool {
        if self.relay.needs_settling() {
            self.settle();
        }
        self.sort();
        let connections = self.connections();
        let waiting: Vec<_> = connections.iter().filter(|connection| connection.is_waiting()).collect();
        let now = Instant::now();
        let owners = waiting.iter().filter_map(|connection| connection.owner());
        owners.for_each(|owner| owner.on_sent(now));
        !waiting.is_empty()
    }
}

impl offload::Engine for Kernel {
    fn attach(self: Arc<Self>, socket: UdpSocket) -> io::Result<Attached> {
        let deferred = self.deferred_socket(socket.local_addr()?.ip());
        let deferred = deferred.inspect_err(|error| debug!(%error, "every packet wakes the relay")).ok();
        let socket = match &deferred {
            Some(deferred) => Arc::new(Socket::new(socket, Arc::clone(deferred))?),
            None => TokioRuntime.wrap_udp_socket(socket)?,
        };
        self.ticker.start(&self);
        let enter = move |owner| {
            let claimant = Claimant { owner, deferred: deferred.clone() };
            Box::new(Claimed::new(Arc::clone(&self), claimant)) as Box<dyn offload::Claim>
        };
        Ok(Attached { socket, enter: Box::new(enter), suites: SUITES })
    }

    fn interfaces(&self) -> Vec<offload::Interface> {
        self.interfaces.list()
    }

    fn status(&self) -> Status {
        let counters = self.relay.counters().ok();
        let counters = counters.as_ref();
        Status {
            streams: self.streams() as u64,
            prepared: self.prepared.load(Ordering::Relaxed) as u64,
            deferred: self.sum_deferred(Deferred::packets),
            deferred_dropped: self.sum_deferred(Deferred::dropped),
            ticks: self.ticker.ticks(),
            commands_waiting: self.commands.len() as u64,
            commands: self.commands.commands(),
            commands_coalesced: self.commands.coalesced(),
            offloads_waiting: self.records.waiting() as u64,
            offloads_taken: self.records.taken(),
            records: self.relay.fill().to_vec(),
            received: counters.map(|all| Outcome::ALL.map(|one| (one.name(), all.packets(one))).to_vec()),
            frames: counters.map(|all| FrameOutcome::ALL.map(|one| (one.name(), all.frames(one))).to_vec()),
            openings: counters
                .map(|all| OpeningOutcome::ALL.map(|one| (one.name(), all.openings(one))).to_vec()),
            copies: counters
                .map(|all| EgressOutcome::ALL.map(|one| (one.name(), all.egresses(one))).to_vec()),
            further_runs: counters
                .map(|all| FurtherRun::ALL.map(|one| (one.name(), all.further_runs(one))).to_vec()),
        }
    }

    fn set_trace(&self, filter: Option<trace::Filter>) {
        self.relay.set_tracing(filter.map(|trace::Filter { every, track, session }| bpf::Tracing {
            every,
            track,
            session,
        }));
    }

    fn drain_trace(&self, read: &mut dyn FnMut(trace::Event)) -> u64 {
        self.relay.drain_events(|event| read(described(&event)))
    }
}

fn described(event: &bpf::Event) -> trace::Event {
    let bpf::Event { arrived_ns, time_ns, publisher, received, what } = *event;
    let what = match what {
        bpf::What::Packet { outcome, size } => trace::What::Packet { outcome: outcome.name(), size },
        bpf::What::Copy { outcome, subscriber, sent, track, group, stream_id, offset, len, fin } => {
            let outcome = outcome.name();
            trace::What::Copy { outcome, subscriber, sent, track, group, stream_id, offset, len, fin }
        }
    };
    trace::Event { arrived_ns, time_ns, publisher, received, what }
}

impl Drop for Kernel {
    fn drop(&mut self) {
        self.commands.close();
        self.computer.wake();
        self.ticker.wake();
    }
}
