//! Namespaces and track names (draft-18, "Track Naming" and "Representing Namespace and Track Names").

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use bytes::Bytes;

use super::wire::{WireReader, put_prefixed};
use super::{DecodeError, vi64};

/// The largest number of fields of a namespace.
pub const MAX_FIELDS: usize = 32;
/// The largest sum, in bytes, of a namespace's fields and the track name.
pub const MAX_LEN: usize = 4096;

/// The reason why fields, or a text, do not form a valid name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the messages describe the variants")]
pub enum NameError {
    #[error("a namespace has more than {MAX_FIELDS} fields")]
    TooManyFields,
    #[error("a namespace field is empty")]
    EmptyField,
    #[error("a name is longer than {MAX_LEN} bytes")]
    TooLong,
    #[error("not the canonical form of a name: `-` between fields, `--` before the track, `.xx` for bytes")]
    NotCanonical,
}

impl From<NameError> for DecodeError {
    fn from(error: NameError) -> Self {
        Self::violation(match error {
            NameError::TooManyFields => "a namespace has more than 32 fields",
            NameError::EmptyField => "a namespace field is empty",
            NameError::TooLong => "a name is longer than 4096 bytes",
            NameError::NotCanonical => "a name is not in canonical form",
        })
    }
}

/// A tuple of 0 to 32 non-empty byte strings: a namespace, or a prefix or suffix of one.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Namespace(Arc<[Bytes]>);

impl Default for Namespace {
    fn default() -> Self {
        Self(Arc::from([]))
    }
}

impl Namespace {
    /// Makes a namespace of these fields, or fails if there are too many or one is empty or too long.
    pub fn new<F: Into<Bytes>>(fields: impl IntoIterator<Item = F>) -> Result<Self, NameError> {
        let fields: Arc<[Bytes]> = fields.into_iter().map(Into::into).collect();
        if fields.len() > MAX_FIELDS {
            return Err(NameError::TooManyFields);
        }
        if fields.iter().any(Bytes::is_empty) {
            return Err(NameError::EmptyField);
        }
        let namespace = Self(fields);
        if namespace.byte_len() > MAX_LEN {
            return Err(NameError::TooLong);
        }
        Ok(namespace)
    }

    /// Splits `a/b/c` into the fields `a`, `b` and `c`, as the moq-rs tools do with their option `--name`.
    pub fn from_path(path: &str) -> Result<Self, NameError> {
        Self::new(path.split('/').map(|field| field.to_owned()))
    }

    /// Returns the fields.
    pub fn fields(&self) -> &[Bytes] {
        &self.0
    }

    /// Reports whether the namespace has no fields.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the sum of the lengths of the fields, in bytes.
    pub fn byte_len(&self) -> usize {
        self.0.iter().map(Bytes::len).sum()
    }

    /// Reports whether `other` begins with all fields of this namespace. A namespace is a prefix of itself.
    pub fn is_prefix_of(&self, other: &Self) -> bool {
        other.0.starts_with(&self.0)
    }

    /// Returns every prefix of this namespace, from the empty one to the namespace itself.
    pub fn prefixes(&self) -> impl Iterator<Item = Self> + '_ {
        (0..=self.0.len()).map(|fields| Self(self.0[..fields].into()))
    }

    /// Reports whether one of the two namespaces is a prefix of the other. Subscriptions to such namespaces overlap.
    pub fn overlaps(&self, other: &Self) -> bool {
        self.is_prefix_of(other) || other.is_prefix_of(self)
    }

    /// Returns the fields after `prefix`, or `None` if this namespace does not begin with it.
    pub fn suffix_after(&self, prefix: &Self) -> Option<Self> {
        self.0.strip_prefix(&*prefix.0).map(|suffix| Self(suffix.into()))
    }

    /// Returns the fields of this namespace followed by those of `suffix`.
    pub fn join(&self, suffix: &Self) -> Result<Self, NameError> {
        Self::new(self.0.iter().chain(suffix.0.iter()).cloned())
    }

    /// Reports whether the first field is exactly `.`. Such a namespace is reserved: it must be neither requested nor
    /// published.
    pub fn is_forbidden(&self) -> bool {
        self.0.first().is_some_and(|first| first == ".")
    }

    /// Reports whether the first field is exactly `.session`. Such a namespace is only for the two endpoints of the
    /// session, and is never forwarded.
    pub fn is_session_level(&self) -> bool {
        self.0.first().is_some_and(|first| first == ".session")
    }

    pub(super) fn decode(input: &mut WireReader) -> Result<Self, DecodeError> {
        let count = input.vi64()?;
        if count > MAX_FIELDS as u64 {
            return Err(NameError::TooManyFields.into());
        }
        let mut fields = Vec::with_capacity(count as usize);
        for _ in 0..count {
            // The field is copied, so that it does not keep the whole message's memory alive.
            fields.push(Bytes::copy_from_slice(&input.prefixed()?));
        }
        Ok(Self::new(fields)?)
    }

    pub(super) fn encode(&self, out: &mut Vec<u8>) {
        vi64::encode(self.0.len() as u64, out);
        for field in self.0.iter() {
            put_prefixed(field, out);
        }
    }
}

/// A full track name: a namespace and a track name, which may be empty.
///
/// ```
/// use millrace_moq::{Namespace, TrackName};
///
/// let track = TrackName::new(Namespace::from_path("live/bbb")?, "video")?;
/// assert!(Namespace::from_path("live")?.is_prefix_of(track.namespace()));
/// assert_eq!(&track.name()[..], b"video");
/// # Ok::<(), millrace_moq::name::NameError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TrackName {
    namespace: Namespace,
    name: Bytes,
}

impl TrackName {
    /// Makes a name, or fails if it is too long.
    pub fn new(namespace: Namespace, name: impl Into<Bytes>) -> Result<Self, NameError> {
        let name = name.into();
        match namespace.byte_len() + name.len() > MAX_LEN {
            true => Err(NameError::TooLong),
            false => Ok(Self { namespace, name }),
        }
    }

    /// Returns the namespace.
    pub fn namespace(&self) -> &Namespace {
        &self.namespace
    }

    /// Returns the track name without the namespace.
    pub fn name(&self) -> &Bytes {
        &self.name
    }

    pub(super) fn decode(input: &mut WireReader) -> Result<Self, DecodeError> {
        let namespace = Namespace::decode(input)?;
        let name = Bytes::copy_from_slice(&input.prefixed()?);
        Ok(Self::new(namespace, name)?)
    }

    pub(super) fn encode(&self, out: &mut Vec<u8>) {
        self.namespace.encode(out);
        put_prefixed(&self.name, out);
    }
}

const fn is_literal(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'_'
}

fn write_field(field: &[u8], f: &mut fmt::Formatter<'_>) -> fmt::Result {
    field.iter().try_for_each(|byte| match is_literal(*byte) {
        true => write!(f, "{}", char::from(*byte)),
        false => write!(f, ".{byte:02x}"),
    })
}

fn parse_field(text: &str) -> Result<Bytes, NameError> {
    let mut field = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&byte, tail)) = rest.split_first() {
        rest = tail;
        if is_literal(byte) {
            field.push(byte);
            continue;
        }
        match (byte, rest) {
            (b'.', [high, low, tail @ ..]) => {
                let byte = hex_digit(*high)? << 4 | hex_digit(*low)?;
                if is_literal(byte) {
                    return Err(NameError::NotCanonical);
                }
                field.push(byte);
                rest = tail;
            }
            _ => return Err(NameError::NotCanonical),
        }
    }
    Ok(field.into())
}

fn hex_digit(byte: u8) -> Result<u8, NameError> {
    match byte {
        b'0'..=b'9' => Ok(byte - b'0'),
        b'a'..=b'f' => Ok(byte - b'a' + 10),
        _ => Err(NameError::NotCanonical),
    }
}

/// Displays a name as users type it, with slashes between its fields: `live/1.m4s`. A name that would be ambiguous in
/// this form is displayed in the unambiguous text form that MoQ Transport defines.
#[derive(Clone, Copy, Debug)]
pub struct Typed<'a, N>(&'a N);

impl Namespace {
    /// Returns a value that displays the namespace as users type it.
    pub fn typed(&self) -> Typed<'_, Self> {
        Typed(self)
    }
}

impl TrackName {
    /// Returns a value that displays the name as users type it.
    pub fn typed(&self) -> Typed<'_, Self> {
        Typed(self)
    }
}

impl fmt::Display for Typed<'_, Namespace> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let fields: Option<Vec<&str>> = self.0.0.iter().map(|field| word(field)).collect();
        match fields {
            Some(fields) => f.write_str(&fields.join("/")),
            None => self.0.fmt(f),
        }
    }
}

impl fmt::Display for Typed<'_, TrackName> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let fields = self.0.namespace.0.iter().chain([&self.0.name]);
        let fields: Option<Vec<&str>> = fields.map(|field| word(field)).collect();
        match fields.filter(|fields| fields.len() > 1) {
            Some(fields) => f.write_str(&fields.join("/")),
            None => self.0.fmt(f),
        }
    }
}

/// Returns a field as text if it can be displayed between slashes. It may contain only visible characters, and single
/// spaces between them.
fn word(field: &[u8]) -> Option<&str> {
    let other = |c: char| c == '/' || c.is_control() || (c.is_whitespace() && c != ' ');
    let text = str::from_utf8(field).ok()?;
    let stands = !text.is_empty() && !text.contains(other) && !text.contains("--") && text.trim() == text;
    stands.then_some(text)
}

impl fmt::Display for Namespace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, field) in self.0.iter().enumerate() {
            if index > 0 {
                f.write_str("-")?;
            }
            write_field(field, f)?;
        }
        Ok(())
    }
}

impl FromStr for Namespace {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, NameError> {
        match text {
            "" => Ok(Self::default()),
            _ => Self::new(text.split('-').map(parse_field).collect::<Result<Vec<_>, _>>()?),
        }
    }
}

impl fmt::Display for TrackName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}--", self.namespace)?;
        write_field(&self.name, f)
    }
}

impl FromStr for TrackName {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, NameError> {
        let (namespace, name) = text.split_once("--").ok_or(NameError::NotCanonical)?;
        Self::new(namespace.parse()?, parse_field(name)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::collection::vec;
    use proptest::prelude::*;

    #[test]
    fn track_name_example_of_the_draft_is_printed() {
        let name: TrackName = "example.2enet-team2-project_x--report".parse().unwrap();
        let namespace = Namespace::new(["example.net", "team2", "project_x"]).unwrap();
        assert_eq!(name, TrackName::new(namespace, "report").unwrap());
        assert_eq!(name.to_string(), "example.2enet-team2-project_x--report");
    }

    #[test]
    fn unprintable_bytes_in_displayed_track_names_are_escaped() {
        for (namespace, name, typed) in [
            ("live", &b"1.m4s"[..], "live/1.m4s"),
            ("live/cam-2", b"video hi", "live/cam-2/video hi"),
            ("live/\u{fc}mlaut-\u{540d}", b"good-mp4", "live/\u{fc}mlaut-\u{540d}/good-mp4"),
            ("live", b"hi ", "live--hi.20"),
            ("live", b"\x1b[2J", "live--.1b.5b2J"),
            ("live", "a\u{2028}b".as_bytes(), "live--a.e2.80.a8b"),
            ("live/cam-2", b"video", "live/cam-2/video"),
            ("live", b"a/b", "live--a.2fb"),
            ("live", b"a--b", "live--a.2d.2db"),
            ("live", b"\xff", "live--.ff"),
        ] {
            let namespace = Namespace::from_path(namespace).unwrap();
            assert_eq!(TrackName::new(namespace, name).unwrap().typed().to_string(), typed);
        }
        assert_eq!(Namespace::from_path("live/cam-2").unwrap().typed().to_string(), "live/cam-2");
        assert_eq!(Namespace::new(["a/b"]).unwrap().typed().to_string(), "a.2fb");
        let unnamed = TrackName::new(Namespace::default(), "video").unwrap();
        assert_eq!(unnamed.typed().to_string(), "--video");
    }

    #[test]
    fn non_canonical_names_are_refused() {
        for text in ["a", "a-b", "a.2E--t", "a.61--t", "a.2--t", "a.--t", "a---t", "a b--t", "-a--t"] {
            assert!(text.parse::<TrackName>().is_err(), "{text}");
        }
    }

    #[test]
    fn path_is_split_at_slashes_into_namespace_fields() {
        assert_eq!(Namespace::from_path("a/b").unwrap(), Namespace::new(["a", "b"]).unwrap());
        assert_eq!(Namespace::from_path("/a"), Err(NameError::EmptyField));
    }

    #[test]
    fn namespace_prefix_and_suffix_are_compared_by_whole_fields() {
        let whole = Namespace::from_path("a/b/c").unwrap();
        let prefix = Namespace::from_path("a/b").unwrap();
        assert!(prefix.is_prefix_of(&whole) && !whole.is_prefix_of(&prefix));
        assert!(Namespace::default().is_prefix_of(&whole));
        assert!(!Namespace::from_path("a/bc").unwrap().is_prefix_of(&whole));
        assert_eq!(whole.suffix_after(&prefix), Some(Namespace::from_path("c").unwrap()));
        assert_eq!(prefix.suffix_after(&whole), None);
        assert_eq!(prefix.join(&Namespace::from_path("c").unwrap()), Ok(whole));
    }

    #[test]
    fn names_over_limits_are_refused() {
        assert!(Namespace::new(vec!["a"; 32]).is_ok());
        assert_eq!(Namespace::new(vec!["a"; 33]), Err(NameError::TooManyFields));
        let namespace = Namespace::new(["a".repeat(4000)]).unwrap();
        assert!(TrackName::new(namespace.clone(), "b".repeat(96)).is_ok());
        assert_eq!(TrackName::new(namespace, "b".repeat(97)), Err(NameError::TooLong));
    }

    pub(crate) fn track_name() -> impl Strategy<Value = TrackName> {
        (vec(vec(any::<u8>(), 1..20), 0..=MAX_FIELDS), vec(any::<u8>(), 0..40))
            .prop_map(|(fields, name)| TrackName::new(Namespace::new(fields).unwrap(), name).unwrap())
    }

    proptest! {
        #[test]
        fn names_round_trip_as_text(name in track_name()) {
            prop_assert_eq!(name.to_string().parse::<TrackName>(), Ok(name.clone()));
            prop_assert_eq!(name.namespace().to_string().parse::<Namespace>(), Ok(name.namespace().clone()));
        }

        #[test]
        fn every_parsed_track_name_prints_as_the_same_text(text in "[a-c.0-9_-]{0,12}") {
            if let Ok(name) = text.parse::<TrackName>() {
                prop_assert_eq!(name.to_string(), text);
            }
        }

        #[test]
        fn names_round_trip_on_the_wire(name in track_name()) {
            let mut out = Vec::new();
            name.encode(&mut out);
            let mut input = WireReader::new(crate::Draft::NEWEST, out.into());
            prop_assert_eq!(TrackName::decode(&mut input), Ok(name));
            prop_assert!(input.is_empty());
        }
    }
}
