//! Tests of a restarted server with clients of its earlier process.

#![allow(clippy::unwrap_used)]

mod support;

use std::{
    net::{Ipv4Addr, SocketAddr, UdpSocket},
    sync::{
        Arc, Mutex, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use millrace_testkit::{async_wait_for, wait_for};
use millrace_transport::{Config, Connection, Endpoint, Health, LastingSecret};
use quinn::ConnectionError;
use rustls::sign::CertifiedKey;
use tokio::{runtime::Runtime, task::JoinHandle};

use support::{certificate, connect};

const ALPN: &[u8] = b"restarts";
/// The idle timeout, which ends a connection that gets no stateless reset.
const IDLE: Duration = Duration::from_secs(3);

/// A server in its own runtime, as if it were its own process. Dropping it sends nothing to its clients.
struct ServerProcess {
    runtime: Option<Runtime>,
    addr: SocketAddr,
    serving: JoinHandle<()>,
}

impl ServerProcess {
    fn start(addr: SocketAddr, certificate: &Arc<CertifiedKey>, secret: &[u8]) -> Self {
        Self::start_sharded(addr, certificate, secret, 1)
    }

    fn start_sharded(
        addr: SocketAddr,
        certificate: &Arc<CertifiedKey>,
        secret: &[u8],
        shards: usize,
    ) -> Self {
        let runtime = Runtime::new().unwrap();
        let config = Config {
            certificate: Some(Arc::clone(certificate)),
            alpn: vec![ALPN.to_vec()],
            lasting: Some(LastingSecret::new(secret, b"machine")),
            shards,
            ..Config::default()
        };
        let endpoint = {
            let _inside = runtime.enter();
            // The earlier server's socket is closed with its last task, so binding may fail at first.
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

    /// Ends the server as SIGKILL would, and starts another one at the same address.
    fn restart(self, certificate: &Arc<CertifiedKey>, secret: &[u8]) -> Self {
        self.restart_sharded(certificate, secret, 1)
    }

    fn restart_sharded(mut self, certificate: &Arc<CertifiedKey>, secret: &[u8], shards: usize) -> Self {
        let addr = self.addr;
        let runtime = self.runtime.take();
        // The server's tasks end without sending a packet.
        runtime.into_iter().for_each(Runtime::shutdown_background);
        wait_for("the end of the server", || self.serving.is_finished().then_some(()));
        Self::start_sharded(addr, certificate, secret, shards)
    }
}

impl Drop for ServerProcess {
    fn drop(&mut self) {
        self.runtime.take().into_iter().for_each(Runtime::shutdown_background);
    }
}

async fn client(server: SocketAddr) -> (Endpoint, Arc<Connection>) {
    let (endpoint, connection) = connect(server, ALPN, IDLE).await;
    // Before the handshake is confirmed, the client retransmits only handshake packets, which get no stateless reset.
    async_wait_for("HANDSHAKE_DONE", || (connection.quic.stats().frame_rx.handshake_done > 0).then_some(()))
        .await;
    (endpoint, connection)
}

/// Sends a packet. If the server was restarted, a packet that was on its way may have ended the connection before.
async fn send_packet(connection: &Connection) {
    if let Ok(mut stream) = connection.quic.open_uni().await {
        stream.write_all(b"next packet").await.ok();
    }
}

const ANYWHERE: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 0);

/// Returns the error with which a connection ends after its server was restarted and the client has sent a packet. The
/// server uses the secret `before` before the restart, and `after` after it.
fn end(before: &'static [u8], after: &'static [u8]) -> ConnectionError {
    let certificate = certificate();
    let server = ServerProcess::start(ANYWHERE, &certificate, before);
    let clients = Runtime::new().unwrap();
    let (_endpoint, connection) = clients.block_on(client(server.addr));
    let server = server.restart(&certificate, after);
    let end = clients.block_on(async {
        send_packet(&connection).await;
        connection.quic.closed().await
    });
    drop(server);
    end
}

#[test]
fn restarted_server_resets_the_connection_at_the_next_packet() {
    assert!(matches!(end(b"secret", b"secret"), ConnectionError::Reset));
}

/// An attacker without the server's secret cannot end its connections.
#[test]
fn server_with_another_secret_cannot_reset_a_connection() {
    assert!(matches!(end(b"secret", b"other"), ConnectionError::TimedOut));
}

/// A packet reaches another shard than before the restart, which recognizes the ID of the earlier process.
#[test]
fn server_restarted_with_another_number_of_shards_resets_all_connections() {
    let certificate = certificate();
    for (before, after) in [(1, 4), (4, 1), (4, 3), (3, 4)] {
        let server = ServerProcess::start_sharded(ANYWHERE, &certificate, b"secret", before);
        let clients = Runtime::new().unwrap();
        let connected: Vec<_> = (0..12).map(|_| clients.block_on(client(server.addr))).collect();
        let server = server.restart_sharded(&certificate, b"secret", after);
        clients.block_on(async {
            for (_, connection) in &connected {
                send_packet(connection).await;
            }
            for (_, connection) in &connected {
                let end = connection.quic.closed().await;
                assert!(matches!(end, ConnectionError::Reset), "{before} to {after} shards: {end}");
            }
        });
        drop(server);
    }
}

/// A client that waits for media sends nothing, so only a probe gets the stateless reset.
#[test]
fn probe_of_a_silent_restarted_server_is_answered_with_a_reset() {
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
    // The server acknowledges the client's packets, so the client receives packets as frequently as with media.
    clients.block_on(async {
        let mut stream = connection.quic.open_uni().await.unwrap();
        for _ in 0..60 {
            stream.write_all(b"live").await.unwrap();
            // exact: the pause is the interval between the client's packets
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    });
    let server = server.restart(&certificate, b"secret");
    clients.block_on(async_wait_for("the reset", || connection.is_forgotten().then_some(())));
    drop(server);
}

#[test]
fn living_peer_answers_a_probe_and_ended_peer_does_not() {
    let certificate = certificate();
    let server = ServerProcess::start(ANYWHERE, &certificate, b"secret");
    let clients = Runtime::new().unwrap();
    let (_endpoint, connection) = clients.block_on(client(server.addr));
    assert!(clients.block_on(connection.answers(Duration::from_secs(5), Duration::ZERO)));
    drop(server);
    assert!(!clients.block_on(connection.answers(Duration::from_millis(300), Duration::ZERO)));
}

/// Forwards packets between one client and a server until the server dies. Then the forwarder drops the client's packets,
/// and for each of them sends a copy of the last packet that the server sent before it died.
struct Forwarder {
    addr: SocketAddr,
    is_dead: Arc<AtomicBool>,
}

impl Forwarder {
    fn start(server: SocketAddr) -> Self {
        let is_dead = Arc::<AtomicBool>::default();
        let [front, back] = [0, 1].map(|_| Arc::new(UdpSocket::bind(ANYWHERE).unwrap()));
        back.connect(server).unwrap();
        let this = Self { addr: front.local_addr().unwrap(), is_dead: Arc::clone(&is_dead) };
        let client = Arc::<OnceLock<SocketAddr>>::default();
        let last = Arc::<Mutex<Vec<u8>>>::default();
        thread::spawn({
            let front = Arc::clone(&front);
            let back = Arc::clone(&back);
            let client = Arc::clone(&client);
            let is_dead = Arc::clone(&is_dead);
            let last = Arc::clone(&last);
            move || {
                let mut buf = [0; 2048];
                while let Ok(len) = back.recv(&mut buf) {
                    if !is_dead.load(Ordering::Relaxed) {
                        *last.lock().unwrap() = buf[..len].to_vec();
                        front.send_to(&buf[..len], *client.get().unwrap()).unwrap();
                    }
                }
            }
        });
        thread::spawn(move || {
            let mut buf = [0; 2048];
            while let Ok((len, from)) = front.recv_from(&mut buf) {
                let client = client.get_or_init(|| from);
                if !is_dead.load(Ordering::Relaxed) {
                    back.send(&buf[..len]).unwrap();
                } else {
                    front.send_to(&last.lock().unwrap(), client).unwrap();
                }
            }
        });
        this
    }
}

#[test]
fn packets_that_were_on_their_way_when_the_peer_died_are_no_answer() {
    let certificate = certificate();
    let server = ServerProcess::start(ANYWHERE, &certificate, b"secret");
    let path = Forwarder::start(server.addr);
    let clients = Runtime::new().unwrap();
    let (_endpoint, connection) = clients.block_on(client(path.addr));
    assert!(clients.block_on(connection.answers(Duration::from_secs(5), Duration::ZERO)));
    path.is_dead.store(true, Ordering::Relaxed);
    // exact: a count of what has arrived, taken before and after probes for which the test waits
    let datagrams = || connection.quic.stats().udp_rx.datagrams;
    let before = datagrams();
    assert!(!clients.block_on(connection.answers(Duration::from_millis(300), Duration::ZERO)));
    assert!(datagrams() > before + 1, "late packets have arrived");
}

/// Each packet of the client, probes included, gets an old packet of the server.
#[test]
fn copies_of_old_packets_are_no_sign_of_life() {
    let server = ServerProcess::start(ANYWHERE, &certificate(), b"secret");
    let path = Forwarder::start(server.addr);
    let clients = Runtime::new().unwrap();
    let (_endpoint, connection) = clients.block_on(connect(path.addr, ALPN, Duration::from_secs(30)));
    let mut stream = clients.block_on(connection.quic.open_uni()).unwrap();
    for _ in 0..20 {
        clients.block_on(stream.write_all(b"live")).unwrap();
        assert!(clients.block_on(connection.answers(Duration::from_secs(5), Duration::ZERO)));
    }
    path.is_dead.store(true, Ordering::Relaxed);
    clients.block_on(stream.write_all(b"lost")).unwrap();
    let health = clients.block_on(async {
        let mut watch = connection.watch();
        tokio::select! {
            health = watch.changed() => Some(health),
            _ = connection.quic.closed() => None,
        }
    });
    assert_eq!(health, Some(Health::Dead));
}

/// If a second session also publishes many tracks of the first one, the code of each track may probe the first session
/// at the same time.
#[test]
fn simultaneous_callers_share_one_liveness_probe() {
    let certificate = certificate();
    let server = ServerProcess::start(ANYWHERE, &certificate, b"secret");
    let clients = Runtime::new().unwrap();
    let (_endpoint, connection) = clients.block_on(client(server.addr));
    let ask = |patience, age| {
        let connection = Arc::clone(&connection);
        clients.spawn(async move { connection.answers(patience, age).await })
    };
    // exact: a probe is a MAX_DATA frame, which is counted before the probe's answer arrives
    let sent = || connection.quic.stats().frame_tx.max_data;
    let before = sent();
    let patience = Duration::from_secs(5);
    let asked: Vec<_> = (0..100).map(|_| ask(patience, Duration::ZERO)).collect();
    asked.into_iter().for_each(|asked| assert!(clients.block_on(asked).unwrap()));
    let probes = sent() - before;
    assert!(probes < 20, "{probes}");
    // A later call of `answers` needs no new probe if it accepts an answer as old as the last one.
    drop(server);
    assert!(clients.block_on(ask(patience, Duration::from_secs(600))).unwrap());
    assert!(!clients.block_on(ask(Duration::from_millis(300), Duration::ZERO)).unwrap());
    assert!(
        !clients.block_on(ask(Duration::from_millis(300), Duration::from_secs(600))).unwrap(),
        "a failed probe does not count as an answer"
    );
}
