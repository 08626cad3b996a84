//! Gaps and losses of viewers after an event, computed from the series that `millrace subscribe` writes.

use std::collections::{BTreeMap, HashSet};
use std::path::Path;

use anyhow::{Context, ensure};

/// An object that has arrived: its number, and the time of its arrival, ns.
type Arrival = (u64, u64);

/// Gaps and losses of all viewers, from shortly before an event on.
#[derive(Debug, Default, PartialEq)]
pub struct ViewerGaps {
    /// Longest time between two objects of a viewer, ms.
    pub gap_ms: f64,
    /// Number of missing objects, over all viewers.
    pub lost: u64,
    pub duplicates: u64,
}

impl ViewerGaps {
    /// Reads the series at `path`, and judges it from the time `since`, ns. Fails unless it has `viewers` viewers.
    pub fn read(path: &Path, viewers: usize, since: u64) -> anyhow::Result<Self> {
        let seen = parse(&std::fs::read_to_string(path).context("cannot read the viewers' series")?)?;
        ensure!(seen.len() == viewers, "{} of {viewers} viewers have media", seen.len());
        Ok(Self::judge(&seen, since))
    }

    fn judge(viewers: &[Vec<Arrival>], since: u64) -> Self {
        let mut gaps = Self::default();
        for seen in viewers {
            let later = seen.windows(2).filter(|pair| pair[1].1 > since);
            let gap = later.map(|pair| pair[1].1.saturating_sub(pair[0].1)).max().unwrap_or(0);
            gaps.gap_ms = gaps.gap_ms.max(gap as f64 / 1e6);
            // What was lost before has other causes.
            let first = seen.iter().rposition(|(_, arrived)| *arrived < since).unwrap_or(0);
            let seen = &seen[first..];
            let distinct: HashSet<_> = seen.iter().map(|(sequence, _)| *sequence).collect();
            gaps.duplicates += (seen.len() - distinct.len()) as u64;
            let mut numbers: Vec<_> = distinct.into_iter().collect();
            numbers.sort_unstable();
            gaps.lost += numbers.windows(2).map(|pair| pair[1] - pair[0] - 1).sum::<u64>();
        }
        gaps
    }
}

/// Parses the series of `millrace subscribe`, by viewer.
fn parse(series: &str) -> anyhow::Result<Vec<Vec<Arrival>>> {
    let mut viewers: BTreeMap<u64, Vec<Arrival>> = BTreeMap::new();
    for line in series.lines() {
        let mut numbers = line.split(',').map(str::parse::<u64>);
        // The first line has the names of the columns.
        let Some(Ok(viewer)) = numbers.next() else { continue };
        let mut next = || numbers.next().context("too few numbers")?.context("no number");
        let sequence = next()?;
        let arrived = next()? + next()?;
        viewers.entry(viewer).or_default().push((sequence, arrived));
    }
    Ok(viewers.into_values().collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_objects_after_the_event_are_lost_and_repeated_ones_count_as_duplicates() {
        let series = "subscriber,sequence,sent_ns,latency_ns\n0,8,8,1\n0,10,10,2\n0,11,11,5\n1,7,7,0\n1,9,9,0\n1,9,9,1\n";
        let seen = parse(series).unwrap();
        assert_eq!(seen, [vec![(8, 9), (10, 12), (11, 16)], vec![(7, 7), (9, 9), (9, 10)]]);
        let gaps = ViewerGaps::judge(&seen, 7);
        assert_eq!((gaps.lost, gaps.duplicates), (2, 1));
        assert!((gaps.gap_ms - 4e-6).abs() < 1e-12, "{gaps:?}");
    }
}
