//! A limit for log lines: whatever a stranger does, no place in the code writes more than a burst of them and then some a second.

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use tracing::{Event, Level, Subscriber, callsite::Identifier, warn};
use tracing_subscriber::{Layer, layer::Context};

/// Lines of one place at once, and the time after which there may be one more.
const BURST: u32 = 100;
const PERIOD: Duration = Duration::from_millis(50);

/// The target of lines about lines that were left out. They have no limit of their own: there is at most one before a line that has.
const TARGET: &str = "millrace::log";

/// Lets through what each place in the code may write: 100 lines at once and 20 a second. The next line of the place says how many were
/// left out. `debug` and `trace` have no limit.
///
/// A relay logs what its peers do, by `tracing`, as often as they do it. Whoever embeds one puts this layer on top of its subscriber:
///
/// ```
/// use tracing_subscriber::layer::SubscriberExt;
///
/// let limit = millrace_logging::LogLimit::default();
/// let subscriber = tracing_subscriber::fmt().finish().with(limit.clone());
/// tracing::subscriber::set_global_default(subscriber)?;
/// tracing::info!(left_out = limit.suppressed(), "logging");
/// # Ok::<(), tracing::subscriber::SetGlobalDefaultError>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct LogLimit(Arc<Places>);

#[derive(Debug, Default)]
struct Places {
    by_place: Mutex<HashMap<Identifier, Bucket>>,
    suppressed: AtomicU64,
}

/// The lines of one place.
#[derive(Debug, Default)]
struct Bucket {
    /// Lines that may no longer be written at once, and since when that holds.
    used: u32,
    since: Option<Instant>,
    /// Since the last line.
    suppressed: u64,
}

impl LogLimit {
    /// Returns how many lines were not written, since too many like them came at once.
    pub fn suppressed(&self) -> u64 {
        self.0.suppressed.load(Relaxed)
    }
}

impl<S: Subscriber> Layer<S> for LogLimit {
    fn event_enabled(&self, event: &Event<'_>, _: Context<'_, S>) -> bool {
        let metadata = event.metadata();
        if *metadata.level() > Level::INFO || metadata.target() == TARGET {
            return true;
        }
        let line = self.0.by_place.lock().entry(metadata.callsite()).or_default().line(Instant::now());
        let Some(lines) = line else {
            self.0.suppressed.fetch_add(1, Relaxed);
            return false;
        };
        if lines > 0 {
            let (of, at) = (metadata.target(), metadata.line());
            warn!(target: TARGET, lines, of, at, "lines like the next one were left out: there were too many at once");
        }
        true
    }
}

impl Bucket {
    /// Returns how many lines before it were left out, if a line may be written now.
    fn line(&mut self, now: Instant) -> Option<u64> {
        let since = *self.since.get_or_insert(now);
        let periods = now.saturating_duration_since(since).as_nanos() / PERIOD.as_nanos();
        if periods > 0 {
            self.used = self.used.saturating_sub(u32::try_from(periods).unwrap_or(u32::MAX));
            self.since = Some(now);
        }
        if self.used == BURST {
            self.suppressed += 1;
            return None;
        }
        self.used += 1;
        Some(std::mem::take(&mut self.suppressed))
    }
}

/// The front of what a peer says of itself, for the log.
pub fn short(text: &str) -> &str {
    const LEN: usize = 64;
    text.char_indices().nth(LEN).map_or(text, |(end, _)| &text[..end])
}

#[cfg(test)]
mod tests {
    use std::fmt::Debug;

    use millrace_testkit::wait_for;
    use tracing::field::Field;
    use tracing_subscriber::layer::SubscriberExt;

    use super::*;

    #[test]
    fn a_burst_passes_and_then_one_each_period() {
        let (mut bucket, now) = (Bucket::default(), Instant::now());
        let written = (0..1000).filter(|_| bucket.line(now).is_some()).count();
        assert_eq!(written, BURST as usize);
        assert_eq!(bucket.line(now + PERIOD), Some(1000 - u64::from(BURST)));
        assert_eq!(bucket.line(now + PERIOD), None);
        let later = now + PERIOD * 10 * BURST;
        let written = (0..1000).filter(|_| bucket.line(later).is_some()).count();
        assert_eq!(written, BURST as usize);
    }

    /// Counts the lines that come to it, by their level.
    #[derive(Clone, Default)]
    struct Lines(Arc<Mutex<HashMap<Level, u64>>>);

    impl<S: Subscriber> Layer<S> for Lines {
        fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
            *self.0.lock().entry(*event.metadata().level()).or_default() += 1;
        }
    }

    #[test]
    fn each_place_has_a_limit_of_its_own() {
        let (lines, limit) = (Lines::default(), LogLimit::default());
        let subscriber = tracing_subscriber::registry().with(lines.clone()).with(limit.clone());
        let begun = Instant::now();
        tracing::subscriber::with_default(subscriber, || {
            for number in 0..100_000 {
                tracing::error!(number, "one place");
            }
            tracing::info!("another place");
            for number in 0..1000 {
                tracing::debug!(number, "what was asked for");
            }
        });
        let most = 101 + begun.elapsed().as_millis() as u64 / 50;
        let lines = lines.0.lock();
        assert!((100..=most).contains(&lines[&Level::ERROR]), "{lines:?}");
        assert_eq!((lines[&Level::INFO], lines[&Level::DEBUG]), (1, 1000));
        assert_eq!(limit.suppressed(), 100_000 - lines[&Level::ERROR]);
    }

    /// Finds the number of lines that were left out.
    #[derive(Clone, Default)]
    struct LeftOut(Arc<Mutex<Option<u64>>>);

    impl<S: Subscriber> Layer<S> for LeftOut {
        fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
            if event.metadata().target() == TARGET {
                event.record(&mut |field: &Field, value: &dyn Debug| {
                    if field.name() == "lines" {
                        *self.0.lock() = format!("{value:?}").parse().ok();
                    }
                });
            }
        }
    }

    /// An event within another one goes to the process's subscriber only.
    #[test]
    fn the_next_line_says_how_many_were_left_out() {
        let left_out = LeftOut::default();
        let subscriber = tracing_subscriber::registry().with(left_out.clone()).with(LogLimit::default());
        tracing::subscriber::set_global_default(subscriber).expect("no other test of this process sets it");
        let mut said = 0;
        let lines = wait_for("the line after", || {
            for _ in 0..200 {
                tracing::info!("one place");
            }
            said += 200;
            left_out.0.lock().take()
        });
        assert!((1..said).contains(&lines), "{lines} of {said}");
    }
}
