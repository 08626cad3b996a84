//! A track that media is published on: divides samples into groups and writes objects.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use millrace_moq::{SubgroupId, loc};
use mp4_atom::Trex;

use super::fragment::{MediaSample, SampleRun};
use super::init;
use super::picture::{self, PictureKind, Pictures};
use super::{Cut, Error, MEDIA_PRIORITY, Packaging, SOUND_PRIORITY, codec};
use crate::broadcast::{BroadcastTrack, SubgroupWriter};

/// Shortest duration of a group in a video in which no sample is marked as a key frame.
const UNMARKED: Duration = Duration::from_secs(2);
/// Longest duration of a group. Relays drop the beginning of longer groups, so that late subscribers would not get it.
const LONGEST: Duration = Duration::from_secs(60);
/// The largest media time. Later media times are replaced by this time, because they are too large for a timer.
const LATEST: Duration = Duration::from_secs(u32::MAX as u64);

/// The way in which other fragments depend on a fragment. If groups have several subgroups, the value is the index of
/// the fragment's subgroup.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FragmentNeed {
    /// The fragment begins with a key frame or contains audio, so a decoder can start with it.
    Key = 0,
    /// A frame that other frames depend on.
    Delta = 1,
    /// A frame that no other frame depends on.
    Disposable = 2,
}

impl FragmentNeed {
    /// Returns in which way other samples depend on `samples`. `is_key` is true if the first of `samples` is a key
    /// frame.
    pub fn classify(is_key: bool, samples: &[MediaSample]) -> Self {
        let is_disposable = !samples.is_empty() && samples.iter().all(|it| picture::is_disposable(it.flags));
        match (is_key, is_disposable) {
            (true, _) => Self::Key,
            (false, true) => Self::Disposable,
            (false, false) => Self::Delta,
        }
    }
}

/// One media track that is being published.
pub(super) struct TrackOutput {
    pub track: Arc<BroadcastTrack>,
    pub packaging: Packaging,
    pub is_video: bool,
    /// Whether the track begins groups by itself: all video tracks do, and so does the leading track (the first video
    /// track, or without video the first audio track). Every other track begins a group when the leading track does.
    pub has_groups: bool,
    pub timescale: u32,
    /// Default values (trex) for fields that fragments omit.
    pub defaults: Trex,
    /// The picture format of each sample entry.
    pictures: Vec<Option<Pictures>>,
    /// Length of an initialization vector in bytes, if samples are encrypted.
    pub iv_size: u8,
    /// The bytes of the decoder configuration.
    configuration: Option<Vec<u8>>,
    /// Time by which a sample is presented earlier than its time stamp says, in units of the timescale.
    pub edit: i64,
    /// Offset that is added to all decode and presentation times of the track, in units of the timescale.
    pub later: u64,
    /// Decode time at which the last fragment ended, in units of the timescale.
    pub next: u64,
    /// Whether the input has marked any sample as a key frame.
    is_marked: bool,
    /// Decode time at which the newest group began, in units of the timescale.
    begun: Option<u64>,
    is_warned: bool,
    groups: Groups,
}

/// The groups of a track.
#[derive(Default)]
struct Groups {
    next: u64,
    open: Option<OutputGroup>,
    /// The ID of the group in which the input begins, if groups are numbered by media time.
    first: Option<u64>,
    /// Number of samples that were dropped because they came before the first key frame.
    dropped: u64,
}

/// A group that is being written.
struct OutputGroup {
    id: u64,
    next_object: u64,
    /// Writers of the subgroups, indexed by [`FragmentNeed`].
    subgroups: [Option<SubgroupWriter>; 3],
}

impl TrackOutput {
    pub fn new(
        track: Arc<BroadcastTrack>,
        of: &init::InitTrack,
        packaging: Packaging,
        has_groups: bool,
    ) -> Self {
        let entry = of.entry();
        Self {
            track,
            packaging,
            is_video: of.is_video(),
            has_groups,
            timescale: of.timescale,
            defaults: of.defaults.clone(),
            pictures: of
                .entries
                .iter()
                .map(|entry| Pictures::for_entry(entry).filter(|_| of.is_video()))
                .collect(),
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

    /// Sets the ID of the next group, so that the group IDs continue those of the track that this track replaces.
    pub fn number_groups_from(&mut self, group: u64) {
        self.groups.next = group;
    }

    /// Returns the ID of the next group that this track will begin.
    pub fn next_group(&self) -> u64 {
        self.groups.next
    }

    /// Converts units of the timescale to a time.
    pub fn time(&self, units: u64) -> Duration {
        let seconds = units as f64 / f64::from(self.timescale);
        Duration::try_from_secs_f64(seconds).map_or(LATEST, |time| time.min(LATEST))
    }

    /// Returns the presentation time of a sample after the track's edit list is applied and `later` is added, in units
    /// of the timescale.
    pub fn presented(&self, sample: &MediaSample) -> i128 {
        sample.presented() - i128::from(self.edit) + i128::from(self.later)
    }

    /// Returns for each sample of a fragment whether a group begins with it.
    pub fn beginnings(&mut self, run: &SampleRun, data: &[Bytes]) -> Vec<bool> {
        let pictures = self.pictures.get(run.description as usize - 1).copied().flatten();
        let samples = run.samples.iter().zip(data).enumerate();
        samples.map(|(position, (sample, bytes))| self.begins(position, sample, bytes, pictures)).collect()
    }

    fn begins(
        &mut self,
        position: usize,
        sample: &MediaSample,
        bytes: &[u8],
        pictures: Option<Pictures>,
    ) -> bool {
        let is_sync = picture::is_sync(sample.flags);
        let verdict = pictures.and_then(|pictures| pictures.judge(bytes));
        let begins = match verdict {
            Some(PictureKind::Begins) => true,
            Some(PictureKind::Needs) => false,
            Some(PictureKind::AsMarked) => is_sync,
            None => {
                // If no sample of the track so far is marked as a key frame, a group begins at the first fragment after
                // the previous group has lasted for `UNMARKED`.
                self.is_marked |= is_sync;
                is_sync || !self.is_marked && position == 0 && self.is_due(sample, UNMARKED)
            }
        };
        // A group that reaches its longest duration is ended even if a decoder cannot start with the next sample.
        let is_forced = !begins && position == 0 && self.begun.is_some() && self.is_due(sample, LONGEST);
        if self.is_video && !is_sync && (is_forced || begins && verdict.is_none()) && !self.is_warned {
            self.is_warned = true;
            tracing::warn!(
                track = %self.track.name().typed(),
                "the video has no key frames: groups are cut by time, and viewers that join may see nothing; make the encoder insert a key frame every second or two (ffmpeg: -g)"
            );
        }
        if begins || is_forced {
            self.begun = Some(sample.decoded);
        }
        begins || is_forced
    }

    /// Reports whether the newest group has lasted for at least `after`. It is true if there is no group yet.
    fn is_due(&self, sample: &MediaSample, after: Duration) -> bool {
        self.begun.is_none_or(|begun| self.time(sample.decoded.abs_diff(begun)) >= after)
    }

    /// Makes a LOC object of a sample. If `begins` is true, the sample begins a group, and the object includes the
    /// decoder configuration.
    pub fn loc(&self, sample: &MediaSample, begins: bool, bytes: &[u8]) -> Result<Bytes, Error> {
        const TIME: Error = Error::Malformed("a time that LOC cannot express");
        let config = self.configuration.as_deref().filter(|_| begins);
        let config = config.map(if self.is_video { loc::Config::Video } else { loc::Config::Audio });
        // Samples that an edit list skips may have presentation times before 0, which LOC cannot express, so they get
        // time 0.
        let timestamp = u64::try_from(self.presented(sample).max(0)).map_err(|_| TIME)?;
        loc::LocSample { timestamp, timescale: self.timescale.into(), config, sample: bytes }
            .encode()
            .ok_or(TIME)
    }

    /// Ends the open group, so that the next object begins a new one.
    pub fn close(&mut self) {
        self.groups.open = None;
    }

    /// Reports whether a group is open, so that an object that does not begin a group can be written. If not, adds
    /// `samples`, the object's number of samples, to the track's count of dropped samples.
    pub fn is_open(&mut self, samples: usize) -> bool {
        let is_open = !self.has_groups || self.groups.open.is_some();
        if !is_open {
            self.groups.dropped += samples as u64;
        }
        is_open
    }

    /// Reports whether the next object will be the first of its group.
    pub fn is_new_group(&self) -> bool {
        self.groups.open.as_ref().is_none_or(|group| group.next_object == 0)
    }

    /// Reports whether the group with this ID, which is a media time, begins with a sample that may begin it. The group
    /// in which the input begins is left out: it may have begun before.
    pub fn is_beginning_of(&mut self, group: u64) -> bool {
        match &self.groups.open {
            Some(open) => open.id != group,
            None => group == 0 || *self.groups.first.get_or_insert(group) != group,
        }
    }

    /// Begins a new group with the ID `group`, or else the next one. Returns its ID.
    pub fn begin(&mut self, group: Option<u64>) -> u64 {
        if self.groups.dropped > 0 {
            let samples = std::mem::take(&mut self.groups.dropped);
            tracing::info!(track = %self.track.name().typed(), samples, "dropped the samples before the first key frame of the track");
        }
        let id = group.unwrap_or(self.groups.next);
        self.groups.next = id.saturating_add(1);
        self.groups.open = Some(OutputGroup::new(id));
        id
    }

    /// Writes an object into the open group. If no group is open, this method first opens a group with the ID
    /// `of_leader`, the newest group ID of the track that determines where groups begin. Returns the object's group and
    /// object ID.
    pub fn write(&mut self, cut: Cut, need: FragmentNeed, of_leader: u64, payload: Bytes) -> (u64, u64) {
        let group = self.groups.open.get_or_insert_with(|| OutputGroup::new(of_leader));
        self.groups.next = self.groups.next.max(group.id + 1);
        // A lower priority number is sent first: audio, then key frames, then frames that other frames depend on, then
        // all other frames.
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
        if cut == Cut::ByNeed && self.is_video && need == FragmentNeed::Key {
            *slot = None; // A group has one key frame, so its subgroup can end now.
        }
        place
    }
}

impl OutputGroup {
    fn new(id: u64) -> Self {
        Self { id, next_object: 0, subgroups: [const { None }; 3] }
    }
}
