//! `millrace cost replay`: reads logged reports, and prints them or shows them on the dashboard.

use std::cell::Cell;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use millrace_cost::ahead::{Summed, TOGETHER};
use millrace_cost::log::ReportReader;
use millrace_cost::merge::Merge;
use millrace_cost::report::Report;
use millrace_cost_daemon::losses::ReportLosses;
use millrace_cost_daemon::outputs::{JsonOutput, TextOutput};
use millrace_cost_daemon::rights::{self, RightsNeeds};
use millrace_cost_daemon::signals::CostSignals;
use millrace_cost_daemon::sink::ReportSink;
use millrace_cost_daemon::web::BoundDashboard;

use super::outputs::{self, OpenedOutputs};

#[derive(Debug, clap::Args)]
pub struct ReplayArgs {
    /// Logs in any order, rotated ones as well, or reports that `--json` printed
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// Print the reports as JSON, one per line, instead of their sum as text
    #[arg(long)]
    json: bool,
    /// Print every report as text, not their sum
    #[arg(long, conflicts_with = "json")]
    plain: bool,
    /// Include the stacks in the JSON
    #[arg(long, requires = "json")]
    stacks: bool,
    /// Show only reports from this time on, milliseconds since 1970
    #[arg(long, value_name = "MS", default_value_t = 0)]
    from: u64,
    /// Show only reports up to this time, milliseconds since 1970
    #[arg(long, value_name = "MS", default_value_t = u64::MAX, hide_default_value = true)]
    to: u64,
    /// Replay at the original speed, or FACTOR times as fast, instead of all at once
    #[arg(long, value_name = "FACTOR", num_args = 0..=1, default_missing_value = "1", value_parser = parse_pace)]
    pace: Option<f64>,
    #[command(flatten)]
    outputs: outputs::OutputArgs,
    #[command(flatten)]
    log: outputs::LogArgs,
}

fn parse_pace(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(factor) if factor.is_finite() && factor > 0.0 => Ok(factor),
        _ => Err("must be a number above 0".to_owned()),
    }
}

pub fn run(args: &ReplayArgs) -> anyhow::Result<()> {
    let logs = open(&args.files)?;
    let signals = CostSignals::block()?;
    let losses = Arc::<ReportLosses>::default();
    let OpenedOutputs { dashboard, export } = args.outputs.open(args.pace.is_some(), Arc::default())?;
    if args.outputs.serves() {
        rights::reduce(RightsNeeds {
            files: args.log.is_any() || args.outputs.writes(),
            ..RightsNeeds::default()
        })?;
    }
    let mut sinks: Vec<Box<dyn ReportSink>> = Vec::new();
    if let Some(export) = export {
        sinks.push(Box::new(export));
    }
    if let Some(log) = args.log.open(Arc::clone(&losses))? {
        sinks.push(Box::new(log));
    }
    if args.json {
        sinks.push(Box::new(JsonOutput { stacks: args.stacks }));
    } else if args.plain {
        sinks.push(Box::new(TextOutput { one: false }));
    } else if !args.outputs.is_any() && !args.log.is_any() {
        sinks.push(Box::new(ReplaySum::default()));
    }
    // Without --pace the bound dashboard runs after the log was read. Earlier requests wait in the listen queue.
    let (bound, mut dashboard) = match args.pace {
        Some(_) => (None, dashboard.map(BoundDashboard::run).transpose()?),
        None => (dashboard, None),
    };
    // Reports may be added up while they are read, unless an option needs single reports or a range of time.
    let sums_suffice = args.pace.is_none()
        && !args.json
        && !args.plain
        && !args.log.is_any()
        && (args.from, args.to) == (0, u64::MAX);
    let together = Cell::new(if sums_suffice && bound.is_none() { TOGETHER } else { 1 });
    let mut reports = 0;
    let all = each(logs, &together, |Summed { report, reports: summed }| {
        if !(args.from..=args.to).contains(&report.time_unix_ms) {
            return Ok(ControlFlow::Continue(()));
        }
        reports += summed;
        let report = Arc::new(report);
        sinks.iter_mut().try_for_each(|sink| sink.report(&report))?;
        let Some(pace) = args.pace else {
            if let Some(bound) = &bound {
                let most = bound.load(report, summed);
                together.set(if sums_suffice { most } else { 1 });
            }
            return Ok(ControlFlow::Continue(()));
        };
        if let Some(dashboard) = &mut dashboard {
            dashboard.report(&report)?;
        }
        wait(&signals, Duration::from_nanos(report.period_ns).div_f64(pace))
    })?;
    sinks.iter_mut().try_for_each(|sink| sink.finish(None))?;
    let lost: u64 = losses.all().values().map(|loss| loss.reports).sum();
    anyhow::ensure!(lost == 0, "{lost} of {reports} reports are not in the log");
    anyhow::ensure!(reports > 0, "the log has no reports in this range of time");
    let dashboard = bound.map_or(Ok(dashboard), |bound| bound.run().map(Some))?;
    let Some(dashboard) = dashboard.filter(|_| all.is_continue()) else { return Ok(()) };
    match (dashboard.steps(), dashboard.forgotten()) {
        ((1, 1), 0) => {}
        // With --pace the dashboard keeps reports as in live use: it forgets the oldest instead of merging them.
        (_, forgotten @ 1..) => eprintln!(
            "millrace: the oldest {forgotten} of {reports} reports are not shown in full: raise --http-memory"
        ),
        ((point, range), 0) => eprintln!(
            "millrace: {reports} reports are shown: each point of the history is the mean of {point}, and time ranges have steps of \
             {range}; raise --http-memory for shorter steps, or show less time with --from and --to"
        ),
    }
    while !signals.wait(Duration::from_secs(3600))? {}
    Ok(())
}

/// Waits for `time`. A signal ends the wait, and the replay.
fn wait(signals: &CostSignals, time: Duration) -> anyhow::Result<ControlFlow<()>> {
    Ok(if signals.wait(time)? { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
}

/// Opens the logs, sorted by the time of their first report. Empty logs come first.
fn open(files: &[PathBuf]) -> anyhow::Result<Vec<ReplayLog>> {
    let mut logs = files.iter().map(|file| ReplayLog::open(file)).collect::<anyhow::Result<Vec<_>>>()?;
    logs.sort_by_key(|log| log.first.as_ref().map(|report| report.time_unix_ms));
    Ok(logs)
}

/// Calls `take` with all reports of the logs in order. Up to `together` consecutive reports are handed over as their
/// sum; `take` may change that number for the next ones.
fn each(
    logs: Vec<ReplayLog>,
    together: &Cell<usize>,
    mut take: impl FnMut(Summed) -> anyhow::Result<ControlFlow<()>>,
) -> anyhow::Result<ControlFlow<()>> {
    let mut before = 0;
    for mut log in logs {
        let first = log.first.take().map(|report| Ok(Summed { report, reports: 1 }));
        let mut ahead = log.reader.ahead(before + usize::from(first.is_some()));
        ahead.add_up(together.get());
        let mut first = first.into_iter();
        while let Some(summed) = first.next().or_else(|| ahead.next()) {
            let summed = summed?;
            before += summed.reports;
            if take(summed)?.is_break() {
                return Ok(ControlFlow::Break(()));
            }
            ahead.add_up(together.get());
        }
        if ahead.torn() {
            eprintln!(
                "millrace: {}: the log ends within a report, as after a kill; its last report may be missing",
                log.path.display()
            );
        }
    }
    Ok(ControlFlow::Continue(()))
}

/// An open log file.
struct ReplayLog {
    path: PathBuf,
    reader: ReportReader,
    /// The first report, read ahead because the logs are sorted by its time.
    first: Option<Report>,
}

impl ReplayLog {
    fn open(path: &Path) -> anyhow::Result<Self> {
        let mut reader = ReportReader::open(path)?;
        let first = reader.next().transpose()?;
        Ok(Self { path: path.to_owned(), reader, first })
    }
}

/// Adds up all reports, and prints the sum as text at the end.
#[derive(Default)]
struct ReplaySum(Merge);

impl ReportSink for ReplaySum {
    fn report(&mut self, report: &Arc<Report>) -> anyhow::Result<()> {
        self.0.add(report);
        Ok(())
    }

    fn finish(&mut self, _patience: Option<Duration>) -> anyhow::Result<()> {
        match std::mem::take(&mut self.0).finish() {
            Some(report) => TextOutput { one: true }.report(&Arc::new(report)),
            None => Ok(()),
        }
    }
}
