//! What is done where a model turns out to be wrong: outcomes are kept by path and leaf, another arm is tried now and then, and where
//! things are worse than they should be, connections go by TCP as it is, in place.
//!
//! No clock, no randomness of its own, and bounded. Keys name the path, so what comes of one peer's connections steers no other's.

use std::collections::BTreeMap;

use super::features::Features;
use super::tree::Leaf;

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

/// How a connection went.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Outcome {
    /// What it cost by what the path would have allowed ([`ideal_ms`](super::features::Features::ideal_ms)).
    pub cost: f64,
    /// More than is [usual](super::tree::Leaf::usual) where the model came to.
    pub is_bad: bool,
}

impl Outcome {
    /// `None`: too little is known of the path or of the leaf.
    pub fn of(cost_ms: f64, features: &Features, leaf: &Leaf) -> Option<Self> {
        let cost = cost_ms / features.ideal_ms()?;
        Some(Self { cost, is_bad: cost > leaf.usual? })
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// As the model has it.
    Learned,
    /// To find out.
    Explored,
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

/// Arms that have been tried where a key leads.
#[derive(Clone, Debug, Default)]
struct Place {
    arms: BTreeMap<String, Vec<Outcome>>,
    /// Whatever the model says.
    instead: Option<(String, Why)>,
    connections: u64,
    explored: u64,
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

    /// For a connection. `ranked`: arms that can be had, the model's first. `chance`: evenly from 0 to 1, anew each time.
    pub fn choose<'a>(&'a mut self, key: &K, ranked: &[&'a str], chance: f64) -> Choice<'a> {
        self.forget(key);
        self.uses += 1;
        let place = self.places.entry(key.clone()).or_default();
        place.used = self.uses;
        place.connections += 1;
        let can = |arm: &str| ranked.contains(&arm) || arm == self.plain;
        let (arm, why) = match &place.instead {
            Some((arm, why)) if can(arm) => (arm.as_str(), *why),
            _ => (ranked.first().copied().unwrap_or(&self.plain), Why::Learned),
        };
        if (place.explored + 1) * 100 > place.connections * EXPLORED_PERCENT {
            return Choice { arm, why };
        }
        // The one of which least is known.
        let others = ranked.iter().copied().chain([self.plain.as_str()]).filter(|other| *other != arm);
        let known = |arm: &str| place.arms.get(arm).map_or(0, Vec::len);
        match others.min_by_key(|other| known(other)) {
            Some(other) if chance < 0.5 => {
                place.explored += 1;
                Choice { arm: other, why: Why::Explored }
            }
            _ => Choice { arm, why },
        }
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

    pub fn places(&self) -> usize {
        self.places.len()
    }

    /// The arm that is used instead of the model's, if one is.
    pub fn instead(&self, key: &K) -> Option<(&str, Why)> {
        self.places.get(key)?.instead.as_ref().map(|(arm, why)| (arm.as_str(), *why))
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
    fn decide(&mut self, learned: &str, plain: &str) {
        let now = self.instead.as_ref().map_or(learned, |(arm, _)| arm.as_str()).to_owned();
        if let Some(better) = self.better(&now) {
            self.instead = (better != learned).then_some((better, Why::Found));
        } else if now != plain && self.is_bad(&now) && self.median(plain).is_none() {
            self.instead = Some((plain.to_owned(), Why::Doubted));
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

        fn connect(&mut self, online: &mut Online<u8>) -> (String, Why) {
            let chance = self.random();
            let choice = online.choose(&1, &RANKED, chance);
            let (arm, why) = (choice.arm.to_owned(), choice.why);
            let at = RANKED.iter().position(|it| *it == arm).expect("one of them");
            let cost = self.costs[at] * (1.0 + self.random());
            online.report(&1, "pcc", &arm, Outcome { cost, is_bad: cost > self.usual });
            (arm, why)
        }
    }

    #[test]
    fn a_network_that_was_never_seen_is_recovered_from_within_fifty() {
        for seed in 0..200 {
            let mut online = Online::new("cubic", 10);
            let mut world = World { random: seed, costs: [5.0, 5.0, 1.0], usual: 1.9 };
            let all: Vec<_> = (0..500).map(|_| world.connect(&mut online)).collect();
            let wrong = all[50..].iter().filter(|(arm, why)| arm != "cubic" && *why != Why::Explored).count();
            assert_eq!(wrong, 0, "seed {seed}: {:?}", &all[..50]);
            let explored = all.iter().filter(|(_, why)| *why == Why::Explored).count();
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
            left += all.iter().filter(|(arm, why)| arm != "pcc" && *why != Why::Explored).count();
            assert!(all.iter().any(|(_, why)| *why == Why::Explored), "it is not blind");
            assert_eq!(online.instead(&1), None, "seed {seed}");
        }
        // A doubt by chance lasts until TCP has shown that it is no better.
        assert!(left < 100_000 / 100 * 4, "{left} of 100000");
    }

    #[test]
    fn a_better_arm_is_found_by_exploring() {
        let mut online = Online::new("cubic", 10);
        let mut world = World { random: 7, costs: [2.0, 0.5, 3.0], usual: 9.0 };
        (0..2000).for_each(|_| drop(world.connect(&mut online)));
        assert_eq!(online.instead(&1), Some(("bbr", Why::Found)));
    }

    #[test]
    fn a_network_that_changes_back_is_noticed() {
        let mut online = Online::new("cubic", 10);
        let mut world = World { random: 3, costs: [5.0, 5.0, 1.0], usual: 1.9 };
        (0..100).for_each(|_| drop(world.connect(&mut online)));
        assert!(online.instead(&1).is_some());
        world.costs = [1.0, 3.0, 5.0];
        (0..3000).for_each(|_| drop(world.connect(&mut online)));
        assert_eq!(online.instead(&1), None);
    }

    #[test]
    fn one_peer_steers_no_other() {
        let mut online = Online::new("cubic", 3);
        for _ in 0..100 {
            online.choose(&1_u32, &RANKED, 1.0);
            online.report(&1, "pcc", "pcc", Outcome { cost: 99.0, is_bad: true });
        }
        assert_eq!(online.instead(&1), Some(("cubic", Why::Doubted)));
        assert_eq!(online.choose(&2, &RANKED, 1.0), Choice { arm: "pcc", why: Why::Learned });
        for peer in 3..1000 {
            online.choose(&peer, &RANKED, 1.0);
        }
        assert_eq!((online.places(), online.instead(&1)), (3, None));
        online.report(&1, "pcc", "pcc", Outcome { cost: 1.0, is_bad: true });
        online.report(&999, "pcc", "pcc", Outcome { cost: f64::NAN, is_bad: true });
        assert_eq!(online.places(), 3);
    }

    #[test]
    fn outcomes_are_by_what_is_usual() {
        let features: Features = "rtt=100,rate=8.192,size=1000".parse().unwrap();
        let leaf = Leaf { usual: Some(2.0), ..Leaf::default() };
        let outcome = |ms| Outcome::of(ms, &features, &leaf);
        assert_eq!(outcome(1200.0), Some(Outcome { cost: 1.0, is_bad: false }));
        assert_eq!(outcome(3000.0), Some(Outcome { cost: 2.5, is_bad: true }));
        assert_eq!(Outcome::of(1.0, &Features::default(), &leaf), None);
        assert_eq!(Outcome::of(1.0, &features, &Leaf::default()), None);
    }

    #[test]
    fn nothing_but_tcp_will_do_too() {
        let mut online = Online::new("cubic", 3);
        assert_eq!(online.choose(&1, &[], 0.0), Choice { arm: "cubic", why: Why::Learned });
    }
}
