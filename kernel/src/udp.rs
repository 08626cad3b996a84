//! What becomes of a UDP socket that others may hold, too.

#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsFd, AsRawFd};

use nix::libc;

/// Whoever holds the socket neither sends by it nor gets anything any more, whatever they do to it: it is shut down, and a filter that
/// cannot be taken off drops what comes. What has come before can still be read.
pub fn end_for_all(socket: impl AsFd) -> io::Result<()> {
    drop_all(&socket)?;
    let locked: libc::c_int = 1;
    set(&socket, libc::SOL_SOCKET, libc::SO_LOCK_FILTER, &locked)?;
    // SAFETY: the descriptor is open; no pointers are passed.
    let ended = unsafe { libc::shutdown(socket.as_fd().as_raw_fd(), libc::SHUT_RDWR) };
    if ended == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Nothing that comes is received.
pub fn drop_all(socket: impl AsFd) -> io::Result<()> {
    let nothing = libc::sock_filter { code: (libc::BPF_RET | libc::BPF_K) as u16, jt: 0, jf: 0, k: 0 };
    let mut filters = [nothing];
    let program = libc::sock_fprog { len: 1, filter: filters.as_mut_ptr() };
    set(&socket, libc::SOL_SOCKET, libc::SO_ATTACH_FILTER, &program)
}

pub fn set<T>(socket: impl AsFd, level: libc::c_int, name: libc::c_int, value: &T) -> io::Result<()> {
    let bytes = size_of::<T>() as libc::socklen_t;
    // SAFETY: the descriptor is open, and `value` has as many bytes as is said; what a filter points to outlives the call.
    let set = unsafe {
        libc::setsockopt(socket.as_fd().as_raw_fd(), level, name, std::ptr::from_ref(value).cast(), bytes)
    };
    if set == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;

    use super::*;

    /// Descriptors of it are one socket: who keeps one has nothing by it.
    #[test]
    fn who_keeps_it_has_nothing_by_it() {
        let (one, other) = (UdpSocket::bind("127.0.0.1:0"), UdpSocket::bind("127.0.0.1:0"));
        let (one, other) = (one.expect("bind"), other.expect("bind"));
        let address = |socket: &UdpSocket| socket.local_addr().expect("an address");
        one.connect(address(&other)).expect("connect");
        other.connect(address(&one)).expect("connect");
        let kept = one.try_clone().expect("another descriptor");
        kept.send(b"before").expect("sent");
        end_for_all(&one).expect("the end");
        drop(one);
        assert_eq!(kept.send(b"after").expect_err("shut down").kind(), io::ErrorKind::BrokenPipe);
        // Connected anew it is shut down all the same, and its filter stays.
        kept.connect(address(&other)).expect("connect");
        assert!(kept.send(b"after").is_err());
        assert!(set(&kept, libc::SOL_SOCKET, libc::SO_DETACH_FILTER, &0).is_err());
        let _ = other.send(b"to nobody");
        kept.set_nonblocking(true).expect("set");
        assert!(!matches!(kept.recv(&mut [0; 16]), Ok(1..)));
        let mut buffer = [0; 16];
        assert_eq!(other.recv(&mut buffer).expect("what was sent before"), 6);
        other.set_nonblocking(true).expect("set");
        assert!(other.recv(&mut buffer).is_err(), "and nothing else");
    }
}
