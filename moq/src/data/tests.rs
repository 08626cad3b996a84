use bytes::Bytes;
use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;

use super::*;
use crate::code::Session;
use crate::{DecodeError, Draft, GroupOrder, Location};

fn header(bytes: &[u8]) -> Result<Option<StreamHeader>, DecodeError> {
    StreamHeader::decode(&mut &bytes[..])
}

/// Parses `stream` in pieces of the given sizes, then the rest at once. Returns the objects, and whether the stream may
/// end after the bytes that were parsed.
fn objects(
    header: &SubgroupHeader,
    stream: &[u8],
    pieces: &[usize],
) -> Result<(Vec<ObjectStart>, bool), DecodeError> {
    let mut parser = ObjectParser::new(header, 100);
    let mut found = Vec::new();
    let mut rest = stream;
    let mut sizes = pieces.iter().copied();
    while !rest.is_empty() {
        let (mut piece, behind) = rest.split_at(sizes.next().unwrap_or(usize::MAX).clamp(1, rest.len()));
        rest = behind;
        while let Some(object) = parser.next(&mut piece)? {
            found.push(object);
        }
        assert!(piece.is_empty());
    }
    assert_eq!(parser.offset(), 100 + stream.len() as u64);
    assert_eq!(parser.finish().is_ok(), parser.at_boundary());
    Ok((found, parser.at_boundary()))
}

const PLAIN: SubgroupHeader = SubgroupHeader {
    alias: 2,
    group: 0,
    subgroup: SubgroupId::Explicit(0),
    priority: Some(0),
    properties: false,
    end_of_group: false,
    first_object: false,
};

#[test]
fn subgroup_example_of_the_draft_is_encoded_and_decoded() {
    let bytes = [0x14, 2, 0, 0, 0];
    assert_eq!(header(&bytes), Ok(Some(StreamHeader::Subgroup(PLAIN))));
    let mut out = Vec::new();
    PLAIN.encode(&mut out);
    assert_eq!(out, bytes);

    let stream = b"\x00\x04abcd\x00\x04efgh";
    let (found, at_boundary) = objects(&PLAIN, stream, &[]).unwrap();
    assert!(at_boundary);
    let expected = |id, start| ObjectStart {
        id,
        properties: Bytes::new(),
        payload_len: 4,
        status: None,
        start,
        payload: start + 2,
    };
    assert_eq!(found, [expected(0, 100), expected(1, 106)]);
    assert_eq!(found[0].end(), found[1].start);
}

#[test]
fn group_example_of_the_draft_with_properties_is_encoded_and_decoded() {
    let expected =
        SubgroupHeader { priority: None, properties: true, subgroup: SubgroupId::Explicit(0), ..PLAIN };
    assert_eq!(header(&[0x35, 2, 0, 0]), Ok(Some(StreamHeader::Subgroup(expected))));
    let stream = b"\x00\x02\x04\x25\x04abcd\x00\x00\x04efgh";
    let (found, _) = objects(&expected, stream, &[3, 1]).unwrap();
    assert_eq!(&found[0].properties[..], [4, 0x25]);
    assert_eq!((found[1].id, &found[1].properties[..]), (1, &[][..]));
}

#[test]
fn undefined_stream_type_is_refused() {
    for kind in 0..=0xffu64 {
        let mut bytes = Vec::new();
        vi64::encode(kind, &mut bytes);
        bytes.extend_from_slice(&[1; 8]);
        let valid = kind == 0x05 || (kind & 0x90 == 0x10 && kind & 0x06 != 0x06);
        match header(&bytes) {
            Ok(Some(_)) => assert!(valid, "{kind:#x}"),
            Err(error) => {
                assert!(!valid, "{kind:#x}");
                assert_eq!(error.code, Session::PROTOCOL_VIOLATION);
            }
            Ok(None) => panic!("{kind:#x} wants more than 8 bytes"),
        }
    }
    assert_eq!(header(&[0xaf, 0x00, 0, 0]), Ok(Some(StreamHeader::Setup)));
    assert_eq!(header(&[0xf0, 0x13, 0x2b, 0x3e, 0x28]), Ok(Some(StreamHeader::Padding)));
}

#[test]
fn malformed_subgroup_objects_are_protocol_violations() {
    let with_properties = SubgroupHeader { properties: true, ..PLAIN };
    let mut overflow = vec![0xff; 9];
    overflow.extend_from_slice(b"\x00\x00\x00\x00\x00");
    let mut huge = vec![0];
    vi64::encode(u64::MAX, &mut huge);
    let mut wide = vec![0];
    vi64::encode(MAX_PROPERTIES + 1, &mut wide);
    let table: [(&str, SubgroupHeader, &[u8]); 7] = [
        ("object ID above 2^64 - 1", PLAIN, &overflow),
        ("unknown status", PLAIN, &[0, 0, 1]),
        ("longer than any stream", PLAIN, &huge),
        ("too many properties", with_properties, &wide),
        ("properties on an end of group", with_properties, &[0, 2, 4, 1, 0, 3]),
        ("object behind the end of the group", PLAIN, &[0, 0, 3, 0, 0, 0]),
        ("its first byte", PLAIN, &[0, 0, 3, 0]),
    ];
    for (what, header, stream) in table {
        assert!(objects(&header, stream, &[]).is_err(), "{what}");
        assert!(objects(&header, stream, &[1; 20]).is_err(), "{what}, byte by byte");
    }
}

#[test]
fn subgroup_parser_resumes_from_a_saved_position_inside_an_object() {
    let header = SubgroupHeader { properties: true, ..PLAIN };
    let stream = b"\x05\x02\x04\x25\x04abcd\x00\xc0\x00\x02\x04\x25\x00\x00\x80\x07\x00\x00\x03";
    let object = Position { field: Field::Object, kind: 0x15, ..Position::default() };
    let first = Position { previous: Some(5), ..object };
    let second = Position { previous: Some(6), ..object };
    for (len, want) in [
        (0, object),
        (1, Position { field: Field::PropertiesLength, ..first }),
        (3, Position { field: Field::Properties, left: 1, with_properties: true, ..first }),
        (4, Position { field: Field::Length, with_properties: true, ..first }),
        (6, Position { field: Field::Payload, left: 3, ..first }),
        (9, first),
        (12, Position { field: Field::PropertiesLength, missing: 1, ..second }),
        (16, Position { field: Field::Status, with_properties: true, ..second }),
        (17, second),
        (18, Position { missing: 1, ..second }),
        (22, Position { previous: Some(14), ended: true, ..object }),
    ] {
        let mut parser = ObjectParser::new(&header, 100);
        for mut byte in stream[..len].chunks(1) {
            parser.next(&mut byte).unwrap();
        }
        assert_eq!(parser.position(), Position { offset: 100 + len as u64, ..want }, "{len} bytes");
    }
}

#[test]
fn subgroup_stream_that_ends_inside_an_object_is_detected() {
    for (stream, at_boundary) in [
        (&b"\x00\x02ab"[..], true),
        (b"\x00\x02a", false),
        (b"\x00", false),
        (b"", true),
        (b"\x00\x00\x00", true),
    ] {
        assert_eq!(objects(&PLAIN, stream, &[]).unwrap().1, at_boundary, "{stream:?}");
    }
}

#[test]
fn datagrams_encode_and_decode() {
    let bytes = Bytes::from_static(b"\x0c\x02\x07payload");
    let datagram = ObjectDatagram::decode(bytes.clone()).unwrap().unwrap();
    let expected = ObjectDatagram {
        alias: 2,
        group: 7,
        object: 0,
        priority: None,
        end_of_group: false,
        properties: Bytes::new(),
        status: None,
        payload: Bytes::from_static(b"payload"),
    };
    assert_eq!(datagram, expected);
    let mut out = Vec::new();
    datagram.encode(&mut out);
    assert_eq!(out, bytes);
    let padding = Bytes::from_static(&[0xf0, 0x13, 0x2b, 0x3e, 0x29, 0, 0]);
    assert_eq!(ObjectDatagram::decode(padding), Ok(None));
}

#[test]
fn malformed_object_datagrams_are_protocol_violations() {
    let table: [(&str, &[u8]); 8] = [
        ("status and end of group", &[0x22, 1, 1, 1, 1, 0]),
        ("outside the form", &[0x10, 1, 1, 1, 1]),
        ("outside the form", &[0x40, 1, 1, 1, 1]),
        ("empty properties", &[0x01, 1, 1, 1, 1, 0]),
        ("properties past the end", &[0x01, 1, 1, 1, 1, 2, 0]),
        ("payload after a status", &[0x20, 1, 1, 1, 1, 0, 0]),
        ("properties on an end of group", &[0x21, 1, 1, 1, 1, 2, 4, 0, 3]),
        ("empty", &[]),
    ];
    for (what, bytes) in table {
        let error = ObjectDatagram::decode(Bytes::copy_from_slice(bytes)).unwrap_err();
        assert_eq!(error.code, Session::PROTOCOL_VIOLATION, "{what}");
    }
}

fn fetched(location: (u64, u64), subgroup: Option<u64>, priority: u8) -> FetchItem {
    FetchItem::Object(FetchObject {
        location: Location::new(location.0, location.1),
        subgroup,
        priority,
        properties: Bytes::new(),
        payload_len: 1,
    })
}

#[test]
fn fetch_encoding_omits_fields_equal_to_the_prior_object() {
    let mut encoder = FetchEncoder::new(Draft::NEWEST, GroupOrder::Descending);
    let mut out = Vec::new();
    let mut encode = |item| {
        out.clear();
        encoder.encode(&item, &mut out);
        out.clone()
    };
    assert_eq!(encode(fetched((9, 4), Some(0), 7)), [0x1c, 9, 4, 7, 1]);
    assert_eq!(encode(fetched((9, 5), Some(0), 7)), [0x00, 1]);
    assert_eq!(encode(fetched((9, 8), Some(1), 7)), [0x06, 3, 1]);
    assert_eq!(encode(fetched((9, 9), Some(5), 7)), [0x03, 5, 1]);
    assert_eq!(encode(fetched((7, 10), Some(5), 7)), [0x09, 1, 1]);
    let range = FetchItem::Range { last: Location::new(6, 3), end: RangeEnd::Unknown };
    assert_eq!(encode(range), [0x81, 0x0c, 6, 3]);
    assert_eq!(encode(fetched((6, 4), None, 7)), [0x40, 1]);
}

#[test]
fn fetch_without_prior_object_is_a_violation() {
    let last = Location::new(1, 1);
    for (what, bytes) in [
        ("no group", &[0x14, 1, 1, 0][..]),
        ("no object", &[0x18, 1, 1, 0]),
        ("no priority", &[0x0c, 1, 1, 0]),
        ("prior subgroup", &[0x1d, 1, 1, 1, 0]),
        ("next subgroup", &[0x1e, 1, 1, 1, 0]),
        ("unknown flags", &[0x80, 0x80, 0]),
    ] {
        let mut decoder = FetchDecoder::new(Draft::NEWEST, GroupOrder::Ascending);
        assert!(decoder.decode(&mut &bytes[..]).is_err(), "{what}");
    }
    let mut decoder = FetchDecoder::new(Draft::NEWEST, GroupOrder::Ascending);
    let range = FetchItem::Range { last, end: RangeEnd::NonExistent };
    assert_eq!(decoder.decode(&mut &[0x80, 0x8c, 1, 1][..]), Ok(Some(range)));
    assert!(decoder.clone().decode(&mut &[0x00, 0][..]).is_err(), "priority behind a range only");
    assert_eq!(decoder.decode(&mut &[0x10, 9, 1][..]), Ok(Some(fetched((1, 2), Some(0), 9))));
}

#[test]
fn group_id_out_of_range_in_a_fetch_is_refused() {
    let first = [0x1c, 3, 0, 0, 0];
    let mut descending = FetchDecoder::new(Draft::NEWEST, GroupOrder::Descending);
    descending.decode(&mut &first[..]).unwrap();
    assert!(descending.decode(&mut &[0x08, 3, 0][..]).is_err(), "below 0");
    let mut wide = vec![0x08];
    vi64::encode(u64::MAX, &mut wide);
    wide.push(0);
    let mut ascending = FetchDecoder::new(Draft::NEWEST, GroupOrder::Ascending);
    ascending.decode(&mut &first[..]).unwrap();
    assert!(ascending.decode(&mut &wide[..]).is_err(), "above 2^64 - 1");
}

fn a_header() -> impl Strategy<Value = SubgroupHeader> {
    let subgroup = prop_oneof![
        Just(SubgroupId::Zero),
        Just(SubgroupId::FirstObject),
        any::<u64>().prop_map(SubgroupId::Explicit)
    ];
    let flags = (any::<bool>(), any::<bool>(), any::<bool>());
    (any::<u64>(), any::<u64>(), subgroup, option::of(any::<u8>()), flags).prop_map(
        |(alias, group, subgroup, priority, (properties, end_of_group, first_object))| SubgroupHeader {
            alias,
            group,
            subgroup,
            priority,
            properties,
            end_of_group,
            first_object,
        },
    )
}

/// An object to encode: the number of IDs skipped before it, its properties and its payload.
type WrittenObject = (u64, Vec<u8>, Vec<u8>);

fn stream_of(header: &SubgroupHeader, written: &[WrittenObject]) -> (Vec<u8>, Vec<ObjectStart>) {
    let mut stream = Vec::new();
    let mut expected = Vec::new();
    let mut previous = None;
    for (step, properties, payload) in written {
        let id = previous.map_or(*step, |previous| previous + 1 + step);
        let properties = header.properties.then_some(&properties[..]);
        let start = 100 + stream.len() as u64;
        let payload_len = payload.len() as u64;
        encode_object_header(previous, id, properties, payload_len, Status::Normal, &mut stream);
        expected.push(ObjectStart {
            id,
            properties: Bytes::copy_from_slice(properties.unwrap_or_default()),
            payload_len,
            status: payload.is_empty().then_some(Status::Normal),
            start,
            payload: 100 + stream.len() as u64,
        });
        stream.extend_from_slice(payload);
        previous = Some(id);
    }
    (stream, expected)
}

fn a_datagram() -> impl Strategy<Value = ObjectDatagram> {
    let bytes = || vec(any::<u8>(), 0..20).prop_map(Bytes::from);
    let content = prop_oneof![
        (bytes(), bytes(), any::<bool>())
            .prop_map(|(properties, payload, end)| (properties, None, payload, end)),
        Just((Bytes::new(), Some(Status::EndOfTrack), Bytes::new(), false)),
        bytes().prop_map(|properties| (properties, Some(Status::Normal), Bytes::new(), false)),
    ];
    (any::<u64>(), any::<u64>(), prop_oneof![Just(0), any::<u64>()], option::of(any::<u8>()), content)
        .prop_map(|(alias, group, object, priority, (properties, status, payload, end_of_group))| {
            ObjectDatagram { alias, group, object, priority, end_of_group, properties, status, payload }
        })
}

/// Returns the items of a FETCH response in `order`. Each entry of `steps` is an object with the numbers of groups and
/// of objects to advance before it. If the entry has a [`RangeEnd`], it makes a range without objects.
fn items(order: GroupOrder, steps: Vec<(u64, u64, FetchObject, Option<RangeEnd>)>) -> Vec<FetchItem> {
    let mut at = match order {
        GroupOrder::Ascending => Location::new(0, 0),
        GroupOrder::Descending => Location::new(u64::MAX, 0),
    };
    steps
        .into_iter()
        .map(|(groups, objects, object, end)| {
            at = match (groups, order) {
                (0, _) => Location::new(at.group, at.object + 1 + objects),
                (groups, GroupOrder::Ascending) => Location::new(at.group + groups, objects),
                (groups, GroupOrder::Descending) => Location::new(at.group - groups, objects),
            };
            match end {
                Some(end) => FetchItem::Range { last: at, end },
                None => FetchItem::Object(FetchObject { location: at, ..object }),
            }
        })
        .collect()
}

fn a_step() -> impl Strategy<Value = (u64, u64, FetchObject, Option<RangeEnd>)> {
    let end = prop_oneof![4 => Just(None), 1 => Just(Some(RangeEnd::Unknown)), 1 => Just(Some(RangeEnd::NonExistent)), 1 => Just(Some(RangeEnd::TimedOut))];
    let object = (option::of(0..3u64), 0..2u8, vec(any::<u8>(), 0..4), 0..9u64).prop_map(
        |(subgroup, priority, properties, payload_len)| FetchObject {
            location: Location::default(),
            subgroup,
            priority,
            properties: properties.into(),
            payload_len,
        },
    );
    (0..3u64, 0..3u64, object, end)
}

proptest! {
    #[test]
    fn stream_headers_round_trip(wanted in a_header()) {
        let mut out = Vec::new();
        wanted.encode(&mut out);
        prop_assert!(out.len() <= StreamHeader::MAX_LEN);
        for short in 0..out.len() {
            let mut input = &out[..short];
            prop_assert_eq!(StreamHeader::decode(&mut input), Ok(None));
            prop_assert_eq!(input.len(), short);
        }
        out.push(0xee);
        let mut input = &out[..];
        prop_assert_eq!(StreamHeader::decode(&mut input), Ok(Some(StreamHeader::Subgroup(wanted))));
        prop_assert_eq!(input, &[0xee]);
    }

    #[test]
    fn objects_are_parsed_alike_however_the_stream_is_divided(
        header in a_header(),
        written in vec((0..300u64, vec(any::<u8>(), 0..200), vec(any::<u8>(), 0..200)), 0..6),
        pieces in vec(1..40usize, 0..60),
    ) {
        let (stream, expected) = stream_of(&header, &written);
        let (found, at_boundary) = objects(&header, &stream, &pieces).unwrap();
        prop_assert_eq!(found, expected);
        prop_assert!(at_boundary);
    }

    #[test]
    fn arbitrary_stream_is_parsed_alike_however_it_is_divided(
        header in a_header(),
        stream in vec(prop_oneof![3 => 0..4u8, 1 => any::<u8>()], 0..60),
        pieces in vec(1..5usize, 0..60),
    ) {
        prop_assert_eq!(objects(&header, &stream, &pieces), objects(&header, &stream, &[]));
    }

    #[test]
    fn datagrams_round_trip(datagram in a_datagram()) {
        let mut out = Vec::new();
        datagram.encode(&mut out);
        prop_assert_eq!(ObjectDatagram::decode(out.into()), Ok(Some(datagram)));
    }

    #[test]
    fn arbitrary_stream_beginnings_never_panic(bytes in vec(any::<u8>(), 0..40)) {
        let _ = header(&bytes);
        let _ = ObjectDatagram::decode(bytes.clone().into());
        let mut decoder = FetchDecoder::new(Draft::NEWEST, GroupOrder::Descending);
        let mut input = &bytes[..];
        while let Ok(Some(_)) = decoder.decode(&mut input) {}
    }

    #[test]
    fn fetch_response_round_trips_however_it_is_divided(
        draft in prop::sample::select(&Draft::ALL[..]),
        descending: bool,
        steps in vec(a_step(), 0..12),
        pieces in vec(1..9usize, 0..60),
    ) {
        let order = if descending { GroupOrder::Descending } else { GroupOrder::Ascending };
        let expected = items(order, steps);
        let mut encoder = FetchEncoder::new(draft, order);
        let mut stream = Vec::new();
        for item in &expected {
            encoder.encode(item, &mut stream);
            if let FetchItem::Object(object) = item {
                stream.resize(stream.len() + object.payload_len as usize, 0xaa);
            }
        }
        let mut parser = FetchParser::new(draft, order, 0);
        let mut found = Vec::new();
        let mut rest = &stream[..];
        let mut sizes = pieces.into_iter();
        while !rest.is_empty() {
            let (mut piece, behind) = rest.split_at(sizes.next().unwrap_or(usize::MAX).clamp(1, rest.len()));
            rest = behind;
            while let Some(start) = parser.next(&mut piece).unwrap() {
                prop_assert!(start.start < start.payload);
                found.push(start.item);
            }
        }
        let expected: Vec<_> = expected.into_iter().map(|item| as_said(draft, item)).collect();
        prop_assert_eq!(found, expected);
        prop_assert!(parser.at_boundary());
    }
}

/// Returns `item` as a receiver decodes it in `draft`. Drafts before 20 encode a range that timed out as unknown.
fn as_said(draft: Draft, item: FetchItem) -> FetchItem {
    match item {
        FetchItem::Range { last, end: RangeEnd::TimedOut } if draft < Draft::D20 => {
            FetchItem::Range { last, end: RangeEnd::Unknown }
        }
        item => item,
    }
}

#[test]
fn range_that_timed_out_is_encoded_from_draft_20_on() {
    let range = FetchItem::Range { last: Location::new(1, 1), end: RangeEnd::TimedOut };
    for draft in Draft::ALL {
        let mut out = Vec::new();
        FetchEncoder::new(draft, GroupOrder::Ascending).encode(&range, &mut out);
        let is_known = draft >= Draft::D20;
        assert_eq!(out, if is_known { [0x82, 0x0c, 1, 1] } else { [0x81, 0x0c, 1, 1] }, "{draft}");
        let read = FetchDecoder::new(draft, GroupOrder::Ascending).decode(&mut &[0x82, 0x0c, 1, 1][..]);
        assert_eq!(read.is_ok(), is_known, "{draft}");
    }
}
