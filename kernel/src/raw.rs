//! Wrappers for libbpf calls that libbpf-rs lacks.

#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

use crate::intf::Plain;

/// Converts the result of libbpf, which is a negated error number on failure.
pub fn check(result: i32) -> io::Result<()> {
    if result < 0 { Err(io::Error::from_raw_os_error(-result)) } else { Ok(()) }
}

/// Returns the descriptor of a call's result.
///
/// # Safety
/// The call created it, and nothing else owns it.
pub unsafe fn owned(result: i32) -> io::Result<OwnedFd> {
    check(result)?;
    // SAFETY: no error, so it is a descriptor, and the caller gives it away.
    Ok(unsafe { OwnedFd::from_raw_fd(result) })
}

/// Detaches a link's program. Closing the link alone is not enough, because a child that another thread is starting
/// holds the descriptor until exec. If the interface is gone, the link went with it, which is an error.
pub fn detach(link: impl AsFd) -> io::Result<()> {
    // SAFETY: the descriptor is open; no pointers are passed.
    check(unsafe { libbpf_sys::bpf_link_detach(link.as_fd().as_raw_fd()) })
}

/// Runs a program of type `syscall` with its argument.
pub fn run<T: Plain>(program: impl AsFd, call: &mut T) -> io::Result<()> {
    let mut options = libbpf_sys::bpf_test_run_opts {
        sz: size_of::<libbpf_sys::bpf_test_run_opts>() as libbpf_sys::size_t,
        ctx_in: std::ptr::from_mut(call).cast(),
        ctx_size_in: size_of::<T>() as u32,
        ..Default::default()
    };
    // SAFETY: the descriptor is open; the kernel reads and writes as many bytes as `call` has, whose every bit
    // pattern is a value, and keeps no pointer to it.
    check(unsafe { libbpf_sys::bpf_prog_test_run_opts(program.as_fd().as_raw_fd(), &raw mut options) })
}
