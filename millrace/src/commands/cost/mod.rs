//! `millrace cost`: what the kernel's networking costs.

mod observe;
mod outputs;
mod replay;

use std::collections::BTreeSet;
use std::io::{self, IsTerminal};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use clap::ValueEnum;
use millrace_cost::report::{Method, Mode};
use millrace_cost::taxonomy::Taxonomy;
use millrace_cost::{Budget, Config, Observer};
use millrace_cost_daemon::live::{Answer, Terminal};
use millrace_cost_daemon::losses::Losses;
use millrace_cost_daemon::outputs::{JsonLines, Log, Text};
use millrace_cost_daemon::queue::Queued;
use millrace_cost_daemon::signals::Signals;
use millrace_cost_daemon::sink::Sink;

use super::parse;
use observe::{Screen, finish, observe};
use outputs::Opened;

#[derive(Debug, clap::Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct Args {
    #[command(subcommand)]
    command: Option<Command>,
    /// Report once, over this time, and end: 1s, 500ms
    #[arg(long, value_name = "TIME", value_parser = parse_time, conflicts_with = "period")]
    duration: Option<Duration>,
    /// From one report to the next
    #[arg(long, value_name = "TIME", value_parser = parse_time, default_value = "1s")]
    period: Duration,
    /// End after so many reports
    #[arg(long, value_name = "N")]
    reports: Option<u64>,
    /// Print reports as JSON, one per line
    #[arg(long)]
    json: bool,
    /// Print reports as text one after the other, even on a terminal
    #[arg(long, conflicts_with = "json")]
    plain: bool,
    /// Samples per second and CPU; 0 shows events without their parts [default: 1000, in mode `auto` fewer where
    /// interrupts are dear]
    #[arg(long, value_name = "HZ")]
    frequency: Option<u32>,
    /// `events` times them, at a cost in each call; `sampling` attaches nothing but the sampler: its cost does not depend on
    /// the packet rate. `auto` times events while that keeps to the budget
    #[arg(long, value_enum, default_value_t = ModeName::Auto)]
    mode: ModeName,
    /// What timing events may take of each CPU in mode `auto`
    #[arg(long, value_name = "PERCENT", value_parser = parse_percent, default_value = "1")]
    budget: f64,
    /// Where calls are timed; by default at functions if the kernel allows it
    #[arg(long, value_enum)]
    method: Option<MethodName>,
    /// Only these CPUs: 0,2-5
    #[arg(long, value_name = "LIST", value_parser = parse_cpus)]
    cpus: Option<Cpus>,
    /// Only this process, repeatable
    #[arg(long, value_delimiter = ',', value_name = "PID")]
    pid: Vec<u32>,
    /// Only processes in this cgroup or below, as a path under the cgroup v2 mount
    #[arg(long, value_name = "PATH")]
    cgroup: Option<String>,
    /// Where all CPU time of this process goes, in user mode too; repeatable
    #[arg(long, value_delimiter = ',', value_name = "PID")]
    profile: Vec<u32>,
    /// Command lines of processes, which may hold secrets: in tables, JSON and logs, and on the dashboard where it asks for
    /// a token. The live view shows them by the key a, also without this
    #[arg(long)]
    arguments: bool,
    /// Run times of all BPF programs; costs a little in each of their runs
    #[arg(long)]
    programs: bool,
    /// Parts of the stack by function names, before those that are built in
    #[arg(long, value_name = "FILE")]
    taxonomy: Option<PathBuf>,
    /// Reports contain the sampled stacks
    #[arg(long, requires = "json")]
    stacks: bool,
    /// How stacks come from the kernel
    #[arg(long, value_enum, default_value_t = TransportName::DoubleBuffer)]
    transport: TransportName,
    /// What all CPU packages and their memory take when nothing runs: it is no energy of networking's
    #[arg(long, value_name = "WATTS")]
    idle_watts: Option<f64>,
    #[command(flatten)]
    log: outputs::LogArgs,
    #[command(flatten)]
    outputs: outputs::Args,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    /// Show again what was logged
    Replay(replay::Args),
}

/// Unless another one is asked for.
const FREQUENCY_HZ: u32 = 1000;

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum ModeName {
    Auto,
    Events,
    Sampling,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum MethodName {
    Functions,
    SystemCalls,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum TransportName {
    DoubleBuffer,
    RingBuffer,
}

pub fn run(args: Args) -> anyhow::Result<()> {
    if let Some(Command::Replay(args)) = &args.command {
        return replay::run(args);
    }
    let once = args.duration.is_some();
    let period = args.duration.unwrap_or(args.period);
    let reports = if once { Some(1) } else { args.reports };
    let live = !args.json && !args.plain && !once && io::stdout().is_terminal() && io::stdin().is_terminal();
    // Before there are threads, which inherit it.
    let signals = Signals::block()?;
    let config = args.config()?;
    // Before outputs, which it leaves as they are if it fails.
    let mut observer = Observer::start(config).with_context(|| match nix::unistd::geteuid().is_root() {
        true => "cannot observe the kernel",
        false => "cannot observe the kernel, which needs root",
    })?;
    let losses = Arc::new(Losses::new(live));
    let mut sinks = sinks(&args, live, once, &losses)?;
    // Only now: an error is not to be lost on the other screen.
    let mut screen = match live {
        true => Screen::Terminal(Terminal::open(signals, Arc::clone(&losses), args.arguments)?),
        false => Screen::None(signals),
    };
    let observed = observe(&mut observer, period, reports, &mut screen, &mut sinks);
    drop(screen);
    let finished = finish(&mut sinks, matches!(observed, Ok(Answer::Continue)));
    losses.tell();
    observed.map(drop).and(finished)
}

/// Text goes to standard output if nothing else is asked for.
fn sinks(args: &Args, live: bool, once: bool, losses: &Arc<Losses>) -> anyhow::Result<Vec<Box<dyn Sink>>> {
    let mut sinks: Vec<Box<dyn Sink>> = Vec::new();
    let Opened { dashboard, export } = args.outputs.open(true, Arc::clone(losses))?;
    if let Some(dashboard) = dashboard {
        sinks.push(Box::new(dashboard));
    }
    if let Some(export) = export {
        sinks.push(Box::new(export));
    }
    if let Some(log) = args.log.open(Arc::clone(losses))? {
        sinks.push(Box::new(Queued::start(Log::NAME, log, Arc::clone(losses))?));
    }
    if args.json {
        let json = JsonLines { stacks: args.stacks };
        sinks.push(Box::new(Queued::start(STDOUT, json, Arc::clone(losses))?));
    } else if args.plain || (!live && sinks.is_empty()) {
        sinks.push(Box::new(Queued::start(STDOUT, Text { one: once }, Arc::clone(losses))?));
    }
    Ok(sinks)
}

const STDOUT: &str = "standard output";

impl Args {
    fn config(&self) -> anyhow::Result<Config> {
        if let Some(output) = self.outputs.of_samples_only().filter(|_| self.frequency == Some(0)) {
            anyhow::bail!("{output} needs samples, and --frequency 0 takes none");
        }
        let taxonomy = match &self.taxonomy {
            Some(file) => Taxonomy::extended(file)?,
            None => Taxonomy::builtin()?,
        };
        let budget = Budget { share: self.budget / 100.0, ..Budget::default() };
        Ok(Config {
            mode: match self.mode {
                ModeName::Auto | ModeName::Events => Mode::Events,
                ModeName::Sampling => Mode::Sampling,
            },
            // Without samples there is nothing to choose from.
            budget: (self.mode == ModeName::Auto && self.frequency != Some(0)).then_some(budget),
            lower_frequency: self.frequency.is_none(),
            method: self.method.map(|method| match method {
                MethodName::Functions => Method::Functions,
                MethodName::SystemCalls => Method::SystemCalls,
            }),
            frequency_hz: self.frequency.unwrap_or(FREQUENCY_HZ),
            cpus: self.cpus.as_ref().map(|cpus| cpus.0.clone()),
            ring_buffer: self.transport == TransportName::RingBuffer,
            taxonomy,
            profile: self.profile.iter().copied().collect(),
            pids: self.pid.iter().copied().collect(),
            cgroup: self.cgroup.clone(),
            arguments: self.arguments,
            stacks: self.stacks || self.log.is_any() || self.outputs.needs_stacks(),
            program_statistics: self.programs,
            idle_watts: self.idle_watts,
        })
    }
}

/// A list of CPUs, each once.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Cpus(BTreeSet<u32>);

fn parse_cpus(text: &str) -> Result<Cpus, String> {
    let number = |text: &str| text.trim().parse::<u32>().map_err(|_| format!("{text:?} is not a CPU"));
    let mut cpus = BTreeSet::new();
    for item in text.split(',') {
        let (first, last) = item.split_once('-').unwrap_or((item, item));
        let (first, last) = (number(first)?, number(last)?);
        if first > last || last > u32::from(u16::MAX) {
            return Err(format!("{item:?} is no range of CPUs"));
        }
        cpus.extend(first..=last);
    }
    Ok(Cpus(cpus))
}

/// Of a CPU.
fn parse_percent(text: &str) -> Result<f64, String> {
    match text.trim_end_matches('%').parse::<f64>() {
        Ok(percent) if percent > 0.0 && percent <= 100.0 => Ok(percent),
        _ => Err("more than 0, at most 100".to_owned()),
    }
}

fn parse_time(text: &str) -> Result<Duration, String> {
    let time = Some(parse::time(text)?).filter(|time| *time >= Duration::from_millis(10));
    time.ok_or_else(|| "at least 10ms".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times() {
        assert_eq!(parse_time("1.5s"), Ok(Duration::from_millis(1500)));
        assert_eq!(parse_time("2"), Ok(Duration::from_secs(2)), "as for all commands");
        for wrong in ["0.001", "1ms", "2x"] {
            assert!(parse_time(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn percents() {
        assert_eq!(parse_percent("0.5"), Ok(0.5));
        assert_eq!(parse_percent("2%"), Ok(2.0));
        for wrong in ["", "0", "-1", "101", "NaN", "a"] {
            assert!(parse_percent(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn lists_of_cpus() {
        assert_eq!(parse_cpus("0,4-6,5"), Ok(Cpus([0, 4, 5, 6].into())));
        for wrong in ["", "a", "3-1", "0-4294967295", "1,,2"] {
            assert!(parse_cpus(wrong).is_err(), "{wrong}");
        }
    }
}
