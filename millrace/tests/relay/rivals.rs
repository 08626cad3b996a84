//! Tests of publishers that could harm each other.

use std::time::Duration;

use millrace_moq::{Filter, Parameters, Properties, code, message::Publish};

use super::groups::{expect_group, publish_group};
use super::peer::{
    PeerStreamEnd, ReceivedSubgroup, Rivals, TestPeer, TestRelay, at, first_subscriber, header, patiently,
    track as track_of, with_publisher,
};
use super::returns::silence;

#[tokio::test]
async fn false_largest_location_of_a_publisher_is_ignored() {
    let relay = TestRelay::start();
    let (mut publisher, _namespace, track) = with_publisher(&relay).await;
    let mut subscriber = relay.peer().await;
    let claim = Parameters { largest_object: Some(at(u64::MAX, u64::MAX)), ..Parameters::default() };
    let ((_request, _), (_upstream, _)) = tokio::join!(
        subscriber.subscribe(&track),
        publisher.accept_subscribe_with(&track, 1, claim, Properties::default())
    );
    for group in 5..8 {
        let mut subgroup = publisher.subgroup(header(1, group)).await;
        subgroup.object(0, 700).await;
        subgroup.finish();
        let received = subscriber.next_subgroup().await;
        assert_eq!((received.header.group, received.all().await), (group, (vec![0], PeerStreamEnd::Fin)));
    }
    // A later subscriber, too, must get the true largest location, and not the false one that the publisher claimed.
    relay.until_largest(at(7, 0)).await;
    let mut late = relay.peer().await;
    let next = Parameters { filter: Some(Filter::NEXT_GROUP), ..Parameters::default() };
    let (_request, ok) = late.try_subscribe(&track, next).await.unwrap();
    assert_eq!(ok.parameters.largest_object, Some(at(7, 0)));
    let mut subgroup = publisher.subgroup(header(1, 8)).await;
    subgroup.object(0, 700).await;
    subgroup.finish();
    for peer in [&mut subscriber, &mut late] {
        let received = peer.next_subgroup().await;
        assert_eq!((received.header.group, received.all().await), (8, (vec![0], PeerStreamEnd::Fin)));
    }
}

/// An object with a far larger group ID counts as the track's largest location only until the track continues with its
/// former IDs.
#[tokio::test]
async fn object_with_a_far_larger_group_id_does_not_block_later_groups() {
    let relay = TestRelay::start();
    let (mut publisher, _namespace, track) = with_publisher(&relay).await;
    let (mut subscriber, _request, _ok, _upstream) =
        first_subscriber(&relay, &mut publisher, &track, 1).await;
    let mut late = relay.peer().await;
    let mut requests = Vec::new();
    for group in [5, 6, u64::MAX, 7, 8, 9, 10] {
        let mut subgroup = publisher.subgroup(header(1, group)).await;
        subgroup.object(0, 700).await;
        subgroup.finish();
        let received = subscriber.next_subgroup().await;
        assert_eq!((received.header.group, received.all().await), (group, (vec![0], PeerStreamEnd::Fin)));
        if group == u64::MAX {
            relay.until_largest(at(group, 0)).await;
            let next = Parameters { filter: Some(Filter::NextObject), ..Parameters::default() };
            requests.push(late.try_subscribe(&track, next).await.unwrap());
        }
    }
    relay.until_largest(at(10, 0)).await;
    for group in [9, 10] {
        let received = late.next_subgroup().await;
        assert_eq!((received.header.group, received.all().await), (group, (vec![0], PeerStreamEnd::Fin)));
    }
    let mut later = relay.peer().await;
    let (_later, ok) = later.subscribe(&track).await;
    assert_eq!(ok.parameters.largest_object, Some(at(10, 0)));
    let received = later.next_subgroup().await;
    assert_eq!((received.header.group, received.all().await), (10, (vec![0], PeerStreamEnd::Fin)));
}

/// Publishes a copy of group 0 at the second publisher, whose first object has this length. Waits until the relay has
/// received all of it.
async fn publish_copy(two: &TestPeer, subscriber: &mut TestPeer, len: usize) {
    let mut copy = two.subgroup(header(2, 0)).await;
    copy.object(0, len).await;
    for id in 1..4 {
        copy.object(id, 100).await;
    }
    copy.finish();
    // This object is sent after the copy of group 0, on the same connection. When the object has arrived, the copy has
    // arrived, too.
    let mut next = two.subgroup(header(2, 1)).await;
    next.object(0, 100).await;
    next.finish();
    let after = subscriber.next_subgroup().await;
    assert_eq!((after.header.group, after.all().await), (1, (vec![0], PeerStreamEnd::Fin)));
}

/// Resets the first publisher's group 0 after one object of 100 bytes, while a copy waits whose first object has this
/// length. Returns the group at the subscriber, which has got that object.
async fn reset_beside_copy(rivals: &mut Rivals, copied_len: usize) -> ReceivedSubgroup {
    let mut first = rivals.one.subgroup(header(1, 0)).await;
    first.object(0, 100).await;
    let mut received = rivals.subscriber.next_subgroup().await;
    assert_eq!(received.objects(1).await, [0]);
    publish_copy(&rivals.two, &mut rivals.subscriber, copied_len).await;
    first.reset(code::Reset::INTERNAL_ERROR);
    received
}

#[tokio::test]
async fn copy_continues_a_subgroup_that_the_first_publisher_has_reset() {
    let relay = TestRelay::start();
    let mut rivals = Rivals::from_relay(&relay).await;
    let received = reset_beside_copy(&mut rivals, 100).await;
    assert_eq!(received.all().await, (vec![1, 2, 3], PeerStreamEnd::Fin));
    rivals.subscriber.expect_no_stream().await;
    // exact: the count of duplicate subgroups is final, since the relay has received the whole second copy
    assert_eq!(relay.status().drops["duplicate_subgroup"], 0);
}

/// A publisher with the same group IDs and other objects is no copy. Subscribers continue with its next group.
#[tokio::test]
async fn publisher_with_other_objects_does_not_continue_a_subgroup() {
    let relay = TestRelay::start();
    let mut rivals = Rivals::from_relay(&relay).await;
    let received = reset_beside_copy(&mut rivals, 101).await;
    assert_eq!(received.all().await, (vec![], PeerStreamEnd::Reset));
    relay.until("the copy to be dropped", |status| status.drops["duplicate_subgroup"] == 1).await;
    rivals.subscriber.expect_no_stream().await;
}

/// The publisher that leads is gone without a word in the middle of a group, as if its process had been killed.
#[tokio::test]
async fn copy_continues_the_subgroup_of_a_silent_publisher() {
    let relay = TestRelay::start();
    let Rivals { one, two, mut subscriber, requests: mut held } = Rivals::from_relay(&relay).await;
    relay.until_ready().await;
    for group in 0..3 {
        publish_group(&one, 1, group).await;
        expect_group(&mut subscriber, group).await;
    }
    let mut first = one.subgroup(header(1, 3)).await;
    for id in 0..20 {
        first.object(id, 700).await;
    }
    let mut received = subscriber.next_subgroup().await;
    assert_eq!((received.header.group, received.objects(20).await), (3, (0..20).collect()));
    // The stream that arrives first is the one that is forwarded.
    let mut copy = two.subgroup(header(2, 3)).await;
    silence(&one);
    for id in 0..25 {
        copy.object(id, 700).await;
    }
    assert_eq!(received.objects(5).await, (20..25).collect::<Vec<_>>());
    copy.object(25, 700).await;
    copy.finish();
    assert_eq!(received.all().await, (vec![25], PeerStreamEnd::Fin));
    for group in 4..8 {
        publish_group(&two, 2, group).await;
        expect_group(&mut subscriber, group).await;
    }
    relay.assert_forwarded();
    let status =
        relay.until("the silent publisher to be given up", |status| status.tracks[0].publishers == 1).await;
    assert_eq!(status.drops["duplicate_subgroup"], 0);
    subscriber.expect_no_stream().await;
    let end = tokio::time::timeout(Duration::ZERO, held[2].answer()).await;
    assert!(end.is_err(), "the subscription has ended: {end:?}");
}

/// A client's share of the cache also includes the groups of its sessions that have ended.
#[tokio::test]
async fn cache_limit_of_a_client_includes_groups_of_its_ended_sessions() {
    const LEN: usize = 300_000;
    let relay = TestRelay::with(|config| {
        config.access.limits.share.cache_bytes = 1 << 20;
        // With this cache age, no group is dropped because it is too old.
        config.cache_age = Duration::from_secs(600);
    });
    for session in 0..3 {
        let publisher = relay.peer().await;
        let request_id = publisher.session.next_request_id();
        let (parameters, properties) = Default::default();
        let track = track_of("share", &session.to_string());
        let publish = Publish { request_id, track, track_alias: 1, parameters, properties };
        let mut request = publisher.session.request(publish).await.unwrap();
        patiently(request.answer()).await.unwrap();
        for group in 0..6 {
            let mut subgroup = publisher.subgroup(header(1, group)).await;
            subgroup.object(0, LEN).await;
            subgroup.finish();
        }
        let received = (session + 1) * 6;
        relay.until("all groups to have arrived", |status| status.totals.objects_received == received).await;
        relay.until("memory within the share", |status| status.cache.bytes <= 1 << 20).await;
        // exact: the cache size is final, since all groups have arrived and the cache is within its limit
        let status = relay.status();
        assert_eq!(status.access.clients[0].cache_bytes, status.cache.bytes);
        publisher.session.close(code::Session::NO_ERROR, "");
        relay.until("its end", |status| status.sessions.is_empty()).await;
    }
    // exact: the cache's group counts are final, since all publishers have disconnected
    let cache = relay.status().cache;
    assert_eq!((cache.groups + cache.evicted, cache.over_share), (18, cache.evicted));
}

#[tokio::test]
async fn publisher_that_fills_the_cache_evicts_no_groups_of_another_publisher() {
    const GROUPS: u64 = 3;
    let relay = TestRelay::with(|config| {
        config.cache_bytes = 4 << 20;
        // With this cache age, no group is dropped because it is too old.
        config.cache_age = Duration::from_secs(600);
    });
    let (mut publisher, _namespace, track) = with_publisher(&relay).await;
    let (mut subscriber, _request, _ok, _upstream) =
        first_subscriber(&relay, &mut publisher, &track, 1).await;
    for group in 0..GROUPS {
        let mut subgroup = publisher.subgroup(header(1, group)).await;
        subgroup.object(0, 700).await;
        subgroup.finish();
        assert_eq!(subscriber.next_subgroup().await.all().await.1, PeerStreamEnd::Fin);
    }
    let greedy = relay.peer().await;
    let mut requests = Vec::new();
    for track_alias in 0..10 {
        let request_id = greedy.session.next_request_id();
        let track = track_of("greedy", &track_alias.to_string());
        let (parameters, properties) = Default::default();
        let publish = Publish { request_id, track, track_alias, parameters, properties };
        let mut request = greedy.session.request(publish).await.unwrap();
        patiently(request.answer()).await.unwrap();
        let mut subgroup = greedy.subgroup(header(track_alias, 0)).await;
        subgroup.object(0, 1 << 20).await;
        requests.push((request, subgroup));
    }
    let status = relay.until("groups are dropped", |status| status.cache.evicted >= 6).await;
    let held = status.tracks.iter().find(|other| other.name == track.to_string()).unwrap();
    assert_eq!(held.groups_cached, GROUPS, "{status:#?}");
}
