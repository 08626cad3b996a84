//! What applications want of their connections, as a cost of the times at which bytes came: the seed's four profiles.
//!
//! None of them relaxes what TCP promises: bytes come whole and in order by every arm. What differs is which delays hurt.

use serde::{Deserialize, Serialize};

/// Bytes whose arrival is timed in each measured transfer, in KiB.
pub const LADDER_KIB: [u32; 9] = [1, 4, 16, 64, 256, 1024, 4096, 16_384, 32_768];

/// Who is insensitive does not mind so many times the best time.
const PATIENCE: f64 = 2.0;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Profile {
    /// Each byte is wanted as soon as it can be (calls, games, shells): how late bytes are, on average.
    Time,
    /// The beginning and the end count (video, pages): that, and when all is there, alike.
    TimeAndLoss,
    /// The whole counts (files, mail): when all is there.
    Loss,
    /// Nobody waits (backups, updates): when all is there, but twice the best time is as good.
    Insensitive,
}

impl Profile {
    pub const ALL: [Self; 4] = [Self::Time, Self::TimeAndLoss, Self::Loss, Self::Insensitive];
    /// In the same order.
    pub const NAMES: [&str; 4] = ["time", "time-and-loss", "loss", "insensitive"];

    pub fn name(self) -> &'static str {
        Self::NAMES[self as usize]
    }

    /// Cost in milliseconds of a transfer of as many bytes as the ladder's rungs up to `rung`, whose times are `came`. `None`: not
    /// that many came, nor is it known how long they would have taken.
    pub fn cost_ms(self, came: &Came, rung: usize) -> Option<f64> {
        let whole = came.ms(rung)?;
        Some(match self {
            Self::Time => came.mean_ms(rung)?,
            Self::TimeAndLoss => (came.mean_ms(rung)? + whole) / 2.0,
            Self::Loss | Self::Insensitive => whole,
        })
    }

    /// From 0 to 1, of a cost beside the least that any arm has.
    pub fn utility(self, cost_ms: f64, best_ms: f64) -> f64 {
        let patience = if self == Self::Insensitive { PATIENCE } else { 1.0 };
        (best_ms * patience / cost_ms).min(1.0)
    }
}

/// When bytes of one transfer came.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Came {
    /// Since the SYN, for each rung of the ladder; not beyond the transfer's time limit.
    pub rungs_ms: [Option<f64>; LADDER_KIB.len()],
    /// All that came, and in what time: by these a transfer that was over too early is drawn on.
    pub bytes: u64,
    pub over_ms: f64,
}

impl Came {
    /// Of a rung that was not reached, as if it had gone on as fast as on average. None came: there is no average.
    fn ms(&self, rung: usize) -> Option<f64> {
        let bytes = f64::from(*LADDER_KIB.get(rung)?) * 1024.0;
        let reached = self.rungs_ms.get(rung).copied().flatten();
        reached.or_else(|| (self.bytes > 0).then(|| self.over_ms * bytes / self.bytes as f64))
    }

    /// Of the bytes up to a rung; between two rungs they come evenly.
    fn mean_ms(&self, rung: usize) -> Option<f64> {
        let (mut sum, mut before_kib) = (0.0, 0.0);
        // The first byte is taken to come with the first rung: it is in the same packets.
        let mut before_ms = self.ms(0)?;
        for (at, kib) in LADDER_KIB.iter().enumerate().take(rung + 1) {
            let (ms, kib) = (self.ms(at)?, f64::from(*kib));
            sum += (kib - before_kib) * (ms + before_ms) / 2.0;
            (before_ms, before_kib) = (ms, kib);
        }
        Some(sum / before_kib)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn came(ms: &[f64]) -> Came {
        let mut came = Came::default();
        came.rungs_ms.iter_mut().zip(ms).for_each(|(rung, ms)| *rung = Some(*ms));
        came
    }

    #[test]
    fn costs_by_hand() {
        // 1 KiB after 100 ms, 4 KiB after 300: 1 at 100 and 3 at 200 on average.
        let came = came(&[100.0, 300.0]);
        let table = [
            (Profile::Time, 175.0),
            (Profile::TimeAndLoss, 237.5),
            (Profile::Loss, 300.0),
            (Profile::Insensitive, 300.0),
        ];
        for (profile, wanted) in table {
            assert_eq!(profile.cost_ms(&came, 1), Some(wanted), "{}", profile.name());
            assert_eq!(profile.cost_ms(&came, 2), None, "16 KiB did not come");
            assert_eq!(profile.cost_ms(&came, 99), None);
        }
    }

    #[test]
    fn one_that_was_over_is_drawn_on() {
        let came = Came { bytes: 8 << 10, over_ms: 60_000.0, ..came(&[100.0, 300.0]) };
        assert_eq!(Profile::Loss.cost_ms(&came, 2), Some(120_000.0), "twice the bytes, twice the time");
    }

    #[test]
    fn utilities() {
        assert_eq!(Profile::Loss.utility(200.0, 100.0), 0.5);
        assert_eq!(Profile::Insensitive.utility(200.0, 100.0), 1.0);
        assert_eq!(Profile::Insensitive.utility(400.0, 100.0), 0.5);
        assert!(Profile::ALL.iter().all(|it| it.utility(100.0, 100.0) == 1.0));
    }
}
