//! Makes a report per period, and sends it to all sinks until a limit, a signal or a key ends the observation.

use std::sync::Arc;
use std::time::{Duration, Instant};

use millrace_cost::{Observer, POLL_INTERVAL};
use millrace_cost_daemon::live::{KeyAnswer, LiveTerminal};
use millrace_cost_daemon::signals::CostSignals;
use millrace_cost_daemon::sink::ReportSink;

/// The source of the key or signal that ends the observation: the live view's terminal, or signals alone.
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

/// Longest time to the first report on a terminal, because a user waits for it.
const FIRST: Duration = Duration::from_millis(500);

/// Sends a report per `period` to all sinks. Returns [`KeyAnswer::Continue`] after `reports` reports, and
/// [`KeyAnswer::Quit`] after a signal or the user's key.
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
        // The kernel's buffers are read several times per report, so that they do not overflow in long periods.
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
        // After the machine was suspended, one long period follows instead of many empty ones.
        due = (due + period).max(Instant::now());
    }
    Ok(KeyAnswer::Continue)
}

/// Time without progress after which outputs are given up, if a signal or the user's key has ended the observation.
const PATIENCE: Duration = Duration::from_secs(2);

/// Finishes all outputs. If the observation is `complete`, outputs wait for their readers without a limit, and signals
/// are unblocked, so that a signal ends the process.
pub fn finish(sinks: &mut [Box<dyn ReportSink>], complete: bool) -> anyhow::Result<()> {
    if complete {
        CostSignals::unblock()?;
    }
    let finished = sinks.iter_mut().map(|sink| sink.finish((!complete).then_some(PATIENCE)));
    finished.fold(Ok(()), Result::and)
}
