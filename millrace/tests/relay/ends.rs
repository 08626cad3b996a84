//! Tests of the ends of subscriptions, publishers and the relay itself, and of chains of relays.

use millrace_client::session::Error;
use millrace_moq::{Parameters, code, message::PublishDone};
use millrace_relay_daemon::config::UpstreamConfig;
use millrace_testkit::async_wait_for;

use super::peer::{
    PeerStreamEnd, TestRelay, expect_done, first_subscriber, header, patiently, payload, track,
    with_publisher,
};

#[tokio::test]
async fn publish_done_counts_the_streams_and_is_sent_after_them() {
    let relay = TestRelay::start();
    let (mut publisher, _namespace, track) = with_publisher(&relay).await;
    let (mut subscriber, mut request, _, mut upstream) =
        first_subscriber(&relay, &mut publisher, &track, 1).await;
    for group in 0..5 {
        let mut subgroup = publisher.subgroup(header(1, group)).await;
        subgroup.object(0, 2000).await;
        match group {
            2 => subgroup.reset(code::Reset::CANCELLED),
            _ => subgroup.finish(),
        }
    }
    let ended = PublishDone { code: code::Done::TRACK_ENDED, stream_count: 5, reason: "over".into() };
    upstream.send(ended).await.unwrap();
    let mut ends = Vec::new();
    let answer = expect_done(&mut request).await;
    for _ in 0..answer.stream_count {
        ends.push(subscriber.next_subgroup().await.all().await.1);
    }
    assert_eq!((answer.code, answer.reason.as_str()), (code::Done::TRACK_ENDED, "over"));
    assert!(ends.iter().filter(|end| **end == PeerStreamEnd::Fin).count() == 4, "{ends:?}");
    subscriber.expect_no_stream().await;
    assert_eq!(patiently(request.next()).await.unwrap(), None, "FIN behind PUBLISH_DONE");
}

#[tokio::test]
async fn a_publisher_that_dies_in_mid_object_leaves_a_reset_and_publish_done() {
    let relay = TestRelay::start();
    let (mut publisher, _namespace, track) = with_publisher(&relay).await;
    let (mut subscriber, mut request, _ok, _upstream) =
        first_subscriber(&relay, &mut publisher, &track, 1).await;
    let mut subgroup = publisher.subgroup(header(1, 0)).await;
    subgroup.object(0, 100).await;
    // The object's header announces 5000 bytes, and 3 bytes follow.
    subgroup.stream.write_all(&[0, 0x93, 0x88]).await.unwrap();
    subgroup.stream.write_all(&payload(0, 1, 5000)[..3]).await.unwrap();
    let received = subscriber.next_subgroup().await;
    relay.until("both objects have begun", |status| status.tracks[0].objects_cached == 2).await;
    publisher.session.close(code::Session::NO_ERROR, "gone");
    assert_eq!(received.all().await.1, PeerStreamEnd::Reset);
    assert_eq!(expect_done(&mut request).await.code, code::Done::INTERNAL_ERROR);
    relay.until("the namespace is withdrawn", |status| status.sessions.len() == 1).await;
    let refused = relay.peer().await.try_subscribe(&track, Parameters::default()).await.err().unwrap();
    assert_eq!(refused.code, code::Request::DOES_NOT_EXIST);
}

#[tokio::test]
async fn restarted_publisher_restarts_the_track() {
    let relay = TestRelay::start();
    for round in 0..3 {
        let (mut publisher, _namespace, track) = with_publisher(&relay).await;
        let (mut subscriber, _request, ok, _upstream) =
            first_subscriber(&relay, &mut publisher, &track, 1).await;
        assert_eq!(ok.parameters.largest_object, None, "round {round}");
        let mut subgroup = publisher.subgroup(header(1, 0)).await;
        subgroup.object(0, 100).await;
        subgroup.finish();
        assert_eq!(subscriber.next_subgroup().await.all().await, (vec![0], PeerStreamEnd::Fin));
        publisher.session.close(code::Session::NO_ERROR, "");
        relay.until("its end", |status| status.tracks[0].publishers == 0).await;
    }
}

#[tokio::test]
async fn draining_relay_sends_goaway_refuses_sessions_and_waits() {
    let relay = TestRelay::start();
    let (mut publisher, _namespace, name) = with_publisher(&relay).await;
    let (mut subscriber, _request, _, _upstream) = first_subscriber(&relay, &mut publisher, &name, 1).await;
    let draining = tokio::spawn({
        let server = std::sync::Arc::clone(&relay.server);
        async move { server.drain().await }
    });
    let mut told = subscriber.session.goaway();
    patiently(told.wait_for(Option::is_some)).await.unwrap();
    let other = track("live/cam", "audio");
    let refused = subscriber.try_subscribe(&other, Parameters::default()).await.err().unwrap();
    assert_eq!(refused.code, code::Request::GOING_AWAY);
    // Subgroups of existing subscriptions are still forwarded while the relay drains.
    let mut subgroup = publisher.subgroup(header(1, 0)).await;
    subgroup.object(0, 100).await;
    subgroup.finish();
    assert_eq!(subscriber.next_subgroup().await.all().await, (vec![0], PeerStreamEnd::Fin));
    assert!(!draining.is_finished());
    subscriber.session.close(code::Session::NO_ERROR, "");
    publisher.session.close(code::Session::NO_ERROR, "");
    patiently(draining).await.unwrap();
}

#[tokio::test]
async fn sessions_that_stay_are_closed_when_the_drain_is_over() {
    let relay = TestRelay::with(|config| config.drain_timeout = std::time::Duration::from_millis(100));
    let (mut publisher, _namespace, name) = with_publisher(&relay).await;
    let (subscriber, _request, _ok, _upstream) = first_subscriber(&relay, &mut publisher, &name, 1).await;
    patiently(relay.server.drain()).await;
    let Error::Closed(quinn::ConnectionError::ApplicationClosed(close)) = subscriber.ended().await else {
        panic!("not closed by the relay");
    };
    assert_eq!(close.error_code.into_inner(), code::Session::GOAWAY_TIMEOUT.0);
}

/// Starts two relays: `edge` asks `origin` for tracks that nobody publishes at `edge`.
async fn chain() -> (TestRelay, TestRelay) {
    let origin = TestRelay::start();
    let url = origin.url();
    let edge = TestRelay::with(|config| {
        config.upstream =
            Some(UpstreamConfig { urls: vec![url], tls_root: None, token: None, identity: None })
    });
    edge.until("the relays are connected", |status| status.sessions.iter().any(|s| s.upstream)).await;
    origin.until("both know", |status| status.sessions.len() == 1).await;
    (origin, edge)
}

async fn play(publisher_at: &TestRelay, subscriber_at: &TestRelay) {
    let (mut publisher, _namespace, name) = with_publisher(publisher_at).await;
    let mut subscriber = subscriber_at.peer().await;
    let waiting = Parameters { rendezvous_timeout: Some(60_000), ..Parameters::default() };
    let (subscribed, _upstream) =
        tokio::join!(subscriber.try_subscribe(&name, waiting), publisher.accept_subscribe(&name, 1));
    let (_request, _ok) = subscribed.unwrap();
    publisher_at.until_ready().await;
    for group in 0..20 {
        let mut subgroup = publisher.subgroup(header(1, group)).await;
        subgroup.object(0, 1200).await;
        let mut received = subscriber.next_subgroup().await;
        assert_eq!(received.objects(1).await, [0]);
        for id in 1..5 {
            subgroup.object(id, 1200).await;
        }
        subgroup.finish();
        assert_eq!(received.all().await, ((1..5).collect(), PeerStreamEnd::Fin));
    }
    publisher_at.assert_forwarded();
}

#[tokio::test]
async fn media_passes_between_origin_and_edge_relay_in_both_directions() {
    let (origin, edge) = chain().await;
    play(&origin, &edge).await;
    play(&edge, &origin).await;
    play(&edge, &edge).await;
}

#[tokio::test]
async fn unknown_track_between_two_edge_relays_in_a_loop_is_refused() {
    let (origin, edge) = chain().await;
    for relay in [&edge, &origin] {
        let refused = relay.peer().await.try_subscribe(&track("no", "where"), Parameters::default()).await;
        assert_eq!(refused.err().unwrap().code, code::Request::DOES_NOT_EXIST);
    }
}

#[tokio::test]
async fn edge_relay_reconnects_to_its_upstream() {
    let origin = TestRelay::start();
    let addr = origin.addr;
    let url = origin.url();
    let edge = TestRelay::with(|config| {
        config.upstream =
            Some(UpstreamConfig { urls: vec![url], tls_root: None, token: None, identity: None })
    });
    edge.until("connected", |status| status.sessions.iter().any(|session| session.upstream)).await;
    origin.server.stop().await;
    drop(origin);
    edge.until("the upstream is gone", |status| status.sessions.is_empty()).await;
    // The old relay's socket is closed only when its last task has ended, so binding is repeated.
    let again = || std::panic::catch_unwind(|| TestRelay::with(|config| config.listen = vec![addr])).ok();
    let origin = async_wait_for("a relay at the same address", again).await;
    edge.until("connected again", |status| status.sessions.iter().any(|session| session.upstream)).await;
    play(&origin, &edge).await;
}
