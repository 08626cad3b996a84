//! Predicts how connections will be used: it remembers connections that have ended, and expects new ones of the same
//! class to be used in the same way.

use std::{
    net::IpAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use millrace_graft::Settings;
use millrace_graft_proto::select::kind::{Expected, FlowFigures, Kinds, TrafficClass};
use parking_lot::RwLock;

/// Statistics of past connections, and the settings that say what is expected without them.
#[derive(Default)]
pub struct Purposes {
    kinds: Arc<Mutex<Kinds>>,
    settings: RwLock<Arc<Settings>>,
}

impl Purposes {
    pub fn new(kinds: Arc<Mutex<Kinds>>) -> Self {
        Self { kinds, ..Self::default() }
    }

    /// Applies changed settings to connections that begin from now on.
    pub fn apply(&self, settings: &Settings) {
        *self.settings.write() = Arc::new(settings.clone());
    }

    /// Adds a connection that has ended to the statistics.
    pub fn note(&self, kind: TrafficClass, peer: u64, flow: FlowFigures) {
        self.lock().note(kind, peer, flow);
    }

    /// Returns how a new connection of this class with this peer is expected to be used.
    pub fn expected(&self, kind: &TrafficClass, peer: IpAddr) -> Expected {
        let settings = self.settings.read().clone();
        settings.expected_with(kind, peer, &self.lock())
    }

    #[cfg(test)]
    pub fn kinds(&self) -> Arc<Mutex<Kinds>> {
        self.kinds.clone()
    }

    /// Locks the statistics. They are consistent even if another holder of the lock has panicked.
    fn lock(&self) -> MutexGuard<'_, Kinds> {
        self.kinds.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
