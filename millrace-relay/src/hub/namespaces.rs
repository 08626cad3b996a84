//! Who publishes which namespaces, and who watches them.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{Arc, Weak},
};

use millrace_proto::moq::Namespace;
use parking_lot::Mutex;
use tokio::sync::mpsc;

use super::publisher::{Publisher, Requester};
use crate::live::LiveTrack;

/// Changes that a watcher may be behind by, besides what was there when it began.
const WATCH_BACKLOG: usize = 1024;

/// The publishers of a relay by namespace, and their watchers.
#[derive(Default)]
pub struct Namespaces(Mutex<State>);

#[derive(Default)]
struct State {
    publishers: BTreeMap<Namespace, Vec<Entry>>,
    watchers: Watchers<NamespaceEvent>,
    track_watchers: Watchers<Arc<LiveTrack>>,
    next_id: u64,
}

/// A session that publishes a namespace.
struct Entry {
    publisher: Weak<dyn Publisher>,
    session: u64,
    /// It is the configured upstream relay.
    is_upstream: bool,
    /// The relay's configured upstream: asked only if nobody nearer publishes the namespace.
    fallback: bool,
}

/// By the prefix that they watch.
type Watchers<E> = HashMap<Namespace, Vec<Watcher<E>>>;

struct Watcher<E> {
    id: u64,
    events: mpsc::Sender<E>,
}

/// A namespace below a watched prefix appeared or went.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NamespaceEvent {
    Published(Namespace),
    Done(Namespace),
}

/// A watch on a prefix; ends when dropped. Its events end when it does not keep up with them.
pub struct Watch<E> {
    namespaces: Weak<Namespaces>,
    prefix: Namespace,
    id: u64,
    pub events: mpsc::Receiver<E>,
}

impl<E> Drop for Watch<E> {
    fn drop(&mut self) {
        if let Some(namespaces) = self.namespaces.upgrade() {
            let mut state = namespaces.0.lock();
            forget(&mut state.watchers, &self.prefix, self.id);
            forget(&mut state.track_watchers, &self.prefix, self.id);
        }
    }
}

/// A published namespace; withdrawn when dropped.
pub struct Publication {
    namespaces: Weak<Namespaces>,
    namespace: Namespace,
    session: u64,
}

impl Drop for Publication {
    fn drop(&mut self) {
        if let Some(namespaces) = self.namespaces.upgrade() {
            namespaces.withdraw(&self.namespace, self.session);
        }
    }
}

impl Namespaces {
    pub fn publish(
        self: &Arc<Self>,
        namespace: Namespace,
        publisher: &Arc<dyn Publisher>,
        fallback: bool,
    ) -> Publication {
        let session = publisher.id();
        let mut state = self.0.lock();
        let entries = state.publishers.entry(namespace.clone()).or_default();
        let first = entries.is_empty();
        let is_upstream = publisher.is_upstream();
        entries.push(Entry { publisher: Arc::downgrade(publisher), session, is_upstream, fallback });
        if first && !fallback {
            state.announce(&namespace, NamespaceEvent::Published(namespace.clone()));
        }
        Publication { namespaces: Arc::downgrade(self), namespace, session }
    }

    fn withdraw(&self, namespace: &Namespace, session: u64) {
        let mut state = self.0.lock();
        let Some(entries) = state.publishers.get_mut(namespace) else { return };
        if let Some(index) = entries.iter().position(|entry| entry.session == session) {
            entries.remove(index);
        }
        if entries.is_empty() {
            state.publishers.remove(namespace);
            state.announce(namespace, NamespaceEvent::Done(namespace.clone()));
        }
    }

    /// Those that publish `namespace` or a prefix of it, as `requester` may be sent to them: the configured
    /// upstream only if there is nobody else, and never if it is the requester.
    pub fn publishers_of(&self, namespace: &Namespace, requester: Requester) -> Vec<Arc<dyn Publisher>> {
        let state = self.0.lock();
        let mut found: Vec<(bool, Arc<dyn Publisher>)> = Vec::new();
        for prefix in namespace.prefixes() {
            for entry in state.publishers.get(&prefix).into_iter().flatten() {
                let Some(publisher) = entry.publisher.upgrade() else { continue };
                let loops = requester.is_upstream && entry.is_upstream;
                if !loops && !found.iter().any(|(_, other)| other.id() == entry.session) {
                    found.push((entry.fallback, publisher));
                }
            }
        }
        let near = found.iter().any(|(fallback, _)| !fallback);
        found.into_iter().filter(|(fallback, _)| !near || !fallback).map(|(_, publisher)| publisher).collect()
    }

    /// Whether anybody but the upstream relay publishes exactly `namespace`.
    pub fn is_published_here(&self, namespace: &Namespace) -> bool {
        let state = self.0.lock();
        let entries = state.publishers.get(namespace);
        entries.is_some_and(|entries| entries.iter().any(|entry| !entry.is_upstream))
    }

    /// Watches the namespaces below `prefix`, those that are there first.
    pub fn watch(self: &Arc<Self>, prefix: Namespace) -> Watch<NamespaceEvent> {
        let mut state = self.0.lock();
        let real = |entries: &[Entry]| entries.iter().any(|entry| !entry.fallback);
        let present: Vec<_> = state
            .publishers
            .range(&prefix..)
            .take_while(|(namespace, _)| prefix.is_prefix_of(namespace))
            .filter(|(_, entries)| real(entries))
            .map(|(namespace, _)| NamespaceEvent::Published(namespace.clone()))
            .collect();
        let id = state.next_id();
        let (watcher, events) = Watcher::new(id, present);
        state.watchers.entry(prefix.clone()).or_default().push(watcher);
        Watch { namespaces: Arc::downgrade(self), prefix, id, events }
    }

    /// Watches for tracks below `prefix`. `present`, those that come first, is looked up while none can be missed.
    pub fn watch_tracks(
        self: &Arc<Self>,
        prefix: Namespace,
        present: impl FnOnce(&Namespace) -> Vec<Arc<LiveTrack>>,
    ) -> Watch<Arc<LiveTrack>> {
        let mut state = self.0.lock();
        let present = present(&prefix);
        let id = state.next_id();
        let (watcher, events) = Watcher::new(id, present);
        state.track_watchers.entry(prefix.clone()).or_default().push(watcher);
        Watch { namespaces: Arc::downgrade(self), prefix, id, events }
    }

    /// A track has its first publisher.
    pub fn announce_track(&self, track: &Arc<LiveTrack>) {
        tell(&mut self.0.lock().track_watchers, track.name().namespace(), track);
    }
}

impl State {
    fn next_id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }

    fn announce(&mut self, namespace: &Namespace, event: NamespaceEvent) {
        tell(&mut self.watchers, namespace, &event);
    }
}

impl<E> Watcher<E> {
    fn new(id: u64, present: Vec<E>) -> (Self, mpsc::Receiver<E>) {
        let (events, receiver) = mpsc::channel(present.len() + WATCH_BACKLOG);
        for event in present {
            let _ = events.try_send(event); // there is room
        }
        (Self { id, events }, receiver)
    }
}

/// Tells those who watch `namespace`; one that does not keep up is dropped, and its events end.
fn tell<E: Clone>(watchers: &mut Watchers<E>, namespace: &Namespace, event: &E) {
    for prefix in namespace.prefixes() {
        if let Some(those) = watchers.get_mut(&prefix) {
            those.retain(|watcher| watcher.events.try_send(event.clone()).is_ok());
        }
    }
}

fn forget<E>(watchers: &mut Watchers<E>, prefix: &Namespace, id: u64) {
    if let Some(those) = watchers.get_mut(prefix) {
        those.retain(|watcher| watcher.id != id);
        if those.is_empty() {
            watchers.remove(prefix);
        }
    }
}
