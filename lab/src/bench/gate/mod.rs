//! `millrace-lab bench gate`: measures a QUIC server under attack, with each of several defences.

mod defence;
pub mod flood;
pub mod http3;
mod plot;
mod quota;
mod report;
mod site;
mod verdicts;

use std::{path::PathBuf, time::Duration};

use anyhow::{Context as _, ensure};

use self::{defence::Defence, report::DefenceRow, site::GateBenchSite};
use super::{table::write_json, usage::warn_if_busy};
use crate::progress::BenchProgress;

#[derive(Debug, clap::Args)]
pub struct GateArgs {
    /// Defences to measure, in interleaved runs
    #[arg(
        long,
        value_enum,
        value_delimiter = ',',
        default_value = "none,user,user-early,gate,gate-answer,nftables,nftables-raw,nftables-ingress,xdp-filter",
        value_name = "NAMES"
    )]
    defences: Vec<Defence>,
    /// Experiments to run
    #[arg(long, value_enum, value_delimiter = ',', default_value = "quota,flood", value_name = "NAMES")]
    experiments: Vec<Experiment>,
    /// Connection attempts of each of the four attackers over quota
    #[arg(long, default_value_t = 1000)]
    requests: u64,
    /// Connection attempts per second of each attacker
    #[arg(long, default_value_t = 400, value_name = "HZ")]
    attack_rate_hz: u32,
    /// Bytes of a response's body
    #[arg(long, default_value_t = 256 << 10, value_name = "BYTES")]
    body_bytes: usize,
    /// Time without attack, before and after each attack
    #[arg(long, default_value_t = 3.0, value_name = "SECONDS")]
    calm_seconds: f64,
    /// Length of a flood; there are two in each run
    #[arg(long, default_value_t = 3.0, value_name = "SECONDS")]
    flood_seconds: f64,
    /// Number of measurements of every defence
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Measure only the cost of each verdict of the gate's program, without a network
    #[arg(long)]
    verdicts: bool,
    /// Write the results to this file, as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Draw the results to this file, as SVG
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Experiment {
    /// eQUIC's experiment: four clients, and four attackers over their quota of connections
    Quota,
    /// QUIC Initials from forged addresses, at the highest rate
    Flood,
}

impl Experiment {
    fn name(self) -> &'static str {
        match self {
            Self::Quota => "quota",
            Self::Flood => "flood",
        }
    }
}

pub fn run(args: GateArgs) -> anyhow::Result<()> {
    args.check()?;
    warn_if_busy()?;
    if args.verdicts {
        return verdicts::run(args.json.as_deref());
    }
    let site = GateBenchSite::new(args.body_bytes)?;
    let mut rows = args.rows();
    let progress = BenchProgress::with_steps(args.rounds * rows.len());
    for round in 1..=args.rounds {
        for row in &mut rows {
            progress.begin(format!("round {round}, {}", report::what(row)));
            let figures = args.measure(&site, row).map_err(|error| format!("{error:#}"));
            progress.end(&report::told(&figures))?;
            row.rounds.push(figures);
        }
    }
    drop((progress, site));
    print!("{}", report::render(&rows));
    if let Some(path) = &args.json {
        write_json(path, &rows.iter().map(DefenceRow::json).collect::<Vec<_>>())?;
    }
    if let Some(path) = &args.plot {
        plot::draw(&rows, path).with_context(|| format!("cannot draw {}", path.display()))?;
    }
    super::figures::ensure_measured(rows.iter().map(|row| row.rounds.as_slice()))
}

impl GateArgs {
    fn check(&self) -> anyhow::Result<()> {
        ensure!(
            self.requests > 0 && self.attack_rate_hz > 0,
            "--requests and --attack-rate-hz must be at least 1"
        );
        ensure!(self.rounds > 0, "--rounds must be at least 1");
        ensure!(self.calm_seconds > 0.0, "--calm-seconds must be more than 0");
        ensure!(self.flood_seconds > 0.0, "--flood-seconds must be more than 0");
        Ok(())
    }

    /// Lists the result rows. Consecutive rows have different defences, so that a drift of the machine affects all
    /// defences alike.
    fn rows(&self) -> Vec<DefenceRow> {
        let row = |experiment, defence| DefenceRow { experiment, defence, rounds: Vec::new() };
        let experiments = self.experiments.iter();
        experiments
            .flat_map(|experiment| self.defences.iter().map(move |defence| row(*experiment, *defence)))
            .collect()
    }

    fn measure(&self, site: &GateBenchSite, row: &DefenceRow) -> anyhow::Result<serde_json::Value> {
        let calm = Duration::from_secs_f64(self.calm_seconds);
        let figures = match row.experiment {
            Experiment::Quota => {
                let load = quota::QuotaLoad { requests: self.requests, rate_hz: self.attack_rate_hz, calm };
                serde_json::to_value(quota::run(site, row.defence, &load)?)
            }
            Experiment::Flood => {
                let length = Duration::from_secs_f64(self.flood_seconds);
                serde_json::to_value(flood::run(site, row.defence, calm, length)?)
            }
        };
        Ok(figures?)
    }
}
