//! What came of runs: rows, as text, and as they are kept in files.

use serde::Serialize;

use super::application::Came;
use crate::bench::stats::Spread;
use crate::bench::table::columns;

/// An application on a network, by one way.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Case {
    pub application: String,
    pub loss_percent: f64,
    pub rtt_ms: u32,
    pub way: String,
}

impl Case {
    pub fn text(&self) -> String {
        format!("{}, {} ms, {} %, {}", self.application, self.rtt_ms, self.loss_percent, self.way)
    }

    fn is_beside(&self, other: &Self) -> bool {
        let network = |it: &Self| (it.rtt_ms, it.loss_percent.to_bits());
        self.application == other.application && network(self) == network(other)
    }
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Row {
    #[serde(flatten)]
    pub case: Case,
    /// With the limit for those that were not done by then.
    pub seconds: Option<Spread>,
    pub over: usize,
    pub rounds: Vec<f64>,
}

pub fn told(came: Result<&Came, &anyhow::Error>) -> String {
    match came {
        Ok(Came { is_over: true, .. }) => "over".into(),
        Ok(Came { seconds, .. }) => format!("{seconds:.3} s"),
        Err(error) => format!("{error:#}"),
    }
}

/// In the order of their first runs.
pub fn joined(came: impl Iterator<Item = (Case, Came)>) -> Vec<Row> {
    let mut rows: Vec<Row> = Vec::new();
    for (case, came) in came {
        let at = rows.iter().position(|row| row.case == case).unwrap_or(rows.len());
        if at == rows.len() {
            rows.push(Row { case, seconds: None, over: 0, rounds: Vec::new() });
        }
        if let Some(row) = rows.get_mut(at) {
            row.rounds.push(came.seconds);
            row.over += usize::from(came.is_over);
        }
    }
    rows.iter_mut().for_each(|row| row.seconds = Spread::of(&row.rounds));
    rows.sort_by_key(Row::order);
    rows
}

impl Row {
    fn order(&self) -> (u32, u64, String) {
        let case = &self.case;
        (case.rtt_ms, (case.loss_percent * 1e6) as u64, case.application.clone())
    }

    /// How often its median fits into another's.
    fn times(&self, rows: &[Self], way: &str) -> Option<f64> {
        let other = rows.iter().find(|row| row.case.is_beside(&self.case) && row.case.way == way)?;
        Some(other.seconds?.median / self.seconds?.median)
    }
}

pub fn render(rows: &[Row]) -> String {
    let head = [
        "application",
        "RTT ms",
        "loss %",
        "way",
        "seconds",
        "least",
        "most",
        "over",
        "x of cubic",
        "x of bbr",
    ];
    let mut lines = vec![head.map(str::to_owned).to_vec()];
    for row in rows {
        let case = &row.case;
        let mut line = vec![
            case.application.clone(),
            case.rtt_ms.to_string(),
            case.loss_percent.to_string(),
            case.way.clone(),
        ];
        let spread = row.seconds.map(|it| [it.median, it.min, it.max].map(|seconds| format!("{seconds:.3}")));
        line.extend(spread.unwrap_or_else(|| ["-", "-", "-"].map(str::to_owned)));
        line.push(row.over.to_string());
        let times =
            |way: &str| row.times(rows, way).map_or_else(|| "-".to_owned(), |times| format!("{times:.2}"));
        line.extend([times("cubic"), times("bbr")]);
        lines.push(line);
    }
    columns(&lines)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ways_stand_beside_each_other() {
        let case =
            |rtt_ms, way: &str| Case { application: "a".into(), loss_percent: 1.0, rtt_ms, way: way.into() };
        let done = |seconds| Came { seconds, is_over: false };
        let came = [
            (case(100, "carried"), done(0.5)),
            (case(100, "cubic"), done(1.0)),
            (case(100, "cubic"), done(3.0)),
            (case(20, "cubic"), Came { seconds: 60.0, is_over: true }),
        ];
        let rows = joined(came.into_iter());
        let [near, carried, cubic] = &rows[..] else { panic!("three rows: {rows:?}") };
        assert_eq!((near.case.rtt_ms, near.over, near.rounds.as_slice()), (20, 1, &[60.0][..]));
        assert_eq!(cubic.seconds.map(|it| it.median), Some(2.0));
        assert_eq!((carried.times(&rows, "cubic"), carried.times(&rows, "bbr")), (Some(4.0), None));
        assert!(render(&rows).lines().count() == 4);
    }
}
