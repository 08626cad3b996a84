//! Reads and writes control messages on QUIC streams.

use std::{
    ops::{Deref, DerefMut},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Instant,
};

use bytes::BytesMut;
use millrace_moq::{
    DecodeError, Draft, EncodeError, Message, code,
    incomplete::{HeldIncomplete, TooMuch},
    message::{GoAway, RequestUpdate},
};
use millrace_webtransport::{NotOurs, RecvStream, SendStream};
use quinn::{ReadError, WriteError};
use tokio::time::sleep_until;

/// Why a session or one of its streams ends.
#[derive(Debug, thiserror::Error)]
pub enum SessionError {
    /// The peer violated the protocol. The session is closed with this code.
    #[error("{reason} ({code})")]
    Violation { code: code::Session, reason: String },
    /// The peer has no right to the session, or not any more. The session is closed with this code.
    #[error("{reason} ({code})")]
    Refused { code: code::Session, reason: String },
    /// The connection was lost, or the stream was reset or stopped.
    #[error("{0}")]
    Lost(String),
}

impl SessionError {
    pub fn violation(reason: impl Into<String>) -> Self {
        Self::Violation { code: code::Session::PROTOCOL_VIOLATION, reason: reason.into() }
    }

    /// Returns the error for a message that is not allowed where it has arrived. `place` says where, such as "after
    /// FETCH".
    pub fn misplaced(message: &Message, place: &str) -> Self {
        Self::violation(format!("{} {place}", message.name()))
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

impl From<NotOurs> for SessionError {
    fn from(error: NotOurs) -> Self {
        match error {
            NotOurs::Read(error) => Self::Lost(error.to_string()),
            error => Self::violation(error.to_string()),
        }
    }
}

impl From<quinn::ConnectionError> for SessionError {
    fn from(error: quinn::ConnectionError) -> Self {
        Self::Lost(error.to_string())
    }
}

/// A message on a control or request stream, or the end of the stream.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "taken apart at once, never stored")]
pub enum IncomingMessage {
    Message(Message),
    /// A GOAWAY message that is valid on this stream.
    GoAway(GoAway),
    /// The stream ended with FIN, at a message boundary.
    Finished,
    /// The peer has reset the stream (RESET_STREAM).
    Reset,
}

/// Checks the GOAWAY messages of a stream (draft-22, "GOAWAY"; in draft-18 GOAWAY names a request).
pub struct GoAways {
    on_control: bool,
    /// True if the peer is the server of the QUIC connection.
    from_server: bool,
    seen: bool,
}

impl GoAways {
    pub fn on_control(from_server: bool) -> Self {
        Self { on_control: true, from_server, seen: false }
    }

    pub fn on_request(from_server: bool) -> Self {
        Self { on_control: false, from_server, seen: false }
    }

    /// Checks that a GOAWAY that has arrived is valid on this stream.
    fn check(&mut self, goaway: &GoAway) -> Result<(), SessionError> {
        if std::mem::replace(&mut self.seen, true) {
            return Err(SessionError::violation("a second GOAWAY"));
        }
        if !self.from_server && !goaway.uri.is_empty() {
            return Err(SessionError::violation("a client sent a GOAWAY with a URI"));
        }
        match goaway.request_id {
            Some(_) if !self.on_control => {
                Err(SessionError::violation("a GOAWAY with a request ID on a request stream"))
            }
            // The request ID in GOAWAY has to be one of ours: even if we are the client, odd if we are the server.
            Some(id) if id % 2 != u64::from(!self.from_server) => Err(SessionError::Violation {
                code: code::Session::INVALID_REQUEST_ID,
                reason: format!("GOAWAY with request ID {id}, which is of the wrong side"),
            }),
            _ => Ok(()),
        }
    }
}

/// Reads control messages from a stream.
pub struct MessageReader {
    draft: Draft,
    stream: RecvStream,
    buffer: BytesMut,
    held: HeldIncomplete,
    goaways: GoAways,
    guard: Option<Box<dyn MessageGuard>>,
    /// A message that may not be delivered before this time.
    waiting: Option<Box<(Message, Instant)>>,
}

/// Checks messages before the reader of the stream gets them.
pub trait MessageGuard: Send + Sync {
    /// Returns the time before which the message, and all messages behind it, may not be delivered. `None`: deliver at
    /// once. Called once for each message.
    fn answer_deadline(&self, message: &Message) -> Option<Instant>;

    /// Checks a REQUEST_UPDATE that is about to be delivered.
    ///
    /// # Errors
    /// Returns an error if the update is refused.
    fn update(&self, update: &RequestUpdate) -> Result<(), SessionError>;
}

impl MessageReader {
    /// Makes a reader. `buffer` contains bytes that were read from the stream before. `held` counts the bytes of
    /// incomplete messages against the session's limit.
    pub fn new(
        draft: Draft,
        stream: RecvStream,
        buffer: BytesMut,
        held: HeldIncomplete,
        goaways: GoAways,
    ) -> Self {
        Self { draft, stream, buffer, held, goaways, guard: None, waiting: None }
    }

    /// Lets `guard` check every message before the reader delivers it.
    pub fn guarded(self, guard: impl MessageGuard + 'static) -> Self {
        Self { guard: Some(Box::new(guard)), ..self }
    }

    /// Returns the next message. Cancel safe.
    ///
    /// # Errors
    /// Returns an error if the peer violated the protocol, or the connection is lost.
    pub async fn next(&mut self) -> Result<IncomingMessage, SessionError> {
        loop {
            // The message stays in `waiting` during the sleep, so that dropping this future loses nothing.
            if let Some(waiting) = &self.waiting {
                sleep_until(waiting.1.into()).await;
            }
            if let Some(waiting) = self.waiting.take() {
                return self.deliver(waiting.0);
            }
            if let Some(message) = Message::decode(self.draft, &mut self.buffer)? {
                match self.guard.as_ref().and_then(|guard| guard.answer_deadline(&message)) {
                    Some(due) => self.waiting = Some(Box::new((message, due))),
                    None => return self.deliver(message),
                }
                continue;
            }
            if self.buffer.is_empty() {
                self.buffer = BytesMut::new(); // Frees the buffer's memory while the stream is idle.
            }
            // All whole messages were taken, so the rest of the buffer is an incomplete one.
            self.held.set(self.buffer.len())?;
            match self.stream.read_chunk(16 * 1024, true).await {
                Ok(Some(chunk)) => self.buffer.extend_from_slice(&chunk.bytes),
                Ok(None) if self.buffer.is_empty() => return Ok(IncomingMessage::Finished),
                Ok(None) => return Err(SessionError::violation("a stream ended inside a control message")),
                Err(ReadError::Reset(_)) => return Ok(IncomingMessage::Reset),
                Err(error) => return Err(SessionError::Lost(error.to_string())),
            }
        }
    }

    fn deliver(&mut self, message: Message) -> Result<IncomingMessage, SessionError> {
        match message {
            Message::GoAway(goaway) => {
                self.goaways.check(&goaway)?;
                Ok(IncomingMessage::GoAway(goaway))
            }
            Message::RequestUpdate(update) => {
                self.guard.as_ref().map_or(Ok(()), |guard| guard.update(&update))?;
                Ok(IncomingMessage::Message(update.into()))
            }
            message => Ok(IncomingMessage::Message(message)),
        }
    }

    /// Stops reading: sends STOP_SENDING with `code`.
    pub fn stop(&mut self, code: u64) {
        let _ = self.stream.stop(var(code)); // An error means that the stream is over.
    }
}

/// A request stream after its first message.
pub struct RequestStream {
    pub send: Answers,
    pub reader: MessageReader,
}

impl RequestStream {
    /// Cancels the request in both directions.
    pub fn cancel(&mut self) {
        let _ = self.send.reset(var(code::Reset::CANCELLED.0)); // An error means that the stream is over.
        self.reader.stop(code::Reset::CANCELLED.0);
    }
}

/// Our direction of a request or control stream. Dropping it ends the stream with FIN, or with a reset if a reset code
/// is set in `fate`.
pub struct Answers {
    draft: Draft,
    stream: SendStream,
    fate: DroppedStreamFate,
}

/// How a stream ends when its [`Answers`] is dropped: 0 means with FIN, other values are a reset code plus 1.
#[derive(Clone, Default)]
pub struct DroppedStreamFate(Arc<AtomicU64>);

impl DroppedStreamFate {
    /// Sets the code with which the stream is reset when this is dropped, unless the stream has ended before.
    pub fn set(&self, code: code::Reset) {
        self.0.store(code.0 + 1, Relaxed);
    }

    fn code(&self) -> Option<u64> {
        self.0.load(Relaxed).checked_sub(1)
    }
}

impl Answers {
    pub fn new(draft: Draft, stream: SendStream) -> Self {
        Self { draft, stream, fate: DroppedStreamFate::default() }
    }

    pub fn with(mut self, fate: DroppedStreamFate) -> Self {
        self.fate = fate;
        self
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
            let _ = self.stream.reset(var(code)); // An error means that the stream is over.
        }
    }
}

/// Writes one message. The caller ends the stream.
///
/// # Errors
/// Returns an error if the peer has stopped the stream, or the connection is lost.
pub async fn send(stream: &mut Answers, message: impl Into<Message>) -> Result<(), SessionError> {
    let mut bytes = Vec::new();
    message.into().encode(stream.draft, &mut bytes)?;
    Ok(stream.write_all(&bytes).await?)
}

/// Writes the last message of a request, and FIN. Errors are ignored: a peer that has stopped the stream does not get
/// the message.
pub async fn send_last(stream: &mut Answers, message: impl Into<Message>) {
    if send(stream, message).await.is_ok() {
        let _ = stream.finish(); // An error means that the peer has stopped the stream meanwhile.
    }
}

/// Converts a code to a QUIC application error code, which has at most 62 bits. MoQ's codes are far below that.
pub fn var(code: u64) -> quinn::VarInt {
    quinn::VarInt::from_u64(code).unwrap_or(quinn::VarInt::MAX)
}
