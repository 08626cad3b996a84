use proptest::prelude::*;

use super::*;

fn walk(payload: &[u8]) -> Vec<Result<(Range<usize>, Frame<'_>), Error>> {
    Walker::new(payload).collect()
}

#[test]
fn every_quic_frame_type_is_parsed() {
    use Direction::{Bidirectional, Unidirectional};
    let token = [7; 16];
    let table: Vec<(Vec<u8>, Frame<'_>)> = vec![
        (vec![0x00, 0x00, 0x00], Frame::Padding),
        (vec![0x01], Frame::Ping),
        (vec![0x04, 3, 9, 0x40, 100], Frame::ResetStream { id: 3, code: 9, final_size: 100 }),
        (vec![0x05, 3, 9], Frame::StopSending { id: 3, code: 9 }),
        (vec![0x06, 1, 2, 8, 9], Frame::Crypto { offset: 1, data: &[8, 9] }),
        (vec![0x07, 2, 8, 9], Frame::NewToken(&[8, 9])),
        (vec![0x0a, 3, 1, 9], Frame::Stream(StreamFrame { id: 3, offset: 0, fin: false, data: &[9] })),
        (vec![0x0f, 3, 5, 1, 9], Frame::Stream(StreamFrame { id: 3, offset: 5, fin: true, data: &[9] })),
        (vec![0x10, 5], Frame::MaxData(5)),
        (vec![0x11, 3, 5], Frame::MaxStreamData { id: 3, limit: 5 }),
        (vec![0x12, 5], Frame::MaxStreams(Bidirectional, 5)),
        (vec![0x13, 5], Frame::MaxStreams(Unidirectional, 5)),
        (vec![0x14, 5], Frame::DataBlocked(5)),
        (vec![0x15, 3, 5], Frame::StreamDataBlocked { id: 3, limit: 5 }),
        (vec![0x16, 5], Frame::StreamsBlocked(Bidirectional, 5)),
        (vec![0x17, 5], Frame::StreamsBlocked(Unidirectional, 5)),
        (
            [&[0x18, 2, 1, 1, 0xaa], token.as_slice()].concat(),
            Frame::NewConnectionId { sequence: 2, retire_prior_to: 1, id: &[0xaa], reset_token: &token },
        ),
        (vec![0x19, 5], Frame::RetireConnectionId(5)),
        (vec![0x1a, 1, 2, 3, 4, 5, 6, 7, 8], Frame::PathChallenge([1, 2, 3, 4, 5, 6, 7, 8])),
        (vec![0x1b, 1, 2, 3, 4, 5, 6, 7, 8], Frame::PathResponse([1, 2, 3, 4, 5, 6, 7, 8])),
        (vec![0x1c, 1, 6, 1, b'x'], Frame::ConnectionClose { code: 1, frame_type: 6, reason: b"x" }),
        (vec![0x1d, 1, 1, b'x'], Frame::ApplicationClose { code: 1, reason: b"x" }),
        (vec![0x1e], Frame::HandshakeDone),
        (vec![0x1f], Frame::ImmediateAck),
        (vec![0x31, 2, 8, 9], Frame::Datagram(&[8, 9])),
        (
            vec![0x40, 0xaf, 1, 2, 3, 4],
            Frame::AckFrequency { sequence: 1, threshold: 2, max_ack_delay_us: 3, reordering: 4 },
        ),
    ];
    for (bytes, frame) in &table {
        assert_eq!(walk(bytes), [Ok((0..bytes.len(), *frame))]);
        // A frame that is cut short is an error wherever it is cut, and never parses as another frame.
        for len in 1..bytes.len() {
            if !matches!(frame, Frame::Padding) {
                assert_eq!(walk(&bytes[..len]), [Err(Error::Truncated)], "{frame:?} cut to {len}");
            }
        }
    }
    // All frames are parsed from one payload. The PING between them separates the two runs of PADDING.
    let payload: Vec<u8> = table.iter().flat_map(|(bytes, _)| bytes.clone()).collect();
    let frames: Vec<_> = walk(&payload).into_iter().map(|item| item.unwrap().1).collect();
    assert_eq!(frames, table.iter().map(|(_, frame)| *frame).collect::<Vec<_>>());
}

#[test]
fn both_types_of_ack_frames_are_parsed() {
    for payload in [&[0x02, 30, 7, 1, 5, 3, 2][..], &[0x03, 30, 7, 1, 5, 3, 2, 1, 2, 3]] {
        let [Ok((range, Frame::Ack(ack)))] = &walk(payload)[..] else { panic!("one ACK frame") };
        assert_eq!(*range, 0..payload.len());
        assert_eq!(ack.ranges().collect::<Vec<_>>(), [25..=30, 18..=20]);
    }
}

#[test]
fn stream_or_datagram_frame_without_length_takes_the_rest_of_the_packet() {
    let stream = Frame::Stream(StreamFrame { id: 3, offset: 0, fin: true, data: &[1, 2, 3] });
    assert_eq!(walk(&[0x01, 0x09, 3, 1, 2, 3]), [Ok((0..1, Frame::Ping)), Ok((1..6, stream))]);
    assert_eq!(walk(&[0x30, 1, 2]), [Ok((0..3, Frame::Datagram(&[1, 2])))]);
    assert_eq!(walk(&[0x30]), [Ok((0..1, Frame::Datagram(&[])))]);
}

#[test]
fn malformed_quic_frames_are_refused() {
    let unknown = |kind| [Err(Error::Unknown(kind))];
    assert_eq!(walk(&[0x20]), unknown(0x20));
    assert_eq!(walk(&[0x40, 0xae]), unknown(0xae));
    assert_eq!(walk(&[0x02, 1, 0, 0, 2]), [Err(Error::Malformed(0x02))], "below zero at once");
    assert_eq!(walk(&[0x03, 9, 0, 1, 2, 6, 0]), [Err(Error::Malformed(0x03))], "below zero after a gap");
    assert_eq!(walk(&[0x02, 9, 0, 1, 2]), [Err(Error::Truncated)]);
    let beyond = [&[0x0e, 3], [0xff; 8].as_slice(), &[1, 9]].concat();
    assert_eq!(walk(&beyond), [Err(Error::Malformed(0x0e))]);
    let long_id = [&[0x18, 2, 1, 21], [0; 40].as_slice()].concat();
    assert_eq!(walk(&long_id), [Err(Error::Malformed(0x18))]);
}

#[test]
fn removed_frame_is_overwritten_with_ping_and_padding() {
    let mut payload = [0x01, 0x11, 3, 0x80, 0, 0, 5, 0x1f];
    blank(&mut payload[1..7]);
    let frames: Vec<_> = walk(&payload).into_iter().map(|item| item.unwrap().1).collect();
    assert_eq!(frames, [Frame::Ping, Frame::Ping, Frame::Padding, Frame::ImmediateAck]);
}

#[derive(Clone, Debug)]
enum WrittenFrame {
    Stream { id: u64, offset: u64, data: Vec<u8>, fin: bool },
    Reset { id: u64, code: u64, final_size: u64 },
    Datagram(Vec<u8>),
    MaxData(u64),
    Ping,
    Padding(usize),
}

fn number() -> impl Strategy<Value = u64> {
    (0..62u32, any::<u64>()).prop_map(|(shift, value)| (value & varint::MAX) >> shift)
}

fn written() -> impl Strategy<Value = WrittenFrame> {
    let data = proptest::collection::vec(any::<u8>(), 0..300);
    prop_oneof![
        (number(), number(), data.clone(), any::<bool>()).prop_map(|(id, offset, data, fin)| {
            WrittenFrame::Stream { id, offset: offset.min(varint::MAX - 300), data, fin }
        }),
        (number(), number(), number()).prop_map(|(id, code, final_size)| WrittenFrame::Reset {
            id,
            code,
            final_size
        }),
        data.prop_map(WrittenFrame::Datagram),
        number().prop_map(WrittenFrame::MaxData),
        Just(WrittenFrame::Ping),
        (1..9usize).prop_map(WrittenFrame::Padding),
    ]
}

proptest! {
    #[test]
    fn written_frame_parses_back(frames in proptest::collection::vec(written(), 0..8)) {
        let mut payload = Vec::new();
        let mut starts = Vec::new();
        for frame in &frames {
            starts.push(payload.len());
            match frame {
                WrittenFrame::Stream { id, offset, data, fin } => {
                    write_stream(*id, *offset, data, *fin, &mut payload);
                    let len = payload.len() - starts[starts.len() - 1];
                    prop_assert_eq!(len, stream_overhead(*id, *offset, data.len()) + data.len());
                }
                WrittenFrame::Reset { id, code, final_size } => {
                    write_reset_stream(*id, *code, *final_size, &mut payload);
                }
                WrittenFrame::Datagram(data) => write_datagram(data, &mut payload),
                WrittenFrame::MaxData(limit) => write_max_data(*limit, &mut payload),
                WrittenFrame::Ping => write_ping(&mut payload),
                WrittenFrame::Padding(len) => write_padding(*len, &mut payload),
            }
        }
        let mut walker = Walker::new(&payload).map(Result::unwrap).peekable();
        for (frame, start) in frames.iter().zip(starts) {
            if let WrittenFrame::Padding(_) = frame {
                // The parser merges adjacent runs of PADDING.
                walker.next_if(|(range, frame)| range.start == start && *frame == Frame::Padding);
                continue;
            }
            let (range, parsed) = walker.next().unwrap();
            prop_assert_eq!(range.start, start);
            match frame {
                WrittenFrame::Stream { id, offset, data, fin } => {
                    prop_assert_eq!(parsed, Frame::Stream(StreamFrame { id: *id, offset: *offset, fin: *fin, data }));
                }
                WrittenFrame::Reset { id, code, final_size } => {
                    let id = *id;
                    let code = *code;
                    let final_size = *final_size;
                    prop_assert_eq!(parsed, Frame::ResetStream { id, code, final_size });
                }
                WrittenFrame::Datagram(data) => prop_assert_eq!(parsed, Frame::Datagram(data)),
                WrittenFrame::MaxData(limit) => prop_assert_eq!(parsed, Frame::MaxData(*limit)),
                WrittenFrame::Ping | WrittenFrame::Padding(_) => prop_assert_eq!(parsed, Frame::Ping),
            }
        }
        prop_assert!(walker.next().is_none());
    }

    #[test]
    fn arbitrary_bytes_never_panic(payload in proptest::collection::vec(any::<u8>(), 0..200)) {
        let mut end = 0;
        for item in Walker::new(&payload) {
            let Ok((range, frame)) = item else { break };
            prop_assert_eq!(range.start, end, "frames follow each other");
            prop_assert!(range.end > range.start && range.end <= payload.len());
            end = range.end;
            if let Frame::Ack(ack) = frame {
                let mut below = ack.largest + 1;
                for acked in ack.ranges() {
                    prop_assert!(acked.start() <= acked.end() && *acked.end() < below);
                    below = *acked.start();
                }
            }
        }
    }
}
