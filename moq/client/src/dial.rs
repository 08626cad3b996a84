//! Establishes a QUIC connection to one of a host's addresses, and uses ICMP errors that arrive during the handshake.

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
use millrace_webtransport::attempts::{ADDRESS_DELAY, MAX_ADDRESSES, first_success, interleaved};
use nix::errno::Errno;
use nix::sys::socket::{setsockopt, sockopt};
use parking_lot::Mutex;
use quinn::udp::{RecvMeta, Transmit};
use quinn::{AsyncUdpSocket, Connecting, Runtime, TokioRuntime, UdpPoller};
use tokio::io::Interest;
use tokio::sync::watch;
use url::Url;

use crate::tls::{self, CertificateRefusal, CertificateTrust, LastRefusal};

/// Requested size of the socket's receive buffer, in bytes. The default of Linux holds less than 100 packets, which
/// arrive in 5 ms at 200 Mbit/s.
const RECEIVE_BUFFER: usize = 4 << 20;
/// Time without an answer from the peer after which the client logs a hint about the likely reason.
const PATIENCE: Duration = Duration::from_secs(2);

/// The reason why no connection was established.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages describe the variants")]
pub enum Error {
    #[error(transparent)]
    Tls(#[from] tls::Error),
    #[error(transparent)]
    Suites(#[from] quinn::crypto::rustls::NoInitialCipherSuite),
    #[error("cannot resolve {host}: {source}")]
    Resolve { host: String, source: io::Error },
    #[error("the host {0} has no address")]
    NoAddress(String),
    /// Connecting failed. The address is the last of the host's addresses that was tried.
    #[error("cannot connect to {address}: {source}")]
    Refused { address: SocketAddr, source: DialError },
}

/// The reason why connecting to one address failed.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages describe the variants")]
pub enum DialError {
    #[error(transparent)]
    Socket(#[from] io::Error),
    #[error(transparent)]
    Start(#[from] quinn::ConnectError),
    #[error("no program listens on that UDP port")]
    NobodyListens,
    #[error("the network reports: {0}")]
    Unreachable(io::ErrorKind),
    #[error("{0}")]
    Certificate(CertificateRefusal),
    #[error("{}", describe(.0))]
    Handshake(#[from] quinn::ConnectionError),
}

/// Describes for users why a TLS or QUIC handshake failed.
fn describe(error: &quinn::ConnectionError) -> String {
    const NO_APPLICATION_PROTOCOL: u8 = 120;
    let alert = quinn_proto::TransportErrorCode::crypto(NO_APPLICATION_PROTOCOL);
    match error {
        quinn::ConnectionError::TimedOut => {
            "no answer; is a relay listening there, and does every firewall on the way let UDP through?"
                .into()
        }
        quinn::ConnectionError::ConnectionClosed(close) if close.error_code == alert => {
            "the peer supports QUIC, but none of the offered drafts of MoQ Transport (or WebTransport, for https://); check the port, or offer others with --draft".into()
        }
        quinn::ConnectionError::ConnectionClosed(close)
            if close.error_code == quinn_proto::TransportErrorCode::CONNECTION_REFUSED =>
        {
            "the relay refuses new connections now: it is full, or shutting down".into()
        }
        error => error.to_string(),
    }
}

impl Error {
    /// Reports whether another attempt to connect may succeed although the client's settings stay the same.
    pub fn may_pass(&self) -> bool {
        match self {
            Self::Refused { source: DialError::Certificate(_) | DialError::Start(_), .. } => false,
            Self::Refused { .. } | Self::Resolve { .. } => true,
            _ => false,
        }
    }
}

/// Connects to the first of the host's addresses that answers. The attempts overlap (RFC 8305).
pub(crate) async fn connect(
    url: &Url,
    trust: &CertificateTrust,
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
    let addresses = tokio::net::lookup_host((host, port)).await;
    let addresses = addresses.map_err(|source| Error::Resolve { host: host.to_owned(), source })?;
    let mut attempts = Vec::new();
    for address in interleaved(addresses).into_iter().take(MAX_ADDRESSES) {
        let (tls, verdict) = trust.explaining_config(&alpn)?;
        let crypto = quinn::crypto::rustls::QuicClientConfig::try_from(tls)?;
        let mut config = quinn::ClientConfig::new(Arc::new(crypto));
        config.transport_config(Arc::new(transport()));
        let host = host.to_owned();
        let endpoint = endpoint.clone();
        attempts.push(async move {
            tracing::info!(%address, "connecting to the relay");
            connect_to(address, &host, endpoint, config, &verdict).await.map_err(|source| (address, source))
        });
    }
    let mut failure = Error::NoAddress(host.to_owned());
    let failed = |(address, source)| match (&source, &failure) {
        // If the peer at one address refused the connection, and nothing listens at another address, the refusal is
        // the more useful error.
        (DialError::NobodyListens, Error::Refused { .. }) => {}
        _ => failure = Error::Refused { address, source },
    };
    let connected = first_success(attempts, ADDRESS_DELAY, failed).await;
    connected.ok_or(failure)
}

async fn connect_to(
    address: SocketAddr,
    host: &str,
    endpoint: quinn::EndpointConfig,
    config: quinn::ClientConfig,
    verdict: &LastRefusal,
) -> Result<(quinn::Endpoint, quinn::Connection, Prober), DialError> {
    let local: SocketAddr = match address {
        SocketAddr::V4(_) => (Ipv4Addr::UNSPECIFIED, 0).into(),
        SocketAddr::V6(_) => (Ipv6Addr::UNSPECIFIED, 0).into(),
    };
    let socket = UdpSocket::bind(local)?;
    // connect() on a UDP socket fails at once if there is no route, while quinn would only log a failed send.
    if let Err(error) = UdpSocket::bind(local)?.connect(address) {
        return Err(DialError::Unreachable(error.kind()));
    }
    // The kernel silently grants a smaller buffer if the requested size exceeds net.core.rmem_max.
    socket2::SockRef::from(&socket).set_recv_buffer_size(RECEIVE_BUFFER)?;
    let icmp = IcmpListener::open(&socket, address)?;
    let (told, answers) = watch::channel(None);
    let shielded = Arc::new(ShieldedSocket {
        socket: TokioRuntime.wrap_udp_socket(socket)?,
        told,
        sent: Mutex::default(),
    });
    let socket = Arc::clone(&shielded) as Arc<dyn AsyncUdpSocket>;
    let endpoint = quinn::Endpoint::new_with_abstract_socket(endpoint, None, socket, Arc::new(TokioRuntime))?;
    let connecting = endpoint.connect_with(config, address, host)?;
    let connected = tokio::select! {
        connected = handshake(connecting, address, answers) => connected,
        failed = icmp.listen(&shielded) => failed.map_err(DialError::Socket).map(|never| match never {}),
    };
    drop(icmp);
    match (connected, verdict.take()) {
        (Ok(connection), _) => Ok((endpoint, connection, Prober { socket: shielded, nudges: 0 })),
        (Err(_), Some(refused)) => Err(DialError::Certificate(refused)),
        (Err(error), None) => Err(error),
    }
}

pub(crate) fn transport() -> quinn::TransportConfig {
    let mut transport = quinn::TransportConfig::default();
    transport
        // A third of the idle timeout, so that it allows for two PINGs that are lost (RFC 9000, section 10.1.2).
        .keep_alive_interval(Some(Duration::from_millis(IDLE_TIMEOUT_MS as u64 / 3)))
        .max_idle_timeout(Some(quinn::VarInt::from_u32(IDLE_TIMEOUT_MS).into()))
        // A track with a stream per object needs many streams: at 20,000 objects per second and 100 ms of delay, 2,000
        // are open.
        .max_concurrent_uni_streams(quinn::VarInt::from_u32(8192))
        .max_concurrent_bidi_streams(quinn::VarInt::from_u32(1024))
        .datagram_receive_buffer_size(Some(4 << 20))
        .datagram_send_buffer_size(4 << 20)
        // The connection's flow control window is practically unlimited, but below the largest value that QUIC allows:
        // `Prober` raises it, so that quinn sends a MAX_DATA frame.
        .receive_window(quinn::VarInt::from_u64(RECEIVE_WINDOW).unwrap_or(quinn::VarInt::MAX))
        .congestion_controller_factory(Arc::new(millrace_congestion::BbrFactory::default()));
    transport
}

/// Time without a packet from the peer after which the connection is lost, ms, if the peer has no shorter one.
const IDLE_TIMEOUT_MS: u32 = 30_000;
/// The connection's flow control window, in bytes. The windows of its streams are smaller.
const RECEIVE_WINDOW: u64 = 1 << 40;
/// Length of a probe in bytes. A stateless reset has to be shorter than the packet that triggers it (RFC 9000, section
/// 10.3), so the probe is longer than a reset.
const PROBE_LEN: usize = 48;

/// A prober that finds out whether a silent peer still has state for the connection.
pub(crate) struct Prober {
    socket: Arc<ShieldedSocket>,
    nudges: u64,
}

impl Prober {
    /// Sends two packets. The first is a valid QUIC packet: a peer with the connection's state acknowledges it, and
    /// learns our address if that has changed. The second repeats the first bytes of an earlier packet, so it fails
    /// authentication. A peer without the connection's state answers the second with a stateless reset. Congestion
    /// control may block the first packet, but not the second.
    pub fn probe(&mut self, connection: &quinn::Connection) {
        self.nudges += 1;
        // A larger MAX_DATA value is new to the peer, so quinn sends it and the peer acknowledges it.
        if let Ok(window) = quinn::VarInt::from_u64(RECEIVE_WINDOW + self.nudges) {
            connection.set_receive_window(window);
        }
        let Some(contents) = *self.socket.sent.lock() else { return };
        let destination = connection.remote_address();
        let probe =
            Transmit { destination, ecn: None, contents: &contents, segment_size: None, src_ip: None };
        // The send may fail because the network is down or the socket's buffer is full. Such a failure is ignored,
        // since further probes follow.
        let _ = self.socket.socket.try_send(&probe);
    }
}

/// Waits until the handshake is complete, or ICMP reports that the peer cannot be reached.
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
                    "no answer from the relay yet: is a relay listening there, and does every firewall on the way let UDP through?"
                );
            }
        }
    }
}

/// Returns the error of the first ICMP message that arrives.
async fn answer(answers: &mut watch::Receiver<Option<io::ErrorKind>>) -> io::ErrorKind {
    match answers.wait_for(Option::is_some).await.ok().and_then(|kind| *kind) {
        Some(kind) => kind,
        // The socket was dropped, so the handshake ends by itself.
        None => std::future::pending().await,
    }
}

/// A guard that makes the kernel report ICMP errors about a socket's packets. It is used during the handshake only:
/// anyone on the path can forge such errors.
struct IcmpListener {
    socket: tokio::net::UdpSocket,
    is_ipv4: bool,
}

impl IcmpListener {
    fn open(socket: &UdpSocket, peer: SocketAddr) -> io::Result<Self> {
        // The descriptor is cloned, because Tokio does not wake a task for an error if another task waits for
        // readability of the same descriptor.
        let socket = socket.try_clone()?;
        socket.set_nonblocking(true)?;
        let socket = tokio::net::UdpSocket::from_std(socket)?;
        let icmp = Self { socket, is_ipv4: peer.is_ipv4() };
        icmp.set(true)?;
        Ok(icmp)
    }

    fn set(&self, on: bool) -> nix::Result<()> {
        match self.is_ipv4 {
            true => setsockopt(&self.socket, sockopt::Ipv4RecvErr, &on),
            false => setsockopt(&self.socket, sockopt::Ipv6RecvErr, &on),
        }
    }

    /// Passes ICMP errors to `socket` until the caller drops the returned future.
    async fn listen(&self, socket: &ShieldedSocket) -> io::Result<Infallible> {
        loop {
            self.socket.ready(Interest::ERROR).await?;
            let told = self.socket.try_io(Interest::ERROR, || {
                // Another reader of the socket's error queue may have taken the error. The next retransmission causes
                // it again.
                self.socket.take_error()?.ok_or_else(|| io::ErrorKind::WouldBlock.into())
            });
            match told {
                Ok(error) => socket.record_error(error)?,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
            }
        }
    }
}

impl Drop for IcmpListener {
    fn drop(&mut self) {
        // Clearing IP_RECVERR also empties the socket's error queue. It cannot fail, because setting this option
        // succeeded.
        let _ = self.set(false);
    }
}

/// A UDP socket that hides ICMP errors from the quinn endpoint, because the endpoint would end on such an error.
struct ShieldedSocket {
    socket: Arc<dyn AsyncUdpSocket>,
    told: watch::Sender<Option<io::ErrorKind>>,
    /// The first bytes of the last short-header packet that was sent, which a [`Prober`] repeats.
    sent: Mutex<Option<[u8; PROBE_LEN]>>,
}

impl ShieldedSocket {
    /// Records an error if an ICMP message says that the peer cannot be reached. Ignores errors of other ICMP messages.
    /// Returns all errors that no ICMP message caused.
    fn record_error(&self, error: io::Error) -> io::Result<()> {
        match error.raw_os_error().map(Errno::from_raw) {
            Some(Errno::ECONNREFUSED | Errno::EHOSTUNREACH | Errno::ENETUNREACH | Errno::EHOSTDOWN) => {
                self.told.send_replace(Some(error.kind()));
            }
            // EMSGSIZE: the packet was larger than the path MTU. Such errors do not concern the handshake.
            Some(Errno::EMSGSIZE | Errno::EPROTO | Errno::ENOPROTOOPT | Errno::EOPNOTSUPP) => {}
            _ => return Err(error),
        }
        Ok(())
    }
}

impl fmt::Debug for ShieldedSocket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.socket.fmt(f)
    }
}

impl AsyncUdpSocket for ShieldedSocket {
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
                // The kernel reports each ICMP error once, so this loop ends.
                Err(error) => {
                    if let Err(error) = self.record_error(error) {
                        return Poll::Ready(Err(error));
                    }
                }
            }
        }
    }

    millrace_webtransport::described_by_field_socket!();
}
