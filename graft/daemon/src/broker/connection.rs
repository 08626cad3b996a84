//! Connections between the daemons of two hosts: QUIC on the first port of a socket pool. Each host authenticates with
//! the key that the other host's settings contain. Messages are QUIC datagrams, and session keys are derived with the
//! TLS exporter.
//!
//! The host with the lower address makes the connection. It connects again when the connection reaches the maximum age
//! of keys, or when nothing is received on it. The old connection is used until the new one is established. Packets
//! from any address and port but the peer's are ignored, and the peer has to validate its address first. At most one
//! handshake with each peer is therefore in progress.

use std::{
    net::{SocketAddr, UdpSocket},
    sync::{Arc, mpsc::SyncSender},
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail};
use millrace_graft::packet::{PeerSetting, Settings, choose::PeerPathFigures, keys::Exported};
use millrace_graft_tls::Tls;
use parking_lot::Mutex;
use quinn::{
    ClientConfig, Connection, ConnectionError, Endpoint, EndpointConfig, Incoming, ServerConfig,
    TokioRuntime, TransportConfig, VarInt,
    crypto::rustls::{QuicClientConfig, QuicServerConfig},
};
use tokio::{
    runtime::{Builder, Runtime},
    time::{interval, sleep, sleep_until, timeout},
};
use tracing::{info, warn};

use super::{
    client_session::SILENCE,
    peer_link::PeerFigures,
    peer_message::{MESSAGE_MAX, PING_EVERY, PeerEvent, PeerMessage, PeerPings, send},
};

const ALPN: &[u8] = b"millrace-sessions/1";
/// Label with which the keys of sessions are derived from the TLS connection (exporters, RFC 8446, section 7.5).
const LABEL: &[u8] = b"EXPORTER-millrace-sessions";
/// Time limit for a QUIC handshake.
const HANDSHAKE: Duration = Duration::from_secs(5);
/// Pause before the connecting daemon tries to connect again after a failure.
const AGAIN: Duration = Duration::from_millis(500);
/// Silence after which the connecting daemon replaces the connection before its idle time-out, since the other daemon
/// may have been restarted. Three round trips are added to this time. The other daemon answers pings, which are sent
/// four times a second.
const QUIET: Duration = Duration::from_millis(1500);
/// Round trip that QUIC assumes for an unknown path, and from which it computes the first retransmission time-out.
const ROUND_TRIP: Duration = Duration::from_millis(100);
/// QUIC error code for closing a connection that was replaced by a newer one.
const REPLACED: VarInt = VarInt::from_u32(1);
/// Size of the QUIC datagram buffer in each direction, in bytes.
const DATAGRAM_BYTES: usize = 64 << 10;
/// Limit of incoming handshakes that wait to be accepted.
const WAITING: usize = 16;

/// Connections with the daemons of all peers of the settings, which end when this value is dropped.
pub struct PeerLinks {
    runtime: Option<Runtime>,
    pub daemons: Vec<PeerDaemon>,
}

/// The connection with the daemon of one peer.
pub struct PeerDaemon {
    link: Arc<PeerLink>,
}

impl PeerDaemon {
    /// Sends a message, which may be lost. The sender of a message that needs an answer repeats it.
    pub fn say(&self, say: &PeerMessage) {
        if let Some(connection) = self.link.connection() {
            send(&connection, say);
        }
    }

    /// Returns the name of the peer.
    pub fn name(&self) -> &str {
        &self.link.name
    }

    /// Returns what is measured of the connection.
    pub fn figures(&self) -> PeerFigures {
        let trouble = self.trouble();
        let pings = self.link.path.lock();
        let PeerPathFigures { round_trip, loss } = pings.path(Instant::now());
        let silence = pings.heard.elapsed();
        PeerFigures { round_trip, loss, round_trip_now: pings.median(), silence, trouble }
    }

    /// Closes the connection. Another one is made, from which both ends derive new keys.
    pub fn close(&self) {
        if let Some(connection) = self.link.connection.lock().take() {
            connection.close(0_u32.into(), b"the sessions of this daemon begin anew");
        }
    }

    /// Returns why there is no connection, or `None` if there is one.
    pub fn trouble(&self) -> Option<String> {
        self.link.trouble.lock().clone()
    }
}

/// State of the connection with one peer's daemon, which its tasks share. A new connection replaces the old one.
struct PeerLink {
    peer: usize,
    name: String,
    heard: SyncSender<(usize, PeerEvent)>,
    connection: Mutex<Option<Connection>>,
    path: Mutex<PeerPings>,
    /// Reason why there is no connection to the peer's daemon at present.
    trouble: Mutex<Option<String>>,
}

impl PeerLinks {
    /// Connects to the daemons of all peers. The peers' messages are sent to the channel `heard`, each with the peer's
    /// number.
    ///
    /// # Errors
    /// A port is in use, its address is not this host's, or the key cannot be read.
    pub fn start(settings: &Settings, heard: &SyncSender<(usize, PeerEvent)>) -> anyhow::Result<Self> {
        let host_key = settings.host_key.as_ref().context("peers need [agreement]")?;
        let peers = settings.peers.iter().map(|peer| (peer.name.as_str(), &peer.trust));
        let shown = (host_key.key.as_path(), host_key.certificate.as_deref());
        let tls = Tls::from_settings(shown.0, shown.1, host_key.authority.as_deref(), peers)?;
        let runtime =
            Builder::new_multi_thread().worker_threads(1).thread_name("peers").enable_all().build()?;
        let mut links = Self { runtime: Some(runtime), daemons: Vec::new() };
        for (at, peer) in settings.peers.iter().enumerate() {
            let daemon = links.begin(at, peer, &tls.restrict_to(&peer.name), host_key.renew, heard)?;
            links.daemons.push(daemon);
        }
        Ok(links)
    }

    fn begin(
        &self,
        at: usize,
        peer: &PeerSetting,
        tls: &Tls,
        renew: Duration,
        heard: &SyncSender<(usize, PeerEvent)>,
    ) -> anyhow::Result<PeerDaemon> {
        let runtime = self.runtime.as_ref().context("a runtime")?;
        let _inside = runtime.enter();
        let local = peer.daemons.local;
        let remote = peer.daemons.remote;
        // Exactly one of the two daemons connects, so that there is only one connection between them.
        let calls = local.ip() < remote.ip();
        let server = (!calls).then(|| server(tls)).transpose()?;
        let socket = UdpSocket::bind(local);
        let socket =
            socket.with_context(|| format!("peer {}: cannot bind a socket to {local}", peer.name))?;
        let endpoint = Endpoint::new(EndpointConfig::default(), server, socket, Arc::new(TokioRuntime))?;
        let trouble = match calls {
            true => format!("its daemon on {remote}/udp has not answered yet"),
            false => format!("its daemon has not called {local}/udp of this host yet"),
        };
        let link = Arc::new(PeerLink {
            peer: at,
            name: peer.name.clone(),
            heard: heard.clone(),
            connection: Mutex::default(),
            path: Mutex::default(),
            trouble: Mutex::new(Some(trouble)),
        });
        match calls {
            true => runtime.spawn(call(link.clone(), endpoint, client(tls)?, remote, renew)),
            false => runtime.spawn(answer(link.clone(), endpoint, remote)),
        };
        runtime.spawn(ping(link.clone()));
        Ok(PeerDaemon { link })
    }
}

impl Drop for PeerLinks {
    fn drop(&mut self) {
        // The tasks have nothing to complete when the daemon ends. They are aborted without waiting for them, because a
        // drop must not block.
        self.runtime.take().into_iter().for_each(Runtime::shutdown_background);
    }
}

fn transport() -> Arc<TransportConfig> {
    let mut transport = TransportConfig::default();
    transport
        // Messages are datagrams only, so the peer may open no streams.
        .max_concurrent_bidi_streams(0_u32.into())
        .max_concurrent_uni_streams(0_u32.into())
        .datagram_receive_buffer_size(Some(DATAGRAM_BYTES))
        .datagram_send_buffer_size(DATAGRAM_BYTES)
        .initial_rtt(ROUND_TRIP)
        // A message has at most 1024 bytes, which fit every QUIC path, so the path MTU does not matter.
        .mtu_discovery_config(None)
        .max_idle_timeout(SILENCE.try_into().ok());
    Arc::new(transport)
}

fn server(tls: &Tls) -> anyhow::Result<ServerConfig> {
    let mut config = tls.server()?;
    config.alpn_protocols = vec![ALPN.to_vec()];
    let mut config = ServerConfig::with_crypto(Arc::new(QuicServerConfig::try_from(config)?));
    config.transport_config(transport()).max_incoming(WAITING).migration(false);
    Ok(config)
}

fn client(tls: &Tls) -> anyhow::Result<ClientConfig> {
    let mut config = tls.caller()?;
    config.alpn_protocols = vec![ALPN.to_vec()];
    let mut config = ClientConfig::new(Arc::new(QuicClientConfig::try_from(config)?));
    config.transport_config(transport());
    Ok(config)
}

async fn call(
    link: Arc<PeerLink>,
    endpoint: Endpoint,
    config: ClientConfig,
    remote: SocketAddr,
    renew: Duration,
) {
    loop {
        match reach(&endpoint, config.clone(), remote).await {
            Ok(connection) => {
                link.take(&connection);
                link.wait_until_old(&connection, renew).await;
            }
            Err(error) => link.lacks(format!("{error:#}")),
        }
        sleep(AGAIN).await;
    }
}

async fn reach(endpoint: &Endpoint, config: ClientConfig, remote: SocketAddr) -> anyhow::Result<Connection> {
    let refused =
        || format!("its daemon on {remote}/udp refuses this host, or has another key than the settings say");
    let reached = async {
        // The peer is identified by its key in the settings, so the name in the certificate does not matter.
        let connection =
            endpoint.connect_with(config, remote, "millrace-graft")?.await.with_context(refused)?;
        // The listening daemon sends its first message only to a peer whose key it knows.
        connection.read_datagram().await.with_context(refused)?;
        anyhow::Ok(connection)
    };
    let nothing = || {
        format!(
            "no answer from {remote}/udp: check that its daemon runs, and that its firewall accepts the port"
        )
    };
    timeout(HANDSHAKE, reached).await.with_context(nothing)?
}

async fn answer(link: Arc<PeerLink>, endpoint: Endpoint, remote: SocketAddr) {
    // Initially no handshake is in progress, so `handshake` is a task that has nothing to do.
    let mut handshake = tokio::spawn(async {});
    while let Some(incoming) = endpoint.accept().await {
        let from = incoming.remote_address();
        if (from.ip(), from.port()) != (remote.ip(), remote.port()) {
            // Packets from any address but the peer's get no answer.
            incoming.ignore();
        } else if !incoming.remote_address_validated() {
            // The connecting daemon proves its address with the token of a Retry packet (RFC 9000, section 8.1.2).
            let _ = incoming.retry();
        } else {
            // A peer that connects again has given up its previous handshake.
            handshake.abort();
            let link = link.clone();
            handshake = tokio::spawn(async move {
                match meet(incoming).await {
                    Ok(connection) => {
                        link.take(&connection);
                        // The connecting daemon waits for this first message, which shows that it was accepted.
                        send(&connection, &PeerMessage::Hello);
                    }
                    Err(error) => link.lacks(format!("a call from {from}/udp was refused: {error:#}")),
                }
            });
        }
    }
}

async fn meet(incoming: Incoming) -> anyhow::Result<Connection> {
    match timeout(HANDSHAKE, incoming.accept()?).await {
        Ok(connection) => Ok(connection.context("check that it has the key that the settings name")?),
        Err(_) => bail!("the QUIC handshake timed out"),
    }
}

async fn ping(link: Arc<PeerLink>) {
    loop {
        let now = Instant::now();
        let due = match link.connection() {
            Some(connection) => link.path.lock().ping(now, |n| send(&connection, &PeerMessage::Ping { n })),
            None => now + PING_EVERY,
        };
        sleep_until(due.into()).await;
    }
}

impl PeerLink {
    fn connection(&self) -> Option<Connection> {
        self.connection.lock().clone().filter(|connection| connection.close_reason().is_none())
    }

    fn lacks(&self, why: String) {
        // The reason why there is no connection to the peer is logged only when it differs from the latest one.
        if self.connection().is_none() && self.trouble.lock().replace(why.clone()) != Some(why.clone()) {
            warn!(peer = self.name, "{why}");
        }
    }

    /// Replaces the previous connection with the given one.
    fn take(self: &Arc<Self>, connection: &Connection) {
        let mut exported = [0; 32];
        let is_exported = connection.export_keying_material(&mut exported, LABEL, &[]).is_ok();
        let mut current = self.connection.lock();
        // The session broker learns of the connection before it gets a message that arrived on it, since both go
        // through one channel.
        let connected = (self.peer, PeerEvent::Connected(Exported(exported)));
        // The connection is closed again if its keys cannot be exported, or if its event does not fit into the channel.
        if !is_exported || self.heard.try_send(connected).is_err() {
            return connection.close(0_u32.into(), b"this daemon cannot handle another connection now");
        }
        let before = current.replace(connection.clone());
        drop(current);
        match before {
            // The error code tells the other daemon that this close is no failure.
            Some(before) => {
                before.close(REPLACED, b"a newer connection between these daemons replaces this one")
            }
            None => info!(peer = self.name, "connected to the peer's daemon"),
        }
        *self.trouble.lock() = None;
        self.path.lock().heard = Instant::now();
        tokio::spawn(self.clone().receive_messages(connection.clone()));
    }

    async fn receive_messages(self: Arc<Self>, connection: Connection) {
        // A message that is too long or malformed is ignored.
        while let Ok(datagram) = connection.read_datagram().await {
            if datagram.len() <= MESSAGE_MAX
                && let Ok(say) = serde_json::from_slice(&datagram)
            {
                self.on_message(&connection, say);
            }
        }
        match connection.close_reason() {
            Some(ConnectionError::ApplicationClosed(close)) if close.error_code == REPLACED => {}
            Some(why) => self.lacks(format!("the connection with its daemon has ended: {why}")),
            None => {}
        }
    }

    /// Passes on a message of the peer. A message that finds the channel full is dropped, and the peer repeats it.
    fn on_message(&self, connection: &Connection, say: PeerMessage) {
        self.path.lock().heard = Instant::now();
        match say {
            PeerMessage::Ping { n } => drop(send(connection, &PeerMessage::Pong { n })),
            PeerMessage::Pong { n } => self.path.lock().pong(Instant::now(), n),
            PeerMessage::Hello => {}
            say => drop(self.heard.try_send((self.peer, PeerEvent::Said(say)))),
        }
    }

    /// Waits until the connection is too old, closed or silent, and has to be replaced.
    async fn wait_until_old(&self, connection: &Connection, renew: Duration) {
        let mut times = interval(PING_EVERY);
        let since = Instant::now();
        while since.elapsed() < renew && connection.close_reason().is_none() {
            times.tick().await;
            if self.path.lock().heard.elapsed() > QUIET + 3 * connection.rtt() {
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests;
