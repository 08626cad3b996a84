//! The registry of namespaces: sessions that publish them, and sessions that watch them.

use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    ops::Bound::Included,
    sync::{Arc, Weak},
    time::Instant as Time,
};

use millrace_moq::{HopPath, Namespace};
use millrace_relay_cluster::{AnnouncementKey, RouteTable};
use parking_lot::Mutex;
use tokio::{
    sync::mpsc,
    time::{Instant, sleep_until},
};

use super::{
    pages::{self, Pages},
    publisher::{HubPublisher, Requester},
    route_watch::RouteWatchers,
};
use crate::live::LiveTrack;

/// Number of events that may be queued for one watcher. A watcher that falls further behind is dropped.
const WATCH_BACKLOG: usize = 1024;

/// The publishers of a relay by namespace, and the sessions that watch namespaces.
#[derive(Default)]
pub struct PublisherNamespaces(pub(super) Mutex<NamespaceState>);

#[derive(Default)]
pub(super) struct NamespaceState {
    publishers: BTreeMap<Namespace, Vec<NamespaceEntry>>,
    /// The namespaces that were announced to watching clients.
    pub(super) announced: BTreeMap<Namespace, ()>,
    watchers: Watchers<NamespaceEvent>,
    track_watchers: Watchers<Arc<LiveTrack>>,
    /// The routes of the cluster, from other relays and from publishers here. `None` if the relay is in no cluster.
    pub(super) table: Option<RouteTable>,
    /// The relays that announce routes, by the ID of their session.
    pub(super) relays: HashMap<u64, Weak<dyn HubPublisher>>,
    pub(super) route_watchers: RouteWatchers,
    next_id: u64,
}

/// A session that publishes a namespace.
struct NamespaceEntry {
    publisher: Weak<dyn HubPublisher>,
    session: u64,
    /// True if the publisher is the configured upstream relay.
    is_upstream: bool,
    /// True if the publisher is used only while no other one publishes the namespace, as is the case for the configured
    /// upstream relay.
    fallback: bool,
    number: u64,
}

/// The sessions at which the relay may subscribe to a track.
#[derive(Default)]
pub struct Publishers {
    pub all: Vec<Arc<dyn HubPublisher>>,
    /// True if the publishers are relays with the same media. This relay then sends SUBSCRIBE to one publisher at a
    /// time, in the order of the list.
    pub in_turn: bool,
}

/// Watching sessions, by the namespace prefix that they watch.
type Watchers<E> = HashMap<Namespace, Vec<NamespaceWatcher<E>>>;

struct NamespaceWatcher<E> {
    id: u64,
    events: mpsc::Sender<E>,
}

/// A namespace below a watched prefix was published or withdrawn.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NamespaceEvent {
    Published(Namespace),
    Done(Namespace),
}

/// A watch on a namespace prefix. Dropping it ends the watch.
pub struct NamespaceWatch<E> {
    namespaces: Weak<PublisherNamespaces>,
    prefix: Namespace,
    id: u64,
    /// Namespaces or tracks of the current page of the listing, which `next` has not returned yet.
    page: VecDeque<E>,
    /// The remaining pages of the namespaces or tracks that existed when the watch began.
    present: Option<Pages<E>>,
    /// The time at which the next page of the listing may be read.
    due: Option<Instant>,
    events: mpsc::Receiver<E>,
}

impl<E> NamespaceWatch<E> {
    /// Returns the namespaces or tracks that existed when the watch began, then each change. A change during the
    /// listing may be returned twice. Returns `None` once the watcher has fallen behind. `pace` returns the time at
    /// which the next page may be read. Cancel safe.
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

impl<E> Drop for NamespaceWatch<E> {
    fn drop(&mut self) {
        if let Some(namespaces) = self.namespaces.upgrade() {
            let mut state = namespaces.0.lock();
            forget(&mut state.watchers, &self.prefix, self.id);
            forget(&mut state.track_watchers, &self.prefix, self.id);
        }
    }
}

/// A published namespace. Dropping it withdraws the namespace.
pub struct Publication {
    namespaces: Weak<PublisherNamespaces>,
    namespace: Namespace,
    key: AnnouncementKey,
}

impl Drop for Publication {
    fn drop(&mut self) {
        if let Some(namespaces) = self.namespaces.upgrade() {
            namespaces.withdraw(&self.namespace, self.key);
        }
    }
}

impl PublisherNamespaces {
    pub fn publish(
        self: &Arc<Self>,
        namespace: Namespace,
        publisher: &Arc<dyn HubPublisher>,
        fallback: bool,
        path: Option<HopPath>,
    ) -> Publication {
        let mut state = self.0.lock();
        let key = AnnouncementKey { link: publisher.id(), number: state.next_id() };
        let is_upstream = publisher.is_upstream();
        let publisher = Arc::downgrade(publisher);
        let entry =
            NamespaceEntry { publisher, session: key.link, is_upstream, fallback, number: key.number };
        state.publishers.entry(namespace.clone()).or_default().push(entry);
        // Namespaces of the upstream relay are not announced in the cluster, since requests for them could come back
        // here in a circle.
        if !is_upstream && let Some(table) = &mut state.table {
            table.publish(key, &namespace, path, Time::now());
        }
        state.spread(&namespace);
        Publication { namespaces: Arc::downgrade(self), namespace, key }
    }

    fn withdraw(&self, namespace: &Namespace, key: AnnouncementKey) {
        let mut state = self.0.lock();
        if let Some(entries) = state.publishers.get_mut(namespace) {
            entries.retain(|entry| entry.number != key.number);
            if entries.is_empty() {
                state.publishers.remove(namespace);
            }
        }
        if let Some(table) = &mut state.table {
            table.withdraw(key, namespace, Time::now());
        }
        state.spread(namespace);
    }

    /// Returns the publishers of `namespace` or of a prefix of it that may serve `requester`. Relays of the cluster are
    /// preferred if they announce a longer prefix than every publisher here. The configured upstream relay is included
    /// only if there is no other publisher, and if the requester is neither the upstream nor a relay.
    pub fn publishers_of(&self, namespace: &Namespace, requester: Requester) -> Publishers {
        let state = self.0.lock();
        let mut found: Vec<(bool, Arc<dyn HubPublisher>)> = Vec::new();
        let mut longest = None;
        for prefix in namespace.prefixes() {
            for entry in state.publishers.get(&prefix).into_iter().flatten() {
                let Some(publisher) = entry.publisher.upgrade() else { continue };
                let loops = entry.is_upstream && (requester.is_upstream || requester.is_relay);
                if !loops && !found.iter().any(|(_, other)| other.id() == entry.session) {
                    found.push((entry.fallback, publisher));
                }
                if !loops && !entry.fallback {
                    longest = Some(prefix.fields().len());
                }
            }
        }
        let routed = state.relays_of(namespace, requester.neighbour(), longest);
        if !routed.is_empty() {
            return Publishers { all: routed, in_turn: true };
        }
        // The upstream relay is used last, even for namespaces that it has announced itself.
        let near = found.iter().any(|(fallback, _)| !fallback);
        let asked = found.into_iter().filter(|(fallback, _)| !near || !fallback);
        Publishers { all: asked.map(|(_, publisher)| publisher).collect(), in_turn: false }
    }

    /// Reports whether a publisher other than the upstream relay has announced exactly `namespace`.
    pub fn is_published_here(&self, namespace: &Namespace) -> bool {
        let state = self.0.lock();
        let entries = state.publishers.get(namespace);
        entries.is_some_and(|entries| entries.iter().any(|entry| !entry.is_upstream))
    }

    /// Watches the namespaces below `prefix`. The watch first lists the namespaces that are published now.
    pub fn watch(self: &Arc<Self>, prefix: Namespace) -> NamespaceWatch<NamespaceEvent> {
        self.watch_with(|state| &mut state.watchers, prefix.clone(), self.below(prefix))
    }

    /// Returns an event [`NamespaceEvent::Published`] for each namespace below `prefix` that was announced to clients.
    fn below(self: &Arc<Self>, prefix: Namespace) -> Pages<NamespaceEvent> {
        self.announced_below(prefix, |namespace| NamespaceEvent::Published(namespace.clone()))
    }

    /// Lists the namespaces below `prefix` that were announced to clients, page by page.
    pub(super) fn announced_below<E: 'static>(
        self: &Arc<Self>,
        prefix: Namespace,
        take: fn(&Namespace) -> E,
    ) -> Pages<E> {
        let namespaces = Arc::clone(self);
        let mut behind = Included(prefix.clone());
        Box::new(move || {
            let state = namespaces.0.lock();
            let below = |namespace: &Namespace| prefix.is_prefix_of(namespace);
            pages::page(&state.announced, &mut behind, below, |namespace, ()| Some(take(namespace)))
        })
    }

    /// Watches for tracks below `prefix`. The watch first lists the tracks in `present`, which exist already.
    pub fn watch_tracks(
        self: &Arc<Self>,
        prefix: Namespace,
        present: Pages<Arc<LiveTrack>>,
    ) -> NamespaceWatch<Arc<LiveTrack>> {
        self.watch_with(|state| &mut state.track_watchers, prefix, present)
    }

    /// Registers a watcher. The existing entries are listed after the registration, so an entry may be listed twice and
    /// is never missed.
    fn watch_with<E>(
        self: &Arc<Self>,
        watchers: impl Fn(&mut NamespaceState) -> &mut Watchers<E>,
        prefix: Namespace,
        present: Pages<E>,
    ) -> NamespaceWatch<E> {
        let (sender, events) = mpsc::channel(WATCH_BACKLOG);
        let mut state = self.0.lock();
        let id = state.next_id();
        watchers(&mut state).entry(prefix.clone()).or_default().push(NamespaceWatcher { id, events: sender });
        let namespaces = Arc::downgrade(self);
        let present = Some(present);
        NamespaceWatch { namespaces, prefix, id, page: VecDeque::new(), present, due: None, events }
    }

    /// Tells watchers that `namespace` and each published prefix of it was withdrawn and published again.
    pub fn announce_again(&self, namespace: &Namespace) {
        let mut state = self.0.lock();
        let published: Vec<_> =
            namespace.prefixes().filter(|prefix| state.announced.contains_key(prefix)).collect();
        for namespace in published {
            state.announce(&namespace, NamespaceEvent::Done(namespace.clone()));
            state.announce(&namespace, NamespaceEvent::Published(namespace.clone()));
        }
    }

    /// Tells watchers that a track has its first publisher.
    pub fn announce_track(&self, track: &Arc<LiveTrack>) {
        tell(&mut self.0.lock().track_watchers, track.name().namespace(), track);
    }
}

impl NamespaceState {
    pub(super) fn next_id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }

    /// Returns the publisher of this relay that has announced `namespace` or a prefix of it in this session.
    pub(super) fn publisher_in(&self, namespace: &Namespace, session: u64) -> Option<Arc<dyn HubPublisher>> {
        let mut entries = namespace.prefixes().filter_map(|prefix| self.publishers.get(&prefix)).flatten();
        entries.find(|entry| entry.session == session)?.publisher.upgrade()
    }

    /// Adds the namespaces of all publishers to a new table of routes.
    pub(super) fn publish_all(&mut self) {
        let Some(table) = &mut self.table else { return };
        for (namespace, entries) in &self.publishers {
            for entry in entries.iter().filter(|entry| !entry.is_upstream) {
                let key = AnnouncementKey { link: entry.session, number: entry.number };
                table.publish(key, namespace, None, Time::now());
            }
        }
        self.spread(&Namespace::default());
    }

    /// Tells watchers whether `namespace`, and every namespace whose routes have changed, was published or withdrawn.
    pub(super) fn spread(&mut self, namespace: &Namespace) {
        self.retell(namespace);
        let changes = self.table.as_mut().map(RouteTable::take_changes).unwrap_or_default();
        for changed in changes {
            self.retell(&changed);
            self.route_watchers.tell(&changed);
        }
    }

    /// Tells watchers if this namespace has its first publisher or route, or has lost the last one.
    fn retell(&mut self, namespace: &Namespace) {
        let entries = self.publishers.get(namespace);
        let is_here = entries.is_some_and(|entries| entries.iter().any(|entry| !entry.fallback));
        let is_there = self.table.as_ref().is_some_and(|table| table.has(namespace));
        match (is_here || is_there, self.announced.contains_key(namespace)) {
            (true, false) => {
                self.announced.insert(namespace.clone(), ());
                self.announce(namespace, NamespaceEvent::Published(namespace.clone()));
            }
            (false, true) => {
                self.announced.remove(namespace);
                self.announce(namespace, NamespaceEvent::Done(namespace.clone()));
            }
            _ => {}
        }
    }

    fn announce(&mut self, namespace: &Namespace, event: NamespaceEvent) {
        tell(&mut self.watchers, namespace, &event);
    }
}

/// Sends an event to the watchers of `namespace` and of its prefixes. A watcher whose queue is full is dropped, which
/// ends its events.
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
