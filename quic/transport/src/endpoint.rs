//! Endpoints: connections at one UDP address, with TLS settings in common, and divided into shards.

use std::{
    io,
    net::{SocketAddr, UdpSocket},
    os::fd::{BorrowedFd, OwnedFd},
    sync::{
        Arc, OnceLock, Weak,
        atomic::{AtomicUsize, Ordering},
    },
    task::Poll,
    time::{Duration, Instant},
};

use millrace_webtransport::Foreign;
use parking_lot::RwLock;
use quinn::{
    EndpointConfig, IdleTimeout, TransportConfig, VarInt,
    crypto::rustls::{QuicClientConfig, QuicServerConfig},
};
use rustls::{RootCertStore, sign::CertifiedKey};
use thiserror::Error;

use crate::{
    allowance,
    config::Config,
    congestion,
    connection::Connection,
    driver,
    lasting::LastingSecret,
    path::PeerAddress,
    seam::{ClientCrypto, ServerCrypto},
    secrets::HandshakeSecrets,
    send::SendReport,
    shards::{MAX_SHARDS, Shard, ShardIndex, ShardReport},
    shared::SharedConnection,
    sockets,
    takeover::Predecessor,
    tls::{self, ReplaceableCertificate, ReplaceableRoots},
    windows::ConnectionWindow,
};

/// The largest UDP payload that servers may send to this endpoint. A relay forwards such packets with a longer
/// connection ID, packet number and stream header; the forwarded packets still have to fit into Ethernet's MTU.
const MAX_FROM_SERVERS: u16 = 1452 - 24;
/// The largest UDP payload that clients may send to this endpoint. Such a packet may be forwarded to another relay,
/// whose copies may have longer headers again, and still have to fit into Ethernet's MTU.
const MAX_FROM_CLIENTS: u16 = MAX_FROM_SERVERS - 8;

/// Reason why an endpoint could not be created.
#[derive(Debug, Error)]
#[allow(missing_docs, reason = "the messages describe the variants")]
pub enum BindError {
    #[error("cannot listen on {addr}: {source}")]
    Socket { addr: SocketAddr, source: io::Error },
    #[error("cannot read the local address of a socket: {0}")]
    Address(#[source] io::Error),
    #[error("the TLS configuration is not usable: {0}")]
    Tls(#[from] rustls::Error),
    #[error("the idle timeout of {0:?} is too long for QUIC")]
    IdleTimeout(Duration),
    #[error("an endpoint has from 1 to {MAX_SHARDS} shards, not {0}")]
    Shards(usize),
    #[error("no cipher suite is enabled")]
    NoSuite,
    #[error("the system has no random numbers")]
    NoRandomness,
}

/// The reason why a peer's connection was not established.
#[derive(Debug, Error)]
#[allow(missing_docs, reason = "the messages describe the variants")]
pub enum AcceptError {
    #[error("the budget for receive windows has no room for another connection")]
    NoRoom,
    #[error(transparent)]
    Handshake(#[from] quinn::ConnectionError),
}

/// The reason why a connection to a server was not established.
#[derive(Debug, Error)]
#[allow(missing_docs, reason = "the messages describe the variants")]
pub enum ConnectError {
    #[error("the budget for receive windows has no room for another connection")]
    NoRoom,
    #[error(transparent)]
    Start(#[from] quinn::ConnectError),
    #[error(transparent)]
    Handshake(#[from] quinn::ConnectionError),
}

/// An endpoint: one UDP address and its QUIC connections, which are divided into [shards](Config::shards). A
/// [`Connection`] may outlive its endpoint.
///
/// A server passes each [`Incoming`] of [`Self::accept`] on to [`Incoming::accept`]. A client calls [`Self::connect`].
/// One endpoint may be server and client at the same time.
///
/// ```no_run
/// use std::sync::Arc;
/// use millrace_transport::{Config, Endpoint, tls::ServerTrust};
///
/// # async fn example(roots: rustls::RootCertStore) -> Result<(), Box<dyn std::error::Error>> {
/// let trust = ServerTrust::Roots(Arc::new(roots));
/// // The data plane has every unidirectional stream of this end.
/// let config = Config { trust, alpn: vec![b"files".to_vec()], control_streams: 0, ..Config::default() };
/// let endpoint = Endpoint::bind("0.0.0.0:0".parse()?, config)?;
///
/// let connection = endpoint.connect("192.0.2.7:4433".parse()?, "files.example").await?;
/// let (mut request, _) = connection.quic.open_bi().await?;
/// request.write_all(b"index.html").await?;
/// request.finish()?;
/// let file = connection.quic.accept_uni().await?.read_to_end(1 << 20).await?;
/// println!("{} bytes", file.len());
/// endpoint.close(0_u32.into(), b"");
/// endpoint.wait_idle().await;
/// # Ok(())
/// # }
/// ```
pub struct Endpoint {
    inner: Arc<EndpointInner>,
}

struct EndpointInner {
    shards: Vec<Shard>,
    /// Number of calls that have begun with one of the shards. Each begins with the next one.
    turn: AtomicUsize,
    local_addr: SocketAddr,
    config: Config,
    server: quinn::ServerConfig,
    server_tls: rustls::ServerConfig,
    client_tls: rustls::ClientConfig,
    initial: rustls::quic::Suite,
    certificate: Arc<ReplaceableCertificate>,
    clients: Arc<ReplaceableRoots>,
}

impl Endpoint {
    /// Creates an endpoint on a new socket bound to `addr`, within a tokio runtime. A socket with an IPv6 address is
    /// for IPv6 only.
    pub fn bind(addr: SocketAddr, config: Config) -> Result<Self, BindError> {
        Self::on(bind_socket(addr)?, config)
    }

    /// Creates an endpoint on a socket that [`bind_socket`] created.
    pub fn on(socket: UdpSocket, config: Config) -> Result<Self, BindError> {
        if !(1..=MAX_SHARDS).contains(&config.shards) {
            return Err(BindError::Shards(config.shards));
        }
        let addr = socket.local_addr().map_err(BindError::Address)?;
        let sockets = sockets::share(socket, config.shards);
        let sockets = sockets.map_err(|source| BindError::Socket { addr, source })?;
        Self::start(addr, sockets, config, None)
    }

    /// Creates an endpoint on the sockets of another process, in the order of its shards, which it still reads. The
    /// endpoint has as many shards, and receives nothing until [`Self::begin`]. `config` has the generation after the
    /// predecessor's.
    pub fn take_over(
        sockets: Vec<UdpSocket>,
        config: Config,
        predecessor: Predecessor,
    ) -> Result<Self, BindError> {
        let first = sockets.first().ok_or(BindError::Shards(0))?;
        let addr = first.local_addr().map_err(BindError::Address)?;
        let config = Config { shards: sockets.len(), ..config };
        Self::start(addr, sockets, config, Some(predecessor))
    }

    fn start(
        local_addr: SocketAddr,
        sockets: Vec<UdpSocket>,
        config: Config,
        predecessor: Option<Predecessor>,
    ) -> Result<Self, BindError> {
        if IdleTimeout::try_from(config.idle_timeout).is_err() {
            return Err(BindError::IdleTimeout(config.idle_timeout));
        }
        if config.suites.is_empty() {
            return Err(BindError::NoSuite);
        }
        let certificate = Arc::new(ReplaceableCertificate(RwLock::new(config.certificate.clone())));
        let provider = tls::provider(&config.suites);
        let clients = Arc::new(ReplaceableRoots::new(Arc::clone(&provider), config.client_roots.as_ref())?);
        let server_tls =
            tls::server(Arc::clone(&provider), Arc::clone(&certificate), &clients, &config.alpn)?;
        let client_tls =
            tls::client(provider, &config.trust, config.client_certificate.as_ref(), &config.alpn)?;
        let initial = tls::initial_suite().ok_or(BindError::NoSuite)?;

        // quinn derives Initial keys and seals Retry packets with this TLS configuration. Each accepted connection gets
        // a TLS configuration of its own later.
        let crypto = QuicServerConfig::with_initial(Arc::new(server_tls.clone()), initial)
            .map_err(|_| BindError::NoSuite)?;
        let mut server = quinn::ServerConfig::with_crypto(Arc::new(crypto));

        let failed = |source| BindError::Socket { addr: local_addr, source };
        let mut endpoint = EndpointConfig::default();
        endpoint.supported_versions(vec![1]);
        let ids_of = |secret: &LastingSecret, generation| LastingSecret::ids(secret, local_addr, generation);
        let predecessor = predecessor.map(|it| (ids_of(&it.secret, it.generation), it));
        if let Some(lasting) = &config.lasting {
            let earlier = predecessor.as_ref().map(|(ids, it)| (ids.clone(), &it.secret));
            lasting.apply(local_addr, &mut endpoint, earlier);
            lasting.apply_tokens(local_addr, &mut server);
        }
        let secret = config.lasting.clone().or_else(LastingSecret::random).ok_or(BindError::NoRandomness)?;
        let ids = ids_of(&secret, config.generation).after(predecessor.as_ref().map(|(ids, _)| ids));
        let accepting = config.certificate.is_some().then(|| server.clone());
        let most = if accepting.is_some() { MAX_FROM_CLIENTS } else { MAX_FROM_SERVERS };
        endpoint.max_udp_payload_size(most).unwrap_or_else(|_| unreachable!("above 1200"));
        let shards = sockets.len();
        let (earlier, channels) = predecessor.map(|(ids, it)| (ids, it.channels)).unzip();
        let mut channels = channels.into_iter().flatten();
        // The shards share the keys of resets and of tokens, so that each accepts what another one has issued.
        let start = |(index, socket)| {
            let at = ShardIndex { index, shards };
            let predecessor = earlier.clone().zip(channels.next());
            Shard::start(socket, at, ids.clone(), predecessor, &config, endpoint.clone(), accepting.clone())
        };
        let shards = sockets.into_iter().enumerate().map(start).collect::<Result<_, _>>().map_err(failed)?;
        Ok(Self {
            inner: Arc::new(EndpointInner {
                shards,
                turn: AtomicUsize::new(0),
                local_addr,
                config,
                server,
                server_tls,
                client_tls,
                initial,
                certificate,
                clients,
            }),
        })
    }

    /// Returns a descriptor of each shard's socket, for a process that takes them over.
    pub fn sockets(&self) -> Vec<BorrowedFd<'_>> {
        self.inner.shards.iter().map(Shard::socket).collect()
    }

    /// Begins to receive, after the predecessor has stopped.
    pub fn begin(&self) {
        self.inner.shards.iter().for_each(|shard| shard.takeover.begin());
    }

    /// Stops receiving from the sockets, which a successor reads from now on. Packets of this endpoint's connections
    /// come by `channels`, an end of a [`takeover::channel`](crate::takeover::channel) for each shard. When the other
    /// end is closed, the endpoint receives from the socket again. Has to be called within a tokio runtime.
    ///
    /// # Errors
    /// Fails if a channel cannot be read.
    pub fn leave(&self, channels: Vec<OwnedFd>) -> io::Result<()> {
        let mut both = self.inner.shards.iter().zip(channels);
        both.try_for_each(|(shard, channel)| shard.takeover.leave(channel))
    }

    /// Returns counts of the packets that the data planes of all the endpoint's connections have sent.
    pub fn sent(&self) -> SendReport {
        self.inner.shards.iter().fold(SendReport::default(), |mut sum, shard| {
            sum += shard.sender.totals();
            sum
        })
    }

    /// Returns the counts of each shard.
    pub fn shards(&self) -> Vec<ShardReport> {
        self.inner.shards.iter().map(Shard::report).collect()
    }

    /// Returns the address that the socket is bound to. If it was bound to port 0, the kernel has chosen a port.
    pub fn local_addr(&self) -> SocketAddr {
        self.inner.local_addr
    }

    /// Waits for the next connection attempt. Returns `None` once the endpoint is closed.
    pub async fn accept(&self) -> Option<Incoming> {
        // Each call begins with another shard, so that a flood of attempts at one shard does not keep others waiting.
        let shards = self.inner.in_turn();
        let mut accepting: Vec<_> =
            shards.map(|(index, shard)| (index, Box::pin(shard.quic.accept()))).collect();
        let next = std::future::poll_fn(|context| {
            let mut at = 0;
            while let Some((index, accept)) = accepting.get_mut(at) {
                match accept.as_mut().poll(context) {
                    Poll::Ready(Some(incoming)) => return Poll::Ready(Some((incoming, *index))),
                    Poll::Ready(None) => drop(accepting.swap_remove(at)),
                    Poll::Pending => at += 1,
                }
            }
            if accepting.is_empty() { Poll::Ready(None) } else { Poll::Pending }
        });
        let (incoming, shard) = next.await?;
        Some(Incoming { incoming, shard, endpoint: Arc::clone(&self.inner) })
    }

    /// Connects to a server.
    pub async fn connect(
        &self,
        addr: SocketAddr,
        server_name: &str,
    ) -> Result<Arc<Connection>, ConnectError> {
        self.inner.connect(addr, server_name, self.inner.client_tls.clone()).await
    }

    /// Connects like [`Self::connect`], with this application protocol (ALPN) instead of the configured ones.
    ///
    /// # Errors
    ///
    /// Fails for the same reasons as [`Self::connect`].
    pub async fn connect_as(
        &self,
        addr: SocketAddr,
        server_name: &str,
        protocol: &[u8],
    ) -> Result<Arc<Connection>, ConnectError> {
        let mut tls = self.inner.client_tls.clone();
        tls.alpn_protocols = vec![protocol.to_vec()];
        self.inner.connect(addr, server_name, tls).await
    }

    /// Sets the certificate that the server presents to new connections.
    pub fn set_certificate(&self, certificate: Arc<CertifiedKey>) {
        *self.inner.certificate.0.write() = Some(certificate);
    }

    /// Sets the CA certificates that certificates of new clients have to chain to. Without CA certificates, clients are
    /// not asked for a certificate.
    ///
    /// # Errors
    /// Fails if the new CA certificates cannot be used. In that case the earlier ones stay in use.
    pub fn set_client_roots(&self, roots: Option<&Arc<RootCertStore>>) -> Result<(), rustls::Error> {
        self.inner.clients.set(roots)
    }

    /// Closes all connections of the endpoint and accepts no new ones.
    pub fn close(&self, code: VarInt, reason: &[u8]) {
        self.inner.shards.iter().for_each(|shard| shard.quic.close(code, reason));
    }

    /// Waits until all connections are closed on both sides, or have timed out.
    pub async fn wait_idle(&self) {
        for shard in &self.inner.shards {
            shard.quic.wait_idle().await;
        }
    }
}

/// A connection attempt of a peer.
pub struct Incoming {
    incoming: quinn::Incoming,
    shard: usize,
    endpoint: Arc<EndpointInner>,
}

impl Incoming {
    /// Returns the source address of the peer's first packet. It may be forged unless [`Self::is_proved`] returns true.
    pub fn remote_addr(&self) -> SocketAddr {
        self.incoming.remote_address()
    }

    /// Returns whether the peer has proved that it receives packets at its address (RFC 9000, section 8.1).
    pub fn is_proved(&self) -> bool {
        self.incoming.remote_address_validated()
    }

    /// Sends a Retry packet, so that the peer proves its address by returning a token. This endpoint keeps no state
    /// until the token arrives.
    pub fn retry(self) {
        let _ = self.incoming.retry(); // `retry` fails if the peer has sent a token already; it then drops the attempt
    }

    /// Accepts the connection attempt and completes the handshake.
    pub async fn accept(self) -> Result<Arc<Connection>, AcceptError> {
        self.endpoint.accept(self.incoming, self.shard).await
    }

    /// Refuses the connection attempt.
    pub fn refuse(self) {
        self.incoming.refuse();
    }
}

impl EndpointInner {
    /// Returns the shards with their indices, beginning with the one after that of the previous call.
    fn in_turn(&self) -> impl Iterator<Item = (usize, &Shard)> {
        let first = self.turn.fetch_add(1, Ordering::Relaxed) % self.shards.len();
        let (last, front) = self.shards.split_at(first);
        (first..self.shards.len()).chain(0..first).zip(front.iter().chain(last))
    }

    async fn accept(&self, incoming: quinn::Incoming, shard: usize) -> Result<Arc<Connection>, AcceptError> {
        let Some((shared, secrets)) = self.shared(shard, incoming.remote_address()) else {
            incoming.refuse();
            return Err(AcceptError::NoRoom);
        };
        let mut tls = self.server_tls.clone();
        tls.key_log = secrets;
        let inner = QuicServerConfig::with_initial(Arc::new(tls), self.initial)
            .unwrap_or_else(|_| unreachable!("bind has used the same suite"));
        let mut server = self.server.clone();
        server.crypto = Arc::new(ServerCrypto { inner: Arc::new(inner), shared: Arc::clone(&shared) });
        server.transport = self.transport(&shared, false);
        let quic = incoming.accept_with(Arc::new(server))?.await?;
        Ok(self.register(quic, shared, shard))
    }

    async fn connect(
        &self,
        addr: SocketAddr,
        server_name: &str,
        mut tls: rustls::ClientConfig,
    ) -> Result<Arc<Connection>, ConnectError> {
        let shard = self.turn.fetch_add(1, Ordering::Relaxed) % self.shards.len();
        let (shared, secrets) = self.shared(shard, addr).ok_or(ConnectError::NoRoom)?;
        tls.key_log = secrets;
        let inner = QuicClientConfig::with_initial(Arc::new(tls), self.initial)
            .unwrap_or_else(|_| unreachable!("bind has used the same suite"));
        let crypto = ClientCrypto { inner: Arc::new(inner), shared: Arc::clone(&shared) };
        let mut client = quinn::ClientConfig::new(Arc::new(crypto));
        client.transport_config(self.transport(&shared, true));
        let quic = self.shards[shard].quic.connect_with(client, addr, server_name)?.await?;
        Ok(self.register(quic, shared, shard))
    }

    /// Creates the shared state of a connection. Returns `None` if the budget of receive windows is used up.
    fn shared(
        &self,
        shard: usize,
        remote: SocketAddr,
    ) -> Option<(Arc<SharedConnection>, Arc<HandshakeSecrets>)> {
        let Shard { alarm, sender, offloads, .. } = &self.shards[shard];
        let config = &self.config;
        let window = ConnectionWindow::open(&config.windows, config.receive_window, Instant::now())?;
        let secrets = Arc::new(HandshakeSecrets::new(self.config.key_log.clone()));
        let shared = SharedConnection::new(
            PeerAddress::new(remote),
            window,
            config,
            Arc::clone(&secrets),
            Arc::clone(alarm),
            Arc::clone(sender),
            offloads.as_ref().map(|_| self.local_addr),
        );
        let shared = Arc::new(shared);
        if let Some(enter) = offloads {
            let owner: Weak<SharedConnection> = Arc::downgrade(&shared);
            shared.set_claim(enter(owner));
        }
        Some((shared, secrets))
    }

    /// Returns quinn's settings for a connection, on which this endpoint is the client or the server. A server lets its
    /// client open few streams at first, and a client its server all.
    fn transport(&self, shared: &Arc<SharedConnection>, is_client: bool) -> Arc<TransportConfig> {
        let config = &self.config;
        let [bidi, uni] = if is_client { [u32::MAX; 2] } else { allowance::FIRST };
        let mut transport = TransportConfig::default();
        transport
            .max_idle_timeout(IdleTimeout::try_from(config.idle_timeout).ok())
            .keep_alive_interval(config.keep_alive_interval(is_client))
            .max_concurrent_bidi_streams(config.max_bidi_streams.min(bidi).into())
            .max_concurrent_uni_streams(config.max_uni_streams.min(uni).into())
            .stream_receive_window(config.stream_receive_window.into())
            .receive_window(shared.window.bytes().into())
            .datagram_receive_buffer_size(Some(config.datagram_receive_buffer))
            .enable_segmentation_offload(config.gso)
            .congestion_controller_factory(Arc::new(congestion::QuinnWindow(Arc::clone(shared))));
        Arc::new(transport)
    }

    fn register(
        &self,
        quic: quinn::Connection,
        shared: Arc<SharedConnection>,
        shard: usize,
    ) -> Arc<Connection> {
        let registry = &self.shards[shard].registry;
        if self.local_addr.ip().is_unspecified() {
            shared.set_local(quic.local_ip());
        }
        let listed = registry.place(shared.turn.number());
        let binding = OnceLock::new();
        let foreign = Foreign::default();
        let connection = Connection {
            quic,
            shared,
            binding,
            foreign,
            probed: tokio::sync::Mutex::default(),
            most_streams: [self.config.max_bidi_streams, self.config.max_uni_streams],
            streams_used: Default::default(),
            _listed: listed,
            shard,
        };
        let connection = Arc::new(connection);
        driver::add(registry, &connection);
        connection
    }
}

/// Creates a socket for an endpoint. A socket with an IPv6 address is for IPv6 only.
pub fn bind_socket(addr: SocketAddr) -> Result<UdpSocket, BindError> {
    sockets::bind(addr).map_err(|source| BindError::Socket { addr, source })
}
