//! Results of the viewers of `restarts`, as a table and as JSON.

use std::fmt::Write as _;

use serde_json::{Value, json};

use super::super::contender::Contender;
use super::super::table::columns;
use super::RestartCase;

/// The time that a viewer was without media.
#[derive(Debug, Clone, Copy)]
pub struct Gap {
    /// Time from the last object before the publisher or relay was killed to the first object after its restart, ms.
    pub gap_ms: f64,
    /// Time from the publisher's restart, or from when the relay listened again, to the first object after that, ms.
    pub again_ms: f64,
    pub duplicates: usize,
}

/// Reason why a viewer received nothing after the restart of the publisher or relay.
#[derive(Debug, Clone)]
pub struct RestartFailure {
    /// True if the viewer's process ended, as it does when its track or session ends; false if it ran on without media.
    pub ended: bool,
    pub why: String,
}

impl From<anyhow::Error> for RestartFailure {
    fn from(error: anyhow::Error) -> Self {
        Self { ended: false, why: format!("{error:#}") }
    }
}

/// The results of one measurement: each viewer's name and its result.
pub type RestartRound = Vec<(&'static str, Result<Gap, RestartFailure>)>;

pub struct RestartRow {
    pub relay: Contender,
    pub case: RestartCase,
    /// The result of each repetition of the measurement. An error means that the repetition could not be measured.
    pub rounds: Vec<Result<RestartRound, String>>,
}

impl RestartRow {
    fn viewers(&self) -> Vec<&'static str> {
        let mut names = Vec::new();
        for (name, _) in self.rounds.iter().flatten().flatten() {
            if !names.contains(name) {
                names.push(*name);
            }
        }
        names
    }

    /// Returns the results of one viewer, one per round.
    fn gaps_of_viewer(&self, viewer: &str) -> Vec<&Result<Gap, RestartFailure>> {
        let all = self.rounds.iter().flatten().flatten();
        all.filter(|(name, _)| *name == viewer).map(|(_, seen)| seen).collect()
    }

    /// Reports whether any viewer measured a time without media.
    pub fn has_figures(&self) -> bool {
        self.rounds.iter().flatten().flatten().any(|(_, seen)| seen.is_ok())
    }

    pub fn json(&self) -> Value {
        let viewer = |name: &&'static str| {
            let seen = self.gaps_of_viewer(name);
            let gaps: Vec<_> = seen.iter().filter_map(|seen| seen.as_ref().ok()).collect();
            let failures: Vec<_> = seen.iter().filter_map(|seen| seen.as_ref().err()).collect();
            json!({
                "viewer": name,
                "gap_ms": gaps.iter().map(|gap| gap.gap_ms).collect::<Vec<_>>(),
                "again_ms": gaps.iter().map(|gap| gap.again_ms).collect::<Vec<_>>(),
                "duplicates": gaps.iter().map(|gap| gap.duplicates).sum::<usize>(),
                "ended": failures.iter().filter(|failure| failure.ended).count(),
                "failures": failures.iter().map(|failure| &failure.why).collect::<Vec<_>>(),
            })
        };
        json!({
            "relay": self.relay.relay(), "engine": self.relay.engine(), "case": self.case.name(),
            "absent_s": self.case.absent, "viewers": self.viewers().iter().map(viewer).collect::<Vec<_>>(),
            "errors": self.rounds.iter().filter_map(|round| round.as_ref().err()).collect::<Vec<_>>(),
        })
    }

    fn line(&self, viewer: &'static str) -> Vec<String> {
        let seen = self.gaps_of_viewer(viewer);
        let gaps: Vec<_> = seen.iter().filter_map(|seen| seen.as_ref().ok()).collect();
        let ended = seen.iter().filter(|seen| seen.as_ref().is_err_and(|failure| failure.ended)).count();
        let both = |figure: &dyn Fn(&Gap) -> f64| {
            let all: Vec<_> = gaps.iter().map(|gap| figure(gap)).collect();
            format!("{:.0}/{:.0}", percentile(all.clone(), 50), percentile(all, 95))
        };
        let absent_ms = self.case.absent * 1000.0;
        vec![
            self.relay.label(),
            self.case.name(),
            viewer.to_owned(),
            format!("{}/{}", gaps.len(), seen.len()),
            ended.to_string(),
            both(&|gap| gap.gap_ms - absent_ms),
            both(&|gap| gap.again_ms),
            gaps.iter().map(|gap| gap.duplicates).sum::<usize>().to_string(),
        ]
    }
}

pub fn render(rows: &[RestartRow]) -> String {
    let head = [
        "relay",
        "who dies, how long",
        "viewer",
        "media again",
        "ended",
        "gap beyond absence p50/p95 ms",
        "after return p50/p95 ms",
        "twice",
    ];
    let mut lines = vec![head.map(str::to_owned).to_vec()];
    let mut errors = String::new();
    for row in rows {
        lines.extend(row.viewers().into_iter().map(|viewer| row.line(viewer)));
        let relay = row.relay.label();
        let case = row.case.name();
        for round in &row.rounds {
            let seen = match round {
                Ok(seen) => seen,
                Err(error) => {
                    let _ = writeln!(errors, "{relay}, {case}: {error}");
                    continue;
                }
            };
            for (viewer, failure) in
                seen.iter().filter_map(|(viewer, seen)| Some((viewer, seen.as_ref().err()?)))
            {
                let _ = writeln!(errors, "{relay}, {case}, {viewer}: {}", failure.why);
            }
        }
    }
    columns(&lines) + &errors
}

/// Formats the median, the 95th percentile and the largest of the values, as `p50/p95/max`.
pub fn p50_p95_max(values: &[f64]) -> String {
    let at = |percent| percentile(values.to_vec(), percent);
    format!("{:.0}/{:.0}/{:.0}", at(50), at(95), at(100))
}

/// Returns a percentile by nearest rank; not a number (NaN) without samples.
fn percentile(mut samples: Vec<f64>, percent: usize) -> f64 {
    samples.sort_unstable_by(f64::total_cmp);
    let index = (samples.len() * percent).div_ceil(100).saturating_sub(1);
    samples.get(index).copied().unwrap_or(f64::NAN)
}

#[cfg(test)]
mod tests {
    use super::super::Victim;
    use super::*;

    #[test]
    fn percentiles_are_by_nearest_rank() {
        assert_eq!(percentile((1..=20).map(f64::from).collect(), 95), 19.0);
        assert_eq!(percentile(vec![3.0, 1.0], 95), 3.0);
        assert!(percentile(Vec::new(), 50).is_nan());
    }

    #[test]
    fn viewer_that_ends_during_a_restart_is_counted_apart_from_gaps() {
        let case = RestartCase { victim: Victim::MoqPub, absent: 4.0 };
        let gap = |gap_ms| Ok(Gap { gap_ms, again_ms: 900.0, duplicates: 1 });
        let ended = RestartFailure { ended: true, why: "moq-sub ended".to_owned() };
        let rounds =
            vec![Ok(vec![("ours", gap(5000.0)), ("moq-sub", Err(ended))]), Ok(vec![("ours", gap(4500.0))])];
        let row = RestartRow { relay: Contender::User, case, rounds };
        let ours = row.line("ours");
        let theirs = row.line("moq-sub");
        assert_eq!(ours[3..], ["2/2", "0", "500/1000", "900/900", "2"].map(str::to_owned));
        assert_eq!(theirs[3..5], ["0/1", "1"].map(str::to_owned));
        assert!(render(&[row]).contains("moq-pub 4 s, moq-sub: moq-sub ended"));
    }
}
