//! Fragmented MP4 as MoQ tracks, with the track names and the catalog that moq-pub uses, so that moq-sub plays them.
//!
//! `.catalog` and `0.mp4` (ftyp and moov) have one object each. `N.m4s` has the fragments of track N: an object is a
//! fragment's moof and mdat, with any other boxes that precede them. A group begins with a picture at which a decoder
//! can start.
//!
//! `catalog` describes the same tracks by MSF, and `catalog.json` by hang, moq-dev's format. If there are several
//! [renditions](Renditions), the tracks of the second one are named `r1-N.m4s`, and so on. If the input restarts with
//! another init segment, the new tracks are named `i2-N.m4s`.
//!
//! Packaged as [LOC](millrace_moq::loc), an object is a sample and the tracks are `N.loc`; moq-pub's names and catalog
//! are absent. Tracks of codecs that LOC cannot carry remain `N.m4s`.
//!
//! | module | what |
//! | --- | --- |
//! | `boxes` | MP4 boxes: cuts them out of a stream, finds one in another, and writes them |
//! | `init`, `entry`, `codec`, `language`, `table` | the contents of a moov box |
//! | `fragment`, `aux` | the contents of a moof box, and rewritten fragments |
//! | `picture` | whether a decoder can begin with a picture |
//! | `publisher`, `output`, `events` | from boxes to objects and groups |
//! | `renditions`, `describe`, `moqpub` | the catalogs |
//! | `playlist`, `wrap` | the reverse: from objects to a player's input |

mod aux;
mod boxes;
mod codec;
mod describe;
mod entry;
mod error;
mod events;
mod feed;
mod fragment;
mod init;
mod language;
mod moqpub;
mod output;
mod picture;
mod playlist;
mod publisher;
mod renditions;
mod table;
mod wrap;

pub use self::boxes::Boxes;
pub use self::error::{Error, HOW, MOVFLAGS};
pub use self::feed::feed;
pub(crate) use self::feed::{FirstFragment, Stopped, play};
pub use self::moqpub::MoqPubCatalog;
pub use self::playlist::{PlayedTrack, Playlist, TrackChoice, playable};
pub use self::publisher::MediaPublisher;
pub use self::renditions::Renditions;
pub use self::wrap::Wrap;

/// Name of the track with moq-pub's catalog.
pub const CATALOG: &str = ".catalog";
/// Name of the track with the init segment of all tracks.
pub const INIT: &str = "0.mp4";

/// The priority that moq-pub gives to media. The catalog and the init segment have priority 0.
const MEDIA_PRIORITY: u8 = 127;
/// Priority of audio in a broadcast whose video has several subgroups. The subgroups of video have the next lower
/// priorities.
const SOUND_PRIORITY: u8 = MEDIA_PRIORITY - 3;

/// The packaging of media in objects.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Packaging {
    /// Each object is a fragment: moof and mdat.
    #[default]
    Cmaf,
    /// Each object is a sample with its time stamp.
    Loc,
}

impl Packaging {
    /// Returns the packaging's name in MSF.
    fn name(self) -> &'static str {
        match self {
            Self::Cmaf => "cmaf",
            Self::Loc => "loc",
        }
    }

    fn track(self, id: u32) -> String {
        match self {
            Self::Cmaf => format!("{id}.m4s"),
            Self::Loc => format!("{id}.loc"),
        }
    }
}

/// The way in which a track's groups are divided into subgroups.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Cut {
    /// A group is one subgroup.
    #[default]
    Whole,
    /// One subgroup for key frames, one for frames that others reference, and one for frames that none references, in
    /// falling priority. Audio has a higher priority than all of them.
    ByNeed,
}

#[cfg(test)]
mod inputs;
#[cfg(test)]
mod loc_tests;
#[cfg(test)]
mod tests;
