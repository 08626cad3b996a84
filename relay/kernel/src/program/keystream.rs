//! Precomputed keystreams: packet numbers are sequential, so what the program XORs the next packets with can be ready
//! before they come. The program computes what it does not find.
//!
//! Each direction of a connection may have a ring: a [`Run`] of entries of the map `keystreams`.

#![allow(unsafe_code)]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use millrace_kernel::crypto::{Keystream, TEXT_MAX};

use super::buddy::Run;
use super::intf;
use super::shared::{Shared, lock};

const NUMBER_BITS: u32 = intf::NUMBER_BITS;

/// What a direction is to have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Want {
    /// Packets to be precomputed, a power of two; 0 gives the ring back.
    pub len: u32,
    /// Bytes of frames that a packet has at most.
    pub text_bytes: usize,
}

/// What it has.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Refill {
    /// Keystreams that were computed.
    pub computed: usize,
    /// Packets that the ring holds: fewer than wanted where there is no room.
    pub len: u32,
}

/// Computes a keystream: gets key generation and packet number, writes the part that is used once (64 bytes:
/// ChaCha20's block 0, or the mask of GCM's tag in the first 16 bytes) and what the text is XORed with. `false`
/// where it has no such key. What it writes must be right: the program seals with it.
pub trait Compute: FnMut(u16, u64, &mut [u8; 64], &mut [u8]) -> bool {}
impl<T: FnMut(u16, u64, &mut [u8; 64], &mut [u8]) -> bool> Compute for T {}

/// The keystreams of one direction of a connection.
pub(super) struct Ring {
    shared: Arc<Shared>,
    run: Option<Run>,
    /// Entries from `next` on are there, of this generation and up to `end`, for `bytes` of text.
    generation: u16,
    end: u64,
    bytes: u32,
    scratch: Box<Keystream>,
}

impl Ring {
    pub fn new(shared: Arc<Shared>) -> Self {
        let scratch = Box::new(Keystream { once: [0; 64], text: [0; TEXT_MAX] });
        Self { shared, run: None, generation: 0, end: 0, bytes: 0, scratch }
    }

    /// Gives the ring the wanted length, and computes the keystreams from number `next` on that are missing. `record` is
    /// where the program looks for the ring.
    pub fn refill(
        &mut self,
        record: &intf::Ring,
        (generation, next): (u16, u64),
        want: Want,
        compute: impl Compute,
    ) -> Refill {
        let old = self.resize(want.len);
        let Some(run) = self.run else {
            self.replace(record, 0, old);
            return Refill::default();
        };
        let bytes = want.text_bytes.min(TEXT_MAX) as u32;
        if old.is_some() || generation != self.generation || bytes > self.bytes {
            (self.generation, self.end) = (generation, next);
        }
        self.bytes = bytes;
        let computed = self.fill(run, next, compute);
        self.replace(record, u64::from(run.len()) << 32 | u64::from(run.start), old);
        Refill { computed, len: run.len() }
    }

    /// Takes another run where the length is not the wanted one; returns the one before, if there is another now.
    fn resize(&mut self, len: u32) -> Option<Option<Run>> {
        let have = self.run.map_or(0, |run| run.len());
        if len == have {
            return None;
        }
        if len == 0 {
            return Some(self.run.take());
        }
        let wanted = len.next_power_of_two().trailing_zeros();
        // Where room is short, a ring that is longer than the present one is better than none.
        let least = if len > have { (have + 1).next_power_of_two().trailing_zeros() } else { wanted };
        let run = {
            let runs = &mut lock(&self.shared.free).keystreams;
            (least..=wanted).rev().find_map(|order| runs.take(order))?
        };
        for at in 0..u64::from(run.len()) {
            self.entry(run, at).word.store(0, Ordering::Relaxed);
        }
        Some(self.run.replace(run))
    }

    /// Has the program use the run `to`, if there is another now, and retires the one before.
    fn replace(&self, record: &intf::Ring, to: u64, old: Option<Option<Run>>) {
        let Some(old) = old else { return };
        record.run.store(to, Ordering::SeqCst);
        lock(&self.shared.free).keystreams.retired.extend(old);
    }

    fn fill(&mut self, run: Run, next: u64, mut compute: impl Compute) -> usize {
        let (first, end) = (self.end.max(next), next + u64::from(run.len()));
        for number in first..end {
            let (once, text) = (&mut self.scratch.once, &mut self.scratch.text[..self.bytes as usize]);
            if !compute(self.generation, number, once, text) {
                self.end = number;
                return (number - first) as usize;
            }
            self.publish(self.entry(run, number), number);
        }
        self.end = self.end.max(end);
        end.saturating_sub(first) as usize
    }

    fn publish(&self, entry: &intf::Keystream, number: u64) {
        entry.word.store(0, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        entry.bytes.store(self.bytes, Ordering::Relaxed);
        let len = size_of_val(&self.scratch.once) + self.bytes as usize;
        let from = (&raw const *self.scratch).cast::<u8>();
        // SAFETY: `len` bytes from the start of one structure to that of another. `&mut self` in the callers
        // excludes other writers. The kernel may be reading: it looks at `word` afterwards and discards what it
        // read.
        unsafe { from.copy_to_nonoverlapping(entry.keystream.get().cast::<u8>(), len) };
        let word = (u64::from(self.generation) << NUMBER_BITS | number) + 1;
        entry.word.store(word, Ordering::Release);
    }

    fn entry(&self, run: Run, number: u64) -> &intf::Keystream {
        let at = number % u64::from(run.len());
        self.shared.keystreams.get(run.start + at as u32)
    }
}

impl intf::Keystream {
    /// Of a ring that is not used any more.
    pub(super) fn erase(&self) {
        self.word.store(0, Ordering::Relaxed);
        self.bytes.store(0, Ordering::Relaxed);
        // SAFETY: any bytes are a keystream, and neither the program nor a ring uses the entry.
        unsafe { self.keystream.get().write_bytes(0, 1) };
    }
}

impl Drop for Ring {
    /// The record of this ring is not used any more.
    fn drop(&mut self) {
        lock(&self.shared.free).keystreams.retired.extend(self.run);
    }
}

/// Generation and next number of a number word.
pub(super) fn split(word: &AtomicU64) -> (u16, u64) {
    let word = word.load(Ordering::Acquire);
    ((word >> NUMBER_BITS) as u16, word & ((1 << NUMBER_BITS) - 1))
}
