//! What packets that were sent at even times, and answered or not, say of a path.

use serde::{Deserialize, Serialize};

/// One that was sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sample {
    /// Since any moment.
    pub sent_us: u64,
    /// `None`: lost, or too late.
    pub answered_us: Option<u64>,
}

/// Times in microseconds.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Report {
    pub sent: u32,
    pub answered: u32,
    pub rtt_min_us: u32,
    /// Median.
    pub rtt_us: u32,
    pub rtt_p95_us: u32,
    /// Of one to the next, on average (RFC 3550's jitter, not smoothed).
    pub rtt_variation_us: u32,
    pub loss_percent: f64,
    /// Packets that are lost in a row, on average, by what it would be if each were lost on its own: 1 is independent loss.
    pub burstiness: f64,
    /// Most in a row.
    pub burst_max: u32,
    /// By which the queue of the path becomes longer in a second, in microseconds: the slope of the round trip.
    pub queue_growth_us_s: f64,
    /// Answers that came before that of an earlier packet.
    pub reordered: u32,
    /// Packets by which the latest of them was overtaken.
    pub reordering_max: u32,
}

impl Report {
    pub fn lost(&self) -> u32 {
        self.sent.saturating_sub(self.answered)
    }

    /// `samples` as they were sent.
    pub fn of(samples: &[Sample]) -> Self {
        let rtts: Vec<u32> = samples.iter().filter_map(Sample::rtt_us).collect();
        let mut sorted = rtts.clone();
        sorted.sort_unstable();
        let quantile = |percent: usize| {
            sorted.get((sorted.len().saturating_sub(1) * percent).div_ceil(100)).copied().unwrap_or_default()
        };
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

impl Sample {
    fn rtt_us(&self) -> Option<u32> {
        u32::try_from(self.answered_us?.saturating_sub(self.sent_us)).ok()
    }
}

fn percent(part: usize, whole: usize) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 * 100.0 / whole as f64 }
}

/// Lengths of the runs of lost packets.
fn bursts(samples: &[Sample]) -> Vec<u32> {
    let runs = samples.chunk_by(|one, other| one.answered_us.is_some() == other.answered_us.is_some());
    let lost = runs.filter(|run| run.first().is_some_and(|sample| sample.answered_us.is_none()));
    lost.map(|run| u32::try_from(run.len()).unwrap_or(u32::MAX)).collect()
}

/// Independent losses of a share p come in runs of 1 / (1 - p).
fn burstiness(bursts: &[u32], sent: usize) -> f64 {
    let lost: u32 = bursts.iter().sum();
    if lost == 0 || lost as usize >= sent {
        return if lost == 0 { 0.0 } else { 1.0 };
    }
    let mean = f64::from(lost) / bursts.len() as f64;
    mean * (1.0 - f64::from(lost) / sent as f64)
}

/// By least squares, of the round trip over the time of sending; in us per s.
fn slope(samples: &[Sample]) -> f64 {
    let points = || {
        let known = samples.iter().filter_map(|it| Some((it.sent_us as f64 / 1e6, f64::from(it.rtt_us()?))));
        known.collect::<Vec<_>>()
    };
    let points = points();
    let count = points.len() as f64;
    let mean = |of: fn(&(f64, f64)) -> f64| points.iter().map(of).sum::<f64>() / count;
    let (time, rtt) = (mean(|it| it.0), mean(|it| it.1));
    let square: f64 = points.iter().map(|it| (it.0 - time).powi(2)).sum();
    let product: f64 = points.iter().map(|it| (it.0 - time) * (it.1 - rtt)).sum();
    if points.len() < 2 || square == 0.0 { 0.0 } else { product / square }
}

/// How many came late, and behind how many that were sent after them.
fn reordering(samples: &[Sample]) -> (u32, u32) {
    let mut arrivals: Vec<(u64, usize)> =
        samples.iter().enumerate().filter_map(|(at, sample)| Some((sample.answered_us?, at))).collect();
    arrivals.sort_unstable();
    let (mut latest, mut late, mut most) = (0, 0, 0);
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

    /// One a millisecond; 0: lost.
    fn samples(rtts_us: &[u64]) -> Vec<Sample> {
        let sample = |(at, rtt): (usize, &u64)| {
            let sent_us = at as u64 * 1000;
            Sample { sent_us, answered_us: (*rtt > 0).then(|| sent_us + rtt) }
        };
        rtts_us.iter().enumerate().map(sample).collect()
    }

    #[test]
    fn round_trips() {
        let report = Report::of(&samples(&[500, 600, 500, 700]));
        assert_eq!((report.sent, report.answered, report.lost()), (4, 4, 0));
        assert_eq!((report.rtt_min_us, report.rtt_us, report.rtt_p95_us), (500, 600, 700));
        assert_eq!(report.rtt_variation_us, 400 / 3);
        assert_eq!((report.loss_percent, report.burstiness, report.burst_max), (0.0, 0.0, 0));
    }

    #[test]
    fn losses_in_a_row_are_told_from_single_ones() {
        let single = Report::of(&samples(&[5, 0, 5, 5, 0, 5, 5, 0, 5, 5]));
        assert_eq!((single.loss_percent, single.burst_max), (30.0, 1));
        assert!(single.burstiness < 1.0, "{single:?}");
        let burst = Report::of(&samples(&[5, 5, 5, 0, 0, 0, 5, 5, 5, 5]));
        assert_eq!((burst.loss_percent, burst.burst_max), (30.0, 3));
        assert!((burst.burstiness - 2.1).abs() < 1e-9, "{burst:?}");
        let all = Report::of(&samples(&[0, 0]));
        assert_eq!((all.loss_percent, all.burstiness, all.burst_max, all.rtt_us), (100.0, 1.0, 2, 0));
    }

    #[test]
    fn a_queue_that_grows_shows() {
        let growing: Vec<u64> = (0..100).map(|at| 1000 + 10 * at).collect();
        // 10 us in each ms.
        assert!((Report::of(&samples(&growing)).queue_growth_us_s - 10_000.0).abs() < 1e-3);
        assert_eq!(Report::of(&samples(&[1000; 50])).queue_growth_us_s, 0.0);
    }

    #[test]
    fn what_overtakes_is_counted() {
        // The first arrives behind the two that were sent after it.
        let report = Report::of(&samples(&[2700, 500, 600, 500]));
        assert_eq!((report.reordered, report.reordering_max), (1, 2));
        assert_eq!(Report::of(&samples(&[500, 500])).reordered, 0);
    }

    #[test]
    fn nothing_is_nothing() {
        assert_eq!(Report::of(&[]), Report::default());
        assert_eq!(Report::of(&samples(&[7])).rtt_us, 7);
    }
}
