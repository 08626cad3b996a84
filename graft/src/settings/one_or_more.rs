//! One value, or a list of them.

use serde::Deserialize;

/// One, or a list in order of preference.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
pub enum OneOrMore<T> {
    One(T),
    More(Vec<T>),
}

impl<T> OneOrMore<T> {
    pub fn all(self) -> Vec<T> {
        match self {
            Self::One(one) => vec![one],
            Self::More(all) => all,
        }
    }
}
