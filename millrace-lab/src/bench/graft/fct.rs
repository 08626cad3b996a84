//! `bench graft fct`.

use std::path::PathBuf;
use std::str::FromStr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::{anyhow, ensure};
use parking_lot::Mutex;
use serde_json::{Value, json};

use super::fct_plot::{self, Point};
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
    /// Only these of the sizes, losses and round trips, whatever those say
    #[arg(long, value_delimiter = ',', value_name = "KIB:PERCENT:MS")]
    cells: Vec<Cell>,
    /// Networks that are measured at once, each in a lab of its own
    #[arg(long, default_value_t = 1)]
    labs: usize,
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
    /// Draw them here (SVG)
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
}

/// A size on a network.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Cell {
    kib: u64,
    network: Network,
}

#[derive(Debug, Clone, Copy, PartialEq)]
struct Network {
    /// Percent.
    loss: f64,
    rtt_ms: u32,
}

impl FromStr for Cell {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parts: Vec<&str> = text.split(':').collect();
        let [kib, loss, rtt] = parts[..] else { return Err("is KIB:PERCENT:MS, such as 8192:1:100".into()) };
        let number = |what: &str, part: &str| format!("{what} {part:?} is no number");
        Ok(Self {
            kib: kib.parse().map_err(|_| number("KIB", kib))?,
            network: Network {
                loss: loss.parse().map_err(|_| number("PERCENT", loss))?,
                rtt_ms: rtt.parse().map_err(|_| number("MS", rtt))?,
            },
        })
    }
}

struct Row {
    control: String,
    kib: u64,
    network: Network,
    rounds: Vec<Result<Transfer, String>>,
}

pub fn run(args: Args) -> anyhow::Result<()> {
    ensure!(args.rounds > 0 && args.limit > 0, "--rounds and --limit are at least 1");
    ensure!(args.rate_mbit > 0, "--rate-mbit is at least 1");
    ensure!(args.labs > 0, "--labs is at least 1");
    let cells = args.cells();
    let in_range = |cell: &Cell| (0.0..100.0).contains(&cell.network.loss);
    ensure!(cells.iter().all(in_range), "losses are from 0 to less than 100 %");
    warn_if_busy()?;
    let _grafts = register(&args.controls)?;
    let progress = Progress::of(cells.len() * args.controls.len() * args.rounds);
    let rows = args.measure_all(&cells, &progress)?;
    drop(progress);
    print!("{}", render(&rows));
    let json: Vec<_> = rows.iter().map(|row| row.json(&args)).collect();
    args.json.as_deref().map_or(Ok(()), |path| write_json(path, &json))?;
    ensure!(rows.iter().any(|row| row.rounds.iter().any(Result::is_ok)), "no transfer could be measured");
    args.plot.as_deref().map_or(Ok(()), |path| fct_plot::draw(&args.points(&rows), path))
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

    fn cells(&self) -> Vec<Cell> {
        if !self.cells.is_empty() {
            return self.cells.clone();
        }
        let networks = self
            .rtt_ms
            .iter()
            .flat_map(|rtt_ms| self.loss.iter().map(|loss| Network { loss: *loss, rtt_ms: *rtt_ms }));
        networks
            .flat_map(|network| self.sizes_kib.iter().map(move |kib| Cell { kib: *kib, network }))
            .collect()
    }

    /// A network after the other, as many at once as there are labs.
    fn measure_all(&self, cells: &[Cell], progress: &Progress) -> anyhow::Result<Vec<Row>> {
        let mut networks: Vec<Network> = Vec::new();
        for cell in cells {
            if !networks.contains(&cell.network) {
                networks.push(cell.network);
            }
        }
        let (next, rows) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
        let work = || -> anyhow::Result<()> {
            while let Some(network) = networks.get(next.fetch_add(1, Ordering::Relaxed)) {
                let sizes: Vec<u64> =
                    cells.iter().filter(|cell| cell.network == *network).map(|cell| cell.kib).collect();
                let measured = self.measure(*network, &sizes, progress)?;
                rows.lock().extend(measured);
            }
            Ok(())
        };
        std::thread::scope(|scope| {
            let workers: Vec<_> = (0..self.labs.min(networks.len())).map(|_| scope.spawn(work)).collect();
            let mut ended = workers.into_iter().map(std::thread::ScopedJoinHandle::join);
            ended.try_for_each(|ended| ended.map_err(|_| anyhow!("a measurement panicked"))?)
        })?;
        let mut rows = rows.into_inner();
        rows.sort_by(|one, other| {
            let by = |row: &Row| (row.network.rtt_ms, row.kib);
            by(one).cmp(&by(other)).then(one.network.loss.total_cmp(&other.network.loss))
        });
        Ok(rows)
    }

    fn points(&self, rows: &[Row]) -> Vec<Point> {
        let point = |row: &Row| {
            let spread = Spread::of(&row.times())?;
            Some(Point {
                control: row.control.clone(),
                kib: row.kib,
                loss: row.network.loss,
                rtt_ms: row.network.rtt_ms,
                ms: spread,
            })
        };
        rows.iter().filter_map(point).collect()
    }

    /// Controls vary fastest, so that what changes on the machine over time meets all of them.
    fn measure(&self, network: Network, sizes: &[u64], progress: &Progress) -> anyhow::Result<Vec<Row>> {
        let site = self.site(network.rtt_ms, network.loss)?;
        let row =
            |kib: u64, control: &String| Row { control: control.clone(), kib, network, rounds: Vec::new() };
        let mut rows: Vec<Row> =
            sizes.iter().flat_map(|kib| self.controls.iter().map(|control| row(*kib, control))).collect();
        for round in 1..=self.rounds {
            for row in &mut rows {
                progress.begin(format!("round {round}, {}", row.label()));
                let done = self.transfer(&site, row).map_err(|error| format!("{error:#}"));
                progress.end(&told(&done))?;
                row.rounds.push(done);
            }
        }
        Ok(rows)
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
        let Network { loss, rtt_ms } = self.network;
        format!("{} {} KiB, {rtt_ms} ms, {loss} %", self.control, self.kib)
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
            "congestion_control": self.control, "bytes": self.kib << 10, "loss_percent": self.network.loss,
            "rtt_ms": self.network.rtt_ms, "rate_mbit": args.rate_mbit, "limit_s": args.limit,
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
        let mut line = vec![
            row.control.clone(),
            row.kib.to_string(),
            row.network.rtt_ms.to_string(),
            row.network.loss.to_string(),
        ];
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cells_are_read() {
        let cell: Cell = "8192:0.5:100".parse().expect("a cell");
        assert_eq!(cell, Cell { kib: 8192, network: Network { loss: 0.5, rtt_ms: 100 } });
        for bad in ["", "1:2", "1:2:3:4", "a:1:1", "1:a:1", "1:1:-1"] {
            assert!(bad.parse::<Cell>().is_err(), "{bad}");
        }
    }
}
