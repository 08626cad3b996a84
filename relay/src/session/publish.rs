//! Tracks that the peer publishes: by its PUBLISH, or by our SUBSCRIBE.

use std::{
    collections::{HashMap, HashSet, hash_map::Entry},
    sync::Arc,
    time::{Duration, Instant},
};

use millrace_moq::{
    Filter, Location, Message, Namespace, Parameters, Properties, code,
    message::{Publish, PublishDone, RequestError, RequestOk, RequestUpdate, Subscribe, SubscribeOk},
};
use parking_lot::Mutex;
use tokio::{
    sync::mpsc,
    task::JoinSet,
    time::{Instant as Clock, sleep, timeout},
};
use tracing::{debug, info, warn};

use super::{
    ask::{ask, failed, wrong_answer},
    context::Context,
    rights::request_error,
    uses::{Kind, Use},
};
use crate::{
    access::{Refusal, rights::Rights},
    hub::Counters,
    live::{Claim, LiveTrack, Numbering},
    subscription::Ended,
    upstream::{Ask, Place, Upstream},
    waiters::Waiters,
    wire::{self, Answers, Incoming, RequestStream, SessionError},
};

/// How often publishers that are there are asked again, while another one waits for its turn.
const RIVAL_LOOKS: Duration = Duration::from_secs(1);
/// How long datagrams may be behind the PUBLISH_DONE of their publisher.
const LATE_DATAGRAMS: Duration = Duration::from_millis(100);
/// How long announced streams may take to arrive after a publisher's PUBLISH_DONE.
const LATE_STREAMS: Duration = Duration::from_secs(2);

/// The tracks that the peer of one session publishes.
pub struct Publications {
    context: Arc<Context>,
    /// By the alias that the peer gave out.
    by_alias: Mutex<HashMap<u64, Published>>,
    /// Streams and datagrams that wait for what explains their alias.
    waiting: Waiters<u64>,
    /// The numbers of tracks that the peer is asked for at the moment.
    asking: Mutex<HashSet<u32>>,
    /// Tasks that wait for the answer to such a number.
    answered: Waiters<u32>,
    /// Namespaces of tracks that the peer has made start over.
    renumbered: Mutex<HashSet<Namespace>>,
}

/// A publisher's description of its track.
struct Given {
    alias: u64,
    largest: Option<Location>,
    /// Others publish the track, and are there.
    rivals: bool,
}

/// The peer is asked for a track. Ends when dropped.
struct Asking<'a>(&'a Publications, u32);

impl Drop for Asking<'_> {
    fn drop(&mut self) {
        self.0.asking.lock().remove(&self.1);
        self.0.answered.wake(&self.1);
    }
}

/// A track and the peer's part in it.
#[derive(Clone)]
pub struct Published {
    pub track: Arc<LiveTrack>,
    pub upstream: Arc<Upstream>,
}

impl Publications {
    pub fn new(context: Arc<Context>) -> Arc<Self> {
        Arc::new(Self {
            context,
            by_alias: Mutex::default(),
            waiting: Waiters::default(),
            asking: Mutex::default(),
            answered: Waiters::default(),
            renumbered: Mutex::default(),
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
            // It may be subscribed to more than once, but nothing would come of that.
            let code = match draft.repeats_subscriptions() {
                true => code::Request::UNINTERESTED,
                false => code::Request::DUPLICATE_SUBSCRIPTION,
            };
            return self.context.refuse(stream.send, RequestError::new(code, "already published")).await;
        }
        let Ok(claim) = claim(&track, rights) else {
            return self.context.refuse(stream.send, request_error(Refusal::Taken)).await;
        };
        let rivals = self.settle_rivals(&track, Duration::ZERO).await;
        if let Err(refusal) = self.prepare(&track, publish.properties, &publish.parameters)? {
            return self.context.refuse(stream.send, refusal).await;
        }
        let given = Given { alias: publish.track_alias, largest: publish.parameters.largest_object, rivals };
        let (entry, asks) = self.add((claim, Arc::clone(rights)), track, &given, false)?;
        // Media is wanted before the first subscriber comes: the cache serves it at once. All of it.
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

    /// Subscribes to `track` at this publisher, once, whoever asks. The subscription goes on in a task of its own until it ends.
    ///
    /// # Errors
    /// The publisher refused, did not answer in time, or is gone.
    pub async fn subscribe(self: &Arc<Self>, track: Arc<LiveTrack>) -> Result<(), RequestError> {
        let _asking = loop {
            let answered = self.answered.wait(&track.number);
            if self.contains(&track) {
                return Ok(());
            }
            if self.asking.lock().insert(track.number) {
                break Asking(self, track.number);
            }
            answered.woken().await;
        };
        self.subscribe_anew(track).await
    }

    /// Likewise, even if there is a subscription.
    async fn subscribe_anew(self: &Arc<Self>, track: Arc<LiveTrack>) -> Result<(), RequestError> {
        let rights = self.context.authority().may_serve(track.name())?;
        if !track.is_open_to(&rights.identity()) {
            return Err(request_error(Refusal::Taken));
        }
        // An upstream relay that was restarted may not have its publishers back yet.
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
                let rivals = self.settle_rivals(&track, Duration::ZERO).await;
                self.adopt(track, ok, stream, (rights, rivals))
            }
            other => Err(wrong_answer(&self.context, &other)),
        }
    }

    /// Takes over a subscription that the publisher accepted.
    fn adopt(
        self: &Arc<Self>,
        track: Arc<LiveTrack>,
        ok: SubscribeOk,
        stream: RequestStream,
        (rights, rivals): (Arc<Rights>, bool),
    ) -> Result<(), RequestError> {
        let failed = |error| failed(&self.context, error);
        // Another may have been faster.
        let claim = claim(&track, &rights)?;
        self.prepare(&track, ok.properties, &ok.parameters).map_err(failed)??;
        debug!(session = self.context.id(), track = %track.name().typed(), alias = ok.track_alias, "subscribed upstream");
        let known = self.get(ok.track_alias).filter(|_| self.context.draft().repeats_subscriptions());
        if known.is_some_and(|known| Arc::ptr_eq(&known.track, &track)) {
            // It may be, but whose objects came would not be known.
            let reason = "the publisher gave a second subscription the alias of the first";
            return Err(RequestError::new(code::Request::NOT_SUPPORTED, reason));
        }
        let largest = ok.parameters.largest_object;
        let given = Given { alias: ok.track_alias, largest, rivals };
        let (entry, asks) = self.add((claim, Arc::clone(&rights)), track, &given, true).map_err(failed)?;
        entry.published.track.hand_over_to(&entry.published.upstream, largest);
        let context = Arc::clone(&self.context);
        self.context.spawn(async move {
            context.within(&rights, stream, |stream| entry.run(asks, Updates::default(), stream)).await
        });
        Ok(())
    }

    /// Has `track` know what its publisher says of it. The inner error is what the publisher is refused with.
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

    /// The peer, which is the upstream relay, wants to be left: what it publishes is to come from another session with it.
    pub fn leave(&self) {
        let by_alias = self.by_alias.lock();
        by_alias.values().for_each(|published| published.upstream.leave());
    }

    /// Subscribes to the track again, since the publisher wants the request to move. The old subscription goes on until the
    /// new one has come as far. Of a track, one at a time.
    fn move_request(self: &Arc<Self>, published: &Published) {
        let Published { track, upstream } = published;
        let is_other =
            |other: &&Published| Arc::ptr_eq(&other.track, track) && !Arc::ptr_eq(&other.upstream, upstream);
        let alone = !self.by_alias.lock().values().any(|other| is_other(&other));
        if upstream.subscribed && alone {
            upstream.leave();
            let (family, track) = (Arc::clone(self), Arc::clone(track));
            self.context.spawn(async move {
                let _ = family.subscribe_anew(track).await; // refused: it stays where it is
                Ok(())
            });
        }
    }

    /// Takes the track from other sessions of the same owner that publish it and are silent: they may be gone, and their time-out is
    /// far away. Returns whether others are there; that may be known for `age`.
    async fn settle_rivals(&self, track: &Arc<LiveTrack>, age: Duration) -> bool {
        let mut asked = JoinSet::new();
        for rival in track.upstreams() {
            // One that is being left is followed to where this one goes on.
            if rival.publisher != self.context.id() && !rival.is_leaving() {
                asked.spawn(async move { (rival.answers(age).await, rival) });
            }
        }
        let mut others = false;
        while let Some(answered) = asked.join_next().await {
            let Ok((answers, rival)) = answered else { continue };
            if answers {
                others = true;
            } else if track.supersede(&rival, self.context.hub().limits.absence, Instant::now()) {
                info!(
                    session = self.context.id(),
                    silent = rival.publisher,
                    track = %track.name().typed(),
                    "took the track over from another session of its publisher, which is silent"
                );
            }
        }
        others
    }

    /// Takes a track that the peer has refused from silent sessions of the same owner. A publisher that was restarted may announce its
    /// namespace before it has the track: it is asked again while subscriptions wait.
    pub async fn relieve(&self, track: &Arc<LiveTrack>) {
        let rights = self.context.authority().may_serve(track.name());
        if rights.is_ok_and(|rights| track.is_open_to(&rights.identity())) {
            self.settle_rivals(track, Duration::ZERO).await;
        }
    }

    /// Whether a group of the peer's is to be taken; says so where the publisher or its numbering has changed.
    pub fn takes(&self, Published { track, upstream }: &Published, group: u64) -> bool {
        let (session, stood_by) = (self.context.id(), upstream.stands_by());
        match track.place(upstream, group, Instant::now()) {
            Numbering::Follows => true,
            Numbering::Anew => {
                info!(session, track = %track.name().typed(), group, "the publisher numbers its groups from the beginning: so does the track");
                let namespace = track.name().namespace();
                if self.renumbered.lock().insert(namespace.clone()) {
                    self.context.hub().announce_again(namespace);
                }
                true
            }
            Numbering::StandsBy => {
                Counters::count(&self.context.hub().counters.standby_subgroups);
                if !stood_by {
                    warn!(
                        session,
                        track = %track.name().typed(),
                        group,
                        "stands by: another session publishes this track with other group IDs, and answers"
                    );
                }
                false
            }
        }
    }

    /// Whether the peer publishes this track already.
    pub fn contains(&self, track: &Arc<LiveTrack>) -> bool {
        self.by_alias.lock().values().any(|published| Arc::ptr_eq(&published.track, track))
    }

    pub fn count(&self) -> usize {
        self.by_alias.lock().len()
    }

    /// What a track alias of the peer stands for.
    pub fn get(&self, alias: u64) -> Option<Published> {
        self.by_alias.lock().get(&alias).cloned()
    }

    /// What a track alias of the peer stands for, once that is known; `None` if it is not in time.
    pub async fn wait(&self, alias: u64, patience: Duration) -> Option<Published> {
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

    /// Registers a track of the peer under the alias that it gave.
    fn add(
        self: &Arc<Self>,
        (claim, rights): (Claim, Arc<Rights>),
        track: Arc<LiveTrack>,
        &Given { alias, largest, rivals }: &Given,
        subscribed: bool,
    ) -> Result<(Adopted, mpsc::UnboundedReceiver<Ask>), SessionError> {
        let place = Place {
            session: self.context.id(),
            is_upstream: self.context.is_upstream(),
            connection: Arc::downgrade(self.context.connection()),
        };
        let (upstream, asks) = Upstream::new(place, alias, subscribed);
        let published = Published { track, upstream };
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
                // Before its streams find it.
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
                "another session publishes this track, and answers: this session's objects are copies if their group IDs agree, else it stands by"
            );
        }
        if self.context.is_upstream() && self.context.peer_goes_away() {
            published.upstream.leave();
        }
        if first {
            self.context.hub().track_established(&published.track);
        }
        let ended = Ended::new(code::Done::INTERNAL_ERROR, "the publisher is gone");
        let ended = Ended { absent: true, ..ended };
        let _use = self.context.uses().begin(Kind::Publication);
        let adopted =
            Adopted { family: Arc::clone(self), published, ended, rights, rivals, _claim: claim, _use };
        Ok((adopted, asks))
    }
}

/// What to change of a subscription that PUBLISH begins with these parameters, so that all objects come.
fn change_to_all(published: &Parameters) -> Option<Parameters> {
    let forward = published.forward.filter(|forward| !forward).map(|_| true);
    let filter = published.filter.map(|_| Filter::All);
    let change = Parameters { forward, filter, ..Parameters::default() };
    (change != Parameters::default()).then_some(change)
}

/// Our updates of one subscription, of which the publisher may allow only so many without an answer.
#[derive(Default)]
struct Updates {
    unanswered: u64,
    /// The newest of those that may not be said yet; what it asks for takes the place of what was asked before.
    waiting: Option<Parameters>,
}

impl Updates {
    async fn send(
        &mut self,
        context: &Context,
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

    /// One has its answer.
    async fn answered(&mut self, context: &Context, send: &mut Answers) -> Result<(), SessionError> {
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

/// The publisher's part in its track.
///
/// # Errors
/// The track is another's.
fn claim(track: &Arc<LiveTrack>, rights: &Rights) -> Result<Claim, RequestError> {
    track.claim(rights.identity()).ok_or_else(|| {
        rights.count(Refusal::Taken);
        request_error(Refusal::Taken)
    })
}

/// A registered track of the peer. When dropped it is removed, and its subscriptions end as `ended` says.
struct Adopted {
    family: Arc<Publications>,
    published: Published,
    ended: Ended,
    rights: Arc<Rights>,
    /// Others published the track before.
    rivals: bool,
    _claim: Claim,
    _use: Use,
}

impl Drop for Adopted {
    fn drop(&mut self) {
        let Published { track, upstream } = &self.published;
        if self.rights.over().is_some() {
            upstream.revoke();
            self.ended.absent = false;
        }
        self.family.by_alias.lock().remove(&upstream.alias);
        let wait = self.family.context.hub().limits.absence;
        track.remove_upstream(upstream, &self.ended, wait, Instant::now());
    }
}

impl Adopted {
    /// Follows the publication to its end, and takes it down.
    async fn run(
        self,
        mut asks: mpsc::UnboundedReceiver<Ask>,
        mut updates: Updates,
        mut stream: RequestStream,
    ) -> Result<(), SessionError> {
        let result = self.follow(&mut asks, &mut updates, &mut stream).await;
        self.finish(result, stream).await
    }

    /// Until the publisher ends it or nobody needs it any more (`None`).
    async fn follow(
        &self,
        asks: &mut mpsc::UnboundedReceiver<Ask>,
        updates: &mut Updates,
        stream: &mut RequestStream,
    ) -> Result<Option<PublishDone>, SessionError> {
        let RequestStream { send, reader } = stream;
        let upstream = &self.published.upstream;
        let mut handed_over = None;
        let mut watching = std::pin::pin!(self.watch_rivals());
        loop {
            tokio::select! {
                incoming = reader.next() => if let Some(done) = self.on_message(incoming?, updates, send).await? {
                    return Ok(Some(done));
                },
                () = upstream.passed(), if handed_over.is_none() => {
                    handed_over = Some(Clock::now() + LATE_STREAMS);
                }
                () = sleep_until(handed_over) => if upstream.is_handed_over() {
                    let _ = timeout(LATE_STREAMS, upstream.has_seen_all(0)).await; // slow ones are cut off
                    return Ok(None);
                } else {
                    handed_over = None;
                },
                ask = asks.recv() => match ask {
                    Some(Ask::NewGroup(group)) => {
                        let parameters =
                            Parameters { new_group_request: Some(group), ..Parameters::default() };
                        updates.send(&self.family.context, send, parameters).await?;
                    }
                    Some(Ask::Forward(forward)) => {
                        let parameters = Parameters { forward: Some(forward), ..Parameters::default() };
                        updates.send(&self.family.context, send, parameters).await?;
                    }
                    Some(Ask::Cancel) | None => return Ok(None),
                },
                () = &mut watching => {}
            }
        }
    }

    /// Takes the track from publishers that were there before as soon as they are silent. Never returns.
    async fn watch_rivals(&self) {
        let Published { track, upstream } = &self.published;
        while self.rivals && upstream.is_rival() {
            sleep(RIVAL_LOOKS).await;
            self.family.settle_rivals(track, RIVAL_LOOKS / 2).await;
        }
        std::future::pending().await
    }

    /// How the publisher ends the publication, if it does.
    async fn on_message(
        &self,
        incoming: Incoming,
        updates: &mut Updates,
        send: &mut Answers,
    ) -> Result<Option<PublishDone>, SessionError> {
        let context = &self.family.context;
        match incoming {
            Incoming::Message(Message::PublishDone(done)) => return Ok(Some(done)),
            Incoming::Message(message @ (Message::RequestOk(_) | Message::RequestError(_)))
                if !updates.is_awaited() =>
            {
                return Err(SessionError::violation(format!("{} answers nothing", message.name())));
            }
            Incoming::Message(Message::RequestOk(ok)) => {
                if let Some(largest) = ok.parameters.largest_object {
                    self.published.track.data.saw_largest(largest);
                }
                updates.answered(context, send).await?;
            }
            Incoming::Message(Message::RequestError(error)) => {
                debug!(session = context.id(), ?error, "REQUEST_UPDATE refused upstream");
                updates.answered(context, send).await?;
            }
            Incoming::Message(Message::PublishStateNotify(notify)) => {
                if let Some(largest) = notify.parameters.largest_object {
                    self.published.track.data.saw_largest(largest);
                }
            }
            Incoming::Message(Message::RequestUpdate(update)) => {
                context.check_request_id(&update.into())?;
                wire::send(send, RequestOk::default()).await?;
            }
            Incoming::Message(message) => {
                return Err(SessionError::violation(format!("{} from a publisher", message.name())));
            }
            Incoming::GoAway(_) => self.family.move_request(&self.published),
            Incoming::Finished | Incoming::Reset => {
                return Ok(Some(PublishDone {
                    code: code::Done::INTERNAL_ERROR,
                    stream_count: 0,
                    reason: "the publisher closed the subscription".into(),
                }));
            }
        }
        Ok(None)
    }

    /// Takes the publication down, after what it announced has arrived.
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
                let _ = timeout(LATE_STREAMS, all_here).await; // some were reset before their header
                if upstream.has_datagrams() {
                    sleep(LATE_DATAGRAMS).await;
                }
                let _ = send.finish(); // the publisher may have stopped it
                self.ended = Ended::new(done.code, done.reason.clone());
            }
            Ok(None) => {
                let _ = send.reset(wire::var(code::Reset::CANCELLED.0)); // may be finished
                reader.stop(code::Reset::CANCELLED.0);
                let ended = Ended::new(code::Done::TRACK_ENDED, "the relay unsubscribed");
                self.ended = Ended { paused: true, ..ended };
            }
            Err(_) => {
                let _ = timeout(LATE_STREAMS, upstream.has_seen_all(0)).await; // readers see the loss too
            }
        }
        drop(self);
        match result {
            Err(SessionError::Violation { code, reason }) => Err(SessionError::Violation { code, reason }),
            _ => Ok(()),
        }
    }
}
