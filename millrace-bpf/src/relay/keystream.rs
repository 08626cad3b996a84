//! Keystreams computed ahead: packet numbers are sequential, so what the program XORs the next packets with can
//! be ready before they come. The program computes what it does not find.

#![allow(unsafe_code)]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use super::{Error, Shared, intf};
use crate::crypto::TEXT_MAX;

const NUMBER_BITS: u32 = 48;

/// All that depends on a packet's key and number alone.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Keystream {
    /// ChaCha20-Poly1305: the block of counter 0. AES-128-GCM: the encrypted counter block 1 in the first 16
    /// bytes; the rest is not used.
    pub once: [u8; 64],
    /// What the text is XORed with.
    pub text: [u8; TEXT_MAX],
}

impl Default for Keystream {
    fn default() -> Self {
        Self { once: [0; 64], text: [0; TEXT_MAX] }
    }
}

/// A run of entries that belongs to one connection.
pub(super) struct Ring {
    shared: Arc<Shared>,
    index: u32,
    scratch: Box<Keystream>,
}

impl Ring {
    /// Makes `record` lead to a ring.
    pub fn new(shared: Arc<Shared>, record: &intf::Ring) -> Result<Self, Error> {
        let index = shared.take(|free| &mut free.rings, "keystream rings")?;
        let ring = Self { shared, index, scratch: Box::default() };
        for at in 0..ring.len() {
            ring.entry(u64::from(at)).word.store(0, Ordering::Relaxed);
        }
        record.start.store(index * ring.len(), Ordering::Relaxed);
        record.len.store(ring.len(), Ordering::Release);
        Ok(ring)
    }

    fn len(&self) -> u32 {
        self.shared.ring_len
    }

    fn entry(&self, number: u64) -> &intf::Keystream {
        let at = number % u64::from(self.len());
        self.shared.keystreams.get(self.index * self.len() + at as u32)
    }

    /// Fills the entries from number `next` on that are not there yet, each with `bytes` of text, and returns
    /// how many those were.
    pub fn refill(
        &mut self,
        (generation, next): (u16, u64),
        bytes: usize,
        mut compute: impl FnMut(u16, u64, &mut Keystream),
    ) -> usize {
        let bytes = bytes.min(TEXT_MAX) as u32;
        let mut filled = 0;
        for number in next..next + u64::from(self.len()) {
            let word = (u64::from(generation) << NUMBER_BITS | number) + 1;
            let entry = self.entry(number);
            if entry.word.load(Ordering::Relaxed) == word && entry.bytes.load(Ordering::Relaxed) >= bytes {
                continue;
            }
            compute(generation, number, &mut self.scratch);
            let entry = self.entry(number);
            entry.word.store(0, Ordering::Relaxed);
            fence(Ordering::SeqCst);
            entry.bytes.store(bytes, Ordering::Relaxed);
            // SAFETY: `&mut self` excludes other writers. The kernel may be reading: it looks at `word`
            // afterwards and discards what it read.
            unsafe { entry.keystream.get().write(*self.scratch) };
            entry.word.store(word, Ordering::Release);
            filled += 1;
        }
        filled
    }
}

impl Drop for Ring {
    /// The record that leads here is not used any more.
    fn drop(&mut self) {
        self.shared.retire(|free| &mut free.rings, self.index);
    }
}

/// Generation and next number of a number word.
pub(super) fn split(word: &AtomicU64) -> (u16, u64) {
    let word = word.load(Ordering::Acquire);
    ((word >> NUMBER_BITS) as u16, word & ((1 << NUMBER_BITS) - 1))
}
