//! A publisher's broadcast: its tracks, their recent objects, and the listeners through which sessions get new objects.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use millrace_moq::name::NameError;
use millrace_moq::{GroupOrder, Location, Namespace, Properties, SubgroupId, TrackName};
use parking_lot::Mutex;
use tokio::sync::{mpsc, watch};

/// Limits on the objects of a track that are kept for subscribers that lag or join late, and for FETCH.
#[derive(Clone, Copy, Debug)]
pub struct History {
    /// Age at which subgroups and datagrams are dropped from a track's history.
    pub max_age: Duration,
    /// Largest number of payload bytes that are kept in a track's history.
    pub max_bytes: usize,
}

impl Default for History {
    fn default() -> Self {
        Self { max_age: Duration::from_secs(10), max_bytes: 64 << 20 }
    }
}

/// The tracks of one namespace. A publisher [creates](Self::create) tracks and writes to them; servers on any number of
/// sessions [listen](BroadcastTrack::listen) to them. [`Broadcast::end`] ends the broadcast for good.
///
/// ```
/// use millrace_client::broadcast::{Broadcast, History};
/// use millrace_moq::{Namespace, Properties, SubgroupId};
///
/// # fn example() -> Result<(), Box<dyn std::error::Error>> {
/// let broadcast = Broadcast::new(Namespace::from_path("live/clock")?, History::default());
/// let track = broadcast.create("seconds", Properties::default())?;
/// // Group 0 with one object. Its subgroup ends when the writer is dropped.
/// track.open(0, SubgroupId::Zero, 128).write(0, "12:00:00".into());
/// broadcast.end();
/// # Ok(())
/// # }
/// # example().unwrap();
/// ```
pub struct Broadcast {
    namespace: Namespace,
    history: History,
    /// The group ID that is sent for the group that publishers call 0. It is the same in every track.
    first_group: Arc<AtomicU64>,
    tracks: Mutex<BTreeMap<Bytes, Arc<BroadcastTrack>>>,
    /// Whether the broadcast has ended. Receivers of this channel are also woken, without a change of the value, when a
    /// track is added.
    ended: watch::Sender<bool>,
}

impl Broadcast {
    /// Makes a broadcast without tracks.
    pub fn new(namespace: Namespace, history: History) -> Arc<Self> {
        Arc::new(Self {
            namespace,
            history,
            first_group: Arc::default(),
            tracks: Mutex::new(BTreeMap::new()),
            ended: watch::Sender::new(false),
        })
    }

    /// Returns the broadcast's namespace.
    pub fn namespace(&self) -> &Namespace {
        &self.namespace
    }

    /// Makes the groups of all tracks begin at this ID instead of 0. Call it before any group is opened.
    pub fn number_groups_from(&self, first: u64) {
        self.first_group.store(first, Ordering::Relaxed);
    }

    /// Returns the ID on the wire of the group that [`BroadcastTrack::open`] calls 0. Code that writes a group number
    /// into a payload, such as a timeline, has to add this ID.
    pub fn first_group(&self) -> u64 {
        self.first_group.load(Ordering::Relaxed)
    }

    /// Makes a track, or replaces the one with the same name.
    pub fn create(&self, name: &str, properties: Properties) -> Result<Arc<BroadcastTrack>, NameError> {
        let name = TrackName::new(self.namespace.clone(), name.to_owned())?;
        let track = Arc::new(BroadcastTrack {
            name: name.clone(),
            properties,
            history: self.history,
            first_group: Arc::clone(&self.first_group),
            state: Mutex::new(BroadcastState::default()),
        });
        self.tracks.lock().insert(name.name().clone(), track.clone());
        // Sending the unchanged value wakes the receivers of `ended`, so that they look for new tracks.
        self.ended.send_modify(|_| {});
        Ok(track)
    }

    /// Ends a track and removes it, so that it can no longer be found.
    pub fn remove(&self, track: &Arc<BroadcastTrack>) {
        let mut tracks = self.tracks.lock();
        // A newer track with the same name may have replaced this track. The newer track must not be removed.
        if tracks.get(track.name.name()).is_some_and(|known| Arc::ptr_eq(known, track)) {
            tracks.remove(track.name.name());
        }
        drop(tracks);
        track.end();
    }

    /// Returns the track with this full name.
    pub fn get(&self, name: &TrackName) -> Option<Arc<BroadcastTrack>> {
        let track = self.tracks.lock().get(name.name()).cloned();
        track.filter(|track| track.name == *name)
    }

    /// Returns all tracks.
    pub fn tracks(&self) -> Vec<Arc<BroadcastTrack>> {
        self.tracks.lock().values().cloned().collect()
    }

    /// Returns a receiver that says whether the broadcast has ended. The receiver is also woken when a track is added.
    pub fn ended(&self) -> watch::Receiver<bool> {
        self.ended.subscribe()
    }

    /// Ends the broadcast: there will be no more tracks and no more objects.
    pub fn end(&self) {
        self.tracks().iter().for_each(|track| track.end());
        self.ended.send_replace(true);
    }
}

/// Returns the group ID for a broadcast that begins now: milliseconds since 1970. If the clock has been set back, the
/// ID is one above `largest`, the last group of this broadcast that a relay has. A publisher that is restarted
/// therefore never reuses group IDs, and JavaScript's 53-bit numbers represent the IDs exactly.
pub fn group_of_now(largest: Option<u64>) -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let millis = u64::try_from(now.as_millis()).unwrap_or(u64::MAX).min(LAST_FIRST_GROUP);
    largest.filter(|largest| *largest < LAST_FIRST_GROUP).map_or(millis, |largest| millis.max(largest + 1))
}

/// The largest ID that a first group may have. It leaves half of JavaScript's exact integers (below 2^53) to later
/// groups.
const LAST_FIRST_GROUP: u64 = 1 << 52;

/// An object that is sent as a datagram.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DatagramObject {
    /// The object's location.
    pub location: Location,
    /// The publisher's priority; a lower value is sent first.
    pub priority: u8,
    /// The payload.
    pub payload: Bytes,
}

/// An event of a track. It refers to objects by weak references, so a slow listener does not keep objects in memory
/// that the track has already dropped.
#[derive(Clone)]
pub enum BroadcastEvent {
    /// A subgroup has begun.
    Subgroup(Weak<Subgroup>),
    /// An object was sent as a datagram.
    Datagram(Weak<DatagramObject>),
    /// The track has ended.
    End,
}

enum BroadcastItem {
    Subgroup(Arc<Subgroup>),
    Datagram(Arc<DatagramObject>),
}

struct HeldItem {
    item: BroadcastItem,
    since: Instant,
}

impl HeldItem {
    /// Returns the time when an object was last added to the subgroup, or the datagram was sent.
    fn since(&self) -> Instant {
        match &self.item {
            BroadcastItem::Subgroup(subgroup) => subgroup.objects.lock().last_at.unwrap_or(self.since),
            BroadcastItem::Datagram(_) => self.since,
        }
    }

    /// Marks the subgroup or datagram as dropped from the track's history. Returns its payload length in bytes, which
    /// the caller subtracts from the history's total.
    fn let_go(&self) -> usize {
        match &self.item {
            BroadcastItem::Subgroup(subgroup) => {
                let mut objects = subgroup.objects.lock();
                objects.is_held = false;
                objects.bytes
            }
            BroadcastItem::Datagram(datagram) => datagram.payload.len(),
        }
    }

    fn group(&self) -> u64 {
        match &self.item {
            BroadcastItem::Subgroup(subgroup) => subgroup.group,
            BroadcastItem::Datagram(datagram) => datagram.location.group,
        }
    }

    fn event(&self) -> BroadcastEvent {
        match &self.item {
            BroadcastItem::Subgroup(subgroup) => BroadcastEvent::Subgroup(Arc::downgrade(subgroup)),
            BroadcastItem::Datagram(datagram) => BroadcastEvent::Datagram(Arc::downgrade(datagram)),
        }
    }
}

#[derive(Default)]
struct BroadcastState {
    held: VecDeque<HeldItem>,
    /// Number of payload bytes of the subgroups and datagrams in `held`, the history of the track's recent objects.
    bytes: usize,
    largest: Option<Location>,
    ended: bool,
    listeners: Vec<mpsc::UnboundedSender<BroadcastEvent>>,
}

/// One track, with one writer and any number of listeners.
pub struct BroadcastTrack {
    name: TrackName,
    properties: Properties,
    history: History,
    /// The group ID that is sent for a publisher's group 0. All tracks of the broadcast share it.
    first_group: Arc<AtomicU64>,
    state: Mutex<BroadcastState>,
}

/// A listener of a track. It receives every event of the track once.
pub struct BroadcastListener {
    /// A receiver of events: first the subgroups and datagrams that the track's history has kept since the group
    /// `first_group`, then new ones.
    pub events: mpsc::UnboundedReceiver<BroadcastEvent>,
    /// The track's largest location at the time of [`BroadcastTrack::listen`] (the joining location).
    pub largest: Option<Location>,
}

/// An object as FETCH returns it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredObject {
    /// The object's location.
    pub location: Location,
    /// The subgroup ID; `None` if the object was sent as a datagram.
    pub subgroup: Option<u64>,
    /// The publisher's priority; a lower value is sent first.
    pub priority: u8,
    /// The payload.
    pub payload: Bytes,
}

impl BroadcastTrack {
    /// Returns the track's full name.
    pub fn name(&self) -> &TrackName {
        &self.name
    }

    /// Returns the track's properties.
    pub fn properties(&self) -> &Properties {
        &self.properties
    }

    /// Returns the location of the largest object that was published so far.
    pub fn largest(&self) -> Option<Location> {
        self.state.lock().largest
    }

    /// Reports whether the track has ended.
    pub fn is_ended(&self) -> bool {
        self.state.lock().ended
    }

    /// Begins a subgroup. Listeners receive each of its objects as soon as it is written. The group ID on the wire is
    /// the sum of [`Broadcast::first_group`] and `group`.
    pub fn open(self: &Arc<Self>, group: u64, id: SubgroupId, priority: u8) -> SubgroupWriter {
        let group = self.wire_group(group);
        let subgroup = Arc::new(Subgroup {
            group,
            id,
            priority,
            objects: Mutex::new(HeldObjects { is_held: true, ..HeldObjects::default() }),
            changed: watch::Sender::new(()),
        });
        self.hold(&mut self.state.lock(), BroadcastItem::Subgroup(subgroup.clone()));
        SubgroupWriter { track: self.clone(), subgroup }
    }

    /// Sends an object as a datagram. The group ID on the wire is the sum of [`Broadcast::first_group`] and the group
    /// in the object's location.
    pub fn send_datagram(&self, mut object: DatagramObject) {
        object.location.group = self.wire_group(object.location.group);
        let location = object.location;
        let bytes = object.payload.len();
        let mut state = self.state.lock();
        state.largest = state.largest.max(Some(location));
        state.bytes += bytes;
        self.hold(&mut state, BroadcastItem::Datagram(Arc::new(object)));
    }

    fn wire_group(&self, group: u64) -> u64 {
        self.first_group.load(Ordering::Relaxed).saturating_add(group)
    }

    fn add(&self, subgroup: &Subgroup, id: u64, payload: Bytes) {
        // Lock order: the track's state before a subgroup's objects.
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

    fn hold(&self, state: &mut BroadcastState, item: BroadcastItem) {
        let held = HeldItem { item, since: Instant::now() };
        let event = held.event();
        state.listeners.retain(|listener| listener.send(event.clone()).is_ok());
        state.held.push_back(held);
        state.evict(self.history);
    }

    /// Ends the track.
    pub fn end(&self) {
        let mut state = self.state.lock();
        state.ended = true;
        for listener in std::mem::take(&mut state.listeners) {
            // The send fails if the listener was dropped, which needs no notification.
            let _ = listener.send(BroadcastEvent::End);
        }
    }

    /// Makes a listener. It first gets the subgroups and datagrams in the track's history, from group `first_group` on.
    /// `None` means the newest group.
    pub fn listen(&self, first_group: Option<u64>) -> BroadcastListener {
        let (sender, events) = mpsc::unbounded_channel();
        let mut state = self.state.lock();
        let newest = state.held.iter().map(HeldItem::group).max().unwrap_or(0);
        let first = first_group.unwrap_or(newest);
        // The send cannot fail: the receiver `events` still exists.
        for held in state.held.iter().filter(|held| held.group() >= first) {
            let _ = sender.send(held.event());
        }
        match state.ended {
            true => drop(sender.send(BroadcastEvent::End)),
            false => state.listeners.push(sender),
        }
        BroadcastListener { events, largest: state.largest }
    }

    /// Returns the ID of the oldest group that has objects in memory.
    pub fn oldest_group(&self) -> Option<u64> {
        self.state.lock().held.iter().map(HeldItem::group).min()
    }

    /// Returns the objects in the track's history from `start` to `last`, in the order of a FETCH response.
    pub fn range(&self, start: Location, last: Location, order: GroupOrder) -> Vec<StoredObject> {
        let mut found = Vec::new();
        for held in &self.state.lock().held {
            match &held.item {
                BroadcastItem::Subgroup(subgroup) => found.extend(subgroup.stored()),
                BroadcastItem::Datagram(datagram) => found.push(StoredObject {
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

impl BroadcastState {
    /// Drops the oldest subgroups and datagrams while the track's history exceeds its limits on age and bytes. The
    /// subgroup or datagram that was added last is always kept.
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
struct HeldObjects {
    list: Vec<(u64, Bytes)>,
    bytes: usize,
    /// Whether the track's history still keeps this subgroup, so that its bytes are part of the history's total.
    is_held: bool,
    /// Time when the last object was added, or when the subgroup ended.
    last_at: Option<Instant>,
    ended: bool,
}

/// The objects that a subgroup has so far. More may follow until it ends.
pub struct Subgroup {
    /// The group ID on the wire.
    pub group: u64,
    /// The subgroup ID.
    pub id: SubgroupId,
    /// The publisher's priority; a lower value is sent first.
    pub priority: u8,
    objects: Mutex<HeldObjects>,
    changed: watch::Sender<()>,
}

impl Subgroup {
    /// Returns a receiver that changes whenever objects are added or the subgroup ends.
    pub fn changed(&self) -> watch::Receiver<()> {
        self.changed.subscribe()
    }

    /// Returns the objects of the subgroup from index `index` on, and whether the subgroup has ended, so that no
    /// further objects follow.
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

/// A writer of a subgroup's objects. The subgroup ends when its writer is dropped.
pub struct SubgroupWriter {
    track: Arc<BroadcastTrack>,
    subgroup: Arc<Subgroup>,
}

impl SubgroupWriter {
    /// Returns the group ID on the wire.
    pub fn group(&self) -> u64 {
        self.subgroup.group
    }

    /// Adds an object. Object IDs have to ascend.
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

    fn track(history: History) -> Arc<BroadcastTrack> {
        let broadcast = Broadcast::new(Namespace::from_path("a").unwrap(), history);
        broadcast.create("t", Properties::default()).unwrap()
    }

    fn groups(listener: &mut BroadcastListener) -> Vec<u64> {
        let mut groups = Vec::new();
        while let Ok(BroadcastEvent::Subgroup(subgroup)) = listener.events.try_recv() {
            groups.extend(subgroup.upgrade().map(|subgroup| subgroup.group));
        }
        groups
    }

    #[test]
    fn listener_gets_the_newest_group_and_later_ones() {
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
        assert!(matches!(late.events.try_recv(), Ok(BroadcastEvent::Subgroup(_))));
        assert!(matches!(late.events.try_recv(), Ok(BroadcastEvent::End)));
    }

    #[test]
    fn first_group_number_applies_to_all_tracks_of_a_broadcast() {
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
    fn first_group_id_is_the_unix_time_or_above_the_relays_largest_group_id() {
        let now = group_of_now(None);
        // The first group's ID is the time in milliseconds since 1970. The test accepts any time from the year 2020 to
        // 100,000 years later.
        assert!((1_577_836_800_000..LAST_FIRST_GROUP).contains(&now), "{now}");
        assert!(group_of_now(Some(17)) >= now);
        assert_eq!(group_of_now(Some(now + 86_400_000)), now + 86_400_001, "the clock went back by a day");
        // If the relay's largest group ID is above [`LAST_FIRST_GROUP`], it cannot be a time, so it is ignored.
        assert!(group_of_now(Some(u64::MAX)) < LAST_FIRST_GROUP);
    }

    #[test]
    fn oldest_groups_over_max_bytes_are_dropped_although_a_listener_lags() {
        let track = track(History { max_bytes: 25, ..History::default() });
        let mut listener = track.listen(None);
        let mut kept_open = track.open(0, SubgroupId::Zero, 0);
        for group in 1..6 {
            track.open(group, SubgroupId::Zero, 0).write(0, Bytes::from(vec![0; 10]));
            kept_open.write(group, Bytes::from(vec![0; 10]));
        }
        // The history's limit is enforced when a subgroup is added. Bytes written later may exceed it: here 30 of 25.
        assert_eq!(track.oldest_group(), Some(3));
        assert_eq!(track.state.lock().bytes, 30);
        drop(kept_open);
        assert_eq!(groups(&mut listener), [3, 4, 5]);
    }

    /// A long group is kept while objects are added to it, because subscribers may not have received its end yet.
    #[test]
    fn expiry_of_a_long_group_depends_on_the_age_of_its_last_object() {
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
    fn fetched_ranges_come_in_the_requested_group_order() {
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
