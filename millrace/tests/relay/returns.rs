//! Tests of publishers that disappear without notice and return, as their subscribers see it.

use std::{net::Ipv6Addr, time::Duration};

use millrace_client::session::SessionRequest;
use millrace_moq::{
    Filter, Location, Message, Parameters, Properties, SubgroupHeader, TrackName, code,
    message::{Publish, RequestOk, TrackStatus},
};
use socket2::{Domain, Protocol, Type};

use super::groups::{expect_group, publish_group};
use super::peer::{
    PeerStreamEnd, TestPeer, TestRelay, at, expect_done, first_subscriber, header, patiently,
    track as track_of, with_publisher,
};

/// Time for which relays keep subscriptions without a publisher. It is longer than any test takes.
const LINGER: Duration = Duration::from_secs(600);

fn lingering() -> TestRelay {
    TestRelay::with(|config| config.linger = LINGER)
}

/// Drops all packets from and to the peer from now on, as if its process had been killed.
pub fn silence(peer: &TestPeer) {
    let socket = socket2::Socket::new(Domain::IPV6, Type::DGRAM, Some(Protocol::UDP)).unwrap();
    // The socket that replaces the peer's is IPv6-only, and the relay has an IPv4 address, so no packet passes.
    socket.set_only_v6(true).unwrap();
    socket.bind(&std::net::SocketAddr::from((Ipv6Addr::UNSPECIFIED, 0)).into()).unwrap();
    peer.session.endpoint().rebind(socket.into()).unwrap();
}

/// Connects another publisher of the track's namespace. The relay must subscribe to the track at it, since the track
/// has subscribers.
async fn come_back(relay: &TestRelay, track: &TrackName, alias: u64) -> (TestPeer, [SessionRequest; 2]) {
    let mut publisher = relay.peer().await;
    let namespace = publisher.publish_namespace("live/cam").await;
    let (upstream, _) = publisher.accept_subscribe(track, alias).await;
    (publisher, [namespace, upstream])
}

#[tokio::test]
async fn subscription_continues_when_its_publisher_returns() {
    let relay = lingering();
    let (mut publisher, _namespace, track) = with_publisher(&relay).await;
    let (mut subscriber, mut request, _ok, _upstream) =
        first_subscriber(&relay, &mut publisher, &track, 1).await;
    publish_group(&publisher, 1, 1000).await;
    expect_group(&mut subscriber, 1000).await;
    publisher.session.close(code::Session::NO_ERROR, "");
    relay.until("its end", |status| status.tracks[0].publishers == 0).await;
    let (again, _requests) = come_back(&relay, &track, 5).await;
    for group in [3000, 3001] {
        publish_group(&again, 5, group).await;
        expect_group(&mut subscriber, group).await;
    }
    relay.until_largest(at(3001, 1)).await;
    // A subscriber that joins now gets the newest group.
    let mut late = relay.peer().await;
    let (_late, ok) = late.subscribe(&track).await;
    assert_eq!(ok.parameters.largest_object, Some(at(3001, 1)));
    expect_group(&mut late, 3001).await;
    again.session.close(code::Session::NO_ERROR, "");
    relay.until("its end", |status| status.tracks[0].publishers == 0).await;
    subscriber.expect_no_stream().await;
    request.cancel();
}

/// The streams of a process that ends may be closed before its session is. The relay must not take that for the end of
/// the track.
#[tokio::test]
async fn subscription_waits_for_a_publisher_that_closes_its_stream_without_publish_done() {
    let relay = lingering();
    let (mut publisher, namespace, track) = with_publisher(&relay).await;
    let (mut subscriber, _request, _ok, mut upstream) =
        first_subscriber(&relay, &mut publisher, &track, 1).await;
    publish_group(&publisher, 1, 1000).await;
    expect_group(&mut subscriber, 1000).await;
    drop(namespace);
    upstream.cancel();
    relay.until("its end", |status| status.tracks[0].publishers == 0).await;
    assert_eq!(relay.status().tracks[0].subscribers, 1); // exact: its subscription would have ended with its publisher's
    let (again, _requests) = come_back(&relay, &track, 5).await;
    publish_group(&again, 5, 2000).await;
    expect_group(&mut subscriber, 2000).await;
}

#[tokio::test]
async fn subscription_waits_for_a_pushing_publisher_to_return() {
    let relay = lingering();
    let track = track_of("live/cam", "video");
    let push = async || {
        let publisher = relay.peer().await;
        let request_id = publisher.session.next_request_id();
        let (parameters, properties) = Default::default();
        let publish = Publish { request_id, track: track.clone(), track_alias: 1, parameters, properties };
        let mut request = publisher.session.request(publish).await.unwrap();
        patiently(request.answer()).await.unwrap();
        (publisher, request)
    };
    let (publisher, _request) = push().await;
    let mut subscriber = relay.peer().await;
    let (_subscription, _ok) = subscriber.subscribe(&track).await;
    publish_group(&publisher, 1, 1000).await;
    expect_group(&mut subscriber, 1000).await;
    publisher.session.close(code::Session::NO_ERROR, "");
    relay.until("its end", |status| status.tracks[0].publishers == 0).await;
    let (again, _again) = push().await;
    publish_group(&again, 1, 2000).await;
    expect_group(&mut subscriber, 2000).await;
}

#[tokio::test]
async fn subscription_ends_if_no_publisher_returns_within_the_linger_time() {
    let relay = TestRelay::with(|config| config.linger = Duration::from_millis(100));
    let (mut publisher, _namespace, track) = with_publisher(&relay).await;
    let (mut subscriber, mut request, _ok, _upstream) =
        first_subscriber(&relay, &mut publisher, &track, 1).await;
    publish_group(&publisher, 1, 0).await;
    expect_group(&mut subscriber, 0).await;
    publisher.session.close(code::Session::NO_ERROR, "");
    assert_eq!(expect_done(&mut request).await.code, code::Done::INTERNAL_ERROR);
}

/// If a publisher ends its track with PUBLISH_DONE, the relay ends subscriptions and does not wait for the publisher to
/// return.
#[tokio::test]
async fn subscription_ends_when_the_publisher_ends_its_track() {
    let relay = lingering();
    let (mut publisher, _namespace, track) = with_publisher(&relay).await;
    let (_subscriber, mut request, _ok, mut upstream) =
        first_subscriber(&relay, &mut publisher, &track, 1).await;
    let code = code::Done::TRACK_ENDED;
    let reason = String::new();
    let done = millrace_moq::message::PublishDone { code, stream_count: 0, reason };
    upstream.send(done).await.unwrap();
    assert_eq!(expect_done(&mut request).await.code, code::Done::TRACK_ENDED);
}

/// The silent session of the publisher stays open until the idle timeout, which is half a minute here.
#[tokio::test]
async fn returning_publisher_takes_over_from_its_silent_session() {
    let relay = lingering();
    let (mut publisher, _namespace, track) = with_publisher(&relay).await;
    let (mut subscriber, _request, _ok, _upstream) =
        first_subscriber(&relay, &mut publisher, &track, 1).await;
    // The publisher stops in the middle of a group.
    let mut subgroup = publisher.subgroup(header(1, 1000)).await;
    subgroup.object(0, 700).await;
    let mut broken = subscriber.next_subgroup().await;
    assert_eq!(broken.objects(1).await, [0]);
    silence(&publisher);
    let (again, _requests) = come_back(&relay, &track, 5).await;
    publish_group(&again, 5, 2000).await;
    assert_eq!(broken.all().await.1, PeerStreamEnd::Reset);
    expect_group(&mut subscriber, 2000).await;
    let status = relay
        .until("the returned publisher to feed the track", |status| status.tracks[0].publishers == 1)
        .await;
    assert_eq!(status.drops["standby"], 0, "{:?}", status.drops);
    assert!(status.sessions.iter().filter(|session| session.publisher).count() >= 1);
}

/// A publisher has a track only after it has read the first bytes from its encoder.
#[tokio::test]
async fn publisher_that_answers_does_not_exist_is_subscribed_to_again() {
    let relay = lingering();
    let (mut publisher, _namespace, track) = with_publisher(&relay).await;
    let (mut subscriber, _request, _ok, _upstream) =
        first_subscriber(&relay, &mut publisher, &track, 1).await;
    publish_group(&publisher, 1, 1000).await;
    expect_group(&mut subscriber, 1000).await;
    silence(&publisher);
    let mut again = relay.peer().await;
    let _namespace = again.publish_namespace("live/cam").await;
    let (message, mut request) = patiently(again.requests.recv()).await.unwrap();
    assert!(matches!(message, Message::Subscribe(_)), "{message:?}");
    request.refuse(code::Request::DOES_NOT_EXIST, "not yet").await.unwrap();
    let (_upstream, _) = again.accept_subscribe(&track, 5).await;
    publish_group(&again, 5, 2000).await;
    expect_group(&mut subscriber, 2000).await;
}

/// moq-pub numbers its groups from 0 after a restart. Players continue with the lower numbers, and players that join
/// after the restart get no stale group.
#[tokio::test]
async fn returning_publisher_with_group_ids_from_0_restarts_the_track() {
    let relay = lingering();
    let (mut publisher, _namespace, track) = with_publisher(&relay).await;
    let (mut subscriber, _request, _ok, _upstream) =
        first_subscriber(&relay, &mut publisher, &track, 1).await;
    for group in 0..3 {
        publish_group(&publisher, 1, group).await;
        expect_group(&mut subscriber, group).await;
    }
    relay.until_largest(at(2, 1)).await;
    let mut watcher = relay.peer().await;
    let next = Parameters { filter: Some(Filter::NEXT_GROUP), ..Parameters::default() };
    let (_watching, _ok) = watcher.try_subscribe(&track, next).await.unwrap();
    silence(&publisher);
    let (again, _requests) = come_back(&relay, &track, 5).await;
    for group in 0..2 {
        publish_group(&again, 5, group).await;
        expect_group(&mut subscriber, group).await;
        expect_group(&mut watcher, group).await;
    }
    relay.until_largest(at(1, 1)).await;
    let mut late = relay.peer().await;
    let (_late, ok) = late.subscribe(&track).await;
    assert_eq!(ok.parameters.largest_object, Some(at(1, 1)));
    expect_group(&mut late, 1).await;
}

/// A player such as moq-sub ends its session when a stream is reset. If no publisher has the rest of a group, the relay
/// must therefore end the group's stream with FIN, and the subscription must continue.
#[tokio::test]
async fn stream_of_an_unfinished_group_gets_fin_when_group_ids_restart() {
    let relay = lingering();
    let (mut publisher, _namespace, track) = with_publisher(&relay).await;
    let (mut subscriber, _request, _ok, _upstream) =
        first_subscriber(&relay, &mut publisher, &track, 1).await;
    publish_group(&publisher, 1, 0).await;
    expect_group(&mut subscriber, 0).await;
    let open = SubgroupHeader { end_of_group: false, ..header(1, 1) };
    let mut subgroup = publisher.subgroup(open).await;
    subgroup.object(0, 700).await;
    let mut broken = subscriber.next_subgroup().await;
    assert_eq!(broken.objects(1).await, [0]);
    silence(&publisher);
    let (again, _requests) = come_back(&relay, &track, 5).await;
    for group in 0..3 {
        publish_group(&again, 5, group).await;
        expect_group(&mut subscriber, group).await;
    }
    assert_eq!(broken.all().await, (vec![], PeerStreamEnd::Fin));
}

/// Checks that the next message on the stream of the relay's SUBSCRIBE is REQUEST_UPDATE. Its FORWARD parameter must be
/// `forward`, which says whether the relay wants objects.
async fn expect_forward(upstream: &mut SessionRequest, forward: bool) {
    match patiently(upstream.next()).await.unwrap() {
        Some(Message::RequestUpdate(update)) => assert_eq!(update.parameters.forward, Some(forward)),
        other => panic!("{other:?} instead of REQUEST_UPDATE"),
    }
    upstream.send(RequestOk::default()).await.unwrap();
}

#[tokio::test]
async fn second_publisher_stands_by_until_the_first_ends() {
    let relay = lingering();
    let (mut publisher, _namespace, track) = with_publisher(&relay).await;
    let (mut subscriber, _request, _ok, _upstream) =
        first_subscriber(&relay, &mut publisher, &track, 1).await;
    publish_group(&publisher, 1, 1000).await;
    expect_group(&mut subscriber, 1000).await;
    relay.until_largest(at(1000, 1)).await;
    let (second, [_second_namespace, mut asked]) = come_back(&relay, &track, 5).await;
    publish_group(&second, 5, 7000).await;
    expect_forward(&mut asked, false).await;
    // The viewers keep the groups that they already have.
    publish_group(&publisher, 1, 1001).await;
    expect_group(&mut subscriber, 1001).await;
    let status = relay.until("one publisher to stand by", |status| status.drops["standby"] > 0).await;
    assert_eq!(status.tracks[0].publishers, 2);
    publisher.session.close(code::Session::NO_ERROR, "");
    expect_forward(&mut asked, true).await;
    publish_group(&second, 5, 7001).await;
    expect_group(&mut subscriber, 7001).await;
}

/// A standby publisher takes over soon after the first one has fallen silent, however long the session's idle timeout
/// is.
#[tokio::test]
async fn standby_takes_over_from_silent_publisher() {
    let relay = lingering();
    let (mut publisher, _namespace, track) = with_publisher(&relay).await;
    let (mut subscriber, _request, _ok, _upstream) =
        first_subscriber(&relay, &mut publisher, &track, 1).await;
    publish_group(&publisher, 1, 1000).await;
    expect_group(&mut subscriber, 1000).await;
    relay.until_largest(at(1000, 1)).await;
    let (second, [_second_namespace, mut asked]) = come_back(&relay, &track, 5).await;
    publish_group(&second, 5, 7000).await;
    expect_forward(&mut asked, false).await;
    silence(&publisher);
    expect_forward(&mut asked, true).await;
    publish_group(&second, 5, 7001).await;
    expect_group(&mut subscriber, 7001).await;
}

/// A returning publisher can ask for the track's largest location with TRACK_STATUS. If its clock has gone back, it can
/// thus still number its groups above the earlier ones.
#[tokio::test]
async fn track_status_reports_largest_of_absent_publisher() {
    let relay = lingering();
    let (mut publisher, _namespace, track) = with_publisher(&relay).await;
    let (mut subscriber, _request, _ok, _upstream) =
        first_subscriber(&relay, &mut publisher, &track, 1).await;
    publish_group(&publisher, 1, 1000).await;
    expect_group(&mut subscriber, 1000).await;
    relay.until_largest(at(1000, 1)).await;
    publisher.session.close(code::Session::NO_ERROR, "");
    relay.until("its end", |status| status.tracks[0].publishers == 0).await;
    let asking = relay.peer().await;
    let request_id = asking.session.next_request_id();
    let status = TrackStatus { request_id, track: track.clone(), parameters: Parameters::default() };
    let mut request = asking.session.request(status).await.unwrap();
    let Message::RequestOk(ok) = patiently(request.answer()).await.unwrap() else { panic!("no REQUEST_OK") };
    assert_eq!(ok.parameters.largest_object, Some(Location::new(1000, 1)));
    assert_eq!(ok.properties, Properties::default());
}
