//! A codec's name (RFC 6381) and its decoder configuration, for catalogs.

use millrace_moq::msf;
use mp4_atom::esds::{DecoderConfig, DecoderSpecific, EsDescriptor};
use mp4_atom::{
    Atom, Audio, Av01, Av1c, Avc1, Avc3, Avcc, Codec, Decode, Dops, Esds, FixedPoint, Hev1, Hvc1, Hvcc, Mp4a,
    Opus, Visual, Vp09, VpcC,
};

use super::boxes::{NumberReader, quietly};
use super::entry::SampleEntry;
use super::picture::Bits;

/// ObjectTypeIndication and stream type of AAC (ISO/IEC 14496-1, 7.2.6.6).
const MPEG4_AUDIO: u8 = 0x40;
const AUDIO_STREAM: u8 = 0x05;
/// Audio object types of AAC with spectral band replication, and with parametric stereo in addition (ISO/IEC 14496-3,
/// 1.5.1.1).
const SBR: u32 = 5;
const PS: u32 = 29;

/// Returns a codec's name as players and browsers write it (RFC 6381), or `None` if the codec has no such name.
pub(super) fn name(entry: &SampleEntry) -> Option<String> {
    Some(match &entry.codec {
        Codec::Avc1(avc1) => avc("avc1", &avc1.avcc),
        Codec::Avc3(avc3) => avc("avc3", &avc3.avcc),
        Codec::Hvc1(hvc1) => hevc("hvc1", &hvc1.hvcc),
        Codec::Hev1(hev1) => hevc("hev1", &hev1.hvcc),
        Codec::Av01(av01) => av1(&av01.av1c),
        Codec::Vp08(_) => "vp8".to_owned(),
        Codec::Vp09(vp09) => vp9(&vp09.vpcc),
        Codec::Mp4a(mp4a) => {
            let config = &mp4a.esds.es_desc.dec_config;
            match config.object_type_indication {
                MPEG4_AUDIO => format!("mp4a.40.{}", aac(config.dec_specific.as_ref()).kind),
                // The object type alone identifies the codec, so the name has no suffix. Browsers compare the
                // hexadecimal digits in upper case.
                other => format!("mp4a.{other:02X}"),
            }
        }
        Codec::Mp3(_) => "mp4a.6B".to_owned(),
        Codec::Opus(_) => "opus".to_owned(),
        Codec::Flac(_) => "flac".to_owned(),
        _ if entry.kind == *b"mp4v" => mp4v(entry)?,
        _ if entry.kind == *b"fLaC" => "flac".to_owned(),
        // If RFC 6381 (section 3.3) defines no suffix for a codec, the codec's name is the type of its sample entry.
        _ => {
            let kind = std::str::from_utf8(&entry.kind).ok()?.trim_end();
            kind.bytes()
                .all(|byte| byte.is_ascii_graphic())
                .then(|| kind.to_owned())
                .filter(|kind| !kind.is_empty())?
        }
    })
}

/// Returns the codec name for an `mp4v` sample entry: its object type, and for MPEG-4 video also profile and level.
fn mp4v(entry: &SampleEntry) -> Option<String> {
    const MPEG4_VIDEO: u8 = 0x20;
    let mut body = entry.part(b"esds")?;
    let esds = quietly(|| Esds::decode_body(&mut body)).ok()?;
    let config = &esds.es_desc.dec_config;
    let object_type = config.object_type_indication;
    let specific = config.dec_specific.as_ref().map_or(&[][..], |specific| &specific.raw);
    // 00 00 01 b0 is visual_object_sequence_start_code (ISO/IEC 14496-2, 6.2.2). The byte after it is the profile and
    // level.
    let start = specific.windows(4).position(|window| window == [0, 0, 1, 0xb0]);
    let profile = start.and_then(|at| specific.get(at + 4)).filter(|_| object_type == MPEG4_VIDEO);
    Some(match profile {
        Some(profile) => format!("mp4v.{object_type:02X}.{profile}"),
        None => format!("mp4v.{object_type:02X}"),
    })
}

/// The fields of AAC's configuration, including the extension that older decoders skip (ISO/IEC 14496-3, 1.6.2.1).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Aac {
    kind: u32,
    /// Sampling rate of the decoder's output, in Hz.
    rate: Option<u32>,
    channels: Option<u16>,
}

fn aac(specific: Option<&DecoderSpecific>) -> Aac {
    let Some(specific) = specific else { return Aac { kind: 2, ..Aac::default() } };
    let raw = if specific.raw.len() < 2 { Vec::new() } else { specific.raw.clone() };
    let plain = Aac { kind: u32::from(specific.profile).max(2), ..Aac::default() };
    read_aac(&mut Bits { bytes: &raw, at: 0 }).unwrap_or(plain)
}

fn read_aac(bits: &mut Bits<'_>) -> Option<Aac> {
    let mut kind = object_type(bits)?;
    let mut rate = frequency(bits)?;
    let configuration = bits.take(4)?;
    let mut stereo = kind == PS;
    if matches!(kind, SBR | PS) {
        rate = frequency(bits)?;
    } else if kind == 2 && configuration != 0 {
        // The bits skipped here are GASpecificConfig: the frame length flag, the core coder flag with an optional delay
        // of 14 bits, and an extension flag.
        let depends = bits.take(2)? & 1 == 1;
        bits.take(if depends { 14 } else { 0 })?;
        bits.take(1)?;
        if let Some((extension, extended)) = sync_extension(bits) {
            (kind, rate) = (extension, extended.unwrap_or(rate));
            stereo = kind == PS;
        }
    }
    // Channel configuration 0 does not state a number of channels. Parametric stereo decodes one channel to two.
    let channels = match configuration {
        0 => None,
        1 if stereo => Some(2),
        7 => Some(8),
        11 => Some(7),
        12 | 14 => Some(8),
        other => u16::try_from(other).ok(),
    };
    Some(Aac { kind, rate: (rate > 0).then_some(rate), channels })
}

/// Reads the backward compatible extension that signals spectral band replication. Returns its object type and sampling
/// rate.
fn sync_extension(bits: &mut Bits<'_>) -> Option<(u32, Option<u32>)> {
    // ISO/IEC 14496-3 marks spectral band replication with the sync word 0x2b7, and parametric stereo with 0x548.
    if bits.left() < 16 || bits.take(11)? != 0x2b7 || object_type(bits)? != SBR || bits.take(1)? == 0 {
        return None;
    }
    let rate = frequency(bits);
    let is_parametric = bits.left() >= 12 && bits.take(11) == Some(0x548) && bits.take(1) == Some(1);
    Some((if is_parametric { PS } else { SBR }, rate))
}

fn object_type(bits: &mut Bits<'_>) -> Option<u32> {
    match bits.take(5)? {
        31 => Some(32 + bits.take(6)?),
        kind => Some(kind),
    }
}

fn frequency(bits: &mut Bits<'_>) -> Option<u32> {
    const RATES: [u32; 13] =
        [96_000, 88_200, 64_000, 48_000, 44_100, 32_000, 24_000, 22_050, 16_000, 12_000, 11_025, 8000, 7350];
    match bits.take(4)? {
        15 => bits.take(24),
        index => Some(RATES.get(index as usize).copied().unwrap_or(0)),
    }
}

/// Returns the number of channels and the sampling rate (in Hz) of the decoder's output.
pub(super) fn sound(entry: &SampleEntry) -> Option<(u16, u32)> {
    let (channels, rate) = entry.sound()?;
    let from_aac = match &entry.codec {
        Codec::Mp4a(mp4a) if mp4a.esds.es_desc.dec_config.object_type_indication == MPEG4_AUDIO => {
            aac(mp4a.esds.es_desc.dec_config.dec_specific.as_ref())
        }
        _ => Aac::default(),
    };
    let flac = entry.part(b"dfLa").and_then(flac_rate);
    let alac = entry.part(b"alac").and_then(|body| NumberReader(body.get(24..)?).u32());
    Some((from_aac.channels.unwrap_or(channels), from_aac.rate.or(flac).or(alac).unwrap_or(rate)))
}

/// Returns the sampling rate of FLAC, in Hz. The sample entry has only 16 bits for the rate. STREAMINFO has 20 bits for
/// it, after ten bytes (RFC 9639, 8.2).
fn flac_rate(body: &[u8]) -> Option<u32> {
    Bits { bytes: body.get(4 + 4 + 10..)?, at: 0 }.take(20).filter(|rate| *rate > 0)
}

/// Returns the decoder configuration for codecs that need one: the body of `avcC`, `hvcC` or `av1C`, the
/// AudioSpecificConfig of AAC, or the start of a FLAC file (the marker `fLaC` and the metadata blocks).
pub(super) fn configuration(entry: &SampleEntry) -> Option<Vec<u8>> {
    match &entry.codec {
        Codec::Avc1(_) | Codec::Avc3(_) => entry.part(b"avcC").map(<[u8]>::to_vec),
        Codec::Hvc1(_) | Codec::Hev1(_) => entry.part(b"hvcC").map(<[u8]>::to_vec),
        Codec::Av01(_) => entry.part(b"av1C").map(<[u8]>::to_vec),
        Codec::Mp4a(mp4a) => Some(mp4a.esds.es_desc.dec_config.dec_specific.as_ref()?.raw.clone()),
        _ if entry.kind == *b"fLaC" => Some([b"fLaC", entry.part(b"dfLa")?.get(4..)?].concat()),
        _ => None,
    }
}

/// Reports whether LOC can carry a track with this sample entry, because a decoder needs no more than [`name`] and
/// [`configuration`].
pub(super) fn is_described(entry: &SampleEntry) -> bool {
    if entry.protection.is_some() {
        return false;
    }
    match &entry.codec {
        Codec::Vp09(_) | Codec::Opus(_) => true,
        Codec::Mp4a(mp4a) if mp4a.esds.es_desc.dec_config.object_type_indication != MPEG4_AUDIO => false,
        Codec::Avc1(_)
        | Codec::Avc3(_)
        | Codec::Hvc1(_)
        | Codec::Hev1(_)
        | Codec::Av01(_)
        | Codec::Mp4a(_) => configuration(entry).is_some(),
        _ => false,
    }
}

/// Makes a sample entry from a track in a catalog and its decoder configuration. Returns `None` if the codec is
/// unknown, or the catalog lacks a required field.
///
/// # Errors
/// Fails if the configuration cannot be read.
pub(super) fn entry(track: &msf::MsfTrack, config: Option<&[u8]>) -> Result<Option<Codec>, mp4_atom::Error> {
    let Some(name) = &track.codec else { return Ok(None) };
    let mut parts = name.split('.');
    let family = parts.next().unwrap_or_default();
    let entry = match (family, visual_of(track), audio_of(track), config) {
        ("avc1", Some(visual), _, Some(config)) => {
            Avc1 { visual, avcc: parsed(config)?, ..Avc1::default() }.into()
        }
        ("avc3", Some(visual), _, Some(config)) => {
            Avc3 { visual, avcc: parsed(config)?, ..Avc3::default() }.into()
        }
        ("hvc1", Some(visual), _, Some(config)) => {
            Hvc1 { visual, hvcc: parsed(config)?, ..Hvc1::default() }.into()
        }
        ("hev1", Some(visual), _, Some(config)) => {
            Hev1 { visual, hvcc: parsed(config)?, ..Hev1::default() }.into()
        }
        ("av01", Some(visual), _, Some(config)) => {
            Av01 { visual, av1c: parsed(config)?, ..Av01::default() }.into()
        }
        ("vp09", Some(visual), _, _) => {
            let mut number = || parts.next()?.parse().ok();
            let (Some(profile), Some(level), Some(bit_depth)) = (number(), number(), number()) else {
                return Ok(None);
            };
            let vpcc = VpcC { profile, level, bit_depth, ..VpcC::default() };
            Vp09 { visual, vpcc, ..Vp09::default() }.into()
        }
        ("mp4a", _, Some(audio), Some(config)) => mp4a(audio, config)?.into(),
        ("opus", _, Some(audio), _) => opus(audio).into(),
        _ => return Ok(None),
    };
    Ok(Some(entry))
}

fn visual_of(track: &msf::MsfTrack) -> Option<Visual> {
    let width = track.width?.try_into().ok()?;
    let height = track.height?.try_into().ok()?;
    Some(Visual { data_reference_index: 1, width, height, ..Visual::default() })
}

fn audio_of(track: &msf::MsfTrack) -> Option<Audio> {
    // The sample entry has 16 bits for the sampling rate. A rate that does not fit is written as 0, and the decoder
    // reads the rate from its configuration.
    let sample_rate = FixedPoint::from(track.samplerate?.try_into().unwrap_or(0));
    let channel_count = track.channel_config.as_deref()?.parse().ok()?;
    Some(Audio { data_reference_index: 1, channel_count, sample_size: 16, sample_rate })
}

fn parsed<T: Atom>(mut body: &[u8]) -> Result<T, mp4_atom::Error> {
    T::decode_body(&mut body)
}

fn mp4a(audio: Audio, mut config: &[u8]) -> Result<Mp4a, mp4_atom::Error> {
    let dec_config = DecoderConfig {
        object_type_indication: MPEG4_AUDIO,
        stream_type: AUDIO_STREAM,
        dec_specific: Some(DecoderSpecific::decode(&mut config)?),
        ..DecoderConfig::default()
    };
    let es_desc = EsDescriptor { dec_config, ..EsDescriptor::default() };
    Ok(Mp4a { audio, esds: Esds { es_desc }, btrt: None, taic: None })
}

fn opus(audio: Audio) -> Opus {
    let dops = Dops {
        output_channel_count: audio.channel_count.try_into().unwrap_or(2),
        pre_skip: 0,
        input_sample_rate: 48_000,
        output_gain: 0,
        channel_mapping: None,
    };
    Opus { audio, dops, btrt: None }
}

pub(super) fn visual(codec: &Codec) -> Option<&Visual> {
    Some(match codec {
        Codec::Avc1(avc1) => &avc1.visual,
        Codec::Avc3(avc3) => &avc3.visual,
        Codec::Hvc1(hvc1) => &hvc1.visual,
        Codec::Hev1(hev1) => &hev1.visual,
        Codec::Av01(av01) => &av01.visual,
        Codec::Vp09(vp09) => &vp09.visual,
        _ => return None,
    })
}

/// Returns the bit rate that the sample entry states, in bits per second, or `None` if it states none.
pub(super) fn bitrate(entry: &SampleEntry) -> Option<u32> {
    let (max, average) = match &entry.codec {
        Codec::Mp4a(mp4a) => {
            let config = &mp4a.esds.es_desc.dec_config;
            (config.max_bitrate, config.avg_bitrate)
        }
        _ => {
            let mut btrt = NumberReader(entry.part(b"btrt")?);
            btrt.u32()?;
            (btrt.u32()?, btrt.u32()?)
        }
    };
    Some(max.max(average)).filter(|bitrate| *bitrate > 0)
}

/// Returns the codec name of an H.264 track, such as `avc1.64001F` (RFC 6381, 3.3).
fn avc(kind: &str, avcc: &Avcc) -> String {
    let Avcc { avc_profile_indication, profile_compatibility, avc_level_indication, .. } = avcc;
    format!("{kind}.{avc_profile_indication:02X}{profile_compatibility:02X}{avc_level_indication:02X}")
}

/// Returns the codec name of an H.265 track (ISO/IEC 14496-15, E.3).
fn hevc(kind: &str, hvcc: &Hvcc) -> String {
    let space = ["", "A", "B", "C"][usize::from(hvcc.general_profile_space & 3)];
    // In the codec name of H.265, the first compatibility flag is the least significant bit.
    let compatible = u32::from_be_bytes(hvcc.general_profile_compatibility_flags).reverse_bits();
    let tier = if hvcc.general_tier_flag { 'H' } else { 'L' };
    let constraints = &hvcc.general_constraint_indicator_flags;
    let said = constraints.iter().rposition(|flags| *flags != 0).map_or(0, |last| last + 1);
    let constraints: String = constraints[..said].iter().map(|flags| format!(".{flags:X}")).collect();
    let profile = hvcc.general_profile_idc;
    let level = hvcc.general_level_idc;
    format!("{kind}.{space}{profile}.{compatible:X}.{tier}{level}{constraints}")
}

/// Returns the codec name of an AV1 track (AV1 Codec ISO Media File Format Binding, 5).
fn av1(av1c: &Av1c) -> String {
    let tier = if av1c.seq_tier_0 { 'H' } else { 'M' };
    let depth = match (av1c.high_bitdepth, av1c.twelve_bit) {
        (false, _) => 8,
        (true, false) => 10,
        (true, true) => 12,
    };
    format!("av01.{}.{:02}{tier}.{depth:02}", av1c.seq_profile, av1c.seq_level_idx_0)
}

/// Returns the codec name of a VP9 track (VP Codec ISO Media File Format Binding, "Codecs Parameter String").
fn vp9(vpcc: &VpcC) -> String {
    format!("vp09.{:02}.{:02}.{:02}", vpcc.profile, vpcc.level, vpcc.bit_depth)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codec_strings_of_hevc_av1_and_vp9_match_the_standards() {
        let hvcc = Hvcc {
            general_profile_idc: 1,
            general_profile_compatibility_flags: [0x60, 0, 0, 0],
            general_constraint_indicator_flags: [0xb0, 0, 0, 0, 0, 0],
            general_level_idc: 93,
            ..Hvcc::new()
        };
        assert_eq!(hevc("hvc1", &hvcc), "hvc1.1.6.L93.B0");
        let hvcc = Hvcc { general_profile_space: 1, general_tier_flag: true, ..hvcc };
        assert_eq!(hevc("hev1", &hvcc), "hev1.A1.6.H93.B0");
        let hvcc = Hvcc { general_constraint_indicator_flags: [0x90, 0, 0x0a, 0, 0, 0], ..hvcc };
        assert_eq!(hevc("hev1", &hvcc), "hev1.A1.6.H93.90.0.A");
        let av1c = Av1c { seq_profile: 0, seq_level_idx_0: 4, ..Av1c::default() };
        assert_eq!(av1(&av1c), "av01.0.04M.08");
        let av1c = Av1c { seq_tier_0: true, high_bitdepth: true, seq_level_idx_0: 13, ..av1c };
        assert_eq!(av1(&av1c), "av01.0.13H.10");
        assert_eq!(vp9(&VpcC { profile: 2, level: 31, bit_depth: 10, ..VpcC::default() }), "vp09.02.31.10");
    }

    #[test]
    fn aac_channels_and_rate_are_those_of_the_decoder_output() {
        for (raw, kind, rate, channels) in [
            (&[0x12, 0x10][..], 2, 44_100, 2),
            // This AudioSpecificConfig signals spectral band replication explicitly: 24 kHz, one channel, 48 kHz
            // output.
            (&[0x2b, 0x09, 0x88, 0x00], 5, 48_000, 1),
            // The next two AudioSpecificConfigs signal spectral band replication in the extension that older decoders
            // skip. The second one also signals parametric stereo.
            (&[0x13, 0x08, 0x56, 0xe5, 0x98], 5, 48_000, 1),
            (&[0x13, 0x08, 0x56, 0xe5, 0x9d, 0x48, 0x80], 29, 48_000, 2),
            (&[0xeb, 0x09, 0x88, 0x00], 29, 48_000, 2),
            (&[0x11, 0xb8], 2, 48_000, 8),
        ] {
            let found = read_aac(&mut Bits { bytes: raw, at: 0 }).unwrap();
            assert_eq!(
                (found.kind, found.rate, found.channels),
                (kind, Some(rate), Some(channels)),
                "{raw:x?}"
            );
        }
    }
}
