//! `millrace-lab bench thesis`: the measurements of the thesis behind this project, with and without the kernel's fast
//! path. It measures delay of the same objects, system calls of the relay by name, and CPU time of publisher, relay and
//! subscriber over time.

mod calls;
mod plot;

use std::{
    fs,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use anyhow::{Context, ensure};
use millrace_lab_kernel::syscalls::Syscalls;
use serde_json::{Value, json};

use self::calls::SyscallCounts;
use super::{
    contender::Contender,
    process::BenchProcess,
    site::{BenchSite, PUBLISHER_LINK, SUBSCRIBERS_LINK},
    table::{columns, write_json},
    usage::{UsageReading, warn_if_busy},
};
use crate::{
    lab::{Directions, Topology},
    program::product,
    progress::BenchProgress,
};

#[derive(Debug, clap::Args)]
pub struct ThesisArgs {
    /// Length of the video, seconds
    #[arg(long, default_value_t = 30.0)]
    seconds: f64,
    /// Number of interleaved runs with the kernel's fast path, and of runs without it
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// One-way delay of the links to the publisher and to the subscriber
    #[arg(long, default_value_t = 5, value_name = "MS")]
    link_ms: u32,
    /// Write the results to this file, as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Draw the results over time to this directory, as SVG
    #[arg(long, value_name = "DIR")]
    plot: Option<PathBuf>,
}

/// Sizes of the video's frames, bytes. Each frame is an object.
const VIDEO: &str = include_str!("video.csv");
const FRAMES_PER_SECOND: u32 = 30;
const FRAMES_PER_GROUP: u32 = 30;
/// The relay's engines: without the fast path, and with it.
const ENGINES: [Contender; 2] = [Contender::User, Contender::Kernel];
/// Interval at which the CPU clocks of the processes are read.
const INTERVAL: Duration = Duration::from_millis(250);
/// Longest wait after the end of the video until publisher and subscriber have ended.
const END_LIMIT: Duration = Duration::from_secs(30);
/// Longest wait until the publisher's namespace is announced. A subscriber that starts earlier ends and is started
/// again.
const START_LIMIT: Duration = Duration::from_secs(20);

pub fn run(args: ThesisArgs) -> anyhow::Result<()> {
    ensure!(args.seconds >= 1.0 && args.rounds > 0, "--seconds and --rounds must be at least 1");
    warn_if_busy()?;
    let bench = ThesisBench::new(&args)?;
    let mut rows = Vec::new();
    let progress = BenchProgress::with_steps(args.rounds * ENGINES.len());
    for round in 1..=args.rounds {
        for engine in ENGINES {
            progress.begin(format!("round {round}, {}", engine.label()));
            let run = bench.run(engine)?;
            progress.end(&run.told())?;
            rows.push(ThesisRow { engine, round, run });
        }
    }
    drop((progress, bench));
    print!("{}", render(&rows));
    let json: Vec<_> = rows.iter().map(|row| row.json(&args)).collect();
    args.json.as_deref().map_or(Ok(()), |path| write_json(path, &json))?;
    if let Some(directory) = &args.plot {
        fs::create_dir_all(directory).with_context(|| format!("cannot create {}", directory.display()))?;
        plot::draw(&rows, directory).with_context(|| format!("cannot draw to {}", directory.display()))?;
    }
    Ok(())
}

/// Delay of one object that arrived at the subscriber.
#[derive(Debug, Clone, Copy, PartialEq)]
struct ThesisArrival {
    sequence: u64,
    delay_us: f64,
}

/// CPU time of the processes in one interval, which starts at `at_s`, percent of one CPU.
#[derive(Debug, Clone, Copy)]
struct ThesisCpu {
    at_s: f64,
    publisher: f64,
    relay: f64,
    subscriber: f64,
}

/// Result of one run of one engine (the relay without or with the kernel's fast path).
struct ThesisRun {
    delays: Vec<ThesisArrival>,
    calls: SyscallCounts,
    cpu: Vec<ThesisCpu>,
}

struct ThesisRow {
    engine: Contender,
    round: usize,
    run: ThesisRun,
}

struct ThesisBench {
    site: BenchSite,
    seconds: f64,
    sizes: PathBuf,
}

impl ThesisBench {
    fn new(args: &ThesisArgs) -> anyhow::Result<Self> {
        let mut topology = Topology::standard(1, 1);
        for link in [PUBLISHER_LINK, SUBSCRIBERS_LINK] {
            topology.impair(link, Directions::Both, &format!("delay={}ms", args.link_ms))?;
        }
        let site = BenchSite::new(&topology)?;
        let sizes = site.directory().join("video.csv");
        fs::write(&sizes, VIDEO)?;
        Ok(Self { site, seconds: args.seconds, sizes })
    }

    fn run(&self, engine: Contender) -> anyhow::Result<ThesisRun> {
        let relay = self.site.start_relay(engine)?;
        let mut publisher = self.publisher()?;
        let series = self.site.directory().join("series.csv");
        let mut subscriber = self.subscriber(&series)?;
        let mut syscalls = Syscalls::attach(relay.id())?;
        let processes = [publisher.id(), relay.id(), subscriber.id()];
        let mut cpu = Vec::new();
        let start = Instant::now();
        let mut before = readings(processes)?;
        loop {
            std::thread::sleep(INTERVAL);
            if publisher.check_runs().is_err() {
                break;
            }
            if subscriber.check_runs().is_err() {
                // The subscriber ends early if the namespace is not announced yet, and normally when the track has
                // ended.
                if fs::metadata(&series).is_ok() || start.elapsed() > START_LIMIT {
                    break;
                }
                subscriber = self.subscriber(&series)?;
            }
            let Ok(now) = readings([processes[0], processes[1], subscriber.id()]) else { continue };
            let percent = |index: usize| now[index].used_since(&before[index]).process_percent();
            let at_s = start.elapsed().as_secs_f64();
            cpu.push(ThesisCpu { at_s, publisher: percent(0), relay: percent(1), subscriber: percent(2) });
            before = now;
        }
        publisher.finish(END_LIMIT)?;
        subscriber.finish(END_LIMIT)?;
        let calls = SyscallCounts::from_counts(&syscalls.counts()?);
        let delays =
            arrivals(&fs::read_to_string(&series).context("the subscriber wrote no series of arrivals")?)?;
        ensure!(!delays.is_empty(), "no object arrived");
        Ok(ThesisRun { delays, calls, cpu })
    }

    fn publisher(&self) -> anyhow::Result<BenchProcess> {
        let route = self.site.route()?;
        let mut command = route.publisher.command(product()?);
        let arguments = format!(
            "publish --reconnect=false --generate --wait --name bench --rate-hz {FRAMES_PER_SECOND} --objects-per-group \
             {FRAMES_PER_GROUP} --duration {} --tls-disable-verify moqt://{}",
            self.seconds, route.relay
        );
        command.args(arguments.split_whitespace()).arg("--object-sizes").arg(&self.sizes);
        BenchProcess::start("publisher", command, self.site.directory())
    }

    fn subscriber(&self, series: &Path) -> anyhow::Result<BenchProcess> {
        let route = self.site.route()?;
        // An earlier run may have left its result file, which would be read instead of this run's file.
        let _ = fs::remove_file(series);
        let mut command = route.subscribers.command(product()?);
        let arguments = format!("subscribe --name bench --json --tls-disable-verify moqt://{}", route.relay);
        command.args(arguments.split_whitespace()).arg("--series").arg(series);
        BenchProcess::start("subscriber", command, self.site.directory())
    }
}

fn readings(processes: [u32; 3]) -> std::io::Result<[UsageReading; 3]> {
    let [publisher, relay, subscriber] = processes;
    Ok([UsageReading::take(publisher)?, UsageReading::take(relay)?, UsageReading::take(subscriber)?])
}

/// Parses the output of `subscribe --series`: a line per object with number, time of sending and delay.
fn arrivals(text: &str) -> anyhow::Result<Vec<ThesisArrival>> {
    let line = |line: &str| {
        let mut fields = line.split(',').skip(1).map(str::parse::<u64>);
        let (Some(Ok(sequence)), Some(Ok(_sent_ns)), Some(Ok(delay_ns))) =
            (fields.next(), fields.next(), fields.next())
        else {
            return Err(anyhow::anyhow!("malformed line in the series: {line}"));
        };
        Ok(ThesisArrival { sequence, delay_us: delay_ns as f64 / 1000.0 })
    };
    text.lines().skip(1).map(line).collect()
}

/// Returns the mean and the standard deviation of `values`.
fn mean_and_deviation(values: impl Iterator<Item = f64> + Clone) -> (f64, f64) {
    let count = values.clone().count().max(1) as f64;
    let mean = values.clone().sum::<f64>() / count;
    let variance = values.map(|value| (value - mean).powi(2)).sum::<f64>() / count;
    (mean, variance.sqrt())
}

impl ThesisRun {
    fn delay_us(&self) -> (f64, f64) {
        mean_and_deviation(self.delays.iter().map(|arrival| arrival.delay_us))
    }

    fn told(&self) -> String {
        let (mean, deviation) = self.delay_us();
        let objects = self.delays.len();
        let calls = self.calls.total;
        format!("{objects} objects, delay {mean:.0} us (deviation {deviation:.0}), {calls} system calls")
    }

    fn mean_cpu(&self, of: fn(&ThesisCpu) -> f64) -> f64 {
        mean_and_deviation(self.cpu.iter().map(of)).0
    }
}

impl ThesisRow {
    fn json(&self, args: &ThesisArgs) -> Value {
        let Self { engine, round, run } = self;
        let (mean, deviation) = run.delay_us();
        let cpu = |of: fn(&ThesisCpu) -> f64| run.cpu.iter().map(of).collect::<Vec<_>>();
        json!({
            "relay": engine.relay(), "engine": engine.engine(), "round": round,
            "seconds": args.seconds, "link_ms": args.link_ms,
            "objects": run.delays.len(),
            "delay_us": { "mean": mean, "deviation": deviation },
            "series": {
                "sequence": run.delays.iter().map(|arrival| arrival.sequence).collect::<Vec<_>>(),
                "delay_us": run.delays.iter().map(|arrival| arrival.delay_us).collect::<Vec<_>>(),
            },
            "syscalls": run.calls.json(),
            "cpu_percent": {
                "at_s": cpu(|cpu| cpu.at_s), "publisher": cpu(|cpu| cpu.publisher),
                "relay": cpu(|cpu| cpu.relay), "subscriber": cpu(|cpu| cpu.subscriber),
            },
        })
    }
}

/// Renders a table that compares the results of both engines (without and with the kernel's fast path), over all
/// rounds.
fn render(rows: &[ThesisRow]) -> String {
    let mut head = ["engine", "objects", "delay us", "deviation", "system calls"].map(str::to_owned).to_vec();
    head.extend(SyscallCounts::NAMED.map(|(name, _)| name.to_owned()));
    head.extend(["CPU % pub", "relay", "sub"].map(str::to_owned));
    let mut lines = vec![head];
    for engine in ENGINES {
        let runs: Vec<_> = rows.iter().filter(|row| row.engine == engine).map(|row| &row.run).collect();
        let per_run = |of: &dyn Fn(&ThesisRun) -> f64| mean_and_deviation(runs.iter().map(|run| of(run))).0;
        let delays = runs.iter().flat_map(|run| &run.delays).map(|arrival| arrival.delay_us);
        let (mean, deviation) = mean_and_deviation(delays);
        let mut line = vec![engine.label(), format!("{:.0}", per_run(&|run| run.delays.len() as f64))];
        line.extend([format!("{mean:.0}"), format!("{deviation:.0}")]);
        line.push(format!("{:.0}", per_run(&|run| run.calls.total as f64)));
        line.extend(
            (0..SyscallCounts::NAMED.len())
                .map(|index| format!("{:.0}", per_run(&|run| run.calls.named(index)))),
        );
        let cpu: [fn(&ThesisCpu) -> f64; 3] = [|cpu| cpu.publisher, |cpu| cpu.relay, |cpu| cpu.subscriber];
        line.extend(cpu.map(|of| format!("{:.1}", per_run(&|run| run.mean_cpu(of)))));
        lines.push(line);
    }
    columns(&lines)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frame_sizes_of_the_thesis_video_cover_half_a_minute() {
        let sizes: Vec<usize> =
            VIDEO.lines().filter(|line| !line.starts_with('#')).map(|line| line.parse().unwrap()).collect();
        assert_eq!(sizes.len() as u32, 30 * FRAMES_PER_SECOND);
        let key = sizes.iter().step_by(FRAMES_PER_GROUP as usize);
        let delta = sizes.iter().skip(1);
        assert!(key.min() > delta.step_by(FRAMES_PER_GROUP as usize).max(), "key frames are the larger ones");
    }

    #[test]
    fn csv_arrivals_are_parsed_and_mean_and_deviation_computed() {
        let text = "subscriber,sequence,sent_ns,latency_ns\n0,7,1000,20500\n0,8,2000,10000\n";
        let expected =
            [(7, 20.5), (8, 10.0)].map(|(sequence, delay_us)| ThesisArrival { sequence, delay_us });
        assert_eq!(arrivals(text).unwrap(), expected);
        assert!(arrivals("head\n0,1\n").is_err());
        assert_eq!(mean_and_deviation([2.0, 4.0].into_iter()), (3.0, 1.0));
        assert_eq!(mean_and_deviation([].into_iter()), (0.0, 0.0));
    }
}
