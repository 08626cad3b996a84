//! The relay as it is run: the library's, with the engine, the gate and the identity that the settings name.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket},
    sync::Arc,
};

use anyhow::Context;
use millrace_daemon::{daemon::Reloads, log, pem};
use millrace_moq::tracks::cache;
use millrace_quic::{
    keys::Suite,
    plane::{
        congestion::Algorithm,
        downstream::{self, policy},
    },
    webtransport,
};
use millrace_relay::{
    Bound,
    access::{Access, Policy, Unread, keys},
    trace::Tracer,
};
use millrace_relay_kernel as kernel;
use millrace_transport as transport;
use millrace_transport::BindError;
use parking_lot::Mutex;
use rustls::{KeyLog, RootCertStore, sign::CertifiedKey};
use tracing::{error, info, warn};

use super::{
    access,
    config::{self, CipherSuite, Config, CongestionControl, DropPolicy, Gso, Queue, Running},
    engine::Chosen,
    guard::{self, Follower, Guard},
    lasting,
    status::{Status, StatusSource, Web},
    tls,
};

/// A running relay.
pub struct Server {
    relay: millrace_relay::Server,
    engine: Chosen,
    /// Before the gate: what it still does must not outlive that.
    _follower: Follower,
    guard: Arc<Guard>,
    access: Arc<Access>,
    /// SHA-256 of the certificate that is shown.
    fingerprint: Mutex<String>,
    is_self_signed: bool,
    has_webtransport: bool,
    /// What it was started with.
    started: Running,
    pub reloads: Reloads,
}

/// Secrets and identities that a relay starts with.
pub struct Identity {
    pub certificate: Arc<CertifiedKey>,
    /// Roots for the upstream relay's certificate; `None`: it is not verified.
    pub upstream_roots: Option<Arc<RootCertStore>>,
    /// Shown to the upstream relay.
    pub upstream_certificate: Option<Arc<CertifiedKey>>,
    /// Roots for clients' certificates.
    pub client_roots: Option<Arc<RootCertStore>>,
    /// Who may do what.
    pub policy: Policy,
    pub key_log: Option<Arc<dyn KeyLog>>,
    /// The secret by which clients of an earlier process see that the relay was restarted.
    pub lasting: Option<transport::LastingSecret>,
}

impl Identity {
    /// A certificate, and nothing else.
    pub fn of(certificate: Arc<CertifiedKey>) -> Self {
        Self {
            certificate,
            upstream_roots: None,
            upstream_certificate: None,
            client_roots: None,
            policy: Policy::default(),
            key_log: None,
            lasting: None,
        }
    }

    /// Reads everything that the settings name.
    ///
    /// # Errors
    /// A file cannot be read, or is not what it should be.
    pub fn read(config: &Config) -> anyhow::Result<Self> {
        let certificate = tls::identity(&config.identity, names(config)).context("certificate")?;
        let root = config.upstream.as_ref().and_then(|upstream| upstream.tls_root.as_ref());
        let upstream_roots =
            root.map(|root| pem::roots(root)).transpose().context("upstream-tls-root")?.map(Arc::new);
        let shown = config.upstream.as_ref().and_then(|upstream| upstream.identity.as_ref());
        let shown = shown.map(|(cert, key)| pem::pair(cert, key)).transpose().context("upstream-tls-cert")?;
        let key_log = config.key_log_file.as_ref().map(|path| tls::KeyLogFile::open(path));
        let key_log = key_log.transpose().context("key-log-file")?;
        let access::Loaded { policy, client_roots, .. } = access::read(&config.access)?;
        Ok(Self {
            certificate,
            upstream_roots,
            upstream_certificate: shown.map(Arc::new),
            client_roots,
            policy,
            key_log: key_log.map(|file| Arc::new(file) as Arc<dyn KeyLog>),
            lasting: lasting::read(config)?,
        })
    }
}

#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error(transparent)]
    Bind(#[from] BindError),
    #[error("engine kernel cannot run: {0}")]
    Engine(#[from] kernel::Error),
    #[error("the gate cannot be: {0}")]
    Gate(#[from] guard::Error),
}

impl Server {
    /// Binds every address and starts to serve.
    ///
    /// # Errors
    /// An address cannot be had, the TLS settings are not usable, or the engine or the gate cannot run here.
    pub fn start(config: Config, identity: Identity) -> Result<Self, StartError> {
        let outgoing = match config.upstream {
            Some(_) => millrace_relay::outgoing_sockets(&config.listen)?,
            None => Vec::new(),
        };
        let ports: Vec<_> = outgoing.iter().flat_map(UdpSocket::local_addr).map(|addr| addr.port()).collect();
        let engine = Chosen::start(&config, &ports)?;
        let access = Access::new(identity.policy.clone(), config.access.limits);
        let bound = Bound::new(relay_config(&config, &identity), outgoing, Arc::clone(&engine.engine))?
            .with_access(Arc::clone(&access));
        let guard = Guard::start(&config, bound.local_addrs())?;
        let follower = Follower::start(&guard)?;
        let relay = bound.serve(Arc::clone(&guard) as _);
        let fingerprint = Mutex::new(tls::fingerprint(&identity.certificate));
        let is_self_signed = matches!(config.identity, config::Identity::SelfSigned { .. });
        let has_webtransport = config.web.is_some();
        Ok(Self {
            relay,
            engine,
            _follower: follower,
            guard,
            access,
            fingerprint,
            is_self_signed,
            has_webtransport,
            started: Running {
                listen: config.listen,
                max_sessions: config.max_sessions,
                queue: config.queue,
            },
            reloads: Reloads::default(),
        })
    }

    /// The addresses that are served, ports filled in.
    pub fn local_addrs(&self) -> Vec<SocketAddr> {
        self.relay.local_addrs()
    }

    /// Which engine runs, and why.
    pub fn engine(&self) -> (&'static str, String) {
        self.engine.engine.describe()
    }

    /// Runs with what `config` says now about engine and interfaces, nothing else of it; blocks until that is so.
    ///
    /// # Errors
    /// That cannot be; then nothing has changed.
    pub fn change_engine(&self, config: &Config) -> Result<(), kernel::Error> {
        self.engine.change(config)
    }

    /// Guards as `config` says now.
    ///
    /// # Errors
    /// That cannot be; then nothing has changed.
    pub fn change_gate(&self, config: &Config) -> Result<(), guard::Error> {
        self.guard.change(config)
    }

    /// Media may wait for as long as `config` says now.
    pub fn set_delays(&self, config: &Config) {
        self.relay.set_delays(config.queue.delays.clone());
    }

    /// Lets these say who may do what from now on, whatever is open included. Roots of clients' certificates are for new
    /// sessions; those of open ones count for nothing while there are none.
    pub fn set_access(&self, loaded: access::Loaded) {
        let access::Loaded { mut policy, client_roots, mut unread } = loaded;
        if let Err(error) = self.relay.set_client_roots(client_roots.as_ref()) {
            let reason = format!("no client's certificate is taken: {error}");
            unread.push(Unread { what: "client-ca".to_owned(), reason });
            policy.doubts_certificates = true;
        }
        for Unread { what, reason } in &unread {
            error!(what, reason, "not usable as it is now: what it would allow is not allowed");
        }
        let tokens = &policy.tokens;
        info!(
            rules = policy.rule_count(),
            keys = keys::describe(&tokens.keys),
            revoked = tokens.revoked_count(),
            unread = unread.len(),
            "who may do what was read again"
        );
        self.access.set_policy(policy);
        self.access.set_unread(unread);
        self.warn_if_public();
    }

    /// Says so if anyone may do anything.
    pub fn warn_if_public(&self) {
        if self.is_open() && self.local_addrs().iter().any(|addr| !addr.ip().to_canonical().is_loopback()) {
            warn!("anyone who reaches this relay may publish and watch everything");
        }
    }

    /// What stays as it is until the relay ends, whatever its settings say.
    pub fn running(&self) -> Running {
        Running { listen: self.local_addrs(), ..self.started.clone() }
    }

    /// Anyone may do anything.
    pub fn is_open(&self) -> bool {
        self.access.policy().is_open()
    }

    /// What happens to single packets.
    pub fn tracer(&self) -> &Arc<Tracer> {
        self.relay.tracer()
    }

    /// New sessions are shown this certificate.
    pub fn set_certificate(&self, certificate: &Arc<CertifiedKey>) {
        self.relay.set_certificate(certificate);
        *self.fingerprint.lock() = tls::fingerprint(certificate);
    }

    /// Sends GOAWAY everywhere, waits until nothing is under way or the drain timeout is over, and closes
    /// all sessions.
    pub async fn drain(&self) {
        self.relay.drain().await;
    }

    /// Closes all sessions now.
    pub async fn stop(&self) {
        self.relay.stop().await;
    }
}

impl StatusSource for Server {
    fn web(&self) -> Web {
        let addr = self.local_addrs().first().copied().filter(|_| self.has_webtransport);
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
        Status { gate: self.guard.describe(), pid: std::process::id(), reload, ..relay.into() }
    }

    fn draining(&self) -> bool {
        self.relay.is_draining()
    }

    fn unread(&self) -> usize {
        self.access.unread_count()
    }
}

fn relay_config(config: &Config, identity: &Identity) -> millrace_relay::Config {
    millrace_relay::Config {
        listen: config.listen.clone(),
        upstream: config.upstream.as_ref().map(|upstream| millrace_relay::Upstream {
            url: upstream.url.clone(),
            token: upstream.token.clone().map(access::token_file),
        }),
        transport: transport_config(config, identity),
        cache: cache::Limits {
            bytes: usize::try_from(config.cache_bytes).unwrap_or(usize::MAX),
            age: config.cache_age,
        },
        max_sessions: config.max_sessions,
        max_tracks: config.max_tracks,
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

fn transport_config(config: &Config, identity: &Identity) -> transport::Config {
    let suites = config.cipher_suites.iter().map(|suite| match suite {
        CipherSuite::Chacha20Poly1305 => Suite::ChaCha20Poly1305,
        CipherSuite::Aes128Gcm => Suite::Aes128Gcm,
        CipherSuite::Aes256Gcm => Suite::Aes256Gcm,
    });
    let algorithm = match config.congestion_control {
        CongestionControl::Cubic => Algorithm::Cubic,
        CongestionControl::NewReno => Algorithm::NewReno,
        CongestionControl::Bbr => Algorithm::Bbr,
    };
    let base = transport::Config::default();
    transport::Config {
        certificate: Some(Arc::clone(&identity.certificate)),
        lasting: identity.lasting.clone(),
        client_roots: identity.client_roots.clone(),
        client_certificate: identity.upstream_certificate.clone(),
        trust: match &identity.upstream_roots {
            Some(roots) => transport::tls::Trust::Roots(Arc::clone(roots)),
            None => transport::tls::Trust::Anyone,
        },
        suites: suites.collect(),
        alpn: (config.drafts.iter().map(|draft| draft.alpn()))
            .chain(config.web.as_ref().map(|_| webtransport::ALPN))
            .map(<[u8]>::to_vec)
            .collect(),
        idle_timeout: config.idle_timeout,
        windows: Arc::new(transport::Windows::new(config.receive_bytes)),
        max_bidi_streams: u32::try_from(config.max_requests).unwrap_or(u32::MAX),
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

fn downstream_config(queue: &Queue, algorithm: Algorithm, base: downstream::Config) -> downstream::Config {
    let policy = match queue.policy {
        DropPolicy::Live => policy::Kind::Live,
        DropPolicy::Tail => policy::Kind::Tail,
    };
    downstream::Config {
        algorithm,
        policy,
        queue: policy::Limits { bytes: queue.bytes, ..base.queue },
        datagram_pool: Some(Arc::new(downstream::Pool::new(queue.datagram_bytes))),
        ..base
    }
}

/// Names that a self-signed certificate is good for.
pub fn names(config: &Config) -> Vec<String> {
    let hostname = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let addresses = config.listen.iter().map(|addr| addr.ip()).filter(|ip| !ip.is_unspecified());
    let fixed = ["localhost", "127.0.0.1", "::1", hostname.trim()].map(str::to_owned);
    let mut names: Vec<_> = fixed.into_iter().chain(addresses.map(|ip| ip.to_string())).collect();
    names.retain(|name| !name.is_empty());
    names.sort_unstable();
    names.dedup();
    names
}
