//! Result rows of `bench graft apps`: as text, and as JSON files keep them.

use std::path::Path;

use anyhow::Context as _;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::application::RunResult;
use super::video::ViewerFigures;
use crate::bench::graft::network::NetworkProfile;
use crate::bench::table::columns;
use crate::beside::{Panel, PanelLine, PanelMark};
use crate::stats::Spread;

/// An application on one network, whose connections use either plain TCP or a tunnel (`way`).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct AppCase {
    pub application: String,
    pub loss_percent: f64,
    /// Mean number of consecutive packets in a burst of losses.
    pub burst_packets: f64,
    pub rtt_ms: u32,
    pub way: String,
}

impl AppCase {
    pub fn text(&self) -> String {
        format!("{}, {} ms, {} %, {}", self.application, self.rtt_ms, self.loss_text(), self.way)
    }

    fn loss_text(&self) -> String {
        NetworkProfile { loss: self.loss_percent, burst: self.burst_packets, rtt_ms: self.rtt_ms }.loss_text()
    }

    /// Reports whether `self` and `other` have the same application and the same network. One may use plain TCP and the
    /// other a tunnel.
    pub fn is_beside(&self, other: &Self) -> bool {
        let network = |it: &Self| (it.rtt_ms, it.loss_percent.to_bits(), it.burst_packets.to_bits());
        self.application == other.application && network(self) == network(other)
    }
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct AppRow {
    #[serde(flatten)]
    pub case: AppCase,
    /// Durations of the runs, seconds. For a run that was stopped, the duration is the time limit.
    #[serde(skip_deserializing)]
    pub seconds: Option<Spread>,
    pub over: usize,
    pub rounds: Vec<f64>,
    /// Waiting times and stalls of the film's viewer, one entry per round.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub watched: Vec<ViewerFigures>,
}

pub fn told(came: Result<&RunResult, &anyhow::Error>) -> String {
    match came {
        Ok(RunResult { watched: Some(it), .. }) => {
            format!("{:.3} s until it began, {} stalls of {:.3} s", it.start_s, it.stalls, it.stalled_s)
        }
        Ok(RunResult { is_over: true, .. }) => "over".into(),
        Ok(RunResult { seconds, .. }) => format!("{seconds:.3} s"),
        Err(error) => format!("{error:#}"),
    }
}

/// Joins the runs of the same application, network and route into one row. Rows are sorted by round-trip time and loss.
pub fn joined(came: impl IntoIterator<Item = AppRow>) -> Vec<AppRow> {
    let mut rows: Vec<AppRow> = Vec::new();
    for row in came {
        match rows.iter_mut().find(|other| other.case == row.case) {
            Some(other) => {
                other.rounds.extend(row.rounds);
                other.watched.extend(row.watched);
                other.over += row.over;
            }
            None => rows.push(row),
        }
    }
    rows.iter_mut().for_each(|row| row.seconds = Spread::from_values(&row.rounds));
    rows.sort_by_key(AppRow::order);
    rows
}

/// Reads the result rows of an earlier run. Medians and other values that are computed from several runs are computed
/// again.
pub fn read(path: &Path) -> anyhow::Result<Vec<AppRow>> {
    let read = || {
        let all: Vec<Value> = serde_json::from_slice(&std::fs::read(path)?)?;
        let rows = all.into_iter().filter(|it| it.get("application").is_some());
        anyhow::Ok(rows.map(serde_json::from_value).collect::<Result<Vec<_>, _>>()?)
    };
    read().with_context(|| format!("{}: rows of bench graft apps", path.display()))
}

/// Returns the plot's panels, one for each network, and the names of the compared transports (plain TCP with a
/// congestion control, or a tunnel) that have results.
pub fn panels(rows: &[AppRow]) -> (Vec<Panel>, Vec<&str>) {
    let mut ways: Vec<&str> = Vec::new();
    let mut panels: Vec<Panel> = Vec::new();
    for row in rows {
        let (case, Some(seconds)) = (&row.case, row.seconds) else { continue };
        let bursts = if case.burst_packets > 1.0 {
            format!(" in bursts of {}", case.burst_packets)
        } else {
            String::new()
        };
        let title = format!("{} ms, {} % lost{bursts}: seconds", case.rtt_ms, case.loss_percent);
        if !panels.iter().any(|panel| panel.title == title) {
            panels.push(Panel { title: title.clone(), is_log: true, lines: Vec::new() });
        }
        let Some(panel) = panels.iter_mut().find(|panel| panel.title == title) else { continue };
        if !panel.lines.iter().any(|line| line.name == case.application) {
            panel.lines.push(PanelLine { name: case.application.clone(), marks: Vec::new() });
        }
        let series = ways.iter().position(|way| *way == case.way).unwrap_or_else(|| {
            ways.push(&case.way);
            ways.len() - 1
        });
        let mark = PanelMark::from_spread(series, seconds);
        let line = panel.lines.iter_mut().filter(|line| line.name == case.application);
        line.for_each(|line| line.marks.push(mark));
    }
    (panels, ways)
}

impl AppRow {
    pub fn new(case: AppCase, came: RunResult) -> Self {
        let over = usize::from(came.is_over);
        let rounds = vec![came.seconds];
        Self {
            case,
            seconds: Spread::from_values(&rounds),
            over,
            rounds,
            watched: came.watched.into_iter().collect(),
        }
    }

    fn order(&self) -> (u32, [u64; 2], String) {
        let case = &self.case;
        let loss = [case.loss_percent, case.burst_packets].map(|it| (it * 1e6) as u64);
        (case.rtt_ms, loss, case.application.clone())
    }

    /// Returns the total number of the film's stalls in all rounds, as text.
    fn stalls(&self) -> String {
        match self.watched.is_empty() {
            true => "-".to_owned(),
            false => self.watched.iter().map(|it| it.stalls).sum::<u32>().to_string(),
        }
    }

    /// Returns how many times faster the application is in this row than over `way` (plain TCP or a tunnel), by median
    /// durations.
    fn times(&self, rows: &[Self], way: &str) -> Option<f64> {
        let other = rows.iter().find(|row| row.case.is_beside(&self.case) && row.case.way == way)?;
        Some(other.seconds?.median / self.seconds?.median)
    }
}

pub fn render(rows: &[AppRow]) -> String {
    let head = [
        "application",
        "RTT ms",
        "loss %",
        "way",
        "seconds",
        "least",
        "most",
        "over",
        "stalls",
        "x of cubic",
        "x of bbr",
    ];
    let mut lines = vec![head.map(str::to_owned).to_vec()];
    for row in rows {
        let case = &row.case;
        let mut line =
            vec![case.application.clone(), case.rtt_ms.to_string(), case.loss_text(), case.way.clone()];
        let spread = row.seconds.map(|it| [it.median, it.min, it.max].map(|seconds| format!("{seconds:.3}")));
        line.extend(spread.unwrap_or_else(|| ["-", "-", "-"].map(str::to_owned)));
        line.extend([row.over.to_string(), row.stalls()]);
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

    fn case_of(application: &str) -> AppCase {
        AppCase {
            application: application.into(),
            loss_percent: 1.0,
            burst_packets: 1.0,
            rtt_ms: 1,
            way: String::new(),
        }
    }

    #[test]
    fn networks_with_loss_bursts_get_result_rows_of_their_own() {
        let watched =
            |stalls| ViewerFigures { start_s: 1.0, stalls, stalled_s: f64::from(stalls), is_over: false };
        let came = |stalls| RunResult { seconds: 1.0, is_over: false, watched: Some(watched(stalls)) };
        let bursts = AppCase { burst_packets: 8.0, ..case_of("film") };
        let came = [(case_of("film"), came(0)), (bursts.clone(), came(1)), (bursts, came(2))];
        let rows = joined(came.map(|(case, came)| AppRow::new(case, came)));
        assert_eq!(rows.iter().map(AppRow::stalls).collect::<Vec<_>>(), ["0", "3"]);
        assert!(!rows[0].case.is_beside(&rows[1].case));
        assert!(rows[1].case.text().contains("1/8 %"));
    }

    #[test]
    fn median_times_of_two_routes_are_compared_on_the_same_network() {
        let case = |rtt_ms, way: &str| AppCase { rtt_ms, way: way.into(), ..case_of("a") };
        let done = |seconds| RunResult { seconds, is_over: false, watched: None };
        let came = [
            (case(100, "carried"), done(0.5)),
            (case(100, "cubic"), done(1.0)),
            (case(100, "cubic"), done(3.0)),
            (case(20, "cubic"), RunResult { is_over: true, ..done(60.0) }),
        ];
        let rows = joined(came.map(|(case, came)| AppRow::new(case, came)));
        let [near, carried, cubic] = &rows[..] else { panic!("three rows: {rows:?}") };
        assert_eq!((near.case.rtt_ms, near.over, near.rounds.as_slice()), (20, 1, &[60.0][..]));
        assert_eq!(cubic.seconds.map(|it| it.median), Some(2.0));
        assert_eq!((carried.times(&rows, "cubic"), carried.times(&rows, "bbr")), (Some(4.0), None));
        assert!(render(&rows).lines().count() == 4);
    }

    #[test]
    fn results_of_several_files_are_drawn_in_one_plot() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("rows.json");
        let of = |way: &str, seconds| {
            let case = AppCase { way: way.into(), ..case_of("film") };
            let watched = ViewerFigures { start_s: seconds, stalls: 1, stalled_s: 0.5, is_over: false };
            AppRow::new(case, RunResult { seconds, is_over: false, watched: Some(watched) })
        };
        let rows = joined([of("cubic", 1.0), of("cubic", 4.0), of("carried", 0.5)]);
        let mut json: Vec<_> = rows.iter().map(|row| serde_json::to_value(row).expect("JSON")).collect();
        json.push(serde_json::json!({ "candidate": "carried", "than": "cubic" }));
        std::fs::write(&path, serde_json::to_string(&json).expect("JSON")).expect("a file");
        assert_eq!(joined(read(&path).expect("rows")), rows);
        let all = joined(read(&path).expect("rows").into_iter().chain([of("cubic", 2.0)]));
        assert_eq!(all[0].seconds.map(|it| (it.median, it.max)), Some((2.0, 4.0)));
        assert_eq!(all[0].stalls(), "3");
        let (panels, ways) = panels(&all);
        assert_eq!((panels.len(), ways), (1, vec!["cubic", "carried"]));
        let marks: Vec<_> = panels[0].lines[0].marks.iter().map(|mark| (mark.series, mark.at)).collect();
        assert_eq!((panels[0].title.as_str(), marks), ("1 ms, 1 % lost: seconds", vec![(0, 2.0), (1, 0.5)]));
        std::fs::write(&path, "{}").expect("a file");
        assert!(
            read(&path).expect_err("no rows").to_string().contains("rows.json: rows of bench graft apps")
        );
    }
}
