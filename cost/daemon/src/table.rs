//! Formats tables as text. A table can be sorted by any column.

use std::cmp::Ordering;

use millrace_cost::arguments::printable;
use millrace_cost::interval::SampledFigure;
use millrace_cost::report::Interval;
use millrace_daemon::columns::{ColumnSide, aligned};
use millrace_daemon::render::short_span;

#[derive(Debug, Clone, PartialEq)]
pub enum TableCell {
    Text(String),
    Number(u64),
    /// A cell with a share of one CPU's time.
    Share(f64),
    /// A cell with a share of one CPU's time that was estimated from samples.
    Estimate(SampledFigure),
    /// A cell with a duration in nanoseconds, which is shown in microseconds.
    Microseconds(u64),
    /// A cell with a time in seconds. If the second field is `true`, the time is a lower bound.
    Seconds(u64, bool),
    /// A cell without a value, since the value was not measured. It is shown as `?`.
    Unknown,
}

impl TableCell {
    pub fn estimate(share: f64, samples: u64, interval: Option<Interval>) -> Self {
        Self::Estimate(SampledFigure::new(share, samples, interval))
    }

    /// Formats the cell. With `errors`, the margin of error is added to figures that were estimated from samples.
    fn text(&self, errors: bool) -> String {
        match self {
            // Other users choose the names of processes, cgroups and functions, so they may have control characters.
            Self::Text(text) => printable(text),
            Self::Number(0) => "-".to_owned(),
            Self::Number(number) => number.to_string(),
            Self::Share(share) if *share == 0.0 => "-".to_owned(),
            Self::Share(share) => format!("{:.2} %", share * 100.0),
            Self::Estimate(of) => estimate(of, errors),
            Self::Unknown => "?".to_owned(),
            Self::Microseconds(ns) => format!("{:.1} us", *ns as f64 / 1e3),
            Self::Seconds(seconds, more) => {
                format!("{}{}", if *more { ">" } else { "" }, short_span(*seconds))
            }
        }
    }

    fn order(&self, other: &Self) -> Ordering {
        match (self, other) {
            (Self::Text(a), Self::Text(b)) => a.cmp(b),
            (Self::Number(a), Self::Number(b)) | (Self::Microseconds(a), Self::Microseconds(b)) => a.cmp(b),
            (Self::Share(a), Self::Share(b)) => a.total_cmp(b),
            (Self::Estimate(a), Self::Estimate(b)) => a.share.total_cmp(&b.share),
            (Self::Seconds(a, _), Self::Seconds(b, _)) => a.cmp(b),
            (Self::Unknown, other) if *other != Self::Unknown => Ordering::Less,
            (other, Self::Unknown) if *other != Self::Unknown => Ordering::Greater,
            _ => Ordering::Equal,
        }
    }

    fn is_text(&self) -> bool {
        matches!(self, Self::Text(_))
    }
}

/// Formats a figure that rests on samples. A leading `~` marks a figure that rests on few samples.
pub fn estimate(of: &SampledFigure, errors: bool) -> String {
    if of.share == 0.0 {
        return "-".to_owned();
    }
    let poor = if of.is_poor() { POOR } else { "" };
    match of.error().filter(|_| errors) {
        Some(error) => format!("{poor}{:.2}\u{b1}{:.2} %", of.share * 100.0, error * 100.0),
        None => format!("{poor}{:.2} %", of.share * 100.0),
    }
}

/// The mark before a figure that rests on few samples.
pub const POOR: &str = "~";

/// A table of text. Its rows are in their most useful order until it is sorted.
#[derive(Debug, Clone, PartialEq)]
pub struct TextTable {
    pub title: &'static str,
    pub columns: Vec<&'static str>,
    pub rows: Vec<Vec<TableCell>>,
}

impl TextTable {
    /// Sorts the rows by a column: numbers in descending order, texts in ascending order. `reverse` inverts the order.
    pub fn sort(&mut self, column: usize, reverse: bool) {
        self.rows.sort_by(|a, b| {
            let (Some(a), Some(b)) = (a.get(column), b.get(column)) else { return Ordering::Equal };
            let order = a.order(b);
            if a.is_text() == reverse { order.reverse() } else { order }
        });
    }

    /// Reports whether a figure in the table rests on few samples.
    pub fn is_poor(&self) -> bool {
        self.rows.iter().flatten().any(|cell| matches!(cell, TableCell::Estimate(of) if of.is_poor()))
    }

    /// Returns [`lines`](Self::lines). If a line is longer than `width` characters, the margins of error are left out.
    pub fn lines_within(&self, width: usize) -> Vec<String> {
        let lines = self.lines();
        match lines.iter().all(|line| line.trim_end().chars().count() <= width) {
            true => lines,
            false => self.lines_with(false),
        }
    }

    /// Returns the heading, then a line for each row. Texts are aligned left, numbers right.
    pub fn lines(&self) -> Vec<String> {
        self.lines_with(true)
    }

    fn lines_with(&self, errors: bool) -> Vec<String> {
        let head = self.columns.iter().map(|name| (*name).to_owned()).collect();
        let rows = self.rows.iter().map(|row| row.iter().map(|cell| cell.text(errors)).collect());
        let lines: Vec<Vec<String>> = std::iter::once(head).chain(rows).collect();
        let first = self.rows.first();
        aligned(&lines, |column| {
            match first.and_then(|row| row.get(column)).is_some_and(TableCell::is_text) {
                true => ColumnSide::Left,
                false => ColumnSide::Right,
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table() -> TextTable {
        let row = |name: &str, share: f64, calls: u64| {
            vec![TableCell::Text(name.to_owned()), TableCell::Share(share), TableCell::Number(calls)]
        };
        TextTable {
            title: "parts",
            columns: vec!["part", "share", "calls"],
            rows: vec![row("b", 0.01, 0), row("a long name", 0.1234, 3), row("c", 0.0, 20)],
        }
    }

    #[test]
    fn table_columns_are_as_wide_as_their_cells() {
        assert_eq!(
            table().lines(),
            [
                "part           share  calls",
                "b             1.00 %      -",
                "a long name  12.34 %      3",
                "c                  -     20",
            ]
        );
    }

    #[test]
    fn estimate_shows_its_error_and_a_tilde_below_4_samples() {
        let cell = |samples| TableCell::estimate(0.0027, samples, Some([0.0005, 0.0149]));
        assert_eq!(cell(4).text(true), "0.27\u{b1}1.22 %");
        assert_eq!(cell(3).text(true), "~0.27\u{b1}1.22 %");
        assert_eq!(cell(3).text(false), "~0.27 %");
        assert_eq!(TableCell::estimate(0.5, 0, None).text(true), "50.00 %", "exact");
        assert_eq!(TableCell::estimate(0.0, 0, Some([0.0, 0.1])).text(true), "-");
        let table =
            |samples| TextTable { title: "", columns: vec!["share"], rows: vec![vec![cell(samples)]] };
        assert!(table(3).is_poor() && !table(4).is_poor());
        assert_eq!(table(4).lines_within(80)[1], "0.27\u{b1}1.22 %");
        assert_eq!(table(4).lines_within(8)[1], "0.27 %");
    }

    #[test]
    fn durations_are_formatted_in_few_characters() {
        let shown = [(0, false), (119, true), (120, false), (7199, false), (7200, true)]
            .map(|(seconds, more)| TableCell::Seconds(seconds, more).text(true));
        assert_eq!(shown, ["0 s", ">119 s", "2 min", "119 min", ">2 h"]);
    }

    #[test]
    fn table_is_sorted_by_each_column() {
        let names = |column, reverse| {
            let mut table = table();
            table.sort(column, reverse);
            table.rows.iter().map(|row| row[0].text(true)).collect::<Vec<_>>()
        };
        assert_eq!(names(0, false), ["a long name", "b", "c"]);
        assert_eq!(names(0, true), ["c", "b", "a long name"]);
        assert_eq!(names(1, false), ["a long name", "b", "c"]);
        assert_eq!(names(1, true), ["c", "b", "a long name"]);
        assert_eq!(names(2, false), ["c", "a long name", "b"]);
        assert_eq!(names(9, false), ["b", "a long name", "c"]);
    }
}
