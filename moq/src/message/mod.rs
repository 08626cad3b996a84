//! Control messages (draft-22, section 9): a type, a 16-bit length, and a body whose format depends on the session's
//! draft.

mod body;
mod setup;
#[cfg(test)]
mod tests;

use bytes::{Buf, BytesMut};

pub use body::{
    FetchKind, FetchOk, FetchRequest, GoAway, NamespaceDone, NamespaceFound, Publish, PublishDone,
    PublishNamespace, PublishSkipped, PublishStateNotify, Redirect, RequestError, RequestOk, RequestUpdate,
    Subscribe, SubscribeNamespace, SubscribeOk, SubscribeTracks, TrackStatus, Unsubscribe,
};
pub use setup::SetupOptions;

use super::wire::{WireReader, WireWriter};
use super::{DecodeError, Draft, EncodeError, vi64};

/// The encoding of a message's body: the fields after its type and length.
trait MessageBody: Sized {
    fn decode(input: &mut WireReader) -> Result<Self, DecodeError>;
    fn encode(&self, out: &mut WireWriter<'_>);
}

/// The type of PUBLISH_OK in older drafts. Draft-18 still lists it, so such a message is read as a REQUEST_OK.
const PUBLISH_OK: u64 = 0x1e;
const UNSUBSCRIBE: u64 = 0x0a;
const PUBLISH_STATE_NOTIFY: u64 = 0x22;

macro_rules! messages {
    ($($variant:ident($body:ty) = $kind:literal, $name:literal;)*) => {
        /// A control message. Each variant has the name of its body, which describes it.
        ///
        /// ```
        /// use bytes::BytesMut;
        /// use millrace_moq::{Draft, Message, message::GoAway};
        ///
        /// let goaway = GoAway { uri: String::new(), timeout: 5000, request_id: None };
        /// let mut bytes = Vec::new();
        /// Message::from(goaway.clone()).encode(Draft::D22, &mut bytes)?;
        ///
        /// // A stream arrives in pieces. Nothing is taken before the message is complete.
        /// let mut input = BytesMut::from(&bytes[..3]);
        /// assert_eq!(Message::decode(Draft::D22, &mut input)?, None);
        /// input.extend_from_slice(&bytes[3..]);
        /// assert_eq!(Message::decode(Draft::D22, &mut input)?, Some(Message::GoAway(goaway)));
        /// assert!(input.is_empty());
        /// # Ok::<(), Box<dyn std::error::Error>>(())
        /// ```
        #[allow(missing_docs, reason = "the bodies describe the variants")]
        #[derive(Clone, Debug, PartialEq, Eq)]
        pub enum Message {
            $($variant($body),)*
        }

        impl Message {
            /// Returns the message type on the wire.
            pub const fn kind(&self) -> u64 {
                match self {
                    $(Self::$variant(_) => $kind,)*
                }
            }

            /// Returns the message's name in the newest draft.
            pub const fn name(&self) -> &'static str {
                match self {
                    $(Self::$variant(_) => $name,)*
                }
            }

            fn is_known(kind: u64, draft: Draft) -> bool {
                match kind {
                    PUBLISH_OK | UNSUBSCRIBE => draft == Draft::D18,
                    PUBLISH_STATE_NOTIFY => draft.has_state_notify(),
                    _ => matches!(kind, $($kind)|*),
                }
            }

            fn decode_body(kind: u64, input: &mut WireReader) -> Result<Self, DecodeError> {
                match kind {
                    $($kind => <$body>::decode(input).map(Self::$variant),)*
                    PUBLISH_OK => RequestOk::decode(input).map(Self::RequestOk),
                    _ => Err(UNKNOWN),
                }
            }

            fn encode_body(&self, out: &mut WireWriter<'_>) {
                match self {
                    $(Self::$variant(body) => body.encode(out),)*
                }
            }
        }

        $(impl From<$body> for Message {
            fn from(body: $body) -> Self {
                Self::$variant(body)
            }
        })*
    };
}

messages! {
    RequestUpdate(RequestUpdate) = 0x02, "REQUEST_UPDATE";
    Subscribe(Subscribe) = 0x03, "SUBSCRIBE";
    SubscribeOk(SubscribeOk) = 0x04, "SUBSCRIBE_OK";
    RequestError(RequestError) = 0x05, "REQUEST_ERROR";
    PublishNamespace(PublishNamespace) = 0x06, "PUBLISH_NAMESPACE";
    RequestOk(RequestOk) = 0x07, "REQUEST_OK";
    Namespace(NamespaceFound) = 0x08, "NAMESPACE";
    // The crate moq-transport 0.17 ends draft-18 subscriptions with UNSUBSCRIBE, although draft-18 does not define that
    // message.
    Unsubscribe(Unsubscribe) = 0x0a, "UNSUBSCRIBE";
    PublishDone(PublishDone) = 0x0b, "PUBLISH_DONE";
    TrackStatus(TrackStatus) = 0x0d, "TRACK_STATUS";
    NamespaceDone(NamespaceDone) = 0x0e, "NAMESPACE_DONE";
    PublishSkipped(PublishSkipped) = 0x0f, "PUBLISH_SKIPPED";
    GoAway(GoAway) = 0x10, "GOAWAY";
    Fetch(FetchRequest) = 0x16, "FETCH";
    FetchOk(FetchOk) = 0x18, "FETCH_OK";
    Publish(Publish) = 0x1d, "PUBLISH";
    PublishStateNotify(PublishStateNotify) = 0x22, "PUBLISH_STATE_NOTIFY";
    SubscribeNamespace(SubscribeNamespace) = 0x50, "SUBSCRIBE_NAMESPACE";
    SubscribeTracks(SubscribeTracks) = 0x51, "SUBSCRIBE_TRACKS";
    Setup(SetupOptions) = 0x2f00, "SETUP";
}

const UNKNOWN: DecodeError = DecodeError::violation("unknown message type");

impl Message {
    /// Removes one message from the front of `input` and returns it. Returns `None` if the message is not complete.
    ///
    /// An unknown type fails as soon as it is read, so `input` never grows past one message of 64 KiB.
    pub fn decode(draft: Draft, input: &mut BytesMut) -> Result<Option<Self>, DecodeError> {
        let mut front = &input[..];
        let Some(kind) = vi64::decode(&mut front) else { return Ok(None) };
        if !Self::is_known(kind, draft) {
            return Err(UNKNOWN);
        }
        let Some((length, body)) = front.split_first_chunk() else { return Ok(None) };
        let length = usize::from(u16::from_be_bytes(*length));
        if body.len() < length {
            return Ok(None);
        }
        let header = input.len() - body.len();
        input.advance(header);
        let mut body = WireReader::new(draft, input.split_to(length).freeze());
        let message = Self::decode_body(kind, &mut body)?;
        body.finish()?;
        Ok(Some(message))
    }

    /// Appends the message with its type and length. On failure `out` is unchanged.
    pub fn encode(&self, draft: Draft, out: &mut Vec<u8>) -> Result<(), EncodeError> {
        let start = out.len();
        self.encode_framed(draft, out).inspect_err(|_| out.truncate(start))
    }

    fn encode_framed(&self, draft: Draft, out: &mut Vec<u8>) -> Result<(), EncodeError> {
        vi64::encode(self.kind(), out);
        let body = out.len() + 2;
        // The length precedes the body but is known only after the body is written, so its two bytes are filled in at
        // the end.
        out.extend_from_slice(&[0; 2]);
        let mut writer = WireWriter::new(draft, out);
        self.encode_body(&mut writer);
        writer.finish()?;
        let length = out.len() - body;
        let prefix = u16::try_from(length).map_err(|_| EncodeError::TooLong { length })?;
        out[body - 2..body].copy_from_slice(&prefix.to_be_bytes());
        Ok(())
    }

    /// Returns the request ID of a message that starts or updates a request. Answers have none, because their stream
    /// identifies the request.
    pub const fn request_id(&self) -> Option<u64> {
        match self {
            Self::RequestUpdate(RequestUpdate { request_id, .. })
            | Self::Subscribe(Subscribe { request_id, .. })
            | Self::PublishNamespace(PublishNamespace { request_id, .. })
            | Self::TrackStatus(TrackStatus { request_id, .. })
            | Self::Fetch(FetchRequest { request_id, .. })
            | Self::Publish(Publish { request_id, .. })
            | Self::SubscribeNamespace(SubscribeNamespace { request_id, .. })
            | Self::SubscribeTracks(SubscribeTracks { request_id, .. }) => Some(*request_id),
            _ => None,
        }
    }

    /// Reports whether a bidirectional stream may begin with this message.
    pub const fn opens_request(&self) -> bool {
        self.request_id().is_some() && !matches!(self, Self::RequestUpdate(_))
    }
}
