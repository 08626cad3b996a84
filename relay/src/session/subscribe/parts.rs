//! Counts the subscriptions of a session to each track.

use std::{collections::HashMap, sync::Arc};

use millrace_moq::TrackName;
use parking_lot::Mutex;

/// The number of subscriptions that the session has or has asked for, by track.
#[derive(Default)]
pub(super) struct TrackParts(Arc<Mutex<HashMap<TrackName, u64>>>);

/// One subscription in the count of its track. Dropping it subtracts the subscription.
pub(in crate::session) struct TrackPart {
    parts: Arc<Mutex<HashMap<TrackName, u64>>>,
    name: TrackName,
}

impl TrackParts {
    /// Counts a subscription to the track. Returns `None` if the session has `most` subscriptions to it already.
    pub(super) fn take(&self, name: &TrackName, most: u64) -> Option<TrackPart> {
        let mut parts = self.0.lock();
        match parts.get_mut(name) {
            Some(count) if *count >= most => return None,
            Some(count) => *count += 1,
            None => drop(parts.insert(name.clone(), 1)),
        }
        Some(TrackPart { parts: Arc::clone(&self.0), name: name.clone() })
    }
}

impl Drop for TrackPart {
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
    fn subscriptions_of_a_session_to_a_track_beyond_the_limit_are_refused() {
        let parts = TrackParts::default();
        let track = |name: &str| TrackName::new(Namespace::from_path("a").unwrap(), name.to_owned()).unwrap();
        let one = parts.take(&track("v"), 2).unwrap();
        let two = parts.take(&track("v"), 2).unwrap();
        assert!(parts.take(&track("v"), 2).is_none());
        let other = parts.take(&track("w"), 1).unwrap();
        drop(one);
        assert!(parts.take(&track("v"), 1).is_none());
        let three = parts.take(&track("v"), 2).unwrap();
        drop((two, three, other));
        assert!(parts.0.lock().is_empty());
    }
}
