//! The mapping of an application protocol to a QUIC connection: bare, or in a WebTransport session of HTTP/3
//! (draft-ietf-webtrans-http3).
//!
//! In a session each stream begins with a *preamble* that names the session. Each datagram begins with a quarter of the
//! session's ID. The application's error codes are mapped to a range of HTTP/3's. Preambles and the mapping are the
//! same for the whole session, so stream offsets differ from those of a bare connection by a constant.

use std::ops::Deref;

use super::varint;

/// HTTP/3's ALPN (RFC 9114).
pub const ALPN: &[u8] = b"h3";

/// Stream type of the unidirectional streams of a WebTransport session.
const STREAM: u64 = 0x54;
/// Signal value that the bidirectional streams of a WebTransport session begin with, in place of an HTTP/3 frame type.
const FRAME: u64 = 0x41;

/// HTTP/3's error code for the application's code 0. Larger codes follow, but every 31st value is left out ("Resetting
/// Data Streams" in the draft).
const FIRST_CODE: u64 = 0x52e4_a40f_a8db;
/// HTTP/3's error code for the application's largest code, 2^32 - 1.
const LAST_CODE: u64 = 0x52e5_ac98_3162;

/// HTTP/3 error codes (RFC 9114, section 8.1) that this endpoint sends.
pub mod error {
    /// H3_REQUEST_REJECTED: a request was not processed.
    pub const REQUEST_REJECTED: u64 = 0x10b;
}

/// The encoding of the application's streams, datagrams and error codes on the connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Binding {
    /// The application uses a QUIC connection without HTTP/3.
    #[default]
    Bare,
    /// The application is in the WebTransport session with this ID: the stream ID of its CONNECT request.
    Session(u64),
}

/// The bytes before the application's first byte of a stream or datagram. `Preamble` dereferences to these bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Preamble {
    bytes: [u8; 10],
    len: u8,
}

impl Deref for Preamble {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes[..usize::from(self.len)]
    }
}

impl Preamble {
    fn from_values(values: &[u64]) -> Self {
        let mut bytes = Vec::with_capacity(10);
        values.iter().for_each(|value| varint::encode(*value, &mut bytes));
        let mut preamble = Self { len: bytes.len() as u8, ..Self::default() };
        preamble.bytes[..bytes.len()].copy_from_slice(&bytes);
        preamble
    }
}

/// The protocol layer to which a stream belongs, found from the stream's first bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Begins {
    /// The layer is not known yet: more bytes of the stream are needed.
    Unknown,
    /// The stream is the application's, after WebTransport's header of this length.
    Ours(usize),
    /// The stream belongs to a session that does not exist.
    Stray(u64),
    /// The stream belongs to HTTP/3 itself. The value is the type of a unidirectional stream, or of a bidirectional
    /// stream's first frame.
    Http(u64),
}

impl Binding {
    /// Returns the bytes that WebTransport puts before the application's bytes on unidirectional streams.
    pub fn uni(self) -> Preamble {
        self.preamble(STREAM)
    }

    /// Returns the bytes that WebTransport puts before the application's bytes on bidirectional streams. Only the
    /// endpoint that opens the stream sends them.
    pub fn bidi(self) -> Preamble {
        self.preamble(FRAME)
    }

    /// Returns the bytes that WebTransport puts before the application's bytes in datagrams.
    pub fn datagram(self) -> Preamble {
        match self {
            Self::Bare => Preamble::default(),
            Self::Session(id) => Preamble::from_values(&[id / 4]),
        }
    }

    /// Returns the protocol layer to which a peer's unidirectional stream belongs, if `front` are the stream's first
    /// bytes.
    pub fn begins_uni(self, front: &[u8]) -> Begins {
        self.begins(STREAM, front)
    }

    /// Returns the protocol layer to which a peer's bidirectional stream belongs, if `front` are the stream's first
    /// bytes.
    pub fn begins_bidi(self, front: &[u8]) -> Begins {
        self.begins(FRAME, front)
    }

    /// Returns the offset of the application's bytes in a datagram, or `None` if the datagram belongs to another
    /// session.
    pub fn strip(self, datagram: &[u8]) -> Option<usize> {
        match self {
            Self::Bare => Some(0),
            Self::Session(id) => {
                let mut rest = datagram;
                (varint::decode(&mut rest)? == id / 4).then(|| datagram.len() - rest.len())
            }
        }
    }

    /// Converts an error code of the application to the one on the wire. In a WebTransport session, codes above 2^32 -
    /// 1 become 2^32 - 1.
    pub fn to_wire(self, code: u64) -> u64 {
        match self {
            Self::Bare => code,
            Self::Session(_) => {
                let code = code.min(u64::from(u32::MAX));
                // Codes of the form 0x1f * n + 0x21 are reserved (RFC 9114, section 8.1), so each 30 codes are followed
                // by a gap.
                FIRST_CODE + code + code / 0x1e
            }
        }
    }

    /// Converts an error code on the wire to the application's. Codes of HTTP/3 itself become 0.
    pub fn from_wire(self, code: u64) -> u64 {
        match self {
            Self::Bare => code,
            Self::Session(_) if (FIRST_CODE..=LAST_CODE).contains(&code) => {
                let shifted = code - FIRST_CODE;
                // Each block of 31 HTTP/3 error codes has one reserved code, which stands for no application code and
                // is skipped.
                shifted - shifted / 0x1f
            }
            Self::Session(_) => 0,
        }
    }

    fn preamble(self, kind: u64) -> Preamble {
        match self {
            Self::Bare => Preamble::default(),
            Self::Session(id) => Preamble::from_values(&[kind, id]),
        }
    }

    fn begins(self, kind: u64, front: &[u8]) -> Begins {
        let Self::Session(session) = self else { return Begins::Ours(0) };
        let mut rest = front;
        match varint::decode(&mut rest) {
            None => Begins::Unknown,
            Some(found) if found != kind => Begins::Http(found),
            Some(_) => match varint::decode(&mut rest) {
                None => Begins::Unknown,
                Some(id) if id == session => Begins::Ours(front.len() - rest.len()),
                Some(id) => Begins::Stray(id),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SESSION: Binding = Binding::Session(4);

    #[test]
    fn webtransport_stream_preambles_match_the_draft() {
        assert_eq!(*Binding::Session(0).uni(), [0x40, 0x54, 0]);
        assert_eq!(*Binding::Session(0).bidi(), [0x40, 0x41, 0]);
        assert_eq!(*Binding::Session(0x40).uni(), [0x40, 0x54, 0x40, 0x40]);
        assert_eq!(*SESSION.datagram(), [1]);
        assert!(Binding::Bare.uni().is_empty() && Binding::Bare.bidi().is_empty());
        assert!(Binding::Bare.datagram().is_empty());
    }

    #[test]
    fn webtransport_session_of_a_stream_is_known_after_its_whole_preamble() {
        let whole = SESSION.uni();
        for end in 0..whole.len() {
            assert_eq!(SESSION.begins_uni(&whole[..end]), Begins::Unknown);
        }
        assert_eq!(SESSION.begins_uni(&whole), Begins::Ours(3));
        assert_eq!(SESSION.begins_uni(&[0x40, 0x54, 8]), Begins::Stray(8));
        assert_eq!(SESSION.begins_uni(&[0]), Begins::Http(0));
        assert_eq!(SESSION.begins_bidi(&SESSION.bidi()), Begins::Ours(3));
        assert_eq!(SESSION.begins_bidi(&[1]), Begins::Http(1));
        // QUIC allows encodings of integers that are longer than needed.
        assert_eq!(SESSION.begins_uni(&[0x80, 0, 0, 0x54, 0x40, 4]), Begins::Ours(6));
        assert_eq!(Binding::Bare.begins_uni(&[]), Begins::Ours(0));
    }

    #[test]
    fn datagram_of_another_session_is_dropped() {
        assert_eq!(SESSION.strip(&[1, 7, 8]), Some(1));
        assert_eq!(SESSION.strip(&[2, 7, 8]), None);
        assert_eq!(SESSION.strip(&[]), None);
        assert_eq!(Binding::Bare.strip(&[]), Some(0));
    }

    #[test]
    fn webtransport_error_codes_match_the_draft() {
        for (code, wire) in [
            (0, FIRST_CODE),
            (0x1d, FIRST_CODE + 0x1d),
            (0x1e, FIRST_CODE + 0x1f),
            (u64::from(u32::MAX), LAST_CODE),
        ] {
            assert_eq!(SESSION.to_wire(code), wire);
            assert_eq!(SESSION.from_wire(wire), code);
        }
        assert_eq!(SESSION.from_wire(error::REQUEST_REJECTED), 0);
        assert_eq!(SESSION.to_wire(u64::MAX), LAST_CODE);
    }

    proptest! {
        #[test]
        fn error_codes_round_trip(code: u32) {
            let wire = SESSION.to_wire(code.into());
            prop_assert_eq!(SESSION.from_wire(wire), u64::from(code));
            // Codes of the form 0x1f * n + 0x21 are reserved (RFC 9114, section 8.1).
            prop_assert_ne!((wire - 0x21) % 0x1f, 0);
        }

        #[test]
        fn arbitrary_stream_beginning_never_panics(front: Vec<u8>, session in 0..varint::MAX) {
            let binding = Binding::Session(session);
            if let Begins::Ours(len) = binding.begins_uni(&front) {
                prop_assert!(len <= front.len());
            }
            if let Some(len) = binding.strip(&front) {
                prop_assert!(len <= front.len());
            }
        }
    }
}
