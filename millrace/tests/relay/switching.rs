//! Subscribers that name tracks of the same content, of which the relay forwards the one that their path has room for.

use std::time::Duration;

use millrace_client::{
    session::{Remote, Request},
    tls::Trust,
};
use millrace_moq::{
    Message, Parameters, code,
    message::{PublishDone, RequestError, RequestUpdate},
    param::Assignment,
};
use millrace_relay::{Adaptive, LadderRule};

use super::peer::{End, Peer, Relay, expect_done, header, patiently, track};

/// More than a stream has credit for: unread, it keeps the relay waiting.
const TOO_MUCH: usize = 3_000_000;

/// kbit/s that no path carries, so that nothing goes up.
const ENDLESS: u64 = 1 << 50;

/// The publisher's aliases of both tracks, and objects of a group of each, by which a test tells them.
const TRACKS: [(&str, u64, u64); 2] = [("low", 1, 3), ("high", 2, 2)];
const LOW: u64 = TRACKS[0].2;
const HIGH: u64 = TRACKS[1].2;

fn relay() -> Relay {
    Relay::with(|config| config.switching_sets = true)
}

async fn subscriber(relay: &Relay) -> Peer {
    let remote = Remote { switching_sets: true, ..Remote::new(relay.url(), Trust::Anyone) };
    Peer::connect_to(&remote, quinn::EndpointConfig::default()).await
}

fn assigned(set: u64, threshold: u64, forward: bool) -> Parameters {
    let assignment = Assignment { set, algorithm: 0, threshold, weight: 5, activate: 2, rank: 0 };
    Parameters { forward: Some(forward), assignment: Some(assignment), ..Parameters::default() }
}

/// A publisher of two tracks, and a subscriber of both.
struct Scene {
    relay: Relay,
    publisher: Peer,
    subscriber: Peer,
    /// Of the subscriptions, and of the relay's to the publisher; `low` first.
    requests: Vec<Request>,
    upstream: Vec<Request>,
    aliases: Vec<u64>,
    _namespace: Request,
}

impl Scene {
    /// The first group is there before anybody subscribes to `low`, whose first group that is if `forward`.
    async fn new(thresholds: [u64; 2], forward: bool) -> Self {
        let relay = relay();
        let mut publisher = relay.peer().await;
        let namespace = publisher.publish_namespace("live/cam").await;
        let (requests, upstream, aliases) = Default::default();
        let subscriber = subscriber(&relay).await;
        // Somebody else has both tracks kept up to date.
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
        // The relay's own subscriptions stay with it.
        std::mem::forget(other);
        scene.upstream = others;
        scene.relay.until_ready().await;
        scene
    }

    /// A group of both tracks, and waits until the relay has them.
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

    /// The next group that comes: which, and how many objects it has.
    async fn next(&mut self) -> (u64, u64) {
        let received = self.subscriber.next_subgroup().await;
        let (alias, group) = (received.header.alias, received.header.group);
        let (objects, end) = received.all().await;
        assert_eq!(end, End::Fin);
        let count = objects.len() as u64;
        let at = self.aliases.iter().position(|known| *known == alias).expect("an alias of its own");
        // The first may have begun before.
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
async fn each_group_comes_from_one_track_of_the_set() {
    let mut scene = Scene::new([1, 2], false).await;
    scene.until_switched(0, 1).await;
    for group in 1..5 {
        scene.publish(group).await;
        assert_eq!(scene.next().await, (group, HIGH), "there is room");
    }
    scene.subscriber.expect_no_stream().await;
    scene.relay.assert_forwarded();
}

#[tokio::test]
async fn what_the_path_has_no_room_for_does_not_come() {
    let mut scene = Scene::new([0, ENDLESS], false).await;
    scene.until_switched(0, 1).await;
    for group in 1..5 {
        scene.publish(group).await;
        assert_eq!(scene.next().await, (group, LOW));
    }
    scene.subscriber.expect_no_stream().await;
}

#[tokio::test]
async fn what_is_forwarded_already_goes_on_until_the_next_group() {
    let mut scene = Scene::new([0, 1], true).await;
    assert_eq!(scene.next().await.0, 0, "of the group of now");
    scene.until_switched(0, 1).await;
    scene.publish(1).await;
    assert_eq!(scene.next().await, (1, HIGH));
    scene.subscriber.expect_no_stream().await;
}

#[tokio::test]
async fn a_path_that_carries_less_than_was_thought_gets_less() {
    let mut scene = Scene::new([0, 1], false).await;
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
        "what has begun goes on"
    );
    assert_eq!(received.all().await, (vec![0], End::Fin));
    assert_eq!(scene.next().await, (2, LOW));
}

#[tokio::test]
async fn who_pauses_a_set_keeps_what_it_has() {
    let mut scene = Scene::new([0, ENDLESS], false).await;
    scene.until_switched(0, 1).await;
    let paused = Assignment { set: 7, algorithm: 0, threshold: ENDLESS, weight: 5, activate: 0, rank: 0 };
    scene.update(1, paused).await.unwrap();
    // Neither a threshold that would fit now nor a track that ends changes anything.
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
async fn a_track_that_leaves_makes_room_for_the_others() {
    let mut scene = Scene::new([0, 1], false).await;
    scene.until_switched(0, 1).await;
    scene.publish(1).await;
    assert_eq!(scene.next().await, (1, HIGH));
    drop(scene.requests.pop());
    scene.until_switched(0, 2).await;
    scene.publish(2).await;
    assert_eq!(scene.next().await, (2, LOW));
    // So does one that ends at its publisher, after which there is none.
    let done = PublishDone { code: code::Done::TRACK_ENDED, stream_count: 3, reason: String::new() };
    scene.upstream[1].send(done).await.unwrap();
    assert_eq!(expect_done(&mut scene.requests[0]).await.code, code::Done::TRACK_ENDED);
}

#[tokio::test]
async fn who_was_adapted_gets_what_a_set_chooses_and_nothing_else() {
    adapted_gets_what_a_set_chooses(false).await;
}

/// The relay may hear of the set while it waits for the other rendition.
#[tokio::test]
async fn who_is_about_to_be_adapted_gets_what_a_set_chooses_and_nothing_else() {
    adapted_gets_what_a_set_chooses(true).await;
}

async fn adapted_gets_what_a_set_chooses(is_late: bool) {
    let tracks = vec![("high".to_owned(), ENDLESS), ("low".to_owned(), 1)];
    let rule = LadderRule { namespace: "live/*".parse().unwrap(), tracks };
    let relay = Relay::with(|config| {
        config.switching_sets = true;
        config.adaptive = Adaptive::Ladders(vec![rule]);
    });
    let mut publisher = relay.peer().await;
    let _namespace = publisher.publish_namespace("live/cam").await;
    let subscriber = subscriber(&relay).await;
    let (low, high) = (track("live/cam", "low"), track("live/cam", "high"));
    let ((mut request, ok), _high) =
        tokio::join!(subscriber.subscribe(&high), publisher.accept_subscribe(&high, TRACKS[1].1));
    let mut _low = None;
    if !is_late {
        _low = Some(publisher.accept_subscribe(&low, TRACKS[0].1).await);
        relay.until("both are listened to", |status| status.tracks.len() == 2).await;
    }
    let request_id = subscriber.session.next_request_id();
    let assignment = Assignment { set: 1, algorithm: 0, threshold: 0, weight: 1, activate: 1, rank: 0 };
    let parameters = Parameters { assignment: Some(assignment), ..Parameters::default() };
    request.send(RequestUpdate { request_id, parameters }).await.unwrap();
    let Message::RequestOk(_) = patiently(request.answer()).await.unwrap() else { panic!("no answer") };
    if is_late {
        _low = Some(publisher.accept_subscribe(&low, TRACKS[0].1).await);
        relay.until("both are listened to", |status| status.tracks.len() == 2).await;
        // exact: several times as long as an adapted subscription waits for its first choice
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    let mut scene = Scene {
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
async fn what_cannot_be_is_refused() {
    let mut scene = Scene::new([0, 1], false).await;
    let track = |name: &str| track("live/cam", name);
    let one = assigned(7, 1, false).assignment.unwrap();
    // Another set.
    let refused = scene.update(0, Assignment { set: 8, ..one }).await.unwrap_err();
    assert_eq!(refused.code, code::Request::UNSUPPORTED_EXTENSION);
    assert_eq!(expect_done(&mut scene.requests[0]).await.code, code::Done::UPDATE_FAILED);
    // Another algorithm.
    let other = Parameters { assignment: Some(Assignment { algorithm: 1, ..one }), ..Parameters::default() };
    let refused = scene.subscriber.try_subscribe(&track("low"), other).await.err().unwrap();
    assert_eq!(refused.code, code::Request::UNSUPPORTED_EXTENSION);
    // Nothing of it in SETUP.
    let silent = scene.relay.peer().await;
    let refused = silent.try_subscribe(&track("low"), assigned(1, 1, true)).await.err().unwrap();
    assert_eq!(refused.code, code::Request::UNSUPPORTED_EXTENSION);
    // A relay that is not set to it knows no such parameter.
    let relay = Relay::start();
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
