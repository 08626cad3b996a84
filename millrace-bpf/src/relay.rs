//! The relay's fast path: forwards media at TC ingress, before any process wakes, for the connections and
//! streams that userspace installs.
//!
//! Userspace stays the truth. Every packet also reaches it untouched, and it sends what the kernel did not:
//!
//! 1. [`Relay::load`], then [`Relay::attach`] to each interface that media arrives on.
//! 2. An [`Upstream`] for each connection that media arrives on, with its connection IDs and receive keys.
//! 3. A [`Downstream`] for each subscriber's connection. [`Downstream::number`] is the packet number word
//!    (`millrace_proto::quic::number`) of both senders from then on; the send keys of a generation are
//!    installed before anybody moves the word to it.
//! 4. Once userspace has opened a subscriber's stream, a [`Egress`] in the [`Slot`] of the upstream stream hands
//!    it to the kernel. Dropping the slot, or removing the egress, takes it back.
//!    [`Datagrams`] in the slot of an alias are the same for objects that come as datagrams.
//! 5. [`Relay::drain`] says what was sent. Every packet is registered before it leaves, so whoever drains
//!    before it looks at an acknowledgement knows the packets that it is about, save one case: a packet that
//!    another CPU is registering this very moment blocks those registered after it. A number below the word
//!    that is not known yet is therefore no offence of the peer: drain again.
//!
//! Handles share the maps: they stay valid, and useless, when the [`Relay`] is detached or dropped. Whatever
//! is removed is only reused when every program run that may have seen it has ended. To wait for that blocks the
//! calling thread for some 10 ms: [`Relay::settle`] does, and otherwise only what says so.

mod defer;
mod downstream;
mod ids;
mod intf;
mod keystream;
mod memory;
pub(crate) mod outcome;
mod trace;
mod upstream;

use std::collections::HashMap;
use std::io;
use std::num::NonZero;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use libbpf_rs::{MapCore, MapHandle};

pub use defer::DeferredSocket;
pub use downstream::{Downstream, DownstreamId, Path};
pub use keystream::{Compute, Refill, Want};
pub use outcome::{Counters, EgressOutcome, FurtherRun, Lookup, Outcome};
pub use trace::{Event, Tracing, What};
pub use upstream::{Datagrams, Egress, EgressKey, Slot, Upstream};

use crate::Error;
use crate::barrier::Barrier;
use crate::intf::Plain;
use crate::object::{Loaded, embedded, write};
use crate::tc::{Attachment, Hook, Mechanism, Position};
use memory::{Ring, Table};

const OBJECT: &str = "relay.bpf.o";

/// What the fast path is made for; it has this much room and takes this much memory from the start.
#[derive(Debug, Clone)]
pub struct Config {
    /// UDP ports that the relay listens on, at most 4.
    pub ports: Vec<u16>,
    /// Length of the connection IDs that the relay hands out, at most 20 bytes.
    pub id_len: usize,
    /// Connections that media arrives on.
    pub max_upstreams: u32,
    /// Connections that media leaves on.
    pub max_downstreams: u32,
    /// Upstream streams that are forwarded at the same time.
    pub max_slots: u32,
    /// Copies of them that are.
    pub max_egresses: u32,
    /// Packets that one received packet may become in one run of the program, some 2 microseconds each. For more
    /// it is put back into the queue of packets that wait for the stack, and goes up from its last run.
    pub max_copies_per_run: u32,
    /// Runs that one received packet may take; what is left then is userspace's.
    pub max_runs: u32,
    /// Registrations that may wait to be drained.
    pub max_waiting: u32,
    /// Memory for keystreams that are computed ahead, 1616 bytes for each packet.
    pub keystream_bytes: u64,
    /// `None` takes TCX where the kernel has it.
    pub mechanism: Option<Mechanism>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            ports: Vec::new(),
            id_len: 8,
            max_upstreams: 1 << 8,
            max_downstreams: 1 << 12,
            max_slots: 1 << 12,
            max_egresses: 1 << 15,
            max_copies_per_run: 64,
            max_runs: 64,
            max_waiting: 1 << 16,
            keystream_bytes: 32 << 20,
            mechanism: None,
        }
    }
}

/// A packet that the kernel sends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Forwarded {
    pub downstream: DownstreamId,
    /// [`Egress::tag`].
    pub tag: u64,
    pub number: u64,
    pub generation: u16,
    /// Of the downstream stream; the group of a datagram.
    pub offset: u64,
    /// Of a datagram, `None`: it is part of a stream.
    pub object: Option<u64>,
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
            offset: raw.offset,
            object: Some(raw.object).filter(|_| u32::from(raw.kind) == intf::DATAGRAMS),
            len: raw.len,
            fin: raw.fin != 0,
            size: raw.size,
            time_ns: raw.time_ns,
        }
    }
}

/// The fast path, loaded. It forwards from [`attach`](Self::attach) on and until it is dropped.
pub struct Relay {
    /// By interface.
    attachments: Mutex<HashMap<i32, Attachment>>,
    object: Mutex<Loaded>,
    ring: Mutex<Ring>,
    trace: trace::Trace,
    mechanism: Option<Mechanism>,
    shared: Arc<Shared>,
}

/// What all handles use.
struct Shared {
    ids: MapHandle,
    slots: MapHandle,
    open_keys: MapHandle,
    seal_keys: MapHandle,
    barrier: Barrier,
    sockets: MapHandle,
    deferrals: Table<intf::Deferral>,
    sockets_used: AtomicU32,
    arrivals: Table<intf::Arrival>,
    upstreams: Table<intf::Upstream>,
    egresses: Table<intf::Egress>,
    downstreams: Table<intf::Downstream>,
    keystreams: Table<intf::Keystream>,
    free: Mutex<Free>,
    epochs: AtomicU32,
}

/// Entries of the tables that are not in use.
struct Free {
    upstreams: Slab,
    egresses: Slab,
    downstreams: Slab,
    keystreams: keystream::Runs,
}

impl Relay {
    pub fn load(config: &Config) -> Result<Self, Error> {
        let settings = settings(config)?;
        let ring_bytes = ring_bytes(config.max_waiting);
        let mut open = embedded!("relay.bpf.o").open()?;
        open.configure(&settings)?;
        for (map, entries) in [
            // A connection has up to 8 IDs at a time (RFC 9000, section 5.1.1, leaves it to the endpoint).
            ("ids", config.max_upstreams.saturating_add(config.max_downstreams).saturating_mul(8)),
            ("upstreams", config.max_upstreams),
            ("open_keys", config.max_upstreams.saturating_mul(2)),
            ("slots", config.max_slots),
            ("egresses", config.max_egresses),
            ("downstreams", config.max_downstreams),
            ("seal_keys", config.max_downstreams.saturating_mul(2)),
            ("keystreams", keystream_entries(config)),
            ("forwarded", ring_bytes),
            ("events", trace::RING_BYTES),
        ] {
            open.map(map)?
                .set_max_entries(entries.max(1))
                .map_err(|source| Error::Open { object: OBJECT, source })?;
        }
        let mut object = open.load()?;
        let shared = Shared::new(&mut object, config)?;
        let ring = Ring::new(object.handle("forwarded")?, ring_bytes as usize)
            .map_err(|source| Error::Memory { what: "forwarded", source })?;
        let trace = trace::Trace::new(&mut object)?;
        Ok(Self {
            attachments: Mutex::default(),
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
        let mut attachments = lock(&self.attachments);
        if let Some(there) = attachments.get(&ifindex).filter(|there| there.is_in_place()) {
            return Ok(there.mechanism());
        }
        // Dropped first: it would take away what is attached in its place.
        attachments.remove(&ifindex);
        allow_route_lookup()?;
        let object = lock(&self.object);
        let program = object.program("relay_ingress")?;
        let attachment = Attachment::new(&program, ifindex, Hook::Ingress, Position::First, self.mechanism)?;
        let mechanism = attachment.mechanism();
        attachments.insert(ifindex, attachment);
        Ok(mechanism)
    }

    /// Whether it is attached to an interface: somebody else may have detached it, and interfaces come and go.
    pub fn is_attached(&self, ifindex: i32) -> bool {
        lock(&self.attachments).get(&ifindex).is_some_and(Attachment::is_in_place)
    }

    /// Detaches from an interface, as [`Self::detach`] does from all.
    pub fn detach_from(&self, ifindex: i32) {
        lock(&self.attachments).remove(&ifindex);
    }

    /// Detaches from every interface. What was installed stays; while nothing is attached the replay window
    /// of each upstream only moves by [`Upstream::observe`].
    pub fn detach(&self) {
        lock(&self.attachments).clear();
    }

    /// Starts on a connection that media arrives on; `expected` is one more than its largest packet number
    /// received so far, and no number before it will be forwarded.
    pub fn upstream(&self, expected: u64) -> Result<Upstream, Error> {
        Upstream::new(self.shared.clone(), expected)
    }

    /// Makes `socket` one that packets may be led to. It is a UDP socket that is bound to some address in the network
    /// namespace of the interfaces, and lives as long as this is used. At most `room` packets wait there.
    pub fn deferred_socket(&self, socket: impl AsFd, room: u64) -> Result<DeferredSocket, Error> {
        DeferredSocket::new(self.shared.clone(), socket, room)
    }

    /// Starts on a connection that media leaves on, with neither keys, credit nor window. `word` is what its
    /// packet number word starts with; everybody must use [`Downstream::number`] from now on.
    pub fn downstream(&self, path: &Path, mtu: u32, word: u64) -> Result<Downstream, Error> {
        Downstream::new(self.shared.clone(), path, mtu, word)
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

    /// Hands over the events since the last call, those of one packet in any order, and returns how many there was
    /// no room for since. No system call.
    pub fn drain_events(&self, read: impl FnMut(Event)) -> u64 {
        self.trace.drain(read)
    }

    /// Returns when every run of the program has ended that had begun before: nothing that was removed by then is
    /// used any more, neither by packets between two of their runs, so it may be handed out again, and what was sent
    /// over it is registered. Blocks the calling thread for some 10 ms.
    pub fn settle(&self) -> Result<(), Error> {
        self.shared.settle()
    }

    /// Whether [`settle`](Self::settle) should be called soon, for something to be left to hand out.
    pub fn needs_settling(&self) -> bool {
        lock(&self.shared.free).needs_settling()
    }

    /// Whether [`settle`](Self::settle) would make room for keystreams.
    pub fn has_retired_keystreams(&self) -> bool {
        !lock(&self.shared.free).keystreams.retired.is_empty()
    }

    pub fn counters(&self) -> Result<Counters, Error> {
        let raw = lock(&self.object).counters("outcomes")?;
        Counters::new(&raw).ok_or(Error::Missing { object: OBJECT, what: "counter for each outcome" })
    }
}

impl Shared {
    fn new(object: &mut Loaded, config: &Config) -> Result<Self, Error> {
        let upstreams = table(object, "upstreams")?;
        let egresses = table(object, "egresses")?;
        let downstreams = table(object, "downstreams")?;
        let free = Free {
            upstreams: Slab::new(upstreams.len()),
            egresses: Slab::new(egresses.len()),
            downstreams: Slab::new(downstreams.len()),
            keystreams: keystream::Runs::new(keystream_entries(config)),
        };
        Ok(Self {
            ids: object.handle("ids")?,
            slots: object.handle("slots")?,
            open_keys: object.handle("open_keys")?,
            seal_keys: object.handle("seal_keys")?,
            barrier: Barrier::new(object)?,
            sockets: object.handle("sockets")?,
            deferrals: table(object, "deferrals")?,
            sockets_used: AtomicU32::new(0),
            arrivals: table(object, "arrivals")?,
            upstreams,
            egresses,
            downstreams,
            keystreams: table(object, "keystreams")?,
            free: Mutex::new(free),
            epochs: AtomicU32::new(1),
        })
    }

    fn settle(&self) -> Result<(), Error> {
        let retired = lock(&self.free).take_retired();
        let result = self.barrier.wait_for_runs();
        let free = &mut lock(&self.free);
        match result {
            Ok(()) => free.reuse(retired),
            Err(_) => free.put_back(retired),
        }
        result
    }

    /// Never waits.
    fn take(&self, which: fn(&mut Free) -> &mut Slab, what: &'static str) -> Result<u32, Error> {
        let mut free = lock(&self.free);
        let slab = which(&mut free);
        let full = if slab.retired.is_empty() { Error::Full { what } } else { Error::Unsettled { what } };
        slab.take().ok_or(full)
    }

    /// Nothing leads to entry `index` any more, except in runs of the program that have begun.
    fn retire(&self, which: fn(&mut Free) -> &mut Slab, index: u32) {
        which(&mut lock(&self.free)).retired.push(index);
    }

    /// Not 0, which stands for "not in use".
    fn next_epoch(&self) -> u32 {
        match self.epochs.fetch_add(1, Ordering::Relaxed) {
            0 => self.epochs.fetch_add(1, Ordering::Relaxed),
            epoch => epoch,
        }
    }
}

/// What was unlinked, and may still be in use.
struct Retired {
    slabs: [Vec<u32>; 3],
    runs: Vec<keystream::Run>,
}

impl Free {
    fn slabs(&mut self) -> [&mut Slab; 3] {
        [&mut self.upstreams, &mut self.egresses, &mut self.downstreams]
    }

    fn needs_settling(&mut self) -> bool {
        self.slabs().into_iter().any(|slab| slab.is_low())
    }

    fn take_retired(&mut self) -> Retired {
        let runs = std::mem::take(&mut self.keystreams.retired);
        Retired { slabs: self.slabs().map(|slab| std::mem::take(&mut slab.retired)), runs }
    }

    fn reuse(&mut self, retired: Retired) {
        for (slab, indexes) in self.slabs().into_iter().zip(retired.slabs) {
            slab.free.extend(indexes);
        }
        retired.runs.into_iter().for_each(|run| self.keystreams.give(run));
    }

    fn put_back(&mut self, retired: Retired) {
        for (slab, indexes) in self.slabs().into_iter().zip(retired.slabs) {
            slab.retired.extend(indexes);
        }
        self.keystreams.retired.extend(retired.runs);
    }
}

/// Hands out indexes.
struct Slab {
    untouched: std::ops::Range<u32>,
    free: Vec<u32>,
    /// Free once the program runs of now have ended.
    retired: Vec<u32>,
}

impl Slab {
    fn new(len: u32) -> Self {
        Self { untouched: 0..len, free: Vec::new(), retired: Vec::new() }
    }

    fn take(&mut self) -> Option<u32> {
        self.free.pop().or_else(|| self.untouched.next())
    }

    /// Whether more wait to become free than are.
    fn is_low(&self) -> bool {
        self.retired.len() > self.free.len() + self.untouched.len()
    }
}

fn settings(config: &Config) -> Result<intf::Config, Error> {
    if config.ports.len() > intf::PORTS {
        return Err(Error::Config("the fast path watches 4 ports at most"));
    }
    if config.id_len > intf::ID_MAX {
        return Err(Error::Config("connection IDs have 20 bytes at most"));
    }
    let mut ports = [[0; 2]; intf::PORTS];
    ports.iter_mut().zip(&config.ports).for_each(|(to, port)| *to = port.to_be_bytes());
    Ok(intf::Config {
        max_copies_per_run: config.max_copies_per_run,
        max_runs: config.max_runs,
        id_bytes: config.id_len as u32,
        ports,
    })
}

fn keystream_entries(config: &Config) -> u32 {
    let entries = config.keystream_bytes / size_of::<intf::Keystream>() as u64;
    u32::try_from(entries).unwrap_or(u32::MAX)
}

/// The kernel wants a power of two of whole pages; each record has an 8-byte header.
fn ring_bytes(records: u32) -> u32 {
    const MAX: u32 = 1 << 30;
    let record = size_of::<intf::Forwarded>() as u32 + 8;
    records.saturating_mul(record).clamp(64 * 1024, MAX).next_power_of_two()
}

fn allow_route_lookup() -> Result<(), Error> {
    const V4: &str = "/proc/sys/net/ipv4/conf/lo/forwarding";
    const V6: &str = "/proc/sys/net/ipv6/conf/lo/forwarding";
    for path in [V4, V6] {
        match std::fs::read(path) {
            Ok(flag) if flag.starts_with(b"1") => {}
            // A host without IPv6.
            Err(source) if path == V6 && source.kind() == io::ErrorKind::NotFound => {}
            _ => std::fs::write(path, "1").map_err(|source| Error::Sysctl { path, source })?,
        }
    }
    Ok(())
}

fn table<T: memory::Shared>(object: &mut Loaded, name: &'static str) -> Result<Table<T>, Error> {
    let map = object.map(name)?;
    let layout = map.value_size() as usize == size_of::<T>();
    let len = NonZero::new(map.max_entries()).filter(|_| layout);
    let len = len.ok_or(Error::Missing { object: OBJECT, what: "map of the expected layout" })?;
    Table::new(map.as_fd(), len).map_err(|source| Error::Memory { what: name, source })
}

/// Nothing that is done under these locks leaves a state half changed.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
