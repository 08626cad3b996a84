//! Traces single packets for viewers of `/trace`.
//!
//! Nothing is collected without viewers. Otherwise one task collects events from three sources: the kernel's
//! forwarding, the endpoints that send media in userspace, and the measured network paths. It sorts them by time, and
//! passes to each viewer those that the viewer asked for. Every queue is bounded; events that do not fit are dropped,
//! and the viewer is sent their number. Keys and payloads are never collected.

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
pub use millrace_relay_status::trace as event;
use millrace_transport::{PathChange, PathReports, Tap, clock::monotonic_ns, trace::PacketFilter};
use parking_lot::Mutex;
use tokio::{
    sync::{
        broadcast::{self, error::TryRecvError},
        mpsc,
    },
    time::{MissedTickBehavior, interval},
};

use self::event::{LossPlace, RawEvent, TraceClock, TraceEvent};
use super::{engine::RelayEngine, hub::Hub};

/// How often the trace's events are collected and passed to viewers.
const TICK: Duration = Duration::from_millis(20);
/// How long events are held back, so that earlier ones of other CPUs and threads can be sorted in before them.
const HOLD: Duration = Duration::from_millis(20);
/// The most events that may wait for one viewer.
const QUEUE: usize = 1 << 13;
/// The most event lines that are written to a viewer's connection at once.
const LINES: usize = 256;
/// A viewer that reads nothing for this long is disconnected.
const PATIENCE: Duration = Duration::from_secs(30);
/// The time without events after which an empty line is sent. Only a write reveals that the viewer's host is gone.
const PULSE: Duration = Duration::from_secs(5);
const MAX_VIEWERS: usize = 16;

/// The events that a viewer asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EventFilter {
    /// If set, the viewer gets only events of this track.
    pub track: Option<TrackName>,
    /// If set, the viewer gets only events of this session, as publisher or subscriber.
    pub session: Option<NonZero<u32>>,
    /// The sampling interval: the viewer gets only packets whose packet number is a multiple of it.
    pub every: NonZero<u32>,
}

impl Default for EventFilter {
    fn default() -> Self {
        Self { track: None, session: None, every: NonZero::<u32>::MIN }
    }
}

/// Why the query of a `/trace` URL is invalid.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[allow(missing_docs, reason = "the messages describe the variants")]
pub enum BadQuery {
    #[error("{0}: unknown parameter of a trace; there are track, session and sample")]
    Unknown(String),
    #[error("track: {0}")]
    Track(String),
    #[error("{0}: must be a number from 1 on")]
    Number(String),
}

impl EventFilter {
    /// Parses the query of a `/trace` URL.
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

/// The relay has as many trace viewers as it may have.
#[derive(Debug, thiserror::Error)]
#[error("{MAX_VIEWERS} traces are running already: end one of them")]
pub struct TooManyTraceViewers;

/// Collects the events of `/trace` and passes them to viewers.
pub struct EventTracer {
    hub: Arc<Hub>,
    engine: Arc<RelayEngine>,
    tap: Arc<Tap>,
    paths: Arc<PathReports>,
    state: Mutex<TraceState>,
}

#[derive(Default)]
struct TraceState {
    /// True while the task that collects events runs.
    running: bool,
    viewers: Vec<TraceViewer>,
    /// The filter that the sources of events use now.
    told: Option<PacketFilter>,
    /// Receives changes of the sessions' measured network paths while at least one viewer is connected.
    changes: Option<broadcast::Receiver<PathChange>>,
    /// Events that are too recent to be sent in order. They are not sorted yet.
    held: Vec<RawEvent>,
    names: HashMap<u32, Option<Arc<str>>>,
}

struct TraceViewer {
    wanted: EventFilter,
    events: mpsc::Sender<TraceItem>,
    lost: Arc<TraceLosses>,
    /// The time at which the viewer last took an event from its queue.
    last: Instant,
}

#[derive(Debug, Default)]
struct TraceLosses([AtomicU64; 3]);

#[derive(Clone, Debug)]
enum TraceItem {
    Event(RawEvent, Option<Arc<str>>),
    Pulse,
}

impl EventTracer {
    /// Makes a tracer. It costs nothing while there are no viewers.
    pub fn new(hub: Arc<Hub>, engine: Arc<RelayEngine>, tap: Arc<Tap>, paths: Arc<PathReports>) -> Arc<Self> {
        Arc::new(Self { hub, engine, tap, paths, state: Mutex::default() })
    }

    /// Adds a viewer, until the result is dropped. Has to be called in a tokio runtime.
    pub fn watch(self: &Arc<Self>, wanted: EventFilter) -> Result<TraceLines, TooManyTraceViewers> {
        let mut state = self.state.lock();
        state.viewers.retain(|viewer| !viewer.events.is_closed());
        if state.viewers.len() >= MAX_VIEWERS {
            return Err(TooManyTraceViewers);
        }
        let (sender, events) = mpsc::channel(QUEUE);
        let lost = Arc::new(TraceLosses::default());
        let start = self.start_line(&wanted);
        let viewer = TraceViewer { wanted, events: sender, lost: Arc::clone(&lost), last: Instant::now() };
        state.viewers.push(viewer);
        // Changes of network paths are subscribed to for each viewer, because a new receiver first gets the present
        // state of all paths.
        let changes = self.paths.listen();
        state.changes.get_or_insert(changes);
        if !std::mem::replace(&mut state.running, true) {
            // Events that were left when the last viewer disconnected are dropped.
            let _ = self.collect(&mut None);
            tokio::spawn(Arc::clone(self).run());
        }
        self.tell(&mut state);
        Ok(TraceLines { start: Some(start), events, lost, clock: TraceClock::start(), items: Vec::new() })
    }

    /// Returns the number of connected viewers.
    pub fn viewers(&self) -> usize {
        self.state.lock().viewers.iter().filter(|viewer| !viewer.events.is_closed()).count()
    }

    /// Disconnects all viewers, because the relay ends.
    pub fn stop(&self) {
        self.state.lock().viewers.clear();
    }

    fn start_line(&self, wanted: &EventFilter) -> TraceEvent {
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
        TraceEvent::Start { engine: engine.to_owned(), reason, notes }
    }

    /// Returns the number that stands for a track in trace events.
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

    /// Collects events and passes them to the viewers. Returns false if there are no viewers any more.
    fn turn(&self) -> bool {
        let mut state = self.state.lock();
        let now = Instant::now();
        // Viewers that have disconnected, or have read nothing for long, are removed.
        state.viewers.retain(|viewer| !viewer.events.is_closed() && viewer.last + PATIENCE > now);
        self.tell(&mut state);
        if state.viewers.is_empty() {
            *state = TraceState::default();
            return false;
        }
        // Events of the last moment are held back, since other CPUs and threads may still report earlier ones.
        let before = monotonic_ns().saturating_sub(HOLD.as_nanos() as u64);
        let (events, lost) = self.collect(&mut state.changes);
        state.held.extend(events);
        self.hand_out(&mut state, before, now);
        for viewer in &mut state.viewers {
            viewer.lost.add(LossPlace::Kernel, lost.0);
            viewer.lost.add(LossPlace::Relay, lost.1);
            if viewer.last + PULSE < now {
                viewer.pulse(now);
            }
        }
        true
    }

    fn collect(&self, changes: &mut Option<broadcast::Receiver<PathChange>>) -> (Vec<RawEvent>, (u64, u64)) {
        let (mut events, changes_lost) = take_changes(changes);
        let mut read = |event| events.push(RawEvent::Offload(event));
        let offload = self.engine.offload.as_ref();
        let kernel_lost = offload.map_or(0, |offload| offload.drain_trace(&mut read));
        let (pieces, tap_lost) = self.tap.take();
        events.extend(pieces.into_iter().map(RawEvent::Userspace));
        (events, (kernel_lost, tap_lost + changes_lost))
    }

    /// Passes events from before the time `before` to the viewers, in order of time.
    fn hand_out(&self, state: &mut TraceState, before: u64, now: Instant) {
        state.held.sort_by_key(RawEvent::time_ns);
        let due = state.held.partition_point(|event| event.time_ns() < before);
        let due: Vec<_> = state.held.drain(..due).collect();
        let wanted: Vec<_> = state.viewers.iter().map(|viewer| self.resolve(&viewer.wanted)).collect();
        for raw in due {
            let name = self.name(&mut state.names, raw.track());
            for (viewer, wanted) in state.viewers.iter_mut().zip(&wanted) {
                if raw.passes(wanted) {
                    viewer.send(TraceItem::Event(raw, name.clone()), now);
                }
            }
        }
    }

    fn name(&self, names: &mut HashMap<u32, Option<Arc<str>>>, number: u32) -> Option<Arc<str>> {
        if !names.contains_key(&number) {
            // All names are read again, so that names of tracks that are gone do not accumulate.
            let tracks = self.hub.tracks();
            *names =
                tracks.iter().map(|track| (track.number, Some(track.name().to_string().into()))).collect();
            names.entry(number).or_default();
        }
        names.get(&number).cloned().flatten()
    }

    /// Converts a viewer's filter to one for the sources of events. An unknown track gets a number that no track has.
    fn resolve(&self, wanted: &EventFilter) -> PacketFilter {
        let number = |track| self.number(track).unwrap_or(NonZero::<u32>::MAX);
        PacketFilter {
            every: wanted.every,
            track: wanted.track.as_ref().map(number),
            session: wanted.session,
        }
    }

    /// Gives the sources of events a filter that covers all viewers. Stops the sources if there are no viewers.
    fn tell(&self, state: &mut TraceState) {
        let all = state.viewers.iter().map(|viewer| self.resolve(&viewer.wanted)).reduce(union);
        if all != state.told {
            state.told = all;
            self.tap.set(all);
            self.engine.offload.iter().for_each(|offload| offload.set_trace(all));
        }
    }
}

/// Returns the changes of measured network paths that have arrived, and how many were dropped.
fn take_changes(changes: &mut Option<broadcast::Receiver<PathChange>>) -> (Vec<RawEvent>, u64) {
    let mut events = Vec::new();
    let mut lost = 0;
    while let Some(changes) = changes {
        match changes.try_recv() {
            Ok(change) => events.push(RawEvent::Path(change)),
            Err(TryRecvError::Lagged(count)) => lost += count,
            Err(TryRecvError::Empty | TryRecvError::Closed) => break,
        }
    }
    (events, lost)
}

/// Returns a filter that passes all events that `one` or `other` passes, and possibly more.
fn union(one: PacketFilter, other: PacketFilter) -> PacketFilter {
    PacketFilter {
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

impl TraceViewer {
    fn send(&mut self, item: TraceItem, now: Instant) {
        match self.events.try_send(item) {
            Ok(()) => self.last = now,
            Err(_) => self.lost.add(LossPlace::Viewer, 1),
        }
    }

    fn pulse(&mut self, now: Instant) {
        if self.events.try_send(TraceItem::Pulse).is_ok() {
            self.last = now;
        }
    }
}

impl TraceLosses {
    const PLACES: [LossPlace; 3] = [LossPlace::Kernel, LossPlace::Relay, LossPlace::Viewer];

    fn add(&self, place: LossPlace, count: u64) {
        self.0[place as usize].fetch_add(count, Relaxed);
    }

    fn take(&self) -> impl Iterator<Item = TraceEvent> {
        let lost =
            Self::PLACES.into_iter().zip(&self.0).map(|(place, count)| (place, count.swap(0, Relaxed)));
        lost.filter(|(_, count)| *count > 0).map(|(place, count)| TraceEvent::Lost { count, place })
    }
}

/// The events for one viewer as a stream of JSON lines.
pub struct TraceLines {
    start: Option<TraceEvent>,
    events: mpsc::Receiver<TraceItem>,
    lost: Arc<TraceLosses>,
    clock: TraceClock,
    items: Vec<TraceItem>,
}

impl Stream for TraceLines {
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

impl TraceLines {
    fn lines(&self) -> serde_json::Result<Vec<u8>> {
        let mut text = Vec::new();
        for event in self.lost.take() {
            text.append(&mut line(&event)?);
        }
        for item in &self.items {
            match item {
                TraceItem::Event(raw, track) => {
                    text.append(&mut line(&raw.describe(self.clock, track.as_deref()))?);
                }
                TraceItem::Pulse => text.push(b'\n'),
            }
        }
        Ok(text)
    }
}

fn line(event: &TraceEvent) -> serde_json::Result<Vec<u8>> {
    let mut line = serde_json::to_vec(event)?;
    line.push(b'\n');
    Ok(line)
}

#[cfg(test)]
pub(super) mod tests;
