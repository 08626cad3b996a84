//! `bench graft select`: training data for the choice of a congestion control or tunnel protocol. Each line of the file
//! is one transfer on one network, with one congestion control or tunnel and one seed of random losses.

mod design;
pub mod fetch;
mod file;
mod seen;
mod site;

use std::path::PathBuf;

use millrace_graft_proto::select::candidates::{
    CARRIED, CARRIED_NEW, CARRIED_WARM, CARRIERS, CandidateCarrier,
};
use millrace_graft_proto::select::profile::LADDER_KIB;

use crate::train::runs::{TrainingNetwork, TrainingRun};
use anyhow::{anyhow, ensure};

use self::design::DesignRange;
use self::file::RowFile;
use self::site::SelectSite;
use super::register;
use crate::bench::at_once::at_once;
use crate::progress::BenchProgress;

/// Networks up to this rate are measured at the same time by default, and faster ones in sequence, Mbit/s.
const SLOW_MBIT: f64 = 10.0;

#[derive(Debug, clap::Args)]
pub struct SelectArgs {
    /// Number of networks, drawn from a Latin hypercube of round-trip time, rate, loss, bursts, queue, jitter,
    /// reordering and cross traffic
    #[arg(long, default_value_t = 500)]
    networks: usize,
    /// Number of transfers of each candidate on each network, each with other random losses
    #[arg(long, default_value_t = 3)]
    seeds: u32,
    /// Append each result to this CSV file as soon as it is measured
    #[arg(long, value_name = "FILE")]
    csv: PathBuf,
    /// Continue an existing file; transfers in it are not measured again
    #[arg(long)]
    resume: bool,
    /// Candidates: congestion controls of plain TCP, and tunnels, which exist already (-warm) or are set up first
    /// (-new): carried-warm, carried-cubic-warm (QUIC with CUBIC), carried-tcp-warm, carried-mptcp-warm,
    /// carried-sctp-warm, carried-new, carried-cubic-new and so on
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "cubic,bbr,mr_longhaul,mr_pcc,carried-new,carried-warm",
        value_name = "NAME"
    )]
    candidates: Vec<String>,
    /// Number of networks of at most 10 Mbit/s that are measured at the same time
    #[arg(long, default_value_t = 4)]
    at_once: usize,
    /// Number of networks above 10 Mbit/s that are measured at the same time; 0 measures them one at a time after the
    /// slower ones
    #[arg(long, default_value_t = 0)]
    fast_at_once: usize,
    /// Range of rates of the networks
    #[arg(long, default_value = "0.5:100", value_name = "MBIT:MBIT")]
    rates: DesignRange,
    /// Range of round-trip times while the queue is empty
    #[arg(long, default_value = "1:800", value_name = "MS:MS")]
    rtts: DesignRange,
    /// Time after which a transfer is stopped
    #[arg(long, default_value_t = 60, value_name = "SECONDS")]
    limit: u64,
    /// Size of each transfer
    #[arg(long, default_value_t = LADDER_KIB[LADDER_KIB.len() - 1], value_name = "KIB")]
    most_kib: u32,
    /// Seed with which the Latin hypercube is drawn
    #[arg(long, default_value_t = 1)]
    cube: u64,
}

/// A network with a seed, and the candidates that have yet to be measured on it.
struct Job<'a> {
    number: u32,
    network: TrainingNetwork,
    seed: u32,
    candidates: Vec<&'a str>,
}

pub fn run(args: SelectArgs) -> anyhow::Result<()> {
    ensure!(
        args.at_once > 0 && args.limit > 0 && args.seeds > 0,
        "--at-once, --limit and --seeds must be at least 1"
    );
    ensure!((1..=100_000).contains(&args.networks), "--networks must be from 1 to 100000");
    ensure!(args.most_kib > 0, "--most-kib must be at least 1");
    args.candidates.iter().filter(|candidate| candidate.starts_with(CARRIED)).try_for_each(|candidate| {
        ensure!(
            CandidateCarrier::from_candidate(candidate).is_some(),
            "unknown candidate {candidate}: use {CARRIED_NEW} or {CARRIED_WARM}, or put one of {} in between, as in carried-tcp-warm",
            CARRIERS.join(", ")
        );
        Ok(())
    })?;
    let networks = design::networks(args.networks, args.cube, args.rtts, args.rates);
    let (rows, done) = RowFile::open(&args.csv, args.resume, &networks)?;
    let _grafts = register(&args.candidates)?;
    let seeds: Vec<_> = (1..=args.seeds).map(|seed| args.jobs(&networks, seed, &done)).collect();
    let steps = seeds.iter().flatten().map(|job| job.candidates.len()).sum();
    let progress = BenchProgress::with_lanes(steps, args.at_once + args.fast_at_once);
    let all = |jobs: &[Job<'_>], lanes: usize| -> anyhow::Result<usize> {
        Ok(at_once(lanes, jobs, |job| args.on(job, &rows, &progress))?.into_iter().sum())
    };
    let mut failed = 0;
    for jobs in seeds {
        let (slow, fast): (Vec<_>, Vec<_>) =
            jobs.into_iter().partition(|job| job.network.rate_mbit <= SLOW_MBIT);
        failed += if args.fast_at_once == 0 {
            all(&slow, args.at_once)? + all(&fast, 1)?
        } else {
            std::thread::scope(|scope| {
                let fast = scope.spawn(|| all(&fast, args.fast_at_once));
                let slow = all(&slow, args.at_once)?;
                Ok::<_, anyhow::Error>(slow + fast.join().map_err(|_| anyhow!("a measurement panicked"))??)
            })?
        };
    }
    drop(progress);
    ensure!(failed == 0, "{failed} transfers failed: use --resume to try them again");
    println!(
        "{}: {} networks, {} candidates, {} seeds",
        args.csv.display(),
        args.networks,
        args.candidates.len(),
        args.seeds
    );
    Ok(())
}

impl SelectArgs {
    fn jobs(&self, networks: &[TrainingNetwork], seed: u32, done: &[TrainingRun]) -> Vec<Job<'_>> {
        let is_done = |number: u32, candidate: &str| {
            done.iter().any(|run| (run.network, run.seed) == (number, seed) && run.candidate == candidate)
        };
        let job = |(number, network): (u32, &TrainingNetwork)| {
            let mut candidates: Vec<&str> = self.candidates.iter().map(String::as_str).collect();
            candidates.retain(|candidate| !is_done(number, candidate));
            // Rotate the order of the candidates, so that a drift of the machine affects different candidates on each
            // network.
            let first = (number + seed) as usize % candidates.len().max(1);
            candidates.rotate_left(first);
            Job { number, network: *network, seed, candidates }
        };
        (0..).zip(networks).map(job).filter(|job| !job.candidates.is_empty()).collect()
    }

    /// Measures the candidates (congestion controls and tunnels) that have yet to be measured on the job's network.
    /// Returns how many transfers failed: all of them, if the lab could not be set up.
    fn on(&self, job: &Job<'_>, rows: &RowFile, progress: &BenchProgress) -> anyhow::Result<usize> {
        let place = match SelectSite::new(&job.network, job.number, job.seed, self.limit, self.most_kib) {
            Ok(place) => place,
            Err(error) => {
                progress.note(&format!("network {}: {error:#}", job.number))?;
                return Ok(job.candidates.len());
            }
        };
        let mut failed = 0;
        for candidate in &job.candidates {
            let what = format!("seed {}, network {}, {candidate}", job.seed, job.number);
            let came = progress.step(
                &what,
                || place.transfer(candidate),
                |came| match came {
                    Ok(came) => format!("{} KiB in {:.1} s", came.bytes >> 10, came.over_ms / 1e3),
                    Err(error) => format!("{error:#}"),
                },
            )?;
            let Ok(came) = came else {
                failed += 1;
                continue;
            };
            rows.add(&TrainingRun {
                network: job.number,
                candidate: (*candidate).to_owned(),
                seed: job.seed,
                truth: job.network,
                seen: place.seen,
                came,
            })?;
        }
        Ok(failed)
    }
}
