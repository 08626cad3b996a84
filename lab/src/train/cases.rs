//! Training cases: questions with their right answers (the best congestion controls or tunnels), computed from measured
//! transfers. A question is a network with an application's traffic profile, the size of a transfer, and whether the
//! peer offers tunnels.

use std::collections::{BTreeMap, BTreeSet};

use millrace_graft_proto::select::candidates::can_be_had;
use millrace_graft_proto::select::features::{COLUMNS, ExampleColumn, Feature, Features};
use millrace_graft_proto::select::profile::{LADDER_KIB, TrafficProfile};

use super::grow::Example;
use super::runs::TrainingRun;

/// Congestion controls that represent plain TCP in the comparison.
pub const TCP: [&str; 2] = ["cubic", "bbr"];
/// A candidate (congestion control or tunnel) also counts as right if its utility is at least this share of the best
/// candidate's.
pub const TIE: f64 = 0.95;

/// A question (network, traffic profile, size of the transfer, and whether the peer offers tunnels), with the cost and
/// utility of each candidate.
#[derive(Clone, Debug, PartialEq)]
pub struct TrainingCase {
    pub network: u32,
    pub features: Features,
    /// Cost of each candidate in ms, in the order of the candidates; `None` if the candidate did not transfer the data.
    pub cost_ms: Vec<Option<f64>>,
    /// Utility of each candidate from 0 to 1, in the order of the candidates.
    pub utility: Vec<f64>,
}

/// The training cases that were computed from a file of measured transfers.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Cases {
    pub candidates: Vec<String>,
    pub cases: Vec<TrainingCase>,
    /// Number of networks that are left out because transfers with a candidate are missing.
    pub incomplete: usize,
}

impl Cases {
    /// Builds the training cases. The right answers come from means over all seeds of a network, while the observations
    /// of the path in a question come from one seed.
    pub fn from_runs(runs: &[TrainingRun]) -> Self {
        let candidates: BTreeSet<&str> = runs.iter().map(|run| run.candidate.as_str()).collect();
        let candidates: Vec<String> = candidates.into_iter().map(str::to_owned).collect();
        let mut networks: BTreeMap<u32, Vec<&TrainingRun>> = BTreeMap::new();
        runs.iter().for_each(|run| networks.entry(run.network).or_default().push(run));
        let mut all = Self { candidates, ..Self::default() };
        for (network, runs) in networks {
            if !all.candidates.iter().all(|candidate| runs.iter().any(|run| run.candidate == *candidate)) {
                all.incomplete += 1;
                continue;
            }
            let new = all.cases_of_network(network, &runs);
            all.cases.extend(new);
        }
        all
    }

    fn cases_of_network(&self, network: u32, runs: &[&TrainingRun]) -> Vec<TrainingCase> {
        let seeds: BTreeMap<u32, Features> = runs.iter().map(|run| (run.seed, run.path())).collect();
        let mut cases = Vec::new();
        for profile in TrafficProfile::ALL {
            for (rung, kib) in LADDER_KIB.iter().enumerate() {
                let costs: Vec<Option<f64>> = self
                    .candidates
                    .iter()
                    .map(|candidate| mean_cost(runs, candidate, profile, rung))
                    .collect();
                // No measured transfer on this network reached this size, so the right candidate for this size is
                // unknown.
                if !runs.iter().any(|run| run.came.rungs_ms.get(rung).is_some_and(Option::is_some)) {
                    continue;
                }
                for (offered, warm) in [(false, false), (true, false), (true, true)] {
                    let cost_ms: Vec<_> = self
                        .candidates
                        .iter()
                        .zip(&costs)
                        .map(|(candidate, cost)| cost.filter(|_| can_be_had(candidate, offered, warm)))
                        .collect();
                    let utility = utilities(profile, &cost_ms);
                    for path in seeds.values() {
                        let features = path
                            .clone()
                            .for_profile(profile)
                            .carrying(offered, warm)
                            .with(Feature::Size, f64::from(*kib));
                        let cost_ms = cost_ms.clone();
                        let utility = utility.clone();
                        cases.push(TrainingCase { network, features, cost_ms, utility });
                    }
                }
            }
        }
        cases
    }

    pub fn networks(&self) -> BTreeSet<u32> {
        self.cases.iter().map(|case| case.network).collect()
    }

    pub fn candidate(&self, name: &str) -> Option<usize> {
        self.candidates.iter().position(|candidate| candidate == name)
    }
}

/// Returns the candidate's mean cost over the runs on this network, one run per random seed. Returns `None` if nothing
/// arrived in one of the runs, since the candidate then cannot be recommended.
fn mean_cost(runs: &[&TrainingRun], candidate: &str, profile: TrafficProfile, rung: usize) -> Option<f64> {
    let of: Option<Vec<f64>> = runs
        .iter()
        .filter(|run| run.candidate == candidate)
        .map(|run| profile.cost_ms(&run.came, rung))
        .collect();
    let of = of.filter(|of| !of.is_empty())?;
    Some(of.iter().sum::<f64>() / of.len() as f64)
}

fn utilities(profile: TrafficProfile, cost_ms: &[Option<f64>]) -> Vec<f64> {
    let best = cost_ms.iter().flatten().copied().fold(f64::INFINITY, f64::min);
    cost_ms.iter().map(|cost| cost.map_or(0.0, |cost| profile.utility(cost, best))).collect()
}

impl TrainingCase {
    /// Returns what identifies the question. It is equal for cases that differ only in the observations of the path.
    pub fn question(&self) -> (u32, [Option<u64>; 4]) {
        let asked = [Feature::Profile, Feature::Size, Feature::Offer, Feature::Warmth];
        (self.network, asked.map(|feature| self.features.get(feature).map(f64::to_bits)))
    }

    pub fn is_right(&self, candidate: usize) -> bool {
        self.utility.get(candidate).is_some_and(|utility| *utility >= TIE)
    }

    pub fn can_be_had(&self, candidate: usize) -> bool {
        self.cost_ms.get(candidate).is_some_and(Option::is_some)
    }

    /// Converts the case into a training example whose columns are the features that the trained decision tree uses.
    pub fn example(&self) -> Example {
        self.example_of(self.features.values().to_vec())
    }

    fn example_of(&self, values: Vec<Option<f64>>) -> Example {
        let right = (0..self.utility.len()).map(|candidate| self.is_right(candidate)).collect();
        Example { values, right, utility: self.utility.clone() }
    }

    /// Converts the case into a training example whose columns are the coarse classes in [`SEED_COLUMNS`].
    pub fn seed_example(&self) -> Example {
        self.example_of(seed_values(&self.features))
    }
}

/// Columns of a simple decision tree for comparison (the seed tree): three classes each of round-trip time, loss and
/// rate, and the traffic profile. The classes of round-trip time are those of the research system VTL.
pub const SEED_COLUMNS: [ExampleColumn; 4] = [
    ExampleColumn { name: "rtt", unit: "", choices: &["lan", "terrestrial", "long-delay"] },
    ExampleColumn { name: "loss", unit: "", choices: &["none", "some", "much"] },
    ExampleColumn { name: "rate", unit: "", choices: &["low", "middle", "high"] },
    COLUMNS[Feature::Profile as usize],
];

pub fn seed_values(features: &Features) -> Vec<Option<f64>> {
    let class = |feature, steps: [f64; 2]| {
        let value = features.get(feature)?;
        Some(steps.iter().filter(|step| value >= **step).count() as f64)
    };
    vec![
        class(Feature::Rtt, [5.0, 300.0]),
        class(Feature::Loss, [0.1, 1.0]),
        class(Feature::Rate, [2.0, 10.0]),
        features.get(Feature::Profile),
    ]
}

#[cfg(test)]
mod tests {
    use super::super::runs::tests::run;
    use super::*;

    #[test]
    fn acceptable_candidates_follow_from_measured_transfer_times() {
        let runs = [
            run(1, "bbr", 1.0),
            run(1, "carried-warm", 0.5),
            run(1, "cubic", 1.04),
            run(1, "carried-new", 3.0),
            run(2, "bbr", 1.0),
        ];
        let cases = Cases::from_runs(&runs);
        assert_eq!(cases.candidates, ["bbr", "carried-new", "carried-warm", "cubic"]);
        assert_eq!((cases.incomplete, cases.networks().len()), (1, 1));
        assert_eq!(cases.cases.len(), 4 * 9 * 3);
        let right =
            |case: &TrainingCase| (0..4).filter(|candidate| case.is_right(*candidate)).collect::<Vec<_>>();
        for case in &cases.cases {
            let profile = case.features.get(Feature::Profile).unwrap();
            let wanted: &[usize] = match case.features.get(Feature::Warmth) {
                Some(1.0) if profile == 3.0 => &[0, 2],
                Some(1.0) => &[2],
                _ => &[0, 3],
            };
            let right = right(case);
            assert!(wanted.iter().all(|candidate| right.contains(candidate)), "{case:?}");
            assert_eq!(case.can_be_had(2), case.features.get(Feature::Warmth) == Some(1.0));
            assert!(profile == 3.0 || right == wanted, "{case:?}");
        }
    }

    #[test]
    fn transfer_sizes_that_no_run_reached_give_no_training_cases() {
        let mut runs = [run(1, "bbr", 1.0), run(1, "cubic", 1.0)];
        runs.iter_mut().for_each(|run| run.came.rungs_ms[2..].fill(None));
        runs[0].came.rungs_ms[2] = Some(5.0);
        assert_eq!(Cases::from_runs(&runs).cases.len(), 4 * 3 * 3);
    }

    #[test]
    fn path_features_are_converted_to_classes_of_the_comparison_tree() {
        let features = "rtt=300,loss=0.5,profile=loss".parse().unwrap();
        assert_eq!(seed_values(&features), [Some(2.0), Some(1.0), None, Some(2.0)]);
    }
}
