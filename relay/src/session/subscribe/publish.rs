//! Sends PUBLISH to a subscriber that has asked for tracks below a prefix (SUBSCRIBE_TRACKS).

use std::sync::Arc;

use millrace_moq::{Draft, Message, Parameters, message::Publish, tracks::filter::LocationWindow};
use tokio::time::timeout;

use super::{SubscriptionEntry, Subscriptions, fills::Fills, parts::TrackPart};
use crate::{
    live::LiveTrack,
    subscription::SubscriptionOptions,
    wire::{self, IncomingMessage, RequestStream, SessionError},
};
use millrace_access::rights::Rights;

impl Subscriptions {
    /// Publishes `track` to the peer until either side ends the subscription. `part` counts the subscription against
    /// the session's limit for the track. `asked` are the parameters of SUBSCRIBE_TRACKS, with which the subscription
    /// begins.
    pub async fn publish(
        self: &Arc<Self>,
        track: Arc<LiveTrack>,
        part: TrackPart,
        asked: &Parameters,
        mut stream: RequestStream,
        rights: &Arc<Rights>,
    ) -> Result<(), SessionError> {
        let request_id = self.context.next_request_id();
        // The subscription's range (`window`) and PUBLISH use the same largest location, even if further objects arrive
        // meanwhile.
        let largest = track.data.largest();
        let window = LocationWindow::resolve(asked.filter.as_ref(), largest);
        let options = SubscriptionOptions::new(asked, window, &track.data);
        let properties = track.data.properties_for(asked);
        let entry = self.add(request_id, track, Arc::new(part), options, largest);
        let publish = Publish {
            request_id,
            track: entry.track().name().clone(),
            track_alias: entry.subscription().alias,
            parameters: Parameters {
                largest_object: self.context.dialect().largest(largest).largest_object,
                ..publish_parameters(self.context.draft(), asked)
            },
            properties,
        };
        let Some(parameters) = entry.offer(publish, &mut stream).await? else { return Ok(()) };
        let assignment = parameters.assignment.as_ref();
        let assigned = self.check(assignment)?.and_then(|()| entry.assign(assignment));
        // There is no message that refuses the subscriber's answer, so the subscription ends if its options are
        // invalid.
        if assigned.is_err() || entry.apply(&parameters, entry.track().data.largest()).is_err() {
            return Ok(());
        }
        let mut fills = Fills::new(Arc::clone(&self.responses), rights);
        if fills.begin(request_id, asked, &entry.subscribed, largest).is_err() {
            return Ok(());
        }
        entry.run(stream, None, fills).await
    }
}

/// Returns the parameters of PUBLISH for a subscription that begins with `asked`. Before draft-20, PUBLISH contains
/// only FORWARD, and the subscriber sends filter, order, priority and timeouts in its answer.
fn publish_parameters(draft: Draft, asked: &Parameters) -> Parameters {
    let forward = Some(asked.forward.unwrap_or(true));
    if draft.accepts_with_parameters() {
        return Parameters { forward, ..Parameters::default() };
    }
    Parameters {
        forward,
        filter: asked.filter,
        group_order: asked.group_order,
        subscriber_priority: asked.subscriber_priority,
        object_delivery_timeout: asked.object_delivery_timeout,
        subgroup_delivery_timeout: asked.subgroup_delivery_timeout,
        ..Parameters::default()
    }
}

impl SubscriptionEntry {
    /// Sends PUBLISH. Returns the parameters of the subscriber's answer, or `None` if it refuses or does not answer in
    /// time.
    async fn offer(
        &self,
        publish: Publish,
        stream: &mut RequestStream,
    ) -> Result<Option<Parameters>, SessionError> {
        wire::send(&mut stream.send, publish).await?;
        let patience = self.context().hub().limits.request_timeout;
        match timeout(patience, stream.reader.next()).await {
            Ok(Ok(IncomingMessage::Message(Message::RequestOk(ok)))) => Ok(Some(ok.parameters)),
            Ok(Ok(IncomingMessage::Message(Message::RequestError(_)))) => Ok(None),
            Ok(Ok(IncomingMessage::Message(other))) => {
                Err(SessionError::misplaced(&other, "answers PUBLISH"))
            }
            // A subscriber that closes the stream or does not answer does not want the track.
            Ok(Ok(IncomingMessage::GoAway(_) | IncomingMessage::Finished | IncomingMessage::Reset))
            | Ok(Err(SessionError::Lost(_)))
            | Err(_) => Ok(None),
            Ok(Err(violation)) => Err(violation),
        }
    }
}
