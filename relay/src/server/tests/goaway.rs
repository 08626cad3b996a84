//! Tests of GOAWAY, on control streams and on request streams.

use bytes::BytesMut;
use millrace_moq::{
    code,
    incomplete::IncompleteBytes,
    message::{GoAway, RequestOk},
};

use super::*;
use crate::wire::{GoAways, IncomingMessage, MessageReader};

fn goaway(uri: &str, request_id: Option<u64>) -> GoAway {
    GoAway { uri: uri.into(), timeout: 0, request_id }
}

/// Returns the code with which the relay closes the session after these messages. Returns `None` if it does not close
/// the session and answers another request.
async fn outcome(on_control: bool, messages: &[GoAway], closes: bool) -> Option<u64> {
    let relay = RelayUnderTest::start();
    let (connection, _session, mut control) = relay.establish().await;
    let namespace = Namespace::from_path("a").unwrap();
    let publish = PublishNamespace { request_id: 0, namespace, parameters: Parameters::default() };
    let (mut request, _answers) = open_request(&connection, publish).await;
    for message in messages {
        let stream = if on_control { &mut control } else { &mut request };
        let _ = stream.write_all(&encoded(message.clone())).await; // Fails if the relay has closed the session.
    }
    if closes {
        connection.quic.closed().await;
    } else {
        // The subscription is refused, because nobody publishes its track.
        let other = Subscribe {
            track: TrackName::new(Namespace::from_path("b").unwrap(), Vec::new()).unwrap(),
            ..subscribe(2, None)
        };
        let (_request, mut answers) = open_request(&connection, other).await;
        answers.read_chunk(1, true).await.unwrap();
    }
    match connection.quic.close_reason() {
        Some(quinn::ConnectionError::ApplicationClosed(close)) => Some(close.error_code.into_inner()),
        _ => None,
    }
}

#[tokio::test]
async fn invalid_goaway_on_control_or_request_stream_closes_the_session() {
    let violation = Some(code::Session::PROTOCOL_VIOLATION.0);
    let wrong_side = Some(code::Session::INVALID_REQUEST_ID.0);
    let table = [
        ("the relay's first request was not seen", true, vec![goaway("", Some(1))], None),
        ("of older drafts", true, vec![goaway("", None)], None),
        ("a request of the client's own", true, vec![goaway("", Some(2))], wrong_side),
        ("a client cannot say where to", true, vec![goaway("moqt://a", Some(1))], violation),
        ("twice", true, vec![goaway("", Some(1)), goaway("", Some(1))], violation),
        ("a request moves", false, vec![goaway("", None)], None),
        ("to elsewhere", false, vec![goaway("moqt://a", None)], violation),
        ("a request has no request ID", false, vec![goaway("", Some(1))], violation),
        ("a request moves twice", false, vec![goaway("", None), goaway("", None)], violation),
    ];
    for (description, on_control, messages, expected) in table {
        let outcome = time::timeout(PATIENCE, outcome(on_control, &messages, expected.is_some())).await;
        assert_eq!(outcome, Ok(expected), "{description}");
    }
}

/// Returns the next request of the relay to its upstream relay.
async fn asked(connection: &Connection) -> (Message, SendStream, MessageReader) {
    let (mut send, recv) = connection.streams().accept_bi().await.unwrap();
    let held = Arc::<IncompleteBytes>::default().stream();
    let mut reader = MessageReader::new(Draft::D18, recv, BytesMut::new(), held, GoAways::on_request(false));
    let IncomingMessage::Message(message) = reader.next().await.unwrap() else { panic!("no request") };
    send.write_all(&encoded(RequestOk::default())).await.unwrap();
    (message, send, reader)
}

/// Starts a relay that connects to other relays. `change` names them in its settings.
fn relay_below(transport: &transport::Config, change: impl FnOnce(&mut Config)) -> Server {
    let local = (Ipv4Addr::LOCALHOST, 0).into();
    let mut config = Config {
        listen: vec![local],
        cluster: None,
        upstreams: Vec::new(),
        transport: transport::Config { control_streams: 1, ..transport.clone() },
        cache: cache::CacheLimits { bytes: 1 << 20, age: Duration::from_secs(1) },
        max_sessions: 10,
        max_tracks: 10,
        offloaded_tracks: 128,
        linger: Duration::ZERO,
        drain_timeout: Duration::from_secs(1),
        goaway_uri: None,
        delays: crate::Delays::default(),
        origins: crate::Origins::Any,
        adaptive: crate::AdaptiveMode::Off,
        switching_sets: false,
        drafts: Draft::ALL.to_vec(),
    };
    change(&mut config);
    let outgoing = crate::outgoing_sockets(&[local]).unwrap();
    let bound = BoundRelay::new(config, outgoing, Arc::new(RelayEngine::user("as configured"))).unwrap();
    bound.serve(Arc::new(OpenAdmission))
}

/// A peer sends GOAWAY in each session. The relay connects again while the first session is open, and keeps no more
/// than one of the sessions that the peer has left.
#[tokio::test]
async fn peer_that_sends_goaway_in_each_session_has_one_earlier_session_at_most() {
    let transport = transport::Config {
        certificate: Some(Arc::new(certificate())),
        trust: ServerTrust::Anyone,
        control_streams: 4,
        ..transport::Config::default()
    };
    let peer = Endpoint::bind((Ipv4Addr::LOCALHOST, 0).into(), transport.clone()).unwrap();
    let url = format!("moqt://{}", peer.local_addr()).parse().unwrap();
    let peers = vec![ClusterPeer::new(crate::UpstreamRelay { url, token: None })];
    let relay = relay_below(&transport, |config| {
        let hop = cluster::HopId(1);
        config.cluster = Some(RelayCluster { hop, cost: None, peers, max_routes: 10, on_demand: None });
    });
    let mut sessions = Vec::new();
    let accepting = async {
        while sessions.len() < 4 {
            let connection = peer.accept().await.unwrap().accept().await.unwrap();
            let setup = SetupOptions { hop_id: Some(cluster::HopId(2)), ..SetupOptions::default() };
            let messages = [encoded(setup), encoded(goaway("", None))].concat();
            let control = open_stream(&connection, &messages).await;
            let first = sessions.first().map_or(&connection, |(first, _): &(Arc<Connection>, _)| first);
            let is_open = sessions.len() != 1 || first.quic.close_reason().is_none();
            assert!(is_open, "the first session ended before the second one began");
            sessions.push((connection, control));
        }
    };
    time::timeout(PATIENCE, accepting).await.unwrap();
    let count = || sessions.iter().filter(|(connection, _)| connection.quic.close_reason().is_none()).count();
    until("the other sessions to end", || count() == 1).await;
    relay.stop().await;
}

/// A relay that gets GOAWAY on a request about namespaces sends the request again before it cancels the old one.
#[tokio::test]
async fn requests_are_sent_again_after_goaway_of_the_upstream_relay() {
    let local = (Ipv4Addr::LOCALHOST, 0).into();
    let transport = transport::Config {
        certificate: Some(Arc::new(certificate())),
        trust: ServerTrust::Anyone,
        control_streams: 4,
        ..transport::Config::default()
    };
    let upstream = Endpoint::bind(local, transport.clone()).unwrap();
    let url = format!("moqt://{}", upstream.local_addr()).parse().unwrap();
    let relay = relay_below(&transport, |config| {
        config.upstreams = vec![crate::UpstreamRelay { url, token: None }];
    });
    let connection = upstream.accept().await.unwrap().accept().await.unwrap();
    let _control = open_stream(&connection, &encoded(SetupOptions::default())).await;
    let client = Endpoint::bind(local, transport::Config { certificate: None, ..transport }).unwrap();
    let publisher = client.connect(relay.local_addrs()[0], "localhost").await.unwrap();
    let _its_control = open_stream(&publisher, &encoded(SetupOptions::default())).await;
    let namespace = Namespace::from_path("a").unwrap();
    let publish = PublishNamespace { request_id: 0, namespace, parameters: Parameters::default() };
    let _published = open_request(&publisher, publish).await;
    let moving = async {
        let mut first = Vec::new();
        while first.len() < 2 {
            let (message, mut send, reader) = asked(&connection).await;
            send.write_all(&encoded(goaway("", None))).await.unwrap();
            first.push((message.name(), send, reader));
        }
        let mut second = Vec::new();
        while second.len() < 2 {
            second.push(asked(&connection).await);
        }
        for (name, _, mut reader) in first {
            assert!(second.iter().any(|(message, ..)| message.name() == name), "{name}");
            assert!(matches!(reader.next().await.unwrap(), IncomingMessage::Reset), "{name}");
        }
    };
    time::timeout(PATIENCE, moving).await.unwrap();
    assert_eq!(connection.quic.close_reason(), None);
    relay.stop().await;
}
