//! The present carriers (connections between brokers that tunnel TCP connections) to all peers, which of them is used
//! for each peer, and which of them the kernel knows.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    net::{IpAddr, UdpSocket},
    sync::Arc,
    time::{Duration, Instant},
};

use millrace_graft::{
    settings::{AgreementPeer, CarrierKind},
    status,
};
use millrace_kernel::prefix::Prefix;
use parking_lot::Mutex;
use tokio::sync::watch;
use tracing::{info, warn};

use super::{
    carrier::{CarrierPeer, CarrierRoute, PeerCarrier},
    gateway::{CarryGateway, networks_of},
    hooks::Hooks,
    socket::SocketGroup,
    table::TunnelTable,
};

/// Interval of checks whether anything has arrived on a carrier that is suspected to be dead.
const LOOK: Duration = Duration::from_millis(50);

/// The tunnel broker's carriers, by peer. A carrier is a connection between brokers that tunnels TCP connections.
pub struct Carriers {
    hooks: Arc<Hooks>,
    gateway: Option<Arc<CarryGateway>>,
    table: Arc<TunnelTable>,
    peers: Mutex<BTreeMap<String, PeerCarriersState>>,
    /// Number of tunnelled connections, by peer.
    connections: Mutex<HashMap<String, u64>>,
}

struct PeerCarriersState {
    settings: AgreementPeer,
    all: Vec<Arc<PeerCarrier>>,
    /// Addresses of the peer's hosts that the latest carrier reached.
    latest: Vec<IpAddr>,
    /// Addresses of this host to which the peer has made carriers.
    come_to: BTreeSet<IpAddr>,
    /// The preferred one of the peer's carriers, which new connections use.
    current: watch::Sender<Option<Arc<PeerCarrier>>>,
    /// Reasons why there is no carrier at present, by route.
    why: BTreeMap<CarrierRoute, String>,
    /// Time at which this host lost its last carrier to the peer. It is meaningless while there is one.
    since: Instant,
    /// Pool connections that the peer has made to this host.
    served: Arc<SocketGroup>,
}

impl PeerCarriersState {
    fn new(settings: AgreementPeer) -> Self {
        let all = Vec::new();
        let latest = Vec::new();
        let come_to = BTreeSet::new();
        let current = watch::Sender::new(None);
        let why = BTreeMap::new();
        let since = Instant::now();
        Self { settings, all, latest, come_to, current, why, since, served: Arc::default() }
    }

    /// Returns all addresses of the peer's hosts: those of the settings and of its carriers, and those of the latest
    /// carrier, which may have ended. The list stays bounded although the peer may connect from a new address each
    /// time.
    fn addresses(&self) -> impl Iterator<Item = IpAddr> {
        let carried = self.all.iter().flat_map(|carrier| &carrier.addresses);
        self.settings.all_addresses().chain(carried.chain(&self.latest).copied())
    }

    fn live(&self) -> Option<Arc<PeerCarrier>> {
        self.current.borrow().clone().filter(|carrier| !carrier.is_closed())
    }

    fn networks(&self) -> Vec<String> {
        self.settings.networks.iter().map(ToString::to_string).collect()
    }

    fn describe_error(&self) -> String {
        let all: Vec<_> = self.why.values().map(String::as_str).collect();
        match (all.is_empty(), self.settings.carry.is_empty(), self.served.count()) {
            (false, ..) => all.join("; "),
            (true, false, _) => "this host is calling the peer".to_owned(),
            (true, true, 0) => "the peer has not called this host".to_owned(),
            (true, true, _) => "the peer's pool carries only connections that begin there".to_owned(),
        }
    }

    /// Chooses the first carrier in the settings' order that is not suspected to be dead. Tunnelled connections on
    /// suspected carriers move to it.
    fn choose(&mut self) {
        let live = self.all.iter().filter(|carrier| !carrier.is_closed());
        // `false` sorts before `true`, so carriers that are suspected to be dead come last.
        let best = live.min_by_key(|it| (it.is_suspect(), it.way.clone())).cloned();
        for carrier in &self.all {
            // Connections stay on a carrier that is suspected to be dead if all other carriers are suspected, too.
            carrier.set_left(carrier.is_suspect() && best.as_ref().is_some_and(|best| !best.is_suspect()));
        }
        // Tasks that wait for a change of the preferred carrier wake up only if the chosen carrier has changed.
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

/// Counts one tunnelled connection with a peer until this value is dropped.
pub struct CarrierUse<'a>(&'a Carriers, String);

impl Drop for CarrierUse<'_> {
    fn drop(&mut self) {
        if let Some(count) = self.0.connections.lock().get_mut(&self.1) {
            *count -= 1;
        }
    }
}

impl Carriers {
    pub fn new(hooks: Arc<Hooks>, gateway: Option<Arc<CarryGateway>>, table: Arc<TunnelTable>) -> Self {
        Self { hooks, gateway, table, peers: Mutex::default(), connections: Mutex::default() }
    }

    /// Sets the list of peers. Carriers to peers that were removed or changed are closed, and all other carriers stay
    /// open.
    pub fn set_peers(&self, peers: &[AgreementPeer]) {
        let mut states = self.peers.lock();
        states.retain(|name, state| {
            let stays = peers.iter().any(|peer| peer.name == *name && peer == &state.settings);
            if !stays {
                self.forget(state);
            }
            stays
        });
        for peer in peers.iter().filter(|peer| !states.contains_key(&peer.name)).collect::<Vec<_>>() {
            states.insert(peer.name.clone(), PeerCarriersState::new(peer.clone()));
        }
        self.tell(&states, false);
    }

    fn forget(&self, state: &PeerCarriersState) {
        state.all.iter().for_each(|carrier| carrier.close("the settings have changed"));
        state.served.sever();
    }

    /// Adds a carrier, which replaces an existing one by the same route. Returns `None` if the settings do not name the
    /// peer any more.
    pub fn add(&self, mut carrier: PeerCarrier) -> Option<Arc<PeerCarrier>> {
        let mut states = self.peers.lock();
        let state = states.get_mut(&carrier.peer.name)?;
        carrier.addresses = state.settings.all_addresses().collect();
        // A peer that has connected to this host, and whose addresses the settings do not list, is reached at the
        // address that it connected from.
        if !carrier.way.is_called() && carrier.addresses.is_empty() {
            carrier.addresses.push(carrier.peer.remote);
        }
        state.latest.clone_from(&carrier.addresses);
        state.come_to.extend(carrier.peer.local);
        let carrier = Arc::new(carrier);
        state.all.retain(|other| other.way != carrier.way);
        state.all.push(carrier.clone());
        state.why.remove(&carrier.way);
        state.choose();
        info!(peer = carrier.peer.name, "a carrier to the peer is warm: {}", carrier.way);
        self.tell(&states, false);
        Some(carrier)
    }

    /// Removes a carrier that has ended for the reason `why`, and chooses the peer's preferred carrier again.
    pub fn remove(&self, carrier: &Arc<PeerCarrier>, why: String) {
        let mut states = self.peers.lock();
        let Some(state) = states.get_mut(&carrier.peer.name) else { return };
        let count = state.all.len();
        state.all.retain(|other| !Arc::ptr_eq(other, carrier));
        // Another carrier by the same route has already replaced the removed one.
        if state.all.len() == count {
            return;
        }
        warn!(peer = carrier.peer.name, "a carrier has ended: {}: {why}", carrier.way);
        state.why.insert(carrier.way.clone(), why);
        state.choose();
        if state.all.is_empty() {
            state.since = Instant::now();
        }
        self.tell(&states, false);
    }

    /// Records why there is no carrier by a route.
    pub fn lacks(&self, peer: &str, way: &CarrierRoute, why: String) {
        let mut states = self.peers.lock();
        let Some(state) = states.get_mut(peer) else { return };
        if state.why.get(way) != Some(&why) {
            info!(peer, "no carrier to the peer: {why}");
            state.why.insert(way.clone(), why);
        }
    }

    /// Reports whether this host need not connect by this route. If the peer has made a QUIC carrier to this host, the
    /// first QUIC route is not needed.
    pub fn has_live(&self, peer: &str, way: &CarrierRoute) -> bool {
        let stands_for =
            |other: &CarrierRoute| other == way || (way.is_first_quic() && other.is_incoming_quic());
        let states = self.peers.lock();
        let all = states.get(peer).map_or(&[][..], |state| &state.all);
        all.iter().any(|carrier| stands_for(&carrier.way) && !carrier.is_closed())
    }

    /// Reports whether the peer has several carriers, so that another one can replace one that fails.
    pub fn has_several(&self, peer: &str) -> bool {
        let states = self.peers.lock();
        let all = states.get(peer).map_or(&[][..], |state| &state.all);
        all.iter().filter(|carrier| !carrier.is_closed()).count() > 1
    }

    /// Returns the carrier to the host with this address, or to the gateway that serves the host's network.
    pub fn carrier_to(&self, address: IpAddr) -> Option<Arc<PeerCarrier>> {
        let states = self.peers.lock();
        let mut live = states.values().filter_map(PeerCarriersState::live);
        let behind = || states.values().find(|state| state.settings.has_behind(address))?.live();
        live.find(|carrier| carrier.addresses.contains(&address)).or_else(behind)
    }

    /// Returns a watch receiver for the peer's preferred carrier.
    pub fn watch(&self, peer: &str) -> Option<watch::Receiver<Option<Arc<PeerCarrier>>>> {
        self.peers.lock().get(peer).map(|state| state.current.subscribe())
    }

    /// Returns the set of all pool connections that a peer has made to this host, or `None` if the settings do not name
    /// the peer any more.
    pub fn served(&self, peer: &str) -> Option<Arc<SocketGroup>> {
        self.peers.lock().get(peer).map(|state| state.served.clone())
    }

    /// Records the local address at which a connection of one of the peer's pools has arrived.
    pub fn have_come_to(&self, peer: &CarrierPeer) {
        if let Some(state) = self.peers.lock().get_mut(&peer.name) {
            state.come_to.extend(peer.local);
        }
    }

    /// Reports whether the peer reaches this address of this host over the network: the peer has made a carrier to the
    /// address.
    pub fn reach(&self, peer: &str, address: IpAddr) -> bool {
        self.peers.lock().get(peer).is_some_and(|state| state.come_to.contains(&address))
    }

    /// Reports whether the settings name this address as a host of a peer.
    pub fn are_at(&self, address: IpAddr) -> bool {
        self.peers.lock().values().any(|state| state.settings.is_at(address))
    }

    /// Reports whether the peer's key authorizes connections of clients with this address.
    pub fn stands_for(&self, peer: &str, address: IpAddr) -> bool {
        let stands_for = |peer: &AgreementPeer| peer.addresses.contains(&address) || peer.has_behind(address);
        self.peers.lock().get(peer).is_some_and(|state| stands_for(&state.settings))
    }

    /// Counts one tunnelled connection with the peer until the returned value is dropped.
    pub fn count(&self, peer: &str) -> CarrierUse<'_> {
        *self.connections.lock().entry(peer.to_owned()).or_default() += 1;
        CarrierUse(self, peer.to_owned())
    }

    pub fn connections(&self, peer: &str) -> u64 {
        self.connections.lock().get(peer).copied().unwrap_or_default()
    }

    /// Marks a carrier on which an answer is overdue. It gets no more connections until the peer answers.
    pub fn suspect(self: &Arc<Self>, carrier: &Arc<PeerCarrier>) {
        if !self.set_suspect(carrier, true) {
            return;
        }
        warn!(
            peer = carrier.peer.name,
            "a carrier is suspected, since the peer does not answer on it: {}", carrier.way
        );
        let answers = carrier.answers();
        let carriers = self.clone();
        let carrier = carrier.clone();
        tokio::spawn(async move {
            // Any answer ends the suspicion.
            while carrier.answers() == answers && !carrier.is_closed() {
                tokio::time::sleep(LOOK).await;
            }
            carriers.set_suspect(&carrier, false);
        });
    }

    /// Sets whether a present carrier is suspected, and chooses the preferred carrier again. Returns whether anything
    /// has changed.
    fn set_suspect(&self, carrier: &Arc<PeerCarrier>, is_suspect: bool) -> bool {
        let mut states = self.peers.lock();
        let Some(state) = states.get_mut(&carrier.peer.name) else { return false };
        let is_there = state.all.iter().any(|other| Arc::ptr_eq(other, carrier));
        if !is_there || !carrier.set_suspect(is_suspect) {
            return false;
        }
        state.choose();
        self.tell(&states, false);
        true
    }

    /// Updates the kernel's list of peers. It is called after the addresses of peers may have changed, and when the
    /// table of tunnelled connections becomes full or has room again.
    pub fn refresh(&self) {
        self.tell(&self.peers.lock(), true);
    }

    /// Writes the list of peers to the kernel. Several peers may share an address behind a translator (NAT). If `looks`
    /// is set, the local address of the route to each peer is looked up again.
    fn tell(&self, states: &BTreeMap<String, PeerCarriersState>, looks: bool) {
        let is_full = self.table.is_full();
        let mut warm = BTreeMap::<IpAddr, bool>::new();
        let mut networks = BTreeMap::<Prefix, bool>::new();
        for state in states.values() {
            // While the table of tunnelled connections is full, the kernel is told that no carrier is ready ("warm"),
            // so that it redirects nothing.
            let carrier = state.live().filter(|carrier| !carrier.is_suspect() && !is_full);
            for address in state.addresses() {
                let is_warm = carrier.as_ref().is_some_and(|carrier| carrier.addresses.contains(&address));
                // An address counts as warm (ready to carry connections) if any peer has a carrier to it.
                *warm.entry(address).or_default() |= is_warm;
            }
            for network in networks_of(&state.settings) {
                *networks.entry(network).or_default() |= carrier.is_some();
            }
        }
        self.hooks.set_peers(&warm, looks, local_address);
        self.gateway.iter().for_each(|gateway| gateway.set_peers(&networks));
    }

    /// Returns the addresses of hosts with a tunnel broker, and whether a carrier to each of them is ready ("warm").
    pub fn warmth(&self) -> BTreeMap<IpAddr, bool> {
        let mut warmth = BTreeMap::new();
        let is_full = self.table.is_full();
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

    /// Returns the status of the carrier to the host with this address, or to the gateway that serves the host's
    /// network.
    pub fn status_to(&self, address: IpAddr) -> Option<status::CarrierStatus> {
        let states = self.peers.lock();
        let has = |state: &PeerCarriersState| {
            let mut all = state.all.iter().filter(|carrier| !carrier.is_closed());
            all.any(|carrier| carrier.addresses.contains(&address))
                || state.settings.all_addresses().any(|at| at == address)
        };
        let behind = || states.iter().find(|(_, state)| state.settings.has_behind(address));
        let (name, state) = states.iter().find(|(_, state)| has(state)).or_else(behind)?;
        self.status_of(name, state).into_iter().next()
    }

    /// Returns the status of all carriers. The carriers of one peer are in the order of preference.
    pub fn status(&self) -> Vec<status::CarrierStatus> {
        self.peers.lock().iter().flat_map(|(name, state)| self.status_of(name, state)).collect()
    }

    /// Returns the status of the carriers to a peer, the preferred one first. Only the first one shows the number of
    /// tunnelled connections with the peer.
    fn status_of(&self, name: &str, state: &PeerCarriersState) -> Vec<status::CarrierStatus> {
        let connections = self.connections.lock().get(name).copied().unwrap_or_default();
        let mut live: Vec<_> = state.all.iter().filter(|carrier| !carrier.is_closed()).collect();
        if live.is_empty() {
            let cold = status::CarrierStatus {
                peer: name.to_owned(),
                state: "cold".to_owned(),
                detail: state.describe_error(),
                age_s: state.since.elapsed().as_secs_f64(),
                addresses: state.settings.all_addresses().collect(),
                networks: state.networks(),
                connections,
                ..status::CarrierStatus::default()
            };
            return vec![cold];
        }
        live.sort_by_key(|it| (it.is_suspect(), it.way.clone()));
        let row =
            |carrier: &PeerCarrier| status::CarrierStatus { networks: state.networks(), ..self.row(carrier) };
        let mut rows: Vec<_> = live.into_iter().map(|carrier| row(carrier)).collect();
        rows.iter_mut().take(1).for_each(|first| first.connections = connections);
        rows
    }

    fn row(&self, carrier: &PeerCarrier) -> status::CarrierStatus {
        let (state, detail) = match (carrier.is_suspect(), self.table.is_full()) {
            (true, _) => ("suspect", "the peer does not answer"),
            (false, true) => ("full", "the limit of tunnelled connections is reached"),
            (false, false) => ("warm", ""),
        };
        status::CarrierStatus { state: state.to_owned(), detail: detail.to_owned(), ..carrier.status() }
    }
}

/// Returns the position of a kind of carrier (such as QUIC or TCP) in the settings' list of preference. A kind that is
/// not in the list comes last.
pub fn place(kinds: &[CarrierKind], kind: CarrierKind) -> usize {
    kinds.iter().position(|it| *it == kind).unwrap_or(kinds.len())
}

/// Returns the local address of the route to a peer, or the unspecified address if there is no route.
fn local_address(peer: IpAddr) -> IpAddr {
    let any: IpAddr = match peer {
        IpAddr::V4(_) => std::net::Ipv4Addr::UNSPECIFIED.into(),
        IpAddr::V6(_) => std::net::Ipv6Addr::UNSPECIFIED.into(),
    };
    let found = UdpSocket::bind((any, 0)).and_then(|socket| {
        // Connecting a UDP socket sends nothing. It only makes the kernel choose a route, so any port would do, such as
        // 9 (discard).
        socket.connect((peer, 9))?;
        Ok(socket.local_addr()?.ip())
    });
    found.unwrap_or(any)
}
