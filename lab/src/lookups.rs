//! `millrace-lab mesh --routing lookup`: a simulated cluster whose relays look up namespaces in a store and connect to
//! each other on demand.
//!
//! Every simulated relay has the cache and the limits of Millrace's relay. The store answers at once, and reports each
//! change at once. So the result is the load of the store and the number of sessions, and no time.

use std::{
    collections::{BTreeMap, HashMap},
    fmt::Write as _,
    time::{Duration, Instant},
};

use millrace_moq::Namespace;
use millrace_relay_cluster::{LookupCache, LookupLimits, RegistrationKey, RegistrationState};

use crate::mesh::{MeshArgs, SplitMix};

/// Limits of a relay with the default settings.
const LIMITS: LookupLimits = LookupLimits { entries: 10_000, per_second: 50 };
/// Length of a phase of the simulation, s.
const PHASE_S: u64 = 60;
/// Time after which a session that nobody needs ends, s.
const IDLE_S: u64 = 30;
/// Mean time for which a viewer watches a broadcast, and for which a broadcast lasts, s.
const WATCHED_S: u64 = 600;
const LASTS_S: u64 = 3600;
/// One of so many requests is for a name that nobody publishes, of this many such names.
const WRONG: (usize, usize) = (100, 1000);
/// Number of random names that a stranger asks one relay for, in a second.
const RANDOM_NAMES: usize = 1000;
/// Number of keys of a request to the store, and of prefixes of a namespace with two fields.
const KEYS: usize = 128;
const PREFIXES: usize = 3;

struct LookupRelay {
    cache: LookupCache,
    /// Number of viewers of broadcasts of each other relay, and the time at which the last one left, in seconds.
    sessions: HashMap<usize, (u64, u64)>,
}

#[derive(Clone)]
struct LookupBroadcast {
    namespace: Namespace,
    origin: usize,
}

#[derive(Default)]
struct LookupFigures {
    asked: u64,
    in_session: u64,
    memory: u64,
    store: u64,
    requests: u64,
    keys: u64,
    limited: u64,
    away: u64,
    begun: u64,
    ended: u64,
    changes: u64,
    random: [u64; 2],
}

struct LookupCluster {
    random: SplitMix,
    base: Instant,
    now_s: u64,
    relays: Vec<LookupRelay>,
    origins: usize,
    broadcasts: Vec<LookupBroadcast>,
    /// The sum of the weights of all broadcasts up to each one, by Zipf's law.
    weights: Vec<f64>,
    /// The relay of each viewer, and what it watches.
    viewers: Vec<(usize, Option<usize>)>,
    revision: u64,
    is_store_away: bool,
    count: LookupFigures,
}

impl LookupCluster {
    fn new(args: &MeshArgs) -> Self {
        let mut random = SplitMix(args.seed);
        let relays = args.relays.max(2);
        let origins = (relays / 10).max(1);
        let relay = |_| LookupRelay { cache: LookupCache::new(LIMITS), sessions: HashMap::new() };
        let mut sum = 0.0;
        let weight = |rank: usize| {
            sum += 1.0 / (rank + 1) as f64;
            sum
        };
        let weights = (0..args.broadcasts.max(1)).map(weight).collect();
        let viewers = (0..args.viewers).map(|_| (random.below(relays), None)).collect();
        let mut cluster = Self {
            random,
            base: Instant::now(),
            now_s: 0,
            relays: (0..relays).map(relay).collect(),
            origins,
            broadcasts: Vec::new(),
            weights,
            viewers,
            revision: 0,
            is_store_away: false,
            count: LookupFigures::default(),
        };
        cluster.broadcasts = (0..args.broadcasts.max(1)).map(|_| cluster.broadcast()).collect();
        cluster
    }

    /// Begins a broadcast at one of the relays that have publishers.
    fn broadcast(&mut self) -> LookupBroadcast {
        self.revision += 1;
        let namespace = Namespace::from_path(&format!("live/{}", self.revision)).unwrap_or_default();
        LookupBroadcast { namespace, origin: self.random.below(self.origins) }
    }

    fn state(&self, broadcast: &LookupBroadcast, run: Option<u64>) -> (RegistrationKey, RegistrationState) {
        let relay = broadcast.origin.to_string();
        let key = RegistrationKey { namespace: broadcast.namespace.clone(), relay };
        (key, RegistrationState { revision: self.revision, run })
    }

    /// Reports a change of a registration to all relays.
    fn change(&mut self, broadcast: &LookupBroadcast, run: Option<u64>) {
        self.revision += 1;
        self.count.changes += 1;
        let (key, state) = self.state(broadcast, run);
        for relay in &mut self.relays {
            relay.cache.apply(&key, state);
        }
    }

    /// Ends a broadcast and begins another one of the same popularity.
    fn replace(&mut self, number: usize) {
        let fresh = self.broadcast();
        let old = std::mem::replace(&mut self.broadcasts[number], fresh);
        self.change(&old, None);
        let fresh = self.broadcasts[number].clone();
        self.change(&fresh, Some(1));
    }

    /// A viewer leaves what it watches, and asks its relay for another broadcast, or for a name that does not exist.
    fn switch(&mut self, viewer: usize) {
        let (relay, watched) = self.viewers[viewer];
        if let Some(origin) = watched.filter(|origin| *origin != relay)
            && let Some((viewers, left_s)) = self.relays[relay].sessions.get_mut(&origin)
        {
            *viewers -= 1;
            *left_s = self.now_s;
        }
        self.count.asked += 1;
        let is_wrong = self.random.below(WRONG.0) == 0;
        let at =
            self.random.draw() as f64 / u64::MAX as f64 * self.weights.last().copied().unwrap_or_default();
        let wanted = self.weights.partition_point(|sum| *sum < at).min(self.broadcasts.len() - 1);
        let wrong = is_wrong.then(|| self.random.below(WRONG.1));
        let watches = match wrong {
            Some(wrong) => {
                let namespace = Namespace::from_path(&format!("wrong/{wrong}")).unwrap_or_default();
                self.look_up(relay, &namespace, None);
                None
            }
            None => self.watch(relay, wanted),
        };
        self.viewers[viewer].1 = watches;
    }

    /// Returns the relay from which the broadcast is received.
    fn watch(&mut self, relay: usize, wanted: usize) -> Option<usize> {
        let LookupBroadcast { namespace, origin } = self.broadcasts[wanted].clone();
        if origin == relay {
            self.count.in_session += 1;
            return Some(origin);
        }
        if !self.relays[relay].sessions.contains_key(&origin) {
            if !self.look_up(relay, &namespace, Some(wanted)) {
                return None;
            }
            self.count.begun += 1;
        } else {
            self.count.in_session += 1;
        }
        self.relays[relay].sessions.entry(origin).or_default().0 += 1;
        Some(origin)
    }

    /// Looks up a namespace as a relay does. Returns true if it is found.
    fn look_up(&mut self, relay: usize, namespace: &Namespace, wanted: Option<usize>) -> bool {
        let found: Vec<_> =
            wanted.map(|wanted| self.state(&self.broadcasts[wanted], Some(1))).into_iter().collect();
        let now = self.base + Duration::from_secs(self.now_s);
        let cache = &mut self.relays[relay].cache;
        if let Some(known) = cache.known(namespace)
            && !(known.is_empty() && self.is_store_away)
        {
            self.count.memory += 1;
            return !known.is_empty();
        }
        if self.is_store_away {
            self.count.away += 1;
            return false;
        }
        let keys = self.origins * PREFIXES;
        if !cache.admit(keys.div_ceil(KEYS), now) {
            self.count.limited += 1;
            return false;
        }
        self.count.store += 1;
        self.count.requests += keys.div_ceil(KEYS) as u64;
        self.count.keys += keys as u64;
        cache.begin(namespace);
        cache.answer(namespace, found);
        wanted.is_some()
    }

    fn end_unneeded(&mut self) {
        for relay in &mut self.relays {
            let before = relay.sessions.len();
            let now_s = self.now_s;
            relay.sessions.retain(|_, (viewers, left_s)| *viewers > 0 || now_s < *left_s + IDLE_S);
            self.count.ended += (before - relay.sessions.len()) as u64;
        }
    }

    /// Simulates a phase. `arriving` viewers per second begin or switch, in the order of their numbers or at random.
    /// `stranger` asks the last relay for random names.
    fn phase(&mut self, arriving: usize, is_first: bool, stranger: bool) {
        for second in 0..PHASE_S as usize {
            self.now_s += 1;
            let ends = self.broadcasts.len().div_ceil(LASTS_S as usize);
            for _ in 0..if is_first || self.is_store_away { 0 } else { ends } {
                let number = self.random.below(self.broadcasts.len());
                self.replace(number);
            }
            for turn in 0..RANDOM_NAMES * usize::from(stranger) {
                let limited = self.count.limited;
                let relay = self.relays.len() - 1;
                let namespace = Namespace::from_path(&format!("random/{second}/{turn}")).unwrap_or_default();
                self.look_up(relay, &namespace, None);
                self.count.random[usize::from(self.count.limited > limited)] += 1;
            }
            for turn in 0..arriving {
                let viewer =
                    if is_first { second * arriving + turn } else { self.random.below(self.viewers.len()) };
                if viewer < self.viewers.len() {
                    self.switch(viewer);
                }
            }
            self.end_unneeded();
        }
    }
}

/// Returns the p50, p95 and largest of some numbers, as text.
fn spread(mut values: Vec<usize>) -> String {
    values.sort_unstable();
    let at = |part: usize| values.get((values.len().max(1) - 1) * part / 100).copied().unwrap_or(0);
    format!("p50 {}, p95 {}, most {}", at(50), at(95), at(100))
}

/// Runs the simulation and prints its results.
pub fn run(args: &MeshArgs) -> anyhow::Result<()> {
    millrace_daemon::render::print(&report(args))
}

fn report(args: &MeshArgs) -> String {
    let mut cluster = LookupCluster::new(args);
    let arriving = args.viewers.div_ceil(PHASE_S as usize);
    let switching = args.viewers.div_ceil(WATCHED_S as usize).max(1);
    let mut out = format!(
        "seed {}: {} relays, {} of them with publishers, {} broadcasts, {} viewers\n",
        args.seed,
        cluster.relays.len(),
        cluster.origins,
        args.broadcasts,
        args.viewers
    );
    for name in [
        "all viewers arrive",
        "viewers and broadcasts come and go",
        "a stranger asks one relay for random names",
        "the store is away",
    ] {
        cluster.is_store_away = name == "the store is away";
        let is_first = name == "all viewers arrive";
        cluster.phase(if is_first { arriving } else { switching }, is_first, name.starts_with("a stranger"));
        let count = std::mem::take(&mut cluster.count);
        let per = |value: u64| value as f64 / PHASE_S as f64;
        let LookupFigures { asked, in_session, memory, store, requests, keys, .. } = count;
        let _ = writeln!(out, "\n{name}, {PHASE_S} s");
        let _ = writeln!(
            out,
            "  asked in a second {:.0}: in a session {:.0}, in memory {:.0}, in the store {:.0}; refused by lookup-rate {:.1}, for lack of the store {:.1}",
            per(asked),
            per(in_session),
            per(memory),
            per(store),
            per(count.limited),
            per(count.away)
        );
        let _ = writeln!(
            out,
            "  the store in a second: {:.0} requests with {:.0} keys, {:.1} changes reported to each relay",
            per(requests),
            per(keys),
            per(count.changes)
        );
        let _ = writeln!(
            out,
            "  sessions between relays begun in a second {:.0}, ended {:.0}",
            per(count.begun),
            per(count.ended)
        );
        if count.random != [0, 0] {
            let [answered, refused] = count.random;
            let _ = writeln!(
                out,
                "  of the stranger's requests {answered} answered, {refused} refused by lookup-rate"
            );
        }
        let mut children: BTreeMap<usize, usize> = BTreeMap::new();
        for origin in cluster.relays.iter().flat_map(|relay| relay.sessions.keys()) {
            *children.entry(*origin).or_default() += 1;
        }
        let sessions = cluster.relays.iter().map(|relay| relay.sessions.len()).collect();
        let sizes: Vec<_> = cluster.relays.iter().map(|relay| relay.cache.size()).collect();
        let _ = writeln!(out, "  sessions that a relay has begun: {}", spread(sessions));
        let _ = writeln!(
            out,
            "  relays with a session at one that has publishers: {}",
            spread(children.into_values().collect())
        );
        let _ = writeln!(
            out,
            "  namespaces in memory: {}; that nobody has: {}",
            spread(sizes.iter().map(|size| size.0).collect()),
            spread(sizes.iter().map(|size| size.1).collect())
        );
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mesh::MeshRouting;

    #[test]
    fn simulated_lookups_load_the_store_once_for_each_relay_and_stay_within_the_rate() {
        let args = MeshArgs {
            relays: 50,
            broadcasts: 500,
            viewers: 5000,
            sample: 1,
            seed: 1,
            routing: MeshRouting::Lookup,
        };
        let mut cluster = LookupCluster::new(&args);
        cluster.phase(84, true, false);
        let first = std::mem::take(&mut cluster.count);
        assert_eq!(first.asked, 5000);
        assert_eq!(first.asked, first.in_session + first.memory + first.store + first.limited);
        assert!(
            first.store < first.asked / 5 && first.limited == 0 && first.begun <= 50 * 5,
            "{}",
            first.store
        );
        cluster.phase(9, false, true);
        let attacked = std::mem::take(&mut cluster.count);
        // The rate, and twice as much at the beginning.
        assert!(attacked.random[0] <= 62 * 50 && attacked.random[1] > 50_000, "{:?}", attacked.random);
        assert!(cluster.relays.iter().all(|relay| relay.cache.size().1 <= LIMITS.entries));
        cluster.is_store_away = true;
        cluster.phase(9, false, false);
        let away = std::mem::take(&mut cluster.count);
        assert_eq!(away.requests, 0);
        assert!(
            away.away > 0 && away.in_session + away.memory > 9 * away.away,
            "{} {}",
            away.away,
            away.in_session
        );
        let text = report(&args);
        assert_eq!(text, report(&args), "another result for the same seed");
    }
}
