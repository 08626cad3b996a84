//! Renditions of the same content, and the catalogs that describe them: MSF's, and hang's for moq-dev's players.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use millrace_proto::moq::name::NameError;
use millrace_proto::moq::{Properties, SubgroupId, hang, msf};
use mp4_atom::{Codec, FourCC, Moov, Trak};
use parking_lot::Mutex;

use super::init::init_of;
use super::{Cut, Error, Media, Packaging, SelectionParams, codec};
use crate::broadcast::{Broadcast, Track};

/// What groups of the same ID may begin apart: less than a frame.
const APART: Duration = Duration::from_millis(10);
/// Groups whose beginnings are remembered.
const REMEMBERED: usize = 64;
const VIDEO: FourCC = FourCC::new(b"vide");

/// A track, and what a decoder of it begins with.
struct Described {
    track: msf::Track,
    configuration: Option<Vec<u8>>,
}

/// What the renditions of one broadcast have in common: the catalogs, and when groups begin.
pub struct Renditions {
    broadcast: Arc<Broadcast>,
    catalog: Arc<Track>,
    hang: Arc<Track>,
    count: usize,
    packaging: Packaging,
    state: Mutex<State>,
}

struct State {
    /// Of each rendition, once it is known.
    described: BTreeMap<usize, Vec<Described>>,
    starts: BTreeMap<u64, Duration>,
}

impl Renditions {
    /// So many, which all go into the same broadcast.
    pub fn new(
        broadcast: Arc<Broadcast>,
        count: usize,
        packaging: Packaging,
    ) -> Result<Arc<Self>, NameError> {
        let catalog = broadcast.create(msf::CATALOG, Properties::default())?;
        let hang = broadcast.create(hang::CATALOG, Properties::default())?;
        let state = Mutex::new(State { described: BTreeMap::new(), starts: BTreeMap::new() });
        Ok(Arc::new(Self { broadcast, catalog, hang, count, packaging, state }))
    }

    /// The rendition at a place, the best first; `bitrate`: what its video takes, bits per second.
    pub fn media(self: &Arc<Self>, place: usize, bitrate: Option<u64>, cut: Cut) -> Result<Media, NameError> {
        Media::rendition(self.broadcast.clone(), cut, Rendition { place, bitrate, of: self.clone() })
    }

    /// Once it is known of all renditions what they are, the catalogs say so.
    fn describe(&self, place: usize, tracks: Vec<Described>) -> Result<(), Error> {
        let mut state = self.state.lock();
        state.described.insert(place, tracks);
        if state.described.len() < self.count {
            return Ok(());
        }
        let all: Vec<_> = std::mem::take(&mut state.described).into_values().flatten().collect();
        let configurations =
            all.iter().filter_map(|it| Some((it.track.name.clone(), it.configuration.clone()?)));
        let configurations: BTreeMap<_, _> = configurations.collect();
        let catalog = msf::Catalog::new(all.into_iter().map(|it| it.track).collect());
        let hang = hang::Catalog::of(&catalog, &configurations).to_json()?;
        self.catalog.open(0, SubgroupId::Zero, 0).write(0, catalog.to_json()?.into());
        self.hang.open(0, SubgroupId::Zero, 0).write(0, hang.into());
        Ok(())
    }

    /// A group of video begins at this time of the media.
    fn begins(&self, group: u64, at: Duration) -> Result<(), Error> {
        let mut state = self.state.lock();
        let first = *state.starts.entry(group).or_insert(at);
        if state.starts.len() > REMEMBERED {
            state.starts.pop_first();
        }
        match first.abs_diff(at) <= APART {
            true => Ok(()),
            false => Err(Error::Apart { group, one: first, other: at }),
        }
    }
}

/// One of them.
pub(super) struct Rendition {
    place: usize,
    bitrate: Option<u64>,
    of: Arc<Renditions>,
}

impl Rendition {
    /// The best has the names that moq-pub gives.
    pub fn name(&self, of_best: &str) -> String {
        match self.place {
            0 => of_best.to_owned(),
            place => format!("r{place}-{of_best}"),
        }
    }

    pub fn is_best(&self) -> bool {
        self.place == 0
    }

    pub fn packaging(&self) -> Packaging {
        self.of.packaging
    }

    pub fn begins(&self, group: u64, at: Duration) -> Result<(), Error> {
        self.of.begins(group, at)
    }

    pub fn describe(&self, moov: &Moov, init: &[u8]) -> Result<(), Error> {
        let tracks = moov.trak.iter().map(|trak| {
            let configuration = codec_of(trak).and_then(codec::configuration);
            let begins = match self.packaging() {
                // Players take a track's init segment to have that track alone.
                Packaging::Cmaf => Some(init_of(init, trak.tkhd.track_id)?.to_vec()),
                Packaging::Loc => configuration.clone(),
            };
            Ok(Described { track: self.track(trak, begins), configuration })
        });
        self.of.describe(self.place, tracks.collect::<Result<_, Error>>()?)
    }

    /// `begins`: what its decoder begins with.
    fn track(&self, trak: &Trak, begins: Option<Vec<u8>>) -> msf::Track {
        let params = SelectionParams::of(trak);
        let is_video = trak.mdia.hdlr.handler == VIDEO;
        let bitrate = self.bitrate.filter(|_| is_video).or(params.bitrate.map(u64::from));
        msf::Track {
            name: self.name(&self.packaging().track(trak.tkhd.track_id)),
            packaging: self.packaging().name().to_owned(),
            is_live: true,
            role: Some(if is_video { "video" } else { "audio" }.to_owned()),
            codec: params.codec,
            bitrate: bitrate.or_else(|| codec_of(trak).and_then(codec::bitrate).map(u64::from)),
            width: params.width,
            height: params.height,
            samplerate: params.samplerate,
            channel_config: params.channel_config,
            render_group: Some(1),
            alt_group: (is_video && self.of.count > 1).then_some(1),
            timescale: (self.packaging() == Packaging::Loc).then_some(trak.mdia.mdhd.timescale.max(1)),
            init_data: begins.map(|begins| STANDARD.encode(begins)),
            ..msf::Track::default()
        }
    }
}

fn codec_of(trak: &Trak) -> Option<&Codec> {
    trak.mdia.minf.stbl.stsd.codecs.first()
}
