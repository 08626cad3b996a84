//! How long media may wait for a slow subscriber, by namespace and publisher priority.

use std::{ops::RangeInclusive, sync::Arc, time::Duration};

use millrace_moq::Namespace;
use parking_lot::RwLock;

use millrace_access::pattern::Pattern;

/// How long media may wait for a subscriber before it is dropped. The first matching rule applies.
///
/// ```
/// use std::time::Duration;
/// use millrace_moq::Namespace;
/// use millrace_relay::{DelayRule, Delays};
///
/// let rule = DelayRule {
///     namespace: "live/**".parse()?,
///     priority: 0..=255,
///     max_delay: Some(Duration::from_millis(250)),
/// };
/// assert!(rule.namespace.matches(&Namespace::from_path("live/bbb/video")?));
/// // Media of other namespaces waits for as long as it takes.
/// let delays = Delays { rules: vec![rule], default: None };
/// # assert_eq!(delays.rules.len(), 1);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Delays {
    /// The rules for the longest delays, in the order in which they are tried.
    pub rules: Vec<DelayRule>,
    /// The longest delay where no rule matches. `None`: media may wait without limit.
    pub default: Option<Duration>,
}

/// The longest delay of media in matching namespaces with matching publisher priorities.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DelayRule {
    /// The namespaces to whose tracks this delay rule applies.
    pub namespace: Pattern,
    /// The publisher priorities to which this delay rule applies.
    pub priority: RangeInclusive<u8>,
    /// The longest delay of media to which this rule applies. `None`: such media may wait without limit.
    pub max_delay: Option<Duration>,
}

impl Default for Delays {
    /// Returns delays without any limit: media is never dropped for being late.
    fn default() -> Self {
        Self { rules: Vec::new(), default: None }
    }
}

impl Delays {
    /// Returns how long the media of a track in this namespace may wait.
    pub fn namespace_delays(&self, namespace: &Namespace) -> TrackDelays {
        TrackDelays(Arc::new(RwLock::new(self.rules_of(namespace))))
    }

    fn rules_of(&self, namespace: &Namespace) -> DelayRules {
        let rules = self.rules.iter().filter(|rule| rule.namespace.matches(namespace));
        let rules = rules.map(|rule| (rule.priority.clone(), rule.max_delay)).collect();
        DelayRules { rules, default: self.default }
    }
}

/// The longest delays of one track, by publisher priority. All clones share one set of rules, so [`Self::change`]
/// affects all of them.
#[derive(Clone, Debug)]
pub struct TrackDelays(Arc<RwLock<DelayRules>>);

#[derive(Debug)]
struct DelayRules {
    rules: Vec<(RangeInclusive<u8>, Option<Duration>)>,
    default: Option<Duration>,
}

impl TrackDelays {
    pub fn at(&self, priority: u8) -> Option<Duration> {
        let DelayRules { rules, default } = &*self.0.read();
        let rule = rules.iter().find(|(priorities, _)| priorities.contains(&priority));
        rule.map_or(*default, |(_, max_delay)| *max_delay)
    }

    /// Replaces the track's delays. Streams that are open already keep the delay that they began with.
    pub fn change(&self, delays: &Delays, namespace: &Namespace) {
        *self.0.write() = delays.rules_of(namespace);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_matching_max_delay_rule_applies_to_a_track() {
        let ms = |ms| Some(Duration::from_millis(ms));
        let rule = |namespace: &str, priority, max_delay| DelayRule {
            namespace: namespace.parse().unwrap(),
            priority,
            max_delay,
        };
        let delays = Delays {
            rules: vec![
                rule("live/news", 0..=9, ms(900)),
                rule("live/**", 0..=127, ms(100)),
                rule("chat/*", 0..=255, None),
            ],
            default: ms(250),
        };
        for (namespace, priority, expected) in [
            ("live/news", 9, ms(900)),
            ("live/news", 10, ms(100)),
            ("live/news", 128, ms(250)),
            ("live", 0, ms(100)),
            ("chat/room", 200, None),
            ("chat", 200, ms(250)),
        ] {
            let track = delays.namespace_delays(&Namespace::from_path(namespace).unwrap());
            assert_eq!(track.at(priority), expected, "{namespace} {priority}");
        }
        let name = Namespace::from_path("live/news").unwrap();
        let track = delays.namespace_delays(&name);
        let held = track.clone();
        track.change(&Delays { default: ms(70), ..Delays::default() }, &name);
        assert_eq!(held.at(9), ms(70), "the rules are others now");
        assert_eq!(Delays::default().namespace_delays(&Namespace::from_path("a").unwrap()).at(0), None);
    }
}
