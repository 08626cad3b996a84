//! Contexts in which the kernel runs its network stack, for scenarios that must cover each of them.

#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use libbpf_rs::{Link, MapCore, MapFlags};
use millrace_kernel::Error;
use millrace_kernel::object::{LoadedObject, embedded};
use nix::libc;

/// Makes a TUN device in the calling thread's network namespace. The kernel receives the IP packets that are written to
/// the file. The device is removed when the file is closed.
pub fn tun(name: &str) -> io::Result<File> {
    const TUNSETIFF: libc::Ioctl = 0x4004_54ca;
    const IFF_TUN: libc::c_short = 0x0001;
    const IFF_NO_PI: libc::c_short = 0x1000;
    let file = File::options().read(true).write(true).open("/dev/net/tun")?;
    // SAFETY: an integer and an array of them, for which zeros are valid.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes().take(libc::IFNAMSIZ - 1)) {
        *to = from.cast_signed();
    }
    request.ifr_ifru.ifru_flags = IFF_TUN | IFF_NO_PI;
    // SAFETY: the kernel reads and writes the request alone.
    checked(unsafe { libc::ioctl(file.as_raw_fd(), TUNSETIFF, &raw mut request) })?;
    Ok(file)
}

/// Makes `epoll_wait` poll the sockets' NIC for this time before it sleeps. Linux 6.9 and newer.
pub fn busy_poll(epoll: BorrowedFd<'_>, microseconds: u32) -> io::Result<()> {
    /// `struct epoll_params` of `linux/eventpoll.h`.
    #[repr(C)]
    struct EpollParameters {
        busy_poll_usecs: u32,
        busy_poll_budget: u16,
        prefer_busy_poll: u8,
        pad: u8,
    }
    const EPIOCSPARAMS: libc::Ioctl = 0x4008_8a01;
    let parameters =
        EpollParameters { busy_poll_usecs: microseconds, busy_poll_budget: 16, prefer_busy_poll: 0, pad: 0 };
    // SAFETY: the kernel reads the parameters.
    checked(unsafe { libc::ioctl(epoll.as_raw_fd(), EPIOCSPARAMS, &raw const parameters) }).map(drop)
}

/// Makes an io_uring whose own thread polls for requests until the ring is closed.
pub fn polling_ring() -> io::Result<OwnedFd> {
    const ENTRIES: libc::c_uint = 8;
    const IORING_SETUP_SQPOLL: u32 = 1 << 1;
    /// Time until the thread sleeps, ms.
    const AN_HOUR: u32 = 3_600_000;
    // `struct io_uring_params` of `linux/io_uring.h`, 120 bytes: flags are its third word, the idle time its fifth.
    let mut parameters = [0u32; 30];
    (parameters[2], parameters[4]) = (IORING_SETUP_SQPOLL, AN_HOUR);
    // SAFETY: the kernel reads and writes the parameters alone.
    let ring = unsafe { libc::syscall(libc::SYS_io_uring_setup, ENTRIES, parameters.as_mut_ptr()) };
    let ring = checked(i32::try_from(ring).unwrap_or(-1))?;
    // SAFETY: the call has made the descriptor, and nobody else has it.
    Ok(unsafe { OwnedFd::from_raw_fd(ring) })
}

/// Wakes the thread of a [`polling_ring`].
pub fn wake(ring: BorrowedFd<'_>) -> io::Result<()> {
    const IORING_ENTER_SQ_WAKEUP: libc::c_uint = 1 << 1;
    let nothing = std::ptr::null::<libc::c_void>();
    // SAFETY: no pointers but one to nothing.
    let done = unsafe {
        libc::syscall(libc::SYS_io_uring_enter, ring.as_raw_fd(), 0, 0, IORING_ENTER_SQ_WAKEUP, nothing, 0)
    };
    checked(i32::try_from(done).unwrap_or(-1)).map(drop)
}

fn checked(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// An XDP program that passes packets to a thread of another CPU. It is attached until it is dropped.
pub struct Cpumap {
    _link: Link,
    _object: LoadedObject,
}

impl Cpumap {
    /// Attaches to an interface, by its index in the calling thread's network namespace.
    pub fn attach(interface: i32) -> Result<Self, Error> {
        /// Packets that may wait for the thread.
        const QUEUE: u32 = 512;
        let mut object = embedded!("cpumap.bpf.o").open()?.load()?;
        // The second word is a program for the thread: none.
        let value = [QUEUE.to_ne_bytes(), [0; 4]].concat();
        let threads = object.map("threads")?;
        let wrote = threads.update(&0u32.to_ne_bytes(), &value, MapFlags::ANY);
        wrote.map_err(|source| Error::Write { what: "threads", source })?;
        let link = object.program("cpumap_redirect")?.attach_xdp(interface);
        let link = link
            .map_err(|source| Error::Run { program: "cpumap_redirect", source: io::Error::other(source) })?;
        Ok(Self { _link: link, _object: object })
    }
}

/// Makes the file of a set of descriptors, for [`busy_poll`].
pub fn epoll() -> io::Result<OwnedFd> {
    // SAFETY: no pointers.
    let epoll = checked(unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) })?;
    // SAFETY: the call has made the descriptor, and nobody else has it.
    Ok(unsafe { OwnedFd::from_raw_fd(epoll) })
}

/// Adds a descriptor that is polled for input.
pub fn epoll_add(epoll: BorrowedFd<'_>, of: impl AsFd) -> io::Result<()> {
    let mut event = libc::epoll_event { events: libc::EPOLLIN.cast_unsigned(), u64: 0 };
    let of = of.as_fd().as_raw_fd();
    // SAFETY: the kernel reads the event.
    checked(unsafe { libc::epoll_ctl(epoll.as_raw_fd(), libc::EPOLL_CTL_ADD, of, &raw mut event) }).map(drop)
}

/// Waits until there is something to read, or for this time.
pub fn epoll_wait(epoll: BorrowedFd<'_>, milliseconds: i32) -> io::Result<bool> {
    let mut event = libc::epoll_event { events: 0, u64: 0 };
    // SAFETY: the kernel writes one event.
    checked(unsafe { libc::epoll_wait(epoll.as_raw_fd(), &raw mut event, 1, milliseconds) })
        .map(|ready| ready > 0)
}
