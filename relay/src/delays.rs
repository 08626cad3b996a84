//! How long media may wait for a subscriber, by namespace and priority.

use std::{ops::RangeInclusive, sync::Arc, time::Duration};

use millrace_moq::Namespace;
use parking_lot::RwLock;

use crate::access::pattern::Pattern;

/// How long media may wait for a subscriber before it is dropped. The first rule that fits holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Delays {
    pub rules: Vec<DelayRule>,
    /// Where no rule fits; `None`: as long as it takes.
    pub default: Option<Duration>,
}

/// Of some namespaces and priorities.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DelayRule {
    pub namespace: Pattern,
    /// Publisher priorities.
    pub priority: RangeInclusive<u8>,
    /// `None`: as long as it takes.
    pub max_delay: Option<Duration>,
}

impl Default for Delays {
    /// Nothing is late.
    fn default() -> Self {
        Self { rules: Vec::new(), default: None }
    }
}

impl Delays {
    /// Those that a track of the namespace has.
    pub fn of(&self, namespace: &Namespace) -> TrackDelays {
        TrackDelays(Arc::new(RwLock::new(self.rules_of(namespace))))
    }

    fn rules_of(&self, namespace: &Namespace) -> Rules {
        let rules = self.rules.iter().filter(|rule| rule.namespace.matches(namespace));
        let rules = rules.map(|rule| (rule.priority.clone(), rule.max_delay)).collect();
        Rules { rules, default: self.default }
    }
}

/// Of one track, by publisher priority. Its clones change with it.
#[derive(Clone, Debug)]
pub struct TrackDelays(Arc<RwLock<Rules>>);

#[derive(Debug)]
struct Rules {
    rules: Vec<(RangeInclusive<u8>, Option<Duration>)>,
    default: Option<Duration>,
}

impl TrackDelays {
    pub fn at(&self, priority: u8) -> Option<Duration> {
        let Rules { rules, default } = &*self.0.read();
        let rule = rules.iter().find(|(priorities, _)| priorities.contains(&priority));
        rule.map_or(*default, |(_, max_delay)| *max_delay)
    }

    /// Those that the track has from now on: streams that are open keep theirs.
    pub fn change(&self, delays: &Delays, namespace: &Namespace) {
        *self.0.write() = delays.rules_of(namespace);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_rule_that_fits_holds() {
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
            let track = delays.of(&Namespace::from_path(namespace).unwrap());
            assert_eq!(track.at(priority), expected, "{namespace} {priority}");
        }
        let name = Namespace::from_path("live/news").unwrap();
        let track = delays.of(&name);
        let held = track.clone();
        track.change(&Delays { default: ms(70), ..Delays::default() }, &name);
        assert_eq!(held.at(9), ms(70), "the rules are others now");
        assert_eq!(Delays::default().of(&Namespace::from_path("a").unwrap()).at(0), None);
    }
}
