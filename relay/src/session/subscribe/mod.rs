//! The peer's subscriptions: by its SUBSCRIBE, or by our PUBLISH.

mod adapt;
mod fills;
mod follow;
mod parts;
mod publish;
mod switching;

use std::{
    collections::{HashMap, HashSet, VecDeque},
    sync::{Arc, OnceLock},
    time::{Duration, Instant},
};

use millrace_moq::{
    Location, Message, Parameters, TrackName, code,
    message::{PublishDone, RequestError, Subscribe, SubscribeOk},
    tracks::filter::{OutOfRange, Window},
    vi64,
};
use millrace_quic::plane::downstream::Event;
use parking_lot::Mutex;
use tokio::time::{Instant as Clock, timeout_at};
use tracing::debug;

use self::{
    adapt::Asked,
    fills::Fills,
    parts::{Part, Parts},
    switching::Sets,
};
use super::{
    context::Context,
    responses::Responses,
    rights::request_error,
    uses::{Kind, Use},
};
use crate::{
    access::{Refusal, rights::Rights},
    live::LiveTrack,
    outbox::Outbox,
    subscription::{Options, Subscription},
    waiters::Waiters,
    wire::{self, RequestStream, SessionError},
};

/// How long a SUBSCRIBE may be behind a FETCH that joins it, and how often that looks.
const LATE_SUBSCRIBE: Duration = Duration::from_secs(1);
const LOOKS: Duration = Duration::from_millis(50);

/// How many aliases of subscriptions that have ended are not given out again.
const RETIRED_ALIASES: usize = 64;

/// The subscriptions of one session.
pub struct Subscriptions {
    context: Arc<Context>,
    responses: Arc<Responses>,
    state: Mutex<State>,
    sets: Sets,
    parts: Parts,
    /// FETCHes that wait for the SUBSCRIBE of this ID to come, or to be decided.
    decided: Waiters<u64>,
}

#[derive(Default)]
struct State {
    /// By the ID of the peer's SUBSCRIBE or of our PUBLISH.
    by_request: HashMap<u64, Subscribed>,
    /// Request IDs of the peer's SUBSCRIBEs that have no answer yet.
    pending: HashSet<u64>,
    /// By the tag of their streams in the data plane.
    by_owner: HashMap<u64, Arc<Subscription>>,
    /// Aliases that we gave out.
    aliases: HashSet<u64>,
    /// The last ones that are free again. Streams that the peer has not read yet may name them, and it may take what is new for
    /// what it has cancelled.
    retired: VecDeque<u64>,
    /// What it asked for of which ladders.
    asked: Asked,
}

/// A subscription and its track.
#[derive(Clone)]
pub struct Subscribed {
    pub track: Arc<LiveTrack>,
    pub subscription: Arc<Subscription>,
}

impl Subscribed {
    /// Changes the subscription, whose groups come from `tracks`, and sends what that makes possible.
    fn change(&self, options: Options, largest: Option<Location>, tracks: &[Arc<LiveTrack>]) {
        let (subscription, mut outbox) = (&self.subscription, Outbox::default());
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
    pub fn new(context: Arc<Context>, responses: Arc<Responses>) -> Arc<Self> {
        let (state, sets, parts) = (Mutex::default(), Sets::default(), Parts::default());
        Arc::new(Self { context, responses, state, sets, parts, decided: Waiters::default() })
    }

    /// Serves SUBSCRIBE until the subscription ends.
    pub async fn serve(
        self: &Arc<Self>,
        subscribe: Subscribe,
        stream: RequestStream,
        rights: &Arc<Rights>,
    ) -> Result<(), SessionError> {
        let Subscribe { request_id, track: name, mut parameters } = subscribe;
        let dialect = self.context.dialect();
        parameters.filter = dialect.filter(parameters.filter);
        let refuse = |send, code, reason: String| self.context.refuse(send, RequestError::new(code, reason));
        if let Err(refused) = self.check(parameters.assignment.as_ref())? {
            return self.context.refuse(stream.send, refused).await;
        }
        let rendezvous = Duration::from_millis(parameters.rendezvous_timeout.unwrap_or(0));
        let pending = match self.begin(request_id, &name) {
            Ok(pending) => pending,
            Err(error) => return self.context.refuse(stream.send, error).await,
        };
        let (hub, requester) = (self.context.hub(), self.context.requester());
        let established = tokio::select! {
            established = hub.established(&name, requester, rendezvous, parameters.new_group_request) => established,
            _ = stream.send.stopped() => return Ok(()),
        };
        let track = match established {
            Ok(track) => track,
            Err(error) => return self.context.refuse(stream.send, error).await,
        };
        let largest = track.data.largest();
        let window = match self.window(&parameters, largest) {
            Ok(window) => window,
            Err(error) => return refuse(stream.send, code::Request::INVALID_RANGE, error.to_string()).await,
        };
        let options = Options::new(&parameters, window, &track.data);
        let entry = self.add(request_id, (track, Arc::clone(&pending.part)), options, largest);
        drop(pending);
        if let Err(refused) = entry.assign(parameters.assignment.as_ref()) {
            drop(entry);
            return self.context.refuse(stream.send, refused).await;
        }
        let mut fills = Fills::new(Arc::clone(&self.responses), rights);
        if let Err(refused) = fills.begin(request_id, &parameters, &entry.subscribed, largest) {
            drop(entry);
            return self.context.refuse(stream.send, refused).await;
        }
        // Who names alternates wants no others.
        let rights = Some(rights).filter(|_| parameters.assignment.is_none());
        let ok = SubscribeOk {
            track_alias: entry.subscription().alias,
            parameters: dialect.largest(largest),
            properties: entry.track().data.properties_for(&parameters),
        };
        entry.run(Some(ok.into()), stream, rights, fills).await
    }

    /// What the filter of a request lets through.
    ///
    /// # Errors
    /// That is over already, and the draft has it refused.
    fn window(&self, parameters: &Parameters, largest: Option<Location>) -> Result<Window, OutOfRange> {
        let window = Window::resolve(parameters.filter.as_ref(), largest);
        if self.context.draft().ends_with_its_filter() {
            window.check(largest)?;
        }
        Ok(window)
    }

    /// The peer's place in a track that it neither is subscribed to nor has asked for; `None` if it is or has.
    pub fn first_part(&self, name: &TrackName) -> Option<Part> {
        self.parts.take(name, 1)
    }

    /// A SUBSCRIBE of the peer is pending from now on.
    ///
    /// # Errors
    /// There are as many for the track already as there may be.
    fn begin(self: &Arc<Self>, request_id: u64, name: &TrackName) -> Result<Pending, RequestError> {
        let authority = self.context.authority();
        let part = match self.context.draft().repeats_subscriptions() {
            true => self.parts.take(name, authority.same_track()).ok_or_else(|| {
                authority.count(Refusal::SameTrack);
                request_error(Refusal::SameTrack)
            }),
            false => self.parts.take(name, 1).ok_or_else(|| {
                RequestError::new(code::Request::DUPLICATE_SUBSCRIPTION, "already subscribed")
            }),
        };
        let part = Arc::new(part?);
        self.state.lock().pending.insert(request_id);
        self.decided.wake(&request_id);
        Ok(Pending { family: Arc::clone(self), request_id, part })
    }

    /// The subscription by this request, once that is decided; `None` if there is none.
    pub async fn wait(&self, request_id: u64) -> Option<Subscribed> {
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
                    // It may be behind on another stream. If it is refused there, nobody says so.
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

    /// Subscriptions whose streams may still be open.
    pub fn count(&self) -> usize {
        self.state.lock().by_owner.len()
    }

    pub fn is_idle(&self) -> bool {
        let state = self.state.lock();
        state.by_request.is_empty() && state.by_owner.is_empty()
    }

    /// Passes on what happened to a stream of the data plane; `false` if it is none of a subscription.
    pub fn on_event(&self, event: &Event) -> bool {
        let state = self.state.lock();
        let subscription = state.by_owner.get(&event.owner);
        subscription.inspect(|subscription| subscription.on_event(event)).is_some()
    }

    /// The session is over: its subscriptions get nothing more.
    pub fn end(&self) {
        let now = Instant::now();
        let subscriptions: Vec<_> = self.state.lock().by_request.drain().collect();
        for (_, Subscribed { track, subscription }) in subscriptions {
            track.unsubscribe(&subscription, now);
        }
    }

    /// Registers a subscription under an alias of its own.
    fn add(
        self: &Arc<Self>,
        request_id: u64,
        (track, part): (Arc<LiveTrack>, Arc<Part>),
        options: Options,
        joining: Option<Location>,
    ) -> Entry {
        let mut state = self.state.lock();
        let wanted = track.upstreams().first().map_or(0, |upstream| upstream.alias);
        let alias =
            free_alias(wanted, |alias| state.aliases.contains(&alias) || state.retired.contains(&alias));
        state.aliases.insert(alias);
        let connection = Arc::clone(self.context.connection());
        let owner = self.context.next_owner();
        let subscription = Subscription::new(track.reference(), connection, alias, owner, options, joining);
        let subscribed = Subscribed { track, subscription: Arc::new(subscription) };
        state.by_request.insert(request_id, subscribed.clone());
        state.by_owner.insert(owner, Arc::clone(&subscribed.subscription));
        let _use = self.context.uses().begin(Kind::Subscription);
        Entry {
            family: Arc::clone(self),
            request_id,
            subscribed,
            renditions: OnceLock::new(),
            _part: part,
            _use,
        }
    }

    fn remove(&self, request_id: u64, Subscribed { track, subscription }: &Subscribed) {
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

impl State {
    fn retire(&mut self, alias: u64) {
        self.aliases.remove(&alias);
        if self.retired.len() == RETIRED_ALIASES {
            self.retired.pop_front();
        }
        self.retired.push_back(alias);
    }
}

/// A SUBSCRIBE without an answer, until dropped.
struct Pending {
    family: Arc<Subscriptions>,
    request_id: u64,
    part: Arc<Part>,
}

impl Drop for Pending {
    fn drop(&mut self) {
        self.family.state.lock().pending.remove(&self.request_id);
        self.family.decided.wake(&self.request_id);
    }
}

/// A registered subscription; removed when dropped.
struct Entry {
    family: Arc<Subscriptions>,
    request_id: u64,
    subscribed: Subscribed,
    /// Of an adapted subscription: what it is served from, with its own track.
    renditions: OnceLock<Vec<Arc<LiveTrack>>>,
    _part: Arc<Part>,
    _use: Use,
}

impl Drop for Entry {
    fn drop(&mut self) {
        for track in self.tracks() {
            track.unsubscribe(self.subscription(), Instant::now());
        }
        self.family.sets.remove(self.request_id, self.context().connection());
        self.family.remove(self.request_id, &self.subscribed);
    }
}

impl Entry {
    fn context(&self) -> &Context {
        &self.family.context
    }

    fn track(&self) -> &Arc<LiveTrack> {
        &self.subscribed.track
    }

    fn subscription(&self) -> &Arc<Subscription> {
        &self.subscribed.subscription
    }

    /// All that it is served from.
    fn tracks(&self) -> &[Arc<LiveTrack>] {
        let own = std::slice::from_ref(&self.subscribed.track);
        self.renditions.get().map_or(own, |renditions| renditions)
    }

    /// Answers, serves the subscription until it ends on either side, and says PUBLISH_DONE. With `rights` it may be adapted to
    /// what the path carries. `fills` end with it.
    async fn run(
        self,
        ok: Option<Message>,
        stream: RequestStream,
        rights: Option<&Arc<Rights>>,
        mut fills: Fills,
    ) -> Result<(), SessionError> {
        let RequestStream { mut send, mut reader } = stream;
        let result: Result<_, SessionError> = async {
            if let Some(ok) = ok {
                wire::send(&mut send, ok).await?;
            }
            // The alias should be known before the first object comes.
            self.context().connection().control_sent().await;
            self.begin();
            self.follow(&mut send, &mut reader, rights, &mut fills).await
        }
        .await;
        let (session, request_id) = (self.context().id(), self.request_id);
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
                let _ = send.reset(wire::var(code::Reset::CANCELLED.0)); // may be closed already
                reader.stop(code::Reset::CANCELLED.0);
                Ok(())
            }
            Err(SessionError::Lost(reason)) => {
                debug!(session, request_id, reason, "subscription stream lost");
                Ok(())
            }
            Err(violation) => Err(violation),
        }
    }

    /// From now on the subscription gets what the track gets.
    fn begin(&self) {
        let mut outbox = Outbox::default();
        self.track().subscribe(Arc::clone(self.subscription()), Instant::now(), &mut outbox);
        outbox.flush();
    }
}

/// An unused alias, `wanted` if it is free, else one that takes as many bytes where there is one.
fn free_alias(wanted: u64, used: impl Fn(u64) -> bool) -> u64 {
    let same_len = |alias: &u64| vi64::len(*alias) == vi64::len(wanted);
    let near = std::iter::once(wanted).chain((0..=127).filter(same_len));
    near.chain(0..).find(|alias| !used(*alias)).unwrap_or(wanted)
}
