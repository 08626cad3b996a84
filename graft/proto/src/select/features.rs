//! Features of a connection that are known before it begins: features of its path, of the application, and of the peer.

use std::fmt;
use std::str::FromStr;

use super::profile::TrafficProfile;

/// A feature of a connection. Model files and `graft why --what-if` use the same names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "COLUMNS has the names and units")]
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

/// Name, unit and values of a feature, or of another column of training examples.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExampleColumn {
    /// The column's name in files and commands.
    pub name: &'static str,
    /// Unit of a numeric column; empty for a count or a column with named values.
    pub unit: &'static str,
    /// Names of the possible values; empty for a numeric column.
    pub choices: &'static [&'static str],
}

const fn number(name: &'static str, unit: &'static str) -> ExampleColumn {
    ExampleColumn { name, unit, choices: &[] }
}

const fn choice(name: &'static str, choices: &'static [&'static str]) -> ExampleColumn {
    ExampleColumn { name, unit: "", choices }
}

/// The columns that a decision tree may use: the features in the order of [`Feature`], and then `windows`, the
/// transfer's size in multiples of bandwidth times round trip, which is computed from features.
pub const COLUMNS: [ExampleColumn; SAID + 1] = [
    number("rtt", "ms"),
    number("rate", "Mbit/s"),
    number("loss", "%"),
    number("burstiness", ""),
    number("reordering", "%"),
    number("queue", "ms/s"),
    number("paths", ""),
    number("size", "KiB"),
    choice("profile", &TrafficProfile::NAMES),
    choice("offer", &["nothing", "carrier"]),
    choice("warmth", &["cold", "warm"]),
    number("windows", ""),
];

const SAID: usize = 11;

/// Largest numeric value of a feature that files and commands may contain.
const MOST: f64 = 1e12;

/// Why features cannot be parsed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the messages describe the variants")]
pub enum Error {
    #[error("{0:?} is no NAME=VALUE, such as rtt=300")]
    Form(String),
    #[error("there is no feature {0:?}; there are: {names}", names = reported_columns().map(|it| it.name).collect::<Vec<_>>().join(", "))]
    Unknown(String),
    #[error("{name} has to be a number{} of 0 or more, not {value:?}", unit_name(.unit))]
    Number { name: &'static str, unit: &'static str, value: String },
    #[error("{name} has to be one of {}, not {value:?}", .choices.join(", "))]
    Choice { name: &'static str, choices: &'static [&'static str], value: String },
    #[error("the condition {0} is given twice")]
    Twice(&'static str),
}

/// Returns the columns of all features, without computed columns such as `windows`.
fn reported_columns() -> impl Iterator<Item = &'static ExampleColumn> {
    COLUMNS.iter().take(SAID)
}

fn unit_name(unit: &str) -> String {
    if unit.is_empty() { String::new() } else { format!(" of {unit}") }
}

impl Feature {
    /// Returns the feature's column, with its name and unit.
    pub fn column(self) -> &'static ExampleColumn {
        &COLUMNS[self as usize]
    }
}

impl ExampleColumn {
    /// Parses a value of this column. A value with a name becomes its index in the column's list of names.
    ///
    /// # Errors
    /// The text is not one of the accepted values, which the error names.
    pub fn value(&self, text: &str) -> Result<f64, Error> {
        if !self.choices.is_empty() {
            let at = self.choices.iter().position(|choice| *choice == text);
            let unknown = || Error::Choice { name: self.name, choices: self.choices, value: text.to_owned() };
            return at.map(|at| at as f64).ok_or_else(unknown);
        }
        let value = text.parse().ok().filter(|value| (0.0..=MOST).contains(value));
        value.ok_or_else(|| Error::Number { name: self.name, unit: self.unit, value: text.to_owned() })
    }

    /// Returns the name of a value of this column; `None` for a numeric column.
    pub fn choice(&self, value: f64) -> Option<&'static str> {
        self.choices.get(value as usize).copied()
    }

    /// Returns a value of this column as text, with its unit.
    pub fn written(&self, value: f64) -> String {
        match (self.choice(value), self.unit) {
            (Some(name), _) => name.to_owned(),
            (None, "") => short(value),
            (None, unit) => format!("{} {unit}", short(value)),
        }
    }
}

/// Formats a number with three significant digits, or with all digits of a longer integer part.
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

/// The known features of one connection.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Features([Option<f64>; SAID]);

impl Features {
    /// Sets a feature. A negative value, or one that is not a number, counts as unknown.
    #[must_use]
    pub fn with(mut self, feature: Feature, value: impl Into<Option<f64>>) -> Self {
        self.0[feature as usize] = value.into().filter(|value| (0.0..=MOST).contains(value));
        self
    }

    /// Returns these features with another traffic profile of the application.
    #[must_use]
    pub fn for_profile(self, profile: TrafficProfile) -> Self {
        self.with(Feature::Profile, profile as usize as f64)
    }

    /// Sets whether the peer offers a carrier (a tunnel between two proxies), and whether that carrier is connected.
    #[must_use]
    pub fn carrying(self, offered: bool, warm: bool) -> Self {
        let place = |is: bool| f64::from(u8::from(is));
        self.with(Feature::Offer, place(offered)).with(Feature::Warmth, place(warm))
    }

    /// Returns the value of a feature; `None` if it is unknown.
    pub fn get(&self, feature: Feature) -> Option<f64> {
        self.0[feature as usize]
    }

    /// Returns the best possible duration of the transfer in ms: two round trips, and the time for the bytes at the
    /// path's rate. Costs are expressed as multiples of this duration.
    pub fn ideal_ms(&self) -> Option<f64> {
        let rtt = self.get(Feature::Rtt)?;
        let rate = self.get(Feature::Rate)?;
        let size = self.get(Feature::Size)?;
        // 8.192 converts KiB per Mbit/s to ms, since 1 KiB is 8192 bits and 1 Mbit/s is 1000 bits per ms.
        let ms = 2.0 * rtt + size * 8.192 / rate;
        (ms > 0.0 && ms.is_finite()).then_some(ms)
    }

    /// Returns the transfer's size in multiples of bandwidth times round trip. Below 1 the path is never full, so only
    /// the start of the transfer matters.
    pub fn windows(&self) -> Option<f64> {
        let rtt = self.get(Feature::Rtt)?;
        let rate = self.get(Feature::Rate)?;
        let size = self.get(Feature::Size)?;
        let windows = size * 8.192 / (rtt * rate);
        windows.is_finite().then_some(windows)
    }

    /// Returns the connection's values for all columns that a decision tree may use, in the order of [`COLUMNS`].
    pub fn values(&self) -> [Option<f64>; COLUMNS.len()] {
        let mut all = [self.windows(); COLUMNS.len()];
        // Features fill the first columns, and the computed column `windows` follows them.
        all[..SAID].copy_from_slice(&self.0);
        all
    }

    /// Adds the known features of `other`, which overwrite features of this connection.
    #[must_use]
    pub fn or(mut self, other: &Self) -> Self {
        for (own, other) in self.0.iter_mut().zip(other.0) {
            *own = other.or(*own);
        }
        self
    }
}

/// Parses features from text such as `rtt=300,loss=1,profile=loss`.
impl FromStr for Features {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let mut features = Self::default();
        for part in text.split(',') {
            let (name, value) = part.split_once('=').ok_or_else(|| Error::Form(part.to_owned()))?;
            let at = reported_columns().position(|column| column.name == name.trim());
            let at = at.ok_or_else(|| Error::Unknown(name.to_owned()))?;
            let column = &COLUMNS[at];
            let slot = &mut features.0[at];
            if slot.replace(column.value(value.trim())?).is_some() {
                return Err(Error::Twice(column.name));
            }
        }
        Ok(features)
    }
}

impl fmt::Display for Features {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let known = reported_columns().zip(self.0).filter_map(|(column, value)| Some((column, value?)));
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
    fn path_and_transfer_features_are_parsed_and_printed() {
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
    fn malformed_path_and_transfer_features_are_refused() {
        let table = [
            ("rtt", "is no NAME=VALUE"),
            ("", "is no NAME=VALUE"),
            ("rtd=1", "no feature \"rtd\"; there are: rtt, rate"),
            ("rtt=-1", "rtt has to be a number of ms of 0 or more, not \"-1\""),
            ("rtt=nan", "rtt has to be a number"),
            ("rtt=inf", "rtt has to be a number"),
            ("windows=1", "no feature \"windows\""),
            ("paths=x", "paths has to be a number of 0 or more"),
            ("rtt=1,rtt=2", "rtt is given twice"),
            ("offer=all", "offer has to be one of nothing, carrier, not \"all\""),
        ];
        for (text, wanted) in table {
            let error = text.parse::<Features>().expect_err(text).to_string();
            assert!(error.contains(wanted), "{text}: {error}");
        }
    }

    #[test]
    fn ideal_transfer_time_follows_from_path_and_size() {
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
    fn later_measurement_of_a_feature_overwrites_the_earlier_one() {
        let path = Features::default().with(Feature::Rtt, 20.0).with(Feature::Loss, 1.0);
        let both = path.or(&"rtt=300,size=64".parse().unwrap());
        assert_eq!(both.to_string(), "rtt 300 ms, loss 1 %, size 64 KiB");
        assert_eq!(Features::default().with(Feature::Rtt, f64::NAN).get(Feature::Rtt), None);
    }
}
