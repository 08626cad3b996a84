//! The end of a ring that reads it. What the kernel says is not trusted further than the memory goes, since whoever has the descriptors
//! can write to its queues.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering};

use nix::libc;

use super::{FRAMES, get};
use crate::memory::Mapping;

/// Of what the ring is at most.
const FRAMES_MAX: u32 = 1 << 16;

/// Reads packets, and gives their room back.
pub struct Reader {
    socket: OwnedFd,
    memory: Mapping,
    bytes: usize,
    frame_bytes: usize,
    /// That have come.
    came: Queue,
    /// That the next ones may come into.
    free: Queue,
    /// Places in both: nobody else's counters are believed twice.
    taken: u32,
    given: u32,
}

impl Reader {
    /// Of the descriptors of a [`Ring`](super::Ring) that has room for so many packets.
    ///
    /// # Errors
    /// They are something else.
    pub fn new([socket, memory]: [OwnedFd; 2], frames: u32) -> io::Result<Self> {
        let odd = || io::Error::new(io::ErrorKind::InvalidData, "not the descriptors of a ring");
        let memory = File::from(memory);
        let bytes = usize::try_from(memory.metadata()?.len()).map_err(|_| odd())?;
        let frame_bytes = bytes.checked_div(frames as usize).unwrap_or_default();
        let is_sane = frames.is_power_of_two() && frames <= FRAMES_MAX && frame_bytes.is_power_of_two();
        if !is_sane || bytes != frame_bytes * frames as usize {
            return Err(odd());
        }
        let offsets = Offsets::of(&socket)?;
        let came = Queue::new(&socket, &offsets.0.rx, (libc::XDP_PGOFF_RX_RING as usize, 16), frames)?;
        let free = Queue::free(&socket, &offsets, frames)?;
        let (taken, given) =
            (came.consumer().load(Ordering::Relaxed), free.producer().load(Ordering::Relaxed));
        let memory = Mapping::new(memory.as_fd(), bytes, 0, false)?;
        Ok(Self { socket, memory, bytes, frame_bytes, came, free, taken, given })
    }

    /// Has the kernel begin with all the room that there is.
    pub(super) fn fill(socket: &OwnedFd) -> io::Result<()> {
        let free = Queue::free(socket, &Offsets::of(socket)?, FRAMES)?;
        for frame in 0..FRAMES {
            free.put(frame, u64::from(frame) * super::FRAME_BYTES as u64);
        }
        free.producer().store(FRAMES, Ordering::Release);
        Ok(())
    }

    /// The next packet, as far as the buffer goes.
    pub fn next(&mut self, buffer: &mut [u8]) -> Option<usize> {
        loop {
            let waiting = self.came.producer().load(Ordering::Acquire).wrapping_sub(self.taken);
            if waiting == 0 || waiting > self.came.mask + 1 {
                return None;
            }
            let (at, bytes) = self.came.packet(self.taken);
            let got = self.copy(at, bytes, buffer);
            self.taken = self.taken.wrapping_add(1);
            self.came.consumer().store(self.taken, Ordering::Release);
            // What is not in the memory is no packet.
            let Some(got) = got else { continue };
            self.free.put(self.given, at & !(self.frame_bytes as u64 - 1));
            self.given = self.given.wrapping_add(1);
            self.free.producer().store(self.given, Ordering::Release);
            return Some(got);
        }
    }

    fn copy(&self, at: u64, bytes: u32, buffer: &mut [u8]) -> Option<usize> {
        let (at, bytes) = (usize::try_from(at).ok()?, bytes as usize);
        at.checked_add(bytes).filter(|end| *end <= self.bytes)?;
        let got = bytes.min(buffer.len());
        // SAFETY: inside the mapping, as was just looked at, and inside the buffer; they are not the same memory. The kernel writes here
        // again only when the room was given back; if somebody else makes it do so, bytes are odd, and any are bytes.
        unsafe {
            std::ptr::copy_nonoverlapping(self.memory.start().as_ptr().add(at), buffer.as_mut_ptr(), got);
        }
        Some(got)
    }
}

impl AsFd for Reader {
    /// Readable when there is a packet.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl std::fmt::Debug for Reader {
    fn fmt(&self, to: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        to.debug_struct("Reader").field("socket", &self.socket).finish_non_exhaustive()
    }
}

/// Where the kernel has put what in the memory of its queues.
struct Offsets(libc::xdp_mmap_offsets);

impl Offsets {
    fn of(socket: &OwnedFd) -> io::Result<Self> {
        Ok(Self(get(socket, libc::XDP_MMAP_OFFSETS)?))
    }
}

/// Of numbers: one end writes them and counts what it has written, the other one reads them and counts what it has read.
struct Queue {
    mapping: Mapping,
    producer: usize,
    consumer: usize,
    entries: usize,
    entry_bytes: usize,
    mask: u32,
}

impl Queue {
    fn free(socket: &OwnedFd, offsets: &Offsets, frames: u32) -> io::Result<Self> {
        Self::new(socket, &offsets.0.fr, (libc::XDP_UMEM_PGOFF_FILL_RING as usize, 8), frames)
    }

    /// `length`: a power of two.
    fn new(
        socket: &OwnedFd,
        at: &libc::xdp_ring_offset,
        (offset, entry_bytes): (usize, usize),
        length: u32,
    ) -> io::Result<Self> {
        let place = |at: u64| usize::try_from(at).unwrap_or(usize::MAX);
        let (producer, consumer, entries) = (place(at.producer), place(at.consumer), place(at.desc));
        let is_odd = producer >= entries || consumer >= entries || entries > 1 << 16;
        if is_odd || [producer, consumer, entries].iter().any(|at| at % 8 != 0) {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let mapping = Mapping::new(socket.as_fd(), entries + entry_bytes * length as usize, offset, true)?;
        Ok(Self { mapping, producer, consumer, entries, entry_bytes, mask: length - 1 })
    }

    fn producer(&self) -> &AtomicU32 {
        // SAFETY: inside the mapping and aligned, as `new` has looked at; only used atomically.
        unsafe { self.mapping.start().add(self.producer).cast().as_ref() }
    }

    fn consumer(&self) -> &AtomicU32 {
        // SAFETY: as above.
        unsafe { self.mapping.start().add(self.consumer).cast().as_ref() }
    }

    fn entry(&self, at: u32) -> *mut u8 {
        let at = self.entries + (at & self.mask) as usize * self.entry_bytes;
        // SAFETY: inside the mapping, which has `mask + 1` entries.
        unsafe { self.mapping.start().as_ptr().add(at) }
    }

    /// For the kernel to read when it is counted.
    fn put(&self, at: u32, value: u64) {
        // SAFETY: an aligned entry of 8 bytes, which is this end's to write.
        unsafe { self.entry(at).cast::<u64>().write_volatile(value) }
    }

    /// Where it begins, and how many bytes it has: `struct xdp_desc`.
    fn packet(&self, at: u32) -> (u64, u32) {
        // SAFETY: an aligned entry of 16 bytes, which is this end's to read.
        unsafe {
            (
                self.entry(at).cast::<u64>().read_volatile(),
                self.entry(at).add(8).cast::<u32>().read_volatile(),
            )
        }
    }
}

#[cfg(test)]
mod tests {
    use nix::sched::{CloneFlags, unshare};

    use super::super::{Ring, set};
    use super::*;

    /// In a network namespace of its own: what a ring is of is nobody else's.
    fn with_ring(test: &str, work: impl FnOnce(&Ring, Reader) + Send) {
        if !nix::unistd::geteuid().is_root() {
            return println!("SKIP {test}: needs root");
        }
        let in_own = || {
            unshare(CloneFlags::CLONE_NEWNET).expect("a namespace");
            let up = std::process::Command::new("ip").args(["link", "set", "lo", "up"]).status();
            assert!(up.expect("ip").success());
            let ring = Ring::new(1, 0).expect("a ring");
            let reader = Reader::new(ring.descriptors().expect("descriptors"), FRAMES).expect("a reader");
            work(&ring, reader);
        };
        std::thread::scope(|scope| scope.spawn(in_own).join().expect("work in a namespace"));
    }

    /// Whoever has the descriptors writes what they like: the reader stays inside its memory, and comes to an end.
    #[test]
    fn odd_entries_are_none() {
        with_ring("odd_entries_are_none", |_, mut reader| {
            let mut buffer = [0; 64];
            let bytes = reader.bytes as u64;
            let table = [(u64::MAX, u32::MAX), (bytes, 1), (bytes - 1, 2), (0, u32::MAX), (u64::MAX - 7, 8)];
            for (at, (address, length)) in (0..).zip(table) {
                // SAFETY: an entry of the queue, and nobody else is there.
                unsafe {
                    reader.came.entry(at).cast::<u64>().write(address);
                    reader.came.entry(at).add(8).cast::<u32>().write(length);
                }
                reader.came.producer().store(at + 1, Ordering::Release);
                assert_eq!(reader.next(&mut buffer), None, "{address} {length}");
            }
            for producer in [u32::MAX, 0, FRAMES * 2] {
                reader.came.producer().store(producer, Ordering::Release);
                assert_eq!(reader.next(&mut buffer), None, "{producer}");
            }
            // SAFETY: as above.
            unsafe {
                reader.came.entry(5).cast::<u64>().write(bytes - 100);
                reader.came.entry(5).add(8).cast::<u32>().write(100);
            }
            reader.came.producer().store(6, Ordering::Release);
            assert_eq!(reader.next(&mut buffer), Some(64), "as much as the buffer has room for");
            assert_eq!(reader.next(&mut buffer), None);
        });
    }

    /// What is lent receives only: with it nobody sends past the programs at TC, or gets another queue.
    #[test]
    fn who_has_it_cannot_send_by_it() {
        with_ring("who_has_it_cannot_send_by_it", |_, reader| {
            for name in [libc::XDP_TX_RING, libc::XDP_RX_RING, libc::XDP_UMEM_FILL_RING] {
                assert!(set(&reader.socket, name, &64_u32).is_err(), "{name}");
            }
            assert!(super::super::bind(&reader.socket, 1, 0).is_err(), "bound again");
            let sent = nix::sys::socket::send(
                std::os::fd::AsRawFd::as_raw_fd(&reader.socket),
                &[],
                nix::sys::socket::MsgFlags::MSG_DONTWAIT,
            );
            assert!(sent.is_err(), "sent");
        });
    }
}
