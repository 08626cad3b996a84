//! `millrace cost replay`: what was logged, shown again.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use millrace_cost::log::Reader;
use millrace_cost::merge::Merge;
use millrace_cost::report::Report;
use millrace_cost_daemon::outputs::{JsonLines, Text};
use millrace_cost_daemon::signals::Signals;
use millrace_cost_daemon::sink::Sink;

use super::outputs::{self, Opened};

#[derive(Debug, clap::Args)]
pub struct Args {
    /// Logs in any order, rotated ones too, or reports that `--json` printed
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// Print the reports as JSON, one per line, instead of their sum as text
    #[arg(long)]
    json: bool,
    /// Print every report as text, not their sum
    #[arg(long, conflicts_with = "json")]
    plain: bool,
    /// The JSON has the stacks too
    #[arg(long, requires = "json")]
    stacks: bool,
    /// Only reports of this time on, milliseconds since 1970
    #[arg(long, value_name = "MS", default_value_t = 0)]
    from: u64,
    /// Only reports up to this time, milliseconds since 1970
    #[arg(long, value_name = "MS", default_value_t = u64::MAX, hide_default_value = true)]
    to: u64,
    /// As it happened, or so many times as fast, instead of all at once
    #[arg(long, value_name = "FACTOR", num_args = 0..=1, default_missing_value = "1", value_parser = parse_pace)]
    pace: Option<f64>,
    #[command(flatten)]
    outputs: outputs::Args,
}

fn parse_pace(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(factor) if factor.is_finite() && factor > 0.0 => Ok(factor),
        _ => Err("a number above 0".to_owned()),
    }
}

pub fn run(args: &Args) -> anyhow::Result<()> {
    let logs = open(&args.files)?;
    let signals = Signals::block()?;
    let Opened { dashboard, export } = args.outputs.open(args.pace.is_some(), Arc::default())?;
    let mut sinks: Vec<Box<dyn Sink>> = Vec::new();
    if let Some(export) = export {
        sinks.push(Box::new(export));
    }
    if args.json {
        sinks.push(Box::new(JsonLines { stacks: args.stacks }));
    } else if args.plain {
        sinks.push(Box::new(Text { one: false }));
    } else if !args.outputs.is_any() {
        sinks.push(Box::new(Sum::default()));
    }
    let mut dashboard = dashboard;
    let mut reports = 0;
    let all = each(logs, |report| {
        if !(args.from..=args.to).contains(&report.time_unix_ms) {
            return Ok(ControlFlow::Continue(()));
        }
        reports += 1;
        let report = Arc::new(report);
        sinks.iter_mut().try_for_each(|sink| sink.report(&report))?;
        let Some(pace) = args.pace else {
            if let Some(dashboard) = &dashboard {
                dashboard.load(report);
            }
            return Ok(ControlFlow::Continue(()));
        };
        if let Some(dashboard) = &mut dashboard {
            dashboard.report(&report)?;
        }
        wait(&signals, Duration::from_nanos(report.period_ns).div_f64(pace))
    })?;
    sinks.iter_mut().try_for_each(|sink| sink.finish(None))?;
    anyhow::ensure!(reports > 0, "there are no reports");
    let Some(dashboard) = dashboard.filter(|_| all.is_continue()) else { return Ok(()) };
    match dashboard.forgotten() {
        0 => {}
        forgotten => eprintln!(
            "millrace: of {reports} reports the oldest {forgotten} are not shown in full: --http-memory is too little"
        ),
    }
    while !signals.wait(Duration::from_secs(3600))? {}
    Ok(())
}

/// Breaks off at a signal.
fn wait(signals: &Signals, time: Duration) -> anyhow::Result<ControlFlow<()>> {
    Ok(if signals.wait(time)? { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
}

/// Files by the time of their first report, empty ones first.
fn open(files: &[PathBuf]) -> anyhow::Result<Vec<Log>> {
    let mut logs = files.iter().map(|file| Log::open(file)).collect::<anyhow::Result<Vec<_>>>()?;
    logs.sort_by_key(|log| log.first.as_ref().map(|report| report.time_unix_ms));
    Ok(logs)
}

fn each(
    logs: Vec<Log>,
    mut take: impl FnMut(Report) -> anyhow::Result<ControlFlow<()>>,
) -> anyhow::Result<ControlFlow<()>> {
    for mut log in logs {
        let first = log.first.take().map(Ok);
        for report in first.into_iter().chain(log.reader.by_ref()) {
            if take(report?)?.is_break() {
                return Ok(ControlFlow::Break(()));
            }
        }
        log.tell_if_torn();
    }
    Ok(ControlFlow::Continue(()))
}

struct Log {
    path: PathBuf,
    reader: Reader,
    /// Read ahead to know the time.
    first: Option<Report>,
}

impl Log {
    fn open(path: &Path) -> anyhow::Result<Self> {
        let mut reader = Reader::open(path)?;
        let first = reader.next().transpose()?;
        Ok(Self { path: path.to_owned(), reader, first })
    }

    fn tell_if_torn(&self) {
        if self.reader.torn() {
            eprintln!(
                "millrace: {}: ends in the middle, as after a kill; its last report may be missing",
                self.path.display()
            );
        }
    }
}

/// Adds everything up, and prints that.
#[derive(Default)]
struct Sum(Merge);

impl Sink for Sum {
    fn report(&mut self, report: &Arc<Report>) -> anyhow::Result<()> {
        self.0.add(report);
        Ok(())
    }

    fn finish(&mut self, _deadline: Option<Instant>) -> anyhow::Result<()> {
        match std::mem::take(&mut self.0).finish() {
            Some(report) => Text { one: true }.report(&Arc::new(report)),
            None => Ok(()),
        }
    }
}
