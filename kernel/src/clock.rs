//! Clocks that BPF programs and userspace share.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use nix::time::{ClockId, clock_gettime};

/// Returns the time of `CLOCK_MONOTONIC` in nanoseconds. BPF programs read the same clock by `bpf_ktime_get_ns`, in
/// every network namespace of the host.
pub fn monotonic_ns() -> u64 {
    read(ClockId::CLOCK_MONOTONIC)
}

/// Returns the present time of `CLOCK_MONOTONIC` plus `time`, in nanoseconds.
pub fn in_future(time: Duration) -> u64 {
    monotonic_ns().saturating_add(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX))
}

/// Returns the time of `CLOCK_MONOTONIC` at the last tick, in nanoseconds. BPF programs read it by
/// `bpf_ktime_get_coarse_ns`.
pub fn coarse_ns() -> u64 {
    read(ClockId::CLOCK_MONOTONIC_COARSE)
}

fn read(clock: ClockId) -> u64 {
    // clock_gettime cannot fail here, because every Linux has the clocks that this module reads.
    let now = clock_gettime(clock).map_or(Duration::ZERO, Duration::from);
    u64::try_from(now.as_nanos()).unwrap_or(u64::MAX)
}

/// Returns the UNIX time in nanoseconds, which BPF programs cannot read.
pub fn unix_ns() -> i64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(now.as_nanos()).unwrap_or(i64::MAX)
}
