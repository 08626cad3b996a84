//! Records what has been received on a connection: packet numbers, and the bytes of the peer's unidirectional streams.
//!
//! Several parts of the process read the same STREAM frames, and may have different rules for overlapping frames. They
//! would read different bytes if a peer sends two versions of the bytes at an offset. [`ReceivedStreams`] finds which
//! bytes of a frame are new, and [`cut`] removes all other bytes from the packet. So every later reader gets one
//! version of each byte: the one that arrived first.

use std::{collections::BTreeMap, ops::Range};

use super::frame::{self, StreamFrame};
use crate::ranges::Ranges;

/// Duplicates are detected for this many packet numbers below the largest one received. quinn uses the same window.
const WINDOW: u64 = 128;

/// Bit of a stream ID that marks unidirectional streams.
const UNIDIRECTIONAL: u64 = 0x2;

/// Largest number of gaps in the received bytes of a stream. quinn has a lower limit, and closes the connection first.
const HOLES: usize = 8192;

/// The packet numbers that were received. A number more than `WINDOW` below the largest counts as received (RFC 9000,
/// section 12.3).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReceivedNumbers {
    /// One more than the largest packet number received.
    next: u64,
    /// Received numbers below the largest one: bit n is packet number `next - 2 - n`.
    below: u128,
}

impl ReceivedNumbers {
    /// Notes that a packet number was received. Returns whether it is new.
    pub fn insert(&mut self, number: u64) -> bool {
        if number >= self.next {
            let by = number + 1 - self.next;
            let largest = u128::from(self.next > 0);
            // Shifting a `u128` by 128 bits or more overflows, so distances of 128 or more are handled separately.
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

    /// Returns one more than the largest packet number received.
    pub fn next(&self) -> u64 {
        self.next
    }
}

impl NewBytes {
    /// Returns the stream offset of the first byte in the STREAM frame that had not been received before.
    pub fn first(&self) -> Option<u64> {
        self.new.first().map(|range| range.start)
    }
}

/// The bytes of the peer's unidirectional streams that were received.
///
/// A stream is unknown until its first frame. It is open until all bytes up to its end have arrived, or it is reset.
/// Then it is finished. [`Self::take`] and [`Self::reset`] change its state, in the order in which the frames arrive.
#[derive(Debug)]
pub struct ReceivedStreams {
    /// Open streams by ID.
    open: BTreeMap<u64, StreamExtent>,
    /// Indices of finished streams, as ranges of consecutive indices.
    over: Ranges,
    /// Largest number of open streams, and of ranges of finished streams' indices.
    most: usize,
}

/// The ranges of bytes received on one stream.
#[derive(Debug, Default)]
struct StreamExtent {
    /// Offset before which all bytes have arrived.
    front: u64,
    /// Ranges received after the first missing byte.
    ahead: Ranges,
    /// Offset of the stream's end, if a frame with FIN has arrived.
    size: Option<u64>,
}

impl StreamExtent {
    fn end(&self) -> u64 {
        self.ahead.last().map_or(self.front, |range| range.end)
    }

    /// Returns whether exactly the bytes before `offset` have arrived, and the stream's end is unknown.
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
pub enum TakenPart {
    /// Every byte of the frame is new.
    All,
    /// Only a part of the frame is new.
    Part(NewBytes),
    /// The peer has too many open streams, or a stream has too many gaps.
    TooMuch,
}

/// The new bytes of a STREAM frame that repeats received bytes, or that contradicts an earlier frame.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NewBytes {
    /// Ranges of stream offsets whose bytes are new, ascending.
    new: Vec<Range<u64>>,
    /// Offset of the end of all received bytes, if the frame has FIN at a smaller offset, which is an error of the
    /// peer.
    beyond: Option<u64>,
}

impl ReceivedStreams {
    /// Creates an empty record of received stream bytes. At most `most` streams may be open at a time.
    pub fn new(most: usize) -> Self {
        Self { open: BTreeMap::new(), over: Ranges::default(), most }
    }

    /// Notes the bytes of a frame, and returns which of them are new. A frame that continues its stream allocates
    /// nothing.
    pub fn take(&mut self, frame: &StreamFrame<'_>) -> TakenPart {
        let id = frame.id;
        let range = frame.offset..frame.offset + frame.data.len() as u64;
        if id & UNIDIRECTIONAL == 0 {
            return TakenPart::All;
        }
        // Most STREAM frames begin where the received bytes of their stream end, and have no FIN.
        if let Some(extent) =
            self.open.get_mut(&id).filter(|extent| !frame.fin && extent.ends_at(range.start))
        {
            extent.front = range.end;
            return TakenPart::All;
        }
        if !self.open.contains_key(&id) {
            // The two lowest bits of a stream ID are the stream's type (RFC 9000, section 2.1); the other bits are the
            // stream's index.
            if self.over.contains(id >> 2) {
                return if range.is_empty() { TakenPart::All } else { TakenPart::Part(NewBytes::default()) };
            }
            if !self.has_room() {
                return TakenPart::TooMuch;
            }
        }
        let extent = self.open.entry(id).or_default();
        // A FIN at an offset before the end of received data is an error of the peer, which the reader of the packet
        // has to detect.
        let beyond = Some(extent.end()).filter(|end| frame.fin && *end > range.end);
        let taken = if beyond.is_none() && extent.is_new(&range) {
            TakenPart::All
        } else {
            let from = range.start.max(extent.front);
            TakenPart::Part(NewBytes { new: extent.ahead.gaps(from..range.end).collect(), beyond })
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
            return TakenPart::TooMuch;
        }
        taken
    }

    /// Notes that the peer has reset the stream. Bytes of the stream that arrive later do not count as new.
    pub fn reset(&mut self, id: u64) {
        if id & UNIDIRECTIONAL != 0 && (self.has_room() || self.open.contains_key(&id)) {
            self.end(id);
        }
    }

    /// Returns the IDs of the open streams.
    pub fn begun(&self) -> impl Iterator<Item = u64> {
        self.open.keys().copied()
    }

    fn has_room(&self) -> bool {
        // Finished streams with consecutive indices take one range. The number of ranges is limited, since a peer may
        // leave gaps.
        self.open.len() < self.most && self.over.len() < self.most
    }

    fn end(&mut self, id: u64) {
        self.open.remove(&id);
        self.over.insert(id >> 2..(id >> 2) + 1);
    }
}

/// A STREAM frame with bytes that were received before.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RepeatedFrame {
    /// Range of the frame in the packet's payload. The frame ends with the stream data.
    at: Range<usize>,
    id: u64,
    end: u64,
    fin: bool,
    part: NewBytes,
}

impl RepeatedFrame {
    /// Creates the record of a STREAM frame that has repeated bytes, at the range `at` of the packet's payload.
    pub fn new(at: Range<usize>, frame: &StreamFrame<'_>, part: NewBytes) -> Self {
        let end = frame.offset + frame.data.len() as u64;
        Self { at, id: frame.id, end, fin: frame.fin, part }
    }

    /// Appends STREAM frames with only the new bytes. If the frame's last bytes are not new, an empty frame at the
    /// frame's original end lets the reader check flow control and final size. If bytes beyond the frame's FIN were
    /// received before, an empty frame at the end of those bytes makes the reader detect the peer's error.
    fn write(&self, payload: &[u8], out: &mut Vec<u8>) {
        let Self { id, end, fin, .. } = *self;
        let NewBytes { new, beyond } = &self.part;
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

/// Returns the payload without the bytes that were received before. `repeats` lists the frames with such bytes, in the
/// payload's order.
pub fn cut(payload: &[u8], repeats: &[RepeatedFrame]) -> Vec<u8> {
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
