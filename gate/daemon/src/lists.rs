//! Entries of the block and allow lists that were added at run time, and may expire.

use std::{
    collections::{BTreeMap, HashSet},
    time::{Duration, Instant},
};

use millrace_gate::{Error, Gate, ListEntry, Prefix};
use parking_lot::Mutex;

use millrace_gate::status::ListedStatus;

/// Expiry times of block and allow list entries, by scope (an application with rules of its own) and address prefix.
/// Entries that never expire are missing.
#[derive(Debug, Default)]
pub struct Lists(Mutex<BTreeMap<Key, Instant>>);

type Key = (Option<String>, Prefix);

impl Lists {
    /// Adds prefixes to a list, for `time` or until they are removed. Returns the other list entries that override the
    /// new ones for all or a part of a prefix.
    pub fn list(
        &self,
        gate: &Gate,
        scope: Option<&str>,
        prefixes: &[Prefix],
        entry: ListEntry,
        time: Option<Duration>,
    ) -> Result<Vec<ListedStatus>, Error> {
        // The lock is held for all prefixes, so that no expiry removes an entry that was just added again.
        let mut ends = self.0.lock();
        for prefix in prefixes {
            gate.list(scope, *prefix, entry)?;
            let key = (scope.map(str::to_owned), *prefix);
            match time.and_then(|time| Instant::now().checked_add(time)) {
                Some(end) => ends.insert(key, end),
                // A new entry without an end replaces an older one that would expire.
                None => ends.remove(&key),
            };
        }
        let exceptions = gate.exceptions(scope, prefixes, entry)?;
        Ok(exceptions
            .into_iter()
            .map(|(scope, prefix, entry)| ListedStatus::new(scope, prefix, entry))
            .collect())
    }

    /// Removes prefixes from a list. Returns those that were not on the list.
    pub fn unlist(
        &self,
        gate: &Gate,
        scope: Option<&str>,
        prefixes: &[Prefix],
    ) -> Result<Vec<Prefix>, Error> {
        let mut ends = self.0.lock();
        // The entries are listed before the removal, since the removal does not return which of them were absent.
        let listed: HashSet<_> =
            gate.listed().into_iter().map(|(scope, prefix, _)| (scope, prefix)).collect();
        let mut absent = Vec::new();
        for prefix in prefixes {
            let key = (scope.map(str::to_owned), *prefix);
            gate.unlist(scope, *prefix)?;
            ends.remove(&key);
            if !listed.contains(&key) {
                absent.push(*prefix);
            }
        }
        Ok(absent)
    }

    /// Removes expired entries and returns them.
    pub fn expire(&self, gate: &Gate, now: Instant) -> Vec<(Option<String>, Prefix)> {
        let mut over = Vec::new();
        self.0.lock().retain(|key, end| {
            let (scope, prefix) = key;
            // Removing the entry fails if the policy no longer has the application (scope) whose list contains it. The
            // entry then stays, because a later policy may have the application again.
            let ends = *end <= now && gate.unlist(scope.as_deref(), *prefix).is_ok();
            over.extend(ends.then(|| key.clone()));
            !ends
        });
        over
    }

    /// Sets the remaining time of each listed entry, in whole seconds.
    pub fn tell_ends(&self, listed: &mut [ListedStatus], now: Instant) {
        let ends = self.0.lock();
        for it in listed {
            let key = it.prefix.parse().ok().map(|prefix| (it.scope.clone(), prefix));
            let end = key.and_then(|key| ends.get(&key));
            it.seconds = end.map(|end| end.saturating_duration_since(now).as_secs());
        }
    }
}
