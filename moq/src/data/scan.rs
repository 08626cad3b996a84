//! Finds the headers in a stream of headers and payloads, whose bytes arrive in arbitrary pieces.

use super::super::{DecodeError, vi64};
use super::MAX_PROPERTIES;

/// A reader of the fields at the start of a piece of a stream. If bytes are missing, it reports the smallest number of
/// additional bytes that it needs, so that the scanner never consumes bytes beyond the header.
pub(super) struct ScannedFields<'a> {
    rest: &'a [u8],
}

/// The reason why a header could not be read.
pub(super) enum ScanStop {
    /// The header is incomplete: it needs at least this many more bytes, 1 or more.
    Need(usize),
    Bad(DecodeError),
}

impl From<DecodeError> for ScanStop {
    fn from(error: DecodeError) -> Self {
        Self::Bad(error)
    }
}

impl<'a> ScannedFields<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self { rest: bytes }
    }

    pub(super) fn rest(&self) -> &'a [u8] {
        self.rest
    }

    pub(super) fn vi64(&mut self) -> Result<u64, ScanStop> {
        match vi64::decode(&mut self.rest) {
            Some(value) => Ok(value),
            None => {
                let length = self.rest.first().map_or(1, |first| vi64::encoded_len(*first));
                Err(ScanStop::Need(length - self.rest.len()))
            }
        }
    }

    pub(super) fn u8(&mut self) -> Result<u8, ScanStop> {
        self.rest.split_off_first().copied().ok_or(ScanStop::Need(1))
    }

    /// Reads a length, which is at most [`MAX_PROPERTIES`], and that many bytes.
    pub(super) fn properties(&mut self) -> Result<&'a [u8], ScanStop> {
        let len = self.vi64()?;
        if len > MAX_PROPERTIES {
            return Err(
                DecodeError::violation("the properties of an object are longer than 65536 bytes").into()
            );
        }
        let Some((properties, rest)) = self.rest.split_at_checked(len as usize) else {
            return Err(ScanStop::Need(len as usize - self.rest.len()));
        };
        self.rest = rest;
        Ok(properties)
    }
}

/// A header, with the stream offsets of its start and of its payload.
pub(super) struct FoundHeader<T> {
    pub(super) header: T,
    pub(super) start: u64,
    pub(super) payload: u64,
}

/// The largest payload of an object, in bytes: a QUIC stream cannot carry more (RFC 9000, section 19.8).
const MAX_PAYLOAD: u64 = (1 << 62) - 1;
/// Capacity in bytes that the buffer for incomplete headers keeps after a header is complete. A larger buffer is shrunk
/// to this capacity.
const KEPT: usize = 256;

/// A scanner of a stream of `header payload header payload ...`. It stores at most one incomplete header, and skips
/// payloads.
#[derive(Clone, Debug)]
pub(super) struct Scanner {
    /// Stream offset of the next byte that the scanner expects.
    offset: u64,
    /// The bytes of an incomplete header that were received so far.
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

    /// Returns the bytes of an incomplete header that were received so far.
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
    /// header and the length of its payload. The scanner calls `read` again with more bytes until `read` has the whole
    /// header.
    pub(super) fn next<T>(
        &mut self,
        chunk: &mut &[u8],
        mut read: impl FnMut(&mut ScannedFields<'_>) -> Result<(T, u64), ScanStop>,
    ) -> Result<Option<FoundHeader<T>>, DecodeError> {
        self.skip_payload(chunk);
        if chunk.is_empty() {
            return Ok(None);
        }
        if self.partial.is_empty() {
            let mut fields = ScannedFields::new(chunk);
            match read(&mut fields) {
                Ok((header, payload_len)) => {
                    let length = chunk.len() - fields.rest().len();
                    *chunk = fields.rest();
                    return self.found_header(header, length, length, payload_len).map(Some);
                }
                Err(ScanStop::Bad(error)) => return Err(error),
                Err(ScanStop::Need(_)) => {}
            }
        }
        loop {
            let mut fields = ScannedFields::new(&self.partial);
            match read(&mut fields) {
                Ok((header, payload_len)) => {
                    // The scanner consumes no bytes beyond the header, so the buffer ends with the header.
                    let length = self.partial.len();
                    self.partial.clear();
                    self.partial.shrink_to(KEPT);
                    return self.found_header(header, length, 0, payload_len).map(Some);
                }
                Err(ScanStop::Bad(error)) => return Err(error),
                Err(ScanStop::Need(needed)) => {
                    // If the chunk is empty, `split_at_checked` returns `None`, and the scanner waits for more bytes.
                    let taken = needed.clamp(1, chunk.len().max(1));
                    let Some((head, rest)) = chunk.split_at_checked(taken) else { return Ok(None) };
                    self.partial.extend_from_slice(head);
                    self.offset += head.len() as u64;
                    *chunk = rest;
                }
            }
        }
    }

    /// Records that a header of `length` bytes is complete. On entry, `self.offset` does not include the last `new`
    /// bytes of the header.
    fn found_header<T>(
        &mut self,
        header: T,
        length: usize,
        new: usize,
        payload_len: u64,
    ) -> Result<FoundHeader<T>, DecodeError> {
        self.offset += new as u64;
        if payload_len > MAX_PAYLOAD {
            return Err(DecodeError::violation("an object is longer than any stream"));
        }
        self.payload_left = payload_len;
        Ok(FoundHeader { header, start: self.offset - length as u64, payload: self.offset })
    }

    fn skip_payload(&mut self, chunk: &mut &[u8]) {
        let skipped = usize::try_from(self.payload_left).map_or(chunk.len(), |left| left.min(chunk.len()));
        *chunk = &chunk[skipped..];
        self.payload_left -= skipped as u64;
        self.offset += skipped as u64;
    }
}
