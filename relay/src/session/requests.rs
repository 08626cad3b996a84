//! Accepts the peer's request streams, and passes each to the module that serves its first message.

use std::sync::Arc;

use bytes::BytesMut;
use millrace_moq::{
    Message, code,
    message::{FetchKind, FetchRequest, RequestError},
};
use millrace_webtransport::{RecvStream, SendStream};
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
            self.context.spawn(async move { requests.take(streams).await });
        }
    }

    async fn take(&self, streams: (SendStream, RecvStream)) -> Result<(), SessionError> {
        let entered = self.context.connection().streams().enter_bi(streams.0, streams.1).await?;
        let Some((send, recv)) = entered else { return Ok(()) };
        self.context.until_ready().await?;
        let mut reader = self.context.request_reader(recv, BytesMut::new());
        let message = match reader.next().await? {
            IncomingMessage::Message(message) => message,
            IncomingMessage::GoAway(goaway) => return Err(not_a_request(&goaway.into())),
            IncomingMessage::Finished => return Err(SessionError::violation("an empty request stream")),
            IncomingMessage::Reset => return Ok(()),
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
            return self.context.refuse(send, refusal).await;
        }
        if let Some(Err(refusal)) = parameters(&message).map(without_range_filters) {
            return self.context.refuse(send, refusal).await;
        }
        let Admitted { rights, .. } = &match admitted {
            Ok(admitted) => admitted,
            Err(refused) => return self.context.refuse(send, refused).await,
        };
        let stream = RequestStream { send, reader };
        self.context.within(rights, stream, |stream| self.serve(message, stream, rights)).await
    }

    async fn serve(
        &self,
        message: Message,
        stream: RequestStream,
        rights: &Arc<Rights>,
    ) -> Result<(), SessionError> {
        match message {
            Message::Subscribe(subscribe) => self.subscriptions.serve(subscribe, stream, rights).await,
            Message::Publish(publish) => self.publications.serve(publish, stream, rights).await,
            Message::Fetch(fetch) => self.fetches.serve(fetch, stream, rights).await,
            Message::TrackStatus(status) => track_status::serve(&self.context, status, stream).await,
            Message::PublishNamespace(publish) => {
                self.namespaces.serve_publish(publish, stream, rights).await
            }
            Message::SubscribeNamespace(watch) => {
                self.namespaces.serve_subscribe(watch, stream, rights).await
            }
            Message::SubscribeTracks(watch) => {
                self.namespaces.serve_subscribe_tracks(watch, stream, rights).await
            }
            other => Err(not_a_request(&other)),
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
