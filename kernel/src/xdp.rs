//! Attaches programs to an interface at XDP, through a BPF link. The kernel detaches a program when the link's last
//! descriptor is closed, also if this process is killed. The kernel allows one program per interface. With the program
//! in [`root`], several processes share an interface.

#![allow(unsafe_code)]

pub mod root;
mod shared;

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use libbpf_rs::query::{LinkInfo, LinkInfoIter, LinkTypeInfo};

use crate::raw::{check, detach, owned};

pub use crate::hook::XdpMode;

/// Detaches an interface's XDP program, whichever process attached it through a BPF link, as `bpftool link detach`
/// does. The interface must be in the calling thread's network namespace. Returns the number of links that were
/// detached.
pub fn detach_all(ifindex: i32) -> io::Result<usize> {
    let mut program = 0;
    // SAFETY: `program` outlives the call.
    check(unsafe { libbpf_sys::bpf_xdp_query_id(ifindex, 0, &raw mut program) })?;
    // A link belongs to this interface if the interface index and the program's ID are equal. The index alone is not
    // enough, because interfaces in other namespaces may have it too.
    let is_there = |info: &LinkInfo| {
        let LinkTypeInfo::Xdp(xdp) = &info.info else { return false };
        info.prog_id == program && xdp.ifindex == ifindex.cast_unsigned()
    };
    let links: Vec<u32> = LinkInfoIter::default().filter(is_there).map(|info| info.id).collect();
    for id in &links {
        // SAFETY: `bpf_link_get_fd_by_id` takes no pointers, and returns a new descriptor.
        detach(unsafe { owned(libbpf_sys::bpf_link_get_fd_by_id(*id)) }?)?;
    }
    Ok(links.len())
}

/// Measures how long the program of an interface takes for an Ethernet frame, including all programs that it calls. The
/// result is the mean of `runs` runs in a row, so the CPU's caches are warm. If the program writes a reply into the
/// frame (XDP_TX), the frame cannot be measured, because later runs would read the reply.
///
/// # Errors
/// Fails if there is no program, or if the process lacks CAP_SYS_ADMIN.
pub fn time(ifindex: i32, frame: &[u8], runs: u32) -> io::Result<Duration> {
    let program = shared::program_of(ifindex)?.ok_or(io::ErrorKind::NotFound)?;
    let mut options = libbpf_sys::bpf_test_run_opts {
        sz: size_of::<libbpf_sys::bpf_test_run_opts>() as libbpf_sys::size_t,
        data_in: frame.as_ptr().cast(),
        data_size_in: u32::try_from(frame.len()).map_err(io::Error::other)?,
        repeat: i32::try_from(runs).map_err(io::Error::other)?,
        ..Default::default()
    };
    // SAFETY: the program's descriptor is open. The kernel reads the frame during the call only, and writes to
    // `options`.
    check(unsafe { libbpf_sys::bpf_prog_test_run_opts(program.as_raw_fd(), &raw mut options) })?;
    Ok(Duration::from_nanos(options.duration.into()))
}

fn link(program: BorrowedFd<'_>, ifindex: i32, mode: XdpMode) -> io::Result<OwnedFd> {
    let options = libbpf_sys::bpf_link_create_opts {
        sz: size_of::<libbpf_sys::bpf_link_create_opts>() as libbpf_sys::size_t,
        flags: match mode {
            XdpMode::Auto => 0,
            XdpMode::Native => libbpf_sys::XDP_FLAGS_DRV_MODE,
            XdpMode::Generic => libbpf_sys::XDP_FLAGS_SKB_MODE,
        },
        ..Default::default()
    };
    let program = program.as_raw_fd();
    // SAFETY: the program is loaded, and `options` is initialised and has its size in its field `sz`. `bpf_link_create`
    // returns a new descriptor.
    unsafe { owned(libbpf_sys::bpf_link_create(program, ifindex, libbpf_sys::BPF_XDP, &raw const options)) }
}

/// Reports whether a link's program is still attached. Another process may have detached it, or the interface may be
/// gone.
fn is_attached(link: impl AsFd) -> bool {
    let mut info = libbpf_sys::bpf_link_info::default();
    let mut bytes = size_of_val(&info) as u32;
    // SAFETY: the link's descriptor is open; `info` has as many bytes as `bytes` says and outlives the call.
    let error = unsafe {
        libbpf_sys::bpf_link_get_info_by_fd(link.as_fd().as_raw_fd(), &raw mut info, &raw mut bytes)
    };
    // SAFETY: the link is of an XDP program, so the kernel has filled in the member `xdp` of the union.
    error == 0 && unsafe { info.__bindgen_anon_1.xdp.ifindex } != 0
}
