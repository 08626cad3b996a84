//! Tests of objects from publishers to subscribers.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use millrace_moq::{
    Draft, Filter, GroupOrder, Message, ObjectDatagram, Parameters, Properties, Status, SubgroupHeader,
    SubgroupId, code,
    message::{Publish, RequestUpdate, Subscribe},
    property::TrackProperties,
};

use super::peer::{
    PeerStreamEnd, Rivals, TestPeer, TestRelay, at, first_subscriber, header, patiently, payload, track,
    with_publisher,
};

#[tokio::test]
async fn every_subscriber_gets_the_same_objects_over_one_upstream_subscription() {
    let relay = TestRelay::start();
    let (mut publisher, _namespace, track) = with_publisher(&relay).await;
    let (mut one, _request, _, _upstream) = first_subscriber(&relay, &mut publisher, &track, 7).await;
    let mut two = relay.peer().await;
    let _two = two.subscribe(&track).await;
    relay.until_ready().await;
    let mut subgroup = publisher.subgroup(header(7, 0)).await;
    subgroup.object(0, 1200).await;
    let mut at_one = one.next_subgroup().await;
    let mut at_two = two.next_subgroup().await;
    for received in [&mut at_one, &mut at_two] {
        assert_eq!(received.header.alias, 7, "the publisher's alias is free in this session");
        assert_eq!(received.objects(1).await, [0]);
    }
    for id in 1..50 {
        subgroup.object(id, 1200).await;
        assert_eq!(at_one.objects(1).await, [id]);
    }
    subgroup.finish();
    assert_eq!(at_one.all().await, (vec![], PeerStreamEnd::Fin));
    assert_eq!(at_two.all().await, ((1..50).collect(), PeerStreamEnd::Fin));
    assert!(publisher.requests.try_recv().is_err(), "one upstream subscription for all");
    relay.assert_forwarded();
}

#[tokio::test]
async fn one_relay_serves_several_addresses_of_both_families() {
    let mut v4 = Ipv4Addr::UNSPECIFIED;
    let mut v6 = Ipv6Addr::UNSPECIFIED;
    let relay = TestRelay::at(|host, config| {
        (v4, v6) = (host.v4(), host.v6());
        let ips = [v4.into(), Ipv4Addr::UNSPECIFIED.into(), v6.into(), IpAddr::from(Ipv6Addr::UNSPECIFIED)];
        config.listen = ips.into_iter().zip(0..).map(|(ip, nth)| (ip, host.port(nth)).into()).collect();
    });
    let (mut publisher, _namespace, track) = with_publisher(&relay).await;
    let (first, _request, _ok, _upstream) = first_subscriber(&relay, &mut publisher, &track, 1).await;
    let mut subscribers = vec![(first, _request)];
    let ports: Vec<_> = relay.server.local_addrs().iter().map(|addr| addr.port()).collect();
    let urls = [(v4.to_string(), 1), (format!("[{v6}]"), 2), (format!("[{v6}]"), 3)];
    for (host, index) in urls {
        let peer = TestPeer::connect(format!("moqt://{host}:{}", ports[index]).parse().unwrap()).await;
        let (request, _ok) = peer.subscribe(&track).await;
        subscribers.push((peer, request));
    }
    let mut subgroup = publisher.subgroup(header(1, 0)).await;
    for id in 0..20 {
        subgroup.object(id, 1200).await;
    }
    subgroup.finish();
    for (subscriber, _request) in &mut subscribers {
        assert_eq!(subscriber.next_subgroup().await.all().await, ((0..20).collect(), PeerStreamEnd::Fin));
    }
}

#[tokio::test]
async fn objects_are_forwarded_before_they_are_complete() {
    let relay = TestRelay::start();
    let (mut publisher, _namespace, track) = with_publisher(&relay).await;
    let (mut subscriber, _request, _ok, _upstream) =
        first_subscriber(&relay, &mut publisher, &track, 1).await;
    let mut subgroup = publisher.subgroup(header(1, 0)).await;
    // Object 0 has 1000 bytes, and 100 of them have arrived.
    subgroup.stream.write_all(&[0, 0x83, 0xe8]).await.unwrap();
    subgroup.stream.write_all(&payload(0, 0, 1000)[..100]).await.unwrap();
    let received = subscriber.next_subgroup().await;
    subgroup.stream.write_all(&payload(0, 0, 1000)[100..]).await.unwrap();
    subgroup.finish();
    assert_eq!(received.all().await, (vec![0], PeerStreamEnd::Fin));
}

#[tokio::test]
async fn a_session_can_publish_and_subscribe_to_itself() {
    let relay = TestRelay::start();
    let (mut peer, _namespace, track) = with_publisher(&relay).await;
    let request_id = peer.session.next_request_id();
    let message = Subscribe { request_id, track: track.clone(), parameters: Parameters::default() };
    let mut own = peer.session.request(message).await.unwrap();
    let _upstream = peer.accept_subscribe(&track, 3).await;
    assert!(matches!(patiently(own.answer()).await.unwrap(), Message::SubscribeOk(_)));
    let mut subgroup = peer.subgroup(header(3, 0)).await;
    subgroup.object(0, 10).await;
    subgroup.finish();
    assert_eq!(peer.next_subgroup().await.all().await, (vec![0], PeerStreamEnd::Fin));
}

#[tokio::test]
async fn subscription_filter_may_start_inside_a_group() {
    let relay = TestRelay::start();
    let (mut publisher, _namespace, track) = with_publisher(&relay).await;
    let (mut first, _request, _ok, _upstream) = first_subscriber(&relay, &mut publisher, &track, 1).await;
    let mut subgroup =
        publisher.subgroup(SubgroupHeader { subgroup: SubgroupId::FirstObject, ..header(1, 4) }).await;
    for id in 0..5 {
        subgroup.object(id, 300).await;
    }
    assert_eq!(first.next_subgroup().await.objects(5).await, [0, 1, 2, 3, 4]);
    relay.until_largest(at(4, 4)).await;
    let table = [
        (None, 0, true),
        (Some(Filter::AbsoluteStart(at(4, 2))), 2, false),
        (Some(Filter::AbsoluteStart(at(1, 0))), 0, true),
        (Some(Filter::NextObject), 5, false),
    ];
    let mut joined = Vec::new();
    for (filter, start, whole) in table {
        let peer = relay.peer().await;
        let parameters = Parameters { filter, ..Parameters::default() };
        let (request, ok) = peer.try_subscribe(&track, parameters).await.unwrap();
        assert_eq!(ok.parameters.largest_object, Some(at(4, 4)));
        joined.push((peer, request, start, whole));
    }
    let mut waiting = relay.peer().await;
    let next = Parameters { filter: Some(Filter::NEXT_GROUP), ..Parameters::default() };
    let _waiting = waiting.try_subscribe(&track, next).await.unwrap();
    subgroup.object(5, 300).await;
    subgroup.object(6, 300).await;
    subgroup.finish();
    let mut group = publisher.subgroup(header(1, 5)).await;
    group.object(0, 10).await;
    group.finish();
    for (mut peer, _request, start, whole) in joined {
        let received = peer.next_subgroup().await;
        assert_eq!(received.header.first_object, whole);
        let id = if whole { SubgroupId::FirstObject } else { SubgroupId::Explicit(0) };
        assert_eq!(received.header.subgroup, id);
        assert_eq!(received.all().await, ((start..7).collect(), PeerStreamEnd::Fin));
    }
    let received = waiting.next_subgroup().await;
    assert_eq!((received.header.group, received.all().await), (5, (vec![0], PeerStreamEnd::Fin)));
}

#[tokio::test]
async fn subscription_to_a_range_ends_with_its_last_group() {
    let relay = TestRelay::start();
    let (mut publisher, _namespace, track) = with_publisher(&relay).await;
    let mut subscriber = relay.peer_of(Draft::D19).await;
    let filter = Some(Filter::AbsoluteRange { start: at(1, 0), end_group: 2, end_object: None });
    let parameters = Parameters { filter, ..Parameters::default() };
    let (subscribed, _upstream) =
        tokio::join!(subscriber.try_subscribe(&track, parameters), publisher.accept_subscribe(&track, 1));
    let (mut request, _ok) = subscribed.unwrap();
    for group in 0..4 {
        let mut subgroup = publisher.subgroup(header(1, group)).await;
        subgroup.object(0, 10).await;
        subgroup.finish();
    }
    let mut groups = vec![subscriber.next_subgroup().await, subscriber.next_subgroup().await];
    groups.sort_by_key(|received| received.header.group);
    assert_eq!(groups.iter().map(|received| received.header.group).collect::<Vec<_>>(), [1, 2]);
    for received in groups {
        assert_eq!(received.all().await, (vec![0], PeerStreamEnd::Fin));
    }
    let Some(Message::PublishDone(done)) = patiently(request.next()).await.unwrap() else {
        panic!("no PUBLISH_DONE");
    };
    assert_eq!((done.code, done.stream_count), (code::Done::SUBSCRIPTION_ENDED, 2));
    subscriber.expect_no_stream().await;
}

#[tokio::test]
async fn forward_parameter_pauses_and_resumes_a_subscription() {
    let relay = TestRelay::start();
    let (mut publisher, _namespace, track) = with_publisher(&relay).await;
    let mut subscriber = relay.peer().await;
    let parameters = Parameters { forward: Some(false), ..Parameters::default() };
    let (subscribed, _upstream) =
        tokio::join!(subscriber.try_subscribe(&track, parameters), publisher.accept_subscribe(&track, 1));
    let (mut request, _ok) = subscribed.unwrap();
    let mut subgroup = publisher.subgroup(header(1, 0)).await;
    subgroup.object(0, 10).await;
    relay.until_largest(at(0, 0)).await;
    subscriber.expect_no_stream().await;
    let resume = |forward| RequestUpdate {
        request_id: subscriber.session.next_request_id(),
        parameters: Parameters { forward: Some(forward), ..Parameters::default() },
    };
    request.send(resume(true)).await.unwrap();
    let Message::RequestOk(ok) = patiently(request.answer()).await.unwrap() else { panic!("no answer") };
    assert_eq!(ok.parameters.largest_object, Some(at(0, 0)));
    subgroup.object(1, 10).await;
    let update = resume(false);
    let pause = 2;
    let mut received = subscriber.next_subgroup().await;
    assert_eq!(received.objects(1).await, [1], "an earlier object was sent");
    request.send(update).await.unwrap();
    patiently(request.answer()).await.unwrap();
    subgroup.object(pause, 10).await;
    assert_eq!(received.all().await, (vec![], PeerStreamEnd::Reset), "an object was left out");
}

#[tokio::test]
async fn published_tracks_are_kept_for_later_subscribers() {
    let relay = TestRelay::start();
    let publisher = relay.peer().await;
    let track = track("live/cam", "init");
    let properties = TrackProperties { publisher_priority: Some(5), ..TrackProperties::default() }.encode();
    let publish = Publish {
        request_id: publisher.session.next_request_id(),
        track: track.clone(),
        track_alias: 77,
        parameters: Parameters::default(),
        properties: properties.clone(),
    };
    let mut request = publisher.session.request(publish).await.unwrap();
    assert!(matches!(patiently(request.answer()).await.unwrap(), Message::RequestOk(_)));
    let mut subgroup = publisher.subgroup(header(77, 0)).await;
    subgroup.object(0, 4000).await;
    subgroup.finish();
    relay.until("the object in the cache", |status| status.tracks[0].objects_cached == 1).await;
    let mut subscriber = relay.peer().await;
    let (_request, ok) = subscriber.subscribe(&track).await;
    assert_eq!(ok.properties, properties, "track properties are copied");
    assert_eq!(subscriber.next_subgroup().await.all().await, (vec![0], PeerStreamEnd::Fin));
}

#[tokio::test]
async fn datagrams_are_forwarded_under_the_subscribers_alias() {
    let relay = TestRelay::start();
    let (mut publisher, _namespace, track) = with_publisher(&relay).await;
    let (mut subscriber, _request, ok, _upstream) = first_subscriber(&relay, &mut publisher, &track, 9).await;
    let datagram = ObjectDatagram {
        alias: 9,
        group: 3,
        object: 2,
        priority: Some(1),
        end_of_group: true,
        properties: Properties::default().as_bytes().clone(),
        status: None,
        payload: payload(3, 2, 500).into(),
    };
    let mut bytes = Vec::new();
    datagram.encode(&mut bytes);
    publisher.session.streams().send_datagram(bytes.into()).unwrap();
    let received = patiently(subscriber.datagrams.recv()).await.unwrap();
    assert_eq!(received, ObjectDatagram { alias: ok.track_alias, ..datagram });
}

#[tokio::test]
async fn datagrams_of_the_current_group_or_before_subscribe_ok_arrive() {
    let relay = TestRelay::start();
    let (mut publisher, _namespace, track) = with_publisher(&relay).await;
    let (_first, _request, _ok, _upstream) = first_subscriber(&relay, &mut publisher, &track, 9).await;
    let send = |alias: u64, object: u64| {
        let datagram = ObjectDatagram {
            alias,
            group: 1,
            object,
            priority: None,
            end_of_group: false,
            properties: Default::default(),
            status: None,
            payload: payload(1, object, 100).into(),
        };
        let mut bytes = Vec::new();
        datagram.encode(&mut bytes);
        publisher.session.streams().send_datagram(bytes.into()).unwrap();
    };
    (0..3).for_each(|object| send(9, object));
    relay.until("the objects to be cached", |status| status.tracks[0].objects_cached == 3).await;
    let mut late = relay.peer().await;
    let (_late, _) = late.subscribe(&track).await;
    let mut objects = Vec::new();
    for _ in 0..3 {
        objects.push(patiently(late.datagrams.recv()).await.unwrap().object);
    }
    objects.sort_unstable();
    assert_eq!(objects, [0, 1, 2]);

    let other = super::peer::track("live/cam", "audio");
    send(10, 7);
    let subscribing = late.subscribe(&other);
    let accepting = publisher.accept_subscribe(&other, 10);
    let _held = tokio::join!(subscribing, accepting);
    assert_eq!(patiently(late.datagrams.recv()).await.unwrap().object, 7);
}

#[tokio::test]
async fn object_statuses_and_empty_subgroups_are_forwarded() {
    let relay = TestRelay::start();
    let (mut publisher, _namespace, track) = with_publisher(&relay).await;
    let (mut subscriber, _request, _ok, _upstream) =
        first_subscriber(&relay, &mut publisher, &track, 1).await;
    publisher.subgroup(header(1, 0)).await.finish();
    assert_eq!(subscriber.next_subgroup().await.all().await, (vec![], PeerStreamEnd::Fin));
    let mut subgroup = publisher.subgroup(header(1, 1)).await;
    subgroup.object(0, 10).await;
    subgroup.status(1, Status::EndOfTrack).await;
    subgroup.finish();
    assert_eq!(subscriber.next_subgroup().await.all().await, (vec![0, 1], PeerStreamEnd::Fin));
}

/// When the next subscription begins, a subscriber possibly has not yet seen the end of the old one, or of its streams.
/// The new subscription therefore needs another track alias.
#[tokio::test]
async fn track_alias_is_not_reused_for_the_next_64_subscriptions() {
    let relay = TestRelay::start();
    let (mut publisher, _namespace, track) = with_publisher(&relay).await;
    let (subscriber, mut request, ok, _upstream) = first_subscriber(&relay, &mut publisher, &track, 1).await;
    // A second subscriber makes the relay keep the track when the first subscriber unsubscribes.
    let other = relay.peer().await;
    let _kept = other.subscribe(&track).await;
    let mut seen = vec![ok.track_alias];
    for _ in 0..100 {
        request.cancel();
        relay.until("one subscription", |status| status.tracks[0].subscribers == 1).await;
        let (next, ok) = subscriber.subscribe(&track).await;
        assert!(!seen.iter().rev().take(64).any(|alias| *alias == ok.track_alias), "{seen:?}");
        assert!(ok.track_alias < 128, "as many bytes as the publisher's");
        seen.push(ok.track_alias);
        request = next;
    }
}

#[tokio::test]
async fn tracks_with_equal_publisher_aliases_get_different_subscriber_aliases() {
    let relay = TestRelay::start();
    let mut subscriber = relay.peer().await;
    let mut publishers = Vec::new();
    let mut aliases = Vec::new();
    for namespace in ["a", "b"] {
        let mut publisher = relay.peer().await;
        let request = publisher.publish_namespace(namespace).await;
        let track = track(namespace, "video");
        let ((_sub, ok), _up) =
            tokio::join!(subscriber.subscribe(&track), publisher.accept_subscribe(&track, 5));
        aliases.push(ok.track_alias);
        publishers.push((publisher, request, _sub, _up));
    }
    assert_ne!(aliases[0], aliases[1]);
    for (index, (publisher, ..)) in publishers.iter().enumerate() {
        let mut subgroup = publisher.subgroup(header(5, index as u64)).await;
        subgroup.object(0, 10).await;
        subgroup.finish();
    }
    let mut seen = vec![];
    for _ in 0..2 {
        let received = subscriber.next_subgroup().await;
        seen.push((received.header.group, received.header.alias));
    }
    seen.sort();
    assert_eq!(seen, [(0, aliases[0]), (1, aliases[1])]);
}

#[tokio::test]
async fn objects_of_a_second_publisher_of_a_track_are_dropped_as_duplicates() {
    let relay = TestRelay::start();
    let Rivals { one, two, mut subscriber, requests: _held } = Rivals::from_relay(&relay).await;
    let mut original = one.subgroup(header(1, 0)).await;
    original.object(0, 100).await;
    let mut received = subscriber.next_subgroup().await;
    assert_eq!(received.objects(1).await, [0]);
    let mut copy = two.subgroup(header(2, 0)).await;
    copy.object(0, 100).await;
    original.object(1, 100).await;
    original.finish();
    assert_eq!(received.all().await, (vec![1], PeerStreamEnd::Fin));
    relay.until("the copy is refused", |status| status.drops["duplicate_subgroup"] == 1).await;
    subscriber.expect_no_stream().await;
}

#[tokio::test]
async fn descending_group_order_sends_the_newest_cached_group_first() {
    // The data plane's own tests check the order exactly. Here a subscription in descending order must get a backlog
    // with the newest group first.
    let relay = TestRelay::start();
    let (mut publisher, _namespace, track) = with_publisher(&relay).await;
    let (_first, _request, _ok, _upstream) = first_subscriber(&relay, &mut publisher, &track, 1).await;
    for group in 0..2 {
        let mut subgroup = publisher.subgroup(header(1, group)).await;
        subgroup.object(0, 100_000).await;
        subgroup.finish();
    }
    relay.until("both groups to be cached", |status| status.tracks[0].groups_cached == 2).await;
    let late = relay.peer().await;
    let parameters = Parameters { group_order: Some(GroupOrder::Descending), ..Parameters::default() };
    let (_request, ok) = late.try_subscribe(&track, parameters).await.unwrap();
    assert_eq!(ok.parameters.largest_object, Some(at(1, 0)));
}

/// Each shard has many subscribers, so the threads of the shards send at the same time.
#[tokio::test]
async fn objects_for_many_subscribers_on_several_shards_arrive_once_and_in_order() {
    let relay = TestRelay::with(|config| config.shards = 3);
    let (mut publisher, _namespace, track) = with_publisher(&relay).await;
    let (first, _request, _ok, _upstream) = first_subscriber(&relay, &mut publisher, &track, 1).await;
    let mut subscribers = vec![first];
    let mut requests = Vec::new();
    for _ in 0..59 {
        let subscriber = relay.peer().await;
        requests.push(subscriber.subscribe(&track).await);
        subscribers.push(subscriber);
    }
    for group in 0..5 {
        let mut subgroup = publisher.subgroup(header(1, group)).await;
        for id in 0..20 {
            subgroup.object(id, 1700).await;
        }
        subgroup.finish();
    }
    for subscriber in &mut subscribers {
        for group in 0..5 {
            let received = subscriber.next_subgroup().await;
            assert_eq!(received.header.group, group);
            assert_eq!(received.all().await, ((0..20).collect(), PeerStreamEnd::Fin));
        }
    }
    subscribers[0].expect_no_stream().await;
}
