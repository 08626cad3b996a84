//! A FETCH response as a stream source: object headers of its own, payloads from the cache.

use std::{sync::Arc, time::Instant};

use bytes::Bytes;
use parking_lot::RwLock;

use super::{
    subgroup::Subgroup,
    track::{DatagramObject, Group, Track},
};
use crate::{
    moq::{
        FetchEncoder, FetchItem, FetchObject, GroupOrder, Location, Status,
        data::{RangeEnd, encode_fetch_header},
    },
    plane::source::{End, Extent, Source},
};

/// The bytes of a FETCH response. It grows by whole objects and ends once.
pub struct Response {
    state: RwLock<State>,
}

struct State {
    encoder: FetchEncoder,
    segments: Vec<Segment>,
    len: u64,
    end: End,
}

/// An object header of the response and the payload behind it.
struct Segment {
    start: u64,
    header: Vec<u8>,
    payload: Payload,
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
    /// An empty response to the FETCH with this request ID: its FETCH_HEADER.
    pub fn new(request_id: u64, order: GroupOrder) -> Self {
        let mut header = Vec::new();
        encode_fetch_header(request_id, &mut header);
        let len = header.len() as u64;
        let segments = vec![Segment { start: 0, header, payload: Payload::Owned(Bytes::new()) }];
        Self {
            state: RwLock::new(State { encoder: FetchEncoder::new(order), segments, len, end: End::Open }),
        }
    }

    pub fn push(&self, entry: Entry) {
        let state = &mut *self.state.write();
        let mut header = Vec::with_capacity(16);
        state.encoder.encode(&entry.item, &mut header);
        state.append(header, entry.payload);
    }

    /// Says that the status of all objects up to and including `last` is unknown.
    pub fn push_unknown(&self, last: Location) {
        let item = FetchItem::Range { last, end: RangeEnd::Unknown };
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
        self.len += header.len() as u64 + payload.len();
        self.segments.push(Segment { start, header, payload });
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
            let within = offset + done as u64 - segment.start;
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

    fn received_at(&self, _offset: u64) -> Option<Instant> {
        None // delivery timeouts do not apply to FETCH
    }
}

/// What the cache can give for a range of a track.
pub enum Plan {
    /// An object of the range is still arriving.
    Unfinished,
    /// As `Ready`, but objects may be on the way: a group is still arriving, and IDs in it are missing.
    Gaps { held_from: Location, objects: Vec<Entry> },
    /// All objects from `held_from` on, in the order asked for. Those before it are not cached.
    Ready { held_from: Location, objects: Vec<Entry> },
}

/// Collects the cached objects of `track` from `first` to `last`, both inclusive.
pub fn plan(track: &Track, first: Location, last: Location, order: GroupOrder, now: Instant) -> Plan {
    let nothing_held = Location { object: last.object.saturating_add(1), ..last };
    let held_from = track.known_from().map_or(nothing_held, |known| known.max(first));
    let range = Range {
        first: held_from,
        last,
        oldest: track.max_cache_duration().and_then(|duration| now.checked_sub(duration)),
        default_priority: track.default_priority(),
    };
    let mut groups = track.groups(held_from.group, last.group);
    if order == GroupOrder::Descending {
        groups.reverse();
    }
    let (mut objects, mut gaps) = (Vec::new(), false);
    for (id, group) in groups {
        let Some(mut found) = range.objects_of(id, &group) else { return Plan::Unfinished };
        gaps |= group.is_open() && range.misses_some(id, found.len() as u64);
        objects.append(&mut found);
    }
    match gaps {
        true => Plan::Gaps { held_from, objects },
        false => Plan::Ready { held_from, objects },
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
    fn takes(&self, location: Location, received_at: Instant) -> bool {
        (self.first..=self.last).contains(&location) && self.oldest.is_none_or(|oldest| received_at >= oldest)
    }

    /// Whether fewer objects of `group` were found than the range has IDs; false where the range does not say how many.
    fn misses_some(&self, group: u64, found: u64) -> bool {
        let first = if group == self.first.group { self.first.object } else { 0 };
        group == self.last.group && found <= self.last.object.saturating_sub(first)
    }

    /// The objects of a group that are in the range, by ID; `None` while one of them is still arriving.
    fn objects_of(&self, id: u64, group: &Group) -> Option<Vec<Entry>> {
        let mut found = Vec::new();
        for subgroup in &group.subgroups {
            self.take_subgroup(id, subgroup, &mut found)?;
        }
        for object in group.datagrams.values() {
            let normal = object.datagram.status.is_none_or(|status| status == Status::Normal);
            if normal && self.takes(object.location(), object.received_at) {
                found.push(self.datagram(object));
            }
        }
        found.sort_by_key(|(id, _)| *id);
        found.dedup_by_key(|(id, _)| *id);
        Some(found.into_iter().map(|(_, entry)| entry).collect())
    }

    fn take_subgroup(
        &self,
        group: u64,
        subgroup: &Arc<Subgroup>,
        found: &mut Vec<(u64, Entry)>,
    ) -> Option<()> {
        let Extent { len, end } = subgroup.extent();
        let subgroup_id = subgroup.id();
        let priority = subgroup.header().priority.unwrap_or(self.default_priority);
        for object in subgroup.objects() {
            let start = &object.start;
            let location = Location::new(group, start.id);
            let normal = start.status.is_none_or(|status| status == Status::Normal);
            if !normal || !self.takes(location, object.received_at) {
                continue;
            }
            if start.end() > len {
                match end {
                    End::Open => return None,
                    _ => continue, // the stream was reset inside it
                }
            }
            let item = FetchItem::Object(FetchObject {
                location,
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
        Some(())
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
