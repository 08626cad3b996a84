//! A decision tree, the walk through it for a connection's features, and the description of that walk as text.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::features::{ExampleColumn, short};

/// Largest number of levels of a decision tree. A deeper tree would be unreadable.
pub const DEPTH_MAX: usize = 32;

/// A node of a decision tree.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", deny_unknown_fields)]
pub enum Node {
    /// A leaf, with a ranking of the candidates.
    Leaf(Leaf),
    /// A split by the threshold of a numeric feature.
    Split(Split),
    /// A branch of the decision tree by a feature of the connection whose values are names, not numbers.
    Branch(Branch),
}

/// A split by the threshold of a numeric feature.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Split {
    /// Name of the numeric feature.
    pub by: String,
    /// The threshold, in the feature's unit.
    pub at: f64,
    /// Side that is used if the feature is unknown, which is the one that most training examples took.
    pub unknown: TreeSide,
    /// Subtree for values that are at most the threshold `at`.
    pub below: Box<Node>,
    /// Subtree for values above the threshold `at`.
    pub above: Box<Node>,
}

/// A side of a numeric split.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TreeSide {
    /// Values that are at most the threshold.
    Below,
    /// Values above the threshold.
    Above,
}

/// A branch of the decision tree by a feature of the connection whose values are names, not numbers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Branch {
    /// Name of the connection's feature that decides the branch, such as its traffic profile. The feature's values are
    /// names.
    pub by: String,
    /// Value that is assumed if the feature of a connection is unknown.
    pub unknown: String,
    /// Subtree for each value.
    pub to: BTreeMap<String, Node>,
}

/// A leaf, which is the result of a walk through the tree.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Leaf {
    /// Number of the leaf within the tree.
    pub number: u32,
    /// Number of training examples that led to this leaf.
    pub examples: f64,
    /// Cost that nine of ten training examples did not exceed with the best possible candidate, as a multiple of
    /// [`ideal_ms`](super::features::Features::ideal_ms). A connection with a higher cost counts against the candidate
    /// that it used.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub usual: Option<f64>,
    /// Ranking of all candidates, the best first.
    pub ranking: Vec<Rank>,
}

/// A candidate in the ranking of a leaf.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rank {
    /// Name of the candidate.
    pub candidate: String,
    /// Share of the leaf's training examples for which the candidate was the best choice.
    pub right: f64,
    /// Mean utility of the candidate over the leaf's training examples, from 0 to 1.
    pub utility: f64,
}

/// The result of a walk through the tree.
#[derive(Clone, Debug, PartialEq)]
pub struct TreeWalk<'a> {
    /// The leaf at which the walk ended.
    pub leaf: &'a Leaf,
    /// The decisions on the way to the leaf, as text for operators.
    pub words: Vec<String>,
}

impl Node {
    /// Walks from the root to a leaf. `values` are in the order of `columns`. A feature that is not among the columns
    /// counts as unknown.
    pub fn walk(&self, columns: &[ExampleColumn], values: &[Option<f64>]) -> TreeWalk<'_> {
        let mut words = Vec::new();
        let mut node = self;
        loop {
            let known = |name: &str| {
                let at = columns.iter().position(|column| column.name == name)?;
                Some((columns.get(at)?, values.get(at).copied().flatten()?))
            };
            let (next, word) = match node {
                Node::Leaf(leaf) => return TreeWalk { leaf, words },
                Node::Split(split) => split.step(known(&split.by)),
                Node::Branch(branch) => branch.step(known(&branch.by)),
            };
            words.push(word);
            node = match next {
                Some(next) => next,
                // A branch has a subtree for every value of its feature, unless the model file was not checked.
                None => return TreeWalk { leaf: &NOWHERE, words },
            };
        }
    }

    /// Returns all leaves, from left to right.
    pub fn leaves(&self) -> Vec<&Leaf> {
        match self {
            Node::Leaf(leaf) => vec![leaf],
            _ => self.below().flat_map(Node::leaves).collect(),
        }
    }

    /// Calls `work` for each leaf, from left to right.
    pub fn visit_leaves(&mut self, work: &mut impl FnMut(&mut Leaf)) {
        match self {
            Node::Leaf(leaf) => work(leaf),
            Node::Split(split) => {
                split.below.visit_leaves(work);
                split.above.visit_leaves(work);
            }
            Node::Branch(branch) => branch.to.values_mut().for_each(|node| node.visit_leaves(work)),
        }
    }

    /// Returns the number of levels of this subtree.
    pub fn depth(&self) -> usize {
        1 + self.below().map(Node::depth).max().unwrap_or_default()
    }

    fn below(&self) -> impl Iterator<Item = &Node> {
        let (two, many) = match self {
            Node::Leaf(_) => (None, None),
            Node::Split(split) => (Some([&*split.below, &*split.above]), None),
            Node::Branch(branch) => (None, Some(branch.to.values())),
        };
        two.into_iter().flatten().chain(many.into_iter().flatten())
    }
}

// An empty leaf stands for the missing subtree of an incomplete tree.
static NOWHERE: Leaf = Leaf { number: u32::MAX, examples: 0.0, usual: None, ranking: Vec::new() };

impl Split {
    fn step(&self, known: Option<(&ExampleColumn, f64)>) -> (Option<&Node>, String) {
        let by = &self.by;
        let at = self.at;
        let side = match known {
            // Values equal to the threshold belong to the lower side, as in training.
            Some((_, value)) if value <= at => TreeSide::Below,
            Some(_) => TreeSide::Above,
            None => self.unknown,
        };
        let (next, than) = match side {
            TreeSide::Below => (&self.below, "at most"),
            TreeSide::Above => (&self.above, "more than"),
        };
        // The threshold is printed with the unit of the feature's column. Without a known feature there is no column,
        // so the number is printed alone.
        let bound = known.map_or_else(|| short(at), |(column, _)| column.written(at));
        let word = match known {
            Some((column, value)) => format!("{by} is {}: {than} {bound}", column.written(value)),
            None => format!("{by} is unknown: assumed to be {than} {bound}, as for most examples"),
        };
        (Some(next), word)
    }
}

impl Branch {
    fn step(&self, known: Option<(&ExampleColumn, f64)>) -> (Option<&Node>, String) {
        let by = &self.by;
        match known.and_then(|(column, value)| column.choice(value)) {
            Some(choice) => (self.to.get(choice), format!("{by} is {choice}")),
            None => {
                let unknown = &self.unknown;
                (
                    self.to.get(unknown),
                    format!("{by} is unknown: assumed to be {unknown}, as for most examples"),
                )
            }
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::features::{COLUMNS, Features};
    use super::*;

    pub(crate) fn leaf(number: u32, candidate: &str) -> Node {
        let rank = |candidate: &str, right| Rank { candidate: candidate.into(), right, utility: right };
        Node::Leaf(Leaf {
            number,
            examples: 10.0,
            usual: None,
            ranking: vec![rank(candidate, 0.9), rank("cubic", 0.1)],
        })
    }

    pub(crate) fn tree() -> Node {
        let to = [("nothing", leaf(1, "bbr")), ("carrier", leaf(2, "carried-warm"))];
        Node::Split(Split {
            by: "loss".into(),
            at: 0.5,
            unknown: TreeSide::Below,
            below: Box::new(leaf(0, "cubic")),
            above: Box::new(Node::Branch(Branch {
                by: "offer".into(),
                unknown: "nothing".into(),
                to: to.map(|(choice, node)| (choice.to_owned(), node)).into(),
            })),
        })
    }

    #[test]
    fn decision_tree_assumes_the_commonest_branch_for_unknown_features() {
        let tree = tree();
        let table: [(&str, u32, &[&str]); 5] = [
            ("loss=0.5", 0, &["loss is 0.5 %: at most 0.5 %"]),
            ("loss=0.51,offer=carrier", 2, &["loss is 0.51 %: more than 0.5 %", "offer is carrier"]),
            ("loss=3,offer=nothing", 1, &["loss is 3 %: more than 0.5 %", "offer is nothing"]),
            (
                "loss=3",
                1,
                &[
                    "loss is 3 %: more than 0.5 %",
                    "offer is unknown: assumed to be nothing, as for most examples",
                ],
            ),
            ("rtt=3", 0, &["loss is unknown: assumed to be at most 0.5, as for most examples"]),
        ];
        for (text, number, words) in table {
            let features: Features = text.parse().unwrap();
            let way = tree.walk(&COLUMNS, &features.values());
            assert_eq!(
                (way.leaf.number, way.words),
                (number, words.iter().map(|it| it.to_string()).collect())
            );
        }
        assert_eq!((tree.leaves().len(), tree.depth()), (3, 3));
    }
}
