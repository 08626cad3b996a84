//! `bench graft fct`.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::ensure;
use serde_json::{Value, json};

use super::flow::{Flow, Transfer};
use super::register;
use crate::bench::site::{SUBSCRIBERS_LINK, Site};
use crate::bench::stats::Spread;
use crate::bench::table::{columns, write_json};
use crate::bench::usage::warn_if_busy;
use crate::lab::{Directions, Topology};
use crate::progress::Progress;

#[derive(Debug, clap::Args)]
pub struct Args {
    /// Congestion controls, interleaved: grafts or the kernel's
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "cubic,bbr,mr_hybla,mr_longhaul,mr_westwood",
        value_name = "NAME"
    )]
    controls: Vec<String>,
    /// Sizes of transfers
    #[arg(long, value_delimiter = ',', default_value = "64,1024,8192,32768", value_name = "KIB")]
    sizes_kib: Vec<u64>,
    /// Loss of the link, at random, in the direction of the data
    #[arg(long, value_delimiter = ',', default_value = "0,1,2,5", value_name = "PERCENT")]
    loss: Vec<f64>,
    /// Round trip without queue
    #[arg(long, value_delimiter = ',', default_value = "20,100,600", value_name = "MS")]
    rtt_ms: Vec<u32>,
    /// Rate of the link
    #[arg(long, default_value_t = 100, value_name = "MBIT")]
    rate_mbit: u32,
    /// After which a transfer counts as over, with its bytes
    #[arg(long, default_value_t = 60, value_name = "SECONDS")]
    limit: u64,
    /// Transfers of each
    #[arg(long, default_value_t = 10)]
    rounds: usize,
    /// Write the rows here
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

struct Row {
    control: String,
    kib: u64,
    loss: f64,
    rtt_ms: u32,
    rounds: Vec<Result<Transfer, String>>,
}

pub fn run(args: Args) -> anyhow::Result<()> {
    ensure!(args.rounds > 0 && args.limit > 0, "--rounds and --limit are at least 1");
    ensure!(args.rate_mbit > 0, "--rate-mbit is at least 1");
    ensure!(args.loss.iter().all(|loss| (0.0..100.0).contains(loss)), "--loss is from 0 to less than 100");
    warn_if_busy()?;
    let _grafts = register(&args.controls)?;
    let mut rows = Vec::new();
    let networks = args.rtt_ms.len() * args.loss.len();
    let progress = Progress::of(networks * args.sizes_kib.len() * args.controls.len() * args.rounds);
    for rtt_ms in &args.rtt_ms {
        for loss in &args.loss {
            let site = args.site(*rtt_ms, *loss)?;
            args.measure(&site, (*rtt_ms, *loss), &mut rows, &progress)?;
        }
    }
    drop(progress);
    print!("{}", render(&rows));
    let json: Vec<_> = rows.iter().map(|row| row.json(&args)).collect();
    args.json.as_deref().map_or(Ok(()), |path| write_json(path, &json))?;
    ensure!(rows.iter().any(|row| row.rounds.iter().any(Result::is_ok)), "no transfer could be measured");
    Ok(())
}

impl Args {
    /// The queue has room for the product of rate and round trip.
    fn site(&self, rtt_ms: u32, loss: f64) -> anyhow::Result<Site> {
        let bdp = u64::from(self.rate_mbit) * 125 * u64::from(rtt_ms);
        let (rate, queue) = (self.rate_mbit, bdp.max(64 << 10));
        let mut topology = Topology::standard(1, 1);
        topology.impair(SUBSCRIBERS_LINK, Directions::Both, &format!("delay={}us", rtt_ms * 500))?;
        let forward = format!("rate={rate}mbit queue-bytes={queue} loss={loss}%");
        topology.impair(SUBSCRIBERS_LINK, Directions::Forward, &forward)?;
        Site::new(&topology)
    }

    /// Controls vary fastest, so that what changes on the machine over time meets all of them.
    fn measure(
        &self,
        site: &Site,
        (rtt_ms, loss): (u32, f64),
        rows: &mut Vec<Row>,
        progress: &Progress,
    ) -> anyhow::Result<()> {
        let first = rows.len();
        for kib in &self.sizes_kib {
            rows.extend(self.controls.iter().map(|control| Row {
                control: control.clone(),
                kib: *kib,
                loss,
                rtt_ms,
                rounds: Vec::new(),
            }));
        }
        for round in 1..=self.rounds {
            for row in &mut rows[first..] {
                progress.begin(format!("round {round}, {}", row.label()));
                let done = self.transfer(site, row).map_err(|error| format!("{error:#}"));
                progress.end(&told(&done))?;
                row.rounds.push(done);
            }
        }
        Ok(())
    }

    /// Metrics of earlier connections are not kept: each is the first to its peer.
    fn transfer(&self, site: &Site, row: &Row) -> anyhow::Result<Transfer> {
        let (from, to) = (site.relay()?, site.subscribers()?);
        from.enter(|| std::fs::write("/proc/sys/net/ipv4/tcp_no_metrics_save", "1"))??;
        Flow::open(from, to, &row.control)?.transfer(row.kib << 10, Duration::from_secs(self.limit))
    }
}

impl Row {
    fn label(&self) -> String {
        format!("{} {} KiB, {} ms, {} %", self.control, self.kib, self.rtt_ms, self.loss)
    }

    /// Milliseconds; what was over counts as the limit.
    fn times(&self) -> Vec<f64> {
        self.rounds.iter().flatten().map(|it| it.time.as_secs_f64() * 1e3).collect()
    }

    fn over(&self) -> usize {
        self.rounds.iter().flatten().filter(|it| !it.is_whole).count()
    }

    fn json(&self, args: &Args) -> Value {
        let round = |round: &Result<Transfer, String>| match round {
            Ok(it) => json!({ "ms": it.time.as_secs_f64() * 1e3, "bytes": it.bytes, "over": !it.is_whole }),
            Err(error) => json!({ "error": error }),
        };
        json!({
            "congestion_control": self.control, "bytes": self.kib << 10, "loss_percent": self.loss,
            "rtt_ms": self.rtt_ms, "rate_mbit": args.rate_mbit, "limit_s": args.limit,
            "ms": Spread::of(&self.times()), "over": self.over(),
            "rounds": self.rounds.iter().map(round).collect::<Vec<_>>(),
        })
    }
}

fn told(done: &Result<Transfer, String>) -> String {
    match done {
        Ok(it) if it.is_whole => format!("{:.0} ms", it.time.as_secs_f64() * 1e3),
        Ok(it) => format!("over, with {} bytes", it.bytes),
        Err(error) => error.clone(),
    }
}

fn render(rows: &[Row]) -> String {
    let head = ["control", "KiB", "RTT ms", "loss %", "ms", "least", "most", "over"];
    let mut lines = vec![head.map(str::to_owned).to_vec()];
    for row in rows {
        let Some(spread) = Spread::of(&row.times()) else { continue };
        let mut line =
            vec![row.control.clone(), row.kib.to_string(), row.rtt_ms.to_string(), row.loss.to_string()];
        line.extend([spread.median, spread.min, spread.max].map(|ms| format!("{ms:.0}")));
        line.push(row.over().to_string());
        lines.push(line);
    }
    let mut text = columns(&lines);
    for row in rows {
        if let Some(error) = crate::bench::figures::error(&row.rounds) {
            text += &format!("{}: {error}\n", row.label());
        }
    }
    text
}
