//! What connections are for: what ended ones tell, what their first bytes were, and what is expected of the next.

use std::{
    net::IpAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use millrace_graft::{Settings, status};
use millrace_graft_proto::select::kind::{Expected, Flow, Kind, Kinds, Named};
use parking_lot::RwLock;

use super::classify::Classifier;
use super::sample::Sample;

#[derive(Default)]
pub struct Purposes {
    kinds: Arc<Mutex<Kinds>>,
    settings: RwLock<Arc<Settings>>,
    classifier: RwLock<Option<Classifier>>,
}

impl Purposes {
    pub fn new(kinds: Arc<Mutex<Kinds>>) -> Self {
        Self { kinds, ..Self::default() }
    }

    /// Has to be called from the runtime of tasks.
    pub fn apply(self: &Arc<Self>, settings: &Settings) {
        *self.settings.write() = Arc::new(settings.clone());
        let mut classifier = self.classifier.write();
        if settings.classify.is_none() {
            *classifier = None;
        } else if classifier.is_none() {
            let own = Arc::downgrade(self);
            *classifier = Some(Classifier::start(Box::new(move |kind, names| {
                own.upgrade().is_some_and(|own| own.name(kind, names))
            })));
        }
    }

    /// Whether first bytes are wanted.
    pub fn wants_samples(&self) -> bool {
        self.classifier.read().is_some()
    }

    /// Nobody waits for what comes of it.
    pub fn look(&self, kind: &Kind, sample: Sample) {
        if let Some(classifier) = &*self.classifier.read() {
            classifier.look(kind.clone(), sample);
        }
    }

    pub fn note(&self, kind: Kind, peer: u64, flow: Flow) {
        self.lock().note(kind, peer, flow);
    }

    /// What its first bytes were: names from the most special to the most general. Returns whether any says what it is for.
    fn name(&self, kind: Kind, names: [&str; 3]) -> bool {
        let settings = self.settings.read().clone();
        let profile = settings.classify.as_ref().and_then(|classify| classify.profile(names));
        let [protocol, ..] = names;
        let named = profile.map(|profile| Named { protocol: protocol.to_owned(), profile });
        match named {
            Some(named) => {
                self.lock().name(kind, named);
                true
            }
            None => false,
        }
    }

    /// Of one that begins, with this peer.
    pub fn expected(&self, kind: &Kind, peer: IpAddr) -> Expected {
        let settings = self.settings.read().clone();
        settings.expected_with(kind, peer, &self.lock())
    }

    pub fn status(&self) -> Option<status::Classify> {
        self.classifier.read().as_ref().map(Classifier::status)
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
