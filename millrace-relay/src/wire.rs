//! Control messages over QUIC streams.

use std::{
    ops::{Deref, DerefMut},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

use bytes::BytesMut;
use millrace_proto::moq::{DecodeError, EncodeError, Message, code, message::RequestUpdate};
use quinn::{ReadError, RecvStream, SendStream, WriteError};

use crate::incomplete::{Held, TooMuch};

/// Why a session has to be closed, or is.
#[derive(Debug, thiserror::Error)]
pub enum SessionError {
    /// The peer broke the protocol: close with this code.
    #[error("{reason} ({code})")]
    Violation { code: code::Session, reason: String },
    /// The peer may not, or not any more: close with this code.
    #[error("{reason} ({code})")]
    Refused { code: code::Session, reason: String },
    /// The connection is gone, or this stream is.
    #[error("{0}")]
    Lost(String),
}

impl SessionError {
    pub fn violation(reason: impl Into<String>) -> Self {
        Self::Violation { code: code::Session::PROTOCOL_VIOLATION, reason: reason.into() }
    }
}

impl From<DecodeError> for SessionError {
    fn from(error: DecodeError) -> Self {
        Self::Violation { code: error.code, reason: error.to_string() }
    }
}

impl From<TooMuch> for SessionError {
    fn from(error: TooMuch) -> Self {
        Self::Violation { code: code::Session::INTERNAL_ERROR, reason: error.to_string() }
    }
}

impl From<EncodeError> for SessionError {
    fn from(error: EncodeError) -> Self {
        Self::Lost(error.to_string())
    }
}

impl From<WriteError> for SessionError {
    fn from(error: WriteError) -> Self {
        Self::Lost(error.to_string())
    }
}

impl From<quinn::ConnectionError> for SessionError {
    fn from(error: quinn::ConnectionError) -> Self {
        Self::Lost(error.to_string())
    }
}

/// What came on a control or request stream.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "taken apart at once, never stored")]
pub enum Incoming {
    Message(Message),
    /// FIN, at a message boundary.
    Finished,
    /// RESET_STREAM.
    Reset,
}

/// Reads control messages off a stream.
pub struct MessageReader {
    stream: RecvStream,
    buffer: BytesMut,
    held: Held,
    on_update: Option<OnUpdate>,
}

/// Sees REQUEST_UPDATE before whoever reads the stream.
type OnUpdate = Box<dyn Fn(&RequestUpdate) -> Result<(), SessionError> + Send + Sync>;

impl MessageReader {
    /// `buffer` holds what was read from the stream before; `held` counts what is not complete.
    pub fn new(stream: RecvStream, buffer: BytesMut, held: Held) -> Self {
        Self { stream, buffer, held, on_update: None }
    }

    /// `look` sees every REQUEST_UPDATE first, and may refuse it.
    pub fn on_update(
        self,
        look: impl Fn(&RequestUpdate) -> Result<(), SessionError> + Send + Sync + 'static,
    ) -> Self {
        Self { on_update: Some(Box::new(look)), ..self }
    }

    /// The next message. Cancel safe.
    ///
    /// # Errors
    /// The peer broke the protocol or the connection is lost.
    pub async fn next(&mut self) -> Result<Incoming, SessionError> {
        loop {
            if let Some(message) = Message::decode(&mut self.buffer)? {
                if let (Message::RequestUpdate(update), Some(look)) = (&message, &self.on_update) {
                    look(update)?;
                }
                return Ok(Incoming::Message(message));
            }
            if self.buffer.is_empty() {
                self.buffer = BytesMut::new(); // holds no memory while it waits
            }
            self.held.set(self.buffer.len())?;
            match self.stream.read_chunk(16 * 1024, true).await {
                Ok(Some(chunk)) => self.buffer.extend_from_slice(&chunk.bytes),
                Ok(None) if self.buffer.is_empty() => return Ok(Incoming::Finished),
                Ok(None) => return Err(SessionError::violation("a stream ended inside a control message")),
                Err(ReadError::Reset(_)) => return Ok(Incoming::Reset),
                Err(error) => return Err(SessionError::Lost(error.to_string())),
            }
        }
    }

    /// Refuses to read on.
    pub fn stop(&mut self, code: u64) {
        let _ = self.stream.stop(var(code)); // already over: nothing to stop
    }
}

/// A request on its bidirectional stream, behind the first message.
pub struct RequestStream {
    pub send: Answers,
    pub reader: MessageReader,
}

/// Our direction of a request stream. When dropped it is finished, or reset as its fate says.
pub struct Answers {
    stream: SendStream,
    fate: Fate,
}

/// How a stream that is dropped ends.
#[derive(Clone, Default)]
pub struct Fate(Arc<AtomicU64>);

impl Fate {
    /// Reset, if it is not over by then.
    pub fn set(&self, code: code::Reset) {
        self.0.store(code.0 + 1, Relaxed);
    }

    fn code(&self) -> Option<u64> {
        self.0.load(Relaxed).checked_sub(1)
    }
}

impl Answers {
    pub fn with(mut self, fate: Fate) -> Self {
        self.fate = fate;
        self
    }
}

impl From<SendStream> for Answers {
    fn from(stream: SendStream) -> Self {
        Self { stream, fate: Fate::default() }
    }
}

impl Deref for Answers {
    type Target = SendStream;

    fn deref(&self) -> &SendStream {
        &self.stream
    }
}

impl DerefMut for Answers {
    fn deref_mut(&mut self) -> &mut SendStream {
        &mut self.stream
    }
}

impl Drop for Answers {
    fn drop(&mut self) {
        if let Some(code) = self.fate.code() {
            let _ = self.stream.reset(var(code)); // it is over
        }
    }
}

/// Writes one message; FIN is the caller's.
///
/// # Errors
/// The stream was stopped, or the connection is lost.
pub async fn send(stream: &mut SendStream, message: impl Into<Message>) -> Result<(), SessionError> {
    let mut bytes = Vec::new();
    message.into().encode(&mut bytes)?;
    Ok(stream.write_all(&bytes).await?)
}

/// Writes a request's last message, and FIN. A peer that has stopped the stream does not get it.
pub async fn send_last(stream: &mut SendStream, message: impl Into<Message>) {
    if send(stream, message).await.is_ok() {
        let _ = stream.finish(); // stopped meanwhile
    }
}

/// A QUIC application error code; draft-18 codes are all far below 2^62.
pub fn var(code: u64) -> quinn::VarInt {
    quinn::VarInt::from_u64(code).unwrap_or(quinn::VarInt::MAX)
}
