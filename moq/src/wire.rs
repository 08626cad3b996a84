//! A reader of the fields of a complete control message, and a writer of such fields.

use bytes::{Buf, Bytes};

use super::{DecodeError, Draft, EncodeError, vi64};

/// A reader of the fields of a control message, in a draft's format. The message has arrived completely, so a field
/// that extends beyond its end is a protocol violation.
#[derive(Debug)]
pub(super) struct WireReader {
    draft: Draft,
    rest: Bytes,
}

const TRUNCATED: DecodeError = DecodeError::violation("a field runs past the end of its message");

impl WireReader {
    pub(super) fn new(draft: Draft, message: Bytes) -> Self {
        Self { draft, rest: message }
    }

    pub(super) fn draft(&self) -> Draft {
        self.draft
    }

    /// Reads a length, and returns a reader of that many bytes.
    pub(super) fn nested(&mut self) -> Result<Self, DecodeError> {
        Ok(Self { draft: self.draft, rest: self.prefixed()? })
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

    /// Reads a length and returns that many bytes. They share the message's memory.
    pub(super) fn prefixed(&mut self) -> Result<Bytes, DecodeError> {
        let len = self.vi64()?;
        match usize::try_from(len) {
            Ok(len) if len <= self.rest.len() => Ok(self.rest.split_to(len)),
            _ => Err(TRUNCATED),
        }
    }

    /// Reads a length of at most `max`, and that many bytes of UTF-8 text.
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

    /// Checks that no bytes are left.
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

/// A writer that appends the fields of a message in a draft's format. If the draft cannot express a field,
/// [`finish`](Self::finish) returns the error.
#[derive(Debug)]
pub(super) struct WireWriter<'a> {
    draft: Draft,
    pub(super) out: &'a mut Vec<u8>,
    unsayable: Option<&'static str>,
}

impl<'a> WireWriter<'a> {
    pub(super) fn new(draft: Draft, out: &'a mut Vec<u8>) -> Self {
        Self { draft, out, unsayable: None }
    }

    pub(super) fn draft(&self) -> Draft {
        self.draft
    }

    pub(super) fn vi64(&mut self, value: u64) {
        vi64::encode(value, self.out);
    }

    pub(super) fn u8(&mut self, value: u8) {
        self.out.push(value);
    }

    pub(super) fn raw(&mut self, bytes: &[u8]) {
        self.out.extend_from_slice(bytes);
    }

    pub(super) fn prefixed(&mut self, bytes: &[u8]) {
        put_prefixed(bytes, self.out);
    }

    /// Appends the bytes that `write` appends, preceded by their length.
    pub(super) fn nested(&mut self, write: impl FnOnce(&mut WireWriter<'_>)) {
        let mut bytes = Vec::new();
        let mut nested = WireWriter::new(self.draft, &mut bytes);
        write(&mut nested);
        let unsayable = nested.unsayable;
        self.unsayable = self.unsayable.or(unsayable);
        self.prefixed(&bytes);
    }

    /// Records that the draft cannot express `what`.
    pub(super) fn cannot_express(&mut self, what: &'static str) {
        self.unsayable.get_or_insert(what);
    }

    /// Fails if the draft could not express a field.
    pub(super) fn finish(self) -> Result<(), EncodeError> {
        match self.unsayable {
            None => Ok(()),
            Some(what) => Err(EncodeError::NotInDraft { draft: self.draft, what }),
        }
    }
}
