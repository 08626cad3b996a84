//! `bench graft paths`: what a session carries by two paths, and for how long nothing comes when one of them is cut.

use std::path::PathBuf;
use std::thread;
use std::time::Duration;

use anyhow::ensure;
use serde_json::{Value, json};

use super::repair::datagrams::{Graft, Outcome, Pace, Run, Way};
use super::two_links::{self, Links};
use crate::bench::site::SUBSCRIBERS_LINK;
use crate::bench::stats::Spread;
use crate::bench::table::{columns, write_json};
use crate::bench::usage::warn_if_busy;
use crate::lab::{Directions, Settings};
use crate::progress::Progress;

const FUNCTIONS: &[&str] = &["congestion", "window", "number", "repair", "acknowledge"];
const SECOND: Way = Way { near: two_links::SECOND.near, far: two_links::SECOND.far };
/// With headers and frame as long as TCP's packets.
const BYTES: usize = 1400;

#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    links: Links,
    /// Of each run; one of the paths is cut in the middle
    #[arg(long, default_value_t = 10)]
    seconds: u64,
    /// Runs of each
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// On the wire: UDP, or IP protocol 253
    #[arg(long, default_value = "udp", value_parser = ["udp", "253"])]
    protocol: String,
    /// Write the rows here
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

#[derive(Clone, Copy)]
struct Arm {
    name: &'static str,
    ways: &'static [Way],
    session: &'static str,
    cut: Option<&'static str>,
}

const ARMS: [Arm; 5] = [
    Arm { name: "one path", ways: &[], session: "", cut: None },
    Arm { name: "spread", ways: &[SECOND], session: "", cut: None },
    Arm { name: "redundant", ways: &[SECOND], session: "paths = \"redundant\"\n", cut: None },
    Arm { name: "spread, first cut", ways: &[SECOND], session: "", cut: Some(SUBSCRIBERS_LINK) },
    Arm { name: "spread, second cut", ways: &[SECOND], session: "", cut: Some(SECOND.near) },
];

/// What came of a run.
struct Figures {
    mbit_s: f64,
    /// The longest time in which nothing came.
    gap_ms: f64,
    sent: u64,
    received: u64,
}

pub fn run(args: Args) -> anyhow::Result<()> {
    ensure!(args.rounds > 0 && args.seconds > 1, "--rounds is at least 1, --seconds 2");
    args.links.check()?;
    warn_if_busy()?;
    let progress = Progress::of(ARMS.len() * args.rounds);
    let mut figures: Vec<Vec<Figures>> = ARMS.iter().map(|_| Vec::new()).collect();
    for round in 1..=args.rounds {
        for (arm, figures) in ARMS.iter().zip(&mut figures) {
            let label = format!("round {round}, {}", arm.name);
            progress.begin(label.clone());
            figures.push(args.measure(arm)?);
            progress.next(label);
        }
    }
    drop(progress);
    let one = median(&figures[0], |it| it.mbit_s);
    let head = ["paths", "Mbit/s", "least", "most", "times one", "longest gap ms", "most"];
    let mut lines = vec![head.map(str::to_owned).to_vec()];
    lines.extend(ARMS.iter().zip(&figures).map(|(arm, figures)| arm.line(figures, one)));
    print!("{}", columns(&lines));
    let rows: Vec<_> =
        ARMS.iter().zip(&figures).map(|(arm, figures)| arm.json(&args, figures, one)).collect();
    args.json.as_deref().map_or(Ok(()), |path| write_json(path, &rows))
}

impl Args {
    fn measure(&self, arm: &Arm) -> anyhow::Result<Figures> {
        let site = self.links.site(BYTES as u64, 1)?;
        let parameters = format!(
            "[parameters.window]\npackets = 256\n[parameters.repair]\ntries = 0\nretry_us = {}\n",
            u64::from(self.links.rtt_ms) * 1500 + 50_000
        );
        let session = format!("protocol = \"{}\"\n{}", self.protocol, arm.session);
        let graft = Graft { functions: FUNCTIONS, parameters, session: &session, ways: arm.ways };
        let sending = Duration::from_secs(self.seconds);
        let run = Run { pace: Pace::Window, bytes: BYTES, sending, grace: Duration::ZERO };
        let outcome = thread::scope(|scope| {
            let cutting = scope.spawn(|| -> anyhow::Result<()> {
                let Some(link) = arm.cut else { return Ok(()) };
                // The daemons take a moment to start.
                thread::sleep(sending / 2 + Duration::from_secs(1));
                Ok(site.link(link)?.change(Directions::Both, &Settings::parse("loss=100%")?)?)
            });
            let outcome = run.measure(&site, &graft);
            cutting.join().map_err(|_| anyhow::anyhow!("it was not cut"))??;
            outcome
        })?;
        let Outcome { wrong, received, .. } = outcome;
        ensure!(wrong == 0, "{}: {wrong} datagrams were not as they were sent, or came twice", arm.name);
        ensure!(received > 0, "{}: nothing came", arm.name);
        let mbit_s = received as f64 * BYTES as f64 * 8.0 / 1e6 / self.seconds as f64;
        Ok(Figures { mbit_s, gap_ms: outcome.gap_ms, sent: outcome.sent, received })
    }
}

fn median(figures: &[Figures], of: impl Fn(&Figures) -> f64) -> f64 {
    Spread::of(&figures.iter().map(of).collect::<Vec<_>>()).map_or(f64::NAN, |spread| spread.median)
}

impl Arm {
    fn line(&self, figures: &[Figures], one: f64) -> Vec<String> {
        let rates: Vec<_> = figures.iter().map(|it| it.mbit_s).collect();
        let rate = median(figures, |it| it.mbit_s);
        let (least, most) =
            (rates.iter().copied().fold(f64::MAX, f64::min), rates.iter().copied().fold(0.0, f64::max));
        let gap = figures.iter().map(|it| it.gap_ms).fold(0.0, f64::max);
        let mut line = vec![self.name.to_owned()];
        line.extend([rate, least, most].map(|mbit| format!("{mbit:.1}")));
        line.push(format!("{:.2}", rate / one));
        line.extend([median(figures, |it| it.gap_ms), gap].map(|ms| format!("{ms:.0}")));
        line
    }

    fn json(&self, args: &Args, figures: &[Figures], one: f64) -> Value {
        let rounds: Vec<_> = figures
            .iter()
            .map(|it| json!({ "mbit_s": it.mbit_s, "gap_ms": it.gap_ms, "sent": it.sent, "received": it.received }))
            .collect();
        let links = &args.links;
        json!({
            "paths": self.name, "protocol": args.protocol, "rate_mbit": links.rate_mbit, "rtt_ms": links.rtt_ms, "loss_percent": links.loss,
            "seconds": args.seconds, "times_one": median(figures, |it| it.mbit_s) / one, "rounds": rounds,
        })
    }
}
