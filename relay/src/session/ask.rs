//! Sends the relay's own requests, and waits for their first answers.

use bytes::BytesMut;
use millrace_moq::{
    Message, Namespace, Parameters, code,
    message::{RequestError, SubscribeNamespace},
};
use tokio::time::timeout;

use super::context::SessionContext;
use crate::wire::{self, IncomingMessage, RequestStream, SessionError};

/// Opens a request stream and sends `message` on it.
async fn request(
    context: &SessionContext,
    message: impl Into<Message>,
) -> Result<RequestStream, SessionError> {
    let (send, recv) = context.connection().streams().open_bi().await?;
    let mut send = context.answers(send);
    wire::send(&mut send, message).await?;
    Ok(RequestStream { send, reader: context.request_reader(recv, BytesMut::new()) })
}

/// Sends a request on a new stream and waits for the answer. REQUEST_ERROR, a timeout and a lost session are all
/// reported as refusals.
pub async fn ask(
    context: &SessionContext,
    message: impl Into<Message>,
) -> Result<(RequestStream, Message), RequestError> {
    if context.peer_goes_away() {
        return Err(RequestError::new(code::Request::GOING_AWAY, "the publisher is going away"));
    }
    let exchange = async {
        let mut stream = request(context, message).await?;
        loop {
            match stream.reader.next().await? {
                IncomingMessage::Message(answer) => return Ok((stream, answer)),
                IncomingMessage::GoAway(_) => {} // A peer that has sent GOAWAY may still answer the request.
                IncomingMessage::Finished | IncomingMessage::Reset => {
                    return Err(SessionError::Lost("the publisher dropped the request".into()));
                }
            }
        }
    };
    // The timeout also covers the opening of the stream, which the peer's stream limit may delay.
    match timeout(context.hub().limits.request_timeout, exchange).await {
        Ok(Ok((_, Message::RequestError(refused)))) => Err(refused),
        Ok(Ok(answered)) => Ok(answered),
        Ok(Err(error)) => Err(failed(context, error)),
        Err(_) => Err(RequestError::new(code::Request::TIMEOUT, "the publisher did not answer in time")),
    }
}

/// Closes the session because the peer sent a message that does not answer the request. Returns the error for the
/// caller.
pub fn wrong_answer(context: &SessionContext, answer: &Message) -> RequestError {
    let reason = format!("{} is no answer to this request", answer.name());
    context.fail(SessionError::violation(reason.clone()));
    RequestError::new(code::Request::INTERNAL_ERROR, reason)
}

/// Turns a session error into the refusal that the requester gets. Closes the session if the peer violated the
/// protocol.
pub fn failed(context: &SessionContext, error: SessionError) -> RequestError {
    let refusal = RequestError::new(code::Request::INTERNAL_ERROR, error.to_string());
    context.fail(error);
    refusal
}

/// A peer's list of its namespaces below a prefix, which the peer keeps up to date.
pub struct PeerNamespaces<'a> {
    context: &'a SessionContext,
    prefix: Namespace,
    request: RequestStream,
}

/// A change in the list of namespaces that a peer sends in answer to SUBSCRIBE_NAMESPACE.
pub enum NamespaceChange {
    Found(Namespace, Option<Box<Parameters>>),
    Withdrawn(Namespace),
}

impl<'a> PeerNamespaces<'a> {
    /// Asks the peer for its namespaces below `prefix`, with SUBSCRIBE_NAMESPACE.
    pub async fn ask(context: &'a SessionContext, prefix: Namespace) -> Result<Self, RequestError> {
        let message = SubscribeNamespace {
            request_id: context.next_request_id(),
            prefix: prefix.clone(),
            parameters: Parameters::default(),
        };
        let (request, _ok) = ask(context, message).await?;
        Ok(Self { context, prefix, request })
    }

    /// Waits for the next change in the peer's list. After GOAWAY the relay repeats the request, and the peer reports
    /// all its namespaces again. No namespace of the old list is reported as withdrawn for that. Once the peer has
    /// ended the request, this never returns.
    pub async fn next(&mut self) -> Result<NamespaceChange, SessionError> {
        loop {
            match self.request.reader.next().await? {
                IncomingMessage::Message(Message::Namespace(found)) => {
                    let parameters = found.parameters.map(Box::new);
                    return Ok(NamespaceChange::Found(self.whole(&found.suffix)?, parameters));
                }
                IncomingMessage::Message(Message::NamespaceDone(done)) => {
                    return Ok(NamespaceChange::Withdrawn(self.whole(&done.suffix)?));
                }
                IncomingMessage::Message(other) => {
                    return Err(SessionError::misplaced(&other, "about namespaces"));
                }
                IncomingMessage::GoAway(_) => {
                    if let Ok(moved) = Self::ask(self.context, self.prefix.clone()).await {
                        self.request.cancel();
                        *self = moved;
                    }
                }
                IncomingMessage::Finished | IncomingMessage::Reset => return std::future::pending().await,
            }
        }
    }

    /// Returns the namespace that a message of the list names by its fields after the prefix.
    fn whole(&self, suffix: &Namespace) -> Result<Namespace, SessionError> {
        self.prefix.join(suffix).map_err(|error| SessionError::violation(format!("a namespace: {error}")))
    }
}
