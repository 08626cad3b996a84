//! Grows a decision tree by gain ratio, and prunes it: C4.5 (Quinlan, 1993), with examples that may have several right
//! answers.
//!
//! In the computation of information, an example's weight is divided equally among its right answers. In the counting
//! of errors, each of them is fully right. An example with an unknown value goes into every branch, weighted by the
//! share of examples known to belong there. Thresholds lie between two values, without the penalty that later releases
//! of C4.5 give to numeric columns.

use millrace_graft_proto::select::features::ExampleColumn;
use millrace_graft_proto::select::tree::{Branch, DEPTH_MAX, Leaf, Node, Rank, Split, TreeSide};

/// An example to learn from: the values of its columns, and its right answers.
#[derive(Clone, Debug, PartialEq)]
pub struct Example {
    /// Values in the order of the columns; `None` if unknown.
    pub values: Vec<Option<f64>>,
    /// Whether each candidate (congestion control or tunnel) is a right answer, in the order of the candidates.
    pub right: Vec<bool>,
    /// Utility of each candidate from 0 to 1, in the order of the candidates.
    pub utility: Vec<f64>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Settings {
    /// Least total weight of examples that at least two branches of a node must each have.
    pub least: f64,
    /// Confidence for pruning: the upper bound of an error rate is this many standard deviations above the measured
    /// rate. C4.5's default of 25 % corresponds to 0.69. Below 0 nothing is pruned.
    pub doubt: f64,
    /// Number of examples that count as one, since they belong to the same network.
    pub alike: f64,
    pub depth: usize,
}

impl Default for Settings {
    fn default() -> Self {
        Self { least: 2.0, doubt: 0.69, alike: 1.0, depth: DEPTH_MAX }
    }
}

/// Grows a tree for the examples. The list of examples may be empty.
pub fn grow(
    columns: &[ExampleColumn],
    candidates: &[String],
    examples: &[Example],
    settings: Settings,
) -> Node {
    let grower = Grower { columns, candidates, examples, settings };
    let all: ExampleSet = (0..examples.len()).map(|at| (at, 1.0)).collect();
    let (mut root, _) = grower.node(&all, settings.depth);
    let mut next = 0..;
    root.visit_leaves(&mut |leaf| leaf.number = next.next().unwrap_or_default());
    root
}

/// Indices of examples, each with its weight.
type ExampleSet = Vec<(usize, f64)>;

struct Grower<'a> {
    columns: &'a [ExampleColumn],
    candidates: &'a [String],
    examples: &'a [Example],
    settings: Settings,
}

/// A column by which a set of examples could be divided, and the information gained by that division.
#[derive(Clone, Copy, Debug, PartialEq)]
struct PossibleSplit {
    column: usize,
    /// Threshold, if the column is numeric.
    at: Option<f64>,
    gain: f64,
    ratio: f64,
}

impl Grower<'_> {
    /// Returns the tree node for a set of examples, and the upper bound of the node's number of errors.
    fn node(&self, set: &ExampleSet, depth: usize) -> (Node, f64) {
        let leaf = self.leaf(set);
        let feared = self.feared(&leaf);
        let chosen = if depth <= 1 || leaf.ranking.first().is_none_or(|best| best.right >= 1.0) {
            None
        } else {
            self.best(set)
        };
        let Some(chosen) = chosen else { return (Node::Leaf(leaf), feared) };
        let sets = self.divided(set, chosen);
        let grown: Vec<(Node, f64)> = sets.iter().map(|set| self.node(set, depth - 1)).collect();
        let below: f64 = grown.iter().map(|(_, feared)| feared).sum();
        // A leaf is preferred to a branch if its estimated number of errors exceeds the branch's by at most 0.1.
        if self.settings.doubt >= 0.0 && feared <= below + 0.1 {
            return (Node::Leaf(leaf), feared);
        }
        let weights: Vec<f64> = sets.iter().map(weight).collect();
        (self.joined(chosen, grown.into_iter().map(|(node, _)| node).collect(), &weights), below)
    }

    fn joined(&self, chosen: PossibleSplit, mut nodes: Vec<Node>, weights: &[f64]) -> Node {
        let column = &self.columns[chosen.column];
        let heaviest = (0..weights.len()).max_by(|one, other| weights[*one].total_cmp(&weights[*other]));
        let heaviest = heaviest.unwrap_or_default();
        let by = column.name.to_owned();
        match chosen.at {
            Some(at) => {
                let above = nodes.pop();
                let below = nodes.pop();
                let boxed =
                    |node: Option<Node>| Box::new(node.unwrap_or_else(|| Node::Leaf(Leaf::default())));
                let unknown = if heaviest == 0 { TreeSide::Below } else { TreeSide::Above };
                Node::Split(Split { by, at, unknown, below: boxed(below), above: boxed(above) })
            }
            None => {
                let names = || column.choices.iter().map(|choice| (*choice).to_owned());
                let unknown = names().nth(heaviest).unwrap_or_default();
                Node::Branch(Branch { by, unknown, to: names().zip(nodes).collect() })
            }
        }
    }

    /// Builds a leaf, which ranks the candidates by how often they are right.
    fn leaf(&self, set: &ExampleSet) -> Leaf {
        let all = weight(set).max(f64::MIN_POSITIVE);
        let share = |of: &dyn Fn(&Example) -> f64| {
            set.iter().map(|(at, weight)| of(&self.examples[*at]) * weight).sum::<f64>() / all
        };
        let mut ranking: Vec<Rank> = self
            .candidates
            .iter()
            .enumerate()
            .map(|(class, candidate)| Rank {
                candidate: candidate.clone(),
                right: rounded(share(&|example| f64::from(u8::from(example.right[class])))),
                utility: rounded(share(&|example| example.utility[class])),
            })
            .collect();
        ranking.sort_by(|one, other| {
            other.right.total_cmp(&one.right).then(other.utility.total_cmp(&one.utility))
        });
        Leaf { number: 0, examples: rounded(weight(set)), usual: None, ranking }
    }

    fn feared(&self, leaf: &Leaf) -> f64 {
        let wrong = 1.0 - leaf.ranking.first().map_or(0.0, |best| best.right);
        leaf.examples * upper(wrong, leaf.examples / self.settings.alike, self.settings.doubt.max(0.0))
    }

    /// Returns the column with the highest gain ratio among those whose information gain is at least average.
    fn best(&self, set: &ExampleSet) -> Option<PossibleSplit> {
        let splits: Vec<_> = (0..self.columns.len())
            .filter_map(|column| self.possible_split(set, column))
            .filter(|split| split.gain > 1e-9)
            .collect();
        let mean = splits.iter().map(|it| it.gain).sum::<f64>() / splits.len() as f64;
        let enough = splits.into_iter().filter(|it| it.gain >= mean - 1e-9);
        enough.max_by(|one, other| one.ratio.total_cmp(&other.ratio))
    }

    fn possible_split(&self, set: &ExampleSet, column: usize) -> Option<PossibleSplit> {
        let known: ExampleSet =
            set.iter().copied().filter(|(at, _)| self.value(*at, column).is_some()).collect();
        let at = match self.columns[column].choices {
            [] => Some(self.threshold(&known, column)?),
            _ => None,
        };
        let mut parts = vec![ExampleSet::new(); self.ways(column)];
        for (example, weight) in &known {
            parts[self.way(column, at, self.value(*example, column)?)].push((*example, *weight));
        }
        let weights: Vec<f64> = parts.iter().map(weight).collect();
        if weights.iter().filter(|weight| **weight >= self.settings.least).count() < 2 {
            return None;
        }
        let all = weight(set);
        let knowing = weight(&known);
        let after: f64 = parts.iter().map(|part| information(&self.shares(part)) * weight(part)).sum();
        let gain = (information(&self.shares(&known)) - after / knowing) * knowing / all;
        // In the split information, the examples without a value count as if they were a branch of their own.
        let mut ways = weights;
        ways.push(all - knowing);
        Some(PossibleSplit { column, at, gain, ratio: gain / information(&ways) })
    }

    /// Returns the threshold between two values with the highest gain of information.
    fn threshold(&self, known: &ExampleSet, column: usize) -> Option<f64> {
        let mut sorted: Vec<(f64, usize, f64)> =
            known.iter().filter_map(|(at, weight)| Some((self.value(*at, column)?, *at, *weight))).collect();
        sorted.sort_by(|one, other| one.0.total_cmp(&other.0));
        let mut below = vec![0.0; self.candidates.len()];
        let mut above = self.shares(known);
        let all = weight(known);
        let mut passed = 0.0;
        let mut best: Option<(f64, f64)> = None;
        for pair in sorted.windows(2) {
            let &[(value, at, weight), (next, ..)] = pair else { continue };
            self.move_over(at, weight, &mut above, &mut below);
            passed += weight;
            let room = passed >= self.settings.least && all - passed >= self.settings.least;
            if next <= value || !room {
                continue;
            }
            let left = information(&below) * passed + information(&above) * (all - passed);
            if best.is_none_or(|(least, _)| left < least - 1e-9) {
                best = Some((left, between(value, next)));
            }
        }
        best.map(|(_, at)| at)
    }

    fn move_over(&self, at: usize, weight: f64, from: &mut [f64], to: &mut [f64]) {
        let right = &self.examples[at].right;
        let part = weight / right.iter().filter(|is| **is).count().max(1) as f64;
        for (class, _) in right.iter().enumerate().filter(|(_, is)| **is) {
            from[class] -= part;
            to[class] += part;
        }
    }

    /// Returns the weight of each right answer in a set of examples.
    fn shares(&self, set: &ExampleSet) -> Vec<f64> {
        let mut none = vec![0.0; self.candidates.len()];
        let mut shares = vec![0.0; self.candidates.len()];
        set.iter().for_each(|(at, weight)| self.move_over(*at, *weight, &mut none, &mut shares));
        shares
    }

    /// Divides a set of examples into branches. Examples without a value go into every branch, weighted by the share of
    /// examples known to belong there.
    fn divided(&self, set: &ExampleSet, chosen: PossibleSplit) -> Vec<ExampleSet> {
        let mut sets = vec![ExampleSet::new(); self.ways(chosen.column)];
        let mut unknown = ExampleSet::new();
        for (at, weight) in set {
            match self.value(*at, chosen.column) {
                Some(value) => sets[self.way(chosen.column, chosen.at, value)].push((*at, *weight)),
                None => unknown.push((*at, *weight)),
            }
        }
        let weights: Vec<f64> = sets.iter().map(weight).collect();
        let all: f64 = weights.iter().sum();
        for (set, share) in sets.iter_mut().zip(weights) {
            set.extend(unknown.iter().map(|(at, weight)| (*at, weight * share / all)));
        }
        sets
    }

    fn value(&self, example: usize, column: usize) -> Option<f64> {
        self.examples[example].values[column]
    }

    fn ways(&self, column: usize) -> usize {
        self.columns[column].choices.len().max(2)
    }

    fn way(&self, column: usize, at: Option<f64>, value: f64) -> usize {
        match at {
            Some(at) => usize::from(value > at),
            None => (value as usize).min(self.ways(column) - 1),
        }
    }
}

fn weight(set: &ExampleSet) -> f64 {
    set.iter().map(|(_, weight)| weight).sum()
}

/// Returns the entropy of weights, in bits.
fn information(weights: &[f64]) -> f64 {
    let all: f64 = weights.iter().sum();
    let shares = weights.iter().map(|weight| weight / all).filter(|share| *share > 1e-12);
    -shares.map(|share| share * share.log2()).sum::<f64>()
}

/// Returns the upper bound of a share that was measured with `n` examples (Wilson; Witten & Frank, Data Mining, 6.1).
fn upper(share: f64, n: f64, z: f64) -> f64 {
    if n <= 0.0 {
        return share;
    }
    let root = (share / n - share * share / n + z * z / (4.0 * n * n)).max(0.0).sqrt();
    (share + z * z / (2.0 * n) + z * root) / (1.0 + z * z / n)
}

/// Returns the number with the fewest digits between `low` and `high`.
fn between(low: f64, high: f64) -> f64 {
    let middle = f64::midpoint(low, high);
    let texts = (0..15).map(|digits| format!("{middle:.digits$e}").parse().unwrap_or(middle));
    texts.into_iter().find(|at| low < *at && *at < high).unwrap_or(low)
}

fn rounded(value: f64) -> f64 {
    (value * 1e4).round() / 1e4
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOLF: [ExampleColumn; 4] = [
        ExampleColumn { name: "outlook", unit: "", choices: &["sunny", "overcast", "rain"] },
        ExampleColumn { name: "temperature", unit: "F", choices: &[] },
        ExampleColumn { name: "humidity", unit: "%", choices: &[] },
        ExampleColumn { name: "windy", unit: "", choices: &["false", "true"] },
    ];

    /// Data of the first table in Quinlan's book "C4.5".
    const DAYS: [([f64; 4], bool); 14] = [
        ([0.0, 75.0, 70.0, 1.0], true),
        ([0.0, 80.0, 90.0, 1.0], false),
        ([0.0, 85.0, 85.0, 0.0], false),
        ([0.0, 72.0, 95.0, 0.0], false),
        ([0.0, 69.0, 70.0, 0.0], true),
        ([1.0, 72.0, 90.0, 1.0], true),
        ([1.0, 83.0, 78.0, 0.0], true),
        ([1.0, 64.0, 65.0, 1.0], true),
        ([1.0, 81.0, 75.0, 0.0], true),
        ([2.0, 71.0, 80.0, 1.0], false),
        ([2.0, 65.0, 70.0, 1.0], false),
        ([2.0, 75.0, 80.0, 0.0], true),
        ([2.0, 68.0, 80.0, 0.0], true),
        ([2.0, 70.0, 96.0, 0.0], true),
    ];

    fn golf() -> Vec<Example> {
        let example = |(values, plays): &([f64; 4], bool)| Example {
            values: values.iter().copied().map(Some).collect(),
            right: vec![*plays, !plays],
            utility: vec![f64::from(u8::from(*plays)), f64::from(u8::from(!plays))],
        };
        DAYS.iter().map(example).collect()
    }

    fn candidates(count: usize) -> Vec<String> {
        ["play", "do not", "a", "b"].iter().take(count).map(|candidate| (*candidate).to_owned()).collect()
    }

    const UNPRUNED: Settings = Settings { least: 2.0, doubt: -1.0, alike: 1.0, depth: DEPTH_MAX };

    fn possible_split(examples: &[Example], columns: &[ExampleColumn], column: usize) -> PossibleSplit {
        let candidates = candidates(examples[0].right.len());
        let grower = Grower {
            columns,
            candidates: &candidates,
            examples,
            settings: Settings { least: 1.0, ..UNPRUNED },
        };
        let all: ExampleSet = (0..examples.len()).map(|at| (at, 1.0)).collect();
        grower.possible_split(&all, column).expect("it divides")
    }

    fn close(value: f64, wanted: f64) -> bool {
        (value - wanted).abs() < 0.0015
    }

    #[test]
    fn information_gains_match_quinlans_book() {
        let mut days = golf();
        let outlook = possible_split(&days, &GOLF, 0);
        assert!(close(outlook.gain, 0.246) && close(outlook.ratio, 0.156), "{outlook:?}");
        let windy = possible_split(&days, &GOLF, 3);
        assert!(close(windy.gain, 0.048) && close(windy.ratio, 0.049), "{windy:?}");
        // As in chapter 3 of Quinlan's book "C4.5", the outlook of one day is unknown.
        days[5].values[0] = None;
        let outlook = possible_split(&days, &GOLF, 0);
        assert!(close(outlook.gain, 0.199) && close(outlook.ratio, 0.110), "{outlook:?}");
    }

    #[test]
    fn decision_tree_matches_quinlans_book() {
        let Node::Branch(root) = grow(&GOLF, &candidates(2), &golf(), UNPRUNED) else { panic!("a branch") };
        assert_eq!((root.by.as_str(), root.to.len()), ("outlook", 3));
        let candidate = |node: &Node| match node {
            Node::Leaf(leaf) => leaf.ranking[0].candidate.clone(),
            other => panic!("a leaf: {other:?}"),
        };
        assert_eq!(candidate(&root.to["overcast"]), "play");
        let Node::Split(humid) = &root.to["sunny"] else { panic!("a split") };
        assert!(humid.by == "humidity" && (70.0..85.0).contains(&humid.at), "{humid:?}");
        assert_eq!((candidate(&humid.below), candidate(&humid.above)), ("play".into(), "do not".into()));
        let Node::Branch(windy) = &root.to["rain"] else { panic!("a branch") };
        assert_eq!(
            (candidate(&windy.to["true"]), candidate(&windy.to["false"])),
            ("do not".into(), "play".into())
        );
        assert_eq!(root.to.values().flat_map(Node::leaves).map(|leaf| leaf.examples).sum::<f64>(), 14.0);
    }

    /// Computes gain and gain ratio from their definition, independently of the code under test.
    fn by_hand(examples: &[Example], column: usize) -> (f64, f64) {
        let entropy = |parts: &[f64]| {
            let all: f64 = parts.iter().sum();
            parts.iter().filter(|it| **it > 0.0).map(|it| -(it / all) * (it / all).log2()).sum::<f64>()
        };
        let info = |some: &[&Example]| {
            let mut classes = vec![0.0; examples[0].right.len()];
            for example in some {
                let rights = example.right.iter().filter(|is| **is).count() as f64;
                example
                    .right
                    .iter()
                    .zip(&mut classes)
                    .filter(|(is, _)| **is)
                    .for_each(|(_, it)| *it += 1.0 / rights);
            }
            entropy(&classes)
        };
        let all: Vec<&Example> = examples.iter().collect();
        let known: Vec<&Example> = all.iter().copied().filter(|it| it.values[column].is_some()).collect();
        let mut best = (0.0, 0.0);
        for at in known.iter().filter_map(|it| it.values[column]) {
            let (low, high): (Vec<&Example>, Vec<&Example>) =
                known.iter().copied().partition(|it| it.values[column] <= Some(at));
            if low.is_empty() || high.is_empty() {
                continue;
            }
            let after = [&low, &high].iter().map(|part| info(part) * part.len() as f64).sum::<f64>();
            let gain = (info(&known) - after / known.len() as f64) * known.len() as f64 / all.len() as f64;
            let ways = [low.len(), high.len(), all.len() - known.len()].map(|count| count as f64);
            if gain > best.0 + 1e-9 {
                best = (gain, gain / entropy(&ways));
            }
        }
        best
    }

    proptest::proptest! {
        #[test]
        fn information_gain_with_equal_or_missing_values_matches_definition(
            rows in proptest::collection::vec((proptest::option::of(0_u8..6), 1_u8..8), 4..40)
        ) {
            let columns = [ExampleColumn { name: "it", unit: "", choices: &[] }];
            let example = |(value, right): &(Option<u8>, u8)| Example {
                values: vec![value.map(f64::from)],
                right: (0..3).map(|bit| right >> bit & 1 == 1).collect(),
                utility: vec![1.0; 3],
            };
            let examples: Vec<Example> = rows.iter().map(example).collect();
            let (gain, ratio) = by_hand(&examples, 0);
            if gain > 1e-6 {
                let split = possible_split(&examples, &columns, 0);
                proptest::prop_assert!((split.gain - gain).abs() < 1e-6, "{:?} {}", split, gain);
                // Two thresholds with equal gain may divide the examples differently, and then their gain ratios
                // differ. So the test only checks that both gain ratios are positive.
                proptest::prop_assert!(split.ratio > 0.0 && ratio > 0.0);
            }
        }
    }

    #[test]
    fn pruning_bounds_match_quinlans_book() {
        for (wrong, n, wanted) in [(2.0, 6.0, 0.47), (1.0, 2.0, 0.72), (5.0, 14.0, 0.446)] {
            let bound = upper(wrong / n, n, 0.69);
            assert!((bound - wanted).abs() < 0.005, "{wrong} of {n}: {bound}");
        }
    }

    #[test]
    fn decision_tree_pruning_removes_noise_and_keeps_real_rules() {
        let columns = [GOLF[1], GOLF[2]];
        // The right candidate follows from the first column, but 5 % of the examples are wrong. The second column has
        // no information.
        let mut random = 1_u32;
        let mut example = |at: u32| {
            random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let right = (at < 100) != (random >> 16).is_multiple_of(20);
            Example {
                values: vec![Some(f64::from(at)), Some(f64::from(random >> 20))],
                right: vec![right, !right],
                utility: vec![1.0; 2],
            }
        };
        let examples: Vec<Example> = (0..200).map(&mut example).collect();
        let full = grow(&columns, &candidates(2), &examples, UNPRUNED);
        let pruned =
            grow(&columns, &candidates(2), &examples, Settings { alike: 4.0, ..Settings::default() });
        assert!(full.leaves().len() > 8, "{}", full.leaves().len());
        let Node::Split(root) = &pruned else { panic!("a split: {pruned:?}") };
        assert!(root.by == "temperature" && (95.0..105.0).contains(&root.at), "{root:?}");
        assert!(pruned.leaves().len() < full.leaves().len() / 2, "{}", pruned.leaves().len());
    }

    #[test]
    fn every_acceptable_candidate_counts_as_correct() {
        let example = |value: f64, right: [bool; 2]| Example {
            values: vec![Some(value)],
            right: right.to_vec(),
            utility: vec![1.0, 0.96],
        };
        let examples: Vec<Example> = (0..20).map(|at| example(f64::from(at), [true, at % 2 == 0])).collect();
        let columns = [GOLF[1]];
        let Node::Leaf(leaf) = grow(&columns, &candidates(2), &examples, Settings::default()) else {
            panic!("one answer is right for all")
        };
        assert_eq!(
            (leaf.ranking[0].candidate.as_str(), leaf.ranking[0].right, leaf.ranking[1].right),
            ("play", 1.0, 0.5)
        );
        assert!(matches!(grow(&columns, &candidates(2), &[], Settings::default()), Node::Leaf(_)));
    }

    /// A column with a different value for each example gains as much information as one with two values. Its gain
    /// ratio must be lower.
    #[test]
    fn attribute_with_many_branches_is_not_preferred() {
        let columns = [
            ExampleColumn { name: "half", unit: "", choices: &["a", "b"] },
            ExampleColumn { name: "name", unit: "", choices: &["1", "2", "3", "4"] },
        ];
        let example = |at: u8| Example {
            values: vec![Some(f64::from(at / 2)), Some(f64::from(at))],
            right: vec![at < 2, at >= 2],
            utility: vec![1.0; 2],
        };
        let examples: Vec<Example> = (0..4).map(example).collect();
        let tree = grow(&columns, &candidates(2), &examples, Settings { least: 1.0, ..UNPRUNED });
        let Node::Branch(root) = &tree else { panic!("a branch: {tree:?}") };
        assert_eq!(root.by, "half");
    }

    #[test]
    fn decision_thresholds_are_short_numbers() {
        for (low, high, wanted) in [(70.0, 85.0, 80.0), (0.99, 1.01, 1.0), (3.0, 3.2, 3.1), (0.0, 0.5, 0.2)] {
            let at = between(low, high);
            assert!(low < at && at < high, "{low} {at} {high}");
            assert_eq!(at, wanted);
        }
    }
}
