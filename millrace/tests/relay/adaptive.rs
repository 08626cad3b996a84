//! Tests of subscribers that get the rendition for which their path has capacity.

use millrace_moq::{
    Message, ObjectDatagram, Parameters, Status as ObjectStatus, code,
    data::encode_object_header,
    message::{PublishDone, RequestUpdate},
    msf::{MsfCatalog, MsfTrack},
    param::AuthToken,
    token::{Credential, Form},
};
use millrace_relay::{
    AdaptiveMode, LadderRule,
    access::{
        AccessPolicy, AccessRule, Principal, Requirements, cat,
        grant::{GrantMatch, GrantScope},
        keys::{self, Signer},
        token::KIND_CAT,
    },
};
use millrace_relay_daemon::{access::AccessFileContents, status::Status};

use super::peer::{PeerStreamEnd, TestPeer, TestRelay, expect_done, header, patiently, payload, track};

/// Length of an object that exceeds a stream's flow-control credit. If the subscriber does not read, the relay cannot
/// send the rest.
const TOO_MUCH: usize = 3_000_000;

/// Number of objects in a group of each rendition: a group's number of objects shows which rendition it is.
const HIGH: u64 = 2;
const LOW: u64 = 3;

const HIGH_ALIAS: u64 = 1;
const LOW_ALIAS: u64 = 2;

fn ladder(high: u64) -> AdaptiveMode {
    let tracks = vec![("high".to_owned(), high), ("low".to_owned(), 1)];
    AdaptiveMode::Ladders(vec![LadderRule { namespace: "live/*".parse().unwrap(), tracks }])
}

/// Bit rate of a rendition in bits per second that exceeds the capacity of any path, so that the relay never chooses
/// it.
const ENDLESS: u64 = 1 << 60;

/// A publisher of two renditions, and a subscriber of the higher one.
struct AdaptiveScene {
    relay: TestRelay,
    publisher: TestPeer,
    subscriber: TestPeer,
    alias: u64,
    low: millrace_client::session::SessionRequest,
    requests: Vec<millrace_client::session::SessionRequest>,
}

impl AdaptiveScene {
    async fn new(adaptive: AdaptiveMode) -> Self {
        Self::with(
            TestRelay::with(|config| config.adaptive = adaptive.clone()),
            adaptive,
            Parameters::default(),
        )
        .await
    }

    /// Starts the test setup. The subscriber subscribes to the higher rendition with these parameters.
    async fn with(relay: TestRelay, adaptive: AdaptiveMode, parameters: Parameters) -> Self {
        let from_catalog = matches!(adaptive, AdaptiveMode::Catalogs(_));
        let mut publisher = relay.peer().await;
        let namespace = publisher.publish_namespace("live/cam").await;
        let subscriber = relay.peer().await;
        let high = track("live/cam", "high");
        let (subscribed, (upstream, _)) = tokio::join!(
            subscriber.try_subscribe(&high, parameters),
            publisher.accept_subscribe(&high, HIGH_ALIAS)
        );
        let (request, ok) = subscribed.unwrap();
        let mut requests = vec![namespace, request, upstream];
        if from_catalog {
            requests.push(publish_catalog(&mut publisher).await);
        }
        let (low, _) = publisher.accept_subscribe(&track("live/cam", "low"), LOW_ALIAS).await;
        relay.until("subscriptions to both", |status| listeners(status, "low") == 1).await;
        relay.until_ready().await;
        Self { relay, publisher, subscriber, alias: ok.track_alias, low, requests }
    }

    /// Publishes a group of both renditions, and waits until the relay has them.
    async fn publish(&self, group: u64) {
        for (alias, objects, name) in [(LOW_ALIAS, LOW, "low"), (HIGH_ALIAS, HIGH, "high")] {
            let mut subgroup = self.publisher.subgroup(header(alias, group)).await;
            for id in 0..objects {
                subgroup.object(id, 100).await;
            }
            subgroup.finish();
            self.until_largest(name, (group, objects - 1)).await;
        }
    }

    /// Publishes the first group, which the subscriber does not read, and waits until the relay has changed to the
    /// lower rendition.
    async fn choke(&self) {
        let mut low = self.publisher.subgroup(header(LOW_ALIAS, 0)).await;
        low.object(0, 10).await;
        low.finish();
        let mut high = self.publisher.subgroup(header(HIGH_ALIAS, 0)).await;
        high.object(0, TOO_MUCH).await;
        high.finish();
        self.until_largest("low", (0, 0)).await;
        self.relay
            .until("the lower rendition to be chosen", |status| status.totals.renditions_down == 1)
            .await;
    }

    fn send_datagram(&self, alias: u64, group: u64, object: u64) {
        let datagram = ObjectDatagram {
            alias,
            group,
            object,
            priority: None,
            end_of_group: false,
            properties: Default::default(),
            status: None,
            payload: payload(group, object, 100).into(),
        };
        let mut bytes = Vec::new();
        datagram.encode(&mut bytes);
        self.publisher.session.streams().send_datagram(bytes.into()).unwrap();
    }

    /// Sends an update of the subscription.
    async fn update(&mut self, parameters: Parameters) {
        let request_id = self.subscriber.session.next_request_id();
        let request = &mut self.requests[1];
        request.send(RequestUpdate { request_id, parameters }).await.unwrap();
        let Message::RequestOk(_) = patiently(request.answer()).await.unwrap() else { panic!("no answer") };
    }

    async fn until_largest(&self, name: &str, largest: (u64, u64)) {
        let wanted = |status: &Status| largest_of(status, name) == Some(largest);
        self.relay.until(&format!("{name} at {largest:?}"), wanted).await;
    }

    /// Returns the next group that arrives: its ID, and its number of objects.
    async fn next(&mut self) -> (u64, u64) {
        let received = self.subscriber.next_subgroup().await;
        assert_eq!(received.header.alias, self.alias);
        let group = received.header.group;
        let (objects, end) = received.all().await;
        assert_eq!(end, PeerStreamEnd::Fin);
        assert!(objects.iter().copied().eq(0..objects.len() as u64), "{objects:?}");
        (group, objects.len() as u64)
    }
}

fn named<'a>(status: &'a Status, name: &str) -> Option<&'a millrace_relay::status::RelayTrackStatus> {
    status.tracks.iter().find(|track| track.name.ends_with(name))
}

fn listeners(status: &Status, name: &str) -> u64 {
    named(status, name).map_or(0, |track| track.subscribers)
}

fn largest_of(status: &Status, name: &str) -> Option<(u64, u64)> {
    named(status, name)?.largest
}

#[tokio::test]
async fn slow_subscriber_gets_lower_rendition_from_next_group() {
    let mut scene = AdaptiveScene::new(ladder(ENDLESS)).await;
    scene.choke().await;
    scene.publish(1).await;
    assert_eq!(scene.next().await, (0, 1), "the group that has begun did not continue");
    assert_eq!(scene.next().await, (1, LOW));
    for group in 2..6 {
        scene.publish(group).await;
        assert_eq!(scene.next().await, (group, LOW));
    }
    scene.subscriber.expect_no_stream().await;
    scene.relay.assert_forwarded();
    // exact: the counts of rendition changes are final, since the relay chose before the groups arrived
    let totals = scene.relay.status().totals;
    assert_eq!((totals.renditions_down, totals.renditions_up), (1, 0));
}

#[tokio::test]
async fn higher_rendition_returns_with_capacity() {
    let mut scene = AdaptiveScene::new(ladder(2)).await;
    scene.choke().await;
    // The relay chooses the rendition while the subscriber reads nothing.
    scene.publish(1).await;
    assert_eq!(scene.next().await, (0, 1));
    assert_eq!(scene.next().await, (1, LOW));
    scene.relay.until("the higher rendition to be chosen", |status| status.totals.renditions_up == 1).await;
    for group in 2..6 {
        scene.publish(group).await;
        assert_eq!(scene.next().await, (group, HIGH));
    }
    scene.subscriber.expect_no_stream().await;
    scene.relay.assert_forwarded();
}

#[tokio::test]
async fn subscriber_of_two_renditions_is_not_adapted() {
    let mut scene = AdaptiveScene::new(ladder(ENDLESS)).await;
    scene.choke().await;
    let (second, ok) = scene.subscriber.subscribe(&track("live/cam", "low")).await;
    scene
        .relay
        .until("the subscription to have its own rendition again", |status| status.totals.renditions_up == 1)
        .await;
    scene.publish(1).await;
    let mut got = Vec::new();
    for _ in 0..4 {
        let received = scene.subscriber.next_subgroup().await;
        let alias = received.header.alias;
        let group = received.header.group;
        got.push((alias, group, received.all().await.0.len() as u64));
    }
    got.sort_unstable();
    let mut expected =
        [(scene.alias, 0, 1), (scene.alias, 1, HIGH), (ok.track_alias, 0, 1), (ok.track_alias, 1, LOW)];
    expected.sort_unstable();
    assert_eq!(got, expected);
    drop(second);
}

#[tokio::test]
async fn adaptive_subscription_changes_rendition_when_its_current_one_ends() {
    let mut scene = AdaptiveScene::new(ladder(ENDLESS)).await;
    scene.choke().await;
    scene.publish(1).await;
    assert_eq!((scene.next().await, scene.next().await), ((0, 1), (1, LOW)));
    let done = PublishDone { code: code::Done::TRACK_ENDED, stream_count: 2, reason: String::new() };
    scene.low.send(done).await.unwrap();
    scene.relay.until("the other rendition", |status| status.totals.renditions_up == 1).await;
    let mut subgroup = scene.publisher.subgroup(header(HIGH_ALIAS, 2)).await;
    for id in 0..HIGH {
        subgroup.object(id, 100).await;
    }
    subgroup.finish();
    assert_eq!(scene.next().await, (2, HIGH));
    // The publisher ends the rendition that was subscribed to, which ends the subscription.
    let done = PublishDone { code: code::Done::TRACK_ENDED, stream_count: 3, reason: String::new() };
    scene.requests[2].send(done).await.unwrap();
    assert_eq!(expect_done(&mut scene.requests[1]).await.code, code::Done::TRACK_ENDED);
}

#[tokio::test]
async fn relay_unsubscribes_from_unused_rendition() {
    let mut scene = AdaptiveScene::new(ladder(ENDLESS)).await;
    let request = scene.requests.remove(1);
    drop(request);
    scene.relay.until("nobody listens", |status| listeners(status, "low") == 0).await;
    scene.relay.until("nobody asks", |status| listeners(status, "high") == 0).await;
}

#[tokio::test]
async fn renditions_for_adaptation_are_found_in_the_catalog() {
    let mut scene = AdaptiveScene::new(AdaptiveMode::Catalogs(Vec::new())).await;
    scene.choke().await;
    scene.publish(1).await;
    assert_eq!(scene.next().await, (0, 1));
    assert_eq!(scene.next().await, (1, LOW));
}

/// The relay is blocked on the stream of the first group, so it chooses the lower rendition for the datagrams of later
/// groups.
#[tokio::test]
async fn subscriber_gets_datagrams_of_the_rendition_that_fits() {
    let mut scene = AdaptiveScene::new(ladder(ENDLESS)).await;
    scene.choke().await;
    assert_eq!(scene.next().await, (0, 1));
    for group in 1..4 {
        for (alias, objects, name) in [(LOW_ALIAS, LOW, "low"), (HIGH_ALIAS, HIGH, "high")] {
            (0..objects).for_each(|object| scene.send_datagram(alias, group, object));
            scene.until_largest(name, (group, objects - 1)).await;
        }
        let mut came = Vec::new();
        for _ in 0..LOW {
            let datagram = patiently(scene.subscriber.datagrams.recv()).await.unwrap();
            assert_eq!((datagram.alias, datagram.group), (scene.alias, group));
            came.push(datagram.object);
        }
        came.sort_unstable();
        assert!(came.into_iter().eq(0..LOW));
    }
    scene.subscriber.expect_no_stream().await;
    assert!(scene.subscriber.datagrams.try_recv().is_err(), "a datagram of the other rendition arrived");
}

#[tokio::test]
async fn update_of_an_adaptive_subscription_keeps_the_chosen_rendition() {
    let mut scene = AdaptiveScene::new(ladder(ENDLESS)).await;
    scene.choke().await;
    scene.update(Parameters { subscriber_priority: Some(3), ..Parameters::default() }).await;
    scene.publish(1).await;
    assert_eq!((scene.next().await, scene.next().await), ((0, 1), (1, LOW)));
    scene.update(Parameters { forward: Some(false), ..Parameters::default() }).await;
    scene.publish(2).await;
    scene.subscriber.expect_no_stream().await;
    scene.update(Parameters { forward: Some(true), ..Parameters::default() }).await;
    for group in 3..5 {
        scene.publish(group).await;
        assert_eq!(scene.next().await, (group, LOW));
    }
    // exact: the counts of rendition changes are final, since the relay chose before the groups arrived
    let totals = scene.relay.status().totals;
    assert_eq!((totals.renditions_down, totals.renditions_up), (1, 0));
}

/// Publishes the catalog when the relay asks for it.
async fn publish_catalog(publisher: &mut TestPeer) -> millrace_client::session::SessionRequest {
    let rendition = |name: &str, bitrate, alt_group| MsfTrack {
        name: name.to_owned(),
        packaging: "loc".to_owned(),
        codec: Some("av01".to_owned()),
        bitrate: Some(bitrate),
        alt_group: Some(alt_group),
        ..MsfTrack::default()
    };
    let tracks = vec![rendition("high", ENDLESS, 1), rendition("low", 1, 1), rendition("other", 2, 2)];
    let json = MsfCatalog::new(tracks).to_json().unwrap();
    let (upstream, _) = publisher.accept_subscribe(&track("live/cam", "catalog"), 9).await;
    let mut subgroup = publisher.subgroup(header(9, 0)).await;
    let mut bytes = Vec::new();
    encode_object_header(None, 0, None, json.len() as u64, ObjectStatus::Normal, &mut bytes);
    bytes.extend_from_slice(&json);
    subgroup.stream.write_all(&bytes).await.unwrap();
    subgroup.finish();
    upstream
}

const SECRET: [u8; 32] = [b's'; 32];

/// Makes a token that permits subscribing to one track, and whose ID is the track's name.
fn token_for(name: &'static str) -> AuthToken {
    let scope = GrantScope {
        actions: cat::actions(false, true),
        namespace: vec![],
        closed: false,
        track: Some(GrantMatch::Exact(name.into())),
    };
    let namespace = vec![GrantMatch::Exact("live".into()), GrantMatch::Exact("cam".into())];
    let scopes = vec![GrantScope { namespace, ..scope }];
    let claims = cat::CatClaims { id: Some(name.to_owned()), scopes, ..cat::CatClaims::default() };
    let value = cat::make(&claims, &Signer::read_secret(&SECRET).unwrap(), false).unwrap();
    Form::UseValue(Credential { kind: KIND_CAT, value: value.into() }).encode()
}

/// Returns access rules: anyone may publish, and clients with a token that is not in `revoked` may subscribe.
fn revoking(ids: &[&str]) -> AccessFileContents {
    let tokens = Requirements {
        keys: vec![keys::read_secret(&SECRET).unwrap()],
        revoked: ids.iter().map(|id| (*id).to_owned()).collect(),
        ..Requirements::default()
    };
    let rule = AccessRule {
        namespace: "live/**".parse().unwrap(),
        publish: vec![Principal::Anyone],
        subscribe: vec![Principal::Token],
        path: None,
        authority: None,
    };
    AccessFileContents {
        policy: AccessPolicy::new(vec![rule], tokens, false),
        client_roots: None,
        unread: vec![],
    }
}

/// The subscriber gets each rendition only while it has the right to it, whatever rights it had at the beginning.
#[tokio::test]
async fn adaptive_subscriber_loses_a_rendition_when_its_right_is_revoked() {
    let relay = TestRelay::with(|config| config.adaptive = ladder(ENDLESS));
    relay.server.set_access(revoking(&[]));
    let authorization_tokens = vec![token_for("high"), token_for("low")];
    let parameters = Parameters { authorization_tokens, ..Parameters::default() };
    let mut scene = AdaptiveScene::with(relay, ladder(ENDLESS), parameters).await;
    scene.choke().await;
    let first = scene.subscriber.next_subgroup().await;
    assert_eq!(first.all().await.0.len(), 1);
    scene.publish(1).await;
    assert_eq!(scene.next().await, (1, LOW), "the lower rendition was not chosen");
    // The subscriber has begun to receive the next group when the right is revoked.
    let mut open = scene.publisher.subgroup(header(LOW_ALIAS, 2)).await;
    open.object(0, 100).await;
    let begun = scene.subscriber.next_subgroup().await;
    assert_eq!(begun.header.group, 2);
    scene.relay.server.set_access(revoking(&["low"]));
    assert_eq!(
        begun.all().await.1,
        PeerStreamEnd::Reset,
        "the open group of the revoked rendition was not reset"
    );
    scene
        .relay
        .until("the revoked rendition to have no subscriber", |status| listeners(status, "low") == 0)
        .await;
    scene.relay.until("the other rendition", |status| status.totals.renditions_up == 1).await;
    let mut subgroup = scene.publisher.subgroup(header(HIGH_ALIAS, 3)).await;
    for id in 0..HIGH {
        subgroup.object(id, 100).await;
    }
    subgroup.finish();
    assert_eq!(scene.next().await, (3, HIGH), "the subscription did not continue with its own rendition");
}
