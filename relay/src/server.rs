//! The relay as a whole: endpoints, sessions, start and end.

mod idle;

use std::{
    collections::HashMap,
    net::{SocketAddr, UdpSocket},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use millrace_logging::short;
use millrace_moq::{
    Draft, code,
    message::Setup,
    tracks::{RESET_CODES, cache::Cache},
};
use millrace_quic::plane::downstream;
use millrace_transport as transport;
use millrace_transport::{BindError, Connection, Endpoint, Incoming, PathChange, Share};
use millrace_webtransport as webtransport;
use millrace_webtransport::{Terms, Tunnel};
use parking_lot::Mutex;
use rustls::{RootCertStore, sign::CertifiedKey};
use tokio::{
    sync::{Notify, broadcast},
    task::JoinSet,
    time,
};
use tracing::{info, warn};

use crate::{
    Admission, Config, Delays, Engine,
    access::{Access, unproven},
    hub::{Hub, Limits},
    reconnect::Pauses,
    report::{Past, Sources},
    session::Session,
    status::{self, Status},
    trace::Tracer,
};

/// How often it is looked whether sessions are idle.
const LOOKS: Duration = Duration::from_millis(100);
/// How often old groups and idle tracks are looked for.
const TIDY: Duration = Duration::from_millis(500);
/// How long a handshake may take.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(30);
/// Handshakes under way of peers that have not proved their address; beyond that, they have to, by Retry. Until a peer has,
/// no more than these have records of an offload.
const MAX_UNPROVED: usize = 64;
/// How long a request of the relay may stay unanswered.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a track without subscribers stays subscribed upstream.
const LINGER: Duration = Duration::from_secs(5);
/// How long it may take to tell peers that their sessions are closed.
const LAST_WORDS: std::ops::RangeInclusive<Duration> = Duration::from_millis(100)..=Duration::from_secs(1);
const MAX_RENDEZVOUS: Duration = Duration::from_secs(60);
/// Of moqt:// URLs without one (draft-22, "MOQT URI Scheme"), and of https:// URLs.
const DEFAULT_PORT: u16 = 443;

/// A relay with its sockets, which serves nobody yet.
pub struct Bound {
    config: Config,
    engine: Arc<Engine>,
    access: Arc<Access>,
    endpoints: Vec<Endpoint>,
    outgoing: Vec<Endpoint>,
}

/// A running relay.
pub struct Server {
    shared: Arc<Shared>,
    tasks: Mutex<JoinSet<()>>,
}

/// Handshakes under way.
#[derive(Default)]
struct Handshakes {
    all: AtomicUsize,
    /// Of peers whose address may be forged.
    unproved: AtomicUsize,
}

/// A handshake under way, until dropped.
struct Handshake {
    shared: Arc<Shared>,
    proved: bool,
}

impl Handshake {
    fn begin(shared: &Arc<Shared>, proved: bool) -> Self {
        let Handshakes { all, unproved } = &shared.handshakes;
        all.fetch_add(1, Relaxed);
        unproved.fetch_add(usize::from(!proved), Relaxed);
        Self { shared: Arc::clone(shared), proved }
    }

    /// The peer has proved its address, and is to say what it wants.
    fn prove(&mut self) {
        if !std::mem::replace(&mut self.proved, true) {
            self.shared.handshakes.unproved.fetch_sub(1, Relaxed);
        }
    }
}

impl Drop for Handshake {
    fn drop(&mut self) {
        let Handshakes { all, unproved } = &self.shared.handshakes;
        all.fetch_sub(1, Relaxed);
        unproved.fetch_sub(usize::from(!self.proved), Relaxed);
    }
}

struct Shared {
    config: Config,
    hub: Arc<Hub>,
    engine: Arc<Engine>,
    admission: Arc<dyn Admission>,
    access: Arc<Access>,
    endpoints: Vec<Endpoint>,
    /// That the upstream relay is connected to from.
    outgoing: Vec<Endpoint>,
    sessions: Mutex<HashMap<u64, Arc<Session>>>,
    handshakes: Handshakes,
    since: Instant,
    draining: AtomicBool,
    past: Past,
    tracer: Arc<Tracer>,
    session_over: Notify,
}

impl Bound {
    /// Binds every address. `outgoing`: of [`outgoing_sockets`].
    ///
    /// # Errors
    /// An address cannot be had, or the TLS settings are not usable.
    pub fn new(config: Config, outgoing: Vec<UdpSocket>, engine: Arc<Engine>) -> Result<Self, BindError> {
        let downstream =
            downstream::Config { reset_codes: RESET_CODES, ..config.transport.downstream.clone() };
        let offload = engine.offload.clone();
        let transport = transport::Config { offload, downstream, ..config.transport.clone() };
        let endpoints = config
            .listen
            .iter()
            .map(|addr| Endpoint::bind(*addr, transport.clone()))
            .collect::<Result<Vec<_>, _>>()?;
        let bare = transport.alpn.iter().filter(|name| *name != webtransport::ALPN).cloned().collect();
        let connecting = transport::Config { certificate: None, lasting: None, alpn: bare, ..transport };
        let outgoing = outgoing
            .into_iter()
            .map(|socket| Endpoint::on(socket, connecting.clone()))
            .collect::<Result<Vec<_>, _>>()?;
        Ok(Self { config, engine, access: Access::open(), endpoints, outgoing })
    }

    /// Lets `access` say who may do what; without, anyone may do anything.
    pub fn with_access(self, access: Arc<Access>) -> Self {
        Self { access, ..self }
    }

    /// The addresses that will be served, ports filled in.
    pub fn local_addrs(&self) -> Vec<SocketAddr> {
        self.endpoints.iter().map(Endpoint::local_addr).collect()
    }

    /// Starts to serve whom `admission` lets in.
    pub fn serve(self, admission: Arc<dyn Admission>) -> Server {
        let Self { config, engine, access, endpoints, outgoing } = self;
        let limits = Limits {
            max_tracks: config.max_tracks,
            linger: LINGER,
            absence: config.linger,
            max_rendezvous: MAX_RENDEZVOUS,
            request_timeout: REQUEST_TIMEOUT,
        };
        let cache = Arc::new(Cache::new(config.cache));
        let (delays, adaptive) = (config.delays.clone(), config.adaptive.clone());
        let hub = Arc::new(Hub::new(limits, cache, delays, adaptive, config.switching_sets));
        let transport::Config { tap, paths, .. } = &config.transport;
        let (tap, paths) = (Arc::clone(tap), Arc::clone(paths));
        let shared = Arc::new(Shared {
            tracer: Tracer::new(Arc::clone(&hub), Arc::clone(&engine), tap, paths),
            config,
            hub,
            engine,
            admission,
            access,
            endpoints,
            outgoing,
            sessions: Mutex::default(),
            handshakes: Handshakes::default(),
            since: Instant::now(),
            draining: AtomicBool::new(false),
            past: Past::default(),
            session_over: Notify::new(),
        });
        let mut tasks = JoinSet::new();
        for index in 0..shared.endpoints.len() {
            tasks.spawn(Arc::clone(&shared).accept(index));
        }
        tasks.spawn(Arc::clone(&shared).tidy());
        if shared.config.upstream.is_some() {
            tasks.spawn(Arc::clone(&shared).keep_upstream());
        }
        Server { shared, tasks: Mutex::new(tasks) }
    }
}

impl Server {
    /// The addresses that are served, ports filled in.
    pub fn local_addrs(&self) -> Vec<SocketAddr> {
        self.shared.endpoints.iter().map(Endpoint::local_addr).collect()
    }

    /// How long media may wait from now on; streams to subscribers that are open keep to what was so before.
    pub fn set_delays(&self, delays: Delays) {
        self.shared.hub.set_delays(delays);
    }

    /// Changes of what the network carries for each session, from now on.
    pub fn path_changes(&self) -> broadcast::Receiver<PathChange> {
        self.shared.config.transport.paths.listen()
    }

    /// What it says about itself.
    pub fn status(&self) -> Status {
        self.shared.status()
    }

    /// GOAWAY has been sent.
    pub fn is_draining(&self) -> bool {
        self.shared.draining.load(Relaxed)
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

    /// Certificates of new sessions' clients have to lead to these roots; without, none are asked for.
    ///
    /// # Errors
    /// They are of no use; the ones of before stay.
    pub fn set_client_roots(&self, roots: Option<&Arc<RootCertStore>>) -> Result<(), rustls::Error> {
        self.shared.endpoints.iter().try_for_each(|endpoint| endpoint.set_client_roots(roots))
    }

    /// Sends GOAWAY everywhere, waits until nothing is under way, and closes all sessions, within the drain timeout.
    pub async fn drain(&self) {
        let over = time::Instant::now() + self.shared.config.drain_timeout;
        self.shared.draining.store(true, Relaxed);
        let sessions: Vec<_> = self.shared.sessions.lock().values().cloned().collect();
        sessions.iter().for_each(|session| self.shared.start_drain(session));
        info!(
            sessions = sessions.len(),
            seconds = self.shared.config.drain_timeout.as_secs_f64(),
            "draining: sessions have so long to leave; SIGTERM or Ctrl-C ends them at once when it comes again, after a second or later"
        );
        let _ = time::timeout_at(over - self.shared.last_words(), self.shared.until_idle()).await;
        self.stop().await;
    }

    /// Closes all sessions now.
    pub async fn stop(&self) {
        let sessions: Vec<_> = self.shared.sessions.lock().values().cloned().collect();
        for session in &sessions {
            let code =
                if session.is_idle() { code::Session::NO_ERROR } else { code::Session::GOAWAY_TIMEOUT };
            session.close(code, "the relay is going away");
        }
        // Those that do not answer any more hold up nobody. WebTransport clients are told in their session first.
        let told = async {
            for session in &sessions {
                session.connection().quic.closed().await;
            }
        };
        let _ = time::timeout(self.shared.last_words() / 2, told).await;
        let endpoints = || self.shared.endpoints.iter().chain(&self.shared.outgoing);
        endpoints().for_each(|endpoint| {
            endpoint.close(crate::wire::var(code::Session::NO_ERROR.0), b"the relay is going away");
        });
        let told = async {
            for endpoint in endpoints() {
                endpoint.wait_idle().await;
            }
        };
        let _ = time::timeout(self.shared.last_words() / 2, told).await;
        self.shared.tracer.stop();
        self.tasks.lock().abort_all();
    }
}

impl Shared {
    fn status(&self) -> Status {
        let sources = Sources {
            hub: &self.hub,
            access: &self.access,
            engine: &self.engine,
            endpoints: &self.endpoints,
            outgoing: &self.outgoing,
            sessions: self.sessions.lock().values().cloned().collect(),
            handshakes: self.handshakes.all.load(Relaxed),
            past: &self.past,
            windows: &self.config.transport.windows,
            uptime: self.since.elapsed(),
            draining: self.draining.load(Relaxed),
            trace_viewers: self.tracer.viewers(),
        };
        sources.status()
    }

    async fn accept(self: Arc<Self>, index: usize) {
        let endpoint = &self.endpoints[index];
        while let Some(incoming) = endpoint.accept().await {
            let under_way = self.handshakes.all.load(Relaxed);
            let full = self.sessions.lock().len() + under_way >= self.config.max_sessions;
            if full || self.draining.load(Relaxed) {
                self.past.count_refused_session();
                incoming.refuse();
                continue;
            }
            if let Err(crowded) = self.admission.may_connect(incoming.remote_addr().ip()) {
                self.past.count_refused_of_client(crowded);
                incoming.refuse();
                continue;
            }
            let proved = incoming.is_proved();
            if !proved && self.handshakes.unproved.load(Relaxed) >= MAX_UNPROVED {
                self.past.count_retry();
                incoming.retry();
                continue;
            }
            let handshake = Handshake::begin(&self, proved);
            tokio::spawn(Arc::clone(&self).greet(incoming, handshake));
        }
    }

    async fn greet(self: Arc<Self>, incoming: Incoming, mut handshake: Handshake) {
        let remote = incoming.remote_addr();
        let accepted = time::timeout(HANDSHAKE_TIMEOUT, incoming.accept()).await;
        let Ok(accepted) = accepted else {
            return info!(%remote, "no handshake in time");
        };
        match accepted {
            Ok(connection) => {
                // Only now is the address proved to be the client's.
                handshake.prove();
                let _permit = match self.admission.admit(remote.ip()) {
                    Ok(permit) => permit,
                    Err(crowded) => {
                        self.past.count_refused_of_client(crowded);
                        let code = crate::wire::var(code::Session::UNAUTHORIZED.0);
                        return connection.quic.close(code, crowded.reason());
                    }
                };
                let place = self.access.place(remote.ip());
                if place.is_some() {
                    // Nor has it a part of what its client may send unread before it has shown a right.
                    connection.share_receive_window(Arc::new(Share::new(0, None)));
                }
                let asked = tokio::select! {
                    asked = self.tunnel(&connection) => asked,
                    refusal = unproven::displaced(place.as_ref()) => {
                        self.access.count(refusal);
                        let code = crate::wire::var(refusal.session_code().0);
                        return connection.quic.close(code, refusal.to_string().as_bytes());
                    }
                };
                let tunnel = match asked {
                    Ok(tunnel) => tunnel,
                    Err(refused) => {
                        self.past.count_refused_request(&refused);
                        let reason = refused.to_string();
                        return info!(%remote, refused = short(&reason), "no WebTransport session");
                    }
                };
                drop(handshake);
                let session = self.begin_session(connection, None, tunnel, place);
                self.run_session(session).await;
            }
            Err(error) => info!(%remote, %error, "handshake failed"),
        }
    }

    /// What a WebTransport client asks for; `None` of others.
    async fn tunnel(&self, connection: &Connection) -> Result<Option<Tunnel>, webtransport::Refused> {
        if connection.protocol().is_none_or(|protocol| protocol != webtransport::ALPN) {
            return Ok(None);
        }
        let protocols: Vec<_> = self.config.drafts.iter().map(|draft| draft.protocol()).collect();
        let terms = Terms { protocols: &protocols, origin: &|origin| self.config.origins.allow(origin) };
        let bind = |binding| connection.bind(binding, Tunnel::STREAMS);
        webtransport::accept(&connection.quic, &terms, bind).await.map(Some)
    }

    fn begin_session(
        self: &Arc<Self>,
        connection: Arc<Connection>,
        upstream: Option<Setup>,
        tunnel: Option<Tunnel>,
        place: Option<unproven::Place>,
    ) -> Arc<Session> {
        let hub = Arc::clone(&self.hub);
        let session = Arc::new(Session::new(hub, &self.access, connection, upstream, tunnel, place));
        self.sessions.lock().insert(session.id(), Arc::clone(&session));
        if self.draining.load(Relaxed) {
            self.start_drain(&session);
        }
        session
    }

    /// How much of the drain timeout is for telling peers that they are closed.
    fn last_words(&self) -> Duration {
        (self.config.drain_timeout / 4).clamp(*LAST_WORDS.start(), *LAST_WORDS.end())
    }

    fn start_drain(&self, session: &Session) {
        let uri = self.config.goaway_uri.as_ref().map_or("", |uri| uri.as_str());
        session.start_drain(uri, self.config.drain_timeout);
    }

    async fn run_session(self: Arc<Self>, session: Arc<Session>) {
        session.run().await;
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
            self.reclaim_window(Instant::now());
        }
    }

    async fn until_idle(&self) {
        loop {
            let over = self.session_over.notified();
            if self.sessions.lock().values().all(|session| session.is_idle()) {
                return;
            }
            let _ = time::timeout(LOOKS, over).await;
        }
    }

    /// Keeps a session with the upstream relay, and begins the next one when that wants the last one to be left.
    async fn keep_upstream(self: Arc<Self>) {
        let Some(configured) = &self.config.upstream else { return };
        let mut upstream = configured.clone();
        let mut pauses = Pauses::new();
        self.upstream_is(upstream.url.authority(), None, "connecting");
        while !self.draining.load(Relaxed) {
            // Its path may have a token.
            let host = upstream.url.authority();
            let (mut next, mut lasted, mut forgotten) = (None, Duration::ZERO, false);
            match connect(&self.outgoing, &upstream.url, &self.config.drafts).await {
                Ok((connection, tunnel)) => {
                    let session = self.begin_session(connection, Some(upstream.setup()), tunnel, None);
                    info!(%host, session = session.id(), "connected to the upstream relay");
                    self.upstream_is(host, Some(session.id()), "");
                    let (began, connection) = (Instant::now(), Arc::clone(session.connection()));
                    next = self.follow_upstream(session).await;
                    forgotten = connection.is_forgotten();
                    if forgotten {
                        warn!(%host, "the upstream relay was restarted: connecting again");
                    }
                    self.upstream_is(host, None, "the session is over");
                    lasted = began.elapsed();
                }
                Err(error) => {
                    self.upstream_is(host, None, &error.to_string());
                    warn!(%host, %error, "no connection to the upstream relay");
                }
            }
            upstream = next.and_then(|uri| configured.at(&uri)).unwrap_or_else(|| configured.clone());
            time::sleep(pauses.after(lasted, forgotten)).await;
        }
    }

    /// What status says of the upstream relay from now on.
    fn upstream_is(&self, host: &str, session: Option<u64>, reason: &str) {
        let upstream = status::Upstream { host: host.to_owned(), session, reason: reason.to_owned() };
        *self.hub.upstream.lock() = Some(upstream);
    }

    /// Until the session with the upstream relay is over, or that wants us to go on at another URI, which is returned.
    async fn follow_upstream(self: &Arc<Self>, session: Arc<Session>) -> Option<String> {
        let mut running = tokio::spawn(Arc::clone(self).run_session(Arc::clone(&session)));
        tokio::select! {
            _ = &mut running => None,
            never = session.connection().probe_when_silent() => match never {},
            uri = session.until_peer_goes_away() => {
                tokio::spawn(Arc::clone(self).leave(session));
                Some(uri)
            }
        }
    }

    /// Closes a session that the upstream relay wants to be left, once another has taken over and nothing is under way.
    async fn leave(self: Arc<Self>, session: Arc<Session>) {
        loop {
            let over = self.session_over.notified();
            let sessions = self.sessions.lock().clone();
            if !sessions.contains_key(&session.id()) {
                return;
            }
            let takes_over = |other: &Arc<Session>| other.id() > session.id() && other.is_attached();
            if sessions.values().any(takes_over) && session.is_idle() {
                return session.close(code::Session::NO_ERROR, "moved to another session");
            }
            let _ = time::timeout(LOOKS, over).await;
        }
    }
}

/// Sockets for connections to the upstream relay, one for each address family that is listened on. They have a port of
/// their own: a gate that guards the relay's port drops what an upstream relay answers, since no client sends that.
///
/// # Errors
/// There is no port left.
pub fn outgoing_sockets(listen: &[SocketAddr]) -> Result<Vec<UdpSocket>, BindError> {
    let mut sockets: Vec<UdpSocket> = Vec::new();
    for is_ipv4 in [true, false] {
        let Some(addr) = listen.iter().find(|addr| addr.is_ipv4() == is_ipv4) else { continue };
        let bind = |port| transport::bind_socket(SocketAddr::new(addr.ip(), port));
        // The kernel engine has room for few ports: the same one for both, if that is free.
        let first = sockets.first().and_then(|socket| socket.local_addr().ok());
        let same = first.and_then(|first| bind(first.port()).ok());
        sockets.push(same.map_or_else(|| bind(0), Ok)?);
    }
    Ok(sockets)
}

/// Connects to an upstream relay; `https://` means with a session of WebTransport.
async fn connect(
    endpoints: &[Endpoint],
    url: &url::Url,
    drafts: &[Draft],
) -> anyhow::Result<(Arc<Connection>, Option<Tunnel>)> {
    let (endpoint, addr, host) = way(endpoints, url).await?;
    if url.scheme() != "https" {
        return Ok((endpoint.connect(addr, host).await?, None));
    }
    let connection = endpoint.connect_as(addr, host, webtransport::ALPN).await?;
    let protocols: Vec<_> = drafts.iter().map(|draft| draft.protocol()).collect();
    let tunnel = webtransport::connect(&connection.quic, url.clone(), &protocols).await?;
    connection.bind(tunnel.binding(), Tunnel::STREAMS);
    Ok((connection, Some(tunnel)))
}

/// One of the host's addresses, the first endpoint of its address family, and the host's name.
async fn way<'a>(
    endpoints: &'a [Endpoint],
    url: &'a url::Url,
) -> anyhow::Result<(&'a Endpoint, SocketAddr, &'a str)> {
    let host = url.host_str().unwrap_or_default().trim_start_matches('[').trim_end_matches(']');
    let port = url.port().unwrap_or(DEFAULT_PORT);
    for addr in tokio::net::lookup_host((host, port)).await? {
        let same_family = |endpoint: &&Endpoint| endpoint.local_addr().is_ipv4() == addr.is_ipv4();
        if let Some(endpoint) = endpoints.iter().find(same_family) {
            return Ok((endpoint, addr, host));
        }
    }
    anyhow::bail!("{host} has no address of a family that this relay listens on")
}

#[cfg(test)]
mod tests;
