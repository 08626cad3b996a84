//! TCP, MPTCP and SCTP connections between two tunnel brokers, which pools consist of, and how both brokers set them
//! up. The handshake is mutual TLS 1.3 with the keys in the settings. Both ends exchange only a greeting before the
//! record layer of this crate uses the keys.

use std::{
    io,
    net::SocketAddr,
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail};
use bytes::Bytes;
use millrace_graft::settings::{self, CarrierKind};
use millrace_graft_proto::carry::frame::{ALPN, ALPN_ASKS, CarryFrame, Decoder};
use millrace_kernel::sctp;
use rustls::{
    AlertDescription, ClientConfig, ExtractedSecrets, ServerConfig,
    pki_types::{CertificateDer, ServerName},
};
use socket2::{Domain, Protocol, SockRef, Socket, TcpKeepalive, Type};
use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _},
    net::{TcpListener, TcpSocket, TcpStream},
    time::timeout,
};
use tokio_rustls::{TlsAcceptor, TlsConnector};

const MPTCP: i32 = 262;
const BACKLOG: i32 = 1024;
/// Silence after which keep-alive probes are sent. A connection whose probes are not answered is closed after the same
/// silence as a QUIC carrier.
const SILENT: Duration = Duration::from_secs(2);
const PROBES_APART: Duration = Duration::from_secs(1);
const PROBES: u32 = 4;
const UNHEARD: Duration = Duration::from_secs(6);
/// Time limit for a handshake, during which the connecting host has not proved its key.
const HANDSHAKE: Duration = Duration::from_secs(5);
const PATIENCE: Duration = Duration::from_secs(15);
/// TCP congestion control that is used unless the settings name another one.
const CONGESTION: &str = "bbr";
const HELLO_BYTES: usize = 9;

/// A connection between brokers that have authenticated each other.
pub struct AuthenticatedConnection {
    pub stream: TcpStream,
    pub secrets: ExtractedSecrets,
    /// Random number that the other broker chose when it started.
    pub run: u64,
    pub rtt: Duration,
    /// True if both brokers support the protocol version that has the frame `Ask`.
    pub asks: bool,
}

/// # Errors
/// The kernel does not support the wanted protocol, MPTCP or SCTP.
fn socket(kind: CarrierKind, at: SocketAddr) -> anyhow::Result<Socket> {
    let protocol = match kind {
        CarrierKind::Mptcp => Protocol::from(MPTCP),
        CarrierKind::Sctp => Protocol::from(sctp::PROTOCOL),
        CarrierKind::Quic | CarrierKind::Tcp => Protocol::TCP,
    };
    let socket = Socket::new(Domain::for_address(at), Type::STREAM, Some(protocol));
    let socket = socket.with_context(|| match kind {
        CarrierKind::Mptcp => "no MPTCP on this host: net.mptcp.enabled is 0, or the kernel has none",
        CarrierKind::Sctp => "no SCTP on this host: load its module, sctp, if the kernel has one",
        CarrierKind::Quic | CarrierKind::Tcp => "no socket",
    })?;
    socket.set_nonblocking(true)?;
    Ok(socket)
}

/// Sets the congestion control and the time-outs of a connection.
fn prepare(socket: SockRef<'_>, pool: &settings::PoolSettings) -> anyhow::Result<()> {
    if socket.protocol()? == Some(Protocol::from(sctp::PROTOCOL)) {
        return Ok(sctp::prepare(&*socket, SILENT, PROBES as u16)?);
    }
    socket.set_tcp_nodelay(true)?;
    let probes = TcpKeepalive::new().with_time(SILENT).with_interval(PROBES_APART).with_retries(PROBES);
    socket.set_tcp_keepalive(&probes)?;
    // Some kernels do not have the option TCP_USER_TIMEOUT for MPTCP, which has time-outs of its own.
    let _ = socket.set_tcp_user_timeout(Some(UNHEARD));
    match &pool.congestion {
        Some(name) => socket.set_tcp_congestion(name.as_bytes()).with_context(|| {
            format!("carry: congestion {name:?} is not on this host: load its module, or name one of net.ipv4.tcp_available_congestion_control")
        }),
        // If this congestion control is missing, the socket keeps the host's default.
        None => {
            let _ = socket.set_tcp_congestion(CONGESTION.as_bytes());
            Ok(())
        }
    }
}

/// Checks that connections of these kinds can be made on this host with these settings.
///
/// # Errors
/// The error names what the kernel lacks.
pub fn check(kinds: &[CarrierKind], pool: &settings::PoolSettings) -> anyhow::Result<()> {
    for kind in kinds.iter().filter(|kind| **kind != CarrierKind::Quic) {
        prepare(SockRef::from(&socket(*kind, ([127, 0, 0, 1], 0).into())?), pool)?;
    }
    Ok(())
}

/// Listens for peers' connections of all kinds that the settings allow (TCP, MPTCP, SCTP). A listener of MPTCP also
/// accepts TCP connections.
pub fn listen(at: SocketAddr, kinds: &[CarrierKind]) -> anyhow::Result<Vec<TcpListener>> {
    let tcp = [CarrierKind::Mptcp, CarrierKind::Tcp].into_iter().find(|kind| kinds.contains(kind));
    let sctp = Some(CarrierKind::Sctp).filter(|kind| kinds.contains(kind));
    tcp.into_iter().chain(sctp).map(|kind| listen_by(kind, at)).collect()
}

fn listen_by(kind: CarrierKind, at: SocketAddr) -> anyhow::Result<TcpListener> {
    let socket = socket(kind, at)?;
    socket.set_reuse_address(true)?;
    let bound = socket.bind(&at.into()).and_then(|()| socket.listen(BACKLOG));
    bound.with_context(|| format!("cannot listen for carriers on {at}, {}", kind.name().to_uppercase()))?;
    Ok(TcpListener::from_std(socket.into())?)
}

pub fn client_config(mut config: ClientConfig) -> ClientConfig {
    (config.alpn_protocols, config.enable_secret_extraction) = (versions(), true);
    config
}

pub fn server_config(mut config: ServerConfig) -> ServerConfig {
    (config.alpn_protocols, config.enable_secret_extraction) = (versions(), true);
    config
}

/// Returns the protocol versions in order of preference. The older version is for peers that do not know the newer one.
fn versions() -> Vec<Vec<u8>> {
    vec![ALPN_ASKS.to_vec(), ALPN.to_vec()]
}

/// Connects to a peer's tunnel broker. `exempt` makes the hooks ignore the socket.
pub async fn call(
    kind: CarrierKind,
    at: SocketAddr,
    config: ClientConfig,
    pool: &settings::PoolSettings,
    run: u64,
    exempt: impl Fn(&TcpSocket),
) -> anyhow::Result<AuthenticatedConnection> {
    let socket = socket(kind, at)?;
    prepare(SockRef::from(&socket), pool)?;
    let socket = TcpSocket::from_std_stream(socket.into());
    exempt(&socket);
    let name = kind.name().to_uppercase();
    let stream = match timeout(PATIENCE, socket.connect(at)).await {
        Ok(stream) => stream.with_context(|| format!("no broker listens on {at}, {name}"))?,
        Err(_) => bail!("no answer from {at}, {name}"),
    };
    let met = timeout(PATIENCE, greet(stream, config, run)).await;
    met.with_context(|| format!("{at} has connected, but its broker does not answer, {name}"))?
        .with_context(|| format!("no broker of this key answers on {at}, {name}"))
}

async fn greet(stream: TcpStream, config: ClientConfig, run: u64) -> anyhow::Result<AuthenticatedConnection> {
    let connector = TlsConnector::from(std::sync::Arc::new(config));
    let mut stream =
        connector.connect(ServerName::try_from("millrace-graft")?, stream).await.map_err(describe_error)?;
    // The round trip of the greeting is the first measurement of the path.
    let start = Instant::now();
    say(&mut stream, run).await?;
    let run = read_hello(&mut stream).await.map_err(describe_error)?;
    let rtt = start.elapsed();
    // Neither broker sends more than its greeting before this point, so the TLS library has no further received bytes
    // in its buffers.
    let (stream, connection) = stream.into_inner();
    let asks = connection.alpn_protocol() == Some(ALPN_ASKS);
    Ok(AuthenticatedConnection { stream, secrets: connection.dangerous_extract_secrets()?, run, rtt, asks })
}

/// Accepts a connection of a peer if `admit` accepts its certificates. Otherwise the connection is closed without a
/// greeting, by which the peer notices the refusal.
pub async fn answer<T>(
    stream: TcpStream,
    config: ServerConfig,
    pool: &settings::PoolSettings,
    run: u64,
    admit: impl FnOnce(&[CertificateDer<'_>]) -> anyhow::Result<T>,
) -> anyhow::Result<(AuthenticatedConnection, T)> {
    prepare(SockRef::from(&stream), pool)?;
    let acceptor = TlsAcceptor::from(std::sync::Arc::new(config));
    let greeting = async {
        let mut stream = acceptor.accept(stream).await?;
        let start = Instant::now();
        let theirs = read_hello(&mut stream).await?;
        let rtt = start.elapsed();
        // The certificates are checked before the greeting, which tells the peer that it was accepted.
        let admitted = admit(stream.get_ref().1.peer_certificates().context("no certificate")?)?;
        say(&mut stream, run).await?;
        let (stream, connection) = stream.into_inner();
        let asks = connection.alpn_protocol() == Some(ALPN_ASKS);
        let secrets = connection.dangerous_extract_secrets()?;
        Ok((AuthenticatedConnection { stream, secrets, run: theirs, rtt, asks }, admitted))
    };
    timeout(HANDSHAKE, greeting).await.context("no handshake")?
}

async fn say(stream: &mut (impl AsyncWrite + Unpin), run: u64) -> io::Result<()> {
    let mut hello = Vec::new();
    CarryFrame::Hello { run }.encode(&mut hello);
    stream.write_all(&hello).await?;
    stream.flush().await
}

async fn read_hello(stream: &mut (impl AsyncRead + Unpin)) -> io::Result<u64> {
    let mut hello = [0; HELLO_BYTES];
    let mut decoder = Decoder::default();
    stream.read_exact(&mut hello).await?;
    decoder.push(Bytes::copy_from_slice(&hello));
    match decoder.frame() {
        Ok(Some(CarryFrame::Hello { run })) => Ok(run),
        _ => Err(io::Error::other("the other end does not greet as a broker")),
    }
}

/// Adds an explanation to an error that the operator can correct.
fn describe_error(error: io::Error) -> anyhow::Error {
    let alert = error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>());
    match alert {
        Some(rustls::Error::AlertReceived(AlertDescription::NoApplicationProtocol)) => {
            anyhow::anyhow!("its broker speaks another version of carriers than this host")
        }
        _ => error.into(),
    }
}
