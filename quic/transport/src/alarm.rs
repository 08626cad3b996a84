//! The alarm that wakes an endpoint's driver, and the connections that the driver then looks at.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use tokio::sync::Notify;

/// Granularity of deadlines, a millisecond: that of tokio's timers.
const TICK: Duration = Duration::from_millis(1);

/// Wakes the driver. Times are ticks since the alarm was made; `u64::MAX` is never.
///
/// The driver alone calls [`Self::wait`], [`Self::reset`], [`Self::take_asked`] and [`Self::lower`], in this order in each turn. Anybody may ask
/// for a time in between ([`AlarmTurn::wake_by`]). A request before `take_asked` is in what that returns. A request behind it comes behind `reset`, too, so
/// it lowers `next` and notifies. No deadline is therefore lost, and the worst race is a wake-up without work.
#[derive(Debug)]
pub(crate) struct Alarm {
    base: Instant,
    /// The time when the driver wakes by itself.
    next: AtomicU64,
    notify: Notify,
    /// Numbers of connections, and when they want to be looked at.
    asked: Mutex<Vec<(u64, u64)>>,
    /// The number of the next connection.
    number: AtomicU64,
}

/// The time when the driver looks at one connection next.
#[derive(Debug)]
pub(crate) struct AlarmTurn {
    alarm: Arc<Alarm>,
    number: u64,
    /// Time of the next turn; `u64::MAX` if none is set.
    at: AtomicU64,
}

impl AlarmTurn {
    pub fn new(alarm: Arc<Alarm>) -> Self {
        let number = alarm.number.fetch_add(1, Ordering::Relaxed);
        Self { alarm, number, at: AtomicU64::new(u64::MAX) }
    }

    /// Tells the connection from the others of the endpoint.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// Makes the driver look at the connection at `time` or before. Whatever the driver is to find there has to be stored before this call. Most deadlines are
    /// later than the one before: they cost a load.
    pub fn wake_by(&self, time: u64) {
        if self.put(time) {
            self.alarm.asked.lock().push((self.number, time));
            self.alarm.at(time);
        }
    }

    /// Does the same as [`Self::wake_by`] for the driver itself, which notes the time if this returns true.
    pub fn put(&self, time: u64) -> bool {
        time < self.at.load(Ordering::SeqCst) && time < self.at.fetch_min(time, Ordering::SeqCst)
    }

    /// Forgets the time, as the driver is about to look: later wishes have to be asked for again.
    pub fn begin(&self) {
        self.at.store(u64::MAX, Ordering::SeqCst);
    }
}

impl Alarm {
    pub fn new() -> Self {
        Self::since(Instant::now())
    }

    fn since(base: Instant) -> Self {
        Self {
            base,
            next: AtomicU64::new(u64::MAX),
            notify: Notify::new(),
            asked: Mutex::default(),
            number: AtomicU64::new(0),
        }
    }

    /// `at`, rounded up to the next tick: deadlines that are close together are one wake-up.
    pub fn time(&self, at: Instant) -> u64 {
        at.saturating_duration_since(self.base).as_nanos().div_ceil(TICK.as_nanos()) as u64
    }

    /// Makes sure that the driver wakes at `time` or before.
    fn at(&self, time: u64) {
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

    /// Returns the numbers of connections that have asked since the last call, and for which time.
    pub fn take_asked(&self) -> Vec<(u64, u64)> {
        std::mem::take(&mut *self.asked.lock())
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
        // The first wait returns at once, because `at` woke the driver.
        alarm.wait().await;
        alarm.wait().await;
        assert!(Instant::now() >= at, "too early, {age:?} after the start");
    }

    #[test]
    fn connection_asks_for_attention_once_until_it_is_served() {
        let alarm = Arc::new(Alarm::new());
        let turns = [(); 2].map(|()| AlarmTurn::new(Arc::clone(&alarm)));
        for time in [50, 70, 60, 50] {
            turns[1].wake_by(time);
        }
        assert_eq!(alarm.take_asked(), [(1, 50)]);
        turns[1].wake_by(40);
        turns[0].wake_by(0);
        assert_eq!(alarm.take_asked(), [(1, 40), (0, 0)]);
        turns[1].begin();
        turns[1].wake_by(70);
        assert_eq!(alarm.take_asked(), [(1, 70)]);
    }

    #[tokio::test]
    async fn deadlines_hold_however_long_the_endpoint_has_run() {
        for days in [0, 49, 50, 3650, 36_500] {
            rings(Duration::from_secs(days * 86_400)).await;
        }
    }
}
