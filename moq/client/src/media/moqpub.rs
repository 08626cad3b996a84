//! The catalog that moq-pub writes (draft-ietf-moq-catalogformat-01).

use millrace_moq::Namespace;
use serde::{Deserialize, Serialize};

use super::codec;
use super::init::InitTrack;

/// A catalog with the fields that moq-pub fills.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct MoqPubCatalog {
    /// The version of the catalog's format.
    pub version: u16,
    streaming_format: u16,
    streaming_format_version: String,
    supports_delta_updates: bool,
    common_track_fields: CommonFields,
    /// The tracks of the broadcast.
    pub tracks: Vec<CatalogTrack>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct CommonFields {
    #[serde(skip_serializing_if = "Option::is_none")]
    namespace: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    packaging: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    render_group: Option<u16>,
}

/// A track in the catalog.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CatalogTrack {
    pub name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub init_track: Option<String>,
    selection_params: SelectionParams,
}

#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct SelectionParams {
    codec: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    bitrate: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    width: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    height: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    samplerate: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    channel_config: Option<String>,
}

impl MoqPubCatalog {
    /// Describes `tracks`. `init` is the name of the track with their init segment, and `name` returns the name of a
    /// track by its track ID.
    pub(super) fn new(
        namespace: &Namespace,
        tracks: &[InitTrack],
        init: &str,
        name: impl Fn(u32) -> String,
    ) -> Self {
        let track = |track: &InitTrack| CatalogTrack {
            name: name(track.id),
            init_track: Some(init.to_owned()),
            selection_params: SelectionParams::from_track(track),
        };
        // moq-pub writes a slash before every field of the namespace.
        let fields = namespace.fields().iter().map(|field| format!("/{}", String::from_utf8_lossy(field)));
        Self {
            version: 1,
            streaming_format: 1,
            streaming_format_version: "0.2".into(),
            supports_delta_updates: true,
            common_track_fields: CommonFields {
                namespace: Some(fields.collect()),
                packaging: Some("cmaf".into()),
                render_group: Some(1),
            },
            tracks: tracks.iter().map(track).collect(),
        }
    }
}

impl SelectionParams {
    fn from_track(track: &InitTrack) -> Self {
        let entry = track.entry();
        let size = entry.and_then(|entry| entry.size());
        // moq-pub writes the channels and rate of the sample entry, which may differ from the decoder's output.
        let sound = entry.filter(|_| track.is_sound()).and_then(|entry| entry.sound());
        Self {
            codec: entry.and_then(codec::name),
            bitrate: entry.filter(|_| track.is_sound()).and_then(codec::bitrate),
            width: size.map(|(width, _)| width.into()),
            height: size.map(|(_, height)| height.into()),
            samplerate: sound.map(|(_, rate)| rate),
            channel_config: sound.map(|(channels, _)| channels.to_string()),
        }
    }
}
