//! Socket options of UDP, and a way to end a UDP socket for every process that holds it.

#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsFd, AsRawFd};

use nix::libc;

/// Ends a socket for all processes that hold it. Afterwards none of them can send or receive new datagrams with it, and
/// none can undo this. The socket is shut down, and a filter that cannot be removed drops new datagrams. Datagrams that
/// arrived before can still be read.
pub fn end_for_all(socket: impl AsFd) -> io::Result<()> {
    drop_all(&socket)?;
    let locked: libc::c_int = 1;
    set(&socket, libc::SOL_SOCKET, libc::SO_LOCK_FILTER, &locked)?;
    // SAFETY: the socket's descriptor is open, and shutdown takes no pointers.
    let ended = unsafe { libc::shutdown(socket.as_fd().as_raw_fd(), libc::SHUT_RDWR) };
    if ended == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Attaches a filter to the socket that drops all new datagrams.
fn drop_all(socket: impl AsFd) -> io::Result<()> {
    let nothing = libc::sock_filter { code: (libc::BPF_RET | libc::BPF_K) as u16, jt: 0, jf: 0, k: 0 };
    let mut filters = [nothing];
    let program = libc::sock_fprog { len: 1, filter: filters.as_mut_ptr() };
    set(&socket, libc::SOL_SOCKET, libc::SO_ATTACH_FILTER, &program)
}

/// Sets an option of a socket.
pub fn set<T>(socket: impl AsFd, level: libc::c_int, name: libc::c_int, value: &T) -> io::Result<()> {
    let bytes = size_of::<T>() as libc::socklen_t;
    // SAFETY: the socket's descriptor is open, and `value` has `bytes` bytes. Memory that `value` points to outlives
    // the call.
    let set = unsafe {
        libc::setsockopt(socket.as_fd().as_raw_fd(), level, name, std::ptr::from_ref(value).cast(), bytes)
    };
    if set == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;

    use super::*;

    /// Checks that the end of a socket affects every descriptor of it.
    #[test]
    fn duplicated_descriptor_of_a_shut_down_udp_socket_stays_shut_down() {
        let one = UdpSocket::bind("127.0.0.1:0");
        let other = UdpSocket::bind("127.0.0.1:0");
        let one = one.expect("bind");
        let other = other.expect("bind");
        let address = |socket: &UdpSocket| socket.local_addr().expect("an address");
        one.connect(address(&other)).expect("connect");
        other.connect(address(&one)).expect("connect");
        let kept = one.try_clone().expect("another descriptor");
        kept.send(b"before").expect("sent");
        end_for_all(&one).expect("the end");
        drop(one);
        assert_eq!(kept.send(b"after").expect_err("shut down").kind(), io::ErrorKind::BrokenPipe);
        // After another connect() the socket is still shut down, and its filter stays.
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
