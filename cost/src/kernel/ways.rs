//! The ways into the socket layer, and the functions where each may be timed.
//!
//! `writev` and `readv` stand for `pwritev2` and `preadv2`, io_uring's for its requests with registered buffers.
//! io_uring's `splice` goes through the functions of the others, in threads of its own.

use std::io;

use super::config::Event;
use super::sockets::{BYTES, Sockets};

/// A way to send or to receive.
#[derive(Clone, Copy)]
pub struct Way {
    pub name: &'static str,
    pub event: Event,
    /// Where it may be timed, best first. What several ways share comes first, since it also serves the kernel's
    /// own sockets. Which of them the way really comes through is found out by trying.
    pub(super) functions: &'static [&'static str],
    /// Goes this way once; gives the number of bytes that were moved.
    call: fn(&Sockets) -> io::Result<usize>,
}

impl Way {
    /// Why it cannot be timed at system calls, if so.
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
    call: fn(&Sockets) -> io::Result<usize>,
) -> Way {
    Way { name, event: Event::Send, functions, call }
}

const fn receive(
    name: &'static str,
    functions: &'static [&'static str],
    call: fn(&Sockets) -> io::Result<usize>,
) -> Way {
    Way { name, event: Event::Receive, functions, call }
}

/// In the order in which they are tried: those that come through shared functions first.
pub const WAYS: [Way; 23] = [
    send("io_uring send", &["sock_sendmsg", "io_send"], Sockets::uring_send),
    send("io_uring sendmsg", &["sock_sendmsg", "__sys_sendmsg_sock", "io_sendmsg"], Sockets::uring_sendmsg),
    send("io_uring write", &["sock_write_iter"], Sockets::uring_write),
    send("io_uring writev", &["sock_write_iter"], Sockets::uring_writev),
    send("write", &["sock_write_iter"], Sockets::write),
    send("writev", &["sock_write_iter"], Sockets::writev),
    send("aio write", &["sock_write_iter"], Sockets::aio_write),
    send("sendto", &["__sys_sendto", syscall!("sendto")], Sockets::sendto),
    send(
        "sendmsg",
        &["__sys_sendmsg", "___sys_sendmsg", "____sys_sendmsg", syscall!("sendmsg")],
        Sockets::sendmsg,
    ),
    send(
        "sendmmsg",
        &["__sys_sendmmsg", "___sys_sendmsg", "____sys_sendmsg", syscall!("sendmmsg")],
        Sockets::sendmmsg,
    ),
    send("sendfile", &["splice_to_socket", "sock_sendpage", "sock_sendmsg"], Sockets::sendfile),
    send("splice to a socket", &["splice_to_socket", "sock_sendpage", "sock_sendmsg"], Sockets::splice_to),
    receive("io_uring recv", &["sock_recvmsg", "io_recv"], Sockets::uring_recv),
    receive(
        "io_uring recvmsg",
        &["sock_recvmsg", "__sys_recvmsg_sock", "io_recvmsg"],
        Sockets::uring_recvmsg,
    ),
    receive("io_uring read", &["sock_recvmsg", "sock_read_iter"], Sockets::uring_read),
    receive("io_uring readv", &["sock_recvmsg", "sock_read_iter"], Sockets::uring_readv),
    receive("read", &["sock_recvmsg", "sock_read_iter"], Sockets::read),
    receive("readv", &["sock_recvmsg", "sock_read_iter"], Sockets::readv),
    receive("aio read", &["sock_recvmsg", "sock_read_iter"], Sockets::aio_read),
    receive("recvfrom", &["sock_recvmsg", "__sys_recvfrom", syscall!("recvfrom")], Sockets::recvfrom),
    receive(
        "recvmsg",
        &["sock_recvmsg", "__sys_recvmsg", "___sys_recvmsg", "____sys_recvmsg", syscall!("recvmsg")],
        Sockets::recvmsg,
    ),
    receive(
        "recvmmsg",
        &["sock_recvmsg", "__sys_recvmmsg", "do_recvmmsg", syscall!("recvmmsg")],
        Sockets::recvmmsg,
    ),
    receive("splice from a socket", &["sock_splice_read"], Sockets::splice),
];

impl Sockets {
    /// Sends or receives once, as `way` says, and nothing else of the same event.
    pub fn call(&self, way: &Way) -> io::Result<()> {
        if way.event == Event::Receive {
            self.write()?;
        }
        let moved = (way.call)(self)?;
        if way.event == Event::Send {
            self.read()?;
        }
        if moved == BYTES.len() { Ok(()) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
    }
}
