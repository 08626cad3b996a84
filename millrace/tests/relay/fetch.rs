//! Tests of FETCH from the cache and from upstream.

use std::time::Duration;

use millrace_client::session::{Error, SessionRequest};
use millrace_moq::{
    Draft, FetchItem, FetchObject, Filter, GroupOrder, Location, Message, Parameters, Properties, TrackName,
    code,
    data::{FetchEncoder, FetchParser, RangeEnd, encode_fetch_header},
    message::{FetchKind, FetchOk, FetchRequest, Subscribe, SubscribeOk},
};

use super::peer::{TestPeer, TestRelay, at, first_subscriber, header, patiently, payload, with_publisher};

/// The result of a FETCH: the answer FETCH_OK, the locations of objects in order, and the ranges reported as unknown.
pub struct FetchResponseContent {
    pub ok: FetchOk,
    pub objects: Vec<Location>,
    unknown: Vec<Location>,
}

async fn ask(peer: &TestPeer, kind: FetchKind, parameters: Parameters) -> SessionRequest {
    let request_id = peer.session.next_request_id();
    peer.session.request(FetchRequest { request_id, kind, parameters }).await.unwrap()
}

/// Sends a FETCH of the whole track.
pub async fn ask_for(peer: &TestPeer, track: &TrackName) -> SessionRequest {
    ask(peer, standalone(track, at(0, 0), at(u64::MAX, 0)), Parameters::default()).await
}

async fn refused(peer: &TestPeer, kind: FetchKind) -> code::Request {
    match patiently(ask(peer, kind, Parameters::default()).await.answer()).await {
        Err(Error::Refused(refused)) => refused.code,
        other => panic!("not refused: {other:?}"),
    }
}

pub async fn fetched(peer: &mut TestPeer, kind: FetchKind, order: GroupOrder) -> FetchResponseContent {
    let parameters = Parameters { group_order: Some(order), ..Parameters::default() };
    let mut request = ask(peer, kind, parameters).await;
    let Message::FetchOk(ok) = patiently(request.answer()).await.unwrap() else { panic!("no FETCH_OK") };
    let (objects, unknown) = past(peer, order).await;
    FetchResponseContent { ok, objects, unknown }
}

/// Reads the next stream that answers a FETCH or a fill (earlier objects of a subscription). Returns the locations of
/// objects in order, and unknown ranges.
pub async fn past(peer: &mut TestPeer, order: GroupOrder) -> (Vec<Location>, Vec<Location>) {
    let mut stream = peer.next_fetch().await;
    let mut parser = FetchParser::new(peer.session.draft(), order, 0);
    let mut bytes = Vec::new();
    let mut objects = Vec::new();
    let mut unknown = Vec::new();
    let mut payloads = Vec::new();
    while let Some(chunk) = patiently(stream.chunk()).await.unwrap() {
        bytes.extend_from_slice(&chunk);
        let mut rest = &chunk[..];
        while let Some(start) = parser.next(&mut rest).unwrap() {
            match start.item {
                FetchItem::Object(object) => {
                    objects.push(object.location);
                    payloads.push((object.location, start.payload as usize, object.payload_len as usize));
                }
                FetchItem::Range { last, end: RangeEnd::Unknown } => unknown.push(last),
                other => panic!("unexpected {other:?}"),
            }
        }
    }
    assert!(parser.at_boundary());
    for (location, from, len) in payloads {
        assert_eq!(bytes[from..from + len], payload(location.group, location.object, len));
    }
    (objects, unknown)
}

/// Makes a FETCH of the objects before `end`. Object 0 as the end stands for the whole group.
fn standalone(track: &TrackName, start: Location, end: Location) -> FetchKind {
    let last = at(end.group, end.object.checked_sub(1).unwrap_or(u64::MAX));
    FetchKind::Standalone { track: track.clone(), range: Filter::range(start, last) }
}

/// Publishes `groups` of 3 objects each, and waits until the first subscriber and the cache have them: objects that
/// the kernel has forwarded reach the cache a moment later.
pub async fn publish_groups(
    relay: &TestRelay,
    publisher: &TestPeer,
    subscriber: &mut TestPeer,
    groups: std::ops::Range<u64>,
) {
    // exact: the count of received objects includes all earlier objects, which callers have waited for
    let wanted = relay.status().totals.objects_received + 3 * (groups.end - groups.start);
    for group in groups {
        let mut subgroup = publisher.subgroup(header(1, group)).await;
        for id in 0..3 {
            subgroup.object(id, 700).await;
        }
        subgroup.finish();
        subscriber.next_subgroup().await.all().await;
    }
    relay.until("everything is cached", |status| status.totals.objects_received >= wanted).await;
}

pub fn locations(groups: impl IntoIterator<Item = u64>) -> Vec<Location> {
    groups.into_iter().flat_map(|group| (0..3).map(move |object| at(group, object))).collect()
}

#[tokio::test]
async fn cached_ranges_are_fetched_in_ascending_or_descending_group_order() {
    let relay = TestRelay::start();
    let (mut publisher, _namespace, track) = with_publisher(&relay).await;
    let (mut subscriber, _request, _ok, _upstream) =
        first_subscriber(&relay, &mut publisher, &track, 1).await;
    publish_groups(&relay, &publisher, &mut subscriber, 0..4).await;
    let mut peer = relay.peer().await;
    let got = fetched(&mut peer, standalone(&track, at(0, 0), at(3, 0)), GroupOrder::Ascending).await;
    assert_eq!(got.objects, locations(0..4));
    assert_eq!(
        (got.ok.last, got.ok.end_of_track),
        (at(3, 2), false),
        "the FETCH returned more objects than exist"
    );
    let got = fetched(&mut peer, standalone(&track, at(1, 1), at(2, 2)), GroupOrder::Ascending).await;
    assert_eq!(got.objects, [at(1, 1), at(1, 2), at(2, 0), at(2, 1)]);
    assert_eq!(got.ok.last, at(2, 1));
    let got = fetched(&mut peer, standalone(&track, at(1, 0), at(3, 0)), GroupOrder::Descending).await;
    assert_eq!(got.objects, locations([3, 2, 1]));
    assert!(got.unknown.is_empty());
}

/// The relay delays FETCH responses to a client that exceed the client's limit in bytes per second.
#[tokio::test]
async fn fetch_rate_of_a_client_is_limited() {
    const RATE: u64 = 64 << 10;
    const OBJECTS: u64 = 600;
    const LEN: usize = 400;
    let relay = TestRelay::with(|config| config.access.limits.share.fetch_bytes_per_second = RATE);
    let (mut publisher, _namespace, track) = with_publisher(&relay).await;
    let (_subscriber, _request, _ok, _upstream) = first_subscriber(&relay, &mut publisher, &track, 1).await;
    let mut subgroup = publisher.subgroup(header(1, 0)).await;
    for id in 0..OBJECTS {
        subgroup.object(id, LEN).await;
    }
    subgroup.finish();
    relay.until("all are cached", |status| status.tracks[0].objects_cached == OBJECTS).await;
    let mut peer = relay.peer().await;
    let began = std::time::Instant::now();
    let fetched = fetched(&mut peer, standalone(&track, at(0, 0), at(0, 0)), GroupOrder::Ascending).await;
    assert_eq!(fetched.objects.len(), OBJECTS as usize);
    // The relay sends the bytes that the limit allows for one second immediately, and the last batch of objects without
    // a delay.
    assert!(began.elapsed() >= std::time::Duration::from_secs(1), "{:?}", began.elapsed());
    // exact: the relay counts the bytes of a fetched object before it sends the object
    let status = relay.status();
    assert!(status.totals.fetch_waits >= 1);
    assert_eq!(status.access.clients[0].fetched_bytes, OBJECTS * LEN as u64);
    // All sessions of a client share one limit of bytes per second.
    let sessions = status.sessions.len() as u64;
    assert!(status.access.clients[0].receive_bytes >= sessions * (64 << 10), "{sessions} sessions");
}

#[tokio::test]
async fn joining_fetch_ends_at_the_object_before_the_subscription_begins() {
    let relay = TestRelay::start();
    let (mut publisher, _namespace, track) = with_publisher(&relay).await;
    let (mut subscriber, _request, _ok, _upstream) =
        first_subscriber(&relay, &mut publisher, &track, 1).await;
    publish_groups(&relay, &publisher, &mut subscriber, 0..3).await;
    let mut open = publisher.subgroup(header(1, 3)).await;
    open.object(0, 700).await;
    open.object(1, 700).await;
    subscriber.next_subgroup().await.objects(2).await;
    relay.until_largest(at(3, 1)).await;
    let mut late = relay.peer_of(Draft::D19).await;
    let filter = Some(Filter::NextObject);
    let parameters = Parameters { filter, ..Parameters::default() };
    let (_request, _) = late.try_subscribe(&track, parameters).await.unwrap();
    let subscription = 0;
    let back = FetchKind::RelativeJoining { subscription, groups_back: 1 };
    let got = fetched(&mut late, back, GroupOrder::Ascending).await;
    assert_eq!(got.objects, [locations([2]), vec![at(3, 0), at(3, 1)]].concat());
    let absolute = FetchKind::AbsoluteJoining { subscription, first_group: 3 };
    let got = fetched(&mut late, absolute, GroupOrder::Ascending).await;
    assert_eq!(got.objects, [at(3, 0), at(3, 1)]);
    open.object(2, 700).await;
    open.finish();
    let (objects, _) = late.next_subgroup().await.all().await;
    assert_eq!(objects, [2], "contiguous, and without overlap");
}

#[tokio::test]
async fn a_fetch_may_join_a_subscription_that_has_no_answer_yet() {
    let relay = TestRelay::start();
    let (mut publisher, _namespace, track) = with_publisher(&relay).await;
    let (mut subscriber, _request, _ok, _upstream) =
        first_subscriber(&relay, &mut publisher, &track, 1).await;
    publish_groups(&relay, &publisher, &mut subscriber, 0..3).await;
    let other = super::peer::track("live/cam", "audio");
    let mut late = relay.peer_of(Draft::D18).await;
    let subscribe =
        |request_id| Subscribe { request_id, track: other.clone(), parameters: Parameters::default() };
    let subscription = late.session.next_request_id();
    let mut pending = late.session.request(subscribe(subscription)).await.unwrap();
    let joining = FetchKind::RelativeJoining { subscription, groups_back: 0 };
    let mut request = ask(&late, joining, Parameters::default()).await;
    let (message, mut upstream) = patiently(publisher.requests.recv()).await.unwrap();
    let Message::Subscribe(asked) = message else { panic!("{message:?} instead of SUBSCRIBE") };
    assert_eq!(asked.track, other);
    let parameters = Parameters { largest_object: Some(at(4, 1)), ..Parameters::default() };
    let properties = Properties::default();
    upstream.send(SubscribeOk { track_alias: 2, parameters, properties }).await.unwrap();
    assert!(matches!(patiently(pending.answer()).await.unwrap(), Message::SubscribeOk(_)));
    let (message, mut fetching) = patiently(publisher.requests.recv()).await.unwrap();
    let Message::Fetch(fetch) = message else { panic!("{message:?} instead of FETCH") };
    let FetchKind::Standalone { range, .. } = fetch.kind else { panic!("not standalone") };
    assert_eq!(range, Filter::range(at(4, 0), at(4, 1)));
    fetching.refuse(code::Request::NOT_SUPPORTED, "no FETCH here").await.unwrap();
    let Message::FetchOk(ok) = patiently(request.answer()).await.unwrap() else { panic!("no FETCH_OK") };
    assert_eq!(ok.last, at(4, 1));
    // The relay refuses a joining FETCH that names an unknown subscription.
    let unknown = FetchKind::RelativeJoining { subscription: 400, groups_back: 0 };
    assert_eq!(refused(&late, unknown).await, code::Request::INVALID_JOINING_REQUEST_ID);
    drop(late.streams.recv().await);
}

#[tokio::test]
async fn fetch_with_fill_timeout_0_does_not_wait_for_an_unfinished_object() {
    let relay = TestRelay::start();
    let (mut publisher, _namespace, track) = with_publisher(&relay).await;
    let (mut subscriber, _request, _ok, _upstream) =
        first_subscriber(&relay, &mut publisher, &track, 1).await;
    publish_groups(&relay, &publisher, &mut subscriber, 0..1).await;
    let mut open = publisher.subgroup(header(1, 1)).await;
    open.object(0, 700).await;
    // The publisher sends an object's header and never the payload.
    open.stream.write_all(&[0, 100]).await.unwrap();
    relay.until_largest(at(1, 1)).await;
    let parameters = Parameters { fill_timeout: Some(0), ..Parameters::default() };
    let mut peer = relay.peer().await;
    let mut request = ask(&peer, standalone(&track, at(0, 0), at(1, 0)), parameters).await;
    assert!(matches!(patiently(request.answer()).await.unwrap(), Message::FetchOk(_)));
    let (_, mut stream) = patiently(peer.streams.recv()).await.unwrap();
    let mut parser = FetchParser::new(Draft::NEWEST, GroupOrder::Ascending, 0);
    let mut found = Vec::new();
    while let Some(chunk) = patiently(stream.chunk()).await.unwrap() {
        let mut rest = &chunk[..];
        while let Some(start) = parser.next(&mut rest).unwrap() {
            if let FetchItem::Object(object) = start.item {
                found.push(object.location);
            }
        }
    }
    assert_eq!(found, [locations([0]), vec![at(1, 0)]].concat());
}

/// The publisher has named objects in SUBSCRIBE_OK that are still on their way to the relay.
#[tokio::test]
async fn fetch_of_objects_that_the_publisher_has_named_waits_for_them() {
    let relay = TestRelay::start();
    let (mut publisher, _namespace, track) = with_publisher(&relay).await;
    let subscriber = relay.peer().await;
    let mut late = relay.peer().await;
    let named = Parameters { largest_object: Some(at(7, 3)), ..Parameters::default() };
    let accepting = publisher.accept_subscribe_with(&track, 1, named, Properties::default());
    let (_subscribed, _upstream) = tokio::join!(subscriber.subscribe(&track), accepting);
    let mut subgroup = publisher.subgroup(header(1, 7)).await;
    for id in 0..2 {
        subgroup.object(id, 700).await;
    }
    relay.until_largest(at(7, 1)).await;
    let requests = relay.status().totals.requests; // exact: all requests so far were answered
    let fetching = fetched(&mut late, standalone(&track, at(7, 2), at(7, 4)), GroupOrder::Ascending);
    let publishing = async {
        relay.until("the FETCH", |status| status.totals.requests > requests).await;
        for id in 2..4 {
            subgroup.object(id, 700).await;
        }
        subgroup
    };
    let (found, subgroup) = tokio::join!(fetching, publishing);
    assert_eq!((found.objects, found.unknown), (vec![at(7, 2), at(7, 3)], vec![]));
    subgroup.finish();
}

#[tokio::test]
async fn invalid_ranges_are_refused() {
    let relay = TestRelay::start();
    let (mut publisher, _namespace, track) = with_publisher(&relay).await;
    let (mut subscriber, _request, _ok, _upstream) =
        first_subscriber(&relay, &mut publisher, &track, 1).await;
    let old = relay.peer_of(Draft::D18).await;
    let _joined = old.subscribe(&track).await;
    let joining = FetchKind::RelativeJoining { subscription: 0, groups_back: 0 };
    assert_eq!(refused(&old, joining).await, code::Request::INVALID_RANGE, "nothing published yet");
    publish_groups(&relay, &publisher, &mut subscriber, 0..2).await;
    let unknown = FetchKind::RelativeJoining { subscription: 40, groups_back: 0 };
    assert_eq!(refused(&old, unknown).await, code::Request::INVALID_JOINING_REQUEST_ID);
    for peer in [&subscriber, &old] {
        for (start, end) in [(at(5, 0), at(6, 0)), (at(1, 2), at(1, 1))] {
            let code = refused(peer, standalone(&track, start, end)).await;
            assert_eq!(code, code::Request::INVALID_RANGE, "{start:?} to {end:?}");
        }
    }
    for range in [Filter::NextObject, Filter::NEXT_GROUP] {
        let nothing = FetchKind::Standalone { track: track.clone(), range };
        assert_eq!(refused(&subscriber, nothing).await, code::Request::INVALID_RANGE, "{range:?}");
    }
}

#[tokio::test]
async fn uncached_objects_are_fetched_from_upstream() {
    let relay = TestRelay::start();
    let (mut publisher, _namespace, track) = with_publisher(&relay).await;
    let (mut subscriber, _request, _ok, _upstream) =
        first_subscriber(&relay, &mut publisher, &track, 1).await;
    publish_groups(&relay, &publisher, &mut subscriber, 5..7).await;
    let mut peer = relay.peer().await;
    for order in [GroupOrder::Ascending, GroupOrder::Descending] {
        let fetching = fetched(&mut peer, standalone(&track, at(3, 0), at(6, 0)), order);
        let (got, ()) = tokio::join!(fetching, serve_upstream(&mut publisher, order));
        let groups: [u64; 4] = if order == GroupOrder::Ascending { [3, 4, 5, 6] } else { [6, 5, 4, 3] };
        assert_eq!(got.objects, locations(groups), "{order:?}");
        assert!(got.unknown.is_empty());
    }
}

/// Receives the relay's FETCH of groups 3 and 4 and serves it.
pub async fn serve_upstream(publisher: &mut TestPeer, order: GroupOrder) {
    let (message, mut request) = patiently(publisher.requests.recv()).await.unwrap();
    let Message::Fetch(fetch) = message else { panic!("{message:?} instead of FETCH") };
    let FetchKind::Standalone { range, .. } = fetch.kind else { panic!("not standalone") };
    assert_eq!((range.start(None), range.end()), (at(3, 0), Some(at(4, u64::MAX))));
    assert_eq!(fetch.parameters.group_order, Some(order));
    let ok = FetchOk {
        end_of_track: false,
        last: at(4, 2),
        parameters: Parameters::default(),
        properties: Properties::default(),
    };
    request.send(ok).await.unwrap();
    let mut stream = publisher.session.streams().open_uni().await.unwrap();
    let mut bytes = Vec::new();
    encode_fetch_header(fetch.request_id, &mut bytes);
    let mut encoder = FetchEncoder::new(publisher.session.draft(), order);
    let groups: [u64; 2] = if order == GroupOrder::Ascending { [3, 4] } else { [4, 3] };
    for location in locations(groups) {
        let body = payload(location.group, location.object, 900);
        let object = FetchObject {
            location,
            subgroup: Some(0),
            priority: 1,
            properties: Default::default(),
            payload_len: 900,
        };
        encoder.encode(&FetchItem::Object(object), &mut bytes);
        bytes.extend_from_slice(&body);
    }
    for piece in bytes.chunks(333) {
        stream.write_all(piece).await.unwrap();
    }
    stream.finish().unwrap();
}

#[tokio::test]
async fn gap_that_upstream_cannot_fill_is_reported_as_unknown() {
    let relay = TestRelay::start();
    let (mut publisher, _namespace, track) = with_publisher(&relay).await;
    let (mut subscriber, _request, _ok, _upstream) =
        first_subscriber(&relay, &mut publisher, &track, 1).await;
    publish_groups(&relay, &publisher, &mut subscriber, 5..6).await;
    let mut peer = relay.peer().await;
    let (got, ()) = tokio::join!(
        fetched(&mut peer, standalone(&track, at(3, 0), at(5, 0)), GroupOrder::Ascending),
        async {
            let (_, mut request) = patiently(publisher.requests.recv()).await.unwrap();
            request.refuse(code::Request::NOT_SUPPORTED, "no FETCH here").await.unwrap();
        }
    );
    assert_eq!(got.objects, locations([5]));
    assert_eq!(got.unknown.len(), 1);
    assert_eq!(got.unknown[0].group, 4);
}

#[tokio::test]
async fn a_fetch_needs_no_subscription() {
    let relay = TestRelay::start();
    let (mut publisher, _namespace, track) = with_publisher(&relay).await;
    let mut peer = relay.peer().await;
    let (got, ()) = tokio::join!(
        fetched(&mut peer, standalone(&track, at(3, 0), at(4, 0)), GroupOrder::Ascending),
        serve_upstream(&mut publisher, GroupOrder::Ascending)
    );
    assert_eq!(got.objects, locations([3, 4]));
}

/// The relay reads the publisher's response only as fast as the subscriber reads, and frees the bytes that were read.
#[tokio::test]
async fn fetch_from_upstream_is_read_only_as_fast_as_the_subscriber_reads() {
    const OBJECTS: u64 = 4000;
    const LEN: usize = 8000;
    let relay = TestRelay::start();
    let (mut publisher, _namespace, track) = with_publisher(&relay).await;
    let mut peer = relay.peer().await;
    let range = standalone(&track, at(3, 0), at(3, 0));
    let mut request = ask(&peer, range, Parameters::default()).await;
    let (message, mut upstream) = patiently(publisher.requests.recv()).await.unwrap();
    let Message::Fetch(fetch) = message else { panic!("{message:?} instead of FETCH") };
    let ok = FetchOk {
        end_of_track: false,
        last: at(3, OBJECTS - 1),
        parameters: Parameters::default(),
        properties: Properties::default(),
    };
    upstream.send(ok).await.unwrap();
    let mut bytes = Vec::new();
    encode_fetch_header(fetch.request_id, &mut bytes);
    let mut encoder = FetchEncoder::new(Draft::NEWEST, GroupOrder::Ascending);
    for object in 0..OBJECTS {
        let object = FetchObject {
            location: at(3, object),
            subgroup: Some(0),
            priority: 1,
            properties: Default::default(),
            payload_len: LEN as u64,
        };
        let body = payload(3, object.location.object, LEN);
        encoder.encode(&FetchItem::Object(object), &mut bytes);
        bytes.extend_from_slice(&body);
    }
    let mut stream = publisher.session.streams().open_uni().await.unwrap();
    let mut sending = tokio::spawn(async move {
        stream.write_all(&bytes).await.unwrap();
        stream.finish().unwrap();
        stream.stopped().await
    });
    // FETCH_OK is sent before the objects arrive.
    assert!(matches!(patiently(request.answer()).await.unwrap(), Message::FetchOk(_)));
    let (_, mut response) = patiently(peer.streams.recv()).await.unwrap();
    let sent = tokio::time::timeout(Duration::from_secs(3), &mut sending).await;
    assert!(sent.is_err(), "the publisher sent 32 MB that nobody reads");
    let mut parser = FetchParser::new(Draft::NEWEST, GroupOrder::Ascending, 0);
    let reading = async {
        let mut found = 0;
        let mut len = 0;
        while let Some(chunk) = patiently(response.chunk()).await.unwrap() {
            len += chunk.len();
            let mut rest = &chunk[..];
            while let Some(start) = parser.next(&mut rest).unwrap() {
                assert!(matches!(start.item, FetchItem::Object(object) if object.location == at(3, found)));
                found += 1;
            }
        }
        (found, len)
    };
    let got = reading.await;
    patiently(sending).await.unwrap().unwrap();
    assert_eq!(got.0, OBJECTS);
    assert!(got.1 >= OBJECTS as usize * LEN);
}
