//! Access to a relay: rules, tokens, certificates and budgets, decisions, and the rights that follow from them.
//!
//! | module | content |
//! | --- | --- |
//! | [`pattern`], [`authority`], [`rules`] | the operator's rules |
//! | [`keys`], [`token`], [`cat`], [`jwt`] | tokens, their signatures and their claims |
//! | [`grant`] | actions, and the scopes that a token allows them in |
//! | [`policy`] | decisions by rules and tokens |
//! | [`rights`] | rights in use, which end when the decision changes |
//! | [`budget`], [`client`] | budgets of sessions, clients and networks |
//! | [`unproven`] | sessions that have shown no right |
//!
//! The caller reads the files of the settings. When one changes, it makes a new [`AccessPolicy`], and all rights in use
//! are decided again.
#![deny(missing_docs)]

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

use millrace_base::networks::{self, NetworkPrefix};
use millrace_moq::tracks::account;
use millrace_transport as transport;
use parking_lot::{Mutex, RwLock};
use tokio::sync::watch;

pub use self::{
    authority::RuleAuthority,
    budget::{Budget, BudgetLimits, ClientShare},
    policy::AccessPolicy,
    refusal::{AccessRefusal, TokenError},
    rules::{AccessRule, Principal, SessionPeer},
    token::Requirements,
    unproven::Unproven,
};
use self::{budget::BudgetUsage, client::AccessClient};

/// Decides what each client of a relay may do, by the policy in force, and counts what each client uses of its budgets.
pub struct Access {
    policy: RwLock<Arc<AccessPolicy>>,
    version: watch::Sender<u64>,
    limits: BudgetLimits,
    /// Clients that have sessions, and the networks of these clients, by address.
    clients: Mutex<AccessClients>,
    unproven: Arc<Unproven>,
    /// Limit on the number of streams that engine `kernel` forwards beyond the clients' own limits. All clients share
    /// it.
    kernel_streams: Arc<transport::WindowShare>,
    /// The settings whose files could not be read when the files were last read.
    unread: Mutex<Vec<UnreadSetting>>,
    refused: Mutex<BTreeMap<&'static str, u64>>,
}

#[derive(Default)]
struct AccessClients {
    /// Clients that have sessions, and the networks of these clients.
    present: HashMap<NetworkPrefix, Weak<AccessClient>>,
    /// Cache memory used per client, with its limit. The count is kept after the client's last session has ended, as
    /// long as the cache has groups of tracks that this client has published.
    cache: HashMap<NetworkPrefix, Weak<account::CacheShare>>,
}

/// A setting whose file could not be read, or had unusable content, at the last attempt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnreadSetting {
    /// The setting and its file.
    pub what: String,
    /// The reason why the file could not be used.
    pub reason: String,
}

/// The usage of a client, or of all clients of a network together, for the operator.
#[derive(Clone, Copy, Debug)]
pub struct ClientUse {
    /// The client's address or /64, or the wider network.
    pub network: NetworkPrefix,
    /// Requests that were admitted.
    pub requests: u64,
    /// Requests that were refused because a budget was used up.
    pub refused: u64,
    /// Tracks that open requests use at present.
    pub tracks: u64,
    /// Bytes of the cache that groups of the client's tracks take.
    pub cache_bytes: u64,
    /// Bytes of objects that were sent in the client's FETCH responses.
    pub fetched_bytes: u64,
    /// Bytes of the receive windows of the client's sessions.
    pub receive_bytes: u64,
}

impl Access {
    /// Makes an authoriser that decides by `policy` and enforces `limits`.
    pub fn new(policy: AccessPolicy, limits: BudgetLimits) -> Arc<Self> {
        Arc::new(Self {
            policy: RwLock::new(Arc::new(policy)),
            version: watch::Sender::new(0),
            limits,
            clients: Mutex::default(),
            unproven: Unproven::new(limits.unproven),
            kernel_streams: Arc::new(transport::WindowShare::new(limits.network.kernel_streams, None)),
            unread: Mutex::default(),
            refused: Mutex::default(),
        })
    }

    /// Returns the two limits on the number of streams to a client that engine `kernel` forwards: the client's own
    /// limit, and the one for further streams, which all clients share.
    pub fn kernel_streams(&self, client: &AccessClient) -> [Arc<transport::WindowShare>; 2] {
        [Arc::clone(&client.kernel_streams), Arc::clone(&self.kernel_streams)]
    }

    /// Returns an authoriser that allows every client everything.
    pub fn open() -> Arc<Self> {
        Self::new(AccessPolicy::default(), BudgetLimits::default())
    }

    /// Puts an access policy in force. All rights in use are decided again.
    pub fn set_policy(&self, mut policy: AccessPolicy) {
        // The policy is replaced inside `send_modify`, so that watchers are notified only once it is in force.
        self.version.send_modify(|version| {
            *version += 1;
            policy.version = *version;
            *self.policy.write() = Arc::new(policy);
        });
    }

    /// Returns the access policy in force.
    pub fn policy(&self) -> Arc<AccessPolicy> {
        Arc::clone(&self.policy.read())
    }

    /// Returns the limits on what sessions, clients and networks of clients may use. They never change.
    pub fn limits(&self) -> &BudgetLimits {
        &self.limits
    }

    fn versions(&self) -> watch::Receiver<u64> {
        self.version.subscribe()
    }

    /// Returns the budget and usage of a new session.
    pub fn session(&self) -> Arc<BudgetUsage> {
        BudgetUsage::new(self.limits.session)
    }

    /// Returns the client with this address. Creates the client and its networks if they have no sessions yet.
    fn client(&self, address: IpAddr) -> Arc<AccessClient> {
        let levels: Vec<_> = networks::levels(address).collect();
        let clients = &mut *self.clients.lock();
        let of_level = |wider: Option<Arc<AccessClient>>, (network, times): &(NetworkPrefix, usize)| {
            Some(self.client_at(clients, *network, *times as u64, wider))
        };
        // The widest network is made first, since each narrower one refers to it.
        let client = levels.iter().rev().fold(None, of_level);
        client.unwrap_or_else(AccessClient::unlimited) // never missing: every address is in at least one network
    }

    /// Returns the client or network with this prefix. Creates it within the wider network if it is not in use yet.
    fn client_at(
        &self,
        AccessClients { present, cache }: &mut AccessClients,
        network: NetworkPrefix,
        times: u64,
        within: Option<Arc<AccessClient>>,
    ) -> Arc<AccessClient> {
        if let Some(client) = present.get(&network).and_then(Weak::upgrade) {
            return client;
        }
        // Searching `present` and `cache` for expired entries takes little time: nearly all entries belong to clients
        // with sessions or cached groups.
        present.retain(|_, client| client.strong_count() > 0);
        cache.retain(|_, share| share.strong_count() > 0);
        let share = cache.get(&network).and_then(Weak::upgrade);
        let share = share.unwrap_or_else(|| {
            let around = within.as_ref().map(|wider| Arc::clone(&wider.cache));
            Arc::new(self.limits.network_budget(times).1.cache_share(around))
        });
        cache.insert(network, Arc::downgrade(&share));
        let client = AccessClient::new(&self.limits, times, share, within);
        present.insert(network, Arc::downgrade(&client));
        client
    }

    /// Returns the clients that have sessions, and the wider networks that several of them are in.
    pub fn clients(&self) -> (Vec<ClientUse>, Vec<ClientUse>) {
        let clients = self.clients.lock();
        let live = clients.present.iter().filter_map(|(network, client)| Some((*network, client.upgrade()?)));
        let (networks, clients): (Vec<_>, Vec<_>) = live.partition(|(_, client)| client.is_network());
        // One reference to `network` is held by this function, and one by each client or narrower network within it.
        let crowded = networks.into_iter().filter(|(_, network)| Arc::strong_count(network) > 2);
        (sorted(clients.into_iter()), sorted(crowded))
    }

    /// Registers a session whose peer has not shown yet that it may publish or subscribe. Returns `None` if the policy
    /// allows everything to everybody.
    pub fn place(&self, client: IpAddr) -> Option<unproven::UnprovenPlace> {
        (!self.policy().is_open()).then(|| self.unproven.enter(client))
    }

    /// Returns the register of sessions whose peers have not shown yet that they may publish or subscribe.
    pub fn unproven(&self) -> &Arc<Unproven> {
        &self.unproven
    }

    /// Records the settings whose files could not be read.
    pub fn set_unread(&self, unread: Vec<UnreadSetting>) {
        *self.unread.lock() = unread;
    }

    /// Returns the settings whose files could not be read when the files were last read.
    pub fn unread(&self) -> Vec<UnreadSetting> {
        self.unread.lock().clone()
    }

    /// Returns the number of settings whose files could not be read when the files were last read.
    pub fn unread_count(&self) -> usize {
        self.unread.lock().len()
    }

    /// Counts a session or request that was refused or ended, by its reason.
    pub fn count(&self, refusal: AccessRefusal) {
        *self.refused.lock().entry(refusal.name()).or_default() += 1;
    }

    /// Returns how many sessions and requests were refused or ended, by reason.
    pub fn refused(&self) -> BTreeMap<&'static str, u64> {
        self.refused.lock().clone()
    }
}

fn sorted(all: impl Iterator<Item = (NetworkPrefix, Arc<AccessClient>)>) -> Vec<ClientUse> {
    let mut all: Vec<_> = all.map(|(network, client)| ClientUse::new(network, &client)).collect();
    all.sort_unstable_by_key(|client| (client.network.address, client.network.length));
    all
}

impl ClientUse {
    fn new(network: NetworkPrefix, client: &AccessClient) -> Self {
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
