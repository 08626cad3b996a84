//! Fragmented MP4 as MoQ tracks, named and described as moq-pub does it, so that moq-sub plays them.
//!
//! `.catalog` and `0.mp4` (ftyp and moov) have one object each. `N.m4s` has the fragments of track N: an object is what came in front of a
//! fragment, its moof and its mdat. A group begins with the first picture that a decoder can begin with. `catalog` says the same by MSF, and
//! `catalog.json` as hang, moq-dev's format. Of several [renditions](Renditions) the others' tracks are named `r1-N.m4s` and so on; what
//! comes after another init segment is named `i2-N.m4s`.
//!
//! Packaged as [LOC](millrace_moq::loc), an object is a sample, the tracks are `N.loc`, and what moq-pub describes by its names and its
//! catalog is not there. Tracks that LOC has no place for stay `N.m4s`.
//!
//! | module | what |
//! | --- | --- |
//! | `boxes` | boxes: cut out of a stream, walked through, written |
//! | `init`, `entry`, `codec`, `language`, `table` | what a moov box says |
//! | `fragment`, `aux` | what a moof box says, and fragments that are written anew |
//! | `picture` | whether a decoder can begin with a picture |
//! | `publisher`, `output`, `events` | from boxes to objects and groups |
//! | `renditions`, `describe`, `moqpub` | the catalogs |
//! | `playlist`, `wrap` | the other way: what a player takes |

mod aux;
mod boxes;
mod codec;
mod describe;
mod entry;
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

use std::time::Duration;

use millrace_moq::loc;
use millrace_moq::name::NameError;
use mp4_atom::FourCC;

pub use self::boxes::Boxes;
pub use self::feed::feed;
pub(crate) use self::feed::{Pace, Stopped, play};
pub use self::moqpub::Catalog;
pub use self::playlist::{Choice, Part, Playlist, playable};
pub use self::publisher::Media;
pub use self::renditions::Renditions;
pub use self::wrap::Wrap;

pub const CATALOG: &str = ".catalog";
pub const INIT: &str = "0.mp4";

/// What moq-pub gives to media; its catalog and init segment are at 0.
const MEDIA_PRIORITY: u8 = 127;
/// With subgroups by what can be done without: sound at this, and each subgroup of video one later.
const SOUND_PRIORITY: u8 = MEDIA_PRIORITY - 3;

/// Why media cannot be published or played.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("what stands at byte {at} of the input is no MP4 box: {source}")]
    NotABox { at: u64, source: mp4_atom::Error },
    #[error("the input is {}; {HOW}", .0.map_or_else(|| "not MP4".to_owned(), |what| format!("{what}, not MP4")))]
    NotMp4(Option<&'static str>),
    #[error("there is no media in the input; {HOW}")]
    Empty,
    #[error("the MP4 is not fragmented; {HOW}")]
    NotFragmented,
    #[error(
        "the first fragment comes before the moov box, which says what is in it: begin the input with its init segment"
    )]
    NoMoov,
    #[error("box {kind:?} has {size} bytes, which is too large to be streamed; {HOW}", kind = .kind.to_string())]
    TooLarge { kind: FourCC, size: usize },
    #[error("the input ends within box {kind:?} at byte {at}: {there} of {size} bytes are there", kind = .kind.to_string())]
    Truncated { kind: FourCC, at: u64, there: usize, size: usize },
    #[error("cannot read box {kind:?} of the moov box: {source}", kind = .kind.to_string())]
    Moov { kind: FourCC, source: mp4_atom::Error },
    #[error("cannot read box {kind:?} of a moof box: {source}", kind = .kind.to_string())]
    Moof { kind: FourCC, source: mp4_atom::Error },
    #[error(
        "the samples of track {track} are not where the moof box at byte {at} says: the input may be cut out of a file; have the muxer \
         count offsets from the moof (default-base-is-moof; ffmpeg: -movflags +default_base_moof)"
    )]
    Outside { at: u64, track: u32 },
    /// Boxes that do not belong together.
    #[error("the input has {0}; {HOW}")]
    Malformed(&'static str),
    #[error("group {group} begins at {one:?} in one rendition and at {other:?} in another")]
    Apart { group: u64, one: Duration, other: Duration },
    #[error("an object is not LOC as it is played here: {0} (--track writes what there is)")]
    NotLoc(#[from] loc::NotLoc),
    #[error("cannot read a decoder's configuration in the catalog: {0}")]
    Configuration(#[source] mp4_atom::Error),
    #[error("the catalog has no track {0} that can be played")]
    NoSuchTrack(String),
    #[error("the broadcast has no sound in language {wanted}; it has {}", if .there.is_empty() { "none with a language".to_owned() } else { .there.join(", ") })]
    NoSuchLanguage { wanted: String, there: Vec<String> },
    #[error("cannot write MP4: {0}")]
    Write(#[source] mp4_atom::Error),
    #[error(transparent)]
    Name(#[from] NameError),
    #[error("cannot write the catalog: {0}")]
    Catalog(#[from] serde_json::Error),
}

/// The flags with which ffmpeg makes fragments.
pub const MOVFLAGS: &str = "cmaf+separate_moof+delay_moov+skip_trailer+frag_every_frame";
/// What makes media of which anything can be published.
pub const HOW: &str = "have ffmpeg make fragments: ffmpeg -i INPUT -c copy -f mp4 \
                   -movflags cmaf+separate_moof+delay_moov+skip_trailer+frag_every_frame - | millrace publish ...";

/// What an object is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Packaging {
    /// A fragment: moof and mdat.
    #[default]
    Cmaf,
    /// A sample, with its time.
    Loc,
}

impl Packaging {
    /// Returns its name as MSF has it.
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

/// How a track's groups are cut into subgroups.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Cut {
    /// A group is one subgroup.
    #[default]
    Whole,
    /// Key frame, frames that others need, and frames that none needs, each less urgent; sound before all of them.
    ByNeed,
}

#[cfg(test)]
mod inputs;
#[cfg(test)]
mod loc_tests;
#[cfg(test)]
mod tests;
