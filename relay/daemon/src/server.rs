//! Starts the library's relay with the engine, the packet gate and the certificate that the settings name.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket},
    os::fd::{BorrowedFd, OwnedFd},
    sync::{
        Arc, Weak,
        mpsc::{self, RecvTimeoutError},
    },
    thread,
};

use anyhow::Context;
use millrace_daemon::{daemon::Reloads, log, pem};
use millrace_moq::{HopId, Namespace, tracks::cache};
use millrace_quic::{
    keys::KeySuite,
    plane::{
        congestion::CongestionAlgorithm,
        downstream::{self, policy},
    },
    webtransport,
};
use millrace_relay::{
    BoundRelay, InheritedSockets, LinkCertificate,
    access::{Access, AccessPolicy, UnreadSetting, keys},
    trace::EventTracer,
};
use millrace_relay_kernel as kernel;
use millrace_transport as transport;
use millrace_transport::{BindError, interfaces::InterfaceRoutes};
use parking_lot::Mutex;
use rustls::{KeyLog, RootCertStore, sign::CertifiedKey};
use tracing::{error, info, warn};

use super::{
    access,
    config::{
        self, CipherSuite, Config, CongestionControl, DropPolicy, GateChoice, Gso, QueueConfig, RunningConfig,
    },
    discovery::{RelayDiscovery, RunningDiscovery},
    engine::ChosenEngine,
    guard::{self, InterfaceFollower, RelayGuard},
    lasting, random,
    share::{self, ShareMeter},
    status::{self, Status, StatusSource, Web},
    tls,
};

/// A running relay.
pub struct RunningServer {
    relay: Arc<millrace_relay::Server>,
    meter: Arc<ShareMeter>,
    /// The channel to the thread that measures which part of the media the kernel forwards. Dropping it ends the
    /// thread.
    _running: mpsc::Sender<()>,
    engine: ChosenEngine,
    /// The thread that attaches the packet gate to interfaces. The field precedes the gate so that the thread ends
    /// first.
    _follower: InterfaceFollower,
    guard: Arc<RelayGuard>,
    access: Arc<Access>,
    discovery: Mutex<DiscoveryStage>,
    lasting: transport::LastingSecret,
    generation: u8,
    /// The listen addresses of the settings, which may have port 0.
    listen: Vec<SocketAddr>,
    /// SHA-256 of the certificate that new sessions are offered.
    fingerprint: Mutex<String>,
    is_self_signed: bool,
    has_webtransport: bool,
    /// Settings that stay in force until the relay ends.
    started: RunningConfig,
    /// Results of reading the settings, for the status.
    pub reloads: Reloads,
    /// Results of upgrades to a successor, for the status.
    pub upgrades: Reloads,
}

/// The discovery of other relays, which is not started before the relay receives packets.
enum DiscoveryStage {
    Prepared(Option<Box<RelayDiscovery>>),
    Running(RunningDiscovery),
}

/// Secrets and identities that a relay starts with.
pub struct RelayIdentity {
    /// The server's certificate chain and private key.
    pub certificate: Arc<CertifiedKey>,
    /// Root certificates for the upstream relay's certificate; `None` if that certificate is not verified.
    pub upstream_roots: Option<Arc<RootCertStore>>,
    /// This relay's certificate as a client of the upstream relay.
    pub upstream_certificate: Option<Arc<CertifiedKey>>,
    /// Root certificates for clients' certificates; `None` without `client-ca`.
    pub client_roots: Option<Arc<RootCertStore>>,
    /// Access rules.
    pub policy: AccessPolicy,
    /// The log that gets the TLS secrets of all sessions, for debugging; `None` for no log.
    pub key_log: Option<Arc<dyn KeyLog>>,
    /// The secret of stateless resets, by which clients notice that the relay was restarted.
    pub lasting: Option<transport::LastingSecret>,
    /// The prepared discovery of other relays, which is not yet started.
    pub discovery: Option<RelayDiscovery>,
    /// The number of processes before this one that have handed over their sockets, modulo 256.
    pub generation: u8,
}

impl RelayIdentity {
    /// Returns an identity that has this server certificate, no client certificate or root certificates, and the
    /// default access policy.
    pub fn from_certificate(certificate: Arc<CertifiedKey>) -> Self {
        Self {
            certificate,
            upstream_roots: None,
            upstream_certificate: None,
            client_roots: None,
            policy: AccessPolicy::default(),
            key_log: None,
            lasting: None,
            discovery: None,
            generation: 0,
        }
    }

    /// Reads all files that the settings name.
    ///
    /// # Errors
    /// Fails if a file cannot be read or has the wrong form.
    pub fn read(config: &Config) -> anyhow::Result<Self> {
        let certificate = tls::identity(&config.identity, names(config)).context("certificate")?;
        let root = config.upstream.as_ref().and_then(|upstream| upstream.tls_root.as_ref());
        let upstream_roots =
            root.map(|root| pem::roots(root)).transpose().context("upstream-tls-root")?.map(Arc::new);
        let shown = config.upstream.as_ref().and_then(|upstream| upstream.identity.as_ref());
        let shown = shown.map(|(cert, key)| pem::pair(cert, key)).transpose().context("upstream-tls-cert")?;
        let key_log = config.key_log_file.as_ref().map(|path| tls::KeyLogFile::open(path));
        let key_log = key_log.transpose().context("key-log-file")?;
        let access::AccessFileContents { policy, client_roots, .. } = access::read(&config.access)?;
        Ok(Self {
            certificate,
            upstream_roots,
            upstream_certificate: shown.map(Arc::new),
            client_roots,
            policy,
            key_log: key_log.map(|file| Arc::new(file) as Arc<dyn KeyLog>),
            lasting: lasting::read(config)?,
            discovery: RelayDiscovery::read(config.cluster.as_ref(), config.upstream.as_ref())?,
            generation: 0,
        })
    }
}

/// The reason why a relay cannot start.
#[derive(Debug, thiserror::Error)]
pub enum RelayStartError {
    /// An address cannot be bound, or the settings of TLS or QUIC are not usable.
    #[error(transparent)]
    Bind(#[from] BindError),
    /// The BPF programs of engine `kernel` cannot be loaded or attached.
    #[error("engine kernel cannot run: {0}")]
    Engine(#[from] kernel::Error),
    /// The packet gate cannot run on an interface.
    #[error("the gate cannot run: {0}")]
    Gate(#[from] guard::Error),
    /// No secret can be made for connection IDs.
    #[error("the system has no random numbers")]
    NoRandomness,
}

impl RunningServer {
    /// Binds every address and starts to serve.
    ///
    /// # Errors
    /// Fails if an address cannot be bound, the TLS settings are not usable, or the engine or the gate cannot run.
    pub fn start(config: Config, identity: RelayIdentity) -> Result<Self, RelayStartError> {
        let server = Self::prepare(config, identity, Vec::new())?;
        server.discover();
        Ok(server)
    }

    /// Starts everything that can be started while the predecessor still reads the sockets `inherited`, for each
    /// listen address. [`Self::begin`] does the rest. Without such sockets, binds the addresses.
    ///
    /// # Errors
    /// Fails for the same reasons as [`Self::start`].
    pub fn prepare(
        config: Config,
        mut identity: RelayIdentity,
        inherited: Vec<InheritedSockets>,
    ) -> Result<Self, RelayStartError> {
        let lasting = identity.lasting.take().or_else(transport::LastingSecret::random);
        let lasting = lasting.ok_or(RelayStartError::NoRandomness)?;
        identity.lasting = Some(lasting.clone());
        let outgoing = match config.upstream {
            Some(_) => millrace_relay::outgoing_sockets(&config.listen)?,
            None => Vec::new(),
        };
        // Sockets for connections to other relays are bound before the engine starts, since the BPF program needs their
        // ports.
        let ports: Vec<_> = outgoing.iter().flat_map(UdpSocket::local_addr).map(|addr| addr.port()).collect();
        let engine = ChosenEngine::start(&config, &ports)?;
        let access = Access::new(identity.policy.clone(), config.access.limits);
        // Only one process can have its gate on an interface, so a successor's begins later.
        let gate = if inherited.is_empty() { config.gate } else { GateChoice::Off };
        let relay = relay_config(&config, &identity);
        let bound = BoundRelay::taking_over(relay, outgoing, Arc::clone(&engine.engine), inherited)?
            .with_access(Arc::clone(&access));
        // The gate needs the ports that the kernel chose, so it starts after the sockets are bound and before they are
        // served.
        let guard = RelayGuard::start(&Config { gate, ..config.clone() }, bound.local_addrs())?;
        let follower = InterfaceFollower::start(&guard)?;
        let relay = Arc::new(bound.serve(Arc::clone(&guard) as _));
        let meter = Arc::<ShareMeter>::default();
        let (running, until) = mpsc::channel();
        // Without engine kernel, the kernel sends no media, so there is no share to measure.
        if engine.engine.offload.is_some() {
            // The thread holds a weak reference, so that it does not keep a dropped relay alive.
            let relay = Arc::downgrade(&relay);
            let meter = Arc::clone(&meter);
            // A new thread is in this thread's network namespace, so it sees the relay's interfaces.
            let thread = thread::Builder::new().name("relay-share".to_owned());
            let begun = thread.spawn(move || measure(&relay, &meter, &until));
            begun.map_err(kernel::Error::Thread)?;
        }
        let fingerprint = Mutex::new(tls::fingerprint(&identity.certificate));
        let is_self_signed = matches!(config.identity, config::IdentityConfig::SelfSigned { .. });
        let has_webtransport = config.web.is_some();
        Ok(Self {
            relay,
            meter,
            _running: running,
            engine,
            _follower: follower,
            guard,
            access,
            discovery: Mutex::new(DiscoveryStage::Prepared(identity.discovery.map(Box::new))),
            lasting,
            generation: identity.generation,
            listen: config.listen.clone(),
            fingerprint,
            is_self_signed,
            has_webtransport,
            started: RunningConfig {
                listen: config.listen,
                max_sessions: config.max_sessions,
                queue: config.queue,
            },
            reloads: Reloads::default(),
            upgrades: Reloads::default(),
        })
    }

    /// Starts the discovery of other relays. That is after the relay serves sessions, so that other relays do not find
    /// this one too early.
    fn discover(&self) {
        let mut discovery = self.discovery.lock();
        if let DiscoveryStage::Prepared(prepared) = &mut *discovery
            && let Some(prepared) = prepared.take()
        {
            *discovery = DiscoveryStage::Running(prepared.start(&self.relay));
        }
    }

    /// Serves, after the predecessor has stopped reading the sockets. An error of the gate is logged.
    pub fn begin(&self, config: &Config) {
        self.relay.begin();
        self.discover();
        self.guard_again(config);
    }

    /// Lets a successor read the sockets. `channels` has a channel for each of [`Self::sockets`].
    ///
    /// # Errors
    /// Fails if a channel is not usable.
    pub fn leave(&self, channels: Vec<Vec<OwnedFd>>) -> io::Result<()> {
        self.relay.leave(channels)?;
        // The record of this relay in a discovery store is the successor's now, so it is not withdrawn.
        *self.discovery.lock() = DiscoveryStage::Prepared(None);
        Ok(())
    }

    /// Serves again, after a successor has ended.
    pub fn resume(&self, config: &Config) {
        self.relay.resume();
        self.guard_again(config);
    }

    /// Starts the gate after the other process has stopped its own.
    fn guard_again(&self, config: &Config) {
        if let Err(error) = self.change_gate(config) {
            error!(%error, "the gate cannot run after the takeover, so the relay's ports are not guarded");
        }
    }

    /// Returns the sockets of each listen address, with the address in the settings.
    pub fn sockets(&self) -> Vec<(SocketAddr, Vec<BorrowedFd<'_>>)> {
        self.listen.iter().copied().zip(self.relay.sockets()).collect()
    }

    /// Returns the hop ID of this relay in its cluster, if it is in one. A successor keeps it.
    pub fn hop(&self) -> Option<HopId> {
        self.relay.status().cluster.map(|cluster| HopId(cluster.hop))
    }

    /// Returns the secret and the generation by which a successor recognizes this process's connection IDs.
    pub fn issues(&self) -> (transport::LastingSecret, u8) {
        (self.lasting.clone(), self.generation)
    }

    /// Listens for the private link to a successor.
    ///
    /// # Errors
    /// Fails if no loopback address can be bound.
    pub fn open_link(&self, certificate: &LinkCertificate) -> anyhow::Result<SocketAddr> {
        self.relay.open_link(certificate).context("the private link")
    }

    /// Connects to the predecessor by the private link.
    ///
    /// # Errors
    /// Fails if no loopback address can be bound.
    pub fn join(&self, link: SocketAddr, certificate: &LinkCertificate) -> anyhow::Result<()> {
        self.relay.join(link, certificate).context("the private link")
    }

    /// Returns the listen addresses; for port 0, with the port that the kernel assigned.
    pub fn local_addrs(&self) -> Vec<SocketAddr> {
        self.relay.local_addrs()
    }

    /// Returns the name of the running engine, and the reason why it was chosen.
    pub fn engine(&self) -> (&'static str, String) {
        self.engine.engine.describe()
    }

    /// Applies the settings of the engine and its interfaces, and no others. Blocks until they are in force.
    ///
    /// # Errors
    /// Fails if the settings cannot be applied; the engine and its interfaces are then unchanged.
    pub fn change_engine(&self, config: &Config) -> Result<(), kernel::Error> {
        self.engine.change(config)
    }

    /// Applies the settings of the packet gate.
    ///
    /// # Errors
    /// Fails if the settings cannot be applied; the gate is then unchanged.
    pub fn change_gate(&self, config: &Config) -> Result<(), guard::Error> {
        self.guard.change(config)
    }

    /// Applies the settings that limit how long media may be queued for a subscriber.
    pub fn set_delays(&self, config: &Config) {
        self.relay.set_delays(config.queue.delays.clone());
    }

    /// Applies these access rules, also to open sessions. Root certificates for clients' certificates apply to new
    /// sessions. While no root certificates can be read, client certificates of open sessions grant no access.
    pub fn set_access(&self, loaded: access::AccessFileContents) {
        let access::AccessFileContents { mut policy, client_roots, mut unread } = loaded;
        if let Err(error) = self.relay.set_client_roots(client_roots.as_ref()) {
            let reason = format!("client certificates are not accepted: {error}");
            unread.push(UnreadSetting { what: "client-ca".to_owned(), reason });
            // Endpoints may still verify clients by the old root certificates, so no client certificate grants access
            // until this is fixed.
            policy.doubts_certificates = true;
        }
        for UnreadSetting { what, reason } in &unread {
            error!(what, reason, "a file of access rights is not usable: it grants no access");
        }
        let tokens = &policy.tokens;
        info!(
            rules = policy.rule_count(),
            keys = keys::describe(&tokens.keys),
            revoked = tokens.revoked_count(),
            unread = unread.len(),
            "access rules were read again"
        );
        self.access.set_policy(policy);
        self.access.set_unread(unread);
        self.warn_if_public();
    }

    /// Logs a warning if anyone on other hosts may publish and subscribe to everything.
    pub fn warn_if_public(&self) {
        // An IPv4-mapped address such as ::ffff:127.0.0.1 counts as loopback only after its conversion to IPv4.
        if self.is_open() && self.local_addrs().iter().any(|addr| !addr.ip().to_canonical().is_loopback()) {
            warn!("anyone who reaches this relay may publish and watch everything");
        }
    }

    /// Returns the settings that stay in force until the relay ends.
    pub fn running(&self) -> RunningConfig {
        RunningConfig { listen: self.local_addrs(), ..self.started.clone() }
    }

    /// Reports whether anyone may publish and subscribe to everything.
    pub fn is_open(&self) -> bool {
        self.access.policy().is_open()
    }

    /// Returns the tracer, which reports trace events about single packets.
    pub fn tracer(&self) -> &Arc<EventTracer> {
        self.relay.tracer()
    }

    /// Sets the certificate for new sessions.
    pub fn set_certificate(&self, certificate: &Arc<CertifiedKey>) {
        self.relay.set_certificate(certificate);
        *self.fingerprint.lock() = tls::fingerprint(certificate);
    }

    /// Sends GOAWAY on all sessions, waits until they have left or the drain timeout is over, and closes all sessions.
    /// Before that, this relay's discovery record is marked as draining; at the end it is withdrawn.
    pub async fn drain(&self) {
        // Other relays are told before sessions get GOAWAY, so that they do not connect again to a relay that is
        // leaving.
        if let DiscoveryStage::Running(discovery) = &*self.discovery.lock() {
            discovery.drain();
        }
        self.relay.drain().await;
        let discovery = std::mem::replace(&mut *self.discovery.lock(), DiscoveryStage::Prepared(None));
        if let DiscoveryStage::Running(discovery) = discovery {
            discovery.end().await;
        }
    }

    /// Closes all sessions now.
    pub async fn stop(&self) {
        self.relay.stop().await;
    }
}

impl StatusSource for RunningServer {
    fn web(&self) -> Web {
        let addr = self.local_addrs().first().copied().filter(|_| self.has_webtransport);
        // An unspecified address is no destination, so the page connects to the loopback address of the same family.
        let local = addr.map(|addr| match addr.ip() {
            IpAddr::V4(ip) if ip.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
            IpAddr::V6(ip) if ip.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
            ip => ip,
        });
        Web {
            port: addr.map(|addr| addr.port()),
            local,
            sha256: self.is_self_signed.then(|| self.fingerprint()),
        }
    }

    fn fingerprint(&self) -> String {
        self.fingerprint.lock().clone()
    }

    fn status(&self) -> Status {
        let mut relay = self.relay.status();
        relay.totals.log_lines_dropped = log::dropped();
        relay.totals.log_lines_suppressed = log::suppressed();
        let reload = Some(self.reloads.latest());
        let upgrade = Some(self.upgrades.latest());
        Status {
            gate: self.guard.describe(),
            shares: self.meter.shares(),
            pid: std::process::id(),
            reload,
            upgrade,
            ..relay.into()
        }
    }

    fn routes(&self, prefix: &Namespace) -> Option<status::RoutesStatus> {
        self.relay.routes(prefix)
    }

    fn draining(&self) -> bool {
        self.relay.is_draining()
    }

    fn unread(&self) -> usize {
        self.access.unread_count()
    }
}

/// Measures which share of the media the kernel engine sends, until the relay ends.
fn measure(relay: &Weak<millrace_relay::Server>, meter: &ShareMeter, until: &mpsc::Receiver<()>) {
    let mut routes = InterfaceRoutes::default();
    while until.recv_timeout(share::PERIOD) == Err(RecvTimeoutError::Timeout) {
        let Some(relay) = relay.upgrade() else { return };
        let (engine, sessions) = relay.media();
        // Routes and addresses of interfaces may have changed since the last measurement.
        routes.refresh();
        meter.take(&engine, &sessions, &mut routes);
    }
}

fn relay_config(config: &Config, identity: &RelayIdentity) -> millrace_relay::Config {
    millrace_relay::Config {
        listen: config.listen.clone(),
        upstreams: config.upstream.as_ref().map(upstreams).unwrap_or_default(),
        cluster: config.cluster.as_ref().map(|cluster| cluster_of(cluster, config.upstream.as_ref())),
        transport: transport_config(config, identity),
        cache: cache::CacheLimits {
            bytes: usize::try_from(config.cache_bytes).unwrap_or(usize::MAX),
            age: config.cache_age,
        },
        max_sessions: config.max_sessions,
        max_tracks: config.max_tracks,
        offloaded_tracks: (config.kernel.tracks as usize).div_ceil(8),
        linger: config.linger,
        drain_timeout: config.drain_timeout,
        goaway_uri: config.goaway_uri.clone(),
        delays: config.queue.delays.clone(),
        origins: config.web.clone().unwrap_or_default(),
        adaptive: config.adaptive.clone(),
        switching_sets: config.switching_sets,
        drafts: config.drafts.clone(),
    }
}

/// Returns the upstream relays of the settings. The relay uses the same credentials for all of them.
fn upstreams(upstream: &config::UpstreamConfig) -> Vec<millrace_relay::UpstreamRelay> {
    let token = upstream.token.clone().map(access::token_file);
    let with_token =
        |url: &url::Url| millrace_relay::UpstreamRelay { url: url.clone(), token: token.clone() };
    upstream.urls.iter().map(with_token).collect()
}

/// Returns the cluster's settings. Connections to its relays use the credentials for upstream relays.
fn cluster_of(
    cluster: &config::ClusterConfig,
    upstream: Option<&config::UpstreamConfig>,
) -> millrace_relay::RelayCluster {
    let token = upstream.and_then(|upstream| upstream.token.clone()).map(access::token_file);
    let peer = |peer: &config::PeerConfig| millrace_relay::ClusterPeer {
        upstream: millrace_relay::UpstreamRelay { url: peer.url.clone(), token: token.clone() },
        cost: peer.cost,
        namespaces: peer.namespaces.clone(),
    };
    millrace_relay::RelayCluster {
        hop: cluster.hop.unwrap_or_else(drawn_hop),
        cost: cluster.cost,
        peers: cluster.peers.iter().map(peer).collect(),
        max_routes: cluster.max_routes,
        on_demand: cluster
            .discovery
            .as_ref()
            .and_then(|discovery| discovery.lookup)
            .map(|lookup| lookup.idle),
    }
}

/// Returns a random hop ID. Each start but that of a successor gets a new one, so that routes through the previous process are not taken for
/// loops.
fn drawn_hop() -> HopId {
    // A hop ID is from 1 to `HopId::MAX`: the mask keeps the random number in this range, and `max` avoids 0.
    HopId((random::number() & HopId::MAX.0).max(1))
}

fn transport_config(config: &Config, identity: &RelayIdentity) -> transport::Config {
    let suites = config.cipher_suites.iter().map(|suite| match suite {
        CipherSuite::Chacha20Poly1305 => KeySuite::ChaCha20Poly1305,
        CipherSuite::Aes128Gcm => KeySuite::Aes128Gcm,
        CipherSuite::Aes256Gcm => KeySuite::Aes256Gcm,
    });
    let algorithm = match config.congestion_control {
        CongestionControl::Cubic => CongestionAlgorithm::Cubic,
        CongestionControl::NewReno => CongestionAlgorithm::NewReno,
        CongestionControl::Bbr => CongestionAlgorithm::Bbr,
    };
    let base = transport::Config::default();
    transport::Config {
        certificate: Some(Arc::clone(&identity.certificate)),
        lasting: identity.lasting.clone(),
        generation: identity.generation,
        client_roots: identity.client_roots.clone(),
        client_certificate: identity.upstream_certificate.clone(),
        trust: match &identity.upstream_roots {
            Some(roots) => transport::tls::ServerTrust::Roots(Arc::clone(roots)),
            // There are no root certificates if verification is switched off, or if the relay connects to no other
            // relay.
            None => transport::tls::ServerTrust::Anyone,
        },
        suites: suites.collect(),
        alpn: (config.drafts.iter().map(|draft| draft.alpn()))
            .chain(config.web.as_ref().map(|_| webtransport::ALPN))
            .map(<[u8]>::to_vec)
            .collect(),
        idle_timeout: config.idle_timeout,
        windows: Arc::new(transport::Windows::new(config.receive_bytes)),
        max_bidi_streams: u32::try_from(config.max_requests).unwrap_or(u32::MAX),
        shards: config.shards,
        gso: config.gso != Gso::Off,
        dscp: config.dscp,
        key_log: identity.key_log.clone(),
        max_packets_per_key: config.max_packets_per_key,
        downstream: downstream::Config {
            ecn: config.ecn,
            ..downstream_config(&config.queue, algorithm, base.downstream)
        },
        ..base
    }
}

fn downstream_config(
    queue: &QueueConfig,
    algorithm: CongestionAlgorithm,
    base: downstream::Config,
) -> downstream::Config {
    let policy = match queue.policy {
        DropPolicy::Live => policy::PolicyKind::Live,
        DropPolicy::Tail => policy::PolicyKind::Tail,
    };
    downstream::Config {
        algorithm,
        policy,
        queue: policy::QueueLimits { bytes: queue.bytes, ..base.queue },
        datagram_pool: Some(Arc::new(downstream::DatagramPool::new(queue.datagram_bytes))),
        ..base
    }
}

/// Returns the names for which a self-signed certificate is valid.
pub fn names(config: &Config) -> Vec<String> {
    // Without a readable host name, the certificate is still valid for the other names.
    let hostname = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    // No client connects to an unspecified address, so the certificate need not name it.
    let addresses = config.listen.iter().map(|addr| addr.ip()).filter(|ip| !ip.is_unspecified());
    let fixed = ["localhost", "127.0.0.1", "::1", hostname.trim()].map(str::to_owned);
    let mut names: Vec<_> = fixed.into_iter().chain(addresses.map(|ip| ip.to_string())).collect();
    names.retain(|name| !name.is_empty());
    names.sort_unstable();
    names.dedup();
    names
}
