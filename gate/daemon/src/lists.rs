//! What `block` and `allow` do while the gate runs: entries of its lists, some of which end by themselves.

use std::{
    collections::{BTreeMap, HashSet},
    time::{Duration, Instant},
};

use millrace_gate::{Entry, Error, Gate, Prefix};
use parking_lot::Mutex;

use millrace_gate::status::Listed;

/// When entries end, by scope and prefix; those that do not are not in it.
#[derive(Debug, Default)]
pub struct Lists(Mutex<BTreeMap<Key, Instant>>);

type Key = (Option<String>, Prefix);

impl Lists {
    /// Lists prefixes, for some time or until they are taken back. Returns what decides otherwise about parts of them.
    pub fn list(
        &self,
        gate: &Gate,
        scope: Option<&str>,
        prefixes: &[Prefix],
        entry: Entry,
        time: Option<Duration>,
    ) -> Result<Vec<Listed>, Error> {
        let mut ends = self.0.lock();
        for prefix in prefixes {
            gate.list(scope, *prefix, entry)?;
            let key = (scope.map(str::to_owned), *prefix);
            match time.and_then(|time| Instant::now().checked_add(time)) {
                Some(end) => ends.insert(key, end),
                None => ends.remove(&key),
            };
        }
        let exceptions = gate.exceptions(scope, prefixes, entry)?;
        Ok(exceptions.into_iter().map(|(scope, prefix, entry)| Listed::new(scope, prefix, entry)).collect())
    }

    /// Takes back what was listed, and returns which of them was not.
    pub fn unlist(
        &self,
        gate: &Gate,
        scope: Option<&str>,
        prefixes: &[Prefix],
    ) -> Result<Vec<Prefix>, Error> {
        let mut ends = self.0.lock();
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

    /// Takes back whose time is over, and returns it.
    pub fn expire(&self, gate: &Gate, now: Instant) -> Vec<(Option<String>, Prefix)> {
        let mut over = Vec::new();
        self.0.lock().retain(|key, end| {
            let (scope, prefix) = key;
            // A scope that is not in the policy now may come back, and its list with it.
            let ends = *end <= now && gate.unlist(scope.as_deref(), *prefix).is_ok();
            over.extend(ends.then(|| key.clone()));
            !ends
        });
        over
    }

    /// Adds to what the gate has listed how long it stays, in whole seconds.
    pub fn tell_ends(&self, listed: &mut [Listed], now: Instant) {
        let ends = self.0.lock();
        for it in listed {
            let key = it.prefix.parse().ok().map(|prefix| (it.scope.clone(), prefix));
            let end = key.and_then(|key| ends.get(&key));
            it.seconds = end.map(|end| end.saturating_duration_since(now).as_secs());
        }
    }
}
