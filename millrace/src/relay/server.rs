//! The relay as a whole: endpoints, sessions, start and end.

use std::{
    collections::HashMap,
    net::{SocketAddr, UdpSocket},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use millrace_proto::{
    moq::{ALPN, code},
    quic::keys::Suite,
    relay::{cache, congestion::Algorithm, downstream},
};
use parking_lot::Mutex;
use rustls::{KeyLog, RootCertStore, sign::CertifiedKey};
use tokio::{sync::Notify, task::JoinSet, time};
use tracing::{info, warn};

use super::{
    config::{CipherSuite, Config, CongestionControl, Gso},
    engine::Engine,
    gate::{self, Follower, Guard},
    hub::{Hub, Limits},
    session::Session,
    trace::Tracer,
};
use crate::{
    engine::kernel,
    quic::{self, BindError, Connection, Endpoint, Incoming},
};

/// How often old groups and idle tracks are looked for.
const TIDY: Duration = Duration::from_millis(500);
/// How long a request of the relay may stay unanswered.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a track without subscribers stays subscribed upstream.
const LINGER: Duration = Duration::from_secs(5);
const MAX_RENDEZVOUS: Duration = Duration::from_secs(60);
/// Of moqt:// URLs without one (draft-18, "MOQT URI Scheme").
const DEFAULT_PORT: u16 = 443;
/// Pauses between attempts to reach the upstream relay.
const RECONNECT: std::ops::RangeInclusive<Duration> = Duration::from_millis(250)..=Duration::from_secs(15);

/// A running relay.
pub struct Server {
    pub(super) shared: Arc<Shared>,
    tasks: Mutex<JoinSet<()>>,
}

pub(super) struct Shared {
    pub config: Config,
    pub hub: Arc<Hub>,
    pub engine: Arc<Engine>,
    /// Before the gate: what it still does must not outlive that.
    _follower: Follower,
    pub gate: Arc<Guard>,
    pub endpoints: Vec<Endpoint>,
    /// That the upstream relay is connected to from.
    pub outgoing: Vec<Endpoint>,
    pub sessions: Mutex<HashMap<u64, Arc<Session>>>,
    pub since: Instant,
    pub draining: AtomicBool,
    pub past: super::report::Past,
    pub tracer: Arc<Tracer>,
    session_over: Notify,
}

/// Secrets and identities that a relay starts with.
pub struct Identity {
    pub certificate: Arc<CertifiedKey>,
    /// Roots for the upstream relay's certificate; `None`: it is not verified.
    pub upstream_roots: Option<Arc<RootCertStore>>,
    pub key_log: Option<Arc<dyn KeyLog>>,
}

#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error(transparent)]
    Bind(#[from] BindError),
    #[error("engine kernel cannot run: {0}")]
    Engine(#[from] kernel::Error),
    #[error("the gate cannot be: {0}")]
    Gate(#[from] gate::Error),
}

impl Server {
    /// Binds every address and starts to serve.
    ///
    /// # Errors
    /// An address cannot be had, the TLS settings are not usable, or the engine cannot run here.
    pub fn start(config: Config, identity: Identity) -> Result<Self, StartError> {
        let sockets = outgoing_sockets(&config)?;
        let ports: Vec<_> = sockets.iter().flat_map(UdpSocket::local_addr).map(|addr| addr.port()).collect();
        let engine = Arc::new(Engine::start(&config, &ports)?);
        let tap = Arc::<quic::Tap>::default();
        let endpoint_config = quic::Config {
            kernel: engine.kernel.clone(),
            tap: Arc::clone(&tap),
            ..endpoint_config(&config, &identity)
        };
        let endpoints = config
            .listen
            .iter()
            .map(|addr| Endpoint::bind(*addr, endpoint_config.clone()))
            .collect::<Result<Vec<_>, _>>()?;
        let connecting = quic::Config { certificate: None, ..endpoint_config.clone() };
        let outgoing = sockets
            .into_iter()
            .map(|socket| Endpoint::on(socket, connecting.clone()))
            .collect::<Result<Vec<_>, _>>()?;
        let listen: Vec<_> = endpoints.iter().map(Endpoint::local_addr).collect();
        let gate = Guard::start(&config, listen)?;
        let cache = Arc::new(cache::Cache::new(cache::Limits {
            bytes: usize::try_from(config.cache_bytes).unwrap_or(usize::MAX),
            age: config.cache_age,
        }));
        let limits = Limits {
            max_tracks: config.max_tracks,
            linger: LINGER,
            max_rendezvous: MAX_RENDEZVOUS,
            request_timeout: REQUEST_TIMEOUT,
        };
        let hub = Arc::new(Hub::new(limits, cache));
        let tracer = Tracer::new(Arc::clone(&hub), Arc::clone(&engine), tap);
        let shared = Arc::new(Shared {
            config,
            hub,
            tracer,
            engine,
            _follower: Follower::start(&gate)?,
            gate,
            endpoints,
            outgoing,
            sessions: Mutex::default(),
            since: Instant::now(),
            draining: AtomicBool::new(false),
            past: super::report::Past::default(),
            session_over: Notify::new(),
        });
        let mut tasks = JoinSet::new();
        for index in 0..shared.endpoints.len() {
            tasks.spawn(Arc::clone(&shared).accept(index));
        }
        tasks.spawn(Arc::clone(&shared).tidy());
        tasks.spawn(Arc::clone(&shared).watch_gate());
        if shared.config.upstream.is_some() {
            tasks.spawn(Arc::clone(&shared).keep_upstream());
        }
        Ok(Self { shared, tasks: Mutex::new(tasks) })
    }

    /// The addresses that are served, ports filled in.
    pub fn local_addrs(&self) -> Vec<SocketAddr> {
        self.shared.endpoints.iter().map(Endpoint::local_addr).collect()
    }

    /// Which engine runs, and why.
    pub fn engine(&self) -> (&'static str, String) {
        self.shared.engine.describe()
    }

    /// Runs with what `config` says now about engine and interfaces, nothing else of it; blocks until that is so.
    ///
    /// # Errors
    /// That cannot be; then nothing has changed.
    pub fn change_engine(&self, config: &Config) -> Result<(), kernel::Error> {
        self.shared.engine.change(config)
    }

    /// Guards as `config` says now.
    ///
    /// # Errors
    /// That cannot be; then nothing has changed.
    pub fn change_gate(&self, config: &Config) -> Result<(), gate::Error> {
        self.shared.gate.change(config)
    }

    /// What happens to single packets.
    pub fn tracer(&self) -> &Arc<Tracer> {
        &self.shared.tracer
    }

    /// New sessions are shown this certificate.
    pub fn set_certificate(&self, certificate: &Arc<CertifiedKey>) {
        for endpoint in &self.shared.endpoints {
            endpoint.set_certificate(Arc::clone(certificate));
        }
    }

    /// Sends GOAWAY everywhere, waits until nothing is under way or the drain timeout is over, and closes
    /// all sessions.
    pub async fn drain(&self) {
        self.shared.draining.store(true, Relaxed);
        let sessions: Vec<_> = self.shared.sessions.lock().values().cloned().collect();
        sessions.iter().for_each(|session| session.start_drain());
        info!(sessions = sessions.len(), "draining");
        let _ = time::timeout(self.shared.config.drain_timeout, self.shared.until_idle()).await;
        self.stop().await;
    }

    /// Closes all sessions now.
    pub async fn stop(&self) {
        let sessions: Vec<_> = self.shared.sessions.lock().values().cloned().collect();
        for session in sessions {
            let code =
                if session.is_idle() { code::Session::NO_ERROR } else { code::Session::GOAWAY_TIMEOUT };
            session.close(code, "the relay is going away");
        }
        for endpoint in self.shared.endpoints.iter().chain(&self.shared.outgoing) {
            endpoint.close(super::wire::var(code::Session::NO_ERROR.0), b"the relay is going away");
            endpoint.wait_idle().await;
        }
        self.shared.tracer.stop();
        self.tasks.lock().abort_all();
    }
}

impl Shared {
    async fn accept(self: Arc<Self>, index: usize) {
        let endpoint = &self.endpoints[index];
        while let Some(incoming) = endpoint.accept().await {
            let full = self.sessions.lock().len() >= self.config.max_sessions;
            if full || self.draining.load(Relaxed) {
                self.past.count_refused_session();
                incoming.refuse();
                continue;
            }
            if self.gate.is_full(incoming.remote_addr().ip()) {
                self.past.count_refused_of_client();
                incoming.refuse();
                continue;
            }
            tokio::spawn(Arc::clone(&self).greet(incoming));
        }
    }

    async fn greet(self: Arc<Self>, incoming: Incoming) {
        let remote = incoming.remote_addr();
        match incoming.accept().await {
            Ok(connection) => {
                // Only now is the address proved to be the client's.
                let Some(_seat) = self.gate.seat(remote.ip()) else {
                    self.past.count_refused_of_client();
                    let code = super::wire::var(code::Session::UNAUTHORIZED.0);
                    return connection.quic.close(code, b"this client has as many sessions as it may have");
                };
                self.run_session(connection, false).await;
            }
            Err(error) => info!(%remote, %error, "handshake failed"),
        }
    }

    async fn run_session(self: &Arc<Self>, connection: Arc<Connection>, is_upstream: bool) {
        let session = Session::new(Arc::clone(&self.hub), connection, is_upstream);
        self.sessions.lock().insert(session.id(), Arc::clone(&session));
        if self.draining.load(Relaxed) {
            session.start_drain();
        }
        Arc::clone(&session).run().await;
        self.sessions.lock().remove(&session.id());
        self.past.add(&session);
        self.session_over.notify_waiters();
    }

    async fn tidy(self: Arc<Self>) {
        let mut ticks = time::interval(TIDY);
        ticks.set_missed_tick_behavior(time::MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            self.hub.tidy(Instant::now());
        }
    }

    async fn watch_gate(self: Arc<Self>) {
        let mut ticks = time::interval(crate::gate::watch::TICK);
        ticks.set_missed_tick_behavior(time::MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            self.gate.tick();
        }
    }

    async fn until_idle(&self) {
        loop {
            let over = self.session_over.notified();
            if self.sessions.lock().values().all(|session| session.is_idle()) {
                return;
            }
            let _ = time::timeout(Duration::from_millis(100), over).await;
        }
    }

    /// Keeps a session with the upstream relay.
    async fn keep_upstream(self: Arc<Self>) {
        let Some(upstream) = &self.config.upstream else { return };
        let mut pause = *RECONNECT.start();
        while !self.draining.load(Relaxed) {
            match connect(&self.outgoing, &upstream.url).await {
                Ok(connection) => {
                    info!(url = %upstream.url, "connected to the upstream relay");
                    pause = *RECONNECT.start();
                    self.run_session(connection, true).await;
                }
                Err(error) => warn!(url = %upstream.url, %error, "no connection to the upstream relay"),
            }
            time::sleep(pause).await;
            pause = (pause * 2).min(*RECONNECT.end());
        }
    }
}

/// Connections to the upstream relay are from a port of their own, one for each address family that is listened on: to
/// a gate that guards a server, what comes back from one would be nonsense.
fn outgoing_sockets(config: &Config) -> Result<Vec<UdpSocket>, BindError> {
    let mut sockets: Vec<UdpSocket> = Vec::new();
    if config.upstream.is_none() {
        return Ok(sockets);
    }
    for is_ipv4 in [true, false] {
        let Some(addr) = config.listen.iter().find(|addr| addr.is_ipv4() == is_ipv4) else { continue };
        let bind = |port| quic::bind_socket(SocketAddr::new(addr.ip(), port));
        // The kernel engine has room for few ports: the same one for both, if that is free.
        let first = sockets.first().and_then(|socket| socket.local_addr().ok());
        let same = first.and_then(|first| bind(first.port()).ok());
        sockets.push(same.map_or_else(|| bind(0), Ok)?);
    }
    Ok(sockets)
}

/// Connects from the first endpoint of the address family of one of the host's addresses.
async fn connect(endpoints: &[Endpoint], url: &url::Url) -> anyhow::Result<Arc<Connection>> {
    let host = url.host_str().unwrap_or_default().trim_start_matches('[').trim_end_matches(']');
    let port = url.port().unwrap_or(DEFAULT_PORT);
    for addr in tokio::net::lookup_host((host, port)).await? {
        let same_family = |endpoint: &&Endpoint| endpoint.local_addr().is_ipv4() == addr.is_ipv4();
        if let Some(endpoint) = endpoints.iter().find(same_family) {
            return Ok(endpoint.connect(addr, host).await?);
        }
    }
    anyhow::bail!("{host} has no address of a family that this relay listens on")
}

fn endpoint_config(config: &Config, identity: &Identity) -> quic::Config {
    let suites = config.cipher_suites.iter().map(|suite| match suite {
        CipherSuite::Chacha20Poly1305 => Suite::ChaCha20Poly1305,
        CipherSuite::Aes128Gcm => Suite::Aes128Gcm,
        CipherSuite::Aes256Gcm => Suite::Aes256Gcm,
    });
    let algorithm = match config.congestion_control {
        CongestionControl::Cubic => Algorithm::Cubic,
        CongestionControl::NewReno => Algorithm::NewReno,
    };
    quic::Config {
        certificate: Some(Arc::clone(&identity.certificate)),
        trust: match &identity.upstream_roots {
            Some(roots) => quic::tls::Trust::Roots(Arc::clone(roots)),
            None => quic::tls::Trust::Anyone,
        },
        suites: suites.collect(),
        alpn: vec![ALPN.to_vec()],
        idle_timeout: config.idle_timeout,
        max_bidi_streams: u32::try_from(config.max_requests).unwrap_or(u32::MAX),
        gso: config.gso != Gso::Off,
        key_log: identity.key_log.clone(),
        max_packets_per_key: config.max_packets_per_key,
        downstream: downstream::Config { algorithm, ..downstream::Config::default() },
        ..quic::Config::default()
    }
}
