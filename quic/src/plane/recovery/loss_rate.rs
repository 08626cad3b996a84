use std::time::{Duration, Instant};

use super::RecoveryCounts;

/// The recent loss rate: the fraction of lost packets among those acknowledged or declared lost in the current and the
/// previous period of `PERIOD`. Packets wrongly declared lost do not count.
#[derive(Clone, Copy, Debug)]
pub(super) struct LossRate {
    began: Instant,
    /// Packet counts at the beginning of the current period.
    last: RecoveryCounts,
    /// Packet counts at the beginning of the previous period.
    before: RecoveryCounts,
}

impl LossRate {
    const PERIOD: Duration = Duration::from_secs(5);
    /// Smallest number of packets from which the loss rate is estimated.
    const ENOUGH: u64 = 20;

    /// Creates the loss rate of a new connection.
    pub fn new(now: Instant) -> Self {
        Self { began: now, last: RecoveryCounts::default(), before: RecoveryCounts::default() }
    }

    /// Notes that an ACK frame arrived. `counts` are the packet counts before the frame is processed.
    pub fn on_ack(&mut self, now: Instant, counts: &RecoveryCounts) {
        let age = now.saturating_duration_since(self.began);
        if age >= Self::PERIOD {
            self.before = if age < 2 * Self::PERIOD { self.last } else { *counts };
            self.last = *counts;
            self.began = now;
        }
    }

    /// Returns the loss rate, 0 to 1, or `None` if there were too few packets.
    pub fn get(&self, counts: &RecoveryCounts) -> Option<f64> {
        let lost = |counts: &RecoveryCounts| counts.packets_lost.saturating_sub(counts.spurious_losses);
        let lost = lost(counts).saturating_sub(lost(&self.before));
        let all = counts.packets_acked.saturating_sub(self.before.packets_acked) + lost;
        (all >= Self::ENOUGH).then(|| lost as f64 / all as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(acked: u64, lost: u64, spurious: u64) -> RecoveryCounts {
        RecoveryCounts {
            packets_acked: acked,
            packets_lost: lost,
            spurious_losses: spurious,
            ..RecoveryCounts::default()
        }
    }

    #[test]
    fn loss_rate_covers_the_last_two_five_second_periods() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut rate = LossRate::new(start);
        assert_eq!(rate.get(&counts(10, 9, 0)), None, "19 packets are too few");
        rate.on_ack(at(1), &counts(0, 0, 0));
        assert_eq!(rate.get(&counts(75, 30, 5)), Some(0.25), "spurious losses do not count");
        rate.on_ack(at(5), &counts(75, 25, 0));
        assert_eq!(rate.get(&counts(75, 25, 0)), Some(0.25), "one period old");
        rate.on_ack(at(10), &counts(175, 25, 0));
        assert_eq!(rate.get(&counts(175, 25, 0)), Some(0.0), "the first period is forgotten");
        rate.on_ack(at(30), &counts(175, 25, 0));
        assert_eq!(rate.get(&counts(190, 30, 0)), Some(0.25), "counts before a pause are forgotten");
    }
}
