//! Subscriptions of the peer, by its SUBSCRIBE or by our PUBLISH.

mod adapt;
mod fills;
mod follow;
mod parts;
mod publish;
mod switching;

use std::{
    collections::{HashMap, HashSet, VecDeque},
    pin::Pin,
    sync::{Arc, OnceLock},
    time::{Duration, Instant},
};

use millrace_moq::{
    Location, Parameters, TrackName, code,
    message::{PublishDone, RequestError, Subscribe, SubscribeOk},
    tracks::filter::{LocationWindow, OutOfRange},
    vi64,
};
use millrace_quic::plane::downstream::DownstreamEvent;
use parking_lot::Mutex;
use tokio::time::{Instant as Clock, timeout_at};
use tracing::debug;

use self::{
    adapt::LadderTracks,
    fills::Fills,
    parts::{TrackPart, TrackParts},
    switching::Sets,
};
use super::{
    context::SessionContext,
    responses::Responses,
    rights::request_error,
    uses::{Use, UseKind},
};
use crate::{
    live::LiveTrack,
    subscription::{Subscription, SubscriptionOptions},
    wire::{self, RequestStream, SessionError},
};
use millrace_access::{AccessRefusal, rights::Rights};
use millrace_transport::{Outbox, waiters::Waiters};

/// How long a joining FETCH waits for its SUBSCRIBE, which may arrive later on another stream, and how often the FETCH
/// checks for it.
const LATE_SUBSCRIBE: Duration = Duration::from_secs(1);
const LOOKS: Duration = Duration::from_millis(50);

/// How many track aliases of ended subscriptions are kept from being reused.
const RETIRED_ALIASES: usize = 64;

/// The subscriptions of one session.
pub struct Subscriptions {
    context: Arc<SessionContext>,
    responses: Arc<Responses>,
    state: Mutex<SubscribeState>,
    sets: Sets,
    parts: TrackParts,
    /// Joining FETCHes that wait until the SUBSCRIBE with this request ID has arrived or was decided.
    decided: Waiters<u64>,
}

#[derive(Default)]
struct SubscribeState {
    /// Subscriptions by the request ID of the peer's SUBSCRIBE or of our PUBLISH.
    by_request: HashMap<u64, SubscribedTrack>,
    /// Request IDs of SUBSCRIBEs that have no answer yet.
    pending: HashSet<u64>,
    /// Subscriptions by the number (owner) that the transport repeats in its events about a subscription's streams.
    by_owner: HashMap<u64, Arc<Subscription>>,
    /// Track aliases that the session's subscriptions use.
    aliases: HashSet<u64>,
    /// The aliases that became free most recently. They are not reused yet: streams that the peer has not read may have
    /// these aliases, and would be assigned to the wrong track.
    retired: VecDeque<u64>,
    /// The tracks that the session asked for, by ladder of renditions.
    asked: LadderTracks,
}

/// A subscription, and the track that the subscriber requested.
#[derive(Clone)]
pub struct SubscribedTrack {
    pub track: Arc<LiveTrack>,
    pub subscription: Arc<Subscription>,
}

impl SubscribedTrack {
    /// Changes the subscription's options, and sends cached objects of `tracks` that are now in its range.
    fn change(&self, options: SubscriptionOptions, largest: Option<Location>, tracks: &[Arc<LiveTrack>]) {
        let subscription = &self.subscription;
        let mut outbox = Outbox::default();
        subscription.update(options, largest);
        outbox.transmit(subscription.connection(), Instant::now());
        for track in tracks {
            track.offer_cached(subscription, Instant::now(), &mut outbox);
            track.offer_openings(subscription);
        }
        outbox.flush();
    }
}

impl Subscriptions {
    pub fn new(context: Arc<SessionContext>, responses: Arc<Responses>) -> Arc<Self> {
        let state = Mutex::default();
        let sets = Sets::default();
        let parts = TrackParts::default();
        Arc::new(Self { context, responses, state, sets, parts, decided: Waiters::default() })
    }

    /// Serves SUBSCRIBE until the subscription ends. `established` comes from [`Self::establish`]; its memory is freed
    /// before the subscription runs.
    pub async fn serve<'a>(
        &self,
        established: Pin<Box<impl Future<Output = Result<Option<EstablishedSubscribe<'a>>, SessionError>>>>,
    ) -> Result<(), SessionError> {
        let Some(EstablishedSubscribe { entry, stream, rights, fills }) = established.await? else {
            return Ok(());
        };
        entry.run(stream, rights, fills).await
    }

    /// Waits until the track is established, registers the subscription and sends the answer. Returns `None` if the
    /// subscription was refused, or the subscriber has cancelled it.
    pub async fn establish<'a>(
        self: &Arc<Self>,
        subscribe: Subscribe,
        mut stream: RequestStream,
        rights: &'a Arc<Rights>,
    ) -> Result<Option<EstablishedSubscribe<'a>>, SessionError> {
        let Subscribe { request_id, track: name, mut parameters } = subscribe;
        let dialect = self.context.dialect();
        parameters.filter = dialect.filter(parameters.filter);
        let refuse = async |send, error| self.context.refuse(send, error).await.map(|()| None);
        if let Err(refused) = self.check(parameters.assignment.as_ref())? {
            return refuse(stream.send, refused).await;
        }
        let rendezvous = Duration::from_millis(parameters.rendezvous_timeout.unwrap_or(0));
        let pending = match self.begin(request_id, &name) {
            Ok(pending) => pending,
            Err(error) => return refuse(stream.send, error).await,
        };
        let hub = self.context.hub();
        let requester = self.context.requester();
        let established = tokio::select! {
            established = hub.established(&name, requester, rendezvous, parameters.new_group_request) => established,
            _ = stream.send.stopped() => return Ok(None),
        };
        let track = match established {
            Ok(track) => track,
            Err(error) => return refuse(stream.send, error).await,
        };
        // The filter, the answer and the fill use the track's largest location as it is now, even if further objects
        // arrive meanwhile.
        let largest = track.data.largest();
        let window = match self.window(&parameters, largest) {
            Ok(window) => window,
            Err(error) => {
                let refused = RequestError::new(code::Request::INVALID_RANGE, error.to_string());
                return refuse(stream.send, refused).await;
            }
        };
        let options = SubscriptionOptions::new(&parameters, window, &track.data);
        let entry = self.add(request_id, track, Arc::clone(&pending.part), options, largest);
        drop(pending);
        hub.join_publishers(entry.track());
        if let Err(refused) = entry.assign(parameters.assignment.as_ref()) {
            drop(entry);
            return refuse(stream.send, refused).await;
        }
        let mut fills = Fills::new(Arc::clone(&self.responses), rights);
        if let Err(refused) = fills.begin(request_id, &parameters, &entry.subscribed, largest) {
            drop(entry);
            return refuse(stream.send, refused).await;
        }
        // If the subscriber uses a switching set, the relay does not adapt the rendition itself.
        let rights = Some(rights).filter(|_| parameters.assignment.is_none());
        let ok = SubscribeOk {
            track_alias: entry.subscription().alias,
            parameters: dialect.largest(largest),
            properties: entry.track().data.properties_for(&parameters),
        };
        wire::send(&mut stream.send, ok).await?;
        Ok(Some(EstablishedSubscribe { entry, stream, rights, fills }))
    }

    /// Returns the range of locations that the filter of a request selects.
    ///
    /// # Errors
    /// Returns an error if the track has passed the end of the range already, and the draft requires a refusal for
    /// that.
    fn window(
        &self,
        parameters: &Parameters,
        largest: Option<Location>,
    ) -> Result<LocationWindow, OutOfRange> {
        let window = LocationWindow::resolve(parameters.filter.as_ref(), largest);
        if self.context.draft().ends_with_its_filter() {
            window.check(largest)?;
        }
        Ok(window)
    }

    /// Counts a subscription of the session to the track. Returns `None` if the peer is subscribed to it or has asked
    /// for it.
    pub fn first_part(&self, name: &TrackName) -> Option<TrackPart> {
        self.parts.take(name, 1)
    }

    /// Registers a SUBSCRIBE of the peer that waits for its answer.
    ///
    /// # Errors
    /// Returns an error if the session has as many subscriptions to the track as it may have.
    fn begin(self: &Arc<Self>, request_id: u64, name: &TrackName) -> Result<PendingSubscribe, RequestError> {
        let authority = self.context.authority();
        let part = match self.context.draft().repeats_subscriptions() {
            true => self.parts.take(name, authority.same_track()).ok_or_else(|| {
                authority.count(AccessRefusal::SameTrack);
                request_error(AccessRefusal::SameTrack)
            }),
            false => self.parts.take(name, 1).ok_or_else(|| {
                RequestError::new(code::Request::DUPLICATE_SUBSCRIPTION, "already subscribed")
            }),
        };
        let part = Arc::new(part?);
        self.state.lock().pending.insert(request_id);
        self.decided.wake(&request_id);
        Ok(PendingSubscribe { family: Arc::clone(self), request_id, part })
    }

    /// Returns the subscription with this request ID, and waits for it if its SUBSCRIBE is not answered yet or has not
    /// arrived. Returns `None` if there is no such subscription.
    pub async fn wait(&self, request_id: u64) -> Option<SubscribedTrack> {
        let began = Clock::now();
        loop {
            let waiter = self.decided.wait(&request_id);
            let (patience, looks) = {
                let state = self.state.lock();
                if let Some(subscribed) = state.by_request.get(&request_id) {
                    return Some(subscribed.clone());
                }
                match state.pending.contains(&request_id) {
                    true => (self.context.hub().limits.request_timeout, None),
                    // The SUBSCRIBE may arrive later, on another stream. If it is refused, this task is not woken, so
                    // the state is checked repeatedly.
                    false if !self.context.has_seen(request_id) => (LATE_SUBSCRIBE, Some(LOOKS)),
                    false => return None,
                }
            };
            let until = began + patience;
            let look = looks.map_or(until, |looks| until.min(Clock::now() + looks));
            if timeout_at(look, waiter.woken()).await.is_err() && began.elapsed() >= patience {
                return None;
            }
        }
    }

    /// Returns the number of subscriptions that may still have open streams.
    pub fn count(&self) -> usize {
        self.state.lock().by_owner.len()
    }

    pub fn is_idle(&self) -> bool {
        let state = self.state.lock();
        state.by_request.is_empty() && state.by_owner.is_empty()
    }

    /// Passes a transport event about a sent stream to the subscription that the stream belongs to. Returns false if
    /// there is no such subscription.
    pub fn on_event(&self, event: &DownstreamEvent) -> bool {
        let state = self.state.lock();
        let subscription = state.by_owner.get(&event.owner);
        subscription.inspect(|subscription| subscription.on_event(event)).is_some()
    }

    /// Ends all subscriptions because the session is over.
    pub fn end(&self) {
        let now = Instant::now();
        let subscriptions: Vec<_> = self.state.lock().by_request.drain().collect();
        for (_, SubscribedTrack { track, subscription }) in subscriptions {
            track.unsubscribe(&subscription, now);
        }
    }

    /// Registers a subscription with an alias that is free.
    fn add(
        self: &Arc<Self>,
        request_id: u64,
        track: Arc<LiveTrack>,
        part: Arc<TrackPart>,
        options: SubscriptionOptions,
        joining: Option<Location>,
    ) -> SubscriptionEntry {
        let mut state = self.state.lock();
        // Reusing the publisher's alias lets the kernel copy stream headers without changing their length.
        let wanted = track.upstreams().first().map_or(0, |upstream| upstream.alias);
        let alias =
            free_alias(wanted, |alias| state.aliases.contains(&alias) || state.retired.contains(&alias));
        state.aliases.insert(alias);
        let connection = Arc::clone(self.context.connection());
        let owner = self.context.next_owner();
        let subscription = Subscription::new(track.reference(), connection, alias, owner, options, joining);
        let subscribed = SubscribedTrack { track, subscription: Arc::new(subscription) };
        state.by_request.insert(request_id, subscribed.clone());
        state.by_owner.insert(owner, Arc::clone(&subscribed.subscription));
        let _use = self.context.uses().begin(UseKind::Subscription);
        SubscriptionEntry {
            family: Arc::clone(self),
            request_id,
            subscribed,
            renditions: OnceLock::new(),
            _part: part,
            _use,
        }
    }

    // The subscription leaves the track first, so that no new stream is opened while the open ones are reset.
    fn remove(&self, request_id: u64, SubscribedTrack { track, subscription }: &SubscribedTrack) {
        track.unsubscribe(subscription, Instant::now());
        subscription.cancel(code::Reset::CANCELLED);
        let connection = self.context.connection();
        connection.transmit_now();
        let mut state = self.state.lock();
        state.by_request.remove(&request_id);
        state.by_owner.remove(&subscription.owner);
        connection.downstream().forget_owner(subscription.owner);
        state.retire(subscription.alias);
    }
}

impl SubscribeState {
    fn retire(&mut self, alias: u64) {
        self.aliases.remove(&alias);
        if self.retired.len() == RETIRED_ALIASES {
            self.retired.pop_front();
        }
        self.retired.push_back(alias);
    }
}

/// A SUBSCRIBE that waits for its answer, until this is dropped.
struct PendingSubscribe {
    family: Arc<Subscriptions>,
    request_id: u64,
    part: Arc<TrackPart>,
}

impl Drop for PendingSubscribe {
    fn drop(&mut self) {
        self.family.state.lock().pending.remove(&self.request_id);
        self.family.decided.wake(&self.request_id);
    }
}

/// A subscription that was answered and may begin.
pub struct EstablishedSubscribe<'a> {
    entry: SubscriptionEntry,
    stream: RequestStream,
    /// The rights with which the rendition is adapted; `None` if it is not.
    rights: Option<&'a Arc<Rights>>,
    fills: Fills,
}

/// A registered subscription. Dropping it removes the subscription and resets its streams.
struct SubscriptionEntry {
    family: Arc<Subscriptions>,
    request_id: u64,
    subscribed: SubscribedTrack,
    /// The renditions from which the subscription is served if it is adapted to the path's bandwidth, including its own
    /// track.
    renditions: OnceLock<Vec<Arc<LiveTrack>>>,
    _part: Arc<TrackPart>,
    _use: Use,
}

impl Drop for SubscriptionEntry {
    fn drop(&mut self) {
        for track in self.tracks() {
            track.unsubscribe(self.subscription(), Instant::now());
        }
        self.family.sets.remove(self.request_id, self.context().connection());
        self.family.remove(self.request_id, &self.subscribed);
    }
}

impl SubscriptionEntry {
    fn context(&self) -> &SessionContext {
        &self.family.context
    }

    fn track(&self) -> &Arc<LiveTrack> {
        &self.subscribed.track
    }

    fn subscription(&self) -> &Arc<Subscription> {
        &self.subscribed.subscription
    }

    /// Returns all tracks that the subscription is served from.
    fn tracks(&self) -> &[Arc<LiveTrack>] {
        let own = std::slice::from_ref(&self.subscribed.track);
        self.renditions.get().map_or(own, |renditions| renditions)
    }

    /// Runs the subscription until either side ends it, and sends PUBLISH_DONE. The rendition is adapted to the path's
    /// bandwidth only if `rights` are given. `fills` end with the subscription.
    async fn run(
        self,
        stream: RequestStream,
        rights: Option<&Arc<Rights>>,
        mut fills: Fills,
    ) -> Result<(), SessionError> {
        let RequestStream { mut send, mut reader } = stream;
        let result: Result<_, SessionError> = async {
            // The subscriber should know the alias before the first object arrives.
            self.context().connection().control_sent().await;
            self.begin();
            self.follow(&mut send, &mut reader, rights, &mut fills).await
        }
        .await;
        let session = self.context().id();
        let request_id = self.request_id;
        let subscription = Arc::clone(self.subscription());
        drop(self);
        match result {
            Ok(Some(ended)) => {
                let stream_count = subscription.stream_count() + fills.opened();
                let done = PublishDone { code: ended.code, stream_count, reason: ended.reason };
                wire::send_last(&mut send, done).await;
                Ok(())
            }
            Ok(None) => {
                let _ = send.reset(wire::var(code::Reset::CANCELLED.0)); // An error means that the stream is closed.
                reader.stop(code::Reset::CANCELLED.0);
                Ok(())
            }
            Err(SessionError::Lost(reason)) => {
                debug!(session, request_id, reason, "the request stream of a subscription ended early");
                Ok(())
            }
            Err(violation) => Err(violation),
        }
    }

    /// Starts to send the track's new objects to the subscriber.
    fn begin(&self) {
        let mut outbox = Outbox::default();
        self.track().subscribe(Arc::clone(self.subscription()), Instant::now(), &mut outbox);
        outbox.flush();
    }
}

/// Returns a free alias: `wanted` if possible, or else one of the same encoded length if possible.
fn free_alias(wanted: u64, used: impl Fn(u64) -> bool) -> u64 {
    let same_len = |alias: &u64| vi64::len(*alias) == vi64::len(wanted);
    let near = std::iter::once(wanted).chain((0..=127).filter(same_len));
    near.chain(0..).find(|alias| !used(*alias)).unwrap_or(wanted)
}
