//! A subscription under way: its updates and its end.

use std::{sync::Arc, time::Duration};

use millrace_moq::{
    Location, Message, Parameters, code,
    message::{RequestError, RequestOk, RequestUpdate},
    param::Scope,
    tracks::filter::OutOfRange,
};
use tokio::time::{Instant as Clock, sleep};

use super::{Entry, fills::Fills};
use crate::{
    access::rights::Rights,
    session::filters::without_range_filters,
    subscription::Ended,
    wire::{self, Answers, Incoming, MessageReader, SessionError},
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
        send: &mut Answers,
        reader: &mut MessageReader,
        rights: Option<&Arc<Rights>>,
        fills: &mut Fills,
    ) -> Result<Option<Ended>, SessionError> {
        let subscription = self.subscription();
        let mut stopped = std::pin::pin!(send.stopped());
        let is_adaptive = !self.context().hub().adaptive.is_off();
        let mut adapting = is_adaptive.then(|| Box::pin(self.adapt(rights)));
        let mut reading = true;
        let ends_with_its_filter = self.context().draft().ends_with_its_filter();
        let (mut deadline, mut past_end) = (None, None);
        loop {
            if let Some(ended) = subscription.drained().filter(|_| fills.are_delivered()) {
                return Ok(Some(ended));
            }
            if deadline.is_none() && subscription.ended().is_some() {
                deadline = Some(Clock::now() + DRAIN_TIMEOUT);
            }
            if past_end.is_none() && ends_with_its_filter && subscription.is_past_end() {
                past_end = Some(Clock::now() + LATE_STREAMS);
            }
            tokio::select! {
                incoming = reader.next(), if reading => match self.on_message(incoming?, send, fills).await? {
                    Step::GoOn => {}
                    Step::ReadAll => reading = false,
                    Step::End(ended) => return Ok(ended),
                },
                _ = &mut stopped => return Ok(None),
                () = subscription.changed.notified() => {}
                () = wait(&mut adapting), if adapting.is_some() => adapting = None,
                () = sleep(DATAGRAM_LOOKS), if subscription.ended().is_some() => {}
                () = fills.delivered(), if !fills.are_delivered() => {}
                () = sleep_until(past_end), if past_end.is_some() && subscription.is_past_end() => {
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

    async fn on_message(
        &self,
        incoming: Incoming,
        send: &mut Answers,
        fills: &mut Fills,
    ) -> Result<Step, SessionError> {
        match incoming {
            Incoming::Message(Message::RequestUpdate(update)) => match self.update(update, fills)? {
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
    fn update(
        &self,
        update: RequestUpdate,
        fills: &mut Fills,
    ) -> Result<Result<RequestOk, RequestError>, SessionError> {
        let (request_id, mut parameters) = (update.request_id, update.parameters.clone());
        parameters.check(self.context().draft(), Scope::UPDATE_SUBSCRIPTION)?;
        parameters.filter = self.context().dialect().filter(parameters.filter);
        self.context().check_request_id(&update.into())?;
        if let Err(refused) = without_range_filters(&parameters) {
            return Ok(Err(refused));
        }
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
        if let Err(refused) = fills.begin(request_id, &parameters, &self.subscribed, largest) {
            return Ok(Err(refused));
        }
        Ok(Ok(RequestOk { parameters: self.context().dialect().largest(largest), ..RequestOk::default() }))
    }

    /// Changes the subscription as `parameters` say, and sends what that makes possible.
    pub(super) fn apply(&self, parameters: &Parameters, largest: Option<Location>) -> Result<(), OutOfRange> {
        let mut options = self.subscription().options();
        if parameters.filter.is_some() {
            options.window = self.family.window(parameters, largest)?;
        }
        options.apply(parameters);
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
