//! Where a gate is to be, and whether it is.
//!
//! Interfaces are meant by name. They go and come back, change their names, and anybody with the privilege can detach a
//! program. Whatever happens, the gate is never taken from where packets may still arrive before it is where they
//! arrive now.

use std::{fs::File, io, os::unix::fs::MetadataExt as _};

use millrace_kernel::xdp::Mode;

use crate::kernel;
use nix::{
    net::if_::{if_indextoname, if_nametoindex},
    sched::{CloneFlags, setns},
};

use crate::Error;

/// An interface that the gate is to be attached to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Interface {
    pub name: String,
    /// How it is attached, or was when it still was; never [`Mode::Auto`].
    pub mode: Mode,
    /// Whether it decides about what arrives there.
    pub attached: bool,
    /// What is not as it was when it was attached, if anything is.
    pub trouble: Option<String>,
    /// Times that it was attached to again, since somebody had detached it or the interface was made anew.
    pub reattached: u64,
}

#[derive(Default)]
pub(crate) struct Interfaces(Vec<Place>);

struct Place {
    interface: Interface,
    wanted: Mode,
    /// Where it is attached, or was.
    index: i32,
    namespace: Namespace,
}

impl Interfaces {
    pub fn list(&self) -> Vec<Interface> {
        self.0.iter().map(|place| place.interface.clone()).collect()
    }

    /// Attaches to an interface of the calling thread's network namespace. `watch`: answers too.
    pub fn add(&mut self, gate: &kernel::Gate, name: &str, wanted: Mode, watch: bool) -> Result<Mode, Error> {
        let failed = |source| Error::Interface { name: name.to_owned(), source };
        let index = index_of(name).map_err(failed)?;
        let namespace = Namespace::current().map_err(Error::Namespace)?;
        let is_here =
            |place: &Place| place.index == index && namespace.is_same(&place.namespace).unwrap_or(false);
        if self.0.iter().any(|place| place.interface.attached && is_here(place)) {
            return Err(Error::Twice(name.to_owned()));
        }
        let mode = attach(gate, index, wanted, watch)
            .map_err(|source| Error::Attach { name: name.to_owned(), source })?;
        let interface =
            Interface { name: name.to_owned(), mode, attached: true, trouble: None, reattached: 0 };
        self.0.push(Place { interface, wanted, index, namespace });
        Ok(mode)
    }

    /// Detaches from an interface; from none if it was never attached to.
    pub fn remove(&mut self, gate: &kernel::Gate, name: &str) {
        let before = self.indexes();
        self.0.retain(|place| place.interface.name != name);
        self.leave_others(gate, &before);
    }

    pub fn clear(&mut self) {
        self.0.clear();
    }

    /// Watches answers wherever it is attached.
    pub fn watch(&self, gate: &kernel::Gate) -> Result<(), Error> {
        let attached = self.0.iter().filter(|place| place.interface.attached);
        attached.into_iter().try_for_each(|place| {
            place
                .namespace
                .inside(|| gate.watch(place.index))
                .map_err(Error::Namespace)?
                .map_err(|source| Error::Attach { name: place.interface.name.clone(), source })
        })
    }

    /// Finds out what has become of them, and attaches again where that is called for.
    pub fn look(&mut self, gate: &kernel::Gate, watch: bool) {
        let before = self.indexes();
        for place in &mut self.0 {
            let Place { interface, wanted, index, namespace } = place;
            let looked = namespace.inside(|| look(gate, interface, *wanted, index, watch));
            if let Err(error) = looked {
                interface.trouble = Some(format!("its network namespace cannot be entered: {error}"));
            }
        }
        self.leave_others(gate, &before);
    }

    fn indexes(&self) -> Vec<i32> {
        self.0.iter().map(|place| place.index).collect()
    }

    /// Detaches from those of `before` where it is not to be any more.
    fn leave_others(&self, gate: &kernel::Gate, before: &[i32]) {
        let now = self.indexes();
        before.iter().filter(|index| !now.contains(index)).for_each(|index| gate.detach_from(*index));
    }
}

/// In the interface's namespace.
fn look(gate: &kernel::Gate, interface: &mut Interface, wanted: Mode, index: &mut i32, watch: bool) {
    let now = index_of(&interface.name).ok();
    let is_well = |index| gate.is_attached(index) && (!watch || gate.is_watching(index));
    match now {
        Some(now) if is_well(now) => *index = now,
        Some(now) => match attach_again(gate, interface, now, wanted, watch) {
            Ok(mode) => {
                *index = now;
                interface.mode = mode;
                interface.reattached += 1;
            }
            Err(error) => {
                interface.attached = gate.is_attached(*index);
                interface.trouble = Some(error.to_string());
                return;
            }
        },
        None if gate.is_attached(*index) => {
            let called =
                if_indextoname(index.cast_unsigned()).map(|name| name.to_string_lossy().into_owned());
            interface.trouble = Some(match called {
                Ok(name) => format!("the interface is called {name} now; it is guarded under that name"),
                Err(_) => "the interface is in another network namespace now; it is guarded there".to_owned(),
            });
            return;
        }
        None => {
            gate.detach_from(*index);
            interface.attached = false;
            interface.trouble = Some("the interface is gone".to_owned());
            return;
        }
    }
    interface.attached = true;
    interface.trouble = hidden_tags(gate, *index);
}

/// Why nothing that arrives there is answered.
fn hidden_tags(gate: &kernel::Gate, index: i32) -> Option<String> {
    match gate.hides_tags(index) {
        Ok(false) => None,
        Ok(true) => Some(
            "its driver takes VLAN tags off before the gate sees them: nothing is answered there, by Retry or otherwise, until \
             `ethtool -K INTERFACE rxvlan off`"
                .to_owned(),
        ),
        Err(error) => Some(error.to_string()),
    }
}

/// Answers first: a connection whose answers were missed is not known.
fn attach(
    gate: &kernel::Gate,
    index: i32,
    wanted: Mode,
    watch: bool,
) -> Result<Mode, millrace_kernel::Error> {
    if watch {
        gate.watch(index)?;
    }
    let mode = gate.attach(index, wanted);
    if mode.is_err() && watch && !gate.is_attached(index) {
        gate.detach_from(index);
    }
    mode
}

/// A program that is still in place stays there: attaching one stops some network cards for a moment.
fn attach_again(
    gate: &kernel::Gate,
    interface: &Interface,
    index: i32,
    wanted: Mode,
    watch: bool,
) -> Result<Mode, millrace_kernel::Error> {
    if gate.is_attached(index) {
        return gate.watch(index).map(|()| interface.mode);
    }
    gate.detach_from(index);
    attach(gate, index, wanted, watch)
}

fn index_of(name: &str) -> nix::Result<i32> {
    if_nametoindex(name).and_then(|index| i32::try_from(index).map_err(|_| nix::Error::ERANGE))
}

/// A network namespace: indexes and names of interfaces mean nothing outside of it.
struct Namespace(File);

impl Namespace {
    /// The calling thread's.
    fn current() -> io::Result<Self> {
        File::open("/proc/thread-self/ns/net").map(Self)
    }

    /// Runs `work` in it: on a thread of its own if the calling one is elsewhere, which takes CAP_SYS_ADMIN.
    fn inside<T: Send>(&self, work: impl FnOnce() -> T + Send) -> io::Result<T> {
        if self.is_same(&Self::current()?)? {
            return Ok(work());
        }
        std::thread::scope(|scope| {
            let there = scope.spawn(|| setns(&self.0, CloneFlags::CLONE_NEWNET).map(|()| work()));
            match there.join() {
                Ok(done) => Ok(done?),
                Err(panic) => std::panic::resume_unwind(panic),
            }
        })
    }

    fn is_same(&self, other: &Self) -> io::Result<bool> {
        let id = |file: &File| file.metadata().map(|metadata| (metadata.dev(), metadata.ino()));
        Ok(id(&self.0)? == id(&other.0)?)
    }
}
