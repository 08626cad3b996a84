//! Sends reports, one after the other, to all sinks.

use std::sync::Arc;
use std::time::{Duration, Instant};

use millrace_cost::{Observer, POLL_INTERVAL};
use millrace_cost_daemon::live::{KeyAnswer, LiveTerminal};
use millrace_cost_daemon::signals::CostSignals;
use millrace_cost_daemon::sink::ReportSink;

/// The source of keys or signals that end the observer between reports.
pub enum Screen {
    Terminal(LiveTerminal),
    None(CostSignals),
}

impl Screen {
    fn wait(&mut self, time: Duration) -> anyhow::Result<KeyAnswer> {
        match self {
            Self::Terminal(terminal) => terminal.wait(time),
            Self::None(signals) => {
                Ok(if signals.wait(time)? { KeyAnswer::Quit } else { KeyAnswer::Continue })
            }
        }
    }
}

/// The first report on a terminal comes sooner, because a user waits for it.
const FIRST: Duration = Duration::from_millis(500);

/// Sends reports to all sinks. Returns [`KeyAnswer::Continue`] after `reports` reports, and [`KeyAnswer::Quit`] after a signal or the user's key.
pub fn observe(
    observer: &mut Observer,
    period: Duration,
    reports: Option<u64>,
    screen: &mut Screen,
    sinks: &mut [Box<dyn ReportSink>],
) -> anyhow::Result<KeyAnswer> {
    let mut made = 0;
    let first = if matches!(screen, Screen::Terminal(_)) { period.min(FIRST) } else { period };
    let mut due = Instant::now() + first;
    while reports.is_none_or(|reports| made < reports) {
        let wait = due.saturating_duration_since(Instant::now()).min(POLL_INTERVAL);
        if screen.wait(wait)? == KeyAnswer::Quit {
            return Ok(KeyAnswer::Quit);
        }
        observer.poll();
        if Instant::now() < due {
            continue;
        }
        let report = Arc::new(observer.report()?);
        if let Screen::Terminal(terminal) = screen {
            terminal.report(&report)?;
        }
        for sink in &mut *sinks {
            sink.report(&report)?;
        }
        made += 1;
        // After a pause of the machine there is one long period, not many empty ones.
        due = (due + period).max(Instant::now());
    }
    Ok(KeyAnswer::Continue)
}

/// Time for outputs at the end, if a signal or the user has ended it.
const PATIENCE: Duration = Duration::from_secs(2);

/// Finishes all outputs, however the observation ended. If all reports were made, outputs get as long as their readers need; a signal ends
/// that, too.
pub fn finish(sinks: &mut [Box<dyn ReportSink>], complete: bool) -> anyhow::Result<()> {
    let deadline = if complete { None } else { Some(Instant::now() + PATIENCE) };
    if complete {
        CostSignals::unblock()?;
    }
    let finished: Vec<anyhow::Result<()>> = sinks.iter_mut().map(|sink| sink.finish(deadline)).collect();
    finished.into_iter().collect()
}
