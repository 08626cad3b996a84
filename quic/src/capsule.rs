//! Capsules (RFC 9297) of a WebTransport session, in the HTTP/3 DATA frames that follow the CONNECT request. Only
//! CLOSE_WEBTRANSPORT_SESSION is interpreted (draft-ietf-webtrans-http3, "Session Termination").
//!
//! All other capsules are skipped as they arrive, whatever their length, so an endless capsule takes no memory.

use super::varint;

/// Type of the HTTP/3 frame that carries capsules.
const DATA: u64 = 0;
/// Type of the capsule that closes the session.
const CLOSE: u64 = 0x2843;
/// Length of the error code in the closing capsule, bytes.
const CODE: usize = 4;
/// Longest reason in a closing capsule, bytes.
pub const MAX_REASON: usize = 1024;

/// Code and reason that a session was closed with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Closed {
    /// The application's error code for the close.
    pub code: u32,
    /// The reason for the close, at most 1024 bytes.
    pub reason: String,
}

/// Error: the bytes on the session's stream are not well-formed HTTP/3 frames and capsules.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the messages describe the variants")]
pub enum MalformedCapsule {
    #[error("the capsule that closes the session has {0} bytes, not 4 to {most}", most = CODE + MAX_REASON)]
    Length(u64),
    #[error("the reason for closing the session is not UTF-8")]
    Reason,
    #[error("the session's stream ends inside a frame or a capsule")]
    Incomplete,
}

/// A parser of the bytes that follow the CONNECT request on a WebTransport session's stream.
///
/// The parser reads HTTP/3 frames, and capsules inside of DATA frames. The input may be split anywhere. The caller
/// calls [`Self::next`] until it returns a [`Closed`], which ends the session. If the stream ends before a [`Closed`]
/// was returned, the caller calls [`Self::finish`].
#[derive(Debug, Default)]
pub struct Capsules {
    frame: Unit,
    capsule: Unit,
    /// Bytes of the CLOSE_WEBTRANSPORT_SESSION capsule that have arrived so far.
    close: Vec<u8>,
}

/// A frame or a capsule: a type, a length, and a value of that length.
#[derive(Debug, Default)]
struct Unit {
    /// Type and length, which have at most 8 bytes each.
    front: [u8; 16],
    /// Bytes of type and length that have arrived.
    seen: usize,
    kind: u64,
    /// Bytes of the value that have not arrived yet.
    left: u64,
}

impl Unit {
    /// Reads type and length. Returns `None` if more bytes are needed.
    fn begin(&mut self, input: &mut &[u8]) -> Option<(u64, u64)> {
        while let Some((first, rest)) = input.split_first() {
            *input = rest;
            self.front[self.seen] = *first;
            self.seen += 1;
            let mut front = &self.front[..self.seen];
            if let (Some(kind), Some(len)) = (varint::decode(&mut front), varint::decode(&mut front)) {
                (self.seen, self.kind, self.left) = (0, kind, len);
                return Some((kind, len));
            }
        }
        None
    }

    /// Removes the bytes of the current frame's or capsule's value from the front of `input`, and returns them.
    fn take<'a>(&mut self, input: &mut &'a [u8]) -> &'a [u8] {
        let most = usize::try_from(self.left).unwrap_or(usize::MAX).min(input.len());
        let (piece, rest) = input.split_at(most);
        *input = rest;
        self.left -= piece.len() as u64;
        piece
    }

    fn is_over(&self) -> bool {
        self.seen == 0 && self.left == 0
    }
}

impl Capsules {
    /// Consumes `input`, up to the capsule that closes the session.
    ///
    /// # Errors
    /// Fails if the closing capsule is malformed, so that nothing after it can be interpreted.
    pub fn next(&mut self, input: &mut &[u8]) -> Result<Option<Closed>, MalformedCapsule> {
        while !input.is_empty() {
            if self.frame.left == 0 {
                self.frame.begin(input);
                continue;
            }
            let mut piece = self.frame.take(input);
            if self.frame.kind == DATA
                && let Some(closed) = self.next_of_data(&mut piece)?
            {
                return Ok(Some(closed));
            }
        }
        Ok(None)
    }

    fn next_of_data(&mut self, input: &mut &[u8]) -> Result<Option<Closed>, MalformedCapsule> {
        while !input.is_empty() {
            if self.capsule.left == 0 {
                match self.capsule.begin(input) {
                    // This length check bounds the buffer `close`, because only CLOSE capsules are buffered.
                    Some((CLOSE, len)) if !(CODE as u64..=(CODE + MAX_REASON) as u64).contains(&len) => {
                        return Err(MalformedCapsule::Length(len));
                    }
                    _ => continue,
                }
            }
            let piece = self.capsule.take(input);
            if self.capsule.kind != CLOSE {
                continue;
            }
            self.close.extend_from_slice(piece);
            if self.capsule.left == 0 {
                return closed(&std::mem::take(&mut self.close)).map(Some);
            }
        }
        Ok(None)
    }

    /// Notes that the stream has ended.
    ///
    /// # Errors
    /// Fails if the stream ended inside a frame or a capsule.
    pub fn finish(&self) -> Result<(), MalformedCapsule> {
        match self.frame.is_over() && self.capsule.is_over() {
            true => Ok(()),
            false => Err(MalformedCapsule::Incomplete),
        }
    }

    /// Returns how many bytes of an incomplete closing capsule are buffered.
    pub fn held(&self) -> usize {
        self.close.len()
    }
}

fn closed(capsule: &[u8]) -> Result<Closed, MalformedCapsule> {
    let Some((code, reason)) = capsule.split_first_chunk() else {
        return Err(MalformedCapsule::Length(capsule.len() as u64));
    };
    let reason = str::from_utf8(reason).map_err(|_| MalformedCapsule::Reason)?.to_owned();
    Ok(Closed { code: u32::from_be_bytes(*code), reason })
}

impl Closed {
    /// Appends a CLOSE_WEBTRANSPORT_SESSION capsule in one DATA frame. A reason longer than 1024 bytes is cut at a
    /// character boundary.
    pub fn encode(&self, out: &mut Vec<u8>) {
        let most = self.reason.len().min(MAX_REASON);
        let end = (0..=most).rev().find(|at| self.reason.is_char_boundary(*at)).unwrap_or(0);
        let reason = &self.reason[..end];
        let len = CODE + reason.len();
        let capsule = varint::len(CLOSE) + varint::len(len as u64) + len;
        [DATA, capsule as u64, CLOSE, len as u64].into_iter().for_each(|field| varint::encode(field, out));
        out.extend_from_slice(&self.code.to_be_bytes());
        out.extend_from_slice(reason.as_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn unit(kind: u64, payload: &[u8]) -> Vec<u8> {
        let mut bytes = Vec::new();
        [kind, payload.len() as u64].into_iter().for_each(|field| varint::encode(field, &mut bytes));
        bytes.extend_from_slice(payload);
        bytes
    }

    /// Parses a stream as a whole and byte by byte, and compares both outcomes.
    fn read(stream: &[u8]) -> Result<Option<Closed>, MalformedCapsule> {
        let mut whole = Capsules::default();
        let outcome = whole.next(&mut &stream[..]);
        let mut bytes = Capsules::default();
        let mut next = |byte: &u8| bytes.next(&mut &[*byte][..]).transpose();
        let one_by_one = stream.iter().find_map(&mut next).transpose();
        assert_eq!(one_by_one, outcome);
        match outcome {
            Ok(None) => whole.finish().map(|()| None),
            outcome => outcome,
        }
    }

    #[test]
    fn closing_capsule_yields_code_and_reason() {
        let closed = Closed { code: 420, reason: "test".into() };
        let mut bytes = Vec::new();
        closed.encode(&mut bytes);
        assert_eq!(bytes, b"\x00\x0b\x68\x43\x08\x00\x00\x01\xa4test");
        assert_eq!(read(&bytes), Ok(Some(closed.clone())));
        // Unknown frames and capsules come first, and the closing capsule is spread over several DATA frames.
        let front = [unit(0x21, b"frame"), unit(0, &unit(0x4321, &[9; 300])), unit(0, b""), unit(1, b"")];
        let pieces = [&bytes[2..7], &bytes[7..]].map(|piece| unit(0, piece));
        assert_eq!(read(&[front.concat(), pieces.concat()].concat()), Ok(Some(closed)));
        let silent = Closed { code: 0, reason: String::new() };
        assert_eq!(read(&unit(0, &unit(CLOSE, &[0; 4]))), Ok(Some(silent)));
    }

    #[test]
    fn invalid_closing_capsule_is_malformed() {
        assert_eq!(read(&unit(0, &unit(CLOSE, &[0; 3]))), Err(MalformedCapsule::Length(3)));
        assert_eq!(read(&unit(0, &unit(CLOSE, &[0; 1029]))), Err(MalformedCapsule::Length(1029)));
        assert_eq!(read(&unit(0, &unit(CLOSE, &[0, 0, 0, 0, 0xff]))), Err(MalformedCapsule::Reason));
        assert_eq!(read(b""), Ok(None));
        for cut in [&unit(0, b"x")[..], &[0x40], &[0], &[0x21, 9, 1], &unit(0, &[0x68])] {
            assert_eq!(read(cut), Err(MalformedCapsule::Incomplete), "{cut:?}");
        }
    }

    #[test]
    fn overlong_close_reason_is_cut_between_characters() {
        let mut bytes = Vec::new();
        Closed { code: 1, reason: "é".repeat(MAX_REASON) + "x" }.encode(&mut bytes);
        let reason = "é".repeat(MAX_REASON / 2);
        assert_eq!(read(&bytes), Ok(Some(Closed { code: 1, reason })));
    }

    #[test]
    fn capsule_of_unlimited_length_is_skipped_without_buffering() {
        let mut capsules = Capsules::default();
        let mut front = Vec::new();
        [0, varint::MAX, 0x77, varint::MAX - 16].iter().for_each(|field| varint::encode(*field, &mut front));
        assert_eq!(capsules.next(&mut &front[..]), Ok(None));
        for _ in 0..1000 {
            assert_eq!(capsules.next(&mut &[7; 1000][..]), Ok(None));
            assert_eq!(capsules.held(), 0);
        }
        assert_eq!(capsules.finish(), Err(MalformedCapsule::Incomplete));
    }
}
