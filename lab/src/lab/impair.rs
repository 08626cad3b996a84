//! Impairments of packets in one direction of a link, and their textual form.
//!
//! Topology files, timelines, command-line options and `millrace-lab lab set` all use the same `key = value` settings,
//! which [`Impairment::assign`] reads.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use millrace_daemon::duration::{self, number_and_unit};
use serde::{Deserialize, Serialize};

/// Length of the queue in packets if `rate` is set but neither of the two limits of the queue. It is netem's default.
pub const DEFAULT_QUEUE_PACKETS: usize = 1000;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("unknown setting `{0}`; there are: {keys}", keys = KEYS.join(", "))]
    UnknownKey(String),
    #[error("the link setting `{key} = {value}` is wrong: {want}")]
    BadValue { key: String, value: String, want: &'static str },
}

const TIME_MAX: Duration = Duration::from_secs(3600);

const KEYS: [&str; 14] = [
    "delay",
    "jitter",
    "jitter-shape",
    "loss",
    "burst-start",
    "burst-end",
    "burst-loss",
    "duplicate",
    "reorder",
    "reorder-by",
    "rate",
    "queue-packets",
    "queue-bytes",
    "mtu",
];

/// Distribution of the random part of the delay.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum JitterShape {
    /// Uniform within `delay ± jitter`.
    #[default]
    Uniform,
    /// Normal distribution around `delay` with standard deviation `jitter`, cut off at four standard deviations.
    Normal,
}

/// Impairment of one direction of a link. The default impairs nothing.
///
/// A frame first waits in the queue for its turn at `rate`. On the wire it then meets loss, duplication, delay, jitter
/// and reordering.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(try_from = "Settings")]
pub struct Impairment {
    pub delay: Duration,
    /// Random part of the delay. It never reorders frames: no frame leaves earlier than the frame before it. Use
    /// `reorder` for that.
    pub jitter: Duration,
    pub jitter_shape: JitterShape,
    /// Probability that a frame is lost. If bursts are set, this probability applies outside of bursts.
    pub loss: f64,
    /// Probability per frame that a burst starts (`p` in the Gilbert-Elliott model).
    pub burst_start: f64,
    /// Probability per frame that a burst ends (`r` in the Gilbert-Elliott model).
    pub burst_end: f64,
    /// Probability that a frame is lost within a burst (`1 - h` in the Gilbert-Elliott model).
    pub burst_loss: f64,
    /// Probability that a frame arrives twice.
    pub duplicate: f64,
    /// Probability that a frame is held back by `reorder_by`, so that later frames overtake it.
    pub reorder: f64,
    pub reorder_by: Duration,
    /// Rate of the link, bits per second of Ethernet frames without preamble and checksum.
    pub rate: Option<u64>,
    /// Largest number of frames in the queue, including the one being sent. Further frames are dropped.
    pub queue_packets: Option<usize>,
    /// Largest number of bytes in the queue.
    pub queue_bytes: Option<usize>,
    /// Largest IP packet, bytes. Longer ones are dropped silently, which is a black hole for path MTU discovery.
    pub mtu: Option<usize>,
}

impl Default for Impairment {
    fn default() -> Self {
        Self {
            delay: Duration::ZERO,
            jitter: Duration::ZERO,
            jitter_shape: JitterShape::Uniform,
            loss: 0.0,
            burst_start: 0.0,
            burst_end: 1.0,
            burst_loss: 1.0,
            duplicate: 0.0,
            reorder: 0.0,
            reorder_by: Duration::from_millis(1),
            rate: None,
            queue_packets: None,
            queue_bytes: None,
            mtu: None,
        }
    }
}

impl Impairment {
    pub fn is_perfect(&self) -> bool {
        *self == Self::default()
    }

    /// Parses settings such as `delay=10ms loss=5%` into an impairment.
    pub fn parse(text: &str) -> Result<Self, Error> {
        let mut impairment = Self::default();
        impairment.apply(&Settings::parse(text)?)?;
        Ok(impairment)
    }

    /// Changes the given settings, or none of them if one is invalid.
    pub fn apply(&mut self, settings: &Settings) -> Result<(), Error> {
        let mut changed = self.clone();
        for (key, value) in &settings.0 {
            changed.assign(key, value)?;
        }
        *self = changed;
        Ok(())
    }

    fn assign(&mut self, key: &str, value: &str) -> Result<(), Error> {
        let bad = |want| Error::BadValue { key: key.into(), value: value.into(), want };
        let time = || {
            let time = duration::parse(value).ok().filter(|time| *time <= TIME_MAX);
            time.ok_or_else(|| bad("wants a time such as 10ms, 250us or 1.5s, up to 1h"))
        };
        let chance = || probability(value).ok_or_else(|| bad("wants a probability such as 5% or 0.05"));
        let size = || count(value).ok_or_else(|| bad("wants a number above 0, or none"));
        match key {
            "delay" => self.delay = time()?,
            "jitter" => self.jitter = time()?,
            "jitter-shape" => {
                self.jitter_shape = shape(value).ok_or_else(|| bad("wants uniform or normal"))?
            }
            "loss" => self.loss = chance()?,
            "burst-start" => self.burst_start = chance()?,
            "burst-end" => self.burst_end = chance()?,
            "burst-loss" => self.burst_loss = chance()?,
            "duplicate" => self.duplicate = chance()?,
            "reorder" => self.reorder = chance()?,
            "reorder-by" => self.reorder_by = time()?,
            "rate" => self.rate = rate(value).ok_or_else(|| bad("wants bit/s such as 10mbit, or none"))?,
            "queue-packets" => self.queue_packets = size()?,
            "queue-bytes" => self.queue_bytes = size()?,
            "mtu" => self.mtu = size()?,
            _ => return Err(Error::UnknownKey(key.into())),
        }
        Ok(())
    }

    /// Returns all settings that differ from the default, as text.
    fn settings(&self) -> Vec<(&'static str, String)> {
        let perfect = Self::default();
        let mut list = Vec::new();
        let mut add = |key, differs: bool, value: String| {
            if differs {
                list.push((key, value));
            }
        };
        let size = |value: Option<usize>| value.map_or("none".into(), |v| v.to_string());
        add("delay", self.delay != perfect.delay, format!("{:?}", self.delay));
        add("jitter", self.jitter != perfect.jitter, format!("{:?}", self.jitter));
        add("jitter-shape", self.jitter_shape != perfect.jitter_shape, "normal".into());
        add("loss", self.loss != perfect.loss, percent(self.loss));
        add("burst-start", self.burst_start != perfect.burst_start, percent(self.burst_start));
        add("burst-end", self.burst_end != perfect.burst_end, percent(self.burst_end));
        add("burst-loss", self.burst_loss != perfect.burst_loss, percent(self.burst_loss));
        add("duplicate", self.duplicate != perfect.duplicate, percent(self.duplicate));
        add("reorder", self.reorder != perfect.reorder, percent(self.reorder));
        add("reorder-by", self.reorder_by != perfect.reorder_by, format!("{:?}", self.reorder_by));
        add("rate", self.rate.is_some(), self.rate.map_or("none".into(), |r| r.to_string()));
        add("queue-packets", self.queue_packets.is_some(), size(self.queue_packets));
        add("queue-bytes", self.queue_bytes.is_some(), size(self.queue_bytes));
        add("mtu", self.mtu.is_some(), size(self.mtu));
        list
    }
}

impl fmt::Display for Impairment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_perfect() {
            return f.write_str("perfect");
        }
        let settings: Vec<String> =
            self.settings().iter().map(|(key, value)| format!("{key}={value}")).collect();
        f.write_str(&settings.join(" "))
    }
}

impl TryFrom<Settings> for Impairment {
    type Error = Error;

    fn try_from(settings: Settings) -> Result<Self, Error> {
        let mut impairment = Self::default();
        impairment.apply(&settings)?;
        Ok(impairment)
    }
}

/// Settings as text, in the order in which they were written. The values are not checked yet.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(from = "BTreeMap<String, Scalar>", into = "BTreeMap<String, String>")]
pub struct Settings(pub Vec<(String, String)>);

impl Settings {
    /// Parses settings such as `delay=10ms loss=5%`, without checking the values.
    pub fn parse(text: &str) -> Result<Self, Error> {
        text.split_whitespace().map(assignment).collect::<Result<_, _>>().map(Self)
    }
}

fn assignment(word: &str) -> Result<(String, String), Error> {
    match word.split_once('=') {
        Some((key, value)) => Ok((key.into(), value.into())),
        None => {
            Err(Error::BadValue { key: word.into(), value: String::new(), want: "settings are key=value" })
        }
    }
}

/// Value of a setting in TOML or JSON, such as `"10ms"`, `0.05` or `100`.
#[derive(Deserialize)]
#[serde(untagged)]
enum Scalar {
    Integer(u64),
    Float(f64),
    Text(String),
}

impl From<BTreeMap<String, Scalar>> for Settings {
    fn from(table: BTreeMap<String, Scalar>) -> Self {
        let text = |scalar| match scalar {
            Scalar::Integer(n) => n.to_string(),
            Scalar::Float(x) => x.to_string(),
            Scalar::Text(text) => text,
        };
        Self(table.into_iter().map(|(key, value)| (key, text(value))).collect())
    }
}

impl From<Settings> for BTreeMap<String, String> {
    fn from(settings: Settings) -> Self {
        settings.0.into_iter().collect()
    }
}

fn probability(text: &str) -> Option<f64> {
    let (number, unit) = number_and_unit(text)?;
    let probability = match unit {
        "%" => number / 100.0,
        "" => number,
        _ => return None,
    };
    (0.0..=1.0).contains(&probability).then_some(probability)
}

fn shape(text: &str) -> Option<JitterShape> {
    match text {
        "uniform" => Some(JitterShape::Uniform),
        "normal" => Some(JitterShape::Normal),
        _ => None,
    }
}

fn rate(text: &str) -> Option<Option<u64>> {
    if text == "none" {
        return Some(None);
    }
    let (number, unit) = number_and_unit(text)?;
    let factor = match unit {
        "" | "bit" => 1.0,
        "kbit" => 1e3,
        "mbit" => 1e6,
        "gbit" => 1e9,
        _ => return None,
    };
    let bits = (number * factor).round();
    (1.0..=1e12).contains(&bits).then_some(Some(bits as u64))
}

fn count(text: &str) -> Option<Option<usize>> {
    if text == "none" {
        return Some(None);
    }
    text.parse().ok().filter(|n| *n > 0).map(Some)
}

fn percent(probability: f64) -> String {
    format!("{}%", (probability * 1e10).round() / 1e8)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn impairments_round_trip_as_text() {
        let text = "delay=10ms jitter=1.5ms jitter-shape=normal loss=0.1% burst-start=1% burst-end=25% \
                    burst-loss=90% duplicate=2% reorder=3% reorder-by=250us rate=10mbit queue-packets=50 \
                    queue-bytes=64000 mtu=1280";
        let impairment = Impairment::parse(text).unwrap();
        assert_eq!(impairment.jitter, Duration::from_micros(1500));
        assert_eq!(impairment.rate, Some(10_000_000));
        assert_eq!(Impairment::parse(&impairment.to_string()).unwrap(), impairment);
        assert_eq!(Impairment::default().to_string(), "perfect");
    }

    #[test]
    fn impossible_impairments_are_refused() {
        for text in [
            "delay=10",
            "delay=-1ms",
            "delay=2h",
            "delay=99999s",
            "loss=101%",
            "loss=1.5",
            "rate=0",
            "rate=10MB",
            "queue-packets=0",
            "queue-packets=1.5",
            "mtu=-1",
            "jitter-shape=cauchy",
            "delya=1ms",
            "delay",
        ] {
            assert!(Impairment::parse(text).is_err(), "{text} was accepted");
        }
    }

    #[test]
    fn impairment_change_is_applied_as_a_whole_or_not_at_all() {
        let mut impairment = Impairment::parse("delay=10ms loss=1%").unwrap();
        let before = impairment.clone();
        assert!(impairment.apply(&Settings::parse("loss=2% rate=much").unwrap()).is_err());
        assert_eq!(impairment, before);
        impairment.apply(&Settings::parse("loss=2% rate=1gbit").unwrap()).unwrap();
        assert_eq!(impairment, Impairment::parse("delay=10ms loss=2% rate=1gbit").unwrap());
        impairment.apply(&Settings::parse("rate=none loss=0 delay=0").unwrap()).unwrap();
        assert!(impairment.is_perfect());
    }

    #[test]
    fn impairments_are_read_from_toml_tables() {
        let impairment: Impairment =
            toml::from_str("delay = '10ms'\nloss = 0.05\nqueue-packets = 7").unwrap();
        assert_eq!(impairment, Impairment::parse("delay=10ms loss=5% queue-packets=7").unwrap());
        let error = toml::from_str::<Impairment>("latency = '10ms'").unwrap_err().to_string();
        assert!(error.contains("unknown setting `latency`"), "{error}");
    }
}
