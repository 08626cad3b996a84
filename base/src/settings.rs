//! Settings files: TOML, read as a whole. Everything that is wrong is reported at once, each with its line, its key and a remedy.
//!
//! A [`Reader`] takes one value after the other out of a [`Section`], or a whole section as a type that derives `Deserialize`
//! ([`Reader::read`]), and notes what is wrong. What was not taken is unknown. Where a list is wanted, one value stands for a list of one.

mod place;
mod value;

use std::{
    borrow::Cow,
    cell::RefCell,
    collections::{BTreeMap, BTreeSet},
    fmt,
};

use serde::de::DeserializeOwned;
use toml::{
    Spanned,
    de::{DeTable, DeValue},
};

pub use self::place::{Place, unknown};
use self::{
    place::line,
    value::{Context, Node, kind},
};

/// A fault in one line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// Number of the line, from 1.
    pub line: usize,
    /// Keys joined by dots. It is empty where the message names its subject, or where the line is not TOML.
    pub key: String,
    pub message: String,
}

/// All faults in a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problems {
    /// Beginning of the message: subject and verb, such as `the policy is`.
    pub what: &'static str,
    pub file: String,
    /// Faults, in the order of lines.
    pub problems: Vec<Problem>,
}

impl std::error::Error for Problems {}

impl fmt::Display for Problems {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} not usable:", self.what)?;
        self.problems.iter().try_for_each(|Problem { line, key, message }| {
            let colon = if key.is_empty() { "" } else { ": " };
            write!(f, "\n  {}:{line}: {key}{colon}{message}", self.file)
        })
    }
}

/// A file that is being read.
#[derive(Debug)]
pub struct Reader<'a> {
    text: &'a str,
    pub problems: Vec<Problem>,
    /// Lines of the keys and items that [`read`](Self::read) has come by.
    lines: RefCell<BTreeMap<String, usize>>,
}

/// A table of it.
#[derive(Debug)]
pub struct Section<'t> {
    pub place: Place,
    entries: DeTable<'t>,
    /// Keys that were asked for.
    known: Vec<&'static str>,
}

/// A value that is one thing or a table of things.
#[derive(Debug)]
pub enum Shape<'t, T> {
    Value(T),
    Section(Section<'t>),
}

impl<'a> Reader<'a> {
    /// Begins to read; returns the file's root.
    pub fn new(text: &'a str) -> (Self, Section<'a>) {
        let mut reader = Self { text, problems: Vec::new(), lines: RefCell::default() };
        let (table, errors) = DeTable::parse_recoverable(text);
        for error in errors {
            let line = error.span().map_or(1, |span| line(text, span));
            reader.problem(&Place { line, key: String::new() }, error.message());
        }
        let place = Place { line: 1, key: String::new() };
        (reader, Section::new(place, table.into_inner()))
    }

    /// Reads a whole file, which the error calls `file`, as a type that derives `Deserialize`, and has the rest done by `check`, which may note
    /// further problems.
    ///
    /// # Errors
    /// Everything that is wrong.
    pub fn file<R: DeserializeOwned, T>(
        text: &str,
        what: &'static str,
        file: &str,
        check: impl FnOnce(&mut Reader<'_>, R) -> Option<T>,
    ) -> Result<T, Problems> {
        let (mut reader, root) = Reader::new(text);
        let raw = reader.read(root).filter(|_| reader.problems.is_empty());
        let done = raw.and_then(|raw| check(&mut reader, raw));
        reader.end(what, file, done)
    }

    /// Returns what the file comes to.
    ///
    /// # Errors
    /// Everything that is wrong.
    pub fn end<T>(mut self, what: &'static str, file: &str, done: Option<T>) -> Result<T, Problems> {
        self.problems.sort_by_key(|problem| problem.line);
        match done {
            Some(done) if self.problems.is_empty() => Ok(done),
            _ => Err(Problems { what, file: file.to_owned(), problems: self.problems }),
        }
    }

    /// Notes what is wrong at a place.
    pub fn problem(&mut self, place: &Place, message: impl Into<String>) {
        self.problems.push(Problem { line: place.line, key: place.key.clone(), message: message.into() });
    }

    /// Notes an error, which says what it is about, at the line of `key`, or of the table that `key` is missing in.
    pub fn check<T, E: fmt::Display>(&mut self, key: &str, done: Result<T, E>) -> Option<T> {
        done.map_err(|error| {
            let place = Place { line: self.line_of(key), key: String::new() };
            self.problem(&place, error.to_string());
        })
        .ok()
    }

    /// Checks the items of the list at `key`, and notes the errors at the lines of the items. `None`: there is one.
    pub fn each<R, T, E: fmt::Display>(
        &mut self,
        key: &str,
        items: Vec<R>,
        mut check: impl FnMut(R) -> Result<T, E>,
    ) -> Option<Vec<T>> {
        let items = items.into_iter().enumerate();
        let all: Vec<_> = items.map(|(at, item)| self.check(&format!("{key}[{at}]"), check(item))).collect();
        all.into_iter().collect()
    }

    fn line_of(&self, key: &str) -> usize {
        let (lines, mut key) = (self.lines.borrow(), key);
        loop {
            match (lines.get(key), key.rfind(['.', '['])) {
                (Some(line), _) => return *line,
                (None, Some(end)) => key = key.get(..end).unwrap_or_default(),
                (None, None) => return 1,
            }
        }
    }

    /// Takes a whole section. `None`: it has problems.
    pub fn read<T: DeserializeOwned>(&mut self, section: Section<'_>) -> Option<T> {
        self.value(&section.place, &DeValue::Table(section.entries))
    }

    /// Takes the value of a key.
    pub fn take<T: DeserializeOwned>(&mut self, from: &mut Section<'_>, key: &'static str) -> Option<T> {
        self.take_at(from, key).map(|(_, value)| value)
    }

    /// Takes the value of a key, with its place.
    pub fn take_at<T: DeserializeOwned>(
        &mut self,
        from: &mut Section<'_>,
        key: &'static str,
    ) -> Option<(Place, T)> {
        let (place, value) = self.raw(from, key)?;
        let value = self.value(&place, &value)?;
        Some((place, value))
    }

    /// Takes the value of a key that may be a table.
    pub fn shape<'t, T: DeserializeOwned>(
        &mut self,
        from: &mut Section<'t>,
        key: &'static str,
    ) -> Option<(Place, Shape<'t, T>)> {
        let shape = match self.raw(from, key)? {
            (place, DeValue::Table(entries)) => (place.clone(), Shape::Section(Section::new(place, entries))),
            (place, value) => {
                let value = self.value(&place, &value)?;
                (place, Shape::Value(value))
            }
        };
        Some(shape)
    }

    /// Takes a table.
    pub fn section<'t>(&mut self, from: &mut Section<'t>, key: &'static str) -> Option<Section<'t>> {
        match self.raw(from, key)? {
            (place, DeValue::Table(entries)) => Some(Section::new(place, entries)),
            (place, other) => {
                self.problem(&place, format!("is a table, written `[{key}]`, not {}", kind(&other)));
                None
            }
        }
    }

    /// Takes all tables of an array of tables.
    pub fn sections<'t>(&mut self, from: &mut Section<'t>, key: &'static str) -> Vec<Section<'t>> {
        let Some((place, value)) = self.raw(from, key) else { return Vec::new() };
        let DeValue::Array(items) = value else {
            self.problem(&place, format!("each is a table of its own, written `[[{key}]]`"));
            return Vec::new();
        };
        let mut sections = Vec::new();
        for (index, item) in items.into_iter().enumerate() {
            let place = Place { line: line(self.text, item.span()), key: format!("{key}[{index}]") };
            match item.into_inner() {
                DeValue::Table(entries) => sections.push(Section::new(place, entries)),
                other => self.problem(&place, format!("is a table, not {}", kind(&other))),
            }
        }
        sections
    }

    /// Notes what is left in a section: it is unknown.
    pub fn finish(&mut self, section: Section<'_>) {
        for key in section.entries.keys() {
            let place = section.place.inner(key.get_ref(), line(self.text, key.span()));
            self.problem(&place, unknown(key.get_ref(), &section.known));
        }
    }

    fn raw<'t>(&mut self, from: &mut Section<'t>, key: &'static str) -> Option<(Place, DeValue<'t>)> {
        from.known.push(key);
        let (key, value) = from.entries.remove_entry(&Spanned::new(0..0, Cow::Borrowed(key)))?;
        Some((from.place.inner(key.get_ref(), line(self.text, key.span())), value.into_inner()))
    }

    /// Reads a value as often as something is wrong in it, without what was found wrong before. A table that lacks what it needs is left out.
    fn value<T: DeserializeOwned>(&mut self, place: &Place, value: &DeValue<'_>) -> Option<T> {
        let mut wrong = BTreeSet::new();
        loop {
            let context = Context { text: self.text, wrong: &wrong, lines: &self.lines };
            let fault = match T::deserialize(Node { context: &context, value, key: &place.key }) {
                Ok(value) => return wrong.is_empty().then_some(value),
                Err(fault) => fault,
            };
            let at = fault.place.unwrap_or_else(|| place.clone());
            let missing = fault.missing.map(|key| at.inner(key, at.line));
            // What is missing since it is wrong was reported as that.
            if missing.as_ref().is_none_or(|missing| !wrong.contains(&missing.key)) {
                self.problem(missing.as_ref().unwrap_or(&at), fault.message);
            }
            if at.key == place.key || !wrong.insert(at.key) {
                return None;
            }
        }
    }
}

impl<'t> Section<'t> {
    fn new(place: Place, entries: DeTable<'t>) -> Self {
        Self { place, entries, known: Vec::new() }
    }
}

#[cfg(test)]
mod tests;
