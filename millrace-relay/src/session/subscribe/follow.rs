//! A subscription under way: its updates and its end.

use std::{sync::Arc, time::Duration};

use millrace_proto::{
    moq::{
        Location, Message, Parameters, code,
        message::{RequestError, RequestOk, RequestUpdate},
    },
    relay::filter::{OutOfRange, Window},
};
use millrace_webtransport::SendStream;
use tokio::time::{Instant as Clock, sleep};

use super::Entry;
use crate::{
    access::rights::Rights,
    subscription::Ended,
    wire::{self, Incoming, MessageReader, SessionError},
};

/// How long the streams of a subscription that ended may take to be delivered before PUBLISH_DONE.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(30);
/// How often a subscription that ended looks whether its datagrams have left.
const DATAGRAM_LOOKS: Duration = Duration::from_millis(10);
/// How long streams of the last group may be behind the first object past it.
const LATE_STREAMS: Duration = Duration::from_secs(2);

/// What a message of the subscriber leads to.
enum Step {
    GoOn,
    /// FIN: the subscriber has nothing more to ask for.
    ReadAll,
    /// How the subscription ended; `None`: the subscriber left.
    End(Option<Ended>),
}

impl Entry {
    /// Until the subscription ended and its streams did (how it ended), or the subscriber left (`None`).
    pub(super) async fn follow(
        &self,
        send: &mut SendStream,
        reader: &mut MessageReader,
        rights: Option<&Arc<Rights>>,
    ) -> Result<Option<Ended>, SessionError> {
        let subscription = self.subscription();
        let mut stopped = std::pin::pin!(send.stopped());
        let is_adaptive = !self.context().hub().adaptive.is_off();
        let mut adapting = is_adaptive.then(|| Box::pin(self.adapt(rights)));
        let mut reading = true;
        let (mut deadline, mut past_end) = (None, None);
        loop {
            if let Some(ended) = subscription.drained() {
                return Ok(Some(ended));
            }
            if deadline.is_none() && subscription.ended().is_some() {
                deadline = Some(Clock::now() + DRAIN_TIMEOUT);
            }
            if past_end.is_none() && subscription.is_past_end() {
                past_end = Some(Clock::now() + LATE_STREAMS);
            }
            tokio::select! {
                incoming = reader.next(), if reading => match self.on_message(incoming?, send).await? {
                    Step::GoOn => {}
                    Step::ReadAll => reading = false,
                    Step::End(ended) => return Ok(ended),
                },
                _ = &mut stopped => return Ok(None),
                () = subscription.changed.notified() => {}
                () = wait(&mut adapting), if adapting.is_some() => adapting = None,
                () = sleep(DATAGRAM_LOOKS), if subscription.ended().is_some() => {}
                () = sleep_until(past_end), if subscription.is_past_end() => {
                    past_end = None;
                    if subscription.stays_past_end() {
                        let reason = "the last group asked for is over";
                        subscription.end(Ended::new(code::Done::SUBSCRIPTION_ENDED, reason));
                    }
                }
                () = sleep_until(deadline) => {
                    subscription.cancel(code::Reset::TOO_FAR_BEHIND);
                    return Ok(subscription.ended());
                }
            }
        }
    }

    async fn on_message(&self, incoming: Incoming, send: &mut SendStream) -> Result<Step, SessionError> {
        match incoming {
            Incoming::Message(Message::RequestUpdate(update)) => match self.update(update)? {
                Ok(ok) => wire::send(send, ok).await.map(|()| Step::GoOn),
                Err(refused) => {
                    wire::send(send, refused).await?;
                    Ok(Step::End(Some(Ended::new(code::Done::UPDATE_FAILED, "REQUEST_UPDATE failed"))))
                }
            },
            // Not a reset: those who still say this take it for a failure of the session.
            Incoming::Message(Message::Unsubscribe(_)) => {
                Ok(Step::End(Some(Ended::new(code::Done::SUBSCRIPTION_ENDED, "unsubscribed"))))
            }
            Incoming::Message(message) => {
                Err(SessionError::violation(format!("{} in a subscription", message.name())))
            }
            // What was agreed stays; the peer moves its own requests.
            Incoming::GoAway(_) => Ok(Step::GoOn),
            Incoming::Finished => Ok(Step::ReadAll),
            Incoming::Reset => Ok(Step::End(None)),
        }
    }

    /// Applies REQUEST_UPDATE to the subscription; the answer is REQUEST_OK or REQUEST_ERROR.
    fn update(&self, update: RequestUpdate) -> Result<Result<RequestOk, RequestError>, SessionError> {
        let mut parameters = update.parameters.clone();
        parameters.filter = self.context().dialect().filter(parameters.filter);
        self.context().check_request_id(&update.into())?;
        let largest = self.track().data.largest();
        if let Err(error) = self.apply(&parameters, largest) {
            return Ok(Err(RequestError::new(code::Request::INVALID_RANGE, error.to_string())));
        }
        let assignment = parameters.assignment.as_ref();
        if let Err(refused) = self.family.check(assignment)?.and_then(|()| self.assign(assignment)) {
            return Ok(Err(refused));
        }
        if let Some(group) = parameters.new_group_request {
            self.track().request_group(group);
        }
        Ok(Ok(RequestOk { parameters: self.context().dialect().largest(largest), ..RequestOk::default() }))
    }

    /// Changes the subscription as `parameters` say, and sends what that makes possible.
    pub(super) fn apply(&self, parameters: &Parameters, largest: Option<Location>) -> Result<(), OutOfRange> {
        let mut options = self.subscription().options();
        if let Some(filter) = &parameters.filter {
            options.window = Window::resolve(Some(filter), largest)?;
        }
        options.apply(parameters, &self.track().data);
        self.subscribed.change(options, largest, self.tracks());
        Ok(())
    }
}

async fn wait(work: &mut Option<impl Future<Output = ()> + Unpin>) {
    match work {
        Some(work) => work.await,
        None => std::future::pending().await,
    }
}

async fn sleep_until(deadline: Option<Clock>) {
    match deadline {
        Some(deadline) => tokio::time::sleep_until(deadline).await,
        None => std::future::pending().await,
    }
}
