//! Finds programs that another process has attached to an interface, by the kernel's IDs. Processes share descriptors
//! in this way, so nothing has to be pinned.

#![allow(unsafe_code)]

use std::ffi::CStr;
use std::io;
use std::mem::offset_of;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use libbpf_rs::query::{LinkInfo, LinkInfoIter, LinkTypeInfo};
use libbpf_rs::{MapCore, MapHandle};
use nix::libc;

use super::{XdpMode, is_attached};
use crate::raw::{check, owned};

/// Largest number of a program's maps that are searched for a name. The root program has only a few maps.
const MAPS: usize = 64;

/// The root program of an interface, which another process has attached.
pub(super) struct FoundRoot {
    /// A new descriptor of the root's BPF link. The link exists as long as any of its descriptors.
    pub link: OwnedFd,
    pub slots: MapHandle,
    pub mode: XdpMode,
}

/// Returns the root program of an interface, or `None` if there is none or it is being detached.
///
/// # Errors
/// Fails with `EBUSY` if the interface has another program than a root. Fails with `EPERM` if the process
/// lacks CAP_SYS_ADMIN.
pub(super) fn find(ifindex: i32, root: &str, slots: &str) -> io::Result<Option<FoundRoot>> {
    let (id, mode) = attached(ifindex)?;
    let Some(program) = (id != 0).then(|| program(id)).transpose()?.flatten() else { return Ok(None) };
    let busy = || io::Error::from_raw_os_error(libc::EBUSY);
    if name(program.as_fd())? != root {
        return Err(busy());
    }
    let Some(slots) = map_of(program.as_fd(), slots)? else { return Err(busy()) };
    let is_there = |info: &LinkInfo| {
        let LinkTypeInfo::Xdp(xdp) = &info.info else { return false };
        info.prog_id == id && xdp.ifindex == ifindex.cast_unsigned()
    };
    let Some(info) = LinkInfoIter::default().find(is_there) else { return Ok(None) };
    // SAFETY: `bpf_link_get_fd_by_id` takes no pointers, and returns a new descriptor.
    let link = if_there(unsafe { owned(libbpf_sys::bpf_link_get_fd_by_id(info.id)) })?;
    Ok(link.filter(|link| is_attached(link)).map(|link| FoundRoot { link, slots, mode }))
}

/// Reports whether the program's map of this name has an element at index 0. The kernel removes it when the process
/// that loaded the program ends.
pub(super) fn is_filled(program_id: u32, map: &str) -> io::Result<bool> {
    let Some(program) = program(program_id)? else { return Ok(false) };
    let Some(map) = map_of(program.as_fd(), map)? else { return Ok(false) };
    Ok(entry(&map, 0).is_some())
}

/// Returns the ID of the program at an index of a program array.
pub(super) fn entry(map: &MapHandle, index: u32) -> Option<u32> {
    let found = map.lookup(&index.to_ne_bytes(), libbpf_rs::MapFlags::ANY).ok()??;
    found.first_chunk().map(|id| u32::from_ne_bytes(*id))
}

/// Returns ID and mode of an interface's XDP program. The ID is 0 if there is no program.
fn attached(ifindex: i32) -> io::Result<(u32, XdpMode)> {
    let mut options = libbpf_sys::bpf_xdp_query_opts {
        // The size ends before `feature_flags`: with that field, the kernel would also ask the driver for its features.
        sz: offset_of!(libbpf_sys::bpf_xdp_query_opts, feature_flags) as libbpf_sys::size_t,
        ..Default::default()
    };
    // SAFETY: `options` is initialised, carries its size, and outlives the call.
    check(unsafe { libbpf_sys::bpf_xdp_query(ifindex, 0, &raw mut options) })?;
    let is_generic = u32::from(options.attach_mode) == libbpf_sys::XDP_ATTACHED_SKB;
    Ok((options.prog_id, if is_generic { XdpMode::Generic } else { XdpMode::Native }))
}

/// Returns the XDP program of an interface, or `None` if there is none.
pub(super) fn program_of(ifindex: i32) -> io::Result<Option<OwnedFd>> {
    match attached(ifindex)? {
        (0, _) => Ok(None),
        (id, _) => program(id),
    }
}

fn program(id: u32) -> io::Result<Option<OwnedFd>> {
    // SAFETY: `bpf_prog_get_fd_by_id` takes no pointers, and returns a new descriptor.
    if_there(unsafe { owned(libbpf_sys::bpf_prog_get_fd_by_id(id)) })
}

/// Converts the error for an object that no longer exists to `None`.
fn if_there<T>(result: io::Result<T>) -> io::Result<Option<T>> {
    match result {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        other => other.map(Some),
    }
}

fn name(program: BorrowedFd<'_>) -> io::Result<String> {
    let info = info(program, &mut [])?;
    // SAFETY: the kernel ends the name with a zero byte.
    let name = unsafe { CStr::from_ptr(info.name.as_ptr()) };
    Ok(name.to_string_lossy().into_owned())
}

fn map_of(program: BorrowedFd<'_>, name: &str) -> io::Result<Option<MapHandle>> {
    let mut ids = [0; MAPS];
    let count = info(program, &mut ids)?.nr_map_ids as usize;
    let maps = ids.into_iter().take(count).filter_map(|id| MapHandle::from_map_id(id).ok());
    Ok(maps.into_iter().find(|map| map.name() == name))
}

fn info(program: BorrowedFd<'_>, map_ids: &mut [u32]) -> io::Result<libbpf_sys::bpf_prog_info> {
    let mut info = libbpf_sys::bpf_prog_info {
        nr_map_ids: map_ids.len() as u32,
        map_ids: map_ids.as_mut_ptr() as u64,
        ..Default::default()
    };
    if map_ids.is_empty() {
        info.map_ids = 0;
    }
    let mut bytes = size_of_val(&info) as u32;
    // SAFETY: the program's descriptor is open. `info` has `bytes` bytes, `map_ids` has the number of elements that
    // `info` says, and both outlive the call.
    check(unsafe {
        libbpf_sys::bpf_prog_get_info_by_fd(program.as_raw_fd(), &raw mut info, &raw mut bytes)
    })?;
    Ok(info)
}
