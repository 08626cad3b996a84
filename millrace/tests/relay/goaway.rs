//! Tests of publishers that send GOAWAY. Their tracks must continue from another publisher without gap or duplicate.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use millrace_client::session::{Error, SessionRequest};
use millrace_moq::{Parameters, message::GoAway};
use millrace_relay_daemon::config::UpstreamConfig;

use super::peer::{PeerStreamEnd, TestPeer, TestRelay, first_subscriber, header, patiently, with_publisher};

pub fn goaway() -> GoAway {
    GoAway { uri: String::new(), timeout: 0, request_id: None }
}

async fn publish(publisher: &TestPeer, alias: u64, group: u64) {
    let mut subgroup = publisher.subgroup(header(alias, group)).await;
    for id in 0..3 {
        subgroup.object(id, 700).await;
    }
    subgroup.finish();
}

async fn expect_group(subscriber: &mut TestPeer, group: u64) {
    let received = subscriber.next_subgroup().await;
    assert_eq!((received.header.group, received.all().await), (group, (vec![0, 1, 2], PeerStreamEnd::Fin)));
}

/// Checks that the relay has cancelled the given request to the publisher.
async fn cancelled(mut request: SessionRequest) {
    let next = patiently(request.next()).await;
    assert!(matches!(next, Err(Error::Cancelled)), "{next:?} instead of a reset");
}

#[tokio::test]
async fn goaway_of_a_publisher_moves_the_subscription() {
    let relay = TestRelay::start();
    let (mut publisher, _namespace, track) = with_publisher(&relay).await;
    let (mut subscriber, _request, _ok, mut upstream) =
        first_subscriber(&relay, &mut publisher, &track, 1).await;
    for alias in 1..4 {
        let group = alias * 10;
        let mut open = publisher.subgroup(header(alias, group)).await;
        open.object(0, 700).await;
        let mut received = subscriber.next_subgroup().await;
        assert_eq!((received.header.group, received.objects(1).await), (group, vec![0]));
        relay.until("userspace's count", |status| status.tracks[0].largest == Some((group, 0))).await;
        upstream.send(goaway()).await.unwrap();
        let (moved, _) = publisher.accept_subscribe(&track, alias + 1).await;
        relay.until("both", |status| status.tracks[0].publishers == 2).await;
        // The group that is being sent is completed on the old subscription, and later groups arrive on the new
        // subscription.
        open.object(1, 700).await;
        open.object(2, 700).await;
        open.finish();
        assert_eq!(received.all().await, (vec![1, 2], PeerStreamEnd::Fin));
        // The relay refuses a new group on the old subscription when it reads the group's header.
        drop(publisher.subgroup(header(alias, group + 1)).await);
        relay.until("one group to be refused", |status| status.drops["handed_over_subgroup"] == alias).await;
        publish(&publisher, alias + 1, group + 1).await;
        expect_group(&mut subscriber, group + 1).await;
        cancelled(std::mem::replace(&mut upstream, moved)).await;
        relay.until("one", |status| status.tracks[0].publishers == 1).await;
    }
    subscriber.expect_no_stream().await;
    assert!(publisher.requests.try_recv().is_err());
}

/// The publisher refuses the SUBSCRIBE with which the relay replaces the old one, so the old subscription must
/// continue.
#[tokio::test]
async fn subscription_continues_if_moving_it_is_refused() {
    let relay = TestRelay::start();
    let (mut publisher, _namespace, track) = with_publisher(&relay).await;
    let (mut subscriber, _request, _ok, mut upstream) =
        first_subscriber(&relay, &mut publisher, &track, 1).await;
    upstream.send(goaway()).await.unwrap();
    let (_, mut again) = patiently(publisher.requests.recv()).await.unwrap();
    again.refuse(millrace_moq::code::Request::DUPLICATE_SUBSCRIPTION, "one is enough").await.unwrap();
    for group in 0..3 {
        publish(&publisher, 1, group).await;
        expect_group(&mut subscriber, group).await;
    }
    // exact: the drop counter is final, since all published objects have arrived
    assert_eq!(relay.status().drops["handed_over_subgroup"], 0);
}

#[tokio::test]
async fn edge_moves_to_goaway_uri_of_its_upstream() {
    let second = TestRelay::start();
    let first = TestRelay::with(|config| {
        config.goaway_uri = Some(second.url());
        config.drain_timeout = Duration::from_secs(300);
    });
    let url = first.url();
    let edge = TestRelay::at(|host, config| {
        config.listen = vec![SocketAddr::new(host.v4().into(), host.port(1))];
        config.upstream =
            Some(UpstreamConfig { urls: vec![url], tls_root: None, token: None, identity: None });
    });
    edge.until("connected", |status| status.sessions.iter().any(|session| session.upstream)).await;
    let (mut before, _namespace, track) = with_publisher(&first).await;
    let (mut after, _other_namespace, _) = with_publisher(&second).await;
    let mut subscriber = edge.peer().await;
    let waiting = Parameters { rendezvous_timeout: Some(60_000), ..Parameters::default() };
    let (subscribed, (_upstream, _)) =
        tokio::join!(subscriber.try_subscribe(&track, waiting), before.accept_subscribe(&track, 1));
    let _request = subscribed.unwrap();
    publish(&before, 1, 0).await;
    expect_group(&mut subscriber, 0).await;
    let mut open = before.subgroup(header(1, 1)).await;
    open.object(0, 700).await;
    let mut received = subscriber.next_subgroup().await;
    assert_eq!((received.header.group, received.objects(1).await), (1, vec![0]));
    edge.until("userspace's count", |status| status.tracks[0].largest == Some((1, 0))).await;

    let server = Arc::clone(&first.server);
    let draining = tokio::spawn(async move { server.drain().await });
    let _moved = after.accept_subscribe(&track, 2).await;
    edge.until("both publishers to feed the track", |status| status.tracks[0].publishers == 2).await;
    publish(&after, 2, 1).await;
    open.object(1, 700).await;
    open.object(2, 700).await;
    open.finish();
    assert_eq!(received.all().await, (vec![1, 2], PeerStreamEnd::Fin));
    publish(&before, 1, 2).await;
    edge.until("the first publisher's group to be refused", |status| {
        status.drops["handed_over_subgroup"] == 1
    })
    .await;
    publish(&after, 2, 2).await;
    expect_group(&mut subscriber, 2).await;

    // The edge relay must have no subscription at the first upstream relay any more.
    let of_second = second.addr;
    let remotes = |status: &millrace_relay_daemon::status::Status| {
        status
            .sessions
            .iter()
            .filter(|session| session.upstream)
            .map(|session| session.remote)
            .collect::<Vec<_>>()
    };
    edge.until("the end of the first publisher's session", |status| remotes(status) == [of_second]).await;
    before.session.close(millrace_moq::code::Session::NO_ERROR, "");
    patiently(draining).await.unwrap();
    for group in 3..6 {
        publish(&after, 2, group).await;
        expect_group(&mut subscriber, group).await;
    }
    subscriber.expect_no_stream().await;
    // The edge relay has moved to the second upstream relay, whose subscribers must also get tracks that are published
    // at the edge.
    let (mut local, _local_namespace) = {
        let local = edge.peer().await;
        let namespace = local.publish_namespace("edge").await;
        (local, namespace)
    };
    let name = super::peer::track("edge", "video");
    let mut far = second.peer().await;
    let waiting = Parameters { rendezvous_timeout: Some(60_000), ..Parameters::default() };
    let (subscribed, _upstream) =
        tokio::join!(far.try_subscribe(&name, waiting), local.accept_subscribe(&name, 9));
    let _request = subscribed.unwrap();
    publish(&local, 9, 0).await;
    expect_group(&mut far, 0).await;
}
