//! Reads the settings that choose renditions for subscribers.

use clap::ValueEnum;
use millrace_moq::{
    Namespace, TrackName,
    tracks::adapt::{Ladder, Rung},
};
use millrace_relay::{AdaptiveMode, LadderRule, access::pattern::Pattern};
use serde::Deserialize;
use toml::{
    Spanned,
    de::{DeValue, ValueDeserializer},
};

use super::{ConfigCheck, ConfigFile, ConfigProblem, Settings, access::TextValue, values::deserialize};

/// The TOML key of the ladders of renditions, which only the settings file can set.
pub const LADDER: &str = "ladder";

/// The setting `adaptive`: how the relay learns which renditions of a video it may choose from for a subscriber.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum AdaptiveChoice {
    /// Each subscriber gets the rendition that it asked for
    Off,
    /// Take the renditions from [[ladder]], and otherwise from the catalog of the namespace
    Catalog,
    /// Take the renditions from [[ladder]] in the settings file
    Ladder,
}

/// A `[[ladder]]` table of the settings file: renditions of one video, with their bit rates.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct LadderTable {
    /// Pattern of the namespaces to which the ladder applies. Default: all.
    namespace: Option<TextValue<Pattern>>,
    /// Tracks that are renditions of the same video.
    tracks: Vec<LadderRendition>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct LadderRendition {
    /// Name of the track.
    name: String,
    /// Bit rate of the track, bits per second.
    bitrate: u64,
}

impl LadderTable {
    fn rule(self) -> Result<LadderRule, &'static str> {
        let tracks: Vec<_> =
            self.tracks.into_iter().map(|rendition| (rendition.name, rendition.bitrate)).collect();
        let rung = |(name, bitrate): &(String, u64)| {
            let track = TrackName::new(Namespace::default(), name.clone().into_bytes()).ok()?;
            Some(Rung { track, bitrate: *bitrate })
        };
        let ladder = Ladder::new(tracks.iter().filter_map(rung).collect());
        // Tracks with unusable names were left out of the ladder, so a shorter ladder means that an entry was wrong.
        match ladder.filter(|ladder| ladder.rungs().len() == tracks.len()) {
            Some(_) => {
                Ok(LadderRule { namespace: self.namespace.map_or_else(Pattern::any, |text| text.0), tracks })
            }
            None => Err("has 2 to 16 tracks, each with a name and a bitrate of its own"),
        }
    }
}

impl ConfigCheck {
    /// Reads the `[[ladder]]` tables.
    pub(super) fn ladders(
        &mut self,
        file: &ConfigFile<'_>,
        value: Spanned<DeValue<'_>>,
        settings: &mut Settings,
    ) {
        let DeValue::Array(ladders) = value.get_ref() else {
            return self.problem(LADDER, "is a list of tables: [[ladder]]");
        };
        for ladder in ladders.iter() {
            let given = LadderTable::deserialize(ValueDeserializer::from(ladder.clone()));
            let rule = given.map_err(|error| error.message().to_owned());
            match rule.and_then(|given| given.rule().map_err(str::to_owned)) {
                Ok(rule) => settings.ladder.push(rule),
                Err(message) => {
                    let line = file.text[..ladder.span().start].matches('\n').count() + 1;
                    let place = format!("{}:{line}: {LADDER}", file.name);
                    self.problems.push(ConfigProblem { place, message });
                }
            }
        }
    }

    pub(super) fn adaptive(&mut self, settings: &mut Settings) -> AdaptiveMode {
        let rules = std::mem::take(&mut settings.ladder);
        match settings.adaptive.unwrap_or(AdaptiveChoice::Off) {
            AdaptiveChoice::Catalog => AdaptiveMode::Catalogs(rules),
            AdaptiveChoice::Ladder if rules.is_empty() => {
                self.problem("adaptive", "ladder needs [[ladder]] in the settings file");
                AdaptiveMode::Off
            }
            AdaptiveChoice::Ladder => AdaptiveMode::Ladders(rules),
            AdaptiveChoice::Off => {
                if !rules.is_empty() {
                    self.problem(LADDER, "has no effect with adaptive off");
                }
                AdaptiveMode::Off
            }
        }
    }
}

deserialize!(chosen: AdaptiveChoice);
