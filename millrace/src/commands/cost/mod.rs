//! `millrace cost`: measures the CPU time that the kernel spends on networking.

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
use millrace_cost::report::{ReportMethod, ReportMode};
use millrace_cost::taxonomy::Taxonomy;
use millrace_cost::{Config, Observer, TimingBudget};
use millrace_cost_daemon::live::{KeyAnswer, LiveTerminal};
use millrace_cost_daemon::losses::ReportLosses;
use millrace_cost_daemon::outputs::{JsonOutput, LogOutput, TextOutput};
use millrace_cost_daemon::queue::Queued;
use millrace_cost_daemon::rights::{self, RightsNeeds};
use millrace_cost_daemon::signals::CostSignals;
use millrace_cost_daemon::sink::ReportSink;

use super::parse;
use observe::{Screen, finish, observe};
use outputs::OpenedOutputs;

#[derive(Debug, clap::Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct CostCommandArgs {
    #[command(subcommand)]
    command: Option<CostCommand>,
    /// Measure for this time, print one report and exit: 1s, 500ms
    #[arg(long, value_name = "TIME", value_parser = parse_time, conflicts_with = "period")]
    duration: Option<Duration>,
    /// Time between reports
    #[arg(long, value_name = "TIME", value_parser = parse_time, default_value = "1s")]
    period: Duration,
    /// Exit after this number of reports
    #[arg(long, value_name = "N")]
    reports: Option<u64>,
    /// Print reports as JSON, one per line
    #[arg(long)]
    json: bool,
    /// Print reports as text one after the other, even on a terminal
    #[arg(long, conflicts_with = "json")]
    plain: bool,
    /// Stack samples per second on each CPU; with 0, reports do not say which part of the network stack takes the time
    /// [default: 1000, in mode `auto` fewer where interrupts are expensive]
    #[arg(long, value_name = "HZ")]
    frequency: Option<u32>,
    /// Way to measure: `events` times each call into networking, at a cost per call; `sampling` only samples stacks, at
    /// a cost that does not depend on the packet rate; `auto` times calls while that takes no more than --budget
    #[arg(long, value_enum, default_value_t = ModeName::Auto)]
    mode: ModeName,
    /// Share of each CPU that the timing of calls may take in mode `auto`, percent
    #[arg(long, value_name = "PERCENT", value_parser = parse_percent, default_value = "1")]
    budget: f64,
    /// Method to time calls into networking: at kernel functions, if the kernel allows it, or at system calls
    #[arg(long, value_enum)]
    method: Option<MethodName>,
    /// Measure only these CPUs: 0,2-5
    #[arg(long, value_name = "LIST", value_parser = parse_cpus)]
    cpus: Option<Cpus>,
    /// Measure only this process, repeatable
    #[arg(long, value_delimiter = ',', value_name = "PID")]
    pid: Vec<u32>,
    /// Measure only processes in this cgroup or below it, as a path under the cgroup v2 mount
    #[arg(long, value_name = "PATH")]
    cgroup: Option<String>,
    /// Break down all CPU time of this process, in user mode as well; repeatable
    #[arg(long, value_delimiter = ',', value_name = "PID")]
    profile: Vec<u32>,
    /// Show command lines of processes, which may contain secrets: in tables, JSON and logs, and on a dashboard that
    /// requires a token. The live view shows them without this flag when the user presses the key `a`
    #[arg(long)]
    arguments: bool,
    /// Report all other work of the kernel too, under the name `kernel`: in tables, JSON and flame graphs
    #[arg(long)]
    all: bool,
    /// Report the run time of each BPF program, which adds a little time to each run
    #[arg(long)]
    programs: bool,
    /// File with rules that assign kernel functions to parts of the network stack, applied before the built-in ones
    #[arg(long, value_name = "FILE")]
    taxonomy: Option<PathBuf>,
    /// Include the sampled stacks in reports
    #[arg(long, requires = "json")]
    stacks: bool,
    /// Kind of buffer through which the kernel passes sampled stacks to this program
    #[arg(long, value_enum, default_value_t = TransportName::DoubleBuffer)]
    transport: TransportName,
    /// Power that all CPU packages and their memory take on an idle machine; it is subtracted before networking's share
    /// of the energy is computed
    #[arg(long, value_name = "WATTS")]
    idle_watts: Option<f64>,
    #[command(flatten)]
    log: outputs::LogArgs,
    #[command(flatten)]
    outputs: outputs::OutputArgs,
}

#[derive(Debug, clap::Subcommand)]
enum CostCommand {
    /// Show the reports of a log again
    Replay(replay::ReplayArgs),
}

/// Default of `--frequency`: stack samples per second on each CPU.
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

pub fn run(args: CostCommandArgs) -> anyhow::Result<()> {
    if let Some(CostCommand::Replay(args)) = &args.command {
        return replay::run(args);
    }
    let once = args.duration.is_some();
    let period = args.duration.unwrap_or(args.period);
    let reports = if once { Some(1) } else { args.reports };
    let live = !args.json && !args.plain && !once && io::stdout().is_terminal() && io::stdin().is_terminal();
    // Signals are blocked before any thread is started, since threads inherit the mask.
    let signals = CostSignals::block()?;
    let config = args.config()?;
    // The observer starts before outputs are opened: if it fails, existing files are left unchanged.
    let mut observer = Observer::start(config).with_context(|| match nix::unistd::geteuid().is_root() {
        true => "cannot observe the kernel",
        false => "cannot observe the kernel, which needs root",
    })?;
    let losses = Arc::new(ReportLosses::new(live));
    let opened = args.outputs.open(true, Arc::clone(&losses))?;
    let log = args.log.open(Arc::clone(&losses))?;
    if args.outputs.serves() {
        // Privileges are dropped before any thread is started: running threads would keep theirs.
        rights::reduce(args.needs())?;
        observer.look_at_rights();
    }
    let mut sinks = sinks(&args, opened, log, live, once, &losses)?;
    // The live view opens last: an error printed on the terminal's alternate screen would vanish with it.
    let mut screen = match live {
        true => Screen::Terminal(LiveTerminal::open(signals, Arc::clone(&losses), args.arguments)?),
        false => Screen::None(signals),
    };
    let observed = observe(&mut observer, period, reports, &mut screen, &mut sinks);
    drop(screen);
    let finished = finish(&mut sinks, matches!(observed, Ok(KeyAnswer::Continue)));
    losses.tell();
    observed.map(drop).and(finished)
}

/// Makes the list of outputs. Reports are printed as text if no other output was chosen.
fn sinks(
    args: &CostCommandArgs,
    OpenedOutputs { dashboard, export }: OpenedOutputs,
    log: Option<LogOutput>,
    live: bool,
    once: bool,
    losses: &Arc<ReportLosses>,
) -> anyhow::Result<Vec<Box<dyn ReportSink>>> {
    let mut sinks: Vec<Box<dyn ReportSink>> = Vec::new();
    if let Some(dashboard) = dashboard {
        sinks.push(Box::new(dashboard.run()?));
    }
    if let Some(export) = export {
        sinks.push(Box::new(export));
    }
    if let Some(log) = log {
        sinks.push(Box::new(Queued::start(LogOutput::NAME, log, Arc::clone(losses))?));
    }
    if args.json {
        let json = JsonOutput { stacks: args.stacks };
        sinks.push(Box::new(Queued::start(STDOUT, json, Arc::clone(losses))?));
    } else if args.plain || (!live && sinks.is_empty()) {
        sinks.push(Box::new(Queued::start(STDOUT, TextOutput { one: once }, Arc::clone(losses))?));
    }
    Ok(sinks)
}

/// Name of standard output in messages about lost reports.
const STDOUT: &str = "standard output";

impl CostCommandArgs {
    fn needs(&self) -> RightsNeeds {
        RightsNeeds {
            observes: true,
            profiles: !self.profile.is_empty(),
            programs: self.programs,
            files: self.log.is_any() || self.outputs.writes(),
        }
    }

    fn config(&self) -> anyhow::Result<Config> {
        if let Some(output) = self.outputs.samples_only_option().filter(|_| self.frequency == Some(0)) {
            anyhow::bail!("{output} needs samples, and --frequency 0 takes none");
        }
        let taxonomy = match &self.taxonomy {
            Some(file) => Taxonomy::extended(file)?,
            None => Taxonomy::builtin()?,
        };
        let budget = TimingBudget { share: self.budget / 100.0, ..TimingBudget::default() };
        Ok(Config {
            mode: match self.mode {
                ModeName::Auto | ModeName::Events => ReportMode::Events,
                ModeName::Sampling => ReportMode::Sampling,
            },
            // Mode `auto` falls back from timing to sampling, so it needs samples.
            budget: (self.mode == ModeName::Auto && self.frequency != Some(0)).then_some(budget),
            lower_frequency: self.frequency.is_none(),
            method: self.method.map(|method| match method {
                MethodName::Functions => ReportMethod::Functions,
                MethodName::SystemCalls => ReportMethod::SystemCalls,
            }),
            frequency_hz: self.frequency.unwrap_or(FREQUENCY_HZ),
            cpus: self.cpus.as_ref().map(|cpus| cpus.0.clone()),
            ring_buffer: self.transport == TransportName::RingBuffer,
            taxonomy,
            profile: self.profile.iter().copied().collect(),
            pids: self.pid.iter().copied().collect(),
            cgroup: self.cgroup.clone(),
            all: self.all,
            arguments: self.arguments,
            stacks: self.stacks || self.log.is_any() || self.outputs.needs_stacks(),
            program_statistics: self.programs,
            idle_watts: self.idle_watts,
        })
    }
}

/// A set of CPU numbers.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Cpus(BTreeSet<u32>);

/// Parses a list of CPUs and ranges, such as `0,2-5`.
fn parse_cpus(text: &str) -> Result<Cpus, String> {
    let number = |text: &str| text.trim().parse::<u32>().map_err(|_| format!("{text:?} is not a CPU"));
    let mut cpus = BTreeSet::new();
    for item in text.split(',') {
        let (first, last) = item.split_once('-').unwrap_or((item, item));
        let first = number(first)?;
        let last = number(last)?;
        if first > last || last > u32::from(u16::MAX) {
            return Err(format!("{item:?} is no range of CPUs"));
        }
        cpus.extend(first..=last);
    }
    Ok(Cpus(cpus))
}

/// Parses a percentage of one CPU.
fn parse_percent(text: &str) -> Result<f64, String> {
    match text.trim_end_matches('%').parse::<f64>() {
        Ok(percent) if percent > 0.0 && percent <= 100.0 => Ok(percent),
        _ => Err("must be above 0, and at most 100".to_owned()),
    }
}

/// Parses the length of a report's period.
fn parse_time(text: &str) -> Result<Duration, String> {
    let time = Some(parse::time(text)?).filter(|time| *time >= Duration::from_millis(10));
    time.ok_or_else(|| "must be at least 10ms".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cost_report_times_are_parsed_and_one_millisecond_is_refused() {
        assert_eq!(parse_time("1.5s"), Ok(Duration::from_millis(1500)));
        assert_eq!(parse_time("2"), Ok(Duration::from_secs(2)), "as for all commands");
        for wrong in ["0.001", "1ms", "2x"] {
            assert!(parse_time(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn percentages_must_be_above_0_and_at_most_100() {
        assert_eq!(parse_percent("0.5"), Ok(0.5));
        assert_eq!(parse_percent("2%"), Ok(2.0));
        for wrong in ["", "0", "-1", "101", "NaN", "a"] {
            assert!(parse_percent(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn cpu_lists_are_parsed() {
        assert_eq!(parse_cpus("0,4-6,5"), Ok(Cpus([0, 4, 5, 6].into())));
        for wrong in ["", "a", "3-1", "0-4294967295", "1,,2"] {
            assert!(parse_cpus(wrong).is_err(), "{wrong}");
        }
    }
}
