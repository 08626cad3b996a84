//! Streams as the application uses them: without the header that WebTransport puts before the application's bytes, and
//! with the application's error codes.

use std::future::Future;

use bytes::Bytes;
use millrace_quic::webtransport::{Begins, Binding, error};
use quinn::{Chunk, ClosedStream, ReadError, StoppedError, StreamId, VarInt, WriteError};

use crate::Foreign;

/// The sending side of a stream.
pub struct SendStream {
    inner: quinn::SendStream,
    binding: Binding,
}

/// The receiving side of a stream.
pub struct RecvStream {
    inner: quinn::RecvStream,
    binding: Binding,
    /// Length of WebTransport's header before the application's first byte; `None` until the header was read.
    preamble: usize,
}

/// Reason why a stream of the peer is not for the application.
#[derive(Debug, thiserror::Error)]
pub enum NotOurs {
    /// The stream belongs to HTTP/3 itself. The value is the type of a unidirectional stream, or of a bidirectional
    /// stream's first frame.
    #[error("the stream belongs to HTTP/3 itself: its type is {0:#x}")]
    Http(u64),
    #[error("the stream belongs to session {0}, which does not exist")]
    #[allow(missing_docs, reason = "the messages describe the variants")]
    Stray(u64),
    #[error("the peer has opened more than {} streams of HTTP/3 outside the session", Foreign::MOST)]
    #[allow(missing_docs, reason = "the messages describe the variants")]
    TooMany,
    /// The stream ended within the WebTransport header at its beginning.
    #[error("the peer ended a stream within its preamble")]
    Over,
    #[error(transparent)]
    #[allow(missing_docs, reason = "the messages describe the variants")]
    Read(#[from] ReadError),
}

impl SendStream {
    pub(crate) fn new(inner: quinn::SendStream, binding: Binding) -> Self {
        Self { inner, binding }
    }

    /// Returns the QUIC stream ID.
    pub fn id(&self) -> StreamId {
        self.inner.id()
    }

    /// Writes all bytes.
    ///
    /// # Errors
    /// Fails if the peer stopped the stream, or if the connection is lost.
    pub async fn write_all(&mut self, bytes: &[u8]) -> Result<(), WriteError> {
        self.inner.write_all(bytes).await
    }

    /// Writes all chunks.
    ///
    /// # Errors
    /// Fails for the same reasons as [`Self::write_all`].
    pub async fn write_all_chunks(&mut self, chunks: &mut [Bytes]) -> Result<(), WriteError> {
        self.inner.write_all_chunks(chunks).await
    }

    /// Sets the priority. Data of the stream with the highest number is sent first.
    ///
    /// # Errors
    /// Fails if the stream has ended.
    pub fn set_priority(&self, priority: i32) -> Result<(), ClosedStream> {
        self.inner.set_priority(priority)
    }

    /// Ends the stream after the bytes written so far.
    ///
    /// # Errors
    /// Fails if the stream has ended already.
    pub fn finish(&mut self) -> Result<(), ClosedStream> {
        self.inner.finish()
    }

    /// Resets the stream with an error code of the application.
    ///
    /// # Errors
    /// Fails if the stream has ended already.
    pub fn reset(&mut self, code: VarInt) -> Result<(), ClosedStream> {
        self.inner.reset(on_wire(self.binding, code))
    }

    /// Refuses an HTTP/3 request on this stream.
    pub fn reject(&mut self) {
        let code = VarInt::from_u64(error::REQUEST_REJECTED).unwrap_or(VarInt::MAX);
        let _ = self.inner.reset(code); // `reset` fails if the stream has ended already
    }

    /// Waits until the peer stops the stream, and returns the application's error code. Returns `None` once the peer
    /// has acknowledged everything.
    pub fn stopped(
        &self,
    ) -> impl Future<Output = Result<Option<VarInt>, StoppedError>> + Send + Sync + 'static {
        let stopped = self.inner.stopped();
        let binding = self.binding;
        async move { Ok(stopped.await?.map(|code| from_wire(binding, code))) }
    }
}

impl RecvStream {
    pub(crate) fn new(inner: quinn::RecvStream, binding: Binding) -> Self {
        Self { inner, binding, preamble: 0 }
    }

    /// Returns the length of WebTransport's header, which is the offset of the application's first byte on the QUIC
    /// stream.
    pub fn preamble(&self) -> usize {
        self.preamble
    }

    /// Returns the QUIC stream ID.
    pub fn id(&self) -> StreamId {
        self.inner.id()
    }

    /// Reads the WebTransport header before the application's bytes.
    ///
    /// # Errors
    /// Fails if the stream is not for the application.
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
                    // WebTransport's header is read byte by byte, so that no byte of the application is consumed.
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

    /// Reads at most `most` bytes. Returns `None` at the end of the stream.
    ///
    /// # Errors
    /// Fails if the connection is lost, or if the peer reset the stream. A reset has the application's error code.
    pub async fn read_chunk(&mut self, most: usize, ordered: bool) -> Result<Option<Chunk>, ReadError> {
        self.inner.read_chunk(most, ordered).await.map_err(|error| match error {
            ReadError::Reset(code) => ReadError::Reset(from_wire(self.binding, code)),
            error => error,
        })
    }

    /// Reads to the end and discards the bytes. The bytes are read in order, because WebTransport's header at the
    /// stream's beginning was read in order. If a stream is read in order first and unordered later, quinn 0.11 counts
    /// retransmitted bytes twice, and its debug build panics.
    pub async fn discard(mut self) {
        const PIECE: usize = 64 * 1024;
        while let Ok(Some(Chunk { bytes, .. })) = self.inner.read_chunk(PIECE, true).await {
            drop::<Bytes>(bytes);
        }
    }

    /// Stops the stream with an error code of the application.
    ///
    /// # Errors
    /// Fails if the stream has ended.
    pub fn stop(&mut self, code: VarInt) -> Result<(), ClosedStream> {
        self.inner.stop(on_wire(self.binding, code))
    }
}

fn on_wire(binding: Binding, code: VarInt) -> VarInt {
    VarInt::from_u64(binding.to_wire(code.into_inner())).unwrap_or(VarInt::MAX)
}

fn from_wire(binding: Binding, code: VarInt) -> VarInt {
    VarInt::from_u64(binding.from_wire(code.into_inner())).unwrap_or(VarInt::MAX)
}
