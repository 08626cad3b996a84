//! Accepts the peer's request streams, and passes each to the module that serves its first message.

use std::{pin::Pin, sync::Arc};

use bytes::BytesMut;
use millrace_moq::{
    Message, code,
    message::{FetchKind, FetchRequest, RequestError},
};
use millrace_webtransport::{RecvStream, SendStream};
use quinn::Dir;
use tracing::debug;

use super::{
    bounds::parameters, context::SessionContext, fetch::Fetches, filters::without_range_filters,
    namespaces::SessionNamespaces, publish::Publications, rights::Admitted, subscribe::Subscriptions,
    track_status,
};
use crate::{
    hub::OperatorCounters,
    wire::{IncomingMessage, RequestStream, SessionError},
};
use millrace_access::rights::Rights;

/// The modules that serve the requests of one session.
pub struct Requests {
    pub context: Arc<SessionContext>,
    pub subscriptions: Arc<Subscriptions>,
    pub publications: Arc<Publications>,
    pub fetches: Arc<Fetches>,
    pub namespaces: Arc<SessionNamespaces>,
}

impl Requests {
    /// Serves requests until the session is over.
    pub async fn accept(self: &Arc<Self>) -> Result<(), SessionError> {
        loop {
            let streams = self.context.connection().streams().accept_bi().await?;
            let requests = Arc::clone(self);
            let open = self.context.connection().count_stream(Dir::Bi);
            self.context.spawn(async move {
                let _open = open;
                requests.take(streams).await
            });
        }
    }

    /// Serves a request until it ends.
    async fn take(&self, streams: (SendStream, RecvStream)) -> Result<(), SessionError> {
        // What a request needs at its beginning is in a future of its own, and freed before the request is served, which
        // may take hours.
        let Some((message, stream, admitted)) = Box::pin(self.begin(streams)).await? else { return Ok(()) };
        let rights = &admitted.rights;
        self.context.within(rights, stream, |stream| self.serve(*message, stream, rights)).await
    }

    /// Reads and admits a request. Returns `None` if it was refused, or the stream has ended before it.
    async fn begin(
        &self,
        streams: (SendStream, RecvStream),
    ) -> Result<Option<(Box<Message>, RequestStream, Admitted)>, SessionError> {
        let entered = self.context.connection().streams().enter_bi(streams.0, streams.1).await?;
        let Some((send, recv)) = entered else { return Ok(None) };
        self.context.until_ready().await?;
        let mut reader = self.context.request_reader(recv, BytesMut::new());
        let message = match reader.next().await? {
            IncomingMessage::Message(message) => message,
            IncomingMessage::GoAway(goaway) => return Err(not_a_request(&goaway.into())),
            IncomingMessage::Finished => return Err(SessionError::violation("an empty request stream")),
            IncomingMessage::Reset => return Ok(None),
        };
        if !message.opens_request() {
            return Err(not_a_request(&message));
        }
        self.context.check_request_id(&message)?;
        OperatorCounters::count(&self.context.hub().counters.requests);
        debug!(session = self.context.id(), request = ?message, "the session's peer sent a request");
        let send = self.context.answers(send);
        // Request budgets and access rights are checked first, so that requests that are refused for another reason
        // also count against the request budgets.
        let admitted = self.context.admit(&message)?;
        if let Some(refusal) = reserved(&message) {
            return self.context.refuse(send, refusal).await.map(|()| None);
        }
        if let Some(Err(refusal)) = parameters(&message).map(without_range_filters) {
            return self.context.refuse(send, refusal).await.map(|()| None);
        }
        match admitted {
            Ok(admitted) => Ok(Some((Box::new(message), RequestStream { send, reader }, admitted))),
            Err(refused) => self.context.refuse(send, refused).await.map(|()| None),
        }
    }

    /// Returns the future that serves a request. Each kind of request has a box of its own size.
    fn serve<'a>(
        &'a self,
        message: Message,
        stream: RequestStream,
        rights: &'a Arc<Rights>,
    ) -> Pin<Box<dyn Future<Output = Result<(), SessionError>> + Send + 'a>> {
        match message {
            Message::Subscribe(subscribe) => {
                let established = Box::pin(self.subscriptions.establish(subscribe, stream, rights));
                Box::pin(self.subscriptions.serve(established))
            }
            Message::Publish(publish) => Box::pin(self.publications.serve(publish, stream, rights)),
            Message::Fetch(fetch) => Box::pin(self.fetches.serve(fetch, stream, rights)),
            Message::TrackStatus(status) => Box::pin(track_status::serve(&self.context, status, stream)),
            Message::PublishNamespace(publish) => {
                Box::pin(self.namespaces.serve_publish(publish, stream, rights))
            }
            Message::SubscribeNamespace(watch) => {
                Box::pin(self.namespaces.serve_subscribe(watch, stream, rights))
            }
            Message::SubscribeTracks(watch) => {
                Box::pin(self.namespaces.serve_subscribe_tracks(watch, stream, rights))
            }
            other => Box::pin(async move { Err(not_a_request(&other)) }),
        }
    }
}

/// Returns the refusal of a request about a reserved namespace, or about the session's own namespace, which is never
/// forwarded.
fn reserved(message: &Message) -> Option<RequestError> {
    let namespace = match message {
        Message::Subscribe(subscribe) => subscribe.track.namespace(),
        Message::Publish(publish) => publish.track.namespace(),
        Message::TrackStatus(status) => status.track.namespace(),
        Message::Fetch(FetchRequest { kind: FetchKind::Standalone { track, .. }, .. }) => track.namespace(),
        Message::PublishNamespace(publish) => &publish.namespace,
        Message::SubscribeNamespace(watch) => &watch.prefix,
        Message::SubscribeTracks(watch) => &watch.prefix,
        _ => return None,
    };
    if namespace.is_forbidden() {
        return Some(RequestError::new(code::Request::UNAUTHORIZED, "a reserved namespace"));
    }
    let reason = "nothing of the session's own namespace is here";
    namespace.is_session_level().then(|| RequestError::new(code::Request::DOES_NOT_EXIST, reason))
}

fn not_a_request(message: &Message) -> SessionError {
    SessionError::misplaced(message, "opens a request stream")
}
