//! Tests that a session leaves neither tasks nor state behind.

mod access;
mod asked;
mod budgets;
mod goaway;
mod updates;
mod windows;

use std::net::Ipv4Addr;

use millrace_moq::{
    Draft, Message, Namespace, Parameters, Properties, SubgroupHeader, SubgroupId, TrackName,
    message::{Publish, PublishNamespace, SetupOptions, Subscribe},
    tracks::cache,
};
use millrace_testkit::{BOUND, async_wait_for};
use millrace_transport::tls::ServerTrust;
use millrace_webtransport::{RecvStream, SendStream};
use rustls::pki_types::PrivateKeyDer;
use tokio::runtime::Handle;

use super::*;
use crate::{OpenAdmission, session::Remains};

/// How long a test waits for one event or answer before it fails.
const PATIENCE: Duration = BOUND;
/// Number of unidirectional and of request streams that a client opens.
const STREAMS: usize = 16;

struct RelayUnderTest {
    server: Server,
    client: Endpoint,
}

impl RelayUnderTest {
    fn start() -> Self {
        Self::with(Access::open(), |_| {})
    }

    /// Starts a relay with this access control. `change` modifies the transport settings of relay and client.
    fn with(access: Arc<Access>, change: impl FnOnce(&mut transport::Config)) -> Self {
        let local = (Ipv4Addr::LOCALHOST, 0).into();
        let mut transport = transport::Config {
            certificate: Some(Arc::new(certificate())),
            trust: ServerTrust::Anyone,
            // The QUIC stack (quinn) handles all streams that the client opens. The relay's own reader of media streams
            // gets none of them.
            control_streams: 1 + STREAMS as u64,
            ..transport::Config::default()
        };
        change(&mut transport);
        let client = {
            let paths = Arc::default();
            Endpoint::bind(local, transport::Config { certificate: None, paths, ..transport.clone() })
                .unwrap()
        };
        let config = Config {
            listen: vec![local],
            upstreams: Vec::new(),
            cluster: None,
            transport: transport::Config { control_streams: 1, ..transport },
            cache: cache::CacheLimits { bytes: 1 << 20, age: Duration::from_secs(1) },
            max_sessions: 300,
            max_tracks: STREAMS,
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
        let bound =
            BoundRelay::new(config, Vec::new(), Arc::new(RelayEngine::user("as configured"))).unwrap();
        Self { server: bound.with_access(access).serve(Arc::new(OpenAdmission)), client }
    }

    async fn connect(&self) -> (Arc<Connection>, Remains) {
        let sessions = &self.server.shared.sessions;
        let known = sessions.lock().len();
        let connection = self.client.connect(self.server.local_addrs()[0], "localhost").await.unwrap();
        until("a session", || sessions.lock().len() > known).await;
        let sessions = sessions.lock();
        let (_, newest) = sessions.iter().max_by_key(|(id, _)| **id).unwrap();
        (connection, newest.remains())
    }

    /// Connects a client that has sent SETUP on its control stream.
    async fn establish(&self) -> (Arc<Connection>, Remains, SendStream) {
        let (connection, session) = self.connect().await;
        let control = open_stream(&connection, &encoded(SetupOptions::default())).await;
        (connection, session, control)
    }
}

fn certificate() -> CertifiedKey {
    let generated = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    let key = PrivateKeyDer::try_from(generated.signing_key.serialize_der()).unwrap();
    let key = rustls::crypto::ring::sign::any_supported_type(&key).unwrap();
    CertifiedKey::new(vec![generated.cert.der().clone()], key)
}

/// Returns the number of asynchronous tasks in this test's runtime.
fn tasks() -> usize {
    // exact: the caller counts the tasks repeatedly, or before a session begins
    Handle::current().metrics().num_alive_tasks()
}

async fn until(what: &str, reached: impl Fn() -> bool) {
    async_wait_for(what, || if reached() { Ok(()) } else { Err(format!("{} tasks", tasks())) }).await;
}

/// Waits until the session has ended and the runtime has at most `before` tasks.
async fn assert_gone(relay: &RelayUnderTest, session: &Remains, before: usize) {
    until("no session", || relay.server.status().sessions.is_empty()).await;
    until("no session object", || session.strong_count() == 0).await;
    until("no task", || tasks() == before).await;
}

fn encoded(message: impl Into<Message>) -> Vec<u8> {
    encoded_in(Draft::D18, message)
}

fn encoded_in(draft: Draft, message: impl Into<Message>) -> Vec<u8> {
    let mut bytes = Vec::new();
    message.into().encode(draft, &mut bytes).unwrap();
    bytes
}

async fn open_stream(connection: &Connection, bytes: &[u8]) -> SendStream {
    let mut send = connection.streams().open_uni().await.unwrap();
    send.write_all(bytes).await.unwrap();
    send
}

/// Both directions of a request stream.
type RequestPair = (SendStream, RecvStream);

async fn open_request(connection: &Connection, message: impl Into<Message>) -> RequestPair {
    let (mut send, recv) = connection.streams().open_bi().await.unwrap();
    send.write_all(&encoded(message)).await.unwrap();
    (send, recv)
}

/// Returns the encoded header of a subgroup stream, without any object.
fn subgroup(alias: u64, group: u64) -> Vec<u8> {
    let header = SubgroupHeader {
        alias,
        group,
        subgroup: SubgroupId::Zero,
        priority: None,
        properties: false,
        end_of_group: false,
        first_object: true,
    };
    let mut bytes = Vec::new();
    header.encode(&mut bytes);
    bytes
}

async fn open_requests(connection: &Connection, subscribe: impl Fn(u64) -> Subscribe) -> Vec<RequestPair> {
    let mut streams = Vec::new();
    for request in 0..STREAMS as u64 {
        streams.push(open_request(connection, subscribe(request * 2)).await);
    }
    streams
}

fn track(name: u64) -> TrackName {
    TrackName::new(Namespace::from_path("a/room").unwrap(), name.to_string().into_bytes()).unwrap()
}

fn subscribe(request_id: u64, rendezvous_timeout: Option<u64>) -> Subscribe {
    let parameters = Parameters { rendezvous_timeout, ..Parameters::default() };
    Subscribe { request_id, track: track(request_id), parameters }
}

#[tokio::test]
async fn path_estimates_of_sessions_are_reported_to_embedding_program() {
    let relay = RelayUnderTest::start();
    let mut changes = relay.server.path_changes();
    let (_client, _, _control) = relay.establish().await;
    let change = loop {
        let change = time::timeout(PATIENCE, changes.recv()).await.expect("an acknowledgement").unwrap();
        // Reports about the network path during the handshake do not have the session's ID yet.
        if change.session != 0 {
            break change;
        }
    };
    // exact: the status lists the session as long as it is open
    let status = relay.server.status();
    assert_eq!(u64::from(change.session), status.sessions[0].id);
    assert!(change.estimate.rtt > Duration::ZERO, "{change:?}");
    assert_eq!(change.estimate.loss, None, "too few packets");
}

#[tokio::test]
async fn disconnected_client_without_setup_leaves_no_tasks_or_state() {
    let relay = RelayUnderTest::start();
    let before = tasks();
    let (connection, session) = relay.connect().await;
    let connected = tasks();
    let requests = open_requests(&connection, |request| subscribe(request, None)).await;
    let mut streams = Vec::new();
    for _ in 0..STREAMS {
        streams.push(open_stream(&connection, &subgroup(7, 0)).await);
    }
    until("a task for each stream", || tasks() >= connected + 2 * STREAMS).await;
    connection.quic.close(0u32.into(), b"");
    drop((requests, streams, connection));
    assert_gone(&relay, &session, before).await;
}

#[tokio::test]
async fn subscriber_that_leaves_before_its_publisher_leaves_no_state() {
    let relay = RelayUnderTest::start();
    let before = tasks();
    let (connection, session, control) = relay.establish().await;
    // The rendezvous timeout is longer than the test waits.
    let minute = Some(60_000);
    let streams = open_requests(&connection, |request| subscribe(request, minute)).await;
    until("every track", || relay.server.status().tracks.len() == STREAMS).await;
    connection.quic.close(0u32.into(), b"");
    drop((streams, control, connection));
    assert_gone(&relay, &session, before).await;
}

/// Returns a PUBLISH for the track with this number, which is also its alias.
fn publish(number: u64) -> Publish {
    Publish {
        request_id: number * 2,
        track: track(number),
        track_alias: number,
        parameters: Parameters::default(),
        properties: Properties::default(),
    }
}

/// With many namespaces and tracks of one publisher, the number of tasks must not grow with their product.
#[tokio::test]
async fn publisher_of_many_namespaces_gets_one_subscribe_per_track() {
    let relay = RelayUnderTest::start();
    let before = tasks();
    let (publisher, published, control) = relay.establish().await;
    let (subscriber, subscribed, other_control) = relay.establish().await;
    let mut requests = Vec::new();
    for number in 0..STREAMS as u64 {
        requests.push(open_request(&publisher, publish(number)).await);
        until("the track", || {
            relay.server.status().tracks.iter().map(|track| track.publishers).sum::<u64>() > number
        })
        .await;
        let subscribe = Subscribe { track: track(number), ..subscribe(number * 2, None) };
        requests.push(open_request(&subscriber, subscribe).await);
    }
    // exact: `until` rereads the number of subscriptions until it is as expected
    let edges = || relay.server.status().tracks.iter().map(|track| track.subscribers).sum::<u64>();
    until("every subscription", || edges() == STREAMS as u64).await;
    let (second, other_published, second_control) = relay.establish().await;
    let idle = tasks();
    for number in 0..STREAMS as u64 {
        let namespace = Namespace::from_path("a").unwrap();
        let publish =
            PublishNamespace { request_id: number * 2, namespace, parameters: Parameters::default() };
        let (send, mut recv) = open_request(&second, publish).await;
        // The relay answers REQUEST_OK after it has queued SUBSCRIBEs at the new publisher for all tracks of the
        // namespace.
        recv.read_chunk(1, true).await.unwrap().unwrap();
        requests.push((send, recv));
    }
    let expected = idle + STREAMS + crate::session::BACKUPS_AT_ONCE;
    until("all that it is to be asked", || tasks() >= expected).await;
    assert_eq!(tasks(), expected);
    for connection in [&publisher, &subscriber, &second] {
        connection.quic.close(0u32.into(), b"");
    }
    drop((requests, control, other_control, second_control, publisher, subscriber, second));
    for session in [published, subscribed, other_published] {
        assert_gone(&relay, &session, before).await;
    }
}

#[tokio::test]
async fn ended_publisher_and_subscriber_leave_no_tasks_or_state() {
    let relay = RelayUnderTest::start();
    let before = tasks();
    let (publisher, published, control) = relay.establish().await;
    let publish = Publish { track_alias: 7, ..publish(0) };
    let request = open_request(&publisher, publish).await;
    // exact: `until` rereads the track's numbers of publishers and subscribers until they are as expected
    let edges = || relay.server.status().tracks.first().map(|track| (track.publishers, track.subscribers));
    until("a publisher", || edges() == Some((1, 0))).await;
    let without_streams = tasks();
    // The alias of the first stream is known. The second stream waits for its alias until the session ends.
    let streams =
        [open_stream(&publisher, &subgroup(7, 0)).await, open_stream(&publisher, &subgroup(8, 0)).await];
    until("a task for each stream", || tasks() >= without_streams + 2).await;
    let (subscriber, subscribed, other_control) = relay.establish().await;
    let other_request = open_request(&subscriber, subscribe(0, None)).await;
    until("a subscriber", || edges() == Some((1, 1))).await;
    publisher.quic.close(0u32.into(), b"");
    drop((streams, request, control, publisher));
    until("neither", || edges().is_none_or(|edges| edges == (0, 0))).await;
    until("no object of the publisher's session", || published.strong_count() == 0).await;
    // exact: the publisher's session was removed from the status before its objects were dropped
    assert_eq!(relay.server.status().sessions.len(), 1);
    subscriber.quic.close(0u32.into(), b"");
    drop((other_request, other_control, subscriber));
    assert_gone(&relay, &subscribed, before).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn client_may_keep_more_requests_open_than_at_first() {
    const REQUESTS: usize = 200;
    let relay = RelayUnderTest::start();
    let (connection, _session, _control) = relay.establish().await;
    let mut open = Vec::new();
    for number in 0..REQUESTS {
        let stream = time::timeout(PATIENCE, connection.quic.open_bi()).await;
        let (mut send, recv) = stream.unwrap_or_else(|_| panic!("stopped after {number} requests")).unwrap();
        // The first byte of a message shows the relay the stream.
        send.write_all(&[0x03]).await.unwrap();
        open.push((send, recv));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn future_of_an_idle_session_is_small() {
    let relay = RelayUnderTest::start();
    let (_connection, _session) = relay.connect().await;
    let sessions = relay.server.shared.sessions.lock();
    let session = sessions.values().next().unwrap();
    let bytes = size_of_val(&session.run());
    assert!(bytes <= 4096, "{bytes} bytes: box the state of what is rare or comes once");
}

#[tokio::test(flavor = "multi_thread")]
async fn idle_sessions_are_left_out_of_the_media_status() {
    let relay = RelayUnderTest::start();
    let (_one, _, _control) = relay.establish().await;
    let (two, _, _control) = relay.establish().await;
    // exact: `establish` has waited for both sessions, and nobody has asked for anything
    assert_eq!((relay.server.status().sessions.len(), relay.server.media().1.len()), (2, 0));
    let _request = open_request(&two, publish(0)).await;
    let publishers = || relay.server.media().1.iter().filter(|one| one.publisher).count();
    until("a publisher", || publishers() == 1).await;
}

/// A timer for each session would wake the runtime several times a second for each of them. The keep-alives of both
/// ends wake it less than once.
#[tokio::test]
async fn relay_with_hundreds_of_idle_sessions_sleeps() {
    const SESSIONS: usize = 200;
    let relay = RelayUnderTest::start();
    let mut clients = Vec::new();
    for _ in 0..SESSIONS {
        clients.push(relay.establish().await);
    }
    // exact: the count of a past interval does not change
    let wake_ups = || Handle::current().metrics().worker_park_count(0);
    let began = Instant::now();
    loop {
        let before = wake_ups();
        // exact: the interval in which wake-ups are counted
        time::sleep(Duration::from_secs(1)).await;
        let count = wake_ups() - before;
        if count < SESSIONS as u64 {
            break;
        }
        assert!(began.elapsed() < PATIENCE, "{count} wake-ups in the last second");
    }
    assert_eq!(relay.server.session_count().0, SESSIONS); // exact: the clients keep their sessions open
}
