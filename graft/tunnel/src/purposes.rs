//! Predicts how connections will be used: it remembers connections that have ended, and expects new ones of the same
//! class to be used in the same way.

use std::{net::IpAddr, sync::Arc};

use millrace_graft::Settings;
use millrace_graft_proto::select::kind::{ClassLesson, Expected, FlowFigures, Kinds, Saw, TrafficClass};
use parking_lot::{Mutex, RwLock};

/// Limit of ended connections that were not reported yet.
const LESSONS_MAX: usize = 8192;

/// Statistics of past connections, and the settings that say what is expected without them.
#[derive(Default)]
pub struct Purposes {
    kinds: Mutex<Kinds>,
    /// Connections that have ended here since they were last taken.
    lessons: Mutex<Vec<ClassLesson>>,
    settings: RwLock<Arc<Settings>>,
}

impl Purposes {
    /// Applies changed settings to connections that begin from now on.
    pub fn apply(&self, settings: &Settings) {
        *self.settings.write() = Arc::new(settings.clone());
    }

    /// Adds a connection that has ended to the statistics.
    pub fn note(&self, kind: TrafficClass, peer: u64, flow: FlowFigures) {
        self.kinds.lock().note(kind.clone(), peer, flow);
        let mut lessons = self.lessons.lock();
        if lessons.len() < LESSONS_MAX {
            lessons.push(ClassLesson { kind, seen: Saw::Flow(peer, flow) });
        }
    }

    /// Returns the connections that have ended here since the last call.
    pub fn take_lessons(&self) -> Vec<ClassLesson> {
        std::mem::take(&mut *self.lessons.lock())
    }

    /// Adds connections to the statistics that have ended elsewhere, or before this process began.
    pub fn teach(&self, lessons: Vec<ClassLesson>) {
        let mut kinds = self.kinds.lock();
        lessons.into_iter().for_each(|lesson| kinds.teach(lesson));
    }

    /// Returns how a new connection of this class with this peer is expected to be used.
    pub fn expected(&self, kind: &TrafficClass, peer: IpAddr) -> Expected {
        let settings = self.settings.read().clone();
        settings.expected_with(kind, peer, &self.kinds.lock())
    }

    #[cfg(test)]
    pub fn kinds(&self) -> &Mutex<Kinds> {
        &self.kinds
    }
}
