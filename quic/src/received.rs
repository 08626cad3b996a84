//! Notes what has been received on a connection: packet numbers, and the bytes of the peer's unidirectional streams.
//!
//! Two readers of one stream, of which each takes the bytes that came first by its own rule, differ as soon as a peer sends
//! other bytes for an offset that it has already used. [`ReceivedStreams`] says which bytes of a frame are new, and [`cut`]
//! takes the others out of the packet, so that every reader behind it gets each byte once: the first that arrived.

use std::{collections::BTreeMap, ops::Range};

use super::frame::{self, Stream};
use crate::ranges::Ranges;

/// Packet numbers below the largest one that can still be told apart, as many as quinn's.
const WINDOW: u64 = 128;

/// Bit of a stream ID.
const UNIDIRECTIONAL: u64 = 0x2;

/// Holes that a stream may have: quinn closes the connection over fewer.
const HOLES: usize = 8192;

/// The packet numbers that were received. What is too old to tell counts as received (RFC 9000, section 12.3).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReceivedNumbers {
    /// One more than the largest.
    next: u64,
    /// A bit for each of those below the largest, beginning with the one next to it.
    below: u128,
}

impl ReceivedNumbers {
    /// Notes the number; returns whether it is new.
    pub fn insert(&mut self, number: u64) -> bool {
        if number >= self.next {
            let by = number + 1 - self.next;
            let largest = u128::from(self.next > 0);
            self.below = match by {
                1..WINDOW => self.below << by | largest << (by - 1),
                WINDOW => largest << (by - 1),
                _ => 0,
            };
            self.next = number + 1;
            return true;
        }
        let behind = self.next - 1 - number;
        if behind == 0 || behind > WINDOW {
            return false;
        }
        let bit = 1 << (behind - 1);
        let is_new = self.below & bit == 0;
        self.below |= bit;
        is_new
    }

    /// Returns one more than the largest number.
    pub fn next(&self) -> u64 {
        self.next
    }
}

impl Part {
    /// Returns the offset of the first byte that is new.
    pub fn first(&self) -> Option<u64> {
        self.new.first().map(|range| range.start)
    }
}

/// The bytes of the peer's unidirectional streams that were received.
///
/// States of a stream: not known, until its first byte; open, until all bytes up to its end are there, or it is reset; over.
/// [`Self::take`] and [`Self::reset`] move it, in the order in which the frames arrive.
#[derive(Debug)]
pub struct ReceivedStreams {
    /// By ID.
    open: BTreeMap<u64, Extent>,
    /// Indices of streams that are over.
    over: Ranges,
    most: usize,
}

/// The bytes of one stream.
#[derive(Debug, Default)]
struct Extent {
    /// Offset before which all bytes have come.
    front: u64,
    /// Bytes behind a hole.
    ahead: Ranges,
    size: Option<u64>,
}

impl Extent {
    fn end(&self) -> u64 {
        self.ahead.last().map_or(self.front, |range| range.end)
    }

    /// Whether nothing is known of what lies behind.
    fn ends_at(&self, offset: u64) -> bool {
        self.front == offset && self.ahead.is_empty() && self.size.is_none()
    }

    fn is_new(&self, range: &Range<u64>) -> bool {
        let reaches = |ahead: &Ranges| ahead.gaps(range.clone()).next().as_ref() != Some(range);
        range.is_empty() || (range.start >= self.front && (self.ahead.is_empty() || !reaches(&self.ahead)))
    }

    fn insert(&mut self, range: Range<u64>) {
        if range.start > self.front {
            self.ahead.insert(range);
            return;
        }
        self.front = self.front.max(range.end);
        while let Some(first) = self.ahead.first().filter(|first| first.start <= self.front) {
            self.ahead.remove(first.clone());
            self.front = self.front.max(first.end);
        }
    }
}

/// The part of a STREAM frame that is new.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Taken {
    All,
    Part(Part),
    /// The peer has more streams under way, or more holes in one, than it may have.
    TooMuch,
}

/// The new bytes of a STREAM frame that repeats some, or that contradicts an earlier one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Part {
    /// Bytes of the stream, ascending.
    new: Vec<Range<u64>>,
    /// The stream ends with the frame, and has bytes up to this offset, which is beyond that.
    beyond: Option<u64>,
}

impl ReceivedStreams {
    /// `most`: streams that are open at a time.
    pub fn new(most: usize) -> Self {
        Self { open: BTreeMap::new(), over: Ranges::default(), most }
    }

    /// Notes the bytes of a frame; returns which of them are new. Allocates nothing for a frame that continues its stream.
    pub fn take(&mut self, frame: &Stream<'_>) -> Taken {
        let (id, range) = (frame.id, frame.offset..frame.offset + frame.data.len() as u64);
        if id & UNIDIRECTIONAL == 0 {
            return Taken::All;
        }
        // Most frames continue their stream, and do not end it.
        if let Some(extent) =
            self.open.get_mut(&id).filter(|extent| !frame.fin && extent.ends_at(range.start))
        {
            extent.front = range.end;
            return Taken::All;
        }
        if !self.open.contains_key(&id) {
            if self.over.contains(id >> 2) {
                return if range.is_empty() { Taken::All } else { Taken::Part(Part::default()) };
            }
            if !self.has_room() {
                return Taken::TooMuch;
            }
        }
        let extent = self.open.entry(id).or_default();
        let beyond = Some(extent.end()).filter(|end| frame.fin && *end > range.end);
        let taken = if beyond.is_none() && extent.is_new(&range) {
            Taken::All
        } else {
            let from = range.start.max(extent.front);
            Taken::Part(Part { new: extent.ahead.gaps(from..range.end).collect(), beyond })
        };
        if frame.fin {
            extent.size.get_or_insert(range.end);
        }
        if !range.is_empty() {
            extent.insert(range);
        }
        if extent.size.is_some_and(|size| extent.front >= size) {
            self.end(id);
        } else if extent.ahead.len() > HOLES {
            return Taken::TooMuch;
        }
        taken
    }

    /// The peer has reset the stream: nothing that still comes is of use.
    pub fn reset(&mut self, id: u64) {
        if id & UNIDIRECTIONAL != 0 && (self.has_room() || self.open.contains_key(&id)) {
            self.end(id);
        }
    }

    /// Returns the IDs of the streams that have begun, and are not over.
    pub fn begun(&self) -> impl Iterator<Item = u64> {
        self.open.keys().copied()
    }

    fn has_room(&self) -> bool {
        self.open.len() < self.most && self.over.len() < self.most
    }

    fn end(&mut self, id: u64) {
        self.open.remove(&id);
        self.over.insert(id >> 2..(id >> 2) + 1);
    }
}

/// A STREAM frame of which not all bytes are new.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Repeat {
    /// The frame's place in the payload; the data are the last bytes of it.
    at: Range<usize>,
    id: u64,
    end: u64,
    fin: bool,
    part: Part,
}

impl Repeat {
    /// `at`: the frame's place in the payload.
    pub fn new(at: Range<usize>, frame: &Stream<'_>, part: Part) -> Self {
        let end = frame.offset + frame.data.len() as u64;
        Self { at, id: frame.id, end, fin: frame.fin, part }
    }

    /// Appends frames of what is new, and one that says where the frame ended, so that limits and sizes stay to be checked. Bytes
    /// beyond the end of the stream are named behind it, and so are an error for whoever reads it.
    fn write(&self, payload: &[u8], out: &mut Vec<u8>) {
        let Self { id, end, fin, .. } = *self;
        let Part { new, beyond } = &self.part;
        for range in new {
            let [from, to] = [range.start, range.end].map(|at| self.at.end - (end - at) as usize);
            frame::write_stream(id, range.start, &payload[from..to], fin && range.end == end, out);
        }
        if new.last().is_none_or(|last| last.end < end) {
            frame::write_stream(id, end, &[], fin, out);
        }
        beyond.iter().for_each(|beyond| frame::write_stream(id, *beyond, &[], false, out));
    }
}

/// Returns the payload without the bytes that were received before. `repeats` are in the order in which they lie in it.
pub fn cut(payload: &[u8], repeats: &[Repeat]) -> Vec<u8> {
    let mut out = Vec::with_capacity(payload.len() + 64);
    let mut at = 0;
    for repeat in repeats {
        out.extend_from_slice(&payload[at..repeat.at.start]);
        repeat.write(payload, &mut out);
        at = repeat.at.end;
    }
    out.extend_from_slice(&payload[at..]);
    out
}

#[cfg(test)]
mod tests;
