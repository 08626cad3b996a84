//! Reads sampled stacks from the memory that the kernel's sampler writes.

#![allow(unsafe_code)]

use std::num::NonZero;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU64, Ordering};

use millrace_kernel::Error;
use millrace_kernel::intf::Plain;
use millrace_kernel::memory::{MappedArray, Mapping, RingReader};
use millrace_kernel::object::LoadedObject;

use super::config::{KernelEvent, StackTransport};
use super::intf;

/// A sampled stack.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StackRecord<'a> {
    /// The CPU of the sample.
    pub cpu: u32,
    /// The running process, by its number in this process's PID namespace. A softirq may have interrupted a process
    /// that has nothing to do with it. 0 if the CPU was idle, or the process is outside of the namespace.
    pub pid: u32,
    /// ID of the process's cgroup (v2).
    pub cgroup: u64,
    /// The thread's name, padded with zeroes.
    pub name: [u8; 16],
    /// The timed kernel work, such as a softirq or a send, that the sample interrupted. `None` if there was none, or
    /// the timing programs are not attached.
    pub event: Option<KernelEvent>,
    /// True if the process is [watched](super::CostPrograms::watch).
    pub watched: bool,
    /// True if the task was in a system call on an AF_UNIX or netlink socket. An interrupt or softirq may run on top of
    /// it.
    pub local: bool,
    /// Return addresses in the kernel, innermost first; empty in user mode.
    pub kernel: &'a [u64],
    /// Return addresses in user mode, innermost first, for watched processes only.
    pub user: &'a [u64],
}

pub(super) enum Buffer {
    Double(DoubleBuffer),
    Ring(RingReader),
}

impl Buffer {
    pub fn new(
        object: &mut LoadedObject,
        transport: StackTransport,
        cpus: NonZero<u32>,
        buffers: NonZero<u32>,
        half_bytes: u32,
        ring_bytes: u32,
    ) -> Result<Self, Error> {
        match transport {
            StackTransport::DoubleBuffer => {
                DoubleBuffer::new(object, cpus, buffers, half_bytes).map(Self::Double)
            }
            StackTransport::RingBuffer => {
                let map = object.map("ring")?;
                let ring = RingReader::new(&map, ring_bytes as usize);
                Ok(Self::Ring(ring.map_err(|source| Error::Memory { what: "ring", source })?))
            }
        }
    }

    /// Calls `read` for each stack since the last call. `writing` reports whether a CPU's sampler is running now.
    pub fn drain(&mut self, writing: impl Fn(u32) -> bool, mut read: impl FnMut(StackRecord<'_>)) {
        match self {
            Self::Double(buffer) => buffer.drain(writing, read),
            Self::Ring(ring) => {
                ring.drain(|bytes| {
                    if let Some((record, _)) = parse(bytes) {
                        read(record);
                    }
                });
            }
        }
    }
}

/// A double buffer for each sampled CPU: samplers append to one half while userspace reads the other.
///
/// # Protocol
///
/// `control.half` is the half that samplers append to. A sampler sets `cost_cpu.writing` before it reads `half`, and
/// clears it when its record is complete. [`Self::drain`] empties the half that it read last time, flips `half`, and
/// waits for each CPU until `writing` is 0. From then on no sampler is in the filled half, and userspace reads it
/// without a lock until the next flip. Samplers run in interrupts, so they never wait: without room, a sample is lost
/// and counted.
pub(super) struct DoubleBuffer {
    halves: Mapping,
    control: MappedArray<intf::Control>,
    /// Number of possible CPUs. Many may have no buffer.
    cpus: u32,
    buffers: u32,
    half_bytes: usize,
}

const HALF_HEADER_BYTES: usize = size_of::<intf::Half>();

impl DoubleBuffer {
    fn new(
        object: &mut LoadedObject,
        cpus: NonZero<u32>,
        buffers: NonZero<u32>,
        half_bytes: u32,
    ) -> Result<Self, Error> {
        let half_bytes = half_bytes as usize;
        let bytes = 2 * buffers.get() as usize * half_bytes;
        let halves = Mapping::new(object.map("halves")?.as_fd(), bytes, 0, true)
            .map_err(|source| Error::Memory { what: "halves", source })?;
        let control = MappedArray::new(object.map("control")?.as_fd(), NonZero::<u32>::MIN)
            .map_err(|source| Error::Memory { what: "control", source })?;
        Ok(Self { halves, control, cpus: cpus.get(), buffers: buffers.get(), half_bytes })
    }

    fn drain(&mut self, writing: impl Fn(u32) -> bool, mut read: impl FnMut(StackRecord<'_>)) {
        let active = &self.control.get(0).half;
        let filled = active.load(Ordering::Relaxed) & 1;
        // The half that samplers do not append to now was read after the previous switch of the halves. No sampler has
        // written to it since.
        for buffer in 0..self.buffers {
            self.used(buffer, 1 - filled).store(0, Ordering::Relaxed);
        }
        // SeqCst pairs with the sampler's exchanges of `writing`, which are full barriers: either this thread sees
        // `writing` set, or the sampler sees the new half.
        active.swap(1 - filled, Ordering::SeqCst);
        // A sampler that still appends to the half that was active before the switch has set `writing`. It may append
        // until it sets `writing` to 0.
        settle(self.cpus, writing);
        for buffer in 0..self.buffers {
            let used = self.used(buffer, filled).load(Ordering::Acquire) as usize;
            let mut rest = self.records(buffer, filled, used);
            while let Some((record, bytes)) = parse(rest) {
                read(record);
                rest = rest.get(bytes..).unwrap_or_default();
            }
        }
    }

    fn offset(&self, buffer: u32, half: u32) -> usize {
        (buffer as usize * 2 + half as usize) * self.half_bytes
    }

    fn used(&self, buffer: u32, half: u32) -> &AtomicU64 {
        // SAFETY: the offset is the start of a half inside the mapping, aligned since halves are whole pages.
        unsafe { self.halves.start().add(self.offset(buffer, half)).cast().as_ref() }
    }

    fn records(&self, buffer: u32, half: u32, used: usize) -> &[u8] {
        let used = used.min(self.half_bytes - HALF_HEADER_BYTES);
        // SAFETY: the range is inside the mapping. The kernel writes to this half again only after userspace has
        // switched the halves the next time.
        unsafe {
            let start = self.halves.start().add(self.offset(buffer, half) + HALF_HEADER_BYTES);
            std::slice::from_raw_parts(start.as_ptr(), used)
        }
    }
}

/// Waits until each CPU's sampler was seen at rest once, one CPU after another: with many CPUs, there may be no moment
/// when all are at rest. Spinning is enough, since samplers run in interrupts for a few microseconds.
fn settle(cpus: u32, writing: impl Fn(u32) -> bool) {
    for cpu in 0..cpus {
        while writing(cpu) {
            std::hint::spin_loop();
        }
    }
}

/// Returns the record at the start of `bytes`, which are aligned to 8, and its length. `None` if the record is
/// incomplete.
fn parse(bytes: &[u8]) -> Option<(StackRecord<'_>, usize)> {
    let (header, rest) = bytes.split_at_checked(size_of::<intf::Record>())?;
    let header = intf::Record::from_bytes(header)?;
    let kernel = usize::from(header.kernel_frames);
    let frames = kernel + usize::from(header.user_frames);
    // SAFETY: any bytes are valid integers. `align_to` leaves out unaligned bytes, so frames would be missing, not
    // wrong.
    let (_, words, _) = unsafe { rest.align_to::<u64>() };
    let (kernel, user) = words.get(..frames)?.split_at_checked(kernel)?;
    let record = StackRecord {
        cpu: header.cpu,
        pid: header.pid,
        cgroup: header.cgroup,
        name: header.name,
        event: KernelEvent::from_code(header.event),
        watched: header.watched != 0,
        local: header.local != 0,
        kernel,
        user,
    };
    Some((record, size_of::<intf::Record>() + frames * size_of::<u64>()))
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    fn record(kernel_frames: u16, user_frames: u16) -> intf::Record {
        intf::Record {
            pid: 7,
            cpu: 1,
            kernel_frames,
            user_frames,
            event: 4,
            watched: 1,
            local: 1,
            pad: 0,
            cgroup: 9,
            name: *b"0123456789abcdef",
        }
    }

    fn words(record: &intf::Record, frames: &[u64]) -> Vec<u64> {
        let header: &[u8] = record.as_bytes();
        let mut words: Vec<u64> = header
            .chunks_exact(8)
            .map(|chunk| u64::from_ne_bytes(chunk.try_into().expect("8 bytes")))
            .collect();
        words.extend(frames);
        words
    }

    fn bytes(words: &[u64]) -> &[u8] {
        // SAFETY: integers may be read as bytes.
        unsafe { words.align_to::<u8>().1 }
    }

    #[test]
    fn records_in_a_sample_buffer_are_read_in_order() {
        let mut words = words(&record(2, 1), &[10, 11, 20]);
        words.extend(self::words(&record(0, 0), &[]));
        let bytes = bytes(&words);
        let (first, len) = parse(bytes).expect("a record");
        assert_eq!((first.kernel, first.user), (&[10, 11][..], &[20][..]));
        assert_eq!(
            (first.pid, first.cpu, first.event, first.watched),
            (7, 1, Some(KernelEvent::Receive), true)
        );
        assert_eq!((first.cgroup, &first.name), (9, b"0123456789abcdef"));
        assert!(first.local);
        let (second, more) = parse(&bytes[len..]).expect("another");
        assert_eq!((second.kernel.len(), second.user.len()), (0, 0));
        assert_eq!(len + more, bytes.len());
        assert_eq!(parse(&bytes[len + more..]), None);
    }

    /// The sampler of each of the two CPUs often does not run, but no two consecutive checks find both at rest.
    #[test]
    fn wait_for_resting_samplers_checks_each_cpu_separately() {
        let looks = Cell::new(0);
        let writing = |cpu| {
            looks.set(looks.get() + 1);
            assert!(looks.get() < 100, "settle waits for all CPUs at once");
            looks.get() % 3 == 1 - cpu
        };
        settle(2, writing);
        assert_eq!(looks.get(), 2 + 2);
    }

    #[test]
    fn truncated_record_is_ignored() {
        let words = words(&record(2, 1), &[10, 11]);
        assert_eq!(parse(bytes(&words)), None);
        assert_eq!(parse(&bytes(&words)[..12]), None);
    }
}
