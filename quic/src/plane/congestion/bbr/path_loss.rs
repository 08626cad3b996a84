//! Estimates the loss that a path has at any sending rate, such as a radio link's: the loss in round trips that show no
//! queue.

use std::time::Duration;

use super::RTT_NOISE;

/// Noise of round-trip samples. A round trip shows no queue if its mean sample exceeds the path's shortest one by no
/// more than this time, or by no more than the shortest one divided by [`RTT_NOISE`].
const NOISE: Duration = Duration::from_millis(3);
/// Smallest number of delivered and lost packets from which loss is estimated.
const LEAST: f64 = 100.0;
/// Factor by which each new round trip lowers the weight of the earlier ones, so that about the last 32 round trips
/// count.
const KEEP: f64 = 1.0 - 1.0 / 32.0;
/// Largest loss fraction that counts as the path's own loss. More loss is caused by a policer, which drops packets
/// above a rate.
const MOST: f64 = 0.15;
/// Number of standard deviations added to the expected number of losses, since losses vary randomly.
const CHANCE: f64 = 3.0;

/// Estimate of a path's own loss, from round trips that showed no queue.
#[derive(Clone, Debug, Default)]
pub struct PathLoss {
    /// Packets delivered in round trips that showed no queue.
    delivered: f64,
    /// Packets lost in round trips that showed no queue.
    lost: f64,
    round: PathLossRound,
}

#[derive(Clone, Debug, Default)]
struct PathLossRound {
    /// Sum of the round-trip time samples in the present round trip.
    trips: Duration,
    samples: u32,
    delivered: u64,
    lost: u64,
}

impl PathLoss {
    /// Counts lost bytes of the present round trip.
    pub fn on_lost(&mut self, bytes: u64) {
        self.round.lost += bytes;
    }

    /// Counts delivered bytes of the present round trip, and the round-trip sample.
    pub fn on_delivered(&mut self, bytes: u64, rtt: Option<Duration>) {
        self.round.delivered += bytes;
        if let Some(rtt) = rtt {
            self.round.trips += rtt;
            self.round.samples += 1;
        }
    }

    /// Ends a round trip. `is_steady` is true if packets were sent no faster than the path had delivered before.
    pub fn end_round(&mut self, min_rtt: Option<Duration>, is_steady: bool, mtu: u64) {
        let round = std::mem::take(&mut self.round);
        self.delivered *= KEEP;
        self.lost *= KEEP;
        let Some(min_rtt) = min_rtt.filter(|_| round.samples > 0) else { return };
        let shows_queue = round.trips / round.samples > min_rtt + NOISE.max(min_rtt / RTT_NOISE);
        let delivered = round.delivered as f64 / mtu as f64;
        let lost = round.lost as f64 / mtu as f64;
        if is_steady && !shows_queue && lost <= MOST * (lost + delivered) {
            self.delivered += delivered;
            self.lost += lost;
        }
    }

    /// Returns how many of `in_flight` bytes the path may have lost even if there was no queue.
    pub fn expected_loss(&self, in_flight: u64, mtu: u64) -> u64 {
        let all = self.delivered + self.lost;
        if all < LEAST {
            return 0;
        }
        let expected = in_flight as f64 / mtu as f64 * self.lost / all;
        // The number of losses is nearly Poisson distributed, so its standard deviation is the root of its mean.
        ((expected + CHANCE * expected.sqrt()) * mtu as f64) as u64
    }
}
