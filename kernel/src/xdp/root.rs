//! The root program of an interface at XDP, which calls two other programs one after the other: the packet gate and the
//! graft (`bpf/root.bpf.c`). It finds them in a program array with a slot for each.
//!
//! The first process attaches the root. Later processes get descriptors of the root's BPF link and program array by the
//! kernel's IDs, which needs CAP_SYS_ADMIN. No single process owns the root: the kernel detaches it when the last
//! descriptor is closed. When a process ends, its program is called no more, because the kernel empties a program array
//! when no process has a descriptor of it. So nothing is pinned, and the end of one process does not affect the other.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::thread;
use std::time::{Duration, Instant};

use libbpf_rs::{MapCore, MapFlags, MapHandle, Program, ProgramMut};
use nix::libc;

use super::{XdpMode, is_attached, link, shared};
use crate::Error;
use crate::fork::{ForkSafeLink, keep_from_children};
use crate::hook;
use crate::intf::generated::{self, RootConfig as Config};
use crate::object::{LoadedObject, embedded, write};
use crate::raw::detach;
use crate::stack::{self, FrameStart};

/// Name of the root program. The name identifies the layout of the program array that the root calls, so another layout
/// must get another name.
const ROOT: &str = "root_xdp";
const SLOTS: &str = "root_slots";
const MINE: &str = "mine";
/// Slot of the program array that a process fills while it is about to detach the root, so that no other process joins.
const LEAVING: u32 = generated::ROOT_LEAVING;

/// Longest wait until the program of an earlier process is gone: the kernel empties the program array of a killed
/// process with a delay.
const PATIENCE: Duration = Duration::from_secs(2);
/// Time between two attempts to attach.
const PAUSE: Duration = Duration::from_millis(2);

/// The Millrace component whose XDP program the root program calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RootProduct {
    /// Millrace's packet gate, which gets all packets.
    Gate = 0,
    /// Millrace's packet grafts, which get the packets that the gate passes.
    Graft = 1,
}

impl RootProduct {
    const ALL: [Self; 2] = [Self::Gate, Self::Graft];

    fn name(self) -> &'static str {
        match self {
            Self::Gate => "gate",
            Self::Graft => "daemon of grafts",
        }
    }
}

/// A program that the root of an interface calls. Dropping this value removes the program from the root, and detaches
/// the root if it has no other program.
pub struct XdpTurn {
    /// Guards that close the descriptors `link` and `_mine` in forked children. They are declared first, so that they
    /// are dropped before the two descriptors are closed.
    _kept: [ForkSafeLink; 2],
    link: OwnedFd,
    _mine: MapHandle,
    slots: MapHandle,
    rest: OwnedFd,
    turn: RootProduct,
    /// ID of the program that this process put into its slot of the program array. If the slot has another ID, another
    /// process has replaced the program.
    id: u32,
    mode: XdpMode,
}

/// The reason why an attempt to attach failed.
enum Hindrance {
    /// Another attempt to attach may succeed. If every attempt fails, this error is returned.
    Passing(Error),
    /// Another attempt to attach would fail too, so this error is returned at once.
    Lasting(Error),
}

impl XdpTurn {
    /// Attaches a program to an interface of the calling thread's network namespace. The function `before` is called
    /// before the first packet arrives. Its argument is the root's program that `program` has to call for packets that
    /// it lets pass.
    pub fn new(
        program: &ProgramMut<'_>,
        turn: RootProduct,
        ifindex: i32,
        mode: XdpMode,
        before: impl Fn(BorrowedFd<'_>) -> Result<(), Error>,
    ) -> Result<Self, Error> {
        check_begin(turn, ifindex)?;
        let until = Instant::now() + PATIENCE;
        let start = RootProgram { program, turn, ifindex, before };
        loop {
            match start.attempt(mode) {
                Ok(made) => return Ok(made),
                Err(Hindrance::Lasting(error)) => return Err(error),
                Err(Hindrance::Passing(error)) if Instant::now() > until => return Err(error),
                Err(Hindrance::Passing(_)) => thread::sleep(PAUSE),
            }
        }
    }

    /// Returns the XDP mode of the root, which is never [`XdpMode::Auto`].
    pub fn mode(&self) -> XdpMode {
        self.mode
    }

    /// Reports whether the root still calls the program. Another process may have detached the root, or the interface
    /// may be gone.
    pub fn is_in_place(&self) -> bool {
        is_attached(&self.link) && self.has_slot()
    }

    fn has_slot(&self) -> bool {
        shared::entry(&self.slots, self.turn as u32) == Some(self.id)
    }

    /// Reports whether the root program calls no other program.
    fn is_abandoned(&self) -> bool {
        RootProduct::ALL.iter().all(|turn| shared::entry(&self.slots, *turn as u32).is_none())
    }
}

impl Drop for XdpTurn {
    /// Removes the program from its slot of the program array. If no slot has a program now, detaches the root
    /// explicitly, because child processes may hold copies of its descriptors until exec. If another process puts a
    /// program into a slot at the same time, either that process sees `LEAVING`, or this one sees its slot: both write
    /// before they read.
    fn drop(&mut self) {
        let slot = (self.turn as u32).to_ne_bytes();
        if self.has_slot() {
            let _ = self.slots.delete(&slot);
        }
        if !self.is_abandoned() {
            return;
        }
        let leaving = LEAVING.to_ne_bytes();
        let _ = self.slots.update(&leaving, &self.rest.as_raw_fd().to_ne_bytes(), MapFlags::ANY);
        if self.is_abandoned() {
            // Errors are ignored, because the link is gone if its interface is.
            let _ = detach(&self.link);
        } else {
            let _ = self.slots.delete(&leaving);
        }
    }
}

/// The program to attach, and the interface and product that it is for.
struct RootProgram<'a, Before> {
    program: &'a ProgramMut<'a>,
    turn: RootProduct,
    ifindex: i32,
    before: Before,
}

impl<Before: Fn(BorrowedFd<'_>) -> Result<(), Error>> RootProgram<'_, Before> {
    fn attempt(&self, mode: XdpMode) -> Result<XdpTurn, Hindrance> {
        let made = match mode {
            XdpMode::Auto => self.make(XdpMode::Native).or_else(|error| match &error {
                Error::Xdp { source, .. } if hook::is_for_want_of_support(source) => {
                    self.make(XdpMode::Generic)
                }
                _ => Err(error),
            }),
            mode => self.make(mode),
        };
        match made {
            Err(Error::Xdp { source, mode: tried, ifindex }) if is_taken(&source) => {
                self.join(mode, Error::Xdp { ifindex, mode: tried, source })
            }
            Ok(root) => self.take(root),
            Err(other) => Err(Hindrance::Lasting(other)),
        }
    }

    /// Attaches a new root program, whose program array is still empty.
    fn make(&self, mode: XdpMode) -> Result<XdpRoot, Error> {
        let ifindex = self.ifindex;
        let error = |source| Error::Xdp { ifindex, mode, source };
        // If a lower interface has merged packets (GRO), an XDP program in generic mode sees only the headers of the
        // first one, and its verdict applies to all of them. Such interfaces are refused.
        if mode == XdpMode::Generic
            && let Some(kind) = stack::kind(ifindex).map_err(error)?
        {
            return Err(Error::Merged { ifindex, kind });
        }
        let mut object = load(self.turn, None)?;
        let link = link(object.program(ROOT)?.as_fd(), ifindex, mode).map_err(error)?;
        Ok(XdpRoot { link, mode, parts: RootParts::new(&mut object)? })
    }

    /// Puts the program into its slot of the existing root's program array. Fails with the error `taken`, which the
    /// caller supplies, if the interface's XDP program is no root, or a root in another XDP mode.
    fn join(&self, mode: XdpMode, taken: Error) -> Result<XdpTurn, Hindrance> {
        let Self { turn, ifindex, .. } = *self;
        let failed = |source| Hindrance::Lasting(Error::Join { ifindex, source });
        let found = match shared::find(ifindex, ROOT, SLOTS) {
            Ok(Some(found)) => found,
            Ok(None) => return Err(Hindrance::Passing(taken)),
            Err(error) if error.raw_os_error() == Some(libc::EBUSY) => return Err(Hindrance::Lasting(taken)),
            Err(error) => return Err(failed(error)),
        };
        if mode != XdpMode::Auto && mode != found.mode {
            return Err(Hindrance::Passing(taken));
        }
        let occupied = || Hindrance::Passing(Error::Turn { ifindex, noun: turn.name() });
        let there = shared::entry(&found.slots, turn as u32);
        if there.map(|id| shared::is_filled(id, MINE)).transpose().map_err(failed)? == Some(true) {
            return Err(occupied());
        }
        let mut object = load(turn, Some(&found.slots)).map_err(Hindrance::Lasting)?;
        let parts = RootParts::new(&mut object).map_err(Hindrance::Lasting)?;
        self.take(XdpRoot { link: found.link, mode: found.mode, parts })
    }

    fn take(&self, root: XdpRoot) -> Result<XdpTurn, Hindrance> {
        let attachment = root.take(self).map_err(Hindrance::Lasting)?;
        let is_leaving = shared::entry(&attachment.slots, LEAVING).is_some();
        // If the slot of the program array has another program, another process has written the slot at the same time,
        // or the root was detached.
        match attachment.is_in_place() && !is_leaving {
            true => Ok(attachment),
            false => Err(Hindrance::Passing(Error::Turn { ifindex: self.ifindex, noun: self.turn.name() })),
        }
    }
}

/// A root on an interface, with the descriptors that a process needs to put its program into a slot of the program
/// array.
struct XdpRoot {
    link: OwnedFd,
    mode: XdpMode,
    parts: RootParts,
}

struct RootParts {
    slots: MapHandle,
    mine: MapHandle,
    entry: OwnedFd,
    rest: OwnedFd,
}

impl RootParts {
    fn new(object: &mut LoadedObject) -> Result<Self, Error> {
        let slots = object.handle(SLOTS)?;
        let mine = object.handle(MINE)?;
        let fd = |program: ProgramMut<'_>| program.as_fd().try_clone_to_owned().map_err(prepare);
        let entry = fd(object.program("root_turn")?)?;
        let rest = fd(object.program("root_rest")?)?;
        Ok(Self { slots, mine, entry, rest })
    }
}

impl XdpRoot {
    /// Puts the program into its slot of the program array. The slot is written last, since the root passes packets to
    /// the program from then on.
    fn take<Before>(self, start: &RootProgram<'_, Before>) -> Result<XdpTurn, Error>
    where
        Before: Fn(BorrowedFd<'_>) -> Result<(), Error>,
    {
        let Self { link, mode, parts: RootParts { slots, mine, entry, rest } } = self;
        let turn = start.turn;
        let id = Program::id_from_fd(entry.as_fd()).map_err(|error| prepare(io::Error::other(error)))?;
        (start.before)(rest.as_fd())?;
        write(&mine, MINE, &[0; 4], &start.program.as_fd().as_raw_fd().to_ne_bytes())?;
        write(&slots, SLOTS, &(turn as u32).to_ne_bytes(), &entry.as_raw_fd().to_ne_bytes())?;
        let kept = [keep_from_children(&link), keep_from_children(&mine)];
        Ok(XdpTurn { _kept: kept, link, _mine: mine, slots, rest, turn, id, mode })
    }
}

/// Refuses an interface whose frames begin with a header that this product's program cannot read, because it would find
/// no packets there.
fn check_begin(turn: RootProduct, ifindex: i32) -> Result<(), Error> {
    let failed = |source: io::Error| Error::Read { what: "the interfaces", source: source.into() };
    match (stack::begin(ifindex).map_err(failed)?, turn) {
        (FrameStart::Ethernet, _) | (FrameStart::Ip, RootProduct::Gate) => Ok(()),
        (FrameStart::Ip, RootProduct::Graft) => Err(Error::Bare { ifindex }),
        (FrameStart::Tunnel { kind }, _) => Err(Error::Tunnel { ifindex, kind }),
        (FrameStart::Other { hardware }, _) => Err(Error::Link { ifindex, hardware }),
    }
}

fn prepare(source: io::Error) -> Error {
    Error::Prepare { what: "a turn at XDP", source }
}

fn load(turn: RootProduct, slots: Option<&MapHandle>) -> Result<LoadedObject, Error> {
    let mut open = embedded!("root.bpf.o").open()?;
    open.configure(&Config { slot: turn as u32 })?;
    if let Some(slots) = slots {
        open.map(SLOTS)?
            .reuse_fd(slots.as_fd())
            .map_err(|source| Error::Open { object: "root.bpf.o", source })?;
    }
    open.load()
}

fn is_taken(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EBUSY | libc::EEXIST))
}

#[cfg(test)]
mod tests {
    use crate::intf::enum_names;

    #[test]
    fn rust_names_of_xdp_root_programs_match_the_enum_in_c() {
        assert_eq!(
            enum_names(env!("OUT_DIR"), "root.bpf.o", "root_slot", "root_"),
            ["gate", "graft", "leaving"]
        );
    }
}
