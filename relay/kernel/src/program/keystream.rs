//! Precomputed keystreams. Packet numbers are consecutive, so the bytes that the program XORs the next packets with can
//! be computed before the packets arrive. The program computes missing keystreams itself.
//!
//! Each direction of a connection may have a ring: a [`BuddyRun`] of entries in the map `keystreams`.

#![allow(unsafe_code)]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use millrace_kernel::crypto::{Keystream, TEXT_MAX};

use super::buddy::BuddyRun;
use super::intf;
use super::shared::{RelayMaps, lock};

const NUMBER_BITS: u32 = intf::NUMBER_BITS;

/// The ring of keystreams that one direction of a connection should have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WantedRing {
    /// Number of packets to precompute keystreams for, a power of two. 0 frees the ring.
    pub len: u32,
    /// The largest packet payload, in bytes, for which the keystreams are long enough.
    pub text_bytes: usize,
}

/// The state of a keystream ring after a refill.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Refill {
    /// Number of keystreams that the refill has computed.
    pub computed: usize,
    /// Length of the keystream ring in packets, which is less than wanted if memory is short.
    pub len: u32,
}

/// Computes a keystream. Takes the key generation and the packet number. Writes the part that authenticates the packet
/// (64 bytes: block 0 of ChaCha20, or the mask of GCM's tag in the first 16) and the bytes that the payload is XORed
/// with. Returns false if it has no key of that generation. The result must be right, since the program encrypts with
/// it.
pub trait Compute: FnMut(u16, u64, &mut [u8; 64], &mut [u8]) -> bool {}
impl<T: FnMut(u16, u64, &mut [u8; 64], &mut [u8]) -> bool> Compute for T {}

/// The ring of keystreams of one direction of a connection.
///
/// # Protocol
///
/// The program reads without a lock. The `word` of an entry is 0, or 1 more than a value of
/// [`DownstreamRecord::number`](super::DownstreamRecord::number): the packet number and key generation that the
/// keystream is for. The writer stores 0, then the keystream, then the word. The program compares the word before it
/// uses the keystream. After encrypting it compares again, and starts over if the word has changed. A packet that was
/// decrypted with a changing keystream looks forged, and is left to userspace.
///
/// Only [`Self::refill`] changes the ring. Its caller holds the mutex of the connection's record. It publishes the new
/// entries last, and retires the old ones. Program runs that have begun may still read those, so they are erased only
/// after these runs have ended ([`RelayMaps::settle`]).
pub(super) struct KeystreamRing {
    shared: Arc<RelayMaps>,
    run: Option<BuddyRun>,
    /// The key generation whose keystreams are in the ring. They are computed for packet numbers below `end`, each for
    /// `bytes` bytes of payload.
    generation: u16,
    end: u64,
    bytes: u32,
    scratch: Box<Keystream>,
}

impl KeystreamRing {
    pub fn new(shared: Arc<RelayMaps>) -> Self {
        let scratch = Box::new(Keystream { once: [0; 64], text: [0; TEXT_MAX] });
        Self { shared, run: None, generation: 0, end: 0, bytes: 0, scratch }
    }

    /// Gives the ring of keystreams the wanted length, and computes the missing keystreams from packet number `next`
    /// on. `record` is the field by which the program finds the ring.
    pub fn refill(
        &mut self,
        record: &intf::Ring,
        generation: u16,
        next: u64,
        want: WantedRing,
        compute: impl Compute,
    ) -> Refill {
        let old = self.resize(want.len);
        let Some(run) = self.run else {
            self.replace(record, 0, old);
            return Refill::default();
        };
        let bytes = want.text_bytes.min(TEXT_MAX) as u32;
        // Keystreams of another generation, or for fewer bytes, are computed again.
        if old.is_some() || generation != self.generation || bytes > self.bytes {
            (self.generation, self.end) = (generation, next);
        }
        self.bytes = bytes;
        let computed = self.fill(run, next, compute);
        self.replace(record, u64::from(run.len()) << 32 | u64::from(run.start), old);
        Refill { computed, len: run.len() }
    }

    /// Allocates a new run of entries if the ring's length has to change. Returns the previous run if it was replaced.
    fn resize(&mut self, len: u32) -> Option<Option<BuddyRun>> {
        let have = self.run.map_or(0, |run| run.len());
        if len == have {
            return None;
        }
        if len == 0 {
            return Some(self.run.take());
        }
        let wanted = len.next_power_of_two().trailing_zeros();
        // If memory is short, a shorter keystream ring than wanted is accepted if it is longer than the present one.
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

    /// If the ring has moved (`old` is `Some`), makes the program use the entries at `to`, and retires the ring's
    /// previous entries.
    fn replace(&self, record: &intf::Ring, to: u64, old: Option<Option<BuddyRun>>) {
        let Some(old) = old else { return };
        record.run.store(to, Ordering::SeqCst);
        lock(&self.shared.free).keystreams.retired.extend(old);
    }

    // Keystream entries of packets before `next` are no longer needed. Each of these entries is filled with the
    // keystream of the packet whose number is larger by the ring's length.
    fn fill(&mut self, run: BuddyRun, next: u64, mut compute: impl Compute) -> usize {
        let first = self.end.max(next);
        let end = next + u64::from(run.len());
        for number in first..end {
            let once = &mut self.scratch.once;
            let text = &mut self.scratch.text[..self.bytes as usize];
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
        // The program must not find the new keystream while `word` still names the packet of the old one.
        fence(Ordering::SeqCst);
        entry.bytes.store(self.bytes, Ordering::Relaxed);
        let len = size_of_val(&self.scratch.once) + self.bytes as usize;
        let from = (&raw const *self.scratch).cast::<u8>();
        // SAFETY: the call copies `len` bytes between the beginnings of two structures with the same layout. `&mut
        // self` in the callers excludes other writers. If the program reads at the same time, it checks `word`
        // afterwards and discards what it read.
        unsafe { from.copy_to_nonoverlapping(entry.keystream.get().cast::<u8>(), len) };
        let word = (u64::from(self.generation) << NUMBER_BITS | number) + 1;
        entry.word.store(word, Ordering::Release);
    }

    fn entry(&self, run: BuddyRun, number: u64) -> &intf::Keystream {
        let at = number % u64::from(run.len());
        self.shared.keystreams.get(run.start + at as u32)
    }
}

impl intf::Keystream {
    /// Erases a keystream entry that no ring uses any more.
    pub(super) fn erase(&self) {
        self.word.store(0, Ordering::Relaxed);
        self.bytes.store(0, Ordering::Relaxed);
        // SAFETY: any bytes are a keystream, and neither the program nor a ring uses the entry.
        unsafe { self.keystream.get().write_bytes(0, 1) };
    }
}

impl Drop for KeystreamRing {
    /// Retires the ring's map entries. They are reused once the present program runs have ended.
    fn drop(&mut self) {
        lock(&self.shared.free).keystreams.retired.extend(self.run);
    }
}

/// Splits a packet number word into key generation and next packet number.
pub(super) fn split(word: &AtomicU64) -> (u16, u64) {
    let word = word.load(Ordering::Acquire);
    ((word >> NUMBER_BITS) as u16, word & ((1 << NUMBER_BITS) - 1))
}
