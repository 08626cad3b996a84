//! ACK frames of a connection with several senders, and their translation for the QUIC stack, which knows only its own
//! packets.
//!
//! The stack numbers its packets as if it were alone: *virtual* numbers. The peer acknowledges the numbers in the
//! packets that it received: *wire* numbers. [`NumberMap`] translates, and [`AckFrame::rewrite`] writes the frame that
//! the stack gets.

use std::{collections::VecDeque, iter, ops::RangeInclusive, time::Instant};

use super::{
    cursor::{Error, PayloadCursor},
    varint,
};

/// A validated ACK frame (RFC 9000, section 19.3), borrowed from its payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AckFrame<'a> {
    /// The largest acknowledged packet number.
    pub largest: u64,
    /// ACK delay as encoded: in units of 2^`ack_delay_exponent` microseconds.
    pub delay: u64,
    /// The encoded ranges: First ACK Range, then pairs of Gap and ACK Range Length. The parser has checked that no
    /// range goes below packet number 0.
    blocks: &'a [u8],
    /// The three ECN counts as encoded, if the frame type is 0x03 (ACK with ECN).
    ecn: Option<&'a [u8]>,
}

/// Packets received with each codepoint of ECN (RFC 9000, section 19.3.2).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EcnCounts {
    /// Packets with ECT(0).
    pub ect0: u64,
    /// Packets with ECT(1).
    pub ect1: u64,
    /// Packets with CE, which the network has marked.
    pub ce: u64,
}

impl<'a> AckFrame<'a> {
    /// Parses the fields that follow the type of an ACK frame. `kind` is the frame type. `ecn` is true if ECN counts
    /// follow the ranges.
    pub(super) fn parse(cursor: &mut PayloadCursor<'a>, kind: u64, ecn: bool) -> Result<Self, Error> {
        let largest = cursor.varint()?;
        let delay = cursor.varint()?;
        let gaps = cursor.varint()?;

        let below = |number: u64, by: u64| number.checked_sub(by).ok_or(Error::Malformed(kind));
        let start = cursor.rest;
        let mut smallest = below(largest, cursor.varint()?)?;
        for _ in 0..gaps {
            // A gap of n leaves out n + 1 numbers, and the next range ends just below them (RFC 9000, section 19.3.1).
            smallest = below(smallest, cursor.varint()? + 2)?;
            smallest = below(smallest, cursor.varint()?)?;
        }
        let blocks = &start[..start.len() - cursor.rest.len()];

        let start = cursor.rest;
        if ecn {
            for _ in 0..3 {
                cursor.varint()?;
            }
        }
        let counts = &start[..start.len() - cursor.rest.len()];
        Ok(Self { largest, delay, blocks, ecn: ecn.then_some(counts) })
    }

    /// Returns the ECN counts, if the frame type is 0x03 (ACK with ECN).
    pub fn ecn_counts(&self) -> Option<EcnCounts> {
        let mut counts = self.ecn?;
        let mut next = || varint::decode(&mut counts);
        Some(EcnCounts { ect0: next()?, ect1: next()?, ce: next()? })
    }

    /// Returns the acknowledged numbers, largest first, disjoint.
    pub fn ranges(&self) -> AckRangeIter<'a> {
        AckRangeIter { largest: Some(self.largest), blocks: self.blocks }
    }

    /// Writes to `out` which of `map`'s packets this frame acknowledges, in virtual numbers (the QUIC stack's numbers),
    /// largest first. Ranges that were separated only by other senders' packets are merged.
    pub fn translate(&self, map: &NumberMap, out: &mut Vec<RangeInclusive<u64>>) {
        out.clear();
        for range in self.ranges().filter_map(|wire| map.translate(wire)) {
            match out.last_mut() {
                Some(last) if *last.start() == range.end() + 1 => *last = *range.start()..=*last.end(),
                _ => out.push(range),
            }
        }
    }

    /// Writes this frame with new `ranges` and a new `delay`. The caller passes at least one range, in descending
    /// order; ranges must neither overlap nor be adjacent. Frame type and ECN counts stay the same.
    ///
    /// The result of [`AckFrame::translate`] always fits into `room`, the length of the original frame, because virtual
    /// packet numbers are smaller than wire numbers. A `delay` whose encoding does not fit is reduced to the largest
    /// value that fits.
    pub fn rewrite(&self, room: usize, ranges: &[RangeInclusive<u64>], delay: u64, out: &mut Vec<u8>) {
        out.clear();
        let Some(largest) = ranges.first().map(|range| *range.end()) else { return };
        let counts = self.ecn.unwrap_or_default();
        let others = 1 + varint::len(largest) + blocks(ranges).map(varint::len).sum::<usize>() + counts.len();
        // The ACK Delay field gets the bytes of `room` that the other fields do not need. The field's length limits the
        // delay that it can hold.
        let longest = match room.saturating_sub(others) {
            0..=1 => (1 << 6) - 1,
            2..=3 => (1 << 14) - 1,
            4..=7 => (1 << 30) - 1,
            _ => varint::MAX,
        };

        out.push(if self.ecn.is_some() { 0x03 } else { 0x02 });
        varint::encode(largest, out);
        varint::encode(delay.min(longest), out);
        blocks(ranges).for_each(|field| varint::encode(field, out));
        out.extend_from_slice(counts);
    }
}

/// Returns the fields of an ACK frame from ACK Range Count to the last ACK Range Length.
fn blocks(ranges: &[RangeInclusive<u64>]) -> impl Iterator<Item = u64> {
    let gaps = ranges.len().saturating_sub(1) as u64;
    let first = ranges.first().map(|range| range.end() - range.start());
    let others = ranges
        .windows(2)
        .flat_map(|pair| [pair[0].start() - pair[1].end() - 2, pair[1].end() - pair[1].start()]);
    iter::once(gaps).chain(first).chain(others)
}

/// An iterator over the ranges of an [`AckFrame`], largest first.
#[derive(Clone, Debug)]
pub struct AckRangeIter<'a> {
    largest: Option<u64>,
    blocks: &'a [u8],
}

impl Iterator for AckRangeIter<'_> {
    type Item = RangeInclusive<u64>;

    fn next(&mut self) -> Option<Self::Item> {
        let largest = self.largest.take()?;
        let smallest = largest - varint::decode(&mut self.blocks)?;
        // The parser has checked that the numbers do not go below zero.
        self.largest = varint::decode(&mut self.blocks).map(|gap| smallest - gap - 2);
        Some(smallest..=largest)
    }
}

/// Number of packets below the largest acknowledged packet for which [`NumberMap`] keeps the translation from virtual
/// to wire numbers. A peer repeats an acknowledged range until it knows that its ACK arrived, and the stack has
/// processed older ranges by then.
const KEPT: usize = 1024;

/// Largest number of packets in a [`NumberMap`], acknowledged or not. If more are in flight, the oldest are forgotten:
/// the stack considers them lost and sends their contents again.
const LIMIT: usize = 1 << 14;

/// A map from the QUIC stack's virtual packet numbers to the wire numbers of the same packets.
///
/// The map is one queue of wire numbers, because both sequences only grow, and virtual numbers have no gaps. A number
/// that the stack skips on purpose is skipped on the wire too.
#[derive(Clone, Debug, Default)]
pub struct NumberMap {
    /// Virtual number (the QUIC stack's number) of the first entry in `packets`.
    first: u64,
    packets: VecDeque<NumberedPacket>,
    /// Largest virtual number (the QUIC stack's number) that was acknowledged.
    acked: Option<u64>,
}

#[derive(Clone, Copy, Debug)]
struct NumberedPacket {
    wire: u64,
    sent: Option<Instant>,
}

impl NumberMap {
    /// Returns the virtual number that the stack uses next, unless the stack skips that number.
    pub fn next(&self) -> u64 {
        self.first + self.packets.len() as u64
    }

    /// Assigns the wire number `wire`, which is larger than all wire numbers before it, to the next virtual number (the
    /// QUIC stack's number). `sent` is `None` for a number that is skipped. A skipped number stays in the map so that
    /// the stack sees when a lying peer acknowledges it.
    pub fn push(&mut self, wire: u64, sent: Option<Instant>) {
        debug_assert!(self.packets.back().is_none_or(|last| last.wire < wire));
        self.packets.push_back(NumberedPacket { wire, sent });
        if self.packets.len() > LIMIT {
            self.packets.pop_front();
            self.first += 1;
        }
    }

    /// Returns the virtual numbers (the QUIC stack's numbers) of the packets with wire numbers in `range`. The result
    /// is one range, because virtual numbers have no gaps.
    pub fn translate(&self, range: RangeInclusive<u64>) -> Option<RangeInclusive<u64>> {
        // Packet numbers on the wire grow with the virtual ones, so both ends of the range are found by binary search.
        let start = self.packets.partition_point(|packet| packet.wire < *range.start());
        let end = self.packets.partition_point(|packet| packet.wire <= *range.end());
        (start < end).then(|| self.first + start as u64..=self.first + end as u64 - 1)
    }

    /// Returns when the packet with this virtual number (the QUIC stack's number) was sent.
    pub fn sent(&self, number: u64) -> Option<Instant> {
        let index = usize::try_from(number.checked_sub(self.first)?).ok()?;
        self.packets.get(index)?.sent
    }

    /// Notes that the stack's packet `number` was acknowledged, and forgets packets more than `KEPT` below it. Returns
    /// whether `number` is the largest acknowledged number so far.
    pub fn on_acked(&mut self, number: u64) -> bool {
        // Acknowledgements of numbers that were never sent, and repeated ones, are ignored.
        if number >= self.next() || self.acked.is_some_and(|acked| number <= acked) {
            return false;
        }
        self.acked = Some(number);
        let behind = usize::try_from(number.saturating_sub(self.first)).unwrap_or(0);
        let forgotten = behind.saturating_sub(KEPT).min(self.packets.len());
        self.packets.drain(..forgotten);
        self.first += forgotten as u64;
        true
    }

    /// Returns the largest virtual number (the QUIC stack's number) that was acknowledged.
    pub fn acked(&self) -> Option<u64> {
        self.acked
    }
}

#[cfg(test)]
mod tests;
