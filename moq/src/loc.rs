//! Objects of the Low Overhead Media Container (draft-ietf-moq-loc-04): a sample in the decoder's own format, with
//! properties.
//!
//! This module uses only those properties that the draft calls private. They precede the sample inside the payload,
//! which relays do not read. The draft does not say where the properties end. Players (`@moq/loc` 0.2, `moq-loc` 0.2)
//! expect a length before them, and QUIC varints instead of vi64, so this module writes both.

use bytes::Bytes;
use millrace_quic::cursor::PayloadCursor;
use millrace_quic::varint;
use thiserror::Error;

const TIMESCALE: u64 = 0x08;
const VIDEO_CONFIG: u64 = 0x0d;
const AUDIO_CONFIG: u64 = 0x0f;
const TIMESTAMP: u64 = 0x10;
/// The property type of the time stamp in draft-ietf-moq-loc-03.
const TIMESTAMP_BEFORE: u64 = 0x06;

/// Units per second of a time stamp, if the object states no time scale.
pub const MICROSECONDS: u64 = 1_000_000;

/// The reason why a payload is not a LOC object.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[allow(missing_docs, reason = "the messages describe the variants")]
pub enum NotLoc {
    #[error("an object's LOC properties do not fill their length")]
    Malformed,
    #[error("an object has no LOC time stamp")]
    NoTimestamp,
    #[error("an object has a LOC timescale of 0")]
    NoTimescale,
}

/// A decoder configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Config<'a> {
    /// Configuration of a video decoder.
    Video(&'a [u8]),
    /// Configuration of an audio decoder.
    Audio(&'a [u8]),
}

/// One media sample: a coded picture, or a piece of audio.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LocSample<'a> {
    /// Presentation time, in units of [`Self::timescale`].
    pub timestamp: u64,
    /// Number of the time stamp's units in a second. It must not be 0.
    pub timescale: u64,
    /// The decoder configuration. It is present on samples with which a decoder can start.
    pub config: Option<Config<'a>>,
    /// The sample's data.
    pub sample: &'a [u8],
}

impl<'a> LocSample<'a> {
    /// Reads an object from its payload. Unknown properties are skipped.
    pub fn parse(payload: &'a [u8]) -> Result<Self, NotLoc> {
        let mut payload = PayloadCursor { rest: payload };
        let properties = payload.prefixed().map_err(|_| NotLoc::Malformed)?;
        let mut properties = PayloadCursor { rest: properties };
        let mut timestamp = None;
        let mut timescale = MICROSECONDS;
        let mut config = None;
        // Each property's type is encoded as the difference to the previous property's type, so the types are in
        // ascending order.
        let mut kind = 0_u64;
        while !properties.rest.is_empty() {
            let (next, value) = property(&mut properties, kind).ok_or(NotLoc::Malformed)?;
            kind = next;
            match (kind, value) {
                (TIMESTAMP | TIMESTAMP_BEFORE, LocValue::Number(value)) => timestamp = Some(value),
                (TIMESCALE, LocValue::Number(0)) => return Err(NotLoc::NoTimescale),
                (TIMESCALE, LocValue::Number(value)) => timescale = value,
                (VIDEO_CONFIG, LocValue::Bytes(bytes)) => config = Some(Config::Video(bytes)),
                (AUDIO_CONFIG, LocValue::Bytes(bytes)) => config = Some(Config::Audio(bytes)),
                _ => {}
            }
        }
        let timestamp = timestamp.ok_or(NotLoc::NoTimestamp)?;
        Ok(Self { timestamp, timescale, config, sample: payload.rest })
    }

    /// Encodes the object as a payload. Returns `None` if a number is too large (2^62 or more).
    pub fn encode(&self) -> Option<Bytes> {
        if self.timestamp.max(self.timescale) > varint::MAX {
            return None;
        }
        let mut properties = Vec::new();
        // Each property's type is encoded as the difference to the previous property's type.
        varint::encode(TIMESCALE, &mut properties);
        varint::encode(self.timescale, &mut properties);
        let mut before = TIMESCALE;
        if let Some((kind, config)) = self.config.map(Config::property) {
            varint::encode(kind - before, &mut properties);
            varint::encode(config.len() as u64, &mut properties);
            properties.extend_from_slice(config);
            before = kind;
        }
        varint::encode(TIMESTAMP - before, &mut properties);
        varint::encode(self.timestamp, &mut properties);
        let mut payload =
            Vec::with_capacity(varint::len(properties.len() as u64) + properties.len() + self.sample.len());
        varint::encode(properties.len() as u64, &mut payload);
        payload.extend_from_slice(&properties);
        payload.extend_from_slice(self.sample);
        Some(payload.into())
    }
}

impl<'a> Config<'a> {
    fn property(self) -> (u64, &'a [u8]) {
        match self {
            Self::Video(bytes) => (VIDEO_CONFIG, bytes),
            Self::Audio(bytes) => (AUDIO_CONFIG, bytes),
        }
    }
}

enum LocValue<'a> {
    /// The integer value of a property with an even type.
    Number(u64),
    /// The byte string value of a property with an odd type.
    Bytes(&'a [u8]),
}

/// Reads the next property: its type and its value.
fn property<'a>(properties: &mut PayloadCursor<'a>, before: u64) -> Option<(u64, LocValue<'a>)> {
    let kind = before.checked_add(properties.varint().ok()?)?;
    let value = match kind % 2 {
        0 => LocValue::Number(properties.varint().ok()?),
        _ => LocValue::Bytes(properties.prefixed().ok()?),
    };
    Some((kind, value))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The expected bytes were derived by hand from the parsers of `@moq/loc` 0.2.2 and `moq-loc` 0.2.27.
    #[test]
    fn loc_object_has_the_encoding_that_players_read() {
        let table: [(LocSample<'_>, &[u8]); 3] = [
            (
                LocSample { timestamp: 7, timescale: 50, config: None, sample: b"x" },
                &[4, 0x08, 50, 0x08, 7, b'x'],
            ),
            (
                // The time stamp 96000 and the time scale 48000 take four bytes each as QUIC varints, which begin with
                // the bits 10.
                LocSample { timestamp: 96_000, timescale: 48_000, config: None, sample: b"ab" },
                &[10, 0x08, 0x80, 0, 0xbb, 0x80, 0x08, 0x80, 1, 0x77, 0, b'a', b'b'],
            ),
            (
                LocSample { timestamp: 64, timescale: 25, config: Some(Config::Video(b"avc")), sample: b"" },
                &[10, 0x08, 25, 0x05, 3, b'a', b'v', b'c', 0x03, 0x40, 64],
            ),
        ];
        for (object, bytes) in table {
            assert_eq!(object.encode().unwrap(), bytes);
            assert_eq!(LocSample::parse(bytes), Ok(object));
        }
    }

    #[test]
    fn loc_object_with_unknown_properties_or_no_timescale_is_parsed() {
        let object =
            |timestamp, sample| LocSample { timestamp, timescale: MICROSECONDS, config: None, sample };
        // moq-cli sends a time stamp in microseconds and no other property.
        assert_eq!(LocSample::parse(&[3, 0x10, 0x41, 0, b'x']), Ok(object(256, b"x")));
        // The first property is a time stamp with the property type of draft-ietf-moq-loc-03. The other two properties
        // have unknown types, one even and one odd.
        assert_eq!(LocSample::parse(&[7, 0x06, 9, 0x06, 1, 0x05, 1, 0xff, b'x']), Ok(object(9, b"x")));
        for (bad, why) in [
            (&[][..], NotLoc::Malformed),
            (&[1], NotLoc::Malformed),
            (&[0, b'x'], NotLoc::NoTimestamp),
            (&[1, 0x10], NotLoc::Malformed),
            (&[2, 0x0d, 1, 0], NotLoc::Malformed),
            (&[4, 0x08, 0, 0x08, 1], NotLoc::NoTimescale),
        ] {
            assert_eq!(LocSample::parse(bad), Err(why), "{bad:?}");
        }
    }

    proptest! {
        #[test]
        fn encoded_loc_object_is_parsed_unchanged(
            timestamp in 0..=varint::MAX,
            timescale in 1..=varint::MAX,
            config in proptest::option::of(any::<Vec<u8>>()),
            sample: Vec<u8>,
        ) {
            let config = config.as_deref().map(Config::Audio);
            let object = LocSample { timestamp, timescale, config, sample: &sample };
            let payload = object.encode().unwrap();
            prop_assert_eq!(LocSample::parse(&payload), Ok(object));
        }

        #[test]
        fn loc_payload_of_arbitrary_bytes_never_panics(payload: Vec<u8>) {
            if let Ok(object) = LocSample::parse(&payload) {
                prop_assert!(object.timescale > 0);
            }
        }
    }
}
