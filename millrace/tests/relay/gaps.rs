//! Tests of what a track's publisher sent while it had no session: its new session, or the next relay, is asked for it.

use std::time::Duration;

use millrace_client::session::SessionRequest;
use millrace_moq::{
    FetchItem, FetchObject, GroupOrder, Location, Message, Parameters, Properties, TrackName, code,
    data::{FetchEncoder, RangeEnd, encode_fetch_header},
    message::{FetchKind, FetchOk},
};

use super::goaway::goaway;
use super::groups::{expect_group, publish_group};
use super::peer::{
    PeerStreamEnd, ReceivedSubgroup, TestPeer, TestRelay, at, first_subscriber, header, patiently, payload,
    with_publisher,
};
use super::returns::silence;
use super::sources::{edge_of, only_upstream, relay_behind_a_way};

/// Length of each object's payload, in bytes.
const LEN: usize = 700;

/// A publisher that was away in the middle of group 1000, its subscriber, and the rest of what keeps them.
struct Scene {
    relay: TestRelay,
    again: TestPeer,
    subscriber: TestPeer,
    /// The subscriber's stream of group 1000. Object 0 has arrived on it.
    broken: ReceivedSubgroup,
    _requests: Vec<SessionRequest>,
}

impl Scene {
    /// Publishes a part of group 1000 with a first session, and accepts the relay's SUBSCRIBE with a second one, which
    /// has objects up to `largest`.
    async fn with_publisher_back(largest: Location) -> Self {
        let relay = TestRelay::with(|config| config.linger = Duration::from_secs(600));
        let (mut publisher, namespace, track) = with_publisher(&relay).await;
        let (mut subscriber, request, _ok, upstream) =
            first_subscriber(&relay, &mut publisher, &track, 1).await;
        let mut subgroup = publisher.subgroup(header(1, 1000)).await;
        subgroup.object(0, LEN).await;
        let mut broken = subscriber.next_subgroup().await;
        assert_eq!(broken.objects(1).await, [0]);
        relay.until_largest(at(1000, 0)).await;
        publisher.session.close(code::Session::NO_ERROR, "");
        relay.until("its end", |status| status.tracks[0].publishers == 0).await;
        let mut again = relay.peer().await;
        let returned = again.publish_namespace("live/cam").await;
        let accepted = accept(&mut again, &track, largest).await;
        let _requests = vec![namespace, request, upstream, returned, accepted];
        Self { relay, again, subscriber, broken, _requests }
    }

    async fn expect_group(&mut self, group: u64) {
        expect_group(&mut self.subscriber, group).await;
    }
}

/// Accepts the relay's SUBSCRIBE under alias 5, for a track with objects up to `largest`.
pub async fn accept(publisher: &mut TestPeer, track: &TrackName, largest: Location) -> SessionRequest {
    let parameters = Parameters { largest_object: Some(largest), ..Parameters::default() };
    publisher.accept_subscribe_with(track, 5, parameters, Properties::default()).await.0
}

/// Receives the relay's FETCH, and checks its range.
async fn expect_fetch(publisher: &mut TestPeer, first: Location, last: Location) -> (SessionRequest, u64) {
    let (message, request) = patiently(publisher.requests.recv()).await.unwrap();
    let Message::Fetch(fetch) = message else { panic!("{message:?} instead of FETCH") };
    let FetchKind::Standalone { range, .. } = fetch.kind else { panic!("not standalone") };
    assert_eq!((range.start(None), range.end()), (first, Some(last)));
    (request, fetch.request_id)
}

/// Answers a FETCH with these objects, of subgroup 0, and unknown ranges. The range of the answer ends at the last of
/// them.
pub async fn serve(publisher: &TestPeer, fetch: (SessionRequest, u64), items: &[Item]) {
    let end = |item: &Item| match *item {
        Item::Object(location, _) | Item::Unknown(location) => location,
    };
    serve_to(publisher, fetch, items.iter().map(end).max().unwrap(), items).await;
}

/// Answers a FETCH like [`serve`]. The range of the answer ends at `last`.
async fn serve_to(publisher: &TestPeer, fetch: (SessionRequest, u64), last: Location, items: &[Item]) {
    let (mut request, id) = fetch;
    let parameters = Parameters::default();
    let ok = FetchOk { end_of_track: false, last, parameters, properties: Properties::default() };
    request.send(ok).await.unwrap();
    let mut bytes = Vec::new();
    encode_fetch_header(id, &mut bytes);
    let mut encoder = FetchEncoder::new(publisher.session.draft(), GroupOrder::Ascending);
    for item in items {
        match *item {
            Item::Object(location, len) => {
                let object = FetchObject {
                    location,
                    subgroup: Some(0),
                    priority: 128,
                    properties: Default::default(),
                    payload_len: len as u64,
                };
                encoder.encode(&FetchItem::Object(object), &mut bytes);
                bytes.extend(payload(location.group, location.object, len));
            }
            Item::Unknown(last) => {
                encoder.encode(&FetchItem::Range { last, end: RangeEnd::Unknown }, &mut bytes);
            }
        }
    }
    let mut stream = publisher.session.streams().open_uni().await.unwrap();
    stream.write_all(&bytes).await.unwrap();
    stream.finish().unwrap();
}

/// An item of a FETCH response: an object with the length of its payload, or the end of an unknown range.
pub enum Item {
    Object(Location, usize),
    Unknown(Location),
}

pub const fn object(group: u64, object: u64) -> Item {
    Item::Object(at(group, object), LEN)
}

/// The publisher returns with group 1003. The relay fetches the rest of group 1000 and groups 1001 and 1002. Each object
/// reaches the subscriber once, the rest of group 1000 on the stream that has its beginning.
#[tokio::test]
async fn objects_published_while_the_publisher_was_away_are_fetched_from_it() {
    let mut scene = Scene::with_publisher_back(at(1003, 1)).await;
    publish_group(&scene.again, 5, 1003).await;
    scene.expect_group(1003).await;
    let fetch = expect_fetch(&mut scene.again, at(1000, 1), at(1002, u64::MAX)).await;
    let items = [object(1000, 1), object(1001, 0), object(1001, 1), object(1002, 0), object(1002, 1)];
    serve(&scene.again, fetch, &items).await;
    assert_eq!(scene.broken.all().await, (vec![1], PeerStreamEnd::Fin));
    for group in [1001, 1002] {
        expect_group(&mut scene.subscriber, group).await;
    }
    publish_group(&scene.again, 5, 1004).await;
    expect_group(&mut scene.subscriber, 1004).await;
    scene.subscriber.expect_no_stream().await;
    let status = scene.relay.until("its counters", |status| status.totals.gap_objects == 5).await;
    assert_eq!((status.totals.gaps_asked, status.totals.gaps_refused, status.totals.gaps_cut), (1, 0, 0));
    // The filled cache answers for all of it: this FETCH is not passed on.
    let mut late = scene.relay.peer().await;
    let track = super::peer::track("live/cam", "video");
    let range = millrace_moq::Filter::range(at(1000, 0), at(1003, u64::MAX));
    let all = super::fetch::fetched(&mut late, FetchKind::Standalone { track, range }, GroupOrder::Ascending);
    assert_eq!(all.await.objects.len(), 8);
}

/// A publisher's session is lost when group 1002 has arrived, and nothing of group 1001.
#[tokio::test]
async fn group_of_which_nothing_came_before_its_source_was_lost_is_fetched() {
    let relay = TestRelay::with(|config| config.linger = Duration::from_secs(600));
    let (mut publisher, _namespace, track) = with_publisher(&relay).await;
    let (mut subscriber, _request, _, _upstream) = first_subscriber(&relay, &mut publisher, &track, 1).await;
    for group in [1000, 1002] {
        publish_group(&publisher, 1, group).await;
        expect_group(&mut subscriber, group).await;
    }
    relay.until_largest(at(1002, 1)).await;
    publisher.session.close(code::Session::NO_ERROR, "");
    relay.until("its end", |status| status.tracks[0].publishers == 0).await;
    let mut again = relay.peer().await;
    let _namespace = again.publish_namespace("live/cam").await;
    let _upstream = accept(&mut again, &track, at(1003, 1)).await;
    publish_group(&again, 5, 1003).await;
    expect_group(&mut subscriber, 1003).await;
    let fetch = expect_fetch(&mut again, at(1001, 0), at(1002, u64::MAX)).await;
    serve(&again, fetch, &[object(1001, 0), object(1001, 1), object(1002, 0), object(1002, 1)]).await;
    expect_group(&mut subscriber, 1001).await;
    subscriber.expect_no_stream().await;
}

/// The publisher is back before it has begun another group. It sends the same group from its beginning.
#[tokio::test]
async fn copy_of_a_group_that_comes_after_its_source_was_lost_continues_the_same_stream() {
    let mut scene = Scene::with_publisher_back(at(1000, 1)).await;
    let mut copy = scene.again.subgroup(header(5, 1000)).await;
    for id in 0..3 {
        copy.object(id, LEN).await;
    }
    copy.finish();
    assert_eq!(scene.broken.all().await, (vec![1, 2], PeerStreamEnd::Fin));
    publish_group(&scene.again, 5, 1001).await;
    expect_group(&mut scene.subscriber, 1001).await;
    scene.subscriber.expect_no_stream().await;
}

/// Objects that the publisher does not know at the third FETCH are missing, and the subgroup that they belong to is
/// incomplete.
#[tokio::test]
async fn unknown_objects_of_a_gap_end_their_subgroup_as_incomplete() {
    let mut scene = Scene::with_publisher_back(at(1003, 1)).await;
    publish_group(&scene.again, 5, 1003).await;
    scene.expect_group(1003).await;
    for attempt in 0..3 {
        let fetch = expect_fetch(&mut scene.again, at(1000, 1), at(1002, u64::MAX)).await;
        serve(&scene.again, fetch, &[Item::Unknown(at(1001, 9)), object(1002, 0), object(1002, 1)]).await;
        if attempt == 0 {
            expect_group(&mut scene.subscriber, 1002).await;
        }
    }
    assert_eq!(scene.broken.all().await, (vec![], PeerStreamEnd::Reset));
    scene.subscriber.expect_no_stream().await;
}

/// A source may be a relay that has lost its own source as well, and has no later group. Its answer ends early, and does
/// not say that the group that broke off is complete.
#[tokio::test]
async fn answer_that_ends_before_the_gap_leaves_the_broken_group_open() {
    let mut scene = Scene::with_publisher_back(at(1003, 1)).await;
    publish_group(&scene.again, 5, 1003).await;
    scene.expect_group(1003).await;
    let fetch = expect_fetch(&mut scene.again, at(1000, 1), at(1002, u64::MAX)).await;
    serve_to(&scene.again, fetch, at(1000, 0), &[]).await;
    let fetch = expect_fetch(&mut scene.again, at(1000, 1), at(1002, u64::MAX)).await;
    let items = [object(1000, 1), object(1001, 0), object(1001, 1), object(1002, 0), object(1002, 1)];
    serve(&scene.again, fetch, &items).await;
    assert_eq!(scene.broken.all().await, (vec![1], PeerStreamEnd::Fin));
    for group in [1001, 1002] {
        expect_group(&mut scene.subscriber, group).await;
    }
}

/// A source may be a relay that is about to get the objects.
#[tokio::test]
async fn unknown_objects_of_a_gap_are_fetched_again() {
    let mut scene = Scene::with_publisher_back(at(1002, 1)).await;
    publish_group(&scene.again, 5, 1002).await;
    scene.expect_group(1002).await;
    let fetch = expect_fetch(&mut scene.again, at(1000, 1), at(1001, u64::MAX)).await;
    serve(&scene.again, fetch, &[Item::Unknown(at(1000, u64::MAX)), object(1001, 0), object(1001, 1)]).await;
    scene.expect_group(1001).await;
    let fetch = expect_fetch(&mut scene.again, at(1000, 1), at(1001, u64::MAX)).await;
    serve(&scene.again, fetch, &[object(1000, 1), object(1001, 0), object(1001, 1)]).await;
    assert_eq!(scene.broken.all().await, (vec![1], PeerStreamEnd::Fin));
    scene.subscriber.expect_no_stream().await;
    let status = scene.relay.until("its counters", |status| status.totals.gap_objects == 3).await;
    assert_eq!(status.totals.gaps_asked, 2);
}

#[tokio::test]
async fn publisher_that_refuses_the_fetch_of_a_gap_continues_its_track() {
    let mut scene = Scene::with_publisher_back(at(1003, 1)).await;
    publish_group(&scene.again, 5, 1003).await;
    scene.expect_group(1003).await;
    let (mut fetch, _) = expect_fetch(&mut scene.again, at(1000, 1), at(1002, u64::MAX)).await;
    fetch.refuse(code::Request::NOT_SUPPORTED, "no FETCH here").await.unwrap();
    assert_eq!(scene.broken.all().await, (vec![], PeerStreamEnd::Reset));
    publish_group(&scene.again, 5, 1004).await;
    expect_group(&mut scene.subscriber, 1004).await;
    let status = scene.relay.until("it is counted", |status| status.totals.gaps_refused == 1).await;
    assert_eq!(status.totals.gap_objects, 0);
}

/// A response with an object outside the requested range is dropped, with all that follows in it.
#[tokio::test]
async fn response_that_leaves_the_range_of_a_gap_is_cut_off() {
    let mut scene = Scene::with_publisher_back(at(1003, 1)).await;
    publish_group(&scene.again, 5, 1003).await;
    scene.expect_group(1003).await;
    let fetch = expect_fetch(&mut scene.again, at(1000, 1), at(1002, u64::MAX)).await;
    serve(&scene.again, fetch, &[object(1003, 7), object(1004, 0)]).await;
    assert_eq!(scene.broken.all().await, (vec![], PeerStreamEnd::Reset));
    let status = scene.relay.until("it is counted", |status| status.totals.gaps_cut == 1).await;
    assert_eq!(status.totals.gap_objects, 0);
    publish_group(&scene.again, 5, 1004).await;
    expect_group(&mut scene.subscriber, 1004).await;
    scene.subscriber.expect_no_stream().await;
}

/// A second session of the publisher begins with group 1003 while the first one has sent group 1000 and one object of
/// group 1001. Then the first one falls silent, or leaves.
async fn fetches_what_the_leading_publisher_owes(leave: impl FnOnce(&TestPeer)) {
    let relay = TestRelay::with(|config| config.linger = Duration::from_secs(600));
    let (mut publisher, _namespace, track) = with_publisher(&relay).await;
    let (mut subscriber, _request, _ok, _upstream) =
        first_subscriber(&relay, &mut publisher, &track, 1).await;
    publish_group(&publisher, 1, 1000).await;
    expect_group(&mut subscriber, 1000).await;
    let mut subgroup = publisher.subgroup(header(1, 1001)).await;
    subgroup.object(0, LEN).await;
    let mut broken = subscriber.next_subgroup().await;
    assert_eq!(broken.objects(1).await, [0]);
    relay.until_largest(at(1001, 0)).await;
    let mut second = relay.peer().await;
    let _second_namespace = second.publish_namespace("live/cam").await;
    let _accepted = accept(&mut second, &track, at(1003, 1)).await;
    publish_group(&second, 5, 1003).await;
    expect_group(&mut subscriber, 1003).await;
    leave(&publisher);
    let fetch = expect_fetch(&mut second, at(1001, 1), at(1002, u64::MAX)).await;
    serve(&second, fetch, &[object(1001, 1), object(1002, 0), object(1002, 1)]).await;
    assert_eq!(broken.all().await, (vec![1], PeerStreamEnd::Fin));
    expect_group(&mut subscriber, 1002).await;
    publish_group(&second, 5, 1004).await;
    expect_group(&mut subscriber, 1004).await;
    subscriber.expect_no_stream().await;
    let status = relay.until("its counters", |status| status.totals.gap_objects == 3).await;
    assert_eq!((status.totals.gaps_asked, status.tracks[0].publishers), (1, 1));
}

#[tokio::test]
async fn objects_that_only_a_silent_publisher_had_are_fetched_from_the_one_that_leads_after_it() {
    fetches_what_the_leading_publisher_owes(silence).await;
}

#[tokio::test]
async fn objects_that_only_a_lost_publisher_had_are_fetched_from_the_one_that_leads_after_it() {
    fetches_what_the_leading_publisher_owes(|publisher| publisher.session.close(code::Session::NO_ERROR, ""))
        .await;
}

/// A publisher moves the subscription, answers, and never sends what it owes on the old one.
#[tokio::test]
async fn objects_that_a_leaving_source_does_not_deliver_are_fetched_from_the_next() {
    let relay = TestRelay::start();
    let (mut publisher, _namespace, track) = with_publisher(&relay).await;
    let (mut subscriber, _request, _ok, mut upstream) =
        first_subscriber(&relay, &mut publisher, &track, 1).await;
    publish_group(&publisher, 1, 1000).await;
    expect_group(&mut subscriber, 1000).await;
    relay.until_largest(at(1000, 1)).await;
    upstream.send(goaway()).await.unwrap();
    let _moved = accept(&mut publisher, &track, at(1002, 1)).await;
    publish_group(&publisher, 5, 1002).await;
    expect_group(&mut subscriber, 1002).await;
    let fetch = expect_fetch(&mut publisher, at(1001, 0), at(1001, u64::MAX)).await;
    serve(&publisher, fetch, &[object(1001, 0), object(1001, 1)]).await;
    expect_group(&mut subscriber, 1001).await;
    subscriber.expect_no_stream().await;
}

/// The second publisher begins with the group after the one that the first has ended with.
#[tokio::test]
async fn nothing_is_fetched_from_a_publisher_that_leads_and_lacks_nothing() {
    let relay = TestRelay::with(|config| config.linger = Duration::from_secs(600));
    let (mut publisher, _namespace, track) = with_publisher(&relay).await;
    let (mut subscriber, _request, _ok, _upstream) =
        first_subscriber(&relay, &mut publisher, &track, 1).await;
    publish_group(&publisher, 1, 1000).await;
    expect_group(&mut subscriber, 1000).await;
    relay.until_largest(at(1000, 1)).await;
    let mut second = relay.peer().await;
    let _second_namespace = second.publish_namespace("live/cam").await;
    let _accepted = accept(&mut second, &track, at(1000, 1)).await;
    publish_group(&second, 5, 1001).await;
    expect_group(&mut subscriber, 1001).await;
    publisher.session.close(code::Session::NO_ERROR, "");
    relay.until("its end", |status| status.tracks[0].publishers == 1).await;
    publish_group(&second, 5, 1002).await;
    expect_group(&mut subscriber, 1002).await;
    subscriber.expect_no_stream().await;
    // exact: a FETCH would have been counted while no stream came
    assert_eq!(relay.status().totals.gaps_asked, 0);
}

/// The edge's next upstream relay has only objects that arrived after the edge had asked. So it passes the edge's FETCH
/// on to its publisher.
#[tokio::test]
async fn next_upstream_relay_passes_the_fetch_of_a_gap_to_its_publisher() {
    let (first, way) = relay_behind_a_way();
    let second = TestRelay::start();
    let edge = edge_of(vec![way.url(&first), second.url()]);
    edge.until("the first", |status| only_upstream(status) == Some(way.addr.port())).await;
    let (mut before, _namespace, track) = with_publisher(&first).await;
    let (mut after, _other_namespace, _) = with_publisher(&second).await;
    let mut subscriber = edge.peer().await;
    let waiting = Parameters { rendezvous_timeout: Some(60_000), ..Parameters::default() };
    let (subscribed, (_upstream, _)) =
        tokio::join!(subscriber.try_subscribe(&track, waiting), before.accept_subscribe(&track, 1));
    let _request = subscribed.unwrap();
    publish_group(&before, 1, 1000).await;
    expect_group(&mut subscriber, 1000).await;
    way.cut(true);
    let _moved = accept(&mut after, &track, at(1003, 1)).await;
    publish_group(&after, 5, 1003).await;
    expect_group(&mut subscriber, 1003).await;
    let fetch = expect_fetch(&mut after, at(1001, 0), at(1002, u64::MAX)).await;
    serve(&after, fetch, &[object(1001, 0), object(1001, 1), object(1002, 0), object(1002, 1)]).await;
    for group in [1001, 1002] {
        expect_group(&mut subscriber, group).await;
    }
    subscriber.expect_no_stream().await;
    edge.until("its counter", |status| status.totals.gap_objects == 4).await;
}
