//! `millrace-lab bench upgrade` replaces a relay by its successor while media flow, and measures what viewers miss.

use std::path::PathBuf;
use std::process::Command;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use millrace_kernel::clock::monotonic_ns;
use millrace_relay::status::Status;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};

use super::arrivals::ViewerGaps;
use super::contender::{Contender, PORT, STATUS};
use super::engine;
use super::failover::kernel_share;
use super::process::BenchProcess;
use super::restarts::p50_p95_max;
use super::rounds::RelayRounds;
use super::site::BenchSite;
use super::table::columns;
use super::usage::warn_if_busy;
use super::viewer::{NAMESPACE, TRACK};
use crate::lab::Topology;
use crate::program::product;
use crate::stats::median_by;

#[derive(Debug, clap::Args)]
pub struct UpgradeArgs {
    /// Relays to measure, in interleaved runs; only Millrace's relays are allowed
    #[arg(long, value_enum, value_delimiter = ',', default_value = "kernel,user")]
    relays: Vec<Contender>,
    /// Objects per second
    #[arg(long, default_value_t = 500, value_name = "HZ")]
    rate_hz: u32,
    /// Number of objects in a group
    #[arg(long, default_value_t = 50, value_name = "N")]
    objects_per_group: u32,
    /// Number of viewers
    #[arg(long, default_value_t = 32, value_name = "K")]
    subscribers: usize,
    /// Number of measurements of each relay
    #[arg(long, default_value_t = 20)]
    rounds: usize,
    /// Write the results to this file, as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// Time that media flow before the upgrade, and the time in which the kernel's share is measured before and after.
const RUNNING: Duration = Duration::from_secs(1);
/// Time from the end of the command until the kernel's share is measured, unless the old process ends later.
const SETTLED: Duration = Duration::from_secs(1);
/// The longest time that clients may take to leave the old process.
const DRAIN: &str = "10s";
/// Longest wait for any state.
const PATIENCE: Duration = Duration::from_secs(60);
const LOOK: Duration = Duration::from_millis(20);

pub fn run(args: UpgradeArgs) -> anyhow::Result<()> {
    let is_ours = |relay: &Contender| relay.engine().is_some();
    ensure!(args.relays.iter().all(is_ours), "--relays must be Millrace's: others have no upgrade");
    ensure!(
        args.rounds > 0 && args.rate_hz > 0 && args.objects_per_group > 0 && args.subscribers > 0,
        "--rounds, --rate-hz, --objects-per-group and --subscribers must be at least 1"
    );
    warn_if_busy()?;
    let site = BenchSite::new(&Topology::standard(1, 1))?;
    let summary = |UpgradeFigures { viewers, .. }: &UpgradeFigures| {
        format!("longest gap {:.0} ms, {} lost, {} twice", viewers.gap_ms, viewers.lost, viewers.duplicates)
    };
    let rows = RelayRounds::measure(&args.relays, args.rounds, |relay| args.round(&site, relay), summary)?;
    RelayRounds::report(&rows, &render(&rows), |row| row.json(&args), args.json.as_deref())
}

/// The gaps and losses of all viewers over one upgrade.
struct UpgradeFigures {
    viewers: ViewerGaps,
    /// Duration of the command, ms.
    command_ms: f64,
    /// Time from the upgrade until the old process has ended, ms.
    drained_ms: f64,
    /// Share of the packets to viewers that the kernel sent before, and from [`SETTLED`] after the upgrade, percent.
    kernel_before: f64,
    kernel_after: f64,
}

/// The successor's process, which is ended when this value is dropped.
struct SuccessorProcess(u32);

impl Drop for SuccessorProcess {
    fn drop(&mut self) {
        let _ = i32::try_from(self.0).map(|pid| kill(Pid::from_raw(pid), Signal::SIGKILL)); // fails if it has ended
    }
}

impl UpgradeArgs {
    fn round(&self, site: &BenchSite, relay: Contender) -> anyhow::Result<UpgradeFigures> {
        let mut old = site.start_relay_with(relay, &["--drain-timeout", DRAIN])?;
        let url = format!("moqt://{}:{PORT}", site.relay()?.addr_v4());
        let publisher = format!(
            "publish --generate --name {NAMESPACE} --track {TRACK} --rate-hz {} --objects-per-group {} \
             --tls-disable-verify {url}",
            self.rate_hz, self.objects_per_group,
        );
        let _publisher = start(site, "pub", "publisher", &publisher)?;
        let series = site.directory().join("series");
        let viewers = format!(
            "subscribe --name {NAMESPACE} --track {TRACK} --subscribers {} --json --reconnect --series {} \
             --tls-disable-verify {url}",
            self.subscribers,
            series.display(),
        );
        let viewers = start(site, "sub1", "viewers", &viewers)?;
        let ask = || site.relay()?.enter(engine::ask)?;
        let all = self.subscribers as u64;
        wait_for("the viewers", || Ok(subscribers(&ask()?) == all))?;
        sleep(RUNNING);
        let first = ask()?;
        sleep(RUNNING);
        let before = ask()?;
        let began = monotonic_ns();
        let mut command = site.relay()?.command(product()?);
        command.args(["relay", "upgrade", "--http", &STATUS.to_string(), "--http-token-file", "off"]);
        finish(&mut command)?;
        let done = monotonic_ns();
        let _successor = SuccessorProcess(ask_pid(site)?);
        wait_for("the viewers at the successor", || Ok(subscribers(&ask()?) == all))?;
        wait_for("the end of the old process", || Ok(old.check_runs().is_err()))?;
        let drained = monotonic_ns();
        sleep(SETTLED.saturating_sub(Duration::from_nanos(drained - done)));
        let settled = ask()?;
        sleep(RUNNING);
        let end = ask()?;
        viewers.interrupt(PATIENCE)?;
        let ms = |from: u64, to: u64| to.saturating_sub(from) as f64 / 1e6;
        Ok(UpgradeFigures {
            viewers: ViewerGaps::read(&series, self.subscribers, began)?,
            command_ms: ms(began, done),
            drained_ms: ms(began, drained),
            kernel_before: kernel_share(&first, &before),
            kernel_after: kernel_share(&settled, &end),
        })
    }
}

/// Starts the product in a node of the lab.
pub fn start(
    site: &BenchSite,
    node: &str,
    name: &'static str,
    arguments: &str,
) -> anyhow::Result<BenchProcess> {
    let mut command = site.node(node)?.command(product()?);
    command.args(arguments.split_whitespace());
    BenchProcess::start(name, command, site.directory())
}

fn finish(command: &mut Command) -> anyhow::Result<()> {
    let output = command.output()?;
    ensure!(output.status.success(), "the upgrade: {}", String::from_utf8_lossy(&output.stderr).trim());
    Ok(())
}

fn wait_for(what: &str, mut is: impl FnMut() -> anyhow::Result<bool>) -> anyhow::Result<()> {
    let began = Instant::now();
    // While the HTTP server changes hands, nobody answers.
    while !is().unwrap_or(false) {
        ensure!(began.elapsed() < PATIENCE, "timed out after {PATIENCE:?} waiting for: {what}");
        sleep(LOOK);
    }
    Ok(())
}

/// Returns the number of subscriptions of clients that are no relays.
pub fn subscribers(status: &Status) -> u64 {
    status.sessions.iter().filter(|session| !session.relay).map(|session| session.subscriptions).sum()
}

fn ask_pid(site: &BenchSite) -> anyhow::Result<u32> {
    let fetch = || millrace_daemon::http::fetch(STATUS, "/status", None);
    let (_, body) = site.relay()?.enter(fetch)??;
    let status: Value = serde_json::from_str(&body)?;
    let pid = status["pid"].as_u64().and_then(|pid| u32::try_from(pid).ok());
    pid.context("the relay's status has no process ID")
}

type UpgradeRow = RelayRounds<UpgradeFigures>;

impl UpgradeRow {
    fn json(&self, args: &UpgradeArgs) -> Value {
        json!({
            "relay": self.relay.relay(), "engine": self.relay.engine(), "rate_hz": args.rate_hz,
            "objects_per_group": args.objects_per_group, "subscribers": args.subscribers,
            "gap_ms": self.each(|seen| seen.viewers.gap_ms), "command_ms": self.each(|seen| seen.command_ms),
            "drained_ms": self.each(|seen| seen.drained_ms), "lost": self.sum(|seen| seen.viewers.lost),
            "duplicates": self.sum(|seen| seen.viewers.duplicates),
            "kernel_percent_before": self.each(|seen| seen.kernel_before),
            "kernel_percent_after": self.each(|seen| seen.kernel_after),
            "errors": self.rounds.iter().filter_map(|round| round.as_ref().err()).collect::<Vec<_>>(),
        })
    }

    fn line(&self) -> Vec<String> {
        let seen: Vec<_> = self.rounds.iter().flatten().collect();
        let before = median_by(&seen, |seen| seen.kernel_before);
        let after = median_by(&seen, |seen| seen.kernel_after);
        vec![
            self.relay.label(),
            format!("{}/{}", seen.len(), self.rounds.len()),
            p50_p95_max(&self.each(|seen| seen.viewers.gap_ms)),
            self.sum(|seen| seen.viewers.lost).to_string(),
            self.sum(|seen| seen.viewers.duplicates).to_string(),
            p50_p95_max(&self.each(|seen| seen.command_ms)),
            p50_p95_max(&self.each(|seen| seen.drained_ms)),
            format!("{before:.1}/{after:.1}"),
        ]
    }
}

fn render(rows: &[UpgradeRow]) -> String {
    let head = [
        "relay",
        "measured",
        "longest gap p50/p95/max ms",
        "lost",
        "twice",
        "command p50/p95/max ms",
        "old process ended p50/p95/max ms",
        "kernel's share before/after %",
    ];
    let mut lines = vec![head.map(str::to_owned).to_vec()];
    lines.extend(rows.iter().map(UpgradeRow::line));
    columns(&lines) + &RelayRounds::errors(rows)
}
