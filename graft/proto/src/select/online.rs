//! Corrects a model that is wrong for some network paths. It stores the measured costs of connections by path and leaf
//! of the model's decision tree, and lets a few connections explore other candidates. If costs are higher than
//! expected, connections go directly with plain TCP.
//!
//! This module has no clock and no randomness of its own, and its memory is bounded. Keys name the path, so the
//! costs measured with one peer do not affect connections with another.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Largest share of connections that may explore another candidate, percent.
const EXPLORED_PERCENT: u64 = 2;
/// Number of latest connections of each candidate whose cost is remembered.
const WINDOW: usize = 8;
/// Number of connections with bad outcomes (too high costs) among the latest `WINDOW` of a candidate, from which the
/// candidate is no longer used. If each outcome is bad with probability 0.1, four of eight outcomes are bad with
/// probability 0.005.
const BAD: usize = 4;
/// Smallest number of measured connections that a candidate needs for its median cost to be compared with another
/// one's.
const ENOUGH: usize = 4;
/// Factor of the current candidate's median cost. Another candidate replaces the current one if its own median cost is
/// below this product.
const BETTER: f64 = 0.9;
/// Largest number of connections that is counted for one path and one leaf of the decision tree. JSON numbers are exact
/// up to this value.
const COUNTED_MAX: u64 = 1 << 53;

/// The measured cost of a finished connection.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ConnectionOutcome {
    /// Cost as a multiple of the best duration that the path allows
    /// ([`ideal_ms`](super::features::Features::ideal_ms)).
    pub cost: f64,
    /// True if the cost exceeds the one that is [usual](super::tree::Leaf::usual) for the leaf of the decision tree.
    pub is_bad: bool,
}

/// Why a candidate was chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DecisionReason {
    /// The candidate is the model's choice.
    Learned,
    /// The model's candidate had too high costs on this path, so plain TCP is used instead.
    Doubted,
    /// Another candidate had lower costs on this path.
    Found,
}

/// The candidate (a congestion control or a tunnel) that was chosen for connections, and why.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CandidateDecision<'a> {
    /// Name of the candidate.
    pub candidate: &'a str,
    /// Why the candidate was chosen.
    pub why: DecisionReason,
}

/// The remembered costs of the latest connections that used a candidate (a congestion control or a tunnel).
#[derive(Clone, Debug, PartialEq)]
pub struct CandidateRecord {
    /// Name of the candidate.
    pub candidate: String,
    /// Number of connections whose cost is remembered.
    pub outcomes: usize,
    /// Number of these connections whose cost was too high.
    pub bad: usize,
    /// Median cost as a multiple of the best duration that the path allows; `None`: too few connections were measured.
    pub cost: Option<f64>,
}

/// The candidates that were used on one path for connections of one leaf of the decision tree, and the costs of these
/// connections.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OnlineState {
    candidates: BTreeMap<String, Vec<ConnectionOutcome>>,
    /// The candidate that is used instead of the model's, and why; `None`: the model's candidate is used.
    instead: Option<(String, DecisionReason)>,
    connections: u64,
    explored: u64,
    /// Counter value at the latest use, by which the least recently used entry is found.
    #[serde(skip)]
    used: u64,
}

/// Measured costs of connections by key. A key `K` consists of a network path and a leaf of the model's decision tree.
#[derive(Clone, Debug)]
pub struct Online<K> {
    places: BTreeMap<K, OnlineState>,
    most: usize,
    /// Name of the congestion control that plain TCP uses.
    plain: String,
    uses: u64,
}

impl<K: Ord + Clone> Online<K> {
    /// Makes an empty store of costs, for at most `most` keys (a path and a leaf). A new key replaces the least
    /// recently used one.
    pub fn new(plain: impl Into<String>, most: usize) -> Self {
        Self { places: BTreeMap::new(), most: most.max(1), plain: plain.into(), uses: 0 }
    }

    /// Chooses a candidate for all connections of a key (a path and a leaf) until the next call, since the kernel does
    /// not ask for each connection. Returns that candidate. If `may_try`, it may also return a second candidate, which
    /// exactly one connection is to explore; this counts as explored now. `ranked` holds the possible candidates, the
    /// model's first. `chance` is a new random number from 0 to 1 for each call.
    pub fn plan<'a>(
        &'a mut self,
        key: &K,
        ranked: &[&'a str],
        chance: f64,
        may_try: bool,
    ) -> (CandidateDecision<'a>, Option<&'a str>) {
        let plain = self.plain.clone();
        let place = self.used(key);
        let other = may_try.then(|| place.tries(ranked, &plain, chance)).flatten();
        let other = other.and_then(|other| self.find_by_name(ranked, &other));
        (self.current(key, ranked), other)
    }

    /// Counts connections that used the latest choice for `key` (a path and a leaf of the decision tree). Does nothing
    /// if the store has dropped the key.
    pub fn passed(&mut self, key: &K, connections: u64) {
        if let Some(place) = self.places.get_mut(key) {
            place.connections = place.connections.saturating_add(connections).min(COUNTED_MAX);
        }
    }

    /// Returns the candidates and costs of all keys (paths and leaves), to be stored in a file; the least recently used
    /// key comes first.
    pub fn learned_places(&self) -> Vec<(K, OnlineState)> {
        let mut places: Vec<_> = self.places.iter().collect();
        places.sort_by_key(|(_, place)| place.used);
        places
            .into_iter()
            .map(|(key, place)| (key.clone(), OnlineState { used: 0, ..place.clone() }))
            .collect()
    }

    /// Restores the candidates and costs of all keys from a file. The file may have been edited, so the usual bounds
    /// are applied, and only candidates in `candidates` are restored.
    pub fn recall(&mut self, known: impl IntoIterator<Item = (K, OnlineState)>, candidates: &[String]) {
        for (key, place) in known {
            let place = place.checked(|name| name == self.plain || candidates.iter().any(|it| it == name));
            let used = self.used(&key);
            *used = OnlineState { used: used.used, ..place };
        }
    }

    fn used(&mut self, key: &K) -> &mut OnlineState {
        // The least recently used key is dropped before a new one is added, so that the bound always holds.
        self.forget(key);
        self.uses += 1;
        let place = self.places.entry(key.clone()).or_default();
        place.used = self.uses;
        place
    }

    fn find_by_name<'a>(&'a self, ranked: &[&'a str], name: &str) -> Option<&'a str> {
        ranked.iter().copied().chain([self.plain.as_str()]).find(|candidate| *candidate == name)
    }

    fn current<'a>(&'a self, key: &K, ranked: &[&'a str]) -> CandidateDecision<'a> {
        let instead = self.places.get(key).and_then(|place| place.instead.as_ref());
        let instead = instead.and_then(|(name, why)| Some((self.find_by_name(ranked, name)?, *why)));
        let learned = || (ranked.first().copied().unwrap_or(&self.plain), DecisionReason::Learned);
        let (candidate, why) = instead.unwrap_or_else(learned);
        CandidateDecision { candidate, why }
    }

    /// Adds the measured cost of a connection, unless the store has dropped the connection's key (path and leaf).
    /// `learned` is the model's candidate.
    pub fn report(&mut self, key: &K, learned: &str, candidate: &str, outcome: ConnectionOutcome) {
        let Some(place) = self.places.get_mut(key) else { return };
        // A cost that is not finite is ignored, since it could not be compared in a median.
        if !outcome.cost.is_finite() {
            return;
        }
        let outcomes = place.candidates.entry(candidate.to_owned()).or_default();
        outcomes.push(outcome);
        if outcomes.len() > WINDOW {
            outcomes.remove(0);
        }
        place.decide(learned, &self.plain);
    }

    /// Returns the remembered costs of each candidate that was used for the key (a path and a leaf).
    pub fn tried(&self, key: &K) -> Vec<CandidateRecord> {
        let place = self.places.get(key);
        let candidates = place.into_iter().flat_map(|place| &place.candidates);
        let record = |(name, all): (&String, &Vec<ConnectionOutcome>)| CandidateRecord {
            candidate: name.clone(),
            outcomes: all.len(),
            bad: bad_outcomes(all),
            cost: place.and_then(|place| place.median(name)),
        };
        candidates.map(record).collect()
    }

    /// Returns how many connections of the path and leaf in `key` were counted, and how many of them explored another
    /// candidate.
    pub fn counted(&self, key: &K) -> (u64, u64) {
        self.places.get(key).map_or((0, 0), |place| (place.connections, place.explored))
    }

    /// Returns all keys (paths and leaves of the model) for which costs of connections are remembered.
    pub fn keys(&self) -> impl Iterator<Item = &K> {
        self.places.keys()
    }

    /// Returns for how many keys (paths and leaves of the model) costs of connections are remembered.
    pub fn places(&self) -> usize {
        self.places.len()
    }

    fn forget(&mut self, key: &K) {
        if self.places.len() < self.most || self.places.contains_key(key) {
            return;
        }
        let oldest = self.places.iter().min_by_key(|(_, place)| place.used).map(|(key, _)| key.clone());
        if let Some(oldest) = oldest {
            self.places.remove(&oldest);
        }
    }
}

fn bad_outcomes(outcomes: &[ConnectionOutcome]) -> usize {
    outcomes.iter().filter(|outcome| outcome.is_bad).count()
}

impl OnlineState {
    fn checked(mut self, is_candidate: impl Fn(&str) -> bool) -> Self {
        self.candidates.retain(|candidate, _| is_candidate(candidate));
        for outcomes in self.candidates.values_mut() {
            outcomes.retain(|outcome| outcome.cost.is_finite());
            outcomes.drain(..outcomes.len().saturating_sub(WINDOW));
        }
        self.instead.take_if(|(name, why)| !is_candidate(name) || *why == DecisionReason::Learned);
        self.connections = self.connections.min(COUNTED_MAX);
        // Counts of connections in the file may have been edited, and must not allow more exploration of other
        // candidates than usual.
        self.explored = self.explored.min(self.connections);
        self
    }

    /// Returns the candidate with the fewest measured connections, if a connection may explore another candidate now.
    fn tries(&mut self, ranked: &[&str], plain: &str, chance: f64) -> Option<String> {
        // One of 50 counted connections may explore another candidate. Half of the calls are skipped at random, so that
        // explorations do not follow a pattern.
        if (self.explored + 1) * 100 > self.connections * EXPLORED_PERCENT || chance >= 0.5 {
            return None;
        }
        let can = |candidate: &str| ranked.contains(&candidate) || candidate == plain;
        let now = match &self.instead {
            Some((candidate, _)) if can(candidate) => candidate.as_str(),
            _ => ranked.first().copied().unwrap_or(plain),
        };
        // Plain TCP may always be explored, even if the model does not rank it.
        let others = ranked.iter().copied().chain([plain]).filter(|other| *other != now);
        let known = |candidate: &str| self.candidates.get(candidate).map_or(0, Vec::len);
        let other = others.min_by_key(|other| known(other))?.to_owned();
        self.explored += 1;
        Some(other)
    }

    fn decide(&mut self, learned: &str, plain: &str) {
        let now = self.instead.as_ref().map_or(learned, |(candidate, _)| candidate.as_str()).to_owned();
        // For each path and leaf, one of three applies: the model's candidate (`instead` is None), plain TCP after too
        // high costs (Doubted), or a candidate with a clearly lower median cost (Found). Doubted becomes Found, or
        // ends, once enough connections with plain TCP were measured.
        if let Some(better) = self.better(&now) {
            // If the model's own candidate has the lower cost, the path and leaf return to it.
            self.instead = (better != learned).then_some((better, DecisionReason::Found));
        } else if now != plain && self.is_bad(&now) && self.median(plain).is_none() {
            self.instead = Some((plain.to_owned(), DecisionReason::Doubted));
        } else if let (Some(cost), Some(before)) = (self.median(plain), self.median(learned))
            && cost < before * BETTER
            && let Some((_, why @ DecisionReason::Doubted)) = &mut self.instead
        {
            *why = DecisionReason::Found;
        }
    }

    /// Returns a candidate whose median cost is clearly lower than that of `now`, if enough connections of both were
    /// measured.
    fn better(&self, now: &str) -> Option<String> {
        let cost = self.median(now)?;
        let others = self.candidates.keys().filter_map(|name| Some((name, self.median(name)?)));
        let (candidate, least) = others.min_by(|one, other| one.1.total_cmp(&other.1))?;
        // The median cost has to be lower by a tenth. This keeps equally good candidates from replacing each other by
        // chance.
        (least < cost * BETTER).then(|| candidate.clone())
    }

    fn is_bad(&self, candidate: &str) -> bool {
        self.candidates.get(candidate).is_some_and(|all| bad_outcomes(all) >= BAD)
    }

    fn median(&self, candidate: &str) -> Option<f64> {
        let outcomes = self.candidates.get(candidate)?;
        let mut costs: Vec<f64> = outcomes.iter().map(|outcome| outcome.cost).collect();
        costs.sort_unstable_by(f64::total_cmp);
        (costs.len() >= ENOUGH).then(|| costs.get(costs.len() / 2).copied())?
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RANKED: [&str; 3] = ["pcc", "bbr", "cubic"];

    /// A simulated path, on which each candidate has a cost that chance may double.
    struct CostWorld {
        random: u64,
        costs: [f64; 3],
        /// The cost that nine of ten training examples of the decision tree's leaf did not exceed.
        usual: f64,
    }

    impl CostWorld {
        fn random(&mut self) -> f64 {
            self.random =
                self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (self.random >> 11) as f64 / (1_u64 << 53) as f64
        }

        /// Simulates a connection. Returns the candidate that the connection used, and whether it was used only to
        /// explore it.
        fn connect(&mut self, online: &mut Online<u8>) -> (String, bool) {
            let chance = self.random();
            let (choice, other) = online.plan(&1, &RANKED, chance, true);
            let candidate = other.unwrap_or(choice.candidate).to_owned();
            let is_tried = other.is_some();
            online.passed(&1, 1);
            let at = RANKED.iter().position(|it| *it == candidate).expect("one of them");
            let cost = self.costs[at] * (1.0 + self.random());
            online.report(&1, "pcc", &candidate, ConnectionOutcome { cost, is_bad: cost > self.usual });
            (candidate, is_tried)
        }
    }

    /// Returns the candidate that is used instead of the model's; `None` if the model's is used.
    fn instead<K: Ord + Clone>(online: &mut Online<K>, key: &K) -> Option<(String, DecisionReason)> {
        let (choice, _) = online.plan(key, &RANKED, 1.0, false);
        (choice.why != DecisionReason::Learned).then(|| (choice.candidate.to_owned(), choice.why))
    }

    #[test]
    fn costly_model_choice_is_replaced_by_cubic_within_50_connections() {
        for seed in 0..200 {
            let mut online = Online::new("cubic", 10);
            let mut world = CostWorld { random: seed, costs: [5.0, 5.0, 1.0], usual: 1.9 };
            let all: Vec<_> = (0..500).map(|_| world.connect(&mut online)).collect();
            let wrong = all[50..].iter().filter(|(candidate, tried)| candidate != "cubic" && !tried).count();
            assert_eq!(wrong, 0, "seed {seed}: {:?}", &all[..50]);
            let explored = all.iter().filter(|(_, tried)| *tried).count();
            assert!(explored <= 10, "seed {seed}: {explored} of 500");
        }
    }

    #[test]
    fn best_model_choice_is_left_in_under_4_percent_of_connections() {
        let mut left = 0;
        for seed in 0..100 {
            let mut online = Online::new("cubic", 10);
            let mut world = CostWorld { random: seed, costs: [1.0, 3.0, 5.0], usual: 1.9 };
            let all: Vec<_> = (0..1000).map(|_| world.connect(&mut online)).collect();
            left += all.iter().filter(|(candidate, tried)| candidate != "pcc" && !tried).count();
            assert!(all.iter().any(|(_, tried)| *tried), "it is not blind");
            assert_eq!(instead(&mut online, &1), None, "seed {seed}");
        }
        // If plain TCP is used because costs were too high by chance, it remains in use until enough of its connections
        // were measured.
        assert!(left < 100_000 / 100 * 4, "{left} of 100000");
    }

    #[test]
    fn cheaper_congestion_control_is_found_by_exploration() {
        let mut online = Online::new("cubic", 10);
        let mut world = CostWorld { random: 7, costs: [2.0, 0.5, 3.0], usual: 9.0 };
        (0..2000).for_each(|_| drop(world.connect(&mut online)));
        assert_eq!(instead(&mut online, &1), Some(("bbr".to_owned(), DecisionReason::Found)));
    }

    #[test]
    fn replaced_model_is_used_again_when_the_path_recovers() {
        let mut online = Online::new("cubic", 10);
        let mut world = CostWorld { random: 3, costs: [5.0, 5.0, 1.0], usual: 1.9 };
        (0..100).for_each(|_| drop(world.connect(&mut online)));
        assert!(instead(&mut online, &1).is_some());
        world.costs = [1.0, 3.0, 5.0];
        (0..3000).for_each(|_| drop(world.connect(&mut online)));
        assert_eq!(instead(&mut online, &1), None);
    }

    #[test]
    fn costly_connections_to_one_peer_change_no_choice_for_another_peer() {
        let mut online = Online::new("cubic", 3);
        for _ in 0..100 {
            online.plan(&1_u32, &RANKED, 1.0, true);
            online.report(&1, "pcc", "pcc", ConnectionOutcome { cost: 99.0, is_bad: true });
        }
        assert_eq!(instead(&mut online, &1), Some(("cubic".to_owned(), DecisionReason::Doubted)));
        assert_eq!(
            online.plan(&2, &RANKED, 1.0, true).0,
            CandidateDecision { candidate: "pcc", why: DecisionReason::Learned }
        );
        for peer in 3..1000 {
            online.plan(&peer, &RANKED, 1.0, true);
        }
        assert_eq!(online.places(), 3);
        assert!(online.tried(&1).is_empty());
        online.report(&1, "pcc", "pcc", ConnectionOutcome { cost: 1.0, is_bad: true });
        online.report(&999, "pcc", "pcc", ConnectionOutcome { cost: f64::NAN, is_bad: true });
        assert_eq!(online.places(), 3);
    }

    /// Connections are reported when they end, in batches of any size, so the number of explorations is bounded by the
    /// reported connections.
    #[test]
    fn exploration_uses_at_most_two_percent_of_connections() {
        for seed in 0..50 {
            let mut online = Online::new("cubic", 10);
            let mut world = CostWorld { random: seed, costs: [1.0, 1.0, 1.0], usual: 9.0 };
            let mut passed = 0;
            let mut tried = 0;
            while passed < 5000 {
                let chance = world.random();
                let (choice, other) = online.plan(&1, &RANKED, chance, true);
                assert_eq!(choice, CandidateDecision { candidate: "pcc", why: DecisionReason::Learned });
                tried += u64::from(other.is_some_and(|other| other != "pcc"));
                assert!(tried * 100 <= passed * 2, "seed {seed}: {tried} of {passed}");
                let crowd = (world.random() * 30.0) as u64;
                online.passed(&1, crowd);
                passed += crowd;
            }
            assert!(tried >= 50, "seed {seed}: {tried} of {passed}");
            assert_eq!(online.counted(&1), (passed, tried));
            assert_eq!(online.plan(&1, &RANKED, 0.0, false).1, None);
        }
    }

    #[test]
    fn choice_follows_connection_costs_and_skips_unavailable_candidates() {
        let mut online = Online::new("cubic", 10);
        online.plan(&1, &RANKED, 1.0, true);
        (0..4).for_each(|_| online.report(&1, "pcc", "pcc", ConnectionOutcome { cost: 9.0, is_bad: true }));
        let (choice, _) = online.plan(&1, &RANKED, 1.0, true);
        assert_eq!(choice, CandidateDecision { candidate: "cubic", why: DecisionReason::Doubted });
        online.report(&1, "pcc", "cubic", ConnectionOutcome { cost: 1.0, is_bad: false });
        let tried = online.tried(&1);
        let told: Vec<_> =
            tried.iter().map(|it| (it.candidate.as_str(), it.outcomes, it.bad, it.cost)).collect();
        assert_eq!(told, [("cubic", 1, 0, None), ("pcc", 4, 4, Some(9.0))]);
        (0..3)
            .for_each(|_| online.report(&1, "pcc", "cubic", ConnectionOutcome { cost: 1.0, is_bad: false }));
        assert_eq!(
            online.plan(&1, &RANKED, 1.0, true).0,
            CandidateDecision { candidate: "cubic", why: DecisionReason::Found }
        );
        // A candidate that has become impossible is not used, however low its costs were.
        (0..4).for_each(|_| online.report(&1, "pcc", "bbr", ConnectionOutcome { cost: 0.1, is_bad: false }));
        assert_eq!(online.plan(&1, &RANKED, 1.0, true).0.candidate, "bbr");
        assert_eq!(
            online.plan(&1, &["pcc"], 1.0, true).0,
            CandidateDecision { candidate: "pcc", why: DecisionReason::Learned }
        );
        online.passed(&9, 5);
        assert_eq!((online.counted(&9), online.tried(&9)), ((0, 0), Vec::new()));
    }

    #[test]
    fn stored_outcomes_learned_from_connections_are_restored() {
        let mut online = Online::new("cubic", 3);
        for key in 1..=3 {
            online.plan(&key, &RANKED, 1.0, true);
            online.passed(&key, 100);
            (0..4).for_each(|_| {
                online.report(&key, "pcc", "pcc", ConnectionOutcome { cost: 9.0, is_bad: true })
            });
        }
        let text = serde_json::to_string(&online.learned_places()).expect("JSON");
        let known: Vec<(u8, OnlineState)> = serde_json::from_str(&text).expect("as it was");
        let candidates = RANKED.map(str::to_owned);
        let mut other = Online::new("cubic", 2);
        other.recall(known, &candidates);
        assert_eq!((other.places(), other.tried(&1)), (2, Vec::new()), "the latest have the room");
        for key in [2, 3] {
            assert_eq!((other.tried(&key), other.counted(&key)), (online.tried(&key), (100, 0)));
            assert_eq!(instead(&mut other, &key), Some(("cubic".to_owned(), DecisionReason::Doubted)));
        }
        assert_eq!(other.plan(&2, &RANKED, 0.0, true).1, Some("bbr"));
    }

    #[test]
    fn invalid_stored_outcomes_of_connections_are_ignored() {
        let place =
            |candidates: &str, rest: &str| format!("[[1,{{\"candidates\":{{{candidates}}},{rest}}}]]");
        let many = "{\"cost\":9.0,\"is_bad\":true},".repeat(500) + "{\"cost\":1.0,\"is_bad\":false}";
        let table = [
            (
                place(
                    "\"vegas\":[{\"cost\":1,\"is_bad\":false}]",
                    "\"instead\":[\"vegas\",\"found\"],\"connections\":1,\"explored\":7",
                ),
                0,
            ),
            (
                place(
                    &format!("\"bbr\":[{many}]"),
                    &format!("\"instead\":null,\"connections\":{0},\"explored\":{0}", u64::MAX),
                ),
                WINDOW,
            ),
            (place("\"bbr\":[]", "\"instead\":[\"bbr\",\"learned\"],\"connections\":0,\"explored\":0"), 0),
        ];
        for (text, outcomes) in table {
            let known: Vec<(u8, OnlineState)> = serde_json::from_str(&text).expect(&text);
            let mut online = Online::new("cubic", 3);
            online.recall(known, &RANKED.map(str::to_owned));
            assert_eq!(online.tried(&1).iter().map(|it| it.outcomes).sum::<usize>(), outcomes, "{text}");
            assert_eq!(instead(&mut online, &1), None, "{text}");
            online.passed(&1, u64::MAX);
            online.plan(&1, &RANKED, 0.0, true);
            let (connections, explored) = online.counted(&1);
            assert!(explored <= connections + 1, "{text}");
        }
    }

    #[test]
    fn empty_ranking_of_candidates_gives_plain_tcp() {
        let mut online = Online::new("cubic", 3);
        assert_eq!(
            online.plan(&1, &[], 0.0, true).0,
            CandidateDecision { candidate: "cubic", why: DecisionReason::Learned }
        );
    }
}
