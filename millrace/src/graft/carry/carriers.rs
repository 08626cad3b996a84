//! Carriers that are there, and what the kernel is told of them.

use std::{
    collections::{BTreeMap, HashMap},
    net::{IpAddr, UdpSocket},
    sync::Arc,
    time::{Duration, Instant},
};

use millrace_graft::{settings::Peer, status};
use parking_lot::Mutex;
use tokio::sync::watch;
use tracing::{info, warn};

use super::{hooks::Hooks, table::Table};

/// How often it is looked whether a suspect carries again.
const LOOK: Duration = Duration::from_millis(50);
/// Silence that is none, however short the round trip.
const SUSPECT_LEAST: Duration = Duration::from_millis(300);

/// One connection to a peer's broker, both of which have proved who they are.
pub struct Carrier {
    pub connection: quinn::Connection,
    pub peer: String,
    /// Of the other broker: another after each of its starts.
    pub run: u64,
    /// Hosts that are reached by it.
    pub addresses: Vec<IpAddr>,
}

impl Carrier {
    pub fn is_closed(&self) -> bool {
        self.connection.close_reason().is_some()
    }

    /// After which silence means something.
    pub fn patience(&self) -> Duration {
        (self.connection.rtt() * 3).max(SUSPECT_LEAST)
    }

    /// Another one whenever something has come.
    pub fn heard(&self) -> u64 {
        self.connection.stats().udp_rx.datagrams
    }
}

pub struct Carriers {
    hooks: Arc<Hooks>,
    table: Arc<Table>,
    peers: Mutex<BTreeMap<String, State>>,
    connections: Mutex<HashMap<String, u64>>,
}

struct State {
    settings: Peer,
    current: watch::Sender<Option<Arc<Carrier>>>,
    is_suspect: bool,
    why: String,
    since: Instant,
}

impl State {
    fn new(settings: Peer) -> Self {
        let why = match settings.carry {
            Some(_) => "it is being called".to_owned(),
            None => "it has not called".to_owned(),
        };
        Self { settings, current: watch::Sender::new(None), is_suspect: false, why, since: Instant::now() }
    }

    fn live(&self) -> Option<Arc<Carrier>> {
        self.current.borrow().clone().filter(|carrier| !carrier.is_closed())
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
    pub fn new(hooks: Arc<Hooks>, table: Arc<Table>) -> Self {
        Self { hooks, table, peers: Mutex::default(), connections: Mutex::default() }
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
            peer.all_addresses().for_each(|address| self.hooks.set_peer(address, near(address), false));
            states.insert(peer.name.clone(), State::new(peer.clone()));
        }
    }

    fn forget(&self, state: &State) {
        state.settings.all_addresses().for_each(|address| self.hooks.forget_peer(address));
        if let Some(carrier) = state.current.borrow().as_ref() {
            carrier.addresses.iter().for_each(|address| self.hooks.forget_peer(*address));
            carrier.connection.close(0_u32.into(), b"the settings have changed");
        }
    }

    /// In the place of what was there. `None`: the settings do not name the peer any more.
    pub fn add(
        &self,
        peer: &str,
        connection: quinn::Connection,
        run: u64,
        is_called: bool,
    ) -> Option<Arc<Carrier>> {
        let mut states = self.peers.lock();
        let state = states.get_mut(peer)?;
        let mut addresses: Vec<_> = state.settings.all_addresses().collect();
        let remote = connection.remote_address().ip().to_canonical();
        if !is_called && !addresses.contains(&remote) && addresses.is_empty() {
            addresses.push(remote);
        }
        let carrier = Arc::new(Carrier { connection, peer: peer.to_owned(), run, addresses });
        state.current.send_replace(Some(carrier.clone()));
        (state.is_suspect, state.since) = (false, Instant::now());
        state.why.clear();
        info!(peer, "a carrier is warm");
        self.tell(state);
        Some(carrier)
    }

    pub fn remove(&self, carrier: &Arc<Carrier>, why: String) {
        let mut states = self.peers.lock();
        let Some(state) = states.get_mut(&carrier.peer) else { return };
        let is_current = state.current.borrow().as_ref().is_some_and(|current| Arc::ptr_eq(current, carrier));
        if is_current {
            warn!(peer = carrier.peer, "the carrier is gone: {why}");
            state.current.send_replace(None);
            (state.why, state.since) = (why, Instant::now());
            for address in &carrier.addresses {
                self.hooks.set_peer(*address, near(*address), false);
            }
        }
    }

    /// There is none, for this reason.
    pub fn lacks(&self, peer: &str, why: String) {
        let mut states = self.peers.lock();
        let Some(state) = states.get_mut(peer).filter(|state| state.live().is_none()) else { return };
        if state.why != why {
            info!(peer, "no carrier: {why}");
            (state.why, state.since) = (why, Instant::now());
        }
    }

    pub fn has_live(&self, peer: &str) -> bool {
        self.peers.lock().get(peer).is_some_and(|state| state.live().is_some())
    }

    pub fn to(&self, address: IpAddr) -> Option<Arc<Carrier>> {
        let states = self.peers.lock();
        let mut live = states.values().filter_map(State::live);
        live.find(|carrier| carrier.addresses.contains(&address))
    }

    /// The peer's carriers as they come and go.
    pub fn watch(&self, peer: &str) -> Option<watch::Receiver<Option<Arc<Carrier>>>> {
        self.peers.lock().get(peer).map(|state| state.current.subscribe())
    }

    /// Whether the peer's key stands for this address.
    pub fn stands_for(&self, peer: &str, address: IpAddr) -> bool {
        self.peers.lock().get(peer).is_some_and(|state| state.settings.addresses.contains(&address))
    }

    pub fn count(&self, peer: &str) -> Counted<'_> {
        *self.connections.lock().entry(peer.to_owned()).or_default() += 1;
        Counted(self, peer.to_owned())
    }

    /// Nothing has come back: no more connections, until something does.
    pub fn suspect(self: &Arc<Self>, carrier: &Arc<Carrier>) {
        if !self.set_suspect(carrier, true) {
            return;
        }
        warn!(peer = carrier.peer, "the carrier does not carry: connections go in place");
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
        let Some(state) = states.get_mut(&carrier.peer) else { return false };
        let is_current = state.live().is_some_and(|current| Arc::ptr_eq(&current, carrier));
        if !is_current || state.is_suspect == is_suspect {
            return false;
        }
        (state.is_suspect, state.since) = (is_suspect, Instant::now());
        self.tell(state);
        true
    }

    /// After what changes whether there is room for more connections.
    pub fn refresh(&self) {
        self.peers.lock().values().for_each(|state| self.tell(state));
    }

    fn tell(&self, state: &State) {
        let Some(carrier) = state.live() else { return };
        let is_warm = !state.is_suspect && !self.table.is_full();
        for address in &carrier.addresses {
            self.hooks.set_peer(*address, near(*address), is_warm);
        }
    }

    pub fn status(&self) -> Vec<status::Carrier> {
        let connections = self.connections.lock().clone();
        let states = self.peers.lock();
        let status = |(name, state): (&String, &State)| status::Carrier {
            connections: connections.get(name).copied().unwrap_or_default(),
            ..self.status_of(name, state)
        };
        states.iter().map(status).collect()
    }

    fn status_of(&self, name: &str, state: &State) -> status::Carrier {
        let (age_s, peer) = (state.since.elapsed().as_secs_f64(), name.to_owned());
        let Some(carrier) = state.live() else {
            let addresses = state.settings.all_addresses().collect();
            let (state, detail) = ("cold".to_owned(), state.why.clone());
            return status::Carrier { peer, state, detail, age_s, addresses, ..status::Carrier::default() };
        };
        let (state, detail) = match (state.is_suspect, self.table.is_full()) {
            (true, _) => ("suspect", "nothing comes back"),
            (false, true) => ("full", "as many connections are carried as may be"),
            (false, false) => ("warm", ""),
        };
        let stats = carrier.connection.stats();
        let rtt_us = carrier.connection.rtt().as_micros().try_into().unwrap_or(u64::MAX);
        status::Carrier {
            peer,
            state: state.to_owned(),
            detail: detail.to_owned(),
            age_s,
            addresses: carrier.addresses.clone(),
            rtt_us,
            window_bytes: stats.path.cwnd,
            mtu: stats.path.current_mtu,
            sent_packets: stats.path.sent_packets,
            lost_packets: stats.path.lost_packets,
            sent_bytes: stats.udp_tx.bytes,
            received_bytes: stats.udp_rx.bytes,
            connections: 0,
        }
    }
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
