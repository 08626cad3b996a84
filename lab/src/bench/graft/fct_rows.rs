//! Result rows of transfers: as text, and as JSON files keep them.

use std::path::Path;

use anyhow::Context as _;
use serde::{Deserialize, Serialize};

use super::fct_plot::FctPoint;
use crate::bench::table::columns;
use crate::stats::Spread;

/// Results of one congestion control for transfers of one size on one network.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct FctRow {
    #[serde(flatten)]
    pub case: FctCase,
    #[serde(default, skip_deserializing)]
    ms: Option<Spread>,
    #[serde(default, skip_deserializing)]
    over: usize,
    pub rounds: Vec<FctRound>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct FctCase {
    pub congestion_control: String,
    pub bytes: u64,
    pub loss_percent: f64,
    pub rtt_ms: u32,
    pub rate_mbit: u32,
    pub limit_s: u64,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum FctRound {
    /// A transfer that was completed or stopped. The duration of a stopped transfer is the time limit.
    Done {
        ms: f64,
        bytes: u64,
        over: bool,
    },
    Failed {
        error: String,
    },
}

impl FctRow {
    pub fn new(case: FctCase, rounds: Vec<FctRound>) -> Self {
        let mut row = Self { case, ms: None, over: 0, rounds };
        row.count();
        row
    }

    fn count(&mut self) {
        self.ms = Spread::from_values(&self.times());
        self.over =
            self.rounds.iter().filter(|round| matches!(round, FctRound::Done { over: true, .. })).count();
    }

    fn times(&self) -> Vec<f64> {
        let time = |round: &FctRound| match round {
            FctRound::Done { ms, .. } => Some(*ms),
            FctRound::Failed { .. } => None,
        };
        self.rounds.iter().filter_map(time).collect()
    }

    pub fn point(&self) -> Option<FctPoint> {
        Some(FctPoint {
            control: self.case.congestion_control.clone(),
            kib: self.case.bytes >> 10,
            loss: self.case.loss_percent,
            rtt_ms: self.case.rtt_ms,
            ms: self.ms?,
        })
    }
}

impl FctCase {
    pub fn label(&self) -> String {
        let Self { congestion_control, bytes, loss_percent, rtt_ms, .. } = self;
        format!("{congestion_control} {} KiB, {rtt_ms} ms, {loss_percent} %", bytes >> 10)
    }
}

impl FctRound {
    pub fn told(&self) -> String {
        match self {
            Self::Done { ms, over: false, .. } => format!("{ms:.0} ms"),
            Self::Done { bytes, .. } => format!("stopped after {bytes} bytes"),
            Self::Failed { error } => error.clone(),
        }
    }
}

/// Reads the result rows of an earlier run.
pub fn read(path: &Path) -> anyhow::Result<Vec<FctRow>> {
    let read = || anyhow::Ok(serde_json::from_slice::<Vec<FctRow>>(&std::fs::read(path)?)?);
    let mut rows = read().with_context(|| format!("{}: rows of bench graft fct", path.display()))?;
    rows.iter_mut().for_each(FctRow::count);
    Ok(rows)
}

/// Joins rounds of the same congestion control, size and network into one row. Rows are sorted by round-trip time, size
/// and loss.
pub fn joined(rows: Vec<FctRow>) -> Vec<FctRow> {
    let mut all: Vec<FctRow> = Vec::new();
    for row in rows {
        match all.iter_mut().find(|other| other.case == row.case) {
            Some(other) => {
                other.rounds.extend(row.rounds);
                other.count();
            }
            None => all.push(row),
        }
    }
    all.sort_by(|one, other| {
        let by = |row: &FctRow| (row.case.rtt_ms, row.case.bytes);
        by(one).cmp(&by(other)).then(one.case.loss_percent.total_cmp(&other.case.loss_percent))
    });
    all
}

pub fn render(rows: &[FctRow]) -> String {
    let head = ["control", "KiB", "RTT ms", "loss %", "ms", "least", "most", "over", "rounds"];
    let mut lines = vec![head.map(str::to_owned).to_vec()];
    for row in rows {
        let (Some(spread), case) = (row.ms, &row.case) else { continue };
        let mut line = vec![
            case.congestion_control.clone(),
            (case.bytes >> 10).to_string(),
            case.rtt_ms.to_string(),
            case.loss_percent.to_string(),
        ];
        line.extend([spread.median, spread.min, spread.max].map(|ms| format!("{ms:.0}")));
        line.extend([row.over, row.times().len()].map(|count| count.to_string()));
        lines.push(line);
    }
    let mut text = columns(&lines);
    for row in rows {
        let errors = row.rounds.iter().filter_map(|round| match round {
            FctRound::Failed { error } => Some(error),
            FctRound::Done { .. } => None,
        });
        let errors: Vec<_> = errors.collect();
        if let Some(first) = errors.first() {
            text +=
                &format!("{}: {} of {} rounds: {first}\n", row.case.label(), errors.len(), row.rounds.len());
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(control: &str, rtt_ms: u32, ms: &[f64]) -> FctRow {
        let case = FctCase {
            congestion_control: control.into(),
            bytes: 65536,
            loss_percent: 0.5,
            rtt_ms,
            rate_mbit: 100,
            limit_s: 60,
        };
        let rounds = ms.iter().map(|ms| FctRound::Done { ms: *ms, bytes: 65536, over: *ms >= 60e3 });
        FctRow::new(case, rounds.chain([FctRound::Failed { error: "gone".into() }]).collect())
    }

    #[test]
    fn transfer_times_of_the_same_case_in_several_runs_are_joined() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("rows.json");
        let rows = [row("cubic", 20, &[1.0, 2.0]), row("bbr", 10, &[5.0])];
        std::fs::write(&path, serde_json::to_string(&rows).expect("JSON")).expect("a file");
        let mut all = read(&path).expect("rows");
        assert_eq!(all, rows);
        all.push(row("cubic", 20, &[60e3]));
        let [near, far] = &joined(all)[..] else { panic!("two cases") };
        assert_eq!((near.case.rtt_ms, near.rounds.len()), (10, 2));
        assert_eq!((far.ms.map(|ms| ms.median), far.over, far.rounds.len()), (Some(2.0), 1, 5));
        let text = render(std::slice::from_ref(far));
        assert!(text.contains("cubic 64 KiB, 20 ms, 0.5 %: 2 of 5 rounds: gone"), "{text}");
        std::fs::write(&path, "[{}]").expect("a file");
        assert!(read(&path).expect_err("no rows").to_string().contains("rows.json: rows of"));
    }
}
