//! AF_XDP: a ring that the kernel puts packets of one receive queue into, for another process that has no privilege. This process makes
//! it and lends its descriptors ([`Ring`]); the other one maps and reads it ([`Reader`]).
//!
//! Always copied into (`XDP_COPY`). Without a copy, the memory that the other process has mapped would be what the driver receives all of
//! the queue's packets into, everybody's; and who gives no room back would stop the queue.

#![allow(unsafe_code)]

mod reader;

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::libc;
use nix::sys::memfd::{MFdFlags, memfd_create};

pub use reader::Reader;

use crate::memory::Mapping;

/// Packets that a ring has room for.
pub const FRAMES: u32 = 512;
/// The least that the kernel takes; a packet has 256 less.
const FRAME_BYTES: usize = 2048;
const BYTES: usize = FRAMES as usize * FRAME_BYTES;

/// A ring that this process has made. The queue is free again when nobody has its descriptors any more.
pub struct Ring {
    socket: OwnedFd,
    memory: OwnedFd,
}

/// Whether this kernel has AF_XDP.
pub fn is_known() -> bool {
    !matches!(socket(), Err(error) if error.raw_os_error() == Some(libc::EAFNOSUPPORT))
}

impl Ring {
    /// Of an interface of the calling thread's network namespace. Nothing comes in before a program sends it there.
    ///
    /// # Errors
    /// In words: another ring has the queue, or there can be none.
    pub fn new(ifindex: u32, queue: u32) -> Result<Self, String> {
        let failed = |what: &'static str| move |error: io::Error| format!("{what}: {}", words(&error));
        let socket = socket().map_err(failed("AF_XDP"))?;
        let memory = memory().map_err(failed("memory of a ring"))?;
        register(&socket, &memory).map_err(failed("memory of a ring"))?;
        for ring in [libc::XDP_UMEM_FILL_RING, libc::XDP_UMEM_COMPLETION_RING, libc::XDP_RX_RING] {
            set(&socket, ring, &FRAMES).map_err(failed("a ring"))?;
        }
        bind(&socket, ifindex, queue).map_err(|error| match error.raw_os_error() {
            Some(libc::EBUSY) => {
                format!("queue {queue} of the interface has a ring already, and has room for one")
            }
            _ => format!("queue {queue} of the interface: {}", words(&error)),
        })?;
        // Bound, as it is for whoever gets its descriptors.
        Reader::fill(&socket).map_err(|error| match error.raw_os_error() {
            Some(libc::EBUSY) => {
                "another process can map a ring on Linux 6.4 and newer, not on this kernel".to_owned()
            }
            _ => format!("a ring: {}", words(&error)),
        })?;
        Ok(Self { socket, memory })
    }

    /// What [`Reader::new`] takes. Who has them can write to the queues of the ring, and to nothing else; not send; and not read what
    /// is not this ring's.
    pub fn descriptors(&self) -> io::Result<[OwnedFd; 2]> {
        Ok([self.socket.try_clone()?, self.memory.try_clone()?])
    }

    /// Packets that came and had no room.
    pub fn dropped(&self) -> io::Result<u64> {
        let statistics: libc::xdp_statistics = get(&self.socket, libc::XDP_STATISTICS)?;
        Ok(statistics.rx_dropped + statistics.rx_ring_full)
    }
}

impl AsFd for Ring {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

fn words(error: &io::Error) -> String {
    match error.raw_os_error() {
        Some(libc::EAFNOSUPPORT) => "this kernel has no AF_XDP (CONFIG_XDP_SOCKETS)".to_owned(),
        Some(libc::EPERM) => "it needs CAP_NET_RAW".to_owned(),
        Some(libc::ENOBUFS) => "no more memory may be locked (RLIMIT_MEMLOCK, or CAP_IPC_LOCK)".to_owned(),
        Some(libc::EINVAL | libc::ENODEV) => "there is no such queue (any more)".to_owned(),
        Some(libc::EOPNOTSUPP) => "it has no AF_XDP".to_owned(),
        _ => error.to_string(),
    }
}

fn socket() -> io::Result<OwnedFd> {
    let kind = libc::SOCK_RAW | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: no pointers are passed; what it makes is nobody else's.
    match unsafe { libc::socket(libc::AF_XDP, kind, 0) } {
        -1 => Err(io::Error::last_os_error()),
        // SAFETY: as above.
        made => Ok(unsafe { OwnedFd::from_raw_fd(made) }),
    }
}

fn memory() -> io::Result<OwnedFd> {
    let memory = memfd_create(c"ring", MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING)?;
    File::from(memory.try_clone()?).set_len(BYTES as u64)?;
    Ok(memory)
}

/// The kernel keeps the memory for itself. Nobody maps it for writing from then on, or makes it longer or shorter.
fn register(socket: &OwnedFd, memory: &OwnedFd) -> io::Result<()> {
    let mapping = Mapping::new(memory.as_fd(), BYTES, 0, true)?;
    // SAFETY: plain numbers, of which some are not there in older kernels, and zero is a value of all.
    let mut region: libc::xdp_umem_reg = unsafe { std::mem::zeroed() };
    region.addr = mapping.start().as_ptr() as u64;
    region.len = BYTES as u64;
    region.chunk_size = FRAME_BYTES as u32;
    set(socket, libc::XDP_UMEM_REG, &region)?;
    let length = SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW;
    let seals = SealFlag::F_SEAL_FUTURE_WRITE | length | SealFlag::F_SEAL_SEAL;
    fcntl(memory, FcntlArg::F_ADD_SEALS(seals))?;
    Ok(())
}

fn bind(socket: &OwnedFd, ifindex: u32, queue: u32) -> io::Result<()> {
    let address = libc::sockaddr_xdp {
        sxdp_family: libc::AF_XDP as libc::__u16,
        sxdp_flags: libc::XDP_COPY,
        sxdp_ifindex: ifindex,
        sxdp_queue_id: queue,
        sxdp_shared_umem_fd: 0,
    };
    let bytes = size_of_val(&address) as libc::socklen_t;
    // SAFETY: the descriptor is open; the address has as many bytes and outlives the call.
    match unsafe { libc::bind(socket.as_raw_fd(), std::ptr::from_ref(&address).cast(), bytes) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

fn set<T>(socket: &OwnedFd, name: libc::c_int, value: &T) -> io::Result<()> {
    let (value, bytes) = (std::ptr::from_ref(value), size_of::<T>() as libc::socklen_t);
    // SAFETY: the descriptor is open; `value` has as many bytes as is said. The memory that a region names is mapped during the call.
    match unsafe { libc::setsockopt(socket.as_raw_fd(), libc::SOL_XDP, name, value.cast(), bytes) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Of structures of numbers.
fn get<T: Copy>(socket: &OwnedFd, name: libc::c_int) -> io::Result<T> {
    let mut value = std::mem::MaybeUninit::<T>::zeroed();
    let mut bytes = size_of::<T>() as libc::socklen_t;
    // SAFETY: the descriptor is open; `value` has as many bytes as is said.
    let got = unsafe {
        libc::getsockopt(socket.as_raw_fd(), libc::SOL_XDP, name, value.as_mut_ptr().cast(), &raw mut bytes)
    };
    match got {
        // SAFETY: all its bytes are zero or the kernel's, and it is made of numbers.
        0 => Ok(unsafe { value.assume_init() }),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn why_there_is_no_ring_is_said() {
        let table = [
            (libc::EAFNOSUPPORT, "CONFIG_XDP_SOCKETS"),
            (libc::EPERM, "CAP_NET_RAW"),
            (libc::ENOBUFS, "RLIMIT_MEMLOCK"),
            (libc::EINVAL, "no such queue"),
            (libc::EOPNOTSUPP, "no AF_XDP"),
        ];
        for (number, want) in table {
            let said = words(&io::Error::from_raw_os_error(number));
            assert!(said.contains(want), "{said}");
        }
    }

    /// Who has the memory reads it, and cannot change what the kernel and others see.
    #[test]
    fn who_has_the_memory_only_reads_it() {
        let memory = memory().expect("memory");
        let mapping = Mapping::new(memory.as_fd(), BYTES, 0, true).expect("a mapping");
        let socket = match socket() {
            Ok(socket) => socket,
            Err(error) => return println!("SKIP who_has_the_memory_only_reads_it: {}", words(&error)),
        };
        drop(mapping);
        register(&socket, &memory).expect("registered");
        assert!(Mapping::new(memory.as_fd(), BYTES, 0, true).is_err(), "writable");
        assert!(Mapping::new(memory.as_fd(), BYTES, 0, false).is_ok(), "readable");
        let file = File::from(memory);
        assert!(file.set_len(0).is_err(), "shorter");
        assert!(file.set_len(2 * BYTES as u64).is_err(), "longer");
        assert!(std::io::Write::write(&mut &file, &[7]).is_err(), "written");
        // SAFETY: no pointers are passed.
        let punched = unsafe {
            let how = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
            libc::fallocate(file.as_raw_fd(), how, 0, BYTES as libc::off_t)
        };
        assert_eq!(punched, -1, "taken out");
    }
}
