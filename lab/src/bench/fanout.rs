//! `millrace-lab bench fanout`: RTP to many receivers by the kernel, by a process with as few system calls as there can be, and MoQ with
//! encryption by the relay, interleaved.

use std::path::PathBuf;

use anyhow::{Context, ensure};

use super::contender::Contender;
use super::figures::{Load, Row};
use super::profile::Profile;
use super::run::Bench;
use super::table::{self, write_json};
use super::usage::warn_if_busy;
use crate::progress::Progress;
use crate::transport::Transport;

#[derive(Debug, clap::Args)]
pub struct Args {
    /// Numbers of receivers
    #[arg(long, value_delimiter = ',', default_value = "1,8,32,1000")]
    receivers: Vec<usize>,
    /// What fans out, interleaved
    #[arg(long, value_enum, value_delimiter = ',', default_value = "fanout,batched,kernel")]
    relays: Vec<Contender>,
    /// UDP payload of a packet; payload of an object
    #[arg(long, default_value_t = 1200, value_name = "BYTES")]
    packet_bytes: u32,
    /// Packets per second
    #[arg(long, default_value_t = 100, value_name = "HZ")]
    rate_hz: u32,
    /// Length of the stretch without instruments; the others are half and a fifth of it
    #[arg(long, default_value_t = 10.0)]
    seconds: f64,
    /// Times that each runs with every number of receivers
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Write the rows here
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

pub fn run(args: Args) -> anyhow::Result<()> {
    args.check()?;
    warn_if_busy()?;
    let offered = 8 * u64::from(args.packet_bytes) * u64::from(args.rate_hz);
    let bench = Bench::new(args.seconds, Profile::Clean, offered)?;
    let mut rows = args.rows();
    let progress = Progress::of(args.rounds * rows.len());
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
        let all: Vec<_> = rows.iter().map(Row::json).collect();
        write_json(path, &all).with_context(|| path.display().to_string())?;
    }
    super::figures::ensure_measured(rows.iter().map(|row| row.rounds.as_slice()))
}

impl Args {
    fn check(&self) -> anyhow::Result<()> {
        ensure!(self.rate_hz > 0 && self.rounds > 0, "--rate-hz and --rounds are at least 1");
        ensure!(self.receivers.iter().all(|n| *n > 0), "--receivers are at least 1");
        ensure!(self.seconds > 0.0, "--seconds is more than 0");
        ensure!(self.packet_bytes >= 100, "--packet-bytes: packets under 100 bytes look like requests");
        Ok(())
    }

    /// What fans out varies fastest, so that what changes on the machine over time meets all of it.
    fn rows(&self) -> Vec<Row> {
        let (object_bytes, rate_hz) = (self.packet_bytes, self.rate_hz);
        let row = |subscribers: usize, contender| Row {
            contender,
            profile: Profile::Clean,
            load: Load { transport: Transport::Raw, subscribers, object_bytes, rate_hz },
            rounds: Vec::new(),
        };
        let each = |subscribers: &usize| {
            self.relays.iter().map(|contender| row(*subscribers, *contender)).collect::<Vec<_>>()
        };
        self.receivers.iter().flat_map(each).collect()
    }
}
