//! Percentiles, medians and spreads.

use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};

/// Percentiles by nearest rank, in the unit of the samples.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Percentiles {
    pub p50: f64,
    pub p90: f64,
    pub p99: f64,
    pub max: f64,
}

impl Percentiles {
    /// Computes the percentiles; `None` without samples.
    pub fn from_samples(mut samples: Vec<f64>) -> Option<Self> {
        samples.sort_unstable_by(f64::total_cmp);
        let max = *samples.last()?;
        let rank = |percent: usize| {
            let index = (samples.len() * percent).div_ceil(100).saturating_sub(1);
            samples.get(index).copied().unwrap_or(max)
        };
        Some(Self { p50: rank(50), p90: rank(90), p99: rank(99), max })
    }

    /// Returns the percentiles of a histogram in ms, whose values are us. Returns `None` without samples.
    pub fn from_histogram_us(times: &Histogram<u64>) -> Option<Self> {
        let at = |quantile| times.value_at_quantile(quantile) as f64 / 1e3;
        (!times.is_empty()).then(|| Self { p50: at(0.5), p90: at(0.9), p99: at(0.99), max: at(1.0) })
    }

    /// Computes percentiles in us from samples in ns.
    pub fn from_ns(samples: Vec<u64>) -> Option<Self> {
        Self::from_samples(samples.iter().map(|ns| *ns as f64 / 1000.0).collect())
    }
}

/// Returns the median; for an even number of values, the mean of the two in the middle.
pub fn median(values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    let upper = *sorted.get(sorted.len() / 2)?;
    match sorted.len() % 2 {
        1 => Some(upper),
        _ => sorted.get(sorted.len() / 2 - 1).map(|lower| (lower + upper) / 2.0),
    }
}

/// Returns the median of the value that `figure` returns for each item; not a number (NaN) without items.
pub fn median_by<T>(items: &[T], figure: impl Fn(&T) -> f64) -> f64 {
    Spread::by(items, figure).map_or(f64::NAN, |spread| spread.median)
}

#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Spread {
    pub median: f64,
    pub min: f64,
    pub max: f64,
}

impl Spread {
    /// Computes median, minimum and maximum; `None` without values.
    pub fn from_values(values: &[f64]) -> Option<Self> {
        let median = median(values)?;
        let min = values.iter().copied().fold(f64::INFINITY, f64::min);
        let max = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        Some(Self { median, min, max })
    }

    /// Returns median, minimum and maximum of the values that `figure` returns for the items; `None` without items.
    pub fn by<T>(items: &[T], figure: impl Fn(&T) -> f64) -> Option<Self> {
        Self::from_values(&items.iter().map(figure).collect::<Vec<_>>())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_nearest_ranks() {
        let of = |samples: &[u64]| Percentiles::from_ns(samples.to_vec());
        assert_eq!(of(&[]), None);
        assert_eq!(of(&[7000]), Some(Percentiles { p50: 7.0, p90: 7.0, p99: 7.0, max: 7.0 }));
        let hundred: Vec<u64> = (1..=100).rev().map(|n| n * 1000).collect();
        assert_eq!(of(&hundred), Some(Percentiles { p50: 50.0, p90: 90.0, p99: 99.0, max: 100.0 }));
        assert_eq!(of(&[1000, 2000, 3500]), Some(Percentiles { p50: 2.0, p90: 3.5, p99: 3.5, max: 3.5 }));
    }

    #[test]
    fn median_is_computed_for_even_and_odd_counts() {
        assert_eq!(median(&[]), None);
        assert_eq!(median(&[3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(&[4.0, 1.0]), Some(2.5));
    }
}
