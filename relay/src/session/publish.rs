//! Tracks that the peer publishes, by its PUBLISH or after our SUBSCRIBE.

use std::{
    collections::{HashMap, HashSet, hash_map::Entry},
    sync::{Arc, atomic::Ordering::Relaxed},
    time::{Duration, Instant},
};

use millrace_moq::{
    Filter, Location, Message, Namespace, Parameters, Properties, code,
    message::{Publish, PublishDone, RequestError, RequestOk, RequestUpdate, Subscribe, SubscribeOk},
};
use millrace_transport::waiters::Waiters;
use parking_lot::Mutex;
use tokio::{
    sync::{Semaphore, mpsc},
    task::JoinSet,
    time::{Instant as Clock, sleep, timeout},
};
use tracing::{debug, info, warn};

use super::{
    ask::{ask, failed, wrong_answer},
    context::SessionContext,
    rights::request_error,
    upstream_fetch::UpstreamFetches,
    uses::{Use, UseKind},
};
use crate::{
    hub::OperatorCounters,
    live::{LiveTrack, Numbering, TrackClaim},
    subscription::SubscriptionEnd,
    upstream::{UpstreamRequest, UpstreamSession, UpstreamTrack},
    wire::{self, Answers, IncomingMessage, RequestStream, SessionError},
};
use millrace_access::{AccessRefusal, policy::RightHolder, rights::Rights};

/// How often a standby publisher, whose objects are dropped, checks whether the other publishers of its track still
/// answer.
const RIVAL_LOOKS: Duration = Duration::from_secs(1);
/// How long after PUBLISH_DONE datagrams of the track are still accepted. QUIC may reorder them.
const LATE_DATAGRAMS: Duration = Duration::from_millis(100);
/// The most FETCHes for what tracks have missed that the peer is sent at a time.
const GAPS_AT_ONCE: usize = 8;
/// How long the relay waits for the data streams that PUBLISH_DONE has counted and that have not arrived.
const LATE_STREAMS: Duration = Duration::from_secs(2);

/// The tracks that the peer of one session publishes.
pub struct Publications {
    pub(super) context: Arc<SessionContext>,
    /// The relay's FETCH requests to the peer.
    pub(super) fetches: Arc<UpstreamFetches>,
    /// Limits the FETCHes for what tracks have missed.
    pub(super) gaps: Semaphore,
    /// The peer's publications, by the track alias that the peer chose.
    by_alias: Mutex<HashMap<u64, PublishedTrack>>,
    /// Streams and datagrams that wait for the control message that defines their track alias.
    waiting: Waiters<u64>,
    /// The numbers of tracks for which a SUBSCRIBE to the peer waits for its answer.
    asking: Mutex<HashSet<u32>>,
    /// Tasks that wait until the peer has answered the SUBSCRIBE for a track, by track number.
    answered: Waiters<u32>,
    /// Namespaces that were announced again, because the peer has restarted the group numbering of one of their tracks.
    renumbered: Mutex<HashSet<Namespace>>,
}

/// A publisher's description of its track, from PUBLISH or SUBSCRIBE_OK.
struct TrackDescription {
    alias: u64,
    largest: Option<Location>,
    /// True if other sessions also publish the track and still respond to probes.
    rivals: bool,
}

/// Marks that a SUBSCRIBE for the track with this number waits for the peer's answer. Dropping it wakes the tasks that
/// wait for the same answer.
struct TrackRequest<'a>(&'a Publications, u32);

impl Drop for TrackRequest<'_> {
    fn drop(&mut self) {
        self.0.asking.lock().remove(&self.1);
        self.0.answered.wake(&self.1);
    }
}

/// A track, and this relay's subscription to it at the peer, which publishes the track.
#[derive(Clone)]
pub struct PublishedTrack {
    pub track: Arc<LiveTrack>,
    pub upstream: Arc<UpstreamTrack>,
}

impl Publications {
    pub fn new(context: Arc<SessionContext>, fetches: Arc<UpstreamFetches>) -> Arc<Self> {
        Arc::new(Self {
            context,
            fetches,
            gaps: Semaphore::new(GAPS_AT_ONCE),
            by_alias: Mutex::default(),
            waiting: Waiters::default(),
            asking: Mutex::default(),
            answered: Waiters::default(),
            renumbered: Mutex::default(),
        })
    }

    /// Claims the track for the publisher's identity.
    ///
    /// # Errors
    /// Returns an error if another identity owns the track.
    fn claim(
        &self,
        track: &Arc<LiveTrack>,
        rights: &Rights,
        owner: RightHolder,
    ) -> Result<TrackClaim, RequestError> {
        if self.context.is_link() {
            return Ok(TrackClaim::LINK);
        }
        track.claim(owner).ok_or_else(|| {
            rights.count(AccessRefusal::Taken);
            request_error(AccessRefusal::Taken)
        })
    }

    /// Serves PUBLISH until either side ends it.
    pub async fn serve(
        self: &Arc<Self>,
        publish: Publish,
        mut stream: RequestStream,
        rights: &Arc<Rights>,
    ) -> Result<(), SessionError> {
        let track = match self.context.hub().track(&publish.track, Instant::now()) {
            Ok(track) => track,
            Err(error) => return self.context.refuse(stream.send, error).await,
        };
        let draft = self.context.draft();
        if self.contains(&track) {
            // A second PUBLISH for the same track is refused even if the draft allows it, since it would only deliver
            // copies of the same objects.
            let code = match draft.repeats_subscriptions() {
                true => code::Request::UNINTERESTED,
                false => code::Request::DUPLICATE_SUBSCRIPTION,
            };
            return self.context.refuse(stream.send, RequestError::new(code, "already published")).await;
        }
        let Ok(claim) = self.claim(&track, rights, rights.identity()) else {
            return self.context.refuse(stream.send, request_error(AccessRefusal::Taken)).await;
        };
        let is_taken = self.take_from_link(&track);
        let rivals = self.settle_rivals(&track, Duration::ZERO).await;
        if let Err(refusal) = self.prepare(&track, publish.properties, &publish.parameters)? {
            return self.context.refuse(stream.send, refusal).await;
        }
        let given = TrackDescription {
            alias: publish.track_alias,
            largest: publish.parameters.largest_object,
            rivals,
        };
        let (entry, asks) = self.add(claim, Arc::clone(rights), track, &given, false)?;
        if is_taken {
            entry.published.track.hand_over_to(&entry.published.upstream, given.largest);
        }
        // The relay asks for all objects at once, before there is a subscriber, so that the cache can serve the first
        // subscriber.
        let wanted = Parameters { forward: Some(true), ..Parameters::default() };
        let (accepted, change) = match draft.accepts_with_parameters() {
            true => (wanted, None),
            false => (Parameters::default(), change_to_all(&publish.parameters)),
        };
        let mut updates = Updates::default();
        let answered = async {
            let ok = RequestOk { parameters: accepted, ..RequestOk::default() };
            wire::send(&mut stream.send, ok).await?;
            match change {
                Some(change) => updates.send(&self.context, &mut stream.send, change).await,
                None => Ok(()),
            }
        };
        match answered.await {
            Ok(()) => entry.run(asks, updates, stream).await,
            Err(error) => entry.finish(Err(error), stream).await,
        }
    }

    /// Subscribes to `track` at this publisher. Concurrent calls share one SUBSCRIBE. A new task serves the
    /// subscription until it ends.
    ///
    /// # Errors
    /// Returns an error if the publisher refused, did not answer in time, or is gone.
    pub async fn subscribe(self: &Arc<Self>, track: Arc<LiveTrack>) -> Result<(), RequestError> {
        let _asking = loop {
            // The waiter is registered before the check, so that an answer that arrives during the check is noticed.
            let answered = self.answered.wait(&track.number);
            if self.contains(&track) {
                return Ok(());
            }
            if self.asking.lock().insert(track.number) {
                break TrackRequest(self, track.number);
            }
            answered.woken().await;
        };
        self.subscribe_anew(track).await
    }

    /// Sends SUBSCRIBE for `track`, even if there is a subscription already.
    async fn subscribe_anew(self: &Arc<Self>, track: Arc<LiveTrack>) -> Result<(), RequestError> {
        let rights = self.context.authority().may_serve(track.name())?;
        if !self.context.is_link() && !track.is_open_to(&self.context.owner(&rights)) {
            return Err(request_error(AccessRefusal::Taken));
        }
        // An upstream relay that was restarted may have to wait until its publishers connect again.
        let waits = track.waits_for_upstream(Instant::now()).filter(|_| self.context.is_upstream());
        let parameters = Parameters {
            new_group_request: track.take_group_request(),
            rendezvous_timeout: waits.and_then(|wait| u64::try_from(wait.as_millis()).ok()),
            ..Parameters::default()
        };
        let request_id = self.context.next_request_id();
        let subscribe = Subscribe { request_id, track: track.name().clone(), parameters };
        let (stream, answer) = ask(&self.context, subscribe).await?;
        match answer {
            Message::SubscribeOk(ok) => {
                self.take_from_link(&track);
                let rivals = self.settle_rivals(&track, Duration::ZERO).await;
                self.adopt(track, ok, stream, rights, rivals)
            }
            other => Err(wrong_answer(&self.context, &other)),
        }
    }

    /// Starts the task that serves a subscription which the publisher has accepted.
    fn adopt(
        self: &Arc<Self>,
        track: Arc<LiveTrack>,
        ok: SubscribeOk,
        stream: RequestStream,
        rights: Arc<Rights>,
        rivals: bool,
    ) -> Result<(), RequestError> {
        if self.context.is_relay() && track.is_established() && track.has_moved_on(self.context.id()) {
            let reason = "the track has moved on to another relay meanwhile";
            return Err(RequestError::new(code::Request::UNINTERESTED, reason));
        }
        let failed = |error| failed(&self.context, error);
        // Another publisher may have claimed the track while the SUBSCRIBE was under way.
        let claim = self.claim(&track, &rights, self.context.owner(&rights))?;
        self.prepare(&track, ok.properties, &ok.parameters).map_err(failed)??;
        debug!(session = self.context.id(), track = %track.name().typed(), alias = ok.track_alias, "subscribed to a publisher's track");
        let known = self.get(ok.track_alias).filter(|_| self.context.draft().repeats_subscriptions());
        if known.is_some_and(|known| Arc::ptr_eq(&known.track, &track)) {
            // A second subscription with the same alias is allowed in this draft, but it would be unclear to which of
            // the two an object belongs.
            let reason = "the publisher gave a second subscription the alias of the first";
            return Err(RequestError::new(code::Request::NOT_SUPPORTED, reason));
        }
        let largest = ok.parameters.largest_object;
        let given = TrackDescription { alias: ok.track_alias, largest, rivals };
        let (entry, asks) = self.add(claim, Arc::clone(&rights), track, &given, true).map_err(failed)?;
        entry.published.track.hand_over_to(&entry.published.upstream, largest);
        let context = Arc::clone(&self.context);
        self.context.spawn(async move {
            context.within(&rights, stream, |stream| entry.run(asks, Updates::default(), stream)).await
        });
        Ok(())
    }

    /// Applies a publisher's description to `track`. An error in the inner `Result` refuses the publisher, one in the
    /// outer `Result` ends the session.
    fn prepare(
        &self,
        track: &LiveTrack,
        properties: Properties,
        parameters: &Parameters,
    ) -> Result<Result<(), RequestError>, SessionError> {
        track.prepare(self.context.id());
        if let Some(kind) = track.data.set_properties(properties)? {
            let reason = format!("mandatory track property {kind:#x}");
            return Ok(Err(RequestError::new(code::Request::UNSUPPORTED_EXTENSION, reason)));
        }
        if let Some(largest) = parameters.largest_object {
            track.data.saw_largest(largest);
        }
        Ok(Ok(()))
    }

    /// Marks the publication of the other process of a takeover as leaving, because the track's publisher has come to this
    /// process. Returns false if the track is not from there.
    fn take_from_link(&self, track: &LiveTrack) -> bool {
        let link = self.context.hub().link.load(Relaxed);
        let mut upstreams = track.upstreams();
        upstreams.retain(|upstream| upstream.publisher == link && link != self.context.id());
        upstreams.iter().for_each(|upstream| upstream.leave());
        !upstreams.is_empty()
    }

    /// Marks all publications of the upstream relay as leaving: their tracks move to another session.
    pub fn leave(&self) {
        let by_alias = self.by_alias.lock();
        by_alias.values().for_each(|published| published.upstream.leave());
    }

    /// Subscribes to the track again because the publisher has sent GOAWAY for the request. The old subscription
    /// continues until the new one has caught up. A track is moved by one new subscription at a time.
    fn move_request(self: &Arc<Self>, published: &PublishedTrack) {
        let PublishedTrack { track, upstream } = published;
        let is_other = |other: &&PublishedTrack| {
            Arc::ptr_eq(&other.track, track) && !Arc::ptr_eq(&other.upstream, upstream)
        };
        let alone = !self.by_alias.lock().values().any(|other| is_other(&other));
        if upstream.subscribed && alone {
            upstream.leave();
            let family = Arc::clone(self);
            let track = Arc::clone(track);
            self.context.spawn(async move {
                let _ = family.subscribe_anew(track).await; // If the new subscription is refused, the old one stays.
                Ok(())
            });
        }
    }

    /// Probes other sessions of the same owner that publish the track. Takes over the track from sessions that do not
    /// answer, since their idle timeout may be far away. Returns whether any other session answers. An answer that is
    /// up to `age` old is enough.
    async fn settle_rivals(&self, track: &Arc<LiveTrack>, age: Duration) -> bool {
        let mut asked = JoinSet::new();
        for rival in track.upstreams() {
            // A publisher that the track moves away from is not probed, because this session takes over from it anyway.
            if rival.publisher != self.context.id() && !rival.is_leaving() {
                asked.spawn(async move { (rival.answers(age).await, rival) });
            }
        }
        let mut others = false;
        while let Some(answered) = asked.join_next().await {
            let Ok((answers, rival)) = answered else { continue };
            if answers {
                others = true;
            } else if track.supersede(&rival, self.context.hub().absence(), Instant::now()) {
                info!(
                    session = self.context.id(),
                    silent = rival.publisher,
                    track = %track.name().typed(),
                    "took the track over from another session of its publisher: that session does not answer"
                );
            }
        }
        others
    }

    /// Gives up publishers of a track that do not answer probes, after this peer has refused to publish it. A restarted
    /// publisher may announce its namespace before it has the track, so SUBSCRIBE is sent again later.
    pub async fn relieve(&self, track: &Arc<LiveTrack>) {
        let rights = self.context.authority().may_serve(track.name());
        let may_have_it = rights.is_ok_and(|rights| track.is_open_to(&self.context.owner(&rights)));
        if may_have_it && !track.has_moved_on(self.context.id()) {
            self.settle_rivals(track, Duration::ZERO).await;
        }
    }

    /// Reports whether a group from the peer is accepted. Logs if the publisher has restarted its group numbering, or
    /// has become a standby, whose objects are dropped.
    pub fn takes(&self, PublishedTrack { track, upstream }: &PublishedTrack, group: u64) -> bool {
        let session = self.context.id();
        let stood_by = upstream.stands_by();
        match track.place(upstream, group, Instant::now()) {
            Numbering::Follows => true,
            Numbering::Anew => {
                info!(session, track = %track.name().typed(), group, "the publisher has restarted the track's group numbering: subscribers get the new group IDs");
                let namespace = track.name().namespace();
                // The namespace is announced again once, however many of its tracks are renumbered. This makes players
                // subscribe again.
                if self.renumbered.lock().insert(namespace.clone()) {
                    self.context.hub().announce_again(namespace);
                }
                true
            }
            Numbering::StandsBy => {
                OperatorCounters::count(&self.context.hub().counters.standby_subgroups);
                if !stood_by {
                    warn!(
                        session,
                        track = %track.name().typed(),
                        group,
                        "the publisher becomes a standby: another session, which still answers, publishes this track with other group IDs"
                    );
                }
                false
            }
        }
    }

    /// Reports whether the peer publishes the track already.
    pub fn contains(&self, track: &Arc<LiveTrack>) -> bool {
        self.by_alias.lock().values().any(|published| Arc::ptr_eq(&published.track, track))
    }

    pub fn count(&self) -> usize {
        self.by_alias.lock().len()
    }

    /// Returns the publication with this track alias.
    pub fn get(&self, alias: u64) -> Option<PublishedTrack> {
        self.by_alias.lock().get(&alias).cloned()
    }

    /// Waits for the publication with this track alias. Returns `None` after `patience`.
    pub async fn wait(&self, alias: u64, patience: Duration) -> Option<PublishedTrack> {
        let known = async {
            loop {
                let waiter = self.waiting.wait(&alias);
                if let Some(published) = self.get(alias) {
                    return published;
                }
                waiter.woken().await;
            }
        };
        timeout(patience, known).await.ok()
    }

    /// Registers a track of the peer under the alias that the peer chose.
    fn add(
        self: &Arc<Self>,
        claim: TrackClaim,
        rights: Arc<Rights>,
        track: Arc<LiveTrack>,
        &TrackDescription { alias, largest, rivals }: &TrackDescription,
        subscribed: bool,
    ) -> Result<(Adopted, mpsc::UnboundedReceiver<UpstreamRequest>), SessionError> {
        let place = UpstreamSession {
            session: self.context.id(),
            is_upstream: self.context.is_upstream(),
            is_relay: self.context.is_relay() && subscribed,
            connection: Arc::downgrade(self.context.connection()),
        };
        let (upstream, asks) = UpstreamTrack::new(place, alias, subscribed);
        if claim.has_passed {
            upstream.returns(largest, None, true); // It may be another publisher, or one that was restarted.
        }
        let published = PublishedTrack { track, upstream };
        let mut by_alias = self.by_alias.lock();
        let first = !published.track.is_established();
        match by_alias.entry(alias) {
            Entry::Occupied(_) => {
                return Err(SessionError::Violation {
                    code: code::Session::DUPLICATE_TRACK_ALIAS,
                    reason: format!("track alias {alias} is in use"),
                });
            }
            Entry::Vacant(entry) => {
                // The publisher is added to the track before the alias is registered, by which streams find the track.
                published.track.add_upstream(Arc::clone(&published.upstream), largest, Instant::now());
                entry.insert(published.clone());
            }
        }
        drop(by_alias);
        self.waiting.wake(&alias);
        if rivals {
            info!(
                session = self.context.id(),
                track = %published.track.name().typed(),
                "a second session publishes this track: its objects count as copies if its group IDs match those of the first session, else it becomes a standby"
            );
        }
        if self.context.is_upstream() && self.context.peer_goes_away() {
            published.upstream.leave();
        }
        // Waiting SUBSCRIBEs and watchers are notified only when objects can arrive.
        if first {
            self.context.hub().track_established(&published.track);
        }
        if published.track.gap.is_open() {
            self.begin_fill(published.clone(), largest);
        }
        let ended = SubscriptionEnd::new(code::Done::INTERNAL_ERROR, "the publisher is gone");
        let ended = SubscriptionEnd { absent: true, ..ended };
        let _use = self.context.uses().begin(UseKind::Publication);
        let adopted =
            Adopted { family: Arc::clone(self), published, ended, rights, rivals, _claim: claim, _use };
        Ok((adopted, asks))
    }

    /// Starts a task that asks the publisher for what the track has missed. `claimed` is the largest location that the
    /// publisher named.
    fn begin_fill(self: &Arc<Self>, published: PublishedTrack, claimed: Option<Location>) {
        let family = Arc::clone(self);
        self.context.spawn(async move {
            // Nothing is added any more once the publisher's right has ended.
            tokio::select! {
                () = family.fill_gap(&published, claimed) => {}
                () = published.upstream.revoked() => {}
            }
            Ok(())
        });
    }
}

/// Returns the parameters of a REQUEST_UPDATE that asks for all objects of a published track. `None` if the publisher
/// sends all objects already.
fn change_to_all(published: &Parameters) -> Option<Parameters> {
    let forward = published.forward.filter(|forward| !forward).map(|_| true);
    let filter = published.filter.map(|_| Filter::All);
    let change = Parameters { forward, filter, ..Parameters::default() };
    (change != Parameters::default()).then_some(change)
}

/// Our REQUEST_UPDATEs for one subscription. The publisher may limit how many are unanswered (MAX_REQUEST_UPDATES).
#[derive(Default)]
struct Updates {
    unanswered: u64,
    /// The newest REQUEST_UPDATE that has to wait for the answer to an earlier one. Its parameters replace those of
    /// earlier waiting updates.
    waiting: Option<Parameters>,
}

impl Updates {
    async fn send(
        &mut self,
        context: &SessionContext,
        send: &mut Answers,
        parameters: Parameters,
    ) -> Result<(), SessionError> {
        if self.unanswered >= context.max_request_updates() {
            self.waiting = Some(parameters);
            return Ok(());
        }
        self.unanswered += 1;
        let request_id = context.next_request_id();
        wire::send(send, RequestUpdate { request_id, parameters }).await
    }

    fn is_awaited(&self) -> bool {
        self.unanswered > 0
    }

    /// Records that a REQUEST_UPDATE was answered, and sends the REQUEST_UPDATE that waits, if any.
    async fn answered(&mut self, context: &SessionContext, send: &mut Answers) -> Result<(), SessionError> {
        self.unanswered -= 1;
        match self.waiting.take() {
            Some(parameters) => self.send(context, send, parameters).await,
            None => Ok(()),
        }
    }
}

async fn sleep_until(deadline: Option<Clock>) {
    match deadline {
        Some(deadline) => tokio::time::sleep_until(deadline).await,
        None => std::future::pending().await,
    }
}

/// A registered track of the peer. Dropping it removes the track's publisher, and ends or suspends the track's
/// subscriptions according to `ended`.
struct Adopted {
    family: Arc<Publications>,
    published: PublishedTrack,
    ended: SubscriptionEnd,
    rights: Arc<Rights>,
    /// True if other sessions published the track before this one.
    rivals: bool,
    _claim: TrackClaim,
    _use: Use,
}

impl Drop for Adopted {
    fn drop(&mut self) {
        let PublishedTrack { track, upstream } = &self.published;
        // Ends the publisher's open streams: objects that arrive after its access right has expired must not reach
        // subscribers.
        if self.rights.expiry_refusal().is_some() {
            upstream.revoke();
            self.ended.absent = false;
        }
        self.family.by_alias.lock().remove(&upstream.alias);
        let hub = self.family.context.hub();
        track.remove_upstream(upstream, &self.ended, hub.absence(), Instant::now());
        // The next source may be a relay whose route is known already.
        if self.ended.absent {
            hub.route_lost(track.name().namespace());
        }
    }
}

impl Adopted {
    /// Serves the publication's request stream until the publication ends, then removes the publication.
    async fn run(
        self,
        mut asks: mpsc::UnboundedReceiver<UpstreamRequest>,
        mut updates: Updates,
        mut stream: RequestStream,
    ) -> Result<(), SessionError> {
        let result = self.follow(&mut asks, &mut updates, &mut stream).await;
        self.finish(result, stream).await
    }

    /// Serves the publication until the publisher ends it (returns its PUBLISH_DONE), or until nobody needs it (returns
    /// `None`).
    async fn follow(
        &self,
        asks: &mut mpsc::UnboundedReceiver<UpstreamRequest>,
        updates: &mut Updates,
        stream: &mut RequestStream,
    ) -> Result<Option<PublishDone>, SessionError> {
        let RequestStream { send, reader } = stream;
        let upstream = &self.published.upstream;
        let mut handed_over = None;
        let mut is_to_fill = false;
        let mut watching = std::pin::pin!(self.watch_rivals());
        loop {
            tokio::select! {
                incoming = reader.next() => if let Some(done) = self.on_message(incoming?, updates, send).await? {
                    return Ok(Some(done));
                },
                // Once this publisher has reached the group from which another one takes over, its earlier streams have
                // some time to end.
                () = upstream.passed(), if handed_over.is_none() => {
                    handed_over = Some(Clock::now() + LATE_STREAMS);
                }
                () = sleep_until(handed_over) => if upstream.is_handed_over() {
                    // Streams of this publisher that have not ended when the timeout expires are not waited for.
                    let _ = timeout(LATE_STREAMS, upstream.has_seen_all(0)).await;
                    return Ok(None);
                } else {
                    handed_over = None;
                },
                ask = asks.recv() => match ask {
                    Some(UpstreamRequest::NewGroup(group)) => {
                        let parameters =
                            Parameters { new_group_request: Some(group), ..Parameters::default() };
                        updates.send(&self.family.context, send, parameters).await?;
                    }
                    Some(UpstreamRequest::Forward(forward)) => {
                        let parameters = Parameters { forward: Some(forward), ..Parameters::default() };
                        updates.send(&self.family.context, send, parameters).await?;
                    }
                    Some(UpstreamRequest::FillGap) => is_to_fill = true,
                    Some(UpstreamRequest::Cancel) | None => return Ok(None),
                },
                _ = upstream.first_group(), if is_to_fill => {
                    is_to_fill = false;
                    self.family.begin_fill(self.published.clone(), None);
                }
                () = &mut watching => {}
            }
        }
    }

    /// Checks whether the other publishers of the track still answer, and takes over the track from those that do not.
    /// Never returns.
    async fn watch_rivals(&self) {
        let PublishedTrack { track, upstream } = &self.published;
        while self.rivals && upstream.is_rival() {
            sleep(RIVAL_LOOKS).await;
            self.family.settle_rivals(track, RIVAL_LOOKS / 2).await;
        }
        std::future::pending().await
    }

    /// Handles a message on the request stream. Returns the publisher's PUBLISH_DONE.
    async fn on_message(
        &self,
        incoming: IncomingMessage,
        updates: &mut Updates,
        send: &mut Answers,
    ) -> Result<Option<PublishDone>, SessionError> {
        let context = &self.family.context;
        match incoming {
            IncomingMessage::Message(Message::PublishDone(done)) => return Ok(Some(done)),
            // An answer without an outstanding REQUEST_UPDATE violates the protocol.
            IncomingMessage::Message(message @ (Message::RequestOk(_) | Message::RequestError(_)))
                if !updates.is_awaited() =>
            {
                return Err(SessionError::misplaced(&message, "answers nothing"));
            }
            IncomingMessage::Message(Message::RequestOk(ok)) => {
                if let Some(largest) = ok.parameters.largest_object {
                    self.published.track.data.saw_largest(largest);
                }
                updates.answered(context, send).await?;
            }
            IncomingMessage::Message(Message::RequestError(error)) => {
                debug!(
                    session = context.id(),
                    ?error,
                    "a publisher refused to change a subscription (REQUEST_UPDATE)"
                );
                updates.answered(context, send).await?;
            }
            IncomingMessage::Message(Message::PublishStateNotify(notify)) => {
                if let Some(largest) = notify.parameters.largest_object {
                    self.published.track.data.saw_largest(largest);
                }
            }
            IncomingMessage::Message(Message::RequestUpdate(update)) => {
                context.check_request_id(&update.into())?;
                wire::send(send, RequestOk::default()).await?;
            }
            IncomingMessage::Message(message) => {
                return Err(SessionError::misplaced(&message, "from a publisher"));
            }
            IncomingMessage::GoAway(_) => self.family.move_request(&self.published),
            // The session may be about to end, too, so this is a lost publisher, and not the end of the track.
            IncomingMessage::Finished | IncomingMessage::Reset => {
                return Err(SessionError::Lost(
                    "the publisher closed the subscription without PUBLISH_DONE".into(),
                ));
            }
        }
        Ok(None)
    }

    /// Removes the publication, after the data streams that PUBLISH_DONE has counted have arrived or timed out.
    async fn finish(
        mut self,
        result: Result<Option<PublishDone>, SessionError>,
        stream: RequestStream,
    ) -> Result<(), SessionError> {
        let RequestStream { mut send, mut reader } = stream;
        let upstream = &self.published.upstream;
        match &result {
            Ok(Some(done)) => {
                let all_here = upstream.has_seen_all(done.stream_count);
                // A stream that was reset before its header arrived is never counted as arrived, so the wait has a
                // timeout.
                let _ = timeout(LATE_STREAMS, all_here).await;
                if upstream.has_datagrams() {
                    sleep(LATE_DATAGRAMS).await;
                }
                let _ = send.finish(); // An error means that the publisher has stopped the stream.
                self.ended = SubscriptionEnd::new(done.code, done.reason.clone());
                // A relay ends a track with INTERNAL_ERROR when it has lost the track's publisher. Another relay may
                // still have the track, so subscriptions wait.
                self.ended.absent = upstream.is_of_relay && done.code == code::Done::INTERNAL_ERROR;
            }
            Ok(None) => {
                let _ = send.reset(wire::var(code::Reset::CANCELLED.0)); // An error means that the stream is finished already.
                reader.stop(code::Reset::CANCELLED.0);
                let ended = SubscriptionEnd::new(code::Done::TRACK_ENDED, "the relay unsubscribed");
                self.ended = SubscriptionEnd { paused: true, ..ended };
            }
            Err(_) => {
                // The tasks that read the publisher's data streams notice the lost connection, too, and end soon.
                let _ = timeout(LATE_STREAMS, upstream.has_seen_all(0)).await;
            }
        }
        drop(self);
        match result {
            Err(SessionError::Violation { code, reason }) => Err(SessionError::Violation { code, reason }),
            _ => Ok(()),
        }
    }
}
