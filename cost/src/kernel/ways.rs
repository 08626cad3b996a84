//! Lists the ways to send or receive on a socket (system calls and requests), and the kernel functions where each may
//! be timed.
//!
//! `pwritev2` and `preadv2` use the functions of `writev` and `readv`, and so do io_uring's requests with registered
//! buffers. io_uring's `splice` uses the functions of the other system calls and requests, in io_uring's own threads.

use std::io;

use super::config::KernelEvent;
use super::sockets::{BYTES, SocketPair};

/// A system call or a request (AIO, io_uring) that sends or receives on a socket.
#[derive(Clone, Copy)]
pub struct SocketCall {
    /// Name of the system call, or of the request of AIO or io_uring.
    pub name: &'static str,
    /// The kind of kernel work, such as `Send`, to which the time of the system call or request is added.
    pub event: KernelEvent,
    /// Kernel functions where the system call or request may be timed, best first. Functions that several system calls
    /// share come first, since calls on the kernel's own sockets use them too. A trial call shows which function this
    /// kernel really uses.
    pub(super) functions: &'static [&'static str],
    /// Makes a trial call of this system call or request, and returns the number of bytes sent or received.
    call: fn(&SocketPair) -> io::Result<usize>,
}

impl SocketCall {
    /// Returns the reason why this call cannot be timed by programs on system calls, or `None` if it can.
    pub(super) fn beyond_system_calls(&self) -> Option<&'static str> {
        self.name.starts_with("aio ").then_some(
            "io_submit takes requests for all kinds of files together, so its time is not that of a socket call",
        )
    }
}

// Name of a system call's entry function. The kernel calls it through a table or a switch, so it is never inlined.

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

/// The known system calls and requests that send or receive, in the order of their trial calls.
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
    /// Makes one call of `way` (a system call or request). No other call of the same direction (send or receive) is
    /// made, so exactly one such call must be counted.
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
