//! Clients that start handshakes with a graft daemon (`millrace graft run`) and never complete them.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use anyhow::Context as _;
use millrace_client::tls::CertificateTrust;
use millrace_graft::settings::CarrierKind;
use millrace_graft_proto::carry::frame::ALPN;
use millrace_kernel::sctp;
use quinn::crypto::rustls::QuicClientConfig;
use quinn::{AsyncUdpSocket, Endpoint, EndpointConfig, Runtime as _, TokioRuntime, UdpPoller, udp};
use socket2::{Domain, Protocol, Socket, Type};

/// Largest number of unfinished handshakes that are kept. When there are more, the oldest is dropped.
const KEPT: usize = 2000;
const NAME: &str = "millrace-graft";

/// Clients that start handshakes until `is_over` is set.
pub struct Strangers<'a> {
    pub kind: CarrierKind,
    /// Local addresses that the clients connect from, in turn.
    pub from: &'a [IpAddr],
    pub to: SocketAddr,
    /// Time between two handshakes.
    pub pace: Duration,
    pub is_over: &'a AtomicBool,
    /// Number of handshakes that were started so far.
    pub begun: &'a AtomicUsize,
}

impl Strangers<'_> {
    /// Starts handshakes from the calling thread's network namespace until `is_over` is set.
    ///
    /// # Errors
    ///
    /// Fails if the kernel has no sockets for the protocol `kind`, or if a socket cannot be bound to one of the local
    /// addresses.
    pub fn run(&self) -> anyhow::Result<()> {
        match self.kind {
            CarrierKind::Quic => {
                let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
                runtime.block_on(self.send_by_quic())
            }
            CarrierKind::Tcp | CarrierKind::Mptcp => self.send_by_streams(Protocol::TCP),
            CarrierKind::Sctp => self.send_by_streams(Protocol::from(sctp::PROTOCOL)),
        }
    }

    /// Opens TCP, MPTCP or SCTP connections and sends nothing on them.
    fn send_by_streams(&self, protocol: Protocol) -> anyhow::Result<()> {
        let mut kept = VecDeque::new();
        for from in self.from.iter().cycle().take_while(|_| !self.is_over.load(Relaxed)) {
            let socket = Socket::new(Domain::for_address(self.to), Type::STREAM, Some(protocol))?;
            socket.bind(&SocketAddr::new(*from, 0).into()).with_context(|| from.to_string())?;
            if socket.connect(&self.to.into()).is_ok() {
                self.begun.fetch_add(1, Relaxed);
                kept.push_back(socket);
            }
            if kept.len() > KEPT {
                kept.pop_front();
            }
            std::thread::sleep(self.pace);
        }
        Ok(())
    }

    /// Starts QUIC handshakes, answers a Retry with its token, and then sends nothing more.
    async fn send_by_quic(&self) -> anyhow::Result<()> {
        let begun = Arc::new(AtomicUsize::new(0));
        let endpoint = |from: &IpAddr| {
            let socket = std::net::UdpSocket::bind((*from, 0))?;
            let socket = TokioRuntime.wrap_udp_socket(socket)?;
            let sent = Mutex::default();
            let socket = Arc::new(Stalling { socket, sent, begun: begun.clone() });
            Endpoint::new_with_abstract_socket(
                EndpointConfig::default(),
                None,
                socket,
                Arc::new(TokioRuntime),
            )
        };
        let endpoints: Vec<_> = self.from.iter().map(endpoint).collect::<io::Result<_>>()?;
        // With another protocol the daemon would refuse the handshake at once, and no handshake would stall.
        let config = QuicClientConfig::try_from(CertificateTrust::Anyone.client_config(&[ALPN])?)?;
        let config = quinn::ClientConfig::new(Arc::new(config));
        let mut kept = VecDeque::new();
        for endpoint in endpoints.iter().cycle() {
            if self.is_over.load(Relaxed) {
                break;
            }
            kept.push_back(endpoint.connect_with(config.clone(), self.to, NAME)?);
            if kept.len() > KEPT {
                kept.pop_front();
            }
            self.begun.store(begun.load(Relaxed), Relaxed);
            tokio::time::sleep(self.pace).await;
        }
        Ok(())
    }
}

/// A socket that sends only two datagrams of each connection: the first Initial, and the Initial with a Retry's token.
/// Other datagrams are dropped.
#[derive(Debug)]
struct Stalling {
    socket: Arc<dyn AsyncUdpSocket>,
    sent: Mutex<HashMap<Vec<u8>, usize>>,
    begun: Arc<AtomicUsize>,
}

/// Returns the source connection ID of a long header, which follows the destination connection ID.
fn own_id(datagram: &[u8]) -> Option<&[u8]> {
    let length = usize::from(*datagram.get(5)?);
    let rest = datagram.get(6 + length..)?;
    rest.get(1..1 + usize::from(*rest.first()?))
}

impl AsyncUdpSocket for Stalling {
    fn create_io_poller(self: Arc<Self>) -> Pin<Box<dyn UdpPoller>> {
        self.socket.clone().create_io_poller()
    }

    fn try_send(&self, transmit: &udp::Transmit<'_>) -> io::Result<()> {
        let id = own_id(transmit.contents).unwrap_or_default().to_vec();
        let mut sent = self.sent.lock().unwrap_or_else(PoisonError::into_inner);
        let count = sent.entry(id).or_default();
        // Reports success, so that quinn takes the datagram for sent.
        if *count == 2 {
            return Ok(());
        }
        self.socket.try_send(transmit)?;
        *count += 1;
        self.begun.fetch_add(usize::from(*count == 2), Relaxed);
        Ok(())
    }

    fn poll_recv(
        &self,
        context: &mut Context<'_>,
        buffers: &mut [io::IoSliceMut<'_>],
        about: &mut [udp::RecvMeta],
    ) -> Poll<io::Result<usize>> {
        self.socket.poll_recv(context, buffers, about)
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.socket.local_addr()
    }
}
