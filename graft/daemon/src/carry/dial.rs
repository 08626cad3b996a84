//! Carriers: QUIC between brokers, with the keys of the settings at both ends, kept warm.

use std::{
    net::{Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket},
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail};
use millrace_congestion::Bbr;
use millrace_graft::settings::{Carry, Kind, Peer, QuicCongestion};
use millrace_graft_proto::carry::{
    WINDOW_MAX,
    frame::{ALPN, Frame},
};
use quinn::{
    ClientConfig, Connection, Endpoint, EndpointConfig, Incoming, ServerConfig, TokioRuntime,
    TransportConfig, VarInt,
    crypto::rustls::{QuicClientConfig, QuicServerConfig},
};
use rustls::pki_types::CertificateDer;
use tokio::time::timeout;
use tracing::debug;

use super::{
    carrier::{Carrier, Far, Link, Way},
    carriers::place,
    context::Context,
    host, let_go, probe,
    stream::{PATIENCE, Stream},
    warm,
};
use crate::{callers::Callers, tls::Tls};

const KEEP_ALIVE: Duration = Duration::from_secs(2);
/// After so much silence a carrier is gone.
const IDLE: Duration = Duration::from_secs(6);
const PAUSE_LEAST: Duration = Duration::from_millis(200);
const PAUSE_MOST: Duration = Duration::from_secs(10);
/// How often it is looked whether a carrier that the peer has called for still is.
const LOOK: Duration = Duration::from_millis(500);
/// Time for a handshake in which no known key was shown yet.
const HANDSHAKE: Duration = Duration::from_secs(5);
/// Of both directions of the socket: what comes while this process does not run.
const SOCKET_BYTES: usize = 4 << 20;
/// For greetings, and for saying that there is no room.
const OTHER_STREAMS: u32 = 64;
const SEND_WINDOW: u64 = 64 << 20;

/// A carrier's way of sending, and what a peer may use of it.
fn transport(carry: &Carry) -> Arc<TransportConfig> {
    let mut transport = TransportConfig::default();
    let streams = u32::try_from(carry.connections).unwrap_or(u32::MAX).saturating_add(OTHER_STREAMS);
    // Confirmations come behind as much as a window.
    let stream_window = WINDOW_MAX + (1 << 20);
    let window = VarInt::try_from(carry.memory.max(stream_window)).unwrap_or(VarInt::MAX);
    transport
        .max_concurrent_bidi_streams(streams.into())
        .max_concurrent_uni_streams(0_u32.into())
        .datagram_receive_buffer_size(None)
        .stream_receive_window(VarInt::try_from(stream_window).unwrap_or(VarInt::MAX))
        .receive_window(window)
        .send_window(SEND_WINDOW)
        .keep_alive_interval(Some(KEEP_ALIVE))
        .max_idle_timeout(IDLE.try_into().ok())
        .congestion_controller_factory(match carry.quic {
            QuicCongestion::Bbr => Arc::new(Bbr::over_lossy_paths()),
            QuicCongestion::Cubic => Arc::new(quinn::congestion::CubicConfig::default()),
        });
    Arc::new(transport)
}

pub fn server_config(tls: &Tls, carry: &Carry) -> anyhow::Result<ServerConfig> {
    let mut config = tls.server()?;
    config.alpn_protocols = vec![ALPN.to_vec()];
    let mut config = ServerConfig::with_crypto(Arc::new(QuicServerConfig::try_from(config)?));
    config.transport_config(transport(carry));
    Ok(config)
}

pub fn client_config(tls: &Tls, peer: &Peer, carry: &Carry) -> anyhow::Result<ClientConfig> {
    let mut config = tls.client(peer)?;
    config.alpn_protocols = vec![ALPN.to_vec()];
    let mut config = ClientConfig::new(Arc::new(QuicClientConfig::try_from(config)?));
    config.transport_config(transport(carry));
    Ok(config)
}

pub fn endpoint(at: SocketAddr, server: Option<ServerConfig>) -> anyhow::Result<Endpoint> {
    let socket = UdpSocket::bind(at).with_context(|| format!("cannot listen for carriers on {at}"))?;
    // Beyond what the system allows everybody, where this process may.
    let _ = nix::sys::socket::setsockopt(&socket, nix::sys::socket::sockopt::RcvBufForce, &SOCKET_BYTES);
    let _ = nix::sys::socket::setsockopt(&socket, nix::sys::socket::sockopt::SndBufForce, &SOCKET_BYTES);
    Ok(Endpoint::new(EndpointConfig::default(), server, socket, Arc::new(TokioRuntime))?)
}

/// Calls a peer whenever there is no carrier to it by this way, for as long as the settings name it.
pub async fn call(context: Arc<Context>, peer: Peer, (way, at): (Way, SocketAddr), config: ClientConfig) {
    let mut pause = PAUSE_LEAST;
    loop {
        if context.carriers.has_live(&peer.name, &way) {
            pause = PAUSE_LEAST;
            tokio::time::sleep(LOOK).await;
            continue;
        }
        if let Err(error) = call_once(&context, &peer, (&way, at), config.clone()).await {
            context.carriers.lacks(&peer.name, &way, format!("{error:#}"));
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(PAUSE_MOST);
        }
    }
}

async fn call_once(
    context: &Arc<Context>,
    peer: &Peer,
    (way, at): (&Way, SocketAddr),
    config: ClientConfig,
) -> anyhow::Result<()> {
    let any = match at {
        SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    let endpoint = endpoint(SocketAddr::new(any, 0), None)?;
    // Whom the certificate is for is up to the settings.
    let connecting = endpoint.connect_with(config, at, "millrace-graft")?;
    let connection = match timeout(PATIENCE, connecting).await {
        Ok(Err(error)) if let_go::is_about_the_version(&error) => {
            bail!("{at} speaks another version of carriers than this host, UDP")
        }
        Ok(connection) => {
            connection.with_context(|| format!("no broker of this key answers on {at}, UDP"))?
        }
        Err(_) => bail!("nothing came back from {at}, UDP"),
    };
    let stream = connection.open_bi().await?;
    let run = match Stream::quic(&connection, stream).ask(&Frame::Hello { run: context.run }).await {
        Ok(Frame::Hello { run }) => run,
        Ok(_) => bail!("{at} does not speak as a broker"),
        Err(error) => match connection.close_reason() {
            Some(reason) => bail!("{at} does not take this host: {reason}"),
            None => bail!("{at} has connected and does not carry: {error}"),
        },
    };
    begin(context, peer.name.clone(), connection, run, way.clone());
    Ok(())
}

/// Those that the peer opens, until the carrier is gone.
async fn streams(context: Arc<Context>, carrier: Arc<Carrier>, connection: Connection) {
    // They are as many as the transport lets the peer open.
    while let Ok(stream) = connection.accept_bi().await {
        tokio::spawn(host::serve(context.clone(), carrier.far.clone(), Stream::quic(&connection, stream)));
    }
    let why = connection.close_reason().map_or(String::new(), |reason| reason.to_string());
    context.carriers.remove(&carrier, why);
}

/// Peers that call, until the endpoint is closed.
pub async fn listen(context: Arc<Context>, endpoint: Endpoint, tls: Arc<parking_lot::RwLock<Tls>>) {
    let callers = Callers::default();
    while let Some(incoming) = endpoint.accept().await {
        // Whoever has not shown that it is where it says costs nothing but an answer.
        if !incoming.remote_address_validated() {
            let _ = incoming.retry();
            continue;
        }
        let remote = incoming.remote_address().ip().to_canonical();
        let Some(caller) = callers.enter(remote, context.carriers.are_at(remote), Instant::now()) else {
            context.table.count(let_go::CROWDED);
            debug!(%remote, "a caller was let go: too many handshakes are under way");
            incoming.ignore();
            continue;
        };
        let (context, tls) = (context.clone(), tls.clone());
        tokio::spawn(async move {
            let met = tokio::select! {
                met = meet(incoming, &tls) => met,
                () = caller.made_way() => Err(let_go::Crowded.into()),
            };
            if let Ok(met) = &met {
                caller.has_shown(&met.peer);
            }
            let answered = match met {
                Ok(met) => answer(&context, met).await,
                Err(error) => Err(error),
            };
            if let Err(error) = answered {
                context.table.count(let_go::name(&error));
                debug!(%remote, "a caller was let go: {error:#}");
            }
        });
    }
}

/// A connection of a known peer.
struct Met {
    connection: Connection,
    peer: String,
    /// Of the peer's broker.
    run: u64,
    stream: Stream,
}

async fn meet(incoming: Incoming, tls: &parking_lot::RwLock<Tls>) -> anyhow::Result<Met> {
    let connection = timeout(HANDSHAKE, incoming.accept()?).await.context("no handshake")??;
    let shown = connection.peer_identity().context("no certificate")?;
    let shown = shown.downcast::<Vec<CertificateDer<'static>>>().ok().context("no certificate")?;
    let peer = tls.read().name(&shown).context("no key that is known")?;
    let stream = timeout(PATIENCE, connection.accept_bi()).await.context("it says nothing")??;
    let mut stream = Stream::quic(&connection, stream);
    let Frame::Hello { run } = stream.first().await? else { bail!("it does not speak as a broker") };
    Ok(Met { connection, peer, run, stream })
}

async fn answer(context: &Arc<Context>, met: Met) -> anyhow::Result<()> {
    let Met { connection, peer, run, mut stream } = met;
    // It is ready for connections before the caller knows.
    let from = connection.remote_address().ip().to_canonical();
    let to = connection.local_ip().map(|to| to.to_canonical());
    let way = Way::calls(place(&context.carriers_wanted, Kind::Quic), Kind::Quic, from, to);
    begin(context, peer, connection, run, way);
    stream.sender.push(&Frame::Hello { run: context.run });
    stream.sender.flush().await?;
    stream.finish();
    Ok(())
}

fn begin(context: &Arc<Context>, peer: String, connection: Connection, run: u64, way: Way) {
    let remote = connection.remote_address().ip().to_canonical();
    let local = connection.local_ip().map(|ip| ip.to_canonical());
    let far = Arc::new(Far { peer, run, remote, local });
    match context.carriers.add(Carrier::new(far, way, Link::Quic(connection.clone()))) {
        Some(carrier) => {
            tokio::spawn(streams(context.clone(), carrier.clone(), connection));
            tokio::spawn(probe::watch(context.carriers.clone(), carrier.clone()));
            let bytes = context.warm;
            tokio::spawn(async move { warm::open(&carrier, bytes).await });
        }
        None => connection.close(0_u32.into(), b"the settings have changed"),
    }
}
