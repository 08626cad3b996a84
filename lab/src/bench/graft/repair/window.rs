//! Compares Selective Repeat with Go-Back-N while the send window limits the throughput.

use anyhow::ensure;
use serde_json::{Value, json};
use std::time::Duration;

use super::datagrams::{DatagramPace, DatagramRun, FunctionListSettings, RepairOutcome};
use super::{PacketWindow, RepairArgs, site};
use crate::bench::site::BenchSite;
use crate::bench::table::columns;
use crate::progress::BenchProgress;
use crate::stats::Spread;

const SELECTIVE: &[&str] = &["window", "number", "repair", "acknowledge"];
const GO_BACK: &[&str] = &["window", "gobackn", "number", "acknowledge"];

/// Bytes around the payload: headers of Ethernet, IPv4 and UDP, and the framing of an unencrypted session.
const AROUND_BYTES: usize = 14 + 20 + 8 + 16;

/// Results on one path with one size of the send window: one result per round, for Selective Repeat and for Go-Back-N.
#[derive(Default)]
struct WindowCell {
    selective: Vec<WindowFigures>,
    go_back: Vec<WindowFigures>,
}

#[derive(Clone, Copy)]
struct WindowFigures {
    /// Packets per second that the application received.
    packets: f64,
    /// Number of transmissions per received packet.
    transmissions: f64,
}

pub fn run(args: &RepairArgs) -> anyhow::Result<(Vec<Value>, String)> {
    let cells = args.rtt_ms.len() * args.loss.len() * args.windows.len();
    let progress = BenchProgress::with_steps(cells * args.rounds * 2);
    let mut rows = Vec::new();
    let head = HEAD.map(str::to_owned).to_vec();
    let mut lines = vec![head];
    for rtt_ms in &args.rtt_ms {
        for loss in &args.loss {
            for window in &args.windows {
                let site = site(*rtt_ms, *loss, args.filled.then(|| args.fill(*window)))?;
                let cell = args.cell(&site, *rtt_ms, *window, &progress)?;
                rows.push(cell.json(args, *rtt_ms, *loss, *window));
                lines.push(cell.line(*rtt_ms, *loss, *window));
            }
        }
    }
    drop(progress);
    Ok((rows, columns(&lines)))
}

impl RepairArgs {
    fn fill(&self, packets: u32) -> PacketWindow {
        PacketWindow { packets, bytes: (self.bytes + AROUND_BYTES) as u64 }
    }

    /// Measures Selective Repeat and Go-Back-N in turn, so that a drift of the machine affects both alike.
    fn cell(
        &self,
        site: &BenchSite,
        rtt_ms: u32,
        window: u32,
        progress: &BenchProgress,
    ) -> anyhow::Result<WindowCell> {
        let mut cell = WindowCell::default();
        for round in 1..=self.rounds {
            for (functions, name, figures) in [
                (SELECTIVE, "Selective Repeat", &mut cell.selective),
                (GO_BACK, "Go-Back-N", &mut cell.go_back),
            ] {
                let label = format!("round {round}, {name}, window {window}, {rtt_ms} ms");
                progress.begin(label.clone());
                figures.push(self.measure(site, rtt_ms, window, functions)?);
                progress.next(label);
            }
        }
        Ok(cell)
    }

    fn measure(
        &self,
        site: &BenchSite,
        rtt_ms: u32,
        window: u32,
        functions: &[&str],
    ) -> anyhow::Result<WindowFigures> {
        let parameters = format!(
            "[sessions.parameters.window]\npackets = {window}\n\
             [sessions.parameters.repair]\ntries = 0\nretry_us = {}\n[sessions.parameters.gobackn]\nretry_us = {}",
            u64::from(rtt_ms) * 1500 + 10_000,
            u64::from(rtt_ms) * 3000 + 20_000,
        );
        let sending = Duration::from_secs(self.seconds);
        let run =
            DatagramRun { pace: DatagramPace::Window, bytes: self.bytes, sending, grace: Duration::ZERO };
        let outcome = run.measure(
            site,
            &FunctionListSettings { functions, parameters, ..FunctionListSettings::default() },
        )?;
        let wrong = outcome.wrong;
        let disordered = outcome.disordered;
        ensure!(wrong == 0, "{wrong} datagrams were altered or duplicated");
        ensure!(disordered == 0 || functions == SELECTIVE, "{disordered} datagrams arrived out of order");
        Ok(WindowFigures::from_outcome(&outcome, self.seconds))
    }
}

impl WindowFigures {
    /// Computes the packet rate and the transmissions per packet. Packets still on their way at the end count as sent
    /// but not as received.
    fn from_outcome(outcome: &RepairOutcome, seconds: u64) -> Self {
        let count = |reason: &str| outcome.sender.get(reason).copied().unwrap_or_default() as f64;
        let packets = outcome.received as f64;
        // The counter `sent-by-us` counts packets that were sent by packet functions and not by the application. In
        // this benchmark they are all retransmissions.
        let again = count("sent-by-us");
        let share = packets / (outcome.sent as f64).max(1.0);
        Self {
            packets: packets / seconds as f64,
            transmissions: (count("sent") + again) * share / packets.max(1.0),
        }
    }
}

/// Returns the ratio of transmissions per packet, Go-Back-N to Selective Repeat, by the textbook formula.
fn formula(loss_percent: f64, window: u32) -> f64 {
    let p = loss_percent / 100.0;
    (1.0 - p + p * f64::from(window)) / (1.0 - p)
}

const HEAD: [&str; 9] = [
    "RTT ms",
    "loss %",
    "window",
    "SR packets/s",
    "GBN packets/s",
    "ratio",
    "formula",
    "SR sent/packet",
    "GBN sent/packet",
];

impl WindowCell {
    fn medians(&self) -> [f64; 4] {
        let median = |values: Vec<f64>| Spread::from_values(&values).map_or(f64::NAN, |spread| spread.median);
        let packets = |figures: &[WindowFigures]| median(figures.iter().map(|it| it.packets).collect());
        let transmissions =
            |figures: &[WindowFigures]| median(figures.iter().map(|it| it.transmissions).collect());
        [
            packets(&self.selective),
            packets(&self.go_back),
            transmissions(&self.selective),
            transmissions(&self.go_back),
        ]
    }

    fn line(&self, rtt_ms: u32, loss: f64, window: u32) -> Vec<String> {
        let [selective, go_back, selective_sent, go_back_sent] = self.medians();
        let mut line = vec![rtt_ms.to_string(), loss.to_string(), window.to_string()];
        line.extend([selective, go_back].map(|packets| format!("{packets:.0}")));
        line.extend(
            [selective / go_back, formula(loss, window), selective_sent, go_back_sent]
                .map(|it| format!("{it:.2}")),
        );
        line
    }

    fn json(&self, args: &RepairArgs, rtt_ms: u32, loss: f64, window: u32) -> Value {
        let [selective, go_back, ..] = self.medians();
        let rounds = |figures: &[WindowFigures]| {
            let each = figures.iter();
            each.map(|it| json!({ "packets_s": it.packets, "transmissions": it.transmissions }))
                .collect::<Vec<_>>()
        };
        json!({
            "part": "window", "filled": args.filled, "rtt_ms": rtt_ms, "loss_percent": loss, "window": window, "bytes": args.bytes,
            "seconds": args.seconds, "selective_repeat": rounds(&self.selective),
            "go_back_n": rounds(&self.go_back), "ratio": selective / go_back, "formula": formula(loss, window),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn go_back_n_formula_matches_textbooks() {
        assert!((formula(0.0, 128) - 1.0).abs() < 1e-9);
        assert!((formula(1.0, 16) - 1.15 / 0.99).abs() < 1e-9);
        assert!((formula(50.0, 3) - 4.0).abs() < 1e-9);
    }
}
