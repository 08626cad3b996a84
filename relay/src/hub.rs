//! What all sessions share: the live tracks, who publishes which namespaces, and who watches them.

mod catalogs;
mod counters;
mod namespaces;
mod pages;
mod publisher;
#[cfg(test)]
mod tests;

use std::{
    collections::BTreeMap,
    ops::Bound::Included,
    sync::Arc,
    time::{Duration, Instant},
};

use millrace_moq::{Namespace, TrackName, code, message::RequestError, tracks::cache::Cache};
use parking_lot::{Mutex, RwLock};
use tokio::{
    sync::mpsc,
    time::{Instant as Clock, sleep_until, timeout_at},
};

use self::pages::Pages;
pub use self::{
    counters::Counters,
    namespaces::{NamespaceEvent, Publication, Watch},
    publisher::{Answer, Fetched, Fetching, Objects, Piece, Publisher, Requester},
};
use super::{Adaptive, Delays, live::LiveTrack, outbox::Outbox, status, upstream::Ask, waiters::Waiters};

/// How soon after a search for publishers that found none the next one may begin: at first, and in the end. However often
/// publishers come and go, a SUBSCRIBE that waits looks for them no more often.
const PAUSES: (Duration, Duration) = (Duration::from_millis(10), Duration::from_secs(1));

/// Limits of the relay as a whole.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    pub max_tracks: usize,
    /// How long an upstream subscription is kept after its last subscriber left.
    pub linger: Duration,
    /// How long subscriptions wait for a publisher that is gone without a word.
    pub absence: Duration,
    /// The longest that a SUBSCRIBE may wait for a publisher, whatever RENDEZVOUS_TIMEOUT asks.
    pub max_rendezvous: Duration,
    /// How long publishers have to answer a request of the relay.
    pub request_timeout: Duration,
}

/// The shared state of a relay.
pub struct Hub {
    pub limits: Limits,
    pub cache: Arc<Cache>,
    /// How long media may wait for a subscriber.
    delays: RwLock<Delays>,
    /// Which renditions stand for each other.
    pub adaptive: Adaptive,
    /// Whether subscribers may name alternates themselves.
    pub switching_sets: bool,
    pub counters: Counters,
    /// For what is logged because of a peer.
    /// The configured upstream relay, as it is now.
    pub upstream: Mutex<Option<status::Upstream>>,
    tracks: Arc<RwLock<Tracks>>,
    namespaces: Arc<namespaces::Namespaces>,
    /// SUBSCRIBEs that wait for a publisher of their track.
    waiting: Waiters<TrackName>,
}

type Tracks = BTreeMap<TrackName, Arc<LiveTrack>>;

impl Hub {
    pub fn new(
        limits: Limits,
        cache: Arc<Cache>,
        delays: Delays,
        adaptive: Adaptive,
        switching_sets: bool,
    ) -> Self {
        Self {
            limits,
            cache,
            delays: RwLock::new(delays),
            adaptive,
            switching_sets,
            counters: Counters::default(),
            upstream: Mutex::default(),
            tracks: Arc::default(),
            namespaces: Arc::default(),
            waiting: Waiters::default(),
        }
    }

    /// How long media may wait from now on.
    pub fn set_delays(&self, delays: Delays) {
        self.delays.write().clone_from(&delays);
        // One that is being made with those of before is here once the lock can be had.
        self.tracks.read().values().for_each(|track| track.set_delays(&delays));
    }

    /// The track of this name, made if it is not there.
    ///
    /// # Errors
    /// The relay has as many tracks as it may have.
    pub fn track(&self, name: &TrackName, now: Instant) -> Result<Arc<LiveTrack>, RequestError> {
        if let Some(track) = self.find_track(name) {
            return Ok(track);
        }
        let mut tracks = self.tracks.write();
        if tracks.len() >= self.limits.max_tracks && !tracks.contains_key(name) {
            return Err(RequestError::new(
                code::Request::EXCESSIVE_LOAD,
                "the relay has no room for another track",
            ));
        }
        let new = || {
            let delays = self.delays.read().of(name.namespace());
            Arc::new(LiveTrack::new(name.clone(), Arc::clone(&self.cache), delays, now))
        };
        Ok(Arc::clone(tracks.entry(name.clone()).or_insert_with(new)))
    }

    /// The track of this name with an established upstream subscription. Waits up to `rendezvous` for a publisher;
    /// `new_group` is a NEW_GROUP_REQUEST for it.
    ///
    /// # Errors
    /// Nobody publishes the track, everybody refused, or there is no room for it.
    pub async fn established(
        &self,
        name: &TrackName,
        requester: Requester,
        rendezvous: Duration,
        new_group: Option<u64>,
    ) -> Result<Arc<LiveTrack>, RequestError> {
        if rendezvous.is_zero() {
            self.check_known(name, requester)?;
        }
        let track = self.track(name, Instant::now())?;
        match new_group {
            Some(group) if track.is_established() => track.request_group(group),
            Some(group) => track.expect_group(group),
            None => {}
        }
        self.ensure_upstream(&track, requester, rendezvous).await?;
        Ok(track)
    }

    /// Refuses what nobody can serve, before anything is made for it.
    ///
    /// # Errors
    /// The track is not here, and nobody publishes its namespace for `requester`.
    pub fn check_known(&self, name: &TrackName, requester: Requester) -> Result<(), RequestError> {
        if self.find_track(name).is_some() || !self.publishers_of(name.namespace(), requester).is_empty() {
            return Ok(());
        }
        Err(self.absent())
    }

    /// What is said of a track that nobody has.
    pub fn absent(&self) -> RequestError {
        let upstream = self.upstream.lock();
        let is_away = upstream.as_ref().is_some_and(|upstream| upstream.session.is_none());
        let reason = match is_away {
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

    /// Registers `publisher` for everything below `namespace`. `fallback`: it is the configured upstream relay.
    pub fn publish(
        &self,
        namespace: Namespace,
        publisher: &Arc<dyn Publisher>,
        fallback: bool,
    ) -> Publication {
        let publication = self.namespaces.publish(namespace.clone(), publisher, fallback);
        if let Included(first) = pages::front(&namespace) {
            self.waiting.wake_range(&first, |name| namespace.is_prefix_of(name.namespace()));
        }
        publication
    }

    /// Subscribes at a publisher that came later to the tracks below `namespace` that others publish already: it serves the
    /// subscriptions that are there too (draft-18, "Publisher Interactions"). `pace` says when the next page of tracks may be
    /// looked at.
    pub async fn subscribe_existing(
        &self,
        namespace: &Namespace,
        publisher: &Arc<dyn Publisher>,
        pace: impl Fn() -> Clock,
    ) {
        let wanted = |track: &LiveTrack| {
            track.subscription_count() > 0 && (track.is_established() || track.is_waiting())
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
            sleep_until(pace()).await;
        }
    }

    /// The `wanted` tracks below `prefix`.
    fn tracks_below(&self, prefix: Namespace, wanted: fn(&LiveTrack) -> bool) -> Pages<Arc<LiveTrack>> {
        let (tracks, mut behind) = (Arc::clone(&self.tracks), pages::front(&prefix));
        Box::new(move || {
            let below = |name: &TrackName| prefix.is_prefix_of(name.namespace());
            let take = |_: &_, track: &Arc<LiveTrack>| wanted(track).then(|| Arc::clone(track));
            pages::page(&tracks.read(), &mut behind, below, take)
        })
    }

    /// Sessions that publish `namespace` or a prefix of it, as `requester` may be sent to them: the
    /// configured upstream only if there is nobody else, and never if it is the requester.
    pub fn publishers_of(&self, namespace: &Namespace, requester: Requester) -> Vec<Arc<dyn Publisher>> {
        self.namespaces.publishers_of(namespace, requester)
    }

    /// Whether anybody but the upstream relay publishes exactly `namespace`.
    pub fn is_published_here(&self, namespace: &Namespace) -> bool {
        self.namespaces.is_published_here(namespace)
    }

    /// Watches the namespaces below `prefix`, those that are there first.
    pub fn watch_namespaces(&self, prefix: Namespace) -> Watch<NamespaceEvent> {
        self.namespaces.watch(prefix)
    }

    /// Watches the tracks below `prefix` that have a publisher, those that are there first.
    pub fn watch_tracks(&self, prefix: Namespace) -> Watch<Arc<LiveTrack>> {
        let present = self.tracks_below(prefix.clone(), LiveTrack::is_established);
        self.namespaces.watch_tracks(prefix, present)
    }

    /// A track has its first publisher.
    pub fn track_established(&self, track: &Arc<LiveTrack>) {
        self.namespaces.announce_track(track);
        self.waiting.wake(track.name());
    }

    /// Makes sure that somebody publishes `track`: asks all its publishers, and returns with the first that
    /// agrees. Waits up to `rendezvous` for a publisher to appear.
    ///
    /// # Errors
    /// Nobody publishes the track, or everybody refused.
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
        loop {
            // Before the look, so that nobody who comes is missed.
            let waiter = self.waiting.wait(track.name());
            match self.try_upstream(track, requester).await {
                Err(refusal) if refusal.code == code::Request::DOES_NOT_EXIST => {}
                decided => return decided,
            }
            let next = Clock::now() + pause;
            let woken = async {
                waiter.woken().await;
                sleep_until(next).await;
            };
            if timeout_at(deadline, woken).await.is_err() {
                return Err(RequestError::new(code::Request::TIMEOUT, "no publisher appeared in time"));
            }
            pause = (pause * 2).min(longest);
        }
    }

    async fn try_upstream(&self, track: &Arc<LiveTrack>, requester: Requester) -> Answer {
        let _one_at_a_time = track.connecting.lock().await;
        if track.is_established() {
            return Ok(());
        }
        Counters::count(&self.counters.publisher_searches);
        let publishers = self.publishers_for(track, requester);
        let (sender, mut answers) = mpsc::channel(publishers.len().max(1));
        for publisher in publishers {
            publisher.subscribe(Arc::clone(track), sender.clone());
        }
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

    /// Returns the publishers that may be asked for `track`.
    fn publishers_for(&self, track: &LiveTrack, requester: Requester) -> Vec<Arc<dyn Publisher>> {
        let mut publishers = self.publishers_of(track.name().namespace(), requester);
        if !track.may_come_from_upstream() {
            publishers.retain(|publisher| !publisher.is_upstream());
        }
        publishers
    }

    /// Asks whoever else publishes the namespace of a track whose subscriptions wait for a publisher.
    fn replace_publisher(&self, track: &Arc<LiveTrack>) {
        let nobody = Requester { session: 0, is_upstream: false };
        for publisher in self.publishers_for(track, nobody) {
            publisher.back_up(vec![Arc::clone(track)]);
        }
    }

    /// Tells watchers of `namespace` that it is withdrawn and published again, as a publisher below it was restarted: players start
    /// over, too.
    pub fn announce_again(&self, namespace: &Namespace) {
        self.namespaces.announce_again(namespace);
    }

    /// Gives up streams over dropped groups. Ends subscriptions that have waited too long for a publisher. Ends upstream subscriptions that nobody has needed for a while, and
    /// forgets tracks that have neither publisher nor subscriber nor cached groups. Call this about twice a second.
    pub fn tidy(&self, now: Instant) {
        self.cache.expire(now);
        let mut outbox = Outbox::default();
        for track in self.tracks() {
            track.drop_evicted(now, &mut outbox);
            if track.end_wait(now) && track.subscription_count() > 0 {
                self.replace_publisher(&track);
            }
            let Some(idle_since) = track.idle_since() else { continue };
            if now.saturating_duration_since(idle_since) < self.limits.linger {
                continue;
            }
            let upstreams = track.upstreams();
            for upstream in upstreams.iter().filter(|upstream| upstream.subscribed) {
                upstream.ask(Ask::Cancel);
            }
            let expired = now.saturating_duration_since(idle_since) >= self.cache.limits().age;
            if upstreams.is_empty() && (expired || track.data.held().groups == 0) {
                self.forget(&track);
            }
        }
        outbox.flush();
    }

    fn forget(&self, track: &Arc<LiveTrack>) {
        let mut tracks = self.tracks.write();
        // Ours and the map's: nobody is about to use it.
        if Arc::strong_count(track) <= 2 {
            tracks.remove(track.name());
            drop(tracks);
            self.cache.forget(&track.data);
        }
    }
}
