//! Tests of a process that takes over the socket of another one, with clients of both.

#![allow(clippy::unwrap_used)]

mod support;

use std::{
    net::{Ipv4Addr, SocketAddr, UdpSocket},
    os::fd::BorrowedFd,
    sync::Arc,
    time::Duration,
};

use millrace_transport::{
    Config, Connection, Endpoint, LastingSecret,
    takeover::{self, Predecessor},
};
use quinn::ConnectionError;
use tokio::runtime::Runtime;

use support::{certificate, connect};

const ALPN: &[u8] = b"takeover";
/// The idle timeout of clients, which no test reaches.
const IDLE: Duration = Duration::from_secs(60);

/// A server in its own runtime, as if it were its own process. It answers each stream with its generation and the bytes
/// of the stream. Dropping it sends nothing to its clients.
struct ServerProcess {
    runtime: Option<Runtime>,
    endpoint: Option<Arc<Endpoint>>,
    addr: SocketAddr,
    config: Config,
}

impl ServerProcess {
    fn start(secret: &[u8]) -> Self {
        let config = Config {
            shards: 2,
            certificate: Some(certificate()),
            alpn: vec![ALPN.to_vec()],
            lasting: Some(LastingSecret::new(secret, b"machine")),
            ..Config::default()
        };
        let start = |config| Endpoint::bind((Ipv4Addr::LOCALHOST, 0).into(), config).unwrap();
        Self::serve(config, start)
    }

    fn serve(config: Config, start: impl FnOnce(Config) -> Endpoint) -> Self {
        let runtime = Runtime::new().unwrap();
        let endpoint = {
            let _inside = runtime.enter();
            Arc::new(start(config.clone()))
        };
        let accepting = Arc::clone(&endpoint);
        let generation = config.generation;
        runtime.spawn(async move {
            while let Some(incoming) = accepting.accept().await {
                tokio::spawn(async move {
                    let connection = incoming.accept().await.unwrap();
                    connection.start();
                    while let Ok((mut answer, mut asked)) = connection.quic.accept_bi().await {
                        let asked = asked.read_to_end(1 << 20).await.unwrap();
                        answer.write_all(&[generation]).await.unwrap();
                        answer.write_all(&asked).await.unwrap();
                    }
                });
            }
        });
        Self { runtime: Some(runtime), addr: endpoint.local_addr(), endpoint: Some(endpoint), config }
    }

    /// Starts a process that takes over this one's socket, and lets it read. `secret` is the new process's.
    fn upgrade(&self, secret: &[u8]) -> Self {
        let endpoint = self.endpoint.as_ref().unwrap();
        let channels = (0..self.config.shards).map(|_| takeover::channel().unwrap());
        let (ours, theirs) = channels.unzip();
        let config = Config {
            generation: self.config.generation.wrapping_add(1),
            lasting: Some(LastingSecret::new(secret, b"machine")),
            ..self.config.clone()
        };
        let predecessor = Predecessor {
            secret: LastingSecret::from_bytes(self.config.lasting.as_ref().unwrap().to_bytes()),
            generation: self.config.generation,
            channels: theirs,
        };
        let copy = |socket: BorrowedFd<'_>| UdpSocket::from(socket.try_clone_to_owned().unwrap());
        let sockets = endpoint.sockets().into_iter().map(copy).collect();
        let new = Self::serve(config, |config| Endpoint::take_over(sockets, config, predecessor).unwrap());
        {
            let _inside = self.runtime.as_ref().unwrap().enter();
            endpoint.leave(ours).unwrap();
        }
        new.endpoint.as_ref().unwrap().begin();
        new
    }
}

impl Drop for ServerProcess {
    fn drop(&mut self) {
        self.endpoint = None;
        // A runtime cannot be shut down by a thread that runs another one.
        let runtime = self.runtime.take();
        let end = move || runtime.into_iter().for_each(|runtime| runtime.shutdown_timeout(IDLE));
        std::thread::spawn(end).join().unwrap();
    }
}

async fn client(server: SocketAddr) -> Arc<Connection> {
    connect(server, ALPN, IDLE).await.1
}

/// Asks the server, and returns the generation of the process that has answered.
async fn ask(connection: &Connection, bytes: usize) -> Result<u8, ConnectionError> {
    let asked = vec![7; bytes];
    let (mut send, mut answer) = connection.quic.open_bi().await?;
    let closed = async |_| connection.quic.closed().await;
    if let Err(error) = send.write_all(&asked).await {
        return Err(closed(error).await);
    }
    send.finish().unwrap();
    match answer.read_to_end(1 << 20).await {
        Ok(answer) => {
            assert_eq!(answer[1..], asked);
            Ok(answer[0])
        }
        Err(_) => Err(connection.quic.closed().await),
    }
}

#[test]
fn connections_stay_at_their_process_and_new_ones_reach_the_successor() {
    let old = ServerProcess::start(b"secret");
    let clients = Runtime::new().unwrap();
    clients.block_on(async {
        let first = client(old.addr).await;
        assert_eq!(ask(&first, 100).await, Ok(0));
        let new = old.upgrade(b"secret");
        let second = client(old.addr).await;
        // Streams of many packets, which the kernel may merge.
        for _ in 0..3 {
            assert_eq!(tokio::join!(ask(&first, 300_000), ask(&second, 300_000)), (Ok(0), Ok(1)));
        }
        // The successor is taken over in its turn, once the first process has ended.
        first.quic.close(0_u32.into(), b"");
        drop(old);
        let newest = new.upgrade(b"secret");
        let third = client(new.addr).await;
        assert_eq!(tokio::join!(ask(&second, 5000), ask(&third, 5000)), (Ok(1), Ok(2)));
        drop(newest);
    });
}

#[test]
fn clients_of_a_killed_old_process_are_reset_by_its_successor() {
    // The successor knows the predecessor's secret, also if its own is another one.
    for secret in [b"secret", b"others"] {
        let old = ServerProcess::start(b"secret");
        let clients = Runtime::new().unwrap();
        clients.block_on(async {
            let first = client(old.addr).await;
            assert_eq!(ask(&first, 100).await, Ok(0));
            let new = old.upgrade(secret);
            let second = client(old.addr).await;
            assert_eq!(tokio::join!(ask(&first, 100), ask(&second, 100)), (Ok(0), Ok(1)));
            drop(old);
            assert_eq!(ask(&first, 100).await, Err(ConnectionError::Reset));
            assert_eq!(ask(&second, 100).await, Ok(1));
            drop(new);
        });
    }
}

#[test]
fn old_process_serves_new_clients_again_after_its_successor_was_killed() {
    let old = ServerProcess::start(b"secret");
    let clients = Runtime::new().unwrap();
    clients.block_on(async {
        let first = client(old.addr).await;
        let new = old.upgrade(b"secret");
        let second = client(old.addr).await;
        assert_eq!(tokio::join!(ask(&first, 100), ask(&second, 100)), (Ok(0), Ok(1)));
        drop(new);
        assert_eq!(ask(&second, 100).await, Err(ConnectionError::Reset));
        assert_eq!(ask(&first, 5000).await, Ok(0));
        let third = client(old.addr).await;
        assert_eq!(ask(&third, 5000).await, Ok(0));
    });
}
