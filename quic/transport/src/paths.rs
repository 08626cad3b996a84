//! Estimates of the bandwidth, delay and loss of connections' network paths, reported to subscribers of a channel.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::Instant,
};

use millrace_quic::plane::estimate::{Estimate, ReportedEstimate};
use tokio::sync::broadcast;

use crate::clock::monotonic_ns;

/// Largest number of changed path estimates that wait to be read by a listener, a receiver that [`PathReports::listen`]
/// returned. A listener that reads too slowly misses the oldest estimates, and gets the number of missed estimates.
const WAITING: usize = 1 << 12;

/// A reporter of path estimates (bandwidth, delay, loss) to listeners, for all connections of the endpoints that share
/// it. Each connection is reported once to a new listener, and whenever its estimate has changed enough
/// ([`Estimate::is_outdated`]). Without listeners no path is estimated.
pub struct PathReports {
    changes: broadcast::Sender<PathChange>,
    /// Number of listeners (callers of [`Self::listen`]) so far, including those that have left.
    listeners: AtomicU64,
}

/// A new estimate of a connection's path.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PathChange {
    /// Time of the change on `CLOCK_MONOTONIC`, nanoseconds.
    pub time_ns: u64,
    /// The number that identifies the session: see [`Connection::set_session`](crate::Connection::set_session).
    pub session: u32,
    /// The new estimate of the path, which holds from `time_ns` on.
    pub estimate: Estimate,
}

/// The last reported path estimate of one connection.
#[derive(Default)]
pub(crate) struct PathReporter {
    /// The value of [`PathReports::listeners`] at the last report.
    listeners: u64,
    told: ReportedEstimate,
}

impl Default for PathReports {
    fn default() -> Self {
        Self { changes: broadcast::Sender::new(WAITING), listeners: AtomicU64::new(0) }
    }
}

impl PathReports {
    /// Returns a receiver of all changed path estimates from now on.
    pub fn listen(&self) -> broadcast::Receiver<PathChange> {
        let receiver = self.changes.subscribe();
        self.listeners.fetch_add(1, Ordering::Relaxed);
        receiver
    }

    /// Reports a connection's path estimate (bandwidth, delay, loss) to all receivers from [`Self::listen`], if it has
    /// changed enough.
    pub(crate) fn tell(
        &self,
        now: Instant,
        session: u32,
        teller: &mut PathReporter,
        estimate: impl FnOnce() -> Estimate,
    ) {
        let listeners = self.listeners.load(Ordering::Relaxed);
        if listeners == 0 {
            return;
        }
        // A new listener gets the path estimate of every connection once.
        if teller.listeners != listeners {
            *teller = PathReporter { listeners, told: ReportedEstimate::default() };
        }
        let listened = || self.changes.receiver_count() > 0;
        if let Some(estimate) = teller.told.news(now, listened, estimate) {
            // The send fails only if the last listener has just unsubscribed.
            let _ = self.changes.send(PathChange { time_ns: monotonic_ns(), session, estimate });
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::sync::broadcast::error::TryRecvError;

    use super::*;

    fn with_bandwidth(bandwidth: u64) -> Estimate {
        Estimate { bandwidth: Some(bandwidth), ..Estimate::default() }
    }

    #[test]
    fn path_listener_gets_changed_estimates() {
        let paths = PathReports::default();
        let mut teller = PathReporter::default();
        let mut now = Instant::now();
        let mut tell = |bandwidth| {
            now += Duration::from_millis(100);
            paths.tell(now, 7, &mut teller, || with_bandwidth(bandwidth));
        };
        tell(1000);
        let mut first = paths.listen();
        assert_eq!(first.try_recv(), Err(TryRecvError::Empty), "the listener gets later changes only");
        [1000, 1001, 2000].into_iter().for_each(&mut tell);
        let mut second = paths.listen();
        tell(2000);
        let bandwidths = |receiver: &mut broadcast::Receiver<PathChange>| {
            let changes = std::iter::from_fn(|| receiver.try_recv().ok());
            changes.map(|change| (change.session, change.estimate.bandwidth.unwrap())).collect::<Vec<_>>()
        };
        assert_eq!(bandwidths(&mut first), [(7, 1000), (7, 2000), (7, 2000)]);
        assert_eq!(bandwidths(&mut second), [(7, 2000)], "a new listener gets the present estimate");
    }

    #[test]
    fn paths_without_listeners_are_not_estimated() {
        let paths = PathReports::default();
        let mut teller = PathReporter::default();
        let now = Instant::now();
        paths.tell(now, 7, &mut teller, || panic!("nobody has ever listened"));
        drop(paths.listen());
        paths.tell(now, 7, &mut teller, || panic!("nobody listens any more"));
    }

    #[test]
    fn slow_path_listener_gets_the_number_of_missed_changes() {
        let paths = PathReports::default();
        let mut teller = PathReporter::default();
        let mut receiver = paths.listen();
        let start = Instant::now();
        for change in 0..WAITING as u64 + 5 {
            let now = start + Duration::from_secs(change);
            paths.tell(now, 7, &mut teller, || {
                with_bandwidth(if change.is_multiple_of(2) { 1000 } else { 2000 })
            });
        }
        assert_eq!(receiver.try_recv(), Err(TryRecvError::Lagged(5)));
        assert_eq!(std::iter::from_fn(|| receiver.try_recv().ok()).count(), WAITING);
    }
}
