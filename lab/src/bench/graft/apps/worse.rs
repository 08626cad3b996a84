//! How often an application is slower by one way than by TCP in place.

use serde::Serialize;

use super::rows::Row;

/// Less is within what runs differ by.
const MORE: f64 = 1.05;
const CARRIED: &str = "carried";

/// Of an arm beside a congestion control in place.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Worse {
    /// `carried`; `chosen`: what is in place where the round trip is short, and else what is carried. It has no runs of its own.
    pub arm: &'static str,
    pub than: String,
    /// Applications on networks, and those whose median is longer by more than 5 %.
    pub cases: usize,
    pub worse_cases: usize,
    /// Rounds of all of them, and those that were longer.
    pub runs: usize,
    pub worse_runs: usize,
}

impl Worse {
    /// The first of the controls is what is in place.
    pub fn all<'a>(rows: &'a [Row], controls: &[String], in_place_below_ms: u32) -> Vec<Self> {
        let in_place = controls.first().map(String::as_str).unwrap_or_default();
        let carried = || rows.iter().filter(|row| row.case.way == CARRIED);
        let mut all = Vec::new();
        for control in controls {
            let tcp = |row: &Row| beside(rows, row, control);
            let chosen = |row: &'a Row| match row.case.rtt_ms < in_place_below_ms {
                true => beside(rows, row, in_place),
                false => Some(row),
            };
            all.push(Self::of(CARRIED, control, carried().filter_map(|row| Some((row, tcp(row)?)))));
            all.push(Self::of(
                "chosen",
                control,
                carried().filter_map(|row| Some((chosen(row)?, tcp(row)?))),
            ));
        }
        all
    }

    fn of<'a>(arm: &'static str, than: &str, pairs: impl Iterator<Item = (&'a Row, &'a Row)>) -> Self {
        let mut it = Self { arm, than: than.to_owned(), cases: 0, worse_cases: 0, runs: 0, worse_runs: 0 };
        for (one, other) in pairs {
            let (Some(median), Some(tcp)) = (one.seconds, other.seconds) else { continue };
            it.cases += 1;
            it.worse_cases += usize::from(median.median > tcp.median * MORE);
            // Runs of one round are beside each other.
            for (one, other) in one.rounds.iter().zip(&other.rounds) {
                it.runs += 1;
                it.worse_runs += usize::from(*one > *other * MORE);
            }
        }
        it
    }

    pub fn text(&self) -> String {
        let Self { arm, than, cases, worse_cases, runs, worse_runs } = self;
        let percent = |part: &usize, all: &usize| *part as f64 * 100.0 / (*all).max(1) as f64;
        format!(
            "{arm}, more than 5 % slower than {than}: {worse_cases} of {cases} cases ({:.1} %), {worse_runs} of {runs} runs ({:.1} %)",
            percent(worse_cases, cases),
            percent(worse_runs, runs)
        )
    }
}

fn beside<'a>(rows: &'a [Row], row: &Row, way: &str) -> Option<&'a Row> {
    rows.iter().find(|it| it.case.is_beside(&row.case) && it.case.way == way)
}

#[cfg(test)]
mod tests {
    use super::super::application::Came;
    use super::super::rows::{Case, Row, joined};
    use super::*;

    #[test]
    fn what_is_slower_is_counted_by_medians_and_by_rounds() {
        let case = |rtt_ms, way: &str| Case {
            application: "a".into(),
            loss_percent: 0.0,
            burst_packets: 1.0,
            rtt_ms,
            way: way.into(),
        };
        let mut came = Vec::new();
        let mut add =
            |rtt_ms, way, seconds: [f64; 3]| {
                came.extend(seconds.map(|it| {
                    Row::new(case(rtt_ms, way), Came { seconds: it, is_over: false, watched: None })
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
        let counts = |arm: &str, than: &str| {
            let it = all.iter().find(|it| it.arm == arm && it.than == than).expect("it is there");
            [it.worse_cases, it.cases, it.worse_runs, it.runs]
        };
        assert_eq!(counts(CARRIED, "cubic"), [1, 2, 3, 6]);
        assert_eq!(counts(CARRIED, "bbr"), [1, 2, 2, 6]);
        assert_eq!(counts("chosen", "cubic"), [0, 2, 1, 6], "in place it is what it is beside");
        assert_eq!(counts("chosen", "bbr"), [0, 2, 2, 6]);
        assert!(all[0].text().ends_with("1 of 2 cases (50.0 %), 3 of 6 runs (50.0 %)"), "{}", all[0].text());
    }
}
