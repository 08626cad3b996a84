//! Tests of publishers that go from one relay of a cluster to another one, and of relays whose peers send GOAWAY.

use std::{sync::Arc, time::Duration};

use millrace_client::session::SessionRequest;
use millrace_moq::{
    Message, Parameters, TrackName, code,
    message::{FetchKind, Subscribe},
};
use millrace_relay_daemon::{
    config::Config,
    status::{ClusterStatus, Status},
};
use tokio::sync::mpsc;

use super::cluster::{join_cluster, peer_at, relay, subscribe, until_cluster, until_routes};
use super::gaps::{accept, object, serve};
use super::groups::{expect_group, publish_group};
use super::peer::{TestPeer, TestRelay, at, track, with_publisher};
use super::returns::silence;
use super::sources::relay_with_a_way;

/// The last group that [`MoveScene`] publishes.
const LAST: u64 = 1002;

/// Two relays of a cluster. A publisher at the first one has a viewer at the second one, which gets the track from
/// there.
struct MoveScene {
    origin: TestRelay,
    edge: TestRelay,
    publisher: TestPeer,
    viewer: TestPeer,
    subscription: SessionRequest,
    name: TrackName,
    _requests: [SessionRequest; 2],
}

impl MoveScene {
    async fn new() -> Self {
        let origin = relay(1, &[]);
        let edge = relay(2, &[&origin]);
        Self::at(origin, edge).await
    }

    async fn at(origin: TestRelay, edge: TestRelay) -> Self {
        let (mut publisher, namespace, name) = with_publisher(&origin).await;
        until_routes(&edge, "the route to the publisher", |routes| routes.len() == 1).await;
        let mut viewer = edge.peer().await;
        let (subscription, (upstream, _)) =
            tokio::join!(subscribe(&viewer, &name), publisher.accept_subscribe(&name, 1));
        for group in 1000..=LAST {
            publish_group(&publisher, 1, group).await;
            expect_group(&mut viewer, group).await;
        }
        for relay in [&origin, &edge] {
            relay.until_largest(at(LAST, 1)).await;
        }
        Self { origin, edge, publisher, viewer, subscription, name, _requests: [namespace, upstream] }
    }

    /// Connects another viewer of the track, at the publisher's relay. It begins with the last group.
    async fn viewer_at_origin(&self) -> (TestPeer, SessionRequest) {
        let mut viewer = self.origin.peer().await;
        let subscription = subscribe(&viewer, &self.name).await;
        expect_group(&mut viewer, LAST).await;
        (viewer, subscription)
    }

    /// Publishes groups in the publisher's new session, which the viewers get once.
    async fn expect_groups_of(&mut self, again: &TestPeer, groups: [u64; 2], others: &mut [&mut TestPeer]) {
        for group in groups {
            publish_group(again, 5, group).await;
            expect_group(&mut self.viewer, group).await;
            for viewer in &mut *others {
                expect_group(viewer, group).await;
            }
        }
        self.viewer.expect_no_stream().await;
        for viewer in others {
            viewer.expect_no_stream().await;
        }
        has_not_ended(&mut self.subscription).await;
    }
}

async fn has_not_ended(subscription: &mut SessionRequest) {
    let end = tokio::time::timeout(Duration::ZERO, subscription.answer()).await;
    assert!(end.is_err(), "the subscription has ended: {end:?}");
}

/// Answers each FETCH of the relay with the complete groups of its range, from its first object on.
fn serve_fetches(mut publisher: TestPeer) -> Arc<TestPeer> {
    let mut requests = std::mem::replace(&mut publisher.requests, mpsc::unbounded_channel().1);
    let publisher = Arc::new(publisher);
    let server = Arc::clone(&publisher);
    tokio::spawn(async move {
        while let Some((message, request)) = requests.recv().await {
            let Message::Fetch(fetch) = message else { panic!("{message:?} instead of FETCH") };
            let FetchKind::Standalone { range, .. } = fetch.kind else { panic!("not standalone") };
            let first = range.start(None);
            let last = range.end().expect("a last location");
            let all = (first.group..=last.group).flat_map(|group| [at(group, 0), at(group, 1)]);
            let items: Vec<_> = all.filter(|at| *at >= first).map(|at| object(at.group, at.object)).collect();
            serve(&server, (request, fetch.request_id), &items).await;
        }
    });
    publisher
}

/// The publisher's session ends, and its next one is at the relay that was an edge of its track. What it has published
/// between the two sessions comes by FETCH.
#[tokio::test]
async fn viewers_at_an_edge_continue_when_the_publisher_comes_there() {
    let mut scene = MoveScene::new().await;
    scene.publisher.session.close(code::Session::NO_ERROR, "");
    until_routes(&scene.edge, "no route", <[_]>::is_empty).await;
    let (mut again, _namespace, _) = with_publisher(&scene.edge).await;
    let _upstream = accept(&mut again, &scene.name, at(LAST + 4, 0)).await;
    let again = serve_fetches(again);
    publish_group(&again, 5, LAST + 4).await;
    for group in [LAST + 4, LAST + 1, LAST + 2, LAST + 3] {
        expect_group(&mut scene.viewer, group).await;
    }
    // Either relay may ask first. What the former origin gets, it passes on.
    // exact: the wait below repeats it
    let fetched = |status: &Status| status.totals.gap_objects + scene.origin.status().totals.gap_objects;
    scene.edge.until("its counter", |status| fetched(status) >= 6).await;
    scene.edge.until("the publisher alone", |status| status.tracks[0].publishers == 1).await;
    scene.expect_groups_of(&again, [LAST + 5, LAST + 6], &mut []).await;
}

/// The publisher has its next session before the earlier one ends. The relay that it leaves becomes an edge of the one
/// that it has come to.
#[tokio::test]
async fn relay_that_its_publisher_leaves_becomes_an_edge_of_the_next_one() {
    let mut scene = MoveScene::new().await;
    let (mut near, mut near_subscription) = scene.viewer_at_origin().await;
    let (mut again, _namespace, _) = with_publisher(&scene.edge).await;
    until_routes(&scene.edge, "both routes", |routes| routes.len() == 2).await;
    publish_group(&scene.publisher, 1, LAST + 1).await;
    for viewer in [&mut scene.viewer, &mut near] {
        expect_group(viewer, LAST + 1).await;
    }
    assert!(again.requests.try_recv().is_err(), "the first session works, and was left");
    scene.publisher.session.close(code::Session::NO_ERROR, "");
    let _upstream = accept(&mut again, &scene.name, at(LAST + 1, 1)).await;
    until_routes(&scene.origin, "the route in use", |routes| routes.len() == 1 && routes[0].carried).await;
    scene.expect_groups_of(&again, [LAST + 2, LAST + 3], &mut [&mut near]).await;
    for relay in [&scene.edge, &scene.origin] {
        relay.until("one source", |status| status.tracks[0].publishers == 1).await;
    }
    scene.expect_groups_of(&again, [LAST + 4, LAST + 5], &mut [&mut near]).await;
    has_not_ended(&mut near_subscription).await;
    assert!(again.requests.try_recv().is_err(), "the publisher was asked once");
}

/// Changes the settings to those of a relay that has long to drain.
fn drains_slowly(config: &mut Config) {
    config.drain_timeout = Duration::from_secs(300);
}

fn drain(relay: &TestRelay) {
    let server = Arc::clone(&relay.server);
    tokio::spawn(async move { server.drain().await });
}

/// The publisher's relay sends GOAWAY, and its earlier session stays open.
#[tokio::test]
async fn viewers_at_an_edge_get_the_publisher_that_a_draining_relay_sends_there() {
    let origin = TestRelay::at(|host, config| {
        join_cluster(host, config, 1, Vec::new(), 100);
        drains_slowly(config);
    });
    let edge = relay(2, &[&origin]);
    let mut scene = MoveScene::at(origin, edge).await;
    let (mut near, _near_subscription) = scene.viewer_at_origin().await;
    drain(&scene.origin);
    let (mut again, _namespace, _) = with_publisher(&scene.edge).await;
    let _upstream = accept(&mut again, &scene.name, at(LAST, 1)).await;
    scene.edge.until("both sources", |status| status.tracks[0].publishers == 2).await;
    publish_group(&scene.publisher, 1, LAST + 1).await;
    expect_group(&mut near, LAST + 1).await;
    scene.expect_groups_of(&again, [LAST + 1, LAST + 2], &mut []).await;
}

/// The publisher's relay is gone without a word.
#[tokio::test]
async fn viewers_at_an_edge_continue_when_the_publisher_of_a_killed_relay_comes_there() {
    let (origin, way) = relay_with_a_way(|host, config| join_cluster(host, config, 1, Vec::new(), 100));
    let edge = TestRelay::at(|host, config| {
        let peer =
            millrace_relay_daemon::config::PeerConfig { url: way.url(&origin), ..peer_at(&origin, None) };
        join_cluster(host, config, 2, vec![peer], 100);
    });
    let mut scene = MoveScene::at(origin, edge).await;
    way.cut(true);
    let (mut again, _namespace, _) = with_publisher(&scene.edge).await;
    let _upstream = accept(&mut again, &scene.name, at(LAST, 1)).await;
    scene.expect_groups_of(&again, [LAST + 1, LAST + 2], &mut []).await;
}

/// Two publishers of the same objects are at two relays. The one from which both relays get the track falls silent, and
/// its session stays open.
#[tokio::test]
async fn track_of_a_silent_publisher_comes_from_a_second_one_at_another_relay() {
    let mut scene = MoveScene::new().await;
    let (mut near, mut near_subscription) = scene.viewer_at_origin().await;
    let (mut second, _namespace, _) = with_publisher(&scene.edge).await;
    for relay in [&scene.edge, &scene.origin] {
        until_routes(relay, "both routes", |routes| routes.len() == 2).await;
    }
    silence(&scene.publisher);
    // The publisher owes the acknowledgement of a packet from now on.
    let other = Subscribe {
        request_id: near.session.next_request_id(),
        track: track("live/cam", "audio"),
        parameters: Parameters::default(),
    };
    let _other = near.session.request(other).await.unwrap();
    let _upstream = accept(&mut second, &scene.name, at(LAST, 1)).await;
    until_routes(&scene.origin, "the route in use", |routes| routes.iter().any(|route| route.carried)).await;
    scene.expect_groups_of(&second, [LAST + 1, LAST + 2], &mut [&mut near]).await;
    // A relay moves a track only from a source that it still has, so no idle timeout has ended the publisher's session.
    for relay in [&scene.edge, &scene.origin] {
        relay.until("the track's move", |status| status.totals.reroutes > 0).await;
    }
    has_not_ended(&mut near_subscription).await;
}

/// A relay drains, and names another one in GOAWAY. Its peer connects to that one before the earlier session ends.
#[tokio::test]
async fn peer_that_gets_goaway_connects_before_it_leaves() {
    let origin = relay(1, &[]);
    let next = relay(3, &[&origin]);
    let url = next.url();
    let first = TestRelay::at(|host, config| {
        join_cluster(host, config, 2, vec![peer_at(&origin, None)], 100);
        drains_slowly(config);
        config.goaway_uri = Some(url);
    });
    let edge = relay(4, &[&first]);
    let mut scene = MoveScene::at(origin, edge).await;
    drain(&first);
    let has = |cluster: &ClusterStatus, hop| cluster.links.iter().any(|link| link.hop == hop);
    until_cluster(&scene.edge, "a session with either relay", |cluster| has(cluster, 2) && has(cluster, 3))
        .await;
    let moved = |routes: &[millrace_relay_daemon::status::RouteStatus]| {
        routes.iter().any(|route| route.carried && route.path.ends_with(&[3]))
    };
    until_routes(&scene.edge, "the route through the next relay", moved).await;
    for group in LAST + 1..LAST + 4 {
        publish_group(&scene.publisher, 1, group).await;
        expect_group(&mut scene.viewer, group).await;
    }
    until_cluster(&scene.edge, "the earlier session to end", |cluster| !has(cluster, 2) && has(cluster, 3))
        .await;
    publish_group(&scene.publisher, 1, LAST + 4).await;
    expect_group(&mut scene.viewer, LAST + 4).await;
    scene.viewer.expect_no_stream().await;
    has_not_ended(&mut scene.subscription).await;
}
