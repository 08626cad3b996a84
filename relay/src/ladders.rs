//! The configured ladders. The tracks of a ladder are renditions of the same content, and the relay may send each of
//! them in place of another.

use millrace_moq::{
    TrackName,
    tracks::adapt::{Ladder, Rung},
};

use millrace_access::pattern::Pattern;

/// Whether a subscription is switched to another rendition as the subscriber's bandwidth changes, and where renditions
/// are listed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum AdaptiveMode {
    /// Subscriptions are never switched: subscribers get the track that they asked for.
    #[default]
    Off,
    /// Renditions are taken only from the configured ladders.
    Ladders(Vec<LadderRule>),
    /// Renditions are taken from the configured ladders. For a track in none of them, they are taken from the catalog
    /// of its namespace.
    Catalogs(Vec<LadderRule>),
}

/// A configured ladder: tracks of one namespace that carry the same content at different bitrates.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LadderRule {
    /// The namespaces in which this ladder lists the renditions.
    pub namespace: Pattern,
    /// The name of each rendition's track, and its bitrate in bits per second.
    pub tracks: Vec<(String, u64)>,
}

impl AdaptiveMode {
    /// Returns the first configured ladder that applies to the track's namespace and contains the track.
    pub fn ladder(&self, track: &TrackName) -> Option<Ladder> {
        let (Self::Ladders(rules) | Self::Catalogs(rules)) = self else { return None };
        let ladders = rules.iter().filter(|rule| rule.namespace.matches(track.namespace()));
        ladders.filter_map(|rule| rule.ladder(track)).find(|ladder| ladder.position(track).is_some())
    }

    /// Reports whether subscriptions are never switched to another rendition.
    pub fn is_off(&self) -> bool {
        *self == Self::Off
    }

    /// Reports whether the relay reads catalogs, which list the renditions of a track.
    pub fn reads_catalogs(&self) -> bool {
        matches!(self, Self::Catalogs(_))
    }
}

impl LadderRule {
    fn ladder(&self, track: &TrackName) -> Option<Ladder> {
        // Tracks whose full names are too long are left out of the ladder.
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
    fn first_bitrate_ladder_that_names_the_track_applies() {
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
        let rates = |adaptive: &AdaptiveMode, namespace, name| -> Vec<u64> {
            let ladder = adaptive.ladder(&track(namespace, name));
            ladder.iter().flat_map(|ladder| ladder.rungs()).map(|rung| rung.bitrate).collect()
        };
        let adaptive = AdaptiveMode::Ladders(rules);
        assert_eq!(rates(&adaptive, "live/a", "hi"), [1, 5]);
        assert_eq!(rates(&adaptive, "live/a", "other"), [1, 2, 6]);
        assert_eq!(rates(&adaptive, "live/a/b", "lo"), [1, 2, 6]);
        assert!(rates(&adaptive, "elsewhere", "hi").is_empty());
        assert!(rates(&adaptive, "elsewhere", "alone").is_empty(), "nothing can stand for it");
        assert!(rates(&AdaptiveMode::Off, "live/a", "hi").is_empty());
    }
}
