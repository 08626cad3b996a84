//! Wrappers for libbpf calls that libbpf-rs lacks.

#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

use crate::intf::Plain;

/// Converts a result of a libbpf function: a negative number `-errno` becomes an error.
pub fn check(result: i32) -> io::Result<()> {
    if result < 0 { Err(io::Error::from_raw_os_error(-result)) } else { Ok(()) }
}

/// Converts a call's result to the descriptor that the call has made, or to an error.
///
/// # Safety
/// If `result` is a descriptor, the call must have made it, and nothing else may own it.
pub unsafe fn owned(result: i32) -> io::Result<OwnedFd> {
    check(result)?;
    // SAFETY: the result is no error, so it is a descriptor, and the caller promises that nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(result) })
}

/// Detaches a link's program. Closing the link is not enough: if another thread is just starting a child process, the
/// child has the descriptor until exec. Returns an error if the interface is gone, since the link is then gone too.
pub fn detach(link: impl AsFd) -> io::Result<()> {
    // SAFETY: the link's descriptor is open, and `bpf_link_detach` takes no pointers.
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
    // SAFETY: the descriptor is open. The kernel reads and writes exactly the bytes of `call` and keeps no pointer to
    // it. Every bit pattern is a valid `T`.
    check(unsafe { libbpf_sys::bpf_prog_test_run_opts(program.as_fd().as_raw_fd(), &raw mut options) })
}
