//! Who may do what: rules, tokens, certificates, budgets; decisions, and the rights that they make.
//!
//! | module | what it is |
//! | --- | --- |
//! | [`pattern`], [`rules`] | what the operator allows |
//! | [`keys`], [`token`], [`cat`], [`jwt`] | tokens, to what they grant |
//! | [`grant`] | actions, and what a token allows |
//! | [`policy`] | decisions |
//! | [`rights`] | what was decided, while it lasts |
//! | [`budget`] | how much sessions and clients may use |
//!
//! Files are read elsewhere. A change of any of them makes a new [`Policy`], under which all rights are decided anew.

pub mod budget;
pub mod cat;
pub mod certificate;
pub mod grant;
pub mod jwt;
pub mod keys;
mod parts;
pub mod pattern;
pub mod policy;
pub mod refusal;
pub mod rights;
pub mod rules;
pub mod token;

use std::{
    collections::{BTreeMap, HashMap},
    net::IpAddr,
    sync::{Arc, Weak},
};

use parking_lot::{Mutex, RwLock};
use tokio::sync::watch;

use self::budget::Usage;
pub use self::{
    budget::{Budget, Limits},
    policy::Policy,
    refusal::{Refusal, TokenError},
    rules::{Peer, Principal, Rule},
    token::Requirements,
};

/// The authoriser of a relay.
pub struct Access {
    policy: RwLock<Arc<Policy>>,
    version: watch::Sender<u64>,
    limits: Limits,
    /// Those that have sessions, by address or network.
    clients: Mutex<HashMap<IpAddr, Weak<Usage>>>,
    refused: Mutex<BTreeMap<&'static str, u64>>,
}

/// What a client uses, for the operator.
#[derive(Clone, Copy, Debug)]
pub struct ClientUse {
    pub address: IpAddr,
    pub requests: u64,
    pub refused: u64,
    pub tracks: u64,
}

impl Access {
    pub fn new(policy: Policy, limits: Limits) -> Arc<Self> {
        Arc::new(Self {
            policy: RwLock::new(Arc::new(policy)),
            version: watch::Sender::new(0),
            limits,
            clients: Mutex::default(),
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
    fn client(&self, address: IpAddr) -> Arc<Usage> {
        let mut clients = self.clients.lock();
        let entry = clients.entry(budget::client(address)).or_default();
        if let Some(usage) = entry.upgrade() {
            return usage;
        }
        let usage = Usage::new(self.limits.client);
        *entry = Arc::downgrade(&usage);
        // As many as there are sessions at most.
        clients.retain(|_, usage| usage.strong_count() > 0);
        usage
    }

    pub fn clients(&self) -> Vec<ClientUse> {
        let clients = self.clients.lock();
        let live = clients.iter().filter_map(|(address, usage)| Some((*address, usage.upgrade()?)));
        let mut all: Vec<_> = live
            .map(|(address, usage)| ClientUse {
                address,
                requests: usage.admitted(),
                refused: usage.refused(),
                tracks: usage.tracks(),
            })
            .collect();
        all.sort_unstable_by_key(|client| client.address);
        all
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
