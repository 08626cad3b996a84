//! What a publisher has: tracks, their recent objects, and who listens to them.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use millrace_moq::name::NameError;
use millrace_moq::{GroupOrder, Location, Namespace, Properties, SubgroupId, TrackName};
use parking_lot::Mutex;
use tokio::sync::{mpsc, watch};

/// How much of a track is kept for subscribers that lag or come late, and for FETCH.
#[derive(Clone, Copy, Debug)]
pub struct History {
    pub max_age: Duration,
    /// Bytes of payload.
    pub max_bytes: usize,
}

impl Default for History {
    fn default() -> Self {
        Self { max_age: Duration::from_secs(10), max_bytes: 64 << 20 }
    }
}

/// The tracks of one namespace.
pub struct Broadcast {
    namespace: Namespace,
    history: History,
    /// The ID of group 0 of all its tracks.
    first_group: Arc<AtomicU64>,
    tracks: Mutex<BTreeMap<Bytes, Arc<Track>>>,
    /// Whether the broadcast is over; also sent when there is a new track.
    ended: watch::Sender<bool>,
}

impl Broadcast {
    pub fn new(namespace: Namespace, history: History) -> Arc<Self> {
        Arc::new(Self {
            namespace,
            history,
            first_group: Arc::default(),
            tracks: Mutex::new(BTreeMap::new()),
            ended: watch::Sender::new(false),
        })
    }

    pub fn namespace(&self) -> &Namespace {
        &self.namespace
    }

    /// Has the groups of all tracks begin at this ID instead of 0. Called before any group is opened.
    pub fn number_groups_from(&self, first: u64) {
        self.first_group.store(first, Ordering::Relaxed);
    }

    /// Returns the ID on the wire of what [`Track::open`] calls group 0. Whoever names a group elsewhere than there, such as in
    /// a timeline, adds this to its number.
    pub fn first_group(&self) -> u64 {
        self.first_group.load(Ordering::Relaxed)
    }

    /// Makes a track, or replaces the one of the same name.
    pub fn create(&self, name: &str, properties: Properties) -> Result<Arc<Track>, NameError> {
        let name = TrackName::new(self.namespace.clone(), name.to_owned())?;
        let track = Arc::new(Track {
            name: name.clone(),
            properties,
            history: self.history,
            first_group: Arc::clone(&self.first_group),
            state: Mutex::new(State::default()),
        });
        self.tracks.lock().insert(name.name().clone(), track.clone());
        self.ended.send_modify(|_| {});
        Ok(track)
    }

    /// Ends a track, and has nobody find it any more.
    pub fn remove(&self, track: &Arc<Track>) {
        let mut tracks = self.tracks.lock();
        // Another may have its name by now.
        if tracks.get(track.name.name()).is_some_and(|known| Arc::ptr_eq(known, track)) {
            tracks.remove(track.name.name());
        }
        drop(tracks);
        track.end();
    }

    pub fn get(&self, name: &TrackName) -> Option<Arc<Track>> {
        let track = self.tracks.lock().get(name.name()).cloned();
        track.filter(|track| track.name == *name)
    }

    pub fn tracks(&self) -> Vec<Arc<Track>> {
        self.tracks.lock().values().cloned().collect()
    }

    /// Whether the broadcast is over. Changes whenever a track is made, too.
    pub fn ended(&self) -> watch::Receiver<bool> {
        self.ended.subscribe()
    }

    /// There will be no more tracks, and no more objects on those that there are.
    pub fn end(&self) {
        self.tracks().iter().for_each(|track| track.end());
        self.ended.send_replace(true);
    }
}

/// Returns the group ID that a broadcast begins with now: milliseconds since 1970, and above `largest`, the last group that a relay
/// still has of it, where the clock has gone back. A publisher that comes back is never behind where it was, and JavaScript
/// holds such numbers exactly.
pub fn group_of_now(largest: Option<u64>) -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let millis = u64::try_from(now.as_millis()).unwrap_or(u64::MAX).min(LAST_FIRST_GROUP);
    largest.filter(|largest| *largest < LAST_FIRST_GROUP).map_or(millis, |largest| millis.max(largest + 1))
}

/// Leaves half of the numbers that JavaScript holds exactly to the groups that follow.
const LAST_FIRST_GROUP: u64 = 1 << 52;

/// An object that goes as a datagram.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DatagramObject {
    pub location: Location,
    pub priority: u8,
    pub payload: Bytes,
}

/// What a listener hears, as it happens. Weak: what history lets go of is not held by those who lag.
#[derive(Clone)]
pub enum Event {
    Subgroup(Weak<Subgroup>),
    Datagram(Weak<DatagramObject>),
    End,
}

enum Item {
    Subgroup(Arc<Subgroup>),
    Datagram(Arc<DatagramObject>),
}

struct Held {
    item: Item,
    since: Instant,
}

impl Held {
    /// Since when nothing was added to it.
    fn since(&self) -> Instant {
        match &self.item {
            Item::Subgroup(subgroup) => subgroup.objects.lock().last_at.unwrap_or(self.since),
            Item::Datagram(_) => self.since,
        }
    }

    /// The bytes that history no longer counts.
    fn let_go(&self) -> usize {
        match &self.item {
            Item::Subgroup(subgroup) => {
                let mut objects = subgroup.objects.lock();
                objects.is_held = false;
                objects.bytes
            }
            Item::Datagram(datagram) => datagram.payload.len(),
        }
    }

    fn group(&self) -> u64 {
        match &self.item {
            Item::Subgroup(subgroup) => subgroup.group,
            Item::Datagram(datagram) => datagram.location.group,
        }
    }

    fn event(&self) -> Event {
        match &self.item {
            Item::Subgroup(subgroup) => Event::Subgroup(Arc::downgrade(subgroup)),
            Item::Datagram(datagram) => Event::Datagram(Arc::downgrade(datagram)),
        }
    }
}

#[derive(Default)]
struct State {
    held: VecDeque<Held>,
    /// Of payload in `held`.
    bytes: usize,
    largest: Option<Location>,
    ended: bool,
    listeners: Vec<mpsc::UnboundedSender<Event>>,
}

/// One track: a writer's side, and listeners.
pub struct Track {
    name: TrackName,
    properties: Properties,
    history: History,
    /// Its broadcast's.
    first_group: Arc<AtomicU64>,
    state: Mutex<State>,
}

/// A place in a track from which everything is heard once.
pub struct Listener {
    /// What is held of the groups from `first_group` on, and then what comes.
    pub events: mpsc::UnboundedReceiver<Event>,
    /// The largest location when listening began: the joining location.
    pub largest: Option<Location>,
}

/// An object as FETCH returns it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredObject {
    pub location: Location,
    /// Absent for a datagram.
    pub subgroup: Option<u64>,
    pub priority: u8,
    pub payload: Bytes,
}

impl Track {
    pub fn name(&self) -> &TrackName {
        &self.name
    }

    pub fn properties(&self) -> &Properties {
        &self.properties
    }

    pub fn largest(&self) -> Option<Location> {
        self.state.lock().largest
    }

    pub fn is_ended(&self) -> bool {
        self.state.lock().ended
    }

    /// Begins a subgroup; what is written to it is heard at once. `group` counts from [`Broadcast::first_group`] on.
    pub fn open(self: &Arc<Self>, group: u64, id: SubgroupId, priority: u8) -> SubgroupWriter {
        let group = self.wire_group(group);
        let subgroup = Arc::new(Subgroup {
            group,
            id,
            priority,
            objects: Mutex::new(Objects { is_held: true, ..Objects::default() }),
            changed: watch::Sender::new(()),
        });
        self.hold(&mut self.state.lock(), Item::Subgroup(subgroup.clone()));
        SubgroupWriter { track: self.clone(), subgroup }
    }

    /// Sends an object as a datagram. The group of its location counts from [`Broadcast::first_group`] on.
    pub fn send_datagram(&self, mut object: DatagramObject) {
        object.location.group = self.wire_group(object.location.group);
        let (location, bytes) = (object.location, object.payload.len());
        let mut state = self.state.lock();
        state.largest = state.largest.max(Some(location));
        state.bytes += bytes;
        self.hold(&mut state, Item::Datagram(Arc::new(object)));
    }

    fn wire_group(&self, group: u64) -> u64 {
        self.first_group.load(Ordering::Relaxed).saturating_add(group)
    }

    fn add(&self, subgroup: &Subgroup, id: u64, payload: Bytes) {
        let mut state = self.state.lock();
        let mut objects = subgroup.objects.lock();
        state.largest = state.largest.max(Some(Location::new(subgroup.group, id)));
        if objects.is_held {
            state.bytes += payload.len();
        }
        objects.bytes += payload.len();
        objects.last_at = Some(Instant::now());
        objects.list.push((id, payload));
    }

    fn hold(&self, state: &mut State, item: Item) {
        let held = Held { item, since: Instant::now() };
        let event = held.event();
        state.listeners.retain(|listener| listener.send(event.clone()).is_ok());
        state.held.push_back(held);
        state.evict(self.history);
    }

    pub fn end(&self) {
        let mut state = self.state.lock();
        state.ended = true;
        for listener in std::mem::take(&mut state.listeners) {
            // The receiver may be gone: nobody is left to tell.
            let _ = listener.send(Event::End);
        }
    }

    /// Listens from what is held of group `first_group`, or of the newest group, on.
    pub fn listen(&self, first_group: Option<u64>) -> Listener {
        let (sender, events) = mpsc::unbounded_channel();
        let mut state = self.state.lock();
        let newest = state.held.iter().map(Held::group).max().unwrap_or(0);
        let first = first_group.unwrap_or(newest);
        // Sends cannot fail: the receiver is here.
        for held in state.held.iter().filter(|held| held.group() >= first) {
            let _ = sender.send(held.event());
        }
        match state.ended {
            true => drop(sender.send(Event::End)),
            false => state.listeners.push(sender),
        }
        Listener { events, largest: state.largest }
    }

    /// The oldest group of which something is held.
    pub fn oldest_group(&self) -> Option<u64> {
        self.state.lock().held.iter().map(Held::group).min()
    }

    /// The objects that are held from `start` to `last`, in the order of a FETCH response.
    pub fn range(&self, start: Location, last: Location, order: GroupOrder) -> Vec<StoredObject> {
        let mut found = Vec::new();
        for held in &self.state.lock().held {
            match &held.item {
                Item::Subgroup(subgroup) => found.extend(subgroup.stored()),
                Item::Datagram(datagram) => found.push(StoredObject {
                    location: datagram.location,
                    subgroup: None,
                    priority: datagram.priority,
                    payload: datagram.payload.clone(),
                }),
            }
        }
        found.retain(|object| (start..=last).contains(&object.location));
        found.sort_by_key(|object| match order {
            GroupOrder::Ascending => (object.location.group, object.location.object),
            GroupOrder::Descending => (u64::MAX - object.location.group, object.location.object),
        });
        found.dedup_by_key(|object| object.location);
        found
    }
}

impl State {
    /// Lets go of what is too old or too much, but never of the newest item.
    fn evict(&mut self, history: History) {
        while self.held.len() > 1 {
            let Some(oldest) = self.held.front() else { return };
            if self.bytes <= history.max_bytes && oldest.since().elapsed() <= history.max_age {
                return;
            }
            self.bytes -= oldest.let_go();
            self.held.pop_front();
        }
    }
}

#[derive(Default)]
struct Objects {
    list: Vec<(u64, Bytes)>,
    bytes: usize,
    /// Whether the track's history counts this.
    is_held: bool,
    /// When the last object was added, or the end came.
    last_at: Option<Instant>,
    ended: bool,
}

/// A subgroup: objects so far, and more to come until it ends.
pub struct Subgroup {
    pub group: u64,
    pub id: SubgroupId,
    pub priority: u8,
    objects: Mutex<Objects>,
    changed: watch::Sender<()>,
}

impl Subgroup {
    /// Changes whenever objects are added or the subgroup ends.
    pub fn changed(&self) -> watch::Receiver<()> {
        self.changed.subscribe()
    }

    /// The objects from the `index`-th on, and whether they are the last.
    pub fn from(&self, index: usize) -> (Vec<(u64, Bytes)>, bool) {
        let objects = self.objects.lock();
        (objects.list.get(index..).unwrap_or_default().to_vec(), objects.ended)
    }

    fn stored(&self) -> Vec<StoredObject> {
        let objects = self.objects.lock();
        let first = objects.list.first().map_or(0, |(id, _)| *id);
        let subgroup = match self.id {
            SubgroupId::Zero => 0,
            SubgroupId::FirstObject => first,
            SubgroupId::Explicit(id) => id,
        };
        let stored = |(id, payload): &(u64, Bytes)| StoredObject {
            location: Location::new(self.group, *id),
            subgroup: Some(subgroup),
            priority: self.priority,
            payload: payload.clone(),
        };
        objects.list.iter().map(stored).collect()
    }
}

/// Adds to a subgroup, which ends when this is dropped.
pub struct SubgroupWriter {
    track: Arc<Track>,
    subgroup: Arc<Subgroup>,
}

impl SubgroupWriter {
    pub fn group(&self) -> u64 {
        self.subgroup.group
    }

    /// Adds an object; IDs ascend.
    pub fn write(&mut self, id: u64, payload: Bytes) {
        self.track.add(&self.subgroup, id, payload);
        self.subgroup.changed.send_replace(());
    }
}

impl Drop for SubgroupWriter {
    fn drop(&mut self) {
        let mut objects = self.subgroup.objects.lock();
        (objects.ended, objects.last_at) = (true, Some(Instant::now()));
        drop(objects);
        self.subgroup.changed.send_replace(());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn track(history: History) -> Arc<Track> {
        let broadcast = Broadcast::new(Namespace::from_path("a").unwrap(), history);
        broadcast.create("t", Properties::default()).unwrap()
    }

    fn groups(listener: &mut Listener) -> Vec<u64> {
        let mut groups = Vec::new();
        while let Ok(Event::Subgroup(subgroup)) = listener.events.try_recv() {
            groups.extend(subgroup.upgrade().map(|subgroup| subgroup.group));
        }
        groups
    }

    #[test]
    fn a_listener_hears_the_newest_group_and_what_follows() {
        let track = track(History::default());
        for group in 0..3 {
            track.open(group, SubgroupId::Zero, 0).write(0, Bytes::from_static(b"x"));
        }
        let mut newest = track.listen(None);
        let mut all = track.listen(Some(1));
        track.open(3, SubgroupId::Zero, 0);
        assert_eq!(newest.largest, Some(Location::new(2, 0)));
        assert_eq!(groups(&mut newest), [2, 3]);
        assert_eq!(groups(&mut all), [1, 2, 3]);
        track.end();
        let mut late = track.listen(None);
        assert!(matches!(late.events.try_recv(), Ok(Event::Subgroup(_))));
        assert!(matches!(late.events.try_recv(), Ok(Event::End)));
    }

    #[test]
    fn all_tracks_of_a_broadcast_are_numbered_from_its_first_group() {
        let broadcast = Broadcast::new(Namespace::from_path("a").unwrap(), History::default());
        let early = broadcast.create("early", Properties::default()).unwrap();
        broadcast.number_groups_from(1000);
        let late = broadcast.create("late", Properties::default()).unwrap();
        for track in [&early, &late] {
            track.open(2, SubgroupId::Zero, 0).write(0, Bytes::from_static(b"x"));
            assert_eq!(track.largest(), Some(Location::new(1002, 0)));
        }
        let location = Location::new(3, 1);
        late.send_datagram(DatagramObject { location, priority: 0, payload: Bytes::new() });
        assert_eq!(late.largest(), Some(Location::new(1003, 1)));
    }

    #[test]
    fn first_group_is_the_time_and_above_what_a_relay_has() {
        let now = group_of_now(None);
        // From 2020 on, for the next 100,000 years.
        assert!((1_577_836_800_000..LAST_FIRST_GROUP).contains(&now), "{now}");
        assert!(group_of_now(Some(17)) >= now);
        assert_eq!(group_of_now(Some(now + 86_400_000)), now + 86_400_001, "the clock went back by a day");
        // What no publisher of ours has reached is nobody's clock.
        assert!(group_of_now(Some(u64::MAX)) < LAST_FIRST_GROUP);
    }

    #[test]
    fn history_is_bounded_and_those_who_lag_do_not_hold_it() {
        let track = track(History { max_bytes: 25, ..History::default() });
        let mut listener = track.listen(None);
        let mut kept_open = track.open(0, SubgroupId::Zero, 0);
        for group in 1..6 {
            track.open(group, SubgroupId::Zero, 0).write(0, Bytes::from(vec![0; 10]));
            kept_open.write(group, Bytes::from(vec![0; 10]));
        }
        // Eviction happens when an item comes, before it is written to.
        assert_eq!(track.oldest_group(), Some(3));
        assert_eq!(track.state.lock().bytes, 30);
        drop(kept_open);
        assert_eq!(groups(&mut listener), [3, 4, 5]);
    }

    /// Its end is still to be sent when the next one begins.
    #[test]
    fn a_long_group_is_as_old_as_its_last_object() {
        let track = track(History { max_age: Duration::from_secs(10), ..History::default() });
        let long_ago = Instant::now() - Duration::from_secs(11);
        let mut long = track.open(0, SubgroupId::Zero, 0);
        track.state.lock().held[0].since = long_ago;
        long.write(0, Bytes::from_static(b"x"));
        track.open(1, SubgroupId::Zero, 0);
        assert_eq!(track.oldest_group(), Some(0));
        long.subgroup.objects.lock().last_at = Some(long_ago);
        track.open(2, SubgroupId::Zero, 0);
        assert_eq!(track.oldest_group(), Some(1));
    }

    #[test]
    fn ranges_come_in_the_order_of_a_fetch() {
        let track = track(History::default());
        for group in 0..3 {
            let mut odd = track.open(group, SubgroupId::Explicit(1), 0);
            let mut even = track.open(group, SubgroupId::Zero, 0);
            odd.write(1, Bytes::new());
            even.write(0, Bytes::new());
            even.write(2, Bytes::new());
        }
        let ids = |order| -> Vec<_> {
            let found = track.range(Location::new(0, 1), Location::new(1, 1), order);
            found.iter().map(|object| (object.location.group, object.location.object)).collect()
        };
        assert_eq!(ids(GroupOrder::Ascending), [(0, 1), (0, 2), (1, 0), (1, 1)]);
        assert_eq!(ids(GroupOrder::Descending), [(1, 0), (1, 1), (0, 1), (0, 2)]);
    }
}
