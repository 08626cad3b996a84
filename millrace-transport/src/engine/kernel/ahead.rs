//! Keystreams ahead: a thread of its own computes what the kernel will XOR the next packets with, so that nothing
//! else waits for it, and without a system call for any packet.
//!
//! Each direction of a connection that media passes in has a ring of keystreams; [`Demand`] says how long that is.

use std::{
    sync::{
        Arc, OnceLock, Weak,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread::Thread,
    time::Duration,
};

use millrace_bpf::relay::{Refill, Want};
use millrace_proto::quic::{keys::Secret, keystream::KeystreamKey};
use parking_lot::Mutex;
use tracing::debug;

use super::{Error, Kernel, Line};

/// How often rings are filled up. Twice what is used in this time is kept ahead, so a shorter tick takes less
/// memory, and a longer one fewer wake-ups.
const TICK: Duration = Duration::from_millis(10);

/// Ticks without any stream after which a ring is given back.
const IDLE_TICKS: u32 = 200;

/// Frames of a packet of 1472 bytes, the most that Ethernet takes, with IDs of this relay's own.
const RECEIVED_TEXT: usize = 1472 - 1 - crate::quic::ID_LEN - 1 - 16;

/// One direction of a connection.
#[derive(Default)]
pub struct Ahead {
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

    fn generation(&self) -> u16 {
        self.keys.lock().generation
    }

    fn key(&self, generation: u16) -> Option<Arc<KeystreamKey>> {
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
    fn keep(&self, number: u64, refill: impl FnOnce(u32) -> Refill) -> Kept {
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
struct Kept {
    /// A ring has to be looked after.
    any: bool,
    /// There was no room for all that was wanted.
    short: bool,
}

impl Kept {
    fn or(self, other: Self) -> Self {
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

/// The thread that computes.
#[derive(Default)]
pub(super) struct Computer(OnceLock<Thread>);

impl Computer {
    /// Has it look at once.
    pub fn wake(&self) {
        if let Some(thread) = self.0.get() {
            thread.unpark();
        }
    }

    pub fn start(kernel: &Arc<Kernel>) -> Result<(), Error> {
        let weak = Arc::downgrade(kernel);
        let thread = std::thread::Builder::new()
            .name("keystreams".to_owned())
            .spawn(move || work(&weak))
            .map_err(Error::Thread)?;
        let _ = kernel.computer.0.set(thread.thread().clone()); // once
        Ok(())
    }
}

/// Until the engine is gone.
fn work(kernel: &Weak<Kernel>) {
    while let Some(kernel) = kernel.upgrade() {
        let kept = kernel.lines().iter().map(|line| keep(line)).fold(Kept::default(), Kept::or);
        // What was given back may have to be waited for.
        if kept.short
            && kernel.relay.has_retired_keystreams()
            && let Err(error) = kernel.relay.settle()
        {
            debug!(%error, "cannot wait for the kernel");
        }
        drop(kernel);
        if kept.any {
            std::thread::park_timeout(TICK);
        } else {
            std::thread::park();
        }
    }
}

fn keep(line: &Line) -> Kept {
    let sealing = line.seal.keep(line.downstream.next_number(), |len| {
        let want = Want { len, text_bytes: usize::MAX };
        line.downstream.refill(want, compute(&line.seal))
    });
    let Some(upstream) = line.upstream() else { return sealing };
    let opening = line.open.keep(upstream.expected(), |len| {
        let want = Want { len, text_bytes: RECEIVED_TEXT };
        upstream.refill(line.open.generation(), want, compute(&line.open))
    });
    sealing.or(opening)
}

fn compute(ahead: &Ahead) -> impl millrace_bpf::relay::Compute {
    let mut key = None;
    move |generation, number, once, text| {
        // Of one generation from the first to the last call.
        let key = key.get_or_insert_with(|| ahead.key(generation));
        key.as_ref().is_some_and(|key| {
            key.compute(number, once, text);
            true
        })
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
