//! A FETCH response as a stream source: object headers of its own, payloads from the cache.

use std::{collections::VecDeque, ops::RangeInclusive, sync::Arc, time::Instant};

use bytes::Bytes;
use millrace_quic::plane::source::{End, Extent, Source};
use parking_lot::RwLock;

use super::{
    subgroup::Subgroup,
    track::{DatagramObject, Group, Track},
};
use crate::{
    Draft, FetchEncoder, FetchItem, FetchObject, GroupOrder, Location, Status,
    data::{RangeEnd, encode_fetch_header},
};

/// The bytes of a FETCH response. It grows by items and ends once; what was acknowledged is dropped from its front.
pub struct Response {
    state: RwLock<State>,
    /// Called when something was acknowledged.
    on_acknowledged: Box<dyn Fn() + Send + Sync>,
}

struct State {
    encoder: FetchEncoder,
    segments: VecDeque<Segment>,
    len: u64,
    end: End,
    /// Memory of the segments, bytes.
    held: usize,
}

/// An object header of the response and the payload behind it, or a further part of its payload.
struct Segment {
    start: u64,
    header: Vec<u8>,
    payload: Payload,
}

impl Segment {
    fn end(&self) -> u64 {
        self.start + self.header.len() as u64 + self.payload.len()
    }

    /// Payloads in the cache are the cache's.
    fn cost(&self) -> usize {
        let owned = match &self.payload {
            Payload::Owned(bytes) => bytes.len(),
            Payload::Cached { .. } => 0,
        };
        size_of::<Self>() + self.header.capacity() + owned
    }
}

/// Where the payload of an object is.
#[derive(Clone)]
pub enum Payload {
    Owned(Bytes),
    Cached { subgroup: Arc<Subgroup>, from: u64, len: u64 },
}

impl Payload {
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
pub struct Entry {
    pub item: FetchItem,
    pub payload: Payload,
}

impl Response {
    /// An empty response to the FETCH with this request ID: its FETCH_HEADER, behind what the subscriber's streams begin with.
    /// `on_acknowledged` is called when something was acknowledged, with locks held.
    pub fn new(
        preamble: &[u8],
        request_id: u64,
        (draft, order): (Draft, GroupOrder),
        on_acknowledged: impl Fn() + Send + Sync + 'static,
    ) -> Self {
        let mut header = preamble.to_vec();
        encode_fetch_header(request_id, &mut header);
        let encoder = FetchEncoder::new(draft, order);
        let mut state = State { encoder, segments: VecDeque::new(), len: 0, end: End::Open, held: 0 };
        state.append(header, Payload::Owned(Bytes::new()));
        Self { state: RwLock::new(state), on_acknowledged: Box::new(on_acknowledged) }
    }

    pub fn push(&self, entry: Entry) {
        let state = &mut *self.state.write();
        let mut header = Vec::with_capacity(16);
        state.encoder.encode(&entry.item, &mut header);
        state.append(header, entry.payload);
    }

    /// More of the payload of the last object.
    pub fn push_payload(&self, bytes: Bytes) {
        self.state.write().append(Vec::new(), Payload::Owned(bytes));
    }

    /// Memory that the response takes besides the cache's, bytes.
    pub fn held(&self) -> usize {
        self.state.read().held
    }

    /// Says of all objects up to and including `last` that they are not here, and why.
    pub fn push_absent(&self, last: Location, end: RangeEnd) {
        let item = FetchItem::Range { last, end };
        self.push(Entry { item, payload: Payload::Owned(Bytes::new()) });
    }

    /// The response is complete.
    pub fn finish(&self, now: Instant) {
        self.state.write().end = End::Fin { at: now };
    }

    /// The response cannot be completed; its stream is reset with `code`.
    pub fn abort(&self, code: u64) {
        self.state.write().end = End::Reset(code);
    }
}

impl State {
    fn append(&mut self, header: Vec<u8>, payload: Payload) {
        let start = self.len;
        let segment = Segment { start, header, payload };
        self.len = segment.end();
        self.held += segment.cost();
        self.segments.push_back(segment);
    }
}

impl Source for Response {
    fn extent(&self) -> Extent {
        let state = self.state.read();
        Extent { len: state.len, end: state.end }
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
                break; // evicted
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
        None // delivery timeouts do not apply to FETCH
    }
}

/// Whether a range of a track can be given from the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Readiness {
    /// An object of the range is still arriving.
    Unfinished,
    /// Objects may be on the way: a group is still arriving, and IDs in it are missing.
    Gaps,
    Ready,
}

/// Whether what the cache holds from `first` to `last`, both inclusive, has arrived.
pub fn readiness(track: &Track, first: Location, last: Location) -> Readiness {
    let nothing_held = Location { object: last.object.saturating_add(1), ..last };
    let first = track.known_from().map_or(nothing_held, |known| known.max(first));
    let range = Range { first, last, oldest: None, default_priority: 0 };
    let mut readiness = Readiness::Ready;
    let unfinished = track.visit(first.group, last.group, GroupOrder::Ascending, |id, group| {
        if !group.is_open() {
            return None;
        }
        if range.is_arriving(id, group) {
            return Some(());
        }
        if range.misses_some(id, group) {
            readiness = Readiness::Gaps;
        }
        None
    });
    if unfinished.is_some() { Readiness::Unfinished } else { readiness }
}

/// The way through a range of a track, a few objects at a time.
pub struct Walk {
    first: Location,
    last: Location,
    order: GroupOrder,
    /// The group that is next, and the object in it; `None` at the end.
    at: Option<Location>,
}

/// What comes next on a [`Walk`].
pub enum Step {
    /// Cached objects, in order.
    Objects(Vec<Entry>),
    /// What the cache does not hold from one location to another, both inclusive.
    Missing(Location, Location),
    Done,
}

impl Walk {
    /// From `first` to `last`, both inclusive.
    pub fn new(first: Location, last: Location, order: GroupOrder) -> Self {
        let at = match order {
            GroupOrder::Ascending => first,
            GroupOrder::Descending if first.group == last.group => first,
            GroupOrder::Descending => Location { group: last.group, object: 0 },
        };
        Self { first, last, order, at: (first <= last).then_some(at) }
    }

    /// The next objects, `max` at most. The track may have changed since the last step.
    pub fn next(&mut self, track: &Track, now: Instant, max: usize) -> Step {
        let nothing_held = Location { object: self.last.object.saturating_add(1), ..self.last };
        let held_from = track.known_from().unwrap_or(nothing_held);
        let Some(at) = self.at else { return Step::Done };
        if self.order == GroupOrder::Ascending && at < held_from {
            let to = before(held_from).min(self.last);
            self.at = (held_from <= self.last).then_some(held_from);
            return Step::Missing(at, to);
        }
        let range = Range {
            first: at.max(held_from).max(self.first),
            last: self.last,
            oldest: track.max_cache_duration().and_then(|duration| now.checked_sub(duration)),
            default_priority: track.default_priority(),
        };
        let (low, high) = match self.order {
            GroupOrder::Ascending => (at.group, self.last.group),
            GroupOrder::Descending => (self.first.group.max(held_from.group), at.group),
        };
        let found = track.visit(low, high, self.order, |id, group| {
            let from = if id == at.group { at.object } else { 0 };
            let (objects, more) = range.in_group(id, group, from, max);
            (!objects.is_empty() || more.is_some()).then_some((id, objects, more))
        });
        match found {
            Some((id, objects, more)) => {
                self.at = match more {
                    Some(object) => Some(Location { group: id, object }),
                    None => self.behind(id),
                };
                Step::Objects(objects)
            }
            None => self.end(at, held_from),
        }
    }

    /// The group behind `group`, in the range's order.
    fn behind(&self, group: u64) -> Option<Location> {
        let next = match self.order {
            GroupOrder::Ascending => group.checked_add(1),
            GroupOrder::Descending => group.checked_sub(1),
        };
        let next = next.filter(|next| (self.first.group..=self.last.group).contains(next));
        next.map(|group| Location { group, object: 0 })
    }

    /// No more objects are cached. In descending order, what is not cached comes last.
    fn end(&mut self, at: Location, held_from: Location) -> Step {
        self.at = None;
        let to = before(held_from).min(self.last).min(Location { group: at.group, object: u64::MAX });
        match self.order {
            GroupOrder::Descending if held_from > self.first => Step::Missing(self.first, to),
            _ => Step::Done,
        }
    }
}

/// The last location that is smaller than `location`.
fn before(location: Location) -> Location {
    match location.object.checked_sub(1) {
        Some(object) => Location { object, ..location },
        None => Location { group: location.group.saturating_sub(1), object: u64::MAX },
    }
}

struct Range {
    first: Location,
    last: Location,
    /// Objects that arrived before this time may not be served any more (MAX_CACHE_DURATION).
    oldest: Option<Instant>,
    default_priority: u8,
}

impl Range {
    /// The object IDs of a group that are in the range.
    fn ids(&self, group: u64) -> RangeInclusive<u64> {
        let first = if group == self.first.group { self.first.object } else { 0 };
        let last = if group == self.last.group { self.last.object } else { u64::MAX };
        first..=last
    }

    /// Whether an object of the range has begun to arrive and has not come whole: only the last of a stream can be that.
    fn is_arriving(&self, id: u64, group: &Group) -> bool {
        group.subgroups.iter().any(|subgroup| {
            let Extent { len, end } = subgroup.extent();
            let last = subgroup.last_object();
            end == End::Open
                && last.is_some_and(|last| self.ids(id).contains(&last.start.id) && last.start.end() > len)
        })
    }

    /// Whether fewer objects of `group` are here than the range has IDs; false where the range does not say how many.
    fn misses_some(&self, id: u64, group: &Group) -> bool {
        if id != self.last.group {
            return false;
        }
        let ids = self.ids(id);
        let in_subgroups: usize = group.subgroups.iter().map(|subgroup| subgroup.count(&ids)).sum();
        let found = in_subgroups + group.datagrams.range(ids.clone()).count();
        found as u64 <= ids.end().saturating_sub(*ids.start())
    }

    /// Objects of a group by ID from `from` on, `max` at most, and the ID to go on with if there are more.
    fn in_group(&self, id: u64, group: &Group, from: u64, max: usize) -> (Vec<Entry>, Option<u64>) {
        let ids = self.ids(id);
        let ids = from.max(*ids.start())..=*ids.end();
        let mut found = Vec::new();
        // Up to here, no subgroup has objects that are not in `found`.
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

    /// Takes `max` objects of a subgroup at most; the last ID that was looked at, if there may be more.
    fn take_subgroup(
        &self,
        group: u64,
        subgroup: &Arc<Subgroup>,
        ids: &RangeInclusive<u64>,
        max: usize,
        found: &mut Vec<(u64, Entry)>,
    ) -> Option<u64> {
        let Extent { len, .. } = subgroup.extent();
        let subgroup_id = subgroup.id();
        let priority = subgroup.header().priority.unwrap_or(self.default_priority);
        let objects = subgroup.objects_of(ids, max);
        for object in &objects {
            let start = &object.start;
            let normal = start.status.is_none_or(|status| status == Status::Normal);
            // One that is not whole was reset, or is on the way for longer than anybody waits.
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
            let payload = Payload::Cached {
                subgroup: Arc::clone(subgroup),
                from: start.payload,
                len: start.payload_len,
            };
            found.push((start.id, Entry { item, payload }));
        }
        (objects.len() == max).then(|| objects.last().map_or(0, |last| last.start.id))
    }

    fn datagram(&self, object: &DatagramObject) -> (u64, Entry) {
        let datagram = &object.datagram;
        let item = FetchItem::Object(FetchObject {
            location: object.location(),
            subgroup: None,
            priority: datagram.priority.unwrap_or(self.default_priority),
            properties: datagram.properties.clone(),
            payload_len: datagram.payload.len() as u64,
        });
        (datagram.object, Entry { item, payload: Payload::Owned(datagram.payload.clone()) })
    }
}
