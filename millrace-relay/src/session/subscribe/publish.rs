//! PUBLISH to a subscriber that asked for such tracks: a subscription that we begin.

use std::sync::Arc;

use millrace_proto::{
    moq::{Message, Parameters, message::Publish},
    relay::filter::Window,
};
use tokio::time::timeout;

use super::{Entry, Subscriptions};
use crate::{
    live::LiveTrack,
    subscription::Options,
    wire::{self, Incoming, RequestStream, SessionError},
};

impl Subscriptions {
    /// Publishes `track` to the peer until either side ends it.
    pub async fn publish(
        self: &Arc<Self>,
        track: Arc<LiveTrack>,
        forward: bool,
        mut stream: RequestStream,
    ) -> Result<(), SessionError> {
        let request_id = self.context.next_request_id();
        let largest = track.data.largest();
        let window = Window::resolve(None, largest).unwrap_or_default();
        let options = Options { forward, ..Options::new(&Parameters::default(), window, &track.data) };
        let properties = track.data.properties();
        let entry = self.add(request_id, track, options, largest);
        let publish = Publish {
            request_id,
            track: entry.track().name().clone(),
            track_alias: entry.subscription().alias,
            parameters: Parameters { forward: Some(forward), ..self.context.dialect().largest(largest) },
            properties,
        };
        let Some(parameters) = entry.offer(publish, &mut stream).await? else { return Ok(()) };
        let assignment = parameters.assignment.as_ref();
        let assigned = self.check(assignment)?.and_then(|()| entry.assign(assignment));
        if assigned.is_err() || entry.apply(&parameters, entry.track().data.largest()).is_err() {
            return Ok(());
        }
        entry.run(None, stream, None).await
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
