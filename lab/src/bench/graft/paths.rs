//! `bench graft paths`: the throughput of a session of packet grafts over two paths, and the longest time without data
//! when one of the paths is cut.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::ensure;
use serde_json::{Value, json};

use super::repair::datagrams::{DatagramPace, DatagramRun, FunctionListSettings, RepairOutcome};
use super::two_links::{LinkEndNames, LinkProperties, SECOND};
use crate::bench::site::SUBSCRIBERS_LINK;
use crate::bench::table::{columns, write_json};
use crate::bench::usage::warn_if_busy;
use crate::lab::{Directions, Settings};
use crate::progress::BenchProgress;
use crate::stats::{Spread, median_by};

const FUNCTIONS: &[&str] = &["congestion", "window", "number", "repair", "acknowledge"];
/// Payload of a datagram, bytes. With headers, the frame is as long as a full TCP packet.
const BYTES: usize = 1400;

#[derive(Debug, clap::Args)]
pub struct PathArgs {
    #[command(flatten)]
    links: LinkProperties,
    /// Length of a run; one of the paths is cut in the middle of the run
    #[arg(long, default_value_t = 10)]
    seconds: u64,
    /// Number of runs of each measurement
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Write the results to this file, as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

#[derive(Clone, Copy)]
struct PathVariant {
    name: &'static str,
    ways: &'static [LinkEndNames],
    session: &'static str,
    cut: Option<&'static str>,
}

const CANDIDATES: [PathVariant; 5] = [
    PathVariant { name: "one path", ways: &[], session: "", cut: None },
    PathVariant { name: "spread", ways: &[SECOND], session: "", cut: None },
    PathVariant { name: "redundant", ways: &[SECOND], session: "paths = \"redundant\"\n", cut: None },
    PathVariant { name: "spread, first cut", ways: &[SECOND], session: "", cut: Some(SUBSCRIBERS_LINK) },
    PathVariant { name: "spread, second cut", ways: &[SECOND], session: "", cut: Some(SECOND.near) },
];

/// Result of one run of `bench graft paths`.
struct PathFigures {
    mbit_s: f64,
    /// Longest time without a datagram, ms.
    gap_ms: f64,
    sent: u64,
    received: u64,
}

pub fn run(args: PathArgs) -> anyhow::Result<()> {
    ensure!(args.rounds > 0 && args.seconds > 1, "--rounds must be at least 1, --seconds at least 2");
    args.links.check()?;
    warn_if_busy()?;
    let progress = BenchProgress::with_steps(CANDIDATES.len() * args.rounds);
    let mut figures: Vec<Vec<PathFigures>> = CANDIDATES.iter().map(|_| Vec::new()).collect();
    for round in 1..=args.rounds {
        for (candidate, figures) in CANDIDATES.iter().zip(&mut figures) {
            let label = format!("round {round}, {}", candidate.name);
            progress.begin(label.clone());
            figures.push(args.measure(candidate)?);
            progress.next(label);
        }
    }
    drop(progress);
    let one = median_by(&figures[0], |it| it.mbit_s);
    let head = ["paths", "Mbit/s", "least", "most", "times one", "longest gap ms", "most"];
    let mut lines = vec![head.map(str::to_owned).to_vec()];
    lines.extend(CANDIDATES.iter().zip(&figures).map(|(candidate, figures)| candidate.line(figures, one)));
    print!("{}", columns(&lines));
    let rows: Vec<_> = CANDIDATES
        .iter()
        .zip(&figures)
        .map(|(candidate, figures)| candidate.json(&args, figures, one))
        .collect();
    args.json.as_deref().map_or(Ok(()), |path| write_json(path, &rows))
}

impl PathArgs {
    fn measure(&self, candidate: &PathVariant) -> anyhow::Result<PathFigures> {
        let site = self.links.site(BYTES as u64, 1)?;
        let parameters = format!(
            "[sessions.parameters.window]\npackets = 256\n[sessions.parameters.repair]\ntries = 0\nretry_us = {}\n",
            u64::from(self.links.rtt_ms) * 1500 + 50_000
        );
        let graft = FunctionListSettings {
            functions: FUNCTIONS,
            parameters,
            session: candidate.session,
            ways: candidate.ways,
        };
        let sending = Duration::from_secs(self.seconds);
        let run = DatagramRun { pace: DatagramPace::Window, bytes: BYTES, sending, grace: Duration::ZERO };
        let cut = || match candidate.cut {
            Some(link) => Ok(site.link(link)?.change(Directions::Both, &Settings::parse("loss=100%")?)?),
            None => Ok(()),
        };
        let outcome = run.measure_and(&site, &graft, cut)?;
        let RepairOutcome { wrong, received, .. } = outcome;
        ensure!(wrong == 0, "{}: {wrong} datagrams were altered or duplicated", candidate.name);
        ensure!(received > 0, "{}: no datagram arrived", candidate.name);
        let mbit_s = received as f64 * BYTES as f64 * 8.0 / 1e6 / self.seconds as f64;
        Ok(PathFigures { mbit_s, gap_ms: outcome.gap_ms, sent: outcome.sent, received })
    }
}

impl PathVariant {
    fn line(&self, figures: &[PathFigures], one: f64) -> Vec<String> {
        let rates = Spread::by(figures, |it| it.mbit_s);
        let gaps = Spread::by(figures, |it| it.gap_ms);
        let mut line = vec![self.name.to_owned()];
        let (Some(rates), Some(gaps)) = (rates, gaps) else { return line };
        line.extend([rates.median, rates.min, rates.max].map(|mbit| format!("{mbit:.1}")));
        line.push(format!("{:.2}", rates.median / one));
        line.extend([gaps.median, gaps.max].map(|ms| format!("{ms:.0}")));
        line
    }

    fn json(&self, args: &PathArgs, figures: &[PathFigures], one: f64) -> Value {
        let rounds: Vec<_> = figures
            .iter()
            .map(|it| json!({ "mbit_s": it.mbit_s, "gap_ms": it.gap_ms, "sent": it.sent, "received": it.received }))
            .collect();
        let links = &args.links;
        json!({
            "paths": self.name, "rate_mbit": links.rate_mbit, "rtt_ms": links.rtt_ms, "loss_percent": links.loss,
            "seconds": args.seconds, "times_one": median_by(figures, |it| it.mbit_s) / one, "rounds": rounds,
        })
    }
}
