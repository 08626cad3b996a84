//! Finds headers in a stream of headers and payloads that arrives in arbitrary pieces.

use super::super::{DecodeError, vi64};
use super::MAX_PROPERTIES;

/// Fields at the front of a piece of a stream. Where bytes are missing, it says how many are needed at least, so that
/// a scanner takes no byte beyond the header.
pub(super) struct Fields<'a> {
    rest: &'a [u8],
}

/// Why a header was not read.
pub(super) enum Stop {
    /// At least so many more bytes are needed: 1 or more.
    Need(usize),
    Bad(DecodeError),
}

impl From<DecodeError> for Stop {
    fn from(error: DecodeError) -> Self {
        Self::Bad(error)
    }
}

impl<'a> Fields<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self { rest: bytes }
    }

    pub(super) fn rest(&self) -> &'a [u8] {
        self.rest
    }

    pub(super) fn vi64(&mut self) -> Result<u64, Stop> {
        match vi64::decode(&mut self.rest) {
            Some(value) => Ok(value),
            None => {
                let length = self.rest.first().map_or(1, |first| vi64::encoded_len(*first));
                Err(Stop::Need(length - self.rest.len()))
            }
        }
    }

    pub(super) fn u8(&mut self) -> Result<u8, Stop> {
        self.rest.split_off_first().copied().ok_or(Stop::Need(1))
    }

    /// A length of at most [`MAX_PROPERTIES`] and as many bytes.
    pub(super) fn properties(&mut self) -> Result<&'a [u8], Stop> {
        let len = self.vi64()?;
        if len > MAX_PROPERTIES {
            return Err(
                DecodeError::violation("the properties of an object are longer than 65536 bytes").into()
            );
        }
        let Some((properties, rest)) = self.rest.split_at_checked(len as usize) else {
            return Err(Stop::Need(len as usize - self.rest.len()));
        };
        self.rest = rest;
        Ok(properties)
    }
}

/// A header, where it began and where its payload begins, as offsets in the stream.
pub(super) struct Found<T> {
    pub(super) header: T,
    pub(super) start: u64,
    pub(super) payload: u64,
}

/// Of a QUIC stream (RFC 9000, section 4.5), and so of a payload in it.
const MAX_PAYLOAD: u64 = (1 << 62) - 1;
/// Memory that is kept for the next header, bytes.
const KEPT: usize = 256;

/// Walks a stream of `header payload header payload ...`. Holds at most one incomplete header; payloads
/// are skipped.
#[derive(Clone, Debug)]
pub(super) struct Scanner {
    /// Stream offset of the next byte to come.
    offset: u64,
    /// The bytes so far of a header that is not complete.
    partial: Vec<u8>,
    payload_left: u64,
}

impl Scanner {
    pub(super) fn new(offset: u64) -> Self {
        Self { offset, partial: Vec::new(), payload_left: 0 }
    }

    pub(super) fn offset(&self) -> u64 {
        self.offset
    }

    /// The bytes so far of a header that is not complete.
    pub(super) fn partial(&self) -> &[u8] {
        &self.partial
    }

    pub(super) fn payload_left(&self) -> u64 {
        self.payload_left
    }

    pub(super) fn incomplete(&self) -> usize {
        self.partial.len()
    }

    pub(super) fn at_boundary(&self) -> bool {
        self.partial.is_empty() && self.payload_left == 0
    }

    /// Consumes `chunk` up to the end of the next header, or all of it if no header ends in it. `read` returns the
    /// header and the length of its payload. It is called again with more bytes until it has the whole header.
    pub(super) fn next<T>(
        &mut self,
        chunk: &mut &[u8],
        mut read: impl FnMut(&mut Fields<'_>) -> Result<(T, u64), Stop>,
    ) -> Result<Option<Found<T>>, DecodeError> {
        self.skip_payload(chunk);
        if chunk.is_empty() {
            return Ok(None);
        }
        if self.partial.is_empty() {
            let mut fields = Fields::new(chunk);
            match read(&mut fields) {
                Ok((header, payload_len)) => {
                    let length = chunk.len() - fields.rest().len();
                    *chunk = fields.rest();
                    return self.found(header, length, length, payload_len).map(Some);
                }
                Err(Stop::Bad(error)) => return Err(error),
                Err(Stop::Need(_)) => {}
            }
        }
        loop {
            let mut fields = Fields::new(&self.partial);
            match read(&mut fields) {
                Ok((header, payload_len)) => {
                    // Never more than was needed was taken, so nothing follows the header.
                    let length = self.partial.len();
                    self.partial.clear();
                    self.partial.shrink_to(KEPT);
                    return self.found(header, length, 0, payload_len).map(Some);
                }
                Err(Stop::Bad(error)) => return Err(error),
                Err(Stop::Need(needed)) => {
                    let taken = needed.clamp(1, chunk.len().max(1));
                    let Some((head, rest)) = chunk.split_at_checked(taken) else { return Ok(None) };
                    self.partial.extend_from_slice(head);
                    self.offset += head.len() as u64;
                    *chunk = rest;
                }
            }
        }
    }

    /// A header of `length` bytes was found. The last `new` of them are not counted in the offset yet.
    fn found<T>(
        &mut self,
        header: T,
        length: usize,
        new: usize,
        payload_len: u64,
    ) -> Result<Found<T>, DecodeError> {
        self.offset += new as u64;
        if payload_len > MAX_PAYLOAD {
            return Err(DecodeError::violation("an object is longer than any stream"));
        }
        self.payload_left = payload_len;
        Ok(Found { header, start: self.offset - length as u64, payload: self.offset })
    }

    fn skip_payload(&mut self, chunk: &mut &[u8]) {
        let skipped = usize::try_from(self.payload_left).map_or(chunk.len(), |left| left.min(chunk.len()));
        *chunk = &chunk[skipped..];
        self.payload_left -= skipped as u64;
        self.offset += skipped as u64;
    }
}
