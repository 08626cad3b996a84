//! Sample auxiliary information: the data that is needed to decrypt each sample (ISO/IEC 23001-7, 7; ISO/IEC 14496-12,
//! 8.7.8).

use std::ops::Range;

use bytes::Bytes;

use super::boxes::{Child, HEADER, NumberReader, full};

/// The UUID of the box in PIFF that has the same body as senc.
const PIFF: [u8; 16] =
    [0xa2, 0x39, 0x4f, 0x52, 0x5a, 0x9b, 0x4f, 0x14, 0xa2, 0x44, 0x6c, 0x42, 0x7c, 0x64, 0x8d, 0xf4];
/// The flag in a senc box that says that its entries list subsamples.
const SUBSAMPLES: u32 = 2;

/// The boxes of a traf that locate or contain sample auxiliary information.
#[derive(Clone, Debug, Default)]
pub(super) struct Aux {
    senc: Option<Bytes>,
    saiz: Option<Bytes>,
    saio: Option<Bytes>,
    /// The byte offset in the input to which the offsets in saio are relative.
    base: u64,
    /// The index in the traf of the first sample of each trun box.
    runs: Vec<usize>,
}

/// The auxiliary information of each sample of a fragment.
#[derive(Clone, Debug)]
pub(super) struct SampleAuxInfo {
    samples: Vec<Bytes>,
    has_subsamples: bool,
}

/// The auxiliary information of those samples that are written into a new fragment.
#[derive(Clone, Debug, Default)]
pub(super) struct WrittenAuxInfo {
    sizes: Vec<u8>,
    data: Vec<u8>,
    has_subsamples: bool,
}

impl Aux {
    /// Stores a box of a traf if it belongs to auxiliary information. Returns whether it does.
    pub fn take(&mut self, part: &Child<'_>, base: u64) -> bool {
        self.base = base;
        let slot = match &part.kind {
            b"senc" => &mut self.senc,
            b"saiz" => &mut self.saiz,
            b"saio" => &mut self.saio,
            b"uuid" if part.body.starts_with(&PIFF) => {
                self.senc.get_or_insert_with(|| Bytes::copy_from_slice(&part.body[PIFF.len()..]));
                return true;
            }
            _ => return false,
        };
        *slot = Some(Bytes::copy_from_slice(part.body));
        true
    }

    /// Records that the next trun box of the traf begins with the sample of this index.
    pub fn begins_run(&mut self, sample: usize) {
        self.runs.push(sample);
    }

    /// Finds the auxiliary information of each of `count` samples. The boxes saiz and saio contain the information's
    /// sizes and its offsets in the input, which `bytes` reads. Without these boxes, the information is read from senc,
    /// with initialization vectors of `iv_size` bytes. Returns `None` if the samples have no auxiliary information.
    pub fn find(
        &self,
        count: usize,
        iv_size: u8,
        bytes: impl Fn(Range<u64>) -> Option<Bytes>,
    ) -> Option<SampleAuxInfo> {
        let flags = self.senc.as_deref().and_then(|senc| NumberReader(senc).u32());
        let by_offset = self.sizes(count).and_then(|sizes| self.read_by_offset(&sizes, bytes));
        let samples = by_offset.or_else(|| self.read_senc(count, iv_size))?;
        // Without senc's flags, an entry that is longer than the initialization vector must contain subsamples.
        let longer = |sample: &Bytes| sample.len() > usize::from(iv_size) && iv_size > 0;
        let has_subsamples =
            flags.map_or_else(|| samples.iter().any(longer), |flags| flags & SUBSAMPLES != 0);
        samples.iter().any(|sample| !sample.is_empty()).then_some(SampleAuxInfo { samples, has_subsamples })
    }

    fn sizes(&self, count: usize) -> Option<Vec<u8>> {
        let mut saiz = NumberReader(self.saiz.as_deref()?);
        // If flag 1 of saiz is set, aux_info_type and aux_info_type_parameter come first, four bytes each.
        if saiz.u32()? & 1 == 1 {
            saiz.take(8)?;
        }
        let default = saiz.u8()?;
        let said = saiz.u32()? as usize;
        let mut sizes = match default {
            // If the default size is 0, the saiz box lists a size for each sample.
            0 => saiz.take(said.min(count))?.to_vec(),
            size => vec![size; said.min(count)],
        };
        sizes.resize(count, 0);
        Some(sizes)
    }

    fn read_by_offset(
        &self,
        sizes: &[u8],
        bytes: impl Fn(Range<u64>) -> Option<Bytes>,
    ) -> Option<Vec<Bytes>> {
        let mut saio = NumberReader(self.saio.as_deref()?);
        let head = saio.u32()?;
        if head & 1 == 1 {
            saio.take(8)?;
        }
        let count = saio.u32()? as usize;
        // saio has one offset for the whole fragment, or one for each trun box.
        if count != 1 && count != self.runs.len() {
            return None;
        }
        let mut samples = Vec::with_capacity(sizes.len());
        let mut at = 0;
        for (sample, size) in sizes.iter().enumerate() {
            if sample == 0 || count > 1 && self.runs.contains(&sample) {
                at = self.base.checked_add(saio.word(head >> 24 == 1)?)?;
            }
            let end = at.checked_add(u64::from(*size))?;
            samples.push(if *size == 0 { Bytes::new() } else { bytes(at..end)? });
            at = end;
        }
        Some(samples)
    }

    fn read_senc(&self, count: usize, iv_size: u8) -> Option<Vec<Bytes>> {
        let senc = self.senc.as_ref()?;
        let mut numbers = NumberReader(senc);
        let flags = numbers.u32()?;
        let said = numbers.u32()? as usize;
        let mut samples = Vec::with_capacity(said.min(count));
        for _ in 0..said.min(count) {
            let before = numbers.0;
            numbers.take(iv_size.into())?;
            if flags & SUBSAMPLES != 0 {
                let subsamples = usize::from(numbers.u16()?);
                numbers.take(6 * subsamples)?;
            }
            samples.push(senc.slice_ref(&before[..before.len() - numbers.0.len()]));
        }
        samples.resize(count, Bytes::new());
        Some(samples)
    }
}

impl SampleAuxInfo {
    /// Copies the auxiliary information of the samples whose indices are in the range `part`, for a new fragment.
    pub fn write(&self, part: Range<usize>) -> WrittenAuxInfo {
        let samples = self.samples.get(part).unwrap_or_default();
        WrittenAuxInfo {
            // The sizes were read from saiz, where each has eight bits.
            sizes: samples.iter().map(|sample| u8::try_from(sample.len()).unwrap_or(u8::MAX)).collect(),
            data: samples.concat(),
            has_subsamples: self.has_subsamples,
        }
    }
}

impl WrittenAuxInfo {
    fn is_none(&self) -> bool {
        self.data.is_empty()
    }

    /// Returns the length in bytes of what [`Self::boxes`] returns.
    pub fn length(&self) -> usize {
        self.boxes(0).len()
    }

    /// Returns the saiz, saio and senc boxes for a traf. The first of them begins `before` bytes after the start of the
    /// moof box.
    pub fn boxes(&self, before: usize) -> Vec<u8> {
        if self.is_none() {
            return Vec::new();
        }
        // There is one size for each sample, and a fragment's number of samples fits into 32 bits.
        let count = u32::try_from(self.sizes.len()).unwrap_or(u32::MAX).to_be_bytes();
        let saiz = full(b"saiz", 0, 0, &[&[0][..], &count, &self.sizes].concat());
        let saio =
            |at: usize| full(b"saio", 0, 0, &[1_u32.to_be_bytes(), (at as u32).to_be_bytes()].concat());
        // saio points at the first entry in senc, which follows senc's header, flags and count.
        let data = before + saiz.len() + saio(0).len() + HEADER + 8;
        let flags = if self.has_subsamples { SUBSAMPLES } else { 0 };
        let senc = full(b"senc", 0, flags, &[&count[..], &self.data].concat());
        [saiz, saio(data), senc].concat()
    }
}

#[cfg(test)]
mod tests {
    use super::super::boxes::{child, children};
    use super::*;

    /// Returns the auxiliary information of two samples, with initialization vectors of eight bytes and one subsample
    /// each.
    fn information() -> Vec<u8> {
        (0..2_u8).flat_map(|sample| [&[sample; 8][..], &[0, 1, 0, 5, 0, 0, 0, 9]].concat()).collect()
    }

    fn take(aux: &mut Aux, boxes: &[u8]) {
        children(boxes).unwrap().iter().for_each(|part| assert!(aux.take(part, 1000)));
    }

    #[test]
    fn sample_encryption_information_is_read_from_saiz_saio_or_senc() {
        let saiz = full(b"saiz", 0, 0, &[16, 0, 0, 0, 2]);
        let saio = full(b"saio", 1, 0, &[&1_u32.to_be_bytes()[..], &50_u64.to_be_bytes()].concat());
        let senc = full(b"senc", 0, SUBSAMPLES, &[&2_u32.to_be_bytes()[..], &information()].concat());
        let whole = Bytes::from(information());
        let input = |range: Range<u64>| {
            let start = range.start.checked_sub(1050)? as usize;
            (start < whole.len()).then(|| whole.slice(start..(range.end - 1050) as usize))
        };
        for boxes in [[&saiz[..], &saio].concat(), senc.clone(), [&saiz[..], &saio, &senc].concat()] {
            let mut aux = Aux::default();
            aux.begins_run(0);
            take(&mut aux, &boxes);
            let found = aux.find(2, 8, input).unwrap();
            assert!(found.has_subsamples);
            let written = found.write(1..2);
            let boxes = written.boxes(100);
            assert_eq!(boxes.len(), written.length());
            let saio = child(&boxes, b"saio").unwrap();
            let at = NumberReader(&saio.full().unwrap().2[4..]).u32().unwrap() as usize;
            assert_eq!(boxes[at - 100..], information()[16..], "the offset is that of the data in senc");
        }
        assert!(Aux::default().find(2, 8, input).is_none());
    }
}
