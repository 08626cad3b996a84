//! Keystreams computed ahead: packet numbers are sequential, so what the program XORs the next packets with can
//! be ready before they come. The program computes what it does not find.
//!
//! Each direction of a connection may have a ring, a run of entries of the map `keystreams`; runs are powers of
//! two long, and handed out by [`Runs`].

#![allow(unsafe_code)]

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use super::{Shared, intf, lock};
use crate::crypto::TEXT_MAX;

const NUMBER_BITS: u32 = 48;

/// All that depends on a packet's key and number alone.
#[repr(C)]
pub(crate) struct Keystream {
    /// ChaCha20-Poly1305: the block of counter 0. AES-128-GCM: the encrypted counter block 1 in the first 16
    /// bytes; the rest is not used.
    once: [u8; 64],
    /// What the text is XORed with.
    text: [u8; TEXT_MAX],
}

/// What a direction is to have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Want {
    /// Packets to be ahead, a power of two; 0 gives the ring back.
    pub len: u32,
    /// Bytes of frames that a packet has at most.
    pub text_bytes: usize,
}

/// What it has.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Refill {
    /// Keystreams that were computed.
    pub computed: usize,
    /// Packets that the ring is ahead; shorter than wanted where there is no room.
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

    /// Gives the ring the wanted length, and fills the entries from number `next` on that are not there yet.
    /// `record` leads the program to it.
    pub fn refill(
        &mut self,
        record: &intf::Ring,
        (generation, next): (u16, u64),
        want: Want,
        compute: impl Compute,
    ) -> Refill {
        let old = self.resize(want.len);
        let Some(run) = self.run else {
            self.lead(record, 0, old);
            return Refill::default();
        };
        let bytes = want.text_bytes.min(TEXT_MAX) as u32;
        if old.is_some() || generation != self.generation || bytes > self.bytes {
            (self.generation, self.end) = (generation, next);
        }
        self.bytes = bytes;
        let computed = self.fill(run, next, compute);
        self.lead(record, u64::from(run.len()) << 32 | u64::from(run.start), old);
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

    fn lead(&self, record: &intf::Ring, to: u64, old: Option<Option<Run>>) {
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

impl Drop for Ring {
    /// The record that leads here is not used any more.
    fn drop(&mut self) {
        lock(&self.shared.free).keystreams.retired.extend(self.run);
    }
}

/// Generation and next number of a number word.
pub(super) fn split(word: &AtomicU64) -> (u16, u64) {
    let word = word.load(Ordering::Acquire);
    ((word >> NUMBER_BITS) as u16, word & ((1 << NUMBER_BITS) - 1))
}

/// 2^order entries; `start` is a multiple of that.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Run {
    start: u32,
    order: u32,
}

impl Run {
    fn len(self) -> u32 {
        1 << self.order
    }
}

/// Hands out runs: a buddy allocator.
pub(super) struct Runs {
    /// Starts of free runs, by order.
    free: [BTreeSet<u32>; u32::BITS as usize],
    /// Free once the program runs of now have ended.
    pub retired: Vec<Run>,
}

impl Runs {
    pub fn new(entries: u32) -> Self {
        let mut runs = Self { free: Default::default(), retired: Vec::new() };
        let mut start = 0;
        for order in (0..u32::BITS).rev().filter(|order| entries >> order & 1 != 0) {
            runs.give(Run { start, order });
            start += 1 << order;
        }
        runs
    }

    fn take(&mut self, order: u32) -> Option<Run> {
        let from = (order..u32::BITS).find(|order| !self.free[*order as usize].is_empty())?;
        let start = self.free[from as usize].pop_first()?;
        for half in order..from {
            self.free[half as usize].insert(start + (1 << half));
        }
        Some(Run { start, order })
    }

    /// Joins it with its other half as long as that is free, too.
    pub fn give(&mut self, mut run: Run) {
        while self.free[run.order as usize].remove(&(run.start ^ run.len())) {
            run = Run { start: run.start & !run.len(), order: run.order + 1 };
        }
        self.free[run.order as usize].insert(run.start);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_split_and_join() {
        let mut runs = Runs::new(13);
        assert_eq!(runs.take(4), None);
        let taken = [3, 2, 0].map(|order| runs.take(order).expect("room"));
        assert_eq!(taken.map(|run| (run.start, run.len())), [(0, 8), (8, 4), (12, 1)]);
        assert_eq!(runs.take(0), None);
        runs.give(taken[0]);
        let singles: Vec<_> = (0..8).map_while(|_| runs.take(0)).collect();
        assert_eq!(singles.iter().map(|run| run.start).collect::<BTreeSet<_>>(), (0..8).collect());
        assert_eq!(runs.take(1), None);
        // Whatever the order in which they come back.
        for at in [5, 0, 7, 2, 4, 1, 3, 6] {
            runs.give(singles[at]);
        }
        assert_eq!(runs.take(3), Some(taken[0]));
        assert_eq!(Runs::new(0).take(0), None);
    }

    #[test]
    fn runs_never_overlap() {
        let mut rng = fastrand::Rng::with_seed(1);
        let (mut runs, mut taken) = (Runs::new(1000), Vec::<Run>::new());
        for _ in 0..2000 {
            if rng.bool()
                && let Some(run) = runs.take(rng.u32(..8))
            {
                let end = run.start + run.len();
                assert!(end <= 1000 && run.start.is_multiple_of(run.len()));
                assert!(
                    taken.iter().all(|other| end <= other.start || other.start + other.len() <= run.start)
                );
                taken.push(run);
            } else if !taken.is_empty() {
                runs.give(taken.swap_remove(rng.usize(..taken.len())));
            }
        }
        taken.into_iter().for_each(|run| runs.give(run));
        assert_eq!(runs.take(9).map(|run| run.start), Some(0));
    }
}
