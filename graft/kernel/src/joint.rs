//! Packet grafts: the joints at which functions run, the functions that are loaded, and the sessions that use them
//! (`bpf/joint.bpf.c`).
//!
//! 1. [`Joints::load`], [`Joints::add`] each [`Function`], [`Joints::attach`] to the interfaces.
//! 2. [`Joints::open`] a [`Session`] with a [`List`] of functions. Both ends do, with the same key.
//! 3. To swap: [`Joints::accept`] the other list in the epoch that is not in use, at both ends; [`Joints::switch`] to it;
//!    [`Joints::retire`] the old epoch when nothing of it is under way any more.
//!
//! All of it ends with the [`Joints`]: nothing is pinned, and the kernel empties the program arrays when this process is killed.

mod active;
mod function;
mod intf;
mod known;
mod pairs;
mod path;
mod protocol;
mod queue;
mod reason;
mod room;
mod run;
mod seal;
mod talk;
mod word;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::io::Read as _;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use libbpf_rs::{MapCore, MapFlags, MapHandle, num_possible_cpus};

pub use function::Function;
pub use known::{Progress, Times};
pub use path::{PATH_SESSIONS, PATHS_MAX, Path, PathCount};
pub use protocol::Protocol;
pub use reason::Reason;
pub use room::{KEPT_BYTES, Room, SEALED_BYTES, base_bytes};
pub use run::Run;
pub use seal::{KeyWord, Keys, Phase, SEAL_BYTES, SEALED_MAX, Wear};

pub use talk::{Heard, Tick, Word};

use millrace_kernel::barrier::Barrier;
use millrace_kernel::intf::Plain;
use millrace_kernel::memory::Table;
use millrace_kernel::object::{Embedded, Loaded, embedded, write};
use millrace_kernel::tc::{self, Hook, Position};
use millrace_kernel::xdp::{self, Mode};

use self::pairs::Pairs;
use self::queue::Queue;
use super::Error;

/// Functions in a list.
pub const LIST_MAX: usize = intf::LIST;
/// Sessions at the same time, at most.
pub const SESSIONS_MAX: u32 = 16_384;
/// Bytes that a frame adds to a datagram.
pub const FRAME_BYTES: usize = 16;

/// Where functions run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Joint {
    /// TC egress.
    Tx,
    /// XDP.
    Rx,
    /// TC ingress, where packets may be changed and sent.
    Repair,
}

impl Joint {
    pub const ALL: [Self; 3] = [Self::Tx, Self::Rx, Self::Repair];

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
            Self::Tx => "joint_tx_done",
            Self::Rx => "joint_rx_done",
            Self::Repair => "joint_repair_done",
        }
    }
}

/// The datagrams between two addresses and ports, as this end sees them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ends {
    pub local: SocketAddr,
    pub remote: SocketAddr,
}

/// Functions in the order in which they run, at every joint.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct List {
    pub functions: Vec<String>,
    /// Both ends' frames carry it, so that another list is noticed.
    pub id: u16,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Session {
    pub ends: Ends,
    /// That frames are proved with. Both ends have the same.
    pub key: [u8; 16],
    pub list: List,
    /// Of the joint that takes longest; 0: none.
    pub budget_ns: u32,
    /// Both ends have the same.
    pub protocol: Protocol,
}

/// One of two: while one is in use, the other may be made ready.
pub type Epoch = u8;

struct Slots {
    loaded: function::Loaded,
    slot: u8,
}

impl Slots {
    /// Whether a list that it is in has to come to TC ingress for it.
    fn needs_repair(&self) -> bool {
        self.loaded.programs.contains_key(&Joint::Repair) && !self.loaded.only_recovered
    }
}

struct Open {
    raw: intf::Session,
    sealed: Option<seal::Sealed>,
    seen: active::Seen,
}

struct Place {
    ifindex: i32,
    xdp: xdp::root::Attachment,
    tc: [tc::Attachment; 2],
}

/// The dispatcher, loaded.
pub struct Joints {
    places: Vec<Place>,
    sessions: BTreeMap<Ends, Open>,
    /// By index in the kernel's maps.
    by_index: Vec<Option<Ends>>,
    free: BinaryHeap<Reverse<u32>>,
    room: Room,
    functions: BTreeMap<String, Slots>,
    object: Loaded,
    shared: BTreeMap<&'static str, MapHandle>,
    table: MapHandle,
    pairs: Pairs,
    paths: path::Maps,
    active: Table<AtomicU64>,
    words: Queue,
    ticks: Queue,
    mark: u32,
    /// Of sessions, each time that one begins, or begins anew.
    births: u32,
    /// With the first sealed session.
    stages: Option<seal::Stages>,
    /// With the first session that is paused.
    barrier: Option<Barrier>,
    key_words: Vec<seal::Heard>,
    /// Sessions whose senders were refused, and have room now.
    room_for: Vec<Ends>,
}

fn object() -> Embedded {
    embedded!("joint.bpf.o")
}

impl Joints {
    /// With as much room as is compiled in.
    pub fn load() -> Result<Self, Error> {
        Self::load_for(Room::default())
    }

    pub fn load_for(room: Room) -> Result<Self, Error> {
        let mut open = object().open()?;
        room.fit(open.object_mut())?;
        let mark = random().map_err(Error::Descriptor)? | 1;
        let (word_mark, path_mark) = (word::word_mark(mark), path::mark(mark));
        open.configure(&intf::Config { mark, clear_mark: word::clear_mark(mark), word_mark, path_mark })?;
        let mut object = open.load()?;
        let mut shared = BTreeMap::new();
        for name in function::SHARED.into_iter().chain([function::KEPT]) {
            shared.insert(name, object.handle(name)?);
        }
        for joint in Joint::ALL {
            let verdict = object.program(joint.verdict())?;
            let fd = verdict.as_fd().as_raw_fd().to_ne_bytes();
            write(&shared[joint.programs()], joint.programs(), &[0; 4], &fd)?;
        }
        let table = object.handle("sessions")?;
        let pairs = Pairs(object.handle("strict_pairs")?);
        let paths = path::Maps::of(&mut object)?;
        let active = object.table("active")?;
        let [words, ticks] = ["words", "ticks"].map(|name| Queue::new(&mut object, name));
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
            words: words?,
            ticks: ticks?,
            mark,
            births: 0,
            stages: None,
            barrier: None,
            key_words: Vec::new(),
            room_for: Vec::new(),
        })
    }

    // --- Interfaces ---

    /// Attaches all joints to an interface of the calling thread's network namespace. Its XDP program is shared with the gate.
    /// Returns how, never [`Mode::Auto`].
    pub fn attach(&mut self, ifindex: i32, mode: Mode) -> Result<Mode, Error> {
        let program = |name| self.object.program(name);
        let (tx, repair) = (program("joint_tx")?, program("joint_repair")?);
        let tc = [
            tc::Attachment::new(&repair, ifindex, Hook::Ingress, Position::First, None)?,
            tc::Attachment::new(&tx, ifindex, Hook::Egress, Position::Last, None)?,
        ];
        let rx = program("joint_rx")?;
        let xdp = xdp::root::Attachment::new(&rx, xdp::root::Turn::Graft, (ifindex, mode), |_| Ok(()))?;
        let mode = xdp.mode();
        self.places.push(Place { ifindex, xdp, tc });
        Ok(mode)
    }

    /// Whether all of them are still there.
    pub fn is_attached(&self, ifindex: i32) -> bool {
        let mut here = self.places.iter().filter(|place| place.ifindex == ifindex);
        here.any(|place| place.xdp.is_in_place() && place.tc.iter().all(tc::Attachment::is_in_place))
    }

    pub fn detach_from(&mut self, ifindex: i32) {
        self.places.retain(|place| place.ifindex != ifindex);
    }

    /// As long as somebody has all of these, what leaves goes on to be framed and sealed, though this process is gone: nobody says what
    /// comes of it any more. It is for a moment in which sockets are closed.
    pub fn egress(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let programs = ["programs_tx", "stages_tx"].into_iter().filter_map(|name| self.shared.get(name));
        let links = self.places.iter().filter_map(|place| place.tc[1].descriptor());
        programs.map(|map| map.as_fd()).chain(links)
    }

    // --- Functions ---

    /// Loads a function, for lists to name it.
    pub fn add(&mut self, function: Function) -> Result<(), Error> {
        self.add_as(function.name().to_owned(), function)
    }

    /// Under another name, so that two versions of one are there at the same time.
    pub fn add_as(&mut self, name: String, function: Function) -> Result<(), Error> {
        self.add_version(name, function, None)
    }

    /// And with the state of one that is there and whose state is the same: what either knows of a session, both know.
    pub fn add_version(
        &mut self,
        name: String,
        function: Function,
        alike: Option<&str>,
    ) -> Result<(), Error> {
        if self.functions.contains_key(&name) {
            return Err(Error::Function(name));
        }
        let slot = self.free_slot()?;
        let alike = alike.map(|alike| self.function(alike)).transpose()?;
        let loaded = function.load(&self.room, &self.shared, alike)?;
        for joint in Joint::ALL {
            if let Some(descriptor) = loaded.descriptor(joint) {
                self.write_program(joint, slot, &descriptor)?;
            }
        }
        self.functions.insert(name, Slots { loaded, slot });
        Ok(())
    }

    /// Whether lists may name it.
    pub fn has(&self, function: &str) -> bool {
        self.functions.contains_key(function)
    }

    /// Lists that name it go on with framing only, which is counted.
    pub fn remove(&mut self, name: &str) -> Result<(), Error> {
        let slots = self.functions.remove(name).ok_or_else(|| Error::NoFunction(name.to_owned()))?;
        for joint in slots.loaded.programs.keys() {
            let _ = self.shared[joint.programs()].delete(&u32::from(slots.slot).to_ne_bytes());
        }
        Ok(())
    }

    fn free_slot(&self) -> Result<u8, Error> {
        let is_free = |slot: &u8| self.functions.values().all(|other| other.slot != *slot);
        let (have, room) = (self.functions.len() + 1, intf::FUNCTIONS - 1);
        (1..=room as u8).find(is_free).ok_or(Error::Room { what: "functions", have, room })
    }

    fn write_program(&self, joint: Joint, slot: u8, descriptor: &[u8]) -> Result<(), Error> {
        let name = joint.programs();
        Ok(write(&self.shared[name], name, &u32::from(slot).to_ne_bytes(), descriptor)?)
    }

    // --- Sessions ---

    /// Datagrams of the session get a frame from now on, and only framed ones come in.
    pub fn open(&mut self, session: Session) -> Result<(), Error> {
        self.open_with(session, None)
    }

    fn open_with(&mut self, session: Session, sealed: Option<seal::Sealed>) -> Result<(), Error> {
        let ends = session.ends;
        if self.sessions.contains_key(&ends) {
            return Err(Error::Session { local: ends.local, remote: ends.remote });
        }
        let (have, room) = (self.sessions.len() + 1, self.room.sessions as usize);
        let Reverse(index) = *self.free.peek().ok_or(Error::Room { what: "sessions", have, room })?;
        let halves = session.key.as_chunks::<8>().0;
        let mut raw = intf::Session {
            index,
            budget_ns: session.budget_ns,
            key: [u64::from_le_bytes(halves[0]), u64::from_le_bytes(halves[1])],
            live: 1,
            is_sealed: sealed.is_some().into(),
            protocol: session.protocol.number(),
            ..Default::default()
        };
        raw.lists[0] = self.encode(&session.list)?;
        raw.list_ids[0] = session.list.id.to_be_bytes();
        self.forget(index)?;
        self.count_anew(index)?;
        if let Some(sealed) = &sealed {
            self.begin_sealed(index, sealed)?;
        }
        if is_strict(&raw) {
            self.pairs.begin(&ends, index)?;
        }
        self.put(&ends, &raw)?;
        self.free.pop();
        self.by_index[index as usize] = Some(ends);
        self.sessions.insert(ends, Open { raw, sealed, seen: self.seen(index) });
        Ok(())
    }

    /// Takes packets of another list, too, in the epoch that is not in use. Returns that epoch.
    pub fn accept(&mut self, ends: &Ends, list: &List) -> Result<Epoch, Error> {
        let encoded = self.encode(list)?;
        let epoch = self.find(ends)?.raw.epoch ^ 1;
        self.change(ends, |raw| {
            raw.lists[usize::from(epoch)] = encoded;
            raw.list_ids[usize::from(epoch)] = list.id.to_be_bytes();
            raw.live |= 1 << epoch;
        })?;
        Ok(epoch)
    }

    /// Has a function begin with what another version of it knows of the session, as far as it concerns these joints: before the
    /// first packet comes to it there. Each has its own epoch's packets from then on.
    pub fn migrate(&self, ends: &Ends, from: &str, to: &str, joints: &[Joint]) -> Result<(), Error> {
        let session = self.find(ends)?.raw.index;
        self.function(to)?.migrate(session, self.function(from)?, joints)
    }

    /// What a function keeps of a session, if it keeps anything.
    pub fn state(&self, ends: &Ends, function: &str) -> Result<Option<Vec<u8>>, Error> {
        self.function(function)?.state(self.find(ends)?.raw.index)
    }

    fn function(&self, name: &str) -> Result<&function::Loaded, Error> {
        let slots = self.functions.get(name).ok_or_else(|| Error::NoFunction(name.to_owned()))?;
        Ok(&slots.loaded)
    }

    /// Sends in this epoch from now on: one write. The other one is still taken.
    pub fn switch(&mut self, ends: &Ends, epoch: Epoch) -> Result<(), Error> {
        self.change(ends, |raw| raw.epoch = epoch & 1)
    }

    /// That is sent in.
    pub fn epoch(&self, ends: &Ends) -> Result<Epoch, Error> {
        Ok(self.find(ends)?.raw.epoch)
    }

    /// Takes nothing of this epoch any more.
    pub fn retire(&mut self, ends: &Ends, epoch: Epoch) -> Result<(), Error> {
        self.change(ends, |raw| raw.live &= !(1 << (epoch & 1)))
    }

    /// Samples above it are counted from now on.
    pub fn set_budget(&mut self, ends: &Ends, budget_ns: u32) -> Result<(), Error> {
        self.change(ends, |raw| raw.budget_ns = budget_ns)
    }

    /// Nothing comes in until [`replace`](Self::replace) or leaves until [`resume`](Self::resume), and no packet is under way here
    /// when this returns. What would have left is counted as `paused`.
    pub fn pause(&mut self, ends: &Ends) -> Result<(), Error> {
        self.make_pausable()?;
        self.change(ends, |raw| (raw.live, raw.is_paused) = (0, 1))?;
        Ok(self.barrier.as_ref().map_or(Ok(()), Barrier::wait_for_runs)?)
    }

    /// What waits for runs of programs; a kernel that has none cannot pause.
    pub fn make_pausable(&mut self) -> Result<(), Error> {
        if self.barrier.is_none() {
            self.barrier = Some(Barrier::new(&mut self.object)?);
        }
        Ok(())
    }

    /// What was paused goes on.
    pub fn resume(&mut self, ends: &Ends) -> Result<(), Error> {
        match self.find(ends)?.raw.is_paused {
            0 => Ok(()),
            _ => self.change(ends, |raw| raw.is_paused = 0),
        }
    }

    /// Another list at once, with numbers and states that begin anew: what is under way is lost, and counted as `stale` or
    /// `old`. Both ends do, with the same epoch.
    pub fn replace(&mut self, ends: &Ends, list: &List, epoch: Epoch) -> Result<(), Error> {
        let encoded = self.encode(list)?;
        let index = self.find(ends)?.raw.index;
        let epoch = epoch & 1;
        self.change(ends, |raw| raw.live = 0)?;
        self.forget(index)?;
        self.change(ends, |raw| {
            raw.lists[usize::from(epoch)] = encoded;
            raw.list_ids[usize::from(epoch)] = list.id.to_be_bytes();
            (raw.epoch, raw.live) = (epoch, 1 << epoch);
        })
    }

    pub fn close(&mut self, ends: &Ends) -> Result<(), Error> {
        let open =
            self.sessions.remove(ends).ok_or(Error::NoSession { local: ends.local, remote: ends.remote })?;
        self.by_index[open.raw.index as usize] = None;
        self.free.push(Reverse(open.raw.index));
        self.set_clock_of(open.raw.index, Duration::ZERO)?;
        self.table.delete(key(ends)?.as_bytes()).map_err(Error::State)?;
        self.end_sealed(open.raw.index);
        if open.raw.paths != 0 {
            self.end_paths(ends, open.raw.index, open.raw.paths)?;
        }
        let others = self.sessions.iter().filter(|(_, open)| is_strict(&open.raw));
        self.pairs.end(ends, others.map(|(ends, open)| (ends, open.raw.index)))
    }

    fn find(&self, ends: &Ends) -> Result<&Open, Error> {
        self.sessions.get(ends).ok_or(Error::NoSession { local: ends.local, remote: ends.remote })
    }

    /// The kernel replaces the entry as a whole: packets see the old one or the new one.
    fn change(&mut self, ends: &Ends, change: impl FnOnce(&mut intf::Session)) -> Result<(), Error> {
        let mut raw = self.find(ends)?.raw;
        change(&mut raw);
        self.put(ends, &raw)?;
        if let Some(open) = self.sessions.get_mut(ends) {
            open.raw = raw;
        }
        Ok(())
    }

    fn put(&self, ends: &Ends, raw: &intf::Session) -> Result<(), Error> {
        Ok(write(&self.table, "sessions", key(ends)?.as_bytes(), raw.as_bytes())?)
    }

    /// Numbers and states of a session begin anew. What functions have kept of before is known by its birth.
    fn forget(&mut self, index: u32) -> Result<(), Error> {
        self.births = self.births.wrapping_add(1);
        let begun = intf::Shared { birth: self.births, ..Default::default() };
        write(&self.shared["shared"], "shared", &index.to_ne_bytes(), begun.as_bytes())?;
        self.functions.values().try_for_each(|slots| slots.loaded.forget(index))
    }

    /// Another session had the index before.
    fn count_anew(&mut self, index: u32) -> Result<(), Error> {
        for name in ["counters", "times"] {
            let error = |source| millrace_kernel::Error::Write { what: name, source };
            let map = self.object.map(name)?;
            let zeros = vec![vec![0; map.value_size() as usize]; num_possible_cpus().map_err(error)?];
            map.update_percpu(&index.to_ne_bytes(), &zeros, MapFlags::ANY).map_err(error)?;
        }
        Ok(())
    }

    /// A byte for each function that has a part at a joint, the first one lowest.
    fn encode(&self, list: &List) -> Result<[u64; intf::JOINTS], Error> {
        let (have, room) = (list.functions.len(), LIST_MAX);
        if have > room {
            return Err(Error::Room { what: "functions of a list", have, room });
        }
        let find = |name: &String| self.functions.get(name).ok_or_else(|| Error::NoFunction(name.clone()));
        let functions = list.functions.iter().map(find).collect::<Result<Vec<_>, _>>()?;
        let mut encoded = [0; intf::JOINTS];
        for (joint, encoded) in Joint::ALL.into_iter().zip(&mut encoded) {
            // What is only for what others have recovered has nothing to do without them.
            if joint == Joint::Repair && !functions.iter().any(|slots| slots.needs_repair()) {
                continue;
            }
            let there = functions.iter().filter(|slots| slots.loaded.programs.contains_key(&joint));
            for (at, slots) in there.enumerate() {
                *encoded |= u64::from(slots.slot) << (8 * at);
            }
        }
        Ok(encoded)
    }
}

/// Nothing of it passes as an application has sent it.
fn is_strict(raw: &intf::Session) -> bool {
    raw.is_sealed != 0 || raw.protocol != Protocol::Udp.number()
}

fn random() -> std::io::Result<u32> {
    let mut bytes = [0; 4];
    std::fs::File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(u32::from_ne_bytes(bytes))
}

fn key(ends: &Ends) -> Result<intf::Key, Error> {
    let Ends { local, remote } = *ends;
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
