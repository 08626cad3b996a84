//! The interfaces that a gate should be attached to, and their state.
//!
//! Interfaces are identified by name. An interface can be deleted and made again, or renamed, and anybody with the
//! privilege can detach a program. The gate then attaches to the interface that has the name now. Only afterwards it
//! detaches from the old one, where packets may still arrive.

use std::{fs::File, io, os::unix::fs::MetadataExt as _};

use millrace_kernel::xdp::XdpMode;

use crate::kernel;
use nix::{
    net::if_::{if_indextoname, if_nametoindex},
    sched::{CloneFlags, setns},
};

use crate::Error;

/// An interface that the gate should be attached to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Interface {
    /// The interface's name.
    pub name: String,
    /// The XDP mode in which the gate is attached, or was attached last; never [`XdpMode::Auto`].
    pub mode: XdpMode,
    /// True if the gate decides about packets of the interface.
    pub attached: bool,
    /// The fault that the latest check of the interface found.
    pub trouble: Option<String>,
    /// Number of times that the gate was attached again, because the program had been detached or the interface made
    /// again.
    pub reattached: u64,
}

#[derive(Default)]
pub(crate) struct GateInterfaces(Vec<WantedInterface>);

struct WantedInterface {
    interface: Interface,
    wanted: XdpMode,
    /// Index of the interface that the gate is attached to, or was attached to last.
    index: i32,
    namespace: NetworkNamespace,
}

impl GateInterfaces {
    pub fn list(&self) -> Vec<Interface> {
        self.0.iter().map(|place| place.interface.clone()).collect()
    }

    /// Attaches the gate to an interface of the calling thread's network namespace. If `watch` is true, it also
    /// attaches the program that reads servers' packets.
    pub fn add(
        &mut self,
        gate: &kernel::LoadedGate,
        name: &str,
        wanted: XdpMode,
        watch: bool,
    ) -> Result<XdpMode, Error> {
        let failed = |source| Error::Interface { name: name.to_owned(), source };
        let index = index_of(name).map_err(failed)?;
        let namespace = NetworkNamespace::current().map_err(Error::Namespace)?;
        let is_here = |place: &WantedInterface| {
            place.index == index && namespace.is_same(&place.namespace).unwrap_or(false)
        };
        if self.0.iter().any(|place| place.interface.attached && is_here(place)) {
            return Err(Error::Twice(name.to_owned()));
        }
        let mode = attach(gate, index, wanted, watch)
            .map_err(|source| Error::Attach { name: name.to_owned(), source })?;
        let interface =
            Interface { name: name.to_owned(), mode, attached: true, trouble: None, reattached: 0 };
        self.0.push(WantedInterface { interface, wanted, index, namespace });
        Ok(mode)
    }

    /// Detaches the gate from an interface. A name that was never added has no effect.
    pub fn remove(&mut self, gate: &kernel::LoadedGate, name: &str) {
        let before = self.indexes();
        self.0.retain(|place| place.interface.name != name);
        self.leave_others(gate, &before);
    }

    pub fn clear(&mut self) {
        self.0.clear();
    }

    /// Starts to read servers' packets on all interfaces that the gate is attached to.
    pub fn watch(&self, gate: &kernel::LoadedGate) -> Result<(), Error> {
        let attached = self.0.iter().filter(|place| place.interface.attached);
        attached.into_iter().try_for_each(|place| {
            place
                .namespace
                .inside(|| gate.watch(place.index))
                .map_err(Error::Namespace)?
                .map_err(|source| Error::Attach { name: place.interface.name.clone(), source })
        })
    }

    /// Checks all interfaces, and attaches the gate again where it is no longer attached.
    pub fn look(&mut self, gate: &kernel::LoadedGate, watch: bool) {
        let before = self.indexes();
        for place in &mut self.0 {
            let WantedInterface { interface, wanted, index, namespace } = place;
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

    /// Detaches the gate from the interfaces in `before`, given by index, that it should no longer be attached to.
    fn leave_others(&self, gate: &kernel::LoadedGate, before: &[i32]) {
        let now = self.indexes();
        before.iter().filter(|index| !now.contains(index)).for_each(|index| gate.detach_from(*index));
    }
}

/// Checks an interface, and attaches the gate again if needed. The calling thread must be in the interface's namespace.
fn look(gate: &kernel::LoadedGate, interface: &mut Interface, wanted: XdpMode, index: &mut i32, watch: bool) {
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
                Ok(name) => format!("the interface was renamed to {name}, where the gate stays attached"),
                Err(_) => "the interface is in another network namespace; the gate stays attached".to_owned(),
            });
            return;
        }
        None => {
            gate.detach_from(*index);
            interface.attached = false;
            interface.trouble = Some("the interface does not exist any more".to_owned());
            return;
        }
    }
    interface.attached = true;
    interface.trouble = hidden_tags(gate, *index);
}

/// Returns the reason why the gate sends no Retry and no Version Negotiation on an interface, or `None` if it may send
/// them.
fn hidden_tags(gate: &kernel::LoadedGate, index: i32) -> Option<String> {
    match gate.hides_tags(index) {
        Ok(false) => None,
        Ok(true) => Some(
            "its driver strips VLAN tags before the gate sees them: the gate sends no Retry or other answer there, until \
             `ethtool -K INTERFACE rxvlan off`"
                .to_owned(),
        ),
        Err(error) => Some(error.to_string()),
    }
}

/// Attaches the programs. The egress program comes first, because the gate does not know a connection if it missed the
/// server's handshake packets.
fn attach(
    gate: &kernel::LoadedGate,
    index: i32,
    wanted: XdpMode,
    watch: bool,
) -> Result<XdpMode, millrace_kernel::Error> {
    if watch {
        gate.watch(index)?;
    }
    let mode = gate.attach(index, wanted);
    if mode.is_err() && watch && !gate.is_attached(index) {
        gate.detach_from(index);
    }
    mode
}

/// Attaches the programs again. A program that is still attached stays, since attaching a program stops some network
/// cards for a moment.
fn attach_again(
    gate: &kernel::LoadedGate,
    interface: &Interface,
    index: i32,
    wanted: XdpMode,
    watch: bool,
) -> Result<XdpMode, millrace_kernel::Error> {
    if gate.is_attached(index) {
        return gate.watch(index).map(|()| interface.mode);
    }
    gate.detach_from(index);
    attach(gate, index, wanted, watch)
}

fn index_of(name: &str) -> nix::Result<i32> {
    if_nametoindex(name).and_then(|index| i32::try_from(index).map_err(|_| nix::Error::ERANGE))
}

/// A network namespace, in which names and indexes of interfaces are valid.
struct NetworkNamespace(File);

impl NetworkNamespace {
    /// Returns the calling thread's namespace.
    fn current() -> io::Result<Self> {
        File::open("/proc/thread-self/ns/net").map(Self)
    }

    /// Runs `work` in the namespace. If the calling thread is in another namespace, `work` runs in a new thread, which
    /// needs CAP_SYS_ADMIN to enter.
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
