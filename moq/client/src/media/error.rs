//! Errors of reading and playing media.

use std::time::Duration;

use millrace_moq::{loc, name::NameError};
use mp4_atom::FourCC;

/// The flags with which ffmpeg writes fragmented MP4.
pub const MOVFLAGS: &str = "cmaf+separate_moof+delay_moov+skip_trailer+frag_every_frame";
/// Advice for users: the ffmpeg command that turns a file into fragmented MP4, which can be published.
pub const HOW: &str = "have ffmpeg make fragments: ffmpeg -i INPUT -c copy -f mp4 \
                   -movflags cmaf+separate_moof+delay_moov+skip_trailer+frag_every_frame - | millrace publish ...";

/// The reason why media cannot be published or played.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages describe the variants")]
pub enum Error {
    #[error("the input has no MP4 box at byte {at}: {source}")]
    NotABox { at: u64, source: mp4_atom::Error },
    #[error("the input is {}; {HOW}", .0.map_or_else(|| "not MP4".to_owned(), |what| format!("{what}, not MP4")))]
    NotMp4(Option<&'static str>),
    #[error("there is no media in the input; {HOW}")]
    Empty,
    #[error("the MP4 is not fragmented; {HOW}")]
    NotFragmented,
    #[error(
        "the first fragment comes before the moov box that describes it: begin the input with its init segment"
    )]
    NoMoov,
    #[error("box {kind:?} has {size} bytes, which is too large for a stream; {HOW}", kind = .kind.to_string())]
    TooLarge { kind: FourCC, size: usize },
    #[error("the input ends within box {kind:?} at byte {at}: it has {there} of {size} bytes", kind = .kind.to_string())]
    Truncated { kind: FourCC, at: u64, there: usize, size: usize },
    #[error("cannot read box {kind:?} of the moov box: {source}", kind = .kind.to_string())]
    Moov { kind: FourCC, source: mp4_atom::Error },
    #[error("cannot read box {kind:?} of a moof box: {source}", kind = .kind.to_string())]
    Moof { kind: FourCC, source: mp4_atom::Error },
    #[error(
        "the samples of track {track} are not where the moof box at byte {at} says: the input may be cut out of a file; make the muxer \
         count offsets from the moof (default-base-is-moof; ffmpeg: -movflags +default_base_moof)"
    )]
    Outside { at: u64, track: u32 },
    /// The input's boxes contradict each other, or a required box is missing.
    #[error("the input has {0}; {HOW}")]
    Malformed(&'static str),
    #[error("group {group} begins at {one:?} in one rendition and at {other:?} in another")]
    Apart { group: u64, one: Duration, other: Duration },
    #[error("an object is not LOC of a supported form: {0} (--track writes payloads unchanged)")]
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
