//! What catalogs say of a codec: its name (RFC 6381) and the record that a decoder begins with.

use millrace_proto::moq::msf;
use mp4_atom::esds::{DecoderConfig, DecoderSpecific, EsDescriptor};
use mp4_atom::{
    Atom, Audio, Av01, Av1c, Avc1, Avc3, Avcc, Codec, Decode, Dops, Esds, FixedPoint, Hev1, Hvc1, Hvcc, Mp4a,
    Opus, Visual, Vp09, VpcC,
};

/// Object type and stream type of AAC (ISO/IEC 14496-1, 7.2.6.6).
const MPEG4_AUDIO: u8 = 0x40;
const AUDIO_STREAM: u8 = 0x05;

/// As players and browsers write it; `None`: it has no name here.
pub(super) fn name(codec: &Codec) -> Option<String> {
    Some(match codec {
        Codec::Avc1(avc1) => avc("avc1", &avc1.avcc),
        Codec::Avc3(avc3) => avc("avc3", &avc3.avcc),
        Codec::Hvc1(hvc1) => hevc("hvc1", &hvc1.hvcc),
        Codec::Hev1(hev1) => hevc("hev1", &hev1.hvcc),
        Codec::Av01(av01) => av1(&av01.av1c),
        Codec::Vp09(vp09) => vp9(&vp09.vpcc),
        Codec::Mp4a(mp4a) => {
            let config = &mp4a.esds.es_desc.dec_config;
            let profile = config.dec_specific.as_ref().map_or(0, |specific| specific.profile);
            format!("mp4a.{:02x}.{profile}", config.object_type_indication)
        }
        Codec::Opus(_) => "opus".to_owned(),
        _ => return None,
    })
}

/// The decoder's configuration, of codecs that need one: the body of `avcC`, `hvcC` or `av1C`, or AAC's AudioSpecificConfig.
pub(super) fn configuration(codec: &Codec) -> Option<Vec<u8>> {
    match codec {
        Codec::Avc1(avc1) => body(&avc1.avcc),
        Codec::Avc3(avc3) => body(&avc3.avcc),
        Codec::Hvc1(hvc1) => body(&hvc1.hvcc),
        Codec::Hev1(hev1) => body(&hev1.hvcc),
        Codec::Av01(av01) => body(&av01.av1c),
        Codec::Mp4a(mp4a) => Some(mp4a.esds.es_desc.dec_config.dec_specific.as_ref()?.raw.clone()),
        _ => None,
    }
}

/// Whether a decoder needs no more than [`name`] and [`configuration`] say.
pub(super) fn is_described(codec: &Codec) -> bool {
    let needs_none = matches!(codec, Codec::Vp09(_) | Codec::Opus(_));
    name(codec).is_some() && (needs_none || configuration(codec).is_some())
}

/// The other way round: of a track in a catalog, with its decoder's configuration. `None`: it is not known, or lacks what is needed.
///
/// # Errors
/// The configuration is none.
pub(super) fn entry(track: &msf::Track, config: Option<&[u8]>) -> Result<Option<Codec>, mp4_atom::Error> {
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

fn visual_of(track: &msf::Track) -> Option<Visual> {
    let (width, height) = (track.width?.try_into().ok()?, track.height?.try_into().ok()?);
    Some(Visual { data_reference_index: 1, width, height, ..Visual::default() })
}

fn audio_of(track: &msf::Track) -> Option<Audio> {
    // What does not fit is in the configuration.
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

pub(super) fn audio(codec: &Codec) -> Option<&Audio> {
    Some(match codec {
        Codec::Mp4a(mp4a) => &mp4a.audio,
        Codec::Opus(opus) => &opus.audio,
        _ => return None,
    })
}

/// Bits per second, as the encoder says.
pub(super) fn bitrate(codec: &Codec) -> Option<u32> {
    let (max, average) = match codec {
        Codec::Mp4a(mp4a) => {
            let config = &mp4a.esds.es_desc.dec_config;
            (config.max_bitrate, config.avg_bitrate)
        }
        other => {
            let btrt = match other {
                Codec::Avc1(avc1) => &avc1.btrt,
                Codec::Avc3(avc3) => &avc3.btrt,
                Codec::Hvc1(hvc1) => &hvc1.btrt,
                Codec::Hev1(hev1) => &hev1.btrt,
                Codec::Av01(av01) => &av01.btrt,
                Codec::Vp09(vp09) => &vp09.btrt,
                Codec::Opus(opus) => &opus.btrt,
                _ => return None,
            };
            let btrt = btrt.as_ref()?;
            (btrt.max_bitrate, btrt.avg_bitrate)
        }
    };
    Some(max.max(average)).filter(|bitrate| *bitrate > 0)
}

fn body(record: &impl Atom) -> Option<Vec<u8>> {
    let mut body = Vec::new();
    record.encode_body(&mut body).ok()?;
    Some(body)
}

/// RFC 6381, 3.3.
fn avc(kind: &str, avcc: &Avcc) -> String {
    let Avcc { avc_profile_indication, profile_compatibility, avc_level_indication, .. } = avcc;
    format!("{kind}.{avc_profile_indication:02X}{profile_compatibility:02X}{avc_level_indication:02X}")
}

/// ISO/IEC 14496-15, E.3.
fn hevc(kind: &str, hvcc: &Hvcc) -> String {
    let space = ["", "A", "B", "C"][usize::from(hvcc.general_profile_space & 3)];
    // The first flag is the least significant bit.
    let compatible = u32::from_be_bytes(hvcc.general_profile_compatibility_flags).reverse_bits();
    let tier = if hvcc.general_tier_flag { 'H' } else { 'L' };
    let constraints = &hvcc.general_constraint_indicator_flags;
    let said = constraints.iter().rposition(|flags| *flags != 0).map_or(0, |last| last + 1);
    let constraints: String = constraints[..said].iter().map(|flags| format!(".{flags:X}")).collect();
    let (profile, level) = (hvcc.general_profile_idc, hvcc.general_level_idc);
    format!("{kind}.{space}{profile}.{compatible:X}.{tier}{level}{constraints}")
}

/// AV1 Codec ISO Media File Format Binding, 5.
fn av1(av1c: &Av1c) -> String {
    let tier = if av1c.seq_tier_0 { 'H' } else { 'M' };
    let depth = match (av1c.high_bitdepth, av1c.twelve_bit) {
        (false, _) => 8,
        (true, false) => 10,
        (true, true) => 12,
    };
    format!("av01.{}.{:02}{tier}.{depth:02}", av1c.seq_profile, av1c.seq_level_idx_0)
}

/// VP Codec ISO Media File Format Binding, "Codecs Parameter String".
fn vp9(vpcc: &VpcC) -> String {
    format!("vp09.{:02}.{:02}.{:02}", vpcc.profile, vpcc.level, vpcc.bit_depth)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_the_standards() {
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
}
