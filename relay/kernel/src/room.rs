//! Logs that a table of the program is full, once for each table.

use std::sync::atomic::{AtomicBool, Ordering};

use millrace_kernel::Error;
use tracing::{debug, warn};

/// The program's tables: name, kind of entries, and the setting that enlarges the table.
const TABLES: [(&str, &str, &str); 5] = [
    ("downstreams", "sessions", "kernel-sessions"),
    ("upstreams", "sessions of publishers", "kernel-publishers"),
    ("ingresses", "streams of publishers", "kernel-streams"),
    ("egresses", "streams to subscribers", "kernel-streams"),
    ("tracks", "tracks that it opens streams for", "kernel-tracks"),
];

/// The tables that were found full, in the order of [`TABLES`].
#[derive(Default)]
pub(super) struct FullTables([AtomicBool; TABLES.len()]);

impl FullTables {
    /// Logs why the kernel engine could not add an entry to a table, so that userspace serves the connection or stream.
    /// Warns once for each full table.
    pub fn explain(&self, error: &Error, what: &str) {
        debug!(%error, "the kernel engine could not add an entry to one of its tables: {what}");
        if let Some((_, holds, setting)) = self.found_full(error) {
            warn!(
                "the kernel engine has no room for more {holds}, so userspace serves further ones: set {setting} higher, and restart \
                 the relay"
            );
        }
    }

    /// Returns the table that is full according to the error, but only the first time.
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
    fn each_full_bpf_map_is_logged_once() {
        let room = FullTables::default();
        let told = |error: Error| room.found_full(&error).map(|(name, ..)| *name);
        for name in ["downstreams", "egresses"] {
            assert_eq!(told(Error::Unsettled { what: name }), None, "there is room in a moment");
            assert_eq!(told(Error::Full { what: name }), Some(name));
            assert_eq!(told(Error::Full { what: name }), None);
        }
    }
}
