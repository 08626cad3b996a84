//! Clocks that programs and userspace share.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use nix::time::{ClockId, clock_gettime};

/// Returns nanoseconds of `CLOCK_MONOTONIC`, which programs stamp with (`bpf_ktime_get_ns`) and all network
/// namespaces of a host share. The clock always exists on Linux.
pub fn monotonic_ns() -> u64 {
    read(ClockId::CLOCK_MONOTONIC)
}

/// Returns the time of that clock in `time` from now.
pub fn in_future(time: Duration) -> u64 {
    monotonic_ns().saturating_add(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX))
}

/// Returns nanoseconds of `CLOCK_MONOTONIC_COARSE`: the same clock at its last tick (`bpf_ktime_get_coarse_ns`).
pub fn coarse_ns() -> u64 {
    read(ClockId::CLOCK_MONOTONIC_COARSE)
}

fn read(clock: ClockId) -> u64 {
    let now = clock_gettime(clock).map_or(Duration::ZERO, Duration::from);
    u64::try_from(now.as_nanos()).unwrap_or(u64::MAX)
}

/// Returns nanoseconds of UNIX time, which programs do not have.
pub fn unix_ns() -> i64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(now.as_nanos()).unwrap_or(i64::MAX)
}
