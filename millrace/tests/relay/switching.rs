//! Tests of switching sets: subscribers name tracks of the same content, and the relay forwards the one for which the
//! path has capacity.

use std::time::Duration;

use millrace_client::{
    session::{Remote, SessionRequest},
    tls::CertificateTrust,
};
use millrace_moq::{
    Message, Parameters, code,
    message::{PublishDone, RequestError, RequestUpdate},
    param::Assignment,
};
use millrace_relay::{AdaptiveMode, LadderRule};

use super::peer::{PeerStreamEnd, TestPeer, TestRelay, expect_done, header, patiently, track};

/// Length of an object that exceeds a stream's flow-control credit. If the subscriber does not read, the relay cannot
/// send the rest.
const TOO_MUCH: usize = 3_000_000;

/// Threshold in kbit/s that exceeds the throughput of any path, so that the relay never chooses the track.
const ENDLESS: u64 = 1 << 50;

/// The publisher's aliases of both tracks, and the number of objects in a group of each track, by which tests identify
/// the track.
const TRACKS: [(&str, u64, u64); 2] = [("low", 1, 3), ("high", 2, 2)];
const LOW: u64 = TRACKS[0].2;
const HIGH: u64 = TRACKS[1].2;

fn relay() -> TestRelay {
    TestRelay::with(|config| config.switching_sets = true)
}

async fn subscriber(relay: &TestRelay) -> TestPeer {
    let remote = Remote { switching_sets: true, ..Remote::new(relay.url(), CertificateTrust::Anyone) };
    TestPeer::connect_to(&remote, quinn::EndpointConfig::default()).await
}

fn assigned(set: u64, threshold: u64, forward: bool) -> Parameters {
    let assignment = Assignment { set, algorithm: 0, threshold, weight: 5, activate: 2, rank: 0 };
    Parameters { forward: Some(forward), assignment: Some(assignment), ..Parameters::default() }
}

/// A publisher of two tracks, and a subscriber of both.
struct SwitchingScene {
    relay: TestRelay,
    publisher: TestPeer,
    subscriber: TestPeer,
    /// The subscriber's subscriptions, and the relay's subscriptions at the publisher; the track `low` is first.
    requests: Vec<SessionRequest>,
    upstream: Vec<SessionRequest>,
    aliases: Vec<u64>,
    _namespace: SessionRequest,
}

impl SwitchingScene {
    /// Starts the test setup. The first group is published before the subscription to `low`, which receives this group
    /// if `forward` is set.
    async fn new(thresholds: [u64; 2], forward: bool) -> Self {
        let relay = relay();
        let mut publisher = relay.peer().await;
        let namespace = publisher.publish_namespace("live/cam").await;
        let (requests, upstream, aliases) = Default::default();
        let subscriber = subscriber(&relay).await;
        // A second subscriber makes the relay subscribe to both tracks, so that the relay has all groups.
        let other = relay.peer().await;
        let mut others = Vec::new();
        for (name, alias, _) in TRACKS {
            let name = track("live/cam", name);
            let ((request, _), (up, _)) =
                tokio::join!(other.subscribe(&name), publisher.accept_subscribe(&name, alias));
            others.extend([request, up]);
        }
        let mut scene =
            Self { relay, publisher, subscriber, requests, upstream, aliases, _namespace: namespace };
        scene.publish(0).await;
        for (at, (name, ..)) in TRACKS.into_iter().enumerate() {
            let parameters = assigned(7, thresholds[at], forward && at == 0);
            let (request, ok) =
                scene.subscriber.try_subscribe(&track("live/cam", name), parameters).await.unwrap();
            scene.requests.push(request);
            scene.aliases.push(ok.track_alias);
        }
        // The second subscriber is never dropped, so that the relay's own subscriptions stay open.
        std::mem::forget(other);
        scene.upstream = others;
        scene.relay.until_ready().await;
        scene
    }

    /// Publishes a group of both tracks, and waits until the relay has them.
    async fn publish(&self, group: u64) {
        for (name, alias, objects) in TRACKS {
            let mut subgroup = self.publisher.subgroup(header(alias, group)).await;
            for id in 0..objects {
                subgroup.object(id, 100).await;
            }
            subgroup.finish();
            self.until_largest(name, (group, objects - 1)).await;
        }
    }

    async fn until_largest(&self, name: &str, largest: (u64, u64)) {
        let is_there = |status: &millrace_relay_daemon::status::Status| {
            status.tracks.iter().any(|track| track.name.ends_with(name) && track.largest == Some(largest))
        };
        self.relay.until(&format!("{name} at {largest:?}"), is_there).await;
    }

    async fn until_switched(&self, down: u64, up: u64) {
        let switched = |status: &millrace_relay_daemon::status::Status| {
            (status.totals.renditions_down, status.totals.renditions_up) == (down, up)
        };
        self.relay.until(&format!("{down} down and {up} up"), switched).await;
    }

    /// Returns the next group that arrives: its ID, and its number of objects.
    async fn next(&mut self) -> (u64, u64) {
        let received = self.subscriber.next_subgroup().await;
        let alias = received.header.alias;
        let group = received.header.group;
        let (objects, end) = received.all().await;
        assert_eq!(end, PeerStreamEnd::Fin);
        let count = objects.len() as u64;
        let at = self.aliases.iter().position(|known| *known == alias).expect("an alias of its own");
        // The first group may have begun before the relay switched to the other track.
        assert!(group == 0 || count == TRACKS[at].2, "the alias of the other track");
        (group, count)
    }

    async fn update(&mut self, at: usize, assignment: Assignment) -> Result<(), RequestError> {
        let request_id = self.subscriber.session.next_request_id();
        let parameters = Parameters { assignment: Some(assignment), ..Parameters::default() };
        let request = &mut self.requests[at];
        request.send(RequestUpdate { request_id, parameters }).await.unwrap();
        match patiently(request.answer()).await {
            Ok(Message::RequestOk(_)) => Ok(()),
            Err(millrace_client::session::Error::Refused(refused)) => Err(refused),
            other => panic!("no answer: {other:?}"),
        }
    }
}

#[tokio::test]
async fn each_group_comes_from_one_track_of_the_switching_set() {
    let mut scene = SwitchingScene::new([1, 2], false).await;
    scene.until_switched(0, 1).await;
    for group in 1..5 {
        scene.publish(group).await;
        assert_eq!(scene.next().await, (group, HIGH), "there is room");
    }
    scene.subscriber.expect_no_stream().await;
    scene.relay.assert_forwarded();
}

#[tokio::test]
async fn switching_set_track_over_the_path_capacity_is_not_sent() {
    let mut scene = SwitchingScene::new([0, ENDLESS], false).await;
    scene.until_switched(0, 1).await;
    for group in 1..5 {
        scene.publish(group).await;
        assert_eq!(scene.next().await, (group, LOW));
    }
    scene.subscriber.expect_no_stream().await;
}

#[tokio::test]
async fn track_switch_in_a_switching_set_waits_for_the_next_group() {
    let mut scene = SwitchingScene::new([0, 1], true).await;
    assert_eq!(scene.next().await.0, 0, "the rest of the current group did not arrive");
    scene.until_switched(0, 1).await;
    scene.publish(1).await;
    assert_eq!(scene.next().await, (1, HIGH));
    scene.subscriber.expect_no_stream().await;
}

#[tokio::test]
async fn subscriber_on_an_overestimated_path_gets_the_lower_track() {
    let mut scene = SwitchingScene::new([0, 1], false).await;
    scene.until_switched(0, 1).await;
    let mut low = scene.publisher.subgroup(header(TRACKS[0].1, 1)).await;
    low.object(0, 10).await;
    low.finish();
    let mut high = scene.publisher.subgroup(header(TRACKS[1].1, 1)).await;
    high.object(0, TOO_MUCH).await;
    high.finish();
    scene.until_switched(1, 1).await;
    scene.publish(2).await;
    let received = scene.subscriber.next_subgroup().await;
    assert_eq!(
        (received.header.alias, received.header.group),
        (scene.aliases[1], 1),
        "the group that has begun did not continue"
    );
    assert_eq!(received.all().await, (vec![0], PeerStreamEnd::Fin));
    assert_eq!(scene.next().await, (2, LOW));
}

#[tokio::test]
async fn paused_switching_set_keeps_its_track_when_thresholds_change() {
    let mut scene = SwitchingScene::new([0, ENDLESS], false).await;
    scene.until_switched(0, 1).await;
    let paused = Assignment { set: 7, algorithm: 0, threshold: ENDLESS, weight: 5, activate: 0, rank: 0 };
    scene.update(1, paused).await.unwrap();
    // While the switching set is paused, a new threshold that the path's capacity exceeds must not change the selected
    // track.
    scene.update(1, Assignment { threshold: 1, ..paused }).await.unwrap();
    scene.publish(1).await;
    assert_eq!(scene.next().await, (1, LOW));
    scene.update(1, Assignment { threshold: 1, activate: 2, ..paused }).await.unwrap();
    scene.until_switched(0, 2).await;
    scene.publish(2).await;
    assert_eq!(scene.next().await, (2, HIGH));
    scene.subscriber.expect_no_stream().await;
}

#[tokio::test]
async fn switching_set_uses_the_lower_track_after_the_higher_is_unsubscribed() {
    let mut scene = SwitchingScene::new([0, 1], false).await;
    scene.until_switched(0, 1).await;
    scene.publish(1).await;
    assert_eq!(scene.next().await, (1, HIGH));
    drop(scene.requests.pop());
    scene.until_switched(0, 2).await;
    scene.publish(2).await;
    assert_eq!(scene.next().await, (2, LOW));
    // The publisher ends the second track, too. The subscriber has no track left, so the relay ends the subscription.
    let done = PublishDone { code: code::Done::TRACK_ENDED, stream_count: 3, reason: String::new() };
    scene.upstream[1].send(done).await.unwrap();
    assert_eq!(expect_done(&mut scene.requests[0]).await.code, code::Done::TRACK_ENDED);
}

#[tokio::test]
async fn assignment_to_a_switching_set_ends_the_relays_rendition_choice() {
    adapted_gets_what_a_set_chooses(false).await;
}

/// The relay adapts a subscription by choosing a rendition when the first group arrives. The subscriber may assign the
/// subscription to a switching set before that.
#[tokio::test]
async fn assignment_to_a_switching_set_cancels_a_pending_rendition_choice() {
    adapted_gets_what_a_set_chooses(true).await;
}

async fn adapted_gets_what_a_set_chooses(is_late: bool) {
    let tracks = vec![("high".to_owned(), ENDLESS), ("low".to_owned(), 1)];
    let rule = LadderRule { namespace: "live/*".parse().unwrap(), tracks };
    let relay = TestRelay::with(|config| {
        config.switching_sets = true;
        config.adaptive = AdaptiveMode::Ladders(vec![rule]);
    });
    let mut publisher = relay.peer().await;
    let _namespace = publisher.publish_namespace("live/cam").await;
    let subscriber = subscriber(&relay).await;
    let low = track("live/cam", "low");
    let high = track("live/cam", "high");
    let ((mut request, ok), _high) =
        tokio::join!(subscriber.subscribe(&high), publisher.accept_subscribe(&high, TRACKS[1].1));
    let mut _low = None;
    if !is_late {
        _low = Some(publisher.accept_subscribe(&low, TRACKS[0].1).await);
        relay.until("subscriptions to both", |status| status.tracks.len() == 2).await;
    }
    let request_id = subscriber.session.next_request_id();
    let assignment = Assignment { set: 1, algorithm: 0, threshold: 0, weight: 1, activate: 1, rank: 0 };
    let parameters = Parameters { assignment: Some(assignment), ..Parameters::default() };
    request.send(RequestUpdate { request_id, parameters }).await.unwrap();
    let Message::RequestOk(_) = patiently(request.answer()).await.unwrap() else { panic!("no answer") };
    if is_late {
        _low = Some(publisher.accept_subscribe(&low, TRACKS[0].1).await);
        relay.until("subscriptions to both", |status| status.tracks.len() == 2).await;
        // exact: this pause is several times as long as the relay waits before its first choice of a rendition
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    let mut scene = SwitchingScene {
        relay,
        publisher,
        subscriber,
        requests: Vec::new(),
        upstream: Vec::new(),
        aliases: vec![ENDLESS, ok.track_alias],
        _namespace,
    };
    for group in 0..3 {
        scene.publish(group).await;
        assert_eq!(scene.next().await, (group, HIGH));
    }
    scene.subscriber.expect_no_stream().await;
}

#[tokio::test]
async fn invalid_assignments_to_a_switching_set_are_refused() {
    let mut scene = SwitchingScene::new([0, 1], false).await;
    let track = |name: &str| track("live/cam", name);
    let one = assigned(7, 1, false).assignment.unwrap();
    // The relay refuses the assignment, which names another switching set than the subscription's.
    let refused = scene.update(0, Assignment { set: 8, ..one }).await.unwrap_err();
    assert_eq!(refused.code, code::Request::UNSUPPORTED_EXTENSION);
    assert_eq!(expect_done(&mut scene.requests[0]).await.code, code::Done::UPDATE_FAILED);
    // The relay refuses the assignment, which names an unknown algorithm.
    let other = Parameters { assignment: Some(Assignment { algorithm: 1, ..one }), ..Parameters::default() };
    let refused = scene.subscriber.try_subscribe(&track("low"), other).await.err().unwrap();
    assert_eq!(refused.code, code::Request::UNSUPPORTED_EXTENSION);
    // The relay refuses the assignment, since the peer has not announced switching sets in SETUP.
    let silent = scene.relay.peer().await;
    let refused = silent.try_subscribe(&track("low"), assigned(1, 1, true)).await.err().unwrap();
    assert_eq!(refused.code, code::Request::UNSUPPORTED_EXTENSION);
    // A relay without switching sets does not know the parameter SWITCHING_SET_ASSIGNMENT.
    let relay = TestRelay::start();
    let subscriber = subscriber(&relay).await;
    let request_id = subscriber.session.next_request_id();
    let subscribe = millrace_moq::message::Subscribe {
        request_id,
        track: track("low"),
        parameters: assigned(1, 1, true),
    };
    let _request = subscriber.session.request(subscribe).await.unwrap();
    let ended = subscriber.ended().await.to_string();
    assert!(ended.contains("a parameter that this message does not allow"), "{ended}");
}
