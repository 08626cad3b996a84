//! How many subscriptions a session has to each track.

use std::{collections::HashMap, sync::Arc};

use millrace_moq::TrackName;
use parking_lot::Mutex;

/// The tracks that a session has subscriptions to, or has asked for, and how many.
#[derive(Default)]
pub(super) struct Parts(Arc<Mutex<HashMap<TrackName, u64>>>);

/// A subscription's place among those of its session to the same track; given back when dropped.
pub(in crate::session) struct Part {
    parts: Arc<Mutex<HashMap<TrackName, u64>>>,
    name: TrackName,
}

impl Parts {
    /// Takes a place; `None` if `most` are taken.
    pub(super) fn take(&self, name: &TrackName, most: u64) -> Option<Part> {
        let mut parts = self.0.lock();
        match parts.get_mut(name) {
            Some(count) if *count >= most => return None,
            Some(count) => *count += 1,
            None => drop(parts.insert(name.clone(), 1)),
        }
        Some(Part { parts: Arc::clone(&self.0), name: name.clone() })
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        let mut parts = self.parts.lock();
        if let Some(count) = parts.get_mut(&self.name) {
            *count -= 1;
            if *count == 0 {
                parts.remove(&self.name);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use millrace_moq::Namespace;

    use super::*;

    #[test]
    fn a_track_has_as_many_places_as_it_may() {
        let parts = Parts::default();
        let track = |name: &str| TrackName::new(Namespace::from_path("a").unwrap(), name.to_owned()).unwrap();
        let (one, two) = (parts.take(&track("v"), 2).unwrap(), parts.take(&track("v"), 2).unwrap());
        assert!(parts.take(&track("v"), 2).is_none());
        let other = parts.take(&track("w"), 1).unwrap();
        drop(one);
        assert!(parts.take(&track("v"), 1).is_none());
        let three = parts.take(&track("v"), 2).unwrap();
        drop((two, three, other));
        assert!(parts.0.lock().is_empty());
    }
}
