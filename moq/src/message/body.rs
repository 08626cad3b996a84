//! The bodies of all control messages other than SETUP.

use super::{DecodeError, MessageBody};
use crate::param::Scope;
use crate::wire::{WireReader, WireWriter};
use crate::{Draft, Filter, Location, Namespace, Parameters, Properties, TrackName, code};

/// The longest New Session URI of GOAWAY, in bytes.
const MAX_URI: usize = 8192;
/// The longest reason phrase, in bytes.
const MAX_REASON: usize = 1024;

fn read_reason(input: &mut WireReader) -> Result<String, DecodeError> {
    input.text(MAX_REASON, "a reason phrase is longer than 1024 bytes")
}

/// Writes `reason`, truncated to the longest allowed length.
fn put_reason(reason: &str, out: &mut WireWriter<'_>) {
    let mut end = reason.len().min(MAX_REASON);
    while !reason.is_char_boundary(end) {
        end -= 1;
    }
    out.prefixed(&reason.as_bytes()[..end]);
}

fn read_uri(input: &mut WireReader) -> Result<String, DecodeError> {
    input.text(MAX_URI, "a URI is longer than 8192 bytes")
}

fn read_properties(input: &mut WireReader) -> Result<Properties, DecodeError> {
    Properties::new(input.rest())
}

/// GOAWAY. On the control stream, it announces that the sender will close the session. On a request's stream, it asks
/// the peer to move that request to another session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GoAway {
    /// The URI to connect to instead; empty for the URI of the current session. A client must send it empty.
    pub uri: String,
    /// Milliseconds until the sender closes the session; 0 if the sender states no time.
    pub timeout: u64,
    /// The smallest request ID that was not processed. It is present only on the control stream of draft-18.
    pub request_id: Option<u64>,
}

impl MessageBody for GoAway {
    fn decode(input: &mut WireReader) -> Result<Self, DecodeError> {
        let uri = read_uri(input)?;
        if !input.draft().names_unprocessed() {
            return Ok(Self { uri, timeout: input.vi64()?, request_id: None });
        }
        // moq-rs (0.17) ends GOAWAY after the URI, as older drafts did.
        let timeout = if input.is_empty() { 0 } else { input.vi64()? };
        let request_id = if input.is_empty() { None } else { Some(input.vi64()?) };
        Ok(Self { uri, timeout, request_id })
    }

    fn encode(&self, out: &mut WireWriter<'_>) {
        out.prefixed(self.uri.as_bytes());
        out.vi64(self.timeout);
        if let Some(request_id) = self.request_id.filter(|_| out.draft().names_unprocessed()) {
            out.vi64(request_id);
        }
    }
}

/// REQUEST_OK: the successful answer to all requests other than SUBSCRIBE and FETCH.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RequestOk {
    /// Parameters of this REQUEST_OK.
    pub parameters: Parameters,
    /// The track's properties, in answers to TRACK_STATUS only.
    pub properties: Properties,
}

impl RequestOk {
    /// Checks that the message has only the parameters and properties that are allowed in the response `scope`:
    /// [`Scope::PUBLISH_OK`], [`Scope::TRACK_STATUS_OK`], [`Scope::NAMESPACE_OK`] or [`Scope::UPDATE_OK`].
    pub fn check(&self, draft: Draft, scope: Scope) -> Result<(), DecodeError> {
        if scope != Scope::TRACK_STATUS_OK && !self.properties.is_empty() {
            return Err(DecodeError::violation("track properties in an answer that does not allow them"));
        }
        self.parameters.check(draft, scope)
    }
}

impl MessageBody for RequestOk {
    fn decode(input: &mut WireReader) -> Result<Self, DecodeError> {
        let parameters = Parameters::decode(input, Scope::OK)?;
        Ok(Self { parameters, properties: read_properties(input)? })
    }

    fn encode(&self, out: &mut WireWriter<'_>) {
        self.parameters.encode(out);
        out.raw(self.properties.as_bytes());
    }
}

/// The session and track with which to retry a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Redirect {
    /// The URI of the session; empty for the URI of the current session. A client must send it empty.
    pub uri: String,
    /// The track to request. An empty namespace and name mean the track of the failed request.
    pub track: TrackName,
}

/// REQUEST_ERROR: the request failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestError {
    /// The error code.
    pub code: code::Request,
    /// Milliseconds to wait before a retry, plus 1. 0 means that no retry will succeed.
    pub retry_interval: u64,
    /// The reason phrase. It is truncated to 1024 bytes when it is sent.
    pub reason: String,
    /// The session and track with which to retry. Present exactly when the code is REDIRECT.
    pub redirect: Option<Redirect>,
}

impl RequestError {
    /// Makes an error that says that a retry would fail as well.
    pub fn new(code: code::Request, reason: impl Into<String>) -> Self {
        Self { code, retry_interval: 0, reason: reason.into(), redirect: None }
    }
}

impl MessageBody for RequestError {
    fn decode(input: &mut WireReader) -> Result<Self, DecodeError> {
        let code = code::Request(input.vi64()?).in_draft(input.draft());
        let retry_interval = input.vi64()?;
        let reason = read_reason(input)?;
        let redirect = match code {
            code::Request::REDIRECT => {
                Some(Redirect { uri: read_uri(input)?, track: TrackName::decode(input)? })
            }
            _ => None,
        };
        Ok(Self { code, retry_interval, reason, redirect })
    }

    fn encode(&self, out: &mut WireWriter<'_>) {
        debug_assert_eq!(self.redirect.is_some(), self.code == code::Request::REDIRECT);
        out.vi64(self.code.in_draft(out.draft()).0);
        out.vi64(self.retry_interval);
        put_reason(&self.reason, out);
        if let Some(redirect) = &self.redirect {
            out.prefixed(redirect.uri.as_bytes());
            redirect.track.encode(out.out);
        }
    }
}

/// SUBSCRIBE_OK: accepts a SUBSCRIBE. Objects of the track will be sent under `track_alias`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SubscribeOk {
    /// The alias of the track in data streams and datagrams.
    pub track_alias: u64,
    /// Parameters of this SUBSCRIBE_OK.
    pub parameters: Parameters,
    /// Properties of the track.
    pub properties: Properties,
}

impl MessageBody for SubscribeOk {
    fn decode(input: &mut WireReader) -> Result<Self, DecodeError> {
        Ok(Self {
            track_alias: input.vi64()?,
            parameters: Parameters::decode(input, Scope::SUBSCRIBE_OK)?,
            properties: read_properties(input)?,
        })
    }

    fn encode(&self, out: &mut WireWriter<'_>) {
        out.vi64(self.track_alias);
        self.parameters.encode(out);
        out.raw(self.properties.as_bytes());
    }
}

/// REQUEST_UPDATE: changes the parameters of the request on whose stream it is sent. The receiver has to check that
/// this kind of request may have these `parameters`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestUpdate {
    /// The request ID of the update.
    pub request_id: u64,
    /// The parameters that change.
    pub parameters: Parameters,
}

impl MessageBody for RequestUpdate {
    fn decode(input: &mut WireReader) -> Result<Self, DecodeError> {
        Ok(Self { request_id: input.vi64()?, parameters: Parameters::decode(input, Scope::UPDATE)? })
    }

    fn encode(&self, out: &mut WireWriter<'_>) {
        out.vi64(self.request_id);
        self.parameters.encode(out);
    }
}

/// PUBLISH: starts a subscription from the publisher's side.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Publish {
    /// The request ID.
    pub request_id: u64,
    /// The published track.
    pub track: TrackName,
    /// The alias of the track in data streams and datagrams.
    pub track_alias: u64,
    /// Parameters of the subscription.
    pub parameters: Parameters,
    /// Properties of the track.
    pub properties: Properties,
}

impl MessageBody for Publish {
    fn decode(input: &mut WireReader) -> Result<Self, DecodeError> {
        Ok(Self {
            request_id: input.vi64()?,
            track: TrackName::decode(input)?,
            track_alias: input.vi64()?,
            parameters: Parameters::decode(input, Scope::PUBLISH)?,
            properties: read_properties(input)?,
        })
    }

    fn encode(&self, out: &mut WireWriter<'_>) {
        out.vi64(self.request_id);
        self.track.encode(out.out);
        out.vi64(self.track_alias);
        self.parameters.encode(out);
        out.raw(self.properties.as_bytes());
    }
}

/// PUBLISH_DONE: the last message of a subscription.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PublishDone {
    /// The reason why the subscription ended.
    pub code: code::Done,
    /// Number of data streams that were opened for the subscription, or [`PublishDone::UNKNOWN_COUNT`].
    pub stream_count: u64,
    /// The reason phrase. It is truncated to 1024 bytes when it is sent.
    pub reason: String,
}

impl PublishDone {
    /// The stream count of a publisher that did not count its streams.
    pub const UNKNOWN_COUNT: u64 = u64::MAX;
    /// The value that stands for an unknown count in drafts 18 and 19.
    const OLD_UNKNOWN_COUNT: u64 = (1 << 62) - 1;
}

impl MessageBody for PublishDone {
    fn decode(input: &mut WireReader) -> Result<Self, DecodeError> {
        let code = code::Done(input.vi64()?).in_draft(input.draft());
        let stream_count = match input.vi64()? {
            Self::OLD_UNKNOWN_COUNT if input.draft() < Draft::D20 => Self::UNKNOWN_COUNT,
            count => count,
        };
        Ok(Self { code, stream_count, reason: read_reason(input)? })
    }

    fn encode(&self, out: &mut WireWriter<'_>) {
        out.vi64(self.code.for_draft(out.draft()).0);
        out.vi64(match self.stream_count {
            Self::UNKNOWN_COUNT if out.draft() < Draft::D20 => Self::OLD_UNKNOWN_COUNT,
            count => count,
        });
        put_reason(&self.reason, out);
    }
}

/// The track and range that a FETCH asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FetchKind {
    /// The existing objects that `range` includes. In drafts 18 and 19 the range must have an end.
    Standalone {
        /// The track.
        track: TrackName,
        /// The range of objects to return.
        range: Filter,
    },
    /// The objects from `groups_back` groups before a subscription's joining location up to that location. Drafts 18
    /// and 19.
    RelativeJoining {
        /// Request ID of the subscription that this FETCH joins.
        subscription: u64,
        /// Number of groups before the group of the joining location.
        groups_back: u64,
    },
    /// The objects from the start of `first_group` up to a subscription's joining location. Drafts 18 and 19.
    AbsoluteJoining {
        /// Request ID of the subscription that this FETCH joins.
        subscription: u64,
        /// The first group to return.
        first_group: u64,
    },
}

/// FETCH: requests existing objects, which are sent on one stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FetchRequest {
    /// The request ID.
    pub request_id: u64,
    /// The track, and the range of objects to return.
    pub kind: FetchKind,
    /// Parameters of the request, other than the range of objects.
    pub parameters: Parameters,
}

impl MessageBody for FetchRequest {
    fn decode(input: &mut WireReader) -> Result<Self, DecodeError> {
        let request_id = input.vi64()?;
        if input.draft().has_fills() {
            let track = TrackName::decode(input)?;
            let mut parameters = Parameters::decode(input, Scope::FETCH)?;
            let range = parameters.filter.take().unwrap_or(Filter::All);
            return Ok(Self { request_id, kind: FetchKind::Standalone { track, range }, parameters });
        }
        let kind = match input.vi64()? {
            1 => FetchKind::Standalone {
                track: TrackName::decode(input)?,
                range: {
                    let start = Location::decode(input)?;
                    Filter::range(start, Location::decode(input)?.inclusive())
                },
            },
            2 => FetchKind::RelativeJoining { subscription: input.vi64()?, groups_back: input.vi64()? },
            3 => FetchKind::AbsoluteJoining { subscription: input.vi64()?, first_group: input.vi64()? },
            _ => return Err(DecodeError::violation("unknown fetch type")),
        };
        Ok(Self { request_id, kind, parameters: Parameters::decode(input, Scope::FETCH)? })
    }

    fn encode(&self, out: &mut WireWriter<'_>) {
        out.vi64(self.request_id);
        match (&self.kind, out.draft().has_fills()) {
            (FetchKind::Standalone { track, range }, true) => {
                track.encode(out.out);
                let filter = Some(*range).filter(|range| *range != Filter::All);
                return Parameters { filter, ..self.parameters.clone() }.encode(out);
            }
            (FetchKind::Standalone { track, range }, false) => {
                out.vi64(1);
                track.encode(out.out);
                if range.end().is_none() {
                    out.cannot_express("FETCH without an end");
                }
                range.start(None).encode(out.out);
                range.end().unwrap_or_default().exclusive().encode(out.out);
            }
            (_, true) => out.cannot_express("FETCH that joins a subscription"),
            (FetchKind::RelativeJoining { subscription: id, groups_back: start }, false) => {
                [2, *id, *start].into_iter().for_each(|field| out.vi64(field));
            }
            (FetchKind::AbsoluteJoining { subscription: id, first_group: start }, false) => {
                [3, *id, *start].into_iter().for_each(|field| out.vi64(field));
            }
        }
        self.parameters.encode(out);
    }
}

/// FETCH_OK: accepts a FETCH and states where the response ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FetchOk {
    /// Whether the track has ended and `last` is its last object.
    pub end_of_track: bool,
    /// The last object that the response may contain. The largest possible object ID means the end of the group.
    pub last: Location,
    /// Parameters of this FETCH_OK.
    pub parameters: Parameters,
    /// Properties of the track.
    pub properties: Properties,
}

impl MessageBody for FetchOk {
    fn decode(input: &mut WireReader) -> Result<Self, DecodeError> {
        Ok(Self {
            end_of_track: match input.u8()? {
                0 => false,
                1 => true,
                _ => return Err(DecodeError::violation("an end of track other than 0 or 1")),
            },
            last: match (Location::decode(input)?, input.draft().has_inclusive_ends()) {
                (last, true) => last,
                (end, false) => end.inclusive(),
            },
            parameters: Parameters::decode(input, Scope::FETCH_OK)?,
            properties: read_properties(input)?,
        })
    }

    fn encode(&self, out: &mut WireWriter<'_>) {
        out.u8(self.end_of_track.into());
        let end = if out.draft().has_inclusive_ends() { self.last } else { self.last.exclusive() };
        end.encode(out.out);
        self.parameters.encode(out);
        out.raw(self.properties.as_bytes());
    }
}

/// Defines a request for a track or for namespaces, which has no further fields of its own.
macro_rules! request {
    ($(#[$doc:meta])* $name:ident, $field:ident: $about:ident, $scope:ident) => {
        $(#[$doc])*
        #[derive(Clone, Debug, PartialEq, Eq)]
        pub struct $name {
            /// The request ID.
            pub request_id: u64,
            /// The requested track, the announced namespace, or the prefix of the subscribed namespaces.
            pub $field: $about,
            /// Parameters of the request.
            pub parameters: Parameters,
        }

        impl MessageBody for $name {
            fn decode(input: &mut WireReader) -> Result<Self, DecodeError> {
                Ok(Self {
                    request_id: input.vi64()?,
                    $field: $about::decode(input)?,
                    parameters: Parameters::decode(input, Scope::$scope)?,
                })
            }

            fn encode(&self, out: &mut WireWriter<'_>) {
                out.vi64(self.request_id);
                self.$field.encode(out.out);
                self.parameters.encode(out);
            }
        }
    };
}

request! {
    /// SUBSCRIBE: requests the future objects of a track.
    Subscribe, track: TrackName, SUBSCRIBE
}
request! {
    /// TRACK_STATUS: requests the answer that a SUBSCRIBE would get, without subscribing.
    TrackStatus, track: TrackName, TRACK_STATUS
}
request! {
    /// PUBLISH_NAMESPACE: announces that the sender publishes tracks in this namespace.
    PublishNamespace, namespace: Namespace, PUBLISH_NAMESPACE
}
request! {
    /// SUBSCRIBE_NAMESPACE: requests announcements of all present and future namespaces that begin with `prefix`.
    SubscribeNamespace, prefix: Namespace, SUBSCRIBE_NAMESPACE
}
request! {
    /// SUBSCRIBE_TRACKS: requests a PUBLISH of each present and future track whose namespace begins with `prefix`.
    SubscribeTracks, prefix: Namespace, SUBSCRIBE_TRACKS
}

/// NAMESPACE: announces a namespace that matches a SUBSCRIBE_NAMESPACE. The subscribed prefix is omitted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamespaceFound {
    /// The namespace without the subscribed prefix.
    pub suffix: Namespace,
    /// The announcement's path (HOP_PATH) and its cost. They are present only between endpoints that negotiated
    /// draft-lcurley-moq-cluster. In MoQ Transport itself, a NAMESPACE message has neither parameters nor a field for
    /// their number.
    pub parameters: Option<Parameters>,
}

impl MessageBody for NamespaceFound {
    fn decode(input: &mut WireReader) -> Result<Self, DecodeError> {
        let suffix = Namespace::decode(input)?;
        let parameters = match input.is_empty() {
            true => None,
            false => Some(Parameters::decode(input, Scope::NAMESPACE)?),
        };
        Ok(Self { suffix, parameters })
    }

    fn encode(&self, out: &mut WireWriter<'_>) {
        self.suffix.encode(out.out);
        if let Some(parameters) = &self.parameters {
            parameters.encode(out);
        }
    }
}

/// NAMESPACE_DONE: withdraws a namespace that was announced with NAMESPACE.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamespaceDone {
    /// The namespace without the subscribed prefix.
    pub suffix: Namespace,
}

impl MessageBody for NamespaceDone {
    fn decode(input: &mut WireReader) -> Result<Self, DecodeError> {
        Ok(Self { suffix: Namespace::decode(input)? })
    }

    fn encode(&self, out: &mut WireWriter<'_>) {
        self.suffix.encode(out.out);
    }
}

/// PUBLISH_STATE_NOTIFY: reports which parameters of a subscription the publisher changed, and the track's largest
/// location at that time. Draft-20 and later.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PublishStateNotify {
    /// The parameters that changed.
    pub parameters: Parameters,
}

impl MessageBody for PublishStateNotify {
    fn decode(input: &mut WireReader) -> Result<Self, DecodeError> {
        Ok(Self { parameters: Parameters::decode(input, Scope::STATE_NOTIFY)? })
    }

    fn encode(&self, out: &mut WireWriter<'_>) {
        if !out.draft().has_state_notify() {
            out.cannot_express("PUBLISH_STATE_NOTIFY");
        }
        self.parameters.encode(out);
    }
}

/// UNSUBSCRIBE of older drafts: ends a subscription. In draft-18 the subscriber cancels the request stream instead.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unsubscribe;

impl MessageBody for Unsubscribe {
    fn decode(input: &mut WireReader) -> Result<Self, DecodeError> {
        // Older drafts have a request ID here. It is skipped, because the request stream itself identifies the
        // subscription.
        input.rest();
        Ok(Self)
    }

    fn encode(&self, _out: &mut WireWriter<'_>) {}
}

/// PUBLISH_SKIPPED, in draft-18 PUBLISH_BLOCKED: a track that matches a SUBSCRIBE_TRACKS but is not published for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PublishSkipped {
    /// The track. The subscribed prefix is omitted from its namespace.
    pub suffix: TrackName,
}

impl MessageBody for PublishSkipped {
    fn decode(input: &mut WireReader) -> Result<Self, DecodeError> {
        Ok(Self { suffix: TrackName::decode(input)? })
    }

    fn encode(&self, out: &mut WireWriter<'_>) {
        self.suffix.encode(out.out);
    }
}
