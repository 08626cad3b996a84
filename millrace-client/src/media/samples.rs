//! The samples of a fragment.

use std::ops::Range;

use mp4_atom::{Traf, Trex};

use super::Error;

/// One of them, in the order in which they are decoded.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Sample {
    /// ISO/IEC 14496-12, 8.8.3.1.
    pub flags: u32,
    /// When it is decoded and when it is presented, in units of the track's timescale.
    pub decoded: u64,
    pub presented: u64,
    /// Where it is, from the beginning of moof on.
    pub bytes: Range<usize>,
}

/// Of a fragment that has `length` bytes, moof and mdat; `data` is where those of the mdat begin.
pub(super) fn samples(
    traf: &Traf,
    defaults: &Trex,
    data: usize,
    length: usize,
) -> Result<Vec<Sample>, Error> {
    const OUTSIDE: Error = Error::Malformed("a sample that is not in its fragment");
    if traf.tfhd.base_data_offset.is_some() {
        return Err(Error::Malformed(
            "a fragment that says where its samples are in a file: use ffmpeg's cmaf",
        ));
    }
    let begins = traf.tfdt.as_ref().map(|tfdt| tfdt.base_media_decode_time);
    let mut decoded = begins.ok_or(Error::Malformed("a fragment without a time: use ffmpeg's cmaf"))?;
    let mut at = data;
    let mut samples = Vec::new();
    for trun in &traf.trun {
        if let Some(offset) = trun.data_offset {
            at = usize::try_from(offset).map_err(|_| OUTSIDE)?;
        }
        for entry in &trun.samples {
            let size = entry.size.or(traf.tfhd.default_sample_size).unwrap_or(defaults.default_sample_size);
            // So there are not more of them than bytes, whatever trun says.
            if size == 0 {
                return Err(Error::Malformed("a sample without bytes"));
            }
            let end = at.checked_add(size as usize).filter(|end| *end <= length).ok_or(OUTSIDE)?;
            let presented = decoded.checked_add_signed(entry.cts.unwrap_or(0));
            samples.push(Sample {
                flags: flags(&entry, traf, defaults.default_sample_flags),
                decoded,
                presented: presented
                    .ok_or(Error::Malformed("a sample that is presented before the media begins"))?,
                bytes: at..end,
            });
            let duration = entry.duration.or(traf.tfhd.default_sample_duration);
            decoded = decoded.saturating_add(duration.unwrap_or(defaults.default_sample_duration).into());
            at = end;
        }
    }
    Ok(samples)
}

pub(super) fn flags(entry: &mp4_atom::TrunEntry, traf: &Traf, default: u32) -> u32 {
    entry.flags.or(traf.tfhd.default_sample_flags).unwrap_or(default)
}

/// sample_depends_on is 2 (no other), and it is a sync sample.
pub(super) fn is_key(flags: u32) -> bool {
    flags >> 24 & 0x3 == 2 && flags >> 16 & 1 == 0
}

/// sample_is_depended_on is 2 (by no other).
pub(super) fn is_disposable(flags: u32) -> bool {
    flags >> 22 & 0x3 == 2
}
