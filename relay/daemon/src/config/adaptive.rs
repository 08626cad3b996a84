//! Settings about renditions.

use clap::ValueEnum;
use millrace_moq::{
    Namespace, TrackName,
    tracks::adapt::{Ladder, Rung},
};
use millrace_relay::{Adaptive, LadderRule, access::pattern::Pattern};
use serde::Deserialize;
use toml::{
    Spanned,
    de::{DeValue, ValueDeserializer},
};

use super::{Check, File, Problem, Settings, access::Text, values::deserialize};

/// The key of the ladders, in the file only.
pub const LADDER: &str = "ladder";

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum AdaptiveChoice {
    /// Everybody gets what was asked for
    Off,
    /// By [[ladder]], and else by the catalog of the namespace
    Catalog,
    /// By [[ladder]]
    Ladder,
}

/// `[[ladder]]` as it stands in the file.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Given {
    namespace: Option<Text<Pattern>>,
    tracks: Vec<Rendition>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Rendition {
    name: String,
    /// Bits per second.
    bitrate: u64,
}

impl Given {
    fn rule(self) -> Result<LadderRule, &'static str> {
        let tracks: Vec<_> =
            self.tracks.into_iter().map(|rendition| (rendition.name, rendition.bitrate)).collect();
        let rung = |(name, bitrate): &(String, u64)| {
            let track = TrackName::new(Namespace::default(), name.clone().into_bytes()).ok()?;
            Some(Rung { track, bitrate: *bitrate })
        };
        let ladder = Ladder::new(tracks.iter().filter_map(rung).collect());
        match ladder.filter(|ladder| ladder.rungs().len() == tracks.len()) {
            Some(_) => {
                Ok(LadderRule { namespace: self.namespace.map_or_else(Pattern::any, |text| text.0), tracks })
            }
            None => Err("has 2 to 16 tracks, each with a name and a bitrate of its own"),
        }
    }
}

impl Check {
    /// Reads `[[ladder]]`.
    pub(super) fn ladders(&mut self, file: &File<'_>, value: Spanned<DeValue<'_>>, settings: &mut Settings) {
        let DeValue::Array(ladders) = value.get_ref() else {
            return self.problem(LADDER, "is a list of tables: [[ladder]]");
        };
        for ladder in ladders.iter() {
            let given = Given::deserialize(ValueDeserializer::from(ladder.clone()));
            let rule = given.map_err(|error| error.message().to_owned());
            match rule.and_then(|given| given.rule().map_err(str::to_owned)) {
                Ok(rule) => settings.ladder.push(rule),
                Err(message) => {
                    let line = file.text[..ladder.span().start].matches('\n').count() + 1;
                    let place = format!("{}:{line}: {LADDER}", file.name);
                    self.problems.push(Problem { place, message });
                }
            }
        }
    }

    pub(super) fn adaptive(&mut self, settings: &mut Settings) -> Adaptive {
        let rules = std::mem::take(&mut settings.ladder);
        match settings.adaptive.unwrap_or(AdaptiveChoice::Off) {
            AdaptiveChoice::Catalog => Adaptive::Catalogs(rules),
            AdaptiveChoice::Ladder if rules.is_empty() => {
                self.problem("adaptive", "ladder needs [[ladder]] in the settings file");
                Adaptive::Off
            }
            AdaptiveChoice::Ladder => Adaptive::Ladders(rules),
            AdaptiveChoice::Off => {
                if !rules.is_empty() {
                    self.problem(LADDER, "means nothing with adaptive off");
                }
                Adaptive::Off
            }
        }
    }
}

deserialize!(chosen: AdaptiveChoice);
