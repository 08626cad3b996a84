//! Identifies the calling thread's network namespace.

#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _};

use nix::libc;

/// Returns the cookie by which BPF programs identify the calling thread's network namespace.
pub(super) fn cookie() -> io::Result<u64> {
    let socket = std::net::UdpSocket::bind(("0.0.0.0", 0))?;
    let mut cookie = 0_u64;
    let mut length = size_of::<u64>() as libc::socklen_t;
    // SAFETY: the socket is open; the kernel writes at most `length` bytes to `cookie`, which is that long.
    let done = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_NETNS_COOKIE,
            (&raw mut cookie).cast(),
            &raw mut length,
        )
    };
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok(cookie) }
}
