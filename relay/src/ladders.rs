//! Which renditions can stand for a track: what the relay is set to.

use millrace_moq::{
    TrackName,
    tracks::adapt::{Ladder, Rung},
};

use crate::access::pattern::Pattern;

/// Whether subscriptions are adapted to what their path carries.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Adaptive {
    /// Everybody gets what was asked for.
    #[default]
    Off,
    /// By these ladders.
    Ladders(Vec<LadderRule>),
    /// By these ladders, and else by the catalog of the namespace.
    Catalogs(Vec<LadderRule>),
}

/// Renditions in some namespaces.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LadderRule {
    pub namespace: Pattern,
    /// Names of tracks, and their bits per second.
    pub tracks: Vec<(String, u64)>,
}

impl Adaptive {
    /// The ladder of the first rule that names the track.
    pub fn ladder(&self, track: &TrackName) -> Option<Ladder> {
        let (Self::Ladders(rules) | Self::Catalogs(rules)) = self else { return None };
        let ladders = rules.iter().filter(|rule| rule.namespace.matches(track.namespace()));
        ladders.filter_map(|rule| rule.ladder(track)).find(|ladder| ladder.position(track).is_some())
    }

    pub fn is_off(&self) -> bool {
        *self == Self::Off
    }

    pub fn reads_catalogs(&self) -> bool {
        matches!(self, Self::Catalogs(_))
    }
}

impl LadderRule {
    fn ladder(&self, track: &TrackName) -> Option<Ladder> {
        let rung = |(name, bitrate): &(String, u64)| {
            let track = TrackName::new(track.namespace().clone(), name.clone().into_bytes()).ok()?;
            Some(Rung { track, bitrate: *bitrate })
        };
        Ladder::new(self.tracks.iter().filter_map(rung).collect())
    }
}

#[cfg(test)]
mod tests {
    use millrace_moq::Namespace;

    use super::*;

    #[test]
    fn the_first_rule_that_names_the_track_holds() {
        let rule = |namespace: &str, tracks: &[(&str, u64)]| LadderRule {
            namespace: namespace.parse().unwrap(),
            tracks: tracks.iter().map(|(name, rate)| ((*name).to_owned(), *rate)).collect(),
        };
        let rules = vec![
            rule("live/*", &[("hi", 5), ("lo", 1)]),
            rule("live/**", &[("hi", 6), ("lo", 2), ("other", 1)]),
            rule("**", &[("alone", 1)]),
        ];
        let track = |namespace: &str, name: &str| {
            TrackName::new(Namespace::from_path(namespace).unwrap(), name.as_bytes().to_vec()).unwrap()
        };
        let rates = |adaptive: &Adaptive, namespace, name| -> Vec<u64> {
            let ladder = adaptive.ladder(&track(namespace, name));
            ladder.iter().flat_map(|ladder| ladder.rungs()).map(|rung| rung.bitrate).collect()
        };
        let adaptive = Adaptive::Ladders(rules);
        assert_eq!(rates(&adaptive, "live/a", "hi"), [1, 5]);
        assert_eq!(rates(&adaptive, "live/a", "other"), [1, 2, 6]);
        assert_eq!(rates(&adaptive, "live/a/b", "lo"), [1, 2, 6]);
        assert!(rates(&adaptive, "elsewhere", "hi").is_empty());
        assert!(rates(&adaptive, "elsewhere", "alone").is_empty(), "nothing can stand for it");
        assert!(rates(&Adaptive::Off, "live/a", "hi").is_empty());
    }
}
