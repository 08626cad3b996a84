//! Attaches programs to the TC hooks of an interface, by a TCX link if the kernel supports it (since 6.6), else by a
//! clsact filter.

#![allow(unsafe_code)]

mod stale;

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use libbpf_rs::ProgramMut;
use nix::sched::{CloneFlags, setns};

use crate::Error;
use crate::fork::{ForkSafeLink, keep_from_children};
use crate::raw::{self, check};

pub use crate::hook::{KernelHook, Mechanism};

/// The position of a program among the programs of one hook.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TcPosition {
    /// The program runs before all programs that are attached to the hook already.
    First,
    /// The program runs after all programs that are attached to the hook already.
    Last,
}

/// A program that is attached to an interface. Dropping this value detaches the program, also if the calling thread is
/// in another network namespace.
pub struct TcAttachment(TcInner);

enum TcInner {
    /// The kernel detaches the program when the link's last descriptor is closed, also if this process is killed.
    Tcx { _kept: ForkSafeLink, link: OwnedFd },
    /// The filter outlives the process unless it is removed.
    Clsact { filter: ClsactFilter },
}

impl TcAttachment {
    /// Attaches a program to an interface of the calling thread's network namespace. If `mechanism` is `None`, TCX is
    /// used if the kernel supports it.
    pub fn new(
        program: &ProgramMut<'_>,
        ifindex: i32,
        hook: KernelHook,
        position: TcPosition,
        mechanism: Option<Mechanism>,
    ) -> Result<Self, Error> {
        let error = |mechanism| move |source| Error::Interface { ifindex, hook, mechanism, source };
        if mechanism != Some(Mechanism::Clsact) {
            match tcx(program, ifindex, hook, position) {
                Ok(link) => return Ok(Self(TcInner::Tcx { _kept: keep_from_children(&link), link })),
                // EINVAL means that the kernel has no TCX.
                Err(e) if mechanism.is_none() && e.raw_os_error() == Some(nix::libc::EINVAL) => {}
                Err(e) => return Err(error(Mechanism::Tcx)(e)),
            }
        }
        let filter = ClsactFilter::new(program, ifindex, hook, position).map_err(error(Mechanism::Clsact))?;
        Ok(Self(TcInner::Clsact { filter }))
    }

    /// Reports whether the program is still attached. Another process may have detached it, or the interface may be
    /// gone.
    pub fn is_in_place(&self) -> bool {
        match &self.0 {
            TcInner::Tcx { link, .. } => interface_of(link).is_ok_and(|ifindex| ifindex != 0),
            TcInner::Clsact { filter } => filter.in_its_namespace(|filter| filter.is_in_place()),
        }
    }

    /// Returns the descriptor of the TCX link. The program stays attached as long as a process has the descriptor.
    /// Returns `None` for a clsact filter, which stays until it is removed.
    pub fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        match &self.0 {
            TcInner::Tcx { link, .. } => Some(link.as_fd()),
            TcInner::Clsact { .. } => None,
        }
    }

    /// Returns the mechanism by which the program is attached.
    pub fn mechanism(&self) -> Mechanism {
        match self.0 {
            TcInner::Tcx { .. } => Mechanism::Tcx,
            TcInner::Clsact { .. } => Mechanism::Clsact,
        }
    }
}

impl Drop for TcAttachment {
    fn drop(&mut self) {
        if let TcInner::Tcx { link, .. } = &self.0 {
            // Errors are ignored, because the link is gone if its interface is.
            let _ = raw::detach(link);
        }
    }
}

/// Returns the number of TCX programs of all processes on a hook of an interface, which is in the calling thread's
/// namespace.
///
/// # Errors
/// Fails if there is no such interface, or if the kernel has no TCX.
pub fn count(ifindex: i32, hook: KernelHook) -> io::Result<usize> {
    Ok(links(ifindex, hook)?.len())
}

/// Detaches the TCX programs that [`count`] counts, as `bpftool link detach` does. Returns their number.
pub fn detach_all(ifindex: i32, hook: KernelHook) -> io::Result<usize> {
    let links = links(ifindex, hook)?;
    for id in &links {
        // SAFETY: `bpf_link_get_fd_by_id` takes no pointers, and returns a new descriptor.
        raw::detach(unsafe { raw::owned(libbpf_sys::bpf_link_get_fd_by_id(*id)) }?)?;
    }
    Ok(links.len())
}

/// Returns the IDs of the TCX links on a hook, in the order in which their programs run.
fn links(ifindex: i32, hook: KernelHook) -> io::Result<Vec<u32>> {
    const MOST: usize = 64; // BPF_MPROG_MAX of the kernel
    let mut programs = [0; MOST];
    let mut links = [0; MOST];
    let mut options = libbpf_sys::bpf_prog_query_opts {
        sz: size_of::<libbpf_sys::bpf_prog_query_opts>() as libbpf_sys::size_t,
        prog_ids: programs.as_mut_ptr(),
        link_ids: links.as_mut_ptr(),
        ..Default::default()
    };
    options.__bindgen_anon_1.count = MOST as u32;
    // SAFETY: `programs` and `links` have as many elements as `count` says, and outlive the call.
    check(unsafe { libbpf_sys::bpf_prog_query_opts(ifindex, kind(hook), &raw mut options) })?;
    // SAFETY: the union `options.__bindgen_anon_1` has one number under different names.
    let count = unsafe { options.__bindgen_anon_1.count } as usize;
    Ok(links.into_iter().take(count).collect())
}

fn kind(hook: KernelHook) -> libbpf_sys::bpf_attach_type {
    match hook {
        KernelHook::Ingress => libbpf_sys::BPF_TCX_INGRESS,
        KernelHook::Egress => libbpf_sys::BPF_TCX_EGRESS,
    }
}

/// Creates a TCX link at a hook. The name of the program's ELF section does not matter.
fn tcx(
    program: &ProgramMut<'_>,
    ifindex: i32,
    hook: KernelHook,
    position: TcPosition,
) -> io::Result<OwnedFd> {
    let options = libbpf_sys::bpf_link_create_opts {
        sz: size_of::<libbpf_sys::bpf_link_create_opts>() as libbpf_sys::size_t,
        flags: match position {
            TcPosition::First => libbpf_sys::BPF_F_BEFORE,
            TcPosition::Last => libbpf_sys::BPF_F_AFTER,
        },
        ..Default::default()
    };
    let program = program.as_fd().as_raw_fd();
    // SAFETY: the program's descriptor is open, and `options` is initialised and has its size in its field `sz`.
    // `bpf_link_create` returns a new descriptor.
    unsafe { raw::owned(libbpf_sys::bpf_link_create(program, ifindex, kind(hook), &raw const options)) }
}

/// Returns the index of the interface that a TCX link is attached to, or 0 if it has been detached.
fn interface_of(link: &OwnedFd) -> io::Result<u32> {
    let mut info = libbpf_sys::bpf_link_info::default();
    let mut len = size_of::<libbpf_sys::bpf_link_info>() as u32;
    // SAFETY: the link's descriptor is open; `info` has as many bytes as `len` says and outlives the call.
    check(unsafe { libbpf_sys::bpf_link_get_info_by_fd(link.as_raw_fd(), &raw mut info, &raw mut len) })?;
    // SAFETY: the link is a TCX link, so the kernel has filled in the member `tcx` of the union.
    Ok(unsafe { info.__bindgen_anon_1.tcx.ifindex })
}

/// A clsact filter. The clsact qdisc stays when the filter is removed, because others may have added filters to it, and
/// an empty qdisc costs nothing.
struct ClsactFilter {
    ifindex: i32,
    hook: KernelHook,
    handle: u32,
    priority: u32,
    program: u32,
    /// The network namespace in which `ifindex` is valid.
    namespace: File,
}

/// The value with which the kernel picks a priority before all existing filters.
const PRIORITY_FIRST: u32 = 0;
const PRIORITY_LAST: u32 = 0xffff;

impl ClsactFilter {
    fn new(
        program: &ProgramMut<'_>,
        ifindex: i32,
        hook: KernelHook,
        position: TcPosition,
    ) -> io::Result<Self> {
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
                TcPosition::First => PRIORITY_FIRST,
                TcPosition::Last => PRIORITY_LAST,
            },
            ..options()
        };
        // SAFETY: `point` and `options` are initialised, and have their sizes in their fields `sz`. The program's
        // descriptor is open.
        check(unsafe { libbpf_sys::bpf_tc_attach(&raw const point, &raw mut options) })?;
        let libbpf_sys::bpf_tc_opts { handle, priority, prog_id: program, .. } = options;
        Ok(Self { ifindex, hook, handle, priority, program, namespace })
    }

    /// Reports whether the filter still exists. The calling thread must be in the filter's namespace.
    fn is_in_place(&self) -> bool {
        let Self { ifindex, hook, handle, priority, program, .. } = *self;
        let point = point(ifindex, hook);
        let mut options = libbpf_sys::bpf_tc_opts { handle, priority, ..options() };
        // SAFETY: `point` and `options` are initialised, and have their sizes in their fields `sz`.
        let found = check(unsafe { libbpf_sys::bpf_tc_query(&raw const point, &raw mut options) });
        found.is_ok() && options.prog_id == program
    }

    fn detach(&self) -> io::Result<()> {
        detach(&point(self.ifindex, self.hook), self.handle, self.priority)
    }

    /// Runs `work` in the filter's namespace. It runs on another thread, so that the calling thread stays in its own
    /// namespace. If the namespace cannot be entered, `work` does not run and the result is the default value.
    fn in_its_namespace<T: Send + Default>(&self, work: impl FnOnce(&Self) -> T + Send) -> T {
        std::thread::scope(|scope| {
            let inside = || setns(&self.namespace, CloneFlags::CLONE_NEWNET).map(|()| work(self));
            scope.spawn(inside).join().map_or_else(|_| T::default(), Result::unwrap_or_default)
        })
    }
}

impl Drop for ClsactFilter {
    fn drop(&mut self) {
        // Errors are ignored, because the filter is gone if its interface is.
        self.in_its_namespace(|filter| drop(filter.detach()));
    }
}

/// Removes filters with a program of this name that killed processes have left on an interface. Such filters exist only
/// on kernels without TCX.
pub fn remove_leftovers(ifindex: i32, hook: KernelHook, name: &str) -> io::Result<()> {
    remove_stale(&point(ifindex, hook), hook, name)
}

/// Removes filters that killed processes have left. The programs of such filters still run for every packet, which
/// costs CPU time. They stop acting on packets at a limit that only a live process can extend, such as the end of a
/// lease.
fn remove_stale(point: &libbpf_sys::bpf_tc_hook, hook: KernelHook, name: &str) -> io::Result<()> {
    for filter in stale::find(point.ifindex, hook, name)? {
        detach(point, filter.handle, filter.priority)?;
    }
    Ok(())
}

/// Detaches a filter in the calling thread's namespace.
fn detach(point: &libbpf_sys::bpf_tc_hook, handle: u32, priority: u32) -> io::Result<()> {
    let options = libbpf_sys::bpf_tc_opts { handle, priority, ..options() };
    // SAFETY: `point` and `options` are initialised, and have their sizes in their fields `sz`.
    check(unsafe { libbpf_sys::bpf_tc_detach(point, &raw const options) })
}

fn point(ifindex: i32, hook: KernelHook) -> libbpf_sys::bpf_tc_hook {
    libbpf_sys::bpf_tc_hook {
        sz: size_of::<libbpf_sys::bpf_tc_hook>() as libbpf_sys::size_t,
        ifindex,
        attach_point: match hook {
            KernelHook::Ingress => libbpf_sys::BPF_TC_INGRESS,
            KernelHook::Egress => libbpf_sys::BPF_TC_EGRESS,
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
