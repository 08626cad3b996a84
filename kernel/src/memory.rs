//! BPF maps that are mapped into this process's memory: arrays and ring buffers.

#![allow(unsafe_code)]

use std::io;
use std::num::NonZero;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use nix::libc;

/// A shared mapping, which is unmapped when dropped.
pub struct Mapping {
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: memory belongs to no thread. Users of a mapping either guard the data or use atomics.
unsafe impl Send for Mapping {}
// SAFETY: memory belongs to no thread. Users of a mapping either guard the data or use atomics.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `bytes` bytes of a descriptor, from `offset` on.
    pub fn new(fd: BorrowedFd<'_>, bytes: usize, offset: usize, writable: bool) -> io::Result<Self> {
        let protection = libc::PROT_READ | if writable { libc::PROT_WRITE } else { 0 };
        // SAFETY: the kernel picks the address, so the new mapping replaces no memory in use.
        let start = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                bytes,
                protection,
                libc::MAP_SHARED,
                fd.as_raw_fd(),
                offset as libc::off_t,
            )
        };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::AddrNotAvailable)?;
        Ok(Self { start, bytes })
    }

    /// Returns the address of the mapping.
    pub fn start(&self) -> NonNull<u8> {
        self.start
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: only this call unmaps the memory, and references into the mapping borrow from the mapping's owner.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.bytes) };
    }
}

fn page_bytes() -> usize {
    // SAFETY: sysconf takes no pointers, and only returns a constant of the system.
    let bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(bytes).unwrap_or(4096)
}

/// A type that may be the value of a mapped array, which the kernel changes at the same time.
///
/// # Safety
/// Every bit pattern must be a valid value. Everything that the kernel changes must be atomic or in an
/// `UnsafeCell`. The layout must be that of the map's value, without implicit padding, and the size a multiple of 8.
pub unsafe trait Shared {}

// SAFETY: an `AtomicU64` is atomic and has 8 bytes, and every bit pattern is valid.
unsafe impl Shared for AtomicU64 {}

/// An array map that is mapped into memory.
///
/// Userspace and programs use the entries at the same time. Words that userspace and programs both write are atomic.
/// Other parts of an entry have one writer. The writer publishes them by storing a word (Release), which the reader
/// loads first (Acquire).
pub struct MappedArray<T> {
    mapping: Mapping,
    len: NonZero<u32>,
    kind: std::marker::PhantomData<T>,
}

// SAFETY: parts of a `Shared` type that are not atomic have a single writer.
unsafe impl<T: Shared> Send for MappedArray<T> {}
// SAFETY: parts of a `Shared` type that are not atomic have a single writer.
unsafe impl<T: Shared> Sync for MappedArray<T> {}

impl<T: Shared> MappedArray<T> {
    /// Maps an array of `len` entries.
    pub fn new(fd: BorrowedFd<'_>, len: NonZero<u32>) -> io::Result<Self> {
        let page = page_bytes();
        let bytes = (len.get() as usize * size_of::<T>()).next_multiple_of(page);
        Ok(Self { mapping: Mapping::new(fd, bytes, 0, true)?, len, kind: std::marker::PhantomData })
    }

    /// Returns the number of entries.
    #[allow(clippy::len_without_is_empty, reason = "no array of the kernel is empty")]
    pub fn len(&self) -> u32 {
        self.len.get()
    }

    /// Returns the array's entry with this index. Indexes past the end wrap around.
    pub fn get(&self, index: u32) -> &T {
        let index = index % self.len;
        // SAFETY: the entry is inside the mapping, which lives as long as `self`. The mapping starts at a page, so the
        // entry is aligned, and any bytes are a valid `T`.
        unsafe { self.mapping.start.cast::<T>().add(index as usize).as_ref() }
    }
}

// Flag bits in the length field of a ring buffer's record, and the length of the record's header (linux/bpf.h:
// BPF_RINGBUF_BUSY_BIT, _DISCARD_BIT, _HDR_SZ).
const BUSY: u32 = 1 << 31;
const DISCARDED: u32 = 1 << 30;
const HEADER_BYTES: usize = 8;

/// Waits briefly until another CPU has written a record. Returns the record's length, with `BUSY` set if the record is
/// still being written, which happens if that CPU is interrupted.
fn settled(length: &AtomicU32) -> u32 {
    const ATTEMPTS: usize = 1000;
    for _ in 0..ATTEMPTS {
        let value = length.load(Ordering::Acquire);
        if value & BUSY == 0 {
            return value;
        }
        std::hint::spin_loop();
    }
    length.load(Ordering::Acquire)
}

/// The reading end of a ring buffer (`BPF_MAP_TYPE_RINGBUF`). Records are in the order in which they were reserved.
/// Reading makes no system call.
pub struct RingReader {
    /// One page, which begins with the position up to which records were consumed.
    consumer: Mapping,
    /// One page, which begins with the position up to which records were reserved. The ring's data follows it, mapped
    /// twice in a row, so that every record is contiguous.
    producer: Mapping,
    page: usize,
    mask: usize,
}

impl RingReader {
    /// Maps a ring buffer. `bytes` is the size of the map, a power of two.
    pub fn new(fd: impl AsFd, bytes: usize) -> io::Result<Self> {
        let page = page_bytes();
        Ok(Self {
            consumer: Mapping::new(fd.as_fd(), page, 0, true)?,
            producer: Mapping::new(fd.as_fd(), page + 2 * bytes, page, false)?,
            page,
            mask: bytes - 1,
        })
    }

    /// Calls `read` with each waiting record, and returns the number of records. If a record is still being written
    /// after a short wait, stops before that record.
    pub fn drain(&mut self, mut read: impl FnMut(&[u8])) -> usize {
        let mut records = 0;
        // SAFETY: the producer and consumer positions are aligned words at the start of their mappings, and only used
        // atomically.
        let (consumed, reserved) = unsafe {
            (
                self.consumer.start.cast::<AtomicU64>().as_ref(),
                self.producer.start.cast::<AtomicU64>().as_ref(),
            )
        };
        let mut at = consumed.load(Ordering::Relaxed);
        while at < reserved.load(Ordering::Acquire) {
            let offset = self.page + (at as usize & self.mask);
            // SAFETY: records are inside the data and aligned to 8 bytes, and the length in their header is only used
            // atomically.
            let record = unsafe { self.producer.start.add(offset) };
            // SAFETY: the length in a record's header is only used atomically, and records are aligned to 8 bytes.
            let length = settled(unsafe { record.cast::<AtomicU32>().as_ref() });
            if length & BUSY != 0 {
                break;
            }
            let bytes = (length & !DISCARDED) as usize;
            if length & DISCARDED == 0 {
                // SAFETY: the kernel has reserved and written `bytes` bytes after the header. It writes there again
                // only after the consumer position has moved past the record.
                read(unsafe { std::slice::from_raw_parts(record.add(HEADER_BYTES).as_ptr(), bytes) });
                records += 1;
            }
            at += (HEADER_BYTES + bytes).next_multiple_of(8) as u64;
            consumed.store(at, Ordering::Release);
        }
        records
    }
}
