//! A QUIC connection to one of a host's addresses, and what the network answers meanwhile.

use std::convert::Infallible;
use std::fmt;
use std::io::{self, IoSliceMut};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use millrace_moq::Draft;
use millrace_webtransport as webtransport;
use nix::errno::Errno;
use nix::sys::socket::{setsockopt, sockopt};
use parking_lot::Mutex;
use quinn::udp::{RecvMeta, Transmit};
use quinn::{AsyncUdpSocket, Connecting, Runtime, TokioRuntime, UdpPoller};
use tokio::io::Interest;
use tokio::sync::watch;
use url::Url;

use crate::tls::{self, Refusal, Trust, Verdict};

/// Socket buffer asked for, bytes: Linux' default holds less than 100 packets, 5 ms of 200 Mbit/s.
const RECEIVE_BUFFER: usize = 4 << 20;
/// After so long without an answer it is said what may be wrong.
const PATIENCE: Duration = Duration::from_secs(2);

/// Why there is no connection.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Tls(#[from] tls::Error),
    #[error(transparent)]
    Suites(#[from] quinn::crypto::rustls::NoInitialCipherSuite),
    #[error("cannot resolve {host}: {source}")]
    Resolve { host: String, source: io::Error },
    #[error("{0} has no address")]
    NoAddress(String),
    /// The last of the host's addresses that were tried.
    #[error("cannot connect to {address}: {source}")]
    Refused { address: SocketAddr, source: DialError },
}

/// Why one address cannot be connected to.
#[derive(Debug, thiserror::Error)]
pub enum DialError {
    #[error(transparent)]
    Socket(#[from] io::Error),
    #[error(transparent)]
    Start(#[from] quinn::ConnectError),
    #[error("nobody listens on that UDP port")]
    NobodyListens,
    #[error("the network says: {0}")]
    Unreachable(io::ErrorKind),
    #[error("{0}")]
    Certificate(Refusal),
    #[error("{}", describe(.0))]
    Handshake(#[from] quinn::ConnectionError),
}

/// What a handshake failed of, as a person would say it.
fn describe(error: &quinn::ConnectionError) -> String {
    const NO_APPLICATION_PROTOCOL: u8 = 120;
    let alert = quinn_proto::TransportErrorCode::crypto(NO_APPLICATION_PROTOCOL);
    match error {
        quinn::ConnectionError::TimedOut => {
            "no answer; is a relay listening there, and does every firewall on the way let UDP through?"
                .into()
        }
        quinn::ConnectionError::ConnectionClosed(close) if close.error_code == alert => {
            "the peer speaks QUIC, but neither a draft of MoQ Transport that was offered nor WebTransport as asked for".into()
        }
        quinn::ConnectionError::ConnectionClosed(close)
            if close.error_code == quinn_proto::TransportErrorCode::CONNECTION_REFUSED =>
        {
            "the relay lets nobody in now: it is full, or going away".into()
        }
        error => error.to_string(),
    }
}

impl Error {
    /// Whether it may be otherwise in a while.
    pub fn may_pass(&self) -> bool {
        match self {
            Self::Refused { source: DialError::Certificate(_) | DialError::Start(_), .. } => false,
            Self::Refused { .. } | Self::Resolve { .. } => true,
            _ => false,
        }
    }
}

/// Connects to the first of the host's addresses that lets it.
pub(crate) async fn connect(
    url: &Url,
    trust: &Trust,
    drafts: &[Draft],
    endpoint: quinn::EndpointConfig,
) -> Result<(quinn::Endpoint, quinn::Connection, Prober), Error> {
    // The url crate keeps the brackets of an IPv6 address, which neither resolver nor TLS wants.
    let host = url.host_str().unwrap_or_default().trim_start_matches('[').trim_end_matches(']');
    let port = url.port().unwrap_or(443);
    let alpn = match url.scheme() {
        "https" => vec![webtransport::ALPN],
        _ => drafts.iter().map(|draft| draft.alpn()).collect(),
    };
    let (tls, verdict) = trust.explaining_config(&alpn)?;
    let crypto = quinn::crypto::rustls::QuicClientConfig::try_from(tls)?;
    let mut config = quinn::ClientConfig::new(Arc::new(crypto));
    config.transport_config(Arc::new(transport()));

    let mut failure = Error::NoAddress(host.to_owned());
    let addresses = tokio::net::lookup_host((host, port)).await;
    let addresses = addresses.map_err(|source| Error::Resolve { host: host.to_owned(), source })?;
    for address in addresses {
        tracing::info!(%address, "connecting");
        match connect_to(address, host, endpoint.clone(), config.clone(), &verdict).await {
            Ok(connected) => return Ok(connected),
            // Of several addresses, what one has answered says more than that nobody listens on another.
            Err(DialError::NobodyListens) if matches!(failure, Error::Refused { .. }) => {}
            Err(source) => failure = Error::Refused { address, source },
        }
    }
    Err(failure)
}

async fn connect_to(
    address: SocketAddr,
    host: &str,
    endpoint: quinn::EndpointConfig,
    config: quinn::ClientConfig,
    verdict: &Verdict,
) -> Result<(quinn::Endpoint, quinn::Connection, Prober), DialError> {
    let local: SocketAddr = match address {
        SocketAddr::V4(_) => (Ipv4Addr::UNSPECIFIED, 0).into(),
        SocketAddr::V6(_) => (Ipv6Addr::UNSPECIFIED, 0).into(),
    };
    let socket = UdpSocket::bind(local)?;
    // Where there is no way to, the kernel says so now; of a packet it would only be logged.
    if let Err(error) = UdpSocket::bind(local)?.connect(address) {
        return Err(DialError::Unreachable(error.kind()));
    }
    // The kernel's limit may be lower, and says nothing then.
    socket2::SockRef::from(&socket).set_recv_buffer_size(RECEIVE_BUFFER)?;
    let ear = Ear::open(&socket, address)?;
    let (told, answers) = watch::channel(None);
    let hearing =
        Arc::new(Hearing { socket: TokioRuntime.wrap_udp_socket(socket)?, told, sent: Mutex::default() });
    let socket = Arc::clone(&hearing) as Arc<dyn AsyncUdpSocket>;
    let endpoint = quinn::Endpoint::new_with_abstract_socket(endpoint, None, socket, Arc::new(TokioRuntime))?;
    let connecting = endpoint.connect_with(config, address, host)?;
    let connected = tokio::select! {
        connected = handshake(connecting, address, answers) => connected,
        failed = ear.listen(&hearing) => failed.map_err(DialError::Socket).map(|never| match never {}),
    };
    drop(ear);
    match (connected, verdict.take()) {
        (Ok(connection), _) => Ok((endpoint, connection, Prober { hearing, nudges: 0 })),
        (Err(_), Some(refused)) => Err(DialError::Certificate(refused)),
        (Err(error), None) => Err(error),
    }
}

pub(crate) fn transport() -> quinn::TransportConfig {
    let mut transport = quinn::TransportConfig::default();
    transport
        .keep_alive_interval(Some(Duration::from_secs(4)))
        .max_idle_timeout(Some(quinn::VarInt::from_u32(30_000).into()))
        // A stream per object at 20 kHz and 100 ms of delay has 2,000 open.
        .max_concurrent_uni_streams(quinn::VarInt::from_u32(8192))
        .max_concurrent_bidi_streams(quinn::VarInt::from_u32(1024))
        .datagram_receive_buffer_size(Some(4 << 20))
        .datagram_send_buffer_size(4 << 20)
        // As good as none, but it can be raised: see `Prober`.
        .receive_window(quinn::VarInt::from_u64(RECEIVE_WINDOW).unwrap_or(quinn::VarInt::MAX))
        .congestion_controller_factory(Arc::new(millrace_congestion::Bbr::default()));
    transport
}

/// The connection's receive window; streams have smaller ones of their own.
const RECEIVE_WINDOW: u64 = 1 << 40;
/// Bytes of a probe: more than a stateless reset takes, which has to be shorter than what it answers (RFC 9000, section 10.3).
const PROBE_LEN: usize = 48;

/// Finds out whether a silent peer still knows the connection.
pub(crate) struct Prober {
    hearing: Arc<Hearing>,
    nudges: u64,
}

impl Prober {
    /// Sends two packets. A living peer acknowledges the first, and follows us if our address has changed. A peer that has
    /// forgotten the connection answers at least the second with a stateless reset: congestion control, which may hold
    /// everything back by now, does not count it, and its few bytes are not even authentic.
    pub fn probe(&mut self, connection: &quinn::Connection) {
        self.nudges += 1;
        // A byte more to receive is news, which has to be acknowledged.
        if let Ok(window) = quinn::VarInt::from_u64(RECEIVE_WINDOW + self.nudges) {
            connection.set_receive_window(window);
        }
        let Some(contents) = *self.hearing.sent.lock() else { return };
        let destination = connection.remote_address();
        let probe =
            Transmit { destination, ecn: None, contents: &contents, segment_size: None, src_ip: None };
        // The network may be away, or the socket's buffer full: there are more probes.
        let _ = self.hearing.socket.try_send(&probe);
    }
}

/// Until it is done, or the network says that it cannot be.
async fn handshake(
    mut connecting: Connecting,
    address: SocketAddr,
    mut answers: watch::Receiver<Option<io::ErrorKind>>,
) -> Result<quinn::Connection, DialError> {
    let mut patience = std::pin::pin!(tokio::time::sleep(PATIENCE));
    let mut is_patient = true;
    loop {
        tokio::select! {
            connected = &mut connecting => return Ok(connected?),
            kind = answer(&mut answers) => return Err(match kind {
                io::ErrorKind::ConnectionRefused => DialError::NobodyListens,
                kind => DialError::Unreachable(kind),
            }),
            () = &mut patience, if is_patient => {
                is_patient = false;
                tracing::warn!(
                    %address,
                    "no answer yet: is a relay listening there, and does every firewall on the way let UDP through?"
                );
            }
        }
    }
}

/// What the network answers, as soon as it does.
async fn answer(answers: &mut watch::Receiver<Option<io::ErrorKind>>) -> io::ErrorKind {
    match answers.wait_for(Option::is_some).await.ok().and_then(|kind| *kind) {
        Some(kind) => kind,
        // The socket is gone, and the handshake knows.
        None => std::future::pending().await,
    }
}

/// Has the kernel tell a socket what ICMP says about its packets, until dropped. Later on such answers say nothing: anyone
/// on the way could make them.
struct Ear {
    socket: tokio::net::UdpSocket,
    is_ipv4: bool,
}

impl Ear {
    fn open(socket: &UdpSocket, peer: SocketAddr) -> io::Result<Self> {
        // Errors wake nobody who waits to read.
        let socket = socket.try_clone()?;
        socket.set_nonblocking(true)?;
        let socket = tokio::net::UdpSocket::from_std(socket)?;
        let ear = Self { socket, is_ipv4: peer.is_ipv4() };
        ear.set(true)?;
        Ok(ear)
    }

    fn set(&self, on: bool) -> nix::Result<()> {
        match self.is_ipv4 {
            true => setsockopt(&self.socket, sockopt::Ipv4RecvErr, &on),
            false => setsockopt(&self.socket, sockopt::Ipv6RecvErr, &on),
        }
    }

    /// Tells what comes, as long as it comes.
    async fn listen(&self, hearing: &Hearing) -> io::Result<Infallible> {
        loop {
            self.socket.ready(Interest::ERROR).await?;
            let told = self.socket.try_io(Interest::ERROR, || {
                // Somebody else may have read it; what is sent again is answered again.
                self.socket.take_error()?.ok_or_else(|| io::ErrorKind::WouldBlock.into())
            });
            match told {
                Ok(error) => hearing.hear(error)?,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
            }
        }
    }
}

impl Drop for Ear {
    fn drop(&mut self) {
        // Also lets go of what the kernel has queued. It cannot fail where switching it on did not.
        let _ = self.set(false);
    }
}

/// A socket whose errors are answers of the network, which an endpoint would end of.
struct Hearing {
    socket: Arc<dyn AsyncUdpSocket>,
    told: watch::Sender<Option<io::ErrorKind>>,
    /// The beginning of the last packet with a short header.
    sent: Mutex<Option<[u8; PROBE_LEN]>>,
}

impl Hearing {
    /// Takes note of an error that ICMP has caused; others are returned.
    fn hear(&self, error: io::Error) -> io::Result<()> {
        match error.raw_os_error().map(Errno::from_raw) {
            Some(Errno::ECONNREFUSED | Errno::EHOSTUNREACH | Errno::ENETUNREACH | Errno::EHOSTDOWN) => {
                self.told.send_replace(Some(error.kind()));
            }
            // Of a larger packet than the path takes, or of nothing that concerns us.
            Some(Errno::EMSGSIZE | Errno::EPROTO | Errno::ENOPROTOOPT | Errno::EOPNOTSUPP) => {}
            _ => return Err(error),
        }
        Ok(())
    }
}

impl fmt::Debug for Hearing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.socket.fmt(f)
    }
}

impl AsyncUdpSocket for Hearing {
    fn create_io_poller(self: Arc<Self>) -> Pin<Box<dyn UdpPoller>> {
        Arc::clone(&self.socket).create_io_poller()
    }

    fn try_send(&self, transmit: &Transmit<'_>) -> io::Result<()> {
        const LONG_HEADER: u8 = 0x80;
        if let Some(front) = transmit.contents.first_chunk::<PROBE_LEN>()
            && front[0] & LONG_HEADER == 0
        {
            *self.sent.lock() = Some(*front);
        }
        self.socket.try_send(transmit)
    }

    fn poll_recv(
        &self,
        cx: &mut Context<'_>,
        bufs: &mut [IoSliceMut<'_>],
        meta: &mut [RecvMeta],
    ) -> Poll<io::Result<usize>> {
        loop {
            match ready!(self.socket.poll_recv(cx, bufs, meta)) {
                Ok(count) => return Poll::Ready(Ok(count)),
                // Each error is told once, so this ends.
                Err(error) => {
                    if let Err(error) = self.hear(error) {
                        return Poll::Ready(Err(error));
                    }
                }
            }
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.socket.local_addr()
    }

    fn max_transmit_segments(&self) -> usize {
        self.socket.max_transmit_segments()
    }

    fn max_receive_segments(&self) -> usize {
        self.socket.max_receive_segments()
    }

    fn may_fragment(&self) -> bool {
        self.socket.may_fragment()
    }
}
