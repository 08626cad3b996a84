//! Runs an established subscription: handles its updates, and its end.

use std::{sync::Arc, time::Duration};

use millrace_moq::{
    Location, Message, Parameters, code,
    message::{RequestError, RequestOk, RequestUpdate},
    param::Scope,
    tracks::filter::OutOfRange,
};
use tokio::time::{Instant as Clock, sleep};

use super::{SubscriptionEntry, fills::Fills};
use crate::{
    session::filters::without_range_filters,
    subscription::SubscriptionEnd,
    wire::{self, Answers, IncomingMessage, MessageReader, SessionError},
};
use millrace_access::rights::Rights;

/// How long PUBLISH_DONE waits for the streams of an ended subscription to be delivered.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(30);
/// How often an ended subscription checks whether its queued datagrams were sent.
const DATAGRAM_LOOKS: Duration = Duration::from_millis(10);
/// How long streams of the last requested group may arrive after the first object of a later group.
const LATE_STREAMS: Duration = Duration::from_secs(2);

/// The effect of a message of the subscriber on the subscription.
enum FollowStep {
    GoOn,
    /// The subscriber has sent FIN, so no further message will arrive.
    ReadAll,
    /// The subscription is over, with the reason for PUBLISH_DONE. `None`: the subscriber has cancelled it.
    End(Option<SubscriptionEnd>),
}

impl SubscriptionEntry {
    /// Runs the subscription until it has ended and its streams are delivered. Returns the reason, or `None` if the
    /// subscriber has cancelled.
    pub(super) async fn follow(
        &self,
        send: &mut Answers,
        reader: &mut MessageReader,
        rights: Option<&Arc<Rights>>,
        fills: &mut Fills,
    ) -> Result<Option<SubscriptionEnd>, SessionError> {
        let subscription = self.subscription();
        let mut stopped = std::pin::pin!(send.stopped());
        let is_adaptive = !self.context().hub().adaptive.is_off();
        let mut adapting = is_adaptive.then(|| Box::pin(self.adapt(rights)));
        let mut reading = true;
        let ends_with_its_filter = self.context().draft().ends_with_its_filter();
        let mut deadline = None;
        let mut past_end = None;
        // Each iteration first checks whether the subscription has reached its end, since any of the events below may
        // cause it.
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
                // Messages are rare, so the state of handling one has a future of its own.
                incoming = reader.next(), if reading => match Box::pin(self.on_message(incoming?, send, fills)).await? {
                    FollowStep::GoOn => {}
                    FollowStep::ReadAll => reading = false,
                    FollowStep::End(ended) => return Ok(ended),
                },
                _ = &mut stopped => return Ok(None),
                () = subscription.changed.notified() => {}
                () = wait(&mut adapting), if adapting.is_some() => adapting = None,
                () = sleep(DATAGRAM_LOOKS), if subscription.ended().is_some() => {}
                () = fills.delivered(), if !fills.are_delivered() => {}
                () = sleep_until(past_end), if past_end.is_some() && subscription.is_past_end() => {
                    past_end = None;
                    // A single object of a later group may have been an error. The subscription ends only if the track
                    // is still past the last requested group.
                    if subscription.stays_past_end() {
                        let reason = "the last group asked for is over";
                        subscription.end(SubscriptionEnd::new(code::Done::SUBSCRIPTION_ENDED, reason));
                    }
                }
                // A subscriber that does not acknowledge the last streams in time does not get the rest of them.
                () = sleep_until(deadline) => {
                    subscription.cancel(code::Reset::TOO_FAR_BEHIND);
                    return Ok(subscription.ended());
                }
            }
        }
    }

    async fn on_message(
        &self,
        incoming: IncomingMessage,
        send: &mut Answers,
        fills: &mut Fills,
    ) -> Result<FollowStep, SessionError> {
        match incoming {
            IncomingMessage::Message(Message::RequestUpdate(update)) => match self.update(update, fills)? {
                Ok(ok) => wire::send(send, ok).await.map(|()| FollowStep::GoOn),
                Err(refused) => {
                    wire::send(send, refused).await?;
                    Ok(FollowStep::End(Some(SubscriptionEnd::new(
                        code::Done::UPDATE_FAILED,
                        "REQUEST_UPDATE failed",
                    ))))
                }
            },
            // UNSUBSCRIBE is answered with PUBLISH_DONE: peers that still send it treat a reset as a failure of the
            // session.
            IncomingMessage::Message(Message::Unsubscribe(_)) => Ok(FollowStep::End(Some(
                SubscriptionEnd::new(code::Done::SUBSCRIPTION_ENDED, "unsubscribed"),
            ))),
            IncomingMessage::Message(message) => Err(SessionError::misplaced(&message, "in a subscription")),
            // GOAWAY on the stream of the subscriber's request has no effect here: the peer sends the request again in
            // another session.
            IncomingMessage::GoAway(_) => Ok(FollowStep::GoOn),
            IncomingMessage::Finished => Ok(FollowStep::ReadAll),
            IncomingMessage::Reset => Ok(FollowStep::End(None)),
        }
    }

    /// Applies REQUEST_UPDATE to the subscription, and returns the answer.
    fn update(
        &self,
        update: RequestUpdate,
        fills: &mut Fills,
    ) -> Result<Result<RequestOk, RequestError>, SessionError> {
        let request_id = update.request_id;
        let mut parameters = update.parameters.clone();
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

    /// Changes the subscription as `parameters` say, and sends cached objects that are now in its range.
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
