//! QUIC carriers: connections between the brokers of two hosts. Each broker authenticates the other one by the key in
//! its settings. The connections stay open while unused.

use std::{
    net::{Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket},
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail};
use millrace_congestion::BbrFactory;
use millrace_graft::settings::{AgreementPeer, CarrierKind, CarrySettings, QuicCongestion};
use millrace_graft_proto::carry::{
    WINDOW_MAX,
    frame::{ALPN, CarryFrame},
};
use millrace_graft_tls::{Tls, callers::Callers};
use quinn::{
    ClientConfig, Connection, Endpoint, EndpointConfig, Incoming, ServerConfig, TokioRuntime,
    TransportConfig, VarInt,
    crypto::rustls::{QuicClientConfig, QuicServerConfig},
};
use rustls::pki_types::CertificateDer;
use tokio::time::timeout;
use tracing::debug;

use super::{
    carrier::{CarrierLink, CarrierPeer, CarrierRoute, PeerCarrier},
    carriers::place,
    context::CarryContext,
    host, probe, refused,
    stream::{CarrierStream, PATIENCE},
    warm,
};

/// Interval of QUIC keep-alive packets on a carrier.
const KEEP_ALIVE: Duration = Duration::from_secs(2);
/// Silence after which a carrier is closed.
const IDLE: Duration = Duration::from_secs(6);
/// Pause before the next attempt to connect, which doubles after each failure up to `PAUSE_MOST`.
const PAUSE_LEAST: Duration = Duration::from_millis(200);
const PAUSE_MOST: Duration = Duration::from_secs(10);
/// Interval at which this host checks whether the QUIC connection that it has made to a peer still exists.
const LOOK: Duration = Duration::from_millis(500);
/// Time limit for a handshake, during which the connecting host has not proved its key.
const HANDSHAKE: Duration = Duration::from_secs(5);
/// Buffer size of the UDP socket in each direction, in bytes. It holds the packets that arrive while this process is
/// not scheduled.
const SOCKET_BYTES: usize = 4 << 20;
/// Number of streams that a peer may open beyond the limit of tunnelled connections: for greetings, and for connections
/// that are refused because the limit is reached.
const OTHER_STREAMS: u32 = 64;
/// Limit of sent bytes that QUIC keeps until they are acknowledged, per carrier.
const SEND_WINDOW: u64 = 64 << 20;

/// Returns a carrier's transport settings, with the limits for what the peer may send.
fn transport(carry: &CarrySettings) -> Arc<TransportConfig> {
    let mut transport = TransportConfig::default();
    let streams = u32::try_from(carry.connections).unwrap_or(u32::MAX).saturating_add(OTHER_STREAMS);
    // A frame that acknowledges tunnelled bytes may wait behind a whole window of data on its stream, so the stream's
    // flow-control limit is larger than that window.
    let stream_window = WINDOW_MAX + (1 << 20);
    let window = VarInt::try_from(carry.memory.max(stream_window)).unwrap_or(VarInt::MAX);
    transport
        .max_concurrent_bidi_streams(streams.into())
        // Carriers use bidirectional streams only.
        .max_concurrent_uni_streams(0_u32.into())
        .datagram_receive_buffer_size(None)
        .stream_receive_window(VarInt::try_from(stream_window).unwrap_or(VarInt::MAX))
        .receive_window(window)
        .send_window(SEND_WINDOW)
        .keep_alive_interval(Some(KEEP_ALIVE))
        .max_idle_timeout(IDLE.try_into().ok())
        .congestion_controller_factory(match carry.quic {
            // BBR is used, since it does not take random losses for congestion.
            QuicCongestion::Bbr => Arc::new(BbrFactory::over_lossy_paths()),
            QuicCongestion::Cubic => Arc::new(quinn::congestion::CubicConfig::default()),
        });
    Arc::new(transport)
}

pub fn server_config(tls: &Tls, carry: &CarrySettings) -> anyhow::Result<ServerConfig> {
    let mut config = tls.server()?;
    config.alpn_protocols = vec![ALPN.to_vec()];
    let mut config = ServerConfig::with_crypto(Arc::new(QuicServerConfig::try_from(config)?));
    config.transport_config(transport(carry));
    Ok(config)
}

pub fn client_config(tls: &Tls, peer: &AgreementPeer, carry: &CarrySettings) -> anyhow::Result<ClientConfig> {
    let mut config = tls.client(peer)?;
    config.alpn_protocols = vec![ALPN.to_vec()];
    let mut config = ClientConfig::new(Arc::new(QuicClientConfig::try_from(config)?));
    config.transport_config(transport(carry));
    Ok(config)
}

pub fn endpoint(at: SocketAddr, server: Option<ServerConfig>) -> anyhow::Result<Endpoint> {
    let socket = UdpSocket::bind(at).with_context(|| format!("cannot listen for carriers on {at}"))?;
    // A process with the privilege CAP_NET_ADMIN may exceed the system's limit for socket buffers.
    let _ = nix::sys::socket::setsockopt(&socket, nix::sys::socket::sockopt::RcvBufForce, &SOCKET_BYTES);
    let _ = nix::sys::socket::setsockopt(&socket, nix::sys::socket::sockopt::SndBufForce, &SOCKET_BYTES);
    Ok(Endpoint::new(EndpointConfig::default(), server, socket, Arc::new(TokioRuntime))?)
}

/// Connects to a peer whenever it has no carrier by this route, for as long as the settings name the peer.
pub async fn call(
    context: Arc<CarryContext>,
    peer: AgreementPeer,
    way: CarrierRoute,
    at: SocketAddr,
    config: ClientConfig,
) {
    let mut pause = PAUSE_LEAST;
    loop {
        if context.carriers.has_live(&peer.name, &way) {
            pause = PAUSE_LEAST;
            tokio::time::sleep(LOOK).await;
            continue;
        }
        if let Err(error) = call_once(&context, &peer, &way, at, config.clone()).await {
            context.carriers.lacks(&peer.name, &way, format!("{error:#}"));
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(PAUSE_MOST);
        }
    }
}

async fn call_once(
    context: &Arc<CarryContext>,
    peer: &AgreementPeer,
    way: &CarrierRoute,
    at: SocketAddr,
    config: ClientConfig,
) -> anyhow::Result<()> {
    let any = match at {
        SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    let endpoint = endpoint(SocketAddr::new(any, 0), None)?;
    // The peer is identified by its key in the settings, so the name in the certificate does not matter.
    let connecting = endpoint.connect_with(config, at, "millrace-graft")?;
    let connection = match timeout(PATIENCE, connecting).await {
        Ok(Err(error)) if refused::is_about_the_version(&error) => {
            bail!("{at} speaks another version of carriers than this host, UDP")
        }
        Ok(connection) => {
            connection.with_context(|| format!("no broker of this key answers on {at}, UDP"))?
        }
        Err(_) => bail!("no answer from {at}, UDP"),
    };
    let stream = connection.open_bi().await?;
    let run = match CarrierStream::quic(&connection, stream.0, stream.1)
        .ask(&CarryFrame::Hello { run: context.run })
        .await
    {
        Ok(CarryFrame::Hello { run }) => run,
        Ok(_) => bail!("{at} does not answer as a broker"),
        Err(error) => match connection.close_reason() {
            Some(reason) => bail!("{at} refuses this host: {reason}"),
            None => bail!("{at} has connected, but its broker does not answer: {error}"),
        },
    };
    begin(context, peer.name.clone(), connection, run, way.clone());
    Ok(())
}

/// Serves the streams that the peer opens, until the carrier is closed.
async fn streams(context: Arc<CarryContext>, carrier: Arc<PeerCarrier>, connection: Connection) {
    // Each stream gets a task. The number of tasks is bounded because the transport settings limit the number of open
    // streams.
    while let Ok(stream) = connection.accept_bi().await {
        tokio::spawn(host::serve(
            context.clone(),
            carrier.peer.clone(),
            CarrierStream::quic(&connection, stream.0, stream.1),
        ));
    }
    let why = connection.close_reason().map_or(String::new(), |reason| reason.to_string());
    context.carriers.remove(&carrier, why);
}

/// Accepts connections of peers, until the QUIC endpoint is closed.
pub async fn listen(context: Arc<CarryContext>, endpoint: Endpoint, tls: Arc<parking_lot::RwLock<Tls>>) {
    let callers = Callers::default();
    while let Some(incoming) = endpoint.accept().await {
        // A host whose address is not validated gets a Retry packet, and no state is kept for it.
        if !incoming.remote_address_validated() {
            let _ = incoming.retry();
            continue;
        }
        let remote = incoming.remote_address().ip().to_canonical();
        let Some(caller) = callers.enter(remote, context.carriers.are_at(remote), Instant::now()) else {
            context.table.count(refused::CROWDED);
            debug!(%remote, "refused a QUIC connection for a carrier: too many handshakes are in progress");
            incoming.ignore();
            continue;
        };
        let context = context.clone();
        let tls = tls.clone();
        tokio::spawn(async move {
            // If the number of handshakes from unknown addresses is at its limit, a stalled handshake is aborted to
            // make room for another one.
            let met = tokio::select! {
                met = meet(incoming, &tls) => met,
                () = caller.made_way() => Err(refused::CallerDisplaced.into()),
            };
            if let Ok(met) = &met {
                caller.has_shown(&met.peer);
            }
            let answered = match met {
                Ok(met) => answer(&context, met).await,
                Err(error) => Err(error),
            };
            if let Err(error) = answered {
                context.table.count(refused::name(&error));
                debug!(%remote, "refused a QUIC connection for a carrier: {error:#}");
            }
        });
    }
}

/// An accepted connection of a known peer, after its greeting.
struct DialledPeer {
    connection: Connection,
    peer: String,
    /// Random number that the peer's tunnel broker chose when it started.
    run: u64,
    stream: CarrierStream,
}

async fn meet(incoming: Incoming, tls: &parking_lot::RwLock<Tls>) -> anyhow::Result<DialledPeer> {
    let connection = timeout(HANDSHAKE, incoming.accept()?).await.context("no handshake")??;
    let shown = connection.peer_identity().context("no certificate")?;
    let shown = shown.downcast::<Vec<CertificateDer<'static>>>().ok().context("no certificate")?;
    let peer = tls.read().name(&shown).context("the caller's key is not in the settings")?;
    let stream =
        timeout(PATIENCE, connection.accept_bi()).await.context("the caller sends no greeting")??;
    let mut stream = CarrierStream::quic(&connection, stream.0, stream.1);
    let CarryFrame::Hello { run } = stream.first().await? else {
        bail!("the caller does not greet as a broker")
    };
    Ok(DialledPeer { connection, peer, run, stream })
}

async fn answer(context: &Arc<CarryContext>, met: DialledPeer) -> anyhow::Result<()> {
    let DialledPeer { connection, peer, run, mut stream } = met;
    // The carrier has to be ready for tunnelled connections before the connecting peer receives this host's greeting.
    let from = connection.remote_address().ip().to_canonical();
    let to = connection.local_ip().map(|to| to.to_canonical());
    let way =
        CarrierRoute::calls(place(&context.carriers_wanted, CarrierKind::Quic), CarrierKind::Quic, from, to);
    begin(context, peer, connection, run, way);
    stream.sender.push(&CarryFrame::Hello { run: context.run });
    stream.sender.flush().await?;
    stream.finish();
    Ok(())
}

fn begin(context: &Arc<CarryContext>, peer: String, connection: Connection, run: u64, way: CarrierRoute) {
    let remote = connection.remote_address().ip().to_canonical();
    let local = connection.local_ip().map(|ip| ip.to_canonical());
    let peer = Arc::new(CarrierPeer { name: peer, run, remote, local });
    match context.carriers.add(PeerCarrier::new(peer, way, CarrierLink::Quic(connection.clone()))) {
        Some(carrier) => {
            tokio::spawn(streams(context.clone(), carrier.clone(), connection));
            tokio::spawn(probe::watch(context.carriers.clone(), carrier.clone()));
            let bytes = context.warm;
            tokio::spawn(async move { warm::open(&carrier, bytes).await });
        }
        None => connection.close(0_u32.into(), b"the settings have changed"),
    }
}
