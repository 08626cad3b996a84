//! One subgroup stream as it arrived: its raw bytes, and the positions of its objects in them.

use std::{
    ops::{Range, RangeInclusive},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    time::Instant,
};

use bytes::Bytes;
use millrace_quic::plane::source::{SourceEnd, SourceExtent};
use parking_lot::RwLock;

use super::malformed::TrackMalformed;
use crate::{
    DecodeError, FetchObject, ObjectParser, ObjectStart, Position, Status, SubgroupHeader, SubgroupId, code,
    data::encode_object_header,
};

/// The bytes of one subgroup stream after its header. All streams that forward the subgroup share them.
///
/// Offsets count from the first byte after the SUBGROUP_HEADER. One [`SubgroupReceiver`] appends bytes, and
/// [`SubgroupStream::evict`] frees all of them at once. A subgroup is open until its writer ends it by
/// [`finish`](SubgroupReceiver::finish), [`reset`](SubgroupReceiver::reset) or drop, or
/// [`conclude`](SubgroupStream::conclude) ends it early. It never reopens. Readers may keep references to it in every
/// state, but after `evict` they read no bytes.
pub struct SubgroupStream {
    serial: u64,
    header: SubgroupHeader,
    header_len: usize,
    /// Length in bytes of the preamble (WebTransport's stream header) that precedes the SUBGROUP_HEADER on the
    /// publisher's stream.
    preamble: usize,
    settled: AtomicBool,
    state: RwLock<SubgroupBytes>,
}

struct SubgroupBytes {
    chunks: Vec<SubgroupChunk>,
    len: u64,
    objects: Vec<SubgroupObject>,
    end: SourceEnd,
    evicted: bool,
}

struct SubgroupChunk {
    start: u64,
    bytes: Bytes,
}

/// The position of an object in its subgroup's bytes, and the time when the object's first byte arrived.
#[derive(Clone, Debug)]
pub struct SubgroupObject {
    /// The object's header fields and its position.
    pub start: ObjectStart,
    /// Time when the object's first byte arrived.
    pub received_at: Instant,
}

impl SubgroupStream {
    /// Begins a subgroup and returns the only handle that can append to it. `header_len` is the length of the header
    /// as it arrived, in bytes.
    pub fn begin(header: SubgroupHeader, header_len: usize) -> SubgroupReceiver {
        Self::begin_behind(0, header, header_len)
    }

    /// Does the same as [`begin`](Self::begin), for a publisher's stream with a preamble (WebTransport's stream header)
    /// of `preamble` bytes before the SUBGROUP_HEADER.
    pub fn begin_behind(preamble: usize, header: SubgroupHeader, header_len: usize) -> SubgroupReceiver {
        let parser = ObjectParser::new(&header, 0);
        let state = SubgroupBytes {
            chunks: Vec::new(),
            len: 0,
            objects: Vec::new(),
            end: SourceEnd::Open,
            evicted: false,
        };
        static SERIAL: AtomicU64 = AtomicU64::new(0);
        let serial = SERIAL.fetch_add(1, Relaxed);
        let subgroup = Arc::new(Self {
            serial,
            header,
            header_len,
            preamble,
            settled: AtomicBool::new(false),
            state: RwLock::new(state),
        });
        SubgroupReceiver { subgroup, parser }
    }

    /// Returns the stream's serial number, which is unique in this process.
    pub fn serial(&self) -> u64 {
        self.serial
    }

    /// Returns the SUBGROUP_HEADER as it arrived.
    pub fn header(&self) -> &SubgroupHeader {
        &self.header
    }

    /// Returns the length of the SUBGROUP_HEADER as it arrived, in bytes.
    pub fn header_len(&self) -> usize {
        self.header_len
    }

    /// Returns the offset on the publisher's stream of the first byte after the header.
    pub fn body(&self) -> u64 {
        (self.preamble + self.header_len) as u64
    }

    /// Returns the subgroup ID, or `None` if it is the ID of the first object and that object has not arrived.
    pub fn id(&self) -> Option<u64> {
        match self.header.subgroup {
            SubgroupId::Zero => Some(0),
            SubgroupId::Explicit(id) => Some(id),
            SubgroupId::FirstObject => self.state.read().objects.first().map(|first| first.start.id),
        }
    }

    /// Returns the number of bytes received so far, and whether and how the subgroup has ended.
    pub fn extent(&self) -> SourceExtent {
        let state = self.state.read();
        SourceExtent { len: state.len, end: state.end }
    }

    /// Returns the number of received bytes of the objects with IDs up to `last`, and whether and how these objects
    /// have ended. They have ended once an object with a larger ID begins, or the subgroup ends.
    pub fn extent_to(&self, last: u64) -> SourceExtent {
        let state = self.state.read();
        let behind = state.objects.partition_point(|object| object.start.id <= last);
        if let Some(next) = state.objects.get(behind) {
            return SourceExtent { len: next.start.start, end: SourceEnd::Fin { at: next.received_at } };
        }
        // While the stream is open, the bytes after the last object may belong to an object past `last`.
        let known = state.objects.last().map_or(0, |object| object.start.end());
        let len = if state.end == SourceEnd::Open { known.min(state.len) } else { state.len };
        SourceExtent { len, end: state.end }
    }

    /// Copies bytes from `offset` on into `buf` and returns their number: 0 if they have not arrived or were evicted.
    pub fn read(&self, mut offset: u64, buf: &mut [u8]) -> usize {
        let state = self.state.read();
        let mut done = 0;
        for chunk in state.chunks.iter().skip(state.chunk_at(offset)) {
            let Some(bytes) = chunk.bytes.get((offset - chunk.start) as usize..) else { break };
            let n = bytes.len().min(buf.len() - done);
            buf[done..done + n].copy_from_slice(&bytes[..n]);
            done += n;
            offset += n as u64;
            if done == buf.len() {
                break;
            }
        }
        done
    }

    /// Returns the time when the first byte of the object that covers `offset` arrived.
    pub fn received_at(&self, offset: u64) -> Option<Instant> {
        self.state.read().object_at(offset).map(|object| object.received_at)
    }

    /// Returns the byte range of the object that covers `offset`. The range includes the object's header.
    pub fn object_at(&self, offset: u64) -> Option<Range<u64>> {
        let state = self.state.read();
        let ObjectStart { start, payload, payload_len, .. } = state.object_at(offset)?.start;
        Some(start..payload.saturating_add(payload_len))
    }

    /// Returns the first object whose ID is at least `id`, and whether that is the first object of the stream.
    pub fn first_object_from(&self, id: u64) -> Option<(SubgroupObject, bool)> {
        let state = self.state.read();
        let index = state.objects.partition_point(|object| object.start.id < id);
        state.objects.get(index).map(|object| (object.clone(), index == 0))
    }

    /// Returns the first object of the stream.
    pub fn first_object(&self) -> Option<SubgroupObject> {
        self.state.read().objects.first().cloned()
    }

    /// Returns all objects whose headers have arrived, in stream order.
    pub fn objects(&self) -> Vec<SubgroupObject> {
        self.state.read().objects.clone()
    }

    /// Returns at most `max` objects with IDs in `ids`.
    pub fn objects_of(&self, ids: &RangeInclusive<u64>, max: usize) -> Vec<SubgroupObject> {
        let state = self.state.read();
        let range = state.index_range(ids);
        state.objects[range].iter().take(max).cloned().collect()
    }

    /// Returns the number of objects with IDs in `ids`.
    pub fn count(&self, ids: &RangeInclusive<u64>) -> usize {
        self.state.read().index_range(ids).len()
    }

    /// Reports whether the object with this ID has arrived as a whole.
    pub fn has(&self, id: u64) -> bool {
        let state = self.state.read();
        let place = state.objects.binary_search_by_key(&id, |object| object.start.id);
        place.is_ok_and(|place| state.objects[place].start.end() <= state.len)
    }

    /// Returns the last object that has arrived as a whole.
    fn last_whole(&self) -> Option<ObjectStart> {
        let state = self.state.read();
        let last = state.objects.iter().rev().find(|object| object.start.end() <= state.len);
        last.map(|object| object.start.clone())
    }

    /// Returns the header of a fetched object, and the offset at which it continues the subgroup: behind the last whole
    /// object. Returns `None` if the object cannot follow that one.
    pub fn fetched_header(&self, object: &FetchObject) -> Option<(u64, Vec<u8>)> {
        let last = self.last_whole();
        let previous = last.as_ref().map(|last| last.id);
        let id = object.location.object;
        if previous.is_some_and(|previous| previous >= id)
            || !self.header.properties && !object.properties.is_empty()
        {
            return None;
        }
        let properties = self.header.properties.then_some(&object.properties[..]);
        let mut header = Vec::with_capacity(object.properties.len() + 32);
        encode_object_header(previous, id, properties, object.payload_len, Status::Normal, &mut header);
        Some((last.map_or(0, |last| last.end()), header))
    }

    /// Returns the smallest object ID that may follow the whole objects of the subgroup.
    pub fn first_missing(&self) -> u64 {
        self.last_whole().map_or(0, |last| last.id.saturating_add(1))
    }

    /// Returns the time when FIN arrived, or else the time when the first byte of the last object arrived.
    pub fn last_at(&self) -> Option<Instant> {
        let state = self.state.read();
        match state.end {
            SourceEnd::Fin { at } => Some(at),
            _ => state.objects.last().map(|object| object.received_at),
        }
    }

    /// Returns the last object whose header has arrived.
    pub fn last_object(&self) -> Option<SubgroupObject> {
        self.state.read().objects.last().cloned()
    }

    /// Returns the ID of the last object whose header has arrived.
    pub fn last_object_id(&self) -> Option<u64> {
        self.state.read().objects.last().map(|object| object.start.id)
    }

    /// Returns the number of objects whose headers have arrived.
    pub fn object_count(&self) -> usize {
        self.state.read().objects.len()
    }

    /// Frees the subgroup's bytes. From then on readers get none, and bytes that arrive later are dropped.
    pub fn evict(&self) {
        let mut state = self.state.write();
        state.evicted = true;
        state.chunks = Vec::new();
        state.objects = Vec::new();
    }

    /// Reports whether the bytes were freed.
    pub fn is_evicted(&self) -> bool {
        self.state.read().evicted
    }

    /// Ends the subgroup early, because no publisher can send more of it. The subgroup counts as complete if its last
    /// object is complete and the SUBGROUP_HEADER does not say that the stream ends the group. Otherwise the subgroup
    /// counts as reset. Bytes that arrive later are dropped.
    pub fn conclude(&self, now: Instant) {
        let mut state = self.state.write();
        let is_whole = state.objects.last().is_some_and(|last| last.start.end() == state.len);
        state.end_with(match is_whole && !self.header.end_of_group {
            true => SourceEnd::Fin { at: now },
            false => SourceEnd::Reset(code::Reset::CANCELLED.0),
        });
    }

    /// Records that all subscriptions have been informed how the subgroup ended.
    pub fn settle(&self) {
        self.settled.store(true, Relaxed);
    }

    /// Reports whether all subscriptions have been informed how the subgroup ended.
    pub fn is_settled(&self) -> bool {
        self.settled.load(Relaxed)
    }
}

impl SubgroupBytes {
    /// Sets how the subgroup ended, unless that is set already.
    fn end_with(&mut self, end: SourceEnd) {
        if self.end == SourceEnd::Open {
            self.end = end;
        }
    }

    /// Returns the last object that begins at or before `offset`.
    fn object_at(&self, offset: u64) -> Option<&SubgroupObject> {
        let after = self.objects.partition_point(|object| object.start.start <= offset);
        self.objects.get(after.checked_sub(1)?)
    }

    /// Returns the indices of the objects with IDs in `ids`.
    fn index_range(&self, ids: &RangeInclusive<u64>) -> Range<usize> {
        let first = self.objects.partition_point(|object| object.start.id < *ids.start());
        let behind = self.objects.partition_point(|object| object.start.id <= *ids.end());
        first..behind.max(first)
    }

    fn chunk_at(&self, offset: u64) -> usize {
        // Readers nearly always read the newest chunk, so it is checked before the binary search.
        match self.chunks.last() {
            Some(last) if last.start <= offset => self.chunks.len() - 1,
            _ => self.chunks.partition_point(|chunk| chunk.start <= offset).saturating_sub(1),
        }
    }
}

/// The changes that a call of [`SubgroupReceiver::push`] made.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pushed {
    /// Number of objects whose headers became complete.
    pub objects: u64,
    /// Total payload length of the objects in `objects`, in bytes. It includes payload that has not arrived yet.
    pub payload_bytes: u64,
    /// The smallest and the largest ID of the objects in `objects`.
    pub ids: Option<(u64, u64)>,
    /// The END_OF_TRACK or END_OF_GROUP status in the received bytes, with the ID of its object.
    pub status: Option<(Status, u64)>,
    /// Number of bytes by which the cache has grown.
    pub cost: usize,
}

/// The reason why received bytes were refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PushError {
    /// The bytes violate the protocol, so the session has to be closed.
    #[error(transparent)]
    Decode(#[from] DecodeError),
    /// The track is malformed, so its subscriptions have to be ended.
    #[error(transparent)]
    Malformed(#[from] TrackMalformed),
}

/// The receiving end of a subgroup stream. If it is dropped before [`finish`](Self::finish), the subgroup is
/// incomplete.
pub struct SubgroupReceiver {
    subgroup: Arc<SubgroupStream>,
    parser: ObjectParser,
}

/// Memory in bytes for the bookkeeping of one object and one chunk of received bytes. The received bytes themselves are
/// not included.
const OBJECT_COST: usize = size_of::<SubgroupObject>() + size_of::<SubgroupChunk>();

impl SubgroupReceiver {
    /// Returns the subgroup, to be shared with readers.
    pub fn subgroup(&self) -> &Arc<SubgroupStream> {
        &self.subgroup
    }

    /// Returns the state of the parser before the next byte. Its offset counts from the start of the publisher's
    /// stream.
    pub fn position(&self) -> Position {
        let position = self.parser.position();
        Position { offset: self.subgroup.body() + position.offset, ..position }
    }

    /// Returns the number of received bytes of an incomplete object header. The parser keeps a copy of them, which
    /// [`Pushed::cost`] does not include.
    pub fn incomplete(&self) -> usize {
        self.parser.incomplete()
    }

    /// Appends bytes that follow the header on the stream, if `judge` accepts the objects that begin in them.
    ///
    /// Fails if the bytes cannot be parsed, or contain objects that make the track malformed. In this case none of the
    /// bytes are stored.
    pub fn push(
        &mut self,
        now: Instant,
        bytes: &[u8],
        judge: impl FnOnce(&[ObjectStart]) -> Result<(), TrackMalformed>,
    ) -> Result<Pushed, PushError> {
        let mut found = Vec::new();
        let mut rest = bytes;
        while let Some(object) = self.parser.next(&mut rest)? {
            found.push(object);
        }
        judge(&found)?;
        let cost = bytes.len() + OBJECT_COST * found.len().max(1);
        let mut pushed = Pushed { cost, objects: found.len() as u64, ..Pushed::default() };
        for object in &found {
            let first = pushed.ids.map_or(object.id, |(first, _)| first);
            pushed.ids = Some((first, object.id));
            pushed.payload_bytes += object.payload_len;
            // The parsed properties are a second copy of bytes in the chunk.
            pushed.cost += object.properties.len();
            if let Some(status) = object.status.filter(|status| *status != Status::Normal) {
                pushed.status = Some((status, object.id));
            }
        }
        let mut state = self.subgroup.state.write();
        // The subgroup was ended early, so the bytes are dropped.
        if state.end != SourceEnd::Open {
            return Ok(Pushed { cost: 0, ..pushed });
        }
        let start = state.len;
        state.len += bytes.len() as u64;
        // The length of an evicted subgroup still grows, but its bytes are not stored.
        if state.evicted {
            return Ok(Pushed { cost: 0, ..pushed });
        }
        state.chunks.push(SubgroupChunk { start, bytes: Bytes::copy_from_slice(bytes) });
        state.objects.extend(found.into_iter().map(|start| SubgroupObject { start, received_at: now }));
        Ok(pushed)
    }

    /// Appends bytes that belong at `offset`. Those of them that have arrived before must be the same.
    ///
    /// # Errors
    /// Fails if they differ, or [`push`](Self::push) fails. Nothing is stored then.
    pub fn push_at(
        &mut self,
        now: Instant,
        offset: u64,
        bytes: &[u8],
        judge: impl FnOnce(&[ObjectStart]) -> Result<(), TrackMalformed>,
    ) -> Result<Pushed, PushError> {
        let known = self.subgroup.extent().len.saturating_sub(offset);
        let known = usize::try_from(known).map_or(bytes.len(), |known| known.min(bytes.len()));
        let mut theirs = vec![0; known];
        if self.subgroup.read(offset, &mut theirs) < known || theirs != bytes[..known] {
            return Err(TrackMalformed("the source has other bytes").into());
        }
        match known == bytes.len() {
            true => Ok(Pushed::default()),
            false => self.push(now, &bytes[known..], judge),
        }
    }

    /// Ends the subgroup, because the stream ended with FIN.
    ///
    /// # Errors
    /// Fails if the stream ended inside an object. The subgroup then counts as reset, and the session has to be closed.
    pub fn finish(self, now: Instant) -> Result<(), DecodeError> {
        self.parser.finish()?;
        self.subgroup.state.write().end_with(SourceEnd::Fin { at: now });
        Ok(())
    }

    /// Ends the subgroup, because the publisher reset the stream with `code`.
    pub fn reset(self, code: code::Reset) {
        self.subgroup.state.write().end_with(SourceEnd::Reset(code.0));
    }
}

impl Drop for SubgroupReceiver {
    fn drop(&mut self) {
        // If `finish` or `reset` has already ended the subgroup, this call has no effect.
        self.subgroup.state.write().end_with(SourceEnd::Reset(code::Reset::INTERNAL_ERROR.0));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Location;

    fn fetched(id: u64, len: usize) -> FetchObject {
        FetchObject {
            location: Location::new(7, id),
            subgroup: Some(0),
            priority: 1,
            properties: Bytes::new(),
            payload_len: len as u64,
        }
    }

    /// The publisher's stream broke off inside the payload or the header of its object 2.
    #[test]
    fn fetched_objects_continue_a_subgroup_that_broke_off_in_any_byte() {
        let header = SubgroupHeader {
            alias: 1,
            group: 7,
            subgroup: SubgroupId::Zero,
            priority: None,
            properties: false,
            end_of_group: false,
            first_object: true,
        };
        let now = Instant::now();
        let push = |writer: &mut SubgroupReceiver, id: u64, payload: &[u8]| {
            let (offset, header) = writer.subgroup().fetched_header(&fetched(id, payload.len())).unwrap();
            let behind = offset + header.len() as u64;
            writer.push_at(now, offset, &header, |_| Ok(()))?;
            writer.push_at(now, behind, &payload[..90], |_| Ok(()))?;
            writer.push_at(now, behind + 90, &payload[90..], |_| Ok(()))
        };
        let mut whole = SubgroupStream::begin(header, 3);
        for id in [0, 2, 3] {
            push(&mut whole, id, &[3; 200]).unwrap();
        }
        let mut bytes = vec![0; whole.subgroup().extent().len as usize];
        whole.subgroup().read(0, &mut bytes);
        let ObjectStart { start: first, payload: from, .. } = whole.subgroup().objects()[1].start.clone();
        let end = whole.subgroup().objects()[2].start.start;
        for cut in first..end {
            let mut broken = SubgroupStream::begin(header, 3);
            broken.push(now, &bytes[..cut as usize], |_| Ok(())).unwrap();
            assert_eq!(broken.subgroup().first_missing(), 1, "{cut}");
            assert!(broken.subgroup().has(0) && !broken.subgroup().has(2), "{cut}");
            if cut > from {
                assert!(push(&mut broken, 2, &[4; 200]).is_err(), "{cut}: the payload differs");
            }
            push(&mut broken, 2, &[3; 200]).unwrap();
            assert!(broken.subgroup().fetched_header(&fetched(2, 200)).is_none(), "{cut}: twice");
            push(&mut broken, 3, &[3; 200]).unwrap();
            let mut got = vec![0; bytes.len()];
            assert_eq!(broken.subgroup().read(0, &mut got), bytes.len());
            assert_eq!(got, bytes, "{cut}");
            assert_eq!(broken.subgroup().first_missing(), 4);
        }
    }
}
