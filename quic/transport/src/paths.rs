//! What is thought of the paths of connections, told to whoever listens.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::Instant,
};

use millrace_quic::plane::estimate::{Estimate, Told};
use tokio::sync::broadcast;

use crate::clock::monotonic_ns;

/// Changes that wait for a listener. One that is slower misses the oldest, and is told how many.
const WAITING: usize = 1 << 12;

/// Tells listeners what the network carries for each connection of the endpoints that share it, whenever that has changed by
/// more than a little ([`Estimate::is_outdated`]), and for each once when somebody begins to listen. Nothing is estimated
/// while nobody does.
pub struct Paths {
    changes: broadcast::Sender<PathChange>,
    /// Goes up with each listener.
    listeners: AtomicU64,
}

/// The path of a connection is thought to be another.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PathChange {
    /// `CLOCK_MONOTONIC`.
    pub time_ns: u64,
    /// As of [`Connection::set_session`](crate::Connection::set_session).
    pub session: u32,
    pub estimate: Estimate,
}

/// What was told of one connection.
#[derive(Default)]
pub(crate) struct Teller {
    /// [`Paths::listeners`] at that time.
    listeners: u64,
    told: Told,
}

impl Default for Paths {
    fn default() -> Self {
        Self { changes: broadcast::Sender::new(WAITING), listeners: AtomicU64::new(0) }
    }
}

impl Paths {
    /// Changes from now on.
    pub fn listen(&self) -> broadcast::Receiver<PathChange> {
        let receiver = self.changes.subscribe();
        self.listeners.fetch_add(1, Ordering::Relaxed);
        receiver
    }

    /// Something has happened on the path of a connection.
    pub(crate) fn tell(
        &self,
        now: Instant,
        session: u32,
        teller: &mut Teller,
        estimate: impl FnOnce() -> Estimate,
    ) {
        let listeners = self.listeners.load(Ordering::Relaxed);
        if listeners == 0 {
            return;
        }
        if teller.listeners != listeners {
            *teller = Teller { listeners, told: Told::default() };
        }
        let listened = || self.changes.receiver_count() > 0;
        if let Some(estimate) = teller.told.news(now, listened, estimate) {
            // Nobody listens any more.
            let _ = self.changes.send(PathChange { time_ns: monotonic_ns(), session, estimate });
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::sync::broadcast::error::TryRecvError;

    use super::*;

    fn of(bandwidth: u64) -> Estimate {
        Estimate { bandwidth: Some(bandwidth), ..Estimate::default() }
    }

    #[test]
    fn listeners_are_told_what_changes() {
        let (paths, mut teller) = (Paths::default(), Teller::default());
        let mut now = Instant::now();
        let mut tell = |bandwidth| {
            now += Duration::from_millis(100);
            paths.tell(now, 7, &mut teller, || of(bandwidth));
        };
        tell(1000);
        let mut first = paths.listen();
        assert_eq!(first.try_recv(), Err(TryRecvError::Empty), "from now on");
        [1000, 1001, 2000].into_iter().for_each(&mut tell);
        let mut second = paths.listen();
        tell(2000);
        let bandwidths = |receiver: &mut broadcast::Receiver<PathChange>| {
            let changes = std::iter::from_fn(|| receiver.try_recv().ok());
            changes.map(|change| (change.session, change.estimate.bandwidth.unwrap())).collect::<Vec<_>>()
        };
        assert_eq!(bandwidths(&mut first), [(7, 1000), (7, 2000), (7, 2000)]);
        assert_eq!(bandwidths(&mut second), [(7, 2000)], "what is so when it begins to listen");
    }

    #[test]
    fn nothing_is_estimated_for_nobody() {
        let (paths, mut teller) = (Paths::default(), Teller::default());
        let now = Instant::now();
        paths.tell(now, 7, &mut teller, || panic!("nobody has ever listened"));
        drop(paths.listen());
        paths.tell(now, 7, &mut teller, || panic!("nobody listens any more"));
    }

    #[test]
    fn a_slow_listener_is_told_how_much_it_missed() {
        let (paths, mut teller) = (Paths::default(), Teller::default());
        let mut receiver = paths.listen();
        let start = Instant::now();
        for change in 0..WAITING as u64 + 5 {
            let now = start + Duration::from_secs(change);
            paths.tell(now, 7, &mut teller, || of(if change.is_multiple_of(2) { 1000 } else { 2000 }));
        }
        assert_eq!(receiver.try_recv(), Err(TryRecvError::Lagged(5)));
        assert_eq!(std::iter::from_fn(|| receiver.try_recv().ok()).count(), WAITING);
    }
}
