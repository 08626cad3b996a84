//! What all sessions share: who publishes which namespaces, who watches them, and the live tracks.

use std::{
    collections::HashMap,
    sync::{
        Arc, Weak,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use millrace_proto::{
    moq::{Namespace, TrackName, code, message::RequestError},
    relay::cache::Cache,
};
use parking_lot::{Mutex, RwLock};
use tokio::sync::{mpsc, watch};

use super::{live::LiveTrack, outbox::Outbox, session::Session, upstream::Ask};

/// Limits of the relay as a whole.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    pub max_tracks: usize,
    /// How long an upstream subscription is kept after its last subscriber left.
    pub linger: Duration,
    /// The longest that a SUBSCRIBE may wait for a publisher, whatever RENDEZVOUS_TIMEOUT asks.
    pub max_rendezvous: Duration,
    /// How long publishers have to answer a request of the relay.
    pub request_timeout: Duration,
}

/// The shared state of a relay.
pub struct Hub {
    pub limits: Limits,
    pub cache: Arc<Cache>,
    pub counters: Counters,
    tracks: RwLock<HashMap<TrackName, Arc<LiveTrack>>>,
    namespaces: Mutex<Namespaces>,
    /// Changes whenever a publisher or a published track appears.
    arrivals: watch::Sender<u64>,
}

/// Counts for the operator, since start.
#[derive(Debug, Default)]
pub struct Counters {
    pub requests: AtomicU64,
    pub request_errors: AtomicU64,
    pub objects_received: AtomicU64,
    pub object_bytes_received: AtomicU64,
    pub protocol_violations: AtomicU64,
    pub unknown_alias: AtomicU64,
    pub duplicate_subgroups: AtomicU64,
    pub expired_subgroups: AtomicU64,
    pub duplicate_datagrams: AtomicU64,
}

impl Counters {
    pub fn count(counter: &AtomicU64) {
        Self::add(counter, 1);
    }

    pub fn add(counter: &AtomicU64, amount: u64) {
        counter.fetch_add(amount, Relaxed);
    }
}

#[derive(Default)]
struct Namespaces {
    publishers: HashMap<Namespace, Vec<Publisher>>,
    watchers: Vec<Watcher<NamespaceEvent>>,
    track_watchers: Vec<Watcher<Arc<LiveTrack>>>,
    next_id: u64,
}

struct Publisher {
    session: Weak<Session>,
    session_id: u64,
    /// The relay's configured upstream: asked only if nobody nearer publishes the namespace.
    fallback: bool,
}

struct Watcher<E> {
    id: u64,
    prefix: Namespace,
    events: mpsc::Sender<E>,
}

/// Changes that a watcher may be behind by, besides what was there when it began.
const WATCH_BACKLOG: usize = 1024;

/// A namespace below a watched prefix appeared or went.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NamespaceEvent {
    Published(Namespace),
    Done(Namespace),
}

/// A watch on a prefix; ends when dropped. Its events end when it does not keep up with them.
pub struct Watch<E> {
    hub: Weak<Hub>,
    id: u64,
    pub events: mpsc::Receiver<E>,
}

impl<E> Drop for Watch<E> {
    fn drop(&mut self) {
        if let Some(hub) = self.hub.upgrade() {
            let mut namespaces = hub.namespaces.lock();
            namespaces.watchers.retain(|watcher| watcher.id != self.id);
            namespaces.track_watchers.retain(|watcher| watcher.id != self.id);
        }
    }
}

/// A published namespace; withdrawn when dropped.
pub struct Publication {
    hub: Weak<Hub>,
    namespace: Namespace,
    session_id: u64,
}

impl Drop for Publication {
    fn drop(&mut self) {
        if let Some(hub) = self.hub.upgrade() {
            hub.withdraw(&self.namespace, self.session_id);
        }
    }
}

impl Hub {
    pub fn new(limits: Limits, cache: Arc<Cache>) -> Self {
        Self {
            limits,
            cache,
            counters: Counters::default(),
            tracks: RwLock::default(),
            namespaces: Mutex::default(),
            arrivals: watch::Sender::new(0),
        }
    }

    /// The track of this name, made if it is not there.
    ///
    /// # Errors
    /// The relay has as many tracks as it may have.
    pub fn track(&self, name: &TrackName, now: Instant) -> Result<Arc<LiveTrack>, RequestError> {
        if let Some(track) = self.find_track(name) {
            return Ok(track);
        }
        let mut tracks = self.tracks.write();
        if tracks.len() >= self.limits.max_tracks && !tracks.contains_key(name) {
            return Err(RequestError::new(
                code::Request::EXCESSIVE_LOAD,
                "the relay has no room for another track",
            ));
        }
        let new = || Arc::new(LiveTrack::new(name.clone(), Arc::clone(&self.cache), now));
        Ok(Arc::clone(tracks.entry(name.clone()).or_insert_with(new)))
    }

    /// Refuses what nobody can serve, before anything is made for it.
    ///
    /// # Errors
    /// The track is not here, and nobody publishes its namespace for `requester`.
    pub fn check_known(&self, name: &TrackName, requester: &Session) -> Result<(), RequestError> {
        if self.find_track(name).is_some() || !self.publishers_of(name.namespace(), requester).is_empty() {
            return Ok(());
        }
        Err(RequestError::new(code::Request::DOES_NOT_EXIST, "nobody publishes this track"))
    }

    pub fn find_track(&self, name: &TrackName) -> Option<Arc<LiveTrack>> {
        self.tracks.read().get(name).cloned()
    }

    pub fn tracks(&self) -> Vec<Arc<LiveTrack>> {
        self.tracks.read().values().cloned().collect()
    }

    /// Registers `session` as a publisher of everything below `namespace`, and subscribes there to the
    /// tracks that others already feed.
    pub fn publish(
        self: &Arc<Self>,
        namespace: Namespace,
        session: &Arc<Session>,
        fallback: bool,
    ) -> Publication {
        let mut namespaces = self.namespaces.lock();
        let publishers = namespaces.publishers.entry(namespace.clone()).or_default();
        let first = publishers.is_empty();
        publishers.push(Publisher { session: Arc::downgrade(session), session_id: session.id(), fallback });
        if first && !fallback {
            namespaces.announce(&namespace, NamespaceEvent::Published(namespace.clone()));
        }
        drop(namespaces);
        self.arrivals.send_modify(|arrivals| *arrivals += 1);
        if !fallback {
            self.subscribe_existing(&namespace, session);
        }
        Publication { hub: Arc::downgrade(self), namespace, session_id: session.id() }
    }

    fn withdraw(&self, namespace: &Namespace, session_id: u64) {
        let mut namespaces = self.namespaces.lock();
        let Some(publishers) = namespaces.publishers.get_mut(namespace) else { return };
        if let Some(index) = publishers.iter().position(|publisher| publisher.session_id == session_id) {
            publishers.remove(index);
        }
        if publishers.is_empty() {
            namespaces.publishers.remove(namespace);
            namespaces.announce(namespace, NamespaceEvent::Done(namespace.clone()));
        }
    }

    /// A publisher that comes later feeds the subscriptions that are there too (draft-18, "Publisher
    /// Interactions").
    fn subscribe_existing(&self, namespace: &Namespace, session: &Arc<Session>) {
        for track in self.tracks() {
            let wanted = track.subscription_count() > 0 && namespace.is_prefix_of(track.name().namespace());
            if wanted && track.is_established() {
                let session = Arc::clone(session);
                tokio::spawn(async move { session.subscribe_upstream(track).await });
            }
        }
    }

    /// Sessions that publish `namespace` or a prefix of it, as `requester` may be sent to them: the
    /// configured upstream only if there is nobody else, and never if it is the requester.
    pub fn publishers_of(&self, namespace: &Namespace, requester: &Session) -> Vec<Arc<Session>> {
        let namespaces = self.namespaces.lock();
        let mut found: Vec<(bool, Arc<Session>)> = Vec::new();
        for prefix in namespace.prefixes() {
            for publisher in namespaces.publishers.get(&prefix).into_iter().flatten() {
                let Some(session) = publisher.session.upgrade() else { continue };
                let loops = requester.is_upstream && session.id() == requester.id();
                if !loops && !found.iter().any(|(_, other)| other.id() == session.id()) {
                    found.push((publisher.fallback, session));
                }
            }
        }
        let near = found.iter().any(|(fallback, _)| !fallback);
        found.into_iter().filter(|(fallback, _)| !near || !fallback).map(|(_, session)| session).collect()
    }

    /// Whether a session other than `except` publishes exactly `namespace`.
    pub fn is_published(&self, namespace: &Namespace, except: u64) -> bool {
        let namespaces = self.namespaces.lock();
        namespaces
            .publishers
            .get(namespace)
            .is_some_and(|publishers| publishers.iter().any(|publisher| publisher.session_id != except))
    }

    /// Changes when a publisher or a published track appears.
    pub fn arrivals(&self) -> watch::Receiver<u64> {
        self.arrivals.subscribe()
    }

    /// Watches the namespaces below `prefix`, those that are there first.
    pub fn watch_namespaces(self: &Arc<Self>, prefix: Namespace) -> Watch<NamespaceEvent> {
        let mut namespaces = self.namespaces.lock();
        let real = |publishers: &[Publisher]| publishers.iter().any(|publisher| !publisher.fallback);
        let present: Vec<_> = namespaces
            .publishers
            .iter()
            .filter(|(namespace, publishers)| real(publishers) && prefix.is_prefix_of(namespace))
            .map(|(namespace, _)| NamespaceEvent::Published(namespace.clone()))
            .collect();
        let id = namespaces.next_id();
        let (watcher, events) = Watcher::new(id, prefix, present);
        namespaces.watchers.push(watcher);
        Watch { hub: Arc::downgrade(self), id, events }
    }

    /// Watches the tracks below `prefix` that have a publisher, those that are there first.
    pub fn watch_tracks(self: &Arc<Self>, prefix: Namespace) -> Watch<Arc<LiveTrack>> {
        let mut namespaces = self.namespaces.lock();
        let present = self
            .tracks()
            .into_iter()
            .filter(|track| track.is_established() && prefix.is_prefix_of(track.name().namespace()));
        let present: Vec<_> = present.collect();
        let id = namespaces.next_id();
        let (watcher, events) = Watcher::new(id, prefix, present);
        namespaces.track_watchers.push(watcher);
        Watch { hub: Arc::downgrade(self), id, events }
    }

    /// A track has its first publisher.
    pub fn track_established(&self, track: &Arc<LiveTrack>) {
        let mut namespaces = self.namespaces.lock();
        tell(&mut namespaces.track_watchers, track.name().namespace(), track);
        drop(namespaces);
        self.arrivals.send_modify(|arrivals| *arrivals += 1);
    }

    /// Makes sure that somebody feeds `track`: asks all its publishers, and returns with the first that
    /// agrees. Waits up to `rendezvous` for a publisher to appear.
    ///
    /// # Errors
    /// Nobody publishes the track, or everybody refused.
    pub async fn ensure_upstream(
        &self,
        track: &Arc<LiveTrack>,
        requester: &Session,
        rendezvous: Duration,
    ) -> Result<(), RequestError> {
        let deadline = tokio::time::Instant::now() + rendezvous.min(self.limits.max_rendezvous);
        let mut arrivals = self.arrivals();
        loop {
            arrivals.borrow_and_update();
            let refusal = match self.try_upstream(track, requester).await {
                Ok(()) => return Ok(()),
                Err(refusal) => refusal,
            };
            if rendezvous.is_zero() || refusal.code != code::Request::DOES_NOT_EXIST {
                return Err(refusal);
            }
            if tokio::time::timeout_at(deadline, arrivals.changed()).await.is_err() {
                return Err(RequestError::new(code::Request::TIMEOUT, "no publisher appeared in time"));
            }
        }
    }

    async fn try_upstream(&self, track: &Arc<LiveTrack>, requester: &Session) -> Result<(), RequestError> {
        let _one_at_a_time = track.connecting.lock().await;
        if track.is_established() {
            return Ok(());
        }
        let publishers = self.publishers_of(track.name().namespace(), requester);
        let (sender, mut answers) = mpsc::channel(publishers.len().max(1));
        for session in publishers {
            let (track, sender) = (Arc::clone(track), sender.clone());
            tokio::spawn(async move {
                let _ = sender.send(session.subscribe_upstream(track).await).await; // nobody waits any more
            });
        }
        drop(sender);
        let mut refused = RequestError::new(code::Request::DOES_NOT_EXIST, "nobody publishes this track");
        while let Some(answer) = answers.recv().await {
            match answer {
                Ok(()) => return Ok(()),
                Err(refusal) => refused = refusal,
            }
        }
        Err(refused)
    }

    /// Gives up streams over dropped groups, ends upstream subscriptions that nobody has needed for a while, and forgets tracks that have
    /// neither publisher nor subscriber nor cached groups. Call this about twice a second.
    pub fn tidy(&self, now: Instant) {
        self.cache.expire(now);
        let mut outbox = Outbox::default();
        for track in self.tracks() {
            track.drop_evicted(now, &mut outbox);
            let Some(idle_since) = track.idle_since() else { continue };
            if now.saturating_duration_since(idle_since) < self.limits.linger {
                continue;
            }
            let upstreams = track.upstreams();
            for upstream in upstreams.iter().filter(|upstream| upstream.subscribed) {
                upstream.ask(Ask::Cancel);
            }
            let expired = now.saturating_duration_since(idle_since) >= self.cache.limits().age;
            if upstreams.is_empty() && (expired || track.data.held().groups == 0) {
                self.forget(&track);
            }
        }
        outbox.flush();
    }

    fn forget(&self, track: &Arc<LiveTrack>) {
        let mut tracks = self.tracks.write();
        // Ours and the map's: nobody is about to use it.
        if Arc::strong_count(track) <= 2 {
            tracks.remove(track.name());
            drop(tracks);
            self.cache.forget(&track.data);
        }
    }
}

impl Namespaces {
    fn next_id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }

    fn announce(&mut self, namespace: &Namespace, event: NamespaceEvent) {
        tell(&mut self.watchers, namespace, &event);
    }
}

impl<E> Watcher<E> {
    fn new(id: u64, prefix: Namespace, present: Vec<E>) -> (Self, mpsc::Receiver<E>) {
        let (events, receiver) = mpsc::channel(present.len() + WATCH_BACKLOG);
        for event in present {
            let _ = events.try_send(event); // there is room
        }
        (Self { id, prefix, events }, receiver)
    }
}

/// Tells those who watch `namespace`; one that does not keep up is dropped, and its events end.
fn tell<E: Clone>(watchers: &mut Vec<Watcher<E>>, namespace: &Namespace, event: &E) {
    watchers.retain(|watcher| {
        !watcher.prefix.is_prefix_of(namespace) || watcher.events.try_send(event.clone()).is_ok()
    });
}
