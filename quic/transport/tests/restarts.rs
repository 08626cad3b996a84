//! A server that was restarted, and clients of the process before.

#![allow(clippy::unwrap_used)]

use std::{
    net::{Ipv4Addr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use millrace_testkit::{async_wait_for, wait_for};
use millrace_transport::{Config, Connection, Endpoint, LastingSecret, tls::ServerTrust};
use quinn::ConnectionError;
use rustls::{crypto::ring::sign::any_supported_type, sign::CertifiedKey};
use tokio::{runtime::Runtime, task::JoinHandle};

const ALPN: &[u8] = b"restarts";
/// Connections that nobody resets end by this.
const IDLE: Duration = Duration::from_secs(3);

fn certificate() -> Arc<CertifiedKey> {
    let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    let key = any_supported_type(&made.signing_key.serialize_der().try_into().unwrap()).unwrap();
    Arc::new(CertifiedKey::new(vec![made.cert.der().clone()], key))
}

/// A server in a process of its own, as it were: when it is dropped it says nothing to anybody.
struct ServerProcess {
    runtime: Option<Runtime>,
    addr: SocketAddr,
    serving: JoinHandle<()>,
}

impl ServerProcess {
    fn start(addr: SocketAddr, certificate: &Arc<CertifiedKey>, secret: &[u8]) -> Self {
        let runtime = Runtime::new().unwrap();
        let config = Config {
            certificate: Some(Arc::clone(certificate)),
            alpn: vec![ALPN.to_vec()],
            lasting: Some(LastingSecret::new(secret, b"machine")),
            ..Config::default()
        };
        let endpoint = {
            let _inside = runtime.enter();
            // The socket of the process before is closed when its last task is.
            wait_for("the address", || Endpoint::bind(addr, config.clone()).ok())
        };
        let addr = endpoint.local_addr();
        let serving = runtime.spawn(async move {
            let mut connections = Vec::new();
            while let Some(incoming) = endpoint.accept().await {
                let connection = incoming.accept().await.unwrap();
                connection.start();
                connections.push(connection);
            }
        });
        Self { runtime: Some(runtime), addr, serving }
    }

    /// Ends it as SIGKILL does, and starts another one at the same address.
    fn restart(mut self, certificate: &Arc<CertifiedKey>, secret: &[u8]) -> Self {
        let addr = self.addr;
        let runtime = self.runtime.take();
        // Its tasks are gone before they can say anything.
        runtime.into_iter().for_each(Runtime::shutdown_background);
        wait_for("the end of the server", || self.serving.is_finished().then_some(()));
        Self::start(addr, certificate, secret)
    }
}

impl Drop for ServerProcess {
    fn drop(&mut self) {
        self.runtime.take().into_iter().for_each(Runtime::shutdown_background);
    }
}

async fn client(server: SocketAddr) -> (Endpoint, Arc<Connection>) {
    let config = Config {
        trust: ServerTrust::Anyone,
        alpn: vec![ALPN.to_vec()],
        idle_timeout: IDLE,
        keep_alive: None,
        ..Config::default()
    };
    let endpoint = Endpoint::bind((Ipv4Addr::LOCALHOST, 0).into(), config).unwrap();
    let connection = endpoint.connect(server, "localhost").await.unwrap();
    connection.start();
    (endpoint, connection)
}

const ANYWHERE: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 0);

/// Returns how a connection ends whose server was restarted with these secrets, once it has sent something.
fn end(before: &'static [u8], after: &'static [u8]) -> ConnectionError {
    let certificate = certificate();
    let server = ServerProcess::start(ANYWHERE, &certificate, before);
    let clients = Runtime::new().unwrap();
    let (_endpoint, connection) = clients.block_on(client(server.addr));
    let server = server.restart(&certificate, after);
    let end = clients.block_on(async {
        let mut stream = connection.quic.open_uni().await.unwrap();
        stream.write_all(b"next packet").await.unwrap();
        connection.quic.closed().await
    });
    drop(server);
    end
}

#[test]
fn next_packet_is_answered_with_a_reset_that_the_client_knows() {
    assert!(matches!(end(b"secret", b"secret"), ConnectionError::Reset));
}

/// An attacker without the secret of a server cannot end its connections.
#[test]
fn another_secret_resets_nobody() {
    assert!(matches!(end(b"secret", b"other"), ConnectionError::TimedOut));
}

/// A client that waits for media has nothing to send by itself.
#[test]
fn silent_server_is_probed_and_one_that_was_restarted_is_found() {
    let certificate = certificate();
    let server = ServerProcess::start(ANYWHERE, &certificate, b"secret");
    let clients = Runtime::new().unwrap();
    let (_endpoint, connection) = clients.block_on(client(server.addr));
    let watched = Arc::clone(&connection);
    clients.spawn(async move {
        let mut watch = watched.watch();
        loop {
            watch.changed().await;
        }
    });
    // Frequent packets from the server: acknowledgements.
    clients.block_on(async {
        let mut stream = connection.quic.open_uni().await.unwrap();
        for _ in 0..60 {
            stream.write_all(b"live").await.unwrap();
            tokio::time::sleep(Duration::from_millis(20)).await; // exact: paces what is sent
        }
    });
    let server = server.restart(&certificate, b"secret");
    clients.block_on(async_wait_for("the reset", || connection.is_forgotten().then_some(())));
    drop(server);
}

#[test]
fn peer_that_is_there_answers_and_one_that_is_gone_does_not() {
    let certificate = certificate();
    let server = ServerProcess::start(ANYWHERE, &certificate, b"secret");
    let clients = Runtime::new().unwrap();
    let (_endpoint, connection) = clients.block_on(client(server.addr));
    assert!(clients.block_on(connection.answers(Duration::from_secs(5), Duration::ZERO)));
    drop(server);
    assert!(!clients.block_on(connection.answers(Duration::from_millis(300), Duration::ZERO)));
}

/// Many tracks check at the same time when two sessions publish them.
#[test]
fn simultaneous_probes_are_shared() {
    let certificate = certificate();
    let server = ServerProcess::start(ANYWHERE, &certificate, b"secret");
    let clients = Runtime::new().unwrap();
    let (_endpoint, connection) = clients.block_on(client(server.addr));
    let ask = |patience, age| {
        let connection = Arc::clone(&connection);
        clients.spawn(async move { connection.answers(patience, age).await })
    };
    // exact: a probe is sent before its answer comes
    let sent = || connection.quic.stats().frame_tx.max_data;
    let before = sent();
    let patience = Duration::from_secs(5);
    let asked: Vec<_> = (0..100).map(|_| ask(patience, Duration::ZERO)).collect();
    asked.into_iter().for_each(|asked| assert!(clients.block_on(asked).unwrap()));
    let probes = sent() - before;
    assert!(probes < 20, "{probes}");
    // A recent answer is good for others, until a new one is requested.
    drop(server);
    assert!(clients.block_on(ask(patience, Duration::from_secs(600))).unwrap());
    assert!(!clients.block_on(ask(Duration::from_millis(300), Duration::ZERO)).unwrap());
    assert!(
        !clients.block_on(ask(Duration::from_millis(300), Duration::from_secs(600))).unwrap(),
        "no answer is none"
    );
}
