//! Packet numbers of one connection with several senders.
//!
//! One atomic operation on a 64-bit word returns both a packet number and its key generation. So no number is used
//! twice. All numbers of a key generation are larger than those of earlier generations, as RFC 9001, sections 6.1 and
//! 6.4, require.

use std::borrow::Borrow;

#[cfg(not(all(test, loom)))]
use std::sync::atomic::{AtomicU64, Ordering};

#[cfg(all(test, loom))]
use loom::sync::atomic::{AtomicU64, Ordering};

/// Bits of the word that hold the next packet number; the key generation is above them.
///
/// 2^48 numbers last for nine years at a million packets per second, so the packet number never overflows into the key
/// generation.
pub const NUMBER_BITS: u32 = 48;

const NUMBER_MASK: u64 = (1 << NUMBER_BITS) - 1;

/// The packet numbers of one connection's 1-RTT space, shared by all its senders. `W` owns the word, which may be in
/// memory that other processes or the kernel map too. `W`'s `Borrow` has to return the same word every time.
///
/// A sender calls [`Self::draw`], and seals with the keys of the generation that it gets. Only [`Self::draw_in`]
/// changes the generation, and only to a newer one. No lock is needed: the order of the atomic operations is the order
/// of the numbers. While no method runs, the word holds the next packet number and the newest key generation.
///
/// ```
/// use millrace_quic::number::PacketNumbers;
///
/// let numbers = PacketNumbers::new(0);
/// assert_eq!(numbers.draw(), (0, 0));
/// // One sender changes to generation 1, whose keys exist. The other senders use it from their next packet on.
/// assert_eq!(numbers.draw_in(1)?, 1);
/// assert_eq!(numbers.draw(), (1, 2));
/// assert!(numbers.draw_in(0).is_err());
/// # Ok::<(), millrace_quic::number::Superseded>(())
/// ```
#[derive(Debug)]
pub struct PacketNumbers<W = AtomicU64>(W);

/// Error: a packet number was requested for an old key generation, although a newer generation is in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("key generation {wanted} was replaced by {current}")]
pub struct Superseded {
    /// The requested key generation.
    pub wanted: u16,
    /// The key generation in use.
    pub current: u16,
}

impl PacketNumbers {
    /// Creates a counter that starts at packet number `next`, with key generation 0, the first 1-RTT keys.
    pub fn new(next: u64) -> Self {
        Self(AtomicU64::new(next & NUMBER_MASK))
    }
}

impl<W: Borrow<AtomicU64>> PacketNumbers<W> {
    /// Creates a counter that continues from the packet number and key generation in `word`.
    pub fn from_word(word: W) -> Self {
        Self(word)
    }

    /// Copies packet number and key generation to another word, and returns a counter on that word. No sender may draw
    /// a number from either word until all senders use the new word.
    pub fn moved<V: Borrow<AtomicU64>>(&self, word: V) -> PacketNumbers<V> {
        word.borrow().store(self.word().load(Ordering::Acquire), Ordering::Release);
        PacketNumbers(word)
    }

    fn word(&self) -> &AtomicU64 {
        self.0.borrow()
    }

    /// Takes the next number. The packet has to be sealed with the keys of the returned generation.
    ///
    /// Acquire ordering makes the generation's keys visible: they were stored before any sender changed to the
    /// generation.
    pub fn draw(&self) -> (u16, u64) {
        split(self.word().fetch_add(1, Ordering::Acquire))
    }

    /// Takes the next number for a packet of `generation`. If `generation` is newer than the current one, all senders
    /// change to it, so its keys have to be stored before the call.
    pub fn draw_in(&self, generation: u16) -> Result<u64, Superseded> {
        let mut word = self.word().load(Ordering::Relaxed);
        loop {
            let (current, number) = split(word);
            if generation < current {
                return Err(Superseded { wanted: generation, current });
            }
            match self.word().compare_exchange_weak(
                word,
                join(generation, number + 1),
                // Release publishes the generation's keys to `draw`. Acquire makes the keys visible that the previous
                // caller stored.
                Ordering::AcqRel,
                Ordering::Relaxed,
            ) {
                Ok(_) => return Ok(number),
                Err(changed) => word = changed,
            }
        }
    }

    /// Skips one packet number and returns it. A peer that acknowledges the skipped number lies (RFC 9000, section
    /// 21.4).
    pub fn skip(&self) -> u64 {
        self.draw().1
    }

    /// Returns the generation and number that the next packet gets, if no other sender draws a number first.
    pub fn peek(&self) -> (u16, u64) {
        split(self.word().load(Ordering::Acquire))
    }
}

fn split(word: u64) -> (u16, u64) {
    ((word >> NUMBER_BITS) as u16, word & NUMBER_MASK)
}

fn join(generation: u16, number: u64) -> u64 {
    u64::from(generation) << NUMBER_BITS | (number & NUMBER_MASK)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn packet_numbers_do_not_restart_at_a_key_update() {
        let numbers = PacketNumbers::new(7);
        assert_eq!(numbers.draw(), (0, 7));
        assert_eq!(numbers.draw_in(0), Ok(8));
        assert_eq!(numbers.draw_in(2), Ok(9));
        assert_eq!(numbers.skip(), 10);
        assert_eq!(numbers.peek(), (2, 11));
        assert_eq!(numbers.draw(), (2, 11));
    }

    #[test]
    fn packet_number_for_a_superseded_key_generation_is_refused() {
        let numbers = PacketNumbers::new(0);
        assert_eq!(numbers.draw_in(3), Ok(0));
        assert_eq!(numbers.draw_in(2), Err(Superseded { wanted: 2, current: 3 }));
        assert_eq!(numbers.draw(), (3, 1));
    }

    #[test]
    fn packet_numbers_continue_from_a_counter_in_shared_memory() {
        let word = std::sync::Arc::new(AtomicU64::new(join(1, 41)));
        struct Mapped(std::sync::Arc<AtomicU64>);
        impl Borrow<AtomicU64> for Mapped {
            fn borrow(&self) -> &AtomicU64 {
                &self.0
            }
        }
        let numbers = PacketNumbers::from_word(Mapped(word.clone()));
        assert_eq!(split(word.fetch_add(1, Ordering::Relaxed)), (1, 41));
        assert_eq!(numbers.draw(), (1, 42));
        assert_eq!(numbers.draw_in(2), Ok(43));
        assert_eq!(split(word.load(Ordering::Relaxed)), (2, 44));
    }

    #[test]
    fn packet_numbers_continue_when_the_counter_moves_to_other_memory() {
        let numbers = PacketNumbers::new(1000);
        assert_eq!(numbers.draw_in(3), Ok(1000));
        let moved = numbers.moved(AtomicU64::new(7));
        assert_eq!(moved.draw(), (3, 1001));
        assert_eq!(moved.moved(AtomicU64::new(0)).peek(), (3, 1002));
    }

    #[test]
    fn largest_key_generation_and_packet_number_fit_in_one_word() {
        assert_eq!(split(join(u16::MAX, NUMBER_MASK)), (u16::MAX, NUMBER_MASK));
        assert_eq!(split(join(0, NUMBER_MASK)), (0, NUMBER_MASK));
    }

    #[test]
    fn threads_never_draw_the_same_packet_number() {
        const EACH: u64 = 20_000;
        let numbers = PacketNumbers::new(0);
        let mut drawn: Vec<(u64, u16)> = std::thread::scope(|scope| {
            let plane = scope.spawn(|| (0..EACH).map(|_| numbers.draw()).collect::<Vec<_>>());
            let stack = scope.spawn(|| {
                (0..EACH)
                    .map(|i| {
                        let generation = (i / 100) as u16;
                        (
                            generation,
                            numbers.draw_in(generation).expect("only this thread changes the generation"),
                        )
                    })
                    .collect::<Vec<_>>()
            });
            let plane = plane.join().expect("no panic");
            let stack = stack.join().expect("no panic");
            plane.into_iter().chain(stack).map(|(generation, number)| (number, generation)).collect()
        });
        drawn.sort_unstable();
        assert!(drawn.iter().map(|(number, _)| *number).eq(0..2 * EACH));
        assert!(drawn.is_sorted_by_key(|(_, generation)| *generation));
    }
}

/// Loom tests, which check every interleaving: `RUSTFLAGS="--cfg loom" cargo test -p millrace-quic --release --lib
/// number`.
#[cfg(all(test, loom))]
mod model {
    use loom::{sync::Arc, thread};

    use super::*;

    fn check(mut drawn: Vec<(u64, u16)>) {
        drawn.sort_unstable();
        assert!(drawn.windows(2).all(|pair| pair[0].0 < pair[1].0), "a number was used twice: {drawn:?}");
        assert!(drawn.is_sorted_by_key(|(_, generation)| *generation), "the generation decreased: {drawn:?}");
    }

    #[test]
    fn packet_numbers_stay_unique_during_key_updates() {
        loom::model(|| {
            let numbers = Arc::new(PacketNumbers::new(0));
            let plane = thread::spawn({
                let numbers = numbers.clone();
                move || [numbers.draw(), numbers.draw()].map(|(generation, number)| (number, generation))
            });
            let mut drawn = Vec::new();
            for generation in [0, 1] {
                let number = numbers.draw_in(generation).expect("only this thread changes the generation");
                drawn.push((number, generation));
            }
            drawn.extend(plane.join().expect("no panic"));
            assert_eq!(drawn.len(), 4);
            check(drawn);
        });
    }

    #[test]
    fn two_concurrent_key_updates_draw_unique_packet_numbers() {
        loom::model(|| {
            let numbers = Arc::new(PacketNumbers::new(0));
            let others: Vec<_> = [1, 2]
                .map(|generation| {
                    let numbers = numbers.clone();
                    thread::spawn(move || numbers.draw_in(generation).ok().map(|number| (number, generation)))
                })
                .into();
            let (generation, number) = numbers.draw();
            let mut drawn = vec![(number, generation)];
            drawn.extend(others.into_iter().filter_map(|thread| thread.join().expect("no panic")));
            let skipped = numbers.skip();
            assert!(drawn.iter().all(|(number, _)| *number < skipped));
            assert!(drawn.iter().any(|(_, generation)| *generation == 2));
            check(drawn);
        });
    }

    #[test]
    fn thread_that_reads_a_new_key_generation_sees_its_keys() {
        loom::model(|| {
            let numbers = Arc::new(PacketNumbers::new(0));
            let keys = Arc::new(AtomicU64::new(0));
            let plane = thread::spawn({
                let numbers = numbers.clone();
                let keys = keys.clone();
                move || {
                    let (generation, _) = numbers.draw();
                    assert!(keys.load(Ordering::Relaxed) >= u64::from(generation));
                }
            });
            keys.store(1, Ordering::Relaxed);
            numbers.draw_in(1).expect("no other thread changes the generation");
            plane.join().expect("no panic");
        });
    }
}
