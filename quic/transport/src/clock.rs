//! The clock that all senders stamp by.

use std::time::Duration;

use nix::time::{ClockId, clock_gettime};

/// Nanoseconds of `CLOCK_MONOTONIC`, which programs in the kernel stamp with and all network namespaces of a host share.
pub fn monotonic_ns() -> u64 {
    // It always exists on Linux.
    let now = clock_gettime(ClockId::CLOCK_MONOTONIC).map_or(Duration::ZERO, Duration::from);
    u64::try_from(now.as_nanos()).unwrap_or(u64::MAX)
}
