//! What a player takes of a broadcast.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use millrace_moq::msf;

use super::init::{Presentation, join};
use super::wrap::Wrap;
use super::{Error, language};

/// A track that is played.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Part {
    pub name: String,
    /// Makes fragments of MP4 of its objects, where they are none.
    pub wrap: Option<Wrap>,
}

impl Part {
    /// Makes one whose objects are played as they are.
    pub fn plain(name: String) -> Self {
        Self { name, wrap: None }
    }
}

/// Which tracks a player wants.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Choice {
    /// The language of sound and subtitles (RFC 5646): without it the first sound, and no subtitles.
    pub language: Option<String>,
    /// These tracks and no others.
    pub tracks: Vec<String>,
}

impl Choice {
    /// Reports whether nothing is chosen.
    pub fn is_default(&self) -> bool {
        *self == Self::default()
    }

    /// Returns the tracks of a catalog that are to be played, by name; for each kind in turn those that would do.
    fn wanted<'a>(&self, catalog: &'a msf::Catalog) -> Result<Vec<Vec<&'a msf::Track>>, Error> {
        if !self.tracks.is_empty() {
            let named = self.tracks.iter().map(|name| {
                let track = catalog.tracks.iter().find(|track| track.name == *name);
                track.map(|track| vec![track]).ok_or_else(|| Error::NoSuchTrack(name.clone()))
            });
            return named.collect();
        }
        let with_role = |roles: &[&str]| -> Vec<_> {
            let is = |track: &&msf::Track| track.role.as_deref().is_some_and(|role| roles.contains(&role));
            catalog.tracks.iter().filter(is).collect()
        };
        let (video, mut sound) = (with_role(&["video"]), with_role(&["audio"]));
        let Some(wanted) = &self.language else { return Ok(vec![video, sound]) };
        let is_in =
            |track: &&msf::Track| track.lang.as_deref().is_some_and(|lang| language::matches(lang, wanted));
        let mut subtitles = with_role(&["subtitle", "caption"]);
        subtitles.retain(is_in);
        if !sound.iter().any(is_in) && subtitles.is_empty() {
            let there = sound.iter().filter_map(|track| track.lang.clone()).collect();
            return Err(Error::NoSuchLanguage { wanted: wanted.clone(), there });
        }
        // Subtitles may be all that there is in a language.
        sound.sort_by_key(|track| !is_in(track));
        Ok(vec![video, sound, subtitles])
    }
}

/// Tracks that are played together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Playlist {
    /// What the fragments of all of them begin with.
    pub init: Bytes,
    pub tracks: Vec<Part>,
}

impl Playlist {
    /// Chooses by an MSF catalog, of what is CMAF or LOC; `None` if there is neither.
    ///
    /// # Errors
    /// An init segment or a decoder's configuration is none, or what is wanted is not there.
    pub fn of(catalog: &msf::Catalog, choice: &Choice) -> Result<Option<Self>, Error> {
        let mut playlist = None;
        for tracks in choice.wanted(catalog)? {
            // IDs that no input has for its own tracks tell those apart whose fragments are made here.
            let id = 1001 + playlist.as_ref().map_or(0, |playlist: &Self| playlist.tracks.len() as u32);
            let mut found = tracks.iter().filter_map(|track| part_of(catalog, track, id).transpose());
            let Some((part, init)) = found.next().transpose()? else {
                match choice.tracks.is_empty() {
                    true => continue,
                    false => return Err(Error::NoSuchTrack(tracks[0].name.clone())),
                }
            };
            playlist = Some(match playlist {
                None => Self { init, tracks: vec![part] },
                Some(playlist) => Self::and(playlist, part, &init)?,
            });
        }
        Ok(playlist)
    }

    /// Adds a track, if fragments say which of them they are of.
    fn and(mut self, part: Part, init: &[u8]) -> Result<Self, Error> {
        if init != self.init {
            let Some(joined) = join(&self.init, init)? else {
                tracing::warn!(
                    track = part.name,
                    "left out: its fragments have the same track ID as another's"
                );
                return Ok(self);
            };
            self.init = joined;
        }
        self.tracks.push(part);
        Ok(self)
    }
}

/// Returns a track with the init segment that its fragments need; `None`: it cannot be played.
fn part_of(catalog: &msf::Catalog, track: &msf::Track, id: u32) -> Result<Option<(Part, Bytes)>, Error> {
    let name = track.name.clone();
    match &track.packaging[..] {
        "cmaf" => {
            let init = catalog.init_data(track).map(|init| STANDARD.decode(init)).transpose();
            let init = init.map_err(|_| Error::Malformed("an init segment that is not base64"))?;
            Ok(init.map(|init| (Part::plain(name), init.into())))
        }
        "loc" => {
            let wrapped = Wrap::of(catalog, track, id)?;
            Ok(wrapped.map(|(wrap, init)| (Part { name, wrap: Some(wrap) }, init)))
        }
        _ => Ok(None),
    }
}

/// Returns the tracks that a player takes from an init segment: the first video and the first audio, as positions and IDs.
pub fn playable(init: &[u8]) -> Result<Vec<(usize, u32)>, Error> {
    let tracks = Presentation::of(init)?.tracks;
    let first = |handler: &[u8; 4]| {
        let position = tracks.iter().position(|track| track.handler == *handler)?;
        Some((position, tracks[position].id))
    };
    Ok([first(b"vide"), first(b"soun")].into_iter().flatten().collect())
}
