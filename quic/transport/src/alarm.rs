//! The alarm that wakes an endpoint's driver task, and the times at which connections ask the driver to serve them.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use tokio::sync::Notify;

/// Granularity of deadlines: one millisecond, like tokio's timers.
const TICK: Duration = Duration::from_millis(1);

/// The alarm of one driver task. Times are ticks (`TICK`) since the alarm was created; `u64::MAX` stands for never.
///
/// Only the driver calls [`Self::wait`], [`Self::reset`], [`Self::take_asked`] and [`Self::lower`], in this order in
/// each iteration of its loop. Any thread may request a wake-up time meanwhile ([`AlarmTurn::wake_by`]). If the request
/// is made before `take_asked`, it is in that call's result. A later request is also made after `reset`, so it lowers
/// `next` and notifies the driver. So no deadline is lost, and the worst race is a wake-up without work.
#[derive(Debug)]
pub(crate) struct Alarm {
    base: Instant,
    /// The driver's next deadline, at which it wakes even if it is not notified.
    next: AtomicU64,
    notify: Notify,
    /// Wake-up requests that the driver task has not read yet, as pairs of connection number and the time at which to
    /// serve the connection.
    asked: Mutex<Vec<(u64, u64)>>,
    /// The number that the next new connection gets.
    number: AtomicU64,
}

/// The time at which the endpoint's driver task serves one connection next.
#[derive(Debug)]
pub(crate) struct AlarmTurn {
    alarm: Arc<Alarm>,
    number: u64,
    /// Time at which the driver serves the connection next; `u64::MAX` if no time is set.
    at: AtomicU64,
}

impl AlarmTurn {
    pub fn new(alarm: Arc<Alarm>) -> Self {
        let number = alarm.number.fetch_add(1, Ordering::Relaxed);
        Self { alarm, number, at: AtomicU64::new(u64::MAX) }
    }

    /// Returns the connection's number, which is unique within the endpoint.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// Makes the driver serve the connection at `time` or before. State that the driver needs has to be stored before
    /// this call. Usually an earlier time is set already, and the call costs only one atomic load.
    pub fn wake_by(&self, time: u64) {
        if self.put(time) {
            self.alarm.asked.lock().push((self.number, time));
            self.alarm.at(time);
        }
    }

    /// Lowers the time at which the connection is served next. Returns whether `time` is earlier than the time set
    /// before. If so, the driver has to add `time` to its list of deadlines.
    pub fn put(&self, time: u64) -> bool {
        time < self.at.load(Ordering::SeqCst) && time < self.at.fetch_min(time, Ordering::SeqCst)
    }

    /// Clears the connection's time, because the driver serves the connection now. Deadlines later than now have to be
    /// requested again.
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

    /// Returns `at` in ticks, rounded up, so that deadlines that are close together cause one wake-up.
    pub fn time(&self, at: Instant) -> u64 {
        at.saturating_duration_since(self.base).as_nanos().div_ceil(TICK.as_nanos()) as u64
    }

    /// Makes the driver wake at `time` or before.
    fn at(&self, time: u64) {
        // Usually the driver already wakes before `time`. In this case the load shows that no write is needed.
        if time < self.next.load(Ordering::Relaxed) && time < self.next.fetch_min(time, Ordering::AcqRel) {
            self.notify.notify_one();
        }
    }

    /// Wakes the driver now.
    pub fn ring(&self) {
        self.notify.notify_one();
    }

    /// Waits until the driver is notified, or its next deadline has passed.
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

    /// Returns the requests since the last call, as pairs of connection number and time.
    pub fn take_asked(&self) -> Vec<(u64, u64)> {
        std::mem::take(&mut *self.asked.lock())
    }

    /// Clears the driver's next deadline after a wake-up. Deadlines that are requested from now on wake the driver
    /// again.
    pub fn reset(&self) {
        self.next.store(u64::MAX, Ordering::Release);
    }

    /// Sets the driver's next deadline to `time`, unless that deadline is earlier already. The driver calls this before
    /// it waits.
    pub fn lower(&self, time: u64) {
        self.next.fetch_min(time, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks that an alarm created `age` ago, with a deadline 20 ms from now, does not wake before the deadline.
    async fn rings(age: Duration) {
        let now = Instant::now();
        let alarm = Alarm::since(now.checked_sub(age).expect("the clock reaches so far back"));
        let at = now + Duration::from_millis(20);
        alarm.at(alarm.time(at));
        // The first `wait` returns at once, because setting the deadline notified the alarm.
        alarm.wait().await;
        alarm.wait().await;
        assert!(Instant::now() >= at, "too early, {age:?} after the start");
    }

    #[test]
    fn connection_wakes_its_driver_again_only_for_an_earlier_deadline() {
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
    async fn timer_that_is_years_old_rings_no_earlier_than_its_deadline() {
        for days in [0, 49, 50, 3650, 36_500] {
            rings(Duration::from_secs(days * 86_400)).await;
        }
    }
}
