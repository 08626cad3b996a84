//! The one XDP program of an interface, in which gate and graft take turns (`bpf/root.bpf.c`).
//!
//! Whoever comes first makes the root; who comes then takes descriptors of its link and of its slots by their IDs, which
//! needs CAP_SYS_ADMIN. Nobody owns it: the kernel detaches it with the last descriptor. A turn ends with the process
//! that has it, since the kernel empties a program array that no process has a descriptor of. So nothing is pinned, and
//! neither an exit nor a kill of one takes anything from the other.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::thread;
use std::time::{Duration, Instant};

use libbpf_rs::{MapCore, MapFlags, MapHandle, Program, ProgramMut};
use nix::libc;

use super::{Mode, is_attached, link, shared};
use crate::Error;
use crate::fork::{Kept, keep_from_children};
use crate::hook;
use crate::intf::generated::{self, RootConfig as Config};
use crate::object::{Loaded, embedded, write};
use crate::raw::detach;
use crate::stack::{self, Begin};

/// Its name says what its slots are: another order gets another name.
const ROOT: &str = "root_xdp";
const SLOTS: &str = "root_slots";
const MINE: &str = "mine";
/// Held by whoever is about to detach the root.
const LEAVING: u32 = generated::ROOT_LEAVING;

/// What was there a moment ago may be about to go: the kernel empties the map of a process that was killed a little later.
const PATIENCE: Duration = Duration::from_secs(2);
const PAUSE: Duration = Duration::from_millis(2);

/// Whose turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Turn {
    Gate = 0,
    /// With what the gate lets pass.
    Graft = 1,
}

impl Turn {
    const ALL: [Self; 2] = [Self::Gate, Self::Graft];

    fn name(self) -> &'static str {
        match self {
            Self::Gate => "gate",
            Self::Graft => "daemon of grafts",
        }
    }
}

/// A program that has its turn on an interface; dropping it ends that, and takes the root away if nobody else is there.
pub struct Attachment {
    /// Dropped before what they keep.
    _kept: [Kept; 2],
    link: OwnedFd,
    _mine: MapHandle,
    slots: MapHandle,
    rest: OwnedFd,
    turn: Turn,
    /// ID of what is in the slot as long as the turn is this one's.
    id: u32,
    mode: Mode,
}

/// Why it was not attached this time.
enum Hindrance {
    /// It is worth another try, and if it goes on, this is what is in the way.
    Passing(Error),
    Lasting(Error),
}

impl Attachment {
    /// Attaches to an interface of the calling thread's network namespace. `before` gets the program to which packets go that
    /// this one lets pass, before the first one comes.
    pub fn new(
        program: &ProgramMut<'_>,
        turn: Turn,
        (ifindex, mode): (i32, Mode),
        before: impl Fn(BorrowedFd<'_>) -> Result<(), Error>,
    ) -> Result<Self, Error> {
        check_begin(turn, ifindex)?;
        let until = Instant::now() + PATIENCE;
        let start = Start { program, turn, ifindex, before };
        loop {
            match start.attempt(mode) {
                Ok(made) => return Ok(made),
                Err(Hindrance::Lasting(error)) => return Err(error),
                Err(Hindrance::Passing(error)) if Instant::now() > until => return Err(error),
                Err(Hindrance::Passing(_)) => thread::sleep(PAUSE),
            }
        }
    }

    /// Never [`Mode::Auto`].
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// Whether it still has its turn on an interface: somebody may have detached the root, and an interface takes it along
    /// when it goes.
    pub fn is_in_place(&self) -> bool {
        is_attached(&self.link) && self.has_slot()
    }

    fn has_slot(&self) -> bool {
        shared::entry(&self.slots, self.turn as u32) == Some(self.id)
    }

    fn is_abandoned(&self) -> bool {
        Turn::ALL.iter().all(|turn| shared::entry(&self.slots, *turn as u32).is_none())
    }
}

impl Drop for Attachment {
    /// The last one detaches the root, which does not wait for descriptors that children hold for a moment. Who joins
    /// meanwhile sees that in [`LEAVING`], or is seen in its slot: both write before they look.
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
            // An interface that is gone took the link along, so there is nothing to report.
            let _ = detach(&self.link);
        } else {
            let _ = self.slots.delete(&leaving);
        }
    }
}

/// What is to be attached.
struct Start<'a, Before> {
    program: &'a ProgramMut<'a>,
    turn: Turn,
    ifindex: i32,
    before: Before,
}

impl<Before: Fn(BorrowedFd<'_>) -> Result<(), Error>> Start<'_, Before> {
    fn attempt(&self, mode: Mode) -> Result<Attachment, Hindrance> {
        let made = match mode {
            Mode::Auto => self.make(Mode::Native).or_else(|error| match &error {
                Error::Xdp { source, .. } if hook::is_for_want_of_support(source) => self.make(Mode::Generic),
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

    /// A new root, in which nobody has a turn yet.
    fn make(&self, mode: Mode) -> Result<Root, Error> {
        let ifindex = self.ifindex;
        let error = |source| Error::Xdp { ifindex, mode, source };
        // After GRO, a program would judge the first of many packets, and let all pass.
        if mode == Mode::Generic
            && let Some(kind) = stack::kind(ifindex).map_err(error)?
        {
            return Err(Error::Merged { ifindex, kind });
        }
        let mut object = load(self.turn, None)?;
        let link = link(object.program(ROOT)?.as_fd(), ifindex, mode).map_err(error)?;
        Ok(Root { link, mode, parts: Parts::new(&mut object)? })
    }

    /// A turn in the root that is there. `taken` is why there is no room for another one.
    fn join(&self, mode: Mode, taken: Error) -> Result<Attachment, Hindrance> {
        let Self { turn, ifindex, .. } = *self;
        let failed = |source| Hindrance::Lasting(Error::Join { ifindex, source });
        let found = match shared::find(ifindex, ROOT, SLOTS) {
            Ok(Some(found)) => found,
            Ok(None) => return Err(Hindrance::Passing(taken)),
            Err(error) if error.raw_os_error() == Some(libc::EBUSY) => return Err(Hindrance::Lasting(taken)),
            Err(error) => return Err(failed(error)),
        };
        if mode != Mode::Auto && mode != found.mode {
            return Err(Hindrance::Passing(taken));
        }
        let occupied = || Hindrance::Passing(Error::Turn { ifindex, noun: turn.name() });
        let there = shared::entry(&found.slots, turn as u32);
        if there.map(|id| shared::is_filled(id, MINE)).transpose().map_err(failed)? == Some(true) {
            return Err(occupied());
        }
        let mut object = load(turn, Some(&found.slots)).map_err(Hindrance::Lasting)?;
        let parts = Parts::new(&mut object).map_err(Hindrance::Lasting)?;
        self.take(Root { link: found.link, mode: found.mode, parts })
    }

    fn take(&self, root: Root) -> Result<Attachment, Hindrance> {
        let attachment = root.take(self).map_err(Hindrance::Lasting)?;
        let is_leaving = shared::entry(&attachment.slots, LEAVING).is_some();
        // Or another one has come at the same time, or the root went.
        match attachment.is_in_place() && !is_leaving {
            true => Ok(attachment),
            false => Err(Hindrance::Passing(Error::Turn { ifindex: self.ifindex, noun: self.turn.name() })),
        }
    }
}

/// A root on an interface, and what a turn in it needs.
struct Root {
    link: OwnedFd,
    mode: Mode,
    parts: Parts,
}

struct Parts {
    slots: MapHandle,
    mine: MapHandle,
    entry: OwnedFd,
    rest: OwnedFd,
}

impl Parts {
    fn new(object: &mut Loaded) -> Result<Self, Error> {
        let (slots, mine) = (object.handle(SLOTS)?, object.handle(MINE)?);
        let fd = |program: ProgramMut<'_>| program.as_fd().try_clone_to_owned().map_err(prepare);
        let (entry, rest) = (fd(object.program("root_turn")?)?, fd(object.program("root_rest")?)?);
        Ok(Self { slots, mine, entry, rest })
    }
}

impl Root {
    /// From the last step on, packets come.
    fn take<Before>(self, start: &Start<'_, Before>) -> Result<Attachment, Error>
    where
        Before: Fn(BorrowedFd<'_>) -> Result<(), Error>,
    {
        let Self { link, mode, parts: Parts { slots, mine, entry, rest } } = self;
        let turn = start.turn;
        let id = Program::id_from_fd(entry.as_fd()).map_err(|error| prepare(io::Error::other(error)))?;
        (start.before)(rest.as_fd())?;
        write(&mine, MINE, &[0; 4], &start.program.as_fd().as_raw_fd().to_ne_bytes())?;
        write(&slots, SLOTS, &(turn as u32).to_ne_bytes(), &entry.as_raw_fd().to_ne_bytes())?;
        let kept = [keep_from_children(&link), keep_from_children(&mine)];
        Ok(Attachment { _kept: kept, link, _mine: mine, slots, rest, turn, id, mode })
    }
}

/// Refuses an interface whose frames do not begin as programs with this turn read them: they would judge nothing there.
fn check_begin(turn: Turn, ifindex: i32) -> Result<(), Error> {
    let failed = |source: io::Error| Error::Read { what: "the interfaces", source: source.into() };
    match (stack::begin(ifindex).map_err(failed)?, turn) {
        (Begin::Ethernet, _) | (Begin::Ip, Turn::Gate) => Ok(()),
        (Begin::Ip, Turn::Graft) => Err(Error::Bare { ifindex }),
        (Begin::Tunnel { kind }, _) => Err(Error::Tunnel { ifindex, kind }),
        (Begin::Other { hardware }, _) => Err(Error::Link { ifindex, hardware }),
    }
}

fn prepare(source: io::Error) -> Error {
    Error::Prepare { what: "a turn at XDP", source }
}

fn load(turn: Turn, slots: Option<&MapHandle>) -> Result<Loaded, Error> {
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
    fn slots_have_the_names_of_c() {
        assert_eq!(
            enum_names(env!("OUT_DIR"), "root.bpf.o", "root_slot", "root_"),
            ["gate", "graft", "leaving"]
        );
    }
}
