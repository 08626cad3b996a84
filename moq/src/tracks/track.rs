//! A track as a relay stores it: its recent groups, its largest object, and the range that can be served from memory.

use std::{
    collections::{BTreeMap, btree_map::Entry},
    sync::Arc,
    time::{Duration, Instant},
};

use millrace_quic::plane::source::SourceEnd;
use parking_lot::Mutex;

use super::{
    account::Account,
    malformed::{GroupState, TrackMalformed, check_properties},
    subgroup::{Pushed, SubgroupStream},
};
use crate::{
    DecodeError, GroupOrder, Location, ObjectDatagram, ObjectStart, Parameters, Properties, Status,
    SubgroupId, TrackName,
    property::{DEFAULT_PRIORITY, TrackProperties},
};

/// One track: name, properties and cache of recent groups.
pub struct Track {
    /// The track's full name.
    pub name: TrackName,
    state: Mutex<TrackState>,
}

#[derive(Default)]
struct TrackState {
    properties: Properties,
    parsed: TrackProperties,
    groups: BTreeMap<u64, CachedGroup>,
    /// The largest location of the objects that arrived.
    largest: Option<Location>,
    behind: Behind,
    /// Whether an object has arrived since the subscription to the publisher was last established.
    seen: bool,
    /// The largest location that a publisher has reported, until an object at or behind it arrives.
    claimed: Option<Location>,
    /// Location of END_OF_TRACK: no object exists at or after this location.
    end: Option<Location>,
    /// Start of the range in which each object of the track has arrived here or is known not to exist.
    known_from: Option<Location>,
    /// Groups below this ID were dropped from the cache.
    dropped_below: u64,
}

/// Largest expected difference between the group IDs that a track's publishers send at the same time, and between a
/// late object's group ID and the track's largest. If a difference is larger, the numbering was restarted or an ID is
/// wrong.
pub const GROUP_SLACK: u64 = 16;

/// A counter of consecutive objects that are far behind the largest location. After enough such objects, the track
/// continues from their location, and the former largest location counts as a mistake of the publisher.
#[derive(Default)]
struct Behind {
    group: u64,
    weight: u32,
}

impl Behind {
    const ENOUGH: u32 = 16;

    /// Records an object of `group` that is far behind the largest location. Returns whether enough such objects were
    /// counted to continue the track from there.
    fn record(&mut self, group: u64) -> bool {
        // An object of a new group counts for more than another object of the same group.
        self.weight += if group > self.group { Self::ENOUGH / 2 } else { 1 };
        self.group = group;
        self.weight >= Self::ENOUGH
    }
}

/// A group in the cache.
#[derive(Clone)]
pub struct CachedGroup {
    /// The group's subgroup streams.
    pub subgroups: Vec<Arc<SubgroupStream>>,
    /// Objects that arrived as datagrams, by object ID.
    pub datagrams: BTreeMap<u64, Arc<CachedDatagram>>,
    /// Time when the group's first object arrived.
    pub first_at: Instant,
    /// Memory of the group including bookkeeping, in bytes.
    pub cost: usize,
    /// The count of cache memory of the publisher that opened the group.
    account: Arc<Account>,
    known: GroupState,
}

/// An object that arrived as a datagram.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CachedDatagram {
    /// The datagram as it arrived, with the publisher's track alias.
    pub datagram: ObjectDatagram,
    /// Time when the datagram arrived.
    pub received_at: Instant,
}

/// Memory in bytes that a datagram needs in its group's map: reference counts, and ID and pointer in a B-tree whose
/// nodes are two thirds full.
const DATAGRAM_PLACE: usize = 2 * size_of::<usize>() + 24;

impl CachedDatagram {
    /// Returns the object's location.
    pub fn location(&self) -> Location {
        Location::new(self.datagram.group, self.datagram.object)
    }

    /// Returns the memory of the datagram in the cache, in bytes.
    pub fn cost(&self) -> usize {
        size_of::<Self>() + DATAGRAM_PLACE + self.datagram.payload.len() + self.datagram.properties.len()
    }
}

/// The groups, objects and bytes of a track in the cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HeldCache {
    /// Number of groups.
    pub groups: usize,
    /// Number of objects.
    pub objects: usize,
    /// Memory in bytes.
    pub bytes: usize,
}

/// The reason why a new subgroup stream or datagram is not added to the track.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Duplicate {
    /// The same subgroup has already arrived completely.
    Subgroup,
    /// The same subgroup is arriving on another stream, which may still be reset.
    Arriving,
    /// The group was dropped from the cache.
    Expired,
    /// An object with the same location has already arrived as a datagram.
    Datagram,
    /// The stream or datagram makes the track malformed.
    Malformed(TrackMalformed),
}

impl From<TrackMalformed> for Duplicate {
    fn from(malformed: TrackMalformed) -> Self {
        Self::Malformed(malformed)
    }
}

/// Memory in bytes that a group needs in addition to its subgroups and datagrams: the [`CachedGroup`] and the pointers
/// to it.
pub(super) const GROUP_COST: usize = size_of::<CachedGroup>() + 128;
/// Memory in bytes that a subgroup needs in addition to its media: the [`SubgroupStream`] and the pointers to it.
pub const SUBGROUP_COST: usize = size_of::<SubgroupStream>() + 128;

impl Track {
    /// Makes a track without groups.
    pub fn new(name: TrackName) -> Self {
        Self { name, state: Mutex::default() }
    }

    /// Returns the track's properties.
    pub fn properties(&self) -> Properties {
        self.state.lock().properties.clone()
    }

    /// Returns the track's properties for a subscriber. They are empty if `parameters` say that the subscriber does not
    /// want properties.
    pub fn properties_for(&self, parameters: &Parameters) -> Properties {
        match parameters.include_properties {
            Some(false) => Properties::default(),
            Some(true) | None => self.properties(),
        }
    }

    /// Returns the properties that affect delivery.
    pub fn parsed_properties(&self) -> TrackProperties {
        self.state.lock().parsed
    }

    /// Stores the properties in SUBSCRIBE_OK or PUBLISH, unless the track has properties already. If a mandatory
    /// property is not supported, returns its type. The track must then not be forwarded.
    ///
    /// # Errors
    /// Fails if the properties are malformed. The session must then be closed.
    pub fn set_properties(&self, properties: Properties) -> Result<Option<u64>, DecodeError> {
        let parsed = TrackProperties::parse(&properties)?;
        let mut state = self.state.lock();
        if parsed.unsupported.is_none() && state.properties.is_empty() {
            state.properties = properties;
            state.parsed = parsed;
        }
        Ok(parsed.unsupported)
    }

    /// Resets the track to its initial state, because another publisher restarts it. The caller must first have dropped
    /// the track's groups from the cache.
    pub fn restart(&self) {
        let old = std::mem::take(&mut *self.state.lock());
        // Groups that the caller has not dropped are dropped here, so their memory is subtracted from their publishers'
        // counts.
        old.groups.values().for_each(|group| group.account.subtract(group.cost));
    }

    /// Removes all groups, because the publisher restarts its group numbering. The properties are kept. The caller must
    /// first have dropped the track's groups from the cache.
    pub fn renumber(&self) {
        let mut state = self.state.lock();
        let properties = std::mem::take(&mut state.properties);
        let parsed = state.parsed;
        let old = std::mem::replace(&mut *state, TrackState { properties, parsed, ..TrackState::default() });
        drop(state);
        old.groups.values().for_each(|group| group.account.subtract(group.cost));
    }

    /// Records that objects may be missing between the last object that arrived and the next one, because the
    /// subscription was interrupted.
    pub fn missed(&self) {
        let mut state = self.state.lock();
        state.known_from = None;
        state.seen = false;
        state.claimed = None;
    }

    /// Records that objects before `location` may be missing, because the track's source has changed. `None`: objects
    /// before the next one that arrives.
    pub fn missed_before(&self, location: Option<Location>) {
        let mut state = self.state.lock();
        state.known_from = location.and(state.known_from.max(location));
    }

    /// Records that the missing objects between `known` and the present start of the known range have arrived. `known`
    /// is the former start of that range.
    pub fn bridged(&self, known: Location) {
        let mut state = self.state.lock();
        let known = known.max(Location { group: state.dropped_below, object: 0 });
        state.known_from = state.known_from.min(Some(known));
    }

    /// Reports whether the cache has the whole object at `location`, or has dropped its group.
    pub fn has(&self, location: Location) -> bool {
        let state = self.state.lock();
        match state.groups.get(&location.group) {
            Some(group) => {
                group.datagrams.contains_key(&location.object)
                    || group.subgroups.iter().any(|subgroup| subgroup.has(location.object))
            }
            None => location.group < state.dropped_below,
        }
    }

    /// Reports whether the newest cached stream of the track has object properties.
    pub fn has_object_properties(&self) -> bool {
        let state = self.state.lock();
        let newest = state.groups.values().rev().find_map(|group| group.subgroups.first());
        newest.is_some_and(|subgroup| subgroup.header().properties)
    }

    /// Returns the first location from `from` on, and before `end`, whose object the cache may lack. Groups count as
    /// complete if all their subgroups have ended without a reset. Groups that the cache has dropped, and those of
    /// which only datagrams have come, are not counted.
    pub fn first_missing(&self, from: Location, end: Location) -> Option<Location> {
        let state = self.state.lock();
        let mut at = from.max(Location { group: state.dropped_below, object: 0 });
        while at < end {
            let Some(group) = state.groups.get(&at.group) else { return Some(at) };
            let unfinished =
                || group.subgroups.iter().filter(|one| !matches!(one.extent().end, SourceEnd::Fin { .. }));
            let is_empty = group.subgroups.is_empty() && group.datagrams.is_empty();
            if is_empty || unfinished().next().is_some() {
                let missing = unfinished().map(|subgroup| subgroup.first_missing()).min();
                return Some(Location { object: missing.unwrap_or(at.object), ..at }).filter(|at| *at < end);
            }
            at = Location { group: at.group.checked_add(1)?, object: 0 };
        }
        None
    }

    /// Returns the largest location. Locations that publishers reported count only until an object arrives.
    pub fn largest(&self) -> Option<Location> {
        let state = self.state.lock();
        if state.seen { state.largest } else { state.largest.max(state.claimed) }
    }

    /// Returns the largest location that the publisher has reported, if it has not been reached: its objects are on their
    /// way.
    pub fn claimed(&self) -> Option<Location> {
        self.state.lock().claimed
    }

    /// Returns the largest location of the objects that arrived. Locations that publishers reported do not count.
    pub fn last_seen(&self) -> Option<Location> {
        self.state.lock().largest
    }

    /// Returns the location behind the largest object that arrived. `None` if nothing has arrived.
    pub fn position(&self) -> Option<Location> {
        let last = self.last_seen()?;
        Some(Location { object: last.object.saturating_add(1), ..last })
    }

    /// Records the largest location that a publisher reported in SUBSCRIBE_OK or PUBLISH.
    pub fn saw_largest(&self, location: Location) {
        let mut state = self.state.lock();
        if !state.seen {
            state.claimed = state.claimed.max(Some(location));
        }
    }

    /// Records that an END_OF_TRACK status arrived at `location`.
    pub fn ended_at(&self, location: Location) {
        self.state.lock().end.get_or_insert(location);
    }

    /// Returns the location of END_OF_TRACK, if it has arrived. No object exists at or after it.
    pub fn end(&self) -> Option<Location> {
        self.state.lock().end
    }

    /// Returns the publisher priority for subgroups and datagrams that do not state one.
    pub fn default_priority(&self) -> u8 {
        self.state.lock().parsed.publisher_priority.unwrap_or(DEFAULT_PRIORITY)
    }

    /// Returns how long an object may be served from the cache, if the publisher limits that.
    pub fn max_cache_duration(&self) -> Option<Duration> {
        self.state.lock().parsed.max_cache_duration.map(Duration::from_millis)
    }

    /// Adds a subgroup stream whose header has just arrived, unless the track has the subgroup already. The caller has
    /// to add [`SUBGROUP_COST`] to the cache's total. If the stream opens a group, the group's memory is counted in
    /// `account`, the publisher's count of cache memory.
    ///
    /// Returns whether the stream opened a new group.
    pub fn add_subgroup(
        &self,
        now: Instant,
        subgroup: Arc<SubgroupStream>,
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

    /// Adds an object that arrived as a datagram. Returns the stored object, and whether it opened a new group.
    pub fn add_datagram(
        &self,
        object: CachedDatagram,
        account: &Arc<Account>,
    ) -> Result<(Arc<CachedDatagram>, bool), Duplicate> {
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

    /// Checks whether these objects of a subgroup stream are consistent with the track. Call it before the objects are
    /// stored.
    ///
    /// # Errors
    /// Fails if the objects make the track malformed.
    pub fn judge(&self, group_id: u64, objects: &[ObjectStart]) -> Result<(), TrackMalformed> {
        let Some(last) = objects.last() else { return Ok(()) };
        objects.iter().try_for_each(|object| check_properties(&object.properties, group_id, object.id))?;
        let mut state = self.state.lock();
        // IDs ascend on a stream, so it is enough to check the last object.
        state.judge_end(Location::new(group_id, last.id), last.status)?;
        let Some(group) = state.groups.get_mut(&group_id) else { return Ok(()) };
        if !group.datagrams.is_empty()
            && objects.iter().any(|object| group.datagrams.contains_key(&object.id))
        {
            return Err(TrackMalformed("an object arrived as a datagram and in a stream"));
        }
        group.known.take(last.id, last.status == Some(Status::EndOfGroup))
    }

    /// Records that a subgroup stream ended its group with the object `last`.
    ///
    /// # Errors
    /// Fails if later objects of the group have arrived: the track is malformed.
    pub fn group_ended(&self, group: u64, last: u64) -> Result<(), TrackMalformed> {
        self.state.lock().groups.get_mut(&group).map_or(Ok(()), |group| group.known.take(last, true))
    }

    /// Records that a subgroup of this group grew. Returns whether the group is still cached. If it is cached, the
    /// caller has to add `pushed.cost` to the cache's total.
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

    /// Drops a group and returns its memory in bytes. Streams to subscribers that still read it will be reset.
    pub fn evict(&self, group_id: u64) -> usize {
        let mut state = self.state.lock();
        let Some(group) = state.groups.remove(&group_id) else { return 0 };
        // A group with a wrong, far too large ID may be above the track's largest location. If it is dropped, the
        // groups below it are still cached.
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

    /// Reports whether `group` is the newest cached group. Groups above the track's largest location, whose IDs are
    /// wrong, do not count.
    pub fn is_newest(&self, group: u64) -> bool {
        let state = self.state.lock();
        let last = state.largest.map_or(u64::MAX, |largest| largest.group);
        state.groups.range(..=last).next_back().is_some_and(|(newest, _)| *newest == group)
    }

    /// Returns the time when the last object or FIN of a cached group arrived.
    pub fn last_at(&self, group: u64) -> Option<Instant> {
        let state = self.state.lock();
        let group = state.groups.get(&group)?;
        let streams = group.subgroups.iter().filter_map(|subgroup| subgroup.last_at());
        let datagrams = group.datagrams.values().map(|object| object.received_at);
        Some(streams.chain(datagrams).fold(group.first_at, Instant::max))
    }

    /// Returns the cached group with this ID.
    pub fn group(&self, group: u64) -> Option<CachedGroup> {
        self.state.lock().groups.get(&group).cloned()
    }

    /// Returns the cached groups in ascending order from `first` to `last`, inclusive.
    pub fn groups(&self, first: u64, last: u64) -> Vec<(u64, CachedGroup)> {
        if first > last {
            return Vec::new();
        }
        self.state.lock().groups.range(first..=last).map(|(id, group)| (*id, group.clone())).collect()
    }

    /// Calls `look` with the cached groups from `first` to `last`, inclusive, in `order`, until it returns a value. The
    /// track is locked during all calls.
    pub(super) fn visit<R>(
        &self,
        first: u64,
        last: u64,
        order: GroupOrder,
        mut look: impl FnMut(u64, &CachedGroup) -> Option<R>,
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

    /// Returns the start of the range in which the cache can answer for every object of the track.
    ///
    /// A group with a subgroup that was reset is incomplete, so the range starts after the newest such group.
    pub fn known_from(&self) -> Option<Location> {
        let state = self.state.lock();
        let broken = state.groups.iter().rev().find(|(_, group)| group.is_broken());
        let after_broken = broken.map(|(id, _)| Location { group: id.saturating_add(1), object: 0 });
        state.known_from.map(|known| known.max(after_broken.unwrap_or(known)))
    }

    /// Returns the numbers of groups, objects and bytes of the track that are in the cache.
    pub fn held(&self) -> HeldCache {
        let state = self.state.lock();
        state.groups.values().fold(
            HeldCache { groups: state.groups.len(), ..HeldCache::default() },
            |held, group| HeldCache {
                objects: held.objects + group.object_count(),
                bytes: held.bytes + group.cost,
                ..held
            },
        )
    }
}

impl CachedGroup {
    fn add(&mut self, cost: usize) {
        self.cost += cost;
        self.account.add(cost);
    }

    /// Checks whether a datagram object is consistent with the objects that the group has.
    fn judge_datagram(&self, object: &CachedDatagram) -> Result<(), Duplicate> {
        let id = object.datagram.object;
        let datagram = &object.datagram;
        if let Some(same) = self.datagrams.get(&id) {
            let twin = ObjectDatagram { alias: datagram.alias, ..same.datagram.clone() };
            return Err(match twin == *datagram {
                true => Duplicate::Datagram,
                false => {
                    Duplicate::Malformed(TrackMalformed("an object arrived twice with different contents"))
                }
            });
        }
        let in_stream = self.subgroups.iter().any(|subgroup| subgroup.count(&(id..=id)) > 0);
        match in_stream {
            true => Err(TrackMalformed("an object arrived as a datagram and in a stream").into()),
            false => Ok(check_properties(&datagram.properties, datagram.group, id)?),
        }
    }

    fn object_count(&self) -> usize {
        self.datagrams.len() + self.subgroups.iter().map(|subgroup| subgroup.object_count()).sum::<usize>()
    }

    /// Reports whether any subgroup of the group has not ended.
    pub fn is_open(&self) -> bool {
        self.subgroups.iter().any(|subgroup| subgroup.extent().end == SourceEnd::Open)
    }

    fn is_broken(&self) -> bool {
        self.subgroups.iter().any(|subgroup| matches!(subgroup.extent().end, SourceEnd::Reset(_)))
    }
}

impl TrackState {
    /// Reports whether `group` is not in the cache. Fails if the group was dropped before.
    fn group_is_new(&self, group: u64) -> Result<bool, Duplicate> {
        if self.groups.contains_key(&group) {
            return Ok(false);
        }
        // A group that is older than all cached ones was dropped, or arrives far too late.
        match self.groups.first_key_value() {
            Some((oldest, _)) if group < *oldest && group < self.dropped_below => Err(Duplicate::Expired),
            _ => Ok(true),
        }
    }

    /// Returns why a second copy of a subgroup is refused: the first copy is still arriving, or complete. If the first
    /// copy was reset, the second one is accepted.
    fn twin_of(&self, subgroup: &SubgroupStream) -> Option<Duplicate> {
        let header = subgroup.header();
        let id = match header.subgroup {
            SubgroupId::Zero => 0,
            SubgroupId::Explicit(id) => id,
            // The subgroup's ID is known only when its first object arrives, so the stream is accepted. Duplicates are
            // then detected by object ID.
            SubgroupId::FirstObject => return None,
        };
        let twins = self.groups.get(&header.group)?.subgroups.iter().filter(|other| other.id() == Some(id));
        let mut found = None;
        for twin in twins {
            match twin.extent().end {
                SourceEnd::Fin { .. } => return Some(Duplicate::Subgroup),
                SourceEnd::Open => found = Some(Duplicate::Arriving),
                SourceEnd::Reset(_) => {}
            }
        }
        found
    }

    fn group(&mut self, id: u64, now: Instant, account: &Arc<Account>) -> &mut CachedGroup {
        self.groups.entry(id).or_insert_with(|| {
            let mut group = CachedGroup {
                subgroups: Vec::new(),
                datagrams: BTreeMap::new(),
                first_at: now,
                cost: 0,
                account: Arc::clone(account),
                known: GroupState::default(),
            };
            group.add(GROUP_COST);
            group
        })
    }

    /// Checks whether an object with this status may exist at `location`, given the end of the track.
    fn judge_end(&self, location: Location, status: Option<Status>) -> Result<(), TrackMalformed> {
        if self.end.is_some_and(|end| location > end) {
            return Err(TrackMalformed("an object after the last of the track"));
        }
        let ends = status == Some(Status::EndOfTrack);
        if ends && self.largest.is_some_and(|largest| largest > location) {
            return Err(TrackMalformed("the end of the track before objects that have arrived"));
        }
        Ok(())
    }

    /// Checks that a new stream has the same priority as the other streams of its subgroup.
    fn check_priority(&self, subgroup: &SubgroupStream) -> Result<(), TrackMalformed> {
        let header = subgroup.header();
        let default = self.parsed.publisher_priority.unwrap_or(DEFAULT_PRIORITY);
        let priority = |one: &SubgroupStream| one.header().priority.unwrap_or(default);
        let Some(id) = subgroup.id() else { return Ok(()) };
        let Some(group) = self.groups.get(&header.group) else { return Ok(()) };
        let mut same = group.subgroups.iter().filter(|other| other.id() == Some(id));
        match same.any(|other| priority(other) != priority(subgroup)) {
            true => Err(TrackMalformed("a subgroup has two priorities")),
            false => Ok(()),
        }
    }

    fn saw_object(&mut self, location: Location) {
        let astray = match self.largest {
            Some(largest) if largest.group.saturating_sub(location.group) > GROUP_SLACK => {
                self.behind.record(location.group)
            }
            _ => {
                self.behind = Behind::default();
                false
            }
        };
        match astray {
            true => {
                self.largest = Some(location);
                // The ID of the former largest group was wrong. If `known_from` is in a group above `location`, it was
                // derived from that wrong ID, so it is discarded.
                self.known_from.take_if(|known| known.group > location.group);
                self.behind = Behind::default();
            }
            false => self.largest = self.largest.max(Some(location)),
        }
        self.seen = true;
        self.claimed.take_if(|claimed| astray || *claimed <= location);
        // A subscription that began inside a group lacks the beginning of that group. The range in which every object
        // is known therefore starts with the next group.
        self.known_from.get_or_insert(match location.object {
            0 => location,
            _ => Location { group: location.group.saturating_add(1), object: 0 },
        });
    }
}
