//! `millrace-lab bench upstreams`: a relay loses its upstream relay while media flow. It measures what viewers miss.

pub mod alarms;

use std::path::PathBuf;
use std::thread::sleep;
use std::time::Duration;

use anyhow::ensure;
use millrace_kernel::clock::monotonic_ns;
use millrace_relay::status::Status;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};

use super::arrivals::ViewerGaps;
use super::contender::Contender;
use super::engine;
use super::failover::kernel_share;
use super::figures::ensure_measured;
use super::process::BenchProcess;
use super::restarts::p50_p95_max;
use super::rounds::RelayRounds;
use super::site::{BenchSite, address};
use super::table::{columns, write_json};
use super::upgrade::{start, subscribers};
use super::usage::warn_if_busy;
use super::viewer::{NAMESPACE, TRACK};
use crate::lab::{Directions, Settings, Topology};
use crate::stats::median_by;

#[derive(Debug, clap::Args)]
pub struct UpstreamArgs {
    /// Relays to measure, in interleaved runs; only Millrace's relays are allowed
    #[arg(long, value_enum, value_delimiter = ',', default_value = "kernel,user")]
    relays: Vec<Contender>,
    /// What happens to the upstream relay
    #[arg(long, value_enum, value_delimiter = ',', default_value = "killed,cut,stopped,leaves")]
    failures: Vec<UpstreamFailure>,
    #[command(flatten)]
    media: UpstreamMedia,
    /// Number of measurements of each relay with each failure
    #[arg(long, default_value_t = 50)]
    rounds: usize,
    /// Write the results to this file, as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

#[derive(Debug, clap::Args)]
struct UpstreamMedia {
    /// Objects per second
    #[arg(long, default_value_t = 100, value_name = "HZ")]
    rate_hz: u32,
    /// Number of objects in a group
    #[arg(long, default_value_t = 100, value_name = "N")]
    objects_per_group: u32,
    /// Number of viewers
    #[arg(long, default_value_t = 4, value_name = "K")]
    subscribers: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum UpstreamFailure {
    /// It is killed (SIGKILL)
    Killed,
    /// No packet passes between it and the relay any more
    Cut,
    /// It is stopped (SIGSTOP)
    Stopped,
    /// It is asked to end (SIGTERM), and sends GOAWAY
    Leaves,
}

/// Time that media flow before the failure, and in which the kernel's share is measured before and after.
const RUNNING: Duration = Duration::from_secs(1);
/// Longest wait for any state.
const PATIENCE: Duration = Duration::from_secs(60);
/// The link between the preferred upstream relay and the measured one.
const LINK: &str = "up1-relay";

pub fn run(args: UpstreamArgs) -> anyhow::Result<()> {
    args.media.check()?;
    let is_ours = |relay: &Contender| relay.engine().is_some();
    ensure!(
        args.relays.iter().all(is_ours),
        "--relays must be Millrace's: others have one upstream relay at most"
    );
    ensure!(args.rounds > 0, "--rounds must be at least 1");
    warn_if_busy()?;
    let site = BenchSite::new(&topology())?;
    let mut measured = Vec::new();
    for failure in &args.failures {
        println!("the upstream relay: {}", failure.name());
        let summary = |seen: &UpstreamFigures| {
            let ViewerGaps { gap_ms, lost, duplicates } = &seen.viewers;
            format!("longest gap {gap_ms:.0} ms, {lost} lost, {duplicates} twice")
        };
        let round = |relay| args.media.round(&site, relay, *failure);
        measured.push((*failure, RelayRounds::measure(&args.relays, args.rounds, round, summary)?));
    }
    print!("{}", render(&measured));
    let rows = || measured.iter().flat_map(|(failure, rows)| rows.iter().map(move |row| (*failure, row)));
    let json: Vec<_> = rows().map(|(failure, row)| row.json(failure, &args.media)).collect();
    args.json.as_deref().map_or(Ok(()), |path| write_json(path, &json))?;
    ensure_measured(rows().map(|(_, row)| row.rounds.as_slice()))
}

/// Returns a lab with the publisher's relay, two upstream relays behind it, and the measured relay behind both.
fn topology() -> Topology {
    let mut topology = Topology::default();
    for [from, to] in [["pub", "origin"], ["origin", "up1"], ["origin", "up2"]] {
        topology.connect(from, to);
    }
    topology.connect("up1", "relay").emulate = true;
    topology.connect("up2", "relay");
    topology.connect("relay", "sub1");
    topology
}

/// The viewers' gaps around a failure, and the time and share of the relay's move.
struct UpstreamFigures {
    viewers: ViewerGaps,
    /// Time from the failure until the relay has a session with the other upstream relay, ms.
    moved_ms: f64,
    /// Share of the packets to viewers that the kernel sent before, and from a group after the move, percent.
    kernel_before: f64,
    kernel_after: f64,
}

/// The processes of one round, with media flowing through all relays.
struct UpstreamRun<'a> {
    site: &'a BenchSite,
    series: PathBuf,
    // The upstream relay goes on, and then processes end in this order.
    mended: MendedUpstream<'a>,
    viewers: BenchProcess,
    _publisher: BenchProcess,
    relay: BenchProcess,
    _upstreams: [BenchProcess; 2],
    _origin: BenchProcess,
}

impl<'a> UpstreamRun<'a> {
    /// Starts everything, and waits until all viewers have subscribed.
    fn start(site: &'a BenchSite, contender: Contender, media: &UpstreamMedia) -> anyhow::Result<Self> {
        let relay = |name: &str, upstreams: &[&str]| {
            let url = |name: &&str| anyhow::Ok(format!("--upstream=moqt://{}", address(site.node(name)?)));
            let mut further = upstreams.iter().map(url).collect::<Result<Vec<_>, _>>()?;
            if !upstreams.is_empty() {
                further.extend(["--upstream-tls-disable-verify", "--drain-timeout=10s"].map(str::to_owned));
            }
            let further: Vec<_> = further.iter().map(String::as_str).collect();
            site.start_relay_on(name, contender, &further)
        };
        let mut origin = relay("origin", &[])?;
        let publisher = format!(
            "publish --generate --name {NAMESPACE} --track {TRACK} --rate-hz {} --objects-per-group {} \
             --tls-disable-verify moqt://{}",
            media.rate_hz,
            media.objects_per_group,
            address(site.node("origin")?),
        );
        let publisher = start(site, "pub", "publisher", &publisher)?;
        let publishes = |status: &Status| status.sessions.iter().any(|session| session.publisher);
        origin
            .wait_until("the publisher", PATIENCE, || ask(site, "origin").is_ok_and(|it| publishes(&it)))?;
        let mut upstreams = [relay("up1", &["origin"])?, relay("up2", &["origin"])?];
        for (upstream, name) in upstreams.iter_mut().zip(["up1", "up2"]) {
            upstream.wait_until("a session with the origin", PATIENCE, || is_at(site, name, "origin"))?;
        }
        let mut edge = relay("relay", &["up1", "up2"])?;
        edge.wait_until("a session with up1", PATIENCE, || is_at(site, "relay", "up1"))?;
        let series = site.directory().join("series");
        let viewers = format!(
            "subscribe --name {NAMESPACE} --track {TRACK} --subscribers {} --json --series {} --tls-disable-verify \
             moqt://{}",
            media.subscribers,
            series.display(),
            address(site.relay()?),
        );
        let mut viewers = start(site, "sub1", "viewers", &viewers)?;
        let all = media.subscribers as u64;
        let watch = || ask(site, "relay").is_ok_and(|status| subscribers(&status) == all);
        viewers.wait_until("all subscriptions", PATIENCE, watch)?;
        let mended = MendedUpstream { site, upstream: Pid::from_raw(upstreams[0].id().cast_signed()) };
        Ok(Self {
            site,
            series,
            mended,
            viewers,
            _publisher: publisher,
            relay: edge,
            _upstreams: upstreams,
            _origin: origin,
        })
    }

    fn ask(&self) -> anyhow::Result<Status> {
        ask(self.site, "relay")
    }

    /// Returns the kernel's share of the packets that the relay sends now, percent.
    fn kernel_share(&self) -> anyhow::Result<f64> {
        let before = self.ask()?;
        sleep(RUNNING);
        Ok(kernel_share(&before, &self.ask()?))
    }

    fn fail(&self, failure: UpstreamFailure) -> anyhow::Result<()> {
        let signal = match failure {
            UpstreamFailure::Cut => return set_link(self.site, "loss=100%"),
            UpstreamFailure::Killed => Signal::SIGKILL,
            UpstreamFailure::Stopped => Signal::SIGSTOP,
            UpstreamFailure::Leaves => Signal::SIGTERM,
        };
        Ok(kill(self.mended.upstream, signal)?)
    }
}

/// Lets the preferred upstream relay and the link to it work again when it is dropped.
struct MendedUpstream<'a> {
    site: &'a BenchSite,
    upstream: Pid,
}

impl Drop for MendedUpstream<'_> {
    fn drop(&mut self) {
        // Errors are ignored: the process may have ended, and a link that cannot be mended shows in the next round.
        let _ = set_link(self.site, "loss=0%");
        let _ = kill(self.upstream, Signal::SIGCONT);
    }
}

fn set_link(site: &BenchSite, settings: &str) -> anyhow::Result<()> {
    Ok(site.link(LINK)?.change(Directions::Both, &Settings::parse(settings)?)?)
}

fn ask(site: &BenchSite, node: &str) -> anyhow::Result<Status> {
    site.node(node)?.enter(engine::ask)?
}

/// Reports whether the relay on the node `relay` has a session with the upstream relay on the node `upstream`.
fn is_at(site: &BenchSite, relay: &str, upstream: &str) -> bool {
    let at = || {
        let status = ask(site, relay)?.upstream.unwrap_or_default();
        let host = address(site.node(upstream)?).to_string();
        anyhow::Ok(status.session.is_some() && status.host == host)
    };
    at().unwrap_or(false)
}

impl UpstreamMedia {
    fn check(&self) -> anyhow::Result<()> {
        ensure!(
            self.rate_hz > 0 && self.objects_per_group > 0 && self.subscribers > 0,
            "--rate-hz, --objects-per-group and --subscribers must be at least 1"
        );
        Ok(())
    }

    fn group(&self) -> Duration {
        Duration::from_secs_f64(f64::from(self.objects_per_group) / f64::from(self.rate_hz))
    }

    fn round(
        &self,
        site: &BenchSite,
        relay: Contender,
        failure: UpstreamFailure,
    ) -> anyhow::Result<UpstreamFigures> {
        let mut run = UpstreamRun::start(site, relay, self)?;
        sleep(RUNNING);
        let kernel_before = run.kernel_share()?;
        let began = monotonic_ns();
        run.fail(failure)?;
        run.viewers.wait_until("a session with up2", PATIENCE, || is_at(site, "relay", "up2"))?;
        let moved = monotonic_ns();
        sleep(self.group());
        let kernel_after = run.kernel_share()?;
        run.viewers.check_runs()?;
        run.relay.check_runs()?;
        run.viewers.interrupt(PATIENCE)?;
        Ok(UpstreamFigures {
            viewers: ViewerGaps::read(&run.series, self.subscribers, began)?,
            moved_ms: moved.saturating_sub(began) as f64 / 1e6,
            kernel_before,
            kernel_after,
        })
    }
}

impl UpstreamFailure {
    fn name(self) -> &'static str {
        match self {
            Self::Killed => "killed",
            Self::Cut => "cut",
            Self::Stopped => "stopped",
            Self::Leaves => "leaves",
        }
    }
}

type UpstreamRow = RelayRounds<UpstreamFigures>;

impl UpstreamRow {
    fn ended(&self) -> usize {
        let errors = self.rounds.iter().filter_map(|round| round.as_ref().err());
        errors.filter(|why| why.contains("viewers ended")).count()
    }

    fn json(&self, failure: UpstreamFailure, media: &UpstreamMedia) -> Value {
        json!({
            "failure": failure.name(), "relay": self.relay.relay(), "engine": self.relay.engine(),
            "rate_hz": media.rate_hz, "objects_per_group": media.objects_per_group,
            "subscribers": media.subscribers, "ended": self.ended(),
            "gap_ms": self.each(|seen| seen.viewers.gap_ms), "lost": self.sum(|seen| seen.viewers.lost),
            "duplicates": self.sum(|seen| seen.viewers.duplicates), "moved_ms": self.each(|seen| seen.moved_ms),
            "kernel_percent_before": self.each(|seen| seen.kernel_before),
            "kernel_percent_after": self.each(|seen| seen.kernel_after),
            "errors": self.rounds.iter().filter_map(|round| round.as_ref().err()).collect::<Vec<_>>(),
        })
    }

    fn line(&self, failure: UpstreamFailure) -> Vec<String> {
        let seen: Vec<_> = self.rounds.iter().flatten().collect();
        let before = median_by(&seen, |seen| seen.kernel_before);
        let after = median_by(&seen, |seen| seen.kernel_after);
        let least = seen.iter().map(|seen| seen.kernel_after).fold(f64::NAN, f64::min);
        vec![
            failure.name().to_owned(),
            self.relay.label(),
            format!("{}/{}", seen.len(), self.rounds.len()),
            self.ended().to_string(),
            p50_p95_max(&self.each(|seen| seen.viewers.gap_ms)),
            self.sum(|seen| seen.viewers.lost).to_string(),
            self.sum(|seen| seen.viewers.duplicates).to_string(),
            p50_p95_max(&self.each(|seen| seen.moved_ms)),
            format!("{before:.1}/{after:.1} ({least:.1})"),
        ]
    }
}

fn render(measured: &[(UpstreamFailure, Vec<UpstreamRow>)]) -> String {
    let head = [
        "upstream relay",
        "relay",
        "measured",
        "tracks ended",
        "longest gap p50/p95/max ms",
        "lost",
        "twice",
        "moved p50/p95/max ms",
        "kernel's share before/after (least) %",
    ];
    let mut lines = vec![head.map(str::to_owned).to_vec()];
    for (failure, rows) in measured {
        lines.extend(rows.iter().map(|row| row.line(*failure)));
    }
    columns(&lines) + &measured.iter().map(|(_, rows)| RelayRounds::errors(rows)).collect::<String>()
}
