//! Positions (line and key) in a settings file, and suggestions for unknown keys.

use std::ops::Range;

/// Largest number of known keys that the message about an unknown key lists.
const LISTED_MAX: usize = 32;

/// A position in a settings file: a line number, and keys joined by dots.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SettingPlace {
    /// Line number, from 1 on.
    pub line: usize,
    /// The keys from the root to this position, joined by dots.
    pub key: String,
}

impl SettingPlace {
    pub(super) fn inner(&self, key: &str, line: usize) -> Self {
        Self { line, key: inner(&self.key, key) }
    }
}

/// Returns the byte offsets of all line breaks.
pub(super) fn breaks(text: &str) -> Vec<usize> {
    text.match_indices('\n').map(|(at, _)| at).collect()
}

/// Returns the line that a span begins in, from 1 on.
pub(super) fn line(breaks: &[usize], span: Range<usize>) -> usize {
    breaks.partition_point(|at| *at < span.start) + 1
}

/// Returns the message for an unknown key. It suggests the most similar known key, or lists all known keys.
pub fn unknown<K: AsRef<str>>(key: &str, known: &[K]) -> String {
    let known = || known.iter().map(AsRef::as_ref);
    let closest = known().map(|known| (strsim::jaro(key, known), known));
    match closest.max_by(|(a, _), (b, _)| a.total_cmp(b)).filter(|(similarity, _)| *similarity > 0.7) {
        Some((_, known)) => format!("unknown key; did you mean `{known}`?"),
        None if known().len() > LISTED_MAX => "unknown key".to_owned(),
        None => format!("unknown key; known here: {}", known().collect::<Vec<_>>().join(", ")),
    }
}

/// Returns the position of a key within this table.
pub(super) fn inner(outer: &str, key: &str) -> String {
    if outer.is_empty() { key.to_owned() } else { format!("{outer}.{key}") }
}
