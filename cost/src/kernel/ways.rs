//! The ways into the socket layer, and the functions where each may be timed.
//!
//! `writev` and `readv` stand for `pwritev2` and `preadv2`, io_uring's for its requests with registered buffers.
//! io_uring's `splice` goes through the functions of the others, in threads of its own.

use std::io;

use super::config::KernelEvent;
use super::sockets::{BYTES, SocketPair};

/// A way to send or to receive.
#[derive(Clone, Copy)]
pub struct SocketCall {
    /// The system call's name, or that of the request of AIO or io_uring.
    pub name: &'static str,
    /// The event that the way counts for.
    pub event: KernelEvent,
    /// Functions where it may be timed, best first. Functions that several ways share come first, since they also serve the kernel's own
    /// sockets. A trial call shows which of them the way really goes through.
    pub(super) functions: &'static [&'static str],
    /// Goes this way once; gives the number of bytes that were moved.
    call: fn(&SocketPair) -> io::Result<usize>,
}

impl SocketCall {
    /// Returns why it cannot be timed at system calls, if so.
    pub(super) fn beyond_system_calls(&self) -> Option<&'static str> {
        self.name.starts_with("aio ").then_some(
            "io_submit takes requests for files of all kinds together, so that it is not timed as a system call",
        )
    }
}

// A system call's entry function: called through a table or a switch, so never inlined.

#[cfg(target_arch = "x86_64")]
macro_rules! syscall {
    ($name:literal) => {
        concat!("__x64_sys_", $name)
    };
}

#[cfg(target_arch = "aarch64")]
macro_rules! syscall {
    ($name:literal) => {
        concat!("__arm64_sys_", $name)
    };
}

#[cfg(target_arch = "riscv64")]
macro_rules! syscall {
    ($name:literal) => {
        concat!("__riscv_sys_", $name)
    };
}

const fn send(
    name: &'static str,
    functions: &'static [&'static str],
    call: fn(&SocketPair) -> io::Result<usize>,
) -> SocketCall {
    SocketCall { name, event: KernelEvent::Send, functions, call }
}

const fn receive(
    name: &'static str,
    functions: &'static [&'static str],
    call: fn(&SocketPair) -> io::Result<usize>,
) -> SocketCall {
    SocketCall { name, event: KernelEvent::Receive, functions, call }
}

/// The known ways, in the order in which they are tried: those through shared functions first.
pub const WAYS: [SocketCall; 23] = [
    send("io_uring send", &["sock_sendmsg", "io_send"], SocketPair::uring_send),
    send(
        "io_uring sendmsg",
        &["sock_sendmsg", "__sys_sendmsg_sock", "io_sendmsg"],
        SocketPair::uring_sendmsg,
    ),
    send("io_uring write", &["sock_write_iter"], SocketPair::uring_write),
    send("io_uring writev", &["sock_write_iter"], SocketPair::uring_writev),
    send("write", &["sock_write_iter"], SocketPair::write),
    send("writev", &["sock_write_iter"], SocketPair::writev),
    send("aio write", &["sock_write_iter"], SocketPair::aio_write),
    send("sendto", &["__sys_sendto", syscall!("sendto")], SocketPair::sendto),
    send(
        "sendmsg",
        &["__sys_sendmsg", "___sys_sendmsg", "____sys_sendmsg", syscall!("sendmsg")],
        SocketPair::sendmsg,
    ),
    send(
        "sendmmsg",
        &["__sys_sendmmsg", "___sys_sendmsg", "____sys_sendmsg", syscall!("sendmmsg")],
        SocketPair::sendmmsg,
    ),
    send("sendfile", &["splice_to_socket", "sock_sendpage", "sock_sendmsg"], SocketPair::sendfile),
    send("splice to a socket", &["splice_to_socket", "sock_sendpage", "sock_sendmsg"], SocketPair::splice_to),
    receive("io_uring recv", &["sock_recvmsg", "io_recv"], SocketPair::uring_recv),
    receive(
        "io_uring recvmsg",
        &["sock_recvmsg", "__sys_recvmsg_sock", "io_recvmsg"],
        SocketPair::uring_recvmsg,
    ),
    receive("io_uring read", &["sock_recvmsg", "sock_read_iter"], SocketPair::uring_read),
    receive("io_uring readv", &["sock_recvmsg", "sock_read_iter"], SocketPair::uring_readv),
    receive("read", &["sock_recvmsg", "sock_read_iter"], SocketPair::read),
    receive("readv", &["sock_recvmsg", "sock_read_iter"], SocketPair::readv),
    receive("aio read", &["sock_recvmsg", "sock_read_iter"], SocketPair::aio_read),
    receive("recvfrom", &["sock_recvmsg", "__sys_recvfrom", syscall!("recvfrom")], SocketPair::recvfrom),
    receive(
        "recvmsg",
        &["sock_recvmsg", "__sys_recvmsg", "___sys_recvmsg", "____sys_recvmsg", syscall!("recvmsg")],
        SocketPair::recvmsg,
    ),
    receive(
        "recvmmsg",
        &["sock_recvmsg", "__sys_recvmmsg", "do_recvmmsg", syscall!("recvmmsg")],
        SocketPair::recvmmsg,
    ),
    receive("splice from a socket", &["sock_splice_read"], SocketPair::splice),
];

impl SocketPair {
    /// Sends or receives once, as `way` says, and nothing else of the same event.
    pub fn call(&self, way: &SocketCall) -> io::Result<()> {
        if way.event == KernelEvent::Receive {
            self.write()?;
        }
        let moved = (way.call)(self)?;
        if way.event == KernelEvent::Send {
            self.read()?;
        }
        if moved == BYTES.len() { Ok(()) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
    }
}
