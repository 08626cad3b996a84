//! One channel of server-sent events: a snapshot at a steady rate, to whoever listens.
//!
//! A snapshot is made once for all, and only while somebody listens. Whoever does not take what waits for them misses
//! snapshots, and is let go when that goes on: so a listener costs no more than its queue, whatever it does.

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

/// What listeners may take.
#[derive(Clone, Copy, Debug)]
struct Limits {
    period: Duration,
    listeners: usize,
    /// Snapshots that wait for a listener, besides what its connection holds.
    queue: usize,
    /// Snapshots in a row that a listener may miss.
    missed: u32,
}

const LIMITS: Limits = Limits { period: Duration::from_secs(1), listeners: 64, queue: 2, missed: 10 };

/// What became of listeners, since start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Counts {
    /// At the moment.
    pub listeners: u64,
    /// For whom there was no room.
    pub refused: u64,
    /// Snapshots that listeners were too slow for.
    pub missed: u64,
    /// Listeners that were let go since they missed too many.
    pub dropped: u64,
}

type Snapshot = Box<dyn Fn() -> Option<String> + Send + Sync>;

pub struct Channel {
    event: &'static str,
    /// JSON, which has no line breaks.
    snapshot: Snapshot,
    limits: Limits,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    listeners: Vec<Listener>,
    /// What newcomers get at once, while there is a pump.
    latest: Option<Bytes>,
    /// A task makes snapshots.
    is_pumped: bool,
    counts: Counts,
}

struct Listener {
    frames: mpsc::Sender<Bytes>,
    /// In a row.
    missed: u32,
}

#[derive(Debug, thiserror::Error)]
#[error("there are {0} listeners already")]
struct TooMany(usize);

impl Channel {
    /// `snapshot` gives the data of an `event`, if there is any; it is called once a second at most.
    pub fn new(
        event: &'static str,
        snapshot: impl Fn() -> Option<String> + Send + Sync + 'static,
    ) -> Arc<Self> {
        Self::with(event, Box::new(snapshot), LIMITS)
    }

    fn with(event: &'static str, snapshot: Snapshot, limits: Limits) -> Arc<Self> {
        Arc::new(Self { event, snapshot, limits, state: Mutex::default() })
    }

    pub fn counts(&self) -> Counts {
        let state = self.state.lock();
        let listeners = state.listeners.iter().filter(|listener| !listener.frames.is_closed()).count() as u64;
        Counts { listeners, ..state.counts }
    }

    /// The answer to who wants to listen.
    pub fn answer(self: &Arc<Self>) -> Response {
        match self.listen() {
            Ok(frames) => {
                let headers =
                    [(header::CONTENT_TYPE, "text/event-stream"), (header::CACHE_CONTROL, "no-store")];
                (headers, Body::from_stream(Frames(frames))).into_response()
            }
            Err(error) => {
                let headers = [(header::RETRY_AFTER, "5")];
                (StatusCode::SERVICE_UNAVAILABLE, headers, format!("{error}\n")).into_response()
            }
        }
    }

    fn listen(self: &Arc<Self>) -> Result<mpsc::Receiver<Bytes>, TooMany> {
        let mut state = self.state.lock();
        state.listeners.retain(|listener| !listener.frames.is_closed());
        if state.listeners.len() >= self.limits.listeners {
            state.counts.refused += 1;
            return Err(TooMany(self.limits.listeners));
        }
        let (frames, receiver) = mpsc::channel(self.limits.queue);
        if let Some(latest) = &state.latest {
            // There is room.
            let _ = frames.try_send(latest.clone());
        }
        state.listeners.push(Listener { frames, missed: 0 });
        if !state.is_pumped {
            state.is_pumped = true;
            tokio::spawn(Arc::clone(self).pump());
        }
        Ok(receiver)
    }

    /// Ends within a period of the last listener, so that those who come and go have no snapshots made beyond the rate.
    async fn pump(self: Arc<Self>) {
        let mut ticks = time::interval(self.limits.period);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            if self.is_alone() {
                return;
            }
            // Without the lock: who asks for counts does not wait for it.
            let frame = (self.snapshot)().map(|data| frame(self.event, &data));
            let Some(frame) = frame else { continue };
            let mut state = self.state.lock();
            state.latest = Some(frame.clone());
            state.send(&frame, self.limits.missed);
        }
    }

    /// Nobody listens; then there is no pump either.
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

impl State {
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

struct Frames(mpsc::Receiver<Bytes>);

impl Stream for Frames {
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

    const QUICK: Limits = Limits { period: Duration::from_millis(5), listeners: 3, queue: 2, missed: 4 };
    const PATIENCE: Duration = Duration::from_secs(60);

    /// Numbers its snapshots.
    fn channel(limits: Limits) -> (Arc<Channel>, Arc<AtomicU64>) {
        let made = Arc::new(AtomicU64::new(0));
        let count = Arc::clone(&made);
        let snapshot = move || Some(count.fetch_add(1, Ordering::Relaxed).to_string());
        (Channel::with("number", Box::new(snapshot), limits), made)
    }

    #[tokio::test]
    async fn snapshots_are_made_while_somebody_listens_and_for_all_at_once() {
        let (channel, made) = channel(QUICK);
        let mut first = channel.listen().unwrap();
        assert_eq!(first.recv().await.unwrap(), "event: number\ndata: 0\n\n");
        // What there is already, at once.
        let mut second = channel.listen().unwrap();
        assert!(second.try_recv().is_ok());
        assert_eq!(channel.counts().listeners, 2); // exact: whoever listens is counted at once
        assert!(first.recv().await.is_some() && second.recv().await.is_some());
        drop((first, second));
        async_wait_for("the end of the pump", || !channel.state.lock().is_pumped).await;
        let before = made.load(Ordering::Relaxed);
        time::sleep(QUICK.period * 4).await; // exact: several periods, in none of which a snapshot is made
        assert_eq!(made.load(Ordering::Relaxed), before);
        // exact: the pump has ended
        assert_eq!((channel.counts(), channel.state.lock().latest.is_none()), (Counts::default(), true));
        // And begins anew.
        assert!(channel.listen().unwrap().recv().await.is_some());
    }

    #[tokio::test]
    async fn who_does_not_read_is_let_go_and_holds_up_nobody() {
        let (channel, _) = channel(QUICK);
        let mut deaf = channel.listen().unwrap();
        let mut good = channel.listen().unwrap();
        let reading = async {
            // exact: looked at again behind each frame
            while channel.counts().dropped == 0 {
                assert!(good.recv().await.is_some());
            }
        };
        assert!(time::timeout(PATIENCE, reading).await.is_ok(), "nobody is dropped");
        let counts = channel.counts(); // exact: no task has run since
        assert_eq!((counts.listeners, counts.dropped, counts.missed), (1, 1, u64::from(QUICK.missed) + 1));
        let mut waited = 0;
        while deaf.recv().await.is_some() {
            waited += 1;
        }
        assert_eq!(waited, QUICK.queue, "what waited for the deaf one is bounded");
        assert!(good.recv().await.is_some());
    }

    #[tokio::test]
    async fn there_is_room_for_so_many_and_for_others_when_they_leave() {
        let (channel, made) = channel(Limits { period: PATIENCE, ..QUICK });
        let mut all: Vec<_> = (0..QUICK.listeners).map(|_| channel.listen().unwrap()).collect();
        for _ in 0..1000 {
            assert!(channel.listen().is_err());
        }
        assert_eq!(channel.counts().refused, 1000); // exact: they are counted at once
        // exact: the code of an answer
        assert_eq!(channel.answer().status(), StatusCode::SERVICE_UNAVAILABLE);
        all.pop();
        // Thousands that come and leave at once: no snapshot of their own, no task of their own.
        for _ in 0..1000 {
            drop(channel.listen().unwrap());
        }
        assert!(all[0].recv().await.is_some());
        // exact: who leaves is no listener any more, and the next snapshot is far
        assert_eq!((made.load(Ordering::Relaxed), channel.counts().listeners), (1, 2));
        assert!(channel.state.lock().listeners.len() <= QUICK.listeners);
    }
}
