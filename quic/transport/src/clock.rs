//! The clock that all timestamps of packets come from.

use std::time::Duration;

use nix::time::{ClockId, clock_gettime};

/// Returns the nanoseconds of `CLOCK_MONOTONIC`. BPF programs in the kernel use the same clock, and all network
/// namespaces of a host share it.
pub fn monotonic_ns() -> u64 {
    // The clock always exists on Linux, so the call cannot fail.
    let now = clock_gettime(ClockId::CLOCK_MONOTONIC).map_or(Duration::ZERO, Duration::from);
    u64::try_from(now.as_nanos()).unwrap_or(u64::MAX)
}
