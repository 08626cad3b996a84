//! `bench graft fct`.

use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use anyhow::ensure;

use super::fct_rows::{self, Case, Round, Row, render};
use super::flow::{Flow, Transfer};
use super::network::Network;
use super::{fct_plot, register};
use crate::bench::at_once::at_once;
use crate::bench::site::Site;
use crate::bench::table::write_json;
use crate::bench::usage::warn_if_busy;
use crate::lab::Directions;
use crate::progress::Progress;

#[derive(Debug, clap::Args)]
pub struct Args {
    /// Congestion controls, interleaved: grafts or the kernel's
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "cubic,bbr,mr_hybla,mr_longhaul,mr_pcc,mr_westwood",
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
    /// Transfers at once, each in a lab of its own
    #[arg(long, default_value_t = 1)]
    labs: usize,
    /// Of the losses; rounds count on from it, so that runs to be put together take numbers that are further apart
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// File with rows of an earlier run, whose rounds are added, repeatable
    #[arg(long, value_name = "FILE")]
    add: Vec<PathBuf>,
    /// Measure nothing; only put those together
    #[arg(long, requires = "add")]
    only_add: bool,
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

impl FromStr for Cell {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wanted = "is KIB:PERCENT:MS, such as 8192:1:100";
        let (kib, network) = text.split_once(':').ok_or(wanted)?;
        let (kib, network): (_, Network) =
            (kib.parse().map_err(|_| format!("KIB {kib:?} is no number: {wanted}"))?, network.parse()?);
        match network.burst {
            1.0 => Ok(Self { kib, network }),
            // Rows would not tell.
            _ => Err(format!("has no bursts: {wanted}")),
        }
    }
}

pub fn run(args: Args) -> anyhow::Result<()> {
    ensure!(args.rounds > 0 && args.limit > 0, "--rounds and --limit are at least 1");
    ensure!(args.rate_mbit > 0, "--rate-mbit is at least 1");
    ensure!(args.labs > 0, "--labs is at least 1");
    let cells = args.cells();
    cells.iter().try_for_each(|cell| cell.network.check())?;
    let mut rows = Vec::new();
    for path in &args.add {
        rows.extend(fct_rows::read(path)?);
    }
    if !args.only_add {
        warn_if_busy()?;
        let _grafts = register(&args.controls)?;
        rows.extend(args.measure(&cells)?);
    }
    let rows = fct_rows::joined(rows);
    print!("{}", render(&rows));
    let json = rows.iter().map(serde_json::to_value).collect::<Result<Vec<_>, _>>()?;
    args.json.as_deref().map_or(Ok(()), |path| write_json(path, &json))?;
    let points: Vec<_> = rows.iter().filter_map(Row::point).collect();
    ensure!(!points.is_empty(), "no transfer could be measured");
    args.plot.as_deref().map_or(Ok(()), |path| fct_plot::draw(&points, path))
}

impl Args {
    /// The queue has room for the product of rate and round trip.
    fn site(&self, network: Network, round: usize) -> anyhow::Result<Site> {
        // Each round loses other packets.
        let seed = self.seed.wrapping_add(round as u64);
        Site::new(&network.topology(self.rate_mbit, Directions::Forward, seed)?)
    }

    fn cells(&self) -> Vec<Cell> {
        if !self.cells.is_empty() {
            return self.cells.clone();
        }
        let networks = self
            .rtt_ms
            .iter()
            .flat_map(|rtt_ms| self.loss.iter().map(|loss| Network::random(*loss, *rtt_ms)));
        networks
            .flat_map(|network| self.sizes_kib.iter().map(move |kib| Cell { kib: *kib, network }))
            .collect()
    }

    /// Round after round, the cells of each as many at once as there are labs. In a cell the controls take turns, so that what
    /// changes on the machine over time meets all of them.
    fn measure(&self, cells: &[Cell]) -> anyhow::Result<Vec<Row>> {
        let jobs: Vec<(usize, Cell)> =
            (1..=self.rounds).flat_map(|round| cells.iter().map(move |cell| (round, *cell))).collect();
        let progress = Progress::of_lanes(jobs.len() * self.controls.len(), self.labs);
        let done = at_once(self.labs, &jobs, |(round, cell)| {
            let site = self.site(cell.network, *round)?;
            let transfers = self.controls.iter().map(|control| {
                let case = self.case(control, *cell);
                let work = || self.transfer(&site, &case);
                let came = progress.step(&format!("round {round}, {}", case.label()), work, Round::told)?;
                Ok(Row::new(case, vec![came]))
            });
            transfers.collect::<anyhow::Result<Vec<_>>>()
        })?;
        Ok(done.into_iter().flatten().collect())
    }

    fn case(&self, control: &str, cell: Cell) -> Case {
        Case {
            congestion_control: control.to_owned(),
            bytes: cell.kib << 10,
            loss_percent: cell.network.loss,
            rtt_ms: cell.network.rtt_ms,
            rate_mbit: self.rate_mbit,
            limit_s: self.limit,
        }
    }

    fn transfer(&self, site: &Site, case: &Case) -> Round {
        match self.try_transfer(site, case) {
            Ok(it) => Round::Done { ms: it.time.as_secs_f64() * 1e3, bytes: it.bytes, over: !it.is_whole },
            Err(error) => Round::Failed { error: format!("{error:#}") },
        }
    }

    /// Metrics of earlier connections are not kept: each is the first to its peer.
    fn try_transfer(&self, site: &Site, case: &Case) -> anyhow::Result<Transfer> {
        let (from, to) = (site.relay()?, site.subscribers()?);
        from.enter(|| std::fs::write("/proc/sys/net/ipv4/tcp_no_metrics_save", "1"))??;
        let flow = Flow::open(from, to, &case.congestion_control)?;
        flow.transfer(case.bytes, Duration::from_secs(self.limit))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cells_are_read() {
        let cell: Cell = "8192:0.5:100".parse().expect("a cell");
        assert_eq!(cell, Cell { kib: 8192, network: Network::random(0.5, 100) });
        for bad in ["", "1:2", "1:2:3:4", "a:1:1", "1:a:1", "1:1:-1", "1:1/8:1"] {
            assert!(bad.parse::<Cell>().is_err(), "{bad}");
        }
    }
}
