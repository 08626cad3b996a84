//! Selects the tracks of a broadcast that a player plays.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use millrace_moq::msf;

use super::init::{Presentation, join};
use super::wrap::Wrap;
use super::{Error, language};

/// A track that a player plays.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlayedTrack {
    /// The track's name.
    pub name: String,
    /// The converter of the track's objects into MP4 fragments, or `None` if the objects are MP4 already.
    pub wrap: Option<Wrap>,
}

impl PlayedTrack {
    /// Makes a playlist entry for a track whose objects are MP4 fragments, and so are played unchanged.
    pub fn plain(name: String) -> Self {
        Self { name, wrap: None }
    }
}

/// A user's selection of tracks.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TrackChoice {
    /// The language of audio and subtitles (RFC 5646). `None` selects the first audio track and no subtitles.
    pub language: Option<String>,
    /// The names of the tracks to play. If empty, tracks are selected by role and language.
    pub tracks: Vec<String>,
}

impl TrackChoice {
    /// Reports whether the user has selected nothing.
    pub fn is_default(&self) -> bool {
        *self == Self::default()
    }

    /// Returns the candidate tracks of a catalog: one list for each kind of track, in order of preference. One track of
    /// each list is played.
    fn select_tracks<'a>(&self, catalog: &'a msf::MsfCatalog) -> Result<Vec<Vec<&'a msf::MsfTrack>>, Error> {
        if !self.tracks.is_empty() {
            let named = self.tracks.iter().map(|name| {
                let track = catalog.tracks.iter().find(|track| track.name == *name);
                track.map(|track| vec![track]).ok_or_else(|| Error::NoSuchTrack(name.clone()))
            });
            return named.collect();
        }
        let with_role = |roles: &[&str]| -> Vec<_> {
            let is = |track: &&msf::MsfTrack| track.role.as_deref().is_some_and(|role| roles.contains(&role));
            catalog.tracks.iter().filter(is).collect()
        };
        let video = with_role(&["video"]);
        let mut sound = with_role(&["audio"]);
        let Some(wanted) = &self.language else { return Ok(vec![video, sound]) };
        let is_in = |track: &&msf::MsfTrack| {
            track.lang.as_deref().is_some_and(|lang| language::matches(lang, wanted))
        };
        let mut subtitles = with_role(&["subtitle", "caption"]);
        subtitles.retain(is_in);
        if !sound.iter().any(is_in) && subtitles.is_empty() {
            let there = sound.iter().filter_map(|track| track.lang.clone()).collect();
            return Err(Error::NoSuchLanguage { wanted: wanted.clone(), there });
        }
        // The wanted language may exist only as subtitles, so audio in other languages may still be played. Audio in
        // the wanted language is preferred.
        sound.sort_by_key(|track| !is_in(track));
        Ok(vec![video, sound, subtitles])
    }
}

/// Tracks that are played together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Playlist {
    /// The init segment for the fragments of all tracks.
    pub init: Bytes,
    /// The tracks that are played together.
    pub tracks: Vec<PlayedTrack>,
}

impl Playlist {
    /// Selects tracks from an MSF catalog. Only tracks packaged as CMAF or LOC can be played. Returns `None` if there
    /// is no such track.
    ///
    /// # Errors
    /// Fails if an init segment or a decoder's configuration cannot be read, or a chosen track does not exist.
    pub fn from_catalog(catalog: &msf::MsfCatalog, choice: &TrackChoice) -> Result<Option<Self>, Error> {
        let mut playlist = None;
        for tracks in choice.select_tracks(catalog)? {
            // Fragments that the converter makes from LOC get track IDs from 1001 on, which no input uses.
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

    /// Adds a track to the playlist. A track is left out if its track ID is already in use by another track.
    fn and(mut self, part: PlayedTrack, init: &[u8]) -> Result<Self, Error> {
        if init != self.init {
            let Some(joined) = join(&self.init, init)? else {
                tracing::warn!(
                    track = part.name,
                    "the track is not played: its fragments have the track ID of another played track"
                );
                return Ok(self);
            };
            self.init = joined;
        }
        self.tracks.push(part);
        Ok(self)
    }
}

/// Returns a track and the init segment for its fragments, or `None` if its packaging cannot be played.
fn part_of(
    catalog: &msf::MsfCatalog,
    track: &msf::MsfTrack,
    id: u32,
) -> Result<Option<(PlayedTrack, Bytes)>, Error> {
    let name = track.name.clone();
    match &track.packaging[..] {
        "cmaf" => {
            let init = catalog.init_data(track).map(|init| STANDARD.decode(init)).transpose();
            let init = init.map_err(|_| Error::Malformed("an init segment that is not base64"))?;
            Ok(init.map(|init| (PlayedTrack::plain(name), init.into())))
        }
        "loc" => {
            let wrapped = Wrap::for_track(catalog, track, id)?;
            Ok(wrapped.map(|(wrap, init)| (PlayedTrack { name, wrap: Some(wrap) }, init)))
        }
        _ => Ok(None),
    }
}

/// Returns the first video track and the first audio track of an init segment, each as its index in the segment and its
/// track ID.
pub fn playable(init: &[u8]) -> Result<Vec<(usize, u32)>, Error> {
    let tracks = Presentation::parse(init)?.tracks;
    let first = |handler: &[u8; 4]| {
        let position = tracks.iter().position(|track| track.handler == *handler)?;
        Some((position, tracks[position].id))
    };
    Ok([first(b"vide"), first(b"soun")].into_iter().flatten().collect())
}
