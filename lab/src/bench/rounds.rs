//! Rounds in which several relays are measured in turn, so that a change of the machine's load affects all of them.

use std::path::Path;

use serde_json::Value;

use super::contender::Contender;
use super::figures;
use super::table::{columns, dash, write_json};
use crate::progress::BenchProgress;
use crate::stats::Spread;

/// The rounds of one relay, each with its figures or the reason why there are none.
pub struct RelayRounds<F> {
    pub relay: Contender,
    pub rounds: Vec<Result<F, String>>,
}

/// A column of a table of medians: heading, measured value, number of decimals.
pub type MedianColumn<F> = (&'static str, fn(&F) -> f64, usize);

impl<F> RelayRounds<F> {
    /// Measures each relay in each round by `measure`, and shows the progress. `summary` describes the figures of one
    /// round.
    ///
    /// # Errors
    /// Fails if the progress cannot be shown. A failed measurement is a result.
    pub fn measure(
        relays: &[Contender],
        rounds: usize,
        measure: impl Fn(Contender) -> anyhow::Result<F>,
        summary: impl Fn(&F) -> String,
    ) -> anyhow::Result<Vec<Self>> {
        let mut rows: Vec<_> =
            relays.iter().map(|relay| Self { relay: *relay, rounds: Vec::new() }).collect();
        let progress = BenchProgress::with_steps(rounds * rows.len());
        for round in 1..=rounds {
            for row in &mut rows {
                progress.begin(format!("round {round}, {}", row.relay.label()));
                let figures = measure(row.relay).map_err(|error| format!("{error:#}"));
                progress.end(&figures.as_ref().map_or_else(String::clone, &summary))?;
                row.rounds.push(figures);
            }
        }
        Ok(rows)
    }

    /// Prints `text`, and writes the rows to the file `path` as JSON, if it is given.
    ///
    /// # Errors
    /// Fails if the file cannot be written, or no round of any relay could be measured.
    pub fn report(
        rows: &[Self],
        text: &str,
        json: impl Fn(&Self) -> Value,
        path: Option<&Path>,
    ) -> anyhow::Result<()> {
        print!("{text}");
        let json: Vec<_> = rows.iter().map(json).collect();
        path.map_or(Ok(()), |path| write_json(path, &json))?;
        figures::ensure_measured(rows.iter().map(|row| row.rounds.as_slice()))
    }

    /// Returns a table of medians over the rounds, followed by the errors.
    pub fn medians(rows: &[Self], wanted: &[MedianColumn<F>]) -> String {
        let head = ["relay"].into_iter().chain(wanted.iter().map(|(name, ..)| *name));
        let mut lines = vec![head.map(str::to_owned).collect::<Vec<_>>()];
        for row in rows.iter().filter(|row| row.rounds.iter().any(Result::is_ok)) {
            let cell = |(_, of, digits): &MedianColumn<F>| {
                row.spread(of).map_or_else(dash, |spread| format!("{:.digits$}", spread.median))
            };
            lines.push([row.relay.label()].into_iter().chain(wanted.iter().map(cell)).collect());
        }
        columns(&lines) + &Self::errors(rows)
    }

    /// Returns a line for each relay with an error.
    pub fn errors(rows: &[Self]) -> String {
        let line = |row: &Self| Some(format!("{}: {}\n", row.relay.label(), figures::error(&row.rounds)?));
        rows.iter().filter_map(line).collect()
    }

    /// Returns a value of each round with figures.
    pub fn each(&self, of: impl Fn(&F) -> f64) -> Vec<f64> {
        self.rounds.iter().flatten().map(of).collect()
    }

    /// Returns the sum of a count over the rounds.
    pub fn sum(&self, of: impl Fn(&F) -> u64) -> u64 {
        self.rounds.iter().flatten().map(of).sum()
    }

    /// Returns the median of a value over the rounds, with its spread.
    pub fn spread(&self, of: impl Fn(&F) -> f64) -> Option<Spread> {
        Spread::from_values(&self.each(of))
    }
}
