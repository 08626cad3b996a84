//! Control messages over QUIC streams.

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
    message::{GoAway, RequestUpdate},
};
use millrace_webtransport::{NotOurs, RecvStream, SendStream};
use quinn::{ReadError, WriteError};
use tokio::time::sleep_until;

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

/// What came on a control or request stream.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "taken apart at once, never stored")]
pub enum Incoming {
    Message(Message),
    /// GOAWAY, such as it may be on this stream.
    GoAway(GoAway),
    /// FIN, at a message boundary.
    Finished,
    /// RESET_STREAM.
    Reset,
}

/// What GOAWAY may be on a stream (draft-22, "GOAWAY"; in draft-18 it names a request).
pub struct GoAways {
    on_control: bool,
    /// The peer is the server, and we are the client.
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

    /// One has come.
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
            // One of ours: even if we are the client, odd if the server.
            Some(id) if id % 2 != u64::from(!self.from_server) => Err(SessionError::Violation {
                code: code::Session::INVALID_REQUEST_ID,
                reason: format!("GOAWAY with request ID {id}, which is of the wrong side"),
            }),
            _ => Ok(()),
        }
    }
}

/// Reads control messages off a stream.
pub struct MessageReader {
    draft: Draft,
    stream: RecvStream,
    buffer: BytesMut,
    held: Held,
    goaways: GoAways,
    guard: Option<Box<dyn Guard>>,
    /// A message that may not be delivered before this.
    waiting: Option<Box<(Message, Instant)>>,
}

/// Sees messages before whoever reads the stream.
pub trait Guard: Send + Sync {
    /// When the message may be delivered, and what is behind it looked at; `None`: at once. Asked once for each.
    fn due(&self, message: &Message) -> Option<Instant>;

    /// REQUEST_UPDATE is about to be delivered.
    ///
    /// # Errors
    /// It may not be.
    fn update(&self, update: &RequestUpdate) -> Result<(), SessionError>;
}

impl MessageReader {
    /// `buffer` holds what was read from the stream before; `held` counts what is not complete.
    pub fn new(draft: Draft, stream: RecvStream, buffer: BytesMut, held: Held, goaways: GoAways) -> Self {
        Self { draft, stream, buffer, held, goaways, guard: None, waiting: None }
    }

    /// Lets `guard` see every message first.
    pub fn guarded(self, guard: impl Guard + 'static) -> Self {
        Self { guard: Some(Box::new(guard)), ..self }
    }

    /// The next message. Cancel safe.
    ///
    /// # Errors
    /// The peer broke the protocol or the connection is lost.
    pub async fn next(&mut self) -> Result<Incoming, SessionError> {
        loop {
            if let Some(waiting) = &self.waiting {
                sleep_until(waiting.1.into()).await;
            }
            if let Some(waiting) = self.waiting.take() {
                return self.deliver(waiting.0);
            }
            if let Some(message) = Message::decode(self.draft, &mut self.buffer)? {
                match self.guard.as_ref().and_then(|guard| guard.due(&message)) {
                    Some(due) => self.waiting = Some(Box::new((message, due))),
                    None => return self.deliver(message),
                }
                continue;
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

    fn deliver(&mut self, message: Message) -> Result<Incoming, SessionError> {
        match message {
            Message::GoAway(goaway) => {
                self.goaways.check(&goaway)?;
                Ok(Incoming::GoAway(goaway))
            }
            Message::RequestUpdate(update) => {
                self.guard.as_ref().map_or(Ok(()), |guard| guard.update(&update))?;
                Ok(Incoming::Message(update.into()))
            }
            message => Ok(Incoming::Message(message)),
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

impl RequestStream {
    /// Gives the request up, in both directions.
    pub fn cancel(&mut self) {
        let _ = self.send.reset(var(code::Reset::CANCELLED.0)); // may be over
        self.reader.stop(code::Reset::CANCELLED.0);
    }
}

/// Our direction of a request stream, or our control stream. When dropped it is finished, or reset as its fate says.
pub struct Answers {
    draft: Draft,
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
    pub fn new(draft: Draft, stream: SendStream) -> Self {
        Self { draft, stream, fate: Fate::default() }
    }

    pub fn with(mut self, fate: Fate) -> Self {
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
            let _ = self.stream.reset(var(code)); // it is over
        }
    }
}

/// Writes one message; FIN is the caller's.
///
/// # Errors
/// The stream was stopped, or the connection is lost.
pub async fn send(stream: &mut Answers, message: impl Into<Message>) -> Result<(), SessionError> {
    let mut bytes = Vec::new();
    message.into().encode(stream.draft, &mut bytes)?;
    Ok(stream.write_all(&bytes).await?)
}

/// Writes a request's last message, and FIN. A peer that has stopped the stream does not get it.
pub async fn send_last(stream: &mut Answers, message: impl Into<Message>) {
    if send(stream, message).await.is_ok() {
        let _ = stream.finish(); // stopped meanwhile
    }
}

/// A QUIC application error code; those of MoQ are all far below 2^62.
pub fn var(code: u64) -> quinn::VarInt {
    quinn::VarInt::from_u64(code).unwrap_or(quinn::VarInt::MAX)
}
