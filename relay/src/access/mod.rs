//! Who may do what: rules, tokens, certificates, budgets; decisions, and the rights that they make.
//!
//! | module | what it is |
//! | --- | --- |
//! | [`pattern`], [`authority`], [`rules`] | what the operator allows |
//! | [`keys`], [`token`], [`cat`], [`jwt`] | tokens, to what they grant |
//! | [`grant`] | actions, and what a token allows |
//! | [`policy`] | decisions |
//! | [`rights`] | what was decided, while it lasts |
//! | [`budget`], [`client`] | how much sessions and clients may use |
//! | [`unproven`] | sessions without a right |
//!
//! Files are read elsewhere. A change of any of them makes a new [`Policy`], under which all rights are decided anew.

pub mod authority;
pub mod budget;
pub mod cat;
pub mod certificate;
pub mod client;
pub mod grant;
pub mod jwt;
pub mod keys;
mod parts;
pub mod pattern;
pub mod policy;
mod recognise;
pub mod refusal;
pub mod rights;
pub mod rules;
pub mod token;
pub mod unproven;

use std::{
    collections::{BTreeMap, HashMap},
    net::IpAddr,
    sync::{Arc, Weak},
};

use millrace_base::networks::{self, Network};
use millrace_moq::tracks::account;
use millrace_transport as transport;
use parking_lot::{Mutex, RwLock};
use tokio::sync::watch;

pub use self::{
    authority::Authority,
    budget::{Budget, Limits, Share},
    policy::Policy,
    refusal::{Refusal, TokenError},
    rules::{Peer, Principal, Rule},
    token::Requirements,
    unproven::Unproven,
};
use self::{budget::Usage, client::Client};

/// The authoriser of a relay.
pub struct Access {
    policy: RwLock<Arc<Policy>>,
    version: watch::Sender<u64>,
    limits: Limits,
    /// By address or network.
    clients: Mutex<Clients>,
    unproven: Arc<Unproven>,
    /// The part of engine `kernel`'s streams that is whoever's comes first, beyond its share.
    kernel_streams: Arc<transport::Share>,
    /// The files of the settings that could not be read the last time.
    unread: Mutex<Vec<Unread>>,
    refused: Mutex<BTreeMap<&'static str, u64>>,
}

#[derive(Default)]
struct Clients {
    /// Clients that have sessions, and the networks that they are in.
    present: HashMap<Network, Weak<Client>>,
    /// Of those that have sessions, or groups in the cache.
    cache: HashMap<Network, Weak<account::Share>>,
}

/// A setting whose file could not be read, or used, when it was read last.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unread {
    /// The setting and its file.
    pub what: String,
    pub reason: String,
}

/// Use by a client, or by all clients of a network together, for the operator.
#[derive(Clone, Copy, Debug)]
pub struct ClientUse {
    pub network: Network,
    pub requests: u64,
    pub refused: u64,
    pub tracks: u64,
    pub cache_bytes: u64,
    pub fetched_bytes: u64,
    pub receive_bytes: u64,
}

impl Access {
    pub fn new(policy: Policy, limits: Limits) -> Arc<Self> {
        Arc::new(Self {
            policy: RwLock::new(Arc::new(policy)),
            version: watch::Sender::new(0),
            limits,
            clients: Mutex::default(),
            unproven: Unproven::new(limits.unproven),
            kernel_streams: Arc::new(transport::Share::new(limits.network.kernel_streams, None)),
            unread: Mutex::default(),
            refused: Mutex::default(),
        })
    }

    /// Returns what sessions of a client may take of engine `kernel`'s streams: the client's share, and then what everybody shares.
    pub(crate) fn kernel_streams(&self, client: &Client) -> [Arc<transport::Share>; 2] {
        [Arc::clone(&client.kernel_streams), Arc::clone(&self.kernel_streams)]
    }

    /// Anyone may do anything.
    pub fn open() -> Arc<Self> {
        Self::new(Policy::default(), Limits::default())
    }

    /// From now on, for rights that are in use too.
    pub fn set_policy(&self, mut policy: Policy) {
        self.version.send_modify(|version| {
            *version += 1;
            policy.version = *version;
            *self.policy.write() = Arc::new(policy);
        });
    }

    pub fn policy(&self) -> Arc<Policy> {
        Arc::clone(&self.policy.read())
    }

    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    fn versions(&self) -> watch::Receiver<u64> {
        self.version.subscribe()
    }

    /// What a new session uses.
    pub fn session(&self) -> Arc<Usage> {
        Usage::new(self.limits.session)
    }

    /// Use by the sessions of this client together, within that of its networks.
    fn client(&self, address: IpAddr) -> Arc<Client> {
        let levels: Vec<_> = networks::levels(address).collect();
        let clients = &mut *self.clients.lock();
        let of_level = |wider: Option<Arc<Client>>, (network, times): &(Network, usize)| {
            Some(self.client_at(clients, *network, *times as u64, wider))
        };
        let client = levels.iter().rev().fold(None, of_level);
        client.unwrap_or_else(Client::unlimited) // an address has levels
    }

    /// Use at one level: by a client, or by a network, within a wider one.
    fn client_at(
        &self,
        Clients { present, cache }: &mut Clients,
        network: Network,
        times: u64,
        within: Option<Arc<Client>>,
    ) -> Arc<Client> {
        if let Some(client) = present.get(&network).and_then(Weak::upgrade) {
            return client;
        }
        // As many as there are sessions and groups at most.
        present.retain(|_, client| client.strong_count() > 0);
        cache.retain(|_, share| share.strong_count() > 0);
        let share = cache.get(&network).and_then(Weak::upgrade);
        let share = share.unwrap_or_else(|| {
            let around = within.as_ref().map(|wider| Arc::clone(&wider.cache));
            Arc::new(self.limits.of_network(times).1.of_cache(around))
        });
        cache.insert(network, Arc::downgrade(&share));
        let client = Client::new(&self.limits, times, share, within);
        present.insert(network, Arc::downgrade(&client));
        client
    }

    /// Returns the clients that have sessions, and the wider networks that several of them are in.
    pub fn clients(&self) -> (Vec<ClientUse>, Vec<ClientUse>) {
        let clients = self.clients.lock();
        let live = clients.present.iter().filter_map(|(network, client)| Some((*network, client.upgrade()?)));
        let (networks, clients): (Vec<_>, Vec<_>) = live.partition(|(_, client)| client.is_network());
        // One is held here.
        let crowded = networks.into_iter().filter(|(_, network)| Arc::strong_count(network) > 2);
        (sorted(clients.into_iter()), sorted(crowded))
    }

    /// Gives a session that has shown no right yet a place among these; `None` where nobody needs a right.
    pub fn place(&self, client: IpAddr) -> Option<unproven::Place> {
        (!self.policy().is_open()).then(|| self.unproven.enter(client))
    }

    /// The sessions that have shown no right.
    pub fn unproven(&self) -> &Arc<Unproven> {
        &self.unproven
    }

    /// Says what of the settings could not be read.
    pub fn set_unread(&self, unread: Vec<Unread>) {
        *self.unread.lock() = unread;
    }

    /// The files of the settings that could not be read the last time.
    pub fn unread(&self) -> Vec<Unread> {
        self.unread.lock().clone()
    }

    /// Returns how much of the settings could not be read when it was read last.
    pub fn unread_count(&self) -> usize {
        self.unread.lock().len()
    }

    pub(crate) fn count(&self, refusal: Refusal) {
        *self.refused.lock().entry(refusal.name()).or_default() += 1;
    }

    /// What was refused or ended, by reason.
    pub fn refused(&self) -> BTreeMap<&'static str, u64> {
        self.refused.lock().clone()
    }
}

fn sorted(all: impl Iterator<Item = (Network, Arc<Client>)>) -> Vec<ClientUse> {
    let mut all: Vec<_> = all.map(|(network, client)| ClientUse::new(network, &client)).collect();
    all.sort_unstable_by_key(|client| (client.network.address, client.network.length));
    all
}

impl ClientUse {
    fn new(network: Network, client: &Client) -> Self {
        Self {
            network,
            requests: client.usage.admitted(),
            refused: client.usage.refused(),
            tracks: client.usage.tracks(),
            cache_bytes: client.cache.bytes() as u64,
            fetched_bytes: client.fetched_bytes(),
            receive_bytes: client.receive.held(),
        }
    }
}

#[cfg(test)]
mod tests;
