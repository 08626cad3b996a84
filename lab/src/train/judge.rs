//! Scores decisions on networks that the tree was not trained with: five folds, in which each network is scored once.

use std::collections::{BTreeMap, BTreeSet};

use millrace_graft_proto::select::features::{COLUMNS, Features};
use millrace_graft_proto::select::tree::{Leaf, Node};
use serde::Serialize;

use super::cases::{Cases, SEED_COLUMNS, TCP, TrainingCase, seed_values};
use super::grow::{Example, Settings, grow};
use super::runs::TrainingRun;

pub const FOLDS: usize = 5;
/// Quantile of the normal distribution for a 95 % interval.
const Z: f64 = 1.96;
/// A candidate counts as slower than plain TCP if its cost exceeds the cost of plain TCP times this factor.
const SLOWER: f64 = 1.05;

/// Score of one method to choose a candidate (congestion control or tunnel).
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Score {
    pub by: String,
    pub cases: usize,
    /// Share of cases whose chosen candidate was right.
    pub right: f64,
    /// Lower bound of the 95 % interval (Wilson) of `right`. The sample size is the number of networks, since cases of
    /// one network are alike.
    pub right_low: f64,
    pub right_high: f64,
    /// Mean difference between the utility of the best candidate and of the chosen candidate, 0 to 1.
    pub regret: f64,
    /// Share of cases in which the chosen candidate cost over 5 % more than plain TCP, by TCP's congestion control.
    pub slower_than: Vec<(String, f64)>,
}

/// Scores of all compared methods to choose a candidate, and details of the tree's score.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct JudgeReport {
    pub networks: usize,
    pub incomplete: usize,
    /// Scores of the compared methods, the tree's first.
    pub scores: Vec<Score>,
    pub classes: Vec<CandidateScore>,
    /// Numbers of cases by right candidate (row) and chosen candidate (column). If a case has several right candidates
    /// and the chosen candidate is one of them, the case's row is that candidate's.
    pub confusion: Vec<Vec<usize>>,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CandidateScore {
    pub candidate: String,
    /// Share of right decisions among the cases in which this candidate was chosen.
    pub precision: Option<f64>,
    /// Share of cases in which this candidate was chosen, among the cases in which it was right.
    pub recall: Option<f64>,
}

/// Trains a tree on four fifths of the networks and scores it on the rest, five times.
pub fn judge(cases: &Cases, settings: Settings) -> JudgeReport {
    let networks: Vec<u32> = cases.networks().into_iter().collect();
    let mut choices: [Vec<Option<usize>>; 4] = std::array::from_fn(|_| vec![None; cases.cases.len()]);
    for fold in 0..FOLDS {
        // Each network is in one fold only, so no tree is scored on a network that it was trained with.
        let held =
            |case: &TrainingCase| networks.binary_search(&case.network).is_ok_and(|at| at % FOLDS == fold);
        let training: Vec<&TrainingCase> = cases.cases.iter().filter(|case| !held(case)).collect();
        let deciders = Deciders::train(cases, &training, settings);
        for (at, case) in cases.cases.iter().enumerate().filter(|(_, case)| held(case)) {
            for (all, choice) in choices.iter_mut().zip(deciders.decide(case)) {
                all[at] = choice;
            }
        }
    }
    let names = ["tree", "majority", "always bbr", "the seed's tree"];
    let score = |(name, choices): (&str, &Vec<Option<usize>>)| score(name, cases, choices, networks.len());
    let scores = names.into_iter().zip(&choices).map(score).collect();
    let confusion = confusion(cases, &choices[0]);
    let classes = classes(&cases.candidates, &confusion);
    JudgeReport { networks: networks.len(), incomplete: cases.incomplete, scores, classes, confusion }
}

/// Scores the candidate that was best in all other transfers on the same network. A method that knows less can hardly
/// score higher, so the gap between this score and the maximum is due to chance. Returns `None` if each network has
/// only one transfer with each candidate.
pub fn again(runs: &[TrainingRun]) -> Option<Score> {
    let seeds: BTreeSet<u32> = runs.iter().map(|run| run.seed).collect();
    let mut all = Cases::default();
    let mut choices = Vec::new();
    for seed in seeds {
        let (own, others): (Vec<TrainingRun>, Vec<TrainingRun>) =
            runs.iter().cloned().partition(|run| run.seed == seed);
        let own = Cases::from_runs(&own);
        let others = Cases::from_runs(&others);
        let known: BTreeMap<_, &TrainingCase> =
            others.cases.iter().map(|case| (case.question(), case)).collect();
        for case in own.cases {
            let Some(other) = known.get(&case.question()) else { continue };
            let can_be_had =
                others.candidates.iter().enumerate().filter(|(candidate, _)| other.can_be_had(*candidate));
            let best =
                can_be_had.max_by(|(one, _), (two, _)| other.utility[*one].total_cmp(&other.utility[*two]));
            choices.push(
                best.and_then(|(_, name)| own.candidates.iter().position(|candidate| candidate == name)),
            );
            all.cases.push(case);
        }
        all.candidates = own.candidates;
    }
    let networks = all.networks().len();
    (networks > 0).then(|| score("other transfers there", &all, &choices, networks))
}

/// Trains the final tree with all cases.
pub fn train(cases: &Cases, settings: Settings) -> Node {
    let examples: Vec<Example> = cases.cases.iter().map(TrainingCase::example).collect();
    let mut tree = grow(&COLUMNS, &cases.candidates, &examples, settings);
    let mut costs: BTreeMap<u32, Vec<f64>> = BTreeMap::new();
    for case in &cases.cases {
        let leaf = tree.walk(&COLUMNS, &case.features.values()).leaf;
        let cost = best(&cases.candidates, leaf, case)
            .and_then(|candidate| case.cost_ms.get(candidate).copied().flatten());
        if let Some((cost, ideal)) = cost.zip(case.features.ideal_ms()) {
            costs.entry(leaf.number).or_default().push(cost / ideal);
        }
    }
    tree.visit_leaves(&mut |leaf| {
        leaf.usual = costs.get_mut(&leaf.number).and_then(|costs| ninth_of_ten(costs))
    });
    tree
}

fn ninth_of_ten(costs: &mut [f64]) -> Option<f64> {
    costs.sort_unstable_by(f64::total_cmp);
    costs.get(costs.len() * 9 / 10).map(|cost| (cost * 1e3).round() / 1e3)
}

/// Returns the best candidate that a leaf of the tree ranks and that is available in this case.
fn best(candidates: &[String], leaf: &Leaf, case: &TrainingCase) -> Option<usize> {
    let mut places = leaf
        .ranking
        .iter()
        .filter_map(|rank| candidates.iter().position(|candidate| *candidate == rank.candidate));
    places.find(|candidate| case.can_be_had(*candidate))
}

struct Deciders<'a> {
    candidates: &'a [String],
    tree: Node,
    seed: Node,
    /// The candidate that is right most often over all cases, for comparison.
    majority: Leaf,
}

impl<'a> Deciders<'a> {
    fn train(cases: &'a Cases, training: &[&TrainingCase], settings: Settings) -> Self {
        let examples: Vec<Example> = training.iter().map(|case| case.example()).collect();
        let seeds: Vec<Example> = training.iter().map(|case| case.seed_example()).collect();
        let leaf = grow(&[], &cases.candidates, &examples, settings);
        Self {
            candidates: &cases.candidates,
            tree: grow(&COLUMNS, &cases.candidates, &examples, settings),
            seed: grow(&SEED_COLUMNS, &cases.candidates, &seeds, settings),
            majority: leaf.leaves().first().map_or_else(Leaf::default, |leaf| (*leaf).clone()),
        }
    }

    fn decide(&self, case: &TrainingCase) -> [Option<usize>; 4] {
        let features: &Features = &case.features;
        let tree = self.tree.walk(&COLUMNS, &features.values()).leaf;
        let seed = self.seed.walk(&SEED_COLUMNS, &seed_values(features)).leaf;
        let best = |leaf| best(self.candidates, leaf, case);
        [
            best(tree),
            best(&self.majority),
            self.candidates.iter().position(|candidate| candidate == "bbr"),
            best(seed),
        ]
    }
}

fn score(by: &str, cases: &Cases, choices: &[Option<usize>], networks: usize) -> Score {
    let all = || cases.cases.iter().zip(choices);
    let share = |count: usize| count as f64 / cases.cases.len().max(1) as f64;
    let right = share(
        all().filter(|(case, candidate)| candidate.is_some_and(|candidate| case.is_right(candidate))).count(),
    );
    let regret = |(case, candidate): (&TrainingCase, &Option<usize>)| {
        1.0 - candidate.and_then(|candidate| case.utility.get(candidate).copied()).unwrap_or_default()
    };
    let slower = |tcp: &str| {
        let tcp = cases.candidate(tcp);
        let is_slower = |(case, candidate): &(&TrainingCase, &Option<usize>)| {
            let cost = |candidate: Option<usize>| case.cost_ms.get(candidate?).copied().flatten();
            match (cost(**candidate), cost(tcp)) {
                (Some(own), Some(tcp)) => own > tcp * SLOWER,
                (None, Some(_)) => true,
                _ => false,
            }
        };
        share(all().filter(is_slower).count())
    };
    let (right_low, right_high) = wilson(right, networks);
    Score {
        by: by.to_owned(),
        cases: cases.cases.len(),
        right,
        right_low,
        right_high,
        regret: all().map(regret).sum::<f64>() / cases.cases.len().max(1) as f64,
        slower_than: TCP.iter().map(|tcp| ((*tcp).to_owned(), slower(tcp))).collect(),
    }
}

/// Returns the 95 % bounds of a share that was measured with `n` cases.
pub fn wilson(share: f64, n: usize) -> (f64, f64) {
    if n == 0 {
        return (0.0, 1.0);
    }
    let n = n as f64;
    let square = Z * Z;
    let middle = share + square / (2.0 * n);
    let half = Z * (share * (1.0 - share) / n + square / (4.0 * n * n)).sqrt();
    ((middle - half) / (1.0 + square / n), (middle + half) / (1.0 + square / n))
}

fn confusion(cases: &Cases, choices: &[Option<usize>]) -> Vec<Vec<usize>> {
    let mut table = vec![vec![0; cases.candidates.len()]; cases.candidates.len()];
    for (case, chosen) in cases.cases.iter().zip(choices) {
        let Some(chosen) = *chosen else { continue };
        let by_utility = |one: &usize, other: &usize| case.utility[*one].total_cmp(&case.utility[*other]);
        let wanted =
            if case.is_right(chosen) { Some(chosen) } else { (0..cases.candidates.len()).max_by(by_utility) };
        if let Some(wanted) = wanted {
            table[wanted][chosen] += 1;
        }
    }
    table
}

fn classes(candidates: &[String], confusion: &[Vec<usize>]) -> Vec<CandidateScore> {
    let of = |candidate: usize| {
        let right = confusion[candidate][candidate];
        let chosen: usize = confusion.iter().map(|row| row[candidate]).sum();
        let wanted: usize = confusion[candidate].iter().sum();
        let share = |all: usize| (all > 0).then(|| right as f64 / all as f64);
        CandidateScore {
            candidate: candidates[candidate].clone(),
            precision: share(chosen),
            recall: share(wanted),
        }
    };
    (0..candidates.len()).map(of).collect()
}

#[cfg(test)]
mod tests {
    use millrace_graft_proto::select::features::Feature;

    use super::super::runs::tests::run;
    use super::*;

    /// Builds cases: with losses one candidate is three times as fast, without losses the other candidate. `seen` says
    /// whether features show the loss.
    fn cases(seen: bool) -> Cases {
        let mut runs = Vec::new();
        for network in 0..50 {
            let loses = network % 3 == 1;
            for (candidate, ms) in
                [("bbr", if loses { 1.0 } else { 3.0 }), ("cubic", if loses { 3.0 } else { 1.0 })]
            {
                let mut run = run(network, candidate, ms);
                run.seen.rtt_ms = Some(f64::from(network * 7 % 50));
                run.seen.loss_percent = seen.then_some(if loses { 1.0 } else { 0.0 });
                runs.push(run);
            }
        }
        Cases::from_runs(&runs)
    }

    const SETTINGS: Settings = Settings { least: 100.0, doubt: 0.69, alike: 100.0, depth: 16 };

    #[test]
    fn network_property_that_features_show_is_learned() {
        let report = judge(&cases(true), SETTINGS);
        let [tree, majority, bbr, seed] = &report.scores[..] else { panic!("four: {report:?}") };
        assert_eq!((report.networks, tree.cases), (50, 50 * 4 * 9 * 3));
        assert_eq!((tree.right, tree.regret), (1.0, 0.0), "{tree:?}");
        assert_eq!(seed.right, 1.0, "it knows losses, too");
        assert!(majority.right < 0.7 && bbr.right < 0.4 && bbr.regret > 0.3, "{majority:?} {bbr:?}");
        assert_eq!(tree.slower_than, [("cubic".into(), 0.0), ("bbr".into(), 0.0)]);
        assert!((bbr.slower_than[0].1 - 0.66).abs() < 0.01, "{bbr:?}");
        for (at, class) in report.classes.iter().enumerate() {
            assert_eq!((class.precision, class.recall), (Some(1.0), Some(1.0)));
            assert_eq!(report.confusion[at][1 - at], 0);
        }
    }

    #[test]
    fn decision_tree_result_has_90th_percentile_cost_of_its_training_cases() {
        let mut cases = cases(true);
        for case in &mut cases.cases {
            case.features = case.features.clone().with(Feature::Rate, 10.0);
        }
        let tree = train(&cases, SETTINGS);
        assert_eq!(tree.leaves().len(), 2);
        for leaf in tree.leaves() {
            let usual = leaf.usual.expect("all is known");
            let below = |case: &&TrainingCase| {
                let way = tree.walk(&COLUMNS, &case.features.values());
                let candidate = best(&cases.candidates, way.leaf, case).expect("a candidate");
                way.leaf.number == leaf.number
                    && case.cost_ms[candidate].unwrap() / case.features.ideal_ms().unwrap() <= usual + 1e-3
            };
            let share = cases.cases.iter().filter(below).count() as f64 / leaf.examples;
            assert!((0.9..0.95).contains(&share), "{share}");
        }
    }

    /// The right candidate depends on the network alone, which no feature shows. A tree that recognised networks from
    /// the training would be right, so scoring must use other networks.
    #[test]
    fn network_property_that_no_feature_shows_is_not_learned() {
        let report = judge(&cases(false), SETTINGS);
        assert!(report.scores[0].right < 0.75, "{:?}", report.scores[0]);
        assert!(report.scores[0].regret > 0.1);
    }

    /// On every second network the best candidate differs from transfer to transfer. On the other networks it is always
    /// the same candidate.
    #[test]
    fn candidate_best_in_other_transfers_is_scored_on_the_same_network() {
        let runs = |seeds: u32| -> Vec<TrainingRun> {
            let mut runs = Vec::new();
            for (network, seed) in (0..10).flat_map(|network| (1..=seeds).map(move |seed| (network, seed))) {
                let is_first = network % 2 == 0 || seed % 2 == 0;
                for (candidate, ms) in [("bbr", if is_first { 1.0 } else { 3.0 }), ("cubic", 2.0)] {
                    runs.push(TrainingRun { seed, ..run(network, candidate, ms) });
                }
            }
            runs
        };
        assert_eq!(again(&runs(1)), None);
        let score = again(&runs(2)).expect("two");
        assert_eq!((score.cases, score.by.as_str()), (2 * 10 * 4 * 9 * 3, "other transfers there"));
        // For the traffic profile `insensitive` (transfers in the background), a candidate that takes twice as long as
        // the best one is right too. So some answers are right by chance.
        assert!((0.5..0.65).contains(&score.right), "{score:?}");
    }

    #[test]
    fn confidence_bounds_match_published_values() {
        // The expected bounds are published 95 % intervals: for 475 right answers of 500, and for 30 of 38.
        let (low, high) = wilson(0.95, 500);
        assert!((low - 0.927).abs() < 0.0006 && (high - 0.966).abs() < 0.001, "{low} {high}");
        let (low, high) = wilson(30.0 / 38.0, 38);
        assert!((low - 0.637).abs() < 0.002 && (high - 0.889).abs() < 0.002, "{low} {high}");
        assert_eq!(wilson(0.0, 0), (0.0, 1.0));
    }
}
