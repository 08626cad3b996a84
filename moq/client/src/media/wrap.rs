//! Converts LOC objects into fragmented MP4, for players that read MP4.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use millrace_moq::{loc, msf};
use mp4_atom::{
    Codec, Dinf, Dref, Encode, FourCC, Ftyp, Hdlr, Mdat, Mdhd, Mdia, Mfhd, Minf, Moof, Moov, Mvex, Mvhd,
    Smhd, Stbl, Stsd, Tfdt, Tfhd, Tkhd, Traf, Trak, Trex, Trun, TrunEntry, Url, Vmhd,
};

use super::{Error, codec};

/// Flags of a sample with which a decoder cannot start, and of one with which it can.
const DELTA: u32 = 0x0101_0000;
const KEY: u32 = 0x0200_0000;
/// Largest time between decoding and presentation of a video frame, in seconds. Encoders do not reorder frames further
/// than this.
const EARLY_SECONDS: u64 = 1;
/// Length of the header of an mdat box, in bytes.
const HEADER: usize = 8;

/// A converter that makes MP4 fragments from the objects of a LOC track.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wrap {
    id: u32,
    is_video: bool,
    timescale: u32,
    sequence: u32,
    /// Decode and presentation time of the last converted sample, in units of the timescale.
    last: Option<(u64, u64)>,
    /// Shortest time between two successive samples so far. It is used as the samples' duration, which LOC does not
    /// carry.
    duration: Option<u32>,
}

impl Wrap {
    /// Makes a converter to fragments with the track ID `id`, and the init segment for these fragments. Returns `None`
    /// if the catalog lacks a field that the track needs.
    ///
    /// # Errors
    /// Fails if the decoder's configuration in the catalog cannot be read.
    pub(super) fn for_track(
        catalog: &msf::MsfCatalog,
        track: &msf::MsfTrack,
        id: u32,
    ) -> Result<Option<(Self, Bytes)>, Error> {
        let config = catalog.init_data(track).map(|config| STANDARD.decode(config)).transpose();
        let config = config.map_err(|_| Error::Malformed("a decoder's configuration that is not base64"))?;
        let Some(entry) = codec::entry(track, config.as_deref()).map_err(Error::Configuration)? else {
            return Ok(None);
        };
        let is_video = codec::visual(&entry).is_some();
        let timescale =
            track.timescale.filter(|timescale| *timescale > 0).unwrap_or(loc::MICROSECONDS as u32);
        let wrap = Self { id, is_video, timescale, sequence: 0, last: None, duration: None };
        let init = wrap.init(entry)?;
        Ok(Some((wrap, init)))
    }

    /// Makes a fragment of an object. `begins_group` marks its sample as a key frame.
    ///
    /// # Errors
    /// Fails if the payload is not LOC, or MP4 cannot express its time stamp or size.
    pub fn fragment(&mut self, begins_group: bool, payload: &[u8]) -> Result<Bytes, Error> {
        const TIME: Error = Error::Malformed("a time stamp that MP4 cannot express");
        let object = loc::LocSample::parse(payload)?;
        let time = u128::from(object.timestamp) * u128::from(self.timescale) / u128::from(object.timescale);
        let presented = u64::try_from(time).ok().filter(|time| i64::try_from(*time).is_ok()).ok_or(TIME)?;
        let decoded = self.decoded(begins_group, presented);
        if let Some((_, before)) = self.last.filter(|(_, before)| *before != presented) {
            let gap = u32::try_from(before.abs_diff(presented)).unwrap_or(u32::MAX);
            self.duration = Some(self.duration.map_or(gap, |shortest| shortest.min(gap)));
        }
        self.last = Some((decoded, presented));
        self.sequence = self.sequence.wrapping_add(1);
        let entry = TrunEntry {
            duration: self.duration,
            size: Some(
                u32::try_from(object.sample.len())
                    .map_err(|_| Error::Malformed("a sample of more than 4 GiB"))?,
            ),
            flags: Some(if begins_group || !self.is_video { KEY } else { DELTA }),
            cts: Some(
                i64::try_from(presented).map_err(|_| TIME)? - i64::try_from(decoded).map_err(|_| TIME)?,
            ),
        };
        self.encode(decoded, entry, object.sample)
    }

    /// Returns the decode time of a sample, which LOC does not carry. For audio it is the presentation time. For video,
    /// frames may be reordered, so the decode time is early enough that no later sample is presented before it is
    /// decoded.
    fn decoded(&self, begins_group: bool, presented: u64) -> u64 {
        if !self.is_video {
            return presented;
        }
        let early = presented.saturating_sub(u64::from(self.timescale) * EARLY_SECONDS);
        match self.last {
            // A publisher that restarts its clock begins a group at an earlier presentation time. The decode times then
            // restart, too.
            Some((last, _)) if !begins_group || presented > last => early.max(last + 1),
            _ => early,
        }
    }

    fn encode(&self, decoded: u64, entry: TrunEntry, sample: &[u8]) -> Result<Bytes, Error> {
        let moof = |data: usize| {
            let moof = Moof {
                mfhd: Mfhd { sequence_number: self.sequence },
                traf: vec![Traf {
                    tfhd: Tfhd { track_id: self.id, default_base_is_moof: true, ..Tfhd::default() },
                    tfdt: Some(Tfdt { base_media_decode_time: decoded }),
                    trun: vec![Trun { data_offset: Some(data as i32), samples: vec![entry].into() }],
                    ..Traf::default()
                }],
            };
            encoded(&moof)
        };
        // The data offset in the moof depends on the moof's length. The length does not depend on the offset, so the
        // moof is encoded once to measure it.
        let mut fragment = moof(moof(0)?.len() + HEADER)?;
        fragment.extend(encoded(&Mdat { data: sample.to_vec() })?);
        Ok(fragment.into())
    }

    fn init(&self, entry: Codec) -> Result<Bytes, Error> {
        let brands = [b"iso6", b"mp41", b"cmfc"].map(FourCC::new);
        let ftyp = Ftyp { major_brand: brands[0], minor_version: 0, compatible_brands: brands.to_vec() };
        let trex = Trex { track_id: self.id, default_sample_description_index: 1, ..Trex::default() };
        let moov = Moov {
            mvhd: Mvhd {
                timescale: 1000,
                rate: 1.into(),
                volume: 1.into(),
                next_track_id: self.id + 1,
                ..Mvhd::default()
            },
            mvex: Some(Mvex { trex: vec![trex], ..Mvex::default() }),
            trak: vec![self.trak(entry)],
            ..Moov::default()
        };
        Ok([encoded(&ftyp)?, encoded(&moov)?].concat().into())
    }

    fn trak(&self, entry: Codec) -> Trak {
        let (width, height) = codec::visual(&entry).map_or((0, 0), |visual| (visual.width, visual.height));
        let handler = FourCC::new(if self.is_video { b"vide" } else { b"soun" });
        Trak {
            tkhd: Tkhd {
                track_id: self.id,
                enabled: true,
                in_movie: true,
                volume: u8::from(!self.is_video).into(),
                width: width.into(),
                height: height.into(),
                ..Tkhd::default()
            },
            mdia: Mdia {
                mdhd: Mdhd { timescale: self.timescale, language: "und".to_owned(), ..Mdhd::default() },
                hdlr: Hdlr { handler, name: String::new() },
                minf: Minf {
                    vmhd: self.is_video.then(Vmhd::default),
                    smhd: (!self.is_video).then(Smhd::default),
                    dinf: Dinf { dref: Dref { entries: vec![Url::default().into()] } },
                    stbl: Stbl { stsd: Stsd { codecs: vec![entry] }, ..Stbl::default() },
                    ..Minf::default()
                },
            },
            ..Trak::default()
        }
    }
}

fn encoded(part: &impl Encode) -> Result<Vec<u8>, Error> {
    let mut bytes = Vec::new();
    part.encode(&mut bytes).map_err(Error::Write)?;
    Ok(bytes)
}
