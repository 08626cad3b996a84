//! Patterns that select the namespaces of a rule.

use std::str::FromStr;

use bytes::Bytes;
use millrace_moq::Namespace;

/// A pattern that selects namespaces by their fields, such as `live/*/cam`, `live/**` or `**`.
///
/// ```
/// use millrace_access::pattern::Pattern;
/// use millrace_moq::Namespace;
///
/// let pattern: Pattern = "live/*/cam".parse()?;
/// assert!(pattern.matches(&Namespace::from_path("live/hall/cam")?));
/// assert!(!pattern.matches(&Namespace::from_path("live/hall")?));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pattern {
    fields: Vec<PatternField>,
    /// True if the pattern ends in `**`, which allows any number of further fields, or none.
    open: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum PatternField {
    Exact(Bytes),
    Any,
}

/// The reason why a text is no pattern.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the messages describe the variants")]
pub enum PatternError {
    #[error("a field of the namespace is empty")]
    Empty,
    #[error("`**` may stand only at the end of a pattern")]
    NotLast,
    #[error("`*` may stand only for a whole field of a namespace")]
    Part,
}

impl Pattern {
    /// Returns the pattern that matches all namespaces.
    pub fn any() -> Self {
        Self { fields: Vec::new(), open: true }
    }

    /// Returns the longest prefix that all namespaces of the pattern have.
    pub fn prefix(&self) -> Namespace {
        let exact = self.fields.iter().map_while(|field| match field {
            PatternField::Exact(field) => Some(field.clone()),
            PatternField::Any => None,
        });
        // The fields are those of a namespace, so a shorter list of them is one, too.
        Namespace::new(exact).unwrap_or_default()
    }

    /// Reports whether the pattern matches the namespace.
    pub fn matches(&self, namespace: &Namespace) -> bool {
        let fields = namespace.fields();
        let enough =
            if self.open { fields.len() >= self.fields.len() } else { fields.len() == self.fields.len() };
        enough && self.fields.iter().zip(fields).all(|(wanted, field)| wanted.matches(field))
    }
}

impl PatternField {
    fn matches(&self, field: &Bytes) -> bool {
        match self {
            Self::Exact(wanted) => wanted == field,
            Self::Any => true,
        }
    }
}

/// Returns the parts of a path. Repeated slashes, and slashes at its ends, are ignored.
pub(super) fn path(path: &str) -> Vec<String> {
    path.split('/').filter(|part| !part.is_empty()).map(str::to_owned).collect()
}

impl FromStr for Pattern {
    type Err = PatternError;

    fn from_str(text: &str) -> Result<Self, PatternError> {
        let (front, open) = match text.strip_suffix("**") {
            Some("") => return Ok(Self::any()),
            Some(front) => (front.strip_suffix('/').ok_or(PatternError::Part)?, true),
            None => (text, false),
        };
        let fields = front.split('/').map(|field| match field {
            "" => Err(PatternError::Empty),
            "*" => Ok(PatternField::Any),
            "**" => Err(PatternError::NotLast),
            field if field.contains('*') => Err(PatternError::Part),
            field => Ok(PatternField::Exact(Bytes::copy_from_slice(field.as_bytes()))),
        });
        Ok(Self { fields: fields.collect::<Result<_, _>>()?, open })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prefix_of_a_pattern_ends_before_its_first_wildcard() {
        for (pattern, prefix) in
            [("**", ""), ("live/**", "live"), ("live/cam", "live/cam"), ("live/*/b", "live"), ("*/b", "")]
        {
            let namespace =
                if prefix.is_empty() { Namespace::default() } else { Namespace::from_path(prefix).unwrap() };
            assert_eq!(pattern.parse::<Pattern>().unwrap().prefix(), namespace, "{pattern}");
        }
    }

    #[test]
    fn namespace_patterns_match_namespaces() {
        let table: [(&str, &[&str], &[&str]); 6] = [
            ("**", &["", "a", "a/b"], &[]),
            ("live/**", &["live", "live/a", "live/a/b"], &["", "liver", "vod/live"]),
            ("live", &["live"], &["", "live/a"]),
            ("live/*", &["live/a"], &["live", "live/a/b"]),
            ("*/cam", &["a/cam"], &["cam", "a/b", "a/cam/x"]),
            ("live/*/cam/**", &["live/a/cam", "live/a/cam/b"], &["live/a", "live/cam"]),
        ];
        for (pattern, inside, outside) in table {
            let parsed: Pattern = pattern.parse().unwrap();
            for (paths, wanted) in [(inside, true), (outside, false)] {
                for path in paths {
                    let namespace = match *path {
                        "" => Namespace::default(),
                        path => Namespace::from_path(path).unwrap(),
                    };
                    assert_eq!(parsed.matches(&namespace), wanted, "{pattern} on {path}");
                }
            }
        }
    }

    #[test]
    fn malformed_pattern_is_refused() {
        let table = [
            ("", PatternError::Empty),
            ("/live", PatternError::Empty),
            ("live/", PatternError::Empty),
            ("**/live", PatternError::NotLast),
            ("li*", PatternError::Part),
            ("live**", PatternError::Part),
        ];
        for (text, error) in table {
            assert_eq!(text.parse::<Pattern>(), Err(error), "{text}");
        }
    }
}
