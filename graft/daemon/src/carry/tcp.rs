//! Connections of pools: how they are made, at both ends. The handshake is mutual TLS 1.3 with the keys of the settings; both say hello, and no
//! more, before the keys of its records are taken over.

use std::{
    io,
    net::SocketAddr,
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail};
use bytes::Bytes;
use millrace_graft::settings::{self, Kind};
use millrace_graft_proto::carry::frame::{ALPN, ALPN_ASKS, Decoder, Frame};
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
/// As of carriers by QUIC: after so much silence a connection is gone.
const SILENT: Duration = Duration::from_secs(2);
const PROBES_APART: Duration = Duration::from_secs(1);
const PROBES: u32 = 4;
const UNHEARD: Duration = Duration::from_secs(6);
/// For a handshake, of who has not shown its key.
const HANDSHAKE: Duration = Duration::from_secs(5);
const PATIENCE: Duration = Duration::from_secs(15);
/// Where the settings name none.
const CONGESTION: &str = "bbr";
const HELLO_BYTES: usize = 9;

/// A connection whose ends know each other.
pub struct Met {
    pub stream: TcpStream,
    pub secrets: ExtractedSecrets,
    /// Of the other broker.
    pub run: u64,
    pub rtt: Duration,
    /// Whether both ends speak the version in which they may be asked whether they are still there.
    pub asks: bool,
}

/// # Errors
/// The kernel has no MPTCP or SCTP, if that is wanted.
fn socket(kind: Kind, at: SocketAddr) -> anyhow::Result<Socket> {
    let protocol = match kind {
        Kind::Mptcp => Protocol::from(MPTCP),
        Kind::Sctp => Protocol::from(sctp::PROTOCOL),
        Kind::Quic | Kind::Tcp => Protocol::TCP,
    };
    let socket = Socket::new(Domain::for_address(at), Type::STREAM, Some(protocol));
    let socket = socket.with_context(|| match kind {
        Kind::Mptcp => "no MPTCP on this host: net.mptcp.enabled is 0, or the kernel has none",
        Kind::Sctp => "no SCTP on this host: load its module, sctp, if the kernel has one",
        Kind::Quic | Kind::Tcp => "no socket",
    })?;
    socket.set_nonblocking(true)?;
    Ok(socket)
}

/// How one sends, and when it is gone.
fn prepare(socket: SockRef<'_>, pool: &settings::Pool) -> anyhow::Result<()> {
    if socket.protocol()? == Some(Protocol::from(sctp::PROTOCOL)) {
        return Ok(sctp::prepare(&*socket, SILENT, PROBES as u16)?);
    }
    socket.set_tcp_nodelay(true)?;
    let probes = TcpKeepalive::new().with_time(SILENT).with_interval(PROBES_APART).with_retries(PROBES);
    socket.set_tcp_keepalive(&probes)?;
    // Not of MPTCP, on some kernels: it has times of its own.
    let _ = socket.set_tcp_user_timeout(Some(UNHEARD));
    match &pool.congestion {
        Some(name) => socket.set_tcp_congestion(name.as_bytes()).with_context(|| {
            format!("carry: congestion {name:?} is not on this host: load its module, or name one of net.ipv4.tcp_available_congestion_control")
        }),
        // Else what the host uses for others.
        None => {
            let _ = socket.set_tcp_congestion(CONGESTION.as_bytes());
            Ok(())
        }
    }
}

/// Whether connections of these kinds can be made here as the settings want them.
///
/// # Errors
/// What is missing.
pub fn check(kinds: &[Kind], pool: &settings::Pool) -> anyhow::Result<()> {
    for kind in kinds.iter().filter(|kind| **kind != Kind::Quic) {
        prepare(SockRef::from(&socket(*kind, ([127, 0, 0, 1], 0).into())?), pool)?;
    }
    Ok(())
}

/// For all kinds of which there are pools: one of MPTCP takes TCP's connections, too.
pub fn listen(at: SocketAddr, kinds: &[Kind]) -> anyhow::Result<Vec<TcpListener>> {
    let tcp = [Kind::Mptcp, Kind::Tcp].into_iter().find(|kind| kinds.contains(kind));
    let sctp = Some(Kind::Sctp).filter(|kind| kinds.contains(kind));
    tcp.into_iter().chain(sctp).map(|kind| listen_by(kind, at)).collect()
}

fn listen_by(kind: Kind, at: SocketAddr) -> anyhow::Result<TcpListener> {
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

/// In order of preference. The one before is spoken with who knows no other.
fn versions() -> Vec<Vec<u8>> {
    vec![ALPN_ASKS.to_vec(), ALPN.to_vec()]
}

/// Calls a peer's broker. `exempt` has the kernel leave the socket alone.
pub async fn call(
    (kind, at): (Kind, SocketAddr),
    config: ClientConfig,
    pool: &settings::Pool,
    run: u64,
    exempt: impl Fn(&TcpSocket),
) -> anyhow::Result<Met> {
    let socket = socket(kind, at)?;
    prepare(SockRef::from(&socket), pool)?;
    let socket = TcpSocket::from_std_stream(socket.into());
    exempt(&socket);
    let name = kind.name().to_uppercase();
    let stream = match timeout(PATIENCE, socket.connect(at)).await {
        Ok(stream) => stream.with_context(|| format!("no broker listens on {at}, {name}"))?,
        Err(_) => bail!("nothing came back from {at}, {name}"),
    };
    let met = timeout(PATIENCE, greet(stream, config, run)).await;
    met.with_context(|| format!("{at} has connected and does not carry, {name}"))?
        .with_context(|| format!("no broker of this key answers on {at}, {name}"))
}

async fn greet(stream: TcpStream, config: ClientConfig, run: u64) -> anyhow::Result<Met> {
    let connector = TlsConnector::from(std::sync::Arc::new(config));
    let mut stream =
        connector.connect(ServerName::try_from("millrace-graft")?, stream).await.map_err(said)?;
    let start = Instant::now();
    say(&mut stream, run).await?;
    let run = hear(&mut stream).await.map_err(said)?;
    let rtt = start.elapsed();
    let (stream, connection) = stream.into_inner();
    let asks = connection.alpn_protocol() == Some(ALPN_ASKS);
    Ok(Met { stream, secrets: connection.dangerous_extract_secrets()?, run, rtt, asks })
}

/// Takes a call, if `admit` says so of who calls: else nothing is answered, so that the caller knows.
pub async fn answer<T>(
    stream: TcpStream,
    config: ServerConfig,
    pool: &settings::Pool,
    run: u64,
    admit: impl FnOnce(&[CertificateDer<'_>]) -> anyhow::Result<T>,
) -> anyhow::Result<(Met, T)> {
    prepare(SockRef::from(&stream), pool)?;
    let acceptor = TlsAcceptor::from(std::sync::Arc::new(config));
    let greeting = async {
        let mut stream = acceptor.accept(stream).await?;
        let start = Instant::now();
        let theirs = hear(&mut stream).await?;
        let rtt = start.elapsed();
        let admitted = admit(stream.get_ref().1.peer_certificates().context("no certificate")?)?;
        say(&mut stream, run).await?;
        let (stream, connection) = stream.into_inner();
        let asks = connection.alpn_protocol() == Some(ALPN_ASKS);
        let secrets = connection.dangerous_extract_secrets()?;
        Ok((Met { stream, secrets, run: theirs, rtt, asks }, admitted))
    };
    timeout(HANDSHAKE, greeting).await.context("no handshake")?
}

async fn say(stream: &mut (impl AsyncWrite + Unpin), run: u64) -> io::Result<()> {
    let mut hello = Vec::new();
    Frame::Hello { run }.encode(&mut hello);
    stream.write_all(&hello).await?;
    stream.flush().await
}

async fn hear(stream: &mut (impl AsyncRead + Unpin)) -> io::Result<u64> {
    let (mut hello, mut decoder) = ([0; HELLO_BYTES], Decoder::default());
    stream.read_exact(&mut hello).await?;
    decoder.push(Bytes::copy_from_slice(&hello));
    match decoder.frame() {
        Ok(Some(Frame::Hello { run })) => Ok(run),
        _ => Err(io::Error::other("it does not speak as a broker")),
    }
}

/// What the operator can do something about, in words.
fn said(error: io::Error) -> anyhow::Error {
    let alert = error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>());
    match alert {
        Some(rustls::Error::AlertReceived(AlertDescription::NoApplicationProtocol)) => {
            anyhow::anyhow!("it speaks another version of carriers than this host")
        }
        _ => error.into(),
    }
}
