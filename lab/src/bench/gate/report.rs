//! Result rows: all rounds of one defence in one experiment, as JSON and as text.

use serde_json::{Map, Value, json};

use super::{
    super::{
        figures::{combine, error, extremes, middle},
        table::{columns, dash},
    },
    Experiment,
    defence::Defence,
};
use crate::stats::Spread;

/// JSON field of a round's results that has the honest requests over time. Rows that combine rounds do not have it.
pub const SERIES: &str = "series";
/// Names of the values that every row has in JSON: `null` if a value was not measured.
const FIGURES: [&str; 7] = [
    "requests_per_second",
    "mean_duration_ms",
    "cpu_ns_per_refused_packet",
    "syscalls",
    "recovery_s",
    "drops_per_second_per_core",
    "honest_goodput_ratio",
];

pub struct DefenceRow {
    pub experiment: Experiment,
    pub defence: Defence,
    /// Measured values of each round, or the error that ended the round.
    pub rounds: Vec<Result<Value, String>>,
}

impl DefenceRow {
    /// Returns a flat JSON object: the medians over the rounds, their spread (lowest and highest), and each round.
    pub fn json(&self) -> Value {
        let mut row = Map::new();
        row.insert("experiment".into(), json!(self.experiment.name()));
        row.insert("defence".into(), json!(self.defence.name()));
        row.extend(FIGURES.map(|name| (name.to_owned(), Value::Null)));
        let rounds: Vec<Value> = self.rounds.iter().flatten().cloned().collect();
        let numbers: Vec<Value> = rounds.iter().cloned().map(without_series).collect();
        if let Value::Object(median) = combine(&numbers, &middle) {
            row.extend(median);
        }
        row.insert("spread".into(), combine(&numbers, &extremes));
        if let Some(error) = self.error() {
            row.insert("error".into(), json!(error));
        }
        row.insert("rounds".into(), Value::Array(rounds));
        Value::Object(row)
    }

    /// Returns the median over the rounds of the measured value with this name, which may be nested (`a.b`).
    pub fn figure(&self, name: &str) -> Option<f64> {
        let rounds: Vec<Value> = self.rounds.iter().flatten().cloned().map(without_series).collect();
        let median = combine(&rounds, &middle);
        name.split('.').try_fold(&median, |value, key| value.get(key))?.as_f64()
    }

    /// Returns the lowest and the highest of a measured value, if there is more than one round.
    fn spread(&self, name: &str) -> Option<(f64, f64)> {
        let values: Vec<f64> = self.values_by_round(name).into_iter().flatten().collect();
        let spread = Spread::from_values(&values).filter(|_| self.rounds.len() > 1);
        spread.map(|spread| (spread.min, spread.max))
    }

    fn values_by_round(&self, name: &str) -> Vec<Option<f64>> {
        let figure =
            |figures: &Value| name.split('.').try_fold(figures, |value, key| value.get(key))?.as_f64();
        self.rounds.iter().map(|round| round.as_ref().ok().and_then(figure)).collect()
    }

    pub fn error(&self) -> Option<String> {
        error(&self.rounds)
    }
}

fn without_series(mut figures: Value) -> Value {
    if let Some(fields) = figures.as_object_mut() {
        fields.remove(SERIES);
    }
    figures
}

/// A column of the table: heading, name of the measured value, divisor, number of digits.
type DefenceColumn = (&'static str, &'static str, f64, usize);

const QUOTA: [DefenceColumn; 14] = [
    ("requests/s", "requests_per_second", 1.0, 0),
    ("calm", "calm_requests_per_second", 1.0, 0),
    ("mean ms", "mean_duration_ms", 1.0, 2),
    ("attempts served", "served_attempts", 1.0, 0),
    ("refused after ms", "refused_after_ms", 1.0, 1),
    ("recovery s", "recovery_s", 1.0, 2),
    ("server CPU % p50", "server_cpu_percent.p50", 1.0, 0),
    ("p99", "server_cpu_percent.p99", 1.0, 0),
    ("RSS MiB p99", "server_rss_mib.p99", 1.0, 1),
    ("packets refused", "refused_packets", 1.0, 0),
    ("CPU ns/packet", "cpu_ns_per_refused_packet", 1.0, 0),
    ("BPF ns/packet", "bpf_ns_per_refused_packet", 1.0, 0),
    ("CPU us/attempt", "cpu_ns_per_refused_attempt", 1e3, 1),
    ("system calls", "syscalls", 1.0, 0),
];

const FLOOD: [DefenceColumn; 9] = [
    ("flood kpps", "flood_packets_per_second", 1e3, 0),
    ("dropped kpps", "dropped_packets_per_second", 1e3, 0),
    ("goodput ratio", "honest_goodput_ratio", 1.0, 3),
    ("requests/s", "requests_per_second", 1.0, 0),
    ("mean ms", "mean_duration_ms", 1.0, 2),
    ("CPU ns/packet", "cpu_ns_per_refused_packet", 1.0, 0),
    ("BPF ns/packet", "bpf_ns_per_packet", 1.0, 0),
    ("with generator", "cpu_ns_per_packet_with_generator", 1.0, 0),
    ("kdrops/s/core", "drops_per_second_per_core", 1e3, 0),
];

/// Gains that the eQUIC paper reports for its gate over a limit in userspace: label, name of the measured value, change
/// in percent.
const EQUIC: [(&str, &str, Option<f64>); 6] = [
    ("requests per second", "requests_per_second", Some(30.9)),
    ("mean duration", "mean_duration_ms", Some(-65.0)),
    ("CPU time per refused packet", "cpu_ns_per_refused_packet", Some(-26.4)),
    ("CPU time per refused attempt", "cpu_ns_per_refused_attempt", None),
    ("system calls", "syscalls", Some(-89.0)),
    ("recovery", "recovery_s", Some(-18.0)),
];

/// Renders a table with the median over the rounds and the lowest and highest value of each figure.
pub fn render(rows: &[DefenceRow]) -> String {
    let mut text = String::new();
    for (experiment, head) in [(Experiment::Quota, &QUOTA[..]), (Experiment::Flood, &FLOOD[..])] {
        let rows: Vec<&DefenceRow> = rows.iter().filter(|row| row.experiment == experiment).collect();
        if rows.is_empty() {
            continue;
        }
        let mut lines = vec![heading(experiment, head)];
        lines.extend(
            rows.iter().filter(|row| row.rounds.iter().any(Result::is_ok)).map(|row| line(row, head)),
        );
        text += &columns(&lines);
        for row in &rows {
            if let Some(error) = row.error() {
                text += &format!("{}: {error}\n", row.defence.name());
            }
        }
        text += "\n";
    }
    text + &compare_with_equic(rows)
}

fn heading(experiment: Experiment, head: &[DefenceColumn]) -> Vec<String> {
    let names = head.iter().map(|(name, ..)| (*name).to_owned());
    std::iter::once(experiment.name().to_owned()).chain(names).collect()
}

fn line(row: &DefenceRow, head: &[DefenceColumn]) -> Vec<String> {
    let cell = |(_, figure, divisor, digits): &DefenceColumn| {
        let show = |value: f64| format!("{:.*}", *digits, value / divisor);
        let Some(median) = row.figure(figure) else { return dash() };
        match row.spread(figure) {
            Some((least, most)) => format!("{} ({}-{})", show(median), show(least), show(most)),
            None => show(median),
        }
    };
    std::iter::once(row.defence.name().to_owned()).chain(head.iter().map(cell)).collect()
}

/// Compares Millrace's packet gate with connection limits that the server itself enforces, before and after the
/// handshake. The eQUIC paper makes the same comparison. Rounds are interleaved, so each change is also computed within
/// single rounds, and its lowest and highest value are shown.
fn compare_with_equic(rows: &[DefenceRow]) -> String {
    let of = |defence: &Defence| {
        rows.iter().find(|row| row.experiment == Experiment::Quota && row.defence == *defence)
    };
    let pairs: Vec<(&DefenceRow, &DefenceRow)> = [Defence::Gate, Defence::GateAnswer]
        .iter()
        .filter_map(of)
        .flat_map(|gate| {
            [Defence::User, Defence::UserEarly].iter().filter_map(of).map(move |user| (gate, user))
        })
        .collect();
    if pairs.is_empty() {
        return String::new();
    }
    let heading =
        pairs.iter().map(|(gate, user)| format!("{} / {}", gate.defence.name(), user.defence.name()));
    let mut lines: Vec<Vec<String>> =
        vec![["change in %".to_owned()].into_iter().chain(heading).chain(["eQUIC".to_owned()]).collect()];
    for (name, figure, reported) in EQUIC {
        let changes = pairs.iter().map(|(gate, user)| change(gate, user, figure));
        let reported = reported.map_or_else(dash, percent);
        lines.push([name.to_owned()].into_iter().chain(changes).chain([reported]).collect());
    }
    columns(&lines)
}

/// Returns the difference between two defences' medians of a measured value in percent, with the lowest and highest
/// difference within a round.
fn change(gate: &DefenceRow, user: &DefenceRow, figure: &str) -> String {
    let of = |(gate, user): (f64, f64)| (user > 0.0).then(|| 100.0 * (gate / user - 1.0));
    let Some(median) = gate.figure(figure).zip(user.figure(figure)).and_then(of) else { return dash() };
    let by_round = gate.values_by_round(figure).into_iter().zip(user.values_by_round(figure));
    let changes: Vec<f64> = by_round.filter_map(|(gate, user)| of((gate?, user?))).collect();
    match Spread::from_values(&changes).filter(|_| changes.len() > 1) {
        Some(Spread { min, max, .. }) => {
            format!("{} ({} to {})", percent(median), percent(min), percent(max))
        }
        None => percent(median),
    }
}

fn percent(value: f64) -> String {
    format!("{value:+.1}")
}

pub fn what(row: &DefenceRow) -> String {
    format!("{}, {}", row.experiment.name(), row.defence.name())
}

/// Returns the line that is printed after each run.
pub fn told(figures: &Result<Value, String>) -> String {
    let figures = match figures {
        Err(error) => return error.clone(),
        Ok(figures) => figures,
    };
    let number = |name: &str| figures.get(name).and_then(Value::as_f64);
    let show = |name| number(name).map_or_else(dash, |value| format!("{value:.1}"));
    format!(
        "{} requests/s, {} % of calm, {} ns per refused packet",
        show("requests_per_second"),
        number("honest_goodput_ratio").map_or_else(dash, |ratio| format!("{:.0}", 100.0 * ratio)),
        show("cpu_ns_per_refused_packet"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(defence: Defence, rounds: Vec<Result<Value, String>>) -> DefenceRow {
        DefenceRow { experiment: Experiment::Quota, defence, rounds }
    }

    fn figures(requests: f64, syscalls: u64) -> Result<Value, String> {
        Ok(json!({
            "requests_per_second": requests, "syscalls": syscalls, "recovery_s": null,
            "server_cpu_percent": {"p50": 7.0}, "series": [1, 2]
        }))
    }

    #[test]
    fn result_row_has_medians_but_no_time_series() {
        let row = row(Defence::Gate, vec![figures(10.0, 1), figures(30.0, 3), figures(20.0, 5)]);
        assert_eq!(row.figure("requests_per_second"), Some(20.0));
        assert_eq!(row.figure("server_cpu_percent.p50"), Some(7.0));
        assert_eq!(row.figure("recovery_s"), None);
        let json = row.json();
        assert_eq!((&json["defence"], &json["syscalls"]), (&json!("gate"), &json!(3)));
        assert_eq!(json["spread"]["syscalls"], json!([1.0, 5.0]));
        assert_eq!(json["rounds"][0]["series"], json!([1, 2]));
        assert!(FIGURES.iter().all(|name| json.get(name).is_some()));
    }

    #[test]
    fn defence_that_cannot_run_is_a_row_with_its_error() {
        let row = row(Defence::XdpFilter, vec![Err("no limits".into()), Err("no limits".into())]);
        let json = row.json();
        assert_eq!(json["error"], "no limits");
        assert!(FIGURES.iter().all(|name| json[name].is_null()));
        assert!(render(&[row]).contains("xdp-filter: no limits"));
    }

    #[test]
    fn report_gives_percent_change_of_gate_against_userspace_defences() {
        let rows = [
            row(Defence::User, vec![figures(100.0, 50), figures(200.0, 50)]),
            row(Defence::UserEarly, vec![figures(120.0, 20)]),
            row(Defence::Gate, vec![figures(150.0, 5), figures(180.0, 5)]),
        ];
        let text = render(&rows);
        let line = |what: &str| text.lines().rfind(|line| line.starts_with(what)).expect("a line").to_owned();
        assert!(line("change").contains("gate / user  ") && line("change").contains("gate / user-early"));
        // The two defences' median request rates are 150 and 165, which is 10 % more. Within the two rounds the change
        // is +50 % and -10 %.
        let requests = line("requests per second");
        assert!(requests.contains("+10.0 (-10.0 to +50.0)") && requests.contains("+37.5"), "{requests}");
        assert!(requests.ends_with("+30.9"), "{requests}");
        assert!(line("system calls").contains("-90.0 (-90.0 to -90.0)"));
        assert!(line("recovery").contains('-'));
        assert!(text.contains("165 (150-180)") && text.contains("  120  "), "{text}");
    }
}
