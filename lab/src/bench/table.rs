//! Formats measured values as a table for the terminal, and writes them to JSON files.

use std::path::Path;

use anyhow::Context;
use millrace_daemon::columns::{ColumnSide, aligned};

use super::figures::{RelayFigures, RelayRow};
use super::owed::OwedFigures;
use super::profile::LinkProfile;
use super::wire::Matched;
use crate::stats::Percentiles;

const HEAD: [&str; 18] = [
    "relay",
    "link",
    "subs",
    "delivered",
    "lost",
    "app p50/p99 us",
    "owed p50/p99 us",
    "on time %",
    "wire p50/p99 us",
    "CPU us/obj",
    "relay us/obj",
    "calls/obj",
    "packets in/out",
    "RSS MiB",
    "matched",
    "kernel/ahead %",
    "BPF us/pkt",
    "gate us/pkt",
];

/// Renders one line per row, with medians over the rounds, and below them the errors of failed rounds.
pub fn render(rows: &[RelayRow]) -> String {
    let mut lines = vec![HEAD.map(str::to_owned).to_vec()];
    lines.extend(rows.iter().filter_map(|row| row.median().map(|figures| line(row, &figures))));
    let mut text = columns(&lines);
    for row in rows {
        if let Some(error) = row.error() {
            text += &format!("{}: {error}\n", what(row));
        }
    }
    text
}

/// Returns the line that is printed after each run: the numbers of delivered and lost objects, and the latencies.
pub fn told(figures: &Result<RelayFigures, String>) -> String {
    match figures {
        Err(error) => error.clone(),
        Ok(figures) => format!(
            "{} delivered, {} lost{}, app {} us, wire {} us",
            figures.delivered,
            figures.lost,
            figures.owed.map_or_else(String::new, |owed| format!(
                ", {:.2} % of those owed, {:.2} % within a second",
                owed.delivered_percent(),
                owed.on_time_percent()
            )),
            pair(figures.latency_us),
            pair(figures.wire_latency_us)
        ),
    }
}

pub fn what(row: &RelayRow) -> String {
    let link =
        if row.profile == LinkProfile::Clean { String::new() } else { format!(", {}", row.profile.name()) };
    format!("{} x {}{link}", row.contender.label_over(row.load.transport), row.load.subscribers)
}

fn line(row: &RelayRow, figures: &RelayFigures) -> Vec<String> {
    let cpu = figures.cpu_ns_per_object;
    vec![
        row.contender.label_over(row.load.transport),
        row.profile.name().to_owned(),
        row.load.subscribers.to_string(),
        figures.delivered.to_string(),
        figures.lost.to_string(),
        pair(figures.latency_us),
        figures.owed.map_or_else(dash, owed),
        figures.owed.map_or_else(dash, |owed| format!("{:.1}", owed.on_time_percent())),
        pair(figures.wire_latency_us),
        format!("{:.1}", cpu.machine / 1e3),
        format!("{:.1}", cpu.relay / 1e3),
        figures.syscalls_per_object.map_or_else(dash, |calls| format!("{calls:.2}")),
        format!(
            "{:.2} / {:.2}",
            figures.packets_per_object.from_publisher, figures.packets_per_object.to_subscriber
        ),
        format!("{:.1}", figures.rss_bytes as f64 / f64::from(1 << 20)),
        matched(&figures.wire),
        figures.kernel.map_or_else(dash, |it| format!("{:.1} / {:.1}", it.sent_percent, it.ahead_percent)),
        figures.kernel.map_or_else(dash, |it| format!("{:.1}", it.bpf_ns_per_packet / 1e3)),
        figures.gate_ns_per_packet.map_or_else(dash, |ns| format!("{:.2}", ns / 1e3)),
    ]
}

pub fn dash() -> String {
    "-".to_owned()
}

/// Formats the 50th and the 99th percentile.
pub fn pair(percentiles: Option<Percentiles>) -> String {
    percentiles.map_or_else(dash, |p| format!("{:.0} / {:.0}", p.p50, p.p99))
}

/// Formats the latencies of objects that subscribers should have received. A latency is `never` if the object at that
/// percentile was lost.
fn owed(owed: OwedFigures) -> String {
    let late = |us: Option<f64>| us.map_or_else(|| "never".to_owned(), |us| format!("{us:.0}"));
    format!("{} / {}", late(owed.latency_us.p50), late(owed.latency_us.p99))
}

/// Returns `all` if every object that arrived at the relay was sent once to each subscriber. Otherwise returns the
/// numbers of missing and extra copies.
pub fn matched(wire: &Matched) -> String {
    match (wire.missing, wire.extra) {
        (0, 0) if wire.copies > 0 => "all".to_owned(),
        (missing, extra) => format!("-{missing} +{extra}"),
    }
}

/// Aligns a table with the heading first. The first column is aligned left, all others right.
pub fn columns(lines: &[Vec<String>]) -> String {
    let side = |column| if column == 0 { ColumnSide::Left } else { ColumnSide::Right };
    aligned(lines, side).into_iter().map(|line| line + "\n").collect()
}

/// Writes the rows to a file as a JSON array.
pub fn write_json(path: &Path, rows: &[serde_json::Value]) -> anyhow::Result<()> {
    let text = serde_json::to_string_pretty(rows)?;
    std::fs::write(path, text + "\n").with_context(|| format!("cannot write {}", path.display()))
}
