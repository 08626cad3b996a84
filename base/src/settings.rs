//! Reads settings files in TOML. All faults are reported at once, each with its line, its key and a remedy.
//!
//! A [`SettingsReader`] takes single values out of a [`Section`], or reads a whole section as a type that derives
//! `Deserialize` ([`SettingsReader::read`]). It records each fault. Keys that nothing asked for are reported as
//! unknown. Where a list is expected, a single value counts as a list of one.

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

pub use self::place::{SettingPlace, unknown};
use self::{
    place::{breaks, line},
    value::{ValueContext, ValueNode, kind},
};

/// A fault in a settings file, described in one line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SettingsProblem {
    /// Line number in the file, from 1 on.
    pub line: usize,
    /// Keys joined by dots. Empty if the message itself names the key, or if the line is not TOML.
    pub key: String,
    /// Description of the fault. Messages show it after the line and key.
    pub message: String,
}

/// All faults in a settings file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problems {
    /// Beginning of the error message: subject and verb, such as `the policy is`.
    pub what: &'static str,
    /// The file's name, as the error message shows it.
    pub file: String,
    /// Faults, sorted by line.
    pub problems: Vec<SettingsProblem>,
}

impl std::error::Error for Problems {}

impl fmt::Display for Problems {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} not usable:", self.what)?;
        self.problems.iter().try_for_each(|SettingsProblem { line, key, message }| {
            let colon = if key.is_empty() { "" } else { ": " };
            write!(f, "\n  {}:{line}: {key}{colon}{message}", self.file)
        })
    }
}

/// A reader of one settings file.
#[derive(Debug)]
pub struct SettingsReader {
    /// Byte offsets of the line breaks.
    breaks: Vec<usize>,
    /// Faults found so far.
    pub problems: Vec<SettingsProblem>,
    /// Line numbers of the keys and list items that [`read`](Self::read) has visited.
    lines: RefCell<BTreeMap<String, usize>>,
}

/// A table of the settings file.
#[derive(Debug)]
pub struct Section<'t> {
    /// Line and key of the table.
    pub place: SettingPlace,
    entries: DeTable<'t>,
    /// Keys that the program has asked for. All other keys of the table are reported as unknown.
    known: Vec<&'static str>,
}

/// A value that is either a single value or a table of values.
#[derive(Debug)]
pub enum ValueOrTable<'t, T> {
    /// A single value, such as a string or a number.
    Value(T),
    /// A TOML table of keys and values.
    Section(Section<'t>),
}

impl SettingsReader {
    /// Returns a reader of a settings file's text, and its root table.
    pub fn new(text: &str) -> (Self, Section<'_>) {
        let mut reader = Self { breaks: breaks(text), problems: Vec::new(), lines: RefCell::default() };
        let (table, errors) = DeTable::parse_recoverable(text);
        for error in errors {
            let line = error.span().map_or(1, |span| line(&reader.breaks, span));
            reader.problem(&SettingPlace { line, key: String::new() }, error.message());
        }
        let place = SettingPlace { line: 1, key: String::new() };
        (reader, Section::new(place, table.into_inner()))
    }

    /// Reads a whole file as a type that derives `Deserialize`. Then `check` converts that value, and may record
    /// further problems. `file` is the file's name in errors.
    ///
    /// # Errors
    /// Fails if the settings file has any fault. The error lists all of them.
    pub fn file<R: DeserializeOwned, T>(
        text: &str,
        what: &'static str,
        file: &str,
        check: impl FnOnce(&mut SettingsReader, R) -> Option<T>,
    ) -> Result<T, Problems> {
        let (mut reader, root) = SettingsReader::new(text);
        // `check` sees only a file without faults, so that it reports nothing that was already reported.
        let raw = reader.read(root).filter(|_| reader.problems.is_empty());
        let done = raw.and_then(|raw| check(&mut reader, raw));
        reader.end(what, file, done)
    }

    /// Returns `done`, the settings that were read, if no problem was recorded.
    ///
    /// # Errors
    /// Fails if a problem was recorded. The error lists all of them.
    pub fn end<T>(mut self, what: &'static str, file: &str, done: Option<T>) -> Result<T, Problems> {
        // Faults are found in several passes, so they are sorted into the order of the file.
        self.problems.sort_by_key(|problem| problem.line);
        match done {
            Some(done) if self.problems.is_empty() => Ok(done),
            _ => Err(Problems { what, file: file.to_owned(), problems: self.problems }),
        }
    }

    /// Records a problem at this line and key.
    pub fn problem(&mut self, place: &SettingPlace, message: impl Into<String>) {
        self.problems.push(SettingsProblem {
            line: place.line,
            key: place.key.clone(),
            message: message.into(),
        });
    }

    /// Records an error whose text already names the key. The line is that of `key`, or of the table that lacks `key`.
    pub fn check<T, E: fmt::Display>(&mut self, key: &str, done: Result<T, E>) -> Option<T> {
        done.map_err(|error| {
            let place = SettingPlace { line: self.line_of(key), key: String::new() };
            self.problem(&place, error.to_string());
        })
        .ok()
    }

    /// Checks each item of the list at `key`, and records the errors at the items' lines. Returns `None` if there is an
    /// error.
    pub fn read_each<R, T, E: fmt::Display>(
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
        let lines = self.lines.borrow();
        let mut key = key;
        loop {
            match (lines.get(key), key.rfind(['.', '['])) {
                (Some(line), _) => return *line,
                (None, Some(end)) => key = key.get(..end).unwrap_or_default(),
                (None, None) => return 1,
            }
        }
    }

    /// Reads a whole section. Returns `None` if it has problems.
    pub fn read<T: DeserializeOwned>(&mut self, section: Section<'_>) -> Option<T> {
        self.value(&section.place, &DeValue::Table(section.entries))
    }

    /// Removes a key from a section and returns its value.
    pub fn take<T: DeserializeOwned>(&mut self, from: &mut Section<'_>, key: &'static str) -> Option<T> {
        self.take_at(from, key).map(|(_, value)| value)
    }

    /// Removes a key from a section and returns its line and its value.
    pub fn take_at<T: DeserializeOwned>(
        &mut self,
        from: &mut Section<'_>,
        key: &'static str,
    ) -> Option<(SettingPlace, T)> {
        let (place, value) = self.raw(from, key)?;
        let value = self.value(&place, &value)?;
        Some((place, value))
    }

    /// Removes a key from a section. The value may be a table or a single value.
    pub fn shape<'t, T: DeserializeOwned>(
        &mut self,
        from: &mut Section<'t>,
        key: &'static str,
    ) -> Option<(SettingPlace, ValueOrTable<'t, T>)> {
        let shape = match self.raw(from, key)? {
            (place, DeValue::Table(entries)) => {
                (place.clone(), ValueOrTable::Section(Section::new(place, entries)))
            }
            (place, value) => {
                let value = self.value(&place, &value)?;
                (place, ValueOrTable::Value(value))
            }
        };
        Some(shape)
    }

    /// Removes a key from a section and returns its value, which has to be a table.
    pub fn section<'t>(&mut self, from: &mut Section<'t>, key: &'static str) -> Option<Section<'t>> {
        match self.raw(from, key)? {
            (place, DeValue::Table(entries)) => Some(Section::new(place, entries)),
            (place, other) => {
                self.problem(&place, format!("is a table, written `[{key}]`, not {}", kind(&other)));
                None
            }
        }
    }

    /// Removes a key from a section and returns its value, which has to be an array of tables.
    pub fn sections<'t>(&mut self, from: &mut Section<'t>, key: &'static str) -> Vec<Section<'t>> {
        let Some((place, value)) = self.raw(from, key) else { return Vec::new() };
        let DeValue::Array(items) = value else {
            self.problem(&place, format!("each is a table of its own, written `[[{key}]]`"));
            return Vec::new();
        };
        let mut sections = Vec::new();
        for (index, item) in items.into_iter().enumerate() {
            let place =
                SettingPlace { line: line(&self.breaks, item.span()), key: format!("{key}[{index}]") };
            match item.into_inner() {
                DeValue::Table(entries) => sections.push(Section::new(place, entries)),
                other => self.problem(&place, format!("is a table, not {}", kind(&other))),
            }
        }
        sections
    }

    /// Reports the keys that remain in a section as unknown.
    pub fn finish(&mut self, section: Section<'_>) {
        for key in section.entries.keys() {
            let place = section.place.inner(key.get_ref(), line(&self.breaks, key.span()));
            self.problem(&place, unknown(key.get_ref(), &section.known));
        }
    }

    fn raw<'t>(&mut self, from: &mut Section<'t>, key: &'static str) -> Option<(SettingPlace, DeValue<'t>)> {
        from.known.push(key);
        let (key, value) = from.entries.remove_entry(&Spanned::new(0..0, Cow::Borrowed(key)))?;
        Some((from.place.inner(key.get_ref(), line(&self.breaks, key.span())), value.into_inner()))
    }

    /// Deserializes a value repeatedly, each time without the keys whose values were found faulty so far, until no
    /// further fault is found. A table that lacks a required key is left out as a whole.
    fn value<T: DeserializeOwned>(&mut self, place: &SettingPlace, value: &DeValue<'_>) -> Option<T> {
        let mut wrong = BTreeSet::new();
        loop {
            let context = ValueContext { breaks: &self.breaks, wrong: &wrong, lines: &self.lines };
            let fault = match T::deserialize(ValueNode { context: &context, value, key: &place.key }) {
                Ok(value) => return wrong.is_empty().then_some(value),
                Err(fault) => fault,
            };
            let at = fault.place.unwrap_or_else(|| place.clone());
            let missing = fault.missing.map(|key| at.inner(key, at.line));
            // The table may lack a required key only because an earlier iteration of this loop skipped that key as
            // faulty. That fault is already recorded.
            if missing.as_ref().is_none_or(|missing| !wrong.contains(&missing.key)) {
                self.problem(missing.as_ref().unwrap_or(&at), fault.message);
            }
            // Without another faulty key, the next pass would find the same fault, so the loop ends here.
            if at.key == place.key || !wrong.insert(at.key) {
                return None;
            }
        }
    }
}

impl<'t> Section<'t> {
    fn new(place: SettingPlace, entries: DeTable<'t>) -> Self {
        Self { place, entries, known: Vec::new() }
    }
}

#[cfg(test)]
mod tests;
