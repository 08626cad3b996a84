//! Reads the settings of media that waits for subscribers.

use std::{ops::RangeInclusive, str::FromStr, time::Duration};

use clap::ValueEnum;
use millrace_relay::{DelayRule, Delays, access::pattern::Pattern};
use serde::Deserialize;
use toml::{
    Spanned,
    de::{DeValue, ValueDeserializer},
};

use super::{
    ConfigCheck, ConfigFile, ConfigProblem, Settings,
    access::TextValue,
    values::{DurationValue, deserialize},
};

/// The TOML key of the delay rules, which only the settings file can set.
pub const DELAY: &str = "delay";

/// Default of `max-delay`. If media may take 300 ms from publisher to subscriber, these 250 ms in the queue leave 50 ms
/// for the network path.
const MAX_DELAY: Duration = Duration::from_millis(250);

/// Limits of the media that is queued for subscribers, and the policy for what is dropped beyond these limits.
#[derive(Clone, Debug)]
pub struct QueueConfig {
    /// The policy for what is dropped beyond the limits.
    pub policy: DropPolicy,
    /// Longest time that media may be queued, by namespace and track.
    pub delays: Delays,
    /// Largest number of media bytes that are queued for one subscriber.
    pub bytes: u64,
    /// Largest number of datagram bytes that are queued for all subscribers together.
    pub datagram_bytes: u64,
}

/// The policy for which media is dropped when a subscriber's queue exceeds its limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum DropPolicy {
    /// Drop media that is late or oldest, the least urgent first
    Live,
    /// Drop the newest media
    Tail,
}

/// The longest time that media may be queued for a subscriber; `None` for no limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MaxDelay(Option<Duration>);

impl FromStr for MaxDelay {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "off" => Ok(Self(None)),
            _ => match text.parse::<DurationValue>()?.0 {
                Duration::ZERO => Err("must be more than 0, or `off`".to_owned()),
                delay => Ok(Self(Some(delay))),
            },
        }
    }
}

/// A publisher priority or a range of them, such as `7` or `0-127`.
struct Priorities(RangeInclusive<u8>);

impl FromStr for Priorities {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (first, last) = text.split_once('-').unwrap_or((text, text));
        match (first.parse(), last.parse()) {
            (Ok(first), Ok(last)) if first <= last => Ok(Self(first..=last)),
            _ => Err("is not a priority, 0 to 255, or a range of them"),
        }
    }
}

/// A `[[delay]]` table of the settings file: how long media may wait for a subscriber.
#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct Delay {
    /// Pattern of the namespaces to which the delay applies. Default: all.
    namespace: Option<TextValue<Pattern>>,
    /// Publisher priority of the objects to which the delay applies, or a range of priorities. Default: all.
    priority: Option<TextValue<Priorities>>,
    /// Time that an object may wait for a subscriber before it is dropped.
    max_delay: MaxDelay,
}

impl ConfigCheck {
    /// Reads the `[[delay]]` tables.
    pub(super) fn delays(
        &mut self,
        file: &ConfigFile<'_>,
        value: Spanned<DeValue<'_>>,
        settings: &mut Settings,
    ) {
        let DeValue::Array(rules) = value.get_ref() else {
            return self.problem(DELAY, "is a list of tables: [[delay]]");
        };
        for rule in rules.iter() {
            match Delay::deserialize(ValueDeserializer::from(rule.clone())) {
                Ok(delay) => settings.delay.push(DelayRule {
                    namespace: delay.namespace.map_or_else(Pattern::any, |text| text.0),
                    priority: delay.priority.map_or(0..=u8::MAX, |text| text.0.0),
                    max_delay: delay.max_delay.0,
                }),
                Err(error) => {
                    let line = file.text[..rule.span().start].matches('\n').count() + 1;
                    let place = format!("{}:{line}: {DELAY}", file.name);
                    self.problems.push(ConfigProblem { place, message: error.message().to_owned() });
                }
            }
        }
    }

    pub(super) fn queue(&mut self, settings: &mut Settings) -> QueueConfig {
        let policy = settings.drop_policy.unwrap_or(DropPolicy::Live);
        if policy == DropPolicy::Tail {
            let given = [("max-delay", settings.max_delay.is_some()), (DELAY, !settings.delay.is_empty())];
            for (key, _) in given.into_iter().filter(|(_, given)| *given) {
                self.problem(key, "has no effect with drop-policy tail");
            }
        }
        let default = settings.max_delay.map_or(Some(MAX_DELAY), |delay| delay.0);
        let rules = std::mem::take(&mut settings.delay);
        let delays = match policy {
            DropPolicy::Live => Delays { rules, default },
            DropPolicy::Tail => Delays::default(),
        };
        let mut some = |key, given: Option<super::ByteCount>, default| {
            let bytes = given.map_or(default, |count| count.0);
            if bytes == 0 {
                self.problem(key, "must be more than 0");
            }
            bytes
        };
        QueueConfig {
            policy,
            delays,
            bytes: some("queue-bytes", settings.queue_bytes, 16 << 20),
            datagram_bytes: some("datagram-bytes", settings.datagram_bytes, 64 << 20),
        }
    }
}

deserialize!(parsed: MaxDelay);
deserialize!(chosen: DropPolicy);
