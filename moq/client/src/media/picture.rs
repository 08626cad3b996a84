//! Inspects a coded picture to find out whether a decoder can start with it. The key frame flags in MP4 are not
//! reliable: some muxers mark no key frame, and some mark every picture.

use mp4_atom::Codec;

use super::entry::SampleEntry;

/// Sample flags: the sample depends on others (sample_depends_on is 1), and the sample is not a sync sample (ISO/IEC
/// 14496-12, 8.8.3.1).
const DEPENDS: u32 = 0x0100_0000;
const NON_SYNC: u32 = 0x0001_0000;

/// Reports whether players treat a sample as a key frame: its flags say neither that it is a non-sync sample, nor that
/// it depends on others.
pub(super) fn is_sync(flags: u32) -> bool {
    flags & (DEPENDS | NON_SYNC) == 0
}

/// Reports whether the flags say that no other sample depends on this one (sample_is_depended_on is 2).
pub(super) fn is_disposable(flags: u32) -> bool {
    flags >> 22 & 0x3 == 2
}

/// The result of inspecting a coded picture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PictureKind {
    /// A decoder can start with this picture.
    Begins,
    /// The picture depends on no other, but a picture after it may depend on one before it. The sample's key frame flag
    /// in MP4 decides whether a decoder can start with the picture.
    AsMarked,
    /// The picture depends on other pictures.
    Needs,
}

/// The coding format of a track's pictures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pictures {
    /// NAL units, each preceded by its length. The number is the size of the length field in bytes.
    H264(usize),
    H265(usize),
    Av1,
    Vp8,
    Vp9,
}

impl Pictures {
    /// Returns the coding format for a sample entry. It is `None` if the pictures are encrypted or of another codec.
    pub fn for_entry(entry: &SampleEntry) -> Option<Self> {
        if entry.protection.is_some() {
            return None;
        }
        Some(match &entry.codec {
            Codec::Avc1(avc1) => Self::H264(usize::from(avc1.avcc.length_size)),
            Codec::Avc3(avc3) => Self::H264(usize::from(avc3.avcc.length_size)),
            Codec::Hvc1(hvc1) => Self::H265(usize::from(hvc1.hvcc.length_size_minus_one & 3) + 1),
            Codec::Hev1(hev1) => Self::H265(usize::from(hev1.hvcc.length_size_minus_one & 3) + 1),
            Codec::Av01(_) => Self::Av1,
            Codec::Vp08(_) => Self::Vp8,
            Codec::Vp09(_) => Self::Vp9,
            _ => return None,
        })
    }

    /// Inspects a coded picture. Returns `None` if it cannot be parsed.
    pub fn judge(self, sample: &[u8]) -> Option<PictureKind> {
        let verdict = |begins| if begins { PictureKind::Begins } else { PictureKind::Needs };
        match self {
            Self::H264(length) => h264(sample, length),
            Self::H265(length) => h265(sample, length),
            Self::Av1 => av1(sample),
            Self::Vp8 => sample.first().map(|first| verdict(first & 1 == 0)),
            Self::Vp9 => vp9(sample).map(verdict),
        }
    }
}

/// Splits a sample into NAL units by the length field in front of each.
fn units(mut sample: &[u8], length: usize) -> impl Iterator<Item = &[u8]> {
    std::iter::from_fn(move || {
        let (size, rest) = sample.split_at_checked(length.clamp(1, 4))?;
        let size = size.iter().fold(0_usize, |size, byte| size << 8 | usize::from(*byte));
        let (unit, rest) = rest.split_at_checked(size)?;
        sample = rest;
        Some(unit)
    })
}

fn h264(sample: &[u8], length: usize) -> Option<PictureKind> {
    let mut recovers = false;
    let mut slices = 0;
    let mut all_intra = true;
    for unit in units(sample, length) {
        let (head, body) = unit.split_first()?;
        // NAL unit types (ITU-T H.264, 7.4.1): 5 is a slice of an IDR picture, 6 is supplemental enhancement
        // information, 1 and 2 are slices of other pictures.
        match head & 0x1f {
            5 => return Some(PictureKind::Begins),
            6 => recovers |= has_recovery_point(body),
            1 | 2 => {
                slices += 1;
                all_intra &= is_intra_slice(body);
            }
            _ => {}
        }
    }
    match (slices, recovers, all_intra) {
        (0, false, _) => None,
        (_, true, _) => Some(PictureKind::Begins),
        (_, false, true) => Some(PictureKind::AsMarked),
        (_, false, false) => Some(PictureKind::Needs),
    }
}

/// Reports whether a supplemental enhancement information unit has a recovery point message (ITU-T H.264, D.1.8).
fn has_recovery_point(mut body: &[u8]) -> bool {
    const RECOVERY_POINT: usize = 6;
    while body.len() > 2 {
        let (Some(kind), Some(size)) = (ff_coded(&mut body), ff_coded(&mut body)) else { return false };
        if kind == RECOVERY_POINT {
            return true;
        }
        body = body.get(size..).unwrap_or_default();
    }
    false
}

/// Reads a number that is coded as a sum of bytes, where 255 means that another byte follows.
fn ff_coded(bytes: &mut &[u8]) -> Option<usize> {
    let mut sum = 0_usize;
    loop {
        let (first, rest) = bytes.split_first()?;
        *bytes = rest;
        sum += usize::from(*first);
        if *first != 0xff {
            return Some(sum);
        }
    }
}

/// Reports whether a slice is intra coded: slice_type is I or SI (ITU-T H.264, 7.4.3).
fn is_intra_slice(body: &[u8]) -> bool {
    let mut bits = Bits { bytes: body, at: 0 };
    let Some(_first_macroblock) = bits.golomb() else { return false };
    bits.golomb().is_some_and(|kind| matches!(kind % 5, 2 | 4))
}

fn h265(sample: &[u8], length: usize) -> Option<PictureKind> {
    // NAL unit types below 32 are slices of pictures. A decoder can start with types 16 to 23 (ITU-T H.265, 7.4.2.2).
    let pictures =
        units(sample, length).filter_map(|unit| Some(unit.first()? >> 1 & 0x3f)).filter(|kind| *kind < 32);
    let begins = pictures.map(|kind| (16..24).contains(&kind)).reduce(|all, this| all && this)?;
    Some(if begins { PictureKind::Begins } else { PictureKind::Needs })
}

/// Reads the uncompressed header of a VP9 frame. Returns whether it is a key frame.
fn vp9(sample: &[u8]) -> Option<bool> {
    let mut bits = Bits { bytes: sample, at: 0 };
    let marker = bits.take(2)?;
    let profile = bits.take(1)? | bits.take(1)? << 1;
    if marker != 2 || profile == 3 && bits.take(1)? != 0 {
        return None;
    }
    // A frame with show_existing_frame only repeats an earlier one, so a decoder cannot start with it.
    let shows_existing = bits.take(1)? == 1;
    Some(!shows_existing && bits.take(1)? == 0)
}

/// Reads the OBUs of an AV1 temporal unit up to the type of its first frame (AV1, 5.3 and 5.9).
fn av1(mut sample: &[u8]) -> Option<PictureKind> {
    const SEQUENCE: u8 = 1;
    const FRAME_HEADER: u8 = 3;
    const FRAME: u8 = 6;
    let mut is_still = false;
    loop {
        let (head, rest) = sample.split_first()?;
        // The two flags in the OBU header are obu_extension_flag, which announces one more byte, and
        // obu_has_size_field.
        let rest = if head & 0x04 == 0 { rest } else { rest.get(1..)? };
        let (size, rest) = if head & 0x02 == 0 { (rest.len(), rest) } else { leb128(rest)? };
        let (unit, behind) = rest.split_at_checked(size)?;
        match head >> 3 & 0x0f {
            // In the sequence header, the three bits of seq_profile precede still_picture.
            SEQUENCE => is_still = unit.first()? >> 3 & 1 == 1,
            FRAME_HEADER | FRAME => {
                let first = unit.first()?;
                // A frame header begins with show_existing_frame (one bit) and frame_type (two bits). Frame type 0 is a
                // key frame.
                let is_key = is_still || first >> 7 == 0 && first >> 5 & 0x3 == 0;
                return Some(if is_key { PictureKind::Begins } else { PictureKind::Needs });
            }
            _ => {}
        }
        sample = behind;
    }
}

fn leb128(bytes: &[u8]) -> Option<(usize, &[u8])> {
    let mut value = 0_usize;
    for at in 0..5 {
        let byte = *bytes.get(at)?;
        value |= usize::from(byte & 0x7f) << (7 * at);
        if byte & 0x80 == 0 {
            return Some((value, &bytes[at + 1..]));
        }
    }
    None
}

/// A reader of a header's bits, the most significant bit of each byte first.
pub(super) struct Bits<'a> {
    pub bytes: &'a [u8],
    /// Number of bits that were read so far.
    pub at: usize,
}

impl Bits<'_> {
    pub fn take(&mut self, count: usize) -> Option<u32> {
        let mut value = 0;
        for _ in 0..count {
            let byte = self.bytes.get(self.at / 8)?;
            value = value << 1 | u32::from(byte >> (7 - self.at % 8) & 1);
            self.at += 1;
        }
        Some(value)
    }

    /// Returns the number of remaining bits.
    pub fn left(&self) -> usize {
        (self.bytes.len() * 8).saturating_sub(self.at)
    }

    /// Reads an unsigned exponential-Golomb number (ue(v), ITU-T H.264, 9.1).
    fn golomb(&mut self) -> Option<u32> {
        let mut zeros = 0;
        while self.take(1)? == 0 {
            zeros += 1;
            if zeros > 31 {
                return None;
            }
        }
        Some((1_u32 << zeros) - 1 + self.take(zeros)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn unit(bytes: &[u8]) -> Vec<u8> {
        [&(bytes.len() as u32).to_be_bytes()[..], bytes].concat()
    }

    #[test]
    fn mp4_sample_is_a_key_frame_unless_flagged_non_sync_or_dependent() {
        for (flags, expected) in [
            (0x0200_0000, true),
            (0x0000_0000, true),
            (0x0001_0000, false),
            (0x0101_0000, false),
            (0x0100_0000, false),
            (0x0201_0000, false),
        ] {
            assert_eq!(is_sync(flags), expected, "{flags:#x}");
        }
        assert!(is_disposable(0x0181_0000) && !is_disposable(0x0101_0000));
    }

    #[test]
    fn decoder_can_begin_at_a_picture_according_to_its_coded_type() {
        use PictureKind::{AsMarked, Begins, Needs};
        use Pictures::{Av1, H264, H265, Vp8, Vp9};
        // In these H.264 slices first_mb_in_slice is 0, coded as 1. slice_type 7 is coded as 0001000, and 5 as 00110.
        let intra = unit(&[0x61, 0b1000_1000, 0]);
        let predicted = unit(&[0x41, 0b1001_1000, 0]);
        let recovery = unit(&[0x06, 6, 1, 0x80, 0x80]);
        let cases: [(Pictures, Vec<u8>, Option<PictureKind>); 15] = [
            (H264(4), unit(&[0x65, 0x88]), Some(Begins)),
            (H264(4), [unit(&[0x09, 0xf0]), unit(&[0x67, 0]), unit(&[0x65, 0x88])].concat(), Some(Begins)),
            (H264(4), intra.clone(), Some(AsMarked)),
            (H264(4), predicted.clone(), Some(Needs)),
            (H264(4), [intra, predicted.clone()].concat(), Some(Needs)),
            (H264(4), [recovery, predicted].concat(), Some(Begins)),
            (H264(2), vec![0, 2, 0x65, 0x88], Some(Begins)),
            (H264(4), vec![0, 0, 1], None),
            (H265(4), unit(&[19 << 1, 1]), Some(Begins)),
            (H265(4), [unit(&[32 << 1, 1]), unit(&[1 << 1, 1])].concat(), Some(Needs)),
            (Vp8, vec![0x10], Some(Begins)),
            (Vp9, vec![0b1000_0000], Some(Begins)),
            (Vp9, vec![0b1000_0100], Some(Needs)),
            (Av1, vec![0x12, 0, 0x0a, 1, 0, 0x32, 1, 0x10], Some(Begins)),
            (Av1, vec![0x12, 0, 0x32, 1, 0x30], Some(Needs)),
        ];
        for (pictures, sample, expected) in cases {
            assert_eq!(pictures.judge(&sample), expected, "{pictures:?} {sample:?}");
        }
    }
}
