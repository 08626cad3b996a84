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

use millrace_proto::{networks, relay::account};
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
    /// The files of the settings that could not be read the last time.
    unread: Mutex<Vec<Unread>>,
    refused: Mutex<BTreeMap<&'static str, u64>>,
}

#[derive(Default)]
struct Clients {
    /// Those that have sessions.
    present: HashMap<IpAddr, Weak<Client>>,
    /// Of those that have sessions, or groups in the cache.
    cache: HashMap<IpAddr, Weak<account::Share>>,
}

/// A setting whose file could not be read, or used, when it was read last.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unread {
    /// The setting and its file.
    pub what: String,
    pub reason: String,
}

/// What a client uses, for the operator.
#[derive(Clone, Copy, Debug)]
pub struct ClientUse {
    pub address: IpAddr,
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
            unread: Mutex::default(),
            refused: Mutex::default(),
        })
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

    /// What the sessions of this client use together.
    fn client(&self, address: IpAddr) -> Arc<Client> {
        let address = networks::client(address);
        let Clients { present, cache } = &mut *self.clients.lock();
        if let Some(client) = present.get(&address).and_then(Weak::upgrade) {
            return client;
        }
        // As many as there are sessions and groups at most.
        present.retain(|_, client| client.strong_count() > 0);
        cache.retain(|_, share| share.strong_count() > 0);
        let share = cache.get(&address).and_then(Weak::upgrade);
        let share = share.unwrap_or_else(|| Arc::new(self.limits.share.of_cache()));
        cache.insert(address, Arc::downgrade(&share));
        let client = Client::new(&self.limits, share);
        present.insert(address, Arc::downgrade(&client));
        client
    }

    pub fn clients(&self) -> Vec<ClientUse> {
        let clients = self.clients.lock();
        let live = clients.present.iter().filter_map(|(address, client)| Some((*address, client.upgrade()?)));
        let mut all: Vec<_> = live
            .map(|(address, client)| ClientUse {
                address,
                requests: client.usage.admitted(),
                refused: client.usage.refused(),
                tracks: client.usage.tracks(),
                cache_bytes: client.cache.bytes() as u64,
                fetched_bytes: client.fetched_bytes(),
                receive_bytes: client.receive.held(),
            })
            .collect();
        all.sort_unstable_by_key(|client| client.address);
        all
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

#[cfg(test)]
mod tests;
