//! What is known of a connection before it begins: the path, what it is for, and what the peer offers.

use std::fmt;
use std::str::FromStr;

use super::profile::Profile;

/// Something that may be known. Names are those of model files and of `graft why --what-if`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Feature {
    Rtt,
    Rate,
    Loss,
    Burstiness,
    Reordering,
    Queue,
    Paths,
    Size,
    Profile,
    Offer,
    Warmth,
}

/// How a feature, or any other column of examples, is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Column {
    pub name: &'static str,
    /// Of numbers.
    pub unit: &'static str,
    /// Values that have names; none: it is a number.
    pub choices: &'static [&'static str],
}

const fn number(name: &'static str, unit: &'static str) -> Column {
    Column { name, unit, choices: &[] }
}

const fn choice(name: &'static str, choices: &'static [&'static str]) -> Column {
    Column { name, unit: "", choices }
}

/// What a tree goes by: what may be said, in the order of [`Feature`], and what follows from it.
pub const COLUMNS: [Column; SAID + 1] = [
    number("rtt", "ms"),
    number("rate", "Mbit/s"),
    number("loss", "%"),
    number("burstiness", ""),
    number("reordering", "%"),
    number("queue", "ms/s"),
    number("paths", ""),
    number("size", "KiB"),
    choice("profile", &Profile::NAMES),
    choice("offer", &["nothing", "carrier"]),
    choice("warmth", &["cold", "warm"]),
    number("windows", ""),
];

const SAID: usize = 11;

/// No figure of a path or a transfer is beyond.
const MOST: f64 = 1e12;

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error("{0:?} is no NAME=VALUE, such as rtt=300")]
    Form(String),
    #[error("there is no feature {0:?}; there are: {names}", names = said().map(|it| it.name).collect::<Vec<_>>().join(", "))]
    Unknown(String),
    #[error("{name} is a number{} of 0 or more, and not {value:?}", of_unit(.unit))]
    Number { name: &'static str, unit: &'static str, value: String },
    #[error("{name} is one of {}, and not {value:?}", .choices.join(", "))]
    Choice { name: &'static str, choices: &'static [&'static str], value: String },
    #[error("{0} is there twice")]
    Twice(&'static str),
}

/// All but what follows from others.
fn said() -> impl Iterator<Item = &'static Column> {
    COLUMNS.iter().take(SAID)
}

fn of_unit(unit: &str) -> String {
    if unit.is_empty() { String::new() } else { format!(" of {unit}") }
}

impl Feature {
    pub fn column(self) -> &'static Column {
        &COLUMNS[self as usize]
    }
}

impl Column {
    /// Of a choice, its place among the choices.
    ///
    /// # Errors
    /// What would do instead.
    pub fn value(&self, text: &str) -> Result<f64, Error> {
        if !self.choices.is_empty() {
            let at = self.choices.iter().position(|choice| *choice == text);
            let unknown = || Error::Choice { name: self.name, choices: self.choices, value: text.to_owned() };
            return at.map(|at| at as f64).ok_or_else(unknown);
        }
        let value = text.parse().ok().filter(|value| (0.0..=MOST).contains(value));
        value.ok_or_else(|| Error::Number { name: self.name, unit: self.unit, value: text.to_owned() })
    }

    /// The name of a value that is a choice.
    pub fn choice(&self, value: f64) -> Option<&'static str> {
        self.choices.get(value as usize).copied()
    }

    /// As people write it.
    pub fn written(&self, value: f64) -> String {
        match (self.choice(value), self.unit) {
            (Some(name), _) => name.to_owned(),
            (None, "") => short(value),
            (None, unit) => format!("{} {unit}", short(value)),
        }
    }
}

/// Three digits, or all of the whole part.
pub(super) fn short(value: f64) -> String {
    let digits = match value.abs() {
        it if it >= 100.0 || it == 0.0 => 0,
        it if it >= 10.0 => 1,
        it if it >= 1.0 => 2,
        _ => 3,
    };
    let text = format!("{value:.digits$}");
    if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.').to_owned() } else { text }
}

/// Of one connection; what is not known is left out.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Features([Option<f64>; SAID]);

impl Features {
    /// A value that is no number of 0 or more counts as unknown.
    #[must_use]
    pub fn with(mut self, feature: Feature, value: impl Into<Option<f64>>) -> Self {
        self.0[feature as usize] = value.into().filter(|value| (0.0..=MOST).contains(value));
        self
    }

    #[must_use]
    pub fn for_profile(self, profile: Profile) -> Self {
        self.with(Feature::Profile, profile as usize as f64)
    }

    /// Whether the peer has a broker, and whether a carrier to it is warm.
    #[must_use]
    pub fn carrying(self, offered: bool, warm: bool) -> Self {
        let place = |is: bool| f64::from(u8::from(is));
        self.with(Feature::Offer, place(offered)).with(Feature::Warmth, place(warm))
    }

    pub fn get(&self, feature: Feature) -> Option<f64> {
        self.0[feature as usize]
    }

    /// Time in which a path like that could have brought so much: two round trips, and the bytes at its rate. Costs of connections over
    /// one path compare by how many times this they are.
    pub fn ideal_ms(&self) -> Option<f64> {
        let (rtt, rate, size) = (self.get(Feature::Rtt)?, self.get(Feature::Rate)?, self.get(Feature::Size)?);
        let ms = 2.0 * rtt + size * 8.192 / rate;
        (ms > 0.0 && ms.is_finite()).then_some(ms)
    }

    /// How many products of round trip and rate there are to send: below one a path is never full, and beginning is all.
    pub fn windows(&self) -> Option<f64> {
        let (rtt, rate, size) = (self.get(Feature::Rtt)?, self.get(Feature::Rate)?, self.get(Feature::Size)?);
        let windows = size * 8.192 / (rtt * rate);
        windows.is_finite().then_some(windows)
    }

    /// In the order of [`COLUMNS`].
    pub fn values(&self) -> [Option<f64>; COLUMNS.len()] {
        let mut all = [self.windows(); COLUMNS.len()];
        all[..SAID].copy_from_slice(&self.0);
        all
    }

    /// What `other` knows counts.
    #[must_use]
    pub fn or(mut self, other: &Self) -> Self {
        for (own, other) in self.0.iter_mut().zip(other.0) {
            *own = other.or(*own);
        }
        self
    }
}

/// `rtt=300,loss=1,profile=loss`.
impl FromStr for Features {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let mut features = Self::default();
        for part in text.split(',') {
            let (name, value) = part.split_once('=').ok_or_else(|| Error::Form(part.to_owned()))?;
            let at = said().position(|column| column.name == name.trim());
            let at = at.ok_or_else(|| Error::Unknown(name.to_owned()))?;
            let (column, slot) = (&COLUMNS[at], &mut features.0[at]);
            if slot.replace(column.value(value.trim())?).is_some() {
                return Err(Error::Twice(column.name));
            }
        }
        Ok(features)
    }
}

impl fmt::Display for Features {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let known = said().zip(self.0).filter_map(|(column, value)| Some((column, value?)));
        let parts: Vec<_> =
            known.map(|(column, value)| format!("{} {}", column.name, column.written(value))).collect();
        f.write_str(if parts.is_empty() { "nothing is known" } else { "" })?;
        f.write_str(&parts.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_said_is_read_and_written() {
        let features: Features = "rtt=300, loss=0.25,profile=loss,warmth=warm".parse().unwrap();
        assert_eq!(features.get(Feature::Rtt), Some(300.0));
        assert_eq!(features.get(Feature::Warmth), Some(1.0));
        assert_eq!(features.get(Feature::Rate), None);
        assert_eq!(features.to_string(), "rtt 300 ms, loss 0.25 %, profile loss, warmth warm");
        assert_eq!(Features::default().to_string(), "nothing is known");
        for feature in [Feature::Rtt, Feature::Paths, Feature::Profile, Feature::Warmth] {
            let name = format!("{feature:?}").to_lowercase();
            assert_eq!(feature.column().name, name);
        }
    }

    #[test]
    fn what_is_wrong_is_said() {
        let table = [
            ("rtt", "is no NAME=VALUE"),
            ("", "is no NAME=VALUE"),
            ("rtd=1", "no feature \"rtd\"; there are: rtt, rate"),
            ("rtt=-1", "rtt is a number of ms of 0 or more, and not \"-1\""),
            ("rtt=nan", "rtt is a number"),
            ("rtt=inf", "rtt is a number"),
            ("windows=1", "no feature \"windows\""),
            ("paths=x", "paths is a number of 0 or more"),
            ("rtt=1,rtt=2", "rtt is there twice"),
            ("offer=all", "offer is one of nothing, carrier, and not \"all\""),
        ];
        for (text, wanted) in table {
            let error = text.parse::<Features>().expect_err(text).to_string();
            assert!(error.contains(wanted), "{text}: {error}");
        }
    }

    #[test]
    fn what_a_path_allows() {
        let ideal = |text: &str| text.parse::<Features>().unwrap().ideal_ms();
        // 1000 KiB are 8.192 Mbit.
        assert_eq!(ideal("rtt=100,rate=8.192,size=1000"), Some(1200.0));
        assert_eq!(ideal("rtt=100,rate=0,size=1000"), None);
        assert_eq!(ideal("rtt=100,rate=1"), None);
        let windows = |text: &str| text.parse::<Features>().unwrap().windows();
        assert_eq!(windows("rtt=100,rate=8.192,size=1000"), Some(10.0));
        assert_eq!(windows("rtt=0,rate=8.192,size=1000"), None);
        assert_eq!(windows("rtt=100,size=1000"), None);
        let values = "rtt=100,rate=8.192,size=1000".parse::<Features>().unwrap().values();
        let at = COLUMNS.iter().position(|column| column.name == "windows").unwrap();
        assert_eq!((values[0], values[at]), (Some(100.0), Some(10.0)));
    }

    #[test]
    fn later_knowledge_counts() {
        let path = Features::default().with(Feature::Rtt, 20.0).with(Feature::Loss, 1.0);
        let both = path.or(&"rtt=300,size=64".parse().unwrap());
        assert_eq!(both.to_string(), "rtt 300 ms, loss 1 %, size 64 KiB");
        assert_eq!(Features::default().with(Feature::Rtt, f64::NAN).get(Feature::Rtt), None);
    }
}
