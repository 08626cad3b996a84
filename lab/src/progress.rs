//! Reports the progress of a benchmark and its remaining time on standard error. A terminal gets one line that is
//! updated while a step runs. Anything else gets a line from time to time.

use std::io::{self, IsTerminal as _, Write as _};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

/// Interval of updates on a terminal.
const TERMINAL: Duration = Duration::from_secs(1);
/// Interval of reports on a long step, if standard error is not a terminal.
const NO_TERMINAL: Duration = Duration::from_secs(30);
/// Longest line, characters. A terminal would wrap a longer one, and only clear its last part.
const COLUMNS: usize = 79;
/// Escape sequence that moves to the start of the line and clears it.
const CLEAR: &str = "\r\x1b[K";

/// Progress of a benchmark with a known number of steps (measurements). Dropping it stops the reports.
pub struct BenchProgress {
    shared: Arc<ProgressShared>,
    painter: Option<JoinHandle<()>>,
}

struct ProgressShared {
    steps: Mutex<ProgressSteps>,
    ended: Condvar,
    is_terminal: bool,
}

struct ProgressSteps {
    pace: ProgressPace,
    /// Name and start time of the benchmark step that runs now.
    now: Option<(String, Instant)>,
    is_over: bool,
}

impl BenchProgress {
    pub fn with_steps(steps: usize) -> Self {
        Self::with_lanes(steps, 1)
    }

    /// Creates the progress of a benchmark that runs `lanes` steps at the same time.
    pub fn with_lanes(steps: usize, lanes: usize) -> Self {
        let pace = ProgressPace { steps, lanes, done: 0, spent: Duration::ZERO };
        let shared = Arc::new(ProgressShared {
            steps: Mutex::new(ProgressSteps { pace, now: None, is_over: false }),
            ended: Condvar::new(),
            is_terminal: io::stderr().is_terminal(),
        });
        let painting = Arc::clone(&shared);
        let painter = std::thread::spawn(move || painting.paint());
        Self { shared, painter: Some(painter) }
    }

    /// Begins the next step of the benchmark, which measures `what`.
    pub fn begin(&self, what: impl Into<String>) {
        let mut steps = self.shared.steps.lock();
        steps.now = Some((what.into(), Instant::now()));
        if self.shared.is_terminal {
            self.shared.draw(&steps);
        }
    }

    /// Prints a line to standard error, above the line that shows the progress.
    ///
    /// # Errors
    ///
    /// Fails if standard error is closed. The caller should then end the benchmark.
    pub fn note(&self, line: &str) -> io::Result<()> {
        let steps = self.shared.steps.lock();
        let clear = if self.shared.is_terminal { CLEAR } else { "" };
        writeln!(io::stderr(), "{clear}{line}")?;
        if self.shared.is_terminal {
            self.shared.draw(&steps);
        }
        Ok(())
    }

    /// Ends the running benchmark step without a result, and begins the next step.
    pub fn next(&self, what: impl Into<String>) {
        let mut steps = self.shared.steps.lock();
        let ProgressSteps { pace, now: Some((before, since)), .. } = &mut *steps else { return };
        pace.done += 1;
        pace.spent += since.elapsed();
        (*before, *since) = (what.into(), Instant::now());
    }

    /// Ends the running step, and reports its result, the text `came`.
    ///
    /// # Errors
    ///
    /// Fails if standard error is closed. The caller should then end the benchmark.
    pub fn end(&self, came: &str) -> io::Result<()> {
        let Some((what, since)) = self.shared.steps.lock().now.take() else { return Ok(()) };
        self.over(&what, since, came)
    }

    /// Runs one of several steps that run at the same time, and reports its result.
    ///
    /// # Errors
    ///
    /// Fails if standard error is closed. The caller should then end the benchmark.
    pub fn step<T>(
        &self,
        what: &str,
        work: impl FnOnce() -> T,
        told: impl FnOnce(&T) -> String,
    ) -> io::Result<T> {
        self.begin(what);
        let since = Instant::now();
        let came = work();
        self.over(what, since, &told(&came))?;
        Ok(came)
    }

    fn over(&self, what: &str, since: Instant, came: &str) -> io::Result<()> {
        let mut steps = self.shared.steps.lock();
        steps.now.take_if(|(now, _)| now == what);
        steps.pace.done += 1;
        steps.pace.spent += since.elapsed();
        let pace = if self.shared.is_terminal {
            String::new()
        } else {
            format!(" ({})", steps.pace.told(Duration::ZERO))
        };
        drop(steps);
        self.note(&format!("{what}: {came}{pace}"))
    }
}

impl Drop for BenchProgress {
    fn drop(&mut self) {
        self.shared.steps.lock().is_over = true;
        self.shared.ended.notify_all();
        if let Some(painter) = self.painter.take() {
            let _ = painter.join();
        }
        if self.shared.is_terminal {
            let _ = write!(io::stderr(), "{CLEAR}");
        }
    }
}

impl ProgressShared {
    fn paint(&self) {
        let pause = if self.is_terminal { TERMINAL } else { NO_TERMINAL };
        let mut steps = self.steps.lock();
        while !steps.is_over {
            if self.ended.wait_for(&mut steps, pause).timed_out() {
                let is_long = steps.now.as_ref().is_some_and(|(_, since)| since.elapsed() >= pause);
                if self.is_terminal || is_long {
                    self.draw(&steps);
                }
            }
        }
    }

    /// Draws the line of the running step. A write error is ignored here, since the end of the next step reports it.
    fn draw(&self, steps: &ProgressSteps) {
        let Some((what, since)) = &steps.now else { return };
        let line = steps.pace.line(what, since.elapsed());
        let _ = match self.is_terminal {
            true => write!(io::stderr(), "{CLEAR}{}", line.chars().take(COLUMNS).collect::<String>()),
            false => writeln!(io::stderr(), "{line}"),
        };
    }
}

/// Number and duration of the finished benchmark steps, from which the remaining time is estimated.
struct ProgressPace {
    steps: usize,
    lanes: usize,
    done: usize,
    /// Total duration of the finished steps.
    spent: Duration,
}

impl ProgressPace {
    fn line(&self, what: &str, running: Duration) -> String {
        let since = match running.as_secs() {
            0 => String::new(),
            _ => format!(" for {}", span(running)),
        };
        format!("{}; {what}{since}", self.told(running))
    }

    fn told(&self, running: Duration) -> String {
        let left = self.left(running).map(|left| format!(", some {} left", span(left)));
        format!("{} of {} done{}", self.done, self.steps, left.unwrap_or_default())
    }

    /// Returns the estimated remaining time, provided that other steps take as long as the finished ones. Returns
    /// `None` before the first step has finished, and after the last one.
    fn left(&self, running: Duration) -> Option<Duration> {
        let done = u32::try_from(self.done).ok().filter(|done| *done > 0)?;
        let to_do = u32::try_from(self.steps.saturating_sub(self.done)).ok().filter(|to_do| *to_do > 0)?;
        let lanes = u32::try_from(self.lanes).unwrap_or(u32::MAX).max(1);
        let mean = self.spent / done / lanes;
        // A benchmark step that runs longer than average does not shorten the estimated time of the remaining steps.
        Some((mean * to_do).saturating_sub(running.min(mean)))
    }
}

/// Formats a duration in seconds, minutes or hours, whichever is easiest to read.
fn span(time: Duration) -> String {
    match time.as_secs() {
        seconds @ 0..120 => format!("{seconds} s"),
        seconds @ 120..7200 => format!("{} min", seconds / 60),
        seconds => format!("{:.1} h", seconds as f64 / 3600.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn remaining_benchmark_time_is_estimated_from_finished_steps() {
        let seconds = Duration::from_secs;
        let mut pace = ProgressPace { steps: 10, lanes: 1, done: 0, spent: Duration::ZERO };
        assert_eq!(pace.line("user x 1", seconds(7)), "0 of 10 done; user x 1 for 7 s");
        (pace.done, pace.spent) = (4, seconds(240));
        assert_eq!(pace.line("user x 1", seconds(30)), "4 of 10 done, some 5 min left; user x 1 for 30 s");
        assert_eq!(pace.left(seconds(600)), Some(seconds(300)), "the five others");
        pace.lanes = 3;
        assert_eq!(pace.left(seconds(0)), Some(seconds(120)), "three at a time");
        pace.lanes = 1;
        (pace.done, pace.steps) = (4, 2000);
        assert_eq!(pace.told(Duration::ZERO), "4 of 2000 done, some 33.3 h left");
        (pace.done, pace.steps) = (2, 2);
        assert_eq!(pace.told(Duration::ZERO), "2 of 2 done");
        (pace.done, pace.steps) = (3, 2);
        assert_eq!(pace.left(Duration::ZERO), None, "more than was thought");
    }
}
