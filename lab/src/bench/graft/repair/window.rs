//! Selective Repeat against Go-Back-N, where the window is the limit.

use anyhow::ensure;
use serde_json::{Value, json};
use std::time::Duration;

use super::datagrams::{Graft, Outcome, Pace, Run};
use super::{Args, Fill, site};
use crate::bench::site::Site;
use crate::bench::table::columns;
use crate::progress::Progress;
use crate::stats::Spread;

const SELECTIVE: &[&str] = &["window", "number", "repair", "acknowledge"];
const GO_BACK: &[&str] = &["window", "gobackn", "number", "acknowledge"];

/// Ethernet's, IPv4's and UDP's headers, and the frame of a session in clear.
const AROUND_BYTES: usize = 14 + 20 + 8 + 16;

/// On one path, with one window: by list, one figure a round.
#[derive(Default)]
struct Cell {
    selective: Vec<Figures>,
    go_back: Vec<Figures>,
}

#[derive(Clone, Copy)]
struct Figures {
    /// A second, as the application gets them.
    packets: f64,
    /// Transmissions for each of them.
    transmissions: f64,
}

pub fn run(args: &Args) -> anyhow::Result<(Vec<Value>, String)> {
    let cells = args.rtt_ms.len() * args.loss.len() * args.windows.len();
    let progress = Progress::of(cells * args.rounds * 2);
    let (mut rows, head) = (Vec::new(), HEAD.map(str::to_owned).to_vec());
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

impl Args {
    fn fill(&self, packets: u32) -> Fill {
        Fill { packets, bytes: (self.bytes + AROUND_BYTES) as u64 }
    }

    /// Both lists in turn, so that what changes on the machine over time meets both.
    fn cell(&self, site: &Site, rtt_ms: u32, window: u32, progress: &Progress) -> anyhow::Result<Cell> {
        let mut cell = Cell::default();
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

    fn measure(&self, site: &Site, rtt_ms: u32, window: u32, functions: &[&str]) -> anyhow::Result<Figures> {
        let parameters = format!(
            "[parameters.window]\npackets = {window}\n\
             [parameters.repair]\ntries = 0\nretry_us = {}\n[parameters.gobackn]\nretry_us = {}",
            u64::from(rtt_ms) * 1500 + 10_000,
            u64::from(rtt_ms) * 3000 + 20_000,
        );
        let sending = Duration::from_secs(self.seconds);
        let run = Run { pace: Pace::Window, bytes: self.bytes, sending, grace: Duration::ZERO };
        let outcome =
            run.measure(site, &Graft { functions, parameters, session: self.session(), ..Graft::default() })?;
        let (wrong, disordered) = (outcome.wrong, outcome.disordered);
        ensure!(wrong == 0, "{wrong} datagrams were not as they were sent, or came twice");
        ensure!(disordered == 0 || functions == SELECTIVE, "{disordered} datagrams came out of order");
        Ok(Figures::of(&outcome, self.seconds))
    }
}

impl Figures {
    /// What is under way at the end has been sent and has not come: it is left out.
    fn of(outcome: &Outcome, seconds: u64) -> Self {
        let count = |reason: &str| outcome.sender.get(reason).copied().unwrap_or_default() as f64;
        let packets = outcome.received as f64;
        // What is sent again leaves by the way that every packet of a function does.
        let again = count("sent-by-us");
        let share = packets / (outcome.sent as f64).max(1.0);
        Self {
            packets: packets / seconds as f64,
            transmissions: (count("sent") + again) * share / packets.max(1.0),
        }
    }
}

/// Transmissions of a packet with Go-Back-N, for each that Selective Repeat would need, as textbooks have it.
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

impl Cell {
    fn medians(&self) -> [f64; 4] {
        let median = |values: Vec<f64>| Spread::of(&values).map_or(f64::NAN, |spread| spread.median);
        let packets = |figures: &[Figures]| median(figures.iter().map(|it| it.packets).collect());
        let transmissions = |figures: &[Figures]| median(figures.iter().map(|it| it.transmissions).collect());
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

    fn json(&self, args: &Args, rtt_ms: u32, loss: f64, window: u32) -> Value {
        let [selective, go_back, ..] = self.medians();
        let rounds = |figures: &[Figures]| {
            let each = figures.iter();
            each.map(|it| json!({ "packets_s": it.packets, "transmissions": it.transmissions }))
                .collect::<Vec<_>>()
        };
        json!({
            "part": "window", "protocol": args.protocol, "filled": args.filled, "rtt_ms": rtt_ms, "loss_percent": loss, "window": window, "bytes": args.bytes,
            "seconds": args.seconds, "selective_repeat": rounds(&self.selective),
            "go_back_n": rounds(&self.go_back), "ratio": selective / go_back, "formula": formula(loss, window),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_formula_is_that_of_textbooks() {
        assert!((formula(0.0, 128) - 1.0).abs() < 1e-9);
        assert!((formula(1.0, 16) - 1.15 / 0.99).abs() < 1e-9);
        assert!((formula(50.0, 3) - 4.0).abs() < 1e-9);
    }
}
