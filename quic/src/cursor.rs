//! A cursor over the fields of a decrypted payload.

use thiserror::Error;

use super::varint;

/// Reason why a payload is not a sequence of frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[allow(missing_docs, reason = "the messages describe the variants")]
pub enum Error {
    #[error("the payload ends inside a frame")]
    Truncated,
    #[error("unknown frame type {0:#x}")]
    Unknown(u64),
    #[error("a field of frame type {0:#x} has an impossible value")]
    Malformed(u64),
}

/// A cursor over the rest of a payload. Each method takes one field from the front. After an error the cursor must not
/// be used.
pub struct PayloadCursor<'a> {
    /// The bytes of the payload that were not read yet.
    pub rest: &'a [u8],
}

impl<'a> PayloadCursor<'a> {
    /// Takes a variable-length integer.
    pub fn varint(&mut self) -> Result<u64, Error> {
        varint::decode(&mut self.rest).ok_or(Error::Truncated)
    }

    /// Takes `len` bytes.
    pub fn bytes(&mut self, len: usize) -> Result<&'a [u8], Error> {
        let (head, rest) = self.rest.split_at_checked(len).ok_or(Error::Truncated)?;
        self.rest = rest;
        Ok(head)
    }

    /// Takes a length as a variable-length integer, and that many bytes after it.
    pub fn prefixed(&mut self) -> Result<&'a [u8], Error> {
        let len = usize::try_from(self.varint()?).map_err(|_| Error::Truncated)?;
        self.bytes(len)
    }

    /// Takes `N` bytes as an array.
    pub fn array<const N: usize>(&mut self) -> Result<[u8; N], Error> {
        let (head, rest) = self.rest.split_first_chunk().ok_or(Error::Truncated)?;
        self.rest = rest;
        Ok(*head)
    }

    /// Takes all remaining bytes.
    pub fn remainder(&mut self) -> &'a [u8] {
        std::mem::take(&mut self.rest)
    }
}
