//! Packet grafts: functions that run on the datagrams of UDP sessions. The dispatcher (`bpf/packet.bpf.c`) runs them
//! at three hooks: TC egress, XDP and TC ingress.
//!
//! 1. [`PacketHooks::load`] loads the dispatcher, [`PacketHooks::add`] each [`OpenedFunction`], and
//!    [`PacketHooks::attach`] attaches to interfaces.
//! 2. [`PacketHooks::open`] opens a [`FunctionSession`] with a [`FunctionList`]. Both hosts open the session with the
//!    same key and list.
//! 3. To replace the list without loss, both hosts [`PacketHooks::accept`] the new list in the unused epoch, then
//!    [`PacketHooks::switch`] to it, and [`PacketHooks::retire`] the old epoch when none of its packets is in flight
//!    any more.
//!
//! Nothing is pinned: dropping [`PacketHooks`] or killing the process detaches everything.

mod active;
mod function;
mod intf;
mod known;
mod message;
mod pairs;
mod path;
mod queue;
mod reason;
mod room;
mod run;
mod seal;
mod talk;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::io::Read as _;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use libbpf_rs::{MapCore, MapFlags, MapHandle, num_possible_cpus};

pub use function::OpenedFunction;
pub use known::{FunctionTimes, SessionProgress};
pub use path::{PATH_SESSIONS, PATHS_MAX, PathCount, SessionPath};
pub use reason::PacketReason;
pub use room::{KEPT_BYTES, SEALED_BYTES, SessionRoom, base_bytes};
pub use run::PacketRun;
pub use seal::{KeyPhase, SEAL_BYTES, SEALED_MAX, SealKeys, Wear};

pub use talk::{ReceivedMessage, TalkMessage, Tick};

use millrace_kernel::barrier::Barrier;
use millrace_kernel::intf::Plain;
use millrace_kernel::memory::MappedArray;
use millrace_kernel::object::{Embedded, LoadedObject, embedded, write};
use millrace_kernel::tc::{self, KernelHook, TcPosition};
use millrace_kernel::xdp::{self, XdpMode};

use self::pairs::AddressPairs;
use self::queue::PacketQueue;
use super::Error;

/// Largest number of packet functions in a graft's list.
pub const LIST_MAX: usize = intf::LIST;
/// Largest number of sessions that the dispatcher can be loaded for.
pub const SESSIONS_MAX: u32 = 16_384;
/// Bytes of the frame that is appended to each datagram of a session.
pub const FRAME_BYTES: usize = 16;

/// A hook of the kernel at which packet functions run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum FunctionHook {
    /// TC egress: outgoing packets.
    Tx,
    /// XDP: incoming packets, before the kernel has a socket buffer.
    Rx,
    /// TC ingress: incoming packets, where functions may change packets and send others.
    Repair,
}

impl FunctionHook {
    /// The hooks, in the order of their numbers in C (`enum graft_hook`).
    pub const ALL: [Self; 3] = [Self::Tx, Self::Rx, Self::Repair];

    /// Returns the hook's name in settings and reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Tx => "tx",
            Self::Rx => "rx",
            Self::Repair => "repair",
        }
    }

    fn programs(self) -> &'static str {
        match self {
            Self::Tx => "programs_tx",
            Self::Rx => "programs_rx",
            Self::Repair => "programs_repair",
        }
    }

    fn verdict(self) -> &'static str {
        match self {
            Self::Tx => "packet_tx_done",
            Self::Rx => "packet_rx_done",
            Self::Repair => "packet_repair_done",
        }
    }
}

/// The addresses and ports of a session's datagrams, as this host sees them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SessionEnds {
    /// This host's address and port.
    pub local: SocketAddr,
    /// The peer's address and port.
    pub remote: SocketAddr,
}

/// A list of functions, in the order in which they run at each hook.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FunctionList {
    /// Names of the functions, as given to [`PacketHooks::add`] or [`PacketHooks::add_as`].
    pub functions: Vec<String>,
    /// Identifier of the function list, which every frame contains. A host drops frames with another identifier,
    /// counted as `stale`.
    pub id: u16,
}

/// A session: datagrams between two addresses and ports that are processed by a list of functions. Both hosts open it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FunctionSession {
    /// Addresses and ports of the session's datagrams.
    pub ends: SessionEnds,
    /// SipHash key that authenticates frames. Both hosts need the same key.
    pub key: [u8; 16],
    /// The functions that process the session's datagrams.
    pub list: FunctionList,
    /// Time that all functions at one hook together may take for a packet, ns; 0: no limit. Every 64th packet is
    /// measured, and those that take longer are counted.
    pub budget_ns: u32,
}

/// The number of an epoch, 0 or 1. A session has a list of functions for each epoch. One epoch is in use while the list
/// of the other one is prepared.
pub type ListEpoch = u8;

struct FunctionSlots {
    loaded: function::LoadedFunction,
    slot: u8,
}

impl FunctionSlots {
    /// Returns whether a function list that contains this function has to run at TC ingress.
    fn needs_repair(&self) -> bool {
        self.loaded.programs.contains_key(&FunctionHook::Repair) && !self.loaded.only_recovered
    }
}

struct OpenSession {
    raw: intf::Session,
    sealed: Option<seal::Sealed>,
    seen: active::SeenPackets,
}

struct PacketInterface {
    ifindex: i32,
    xdp: xdp::root::XdpTurn,
    tc: [tc::TcAttachment; 2],
}

/// The loaded dispatcher, with its functions and sessions.
///
/// # The states of a session
///
/// A session has two epochs, each with a list of functions. Outgoing packets use one epoch; incoming packets are
/// accepted in each epoch that is *live*. [`Self::open`] begins with epoch 0, which is live. To replace the list,
/// [`Self::accept`] makes the other epoch live, [`Self::switch`] makes outgoing packets use it, and [`Self::retire`]
/// ends the old one. Neither host may switch before both have accepted.
///
/// [`Self::hold`] stops outgoing packets only. [`Self::pause`] stops both directions and waits for running programs.
/// [`Self::replace`] restarts the session with another list, and [`Self::resume`] sends outgoing packets again. A
/// sealed session passes no packet before it has keys: [`Self::install`] adds a key for incoming packets,
/// [`Self::seal_with`] selects one for outgoing packets, and [`Self::discard`] removes old ones. Each change is one
/// write of one map entry, so a packet is handled by the state before or after it, never by a mix.
pub struct PacketHooks {
    places: Vec<PacketInterface>,
    sessions: BTreeMap<SessionEnds, OpenSession>,
    /// Addresses and ports of each session, by the session's index in the kernel's maps.
    by_index: Vec<Option<SessionEnds>>,
    free: BinaryHeap<Reverse<u32>>,
    room: SessionRoom,
    functions: BTreeMap<String, FunctionSlots>,
    object: LoadedObject,
    shared: BTreeMap<&'static str, MapHandle>,
    table: MapHandle,
    pairs: AddressPairs,
    paths: path::PathMaps,
    active: MappedArray<AtomicU64>,
    messages: PacketQueue,
    ticks: PacketQueue,
    mark: u32,
    /// Counter of the starts and restarts of all sessions. Its value identifies the latest start of a session.
    births: u32,
    /// BPF programs that encrypt and decrypt (seal and open) datagrams, loaded with the first sealed session.
    stages: Option<seal::Stages>,
    /// A barrier that waits until running BPF programs have returned. It is created when a session is first paused.
    barrier: Option<Barrier>,
    /// Sessions whose application may send again now, after a packet was refused because too many packets were in
    /// flight.
    room_for: Vec<SessionEnds>,
}

fn object() -> Embedded {
    embedded!("packet.bpf.o")
}

impl PacketHooks {
    /// Loads the dispatcher for the default number of sessions.
    pub fn load() -> Result<Self, Error> {
        Self::load_for(SessionRoom::default())
    }

    /// Loads the dispatcher for this number of sessions. The kernel allocates the memory of its maps at once.
    pub fn load_for(room: SessionRoom) -> Result<Self, Error> {
        let mut open = object().open()?;
        room.fit(open.object_mut())?;
        // Packets that functions send have this packet mark. It is random, so that the marks of other programs differ,
        // and odd, so that it is not 0.
        let mark = random().map_err(Error::Descriptor)? | 1;
        let message_mark = message::message_mark(mark);
        let path_mark = path::mark(mark);
        open.configure(&intf::Config { mark, message_mark, path_mark })?;
        let mut object = open.load()?;
        let mut shared = BTreeMap::new();
        for name in function::SHARED.into_iter().chain([function::KEPT]) {
            shared.insert(name, object.handle(name)?);
        }
        for hook in FunctionHook::ALL {
            let verdict = object.program(hook.verdict())?;
            let fd = verdict.as_fd().as_raw_fd().to_ne_bytes();
            // Entry 0 of a program array is the hook's verdict program, which runs after the last function of each
            // list.
            write(&shared[hook.programs()], hook.programs(), &[0; 4], &fd)?;
        }
        let table = object.handle("sessions")?;
        let pairs = AddressPairs(object.handle("sealed_pairs")?);
        let paths = path::PathMaps::from_object(&mut object)?;
        let active = object.table("active")?;
        let [messages, ticks] = ["messages", "ticks"].map(|name| PacketQueue::new(&mut object, name));
        Ok(Self {
            places: Vec::new(),
            sessions: BTreeMap::new(),
            by_index: vec![None; room.sessions as usize],
            free: (0..room.sessions).map(Reverse).collect(),
            room,
            functions: BTreeMap::new(),
            object,
            shared,
            table,
            pairs,
            paths,
            active,
            messages: messages?,
            ticks: ticks?,
            mark,
            births: 0,
            stages: None,
            barrier: None,
            room_for: Vec::new(),
        })
    }

    // --- Attaching the dispatcher to interfaces ---

    /// Attaches the dispatcher to all three hooks of an interface, in the calling thread's network namespace. The gate
    /// may use the same XDP hook. Returns the XDP mode in use, which is never [`XdpMode::Auto`].
    pub fn attach(&mut self, ifindex: i32, mode: XdpMode) -> Result<XdpMode, Error> {
        let program = |name| self.object.program(name);
        let tx = program("packet_tx")?;
        let repair = program("packet_repair")?;
        let tc = [
            tc::TcAttachment::new(&repair, ifindex, KernelHook::Ingress, TcPosition::First, None)?,
            tc::TcAttachment::new(&tx, ifindex, KernelHook::Egress, TcPosition::Last, None)?,
        ];
        let rx = program("packet_rx")?;
        let xdp = xdp::root::XdpTurn::new(&rx, xdp::root::RootProduct::Graft, ifindex, mode, |_| Ok(()))?;
        // The attachment has already chosen native or generic mode in place of XdpMode::Auto.
        let mode = xdp.mode();
        self.places.push(PacketInterface { ifindex, xdp, tc });
        Ok(mode)
    }

    /// Returns whether the dispatcher is still attached to all hooks of an interface.
    pub fn is_attached(&self, ifindex: i32) -> bool {
        let mut here = self.places.iter().filter(|place| place.ifindex == ifindex);
        here.any(|place| place.xdp.is_in_place() && place.tc.iter().all(tc::TcAttachment::is_in_place))
    }

    /// Detaches the dispatcher from an interface.
    pub fn detach_from(&mut self, ifindex: i32) {
        self.places.retain(|place| place.ifindex != ifindex);
    }

    /// Returns file descriptors of the BPF programs at TC egress. While another process holds all of them, outgoing
    /// packets are still framed and sealed after this process has ended. This covers the time in which the kernel
    /// closes a dying process's sockets; errors are no longer reported then.
    pub fn egress(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let programs = ["programs_tx", "stages_tx"].into_iter().filter_map(|name| self.shared.get(name));
        // The second attachment of each interface is the one at TC egress.
        let links = self.places.iter().filter_map(|place| place.tc[1].descriptor());
        programs.map(|map| map.as_fd()).chain(links)
    }

    // --- Functions that lists can contain ---

    /// Loads a function under its own name, so that lists of functions can contain it.
    pub fn add(&mut self, function: OpenedFunction) -> Result<(), Error> {
        self.add_as(function.name().to_owned(), function)
    }

    /// Loads a function under another name, so that two versions of it can exist at the same time.
    pub fn add_as(&mut self, name: String, function: OpenedFunction) -> Result<(), Error> {
        self.add_version(name, function, None)
    }

    /// Loads another version of a function, which shares the map with the sessions' states with the loaded version
    /// `alike`.
    pub fn add_version(
        &mut self,
        name: String,
        function: OpenedFunction,
        alike: Option<&str>,
    ) -> Result<(), Error> {
        if self.functions.contains_key(&name) {
            return Err(Error::Function(name));
        }
        // `slot` is the function's index in the program arrays of all three hooks.
        let slot = self.free_slot()?;
        let alike = alike.map(|alike| self.function(alike)).transpose()?;
        let loaded = function.load(&self.room, &self.shared, alike)?;
        for hook in FunctionHook::ALL {
            if let Some(descriptor) = loaded.descriptor(hook) {
                self.write_program(hook, slot, &descriptor)?;
            }
        }
        self.functions.insert(name, FunctionSlots { loaded, slot });
        Ok(())
    }

    /// Returns whether a function of this name is loaded.
    pub fn has(&self, function: &str) -> bool {
        self.functions.contains_key(function)
    }

    /// Unloads a function. If a session's list still contains it, the session's packets pass with their frames added or
    /// removed, but without the list's further functions. They are counted as `no-function`.
    pub fn remove(&mut self, name: &str) -> Result<(), Error> {
        let slots = self.functions.remove(name).ok_or_else(|| Error::NoFunction(name.to_owned()))?;
        for hook in slots.loaded.programs.keys() {
            let _ = self.shared[hook.programs()].delete(&u32::from(slots.slot).to_ne_bytes());
        }
        Ok(())
    }

    fn free_slot(&self) -> Result<u8, Error> {
        let is_free = |slot: &u8| self.functions.values().all(|other| other.slot != *slot);
        let have = self.functions.len() + 1;
        let room = intf::FUNCTIONS - 1;
        // Index 0 of a program array is the hook's verdict program, so functions use the indices from 1 on.
        (1..=room as u8).find(is_free).ok_or(Error::Room { what: "functions", have, room })
    }

    fn write_program(&self, hook: FunctionHook, slot: u8, descriptor: &[u8]) -> Result<(), Error> {
        let name = hook.programs();
        Ok(write(&self.shared[name], name, &u32::from(slot).to_ne_bytes(), descriptor)?)
    }

    // --- Sessions and their states ---

    /// Opens a session. From now on its outgoing datagrams get a frame, and incoming ones without a valid frame are
    /// dropped.
    pub fn open(&mut self, session: FunctionSession) -> Result<(), Error> {
        self.open_with(session, None)
    }

    fn open_with(&mut self, session: FunctionSession, sealed: Option<seal::Sealed>) -> Result<(), Error> {
        let ends = session.ends;
        if self.sessions.contains_key(&ends) {
            return Err(Error::Session { local: ends.local, remote: ends.remote });
        }
        let have = self.sessions.len() + 1;
        let room = self.room.sessions as usize;
        // The lowest free index is used, since only the sessions with the lowest indices may store packets.
        let Reverse(index) = *self.free.peek().ok_or(Error::Room { what: "sessions", have, room })?;
        let mut raw = intf::Session {
            index,
            budget_ns: session.budget_ns,
            key: halves(session.key),
            live: 1,
            is_sealed: sealed.is_some().into(),
            ..Default::default()
        };
        raw.lists[0] = self.encode(&session.list)?;
        raw.list_ids[0] = session.list.id.to_be_bytes();
        self.forget(index)?;
        self.count_anew(index)?;
        if raw.is_sealed != 0 {
            self.pairs.begin(&ends, index)?;
        }
        self.put(&ends, &raw)?;
        // The session's index counts as used only after all writes to maps have succeeded, so a failed open leaves it
        // free.
        self.free.pop();
        self.by_index[index as usize] = Some(ends);
        self.sessions.insert(ends, OpenSession { raw, sealed, seen: self.seen(index) });
        Ok(())
    }

    /// Sets the list of functions of the session's unused epoch, and accepts incoming packets of that epoch from now
    /// on. Returns the epoch.
    pub fn accept(&mut self, ends: &SessionEnds, list: &FunctionList) -> Result<ListEpoch, Error> {
        let encoded = self.encode(list)?;
        let epoch = self.find(ends)?.raw.epoch ^ 1;
        self.change(ends, |raw| {
            raw.lists[usize::from(epoch)] = encoded;
            raw.list_ids[usize::from(epoch)] = list.id.to_be_bytes();
            raw.live |= 1 << epoch;
        })?;
        Ok(epoch)
    }

    /// Converts the state that a session has in the function `from` to the layout of the function `to`, for these hooks
    /// only. It has to be called before the first packet reaches the new version. Afterwards each version handles the
    /// packets of its own epoch.
    pub fn migrate(
        &self,
        ends: &SessionEnds,
        from: &str,
        to: &str,
        hooks: &[FunctionHook],
    ) -> Result<(), Error> {
        let session = self.find(ends)?.raw.index;
        self.function(to)?.migrate(session, self.function(from)?, hooks)
    }

    /// Returns the bytes of the state that a session has in a function; `None` if the function has no state.
    pub fn state(&self, ends: &SessionEnds, function: &str) -> Result<Option<Vec<u8>>, Error> {
        self.function(function)?.state(self.find(ends)?.raw.index)
    }

    fn function(&self, name: &str) -> Result<&function::LoadedFunction, Error> {
        let slots = self.functions.get(name).ok_or_else(|| Error::NoFunction(name.to_owned()))?;
        Ok(&slots.loaded)
    }

    /// Makes outgoing packets use this epoch from now on. Incoming packets of the other epoch are still accepted.
    pub fn switch(&mut self, ends: &SessionEnds, epoch: ListEpoch) -> Result<(), Error> {
        self.change(ends, |raw| raw.epoch = epoch & 1)
    }

    /// Returns the epoch of a session's outgoing packets.
    pub fn epoch(&self, ends: &SessionEnds) -> Result<ListEpoch, Error> {
        Ok(self.find(ends)?.raw.epoch)
    }

    /// Stops accepting incoming packets of this epoch of a session.
    pub fn retire(&mut self, ends: &SessionEnds, epoch: ListEpoch) -> Result<(), Error> {
        self.change(ends, |raw| raw.live &= !(1 << (epoch & 1)))
    }

    /// Replaces the key that authenticates a session's frames.
    pub fn set_key(&mut self, ends: &SessionEnds, key: [u8; 16]) -> Result<(), Error> {
        self.change(ends, |raw| raw.key = halves(key))
    }

    /// Drops a session's outgoing datagrams until [`resume`](Self::resume), counted as `paused`. Incoming datagrams are
    /// still accepted.
    pub fn hold(&mut self, ends: &SessionEnds) -> Result<(), Error> {
        self.change(ends, |raw| raw.is_paused = 1)
    }

    /// Changes the time, in ns, that a session's functions may take for a packet at each hook. Every 64th packet is
    /// measured, and those that take longer are counted.
    pub fn set_budget(&mut self, ends: &SessionEnds, budget_ns: u32) -> Result<(), Error> {
        self.change(ends, |raw| raw.budget_ns = budget_ns)
    }

    /// Drops a session's packets in both directions: incoming ones until [`replace`](Self::replace), outgoing ones
    /// until [`resume`](Self::resume). When this returns, no BPF program of this host still handles a packet of the
    /// session. Outgoing packets are counted as `paused`.
    pub fn pause(&mut self, ends: &SessionEnds) -> Result<(), Error> {
        self.make_pausable()?;
        self.change(ends, |raw| (raw.live, raw.is_paused) = (0, 1))?;
        Ok(self.barrier.as_ref().map_or(Ok(()), Barrier::wait_for_runs)?)
    }

    /// Creates the barrier that [`pause`](Self::pause) needs to wait for running programs. Fails on kernels that cannot
    /// wait for them.
    pub fn make_pausable(&mut self) -> Result<(), Error> {
        if self.barrier.is_none() {
            self.barrier = Some(Barrier::new(&mut self.object)?);
        }
        Ok(())
    }

    /// Sends outgoing packets of a paused session again.
    pub fn resume(&mut self, ends: &SessionEnds) -> Result<(), Error> {
        match self.find(ends)?.raw.is_paused {
            0 => Ok(()),
            _ => self.change(ends, |raw| raw.is_paused = 0),
        }
    }

    /// Restarts a session with another list of functions: packet numbers and the functions' states begin again. Packets
    /// in flight are dropped, counted as `stale` or `old`. Both hosts call this with the same epoch.
    pub fn replace(
        &mut self,
        ends: &SessionEnds,
        list: &FunctionList,
        epoch: ListEpoch,
    ) -> Result<(), Error> {
        let encoded = self.encode(list)?;
        let index = self.find(ends)?.raw.index;
        let epoch = epoch & 1;
        // Incoming packets are dropped while the state is reset.
        self.change(ends, |raw| raw.live = 0)?;
        self.forget(index)?;
        self.change(ends, |raw| {
            raw.lists[usize::from(epoch)] = encoded;
            raw.list_ids[usize::from(epoch)] = list.id.to_be_bytes();
            (raw.epoch, raw.live) = (epoch, 1 << epoch);
        })
    }

    /// Closes a session. From now on datagrams between its addresses and ports pass without frames.
    pub fn close(&mut self, ends: &SessionEnds) -> Result<(), Error> {
        let open =
            self.sessions.remove(ends).ok_or(Error::NoSession { local: ends.local, remote: ends.remote })?;
        // From now on, BPF events with this session index are no longer attributed to the session.
        self.by_index[open.raw.index as usize] = None;
        self.free.push(Reverse(open.raw.index));
        // The session's timer is stopped before the index is freed, since it would report events for the next session
        // with this index.
        self.set_clock_of(open.raw.index, Duration::ZERO)?;
        self.table.delete(key(ends)?.as_bytes()).map_err(Error::State)?;
        self.end_sealed(open.raw.index);
        if open.raw.paths != 0 {
            self.end_paths(ends, open.raw.index, open.raw.paths)?;
        }
        let others = self.sessions.iter().filter(|(_, open)| open.raw.is_sealed != 0);
        self.pairs.end(ends, others.map(|(ends, open)| (ends, open.raw.index)))
    }

    fn find(&self, ends: &SessionEnds) -> Result<&OpenSession, Error> {
        self.sessions.get(ends).ok_or(Error::NoSession { local: ends.local, remote: ends.remote })
    }

    /// Changes a session's map entry with one write. The kernel replaces the entry as a whole, so each packet is
    /// handled by the old or the new one.
    fn change(&mut self, ends: &SessionEnds, change: impl FnOnce(&mut intf::Session)) -> Result<(), Error> {
        let mut raw = self.find(ends)?.raw;
        change(&mut raw);
        self.put(ends, &raw)?;
        if let Some(open) = self.sessions.get_mut(ends) {
            open.raw = raw;
        }
        Ok(())
    }

    fn put(&self, ends: &SessionEnds, raw: &intf::Session) -> Result<(), Error> {
        Ok(write(&self.table, "sessions", key(ends)?.as_bytes(), raw.as_bytes())?)
    }

    /// Resets a session's packet numbers and its states in all functions. The new start number (`birth`) makes packets
    /// invalid that functions have stored for the session before.
    fn forget(&mut self, index: u32) -> Result<(), Error> {
        self.births = self.births.wrapping_add(1);
        // One write resets packet numbers and acknowledgements. Packets that functions stored earlier have another
        // start number (`birth`).
        let begun = intf::Shared { birth: self.births, ..Default::default() };
        write(&self.shared["shared"], "shared", &index.to_ne_bytes(), begun.as_bytes())?;
        self.functions.values().try_for_each(|slots| slots.loaded.forget(index))
    }

    /// Sets the counters of a session's index to zero, since another session had the index before.
    fn count_anew(&mut self, index: u32) -> Result<(), Error> {
        for name in ["counters", "times"] {
            let error = |source| millrace_kernel::Error::Write { what: name, source };
            let map = self.object.map(name)?;
            // A per-CPU array has a value for each possible CPU, also for those that are offline.
            let zeros = vec![vec![0; map.value_size() as usize]; num_possible_cpus().map_err(error)?];
            map.update_percpu(&index.to_ne_bytes(), &zeros, MapFlags::ANY).map_err(error)?;
        }
        Ok(())
    }

    /// Encodes a list of functions for the kernel. Each hook gets one byte per function, which is the function's index
    /// in the program array; the first function is in the lowest byte.
    fn encode(&self, list: &FunctionList) -> Result<[u64; intf::HOOKS], Error> {
        let have = list.functions.len();
        let room = LIST_MAX;
        if have > room {
            return Err(Error::Room { what: "functions of a list", have, room });
        }
        let find = |name: &String| self.functions.get(name).ok_or_else(|| Error::NoFunction(name.clone()));
        let functions = list.functions.iter().map(find).collect::<Result<Vec<_>, _>>()?;
        let mut encoded = [0; intf::HOOKS];
        for (hook, encoded) in FunctionHook::ALL.into_iter().zip(&mut encoded) {
            // Some functions only handle recovered packets at TC ingress. If the list has only such functions there,
            // and no function that recovers packets, it runs none of them at TC ingress.
            if hook == FunctionHook::Repair && !functions.iter().any(|slots| slots.needs_repair()) {
                continue;
            }
            let there = functions.iter().filter(|slots| slots.loaded.programs.contains_key(&hook));
            for (at, slots) in there.enumerate() {
                // The BPF programs shift the encoded list by one byte for each function. A byte of 0 ends the list.
                *encoded |= u64::from(slots.slot) << (8 * at);
            }
        }
        Ok(encoded)
    }
}

fn halves(key: [u8; 16]) -> [u64; 2] {
    // SipHash reads its key as two little-endian words.
    let halves = key.as_chunks::<8>().0;
    [u64::from_le_bytes(halves[0]), u64::from_le_bytes(halves[1])]
}

fn random() -> std::io::Result<u32> {
    let mut bytes = [0; 4];
    std::fs::File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(u32::from_ne_bytes(bytes))
}

fn key(ends: &SessionEnds) -> Result<intf::Key, Error> {
    let SessionEnds { local, remote } = *ends;
    // Both addresses of a datagram have to be of one family.
    if local.is_ipv4() != remote.is_ipv4() {
        return Err(Error::Families { local, remote });
    }
    Ok(intf::Key {
        local: bytes(local.ip()),
        remote: bytes(remote.ip()),
        local_port: local.port().to_be_bytes(),
        remote_port: remote.port().to_be_bytes(),
    })
}

fn bytes(address: IpAddr) -> [u8; 16] {
    match address {
        IpAddr::V4(address) => {
            let mut bytes = [0; 16];
            bytes[..4].copy_from_slice(&address.octets());
            bytes
        }
        IpAddr::V6(address) => address.octets(),
    }
}
