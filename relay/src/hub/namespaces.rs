//! Who publishes which namespaces, and who watches them.

use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    ops::Bound::Included,
    sync::{Arc, Weak},
};

use millrace_moq::Namespace;
use parking_lot::Mutex;
use tokio::{
    sync::mpsc,
    time::{Instant, sleep_until},
};

use super::{
    pages::{self, Pages},
    publisher::{Publisher, Requester},
};
use crate::live::LiveTrack;

/// Changes that a watcher may be behind by.
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

/// A watch on a prefix; ends when dropped.
pub struct Watch<E> {
    namespaces: Weak<Namespaces>,
    prefix: Namespace,
    id: u64,
    /// How far the entries that were there when it began have been looked at.
    page: VecDeque<E>,
    /// The rest of it.
    present: Option<Pages<E>>,
    /// When more of it may be looked at.
    due: Option<Instant>,
    events: mpsc::Receiver<E>,
}

impl<E> Watch<E> {
    /// Returns what was there when the watch began, then what changes; `None` once it has not kept up with the changes. What changes
    /// early may come twice. `pace` says when the next page of what was there may be looked at. Cancel safe.
    pub async fn next(&mut self, pace: impl Fn() -> Instant) -> Option<E> {
        loop {
            if let Some(event) = self.page.pop_front() {
                return Some(event);
            }
            let Some(present) = &mut self.present else { return self.events.recv().await };
            if let Some(due) = self.due {
                sleep_until(due).await;
            }
            let page = present();
            self.page = page.found.into();
            match page.more {
                true => self.due = Some(pace()),
                false => self.present = None,
            }
        }
    }
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
        self.watch_with(|state| &mut state.watchers, prefix.clone(), self.below(prefix))
    }

    /// Those that anybody but the upstream relay publishes below `prefix`, each as if it appeared.
    fn below(self: &Arc<Self>, prefix: Namespace) -> Pages<NamespaceEvent> {
        let (namespaces, mut behind) = (Arc::clone(self), Included(prefix.clone()));
        Box::new(move || {
            let take = |namespace: &Namespace, entries: &Vec<Entry>| {
                let is_real = entries.iter().any(|entry| !entry.fallback);
                is_real.then(|| NamespaceEvent::Published(namespace.clone()))
            };
            let state = namespaces.0.lock();
            pages::page(&state.publishers, &mut behind, |namespace| prefix.is_prefix_of(namespace), take)
        })
    }

    /// Watches for tracks below `prefix`. `present` are those that come first.
    pub fn watch_tracks(
        self: &Arc<Self>,
        prefix: Namespace,
        present: Pages<Arc<LiveTrack>>,
    ) -> Watch<Arc<LiveTrack>> {
        self.watch_with(|state| &mut state.track_watchers, prefix, present)
    }

    /// Registers a watcher. What is there is looked at afterwards, so that nothing is missed.
    fn watch_with<E>(
        self: &Arc<Self>,
        watchers: impl Fn(&mut State) -> &mut Watchers<E>,
        prefix: Namespace,
        present: Pages<E>,
    ) -> Watch<E> {
        let (sender, events) = mpsc::channel(WATCH_BACKLOG);
        let mut state = self.0.lock();
        let id = state.next_id();
        watchers(&mut state).entry(prefix.clone()).or_default().push(Watcher { id, events: sender });
        let (namespaces, present) = (Arc::downgrade(self), Some(present));
        Watch { namespaces, prefix, id, page: VecDeque::new(), present, due: None, events }
    }

    /// Tells watchers that the namespaces which hold `namespace` are withdrawn and published again.
    pub fn announce_again(&self, namespace: &Namespace) {
        let mut state = self.0.lock();
        let published: Vec<_> = namespace.prefixes().filter(|prefix| state.is_announced(prefix)).collect();
        for namespace in published {
            state.announce(&namespace, NamespaceEvent::Done(namespace.clone()));
            state.announce(&namespace, NamespaceEvent::Published(namespace.clone()));
        }
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

    fn is_announced(&self, namespace: &Namespace) -> bool {
        let entries = self.publishers.get(namespace);
        entries.is_some_and(|entries| entries.iter().any(|entry| !entry.fallback))
    }

    fn announce(&mut self, namespace: &Namespace, event: NamespaceEvent) {
        tell(&mut self.watchers, namespace, &event);
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
