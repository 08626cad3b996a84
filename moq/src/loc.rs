//! Objects of the Low Overhead Media Container (draft-ietf-moq-loc-04): a sample as its decoder takes it, and properties of it.
//!
//! The properties are the draft's private ones: in front of the sample, in the payload, where relays do not look. The draft does not say where they
//! end; players do (`@moq/loc` 0.2, `moq-loc` 0.2), and this is what they read: a length in front, and integers of QUIC rather than vi64.

use bytes::Bytes;
use millrace_quic::cursor::Cursor;
use millrace_quic::varint;
use thiserror::Error;

const TIMESCALE: u64 = 0x08;
const VIDEO_CONFIG: u64 = 0x0d;
const AUDIO_CONFIG: u64 = 0x0f;
const TIMESTAMP: u64 = 0x10;
/// As draft-03 had it.
const TIMESTAMP_BEFORE: u64 = 0x06;

/// Of time stamps whose object does not say.
pub const MICROSECONDS: u64 = 1_000_000;

/// Why a payload is not LOC.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum NotLoc {
    #[error("properties that do not end where they should")]
    Malformed,
    #[error("no time stamp")]
    NoTimestamp,
    #[error("a timescale of 0")]
    NoTimescale,
}

/// What a decoder begins with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Config<'a> {
    Video(&'a [u8]),
    Audio(&'a [u8]),
}

/// One sample.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Object<'a> {
    /// When it is presented, in units of [`Self::timescale`].
    pub timestamp: u64,
    /// Units in a second; not 0.
    pub timescale: u64,
    pub config: Option<Config<'a>>,
    pub sample: &'a [u8],
}

impl<'a> Object<'a> {
    /// Properties that are not known are passed over.
    pub fn parse(payload: &'a [u8]) -> Result<Self, NotLoc> {
        let mut payload = Cursor { rest: payload };
        let properties = payload.prefixed().map_err(|_| NotLoc::Malformed)?;
        let mut properties = Cursor { rest: properties };
        let (mut timestamp, mut timescale, mut config) = (None, MICROSECONDS, None);
        let mut kind = 0_u64;
        while !properties.rest.is_empty() {
            let (next, value) = property(&mut properties, kind).ok_or(NotLoc::Malformed)?;
            kind = next;
            match (kind, value) {
                (TIMESTAMP | TIMESTAMP_BEFORE, Value::Number(value)) => timestamp = Some(value),
                (TIMESCALE, Value::Number(0)) => return Err(NotLoc::NoTimescale),
                (TIMESCALE, Value::Number(value)) => timescale = value,
                (VIDEO_CONFIG, Value::Bytes(bytes)) => config = Some(Config::Video(bytes)),
                (AUDIO_CONFIG, Value::Bytes(bytes)) => config = Some(Config::Audio(bytes)),
                _ => {}
            }
        }
        let timestamp = timestamp.ok_or(NotLoc::NoTimestamp)?;
        Ok(Self { timestamp, timescale, config, sample: payload.rest })
    }

    /// As a payload; `None`: a number is too large for it (2^62 or more).
    pub fn encode(&self) -> Option<Bytes> {
        if self.timestamp.max(self.timescale) > varint::MAX {
            return None;
        }
        let mut properties = Vec::new();
        // Each type as the difference to the one before.
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

enum Value<'a> {
    /// Of even types.
    Number(u64),
    /// Of odd types.
    Bytes(&'a [u8]),
}

/// The next property: its type, and what it says.
fn property<'a>(properties: &mut Cursor<'a>, before: u64) -> Option<(u64, Value<'a>)> {
    let kind = before.checked_add(properties.varint().ok()?)?;
    let value = match kind % 2 {
        0 => Value::Number(properties.varint().ok()?),
        _ => Value::Bytes(properties.prefixed().ok()?),
    };
    Some((kind, value))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// By hand from what `@moq/loc` 0.2.2 and `moq-loc` 0.2.27 read.
    #[test]
    fn objects_are_those_that_players_read() {
        let table: [(Object<'_>, &[u8]); 3] = [
            (
                Object { timestamp: 7, timescale: 50, config: None, sample: b"x" },
                &[4, 0x08, 50, 0x08, 7, b'x'],
            ),
            (
                // 96000 and 48000 take four bytes each, with 0b10 in front.
                Object { timestamp: 96_000, timescale: 48_000, config: None, sample: b"ab" },
                &[10, 0x08, 0x80, 0, 0xbb, 0x80, 0x08, 0x80, 1, 0x77, 0, b'a', b'b'],
            ),
            (
                Object { timestamp: 64, timescale: 25, config: Some(Config::Video(b"avc")), sample: b"" },
                &[10, 0x08, 25, 0x05, 3, b'a', b'v', b'c', 0x03, 0x40, 64],
            ),
        ];
        for (object, bytes) in table {
            assert_eq!(object.encode().unwrap(), bytes);
            assert_eq!(Object::parse(bytes), Ok(object));
        }
    }

    #[test]
    fn what_others_write_is_read() {
        let object = |timestamp, sample| Object { timestamp, timescale: MICROSECONDS, config: None, sample };
        // moq-cli: a time stamp in microseconds alone.
        assert_eq!(Object::parse(&[3, 0x10, 0x41, 0, b'x']), Ok(object(256, b"x")));
        // Draft-03's, and something unknown of either kind.
        assert_eq!(Object::parse(&[7, 0x06, 9, 0x06, 1, 0x05, 1, 0xff, b'x']), Ok(object(9, b"x")));
        for (bad, why) in [
            (&[][..], NotLoc::Malformed),
            (&[1], NotLoc::Malformed),
            (&[0, b'x'], NotLoc::NoTimestamp),
            (&[1, 0x10], NotLoc::Malformed),
            (&[2, 0x0d, 1, 0], NotLoc::Malformed),
            (&[4, 0x08, 0, 0x08, 1], NotLoc::NoTimescale),
        ] {
            assert_eq!(Object::parse(bad), Err(why), "{bad:?}");
        }
    }

    proptest! {
        #[test]
        fn what_is_written_is_read(
            timestamp in 0..=varint::MAX,
            timescale in 1..=varint::MAX,
            config in proptest::option::of(any::<Vec<u8>>()),
            sample: Vec<u8>,
        ) {
            let config = config.as_deref().map(Config::Audio);
            let object = Object { timestamp, timescale, config, sample: &sample };
            let payload = object.encode().unwrap();
            prop_assert_eq!(Object::parse(&payload), Ok(object));
        }

        #[test]
        fn nothing_makes_it_panic(payload: Vec<u8>) {
            if let Ok(object) = Object::parse(&payload) {
                prop_assert!(object.timescale > 0);
            }
        }
    }
}
