//! Tests of control messages: announcements of namespaces, subscriptions, refused requests, and TRACK_STATUS.

use std::time::{Duration, Instant};

use millrace_client::session::Error;
use millrace_moq::{
    Draft, Filter, Message, Namespace, Parameters, code,
    message::{
        FetchKind, FetchRequest, NamespaceDone, NamespaceFound, Publish, RequestOk, RequestUpdate, Subscribe,
        SubscribeNamespace, SubscribeOk, SubscribeTracks, TrackStatus,
    },
};
use quinn::ConnectionError;

use super::peer::{
    PeerStreamEnd, TestPeer, TestRelay, at, first_subscriber, header, patiently, track, with_publisher,
};

fn closed_with(error: Error) -> code::Session {
    match error {
        Error::Closed(ConnectionError::ApplicationClosed(close)) => {
            code::Session(close.error_code.into_inner())
        }
        other => panic!("not closed by the relay: {other}"),
    }
}

async fn watch(peer: &TestPeer, prefix: &str) -> millrace_client::session::SessionRequest {
    let prefix = if prefix.is_empty() { Namespace::default() } else { Namespace::from_path(prefix).unwrap() };
    let request_id = peer.session.next_request_id();
    let message = SubscribeNamespace { request_id, prefix, parameters: Parameters::default() };
    peer.session.request(message).await.unwrap()
}

fn suffix(path: &str) -> Namespace {
    Namespace::from_path(path).unwrap()
}

#[tokio::test]
async fn namespaces_below_a_prefix_are_announced_and_withdrawn() {
    let relay = TestRelay::start();
    let publisher = relay.peer().await;
    let _before = publisher.publish_namespace("meeting/1/alice").await;
    let _elsewhere = publisher.publish_namespace("other").await;
    let watcher = relay.peer().await;
    let mut watching = watch(&watcher, "meeting/1").await;
    assert!(matches!(patiently(watching.answer()).await.unwrap(), Message::RequestOk(_)));
    let next = patiently(watching.next()).await.unwrap();
    assert_eq!(next, Some(NamespaceFound { suffix: suffix("alice"), parameters: None }.into()));
    let mut bob = publisher.publish_namespace("meeting/1/bob").await;
    let next = patiently(watching.next()).await.unwrap();
    assert_eq!(next, Some(NamespaceFound { suffix: suffix("bob"), parameters: None }.into()));
    bob.cancel();
    let next = patiently(watching.next()).await.unwrap();
    assert_eq!(next, Some(NamespaceDone { suffix: suffix("bob") }.into()));
    // The end of a publisher's session withdraws all namespaces that it has announced.
    publisher.session.close(code::Session::NO_ERROR, "");
    let next = patiently(watching.next()).await.unwrap();
    assert_eq!(next, Some(NamespaceDone { suffix: suffix("alice") }.into()));
}

#[tokio::test]
async fn overlapping_namespace_prefixes_are_refused_until_one_is_changed() {
    let relay = TestRelay::start();
    let watcher = relay.peer().await;
    let mut one = watch(&watcher, "a/b").await;
    patiently(one.answer()).await.unwrap();
    for overlapping in ["a", "a/b", "a/b/c", ""] {
        let refused = patiently(watch(&watcher, overlapping).await.answer()).await.err().unwrap();
        let Error::Refused(refused) = refused else { panic!("{refused}") };
        assert_eq!(refused.code, code::Request::PREFIX_OVERLAP, "{overlapping:?}");
    }
    let mut two = watch(&watcher, "b").await;
    patiently(two.answer()).await.unwrap();
    let parameters = Parameters { track_namespace_prefix: Some(suffix("c")), ..Parameters::default() };
    let request_id = watcher.session.next_request_id();
    one.send(RequestUpdate { request_id, parameters }).await.unwrap();
    assert_eq!(patiently(one.answer()).await.unwrap(), RequestOk::default().into());
    let mut free = watch(&watcher, "a").await;
    patiently(free.answer()).await.unwrap();
}

#[tokio::test]
async fn namespace_subscription_update_without_a_prefix_keeps_it() {
    let relay = TestRelay::start();
    let publisher = relay.peer().await;
    let watcher = relay.peer().await;
    let mut watching = watch(&watcher, "live").await;
    patiently(watching.answer()).await.unwrap();
    let request_id = watcher.session.next_request_id();
    watching.send(RequestUpdate { request_id, parameters: Parameters::default() }).await.unwrap();
    assert_eq!(patiently(watching.answer()).await.unwrap(), RequestOk::default().into());
    let _published = publisher.publish_namespace("live/cam").await;
    let next = patiently(watching.next()).await.unwrap();
    assert_eq!(next, Some(NamespaceFound { suffix: suffix("cam"), parameters: None }.into()));
}

#[tokio::test]
async fn reserved_namespaces_are_refused() {
    let relay = TestRelay::start();
    let peer = relay.peer().await;
    for (namespace, code) in [(".", code::Request::UNAUTHORIZED), (".session", code::Request::DOES_NOT_EXIST)]
    {
        let track = super::peer::track(&format!("{namespace}/a"), "b");
        let parameters = Parameters { rendezvous_timeout: Some(60_000), ..Parameters::default() };
        let refused = peer.try_subscribe(&track, parameters).await.err().unwrap();
        assert_eq!(refused.code, code, "SUBSCRIBE in {namespace}");
        let (parameters, properties) = Default::default();
        let request_id = peer.session.next_request_id();
        let publish = Publish { request_id, track, track_alias: 1, parameters, properties };
        let mut request = peer.session.request(publish).await.unwrap();
        let refused = patiently(request.answer()).await.err().unwrap();
        assert!(matches!(&refused, Error::Refused(refused) if refused.code == code), "{refused}");
        let refused = patiently(watch(&peer, namespace).await.answer()).await.err().unwrap();
        assert!(matches!(&refused, Error::Refused(refused) if refused.code == code), "{refused}");
    }
    assert_eq!(relay.status().tracks, []); // exact: a refused request creates no track
}

#[tokio::test]
async fn track_with_a_subscription_is_not_pushed_as_well() {
    let relay = TestRelay::start();
    let (mut publisher, _namespace, name) = with_publisher(&relay).await;
    let mut peer = relay.peer_of(Draft::D18).await;
    let subscribe =
        |request_id| Subscribe { request_id, track: name.clone(), parameters: Parameters::default() };
    let mut pending = peer.session.request(subscribe(peer.session.next_request_id())).await.unwrap();
    let (_, mut upstream) = patiently(publisher.requests.recv()).await.unwrap();
    // A session subscribes to a track again while its first SUBSCRIBE has no answer. The relay refuses the second
    // SUBSCRIBE.
    let mut second = peer.session.request(subscribe(peer.session.next_request_id())).await.unwrap();
    let refused = patiently(second.answer()).await.err().unwrap();
    let Error::Refused(refused) = refused else { panic!("{refused}") };
    assert_eq!(refused.code, code::Request::DUPLICATE_SUBSCRIPTION);
    let message = SubscribeTracks {
        request_id: peer.session.next_request_id(),
        prefix: suffix("live"),
        parameters: Parameters::default(),
    };
    let mut watching = peer.session.request(message).await.unwrap();
    assert!(matches!(patiently(watching.answer()).await.unwrap(), Message::RequestOk(_)));
    let (parameters, properties) = Default::default();
    upstream.send(SubscribeOk { track_alias: 1, parameters, properties }).await.unwrap();
    assert!(matches!(patiently(pending.answer()).await.unwrap(), Message::SubscribeOk(_)));
    // The relay processes a session's messages in order. When the peer sees a later PUBLISH of another track, the relay
    // has therefore processed all messages before it.
    let other = super::peer::track("live/cam", "audio");
    let request_id = publisher.session.next_request_id();
    let (parameters, properties) = Default::default();
    let publish = Publish { request_id, track: other.clone(), track_alias: 2, parameters, properties };
    let mut published = publisher.session.request(publish).await.unwrap();
    patiently(published.answer()).await.unwrap();
    let (message, _) = patiently(peer.requests.recv()).await.unwrap();
    let Message::Publish(publish) = message else { panic!("{message:?} instead of PUBLISH") };
    assert_eq!(publish.track, other);
}

#[tokio::test]
async fn tracks_below_a_prefix_are_published_to_the_subscriber() {
    let relay = TestRelay::start();
    let (mut publisher, _namespace, name) = with_publisher(&relay).await;
    let (_first, _request, _ok, _upstream) = first_subscriber(&relay, &mut publisher, &name, 4).await;
    let mut watcher = relay.peer().await;
    let message = SubscribeTracks {
        request_id: watcher.session.next_request_id(),
        prefix: suffix("live"),
        parameters: Parameters::default(),
    };
    let mut request = watcher.session.request(message).await.unwrap();
    assert!(matches!(patiently(request.answer()).await.unwrap(), Message::RequestOk(_)));
    let (message, mut published) = patiently(watcher.requests.recv()).await.unwrap();
    let Message::Publish(publish) = message else { panic!("{message:?} instead of PUBLISH") };
    assert_eq!((&publish.track, publish.request_id % 2), (&name, 1));
    published.send(RequestOk::default()).await.unwrap();
    relay.until("two subscribers", |status| status.tracks[0].subscribers == 2).await;
    let mut subgroup = publisher.subgroup(header(4, 0)).await;
    subgroup.object(0, 10).await;
    subgroup.finish();
    let received = watcher.next_subgroup().await;
    assert_eq!(received.header.alias, publish.track_alias);
    assert_eq!(received.all().await, (vec![0], PeerStreamEnd::Fin));
}

#[tokio::test]
async fn unpublished_track_does_not_exist() {
    let relay = TestRelay::start();
    let peer = relay.peer().await;
    let refused = peer.try_subscribe(&track("no", "where"), Parameters::default()).await.err().unwrap();
    assert_eq!(refused.code, code::Request::DOES_NOT_EXIST);
    let kind =
        FetchKind::Standalone { track: track("no", "where"), range: Filter::range(at(0, 0), at(1, 0)) };
    let request_id = peer.session.next_request_id();
    let fetch = FetchRequest { request_id, kind, parameters: Parameters::default() };
    let Err(Error::Refused(refused)) = patiently(peer.session.request(fetch).await.unwrap().answer()).await
    else {
        panic!("a FETCH of nothing");
    };
    assert_eq!(refused.code, code::Request::DOES_NOT_EXIST);
    // exact: the list of tracks stays empty, since the relay refuses such requests without creating a track
    assert!(relay.status().tracks.is_empty(), "a refused request left a track");
}

#[tokio::test]
async fn subscription_waits_for_its_publisher_up_to_its_timeout() {
    let relay = TestRelay::start();
    let subscriber = relay.peer().await;
    let name = track("live/cam", "video");
    let waiting = |millis| Parameters { rendezvous_timeout: Some(millis), ..Parameters::default() };
    let began = Instant::now();
    let refused = subscriber.try_subscribe(&name, waiting(150)).await.err().unwrap();
    assert_eq!(refused.code, code::Request::TIMEOUT);
    assert!(began.elapsed() >= Duration::from_millis(150));
    let mut publisher = relay.peer().await;
    let (subscribed, _published) = tokio::join!(subscriber.try_subscribe(&name, waiting(60_000)), async {
        relay.until("the waiting subscription", |status| !status.tracks.is_empty()).await;
        let namespace = publisher.publish_namespace("live").await;
        let upstream = publisher.accept_subscribe(&name, 1).await;
        (namespace, upstream)
    });
    subscribed.unwrap();
}

#[tokio::test]
async fn refusal_by_the_publisher_is_passed_to_the_subscriber() {
    let relay = TestRelay::start();
    let (mut publisher, _namespace, name) = with_publisher(&relay).await;
    let subscriber = relay.peer().await;
    let (refused, ()) = tokio::join!(subscriber.try_subscribe(&name, Parameters::default()), async {
        let (_, mut request) = patiently(publisher.requests.recv()).await.unwrap();
        request.refuse(code::Request::UNAUTHORIZED, "not for you").await.unwrap();
    });
    let refused = refused.err().unwrap();
    assert_eq!((refused.code, refused.reason.as_str()), (code::Request::UNAUTHORIZED, "not for you"));
}

#[tokio::test]
async fn a_second_subscription_to_a_track_is_refused_in_draft_18() {
    let relay = TestRelay::start();
    let (mut publisher, _namespace, name) = with_publisher(&relay).await;
    let (_first, _request, _ok, _upstream) = first_subscriber(&relay, &mut publisher, &name, 1).await;
    let subscriber = relay.peer_of(Draft::D18).await;
    let _subscribed = subscriber.subscribe(&name).await;
    let refused = subscriber.try_subscribe(&name, Parameters::default()).await.err().unwrap();
    assert_eq!(refused.code, code::Request::DUPLICATE_SUBSCRIPTION);
}

#[tokio::test]
async fn track_status_equals_subscribe_ok() {
    let relay = TestRelay::start();
    let (mut publisher, _namespace, name) = with_publisher(&relay).await;
    let (mut subscriber, _request, _ok, _upstream) = first_subscriber(&relay, &mut publisher, &name, 1).await;
    let mut subgroup = publisher.subgroup(header(1, 6)).await;
    subgroup.object(0, 10).await;
    subgroup.object(1, 10).await;
    assert_eq!(subscriber.next_subgroup().await.objects(2).await, [0, 1]);
    relay.until_largest(at(6, 1)).await;
    let request_id = subscriber.session.next_request_id();
    let status = TrackStatus { request_id, track: name, parameters: Parameters::default() };
    let mut request = subscriber.session.request(status).await.unwrap();
    let Message::RequestOk(ok) = patiently(request.answer()).await.unwrap() else { panic!("no answer") };
    assert_eq!(ok.parameters.largest_object, Some(at(6, 1)));
    assert_eq!(patiently(request.next()).await.unwrap(), None, "FIN behind the answer");
}

#[tokio::test]
async fn request_ids_with_wrong_parity_or_used_twice_close_the_session() {
    for ids in [[1, 3], [0, 0]] {
        let relay = TestRelay::start();
        let peer = relay.peer().await;
        for request_id in ids {
            let track = track("a", "b");
            let message = Subscribe { request_id, track, parameters: Parameters::default() };
            let _ = peer.session.request(message).await; // The session may already be closed.
        }
        assert_eq!(closed_with(peer.ended().await), code::Session::INVALID_REQUEST_ID, "{ids:?}");
    }
}

#[tokio::test]
async fn malformed_streams_close_the_session_and_no_other() {
    let table: [(&str, &[u8], bool, code::Session); 8] = [
        ("unknown message", &[0x3f, 0, 0], true, code::Session::PROTOCOL_VIOLATION),
        ("an answer opens a request", &[0x07, 0, 1, 0], true, code::Session::PROTOCOL_VIOLATION),
        ("length too short", &[0x03, 0, 1, 0], true, code::Session::PROTOCOL_VIOLATION),
        ("ends inside a message", &[0x03, 0, 9, 0], true, code::Session::PROTOCOL_VIOLATION),
        ("unknown stream type", &[0x01, 0], false, code::Session::PROTOCOL_VIOLATION),
        ("reserved subgroup ID mode", &[0x16, 1, 0, 0], false, code::Session::PROTOCOL_VIOLATION),
        ("second control stream", &[0xaf, 0x00, 0, 0], false, code::Session::PROTOCOL_VIOLATION),
        ("unknown fetch type", &[0x16, 0, 3, 0, 9, 0], true, code::Session::PROTOCOL_VIOLATION),
    ];
    let relay = TestRelay::start();
    let bystander = relay.peer().await;
    for (name, bytes, request, expected) in table {
        let peer = relay.peer().await;
        let streams = peer.session.streams();
        let mut stream = match request {
            true => streams.open_bi().await.unwrap().0,
            false => streams.open_uni().await.unwrap(),
        };
        stream.write_all(bytes).await.unwrap();
        stream.finish().unwrap();
        assert_eq!(closed_with(peer.ended().await), expected, "{name}");
    }
    let _still_here = bystander.publish_namespace("a").await;
}

#[tokio::test]
async fn garbage_inside_a_subgroup_closes_the_publisher_only() {
    let relay = TestRelay::start();
    let (mut publisher, _namespace, name) = with_publisher(&relay).await;
    let (mut subscriber, mut request, _ok, _upstream) =
        first_subscriber(&relay, &mut publisher, &name, 1).await;
    let mut subgroup = publisher.subgroup(header(1, 0)).await;
    subgroup.object(0, 10).await;
    let mut received = subscriber.next_subgroup().await;
    assert_eq!(received.objects(1).await, [0]);
    // The object has length 0 and an unknown status.
    subgroup.stream.write_all(&[0, 0, 0x3f]).await.unwrap();
    assert_eq!(closed_with(publisher.ended().await), code::Session::PROTOCOL_VIOLATION);
    assert_eq!(received.all().await, (vec![], PeerStreamEnd::Reset));
    let Some(Message::PublishDone(done)) = patiently(request.next()).await.unwrap() else {
        panic!("no PUBLISH_DONE");
    };
    assert_eq!((done.code, done.stream_count), (code::Done::INTERNAL_ERROR, 1));
}

#[tokio::test]
async fn session_without_a_setup_message_is_closed_after_ten_seconds() {
    // Time is not simulated in this test. The relay closes a session without SETUP after 10 s. The test waits longer
    // than that.
    let relay = TestRelay::start();
    let config = millrace_client::tls::CertificateTrust::Anyone.client_config(&[Draft::D18.alpn()]).unwrap();
    let crypto = quinn::crypto::rustls::QuicClientConfig::try_from(config).unwrap();
    let endpoint = quinn::Endpoint::client("0.0.0.0:0".parse().unwrap()).unwrap();
    let config = quinn::ClientConfig::new(std::sync::Arc::new(crypto));
    let connection = endpoint.connect_with(config, relay.addr, "localhost").unwrap().await.unwrap();
    let closed = tokio::time::timeout(Duration::from_secs(60), connection.closed()).await.unwrap();
    assert_eq!(closed_with(Error::Closed(closed)), code::Session::CONTROL_MESSAGE_TIMEOUT);
}
