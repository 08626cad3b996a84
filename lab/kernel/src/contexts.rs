//! Makes the kernel run its network stack in rarely used contexts (TUN devices, busy polling, io_uring threads, CPU
//! maps), for scenarios that measure each of them.

#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use libbpf_rs::{Link, MapCore, MapFlags};
use millrace_kernel::Error;
use millrace_kernel::object::{LoadedObject, embedded};
use nix::libc;

/// Creates a TUN device in the calling thread's network namespace. Each IP packet written to the file is received by
/// the kernel. Closing the file removes the device.
pub fn tun(name: &str) -> io::Result<File> {
    const TUNSETIFF: libc::Ioctl = 0x4004_54ca;
    const IFF_TUN: libc::c_short = 0x0001;
    const IFF_NO_PI: libc::c_short = 0x1000;
    let file = File::options().read(true).write(true).open("/dev/net/tun")?;
    // SAFETY: `ifreq` consists of integers and arrays of integers, for which zeros are valid.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes().take(libc::IFNAMSIZ - 1)) {
        *to = from.cast_signed();
    }
    request.ifr_ifru.ifru_flags = IFF_TUN | IFF_NO_PI;
    // SAFETY: the kernel reads and writes only `request`, which outlives the call.
    checked(unsafe { libc::ioctl(file.as_raw_fd(), TUNSETIFF, &raw mut request) })?;
    Ok(file)
}

/// Makes `epoll_wait` busy-poll the sockets' network card for `microseconds` before it sleeps. Needs Linux 6.9.
pub fn busy_poll(epoll: BorrowedFd<'_>, microseconds: u32) -> io::Result<()> {
    /// Parameters of EPIOCSPARAMS: `struct epoll_params` in `linux/eventpoll.h`.
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
    // SAFETY: the kernel only reads the parameters, which outlive the call.
    checked(unsafe { libc::ioctl(epoll.as_raw_fd(), EPIOCSPARAMS, &raw const parameters) }).map(drop)
}

/// Creates an io_uring whose kernel thread polls for requests (SQPOLL) until the ring is closed.
pub fn polling_ring() -> io::Result<OwnedFd> {
    const ENTRIES: libc::c_uint = 8;
    const IORING_SETUP_SQPOLL: u32 = 1 << 1;
    /// Time without requests after which the polling thread sleeps, ms.
    const AN_HOUR: u32 = 3_600_000;
    // `struct io_uring_params` in `linux/io_uring.h` has 120 bytes. Its 32-bit words number 2 and 4 are `flags` and
    // `sq_thread_idle`.
    let mut parameters = [0u32; 30];
    (parameters[2], parameters[4]) = (IORING_SETUP_SQPOLL, AN_HOUR);
    // SAFETY: the kernel reads and writes only `parameters`, which outlives the call.
    let ring = unsafe { libc::syscall(libc::SYS_io_uring_setup, ENTRIES, parameters.as_mut_ptr()) };
    let ring = checked(i32::try_from(ring).unwrap_or(-1))?;
    // SAFETY: io_uring_setup has just returned this descriptor, and nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(ring) })
}

/// Wakes the kernel thread of a [`polling_ring`].
pub fn wake(ring: BorrowedFd<'_>) -> io::Result<()> {
    const IORING_ENTER_SQ_WAKEUP: libc::c_uint = 1 << 1;
    let nothing = std::ptr::null::<libc::c_void>();
    // SAFETY: the only pointer is null, which the kernel accepts for the signal mask.
    let done = unsafe {
        libc::syscall(libc::SYS_io_uring_enter, ring.as_raw_fd(), 0, 0, IORING_ENTER_SQ_WAKEUP, nothing, 0)
    };
    checked(i32::try_from(done).unwrap_or(-1)).map(drop)
}

fn checked(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// An XDP program that passes packets to a kernel thread on another CPU. Dropping the handle detaches it.
pub struct Cpumap {
    _link: Link,
    _object: LoadedObject,
}

impl Cpumap {
    /// Attaches the program to the interface with this index in the calling thread's network namespace.
    pub fn attach(interface: i32) -> Result<Self, Error> {
        /// Number of packets that may wait in the CPU map for the thread.
        const QUEUE: u32 = 512;
        let mut object = embedded!("cpumap.bpf.o").open()?.load()?;
        // The second 32-bit word of the map's value would be a program that the thread runs; 0 stands for none.
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

/// Creates an epoll instance, for [`busy_poll`].
pub fn epoll() -> io::Result<OwnedFd> {
    // SAFETY: the call takes no pointers.
    let epoll = checked(unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) })?;
    // SAFETY: epoll_create1 has just returned this descriptor, and nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(epoll) })
}

/// Makes an epoll instance wait for input on the descriptor `of`.
pub fn epoll_add(epoll: BorrowedFd<'_>, of: impl AsFd) -> io::Result<()> {
    let mut event = libc::epoll_event { events: libc::EPOLLIN.cast_unsigned(), u64: 0 };
    let of = of.as_fd().as_raw_fd();
    // SAFETY: the kernel only reads the event, which outlives the call.
    checked(unsafe { libc::epoll_ctl(epoll.as_raw_fd(), libc::EPOLL_CTL_ADD, of, &raw mut event) }).map(drop)
}

/// Waits for input for at most `milliseconds`. Returns whether a descriptor is readable.
pub fn epoll_wait(epoll: BorrowedFd<'_>, milliseconds: i32) -> io::Result<bool> {
    let mut event = libc::epoll_event { events: 0, u64: 0 };
    // SAFETY: the kernel writes at most one event, and there is room for one.
    checked(unsafe { libc::epoll_wait(epoll.as_raw_fd(), &raw mut event, 1, milliseconds) })
        .map(|ready| ready > 0)
}
