//! Which network namespace a socket is in.

#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _};

use nix::libc;

/// What the kernel calls the calling thread's.
pub(super) fn cookie() -> io::Result<u64> {
    let socket = std::net::UdpSocket::bind(("0.0.0.0", 0))?;
    let (mut cookie, mut length) = (0_u64, size_of::<u64>() as libc::socklen_t);
    // SAFETY: the socket is open; the kernel writes at most `length` bytes to `cookie`, which has so many.
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
