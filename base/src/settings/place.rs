//! Places in a file, and suggestions for unknown keys.

use std::ops::Range;

/// Most known keys that the message about an unknown one lists.
const LISTED_MAX: usize = 32;

/// A place in a file: a line, and keys joined by dots.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Place {
    pub line: usize,
    pub key: String,
}

impl Place {
    pub(super) fn inner(&self, key: &str, line: usize) -> Self {
        Self { line, key: inner(&self.key, key) }
    }
}

pub(super) fn line(text: &str, span: Range<usize>) -> usize {
    let before = text.get(..span.start).unwrap_or(text);
    before.matches('\n').count() + 1
}

/// Says of an unknown key which of those that are known was likely meant.
pub fn unknown<K: AsRef<str>>(key: &str, known: &[K]) -> String {
    let known = || known.iter().map(AsRef::as_ref);
    let closest = known().map(|known| (strsim::jaro(key, known), known));
    match closest.max_by(|(a, _), (b, _)| a.total_cmp(b)).filter(|(similarity, _)| *similarity > 0.7) {
        Some((_, known)) => format!("unknown key; did you mean `{known}`?"),
        None if known().len() > LISTED_MAX => "unknown key".to_owned(),
        None => format!("unknown key; known here: {}", known().collect::<Vec<_>>().join(", ")),
    }
}

/// A key within another.
pub(super) fn inner(outer: &str, key: &str) -> String {
    if outer.is_empty() { key.to_owned() } else { format!("{outer}.{key}") }
}
