use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;

/// Writes an ACK frame whose varints have at least `width` bytes each (0: as few as possible).
fn encode(ranges: &[RangeInclusive<u64>], delay: u64, ecn: bool, width: usize) -> Vec<u8> {
    let mut fields = vec![*ranges[0].end(), delay];
    fields.extend(blocks(ranges));
    if ecn {
        fields.extend([1, 2, 300]);
    }
    let mut out = vec![if ecn { 3 } else { 2 }];
    for field in fields {
        let mut bytes = vec![0; width.max(varint::len(field))];
        assert!(varint::fill(field, &mut bytes));
        out.extend(bytes);
    }
    out
}

/// Parses an ACK frame; returns it and its length in bytes.
fn try_parse(bytes: &[u8]) -> Result<(AckFrame<'_>, usize), Error> {
    let mut cursor = PayloadCursor { rest: bytes };
    let kind = cursor.varint()?;
    let ack = AckFrame::parse(&mut cursor, kind, kind == 3)?;
    Ok((ack, bytes.len() - cursor.rest.len()))
}

fn parse(bytes: &[u8]) -> AckFrame<'_> {
    let (ack, len) = try_parse(bytes).expect("an ACK frame");
    assert_eq!(len, bytes.len(), "bytes follow the frame");
    ack
}

fn map(wire: impl IntoIterator<Item = u64>) -> NumberMap {
    let mut map = NumberMap::default();
    let sent = Instant::now();
    wire.into_iter().for_each(|wire| map.push(wire, Some(sent)));
    map
}

fn translated(ack: &AckFrame<'_>, map: &NumberMap) -> Vec<RangeInclusive<u64>> {
    let mut out = Vec::new();
    ack.translate(map, &mut out);
    out
}

#[test]
fn ack_ranges_are_parsed() {
    // RFC 9000, section 19.3.1: Largest 30, First ACK Range 5, Gap 3, Length 2.
    let ack = [0x02, 30, 7, 1, 5, 3, 2];
    let ack = parse(&ack);
    assert_eq!((ack.largest, ack.delay), (30, 7));
    assert_eq!(ack.ranges().collect::<Vec<_>>(), [25..=30, 18..=20]);
}

#[test]
fn ack_ranges_are_translated_to_packet_numbers_of_the_quic_stack_only() {
    // The packets with numbers 2, 5 and 9 on the wire are the QUIC stack's packets 0, 1 and 2. All other packets are
    // the data plane's.
    let map = map([2, 5, 9]);
    type Ranges = &'static [RangeInclusive<u64>];
    let table: [(Ranges, Ranges); 7] = [
        (&[0..=1], &[]),
        (&[3..=4], &[]),
        (&[2..=2], &[0..=0]),
        (&[0..=9], &[0..=2]),
        (&[9..=9, 5..=5], &[1..=2]),
        (&[9..=9, 2..=3], &[2..=2, 0..=0]),
        (&[8..=9, 6..=6, 0..=4], &[2..=2, 0..=0]),
    ];
    for (wire, virtuals) in table {
        assert_eq!(translated(&parse(&encode(wire, 0, false, 0)), &map), virtuals, "{wire:?}");
    }
}

#[test]
fn type_and_counts_of_an_ecn_ack_are_kept() {
    let bytes = encode(&[5..=9], 100, true, 0);
    let mut out = Vec::new();
    parse(&bytes).rewrite(bytes.len(), &[2..=2], 120, &mut out);
    assert_eq!(out, [3, 2, 0x40, 120, 0, 0, 1, 2, 0x41, 0x2c]);
    assert_eq!(out.len(), bytes.len());
}

#[test]
fn ack_delay_longer_than_its_field_is_sent_as_the_largest_value() {
    let bytes = encode(&[9..=9], 5, false, 0);
    let mut out = Vec::new();
    parse(&bytes).rewrite(bytes.len(), &[2..=2], 1000, &mut out);
    assert_eq!(out, [2, 2, 63, 0, 0]);
}

#[test]
fn ack_of_a_packet_number_skipped_by_the_quic_stack_reaches_the_stack() {
    let mut map = map([0, 1]);
    map.push(2, None);
    map.push(4, Some(Instant::now()));
    assert_eq!(map.translate(2..=2), Some(2..=2), "the stack sees that its trap was acknowledged");
    assert_eq!((map.sent(2), map.sent(3).is_some(), map.next()), (None, true, 4));
}

#[test]
fn ack_map_forgets_packets_far_below_the_largest_acknowledged_one() {
    let mut map = map((0..5000).map(|number| 2 * number));
    assert!(map.on_acked(3000));
    assert!(!map.on_acked(3000));
    assert!(!map.on_acked(2000));
    assert!(!map.on_acked(5000), "not sent");
    assert_eq!(map.acked(), Some(3000));
    assert_eq!(map.translate(0..=9998), Some(3000 - KEPT as u64..=4999));
    assert_eq!(map.next(), 5000);
}

#[test]
fn packet_number_map_is_bounded_without_acknowledgements() {
    let mut map = map(0..2 * LIMIT as u64);
    assert_eq!(map.packets.len(), LIMIT);
    assert_eq!(map.next(), 2 * LIMIT as u64);
    assert_eq!(map.translate(0..=u64::MAX), Some(LIMIT as u64..=2 * LIMIT as u64 - 1));
    map.push(3 * LIMIT as u64, None);
}

fn descending(numbers: &BTreeSet<u64>) -> Vec<RangeInclusive<u64>> {
    let mut ranges: Vec<RangeInclusive<u64>> = Vec::new();
    for number in numbers.iter().rev() {
        match ranges.last_mut() {
            Some(last) if *last.start() == number + 1 => *last = *number..=*last.end(),
            _ => ranges.push(*number..=*number),
        }
    }
    ranges
}

proptest! {
    #[test]
    fn rewritten_acks_name_only_the_quic_stacks_packets_and_do_not_grow(
        base in 0..1u64 << 40,
        sent in proptest::collection::vec((any::<bool>(), any::<bool>()), 1..400),
        delay in 0..1u64 << 20,
        more_delay in 0..1u64 << 32,
        ecn in any::<bool>(),
        width in prop_oneof![Just(0usize), Just(2), Just(4), Just(8)],
    ) {
        // Two flags for each wire number from `base` on: whether the packet is the stack's, and whether it is
        // acknowledged.
        let mut map = NumberMap { first: base / 2, ..NumberMap::default() };
        let mut wire = BTreeSet::new();
        let mut expected = BTreeSet::new();
        for (number, (stacks, acked)) in (base..).zip(&sent) {
            if *stacks && *acked {
                expected.insert(map.next());
            }
            if *stacks {
                map.push(number, None);
            }
            if *acked {
                wire.insert(number);
            }
        }
        prop_assume!(!wire.is_empty());
        let ranges = descending(&wire);
        let bytes = encode(&ranges, delay, ecn, width);
        let ack = parse(&bytes);
        prop_assert_eq!(ack.ranges().collect::<Vec<_>>(), ranges);

        let virtuals = translated(&ack, &map);
        prop_assert_eq!(&virtuals, &descending(&expected));
        if virtuals.is_empty() {
            return Ok(());
        }
        let mut out = Vec::new();
        ack.rewrite(bytes.len(), &virtuals, delay + more_delay, &mut out);
        prop_assert!(out.len() <= bytes.len());
        let rewritten = parse(&out);
        prop_assert_eq!(rewritten.ranges().collect::<Vec<_>>(), virtuals);
        prop_assert_eq!(rewritten.ecn.is_some(), ecn);
        prop_assert!(rewritten.delay <= delay + more_delay);
        let fits = out.len() + varint::len(delay + more_delay) - varint::len(rewritten.delay) <= bytes.len();
        prop_assert!(!fits || rewritten.delay == delay + more_delay);
    }

    #[test]
    fn arbitrary_acks_never_panic(body in proptest::collection::vec(any::<u8>(), 0..60), ecn in any::<bool>()) {
        let payload = [&[if ecn { 3 } else { 2 }], body.as_slice()].concat();
        let map = map([1, 2, 5, 60, 1000]);
        if let Ok((ack, len)) = try_parse(&payload) {
            let mut virtuals = Vec::new();
            ack.translate(&map, &mut virtuals);
            let mut out = Vec::new();
            ack.rewrite(len, &virtuals, u64::MAX >> 2, &mut out);
            prop_assert!(out.len() <= len);
        }
    }
}
