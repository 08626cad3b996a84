use bytes::{Bytes, BytesMut};
use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;

use super::*;
use crate::code::{self, Session};
use crate::param::RangeFilter;
use crate::param::{Assignment, AuthToken, Scope};
use crate::property::TrackProperties;
use crate::{Filter, GroupOrder, HopId, HopPath, Location, Namespace, Parameters, Properties, TrackName};

fn encode(message: impl Into<Message>) -> Vec<u8> {
    encode_in(Draft::D18, message).unwrap()
}

fn encode_in(draft: Draft, message: impl Into<Message>) -> Result<Vec<u8>, EncodeError> {
    let mut out = Vec::new();
    message.into().encode(draft, &mut out).map(|()| out)
}

fn decode(bytes: &[u8]) -> Result<Option<Message>, DecodeError> {
    decode_in(Draft::D18, bytes)
}

fn decode_in(draft: Draft, bytes: &[u8]) -> Result<Option<Message>, DecodeError> {
    Message::decode(draft, &mut BytesMut::from(bytes))
}

fn namespace() -> Namespace {
    Namespace::new(["ns"]).unwrap()
}

fn track() -> TrackName {
    TrackName::new(namespace(), "t").unwrap()
}

/// Messages as an independent draft-18 implementation (moq-rs) encodes them.
#[test]
fn message_bytes_of_other_implementations_are_decoded() {
    let none = Parameters::default;
    let table: [(Message, &[u8]); 13] = [
        (
            Subscribe { request_id: 0, track: track(), parameters: none() }.into(),
            &[0x03, 0, 8, 0, 1, 2, b'n', b's', 1, b't', 0],
        ),
        (
            TrackStatus { request_id: 0, track: track(), parameters: none() }.into(),
            &[0x0d, 0, 8, 0, 1, 2, b'n', b's', 1, b't', 0],
        ),
        (
            Publish {
                request_id: 0,
                track: track(),
                track_alias: 5,
                parameters: none(),
                properties: Properties::default(),
            }
            .into(),
            &[0x1d, 0, 9, 0, 1, 2, b'n', b's', 1, b't', 5, 0],
        ),
        (
            FetchRequest {
                request_id: 0,
                kind: FetchKind::Standalone {
                    track: track(),
                    range: Filter::range(Location::new(0, 0), Location::new(0, 0)),
                },
                parameters: none(),
            }
            .into(),
            &[0x16, 0, 13, 0, 1, 1, 2, b'n', b's', 1, b't', 0, 0, 0, 1, 0],
        ),
        (
            FetchOk {
                end_of_track: false,
                last: Location::new(0, 0),
                parameters: none(),
                properties: Properties::default(),
            }
            .into(),
            &[0x18, 0, 4, 0, 0, 1, 0],
        ),
        (
            SubscribeOk { track_alias: 1, parameters: none(), properties: Properties::default() }.into(),
            &[0x04, 0, 2, 1, 0],
        ),
        (
            SubscribeNamespace { request_id: 0, prefix: Namespace::default(), parameters: none() }.into(),
            &[0x50, 0, 3, 0, 0, 0],
        ),
        (
            SubscribeTracks { request_id: 0, prefix: Namespace::default(), parameters: none() }.into(),
            &[0x51, 0, 3, 0, 0, 0],
        ),
        (
            RequestUpdate {
                request_id: 4,
                parameters: Parameters { subscriber_priority: Some(128), ..none() },
            }
            .into(),
            &[0x02, 0, 4, 4, 1, 0x20, 0x80],
        ),
        (RequestOk::default().into(), &[0x07, 0, 1, 0]),
        (
            PublishDone { code: code::Done::TRACK_ENDED, stream_count: 3, reason: "done".into() }.into(),
            &[0x0b, 0, 7, 2, 3, 4, b'd', b'o', b'n', b'e'],
        ),
        (
            PublishSkipped { suffix: TrackName::new(Namespace::default(), "t").unwrap() }.into(),
            &[0x0f, 0, 3, 0, 1, b't'],
        ),
        (Unsubscribe.into(), &[0x0a, 0, 0]),
    ];
    for (message, bytes) in table {
        assert_eq!(decode(bytes), Ok(Some(message.clone())), "{}", message.name());
        assert_eq!(encode(message), bytes);
    }
}

#[test]
fn publish_ok_of_older_drafts_is_decoded_as_request_ok() {
    assert_eq!(decode(&[0x1e, 0, 1, 0]), Ok(Some(RequestOk::default().into())));
}

#[test]
fn goaway_of_older_drafts_has_no_timeout() {
    let expected = GoAway { uri: "a".into(), timeout: 0, request_id: None };
    assert_eq!(decode(&[0x10, 0, 2, 1, b'a']), Ok(Some(expected.into())));
}

#[test]
fn goaway_has_a_request_id_in_draft_18_only() {
    let named = GoAway { uri: String::new(), timeout: 7, request_id: Some(4) };
    let nameless = GoAway { request_id: None, ..named.clone() };
    for draft in Draft::ALL {
        let (bytes, read): (&[u8], _) = match draft {
            Draft::D18 => (&[0x10, 0, 3, 0, 7, 4], named.clone()),
            _ => (&[0x10, 0, 2, 0, 7], nameless.clone()),
        };
        assert_eq!(encode_in(draft, named.clone()).as_deref(), Ok(bytes), "{draft}");
        assert_eq!(decode_in(draft, bytes), Ok(Some(read.into())), "{draft}");
        assert_eq!(decode_in(draft, &[0x10, 0, 3, 0, 7, 4]).is_ok(), draft == Draft::D18, "{draft}");
        assert_eq!(decode_in(draft, &[0x10, 0, 1, 0]).is_ok(), draft == Draft::D18, "{draft}");
    }
}

/// In draft-20 and later, FETCH is encoded like SUBSCRIBE, and the end of its range is inclusive.
#[test]
fn fetch_messages_are_encoded_for_each_draft() {
    let start = Location::new(3, 1);
    let last = Location::new(5, 6);
    let kind = FetchKind::Standalone { track: track(), range: Filter::range(start, last) };
    let parameters = Parameters { subscriber_priority: Some(9), ..Parameters::default() };
    let fetch = FetchRequest { request_id: 0, kind, parameters };
    let name = [1, 2, b'n', b's', 1, b't'];
    for draft in Draft::ALL {
        let behind: &[u8] = match draft {
            Draft::D18 | Draft::D19 => &[3, 1, 5, 7, 1, 0x20, 9],
            Draft::D20 | Draft::D21 => &[2, 0x20, 9, 1, 4, 3, 1, 2, 6],
            Draft::D22 => &[2, 0x20, 9, 1, 4, 3, 1, 2, 6],
        };
        let kind: &[u8] = if draft.has_fills() { &[0] } else { &[0, 1] };
        let body = [kind, &name, behind].concat();
        let bytes = [&[0x16, 0, body.len() as u8], &body[..]].concat();
        assert_eq!(encode_in(draft, fetch.clone()), Ok(bytes.clone()), "{draft}");
        assert_eq!(decode_in(draft, &bytes), Ok(Some(fetch.clone().into())), "{draft}");

        let ok = FetchOk {
            end_of_track: false,
            last,
            parameters: Parameters::default(),
            properties: Properties::default(),
        };
        let end = if draft.has_inclusive_ends() { 6 } else { 7 };
        let bytes = [0x18, 0, 4, 0, 5, end, 0];
        assert_eq!(encode_in(draft, ok.clone()).as_deref(), Ok(&bytes[..]), "{draft}");
        assert_eq!(decode_in(draft, &bytes), Ok(Some(ok.into())), "{draft}");
    }
    // In drafts 18 and 19, object ID 0 in the end location of FETCH_OK means that the whole group is included.
    let whole = [0x18, 0, 4, 0, 5, 0, 0];
    for (draft, object) in [(Draft::D19, u64::MAX), (Draft::D20, 0)] {
        let Ok(Some(Message::FetchOk(ok))) = decode_in(draft, &whole) else { panic!("not decoded") };
        assert_eq!(ok.last, Location::new(5, object), "{draft}");
    }
}

/// Each row has a message, the part of it that some drafts cannot express, and the drafts that can express it.
#[test]
fn message_that_draft_cannot_express_is_an_error() {
    let of = |filter| Parameters { filter: Some(filter), ..Parameters::default() };
    let subscribe = |parameters| Message::from(Subscribe { request_id: 0, track: track(), parameters });
    let fetch = |kind| Message::from(FetchRequest { request_id: 0, kind, parameters: Parameters::default() });
    let no_properties = Parameters { include_properties: Some(false), ..Parameters::default() };
    let fill = Parameters { fill: Some(Box::default()), ..Parameters::default() };
    let range_filter = RangeFilter { kind: 0x25, value: Bytes::from_static(&[0, 1]) };
    let filtered = Parameters { range_filters: vec![range_filter], ..Parameters::default() };
    let end_object = Filter::range(Location::new(1, 1), Location::new(2, 2));
    let joining = FetchKind::RelativeJoining { subscription: 0, groups_back: 1 };
    let open = FetchKind::Standalone { track: track(), range: Filter::AbsoluteStart(Location::new(1, 1)) };
    let table = [
        (subscribe(of(Filter::Relative(2))), "filter that begins some groups back", 20..=22),
        (subscribe(of(end_object)), "filter that ends within a group", 20..=22),
        (subscribe(no_properties), "INCLUDE_PROPERTIES", 20..=22),
        (subscribe(fill), "FILL_PARAMETERS", 20..=22),
        (subscribe(filtered), "range filters", 19..=22),
        (fetch(open), "FETCH without an end", 20..=22),
        (fetch(joining), "FETCH that joins a subscription", 18..=19),
        (PublishStateNotify { parameters: Parameters::default() }.into(), "PUBLISH_STATE_NOTIFY", 20..=22),
    ];
    for (message, what, known) in table {
        for draft in Draft::ALL {
            let mut out = vec![1];
            let written = message.encode(draft, &mut out);
            if known.contains(&draft.number()) {
                assert_eq!(written, Ok(()), "{what} in {draft}");
                assert_eq!(decode_in(draft, &out[1..]), Ok(Some(message.clone())), "{what} in {draft}");
            } else {
                assert_eq!(written, Err(EncodeError::NotInDraft { draft, what }));
                assert_eq!(out, [1], "nothing is left of it");
            }
        }
    }
}

#[test]
fn message_type_of_another_draft_is_refused() {
    for draft in Draft::ALL {
        let is_known = |kind| decode_in(draft, &[kind]).is_ok();
        assert_eq!(is_known(0x22), draft >= Draft::D20, "PUBLISH_STATE_NOTIFY in {draft}");
        assert_eq!(is_known(0x1e), draft == Draft::D18, "PUBLISH_OK in {draft}");
        assert_eq!(is_known(0x0a), draft == Draft::D18, "UNSUBSCRIBE in {draft}");
        assert!(is_known(0x0f) && is_known(0x51));
    }
}

/// A code that a draft does not define is sent as an internal error, unless the draft has a similar code.
#[test]
fn error_code_of_another_draft_is_sent_as_internal_error() {
    use code::{Done, Request};
    let table = [
        (Request::DUPLICATE_SUBSCRIPTION, 18..=18),
        (Request::INVALID_JOINING_REQUEST_ID, 18..=19),
        (Request::INVALID_FILTER, 19..=22),
        (Request::CONFLICTING_FILTERS, 19..=22),
        (Request::DOES_NOT_EXIST, 18..=22),
        (Request(0x9d), 18..=22),
    ];
    for draft in Draft::ALL {
        for (code, known) in table.clone() {
            let bytes = encode_in(draft, RequestError::new(code, "")).unwrap();
            let expected = if known.contains(&draft.number()) { code } else { Request::INTERNAL_ERROR };
            assert_eq!(decode_in(draft, &bytes), Ok(Some(RequestError::new(expected, "").into())), "{draft}");
        }
        let foreign = decode_in(draft, &[0x05, 0, 3, 0x19, 0, 0]).unwrap();
        let Some(Message::RequestError(error)) = foreign else { panic!("not decoded") };
        let is_duplicate = error.code == Request::DUPLICATE_SUBSCRIPTION;
        assert_eq!(is_duplicate, draft == Draft::D18, "{draft}");

        let done =
            PublishDone { code: Done::SUBSCRIPTION_ENDED, stream_count: u64::MAX, reason: String::new() };
        let bytes = encode_in(draft, done.clone()).unwrap();
        assert_eq!(bytes[3], if draft < Draft::D20 { 3 } else { 2 }, "{draft}");
        let Ok(Some(Message::PublishDone(read))) = decode_in(draft, &bytes) else { panic!("not decoded") };
        assert_eq!(read.stream_count, PublishDone::UNKNOWN_COUNT, "{draft}");
        assert_eq!(
            bytes[4..bytes.len() - 1].iter().all(|byte| *byte == 0xff),
            draft >= Draft::D20,
            "{draft}"
        );
        let Ok(Some(Message::PublishDone(read))) = decode_in(draft, &[0x0b, 0, 3, 3, 0, 0]) else { panic!() };
        let expected = if draft < Draft::D20 { Done::SUBSCRIPTION_ENDED } else { Done::INTERNAL_ERROR };
        assert_eq!(read.code, expected, "{draft}");
    }
}

#[test]
fn max_request_updates_is_a_setup_option_from_draft_19_on() {
    // The encoded SETUP has the options MAX_FILTER_RANGES with value 0 and MAX_REQUEST_UPDATES with value 5.
    let bytes = [0xaf, 0x00, 0, 4, 6, 0, 2, 5];
    for draft in Draft::ALL {
        let Ok(Some(Message::Setup(setup))) = decode_in(draft, &bytes) else { panic!("not decoded") };
        assert_eq!(setup.max_request_updates, (draft >= Draft::D19).then_some(5), "{draft}");
        let setup = SetupOptions { max_request_updates: Some(5), ..SetupOptions::default() };
        let expected: &[u8] = if draft >= Draft::D19 { &[0xaf, 0, 0, 2, 8, 5] } else { &[0xaf, 0, 0, 0] };
        assert_eq!(encode_in(draft, setup).as_deref(), Ok(expected), "{draft}");
    }
}

#[test]
fn setup_ignores_unknown_options() {
    // The encoded SETUP has the path "/a", and the unknown option 0x9d twice. The message type is 0x2f00.
    let bytes = [0xaf, 0x00, 0, 11, 1, 2, b'/', b'a', 0x80, 0x9c, 1, 0, 0, 1, 0];
    let expected = SetupOptions { path: Some("/a".into()), ..SetupOptions::default() };
    assert_eq!(decode(&bytes), Ok(Some(expected.into())));
}

#[test]
fn setup_refuses_invalid_uri() {
    let table: [(u8, &[u8], Session); 6] = [
        (1, b"a", Session::MALFORMED_PATH),
        (1, b"/a b", Session::MALFORMED_PATH),
        (1, b"/\xff", Session::MALFORMED_PATH),
        (1, b"/a#b", Session::MALFORMED_PATH),
        (5, b"a/b", Session::MALFORMED_AUTHORITY),
        (5, b"a b", Session::MALFORMED_AUTHORITY),
    ];
    for (kind, value, code) in table {
        let mut bytes = vec![0xaf, 0x00, 0, value.len() as u8 + 2, kind, value.len() as u8];
        bytes.extend_from_slice(value);
        assert_eq!(decode(&bytes).unwrap_err().code, code, "{kind} {value:?}");
    }
}

#[test]
fn malformed_messages_are_violations() {
    let table: [(&str, &[u8]); 9] = [
        ("unknown type, before its length came", &[0x01]),
        ("field past the end", &[0x03, 0, 3, 0, 1, 9]),
        ("33 namespace fields", &[0x08, 0, 1, 33]),
        ("empty namespace field", &[0x08, 0, 2, 1, 0]),
        ("unknown fetch type", &[0x16, 0, 2, 0, 4]),
        ("end of track is 0 or 1", &[0x18, 0, 4, 2, 0, 0, 0]),
        ("redirect without its structure", &[0x05, 0, 3, 0x34, 0, 0]),
        ("setup option repeated", &[0xaf, 0x00, 0, 4, 4, 1, 0, 1]),
        ("bytes behind a message", &[0x0e, 0, 2, 0, 0]),
    ];
    for (what, bytes) in table {
        assert!(decode(bytes).is_err(), "{what}");
    }
    let mut reason = vec![0x0b, 0x04, 0x05, 2, 0, 0x84, 0x01];
    reason.resize(3 + 0x405, b'x');
    assert_eq!(decode(&reason).unwrap_err().reason, "a reason phrase is longer than 1024 bytes");
}

#[test]
fn request_ok_with_fields_not_allowed_for_its_request_is_an_error() {
    let parameters = Parameters { largest_object: Some(Location::new(1, 2)), ..Parameters::default() };
    let properties = TrackProperties { dynamic_groups: Some(true), ..TrackProperties::default() }.encode();
    let with_location = RequestOk { parameters: parameters.clone(), properties: Properties::default() };
    assert!(with_location.check(Draft::D18, Scope::UPDATE_OK).is_ok());
    assert!(with_location.check(Draft::D18, Scope::PUBLISH_OK).is_err());
    let with_properties = RequestOk { parameters, properties };
    assert!(with_properties.check(Draft::D18, Scope::TRACK_STATUS_OK).is_ok());
    assert!(with_properties.check(Draft::D18, Scope::UPDATE_OK).is_err());
}

#[test]
fn long_reason_phrase_is_truncated_between_characters() {
    let reason = "é".repeat(600) + "x";
    let done = PublishDone { code: code::Done::EXPIRED, stream_count: 0, reason: reason.clone() };
    let Ok(Some(Message::PublishDone(decoded))) = decode(&encode(done)) else { panic!("not decoded") };
    assert_eq!(decoded.reason, "é".repeat(512));
    let odd = PublishDone { code: code::Done::EXPIRED, stream_count: 0, reason: format!("x{reason}") };
    let Ok(Some(Message::PublishDone(decoded))) = decode(&encode(odd)) else { panic!("not decoded") };
    assert_eq!(decoded.reason, format!("x{}", "é".repeat(511)));
}

#[test]
fn message_too_long_to_encode_writes_nothing() {
    let token = AuthToken(Bytes::from(vec![0; 70_000]));
    let parameters = Parameters { authorization_tokens: vec![token], ..Parameters::default() };
    let message = Message::from(Subscribe { request_id: 0, track: track(), parameters });
    let mut out = vec![1, 2];
    let error = message.encode(Draft::NEWEST, &mut out).unwrap_err();
    assert!(matches!(error, EncodeError::TooLong { length: 70_000.. }), "{error}");
    assert_eq!(out, [1, 2]);
}

fn a_namespace() -> impl Strategy<Value = Namespace> {
    vec(vec(any::<u8>(), 1..12), 0..6).prop_map(|fields| Namespace::new(fields).unwrap())
}

fn a_track() -> impl Strategy<Value = TrackName> {
    (a_namespace(), vec(any::<u8>(), 0..12)).prop_map(|(ns, name)| TrackName::new(ns, name).unwrap())
}

fn a_location() -> impl Strategy<Value = Location> {
    (any::<u64>(), any::<u64>()).prop_map(|(group, object)| Location { group, object })
}

fn a_draft() -> impl Strategy<Value = Draft> {
    prop::sample::select(&Draft::ALL[..])
}

/// Generates location filters whose encoding in `draft` decodes to the same filter.
fn a_filter(draft: Draft) -> BoxedStrategy<Filter> {
    let ranges =
        (a_location(), any::<u64>(), option::of(any::<u64>())).prop_map(move |(start, more, end_object)| {
            Filter::AbsoluteRange {
                start,
                end_group: start.group.saturating_add(more),
                end_object: end_object.filter(|_| draft.has_relative_filters()),
            }
        });
    // Filters that start at location 0/0 are excluded, because their encoding decodes to another filter.
    let starts = a_location().prop_filter("has another name", |start| *start != Location::default());
    let all = prop_oneof![
        Just(Filter::NEXT_GROUP),
        Just(Filter::NextObject),
        starts.prop_map(Filter::AbsoluteStart),
        ranges,
    ];
    match draft.has_relative_filters() {
        true => prop_oneof![3 => all, 1 => Just(Filter::All), 1 => any::<u64>().prop_map(Filter::Relative)]
            .boxed(),
        false => all.boxed(),
    }
}

fn an_order() -> impl Strategy<Value = GroupOrder> {
    prop_oneof![Just(GroupOrder::Ascending), Just(GroupOrder::Descending)]
}

fn tokens() -> impl Strategy<Value = Vec<AuthToken>> {
    vec(vec(any::<u8>(), 0..20).prop_map(|token| AuthToken(token.into())), 0..3)
}

/// Generates the parameters that `draft` has but the draft before it does not.
fn later_parameters(draft: Draft) -> impl Strategy<Value = Parameters> {
    let fill = (option::of(a_filter(draft)), option::of(any::<u8>()), option::of(any::<u64>())).prop_map(
        |(filter, subscriber_priority, fill_timeout)| {
            Box::new(Parameters { filter, subscriber_priority, fill_timeout, ..Parameters::default() })
        },
    );
    let ranges = vec((0x25..0x29u64, vec(any::<u8>(), 0..9)), 0..3);
    (option::of(fill), option::of(any::<bool>()), ranges).prop_map(
        move |(fill, include_properties, mut ranges)| {
            ranges.sort_by_key(|(kind, _)| *kind);
            let filters = ranges.into_iter().map(|(kind, value)| RangeFilter { kind, value: value.into() });
            Parameters {
                fill: fill.filter(|_| draft.has_fills()),
                include_properties: include_properties.filter(|_| draft.has_state_notify()),
                range_filters: filters.filter(|_| draft.has_range_filters()).collect(),
                ..Parameters::default()
            }
        },
    )
}

fn subscription_parameters(draft: Draft) -> impl Strategy<Value = Parameters> {
    let timeouts = (option::of(any::<u64>()), option::of(any::<u64>()), option::of(any::<u64>()));
    let rest = (
        option::of(any::<bool>()),
        option::of(any::<u8>()),
        option::of(a_filter(draft)),
        option::of(an_order()),
        option::of(any::<u64>()),
        option::of(an_assignment()),
    );
    let all = (timeouts, tokens(), rest, later_parameters(draft));
    all.prop_map(|(timeouts, authorization_tokens, rest, later)| Parameters {
        object_delivery_timeout: timeouts.0,
        subgroup_delivery_timeout: timeouts.1,
        rendezvous_timeout: timeouts.2,
        authorization_tokens,
        forward: rest.0,
        subscriber_priority: rest.1,
        filter: rest.2,
        group_order: rest.3,
        new_group_request: rest.4,
        assignment: rest.5,
        ..later
    })
}

/// Generates the path and cost of an announcement, without other parameters.
fn a_route() -> impl Strategy<Value = Parameters> {
    (vec(1..u64::MAX, 1..4), option::of(any::<u64>())).prop_map(|(mut hops, route_cost)| {
        hops.sort_unstable();
        hops.dedup();
        let path = HopPath::new(HopId::UNNAMED);
        let hop_path = hops.into_iter().try_fold(path, |path, hop| path.then(HopId(hop))).ok();
        Parameters { hop_path, route_cost, ..Parameters::default() }
    })
}

fn an_assignment() -> impl Strategy<Value = Assignment> {
    let number = any::<u64>;
    (number(), number(), number(), Assignment::WEIGHTS, number(), any::<u8>()).prop_map(
        |(set, algorithm, threshold, weight, activate, rank)| Assignment {
            set,
            algorithm,
            threshold,
            weight,
            activate,
            rank,
        },
    )
}

fn answer_parameters() -> impl Strategy<Value = Parameters> {
    (option::of(any::<u64>()), option::of(a_location())).prop_map(|(expires, largest_object)| Parameters {
        expires,
        largest_object,
        ..Parameters::default()
    })
}

fn properties() -> impl Strategy<Value = Properties> {
    (option::of(any::<u64>()), option::of(any::<u8>()), option::of(an_order())).prop_map(
        |(max_cache_duration, publisher_priority, group_order)| {
            TrackProperties {
                max_cache_duration,
                publisher_priority,
                group_order,
                ..TrackProperties::default()
            }
            .encode()
        },
    )
}

fn a_fetch(draft: Draft) -> BoxedStrategy<FetchKind> {
    let standalone =
        |range| (a_track(), range).prop_map(|(track, range)| FetchKind::Standalone { track, range });
    if draft.has_fills() {
        return standalone(a_filter(draft)).boxed();
    }
    let ranges = (a_location(), a_location()).prop_map(|(start, last)| Filter::range(start, last));
    prop_oneof![
        standalone(ranges.boxed()),
        (any::<u64>(), any::<u64>()).prop_map(|(subscription, groups_back)| {
            FetchKind::RelativeJoining { subscription, groups_back }
        }),
        (any::<u64>(), any::<u64>()).prop_map(|(subscription, first_group)| {
            FetchKind::AbsoluteJoining { subscription, first_group }
        }),
    ]
    .boxed()
}

fn request_error() -> impl Strategy<Value = RequestError> {
    let redirect = ("[a-z:/]{0,9}", a_track()).prop_map(|(uri, track)| Redirect { uri, track });
    (a_code(), any::<u64>(), "\\PC{0,20}", option::of(redirect)).prop_map(
        |(code, retry_interval, reason, redirect)| RequestError {
            code: match redirect {
                Some(_) => code::Request::REDIRECT,
                None if code == code::Request::REDIRECT.0 => code::Request::INTERNAL_ERROR,
                None => code::Request(code),
            },
            retry_interval,
            reason,
            redirect,
        },
    )
}

fn requests(draft: Draft) -> BoxedStrategy<Message> {
    let fetch_parameters =
        (option::of(any::<u64>()), option::of(any::<u8>()), option::of(an_order()), tokens()).prop_map(
            |(fill_timeout, subscriber_priority, group_order, authorization_tokens)| Parameters {
                fill_timeout,
                subscriber_priority,
                group_order,
                authorization_tokens,
                ..Parameters::default()
            },
        );
    let prefix = option::of(a_namespace())
        .prop_map(|track_namespace_prefix| Parameters { track_namespace_prefix, ..Parameters::default() });
    let authorized =
        || tokens().prop_map(|tokens| Parameters { authorization_tokens: tokens, ..Parameters::default() });
    prop_oneof![
        (any::<u64>(), a_track(), subscription_parameters(draft))
            .prop_map(|(request_id, track, parameters)| Subscribe { request_id, track, parameters }.into()),
        (any::<u64>(), a_track(), authorized()).prop_map(|(request_id, track, parameters)| TrackStatus {
            request_id,
            track,
            parameters
        }
        .into()),
        (any::<u64>(), a_track(), any::<u64>(), answer_parameters(), properties()).prop_map(
            |(request_id, track, track_alias, parameters, properties)| {
                Publish { request_id, track, track_alias, parameters, properties }.into()
            }
        ),
        (any::<u64>(), a_fetch(draft), fetch_parameters)
            .prop_map(|(request_id, kind, parameters)| FetchRequest { request_id, kind, parameters }.into()),
        (any::<u64>(), prefix)
            .prop_map(|(request_id, parameters)| RequestUpdate { request_id, parameters }.into()),
        (any::<u64>(), a_namespace(), authorized(), option::of(a_route())).prop_map(
            |(request_id, namespace, authorized, route)| {
                let parameters = Parameters {
                    authorization_tokens: authorized.authorization_tokens,
                    ..route.unwrap_or_default()
                };
                PublishNamespace { request_id, namespace, parameters }.into()
            }
        ),
        (any::<u64>(), a_namespace(), authorized()).prop_map(|(request_id, prefix, parameters)| {
            SubscribeNamespace { request_id, prefix, parameters }.into()
        }),
        (any::<u64>(), a_namespace(), authorized()).prop_map(|(request_id, prefix, parameters)| {
            SubscribeTracks { request_id, prefix, parameters }.into()
        }),
    ]
    .boxed()
}

/// Generates an error code that every draft defines.
fn a_code() -> impl Strategy<Value = u64> {
    any::<u64>().prop_filter("not in every draft", |code| !matches!(code, 0x3 | 0x19 | 0x32 | 0x35 | 0x36))
}

fn answers(draft: Draft) -> BoxedStrategy<Message> {
    let notify = answer_parameters().prop_map(|parameters| {
        PublishStateNotify { parameters: Parameters { expires: None, ..parameters } }.into()
    });
    let common = common_answers(draft);
    match draft.has_state_notify() {
        true => prop_oneof![9 => common, 1 => notify].boxed(),
        false => common,
    }
}

fn common_answers(draft: Draft) -> BoxedStrategy<Message> {
    prop_oneof![
        (any::<u64>(), answer_parameters(), properties()).prop_map(
            |(track_alias, parameters, properties)| {
                SubscribeOk { track_alias, parameters, properties }.into()
            }
        ),
        (answer_parameters(), properties()).prop_map(|(parameters, properties)| RequestOk {
            parameters,
            properties
        }
        .into()),
        (any::<bool>(), a_location(), properties()).prop_map(|(end_of_track, last, properties)| {
            FetchOk { end_of_track, last, parameters: Parameters::default(), properties }.into()
        }),
        request_error().prop_map(Into::into),
        (a_code(), 0..1u64 << 61, "\\PC{0,20}").prop_map(|(code, stream_count, reason)| {
            PublishDone { code: code::Done(code), stream_count, reason }.into()
        }),
        (a_namespace(), option::of(a_route())).prop_map(|(suffix, parameters)| NamespaceFound {
            suffix,
            parameters
        }
        .into()),
        a_namespace().prop_map(|suffix| NamespaceDone { suffix }.into()),
        a_track().prop_map(|suffix| PublishSkipped { suffix }.into()),
        ("[a-z:/]{0,20}", any::<u64>(), option::of(any::<u64>())).prop_map(
            move |(uri, timeout, request_id)| {
                let request_id = request_id.filter(|_| draft.names_unprocessed());
                GoAway { uri, timeout, request_id }.into()
            }
        ),
        (
            option::of("/[a-z/?]{0,9}"),
            tokens(),
            option::of(any::<u64>()),
            option::of("[a-z:0-9]{1,9}"),
            vec(any::<u64>(), 0..3),
            option::of(any::<u64>()),
            (option::of(any::<u64>()), option::of(any::<u64>())),
        )
            .prop_map(
                move |(path, authorization_tokens, size, authority, switching_algorithms, updates, mesh)| {
                    SetupOptions {
                        path,
                        authorization_tokens,
                        max_auth_token_cache_size: size,
                        authority,
                        implementation: Some("test".into()),
                        max_request_updates: updates.filter(|_| draft.limits_updates()),
                        switching_algorithms,
                        hop_id: mesh.0.map(HopId),
                        relay_cost: mesh.1,
                    }
                    .into()
                }
            ),
    ]
    .boxed()
}

/// Generates a draft and one of its messages.
fn a_message() -> impl Strategy<Value = (Draft, Message)> {
    a_draft().prop_flat_map(|draft| (Just(draft), prop_oneof![requests(draft), answers(draft)]))
}

/// Generates a draft and several of its messages.
fn messages() -> impl Strategy<Value = (Draft, Vec<Message>)> {
    a_draft().prop_flat_map(|draft| (Just(draft), vec(prop_oneof![requests(draft), answers(draft)], 1..4)))
}

proptest! {
    #[test]
    fn messages_round_trip_however_the_stream_is_divided((draft, messages) in messages(), split: prop::sample::Index) {
        let bytes: Vec<u8> =
            messages.iter().flat_map(|message| encode_in(draft, message.clone()).unwrap()).collect();
        let (first, second) = bytes.split_at(split.index(bytes.len()));
        let mut input = BytesMut::from(first);
        let mut decoded = Vec::new();
        while let Some(message) = Message::decode(draft, &mut input).unwrap() {
            decoded.push(message);
        }
        input.extend_from_slice(second);
        while let Some(message) = Message::decode(draft, &mut input).unwrap() {
            decoded.push(message);
        }
        prop_assert!(input.is_empty());
        prop_assert_eq!(decoded, messages);
    }

    #[test]
    fn control_message_of_arbitrary_bytes_never_panics(draft in a_draft(), bytes in vec(any::<u8>(), 0..60)) {
        let _ = decode_in(draft, &bytes);
    }

    /// Messages with one changed byte test the parsers of fields that random bytes never reach. If a damaged message is
    /// accepted, it must be possible to encode it.
    #[test]
    fn damaged_messages_never_panic((draft, message) in a_message(), at: prop::sample::Index, byte: u8) {
        let mut bytes = encode_in(draft, message).unwrap();
        let at = at.index(bytes.len());
        bytes[at] = byte;
        if let Ok(Some(message)) = decode_in(draft, &bytes) {
            let again = encode_in(draft, message.clone()).unwrap();
            prop_assert_eq!(decode_in(draft, &again), Ok(Some(message)));
        }
    }

    /// Bytes of one draft may have another meaning in another draft, but must not cause a panic.
    #[test]
    fn messages_of_another_draft_never_panic((draft, message) in a_message(), other in a_draft()) {
        let bytes = encode_in(draft, message).unwrap();
        if let Ok(Some(message)) = decode_in(other, &bytes) {
            let again = encode_in(other, message.clone()).unwrap();
            prop_assert_eq!(decode_in(other, &again), Ok(Some(message)));
        }
    }
}

/// Returns the bytes that an independent implementation, moqtap-codec, writes after reading the message.
fn as_others_write_it(draft: Draft, bytes: &[u8]) -> Result<Vec<u8>, String> {
    macro_rules! again {
        ($draft:ident) => {{
            let mut rest = bytes;
            let mut written = Vec::new();
            let message = moqtap_codec::$draft::message::ControlMessage::decode(&mut rest);
            let message = message.map_err(|error| format!("not understood: {error}"))?;
            message.encode(&mut written).map_err(|error| format!("not written: {error}"))?;
            match rest.is_empty() {
                true => Ok(written),
                false => Err(format!("{} bytes are left", rest.len())),
            }
        }};
    }
    match draft {
        Draft::D18 => again!(draft18),
        Draft::D19 => again!(draft19),
        Draft::D20 => again!(draft20),
        Draft::D21 => again!(draft21),
        Draft::D22 => again!(draft22),
    }
}

/// Returns the message without the fields on which this implementation and moqtap-codec may differ, because only one of
/// the two checks or knows these fields.
fn as_others_know_it(mut message: Message) -> Message {
    let plain = |parameters: &mut Parameters| {
        parameters.authorization_tokens.clear(); // Only moqtap-codec checks the bytes of a token.
        parameters.assignment = None;
        (parameters.hop_path, parameters.route_cost) = (None, None);
    };
    match &mut message {
        Message::Subscribe(message) => plain(&mut message.parameters),
        Message::RequestUpdate(message) => plain(&mut message.parameters),
        Message::TrackStatus(message) => plain(&mut message.parameters),
        Message::PublishNamespace(message) => plain(&mut message.parameters),
        Message::SubscribeNamespace(message) => plain(&mut message.parameters),
        Message::SubscribeTracks(message) => plain(&mut message.parameters),
        Message::Namespace(message) => message.parameters = None,
        Message::Setup(message) => message.authorization_tokens.clear(),
        Message::Fetch(message) => {
            plain(&mut message.parameters);
            if let FetchKind::Standalone { range, .. } = &mut message.kind
                && range.end().is_some_and(|end| end < range.start(None))
            {
                *range = Filter::range(range.start(None), range.start(None));
            }
        }
        _ => {}
    }
    message
}

proptest! {
    /// This implementation and moqtap-codec were written independently from the drafts, so each is a check of the
    /// other.
    #[test]
    fn moqtap_codec_agrees_on_valid_messages((draft, message) in a_message()) {
        let message = as_others_know_it(message);
        let bytes = encode_in(draft, message.clone()).unwrap();
        prop_assert_eq!(as_others_write_it(draft, &bytes), Ok(bytes), "{} in {}", message.name(), draft);
    }

    /// moqtap-codec may refuse damaged messages that this implementation accepts. Messages that both implementations
    /// accept must have the same text form. Integers of properties are printed as numbers, because this implementation
    /// keeps their encoded length, and moqtap-codec uses the shortest.
    #[test]
    fn moqtap_codec_agrees_on_damaged_messages((draft, message) in a_message(), at: prop::sample::Index, byte: u8) {
        let mut bytes = encode_in(draft, as_others_know_it(message)).unwrap();
        let at = at.index(bytes.len());
        bytes[at] = byte;
        if let (Ok(Some(ours)), Ok(theirs)) = (decode_in(draft, &bytes), as_others_write_it(draft, &bytes)) {
            let theirs = decode_in(draft, &theirs);
            prop_assert_eq!(format!("{theirs:?}"), format!("{:?}", Ok::<_, DecodeError>(Some(ours))));
        }
    }
}
