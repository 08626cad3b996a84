//! Statistics of a path, computed from probe packets that were sent at even intervals and were answered or lost.

use serde::{Deserialize, Serialize};

/// One probe packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PathSample {
    /// Sending time in µs, from any fixed origin.
    pub sent_us: u64,
    /// Arrival time of the answer in µs, from the same origin as `sent_us`; `None` if the answer was lost or late.
    pub answered_us: Option<u64>,
}

/// Statistics of a path.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PathReport {
    /// Packets sent.
    pub sent: u32,
    /// Packets answered.
    pub answered: u32,
    /// Shortest round trip, microseconds.
    pub rtt_min_us: u32,
    /// Median round trip, microseconds.
    pub rtt_us: u32,
    /// Round trip that 95 % of the answered packets did not exceed, microseconds.
    pub rtt_p95_us: u32,
    /// Average difference between consecutive round trips, microseconds (the jitter of RFC 3550, not smoothed).
    pub rtt_variation_us: u32,
    /// Packets without an answer, in percent of the sent ones.
    pub loss_percent: f64,
    /// Burstiness of losses: the average length of a run of losses, divided by its length if losses were independent. 1
    /// means independent.
    pub burstiness: f64,
    /// Length of the longest run of lost packets.
    pub burst_max: u32,
    /// Growth of the path's queue: the slope of the round trip, microseconds per second.
    pub queue_growth_us_s: f64,
    /// Answers that arrived after the answer to a later packet.
    pub reordered: u32,
    /// Largest number of later packets whose answers overtook the answer of one packet.
    pub reordering_max: u32,
}

impl PathReport {
    /// Returns how many packets were not answered.
    pub fn lost(&self) -> u32 {
        self.sent.saturating_sub(self.answered)
    }

    /// Computes the statistics. `samples` have to be in the order of sending.
    pub fn from_samples(samples: &[PathSample]) -> Self {
        let rtts: Vec<u32> = samples.iter().filter_map(PathSample::rtt_us).collect();
        let mut sorted = rtts.clone();
        sorted.sort_unstable();
        // Quantiles use the nearest rank, rounded up, so the median of two values is the larger one.
        let quantile = |percent: usize| {
            sorted.get((sorted.len().saturating_sub(1) * percent).div_ceil(100)).copied().unwrap_or_default()
        };
        // Lost packets have no round trip, so two consecutive values may belong to packets that were not sent one after
        // another.
        let steps = rtts.windows(2).map(|pair| u64::from(pair[0].abs_diff(pair[1])));
        let variation = steps.sum::<u64>() / (rtts.len().max(2) as u64 - 1);
        let count = |number: usize| u32::try_from(number).unwrap_or(u32::MAX);
        let (reordered, reordering_max) = reordering(samples);
        let bursts = bursts(samples);
        Self {
            sent: count(samples.len()),
            answered: count(rtts.len()),
            rtt_min_us: quantile(0),
            rtt_us: quantile(50),
            rtt_p95_us: quantile(95),
            rtt_variation_us: u32::try_from(variation).unwrap_or(u32::MAX),
            loss_percent: percent(samples.len() - rtts.len(), samples.len()),
            burstiness: burstiness(&bursts, samples.len()),
            burst_max: bursts.iter().copied().max().unwrap_or_default(),
            queue_growth_us_s: slope(samples),
            reordered,
            reordering_max,
        }
    }
}

impl PathSample {
    fn rtt_us(&self) -> Option<u32> {
        u32::try_from(self.answered_us?.saturating_sub(self.sent_us)).ok()
    }
}

fn percent(part: usize, whole: usize) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 * 100.0 / whole as f64 }
}

/// Returns the lengths of all runs of lost packets.
fn bursts(samples: &[PathSample]) -> Vec<u32> {
    let runs = samples.chunk_by(|one, other| one.answered_us.is_some() == other.answered_us.is_some());
    let lost = runs.filter(|run| run.first().is_some_and(|sample| sample.answered_us.is_none()));
    lost.map(|run| u32::try_from(run.len()).unwrap_or(u32::MAX)).collect()
}

/// Returns the burstiness of losses. If losses with share p are independent, runs have 1 / (1 - p) packets on average.
fn burstiness(bursts: &[u32], sent: usize) -> f64 {
    let lost: u32 = bursts.iter().sum();
    if lost == 0 || lost as usize >= sent {
        // Without any loss there is no run. If all packets are lost, the only run does not show burstiness.
        return if lost == 0 { 0.0 } else { 1.0 };
    }
    let mean = f64::from(lost) / bursts.len() as f64;
    mean * (1.0 - f64::from(lost) / sent as f64)
}

/// Returns the slope of the round trip over the time of sending, by least squares, in µs per s.
fn slope(samples: &[PathSample]) -> f64 {
    let points = || {
        let known = samples.iter().filter_map(|it| Some((it.sent_us as f64 / 1e6, f64::from(it.rtt_us()?))));
        known.collect::<Vec<_>>()
    };
    let points = points();
    let count = points.len() as f64;
    let mean = |of: fn(&(f64, f64)) -> f64| points.iter().map(of).sum::<f64>() / count;
    let time = mean(|it| it.0);
    let rtt = mean(|it| it.1);
    let square: f64 = points.iter().map(|it| (it.0 - time).powi(2)).sum();
    let product: f64 = points.iter().map(|it| (it.0 - time) * (it.1 - rtt)).sum();
    // A slope needs at least two points with different times.
    if points.len() < 2 || square == 0.0 { 0.0 } else { product / square }
}

/// Returns how many answers arrived out of order, and the largest number of answers to later packets that overtook a
/// single answer.
fn reordering(samples: &[PathSample]) -> (u32, u32) {
    let mut arrivals: Vec<(u64, usize)> =
        samples.iter().enumerate().filter_map(|(at, sample)| Some((sample.answered_us?, at))).collect();
    // Samples are sorted by arrival. An answer is out of order if an answer to a later packet arrived before it.
    arrivals.sort_unstable();
    let mut latest = 0;
    let mut late = 0;
    let mut most = 0;
    for (_, at) in arrivals {
        if at < latest {
            late += 1;
            most = most.max(u32::try_from(latest - at).unwrap_or(u32::MAX));
        }
        latest = latest.max(at);
    }
    (late, most)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns samples of packets sent every millisecond, with these round trips in µs; 0 means lost.
    fn samples(rtts_us: &[u64]) -> Vec<PathSample> {
        let sample = |(at, rtt): (usize, &u64)| {
            let sent_us = at as u64 * 1000;
            PathSample { sent_us, answered_us: (*rtt > 0).then(|| sent_us + rtt) }
        };
        rtts_us.iter().enumerate().map(sample).collect()
    }

    #[test]
    fn round_trip_statistics_are_computed() {
        let report = PathReport::from_samples(&samples(&[500, 600, 500, 700]));
        assert_eq!((report.sent, report.answered, report.lost()), (4, 4, 0));
        assert_eq!((report.rtt_min_us, report.rtt_us, report.rtt_p95_us), (500, 600, 700));
        assert_eq!(report.rtt_variation_us, 400 / 3);
        assert_eq!((report.loss_percent, report.burstiness, report.burst_max), (0.0, 0.0, 0));
    }

    #[test]
    fn burst_losses_are_distinguished_from_single_ones() {
        let single = PathReport::from_samples(&samples(&[5, 0, 5, 5, 0, 5, 5, 0, 5, 5]));
        assert_eq!((single.loss_percent, single.burst_max), (30.0, 1));
        assert!(single.burstiness < 1.0, "{single:?}");
        let burst = PathReport::from_samples(&samples(&[5, 5, 5, 0, 0, 0, 5, 5, 5, 5]));
        assert_eq!((burst.loss_percent, burst.burst_max), (30.0, 3));
        assert!((burst.burstiness - 2.1).abs() < 1e-9, "{burst:?}");
        let all = PathReport::from_samples(&samples(&[0, 0]));
        assert_eq!((all.loss_percent, all.burstiness, all.burst_max, all.rtt_us), (100.0, 1.0, 2, 0));
    }

    #[test]
    fn growing_queue_is_measured_as_a_rising_round_trip() {
        let growing: Vec<u64> = (0..100).map(|at| 1000 + 10 * at).collect();
        // One packet is sent each ms, and each round trip is 10 µs longer than the previous one.
        assert!((PathReport::from_samples(&samples(&growing)).queue_growth_us_s - 10_000.0).abs() < 1e-3);
        assert_eq!(PathReport::from_samples(&samples(&[1000; 50])).queue_growth_us_s, 0.0);
    }

    #[test]
    fn reordered_answers_are_counted() {
        // The first packet arrives after the two that were sent after it.
        let report = PathReport::from_samples(&samples(&[2700, 500, 600, 500]));
        assert_eq!((report.reordered, report.reordering_max), (1, 2));
        assert_eq!(PathReport::from_samples(&samples(&[500, 500])).reordered, 0);
    }

    #[test]
    fn path_report_without_samples_is_empty() {
        assert_eq!(PathReport::from_samples(&[]), PathReport::default());
        assert_eq!(PathReport::from_samples(&samples(&[7])).rtt_us, 7);
    }
}
