//! Control messages (draft-18, section 10): a type, a 16-bit length, and a body.

mod body;
mod setup;
#[cfg(test)]
mod tests;

use bytes::{Buf, BytesMut};

pub use body::{
    Fetch, FetchKind, FetchOk, GoAway, NamespaceDone, NamespaceFound, Publish, PublishBlocked, PublishDone,
    PublishNamespace, Redirect, RequestError, RequestOk, RequestUpdate, Subscribe, SubscribeNamespace,
    SubscribeOk, SubscribeTracks, TrackStatus, Unsubscribe,
};
pub use setup::Setup;

use super::wire::Reader;
use super::{DecodeError, EncodeError, vi64};

/// Fields of a message between its length and its end.
trait Body: Sized {
    fn decode(input: &mut Reader) -> Result<Self, DecodeError>;
    fn encode(&self, out: &mut Vec<u8>);
}

/// PUBLISH_OK of older drafts. It is still in the table of types, and read as a REQUEST_OK.
const PUBLISH_OK: u64 = 0x1e;

macro_rules! messages {
    ($($variant:ident($body:ty) = $kind:literal, $name:literal;)*) => {
        /// Any control message.
        #[derive(Clone, Debug, PartialEq, Eq)]
        pub enum Message {
            $($variant($body),)*
        }

        impl Message {
            /// The message type on the wire.
            pub const fn kind(&self) -> u64 {
                match self {
                    $(Self::$variant(_) => $kind,)*
                }
            }

            /// The name in the draft.
            pub const fn name(&self) -> &'static str {
                match self {
                    $(Self::$variant(_) => $name,)*
                }
            }

            fn is_known(kind: u64) -> bool {
                matches!(kind, PUBLISH_OK $(| $kind)*)
            }

            fn decode_body(kind: u64, input: &mut Reader) -> Result<Self, DecodeError> {
                match kind {
                    $($kind => <$body>::decode(input).map(Self::$variant),)*
                    PUBLISH_OK => RequestOk::decode(input).map(Self::RequestOk),
                    _ => Err(UNKNOWN),
                }
            }

            fn encode_body(&self, out: &mut Vec<u8>) {
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
    // Not in draft-18, but moq-transport 0.17 still ends its subscriptions with it.
    Unsubscribe(Unsubscribe) = 0x0a, "UNSUBSCRIBE";
    PublishDone(PublishDone) = 0x0b, "PUBLISH_DONE";
    TrackStatus(TrackStatus) = 0x0d, "TRACK_STATUS";
    NamespaceDone(NamespaceDone) = 0x0e, "NAMESPACE_DONE";
    PublishBlocked(PublishBlocked) = 0x0f, "PUBLISH_BLOCKED";
    GoAway(GoAway) = 0x10, "GOAWAY";
    Fetch(Fetch) = 0x16, "FETCH";
    FetchOk(FetchOk) = 0x18, "FETCH_OK";
    Publish(Publish) = 0x1d, "PUBLISH";
    SubscribeNamespace(SubscribeNamespace) = 0x50, "SUBSCRIBE_NAMESPACE";
    SubscribeTracks(SubscribeTracks) = 0x51, "SUBSCRIBE_TRACKS";
    Setup(Setup) = 0x2f00, "SETUP";
}

const UNKNOWN: DecodeError = DecodeError::violation("unknown message type");

impl Message {
    /// Takes one message off the front of `input`, or returns `None` when it is not all there yet.
    ///
    /// An unknown type fails as soon as it is read, so `input` never grows past one message of 64 KiB.
    pub fn decode(input: &mut BytesMut) -> Result<Option<Self>, DecodeError> {
        let mut front = &input[..];
        let Some(kind) = vi64::decode(&mut front) else { return Ok(None) };
        if !Self::is_known(kind) {
            return Err(UNKNOWN);
        }
        let Some((length, body)) = front.split_first_chunk() else { return Ok(None) };
        let length = usize::from(u16::from_be_bytes(*length));
        if body.len() < length {
            return Ok(None);
        }
        let header = input.len() - body.len();
        input.advance(header);
        let mut body = Reader::new(input.split_to(length).freeze());
        let message = Self::decode_body(kind, &mut body)?;
        body.finish()?;
        Ok(Some(message))
    }

    /// Appends the message with its frame, or leaves `out` as it was.
    pub fn encode(&self, out: &mut Vec<u8>) -> Result<(), EncodeError> {
        let start = out.len();
        vi64::encode(self.kind(), out);
        let body = out.len() + 2;
        out.extend_from_slice(&[0; 2]);
        self.encode_body(out);
        let length = out.len() - body;
        match u16::try_from(length) {
            Ok(length) => {
                out[body - 2..body].copy_from_slice(&length.to_be_bytes());
                Ok(())
            }
            Err(_) => {
                out.truncate(start);
                Err(EncodeError { length })
            }
        }
    }

    /// The request ID that the message consumes. Answers have none: their stream says what they answer.
    pub const fn request_id(&self) -> Option<u64> {
        match self {
            Self::RequestUpdate(RequestUpdate { request_id, .. })
            | Self::Subscribe(Subscribe { request_id, .. })
            | Self::PublishNamespace(PublishNamespace { request_id, .. })
            | Self::TrackStatus(TrackStatus { request_id, .. })
            | Self::Fetch(Fetch { request_id, .. })
            | Self::Publish(Publish { request_id, .. })
            | Self::SubscribeNamespace(SubscribeNamespace { request_id, .. })
            | Self::SubscribeTracks(SubscribeTracks { request_id, .. }) => Some(*request_id),
            _ => None,
        }
    }

    /// Whether a bidirectional stream may begin with this message.
    pub const fn opens_request(&self) -> bool {
        self.request_id().is_some() && !matches!(self, Self::RequestUpdate(_))
    }
}
