//! Purposes of connections: ended ones are remembered, and the next of their kind are expected to be alike.

use std::{
    net::IpAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use millrace_graft::Settings;
use millrace_graft_proto::select::kind::{Expected, Flow, Kind, Kinds};
use parking_lot::RwLock;

#[derive(Default)]
pub struct Purposes {
    kinds: Arc<Mutex<Kinds>>,
    settings: RwLock<Arc<Settings>>,
}

impl Purposes {
    pub fn new(kinds: Arc<Mutex<Kinds>>) -> Self {
        Self { kinds, ..Self::default() }
    }

    pub fn apply(&self, settings: &Settings) {
        *self.settings.write() = Arc::new(settings.clone());
    }

    pub fn note(&self, kind: Kind, peer: u64, flow: Flow) {
        self.lock().note(kind, peer, flow);
    }

    /// Of one that begins, with this peer.
    pub fn expected(&self, kind: &Kind, peer: IpAddr) -> Expected {
        let settings = self.settings.read().clone();
        settings.expected_with(kind, peer, &self.lock())
    }

    #[cfg(test)]
    pub fn kinds(&self) -> Arc<Mutex<Kinds>> {
        self.kinds.clone()
    }

    /// A panic of somebody who held it has left counts that are whole.
    fn lock(&self) -> MutexGuard<'_, Kinds> {
        self.kinds.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
