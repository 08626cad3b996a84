//! `millrace-lab bench restarts`: publishers and relays are killed and restarted. It measures how long viewers are
//! without media.

mod player;
mod report;

use std::env;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, bail, ensure};
use millrace_kernel::clock::monotonic_ns;

use self::player::RestartPlayer;
pub use self::report::p50_p95_max;
use self::report::{Gap, RestartFailure, RestartRound, RestartRow, render};
use super::contender::{Contender, PORT, find};
use super::process::BenchProcess;
use super::site::BenchSite;
use super::table::write_json;
use super::usage::warn_if_busy;
use super::viewer::{self, ShownObject};
use super::watch::clip::{ClipCamera, EncodedClip};
use crate::lab::Topology;
use crate::program::product;
use crate::progress::BenchProgress;

#[derive(Debug, clap::Args)]
pub struct RestartArgs {
    /// Relays to measure, in interleaved runs; only Millrace's relays are allowed
    #[arg(long, value_enum, value_delimiter = ',', default_value = "kernel,user")]
    relays: Vec<Contender>,
    /// Publishers that are killed and restarted
    #[arg(long, value_enum, value_delimiter = ',', default_value = "millrace")]
    publishers: Vec<RestartPublishing>,
    /// Seconds between the publisher's end and its restart; without a value the publisher is not killed
    #[arg(long, value_delimiter = ',', num_args = 0.., default_value = "0,1,4,8", value_name = "SECONDS")]
    publisher_absent: Vec<f64>,
    /// Seconds between the relay's end and its restart; without a value the relay is not killed
    #[arg(long, value_delimiter = ',', num_args = 0.., default_value = "2", value_name = "SECONDS")]
    relay_absent: Vec<f64>,
    /// Objects per second
    #[arg(long, default_value_t = 100, value_name = "HZ")]
    rate_hz: u32,
    /// Number of measurements of each relay with each of the given times between end and restart
    #[arg(long, default_value_t = 20)]
    rounds: usize,
    /// Write the results to this file, as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// Number of objects in a group: a fifth of a second at the default rate. A viewer that rejoins waits at most for one
/// group.
const OBJECTS_PER_GROUP: u32 = 20;
/// Time that media flow before the publisher or relay is killed.
const RUNNING: Duration = Duration::from_secs(3);
/// Longest wait for media, before the publisher or relay is killed and after its restart. It is longer than the idle
/// time-outs of all connections.
const PATIENCE: Duration = Duration::from_secs(60);
const LOOK: Duration = Duration::from_millis(20);
/// Time for which the relay keeps subscriptions without a publisher, seconds. It is raised if the publisher is absent
/// for longer.
const DEFAULT_LINGER: f64 = 5.0;

/// Length of the video that moq-pub publishes after each start, seconds. It is longer than anyone watches.
const CLIP_SECONDS: u64 = 40;
/// Number of video fragments that are played before moq-pub is killed.
const FRAGMENTS: u32 = 100;
/// Longest wait until a player shows the video, before the publisher or relay is killed and after its restart.
const PLAYER_PATIENCE: Duration = Duration::from_secs(20);

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum RestartPublishing {
    /// millrace publish, watched by the viewer that is part of millrace-lab
    Millrace,
    /// Cloudflare's publisher, watched by Cloudflare's player and by millrace subscribe
    MoqPub,
}

/// The program that the benchmark kills and restarts.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Victim {
    Publisher,
    MoqPub,
    Relay,
}

#[derive(Debug, Clone, Copy, PartialEq)]
struct RestartCase {
    victim: Victim,
    absent: f64,
}

impl RestartCase {
    fn name(&self) -> String {
        let victim = match self.victim {
            Victim::Publisher => "publisher",
            Victim::MoqPub => "moq-pub",
            Victim::Relay => "relay",
        };
        format!("{victim} {} s", self.absent)
    }
}

pub fn run(args: RestartArgs) -> anyhow::Result<()> {
    args.check()?;
    warn_if_busy()?;
    let stage = RestartStage {
        site: BenchSite::new(&Topology::standard(2, 1))?,
        clip: args
            .publishes(RestartPublishing::MoqPub)
            .then(|| EncodedClip::encode(CLIP_SECONDS))
            .transpose()?
            .map(Arc::new),
    };
    let mut rows = args.rows();
    let progress = BenchProgress::with_steps(args.rounds * rows.len());
    for round in 1..=args.rounds {
        for row in &mut rows {
            progress.begin(format!("round {round}, {}, {}", row.relay.label(), row.case.name()));
            let seen = stage.round(&args, row.relay, row.case).map_err(|error| format!("{error:#}"));
            progress.end(&said(&seen))?;
            row.rounds.push(seen);
        }
    }
    drop(progress);
    print!("{}", render(&rows));
    let json: Vec<_> = rows.iter().map(RestartRow::json).collect();
    args.json.as_deref().map_or(Ok(()), |path| write_json(path, &json))?;
    ensure!(rows.iter().any(RestartRow::has_figures), "nothing could be measured");
    Ok(())
}

/// Formats how long each viewer was without media in one measurement, in one line.
fn said(seen: &Result<RestartRound, String>) -> String {
    let of = |(name, seen): &(&str, Result<Gap, RestartFailure>)| match seen {
        Ok(gap) => format!("{name} {:.0} ms", gap.again_ms),
        Err(failure) => format!("{name} {}", failure.why),
    };
    match seen {
        Ok(seen) => {
            format!(
                "time from the restart until media arrive again: {}",
                seen.iter().map(of).collect::<Vec<_>>().join(", ")
            )
        }
        Err(error) => error.clone(),
    }
}

impl RestartArgs {
    fn check(&self) -> anyhow::Result<()> {
        let is_ours = |relay: &Contender| relay.engine().is_some();
        ensure!(
            self.relays.iter().all(is_ours),
            "--relays must be Millrace's: other relays end subscriptions when their publisher ends"
        );
        ensure!(self.rounds > 0 && self.rate_hz > 0, "--rounds and --rate-hz must be at least 1");
        let absences = || self.publisher_absent.iter().chain(&self.relay_absent);
        ensure!(
            absences().all(|seconds| (0.0..=30.0).contains(seconds)),
            "--publisher-absent and --relay-absent must be 0 to 30 seconds"
        );
        ensure!(
            absences().next().is_some(),
            "nothing would be killed: give --publisher-absent or --relay-absent a value"
        );
        if self.publishes(RestartPublishing::MoqPub) {
            find("moq-pub").and_then(|_| find("moq-sub"))?;
        }
        Ok(())
    }

    fn publishes(&self, publisher: RestartPublishing) -> bool {
        self.publishers.contains(&publisher) && !self.publisher_absent.is_empty()
    }

    fn rows(&self) -> Vec<RestartRow> {
        let all = |victim: Victim, absences: &[f64]| {
            absences.iter().map(|absent| RestartCase { victim, absent: *absent }).collect::<Vec<_>>()
        };
        let publishers = self.publishers.iter().flat_map(|publisher| {
            let victim = match publisher {
                RestartPublishing::Millrace => Victim::Publisher,
                RestartPublishing::MoqPub => Victim::MoqPub,
            };
            all(victim, &self.publisher_absent)
        });
        let cases: Vec<_> = publishers.chain(all(Victim::Relay, &self.relay_absent)).collect();
        let row = |case: RestartCase| {
            self.relays.iter().map(move |relay| RestartRow { relay: *relay, case, rounds: Vec::new() })
        };
        cases.into_iter().flat_map(row).collect()
    }
}

/// Returns the option that makes a relay keep subscriptions for longer than their publisher is absent.
fn linger(absent: f64) -> String {
    format!("--linger={}", (absent + 2.0).max(DEFAULT_LINGER).ceil())
}

/// The lab in which publishers and relays are restarted, and the video that moq-pub publishes.
struct RestartStage {
    site: BenchSite,
    /// Video for moq-pub; `None` if moq-pub is not measured.
    clip: Option<Arc<EncodedClip>>,
}

impl RestartStage {
    fn round(&self, args: &RestartArgs, relay: Contender, case: RestartCase) -> anyhow::Result<RestartRound> {
        match case.victim {
            Victim::Publisher => self.publisher_dies(args, relay, case.absent),
            Victim::MoqPub => self.moq_pub_dies(relay, case.absent),
            Victim::Relay => self.relay_dies(args, relay, case.absent),
        }
    }

    fn publisher_dies(
        &self,
        args: &RestartArgs,
        relay: Contender,
        absent: f64,
    ) -> anyhow::Result<RestartRound> {
        let site = &self.site;
        let _relay = site.start_relay_with(relay, &[&linger(absent)])?;
        let publisher = self.publisher(args)?;
        // The viewer must not reconnect: that would hide the end of its subscription.
        let mut viewer = self.viewer("viewer", "sub1", site.relay()?.addr_v4(), &["--reconnect=false"])?;
        let before = run_for(&mut viewer)?;
        publisher.kill()?;
        std::thread::sleep(Duration::from_secs_f64(absent));
        let started = monotonic_ns();
        let _publisher = self.publisher(args)?;
        Ok(vec![("its client", gap(&mut viewer, before, started))])
    }

    fn moq_pub_dies(&self, relay: Contender, absent: f64) -> anyhow::Result<RestartRound> {
        let site = &self.site;
        let _relay = site.start_relay_with(relay, &[&linger(absent)])?;
        let (publisher, camera) = self.moq_pub()?;
        let mut players = self.players()?;
        for player in &mut players {
            let played = player.play_to(FRAGMENTS, PLAYER_PATIENCE);
            played.map_err(|failure| anyhow!("{}: {}", player.name, failure.why))?;
        }
        publisher.kill()?;
        drop(camera);
        std::thread::sleep(Duration::from_secs_f64(absent));
        let started = monotonic_ns();
        let _publisher = self.moq_pub()?;
        // Wait for all players at the same time. Waiting for one after the other would lengthen the measured gaps.
        let seen = std::thread::scope(|scope| {
            let waits: Vec<_> = players
                .iter_mut()
                .map(|player| scope.spawn(move || (player.name, player.gap(started, PLAYER_PATIENCE))))
                .collect();
            waits.into_iter().map(std::thread::ScopedJoinHandle::join).collect::<Result<Vec<_>, _>>()
        });
        seen.map_err(|_| anyhow!("a thread that waits for a player has panicked"))
    }

    fn relay_dies(&self, args: &RestartArgs, relay: Contender, absent: f64) -> anyhow::Result<RestartRound> {
        let site = &self.site;
        let key = site.directory().join("reset.key");
        let key = format!("--reset-key-file={}", key.display());
        let origin = site.start_relay_with(relay, &[&key])?;
        let upstream = format!("--upstream=moqt://{}:{PORT}", site.relay()?.addr_v4());
        let _edge = site.start_relay_on("relay2", relay, &[&upstream, "--upstream-tls-disable-verify"])?;
        let _publisher = self.publisher(args)?;
        let mut viewer = self.viewer("viewer", "pub", site.relay()?.addr_v4(), &[])?;
        let edge = site.node("relay2")?.addr_v4();
        let mut behind = self.viewer("behind", "sub1", edge, &["--reconnect=false"])?;
        let before = run_for(&mut viewer)?;
        let before_behind = run_for(&mut behind)?;
        origin.kill()?;
        std::thread::sleep(Duration::from_secs_f64(absent));
        let _origin = site.start_relay_with(relay, &[&key])?;
        let listening = monotonic_ns();
        Ok(vec![
            ("its client", gap(&mut viewer, before, listening)),
            ("behind an edge", gap(&mut behind, before_behind, listening)),
        ])
    }

    fn publisher(&self, args: &RestartArgs) -> anyhow::Result<BenchProcess> {
        let site = &self.site;
        let url = format!("moqt://{}:{PORT}", site.relay()?.addr_v4());
        let arguments = format!(
            "publish --generate --name {} --track {} --rate-hz {} --objects-per-group {OBJECTS_PER_GROUP} \
             --tls-disable-verify {url}",
            viewer::NAMESPACE,
            viewer::TRACK,
            args.rate_hz,
        );
        let mut command = site.node("pub")?.command(product()?);
        command.args(arguments.split_whitespace());
        BenchProcess::start("publisher", command, site.directory())
    }

    fn viewer(
        &self,
        name: &'static str,
        node: &str,
        relay: std::net::Ipv4Addr,
        further: &[&str],
    ) -> anyhow::Result<BenchProcess> {
        let mut command = self.site.node(node)?.command(env::current_exe()?);
        command.args(["bench", "viewer", &format!("moqt://{relay}:{PORT}")]).args(further);
        BenchProcess::start(name, command, self.site.directory())
    }

    /// Starts moq-pub and a camera that feeds it video.
    fn moq_pub(&self) -> anyhow::Result<(BenchProcess, ClipCamera)> {
        let clip = self.clip.as_ref().context("moq-pub has nothing to publish")?;
        let mut command = self.site.node("pub")?.command(find("moq-pub")?);
        self.broadcast(&mut command, "moqt")?;
        let (process, input) = BenchProcess::start_fed("moq-pub", command, self.site.directory())?;
        Ok((process, ClipCamera::start(Arc::clone(clip), input)?))
    }

    /// Starts all players that watch moq-pub.
    fn players(&self) -> anyhow::Result<Vec<RestartPlayer>> {
        let theirs = find("moq-sub")?;
        let players = [
            ("millrace subscribe", "subscribe", None, "moqt"),
            ("moq-sub", "moq-sub", Some(&theirs), "moqt"),
            ("moq-sub, WebTransport", "moq-sub-web", Some(&theirs), "https"),
        ];
        let start = |(name, file, program, scheme)| self.player(name, file, program, scheme);
        players.into_iter().map(start).collect()
    }

    /// Starts a player and waits for media. The player is `program`, or millrace subscribe if that is `None`.
    fn player(
        &self,
        name: &'static str,
        file: &'static str,
        program: Option<&PathBuf>,
        scheme: &str,
    ) -> anyhow::Result<RestartPlayer> {
        let node = self.site.subscribers()?;
        let began = Instant::now();
        loop {
            let mut command = match program {
                Some(program) => node.command(program),
                None => node.command(product()?),
            };
            if program.is_none() {
                command.arg("subscribe");
            }
            self.broadcast(&mut command, scheme)?;
            let mut player = RestartPlayer::start(name, file, command, self.site.directory())?;
            match player.play_to(1, PLAYER_PATIENCE) {
                Ok(()) => return Ok(player),
                // The player started before the broadcast was announced, so it is started again.
                Err(failure) if failure.ended && began.elapsed() < PLAYER_PATIENCE => {}
                Err(failure) => bail!("{name}: {}", failure.why),
            }
        }
    }

    /// Adds the arguments that the clients of Millrace and Cloudflare share.
    fn broadcast(&self, command: &mut Command, scheme: &str) -> anyhow::Result<()> {
        let url = format!("{scheme}://{}:{PORT}", self.site.relay()?.addr_v4());
        command.args(["--name", viewer::NAMESPACE, "--tls-disable-verify", &url]).env("NO_COLOR", "1");
        Ok(())
    }
}

/// Waits until media have flowed for some seconds. Returns the time of the last arrival.
fn run_for(viewer: &mut BenchProcess) -> anyhow::Result<u64> {
    let running = wait_for(viewer, "no media", |seen| {
        let since = seen.first()?.arrived_ns;
        let last = seen.last()?.arrived_ns;
        (last.saturating_sub(since) >= RUNNING.as_nanos() as u64).then_some(())
    });
    running.map_err(|failure| anyhow!(failure.why))?;
    Ok(monotonic_ns())
}

/// Returns the gap that the viewer saw. The publisher or relay was killed at time `died` and was back at `back`.
fn gap(viewer: &mut BenchProcess, died: u64, back: u64) -> Result<Gap, RestartFailure> {
    let sent_later = |seen: &ShownObject| seen.sent_ns > back;
    let first = wait_for(viewer, "no media again", |seen| seen.iter().find(|one| sent_later(one)).copied())?;
    // Keep reading for a while: the relay may deliver objects a second time, and these duplicates are counted.
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

fn read(viewer: &BenchProcess) -> anyhow::Result<Vec<ShownObject>> {
    viewer::parse(&viewer.output().context("cannot read the viewer's output")?)
}

fn wait_for<T>(
    viewer: &mut BenchProcess,
    what: &str,
    mut found: impl FnMut(&[ShownObject]) -> Option<T>,
) -> Result<T, RestartFailure> {
    let began = Instant::now();
    loop {
        if let Some(found) = found(&read(viewer)?) {
            return Ok(found);
        }
        if let Err(error) = viewer.check_runs() {
            return Err(RestartFailure { ended: true, why: format!("{error:#}") });
        }
        if began.elapsed() > PATIENCE {
            let why = format!("{what} within {PATIENCE:?}; {}", viewer.last_words());
            return Err(RestartFailure { ended: false, why });
        }
        std::thread::sleep(LOOK);
    }
}
