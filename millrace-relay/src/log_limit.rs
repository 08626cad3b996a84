//! A limit for log lines that peers cause.

use std::{
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    time::{Duration, Instant},
};

use parking_lot::Mutex;

/// Lines at once, and the time after which there may be one more.
const BURST: u32 = 100;
const PERIOD: Duration = Duration::from_millis(50);

/// Lets a burst of lines through and then some a second; the others are counted.
#[derive(Default)]
pub struct LogLimit {
    state: Mutex<State>,
    suppressed: AtomicU64,
}

#[derive(Default)]
struct State {
    /// Lines that may no longer be written at once, and since when that holds.
    used: u32,
    since: Option<Instant>,
    /// Since the last line.
    suppressed: u64,
}

/// A line may be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Line {
    /// Lines before it that were not; `None`: all were.
    pub suppressed: Option<u64>,
}

impl LogLimit {
    /// Asked before a line is written.
    pub fn line(&self, now: Instant) -> Option<Line> {
        let mut state = self.state.lock();
        let since = *state.since.get_or_insert(now);
        let periods = now.saturating_duration_since(since).as_nanos() / PERIOD.as_nanos();
        if periods > 0 {
            state.used = state.used.saturating_sub(u32::try_from(periods).unwrap_or(u32::MAX));
            state.since = Some(now);
        }
        if state.used == BURST {
            state.suppressed += 1;
            self.suppressed.fetch_add(1, Relaxed);
            return None;
        }
        state.used += 1;
        let suppressed = std::mem::take(&mut state.suppressed);
        Some(Line { suppressed: (suppressed > 0).then_some(suppressed) })
    }

    /// Lines that were not written, since start.
    pub fn suppressed(&self) -> u64 {
        self.suppressed.load(Relaxed)
    }
}

/// The front of what a peer says of itself, for the log.
pub fn short(text: &str) -> &str {
    const LEN: usize = 64;
    text.char_indices().nth(LEN).map_or(text, |(end, _)| &text[..end])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_passes_and_then_one_each_period() {
        let (limit, now) = (LogLimit::default(), Instant::now());
        let written = (0..1000).filter(|_| limit.line(now).is_some()).count();
        assert_eq!((written, limit.suppressed()), (BURST as usize, 1000 - u64::from(BURST)));
        let next = limit.line(now + PERIOD);
        assert_eq!(next, Some(Line { suppressed: Some(1000 - u64::from(BURST)) }));
        assert_eq!(limit.line(now + PERIOD), None);
        let later = now + PERIOD * 10 * BURST;
        let written = (0..1000).filter(|_| limit.line(later).is_some()).count();
        assert_eq!(written, BURST as usize);
    }
}
