//! FETCH: objects of the past, from the cache and from upstream.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use millrace_proto::{
    moq::{
        GroupOrder, Location, Message, Parameters, code,
        message::{Fetch, FetchKind, FetchOk, RequestError, RequestOk},
    },
    plane::downstream::{Event, Label, NewStream, Priority, StreamKey},
    relay::fetch::{Entry, Plan, Response, plan},
};
use quinn::SendStream;
use tokio::{
    sync::mpsc,
    time::{Instant as Clock, timeout_at},
};
use tracing::debug;

use super::{
    Owner, Session,
    asks::{after, before, fetched},
};
use crate::{
    live::LiveTrack,
    wire::{self, Incoming, MessageReader, SessionError},
};

/// The longest that a FETCH waits for objects of the cache that are still arriving.
const ARRIVAL_TIMEOUT: Duration = Duration::from_secs(2);

/// The longest that it waits for objects that may be on the way.
const GAP_TIMEOUT: Duration = Duration::from_millis(300);

/// A FETCH with its range resolved.
struct Range {
    track: Arc<LiveTrack>,
    first: Location,
    last: Location,
    order: GroupOrder,
    /// Until when upstream may be waited for.
    deadline: Clock,
}

impl Session {
    pub(super) async fn serve_fetch(
        self: &Arc<Self>,
        fetch: Fetch,
        mut send: SendStream,
        mut reader: MessageReader,
    ) -> Result<(), SessionError> {
        let Fetch { request_id, kind, parameters } = fetch;
        let range = match self.resolve(kind, &parameters) {
            Ok(range) => range,
            Err(error) => return self.refuse_with(send, error).await,
        };
        let response = Arc::new(Response::new(request_id, range.order));
        let (owner, mut events) = self.add_response();
        let priority = Priority {
            subscriber: parameters.subscriber_priority.unwrap_or(128),
            publisher: range.track.data.default_priority(),
            ..Priority::default()
        };
        let key = self.open_response(&response, owner, priority, &range);
        let mut stopped = std::pin::pin!(send.stopped());
        let filled = tokio::select! {
            filled = self.fill(&range, &response, key) => filled,
            _ = &mut stopped => Err(RequestError::new(code::Request::INTERNAL_ERROR, "cancelled")),
        };
        let result = match filled {
            Ok(ok) => match wire::send(&mut send, ok).await {
                Ok(()) => self.until_fetched(key, priority, &mut events, &mut send, &mut reader).await,
                Err(lost) => Err(lost),
            },
            Err(refused) => {
                response.abort(code::Reset::INTERNAL_ERROR.0);
                self.wake(key);
                self.remove_response(owner, key);
                return self.refuse_with(send, refused).await;
            }
        };
        self.remove_response(owner, key);
        let _ = send.finish(); // stopped by the subscriber
        match result {
            Err(SessionError::Lost(reason)) => {
                debug!(session = self.id(), request_id, reason, "FETCH cancelled");
                Ok(())
            }
            other => other,
        }
    }

    fn resolve(&self, kind: FetchKind, parameters: &Parameters) -> Result<Range, RequestError> {
        let refuse = |code, reason: &str| Err(RequestError::new(code, reason));
        let order = parameters.group_order.unwrap_or_default();
        let limit = self.hub.limits.request_timeout;
        let fill = parameters.fill_timeout.map_or(limit, |fill| Duration::from_millis(fill).min(limit));
        let deadline = Clock::now() + fill;
        let (subscription, back) = match kind {
            FetchKind::Standalone { track, start, end } => {
                let last = before(end);
                if last < start {
                    return refuse(code::Request::INVALID_RANGE, "the range ends before it begins");
                }
                self.hub.check_known(&track, self)?;
                let track = self.hub.track(&track, Instant::now())?;
                return Ok(Range { track, first: start, last, order, deadline });
            }
            FetchKind::RelativeJoining { subscription, groups_back } => (subscription, Ok(groups_back)),
            FetchKind::AbsoluteJoining { subscription, first_group } => (subscription, Err(first_group)),
        };
        let Some(subscription) = self.state.lock().subscriptions.get(&subscription).cloned() else {
            return refuse(code::Request::INVALID_JOINING_REQUEST_ID, "no such subscription");
        };
        let Some(last) = subscription.joining() else {
            return refuse(code::Request::INVALID_RANGE, "nothing was published before the subscription");
        };
        let group = match back {
            Ok(back) => last.group.saturating_sub(back),
            Err(first_group) => first_group,
        };
        if group > last.group {
            return refuse(code::Request::INVALID_RANGE, "the range begins behind the subscription's start");
        }
        let first = Location { group, object: 0 };
        Ok(Range { track: Arc::clone(&subscription.track), first, last, order, deadline })
    }

    fn add_response(&self) -> (u64, mpsc::UnboundedReceiver<Event>) {
        let (sender, events) = mpsc::unbounded_channel();
        let owner = self.next_owner();
        self.state.lock().owners.insert(owner, Owner::Response(sender));
        (owner, events)
    }

    fn remove_response(&self, owner: u64, key: StreamKey) {
        self.connection.downstream().reset(key, code::Reset::CANCELLED.0); // no-op once it is over
        self.connection.transmit_now();
        self.connection.downstream().forget_owner(owner);
        self.state.lock().owners.remove(&owner);
    }

    fn open_response(
        &self,
        response: &Arc<Response>,
        owner: u64,
        priority: Priority,
        range: &Range,
    ) -> StreamKey {
        let label = Label { track: range.track.number, group: range.first.group };
        let source = Arc::clone(response) as _;
        let stream =
            NewStream { source, priority, object_timeout: None, subgroup_timeout: None, owner, label };
        self.connection.downstream().open(stream)
    }

    /// The response has grown or ended.
    fn wake(&self, key: StreamKey) {
        self.connection.downstream().wake(key);
        self.connection.transmit_now();
    }

    /// Puts the objects of the range into the response, from the cache and from upstream.
    async fn fill(
        self: &Arc<Self>,
        range: &Range,
        response: &Arc<Response>,
        key: StreamKey,
    ) -> Result<FetchOk, RequestError> {
        let track = &range.track;
        let largest = match track.data.largest() {
            Some(largest) => largest,
            None => return self.fill_from_upstream(range, response, key).await,
        };
        if range.first > largest {
            let reason = "the range begins behind the largest object";
            return Err(RequestError::new(code::Request::INVALID_RANGE, reason));
        }
        let last = range.last.min(largest);
        let (held_from, objects) = self.cached(range, last).await?;
        let ascending = range.order == GroupOrder::Ascending;
        if !ascending {
            objects.iter().cloned().for_each(|object| response.push(object));
            self.wake(key);
        }
        if held_from > range.first {
            let missing = (range.first, last.min(location_before(held_from)));
            self.fill_gap(range, missing, response, key).await;
        }
        if ascending {
            objects.into_iter().for_each(|object| response.push(object));
        }
        response.finish(Instant::now());
        self.wake(key);
        let end = if last == range.last { after(range.last) } else { after(last) };
        let end_of_track = track.data.end().is_some_and(|end| location_before(end) <= last);
        Ok(FetchOk {
            end_of_track,
            end,
            parameters: Parameters::default(),
            properties: track.data.properties(),
        })
    }

    /// The objects of the range that the cache holds, once those that are arriving have arrived.
    async fn cached(&self, range: &Range, last: Location) -> Result<(Location, Vec<Entry>), RequestError> {
        let began = Clock::now();
        loop {
            let progress = range.track.progress.notified();
            let deadline = match plan(&range.track.data, range.first, last, range.order, Instant::now()) {
                Plan::Ready { held_from, objects } => return Ok((held_from, objects)),
                // Subgroups of lower priority come later; but not every ID needs to exist.
                Plan::Gaps { held_from, objects } if began.elapsed() >= GAP_TIMEOUT => {
                    return Ok((held_from, objects));
                }
                Plan::Gaps { .. } => {
                    let _ = timeout_at(began + GAP_TIMEOUT, progress).await; // then without what is missing
                    continue;
                }
                Plan::Unfinished => began + ARRIVAL_TIMEOUT,
            };
            if timeout_at(deadline, progress).await.is_err() {
                let reason = "the last objects of the range did not arrive in time";
                return Err(RequestError::new(code::Request::TIMEOUT, reason));
            }
        }
    }

    /// Fills what the cache does not hold from a publisher, or says that its status is unknown.
    async fn fill_gap(
        self: &Arc<Self>,
        range: &Range,
        missing: (Location, Location),
        response: &Arc<Response>,
        key: StreamKey,
    ) {
        if let Err(refused) = self.fetch_from_publishers(range, missing, response, key).await {
            debug!(session = self.id(), track = %range.track.name(), reason = refused.reason, "FETCH gap");
            response.push_unknown(missing.1);
        }
    }

    /// The whole range from upstream, for a track of which nothing is here.
    async fn fill_from_upstream(
        self: &Arc<Self>,
        range: &Range,
        response: &Arc<Response>,
        key: StreamKey,
    ) -> Result<FetchOk, RequestError> {
        let ok = self.fetch_from_publishers(range, (range.first, range.last), response, key).await?;
        response.finish(Instant::now());
        self.wake(key);
        Ok(ok)
    }

    async fn fetch_from_publishers(
        self: &Arc<Self>,
        range: &Range,
        missing: (Location, Location),
        response: &Arc<Response>,
        key: StreamKey,
    ) -> Result<FetchOk, RequestError> {
        let name = range.track.name();
        let mut refused = RequestError::new(code::Request::DOES_NOT_EXIST, "nobody publishes this track");
        for publisher in self.hub.publishers_of(name.namespace(), self) {
            let each = |item, payload| {
                response.push(fetched(item, payload));
                self.wake(key);
            };
            let fetch = publisher.fetch_upstream(name.clone(), missing, range.order, each);
            match timeout_at(range.deadline, fetch).await {
                Ok(Ok(ok)) => return Ok(ok),
                Ok(Err(error)) => refused = error,
                Err(_) => refused = RequestError::new(code::Request::TIMEOUT, "upstream took too long"),
            }
        }
        Err(refused)
    }

    /// Until the response is delivered or either side gives it up.
    async fn until_fetched(
        &self,
        key: StreamKey,
        mut priority: Priority,
        events: &mut mpsc::UnboundedReceiver<Event>,
        send: &mut SendStream,
        reader: &mut MessageReader,
    ) -> Result<(), SessionError> {
        let mut reading = true;
        let mut stopped = std::pin::pin!(send.stopped());
        loop {
            tokio::select! {
                event = events.recv() => match event {
                    Some(event) if !event.kind.is_end() => {}
                    _ => return Ok(()),
                },
                incoming = reader.next(), if reading => match incoming? {
                    Incoming::Message(Message::RequestUpdate(update)) => {
                        let subscriber = update.parameters.subscriber_priority;
                        self.check_request_id(&update.into())?;
                        priority.subscriber = subscriber.unwrap_or(priority.subscriber);
                        self.connection.downstream().set_priority(key, priority);
                        wire::send(send, RequestOk::default()).await?;
                    }
                    Incoming::Message(message) => {
                        return Err(SessionError::violation(format!("{} after FETCH", message.name())));
                    }
                    Incoming::Finished => reading = false,
                    Incoming::Reset => return Ok(()),
                },
                _ = &mut stopped => return Ok(()),
            }
        }
    }
}

/// The last location that is smaller than `location`.
fn location_before(location: Location) -> Location {
    match location.object.checked_sub(1) {
        Some(object) => Location { object, ..location },
        None => Location { group: location.group.saturating_sub(1), object: u64::MAX },
    }
}
