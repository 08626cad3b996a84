//! The engine `kernel` forwards media of the streams that were delegated to it, at TC ingress, before any process wakes
//! (`crate::program`).
//!
//! [`RelayKernel`] is the engine. Each connection that it sends on has a record in the kernel (`connection`). There are
//! fewer records than connections (`records`). The kernel reports the packets that it has sent in one ring for all
//! connections. Any connection's thread may read the ring. It moves each report to the inbox of the connection that the
//! packet was sent on. Each inbox has a lock of its own. If no thread reads the ring for a while, a task does
//! (`ticker`).
//!
//! Commands that have to wait for program runs are queued (`queue`). One thread carries them out and informs the
//! connection (`worker`). A second one checks the interfaces and erases old keys. A third one precomputes keystreams
//! (`computer`).
//!
//! `KernelConnection` implements the transport's [`offload::Offload`], and writes to the program's handles itself.
//! Names show the layer: `Kernel` for types of the engine, `Record` for handles, neither for the traits. The structures
//! of the C program are in `program::intf`, without their prefix `relay_`, and are always written with `intf::`.
//!
//! | what | trait, [`offload`] | engine | handle, [`program`] | memory, `intf` |
//! | --- | --- | --- | --- | --- |
//! | a connection | `Offload` | `KernelConnection` | `DownstreamRecord`, and `UpstreamRecord` once media arrives on it | `Downstream`, `Upstream` |
//! | a stream of the peer, or a track's datagrams | `OffloadIngress` | `KernelIngress` | `SlotRecord`, `IngressRecord` while there are copies | `Slot`, `Ingress` |
//! | a place in a stream | `millrace_moq`'s `Position` | | | `State` |
//! | one subscriber's copy of a stream | `StreamCopy` | `KernelEgress` | `EgressRecord` | `Egress` |
//! | one subscriber's copy of datagrams | `DatagramCopy` | `KernelEgress` | | `Egress` |
//! | one subscriber's copy of a stream that begins | `OpeningRequest`, of `OpeningTerms` | `KernelEgress` | `OpeningRecord` | `Egress` |
//! | streams of the peer that begin | `OffloadOpenings` | `KernelOpenings` | `TrackRecord` | `Track` |
//! | which end opens a stream | `OpeningSide` | | `OpeningRecordSide` | |
//! | the outcome for a stream that began | | | `OpeningOutcome` | |
#![deny(missing_docs)]

mod attention;
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

use crate::program::{self as bpf, EgressOutcome, FrameOutcome, FurtherRun, OpeningOutcome, Outcome};
use millrace_transport::{
    offload::{self, Attached, OffloadOwner, Status},
    trace,
};
use nix::sys::socket::{getsockopt, setsockopt, sockopt};
use parking_lot::RwLock;
use quinn::{AsyncUdpSocket, Runtime as _, TokioRuntime};
use thiserror::Error;
use tracing::warn;

use self::{
    attention::AttentionList,
    clock::MonotonicClock,
    computer::Computer,
    connection::{Claimed, KernelConnection},
    deferred::Deferred,
    interfaces::ForwardingInterfaces,
    queue::CommandQueue,
    records::{RecordClaims, RecordDecision},
    room::FullTables,
    socket::PairedSocket,
    ticker::Ticker,
    worker::SetInterfaces,
};

/// The size in bytes of the receive buffer of a deferred socket: the socket for packets that need not wake userspace at
/// once.
const DEFERRED_BUFFER: usize = 4 << 20;

/// The most bytes that one packet takes of a deferred socket's receive buffer ([`DEFERRED_BUFFER`]): the network card's
/// buffer, and the kernel's `struct sk_buff`.
const DEFERRED_PACKET: usize = 4096 + 256;

#[derive(Debug, Error)]
#[allow(missing_docs, reason = "the messages describe the variants")]
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
    #[error(
        "interface {name} carries neither Ethernet frames nor a tun device's packets: such tunnels cannot be forwarded from"
    )]
    NotEthernet { name: String },
    #[error(
        "interface {name} belongs to the VRF {vrf}, whose routes the kernel's fast path does not know: use engine user"
    )]
    Vrf { name: String, vrf: String },
    #[error("interface {name} is loopback: the kernel forwards between hosts")]
    Loopback { name: String },
    #[error("engine kernel was not loaded at start-up: restart the relay with engine kernel")]
    NotLoaded,
    #[error("the kernel engine has stopped")]
    Stopped,
    #[error("cannot start a thread of the kernel engine: {0}")]
    Thread(#[source] io::Error),
}

/// The parameters that the engine is started with.
#[derive(Clone, Debug)]
pub struct KernelSetup<'a> {
    /// UDP ports that the relay listens on.
    pub ports: Vec<u16>,
    /// The length of this relay's connection IDs, in bytes.
    pub id_len: usize,
    /// Names of the interfaces that the program is attached to, in the calling thread's network namespace.
    pub interfaces: &'a [String],
    /// Whether to attach the program again after another process has detached it.
    pub reattach: bool,
    /// Memory for precomputed keystreams, in bytes.
    pub keystream_bytes: u64,
    /// The sizes of the kernel's tables, and the limits of one program run.
    pub limits: KernelLimits,
}

/// The sizes of the kernel's tables, and the limits of one program run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KernelLimits {
    /// The most connections on which media may arrive.
    pub publishers: u32,
    /// The most connections with a record in the kernel's tables, publishers' and subscribers'. Media may be sent on
    /// each of them.
    pub sessions: u32,
    /// The most streams to subscribers that may be delegated at the same time.
    pub streams: u32,
    /// The most tracks for whose streams the kernel may open streams to subscribers.
    pub tracks: u32,
    /// The most copies of a received packet that one run of the program makes.
    pub copies_per_run: u32,
    /// The most runs of the BPF program for one received packet.
    pub runs: u32,
}

impl Default for KernelLimits {
    fn default() -> Self {
        Self {
            publishers: 256,
            sessions: 4096,
            streams: 1 << 16,
            tracks: 1 << 10,
            copies_per_run: 64,
            runs: 64,
        }
    }
}

/// A connection that may get a record in the kernel's tables: an entry in the BPF program's table of connections.
#[derive(Clone)]
struct Claimant {
    owner: Weak<dyn OffloadOwner>,
    /// The shard's socket for deferred packets (packets that need not wake userspace at once), if it has one.
    deferred: Option<Arc<Deferred>>,
}

/// The kernel engine. Its BPF program is attached until the engine is dropped.
pub struct RelayKernel {
    relay: bpf::RelayProgram,
    interfaces: ForwardingInterfaces,
    /// The connections with a record in the kernel's tables, by the index of their record for sent media.
    connections: RwLock<Vec<Weak<KernelConnection>>>,
    clock: MonotonicClock,
    commands: Arc<CommandQueue<KernelConnection, SetInterfaces>>,
    records: RecordClaims<Claimant>,
    computer: Computer,
    /// Connections for which keystreams are computed.
    kept: AttentionList<KernelConnection>,
    /// Connections whose inbox contains reports about packets that the kernel has sent.
    waiting: AttentionList<KernelConnection>,
    ticker: Ticker,
    deferred: RwLock<Vec<Weak<Deferred>>>,
    /// Number of streams to subscribers that userspace has delegated to the kernel and that are not returned yet.
    streams: AtomicUsize,
    /// Number of subscribers' streams that the kernel may open by itself, but has not opened yet.
    prepared: AtomicUsize,
    max_streams: u32,
    /// Number of packets that the kernel reported as sent on a connection that was gone by then.
    orphans: AtomicU64,
    room: FullTables,
}

impl RelayKernel {
    /// Loads the BPF program, and attaches it to the network interfaces named in `setup`.
    pub fn start(setup: KernelSetup<'_>) -> Result<Arc<Self>, Error> {
        let KernelSetup { ports, id_len, interfaces: names, reattach, keystream_bytes, limits } = setup;
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
        let relay = bpf::RelayProgram::load(&config)
            .map_err(|error| if error.is_denied() { Error::Denied(error) } else { Error::Load(error) })?;
        let interfaces = ForwardingInterfaces::new(reattach);
        interfaces.set(&relay, names)?;
        // The interfaces are attached before the threads start, so that a failure needs no clean-up.
        let (commands, taker) = CommandQueue::new();
        let kernel = Arc::new(Self {
            relay,
            interfaces,
            connections: RwLock::default(),
            clock: MonotonicClock::new(),
            commands,
            records: RecordClaims::new(limits.sessions as usize),
            computer: Computer::default(),
            kept: AttentionList::default(),
            waiting: AttentionList::default(),
            ticker: Ticker::default(),
            deferred: RwLock::default(),
            streams: AtomicUsize::new(0),
            prepared: AtomicUsize::new(0),
            max_streams: limits.streams,
            orphans: AtomicU64::new(0),
            room: FullTables::default(),
        });
        let weak = Arc::downgrade(&kernel);
        std::thread::Builder::new()
            .name("kernel-engine".to_owned())
            .spawn(move || worker::work(&weak, &taker))
            .map_err(Error::Thread)?;
        let weak = Arc::downgrade(&kernel);
        std::thread::Builder::new()
            .name("kernel-house".to_owned())
            .spawn(move || worker::keep_house(&weak))
            .map_err(Error::Thread)?;
        Computer::start(&kernel)?;
        Ok(kernel)
    }

    /// Reports whether the program is attached to any interface.
    fn is_attached(&self) -> bool {
        self.interfaces.any()
    }

    /// Attaches the program to the named interfaces and to no others, and waits until that is done. Interfaces that
    /// have lost the program get it again.
    ///
    /// # Errors
    /// If the program cannot be attached to one of the interfaces, returns an error and changes nothing.
    pub fn set_interfaces(&self, names: Vec<String>) -> Result<(), Error> {
        let (done, result) = mpsc::sync_channel(1);
        self.commands.order(SetInterfaces { names, done });
        result.recv().unwrap_or(Err(Error::Stopped))
    }

    /// Returns how many streams are delegated to the kernel.
    fn streams(&self) -> usize {
        self.streams.load(Ordering::Relaxed)
    }

    /// Grants records, the entries in the kernel's tables, to the connections that gain most from one. Recalls the
    /// records of other connections. Called only by the engine's thread.
    fn decide(self: &Arc<Self>) {
        let decided = self.records.decide(Instant::now());
        if decided.is_short {
            self.room.explain(
                &millrace_kernel::Error::Full { what: "downstreams" },
                "sessions wait for a place in the kernel's table",
            );
        }
        for decision in decided.decisions {
            match decision {
                RecordDecision::Grant(claim, claimant) => self.grant(claim, claimant),
                RecordDecision::Recall(Claimant { owner, .. }) => {
                    owner.upgrade().into_iter().for_each(|owner| owner.on_offload_recalled(Instant::now()));
                }
            }
        }
    }

    /// Makes a record in the kernel's tables for a connection that has claimed one. If the connection is gone by now,
    /// the record is dropped at once.
    fn grant(self: &Arc<Self>, claim: u64, claimant: Claimant) {
        let record = match self.record(claim, &claimant) {
            // No record in the kernel's tables is free, but ended connections have returned some. `settle` waits until
            // no program run uses these any more.
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
                self.room.explain(&error, "userspace serves a session");
                self.records.returned(claim);
            }
        }
    }

    /// Makes a record in the kernel's tables of a connection on which the kernel may not send anything yet.
    fn record(
        self: &Arc<Self>,
        claim: u64,
        claimant: &Claimant,
    ) -> Result<Arc<KernelConnection>, millrace_kernel::Error> {
        // The connection sets its path, keys and limits later. The kernel sends nothing before that.
        let at = SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0));
        let nowhere =
            bpf::PacketPath { local: at, remote: at, id: Vec::new(), traffic_class: 0, flow_label: 0 };
        let downstream = self.relay.downstream(&nowhere, 0, 0)?;
        let index = downstream.id().index as usize;
        let connection =
            Arc::new(KernelConnection::new(Arc::clone(self), downstream, claim, claimant.clone()));
        let mut connections = self.connections.write();
        if connections.len() <= index {
            connections.resize_with(index + 1, Weak::new);
        }
        // The list `connections` may still have a weak reference to an earlier connection with this index, which is
        // gone by now.
        connections[index] = Arc::downgrade(&connection);
        Ok(connection)
    }

    /// Binds a socket for the deferred packets of an endpoint whose address has the same family as `like`. The socket
    /// is bound to loopback, but nobody sends to that address: the program steers packets to the socket.
    fn deferred_socket(self: &Arc<Self>, like: IpAddr) -> Result<Arc<Deferred>, Box<dyn std::error::Error>> {
        let at: IpAddr = if like.is_ipv4() { Ipv4Addr::LOCALHOST.into() } else { Ipv6Addr::LOCALHOST.into() };
        let socket = UdpSocket::bind((at, 0))?;
        socket.set_nonblocking(true)?;
        // A process that may load BPF programs may also set a buffer size above the sysctl `net.core.rmem_max`. The
        // size that the kernel chose is read back.
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

    /// Wakes the readers of deferred sockets in which packets wait. Returns the largest number of publishers' packets
    /// that was deferred for one socket since this process went to sleep.
    fn look_at_deferred(&self) -> Option<u64> {
        let sockets = self.deferred.read();
        sockets.iter().filter_map(Weak::upgrade).filter_map(|deferred| deferred.tick()).max()
    }

    /// Turns off deferral (the program steering packets to sockets that this process reads only on a timer), so that
    /// every packet wakes this process. The next packet resumes the engine's ticker task.
    fn rest(&self) {
        self.deferred.read().iter().filter_map(Weak::upgrade).for_each(|deferred| deferred.rest());
    }

    /// Reads all of the program's reports about sent packets from its ring buffer. Puts each into the inbox of the
    /// connection on which the packet was sent.
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

    /// Makes the engine's thread wait until the present program runs have ended. Entries of the BPF maps that were
    /// removed before can then be reused.
    fn settle(&self) {
        self.commands.wake();
    }

    /// Wakes the engine's thread if there are records in the kernel's tables to grant or to recall.
    fn claims_changed(&self, is_to_decide: bool) {
        if is_to_decide {
            self.commands.wake();
        }
    }

    /// Informs the subscribers' connections in `prepared` that the kernel no longer forwards a publisher's stream. Each
    /// of them has a stream that was prepared or opened for it, for the subscription with the given number (tag).
    fn forget_prepared(&self, prepared: Vec<(Weak<KernelConnection>, u64)>) {
        let owners = prepared.into_iter().filter_map(|(connection, tag)| Some((connection.upgrade()?, tag)));
        owners.for_each(|(connection, tag)| self.commands.remove_connection(connection, tag));
    }

    /// Reads the kernel's reports about sent packets that the connections' own tasks have not read, and informs those
    /// connections. Returns whether there were any such reports.
    fn look(&self) -> bool {
        if self.relay.needs_settling() {
            self.settle();
        }
        self.sort();
        let now = Instant::now();
        let mut listed = self.waiting.take(|connection| &connection.is_listed);
        listed.retain(|connection| connection.waiting.load(Ordering::SeqCst));
        for connection in &listed {
            connection.owner().into_iter().for_each(|owner| owner.on_sent(now));
            // The owner of the connection was busy, and has not read all reports about sent packets from the
            // connection's inbox. The next tick of the ticker informs the owner again.
            if connection.waiting.load(Ordering::SeqCst) {
                self.waiting.add(connection, &connection.is_listed);
            }
        }
        !listed.is_empty()
    }
}

impl offload::OffloadEngine for RelayKernel {
    fn attach(self: Arc<Self>, socket: UdpSocket) -> io::Result<Attached> {
        let deferred = self.deferred_socket(socket.local_addr()?.ip());
        let deferred = deferred.inspect_err(|error| warn!(%error, "cannot open the socket for packets that need not wake the relay: every packet of this shard wakes it")).ok();
        let (socket, is_left) = match &deferred {
            Some(deferred) => {
                let socket = PairedSocket::new(socket, Arc::clone(deferred))?;
                let is_left = socket.is_left();
                (Arc::new(socket) as Arc<dyn AsyncUdpSocket>, Some(is_left))
            }
            None => (TokioRuntime.wrap_udp_socket(socket)?, None),
        };
        self.ticker.start(&self);
        let enter = move |owner| {
            let claimant = Claimant { owner, deferred: deferred.clone() };
            Box::new(Claimed::new(Arc::clone(&self), claimant)) as Box<dyn offload::OffloadClaim>
        };
        Ok(Attached { socket, enter: Box::new(enter), is_left })
    }

    fn interfaces(&self) -> Vec<offload::OffloadInterface> {
        self.interfaces.list()
    }

    fn status(&self) -> Status {
        // If the counters cannot be read, the status shows no counters instead of zeroes.
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

    fn set_trace(&self, filter: Option<trace::PacketFilter>) {
        self.relay.set_tracing(filter);
    }

    fn drain_trace(&self, read: &mut dyn FnMut(trace::OffloadTraceEvent)) -> u64 {
        self.relay.drain_events(read)
    }
}

impl Drop for RelayKernel {
    fn drop(&mut self) {
        self.commands.close();
        self.computer.wake();
        self.ticker.wake();
    }
}
