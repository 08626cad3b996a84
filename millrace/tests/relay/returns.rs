//! Publishers that go without a word and come back, and what their subscribers see of that.

use std::{net::Ipv6Addr, time::Duration};

use millrace_client::session::Request;
use millrace_moq::{
    Filter, Location, Message, Parameters, Properties, SubgroupHeader, TrackName, code,
    message::{Publish, RequestOk, TrackStatus},
};
use socket2::{Domain, Protocol, Type};

use super::peer::{
    End, Peer, Relay, at, expect_done, first_subscriber, header, patiently, track as track_of, with_publisher,
};

/// Longer than any test takes.
const LINGER: Duration = Duration::from_secs(600);

fn lingering() -> Relay {
    Relay::with(|config| config.linger = LINGER)
}

/// From now on nothing reaches the peer and nothing leaves it, as if it had been killed.
fn silence(peer: &Peer) {
    let socket = socket2::Socket::new(Domain::IPV6, Type::DGRAM, Some(Protocol::UDP)).unwrap();
    // Relays are at addresses of IPv4.
    socket.set_only_v6(true).unwrap();
    socket.bind(&std::net::SocketAddr::from((Ipv6Addr::UNSPECIFIED, 0)).into()).unwrap();
    peer.session.endpoint().rebind(socket.into()).unwrap();
}

/// Publishes a whole group of two objects.
async fn publish(publisher: &Peer, alias: u64, group: u64) {
    let mut subgroup = publisher.subgroup(header(alias, group)).await;
    subgroup.object(0, 700).await;
    subgroup.object(1, 700).await;
    subgroup.finish();
}

/// The next group is this one, and is there once.
async fn expect_group(subscriber: &mut Peer, group: u64) {
    let received = subscriber.next_subgroup().await;
    assert_eq!((received.header.group, received.all().await), (group, (vec![0, 1], End::Fin)));
}

/// Has another publisher come to the track, which the relay asks for what is subscribed to.
async fn come_back(relay: &Relay, track: &TrackName, alias: u64) -> (Peer, [Request; 2]) {
    let mut publisher = relay.peer().await;
    let namespace = publisher.publish_namespace("live/cam").await;
    let (upstream, _) = publisher.accept_subscribe(track, alias).await;
    (publisher, [namespace, upstream])
}

#[tokio::test]
async fn publisher_that_comes_back_is_a_gap_for_subscribers_and_no_end() {
    let relay = lingering();
    let (mut publisher, _namespace, track) = with_publisher(&relay).await;
    let (mut subscriber, mut request, _ok, _upstream) =
        first_subscriber(&relay, &mut publisher, &track, 1).await;
    publish(&publisher, 1, 1000).await;
    expect_group(&mut subscriber, 1000).await;
    publisher.session.close(code::Session::NO_ERROR, "");
    relay.until("it is gone", |status| status.tracks[0].publishers == 0).await;
    let (again, _requests) = come_back(&relay, &track, 5).await;
    for group in [3000, 3001] {
        publish(&again, 5, group).await;
        expect_group(&mut subscriber, group).await;
    }
    // Who comes now gets the newest group.
    let mut late = relay.peer().await;
    let (_late, ok) = late.subscribe(&track).await;
    assert_eq!(ok.parameters.largest_object, Some(at(3001, 1)));
    expect_group(&mut late, 3001).await;
    again.session.close(code::Session::NO_ERROR, "");
    relay.until("it is gone", |status| status.tracks[0].publishers == 0).await;
    subscriber.expect_no_stream().await;
    request.cancel();
}

#[tokio::test]
async fn publisher_that_pushes_is_waited_for_as_well() {
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
    publish(&publisher, 1, 1000).await;
    expect_group(&mut subscriber, 1000).await;
    publisher.session.close(code::Session::NO_ERROR, "");
    relay.until("it is gone", |status| status.tracks[0].publishers == 0).await;
    let (again, _again) = push().await;
    publish(&again, 1, 2000).await;
    expect_group(&mut subscriber, 2000).await;
}

#[tokio::test]
async fn subscriptions_end_when_nobody_comes_back_in_time() {
    let relay = Relay::with(|config| config.linger = Duration::from_millis(100));
    let (mut publisher, _namespace, track) = with_publisher(&relay).await;
    let (mut subscriber, mut request, _ok, _upstream) =
        first_subscriber(&relay, &mut publisher, &track, 1).await;
    publish(&publisher, 1, 0).await;
    expect_group(&mut subscriber, 0).await;
    publisher.session.close(code::Session::NO_ERROR, "");
    assert_eq!(expect_done(&mut request).await.code, code::Done::INTERNAL_ERROR);
}

/// A publisher that says that its track is over is not waited for.
#[tokio::test]
async fn end_of_a_track_is_an_end() {
    let relay = lingering();
    let (mut publisher, _namespace, track) = with_publisher(&relay).await;
    let (_subscriber, mut request, _ok, mut upstream) =
        first_subscriber(&relay, &mut publisher, &track, 1).await;
    let (code, reason) = (code::Done::TRACK_ENDED, String::new());
    let done = millrace_moq::message::PublishDone { code, stream_count: 0, reason };
    upstream.send(done).await.unwrap();
    assert_eq!(expect_done(&mut request).await.code, code::Done::TRACK_ENDED);
}

/// Its session is not over for as long as the idle time-out takes: half a minute here.
#[tokio::test]
async fn publisher_that_comes_back_takes_over_from_its_silent_session() {
    let relay = lingering();
    let (mut publisher, _namespace, track) = with_publisher(&relay).await;
    let (mut subscriber, _request, _ok, _upstream) =
        first_subscriber(&relay, &mut publisher, &track, 1).await;
    // It breaks off in the middle of a group.
    let mut subgroup = publisher.subgroup(header(1, 1000)).await;
    subgroup.object(0, 700).await;
    let mut broken = subscriber.next_subgroup().await;
    assert_eq!(broken.objects(1).await, [0]);
    silence(&publisher);
    let (again, _requests) = come_back(&relay, &track, 5).await;
    publish(&again, 5, 2000).await;
    assert_eq!(broken.all().await.1, End::Reset);
    expect_group(&mut subscriber, 2000).await;
    let status = relay.until("it is the publisher", |status| status.tracks[0].publishers == 1).await;
    assert_eq!(status.drops["standby"], 0, "{:?}", status.drops);
    assert!(status.sessions.iter().filter(|session| session.publisher).count() >= 1);
}

/// A publisher of media has a track once it has read what its encoder begins with.
#[tokio::test]
async fn publisher_that_has_not_made_its_track_yet_is_asked_again() {
    let relay = lingering();
    let (mut publisher, _namespace, track) = with_publisher(&relay).await;
    let (mut subscriber, _request, _ok, _upstream) =
        first_subscriber(&relay, &mut publisher, &track, 1).await;
    publish(&publisher, 1, 1000).await;
    expect_group(&mut subscriber, 1000).await;
    silence(&publisher);
    let mut again = relay.peer().await;
    let _namespace = again.publish_namespace("live/cam").await;
    let (message, mut request) = patiently(again.requests.recv()).await.unwrap();
    assert!(matches!(message, Message::Subscribe(_)), "{message:?}");
    request.refuse(code::Request::DOES_NOT_EXIST, "not yet").await.unwrap();
    let (_upstream, _) = again.accept_subscribe(&track, 5).await;
    publish(&again, 5, 2000).await;
    expect_group(&mut subscriber, 2000).await;
}

/// As moq-pub does: players that were there go on with the lower numbers, and those who come later have no stale group.
#[tokio::test]
async fn publisher_that_numbers_from_zero_again_begins_the_track_anew() {
    let relay = lingering();
    let (mut publisher, _namespace, track) = with_publisher(&relay).await;
    let (mut subscriber, _request, _ok, _upstream) =
        first_subscriber(&relay, &mut publisher, &track, 1).await;
    for group in 0..3 {
        publish(&publisher, 1, group).await;
        expect_group(&mut subscriber, group).await;
    }
    let mut watcher = relay.peer().await;
    let next = Parameters { filter: Some(Filter::NEXT_GROUP), ..Parameters::default() };
    let (_watching, _ok) = watcher.try_subscribe(&track, next).await.unwrap();
    silence(&publisher);
    let (again, _requests) = come_back(&relay, &track, 5).await;
    for group in 0..2 {
        publish(&again, 5, group).await;
        expect_group(&mut subscriber, group).await;
        expect_group(&mut watcher, group).await;
    }
    relay.until_largest(at(1, 1)).await;
    let mut late = relay.peer().await;
    let (_late, ok) = late.subscribe(&track).await;
    assert_eq!(ok.parameters.largest_object, Some(at(1, 1)));
    expect_group(&mut late, 1).await;
}

/// A player that ends its session at a reset, as moq-sub does, goes on. So it cannot be asked for the rest, which nobody has.
#[tokio::test]
async fn group_left_unfinished_is_complete_once_its_publisher_numbers_anew() {
    let relay = lingering();
    let (mut publisher, _namespace, track) = with_publisher(&relay).await;
    let (mut subscriber, _request, _ok, _upstream) =
        first_subscriber(&relay, &mut publisher, &track, 1).await;
    publish(&publisher, 1, 0).await;
    expect_group(&mut subscriber, 0).await;
    let open = SubgroupHeader { end_of_group: false, ..header(1, 1) };
    let mut subgroup = publisher.subgroup(open).await;
    subgroup.object(0, 700).await;
    let mut broken = subscriber.next_subgroup().await;
    assert_eq!(broken.objects(1).await, [0]);
    silence(&publisher);
    let (again, _requests) = come_back(&relay, &track, 5).await;
    for group in 0..3 {
        publish(&again, 5, group).await;
        expect_group(&mut subscriber, group).await;
    }
    assert_eq!(broken.all().await, (vec![], End::Fin));
}

/// The next message on the relay's request is one that asks for objects, or for none.
async fn expect_forward(upstream: &mut Request, forward: bool) {
    match patiently(upstream.next()).await.unwrap() {
        Some(Message::RequestUpdate(update)) => assert_eq!(update.parameters.forward, Some(forward)),
        other => panic!("{other:?} instead of REQUEST_UPDATE"),
    }
    upstream.send(RequestOk::default()).await.unwrap();
}

#[tokio::test]
async fn second_publisher_with_other_groups_is_told_to_stand_by_until_the_first_is_gone() {
    let relay = lingering();
    let (mut publisher, _namespace, track) = with_publisher(&relay).await;
    let (mut subscriber, _request, _ok, _upstream) =
        first_subscriber(&relay, &mut publisher, &track, 1).await;
    publish(&publisher, 1, 1000).await;
    expect_group(&mut subscriber, 1000).await;
    relay.until_largest(at(1000, 1)).await;
    let (second, [_second_namespace, mut asked]) = come_back(&relay, &track, 5).await;
    publish(&second, 5, 7000).await;
    expect_forward(&mut asked, false).await;
    // The viewers have what they had.
    publish(&publisher, 1, 1001).await;
    expect_group(&mut subscriber, 1001).await;
    let status = relay.until("one stands by", |status| status.drops["standby"] > 0).await;
    assert_eq!(status.tracks[0].publishers, 2);
    publisher.session.close(code::Session::NO_ERROR, "");
    expect_forward(&mut asked, true).await;
    publish(&second, 5, 7001).await;
    expect_group(&mut subscriber, 7001).await;
}

/// A standby takes over soon after the first publisher falls silent, however long that session's time-out is.
#[tokio::test]
async fn standby_takes_over_from_a_publisher_that_falls_silent() {
    let relay = lingering();
    let (mut publisher, _namespace, track) = with_publisher(&relay).await;
    let (mut subscriber, _request, _ok, _upstream) =
        first_subscriber(&relay, &mut publisher, &track, 1).await;
    publish(&publisher, 1, 1000).await;
    expect_group(&mut subscriber, 1000).await;
    relay.until_largest(at(1000, 1)).await;
    let (second, [_second_namespace, mut asked]) = come_back(&relay, &track, 5).await;
    publish(&second, 5, 7000).await;
    expect_forward(&mut asked, false).await;
    silence(&publisher);
    expect_forward(&mut asked, true).await;
    publish(&second, 5, 7001).await;
    expect_group(&mut subscriber, 7001).await;
}

/// So that a publisher whose clock has gone back numbers above what was.
#[tokio::test]
async fn track_status_says_where_a_track_was_whose_publisher_is_away() {
    let relay = lingering();
    let (mut publisher, _namespace, track) = with_publisher(&relay).await;
    let (mut subscriber, _request, _ok, _upstream) =
        first_subscriber(&relay, &mut publisher, &track, 1).await;
    publish(&publisher, 1, 1000).await;
    expect_group(&mut subscriber, 1000).await;
    relay.until_largest(at(1000, 1)).await;
    publisher.session.close(code::Session::NO_ERROR, "");
    relay.until("it is gone", |status| status.tracks[0].publishers == 0).await;
    let asking = relay.peer().await;
    let request_id = asking.session.next_request_id();
    let status = TrackStatus { request_id, track: track.clone(), parameters: Parameters::default() };
    let mut request = asking.session.request(status).await.unwrap();
    let Message::RequestOk(ok) = patiently(request.answer()).await.unwrap() else { panic!("no REQUEST_OK") };
    assert_eq!(ok.parameters.largest_object, Some(Location::new(1000, 1)));
    assert_eq!(ok.properties, Properties::default());
}
