//! Latency of all objects that subscribers should have received (owed objects). A lost object counts as infinitely
//! late.

use serde::{Deserialize, Serialize};

use crate::stats::median;

/// Objects owed to subscribers in one run, summed over all subscribers.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct OwedFigures {
    /// Number of owed objects: for each subscriber, those sent from one second after its first object arrived to the
    /// end of the track.
    pub objects: u64,
    /// Number of owed objects that arrived.
    pub delivered: u64,
    /// Number of owed objects that arrived within a second after they were sent.
    pub on_time: u64,
    pub latency_us: Late,
}

/// Percentiles of the latency, us. `None` stands for infinity: the object was lost.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Late {
    pub p50: Option<f64>,
    pub p90: Option<f64>,
    pub p99: Option<f64>,
}

/// A function that returns one of the latency's percentiles.
pub type Percentile = fn(&Late) -> Option<f64>;

pub const PERCENTILES: [(&str, Percentile); 3] =
    [("p50", |late| late.p50), ("p90", |late| late.p90), ("p99", |late| late.p99)];

/// A function that combines the values of all rounds into one, such as the median or the lowest.
type Pick = fn(&[f64]) -> Option<f64>;

impl OwedFigures {
    pub fn delivered_percent(&self) -> f64 {
        100.0 * self.delivered as f64 / self.objects.max(1) as f64
    }

    pub fn on_time_percent(&self) -> f64 {
        100.0 * self.on_time as f64 / self.objects.max(1) as f64
    }

    /// Returns the lowest, the median and the highest of each measured value over the rounds.
    pub fn spread(rounds: &[Self]) -> Option<[Self; 3]> {
        let picks: [Pick; 3] = [
            |values| values.iter().copied().min_by(f64::total_cmp),
            median,
            |values| values.iter().copied().max_by(f64::total_cmp),
        ];
        let reduce = |pick: Pick| {
            let count = |field: fn(&Self) -> u64| {
                pick(&rounds.iter().map(|round| field(round) as f64).collect::<Vec<_>>())
            };
            let late = |field: Percentile| {
                let values = rounds.iter().map(|round| field(&round.latency_us).unwrap_or(f64::INFINITY));
                pick(&values.collect::<Vec<_>>()).filter(|value| value.is_finite())
            };
            Some(Self {
                objects: count(|round| round.objects)?.round() as u64,
                delivered: count(|round| round.delivered)?.round() as u64,
                on_time: count(|round| round.on_time)?.round() as u64,
                latency_us: Late {
                    p50: late(|late| late.p50),
                    p90: late(|late| late.p90),
                    p99: late(|late| late.p99),
                },
            })
        };
        let [low, middle, high] = picks.map(reduce);
        Some([low?, middle?, high?])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn owed(delivered: u64, p99: Option<f64>) -> OwedFigures {
        OwedFigures {
            objects: 100,
            delivered,
            on_time: delivered,
            latency_us: Late { p50: Some(1.0), p90: Some(2.0), p99 },
        }
    }

    #[test]
    fn infinite_p99_latency_counts_as_the_largest_in_the_median_of_rounds() {
        let rounds = [owed(90, None), owed(100, Some(5.0)), owed(95, None)];
        let [low, middle, high] = OwedFigures::spread(&rounds).unwrap();
        assert_eq!((low.latency_us.p99, middle.latency_us.p99, high.latency_us.p99), (Some(5.0), None, None));
        assert_eq!((low.delivered, middle.delivered, high.delivered), (90, 95, 100));
        assert_eq!(OwedFigures::spread(&[]), None);
    }
}
