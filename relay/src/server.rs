//! The relay as a whole: its endpoints, its sessions, its start and its end.

mod dial;
mod idle;
mod on_demand;
mod peers;
pub mod takeover;
mod upstreams;

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
    Namespace, code,
    tracks::{RESET_CODES, cache::TrackCache},
};
use millrace_quic::plane::downstream;
use millrace_relay_cluster::{self as cluster, RouteTable};
use millrace_relay_status::{self as status, Status};
use millrace_transport as transport;
use millrace_transport::{BindError, Connection, Endpoint, Incoming, PathChange, WindowShare};
use millrace_webtransport as webtransport;
use millrace_webtransport::{SessionTerms, Tunnel};
use parking_lot::Mutex;
use rustls::{RootCertStore, sign::CertifiedKey};
use tokio::{
    sync::{Notify, broadcast},
    task::JoinSet,
    time,
};
use tracing::info;

use crate::{
    Admission, ClusterPeer, Config, Delays, Permit, RelayCluster, RelayEngine,
    hub::{Hub, HubLimits},
    report::{self, PastCounts, StatusSources, describe_routes},
    session::{Dialed, RelaySession},
    trace::EventTracer,
};
use millrace_access::{Access, unproven};

/// How often the relay checks if its sessions are idle while it drains or leaves an upstream relay.
const LOOKS: Duration = Duration::from_millis(100);
/// How long a process whose clients have left waits for its successor to give up the tracks that it gets from this one.
/// It is longer than the handover of a track takes.
const LINK_LEAVES: Duration = Duration::from_secs(6);
/// How often expired groups and unused tracks are removed.
const TIDY: Duration = Duration::from_millis(500);
/// The longest time that a client's handshake may take.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(30);
/// The most handshakes with clients whose address is unproved. Further clients get a Retry packet first. This number
/// also bounds the kernel table entries that clients with forged addresses can occupy.
const MAX_UNPROVED: usize = 64;
/// The longest time that a peer may take to answer a request of the relay.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
/// How long the relay stays subscribed to a track that has no subscribers.
const LINGER: Duration = Duration::from_secs(5);
/// The shortest and the longest time that is reserved at the end of a drain for telling peers that their sessions and
/// connections are closed. Between these bounds, it is a quarter of the drain time.
const LAST_WORDS: std::ops::RangeInclusive<Duration> = Duration::from_millis(100)..=Duration::from_secs(1);
const MAX_RENDEZVOUS: Duration = Duration::from_secs(60);

/// A relay whose sockets are bound, and which does not serve sessions yet.
pub struct BoundRelay {
    config: Config,
    engine: Arc<RelayEngine>,
    access: Arc<Access>,
    endpoints: Vec<Endpoint>,
    outgoing: Vec<Endpoint>,
}

/// A running relay.
///
/// [`Self::drain`] sends GOAWAY, waits for peers to leave, and ends the relay. [`Self::stop`] ends it at once.
///
/// ```no_run
/// use std::sync::Arc;
/// use millrace_relay::{BoundRelay, Config, RelayEngine, OpenAdmission};
///
/// # async fn example(config: Config) -> Result<(), Box<dyn std::error::Error>> {
/// let engine = Arc::new(RelayEngine::user("no kernel engine in this program"));
/// let relay = BoundRelay::new(config, Vec::new(), engine)?.serve(Arc::new(OpenAdmission));
/// tokio::signal::ctrl_c().await?;
/// let status = relay.status();
/// println!("{} sessions, {} tracks", status.sessions.len(), status.tracks.len());
/// relay.drain().await;
/// # Ok(())
/// # }
/// ```
pub struct Server {
    shared: Arc<ServerShared>,
    tasks: Mutex<JoinSet<()>>,
}

/// Number of handshakes with clients that are under way.
#[derive(Default)]
struct Handshakes {
    all: AtomicUsize,
    /// Number of handshakes with clients whose source address may be forged.
    unproved: AtomicUsize,
}

/// A guard that counts one handshake as under way while the guard lives.
struct Handshake {
    shared: Arc<ServerShared>,
    proved: bool,
}

impl Handshake {
    fn begin(shared: &Arc<ServerShared>, proved: bool) -> Self {
        let Handshakes { all, unproved } = &shared.handshakes;
        all.fetch_add(1, Relaxed);
        unproved.fetch_add(usize::from(!proved), Relaxed);
        Self { shared: Arc::clone(shared), proved }
    }

    /// Records that the client has proved its address. A WebTransport client still has to send its request.
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

struct ServerShared {
    config: Config,
    hub: Arc<Hub>,
    engine: Arc<RelayEngine>,
    admission: Arc<dyn Admission>,
    access: Arc<Access>,
    endpoints: Vec<Endpoint>,
    /// Endpoints for connections to upstream relays and relays of the cluster.
    outgoing: Vec<Endpoint>,
    sessions: Mutex<HashMap<u64, Arc<RelaySession>>>,
    handshakes: Handshakes,
    since: Instant,
    draining: AtomicBool,
    /// True while a successor reads the listening sockets.
    left: AtomicBool,
    past: PastCounts,
    tracer: Arc<EventTracer>,
    session_over: Notify,
    /// The relays of the cluster to which this relay connects.
    peers: peers::KeptPeers,
    demands: on_demand::Demands,
    /// The state of the store through which relays of the cluster are discovered.
    discovery: Mutex<Option<status::ClusterDiscoveryStatus>>,
}

impl BoundRelay {
    /// Binds all configured addresses. `outgoing` are the sockets that [`outgoing_sockets`] returned.
    ///
    /// # Errors
    /// Returns an error if an address cannot be bound, or the TLS settings are invalid.
    pub fn new(
        config: Config,
        outgoing: Vec<UdpSocket>,
        engine: Arc<RelayEngine>,
    ) -> Result<Self, BindError> {
        Self::taking_over(config, outgoing, engine, Vec::new())
    }

    /// Takes over the listening sockets `inherited`, for each configured address, in the same order. Without any,
    /// binds the addresses, as [`Self::new`] does.
    ///
    /// # Errors
    /// Returns an error for the same reasons as [`Self::new`].
    pub fn taking_over(
        config: Config,
        outgoing: Vec<UdpSocket>,
        engine: Arc<RelayEngine>,
        inherited: Vec<takeover::InheritedSockets>,
    ) -> Result<Self, BindError> {
        let downstream =
            downstream::Config { reset_codes: RESET_CODES, ..config.transport.downstream.clone() };
        let offload = engine.offload.clone();
        let transport = transport::Config { offload, downstream, ..config.transport.clone() };
        let mut inherited = inherited.into_iter();
        let listen = |addr: &SocketAddr| match inherited.next() {
            Some(takeover::InheritedSockets { sockets, predecessor }) => {
                Endpoint::take_over(sockets, transport.clone(), predecessor)
            }
            None => Endpoint::bind(*addr, transport.clone()),
        };
        let endpoints = config.listen.iter().map(listen).collect::<Result<Vec<_>, _>>()?;
        // WebTransport is chosen per connection when dialling, so its ALPN is not among the defaults here.
        let bare = transport.alpn.iter().filter(|name| *name != webtransport::ALPN).cloned().collect();
        let connecting = transport::Config { certificate: None, lasting: None, alpn: bare, ..transport };
        let outgoing = outgoing
            .into_iter()
            .map(|socket| Endpoint::on(socket, connecting.clone()))
            .collect::<Result<Vec<_>, _>>()?;
        Ok(Self { config, engine, access: Access::open(), endpoints, outgoing })
    }

    /// Sets the access control for all requests. Without it, every client may do everything.
    pub fn with_access(self, access: Arc<Access>) -> Self {
        Self { access, ..self }
    }

    /// Returns the addresses that the sockets are bound to, with the ports that the system chose for port 0.
    pub fn local_addrs(&self) -> Vec<SocketAddr> {
        self.endpoints.iter().map(Endpoint::local_addr).collect()
    }

    /// Starts to accept sessions. `admission` limits the sessions of each client.
    pub fn serve(self, admission: Arc<dyn Admission>) -> Server {
        let Self { config, engine, access, endpoints, outgoing } = self;
        let limits = HubLimits {
            max_tracks: config.max_tracks,
            offloaded_tracks: config.offloaded_tracks,
            linger: LINGER,
            absence: config.linger,
            max_rendezvous: MAX_RENDEZVOUS,
            max_routes: config.cluster.as_ref().map_or(0, |cluster| cluster.max_routes),
            request_timeout: REQUEST_TIMEOUT,
        };
        let cache = Arc::new(TrackCache::new(config.cache));
        let delays = config.delays.clone();
        let adaptive = config.adaptive.clone();
        let hub = Hub::new(limits, cache, delays, adaptive, config.switching_sets);
        let hub = Arc::new(match &config.cluster {
            Some(RelayCluster { hop, cost, max_routes, on_demand, .. }) => {
                let table = RouteTable::new(*hop, cluster::RouteLimits { per_link: *max_routes });
                let table = if on_demand.is_some() { table.announcing_only_own() } else { table };
                hub.with_table_of_routes(table, *cost)
            }
            None => hub,
        });
        let transport::Config { tap, paths, .. } = &config.transport;
        let tap = Arc::clone(tap);
        let paths = Arc::clone(paths);
        let shared = Arc::new(ServerShared {
            tracer: EventTracer::new(Arc::clone(&hub), Arc::clone(&engine), tap, paths),
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
            left: AtomicBool::new(false),
            past: PastCounts::default(),
            session_over: Notify::new(),
            peers: peers::KeptPeers::default(),
            demands: on_demand::Demands::default(),
            discovery: Mutex::default(),
        });
        // Dropping the set of tasks aborts them.
        let mut tasks = JoinSet::new();
        for index in 0..shared.endpoints.len() {
            tasks.spawn(Arc::clone(&shared).accept(index));
        }
        tasks.spawn(Arc::clone(&shared).tidy());
        if !shared.config.upstreams.is_empty() {
            tasks.spawn(Arc::clone(&shared).keep_upstream());
        }
        if let Some(cluster) = &shared.config.cluster {
            let hub = Arc::clone(&shared.hub);
            tasks.spawn(async move { hub.follow_routes().await });
            for peer in &cluster.peers {
                tasks.spawn(Arc::clone(&shared).keep_peer(shared.peers.add(peer)));
            }
        }
        Server { shared, tasks: Mutex::new(tasks) }
    }
}

impl Server {
    /// Returns the addresses that the relay listens on, with the ports that the system chose for port 0.
    pub fn local_addrs(&self) -> Vec<SocketAddr> {
        self.shared.endpoints.iter().map(Endpoint::local_addr).collect()
    }

    /// Sets how long media may wait for slow subscribers. Streams that are open keep the previous limit.
    pub fn set_delays(&self, delays: Delays) {
        self.shared.hub.set_delays(delays);
    }

    /// Returns a receiver of changes in the estimated bandwidth and delay of each session's path.
    pub fn path_changes(&self) -> broadcast::Receiver<PathChange> {
        self.shared.config.transport.paths.listen()
    }

    /// Returns the relay's status.
    pub fn status(&self) -> Status {
        self.shared.status()
    }

    /// Returns the part of the status that shows which media the kernel sends: the engine, and the sessions that send or
    /// receive media. Idle sessions are left out, so that reading it often costs little with many of them.
    pub fn media(&self) -> (status::EngineStatus, Vec<status::RelaySessionStatus>) {
        let sessions: Vec<_> = self.shared.sessions.lock().values().cloned().collect();
        report::media(&self.shared.engine, &sessions)
    }

    /// Returns the routes to namespaces below `prefix`; `None` if the relay is in no cluster.
    pub fn routes(&self, prefix: &Namespace) -> Option<status::RoutesStatus> {
        let routes = self.shared.hub.with_table(|table| describe_routes(table, prefix))?;
        Some(status::RoutesStatus { lookup: self.shared.describe_lookup(prefix), ..routes })
    }

    /// Connects to these relays, which a discovery store has named, in addition to those of the settings. A relay that
    /// the store no longer names keeps its session; after that session, it is not connected to again.
    pub fn set_found_peers(&self, peers: &[ClusterPeer]) {
        let mut tasks = self.tasks.lock();
        while tasks.try_join_next().is_some() {} // removes tasks that have ended, whose results the set would keep
        for peer in self.shared.peers.take_found(peers) {
            tasks.spawn(Arc::clone(&self.shared).keep_peer(peer));
        }
    }

    /// Returns how many sessions are open, and how many may be.
    pub fn session_count(&self) -> (usize, usize) {
        (self.shared.sessions.lock().len(), self.shared.config.max_sessions)
    }

    /// Sets the state of the discovery store, which the relay's status shows.
    pub fn set_discovery(&self, discovery: status::ClusterDiscoveryStatus) {
        *self.shared.discovery.lock() = Some(discovery);
    }

    /// Reports whether the relay is draining, so that it has sent GOAWAY to all sessions.
    pub fn is_draining(&self) -> bool {
        self.shared.draining.load(Relaxed)
    }

    /// Returns the tracer, which reports single packets to viewers of `/trace`.
    pub fn tracer(&self) -> &Arc<EventTracer> {
        &self.shared.tracer
    }

    /// Sets the certificate that the relay presents to new sessions.
    pub fn set_certificate(&self, certificate: &Arc<CertifiedKey>) {
        for endpoint in &self.shared.endpoints {
            endpoint.set_certificate(Arc::clone(certificate));
        }
    }

    /// Sets the roots that client certificates of new sessions are verified against. `None`: clients are not asked for
    /// a certificate.
    ///
    /// # Errors
    /// Returns an error if the roots are unusable. The previous ones then stay in use.
    pub fn set_client_roots(&self, roots: Option<&Arc<RootCertStore>>) -> Result<(), rustls::Error> {
        self.shared.endpoints.iter().try_for_each(|endpoint| endpoint.set_client_roots(roots))
    }

    /// Ends the relay within the drain timeout: sends GOAWAY to all sessions, waits until they are idle, and closes
    /// them.
    pub async fn drain(&self) {
        let over = time::Instant::now() + self.shared.config.drain_timeout;
        self.shared.draining.store(true, Relaxed);
        let mut sessions: Vec<_> = self.shared.sessions.lock().values().cloned().collect();
        // The other process of a takeover gets media from this one until the last other session is over.
        sessions.retain(|session| !session.is_link());
        sessions.iter().for_each(|session| self.shared.start_drain(session));
        info!(
            sessions = sessions.len(),
            seconds = self.shared.config.drain_timeout.as_secs_f64(),
            "draining: sessions have this many seconds to leave; a further SIGTERM or Ctrl-C ends them at once, if it comes a second later or more"
        );
        let over = over - self.shared.last_words();
        let _ = time::timeout_at(over, self.shared.until_idle()).await;
        let served = self.shared.until_link_is_served();
        let _ = time::timeout_at(over.min(time::Instant::now() + LINK_LEAVES), served).await;
        self.stop().await;
    }

    /// Closes all sessions at once.
    pub async fn stop(&self) {
        let sessions: Vec<_> = self.shared.sessions.lock().values().cloned().collect();
        for session in &sessions {
            let code =
                if session.is_idle() { code::Session::NO_ERROR } else { code::Session::GOAWAY_TIMEOUT };
            session.close(code, "the relay is going away");
        }
        // The timeout bounds the wait for peers that no longer respond. WebTransport sessions are closed inside their
        // connection first.
        let told = async {
            for session in &sessions {
                session.connection().quic.closed().await;
            }
        };
        let _ = time::timeout(self.shared.last_words() / 2, told).await;
        let endpoints = || self.shared.endpoints.iter().chain(&self.shared.outgoing);
        // Closing the endpoint also closes connections whose handshake is still under way.
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

impl ServerShared {
    fn status(&self) -> Status {
        let sources = StatusSources {
            hub: &self.hub,
            access: &self.access,
            engine: &self.engine,
            endpoints: &self.endpoints,
            outgoing: &self.outgoing,
            sessions: self.sessions.lock().values().cloned().collect(),
            handshakes: self.handshakes.all.load(Relaxed),
            past: &self.past,
            peers: self.peers.status(),
            discovery: self.discovery.lock().clone().map(|discovery| status::ClusterDiscoveryStatus {
                lookup: self.lookup_status(),
                ..discovery
            }),
            windows: &self.config.transport.windows,
            uptime: self.since.elapsed(),
            draining: self.draining.load(Relaxed),
            trace_viewers: self.tracer.viewers(),
        };
        sources.status()
    }

    // Checks are in the order of their cost: an overloaded relay refuses a client before it does any cryptography.
    async fn accept(self: Arc<Self>, index: usize) {
        let endpoint = &self.endpoints[index];
        while let Some(incoming) = endpoint.accept().await {
            let under_way = self.handshakes.all.load(Relaxed);
            // Handshakes count as sessions, so that many simultaneous handshakes cannot exceed the limit.
            let full = self.sessions.lock().len() + under_way >= self.config.max_sessions;
            // While a successor reads the sockets, this relay drains, and only attempts from before that come here.
            if full || self.draining.load(Relaxed) && !self.left.load(Relaxed) {
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
            // A Retry packet makes the client prove its address before the relay keeps state for it.
            if !proved && self.handshakes.unproved.load(Relaxed) >= MAX_UNPROVED {
                self.past.count_retry();
                incoming.retry();
                continue;
            }
            let handshake = Handshake::begin(&self, proved);
            // The state of the handshake is freed before the session begins.
            let established = Box::pin(Arc::clone(&self).establish(incoming, handshake));
            let server = Arc::clone(&self);
            tokio::spawn(async move {
                if let Some((session, _permit)) = established.await {
                    server.run_session(session).await;
                }
            });
        }
    }

    /// Completes a client's handshakes, of QUIC and of WebTransport. Returns `None` if the client is refused, or has not
    /// completed them in time.
    async fn establish(
        self: Arc<Self>,
        incoming: Incoming,
        mut handshake: Handshake,
    ) -> Option<(Arc<RelaySession>, Permit)> {
        let remote = incoming.remote_addr();
        let Ok(accepted) = time::timeout(HANDSHAKE_TIMEOUT, incoming.accept()).await else {
            info!(%remote, "a client's handshake took too long: its connection is dropped");
            return None;
        };
        let connection =
            accepted.inspect_err(|error| info!(%remote, %error, "a client's handshake failed")).ok()?;
        // The completed handshake proves that the address is the client's.
        handshake.prove();
        let close =
            |code: code::Session, reason: &[u8]| connection.quic.close(crate::wire::var(code.0), reason);
        let permit = self.admission.admit(remote.ip()).inspect_err(|crowded| {
            self.past.count_refused_of_client(*crowded);
            close(code::Session::UNAUTHORIZED, crowded.reason());
        });
        let permit = permit.ok()?;
        let place = self.access.place(remote.ip());
        if place.is_some() {
            // The receive window stays small until the client has proved an access right, for example by a token.
            connection.share_receive_window(Arc::new(WindowShare::new(0, None)));
        }
        let asked = tokio::select! {
            asked = self.tunnel(&connection) => asked,
            refusal = unproven::displaced(place.as_ref()) => {
                self.access.count(refusal);
                close(refusal.session_code(), refusal.to_string().as_bytes());
                return None;
            }
        };
        let tunnel = asked.inspect_err(|refused| {
            self.past.count_refused_request(refused);
            info!(%remote, refused = short(&refused.to_string()), "refused a client's WebTransport session");
        });
        let tunnel = tunnel.ok()?;
        drop(handshake);
        Some((self.begin_session(connection, None, tunnel, place), permit))
    }

    /// Accepts the WebTransport session of a client. Returns `None` for a client that uses plain QUIC.
    async fn tunnel(&self, connection: &Connection) -> Result<Option<Tunnel>, webtransport::SessionRefused> {
        if connection.protocol().is_none_or(|protocol| protocol != webtransport::ALPN) {
            return Ok(None);
        }
        let protocols: Vec<_> = self.config.drafts.iter().map(|draft| draft.protocol()).collect();
        let terms =
            SessionTerms { protocols: &protocols, origin: &|origin| self.config.origins.allow(origin) };
        let bind = |binding| connection.bind(binding, Tunnel::STREAMS);
        webtransport::accept(&connection.quic, &terms, bind).await.map(Some)
    }

    fn begin_session(
        self: &Arc<Self>,
        connection: Arc<Connection>,
        dialed: Option<Dialed>,
        tunnel: Option<Tunnel>,
        place: Option<unproven::UnprovenPlace>,
    ) -> Arc<RelaySession> {
        let hub = Arc::clone(&self.hub);
        let session = Arc::new(RelaySession::new(hub, &self.access, connection, dialed, tunnel, place));
        self.sessions.lock().insert(session.id(), Arc::clone(&session));
        // A session that began just before the drain may be missing in the list that `drain` has read, so it gets
        // GOAWAY here.
        if self.draining.load(Relaxed) {
            self.start_drain(&session);
        }
        session
    }

    /// Returns the part of the drain timeout that is reserved for telling peers that their sessions and connections are
    /// closed.
    fn last_words(&self) -> Duration {
        (self.config.drain_timeout / 4).clamp(*LAST_WORDS.start(), *LAST_WORDS.end())
    }

    fn start_drain(&self, session: &RelaySession) {
        // The successor is at this relay's address.
        let uri = self.config.goaway_uri.as_ref().filter(|_| !self.left.load(Relaxed));
        let uri = uri.map_or("", |uri| uri.as_str());
        session.start_drain(uri, self.config.drain_timeout);
    }

    async fn run_session(self: Arc<Self>, session: Arc<RelaySession>) {
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

    /// Waits until the successor needs nothing of this process any more. Objects may be on their way to it that have come
    /// to this process only.
    async fn until_link_is_served(&self) {
        let is_served = |session: &Arc<RelaySession>| !session.is_link() || session.is_served();
        while !self.sessions.lock().values().all(is_served) {
            time::sleep(LOOKS).await;
        }
    }

    /// Waits while the relay drains. It goes on if its successor ends.
    async fn until_undrained(&self) {
        while self.draining.load(Relaxed) {
            time::sleep(LOOKS).await;
        }
    }

    async fn until_idle(&self) {
        loop {
            let over = self.session_over.notified();
            // After a takeover, clients have a relay to move to without a pause, so none is closed before it leaves.
            let has_left = self.left.load(Relaxed);
            let may_leave = |session: &RelaySession| has_left && !session.is_dialed();
            let is_over =
                |session: &Arc<RelaySession>| session.is_link() || session.is_idle() && !may_leave(session);
            if self.sessions.lock().values().all(is_over) {
                return;
            }
            let _ = time::timeout(LOOKS, over).await;
        }
    }
}

/// Binds sockets for connections to other relays, one for each address family that is listened on. They use a different
/// port than the listen addresses, because a packet filter (gate) in front of the relay's port drops packets that only
/// servers send.
///
/// # Errors
/// Returns an error if no port is free.
pub fn outgoing_sockets(listen: &[SocketAddr]) -> Result<Vec<UdpSocket>, BindError> {
    let mut sockets: Vec<UdpSocket> = Vec::new();
    for is_ipv4 in [true, false] {
        let Some(addr) = listen.iter().find(|addr| addr.is_ipv4() == is_ipv4) else { continue };
        let bind = |port| transport::bind_socket(SocketAddr::new(addr.ip(), port));
        // The kernel engine handles a limited number of ports, so the IPv4 and the IPv6 socket share a port if
        // possible.
        let first = sockets.first().and_then(|socket| socket.local_addr().ok());
        let same = first.and_then(|first| bind(first.port()).ok());
        sockets.push(same.map_or_else(|| bind(0), Ok)?);
    }
    Ok(sockets)
}

#[cfg(test)]
mod tests;
