//! Carriers that are there, which of them is used, and what the kernel is told of them.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    net::{IpAddr, UdpSocket},
    sync::Arc,
    time::{Duration, Instant},
};

use millrace_graft::{
    settings::{Kind, Peer},
    status,
};
use millrace_kernel::prefix::Prefix;
use parking_lot::Mutex;
use tokio::sync::watch;
use tracing::{info, warn};

use super::{
    carrier::{Carrier, Far, Way},
    gateway::{Gateway, networks_of},
    hooks::Hooks,
    socket::Crowd,
    table::Table,
};

/// How often it is looked whether a suspect carries again.
const LOOK: Duration = Duration::from_millis(50);

pub struct Carriers {
    hooks: Arc<Hooks>,
    gateway: Option<Arc<Gateway>>,
    table: Arc<Table>,
    peers: Mutex<BTreeMap<String, State>>,
    connections: Mutex<HashMap<String, u64>>,
}

struct State {
    settings: Peer,
    all: Vec<Arc<Carrier>>,
    /// Hosts that were reached by the one that came last.
    latest: Vec<IpAddr>,
    /// Addresses of this host to which its carriers have come.
    come_to: BTreeSet<IpAddr>,
    /// The best of them.
    current: watch::Sender<Option<Arc<Carrier>>>,
    /// Why there is none, by way.
    why: BTreeMap<Way, String>,
    since: Instant,
    /// Connections of pools that the peer has made.
    served: Arc<Crowd>,
}

impl State {
    fn new(settings: Peer) -> Self {
        let (all, latest, come_to) = (Vec::new(), Vec::new(), BTreeSet::new());
        let (current, why, since) = (watch::Sender::new(None), BTreeMap::new(), Instant::now());
        Self { settings, all, latest, come_to, current, why, since, served: Arc::default() }
    }

    /// Of its hosts: no more than it has carriers, but for the one that has gone. It may call from another address each time.
    fn addresses(&self) -> impl Iterator<Item = IpAddr> {
        let carried = self.all.iter().flat_map(|carrier| &carrier.addresses);
        self.settings.all_addresses().chain(carried.chain(&self.latest).copied())
    }

    fn live(&self) -> Option<Arc<Carrier>> {
        self.current.borrow().clone().filter(|carrier| !carrier.is_closed())
    }

    fn networks(&self) -> Vec<String> {
        self.settings.networks.iter().map(ToString::to_string).collect()
    }

    fn why(&self) -> String {
        let all: Vec<_> = self.why.values().map(String::as_str).collect();
        match (all.is_empty(), self.settings.carry.is_empty(), self.served.count()) {
            (false, ..) => all.join("; "),
            (true, false, _) => "it is being called".to_owned(),
            (true, true, 0) => "it has not called".to_owned(),
            (true, true, _) => "its pool carries what it begins itself".to_owned(),
        }
    }

    /// The first in the settings' order that is not suspected. Those that are lose what they carry to it.
    fn choose(&mut self) {
        let live = self.all.iter().filter(|carrier| !carrier.is_closed());
        let best = live.min_by_key(|it| (it.is_suspect(), it.way.clone())).cloned();
        for carrier in &self.all {
            carrier.set_left(carrier.is_suspect() && best.as_ref().is_some_and(|best| !best.is_suspect()));
        }
        self.current.send_if_modified(|current| {
            let is_same = match (&*current, &best) {
                (Some(current), Some(best)) => Arc::ptr_eq(current, best),
                (None, None) => true,
                _ => false,
            };
            if !is_same {
                current.clone_from(&best);
            }
            !is_same
        });
    }
}

/// One of a carrier's connections, until this is dropped.
pub struct Counted<'a>(&'a Carriers, String);

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        if let Some(count) = self.0.connections.lock().get_mut(&self.1) {
            *count -= 1;
        }
    }
}

impl Carriers {
    pub fn new(hooks: Arc<Hooks>, gateway: Option<Arc<Gateway>>, table: Arc<Table>) -> Self {
        Self { hooks, gateway, table, peers: Mutex::default(), connections: Mutex::default() }
    }

    /// These and no others. Carriers to others are closed; those that stay go on.
    pub fn set_peers(&self, peers: &[Peer]) {
        let mut states = self.peers.lock();
        states.retain(|name, state| {
            let stays = peers.iter().any(|peer| peer.name == *name && peer == &state.settings);
            if !stays {
                self.forget(state);
            }
            stays
        });
        for peer in peers.iter().filter(|peer| !states.contains_key(&peer.name)).collect::<Vec<_>>() {
            states.insert(peer.name.clone(), State::new(peer.clone()));
        }
        self.tell(&states, false);
    }

    fn forget(&self, state: &State) {
        state.all.iter().for_each(|carrier| carrier.close("the settings have changed"));
        state.served.sever();
    }

    /// In the place of what was there by the same way. `None`: the settings do not name the peer any more.
    pub fn add(&self, mut carrier: Carrier) -> Option<Arc<Carrier>> {
        let mut states = self.peers.lock();
        let state = states.get_mut(&carrier.far.peer)?;
        carrier.addresses = state.settings.all_addresses().collect();
        if !carrier.way.is_called() && carrier.addresses.is_empty() {
            carrier.addresses.push(carrier.far.remote);
        }
        state.latest.clone_from(&carrier.addresses);
        state.come_to.extend(carrier.far.local);
        let carrier = Arc::new(carrier);
        state.all.retain(|other| other.way != carrier.way);
        state.all.push(carrier.clone());
        state.why.remove(&carrier.way);
        state.choose();
        info!(peer = carrier.far.peer, "a carrier is warm: {}", carrier.way);
        self.tell(&states, false);
        Some(carrier)
    }

    pub fn remove(&self, carrier: &Arc<Carrier>, why: String) {
        let mut states = self.peers.lock();
        let Some(state) = states.get_mut(&carrier.far.peer) else { return };
        let count = state.all.len();
        state.all.retain(|other| !Arc::ptr_eq(other, carrier));
        // Another one came in its place.
        if state.all.len() == count {
            return;
        }
        warn!(peer = carrier.far.peer, "the carrier is gone: {}: {why}", carrier.way);
        state.why.insert(carrier.way.clone(), why);
        state.choose();
        if state.all.is_empty() {
            state.since = Instant::now();
        }
        self.tell(&states, false);
    }

    /// There is none by this way, for this reason.
    pub fn lacks(&self, peer: &str, way: &Way, why: String) {
        let mut states = self.peers.lock();
        let Some(state) = states.get_mut(peer) else { return };
        if state.why.get(way) != Some(&why) {
            info!(peer, "no carrier: {why}");
            state.why.insert(way.clone(), why);
        }
    }

    /// Whether no call is needed. A peer that has called by QUIC need not be called where it is called first.
    pub fn has_live(&self, peer: &str, way: &Way) -> bool {
        let stands_for = |other: &Way| other == way || (way.is_first_quic() && other.is_incoming_quic());
        let states = self.peers.lock();
        let all = states.get(peer).map_or(&[][..], |state| &state.all);
        all.iter().any(|carrier| stands_for(&carrier.way) && !carrier.is_closed())
    }

    /// Whether what one carrier of the peer cannot carry, another may.
    pub fn has_several(&self, peer: &str) -> bool {
        let states = self.peers.lock();
        let all = states.get(peer).map_or(&[][..], |state| &state.all);
        all.iter().filter(|carrier| !carrier.is_closed()).count() > 1
    }

    /// To the host with this address, or to the one that it is behind.
    pub fn to(&self, address: IpAddr) -> Option<Arc<Carrier>> {
        let states = self.peers.lock();
        let mut live = states.values().filter_map(State::live);
        let behind = || states.values().find(|state| state.settings.has_behind(address))?.live();
        live.find(|carrier| carrier.addresses.contains(&address)).or_else(behind)
    }

    /// The peer's best carrier, as it changes.
    pub fn watch(&self, peer: &str) -> Option<watch::Receiver<Option<Arc<Carrier>>>> {
        self.peers.lock().get(peer).map(|state| state.current.subscribe())
    }

    /// Where connections belong that a peer makes for its pools. `None`: the settings do not name it any more.
    pub fn served(&self, peer: &str) -> Option<Arc<Crowd>> {
        self.peers.lock().get(peer).map(|state| state.served.clone())
    }

    /// A connection of one of its pools has come.
    pub fn have_come_to(&self, far: &Far) {
        if let Some(state) = self.peers.lock().get_mut(&far.peer) {
            state.come_to.extend(far.local);
        }
    }

    /// Reports whether the peer reaches this address of this host over the network: one of its carriers has come to it.
    pub fn reach(&self, peer: &str, address: IpAddr) -> bool {
        self.peers.lock().get(peer).is_some_and(|state| state.come_to.contains(&address))
    }

    /// Whether the settings name this address as one of a peer's host.
    pub fn are_at(&self, address: IpAddr) -> bool {
        self.peers.lock().values().any(|state| state.settings.is_at(address))
    }

    /// Whether the peer's key stands for this address.
    pub fn stands_for(&self, peer: &str, address: IpAddr) -> bool {
        let stands_for = |peer: &Peer| peer.addresses.contains(&address) || peer.has_behind(address);
        self.peers.lock().get(peer).is_some_and(|state| stands_for(&state.settings))
    }

    pub fn count(&self, peer: &str) -> Counted<'_> {
        *self.connections.lock().entry(peer.to_owned()).or_default() += 1;
        Counted(self, peer.to_owned())
    }

    pub fn connections(&self, peer: &str) -> u64 {
        self.connections.lock().get(peer).copied().unwrap_or_default()
    }

    /// Nothing has come back: no more connections, until something does.
    pub fn suspect(self: &Arc<Self>, carrier: &Arc<Carrier>) {
        if !self.set_suspect(carrier, true) {
            return;
        }
        warn!(peer = carrier.far.peer, "the carrier does not carry: {}", carrier.way);
        let (carriers, carrier, heard) = (self.clone(), carrier.clone(), carrier.heard());
        tokio::spawn(async move {
            while carrier.heard() == heard && !carrier.is_closed() {
                tokio::time::sleep(LOOK).await;
            }
            carriers.set_suspect(&carrier, false);
        });
    }

    /// Returns whether it was otherwise.
    fn set_suspect(&self, carrier: &Arc<Carrier>, is_suspect: bool) -> bool {
        let mut states = self.peers.lock();
        let Some(state) = states.get_mut(&carrier.far.peer) else { return false };
        let is_there = state.all.iter().any(|other| Arc::ptr_eq(other, carrier));
        if !is_there || !carrier.set_suspect(is_suspect) {
            return false;
        }
        state.choose();
        self.tell(&states, false);
        true
    }

    /// After what changes whether there is room for more connections, or by which addresses peers are reached.
    pub fn refresh(&self) {
        self.tell(&self.peers.lock(), true);
    }

    /// Several peers may be at one address, behind a translator. `looks`: also by which of its addresses this host reaches them.
    fn tell(&self, states: &BTreeMap<String, State>, looks: bool) {
        let is_full = self.table.is_full();
        let (mut warm, mut networks) = (BTreeMap::<IpAddr, bool>::new(), BTreeMap::<Prefix, bool>::new());
        for state in states.values() {
            let carrier = state.live().filter(|carrier| !carrier.is_suspect() && !is_full);
            for address in state.addresses() {
                let is_warm = carrier.as_ref().is_some_and(|carrier| carrier.addresses.contains(&address));
                *warm.entry(address).or_default() |= is_warm;
            }
            for network in networks_of(&state.settings) {
                *networks.entry(network).or_default() |= carrier.is_some();
            }
        }
        self.hooks.set_peers(&warm, looks, near);
        self.gateway.iter().for_each(|gateway| gateway.set_peers(&networks));
    }

    /// Hosts with a broker, and whether a carrier to each is warm.
    pub fn warmth(&self) -> BTreeMap<IpAddr, bool> {
        let (mut warmth, is_full) = (BTreeMap::new(), self.table.is_full());
        for state in self.peers.lock().values() {
            let mut live = state.all.iter().filter(|carrier| !carrier.is_closed()).peekable();
            if live.peek().is_none() {
                state.settings.all_addresses().for_each(|at| _ = warmth.entry(at).or_default());
            }
            for carrier in live {
                let is_warm = !carrier.is_suspect() && !is_full;
                carrier.addresses.iter().for_each(|at| *warmth.entry(*at).or_default() |= is_warm);
            }
        }
        warmth
    }

    /// Of the peer with this address, or that it is behind: of several, that which is used.
    pub fn status_to(&self, address: IpAddr) -> Option<status::Carrier> {
        let states = self.peers.lock();
        let has = |state: &State| {
            let mut all = state.all.iter().filter(|carrier| !carrier.is_closed());
            all.any(|carrier| carrier.addresses.contains(&address))
                || state.settings.all_addresses().any(|at| at == address)
        };
        let behind = || states.iter().find(|(_, state)| state.settings.has_behind(address));
        let (name, state) = states.iter().find(|(_, state)| has(state)).or_else(behind)?;
        self.status_of(name, state).into_iter().next()
    }

    /// Those of each peer in the order in which they are used.
    pub fn status(&self) -> Vec<status::Carrier> {
        self.peers.lock().iter().flat_map(|(name, state)| self.status_of(name, state)).collect()
    }

    /// The first has the peer's connections.
    fn status_of(&self, name: &str, state: &State) -> Vec<status::Carrier> {
        let connections = self.connections.lock().get(name).copied().unwrap_or_default();
        let mut live: Vec<_> = state.all.iter().filter(|carrier| !carrier.is_closed()).collect();
        if live.is_empty() {
            let cold = status::Carrier {
                peer: name.to_owned(),
                state: "cold".to_owned(),
                detail: state.why(),
                age_s: state.since.elapsed().as_secs_f64(),
                addresses: state.settings.all_addresses().collect(),
                networks: state.networks(),
                connections,
                ..status::Carrier::default()
            };
            return vec![cold];
        }
        live.sort_by_key(|it| (it.is_suspect(), it.way.clone()));
        let row = |carrier: &Carrier| status::Carrier { networks: state.networks(), ..self.row(carrier) };
        let mut rows: Vec<_> = live.into_iter().map(|carrier| row(carrier)).collect();
        rows.iter_mut().take(1).for_each(|first| first.connections = connections);
        rows
    }

    fn row(&self, carrier: &Carrier) -> status::Carrier {
        let (state, detail) = match (carrier.is_suspect(), self.table.is_full()) {
            (true, _) => ("suspect", "nothing comes back"),
            (false, true) => ("full", "as many connections are carried as may be"),
            (false, false) => ("warm", ""),
        };
        status::Carrier { state: state.to_owned(), detail: detail.to_owned(), ..carrier.status() }
    }
}

/// The place of a kind among those of the settings: what is not among them comes last.
pub fn place(kinds: &[Kind], kind: Kind) -> usize {
    kinds.iter().position(|it| *it == kind).unwrap_or(kinds.len())
}

/// This host's address towards another; that of nobody if there is no way.
fn near(peer: IpAddr) -> IpAddr {
    let any: IpAddr = match peer {
        IpAddr::V4(_) => std::net::Ipv4Addr::UNSPECIFIED.into(),
        IpAddr::V6(_) => std::net::Ipv6Addr::UNSPECIFIED.into(),
    };
    let found = UdpSocket::bind((any, 0)).and_then(|socket| {
        socket.connect((peer, 9))?;
        Ok(socket.local_addr()?.ip())
    });
    found.unwrap_or(any)
}
