//! Server-sent events: one channel sends snapshots, such as a relay's status, at a fixed rate to all its listeners.
//!
//! Each snapshot is made once for all listeners, and only if there are listeners. A listener that does not read misses
//! snapshots, and is dropped after it has missed too many in a row. The memory of a listener is therefore bounded by
//! its queue.

use std::{
    convert::Infallible,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use axum::{
    body::{Body, Bytes},
    http::{StatusCode, header},
    response::{IntoResponse, Response},
};
use futures_core::Stream;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tokio::{
    sync::mpsc::{self, error::TrySendError},
    time::{self, MissedTickBehavior},
};

/// Limits on the resources that listeners may use.
#[derive(Clone, Copy, Debug)]
struct PushLimits {
    period: Duration,
    listeners: usize,
    /// Largest number of snapshots that wait in a listener's queue. The TCP connection buffers some more.
    queue: usize,
    /// Largest number of consecutive snapshots that a listener may miss.
    missed: u32,
}

const LIMITS: PushLimits = PushLimits { period: Duration::from_secs(1), listeners: 64, queue: 2, missed: 10 };

/// Counts of listeners and snapshots since start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct PushCounts {
    /// Number of listeners that are connected now.
    pub listeners: u64,
    /// Number of listeners that were refused because the limit of listeners was reached.
    pub refused: u64,
    /// Number of snapshots that were not sent because a listener's queue was full.
    pub missed: u64,
    /// Number of listeners that were dropped because they missed too many snapshots.
    pub dropped: u64,
}

type Snapshot = Box<dyn Fn() -> Option<String> + Send + Sync>;

/// A channel that sends snapshots to its listeners.
pub struct Channel {
    event: &'static str,
    /// The function that returns the snapshot: JSON without line breaks.
    snapshot: Snapshot,
    limits: PushLimits,
    state: Mutex<PushState>,
}

#[derive(Default)]
struct PushState {
    listeners: Vec<PushListener>,
    /// The latest snapshot of the data, which new listeners get at once. `None` while no task makes snapshots.
    latest: Option<Bytes>,
    /// Whether a task makes snapshots.
    is_pumped: bool,
    counts: PushCounts,
}

struct PushListener {
    frames: mpsc::Sender<Bytes>,
    /// Number of snapshots that the listener has missed since the last one that it got.
    missed: u32,
}

#[derive(Debug, thiserror::Error)]
#[error("{0} listeners are connected, which is the most")]
struct TooManyListeners(usize);

impl Channel {
    /// Creates a channel. `snapshot` is called at most once a second. It returns the data of an event named `event`, or
    /// `None` for no event.
    pub fn new(
        event: &'static str,
        snapshot: impl Fn() -> Option<String> + Send + Sync + 'static,
    ) -> Arc<Self> {
        Self::with(event, Box::new(snapshot), LIMITS)
    }

    fn with(event: &'static str, snapshot: Snapshot, limits: PushLimits) -> Arc<Self> {
        Arc::new(Self { event, snapshot, limits, state: Mutex::default() })
    }

    /// Returns the counts of listeners and snapshots.
    pub fn counts(&self) -> PushCounts {
        let state = self.state.lock();
        let listeners = state.listeners.iter().filter(|listener| !listener.frames.is_closed()).count() as u64;
        PushCounts { listeners, ..state.counts }
    }

    /// Returns the HTTP response that adds the client as a listener, or refuses it.
    pub fn answer(self: &Arc<Self>) -> Response {
        match self.listen() {
            Ok(frames) => {
                let headers =
                    [(header::CONTENT_TYPE, "text/event-stream"), (header::CACHE_CONTROL, "no-store")];
                (headers, Body::from_stream(PushFrames(frames))).into_response()
            }
            Err(error) => {
                let headers = [(header::RETRY_AFTER, "5")];
                (StatusCode::SERVICE_UNAVAILABLE, headers, format!("{error}\n")).into_response()
            }
        }
    }

    fn listen(self: &Arc<Self>) -> Result<mpsc::Receiver<Bytes>, TooManyListeners> {
        let mut state = self.state.lock();
        state.listeners.retain(|listener| !listener.frames.is_closed());
        if state.listeners.len() >= self.limits.listeners {
            state.counts.refused += 1;
            return Err(TooManyListeners(self.limits.listeners));
        }
        let (frames, receiver) = mpsc::channel(self.limits.queue);
        if let Some(latest) = &state.latest {
            // The queue is new and therefore empty, so the send cannot fail.
            let _ = frames.try_send(latest.clone());
        }
        state.listeners.push(PushListener { frames, missed: 0 });
        if !state.is_pumped {
            state.is_pumped = true;
            tokio::spawn(Arc::clone(self).pump());
        }
        Ok(receiver)
    }

    /// Makes a snapshot once per period. The task ends when a period passes without any listener. Clients that come and
    /// go therefore do not raise the rate of snapshots.
    async fn pump(self: Arc<Self>) {
        let mut ticks = time::interval(self.limits.period);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            if self.is_alone() {
                return;
            }
            // The lock is not held while the snapshot is made, so that [`Self::counts`] does not wait for it.
            let frame = (self.snapshot)().map(|data| frame(self.event, &data));
            let Some(frame) = frame else { continue };
            let mut state = self.state.lock();
            state.latest = Some(frame.clone());
            state.send(&frame, self.limits.missed);
        }
    }

    /// Reports whether there is no listener. If there is none, the method also records that the task which makes
    /// snapshots has ended.
    fn is_alone(&self) -> bool {
        let mut state = self.state.lock();
        state.listeners.retain(|listener| !listener.frames.is_closed());
        if state.listeners.is_empty() {
            state.is_pumped = false;
            state.latest = None;
        }
        state.listeners.is_empty()
    }
}

impl PushState {
    fn send(&mut self, frame: &Bytes, most_missed: u32) {
        let counts = &mut self.counts;
        self.listeners.retain_mut(|listener| match listener.frames.try_send(frame.clone()) {
            Ok(()) => {
                listener.missed = 0;
                true
            }
            Err(TrySendError::Closed(_)) => false,
            Err(TrySendError::Full(_)) => {
                listener.missed += 1;
                counts.missed += 1;
                let is_lost = listener.missed > most_missed;
                counts.dropped += u64::from(is_lost);
                !is_lost
            }
        });
    }
}

struct PushFrames(mpsc::Receiver<Bytes>);

impl Stream for PushFrames {
    type Item = Result<Bytes, Infallible>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.0.poll_recv(context).map(|frame| frame.map(Ok))
    }
}

fn frame(event: &str, data: &str) -> Bytes {
    format!("event: {event}\ndata: {data}\n\n").into()
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use millrace_testkit::async_wait_for;

    use super::*;

    const QUICK: PushLimits =
        PushLimits { period: Duration::from_millis(5), listeners: 3, queue: 2, missed: 4 };
    const PATIENCE: Duration = Duration::from_secs(60);

    /// Returns a channel that numbers its snapshots, and the counter of snapshots made.
    fn channel(limits: PushLimits) -> (Arc<Channel>, Arc<AtomicU64>) {
        let made = Arc::new(AtomicU64::new(0));
        let count = Arc::clone(&made);
        let snapshot = move || Some(count.fetch_add(1, Ordering::Relaxed).to_string());
        (Channel::with("number", Box::new(snapshot), limits), made)
    }

    #[tokio::test]
    async fn event_stream_snapshot_is_computed_once_for_all_subscribers() {
        let (channel, made) = channel(QUICK);
        let mut first = channel.listen().unwrap();
        assert_eq!(first.recv().await.unwrap(), "event: number\ndata: 0\n\n");
        // A new listener gets the latest snapshot at once.
        let mut second = channel.listen().unwrap();
        assert!(second.try_recv().is_ok());
        assert_eq!(channel.counts().listeners, 2); // exact: a listener is counted as soon as it subscribes
        assert!(first.recv().await.is_some() && second.recv().await.is_some());
        drop((first, second));
        async_wait_for("the end of the pump", || !channel.state.lock().is_pumped).await;
        let before = made.load(Ordering::Relaxed);
        time::sleep(QUICK.period * 4).await; // exact: a task that still ran would make several snapshots in this time
        assert_eq!(made.load(Ordering::Relaxed), before);
        // exact: the counts of listeners no longer change, because the task that makes snapshots has ended
        assert_eq!((channel.counts(), channel.state.lock().latest.is_none()), (PushCounts::default(), true));
        // A new listener starts the task that makes snapshots again.
        assert!(channel.listen().unwrap().recv().await.is_some());
    }

    #[tokio::test]
    async fn event_stream_subscriber_that_does_not_read_is_dropped() {
        let (channel, _) = channel(QUICK);
        let mut deaf = channel.listen().unwrap();
        let mut good = channel.listen().unwrap();
        let reading = async {
            // exact: the loop reads the count after each snapshot, until the listener `deaf` is dropped
            while channel.counts().dropped == 0 {
                assert!(good.recv().await.is_some());
            }
        };
        assert!(time::timeout(PATIENCE, reading).await.is_ok(), "nobody is dropped");
        // exact: no other task has run since the loop last read the counts of listeners
        let counts = channel.counts();
        assert_eq!((counts.listeners, counts.dropped, counts.missed), (1, 1, u64::from(QUICK.missed) + 1));
        let mut waited = 0;
        while deaf.recv().await.is_some() {
            waited += 1;
        }
        assert_eq!(waited, QUICK.queue, "what waited for the deaf one is bounded");
        assert!(good.recv().await.is_some());
    }

    #[tokio::test]
    async fn event_stream_subscribers_beyond_the_limit_are_refused() {
        let (channel, made) = channel(PushLimits { period: PATIENCE, ..QUICK });
        let mut all: Vec<_> = (0..QUICK.listeners).map(|_| channel.listen().unwrap()).collect();
        for _ in 0..1000 {
            assert!(channel.listen().is_err());
        }
        // exact: the count of refused listeners is updated before `listen` returns
        assert_eq!(channel.counts().refused, 1000);
        // exact: the status code of a complete HTTP response does not change
        assert_eq!(channel.answer().status(), StatusCode::SERVICE_UNAVAILABLE);
        all.pop();
        // Thousands of listeners that connect and disconnect at once cause no extra snapshot and no extra task.
        for _ in 0..1000 {
            drop(channel.listen().unwrap());
        }
        assert!(all[0].recv().await.is_some());
        // exact: a dropped receiver no longer counts as a listener, and no other snapshot is due yet
        assert_eq!((made.load(Ordering::Relaxed), channel.counts().listeners), (1, 2));
        assert!(channel.state.lock().listeners.len() <= QUICK.listeners);
    }
}
