//! What is done where a model turns out to be wrong: outcomes are kept by path and leaf, another arm is tried now and then, and where
//! things are worse than they should be, connections go by TCP as it is, in place.
//!
//! No clock, no randomness of its own, and bounded. Keys name the path, so what comes of one peer's connections steers no other's.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Of a hundred connections, so many may try another arm.
const EXPLORED_PERCENT: u64 = 2;
/// Outcomes of an arm that are remembered.
const WINDOW: usize = 8;
/// Bad ones among them after which an arm is doubted. With a tenth of them bad by chance this is so once in 200 windows.
const BAD: usize = 4;
/// Of an arm, before it is compared.
const ENOUGH: usize = 4;
/// What another arm has to be less than, to be changed to.
const BETTER: f64 = 0.9;
/// Connections of a place that are counted, at most.
const COUNTED_MAX: u64 = 1 << 53;

/// How a connection went.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Outcome {
    /// What it cost by what the path would have allowed ([`ideal_ms`](super::features::Features::ideal_ms)).
    pub cost: f64,
    /// More than is [usual](super::tree::Leaf::usual) where the model came to.
    pub is_bad: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Why {
    /// As the model has it.
    Learned,
    /// What was learned was bad here.
    Doubted,
    /// Found out here.
    Found,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Choice<'a> {
    pub arm: &'a str,
    pub why: Why,
}

/// What has come of an arm, of late.
#[derive(Clone, Debug, PartialEq)]
pub struct Tried {
    pub arm: String,
    pub outcomes: usize,
    pub bad: usize,
    /// The median, by what the path would have allowed; `None`: of too few to be compared.
    pub cost: Option<f64>,
}

/// What is known where a key leads: of arms that have been tried there.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Place {
    arms: BTreeMap<String, Vec<Outcome>>,
    /// Whatever the model says.
    instead: Option<(String, Why)>,
    connections: u64,
    explored: u64,
    /// Later ones are larger.
    #[serde(skip)]
    used: u64,
}

/// `K`: a path, and a leaf of the model.
#[derive(Clone, Debug)]
pub struct Online<K> {
    places: BTreeMap<K, Place>,
    most: usize,
    /// TCP as it is.
    plain: String,
    uses: u64,
}

impl<K: Ord + Clone> Online<K> {
    /// Remembers so many places; the one that was used longest ago goes.
    pub fn new(plain: impl Into<String>, most: usize) -> Self {
        Self { places: BTreeMap::new(), most: most.max(1), plain: plain.into(), uses: 0 }
    }

    /// For connections that ask nobody: by what they go until this is asked again, and an arm that one of them, and no more, is to
    /// try, if `may_try`. That counts as tried from now on. `ranked`: arms that can be had, the model's first. `chance`: evenly from 0 to 1,
    /// anew each time.
    pub fn plan<'a>(
        &'a mut self,
        key: &K,
        ranked: &[&'a str],
        chance: f64,
        may_try: bool,
    ) -> (Choice<'a>, Option<&'a str>) {
        let plain = self.plain.clone();
        let place = self.used(key);
        let other = may_try.then(|| place.tries(ranked, &plain, chance)).flatten();
        let other = other.and_then(|other| self.by_name(ranked, &other));
        (self.current(key, ranked), other)
    }

    /// So many connections have gone that have asked nobody. Of a place that is forgotten nothing is counted.
    pub fn passed(&mut self, key: &K, connections: u64) {
        if let Some(place) = self.places.get_mut(key) {
            place.connections = place.connections.saturating_add(connections).min(COUNTED_MAX);
        }
    }

    /// All that is known, what was used longest ago first: to be kept.
    pub fn known(&self) -> Vec<(K, Place)> {
        let mut places: Vec<_> = self.places.iter().collect();
        places.sort_by_key(|(_, place)| place.used);
        places.into_iter().map(|(key, place)| (key.clone(), Place { used: 0, ..place.clone() })).collect()
    }

    /// What was kept. Whoever has changed it meanwhile, it is bounded as what is found out here, of arms among `arms`.
    pub fn recall(&mut self, known: impl IntoIterator<Item = (K, Place)>, arms: &[String]) {
        for (key, place) in known {
            let place = place.checked(|arm| arm == self.plain || arms.iter().any(|it| it == arm));
            let used = self.used(&key);
            *used = Place { used: used.used, ..place };
        }
    }

    fn used(&mut self, key: &K) -> &mut Place {
        self.forget(key);
        self.uses += 1;
        let place = self.places.entry(key.clone()).or_default();
        place.used = self.uses;
        place
    }

    fn by_name<'a>(&'a self, ranked: &[&'a str], name: &str) -> Option<&'a str> {
        ranked.iter().copied().chain([self.plain.as_str()]).find(|arm| *arm == name)
    }

    fn current<'a>(&'a self, key: &K, ranked: &[&'a str]) -> Choice<'a> {
        let instead = self.places.get(key).and_then(|place| place.instead.as_ref());
        let instead = instead.and_then(|(arm, why)| Some((self.by_name(ranked, arm)?, *why)));
        let learned = || (ranked.first().copied().unwrap_or(&self.plain), Why::Learned);
        let (arm, why) = instead.unwrap_or_else(learned);
        Choice { arm, why }
    }

    /// What came of a connection. One whose place is forgotten says nothing. `learned`: the model's arm.
    pub fn report(&mut self, key: &K, learned: &str, arm: &str, outcome: Outcome) {
        let Some(place) = self.places.get_mut(key) else { return };
        if !outcome.cost.is_finite() {
            return;
        }
        let outcomes = place.arms.entry(arm.to_owned()).or_default();
        outcomes.push(outcome);
        if outcomes.len() > WINDOW {
            outcomes.remove(0);
        }
        place.decide(learned, &self.plain);
    }

    /// What has come of each arm that was tried where the key leads.
    pub fn tried(&self, key: &K) -> Vec<Tried> {
        let place = self.places.get(key);
        let arms = place.into_iter().flat_map(|place| &place.arms);
        arms.map(|(arm, all)| Tried {
            arm: arm.clone(),
            outcomes: all.len(),
            bad: all.iter().filter(|outcome| outcome.is_bad).count(),
            cost: place.and_then(|place| place.median(arm)),
        })
        .collect()
    }

    /// Connections that were counted where the key leads, and those that were to try another arm.
    pub fn counted(&self, key: &K) -> (u64, u64) {
        self.places.get(key).map_or((0, 0), |place| (place.connections, place.explored))
    }

    pub fn keys(&self) -> impl Iterator<Item = &K> {
        self.places.keys()
    }

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

impl Place {
    fn checked(mut self, is_arm: impl Fn(&str) -> bool) -> Self {
        self.arms.retain(|arm, _| is_arm(arm));
        for outcomes in self.arms.values_mut() {
            outcomes.retain(|outcome| outcome.cost.is_finite());
            outcomes.drain(..outcomes.len().saturating_sub(WINDOW));
        }
        self.instead = self.instead.filter(|(arm, why)| is_arm(arm) && *why != Why::Learned);
        self.connections = self.connections.min(COUNTED_MAX);
        self.explored = self.explored.min(self.connections);
        self
    }

    /// The arm of which least is known, if one may be tried.
    fn tries(&mut self, ranked: &[&str], plain: &str, chance: f64) -> Option<String> {
        if (self.explored + 1) * 100 > self.connections * EXPLORED_PERCENT || chance >= 0.5 {
            return None;
        }
        let can = |arm: &str| ranked.contains(&arm) || arm == plain;
        let now = match &self.instead {
            Some((arm, _)) if can(arm) => arm.as_str(),
            _ => ranked.first().copied().unwrap_or(plain),
        };
        let others = ranked.iter().copied().chain([plain]).filter(|other| *other != now);
        let known = |arm: &str| self.arms.get(arm).map_or(0, Vec::len);
        let other = others.min_by_key(|other| known(other))?.to_owned();
        self.explored += 1;
        Some(other)
    }

    fn decide(&mut self, learned: &str, plain: &str) {
        let now = self.instead.as_ref().map_or(learned, |(arm, _)| arm.as_str()).to_owned();
        if let Some(better) = self.better(&now) {
            self.instead = (better != learned).then_some((better, Why::Found));
        } else if now != plain && self.is_bad(&now) && self.median(plain).is_none() {
            self.instead = Some((plain.to_owned(), Why::Doubted));
        } else if let (Some(cost), Some(before)) = (self.median(plain), self.median(learned))
            && cost < before * BETTER
            && let Some((_, why @ Why::Doubted)) = &mut self.instead
        {
            *why = Why::Found;
        }
    }

    /// Of those of which enough is known.
    fn better(&self, now: &str) -> Option<String> {
        let cost = self.median(now)?;
        let others = self.arms.keys().filter_map(|arm| Some((arm, self.median(arm)?)));
        let (arm, least) = others.min_by(|one, other| one.1.total_cmp(&other.1))?;
        (least < cost * BETTER).then(|| arm.clone())
    }

    fn is_bad(&self, arm: &str) -> bool {
        self.arms.get(arm).is_some_and(|all| all.iter().filter(|outcome| outcome.is_bad).count() >= BAD)
    }

    fn median(&self, arm: &str) -> Option<f64> {
        let mut costs: Vec<f64> = self.arms.get(arm)?.iter().map(|outcome| outcome.cost).collect();
        costs.sort_unstable_by(f64::total_cmp);
        (costs.len() >= ENOUGH).then(|| costs.get(costs.len() / 2).copied())?
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RANKED: [&str; 3] = ["pcc", "bbr", "cubic"];

    /// A path on which each arm has a cost, up to twice as much by chance.
    struct World {
        random: u64,
        costs: [f64; 3],
        /// What nine of ten stayed below in the training.
        usual: f64,
    }

    impl World {
        fn random(&mut self) -> f64 {
            self.random =
                self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (self.random >> 11) as f64 / (1_u64 << 53) as f64
        }

        /// Returns its arm, and whether that was to find out.
        fn connect(&mut self, online: &mut Online<u8>) -> (String, bool) {
            let chance = self.random();
            let (choice, other) = online.plan(&1, &RANKED, chance, true);
            let (arm, is_tried) = (other.unwrap_or(choice.arm).to_owned(), other.is_some());
            online.passed(&1, 1);
            let at = RANKED.iter().position(|it| *it == arm).expect("one of them");
            let cost = self.costs[at] * (1.0 + self.random());
            online.report(&1, "pcc", &arm, Outcome { cost, is_bad: cost > self.usual });
            (arm, is_tried)
        }
    }

    /// What is used instead of the model's arm, if something is.
    fn instead<K: Ord + Clone>(online: &mut Online<K>, key: &K) -> Option<(String, Why)> {
        let (choice, _) = online.plan(key, &RANKED, 1.0, false);
        (choice.why != Why::Learned).then(|| (choice.arm.to_owned(), choice.why))
    }

    #[test]
    fn a_network_that_was_never_seen_is_recovered_from_within_fifty() {
        for seed in 0..200 {
            let mut online = Online::new("cubic", 10);
            let mut world = World { random: seed, costs: [5.0, 5.0, 1.0], usual: 1.9 };
            let all: Vec<_> = (0..500).map(|_| world.connect(&mut online)).collect();
            let wrong = all[50..].iter().filter(|(arm, tried)| arm != "cubic" && !tried).count();
            assert_eq!(wrong, 0, "seed {seed}: {:?}", &all[..50]);
            let explored = all.iter().filter(|(_, tried)| *tried).count();
            assert!(explored <= 10, "seed {seed}: {explored} of 500");
        }
    }

    #[test]
    fn what_was_learned_stays_where_it_holds() {
        let mut left = 0;
        for seed in 0..100 {
            let mut online = Online::new("cubic", 10);
            let mut world = World { random: seed, costs: [1.0, 3.0, 5.0], usual: 1.9 };
            let all: Vec<_> = (0..1000).map(|_| world.connect(&mut online)).collect();
            left += all.iter().filter(|(arm, tried)| arm != "pcc" && !tried).count();
            assert!(all.iter().any(|(_, tried)| *tried), "it is not blind");
            assert_eq!(instead(&mut online, &1), None, "seed {seed}");
        }
        // A doubt by chance lasts until TCP has shown that it is no better.
        assert!(left < 100_000 / 100 * 4, "{left} of 100000");
    }

    #[test]
    fn a_better_arm_is_found_by_exploring() {
        let mut online = Online::new("cubic", 10);
        let mut world = World { random: 7, costs: [2.0, 0.5, 3.0], usual: 9.0 };
        (0..2000).for_each(|_| drop(world.connect(&mut online)));
        assert_eq!(instead(&mut online, &1), Some(("bbr".to_owned(), Why::Found)));
    }

    #[test]
    fn a_network_that_changes_back_is_noticed() {
        let mut online = Online::new("cubic", 10);
        let mut world = World { random: 3, costs: [5.0, 5.0, 1.0], usual: 1.9 };
        (0..100).for_each(|_| drop(world.connect(&mut online)));
        assert!(instead(&mut online, &1).is_some());
        world.costs = [1.0, 3.0, 5.0];
        (0..3000).for_each(|_| drop(world.connect(&mut online)));
        assert_eq!(instead(&mut online, &1), None);
    }

    #[test]
    fn one_peer_steers_no_other() {
        let mut online = Online::new("cubic", 3);
        for _ in 0..100 {
            online.plan(&1_u32, &RANKED, 1.0, true);
            online.report(&1, "pcc", "pcc", Outcome { cost: 99.0, is_bad: true });
        }
        assert_eq!(instead(&mut online, &1), Some(("cubic".to_owned(), Why::Doubted)));
        assert_eq!(online.plan(&2, &RANKED, 1.0, true).0, Choice { arm: "pcc", why: Why::Learned });
        for peer in 3..1000 {
            online.plan(&peer, &RANKED, 1.0, true);
        }
        assert_eq!(online.places(), 3);
        assert!(online.tried(&1).is_empty());
        online.report(&1, "pcc", "pcc", Outcome { cost: 1.0, is_bad: true });
        online.report(&999, "pcc", "pcc", Outcome { cost: f64::NAN, is_bad: true });
        assert_eq!(online.places(), 3);
    }

    /// Connections that are told of when they are over, in crowds of any size: what is tried is bounded by those.
    #[test]
    fn plans_try_no_more_than_two_of_a_hundred() {
        for seed in 0..50 {
            let mut online = Online::new("cubic", 10);
            let mut world = World { random: seed, costs: [1.0, 1.0, 1.0], usual: 9.0 };
            let (mut passed, mut tried) = (0, 0);
            while passed < 5000 {
                let chance = world.random();
                let (choice, other) = online.plan(&1, &RANKED, chance, true);
                assert_eq!(choice, Choice { arm: "pcc", why: Why::Learned });
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
    fn plans_follow_what_was_found_and_what_was_tried_is_told() {
        let mut online = Online::new("cubic", 10);
        online.plan(&1, &RANKED, 1.0, true);
        (0..4).for_each(|_| online.report(&1, "pcc", "pcc", Outcome { cost: 9.0, is_bad: true }));
        let (choice, _) = online.plan(&1, &RANKED, 1.0, true);
        assert_eq!(choice, Choice { arm: "cubic", why: Why::Doubted });
        online.report(&1, "pcc", "cubic", Outcome { cost: 1.0, is_bad: false });
        let tried = online.tried(&1);
        let told: Vec<_> = tried.iter().map(|it| (it.arm.as_str(), it.outcomes, it.bad, it.cost)).collect();
        assert_eq!(told, [("cubic", 1, 0, None), ("pcc", 4, 4, Some(9.0))]);
        (0..3).for_each(|_| online.report(&1, "pcc", "cubic", Outcome { cost: 1.0, is_bad: false }));
        assert_eq!(online.plan(&1, &RANKED, 1.0, true).0, Choice { arm: "cubic", why: Why::Found });
        // A carrier that is not warm any more is not used, whatever was found.
        (0..4).for_each(|_| online.report(&1, "pcc", "bbr", Outcome { cost: 0.1, is_bad: false }));
        assert_eq!(online.plan(&1, &RANKED, 1.0, true).0.arm, "bbr");
        assert_eq!(online.plan(&1, &["pcc"], 1.0, true).0, Choice { arm: "pcc", why: Why::Learned });
        online.passed(&9, 5);
        assert_eq!((online.counted(&9), online.tried(&9)), ((0, 0), Vec::new()));
    }

    #[test]
    fn what_is_kept_goes_on_where_it_was() {
        let mut online = Online::new("cubic", 3);
        for key in 1..=3 {
            online.plan(&key, &RANKED, 1.0, true);
            online.passed(&key, 100);
            (0..4).for_each(|_| online.report(&key, "pcc", "pcc", Outcome { cost: 9.0, is_bad: true }));
        }
        let text = serde_json::to_string(&online.known()).expect("JSON");
        let known: Vec<(u8, Place)> = serde_json::from_str(&text).expect("as it was");
        let arms = RANKED.map(str::to_owned);
        let mut other = Online::new("cubic", 2);
        other.recall(known, &arms);
        assert_eq!((other.places(), other.tried(&1)), (2, Vec::new()), "the latest have the room");
        for key in [2, 3] {
            assert_eq!((other.tried(&key), other.counted(&key)), (online.tried(&key), (100, 0)));
            assert_eq!(instead(&mut other, &key), Some(("cubic".to_owned(), Why::Doubted)));
        }
        assert_eq!(other.plan(&2, &RANKED, 0.0, true).1, Some("bbr"));
    }

    #[test]
    fn what_was_kept_and_is_wrong_does_nothing() {
        let place = |arms: &str, rest: &str| format!("[[1,{{\"arms\":{{{arms}}},{rest}}}]]");
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
            let known: Vec<(u8, Place)> = serde_json::from_str(&text).expect(&text);
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
    fn nothing_but_tcp_will_do_too() {
        let mut online = Online::new("cubic", 3);
        assert_eq!(online.plan(&1, &[], 0.0, true).0, Choice { arm: "cubic", why: Why::Learned });
    }
}
