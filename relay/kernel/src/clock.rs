//! The program's times as `Instant`s.

use std::time::{Duration, Instant};

use millrace_transport::clock::monotonic_ns;

/// Microseconds.
const MOST_WAITING: u32 = 1_000_000;

/// `Instant` is of the same clock, CLOCK_MONOTONIC, but does not say its time.
pub(super) struct Clock {
    base: Instant,
    base_ns: u64,
}

impl Clock {
    pub fn new() -> Self {
        let base_ns = monotonic_ns();
        Self { base: Instant::now(), base_ns }
    }

    /// Too late by the time that passed between the two readings in `new`.
    pub fn instant(&self, time_ns: u64) -> Instant {
        self.base + Duration::from_nanos(time_ns.saturating_sub(self.base_ns))
    }

    /// The time not long before `now` that is `micros` microseconds, modulo 2^32.
    pub fn before(&self, now: Instant, micros: u32) -> Option<Instant> {
        let now_ns = u128::from(self.base_ns) + now.saturating_duration_since(self.base).as_nanos();
        let passed = ((now_ns / 1000) as u32).wrapping_sub(micros);
        // Nothing waits for longer than that: another packet ended with the same bytes.
        (passed <= MOST_WAITING).then(|| now.checked_sub(Duration::from_micros(passed.into()))).flatten()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_in_32_bits_is_found_again() {
        let clock = Clock { base: Instant::now(), base_ns: 1_500 };
        let at = |micros| clock.base + Duration::from_micros(micros);
        let wraps = 1 << 32;
        for (now, micros, want) in [
            (at(9), 7, Some(at(6))),
            (at(9), 10, Some(at(9))),
            (at(wraps + 9), 7, Some(at(wraps + 6))),
            (at(wraps + 9), u32::MAX, Some(at(wraps - 2))),
            (at(MOST_WAITING.into()), 1, Some(at(0))),
            (at(MOST_WAITING.into()), 0, None),
            (at(9), 11, None),
        ] {
            assert_eq!(clock.before(now, micros), want, "{micros}");
        }
    }
}
