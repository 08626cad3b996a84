//! Requests of the relay's own, and their first answers.

use bytes::BytesMut;
use millrace_moq::{Message, code, message::RequestError};
use tokio::time::timeout;

use super::context::Context;
use crate::wire::{self, Incoming, RequestStream, SessionError};

/// Opens a request stream with `message`.
async fn request(context: &Context, message: impl Into<Message>) -> Result<RequestStream, SessionError> {
    let (send, recv) = context.connection().streams().open_bi().await?;
    let mut send = context.answers(send);
    wire::send(&mut send, message).await?;
    Ok(RequestStream { send, reader: context.request_reader(recv, BytesMut::new()) })
}

/// Opens a request stream and waits for the first answer; an error answer, none in time and a lost
/// session are all refusals.
pub async fn ask(
    context: &Context,
    message: impl Into<Message>,
) -> Result<(RequestStream, Message), RequestError> {
    if context.peer_goes_away() {
        return Err(RequestError::new(code::Request::GOING_AWAY, "the publisher is going away"));
    }
    let exchange = async {
        let mut stream = request(context, message).await?;
        loop {
            match stream.reader.next().await? {
                Incoming::Message(answer) => return Ok((stream, answer)),
                Incoming::GoAway(_) => {} // it may be answered all the same
                Incoming::Finished | Incoming::Reset => {
                    return Err(SessionError::Lost("the publisher dropped the request".into()));
                }
            }
        }
    };
    match timeout(context.hub().limits.request_timeout, exchange).await {
        Ok(Ok((_, Message::RequestError(refused)))) => Err(refused),
        Ok(Ok(answered)) => Ok(answered),
        Ok(Err(error)) => Err(failed(context, error)),
        Err(_) => Err(RequestError::new(code::Request::TIMEOUT, "the publisher did not answer in time")),
    }
}

/// An answer that the request does not have: the session is closed.
pub fn wrong_answer(context: &Context, answer: &Message) -> RequestError {
    let reason = format!("{} is no answer to this request", answer.name());
    context.fail(SessionError::violation(reason.clone()));
    RequestError::new(code::Request::INTERNAL_ERROR, reason)
}

/// What `error` means for those who wait for the answer: the session is closed if the peer broke the protocol.
pub fn failed(context: &Context, error: SessionError) -> RequestError {
    let refusal = RequestError::new(code::Request::INTERNAL_ERROR, error.to_string());
    context.fail(error);
    refusal
}
