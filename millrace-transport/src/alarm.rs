//! When the driver of an endpoint wakes next.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, Instant},
};

use tokio::sync::Notify;

/// Granularity of deadlines, a millisecond: that of tokio's timers.
const TICK: Duration = Duration::from_millis(1);

/// Wakes the driver. Times are ticks since the alarm was made; `u64::MAX` is never.
#[derive(Debug)]
pub(crate) struct Alarm {
    base: Instant,
    /// When the driver wakes by itself.
    next: AtomicU64,
    notify: Notify,
}

impl Alarm {
    pub fn new() -> Self {
        Self::since(Instant::now())
    }

    fn since(base: Instant) -> Self {
        Self { base, next: AtomicU64::new(u64::MAX), notify: Notify::new() }
    }

    /// `at`, rounded up to the next tick: deadlines that are close together are one wake-up.
    pub fn time(&self, at: Instant) -> u64 {
        at.saturating_duration_since(self.base).as_nanos().div_ceil(TICK.as_nanos()) as u64
    }

    /// Makes sure that the driver wakes at `time` or before.
    pub fn at(&self, time: u64) {
        if time < self.next.load(Ordering::Relaxed) && time < self.next.fetch_min(time, Ordering::AcqRel) {
            self.notify.notify_one();
        }
    }

    /// Wakes the driver now.
    pub fn ring(&self) {
        self.notify.notify_one();
    }

    pub async fn wait(&self) {
        let next = self.next.load(Ordering::Acquire);
        if next == u64::MAX {
            return self.notify.notified().await;
        }
        let at = self.base + Duration::from_millis(next);
        tokio::select! {
            () = self.notify.notified() => {}
            () = tokio::time::sleep_until(at.into()) => {}
        }
    }

    /// The driver is awake: deadlines that are set from now on wake it again.
    pub fn reset(&self) {
        self.next.store(u64::MAX, Ordering::Release);
    }

    /// The driver is about to wait: it wakes at `time` or before.
    pub fn lower(&self, time: u64) {
        self.next.fetch_min(time, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An alarm made so long ago, and the time when it rings, in a moment.
    async fn rings(age: Duration) {
        let now = Instant::now();
        let alarm = Alarm::since(now.checked_sub(age).expect("times before the machine's start"));
        let at = now + Duration::from_millis(20);
        alarm.at(alarm.time(at));
        // What `at` has left behind.
        alarm.wait().await;
        alarm.wait().await;
        assert!(Instant::now() >= at, "too early, {age:?} after the start");
    }

    #[tokio::test]
    async fn deadlines_hold_however_long_the_endpoint_has_run() {
        for days in [0, 49, 50, 3650, 36_500] {
            rings(Duration::from_secs(days * 86_400)).await;
        }
    }
}
