//! The file of a decision tree: JSON that people can read, and that is parsed strictly.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use super::features::{COLUMNS, ExampleColumn, Features};
use super::tree::{DEPTH_MAX, Leaf, Node, Rank};

/// The version of the model file's format.
pub const VERSION: u32 = 1;
/// Largest size of a model file, bytes.
pub const BYTES_MAX: usize = 4 << 20;
const LEAVES_MAX: usize = 10_000;
const CANDIDATES_MAX: usize = 64;

/// A model: a decision tree that ranks the candidates for a connection.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Model {
    /// The version of the model file's format.
    pub version: u32,
    /// Description of the measurements that the model was trained on.
    pub about: String,
    /// Names of the candidates that the tree's leaves rank: congestion controls, and carriers that tunnel a connection.
    pub candidates: Vec<String>,
    /// The decision tree.
    pub tree: Node,
}

/// Why a file is not a valid model.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages describe the variants")]
pub enum Error {
    #[error("the file has {0} bytes; a model has at most {BYTES_MAX}")]
    Long(usize),
    #[error("not a selection model: {0}")]
    Json(#[from] serde_json::Error),
    #[error(
        "the model is of version {0}, and this program reads {VERSION}: train it again with `millrace-lab train`"
    )]
    Version(u32),
    #[error("{0}")]
    Wrong(String),
}

/// The model's decision for a connection.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelDecision<'a> {
    /// The best candidate that is possible for the connection; `None` if none is.
    pub rank: Option<&'a Rank>,
    /// The leaf of the tree that the connection's features led to.
    pub leaf: &'a Leaf,
    /// The decisions on the way to the leaf, as text for operators.
    pub words: Vec<String>,
}

impl Model {
    /// Makes a model of the current version.
    pub fn new(about: String, candidates: Vec<String>, tree: Node) -> Self {
        Self { version: VERSION, about, candidates, tree }
    }

    /// Parses a model's file and checks it.
    ///
    /// # Errors
    /// The file is not a valid model; the error names the fault and its place.
    pub fn parse(text: &str) -> Result<Self, Error> {
        if text.len() > BYTES_MAX {
            return Err(Error::Long(text.len()));
        }
        let model: Self = serde_json::from_str(text)?;
        // The version is checked first, since other versions may have other limits.
        match model.version {
            VERSION => model.check().map(|()| model).map_err(Error::Wrong),
            other => Err(Error::Version(other)),
        }
    }

    /// Returns the content of the model's file.
    ///
    /// # Errors
    /// A number in the model is not finite, or a limit is exceeded.
    pub fn text(&self) -> Result<String, Error> {
        self.check().map_err(Error::Wrong)?;
        Ok(serde_json::to_string_pretty(self)? + "\n")
    }

    /// Returns the model's best candidate among those for which `can_be_had` returns true.
    pub fn decide(&self, features: &Features, can_be_had: impl Fn(&str) -> bool) -> ModelDecision<'_> {
        let way = self.tree.walk(&COLUMNS, &features.values());
        // The ranking is sorted, so the first possible candidate is the best one.
        let rank = way.leaf.ranking.iter().find(|rank| can_be_had(&rank.candidate));
        ModelDecision { rank, leaf: way.leaf, words: way.words }
    }

    fn check(&self) -> Result<(), String> {
        let candidates: BTreeSet<&str> = self.candidates.iter().map(String::as_str).collect();
        let count = self.candidates.len();
        if !(1..=CANDIDATES_MAX).contains(&count) || candidates.len() != count {
            return Err(format!("`candidates` needs 1 to {CANDIDATES_MAX} names, each once"));
        }
        if self.tree.depth() > DEPTH_MAX {
            return Err(format!("the tree has {} levels: at most {DEPTH_MAX}", self.tree.depth()));
        }
        let leaves = self.tree.leaves();
        if leaves.len() > LEAVES_MAX {
            return Err(format!("the tree has {} leaves: at most {LEAVES_MAX}", leaves.len()));
        }
        // Measured costs of connections are stored by leaf number, so numbers must be unique.
        let numbers: BTreeSet<u32> = leaves.iter().map(|leaf| leaf.number).collect();
        if numbers.len() != leaves.len() {
            return Err("two leaves have the same number".to_owned());
        }
        leaves.into_iter().try_for_each(|leaf| check_leaf(leaf, &candidates))?;
        check_node(&self.tree)
    }
}

fn check_leaf(leaf: &Leaf, candidates: &BTreeSet<&str>) -> Result<(), String> {
    let failed = |what: String| Err(format!("leaf {}: {what}", leaf.number));
    let ranked: BTreeSet<&str> = leaf.ranking.iter().map(|rank| rank.candidate.as_str()).collect();
    if let Some(unknown) = ranked.difference(candidates).next() {
        return failed(format!("{unknown:?} is not among `candidates`"));
    }
    // Every leaf has to rank all candidates, since any of them may be impossible for a connection.
    if ranked.len() != candidates.len() || leaf.ranking.len() != candidates.len() {
        return failed("the ranking needs each of `candidates` once".to_owned());
    }
    let share = |value: f64| (0.0..=1.0).contains(&value);
    if !leaf.ranking.iter().all(|rank| share(rank.right) && share(rank.utility)) {
        return failed("`right` and `utility` have to be from 0 to 1".to_owned());
    }
    let figure = |value: f64| (0.0..=1e12).contains(&value);
    if !figure(leaf.examples) || !leaf.usual.is_none_or(figure) {
        return failed("`examples` and `usual` have to be numbers of 0 or more".to_owned());
    }
    Ok(())
}

fn check_node(node: &Node) -> Result<(), String> {
    match node {
        Node::Leaf(_) => Ok(()),
        Node::Split(split) => {
            if !column(&split.by)?.choices.is_empty() || !split.at.is_finite() {
                return Err(format!(
                    "split by {:?}: that feature has named values, so it needs a branch",
                    split.by
                ));
            }
            check_node(&split.below)?;
            check_node(&split.above)
        }
        Node::Branch(branch) => {
            let choices = column(&branch.by)?.choices;
            let known = |name: &String| choices.contains(&name.as_str());
            if branch.to.len() != choices.len() || !branch.to.keys().all(known) || !known(&branch.unknown) {
                return Err(format!(
                    "branch by {:?}: it needs a subtree for each of: {}",
                    branch.by,
                    choices.join(", ")
                ));
            }
            branch.to.values().try_for_each(check_node)
        }
    }
}

fn column(name: &str) -> Result<&'static ExampleColumn, String> {
    let names = || COLUMNS.each_ref().map(|column| column.name).join(", ");
    let found = COLUMNS.iter().find(|column| column.name == name);
    found.ok_or_else(|| format!("there is no feature {name:?}; there are: {}", names()))
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::tree::tests::tree;
    use super::*;

    pub(crate) fn model() -> Model {
        let candidates = ["bbr", "carried-warm", "cubic"].map(str::to_owned).to_vec();
        let mut model = Model::new("a test".into(), candidates, tree());
        complete(&mut model.tree);
        model
    }

    /// Adds the missing candidates to each ranking of a test tree, since every leaf has to rank all.
    fn complete(node: &mut Node) {
        match node {
            Node::Leaf(leaf) => {
                for candidate in ["bbr", "carried-warm", "cubic"] {
                    if leaf.ranking.iter().all(|rank| rank.candidate != candidate) {
                        leaf.ranking.push(Rank { candidate: candidate.into(), right: 0.0, utility: 0.0 });
                    }
                }
                leaf.ranking.dedup_by(|one, other| one.candidate == other.candidate);
            }
            Node::Split(split) => {
                complete(&mut split.below);
                complete(&mut split.above);
            }
            Node::Branch(branch) => branch.to.values_mut().for_each(complete),
        }
    }

    #[test]
    fn selection_model_is_unchanged_after_encoding_and_parsing() {
        let model = model();
        let text = model.text().expect("a model");
        assert_eq!(Model::parse(&text).expect("a model"), model);
    }

    #[test]
    fn model_decision_uses_only_available_congestion_controls_and_carriers() {
        let model = model();
        let features: Features = "loss=2,offer=carrier".parse().unwrap();
        let best = |can: fn(&str) -> bool| Some(model.decide(&features, can).rank?.candidate.as_str());
        assert_eq!(best(|_| true), Some("carried-warm"));
        assert_eq!(best(|name| name != "carried-warm"), Some("cubic"));
        assert_eq!(best(|_| false), None);
        let decision = model.decide(&features, |_| true);
        assert_eq!((decision.leaf.number, decision.words.len()), (2, 2));
    }

    #[test]
    fn invalid_models_are_refused() {
        let good = model().text().expect("a model");
        let table = [
            (String::new(), "not a selection model: EOF"),
            ("{}".to_owned(), "missing field `version`"),
            (good.replace("\"version\": 1", "\"version\": 2"), "of version 2, and this program reads 1"),
            (good.replace("\"about\"", "\"abuot\""), "unknown field `abuot`"),
            (good.replace("\"by\": \"loss\"", "\"by\": \"lost\""), "no feature \"lost\"; there are: rtt"),
            (good.replace("\"by\": \"loss\"", "\"by\": \"profile\""), "split by \"profile\""),
            (good.replace("\"by\": \"offer\"", "\"by\": \"loss\""), "branch by \"loss\""),
            (
                good.replace("\"carrier\": {", "\"nothing\": {"),
                "branch by \"offer\": it needs a subtree for each of: nothing",
            ),
            (
                good.replacen("\"candidate\": \"bbr\"", "\"candidate\": \"vegas\"", 1),
                "\"vegas\" is not among `candidates`",
            ),
            (
                good.replacen("\"candidate\": \"bbr\"", "\"candidate\": \"cubic\"", 1),
                "each of `candidates` once",
            ),
            (good.replace("\"number\": 1", "\"number\": 0"), "the same number"),
            (good.replacen("0.9", "1.5", 1), "from 0 to 1"),
            (good.replacen("\"candidates\": [", "\"candidates\": [\"bbr\",", 1), "each once"),
            (good.replace("\"unknown\": \"below\"", "\"unknown\": \"left\""), "unknown variant `left`"),
        ];
        for (text, wanted) in table {
            let error = Model::parse(&text).expect_err(wanted).to_string();
            assert!(error.contains(wanted), "{wanted}: {error}");
        }
    }

    #[test]
    fn depth_of_a_selection_model_is_bounded() {
        let mut model = model();
        for _ in 0..DEPTH_MAX {
            let Node::Split(mut outer) = tree() else { panic!("a split") };
            *outer.above = model.tree;
            model.tree = Node::Split(outer);
        }
        assert!(model.text().expect_err("too deep").to_string().contains("levels: at most 32"));
        let nested = format!("{}1{}", "[".repeat(100_000), "]".repeat(100_000));
        assert!(Model::parse(&nested).is_err());
    }

    proptest::proptest! {
        #[test]
        fn arbitrary_model_bytes_are_parsed_or_refused(at in 0_usize..3000, with in ".{0,8}") {
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
