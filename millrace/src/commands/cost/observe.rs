//! Reports, one after the other, to whoever wants them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use millrace_cost::{Observer, POLL_INTERVAL};
use millrace_cost_daemon::live::{Answer, Terminal};
use millrace_cost_daemon::signals::Signals;
use millrace_cost_daemon::sink::Sink;

/// Who may end it, between reports.
pub enum Screen {
    Terminal(Terminal),
    None(Signals),
}

impl Screen {
    fn wait(&mut self, time: Duration) -> anyhow::Result<Answer> {
        match self {
            Self::Terminal(terminal) => terminal.wait(time),
            Self::None(signals) => Ok(if signals.wait(time)? { Answer::Quit } else { Answer::Continue }),
        }
    }
}

/// The first report on a terminal comes sooner: somebody waits for it.
const FIRST: Duration = Duration::from_millis(500);

/// Reports to everyone, until there were enough reports, a signal came, or somebody at the terminal has seen enough: these
/// are [`Answer::Quit`].
pub fn observe(
    observer: &mut Observer,
    period: Duration,
    reports: Option<u64>,
    screen: &mut Screen,
    sinks: &mut [Box<dyn Sink>],
) -> anyhow::Result<Answer> {
    let mut made = 0;
    let first = if matches!(screen, Screen::Terminal(_)) { period.min(FIRST) } else { period };
    let mut due = Instant::now() + first;
    while reports.is_none_or(|reports| made < reports) {
        let wait = due.saturating_duration_since(Instant::now()).min(POLL_INTERVAL);
        if screen.wait(wait)? == Answer::Quit {
            return Ok(Answer::Quit);
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
    Ok(Answer::Continue)
}

/// How long outputs may take at the end if somebody wants it to end.
const PATIENCE: Duration = Duration::from_secs(2);

/// Whatever has ended it, what was seen until then is written: in all its length if all reports were made, for who reads
/// them may take his time. Signals end that too.
pub fn finish(sinks: &mut [Box<dyn Sink>], complete: bool) -> anyhow::Result<()> {
    let deadline = if complete { None } else { Some(Instant::now() + PATIENCE) };
    if complete {
        Signals::unblock()?;
    }
    let finished: Vec<anyhow::Result<()>> = sinks.iter_mut().map(|sink| sink.finish(deadline)).collect();
    finished.into_iter().collect()
}
