//! Byte sources: a stream reads the bytes that it sends from a source, and does not store them.

use std::{ops::Range, time::Instant};

/// A growing sequence of bytes that a unidirectional stream sends.
///
/// Offsets are those of the stream, from 0. Bytes never change once they are available (counted in the source's
/// extent). They may be evicted from memory; `read` then returns 0.
///
/// ```
/// use std::time::Instant;
/// use millrace_quic::plane::source::{SourceEnd, SourceExtent, Source};
///
/// /// A file that was read at once.
/// struct File {
///     bytes: Vec<u8>,
///     read_at: Instant,
/// }
///
/// impl Source for File {
///     fn extent(&self) -> SourceExtent {
///         SourceExtent { len: self.bytes.len() as u64, end: SourceEnd::Fin { at: self.read_at } }
///     }
///
///     fn read(&self, offset: u64, buf: &mut [u8]) -> usize {
///         let rest = self.bytes.get(offset as usize..).unwrap_or_default();
///         let len = rest.len().min(buf.len());
///         buf[..len].copy_from_slice(&rest[..len]);
///         len
///     }
///
///     fn received_at(&self, _offset: u64) -> Option<Instant> {
///         Some(self.read_at)
///     }
/// }
/// ```
pub trait Source: Send + Sync {
    /// Returns how many bytes are available now, and whether more will follow.
    fn extent(&self) -> SourceExtent;

    /// Copies bytes from `offset` on into `buf` and returns how many: 0 if they were evicted, and fewer than `buf`
    /// holds only at the end of the available bytes.
    fn read(&self, offset: u64, buf: &mut [u8]) -> usize;

    /// Returns whether bytes of the source were evicted.
    fn is_evicted(&self) -> bool {
        false
    }

    /// Notes that the peer has acknowledged all bytes before `offset`, which will not be read again.
    fn acknowledged(&self, _offset: u64) {}

    /// Returns when the first byte of the object at `offset` was received, for delivery timeouts.
    fn received_at(&self, offset: u64) -> Option<Instant>;

    /// Returns the range of the object at `offset`, if its header has arrived. The range begins at the object's first
    /// byte, or for the first object at the stream's header. The end of the object's range may lie beyond the bytes
    /// that have arrived.
    fn object_at(&self, _offset: u64) -> Option<Range<u64>> {
        None
    }
}

/// How many bytes a [`Source`] has, and whether it has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SourceExtent {
    /// Number of bytes available from offset 0 on.
    pub len: u64,
    /// How the source has ended, or that more bytes may follow.
    pub end: SourceEnd,
}

/// The end of a [`Source`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SourceEnd {
    /// More bytes may follow.
    Open,
    /// The source got its last byte at `at`, and the stream ends with FIN after that byte.
    Fin {
        /// Time when the last byte arrived.
        at: Instant,
    },
    /// The source will not be completed, so the stream is reset with this application error code.
    Reset(u64),
}

#[cfg(any(test, feature = "simulator"))]
#[allow(missing_docs, reason = "sources for tests")]
pub mod mem;
