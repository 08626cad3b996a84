//! What catalogs say of a track.

use std::collections::BTreeMap;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use millrace_moq::msf;

use super::init::{Presentation, System, Track, init_of};
use super::{Error, Packaging, codec};

/// The number of the group of renditions that a ladder's are alternates in; those of an input have its own numbers behind it.
const LADDER: u32 = 1;
/// The system that any player has that knows a key itself: W3C's common one, by which ClearKey is found.
const COMMON_SYSTEM: [u8; 16] =
    [0x10, 0x77, 0xef, 0xec, 0xc0, 0xb2, 0x4d, 0x02, 0xac, 0xe3, 0x3c, 0x1e, 0x52, 0xe2, 0xfb, 0x4b];

/// Which rendition tracks are of, and how it is published.
pub(super) struct Place {
    /// The best is at 0.
    pub place: usize,
    /// What its video takes, bits per second.
    pub bitrate: Option<u64>,
    pub has_alternates: bool,
    pub packaging: Packaging,
}

impl Place {
    /// Returns the name of a track. The best rendition has the names that moq-pub gives, until an input begins anew: attributes
    /// of a name are fixed (MSF, 5.2), so what has another init segment has other names.
    pub fn name(&self, incarnation: u32, of_best: &str) -> String {
        let again = if incarnation > 1 { format!("i{incarnation}-") } else { String::new() };
        match self.place {
            0 => format!("{again}{of_best}"),
            place => format!("r{place}-{again}{of_best}"),
        }
    }
}

/// A track as catalogs have it.
#[derive(Clone)]
pub(super) struct Described {
    pub track: msf::Track,
    /// What a decoder begins with.
    pub configuration: Option<Vec<u8>>,
    protection: Option<Protected>,
}

/// How a track is encrypted.
#[derive(Clone, PartialEq, Eq)]
struct Protected {
    scheme: String,
    key: Option<[u8; 16]>,
    systems: Vec<System>,
}

impl Described {
    pub fn all(rendition: &Place, presentation: &Presentation, incarnation: u32) -> Result<Vec<Self>, Error> {
        presentation
            .tracks
            .iter()
            .map(|track| Self::of(rendition, presentation, track, incarnation))
            .collect()
    }

    fn of(
        rendition: &Place,
        presentation: &Presentation,
        track: &Track,
        incarnation: u32,
    ) -> Result<Self, Error> {
        let entry = track.entry();
        let packaging = packaging(rendition.packaging, track);
        let configuration = entry.and_then(codec::configuration);
        let begins = match packaging {
            // Players take a track's init segment to have that track alone.
            Packaging::Cmaf => Some(init_of(&presentation.init, track.id)?.to_vec()),
            Packaging::Loc => configuration.clone(),
        };
        let codec = entry.and_then(codec::name);
        if codec.is_none() {
            tracing::warn!(
                track = track.id,
                "the catalogs have no codec for this track, whose sample entry has no readable type: players pass over it"
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
                "this track is encrypted: catalog says how, catalog.json leaves it out, because its format has no words for it"
            );
        }
        let own_bitrate = rendition.bitrate.filter(|_| track.is_video());
        let sound = entry.filter(|_| track.is_sound()).and_then(codec::sound);
        let size = entry.and_then(|entry| entry.size());
        let described = msf::Track {
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
            ..msf::Track::default()
        };
        Ok(Self { track: described, configuration, protection })
    }
}

/// Returns how a track is packaged that is to be packaged so: as CMAF where LOC has no place for what its decoder needs.
pub(super) fn packaging(wanted: Packaging, track: &Track) -> Packaging {
    let is_medium = track.is_video() || track.is_sound();
    match track.entries.first().is_some_and(codec::is_described) && track.entries.len() == 1 && is_medium {
        true => wanted,
        false => Packaging::Cmaf,
    }
}

/// Returns the number of the alternates that a track is one of: of a ladder, or where the input says so of its tracks, of video. Groups of
/// alternates begin at the same times, which is not known of anything else.
fn alternates(rendition: &Place, presentation: &Presentation, track: &Track) -> Option<u32> {
    if !track.is_video() {
        return None;
    }
    if rendition.has_alternates {
        return Some(LADDER);
    }
    let is_alike = |other: &&Track| other.is_video() && other.alternate == track.alternate;
    let count = presentation.tracks.iter().filter(is_alike).count();
    (track.alternate != 0 && count > 1).then(|| LADDER + u32::from(track.alternate))
}

/// Returns a track's role: one of those that MSF reserves (5.1.14), or one of ours for what it has no word for.
fn role(track: &Track) -> &'static str {
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

/// Returns what the catalog says of encryption, and has the tracks refer to it: for each scheme and system the keys that there are.
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
