//! FETCH of the peer, and fills of its subscriptions: objects of the past, from the cache and from upstream.

mod fill;

use std::{
    collections::HashMap,
    sync::Arc,
    time::{Duration, Instant},
};

use millrace_proto::{
    moq::{
        Filter, GroupOrder, Location, Message, Parameters, Properties, TrackName, code,
        message::{Fetch, FetchKind, FetchOk, RequestError, RequestOk},
        property::DEFAULT_PRIORITY,
    },
    plane::downstream::{Asked, Event, Label, NewStream, Priority, StreamKey},
    relay::fetch::Response,
};
use parking_lot::Mutex;
use tokio::{
    sync::{Notify, mpsc},
    time::{Instant as Clock, sleep_until},
};
use tracing::debug;

use super::{context::Context, rights::request_error, subscribe::Subscriptions};
use crate::{
    access::{
        grant::{Action, Resource},
        rights::Rights,
    },
    hub::Counters,
    live::LiveTrack,
    wire::{self, Incoming, RequestStream, SessionError},
};

/// Memory of the responses of a session that is not acknowledged, besides the cache's, bytes; and of one, which shares it with
/// the others, at least and at most.
const SESSION_LIMIT: usize = 8 << 20;
const RESPONSE_LIMIT: (usize, usize) = (16 << 10, 1 << 20);
/// How long a publisher may be silent within its answer, at least.
const MIN_PATIENCE: Duration = Duration::from_secs(1);

/// The FETCH requests of one session.
pub struct Fetches {
    context: Arc<Context>,
    /// Those that a joining FETCH joins.
    subscriptions: Arc<Subscriptions>,
    pub responses: Arc<Responses>,
}

/// What a session gets of the past: FETCH responses and fills.
pub struct Responses {
    context: Arc<Context>,
    /// By the tag of their streams in the data plane.
    under_way: Mutex<HashMap<u64, mpsc::UnboundedSender<Event>>>,
}

/// What is asked for of the past.
pub struct Range {
    pub track: Arc<LiveTrack>,
    pub first: Location,
    pub last: Location,
    pub order: GroupOrder,
    /// How long upstream may be waited for.
    pub fill: Duration,
}

impl Range {
    /// How long upstream may be silent.
    fn patience(&self) -> Duration {
        self.fill.max(MIN_PATIENCE)
    }
}

impl Fetches {
    pub fn new(
        context: Arc<Context>,
        subscriptions: Arc<Subscriptions>,
        responses: Arc<Responses>,
    ) -> Arc<Self> {
        Arc::new(Self { context, subscriptions, responses })
    }

    /// Serves FETCH until the response is delivered.
    pub async fn serve(
        self: &Arc<Self>,
        fetch: Fetch,
        mut stream: RequestStream,
        rights: &Rights,
    ) -> Result<(), SessionError> {
        let Fetch { request_id, kind, parameters } = fetch;
        let range = match self.resolve(kind, &parameters, rights).await {
            Ok(range) => range,
            Err(error) => return self.context.refuse(stream.send, error).await,
        };
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
        let _ = stream.send.finish(); // stopped by the subscriber
        match result {
            Err(SessionError::Lost(reason)) => {
                debug!(session = self.context.id(), request_id, reason, "FETCH cancelled");
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
    ) -> Result<Range, RequestError> {
        let order = parameters.group_order.unwrap_or_default();
        let fill = self.responses.patience(parameters);
        let (subscription, back) = match kind {
            FetchKind::Standalone { track, range } => {
                let (track, first, last) = self.locate(&track, &range).await?;
                return Ok(Range { track, first, last, order, fill });
            }
            FetchKind::RelativeJoining { subscription, groups_back } => (subscription, Ok(groups_back)),
            FetchKind::AbsoluteJoining { subscription, first_group } => (subscription, Err(first_group)),
        };
        let (track, first, last) = self.join(subscription, back).await?;
        rights.ask(Action::Fetch, Resource::track(track.name())).map_err(request_error)?;
        Ok(Range { track, first, last, order, fill })
    }

    /// The objects of a track that a filter lets through.
    async fn locate(
        &self,
        name: &TrackName,
        range: &Filter,
    ) -> Result<(Arc<LiveTrack>, Location, Location), RequestError> {
        let (hub, requester) = (self.context.hub(), self.context.requester());
        if let (true, Some(last)) = (range.is_absolute(), range.end()) {
            let first = range.start(None);
            if last < first {
                let reason = "the range ends before it begins";
                return Err(RequestError::new(code::Request::INVALID_RANGE, reason));
            }
            hub.check_known(name, requester)?;
            return Ok((hub.track(name, Instant::now())?, first, last));
        }
        // It goes by the largest object, which a publisher tells.
        let track = hub.established(name, requester, Duration::ZERO, None).await?;
        let Some(largest) = track.data.largest() else {
            return Err(RequestError::new(code::Request::INVALID_RANGE, "nothing has been published yet"));
        };
        Ok((track, range.start(Some(largest)), largest))
    }

    /// The range of a joining FETCH, from so many groups back (`Ok`) or from a group (`Err`) on.
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

impl Responses {
    pub fn new(context: Arc<Context>) -> Arc<Self> {
        Arc::new(Self { context, under_way: Mutex::default() })
    }

    /// How long upstream is waited for, for who asks with these parameters.
    pub fn patience(&self, parameters: &Parameters) -> Duration {
        let limit = self.context.hub().limits.request_timeout;
        parameters.fill_timeout.map_or(limit, |fill| Duration::from_millis(fill).min(limit))
    }

    /// Sends `range` on a stream of its own, in the name of the request that has asked for it beside something else; returns when that
    /// is over. What cannot be sent is told by a reset.
    pub async fn fill(self: Arc<Self>, request_id: u64, range: Range, subscriber: u8, rights: &Rights) {
        let mut failures = range.track.failures();
        let resource = Resource::track(range.track.name());
        let (under_way, mut events) = self.open(request_id, range, subscriber);
        let over = async {
            while let Some(event) = events.recv().await {
                if event.kind.is_end() {
                    return;
                }
            }
        };
        let work = async {
            let begun = match rights.ask(Action::Fetch, resource) {
                Ok(()) => under_way.begin().await,
                Err(refusal) => Err(request_error(refusal)),
            };
            match begun {
                Ok((_, start)) => under_way.fill_and_wait(start).await,
                Err(refused) => {
                    debug!(session = self.context.id(), request_id, reason = refused.reason, "fill failed");
                    // With its header, so that the subscriber knows what has failed.
                    while under_way.response.held() > 0 {
                        under_way.acknowledged.notified().await;
                    }
                    under_way.abort(code::Reset::INTERNAL_ERROR);
                    std::future::pending().await
                }
            }
        };
        tokio::select! {
            () = over => {}
            () = work => {}
            _ = failures.changed() => under_way.abort(code::Reset::MALFORMED_TRACK),
        }
    }

    /// Opens the stream of a response.
    fn open(
        self: &Arc<Self>,
        request_id: u64,
        range: Range,
        subscriber: u8,
    ) -> (UnderWay, mpsc::UnboundedReceiver<Event>) {
        let acknowledged = Arc::new(Notify::new());
        let on_acknowledged = {
            let acknowledged = Arc::clone(&acknowledged);
            move || acknowledged.notify_one()
        };
        let preamble = self.context.connection().binding().uni();
        let spoken = (self.context.draft(), range.order);
        let response = Arc::new(Response::new(&preamble, request_id, spoken, on_acknowledged));
        let (sender, events) = mpsc::unbounded_channel();
        let owner = self.context.next_owner();
        self.under_way.lock().insert(owner, sender);
        let priority =
            Priority { subscriber, publisher: range.track.data.default_priority(), ..Priority::default() };
        let stream = NewStream {
            source: Arc::clone(&response) as _,
            priority,
            object_timeout: None,
            subgroup_timeout: None,
            max_delay: None,
            asked: Asked::All,
            owner,
            label: Label { track: range.track.number, group: range.first.group },
        };
        let key = self.context.connection().downstream().open(stream);
        let family = Arc::clone(self);
        let priority = Mutex::new(priority);
        (UnderWay { family, range, response, acknowledged, key, owner, priority }, events)
    }

    /// Those that are under way.
    pub fn count(&self) -> usize {
        self.under_way.lock().len()
    }

    /// Passes on what happened to a stream of the data plane.
    pub fn on_event(&self, event: Event) {
        if let Some(response) = self.under_way.lock().get(&event.owner) {
            let _ = response.send(event); // being given up
        }
    }
}

/// A response under way; its stream is given up when this is dropped.
struct UnderWay {
    family: Arc<Responses>,
    range: Range,
    response: Arc<Response>,
    acknowledged: Arc<Notify>,
    key: StreamKey,
    owner: u64,
    priority: Mutex<Priority>,
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        let connection = self.family.context.connection();
        connection.downstream().reset(self.key, code::Reset::CANCELLED.0); // no-op once it is over
        connection.transmit_now();
        connection.downstream().forget_owner(self.owner);
        self.family.under_way.lock().remove(&self.owner);
    }
}

impl UnderWay {
    fn context(&self) -> &Context {
        &self.family.context
    }

    /// The response has grown or ended.
    fn wake(&self) {
        let connection = self.context().connection();
        connection.downstream().wake(self.key);
        connection.transmit_now();
    }

    /// Waits until the response may grow: what the subscriber has not acknowledged has a limit, and so has what its client
    /// fetches in a second.
    async fn room(&self) {
        let client = self.context().authority().client();
        while let Some(until) = client.and_then(|client| client.fetch_waits(Instant::now())) {
            Counters::count(&self.context().hub().counters.fetch_waits);
            sleep_until(until.into()).await;
        }
        let responses = self.family.count().max(1);
        let limit = (SESSION_LIMIT / responses).clamp(RESPONSE_LIMIT.0, RESPONSE_LIMIT.1);
        while self.response.held() > limit {
            self.acknowledged.notified().await;
        }
    }

    /// So many bytes of objects have been put into the response.
    fn fetched(&self, bytes: u64) {
        if let Some(client) = self.context().authority().client() {
            client.fetched(Instant::now(), bytes);
        }
    }

    /// Fills the response. It is over when it is delivered.
    async fn fill_and_wait(&self, start: fill::Start) {
        self.fill(start).await;
        std::future::pending().await
    }

    /// The response cannot be completed.
    fn abort(&self, code: code::Reset) {
        self.response.abort(code.0);
        self.wake();
    }

    /// Until the response is delivered or either side gives it up.
    async fn until_delivered(
        &self,
        events: &mut mpsc::UnboundedReceiver<Event>,
        stream: &mut RequestStream,
    ) -> Result<(), SessionError> {
        let RequestStream { send, reader } = stream;
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
                        self.context().check_request_id(&update.into())?;
                        let mut priority = *self.priority.lock();
                        priority.subscriber = subscriber.unwrap_or(priority.subscriber);
                        *self.priority.lock() = priority;
                        self.context().connection().downstream().set_priority(self.key, priority);
                        wire::send(send, RequestOk::default()).await?;
                    }
                    Incoming::Message(message) => {
                        return Err(SessionError::violation(format!("{} after FETCH", message.name())));
                    }
                    Incoming::GoAway(_) => {} // the peer's own request: it moves it
                    Incoming::Finished => reading = false,
                    Incoming::Reset => return Ok(()),
                },
                _ = &mut stopped => return Ok(()),
            }
        }
    }
}
