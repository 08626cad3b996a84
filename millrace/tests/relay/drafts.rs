//! Tests of peers that speak different drafts, on one track.

use std::sync::Arc;

use millrace_client::{
    broadcast::{Broadcast, History},
    serve::BroadcastServer,
    session::{Error, Remote, Session, SessionRequest},
    tls::CertificateTrust,
};
use millrace_moq::{
    Draft, Filter, GroupOrder, Location, Message, Namespace, Parameters, Properties, SubgroupId, TrackName,
    code,
    message::{
        NamespaceFound, Publish, PublishNamespace, PublishStateNotify, RequestOk, RequestUpdate, Subscribe,
        SubscribeNamespace, SubscribeOk, SubscribeTracks, TrackStatus,
    },
    param::RangeFilter,
    property::TrackProperties,
};

use super::{
    fetch::{fetched, locations, past, publish_groups, serve_upstream},
    peer::{
        PeerStreamEnd, TestPeer, TestRelay, at, expect_done, first_subscriber, header, patiently, payload,
        publishing, publishing_in, track,
    },
};

/// Returns every pair of drafts.
fn pairs() -> impl Iterator<Item = (Draft, Draft)> {
    Draft::ALL.into_iter().flat_map(|one| Draft::ALL.map(|other| (one, other)))
}

fn filtered(filter: Filter) -> Parameters {
    Parameters { filter: Some(filter), ..Parameters::default() }
}

/// Subscribes to new objects, and requests earlier ones from `groups_back` groups before the current one: by a joining
/// FETCH or by FILL_PARAMETERS in SUBSCRIBE (a fill), as the draft defines.
async fn join(peer: &mut TestPeer, name: &TrackName, groups_back: u64) -> (SessionRequest, Vec<Location>) {
    join_in(peer, name, groups_back, GroupOrder::Ascending).await
}

async fn join_in(
    peer: &mut TestPeer,
    name: &TrackName,
    groups_back: u64,
    order: GroupOrder,
) -> (SessionRequest, Vec<Location>) {
    let mut parameters = Parameters { group_order: Some(order), ..filtered(Filter::NextObject) };
    if peer.session.draft().has_fills() {
        let from = filtered(Filter::Relative(groups_back + 1));
        parameters.fill = Some(Box::new(from));
        let (request, _) = peer.try_subscribe(name, parameters).await.unwrap();
        let (objects, unknown) = past(peer, order).await;
        assert!(unknown.is_empty());
        return (request, objects);
    }
    let subscription = peer.session.next_request_id();
    let subscribe = Subscribe { request_id: subscription, track: name.clone(), parameters };
    let mut request = peer.session.request(subscribe).await.unwrap();
    assert!(matches!(patiently(request.answer()).await.unwrap(), Message::SubscribeOk(_)));
    let back = millrace_moq::message::FetchKind::RelativeJoining { subscription, groups_back };
    (request, fetched(peer, back, order).await.objects)
}

#[tokio::test]
async fn publisher_of_each_draft_serves_players_of_all_drafts() {
    let relay = TestRelay::start();
    for draft in Draft::ALL {
        let (mut publisher, _namespace, name) = publishing(relay.peer_of(draft).await).await;
        let (mut first, _request, _ok, mut upstream) =
            first_subscriber(&relay, &mut publisher, &name, 1).await;
        let mut players = Vec::new();
        for draft in Draft::ALL {
            let player = relay.peer_of(draft).await;
            let (request, ok) = player.subscribe(&name).await;
            assert_eq!(ok.parameters.largest_object, None, "{draft}");
            players.push((player, request));
        }
        relay.until_ready().await;
        for group in 0..3 {
            let mut subgroup = publisher.subgroup(header(1, group)).await;
            for id in 0..4 {
                subgroup.object(id, 700).await;
            }
            subgroup.finish();
            for player in players.iter_mut().map(|(player, _)| player).chain([&mut first]) {
                let received = player.next_subgroup().await;
                assert_eq!(received.header.group, group);
                assert_eq!(received.all().await, (vec![0, 1, 2, 3], PeerStreamEnd::Fin));
            }
        }
        // exact: the list of sessions and their drafts is final, since the relay has answered every request
        let status = relay.status();
        let mut spoken: Vec<_> = status.sessions.iter().map(|session| session.draft).collect();
        spoken.sort_unstable();
        let mut expected = vec![draft.number(), Draft::NEWEST.number(), 18, 19, 20, 21, 22];
        expected.sort_unstable();
        assert_eq!(spoken, expected, "/status says what each speaks");
        let done = millrace_moq::message::PublishDone {
            code: code::Done::TRACK_ENDED,
            stream_count: 3,
            reason: "over".into(),
        };
        upstream.send(done).await.unwrap();
        for (player, mut request) in players {
            let done = expect_done(&mut request).await;
            let expected = (code::Done::TRACK_ENDED, 3, "over");
            assert_eq!((done.code, done.stream_count, &*done.reason), expected, "{}", player.session.draft());
            player.session.close(code::Session::NO_ERROR, "over");
        }
        for peer in [publisher, first] {
            peer.session.close(code::Session::NO_ERROR, "over");
        }
        relay.until("the end of all sessions", |status| status.sessions.is_empty()).await;
    }
    relay.assert_forwarded();
}

/// A player that joins late gets earlier objects by a joining FETCH or, in later drafts, by FILL_PARAMETERS (a fill).
/// The subscription must continue with the next object.
#[tokio::test]
async fn late_player_of_each_draft_gets_earlier_objects() {
    for draft in [Draft::D18, Draft::D22] {
        let relay = TestRelay::start();
        let (mut publisher, _namespace, name) = publishing(relay.peer_of(draft).await).await;
        let (mut first, _request, _ok, mut upstream) =
            first_subscriber(&relay, &mut publisher, &name, 1).await;
        publish_groups(&relay, &publisher, &mut first, 0..3).await;
        let mut open = publisher.subgroup(header(1, 3)).await;
        open.object(0, 700).await;
        open.object(1, 700).await;
        first.next_subgroup().await.objects(2).await;
        relay.until_largest(at(3, 1)).await;
        let mut late = Vec::new();
        for draft in Draft::ALL {
            let mut player = relay.peer_of(draft).await;
            let (request, before) = join(&mut player, &name, 1).await;
            assert_eq!(before, [locations([2]), vec![at(3, 0), at(3, 1)]].concat(), "{draft}");
            late.push((player, request));
        }
        open.object(2, 700).await;
        open.finish();
        for (player, _) in &mut late {
            let (objects, end) = player.next_subgroup().await.all().await;
            assert_eq!((objects, end), (vec![2], PeerStreamEnd::Fin), "contiguous, and without overlap");
        }
        let done = millrace_moq::message::PublishDone {
            code: code::Done::TRACK_ENDED,
            stream_count: 4,
            reason: String::new(),
        };
        upstream.send(done).await.unwrap();
        for (player, mut request) in late {
            let draft = player.session.draft();
            let streams = 1 + u64::from(draft.has_fills());
            assert_eq!(expect_done(&mut request).await.stream_count, streams, "{draft}");
        }
    }
}

/// The relay has no earlier objects, since the track had no subscriber, so they come from its publisher.
#[tokio::test]
async fn first_player_of_a_track_gets_whole_current_group() {
    const OBJECTS: u64 = 20;
    let relay = TestRelay::start();
    for (draft, order) in Draft::ALL
        .into_iter()
        .flat_map(|draft| [GroupOrder::Ascending, GroupOrder::Descending].map(|order| (draft, order)))
    {
        // Each pair of a draft and a group order uses a new track that had no subscriber before.
        let path = format!("live/{draft}/{order:?}");
        let broadcast = Broadcast::new(Namespace::from_path(&path).unwrap(), History::default());
        let video = broadcast.create("video", Properties::default()).unwrap();
        let mut group = video.open(2, SubgroupId::Zero, 0);
        for id in 0..OBJECTS {
            group.write(id, payload(2, id, 3000).into());
        }
        let remote = Remote::new(relay.url(), CertificateTrust::Anyone);
        let session = Session::connect_from(&remote, quinn::EndpointConfig::default()).await.unwrap();
        let server = BroadcastServer::new(Arc::clone(&session), broadcast);
        tokio::spawn(session.run(Arc::clone(&server)));
        let _announced = server.announce().await.unwrap();
        let mut player = relay.peer_of(draft).await;
        let (_request, before) = join_in(&mut player, &track(&path, "video"), 0, order).await;
        group.write(OBJECTS, payload(2, OBJECTS, 3000).into());
        drop(group);
        let (live, end) = player.next_subgroup().await.all().await;
        // The earlier objects end where the relay's cache ended when the player joined, which depends on timing. The
        // subscription must continue exactly there.
        let whole = before.into_iter().chain(live.into_iter().map(|id| at(2, id)));
        assert_eq!(
            whole.collect::<Vec<_>>(),
            (0..=OBJECTS).map(|id| at(2, id)).collect::<Vec<_>>(),
            "{draft} {order:?}"
        );
        assert_eq!(end, PeerStreamEnd::Fin);
    }
}

/// The relay asks each publisher in the publisher's draft, and answers each player in the player's draft.
#[tokio::test]
async fn uncached_objects_are_fetched_from_publisher_of_any_draft() {
    let relay = TestRelay::start();
    for (of_publisher, of_player) in pairs() {
        let path = format!("live/{of_publisher}/{of_player}");
        let publisher = relay.peer_of(of_publisher).await;
        let (mut publisher, _namespace, name) = publishing_in(&path, publisher).await;
        let (mut first, _request, _ok, _upstream) = first_subscriber(&relay, &mut publisher, &name, 1).await;
        publish_groups(&relay, &publisher, &mut first, 5..7).await;
        let mut player = relay.peer_of(of_player).await;
        let joining = join(&mut player, &name, 3);
        let ((_request, before), ()) =
            tokio::join!(joining, serve_upstream(&mut publisher, GroupOrder::Ascending));
        assert_eq!(before, locations(3..7), "{of_publisher} to {of_player}");
    }
}

#[tokio::test]
async fn newest_common_draft_is_used() {
    let relay = TestRelay::with(|config| config.drafts = vec![Draft::D20, Draft::D19]);
    let peer = relay.peer().await;
    assert_eq!(peer.session.draft(), Draft::D20);
    let offering = |drafts: &[Draft]| {
        let remote = millrace_client::session::Remote::new(
            relay.url(),
            millrace_client::tls::CertificateTrust::Anyone,
        );
        millrace_client::session::Remote { drafts: drafts.to_vec(), ..remote }
    };
    // The server's order of preference of the drafts decides, and not the client's.
    let both =
        TestPeer::connect_to(&offering(&[Draft::D18, Draft::D19, Draft::D20]), Default::default()).await;
    assert_eq!(both.session.draft(), Draft::D20);
    let old = TestPeer::connect_to(&offering(&[Draft::D19, Draft::D18]), Default::default()).await;
    assert_eq!(old.session.draft(), Draft::D19);
    if !super::site::wants_web() {
        let none = millrace_client::session::Session::connect(&offering(&[Draft::D22, Draft::D18])).await;
        let error = none.err().expect("nothing in common").to_string();
        assert!(error.contains("none of the offered drafts of MoQ Transport"), "{error}");
    }
}

#[tokio::test]
async fn a_session_may_have_several_subscriptions_to_a_track() {
    let relay = TestRelay::start();
    for draft in [Draft::D19, Draft::D22] {
        let (mut publisher, _namespace, name) = publishing(relay.peer_of(draft).await).await;
        let mut player = relay.peer_of(draft).await;
        let (subscribed, _upstream) =
            tokio::join!(player.subscribe(&name), publisher.accept_subscribe(&name, 1));
        let (mut one, first) = subscribed;
        let (_two, second) = player.try_subscribe(&name, filtered(Filter::NEXT_GROUP)).await.unwrap();
        let mut both = [first.track_alias, second.track_alias];
        both.sort_unstable();
        assert_ne!(both[0], both[1]);
        for group in 0..4 {
            let mut subgroup = publisher.subgroup(header(1, group)).await;
            subgroup.object(0, 700).await;
            subgroup.object(1, 700).await;
            subgroup.finish();
            let mut aliases = Vec::new();
            for _ in 0..2 {
                let received = player.next_subgroup().await;
                assert_eq!(received.header.group, group);
                aliases.push(received.header.alias);
                assert_eq!(received.all().await, (vec![0, 1], PeerStreamEnd::Fin));
            }
            aliases.sort_unstable();
            assert_eq!(aliases, both, "a subscription did not get its own copy");
        }
        // One player unsubscribes, and the other one continues.
        one.cancel();
        relay.until("only one", |status| status.tracks[0].subscribers == 1).await;
        let mut subgroup = publisher.subgroup(header(1, 4)).await;
        subgroup.object(0, 700).await;
        subgroup.finish();
        let received = player.next_subgroup().await;
        assert_eq!(received.header.alias, second.track_alias);
        assert_eq!(received.all().await, (vec![0], PeerStreamEnd::Fin));
        player.expect_no_stream().await;
        for peer in [publisher, player] {
            peer.session.close(code::Session::NO_ERROR, "over");
        }
        relay.until("the end of all subscriptions", |status| status.sessions.is_empty()).await;
    }
}

/// Only later drafts of MoQ Transport can express a subscription range that ends within a group.
#[tokio::test]
async fn subscription_range_ends_at_its_last_object_within_a_group() {
    let relay = TestRelay::start();
    let (mut publisher, _namespace, name) = publishing(relay.peer().await).await;
    let (mut first, _request, _ok, _upstream) = first_subscriber(&relay, &mut publisher, &name, 1).await;
    let mut player = relay.peer().await;
    let (mut request, _) =
        player.try_subscribe(&name, filtered(Filter::range(at(1, 1), at(2, 2)))).await.unwrap();
    for group in 0..4 {
        let mut subgroup = publisher.subgroup(header(1, group)).await;
        for id in 0..5 {
            subgroup.object(id, 700).await;
        }
        subgroup.finish();
        assert_eq!(first.next_subgroup().await.all().await.0.len(), 5);
    }
    for (group, objects) in [(1, vec![1, 2, 3, 4]), (2, vec![0, 1, 2])] {
        let received = player.next_subgroup().await;
        assert_eq!((received.header.group, received.all().await), (group, (objects, PeerStreamEnd::Fin)));
    }
    player.expect_no_stream().await;
    relay.until_largest(at(3, 4)).await;
    // The subscription is established, and the subscriber changes it with REQUEST_UPDATE.
    let request_id = player.session.next_request_id();
    let parameters = filtered(Filter::All);
    request.send(RequestUpdate { request_id, parameters }).await.unwrap();
    let Some(Message::RequestOk(ok)) = patiently(request.next()).await.unwrap() else { panic!("no answer") };
    assert_eq!(ok.parameters.largest_object, Some(at(3, 4)));
    let received = player.next_subgroup().await;
    assert_eq!((received.header.group, received.all().await), (3, (vec![0, 1, 2, 3, 4], PeerStreamEnd::Fin)));
}

#[tokio::test]
async fn a_subscription_to_the_past_is_refused_up_to_draft_19() {
    let relay = TestRelay::start();
    let (mut publisher, _namespace, name) = publishing(relay.peer().await).await;
    let (mut first, _request, _ok, _upstream) = first_subscriber(&relay, &mut publisher, &name, 1).await;
    publish_groups(&relay, &publisher, &mut first, 5..6).await;
    for draft in Draft::ALL {
        let mut player = relay.peer_of(draft).await;
        let over = Filter::AbsoluteRange { start: at(1, 0), end_group: 2, end_object: None };
        let answer = player.try_subscribe(&name, filtered(over)).await;
        match answer {
            Err(refused) if draft < Draft::D20 => assert_eq!(refused.code, code::Request::INVALID_RANGE),
            Ok(_) if draft >= Draft::D20 => player.expect_no_stream().await,
            _ => panic!("{draft}: {:?}", answer.err()),
        }
    }
}

#[tokio::test]
async fn subscription_update_with_a_fill_range_gets_earlier_objects() {
    let relay = TestRelay::start();
    let (mut publisher, _namespace, name) = publishing(relay.peer().await).await;
    let (mut first, _request, _ok, _upstream) = first_subscriber(&relay, &mut publisher, &name, 1).await;
    publish_groups(&relay, &publisher, &mut first, 0..3).await;
    let mut player = relay.peer().await;
    let paused = Parameters { forward: Some(false), ..filtered(Filter::NextObject) };
    let (mut request, _) = player.try_subscribe(&name, paused).await.unwrap();
    let fill = |filter| Some(Box::new(filtered(filter)));
    let update = |forward, fill| Parameters { forward, fill, ..Parameters::default() };
    let mut say = async |parameters| {
        let request_id = player.session.next_request_id();
        request.send(RequestUpdate { request_id, parameters }).await.unwrap();
        patiently(request.next()).await.unwrap()
    };
    // A subscription with forward state 0 gets no earlier objects (fill).
    let said = say(update(None, fill(Filter::All))).await;
    assert!(matches!(said, Some(Message::RequestOk(_))), "{said:?}");
    let said = say(update(Some(true), fill(Filter::range(at(1, 1), at(1, 2))))).await;
    assert!(matches!(said, Some(Message::RequestOk(_))), "{said:?}");
    assert_eq!(past(&mut player, GroupOrder::Ascending).await.0, [at(1, 1), at(1, 2)]);
    player.expect_no_stream().await;
}

/// A player that stops the stream of earlier objects (the fill) ends only that stream, not the subscription.
#[tokio::test]
async fn subscription_continues_after_its_earlier_objects_are_stopped() {
    let relay = TestRelay::start();
    let (mut publisher, _namespace, name) = publishing(relay.peer().await).await;
    let (mut first, _request, _ok, _upstream) = first_subscriber(&relay, &mut publisher, &name, 1).await;
    let mut subgroup = publisher.subgroup(header(1, 0)).await;
    for id in 0..60 {
        subgroup.object(id, 60_000).await;
    }
    subgroup.finish();
    first.next_subgroup().await.all().await;
    relay.until_largest(at(0, 59)).await;
    let mut player = relay.peer().await;
    let parameters = Parameters { fill: Some(Box::default()), ..filtered(Filter::NextObject) };
    let whole = Parameters { fill: Some(Box::new(filtered(Filter::All))), ..parameters };
    let (_one, _) = player.try_subscribe(&name, whole.clone()).await.unwrap();
    let (_, mut stream) = patiently(player.streams.recv()).await.unwrap();
    stream.stop(code::Reset::CANCELLED);
    let (mut two, second) = player.try_subscribe(&name, whole).await.unwrap();
    let (_, mut stream) = patiently(player.streams.recv()).await.unwrap();
    two.cancel();
    let reset = async {
        loop {
            match stream.chunk().await {
                Ok(Some(_)) => {}
                other => return other,
            }
        }
    };
    assert!(matches!(patiently(reset).await, Err(Error::Cancelled)), "its fill ends with a subscription");
    relay.until("only one", |status| status.tracks[0].subscribers == 2).await;
    let mut subgroup = publisher.subgroup(header(1, 1)).await;
    subgroup.object(0, 700).await;
    subgroup.finish();
    let received = player.next_subgroup().await;
    assert_ne!(received.header.alias, second.track_alias);
    assert_eq!(received.all().await, (vec![0], PeerStreamEnd::Fin));
}

#[tokio::test]
async fn number_of_simultaneous_fill_requests_is_limited() {
    let relay = TestRelay::start();
    let (mut publisher, _namespace, name) = publishing(relay.peer().await).await;
    let (mut first, _request, _ok, _upstream) = first_subscriber(&relay, &mut publisher, &name, 1).await;
    publish_groups(&relay, &publisher, &mut first, 5..6).await;
    let player = relay.peer().await;
    // The publisher does not answer the relay's FETCH, so no request for earlier objects (fill) completes.
    let fill = || Some(Box::new(filtered(Filter::range(at(0, 0), at(1, 0)))));
    let (mut request, _) =
        player.try_subscribe(&name, Parameters { fill: fill(), ..Parameters::default() }).await.unwrap();
    let mut refused = None;
    for _ in 0..4 {
        let request_id = player.session.next_request_id();
        let parameters = Parameters { fill: fill(), ..Parameters::default() };
        request.send(RequestUpdate { request_id, parameters }).await.unwrap();
        match patiently(request.next()).await.unwrap() {
            Some(Message::RequestOk(_)) => {}
            other => refused = other,
        }
    }
    let Some(Message::RequestError(refused)) = refused else { panic!("{refused:?}") };
    assert_eq!(refused.code, code::Request::EXCESSIVE_LOAD);
    assert_eq!(expect_done(&mut request).await.code, code::Done::UPDATE_FAILED);
}

#[tokio::test]
async fn range_filters_are_refused() {
    let relay = TestRelay::start();
    let (mut publisher, _namespace, name) = publishing(relay.peer().await).await;
    let (_first, _request, _ok, _upstream) = first_subscriber(&relay, &mut publisher, &name, 1).await;
    for draft in [Draft::D19, Draft::D22] {
        let player = relay.peer_of(draft).await;
        let filter = RangeFilter { kind: 0x26, value: vec![0, 1, 5].into() };
        let filtered = Parameters { range_filters: vec![filter], ..Parameters::default() };
        let refused = player.try_subscribe(&name, filtered.clone()).await.err().unwrap();
        assert_eq!(refused.code, code::Request::INVALID_FILTER);
        let (mut request, _) = player.subscribe(&name).await;
        let request_id = player.session.next_request_id();
        request.send(RequestUpdate { request_id, parameters: filtered }).await.unwrap();
        let Some(Message::RequestError(refused)) = patiently(request.next()).await.unwrap() else {
            panic!("no error")
        };
        assert_eq!(refused.code, code::Request::INVALID_FILTER);
        assert_eq!(expect_done(&mut request).await.code, code::Done::UPDATE_FAILED);
    }
}

#[tokio::test]
async fn subscriber_without_include_properties_gets_no_track_properties() {
    let relay = TestRelay::start();
    let (mut publisher, _namespace, name) = publishing(relay.peer().await).await;
    let properties = TrackProperties { publisher_priority: Some(7), ..TrackProperties::default() }.encode();
    let player = relay.peer().await;
    let without = Parameters { include_properties: Some(false), ..Parameters::default() };
    let (subscribed, _upstream) = tokio::join!(
        player.try_subscribe(&name, without.clone()),
        publisher.accept_subscribe_with(&name, 1, Parameters::default(), properties.clone())
    );
    assert_eq!(subscribed.unwrap().1.properties, Properties::default());
    assert_eq!(player.subscribe(&name).await.1.properties, properties);
    let request_id = player.session.next_request_id();
    let status = TrackStatus { request_id, track: name, parameters: without };
    let mut request = player.session.request(status).await.unwrap();
    let Message::RequestOk(ok) = patiently(request.answer()).await.unwrap() else { panic!("no answer") };
    assert_eq!(ok.properties, Properties::default());
}

/// A publication starts paused, and the relay asks for its objects: in its answer to PUBLISH, or from draft-20 on in an
/// update.
#[tokio::test]
async fn paused_publication_is_resumed_in_the_answer_or_by_request_update() {
    let relay = TestRelay::start();
    for draft in Draft::ALL {
        let publisher = relay.peer_of(draft).await;
        let publish = |forward, alias| Publish {
            request_id: publisher.session.next_request_id(),
            track: track("live", &format!("{draft}-{alias}")),
            track_alias: alias,
            parameters: Parameters { forward, ..Parameters::default() },
            properties: Properties::default(),
        };
        for (alias, forward) in [(1, Some(false)), (2, None)] {
            let mut request = publisher.session.request(publish(forward, alias)).await.unwrap();
            let Message::RequestOk(ok) = patiently(request.answer()).await.unwrap() else {
                panic!("refused")
            };
            let in_the_answer = draft.accepts_with_parameters();
            assert_eq!(ok.parameters.forward, in_the_answer.then_some(true), "{draft}");
            if forward == Some(false) && !in_the_answer {
                let Some(Message::RequestUpdate(update)) = patiently(request.next()).await.unwrap() else {
                    panic!("no update")
                };
                assert_eq!(update.parameters.forward, Some(true));
                request.send(RequestOk::default()).await.unwrap();
            }
            relay.until("the track to exist", |status| !status.tracks.is_empty()).await;
            // A second PUBLISH of the same track is refused.
            let again = publish(None, 9);
            let again = Publish { track: track("live", &format!("{draft}-{alias}")), ..again };
            let refused = patiently(publisher.session.request(again).await.unwrap().answer()).await;
            let Err(Error::Refused(refused)) = refused else { panic!("{refused:?}") };
            let expected = match draft {
                Draft::D18 => code::Request::DUPLICATE_SUBSCRIPTION,
                _ => code::Request::UNINTERESTED,
            };
            assert_eq!(refused.code, expected, "{draft}");
        }
    }
}

#[tokio::test]
async fn tracks_below_a_namespace_prefix_are_published_from_the_requested_start() {
    let relay = TestRelay::start();
    let (mut publisher, _namespace, name) = publishing(relay.peer().await).await;
    let (mut first, _request, _ok, _upstream) = first_subscriber(&relay, &mut publisher, &name, 1).await;
    publish_groups(&relay, &publisher, &mut first, 0..3).await;
    let mut watcher = relay.peer().await;
    let asked = Parameters {
        group_order: Some(GroupOrder::Descending),
        fill: Some(Box::new(filtered(Filter::Relative(2)))),
        ..filtered(Filter::NextObject)
    };
    let watch = SubscribeTracks {
        request_id: watcher.session.next_request_id(),
        prefix: name.namespace().clone(),
        parameters: asked,
    };
    let mut request = watcher.session.request(watch).await.unwrap();
    assert!(matches!(patiently(request.answer()).await.unwrap(), Message::RequestOk(_)));
    let (message, mut published) = patiently(watcher.requests.recv()).await.unwrap();
    let Message::Publish(publish) = message else { panic!("{message:?} instead of PUBLISH") };
    let Parameters { forward, filter, group_order, largest_object, .. } = publish.parameters;
    assert_eq!((forward, filter), (Some(true), Some(Filter::NextObject)));
    assert_eq!((group_order, largest_object), (Some(GroupOrder::Descending), Some(at(2, 2))));
    published.send(RequestOk::default()).await.unwrap();
    let (objects, _) = past(&mut watcher, GroupOrder::Descending).await;
    assert_eq!(objects, locations([2, 1]), "in the subscription's order");
}

/// In draft-18, FIN on the stream of SUBSCRIBE_NAMESPACE ends the request. In later drafts FIN says that no update will
/// follow.
#[tokio::test]
async fn fin_ends_a_namespace_request_only_in_draft_18() {
    let relay = TestRelay::start();
    for draft in Draft::ALL {
        let watcher = relay.peer_of(draft).await;
        let request_id = watcher.session.next_request_id();
        let (prefix, parameters) = Default::default();
        let watch = SubscribeNamespace { request_id, prefix, parameters };
        let mut watching = watcher.session.request(watch).await.unwrap();
        assert!(matches!(patiently(watching.answer()).await.unwrap(), Message::RequestOk(_)));
        watching.finish();
        if draft == Draft::D18 {
            assert_eq!(patiently(watching.next()).await.unwrap(), None);
            continue;
        }
        let publisher = relay.peer_of(draft).await;
        let announce = PublishNamespace {
            request_id: publisher.session.next_request_id(),
            namespace: track("live", "x").namespace().clone(),
            parameters: Parameters::default(),
        };
        let mut announced = publisher.session.request(announce).await.unwrap();
        assert!(matches!(patiently(announced.answer()).await.unwrap(), Message::RequestOk(_)));
        announced.finish();
        let found = NamespaceFound { suffix: track("live", "x").namespace().clone(), parameters: None };
        assert_eq!(patiently(watching.next()).await.unwrap(), Some(found.into()), "{draft}");
        // Resetting the stream of PUBLISH_NAMESPACE withdraws the announcement.
        announced.cancel();
        let gone = patiently(watching.next()).await.unwrap();
        assert!(matches!(gone, Some(Message::NamespaceDone(_))), "{draft}: {gone:?}");
    }
}

#[tokio::test]
async fn publish_state_notify_is_accepted_from_a_publisher_only() {
    let relay = TestRelay::start();
    let (mut publisher, _namespace, name) = publishing(relay.peer().await).await;
    let (_first, mut request, _ok, mut upstream) = first_subscriber(&relay, &mut publisher, &name, 1).await;
    let notify = || {
        let parameters = Parameters { largest_object: Some(at(7, 3)), ..Parameters::default() };
        PublishStateNotify { parameters }
    };
    upstream.send(notify()).await.unwrap();
    relay.until_largest(at(7, 3)).await;
    // A subscriber must not send PUBLISH_STATE_NOTIFY on the stream of its own SUBSCRIBE: the relay closes the session.
    let player = relay.peer().await;
    let (mut other, ok) = player.subscribe(&name).await;
    assert_eq!(ok.parameters.largest_object, Some(at(7, 3)));
    other.send(notify()).await.unwrap();
    let ended = player.ended().await;
    let Error::Closed(quinn::ConnectionError::ApplicationClosed(close)) = &ended else { panic!("{ended}") };
    assert_eq!(close.error_code.into_inner(), code::Session::PROTOCOL_VIOLATION.0);
    request.cancel();
}

/// A session's tracks cannot have the same alias, so the relay must cancel its second subscription at the publisher.
#[tokio::test]
async fn upstream_subscription_with_a_duplicate_track_alias_is_cancelled() {
    let relay = TestRelay::start();
    let (mut publisher, _namespace, name) = publishing(relay.peer().await).await;
    let (mut first, _request, _ok, mut upstream) = first_subscriber(&relay, &mut publisher, &name, 1).await;
    let goaway = millrace_moq::message::GoAway { uri: String::new(), timeout: 0, request_id: None };
    upstream.send(goaway).await.unwrap();
    let (message, mut again) = patiently(publisher.requests.recv()).await.unwrap();
    assert!(matches!(message, Message::Subscribe(_)), "{message:?}");
    let (parameters, properties) = Default::default();
    again.send(SubscribeOk { track_alias: 1, parameters, properties }).await.unwrap();
    assert!(matches!(patiently(again.next()).await, Ok(None) | Err(Error::Cancelled)));
    publish_groups(&relay, &publisher, &mut first, 0..2).await;
}
