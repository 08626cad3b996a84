//! Computes shares of one CPU for reports.

use std::time::Duration;

/// Returns `part_ns` as a fraction of the period, rounded.
pub fn share(part_ns: u64, period: Duration) -> f64 {
    rounded(part_ns as f64 / ns(period).max(1) as f64)
}

/// Rounds to a millionth, which keeps reports short and is finer than the clocks.
pub fn rounded(share: f64) -> f64 {
    (share * 1e6).round() / 1e6
}

pub fn ns(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}
