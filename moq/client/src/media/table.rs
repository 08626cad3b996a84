//! Samples that the tables of a moov box list (ISO/IEC 14496-12, 8.6 and 8.7). Some muxers list the samples that
//! precede the first fragment in the moov box, instead of writing an empty moov.

use std::collections::BTreeSet;

use mp4_atom::{Atom, Co64, Ctts, Stco, Stsc, Stss, Stsz, StszSamples, Stts};

use super::Error;
use super::boxes::{Child, child, descendant};
use super::fragment::{MediaSample, SampleRun};

/// Largest number of samples that a track's tables may list.
const MAX_SAMPLES: u32 = 1 << 20;
/// Sample flags of a sync sample, and of a sample that is not a sync sample.
const SYNC: u32 = 0x0200_0000;
const NON_SYNC: u32 = 0x0101_0000;

/// Returns the samples that a trak box lists, split where their sample entry changes.
///
/// # Errors
/// Fails if the tables contradict each other.
pub(super) fn samples(trak: &Child<'_>, track: u32) -> Result<Vec<SampleRun>, Error> {
    const WRONG: Error = Error::Malformed("a moov box whose lists of samples do not agree");
    let Some(stbl) = descendant(trak.body, &[b"mdia", b"minf", b"stbl"]) else { return Ok(Vec::new()) };
    let Some(sizes) = table::<Stsz>(&stbl, b"stsz")? else { return Ok(Vec::new()) };
    let count = match &sizes.samples {
        StszSamples::Identical { count, .. } => *count,
        StszSamples::Different { sizes } => u32::try_from(sizes.len()).map_err(|_| WRONG)?,
    };
    if count == 0 {
        return Ok(Vec::new());
    }
    if count > MAX_SAMPLES {
        return Err(Error::Malformed("a moov box with more than a million samples of a track"));
    }
    let size = |sample: u32| match &sizes.samples {
        StszSamples::Identical { size, .. } => Some(*size),
        StszSamples::Different { sizes } => sizes.get(sample as usize).copied(),
    };
    let durations = table::<Stts>(&stbl, b"stts")?.map(|stts| stts.entries).unwrap_or_default();
    let mut durations = durations
        .iter()
        .flat_map(|entry| std::iter::repeat_n(entry.sample_delta, entry.sample_count as usize));
    let offsets = table::<Ctts>(&stbl, b"ctts")?.map(|ctts| ctts.entries).unwrap_or_default();
    let mut offsets = offsets
        .iter()
        .flat_map(|entry| std::iter::repeat_n(entry.sample_offset, entry.sample_count as usize));
    let sync: Option<BTreeSet<u32>> =
        table::<Stss>(&stbl, b"stss")?.map(|stss| stss.entries.into_iter().collect());
    let chunks = match table::<Co64>(&stbl, b"co64")? {
        Some(co64) => co64.entries,
        None => table::<Stco>(&stbl, b"stco")?.ok_or(WRONG)?.entries.into_iter().map(u64::from).collect(),
    };
    let runs_of_chunks = table::<Stsc>(&stbl, b"stsc")?.ok_or(WRONG)?.entries;
    let mut runs = Vec::<SampleRun>::new();
    let mut sample = 0;
    let mut decoded = 0_u64;
    let mut described = runs_of_chunks.iter().peekable();
    let mut current = None;
    for (number, mut at) in (1_u32..).zip(chunks) {
        // An stsc entry applies to all chunks from its first chunk up to the first chunk of the next entry.
        while let Some(next) = described.next_if(|next| next.first_chunk <= number) {
            current = Some(next);
        }
        let current = current.ok_or(WRONG)?;
        if runs.last().is_none_or(|run| run.description != current.sample_description_index) {
            runs.push(SampleRun::new(track, current.sample_description_index));
        }
        let run = runs.last_mut().ok_or(WRONG)?;
        for _ in 0..current.samples_per_chunk.min(count - sample) {
            let end = at.checked_add(size(sample).ok_or(WRONG)?.into()).ok_or(WRONG)?;
            let duration = durations.next().unwrap_or(0);
            // Without an stss box, every sample is a sync sample.
            let is_sync = sync.as_ref().is_none_or(|sync| sync.contains(&(sample + 1)));
            let flags = if is_sync { SYNC } else { NON_SYNC };
            let offset = offsets.next().unwrap_or(0);
            run.samples.push(MediaSample { flags, decoded, duration, offset, at: at..end });
            decoded = decoded.saturating_add(duration.into());
            at = end;
            sample += 1;
        }
    }
    Ok(runs)
}

fn table<T: Atom>(stbl: &Child<'_>, kind: &[u8; 4]) -> Result<Option<T>, Error> {
    let found = child(stbl.body, kind).map(|found| T::decode_body(&mut &found.body[..]));
    found.transpose().map_err(|source| Error::Moov { kind: T::KIND, source })
}
