//! Sessions for applications: who asks for one gets a socket of a peer's pool, with a graft that both ends have agreed on for it.
//!
//! ```text
//! application    daemon                        daemon    application
//!                                                    <-- listen
//! open ------->  chooses a graft, a session
//!                Open -------------------------->
//!                <------------------------ Accept
//!                both change to the graft, and begin anew
//!                Go ---------------------------->
//!                <------------------------- Ready
//! <--- opened                                        --> accepted
//! ```
//!
//! So when an application gets its socket, the other one's takes what it sends, and nothing of whoever had the session before can come any
//! more. The connection of an application to the daemon is its session: when that ends, the session does. All of it runs in the thread that
//! holds the runtime, and never waits.

mod addresses;
mod changing;
mod desk;
mod door;
mod ending;
mod far;
pub mod keeper;
mod lease;
mod line;
mod opening;
mod places;
mod quality;
mod seat;
mod watch;
mod words;

use std::{
    collections::BTreeMap,
    io,
    path::Path,
    sync::mpsc::{Receiver, channel},
    time::{Duration, Instant},
};

use anyhow::Context as _;
use millrace_graft::message::Why;
use millrace_graft::packet::{
    Event, Peer, PeerStatus, Runtime, Settings,
    choose::{Offer, offers},
};
use millrace_graft_kernel::joint::Ends;
use tracing::{error, warn};

use self::{
    addresses::Addresses,
    desk::Desk,
    door::{Arrival, Caller, Door},
    far::{Far, Say},
    keeper::Keeper,
    lease::{Lease, SILENCE},
    places::Places,
    seat::Seat,
};

/// Between two looks at what is promised.
const LOOK: Duration = Duration::from_secs(1);

/// Of all peers of the settings.
pub struct Broker {
    door: Door,
    /// What was turned away or could not be taken since the last look.
    lost: Lost,
    /// Sessions that came to listeners, by users.
    accepted: Places,
    /// Applications, by a number that is used once.
    desks: BTreeMap<u64, Desk>,
    next_desk: u64,
    peers: Vec<Peer>,
    /// In the order of the peers.
    fars: Vec<Far>,
    seats: BTreeMap<Ends, Seat>,
    /// By their lives, which both ends have drawn at random.
    leases: BTreeMap<u64, Lease>,
    words: Receiver<(usize, Say)>,
    offers: Vec<Offer>,
    keeper: Keeper,
    addresses: Addresses,
    looked: Instant,
    /// Rounds of reports.
    reports: u64,
    /// What applications were told why they do not get it, by the reason.
    refusals: BTreeMap<String, u64>,
}

impl Broker {
    /// `None`: the settings have no peers, so nobody can ask for anything.
    ///
    /// # Errors
    /// A port of a pool is in use, or its address is not this host's.
    pub fn start(settings: &Settings, socket: &Path) -> anyhow::Result<Option<Self>> {
        if settings.peers.is_empty() {
            return Ok(None);
        }
        let (say, words) = channel();
        let (mut fars, mut seats) = (Vec::new(), BTreeMap::new());
        for (at, peer) in settings.peers.iter().enumerate() {
            let taken = |ends: &Ends| format!("peer {}: {} cannot be bound to", peer.name, ends.local);
            let control = peer.control().context("a peer has ports")?;
            fars.push(Far::new(at, &control, say.clone()).with_context(|| taken(&control))?);
            for (ends, _) in peer.seats() {
                seats.insert(ends, Seat::new(ends).with_context(|| taken(&ends))?);
            }
        }
        Ok(Some(Self {
            door: Door::open(socket)?,
            lost: Lost::default(),
            accepted: Places::of_users(accepted_of_user(settings)),
            desks: BTreeMap::new(),
            next_desk: 0,
            peers: settings.peers.clone(),
            fars,
            seats,
            leases: BTreeMap::new(),
            words,
            offers: offers(settings),
            keeper: Keeper::start().context("the keeper of sockets")?,
            addresses: Addresses::watch().context("this host's addresses")?,
            refusals: BTreeMap::new(),
            reports: 0,
            looked: Instant::now(),
        }))
    }

    /// Whether other settings leave the pools as they are.
    ///
    /// # Errors
    /// What cannot change.
    pub fn check(broker: Option<&Self>, settings: &Settings) -> Result<(), String> {
        let known = broker.map_or(&[][..], |broker| &broker.peers);
        let pool = |peer: &Peer| (peer.name.clone(), peer.ends.clone(), peer.cipher, peer.protocol);
        match known.iter().map(pool).eq(settings.peers.iter().map(pool)) {
            true => Ok(()),
            false => {
                Err("peers, their addresses, ports, ciphers and protocols do not change while it runs"
                    .to_owned())
            }
        }
    }

    /// Other users, limits and grafts, for what is asked from now on.
    pub fn apply(&mut self, settings: &Settings) {
        self.peers.clone_from(&settings.peers);
        self.offers = offers(settings);
        self.accepted.set_of_user(accepted_of_user(settings));
    }

    /// Does what there is to do; to be called all the time. `events`: what has happened to the runtime's sessions since the last time.
    pub fn step(&mut self, runtime: &mut Runtime, events: &[Event]) {
        if !self.keeper.is_ready() || events.iter().any(|event| matches!(event, Event::Detached { .. })) {
            self.keeper.guard(runtime.egress());
        }
        for event in events {
            self.happened(runtime, event);
        }
        while let Ok((peer, say)) = self.words.try_recv() {
            self.hear(runtime, peer, say);
        }
        self.welcome();
        self.read_desks(runtime);
        if self.addresses.have_changed() {
            self.look_at_addresses(runtime);
        }
        let now = Instant::now();
        self.tick_leases(runtime, now);
        if now >= self.looked + LOOK {
            self.looked = now;
            self.report(runtime);
            self.look_at_quality(runtime);
            self.look_at_peers(runtime);
            self.rest(runtime);
            self.look_at_keeper(runtime);
            self.desks.retain(|_, desk| !desk.is_tired(now));
            std::mem::take(&mut self.lost).tell();
        }
    }

    pub fn status(&self) -> Vec<PeerStatus> {
        let each = self.peers.iter().zip(&self.fars).enumerate().map(|(at, (peer, far))| {
            let path = far.path();
            PeerStatus {
                name: peer.name.clone(),
                remote: peer.control().map(|ends| ends.remote.ip().to_string()).unwrap_or_default(),
                is_there: far.silence() < SILENCE,
                round_trip_us: path
                    .round_trip
                    .map(|time| u64::try_from(time.as_micros()).unwrap_or(u64::MAX)),
                loss_percent: path.loss.map(|loss| loss * 100.0),
                seats: peer.seats().count(),
                lent: self.leases.values().filter(|lease| lease.peer == at).count(),
                opened: far.opened,
            }
        });
        each.collect()
    }

    /// Requests of applications that were refused, by the reason.
    pub fn refusals(&self) -> BTreeMap<String, u64> {
        self.refusals.clone()
    }

    /// Those who have come in.
    fn welcome(&mut self) {
        // As many as the kernel keeps for us.
        for _ in 0..64 {
            let peers = &self.peers;
            let is_named =
                |caller: &Caller| peers.iter().any(|peer| peer.allows(caller.user, &caller.groups));
            match self.door.accept(is_named) {
                Ok(None) => return,
                Ok(Some(Arrival::Application(line, caller))) => {
                    self.add_desk(Desk::new(line, caller));
                }
                Ok(Some(Arrival::TurnedAway(caller))) => {
                    *self.refusals.entry(Why::Exhausted.name().to_owned()).or_default() += 1;
                    self.lost.turned_away += 1;
                    self.lost.user = caller.user;
                }
                Err(error) => {
                    self.lost.error = Some(error);
                    return;
                }
            }
        }
    }

    /// Another one has to know all of it.
    fn look_at_keeper(&mut self, runtime: &mut Runtime) {
        if self.keeper.is_alive() {
            return;
        }
        error!("the keeper of sockets has ended; another one is started");
        match Keeper::start() {
            Ok(keeper) => self.keeper = keeper,
            Err(error) => return error!("the keeper of sockets: {error}"),
        }
        self.keeper.guard(runtime.egress());
        for (ends, seat) in &self.seats {
            seat.lent().into_iter().for_each(|socket| self.keeper.keep(ends, socket));
        }
    }

    fn add_desk(&mut self, desk: Desk) -> u64 {
        self.next_desk += 1;
        self.desks.insert(self.next_desk, desk);
        self.next_desk
    }
}

/// What strangers bring about is said once a second, and not each time.
#[derive(Default)]
struct Lost {
    turned_away: u64,
    /// The last one.
    user: u32,
    error: Option<io::Error>,
}

impl Lost {
    fn tell(self) {
        if self.turned_away > 0 {
            let (connections, user) = (self.turned_away, self.user);
            warn!(
                connections,
                user, "applications were turned away: this user has all connections that it may have"
            );
        }
        if let Some(error) = self.error {
            // Mostly for want of descriptors.
            error!("applications cannot connect: {error}");
        }
    }
}

/// Twice as many as a user may have sessions: one that is over keeps its connection for some moments.
fn accepted_of_user(settings: &Settings) -> usize {
    2 * settings.peers.iter().map(|peer| peer.sessions_per_user).sum::<usize>()
}
