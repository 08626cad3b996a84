//! `millrace-lab bench restarts`: publishers and relays that are killed and come back, and how long viewers are without media.

mod player;
mod report;

use std::env;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, bail, ensure};
use millrace_kernel::clock::monotonic_ns;

use self::player::Player;
use self::report::{Failure, Gap, Round, Row, render};
use super::contender::{Contender, PORT, find};
use super::process::Process;
use super::site::Site;
use super::table::write_json;
use super::usage::warn_if_busy;
use super::viewer::{self, Seen};
use super::watch::clip::{Camera, Clip};
use crate::lab::Topology;
use crate::program::product;
use crate::progress::Progress;

#[derive(Debug, clap::Args)]
pub struct Args {
    /// Relays to measure, interleaved: those of Millrace
    #[arg(long, value_enum, value_delimiter = ',', default_value = "kernel,user")]
    relays: Vec<Contender>,
    /// Publishers that die
    #[arg(long, value_enum, value_delimiter = ',', default_value = "millrace")]
    publishers: Vec<Publishing>,
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

/// How much video moq-pub is given in each of its lives: more than it is watched for.
const CLIP_SECONDS: u64 = 40;
/// How many of its fragments are played before it dies.
const FRAGMENTS: u32 = 100;
/// Bound of the time until it is seen, at first and again.
const PLAYER_PATIENCE: Duration = Duration::from_secs(20);

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Publishing {
    /// millrace publish, which is watched by a player of ours
    Millrace,
    /// Cloudflare's, which is watched by its own player and by millrace subscribe
    MoqPub,
}

/// Who dies.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Victim {
    Publisher,
    MoqPub,
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
            Victim::MoqPub => "moq-pub",
            Victim::Relay => "relay",
        };
        format!("{victim} {} s", self.absent)
    }
}

pub fn run(args: Args) -> anyhow::Result<()> {
    args.check()?;
    warn_if_busy()?;
    let stage = Stage {
        site: Site::new(&Topology::standard(2, 1))?,
        clip: args
            .publishes(Publishing::MoqPub)
            .then(|| Clip::encode(CLIP_SECONDS))
            .transpose()?
            .map(Arc::new),
    };
    let mut rows = args.rows();
    let progress = Progress::of(args.rounds * rows.len());
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
    let json: Vec<_> = rows.iter().map(Row::json).collect();
    args.json.as_deref().map_or(Ok(()), |path| write_json(path, &json))?;
    ensure!(rows.iter().any(Row::has_figures), "nothing could be measured");
    Ok(())
}

/// A round in one line.
fn said(seen: &Result<Round, String>) -> String {
    let of = |(name, seen): &(&str, Result<Gap, Failure>)| match seen {
        Ok(gap) => format!("{name} {:.0} ms", gap.again_ms),
        Err(failure) => format!("{name} {}", failure.why),
    };
    match seen {
        Ok(seen) => {
            format!("media again after its return: {}", seen.iter().map(of).collect::<Vec<_>>().join(", "))
        }
        Err(error) => error.clone(),
    }
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
        if self.publishes(Publishing::MoqPub) {
            find("moq-pub").and_then(|_| find("moq-sub"))?;
        }
        Ok(())
    }

    fn publishes(&self, publisher: Publishing) -> bool {
        self.publishers.contains(&publisher) && !self.publisher_absent.is_empty()
    }

    fn rows(&self) -> Vec<Row> {
        let all = |victim: Victim, absences: &[f64]| {
            absences.iter().map(|absent| Case { victim, absent: *absent }).collect::<Vec<_>>()
        };
        let publishers = self.publishers.iter().flat_map(|publisher| {
            let victim = match publisher {
                Publishing::Millrace => Victim::Publisher,
                Publishing::MoqPub => Victim::MoqPub,
            };
            all(victim, &self.publisher_absent)
        });
        let cases: Vec<_> = publishers.chain(all(Victim::Relay, &self.relay_absent)).collect();
        let row =
            |case: Case| self.relays.iter().map(move |relay| Row { relay: *relay, case, rounds: Vec::new() });
        cases.into_iter().flat_map(row).collect()
    }
}

/// Returns the flag by which a relay keeps subscriptions for longer than their publisher is absent.
fn linger(absent: f64) -> String {
    format!("--linger={}", (absent + 2.0).max(DEFAULT_LINGER).ceil())
}

/// The lab and the video of a run.
struct Stage {
    site: Site,
    /// The video of moq-pub, if it is measured.
    clip: Option<Arc<Clip>>,
}

impl Stage {
    fn round(&self, args: &Args, relay: Contender, case: Case) -> anyhow::Result<Round> {
        match case.victim {
            Victim::Publisher => self.publisher_dies(args, relay, case.absent),
            Victim::MoqPub => self.moq_pub_dies(relay, case.absent),
            Victim::Relay => self.relay_dies(args, relay, case.absent),
        }
    }

    fn publisher_dies(&self, args: &Args, relay: Contender, absent: f64) -> anyhow::Result<Round> {
        let site = &self.site;
        let _relay = site.start_relay_with(relay, &[&linger(absent)])?;
        let publisher = self.publisher(args)?;
        // One that connects again would not show that its subscription has ended.
        let mut viewer = self.viewer("viewer", "sub1", site.relay()?.addr_v4(), &["--reconnect=false"])?;
        let before = run_for(&mut viewer)?;
        publisher.kill()?;
        std::thread::sleep(Duration::from_secs_f64(absent));
        let started = monotonic_ns();
        let _publisher = self.publisher(args)?;
        Ok(vec![("its client", gap(&mut viewer, before, started))])
    }

    fn moq_pub_dies(&self, relay: Contender, absent: f64) -> anyhow::Result<Round> {
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
        // All of them at once: what the first one is waited for would be the others' gap.
        let seen = std::thread::scope(|scope| {
            let waits: Vec<_> = players
                .iter_mut()
                .map(|player| scope.spawn(move || (player.name, player.gap(started, PLAYER_PATIENCE))))
                .collect();
            waits.into_iter().map(std::thread::ScopedJoinHandle::join).collect::<Result<Vec<_>, _>>()
        });
        seen.map_err(|_| anyhow!("a thread that waits for a player has panicked"))
    }

    fn relay_dies(&self, args: &Args, relay: Contender, absent: f64) -> anyhow::Result<Round> {
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
        let (before, before_behind) = (run_for(&mut viewer)?, run_for(&mut behind)?);
        origin.kill()?;
        std::thread::sleep(Duration::from_secs_f64(absent));
        let _origin = site.start_relay_with(relay, &[&key])?;
        let listening = monotonic_ns();
        Ok(vec![
            ("its client", gap(&mut viewer, before, listening)),
            ("behind an edge", gap(&mut behind, before_behind, listening)),
        ])
    }

    fn publisher(&self, args: &Args) -> anyhow::Result<Process> {
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
        Process::start("publisher", command, site.directory())
    }

    fn viewer(
        &self,
        name: &'static str,
        node: &str,
        relay: std::net::Ipv4Addr,
        further: &[&str],
    ) -> anyhow::Result<Process> {
        let mut command = self.site.node(node)?.command(env::current_exe()?);
        command.args(["bench", "viewer", &format!("moqt://{relay}:{PORT}")]).args(further);
        Process::start(name, command, self.site.directory())
    }

    /// Starts moq-pub, and a camera that films for it.
    fn moq_pub(&self) -> anyhow::Result<(Process, Camera)> {
        let clip = self.clip.as_ref().context("moq-pub has nothing to publish")?;
        let mut command = self.site.node("pub")?.command(find("moq-pub")?);
        self.broadcast(&mut command, "moqt")?;
        let (process, input) = Process::start_fed("moq-pub", command, self.site.directory())?;
        Ok((process, Camera::start(Arc::clone(clip), input)?))
    }

    /// Starts everyone who watches moq-pub.
    fn players(&self) -> anyhow::Result<Vec<Player>> {
        let theirs = find("moq-sub")?;
        let players = [
            ("millrace subscribe", "subscribe", None, "moqt"),
            ("moq-sub", "moq-sub", Some(&theirs), "moqt"),
            ("moq-sub, WebTransport", "moq-sub-web", Some(&theirs), "https"),
        ];
        let start = |(name, file, program, scheme)| self.player((name, file), program, scheme);
        players.into_iter().map(start).collect()
    }

    /// Starts a player that has media: ours or the `program`.
    fn player(
        &self,
        (name, file): (&'static str, &'static str),
        program: Option<&PathBuf>,
        scheme: &str,
    ) -> anyhow::Result<Player> {
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
            let mut player = Player::start(name, file, command, self.site.directory())?;
            match player.play_to(1, PLAYER_PATIENCE) {
                Ok(()) => return Ok(player),
                // It has come before its publisher.
                Err(failure) if failure.ended && began.elapsed() < PLAYER_PATIENCE => {}
                Err(failure) => bail!("{name}: {}", failure.why),
            }
        }
    }

    /// Adds the arguments that clients of both makes have.
    fn broadcast(&self, command: &mut Command, scheme: &str) -> anyhow::Result<()> {
        let url = format!("{scheme}://{}:{PORT}", self.site.relay()?.addr_v4());
        command.args(["--name", viewer::NAMESPACE, "--tls-disable-verify", &url]).env("NO_COLOR", "1");
        Ok(())
    }
}

/// Waits until media have run for a while; returns when.
fn run_for(viewer: &mut Process) -> anyhow::Result<u64> {
    let running = wait_for(viewer, "no media", |seen| {
        let since = seen.first()?.arrived_ns;
        let last = seen.last()?.arrived_ns;
        (last.saturating_sub(since) >= RUNNING.as_nanos() as u64).then_some(())
    });
    running.map_err(|failure| anyhow!(failure.why))?;
    Ok(monotonic_ns())
}

/// What the viewer is without, around the death at `died` of somebody who was there again at `back`.
fn gap(viewer: &mut Process, died: u64, back: u64) -> Result<Gap, Failure> {
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
) -> Result<T, Failure> {
    let began = Instant::now();
    loop {
        if let Some(found) = found(&read(viewer)?) {
            return Ok(found);
        }
        if let Err(error) = viewer.check_runs() {
            return Err(Failure { ended: true, why: format!("{error:#}") });
        }
        if began.elapsed() > PATIENCE {
            let why = format!("{what} within {PATIENCE:?}; {}", viewer.last_words());
            return Err(Failure { ended: false, why });
        }
        std::thread::sleep(LOOK);
    }
}
