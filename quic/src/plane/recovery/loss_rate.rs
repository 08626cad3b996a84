use std::time::{Duration, Instant};

use super::Counts;

/// The share of packets that were lost lately: of those that were acknowledged or declared lost in the current period and the
/// one before. Packets that were wrongly declared lost do not count.
#[derive(Clone, Copy, Debug)]
pub(super) struct LossRate {
    began: Instant,
    /// Counts when the current period began, and the one before it.
    last: Counts,
    before: Counts,
}

impl LossRate {
    const PERIOD: Duration = Duration::from_secs(5);
    /// Of fewer packets nothing can be said.
    const ENOUGH: u64 = 20;

    pub fn new(now: Instant) -> Self {
        Self { began: now, last: Counts::default(), before: Counts::default() }
    }

    /// Something is acknowledged; `counts` are those from before.
    pub fn on_ack(&mut self, now: Instant, counts: &Counts) {
        let age = now.saturating_duration_since(self.began);
        if age >= Self::PERIOD {
            self.before = if age < 2 * Self::PERIOD { self.last } else { *counts };
            self.last = *counts;
            self.began = now;
        }
    }

    pub fn get(&self, counts: &Counts) -> Option<f64> {
        let lost = |counts: &Counts| counts.packets_lost.saturating_sub(counts.spurious_losses);
        let lost = lost(counts).saturating_sub(lost(&self.before));
        let all = counts.packets_acked.saturating_sub(self.before.packets_acked) + lost;
        (all >= Self::ENOUGH).then(|| lost as f64 / all as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(acked: u64, lost: u64, spurious: u64) -> Counts {
        Counts { packets_acked: acked, packets_lost: lost, spurious_losses: spurious, ..Counts::default() }
    }

    #[test]
    fn loss_is_of_the_last_two_periods() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut rate = LossRate::new(start);
        assert_eq!(rate.get(&counts(10, 9, 0)), None, "too few");
        rate.on_ack(at(1), &counts(0, 0, 0));
        assert_eq!(rate.get(&counts(75, 30, 5)), Some(0.25), "late ones do not count");
        rate.on_ack(at(5), &counts(75, 25, 0));
        assert_eq!(rate.get(&counts(75, 25, 0)), Some(0.25), "one period old");
        rate.on_ack(at(10), &counts(175, 25, 0));
        assert_eq!(rate.get(&counts(175, 25, 0)), Some(0.0), "the first period is forgotten");
        rate.on_ack(at(30), &counts(175, 25, 0));
        assert_eq!(rate.get(&counts(190, 30, 0)), Some(0.25), "nothing of before a pause");
    }
}
