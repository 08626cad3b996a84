//! What a player takes of a broadcast.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use millrace_proto::moq::msf;
use mp4_atom::Moov;

use super::Error;
use super::init::{moov, with_moov};

/// Tracks that are played together, whose objects are fragments of MP4.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Playlist {
    /// What the fragments of all of them begin with.
    pub init: Bytes,
    pub tracks: Vec<String>,
}

impl Playlist {
    /// By an MSF catalog: the first video and the first audio that are CMAF; `None` if there is neither.
    ///
    /// # Errors
    /// An init segment is none.
    pub fn of(catalog: &msf::Catalog) -> Result<Option<Self>, Error> {
        let mut playlist = None;
        for role in ["video", "audio"] {
            let is_it =
                |track: &&msf::Track| track.packaging == "cmaf" && track.role.as_deref() == Some(role);
            let mut tracks = catalog.tracks.iter().filter(is_it);
            let init = |track: &msf::Track| Some((track.name.clone(), catalog.init_data(track)?.to_owned()));
            let Some((name, init)) = tracks.find_map(init) else { continue };
            let init =
                STANDARD.decode(init).map_err(|_| Error::Malformed("an init segment that is not base64"))?;
            playlist = Some(match playlist {
                None => Self { init: init.into(), tracks: vec![name] },
                Some(playlist) => Self::and(playlist, name, &init)?,
            });
        }
        Ok(playlist)
    }

    /// With one more track, if fragments say which of them they are of.
    fn and(mut self, name: String, init: &[u8]) -> Result<Self, Error> {
        if init == self.init {
            self.tracks.push(name);
            return Ok(self);
        }
        let (mut moov, other) = (moov(&self.init)?, moov(init)?);
        let ids = |moov: &Moov| moov.trak.iter().map(|trak| trak.tkhd.track_id).collect::<Vec<_>>();
        if ids(&other).iter().any(|id| ids(&moov).contains(id)) {
            tracing::warn!(track = name, "left out: its fragments have the same track ID as another's");
            return Ok(self);
        }
        moov.trak.extend(other.trak);
        let extends = other.mvex.map(|mvex| mvex.trex).unwrap_or_default();
        moov.mvex.get_or_insert_default().trex.extend(extends);
        self.init = with_moov(&self.init, &moov)?;
        self.tracks.push(name);
        Ok(self)
    }
}
