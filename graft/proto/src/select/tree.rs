//! A decision tree: how it is walked, and its way in words.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::features::{Column, short};

/// Deeper ones nobody reads.
pub const DEPTH_MAX: usize = 32;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", deny_unknown_fields)]
pub enum Node {
    Leaf(Leaf),
    /// By a number.
    Split(Split),
    /// By a choice.
    Branch(Branch),
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Split {
    pub by: String,
    pub at: f64,
    /// Where most of the examples went, and so whoever does not know.
    pub unknown: Side,
    /// `at` itself is here.
    pub below: Box<Node>,
    pub above: Box<Node>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Side {
    Below,
    Above,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Branch {
    pub by: String,
    pub unknown: String,
    /// One for each choice.
    pub to: BTreeMap<String, Node>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Leaf {
    /// Within the tree.
    pub number: u32,
    /// That came here in the training.
    pub examples: f64,
    /// Cost by what the path would have allowed ([`ideal_ms`](super::features::Features::ideal_ms)) that nine of ten of them stayed
    /// below by the best arm that could be had: more is a bad outcome.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub usual: Option<f64>,
    /// All answers, the best first.
    pub ranking: Vec<Rank>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rank {
    pub arm: String,
    /// Share of the examples for which it was right.
    pub right: f64,
    /// Its mean utility, from 0 to 1.
    pub utility: f64,
}

/// Where a walk came to.
#[derive(Clone, Debug, PartialEq)]
pub struct Way<'a> {
    pub leaf: &'a Leaf,
    pub words: Vec<String>,
}

impl Node {
    /// `values`: in the order of the columns. A name that is no column counts as unknown.
    pub fn walk(&self, columns: &[Column], values: &[Option<f64>]) -> Way<'_> {
        let mut words = Vec::new();
        let mut node = self;
        loop {
            let known = |name: &str| {
                let at = columns.iter().position(|column| column.name == name)?;
                Some((columns.get(at)?, values.get(at).copied().flatten()?))
            };
            let (next, word) = match node {
                Node::Leaf(leaf) => return Way { leaf, words },
                Node::Split(split) => split.step(known(&split.by)),
                Node::Branch(branch) => branch.step(known(&branch.by)),
            };
            words.push(word);
            node = match next {
                Some(next) => next,
                None => return Way { leaf: &NOWHERE, words },
            };
        }
    }

    pub fn leaves(&self) -> Vec<&Leaf> {
        match self {
            Node::Leaf(leaf) => vec![leaf],
            _ => self.below().flat_map(Node::leaves).collect(),
        }
    }

    pub fn each_leaf(&mut self, work: &mut impl FnMut(&mut Leaf)) {
        match self {
            Node::Leaf(leaf) => work(leaf),
            Node::Split(split) => {
                split.below.each_leaf(work);
                split.above.each_leaf(work);
            }
            Node::Branch(branch) => branch.to.values_mut().for_each(|node| node.each_leaf(work)),
        }
    }

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

static NOWHERE: Leaf = Leaf { number: u32::MAX, examples: 0.0, usual: None, ranking: Vec::new() };

impl Split {
    fn step(&self, known: Option<(&Column, f64)>) -> (Option<&Node>, String) {
        let (by, at) = (&self.by, self.at);
        let side = match known {
            Some((_, value)) if value <= at => Side::Below,
            Some(_) => Side::Above,
            None => self.unknown,
        };
        let (next, than) = match side {
            Side::Below => (&self.below, "at most"),
            Side::Above => (&self.above, "more than"),
        };
        let bound = known.map_or_else(|| short(at), |(column, _)| column.written(at));
        let word = match known {
            Some((column, value)) => format!("{by} is {}: {than} {bound}", column.written(value)),
            None => format!("{by} is not known: taken for {than} {bound}, as most"),
        };
        (Some(next), word)
    }
}

impl Branch {
    fn step(&self, known: Option<(&Column, f64)>) -> (Option<&Node>, String) {
        let by = &self.by;
        match known.and_then(|(column, value)| column.choice(value)) {
            Some(choice) => (self.to.get(choice), format!("{by} is {choice}")),
            None => {
                let unknown = &self.unknown;
                (self.to.get(unknown), format!("{by} is not known: taken for {unknown}, as most"))
            }
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::features::{COLUMNS, Features};
    use super::*;

    pub(crate) fn leaf(number: u32, arm: &str) -> Node {
        let rank = |arm: &str, right| Rank { arm: arm.into(), right, utility: right };
        Node::Leaf(Leaf {
            number,
            examples: 10.0,
            usual: None,
            ranking: vec![rank(arm, 0.9), rank("cubic", 0.1)],
        })
    }

    pub(crate) fn tree() -> Node {
        let to = [("nothing", leaf(1, "bbr")), ("carrier", leaf(2, "carried-warm"))];
        Node::Split(Split {
            by: "loss".into(),
            at: 0.5,
            unknown: Side::Below,
            below: Box::new(leaf(0, "cubic")),
            above: Box::new(Node::Branch(Branch {
                by: "offer".into(),
                unknown: "nothing".into(),
                to: to.map(|(choice, node)| (choice.to_owned(), node)).into(),
            })),
        })
    }

    #[test]
    fn ways() {
        let tree = tree();
        let table: [(&str, u32, &[&str]); 5] = [
            ("loss=0.5", 0, &["loss is 0.5 %: at most 0.5 %"]),
            ("loss=0.51,offer=carrier", 2, &["loss is 0.51 %: more than 0.5 %", "offer is carrier"]),
            ("loss=3,offer=nothing", 1, &["loss is 3 %: more than 0.5 %", "offer is nothing"]),
            (
                "loss=3",
                1,
                &["loss is 3 %: more than 0.5 %", "offer is not known: taken for nothing, as most"],
            ),
            ("rtt=3", 0, &["loss is not known: taken for at most 0.5, as most"]),
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
