//! What is left of a client that has gone: nothing.

use std::net::Ipv4Addr;

use millrace_proto::{
    moq::{
        Message, Namespace, Parameters, SubgroupHeader, SubgroupId, TrackName,
        message::{Setup, Subscribe},
    },
    relay::cache,
};
use millrace_transport::quic::tls::Trust;
use rustls::pki_types::PrivateKeyDer;
use tokio::runtime::Handle;

use super::*;
use crate::{Open, session::Remains};

/// How long anything may take before a test fails.
const PATIENCE: Duration = Duration::from_secs(20);
/// Streams of each kind that a client opens.
const STREAMS: usize = 16;

struct Relay {
    server: Server,
    client: Endpoint,
}

impl Relay {
    fn start() -> Self {
        let local = (Ipv4Addr::LOCALHOST, 0).into();
        let transport = quic::Config {
            certificate: Some(Arc::new(certificate())),
            trust: Trust::Anyone,
            // All that a client opens here goes through quinn.
            control_streams: 1 + STREAMS as u64,
            ..quic::Config::default()
        };
        let client = Endpoint::bind(local, quic::Config { certificate: None, ..transport.clone() }).unwrap();
        let config = Config {
            listen: vec![local],
            upstream: None,
            transport: quic::Config { control_streams: 1, ..transport },
            cache: cache::Limits { bytes: 1 << 20, age: Duration::from_secs(1) },
            max_sessions: 10,
            max_tracks: STREAMS,
            drain_timeout: Duration::from_secs(1),
        };
        let bound = Bound::new(config, Vec::new(), Arc::new(Engine::user("as configured"))).unwrap();
        Self { server: bound.serve(Arc::new(Open)), client }
    }

    async fn connect(&self) -> (Arc<Connection>, Remains) {
        let connection = self.client.connect(self.server.local_addrs()[0], "localhost").await.unwrap();
        let session = || self.server.shared.sessions.lock().values().next().map(|session| session.remains());
        until("a session", || session().is_some()).await;
        (connection, session().unwrap())
    }
}

fn certificate() -> CertifiedKey {
    let generated = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    let key = PrivateKeyDer::try_from(generated.signing_key.serialize_der()).unwrap();
    let key = rustls::crypto::ring::sign::any_supported_type(&key).unwrap();
    CertifiedKey::new(vec![generated.cert.der().clone()], key)
}

/// Tasks of this test's runtime.
fn tasks() -> usize {
    Handle::current().metrics().num_alive_tasks()
}

async fn until(what: &str, reached: impl Fn() -> bool) {
    let wait = async {
        while !reached() {
            time::sleep(Duration::from_millis(5)).await;
        }
    };
    if time::timeout(PATIENCE, wait).await.is_err() {
        panic!("not reached: {what}, {} tasks", tasks());
    }
}

/// Waits until the session, and the tasks that have begun since there were `before`, are gone.
async fn assert_gone(relay: &Relay, session: &Remains, before: usize) {
    until("no session", || relay.server.status().sessions.is_empty()).await;
    until("no session object", || session.strong_count() == 0).await;
    until("no task", || tasks() == before).await;
}

fn encoded(message: impl Into<Message>) -> Vec<u8> {
    let mut bytes = Vec::new();
    message.into().encode(&mut bytes).unwrap();
    bytes
}

async fn open_requests(
    connection: &Connection,
    subscribe: impl Fn(u64) -> Subscribe,
) -> Vec<quinn::SendStream> {
    let mut streams = Vec::new();
    for request in 0..STREAMS as u64 {
        let (mut send, _recv) = connection.quic.open_bi().await.unwrap();
        send.write_all(&encoded(subscribe(request * 2))).await.unwrap();
        streams.push(send);
    }
    streams
}

fn subscribe(request_id: u64, rendezvous_timeout: Option<u64>) -> Subscribe {
    let namespace = Namespace::from_path("nobody/publishes").unwrap();
    let track = TrackName::new(namespace, request_id.to_string().into_bytes()).unwrap();
    Subscribe { request_id, track, parameters: Parameters { rendezvous_timeout, ..Parameters::default() } }
}

#[tokio::test]
async fn nothing_is_left_of_a_client_that_never_said_setup() {
    let relay = Relay::start();
    let before = tasks();
    let (connection, session) = relay.connect().await;
    let connected = tasks();
    let header = SubgroupHeader {
        alias: 7,
        group: 0,
        subgroup: SubgroupId::Zero,
        priority: None,
        properties: false,
        end_of_group: false,
        first_object: true,
    };
    let mut bytes = Vec::new();
    header.encode(&mut bytes);
    let mut streams = open_requests(&connection, |request| subscribe(request, None)).await;
    for _ in 0..STREAMS {
        let mut send = connection.quic.open_uni().await.unwrap();
        send.write_all(&bytes).await.unwrap();
        streams.push(send);
    }
    until("a task for each stream", || tasks() >= connected + 2 * STREAMS).await;
    connection.quic.close(0u32.into(), b"");
    drop((streams, connection));
    assert_gone(&relay, &session, before).await;
}

#[tokio::test]
async fn nothing_is_left_of_a_subscriber_that_went_before_its_publisher_came() {
    let relay = Relay::start();
    let before = tasks();
    let (connection, session) = relay.connect().await;
    let mut control = connection.quic.open_uni().await.unwrap();
    control.write_all(&encoded(Setup::default())).await.unwrap();
    // Longer than this test waits.
    let minute = Some(60_000);
    let streams = open_requests(&connection, |request| subscribe(request, minute)).await;
    until("every track", || relay.server.status().tracks.len() == STREAMS).await;
    connection.quic.close(0u32.into(), b"");
    drop((streams, control, connection));
    assert_gone(&relay, &session, before).await;
}
