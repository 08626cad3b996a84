//! A relay process that takes over the listening sockets of another one, its predecessor, while sessions of the
//! predecessor go on (`millrace_transport::takeover`).
//!
//! Until publishers and subscribers have moved to the successor, each process has some of them. So both are connected
//! by a private link, a session over loopback, in which they exchange routes as relays of a cluster do
//! (`session::mesh`). Each subscribes at the other one to the tracks that it lacks. Both ends of the link have the same
//! certificate, which only these processes know.

use std::{
    hash::{BuildHasher as _, Hasher as _, RandomState},
    net::{Ipv4Addr, SocketAddr, UdpSocket},
    os::fd::{BorrowedFd, OwnedFd},
    sync::{Arc, atomic::Ordering::Relaxed},
    time::Duration,
};

use millrace_access::Access;
use millrace_moq::{HopId, code, message::SetupOptions};
use millrace_transport::{self as transport, BindError, Connection, Endpoint, takeover::Predecessor};
use rustls::{RootCertStore, sign::CertifiedKey};
use tokio::{task::JoinSet, time};
use tracing::{info, warn};

use super::{LOOKS, Server, ServerShared};
use crate::session::{Dialed, PeerTerms, RelaySession};

/// The host name in the certificate of a private link.
pub const LINK_NAME: &str = "millrace-takeover";
/// The longest time of one attempt to establish the private link.
const LINK_TIMEOUT: Duration = Duration::from_secs(5);
/// The most handshakes on the private link at a time.
const MAX_HANDSHAKES: usize = 64;
/// The longest time from the start of a successor until the private link is established.
const LINK_OPEN: Duration = Duration::from_secs(100);

/// The most namespaces to which a process of a takeover may announce routes.
const MAX_ROUTES: usize = 1 << 16;

/// The sockets of a listen address of the process that this one takes over.
pub struct InheritedSockets {
    /// The socket of each shard.
    pub sockets: Vec<UdpSocket>,
    /// The process that reads the sockets until [`Server::begin`].
    pub predecessor: Predecessor,
}

/// The certificate that both ends of a private link present, and trust. Nobody else has its key.
#[derive(Clone)]
pub struct LinkCertificate {
    /// The certificate, for [`LINK_NAME`], with its key.
    pub pair: Arc<CertifiedKey>,
    /// The certificate as the only root.
    pub root: Arc<RootCertStore>,
}

impl Server {
    /// Returns descriptors of the sockets of each listen address.
    pub fn sockets(&self) -> Vec<Vec<BorrowedFd<'_>>> {
        self.shared.endpoints.iter().map(Endpoint::sockets).collect()
    }

    /// Begins to receive on sockets that were taken over, after the predecessor has [left](Self::leave) them.
    pub fn begin(&self) {
        self.shared.endpoints.iter().for_each(Endpoint::begin);
    }

    /// Lets a successor receive on the listening sockets from now on. `channels` has a channel for each of
    /// [`Self::sockets`], by which packets of this relay's sessions come.
    ///
    /// # Errors
    /// Fails if a channel is not usable. This relay then goes on.
    pub fn leave(&self, channels: Vec<Vec<OwnedFd>>) -> std::io::Result<()> {
        self.shared.left.store(true, Relaxed);
        let mut both = self.shared.endpoints.iter().zip(channels);
        both.try_for_each(|(endpoint, channels)| endpoint.leave(channels))
    }

    /// Goes on as if there had been no takeover, because the successor has ended. Sessions that got GOAWAY accept no new
    /// requests, so their clients move to new sessions of this relay. Relays of a cluster count this one as leaving, so
    /// this relay connects to them again.
    pub fn resume(&self) {
        let told: Vec<_> = self.shared.sessions.lock().values().cloned().collect();
        let is_peer = |session: &&Arc<RelaySession>| session.is_dialed() && !session.is_upstream();
        let close = |session: &Arc<RelaySession>| session.close(code::Session::NO_ERROR, "this relay stays");
        told.iter().filter(is_peer).for_each(close);
        self.shared.draining.store(false, Relaxed);
        self.shared.left.store(false, Relaxed);
        self.shared.hub.link.store(0, Relaxed);
    }

    /// Listens for the private link to a successor. Returns the address for [`Self::join`].
    ///
    /// # Errors
    /// Fails if no loopback address can be bound.
    pub fn open_link(&self, certificate: &LinkCertificate) -> Result<SocketAddr, BindError> {
        let endpoint = self.shared.link_endpoint(transport::Config {
            certificate: Some(Arc::clone(&certificate.pair)),
            client_roots: Some(Arc::clone(&certificate.root)),
            ..self.shared.config.transport.clone()
        })?;
        let addr = endpoint.local_addr();
        let shared = Arc::clone(&self.shared);
        self.tasks.lock().spawn(async move { shared.accept_link(endpoint).await });
        Ok(addr)
    }

    /// Connects to the predecessor by the private link.
    ///
    /// # Errors
    /// Fails if no loopback address can be bound.
    pub fn join(&self, addr: SocketAddr, certificate: &LinkCertificate) -> Result<(), BindError> {
        let endpoint = self.shared.link_endpoint(transport::Config {
            certificate: None,
            client_certificate: Some(Arc::clone(&certificate.pair)),
            trust: transport::tls::ServerTrust::Roots(Arc::clone(&certificate.root)),
            ..self.shared.config.transport.clone()
        })?;
        let shared = Arc::clone(&self.shared);
        shared.hub.link.store(crate::hub::LINK_PENDING, Relaxed);
        self.tasks.lock().spawn(async move {
            let connecting = async {
                loop {
                    let attempt = time::timeout(LINK_TIMEOUT, endpoint.connect(addr, LINK_NAME));
                    if let Ok(Ok(connection)) = attempt.await {
                        return connection;
                    }
                    time::sleep(LOOKS).await;
                }
            };
            match time::timeout(LINK_OPEN, connecting).await {
                Ok(connection) => shared.run_link(connection, true).await,
                Err(_) => {
                    shared.hub.link.store(0, Relaxed);
                    warn!("the process whose sockets this one has taken over does not answer: clients of either get no media from the other");
                }
            }
        });
        Ok(())
    }
}

impl ServerShared {
    /// Makes an endpoint for the private link. No offload forwards its media, since they do not leave the host.
    fn link_endpoint(&self, config: transport::Config) -> Result<Endpoint, BindError> {
        let newest = self.config.drafts.iter().take(1).map(|draft| draft.alpn().to_vec());
        let config = transport::Config {
            lasting: None,
            generation: 0,
            shards: 1,
            offload: None,
            alpn: newest.collect(),
            ..config
        };
        Endpoint::bind((Ipv4Addr::LOCALHOST, 0).into(), config)
    }

    /// Accepts the connection of the successor, and no other: clients without a certificate are refused.
    async fn accept_link(self: Arc<Self>, endpoint: Endpoint) {
        let successor = async {
            // Handshakes of other programs of this host must not delay the successor's.
            let mut handshakes = JoinSet::new();
            loop {
                tokio::select! {
                    incoming = endpoint.accept() => {
                        let incoming = incoming?;
                        match handshakes.len() < MAX_HANDSHAKES {
                            true => drop(handshakes.spawn(time::timeout(LINK_TIMEOUT, incoming.accept()))),
                            false => incoming.refuse(),
                        }
                    }
                    Some(done) = handshakes.join_next() => {
                        let Ok(Ok(Ok(connection))) = done else { continue };
                        // The handshake has checked that the certificate is the successor's.
                        if connection.quic.peer_identity().is_some() {
                            return Some(connection);
                        }
                        connection.quic.close(0_u32.into(), b"no certificate");
                    }
                }
            }
        };
        // A successor that cannot start does not connect.
        if let Ok(Some(connection)) = time::timeout(LINK_OPEN, successor).await {
            self.run_link(connection, false).await;
        }
    }

    async fn run_link(self: Arc<Self>, connection: Arc<Connection>, is_dialed: bool) {
        self.follow_link();
        let terms = PeerTerms { cost: None, namespaces: Vec::new() };
        let dialed =
            is_dialed.then(|| Dialed { setup: SetupOptions::default(), peer: Some(Arc::new(terms)) });
        let session = RelaySession::link(Arc::clone(&self.hub), &Access::open(), connection, dialed);
        let session = Arc::new(session);
        self.hub.link.store(session.id(), Relaxed);
        self.sessions.lock().insert(session.id(), Arc::clone(&session));
        info!(session = session.id(), "exchanging media with the other process of the takeover");
        let hub = Arc::clone(&self.hub);
        let id = session.id();
        self.run_session(session).await;
        // If another upgrade has begun meanwhile, the link is that one's.
        let _ = hub.link.compare_exchange(id, 0, Relaxed, Relaxed);
    }

    /// Makes the relay follow routes, if it does not as a member of a cluster.
    fn follow_link(self: &Arc<Self>) {
        // A hop ID is from 1 to `HopId::MAX`: the mask keeps the random number in this range, and `max` avoids 0.
        let drawn = || HopId((RandomState::new().build_hasher().finish() & HopId::MAX.0).max(1));
        let hop = *self.hub.link_hop.get_or_init(drawn);
        if self.hub.begin_routes(hop, MAX_ROUTES) {
            let hub = Arc::clone(&self.hub);
            tokio::spawn(async move { hub.follow_routes().await });
        }
    }
}
