//! Responses with earlier objects, from the cache and from publishers: answers to FETCH, and fills of subscriptions
//! (objects from before the subscription, draft-22, "Fill Semantics").

mod fill;

use std::{
    collections::HashMap,
    sync::Arc,
    time::{Duration, Instant},
};

use millrace_moq::{
    GroupOrder, Location, Message, Parameters, code, message::RequestOk, tracks::fetch::FetchResponse,
};
use millrace_quic::plane::downstream::{AskedRange, DownstreamEvent, Label, NewStream, Priority, StreamKey};
use parking_lot::Mutex;
use tokio::{
    sync::{Notify, mpsc},
    time::{Instant as Clock, sleep_until},
};
use tracing::debug;

use super::{context::SessionContext, rights::request_error};
use crate::{
    hub::OperatorCounters,
    live::LiveTrack,
    wire::{self, IncomingMessage, RequestStream, SessionError},
};
use millrace_access::{
    grant::{Action, Resource},
    rights::Rights,
};

/// The most bytes of unacknowledged response data that a session may hold outside the cache.
const SESSION_LIMIT: usize = 8 << 20;
/// The least and the most unacknowledged bytes that one response may hold, however small or large its equal share of
/// [`SESSION_LIMIT`] is.
const RESPONSE_LIMIT: (usize, usize) = (16 << 10, 1 << 20);
/// The least time that a publisher may be silent during its FETCH response before the response is given up.
const MIN_PATIENCE: Duration = Duration::from_secs(1);

/// The FETCH responses and fills of one session.
pub struct Responses {
    context: Arc<SessionContext>,
    /// The responses under way. The key is the number (owner) that the transport repeats in its events about the
    /// response's stream.
    under_way: Mutex<HashMap<u64, mpsc::UnboundedSender<DownstreamEvent>>>,
}

/// A range of earlier objects, which a FETCH or a fill asks for.
pub struct ResponseRange {
    pub track: Arc<LiveTrack>,
    pub first: Location,
    pub last: Location,
    /// True if `last` was the largest object when the subscription began. The subscriber then needs all objects up to
    /// it, even those that have not arrived.
    pub told: bool,
    pub order: GroupOrder,
    /// How long the response may wait for publishers (FILL_TIMEOUT).
    pub fill: Duration,
}

impl ResponseRange {
    /// Returns how long a publisher may be silent while it sends a FETCH response to this relay.
    fn patience(&self) -> Duration {
        self.fill.max(MIN_PATIENCE)
    }
}

impl Responses {
    pub fn new(context: Arc<SessionContext>) -> Arc<Self> {
        Arc::new(Self { context, under_way: Mutex::default() })
    }

    /// Returns how long a request with these parameters may wait for publishers.
    pub fn patience(&self, parameters: &Parameters) -> Duration {
        let limit = self.context.hub().limits.request_timeout;
        parameters.fill_timeout.map_or(limit, |fill| Duration::from_millis(fill).min(limit))
    }

    /// Sends a subscription's fill (objects from before the subscription) on one stream, and returns when that stream
    /// is over. If the fill cannot be completed, the stream is reset. The subscriber needs the right to FETCH. If it
    /// loses this right, the fill ends, but not the subscription.
    pub async fn fill(
        self: Arc<Self>,
        request_id: u64,
        range: ResponseRange,
        subscriber: u8,
        rights: &Rights,
    ) {
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
                    debug!(
                        session = self.context.id(),
                        request_id,
                        reason = refused.reason,
                        "cannot fill a subscription with earlier objects"
                    );
                    // The stream is reset only after its header was acknowledged, so that the subscriber knows which
                    // fill has failed.
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
        range: ResponseRange,
        subscriber: u8,
    ) -> (UnderWay, mpsc::UnboundedReceiver<DownstreamEvent>) {
        let acknowledged = Arc::new(Notify::new());
        let on_acknowledged = {
            let acknowledged = Arc::clone(&acknowledged);
            move || acknowledged.notify_one()
        };
        let preamble = self.context.connection().binding().uni();
        let spoken = (self.context.draft(), range.order);
        let response =
            Arc::new(FetchResponse::new(&preamble, request_id, spoken.0, spoken.1, on_acknowledged));
        let (sender, events) = mpsc::unbounded_channel();
        let owner = self.context.next_owner();
        // The response is registered as the stream's owner before the stream is opened, so that no event of the stream
        // is lost.
        self.under_way.lock().insert(owner, sender);
        let priority =
            Priority { subscriber, publisher: range.track.data.default_priority(), ..Priority::default() };
        let stream = NewStream {
            source: Arc::clone(&response) as _,
            priority,
            // Objects that were asked for by FETCH are never dropped for being late.
            object_timeout: None,
            subgroup_timeout: None,
            max_delay: None,
            asked: AskedRange::All,
            owner,
            label: Label { track: range.track.number, group: range.first.group },
        };
        let key = self.context.connection().downstream().open(stream);
        let family = Arc::clone(self);
        let priority = Mutex::new(priority);
        (UnderWay { family, range, response, acknowledged, key, owner, priority }, events)
    }

    /// Returns how many FETCH responses and fills of the session are under way.
    pub fn count(&self) -> usize {
        self.under_way.lock().len()
    }

    /// Passes a transport event about a sent stream to the response that the stream belongs to.
    pub fn on_event(&self, event: DownstreamEvent) {
        if let Some(response) = self.under_way.lock().get(&event.owner) {
            let _ = response.send(event); // The send fails only if the response was dropped.
        }
    }
}

/// A FETCH response or fill under way. Dropping it resets its stream.
pub struct UnderWay {
    family: Arc<Responses>,
    range: ResponseRange,
    response: Arc<FetchResponse>,
    acknowledged: Arc<Notify>,
    key: StreamKey,
    owner: u64,
    priority: Mutex<Priority>,
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        let connection = self.family.context.connection();
        connection.downstream().reset(self.key, code::Reset::CANCELLED.0); // The reset has no effect if the stream is over.
        connection.transmit_now();
        connection.downstream().forget_owner(self.owner);
        self.family.under_way.lock().remove(&self.owner);
    }
}

impl UnderWay {
    fn context(&self) -> &SessionContext {
        &self.family.context
    }

    /// Sends the parts of the response that were added, as far as the connection allows.
    fn wake(&self) {
        let connection = self.context().connection();
        connection.downstream().wake(self.key);
        connection.transmit_now();
    }

    /// Waits until objects may be added to the response. Two limits apply: the unacknowledged bytes of the session, and
    /// the bytes that its client may fetch in a second.
    async fn room(&self) {
        let client = self.context().authority().client();
        while let Some(until) = client.and_then(|client| client.fetch_waits(Instant::now())) {
            OperatorCounters::count(&self.context().hub().counters.fetch_waits);
            sleep_until(until.into()).await;
        }
        // The session's limit of unacknowledged bytes is divided by the number of its responses.
        let responses = self.family.count().max(1);
        let limit = (SESSION_LIMIT / responses).clamp(RESPONSE_LIMIT.0, RESPONSE_LIMIT.1);
        while self.response.held() > limit {
            self.acknowledged.notified().await;
        }
    }

    /// Counts bytes that were added to the response against the client's fetch rate.
    fn fetched(&self, bytes: u64) {
        if let Some(client) = self.context().authority().client() {
            client.fetched(Instant::now(), bytes);
        }
    }

    /// Fills the response. This future never completes: the caller drops it when an event reports the end of the
    /// response's stream.
    pub async fn fill_and_wait(&self, start: fill::FillStart) {
        self.fill(start).await;
        std::future::pending().await
    }

    /// Resets the response's stream, because the response cannot be completed.
    pub fn abort(&self, code: code::Reset) {
        self.response.abort(code.0);
        self.wake();
    }

    /// Waits until the subscriber has received the response, or either side has cancelled it.
    pub async fn until_delivered(
        &self,
        events: &mut mpsc::UnboundedReceiver<DownstreamEvent>,
        stream: &mut RequestStream,
    ) -> Result<(), SessionError> {
        let RequestStream { send, reader } = stream;
        // False once the subscriber has ended its direction of the stream. The response continues.
        let mut reading = true;
        let mut stopped = std::pin::pin!(send.stopped());
        loop {
            tokio::select! {
                event = events.recv() => match event {
                    Some(event) if !event.kind.is_end() => {}
                    _ => return Ok(()),
                },
                incoming = reader.next(), if reading => match incoming? {
                    IncomingMessage::Message(Message::RequestUpdate(update)) => {
                        let subscriber = update.parameters.subscriber_priority;
                        self.context().check_request_id(&update.into())?;
                        let mut priority = *self.priority.lock();
                        priority.subscriber = subscriber.unwrap_or(priority.subscriber);
                        *self.priority.lock() = priority;
                        self.context().connection().downstream().set_priority(self.key, priority);
                        wire::send(send, RequestOk::default()).await?;
                    }
                    IncomingMessage::Message(message) => return Err(SessionError::misplaced(&message, "after FETCH")),
                    // GOAWAY on the stream of the peer's request has no effect here: the peer sends the request again
                    // in another session.
                    IncomingMessage::GoAway(_) => {}
                    IncomingMessage::Finished => reading = false,
                    IncomingMessage::Reset => return Ok(()),
                },
                _ = &mut stopped => return Ok(()),
            }
        }
    }
}
