//! The catalog of the MOQT Streaming Format (draft-ietf-moq-msf-01; what draft-00 writes is understood too).
//!
//! Only what says which tracks there are, and which of them can stand for each other. Delta updates are not read.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// The name of the track that it is published as.
pub const CATALOG: &str = "catalog";

/// A catalog, without what is not needed here.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Catalog {
    /// `draft-01`; a number in draft-00.
    #[serde(default)]
    version: Version,
    pub tracks: Vec<Track>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    init_data_list: Vec<InitData>,
    /// How tracks are encrypted (CMSF, 4).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub content_protections: Vec<ContentProtection>,
}

/// What is needed to decrypt tracks that refer to it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ContentProtection {
    #[serde(rename = "refID")]
    ref_id: String,
    /// UUIDs of the keys.
    #[serde(rename = "defaultKID", default)]
    pub default_kid: Vec<String>,
    /// `cenc` or `cbcs`.
    pub scheme: String,
    #[serde(rename = "drmSystem")]
    pub drm_system: DrmSystem,
}

/// A system that hands out keys.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DrmSystem {
    /// A UUID.
    #[serde(rename = "systemID")]
    pub system_id: String,
    /// A pssh box in base64.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pssh: Option<String>,
}

impl ContentProtection {
    /// Makes one without a name.
    pub fn new(default_kid: Vec<String>, scheme: String, drm_system: DrmSystem) -> Self {
        Self { ref_id: String::new(), default_kid, scheme, drm_system }
    }

    /// Gives it the name by which tracks refer to it.
    #[must_use]
    pub fn named(self, ref_id: String) -> Self {
        Self { ref_id, ..self }
    }

    /// Reports whether it says the same, whatever its name is.
    pub fn is_like(&self, other: &Self) -> bool {
        self.clone().named(other.ref_id.clone()) == *other
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
enum Version {
    Text(String),
    Number(u64),
}

impl Default for Version {
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
pub struct Track {
    pub name: String,
    /// Where it is not the catalog's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub namespace: Option<String>,
    pub packaging: String,
    #[serde(default)]
    pub is_live: bool,
    /// `video`, `audio`, ...
    #[serde(skip_serializing_if = "Option::is_none")]
    pub role: Option<String>,
    /// What people call it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub label: Option<String>,
    /// A tag of RFC 5646.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lang: Option<String>,
    /// What the data of an event timeline is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub event_type: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mime_type: Option<String>,
    /// Names of the tracks that a timeline is about, or that decoding needs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub depends: Option<Vec<String>>,
    /// Names of what is needed to decrypt it, in [`Catalog::content_protections`].
    #[serde(rename = "contentProtectionRefIDs", default, skip_serializing_if = "Vec::is_empty")]
    pub content_protection_ref_ids: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub codec: Option<String>,
    /// Bits per second.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bitrate: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub width: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub height: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub samplerate: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub channel_config: Option<String>,
    /// Units of time in a second.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub timescale: Option<u32>,
    /// What is to be rendered together.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub render_group: Option<u32>,
    /// Alternates of each other: the same content, and the same time in groups of the same ID.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub alt_group: Option<u32>,
    /// Base64: of `cmaf` an init segment, of `loc` what a decoder begins with.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub init_data: Option<String>,
    /// In the catalog's list.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub init_ref: Option<String>,
}

impl Catalog {
    /// Initialisation data that tracks have in common is written once.
    pub fn new(mut tracks: Vec<Track>) -> Self {
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
        Self { version: Version::default(), tracks, init_data_list, content_protections: Vec::new() }
    }

    /// Adds what is needed to decrypt tracks, by their names.
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

    /// # Errors
    /// It is no catalog, or a delta update of one.
    pub fn parse(json: &[u8]) -> Result<Self, serde_json::Error> {
        serde_json::from_slice(json)
    }

    pub fn to_json(&self) -> Result<Vec<u8>, serde_json::Error> {
        serde_json::to_vec_pretty(self)
    }

    /// A track's initialisation data in base64, wherever it is written.
    pub fn init_data<'a>(&'a self, track: &'a Track) -> Option<&'a str> {
        let listed = |id: &String| {
            let entry = self.init_data_list.iter().find(|entry| entry.id == *id)?;
            (entry.kind == "inline").then_some(entry.data.as_str())
        };
        track.init_data.as_deref().or_else(|| track.init_ref.as_ref().and_then(listed))
    }

    /// The tracks that can go on where `name` ends a group, as a player sees it that has begun with `name`: `name` itself and
    /// its alternates that need no other initialisation.
    pub fn alternates(&self, name: &str) -> Vec<&Track> {
        let Some(base) = self.tracks.iter().find(|track| track.name == name) else { return Vec::new() };
        if base.alt_group.is_none() {
            return vec![base];
        }
        let alike = |track: &&Track| {
            track.name == base.name || track.alt_group == base.alt_group && self.is_decoded_alike(base, track)
        };
        self.tracks.iter().filter(alike).collect()
    }

    fn is_decoded_alike(&self, one: &Track, other: &Track) -> bool {
        let same = |field: fn(&Track) -> &Option<String>| field(one) == field(other);
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

impl Track {
    /// The codec without profile and level, if key frames bring all that a decoder has to know.
    fn codec_in_band(&self) -> Option<&str> {
        let family = self.codec.as_deref()?.split('.').next()?;
        let in_band = self.packaging == "loc" || matches!(family, "avc3" | "hev1" | "vvi1");
        in_band.then_some(family)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(catalog: &Catalog, base: &str) -> Vec<String> {
        catalog.alternates(base).into_iter().map(|track| track.name.clone()).collect()
    }

    fn track(name: &str, codec: &str, init_data: Option<&str>) -> Track {
        Track {
            name: name.to_owned(),
            packaging: "cmaf".to_owned(),
            codec: Some(codec.to_owned()),
            init_data: init_data.map(str::to_owned),
            alt_group: Some(1),
            ..Track::default()
        }
    }

    #[test]
    fn alternates_need_no_other_initialisation() {
        let own = |track| Track { alt_group: Some(2), ..track };
        let loc = |track| Track { packaging: "loc".to_owned(), ..track };
        let catalog = Catalog::new(vec![
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
            Track { alt_group: None, ..track("alone", "avc1.64001f", Some("AAAA")) },
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
        let read = Catalog::parse(&json).unwrap();
        assert_eq!(read, catalog);
        assert_eq!(read.init_data_list.len(), 3, "each is written once");
        assert_eq!(names(&read, "a"), ["a", "b"]);
    }

    #[test]
    fn both_drafts_are_read() {
        let old = br#"{"version": 1, "generatedAt": 1, "tracks": [
            {"name": "hi", "packaging": "loc", "isLive": true, "altGroup": 7, "codec": "av01", "bitrate": 5000000, "framerate": 30},
            {"name": "lo", "packaging": "loc", "isLive": true, "altGroup": 7, "codec": "av01", "bitrate": 900000}]}"#;
        let new = br#"{"version": "draft-01", "initDataList": [{"id": "x", "type": "inline", "data": "AA"}, {"id": "y", "type": "url"}],
            "tracks": [
            {"name": "hi", "packaging": "cmaf", "altGroup": 7, "codec": "avc1.4d", "initRef": "x"},
            {"name": "lo", "packaging": "cmaf", "altGroup": 7, "codec": "avc1.4d", "initRef": "x"},
            {"name": "by reference", "packaging": "cmaf", "altGroup": 7, "codec": "avc1.4d", "initRef": "y"}]}"#;
        assert_eq!(names(&Catalog::parse(old).unwrap(), "hi"), ["hi", "lo"]);
        assert_eq!(names(&Catalog::parse(new).unwrap(), "hi"), ["hi", "lo"]);
        for bad in [&b"{}"[..], b"", b"[]", br#"{"deltaUpdate": true}"#, br#"{"tracks": [{}]}"#] {
            assert!(Catalog::parse(bad).is_err());
        }
    }
}
