//! Tests of endpoints with several shards.

#![allow(clippy::unwrap_used)]

use std::{
    io,
    net::{Ipv4Addr, SocketAddr, UdpSocket},
    sync::Arc,
    time::Duration,
};

use millrace_quic::plane::downstream::{Label, NewDatagram, Priority};
use millrace_testkit::async_wait_for;
use millrace_transport::{BindError, Config, Connection, Endpoint, tls::ServerTrust};
use nix::{
    libc,
    sys::socket::{setsockopt, sockopt},
};
use parking_lot::Mutex;
use quinn::crypto::rustls::QuicClientConfig;
use rustls::{crypto::ring::sign::any_supported_type, sign::CertifiedKey};

const ALPN: &[u8] = b"shards";
const ANYWHERE: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 0);

fn config(shards: usize) -> Config {
    let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    let key = any_supported_type(&made.signing_key.serialize_der().try_into().unwrap()).unwrap();
    let certificate = CertifiedKey::new(vec![made.cert.der().clone()], key);
    Config {
        shards,
        certificate: Some(Arc::new(certificate)),
        trust: ServerTrust::Anyone,
        alpn: vec![ALPN.to_vec()],
        idle_timeout: Duration::from_secs(120),
        ..Config::default()
    }
}

/// A server that echoes each bidirectional stream of its connections.
struct EchoServer {
    certificate: Arc<CertifiedKey>,
    endpoint: Arc<Endpoint>,
    connections: Arc<Mutex<Vec<Arc<Connection>>>>,
}

impl EchoServer {
    /// Starts a server. With `retry`, each client has to prove its address first.
    fn start(shards: usize, retry: bool) -> Self {
        let config = config(shards);
        let certificate = config.certificate.clone().unwrap();
        let endpoint = Arc::new(Endpoint::bind(ANYWHERE, config).unwrap());
        let connections = Arc::<Mutex<Vec<_>>>::default();
        let accepting = Arc::clone(&endpoint);
        let accepted = Arc::clone(&connections);
        tokio::spawn(async move {
            while let Some(incoming) = accepting.accept().await {
                if retry && !incoming.is_proved() {
                    incoming.retry();
                    continue;
                }
                let accepted = Arc::clone(&accepted);
                tokio::spawn(async move {
                    let connection = incoming.accept().await.unwrap();
                    connection.start();
                    accepted.lock().push(Arc::clone(&connection));
                    while let Ok((mut send, mut receive)) = connection.quic.accept_bi().await {
                        let said = receive.read_to_end(1 << 20).await.unwrap();
                        send.write_all(&said).await.unwrap();
                        send.finish().unwrap();
                    }
                });
            }
        });
        Self { certificate, endpoint, connections }
    }

    fn misdirected(&self) -> u64 {
        self.endpoint.shards().iter().map(|shard| shard.misdirected).sum()
    }
}

/// Creates a client endpoint with this many shards.
fn client(shards: usize) -> Endpoint {
    Endpoint::bind(ANYWHERE, Config { certificate: None, ..config(shards) }).unwrap()
}

/// Sends `text` on a stream, and checks that it comes back.
async fn echo(connection: &quinn::Connection, text: &[u8]) {
    let (mut send, mut receive) = connection.open_bi().await.unwrap();
    send.write_all(text).await.unwrap();
    send.finish().unwrap();
    assert!(receive.read_to_end(1 << 20).await.unwrap() == text);
}

/// Creates an endpoint of an unmodified quinn, which accepts this server certificate.
fn quinn_client(certificate: &CertifiedKey) -> quinn::Endpoint {
    let mut roots = rustls::RootCertStore::empty();
    roots.add(certificate.cert[0].clone()).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let tls = rustls::ClientConfig::builder_with_provider(provider);
    let tls = tls.with_protocol_versions(&[&rustls::version::TLS13]).unwrap();
    let mut tls = tls.with_root_certificates(roots).with_no_client_auth();
    tls.alpn_protocols = vec![ALPN.to_vec()];
    let runtime = Arc::new(quinn::TokioRuntime);
    let socket = UdpSocket::bind(ANYWHERE).unwrap();
    let mut endpoint = quinn::Endpoint::new(quinn::EndpointConfig::default(), None, socket, runtime).unwrap();
    let tls = Arc::new(QuicClientConfig::try_from(tls).unwrap());
    endpoint.set_default_client_config(quinn::ClientConfig::new(tls));
    endpoint
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_stay_on_their_shards_when_their_addresses_change() {
    const SHARDS: usize = 4;
    const CLIENTS: usize = 10;
    const EACH: usize = 20;
    let server = EchoServer::start(SHARDS, false);
    let mut clients = Vec::new();
    for _ in 0..CLIENTS {
        let endpoint = quinn_client(&server.certificate);
        for _ in 0..EACH {
            let connecting = endpoint.connect(server.endpoint.local_addr(), "localhost").unwrap();
            let connection = connecting.await.unwrap();
            echo(&connection, b"first packets").await;
            clients.push((endpoint.clone(), connection));
        }
    }
    let count = || server.endpoint.shards().iter().map(|shard| shard.connections).collect::<Vec<_>>();
    let before = count();
    assert_eq!(before.iter().sum::<usize>(), CLIENTS * EACH);
    assert!(before.iter().all(|count| *count > EACH), "each shard has its share: {before:?}");
    let received = || server.endpoint.shards().iter().map(|shard| shard.received).collect::<Vec<_>>();
    let served: Vec<_> = server.connections.lock().iter().map(|one| one.heard()).collect();

    // Another address and another port, in the middle of the connections.
    let text = vec![7; 100_000];
    for (endpoint, connection) in clients.iter().step_by(EACH) {
        let socket = UdpSocket::bind((Ipv4Addr::new(127, 0, 0, 2), 0)).unwrap();
        let (moved, ()) = tokio::join!(async { endpoint.rebind(socket) }, echo(connection, &text));
        moved.unwrap();
    }
    for (_, connection) in &clients {
        echo(connection, &text).await;
    }
    assert_eq!((count(), server.misdirected()), (before, 0));
    let new = Ipv4Addr::new(127, 0, 0, 2);
    let connections = server.connections.lock().clone();
    assert!(connections.iter().all(|one| one.quic.remote_address().ip() == new), "all have moved");
    let more = connections.iter().zip(served).map(|(one, before)| one.heard() - before).collect::<Vec<_>>();
    assert!(more.iter().all(|more| *more > 50), "the connection that has the packets is the old one");
    assert!(received().iter().all(|received| *received > 0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn retry_tokens_are_accepted_by_every_shard() {
    let server = EchoServer::start(4, true);
    let endpoint = client(1);
    for _ in 0..40 {
        let connection = endpoint.connect(server.endpoint.local_addr(), "localhost").await.unwrap();
        connection.start();
        echo(&connection.quic, b"proved").await;
    }
    let shards = server.endpoint.shards();
    assert!(shards.iter().all(|shard| shard.connections > 0), "{shards:?}");
    assert_eq!(server.misdirected(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_with_several_shards_use_each_of_them() {
    let server = EchoServer::start(2, false);
    let endpoint = client(3);
    let mut connections = Vec::new();
    for turn in 0..9 {
        let connection = endpoint.connect(server.endpoint.local_addr(), "localhost").await.unwrap();
        connection.start();
        echo(&connection.quic, &vec![turn; 50_000]).await;
        connections.push(connection);
    }
    let shards = endpoint.shards();
    assert!(shards.iter().all(|shard| (shard.connections, shard.misdirected) == (3, 0)), "{shards:?}");
    assert_eq!(server.misdirected(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn thread_of_each_shard_sends_what_its_connections_may_send() {
    const CLIENTS: u8 = 24;
    for shards in [1, 3] {
        let server = EchoServer::start(shards, false);
        let endpoint = client(1);
        let mut clients = Vec::new();
        for _ in 0..CLIENTS {
            let connection = endpoint.connect(server.endpoint.local_addr(), "localhost").await.unwrap();
            connection.start();
            echo(&connection.quic, b"it is accepted").await;
            clients.push(connection);
        }
        let connections = server.connections.lock().clone();
        let mut by_shard = vec![Vec::new(); shards];
        for (number, connection) in (0..).zip(connections) {
            let payload = vec![number; 100].into();
            let priority = Priority::default();
            let datagram =
                NewDatagram { payload, priority, expires: None, late: None, label: Label::default() };
            connection.downstream().send_datagram(datagram).unwrap();
            by_shard[connection.shard()].push(connection);
        }
        for connections in &mut by_shard {
            assert!(!connections.is_empty());
            Connection::hand_over(connections);
            // An endpoint with one shard has no thread, so the caller has to send.
            assert_eq!(connections.is_empty(), shards > 1);
            connections.iter().for_each(|connection| connection.transmit_now());
        }
        let mut received = Vec::new();
        for client in &clients {
            received.push(client.quic.read_datagram().await.unwrap());
        }
        received.sort_unstable();
        assert_eq!(received, (0..CLIENTS).map(|number| vec![number; 100]).collect::<Vec<_>>());
    }
}

#[tokio::test]
async fn second_endpoint_at_the_address_of_a_sharded_one_is_refused() {
    let first = Endpoint::bind(ANYWHERE, config(4)).unwrap();
    for shards in [1, 4] {
        let second = Endpoint::bind(first.local_addr(), config(shards));
        let Err(BindError::Socket { addr, source }) = second else { panic!("{shards} shards were bound") };
        assert_eq!((addr, source.kind()), (first.local_addr(), io::ErrorKind::AddrInUse));
    }
    assert!(matches!(Endpoint::bind(ANYWHERE, config(0)), Err(BindError::Shards(0))));
    assert!(matches!(Endpoint::bind(ANYWHERE, config(65)), Err(BindError::Shards(65))));
}

/// Replaces the program by which the kernel selects the socket of the group at `addr`. A process of the same user may do
/// so, by a socket that has joined the group.
fn steer(addr: SocketAddr, program: &mut [libc::sock_filter]) {
    let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::DGRAM, None).unwrap();
    socket.set_reuse_port(true).unwrap();
    socket.bind(&addr.into()).unwrap();
    let program = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    setsockopt(&socket, sockopt::AttachReusePortCbpf, &program).unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn packets_at_a_wrong_shard_are_counted_and_reset_nothing() {
    const SHARDS: u32 = 2;
    let step = |code, k| libc::sock_filter { code, jt: 0, jf: 0, k };
    let server = EchoServer::start(SHARDS as usize, false);
    let addr = server.endpoint.local_addr();
    let endpoint = client(1);
    let mut connections = Vec::new();
    while server.endpoint.shards().iter().any(|shard| shard.connections == 0) {
        let connection = endpoint.connect(addr, "localhost").await.unwrap();
        connection.start();
        echo(&connection.quic, b"right").await;
        connections.push(connection);
    }
    // All packets go to the first shard: `ret #0`.
    steer(addr, &mut [step(0x06, 0)]);
    let echoes = connections.iter().map(|one| {
        let quic = one.quic.clone();
        tokio::spawn(async move { echo(&quic, b"wrong").await })
    });
    let echoes: Vec<_> = echoes.collect();
    async_wait_for("packets at a wrong shard", || (server.misdirected() > 2).then_some(())).await;
    // `ldb [1]; mod #2; ret a` is right for packets with a short header.
    steer(addr, &mut [step(0x30, 1), step(0x94, SHARDS), step(0x16, 0)]);
    for echo in echoes {
        echo.await.unwrap();
    }
    assert!(connections.iter().all(|one| one.quic.close_reason().is_none()));
}
