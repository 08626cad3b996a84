//! Attaching to the traffic control hooks of an interface: by a TCX link where the kernel has it (6.6), by
//! a clsact filter otherwise.

#![allow(unsafe_code)]

mod stale;

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::ptr::NonNull;

use libbpf_rs::query::LinkTypeInfo;
use libbpf_rs::{AsRawLibbpf, Link, ProgramMut};
use nix::sched::{CloneFlags, setns};

use crate::Error;
use crate::fork::{Kept, keep_from_children};
use crate::raw::{self, check};

pub use crate::hook::{Hook, Mechanism};

/// Where among the programs of one hook.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Position {
    First,
    Last,
}

/// A program on an interface; dropping it detaches the program, from whatever network namespace.
pub struct Attachment(Inner);

enum Inner {
    /// The kernel detaches when the link's last descriptor closes, so also when this process is killed.
    Tcx { _kept: Kept, link: Link },
    /// Outlives the process unless it is removed.
    Clsact { filter: Filter },
}

impl Attachment {
    /// Attaches to an interface of the calling thread's network namespace. `mechanism` `None` takes TCX
    /// where the kernel has it.
    pub fn new(
        program: &ProgramMut<'_>,
        ifindex: i32,
        hook: Hook,
        position: Position,
        mechanism: Option<Mechanism>,
    ) -> Result<Self, Error> {
        let error = |mechanism| move |source| Error::Interface { ifindex, hook, mechanism, source };
        if mechanism != Some(Mechanism::Clsact) {
            match tcx(program, ifindex, position) {
                Ok(link) => return Ok(Self(Inner::Tcx { _kept: keep_from_children(&link), link })),
                // The answer of a kernel that does not know the attach type.
                Err(e) if mechanism.is_none() && e.raw_os_error() == Some(nix::libc::EINVAL) => {}
                Err(e) => return Err(error(Mechanism::Tcx)(e)),
            }
        }
        let filter = Filter::new(program, ifindex, hook, position).map_err(error(Mechanism::Clsact))?;
        Ok(Self(Inner::Clsact { filter }))
    }

    /// Whether the program is still where it was attached: somebody else may have detached it, and an interface takes
    /// it along when it goes.
    pub fn is_in_place(&self) -> bool {
        match &self.0 {
            Inner::Tcx { link, .. } => {
                let info = link.info().map(|info| info.info);
                matches!(info, Ok(LinkTypeInfo::Tcx(tcx)) if tcx.ifindex != 0)
            }
            Inner::Clsact { filter } => filter.in_its_namespace(|filter| filter.is_in_place()),
        }
    }

    /// Of its link: as long as somebody has it the program stays. `None`: the program stays anyway, until it is removed.
    pub fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        match &self.0 {
            Inner::Tcx { link, .. } => Some(link.as_fd()),
            Inner::Clsact { .. } => None,
        }
    }

    pub fn mechanism(&self) -> Mechanism {
        match self.0 {
            Inner::Tcx { .. } => Mechanism::Tcx,
            Inner::Clsact { .. } => Mechanism::Clsact,
        }
    }
}

impl Drop for Attachment {
    fn drop(&mut self) {
        if let Inner::Tcx { link, .. } = &self.0 {
            // An interface that is gone took the link along, so there is nothing to report.
            let _ = raw::detach(link);
        }
    }
}

/// TCX programs on a hook of an interface of the calling thread's namespace, whoever attached them.
///
/// # Errors
/// There is no such interface, or the kernel has no TCX.
pub fn count(ifindex: i32, hook: Hook) -> io::Result<usize> {
    Ok(links(ifindex, hook)?.len())
}

/// Detaches every TCX program as [`count`] counts them, as `bpftool link detach` does. Returns how many.
pub fn detach_all(ifindex: i32, hook: Hook) -> io::Result<usize> {
    let links = links(ifindex, hook)?;
    for id in &links {
        // SAFETY: no pointers are passed; the call makes the descriptor.
        raw::detach(unsafe { raw::owned(libbpf_sys::bpf_link_get_fd_by_id(*id)) }?)?;
    }
    Ok(links.len())
}

/// IDs of the links, in the order in which their programs run.
fn links(ifindex: i32, hook: Hook) -> io::Result<Vec<u32>> {
    const MOST: usize = 64; // BPF_MPROG_MAX
    let (mut programs, mut links) = ([0; MOST], [0; MOST]);
    let mut options = libbpf_sys::bpf_prog_query_opts {
        sz: size_of::<libbpf_sys::bpf_prog_query_opts>() as libbpf_sys::size_t,
        prog_ids: programs.as_mut_ptr(),
        link_ids: links.as_mut_ptr(),
        ..Default::default()
    };
    options.__bindgen_anon_1.count = MOST as u32;
    let kind = match hook {
        Hook::Ingress => libbpf_sys::BPF_TCX_INGRESS,
        Hook::Egress => libbpf_sys::BPF_TCX_EGRESS,
    };
    // SAFETY: both arrays have as many elements as `count` says and outlive the call.
    check(unsafe { libbpf_sys::bpf_prog_query_opts(ifindex, kind, &raw mut options) })?;
    // SAFETY: all members of the union are the same number.
    let count = unsafe { options.__bindgen_anon_1.count } as usize;
    Ok(links.into_iter().take(count).collect())
}

/// The hook comes from the program's section, `tcx/ingress` or `tcx/egress`.
fn tcx(program: &ProgramMut<'_>, ifindex: i32, position: Position) -> io::Result<Link> {
    let options = libbpf_sys::bpf_tcx_opts {
        sz: size_of::<libbpf_sys::bpf_tcx_opts>() as libbpf_sys::size_t,
        flags: match position {
            Position::First => libbpf_sys::BPF_F_BEFORE,
            Position::Last => libbpf_sys::BPF_F_AFTER,
        },
        ..Default::default()
    };
    // SAFETY: the program is loaded and outlives the call; `options` is initialised and carries its size.
    let link = unsafe {
        libbpf_sys::bpf_program__attach_tcx(program.as_libbpf_object().as_ptr(), ifindex, &raw const options)
    };
    let link = NonNull::new(link).ok_or_else(io::Error::last_os_error)?;
    // SAFETY: libbpf returned a link that nothing else owns.
    Ok(unsafe { Link::from_ptr(link) })
}

/// A clsact filter. The clsact qdisc itself stays: removing it would take along whatever filters others
/// have put there since, and an empty one costs nothing.
struct Filter {
    ifindex: i32,
    hook: Hook,
    handle: u32,
    priority: u32,
    program: u32,
    /// Interface indexes mean nothing outside their namespace.
    namespace: File,
}

/// The kernel picks a priority before all others when given none.
const PRIORITY_FIRST: u32 = 0;
const PRIORITY_LAST: u32 = 0xffff;

impl Filter {
    fn new(program: &ProgramMut<'_>, ifindex: i32, hook: Hook, position: Position) -> io::Result<Self> {
        let namespace = File::open("/proc/thread-self/ns/net")?;
        let mut point = point(ifindex, hook);
        // SAFETY: `point` is initialised and carries its size.
        match check(unsafe { libbpf_sys::bpf_tc_hook_create(&raw mut point) }) {
            Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(e),
            _ => {}
        }
        remove_stale(&point, hook, &program.name().to_string_lossy())?;
        let mut options = libbpf_sys::bpf_tc_opts {
            prog_fd: program.as_fd().as_raw_fd(),
            priority: match position {
                Position::First => PRIORITY_FIRST,
                Position::Last => PRIORITY_LAST,
            },
            ..options()
        };
        // SAFETY: both structures are initialised and carry their sizes; the descriptor is open.
        check(unsafe { libbpf_sys::bpf_tc_attach(&raw const point, &raw mut options) })?;
        let libbpf_sys::bpf_tc_opts { handle, priority, prog_id: program, .. } = options;
        Ok(Self { ifindex, hook, handle, priority, program, namespace })
    }

    /// Whether there is such a filter in the calling thread's namespace.
    fn is_in_place(&self) -> bool {
        let Self { ifindex, hook, handle, priority, program, .. } = *self;
        let (point, mut options) =
            (point(ifindex, hook), libbpf_sys::bpf_tc_opts { handle, priority, ..options() });
        // SAFETY: both structures are initialised and carry their sizes.
        let found = check(unsafe { libbpf_sys::bpf_tc_query(&raw const point, &raw mut options) });
        found.is_ok() && options.prog_id == program
    }

    fn detach(&self) -> io::Result<()> {
        detach(&point(self.ifindex, self.hook), self.handle, self.priority)
    }

    /// Runs `work` in the filter's namespace, on another thread: the caller stays in its own. Without the namespace there is
    /// nothing to work on.
    fn in_its_namespace<T: Send + Default>(&self, work: impl FnOnce(&Self) -> T + Send) -> T {
        std::thread::scope(|scope| {
            let inside = || setns(&self.namespace, CloneFlags::CLONE_NEWNET).map(|()| work(self));
            scope.spawn(inside).join().map_or_else(|_| T::default(), Result::unwrap_or_default)
        })
    }
}

impl Drop for Filter {
    fn drop(&mut self) {
        // An interface that is gone took its filters along, so there is nothing to report.
        self.in_its_namespace(|filter| drop(filter.detach()));
    }
}

/// Removes the filters with a program of this name that processes which were killed have left on an interface, as they do where the kernel has
/// no TCX.
pub fn remove_leftovers(ifindex: i32, hook: Hook, name: &str) -> io::Result<()> {
    remove_stale(&point(ifindex, hook), hook, name)
}

/// Removes the filters of processes that were killed. Their programs do no harm, since nobody raises their limits any more,
/// but they see every packet.
fn remove_stale(point: &libbpf_sys::bpf_tc_hook, hook: Hook, name: &str) -> io::Result<()> {
    for filter in stale::find(point.ifindex, hook, name)? {
        detach(point, filter.handle, filter.priority)?;
    }
    Ok(())
}

/// Detaches a filter in the calling thread's namespace.
fn detach(point: &libbpf_sys::bpf_tc_hook, handle: u32, priority: u32) -> io::Result<()> {
    let options = libbpf_sys::bpf_tc_opts { handle, priority, ..options() };
    // SAFETY: both structures are initialised and carry their sizes.
    check(unsafe { libbpf_sys::bpf_tc_detach(point, &raw const options) })
}

fn point(ifindex: i32, hook: Hook) -> libbpf_sys::bpf_tc_hook {
    libbpf_sys::bpf_tc_hook {
        sz: size_of::<libbpf_sys::bpf_tc_hook>() as libbpf_sys::size_t,
        ifindex,
        attach_point: match hook {
            Hook::Ingress => libbpf_sys::BPF_TC_INGRESS,
            Hook::Egress => libbpf_sys::BPF_TC_EGRESS,
        },
        ..Default::default()
    }
}

fn options() -> libbpf_sys::bpf_tc_opts {
    libbpf_sys::bpf_tc_opts {
        sz: size_of::<libbpf_sys::bpf_tc_opts>() as libbpf_sys::size_t,
        ..Default::default()
    }
}
