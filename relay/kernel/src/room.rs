//! Tables of the program that are full: the log says so once.

use std::sync::atomic::{AtomicBool, Ordering};

use millrace_kernel::Error;
use tracing::{debug, warn};

/// Each table's name, what it holds, and the setting that makes it larger.
const TABLES: [(&str, &str, &str); 5] = [
    ("downstreams", "sessions", "kernel-sessions"),
    ("upstreams", "sessions of publishers", "kernel-publishers"),
    ("ingresses", "streams of publishers", "kernel-streams"),
    ("egresses", "streams to subscribers", "kernel-streams"),
    ("tracks", "tracks that it opens streams for", "kernel-tracks"),
];

/// Tables that were found full, in the order of [`TABLES`].
#[derive(Default)]
pub(super) struct Room([AtomicBool; TABLES.len()]);

impl Room {
    /// Logs why something stays in userspace, and warns once of each table that is full.
    pub fn explain(&self, error: &Error, what: &str) {
        debug!(%error, "{what}");
        if let Some((_, holds, setting)) = self.found_full(error) {
            warn!(
                "the kernel has no room for more {holds}, so userspace serves what is beyond: set {setting} higher, and restart \
                 the relay"
            );
        }
    }

    /// Returns the table that is full, once.
    fn found_full(&self, error: &Error) -> Option<&'static (&'static str, &'static str, &'static str)> {
        let Error::Full { what } = error else { return None };
        let (table, found) = TABLES.iter().zip(&self.0).find(|((name, ..), _)| name == what)?;
        (!found.swap(true, Ordering::Relaxed)).then_some(table)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_full_table_is_told_of_once() {
        let room = Room::default();
        let told = |error: Error| room.found_full(&error).map(|(name, ..)| *name);
        for name in ["downstreams", "egresses"] {
            assert_eq!(told(Error::Unsettled { what: name }), None, "there is room in a moment");
            assert_eq!(told(Error::Full { what: name }), Some(name));
            assert_eq!(told(Error::Full { what: name }), None);
        }
    }
}
