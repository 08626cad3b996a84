//! `millrace-lab bench failover` kills the leading one of two publishers of the same media, and measures what a viewer
//! misses.

use std::env;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use millrace_kernel::clock::monotonic_ns;
use millrace_relay::status::Status;
use serde_json::{Value, json};

use super::contender::{Contender, PORT};
use super::engine;
use super::process::BenchProcess;
use super::restarts::p50_p95_max;
use super::rounds::RelayRounds;
use super::site::BenchSite;
use super::table::columns;
use super::usage::warn_if_busy;
use super::viewer::{self, ShownObject};
use crate::lab::Topology;
use crate::program::product;
use crate::stats::median_by;

#[derive(Debug, clap::Args)]
pub struct FailoverArgs {
    /// Relays to measure, in interleaved runs; only Millrace's relays are allowed
    #[arg(long, value_enum, value_delimiter = ',', default_value = "kernel,user")]
    relays: Vec<Contender>,
    /// Objects per second
    #[arg(long, default_value_t = 100, value_name = "HZ")]
    rate_hz: u32,
    /// Number of objects in a group
    #[arg(long, default_value_t = 100, value_name = "N")]
    objects_per_group: u32,
    /// Number of measurements of each relay
    #[arg(long, default_value_t = 50)]
    rounds: usize,
    /// Write the results to this file, as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// Time that media flow from both publishers before the leading one is killed.
const RUNNING: Duration = Duration::from_secs(2);
/// Time that the viewer is observed after the next group has begun.
const OBSERVED: Duration = Duration::from_secs(2);
/// Longest wait for any state.
const PATIENCE: Duration = Duration::from_secs(60);
const LOOK: Duration = Duration::from_millis(20);

pub fn run(args: FailoverArgs) -> anyhow::Result<()> {
    let is_ours = |relay: &Contender| relay.engine().is_some();
    ensure!(args.relays.iter().all(is_ours), "--relays must be Millrace's: others do not unite publishers");
    ensure!(
        args.rounds > 0 && args.rate_hz > 0 && args.objects_per_group > 0,
        "--rounds, --rate-hz and --objects-per-group must be at least 1"
    );
    warn_if_busy()?;
    let site = BenchSite::new(&Topology::standard(1, 1))?;
    let summary =
        |seen: &FailoverFigures| format!("longest gap {:.0} ms, {} missing", seen.gap_ms, seen.missing);
    let rows = RelayRounds::measure(&args.relays, args.rounds, |relay| args.round(&site, relay), summary)?;
    let text = render(&rows, args.group_ms());
    RelayRounds::report(&rows, &text, |row| row.json(&args), args.json.as_deref())
}

/// A viewer's gap, and the objects that it missed or got twice, when the leading publisher was killed.
struct FailoverFigures {
    /// Longest time between two objects from the publisher's end on, ms.
    gap_ms: f64,
    /// Number of objects that the viewer did not get.
    missing: u64,
    duplicates: usize,
    /// Share of the packets to the viewer that the kernel sent before the publisher's end, and from the next group on,
    /// percent.
    kernel_before: f64,
    kernel_after: f64,
}

impl FailoverArgs {
    fn group_ms(&self) -> f64 {
        1000.0 * f64::from(self.objects_per_group) / f64::from(self.rate_hz)
    }

    fn round(&self, site: &BenchSite, relay: Contender) -> anyhow::Result<FailoverFigures> {
        let _relay = site.start_relay(relay)?;
        let leader = self.publisher(site, "leader")?;
        let mut command = site.subscribers()?.command(env::current_exe()?);
        let url = format!("moqt://{}:{PORT}", site.relay()?.addr_v4());
        // A viewer that reconnected would hide the end of its track.
        command.args(["bench", "viewer", &url, "--reconnect=false"]);
        let mut viewer = BenchProcess::start("viewer", command, site.directory())?;
        flow_from(&mut viewer, 0, Duration::ZERO)?;
        let _standby = self.publisher(site, "standby")?;
        let both = wait_for_status(site, "two publishers", |status| {
            status.tracks.iter().any(|track| track.publishers == 2)
        });
        both?;
        let settled = monotonic_ns();
        let before = site.relay()?.enter(engine::ask)??;
        flow_from(&mut viewer, settled, RUNNING)?;
        let running = site.relay()?.enter(engine::ask)??;
        leader.kill()?;
        let died = monotonic_ns();
        let group = Duration::from_secs_f64(self.group_ms() / 1000.0);
        flow_from(&mut viewer, died, group)?;
        let after = site.relay()?.enter(engine::ask)??;
        flow_from(&mut viewer, died, group + OBSERVED)?;
        let end = site.relay()?.enter(engine::ask)??;
        let seen = read(&viewer)?;
        Ok(FailoverFigures {
            gap_ms: longest_gap_ms(&seen, died),
            missing: missing(&seen),
            duplicates: viewer::duplicates(&seen),
            kernel_before: kernel_share(&before, &running),
            kernel_after: kernel_share(&after, &end),
        })
    }

    fn publisher(&self, site: &BenchSite, name: &'static str) -> anyhow::Result<BenchProcess> {
        let url = format!("moqt://{}:{PORT}", site.relay()?.addr_v4());
        let arguments = format!(
            "publish --generate --replica --name {} --track {} --rate-hz {} --objects-per-group {} \
             --tls-disable-verify {url}",
            viewer::NAMESPACE,
            viewer::TRACK,
            self.rate_hz,
            self.objects_per_group,
        );
        let mut command = site.node("pub")?.command(product()?);
        command.args(arguments.split_whitespace());
        BenchProcess::start(name, command, site.directory())
    }
}

/// Waits until an object has arrived that was sent `time` after the time `since`, ns.
fn flow_from(viewer: &mut BenchProcess, since: u64, time: Duration) -> anyhow::Result<()> {
    let until = since + time.as_nanos() as u64;
    let began = Instant::now();
    while !read(viewer)?.iter().any(|seen| seen.sent_ns > until) {
        viewer.check_runs()?;
        ensure!(began.elapsed() < PATIENCE, "no media within {PATIENCE:?}; {}", viewer.last_words());
        std::thread::sleep(LOOK);
    }
    Ok(())
}

fn wait_for_status(site: &BenchSite, what: &str, is: impl Fn(&Status) -> bool) -> anyhow::Result<()> {
    let began = Instant::now();
    while !is(&site.relay()?.enter(engine::ask)??) {
        ensure!(began.elapsed() < PATIENCE, "no {what} within {PATIENCE:?}");
        std::thread::sleep(LOOK);
    }
    Ok(())
}

fn read(viewer: &BenchProcess) -> anyhow::Result<Vec<ShownObject>> {
    viewer::parse(&viewer.output().context("cannot read the viewer's output")?)
}

/// Returns the longest time between an arrival after `died` and the arrival before it.
fn longest_gap_ms(seen: &[ShownObject], died: u64) -> f64 {
    let pairs = seen.windows(2).filter(|pair| pair[1].arrived_ns > died);
    let gap = pairs.map(|pair| pair[1].arrived_ns.saturating_sub(pair[0].arrived_ns)).max();
    gap.unwrap_or(0) as f64 / 1e6
}

/// Returns how many numbers are missing between those of the first and the last object.
fn missing(seen: &[ShownObject]) -> u64 {
    let (Some(first), Some(last)) = (seen.first(), seen.last()) else { return 0 };
    let distinct: std::collections::HashSet<_> = seen.iter().map(|one| one.sequence).collect();
    (last.sequence.saturating_sub(first.sequence) + 1).saturating_sub(distinct.len() as u64)
}

/// Returns the kernel's share of the media packets between two statuses, percent.
pub fn kernel_share(earlier: &Status, later: &Status) -> f64 {
    let of = |field: fn(&Status) -> u64| field(later).saturating_sub(field(earlier));
    let kernel = of(|status| status.totals.kernel.packets);
    let userspace = of(|status| status.totals.data_plane.packets);
    100.0 * kernel as f64 / (kernel + userspace).max(1) as f64
}

type FailoverRow = RelayRounds<FailoverFigures>;

impl FailoverRow {
    fn gaps(&self) -> Vec<f64> {
        self.each(|seen| seen.gap_ms)
    }

    fn ended(&self) -> usize {
        self.rounds
            .iter()
            .flat_map(|round| round.as_ref().err())
            .filter(|why| why.contains("viewer ended"))
            .count()
    }

    fn kernel(&self) -> (f64, f64) {
        let seen: Vec<_> = self.rounds.iter().flatten().collect();
        (median_by(&seen, |seen| seen.kernel_before), median_by(&seen, |seen| seen.kernel_after))
    }

    fn json(&self, args: &FailoverArgs) -> Value {
        json!({
            "relay": self.relay.relay(), "engine": self.relay.engine(), "rate_hz": args.rate_hz,
            "group_ms": args.group_ms(), "gap_ms": self.gaps(),
            "missing": self.sum(|seen| seen.missing), "duplicates": self.sum(|seen| seen.duplicates as u64),
            "ended": self.ended(),
            "kernel_percent_before": self.each(|seen| seen.kernel_before),
            "kernel_percent_after": self.each(|seen| seen.kernel_after),
            "errors": self.rounds.iter().filter_map(|round| round.as_ref().err()).collect::<Vec<_>>(),
        })
    }

    fn line(&self, group_ms: f64) -> Vec<String> {
        let gaps = self.gaps();
        let beyond: Vec<_> = gaps.iter().map(|gap| (gap - group_ms).max(0.0)).collect();
        let (before, after) = self.kernel();
        vec![
            self.relay.label(),
            format!("{}/{}", gaps.len(), self.rounds.len()),
            self.ended().to_string(),
            p50_p95_max(&gaps),
            p50_p95_max(&beyond),
            self.sum(|seen| seen.missing).to_string(),
            self.sum(|seen| seen.duplicates as u64).to_string(),
            format!("{before:.1}/{after:.1}"),
        ]
    }
}

fn render(rows: &[FailoverRow], group_ms: f64) -> String {
    let head = [
        "relay",
        "measured",
        "ended",
        "longest gap p50/p95/max ms",
        "beyond a group p50/p95/max ms",
        "missing",
        "twice",
        "kernel's share before/after %",
    ];
    let mut lines = vec![head.map(str::to_owned).to_vec()];
    lines.extend(rows.iter().map(|row| row.line(group_ms)));
    columns(&lines) + &RelayRounds::errors(rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(all: &[(u64, u64)]) -> Vec<ShownObject> {
        let one = |(ms, sequence): &(u64, u64)| ShownObject {
            arrived_ns: ms * 1_000_000,
            sent_ns: *sequence,
            sequence: *sequence,
        };
        all.iter().map(one).collect()
    }

    #[test]
    fn gap_is_counted_from_the_publishers_end_on() {
        let all = seen(&[(0, 5), (90, 6), (100, 7), (140, 9), (150, 9)]);
        assert_eq!(longest_gap_ms(&all, 95_000_000), 40.0);
        assert_eq!((missing(&all), viewer::duplicates(&all)), (1, 1));
        assert_eq!((longest_gap_ms(&[], 0), missing(&[])), (0.0, 0));
    }
}
