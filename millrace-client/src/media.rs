//! Fragmented MP4 as MoQ tracks, named and described as moq-pub does it, so that moq-sub plays them.
//!
//! `.catalog` and `0.mp4` (ftyp and moov) have one object each; `N.m4s` has the fragments of track N, one
//! object for each moof and mdat, and a new group at each key frame of the video. `catalog` says the same by MSF, and `catalog.json` as
//! hang, moq-dev's format. Of several
//! [renditions](Renditions) the others' tracks are named `r1-N.m4s` and so on.
//!
//! Packaged as [LOC](millrace_proto::moq::loc), an object is a sample of a fragment, the tracks are `N.loc`, and what moq-pub describes by
//! its names and its catalog is not there.

mod codec;
mod init;
mod playlist;
mod renditions;
mod samples;
mod wrap;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Buf, Bytes, BytesMut};
use millrace_proto::moq::name::NameError;
use millrace_proto::moq::{Properties, SubgroupId, loc};
use mp4_atom::{Atom, Decode, Ftyp, Header, Mdat, Moof, Moov, Traf, Trak, Trex};
use serde::{Deserialize, Serialize};

pub use self::playlist::{Part, Playlist};
use self::renditions::Rendition;
pub use self::renditions::Renditions;
use self::samples::samples;
pub use self::wrap::Wrap;
use crate::broadcast::{Broadcast, SubgroupWriter, Track};

pub const CATALOG: &str = ".catalog";
pub const INIT: &str = "0.mp4";

/// What moq-pub gives to media; its catalog and init segment are at 0.
const MEDIA_PRIORITY: u8 = 127;
/// With subgroups by what can be done without: sound at this, and each subgroup of video one later.
const SOUND_PRIORITY: u8 = MEDIA_PRIORITY - 3;
/// The largest box that is taken into memory, in bytes.
const MAX_BOX: usize = 256 << 20;

/// Why media cannot be published or played.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("not an MP4 box: {0}")]
    NotABox(#[source] mp4_atom::Error),
    #[error("the input is not MP4; {HOW}")]
    NotMp4,
    #[error("there is no media in the input; {HOW}")]
    Empty,
    #[error("the MP4 is not fragmented; {HOW}")]
    NotFragmented,
    #[error("an MP4 box without a size cannot be streamed")]
    NoSize,
    #[error("an MP4 box of {0} bytes is too large; {HOW}")]
    TooLarge(usize),
    #[error("cannot read the moov box: {0}")]
    Moov(#[source] mp4_atom::Error),
    #[error("cannot read a moof box: {0}")]
    Moof(#[source] mp4_atom::Error),
    #[error("a fragment has {0} tracks: use ffmpeg's separate_moof")]
    TracksInFragment(usize),
    /// Boxes that do not belong together.
    #[error("{0}")]
    Malformed(&'static str),
    #[error("group {group} begins at {one:?} in one rendition and at {other:?} in another")]
    Apart { group: u64, one: Duration, other: Duration },
    #[error(
        "track {0} has a codec that LOC does not describe to players (--packaging cmaf does): it takes H.264, H.265, AV1, VP9, AAC and Opus"
    )]
    NotForLoc(u32),
    #[error("an object is not LOC as it is played here: {0} (--track writes what there is)")]
    NotLoc(#[from] loc::NotLoc),
    #[error("cannot read a decoder's configuration in the catalog: {0}")]
    Configuration(#[source] mp4_atom::Error),
    #[error("cannot write MP4: {0}")]
    Write(#[source] mp4_atom::Error),
    #[error(transparent)]
    Name(#[from] NameError),
    #[error("cannot write the catalog: {0}")]
    Catalog(#[from] serde_json::Error),
}

/// What makes media of which anything can be published.
pub const HOW: &str = "have ffmpeg make fragments: ffmpeg -i INPUT -c copy -f mp4 \
                   -movflags cmaf+separate_moof+delay_moov+skip_trailer+frag_every_frame - | millrace publish ...";

/// Cuts bytes into MP4 boxes.
#[derive(Debug, Default)]
pub struct Boxes {
    buffer: BytesMut,
    /// The first box was one that media may begin with.
    is_mp4: bool,
}

/// Types of boxes that files and streams begin with.
const FIRST: [&[u8]; 8] = [b"ftyp", b"styp", b"moov", b"moof", b"free", b"skip", b"mdat", b"wide"];

impl Boxes {
    pub fn push(&mut self, bytes: &[u8]) {
        self.buffer.extend_from_slice(bytes);
    }

    /// The next whole box with its header, or `None` when it is not all there yet.
    pub fn pop(&mut self) -> Result<Option<(mp4_atom::FourCC, Bytes)>, Error> {
        // A header has 8 bytes, or 16 when the first four are 1.
        let needed = if self.buffer.starts_with(&[0, 0, 0, 1]) { 16 } else { 8 };
        if self.buffer.len() < needed {
            return Ok(None);
        }
        if !self.is_mp4 && !FIRST.contains(&&self.buffer[4..8]) {
            return Err(Error::NotMp4);
        }
        self.is_mp4 = true;
        let mut front = &self.buffer[..];
        let header = Header::decode(&mut front).map_err(Error::NotABox)?;
        let size = header.size.ok_or(Error::NoSize)?;
        if size > MAX_BOX {
            return Err(Error::TooLarge(size));
        }
        let whole = self.buffer.len() - front.remaining() + size;
        if self.buffer.len() < whole {
            self.buffer.reserve(whole - self.buffer.len());
            return Ok(None);
        }
        Ok(Some((header.kind, self.buffer.split_to(whole).freeze())))
    }
}

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
    /// As MSF has it.
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

/// Who needs a fragment. Its number is that of the subgroup.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Need {
    /// A key frame, or sound: what others begin with.
    Key = 0,
    /// Frames after it.
    Delta = 1,
    /// None but those who look at it.
    Disposable = 2,
}

/// One media track being published.
struct Output {
    track: Arc<Track>,
    is_video: bool,
    timescale: u32,
    /// What fragments do not say.
    defaults: Trex,
    /// What a decoder begins with.
    configuration: Option<Vec<u8>>,
    next_group: u64,
    open: Option<Group>,
}

/// A group being written.
struct Group {
    id: u64,
    next_object: u64,
    /// By [`Need`].
    subgroups: [Option<SubgroupWriter>; 3],
}

/// Longer than any clock counts: a time that is more is none that could be waited for.
const LATEST: Duration = Duration::from_secs(u32::MAX as u64);

impl Output {
    /// A time of its media.
    fn time(&self, units: u64) -> Duration {
        let seconds = units as f64 / f64::from(self.timescale);
        Duration::try_from_secs_f64(seconds).map_or(LATEST, |time| time.min(LATEST))
    }

    /// A sample as LOC; with the decoder's configuration where one may begin with it.
    fn loc(&self, presented: u64, begins: bool, sample: &[u8]) -> Result<Bytes, Error> {
        let config = self.configuration.as_deref().filter(|_| begins);
        let config = config.map(if self.is_video { loc::Config::Video } else { loc::Config::Audio });
        let object = loc::Object { timestamp: presented, timescale: self.timescale.into(), config, sample };
        object.encode().ok_or(Error::Malformed("a time that LOC has no room for"))
    }

    fn write(&mut self, cut: Cut, need: Need, payload: Bytes) {
        let group = self.open.get_or_insert_with(|| {
            let id = self.next_group;
            self.next_group += 1;
            Group { id, next_object: 0, subgroups: [const { None }; 3] }
        });
        let (subgroup, priority) = match (cut, self.is_video) {
            (Cut::Whole, _) => (0, MEDIA_PRIORITY),
            (Cut::ByNeed, false) => (0, SOUND_PRIORITY),
            (Cut::ByNeed, true) => (need as u8, SOUND_PRIORITY + 1 + need as u8),
        };
        let id = if subgroup == 0 { SubgroupId::Zero } else { SubgroupId::Explicit(subgroup.into()) };
        let slot = &mut group.subgroups[usize::from(subgroup)];
        slot.get_or_insert_with(|| self.track.open(group.id, id, priority)).write(group.next_object, payload);
        group.next_object += 1;
        if cut == Cut::ByNeed && self.is_video && need == Need::Key {
            *slot = None; // nothing follows in there
        }
    }
}

/// A moof that waits for its mdat.
struct Fragment {
    track: u32,
    moof: Bytes,
    traf: Traf,
}

/// An object of a track, and where it goes.
struct Piece {
    starts_group: bool,
    need: Need,
    time: Duration,
    payload: Bytes,
}

/// Publishes boxes into a broadcast.
pub struct Media {
    broadcast: Arc<Broadcast>,
    cut: Cut,
    rendition: Rendition,
    /// As moq-pub writes it, with the best rendition.
    catalog: Option<Arc<Track>>,
    init: Option<Arc<Track>>,
    ftyp: Option<Bytes>,
    outputs: BTreeMap<u32, Output>,
    pending: Option<Fragment>,
}

impl Media {
    /// The only rendition.
    pub fn new(broadcast: Arc<Broadcast>, packaging: Packaging, cut: Cut) -> Result<Self, NameError> {
        Renditions::new(broadcast, 1, packaging)?.media(0, None, cut)
    }

    fn rendition(broadcast: Arc<Broadcast>, cut: Cut, rendition: Rendition) -> Result<Self, NameError> {
        // moq-pub has no words for anything else.
        let is_cmaf = rendition.packaging() == Packaging::Cmaf;
        let create = |name: &str| broadcast.create(name, Properties::default());
        let catalog = (is_cmaf && rendition.is_best()).then(|| create(CATALOG)).transpose()?;
        let init = is_cmaf.then(|| create(&rendition.name(INIT))).transpose()?;
        let (ftyp, outputs, pending) = (None, BTreeMap::new(), None);
        Ok(Self { broadcast, cut, rendition, catalog, init, ftyp, outputs, pending })
    }

    /// Takes the next box. For a moof, returns its decode time; it is published with the mdat behind it.
    pub fn take(&mut self, kind: mp4_atom::FourCC, bytes: Bytes) -> Result<Option<Duration>, Error> {
        match kind {
            Ftyp::KIND if self.ftyp.is_none() => self.ftyp = Some(bytes),
            Moov::KIND if self.outputs.is_empty() => self.set_up(bytes)?,
            Moof::KIND => return self.fragment(bytes).map(Some),
            Mdat::KIND if self.pending.is_none() => return Err(Error::NotFragmented),
            Mdat::KIND => self.publish(&bytes)?,
            // Indexes and the like, which mean nothing in a live stream.
            _ => {}
        }
        Ok(None)
    }

    fn set_up(&mut self, bytes: Bytes) -> Result<(), Error> {
        let moov = Moov::decode(&mut &bytes[..]).map_err(Error::Moov)?;
        let ftyp = self.ftyp.as_ref().ok_or(Error::Malformed("moov before ftyp"))?;
        if moov.mvex.is_none() {
            return Err(Error::NotFragmented);
        }
        if moov.trak.is_empty() {
            return Err(Error::Malformed("the media has no tracks"));
        }
        let init = Bytes::from([&ftyp[..], &bytes[..]].concat());
        for trak in &moov.trak {
            let id = trak.tkhd.track_id;
            let codec = trak.mdia.minf.stbl.stsd.codecs.first();
            if self.rendition.packaging() == Packaging::Loc && !codec.is_some_and(codec::is_described) {
                return Err(Error::NotForLoc(id));
            }
            let name = self.rendition.name(&self.rendition.packaging().track(id));
            let trex = moov.mvex.iter().flat_map(|mvex| &mvex.trex).find(|trex| trex.track_id == id);
            let output = Output {
                track: self.broadcast.create(&name, Properties::default())?,
                is_video: trak.mdia.hdlr.handler == mp4_atom::FourCC::new(b"vide"),
                timescale: trak.mdia.mdhd.timescale.max(1),
                defaults: trex.cloned().unwrap_or_default(),
                configuration: codec.and_then(codec::configuration),
                next_group: 0,
                open: None,
            };
            self.outputs.insert(id, output);
        }
        let namespace = path_of(self.broadcast.namespace().fields());
        let catalog = serde_json::to_string_pretty(&Catalog::new(namespace, &moov))?;
        if let Some(track) = &self.init {
            track.open(0, SubgroupId::Zero, 0).write(0, init.clone());
        }
        if let Some(track) = &self.catalog {
            track.open(0, SubgroupId::Zero, 0).write(0, catalog.into());
        }
        self.rendition.describe(&moov, &init)
    }

    fn fragment(&mut self, bytes: Bytes) -> Result<Duration, Error> {
        if self.pending.is_some() {
            return Err(Error::Malformed("a moof without an mdat"));
        }
        let moof = Moof::decode(&mut &bytes[..]).map_err(Error::Moof)?;
        let [traf] =
            <[Traf; 1]>::try_from(moof.traf).map_err(|trafs| Error::TracksInFragment(trafs.len()))?;
        let track = traf.tfhd.track_id;
        let output = self.outputs.get(&track);
        let output = output.ok_or(Error::Malformed("a fragment of a track that moov does not have"))?;
        let time = output.time(traf.tfdt.as_ref().map_or(0, |tfdt| tfdt.base_media_decode_time));
        self.pending = Some(Fragment { track, moof: bytes, traf });
        Ok(time)
    }

    fn publish(&mut self, mdat: &[u8]) -> Result<(), Error> {
        let fragment = self.pending.take().ok_or(Error::Malformed("an mdat without a moof"))?;
        let has_video = self.outputs.values().any(|output| output.is_video);
        let output = self.outputs.get(&fragment.track);
        let output = output.ok_or(Error::Malformed("a fragment of an unknown track"))?;
        // Without video, every fragment is a place to join.
        let leads = output.is_video || !has_video;
        let pieces = match self.rendition.packaging() {
            Packaging::Cmaf => vec![fragment.whole(output, leads, mdat)],
            Packaging::Loc => fragment.samples(output, leads, mdat)?,
        };
        pieces.into_iter().try_for_each(|piece| self.write(fragment.track, piece))
    }

    fn write(&mut self, track: u32, piece: Piece) -> Result<(), Error> {
        if piece.starts_group {
            self.outputs.values_mut().for_each(|output| output.open = None);
        }
        let output = self.outputs.get_mut(&track);
        let output = output.ok_or(Error::Malformed("a fragment of an unknown track"))?;
        if piece.starts_group && output.is_video {
            self.rendition.begins(output.next_group, piece.time)?;
        }
        output.write(self.cut, piece.need, piece.payload);
        Ok(())
    }
}

impl Fragment {
    /// As one object; it starts a group if it is what one may begin with, and `leads`.
    fn whole(&self, output: &Output, leads: bool, mdat: &[u8]) -> Piece {
        let default_flags = output.defaults.default_sample_flags;
        let is_key = has_key_frame(&self.traf, default_flags);
        Piece {
            starts_group: leads && is_key,
            need: Need::of(is_key, is_disposable(&self.traf, default_flags)),
            time: output.time(self.traf.tfdt.as_ref().map_or(0, |tfdt| tfdt.base_media_decode_time)),
            payload: [&self.moof[..], mdat].concat().into(),
        }
    }

    /// Each of its samples as an object.
    fn samples(&self, output: &Output, leads: bool, mdat: &[u8]) -> Result<Vec<Piece>, Error> {
        let header = if mdat.starts_with(&[0, 0, 0, 1]) { 16 } else { 8 };
        let whole = [&self.moof[..], mdat].concat();
        let samples = samples(&self.traf, &output.defaults, self.moof.len() + header, whole.len())?;
        let piece = |(position, sample): (usize, samples::Sample)| {
            let is_key = samples::is_key(sample.flags);
            // All sound is what one may begin with: a group for each fragment is enough.
            let starts_group = leads && is_key && (output.is_video || position == 0);
            let begins = starts_group || position == 0 && output.open.is_none();
            Ok(Piece {
                starts_group,
                need: Need::of(is_key, samples::is_disposable(sample.flags)),
                time: output.time(sample.decoded),
                payload: output.loc(sample.presented, begins, &whole[sample.bytes])?,
            })
        };
        samples.into_iter().enumerate().map(piece).collect()
    }
}

impl Need {
    fn of(is_key: bool, is_disposable: bool) -> Self {
        match (is_key, is_disposable) {
            (true, _) => Self::Key,
            (false, true) => Self::Disposable,
            (false, false) => Self::Delta,
        }
    }
}

fn flags(traf: &Traf, default: u32) -> impl Iterator<Item = u32> {
    let entries = traf.trun.iter().flat_map(|trun| &trun.samples);
    entries.map(move |entry| samples::flags(&entry, traf, default))
}

fn has_key_frame(traf: &Traf, default_flags: u32) -> bool {
    flags(traf, default_flags).any(samples::is_key)
}

/// Whether no other sample depends on those of the fragment, as far as the encoder says.
fn is_disposable(traf: &Traf, default_flags: u32) -> bool {
    let disposable = flags(traf, default_flags).map(samples::is_disposable);
    disposable.reduce(|all, this| all && this).unwrap_or(false)
}

/// A namespace as moq-pub writes it: with a slash before every field.
fn path_of(fields: &[Bytes]) -> String {
    fields.iter().map(|field| format!("/{}", String::from_utf8_lossy(field))).collect()
}

/// The catalog that moq-pub writes (draft-ietf-moq-catalogformat-01).
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Catalog {
    pub version: u16,
    streaming_format: u16,
    streaming_format_version: String,
    supports_delta_updates: bool,
    common_track_fields: CommonFields,
    pub tracks: Vec<CatalogTrack>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct CommonFields {
    #[serde(skip_serializing_if = "Option::is_none")]
    namespace: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    packaging: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    render_group: Option<u16>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CatalogTrack {
    pub name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub init_track: Option<String>,
    selection_params: SelectionParams,
}

#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct SelectionParams {
    codec: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    bitrate: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    width: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    height: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    samplerate: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    channel_config: Option<String>,
}

impl Catalog {
    fn new(namespace: String, moov: &Moov) -> Self {
        let track = |trak: &Trak| CatalogTrack {
            name: format!("{}.m4s", trak.tkhd.track_id),
            init_track: Some(INIT.into()),
            selection_params: SelectionParams::of(trak),
        };
        Self {
            version: 1,
            streaming_format: 1,
            streaming_format_version: "0.2".into(),
            supports_delta_updates: true,
            common_track_fields: CommonFields {
                namespace: Some(namespace),
                packaging: Some("cmaf".into()),
                render_group: Some(1),
            },
            tracks: moov.trak.iter().map(track).collect(),
        }
    }
}

impl SelectionParams {
    fn of(trak: &Trak) -> Self {
        let codec = trak.mdia.minf.stbl.stsd.codecs.first();
        let name = codec.and_then(codec::name);
        if name.is_none() {
            tracing::warn!(track = trak.tkhd.track_id, "the catalog has no name for this codec");
        }
        let visual = codec.and_then(codec::visual);
        let audio = codec.and_then(codec::audio);
        Self {
            codec: name,
            bitrate: codec.filter(|_| audio.is_some()).and_then(codec::bitrate),
            width: visual.map(|visual| visual.width.into()),
            height: visual.map(|visual| visual.height.into()),
            samplerate: audio.map(|audio| audio.sample_rate.integer().into()),
            channel_config: audio.map(|audio| audio.channel_count.to_string()),
        }
    }
}

/// The tracks that a player takes from an init segment: the first video and the first audio, as
/// positions and IDs.
pub fn playable(init: &[u8]) -> Result<Vec<(usize, u32)>, Error> {
    let moov = init::moov(init)?;
    let first = |handler: &[u8; 4]| {
        let handler = mp4_atom::FourCC::new(handler);
        let position = moov.trak.iter().position(|trak| trak.mdia.hdlr.handler == handler)?;
        Some((position, moov.trak[position].tkhd.track_id))
    };
    Ok([first(b"vide"), first(b"soun")].into_iter().flatten().collect())
}

#[cfg(test)]
mod loc_tests;
#[cfg(test)]
mod tests;
