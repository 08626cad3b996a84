//! Shares of one CPU, as reports have them.

use std::time::Duration;

/// What a part of a period is of it.
pub fn share(part_ns: u64, period: Duration) -> f64 {
    rounded(part_ns as f64 / ns(period).max(1) as f64)
}

/// In steps of a millionth, which is finer than the clocks: reports stay short.
pub fn rounded(share: f64) -> f64 {
    (share * 1e6).round() / 1e6
}

pub fn ns(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}
