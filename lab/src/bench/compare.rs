//! Compares Millrace with the best other relay in the same rounds: ratios of latencies, with confidence intervals.

use serde::Serialize;
use serde_json::{Map, Value, json};

use super::contender::Contender;
use super::figures::RelayRow;
use super::owed::{PERCENTILES, Percentile};
use crate::stats::median;

/// The ratio of two relays' latencies in the same rounds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Ratio {
    /// Geometric mean of the ratios over the rounds.
    pub mean: f64,
    /// 95 % confidence interval of the mean; `None` with one round.
    pub interval: Option<[f64; 2]>,
}

impl Ratio {
    /// Computes the ratio from pairs of latencies, one per round. `None` stands for an infinite latency and counts as
    /// `limit`, which is longer than any measured one. Returns `None` without pairs.
    pub fn from_pairs(pairs: &[(Option<f64>, Option<f64>)], limit: f64) -> Option<Self> {
        let logs: Vec<f64> = pairs
            .iter()
            .map(|(one, other)| (one.unwrap_or(limit) / other.unwrap_or(limit)).ln())
            .filter(|log| log.is_finite())
            .collect();
        let n = logs.len() as f64;
        let mean = logs.iter().sum::<f64>() / n;
        if logs.is_empty() {
            return None;
        }
        let interval = (logs.len() > 1).then(|| {
            let variance = logs.iter().map(|log| (log - mean).powi(2)).sum::<f64>() / (n - 1.0);
            let half = student(logs.len() - 1) * (variance / n).sqrt();
            [(mean - half).exp(), (mean + half).exp()]
        });
        Some(Self { mean: mean.exp(), interval })
    }
}

/// Returns the 97.5 % quantile of Student's t distribution.
fn student(degrees: usize) -> f64 {
    const QUANTILES: [f64; 15] = [
        12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145,
        2.131,
    ];
    // For more degrees of freedom than the table has, the quantile falls from 2.120 (16 degrees) to 1.960 (infinitely
    // many).
    QUANTILES.get(degrees.saturating_sub(1)).copied().unwrap_or(2.12)
}

/// The comparison of Millrace's latency at one percentile, for one link and load, with the other relay whose latency is
/// lowest there.
#[derive(Debug, Clone, PartialEq)]
pub struct RelayComparison {
    pub percentile: &'static str,
    pub peer: Contender,
    pub ratio: Ratio,
}

/// Compares Millrace's latencies (`one`) with those of the best other relay, at each percentile. `rows` has the results
/// of all relays; only those with the same link and load are compared. `limit` stands for an infinite latency, and is
/// longer than any run, us.
pub fn with_best_peer(one: &RelayRow, rows: &[RelayRow], limit: f64) -> Vec<RelayComparison> {
    if one.contender.engine().is_none() {
        return Vec::new();
    }
    let is_peer = |row: &&RelayRow| {
        let is_relay = row.contender.engine().is_none() && !row.contender.is_plain();
        is_relay && (row.profile, row.load) == (one.profile, one.load)
    };
    let beside = |&(name, percentile): &(&'static str, Percentile)| {
        let level = |row: &&RelayRow| median(&row.late(percentile, limit)).unwrap_or(f64::INFINITY);
        let peer = rows.iter().filter(is_peer).min_by(|a, b| level(a).total_cmp(&level(b)))?;
        let ratio = Ratio::from_pairs(&one.pairs(peer, percentile), limit)?;
        Some(RelayComparison { percentile: name, peer: peer.contender, ratio })
    };
    PERCENTILES.iter().filter_map(beside).collect()
}

impl RelayRow {
    /// Returns this percentile of the latency in each successful round, us. An infinite latency is replaced by `limit`.
    fn late(&self, percentile: Percentile, limit: f64) -> Vec<f64> {
        let owed = self.rounds.iter().flatten().filter_map(|figures| figures.owed);
        owed.map(|owed| percentile(&owed.latency_us).unwrap_or(limit)).collect()
    }

    /// Returns the latencies of both rows for each round in which both succeeded.
    fn pairs(&self, other: &Self, percentile: Percentile) -> Vec<(Option<f64>, Option<f64>)> {
        let owed = |row: &Self| -> Vec<_> {
            row.rounds.iter().map(|round| round.as_ref().ok().and_then(|figures| figures.owed)).collect()
        };
        let both = owed(self).into_iter().zip(owed(other)).filter_map(|(one, other)| one.zip(other));
        both.map(|(one, other)| (percentile(&one.latency_us), percentile(&other.latency_us))).collect()
    }
}

pub fn json(beside: &[RelayComparison]) -> Value {
    let one = |it: &RelayComparison| {
        let value = json!({ "peer": it.peer.relay(), "ratio": it.ratio.mean, "interval": it.ratio.interval });
        (it.percentile.to_owned(), value)
    };
    Value::Object(beside.iter().map(one).collect::<Map<_, _>>())
}

/// Formats one line for the console: `millrace (kernel) x 2, lossy: p50 0.98 (0.97 to 0.99) of moq-relay's, ...`.
pub fn told(row: &str, beside: &[RelayComparison]) -> String {
    let one = |it: &RelayComparison| {
        let interval = it.ratio.interval.map(|[low, high]| format!(" ({low:.2} to {high:.2})"));
        let interval = interval.unwrap_or_default();
        format!("{} {:.2}{interval} of {}'s", it.percentile, it.ratio.mean, it.peer.label())
    };
    format!("{row}: {}\n", beside.iter().map(one).collect::<Vec<_>>().join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ratio_of_paired_results_is_a_geometric_mean() {
        let same = Ratio::from_pairs(&[(Some(2.0), Some(4.0)), (Some(10.0), Some(20.0))], 1e6).unwrap();
        assert_eq!((same.mean, same.interval), (0.5, Some([0.5, 0.5])));
        let wide = Ratio::from_pairs(&[(Some(1.0), Some(1.0)), (Some(4.0), Some(1.0))], 1e6).unwrap();
        let [low, high] = wide.interval.unwrap();
        assert!((wide.mean - 2.0).abs() < 1e-9 && low < 0.001 && high > 1000.0, "{wide:?}");
        let never = Ratio::from_pairs(&[(None, Some(1.0))], 100.0).unwrap();
        assert!((never.mean - 100.0).abs() < 1e-9 && never.interval.is_none(), "{never:?}");
        assert_eq!(Ratio::from_pairs(&[], 1.0), None);
    }
}
