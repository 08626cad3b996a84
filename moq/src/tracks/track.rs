//! A track as the relay knows it: its recent groups, its largest object, and what can be served from memory.

use std::{
    collections::{BTreeMap, btree_map::Entry},
    sync::Arc,
    time::{Duration, Instant},
};

use millrace_quic::plane::source::End;
use parking_lot::Mutex;

use super::{
    account::Account,
    malformed::{Known, Malformed, check_properties},
    subgroup::{Pushed, Subgroup},
};
use crate::{
    Datagram, DecodeError, GroupOrder, Location, ObjectStart, Parameters, Properties, Status, SubgroupId,
    TrackName,
    property::{DEFAULT_PRIORITY, TrackProperties},
};

/// One track: name, properties and cache of recent groups.
pub struct Track {
    pub name: TrackName,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    properties: Properties,
    parsed: TrackProperties,
    groups: BTreeMap<u64, Group>,
    /// Of the objects that arrived.
    largest: Option<Location>,
    behind: Behind,
    /// An object has arrived since the track was last established.
    seen: bool,
    /// What publishers said before an object came.
    claimed: Option<Location>,
    /// END_OF_TRACK: no object at or behind this location exists.
    end: Option<Location>,
    /// From here on, every object of the track arrived here or is known not to exist.
    known_from: Option<Location>,
    /// Groups below were dropped from the cache.
    dropped_below: u64,
}

/// Group IDs that a track may leave out, and that objects may be late by.
pub const GROUP_SLACK: u64 = 16;

/// What has come from far behind the largest object, with nothing near that in between: then the track is where that came
/// from, and the largest object is astray.
#[derive(Default)]
struct Behind {
    group: u64,
    weight: u32,
}

impl Behind {
    const ENOUGH: u32 = 16;

    /// Objects of `group` have come; whether that is enough.
    fn came(&mut self, group: u64) -> bool {
        self.weight += if group > self.group { Self::ENOUGH / 2 } else { 1 };
        self.group = group;
        self.weight >= Self::ENOUGH
    }
}

/// A group in the cache.
#[derive(Clone)]
pub struct Group {
    pub subgroups: Vec<Arc<Subgroup>>,
    /// By object ID.
    pub datagrams: BTreeMap<u64, Arc<DatagramObject>>,
    pub first_at: Instant,
    /// Bytes of memory, with overhead.
    pub cost: usize,
    /// Of the publisher that opened it.
    account: Arc<Account>,
    known: Known,
}

/// An object that arrived as a datagram.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DatagramObject {
    /// As it arrived, under the publisher's track alias.
    pub datagram: Datagram,
    pub received_at: Instant,
}

/// Memory of a datagram's place in its group, bytes: reference counts, and ID and pointer in a tree that is two thirds full.
const DATAGRAM_PLACE: usize = 2 * size_of::<usize>() + 24;

impl DatagramObject {
    pub fn location(&self) -> Location {
        Location::new(self.datagram.group, self.datagram.object)
    }

    /// Bytes of memory that it takes in the cache.
    pub fn cost(&self) -> usize {
        size_of::<Self>() + DATAGRAM_PLACE + self.datagram.payload.len() + self.datagram.properties.len()
    }
}

/// How much of a track the cache holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Held {
    pub groups: usize,
    pub objects: usize,
    pub bytes: usize,
}

/// Why a new subgroup stream or datagram is not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Duplicate {
    /// The same subgroup arrived whole.
    Subgroup,
    /// The same subgroup is arriving on another stream, and may still break off.
    Arriving,
    /// The group was dropped from the cache as too old.
    Expired,
    /// The same datagram object is there already.
    Datagram,
    /// It cannot be of this track.
    Malformed(Malformed),
}

impl From<Malformed> for Duplicate {
    fn from(malformed: Malformed) -> Self {
        Self::Malformed(malformed)
    }
}

/// Memory that a group and a subgroup cost besides their media, bytes: their records and the pointers to them.
pub(super) const GROUP_COST: usize = size_of::<Group>() + 128;
pub const SUBGROUP_COST: usize = size_of::<Subgroup>() + 128;

impl Track {
    pub fn new(name: TrackName) -> Self {
        Self { name, state: Mutex::default() }
    }

    pub fn properties(&self) -> Properties {
        self.state.lock().properties.clone()
    }

    /// The same for whoever asks with these parameters, which may want none.
    pub fn properties_for(&self, parameters: &Parameters) -> Properties {
        match parameters.include_properties {
            Some(false) => Properties::default(),
            Some(true) | None => self.properties(),
        }
    }

    /// The properties that matter for delivery.
    pub fn parsed_properties(&self) -> TrackProperties {
        self.state.lock().parsed
    }

    /// Takes the properties that came with SUBSCRIBE_OK or PUBLISH, unless another publisher's are here already.
    /// Returns a mandatory property that is not understood: the track must then not be forwarded.
    ///
    /// # Errors
    /// The properties are malformed, and the session must be closed.
    pub fn set_properties(&self, properties: Properties) -> Result<Option<u64>, DecodeError> {
        let parsed = TrackProperties::parse(&properties)?;
        let mut state = self.state.lock();
        if parsed.unsupported.is_none() && state.properties.is_empty() {
            state.properties = properties;
            state.parsed = parsed;
        }
        Ok(parsed.unsupported)
    }

    /// Another publisher begins the track anew: all that was known is forgotten. Evict its groups before.
    pub fn restart(&self) {
        let old = std::mem::take(&mut *self.state.lock());
        old.groups.values().for_each(|group| group.account.subtract(group.cost));
    }

    /// The publisher numbers its groups anew: all that was known of them is forgotten. Evict the groups before.
    pub fn renumber(&self) {
        let mut state = self.state.lock();
        let (properties, parsed) = (std::mem::take(&mut state.properties), state.parsed);
        let old = std::mem::replace(&mut *state, State { properties, parsed, ..State::default() });
        drop(state);
        old.groups.values().for_each(|group| group.account.subtract(group.cost));
    }

    /// Objects may have been missed from here on.
    pub fn missed(&self) {
        let mut state = self.state.lock();
        state.known_from = None;
        state.seen = false;
    }

    /// The largest object. Before one has come, what publishers say; from then on, what they say hides nothing.
    pub fn largest(&self) -> Option<Location> {
        let state = self.state.lock();
        if state.seen { state.largest } else { state.largest.max(state.claimed) }
    }

    /// The largest object that has come, whatever publishers say.
    pub fn last_seen(&self) -> Option<Location> {
        self.state.lock().largest
    }

    /// The publisher told its largest object (SUBSCRIBE_OK, PUBLISH).
    pub fn saw_largest(&self, location: Location) {
        let mut state = self.state.lock();
        if !state.seen {
            state.claimed = state.claimed.max(Some(location));
        }
    }

    /// END_OF_TRACK was received at `location`.
    pub fn ended_at(&self, location: Location) {
        self.state.lock().end.get_or_insert(location);
    }

    pub fn end(&self) -> Option<Location> {
        self.state.lock().end
    }

    /// The publisher priority of subgroups and datagrams that have none of their own.
    pub fn default_priority(&self) -> u8 {
        self.state.lock().parsed.publisher_priority.unwrap_or(DEFAULT_PRIORITY)
    }

    /// How long an object may be served from the cache, if the publisher limits it.
    pub fn max_cache_duration(&self) -> Option<Duration> {
        self.state.lock().parsed.max_cache_duration.map(Duration::from_millis)
    }

    /// Takes a subgroup stream whose header just arrived, unless it is already here; the cache has to count
    /// [`SUBGROUP_COST`] for it. If it opens a group, that is `account`'s.
    ///
    /// Returns whether it opened a new group.
    pub fn add_subgroup(
        &self,
        now: Instant,
        subgroup: Arc<Subgroup>,
        account: &Arc<Account>,
    ) -> Result<bool, Duplicate> {
        let group_id = subgroup.header().group;
        let mut state = self.state.lock();
        let fresh = state.group_is_new(group_id)?;
        if !fresh {
            state.check_priority(&subgroup).map_err(Duplicate::Malformed)?;
            if let Some(duplicate) = state.twin_of(&subgroup) {
                return Err(duplicate);
            }
        }
        let group = state.group(group_id, now, account);
        group.add(SUBGROUP_COST);
        group.subgroups.push(subgroup);
        Ok(fresh)
    }

    /// Takes an object that came as a datagram; returns whether it opened a new group.
    pub fn add_datagram(
        &self,
        object: DatagramObject,
        account: &Arc<Account>,
    ) -> Result<(Arc<DatagramObject>, bool), Duplicate> {
        let location = object.location();
        let mut state = self.state.lock();
        let fresh = state.group_is_new(location.group)?;
        if let Some(known) = state.groups.get_mut(&location.group) {
            known.judge_datagram(&object)?;
        }
        state.judge_end(location, object.datagram.status)?;
        let group = state.group(location.group, object.received_at, account);
        group.known.take(location.object, object.datagram.ends_group())?;
        let Entry::Vacant(place) = group.datagrams.entry(location.object) else {
            return Err(Duplicate::Datagram);
        };
        let object = Arc::clone(place.insert(Arc::new(object)));
        group.add(object.cost());
        state.saw_object(location);
        Ok((object, fresh))
    }

    /// Whether `objects` of a subgroup stream, in order, can be of the track. Asked before they are kept.
    ///
    /// # Errors
    /// They cannot: the track is malformed.
    pub fn judge(&self, group_id: u64, objects: &[ObjectStart]) -> Result<(), Malformed> {
        let Some(last) = objects.last() else { return Ok(()) };
        objects.iter().try_for_each(|object| check_properties(&object.properties, group_id, object.id))?;
        let mut state = self.state.lock();
        state.judge_end(Location::new(group_id, last.id), last.status)?;
        let Some(group) = state.groups.get_mut(&group_id) else { return Ok(()) };
        if !group.datagrams.is_empty()
            && objects.iter().any(|object| group.datagrams.contains_key(&object.id))
        {
            return Err(Malformed("an object comes as a datagram and in a stream"));
        }
        group.known.take(last.id, last.status == Some(Status::EndOfGroup))
    }

    /// A subgroup stream that ends its group has ended with `last`.
    ///
    /// # Errors
    /// Objects behind it have come: the track is malformed.
    pub fn group_ended(&self, group: u64, last: u64) -> Result<(), Malformed> {
        self.state.lock().groups.get_mut(&group).map_or(Ok(()), |group| group.known.take(last, true))
    }

    /// A subgroup of this group grew. Returns whether the group is still cached; the cache then has to count the cost.
    pub fn grew(&self, group_id: u64, pushed: &Pushed) -> bool {
        let mut state = self.state.lock();
        if let Some((first, largest)) = pushed.ids {
            state.saw_object(Location::new(group_id, first));
            state.saw_object(Location::new(group_id, largest));
        }
        let Some(group) = state.groups.get_mut(&group_id) else { return false };
        group.add(pushed.cost);
        true
    }

    /// Drops a group and returns the memory that it cost, bytes. Streams that still read from it will be reset.
    pub fn evict(&self, group_id: u64) -> usize {
        let mut state = self.state.lock();
        let Some(group) = state.groups.remove(&group_id) else { return 0 };
        if state.largest.is_some_and(|largest| group_id <= largest.group) {
            let next = group_id.saturating_add(1);
            state.known_from = state.known_from.max(Some(Location { group: next, object: 0 }));
            state.dropped_below = state.dropped_below.max(next);
        }
        drop(state);
        group.account.subtract(group.cost);
        group.subgroups.iter().for_each(|subgroup| subgroup.evict());
        group.cost
    }

    /// Whether `group` is the newest in the cache, without those that are astray.
    pub fn is_newest(&self, group: u64) -> bool {
        let state = self.state.lock();
        let last = state.largest.map_or(u64::MAX, |largest| largest.group);
        state.groups.range(..=last).next_back().is_some_and(|(newest, _)| *newest == group)
    }

    /// When the last of a cached group came: an object, or the end of a stream.
    pub fn last_at(&self, group: u64) -> Option<Instant> {
        let state = self.state.lock();
        let group = state.groups.get(&group)?;
        let streams = group.subgroups.iter().filter_map(|subgroup| subgroup.last_at());
        let datagrams = group.datagrams.values().map(|object| object.received_at);
        Some(streams.chain(datagrams).fold(group.first_at, Instant::max))
    }

    /// The cached group with this ID.
    pub fn group(&self, group: u64) -> Option<Group> {
        self.state.lock().groups.get(&group).cloned()
    }

    /// Cached groups in ascending order from `first` to `last`, inclusive.
    pub fn groups(&self, first: u64, last: u64) -> Vec<(u64, Group)> {
        if first > last {
            return Vec::new();
        }
        self.state.lock().groups.range(first..=last).map(|(id, group)| (*id, group.clone())).collect()
    }

    /// Shows `look` the cached groups from `first` to `last`, inclusive, in `order`, until it finds something. The track is
    /// locked meanwhile.
    pub(super) fn visit<R>(
        &self,
        first: u64,
        last: u64,
        order: GroupOrder,
        mut look: impl FnMut(u64, &Group) -> Option<R>,
    ) -> Option<R> {
        if first > last {
            return None;
        }
        let state = self.state.lock();
        let mut groups = state.groups.range(first..=last);
        match order {
            GroupOrder::Ascending => groups.find_map(|(id, group)| look(*id, group)),
            GroupOrder::Descending => groups.rev().find_map(|(id, group)| look(*id, group)),
        }
    }

    /// The first location from which on the cache can answer for every object of the track.
    ///
    /// A group with a subgroup that was reset is not complete, and the cache answers only for what follows it.
    pub fn known_from(&self) -> Option<Location> {
        let state = self.state.lock();
        let broken = state.groups.iter().rev().find(|(_, group)| group.is_broken());
        let after_broken = broken.map(|(id, _)| Location { group: id.saturating_add(1), object: 0 });
        state.known_from.map(|known| known.max(after_broken.unwrap_or(known)))
    }

    pub fn held(&self) -> Held {
        let state = self.state.lock();
        state.groups.values().fold(Held { groups: state.groups.len(), ..Held::default() }, |held, group| {
            Held { objects: held.objects + group.object_count(), bytes: held.bytes + group.cost, ..held }
        })
    }
}

impl Group {
    fn add(&mut self, cost: usize) {
        self.cost += cost;
        self.account.add(cost);
    }

    /// Whether an object that came as a datagram can be of the group.
    fn judge_datagram(&self, object: &DatagramObject) -> Result<(), Duplicate> {
        let (id, datagram) = (object.datagram.object, &object.datagram);
        if let Some(same) = self.datagrams.get(&id) {
            let twin = Datagram { alias: datagram.alias, ..same.datagram.clone() };
            return Err(match twin == *datagram {
                true => Duplicate::Datagram,
                false => Duplicate::Malformed(Malformed("an object comes twice, and differs")),
            });
        }
        let in_stream = self.subgroups.iter().any(|subgroup| subgroup.count(&(id..=id)) > 0);
        match in_stream {
            true => Err(Malformed("an object comes as a datagram and in a stream").into()),
            false => Ok(check_properties(&datagram.properties, datagram.group, id)?),
        }
    }

    fn object_count(&self) -> usize {
        self.datagrams.len() + self.subgroups.iter().map(|subgroup| subgroup.object_count()).sum::<usize>()
    }

    /// Whether a subgroup is still arriving.
    pub fn is_open(&self) -> bool {
        self.subgroups.iter().any(|subgroup| subgroup.extent().end == End::Open)
    }

    fn is_broken(&self) -> bool {
        self.subgroups.iter().any(|subgroup| matches!(subgroup.extent().end, End::Reset(_)))
    }
}

impl State {
    /// Whether `group` is not there yet; an error if it was dropped before.
    fn group_is_new(&self, group: u64) -> Result<bool, Duplicate> {
        if self.groups.contains_key(&group) {
            return Ok(false);
        }
        // A group older than all that are cached was evicted, or comes far too late.
        match self.groups.first_key_value() {
            Some((oldest, _)) if group < *oldest && group < self.dropped_below => Err(Duplicate::Expired),
            _ => Ok(true),
        }
    }

    /// What a second copy of a subgroup is, if the first is open or complete. One that was reset does not count.
    fn twin_of(&self, subgroup: &Subgroup) -> Option<Duplicate> {
        let header = subgroup.header();
        let id = match header.subgroup {
            SubgroupId::Zero => 0,
            SubgroupId::Explicit(id) => id,
            // Known only with the first object. The stream is taken; duplicates show by their object IDs.
            SubgroupId::FirstObject => return None,
        };
        let twins = self.groups.get(&header.group)?.subgroups.iter().filter(|other| other.id() == Some(id));
        let mut found = None;
        for twin in twins {
            match twin.extent().end {
                End::Fin { .. } => return Some(Duplicate::Subgroup),
                End::Open => found = Some(Duplicate::Arriving),
                End::Reset(_) => {}
            }
        }
        found
    }

    fn group(&mut self, id: u64, now: Instant, account: &Arc<Account>) -> &mut Group {
        self.groups.entry(id).or_insert_with(|| {
            let mut group = Group {
                subgroups: Vec::new(),
                datagrams: BTreeMap::new(),
                first_at: now,
                cost: 0,
                account: Arc::clone(account),
                known: Known::default(),
            };
            group.add(GROUP_COST);
            group
        })
    }

    /// Whether an object can be there, and what it says of the track's end.
    fn judge_end(&self, location: Location, status: Option<Status>) -> Result<(), Malformed> {
        if self.end.is_some_and(|end| location > end) {
            return Err(Malformed("an object behind the last of the track"));
        }
        let ends = status == Some(Status::EndOfTrack);
        if ends && self.largest.is_some_and(|largest| largest > location) {
            return Err(Malformed("the end of the track, and objects behind it have come"));
        }
        Ok(())
    }

    /// Streams of one subgroup have one priority.
    fn check_priority(&self, subgroup: &Subgroup) -> Result<(), Malformed> {
        let header = subgroup.header();
        let default = self.parsed.publisher_priority.unwrap_or(DEFAULT_PRIORITY);
        let priority = |one: &Subgroup| one.header().priority.unwrap_or(default);
        let Some(id) = subgroup.id() else { return Ok(()) };
        let Some(group) = self.groups.get(&header.group) else { return Ok(()) };
        let mut same = group.subgroups.iter().filter(|other| other.id() == Some(id));
        match same.any(|other| priority(other) != priority(subgroup)) {
            true => Err(Malformed("a subgroup has two priorities")),
            false => Ok(()),
        }
    }

    fn saw_object(&mut self, location: Location) {
        let astray = match self.largest {
            Some(largest) if largest.group.saturating_sub(location.group) > GROUP_SLACK => {
                self.behind.came(location.group)
            }
            _ => {
                self.behind = Behind::default();
                false
            }
        };
        match astray {
            true => {
                self.largest = Some(location);
                self.known_from.take_if(|known| known.group > location.group);
                self.behind = Behind::default();
            }
            false => self.largest = self.largest.max(Some(location)),
        }
        self.seen = true;
        self.claimed = None;
        // A subscription that began inside a group does not know the beginning of that group.
        self.known_from.get_or_insert(match location.object {
            0 => location,
            _ => Location { group: location.group.saturating_add(1), object: 0 },
        });
    }
}
