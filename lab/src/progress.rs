//! How far a benchmark is, and how long it will take. On standard error: a line that is written anew while a step runs if that
//! is a terminal, else a line now and then.

use std::io::{self, IsTerminal as _, Write as _};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

/// Between two looks at the clock.
const TERMINAL: Duration = Duration::from_secs(1);
/// A step that takes longer is spoken of again and again.
const NO_TERMINAL: Duration = Duration::from_secs(30);
/// What is longer would be broken in two, and the second half stay.
const COLUMNS: usize = 79;
/// Back to the beginning of the line, which is emptied.
const CLEAR: &str = "\r\x1b[K";

/// Of a benchmark whose number of steps is known. Says nothing any more once it is dropped.
pub struct Progress {
    shared: Arc<Shared>,
    painter: Option<JoinHandle<()>>,
}

struct Shared {
    steps: Mutex<Steps>,
    ended: Condvar,
    is_terminal: bool,
}

struct Steps {
    pace: Pace,
    /// What runs, and since when.
    now: Option<(String, Instant)>,
    is_over: bool,
}

impl Progress {
    pub fn of(steps: usize) -> Self {
        Self::of_lanes(steps, 1)
    }

    /// Of steps of which so many run at the same time.
    pub fn of_lanes(steps: usize, lanes: usize) -> Self {
        let pace = Pace { steps, lanes, done: 0, spent: Duration::ZERO };
        let shared = Arc::new(Shared {
            steps: Mutex::new(Steps { pace, now: None, is_over: false }),
            ended: Condvar::new(),
            is_terminal: io::stderr().is_terminal(),
        });
        let painting = Arc::clone(&shared);
        let painter = std::thread::spawn(move || painting.paint());
        Self { shared, painter: Some(painter) }
    }

    /// The next step: `what` is measured.
    pub fn begin(&self, what: impl Into<String>) {
        let mut steps = self.shared.steps.lock();
        steps.now = Some((what.into(), Instant::now()));
        if self.shared.is_terminal {
            self.shared.draw(&steps);
        }
    }

    /// A line between the others.
    ///
    /// # Errors
    /// Nobody reads it: there is no use in going on.
    pub fn note(&self, line: &str) -> io::Result<()> {
        let steps = self.shared.steps.lock();
        let clear = if self.shared.is_terminal { CLEAR } else { "" };
        writeln!(io::stderr(), "{clear}{line}")?;
        if self.shared.is_terminal {
            self.shared.draw(&steps);
        }
        Ok(())
    }

    /// A step is over of which there is nothing to say; the next one begins.
    pub fn next(&self, what: impl Into<String>) {
        let mut steps = self.shared.steps.lock();
        let Steps { pace, now: Some((before, since)), .. } = &mut *steps else { return };
        pace.done += 1;
        pace.spent += since.elapsed();
        (*before, *since) = (what.into(), Instant::now());
    }

    /// The step that was begun is over, and has `came` to this.
    ///
    /// # Errors
    /// As [`Progress::note`].
    pub fn end(&self, came: &str) -> io::Result<()> {
        let Some((what, since)) = self.shared.steps.lock().now.take() else { return Ok(()) };
        self.over(&what, since, came)
    }

    /// One of several steps that run at the same time.
    ///
    /// # Errors
    /// As [`Progress::note`].
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

impl Drop for Progress {
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

impl Shared {
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

    /// What runs now. Nobody may be there to see it, which the next step's end notices.
    fn draw(&self, steps: &Steps) {
        let Some((what, since)) = &steps.now else { return };
        let line = steps.pace.line(what, since.elapsed());
        let _ = match self.is_terminal {
            true => write!(io::stderr(), "{CLEAR}{}", line.chars().take(COLUMNS).collect::<String>()),
            false => writeln!(io::stderr(), "{line}"),
        };
    }
}

/// How fast it goes.
struct Pace {
    steps: usize,
    lanes: usize,
    done: usize,
    /// By those that are done.
    spent: Duration,
}

impl Pace {
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

    /// If the others take as long as those that are done; unknown before one is, nothing when all are.
    fn left(&self, running: Duration) -> Option<Duration> {
        let done = u32::try_from(self.done).ok().filter(|done| *done > 0)?;
        let to_do = u32::try_from(self.steps.saturating_sub(self.done)).ok().filter(|to_do| *to_do > 0)?;
        let lanes = u32::try_from(self.lanes).unwrap_or(u32::MAX).max(1);
        let mean = self.spent / done / lanes;
        // A step that takes longer than others does not take from them.
        Some((mean * to_do).saturating_sub(running.min(mean)))
    }
}

/// In the unit that is read at a glance.
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
    fn what_is_left_follows_from_what_is_done() {
        let seconds = Duration::from_secs;
        let mut pace = Pace { steps: 10, lanes: 1, done: 0, spent: Duration::ZERO };
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
