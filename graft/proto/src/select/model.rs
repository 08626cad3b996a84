//! A tree as a file that people can read, and how it is read back: strictly.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use super::features::{COLUMNS, Column, Features};
use super::tree::{DEPTH_MAX, Leaf, Node, Rank};

pub const VERSION: u32 = 1;
/// Of a file.
pub const BYTES_MAX: usize = 4 << 20;
const LEAVES_MAX: usize = 10_000;
const ARMS_MAX: usize = 64;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Model {
    pub version: u32,
    /// Of what it was made.
    pub about: String,
    /// Congestion controls in place, and ways to be carried.
    pub arms: Vec<String>,
    pub tree: Node,
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("it has {0} bytes; a model has at most {BYTES_MAX}")]
    Long(usize),
    #[error("it is no model: {0}")]
    Json(#[from] serde_json::Error),
    #[error(
        "it is of version {0}, and this program reads {VERSION}: train it anew with `millrace-lab train`"
    )]
    Version(u32),
    #[error("{0}")]
    Wrong(String),
}

/// What a model says of a connection.
#[derive(Clone, Debug, PartialEq)]
pub struct Decision<'a> {
    /// The best that can be had, if any can.
    pub rank: Option<&'a Rank>,
    pub leaf: &'a Leaf,
    /// The way through the tree.
    pub words: Vec<String>,
}

impl Model {
    pub fn new(about: String, arms: Vec<String>, tree: Node) -> Self {
        Self { version: VERSION, about, arms, tree }
    }

    /// # Errors
    /// What is wrong with it, and where.
    pub fn parse(text: &str) -> Result<Self, Error> {
        if text.len() > BYTES_MAX {
            return Err(Error::Long(text.len()));
        }
        let model: Self = serde_json::from_str(text)?;
        match model.version {
            VERSION => model.check().map(|()| model).map_err(Error::Wrong),
            other => Err(Error::Version(other)),
        }
    }

    /// # Errors
    /// A figure in it that is no number.
    pub fn text(&self) -> Result<String, Error> {
        self.check().map_err(Error::Wrong)?;
        Ok(serde_json::to_string_pretty(self)? + "\n")
    }

    /// By the best answer that `can_be_had`.
    pub fn decide(&self, features: &Features, can_be_had: impl Fn(&str) -> bool) -> Decision<'_> {
        let way = self.tree.walk(&COLUMNS, &features.values());
        let rank = way.leaf.ranking.iter().find(|rank| can_be_had(&rank.arm));
        Decision { rank, leaf: way.leaf, words: way.words }
    }

    fn check(&self) -> Result<(), String> {
        let arms: BTreeSet<&str> = self.arms.iter().map(String::as_str).collect();
        if arms.is_empty() || arms.len() > ARMS_MAX || arms.len() != self.arms.len() {
            return Err(format!("arms: 1 to {ARMS_MAX} of them, each once"));
        }
        if self.tree.depth() > DEPTH_MAX {
            return Err(format!("the tree is {} deep: at most {DEPTH_MAX}", self.tree.depth()));
        }
        let leaves = self.tree.leaves();
        if leaves.len() > LEAVES_MAX {
            return Err(format!("the tree has {} leaves: at most {LEAVES_MAX}", leaves.len()));
        }
        let numbers: BTreeSet<u32> = leaves.iter().map(|leaf| leaf.number).collect();
        if numbers.len() != leaves.len() {
            return Err("two leaves have the same number".to_owned());
        }
        leaves.into_iter().try_for_each(|leaf| check_leaf(leaf, &arms))?;
        check_node(&self.tree)
    }
}

fn check_leaf(leaf: &Leaf, arms: &BTreeSet<&str>) -> Result<(), String> {
    let failed = |what: String| Err(format!("leaf {}: {what}", leaf.number));
    let ranked: BTreeSet<&str> = leaf.ranking.iter().map(|rank| rank.arm.as_str()).collect();
    if let Some(unknown) = ranked.difference(arms).next() {
        return failed(format!("{unknown:?} is none of the arms"));
    }
    if ranked.len() != arms.len() || leaf.ranking.len() != arms.len() {
        return failed("its ranking has each arm once".to_owned());
    }
    let share = |value: f64| (0.0..=1.0).contains(&value);
    if !leaf.ranking.iter().all(|rank| share(rank.right) && share(rank.utility)) {
        return failed("right and utility are from 0 to 1".to_owned());
    }
    let figure = |value: f64| (0.0..=1e12).contains(&value);
    if !figure(leaf.examples) || !leaf.usual.is_none_or(figure) {
        return failed("examples and usual are numbers of 0 or more".to_owned());
    }
    Ok(())
}

fn check_node(node: &Node) -> Result<(), String> {
    match node {
        Node::Leaf(_) => Ok(()),
        Node::Split(split) => {
            if !column(&split.by)?.choices.is_empty() || !split.at.is_finite() {
                return Err(format!("split by {:?}: that is a choice; branch by it", split.by));
            }
            check_node(&split.below)?;
            check_node(&split.above)
        }
        Node::Branch(branch) => {
            let choices = column(&branch.by)?.choices;
            let known = |name: &String| choices.contains(&name.as_str());
            if branch.to.len() != choices.len() || !branch.to.keys().all(known) || !known(&branch.unknown) {
                return Err(format!(
                    "branch by {:?}: wants a way for each of: {}",
                    branch.by,
                    choices.join(", ")
                ));
            }
            branch.to.values().try_for_each(check_node)
        }
    }
}

fn column(name: &str) -> Result<&'static Column, String> {
    let names = || COLUMNS.each_ref().map(|column| column.name).join(", ");
    let found = COLUMNS.iter().find(|column| column.name == name);
    found.ok_or_else(|| format!("there is no feature {name:?}; there are: {}", names()))
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::tree::tests::tree;
    use super::*;

    pub(crate) fn model() -> Model {
        let arms = ["bbr", "carried-warm", "cubic"].map(str::to_owned).to_vec();
        let mut model = Model::new("a test".into(), arms, tree());
        complete(&mut model.tree);
        model
    }

    /// Rankings with all arms.
    fn complete(node: &mut Node) {
        match node {
            Node::Leaf(leaf) => {
                for arm in ["bbr", "carried-warm", "cubic"] {
                    if leaf.ranking.iter().all(|rank| rank.arm != arm) {
                        leaf.ranking.push(Rank { arm: arm.into(), right: 0.0, utility: 0.0 });
                    }
                }
                leaf.ranking.dedup_by(|one, other| one.arm == other.arm);
            }
            Node::Split(split) => {
                complete(&mut split.below);
                complete(&mut split.above);
            }
            Node::Branch(branch) => branch.to.values_mut().for_each(complete),
        }
    }

    #[test]
    fn models_are_read_as_they_were_written() {
        let model = model();
        let text = model.text().expect("a model");
        assert_eq!(Model::parse(&text).expect("a model"), model);
    }

    #[test]
    fn decisions_take_what_can_be_had() {
        let model = model();
        let features: Features = "loss=2,offer=carrier".parse().unwrap();
        let arm = |can: fn(&str) -> bool| model.decide(&features, can).rank.map(|rank| rank.arm.as_str());
        assert_eq!(arm(|_| true), Some("carried-warm"));
        assert_eq!(arm(|arm| arm != "carried-warm"), Some("cubic"));
        assert_eq!(arm(|_| false), None);
        let decision = model.decide(&features, |_| true);
        assert_eq!((decision.leaf.number, decision.words.len()), (2, 2));
    }

    #[test]
    fn what_is_wrong_is_said() {
        let good = model().text().expect("a model");
        let table = [
            (String::new(), "no model: EOF"),
            ("{}".to_owned(), "missing field `version`"),
            (good.replace("\"version\": 1", "\"version\": 2"), "of version 2, and this program reads 1"),
            (good.replace("\"about\"", "\"abuot\""), "unknown field `abuot`"),
            (good.replace("\"by\": \"loss\"", "\"by\": \"lost\""), "no feature \"lost\"; there are: rtt"),
            (good.replace("\"by\": \"loss\"", "\"by\": \"profile\""), "split by \"profile\""),
            (good.replace("\"by\": \"offer\"", "\"by\": \"loss\""), "branch by \"loss\""),
            (
                good.replace("\"carrier\": {", "\"nothing\": {"),
                "branch by \"offer\": wants a way for each of: nothing",
            ),
            (good.replacen("\"arm\": \"bbr\"", "\"arm\": \"vegas\"", 1), "\"vegas\" is none of the arms"),
            (good.replacen("\"arm\": \"bbr\"", "\"arm\": \"cubic\"", 1), "each arm once"),
            (good.replace("\"number\": 1", "\"number\": 0"), "the same number"),
            (good.replacen("0.9", "1.5", 1), "from 0 to 1"),
            (good.replacen("\"arms\": [", "\"arms\": [\"bbr\",", 1), "each once"),
            (good.replace("\"unknown\": \"below\"", "\"unknown\": \"left\""), "unknown variant `left`"),
        ];
        for (text, wanted) in table {
            let error = Model::parse(&text).expect_err(wanted).to_string();
            assert!(error.contains(wanted), "{wanted}: {error}");
        }
    }

    #[test]
    fn depth_is_bounded() {
        let mut model = model();
        for _ in 0..DEPTH_MAX {
            let Node::Split(mut outer) = tree() else { panic!("a split") };
            *outer.above = model.tree;
            model.tree = Node::Split(outer);
        }
        assert!(model.text().expect_err("too deep").to_string().contains("deep: at most 32"));
        let nested = format!("{}1{}", "[".repeat(100_000), "]".repeat(100_000));
        assert!(Model::parse(&nested).is_err());
    }

    proptest::proptest! {
        #[test]
        fn anything_is_refused_or_read(at in 0_usize..3000, with in ".{0,8}") {
            let mut text = model().text().unwrap();
            if text.is_char_boundary(at) && at < text.len() {
                text.replace_range(at..at, &with);
            }
            if let Ok(model) = Model::parse(&text) {
                model.decide(&Features::default(), |_| true);
            }
        }
    }
}
