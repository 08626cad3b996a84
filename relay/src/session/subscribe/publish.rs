//! PUBLISH to a subscriber that asked for such tracks: a subscription that we begin.

use std::sync::Arc;

use millrace_moq::{Draft, Message, Parameters, message::Publish, tracks::filter::Window};
use tokio::time::timeout;

use super::{Entry, Subscriptions, fills::Fills, parts::Part};
use crate::{
    access::rights::Rights,
    live::LiveTrack,
    subscription::Options,
    wire::{self, Incoming, RequestStream, SessionError},
};

impl Subscriptions {
    /// Publishes `track`, in which the peer has this part, until either side ends it. `asked` is of its SUBSCRIBE_TRACKS, and what the
    /// subscription begins with.
    pub async fn publish(
        self: &Arc<Self>,
        (track, part): (Arc<LiveTrack>, Part),
        asked: &Parameters,
        mut stream: RequestStream,
        rights: &Arc<Rights>,
    ) -> Result<(), SessionError> {
        let request_id = self.context.next_request_id();
        let largest = track.data.largest();
        let window = Window::resolve(asked.filter.as_ref(), largest);
        let options = Options::new(asked, window, &track.data);
        let properties = track.data.properties_for(asked);
        let entry = self.add(request_id, (track, Arc::new(part)), options, largest);
        let publish = Publish {
            request_id,
            track: entry.track().name().clone(),
            track_alias: entry.subscription().alias,
            parameters: Parameters {
                largest_object: self.context.dialect().largest(largest).largest_object,
                ..said(self.context.draft(), asked)
            },
            properties,
        };
        let Some(parameters) = entry.offer(publish, &mut stream).await? else { return Ok(()) };
        let assignment = parameters.assignment.as_ref();
        let assigned = self.check(assignment)?.and_then(|()| entry.assign(assignment));
        if assigned.is_err() || entry.apply(&parameters, entry.track().data.largest()).is_err() {
            return Ok(());
        }
        let mut fills = Fills::new(Arc::clone(&self.responses), rights);
        if fills.begin(request_id, asked, &entry.subscribed, largest).is_err() {
            return Ok(());
        }
        entry.run(None, stream, None, fills).await
    }
}

/// What PUBLISH says of how its subscription begins. Before draft-20 the subscriber knows most of that.
fn said(draft: Draft, asked: &Parameters) -> Parameters {
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

impl Entry {
    /// What the subscriber accepts PUBLISH with; `None` if it does not, or does not answer.
    async fn offer(
        &self,
        publish: Publish,
        stream: &mut RequestStream,
    ) -> Result<Option<Parameters>, SessionError> {
        wire::send(&mut stream.send, publish).await?;
        let patience = self.context().hub().limits.request_timeout;
        match timeout(patience, stream.reader.next()).await {
            Ok(Ok(Incoming::Message(Message::RequestOk(ok)))) => Ok(Some(ok.parameters)),
            Ok(Ok(Incoming::Message(Message::RequestError(_)))) => Ok(None),
            Ok(Ok(Incoming::Message(other))) => {
                Err(SessionError::violation(format!("{} answers PUBLISH", other.name())))
            }
            Ok(Ok(Incoming::GoAway(_) | Incoming::Finished | Incoming::Reset))
            | Ok(Err(SessionError::Lost(_)))
            | Err(_) => Ok(None),
            Ok(Err(violation)) => Err(violation),
        }
    }
}
