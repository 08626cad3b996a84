//! Converts times of the BPF program to `Instant`s.

use std::time::{Duration, Instant};

use millrace_transport::clock::monotonic_ns;

/// The longest time, in microseconds, that a packet may have waited in the deferred socket: the socket for packets that
/// need not wake the process.
const MOST_WAITING: u32 = 1_000_000;

/// Converts between CLOCK_MONOTONIC in nanoseconds and `Instant`, which uses the same clock without revealing its
/// value.
pub(super) struct MonotonicClock {
    base: Instant,
    base_ns: u64,
}

impl MonotonicClock {
    pub fn new() -> Self {
        let base_ns = monotonic_ns();
        Self { base: Instant::now(), base_ns }
    }

    /// Converts a time of `CLOCK_MONOTONIC` in nanoseconds. The result is late by the time that passed between the two
    /// clock readings in `new`.
    pub fn instant(&self, time_ns: u64) -> Instant {
        self.base + Duration::from_nanos(time_ns.saturating_sub(self.base_ns))
    }

    /// Returns the time before `now` whose value in microseconds, modulo 2^32, is `micros`.
    pub fn before(&self, now: Instant, micros: u32) -> Option<Instant> {
        let now_ns = u128::from(self.base_ns) + now.saturating_duration_since(self.base).as_nanos();
        let passed = ((now_ns / 1000) as u32).wrapping_sub(micros);
        // No packet waits in the deferred socket for longer than `MOST_WAITING`. A longer time means that `micros`
        // belongs to another packet: arrival times are stored under a packet's last bytes, which may coincide.
        (passed <= MOST_WAITING).then(|| now.checked_sub(Duration::from_micros(passed.into()))).flatten()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernel_timestamp_of_32_bits_is_extended_across_wraparound() {
        let clock = MonotonicClock { base: Instant::now(), base_ns: 1_500 };
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
