//! A FETCH response as a source for the data plane. It stores its object headers itself, and reads payloads from the
//! cache.

use std::{collections::VecDeque, ops::RangeInclusive, sync::Arc, time::Instant};

use bytes::Bytes;
use millrace_quic::plane::source::{Source, SourceEnd, SourceExtent};
use parking_lot::RwLock;

use super::{
    subgroup::SubgroupStream,
    track::{CachedDatagram, CachedGroup, Track},
};
use crate::{
    Draft, FetchEncoder, FetchItem, FetchObject, GroupOrder, Location, Status,
    data::{RangeEnd, encode_fetch_header},
};

/// The bytes of a FETCH response. Items are appended until the response ends, and acknowledged bytes are dropped from
/// its front.
pub struct FetchResponse {
    state: RwLock<FetchState>,
    /// A callback that is called whenever the peer has acknowledged bytes of the response.
    on_acknowledged: Box<dyn Fn() + Send + Sync>,
}

struct FetchState {
    encoder: FetchEncoder,
    segments: VecDeque<Segment>,
    len: u64,
    end: SourceEnd,
    /// Memory of the response's headers and of the payloads that the response stores itself, in bytes.
    held: usize,
}

/// An object header of the response and the payload after it, or a later part of a payload.
struct Segment {
    start: u64,
    header: Vec<u8>,
    payload: PayloadPlace,
}

impl Segment {
    fn end(&self) -> u64 {
        self.start + self.header.len() as u64 + self.payload.len()
    }

    /// Returns the memory of this segment of the response, in bytes. Payloads in the cache are not included, because
    /// the cache counts them.
    fn cost(&self) -> usize {
        let owned = match &self.payload {
            PayloadPlace::Owned(bytes) => bytes.len(),
            PayloadPlace::Cached { .. } => 0,
        };
        size_of::<Self>() + self.header.capacity() + owned
    }
}

/// The place where an object's payload is stored.
#[derive(Clone)]
pub enum PayloadPlace {
    /// The response stores the bytes itself.
    Owned(Bytes),
    /// The bytes are in a cached subgroup.
    Cached {
        /// The subgroup.
        subgroup: Arc<SubgroupStream>,
        /// Offset of the payload's first byte in the subgroup.
        from: u64,
        /// Length of the payload, in bytes.
        len: u64,
    },
}

impl PayloadPlace {
    fn len(&self) -> u64 {
        match self {
            Self::Owned(bytes) => bytes.len() as u64,
            Self::Cached { len, .. } => *len,
        }
    }

    fn read(&self, offset: u64, buf: &mut [u8]) -> usize {
        match self {
            Self::Owned(bytes) => {
                let rest = bytes.get(offset as usize..).unwrap_or(&[]);
                let n = rest.len().min(buf.len());
                buf[..n].copy_from_slice(&rest[..n]);
                n
            }
            Self::Cached { subgroup, from, len } => {
                let n = usize::try_from(len.saturating_sub(offset)).map_or(buf.len(), |n| n.min(buf.len()));
                subgroup.read(from + offset, &mut buf[..n])
            }
        }
    }
}

/// An item of a response, with its payload if it is an object.
#[derive(Clone)]
pub struct FetchEntry {
    /// The object or range.
    pub item: FetchItem,
    /// The payload. It is empty for a range.
    pub payload: PayloadPlace,
}

impl FetchEntry {
    /// Makes the item for a range without objects, up to `last`.
    fn absent(last: Location, end: RangeEnd) -> Self {
        Self { item: FetchItem::Range { last, end }, payload: PayloadPlace::Owned(Bytes::new()) }
    }
}

impl FetchResponse {
    /// Makes an empty response to the FETCH with this request ID. It begins with `preamble`, which all streams to this
    /// subscriber have, and FETCH_HEADER. `on_acknowledged` is called when the peer has acknowledged bytes, possibly
    /// with locks held.
    pub fn new(
        preamble: &[u8],
        request_id: u64,
        draft: Draft,
        order: GroupOrder,
        on_acknowledged: impl Fn() + Send + Sync + 'static,
    ) -> Self {
        let mut header = preamble.to_vec();
        encode_fetch_header(request_id, &mut header);
        let encoder = FetchEncoder::new(draft, order);
        let mut state =
            FetchState { encoder, segments: VecDeque::new(), len: 0, end: SourceEnd::Open, held: 0 };
        state.append(header, PayloadPlace::Owned(Bytes::new()));
        Self { state: RwLock::new(state), on_acknowledged: Box::new(on_acknowledged) }
    }

    /// Appends an item to the response.
    pub fn push(&self, entry: FetchEntry) {
        let state = &mut *self.state.write();
        let mut header = Vec::with_capacity(16);
        state.encoder.encode(&entry.item, &mut header);
        state.append(header, entry.payload);
    }

    /// Appends more bytes to the payload of the last object.
    pub fn push_payload(&self, bytes: Bytes) {
        self.state.write().append(Vec::new(), PayloadPlace::Owned(bytes));
    }

    /// Returns the memory of the response in bytes, without the payloads in the cache.
    pub fn held(&self) -> usize {
        self.state.read().held
    }

    /// Appends a range without objects, from the location after the previous item up to and including `last`.
    pub fn push_absent(&self, last: Location, end: RangeEnd) {
        self.push(FetchEntry::absent(last, end));
    }

    /// Marks the response as complete.
    pub fn finish(&self, now: Instant) {
        self.state.write().end = SourceEnd::Fin { at: now };
    }

    /// Aborts the response, so that its stream is reset with `code`.
    pub fn abort(&self, code: u64) {
        self.state.write().end = SourceEnd::Reset(code);
    }
}

impl FetchState {
    fn append(&mut self, header: Vec<u8>, payload: PayloadPlace) {
        let start = self.len;
        let segment = Segment { start, header, payload };
        self.len = segment.end();
        self.held += segment.cost();
        self.segments.push_back(segment);
    }
}

impl Source for FetchResponse {
    fn extent(&self) -> SourceExtent {
        let state = self.state.read();
        SourceExtent { len: state.len, end: state.end }
    }

    fn read(&self, offset: u64, buf: &mut [u8]) -> usize {
        let state = self.state.read();
        let first = state.segments.partition_point(|segment| segment.start <= offset).saturating_sub(1);
        let mut done = 0;
        for segment in state.segments.iter().skip(first) {
            if done == buf.len() {
                break;
            }
            let Some(within) = (offset + done as u64).checked_sub(segment.start) else { break };
            let head = segment.header.get(within as usize..).unwrap_or(&[]);
            let n = head.len().min(buf.len() - done);
            buf[done..done + n].copy_from_slice(&head[..n]);
            done += n;
            let from = (within + n as u64).saturating_sub(segment.header.len() as u64);
            let room = buf.len() - done;
            let owed = usize::try_from(segment.payload.len() - from).map_or(room, |owed| owed.min(room));
            let n = segment.payload.read(from, &mut buf[done..done + owed]);
            done += n;
            if n < owed {
                break; // The subgroup was evicted, so no more bytes can be read.
            }
        }
        done
    }

    fn acknowledged(&self, offset: u64) {
        let mut state = self.state.write();
        while let Some(first) = state.segments.front()
            && first.end() <= offset
        {
            state.held -= first.cost();
            state.segments.pop_front();
        }
        drop(state);
        (self.on_acknowledged)();
    }

    fn received_at(&self, _offset: u64) -> Option<Instant> {
        None // Delivery timeouts do not apply to FETCH.
    }
}

/// The arrival state of the objects in a range of a track.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Readiness {
    /// An object of the requested range is still arriving.
    Unfinished,
    /// Objects may still arrive: a group has not ended, and some of its object IDs are missing.
    Gaps,
    /// Every object in the cached part of the requested range has arrived.
    Ready,
}

/// Returns whether all objects between `first` and `last`, inclusive, have arrived, as far as the cache covers this
/// range. Streams of different groups may overtake each other: a group that the cache lacks may be on its way if the next
/// one has begun after `late_since`, or at any time if that is `None`.
pub fn readiness(track: &Track, first: Location, last: Location, late_since: Option<Instant>) -> Readiness {
    let nothing_held = Location { object: last.object.saturating_add(1), ..last };
    let first = track.known_from().map_or(nothing_held, |known| known.max(first));
    let range = FetchRange { first, last, oldest: None, late_since, default_priority: 0 };
    let mut readiness = Readiness::Ready;
    let mut expected = first.group;
    let unfinished = track.visit(first.group, u64::MAX, GroupOrder::Ascending, |id, group| {
        let is_skipped = range.awaits(expected, id, group);
        expected = id.saturating_add(1);
        if is_skipped || range.is_unfinished(id, group) || range.misses_some(id, group) {
            readiness = Readiness::Gaps;
        }
        match id > last.group {
            true => Some(false),
            false => range.is_arriving(id, group).then_some(true),
        }
    });
    if unfinished == Some(true) { Readiness::Unfinished } else { readiness }
}

/// An iteration over the cached objects of a range, which returns a few objects at a time.
pub struct FetchWalk {
    first: Location,
    last: Location,
    order: GroupOrder,
    /// The location from which the iteration continues, or `None` at the end of the requested range.
    at: Option<Location>,
}

/// The result of one call of [`FetchWalk::next`].
pub enum WalkStep {
    /// Cached objects, in the order of the response.
    Objects(Vec<FetchEntry>),
    /// A range that the cache does not cover, from the first location to the second, inclusive.
    Missing(Location, Location),
    /// The end of the requested range was reached.
    Done,
}

impl FetchWalk {
    /// Makes an iteration from `first` to `last`, inclusive.
    pub fn new(first: Location, last: Location, order: GroupOrder) -> Self {
        let at = match order {
            GroupOrder::Ascending => first,
            GroupOrder::Descending if first.group == last.group => first,
            GroupOrder::Descending => Location { group: last.group, object: 0 },
        };
        Self { first, last, order, at: (first <= last).then_some(at) }
    }

    /// Returns the next objects, at most `max`. The track may have changed since the previous call. In ascending order,
    /// ranges whose objects have not arrived in time are returned, too: see [`readiness`] for `late_since`.
    pub fn next(&mut self, track: &Track, now: Instant, late_since: Option<Instant>, max: usize) -> WalkStep {
        let nothing_held = Location { object: self.last.object.saturating_add(1), ..self.last };
        let held_from = track.known_from().unwrap_or(nothing_held);
        let Some(at) = self.at else { return WalkStep::Done };
        if self.order == GroupOrder::Ascending && at < held_from {
            let to = previous_location(held_from).min(self.last);
            self.at = (held_from <= self.last).then_some(held_from);
            return WalkStep::Missing(at, to);
        }
        let range = FetchRange {
            first: at.max(held_from).max(self.first),
            last: self.last,
            oldest: track.max_cache_duration().and_then(|duration| now.checked_sub(duration)),
            late_since,
            default_priority: track.default_priority(),
        };
        let is_ascending = self.order == GroupOrder::Ascending;
        let (low, high) = match is_ascending {
            true => (at.group, u64::MAX),
            false => (self.first.group.max(held_from.group), at.group),
        };
        let mut expected = at.group;
        let last = self.last;
        let found = track.visit(low, high, self.order, |id, group| {
            let late = |last| FetchEntry::absent(last, RangeEnd::TimedOut);
            let mut items = Vec::new();
            if is_ascending && range.awaits(expected, id, group) {
                items.push(late(previous_location(Location { group: id, object: 0 }).min(last)));
            }
            expected = id.saturating_add(1);
            if id > last.group {
                return Some((last.group, items, None));
            }
            let from = if id == at.group { at.object } else { 0 };
            let (objects, more) = range.walk_group(id, group, from, max);
            items.extend(objects);
            if is_ascending && more.is_none() && range.is_unfinished(id, group) {
                items.push(late(Location { group: id, object: u64::MAX }));
            }
            (!items.is_empty() || more.is_some()).then_some((id, items, more))
        });
        match found {
            Some((id, objects, more)) => {
                self.at = match more {
                    Some(object) => Some(Location { group: id, object }),
                    None => self.next_location(id),
                };
                WalkStep::Objects(objects)
            }
            None => self.end(at, held_from),
        }
    }

    /// Returns the start of the next group in the iteration's order, or `None` if that group is not in the range.
    fn next_location(&self, group: u64) -> Option<Location> {
        let next = match self.order {
            GroupOrder::Ascending => group.checked_add(1),
            GroupOrder::Descending => group.checked_sub(1),
        };
        let next = next.filter(|next| (self.first.group..=self.last.group).contains(next));
        next.map(|group| Location { group, object: 0 })
    }

    /// Ends the iteration, because no more objects are cached. In descending order, it returns the rest of the range,
    /// which the cache does not cover, as missing.
    fn end(&mut self, at: Location, held_from: Location) -> WalkStep {
        self.at = None;
        let to =
            previous_location(held_from).min(self.last).min(Location { group: at.group, object: u64::MAX });
        match self.order {
            GroupOrder::Descending if held_from > self.first => WalkStep::Missing(self.first, to),
            _ => WalkStep::Done,
        }
    }
}

/// Returns the largest possible location before `location`.
fn previous_location(location: Location) -> Location {
    match location.object.checked_sub(1) {
        Some(object) => Location { object, ..location },
        None => Location { group: location.group.saturating_sub(1), object: u64::MAX },
    }
}

struct FetchRange {
    first: Location,
    last: Location,
    /// Objects that arrived before this time are too old to be served (MAX_CACHE_DURATION).
    oldest: Option<Instant>,
    /// See [`readiness`].
    late_since: Option<Instant>,
    default_priority: u8,
}

impl FetchRange {
    /// Returns the range of object IDs that this range of locations has in a group.
    fn ids(&self, group: u64) -> RangeInclusive<u64> {
        let first = if group == self.first.group { self.first.object } else { 0 };
        let last = if group == self.last.group { self.last.object } else { u64::MAX };
        first..=last
    }

    /// Reports whether an object of the range has arrived only partly. Only the last object of a stream can be partial.
    fn is_arriving(&self, id: u64, group: &CachedGroup) -> bool {
        group.subgroups.iter().any(|subgroup| {
            let SourceExtent { len, end } = subgroup.extent();
            let last = subgroup.last_object();
            end == SourceEnd::Open
                && last.is_some_and(|last| self.ids(id).contains(&last.start.id) && last.start.end() > len)
        })
    }

    /// Reports whether the cache lacks groups of the range from `expected` on and before the cached group `id`, and they
    /// may be on their way.
    fn awaits(&self, expected: u64, id: u64, group: &CachedGroup) -> bool {
        let lacks = expected < id && expected <= self.last.group;
        lacks && self.late_since.is_none_or(|since| group.first_at > since)
    }

    /// Reports whether the range covers the end of this cached group, and more of the group may arrive.
    fn is_unfinished(&self, id: u64, group: &CachedGroup) -> bool {
        id <= self.last.group && *self.ids(id).end() == u64::MAX && group.is_open()
    }

    /// Reports whether the cached group is open and lacks any object ID of the range. It is false if the range covers
    /// the group's end, because the number of objects is then unknown.
    fn misses_some(&self, id: u64, group: &CachedGroup) -> bool {
        if id != self.last.group || !group.is_open() {
            return false;
        }
        let ids = self.ids(id);
        let in_subgroups: usize = group.subgroups.iter().map(|subgroup| subgroup.count(&ids)).sum();
        let found = in_subgroups + group.datagrams.range(ids.clone()).count();
        // An inclusive range contains one ID more than the difference of its ends.
        found as u64 <= ids.end().saturating_sub(*ids.start())
    }

    /// Returns at most `max` objects of a group, in order of ID, from the ID `from` on. If the group has more objects
    /// in the range, also returns the ID to continue with.
    fn walk_group(
        &self,
        id: u64,
        group: &CachedGroup,
        from: u64,
        max: usize,
    ) -> (Vec<FetchEntry>, Option<u64>) {
        let ids = self.ids(id);
        let ids = from.max(*ids.start())..=*ids.end();
        let mut found = Vec::new();
        // Up to this object ID, `found` contains every cached object of the subgroups that the loop has visited.
        let mut known_to = u64::MAX;
        for subgroup in &group.subgroups {
            if let Some(last) = self.take_subgroup(id, subgroup, &ids, max, &mut found) {
                known_to = known_to.min(last);
            }
        }
        let datagrams = group.datagrams.range(ids).take(max);
        for (count, (id, object)) in datagrams.enumerate() {
            if count + 1 == max {
                known_to = known_to.min(*id);
            }
            let normal = object.datagram.status.is_none_or(|status| status == Status::Normal);
            if normal && self.is_fresh(object.received_at) {
                found.push(self.datagram(object));
            }
        }
        found.retain(|(id, _)| *id <= known_to);
        found.sort_by_key(|(id, _)| *id);
        found.dedup_by_key(|(id, _)| *id);
        if found.len() > max {
            found.truncate(max);
            known_to = found.last().map_or(known_to, |(last, _)| *last);
        }
        let more = (known_to < *self.ids(id).end()).then(|| known_to + 1);
        (found.into_iter().map(|(_, entry)| entry).collect(), more)
    }

    fn is_fresh(&self, received_at: Instant) -> bool {
        self.oldest.is_none_or(|oldest| received_at >= oldest)
    }

    /// Adds at most `max` objects of a subgroup to `found`. If the subgroup may have more objects in the range, returns
    /// the last ID that was examined.
    fn take_subgroup(
        &self,
        group: u64,
        subgroup: &Arc<SubgroupStream>,
        ids: &RangeInclusive<u64>,
        max: usize,
        found: &mut Vec<(u64, FetchEntry)>,
    ) -> Option<u64> {
        let SourceExtent { len, .. } = subgroup.extent();
        let subgroup_id = subgroup.id();
        let priority = subgroup.header().priority.unwrap_or(self.default_priority);
        let objects = subgroup.objects_of(ids, max);
        for object in &objects {
            let start = &object.start;
            let normal = start.status.is_none_or(|status| status == Status::Normal);
            // An object is skipped if only part of it has arrived: its stream was reset, or the FETCH has waited long
            // enough for it.
            if !normal || !self.is_fresh(object.received_at) || start.end() > len {
                continue;
            }
            let item = FetchItem::Object(FetchObject {
                location: Location::new(group, start.id),
                subgroup: subgroup_id,
                priority,
                properties: start.properties.clone(),
                payload_len: start.payload_len,
            });
            let payload = PayloadPlace::Cached {
                subgroup: Arc::clone(subgroup),
                from: start.payload,
                len: start.payload_len,
            };
            found.push((start.id, FetchEntry { item, payload }));
        }
        (objects.len() == max).then(|| objects.last().map_or(0, |last| last.start.id))
    }

    fn datagram(&self, object: &CachedDatagram) -> (u64, FetchEntry) {
        let datagram = &object.datagram;
        let item = FetchItem::Object(FetchObject {
            location: object.location(),
            subgroup: None,
            priority: datagram.priority.unwrap_or(self.default_priority),
            properties: datagram.properties.clone(),
            payload_len: datagram.payload.len() as u64,
        });
        (datagram.object, FetchEntry { item, payload: PayloadPlace::Owned(datagram.payload.clone()) })
    }
}
