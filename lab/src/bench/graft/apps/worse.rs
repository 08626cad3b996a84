//! Counts how often an application is slower through a tunnel than over plain TCP.

use serde::Serialize;

use super::rows::AppRow;

/// Ratio of durations above which a run counts as slower. Smaller differences are within the spread of runs.
const MORE: f64 = 1.05;
const CARRIED: &str = "carried";

/// Comparison of a tunnel, or of a choice between tunnel and plain TCP, with plain TCP under one congestion control.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Worse {
    /// The way of sending that is compared with plain TCP. `carried`: all connections are tunnelled. `chosen`:
    /// connections use plain TCP where the round-trip time is short, and else the tunnel. The results of `chosen` are
    /// taken from the runs of plain TCP and of `carried`.
    pub candidate: &'static str,
    pub than: String,
    /// Number of pairs of an application and a network. `worse_cases` counts the pairs whose median duration is more
    /// than 5 % longer than plain TCP's.
    pub cases: usize,
    pub worse_cases: usize,
    /// Number of runs of all pairs of an application and a network. `worse_runs` counts the runs that took more than 5
    /// % longer than the run over plain TCP in the same round.
    pub runs: usize,
    pub worse_runs: usize,
}

impl Worse {
    /// Compares the tunnel, and the choice by round-trip time (`chosen`), with plain TCP under each of the congestion
    /// controls `controls`. Where `chosen` takes plain TCP, it takes the results with the first of `controls`.
    pub fn all<'a>(rows: &'a [AppRow], controls: &[String], in_place_below_ms: u32) -> Vec<Self> {
        let in_place = controls.first().map(String::as_str).unwrap_or_default();
        let carried = || rows.iter().filter(|row| row.case.way == CARRIED);
        let mut all = Vec::new();
        for control in controls {
            let tcp = |row: &AppRow| beside(rows, row, control);
            let chosen = |row: &'a AppRow| match row.case.rtt_ms < in_place_below_ms {
                true => beside(rows, row, in_place),
                false => Some(row),
            };
            all.push(Self::from_pairs(CARRIED, control, carried().filter_map(|row| Some((row, tcp(row)?)))));
            all.push(Self::from_pairs(
                "chosen",
                control,
                carried().filter_map(|row| Some((chosen(row)?, tcp(row)?))),
            ));
        }
        all
    }

    fn from_pairs<'a>(
        candidate: &'static str,
        than: &str,
        pairs: impl Iterator<Item = (&'a AppRow, &'a AppRow)>,
    ) -> Self {
        let mut it =
            Self { candidate, than: than.to_owned(), cases: 0, worse_cases: 0, runs: 0, worse_runs: 0 };
        for (one, other) in pairs {
            let (Some(median), Some(tcp)) = (one.seconds, other.seconds) else { continue };
            it.cases += 1;
            it.worse_cases += usize::from(median.median > tcp.median * MORE);
            // In each round, tunnel and plain TCP were measured shortly after each other. So their results are compared
            // within each round.
            for (one, other) in one.rounds.iter().zip(&other.rounds) {
                it.runs += 1;
                it.worse_runs += usize::from(*one > *other * MORE);
            }
        }
        it
    }

    pub fn text(&self) -> String {
        let Self { candidate, than, cases, worse_cases, runs, worse_runs } = self;
        let percent = |part: &usize, all: &usize| *part as f64 * 100.0 / (*all).max(1) as f64;
        format!(
            "{candidate}, more than 5 % slower than {than}: {worse_cases} of {cases} cases ({:.1} %), {worse_runs} of {runs} runs ({:.1} %)",
            percent(worse_cases, cases),
            percent(worse_runs, runs)
        )
    }
}

fn beside<'a>(rows: &'a [AppRow], row: &AppRow, way: &str) -> Option<&'a AppRow> {
    rows.iter().find(|it| it.case.is_beside(&row.case) && it.case.way == way)
}

#[cfg(test)]
mod tests {
    use super::super::application::RunResult;
    use super::super::rows::{AppCase, AppRow, joined};
    use super::*;

    #[test]
    fn cases_slower_than_a_congestion_control_are_counted_by_median_and_run() {
        let case = |rtt_ms, way: &str| AppCase {
            application: "a".into(),
            loss_percent: 0.0,
            burst_packets: 1.0,
            rtt_ms,
            way: way.into(),
        };
        let mut came = Vec::new();
        let mut add = |rtt_ms, way, seconds: [f64; 3]| {
            came.extend(seconds.map(|it| {
                AppRow::new(case(rtt_ms, way), RunResult { seconds: it, is_over: false, watched: None })
            }));
        };
        add(1, "cubic", [1.0, 1.0, 1.0]);
        add(1, "bbr", [0.9, 1.0, 2.0]);
        add(1, CARRIED, [1.1, 1.04, 1.2]);
        add(100, "cubic", [5.0, 5.0, 5.0]);
        add(100, "bbr", [2.0, 3.0, 1.0]);
        add(100, CARRIED, [1.0, 6.0, 1.0]);
        let rows = joined(came);
        let controls = ["cubic", "bbr"].map(str::to_owned);
        let all = Worse::all(&rows, &controls, 10);
        let counts = |candidate: &str, than: &str| {
            let it = all.iter().find(|it| it.candidate == candidate && it.than == than).expect("it is there");
            [it.worse_cases, it.cases, it.worse_runs, it.runs]
        };
        assert_eq!(counts(CARRIED, "cubic"), [1, 2, 3, 6]);
        assert_eq!(counts(CARRIED, "bbr"), [1, 2, 2, 6]);
        assert_eq!(counts("chosen", "cubic"), [0, 2, 1, 6], "in place it is what it is beside");
        assert_eq!(counts("chosen", "bbr"), [0, 2, 2, 6]);
        assert!(all[0].text().ends_with("1 of 2 cases (50.0 %), 3 of 6 runs (50.0 %)"), "{}", all[0].text());
    }
}
