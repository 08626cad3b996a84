//! TOML with places: every value is taken once, whatever is wrong is noted with line and key, and what was not taken
//! is unknown.

use std::{
    borrow::Cow,
    net::IpAddr,
    num::NonZeroU16,
    ops::{Range, RangeInclusive},
    path::PathBuf,
    time::Duration,
};

use millrace_kernel::prefix::{ParseError, Prefix};

use crate::kernel::{Position, rules::Mode};
use toml::{
    Spanned,
    de::{DeTable, DeValue},
};

use super::Problem;

/// A file that is being read.
pub(super) struct Reader<'a> {
    text: &'a str,
    pub problems: Vec<Problem>,
}

/// A table of it.
pub(super) struct Section<'t> {
    pub place: Place,
    entries: DeTable<'t>,
    /// Keys that were asked for.
    known: Vec<&'static str>,
}

/// Where something stands: a line, and keys joined by dots.
#[derive(Clone, Debug, Default)]
pub(super) struct Place {
    pub line: usize,
    pub key: String,
}

/// A value that is one thing or a table of things.
pub(super) enum Shape<'t, T> {
    Value(T),
    Section(Section<'t>),
}

impl<'a> Reader<'a> {
    pub fn new(text: &'a str) -> (Self, Section<'a>) {
        let mut reader = Self { text, problems: Vec::new() };
        let (table, errors) = DeTable::parse_recoverable(text);
        for error in errors {
            let line = error.span().map_or(1, |span| reader.line(span));
            reader.problems.push(Problem { line, key: String::new(), message: error.message().to_owned() });
        }
        let place = Place { line: 1, key: String::new() };
        (reader, Section { place, entries: table.into_inner(), known: Vec::new() })
    }

    pub fn problem(&mut self, place: &Place, message: impl Into<String>) {
        self.problems.push(Problem { line: place.line, key: place.key.clone(), message: message.into() });
    }

    /// The value of a key.
    pub fn take<T: FromValue>(&mut self, from: &mut Section<'_>, key: &'static str) -> Option<T> {
        self.take_at(from, key).map(|(_, value)| value)
    }

    pub fn take_at<T: FromValue>(&mut self, from: &mut Section<'_>, key: &'static str) -> Option<(Place, T)> {
        let (place, value) = self.raw(from, key)?;
        match T::from_value(value) {
            Ok(value) => Some((place, value)),
            Err(message) => {
                self.problem(&place, message);
                None
            }
        }
    }

    /// The value of a key that may be a table.
    pub fn shape<'t, T: FromValue>(
        &mut self,
        from: &mut Section<'t>,
        key: &'static str,
    ) -> Option<(Place, Shape<'t, T>)> {
        let (place, value) = self.raw(from, key)?;
        if let DeValue::Table(entries) = value {
            let section = Section { place: place.clone(), entries, known: Vec::new() };
            return Some((place, Shape::Section(section)));
        }
        match T::from_value(value) {
            Ok(value) => Some((place, Shape::Value(value))),
            Err(message) => {
                self.problem(&place, message);
                None
            }
        }
    }

    pub fn section<'t>(&mut self, from: &mut Section<'t>, key: &'static str) -> Option<Section<'t>> {
        match self.raw(from, key)? {
            (place, DeValue::Table(entries)) => Some(Section { place, entries, known: Vec::new() }),
            (place, other) => {
                self.problem(&place, format!("is a table, written `[{key}]`, not {}", kind(&other)));
                None
            }
        }
    }

    /// All tables of an array of tables.
    pub fn sections<'t>(&mut self, from: &mut Section<'t>, key: &'static str) -> Vec<Section<'t>> {
        let Some((place, value)) = self.raw(from, key) else { return Vec::new() };
        let DeValue::Array(items) = value else {
            self.problem(&place, format!("each is a table of its own, written `[[{key}]]`"));
            return Vec::new();
        };
        let mut sections = Vec::new();
        for (index, item) in items.into_iter().enumerate() {
            let place = Place { line: self.line(item.span()), key: format!("{key}[{index}]") };
            match item.into_inner() {
                DeValue::Table(entries) => sections.push(Section { place, entries, known: Vec::new() }),
                other => self.problem(&place, format!("is a table, not {}", kind(&other))),
            }
        }
        sections
    }

    /// What is left in a section is unknown.
    pub fn finish(&mut self, section: Section<'_>) {
        for key in section.entries.keys() {
            let place = section.place.inner(key.get_ref(), self.line(key.span()));
            self.problem(&place, unknown(key.get_ref(), &section.known));
        }
    }

    fn raw<'t>(&mut self, from: &mut Section<'t>, key: &'static str) -> Option<(Place, DeValue<'t>)> {
        from.known.push(key);
        let (key, value) = from.entries.remove_entry(&Spanned::new(0..0, Cow::Borrowed(key)))?;
        Some((from.place.inner(key.get_ref(), self.line(key.span())), value.into_inner()))
    }

    fn line(&self, span: Range<usize>) -> usize {
        let before = self.text.get(..span.start).unwrap_or(self.text);
        before.matches('\n').count() + 1
    }
}

impl Place {
    fn inner(&self, key: &str, line: usize) -> Self {
        let key = if self.key.is_empty() { key.to_owned() } else { format!("{}.{key}", self.key) };
        Self { line, key }
    }
}

fn unknown(key: &str, known: &[&'static str]) -> String {
    let closest = known.iter().map(|known| (strsim::jaro(key, known), known));
    match closest.max_by(|(a, _), (b, _)| a.total_cmp(b)).filter(|(similarity, _)| *similarity > 0.7) {
        Some((_, known)) => format!("unknown key; did you mean `{known}`?"),
        None => format!("unknown key; known here: {}", known.join(", ")),
    }
}

fn kind(value: &DeValue<'_>) -> String {
    format!("a value of type {}", value.type_str())
}

/// What a value can be read as; errors say what is wanted.
pub(super) trait FromValue: Sized {
    fn from_value(value: DeValue<'_>) -> Result<Self, String>;
}

fn number(value: &DeValue<'_>, range: RangeInclusive<u64>) -> Result<u64, String> {
    let parsed = value.as_integer().and_then(|it| u64::from_str_radix(it.as_str(), it.radix()).ok());
    let (min, max) = (range.start(), range.end());
    parsed.filter(|number| range.contains(number)).ok_or_else(|| format!("is a number, {min} to {max}"))
}

impl FromValue for u64 {
    fn from_value(value: DeValue<'_>) -> Result<Self, String> {
        // As far as integers of TOML go.
        number(&value, 0..=i64::MAX as Self)
    }
}

fn narrow<T: TryFrom<u64, Error: std::fmt::Display>>(
    value: &DeValue<'_>,
    range: RangeInclusive<u64>,
) -> Result<T, String> {
    T::try_from(number(value, range)?).map_err(|error| error.to_string())
}

impl FromValue for u32 {
    fn from_value(value: DeValue<'_>) -> Result<Self, String> {
        narrow(&value, 0..=Self::MAX.into())
    }
}

impl FromValue for u8 {
    fn from_value(value: DeValue<'_>) -> Result<Self, String> {
        narrow(&value, 0..=Self::MAX.into())
    }
}

impl FromValue for NonZeroU16 {
    fn from_value(value: DeValue<'_>) -> Result<Self, String> {
        let number: u16 = narrow(&value, 1..=u16::MAX.into())?;
        Self::try_from(number).map_err(|error| error.to_string())
    }
}

impl FromValue for bool {
    fn from_value(value: DeValue<'_>) -> Result<Self, String> {
        value.as_bool().ok_or_else(|| "is true or false, without quotes".to_owned())
    }
}

impl FromValue for String {
    fn from_value(value: DeValue<'_>) -> Result<Self, String> {
        value.as_str().map(str::to_owned).ok_or_else(|| format!("is text in quotes, not {}", kind(&value)))
    }
}

impl FromValue for PathBuf {
    fn from_value(value: DeValue<'_>) -> Result<Self, String> {
        String::from_value(value).map(Self::from)
    }
}

/// Seconds.
impl FromValue for Duration {
    fn from_value(value: DeValue<'_>) -> Result<Self, String> {
        const MAX: f64 = 365.0 * 86_400.0;
        let seconds = match &value {
            DeValue::Float(float) => float.as_str().parse().ok(),
            DeValue::Integer(_) => number(&value, 0..=MAX as u64).ok().map(|whole| whole as f64),
            _ => None,
        };
        let seconds = seconds.filter(|seconds| (0.0..=MAX).contains(seconds));
        seconds.map(Self::from_secs_f64).ok_or_else(|| format!("is a number of seconds, 0 to {MAX}"))
    }
}

impl FromValue for IpAddr {
    fn from_value(value: DeValue<'_>) -> Result<Self, String> {
        let address = value.as_str().and_then(|text| text.parse().ok());
        address.ok_or_else(|| "is an address in quotes, such as \"192.0.2.1\" or \"2001:db8::1\"".to_owned())
    }
}

impl FromValue for Prefix {
    fn from_value(value: DeValue<'_>) -> Result<Self, String> {
        let text = String::from_value(value)?;
        text.parse().map_err(|error: ParseError| error.to_string())
    }
}

impl FromValue for Mode {
    fn from_value(value: DeValue<'_>) -> Result<Self, String> {
        match value.as_str() {
            Some("off") => Ok(Self::Off),
            Some("monitor") => Ok(Self::Monitor),
            Some("enforce") => Ok(Self::Enforce),
            _ => Err("is \"off\", \"monitor\" or \"enforce\"".to_owned()),
        }
    }
}

impl FromValue for Position {
    fn from_value(value: DeValue<'_>) -> Result<Self, String> {
        match value.as_str() {
            Some("first") => Ok(Self::First),
            Some("last") => Ok(Self::Last),
            _ => Err("is \"first\" or \"last\"".to_owned()),
        }
    }
}

/// One, or a list of them.
impl<T: FromValue> FromValue for Vec<T> {
    fn from_value(value: DeValue<'_>) -> Result<Self, String> {
        match value {
            DeValue::Array(items) => {
                let all = items.into_iter().enumerate().map(|(index, item)| {
                    T::from_value(item.into_inner()).map_err(|message| format!("[{index}] {message}"))
                });
                all.collect()
            }
            one => Ok(vec![T::from_value(one)?]),
        }
    }
}
