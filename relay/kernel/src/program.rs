//! The relay's fast path: forwards media at TC ingress, before any process wakes, for the connections and
//! streams that userspace delegates to it.
//!
//! Userspace stays the truth. Every packet also reaches it as it came, and it sends what the kernel did not:
//!
//! 1. [`Relay::load`], then [`Relay::attach`] to each interface that media arrives on.
//! 2. An [`UpstreamRecord`] for each connection that media arrives on, with its connection IDs and receive keys.
//! 3. A [`DownstreamRecord`] for each subscriber's connection. [`DownstreamRecord::number`] is the packet number word
//!    (`millrace_quic::number`) of both senders from then on; the send keys of a generation are
//!    installed before anybody moves the word to it.
//! 4. A [`SlotRecord`] for each stream of an upstream that is forwarded. Once userspace has opened a subscriber's stream, an
//!    [`EgressRecord`] in the slot delegates it to the kernel. Removing the egress, or dropping the slot, recalls it.
//!    [`DatagramRecord`] in the slot of a track's alias are the same for objects that come as datagrams.
//!    [`SlotRecord::advance`] says how much of the stream userspace has, and where in its framing that ends: the program forwards
//!    what follows there and is well-formed.
//!    A [`TrackRecord`] has slots for streams that have not begun ([`UpstreamRecord::opening`]), with egresses that the program opens streams
//!    for ([`SlotRecord::add_opened`]).
//! 5. [`Relay::drain`] tells what was sent. Every packet is registered before it leaves. So whoever drains, and then looks
//!    at an acknowledgement, knows the packets that it is about. There is one exception: while another CPU is registering
//!    a packet, those registered after it cannot be read. So an unknown number below the word is no offence of the peer:
//!    drain again.
//!
//! All handles share the maps. When the [`Relay`] is detached or dropped, they stay valid, and have no effect. An entry that
//! was removed is reused when every program run that may have seen it has ended. Waiting for that blocks the calling thread
//! for some 10 ms; [`Relay::settle`] does it, and otherwise only what says so.

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
pub use downstream::{DownstreamId, DownstreamRecord, Path};
pub use ingress::PositionRecord;
pub use keystream::{Compute, Refill, Want};
pub use outcome::{Counters, EgressOutcome, FrameOutcome, FurtherRun, Lookup, OpeningOutcome, Outcome};
pub use slot::{DatagramRecord, EgressKey, EgressRecord, OpeningRecord, OpeningRecordSide, SlotRecord};
pub use trace::{Event, Tracing, What};
pub use track::TrackRecord;
pub use upstream::UpstreamRecord;

use memory::Ring;
use millrace_kernel::Error;
use millrace_kernel::fan::Attachments;
use millrace_kernel::intf::Plain;
use millrace_kernel::object::{Loaded, embedded};
use millrace_kernel::tc::Mechanism;
use shared::{Shared, lock};

const OBJECT: &str = "relay.bpf.o";

/// A packet that the kernel sends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Forwarded {
    pub downstream: DownstreamId,
    /// [`EgressRecord::tag`].
    pub tag: u64,
    pub number: u64,
    pub generation: u16,
    /// Of the downstream stream; the track's alias of a datagram.
    pub id: u64,
    /// Of the downstream stream; the group of a datagram.
    pub offset: u64,
    /// Of a datagram, `None`: it is part of a stream.
    pub object: Option<u64>,
    /// Bytes that were counted against [`DownstreamRecord::set_max_data`].
    pub credit: u64,
    /// Stream bytes, or those of the datagram.
    pub len: u16,
    pub fin: bool,
    /// UDP payload, bytes.
    pub size: u16,
    /// `CLOCK_MONOTONIC`.
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

/// The fast path, loaded. It forwards from [`attach`](Self::attach) on and until it is dropped.
pub struct Relay {
    attachments: Attachments,
    object: Mutex<Loaded>,
    ring: Mutex<Ring>,
    trace: trace::Trace,
    mechanism: Option<Mechanism>,
    shared: Arc<Shared>,
}

impl Relay {
    pub fn load(config: &Config) -> Result<Self, Error> {
        let mut open = embedded!("relay.bpf.o").open()?;
        open.configure(&config.raw()?)?;
        for (map, entries) in config.map_sizes() {
            open.map(map)?
                .set_max_entries(entries.max(1))
                .map_err(|source| Error::Open { object: OBJECT, source })?;
        }
        let mut object = open.load()?;
        let shared = Shared::new(&mut object, config)?;
        let ring = Ring::new(object.handle("forwarded")?, config.forwarded_bytes() as usize)
            .map_err(|source| Error::Memory { what: "forwarded", source })?;
        let trace = trace::Trace::new(&mut object)?;
        Ok(Self {
            attachments: Attachments::default(),
            object: Mutex::new(object),
            ring: Mutex::new(ring),
            trace,
            mechanism: config.mechanism,
            shared: Arc::new(shared),
        })
    }

    /// Forwards what arrives on an Ethernet interface of the calling thread's network namespace, with its routes.
    ///
    /// Switches the forwarding flag of the loopback interface on, in that namespace, and leaves it on: without
    /// it the kernel refuses to look up routes. It has no other effect, since nothing that is not from this
    /// host arrives there.
    pub fn attach(&self, ifindex: i32) -> Result<Mechanism, Error> {
        let object = lock(&self.object);
        self.attachments.attach(&object.program("relay_ingress")?, ifindex, self.mechanism)
    }

    /// Whether it is attached to an interface: somebody else may have detached it, and interfaces come and go.
    pub fn is_attached(&self, ifindex: i32) -> bool {
        self.attachments.has(ifindex)
    }

    /// Detaches from an interface, as [`Self::detach`] does from all.
    pub fn detach_from(&self, ifindex: i32) {
        self.attachments.remove(ifindex);
    }

    /// Detaches from every interface. What was installed stays; while nothing is attached the replay window
    /// of each upstream only moves by [`UpstreamRecord::observe`].
    pub fn detach(&self) {
        self.attachments.clear();
    }

    /// Starts on a connection that media arrives on; `expected` is one more than its largest packet number
    /// received so far, and no number before it will be forwarded.
    pub fn upstream(&self, expected: u64) -> Result<UpstreamRecord, Error> {
        self.upstream_from(expected, 0)
    }

    /// The same, where userspace has taken the unidirectional streams before this index already.
    pub fn upstream_from(&self, expected: u64, streams: u64) -> Result<UpstreamRecord, Error> {
        UpstreamRecord::new(self.shared.clone(), expected, streams)
    }

    /// Makes `socket` one that packets may be steered to. It is a UDP socket, bound to some address in the network namespace
    /// of the interfaces, and stays open as long as the handle is used. At most `room` packets wait there.
    pub fn deferred_socket(&self, socket: impl AsFd, room: u64) -> Result<DeferredSocket, Error> {
        DeferredSocket::new(self.shared.clone(), socket, room)
    }

    /// When the deferred packet of a subscriber arrived that ends with these 8 bytes: `CLOCK_MONOTONIC` in microseconds, modulo
    /// 2^32. `None`: it was not deferred ([`DownstreamRecord::set_deferral`]), or the entry has been taken by a later packet.
    pub fn arrival(&self, end: [u8; 8]) -> Option<u32> {
        defer::arrival(&self.shared, end)
    }

    /// Starts on a connection that media leaves on, with neither keys, credit nor window. `word` is what its
    /// packet number word starts with; everybody must use [`DownstreamRecord::number`] from now on.
    pub fn downstream(&self, path: &Path, mtu: u32, word: u64) -> Result<DownstreamRecord, Error> {
        DownstreamRecord::new(self.shared.clone(), path, mtu, word)
    }

    /// Hands over what was sent since the last call, and returns how many packets that are. No system call.
    pub fn drain(&self, mut read: impl FnMut(Forwarded)) -> usize {
        lock(&self.ring).drain(|bytes| {
            if let Some(raw) = intf::Forwarded::from_bytes(bytes) {
                read(raw.into());
            }
        })
    }

    /// Has the program report on single packets, until told otherwise; `None`: no more.
    pub fn set_tracing(&self, tracing: Option<Tracing>) {
        self.trace.set(tracing);
    }

    /// Hands over the events since the last call, those of one packet in any order. Returns how many were lost for want of
    /// room since then. No system call.
    pub fn drain_events(&self, read: impl FnMut(Event)) -> u64 {
        self.trace.drain(read)
    }

    /// Waits until every run of the program has ended that had begun before. Then nothing that was removed is used any more,
    /// not even by packets between two of their runs: it may be handed out again, and what was sent over it is registered.
    /// Keys and keystreams of connections that have ended are erased.
    /// Blocks the calling thread for some 10 ms.
    pub fn settle(&self) -> Result<(), Error> {
        self.shared.settle()
    }

    /// Whether [`settle`](Self::settle) should be called soon, for something to be left to hand out.
    pub fn needs_settling(&self) -> bool {
        lock(&self.shared.free).needs_settling()
    }

    /// Whether there are keys of connections that have ended, which [`settle`](Self::settle) erases.
    pub fn has_old_keys(&self) -> bool {
        lock(&self.shared.free).has_old_keys()
    }

    /// Whether [`settle`](Self::settle) would make room for keystreams.
    pub fn has_retired_keystreams(&self) -> bool {
        !lock(&self.shared.free).keystreams.retired.is_empty()
    }

    /// Returns each table's name, how many of its entries are in use, and how many it has.
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

    pub fn counters(&self) -> Result<Counters, Error> {
        let raw = lock(&self.object).counters("outcomes")?;
        Counters::new(&raw).ok_or(Error::Missing { object: OBJECT, what: "counter for each outcome" })
    }
}

#[cfg(test)]
mod tests;
