//! One subgroup stream as it arrived: its raw bytes, and where its objects are in them.

use std::{
    ops::{Range, RangeInclusive},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    time::Instant,
};

use bytes::Bytes;
use millrace_quic::plane::source::{End, Extent};
use parking_lot::RwLock;

use super::malformed::Malformed;
use crate::{DecodeError, ObjectParser, ObjectStart, Position, Status, SubgroupHeader, SubgroupId, code};

/// The bytes of one subgroup stream behind its header, shared by all who send it on.
///
/// Offsets count from the first byte after the SUBGROUP_HEADER. One [`SubgroupWriter`] appends bytes, and
/// [`Subgroup::evict`] frees all of them at once.
pub struct Subgroup {
    serial: u64,
    header: SubgroupHeader,
    header_len: usize,
    /// What the publisher's stream has in front of the header, bytes.
    preamble: usize,
    settled: AtomicBool,
    state: RwLock<State>,
}

struct State {
    chunks: Vec<Chunk>,
    len: u64,
    objects: Vec<Object>,
    end: End,
    evicted: bool,
}

struct Chunk {
    start: u64,
    bytes: Bytes,
}

/// Where an object lies in its subgroup's bytes, and when its first byte came.
#[derive(Clone, Debug)]
pub struct Object {
    pub start: ObjectStart,
    pub received_at: Instant,
}

impl Subgroup {
    /// Begins a subgroup and returns the only handle that can add to it. `header_len` is the length of the header as
    /// it arrived, bytes.
    pub fn begin(header: SubgroupHeader, header_len: usize) -> SubgroupWriter {
        Self::begin_behind(0, header, header_len)
    }

    /// The same, where the publisher's stream has a preamble of so many bytes in front of the header.
    pub fn begin_behind(preamble: usize, header: SubgroupHeader, header_len: usize) -> SubgroupWriter {
        let parser = ObjectParser::new(&header, 0);
        let state = State { chunks: Vec::new(), len: 0, objects: Vec::new(), end: End::Open, evicted: false };
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
        SubgroupWriter { subgroup, parser }
    }

    /// Tells this stream of a subgroup from every other in the process.
    pub fn serial(&self) -> u64 {
        self.serial
    }

    pub fn header(&self) -> &SubgroupHeader {
        &self.header
    }

    /// Length of the SUBGROUP_HEADER as it arrived, in bytes.
    pub fn header_len(&self) -> usize {
        self.header_len
    }

    /// Where on the publisher's stream the first byte behind the header is.
    pub fn body(&self) -> u64 {
        (self.preamble + self.header_len) as u64
    }

    /// The subgroup ID. `None` if it is the ID of the first object, which has not arrived yet.
    pub fn id(&self) -> Option<u64> {
        match self.header.subgroup {
            SubgroupId::Zero => Some(0),
            SubgroupId::Explicit(id) => Some(id),
            SubgroupId::FirstObject => self.state.read().objects.first().map(|first| first.start.id),
        }
    }

    pub fn extent(&self) -> Extent {
        let state = self.state.read();
        Extent { len: state.len, end: state.end }
    }

    /// The same of its objects up to the ID `last`: they end where another begins.
    pub fn extent_to(&self, last: u64) -> Extent {
        let state = self.state.read();
        let behind = state.objects.partition_point(|object| object.start.id <= last);
        if let Some(next) = state.objects.get(behind) {
            return Extent { len: next.start.start, end: End::Fin { at: next.received_at } };
        }
        // Of bytes behind the last object it is not known yet what they begin.
        let known = state.objects.last().map_or(0, |object| object.start.end());
        let len = if state.end == End::Open { known.min(state.len) } else { state.len };
        Extent { len, end: state.end }
    }

    /// Copies bytes from `offset` on; 0 when they have not come yet or are gone.
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

    /// When the first byte of the object that covers `offset` arrived.
    pub fn received_at(&self, offset: u64) -> Option<Instant> {
        self.state.read().object_at(offset).map(|object| object.received_at)
    }

    /// Where the object that covers `offset` lies, with its header.
    pub fn object_at(&self, offset: u64) -> Option<Range<u64>> {
        let state = self.state.read();
        let ObjectStart { start, payload, payload_len, .. } = state.object_at(offset)?.start;
        Some(start..payload.saturating_add(payload_len))
    }

    /// The first object with an ID of at least `id`, and whether it is the stream's first.
    pub fn first_object_from(&self, id: u64) -> Option<(Object, bool)> {
        let state = self.state.read();
        let index = state.objects.partition_point(|object| object.start.id < id);
        state.objects.get(index).map(|object| (object.clone(), index == 0))
    }

    /// The first object of the stream.
    pub fn first_object(&self) -> Option<Object> {
        self.state.read().objects.first().cloned()
    }

    /// All objects whose headers have arrived, in stream order.
    pub fn objects(&self) -> Vec<Object> {
        self.state.read().objects.clone()
    }

    /// Those with such IDs, `max` at most.
    pub fn objects_of(&self, ids: &RangeInclusive<u64>, max: usize) -> Vec<Object> {
        let state = self.state.read();
        let range = state.of(ids);
        state.objects[range].iter().take(max).cloned().collect()
    }

    /// How many have such IDs.
    pub fn count(&self, ids: &RangeInclusive<u64>) -> usize {
        self.state.read().of(ids).len()
    }

    /// When its last object came, or its end.
    pub fn last_at(&self) -> Option<Instant> {
        let state = self.state.read();
        match state.end {
            End::Fin { at } => Some(at),
            _ => state.objects.last().map(|object| object.received_at),
        }
    }

    pub fn last_object(&self) -> Option<Object> {
        self.state.read().objects.last().cloned()
    }

    pub fn last_object_id(&self) -> Option<u64> {
        self.state.read().objects.last().map(|object| object.start.id)
    }

    pub fn object_count(&self) -> usize {
        self.state.read().objects.len()
    }

    /// Frees the bytes. Readers get none from now on, and what the writer adds is not kept.
    pub fn evict(&self) {
        let mut state = self.state.write();
        state.evicted = true;
        state.chunks = Vec::new();
        state.objects = Vec::new();
    }

    pub fn is_evicted(&self) -> bool {
        self.state.read().evicted
    }

    /// Ends the subgroup where it is, as nothing more of it can come from anybody. If it has whole objects, and does not say that they
    /// are all of the group, it is complete. What its writer still adds is not kept.
    pub fn conclude(&self, now: Instant) {
        let mut state = self.state.write();
        let is_whole = state.objects.last().is_some_and(|last| last.start.end() == state.len);
        state.end_with(match is_whole && !self.header.end_of_group {
            true => End::Fin { at: now },
            false => End::Reset(code::Reset::CANCELLED.0),
        });
    }

    /// Notes that all subscriptions have been told how it ended.
    pub fn settle(&self) {
        self.settled.store(true, Relaxed);
    }

    pub fn is_settled(&self) -> bool {
        self.settled.load(Relaxed)
    }
}

impl State {
    /// Ends it, unless it has ended.
    fn end_with(&mut self, end: End) {
        if self.end == End::Open {
            self.end = end;
        }
    }

    /// The last object that begins at `offset` or before.
    fn object_at(&self, offset: u64) -> Option<&Object> {
        let after = self.objects.partition_point(|object| object.start.start <= offset);
        self.objects.get(after.checked_sub(1)?)
    }

    /// Where the objects with such IDs are.
    fn of(&self, ids: &RangeInclusive<u64>) -> Range<usize> {
        let first = self.objects.partition_point(|object| object.start.id < *ids.start());
        let behind = self.objects.partition_point(|object| object.start.id <= *ids.end());
        first..behind.max(first)
    }

    fn chunk_at(&self, offset: u64) -> usize {
        // Readers are nearly always at the newest chunk.
        match self.chunks.last() {
            Some(last) if last.start <= offset => self.chunks.len() - 1,
            _ => self.chunks.partition_point(|chunk| chunk.start <= offset).saturating_sub(1),
        }
    }
}

/// What [`SubgroupWriter::push`] changed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pushed {
    /// Objects whose headers became complete, and the bytes of their payloads.
    pub objects: u64,
    pub payload_bytes: u64,
    /// The smallest and the largest of their IDs.
    pub ids: Option<(u64, u64)>,
    /// END_OF_TRACK or END_OF_GROUP status seen, with its object ID.
    pub status: Option<(Status, u64)>,
    /// Bytes that the cache holds more than before.
    pub cost: usize,
}

/// Why bytes are not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PushError {
    /// The session must be closed.
    #[error(transparent)]
    Decode(#[from] DecodeError),
    /// The track must be given up.
    #[error(transparent)]
    Malformed(#[from] Malformed),
}

/// The receiving end of a subgroup stream. If it is dropped before [`finish`](Self::finish), the subgroup is
/// incomplete.
pub struct SubgroupWriter {
    subgroup: Arc<Subgroup>,
    parser: ObjectParser,
}

/// Memory that an object and a chunk cost besides their bytes.
const OBJECT_COST: usize = size_of::<Object>() + size_of::<Chunk>();

impl SubgroupWriter {
    pub fn subgroup(&self) -> &Arc<Subgroup> {
        &self.subgroup
    }

    /// Where in the publisher's stream the next byte is, and in its framing.
    pub fn position(&self) -> Position {
        let position = self.parser.position();
        Position { offset: self.subgroup.body() + position.offset, ..position }
    }

    /// Bytes of an object header that is not complete, which are held twice, and are not in the cost of what was pushed.
    pub fn incomplete(&self) -> usize {
        self.parser.incomplete()
    }

    /// Appends bytes that followed the header on the stream, once `judge` has seen the objects that begin in them.
    ///
    /// # Errors
    /// The bytes are not objects, or not such as can be of the track; nothing of this call is kept.
    pub fn push(
        &mut self,
        now: Instant,
        bytes: &[u8],
        judge: impl FnOnce(&[ObjectStart]) -> Result<(), Malformed>,
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
            // Kept beside the bytes that it came with.
            pushed.cost += object.properties.len();
            if let Some(status) = object.status.filter(|status| *status != Status::Normal) {
                pushed.status = Some((status, object.id));
            }
        }
        let mut state = self.subgroup.state.write();
        if state.end != End::Open {
            return Ok(Pushed { cost: 0, ..pushed });
        }
        let start = state.len;
        state.len += bytes.len() as u64;
        if state.evicted {
            return Ok(Pushed { cost: 0, ..pushed });
        }
        state.chunks.push(Chunk { start, bytes: Bytes::copy_from_slice(bytes) });
        state.objects.extend(found.into_iter().map(|start| Object { start, received_at: now }));
        Ok(pushed)
    }

    /// The stream ended with FIN.
    ///
    /// # Errors
    /// It ended inside an object: the subgroup is incomplete, and the session must be closed.
    pub fn finish(self, now: Instant) -> Result<(), DecodeError> {
        self.parser.finish()?;
        self.subgroup.state.write().end_with(End::Fin { at: now });
        Ok(())
    }

    /// The stream was reset by the publisher with `code`.
    pub fn reset(self, code: code::Reset) {
        self.subgroup.state.write().end_with(End::Reset(code.0));
    }
}

impl Drop for SubgroupWriter {
    fn drop(&mut self) {
        self.subgroup.state.write().end_with(End::Reset(code::Reset::INTERNAL_ERROR.0));
    }
}
