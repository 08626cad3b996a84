//! Sampled stacks on their way to userspace.

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
    /// The process that was running, whether or not the event was its own, as this process' PID namespace numbers it.
    /// 0: the CPU was idle, or the process is outside of the namespace.
    pub pid: u32,
    /// ID of its cgroup (v2).
    pub cgroup: u64,
    /// The thread's name; zeroes follow.
    pub name: [u8; 16],
    /// `None`: none, or events are not timed.
    pub event: Option<KernelEvent>,
    /// The process is watched.
    pub watched: bool,
    /// A system call on an AF_UNIX or netlink socket was under way. Interrupts and softirqs may run on top of it.
    pub local: bool,
    /// Return addresses, innermost first; none in user mode.
    pub kernel: &'a [u64],
    /// The same in user mode, for watched processes only.
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

    /// `writing`: whether the sampler of a CPU is at work at this moment.
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

/// Two halves per CPU that is sampled: samplers append to one while the other is read.
///
/// # Protocol
///
/// `control.half` says which half samplers append to. A sampler marks itself (`cost_cpu.writing`) before it reads `half`, and clears the mark when
/// its record is complete. [`Self::drain`] empties the half that it read last time, flips `half`, and waits for each CPU until its mark is gone.
/// From then on no sampler is in the other half, and it is read without a lock until the next flip. Samplers run in interrupts, so they never
/// wait: without room, a sample is lost and counted.
pub(super) struct DoubleBuffer {
    halves: Mapping,
    control: MappedArray<intf::Control>,
    /// Number of possible CPUs. Most of them may have no buffer.
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
        // The other half was read, and no sampler has been in it since.
        for buffer in 0..self.buffers {
            self.used(buffer, 1 - filled).store(0, Ordering::Relaxed);
        }
        active.swap(1 - filled, Ordering::SeqCst);
        // A sampler that saw the old half marked itself before it looked: it is at work until the mark is gone.
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
        // SAFETY: at the start of a half inside the mapping; halves are whole pages.
        unsafe { self.halves.start().add(self.offset(buffer, half)).cast().as_ref() }
    }

    fn records(&self, buffer: u32, half: u32, used: usize) -> &[u8] {
        let used = used.min(self.half_bytes - HALF_HEADER_BYTES);
        // SAFETY: inside the mapping; the kernel writes to this half only after the next flip.
        unsafe {
            let start = self.halves.start().add(self.offset(buffer, half) + HALF_HEADER_BYTES);
            std::slice::from_raw_parts(start.as_ptr(), used)
        }
    }
}

/// Returns when the sampler of each CPU has been seen to rest, each by itself: on many CPUs there may be no moment when
/// all do. They run in interrupts, for a few microseconds.
fn settle(cpus: u32, writing: impl Fn(u32) -> bool) {
    for cpu in 0..cpus {
        while writing(cpu) {
            std::hint::spin_loop();
        }
    }
}

/// The record at the beginning of `bytes`, which are aligned to 8, and its length.
fn parse(bytes: &[u8]) -> Option<(StackRecord<'_>, usize)> {
    let (header, rest) = bytes.split_at_checked(size_of::<intf::Record>())?;
    let header = intf::Record::from_bytes(header)?;
    let kernel = usize::from(header.kernel_frames);
    let frames = kernel + usize::from(header.user_frames);
    // SAFETY: any bytes are integers; what is not aligned is left out, and then frames are missing.
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
        // SAFETY: integers are bytes.
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

    /// Each of two CPUs rests often, but both together never when one looks from the first to the second.
    #[test]
    fn waiting_for_cpus_looks_at_one_at_a_time() {
        let looks = Cell::new(0);
        let writing = |cpu| {
            looks.set(looks.get() + 1);
            assert!(looks.get() < 100, "it waits for all at once");
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
