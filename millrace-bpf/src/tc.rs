//! Attaching to the traffic control hooks of an interface: by a TCX link where the kernel has it (6.6), by
//! a clsact filter otherwise.

#![allow(unsafe_code)]

use std::fmt;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::ptr::NonNull;

use libbpf_rs::{AsRawLibbpf, Link, ProgramMut};
use nix::sched::{CloneFlags, setns};

use crate::Error;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Hook {
    Ingress,
    Egress,
}

/// Where among the programs of one hook.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Position {
    First,
    Last,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mechanism {
    Tcx,
    Clsact,
}

impl fmt::Display for Hook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Ingress => "TC ingress",
            Self::Egress => "TC egress",
        })
    }
}

impl fmt::Display for Mechanism {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Tcx => "TCX",
            Self::Clsact => "clsact",
        })
    }
}

/// A program on an interface; dropping it detaches the program, from whatever network namespace.
pub struct Attachment(Inner);

enum Inner {
    /// The kernel detaches when the link's last descriptor closes, so also when this process is killed.
    Tcx { link: Link },
    /// Outlives the process unless it is removed.
    Clsact { _filter: Filter },
}

impl Attachment {
    /// Attaches to an interface of the calling thread's network namespace. `mechanism` `None` takes TCX
    /// where the kernel has it.
    pub(crate) fn new(
        program: &ProgramMut<'_>,
        ifindex: i32,
        hook: Hook,
        position: Position,
        mechanism: Option<Mechanism>,
    ) -> Result<Self, Error> {
        let error = |mechanism| move |source| Error::Interface { ifindex, hook, mechanism, source };
        if mechanism != Some(Mechanism::Clsact) {
            match tcx(program, ifindex, position) {
                Ok(link) => return Ok(Self(Inner::Tcx { link })),
                // What a kernel says that does not know the attach type.
                Err(e) if mechanism.is_none() && e.raw_os_error() == Some(nix::libc::EINVAL) => {}
                Err(e) => return Err(error(Mechanism::Tcx)(e)),
            }
        }
        let filter = Filter::new(program, ifindex, hook, position).map_err(error(Mechanism::Clsact))?;
        Ok(Self(Inner::Clsact { _filter: filter }))
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
        if let Inner::Tcx { link } = &self.0 {
            // Closing alone is not enough: a child that another thread is about to start holds the descriptor
            // until it executes its program. An interface that is gone took the link along.
            let _ = link.detach();
        }
    }
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
        Ok(Self { ifindex, hook, handle: options.handle, priority: options.priority, namespace })
    }

    fn detach(&self) -> io::Result<()> {
        setns(&self.namespace, CloneFlags::CLONE_NEWNET)?;
        let options = libbpf_sys::bpf_tc_opts { handle: self.handle, priority: self.priority, ..options() };
        let point = point(self.ifindex, self.hook);
        // SAFETY: both structures are initialised and carry their sizes.
        check(unsafe { libbpf_sys::bpf_tc_detach(&raw const point, &raw const options) })
    }
}

impl Drop for Filter {
    fn drop(&mut self) {
        // On a thread of its own, so that the caller's namespace stays what it is. An interface that is gone
        // took its filters along, so there is nothing to report.
        std::thread::scope(|scope| {
            let _ = scope.spawn(|| self.detach()).join();
        });
    }
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

/// libbpf returns the negated error number.
fn check(result: i32) -> io::Result<()> {
    if result < 0 { Err(io::Error::from_raw_os_error(-result)) } else { Ok(()) }
}
