//! What follows the CONNECT request of a WebTransport session on its stream: capsules (RFC 9297) in HTTP/3's DATA frames. One
//! of them means something: the one that closes the session (draft-ietf-webtrans-http3, "Session Termination").
//!
//! All others are passed over as they come, whatever their length: a peer without end costs no memory.

use super::varint;

/// HTTP/3's frame that carries capsules.
const DATA: u64 = 0;
/// The capsule that closes the session.
const CLOSE: u64 = 0x2843;
/// Bytes of its error code.
const CODE: usize = 4;
/// The longest reason, bytes.
pub const MAX_REASON: usize = 1024;

/// With what a session is closed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Closed {
    pub code: u32,
    pub reason: String,
}

/// What is no end of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    #[error("the capsule that closes the session has {0} bytes, not 4 to {most}", most = CODE + MAX_REASON)]
    Length(u64),
    #[error("the session is closed for a reason that is no UTF-8")]
    Reason,
    #[error("the session's stream ends inside a frame or a capsule")]
    Incomplete,
}

/// Reads the stream behind the request.
#[derive(Debug, Default)]
pub struct Capsules {
    frame: Unit,
    capsule: Unit,
    /// What has come of the capsule that closes.
    close: Vec<u8>,
}

/// A frame, or a capsule: a type, a length, and so many bytes.
#[derive(Debug, Default)]
struct Unit {
    front: [u8; 16],
    /// How much of type and length has come.
    seen: usize,
    kind: u64,
    /// Of the bytes behind them, what is still to come.
    left: u64,
}

impl Unit {
    /// Reads type and length, if they have not come yet. `None`: more has to come.
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

    /// Takes what has come of the bytes behind.
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
    /// Takes what has come, up to the capsule that closes the session.
    ///
    /// # Errors
    /// That capsule is malformed: nothing behind it can be understood.
    pub fn next(&mut self, input: &mut &[u8]) -> Result<Option<Closed>, Malformed> {
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

    fn next_of_data(&mut self, input: &mut &[u8]) -> Result<Option<Closed>, Malformed> {
        while !input.is_empty() {
            if self.capsule.left == 0 {
                match self.capsule.begin(input) {
                    Some((CLOSE, len)) if !(CODE as u64..=(CODE + MAX_REASON) as u64).contains(&len) => {
                        return Err(Malformed::Length(len));
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

    /// The stream is over.
    ///
    /// # Errors
    /// It was, inside something.
    pub fn finish(&self) -> Result<(), Malformed> {
        match self.frame.is_over() && self.capsule.is_over() {
            true => Ok(()),
            false => Err(Malformed::Incomplete),
        }
    }

    /// Bytes that it holds.
    pub fn held(&self) -> usize {
        self.close.len()
    }
}

fn closed(capsule: &[u8]) -> Result<Closed, Malformed> {
    let Some((code, reason)) = capsule.split_first_chunk() else {
        return Err(Malformed::Length(capsule.len() as u64));
    };
    let reason = str::from_utf8(reason).map_err(|_| Malformed::Reason)?.to_owned();
    Ok(Closed { code: u32::from_be_bytes(*code), reason })
}

impl Closed {
    /// Writes the capsule in a frame of its own. Of a reason that is too long the front is said.
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

    /// All at once, and byte by byte.
    fn read(stream: &[u8]) -> Result<Option<Closed>, Malformed> {
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
    fn a_session_is_closed_with_code_and_reason() {
        let closed = Closed { code: 420, reason: "test".into() };
        let mut bytes = Vec::new();
        closed.encode(&mut bytes);
        assert_eq!(bytes, b"\x00\x0b\x68\x43\x08\x00\x00\x01\xa4test");
        assert_eq!(read(&bytes), Ok(Some(closed.clone())));
        // Behind whatever means nothing, and in as many frames as one likes.
        let front = [unit(0x21, b"frame"), unit(0, &unit(0x4321, &[9; 300])), unit(0, b""), unit(1, b"")];
        let pieces = [&bytes[2..7], &bytes[7..]].map(|piece| unit(0, piece));
        assert_eq!(read(&[front.concat(), pieces.concat()].concat()), Ok(Some(closed)));
        let silent = Closed { code: 0, reason: String::new() };
        assert_eq!(read(&unit(0, &unit(CLOSE, &[0; 4]))), Ok(Some(silent)));
    }

    #[test]
    fn what_is_no_end_is_malformed() {
        assert_eq!(read(&unit(0, &unit(CLOSE, &[0; 3]))), Err(Malformed::Length(3)));
        assert_eq!(read(&unit(0, &unit(CLOSE, &[0; 1029]))), Err(Malformed::Length(1029)));
        assert_eq!(read(&unit(0, &unit(CLOSE, &[0, 0, 0, 0, 0xff]))), Err(Malformed::Reason));
        assert_eq!(read(b""), Ok(None));
        for cut in [&unit(0, b"x")[..], &[0x40], &[0], &[0x21, 9, 1], &unit(0, &[0x68])] {
            assert_eq!(read(cut), Err(Malformed::Incomplete), "{cut:?}");
        }
    }

    #[test]
    fn a_reason_that_is_too_long_loses_its_end() {
        let mut bytes = Vec::new();
        Closed { code: 1, reason: "é".repeat(MAX_REASON) + "x" }.encode(&mut bytes);
        let reason = "é".repeat(MAX_REASON / 2);
        assert_eq!(read(&bytes), Ok(Some(Closed { code: 1, reason })));
    }

    #[test]
    fn capsules_without_end_are_not_held() {
        let mut capsules = Capsules::default();
        let mut front = Vec::new();
        [0, varint::MAX, 0x77, varint::MAX - 16].iter().for_each(|field| varint::encode(*field, &mut front));
        assert_eq!(capsules.next(&mut &front[..]), Ok(None));
        for _ in 0..1000 {
            assert_eq!(capsules.next(&mut &[7; 1000][..]), Ok(None));
            assert_eq!(capsules.held(), 0);
        }
        assert_eq!(capsules.finish(), Err(Malformed::Incomplete));
    }
}
