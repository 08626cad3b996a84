//! What happens to single packets, for whoever watches: `/trace`.
//!
//! Nothing is collected while nobody watches. While somebody does, one task takes what the offload and the
//! data planes have collected, and what is thought of the paths, puts it in order of time, and hands each viewer what it wants. Every queue on the way is
//! bounded: what does not fit is dropped, and the viewer is told how much. No key and no payload ever comes near it.

pub mod event;

use std::{
    collections::HashMap,
    num::NonZero,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    task::{Context, Poll, ready},
    time::{Duration, Instant},
};

use bytes::Bytes;
use futures_core::Stream;
use millrace_moq::TrackName;
use millrace_transport::{PathChange, Paths, Tap, clock::monotonic_ns, trace::Filter};
use parking_lot::Mutex;
use tokio::{
    sync::{
        broadcast::{self, error::TryRecvError},
        mpsc,
    },
    time::{MissedTickBehavior, interval},
};

use self::event::{Clock, Event, Place, Raw};
use super::{engine::Engine, hub::Hub};

/// How often events are collected.
const TICK: Duration = Duration::from_millis(20);
/// How long events wait for earlier ones of other CPUs and threads.
const HOLD: Duration = Duration::from_millis(20);
/// Events that wait for one viewer.
const QUEUE: usize = 1 << 13;
/// Lines that are handed to the network at once.
const LINES: usize = 256;
/// A viewer that takes nothing for so long is let go.
const PATIENCE: Duration = Duration::from_secs(30);
/// After so long without an event there is an empty line: only who writes finds out that a host is gone.
const PULSE: Duration = Duration::from_secs(5);
const MAX_VIEWERS: usize = 16;

/// What a viewer wants to see.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wanted {
    pub track: Option<TrackName>,
    /// A publisher or subscriber.
    pub session: Option<NonZero<u32>>,
    /// Of each connection's packets those whose number is a multiple of it.
    pub every: NonZero<u32>,
}

impl Default for Wanted {
    fn default() -> Self {
        Self { track: None, session: None, every: NonZero::<u32>::MIN }
    }
}

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum BadQuery {
    #[error("{0}: there are track, session and sample")]
    Unknown(String),
    #[error("track: {0}")]
    Track(String),
    #[error("{0}: a number from 1 on")]
    Number(String),
}

impl Wanted {
    /// From the query of a URL.
    pub fn parse(query: &str) -> Result<Self, BadQuery> {
        let mut wanted = Self::default();
        for (key, value) in url::form_urlencoded::parse(query.as_bytes()) {
            let number = || value.parse().map_err(|_| BadQuery::Number(key.to_string()));
            match &*key {
                "track" => {
                    let name = value.parse::<TrackName>();
                    wanted.track = Some(name.map_err(|error| BadQuery::Track(error.to_string()))?);
                }
                "session" => wanted.session = Some(number()?),
                "sample" => wanted.every = number()?,
                _ => return Err(BadQuery::Unknown(key.into_owned())),
            }
        }
        Ok(wanted)
    }
}

/// There are enough viewers.
#[derive(Debug, thiserror::Error)]
#[error("{MAX_VIEWERS} viewers are watching already")]
pub struct TooMany;

/// The source of `/trace`.
pub struct Tracer {
    hub: Arc<Hub>,
    engine: Arc<Engine>,
    tap: Arc<Tap>,
    paths: Arc<Paths>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// There is a task that collects.
    running: bool,
    viewers: Vec<Viewer>,
    /// What the sources were told last.
    told: Option<Filter>,
    /// While somebody watches.
    changes: Option<broadcast::Receiver<PathChange>>,
    /// Too young to be told, unordered.
    held: Vec<Raw>,
    names: HashMap<u32, Option<Arc<str>>>,
}

struct Viewer {
    wanted: Wanted,
    events: mpsc::Sender<Item>,
    lost: Arc<Losses>,
    /// When it last took something.
    last: Instant,
}

#[derive(Debug, Default)]
struct Losses([AtomicU64; 3]);

#[derive(Clone, Debug)]
enum Item {
    Event(Raw, Option<Arc<str>>),
    Pulse,
}

impl Tracer {
    pub fn new(hub: Arc<Hub>, engine: Arc<Engine>, tap: Arc<Tap>, paths: Arc<Paths>) -> Arc<Self> {
        Arc::new(Self { hub, engine, tap, paths, state: Mutex::default() })
    }

    /// Starts to watch, until the result is dropped. Within a tokio runtime.
    pub fn watch(self: &Arc<Self>, wanted: Wanted) -> Result<Watch, TooMany> {
        let mut state = self.state.lock();
        state.viewers.retain(|viewer| !viewer.events.is_closed());
        if state.viewers.len() >= MAX_VIEWERS {
            return Err(TooMany);
        }
        let (sender, events) = mpsc::channel(QUEUE);
        let lost = Arc::new(Losses::default());
        let start = self.start_line(&wanted);
        let viewer = Viewer { wanted, events: sender, lost: Arc::clone(&lost), last: Instant::now() };
        state.viewers.push(viewer);
        // For each viewer, so that each hears how all paths are.
        let changes = self.paths.listen();
        state.changes.get_or_insert(changes);
        if !std::mem::replace(&mut state.running, true) {
            // What was left over when the last viewer went.
            let _ = self.collect(&mut None);
            tokio::spawn(Arc::clone(self).run());
        }
        self.tell(&mut state);
        Ok(Watch { start: Some(start), events, lost, clock: Clock::start(), items: Vec::new() })
    }

    pub fn viewers(&self) -> usize {
        self.state.lock().viewers.iter().filter(|viewer| !viewer.events.is_closed()).count()
    }

    /// The relay ends, and with it every watch.
    pub fn stop(&self) {
        self.state.lock().viewers.clear();
    }

    fn start_line(&self, wanted: &Wanted) -> Event {
        let mut notes = Vec::new();
        let (engine, reason) = self.engine.describe();
        if engine == "user" {
            notes.push(
                "engine user: what arrives is opened by the QUIC stack and cannot be seen here".to_owned(),
            );
        }
        if let Some(track) = wanted.track.as_ref().filter(|track| self.number(track).is_none()) {
            notes.push(format!("there is no track {} yet", track.typed()));
        }
        Event::Start { engine: engine.to_owned(), reason, notes }
    }

    /// The number of a track in events.
    fn number(&self, track: &TrackName) -> Option<NonZero<u32>> {
        NonZero::new(self.hub.find_track(track)?.number)
    }

    async fn run(self: Arc<Self>) {
        let mut ticks = interval(TICK);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            if !self.turn() {
                return;
            }
        }
    }

    /// Returns whether anybody still watches.
    fn turn(&self) -> bool {
        let mut state = self.state.lock();
        let now = Instant::now();
        state.viewers.retain(|viewer| !viewer.events.is_closed() && viewer.last + PATIENCE > now);
        self.tell(&mut state);
        if state.viewers.is_empty() {
            *state = State::default();
            return false;
        }
        let before = monotonic_ns().saturating_sub(HOLD.as_nanos() as u64);
        let (events, lost) = self.collect(&mut state.changes);
        state.held.extend(events);
        self.hand_out(&mut state, before, now);
        for viewer in &mut state.viewers {
            viewer.lost.add(Place::Kernel, lost.0);
            viewer.lost.add(Place::Relay, lost.1);
            if viewer.last + PULSE < now {
                viewer.pulse(now);
            }
        }
        true
    }

    fn collect(&self, changes: &mut Option<broadcast::Receiver<PathChange>>) -> (Vec<Raw>, (u64, u64)) {
        let (mut events, changes_lost) = take_changes(changes);
        let mut read = |event| events.push(Raw::Offload(event));
        let offload = self.engine.offload.as_ref();
        let kernel_lost = offload.map_or(0, |offload| offload.drain_trace(&mut read));
        let (pieces, tap_lost) = self.tap.take();
        events.extend(pieces.into_iter().map(Raw::Userspace));
        (events, (kernel_lost, tap_lost + changes_lost))
    }

    /// Passes on what is from before `before`, in order of time.
    fn hand_out(&self, state: &mut State, before: u64, now: Instant) {
        state.held.sort_by_key(Raw::time_ns);
        let due = state.held.partition_point(|event| event.time_ns() < before);
        let due: Vec<_> = state.held.drain(..due).collect();
        let wanted: Vec<_> = state.viewers.iter().map(|viewer| self.resolve(&viewer.wanted)).collect();
        for raw in due {
            let name = self.name(&mut state.names, raw.track());
            for (viewer, wanted) in state.viewers.iter_mut().zip(&wanted) {
                if raw.passes(wanted) {
                    viewer.send(Item::Event(raw, name.clone()), now);
                }
            }
        }
    }

    fn name(&self, names: &mut HashMap<u32, Option<Arc<str>>>, number: u32) -> Option<Arc<str>> {
        if !names.contains_key(&number) {
            // Tracks come and go: only those that are here are kept.
            let tracks = self.hub.tracks();
            *names =
                tracks.iter().map(|track| (track.number, Some(track.name().to_string().into()))).collect();
            names.entry(number).or_default();
        }
        names.get(&number).cloned().flatten()
    }

    /// In the sources' terms. A track that is not here has a number that none has.
    fn resolve(&self, wanted: &Wanted) -> Filter {
        let number = |track| self.number(track).unwrap_or(NonZero::<u32>::MAX);
        Filter { every: wanted.every, track: wanted.track.as_ref().map(number), session: wanted.session }
    }

    /// Has the sources collect what all viewers together want, or nothing.
    fn tell(&self, state: &mut State) {
        let all = state.viewers.iter().map(|viewer| self.resolve(&viewer.wanted)).reduce(union);
        if all != state.told {
            state.told = all;
            self.tap.set(all);
            self.engine.offload.iter().for_each(|offload| offload.set_trace(all));
        }
    }
}

/// What waits, and how much there was no room for.
fn take_changes(changes: &mut Option<broadcast::Receiver<PathChange>>) -> (Vec<Raw>, u64) {
    let (mut events, mut lost) = (Vec::new(), 0);
    while let Some(changes) = changes {
        match changes.try_recv() {
            Ok(change) => events.push(Raw::Path(change)),
            Err(TryRecvError::Lagged(count)) => lost += count,
            Err(TryRecvError::Empty | TryRecvError::Closed) => break,
        }
    }
    (events, lost)
}

/// At least what both want.
fn union(one: Filter, other: Filter) -> Filter {
    Filter {
        every: gcd(one.every, other.every),
        track: one.track.filter(|track| other.track == Some(*track)),
        session: one.session.filter(|session| other.session == Some(*session)),
    }
}

fn gcd(one: NonZero<u32>, other: NonZero<u32>) -> NonZero<u32> {
    match NonZero::new(one.get() % other) {
        Some(rest) => gcd(other, rest),
        None => other,
    }
}

impl Viewer {
    fn send(&mut self, item: Item, now: Instant) {
        match self.events.try_send(item) {
            Ok(()) => self.last = now,
            Err(_) => self.lost.add(Place::Viewer, 1),
        }
    }

    fn pulse(&mut self, now: Instant) {
        if self.events.try_send(Item::Pulse).is_ok() {
            self.last = now;
        }
    }
}

impl Losses {
    const PLACES: [Place; 3] = [Place::Kernel, Place::Relay, Place::Viewer];

    fn add(&self, place: Place, count: u64) {
        self.0[place as usize].fetch_add(count, Relaxed);
    }

    fn take(&self) -> impl Iterator<Item = Event> {
        let lost =
            Self::PLACES.into_iter().zip(&self.0).map(|(place, count)| (place, count.swap(0, Relaxed)));
        lost.filter(|(_, count)| *count > 0).map(|(place, count)| Event::Lost { count, place })
    }
}

/// Lines of JSON, one event each, as they come.
pub struct Watch {
    start: Option<Event>,
    events: mpsc::Receiver<Item>,
    lost: Arc<Losses>,
    clock: Clock,
    items: Vec<Item>,
}

impl Stream for Watch {
    type Item = serde_json::Result<Bytes>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = &mut *self;
        if let Some(start) = this.start.take() {
            return Poll::Ready(Some(line(&start).map(Bytes::from)));
        }
        this.items.clear();
        if ready!(this.events.poll_recv_many(context, &mut this.items, LINES)) == 0 {
            return Poll::Ready(None);
        }
        Poll::Ready(Some(this.lines().map(Bytes::from)))
    }
}

impl Watch {
    fn lines(&self) -> serde_json::Result<Vec<u8>> {
        let mut text = Vec::new();
        for event in self.lost.take() {
            text.append(&mut line(&event)?);
        }
        for item in &self.items {
            match item {
                Item::Event(raw, track) => {
                    text.append(&mut line(&raw.describe(self.clock, track.as_deref()))?);
                }
                Item::Pulse => text.push(b'\n'),
            }
        }
        Ok(text)
    }
}

fn line(event: &Event) -> serde_json::Result<Vec<u8>> {
    let mut line = serde_json::to_vec(event)?;
    line.push(b'\n');
    Ok(line)
}

#[cfg(test)]
pub(super) mod tests;
