//! Movie fragments: reads the samples of a moof, locates their data, and writes new fragments.
//!
//! A fragment is passed on unchanged if its meaning does not depend on other parts of the file. It then has one track
//! with a decode time, whose samples are listed in one trun at offsets relative to the moof. Any other fragment is
//! rewritten, as a moof and an mdat for each track and each group.

use std::ops::Range;

use bytes::Bytes;
use mp4_atom::{Atom, Tfdt, Tfhd, Trex, Trun};

use super::Error;
use super::aux::{Aux, SampleAuxInfo};
use super::boxes::{Child, HEADER, NumberReader, boxed, child, children, full};

/// Largest number of samples of a fragment. A few bytes can declare far more samples, but no live stream has that many
/// in one fragment.
const MAX_SAMPLES: usize = 1 << 20;
/// The UUID of the Smooth Streaming box (tfxd) that takes the place of tfdt.
const TFXD: [u8; 16] =
    [0x6d, 0x1d, 0x9b, 0x05, 0x42, 0xd5, 0x44, 0xe6, 0x80, 0xe2, 0x14, 0x1d, 0xaf, 0xf7, 0x57, 0xb2];

/// One media sample, such as a coded picture. Lists of samples are in decoding order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct MediaSample {
    /// Sample flags (ISO/IEC 14496-12, 8.8.3.1).
    pub flags: u32,
    /// Decode time and duration, in units of the track's timescale.
    pub decoded: u64,
    pub duration: u32,
    /// Presentation time minus decode time, in units of the track's timescale.
    pub offset: i64,
    /// The byte range of the sample's data in the input.
    pub at: Range<u64>,
}

impl MediaSample {
    /// Returns the presentation time without the track's edit list, in units of the track's timescale.
    pub fn presented(&self) -> i128 {
        i128::from(self.decoded) + i128::from(self.offset)
    }
}

/// The samples that one traf box describes.
#[derive(Clone, Debug, Default)]
pub(super) struct SampleRun {
    pub track: u32,
    /// Index of the samples' sample entry, from 1 on.
    pub description: u32,
    pub samples: Vec<MediaSample>,
    /// Whether the fragment can be passed on unchanged, provided that it has no other traf box.
    pub is_plain: bool,
    pub aux: Aux,
    /// Boxes that define sample groups (sgpd), and boxes that assign samples to them (sbgp).
    groups: Vec<Bytes>,
    members: Vec<Bytes>,
    /// Boxes of types that this module does not know.
    others: Vec<Bytes>,
}

/// Values that a track's previous boxes imply for its next fragment: the defaults from trex, and the decode time.
pub(super) struct TrackFragmentState<'a> {
    pub defaults: &'a Trex,
    /// Decode time at which the previous fragment ended, in units of the timescale.
    pub next: u64,
}

/// The contents of a moof box.
#[derive(Clone, Debug)]
pub(super) struct Moof {
    pub sequence: u32,
    pub runs: Vec<SampleRun>,
}

impl Moof {
    /// Reads a moof box, which begins at byte `at` of the input. Fragments of tracks that `known` does not return are
    /// skipped.
    ///
    /// # Errors
    /// Fails if a contained box cannot be read, or the moof has too many samples.
    pub fn read<'a>(
        moof: &Bytes,
        at: u64,
        known: impl Fn(u32) -> Option<TrackFragmentState<'a>>,
    ) -> Result<Self, Error> {
        let whole = Child::first(moof).ok_or(Error::Malformed("a moof box without a body"))?;
        let sequence =
            child(whole.body, b"mfhd").and_then(|mfhd| NumberReader(mfhd.full()?.2).u32()).unwrap_or(0);
        let mut runs = Vec::new();
        // Input offset at which the data of the previous traf end. If the next traf states no base offset, its data
        // begin at this offset (ISO/IEC 14496-12, 8.8.7.1).
        let mut end = at;
        let mut count = 0;
        for traf in children(whole.body)?.into_iter().filter(|child| child.kind == *b"traf") {
            let run = read_run(&traf, at, &mut end, &mut count, &known)?;
            runs.extend(run);
        }
        Ok(Self { sequence, runs })
    }
}

fn decoded<T: Atom>(child: &Child<'_>) -> Result<T, Error> {
    T::decode_body(&mut &child.body[..]).map_err(|source| Error::Moof { kind: T::KIND, source })
}

fn read_run<'a>(
    traf: &Child<'_>,
    moof_at: u64,
    end: &mut u64,
    count: &mut usize,
    known: &impl Fn(u32) -> Option<TrackFragmentState<'a>>,
) -> Result<Option<SampleRun>, Error> {
    let parts = children(traf.body)?;
    let tfhd = parts
        .iter()
        .find(|child| child.kind == *b"tfhd")
        .ok_or(Error::Malformed("a traf box without a tfhd"))?;
    let tfhd: Tfhd = decoded(tfhd)?;
    let track = known(tfhd.track_id);
    let defaults = Trex::default();
    let unknown = TrackFragmentState { defaults: &defaults, next: 0 };
    let TrackFragmentState { defaults, next } = track.as_ref().unwrap_or(&unknown);
    let base = match tfhd.base_data_offset {
        Some(offset) => offset,
        None if tfhd.default_base_is_moof => moof_at,
        None => *end,
    };
    let tfdt = parts.iter().find(|child| child.kind == *b"tfdt").map(decoded::<Tfdt>).transpose()?;
    let time = tfdt.as_ref().map(|tfdt| tfdt.base_media_decode_time);
    let time = time.or_else(|| parts.iter().find_map(smooth_time)).unwrap_or(*next);
    // Players in browsers read only the first trun box of a traf.
    let is_listed_once = parts.iter().filter(|child| child.kind == *b"trun").count() == 1;
    let mut run = SampleRun {
        track: tfhd.track_id,
        description: tfhd
            .sample_description_index
            .unwrap_or(defaults.default_sample_description_index)
            .max(1),
        is_plain: tfhd.default_base_is_moof
            && tfhd.base_data_offset.is_none()
            && tfdt.is_some()
            && is_listed_once,
        ..SampleRun::default()
    };
    let mut cursor = FragmentReader { decoded: time, at: base };
    for part in &parts {
        let raw = Bytes::copy_from_slice(part.whole);
        match &part.kind {
            b"tfhd" | b"tfdt" => {}
            b"trun" => run.add(&decoded::<Trun>(part)?, &tfhd, defaults, base, &mut cursor, count)?,
            b"sgpd" => run.groups.push(raw),
            b"sbgp" => run.members.push(raw),
            _ if run.aux.take(part, base) => {}
            _ => run.others.push(raw),
        }
    }
    *end = cursor.at;
    Ok(track.is_some().then_some(run))
}

/// Returns the decode time in the tfxd box of a Smooth Streaming fragment.
fn smooth_time(part: &Child<'_>) -> Option<u64> {
    let mut body = NumberReader(part.body.strip_prefix(&TFXD)?);
    let is_long = body.u32()? >> 24 == 1;
    body.word(is_long).filter(|_| part.kind == *b"uuid")
}

/// The decode time and the input offset of the next sample to be read.
struct FragmentReader {
    decoded: u64,
    at: u64,
}

impl SampleRun {
    /// Makes an empty list of samples for a track and a sample entry.
    pub fn new(track: u32, description: u32) -> Self {
        Self { track, description, ..Self::default() }
    }

    fn add(
        &mut self,
        trun: &Trun,
        tfhd: &Tfhd,
        defaults: &Trex,
        base: u64,
        cursor: &mut FragmentReader,
        count: &mut usize,
    ) -> Result<(), Error> {
        const OUTSIDE: Error = Error::Malformed("a trun box with an impossible offset of its samples");
        if let Some(offset) = trun.data_offset {
            cursor.at = base.checked_add_signed(offset.into()).ok_or(OUTSIDE)?;
        }
        *count = count.saturating_add(trun.samples.len());
        if *count > MAX_SAMPLES {
            return Err(Error::Malformed("a moof box with more than a million samples"));
        }
        self.aux.begins_run(self.samples.len());
        for entry in &trun.samples {
            let size = entry.size.or(tfhd.default_sample_size).unwrap_or(defaults.default_sample_size);
            let duration = entry.duration.or(tfhd.default_sample_duration);
            let duration = duration.unwrap_or(defaults.default_sample_duration);
            let end = cursor.at.checked_add(size.into()).ok_or(OUTSIDE)?;
            self.samples.push(MediaSample {
                flags: entry.flags.or(tfhd.default_sample_flags).unwrap_or(defaults.default_sample_flags),
                decoded: cursor.decoded,
                duration,
                offset: entry.cts.unwrap_or(0),
                at: cursor.at..end,
            });
            cursor.decoded = cursor.decoded.saturating_add(duration.into());
            cursor.at = end;
        }
        Ok(())
    }

    /// Returns the decode time at which the last sample ends, in units of the track's timescale.
    pub fn end(&self) -> Option<u64> {
        self.samples.last().map(|last| last.decoded.saturating_add(last.duration.into()))
    }

    /// Returns the total size of the samples in bytes.
    pub fn bytes(&self) -> u64 {
        self.samples.iter().map(|sample| sample.at.end - sample.at.start).sum()
    }

    /// Sets the input offsets of the samples as if their data followed each other from input offset `at` on, whatever
    /// the boxes say. Returns the offset at which the last sample ends.
    pub fn place(&mut self, mut at: u64) -> u64 {
        for sample in &mut self.samples {
            let end = at + (sample.at.end - sample.at.start);
            sample.at = at..end;
            at = end;
        }
        at
    }

    /// Writes the samples whose indices are in the range `part` as a new fragment, with `later` added to their decode
    /// times.
    ///
    /// # Errors
    /// Fails if the samples are larger than a fragment can be.
    pub fn write(
        &self,
        part: Range<usize>,
        data: &[Bytes],
        aux: Option<&SampleAuxInfo>,
        sequence: u32,
        later: u64,
    ) -> Result<Bytes, Error> {
        let samples = &self.samples[part.clone()];
        let length: usize = data.iter().map(Bytes::len).sum();
        let begins = samples.first().map_or(0, |sample| sample.decoded).saturating_add(later);
        let is_whole = part.len() == self.samples.len();
        let aux = aux.map(|aux| aux.write(part.clone())).unwrap_or_default();
        let tfhd = [self.track.to_be_bytes(), self.description.to_be_bytes()].concat();
        // The tfhd flags are sample-description-index-present and default-base-is-moof.
        let mut traf = full(b"tfhd", 0, 0x02_0002, &tfhd);
        traf.extend(full(b"tfdt", 1, 0, &begins.to_be_bytes()));
        self.groups.iter().for_each(|group| traf.extend_from_slice(group));
        self.members.iter().for_each(|members| traf.extend(slice_members(members, &part)));
        // Boxes of unknown types may describe each sample, so they are kept only if the new fragment has all samples of
        // the traf. If all of them are uuid boxes, the fragment with the first sample also keeps them.
        if is_whole || part.start == 0 && self.others.iter().all(|other| other[4..HEADER] == *b"uuid") {
            self.others.iter().for_each(|other| traf.extend_from_slice(other));
        }
        let mfhd = full(b"mfhd", 0, 0, &sequence.to_be_bytes());
        let trun_length = HEADER + 4 + 8 + 16 * samples.len();
        // The trun box states the offset of the data, so the offset is computed before the boxes are written. It is the
        // total length of the headers of moof and traf, and of all boxes before the data.
        let before = 2 * HEADER + mfhd.len() + traf.len();
        let size = before + aux.length() + trun_length;
        traf.extend(aux.boxes(before));
        traf.extend(trun(samples, size + HEADER)?);
        let moof = boxed(b"moof", &[mfhd, boxed(b"traf", &traf)].concat());
        let size =
            u32::try_from(HEADER + length).map_err(|_| Error::Malformed("a fragment of more than 4 GiB"))?;
        let mut whole = moof;
        whole.reserve(HEADER + length);
        whole.extend_from_slice(&size.to_be_bytes());
        whole.extend_from_slice(b"mdat");
        data.iter().for_each(|sample| whole.extend_from_slice(sample));
        Ok(whole.into())
    }
}

/// Writes a trun box that states every field for each sample.
fn trun(samples: &[MediaSample], data: usize) -> Result<Vec<u8>, Error> {
    const LARGE: Error = Error::Malformed("a sample that is too large for a fragment");
    // The flags announce the data offset, and for each sample its duration, size, flags and composition offset.
    const FLAGS: u32 = 0x0f01;
    let is_signed = samples.iter().all(|sample| i32::try_from(sample.offset).is_ok());
    let mut body = Vec::with_capacity(8 + 16 * samples.len());
    body.extend_from_slice(&u32::try_from(samples.len()).map_err(|_| LARGE)?.to_be_bytes());
    body.extend_from_slice(&i32::try_from(data).map_err(|_| LARGE)?.to_be_bytes());
    for sample in samples {
        let size = u32::try_from(sample.at.end - sample.at.start).map_err(|_| LARGE)?;
        body.extend_from_slice(&sample.duration.to_be_bytes());
        body.extend_from_slice(&size.to_be_bytes());
        body.extend_from_slice(&sample.flags.to_be_bytes());
        let offset = if is_signed {
            i32::try_from(sample.offset).map_err(|_| LARGE)?.to_be_bytes()
        } else {
            u32::try_from(sample.offset.max(0)).map_err(|_| LARGE)?.to_be_bytes()
        };
        body.extend_from_slice(&offset);
    }
    Ok(full(b"trun", u8::from(is_signed), FLAGS, &body))
}

/// Returns an sbgp box with the entries for the samples whose indices are in the range `part`. Entries that cannot be
/// read are left out.
fn slice_members(sbgp: &[u8], part: &Range<usize>) -> Vec<u8> {
    let sliced = || {
        let whole = Child::first(sbgp)?;
        let (version, flags, rest) = whole.full()?;
        let mut numbers = NumberReader(rest);
        let head = numbers.take(if version == 1 { 8 } else { 4 })?.to_vec();
        let mut runs = Vec::new();
        let mut at = 0_usize;
        for _ in 0..numbers.u32()? {
            let count = numbers.u32()? as usize;
            let group = numbers.u32()?;
            let end = at.saturating_add(count);
            let within = end.min(part.end).saturating_sub(at.max(part.start));
            if within > 0 {
                runs.push([u32::try_from(within).ok()?.to_be_bytes(), group.to_be_bytes()].concat());
            }
            at = end;
        }
        let count = u32::try_from(runs.len()).ok()?.to_be_bytes();
        Some(full(b"sbgp", version, flags, &[head, count.to_vec(), runs.concat()].concat()))
    };
    sliced().unwrap_or_default()
}
