//! A limit for lines: whatever a stranger does, no place in the code writes more than a burst of them and then some a second.

use std::{
    collections::HashMap,
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    time::Instant,
};

use millrace_relay::LogLimit;
use parking_lot::Mutex;
use tracing::{Event, Level, Subscriber, callsite::Identifier, warn};
use tracing_subscriber::{Layer, layer::Context};

/// The target of lines about lines that were left out. They have no limit of their own: there is at most one before a line that has.
const TARGET: &str = "millrace::log";

static SUPPRESSED: AtomicU64 = AtomicU64::new(0);

/// Returns how many lines were not written since start, in this process, since too many like them came at once.
pub fn suppressed() -> u64 {
    SUPPRESSED.load(Relaxed)
}

/// Lets through what each place in the code may write. `debug` and `trace` have no limit.
#[derive(Default)]
pub(super) struct Limit(Mutex<HashMap<Identifier, LogLimit>>);

impl<S: Subscriber> Layer<S> for Limit {
    fn event_enabled(&self, event: &Event<'_>, _: Context<'_, S>) -> bool {
        let metadata = event.metadata();
        if *metadata.level() > Level::INFO || metadata.target() == TARGET {
            return true;
        }
        let line = self.0.lock().entry(metadata.callsite()).or_default().line(Instant::now());
        let Some(line) = line else {
            SUPPRESSED.fetch_add(1, Relaxed);
            return false;
        };
        if let Some(lines) = line.suppressed {
            let (of, at) = (metadata.target(), metadata.line());
            warn!(target: TARGET, lines, of, at, "lines like the next one were left out: there were too many at once");
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use std::{fmt::Debug, sync::Arc};

    use millrace_testkit::wait_for;
    use tracing::field::Field;
    use tracing_subscriber::layer::SubscriberExt;

    use super::*;

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
        let lines = Lines::default();
        let subscriber = tracing_subscriber::registry().with(lines.clone()).with(Limit::default());
        let before = suppressed();
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
        // Other tests of this process may have lost some, too.
        assert!(suppressed() - before >= 100_000 - most);
    }

    /// Finds the number in what is said about lines that were left out.
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

    /// What is said while an event is looked at goes to the process's subscriber only.
    #[test]
    fn the_next_line_says_how_many_were_left_out() {
        let left_out = LeftOut::default();
        let subscriber = tracing_subscriber::registry().with(left_out.clone()).with(Limit::default());
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
