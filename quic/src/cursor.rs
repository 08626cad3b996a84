//! A cursor over the fields of a decrypted payload.

use thiserror::Error;

use super::varint;

/// Why a payload is not a sequence of frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum Error {
    #[error("the payload ends inside a frame")]
    Truncated,
    #[error("unknown frame type {0:#x}")]
    Unknown(u64),
    #[error("a field of frame type {0:#x} has an impossible value")]
    Malformed(u64),
}

/// What is left of a payload. Each method takes one field off its front. After an error the cursor is of no use.
pub struct Cursor<'a> {
    pub rest: &'a [u8],
}

impl<'a> Cursor<'a> {
    pub fn varint(&mut self) -> Result<u64, Error> {
        varint::decode(&mut self.rest).ok_or(Error::Truncated)
    }

    pub fn bytes(&mut self, len: usize) -> Result<&'a [u8], Error> {
        let (head, rest) = self.rest.split_at_checked(len).ok_or(Error::Truncated)?;
        self.rest = rest;
        Ok(head)
    }

    pub fn prefixed(&mut self) -> Result<&'a [u8], Error> {
        let len = usize::try_from(self.varint()?).map_err(|_| Error::Truncated)?;
        self.bytes(len)
    }

    pub fn array<const N: usize>(&mut self) -> Result<[u8; N], Error> {
        let (head, rest) = self.rest.split_first_chunk().ok_or(Error::Truncated)?;
        self.rest = rest;
        Ok(*head)
    }

    pub fn remainder(&mut self) -> &'a [u8] {
        std::mem::take(&mut self.rest)
    }
}
