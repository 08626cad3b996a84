//! Tables that can be sorted by any column.

use std::cmp::Ordering;

use millrace_cost::arguments::printable;
use millrace_daemon::columns::{Side, aligned};
use millrace_daemon::render::short_span;

#[derive(Debug, Clone, PartialEq)]
pub enum Cell {
    Text(String),
    Number(u64),
    /// Of one CPU.
    Share(f64),
    Microseconds(u64),
    /// Of so many seconds; `true`: or more.
    Seconds(u64, bool),
    /// Of what is not measured.
    Unknown,
}

impl Cell {
    fn text(&self) -> String {
        match self {
            // Processes, cgroups and functions have names that others choose.
            Self::Text(text) => printable(text),
            Self::Number(0) => "-".to_owned(),
            Self::Number(number) => number.to_string(),
            Self::Share(share) if *share == 0.0 => "-".to_owned(),
            Self::Share(share) => format!("{:.2} %", share * 100.0),
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

/// As it comes, it is in the order that says most.
#[derive(Debug, Clone, PartialEq)]
pub struct Table {
    pub title: &'static str,
    pub columns: Vec<&'static str>,
    pub rows: Vec<Vec<Cell>>,
}

impl Table {
    /// Numbers from the largest on, texts from A on; the other way round if `reverse`.
    pub fn sort(&mut self, column: usize, reverse: bool) {
        self.rows.sort_by(|a, b| {
            let (Some(a), Some(b)) = (a.get(column), b.get(column)) else { return Ordering::Equal };
            let order = a.order(b);
            if a.is_text() == reverse { order.reverse() } else { order }
        });
    }

    /// The heading, then a line for each row; texts to the left, numbers to the right.
    pub fn lines(&self) -> Vec<String> {
        let head = self.columns.iter().map(|name| (*name).to_owned()).collect();
        let rows = self.rows.iter().map(|row| row.iter().map(Cell::text).collect());
        let lines: Vec<Vec<String>> = std::iter::once(head).chain(rows).collect();
        let first = self.rows.first();
        aligned(&lines, |column| match first.and_then(|row| row.get(column)).is_some_and(Cell::is_text) {
            true => Side::Left,
            false => Side::Right,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table() -> Table {
        let row = |name: &str, share: f64, calls: u64| {
            vec![Cell::Text(name.to_owned()), Cell::Share(share), Cell::Number(calls)]
        };
        Table {
            title: "parts",
            columns: vec!["part", "share", "calls"],
            rows: vec![row("b", 0.01, 0), row("a long name", 0.1234, 3), row("c", 0.0, 20)],
        }
    }

    #[test]
    fn columns_are_as_wide_as_what_is_in_them() {
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
    fn durations_are_short() {
        let shown = [(0, false), (119, true), (120, false), (7199, false), (7200, true)]
            .map(|(seconds, more)| Cell::Seconds(seconds, more).text());
        assert_eq!(shown, ["0 s", ">119 s", "2 min", "119 min", ">2 h"]);
    }

    #[test]
    fn any_column_sorts() {
        let names = |column, reverse| {
            let mut table = table();
            table.sort(column, reverse);
            table.rows.iter().map(|row| row[0].text()).collect::<Vec<_>>()
        };
        assert_eq!(names(0, false), ["a long name", "b", "c"]);
        assert_eq!(names(0, true), ["c", "b", "a long name"]);
        assert_eq!(names(1, false), ["a long name", "b", "c"]);
        assert_eq!(names(1, true), ["c", "b", "a long name"]);
        assert_eq!(names(2, false), ["c", "a long name", "b"]);
        assert_eq!(names(9, false), ["b", "a long name", "c"]);
    }
}
