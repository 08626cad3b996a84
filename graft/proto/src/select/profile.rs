//! Traffic profiles, which state what delay matters to an application. Each of the four profiles computes a cost from
//! the arrival times of bytes.
//!
//! No profile relaxes the guarantees of TCP: all bytes are delivered in order with every candidate. The profiles differ
//! only in which delays count.

use serde::{Deserialize, Serialize};

/// Sizes in KiB at which a transfer's progress is timed. An index into this list is called a rung.
pub const LADDER_KIB: [u32; 9] = [1, 4, 16, 64, 256, 1024, 4096, 16_384, 32_768];

/// Factor by which a transfer may last longer than with the best candidate (congestion control or tunnel) and still
/// count as equally good, if the application's traffic profile is insensitive to delay.
const PATIENCE: f64 = 2.0;

/// The kind of delay that matters to an application.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TrafficProfile {
    /// Every byte is needed soon (calls, games, shells). The cost is the average delay of all bytes.
    Time,
    /// The beginning and the end of a transfer count equally (video, web pages). The cost is the mean of the average
    /// delay and the time of the last byte.
    TimeAndLoss,
    /// Only the complete transfer counts (files, mail). The cost is the time of the last byte.
    Loss,
    /// The application runs in the background (backups, updates). The cost is the time of the last byte, but all times
    /// up to twice the best one are equally good.
    Insensitive,
}

impl TrafficProfile {
    /// The traffic profiles, in the order of their numbers (`TrafficProfile as usize`).
    pub const ALL: [Self; 4] = [Self::Time, Self::TimeAndLoss, Self::Loss, Self::Insensitive];
    /// Names of the traffic profiles, in the order of their numbers.
    pub const NAMES: [&str; 4] = ["time", "time-and-loss", "loss", "insensitive"];

    /// Returns the profile's name in settings and reports.
    pub fn name(self) -> &'static str {
        Self::NAMES[self as usize]
    }

    /// Returns the cost in ms of a transfer of the size at index `rung` of [`LADDER_KIB`], given the arrival times
    /// `came`. `None` means that nothing arrived, or that there is no such size.
    pub fn cost_ms(self, came: &ByteArrivals, rung: usize) -> Option<f64> {
        let whole = came.ms(rung)?;
        Some(match self {
            Self::Time => came.mean_ms(rung)?,
            Self::TimeAndLoss => (came.mean_ms(rung)? + whole) / 2.0,
            Self::Loss | Self::Insensitive => whole,
        })
    }

    /// Returns the utility of a cost, from 0 to 1, relative to the lowest cost that any candidate had.
    pub fn utility(self, cost_ms: f64, best_ms: f64) -> f64 {
        let patience = if self == Self::Insensitive { PATIENCE } else { 1.0 };
        // The candidate with the lowest cost has utility 1; twice the lowest cost has utility 0.5.
        (best_ms * patience / cost_ms).min(1.0)
    }
}

/// The arrival times of one transfer's bytes.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ByteArrivals {
    /// Time in ms from the SYN until the bytes of each size in [`LADDER_KIB`] had arrived; `None`: not within the time
    /// limit.
    pub rungs_ms: [Option<f64>; LADDER_KIB.len()],
    /// Bytes of the whole transfer. If the transfer ended early, the times of larger sizes are extrapolated from these
    /// bytes and `over_ms`.
    pub bytes: u64,
    /// Duration of the whole transfer in ms.
    pub over_ms: f64,
}

impl ByteArrivals {
    /// Returns the time in ms at which the size at index `rung` of [`LADDER_KIB`] had arrived. If it never did, the
    /// time is extrapolated from the average rate. `None` means that no byte arrived.
    fn ms(&self, rung: usize) -> Option<f64> {
        let bytes = f64::from(*LADDER_KIB.get(rung)?) * 1024.0;
        let reached = self.rungs_ms.get(rung).copied().flatten();
        // Bytes that did not arrive are assumed to continue at the transfer's average rate.
        reached.or_else(|| (self.bytes > 0).then(|| self.over_ms * bytes / self.bytes as f64))
    }

    /// Returns the average arrival time in ms of the bytes up to the size at index `rung` of [`LADDER_KIB`]. Bytes
    /// between two such sizes are assumed to arrive evenly.
    fn mean_ms(&self, rung: usize) -> Option<f64> {
        let mut sum = 0.0;
        let mut before_kib = 0.0;
        // The first byte arrives at the same time as the first KiB, since both are in the same packets.
        let mut before_ms = self.ms(0)?;
        for (at, kib) in LADDER_KIB.iter().enumerate().take(rung + 1) {
            let ms = self.ms(at)?;
            let kib = f64::from(*kib);
            // Bytes between two sizes of `LADDER_KIB` are assumed to arrive evenly, so their average time is the mean
            // of both sizes' times (trapezoid rule).
            sum += (kib - before_kib) * (ms + before_ms) / 2.0;
            (before_ms, before_kib) = (ms, kib);
        }
        Some(sum / before_kib)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn came(ms: &[f64]) -> ByteArrivals {
        let mut came = ByteArrivals::default();
        came.rungs_ms.iter_mut().zip(ms).for_each(|(rung, ms)| *rung = Some(*ms));
        came
    }

    #[test]
    fn transfer_cost_of_each_traffic_profile_is_computed_from_arrivals() {
        // 1 KiB arrives after 100 ms, and all 4 KiB after 300 ms. On average that is 1 KiB at 100 ms and 3 KiB at 200
        // ms.
        let came = came(&[100.0, 300.0]);
        let table = [
            (TrafficProfile::Time, 175.0),
            (TrafficProfile::TimeAndLoss, 237.5),
            (TrafficProfile::Loss, 300.0),
            (TrafficProfile::Insensitive, 300.0),
        ];
        for (profile, wanted) in table {
            assert_eq!(profile.cost_ms(&came, 1), Some(wanted), "{}", profile.name());
            assert_eq!(profile.cost_ms(&came, 2), None, "16 KiB did not come");
            assert_eq!(profile.cost_ms(&came, 99), None);
        }
    }

    #[test]
    fn cost_of_a_transfer_that_ended_early_is_extrapolated() {
        let came = ByteArrivals { bytes: 8 << 10, over_ms: 60_000.0, ..came(&[100.0, 300.0]) };
        assert_eq!(
            TrafficProfile::Loss.cost_ms(&came, 2),
            Some(120_000.0),
            "twice the bytes, twice the time"
        );
    }

    #[test]
    fn utility_falls_with_cost_relative_to_the_best_by_traffic_profile() {
        assert_eq!(TrafficProfile::Loss.utility(200.0, 100.0), 0.5);
        assert_eq!(TrafficProfile::Insensitive.utility(200.0, 100.0), 1.0);
        assert_eq!(TrafficProfile::Insensitive.utility(400.0, 100.0), 0.5);
        assert!(TrafficProfile::ALL.iter().all(|it| it.utility(100.0, 100.0) == 1.0));
    }
}
