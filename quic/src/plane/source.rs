//! Bytes that a stream sends but does not own.

use std::{ops::Range, time::Instant};

/// A growing sequence of bytes that a unidirectional stream sends.
///
/// Offsets are the stream's own, from 0. Bytes never change once they are part of the extent. They may be evicted;
/// `read` then returns 0 for them.
pub trait Source: Send + Sync {
    /// How many bytes there are at the moment, and whether there will be more.
    fn extent(&self) -> Extent;

    /// Copies bytes from `offset` on into `buf` and returns how many: 0 if they were evicted, and fewer than `buf`
    /// holds only at the end of the extent.
    fn read(&self, offset: u64, buf: &mut [u8]) -> usize;

    /// Whether the bytes were evicted.
    fn is_evicted(&self) -> bool {
        false
    }

    /// All bytes before `offset` have been acknowledged, and will not be read again.
    fn acknowledged(&self, _offset: u64) {}

    /// When the first byte of the object at `offset` was received, for delivery timeouts.
    fn received_at(&self, offset: u64) -> Option<Instant>;

    /// The object at `offset`, as far as its header has come: from its first byte, that of what the stream begins with for
    /// the first object, to behind its last, which may be still to come.
    fn object_at(&self, _offset: u64) -> Option<Range<u64>> {
        None
    }
}

/// The state of a [`Source`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Bytes available from offset 0.
    pub len: u64,
    pub end: End,
}

/// How a [`Source`] ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// More may come.
    Open,
    /// Complete since `at`: the stream ends with FIN at the extent's length.
    Fin { at: Instant },
    /// Incomplete for good: the stream is reset with this application error code.
    Reset(u64),
}

#[cfg(any(test, feature = "simulator"))]
pub mod mem;
