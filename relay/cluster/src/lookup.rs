//! A relay's memory of the namespaces that other relays have registered in a store, and the limit of its requests
//! there.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use millrace_moq::Namespace;

/// Largest number of registrations that are remembered for one namespace.
const MAX_REGISTRATIONS: usize = 64;

/// A registered namespace, and the relay that has registered it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct RegistrationKey {
    /// The registered namespace. It covers all namespaces that begin with it.
    pub namespace: Namespace,
    /// Host and port of the relay.
    pub relay: String,
}

/// The state of a registration at a revision of the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegistrationState {
    /// The revision of the store at which the registration was written or removed.
    pub revision: u64,
    /// The run of the relay that has written the registration. `None` if the registration was removed.
    pub run: Option<u64>,
}

/// Limits of a [`LookupCache`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LookupLimits {
    /// Largest number of namespaces with registrations that are remembered. As many are remembered without
    /// registrations, so that names that do not exist never displace those that do.
    pub entries: usize,
    /// Largest number of requests to the store in a second. Twice as many may be sent at once after a pause.
    pub per_second: u32,
}

/// Answers of the store about namespaces, kept up to date by the changes that the store reports.
///
/// A namespace is looked up in three steps: [`Self::known`], and if that has no answer [`Self::begin`], a request to
/// the store, and [`Self::answer`]. Changes that are reported in the meantime are not lost: of two states of a
/// registration, the one with the higher revision counts.
#[derive(Debug)]
pub struct LookupCache {
    limits: LookupLimits,
    entries: BTreeMap<Namespace, LookupEntry>,
    /// The answered namespaces in the order of their last use: those without registrations, and those with some.
    order: [BTreeMap<u64, Namespace>; 2],
    uses: u64,
    evicted: u64,
    budget: f64,
    refilled: Option<Instant>,
}

#[derive(Debug, Default)]
struct LookupEntry {
    /// The registrations of the namespace and of its prefixes. While the store's answer is awaited, also the removed
    /// ones.
    found: BTreeMap<RegistrationKey, RegistrationState>,
    /// The key in the order of uses. `None` while the store's answer is awaited.
    used: Option<u64>,
}

impl LookupEntry {
    fn merge(&mut self, key: RegistrationKey, state: RegistrationState) {
        let known = self.found.get(&key).map_or(0, |known| known.revision);
        let has_room = known > 0 || self.found.len() < MAX_REGISTRATIONS;
        if state.revision > known && has_room {
            self.found.insert(key, state);
        }
    }

    /// Forgets removed registrations, unless the store's answer is awaited: it may be older than the removal.
    fn settle(&mut self) {
        self.found.retain(|_, state| state.run.is_some());
    }
}

impl LookupCache {
    /// Makes an empty cache.
    pub fn new(limits: LookupLimits) -> Self {
        let budget = f64::from(limits.per_second) * 2.0;
        Self {
            limits,
            entries: BTreeMap::new(),
            order: Default::default(),
            uses: 0,
            evicted: 0,
            budget,
            refilled: None,
        }
    }

    /// Returns the registrations of a namespace and of its prefixes, each with the run of its relay, the longest prefix
    /// first. The list is empty if there are none, and `None` is returned if the store has to be asked.
    pub fn known(&mut self, namespace: &Namespace) -> Option<Vec<(RegistrationKey, u64)>> {
        let found = self.recall(namespace)?;
        self.place(namespace);
        Some(found)
    }

    /// Returns the same as [`Self::known`], without counting as a use.
    pub fn recall(&self, namespace: &Namespace) -> Option<Vec<(RegistrationKey, u64)>> {
        let entry = self.entries.get(namespace).filter(|entry| entry.used.is_some())?;
        let found = entry.found.iter().filter_map(|(key, state)| Some((key.clone(), state.run?)));
        let mut found: Vec<_> = found.collect();
        found.reverse(); // in the order of namespaces, a prefix comes before what it is a prefix of
        Some(found)
    }

    /// Notes that the store is asked about a namespace: changes are kept from now on.
    pub fn begin(&mut self, namespace: &Namespace) {
        self.abort(namespace);
        self.forget(namespace);
        self.entries.insert(namespace.clone(), LookupEntry::default());
    }

    /// Notes that the store gave no answer about a namespace. An answer that arrived is kept.
    pub fn abort(&mut self, namespace: &Namespace) {
        if self.entries.get(namespace).is_some_and(|entry| entry.used.is_none()) {
            self.entries.remove(namespace);
        }
    }

    /// Adds the store's answer about a namespace. An answer that was not awaited any more is ignored.
    pub fn answer(
        &mut self,
        namespace: &Namespace,
        found: impl IntoIterator<Item = (RegistrationKey, RegistrationState)>,
    ) {
        let Some(entry) = self.entries.get_mut(namespace).filter(|entry| entry.used.is_none()) else {
            return;
        };
        found.into_iter().for_each(|(key, state)| entry.merge(key, state));
        entry.settle();
        self.place(namespace);
    }

    /// Applies a change that the store reports. Returns true if a namespace had no registration before and has one now.
    pub fn apply(&mut self, key: &RegistrationKey, state: RegistrationState) -> bool {
        let below = self.entries.range_mut(key.namespace.clone()..);
        let below = below.take_while(|(namespace, _)| key.namespace.is_prefix_of(namespace));
        let mut changed = Vec::new();
        let mut appeared = false;
        for (namespace, entry) in below {
            let before = entry.found.len();
            entry.merge(key.clone(), state);
            if entry.used.is_some() {
                entry.settle();
                appeared |= before == 0 && !entry.found.is_empty();
                changed.push(namespace.clone());
            }
        }
        changed.iter().for_each(|namespace| self.place(namespace));
        appeared
    }

    /// Forgets the namespaces without registrations, because there may be registrations that were not looked for.
    pub fn forget_negatives(&mut self) {
        for namespace in std::mem::take(&mut self.order[0]).into_values() {
            self.entries.remove(&namespace);
        }
    }

    /// Forgets everything, because changes may have been missed. Answers that are awaited will be ignored.
    pub fn clear(&mut self) {
        self.entries.clear();
        self.order = Default::default();
    }

    /// Forgets one namespace, if the store's answer about it has arrived.
    pub fn forget(&mut self, namespace: &Namespace) {
        if let Some(used) = self.entries.get(namespace).and_then(|entry| entry.used) {
            self.order.iter_mut().for_each(|order| drop(order.remove(&used)));
            self.entries.remove(namespace);
        }
    }

    /// Reports whether `requests` more requests may be sent to the store now, and counts them if so.
    pub fn admit(&mut self, requests: usize, now: Instant) -> bool {
        let rate = f64::from(self.limits.per_second);
        let passed =
            self.refilled.replace(now).map_or(Duration::ZERO, |then| now.saturating_duration_since(then));
        self.budget = (self.budget + passed.as_secs_f64() * rate).min(rate * 2.0);
        // A lookup of more requests than the budget ever has is admitted when the budget is full.
        let is_admitted = self.budget >= (requests as f64).min(rate * 2.0);
        if is_admitted {
            self.budget -= requests as f64;
        }
        is_admitted
    }

    /// Returns the numbers of namespaces with and without registrations, and of those that were forgotten for lack of
    /// room.
    pub fn size(&self) -> (usize, usize, u64) {
        (self.order[1].len(), self.order[0].len(), self.evicted)
    }

    /// Makes a namespace the one that was used last.
    fn place(&mut self, namespace: &Namespace) {
        let Some(entry) = self.entries.get_mut(namespace) else { return };
        self.uses += 1;
        if let Some(before) = entry.used.replace(self.uses) {
            self.order.iter_mut().for_each(|order| drop(order.remove(&before)));
        }
        let order = &mut self.order[usize::from(!entry.found.is_empty())];
        order.insert(self.uses, namespace.clone());
        if order.len() > self.limits.entries
            && let Some((_, oldest)) = order.pop_first()
        {
            self.entries.remove(&oldest);
            self.evicted += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: LookupLimits = LookupLimits { entries: 3, per_second: 10 };

    fn namespace(path: &str) -> Namespace {
        Namespace::from_path(path).unwrap()
    }

    fn key(path: &str, relay: &str) -> RegistrationKey {
        RegistrationKey { namespace: namespace(path), relay: relay.to_owned() }
    }

    const fn written(revision: u64) -> RegistrationState {
        RegistrationState { revision, run: Some(7) }
    }

    const fn removed(revision: u64) -> RegistrationState {
        RegistrationState { revision, run: None }
    }

    fn relays(cache: &mut LookupCache, path: &str) -> Option<Vec<String>> {
        let found = cache.known(&namespace(path))?;
        Some(found.into_iter().map(|(key, _)| key.relay).collect())
    }

    fn looked_up(cache: &mut LookupCache, path: &str, found: &[(RegistrationKey, RegistrationState)]) {
        cache.begin(&namespace(path));
        cache.answer(&namespace(path), found.iter().cloned());
    }

    #[test]
    fn lookup_answer_follows_reported_changes_of_the_namespace_and_its_prefixes() {
        let mut cache = LookupCache::new(LIMITS);
        assert_eq!(relays(&mut cache, "live/cam"), None);
        looked_up(&mut cache, "live/cam", &[]);
        assert_eq!(relays(&mut cache, "live/cam"), Some(vec![]));
        assert!(!cache.apply(&key("live/other", "x"), written(3)), "not its prefix");
        assert!(cache.apply(&key("live", "a"), written(4)), "it appeared");
        assert!(!cache.apply(&key("live/cam", "b"), written(5)), "it was known before");
        assert_eq!(
            relays(&mut cache, "live/cam"),
            Some(vec!["b".into(), "a".into()]),
            "the longest prefix first"
        );
        cache.apply(&key("live", "a"), removed(6));
        cache.apply(&key("live/cam", "b"), removed(7));
        assert_eq!((relays(&mut cache, "live/cam"), cache.size()), (Some(vec![]), (0, 1, 0)));
    }

    #[test]
    fn lookup_answer_older_than_a_reported_change_does_not_undo_it() {
        let mut cache = LookupCache::new(LIMITS);
        cache.begin(&namespace("a"));
        cache.apply(&key("a", "gone"), removed(9));
        cache.apply(&key("a", "new"), written(9));
        assert_eq!(relays(&mut cache, "a"), None, "the answer is awaited");
        cache.answer(&namespace("a"), [(key("a", "gone"), written(8)), (key("a", "stays"), written(2))]);
        assert_eq!(relays(&mut cache, "a"), Some(vec!["stays".into(), "new".into()]));
        // A change that was reported late is older than what is known.
        cache.apply(&key("a", "new"), removed(8));
        assert_eq!(relays(&mut cache, "a").unwrap().len(), 2);
        // After the cache was cleared, the awaited answer is not used.
        cache.begin(&namespace("b"));
        cache.clear();
        cache.answer(&namespace("b"), []);
        assert_eq!(relays(&mut cache, "b"), None);
        cache.begin(&namespace("c"));
        cache.abort(&namespace("c"));
        assert_eq!((relays(&mut cache, "c"), cache.entries.len()), (None, 0));
    }

    #[test]
    fn unknown_names_displace_each_other_and_no_registered_one() {
        let mut cache = LookupCache::new(LIMITS);
        looked_up(&mut cache, "real", &[(key("real", "a"), written(1))]);
        for name in 0..100 {
            looked_up(&mut cache, &format!("random/{name}"), &[]);
            relays(&mut cache, "random/0"); // the one that is used stays
        }
        assert_eq!(cache.size(), (1, 3, 97));
        assert_eq!(relays(&mut cache, "real"), Some(vec!["a".into()]));
        assert_eq!((relays(&mut cache, "random/0"), relays(&mut cache, "random/97")), (Some(vec![]), None));
        cache.forget_negatives();
        assert_eq!((cache.size(), cache.entries.len()), ((1, 0, 97), 1));
        // The registrations of one namespace are bounded as well.
        for relay in 0..1000 {
            cache.apply(&key("real", &relay.to_string()), written(2));
        }
        assert_eq!(relays(&mut cache, "real").unwrap().len(), MAX_REGISTRATIONS);
    }

    #[test]
    fn store_requests_are_limited_to_a_rate() {
        let mut cache = LookupCache::new(LIMITS);
        let now = Instant::now();
        assert_eq!((0..100).filter(|_| cache.admit(1, now)).count(), 20);
        let later = now + Duration::from_secs(1);
        assert_eq!((0..100).filter(|_| cache.admit(2, later)).count(), 5);
        // A lookup at many relays takes more than the budget ever has, and delays those behind it.
        let full = now + Duration::from_secs(10);
        assert!(cache.admit(30, full) && !cache.admit(1, full + Duration::from_secs(1)));
        assert!(cache.admit(1, full + Duration::from_millis(1200)));
    }
}
