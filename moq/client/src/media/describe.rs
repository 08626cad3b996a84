//! Describes tracks in the form that catalogs need.

use std::collections::BTreeMap;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use millrace_moq::msf;

use super::init::{InitTrack, Presentation, System, single_track_init};
use super::{Error, Packaging, codec};

/// The number of the alternate group that the renditions of a broadcast form. Alternate groups that an input declares
/// get higher numbers.
const LADDER: u32 = 1;
/// The content protection system that every player with a key supports: W3C's common system, which ClearKey uses.
const COMMON_SYSTEM: [u8; 16] =
    [0x10, 0x77, 0xef, 0xec, 0xc0, 0xb2, 0x4d, 0x02, 0xac, 0xe3, 0x3c, 0x1e, 0x52, 0xe2, 0xfb, 0x4b];

/// A rendition of the broadcast, and how the rendition's tracks are published.
pub(super) struct TrackPlacement {
    /// The index of the rendition in the broadcast. Index 0 is the rendition with the best quality.
    pub place: usize,
    /// Bit rate of the rendition's video, in bits per second.
    pub bitrate: Option<u64>,
    pub has_alternates: bool,
    pub packaging: Packaging,
}

impl TrackPlacement {
    /// Returns the name of a track. The tracks of the best rendition have moq-pub's names. The attributes of a track
    /// name must not change (MSF, 5.2), so the tracks of a further init segment get other names.
    pub fn name(&self, incarnation: u32, of_best: &str) -> String {
        let again = if incarnation > 1 { format!("i{incarnation}-") } else { String::new() };
        match self.place {
            0 => format!("{again}{of_best}"),
            place => format!("r{place}-{again}{of_best}"),
        }
    }
}

/// A track as catalogs describe it.
#[derive(Clone)]
pub(super) struct Described {
    pub track: msf::MsfTrack,
    /// The bytes of the decoder configuration.
    pub configuration: Option<Vec<u8>>,
    protection: Option<Protected>,
}

/// The encryption of a track.
#[derive(Clone, PartialEq, Eq)]
struct Protected {
    scheme: String,
    key: Option<[u8; 16]>,
    systems: Vec<System>,
}

impl Described {
    pub fn all(
        rendition: &TrackPlacement,
        presentation: &Presentation,
        incarnation: u32,
    ) -> Result<Vec<Self>, Error> {
        presentation
            .tracks
            .iter()
            .map(|track| Self::describe_track(rendition, presentation, track, incarnation))
            .collect()
    }

    fn describe_track(
        rendition: &TrackPlacement,
        presentation: &Presentation,
        track: &InitTrack,
        incarnation: u32,
    ) -> Result<Self, Error> {
        let entry = track.entry();
        let packaging = packaging(rendition.packaging, track);
        let configuration = entry.and_then(codec::configuration);
        let begins = match packaging {
            // Players expect an init segment with only this track, so the input's other tracks are left out.
            Packaging::Cmaf => Some(single_track_init(&presentation.init, track.id)?.to_vec()),
            Packaging::Loc => configuration.clone(),
        };
        let codec = entry.and_then(codec::name);
        if codec.is_none() {
            tracing::warn!(
                track = track.id,
                "the catalogs name no codec for this track, because the type of its MP4 sample entry is not readable: players skip the track"
            );
        }
        let protection = entry.and_then(|entry| entry.protection.as_ref()).map(|protection| Protected {
            scheme: protection.scheme.clone(),
            key: protection.key,
            systems: presentation.systems.clone(),
        });
        if let Some(protection) = &protection {
            tracing::warn!(
                track = track.id,
                scheme = protection.scheme,
                "this track is encrypted: `catalog` describes the encryption, and `catalog.json`, whose format cannot describe encryption, omits the track"
            );
        }
        let own_bitrate = rendition.bitrate.filter(|_| track.is_video());
        let sound = entry.filter(|_| track.is_sound()).and_then(codec::sound);
        let size = entry.and_then(|entry| entry.size());
        let described = msf::MsfTrack {
            name: rendition.name(incarnation, &packaging.track(track.id)),
            packaging: packaging.name().to_owned(),
            is_live: true,
            role: Some(role(track).to_owned()),
            label: track.label.clone(),
            lang: track.language.clone(),
            codec,
            bitrate: own_bitrate.or_else(|| entry.and_then(codec::bitrate).map(u64::from)),
            width: size.map(|(width, _)| width.into()),
            height: size.map(|(_, height)| height.into()),
            samplerate: sound.map(|(_, rate)| rate),
            channel_config: sound.map(|(channels, _)| channels.to_string()),
            render_group: Some(1),
            alt_group: alternates(rendition, presentation, track),
            timescale: (packaging == Packaging::Loc).then_some(track.timescale),
            init_data: begins.map(|begins| STANDARD.encode(begins)),
            ..msf::MsfTrack::default()
        };
        Ok(Self { track: described, configuration, protection })
    }
}

/// Returns the packaging of a track. The packaging is `wanted`, or CMAF if LOC cannot carry all that the track's
/// decoder needs.
pub(super) fn packaging(wanted: Packaging, track: &InitTrack) -> Packaging {
    let is_medium = track.is_video() || track.is_sound();
    match track.entries.first().is_some_and(codec::is_described) && track.entries.len() == 1 && is_medium {
        true => wanted,
        false => Packaging::Cmaf,
    }
}

/// Returns the number of the alternate group that a track belongs to: the group of the broadcast's renditions, or the
/// group that the input declares for its video tracks. The groups of alternates must begin at the same times. Tracks
/// other than video do not guarantee that, so they are in no alternate group.
fn alternates(rendition: &TrackPlacement, presentation: &Presentation, track: &InitTrack) -> Option<u32> {
    if !track.is_video() {
        return None;
    }
    if rendition.has_alternates {
        return Some(LADDER);
    }
    let is_alike = |other: &&InitTrack| other.is_video() && other.alternate == track.alternate;
    let count = presentation.tracks.iter().filter(is_alike).count();
    (track.alternate != 0 && count > 1).then(|| LADDER + u32::from(track.alternate))
}

/// Returns a track's role: a role that MSF reserves (5.1.14), or a custom one if MSF has none.
fn role(track: &InitTrack) -> &'static str {
    let is_kind = |kind: &str| track.kinds.iter().any(|it| it == kind);
    let entry = track.entry().map(|entry| entry.kind);
    match &track.handler {
        b"vide" if is_kind("sign") => "signlanguage",
        b"vide" => "video",
        b"soun" if is_kind("description") => "audiodescription",
        b"soun" => "audio",
        b"clcp" => "caption",
        b"text" if entry == Some(*b"text") => "chapters",
        b"sbtl" | b"subt" | b"text" | b"subp" if is_kind("caption") => "caption",
        b"sbtl" | b"subt" | b"text" | b"subp" => "subtitle",
        b"tmcd" => "timecode",
        b"meta" => "metadata",
        _ => "data",
    }
}

/// Returns the content protections, and which tracks each applies to. Tracks with the same scheme, systems and key
/// share one content protection.
pub(super) fn protections(all: &[&Described]) -> BTreeMap<String, Vec<msf::ContentProtection>> {
    let mut found: Vec<msf::ContentProtection> = Vec::new();
    let mut of_tracks = BTreeMap::<String, Vec<msf::ContentProtection>>::new();
    for described in all {
        let Some(protection) = &described.protection else { continue };
        let common = System { id: COMMON_SYSTEM, pssh: bytes::Bytes::new() };
        let systems = if protection.systems.is_empty() { vec![common] } else { protection.systems.clone() };
        for system in systems {
            let pssh = (!system.pssh.is_empty()).then(|| STANDARD.encode(&system.pssh));
            let entry = msf::ContentProtection::new(
                protection.key.iter().map(uuid).collect(),
                protection.scheme.clone(),
                msf::DrmSystem { system_id: uuid(&system.id), pssh },
            );
            let known = found.iter().find(|known| known.is_like(&entry)).cloned();
            let entry = known.unwrap_or_else(|| {
                let entry = entry.named(format!("cp{}", found.len()));
                found.push(entry.clone());
                entry
            });
            of_tracks.entry(described.track.name.clone()).or_default().push(entry);
        }
    }
    of_tracks
}

/// Writes 16 bytes as a UUID.
fn uuid(bytes: &[u8; 16]) -> String {
    let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
}
