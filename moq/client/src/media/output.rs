//! A track that media is published on: its groups, and which samples begin them.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use millrace_moq::{SubgroupId, loc};
use mp4_atom::Trex;

use super::fragment::{Run, Sample};
use super::init;
use super::picture::{self, Pictures, Verdict};
use super::{Cut, Error, MEDIA_PRIORITY, Packaging, SOUND_PRIORITY, codec};
use crate::broadcast::{SubgroupWriter, Track};

/// How often a group begins of video that says nowhere what can be begun with, at the least.
const UNMARKED: Duration = Duration::from_secs(2);
/// The longest group. Longer ones are kept by no relay, so nobody who joins gets their beginning.
const LONGEST: Duration = Duration::from_secs(60);
/// Longer than any clock counts: a time that is more is none that could be waited for.
const LATEST: Duration = Duration::from_secs(u32::MAX as u64);

/// Who needs a fragment. Its number is that of the subgroup.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Need {
    /// A key frame, or sound: what others begin with.
    Key = 0,
    /// Frames after it.
    Delta = 1,
    /// None but those who look at it.
    Disposable = 2,
}

impl Need {
    /// Returns who needs samples, the first of which is a key frame or not.
    pub fn of(is_key: bool, samples: &[Sample]) -> Self {
        let is_disposable = !samples.is_empty() && samples.iter().all(|it| picture::is_disposable(it.flags));
        match (is_key, is_disposable) {
            (true, _) => Self::Key,
            (false, true) => Self::Disposable,
            (false, false) => Self::Delta,
        }
    }
}

/// One media track being published.
pub(super) struct Output {
    pub track: Arc<Track>,
    pub packaging: Packaging,
    pub is_video: bool,
    /// Whether its groups are its own. Those of other tracks are those of the track that leads.
    pub has_groups: bool,
    pub timescale: u32,
    /// What fragments do not say.
    pub defaults: Trex,
    /// How samples are read, by sample entry.
    pictures: Vec<Option<Pictures>>,
    /// Length of an initialisation vector, where samples are encrypted.
    pub iv_size: u8,
    /// What a decoder begins with.
    configuration: Option<Vec<u8>>,
    /// How much earlier than its time a sample is presented, in units of the timescale.
    pub edit: i64,
    /// How much later than it says everything is published, in units of the timescale.
    pub later: u64,
    /// When the last fragment ended.
    pub next: u64,
    /// Whether a sample was ever marked as one to begin with.
    is_marked: bool,
    /// When the newest group began.
    begun: Option<u64>,
    is_warned: bool,
    groups: Groups,
}

/// The groups of a track.
#[derive(Default)]
struct Groups {
    next: u64,
    open: Option<Group>,
    /// Samples that came before any to begin with.
    dropped: u64,
}

/// A group being written.
struct Group {
    id: u64,
    next_object: u64,
    /// By [`Need`].
    subgroups: [Option<SubgroupWriter>; 3],
}

impl Output {
    pub fn new(track: Arc<Track>, of: &init::Track, packaging: Packaging, has_groups: bool) -> Self {
        let entry = of.entry();
        Self {
            track,
            packaging,
            is_video: of.is_video(),
            has_groups,
            timescale: of.timescale,
            defaults: of.defaults.clone(),
            pictures: of.entries.iter().map(|entry| Pictures::of(entry).filter(|_| of.is_video())).collect(),
            iv_size: entry
                .and_then(|entry| entry.protection.as_ref())
                .map_or(0, |protection| protection.iv_size),
            configuration: entry.and_then(codec::configuration),
            edit: of.edit,
            later: 0,
            next: 0,
            is_marked: false,
            begun: None,
            is_warned: false,
            groups: Groups::default(),
        }
    }

    /// Has groups go on where those of an earlier track of the broadcast ended.
    pub fn number_groups_from(&mut self, group: u64) {
        self.groups.next = group;
    }

    /// Returns the ID that the next group gets.
    pub fn next_group(&self) -> u64 {
        self.groups.next
    }

    /// Returns a time of its media.
    pub fn time(&self, units: u64) -> Duration {
        let seconds = units as f64 / f64::from(self.timescale);
        Duration::try_from_secs_f64(seconds).map_or(LATEST, |time| time.min(LATEST))
    }

    /// Returns when a sample is presented, after edits, in units of the timescale.
    pub fn presented(&self, sample: &Sample) -> i128 {
        sample.presented() - i128::from(self.edit) + i128::from(self.later)
    }

    /// Decides for each sample of a fragment whether a group can begin with it.
    pub fn beginnings(&mut self, run: &Run, data: &[Bytes]) -> Vec<bool> {
        let pictures = self.pictures.get(run.description as usize - 1).copied().flatten();
        let samples = run.samples.iter().zip(data).enumerate();
        samples.map(|(position, (sample, bytes))| self.begins(position, sample, bytes, pictures)).collect()
    }

    fn begins(&mut self, position: usize, sample: &Sample, bytes: &[u8], pictures: Option<Pictures>) -> bool {
        let is_sync = picture::is_sync(sample.flags);
        let verdict = pictures.and_then(|pictures| pictures.judge(bytes));
        let begins = match verdict {
            Some(Verdict::Begins) => true,
            Some(Verdict::Needs) => false,
            Some(Verdict::AsMarked) => is_sync,
            None => {
                self.is_marked |= is_sync;
                is_sync || !self.is_marked && position == 0 && self.is_due(sample, UNMARKED)
            }
        };
        let is_forced = !begins && position == 0 && self.begun.is_some() && self.is_due(sample, LONGEST);
        if self.is_video && !is_sync && (is_forced || begins && verdict.is_none()) && !self.is_warned {
            self.is_warned = true;
            tracing::warn!(
                track = %self.track.name().typed(),
                "no key frames: groups are cut by time, and who joins may see nothing; have the encoder make one each second or two (ffmpeg: -g)"
            );
        }
        if begins || is_forced {
            self.begun = Some(sample.decoded);
        }
        begins || is_forced
    }

    /// Reports whether a group has lasted so long, or there is none yet.
    fn is_due(&self, sample: &Sample, after: Duration) -> bool {
        self.begun.is_none_or(|begun| self.time(sample.decoded.abs_diff(begun)) >= after)
    }

    /// Makes LOC of a sample; with the decoder's configuration where one may begin with it.
    pub fn loc(&self, sample: &Sample, begins: bool, bytes: &[u8]) -> Result<Bytes, Error> {
        const TIME: Error = Error::Malformed("a time that LOC has no room for");
        let config = self.configuration.as_deref().filter(|_| begins);
        let config = config.map(if self.is_video { loc::Config::Video } else { loc::Config::Audio });
        // What an edit list cuts off may be before the beginning of time.
        let timestamp = u64::try_from(self.presented(sample).max(0)).map_err(|_| TIME)?;
        loc::Object { timestamp, timescale: self.timescale.into(), config, sample: bytes }
            .encode()
            .ok_or(TIME)
    }

    /// Ends the group, so that the next object begins another.
    pub fn close(&mut self) {
        self.groups.open = None;
    }

    /// Reports whether an object can be written that begins no group; what comes before the first one that does is dropped.
    pub fn is_open(&mut self, samples: usize) -> bool {
        let is_open = !self.has_groups || self.groups.open.is_some();
        if !is_open {
            self.groups.dropped += samples as u64;
        }
        is_open
    }

    /// Reports whether the next object is the first of its group.
    pub fn is_new_group(&self) -> bool {
        self.groups.open.as_ref().is_none_or(|group| group.next_object == 0)
    }

    /// Begins a group, and returns its ID.
    pub fn begin(&mut self) -> u64 {
        if self.groups.dropped > 0 {
            let samples = std::mem::take(&mut self.groups.dropped);
            tracing::info!(track = %self.track.name().typed(), samples, "what came before the first key frame is left out");
        }
        let id = self.groups.next;
        self.groups.next += 1;
        self.groups.open = Some(Group::new(id));
        id
    }

    /// Writes an object into the open group, or into group `of_leader` for a track whose groups are not its own. Returns where it is.
    pub fn write(&mut self, cut: Cut, need: Need, of_leader: u64, payload: Bytes) -> (u64, u64) {
        let group = self.groups.open.get_or_insert_with(|| Group::new(of_leader));
        self.groups.next = self.groups.next.max(group.id + 1);
        let (subgroup, priority) = match (cut, self.is_video) {
            (Cut::Whole, _) => (0, MEDIA_PRIORITY),
            (Cut::ByNeed, false) => (0, SOUND_PRIORITY),
            (Cut::ByNeed, true) => (need as u8, SOUND_PRIORITY + 1 + need as u8),
        };
        let id = if subgroup == 0 { SubgroupId::Zero } else { SubgroupId::Explicit(subgroup.into()) };
        let slot = &mut group.subgroups[usize::from(subgroup)];
        let place = (group.id, group.next_object);
        slot.get_or_insert_with(|| self.track.open(place.0, id, priority)).write(place.1, payload);
        group.next_object += 1;
        if cut == Cut::ByNeed && self.is_video && need == Need::Key {
            *slot = None; // nothing follows in there
        }
        place
    }
}

impl Group {
    fn new(id: u64) -> Self {
        Self { id, next_object: 0, subgroups: [const { None }; 3] }
    }
}
