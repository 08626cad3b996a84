//! A cursor over one complete control message, and the encoders that mirror it.

use bytes::{Buf, Bytes};

use super::{DecodeError, vi64};

/// The fields of a message, front to back. The message is complete, so a field that goes past its end is a protocol
/// violation.
#[derive(Debug)]
pub(super) struct Reader {
    rest: Bytes,
}

const TRUNCATED: DecodeError = DecodeError::violation("a field runs past the end of its message");

impl Reader {
    pub(super) fn new(message: Bytes) -> Self {
        Self { rest: message }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.rest.is_empty()
    }

    pub(super) fn u8(&mut self) -> Result<u8, DecodeError> {
        self.rest.try_get_u8().map_err(|_| TRUNCATED)
    }

    pub(super) fn vi64(&mut self) -> Result<u64, DecodeError> {
        let mut input = &self.rest[..];
        let value = vi64::decode(&mut input).ok_or(TRUNCATED)?;
        self.rest.advance(self.rest.len() - input.len());
        Ok(value)
    }

    /// A length and as many bytes, shared with the message.
    pub(super) fn prefixed(&mut self) -> Result<Bytes, DecodeError> {
        let len = self.vi64()?;
        match usize::try_from(len) {
            Ok(len) if len <= self.rest.len() => Ok(self.rest.split_to(len)),
            _ => Err(TRUNCATED),
        }
    }

    /// A length of at most `max` and as many bytes of text.
    pub(super) fn text(&mut self, max: usize, too_long: &'static str) -> Result<String, DecodeError> {
        let bytes = self.prefixed()?;
        if bytes.len() > max {
            return Err(DecodeError::violation(too_long));
        }
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    pub(super) fn rest(&mut self) -> Bytes {
        std::mem::take(&mut self.rest)
    }

    /// Every byte must have been a field.
    pub(super) fn finish(&self) -> Result<(), DecodeError> {
        match self.is_empty() {
            true => Ok(()),
            false => Err(DecodeError::violation("a message is longer than its fields")),
        }
    }
}

pub(super) fn put_prefixed(bytes: &[u8], out: &mut Vec<u8>) {
    vi64::encode(bytes.len() as u64, out);
    out.extend_from_slice(bytes);
}
