//! `millrace-lab bench alarms`: a relay's upstream relay works, behind a bad link or with pauses. It counts how often
//! the relay takes it for dead.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{scope, sleep};
use std::time::{Duration, Instant};

use anyhow::ensure;
use millrace_kernel::clock::monotonic_ns;
use nix::sys::signal::{Signal, kill};
use serde_json::{Value, json};

use super::super::arrivals::ViewerGaps;
use super::super::contender::Contender;
use super::super::replay;
use super::super::site::BenchSite;
use super::super::table::{columns, write_json};
use super::super::usage::warn_if_busy;
use super::{LINK, PATIENCE, UpstreamMedia, UpstreamRun, set_link, topology};

#[derive(Debug, clap::Args)]
pub struct AlarmArgs {
    /// Relay to measure; only Millrace's relays are allowed
    #[arg(long, value_enum, default_value = "kernel")]
    relay: Contender,
    /// What happens on the way to the upstream relay, each in a lab of its own, all at the same time
    #[arg(long, value_enum, value_delimiter = ',', default_value = "mobile,lossy,pauses")]
    conditions: Vec<AlarmCondition>,
    #[command(flatten)]
    media: UpstreamMedia,
    /// Length of the measurement
    #[arg(long, default_value_t = 30.0)]
    minutes: f64,
    /// Write the results to this file, as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum AlarmCondition {
    /// The link's rate and delay change as those of a radio link on the move
    Mobile,
    /// 2 % of packets are lost, with a round trip of 300 ms
    Lossy,
    /// For 400 ms in every two seconds, the upstream relay is stopped or no packet passes the link, in turn
    Pauses,
}

/// Payload of an object, bytes, as `millrace publish --generate` makes it by default.
const OBJECT_BYTES: u64 = 1200;
const PAUSE: Duration = Duration::from_millis(400);
const BETWEEN: Duration = Duration::from_millis(1600);
const LOOK: Duration = Duration::from_millis(200);
/// Beginning of the log message of a relay that takes its upstream relay for dead.
const ALARM: &str = "the upstream relay does not answer: looking";

pub fn run(args: AlarmArgs) -> anyhow::Result<()> {
    args.media.check()?;
    ensure!(args.relay.engine().is_some(), "--relay must be Millrace's");
    ensure!(args.minutes > 0.0 && args.minutes < 1e4, "--minutes must be more than 0 and less than 10,000");
    warn_if_busy()?;
    let measure = |condition: &AlarmCondition| {
        let measured = condition.measure(&args).map_err(|error| format!("{error:#}"));
        (*condition, measured)
    };
    let rows: Vec<_> = scope(|threads| {
        let running: Vec<_> =
            args.conditions.iter().map(|condition| threads.spawn(|| measure(condition))).collect();
        running.into_iter().filter_map(|thread| thread.join().ok()).collect()
    });
    print!("{}", render(&rows));
    let json: Vec<_> = rows.iter().map(|(condition, measured)| args.row(*condition, measured)).collect();
    args.json.as_deref().map_or(Ok(()), |path| write_json(path, &json))?;
    let is_measured =
        rows.len() == args.conditions.len() && rows.iter().all(|(_, measured)| measured.is_ok());
    ensure!(is_measured, "not all conditions could be measured");
    Ok(())
}

struct AlarmFigures {
    /// Number of times that the relay took its upstream relay for dead.
    alarms: usize,
    /// Number of times that the relay moved to another upstream relay, or back.
    moves: u64,
    viewers: ViewerGaps,
    seconds: f64,
}

impl AlarmCondition {
    fn name(self) -> &'static str {
        match self {
            Self::Mobile => "mobile",
            Self::Lossy => "2 % loss at 300 ms",
            Self::Pauses => "pauses of 400 ms",
        }
    }

    fn measure(self, args: &AlarmArgs) -> anyhow::Result<AlarmFigures> {
        let site = BenchSite::new(&topology())?;
        let mut run = UpstreamRun::start(&site, args.relay, &args.media)?;
        let began = Instant::now();
        let since = monotonic_ns();
        let length = Duration::from_secs_f64(60.0 * args.minutes);
        let is_over = AtomicBool::new(false);
        scope(|threads| {
            let disturbs = threads.spawn(|| self.disturb(&run, &args.media, &is_over));
            let mut watched = Ok(());
            while began.elapsed() < length && !disturbs.is_finished() && watched.is_ok() {
                sleep(LOOK);
                watched = run.ask().map(drop);
            }
            is_over.store(true, Ordering::Relaxed);
            disturbs.join().map_err(|_| anyhow::anyhow!("the link's thread panicked"))??;
            watched
        })?;
        run.viewers.check_runs()?;
        let moves = run.ask()?.totals.upstream_changes;
        let alarms = run.relay.errors()?.lines().filter(|line| line.contains(ALARM)).count();
        run.viewers.interrupt(PATIENCE)?;
        let viewers = ViewerGaps::read(&run.series, args.media.subscribers, since)?;
        Ok(AlarmFigures { alarms, moves, viewers, seconds: began.elapsed().as_secs_f64() })
    }

    fn disturb(self, run: &UpstreamRun, media: &UpstreamMedia, is_over: &AtomicBool) -> anyhow::Result<()> {
        let is_over = || is_over.load(Ordering::Relaxed);
        match self {
            Self::Mobile => {
                let offered = u64::from(media.rate_hz) * OBJECT_BYTES * 8;
                Ok(replay::replay(run.site.link(LINK)?, replay::mobile(offered), is_over)?)
            }
            Self::Lossy => {
                set_link(run.site, "delay=150ms loss=2%")?;
                while !is_over() {
                    sleep(LOOK);
                }
                Ok(())
            }
            Self::Pauses => {
                while !is_over() {
                    kill(run.mended.upstream, Signal::SIGSTOP)?;
                    sleep(PAUSE);
                    kill(run.mended.upstream, Signal::SIGCONT)?;
                    sleep(BETWEEN);
                    set_link(run.site, "loss=100%")?;
                    sleep(PAUSE);
                    set_link(run.site, "loss=0%")?;
                    sleep(BETWEEN);
                }
                Ok(())
            }
        }
    }
}

impl AlarmArgs {
    fn row(&self, condition: AlarmCondition, measured: &Result<AlarmFigures, String>) -> Value {
        match measured {
            Ok(seen) => json!({
                "condition": condition.name(), "engine": self.relay.engine(), "seconds": seen.seconds,
                "alarms": seen.alarms, "moves": seen.moves, "gap_ms": seen.viewers.gap_ms,
                "lost": seen.viewers.lost, "duplicates": seen.viewers.duplicates,
                "rate_hz": self.media.rate_hz, "subscribers": self.media.subscribers,
            }),
            Err(error) => json!({ "condition": condition.name(), "error": error }),
        }
    }
}

fn render(rows: &[(AlarmCondition, Result<AlarmFigures, String>)]) -> String {
    let head = ["condition", "minutes", "alarms", "moves", "longest gap ms", "lost", "twice"];
    let mut lines = vec![head.map(str::to_owned).to_vec()];
    let mut errors = String::new();
    for (condition, measured) in rows {
        match measured {
            Ok(AlarmFigures { alarms, moves, viewers, seconds }) => lines.push(vec![
                condition.name().to_owned(),
                format!("{:.1}", seconds / 60.0),
                alarms.to_string(),
                moves.to_string(),
                format!("{:.0}", viewers.gap_ms),
                viewers.lost.to_string(),
                viewers.duplicates.to_string(),
            ]),
            Err(error) => errors += &format!("{}: {error}\n", condition.name()),
        }
    }
    columns(&lines) + &errors
}
