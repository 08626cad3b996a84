#![allow(clippy::unwrap_used)]

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;
use crate::frame::{Frame, Walker};

/// Removes repeated bytes from a payload as the transport does, and returns the remaining payload.
fn pass(streams: &mut ReceivedStreams, payload: &[u8]) -> Vec<u8> {
    let mut repeats = Vec::new();
    for item in Walker::new(payload) {
        let (at, frame) = item.unwrap();
        match frame {
            Frame::Stream(frame) => match streams.take(&frame) {
                TakenPart::All => {}
                TakenPart::Part(part) => repeats.push(RepeatedFrame::new(at, &frame, part)),
                TakenPart::TooMuch => panic!("{frame:?}"),
            },
            Frame::ResetStream { id, .. } => streams.reset(id),
            _ => {}
        }
    }
    cut(payload, &repeats)
}

fn stream_frame(id: u64, offset: u64, data: &[u8], fin: bool) -> Vec<u8> {
    let mut out = Vec::new();
    frame::write_stream(id, offset, data, fin, &mut out);
    out
}

fn stream_frames(payload: &[u8]) -> impl Iterator<Item = StreamFrame<'_>> {
    Walker::new(payload).filter_map(|item| match item.unwrap().1 {
        Frame::Stream(frame) => Some(frame),
        _ => None,
    })
}

/// Returns, for each stream in the payload, the offset after its last byte, and whether a frame with FIN ends it.
fn ends(payload: &[u8]) -> BTreeMap<u64, (u64, bool)> {
    let mut ends = BTreeMap::new();
    for frame in stream_frames(payload) {
        let (end, fin) = ends.entry(frame.id).or_insert((0, false));
        *end = (*end).max(frame.offset + frame.data.len() as u64);
        *fin |= frame.fin;
    }
    ends
}

/// Returns ((stream, offset), value) of each stream byte in the payload, sorted by stream and offset.
fn bytes(payload: &[u8]) -> Vec<((u64, u64), u8)> {
    let of = |frame: StreamFrame<'_>| {
        (frame.offset..).zip(frame.data.to_vec()).map(move |(at, byte)| ((frame.id, at), byte))
    };
    let mut bytes: Vec<_> = stream_frames(payload).flat_map(of).collect();
    bytes.sort_unstable();
    bytes
}

#[test]
fn first_of_two_frames_with_different_bytes_at_an_offset_is_kept() {
    let mut streams = ReceivedStreams::new(10);
    let x = [b'x'; 53];
    let y = [b'y'; 54];
    let honest = stream_frame(2, 0, &[0; 100], false);
    assert_eq!(pass(&mut streams, &honest), honest);
    let both = [stream_frame(2, 100, &x, false), stream_frame(2, 100, &y, false), vec![0x01]].concat();
    let left = [stream_frame(2, 100, &x, false), stream_frame(2, 153, b"y", false), vec![0x01]].concat();
    assert_eq!(pass(&mut streams, &both), left);
}

#[test]
#[allow(clippy::single_range_in_vec_init, reason = "some cases have one range, others several")]
fn overlapping_frames_leave_only_new_bytes() {
    let bytes: Vec<u8> = (0..100).collect();
    let frame = |range: Range<usize>, fin| stream_frame(6, range.start as u64, &bytes[range], fin);
    let end_at = |at, fin| stream_frame(6, at, &[], fin);
    for (description, before, then, left) in [
        ("all", vec![0..20], frame(5..20, false), end_at(20, false)),
        ("all, and the end", vec![0..20], frame(5..20, true), end_at(20, true)),
        ("the front", vec![0..20], frame(10..30, true), frame(20..30, true)),
        ("the back", vec![20..30], frame(10..30, true), [frame(10..20, false), end_at(30, true)].concat()),
        (
            "the middle",
            vec![20..25],
            frame(10..30, true),
            [frame(10..20, false), frame(25..30, true)].concat(),
        ),
        (
            "two pieces, over both ends of the first hole",
            vec![0..10, 20..25],
            frame(5..40, false),
            [frame(10..20, false), frame(25..40, false)].concat(),
        ),
        (
            "an end before bytes that have come",
            vec![0..20, 40..50],
            frame(20..30, true),
            [frame(20..30, true), end_at(50, false)].concat(),
        ),
    ] {
        let mut streams = ReceivedStreams::new(10);
        for range in before {
            let honest = frame(range, false);
            assert_eq!(pass(&mut streams, &honest), honest, "{description}");
        }
        assert_eq!(pass(&mut streams, &then), left, "{description}");
    }
}

/// The last STREAM frame of a payload may have no Length field. The frame that replaces it has one.
#[test]
fn repeated_bytes_of_a_frame_without_length_are_removed() {
    let mut streams = ReceivedStreams::new(10);
    pass(&mut streams, &stream_frame(2, 0, b"abc", false));
    assert_eq!(
        pass(&mut streams, &[0x01, 0x08, 2, b'x', b'y', b'z', b'd']),
        [&[0x01][..], &stream_frame(2, 3, b"d", false)].concat()
    );
}

#[test]
fn bytes_of_a_finished_stream_are_removed() {
    let mut streams = ReceivedStreams::new(10);
    pass(&mut streams, &stream_frame(2, 0, b"abc", true));
    assert_eq!(pass(&mut streams, &stream_frame(2, 1, b"xyz", false)), stream_frame(2, 4, b"", false));
    let reset = [stream_frame(6, 0, b"abc", false), vec![0x04, 6, 0, 10]].concat();
    assert_eq!(pass(&mut streams, &reset), reset);
    assert_eq!(pass(&mut streams, &stream_frame(6, 5, b"xyz", false)), stream_frame(6, 8, b"", false));
    assert!(streams.open.is_empty());
    // Only the QUIC stack reads bidirectional streams, so their repeated bytes are not removed.
    let twice = [stream_frame(0, 0, b"abc", false), stream_frame(0, 0, b"xyz", false)].concat();
    assert_eq!(pass(&mut streams, &twice), twice);
}

/// The memory for received ranges is bounded, even if the peer sends more frames after [`TakenPart::TooMuch`] was
/// returned.
#[test]
fn number_of_open_streams_and_gaps_is_bounded() {
    let open = |id: u64, offset, fin| StreamFrame { id: id * 4 + 2, offset, fin, data: &[7] };
    let mut streams = ReceivedStreams::new(10);
    assert!((0..10).all(|id| streams.take(&open(id, 1, false)) == TakenPart::All));
    assert_eq!(streams.take(&open(10, 1, false)), TakenPart::TooMuch);
    assert_eq!(streams.take(&open(10, 0, true)), TakenPart::TooMuch);
    let mut streams = ReceivedStreams::new(10);
    assert!((0..10).all(|id| streams.take(&open(2 * id, 0, true)) == TakenPart::All));
    assert_eq!(streams.take(&open(100, 0, true)), TakenPart::TooMuch);
    (50..100).for_each(|id| streams.reset(8 * id + 2));
    assert_eq!((streams.open.len(), streams.over.len()), (0, 10));
    let mut streams = ReceivedStreams::new(10);
    let taken =
        (0..).map(|at| streams.take(&open(0, 2 * at + 1, false))).find(|taken| *taken != TakenPart::All);
    assert_eq!(taken, Some(TakenPart::TooMuch));
}

proptest! {
    /// The first byte that arrives at an offset is passed on, and later ones are removed. The largest offset of each
    /// stream, to which flow control applies, stays the same.
    #[test]
    fn each_received_stream_byte_is_passed_on_once(
        packets in prop::collection::vec(
            prop::collection::vec((0u64..3, 0u64..40, 0usize..20, prop::bool::weighted(0.1)), 1..4),
            0..30,
        )
    ) {
        let mut streams = ReceivedStreams::new(10);
        let mut seen = BTreeSet::new();
        let mut sizes = BTreeMap::new();
        for (number, frames) in packets.into_iter().enumerate() {
            let mut payload = vec![0x01];
            let mut new = BTreeMap::new();
            for (at, (stream, offset, len, fin)) in frames.into_iter().enumerate() {
                let id = 4 * stream + 2;
                let data = vec![(8 * number + at) as u8; len];
                payload.extend(stream_frame(id, offset, &data, fin));
                let end = offset + len as u64;
                let is_beyond = |(_, at): &(u64, u64)| *at >= end;
                let size = sizes.get(&id).copied().unwrap_or(if fin { end } else { u64::MAX });
                if end > size || (fin && (end != size || seen.range((id, 0)..(id + 1, 0)).any(is_beyond))) {
                    // These frames contradict each other, so in the relay the QUIC stack would close the connection. So
                    // nothing after them is tested.
                    return Ok(());
                }
                if fin {
                    sizes.insert(id, end);
                }
                for (at, byte) in (offset..).zip(data) {
                    if seen.insert((id, at)) {
                        new.insert((id, at), byte);
                    }
                }
            }
            let left = pass(&mut streams, &payload);
            prop_assert_eq!(ends(&left), ends(&payload));
            prop_assert_eq!(bytes(&left), new.into_iter().collect::<Vec<_>>());
            prop_assert_eq!(bytes(&pass(&mut streams, &payload)), []);
        }
    }

    #[test]
    fn received_packet_number_is_new_once(numbers in prop::collection::vec(0u64..400, 0..300)) {
        let mut received = ReceivedNumbers::default();
        let mut model = BTreeSet::new();
        for number in numbers {
            let largest = model.last().copied();
            let is_old = largest.is_some_and(|largest: u64| largest.saturating_sub(number) > 128);
            let is_new = !is_old && !model.contains(&number);
            prop_assert_eq!(received.insert(number), is_new, "{} behind {:?}", number, largest);
            if is_new {
                model.insert(number);
            }
            prop_assert_eq!(received.next(), model.last().map_or(0, |largest| largest + 1));
        }
    }
}
