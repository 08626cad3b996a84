//! Tests of sessions that have not proved an access right, and of access rights that end independently.

use super::*;
use millrace_access::{
    cat,
    grant::{Action, Actions, GrantScope},
    unproven::UnprovenBounds,
};

/// Returns an access control that requires tokens, with limits short enough for a test.
fn bounded(bounds: UnprovenBounds) -> Arc<Access> {
    Access::new(tokens_only(), BudgetLimits { unproven: bounds, ..BudgetLimits::default() })
}

const BRIEFLY: Duration = Duration::from_millis(500);

#[tokio::test]
async fn session_without_any_authorized_request_is_closed_after_timeout() {
    let relay = RelayUnderTest::with(
        bounded(UnprovenBounds { patience: BRIEFLY, ..UnprovenBounds::default() }),
        |_| {},
    );
    let publisher = relay.client_with(&claims(&["a"], &[])).await;
    let _published = publisher.publish(&in_room("a", "t"), 1).await.accepted().await;
    let stranger = relay.client(SetupOptions::default()).await;
    // A refused request does not prove an access right, so the session is still closed.
    let mut refused = stranger.subscribe(&in_room("a", "t"), Parameters::default()).await;
    assert_eq!(refused.refusal().await, Some(code::Request::UNAUTHORIZED));
    assert_eq!(stranger.closed().await, code::Session::UNAUTHORIZED);
    assert_eq!(relay.refused("unproven"), 1);
    until("its place is free", || relay.server.status().access.unproven == 0).await;
    assert!(publisher.connection.quic.close_reason().is_none(), "its token is a right");
}

#[tokio::test]
async fn session_stays_open_until_the_token_of_its_request_expires() {
    let relay = RelayUnderTest::with(
        bounded(UnprovenBounds { patience: BRIEFLY, ..UnprovenBounds::default() }),
        |_| {},
    );
    let publisher = relay.client_with(&claims(&["a"], &[])).await;
    let _published = publisher.publish(&in_room("a", "t"), 1).await.accepted().await;
    let watcher = relay.client(SetupOptions::default()).await;
    let lasting = relay.client(SetupOptions::default()).await;
    until("two strangers", || relay.server.status().access.unproven == 2).await;
    let expiring = JwtClaims { exp: soon(BRIEF), ..claims(&[], &["a"]) };
    let own = with_tokens(vec![value(&expiring)]);
    let mut subscribed = watcher.subscribe(&in_room("a", "t"), own).await.accepted().await;
    let own = with_tokens(vec![value(&claims(&[], &["a"]))]);
    let kept = lasting.subscribe(&in_room("a", "t"), own).await.accepted().await;
    // exact: the relay removes a session from the count of sessions without rights before it answers a request
    until("both have a right", || relay.server.status().access.unproven == 0).await;
    // A session keeps the right of a token as long as the token is valid, even after the request with this token has
    // ended.
    drop(kept);
    subscribed.reset().await;
    assert_eq!(watcher.closed().await, code::Session::UNAUTHORIZED);
    assert_eq!(relay.refused("unproven"), 1);
    assert!(lasting.connection.quic.close_reason().is_none(), "its token is good yet");
}

#[tokio::test]
async fn unauthorized_sessions_displace_only_unauthorized_sessions() {
    let bounds = UnprovenBounds { sessions: 3, of_client: 2, patience: Duration::from_secs(600) };
    let relay = RelayUnderTest::with(bounded(bounds), |_| {});
    let publisher = relay.client_with(&claims(&["a"], &[])).await;
    let _published = publisher.publish(&in_room("a", "t"), 1).await.accepted().await;
    let mut strangers = Vec::new();
    for nth in 0..4 {
        strangers.push(relay.client(SetupOptions::default()).await);
        until("its place", || {
            let displaced = relay.refused("unproven_displaced");
            relay.server.status().access.unproven + displaced == nth + 1
        })
        .await;
    }
    for stranger in &strangers[..2] {
        assert_eq!(stranger.closed().await, code::Session::UNAUTHORIZED);
    }
    assert_eq!(relay.refused("unproven_displaced"), 2);
    let elsewhere = |net| IpAddr::V4(Ipv4Addr::new(127, 0, net, 1));
    let others = relay.client_at(elsewhere(1)).await;
    until("three strangers", || relay.server.status().access.unproven == 3).await;
    // To admit a session of a new network, a session of the network with the most sessions is closed.
    let more = relay.client_at(elsewhere(2)).await;
    assert_eq!(strangers[2].closed().await, code::Session::UNAUTHORIZED);
    for one in [&publisher, &strangers[3], &others, &more] {
        assert!(one.connection.quic.close_reason().is_none());
    }
    // A session with a token is admitted even if the limit of sessions without a right is reached.
    let late = relay.client_with(&claims(&[], &["a"])).await;
    let _subscribed = late.subscribe(&in_room("a", "t"), Parameters::default()).await.accepted().await;
}

#[tokio::test]
async fn relay_without_access_rules_counts_no_session_as_unauthorized() {
    let relay = RelayUnderTest::with(Access::new(AccessPolicy::default(), BudgetLimits::default()), |_| {});
    let client = relay.client(SetupOptions::default()).await;
    let _namespace = client.publish_namespace("a").await.accepted().await;
    // exact: the relay counts a session without rights before it answers the session's request
    assert_eq!(relay.server.status().access.unproven, 0);
}

/// Returns a C4M token for one action in all namespaces.
fn c4m(action: Action, expires: Option<u64>) -> AuthToken {
    let actions = Actions::from_actions(&[action, Action::RequestUpdate]);
    let scope = GrantScope { actions, namespace: vec![], closed: false, track: None };
    let claims = cat::CatClaims { scopes: vec![scope], expires, ..cat::CatClaims::default() };
    let value = cat::make(&claims, &Signer::read_secret(SECRET).unwrap(), false).unwrap();
    Form::UseValue(Credential { kind: token::KIND_CAT, value: value.into() }).encode()
}

/// A fill (objects from before the subscription) needs the right to FETCH, which does not expire here. The subscription
/// still ends when the right to SUBSCRIBE expires.
#[tokio::test]
async fn subscription_fill_of_past_objects_needs_the_right_to_fetch() {
    const DRAFT: Draft = Draft::D22;
    let access = Access::new(tokens_only(), BudgetLimits::default());
    let relay = RelayUnderTest::with(access, |transport| transport.alpn = vec![DRAFT.alpn().to_vec()]);
    let open = async |setup: SetupOptions| {
        let (connection, _) = relay.connect().await;
        let control = open_stream(&connection, &encoded_in(DRAFT, setup)).await;
        (connection, control)
    };
    let ask = async |connection: &Connection, message: Message| {
        let (mut send, recv) = connection.streams().open_bi().await.unwrap();
        send.write_all(&encoded_in(DRAFT, message)).await.unwrap();
        let held = Arc::<IncompleteBytes>::default().stream();
        AskedRequest {
            send,
            reader: MessageReader::new(DRAFT, recv, BytesMut::new(), held, GoAways::on_request(true)),
        }
    };
    let setup =
        SetupOptions { authorization_tokens: vec![value(&claims(&["a"], &[]))], ..SetupOptions::default() };
    let (publisher, _control) = open(setup).await;
    let publish = Publish { track: in_room("a", "t"), track_alias: 7, ..publish(0) };
    let _published = ask(&publisher, publish.into()).await.accepted().await;
    let mut stream = open_stream(&publisher, &subgroup(7, 0)).await;
    // Writes an object of one byte, so that the cache has an object from before the subscription.
    stream.write_all(&[0, 1, b'x']).await.unwrap();
    // exact: `until` rereads the track's number of cached objects until it is 1
    let is_there = || relay.server.status().tracks.first().is_some_and(|track| track.objects_cached == 1);
    until("an object", is_there).await;

    let (watcher, _other_control) = open(SetupOptions::default()).await;
    let expires = soon(BRIEF).map(|at| at as u64);
    let tokens = vec![c4m(Action::Subscribe, expires), c4m(Action::Fetch, None)];
    let fill = Parameters { filter: Some(Filter::All), ..Parameters::default() };
    let parameters = Parameters { fill: Some(Box::new(fill)), ..with_tokens(tokens) };
    let subscribe = Subscribe { request_id: 0, track: in_room("a", "t"), parameters };
    let mut subscribed = ask(&watcher, subscribe.into()).await.accepted().await;
    until("a fill", || relay.server.status().access.clients.iter().any(|one| one.fetched_bytes > 0)).await;
    subscribed.reset().await;
    // exact: `until` rereads the numbers of subscribers of all tracks until they are 0
    let is_over = || relay.server.status().tracks.iter().all(|track| track.subscribers == 0);
    until("no subscriber", is_over).await;
    assert_eq!(relay.refused("token_expired"), 1);
}
