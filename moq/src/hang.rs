//! The catalog of hang, moq-dev's media format, which its players read unless a broadcast's name ends in `.msf`.
//!
//! It is derived from the [MSF](super::msf) catalog, and describes only the container formats of hang that the
//! publisher uses.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::msf;

/// The name of the catalog track. The first object of each group is a complete catalog.
pub const CATALOG: &str = "catalog.json";

/// A catalog, without the fields that this project does not use.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HangCatalog {
    /// The renditions of the video.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub video: Option<HangRenditions<Video>>,
    /// The renditions of the audio.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub audio: Option<HangRenditions<Audio>>,
}

/// The renditions of one kind of media.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HangRenditions<T> {
    /// Renditions by track name.
    pub renditions: BTreeMap<String, T>,
}

/// A rendition of the video.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Video {
    /// The codec, as browsers name it.
    pub codec: String,
    /// The container format of the objects.
    pub container: Container,
    /// Decoder configuration (`avcC` and the like), in hexadecimal digits. moq-cli requires it, although `init`
    /// contains it as well.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub description: Option<String>,
    /// Width of the coded picture, in pixels.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub coded_width: Option<u32>,
    /// Height of the coded picture, in pixels.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub coded_height: Option<u32>,
    /// Bit rate, in bits per second.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bitrate: Option<u64>,
}

/// A rendition of the audio.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Audio {
    /// The codec, as browsers name it.
    pub codec: String,
    /// The container format of the objects.
    pub container: Container,
    /// Decoder configuration, in hexadecimal digits: for AAC, the AudioSpecificConfig.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub description: Option<String>,
    /// Sampling rate, in Hz.
    pub sample_rate: u32,
    /// Number of channels.
    pub number_of_channels: u32,
    /// Bit rate, in bits per second.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bitrate: Option<u64>,
}

/// The container format of a track's objects.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
pub enum Container {
    /// Each object is a moof box and an mdat box.
    Cmaf {
        /// The init segment (ftyp and moov boxes), in base64.
        init: String,
    },
    /// Each object is a sample in the [LOC](super::loc) format.
    Loc,
}

impl HangCatalog {
    /// Makes a catalog of the tracks that a player can decode. Their codec and initialization data must be known, and
    /// they must not be encrypted, because hang cannot describe encryption. `configurations` has the decoder
    /// configurations by track name.
    pub fn from_msf(msf: &msf::MsfCatalog, configurations: &BTreeMap<String, Vec<u8>>) -> Self {
        let plain = msf.tracks.iter().filter(|it| it.content_protection_ref_ids.is_empty());
        let with_role = |role: &'static str| plain.clone().filter(move |it| it.role.as_deref() == Some(role));
        let description = |it: &msf::MsfTrack| configurations.get(&it.name).map(|bytes| hexadecimal(bytes));
        let video = with_role("video")
            .filter_map(|it| Some((it.name.clone(), Video::from_track(msf, it, description(it))?)));
        let audio = with_role("audio")
            .filter_map(|it| Some((it.name.clone(), Audio::from_track(msf, it, description(it))?)));
        Self { video: HangRenditions::from_renditions(video), audio: HangRenditions::from_renditions(audio) }
    }

    /// Encodes the catalog as JSON.
    pub fn to_json(&self) -> Result<Vec<u8>, serde_json::Error> {
        serde_json::to_vec(self)
    }
}

impl<T> HangRenditions<T> {
    fn from_renditions(renditions: impl Iterator<Item = (String, T)>) -> Option<Self> {
        let renditions: BTreeMap<_, _> = renditions.collect();
        (!renditions.is_empty()).then_some(Self { renditions })
    }
}

impl Container {
    fn from_track(msf: &msf::MsfCatalog, track: &msf::MsfTrack) -> Option<Self> {
        match &track.packaging[..] {
            "cmaf" => msf.init_data(track).map(|init| Self::Cmaf { init: init.to_owned() }),
            "loc" => Some(Self::Loc),
            _ => None,
        }
    }
}

impl Video {
    fn from_track(msf: &msf::MsfCatalog, track: &msf::MsfTrack, description: Option<String>) -> Option<Self> {
        Some(Self {
            codec: track.codec.clone()?,
            container: Container::from_track(msf, track)?,
            description,
            coded_width: track.width,
            coded_height: track.height,
            bitrate: track.bitrate,
        })
    }
}

impl Audio {
    fn from_track(msf: &msf::MsfCatalog, track: &msf::MsfTrack, description: Option<String>) -> Option<Self> {
        Some(Self {
            codec: track.codec.clone()?,
            container: Container::from_track(msf, track)?,
            description,
            sample_rate: track.samplerate?,
            number_of_channels: track.channel_config.as_deref()?.parse().ok()?,
            bitrate: track.bitrate,
        })
    }
}

fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn hang_catalog_has_only_tracks_with_known_codec() {
        let track = |name: &str, role: &str, codec: &str| msf::MsfTrack {
            name: name.to_owned(),
            packaging: "cmaf".to_owned(),
            role: Some(role.to_owned()),
            codec: Some(codec.to_owned()),
            init_data: Some("AAAA".to_owned()),
            ..msf::MsfTrack::default()
        };
        let video = msf::MsfTrack {
            width: Some(640),
            height: Some(360),
            bitrate: Some(800_000),
            ..track("1.m4s", "video", "avc1.42C01E")
        };
        let sound = msf::MsfTrack {
            samplerate: Some(48_000),
            channel_config: Some("2".to_owned()),
            ..track("2.m4s", "audio", "mp4a.40.2")
        };
        let msf = msf::MsfCatalog::new(vec![
            video,
            sound,
            track("no rate", "audio", "mp4a.40.2"),
            msf::MsfTrack { codec: None, ..track("no codec", "video", "") },
            msf::MsfTrack { init_data: None, ..track("no init", "video", "avc1.42C01E") },
            msf::MsfTrack { packaging: "loc".to_owned(), ..track("3.loc", "video", "av01") },
            msf::MsfTrack { packaging: "legacy".to_owned(), ..track("another container", "video", "av01") },
            track("text", "caption", "wvtt"),
            msf::MsfTrack {
                content_protection_ref_ids: vec!["cp0".to_owned()],
                ..track("encrypted", "video", "avc1.42C01E")
            },
        ]);
        let configurations = BTreeMap::from([("1.m4s".to_owned(), vec![1, 0x42, 0xc0])]);
        let catalog = HangCatalog::from_msf(&msf, &configurations);
        let container = json!({ "kind": "cmaf", "init": "AAAA" });
        let expected = json!({
            "video": { "renditions": {
                "1.m4s": {
                    "codec": "avc1.42C01E", "container": container, "description": "0142c0", "codedWidth": 640, "codedHeight": 360,
                    "bitrate": 800_000,
                },
                "3.loc": { "codec": "av01", "container": { "kind": "loc" } },
            } },
            "audio": { "renditions": { "2.m4s": {
                "codec": "mp4a.40.2", "container": container, "sampleRate": 48_000, "numberOfChannels": 2,
            } } },
        });
        let json = catalog.to_json().unwrap();
        assert_eq!(serde_json::from_slice::<serde_json::Value>(&json).unwrap(), expected);
        assert_eq!(serde_json::from_slice::<HangCatalog>(&json).unwrap(), catalog);
        let none =
            HangCatalog::from_msf(&msf::MsfCatalog::new(Vec::new()), &BTreeMap::new()).to_json().unwrap();
        assert_eq!(none, b"{}");
    }
}
