//! `bench graft fct`: flow completion times of TCP transfers by size, loss and round-trip time.

use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use anyhow::ensure;

use super::fct_rows::{self, FctCase, FctRound, FctRow, render};
use super::flow::{BegunTransfer, TransferResult};
use super::network::NetworkProfile;
use super::{fct_plot, register};
use crate::bench::at_once::at_once;
use crate::bench::site::BenchSite;
use crate::bench::table::write_json;
use crate::bench::usage::warn_if_busy;
use crate::lab::Directions;
use crate::progress::BenchProgress;

#[derive(Debug, clap::Args)]
pub struct FctArgs {
    /// Congestion controls to measure, in interleaved runs: loaded as grafts (BPF), or built into the kernel
    #[arg(long, value_delimiter = ',', default_value = "cubic,bbr,mr_longhaul,mr_pcc", value_name = "NAME")]
    controls: Vec<String>,
    /// Sizes of transfers
    #[arg(long, value_delimiter = ',', default_value = "64,1024,8192,32768", value_name = "KIB")]
    sizes_kib: Vec<u64>,
    /// Random loss of the link in the direction of the data
    #[arg(long, value_delimiter = ',', default_value = "0,1,2,5", value_name = "PERCENT")]
    loss: Vec<f64>,
    /// Round-trip time while the queue is empty
    #[arg(long, value_delimiter = ',', default_value = "20,100,600", value_name = "MS")]
    rtt_ms: Vec<u32>,
    /// Measure only these combinations of size, loss and round-trip time, instead of all that --sizes-kib, --loss and
    /// --rtt-ms give
    #[arg(long, value_delimiter = ',', value_name = "KIB:PERCENT:MS")]
    cells: Vec<FctCell>,
    /// Number of transfers at the same time, each in its own lab
    #[arg(long, default_value_t = 1)]
    labs: usize,
    /// Seed of the random losses; each further round adds 1, so the seeds of runs that --add combines must differ by at
    /// least --rounds
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// File with results of an earlier run, whose rounds are added; may be repeated
    #[arg(long, value_name = "FILE")]
    add: Vec<PathBuf>,
    /// Measure nothing; only combine the files of --add
    #[arg(long, requires = "add")]
    only_add: bool,
    /// Rate of the link
    #[arg(long, default_value_t = 100, value_name = "MBIT")]
    rate_mbit: u32,
    /// Time after which a transfer is stopped; the bytes that arrived are recorded
    #[arg(long, default_value_t = 60, value_name = "SECONDS")]
    limit: u64,
    /// Number of transfers of each measurement
    #[arg(long, default_value_t = 10)]
    rounds: usize,
    /// Write the results to this file, as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Draw the results to this file, as SVG
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
}

/// A transfer's size and its network.
#[derive(Debug, Clone, Copy, PartialEq)]
struct FctCell {
    kib: u64,
    network: NetworkProfile,
}

impl FromStr for FctCell {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wanted = "must be KIB:PERCENT:MS, such as 8192:1:100";
        let (kib, network) = text.split_once(':').ok_or(wanted)?;
        let kib = kib.parse().map_err(|_| format!("KIB {kib:?} is not a number: {wanted}"))?;
        let network: NetworkProfile = network.parse()?;
        match network.burst {
            1.0 => Ok(Self { kib, network }),
            // Loss bursts are refused, because the result rows of this benchmark have no field for their mean length.
            _ => Err(format!("bursts are not supported: {wanted}")),
        }
    }
}

pub fn run(args: FctArgs) -> anyhow::Result<()> {
    ensure!(args.rounds > 0 && args.limit > 0, "--rounds and --limit must be at least 1");
    ensure!(args.rate_mbit > 0, "--rate-mbit must be at least 1");
    ensure!(args.labs > 0, "--labs must be at least 1");
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
    let points: Vec<_> = rows.iter().filter_map(FctRow::point).collect();
    ensure!(!points.is_empty(), "no transfer could be measured");
    args.plot.as_deref().map_or(Ok(()), |path| fct_plot::draw(&points, path))
}

impl FctArgs {
    /// Creates a lab network in which the link's queue holds one bandwidth-delay product.
    fn site(&self, network: NetworkProfile, round: usize) -> anyhow::Result<BenchSite> {
        // Each round has its own seed, so that different packets are lost.
        let seed = self.seed.wrapping_add(round as u64);
        BenchSite::new(&network.topology(self.rate_mbit, Directions::Forward, seed)?)
    }

    fn cells(&self) -> Vec<FctCell> {
        if !self.cells.is_empty() {
            return self.cells.clone();
        }
        let networks = self
            .rtt_ms
            .iter()
            .flat_map(|rtt_ms| self.loss.iter().map(|loss| NetworkProfile::random(*loss, *rtt_ms)));
        networks
            .flat_map(|network| self.sizes_kib.iter().map(move |kib| FctCell { kib: *kib, network }))
            .collect()
    }

    /// Measures round after round, with one combination of size, loss and round-trip time at a time in each lab. For
    /// each combination, every congestion control runs once per round, so that a drift of the machine affects all
    /// congestion controls alike.
    fn measure(&self, cells: &[FctCell]) -> anyhow::Result<Vec<FctRow>> {
        let jobs: Vec<(usize, FctCell)> =
            (1..=self.rounds).flat_map(|round| cells.iter().map(move |cell| (round, *cell))).collect();
        let progress = BenchProgress::with_lanes(jobs.len() * self.controls.len(), self.labs);
        let done = at_once(self.labs, &jobs, |(round, cell)| {
            let site = self.site(cell.network, *round)?;
            let transfers = self.controls.iter().map(|control| {
                let case = self.case(control, *cell);
                let work = || self.transfer(&site, &case);
                let came =
                    progress.step(&format!("round {round}, {}", case.label()), work, FctRound::told)?;
                Ok(FctRow::new(case, vec![came]))
            });
            transfers.collect::<anyhow::Result<Vec<_>>>()
        })?;
        Ok(done.into_iter().flatten().collect())
    }

    fn case(&self, control: &str, cell: FctCell) -> FctCase {
        FctCase {
            congestion_control: control.to_owned(),
            bytes: cell.kib << 10,
            loss_percent: cell.network.loss,
            rtt_ms: cell.network.rtt_ms,
            rate_mbit: self.rate_mbit,
            limit_s: self.limit,
        }
    }

    fn transfer(&self, site: &BenchSite, case: &FctCase) -> FctRound {
        match self.try_transfer(site, case) {
            Ok(it) => FctRound::Done { ms: it.time.as_secs_f64() * 1e3, bytes: it.bytes, over: !it.is_whole },
            Err(error) => FctRound::Failed { error: format!("{error:#}") },
        }
    }

    /// Measures one transfer. The kernel forgets TCP metrics of earlier connections, so that every connection starts
    /// like the first one to its peer.
    fn try_transfer(&self, site: &BenchSite, case: &FctCase) -> anyhow::Result<TransferResult> {
        let from = site.relay()?;
        let to = site.subscribers()?;
        from.enter(|| std::fs::write("/proc/sys/net/ipv4/tcp_no_metrics_save", "1"))??;
        let flow = BegunTransfer::open(from, to, &case.congestion_control)?;
        flow.transfer(case.bytes, Duration::from_secs(self.limit))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn benchmark_case_is_parsed_as_size_loss_and_round_trip() {
        let cell: FctCell = "8192:0.5:100".parse().expect("a cell");
        assert_eq!(cell, FctCell { kib: 8192, network: NetworkProfile::random(0.5, 100) });
        for bad in ["", "1:2", "1:2:3:4", "a:1:1", "1:a:1", "1:1:-1", "1:1/8:1"] {
            assert!(bad.parse::<FctCell>().is_err(), "{bad}");
        }
    }
}
