//! The peer's request streams, each taken to the family of its first message.

use std::sync::Arc;

use bytes::BytesMut;
use millrace_proto::moq::Message;
use quinn::{RecvStream, SendStream};
use tracing::debug;

use super::{
    context::Context, fetch::Fetches, namespaces::Namespaces, publish::Publications, rights::Admitted,
    subscribe::Subscriptions, track_status,
};
use crate::{
    access::rights::Rights,
    hub::Counters,
    wire::{Answers, Incoming, MessageReader, RequestStream, SessionError},
};

/// The families of requests.
pub struct Requests {
    pub context: Arc<Context>,
    pub subscriptions: Arc<Subscriptions>,
    pub publications: Arc<Publications>,
    pub fetches: Arc<Fetches>,
    pub namespaces: Arc<Namespaces>,
}

impl Requests {
    /// Serves requests until the session is over.
    pub async fn accept(self: &Arc<Self>) -> Result<(), SessionError> {
        loop {
            let (send, recv) = self.context.connection().quic.accept_bi().await?;
            let requests = Arc::clone(self);
            self.context.spawn(async move { requests.take(send, recv).await });
        }
    }

    async fn take(&self, send: SendStream, recv: RecvStream) -> Result<(), SessionError> {
        self.context.until_ready().await?;
        let mut reader = MessageReader::new(recv, BytesMut::new());
        let message = match reader.next().await? {
            Incoming::Message(message) => message,
            Incoming::Finished => return Err(SessionError::violation("an empty request stream")),
            Incoming::Reset => return Ok(()),
        };
        if !message.opens_request() {
            return Err(not_a_request(&message));
        }
        self.context.check_request_id(&message)?;
        Counters::count(&self.context.hub().counters.requests);
        debug!(session = self.context.id(), request = ?message, "request");
        let send = Answers::from(send);
        let Admitted { rights, .. } = &match self.context.admit(&message)? {
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
            Message::Subscribe(subscribe) => self.subscriptions.serve(subscribe, stream).await,
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

fn not_a_request(message: &Message) -> SessionError {
    SessionError::violation(format!("{} opens a request stream", message.name()))
}
