//! Tests of access rules and tokens, over real connections.

mod standing;

use std::{net::IpAddr, time::SystemTime};

use bytes::BytesMut;
use millrace_moq::{
    Filter, Location,
    incomplete::IncompleteBytes,
    message::{
        FetchKind, FetchRequest, PublishNamespace, RequestUpdate, SubscribeNamespace, SubscribeOk,
        SubscribeTracks, TrackStatus,
    },
    param::AuthToken,
    token::{Credential, Form},
};
use quinn::{ReadError, VarInt};

use super::*;
use crate::wire::{GoAways, IncomingMessage, MessageReader};
use millrace_access::{
    AccessPolicy, AccessRule, BudgetLimits, Requirements,
    jwt::{self, JwtClaims, OneOrMany},
    keys::{self, Signer},
    token,
};

const SECRET: &[u8; 32] = b"0123456789abcdef0123456789abcdef";

/// A session of a test client with the relay.
struct AccessSession {
    connection: Arc<Connection>,
    next_request: std::cell::Cell<u64>,
    _control: SendStream,
    _endpoint: Option<Endpoint>,
}

/// A request of the client, with the reader of its answers.
struct AskedRequest {
    send: SendStream,
    reader: MessageReader,
}

fn tokens_only() -> AccessPolicy {
    let tokens = Requirements { keys: vec![keys::read_secret(SECRET).unwrap()], ..Requirements::default() };
    AccessPolicy::new(vec![], tokens, false)
}

fn rule(namespace: &str, publish: &[&str], subscribe: &[&str]) -> AccessRule {
    let principals = |all: &[&str]| all.iter().map(|one| one.parse().unwrap()).collect();
    let publish = principals(publish);
    let subscribe = principals(subscribe);
    AccessRule { namespace: namespace.parse().unwrap(), publish, subscribe, path: None, authority: None }
}

fn claims(put: &[&str], get: &[&str]) -> JwtClaims {
    let paths = |all: &[&str]| OneOrMany::Many(all.iter().map(|path| (*path).to_owned()).collect());
    JwtClaims { put: paths(put), get: paths(get), ..JwtClaims::default() }
}

fn jwt(claims: &JwtClaims) -> String {
    jwt::make(claims, &Signer::read_secret(SECRET).unwrap()).unwrap()
}

fn credential(claims: &JwtClaims) -> Credential {
    token::credential_from_text(&jwt(claims))
}

fn value(claims: &JwtClaims) -> AuthToken {
    Form::UseValue(credential(claims)).encode()
}

fn with_tokens(authorization_tokens: Vec<AuthToken>) -> Parameters {
    Parameters { authorization_tokens, ..Parameters::default() }
}

/// Returns the time in `seconds` from now.
fn soon(seconds: f64) -> Option<f64> {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap();
    Some(now.as_secs_f64() + seconds)
}

impl RelayUnderTest {
    async fn client(&self, setup: SetupOptions) -> AccessSession {
        let address = self.server.local_addrs()[0];
        let connection = patiently(self.client.connect(address, "localhost")).await.unwrap();
        AccessSession::begin(connection, setup, None).await
    }

    /// Connects a client whose socket is bound to the address `ip`.
    async fn client_at(&self, ip: IpAddr) -> AccessSession {
        let config = transport::Config { trust: ServerTrust::Anyone, ..transport::Config::default() };
        let endpoint = Endpoint::bind((ip, 0).into(), config).unwrap();
        let connection = endpoint.connect(self.server.local_addrs()[0], "localhost").await.unwrap();
        AccessSession::begin(connection, SetupOptions::default(), Some(endpoint)).await
    }

    async fn client_with(&self, claims: &JwtClaims) -> AccessSession {
        let authorization_tokens = vec![value(claims)];
        self.client(SetupOptions { authorization_tokens, ..SetupOptions::default() }).await
    }

    fn refused(&self, reason: &str) -> u64 {
        // exact: the relay counts the refusal of a request before it sends the refusal
        self.server.status().access.refused.get(reason).copied().unwrap_or_default()
    }
}

impl AccessSession {
    async fn begin(connection: Arc<Connection>, setup: SetupOptions, endpoint: Option<Endpoint>) -> Self {
        let control = patiently(open_stream(&connection, &encoded(setup))).await;
        Self { connection, next_request: 0.into(), _control: control, _endpoint: endpoint }
    }

    fn id(&self) -> u64 {
        self.next_request.replace(self.next_request.get() + 2)
    }

    async fn ask(&self, message: impl Into<Message>) -> AskedRequest {
        let (send, recv) = patiently(open_request(&self.connection, message)).await;
        AskedRequest {
            send,
            reader: MessageReader::new(
                Draft::D18,
                recv,
                BytesMut::new(),
                Arc::<IncompleteBytes>::default().stream(),
                GoAways::on_request(true),
            ),
        }
    }

    fn publish_of(&self, track: &TrackName, track_alias: u64) -> Publish {
        Publish {
            request_id: self.id(),
            track: track.clone(),
            track_alias,
            parameters: Parameters::default(),
            properties: Properties::default(),
        }
    }

    async fn publish(&self, track: &TrackName, alias: u64) -> AskedRequest {
        self.ask(self.publish_of(track, alias)).await
    }

    async fn subscribe(&self, track: &TrackName, parameters: Parameters) -> AskedRequest {
        self.ask(Subscribe { request_id: self.id(), track: track.clone(), parameters }).await
    }

    async fn publish_namespace(&self, path: &str) -> AskedRequest {
        let namespace = Namespace::from_path(path).unwrap();
        let parameters = Parameters::default();
        self.ask(PublishNamespace { request_id: self.id(), namespace, parameters }).await
    }

    /// Returns the next request that the relay sends to this test client.
    async fn asked(&self) -> (Message, AskedRequest) {
        let (send, recv) = patiently(self.connection.streams().accept_bi()).await.unwrap();
        let mut asked = AskedRequest {
            send,
            reader: MessageReader::new(
                Draft::D18,
                recv,
                BytesMut::new(),
                Arc::<IncompleteBytes>::default().stream(),
                GoAways::on_request(true),
            ),
        };
        (asked.message().await, asked)
    }

    /// Waits until the relay closes the connection, and returns the close code.
    async fn closed(&self) -> code::Session {
        match patiently(self.connection.quic.closed()).await {
            quinn::ConnectionError::ApplicationClosed(close) => code::Session(close.error_code.into_inner()),
            other => panic!("{other}"),
        }
    }
}

impl AskedRequest {
    async fn incoming(&mut self) -> IncomingMessage {
        patiently(self.reader.next()).await.unwrap()
    }

    async fn message(&mut self) -> Message {
        match self.incoming().await {
            IncomingMessage::Message(message) => message,
            other => panic!("{other:?}"),
        }
    }

    /// Returns the code with which the request is refused, or `None` if it is accepted.
    async fn refusal(&mut self) -> Option<code::Request> {
        match self.message().await {
            Message::RequestError(error) => Some(error.code),
            _ => None,
        }
    }

    async fn accepted(mut self) -> Self {
        assert_eq!(self.refusal().await, None);
        self
    }

    /// Waits until the relay resets the request's stream.
    async fn reset(&mut self) {
        loop {
            match self.incoming().await {
                IncomingMessage::Reset => return,
                IncomingMessage::Finished => panic!("finished instead of reset"),
                IncomingMessage::Message(_) | IncomingMessage::GoAway(_) => {}
            }
        }
    }

    async fn say(&mut self, message: impl Into<Message>) {
        self.send.write_all(&encoded(message)).await.unwrap();
    }
}

async fn patiently<T>(work: impl Future<Output = T>) -> T {
    time::timeout(Duration::from_secs(60), work).await.expect("it takes too long")
}

fn in_room(path: &str, name: &str) -> TrackName {
    TrackName::new(Namespace::from_path(path).unwrap(), name.to_owned()).unwrap()
}

/// Lifetime in seconds of a token that expires during a test. It is long enough to use the token first, even on a busy
/// machine.
const BRIEF: f64 = 5.0;

/// A loopback address other than 127.0.0.1. The relay counts sessions from it as sessions of another client.
const ELSEWHERE: IpAddr = IpAddr::V4(Ipv4Addr::new(127, 0, 0, 2));

#[tokio::test]
async fn publish_of_another_clients_track_is_refused() {
    let relay = RelayUnderTest::start();
    let track = track(0);
    let owner = relay.client(SetupOptions::default()).await;
    let _published = owner.publish(&track, 1).await.accepted().await;
    let rival = relay.client_at(ELSEWHERE).await;
    assert_eq!(rival.publish(&track, 1).await.refusal().await, Some(code::Request::UNAUTHORIZED));
    // exact: the relay updates its status before it answers a request
    let status = relay.server.status();
    assert_eq!((status.tracks[0].publishers, status.tracks[0].owner.as_deref()), (1, Some("127.0.0.1")));
    assert_eq!(relay.refused("track_taken"), 1);
    // The same client may publish the track in a second session.
    let again = relay.client(SetupOptions::default()).await;
    let _copy = again.publish(&track, 2).await.accepted().await;
    until("both publish it", || relay.server.status().tracks[0].publishers == 2).await;
    // Another client may publish the track once the first one has stopped.
    for client in [&owner, &again] {
        client.connection.quic.close(0u32.into(), b"");
    }
    until("no owner", || relay.server.status().tracks.iter().all(|track| track.owner.is_none())).await;
    rival.publish(&track, 2).await.accepted().await;
}

#[tokio::test]
async fn second_publisher_of_a_namespace_gets_no_subscribe_for_published_tracks() {
    let relay = RelayUnderTest::start();
    let owner = relay.client(SetupOptions::default()).await;
    let _published = owner.publish(&track(0), 1).await.accepted().await;
    let subscriber = relay.client(SetupOptions::default()).await;
    let _subscribed = subscriber.subscribe(&track(0), Parameters::default()).await.accepted().await;
    let rival = relay.client_at(ELSEWHERE).await;
    let _announced = rival.publish_namespace("a/room").await.accepted().await;
    // The first SUBSCRIBE that the second publisher gets has to be for a track without another publisher.
    let _other = subscriber.subscribe(&track(1), Parameters::default()).await;
    let (asked, _request) = rival.asked().await;
    let Message::Subscribe(subscribe) = asked else { panic!("{asked:?}") };
    assert_eq!(subscribe.track, track(1));
    // exact: the first track's count of publishers is final: a SUBSCRIBE for it would have arrived earlier
    assert_eq!(relay.server.status().tracks.iter().map(|track| track.publishers).max(), Some(1));
}

#[tokio::test]
async fn first_publisher_to_answer_subscribe_keeps_out_another_client() {
    let relay = RelayUnderTest::start();
    let one = relay.client(SetupOptions::default()).await;
    let other = relay.client_at(ELSEWHERE).await;
    let _one = one.publish_namespace("a/room").await.accepted().await;
    let _other = other.publish_namespace("a/room").await.accepted().await;
    let subscriber = relay.client(SetupOptions::default()).await;
    let subscribed = subscriber.subscribe(&track(0), Parameters::default()).await;
    let (_, mut first) = one.asked().await;
    let (_, mut second) = other.asked().await;
    let ok = |track_alias| SubscribeOk {
        track_alias,
        parameters: Parameters::default(),
        properties: Properties::default(),
    };
    first.say(ok(1)).await;
    let _subscribed = subscribed.accepted().await;
    second.say(ok(2)).await;
    until("the second is refused", || relay.refused("track_taken") == 1).await;
    // exact: the second publisher was refused before this check, and nothing changes the status afterwards
    assert_eq!(relay.server.status().tracks[0].publishers, 1);
}

#[tokio::test]
async fn every_request_is_authorized_before_state_is_created() {
    let access = Access::new(tokens_only(), BudgetLimits::default());
    let relay = RelayUnderTest::with(access, |_| {});
    let client = relay.client_with(&claims(&["mine"], &[])).await;
    let name = in_room("yours", "t");
    let prefix = Namespace::from_path("yours").unwrap();
    let parameters = Parameters::default();
    let id = || client.id();
    let range = Filter::range(Location::new(0, 0), Location::new(0, u64::MAX));
    let whole = FetchKind::Standalone { track: name.clone(), range };
    let track = || name.clone();
    let namespace = || prefix.clone();
    let requests: [Message; 7] = [
        client.publish_of(&name, 1).into(),
        Subscribe { request_id: id(), track: track(), parameters: parameters.clone() }.into(),
        FetchRequest { request_id: id(), kind: whole, parameters: parameters.clone() }.into(),
        TrackStatus { request_id: id(), track: track(), parameters: parameters.clone() }.into(),
        PublishNamespace { request_id: id(), namespace: namespace(), parameters: parameters.clone() }.into(),
        SubscribeNamespace { request_id: id(), prefix: namespace(), parameters: parameters.clone() }.into(),
        SubscribeTracks { request_id: id(), prefix: namespace(), parameters }.into(),
    ];
    for (nth, request) in requests.into_iter().enumerate() {
        let name = request.name();
        let refusal = client.ask(request).await.refusal().await;
        assert_eq!(refusal, Some(code::Request::UNAUTHORIZED), "{name}");
        assert_eq!(relay.refused("not_allowed"), nth as u64 + 1, "{name}");
        // exact: the relay would have created a track before it answered the request
        assert!(relay.server.status().tracks.is_empty(), "{name}");
    }
    let _mine = client.publish(&in_room("mine", "t"), 1).await.accepted().await;
}

#[tokio::test]
async fn token_in_url_setup_or_request_grants_access() {
    let relay = RelayUnderTest::with(Access::new(tokens_only(), BudgetLimits::default()), |_| {});
    let url = SetupOptions {
        path: Some(format!("/?jwt={}", jwt(&claims(&["a"], &[])))),
        ..SetupOptions::default()
    };
    let publisher = relay.client(url).await;
    let _published = publisher.publish(&in_room("a", "t"), 1).await.accepted().await;
    let watcher = relay.client_with(&claims(&[], &["a"])).await;
    let _subscribed = watcher.subscribe(&in_room("a", "t"), Parameters::default()).await.accepted().await;
    let stranger = relay.client(SetupOptions::default()).await;
    let mut refused = stranger.subscribe(&in_room("a", "t"), Parameters::default()).await;
    assert_eq!(refused.refusal().await, Some(code::Request::UNAUTHORIZED));
    let own = with_tokens(vec![value(&claims(&[], &["a"]))]);
    let _subscribed = stranger.subscribe(&in_room("a", "t"), own).await.accepted().await;
}

#[tokio::test]
async fn bad_token_closes_the_session_or_refuses_the_request() {
    let relay = RelayUnderTest::with(Access::new(tokens_only(), BudgetLimits::default()), |_| {});
    let garbage = Form::UseValue(Credential { kind: 0, value: "garbage".into() }).encode();
    let expired = value(&JwtClaims { exp: Some(1.0), ..claims(&["a"], &["a"]) });
    let unknown = Form::UseValue(Credential { kind: 77, value: "x".into() }).encode();
    let no_form = AuthToken(vec![9, 9].into());
    let table = [
        (&garbage, code::Session::MALFORMED_AUTH_TOKEN, Some(code::Request::MALFORMED_AUTH_TOKEN)),
        (&expired, code::Session::EXPIRED_AUTH_TOKEN, Some(code::Request::EXPIRED_AUTH_TOKEN)),
        (&unknown, code::Session::UNAUTHORIZED, Some(code::Request::UNAUTHORIZED)),
        (&no_form, code::Session::KEY_VALUE_FORMATTING_ERROR, None),
    ];
    for (token, session, request) in table {
        let setup = SetupOptions { authorization_tokens: vec![token.clone()], ..SetupOptions::default() };
        assert_eq!(relay.client(setup).await.closed().await, session);
        let client = relay.client(SetupOptions::default()).await;
        let mut asked = client.subscribe(&track(0), with_tokens(vec![token.clone()])).await;
        match request {
            Some(code) => assert_eq!(asked.refusal().await, Some(code)),
            None => assert_eq!(client.closed().await, session),
        }
    }
}

#[tokio::test]
async fn session_with_too_many_bad_tokens_is_closed() {
    let relay = RelayUnderTest::with(Access::new(tokens_only(), BudgetLimits::default()), |_| {});
    let client = relay.client(SetupOptions::default()).await;
    let bad = |n: u64| Form::UseValue(Credential { kind: 0, value: format!("bad {n}").into() }).encode();
    let many = with_tokens((0..9).map(bad).collect());
    let mut refused = client.subscribe(&track(0), many).await;
    assert_eq!(refused.refusal().await, Some(code::Request::MALFORMED_AUTH_TOKEN));
    for n in 1..16 {
        let mut refused = client.subscribe(&track(0), with_tokens(vec![bad(n)])).await;
        assert_eq!(refused.refusal().await, Some(code::Request::MALFORMED_AUTH_TOKEN), "{n}");
    }
    let _last = client.subscribe(&track(0), with_tokens(vec![bad(16)])).await;
    assert_eq!(client.closed().await, code::Session::UNAUTHORIZED);
    assert_eq!((relay.refused("token_malformed"), relay.refused("bad_tokens")), (17, 1));
}

#[tokio::test]
async fn registered_token_alias_authorizes_later_requests_of_the_session() {
    let limits = BudgetLimits { token_cache: 1000, ..BudgetLimits::default() };
    let relay = RelayUnderTest::with(Access::new(tokens_only(), limits), |_| {});
    let client = relay.client(SetupOptions::default()).await;
    let credential = credential(&claims(&["a"], &[]));
    let register = Form::Register { alias: 5, credential }.encode();
    // The token is registered although its request is refused.
    let mut refused = client.subscribe(&in_room("a", "t"), with_tokens(vec![register.clone()])).await;
    assert_eq!(refused.refusal().await, Some(code::Request::UNAUTHORIZED));
    let mut publish = client.publish_of(&in_room("a", "t"), 1);
    publish.parameters = with_tokens(vec![Form::UseAlias { alias: 5 }.encode()]);
    let _published = client.ask(publish).await.accepted().await;
    let _twice = client.subscribe(&in_room("a", "t"), with_tokens(vec![register])).await;
    assert_eq!(client.closed().await, code::Session::DUPLICATE_AUTH_TOKEN_ALIAS);
    let forgetful = relay.client(SetupOptions::default()).await;
    let alias = with_tokens(vec![Form::UseAlias { alias: 5 }.encode()]);
    let _unknown = forgetful.subscribe(&in_room("a", "t"), alias).await;
    assert_eq!(forgetful.closed().await, code::Session::UNKNOWN_AUTH_TOKEN_ALIAS);
    let greedy = relay.client(SetupOptions::default()).await;
    let large = Credential { kind: 0, value: vec![b'x'; 1000].into() };
    let large = with_tokens(vec![Form::Register { alias: 1, credential: large }.encode()]);
    let _large = greedy.subscribe(&in_room("a", "t"), large).await;
    assert_eq!(greedy.closed().await, code::Session::AUTH_TOKEN_CACHE_OVERFLOW);
}

#[tokio::test]
async fn requests_that_a_token_allowed_end_when_it_expires() {
    let relay = RelayUnderTest::with(Access::new(tokens_only(), BudgetLimits::default()), |_| {});
    let expiring = JwtClaims { exp: soon(BRIEF), ..claims(&["a"], &[]) };
    let publisher = relay.client_with(&expiring).await;
    let _published = publisher.publish(&in_room("a", "t"), 7).await.accepted().await;
    let stream = open_stream(&publisher.connection, &subgroup(7, 0)).await;
    let watcher = relay.client(SetupOptions::default()).await;
    let own = with_tokens(vec![value(&JwtClaims { exp: soon(BRIEF), ..claims(&[], &["a"]) })]);
    let mut subscribed = watcher.subscribe(&in_room("a", "t"), own).await.accepted().await;
    until("a subscriber", || relay.server.status().tracks[0].subscribers == 1).await;
    assert_eq!(publisher.closed().await, code::Session::EXPIRED_AUTH_TOKEN);
    // Either the subscriber's token or the publisher's expires first. The subscriber's session continues.
    while !matches!(subscribed.incoming().await, IncomingMessage::Reset | IncomingMessage::Finished) {}
    until("nothing published, nobody subscribed", || {
        relay.server.status().tracks.iter().all(|track| track.publishers + track.subscribers == 0)
    })
    .await;
    until("its session alone", || relay.server.status().sessions.len() == 1).await;
    drop(stream);
}

#[tokio::test]
async fn publish_whose_token_expires_is_reset_with_its_streams() {
    let relay = RelayUnderTest::with(Access::new(tokens_only(), BudgetLimits::default()), |_| {});
    let publisher = relay.client(SetupOptions::default()).await;
    let mut publish = publisher.publish_of(&in_room("a", "t"), 7);
    publish.parameters = with_tokens(vec![value(&JwtClaims { exp: soon(BRIEF), ..claims(&["a"], &[]) })]);
    let (mut send, mut recv) = open_request(&publisher.connection, publish).await;
    let mut stream = open_stream(&publisher.connection, &subgroup(7, 0)).await;
    let code = loop {
        match patiently(recv.read_chunk(256, true)).await {
            Ok(Some(_)) => {}
            Err(ReadError::Reset(code)) => break code,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(code, VarInt::from_u64(code::Reset::EXPIRED_AUTH_TOKEN.0).unwrap());
    assert_eq!(patiently(stream.stopped()).await, Ok(Some(1u32.into())));
    assert_eq!(relay.refused("token_expired"), 1);
    let _ = (send.finish(), stream.finish()); // Errors are ignored, since the relay may have stopped the streams.
}

#[tokio::test]
async fn new_access_policy_applies_to_open_requests() {
    let access = Access::new(tokens_only(), BudgetLimits::default());
    let relay = RelayUnderTest::with(Arc::clone(&access), |_| {});
    let named = |id: &str| JwtClaims { jti: Some(id.into()), ..claims(&["a"], &["a"]) };
    let one = relay.client_with(&named("one")).await;
    let other = relay.client_with(&named("two")).await;
    let _one = one.publish_namespace("a").await.accepted().await;
    let mut two = other.subscribe(&in_room("a", "t"), Parameters::default()).await;
    let (_, mut asked) = one.asked().await;
    let ok =
        SubscribeOk { track_alias: 1, parameters: Parameters::default(), properties: Properties::default() };
    asked.say(ok).await;
    assert_eq!(two.refusal().await, None);
    let mut policy = tokens_only();
    policy.tokens.revoked = ["one".to_owned()].into();
    access.set_policy(policy);
    assert_eq!(one.closed().await, code::Session::UNAUTHORIZED);
    until("nobody publishes", || relay.server.status().tracks.iter().all(|track| track.publishers == 0))
        .await;
    until("its session is over", || relay.server.status().sessions.len() == 1).await;
    // exact: the number of revoked token IDs is final, since sessions end only after the new policy takes effect
    assert_eq!(relay.server.status().access.revoked, 1);
    // Removing a key also ends the rights of the tokens that it signed.
    let tokens = Requirements { keys: vec![keys::read_secret(&[7; 32]).unwrap()], ..Requirements::default() };
    access.set_policy(AccessPolicy::new(vec![], tokens, false));
    assert_eq!(other.closed().await, code::Session::UNAUTHORIZED);
}

#[tokio::test]
async fn tracks_of_a_namespace_end_when_its_publishers_token_expires() {
    let relay = RelayUnderTest::with(Access::new(tokens_only(), BudgetLimits::default()), |_| {});
    let publisher = relay.client(SetupOptions::default()).await;
    let publish = PublishNamespace {
        request_id: publisher.id(),
        namespace: Namespace::from_path("a").unwrap(),
        parameters: with_tokens(vec![value(&JwtClaims { exp: soon(BRIEF), ..claims(&["a"], &[]) })]),
    };
    let mut namespace = publisher.ask(publish).await.accepted().await;
    let watcher = relay.client_with(&claims(&[], &["a"])).await;
    let subscribed = watcher.subscribe(&in_room("a", "t"), Parameters::default()).await;
    let (_, mut upstream) = publisher.asked().await;
    let ok =
        SubscribeOk { track_alias: 1, parameters: Parameters::default(), properties: Properties::default() };
    upstream.say(ok).await;
    let _subscribed = subscribed.accepted().await;
    namespace.reset().await;
    upstream.reset().await;
    until("no publisher", || relay.server.status().tracks.iter().all(|track| track.publishers == 0)).await;
}

#[tokio::test]
async fn request_updated_with_a_newer_token_continues() {
    let relay = RelayUnderTest::with(Access::new(tokens_only(), BudgetLimits::default()), |_| {});
    let publisher = relay.client_with(&claims(&["a"], &[])).await;
    let _published = publisher.publish(&in_room("a", "t"), 1).await.accepted().await;
    let watcher = relay.client(SetupOptions::default()).await;
    let expiring = |seconds| JwtClaims { exp: soon(seconds), ..claims(&[], &["a"]) };
    let parameters = with_tokens(vec![value(&expiring(BRIEF))]);
    let mut subscribed = watcher.subscribe(&in_room("a", "t"), parameters).await.accepted().await;
    let parameters = with_tokens(vec![value(&expiring(600.0))]);
    subscribed.say(RequestUpdate { request_id: watcher.id(), parameters }).await;
    assert!(matches!(subscribed.message().await, Message::RequestOk(_)));
    // When a second token with the first one's lifetime has expired, the first one has expired, too.
    let brief = relay.client(SetupOptions::default()).await;
    let parameters = with_tokens(vec![value(&expiring(BRIEF))]);
    brief.subscribe(&in_room("a", "t"), parameters).await.accepted().await.reset().await;
    until("one subscriber", || relay.server.status().tracks[0].subscribers <= 1).await;
    // exact: the number of subscribers is final: the subscription with the second token has ended
    assert_eq!(relay.server.status().tracks[0].subscribers, 1);
    // An update with an expired token ends the request.
    let parameters = with_tokens(vec![value(&JwtClaims { exp: Some(1.0), ..claims(&[], &["a"]) })]);
    subscribed.say(RequestUpdate { request_id: watcher.id(), parameters }).await;
    subscribed.reset().await;
}

#[tokio::test]
async fn namespace_watchers_see_only_allowed_namespaces() {
    let rules =
        vec![rule("a", &[], &["anyone"]), rule("a/open/**", &[], &["anyone"]), rule("**", &["anyone"], &[])];
    let policy = AccessPolicy::new(rules, Requirements::default(), false);
    let relay = RelayUnderTest::with(Access::new(policy, BudgetLimits::default()), |_| {});
    let watcher = relay.client(SetupOptions::default()).await;
    let prefix = Namespace::from_path("a").unwrap();
    let watch = SubscribeNamespace {
        request_id: watcher.id(),
        prefix: prefix.clone(),
        parameters: Parameters::default(),
    };
    let mut watched = watcher.ask(watch).await.accepted().await;
    let tracks = SubscribeTracks { request_id: watcher.id(), prefix, parameters: Parameters::default() };
    let _tracks = watcher.ask(tracks).await.accepted().await;
    let publisher = relay.client(SetupOptions::default()).await;
    for path in ["a/closed", "a/open"] {
        let _namespace = publisher.publish_namespace(path).await.accepted().await;
        let Message::Namespace(found) = (match path {
            "a/open" => watched.message().await,
            _ => continue,
        }) else {
            panic!("not a namespace")
        };
        assert_eq!(found.suffix, Namespace::from_path("open").unwrap());
    }
    let _closed = publisher.publish(&in_room("a/closed", "t"), 1).await.accepted().await;
    let _open = publisher.publish(&in_room("a/open", "t"), 2).await.accepted().await;
    let (Message::Publish(publish), _request) = watcher.asked().await else { panic!("not PUBLISH") };
    assert_eq!(publish.track, in_room("a/open", "t"));
}

#[tokio::test]
async fn too_many_requests_and_tracks_are_refused_and_counted() {
    let mut limits = BudgetLimits::default();
    limits.session.requests_per_second = 4;
    limits.session.tracks = 2;
    let relay = RelayUnderTest::with(Access::new(AccessPolicy::default(), limits), |_| {});
    let client = relay.client(SetupOptions::default()).await;
    let mut held = Vec::new();
    for name in 0..2 {
        held.push(client.publish(&track(name), name).await.accepted().await);
    }
    assert_eq!(client.publish(&track(2), 2).await.refusal().await, Some(code::Request::EXCESSIVE_LOAD));
    assert_eq!(relay.refused("tracks"), 1);
    // A request that has ended no longer counts against the limit of tracks.
    drop(held.pop());
    until("a place", || relay.server.status().access.clients[0].tracks == 1).await;
    // Sends requests until some exceed the client's request rate, however slow the machine is.
    let mut asked = 0;
    let mut refused = 0;
    while asked < 50 || refused == 0 {
        let mut namespace = client.publish_namespace(&format!("n/{asked}")).await;
        refused += u64::from(namespace.refusal().await.is_some());
        asked += 1;
    }
    // exact: the relay counts a request before it answers the request
    let status = relay.server.status();
    assert_eq!(relay.refused("request_rate"), refused);
    assert_eq!(status.sessions[0].requests, 3 + asked - refused);
    assert_eq!(status.access.clients[0].requests, 3 + asked - refused);
}

/// A certificate authority that signs clients' certificates.
struct CertificateAuthority {
    issuer: rcgen::Issuer<'static, rcgen::KeyPair>,
    roots: Arc<rustls::RootCertStore>,
}

impl CertificateAuthority {
    fn new() -> Self {
        let key = rcgen::KeyPair::generate().unwrap();
        let mut params = rcgen::CertificateParams::new(vec![]).unwrap();
        params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        let mut roots = rustls::RootCertStore::empty();
        roots.add(params.self_signed(&key).unwrap().der().clone()).unwrap();
        Self { issuer: rcgen::Issuer::new(params, key), roots: Arc::new(roots) }
    }

    fn sign(&self, name: &str) -> Arc<CertifiedKey> {
        let key = rcgen::KeyPair::generate().unwrap();
        let params = rcgen::CertificateParams::new([name.to_owned()]).unwrap();
        let signed = params.signed_by(&key, &self.issuer).unwrap();
        let private = PrivateKeyDer::try_from(key.serialize_der()).unwrap();
        let private = rustls::crypto::ring::sign::any_supported_type(&private).unwrap();
        Arc::new(CertifiedKey::new(vec![signed.der().clone()], private))
    }

    /// Returns a client endpoint with a certificate of this authority.
    fn endpoint(&self, name: &str) -> Endpoint {
        let config = transport::Config {
            trust: ServerTrust::Anyone,
            client_certificate: Some(self.sign(name)),
            ..transport::Config::default()
        };
        Endpoint::bind((Ipv4Addr::LOCALHOST, 0).into(), config).unwrap()
    }
}

#[tokio::test]
async fn changed_client_roots_apply_to_new_sessions() {
    let authorities = [CertificateAuthority::new(), CertificateAuthority::new()];
    let rules = vec![rule("cams/**", &["cert:cam.example"], &[])];
    let access =
        Access::new(AccessPolicy::new(rules, Requirements::default(), true), BudgetLimits::default());
    let relay = RelayUnderTest::with(access, |transport| {
        transport.client_roots = Some(Arc::clone(&authorities[0].roots))
    });
    let address = relay.server.local_addrs()[0];
    let endpoints = authorities.each_ref().map(|authority| authority.endpoint("cam.example"));
    let mut number = 0;
    // Reports which of the clients may publish. TLS sessions are resumed where possible.
    let mut look = async || {
        let mut good = Vec::new();
        for endpoint in &endpoints {
            let Ok(connection) = endpoint.connect(address, "localhost").await else {
                good.push(false);
                continue;
            };
            number += 1;
            let publish = Publish { track: in_room("cams", &number.to_string()), ..publish(0) };
            let answered = async {
                let mut control = connection.streams().open_uni().await.ok()?;
                control.write_all(&encoded(SetupOptions::default())).await.ok()?;
                let (mut send, mut recv) = connection.streams().open_bi().await.ok()?;
                send.write_all(&encoded(publish)).await.ok()?;
                let answer = recv.read_chunk(1, true).await.ok()??;
                Some(answer.bytes[0])
            };
            const REQUEST_OK: u8 = 0x07;
            good.push(patiently(answered).await == Some(REQUEST_OK));
            connection.quic.close(0u32.into(), b"");
        }
        good
    };
    assert_eq!(look().await, [true, false]);
    assert_eq!(look().await, [true, false]);
    relay.server.set_client_roots(Some(&authorities[1].roots)).unwrap();
    assert_eq!(look().await, [false, true]);
    relay.server.set_client_roots(None).unwrap();
    assert_eq!(look().await, [false, false]);
}

#[tokio::test]
async fn client_identity_comes_from_its_certificate() {
    let authority = CertificateAuthority::new();
    let make = |name: &str| authority.sign(name);
    let rules = vec![rule("cams/**", &["cert:cam.example"], &["cert:*"])];
    let access =
        Access::new(AccessPolicy::new(rules, Requirements::default(), true), BudgetLimits::default());
    let relay =
        RelayUnderTest::with(access, |transport| transport.client_roots = Some(Arc::clone(&authority.roots)));
    let connect = |certificate: Option<Arc<CertifiedKey>>| {
        let config = transport::Config {
            trust: ServerTrust::Anyone,
            client_certificate: certificate,
            ..transport::Config::default()
        };
        let endpoint = Endpoint::bind((Ipv4Addr::LOCALHOST, 0).into(), config).unwrap();
        let address = relay.server.local_addrs()[0];
        async move {
            let connection = endpoint.connect(address, "localhost").await.unwrap();
            AccessSession::begin(connection, SetupOptions::default(), Some(endpoint)).await
        }
    };
    let cam = connect(Some(make("cam.example"))).await;
    let _published = cam.publish(&in_room("cams", "t"), 1).await.accepted().await;
    // exact: the relay sets the owner of a track before it answers PUBLISH
    assert_eq!(relay.server.status().tracks[0].owner.as_deref(), Some("cert:dns:cam.example"));
    let other = connect(Some(make("mic.example"))).await;
    let mut refused = other.publish(&in_room("cams", "u"), 1).await;
    assert_eq!(refused.refusal().await, Some(code::Request::UNAUTHORIZED));
    let _watched = other.subscribe(&in_room("cams", "t"), Parameters::default()).await.accepted().await;
    assert_eq!(connect(None).await.closed().await, code::Session::UNAUTHORIZED);
    // A certificate of an unknown authority makes the handshake fail.
    let stranger = connect(Some(Arc::new(certificate()))).await;
    assert!(matches!(
        patiently(stranger.connection.quic.closed()).await,
        quinn::ConnectionError::ConnectionClosed(_) | quinn::ConnectionError::TransportError(_)
    ));
}
