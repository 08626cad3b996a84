//! When the driver of an endpoint wakes next.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, Instant},
};

use tokio::sync::Notify;

/// Granularity of deadlines: that of tokio's timers.
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
        Self { base: Instant::now(), next: AtomicU64::new(u64::MAX), notify: Notify::new() }
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
        let at = self.base + TICK * u32::try_from(next).unwrap_or(u32::MAX);
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
