//! The catalog of hang, moq-dev's media format, which its players read unless a broadcast's name ends in `.msf`.
//!
//! Written from what [MSF](super::msf) says; of hang's containers only those that are published here.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::msf;

/// The name of the track that it is published as: each group begins with a whole catalog.
pub const CATALOG: &str = "catalog.json";

/// A catalog, without what is not needed here.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Catalog {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub video: Option<Section<Video>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub audio: Option<Section<Audio>>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Section<T> {
    /// By the names of their tracks.
    pub renditions: BTreeMap<String, T>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Video {
    pub codec: String,
    pub container: Container,
    /// What a decoder begins with (`avcC` and the like), in hexadecimal digits. moq-cli needs it, although it is in `init` too.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub description: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub coded_width: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub coded_height: Option<u32>,
    /// Bits per second.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bitrate: Option<u64>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Audio {
    pub codec: String,
    pub container: Container,
    /// As of video: AAC's AudioSpecificConfig.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub description: Option<String>,
    pub sample_rate: u32,
    pub number_of_channels: u32,
    /// Bits per second.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bitrate: Option<u64>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
pub enum Container {
    /// A moof and an mdat for each object.
    Cmaf {
        /// ftyp and moov, in base64.
        init: String,
    },
    /// A [sample](super::loc) for each object.
    Loc,
}

impl Catalog {
    /// Describes the tracks that a player can begin with: those whose codec and initialisation are known, and that are not encrypted,
    /// which hang has no words for. `configurations` are those of decoders, by the names of tracks, where there are any.
    pub fn of(msf: &msf::Catalog, configurations: &BTreeMap<String, Vec<u8>>) -> Self {
        let plain = msf.tracks.iter().filter(|it| it.content_protection_ref_ids.is_empty());
        let with_role = |role: &'static str| plain.clone().filter(move |it| it.role.as_deref() == Some(role));
        let description = |it: &msf::Track| configurations.get(&it.name).map(|bytes| hexadecimal(bytes));
        let video =
            with_role("video").filter_map(|it| Some((it.name.clone(), Video::of(msf, it, description(it))?)));
        let audio =
            with_role("audio").filter_map(|it| Some((it.name.clone(), Audio::of(msf, it, description(it))?)));
        Self { video: Section::of(video), audio: Section::of(audio) }
    }

    pub fn to_json(&self) -> Result<Vec<u8>, serde_json::Error> {
        serde_json::to_vec(self)
    }
}

impl<T> Section<T> {
    fn of(renditions: impl Iterator<Item = (String, T)>) -> Option<Self> {
        let renditions: BTreeMap<_, _> = renditions.collect();
        (!renditions.is_empty()).then_some(Self { renditions })
    }
}

impl Container {
    fn of(msf: &msf::Catalog, track: &msf::Track) -> Option<Self> {
        match &track.packaging[..] {
            "cmaf" => msf.init_data(track).map(|init| Self::Cmaf { init: init.to_owned() }),
            "loc" => Some(Self::Loc),
            _ => None,
        }
    }
}

impl Video {
    fn of(msf: &msf::Catalog, track: &msf::Track, description: Option<String>) -> Option<Self> {
        Some(Self {
            codec: track.codec.clone()?,
            container: Container::of(msf, track)?,
            description,
            coded_width: track.width,
            coded_height: track.height,
            bitrate: track.bitrate,
        })
    }
}

impl Audio {
    fn of(msf: &msf::Catalog, track: &msf::Track, description: Option<String>) -> Option<Self> {
        Some(Self {
            codec: track.codec.clone()?,
            container: Container::of(msf, track)?,
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
    fn what_players_can_begin_with_is_in_it() {
        let track = |name: &str, role: &str, codec: &str| msf::Track {
            name: name.to_owned(),
            packaging: "cmaf".to_owned(),
            role: Some(role.to_owned()),
            codec: Some(codec.to_owned()),
            init_data: Some("AAAA".to_owned()),
            ..msf::Track::default()
        };
        let video = msf::Track {
            width: Some(640),
            height: Some(360),
            bitrate: Some(800_000),
            ..track("1.m4s", "video", "avc1.42C01E")
        };
        let sound = msf::Track {
            samplerate: Some(48_000),
            channel_config: Some("2".to_owned()),
            ..track("2.m4s", "audio", "mp4a.40.2")
        };
        let msf = msf::Catalog::new(vec![
            video,
            sound,
            track("no rate", "audio", "mp4a.40.2"),
            msf::Track { codec: None, ..track("no codec", "video", "") },
            msf::Track { init_data: None, ..track("no init", "video", "avc1.42C01E") },
            msf::Track { packaging: "loc".to_owned(), ..track("3.loc", "video", "av01") },
            msf::Track { packaging: "legacy".to_owned(), ..track("another container", "video", "av01") },
            track("text", "caption", "wvtt"),
            msf::Track {
                content_protection_ref_ids: vec!["cp0".to_owned()],
                ..track("encrypted", "video", "avc1.42C01E")
            },
        ]);
        let configurations = BTreeMap::from([("1.m4s".to_owned(), vec![1, 0x42, 0xc0])]);
        let catalog = Catalog::of(&msf, &configurations);
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
        assert_eq!(serde_json::from_slice::<Catalog>(&json).unwrap(), catalog);
        let none = Catalog::of(&msf::Catalog::new(Vec::new()), &BTreeMap::new()).to_json().unwrap();
        assert_eq!(none, b"{}");
    }
}
