//! Converts the MP4 boxes of an input into objects.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use millrace_moq::name::NameError;
use millrace_moq::{Properties, SubgroupId};
use mp4_atom::FourCC;

use super::boxes::{Child, HEADER, MAX_BOX};
use super::describe::packaging;
use super::events::{self, TimelineRecord, Timelines, WaitingBox};
use super::fragment::{MediaSample, Moof, SampleRun, TrackFragmentState};
use super::init::{Presentation, has_content};
use super::output::{FragmentNeed, TrackOutput};
use super::renditions::{DescribedRendition, Renditions};
use super::{CATALOG, Cut, Error, INIT, Packaging, moqpub};
use crate::broadcast::{Broadcast, BroadcastTrack};

/// Largest number of fragments that wait until their samples arrive.
const WAITING: usize = 64;

/// A fragment whose samples may not have arrived.
struct Fragment {
    moof: Bytes,
    at: u64,
    sequence: u32,
    runs: Vec<SampleRun>,
    /// The prft and emsg boxes that precede the fragment.
    front: Vec<WaitingBox>,
    /// Whether the samples are listed in the moov box's tables. Each of them then becomes an object of its own.
    is_table: bool,
}

/// An object that is ready to be published.
struct PublishedObject {
    track: u32,
    begins: bool,
    need: FragmentNeed,
    samples: usize,
    /// Decode time of the object's first sample. The field `seconds` is the same sample's presentation time in seconds.
    time: Duration,
    seconds: f64,
    marks: Vec<TimelineRecord>,
    /// Wall-clock time of the first sample, in milliseconds since 1970, if a prft box precedes the object.
    wall: Option<i64>,
    payload: ObjectPayload,
}

/// The payload of an object.
enum ObjectPayload {
    Fragment(Bytes),
    /// A sample that will be a LOC object. The object includes the decoder configuration only if the sample begins a
    /// group, so it is encoded when that is known.
    Sample(MediaSample, Bytes),
}

/// A publisher that converts MP4 boxes into objects of a broadcast.
///
/// For each box in the order of the input, call [`take`](Self::take), then [`publish`](Self::publish) (or
/// [`publish_next`](Self::publish_next) at the time that [`next_time`](Self::next_time) says) for the objects that the
/// box has completed. Call [`finish`](Self::finish) at the end. A fragment is kept until its mdat boxes have arrived.
/// When a new moov box arrives, all complete objects are published before the tracks are replaced.
pub struct MediaPublisher {
    broadcast: Arc<Broadcast>,
    cut: Cut,
    rendition: DescribedRendition,
    /// The track with the catalog in moq-pub's format. Only the best rendition has one.
    catalog: Option<Arc<BroadcastTrack>>,
    init: Option<Arc<BroadcastTrack>>,
    ftyp: Option<Bytes>,
    /// The moov box from which the current tracks were made.
    moov: Option<Bytes>,
    /// Number of moov boxes so far that differ from the previous moov box. The first moov box counts.
    incarnation: u32,
    outputs: BTreeMap<u32, TrackOutput>,
    /// Track ID of the leading track: the first video track, or else the first audio track, or else the first track.
    /// Tracks that do not begin groups by themselves begin a group when the leading track does.
    leader: Option<u32>,
    /// The ID of the leading track's newest group.
    group: u64,
    front: Vec<WaitingBox>,
    waiting: VecDeque<Fragment>,
    /// The mdat boxes to which fragments that wait for their samples may refer, each with its byte offset in the input.
    data: Vec<(u64, Bytes)>,
    ready: VecDeque<PublishedObject>,
    timelines: Timelines,
    /// The last track ID that fragments used but the moov box does not have. The ID is remembered so that each unknown
    /// track is logged once.
    unknown: Option<u32>,
    /// Number of moov boxes so far, including repeated ones.
    inits: u32,
    replica: Option<ReplicaNumbering>,
}

/// Numbers groups by media time, so that several publishers of the same media number alike.
struct ReplicaNumbering {
    /// The expected duration of a group, in milliseconds.
    group_ms: f64,
    /// The time in milliseconds since 1970 at which the media time is 0, from the latest prft box of the leading track.
    utc_ms: f64,
    /// Whether the leading track has begun a group. Until then, the other tracks have none.
    has_begun: bool,
}

impl ReplicaNumbering {
    /// Returns the ID of the group that begins `seconds` after the beginning of the media.
    fn group(&self, seconds: f64) -> u64 {
        // Key frames are expected at multiples of `group_ms`. The conversion of a negative number yields 0.
        ((self.utc_ms + seconds * 1000.0) / self.group_ms).round() as u64
    }
}

impl Renditions {
    /// Makes a publisher of the rendition with index `place`, where 0 is the best. `bitrate` is the bit rate of its
    /// video, in bits per second.
    ///
    /// Fails if a track name exceeds the length limit of names.
    pub fn media(
        self: &Arc<Self>,
        place: usize,
        bitrate: Option<u64>,
        cut: Cut,
    ) -> Result<MediaPublisher, NameError> {
        MediaPublisher::rendition(self.broadcast(), cut, self.rendition_at(place, bitrate))
    }
}

impl MediaPublisher {
    /// Makes a publisher of a broadcast with one rendition.
    pub fn new(broadcast: Arc<Broadcast>, packaging: Packaging, cut: Cut) -> Result<Self, NameError> {
        Renditions::new(broadcast, 1, packaging)?.media(0, None, cut)
    }

    fn rendition(
        broadcast: Arc<Broadcast>,
        cut: Cut,
        rendition: DescribedRendition,
    ) -> Result<Self, NameError> {
        // moq-pub's catalog can describe only CMAF.
        let is_cmaf = rendition.packaging() == Packaging::Cmaf;
        let create = |name: &str| broadcast.create(name, Properties::default());
        let catalog = (is_cmaf && rendition.is_best()).then(|| create(CATALOG)).transpose()?;
        let init = is_cmaf.then(|| create(&rendition.name(1, INIT))).transpose()?;
        Ok(Self {
            broadcast,
            cut,
            rendition,
            catalog,
            init,
            ftyp: None,
            moov: None,
            incarnation: 0,
            outputs: BTreeMap::new(),
            leader: None,
            group: 0,
            front: Vec::new(),
            waiting: VecDeque::new(),
            data: Vec::new(),
            ready: VecDeque::new(),
            timelines: Timelines::default(),
            unknown: None,
            inits: 0,
            replica: None,
        })
    }

    /// Numbers groups by media time: by the wall-clock time of prft boxes, or else by the time stamps. Publishers of
    /// the same media then number alike, whenever they begin. A group has the media of a time of `group`, which should
    /// be the distance of key frames.
    pub fn numbered_by_time(mut self, group: Duration) -> Self {
        let group_ms = group.as_secs_f64().max(0.001) * 1000.0;
        self.replica = Some(ReplicaNumbering { group_ms, utc_ms: 0.0, has_begun: false });
        self
    }

    /// Passes the next box of the input to the publisher. `at` is the box's byte offset in the input.
    ///
    /// # Errors
    /// Fails if the box cannot be read, or contradicts the boxes before it.
    pub fn take(&mut self, kind: FourCC, at: u64, bytes: Bytes) -> Result<(), Error> {
        match kind.as_ref() {
            b"ftyp" => self.ftyp = Some(bytes),
            b"moov" => self.set_up(at, bytes)?,
            b"moof" => self.fragment(at, bytes)?,
            b"mdat" => self.samples(at, bytes)?,
            // prft and emsg boxes wait for the next fragment. Boxes of other types, such as indexes, have no meaning in
            // a live stream and are dropped.
            _ => WaitingBox::read(kind, &bytes)
                .into_iter()
                .for_each(|front| events::wait(&mut self.front, front)),
        }
        Ok(())
    }

    /// Returns the number of init segments so far, including repeated ones.
    pub(super) fn inits(&self) -> u32 {
        self.inits
    }

    /// Returns the decode time of the next object that is ready to be published.
    pub fn next_time(&self) -> Option<Duration> {
        self.ready.front().map(|object| object.time)
    }

    /// Publishes all objects that are ready.
    ///
    /// # Errors
    /// Fails for the same reasons as [`Self::publish_next`].
    pub fn publish(&mut self) -> Result<(), Error> {
        while self.next_time().is_some() {
            self.publish_next()?;
        }
        Ok(())
    }

    /// Publishes the next object.
    ///
    /// # Errors
    /// Fails if a group of this rendition begins at another time than the group with the same ID of another rendition.
    pub fn publish_next(&mut self) -> Result<(), Error> {
        match self.ready.pop_front() {
            Some(object) => self.write(object),
            None => Ok(()),
        }
    }

    /// Logs and drops the fragments whose samples are missing at the end of the input.
    pub fn finish(&mut self) {
        for fragment in self.waiting.drain(..) {
            let samples: usize = fragment.runs.iter().map(|run| run.samples.len()).sum();
            tracing::warn!(
                samples,
                "the input ends before the samples of the moof box at byte {}: they were dropped",
                fragment.at
            );
        }
    }

    fn set_up(&mut self, at: u64, moov: Bytes) -> Result<(), Error> {
        self.inits = self.inits.saturating_add(1);
        if self.moov.as_ref() == Some(&moov) {
            return Ok(()); // The encoder repeats its init segment.
        }
        let presentation = Presentation::read(self.ftyp.as_deref(), &moov)?;
        if !presentation.is_fragmented {
            return Err(Error::NotFragmented);
        }
        if presentation.tracks.is_empty() {
            return Err(Error::Malformed("a moov box without tracks"));
        }
        // Objects that are ready belong to the tracks of the previous moov box, so they are published first.
        self.publish()?;
        self.finish();
        self.incarnation += 1;
        let before = std::mem::take(&mut self.outputs);
        let next = before.values().map(TrackOutput::next_group).max().unwrap_or(0);
        let leading =
            |is: fn(&super::init::InitTrack) -> bool| presentation.tracks.iter().find(|track| is(track));
        let leader =
            leading(super::init::InitTrack::is_video).or_else(|| leading(super::init::InitTrack::is_sound));
        self.leader = leader.or(presentation.tracks.first()).map(|track| track.id);
        self.group = next;
        for track in &presentation.tracks {
            let packaging = packaging(self.rendition.packaging(), track);
            let name = self.rendition.name(self.incarnation, &packaging.track(track.id));
            let published = self.broadcast.create(&name, Properties::default())?;
            let has_groups = track.is_video() || self.leader == Some(track.id);
            let mut output = TrackOutput::new(published, track, packaging, has_groups);
            output.number_groups_from(next);
            self.outputs.insert(track.id, output);
        }
        if self.incarnation > 1 {
            tracing::info!(
                "the input has a new init segment at byte {at}: the tracks continue as {}",
                self.rendition.name(self.incarnation, "*")
            );
        }
        self.write_init(&presentation)?;
        self.rendition.describe(&presentation, self.incarnation)?;
        for mut output in before.into_values() {
            output.close();
            self.broadcast.remove(&output.track);
        }
        self.moov = Some(moov);
        self.note_ends(&presentation.runs);
        if !presentation.runs.is_empty() {
            let front = self.take_waiting(&presentation.runs);
            let runs = presentation.runs;
            self.wait(Fragment { moof: Bytes::new(), at, sequence: 0, runs, front, is_table: true })?;
        }
        Ok(())
    }

    /// Publishes the init segment and the catalog in moq-pub's format.
    fn write_init(&mut self, presentation: &Presentation) -> Result<(), Error> {
        let name = self.rendition.name(self.incarnation, INIT);
        if let Some(init) = &mut self.init {
            if self.incarnation > 1 {
                let new = self.broadcast.create(&name, Properties::default())?;
                self.broadcast.remove(&std::mem::replace(init, new));
            }
            init.open(0, SubgroupId::Zero, 0).write(0, presentation.init.clone());
        }
        if let Some(catalog) = &self.catalog {
            let track = |id: u32| self.rendition.name(self.incarnation, &Packaging::Cmaf.track(id));
            let json =
                moqpub::MoqPubCatalog::new(self.broadcast.namespace(), &presentation.tracks, &name, track);
            let json = serde_json::to_string_pretty(&json)?;
            catalog.open(u64::from(self.incarnation) - 1, SubgroupId::Zero, 0).write(0, json.into());
        }
        Ok(())
    }

    fn fragment(&mut self, at: u64, bytes: Bytes) -> Result<(), Error> {
        if self.moov.is_none() {
            return Err(Error::NoMoov);
        }
        let outputs = &self.outputs;
        let unknown = std::cell::Cell::new(None);
        let moof = Moof::read(&bytes, at, |track| {
            let output = outputs.get(&track);
            unknown.set(unknown.get().or(output.is_none().then_some(track)));
            output.map(|output| TrackFragmentState { defaults: &output.defaults, next: output.next })
        })?;
        if let Some(track) = unknown.get().filter(|track| self.unknown.replace(*track) != Some(*track)) {
            tracing::warn!("fragments of track {track} were dropped: the moov box has no such track");
        }
        self.note_ends(&moof.runs);
        // A fragment without samples, for example one that only signals that a track continues, becomes no object.
        let runs: Vec<_> = moof.runs.into_iter().filter(|run| !run.samples.is_empty()).collect();
        if runs.is_empty() {
            return Ok(());
        }
        let front = self.take_waiting(&runs);
        self.wait(Fragment { moof: bytes, at, sequence: moof.sequence, runs, front, is_table: false })
    }

    /// Records the decode time at which each track's fragment ends. If the track's next fragment states no decode time,
    /// it begins at this time.
    fn note_ends(&mut self, runs: &[SampleRun]) {
        for run in runs {
            if let (Some(output), Some(end)) = (self.outputs.get_mut(&run.track), run.end()) {
                output.next = end;
            }
        }
    }

    /// Removes the waiting prft and emsg boxes that belong to a fragment from `self.front`, and returns them: boxes for
    /// the fragment's tracks, and if it is the leading track's fragment, also boxes for no specific track.
    fn take_waiting(&mut self, runs: &[SampleRun]) -> Vec<WaitingBox> {
        let leader = self.leader;
        let is_about = |front: &WaitingBox| {
            let track = front.track().or(leader);
            runs.iter().any(|run| Some(run.track) == track)
        };
        let (about, mut others): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.front).into_iter().partition(is_about);
        others.retain(|front| front.track().is_none_or(|track| self.outputs.contains_key(&track)));
        self.front = others;
        about
    }

    fn wait(&mut self, fragment: Fragment) -> Result<(), Error> {
        // If `WAITING` fragments already wait for their samples, the offsets of the samples must be wrong. The input is
        // then refused with an error.
        if let Some(oldest) = self.waiting.front().filter(|_| self.waiting.len() >= WAITING) {
            return Err(oldest.outside());
        }
        self.waiting.push_back(fragment);
        self.resolve(None)
    }

    fn samples(&mut self, at: u64, bytes: Bytes) -> Result<(), Error> {
        if self.moov.is_none() && has_content(&bytes) {
            return Err(Error::NotFragmented);
        }
        let end = at + bytes.len() as u64;
        self.data.push((at, bytes));
        self.resolve(Some(end))?;
        // The samples of a fragment may also precede its moof, so the last mdat boxes are kept.
        while self.data.iter().map(|(_, bytes)| bytes.len()).sum::<usize>() > MAX_BOX {
            self.data.remove(0);
        }
        Ok(())
    }

    /// Converts the fragments whose samples have arrived into objects. `end` is the input offset up to which boxes have
    /// arrived.
    fn resolve(&mut self, end: Option<u64>) -> Result<(), Error> {
        let was_waiting = !self.waiting.is_empty();
        while let Some(mut fragment) = self.waiting.pop_front() {
            if !fragment.is_there(&self.data) {
                // If the input is past the stated offsets of the samples, or the mdat boxes have as many bytes as the
                // samples, the stated offsets must be wrong.
                let is_behind = end.is_some_and(|end| fragment.end() <= end);
                if !is_behind && !fragment.fills(&self.data) {
                    self.waiting.push_front(fragment);
                    return Ok(());
                }
                fragment.place_in(&self.data)?;
            }
            self.make(fragment)?;
        }
        if was_waiting {
            self.data.clear();
        }
        Ok(())
    }

    /// Converts a fragment into objects.
    fn make(&mut self, fragment: Fragment) -> Result<(), Error> {
        self.settle(&fragment);
        let find = |at: Range<u64>| fragment.find(&self.data, at);
        let mut parts = Vec::new();
        // Groups of tracks without their own group boundaries begin when a group of the leading track begins.
        let mut cuts = Vec::new();
        let mut runs: Vec<_> = fragment.runs.iter().collect();
        runs.sort_by_key(|run| self.leader != Some(run.track));
        for run in runs {
            let data: Option<Vec<_>> = run.samples.iter().map(|sample| find(sample.at.clone())).collect();
            let data = data.ok_or(Error::Malformed("a sample outside of every mdat"))?;
            let Some(output) = self.outputs.get_mut(&run.track) else { continue };
            let begins = output.beginnings(run, &data);
            let cut: Vec<_> = if fragment.is_table {
                (0..run.samples.len()).collect()
            } else if output.has_groups {
                let is_cut = |at: &usize| *at == 0 || output.is_video && begins[*at];
                (0..run.samples.len()).filter(is_cut).collect()
            } else {
                let at =
                    cuts.iter().map(|time| run.samples.partition_point(|it| output.time(it.decoded) < *time));
                std::iter::once(0).chain(at.filter(|at| *at < run.samples.len())).collect()
            };
            if self.leader == Some(run.track) && output.is_video {
                cuts.extend(cut.iter().skip(1).map(|at| output.time(run.samples[*at].decoded)));
            }
            let mut cut = cut;
            cut.dedup();
            parts.push((run, data, begins, cut));
        }
        let mut objects = Vec::new();
        for (run, data, begins, cut) in &parts {
            objects.extend(self.objects(&fragment, run, data, begins, cut)?);
        }
        objects.sort_by_key(|object| object.time);
        self.ready.extend(objects);
        Ok(())
    }

    /// Chooses an offset for all LOC time stamps when the input's first fragment arrives, so that no sample is before
    /// time 0.
    fn settle(&mut self, fragment: &Fragment) {
        let is_first =
            self.outputs.values().all(|output| output.later == 0 && output.next_group() == self.group);
        let has_loc = self.outputs.values().any(|output| output.packaging == Packaging::Loc);
        let first =
            fragment.runs.first().and_then(|run| Some((self.outputs.get(&run.track)?, run.samples.first()?)));
        let Some((output, sample)) = first.filter(|_| is_first && has_loc && self.ready.is_empty()) else {
            return;
        };
        let early = |output: &TrackOutput| output.edit as f64 / f64::from(output.timescale);
        let most = self.outputs.values().map(early).fold(0.0, f64::max);
        if output.time(sample.decoded).as_secs_f64() < most {
            for output in self.outputs.values_mut() {
                output.later = (most * f64::from(output.timescale)).ceil() as u64;
            }
        }
    }

    fn objects(
        &self,
        fragment: &Fragment,
        run: &SampleRun,
        data: &[Bytes],
        begins: &[bool],
        cut: &[usize],
    ) -> Result<Vec<PublishedObject>, Error> {
        let Some(output) = self.outputs.get(&run.track) else { return Ok(Vec::new()) };
        let parts = cut
            .iter()
            .enumerate()
            .map(|(at, start)| *start..cut.get(at + 1).copied().unwrap_or(run.samples.len()));
        let parts: Vec<_> = match output.packaging {
            Packaging::Cmaf => parts.collect(),
            // LOC objects of empty samples are left out, because a decoder gets nothing from them.
            Packaging::Loc => {
                (0..data.len()).filter(|at| !data[*at].is_empty()).map(|at| at..at + 1).collect()
            }
        };
        let aux = run.aux.find(run.samples.len(), output.iv_size, |at| fragment.find(&self.data, at));
        let as_it_is =
            fragment.as_it_is(&self.data).filter(|_| parts.len() == 1 && run.is_plain && output.later == 0);
        let mut objects = Vec::new();
        for part in parts {
            let first = &run.samples[part.start];
            let is_first = part.start == 0;
            // A decoder can start at any sample of audio, so no fragment of audio has to be divided where a group
            // begins.
            let begins = output.has_groups && begins[part.start] && (output.is_video || is_first);
            let front = fragment.front.iter().filter(|_| is_first);
            let is_leader = self.leader == Some(run.track);
            let front: Vec<_> =
                front.filter(|it| it.track().map_or(is_leader, |track| track == run.track)).collect();
            let later = output.later as f64 / f64::from(output.timescale);
            let marks = front.iter().filter_map(|it| it.mark(first.presented(), output.timescale, later));
            let marks: Vec<_> = marks.collect();
            let wall = marks.iter().find_map(TimelineRecord::wall);
            let marks = marks.into_iter();
            let marks = marks.filter(|_| is_leader && self.rendition.is_best()).collect();
            let in_front: Vec<_> = front.iter().map(|front| &front.raw[..]).collect();
            objects.push(PublishedObject {
                track: run.track,
                begins,
                need: FragmentNeed::classify(begins, &run.samples[part.clone()]),
                samples: part.len(),
                time: output.time(first.decoded),
                seconds: output.presented(first) as f64 / f64::from(output.timescale),
                marks,
                wall,
                payload: match (output.packaging, &as_it_is) {
                    (Packaging::Loc, _) => ObjectPayload::Sample(first.clone(), data[part.start].clone()),
                    (Packaging::Cmaf, Some(whole)) => {
                        ObjectPayload::Fragment(behind(&in_front, whole.clone()))
                    }
                    (Packaging::Cmaf, None) => {
                        let later = output.later;
                        let data = &data[part.clone()];
                        let whole = run.write(part, data, aux.as_ref(), fragment.sequence, later)?;
                        ObjectPayload::Fragment(behind(&in_front, whole))
                    }
                },
            });
        }
        Ok(objects)
    }

    fn write(&mut self, object: PublishedObject) -> Result<(), Error> {
        let is_leader = self.leader == Some(object.track);
        let output = self.outputs.get_mut(&object.track);
        let output = output.ok_or(Error::Malformed("a fragment of an unknown track"))?;
        let mut begins = object.begins;
        let mut number = None;
        if let Some(replica) = &mut self.replica {
            let wall = object.wall.filter(|_| is_leader);
            replica.utc_ms = wall.map_or(replica.utc_ms, |wall| wall as f64 - object.seconds * 1000.0);
            number = begins.then(|| replica.group(object.seconds));
            begins = number.is_some_and(|number| output.is_beginning_of(number));
            replica.has_begun |= begins && is_leader;
            if !output.has_groups && !replica.has_begun {
                return Ok(());
            }
        }
        if !begins && !output.is_open(object.samples) {
            return Ok(());
        }
        if begins {
            if output.is_video {
                self.rendition.begins(number.unwrap_or(output.next_group()), object.time)?;
            }
            let group = output.begin(number);
            if is_leader {
                let is_new = group != self.group;
                self.group = group;
                self.outputs.values_mut().filter(|it| is_new && !it.has_groups).for_each(TrackOutput::close);
            }
        }
        let Some(output) = self.outputs.get_mut(&object.track) else { return Ok(()) };
        let payload = match object.payload {
            ObjectPayload::Fragment(whole) => whole,
            ObjectPayload::Sample(sample, bytes) => output.loc(&sample, output.is_new_group(), &bytes)?,
        };
        let place = output.write(self.cut, object.need, self.group, payload);
        for mark in object.marks {
            let described = self.timelines.add(&self.broadcast, mark, object.seconds, place)?;
            described.map(|track| self.rendition.add_timeline(track)).transpose()?;
        }
        Ok(())
    }
}

impl Fragment {
    /// Returns the byte offset in the input at which the fragment's last sample ends.
    fn end(&self) -> u64 {
        self.runs.iter().flat_map(|run| &run.samples).map(|sample| sample.at.end).max().unwrap_or(0)
    }

    /// Reports whether all samples of the fragment have arrived.
    fn is_there(&self, data: &[(u64, Bytes)]) -> bool {
        let mut samples = self.runs.iter().flat_map(|run| &run.samples);
        samples.all(|sample| find(data, sample.at.clone()).is_some())
    }

    /// Returns the bytes at an offset range of the input, from an mdat box or from the moof box itself.
    fn find(&self, data: &[(u64, Bytes)], at: Range<u64>) -> Option<Bytes> {
        let in_moof = || slice(&self.moof, at.start.checked_sub(self.at)?, at.end.checked_sub(self.at)?);
        find(data, at.clone()).or_else(in_moof)
    }

    /// Reports whether the mdat boxes after the fragment have exactly as many bytes as the fragment's samples.
    fn fills(&self, data: &[(u64, Bytes)]) -> bool {
        let wanted: u64 = self.runs.iter().map(SampleRun::bytes).sum();
        let there: usize = self.bodies(data).map(|(_, body)| body).sum();
        !self.is_table && wanted > 0 && there as u64 == wanted
    }

    /// Returns the input offsets and the lengths of the bodies of the mdat boxes after the fragment.
    fn bodies<'a>(&self, data: &'a [(u64, Bytes)]) -> impl Iterator<Item = (u64, usize)> + use<'a> {
        let from = self.at;
        data.iter().filter(move |(at, _)| *at > from).filter_map(|(at, bytes)| {
            let body = Child::first(bytes)?.body.len();
            Some((at + (bytes.len() - body) as u64, body))
        })
    }

    /// Corrects the offsets of samples if the samples are not at the input offsets that the fragment states. That works
    /// only if a single mdat follows, with exactly as many bytes as the samples. For example, the offsets are wrong in
    /// an input that was cut out of a larger file: they count from the start of the larger file.
    fn place_in(&mut self, data: &[(u64, Bytes)]) -> Result<(), Error> {
        let bodies: Vec<_> = self.bodies(data).filter(|(_, length)| *length > 0).collect();
        let (true, [(begins, _)]) = (self.fills(data), &bodies[..]) else {
            return Err(self.outside());
        };
        let mut at = *begins;
        for run in &mut self.runs {
            run.is_plain = false;
            at = run.place(at);
        }
        Ok(())
    }

    fn outside(&self) -> Error {
        Error::Outside { at: self.at, track: self.runs.first().map_or(0, |run| run.track) }
    }

    /// Returns the fragment and its mdat unchanged, if the mdat follows directly and its body begins with the samples.
    /// Returns `None` if the fragment has to be rewritten.
    fn as_it_is(&self, data: &[(u64, Bytes)]) -> Option<Bytes> {
        let [run] = &self.runs[..] else { return None };
        let behind = self.at + self.moof.len() as u64;
        let (at, mdat) = data.iter().find(|(at, _)| *at == behind)?;
        let end = at + mdat.len() as u64;
        // Players in browsers read the samples from the start of the mdat's body, and ignore the offset in the
        // fragment.
        let begins = run.samples.first().is_some_and(|first| first.at.start == at + HEADER as u64);
        let is_whole = begins && run.samples.iter().all(|sample| sample.at.end <= end);
        // A box with a 64-bit size, or with size 0 (to the end of the input), has to be rewritten.
        let is_short = |bytes: &Bytes| bytes.first_chunk().is_some_and(|size| u32::from_be_bytes(*size) > 1);
        (run.is_plain && is_whole && is_short(&self.moof) && is_short(mdat))
            .then(|| [&self.moof[..], mdat].concat().into())
    }
}

/// Returns `boxes`, followed by `fragment`.
fn behind(boxes: &[&[u8]], fragment: Bytes) -> Bytes {
    match boxes {
        [] => fragment,
        _ => [&boxes.concat()[..], &fragment].concat().into(),
    }
}

/// Returns the bytes at an offset range of the input from the mdat boxes.
fn find(data: &[(u64, Bytes)], at: Range<u64>) -> Option<Bytes> {
    data.iter().find_map(|(begins, bytes)| {
        slice(bytes, at.start.checked_sub(*begins)?, at.end.checked_sub(*begins)?)
    })
}

fn slice(bytes: &Bytes, start: u64, end: u64) -> Option<Bytes> {
    let start = usize::try_from(start).ok()?;
    let end = usize::try_from(end).ok()?;
    (start <= end && end <= bytes.len()).then(|| bytes.slice(start..end))
}
