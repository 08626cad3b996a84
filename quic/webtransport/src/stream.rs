//! Streams as the application sees them: behind what its binding begins them with, with its own error codes.

use std::future::Future;

use bytes::Bytes;
use millrace_quic::webtransport::{Begins, Binding, error};
use quinn::{Chunk, ClosedStream, ReadError, ResetError, StoppedError, StreamId, VarInt, WriteError};

use crate::Foreign;

/// What this end sends on a stream.
pub struct SendStream {
    inner: quinn::SendStream,
    binding: Binding,
}

/// What the peer sends on a stream.
pub struct RecvStream {
    inner: quinn::RecvStream,
    binding: Binding,
    /// Length of what is in front of the application's first byte, once that is known.
    preamble: usize,
}

/// Why a stream of the peer is not the application's.
#[derive(Debug, thiserror::Error)]
pub enum NotOurs {
    /// It belongs to HTTP/3: its type, or that of its first frame.
    #[error("a stream of HTTP/3 with type {0:#x}")]
    Http(u64),
    #[error("a stream of session {0}, which there is not")]
    Stray(u64),
    #[error("more than {} streams of HTTP/3 beside the session", Foreign::MOST)]
    TooMany,
    /// It was over before it was known.
    #[error("a stream without content")]
    Over,
    #[error(transparent)]
    Read(#[from] ReadError),
}

impl SendStream {
    pub(crate) fn new(inner: quinn::SendStream, binding: Binding) -> Self {
        Self { inner, binding }
    }

    pub fn id(&self) -> StreamId {
        self.inner.id()
    }

    /// # Errors
    /// The peer stopped the stream, or the connection is lost.
    pub async fn write_all(&mut self, bytes: &[u8]) -> Result<(), WriteError> {
        self.inner.write_all(bytes).await
    }

    /// # Errors
    /// As [`Self::write_all`].
    pub async fn write_all_chunks(&mut self, chunks: &mut [Bytes]) -> Result<(), WriteError> {
        self.inner.write_all_chunks(chunks).await
    }

    /// Of several streams, what the one with the largest number has is sent first.
    ///
    /// # Errors
    /// The stream is over.
    pub fn set_priority(&self, priority: i32) -> Result<(), ClosedStream> {
        self.inner.set_priority(priority)
    }

    /// Says that nothing more comes.
    ///
    /// # Errors
    /// The stream is over.
    pub fn finish(&mut self) -> Result<(), ClosedStream> {
        self.inner.finish()
    }

    /// Gives the stream up with an error code of the application.
    ///
    /// # Errors
    /// The stream is over.
    pub fn reset(&mut self, code: VarInt) -> Result<(), ClosedStream> {
        self.inner.reset(on_wire(self.binding, code))
    }

    /// Refuses a request of HTTP/3's.
    pub fn reject(&mut self) {
        let code = VarInt::from_u64(error::REQUEST_REJECTED).unwrap_or(VarInt::MAX);
        let _ = self.inner.reset(code); // it is over
    }

    /// Until the peer stops the stream, with the application's error code, or has all of it.
    pub fn stopped(
        &self,
    ) -> impl Future<Output = Result<Option<VarInt>, StoppedError>> + Send + Sync + 'static {
        let (stopped, binding) = (self.inner.stopped(), self.binding);
        async move { Ok(stopped.await?.map(|code| from_wire(binding, code))) }
    }
}

impl RecvStream {
    pub(crate) fn new(inner: quinn::RecvStream, binding: Binding) -> Self {
        Self { inner, binding, preamble: 0 }
    }

    /// Where on the QUIC stream the application's first byte is.
    pub fn preamble(&self) -> usize {
        self.preamble
    }

    pub fn id(&self) -> StreamId {
        self.inner.id()
    }

    /// Reads what the stream begins with before the application's bytes.
    ///
    /// # Errors
    /// It is not the application's.
    pub(crate) async fn enter(&mut self, begins: fn(Binding, &[u8]) -> Begins) -> Result<(), NotOurs> {
        let mut front = Vec::new();
        loop {
            match begins(self.binding, &front) {
                Begins::Ours(len) => {
                    self.preamble = len;
                    return Ok(());
                }
                Begins::Http(kind) => return Err(NotOurs::Http(kind)),
                Begins::Stray(session) => return Err(NotOurs::Stray(session)),
                Begins::Unknown => {
                    let mut byte = [0];
                    match self.inner.read(&mut byte).await {
                        Ok(Some(_)) => front.extend_from_slice(&byte),
                        Ok(None) | Err(ReadError::Reset(_)) => return Err(NotOurs::Over),
                        Err(error) => return Err(error.into()),
                    }
                }
            }
        }
    }

    /// The next bytes, at most so many; `None` at the end.
    ///
    /// # Errors
    /// The peer reset the stream, with the application's error code, or the connection is lost.
    pub async fn read_chunk(&mut self, most: usize, ordered: bool) -> Result<Option<Chunk>, ReadError> {
        self.inner.read_chunk(most, ordered).await.map_err(|error| match error {
            ReadError::Reset(code) => ReadError::Reset(from_wire(self.binding, code)),
            error => error,
        })
    }

    /// Reads to the end, and forgets it. In order, as what it begins with was read: quinn 0.11 counts bytes twice that have come
    /// twice when a stream is read otherwise from some point on, and a debug build of it panics.
    pub async fn discard(mut self) {
        const PIECE: usize = 64 * 1024;
        while let Ok(Some(Chunk { bytes, .. })) = self.inner.read_chunk(PIECE, true).await {
            drop::<Bytes>(bytes);
        }
    }

    /// Refuses to read on, with an error code of the application.
    ///
    /// # Errors
    /// The stream is over.
    pub fn stop(&mut self, code: VarInt) -> Result<(), ClosedStream> {
        self.inner.stop(on_wire(self.binding, code))
    }

    /// Until the peer resets the stream, or has been seen to end.
    ///
    /// # Errors
    /// The connection is lost.
    pub async fn received_reset(&mut self) -> Result<Option<VarInt>, ResetError> {
        let code = self.inner.received_reset().await?;
        Ok(code.map(|code| from_wire(self.binding, code)))
    }
}

fn on_wire(binding: Binding, code: VarInt) -> VarInt {
    VarInt::from_u64(binding.to_wire(code.into_inner())).unwrap_or(VarInt::MAX)
}

fn from_wire(binding: Binding, code: VarInt) -> VarInt {
    VarInt::from_u64(binding.from_wire(code.into_inner())).unwrap_or(VarInt::MAX)
}
