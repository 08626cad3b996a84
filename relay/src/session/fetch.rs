//! FETCH requests of a peer: finds their range, and sends their response.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use millrace_moq::{
    Filter, Location, Parameters, Properties, TrackName, code,
    message::{FetchKind, FetchOk, FetchRequest, RequestError},
    property::DEFAULT_PRIORITY,
};
use tracing::debug;

use super::{
    context::SessionContext,
    responses::{ResponseRange, Responses},
    rights::request_error,
    subscribe::Subscriptions,
};
use crate::{
    live::LiveTrack,
    wire::{self, RequestStream, SessionError},
};
use millrace_access::{
    grant::{Action, Resource},
    rights::Rights,
};

/// The FETCH requests of one session.
pub struct Fetches {
    context: Arc<SessionContext>,
    /// The session's subscriptions, which a joining FETCH may refer to.
    subscriptions: Arc<Subscriptions>,
    pub responses: Arc<Responses>,
}

impl Fetches {
    pub fn new(
        context: Arc<SessionContext>,
        subscriptions: Arc<Subscriptions>,
        responses: Arc<Responses>,
    ) -> Arc<Self> {
        Arc::new(Self { context, subscriptions, responses })
    }

    /// Serves a FETCH until its response is delivered or cancelled.
    pub async fn serve(
        self: &Arc<Self>,
        fetch: FetchRequest,
        mut stream: RequestStream,
        rights: &Rights,
    ) -> Result<(), SessionError> {
        let FetchRequest { request_id, kind, parameters } = fetch;
        let range = match self.resolve(kind, &parameters, rights).await {
            Ok(range) => range,
            Err(error) => return self.context.refuse(stream.send, error).await,
        };
        // The notification is requested before the response begins, so that a track that is found malformed meanwhile
        // ends the response.
        let mut failures = range.track.failures();
        let subscriber = parameters.subscriber_priority.unwrap_or(DEFAULT_PRIORITY);
        let (under_way, mut events) = self.responses.open(request_id, range, subscriber);
        let begun = tokio::select! {
            begun = under_way.begin() => begun,
            _ = stream.send.stopped() => Err(RequestError::new(code::Request::INTERNAL_ERROR, "cancelled")),
        };
        let (ok, start) = match begun {
            Ok((ok, start)) if parameters.include_properties == Some(false) => {
                (FetchOk { properties: Properties::default(), ..ok }, start)
            }
            Ok(begun) => begun,
            Err(refused) => {
                under_way.abort(code::Reset::INTERNAL_ERROR);
                return self.context.refuse(stream.send, refused).await;
            }
        };
        let result = match wire::send(&mut stream.send, ok).await {
            Ok(()) => tokio::select! {
                delivered = under_way.until_delivered(&mut events, &mut stream) => delivered,
                () = under_way.fill_and_wait(start) => Ok(()),
                _ = failures.changed() => {
                    under_way.abort(code::Reset::MALFORMED_TRACK);
                    Ok(())
                }
            },
            Err(lost) => Err(lost),
        };
        drop(under_way);
        let _ = stream.send.finish(); // An error means that the subscriber has stopped the stream, which needs no reaction.
        match result {
            Err(SessionError::Lost(reason)) => {
                debug!(
                    session = self.context.id(),
                    request_id, reason, "a FETCH was cancelled by its subscriber"
                );
                Ok(())
            }
            other => other,
        }
    }

    async fn resolve(
        &self,
        kind: FetchKind,
        parameters: &Parameters,
        rights: &Rights,
    ) -> Result<ResponseRange, RequestError> {
        let order = parameters.group_order.unwrap_or_default();
        let fill = self.responses.patience(parameters);
        let (subscription, back) = match kind {
            FetchKind::Standalone { track, range } => {
                let (track, first, last) = self.locate(&track, &range).await?;
                return Ok(ResponseRange { track, first, last, told: false, order, fill });
            }
            FetchKind::RelativeJoining { subscription, groups_back } => (subscription, Ok(groups_back)),
            FetchKind::AbsoluteJoining { subscription, first_group } => (subscription, Err(first_group)),
        };
        let (track, first, last) = self.join(subscription, back).await?;
        // A joining FETCH names a subscription, so its track is known only now.
        rights.ask(Action::Fetch, Resource::track(track.name())).map_err(request_error)?;
        Ok(ResponseRange { track, first, last, told: true, order, fill })
    }

    /// Returns the track and the range of objects that a standalone FETCH asks for.
    async fn locate(
        &self,
        name: &TrackName,
        range: &Filter,
    ) -> Result<(Arc<LiveTrack>, Location, Location), RequestError> {
        let hub = self.context.hub();
        let requester = self.context.requester();
        if let (true, Some(last)) = (range.is_absolute(), range.end()) {
            let first = range.start(None);
            if last < first {
                let reason = "the range ends before it begins";
                return Err(RequestError::new(code::Request::INVALID_RANGE, reason));
            }
            hub.find(name, requester).await?;
            return Ok((hub.track(name, Instant::now())?, first, last));
        }
        // The end of this range depends on the track's largest location, so a publisher has to name that location
        // first.
        let track = hub.established(name, requester, Duration::ZERO, None).await?;
        let Some(largest) = track.data.largest() else {
            return Err(RequestError::new(code::Request::INVALID_RANGE, "nothing has been published yet"));
        };
        Ok((track, range.start(Some(largest)), largest))
    }

    /// Returns the track and the range of a joining FETCH. `from` is the number of groups before the subscription's
    /// start (`Ok`), or the ID of the first group (`Err`).
    async fn join(
        &self,
        request_id: u64,
        from: Result<u64, u64>,
    ) -> Result<(Arc<LiveTrack>, Location, Location), RequestError> {
        let refuse = |code, reason: &str| Err(RequestError::new(code, reason));
        let Some(subscribed) = self.subscriptions.wait(request_id).await else {
            return refuse(code::Request::INVALID_JOINING_REQUEST_ID, "no such subscription");
        };
        let Some(last) = subscribed.subscription.joining() else {
            return refuse(code::Request::INVALID_RANGE, "nothing was published before the subscription");
        };
        // A relative joining FETCH counts groups back from the largest one at the start of the subscription.
        let group = match from {
            Ok(back) => last.group.saturating_sub(back),
            Err(first_group) => first_group,
        };
        if group > last.group {
            return refuse(code::Request::INVALID_RANGE, "the range begins behind the subscription's start");
        }
        Ok((subscribed.track, Location { group, object: 0 }, last))
    }
}
