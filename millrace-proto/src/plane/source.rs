//! Bytes that a stream sends but does not own.

use std::time::Instant;

/// A growing sequence of bytes behind a unidirectional stream: a subgroup in the cache, a FETCH response.
///
/// Offsets are the stream's own, from 0. Bytes never change once they are part of the extent; they can
/// only disappear (eviction), after which `read` returns 0 for them for good.
pub trait Source: Send + Sync {
    /// How far the bytes go at the moment, and how the sequence ends.
    fn extent(&self) -> Extent;

    /// Copies bytes from `offset` into `buf` and returns how many; 0 when they are no longer there.
    /// May return fewer than `buf` holds only at the end of the extent.
    fn read(&self, offset: u64, buf: &mut [u8]) -> usize;

    /// Whether the bytes have disappeared.
    fn is_evicted(&self) -> bool {
        false
    }

    /// When the first byte of the object that covers `offset` was received, for delivery timeouts.
    fn received_at(&self, offset: u64) -> Option<Instant>;
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
    /// Complete: the stream ends with FIN at the extent's length, known since `at`.
    Fin { at: Instant },
    /// Incomplete for good: the stream is reset with this application error code.
    Reset(u64),
}

#[cfg(test)]
pub(crate) mod mem;
