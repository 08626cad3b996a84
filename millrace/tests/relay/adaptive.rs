//! Subscribers that get the rendition that their path has room for.

use millrace_moq::{
    Datagram, Message, Parameters, Status as ObjectStatus, code,
    data::encode_object_header,
    message::{PublishDone, RequestUpdate},
    msf::{Catalog, Track},
    param::Token,
    token::{Credential, Form},
};
use millrace_relay::{
    Adaptive, LadderRule,
    access::{
        Policy, Principal, Requirements, Rule, cat,
        grant::{Match, Scope},
        keys::{self, Signer},
        token::KIND_CAT,
    },
};
use millrace_relay_daemon::{access::Loaded, status::Status};

use super::peer::{End, Peer, Relay, expect_done, header, patiently, payload, track};

/// More than a stream has credit for: unread, it keeps the relay waiting.
const TOO_MUCH: usize = 3_000_000;

/// Objects of a group of each rendition, by which a test tells them.
const HIGH: u64 = 2;
const LOW: u64 = 3;

const HIGH_ALIAS: u64 = 1;
const LOW_ALIAS: u64 = 2;

fn ladder(high: u64) -> Adaptive {
    let tracks = vec![("high".to_owned(), high), ("low".to_owned(), 1)];
    Adaptive::Ladders(vec![LadderRule { namespace: "live/*".parse().unwrap(), tracks }])
}

/// Bits per second that no path carries, so that nothing goes up.
const ENDLESS: u64 = 1 << 60;

/// A publisher of two renditions, and a subscriber of the higher one.
struct Scene {
    relay: Relay,
    publisher: Peer,
    subscriber: Peer,
    alias: u64,
    low: millrace_client::session::Request,
    requests: Vec<millrace_client::session::Request>,
}

impl Scene {
    async fn new(adaptive: Adaptive) -> Self {
        Self::with(Relay::with(|config| config.adaptive = adaptive.clone()), adaptive, Parameters::default())
            .await
    }

    /// The subscriber subscribes with these parameters.
    async fn with(relay: Relay, adaptive: Adaptive, parameters: Parameters) -> Self {
        let from_catalog = matches!(adaptive, Adaptive::Catalogs(_));
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
        relay.until("both are listened to", |status| listeners(status, "low") == 1).await;
        relay.until_ready().await;
        Self { relay, publisher, subscriber, alias: ok.track_alias, low, requests }
    }

    /// A group of both renditions, and waits until the relay has them.
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

    /// The first group, which the subscriber does not read: the relay waits, until it has switched.
    async fn choke(&self) {
        let mut low = self.publisher.subgroup(header(LOW_ALIAS, 0)).await;
        low.object(0, 10).await;
        low.finish();
        let mut high = self.publisher.subgroup(header(HIGH_ALIAS, 0)).await;
        high.object(0, TOO_MUCH).await;
        high.finish();
        self.until_largest("low", (0, 0)).await;
        self.relay.until("less is chosen", |status| status.totals.renditions_down == 1).await;
    }

    fn send_datagram(&self, alias: u64, group: u64, object: u64) {
        let datagram = Datagram {
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

    /// Changes the subscription.
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

    /// The next group that comes: its ID, and how many objects it has.
    async fn next(&mut self) -> (u64, u64) {
        let received = self.subscriber.next_subgroup().await;
        assert_eq!(received.header.alias, self.alias);
        let group = received.header.group;
        let (objects, end) = received.all().await;
        assert_eq!(end, End::Fin);
        assert!(objects.iter().copied().eq(0..objects.len() as u64), "{objects:?}");
        (group, objects.len() as u64)
    }
}

fn named<'a>(status: &'a Status, name: &str) -> Option<&'a millrace_relay::status::Track> {
    status.tracks.iter().find(|track| track.name.ends_with(name))
}

fn listeners(status: &Status, name: &str) -> u64 {
    named(status, name).map_or(0, |track| track.subscribers)
}

fn largest_of(status: &Status, name: &str) -> Option<(u64, u64)> {
    named(status, name)?.largest
}

#[tokio::test]
async fn who_has_too_little_room_gets_the_lower_rendition_from_the_next_group_on() {
    let mut scene = Scene::new(ladder(ENDLESS)).await;
    scene.choke().await;
    scene.publish(1).await;
    assert_eq!(scene.next().await, (0, 1), "what has begun goes on");
    assert_eq!(scene.next().await, (1, LOW));
    for group in 2..6 {
        scene.publish(group).await;
        assert_eq!(scene.next().await, (group, LOW));
    }
    scene.subscriber.expect_no_stream().await;
    scene.relay.assert_forwarded();
    let totals = scene.relay.status().totals; // exact: the groups that have come show each choice
    assert_eq!((totals.renditions_down, totals.renditions_up), (1, 0));
}

#[tokio::test]
async fn when_there_is_room_again_the_higher_rendition_comes_back() {
    let mut scene = Scene::new(ladder(2)).await;
    scene.choke().await;
    // It is chosen while nothing is read.
    scene.publish(1).await;
    assert_eq!(scene.next().await, (0, 1));
    assert_eq!(scene.next().await, (1, LOW));
    scene.relay.until("more is chosen", |status| status.totals.renditions_up == 1).await;
    for group in 2..6 {
        scene.publish(group).await;
        assert_eq!(scene.next().await, (group, HIGH));
    }
    scene.subscriber.expect_no_stream().await;
    scene.relay.assert_forwarded();
}

#[tokio::test]
async fn who_asks_for_two_renditions_chooses() {
    let mut scene = Scene::new(ladder(ENDLESS)).await;
    scene.choke().await;
    let (second, ok) = scene.subscriber.subscribe(&track("live/cam", "low")).await;
    scene.relay.until("its own is back", |status| status.totals.renditions_up == 1).await;
    scene.publish(1).await;
    let mut got = Vec::new();
    for _ in 0..4 {
        let received = scene.subscriber.next_subgroup().await;
        let (alias, group) = (received.header.alias, received.header.group);
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
async fn when_a_rendition_ends_the_subscription_goes_on_with_another() {
    let mut scene = Scene::new(ladder(ENDLESS)).await;
    scene.choke().await;
    scene.publish(1).await;
    assert_eq!((scene.next().await, scene.next().await), ((0, 1), (1, LOW)));
    let done = PublishDone { code: code::Done::TRACK_ENDED, stream_count: 2, reason: String::new() };
    scene.low.send(done).await.unwrap();
    scene.relay.until("the other is chosen", |status| status.totals.renditions_up == 1).await;
    let mut subgroup = scene.publisher.subgroup(header(HIGH_ALIAS, 2)).await;
    for id in 0..HIGH {
        subgroup.object(id, 100).await;
    }
    subgroup.finish();
    assert_eq!(scene.next().await, (2, HIGH));
    // The one that was asked for ends the subscription.
    let done = PublishDone { code: code::Done::TRACK_ENDED, stream_count: 3, reason: String::new() };
    scene.requests[2].send(done).await.unwrap();
    assert_eq!(expect_done(&mut scene.requests[1]).await.code, code::Done::TRACK_ENDED);
}

#[tokio::test]
async fn an_unsubscribed_rendition_is_let_go_of() {
    let mut scene = Scene::new(ladder(ENDLESS)).await;
    let request = scene.requests.remove(1);
    drop(request);
    scene.relay.until("nobody listens", |status| listeners(status, "low") == 0).await;
    scene.relay.until("nobody asks", |status| listeners(status, "high") == 0).await;
}

#[tokio::test]
async fn ladders_come_from_the_catalog() {
    let mut scene = Scene::new(Adaptive::Catalogs(Vec::new())).await;
    scene.choke().await;
    scene.publish(1).await;
    assert_eq!(scene.next().await, (0, 1));
    assert_eq!(scene.next().await, (1, LOW));
}

/// The first group is a stream, which makes the relay wait; what comes then is datagrams.
#[tokio::test]
async fn datagrams_are_of_the_rendition_that_fits() {
    let mut scene = Scene::new(ladder(ENDLESS)).await;
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
    assert!(scene.subscriber.datagrams.try_recv().is_err(), "nothing of the other");
}

#[tokio::test]
async fn an_update_of_the_subscription_leaves_the_choice_as_it_is() {
    let mut scene = Scene::new(ladder(ENDLESS)).await;
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
    let totals = scene.relay.status().totals; // exact: the groups that have come show each choice
    assert_eq!((totals.renditions_down, totals.renditions_up), (1, 0));
}

/// The relay asks for the catalog, and gets it.
async fn publish_catalog(publisher: &mut Peer) -> millrace_client::session::Request {
    let rendition = |name: &str, bitrate, alt_group| Track {
        name: name.to_owned(),
        packaging: "loc".to_owned(),
        codec: Some("av01".to_owned()),
        bitrate: Some(bitrate),
        alt_group: Some(alt_group),
        ..Track::default()
    };
    let tracks = vec![rendition("high", ENDLESS, 1), rendition("low", 1, 1), rendition("other", 2, 2)];
    let json = Catalog::new(tracks).to_json().unwrap();
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

/// A token for one track, of which the name is its ID.
fn token_for(name: &'static str) -> Token {
    let scope = Scope {
        actions: cat::actions(false, true),
        namespace: vec![],
        closed: false,
        track: Some(Match::Exact(name.into())),
    };
    let namespace = vec![Match::Exact("live".into()), Match::Exact("cam".into())];
    let scopes = vec![Scope { namespace, ..scope }];
    let claims = cat::Claims { id: Some(name.to_owned()), scopes, ..cat::Claims::default() };
    let value = cat::make(&claims, &Signer::read_secret(&SECRET).unwrap(), false).unwrap();
    Form::UseValue(Credential { kind: KIND_CAT, value: value.into() }).encode()
}

/// Everybody may publish, and subscribe with tokens that are not among these.
fn revoking(ids: &[&str]) -> Loaded {
    let tokens = Requirements {
        keys: vec![keys::read_secret(&SECRET).unwrap()],
        revoked: ids.iter().map(|id| (*id).to_owned()).collect(),
        ..Requirements::default()
    };
    let rule = Rule {
        namespace: "live/**".parse().unwrap(),
        publish: vec![Principal::Anyone],
        subscribe: vec![Principal::Token],
        path: None,
        authority: None,
    };
    Loaded { policy: Policy::new(vec![rule], tokens, false), client_roots: None, unread: vec![] }
}

/// Each rendition is the subscriber's as long as it has the right to it, whichever it was when the subscription began.
#[tokio::test]
async fn a_rendition_ends_with_the_right_to_it() {
    let relay = Relay::with(|config| config.adaptive = ladder(ENDLESS));
    relay.server.set_access(revoking(&[]));
    let authorization_tokens = vec![token_for("high"), token_for("low")];
    let parameters = Parameters { authorization_tokens, ..Parameters::default() };
    let mut scene = Scene::with(relay, ladder(ENDLESS), parameters).await;
    scene.choke().await;
    let first = scene.subscriber.next_subgroup().await;
    assert_eq!(first.all().await.0.len(), 1);
    scene.publish(1).await;
    assert_eq!(scene.next().await, (1, LOW), "less is chosen");
    // Of the next group some is there, and more would come.
    let mut open = scene.publisher.subgroup(header(LOW_ALIAS, 2)).await;
    open.object(0, 100).await;
    let begun = scene.subscriber.next_subgroup().await;
    assert_eq!(begun.header.group, 2);
    scene.relay.server.set_access(revoking(&["low"]));
    assert_eq!(begun.all().await.1, End::Reset, "what is open of it is cut short");
    scene.relay.until("nobody listens to it", |status| listeners(status, "low") == 0).await;
    scene.relay.until("the other is chosen", |status| status.totals.renditions_up == 1).await;
    let mut subgroup = scene.publisher.subgroup(header(HIGH_ALIAS, 3)).await;
    for id in 0..HIGH {
        subgroup.object(id, 100).await;
    }
    subgroup.finish();
    assert_eq!(scene.next().await, (3, HIGH), "the subscription goes on with what it asked for");
}
