//! Formats the results of chains of relays for the terminal.

use super::super::figures::KernelWork;
use super::super::table::{columns, dash, matched, pair};
use super::figures::{ChainFigures, ChainRow, HopFigures};

const HEAD: [&str; 11] = [
    "relays",
    "hop",
    "delivered",
    "lost",
    "app p50/p99 us",
    "wire p50/p99 us",
    "CPU us/obj",
    "RSS MiB",
    "matched",
    "kernel/ahead %",
    "BPF us/pkt",
];

/// Renders for each row a line with the whole chain, whose CPU time is the machine's, and a line for each relay. All
/// are medians over the rounds. Below them are the latency that each further relay adds, and the errors of failed
/// rounds.
pub fn render(rows: &[ChainRow]) -> String {
    let mut lines = vec![HEAD.map(str::to_owned).to_vec()];
    for row in rows {
        let Some(figures) = row.median() else { continue };
        lines.push(whole(row, &figures));
        lines.extend(figures.hops.iter().enumerate().map(|(index, hop)| hop_line(index + 1, hop)));
    }
    let mut text = columns(&lines);
    for row in rows {
        if let Some(added) = row.added_per_hop(rows) {
            text += &format!(
                "{}: each further relay adds {:.1} us of wire latency p50 ({:.1} to {:.1})\n",
                row.label(),
                added.median,
                added.min,
                added.max
            );
        }
        if let Some(error) = row.error() {
            text += &format!("{}: {error}\n", row.label());
        }
    }
    text
}

/// Returns the line that is printed after each run: the numbers of delivered and lost objects, and the latencies.
pub fn told(figures: &Result<ChainFigures, String>) -> String {
    match figures {
        Err(error) => error.clone(),
        Ok(figures) => {
            let hops: Vec<_> = figures.hops.iter().map(|hop| pair(hop.wire_latency_us)).collect();
            format!(
                "{} delivered, {} lost, app {} us, wire {} us, by hop {}",
                figures.delivered,
                figures.lost,
                pair(figures.latency_us),
                pair(figures.wire_latency_us),
                hops.join(", ")
            )
        }
    }
}

fn whole(row: &ChainRow, figures: &ChainFigures) -> Vec<String> {
    let mut line = vec![
        row.label(),
        "all".to_owned(),
        figures.delivered.to_string(),
        figures.lost.to_string(),
        pair(figures.latency_us),
        pair(figures.wire_latency_us),
        format!("{:.1}", figures.machine_ns_per_object / 1e3),
        dash(),
        matched(&figures.wire),
    ];
    line.resize(HEAD.len(), dash());
    line
}

fn hop_line(hop: usize, figures: &HopFigures) -> Vec<String> {
    let kernel = |show: fn(KernelWork) -> String| figures.kernel.map_or_else(dash, show);
    vec![
        String::new(),
        hop.to_string(),
        dash(),
        dash(),
        dash(),
        pair(figures.wire_latency_us),
        format!("{:.1}", figures.cpu_ns_per_object / 1e3),
        format!("{:.1}", figures.rss_bytes as f64 / f64::from(1 << 20)),
        matched(&figures.wire),
        kernel(|it| format!("{:.1} / {:.1}", it.sent_percent, it.ahead_percent)),
        kernel(|it| format!("{:.1}", it.bpf_ns_per_packet / 1e3)),
    ]
}
