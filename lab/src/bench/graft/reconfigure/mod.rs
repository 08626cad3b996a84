//! `bench graft reconfigure`: a transfer whose round-trip time grows for a while, and its gain from another graft
//! during that time.
//!
//! For each loss, Go-Back-N sends a whole window again. That costs little on a short path and much on a long one. So
//! the session changes to partial reliability while the round-trip time is long, in one of these ways:
//!
//! * `aware`: the application asks the daemon for the session's round-trip time, and requests the other graft;
//! * `in-place`: a rule in the daemon's settings changes the graft, and the application does not know of it;
//! * `none`: the graft stays the same.
//!
//! Both hosts run the daemon as users do: `millrace graft run`.

mod figures;
mod host;
mod method;
mod plot;
mod transfer;

use std::path::PathBuf;

use anyhow::ensure;

use self::method::{MethodOutcome, ReconfigureMethod};
use crate::bench::table::write_json;
use crate::bench::usage::warn_if_busy;
use crate::progress::BenchProgress;

#[derive(Debug, clap::Args)]
pub struct ReconfigureArgs {
    /// Methods to compare: who changes the graft
    #[arg(
        long,
        value_enum,
        value_delimiter = ',',
        default_value = "aware,in-place,none",
        value_name = "METHOD"
    )]
    methods: Vec<ReconfigureMethod>,
    /// Megabytes to send
    #[arg(long, default_value_t = 32, value_name = "COUNT")]
    megabytes: u64,
    /// Round-trip time of the path at the start and at the end of the transfer
    #[arg(long, default_value_t = 20, value_name = "MS")]
    rtt_ms: u32,
    /// Round-trip time of the path in the middle of the transfer
    #[arg(long, default_value_t = 320, value_name = "MS")]
    far_rtt_ms: u32,
    /// Round-trip time at which the graft is changed to partial reliability
    #[arg(long, default_value_t = 300, value_name = "MS")]
    at_rtt_ms: u32,
    /// Time after which the round-trip time grows
    #[arg(long, default_value_t = 3.0, value_name = "SECONDS")]
    after_s: f64,
    /// Time for which the round-trip time stays long
    #[arg(long, default_value_t = 10.0, value_name = "SECONDS")]
    far_s: f64,
    /// Random loss in the direction of the data
    #[arg(long, default_value_t = 1.0, value_name = "PERCENT")]
    loss: f64,
    /// Largest number of packets in flight
    #[arg(long, default_value_t = 128, value_name = "COUNT")]
    window: u32,
    /// Payload of a packet, bytes
    #[arg(long, default_value_t = 1200)]
    bytes: usize,
    /// Number of runs of each method
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Write the results to this file, as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Draw throughput and delay of each method's first run to this file, as SVG
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
}

pub fn run(args: ReconfigureArgs) -> anyhow::Result<()> {
    args.check()?;
    warn_if_busy()?;
    let site = args.site()?;
    let progress = BenchProgress::with_steps(args.methods.len() * args.rounds);
    let mut outcomes: Vec<Vec<MethodOutcome>> = args.methods.iter().map(|_| Vec::new()).collect();
    for round in 1..=args.rounds {
        for (method, outcomes) in args.methods.iter().zip(&mut outcomes) {
            let label = format!("round {round}, {}", method.name());
            progress.begin(label.clone());
            outcomes.push(args.measure(&site, *method)?);
            progress.next(label);
        }
    }
    drop(progress);
    print!("{}", figures::text(&args, &outcomes));
    let rows = figures::rows(&args, &outcomes);
    args.json.as_deref().map_or(Ok(()), |path| write_json(path, &rows))?;
    args.plot.as_deref().map_or(Ok(()), |path| plot::draw(&args, &outcomes, path))?;
    // Print the results even if a run lost too many messages; the command fails afterwards.
    outcomes.iter().flatten().try_for_each(|outcome| outcome.check(&args))
}

impl ReconfigureArgs {
    fn check(&self) -> anyhow::Result<()> {
        ensure!(self.rounds > 0 && self.megabytes > 0, "--rounds and --megabytes must be at least 1");
        ensure!((1..=256).contains(&self.window), "--window must be from 1 to 256");
        ensure!((16..=1400).contains(&self.bytes), "--bytes must be from 16 to 1400");
        ensure!((0.0..100.0).contains(&self.loss), "--loss must be from 0 to less than 100 %");
        ensure!(self.after_s > 0.0 && self.far_s > 0.0, "--after-s and --far-s must be more than 0");
        let Self { rtt_ms, at_rtt_ms, far_rtt_ms, .. } = self;
        ensure!(
            *rtt_ms < self.until_rtt_ms() && at_rtt_ms <= far_rtt_ms,
            "--rtt-ms {rtt_ms} must be less than four fifths of --at-rtt-ms {at_rtt_ms}, which must not exceed --far-rtt-ms {far_rtt_ms}"
        );
        Ok(())
    }

    /// Returns the round-trip time below which the session changes back to the graft with full reliability, ms.
    fn until_rtt_ms(&self) -> u32 {
        self.at_rtt_ms - self.at_rtt_ms / 5
    }

    fn messages(&self) -> u64 {
        (self.megabytes * 1_000_000).div_ceil(self.bytes as u64)
    }
}
