//! How far ahead the keystreams of one direction of a connection are computed, and with which keys.

use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicUsize, Ordering},
};

use millrace_quic::{keys::Secret, keystream::KeystreamKey};

use crate::program::Refill;
use parking_lot::Mutex;

/// Ticks without any stream after which a ring is given back.
const IDLE_TICKS: u32 = 200;

/// One direction of a connection.
#[derive(Default)]
pub(super) struct Ahead {
    keys: Mutex<Keys>,
    /// Streams that the kernel forwards.
    streams: AtomicUsize,
    /// Whether the thread looks after it.
    kept: AtomicBool,
    demand: Mutex<Demand>,
}

/// Two generations: the one in use, and the next or the one before.
#[derive(Default)]
struct Keys {
    generation: u16,
    by_parity: [Option<(u16, Arc<KeystreamKey>)>; 2],
}

impl Ahead {
    /// The keys of a generation, in place of those of the last but one.
    pub fn set_keys(&self, generation: u16, secret: &Secret) {
        let key = KeystreamKey::new(secret).map(|key| (generation, Arc::new(key)));
        self.keys.lock().by_parity[usize::from(generation & 1)] = key;
    }

    /// The generation in use.
    pub fn set_generation(&self, generation: u16) {
        self.keys.lock().generation = generation;
    }

    pub fn generation(&self) -> u16 {
        self.keys.lock().generation
    }

    pub fn key(&self, generation: u16) -> Option<Arc<KeystreamKey>> {
        let keys = self.keys.lock();
        let (have, key) = keys.by_parity[usize::from(generation & 1)].as_ref()?;
        (*have == generation).then(|| Arc::clone(key))
    }

    /// One stream more; returns whether the thread has to be told.
    pub fn add_stream(&self) -> bool {
        self.streams.fetch_add(1, Ordering::SeqCst);
        !self.kept.swap(true, Ordering::SeqCst)
    }

    pub fn remove_stream(&self) {
        self.streams.fetch_sub(1, Ordering::SeqCst);
    }

    /// Gives the ring the length that the demand asks for; `number` is the next packet's. Returns what `refill` says
    /// and whether that is less than was wanted.
    pub fn keep(&self, number: u64, refill: impl FnOnce(u32) -> Refill) -> Kept {
        if !self.kept.load(Ordering::SeqCst) {
            return Kept::default();
        }
        let mut demand = self.demand.lock();
        let wanted = demand.tick(number, self.streams.load(Ordering::SeqCst) > 0);
        let refill = refill(wanted);
        demand.len = refill.len;
        if wanted == 0 {
            *demand = Demand::default();
            self.kept.store(false, Ordering::SeqCst);
            // One that came meanwhile found it kept.
            if self.streams.load(Ordering::SeqCst) > 0 {
                self.kept.store(true, Ordering::SeqCst);
            }
        }
        Kept { any: self.kept.load(Ordering::SeqCst), short: refill.len < wanted }
    }
}

/// What the thread found.
#[derive(Clone, Copy, Default)]
pub(super) struct Kept {
    /// A ring has to be looked after.
    pub any: bool,
    /// There was no room for all that was wanted.
    pub short: bool,
}

impl Kept {
    pub fn or(self, other: Self) -> Self {
        Self { any: self.any || other.any, short: self.short || other.short }
    }
}

/// How many packets to be ahead: as many again as the most that were sent within a tick lately.
#[derive(Debug, Default)]
struct Demand {
    /// The next packet number at the last tick.
    number: Option<u64>,
    /// The most packets within a tick, times `UNIT`; it falls by half in some 2 seconds.
    peak: u64,
    /// Length of the ring.
    len: u32,
    idle: u32,
}

impl Demand {
    const UNIT: u64 = 1 << 16;
    const DECAY: u64 = 1 << 8;
    const LEAST: u64 = 8;
    const MOST: u64 = 1 << 12;

    /// The wanted length.
    fn tick(&mut self, number: u64, streams: bool) -> u32 {
        let used = number - self.number.replace(number).unwrap_or(number).min(number);
        self.idle = if streams { 0 } else { self.idle + 1 };
        if self.idle > IDLE_TICKS {
            return 0;
        }
        self.peak = (self.peak - self.peak / Self::DECAY).max(used.saturating_mul(Self::UNIT));
        let wanted = (2 * self.peak).div_ceil(Self::UNIT).clamp(Self::LEAST, Self::MOST);
        let wanted = wanted.next_power_of_two() as u32;
        // It shrinks by half a while after it was half empty, lest it changes back and forth.
        if wanted >= self.len { wanted } else { (2 * wanted).min(self.len) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs ticks of `used` packets each; returns the length at the end.
    fn run(demand: &mut Demand, ticks: usize, used: u64) -> u32 {
        for _ in 0..ticks {
            let number = demand.number.unwrap_or(0) + used;
            demand.len = demand.tick(number, true);
        }
        demand.len
    }

    #[test]
    fn a_ring_is_twice_as_long_as_what_a_tick_uses() {
        let mut demand = Demand::default();
        assert_eq!(run(&mut demand, 1, 1000), 8, "what was before does not count");
        assert_eq!(run(&mut demand, 1, 5), 16);
        assert_eq!(run(&mut demand, 500, 5), 16);
        assert_eq!(run(&mut demand, 1, 40), 128, "a burst");
        assert_eq!(run(&mut demand, 50, 5), 128, "the next burst comes soon");
        assert_eq!(run(&mut demand, 3000, 5), 32, "half empty is not too long");
        assert_eq!(run(&mut demand, 3000, 0), 16);
        assert_eq!(run(&mut demand, 1, 1 << 40), Demand::MOST as u32);
    }

    #[test]
    fn a_ring_is_given_back_when_no_stream_is_left_for_long() {
        let mut demand = Demand::default();
        run(&mut demand, 10, 5);
        assert!((0..IDLE_TICKS).all(|_| demand.tick(50, false) > 0));
        assert!(demand.tick(50, true) > 0, "and another stream in time");
        assert!((0..IDLE_TICKS).all(|_| demand.tick(50, false) > 0));
        assert_eq!(demand.tick(50, false), 0);
    }
}
