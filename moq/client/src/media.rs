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
