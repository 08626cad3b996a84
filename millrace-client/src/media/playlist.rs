//! What a player takes of a broadcast.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use millrace_proto::moq::msf;
use mp4_atom::Moov;

use super::Error;
use super::init::{moov, with_moov};
use super::wrap::Wrap;

/// A track that is played.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Part {
    pub name: String,
    /// Makes fragments of MP4 of its objects, where they are none.
    pub wrap: Option<Wrap>,
}

impl Part {
    /// Whose objects are played as they are.
    pub fn plain(name: String) -> Self {
        Self { name, wrap: None }
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
    /// By an MSF catalog: the first video and the first audio that are CMAF or LOC; `None` if there is neither.
    ///
    /// # Errors
    /// An init segment or a decoder's configuration is none.
    pub fn of(catalog: &msf::Catalog) -> Result<Option<Self>, Error> {
        let mut playlist = None;
        for role in ["video", "audio"] {
            let mut tracks = catalog.tracks.iter().filter(|track| track.role.as_deref() == Some(role));
            let Some((part, init)) =
                tracks.find_map(|track| playable(catalog, track).transpose()).transpose()?
            else {
                continue;
            };
            playlist = Some(match playlist {
                None => Self { init, tracks: vec![part] },
                Some(playlist) => Self::and(playlist, part, &init)?,
            });
        }
        Ok(playlist)
    }

    /// With one more track, if fragments say which of them they are of.
    fn and(mut self, part: Part, init: &[u8]) -> Result<Self, Error> {
        if init == self.init {
            self.tracks.push(part);
            return Ok(self);
        }
        let (mut moov, other) = (moov(&self.init)?, moov(init)?);
        let ids = |moov: &Moov| moov.trak.iter().map(|trak| trak.tkhd.track_id).collect::<Vec<_>>();
        if ids(&other).iter().any(|id| ids(&moov).contains(id)) {
            tracing::warn!(track = part.name, "left out: its fragments have the same track ID as another's");
            return Ok(self);
        }
        moov.trak.extend(other.trak);
        let extends = other.mvex.map(|mvex| mvex.trex).unwrap_or_default();
        moov.mvex.get_or_insert_default().trex.extend(extends);
        self.init = with_moov(&self.init, &moov)?;
        self.tracks.push(part);
        Ok(self)
    }
}

/// A track with the init segment that its fragments need; `None`: it cannot be played.
fn playable(catalog: &msf::Catalog, track: &msf::Track) -> Result<Option<(Part, Bytes)>, Error> {
    let name = track.name.clone();
    match &track.packaging[..] {
        "cmaf" => {
            let init = catalog.init_data(track).map(|init| STANDARD.decode(init)).transpose();
            let init = init.map_err(|_| Error::Malformed("an init segment that is not base64"))?;
            Ok(init.map(|init| (Part::plain(name), init.into())))
        }
        "loc" => {
            let wrapped = Wrap::of(catalog, track)?;
            Ok(wrapped.map(|(wrap, init)| (Part { name, wrap: Some(wrap) }, init)))
        }
        _ => Ok(None),
    }
}
