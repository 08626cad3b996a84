//! `millrace-lab bench restarts`: publishers and relays that are killed and come back, and how long viewers are without media.

use std::env;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use millrace_bpf::clock::monotonic_ns;
use serde_json::{Value, json};

use super::contender::{Contender, PORT};
use super::process::Process;
use super::site::Site;
use super::table::{columns, write_json};
use super::usage::warn_if_busy;
use super::viewer::{self, Seen};
use crate::lab::Topology;
use crate::program::product;
use crate::progress::Progress;
use crate::stats::Percentiles;

#[derive(Debug, clap::Args)]
pub struct Args {
    /// Relays to measure, interleaved: those of Millrace
    #[arg(long, value_enum, value_delimiter = ',', default_value = "kernel,user")]
    relays: Vec<Contender>,
    /// Seconds from the publisher's death until it is started again; none leaves it alone
    #[arg(long, value_delimiter = ',', num_args = 0.., default_value = "0,1,4,8", value_name = "SECONDS")]
    publisher_absent: Vec<f64>,
    /// Seconds from the relay's death until it is started again; none leaves it alone
    #[arg(long, value_delimiter = ',', num_args = 0.., default_value = "2", value_name = "SECONDS")]
    relay_absent: Vec<f64>,
    /// Objects per second
    #[arg(long, default_value_t = 100, value_name = "HZ")]
    rate_hz: u32,
    /// Times that each relay and each absence is measured
    #[arg(long, default_value_t = 20)]
    rounds: usize,
    /// Write the rows here
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// Groups of a fifth of a second at the default rate: what waits for the next one adds no more than that.
const OBJECTS_PER_GROUP: u32 = 20;
/// How long media run before somebody dies.
const RUNNING: Duration = Duration::from_secs(3);
/// Bound of the time until media are there, at first and again: more than the idle time-outs, which end everything.
const PATIENCE: Duration = Duration::from_secs(60);
const LOOK: Duration = Duration::from_millis(20);
/// What subscriptions are kept for, where the publisher's absence is longer than the default.
const DEFAULT_LINGER: f64 = 5.0;

/// Who dies.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Victim {
    Publisher,
    Relay,
}

#[derive(Debug, Clone, Copy, PartialEq)]
struct Case {
    victim: Victim,
    absent: f64,
}

impl Case {
    fn name(&self) -> String {
        let victim = match self.victim {
            Victim::Publisher => "publisher",
            Victim::Relay => "relay",
        };
        format!("{victim} {} s", self.absent)
    }
}

struct Row {
    relay: Contender,
    case: Case,
    rounds: Vec<Result<Figures, String>>,
}

/// What one viewer saw.
#[derive(Debug, Clone, Copy)]
struct Gap {
    /// Time from the last object before to the first one after.
    gap_ms: f64,
    /// Time from when the victim was started again, or the relay listened, to the first object after.
    again_ms: f64,
    duplicates: usize,
}

struct Figures {
    /// A client of the relay that dies, or whose publisher does.
    viewer: Gap,
    /// The one that an edge serves, where the relay dies.
    behind_edge: Option<Gap>,
}

/// One viewer's part of a round, if it has one.
type OfViewer = fn(&Figures) -> Option<Gap>;

pub fn run(args: Args) -> anyhow::Result<()> {
    args.check()?;
    warn_if_busy()?;
    let site = Site::new(&Topology::standard(2, 1))?;
    let mut rows = args.rows();
    let progress = Progress::of(args.rounds * rows.len());
    for round in 1..=args.rounds {
        for row in &mut rows {
            progress.begin(format!("round {round}, {}, {}", row.relay.label(), row.case.name()));
            let figures = args.round(&site, row.relay, row.case).map_err(|error| format!("{error:#}"));
            progress.end(&match &figures {
                Ok(figures) => format!("media again {:.0} ms after its return", figures.viewer.again_ms),
                Err(error) => error.clone(),
            })?;
            row.rounds.push(figures);
        }
    }
    drop(progress);
    print!("{}", render(&rows));
    let json: Vec<_> = rows.iter().map(Row::json).collect();
    args.json.as_deref().map_or(Ok(()), |path| write_json(path, &json))?;
    ensure!(rows.iter().any(|row| row.rounds.iter().any(Result::is_ok)), "nothing could be measured");
    Ok(())
}

impl Row {
    fn gaps(&self, of: OfViewer) -> Vec<Gap> {
        self.rounds.iter().flatten().filter_map(of).collect()
    }

    fn json(&self) -> Value {
        let figures = |gaps: &[Gap]| {
            json!({
                "gap_ms": gaps.iter().map(|it| it.gap_ms).collect::<Vec<_>>(),
                "again_ms": gaps.iter().map(|it| it.again_ms).collect::<Vec<_>>(),
                "duplicates": gaps.iter().map(|it| it.duplicates).sum::<usize>(),
            })
        };
        let edge = self.gaps(|it| it.behind_edge);
        json!({
            "relay": self.relay.relay(), "engine": self.relay.engine(), "case": self.case.name(),
            "absent_s": self.case.absent, "viewer": figures(&self.gaps(|it| Some(it.viewer))),
            "behind_edge": (!edge.is_empty()).then(|| figures(&edge)),
            "errors": self.rounds.iter().filter_map(|round| round.as_ref().err()).collect::<Vec<_>>(),
        })
    }
}

fn render(rows: &[Row]) -> String {
    let head =
        ["relay", "who dies, how long", "viewer", "rounds", "gap p50/p95 ms", "again p50/p95 ms", "twice"];
    let mut lines = vec![head.map(str::to_owned).to_vec()];
    let mut errors = String::new();
    for row in rows {
        let viewers: [(&str, OfViewer); 2] =
            [("its client", |it| Some(it.viewer)), ("behind an edge", |it| it.behind_edge)];
        for (viewer, of) in viewers {
            let gaps = row.gaps(of);
            let both = |figure: fn(&Gap) -> f64| {
                let all: Vec<_> = gaps.iter().map(figure).collect();
                let median = Percentiles::of(all.clone()).map_or(f64::NAN, |it| it.p50);
                format!("{median:.0}/{:.0}", p95(all))
            };
            if !gaps.is_empty() {
                let twice: usize = gaps.iter().map(|it| it.duplicates).sum();
                let (gap, again) = (both(|it| it.gap_ms), both(|it| it.again_ms));
                let (relay, case) = (row.relay.label(), row.case.name());
                lines.push(vec![
                    relay,
                    case,
                    viewer.into(),
                    gaps.len().to_string(),
                    gap,
                    again,
                    twice.to_string(),
                ]);
            }
        }
        for error in row.rounds.iter().filter_map(|round| round.as_ref().err()) {
            errors += &format!("{}, {}: {error}\n", row.relay.label(), row.case.name());
        }
    }
    columns(&lines) + &errors
}

/// By nearest rank.
fn p95(mut samples: Vec<f64>) -> f64 {
    samples.sort_unstable_by(f64::total_cmp);
    let index = (samples.len() * 95).div_ceil(100).saturating_sub(1);
    samples.get(index).copied().unwrap_or(f64::NAN)
}

impl Args {
    fn check(&self) -> anyhow::Result<()> {
        let is_ours = |relay: &Contender| relay.engine().is_some();
        ensure!(
            self.relays.iter().all(is_ours),
            "--relays: those of Millrace, as others end with their publishers"
        );
        ensure!(self.rounds > 0 && self.rate_hz > 0, "--rounds and --rate-hz are at least 1");
        let absences = || self.publisher_absent.iter().chain(&self.relay_absent);
        ensure!(absences().all(|seconds| (0.0..=30.0).contains(seconds)), "absences are 0 to 30 seconds");
        ensure!(absences().next().is_some(), "nobody is to die: give --publisher-absent or --relay-absent");
        Ok(())
    }

    fn rows(&self) -> Vec<Row> {
        let publishers =
            self.publisher_absent.iter().map(|absent| Case { victim: Victim::Publisher, absent: *absent });
        let relays = self.relay_absent.iter().map(|absent| Case { victim: Victim::Relay, absent: *absent });
        let cases: Vec<_> = publishers.chain(relays).collect();
        let row =
            |case: Case| self.relays.iter().map(move |relay| Row { relay: *relay, case, rounds: Vec::new() });
        cases.into_iter().flat_map(row).collect()
    }

    fn round(&self, site: &Site, relay: Contender, case: Case) -> anyhow::Result<Figures> {
        match case.victim {
            Victim::Publisher => self.publisher_dies(site, relay, case.absent),
            Victim::Relay => self.relay_dies(site, relay, case.absent),
        }
    }

    fn publisher_dies(&self, site: &Site, relay: Contender, absent: f64) -> anyhow::Result<Figures> {
        let linger = format!("--linger={}", (absent + 2.0).max(DEFAULT_LINGER).ceil());
        let _relay = site.start_relay_with(relay, &[&linger])?;
        let publisher = self.publisher(site)?;
        // One that connects again would not show that its subscription has ended.
        let mut viewer =
            self.viewer(site, "viewer", "sub1", site.relay()?.addr_v4(), &["--reconnect=false"])?;
        let before = run_for(&mut viewer)?;
        publisher.kill()?;
        std::thread::sleep(Duration::from_secs_f64(absent));
        let started = monotonic_ns();
        let _publisher = self.publisher(site)?;
        Ok(Figures { viewer: gap(&mut viewer, before, started)?, behind_edge: None })
    }

    fn relay_dies(&self, site: &Site, relay: Contender, absent: f64) -> anyhow::Result<Figures> {
        let key = site.directory().join("reset.key");
        let key = format!("--reset-key-file={}", key.display());
        let origin = site.start_relay_with(relay, &[&key])?;
        let upstream = format!("--upstream=moqt://{}:{PORT}", site.relay()?.addr_v4());
        let _edge = site.start_relay_on("relay2", relay, &[&upstream, "--upstream-tls-disable-verify"])?;
        let _publisher = self.publisher(site)?;
        let mut viewer = self.viewer(site, "viewer", "pub", site.relay()?.addr_v4(), &[])?;
        let edge = site.node("relay2")?.addr_v4();
        let mut behind = self.viewer(site, "behind", "sub1", edge, &["--reconnect=false"])?;
        let (before, before_behind) = (run_for(&mut viewer)?, run_for(&mut behind)?);
        origin.kill()?;
        std::thread::sleep(Duration::from_secs_f64(absent));
        let _origin = site.start_relay_with(relay, &[&key])?;
        let listening = monotonic_ns();
        let viewer = gap(&mut viewer, before, listening)?;
        let behind_edge = Some(gap(&mut behind, before_behind, listening)?);
        Ok(Figures { viewer, behind_edge })
    }

    fn publisher(&self, site: &Site) -> anyhow::Result<Process> {
        let url = format!("moqt://{}:{PORT}", site.relay()?.addr_v4());
        let arguments = format!(
            "publish --generate --name {} --track {} --rate-hz {} --objects-per-group {OBJECTS_PER_GROUP} \
             --tls-disable-verify {url}",
            viewer::NAMESPACE,
            viewer::TRACK,
            self.rate_hz,
        );
        let mut command = site.node("pub")?.command(product()?);
        command.args(arguments.split_whitespace());
        Process::start("publisher", command, site.directory())
    }

    fn viewer(
        &self,
        site: &Site,
        name: &'static str,
        node: &str,
        relay: std::net::Ipv4Addr,
        further: &[&str],
    ) -> anyhow::Result<Process> {
        let mut command = site.node(node)?.command(env::current_exe()?);
        command.args(["bench", "viewer", &format!("moqt://{relay}:{PORT}")]).args(further);
        Process::start(name, command, site.directory())
    }
}

/// Waits until media have run for a while; returns when.
fn run_for(viewer: &mut Process) -> anyhow::Result<u64> {
    wait_for(viewer, "no media", |seen| {
        let since = seen.first()?.arrived_ns;
        let last = seen.last()?.arrived_ns;
        (last.saturating_sub(since) >= RUNNING.as_nanos() as u64).then_some(())
    })?;
    Ok(monotonic_ns())
}

/// What the viewer is without, around the death at `died` of somebody who was there again at `back`.
fn gap(viewer: &mut Process, died: u64, back: u64) -> anyhow::Result<Gap> {
    let sent_later = |seen: &Seen| seen.sent_ns > back;
    let first = wait_for(viewer, "no media again", |seen| seen.iter().find(|one| sent_later(one)).copied())?;
    // For a while, as what comes twice may come later.
    let over = first.arrived_ns + RUNNING.as_nanos() as u64 / 3;
    wait_for(viewer, "media have ended", |seen| (seen.last()?.arrived_ns > over).then_some(()))?;
    let seen = read(viewer)?;
    let before: Vec<_> = seen.iter().take_while(|one| !sent_later(one)).collect();
    let last = before.last().map_or(died, |last| last.arrived_ns);
    let milliseconds = |from: u64| first.arrived_ns.saturating_sub(from) as f64 / 1e6;
    Ok(Gap {
        gap_ms: milliseconds(last),
        again_ms: milliseconds(back),
        duplicates: viewer::duplicates(&seen),
    })
}

fn read(viewer: &Process) -> anyhow::Result<Vec<Seen>> {
    viewer::parse(&viewer.output().context("what the viewer has written")?)
}

fn wait_for<T>(
    viewer: &mut Process,
    what: &str,
    mut found: impl FnMut(&[Seen]) -> Option<T>,
) -> anyhow::Result<T> {
    let began = Instant::now();
    loop {
        if let Some(found) = found(&read(viewer)?) {
            return Ok(found);
        }
        viewer.check_runs()?;
        ensure!(began.elapsed() < PATIENCE, "{what} within {PATIENCE:?}; {}", viewer.last_words());
        std::thread::sleep(LOOK);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn p95_is_by_nearest_rank() {
        assert_eq!(p95((1..=20).map(f64::from).collect()), 19.0);
        assert_eq!(p95(vec![3.0, 1.0]), 3.0);
        assert!(p95(Vec::new()).is_nan());
    }
}
