//! Loss that a path has whatever is sent: of a radio link, say. It is what is lost in rounds that show no queue.

use std::time::Duration;

use super::RTT_NOISE;

/// A round trip on average this much longer than the shortest, or by one part in [`RTT_NOISE`], shows no queue.
const NOISE: Duration = Duration::from_millis(3);
/// Packets without which nothing can be said.
const LEAST: f64 = 100.0;
/// What a round leaves of what is known: some thirty count.
const KEEP: f64 = 1.0 - 1.0 / 32.0;
/// More is no path's own, but somebody's who drops what exceeds a rate.
const MOST: f64 = 0.15;
/// Of what chance makes of a number of losses, in standard deviations.
const CHANCE: f64 = 3.0;

#[derive(Clone, Debug, Default)]
pub struct PathLoss {
    /// Of rounds without a queue, in packets.
    delivered: f64,
    lost: f64,
    round: Round,
}

#[derive(Clone, Debug, Default)]
struct Round {
    trips: Duration,
    samples: u32,
    delivered: u64,
    lost: u64,
}

impl PathLoss {
    pub fn on_lost(&mut self, bytes: u64) {
        self.round.lost += bytes;
    }

    pub fn on_delivered(&mut self, bytes: u64, rtt: Option<Duration>) {
        self.round.delivered += bytes;
        if let Some(rtt) = rtt {
            self.round.trips += rtt;
            self.round.samples += 1;
        }
    }

    /// A round is over. `is_steady`: it was not sent faster than the path has delivered before.
    pub fn end_round(&mut self, min_rtt: Option<Duration>, is_steady: bool, mtu: u64) {
        let round = std::mem::take(&mut self.round);
        self.delivered *= KEEP;
        self.lost *= KEEP;
        let Some(min_rtt) = min_rtt.filter(|_| round.samples > 0) else { return };
        let shows_queue = round.trips / round.samples > min_rtt + NOISE.max(min_rtt / RTT_NOISE);
        let (delivered, lost) = (round.delivered as f64 / mtu as f64, round.lost as f64 / mtu as f64);
        if is_steady && !shows_queue && lost <= MOST * (lost + delivered) {
            self.delivered += delivered;
            self.lost += lost;
        }
    }

    /// Bytes of so many that the path may have lost.
    pub fn of(&self, in_flight: u64, mtu: u64) -> u64 {
        let all = self.delivered + self.lost;
        if all < LEAST {
            return 0;
        }
        let expected = in_flight as f64 / mtu as f64 * self.lost / all;
        ((expected + CHANCE * expected.sqrt()) * mtu as f64) as u64
    }
}
