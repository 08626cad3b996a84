//! Needs of applications: four profiles, each with a cost that is computed from the arrival times of bytes.
//!
//! No profile relaxes the guarantees of TCP: all bytes are delivered in order with every candidate. The profiles
//! differ in which delays count.

use serde::{Deserialize, Serialize};

/// Positions in a transfer whose arrival is timed, in KiB: the rungs of a ladder.
pub const LADDER_KIB: [u32; 9] = [1, 4, 16, 64, 256, 1024, 4096, 16_384, 32_768];

/// Multiple of the best time that counts as equally good for insensitive applications.
const PATIENCE: f64 = 2.0;

/// The kind of delay that matters to an application.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TrafficProfile {
    /// Every byte is needed soon (calls, games, shells). The cost is the average delay of all bytes.
    Time,
    /// Beginning and end count equally (video, pages). The cost is the mean of the average delay and the time of the
    /// last byte.
    TimeAndLoss,
    /// Only the complete transfer counts (files, mail). The cost is the time of the last byte.
    Loss,
    /// Applications that nobody waits for (backups, updates). The cost is the time of the last byte, but up to twice
    /// the best time is equally good.
    Insensitive,
}

impl TrafficProfile {
    /// The profiles, in the order of their numbers.
    pub const ALL: [Self; 4] = [Self::Time, Self::TimeAndLoss, Self::Loss, Self::Insensitive];
    /// Names of the profiles, in the same order.
    pub const NAMES: [&str; 4] = ["time", "time-and-loss", "loss", "insensitive"];

    /// Returns the profile's name in settings and reports.
    pub fn name(self) -> &'static str {
        Self::NAMES[self as usize]
    }

    /// Returns the cost in ms of a transfer up to a rung of the ladder, whose bytes arrived as in `came`. `None`:
    /// nothing arrived, or there is no such rung.
    pub fn cost_ms(self, came: &ByteArrivals, rung: usize) -> Option<f64> {
        let whole = came.ms(rung)?;
        Some(match self {
            Self::Time => came.mean_ms(rung)?,
            Self::TimeAndLoss => (came.mean_ms(rung)? + whole) / 2.0,
            Self::Loss | Self::Insensitive => whole,
        })
    }

    /// Returns the utility of a cost, from 0 to 1, relative to the lowest cost of any candidate.
    pub fn utility(self, cost_ms: f64, best_ms: f64) -> f64 {
        let patience = if self == Self::Insensitive { PATIENCE } else { 1.0 };
        // The best candidate has utility 1, one with twice the cost 0.5.
        (best_ms * patience / cost_ms).min(1.0)
    }
}

/// The arrival times of one transfer's bytes.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ByteArrivals {
    /// Time from the SYN to each rung of the ladder, ms; `None`: not reached within the time limit.
    pub rungs_ms: [Option<f64>; LADDER_KIB.len()],
    /// Bytes of the whole transfer. If it ended early, later rungs are extrapolated from these and `over_ms`.
    pub bytes: u64,
    /// Duration of the whole transfer in ms.
    pub over_ms: f64,
}

impl ByteArrivals {
    /// Returns the time of a rung in ms. A rung that was not reached is extrapolated from the average rate. `None`:
    /// no byte arrived.
    fn ms(&self, rung: usize) -> Option<f64> {
        let bytes = f64::from(*LADDER_KIB.get(rung)?) * 1024.0;
        let reached = self.rungs_ms.get(rung).copied().flatten();
        // The whole transfer's average rate holds for the bytes that did not arrive.
        reached.or_else(|| (self.bytes > 0).then(|| self.over_ms * bytes / self.bytes as f64))
    }

    /// Returns the average arrival time of the bytes up to a rung, in ms. Bytes between two rungs are assumed to
    /// arrive evenly.
    fn mean_ms(&self, rung: usize) -> Option<f64> {
        let mut sum = 0.0;
        let mut before_kib = 0.0;
        // The first byte arrives with the first rung, because it is in the same packets.
        let mut before_ms = self.ms(0)?;
        for (at, kib) in LADDER_KIB.iter().enumerate().take(rung + 1) {
            let ms = self.ms(at)?;
            let kib = f64::from(*kib);
            // Trapezoid rule: these bytes arrive evenly between the two times.
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
    fn profile_costs_match_examples_by_hand() {
        // 1 KiB after 100 ms and 4 KiB after 300 ms are 1 KiB at 100 ms and 3 KiB at 200 ms on average.
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
    fn utilities_of_profiles_match_examples() {
        assert_eq!(TrafficProfile::Loss.utility(200.0, 100.0), 0.5);
        assert_eq!(TrafficProfile::Insensitive.utility(200.0, 100.0), 1.0);
        assert_eq!(TrafficProfile::Insensitive.utility(400.0, 100.0), 0.5);
        assert!(TrafficProfile::ALL.iter().all(|it| it.utility(100.0, 100.0) == 1.0));
    }
}
