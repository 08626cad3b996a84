//! Helpers for calls of libbpf that libbpf-rs does not wrap.

#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

use crate::intf::Plain;

/// libbpf returns the negated error number.
pub fn check(result: i32) -> io::Result<()> {
    if result < 0 { Err(io::Error::from_raw_os_error(-result)) } else { Ok(()) }
}

/// The descriptor that a call returned.
///
/// # Safety
/// The call made it, and nothing else owns it.
pub unsafe fn owned(result: i32) -> io::Result<OwnedFd> {
    check(result)?;
    // SAFETY: no error, so a descriptor; it is the caller's to give away.
    Ok(unsafe { OwnedFd::from_raw_fd(result) })
}

/// Detaches what a link attached. Closing the link alone is not enough: a child that another thread is about to start
/// holds the descriptor until it executes its program. An interface that is gone took the link along, which is an error.
pub fn detach(link: impl AsFd) -> io::Result<()> {
    // SAFETY: the descriptor is open; no pointers are passed.
    check(unsafe { libbpf_sys::bpf_link_detach(link.as_fd().as_raw_fd()) })
}

/// Runs a `syscall` program on its argument.
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
