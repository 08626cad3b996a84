//! The renditions of a broadcast, and the catalogs that describe them: one in MSF's format, one in hang's for moq-dev's
//! players.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use millrace_moq::name::NameError;
use millrace_moq::{Properties, SubgroupId, hang, msf};
use parking_lot::Mutex;

use super::describe::{Described, TrackPlacement, protections};
use super::init::Presentation;
use super::{Error, Packaging};
use crate::broadcast::{Broadcast, BroadcastTrack};

/// Largest tolerated difference between the times at which groups with the same ID begin in two renditions. The
/// difference is less than the duration of one frame.
const APART: Duration = Duration::from_millis(10);
/// Number of latest groups whose start times are remembered, to be compared between renditions.
const REMEMBERED: usize = 64;

/// The state that the renditions of one broadcast share: the catalogs, and the start times of groups, which must be
/// equal in all renditions.
pub struct Renditions {
    broadcast: Arc<Broadcast>,
    catalog: Arc<BroadcastTrack>,
    hang: Arc<BroadcastTrack>,
    count: usize,
    packaging: Packaging,
    state: Mutex<RenditionState>,
}

#[derive(Default)]
struct RenditionState {
    /// The tracks of each rendition, or `None` until its init segment has arrived.
    described: BTreeMap<usize, Vec<Described>>,
    timelines: Vec<msf::MsfTrack>,
    /// Number of catalogs that were published. Each catalog is the only object of its group.
    written: u64,
    starts: BTreeMap<u64, Duration>,
}

impl Renditions {
    /// Makes the shared state of `count` renditions that are published in one broadcast.
    pub fn new(
        broadcast: Arc<Broadcast>,
        count: usize,
        packaging: Packaging,
    ) -> Result<Arc<Self>, NameError> {
        let catalog = broadcast.create(msf::CATALOG, Properties::default())?;
        let hang = broadcast.create(hang::CATALOG, Properties::default())?;
        Ok(Arc::new(Self { broadcast, catalog, hang, count, packaging, state: Mutex::default() }))
    }

    /// Returns the broadcast in which the renditions are published.
    pub(super) fn broadcast(&self) -> Arc<Broadcast> {
        self.broadcast.clone()
    }

    /// Returns the rendition with index `place`, where 0 is the best. `bitrate` is the bit rate of its video, in bits
    /// per second.
    pub(super) fn rendition_at(self: &Arc<Self>, place: usize, bitrate: Option<u64>) -> DescribedRendition {
        let at = TrackPlacement { place, bitrate, has_alternates: self.count > 1, packaging: self.packaging };
        DescribedRendition { at, of: self.clone() }
    }

    /// Publishes the catalogs once the tracks of all renditions are known, and again whenever a rendition's tracks
    /// change.
    fn describe(&self, place: usize, tracks: Vec<Described>) -> Result<(), Error> {
        let mut state = self.state.lock();
        state.described.insert(place, tracks);
        self.write(&mut state)
    }

    fn add_timeline(&self, timeline: msf::MsfTrack) -> Result<(), Error> {
        let mut state = self.state.lock();
        state.timelines.push(timeline);
        self.write(&mut state)
    }

    fn write(&self, state: &mut RenditionState) -> Result<(), Error> {
        if state.described.len() < self.count {
            return Ok(());
        }
        let all: Vec<_> = state.described.values().flatten().collect();
        let configurations =
            all.iter().filter_map(|it| Some((it.track.name.clone(), it.configuration.clone()?)));
        let configurations: BTreeMap<_, _> = configurations.collect();
        let names: Vec<_> = all.iter().map(|it| it.track.name.clone()).collect();
        let timelines =
            state.timelines.iter().map(|it| msf::MsfTrack { depends: Some(names.clone()), ..it.clone() });
        let tracks = all.iter().map(|it| it.track.clone()).chain(timelines);
        let protected = protections(&all);
        let catalog = msf::MsfCatalog::new(tracks.collect()).with_protections(protected);
        let hang = hang::HangCatalog::from_msf(&catalog, &configurations).to_json()?;
        let group = state.written;
        state.written += 1;
        self.catalog.open(group, SubgroupId::Zero, 0).write(0, catalog.to_json()?.into());
        self.hang.open(group, SubgroupId::Zero, 0).write(0, hang.into());
        Ok(())
    }

    /// Records the media time at which a video group begins.
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

/// One rendition, which updates its part of the catalogs.
pub(super) struct DescribedRendition {
    at: TrackPlacement,
    of: Arc<Renditions>,
}

impl DescribedRendition {
    /// Returns the name of a track; see [`TrackPlacement::name`].
    pub fn name(&self, incarnation: u32, of_best: &str) -> String {
        self.at.name(incarnation, of_best)
    }

    pub fn is_best(&self) -> bool {
        self.at.place == 0
    }

    pub fn packaging(&self) -> Packaging {
        self.at.packaging
    }

    /// Records the media time at which a video group of this rendition begins.
    ///
    /// # Errors
    /// Fails if the group with the same ID of another rendition begins at another time.
    pub fn begins(&self, group: u64, at: Duration) -> Result<(), Error> {
        if self.at.has_alternates { self.of.begins(group, at) } else { Ok(()) }
    }

    /// Updates this rendition's tracks in the catalogs.
    pub fn describe(&self, presentation: &Presentation, incarnation: u32) -> Result<(), Error> {
        let described = Described::all(&self.at, presentation, incarnation)?;
        self.of.describe(self.at.place, described)
    }

    pub fn add_timeline(&self, timeline: msf::MsfTrack) -> Result<(), Error> {
        self.of.add_timeline(timeline)
    }
}
