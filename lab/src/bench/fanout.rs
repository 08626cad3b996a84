//! `millrace-lab bench fanout`: compares three ways to send media to many receivers, in interleaved runs. They are RTP
//! by the kernel, UDP by a process with as few system calls as possible, and encrypted MoQ by the relay.

use std::path::PathBuf;

use anyhow::{Context, ensure};

use super::contender::Contender;
use super::figures::{RelayRow, RowLoad};
use super::profile::LinkProfile;
use super::run::BenchRun;
use super::table::{self, write_json};
use super::usage::warn_if_busy;
use crate::progress::BenchProgress;
use crate::transport::LabTransport;

#[derive(Debug, clap::Args)]
pub struct FanoutArgs {
    /// Numbers of receivers
    #[arg(long, value_delimiter = ',', default_value = "1,8,32,1000")]
    receivers: Vec<usize>,
    /// Programs that fan out, in interleaved runs
    #[arg(long, value_enum, value_delimiter = ',', default_value = "fanout,batched,kernel")]
    relays: Vec<Contender>,
    /// UDP payload of a packet, and payload of a MoQ object
    #[arg(long, default_value_t = 1200, value_name = "BYTES")]
    packet_bytes: u32,
    /// Packets per second
    #[arg(long, default_value_t = 100, value_name = "HZ")]
    rate_hz: u32,
    /// Length of the measurement without packet probe and counters, seconds; periods with probe or counters take half
    /// and a fifth of it
    #[arg(long, default_value_t = 10.0)]
    seconds: f64,
    /// Number of runs of each program with every number of receivers
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Write the results to this file, as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

pub fn run(args: FanoutArgs) -> anyhow::Result<()> {
    args.check()?;
    warn_if_busy()?;
    let offered = 8 * u64::from(args.packet_bytes) * u64::from(args.rate_hz);
    let bench = BenchRun::new(args.seconds, LinkProfile::Clean, offered)?;
    let mut rows = args.rows();
    let progress = BenchProgress::with_steps(args.rounds * rows.len());
    for round in 1..=args.rounds {
        for row in &mut rows {
            progress.begin(format!("round {round}, {}", table::what(row)));
            let figures = bench.run(row.contender, &row.load).map_err(|error| format!("{error:#}"));
            progress.end(&table::told(&figures))?;
            row.rounds.push(figures);
        }
    }
    drop((progress, bench));
    print!("{}", table::render(&rows));
    if let Some(path) = &args.json {
        let all: Vec<_> = rows.iter().map(RelayRow::json).collect();
        write_json(path, &all).with_context(|| path.display().to_string())?;
    }
    super::figures::ensure_measured(rows.iter().map(|row| row.rounds.as_slice()))
}

impl FanoutArgs {
    fn check(&self) -> anyhow::Result<()> {
        ensure!(self.rate_hz > 0 && self.rounds > 0, "--rate-hz and --rounds must be at least 1");
        ensure!(self.receivers.iter().all(|n| *n > 0), "--receivers must be at least 1");
        ensure!(self.seconds > 0.0, "--seconds must be more than 0");
        ensure!(
            self.packet_bytes >= 100,
            "--packet-bytes must be at least 100: smaller packets look like requests to join"
        );
        Ok(())
    }

    /// Lists the result rows. Consecutive rows measure different programs, so that a drift of the machine affects all
    /// programs alike.
    fn rows(&self) -> Vec<RelayRow> {
        let object_bytes = self.packet_bytes;
        let rate_hz = self.rate_hz;
        let row = |subscribers: usize, contender| RelayRow {
            contender,
            profile: LinkProfile::Clean,
            load: RowLoad { transport: LabTransport::Raw, subscribers, object_bytes, rate_hz },
            rounds: Vec::new(),
        };
        let each = |subscribers: &usize| {
            self.relays.iter().map(|contender| row(*subscribers, *contender)).collect::<Vec<_>>()
        };
        self.receivers.iter().flat_map(each).collect()
    }
}
