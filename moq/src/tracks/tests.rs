//! Tests of tracks, the cache, views and FETCH responses together.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use bytes::Bytes;
use millrace_quic::plane::{
    downstream::{AskedRange, Config, Downstream, EventKind, Label, NewStream, PeerLimits, Priority},
    source::{Source, SourceEnd, SourceExtent},
};
use proptest::prelude::*;

use super::{
    RESET_CODES,
    account::{Account, CacheShare},
    cache::{CacheLimits, TrackCache},
    fetch::{FetchEntry, FetchResponse, FetchWalk, Readiness, WalkStep, readiness},
    subgroup::{SubgroupReceiver, SubgroupStream},
    track::{CachedDatagram, Duplicate, SUBGROUP_COST, Track},
    view::SubgroupView,
};
use crate::{
    Draft, FetchItem, GroupOrder, Location, Namespace, ObjectDatagram, ObjectParser, Properties, Status,
    StreamHeader, SubgroupHeader, SubgroupId, TrackName, code,
    data::{FetchParser, RangeEnd, encode_object_header},
    property::TrackProperties,
};

fn header(group: u64, subgroup: SubgroupId) -> SubgroupHeader {
    SubgroupHeader {
        alias: 5,
        group,
        subgroup,
        priority: Some(3),
        properties: true,
        end_of_group: true,
        first_object: true,
    }
}

fn track() -> Arc<Track> {
    let namespace = Namespace::from_path("live/cam").unwrap();
    Arc::new(Track::new(TrackName::new(namespace, "video").unwrap()))
}

/// Returns the encoded objects with these IDs. The payload of object N is the byte N mod 256, `len` times.
fn objects(ids: impl IntoIterator<Item = u64>, len: usize) -> Vec<u8> {
    let mut out = Vec::new();
    let mut previous = None;
    for id in ids {
        encode_object_header(previous, id, Some(&[]), len as u64, Status::Normal, &mut out);
        out.extend(std::iter::repeat_n(id as u8, len));
        previous = Some(id);
    }
    out
}

fn begin(track: &Track, now: Instant, group: u64, subgroup: SubgroupId) -> SubgroupReceiver {
    let header = header(group, subgroup);
    let mut bytes = Vec::new();
    header.encode(&mut bytes);
    let writer = SubgroupStream::begin(header, bytes.len());
    track.add_subgroup(now, Arc::clone(writer.subgroup()), &Arc::default()).unwrap();
    writer
}

fn push(track: &Track, writer: &mut SubgroupReceiver, now: Instant, bytes: &[u8]) {
    let pushed = writer.push(now, bytes, |_| Ok(())).unwrap();
    track.grew(writer.subgroup().header().group, &pushed);
}

fn read_all(source: &dyn Source) -> Vec<u8> {
    let mut out = vec![0; source.extent().len as usize];
    let n = source.read(0, &mut out);
    out.truncate(n);
    out
}

/// Reads a whole subgroup stream. Returns its header, and the ID and payload length of each object.
fn parse_stream(bytes: &[u8]) -> (SubgroupHeader, Vec<(u64, u64)>) {
    let mut rest = bytes;
    let Some(StreamHeader::Subgroup(header)) = StreamHeader::decode(&mut rest).unwrap() else {
        panic!("no subgroup header");
    };
    let mut parser = ObjectParser::new(&header, 0);
    let mut found = Vec::new();
    while let Some(object) = parser.next(&mut rest).unwrap() {
        found.push((object.id, object.payload_len));
    }
    parser.finish().unwrap();
    (header, found)
}

/// Returns the locations of the objects and ranges in a FETCH response, without its header.
fn parse_response(bytes: &[u8], order: GroupOrder) -> Vec<Location> {
    let mut rest = bytes;
    assert_eq!(StreamHeader::decode(&mut rest).unwrap(), Some(StreamHeader::Fetch { request_id: 8 }));
    let mut parser = FetchParser::new(Draft::NEWEST, order, 0);
    let mut found = Vec::new();
    while let Some(start) = parser.next(&mut rest).unwrap() {
        match start.item {
            FetchItem::Object(object) => found.push(object.location),
            FetchItem::Range { last, .. } => panic!("unexpected range up to {last:?}"),
        }
    }
    assert!(parser.at_boundary());
    found
}

#[test]
fn subgroup_sent_to_a_subscriber_differs_only_in_its_track_alias() {
    let track = track();
    let now = Instant::now();
    let mut writer = begin(&track, now, 7, SubgroupId::Explicit(2));
    let raw = objects(0..5, 100);
    push(&track, &mut writer, now, &raw);
    for (alias, shift) in [(9, 0), (127, 0), (128, 1), (u64::MAX, 8)] {
        let view = SubgroupView::whole(Arc::clone(writer.subgroup()), alias);
        let bytes = read_all(&view);
        let (header, found) = parse_stream(&bytes);
        assert_eq!(header, SubgroupHeader { alias, ..*writer.subgroup().header() });
        assert_eq!(found.len(), 5);
        let prefix = writer.subgroup().header_len() + shift;
        assert_eq!(&bytes[prefix..], &raw[..], "alias {alias}");
    }
}

#[test]
fn subscribers_alias_is_encoded_in_as_many_bytes_as_the_publishers() {
    let header = SubgroupHeader { alias: 300, ..header(1, SubgroupId::Zero) };
    let mut original = Vec::new();
    header.encode(&mut original);
    let writer = SubgroupStream::begin(header, original.len());
    let view = SubgroupView::whole(Arc::clone(writer.subgroup()), 4);
    assert_eq!(view.extent().len, original.len() as u64);
}

#[test]
fn subscriber_that_joins_inside_a_subgroup_gets_its_own_header() {
    let track = track();
    let now = Instant::now();
    let mut writer = begin(&track, now, 7, SubgroupId::FirstObject);
    push(&track, &mut writer, now, &objects(4..9, 60));
    let subgroup = writer.subgroup();
    let (object, is_first) = subgroup.first_object_from(6).unwrap();
    assert!(!is_first);
    let view = SubgroupView::from_object(Arc::clone(subgroup), 1, &object);
    let (header, found) = parse_stream(&read_all(&view));
    assert_eq!(header.subgroup, SubgroupId::Explicit(4), "the ID of the first object ever");
    assert!(!header.first_object);
    assert_eq!(found, [(6, 60), (7, 60), (8, 60)]);
}

/// The view (the subgroup as it is sent to one subscriber) is read byte by byte. It must not return bytes beyond its
/// last object. It ends when the next object begins, because only then its last object is known.
#[test]
fn subgroup_view_with_a_last_object_ends_when_a_later_object_begins() {
    let track = track();
    let now = Instant::now();
    let mut writer = begin(&track, now, 7, SubgroupId::Zero);
    let cut = SubgroupView::whole(Arc::clone(writer.subgroup()), 5).up_to(Some(4));
    assert!(cut.is_cut());
    let mut before = cut.extent();
    for byte in objects([0, 2, 6, 7], 20) {
        push(&track, &mut writer, now, &[byte]);
        let extent = cut.extent();
        assert!(
            extent.len >= before.len && (before.end == SourceEnd::Open || extent == before),
            "{extent:?}"
        );
        before = extent;
    }
    assert_eq!(cut.extent().end, SourceEnd::Fin { at: now });
    assert_eq!(parse_stream(&read_all(&cut)).1, [(0, 20), (2, 20)]);
    // This view (the subgroup as it is sent to one subscriber) has the same last object as the subgroup, so it ends
    // with the subgroup.
    let all = SubgroupView::whole(Arc::clone(writer.subgroup()), 5).up_to(Some(7));
    assert_eq!(all.extent().end, SourceEnd::Open);
    writer.finish(now).unwrap();
    assert_eq!(parse_stream(&read_all(&all)).1.len(), 4);
    assert_eq!(all.extent().end, SourceEnd::Fin { at: now });
}

#[test]
fn bytes_and_fin_of_an_open_subgroup_become_visible_to_subscribers() {
    let track = track();
    let now = Instant::now();
    let mut writer = begin(&track, now, 0, SubgroupId::Zero);
    let view = SubgroupView::whole(Arc::clone(writer.subgroup()), 5);
    let raw = objects(0..2, 10);
    push(&track, &mut writer, now, &raw[..7]);
    let early = view.extent();
    assert_eq!(early.end, SourceEnd::Open);
    push(&track, &mut writer, now, &raw[7..]);
    assert_eq!(view.extent().len, early.len + raw.len() as u64 - 7);
    let later = now + Duration::from_secs(1);
    let subgroup = Arc::clone(writer.subgroup());
    writer.finish(later).unwrap();
    assert_eq!(subgroup.extent(), SourceExtent { len: raw.len() as u64, end: SourceEnd::Fin { at: later } });
}

#[test]
fn dropped_subgroup_writer_leaves_a_reset() {
    let track = track();
    let now = Instant::now();
    let writer = begin(&track, now, 0, SubgroupId::Zero);
    let subgroup = Arc::clone(writer.subgroup());
    drop(writer);
    assert_eq!(subgroup.extent().end, SourceEnd::Reset(code::Reset::INTERNAL_ERROR.0));
}

#[test]
fn fin_inside_an_object_is_an_error_and_resets_the_subgroup() {
    let track = track();
    let now = Instant::now();
    let mut writer = begin(&track, now, 0, SubgroupId::Zero);
    push(&track, &mut writer, now, &objects(0..1, 10)[..5]);
    let subgroup = Arc::clone(writer.subgroup());
    assert!(writer.finish(now).is_err());
    assert!(matches!(subgroup.extent().end, SourceEnd::Reset(_)));
}

#[test]
fn memory_of_an_incomplete_object_header_is_counted() {
    let track = track();
    let now = Instant::now();
    let mut writer = begin(&track, now, 0, SubgroupId::Zero);
    let mut raw = Vec::new();
    encode_object_header(None, 0, Some(&[7; 5000]), 10, Status::Normal, &mut raw);
    let first = writer.push(now, &raw[..4000], |_| Ok(())).unwrap();
    assert_eq!(writer.incomplete(), 4000);
    let second = writer.push(now, &raw[4000..], |_| Ok(())).unwrap();
    assert_eq!((second.objects, writer.incomplete()), (1, 0));
    assert!(first.cost + second.cost >= raw.len() + 5000, "the bytes, and the properties once more");
}

#[test]
fn arrival_time_of_a_stream_offset_is_that_of_the_object_there() {
    let track = track();
    let now = Instant::now();
    let mut writer = begin(&track, now, 0, SubgroupId::Zero);
    let raw = objects(0..2, 50);
    let half = raw.len() / 2;
    push(&track, &mut writer, now, &raw[..half]);
    let later = now + Duration::from_millis(7);
    push(&track, &mut writer, later, &raw[half..]);
    let view = SubgroupView::whole(Arc::clone(writer.subgroup()), 5);
    let header = writer.subgroup().header_len() as u64;
    assert_eq!(view.received_at(header + 1), Some(now));
    assert_eq!(view.received_at(header + half as u64), Some(later));
}

#[test]
fn views_of_an_evicted_subgroup_return_no_bytes() {
    let track = track();
    let now = Instant::now();
    let mut writer = begin(&track, now, 3, SubgroupId::Zero);
    push(&track, &mut writer, now, &objects(0..4, 100));
    let view = SubgroupView::whole(Arc::clone(writer.subgroup()), 5);
    let header = writer.subgroup().header_len() as u64;
    assert!(track.evict(3) > 400);
    assert_eq!(view.read(header, &mut [0; 16]), 0);
    assert!(track.group(3).is_none());
    assert_eq!(track.known_from(), Some(Location::new(4, 0)));
    // The group was evicted. The publisher's stream of the group may continue, but its bytes are dropped.
    let pushed = writer.push(now, &objects([9], 10), |_| Ok(())).unwrap();
    assert_eq!(pushed.cost, 0);
}

/// Opens a stream over `view`, polls it for the first time after `age`, and returns the stream's last event.
fn fate(view: SubgroupView, now: Instant, age: Duration) -> Option<EventKind> {
    let peer =
        PeerLimits { max_data: 1000, max_stream_data_uni: 1000, max_streams_uni: 5, ..PeerLimits::default() };
    let mut down = Downstream::new(Config::new(RESET_CODES), peer, now);
    let key = down.open(NewStream {
        source: Arc::new(view),
        priority: Priority::default(),
        owner: 0,
        object_timeout: Some(Duration::from_millis(100)),
        subgroup_timeout: None,
        max_delay: None,
        asked: AskedRange::Nothing,
        label: Label::default(),
    });
    down.wake(key);
    down.poll_frames(now + age, 500, &mut Vec::new());
    std::iter::from_fn(|| down.poll_event()).last().map(|event| event.kind)
}

#[test]
fn late_and_evicted_streams_are_reset_with_the_drafts_codes() {
    let track = track();
    let now = Instant::now();
    let mut writer = begin(&track, now, 3, SubgroupId::Zero);
    push(&track, &mut writer, now, &objects(0..1, 50));
    let view =
        || SubgroupView::from_object(Arc::clone(writer.subgroup()), 5, &writer.subgroup().objects()[0]);
    let early = view();
    let late = view();
    let evicted = view();
    assert_eq!(fate(early, now, Duration::from_millis(90)), Some(EventKind::Opened));
    let reset = |code: code::Reset| Some(EventKind::Reset(code.0));
    assert_eq!(fate(late, now, Duration::from_millis(110)), reset(code::Reset::DELIVERY_TIMEOUT));
    track.evict(3);
    assert_eq!(fate(evicted, now, Duration::ZERO), reset(code::Reset::TOO_FAR_BEHIND));
}

#[test]
fn second_copy_of_a_subgroup_is_refused_unless_the_first_was_reset() {
    let track = track();
    let now = Instant::now();
    let first = begin(&track, now, 3, SubgroupId::Explicit(1));
    let copy = SubgroupStream::begin(header(3, SubgroupId::Explicit(1)), 5);
    assert_eq!(
        track.add_subgroup(now, Arc::clone(copy.subgroup()), &Arc::default()),
        Err(Duplicate::Arriving)
    );
    let other = SubgroupStream::begin(header(3, SubgroupId::Explicit(2)), 5);
    assert_eq!(track.add_subgroup(now, Arc::clone(other.subgroup()), &Arc::default()), Ok(false));
    first.reset(code::Reset::CANCELLED);
    let again = SubgroupStream::begin(header(3, SubgroupId::Explicit(1)), 5);
    assert_eq!(track.add_subgroup(now, Arc::clone(again.subgroup()), &Arc::default()), Ok(false));
    again.finish(now).unwrap();
    assert_eq!(
        track.add_subgroup(now, Arc::clone(copy.subgroup()), &Arc::default()),
        Err(Duplicate::Subgroup)
    );
}

#[test]
fn subgroup_cut_off_between_objects_ends_with_fin_and_otherwise_reset() {
    let track = track();
    let now = Instant::now();
    let whole = objects(0..2, 50);
    let fin = SourceEnd::Fin { at: now };
    let reset = SourceEnd::Reset(code::Reset::CANCELLED.0);
    let table = [
        ("whole objects", false, &whole[..], fin),
        ("inside an object", false, &whole[..whole.len() - 1], reset),
        ("nothing", false, &[][..], reset),
        ("said to end with its group", true, &whole[..], reset),
    ];
    for (what, end_of_group, bytes, end) in table {
        let header = SubgroupHeader { end_of_group, ..header(3, SubgroupId::Zero) };
        let mut writer = SubgroupStream::begin(header, 5);
        push(&track, &mut writer, now, bytes);
        let subgroup = Arc::clone(writer.subgroup());
        subgroup.conclude(now);
        let len = bytes.len() as u64;
        assert_eq!(subgroup.extent(), SourceExtent { len, end }, "{what}");
        // Bytes or a FIN that arrive after the subgroup was ended early have no effect.
        push(&track, &mut writer, now, &whole[..1]);
        writer.reset(code::Reset::INTERNAL_ERROR);
        assert_eq!(subgroup.extent(), SourceExtent { len, end }, "{what}");
    }
}

#[test]
fn first_missing_object_is_behind_the_groups_that_have_ended() {
    let now = Instant::now();
    let track = track();
    let behind = Location::new(9, 0);
    let mut ended = begin(&track, now, 5, SubgroupId::Zero);
    push(&track, &mut ended, now, &objects(0..3, 10));
    let from = Location::new(5, 3);
    assert_eq!(track.first_missing(from, behind), Some(from), "the group has not ended");
    ended.finish(now).unwrap();
    assert_eq!(track.first_missing(from, behind), Some(Location::new(6, 0)));
    assert_eq!(track.first_missing(from, Location::new(6, 0)), None);
    let mut next = begin(&track, now, 6, SubgroupId::Zero);
    push(&track, &mut next, now, &objects(0..2, 10)[..15]);
    assert_eq!(track.first_missing(from, behind), Some(Location::new(6, 1)), "object 1 is incomplete");
    assert!(track.has(Location::new(6, 0)) && !track.has(Location::new(6, 1)));
}

#[test]
fn cache_does_not_answer_for_a_gap_until_it_is_bridged() {
    let now = Instant::now();
    let track = track();
    for group in [5, 9] {
        let mut writer = begin(&track, now, group, SubgroupId::Zero);
        push(&track, &mut writer, now, &objects(0..1, 10));
        writer.finish(now).unwrap();
        if group == 5 {
            track.missed_before(None);
        }
    }
    let old = Location::new(5, 0);
    let new = Location::new(9, 0);
    assert_eq!(track.known_from(), Some(new));
    track.missed_before(Some(Location::new(8, 0)));
    assert_eq!(track.known_from(), Some(new));
    track.bridged(old);
    assert_eq!(track.known_from(), Some(old));
    track.evict(5);
    track.bridged(old);
    assert_eq!(track.known_from(), Some(Location::new(6, 0)), "group 5 is not cached any more");
}

#[test]
fn subgroup_of_an_already_evicted_group_is_refused() {
    let track = track();
    let now = Instant::now();
    for group in 3..6 {
        let mut writer = begin(&track, now, group, SubgroupId::Zero);
        push(&track, &mut writer, now, &objects(0..1, 10));
    }
    track.evict(3);
    let late = SubgroupStream::begin(header(3, SubgroupId::Zero), 5);
    assert_eq!(
        track.add_subgroup(now, Arc::clone(late.subgroup()), &Arc::default()),
        Err(Duplicate::Expired)
    );
}

fn datagram(group: u64, object: u64, now: Instant) -> CachedDatagram {
    let datagram = ObjectDatagram {
        alias: 5,
        group,
        object,
        priority: None,
        end_of_group: false,
        properties: Bytes::new(),
        status: None,
        payload: Bytes::from_static(b"datagram"),
    };
    CachedDatagram { datagram, received_at: now }
}

/// The test checks by its running time that the work per datagram is bounded. If each datagram caused a scan of its
/// group, the test would take minutes.
#[test]
fn group_stores_each_of_many_datagrams_once() {
    const COUNT: u64 = 200_000;
    let track = track();
    let now = Instant::now();
    for object in (0..COUNT).rev() {
        assert_eq!(
            track.add_datagram(datagram(1, object, now), &Arc::default()).map(|(_, fresh)| fresh),
            Ok(object + 1 == COUNT)
        );
    }
    for object in 0..COUNT {
        assert_eq!(
            track.add_datagram(datagram(1, object, now), &Arc::default()).map(|_| ()),
            Err(Duplicate::Datagram)
        );
    }
    assert_eq!(track.held().objects as u64, COUNT);
}

/// Groups that follow later than 100 ms after another one are not awaited.
fn late_since(now: Instant) -> Option<Instant> {
    now.checked_sub(Duration::from_millis(100))
}

/// Iterates over a range, a few objects at a time. Returns all items, and the ranges that the cache does not cover.
fn walk(
    track: &Track,
    first: Location,
    last: Location,
    order: GroupOrder,
    now: Instant,
    max: usize,
) -> (Vec<FetchEntry>, Vec<(Location, Location)>) {
    let mut objects = Vec::new();
    let mut missing = Vec::new();
    let mut walk = FetchWalk::new(first, last, order);
    loop {
        match walk.next(track, now, late_since(now), max) {
            WalkStep::Objects(some) => {
                let is_object = |entry: &&FetchEntry| matches!(entry.item, FetchItem::Object(_));
                assert!(some.iter().filter(is_object).count() <= max);
                objects.extend(some);
            }
            WalkStep::Missing(from, to) => missing.push((from, to)),
            WalkStep::Done => return (objects, missing),
        }
    }
}

fn response(order: GroupOrder) -> FetchResponse {
    FetchResponse::new(&[], 8, Draft::NEWEST, order, || {})
}

#[test]
fn fetch_merges_subgroups_and_datagrams_by_object() {
    let track = track();
    let now = Instant::now();
    let mut even = begin(&track, now, 1, SubgroupId::Explicit(0));
    let mut odd = begin(&track, now, 1, SubgroupId::Explicit(1));
    push(&track, &mut even, now, &objects([0, 2, 4], 30));
    push(&track, &mut odd, now, &objects([1, 5], 40));
    even.finish(now).unwrap();
    odd.finish(now).unwrap();
    track.add_datagram(datagram(1, 3, now), &Arc::default()).unwrap();
    let mut next = begin(&track, now, 2, SubgroupId::Zero);
    push(&track, &mut next, now, &objects(0..2, 20));
    let expected: [&[(u64, u64)]; 2] = [
        &[(1, 0), (1, 1), (1, 2), (1, 3), (1, 4), (1, 5), (2, 0), (2, 1)],
        &[(2, 0), (2, 1), (1, 0), (1, 1), (1, 2), (1, 3), (1, 4), (1, 5)],
    ];
    for (order, expected) in [GroupOrder::Ascending, GroupOrder::Descending].into_iter().zip(expected) {
        for max in [1, 2, 3, 100] {
            let range = (Location::new(1, 0), Location::new(2, 1));
            let (objects, missing) = walk(&track, range.0, range.1, order, now, max);
            assert_eq!(missing, []);
            let response = response(order);
            objects.into_iter().for_each(|entry| response.push(entry));
            response.finish(now);
            let found = parse_response(&read_all(&response), order);
            let expected: Vec<_> = expected.iter().map(|(g, o)| Location::new(*g, *o)).collect();
            assert_eq!(found, expected, "{max} at a time");
        }
    }
}

#[test]
fn fetch_response_keeps_objects_until_they_are_acknowledged() {
    let track = track();
    let now = Instant::now();
    let mut writer = begin(&track, now, 1, SubgroupId::Zero);
    push(&track, &mut writer, now, &objects(0..50, 1000));
    let response = response(GroupOrder::Ascending);
    let (objects, _) = walk(&track, Location::new(1, 0), Location::new(1, 49), GroupOrder::Ascending, now, 8);
    objects.into_iter().for_each(|entry| response.push(entry));
    assert!(response.held() < 50 * 300, "payloads are the cache's");
    let whole = read_all(&response);
    response.push_payload(Bytes::from_static(&[7; 5000]));
    assert!(response.held() > 5000);
    let half = whole.len() as u64 / 2;
    let before = response.held();
    let mut rest = vec![0; 2 * whole.len()];
    response.acknowledged(half);
    assert!(response.held() < before);
    // Bytes of the response that the peer has not acknowledged can still be read.
    let n = response.read(half, &mut rest);
    assert_eq!(rest[..whole.len() - half as usize], whole[half as usize..]);
    assert_eq!(n as u64, response.extent().len - half);
    response.acknowledged(response.extent().len);
    assert_eq!(response.held(), 0);
}

#[test]
fn fetch_waits_for_a_partial_object_and_skips_uncached_ones() {
    let track = track();
    let now = Instant::now();
    let mut writer = begin(&track, now, 5, SubgroupId::Zero);
    let raw = objects(2..4, 30);
    push(&track, &mut writer, now, &raw[..raw.len() - 1]);
    let range = (Location::new(1, 0), Location::new(6, 0));
    // The first objects of group 5 were not received, so the range in which all objects are known starts with group 6.
    assert_eq!(track.known_from(), Some(Location::new(6, 0)));
    let mut six = begin(&track, now, 6, SubgroupId::Zero);
    let raw = objects(0..1, 30);
    push(&track, &mut six, now, &raw[..10]);
    assert_eq!(readiness(&track, range.0, range.1, late_since(now)), Readiness::Unfinished);
    push(&track, &mut six, now, &raw[10..]);
    assert_eq!(readiness(&track, range.0, range.1, late_since(now)), Readiness::Ready);
    for order in [GroupOrder::Ascending, GroupOrder::Descending] {
        let (objects, missing) = walk(&track, range.0, range.1, order, now, 10);
        assert_eq!(
            (objects.len(), &missing[..]),
            (1, &[(range.0, Location::new(5, u64::MAX))][..]),
            "{order:?}"
        );
    }
}

#[test]
fn fetch_range_has_gaps_while_the_subgroups_of_its_group_are_unfinished() {
    let track = track();
    let now = Instant::now();
    let mut urgent = begin(&track, now, 1, SubgroupId::Explicit(0));
    let mut later = begin(&track, now, 1, SubgroupId::Explicit(1));
    push(&track, &mut urgent, now, &objects([0, 2, 4], 30));
    push(&track, &mut later, now, &objects([1], 30));
    let readiness_to = |last| readiness(&track, Location::new(1, 0), Location::new(1, last), late_since(now));
    let count_to = |last| {
        let range = (Location::new(1, 0), Location::new(1, last));
        walk(&track, range.0, range.1, GroupOrder::Ascending, now, 2).0.len()
    };
    assert_eq!((readiness_to(4), count_to(4)), (Readiness::Gaps, 4));
    assert_eq!((readiness_to(2), count_to(2)), (Readiness::Ready, 3));
    urgent.finish(now).unwrap();
    later.finish(now).unwrap();
    assert_eq!((readiness_to(4), count_to(4)), (Readiness::Ready, 4));
}

/// Returns the locations of a response's items, and whether each is a range that did not arrive in time.
fn items(objects: &[FetchEntry]) -> Vec<(u64, u64, bool)> {
    let item = |entry: &FetchEntry| match &entry.item {
        FetchItem::Object(object) => (object.location.group, object.location.object, false),
        FetchItem::Range { last, end } => (last.group, last.object, *end == RangeEnd::TimedOut),
    };
    objects.iter().map(item).collect()
}

#[test]
fn fetch_says_which_objects_of_earlier_groups_may_still_arrive() {
    const END: u64 = u64::MAX;
    let track = track();
    let now = Instant::now();
    let mut first = begin(&track, now, 1, SubgroupId::Zero);
    push(&track, &mut first, now, &objects(0..2, 30));
    // Group 2 has not begun.
    for group in 3..5 {
        let mut writer = begin(&track, now, group, SubgroupId::Zero);
        push(&track, &mut writer, now, &objects(0..1, 30));
        writer.finish(now).unwrap();
    }
    let to = |first: (u64, u64), last: (u64, u64), now| {
        let [first, last] = [first, last].map(|(group, object)| Location::new(group, object));
        let (objects, missing) = walk(&track, first, last, GroupOrder::Ascending, now, 10);
        assert_eq!(missing, []);
        (readiness(&track, first, last, late_since(now)), items(&objects))
    };
    let rest_of_1 = (1, END, true);
    let late_2 = (2, END, true);
    let of_1 = [(1, 0, false), (1, 1, false)];
    let gaps = Readiness::Gaps;
    let ready = Readiness::Ready;
    assert_eq!(to((1, 0), (1, 1), now), (ready, of_1.to_vec()));
    assert_eq!(to((1, 0), (1, END), now), (gaps, vec![of_1[0], of_1[1], rest_of_1]));
    assert_eq!(to((1, 1), (3, 0), now), (gaps, vec![of_1[1], rest_of_1, late_2, (3, 0, false)]));
    assert_eq!(to((2, 3), (2, 9), now), (gaps, vec![(2, 9, true)]));
    assert_eq!(to((3, 0), (4, 0), now), (ready, vec![(3, 0, false), (4, 0, false)]));
    first.finish(now).unwrap();
    let later = now + Duration::from_millis(100);
    assert_eq!(to((1, 1), (3, 0), now), (gaps, vec![of_1[1], late_2, (3, 0, false)]));
    assert_eq!(to((1, 1), (3, 0), later), (ready, vec![of_1[1], (3, 0, false)]));
}

#[test]
fn group_with_a_reset_subgroup_is_not_served_as_complete() {
    let track = track();
    let now = Instant::now();
    for group in 1..4 {
        let mut writer = begin(&track, now, group, SubgroupId::Zero);
        push(&track, &mut writer, now, &objects(0..2, 10));
        match group {
            2 => writer.reset(code::Reset::DELIVERY_TIMEOUT),
            _ => writer.finish(now).unwrap(),
        }
    }
    assert_eq!(track.known_from(), Some(Location::new(3, 0)));
}

#[test]
fn max_cache_duration_hides_old_objects() {
    let track = track();
    let now = Instant::now();
    let properties = TrackProperties { max_cache_duration: Some(100), ..TrackProperties::default() };
    assert_eq!(track.set_properties(properties.encode()).unwrap(), None);
    let mut writer = begin(&track, now, 1, SubgroupId::Zero);
    push(&track, &mut writer, now, &objects(0..2, 10));
    writer.finish(now).unwrap();
    let range = (Location::new(1, 0), Location::new(1, 9));
    for (later, count) in [(50, 2), (150, 0)] {
        let later = now + Duration::from_millis(later);
        assert_eq!(walk(&track, range.0, range.1, GroupOrder::Ascending, later, 10).0.len(), count);
    }
}

#[test]
fn client_over_its_cache_limit_loses_oldest_groups_of_largest_publisher() {
    const BYTES: usize = 10_000;
    let now = Instant::now();
    let cache = TrackCache::new(CacheLimits { bytes: 1 << 30, age: Duration::from_secs(60) });
    let shares = [Arc::new(CacheShare::new(5 * BYTES, None)), Arc::new(CacheShare::new(1 << 30, None))];
    let publish = |track: &Arc<Track>, account: &Arc<Account>, group: u64, len: usize| {
        let mut writer = SubgroupStream::begin(header(group, SubgroupId::Zero), 5);
        track.add_subgroup(now, Arc::clone(writer.subgroup()), account).unwrap();
        cache.began(now, &Arc::downgrade(track), group, account);
        cache.grew(SUBGROUP_COST);
        let pushed = writer.push(now, &objects(0..1, len), |_| Ok(())).unwrap();
        track.grew(group, &pushed);
        cache.grew(pushed.cost);
        writer.finish(now).unwrap();
    };
    // One client has two publishers, of which the second has little data. Another client has one publisher.
    let tracks: Vec<_> = (0..3).map(|_| track()).collect();
    let of = |share: &Arc<CacheShare>| Arc::new(Account::from_share(Arc::clone(share)));
    let accounts = [of(&shares[0]), of(&shares[0]), of(&shares[1])];
    let groups = |at: usize| tracks[at].groups(0, 99).iter().map(|(id, _)| *id).collect::<Vec<_>>();
    publish(&tracks[1], &accounts[1], 0, BYTES);
    for group in 0..10 {
        publish(&tracks[0], &accounts[0], group, BYTES);
        publish(&tracks[2], &accounts[2], group, BYTES);
    }
    cache.expire(now);
    assert_eq!(groups(0), [7, 8, 9]);
    assert_eq!(groups(1), [0]);
    assert_eq!(groups(2), (0..10).collect::<Vec<_>>());
    assert!(shares[0].bytes() <= 5 * BYTES);
    let usage = cache.usage();
    assert_eq!((usage.over_share, usage.evicted), (7, 7));
    // A group that is larger than the client's whole share of the cache memory is dropped as well.
    publish(&tracks[1], &accounts[1], 1, 6 * BYTES);
    cache.expire(now);
    assert!(shares[0].bytes() <= 5 * BYTES);
    tracks.iter().for_each(|track| cache.forget(track));
    assert_eq!((shares[0].bytes(), shares[1].bytes(), cache.usage().bytes), (0, 0, 0));
}

fn one_object(track: &Track, group: u64, now: Instant) {
    let mut writer = begin(track, now, group, SubgroupId::Zero);
    push(track, &mut writer, now, &objects(0..1, 10));
    writer.finish(now).unwrap();
}

#[test]
fn object_with_a_far_larger_group_id_is_largest_until_the_track_continues() {
    let track = track();
    let now = Instant::now();
    let largest = || track.largest().unwrap().group;
    for group in [7, u64::MAX] {
        one_object(&track, group, now);
        assert_eq!(largest(), group, "the largest group that arrived");
    }
    assert!(track.is_newest(u64::MAX) && !track.is_newest(7));
    for (group, expected) in [(8, u64::MAX), (9, 9), (10, 10), (11, 11)] {
        one_object(&track, group, now);
        assert_eq!(largest(), expected, "after group {group}");
    }
    assert!(track.is_newest(11) && !track.is_newest(u64::MAX));
    // One object had a far too large group ID by mistake. Dropping its group does not affect the other groups.
    track.evict(u64::MAX);
    assert_eq!(track.known_from(), Some(Location::new(7, 0)));
    one_object(&track, 12, now);
    assert_eq!(largest(), 12);
    // Many objects of one group, like a few objects of two groups, prove that the far larger group ID was a mistake.
    one_object(&track, 1 << 40, now);
    let mut writer = begin(&track, now, 13, SubgroupId::Zero);
    push(&track, &mut writer, now, &objects(0..1, 10));
    let rest = objects(1..40, 10);
    push(&track, &mut writer, now, &objects(0..1, 10));
    assert_eq!(largest(), 1 << 40);
    rest.chunks(12).for_each(|bytes| push(&track, &mut writer, now, bytes));
    assert_eq!(largest(), 13);
}

#[test]
fn first_group_with_a_far_larger_id_does_not_stay_the_largest() {
    let track = track();
    let now = Instant::now();
    for group in [u64::MAX, 3, 4, 5] {
        one_object(&track, group, now);
    }
    assert_eq!(track.largest(), Some(Location::new(5, 0)));
    assert_eq!(track.known_from(), Some(Location::new(4, 0)));
    // The publisher continues with higher group IDs, while late groups with lower IDs still arrive.
    for group in [1000, 6, 1001, 7, 1002, 8, 1003] {
        one_object(&track, group, now);
        assert_eq!(track.largest().unwrap().group, if group < 1000 { 994 + group } else { group });
    }
}

#[test]
fn largest_location_claimed_by_a_publisher_counts_until_objects_arrive() {
    let track = track();
    let now = Instant::now();
    let claim = Location::new(7, 2);
    let end = Location::new(u64::MAX, u64::MAX);
    track.saw_largest(claim);
    assert_eq!(track.largest(), Some(claim), "all that is known");
    let mut writer = begin(&track, now, 7, SubgroupId::Zero);
    push(&track, &mut writer, now, &objects(0..2, 10));
    assert_eq!(
        (track.largest(), track.claimed()),
        (Some(Location::new(7, 1)), Some(claim)),
        "it is on its way"
    );
    let mut other = begin(&track, now, 7, SubgroupId::Explicit(1));
    push(&track, &mut other, now, &objects(3..5, 10));
    assert_eq!((track.largest(), track.claimed()), (Some(Location::new(7, 4)), None));
    // Another publisher, or the same one later, reports the largest possible location.
    track.saw_largest(end);
    assert_eq!(track.largest(), Some(Location::new(7, 4)));
    // The subscription ended and was established again, so objects may have been missed.
    track.missed();
    track.saw_largest(Location::new(9, 0));
    assert_eq!(track.largest(), Some(Location::new(9, 0)));
    track.add_datagram(datagram(9, 1, now), &Arc::default()).unwrap();
    assert_eq!(track.largest(), Some(Location::new(9, 1)));
}

#[test]
fn track_keeps_the_properties_of_its_first_publisher() {
    let track = track();
    let of = |priority| TrackProperties { publisher_priority: Some(priority), ..Default::default() }.encode();
    track.set_properties(of(9)).unwrap();
    track.set_properties(of(77)).unwrap();
    assert_eq!(track.default_priority(), 9);
    assert_eq!(track.properties(), of(9));
    assert_eq!(track.set_properties(Properties::default()).unwrap(), None);
}

/// Adds a group with one subgroup to a track and to the cache, as the relay does.
fn add_group(
    cache: &TrackCache,
    account: &Arc<Account>,
    track: &Arc<Track>,
    now: Instant,
    group: u64,
    bytes: usize,
) {
    let mut writer = SubgroupStream::begin(header(group, SubgroupId::Zero), 5);
    if track.add_subgroup(now, Arc::clone(writer.subgroup()), account).unwrap() {
        cache.began(now, &Arc::downgrade(track), group, account);
    }
    cache.grew(SUBGROUP_COST);
    let pushed = writer.push(now, &objects(0..1, bytes), |_| Ok(())).unwrap();
    if track.grew(group, &pushed) {
        cache.grew(pushed.cost);
    }
    writer.finish(now).unwrap();
}

fn held(track: &Track) -> Vec<u64> {
    track.groups(0, u64::MAX).iter().map(|(id, _)| *id).collect()
}

/// One publisher has a few groups, while another uses as much memory as it can get.
#[test]
fn publisher_with_most_cached_bytes_loses_groups_first() {
    let cache = TrackCache::new(CacheLimits { bytes: 100_000, age: Duration::from_secs(60) });
    let modest = Arc::default();
    let greedy = Arc::default();
    let victim = track();
    let now = Instant::now();
    for group in 0..3 {
        add_group(&cache, &modest, &victim, now, group, 2_000);
    }
    let before = Account::bytes(&modest);
    // Many old groups of one track must not evict the groups of the first publisher. Neither must many tracks with only
    // one group each, which is their newest.
    let one = track();
    for group in 0..100 {
        add_group(&cache, &greedy, &one, now, group, 4_000);
    }
    assert_eq!((held(&victim), held(&one).last()), (vec![0, 1, 2], Some(&99)));
    let many: Vec<_> = (0..100).map(|_| track()).collect();
    for track in &many {
        add_group(&cache, &greedy, track, now, 0, 4_000);
    }
    assert_eq!(held(&victim), [0, 1, 2]);
    assert_eq!(modest.bytes(), before);
    let held: usize = many.iter().chain([&one, &victim]).map(|track| track.held().bytes).sum();
    assert_eq!((cache.usage().bytes, modest.bytes() + greedy.bytes()), (held, held));
    assert!(held <= 100_000);
}

#[test]
fn newest_group_of_a_track_is_evicted_last() {
    let cache = TrackCache::new(CacheLimits { bytes: 100_000, age: Duration::from_secs(60) });
    let one = Arc::default();
    let other = Arc::default();
    let live = track();
    let still = track();
    let now = Instant::now();
    add_group(&cache, &one, &still, now, 0, 60_000);
    for group in 0..40 {
        add_group(&cache, &other, &live, now, group, 9_000);
        assert_eq!(held(&still), [0], "group {group}");
        assert_eq!(held(&live).last(), Some(&group));
    }
}

#[test]
fn cache_drops_oldest_group_of_all_tracks_first() {
    let cache = TrackCache::new(CacheLimits { bytes: 40_000, age: Duration::from_secs(60) });
    let one = track();
    let other = track();
    let now = Instant::now();
    let account = Arc::default();
    for group in 0..20 {
        let track = if group % 2 == 0 { &one } else { &other };
        add_group(&cache, &account, track, now, group, 4_000);
        assert!(cache.usage().bytes <= 40_000);
    }
    let held: Vec<_> = one.groups(0, 99).iter().map(|(id, _)| *id).collect();
    assert_eq!(held.last(), Some(&18));
    assert!(!held.contains(&0) && held.windows(2).all(|pair| pair[1] == pair[0] + 2));
    let held = one.held().bytes + other.held().bytes;
    assert_eq!(cache.usage().bytes, held, "the cache counts what the tracks hold");
    assert_eq!(cache.usage().evicted as usize + cache.usage().groups, 20);
}

/// Ten seconds of media form one group, and the age limit is ten seconds. A subscriber that lags slightly when the next
/// group begins still needs the end of the old group.
#[test]
fn long_group_expires_by_the_age_of_its_end() {
    let cache = TrackCache::new(CacheLimits { bytes: 1 << 20, age: Duration::from_secs(10) });
    let track = track();
    let now = Instant::now();
    let at = |seconds| now + Duration::from_secs(seconds);
    let account = Arc::default();
    let mut writer = begin(&track, now, 0, SubgroupId::Zero);
    cache.began(now, &Arc::downgrade(&track), 0, &account);
    push(&track, &mut writer, now, &objects(0..1, 10));
    push(&track, &mut writer, at(9), &objects(1..2, 10));
    add_group(&cache, &account, &track, at(11), 1, 100);
    cache.expire(at(11));
    assert!(track.group(0).is_some(), "its last object came two seconds ago");
    writer.finish(at(12)).unwrap();
    cache.expire(at(21));
    assert!(track.group(0).is_some(), "its end came nine seconds ago");
    cache.expire(at(23));
    assert!(track.group(0).is_none() && track.group(1).is_some());
}

#[test]
fn old_group_expires_unless_newest_of_its_track() {
    let cache = TrackCache::new(CacheLimits { bytes: 1 << 20, age: Duration::from_secs(10) });
    let track = track();
    let now = Instant::now();
    let account = Arc::default();
    add_group(&cache, &account, &track, now, 0, 100);
    add_group(&cache, &account, &track, now + Duration::from_secs(5), 1, 100);
    cache.expire(now + Duration::from_secs(12));
    assert!(track.group(0).is_none() && track.group(1).is_some());
    cache.expire(now + Duration::from_secs(100));
    assert!(track.group(1).is_some(), "an init segment has to outlive its age");
    cache.forget(&track);
    assert_eq!((cache.usage().bytes, cache.usage().groups), (0, 0));
}

proptest! {
    /// A subgroup as it is sent to one subscriber (a view) has the same bytes, however these are divided when they
    /// arrive and when they are read.
    #[test]
    fn subgroup_view_does_not_depend_on_how_its_bytes_are_divided(
        count in 1u64..20,
        len in 0usize..300,
        cuts in prop::collection::vec(1usize..200, 1..20),
        reads in prop::collection::vec(1usize..500, 1..20),
        join in 0u64..20,
    ) {
        let track = track();
        let now = Instant::now();
        let mut writer = begin(&track, now, 1, SubgroupId::Explicit(9));
        let raw = objects(0..count, len);
        let mut rest = &raw[..];
        for cut in cuts.iter().cycle() {
            if rest.is_empty() { break }
            let (chunk, behind) = rest.split_at((*cut).min(rest.len()));
            push(&track, &mut writer, now, chunk);
            rest = behind;
        }
        let subgroup = Arc::clone(writer.subgroup());
        let whole = read_all(&SubgroupView::whole(Arc::clone(&subgroup), 5));
        prop_assert_eq!(&whole[subgroup.header_len()..], &raw[..]);
        let Some((object, is_first)) = subgroup.first_object_from(join) else { return Ok(()) };
        prop_assert_eq!(is_first, join == 0);
        let view = SubgroupView::from_object(Arc::clone(&subgroup), 5, &object);
        let mut out = Vec::new();
        for size in reads.iter().cycle() {
            let mut buf = vec![0; *size];
            let n = view.read(out.len() as u64, &mut buf);
            if n == 0 { break }
            out.extend_from_slice(&buf[..n]);
        }
        prop_assert_eq!(out.len() as u64, view.extent().len);
        let (_, found) = parse_stream(&out);
        prop_assert_eq!(found.len() as u64, count - join);
        prop_assert!(out.ends_with(&raw[raw.len() - len..]));
    }
}
