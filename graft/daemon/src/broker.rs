//! Sessions for applications. An application that asks for a session gets a socket from the pool of a peer, with a
//! graft that both ends have agreed on for that session.
//!
//! ```text
//! application    daemon                        daemon    application
//!                                                    <-- listen
//! open ------->  chooses a graft, a session
//!                Open -------------------------->
//!                <------------------------ Accept
//!                both change to the graft, and restart it
//!                Go ---------------------------->
//!                <------------------------- Ready
//! <--- opened                                        --> accepted
//! ```
//!
//! An application gets its socket only when the other end's socket already receives. From then on no datagrams of the
//! socket's previous session can arrive. An application's connection to the daemon stands for its session: when the
//! connection ends, the session ends. The session broker runs in the thread that holds the runtime, and never blocks.

mod addresses;
mod changing;
mod client;
mod client_listener;
mod client_session;
mod connection;
mod ending;
mod line;
mod on_message;
mod opening;
mod peer_link;
mod peer_message;
mod places;
mod pooled_socket;
mod quality;
mod watch;
pub mod watchdog;

use std::{
    collections::BTreeMap,
    io,
    path::Path,
    sync::{
        Arc,
        mpsc::{Receiver, sync_channel},
    },
    time::{Duration, Instant},
};

use anyhow::Context as _;
use millrace_graft::packet::{
    HostKey, PacketEvent, PacketRuntime, PeerSetting, PeerStatus, Settings,
    choose::{Offer, offers},
};
use millrace_graft_kernel::packet::SessionEnds;
use millrace_messages::SessionRefusal;
use tracing::{error, warn};

use self::{
    addresses::Addresses,
    client::ClientConnection,
    client_listener::{ClientArrival, ClientListener, ClientProcess},
    client_session::{ClientSession, SILENCE},
    places::ClientPlaces,
    pooled_socket::PooledSocket,
    watchdog::SealWatchdog,
};
pub(crate) use self::{
    connection::PeerLinks,
    peer_link::{FIGURES, FromPeer, KnownPeers, ToPeer, receive},
    peer_message::{PeerEvent, PeerMessage},
};

/// Interval at which the quality of open sessions is checked against the requirements of their applications.
const LOOK: Duration = Duration::from_secs(1);
/// Capacity of the queue of messages from peers. A message that finds it full is dropped, and its sender repeats it.
const EVENTS: usize = 4096;

/// The session broker, which lends sockets of the peers' pools to applications.
///
/// [`Self::start`] binds the pools. The thread that holds the runtime then calls [`Self::step`] in a loop, with the
/// runtime's events since the last call, and [`Self::apply`] for changed settings that [`Self::check`] has accepted.
/// Nothing else changes the state of a session. The [module](self) shows how one is opened.
pub struct SessionBroker {
    /// The Unix socket that applications connect to. `None` if no peer has a pool, since no session can be opened then.
    client_listener: Option<ClientListener>,
    /// Connections of applications that were refused or could not be accepted since the last log line about them.
    lost: LostLog,
    /// Number and limit, by user, of the socket connections that the daemon creates to hand incoming
    /// sessions to listening applications.
    accepted: ClientPlaces,
    /// Connections of applications to this daemon, by connection numbers that are never used again.
    clients: BTreeMap<u64, ClientConnection>,
    next_client: u64,
    peers: Vec<PeerSetting>,
    host_key: Option<HostKey>,
    /// The daemons of the peers, in the order of `peers`.
    links: Arc<KnownPeers>,
    /// Pooled sockets of all peers, by the addresses of their sessions.
    sockets: BTreeMap<SessionEnds, PooledSocket>,
    /// Sessions by session ID, a random number that both ends know.
    sessions: BTreeMap<u64, ClientSession>,
    /// Events from the peers' daemons, each with the peer's number in `peers`.
    events: Receiver<(usize, PeerEvent)>,
    /// Grafts (lists of packet functions) that a session may use, with the services, such as retransmission, that each
    /// provides.
    offers: Vec<Offer>,
    /// The process that shuts sockets down if this daemon dies. `None` if no peer has a pool of sockets.
    watchdog: Option<SealWatchdog>,
    addresses: Addresses,
    /// Time of the latest check of all sessions, peers and connections, which runs every [`LOOK`].
    looked: Instant,
    /// Number of times that the periodic task that sends reports on sessions to the peers has run.
    reports: u64,
    /// Number of refused requests of applications, by the reason of the refusal.
    refusals: BTreeMap<String, u64>,
}

impl SessionBroker {
    /// Binds the pools. Returns `None` if the settings have no peers.
    ///
    /// # Errors
    /// A port of a pool is in use, or its address is not this host's.
    pub fn start(settings: &Settings, socket: &Path) -> anyhow::Result<Option<Self>> {
        if settings.peers.is_empty() {
            return Ok(None);
        }
        let (heard, events) = sync_channel(EVENTS);
        let names = settings.peers.iter().map(|peer| peer.name.clone()).collect();
        let links = Arc::new(KnownPeers::new(names, heard));
        let mut sockets = BTreeMap::new();
        for peer in &settings.peers {
            let taken =
                |ends: &SessionEnds| format!("peer {}: cannot bind a socket to {}", peer.name, ends.local);
            for (ends, _) in peer.pooled_sockets() {
                sockets.insert(ends, PooledSocket::new(ends).with_context(|| taken(&ends))?);
            }
        }
        // Without a pool no application gets a socket, so no process is needed that shuts sockets down.
        let watchdog = (!sockets.is_empty())
            .then(SealWatchdog::start)
            .transpose()
            .context("cannot start the watchdog process of lent sockets")?;
        Ok(Some(Self {
            client_listener: (!sockets.is_empty()).then(|| ClientListener::open(socket)).transpose()?,
            lost: LostLog::default(),
            accepted: ClientPlaces::for_users(accepted_of_user(settings)),
            clients: BTreeMap::new(),
            next_client: 0,
            peers: settings.peers.clone(),
            host_key: settings.host_key.clone(),
            links,
            sockets,
            sessions: BTreeMap::new(),
            events,
            offers: offers(settings),
            watchdog,
            addresses: Addresses::watch().context("cannot watch this host's addresses")?,
            refusals: BTreeMap::new(),
            reports: 0,
            looked: Instant::now(),
        }))
    }

    /// Checks that new settings leave the pools as they are.
    ///
    /// # Errors
    /// The error names the settings that cannot change while the daemon runs.
    pub fn check(broker: Option<&Self>, settings: &Settings) -> Result<(), String> {
        let known = broker.map_or(&[][..], |broker| &broker.peers);
        check_peers(known, broker.map(|broker| &broker.host_key), settings)
    }

    /// Returns the daemons of the peers, which the worker process that connects to them reports.
    pub(crate) fn links(&self) -> Arc<KnownPeers> {
        self.links.clone()
    }

    /// Applies changed users, limits and grafts of the settings to requests from now on.
    pub fn apply(&mut self, settings: &Settings) {
        self.peers.clone_from(&settings.peers);
        self.offers = offers(settings);
        self.accepted.set_of_user(accepted_of_user(settings));
    }

    /// Handles all pending requests, messages and timers of sessions. The thread calls this in a loop, with the
    /// `events` of the runtime since the last call.
    pub fn step(&mut self, runtime: &mut PacketRuntime, events: &[PacketEvent]) {
        let is_detached = events.iter().any(|event| matches!(event, PacketEvent::Detached { .. }));
        // BPF programs at egress that were attached again have new file descriptors, of which the watchdog process must
        // hold copies.
        if let Some(watchdog) = self.watchdog.as_mut().filter(|it| is_detached || !it.is_ready()) {
            watchdog.guard(runtime.egress());
        }
        for event in events {
            self.happened(runtime, event);
        }
        while let Ok((peer, heard)) = self.events.try_recv() {
            match heard {
                PeerEvent::Connected(exported) => self.connected(runtime, peer, &exported),
                PeerEvent::Said(say) => self.on_peer_message(runtime, peer, say),
            }
        }
        // The runtime's messages about session keys are sent to the daemon of the session's peer.
        for (peer, message) in runtime.take_key_messages() {
            let at = self.peers.iter().position(|known| known.name == peer);
            at.into_iter().for_each(|at| self.say(at, &PeerMessage::Keys { message }));
        }
        self.welcome();
        self.read_clients(runtime);
        if self.addresses.have_changed() {
            self.look_at_addresses(runtime);
        }
        let now = Instant::now();
        self.tick_sessions(runtime, now);
        if now >= self.looked + LOOK {
            self.looked = now;
            self.report(runtime);
            self.look_at_quality(runtime);
            self.look_at_peers(runtime);
            self.rest(runtime);
            self.look_at_watchdog(runtime);
            // Applications that keep an idle connection for too long are disconnected.
            self.clients.retain(|_, client| !client.is_tired(now));
            std::mem::take(&mut self.lost).tell();
        }
    }

    /// Returns the status of each peer, in the order of the settings.
    pub fn status(&self) -> Vec<PeerStatus> {
        let each = self.peers.iter().enumerate().map(|(at, peer)| {
            let path = self.links.path(at);
            PeerStatus {
                name: peer.name.clone(),
                remote: peer.daemons.remote.ip().to_string(),
                is_there: self.links.is_there(at, SILENCE),
                trouble: self.links.trouble(at),
                round_trip_us: path
                    .round_trip
                    .map(|time| u64::try_from(time.as_micros()).unwrap_or(u64::MAX)),
                loss_percent: path.loss.map(|loss| loss * 100.0),
                pooled_sockets: peer.pooled_sockets().count(),
                lent: self.sessions.values().filter(|session| session.peer == at).count(),
                opened: self.links.opened(at),
            }
        });
        each.collect()
    }

    /// Returns the number of refused requests of applications, by reason of the refusal.
    pub fn refusals(&self) -> BTreeMap<String, u64> {
        self.refusals.clone()
    }

    /// Accepts the applications that wait in the Unix socket's queue.
    fn welcome(&mut self) {
        // One call accepts at most as many connections as the socket's backlog holds, so that sessions are not delayed.
        for _ in 0..64 {
            let peers = &self.peers;
            let is_named =
                |caller: &ClientProcess| peers.iter().any(|peer| peer.allows(caller.user, &caller.groups));
            let Some(client_listener) = &mut self.client_listener else { return };
            match client_listener.accept(is_named) {
                Ok(None) => return,
                Ok(Some(ClientArrival::Application(line, caller))) => {
                    self.add_client(ClientConnection::new(line, caller));
                }
                Ok(Some(ClientArrival::TurnedAway(caller))) => {
                    *self.refusals.entry(SessionRefusal::Exhausted.name().to_owned()).or_default() += 1;
                    self.lost.turned_away += 1;
                    self.lost.user = caller.user;
                }
                Err(error) => {
                    // An error such as a lack of descriptors may persist, so the loop stops at the first connection
                    // that cannot be accepted.
                    self.lost.error = Some(error);
                    return;
                }
            }
        }
    }

    /// Starts another watchdog process if the old one has ended, and gives the new one descriptors of the BPF programs
    /// that encrypt datagrams, and of the sockets that applications use.
    fn look_at_watchdog(&mut self, runtime: &mut PacketRuntime) {
        if self.watchdog.as_mut().is_none_or(SealWatchdog::is_alive) {
            return;
        }
        error!("the watchdog process for applications' sockets has ended; another one is started");
        match SealWatchdog::start() {
            Ok(mut watchdog) => {
                watchdog.guard(runtime.egress());
                for (ends, socket) in &self.sockets {
                    socket.lent().into_iter().for_each(|socket| watchdog.keep(ends, socket));
                }
                self.watchdog = Some(watchdog);
            }
            Err(error) => error!("cannot start a new watchdog process for applications' sockets: {error}"),
        }
    }

    fn add_client(&mut self, client: ClientConnection) -> u64 {
        self.next_client += 1;
        self.clients.insert(self.next_client, client);
        self.next_client
    }
}

/// Checks that new settings leave the peers as they are, and this host's key.
///
/// # Errors
/// The error names the settings that cannot change while the daemon runs.
pub(crate) fn check_peers(
    known: &[PeerSetting],
    host_key: Option<&Option<HostKey>>,
    settings: &Settings,
) -> Result<(), String> {
    let pool = |peer: &PeerSetting| {
        let PeerSetting { name, trust, daemons, ends, cipher, .. } = peer.clone();
        (name, trust, daemons, ends, cipher)
    };
    let is_same_host = host_key.is_none_or(|host_key| *host_key == settings.host_key);
    match known.iter().map(pool).eq(settings.peers.iter().map(pool)) {
        true if is_same_host => Ok(()),
        true => Err("[agreement] cannot change while the daemon runs".to_owned()),
        false => {
            Err("peers, their keys, addresses, ports and ciphers cannot change while the daemon runs"
                .to_owned())
        }
    }
}

/// Connections of applications that were refused or could not be accepted. They are logged once a second, so that
/// unauthorized users cannot flood the log.
#[derive(Default)]
struct LostLog {
    turned_away: u64,
    /// User of the latest connection that was refused.
    user: u32,
    error: Option<io::Error>,
}

impl LostLog {
    fn tell(self) {
        if self.turned_away > 0 {
            let connections = self.turned_away;
            let user = self.user;
            warn!(
                connections,
                user,
                "connections of applications were refused, since their user has reached its limit of connections"
            );
        }
        if let Some(error) = self.error {
            // Accepting a connection fails mostly because this process has no free file descriptors.
            error!("connections of applications cannot be accepted: {error}");
        }
    }
}

/// Returns the limit of a user's accepted connections: twice its sessions, since the connection of an ended session
/// stays open for up to some seconds.
fn accepted_of_user(settings: &Settings) -> usize {
    2 * settings.peers.iter().map(|peer| peer.sessions_per_user).sum::<usize>()
}
