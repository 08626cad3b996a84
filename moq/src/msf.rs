//! The catalog of the MOQT Streaming Format (draft-ietf-moq-msf-01; catalogs of draft-00 are read too).
//!
//! A catalog lists the tracks of a broadcast, and which of them are alternates of each other. Delta updates are not
//! supported.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// The name of the catalog track.
pub const CATALOG: &str = "catalog";

/// A catalog, without the fields that this project does not use.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct MsfCatalog {
    /// The version of the format: `draft-01`, or a number in draft-00.
    #[serde(default)]
    version: MsfVersion,
    /// The tracks of the broadcast.
    pub tracks: Vec<MsfTrack>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    init_data_list: Vec<InitData>,
    /// The encryption of tracks (CMSF, section 4).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub content_protections: Vec<ContentProtection>,
}

/// The encryption of those tracks that refer to it by its name: encryption scheme, keys and content protection system.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ContentProtection {
    #[serde(rename = "refID")]
    ref_id: String,
    /// UUIDs of the keys.
    #[serde(rename = "defaultKID", default)]
    pub default_kid: Vec<String>,
    /// The encryption scheme, `cenc` or `cbcs`.
    pub scheme: String,
    /// The content protection system.
    #[serde(rename = "drmSystem")]
    pub drm_system: DrmSystem,
}

/// A content protection system, from which players get keys.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DrmSystem {
    /// UUID of the content protection system.
    #[serde(rename = "systemID")]
    pub system_id: String,
    /// The system's pssh box, in base64.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pssh: Option<String>,
}

impl ContentProtection {
    /// Makes a content protection without a name. [`Self::named`] sets the name by which tracks refer to it.
    pub fn new(default_kid: Vec<String>, scheme: String, drm_system: DrmSystem) -> Self {
        Self { ref_id: String::new(), default_kid, scheme, drm_system }
    }

    /// Returns the content protection with the name by which tracks refer to it.
    #[must_use]
    pub fn named(self, ref_id: String) -> Self {
        Self { ref_id, ..self }
    }

    /// Reports whether both content protections are equal, apart from their names.
    pub fn is_like(&self, other: &Self) -> bool {
        self.clone().named(other.ref_id.clone()) == *other
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
enum MsfVersion {
    Text(String),
    Number(u64),
}

impl Default for MsfVersion {
    fn default() -> Self {
        Self::Text("draft-01".to_owned())
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct InitData {
    id: String,
    #[serde(rename = "type", default)]
    kind: String,
    #[serde(default)]
    data: String,
}

/// A track in a catalog.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct MsfTrack {
    /// The track's name.
    pub name: String,
    /// The track's namespace, if it differs from that of the catalog.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub namespace: Option<String>,
    /// The packaging of the objects: `cmaf`, `loc`, `mediatimeline` or `eventtimeline`.
    pub packaging: String,
    /// Whether the publisher still adds objects.
    #[serde(default)]
    pub is_live: bool,
    /// The role of the track, such as `video` or `audio`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub role: Option<String>,
    /// The label that players show to users.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub label: Option<String>,
    /// The language, a tag of RFC 5646.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lang: Option<String>,
    /// The type of the data in an event timeline.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub event_type: Option<String>,
    /// The MIME type of the payloads.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mime_type: Option<String>,
    /// Names of the tracks to which a timeline refers, or that are needed to decode this track.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub depends: Option<Vec<String>>,
    /// Names of the [`MsfCatalog::content_protections`] that are needed to decrypt this track.
    #[serde(rename = "contentProtectionRefIDs", default, skip_serializing_if = "Vec::is_empty")]
    pub content_protection_ref_ids: Vec<String>,
    /// The codec, as browsers name it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub codec: Option<String>,
    /// Bit rate, in bits per second.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bitrate: Option<u64>,
    /// Width of the picture, in pixels.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub width: Option<u32>,
    /// Height of the picture, in pixels.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub height: Option<u32>,
    /// Sampling rate, in Hz.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub samplerate: Option<u32>,
    /// The number of channels.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub channel_config: Option<String>,
    /// Units of the track's time stamps per second.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub timescale: Option<u32>,
    /// The number of the group of tracks that are rendered together.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub render_group: Option<u32>,
    /// The number of the alternate group. Its tracks have the same content, and their groups with the same ID cover the
    /// same time.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub alt_group: Option<u32>,
    /// Initialization data in base64: an init segment for `cmaf`, the decoder configuration for `loc`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub init_data: Option<String>,
    /// The ID of the initialization data in the catalog's list.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub init_ref: Option<String>,
}

impl MsfCatalog {
    /// Makes a catalog. Initialization data that several tracks share is stored once.
    pub fn new(mut tracks: Vec<MsfTrack>) -> Self {
        let mut known = BTreeMap::new();
        let mut init_data_list = Vec::new();
        for track in &mut tracks {
            let Some(data) = track.init_data.take() else { continue };
            let id = known.entry(data.clone()).or_insert_with(|| {
                let id = format!("init{}", init_data_list.len());
                init_data_list.push(InitData { id: id.clone(), kind: "inline".to_owned(), data });
                id
            });
            track.init_ref = Some(id.clone());
        }
        Self { version: MsfVersion::default(), tracks, init_data_list, content_protections: Vec::new() }
    }

    /// Adds content protections to tracks. The map's keys are track names.
    #[must_use]
    pub fn with_protections(mut self, mut of_tracks: BTreeMap<String, Vec<ContentProtection>>) -> Self {
        for track in &mut self.tracks {
            for protection in of_tracks.remove(&track.name).unwrap_or_default() {
                track.content_protection_ref_ids.push(protection.ref_id.clone());
                if !self.content_protections.contains(&protection) {
                    self.content_protections.push(protection);
                }
            }
        }
        self
    }

    /// Reads a catalog from JSON.
    ///
    /// # Errors
    /// Fails if the JSON is not a catalog, or is a delta update.
    pub fn parse(json: &[u8]) -> Result<Self, serde_json::Error> {
        serde_json::from_slice(json)
    }

    /// Encodes the catalog as JSON.
    pub fn to_json(&self) -> Result<Vec<u8>, serde_json::Error> {
        serde_json::to_vec_pretty(self)
    }

    /// Returns a track's initialization data in base64, which is stored in the track or in the catalog's list.
    pub fn init_data<'a>(&'a self, track: &'a MsfTrack) -> Option<&'a str> {
        let listed = |id: &String| {
            let entry = self.init_data_list.iter().find(|entry| entry.id == *id)?;
            (entry.kind == "inline").then_some(entry.data.as_str())
        };
        track.init_data.as_deref().or_else(|| track.init_ref.as_ref().and_then(listed))
    }

    /// Returns the tracks to which a player of track `name` can switch at the end of a group: `name` itself, and its
    /// alternates that need no other initialization.
    pub fn alternates(&self, name: &str) -> Vec<&MsfTrack> {
        let Some(base) = self.tracks.iter().find(|track| track.name == name) else { return Vec::new() };
        if base.alt_group.is_none() {
            return vec![base];
        }
        let alike = |track: &&MsfTrack| {
            track.name == base.name || track.alt_group == base.alt_group && self.is_decoded_alike(base, track)
        };
        self.tracks.iter().filter(alike).collect()
    }

    fn is_decoded_alike(&self, one: &MsfTrack, other: &MsfTrack) -> bool {
        let same = |field: fn(&MsfTrack) -> &Option<String>| field(one) == field(other);
        if one.packaging != other.packaging || !same(|track| &track.role) || !same(|track| &track.namespace) {
            return false;
        }
        if let (Some(one), Some(other)) = (one.codec_in_band(), other.codec_in_band()) {
            return one == other;
        }
        let init = self.init_data(one);
        same(|track| &track.codec) && init.is_some() && init == self.init_data(other)
    }
}

impl MsfTrack {
    /// Returns the track's codec without profile and level, if the track's key frames carry the decoder configuration.
    /// A player can then switch to this track without other initialization data.
    fn codec_in_band(&self) -> Option<&str> {
        let family = self.codec.as_deref()?.split('.').next()?;
        let in_band = self.packaging == "loc" || matches!(family, "avc3" | "hev1" | "vvi1");
        in_band.then_some(family)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(catalog: &MsfCatalog, base: &str) -> Vec<String> {
        catalog.alternates(base).into_iter().map(|track| track.name.clone()).collect()
    }

    fn track(name: &str, codec: &str, init_data: Option<&str>) -> MsfTrack {
        MsfTrack {
            name: name.to_owned(),
            packaging: "cmaf".to_owned(),
            codec: Some(codec.to_owned()),
            init_data: init_data.map(str::to_owned),
            alt_group: Some(1),
            ..MsfTrack::default()
        }
    }

    #[test]
    fn alternate_tracks_share_their_initialisation_data() {
        let own = |track| MsfTrack { alt_group: Some(2), ..track };
        let loc = |track| MsfTrack { packaging: "loc".to_owned(), ..track };
        let catalog = MsfCatalog::new(vec![
            track("a", "avc1.64001f", Some("AAAA")),
            track("b", "avc1.64001f", Some("AAAA")),
            track("other init", "avc1.64001f", Some("BBBB")),
            track("other level", "avc1.640028", Some("AAAA")),
            track("unknown", "avc1.64001f", None),
            track("in band", "avc3.64001f", None),
            track("in band, more", "avc3.640028", None),
            own(track("elsewhere", "avc1.64001f", Some("AAAA"))),
            loc(track("loc", "avc1.64001f", None)),
            loc(track("loc, more", "avc1.640028", Some("CCCC"))),
            loc(track("loc, other codec", "av01.0.04M.08", None)),
            MsfTrack { alt_group: None, ..track("alone", "avc1.64001f", Some("AAAA")) },
        ]);
        let table: [(&str, &[&str]); 8] = [
            ("a", &["a", "b"]),
            ("other init", &["other init"]),
            ("unknown", &["unknown"]),
            ("in band", &["in band", "in band, more"]),
            ("elsewhere", &["elsewhere"]),
            ("loc, more", &["loc", "loc, more"]),
            ("alone", &["alone"]),
            ("not there", &[]),
        ];
        for (base, expected) in table {
            assert_eq!(names(&catalog, base), expected, "{base}");
        }
        let json = catalog.to_json().unwrap();
        let read = MsfCatalog::parse(&json).unwrap();
        assert_eq!(read, catalog);
        assert_eq!(read.init_data_list.len(), 3, "each is written once");
        assert_eq!(names(&read, "a"), ["a", "b"]);
    }

    #[test]
    fn msf_catalogs_of_both_drafts_are_read() {
        let old = br#"{"version": 1, "generatedAt": 1, "tracks": [
            {"name": "hi", "packaging": "loc", "isLive": true, "altGroup": 7, "codec": "av01", "bitrate": 5000000, "framerate": 30},
            {"name": "lo", "packaging": "loc", "isLive": true, "altGroup": 7, "codec": "av01", "bitrate": 900000}]}"#;
        let new = br#"{"version": "draft-01", "initDataList": [{"id": "x", "type": "inline", "data": "AA"}, {"id": "y", "type": "url"}],
            "tracks": [
            {"name": "hi", "packaging": "cmaf", "altGroup": 7, "codec": "avc1.4d", "initRef": "x"},
            {"name": "lo", "packaging": "cmaf", "altGroup": 7, "codec": "avc1.4d", "initRef": "x"},
            {"name": "by reference", "packaging": "cmaf", "altGroup": 7, "codec": "avc1.4d", "initRef": "y"}]}"#;
        assert_eq!(names(&MsfCatalog::parse(old).unwrap(), "hi"), ["hi", "lo"]);
        assert_eq!(names(&MsfCatalog::parse(new).unwrap(), "hi"), ["hi", "lo"]);
        for bad in [&b"{}"[..], b"", b"[]", br#"{"deltaUpdate": true}"#, br#"{"tracks": [{}]}"#] {
            assert!(MsfCatalog::parse(bad).is_err());
        }
    }
}
