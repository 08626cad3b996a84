//! The relay's BPF program and its handles. It forwards media at TC ingress, before any process wakes, for the
//! connections and streams that userspace delegates to it.
//!
//! Userspace keeps the complete state. Every packet also reaches userspace unchanged, and userspace sends what the
//! kernel did not. The steps are:
//!
//! 1. [`RelayProgram::load`], then [`RelayProgram::attach`] to each interface that media arrives on.
//! 2. An [`UpstreamRecord`] is made for each connection on which media arrives, with its connection IDs and receive
//!    keys.
//! 3. A [`DownstreamRecord`] is made for each subscriber's connection. From then on both senders draw packet numbers
//!    from [`DownstreamRecord::number`] (`millrace_quic::number`). The send keys of a generation have to be installed
//!    before packet numbers of that generation are assigned.
//! 4. A [`SlotRecord`] (slot) is made for each publisher's stream that is forwarded. Once userspace has opened a
//!    subscriber's stream, an [`EgressRecord`] (egress) in the slot delegates the subscriber's stream to the kernel.
//!    Removing the egress, or dropping the slot, returns that stream to userspace. [`SlotRecord::add_datagrams`] does the
//!    same for a track's datagrams. [`SlotRecord::advance`] tells the program how far userspace has parsed the stream; the
//!    program forwards well-formed bytes after that position. A [`TrackRecord`] has slots for streams that have not
//!    begun ([`UpstreamRecord::opening`]), with egresses for which the program opens streams itself
//!    ([`SlotRecord::add_opened`]).
//! 5. [`RelayProgram::drain`] reports the packets that were sent. Every packet is registered before it is sent, so
//!    after a drain every packet that a received acknowledgement names is known. There is one exception: while another
//!    CPU is registering a packet, later registrations cannot be read. An acknowledged number that is unknown but
//!    already drawn is therefore no protocol violation: drain again.
//!
//! All handles share the maps. They stay valid, but have no effect, when the [`RelayProgram`] is detached or dropped. A
//! removed entry is reused only when all program runs that may have seen it have ended. Waiting for these runs blocks
//! the calling thread for some 10 ms. Only [`RelayProgram::settle`] waits, and methods whose documentation says so.

mod buddy;
mod config;
mod defer;
mod downstream;
mod ids;
mod ingress;
mod intf;
mod keystream;
mod memory;
pub(crate) mod outcome;
mod shared;
mod slot;
mod trace;
mod track;
mod upstream;

use std::os::fd::AsFd;
use std::sync::{Arc, Mutex};

pub use config::Config;
pub use defer::DeferredSocket;
pub use downstream::{DownstreamId, DownstreamRecord, PacketPath};
pub use keystream::{Compute, Refill, WantedRing};
pub use millrace_moq::Position;
pub use outcome::{EgressOutcome, FrameOutcome, FurtherRun, Lookup, OpeningOutcome, Outcome, RelayCounters};
pub use slot::{EgressKey, EgressRecord, OpeningRecord, OpeningRecordSide, SlotRecord};
pub use track::TrackRecord;
pub use upstream::UpstreamRecord;

use memory::RingReader;
use millrace_kernel::Error;
use millrace_kernel::fan::Attachments;
use millrace_kernel::intf::Plain;
use millrace_kernel::object::{LoadedObject, embedded};
use millrace_kernel::tc::{KernelHook, Mechanism};
use millrace_transport::trace::{OffloadTraceEvent, PacketFilter};
use shared::{RelayMaps, lock};

const OBJECT: &str = "relay.bpf.o";

/// The interface index of loopback, which is the same in every network namespace.
const LOOPBACK: i32 = 1;

/// A packet that the kernel has sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Forwarded {
    /// The connection on which the packet was sent.
    pub downstream: DownstreamId,
    /// The number that the caller gave to the subscriber's copy of the stream or datagrams ([`EgressRecord::tag`]).
    pub tag: u64,
    /// The packet number of the sent packet.
    pub number: u64,
    /// The key generation that the packet was encrypted with.
    pub generation: u16,
    /// ID of the stream on the subscriber's connection, or the track alias of a datagram.
    pub id: u64,
    /// Offset in the subscriber's stream, or the group ID of a datagram.
    pub offset: u64,
    /// Object ID of a datagram. `None` for a STREAM frame.
    pub object: Option<u64>,
    /// Number of bytes that count against [`DownstreamRecord::set_max_data`].
    pub credit: u64,
    /// Number of stream bytes, or length of the datagram in bytes.
    pub len: u16,
    /// True if the frame ends the stream.
    pub fin: bool,
    /// Size of the UDP payload, in bytes.
    pub size: u16,
    /// Time of sending on `CLOCK_MONOTONIC`, in nanoseconds.
    pub time_ns: u64,
}

impl From<intf::Forwarded> for Forwarded {
    fn from(raw: intf::Forwarded) -> Self {
        Self {
            downstream: DownstreamId { index: raw.downstream, epoch: raw.epoch },
            tag: raw.tag,
            number: raw.number,
            generation: raw.generation,
            id: raw.id,
            offset: raw.offset,
            object: Some(raw.object).filter(|_| u32::from(raw.kind) == intf::DATAGRAMS),
            credit: if u32::from(raw.kind) == intf::STREAM { raw.object } else { 0 },
            len: raw.len,
            fin: raw.fin != 0,
            size: raw.size,
            time_ns: raw.time_ns,
        }
    }
}

/// The loaded program. It forwards packets from the first [`attach`](Self::attach) until it is dropped.
pub struct RelayProgram {
    attachments: Attachments,
    /// The attachment to the egress of the loopback interface. The program sends clones of GRO and GSO packets there,
    /// to segment them.
    clones: Attachments,
    object: Mutex<LoadedObject>,
    ring: Mutex<RingReader>,
    trace: trace::RelayTraceRing,
    mechanism: Option<Mechanism>,
    shared: Arc<RelayMaps>,
}

impl RelayProgram {
    /// Loads the program, without attaching it to an interface.
    pub fn load(config: &Config) -> Result<Self, Error> {
        let mut open = embedded!("relay.bpf.o").open()?;
        open.configure(&config.raw()?)?;
        // The sizes of maps cannot change once the program is loaded.
        for (map, entries) in config.map_sizes() {
            open.map(map)?
                .set_max_entries(entries.max(1))
                .map_err(|source| Error::Open { object: OBJECT, source })?;
        }
        let mut object = open.load()?;
        let shared = RelayMaps::new(&mut object, config)?;
        // The ring buffer is mapped into this process, so that reading it takes no system call.
        let ring = RingReader::new(object.handle("forwarded")?, config.forwarded_bytes() as usize)
            .map_err(|source| Error::Memory { what: "forwarded", source })?;
        let trace = trace::RelayTraceRing::new(&mut object)?;
        Ok(Self {
            attachments: Attachments::default(),
            clones: Attachments::default(),
            object: Mutex::new(object),
            ring: Mutex::new(ring),
            trace,
            mechanism: config.mechanism,
            shared: Arc::new(shared),
        })
    }

    /// Attaches the program to an interface of the calling thread's network namespace. Copies use the routes of that
    /// namespace.
    ///
    /// Enables the forwarding flag of the loopback interface in that namespace, and leaves it enabled, since the kernel
    /// refuses to look up routes without it. The flag has no other effect, because packets from other hosts do not
    /// arrive at loopback.
    pub fn attach(&self, ifindex: i32) -> Result<Mechanism, Error> {
        let object = lock(&self.object);
        // The program sends clones of GRO and GSO packets to loopback, so it is attached there first.
        self.clones.attach(&object.program("clone_egress")?, LOOPBACK, KernelHook::Egress, self.mechanism)?;
        self.attachments.attach(
            &object.program("relay_ingress")?,
            ifindex,
            KernelHook::Ingress,
            self.mechanism,
        )
    }

    /// Reports whether the program is attached to an interface. Another process may have detached it, or the interface
    /// may be gone.
    pub fn is_attached(&self, ifindex: i32) -> bool {
        self.attachments.has(ifindex) && self.clones.has(LOOPBACK)
    }

    /// Detaches the program from an interface.
    pub fn detach_from(&self, ifindex: i32) {
        self.attachments.remove(ifindex);
        if self.attachments.is_empty() {
            self.clones.clear();
        }
    }

    /// Detaches the program from all interfaces. The entries in its tables do not change. While it is detached, only
    /// [`UpstreamRecord::observe`] registers received packet numbers, by which replayed packets are recognized.
    pub fn detach(&self) {
        self.attachments.clear();
        self.clones.clear();
    }

    /// Makes the program's table entry for a connection on which media arrives. `expected` is one more than its largest
    /// received packet number. Packets with smaller numbers than `expected` will not be forwarded.
    pub fn upstream(&self, expected: u64) -> Result<UpstreamRecord, Error> {
        self.upstream_from(expected, 0)
    }

    /// Makes the program's table entry for a connection on which media arrives, as [`Self::upstream`] does. In
    /// addition, marks the peer's unidirectional streams with an index below `streams` as claimed by userspace.
    pub fn upstream_from(&self, expected: u64, streams: u64) -> Result<UpstreamRecord, Error> {
        UpstreamRecord::new(self.shared.clone(), expected, streams)
    }

    /// Makes `socket` available for deferred packets, which need not wake userspace at once. It has to be a UDP socket,
    /// bound in the network namespace of the interfaces, and open as long as the handle is used. At most `room` packets
    /// wait in it.
    pub fn deferred_socket(&self, socket: impl AsFd, room: u64) -> Result<DeferredSocket, Error> {
        DeferredSocket::new(self.shared.clone(), socket, room)
    }

    /// Returns the arrival time of a subscriber's packet: `CLOCK_MONOTONIC` in microseconds, modulo 2^32. The packet is
    /// identified by its last 8 bytes, `end`. Returns `None` if it was not deferred
    /// ([`DownstreamRecord::set_deferral`]), or if a later packet has overwritten its arrival time.
    pub fn arrival(&self, end: [u8; 8]) -> Option<u32> {
        defer::arrival(&self.shared, end)
    }

    /// Makes the program's table entry for a connection on which media is sent, without keys, flow control credit and
    /// congestion window. `word` is the initial value of [`DownstreamRecord::number`], from which all senders have to
    /// take packet numbers from now on.
    pub fn downstream(&self, path: &PacketPath, mtu: u32, word: u64) -> Result<DownstreamRecord, Error> {
        DownstreamRecord::new(self.shared.clone(), path, mtu, word)
    }

    /// Reads the program's reports about packets that it has sent since the last call. Returns the number of reports.
    /// Makes no system call.
    pub fn drain(&self, mut read: impl FnMut(Forwarded)) -> usize {
        lock(&self.ring).drain(|bytes| {
            if let Some(raw) = intf::Forwarded::from_bytes(bytes) {
                read(raw.into());
            }
        })
    }

    /// Selects the packets that become trace events. `None` turns trace events off.
    pub fn set_tracing(&self, tracing: Option<PacketFilter>) {
        self.trace.set(tracing);
    }

    /// Reads the trace events since the last call. The events of one packet are in no particular order. Returns how
    /// many events were dropped because the ring was full. Makes no system call.
    pub fn drain_events(&self, read: impl FnMut(OffloadTraceEvent)) -> u64 {
        self.trace.drain(read)
    }

    /// Waits until all program runs that began before the call have ended. After that, no run uses records that were
    /// removed before the call, not even for a packet that is queued for a further run. Their entries can be reused,
    /// and all packets sent with them are reported. Keys and keystreams of ended connections are erased. Blocks the
    /// calling thread for some 10 ms.
    pub fn settle(&self) -> Result<(), Error> {
        self.shared.settle()
    }

    /// Reports whether [`settle`](Self::settle) should be called soon, before free entries run out.
    pub fn needs_settling(&self) -> bool {
        lock(&self.shared.free).needs_settling()
    }

    /// Reports whether keys of ended connections are left that [`settle`](Self::settle) would erase.
    pub fn has_old_keys(&self) -> bool {
        lock(&self.shared.free).has_old_keys()
    }

    /// Reports whether [`settle`](Self::settle) would free memory for keystreams.
    pub fn has_retired_keystreams(&self) -> bool {
        !lock(&self.shared.free).keystreams.retired.is_empty()
    }

    /// Returns each table's name, the number of entries in use, and the number of all entries.
    pub fn fill(&self) -> [(&'static str, u32, u32); 5] {
        let free = lock(&self.shared.free);
        [
            ("upstreams", &free.upstreams),
            ("downstreams", &free.downstreams),
            ("tracks", &free.tracks),
            ("ingresses", &free.ingresses),
            ("egresses", &free.egresses),
        ]
        .map(|(name, slab)| {
            let (used, len) = slab.fill();
            (name, used, len)
        })
    }

    /// Returns how often each result of processing a packet, a copy, a frame or a stream has occurred since the program
    /// was loaded.
    pub fn counters(&self) -> Result<RelayCounters, Error> {
        let raw = lock(&self.object).counters("outcomes")?;
        RelayCounters::new(&raw).ok_or(Error::Missing { object: OBJECT, what: "counter for each outcome" })
    }
}

#[cfg(test)]
mod tests;
