//! What a session gets of the past, from the cache and from upstream: answers to FETCH, and fills of its subscriptions.

mod fill;

use std::{
    collections::HashMap,
    sync::Arc,
    time::{Duration, Instant},
};

use millrace_moq::{
    GroupOrder, Location, Message, Parameters, code, message::RequestOk, tracks::fetch::Response,
};
use millrace_quic::plane::downstream::{Asked, Event, Label, NewStream, Priority, StreamKey};
use parking_lot::Mutex;
use tokio::{
    sync::{Notify, mpsc},
    time::{Instant as Clock, sleep_until},
};
use tracing::debug;

use super::{context::Context, rights::request_error};
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
    /// `last` is the largest object that a subscriber was told of: it is owed everything up to there, arrived or not, since its
    /// subscription begins behind that.
    pub told: bool,
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
    /// is over. What cannot be sent is told by a reset. It has a right of its own: that of the request stays what it was.
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
        let own = rights.derive(Action::Fetch, resource);
        let ended = async {
            match &own {
                Ok(own) => own.ended().await,
                Err(_) => std::future::pending().await,
            }
        };
        let work = async {
            let begun = match &own {
                Ok(_) => under_way.begin().await,
                Err(refusal) => Err(request_error(*refusal)),
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
            refusal = ended => under_way.abort(refusal.reset_code()),
        }
    }

    /// Opens the stream of a response.
    pub fn open(
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
pub struct UnderWay {
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
    pub async fn fill_and_wait(&self, start: fill::Start) {
        self.fill(start).await;
        std::future::pending().await
    }

    /// The response cannot be completed.
    pub fn abort(&self, code: code::Reset) {
        self.response.abort(code.0);
        self.wake();
    }

    /// Until the response is delivered or either side gives it up.
    pub async fn until_delivered(
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
