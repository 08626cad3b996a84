use bytes::{Bytes, BytesMut};
use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;

use super::*;
use crate::moq::code::{self, Session};
use crate::moq::param::{Assignment, Scope, Token};
use crate::moq::property::TrackProperties;
use crate::moq::{Filter, GroupOrder, Location, Namespace, Parameters, Properties, TrackName};

fn encode(message: impl Into<Message>) -> Vec<u8> {
    let mut out = Vec::new();
    message.into().encode(&mut out).unwrap();
    out
}

fn decode(bytes: &[u8]) -> Result<Option<Message>, DecodeError> {
    Message::decode(&mut BytesMut::from(bytes))
}

fn namespace() -> Namespace {
    Namespace::new(["ns"]).unwrap()
}

fn track() -> TrackName {
    TrackName::new(namespace(), "t").unwrap()
}

/// Frames as an independent draft-18 implementation (moq-rs) puts them on the wire.
#[test]
fn frames_that_peers_send() {
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
            Fetch {
                request_id: 0,
                kind: FetchKind::Standalone {
                    track: track(),
                    start: Location::new(0, 0),
                    end: Location::new(0, 1),
                },
                parameters: none(),
            }
            .into(),
            &[0x16, 0, 13, 0, 1, 1, 2, b'n', b's', 1, b't', 0, 0, 0, 1, 0],
        ),
        (
            FetchOk {
                end_of_track: false,
                end: Location::new(0, 1),
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
            PublishBlocked { suffix: TrackName::new(Namespace::default(), "t").unwrap() }.into(),
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
fn publish_ok_of_older_drafts_is_a_request_ok() {
    assert_eq!(decode(&[0x1e, 0, 1, 0]), Ok(Some(RequestOk::default().into())));
}

#[test]
fn goaway_of_older_drafts_has_no_timeout() {
    let expected = GoAway { uri: "a".into(), timeout: 0, request_id: None };
    assert_eq!(decode(&[0x10, 0, 2, 1, b'a']), Ok(Some(expected.into())));
}

#[test]
fn setup_ignores_what_it_does_not_know() {
    // Path "/a"; unknown 0x9d, twice; the type is 0x2f00.
    let bytes = [0xaf, 0x00, 0, 11, 1, 2, b'/', b'a', 0x80, 0x9c, 1, 0, 0, 1, 0];
    let expected = Setup { path: Some("/a".into()), ..Setup::default() };
    assert_eq!(decode(&bytes), Ok(Some(expected.into())));
}

#[test]
fn setup_refuses_what_is_not_a_uri() {
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
        ("bytes behind a message", &[0x08, 0, 2, 0, 0]),
    ];
    for (what, bytes) in table {
        assert!(decode(bytes).is_err(), "{what}");
    }
    let mut reason = vec![0x0b, 0x04, 0x05, 2, 0, 0x84, 0x01];
    reason.resize(3 + 0x405, b'x');
    assert_eq!(decode(&reason).unwrap_err().reason, "a reason phrase is longer than 1024 bytes");
}

#[test]
fn request_ok_is_checked_against_its_request() {
    let parameters = Parameters { largest_object: Some(Location::new(1, 2)), ..Parameters::default() };
    let properties = TrackProperties { dynamic_groups: Some(true), ..TrackProperties::default() }.encode();
    let with_location = RequestOk { parameters: parameters.clone(), properties: Properties::default() };
    assert!(with_location.check(Scope::UPDATE_OK).is_ok());
    assert!(with_location.check(Scope::PUBLISH_OK).is_err());
    let with_properties = RequestOk { parameters, properties };
    assert!(with_properties.check(Scope::TRACK_STATUS_OK).is_ok());
    assert!(with_properties.check(Scope::UPDATE_OK).is_err());
}

#[test]
fn reasons_are_cut_between_characters() {
    let reason = "é".repeat(600) + "x";
    let done = PublishDone { code: code::Done::EXPIRED, stream_count: 0, reason: reason.clone() };
    let Ok(Some(Message::PublishDone(decoded))) = decode(&encode(done)) else { panic!("not decoded") };
    assert_eq!(decoded.reason, "é".repeat(512));
    let odd = PublishDone { code: code::Done::EXPIRED, stream_count: 0, reason: format!("x{reason}") };
    let Ok(Some(Message::PublishDone(decoded))) = decode(&encode(odd)) else { panic!("not decoded") };
    assert_eq!(decoded.reason, format!("x{}", "é".repeat(511)));
}

#[test]
fn a_message_that_does_not_fit_is_an_error_and_writes_nothing() {
    let token = Token(Bytes::from(vec![0; 70_000]));
    let parameters = Parameters { authorization_tokens: vec![token], ..Parameters::default() };
    let message = Message::from(Subscribe { request_id: 0, track: track(), parameters });
    let mut out = vec![1, 2];
    assert!(message.encode(&mut out).unwrap_err().length > 70_000);
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

fn a_filter() -> impl Strategy<Value = Filter> {
    prop_oneof![
        Just(Filter::NextGroupStart),
        Just(Filter::LargestObject),
        a_location().prop_map(Filter::AbsoluteStart),
        (a_location(), any::<u64>()).prop_map(|(start, more)| {
            Filter::AbsoluteRange { start, end_group: start.group.saturating_add(more) }
        }),
    ]
}

fn an_order() -> impl Strategy<Value = GroupOrder> {
    prop_oneof![Just(GroupOrder::Ascending), Just(GroupOrder::Descending)]
}

fn tokens() -> impl Strategy<Value = Vec<Token>> {
    vec(vec(any::<u8>(), 0..20).prop_map(|token| Token(token.into())), 0..3)
}

fn subscription_parameters() -> impl Strategy<Value = Parameters> {
    let timeouts = (option::of(any::<u64>()), option::of(any::<u64>()), option::of(any::<u64>()));
    let rest = (
        option::of(any::<bool>()),
        option::of(any::<u8>()),
        option::of(a_filter()),
        option::of(an_order()),
        option::of(any::<u64>()),
        option::of(an_assignment()),
    );
    (timeouts, tokens(), rest).prop_map(|(timeouts, authorization_tokens, rest)| Parameters {
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
        ..Parameters::default()
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

fn a_fetch() -> impl Strategy<Value = FetchKind> {
    prop_oneof![
        (a_track(), a_location(), a_location()).prop_map(|(track, start, end)| FetchKind::Standalone {
            track,
            start,
            end
        }),
        (any::<u64>(), any::<u64>()).prop_map(|(subscription, groups_back)| {
            FetchKind::RelativeJoining { subscription, groups_back }
        }),
        (any::<u64>(), any::<u64>()).prop_map(|(subscription, first_group)| {
            FetchKind::AbsoluteJoining { subscription, first_group }
        }),
    ]
}

fn request_error() -> impl Strategy<Value = RequestError> {
    let redirect = ("[a-z:/]{0,9}", a_track()).prop_map(|(uri, track)| Redirect { uri, track });
    (any::<u64>(), any::<u64>(), "\\PC{0,20}", option::of(redirect)).prop_map(
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

fn requests() -> impl Strategy<Value = Message> {
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
        (any::<u64>(), a_track(), subscription_parameters())
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
        (any::<u64>(), a_fetch(), fetch_parameters).prop_map(|(request_id, kind, parameters)| Fetch {
            request_id,
            kind,
            parameters
        }
        .into()),
        (any::<u64>(), prefix)
            .prop_map(|(request_id, parameters)| RequestUpdate { request_id, parameters }.into()),
        (any::<u64>(), a_namespace(), authorized()).prop_map(|(request_id, namespace, parameters)| {
            PublishNamespace { request_id, namespace, parameters }.into()
        }),
        (any::<u64>(), a_namespace(), authorized()).prop_map(|(request_id, prefix, parameters)| {
            SubscribeNamespace { request_id, prefix, parameters }.into()
        }),
        (any::<u64>(), a_namespace(), authorized()).prop_map(|(request_id, prefix, parameters)| {
            SubscribeTracks { request_id, prefix, parameters }.into()
        }),
    ]
}

fn answers() -> impl Strategy<Value = Message> {
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
        (any::<bool>(), a_location(), properties()).prop_map(|(end_of_track, end, properties)| {
            FetchOk { end_of_track, end, parameters: Parameters::default(), properties }.into()
        }),
        request_error().prop_map(Into::into),
        (any::<u64>(), any::<u64>(), "\\PC{0,20}").prop_map(|(code, stream_count, reason)| {
            PublishDone { code: code::Done(code), stream_count, reason }.into()
        }),
        a_namespace().prop_map(|suffix| NamespaceFound { suffix }.into()),
        a_namespace().prop_map(|suffix| NamespaceDone { suffix }.into()),
        a_track().prop_map(|suffix| PublishBlocked { suffix }.into()),
        ("[a-z:/]{0,20}", any::<u64>(), option::of(any::<u64>()))
            .prop_map(|(uri, timeout, request_id)| GoAway { uri, timeout, request_id }.into()),
        (
            option::of("/[a-z/?]{0,9}"),
            tokens(),
            option::of(any::<u64>()),
            option::of("[a-z:0-9]{1,9}"),
            vec(any::<u64>(), 0..3)
        )
            .prop_map(|(path, authorization_tokens, size, authority, switching_algorithms)| {
                Setup {
                    path,
                    authorization_tokens,
                    max_auth_token_cache_size: size,
                    authority,
                    implementation: Some("test".into()),
                    switching_algorithms,
                }
                .into()
            }),
    ]
}

proptest! {
    #[test]
    fn round_trip_however_it_arrives(messages in vec(prop_oneof![requests(), answers()], 1..4), split: prop::sample::Index) {
        let bytes: Vec<u8> = messages.iter().flat_map(|message| encode(message.clone())).collect();
        let (first, second) = bytes.split_at(split.index(bytes.len()));
        let mut input = BytesMut::from(first);
        let mut decoded = Vec::new();
        while let Some(message) = Message::decode(&mut input).unwrap() {
            decoded.push(message);
        }
        input.extend_from_slice(second);
        while let Some(message) = Message::decode(&mut input).unwrap() {
            decoded.push(message);
        }
        prop_assert!(input.is_empty());
        prop_assert_eq!(decoded, messages);
    }

    #[test]
    fn arbitrary_bytes_never_panic(bytes in vec(any::<u8>(), 0..60)) {
        let _ = decode(&bytes);
    }

    /// Damaged messages reach the fields that random bytes never do; what is accepted encodes again.
    #[test]
    fn damaged_messages_never_panic(
        message in prop_oneof![requests(), answers()],
        at: prop::sample::Index,
        byte: u8,
    ) {
        let mut bytes = encode(message);
        let at = at.index(bytes.len());
        bytes[at] = byte;
        if let Ok(Some(message)) = decode(&bytes) {
            let again = encode(message.clone());
            prop_assert_eq!(decode(&again), Ok(Some(message)));
        }
    }
}
