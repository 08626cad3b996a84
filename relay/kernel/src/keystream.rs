//! Decides how many keystreams are precomputed for one direction of a connection, and keeps the keys for them.

use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicUsize, Ordering},
};

use millrace_quic::{keys::TrafficSecret, keystream::KeystreamKey};

use crate::program::Refill;
use parking_lot::Mutex;

/// Number of ticks (passes of the keystream thread) without a forwarded stream after which a direction's ring of
/// keystreams is freed.
const IDLE_TICKS: u32 = 200;

/// One direction of a connection, for which keystreams are precomputed.
///
/// A direction is *idle*, or *kept*: the keystream thread fills its ring. [`Self::add_stream`] makes it kept and wakes
/// the thread. [`Self::keep`] makes it idle some ticks after the last stream. Both use `kept` and `streams` with
/// sequential consistency: `keep` clears `kept` and then reads `streams`, `add_stream` counts in `streams` and then
/// sets `kept`. So a stream that is added during `keep` is noticed by one of the two methods.
#[derive(Default)]
pub(super) struct KeystreamAhead {
    keys: Mutex<GenerationKeys>,
    /// Number of streams that the kernel forwards in this direction.
    streams: AtomicUsize,
    /// True while the keystream thread keeps this direction's ring filled.
    kept: AtomicBool,
    demand: Mutex<Demand>,
}

/// The keys of two generations: the one in use, and the next or the previous one.
#[derive(Default)]
struct GenerationKeys {
    generation: u16,
    by_parity: [Option<(u16, Arc<KeystreamKey>)>; 2],
}

impl KeystreamAhead {
    /// Sets the keys of a generation. They replace those of the last generation but one.
    pub fn set_keys(&self, generation: u16, secret: &TrafficSecret) {
        let key = Some((generation, Arc::new(KeystreamKey::new(secret))));
        self.keys.lock().by_parity[usize::from(generation & 1)] = key;
    }

    /// Sets the key generation in use. New keystreams are computed with its keys.
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

    /// Counts a new stream in this direction. Returns true if the keystream thread has to be woken.
    pub fn add_stream(&self) -> bool {
        self.streams.fetch_add(1, Ordering::SeqCst);
        !self.kept.swap(true, Ordering::SeqCst)
    }

    pub fn remove_stream(&self) {
        self.streams.fetch_sub(1, Ordering::SeqCst);
    }

    /// Adjusts the length of the keystream ring to the number of packets that were sent recently. `number` is the next
    /// packet number. `refill` is called with the wanted length, and fills the ring.
    pub fn keep(&self, number: u64, refill: impl FnOnce(u32) -> Refill) -> KeystreamPass {
        if !self.kept.load(Ordering::SeqCst) {
            return KeystreamPass::default();
        }
        let mut demand = self.demand.lock();
        let wanted = demand.tick(number, self.streams.load(Ordering::SeqCst) > 0);
        let refill = refill(wanted);
        demand.len = refill.len;
        if wanted == 0 {
            *demand = Demand::default();
            self.kept.store(false, Ordering::SeqCst);
            // `add_stream` may have run just before `kept` was cleared. It then did not wake the keystream thread, so
            // this thread has to go on filling the direction's ring.
            if self.streams.load(Ordering::SeqCst) > 0 {
                self.kept.store(true, Ordering::SeqCst);
            }
        }
        KeystreamPass { any: self.kept.load(Ordering::SeqCst), short: refill.len < wanted }
    }
}

/// The result of one pass over the keystream rings of a connection.
#[derive(Clone, Copy, Default)]
pub(super) struct KeystreamPass {
    /// True if the keystream thread has to visit the connection again, to keep a keystream ring filled.
    pub any: bool,
    /// True if a keystream ring is shorter than wanted, for lack of memory.
    pub short: bool,
}

impl KeystreamPass {
    pub fn or(self, other: Self) -> Self {
        Self { any: self.any || other.any, short: self.short || other.short }
    }
}

/// Computes the wanted length of a keystream ring: twice the most packets that were recently sent within a tick (a pass
/// of the keystream thread).
#[derive(Debug, Default)]
struct Demand {
    /// The next packet number, as it was at the last tick (pass of the keystream thread).
    number: Option<u64>,
    /// The most packets that were sent within one tick (pass of the keystream thread), as a fixed-point number in units
    /// of 1/`UNIT` packet. The value decays by half in about 2 seconds.
    peak: u64,
    /// The present length of the keystream ring.
    len: u32,
    idle: u32,
}

impl Demand {
    const UNIT: u64 = 1 << 16;
    const DECAY: u64 = 1 << 8;
    const LEAST: u64 = 8;
    const MOST: u64 = 1 << 12;

    /// Returns the wanted length of the keystream ring.
    fn tick(&mut self, number: u64, streams: bool) -> u32 {
        let used = number - self.number.replace(number).unwrap_or(number).min(number);
        self.idle = if streams { 0 } else { self.idle + 1 };
        if self.idle > IDLE_TICKS {
            return 0;
        }
        self.peak = (self.peak - self.peak / Self::DECAY).max(used.saturating_mul(Self::UNIT));
        let wanted = (2 * self.peak).div_ceil(Self::UNIT).clamp(Self::LEAST, Self::MOST);
        let wanted = wanted.next_power_of_two() as u32;
        // The keystream ring shrinks only to twice the wanted length, so that its length does not change back and
        // forth.
        if wanted >= self.len { wanted } else { (2 * wanted).min(self.len) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Simulates `ticks` passes of the keystream thread, and `used` sent packets before each. Returns the length of the
    /// keystream ring after the last pass.
    fn run(demand: &mut Demand, ticks: usize, used: u64) -> u32 {
        for _ in 0..ticks {
            let number = demand.number.unwrap_or(0) + used;
            demand.len = demand.tick(number, true);
        }
        demand.len
    }

    #[test]
    fn keystream_ring_holds_twice_the_peak_packets_of_a_timer_tick() {
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
    fn keystream_ring_is_freed_after_idle_ticks_without_streams() {
        let mut demand = Demand::default();
        run(&mut demand, 10, 5);
        assert!((0..IDLE_TICKS).all(|_| demand.tick(50, false) > 0));
        assert!(demand.tick(50, true) > 0, "and another stream in time");
        assert!((0..IDLE_TICKS).all(|_| demand.tick(50, false) > 0));
        assert_eq!(demand.tick(50, false), 0);
    }
}
