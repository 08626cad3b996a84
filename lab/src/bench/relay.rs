//! `millrace-lab bench relay`: compares relays in the same lab under the same load.

use std::collections::BTreeMap;
use std::path::PathBuf;

use anyhow::{Context, ensure};
use clap::builder::ArgPredicate;

use super::chain::{ChainBy, ChainPlan};
use super::contender::Contender;
use super::figures::{RelayRow, RowLoad};
use super::profile::LinkProfile;
use super::run::BenchRun;
use super::table::write_json;
use super::traffic::MANY;
use super::usage::warn_if_busy;
use super::{compare, max_rate, plot, table};
use crate::progress::BenchProgress;
use crate::transport::LabTransport;

#[derive(Debug, clap::Args)]
pub struct RelayBenchArgs {
    /// Relays to measure, in interleaved runs
    #[arg(long, value_enum, value_delimiter = ',', default_value = "kernel,user,moq-relay-ietf,moq-relay")]
    relays: Vec<Contender>,
    /// Skip the plain UDP forwarder, which is otherwise measured as well
    #[arg(long)]
    no_forwarder: bool,
    /// Numbers of subscribers; with --chain it is 1 by default. From 500 on they are those of `lab receivers`
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "1,8,32",
        default_value_if("chain", ArgPredicate::IsPresent, "1")
    )]
    subscribers: Vec<usize>,
    /// Payload of an object, bytes
    #[arg(long, default_value_t = 1200, value_name = "BYTES")]
    object_bytes: u32,
    /// Objects per second
    #[arg(long, default_value_t = 500, value_name = "HZ")]
    rate_hz: u32,
    /// Transports of publisher and subscribers, in interleaved runs
    #[arg(long, value_enum, value_delimiter = ',', default_value = "raw", value_name = "TRANSPORT")]
    transport: Vec<LabTransport>,
    /// Impairments of the link to the subscribers, in interleaved runs
    #[arg(long, value_enum, value_delimiter = ',', default_value = "clean", value_name = "PROFILE")]
    impair: Vec<LinkProfile>,
    /// Measure chains with these numbers of relays between publisher and subscribers, and what each relay adds
    #[arg(
        long,
        value_delimiter = ',',
        value_name = "RELAYS",
        conflicts_with_all = ["plot", "impair", "transport", "max_rate"]
    )]
    chain: Vec<usize>,
    /// How a relay of a chain finds the relay that has the publisher
    #[arg(long, value_enum, default_value = "cluster", requires = "chain")]
    chain_by: ChainBy,
    /// Find the highest rate that each relay sustains without loss, starting from --rate-hz, instead of measuring at a
    /// fixed rate
    #[arg(long, conflicts_with_all = ["plot", "impair"])]
    max_rate: bool,
    /// Length of the measurement without packet probe and counters, seconds; the measurement with the probe takes half
    /// of it, and the one with counters of system calls a fifth
    #[arg(long, default_value_t = 10.0)]
    seconds: f64,
    /// Number of runs of every relay with every number of subscribers
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Write the results to this file, as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Draw the results to this file, as SVG
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
}

pub fn run(args: RelayBenchArgs) -> anyhow::Result<()> {
    args.check()?;
    warn_if_busy()?;
    if !args.chain.is_empty() {
        return args.write(args.chains().run()?);
    }
    if args.max_rate {
        return max_rates(&args, &args.bench(LinkProfile::Clean)?);
    }
    let benches = args.impair.iter().map(|profile| Ok((*profile, args.bench(*profile)?)));
    let benches = benches.collect::<anyhow::Result<BTreeMap<_, _>>>()?;
    let mut rows = args.rows();
    let progress = BenchProgress::with_steps(args.rounds * rows.len());
    for round in 1..=args.rounds {
        for row in &mut rows {
            let bench = benches.get(&row.profile).context("a lab for each profile")?;
            progress.begin(format!("round {round}, {}", table::what(row)));
            let figures = bench.run(row.contender, &row.load).map_err(|error| format!("{error:#}"));
            progress.end(&table::told(&figures))?;
            row.rounds.push(figures);
        }
    }
    drop((progress, benches));
    print!("{}", table::render(&rows));
    for profile in &args.impair {
        if let Some(floor) = profile.repair_floor(args.rate_hz) {
            println!(
                "{}: repairing one lost packet takes at least {:.0} ms",
                profile.name(),
                floor.as_secs_f64() * 1e3
            );
        }
    }
    args.write(args.compared(&rows))?;
    if let Some(path) = &args.plot {
        plot::draw(&rows, path).with_context(|| format!("cannot draw {}", path.display()))?;
    }
    ensure!(rows.iter().any(|row| row.rounds.iter().any(Result::is_ok)), "no relay could be measured");
    Ok(())
}

fn max_rates(args: &RelayBenchArgs, bench: &BenchRun) -> anyhow::Result<()> {
    let mut rows: Vec<_> =
        args.rows().into_iter().map(|row| max_rate::MaxRateRow::new(row.contender, row.load)).collect();
    let progress = BenchProgress::with_steps(args.rounds * rows.len());
    for round in 1..=args.rounds {
        rows.iter_mut().try_for_each(|row| row.run(bench, round, &progress))?;
    }
    drop(progress);
    print!("{}", max_rate::render(&rows));
    args.write(rows.iter().map(max_rate::MaxRateRow::json).collect())?;
    ensure!(rows.iter().any(max_rate::MaxRateRow::is_measured), "no relay could be measured");
    Ok(())
}

impl RelayBenchArgs {
    fn bench(&self, profile: LinkProfile) -> anyhow::Result<BenchRun> {
        let offered = 8 * u64::from(self.object_bytes) * u64::from(self.rate_hz);
        BenchRun::new(self.seconds, profile, offered)
    }

    /// Returns the chains of relays to measure, on perfect links and over QUIC alone.
    fn chains(&self) -> ChainPlan {
        let load = |subscribers: &usize| RowLoad {
            transport: LabTransport::Raw,
            subscribers: *subscribers,
            object_bytes: self.object_bytes,
            rate_hz: self.rate_hz,
        };
        ChainPlan {
            relays: self.relays.clone(),
            by: self.chain_by,
            lengths: self.chain.clone(),
            loads: self.subscribers.iter().map(load).collect(),
            seconds: self.seconds,
            rounds: self.rounds,
        }
    }

    /// Prints the comparison of Millrace with the best other relay. Returns the rows with that comparison added.
    fn compared(&self, rows: &[RelayRow]) -> Vec<serde_json::Value> {
        let limit_us = 1e6 * 10.0 * self.seconds;
        let one = |row: &RelayRow| {
            let beside = compare::with_best_peer(row, rows, limit_us);
            if !beside.is_empty() {
                print!("{}", compare::told(&table::what(row), &beside));
            }
            let mut json = row.json();
            if let serde_json::Value::Object(fields) = &mut json {
                fields.insert("beside_best_peer".into(), compare::json(&beside));
            }
            json
        };
        rows.iter().map(one).collect()
    }

    fn write(&self, rows: Vec<serde_json::Value>) -> anyhow::Result<()> {
        self.json.as_deref().map_or(Ok(()), |path| write_json(path, &rows))
    }

    fn check(&self) -> anyhow::Result<()> {
        ensure!(self.rate_hz > 0 && self.rounds > 0, "--rate-hz and --rounds must be at least 1");
        ensure!(self.subscribers.iter().all(|n| *n > 0), "--subscribers must be at least 1");
        ensure!(self.seconds > 0.0, "--seconds must be more than 0");
        let has_many = self.subscribers.iter().any(|n| *n >= MANY);
        ensure!(
            !has_many || self.transport.iter().all(|transport| *transport == LabTransport::Raw),
            "{MANY} subscribers and more use raw QUIC: leave out --transport"
        );
        ensure!(
            self.object_bytes >= 64,
            "--object-bytes must be at least 64: packets of smaller objects look like acknowledgements"
        );
        Ok(())
    }

    /// Lists the result rows. Consecutive rows have different relays, so that a machine that becomes slower or faster
    /// during the benchmark affects all relays alike.
    fn rows(&self) -> Vec<RelayRow> {
        let object_bytes = self.object_bytes;
        let rate_hz = self.rate_hz;
        let mut rows = Vec::new();
        for profile in &self.impair {
            for subscribers in &self.subscribers {
                let row = |(contender, transport)| RelayRow {
                    contender,
                    profile: *profile,
                    load: RowLoad { transport, subscribers: *subscribers, object_bytes, rate_hz },
                    rounds: Vec::new(),
                };
                rows.extend(self.contenders().into_iter().map(row));
            }
        }
        rows
    }

    /// Lists each relay with each transport. Plain UDP ignores the transport and occurs once.
    fn contenders(&self) -> Vec<(Contender, LabTransport)> {
        let is_relay = |contender: &Contender| !contender.is_plain();
        let relays: Vec<_> = self.relays.iter().copied().filter(is_relay).collect();
        let each =
            |transport: &LabTransport| relays.iter().map(|relay| (*relay, *transport)).collect::<Vec<_>>();
        let mut contenders: Vec<_> = self.transport.iter().flat_map(each).collect();
        for plain in [Contender::Forwarder, Contender::Batched, Contender::Fanout] {
            let is_reference = plain == Contender::Forwarder && !self.no_forwarder;
            if is_reference || self.relays.contains(&plain) {
                contenders.push((plain, LabTransport::Raw));
            }
        }
        contenders
    }
}
