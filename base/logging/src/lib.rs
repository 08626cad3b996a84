//! Limits the rate of log lines. However many events a peer causes, each `tracing` call site writes at most a burst of
//! lines, and then some lines per second.
#![deny(missing_docs)]

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

/// Number of lines that one `tracing` call site may write at once, and the time after which it may write one more.
const BURST: u32 = 100;
const PERIOD: Duration = Duration::from_millis(50);

/// Target of the lines that report how many log lines were suppressed. These reports are exempt from the rate limit,
/// because each accompanies a line that the limit allowed.
const TARGET: &str = "millrace::log";

/// A `tracing` layer that limits each call site to a burst of 100 lines and then 20 lines per second. The next line
/// that the call site writes reports how many were suppressed. Levels `debug` and `trace` have no limit.
///
/// A relay logs every action of its peers. An application that embeds a relay adds this layer to its subscriber:
///
/// ```
/// use tracing_subscriber::layer::SubscriberExt;
///
/// let limit = millrace_logging::LogLimit::default();
/// let subscriber = tracing_subscriber::fmt().finish().with(limit.clone());
/// tracing::subscriber::set_global_default(subscriber)?;
/// tracing::info!(left_out = limit.suppressed(), "log lines that the limit has left out so far");
/// # Ok::<(), tracing::subscriber::SetGlobalDefaultError>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct LogLimit(Arc<LogLimiter>);

#[derive(Debug, Default)]
struct LogLimiter {
    by_place: Mutex<HashMap<Identifier, PlaceBucket>>,
    suppressed: AtomicU64,
}

/// The token bucket of one `tracing` call site.
#[derive(Debug, Default)]
struct PlaceBucket {
    /// Number of lines of the burst that are used up, as of the time `since`.
    used: u32,
    since: Option<Instant>,
    /// Number of lines that this call site did not write since the last line that it wrote.
    suppressed: u64,
}

impl LogLimit {
    /// Returns how many lines were suppressed in total because their call site exceeded its limit.
    pub fn suppressed(&self) -> u64 {
        self.0.suppressed.load(Relaxed)
    }
}

impl<S: Subscriber> Layer<S> for LogLimit {
    fn event_enabled(&self, event: &Event<'_>, _: Context<'_, S>) -> bool {
        let metadata = event.metadata();
        // More detailed levels compare as greater, so this exempts `debug` and `trace` from the limit.
        if *metadata.level() > Level::INFO || metadata.target() == TARGET {
            return true;
        }
        let line = self.0.by_place.lock().entry(metadata.callsite()).or_default().line(Instant::now());
        let Some(lines) = line else {
            self.0.suppressed.fetch_add(1, Relaxed);
            return false;
        };
        if lines > 0 {
            // This `warn!` calls `event_enabled` again, so this call must not hold the lock of the token buckets here.
            // The second call returns early: events with the target `TARGET` are exempt from the limit.
            warn!(target: TARGET, lines, of = metadata.target(), at = metadata.line(), "log lines like the next one came too fast and were left out");
        }
        true
    }
}

impl PlaceBucket {
    /// Decides whether a log line may be written now. Returns `None` if the line exceeds the limit, or else how many
    /// lines of this call site were suppressed before it.
    fn line(&mut self, now: Instant) -> Option<u64> {
        let since = *self.since.get_or_insert(now);
        let periods = now.saturating_duration_since(since).as_nanos() / PERIOD.as_nanos();
        if periods > 0 {
            self.used = self.used.saturating_sub(u32::try_from(periods).unwrap_or(u32::MAX));
            // Each full [`PERIOD`] since the last refill allows one more line. The rest of the elapsed time, less than
            // a period, is not credited, so the rate never exceeds one line per period.
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

/// Returns at most 64 characters of a text that a peer sent, for a log line.
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
    fn call_site_logs_a_burst_and_then_one_line_per_period() {
        let mut bucket = PlaceBucket::default();
        let now = Instant::now();
        let written = (0..1000).filter(|_| bucket.line(now).is_some()).count();
        assert_eq!(written, BURST as usize);
        assert_eq!(bucket.line(now + PERIOD), Some(1000 - u64::from(BURST)));
        assert_eq!(bucket.line(now + PERIOD), None);
        let later = now + PERIOD * 10 * BURST;
        let written = (0..1000).filter(|_| bucket.line(later).is_some()).count();
        assert_eq!(written, BURST as usize);
    }

    /// A `tracing` layer that counts the log lines that pass the rate limit, by level.
    #[derive(Clone, Default)]
    struct LineCounter(Arc<Mutex<HashMap<Level, u64>>>);

    impl<S: Subscriber> Layer<S> for LineCounter {
        fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
            *self.0.lock().entry(*event.metadata().level()).or_default() += 1;
        }
    }

    #[test]
    fn each_call_site_has_its_own_log_limit() {
        let lines = LineCounter::default();
        let limit = LogLimit::default();
        let subscriber = tracing_subscriber::registry().with(lines.clone()).with(limit.clone());
        let begun = Instant::now();
        tracing::subscriber::with_default(subscriber, || {
            for number in 0..100_000 {
                tracing::error!(number, "a rate-limited line of the test");
            }
            tracing::info!("a line of another call site");
            for number in 0..1000 {
                tracing::debug!(number, "a debug line, which has no rate limit");
            }
        });
        let most = 101 + begun.elapsed().as_millis() as u64 / 50;
        let lines = lines.0.lock();
        assert!((100..=most).contains(&lines[&Level::ERROR]), "{lines:?}");
        assert_eq!((lines[&Level::INFO], lines[&Level::DEBUG]), (1, 1000));
        assert_eq!(limit.suppressed(), 100_000 - lines[&Level::ERROR]);
    }

    /// A `tracing` layer that records the count in the latest report of suppressed log lines.
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

    /// The test needs a global subscriber. While a layer handles one event, an event that it emits itself reaches only
    /// the global subscriber.
    #[test]
    fn next_log_line_reports_how_many_lines_were_suppressed() {
        let left_out = LeftOut::default();
        let subscriber = tracing_subscriber::registry().with(left_out.clone()).with(LogLimit::default());
        tracing::subscriber::set_global_default(subscriber).expect("no other test of this process sets it");
        let mut said = 0;
        let lines = wait_for("the line after", || {
            for _ in 0..200 {
                tracing::info!("a rate-limited line of the test");
            }
            said += 200;
            left_out.0.lock().take()
        });
        assert!((1..said).contains(&lines), "{lines} of {said}");
    }
}
