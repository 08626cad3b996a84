//! State that all sessions share: the tracks, the publishers of namespaces, and the sessions that watch namespaces.

mod announced;
mod catalogs;
mod namespaces;
mod pages;
mod publisher;
mod route_watch;
mod routes;
#[cfg(test)]
mod tests;

use std::{
    collections::BTreeMap,
    ops::Bound::Included,
    sync::{
        Arc, OnceLock, Weak,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use millrace_moq::{
    HopId, HopPath, Namespace, TrackName, code, message::RequestError, tracks::cache::TrackCache,
};
use millrace_relay_cluster::RouteTable;
use millrace_relay_status as status;
pub use millrace_relay_status::OperatorCounters;
use parking_lot::{Mutex, RwLock};
use tokio::{
    sync::mpsc,
    time::{Instant as Clock, sleep_until, timeout_at},
};

use self::pages::Pages;
pub use self::{
    announced::{RelayRegistration, RoutePublication},
    namespaces::{NamespaceEvent, NamespaceWatch, Publication, Publishers},
    publisher::{
        FetchAnswer, FetchPiece, FetchedObjects, Fetching, HubPublisher, NamespaceSeeker, Requester,
        SubscribeAnswer,
    },
    route_watch::RouteWatch,
};
use super::{AdaptiveMode, Delays, live::LiveTrack, upstream::UpstreamRequest};
use millrace_access::policy::RightHolder;
use millrace_transport::{Outbox, waiters::Waiters};

/// The shortest and the longest pause between two searches for a track's publishers, while a SUBSCRIBE waits. The pause
/// doubles with each search, so publishers that connect and disconnect quickly cause few searches.
const PAUSES: (Duration, Duration) = (Duration::from_millis(10), Duration::from_secs(1));
/// How long a SUBSCRIBE that waits for a publisher waits until the relay looks for one at other relays again, if
/// nothing tells it to before.
const SEEK_AGAIN: Duration = Duration::from_secs(5);
/// The least time that a SUBSCRIBE waits for a publisher while the upstream relay is away, and during a takeover, whose
/// clients and routes come one by one.
const RENDEZVOUS: Duration = Duration::from_secs(2);
/// The least time that subscriptions wait for a lost publisher during a takeover. The publisher is most likely on its
/// way to the other process, which may be slow.
const TAKEOVER_ABSENCE: Duration = Duration::from_secs(30);

/// The value of [`Hub::link`] from the start of a successor until its session with the other process begins.
pub const LINK_PENDING: u64 = u64::MAX;

/// Limits and timeouts of the whole relay.
#[derive(Clone, Copy, Debug)]
pub struct HubLimits {
    pub max_tracks: usize,
    /// The most tracks per session for which the kernel may prepare forwarding before the track's streams or datagrams
    /// begin. Streams of further tracks are handed to the kernel one by one, after userspace has read their beginning.
    pub offloaded_tracks: usize,
    /// How long an upstream subscription is kept after its last subscriber left.
    pub linger: Duration,
    /// How long subscriptions wait for a publisher to return, or for another one, after their publisher was lost
    /// without ending its tracks.
    pub absence: Duration,
    /// The longest time that a SUBSCRIBE may wait for a publisher, whatever its RENDEZVOUS_TIMEOUT asks for.
    pub max_rendezvous: Duration,
    /// The most namespaces that one relay of the cluster may announce routes to.
    pub max_routes: usize,
    /// How long a publisher may take to answer a request of the relay.
    pub request_timeout: Duration,
}

/// The shared state of a relay.
pub struct Hub {
    pub limits: HubLimits,
    pub cache: Arc<TrackCache>,
    /// How long media may wait for a slow subscriber before it is dropped.
    delays: RwLock<Delays>,
    /// Whether subscriptions are switched between renditions as bandwidth changes.
    pub adaptive: AdaptiveMode,
    /// Whether subscribers may name alternative tracks in a switching set.
    pub switching_sets: bool,
    /// True if the relay is a member of a cluster. Without a cluster, it has routes only of the other process of a
    /// takeover.
    pub is_in_cluster: bool,
    /// ID of the session with the other process of a takeover. 0 if there is none, and [`LINK_PENDING`] while it is being
    /// established.
    pub link: AtomicU64,
    /// This process's hop ID on private links. Both processes of a takeover have the same one in a cluster.
    pub link_hop: OnceLock<HopId>,
    /// The cost of receiving from this relay that is announced to other relays of the cluster.
    pub relay_cost: Option<u64>,
    pub counters: OperatorCounters,
    /// The state of the connection to the configured upstream relay. `None` if none is configured.
    pub upstream: Mutex<Option<status::UpstreamStatus>>,
    tracks: Arc<RwLock<Tracks>>,
    namespaces: Arc<namespaces::PublisherNamespaces>,
    /// SUBSCRIBEs that wait for a publisher of their track to appear.
    waiting: Waiters<TrackName>,
    /// Finds publishers at other relays. Not set if relays announce namespaces to each other.
    seeker: OnceLock<Weak<dyn NamespaceSeeker>>,
}

type Tracks = BTreeMap<TrackName, Arc<LiveTrack>>;

impl Hub {
    pub fn new(
        limits: HubLimits,
        cache: Arc<TrackCache>,
        delays: Delays,
        adaptive: AdaptiveMode,
        switching_sets: bool,
    ) -> Self {
        Self {
            limits,
            cache,
            delays: RwLock::new(delays),
            adaptive,
            switching_sets,
            is_in_cluster: false,
            link: AtomicU64::new(0),
            link_hop: OnceLock::new(),
            relay_cost: None,
            counters: OperatorCounters::default(),
            upstream: Mutex::default(),
            tracks: Arc::default(),
            namespaces: Arc::default(),
            waiting: Waiters::default(),
            seeker: OnceLock::new(),
        }
    }

    /// Sets what finds publishers at other relays when a namespace has none here.
    pub fn set_seeker(&self, seeker: Weak<dyn NamespaceSeeker>) {
        let _ = self.seeker.set(seeker); // A relay has one seeker, so no earlier one is replaced.
    }

    /// Makes the relay part of a cluster.
    pub fn with_table_of_routes(self, table: RouteTable, relay_cost: Option<u64>) -> Self {
        self.namespaces.0.lock().table = Some(table);
        Self { is_in_cluster: true, relay_cost, ..self }
    }

    /// Sets how long media may wait for slow subscribers, for tracks that exist and for later ones.
    pub fn set_delays(&self, delays: Delays) {
        self.delays.write().clone_from(&delays);
        // `track` reads `delays` while it holds the write lock of `tracks`. So a track with the old delays is in the
        // map before this read lock is granted, and is changed below.
        self.tracks.read().values().for_each(|track| track.set_delays(&delays));
    }

    /// Reports whether another process of this relay is taking over, or is being taken over.
    pub fn is_taking_over(&self) -> bool {
        self.link.load(Relaxed) != 0
    }

    /// Returns how long subscriptions wait for a publisher that was lost without ending its tracks.
    pub fn absence(&self) -> Duration {
        let least = if self.is_taking_over() { TAKEOVER_ABSENCE } else { Duration::ZERO };
        self.limits.absence.max(least)
    }

    /// Returns the track of this name, and creates it if it does not exist.
    ///
    /// # Errors
    /// Returns an error if the relay has as many tracks as it may have.
    pub fn track(&self, name: &TrackName, now: Instant) -> Result<Arc<LiveTrack>, RequestError> {
        if let Some(track) = self.find_track(name) {
            return Ok(track);
        }
        // Another thread may have added the track between the read lock and the write lock, so the limit does not apply
        // to a track that is in the map by now.
        let mut tracks = self.tracks.write();
        if tracks.len() >= self.limits.max_tracks && !tracks.contains_key(name) {
            return Err(RequestError::new(
                code::Request::EXCESSIVE_LOAD,
                "the relay has no room for another track",
            ));
        }
        let new = || {
            let delays = self.delays.read().namespace_delays(name.namespace());
            Arc::new(LiveTrack::new(name.clone(), Arc::clone(&self.cache), delays, now))
        };
        Ok(Arc::clone(tracks.entry(name.clone()).or_insert_with(new)))
    }

    /// Returns the track of this name once a publisher has accepted our SUBSCRIBE. Waits up to `rendezvous` for a
    /// publisher to appear. `new_group` is the subscriber's NEW_GROUP_REQUEST.
    ///
    /// # Errors
    /// Returns an error if nobody publishes the track, every publisher refused, or the relay has too many tracks.
    pub async fn established(
        &self,
        name: &TrackName,
        requester: Requester,
        rendezvous: Duration,
        new_group: Option<u64>,
    ) -> Result<Arc<LiveTrack>, RequestError> {
        let waits = (self.is_taking_over() || self.is_upstream_away()) && !requester.is_relay;
        let wait = if waits { rendezvous.max(RENDEZVOUS) } else { rendezvous };
        // A subscriber that does not wait must not make the relay create a track that nobody can serve.
        if wait.is_zero() {
            self.find(name, requester).await?;
        }
        let track = self.track(name, Instant::now())?;
        match new_group {
            Some(group) if track.is_established() => track.request_group(group),
            Some(group) => track.expect_group(group),
            None => {}
        }
        self.ensure_upstream(&track, requester, wait).await?;
        Ok(track)
    }

    /// Refuses a request for a track that does not exist and has no publisher, before a track is created for it.
    ///
    /// # Errors
    /// Returns an error if the track does not exist and its namespace has no publisher that may serve `requester`.
    pub fn check_known(&self, name: &TrackName, requester: Requester) -> Result<(), RequestError> {
        if self.find_track(name).is_some() || !self.publishers_of(name.namespace(), requester).all.is_empty()
        {
            return Ok(());
        }
        Err(self.absent())
    }

    /// Looks for a publisher of the track at other relays, if none is known. Then does what [`Self::check_known`] does.
    pub async fn find(&self, name: &TrackName, requester: Requester) -> Result<(), RequestError> {
        let sought = self.seek(name, requester).await;
        self.check_known(name, requester).map_err(|absent| sought.err().unwrap_or(absent))
    }

    /// Looks for a publisher of the track at other relays, if none is known. Requests of other relays are not passed
    /// on: they look for publishers themselves.
    pub async fn seek(&self, name: &TrackName, requester: Requester) -> SubscribeAnswer {
        let is_relay = requester.is_relay || requester.is_upstream || requester.hop.is_named();
        let Some(seeker) = self.seeker().filter(|_| !is_relay) else { return Ok(()) };
        let is_here = self.find_track(name).is_some_and(|track| track.is_established());
        if is_here || self.has_publisher(name.namespace()) {
            return Ok(());
        }
        seeker.seek(name.namespace().clone()).await
    }

    fn seeker(&self) -> Option<Arc<dyn NamespaceSeeker>> {
        self.seeker.get().and_then(Weak::upgrade)
    }

    /// Looks for a publisher of a namespace at other relays, without waiting for it.
    pub fn want(&self, namespace: &Namespace) {
        if let Some(seeker) = self.seeker().filter(|_| !self.has_publisher(namespace)) {
            seeker.want(namespace.clone());
        }
    }

    /// Reports whether a publisher other than the upstream relay is known for the namespace.
    pub fn has_publisher(&self, namespace: &Namespace) -> bool {
        let known = self.publishers_of(namespace, Requester::NOBODY).all;
        known.iter().any(|publisher| !publisher.is_upstream())
    }

    /// Waits until the namespace or a prefix of it is published. Call this before you look for publishers.
    pub fn await_publisher(&self, namespace: &Namespace) -> impl Future<Output = ()> + '_ {
        let waiter = TrackName::new(namespace.clone(), "").ok().map(|name| self.waiting.wait(&name));
        async {
            match waiter {
                Some(waiter) => waiter.woken().await,
                None => std::future::pending().await,
            }
        }
    }

    /// Reports whether the relay has upstream relays and no session with any of them.
    fn is_upstream_away(&self) -> bool {
        self.upstream.lock().as_ref().is_some_and(|upstream| upstream.session.is_none())
    }

    /// Returns the error for a track that nobody publishes.
    pub fn absent(&self) -> RequestError {
        let reason = match self.is_upstream_away() {
            true => "nobody here publishes this track, and the upstream relay is away",
            false => "nobody publishes this track",
        };
        RequestError::new(code::Request::DOES_NOT_EXIST, reason)
    }

    pub fn find_track(&self, name: &TrackName) -> Option<Arc<LiveTrack>> {
        self.tracks.read().get(name).cloned()
    }

    pub fn tracks(&self) -> Vec<Arc<LiveTrack>> {
        self.tracks.read().values().cloned().collect()
    }

    /// Registers `publisher` for all tracks of `namespace` and of the namespaces below it. `fallback` is true for the
    /// configured upstream relay, which is asked last.
    pub fn publish(
        &self,
        namespace: Namespace,
        publisher: &Arc<dyn HubPublisher>,
        fallback: bool,
    ) -> Publication {
        self.publish_by(namespace, publisher, fallback, None)
    }

    /// Registers `publisher` for all tracks of `namespace` and of the namespaces below it. `path` is the hop path that
    /// the publisher announced, if it speaks the cluster extension.
    pub fn publish_by(
        &self,
        namespace: Namespace,
        publisher: &Arc<dyn HubPublisher>,
        fallback: bool,
        path: Option<HopPath>,
    ) -> Publication {
        let publication = self.namespaces.publish(namespace.clone(), publisher, fallback, path);
        self.wake_waiting(&namespace);
        publication
    }

    /// Wakes the SUBSCRIBEs that wait for a publisher of tracks below `namespace`.
    pub fn wake_waiting(&self, namespace: &Namespace) {
        if let Included(first) = pages::front(namespace) {
            self.waiting.wake_range(&first, |name| namespace.is_prefix_of(name.namespace()));
        }
    }

    /// Subscribes at a new publisher of `namespace` to all tracks below it that have subscribers and another publisher.
    /// Both publishers then serve the existing subscriptions (draft-18, "Publisher Interactions"). Tracks that come from
    /// a relay of the cluster are left out: [`Self::follow_routes`] chooses their publisher. Tracks are processed in
    /// batches (pages). `pace` returns the time at which the next batch may begin.
    pub async fn subscribe_existing(
        &self,
        namespace: &Namespace,
        publisher: &Arc<dyn HubPublisher>,
        pace: impl Fn() -> Clock,
    ) {
        // A track without subscribers gets its publishers with its next subscription.
        let wanted = |track: &LiveTrack| {
            let may_be_added = track.is_established() && !follows_routes(track) || track.is_waiting();
            track.subscription_count() > 0 && may_be_added
        };
        let mut pages = self.tracks_below(namespace.clone(), wanted);
        loop {
            let page = pages();
            if !page.found.is_empty() {
                publisher.back_up(page.found);
            }
            if !page.more {
                return;
            }
            // A short namespace may cover many tracks. The pause between two pages of tracks limits the load that its
            // announcement causes.
            sleep_until(pace()).await;
        }
    }

    /// Returns the tracks below `prefix` for which `wanted` is true, page by page.
    fn tracks_below(&self, prefix: Namespace, wanted: fn(&LiveTrack) -> bool) -> Pages<Arc<LiveTrack>> {
        let tracks = Arc::clone(&self.tracks);
        let mut behind = pages::front(&prefix);
        Box::new(move || {
            let below = |name: &TrackName| prefix.is_prefix_of(name.namespace());
            let take = |_: &_, track: &Arc<LiveTrack>| wanted(track).then(|| Arc::clone(track));
            pages::page(&tracks.read(), &mut behind, below, take)
        })
    }

    /// Returns the sessions that publish `namespace` or a prefix of it and may serve `requester`. The configured
    /// upstream relay is included only if there is no other publisher and it is not the requester.
    pub fn publishers_of(&self, namespace: &Namespace, requester: Requester) -> Publishers {
        self.namespaces.publishers_of(namespace, requester)
    }

    /// Reports whether a publisher other than the upstream relay has announced exactly `namespace`.
    pub fn is_published_here(&self, namespace: &Namespace) -> bool {
        self.namespaces.is_published_here(namespace)
    }

    /// Watches the namespaces below `prefix`. The watch first lists the namespaces that are published now, then
    /// changes.
    pub fn watch_namespaces(&self, prefix: Namespace) -> NamespaceWatch<NamespaceEvent> {
        self.namespaces.watch(prefix)
    }

    /// Watches the tracks below `prefix` that have a publisher. The watch first lists the tracks that exist now, then
    /// new tracks.
    pub fn watch_tracks(&self, prefix: Namespace) -> NamespaceWatch<Arc<LiveTrack>> {
        let present = self.tracks_below(prefix.clone(), LiveTrack::is_established);
        self.namespaces.watch_tracks(prefix, present)
    }

    /// Tells watchers and waiting SUBSCRIBEs that the track has its first publisher.
    pub fn track_established(&self, track: &Arc<LiveTrack>) {
        self.namespaces.announce_track(track);
        self.waiting.wake(track.name());
    }

    /// Makes sure that a publisher serves `track`. Sends SUBSCRIBE to all publishers of its namespace, and returns when
    /// the first one accepts. Waits up to `rendezvous` for a publisher to appear.
    ///
    /// # Errors
    /// Returns an error if nobody publishes the track, or every publisher refused.
    async fn ensure_upstream(
        &self,
        track: &Arc<LiveTrack>,
        requester: Requester,
        rendezvous: Duration,
    ) -> Result<(), RequestError> {
        if rendezvous.is_zero() {
            return self.try_upstream(track, requester).await;
        }
        let deadline = Clock::now() + rendezvous.min(self.limits.max_rendezvous);
        let (mut pause, longest) = PAUSES;
        let is_taking_over = self.is_taking_over();
        loop {
            // The waiter is registered before the search: a publisher that appears during the search wakes it.
            let waiter = self.waiting.wait(track.name());
            let sought = timeout_at(deadline, self.seek(track.name(), requester)).await.unwrap_or(Ok(()));
            match self.try_upstream(track, requester).await {
                // Only the lack of a publisher is worth waiting for. Success and any other refusal are final.
                Err(refusal) if refusal.code == code::Request::DOES_NOT_EXIST => {}
                // The other process of a takeover may have ended while it was asked. The publisher is elsewhere then.
                Err(refusal) if is_taking_over && refusal.code == code::Request::INTERNAL_ERROR => {}
                decided => return decided,
            }
            let next = Clock::now() + pause;
            let look = if is_taking_over { pause } else { SEEK_AGAIN };
            let looks_again = is_taking_over || sought.is_err();
            let again = if looks_again { deadline.min(Clock::now() + look) } else { deadline };
            // A publisher that connects and disconnects quickly causes at most one search per pause.
            let woken = async {
                waiter.woken().await;
                sleep_until(next).await;
            };
            if timeout_at(again, woken).await.is_err() && again == deadline {
                let RequestError { reason, .. } = sought.err().unwrap_or_else(|| self.absent());
                return Err(RequestError::new(code::Request::TIMEOUT, reason));
            }
            pause = (pause * 2).min(longest);
        }
    }

    async fn try_upstream(&self, track: &Arc<LiveTrack>, requester: Requester) -> SubscribeAnswer {
        let looped = || {
            OperatorCounters::count(&self.counters.routes_looped);
            RequestError::new(
                code::Request::DOES_NOT_EXIST,
                "this relay gets the track by way of the one that asks",
            )
        };
        if track.is_asked_by_way_of(requester.hop) {
            // This relay is requesting the track by a route through the requester, so the two relays would wait for
            // each other's answer.
            return Err(looped());
        }
        // One task at a time searches for publishers of a track. A task that waited for this lock usually finds that
        // the track has one.
        let _one_at_a_time = track.connecting.lock().await;
        let is_established = track.is_established();
        if is_established && !self.would_loop(track, requester) {
            return Ok(());
        }
        let Publishers { all: publishers, in_turn } = self.publishers_for(track, requester);
        if is_established {
            // The relay that asks is the source of the track here, and has lost its own. A publisher of this relay may
            // have come from there.
            if in_turn || publishers.is_empty() {
                return Err(looped());
            }
            self.leave_sources(track);
        }
        OperatorCounters::count(&self.counters.publisher_searches);
        if in_turn {
            return self.try_relays(track, publishers).await;
        }
        let (sender, mut answers) = mpsc::channel(publishers.len().max(1));
        for publisher in publishers {
            publisher.subscribe(Arc::clone(track), sender.clone());
        }
        // This task's own sender is dropped, so that `recv` returns `None` once every publisher has answered.
        drop(sender);
        let mut refused = self.absent();
        while let Some(answer) = answers.recv().await {
            match answer {
                Ok(()) => return Ok(()),
                Err(refusal) => refused = refusal,
            }
        }
        Err(refused)
    }

    /// Subscribes to the track at relays of the cluster, one after the other, until one accepts.
    async fn try_relays(
        &self,
        track: &Arc<LiveTrack>,
        relays: Vec<Arc<dyn HubPublisher>>,
    ) -> SubscribeAnswer {
        let mut refused = self.absent();
        for relay in relays {
            // Until the other relay has answered this SUBSCRIBE, requests for the track from relays on the route's hop
            // path are refused. Otherwise the two relays would wait for each other.
            let _asked = track.ask_by_way_of(self.hops_by(track, relay.id()));
            let (sender, mut answers) = mpsc::channel(1);
            relay.subscribe(Arc::clone(track), sender);
            match answers.recv().await {
                Some(Ok(())) => return Ok(()),
                Some(Err(refusal)) => refused = refusal,
                None => {}
            }
        }
        Err(refused)
    }

    /// Returns the publishers at which the relay may subscribe to `track`.
    fn publishers_for(&self, track: &LiveTrack, requester: Requester) -> Publishers {
        let mut publishers = self.publishers_of(track.name().namespace(), requester);
        if !track.may_come_from_upstream() {
            publishers.all.retain(|publisher| !publisher.is_upstream());
        }
        publishers
    }

    /// Subscribes at the other publishers of a track's namespace, after the publisher that served the track's
    /// subscriptions was lost.
    fn replace_publisher(&self, track: &Arc<LiveTrack>) {
        let Publishers { mut all, in_turn } = self.publishers_for(track, Requester::NOBODY);
        if all.is_empty() {
            self.want(track.name().namespace());
        }
        if in_turn {
            // All relays of a cluster deliver the same media, so one of them is enough.
            all.truncate(1);
        }
        for publisher in all {
            publisher.back_up(vec![Arc::clone(track)]);
        }
    }

    /// Subscribes to a track that comes from the other process of a takeover at publishers that are here. A publisher that
    /// has announced its namespace while the other process was asked has not found a track that it could have been added
    /// to.
    pub fn join_publishers(&self, track: &Arc<LiveTrack>) {
        if follows_routes(track) || track.upstreams().iter().any(|upstream| !upstream.is_of_relay) {
            return;
        }
        let Publishers { all, in_turn } = self.publishers_for(track, Requester::NOBODY);
        for publisher in all.iter().filter(|publisher| !in_turn && !publisher.is_upstream()) {
            publisher.back_up(vec![Arc::clone(track)]);
        }
    }

    /// Reports to the watchers of `namespace` that it was withdrawn and published again, because a publisher below it
    /// was restarted. Players then subscribe again.
    pub fn announce_again(&self, namespace: &Namespace) {
        self.namespaces.announce_again(namespace);
    }

    /// Does the periodic work on tracks; call it about twice a second. It resets streams whose groups were dropped from
    /// the cache, ends subscriptions whose wait for a publisher is over, cancels upstream subscriptions without
    /// subscribers, and forgets unused tracks.
    pub fn tidy(&self, now: Instant) {
        self.cache.expire(now);
        let mut outbox = Outbox::default();
        let tracks = self.tracks();
        self.note_carried(&tracks);
        for track in tracks {
            track.drop_evicted(now, &mut outbox);
            if track.is_established() {
                track.copies.expire(now, self.absence() + self.limits.request_timeout);
            }
            if track.end_wait(now) && track.subscription_count() > 0 {
                self.replace_publisher(&track);
            }
            let Some(idle_since) = track.idle_since() else { continue };
            if now.saturating_duration_since(idle_since) < self.limits.linger {
                continue;
            }
            let upstreams = track.upstreams();
            for upstream in upstreams.iter().filter(|upstream| upstream.subscribed) {
                upstream.ask(UpstreamRequest::Cancel);
            }
            // A track that has cached groups serves FETCH until the groups expire.
            let expired = now.saturating_duration_since(idle_since) >= self.cache.limits().age;
            if upstreams.is_empty() && (expired || track.data.held().groups == 0) {
                self.forget(&track);
            }
        }
        outbox.flush();
    }

    fn forget(&self, track: &Arc<LiveTrack>) {
        let mut tracks = self.tracks.write();
        // The two references are the caller's and the map's. Further references are made only under the map's lock,
        // which is held here, so the track is unused.
        if Arc::strong_count(track) <= 2 {
            tracks.remove(track.name());
            drop(tracks);
            self.cache.forget(&track.data);
        }
    }
}

/// Reports whether the track comes from a relay of the cluster, so that [`Hub::follow_routes`] chooses its source.
fn follows_routes(track: &LiveTrack) -> bool {
    track.owner() == Some(RightHolder::Cluster)
}
