//! Requests of the relay's own: SUBSCRIBE and FETCH to publishers, PUBLISH to subscribers, and what a
//! relay asks its upstream relay for.

use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use millrace_proto::{
    moq::{
        FetchItem, GroupOrder, Location, Message, Namespace, Parameters, TrackName, code,
        data::FetchParser,
        message::{
            Fetch, FetchKind, FetchOk, Publish, PublishNamespace, RequestError, Subscribe,
            SubscribeNamespace, SubscribeOk,
        },
    },
    relay::{
        fetch::{Entry, Payload},
        filter::Window,
    },
};
use quinn::{RecvStream, SendStream};
use tokio::{sync::oneshot, time::timeout};
use tracing::{debug, info};

use super::Session;
use crate::{
    hub::{NamespaceEvent, Publication},
    live::LiveTrack,
    subscription::Options,
    upstream::Upstream,
    wire::{self, Incoming, MessageReader, SessionError},
};

/// A request of ours on its stream, answered or not.
struct Request {
    send: SendStream,
    reader: MessageReader,
}

impl Session {
    /// Opens a request stream with `message`.
    async fn request(&self, message: impl Into<Message>) -> Result<Request, SessionError> {
        let (mut send, recv) = self.connection.quic.open_bi().await?;
        wire::send(&mut send, message).await?;
        Ok(Request { send, reader: MessageReader::new(recv, BytesMut::new()) })
    }

    /// Opens a request stream and waits for the first answer; an error answer, none in time and a lost
    /// session are all refusals.
    async fn ask(self: &Arc<Self>, message: impl Into<Message>) -> Result<(Request, Message), RequestError> {
        if self.peer_goes_away() {
            return Err(RequestError::new(code::Request::GOING_AWAY, "the publisher is going away"));
        }
        let exchange = async {
            let mut request = self.request(message).await?;
            match request.reader.next().await? {
                Incoming::Message(answer) => Ok((request, answer)),
                Incoming::Finished | Incoming::Reset => {
                    Err(SessionError::Lost("the publisher dropped the request".into()))
                }
            }
        };
        match timeout(self.hub.limits.request_timeout, exchange).await {
            Ok(Ok((_, Message::RequestError(refused)))) => Err(refused),
            Ok(Ok(answered)) => Ok(answered),
            Ok(Err(error)) => {
                let refusal = RequestError::new(code::Request::INTERNAL_ERROR, error.to_string());
                self.fail(error);
                Err(refusal)
            }
            Err(_) => Err(RequestError::new(code::Request::TIMEOUT, "the publisher did not answer in time")),
        }
    }

    /// An answer that the request does not have: the session is closed.
    fn wrong_answer(&self, answer: &Message) -> RequestError {
        let reason = format!("{} is no answer to this request", answer.name());
        self.fail(SessionError::violation(reason.clone()));
        RequestError::new(code::Request::INTERNAL_ERROR, reason)
    }

    /// Subscribes to `track` at this publisher and feeds it, in the background, until it ends.
    ///
    /// # Errors
    /// The publisher refused, did not answer in time, or is gone.
    pub async fn subscribe_upstream(self: Arc<Self>, track: Arc<LiveTrack>) -> Result<(), RequestError> {
        if self.publishes(&track) {
            return Ok(());
        }
        let parameters =
            Parameters { new_group_request: track.take_group_request(), ..Parameters::default() };
        let subscribe =
            Subscribe { request_id: self.next_request_id(), track: track.name().clone(), parameters };
        let (request, answer) = self.ask(subscribe).await?;
        let ok = match answer {
            Message::SubscribeOk(ok) => ok,
            other => return Err(self.wrong_answer(&other)),
        };
        self.adopt(&track, ok, request)
    }

    /// Takes over a subscription that the publisher accepted.
    fn adopt(
        self: Arc<Self>,
        track: &Arc<LiveTrack>,
        ok: SubscribeOk,
        request: Request,
    ) -> Result<(), RequestError> {
        track.prepare(self.id());
        let unsupported = track.data.set_properties(ok.properties).map_err(|error| {
            let refusal = RequestError::new(code::Request::INTERNAL_ERROR, error.to_string());
            self.fail(error.into());
            refusal
        })?;
        if let Some(kind) = unsupported {
            let reason = format!("mandatory track property {kind:#x}");
            return Err(RequestError::new(code::Request::UNSUPPORTED_EXTENSION, reason));
        }
        if let Some(largest) = ok.parameters.largest_object {
            track.data.saw_largest(largest);
        }
        let (upstream, asks) = Upstream::new(self.id(), Arc::clone(track), ok.track_alias, true);
        if let Err(error) = self.add_upstream(&upstream) {
            let refusal = RequestError::new(code::Request::INTERNAL_ERROR, error.to_string());
            self.fail(error);
            return Err(refusal);
        }
        debug!(session = self.id(), track = %track.name(), alias = ok.track_alias, "subscribed upstream");
        tokio::spawn(async move {
            let Request { mut send, mut reader } = request;
            let result = self.follow_upstream(&upstream, &mut send, &mut reader, asks).await;
            if let Err(error) = self.finish_upstream(&upstream, result, send, reader).await {
                self.fail(error);
            }
        });
        Ok(())
    }

    /// Publishes `track` to the peer, which asked for such tracks, and feeds it until either side ends it.
    pub(super) async fn publish_to(
        self: &Arc<Self>,
        track: Arc<LiveTrack>,
        forward: bool,
        mut send: SendStream,
        recv: RecvStream,
    ) -> Result<(), SessionError> {
        let request_id = self.next_request_id();
        let largest = track.data.largest();
        let window = Window::resolve(None, largest).unwrap_or_default();
        let options = Options { forward, ..Options::new(&Parameters::default(), window, &track) };
        let properties = track.data.properties();
        let name = track.name().clone();
        let subscription = self.add_subscription(request_id, track, options, largest);
        let parameters =
            Parameters { largest_object: largest, forward: Some(forward), ..Parameters::default() };
        let publish =
            Publish { request_id, track: name, track_alias: subscription.alias, parameters, properties };
        let mut reader = MessageReader::new(recv, BytesMut::new());
        let accepted = async {
            wire::send(&mut send, publish).await?;
            match timeout(self.hub.limits.request_timeout, reader.next()).await {
                Ok(Ok(Incoming::Message(Message::RequestOk(ok)))) => Ok(Some(ok.parameters)),
                Ok(Ok(Incoming::Message(Message::RequestError(_)))) => Ok(None),
                Ok(Ok(Incoming::Message(other))) => {
                    Err(SessionError::violation(format!("{} answers PUBLISH", other.name())))
                }
                Ok(Ok(Incoming::Finished | Incoming::Reset)) | Ok(Err(SessionError::Lost(_))) | Err(_) => {
                    Ok(None)
                }
                Ok(Err(violation)) => Err(violation),
            }
        }
        .await;
        match accepted {
            Ok(Some(parameters)) if self.accept_publish(&subscription, &parameters).is_ok() => {}
            Ok(_) | Err(_) => {
                self.remove_subscription(request_id, &subscription);
                return accepted.map(drop);
            }
        }
        self.run_subscription(request_id, subscription, None, send, reader).await
    }

    /// Fetches objects from `first` to `last`, both inclusive, at this publisher; `each` gets them in
    /// `order`.
    ///
    /// # Errors
    /// The publisher refused, or its answer broke off.
    pub(super) async fn fetch_upstream(
        self: &Arc<Self>,
        track: TrackName,
        (first, last): (Location, Location),
        order: GroupOrder,
        mut each: impl FnMut(FetchItem, Bytes),
    ) -> Result<FetchOk, RequestError> {
        let request_id = self.next_request_id();
        let (sender, stream) = oneshot::channel();
        self.state.lock().fetches.insert(request_id, sender);
        let _forget = Forget { session: self, request_id };
        let kind = FetchKind::Standalone { track, start: first, end: after(last) };
        let parameters = Parameters { group_order: Some(order), ..Parameters::default() };
        let (_request, answer) = self.ask(Fetch { request_id, kind, parameters }).await?;
        let ok = match answer {
            Message::FetchOk(ok) => ok,
            other => return Err(self.wrong_answer(&other)),
        };
        let broken = |reason: String| RequestError::new(code::Request::INTERNAL_ERROR, reason);
        let (recv, front) = timeout(self.hub.limits.request_timeout, stream)
            .await
            .map_err(|_| RequestError::new(code::Request::TIMEOUT, "the FETCH stream did not come in time"))?
            .map_err(|_| broken("the session ended".into()))?;
        match read_fetch(recv, front, order, &mut each).await {
            Ok(()) => Ok(ok),
            Err(error) => {
                let refusal = broken(error.to_string());
                self.fail(error);
                Err(refusal)
            }
        }
    }
}

/// Forgets a FETCH whose data stream did not come.
struct Forget<'a> {
    session: &'a Session,
    request_id: u64,
}

impl Drop for Forget<'_> {
    fn drop(&mut self) {
        self.session.state.lock().fetches.remove(&self.request_id);
    }
}

/// The end of a range in FETCH's encoding: the last object plus 1.
pub(super) fn after(last: Location) -> Location {
    // An object ID of 0 means the whole group, which is what no object behind the last one is.
    Location { object: last.object.checked_add(1).unwrap_or(0), ..last }
}

/// The last location of a range whose end is in FETCH's encoding.
pub(super) fn before(end: Location) -> Location {
    Location { object: end.object.checked_sub(1).unwrap_or(u64::MAX), ..end }
}

/// Reads the items of a FETCH response; `front` was read from the stream already, behind its header.
async fn read_fetch(
    mut recv: RecvStream,
    front: BytesMut,
    order: GroupOrder,
    each: &mut impl FnMut(FetchItem, Bytes),
) -> Result<(), SessionError> {
    let mut parser = FetchParser::new(order, 0);
    let mut pending = Pending::default();
    pending.take(&front, &mut parser, each)?;
    loop {
        match recv.read_chunk(64 * 1024, true).await {
            Ok(Some(chunk)) => pending.take(&chunk.bytes, &mut parser, each)?,
            Ok(None) if parser.at_boundary() => return Ok(()),
            Ok(None) => return Err(SessionError::violation("a FETCH stream ends inside an object")),
            Err(error) => return Err(SessionError::Lost(error.to_string())),
        }
    }
}

/// The object of a FETCH response whose payload is arriving.
#[derive(Default)]
struct Pending {
    item: Option<FetchItem>,
    payload: BytesMut,
    missing: usize,
}

/// The largest object that is taken from an upstream FETCH, in bytes: it is held whole until complete.
const MAX_FETCHED_OBJECT: u64 = 64 << 20;

impl Pending {
    fn take(
        &mut self,
        mut chunk: &[u8],
        parser: &mut FetchParser,
        each: &mut impl FnMut(FetchItem, Bytes),
    ) -> Result<(), SessionError> {
        loop {
            let payload = chunk;
            let found = parser.next(&mut chunk)?;
            // The parser passed over the rest of the payload, up to the next header.
            let n = self.missing.min(payload.len());
            self.payload.extend_from_slice(&payload[..n]);
            self.missing -= n;
            if self.missing == 0
                && let Some(item) = self.item.take()
            {
                each(item, self.payload.split().freeze());
            }
            let Some(found) = found else { return Ok(()) };
            self.begin(found.item, each)?;
        }
    }

    fn begin(
        &mut self,
        item: FetchItem,
        each: &mut impl FnMut(FetchItem, Bytes),
    ) -> Result<(), SessionError> {
        match &item {
            FetchItem::Object(object) if object.payload_len > MAX_FETCHED_OBJECT => {
                Err(SessionError::Lost(format!("a fetched object of {} bytes", object.payload_len)))
            }
            FetchItem::Object(object) if object.payload_len > 0 => {
                self.missing = object.payload_len as usize;
                self.item = Some(item);
                Ok(())
            }
            _ => {
                each(item, Bytes::new());
                Ok(())
            }
        }
    }
}

impl Session {
    /// What a relay does at its upstream relay: publishes there what is published here, and learns what is
    /// published there.
    pub(super) async fn attach(self: &Arc<Self>) -> Result<(), SessionError> {
        self.until_ready().await?;
        let _fallback = self.hub.publish(Namespace::default(), self, true);
        let mirror = self.mirror_namespaces();
        let announce = self.announce_namespaces();
        tokio::select! {
            result = mirror => result,
            result = announce => result,
        }
    }

    /// Follows the upstream's namespaces, and publishes them here as the upstream's.
    async fn mirror_namespaces(self: &Arc<Self>) -> Result<(), SessionError> {
        let subscribe = SubscribeNamespace {
            request_id: self.next_request_id(),
            prefix: Namespace::default(),
            parameters: Parameters::default(),
        };
        let (mut request, _ok) = match self.ask(subscribe).await {
            Ok(answered) => answered,
            Err(refused) => {
                info!(session = self.id(), reason = refused.reason, "the upstream tells no namespaces");
                return std::future::pending().await;
            }
        };
        let mut mirrored: Vec<(Namespace, Publication)> = Vec::new();
        loop {
            match request.reader.next().await? {
                Incoming::Message(Message::Namespace(found)) => {
                    // Our own announcements come back to us.
                    if !self.hub.is_published(&found.suffix, self.id()) {
                        let publication = self.hub.publish(found.suffix.clone(), self, false);
                        mirrored.push((found.suffix, publication));
                    }
                }
                Incoming::Message(Message::NamespaceDone(done)) => {
                    mirrored.retain(|(namespace, _)| *namespace != done.suffix);
                }
                Incoming::Message(other) => {
                    return Err(SessionError::violation(format!("{} about namespaces", other.name())));
                }
                Incoming::Finished | Incoming::Reset => return std::future::pending().await,
            }
        }
    }

    /// Publishes at the upstream every namespace that others publish here.
    async fn announce_namespaces(self: &Arc<Self>) -> Result<(), SessionError> {
        let mut watch = self.hub.watch_namespaces(Namespace::default());
        let mut announced: Vec<(Namespace, Request)> = Vec::new();
        while let Some(event) = watch.events.recv().await {
            match event {
                NamespaceEvent::Published(namespace) => {
                    if !self.hub.is_published(&namespace, self.id()) {
                        continue; // the upstream's own
                    }
                    let publish = PublishNamespace {
                        request_id: self.next_request_id(),
                        namespace: namespace.clone(),
                        parameters: Parameters::default(),
                    };
                    match self.ask(publish).await {
                        Ok((request, _ok)) => announced.push((namespace, request)),
                        Err(refused) => info!(%namespace, reason = refused.reason, "not taken upstream"),
                    }
                }
                NamespaceEvent::Done(namespace) => {
                    for (_, mut request) in announced.extract_if(.., |(other, _)| *other == namespace) {
                        let _ = request.send.reset(wire::var(code::Reset::CANCELLED.0)); // may be over
                        request.reader.stop(code::Reset::CANCELLED.0);
                    }
                }
            }
        }
        Err(SessionError::Lost("too many namespace changes at once".into()))
    }
}

/// A fetched object as it goes into the response to a subscriber.
pub(super) fn fetched(item: FetchItem, payload: Bytes) -> Entry {
    Entry { item, payload: Payload::Owned(payload) }
}
