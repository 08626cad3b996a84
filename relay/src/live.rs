//! A track: its publishers, its objects in the cache, and its subscriptions.

mod absence;
pub mod copies;
pub mod fill;
mod forwarding;
mod gap;

use std::{
    sync::{
        Arc, Weak,
        atomic::{AtomicU32, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use millrace_moq::{
    HopId, Location, Status, TrackName, code,
    tracks::{
        account::Account,
        cache::TrackCache,
        catalog::ParsedCatalog,
        malformed::TrackMalformed,
        subgroup::{Pushed, SubgroupStream},
        track::{CachedDatagram, CachedGroup, Duplicate, SUBGROUP_COST, Track},
    },
};
use millrace_transport::{
    Outbox,
    offers::PlaceProvider,
    offload::{OffloadIngress, OffloadOpenings},
};
use parking_lot::{Mutex, RwLock};
use tokio::sync::{Notify, watch};
use tracing::info;

pub use self::absence::Numbering;
use self::{absence::Absence, copies::SharedSubgroups, forwarding::Forwarding, gap::TrackGap};
use super::{
    delays::{Delays, TrackDelays},
    subscription::{SubgroupNews, Subscription, SubscriptionEnd, TrackRef},
    upstream::{UpstreamRequest, UpstreamTrack},
};
use millrace_access::policy::RightHolder;

/// How long a decision to move a track keeps the answer of another relay, which was asked before, from counting.
const MOVE: Duration = Duration::from_secs(2);

/// A track with its publishers and subscriptions.
///
/// # Order of calls
///
/// 1. [`Self::claim`] is called for a publisher: the track belongs to the publisher's identity while a [`TrackClaim`]
///    lives.
/// 2. [`Self::prepare`] is called before the publisher's PUBLISH or our SUBSCRIBE is answered. It decides whether the
///    track starts over.
/// 3. [`Self::add_upstream`] is called once the publisher and this relay have agreed on a subscription.
/// 4. [`Self::place`] is called for each group, before any stream or datagram of the group is accepted. Then the
///    group's subgroups and datagrams are added.
/// 5. [`Self::remove_upstream`] or [`Self::supersede`] is called once to remove the publisher, or [`Self::fail`] to end
///    a malformed track.
///
/// Subscribers may come and go at any time. Locks are taken in this order: `subscriptions`, `upstreams`, then
/// `forwarding` or `absence`. A subscription's own lock is taken after `subscriptions`, and a connection's after that.
/// Between calls, a track without publishers either waits for a publisher or has no live subscriptions.
pub struct LiveTrack {
    /// The number that stands for the track in trace events. It is never 0.
    pub number: u32,
    pub data: Arc<Track>,
    cache: Arc<TrackCache>,
    delays: TrackDelays,
    subscriptions: RwLock<Vec<Arc<Subscription>>>,
    /// The publishers' subscriptions. The first one in the list belongs to the leading publisher. The other publishers
    /// send copies of its objects, or are standbys, whose objects are dropped.
    upstreams: Mutex<Vec<Arc<UpstreamTrack>>>,
    /// The publisher whose streams and datagrams the kernel forwards. Locked after `subscriptions` and `upstreams`.
    forwarding: Mutex<Forwarding>,
    /// The subgroups that are arriving, and the streams of other publishers that wait for them.
    pub copies: SharedSubgroups,
    /// Set while the track's subscriptions wait for a publisher to return. Locked after `upstreams`.
    absence: Mutex<Option<Absence>>,
    /// The objects that the track may have missed since its source was lost or has changed.
    pub gap: TrackGap,
    /// This lock is held while the relay searches for publishers of the track, so that there is one search at a time.
    pub connecting: tokio::sync::Mutex<()>,
    /// Notified when an object of the track is complete or a subgroup has ended.
    pub progress: Notify,
    /// Notified when a subgroup of the track has ended.
    pub settled: Notify,
    /// Number of times that the track was found malformed.
    failures: watch::Sender<u64>,
    idle_since: Mutex<Instant>,
    group_request: Mutex<GroupRequest>,
    /// The session at which the relay has unsubscribed for lack of subscribers, if the track has had no publisher
    /// since.
    paused_at: Mutex<Option<u64>>,
    owner: Mutex<Option<TrackOwner>>,
    /// The session with the relay of the cluster at which the relay last decided to subscribe, and the time of this.
    next: Mutex<Option<(u64, Instant)>>,
    /// The hops on the route by which the track is being requested from a relay of the cluster. Empty without such a
    /// request.
    asked: Mutex<Vec<HopId>>,
    /// The newest catalog that was read from the track, if the track is a catalog.
    pub catalog: ParsedCatalog,
}

/// The identity that owns a track while a session with that identity publishes it.
struct TrackOwner {
    identity: RightHolder,
    /// Shared by the owner's [`TrackClaim`]s. Without any, the track has no owner.
    claims: Weak<()>,
}

/// Keeps a track in the ownership of the identity whose session publishes it. When the last claim of the track is
/// dropped, the track has no owner.
pub struct TrackClaim {
    _owner: Option<Arc<()>>,
    /// True if the track belonged to the cluster and has come to a publisher of this relay, or the other way round.
    pub has_passed: bool,
}

impl TrackClaim {
    /// Makes a claim of the other process of a takeover. It does not conflict with the claim of the publisher, which is
    /// moving from one process to the other.
    pub const LINK: Self = Self { _owner: None, has_passed: false };
}

/// A request for the track that is under way at a relay of the cluster. Dropping it marks the request as over.
pub struct ClusterRequest(Arc<LiveTrack>);

impl Drop for ClusterRequest {
    fn drop(&mut self) {
        self.0.asked.lock().clear();
    }
}

/// NEW_GROUP_REQUESTs of subscribers (draft-18, "NEW GROUP REQUEST Parameter").
#[derive(Default)]
struct GroupRequest {
    /// The group of the NEW_GROUP_REQUEST that the next SUBSCRIBE to a publisher contains.
    pending: Option<u64>,
    /// The requested group, and the track's largest group when it was requested. The request is outstanding until the
    /// largest group grows.
    outstanding: Option<(u64, Option<u64>)>,
}

impl LiveTrack {
    pub fn new(name: TrackName, cache: Arc<TrackCache>, delays: TrackDelays, now: Instant) -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(1);
        Self {
            // Number 0 stands for no track, so a counter that wraps around yields 1.
            number: NEXT.fetch_add(1, Relaxed).max(1),
            data: Arc::new(Track::new(name)),
            cache,
            delays,
            subscriptions: RwLock::default(),
            upstreams: Mutex::default(),
            forwarding: Mutex::default(),
            copies: SharedSubgroups::default(),
            absence: Mutex::default(),
            gap: TrackGap::default(),
            connecting: tokio::sync::Mutex::default(),
            progress: Notify::new(),
            settled: Notify::new(),
            failures: watch::Sender::new(0),
            idle_since: Mutex::new(now),
            group_request: Mutex::default(),
            paused_at: Mutex::default(),
            owner: Mutex::default(),
            next: Mutex::default(),
            asked: Mutex::default(),
            catalog: ParsedCatalog::default(),
        }
    }

    pub fn name(&self) -> &TrackName {
        &self.data.name
    }

    /// Sets how long the track's media may wait for slow subscribers.
    pub fn set_delays(&self, delays: &Delays) {
        self.delays.change(delays, self.name().namespace());
    }

    /// Returns what each subscription of the track keeps a reference to: the track's number, its cached objects, and
    /// its limits for late media.
    pub fn reference(&self) -> TrackRef {
        TrackRef { number: self.number, data: Arc::clone(&self.data), delays: self.delays.clone() }
    }

    pub fn subscription_count(&self) -> usize {
        self.subscriptions.read().len()
    }

    pub fn is_established(&self) -> bool {
        !self.upstreams.lock().is_empty()
    }

    pub fn upstreams(&self) -> Vec<Arc<UpstreamTrack>> {
        self.upstreams.lock().clone()
    }

    /// Reports whether `identity` may publish the track. A track belongs to its first publisher's identity until the
    /// last session of that identity stops publishing it. Between a publisher of this relay and the cluster it passes
    /// earlier: when the relay moves the track away from all sessions that publish it.
    pub fn is_open_to(&self, identity: &RightHolder) -> bool {
        self.owner().is_none_or(|owner| owner == *identity || self.may_pass(&owner, identity))
    }

    fn may_pass(&self, owner: &RightHolder, identity: &RightHolder) -> bool {
        let is_between = [owner, identity].contains(&&RightHolder::Cluster);
        is_between && self.upstreams.lock().iter().all(|upstream| upstream.is_leaving())
    }

    /// Returns the identity that the track belongs to.
    pub fn owner(&self) -> Option<RightHolder> {
        let owner = self.owner.lock();
        owner.as_ref().filter(|owner| owner.claims.strong_count() > 0).map(|owner| owner.identity.clone())
    }

    /// Makes `identity` the owner of the track. Returns `None` if another identity owns it. Call it before
    /// [`Self::prepare`].
    pub fn claim(&self, identity: RightHolder) -> Option<TrackClaim> {
        // The lock of the publishers is taken before that of the owner, as elsewhere.
        let passes_from = self.owner().filter(|owner| self.may_pass(owner, &identity));
        let mut owner = self.owner.lock();
        let known = owner.as_ref().and_then(|owner| Some((&owner.identity, owner.claims.upgrade()?)));
        match known {
            Some((known, claims)) if *known == identity => {
                return Some(TrackClaim { _owner: Some(claims), has_passed: false });
            }
            Some((known, _)) if passes_from.as_ref() != Some(known) => return None,
            _ => {}
        }
        let has_passed = known.is_some();
        let claims = Arc::new(());
        *owner = Some(TrackOwner { identity, claims: Arc::downgrade(&claims) });
        Some(TrackClaim { _owner: Some(claims), has_passed })
    }

    /// Records the decision to move the track to the relay with this session.
    pub fn note_move_to(&self, session: u64) {
        *self.next.lock() = Some((session, Instant::now()));
    }

    /// Reports whether the track has just moved on to another relay than that with this session.
    pub fn has_moved_on(&self, session: u64) -> bool {
        self.next.lock().is_some_and(|(next, at)| next != session && at.elapsed() < MOVE)
    }

    /// Records that the track is being requested from a relay, by a route with these hops. There is one such request at
    /// a time.
    pub fn ask_by_way_of(self: &Arc<Self>, hops: Vec<HopId>) -> ClusterRequest {
        *self.asked.lock() = hops;
        ClusterRequest(Arc::clone(self))
    }

    /// Reports whether the track is being requested from a relay whose route passes `hop`.
    pub fn is_asked_by_way_of(&self, hop: HopId) -> bool {
        hop.is_named() && self.asked.lock().contains(&hop)
    }

    /// Prepares the track for a publisher. If the track has no other publisher, it starts over: its cached groups are
    /// dropped. Cached groups stay if subscriptions waited for a publisher, or if we unsubscribed from this same
    /// publisher for lack of subscribers; then only a gap in the groups is recorded.
    pub fn prepare(&self, publisher: u64) {
        let upstreams = self.upstreams.lock();
        if !upstreams.is_empty() {
            return;
        }
        let given_up = self.give_up_waiting();
        if self.is_waiting() {
            self.gap.state.lock().open(&self.data);
            return self.data.missed();
        }
        if *self.paused_at.lock() == Some(publisher) {
            return self.data.missed();
        }
        self.cache.forget(&self.data);
        self.data.restart();
        self.forwarding.lock().renumber();
        drop(upstreams);
        self.close_gap();
        given_up.iter().for_each(|ended| self.end_subscriptions(ended));
    }

    /// Adds a publisher's subscription. `claimed` is the largest location that the publisher named in its answer.
    pub fn add_upstream(&self, upstream: Arc<UpstreamTrack>, claimed: Option<Location>, now: Instant) {
        let mut upstreams = self.upstreams.lock();
        if let Some(absence) = self.end_absence(now) {
            upstream.returns(claimed, absence.unfinished, false);
        }
        let leads = upstreams.iter().all(|other| other.is_leaving());
        if leads && !upstreams.is_empty() {
            self.gap.state.lock().open(&self.data);
        }
        if !leads {
            upstream.follow(self.data.position());
        }
        upstreams.push(upstream);
        self.forwarding.lock().choose(&upstreams);
    }

    /// Goes on with the publisher of a session from which the track was moving away. Returns false if there is none.
    pub fn return_to(&self, session: u64) -> bool {
        let upstreams = self.upstreams.lock();
        let Some(source) = upstreams.iter().find(|source| source.publisher == session).map(Arc::clone) else {
            return false;
        };
        source.stay();
        self.gap.state.lock().open(&self.data);
        drop(upstreams);
        self.hand_over_to(&source, None);
        source.ask(UpstreamRequest::FillGap);
        true
    }

    /// Makes `new` take over from the publishers that the track moves away from. It takes over with the group after the
    /// newest group that any of them has begun, in userspace or the kernel. `largest` is the largest location of `new`.
    pub fn hand_over_to(&self, new: &Arc<UpstreamTrack>, largest: Option<Location>) {
        let upstreams = self.upstreams.lock();
        let mut forwarding = self.forwarding.lock();
        forwarding.choose(&upstreams);
        // The location (0, 0) means that no group has begun.
        let forwarded = Some(forwarding.newest()).filter(|newest| *newest > (0, 0)).map(|newest| newest.0);
        let begun = self.data.largest().max(largest).map(|begun| begun.group).max(forwarded);
        let group = begun.map_or(0, |begun| begun.saturating_add(1));
        for old in upstreams.iter().filter(|old| old.is_leaving() && !Arc::ptr_eq(old, new)) {
            old.hand_over(group, new);
        }
    }

    /// Makes the kernel forward `upstream`, because the publisher that it forwards is silent.
    pub fn forward_from(&self, upstream: &Arc<UpstreamTrack>) {
        let upstreams = self.upstreams.lock();
        if upstreams.iter().any(|other| Arc::ptr_eq(other, upstream)) {
            self.forwarding.lock().prefer(upstream);
        }
    }

    /// Removes a publisher's subscription. After the last publisher, the track's subscriptions end with `ended`. If
    /// that publisher was lost without PUBLISH_DONE, they first wait up to `wait` for another one.
    pub fn remove_upstream(
        &self,
        upstream: &Arc<UpstreamTrack>,
        ended: &SubscriptionEnd,
        wait: Duration,
        now: Instant,
    ) {
        let mut upstreams = self.upstreams.lock();
        if ended.absent && upstreams.iter().any(|other| Arc::ptr_eq(other, upstream)) {
            self.gap.state.lock().doubt(&self.data);
        }
        if self.take_source(&mut upstreams, upstream).is_none() {
            return; // another publisher has taken over the track
        }
        if !upstreams.is_empty() {
            return;
        }
        let waits = ended.absent && !wait.is_zero();
        if waits {
            self.begin_wait(upstream, None, ended, now, wait);
        }
        // `upstreams` stays locked up to here, so that no publisher is added between the removal and the start of the
        // wait.
        *self.idle_since.lock() = now;
        *self.paused_at.lock() = ended.paused.then_some(upstream.publisher);
        drop(upstreams);
        if !waits {
            self.close_gap();
            self.end_subscriptions(ended);
        } else if self.subscription_count() > 0 {
            let track = self.name().typed();
            let seconds = wait.as_secs_f64();
            info!(%track, seconds, "the track's publisher left: subscriptions wait this many seconds (linger) for another publisher");
        }
    }

    /// Ends a malformed track for all subscribers and publishers, and forgets its cached groups (draft-18, "Malformed
    /// Tracks").
    pub fn fail(&self, malformed: TrackMalformed, now: Instant, outbox: &mut Outbox) {
        let ended = SubscriptionEnd::new(code::Done::MALFORMED_TRACK, malformed.to_string());
        for subscription in self.subscriptions.read().iter() {
            subscription.end_of(self.number, &ended);
            // A subscription that was switched to another rendition keeps this track's open streams until their groups
            // expire.
            if subscription.track.number == self.number {
                subscription.cancel(code::Reset::MALFORMED_TRACK);
            }
            subscription.transmit(now, outbox);
        }
        for upstream in self.upstreams() {
            upstream.revoke();
            let _ = upstream.offers.withhold();
            upstream.ask(UpstreamRequest::Cancel);
        }
        self.failures.send_modify(|failures| *failures += 1);
        self.cache.forget(&self.data);
        self.data.restart();
        self.forwarding.lock().renumber();
        self.close_gap();
        outbox.flush();
    }

    /// Returns a receiver that is notified when the track is found malformed.
    pub fn failures(&self) -> watch::Receiver<u64> {
        self.failures.subscribe()
    }

    /// Adds a subscription. It first gets the cached objects in its range of locations (its window), then new objects
    /// as they arrive.
    pub fn subscribe(&self, subscription: Arc<Subscription>, now: Instant, outbox: &mut Outbox) {
        // The lock is held to the end of this function, so an object that arrives meanwhile is sent exactly once: from
        // the cache or as a new object.
        let mut subscriptions = self.subscriptions.write();
        let groups = self.cached(&subscription);
        self.offer_subgroups(&groups, &subscription, now, outbox);
        for object in groups.iter().flat_map(|group| group.datagrams.values()) {
            subscription.offer_datagram(self.number, object, SubgroupNews::Cached, now, outbox);
        }
        if !self.is_established() && !self.is_waiting() {
            subscription.end(SubscriptionEnd::new(code::Done::TRACK_ENDED, "the track ended"));
        }
        self.offer_openings(&subscription);
        subscriptions.push(subscription);
        drop(subscriptions);
        self.openings().iter().for_each(|openings| self.replenish(openings));
    }

    /// Adds a subscription that began with another rendition to those that get this track's new objects. Returns false
    /// if the track has no publisher.
    pub fn join(&self, subscription: &Arc<Subscription>) -> bool {
        let mut subscriptions = self.subscriptions.write();
        if !self.is_established() {
            return false;
        }
        subscription.join(self.number, self.data.largest().map(|largest| largest.group));
        subscriptions.push(Arc::clone(subscription));
        true
    }

    /// Returns the streams that the kernel may open to subscribers by itself, when the publisher begins a stream of the
    /// track. `None` if the kernel does not forward the track.
    fn openings(&self) -> Option<Arc<dyn OffloadOpenings>> {
        self.forwarding.lock().known_openings()
    }

    /// Lets the kernel open streams for a new subscription, too, when the publisher begins streams of the track.
    pub fn offer_openings(&self, subscription: &Subscription) {
        for opening in self.openings().iter().flat_map(|openings| openings.waiting()) {
            if !subscription.prepare(self.number, &opening) {
                opening.set_exclusive(false);
            }
        }
    }

    /// Prepares the kernel for the publisher's next streams: for each such stream it may then open a stream to each
    /// subscriber.
    pub fn replenish(&self, openings: &Arc<dyn OffloadOpenings>) {
        let subscriptions = self.subscriptions.read();
        for _ in 0..openings.missing(subscriptions.len()) {
            let Some(opening) = openings.make() else { return };
            // If the kernel serves every subscriber of the next stream, userspace is not woken for each of its packets.
            let mut exclusive = true;
            for subscription in subscriptions.iter() {
                exclusive &= subscription.prepare(self.number, &opening);
            }
            opening.set_exclusive(exclusive);
            openings.put(opening);
        }
    }

    /// Offers all cached subgroups in the subscription's range of locations (its window) again, because the range was
    /// widened or the subscription was resumed.
    pub fn offer_cached(&self, subscription: &Arc<Subscription>, now: Instant, outbox: &mut Outbox) {
        self.offer_subgroups(&self.cached(subscription), subscription, now, outbox);
    }

    fn offer_subgroups(
        &self,
        groups: &[CachedGroup],
        subscription: &Subscription,
        now: Instant,
        outbox: &mut Outbox,
    ) {
        for subgroup in groups.iter().flat_map(|group| &group.subgroups) {
            subscription.offer(self.number, subgroup, SubgroupNews::Cached, now, outbox);
        }
    }

    /// Returns the cached groups in the subscription's range of locations (its window). Returns none while it is
    /// unknown whether a new publisher continues the group numbering. A new subscriber then begins with that
    /// publisher's next group.
    fn cached(&self, subscription: &Subscription) -> Vec<CachedGroup> {
        if self.upstreams.lock().first().is_some_and(|upstream| upstream.is_unnumbered()) {
            return Vec::new();
        }
        let (first, last) = subscription.group_range();
        self.data.groups(first, last).into_iter().map(|(_, group)| group).collect()
    }

    pub fn unsubscribe(&self, subscription: &Arc<Subscription>, now: Instant) {
        let mut subscriptions = self.subscriptions.write();
        subscriptions.retain(|other| !Arc::ptr_eq(other, subscription));
        if subscriptions.is_empty() {
            *self.idle_since.lock() = now;
        }
    }

    /// Resets the subscriptions' streams whose groups the cache has dropped.
    pub fn drop_evicted(&self, now: Instant, outbox: &mut Outbox) {
        for subscription in self.subscriptions.read().iter() {
            subscription.drop_evicted(now, outbox);
        }
    }

    /// Returns the time at which the last subscriber left. `None` while there are subscribers.
    pub fn idle_since(&self) -> Option<Instant> {
        self.subscriptions.read().is_empty().then(|| *self.idle_since.lock())
    }

    /// Adds a subgroup stream of `upstream` that has begun. Its memory is charged to `account`, the publisher's cache
    /// account. `is_bound`: the kernel forwards the stream already.
    ///
    /// # Errors
    /// Returns an error if the track has a copy of the subgroup already.
    pub fn begin(
        &self,
        now: Instant,
        upstream: &Arc<UpstreamTrack>,
        subgroup: &Arc<SubgroupStream>,
        is_bound: bool,
        account: &Arc<Account>,
    ) -> Result<(), Duplicate> {
        let upstreams = self.upstreams();
        // The lock is held until the track has the subgroup, so that no other copy of the subgroup is added in between.
        let mut forwarding = self.forwarding.lock();
        if forwarding.is_elsewhere(upstream, &upstreams, subgroup.header()) && !is_bound {
            return Err(Duplicate::Arriving);
        }
        if self.data.add_subgroup(now, Arc::clone(subgroup), account)? {
            self.cache.began(now, &Arc::downgrade(&self.data), subgroup.header().group, account);
        }
        forwarding.came_first(upstream, now);
        drop(forwarding);
        self.cache.grew(SUBGROUP_COST);
        Ok(())
    }

    /// Returns the permissions (openings) with which the kernel may forward the next streams of `upstream`. Returns
    /// `None` if it may forward none. `make` creates the permissions. Its argument is the group and subgroup ID of the
    /// newest subgroup that has begun: the permissions apply only to later subgroups.
    pub fn openings_of(
        &self,
        upstream: &UpstreamTrack,
        places: PlaceProvider<'_>,
        make: impl FnOnce((u64, u64)) -> Option<Arc<dyn OffloadOpenings>>,
    ) -> Option<Arc<dyn OffloadOpenings>> {
        let forwarding = self.forwarding.lock();
        upstream.offers.openings(places, || make(forwarding.newest()))
    }

    /// Offers new bytes of a subgroup to all subscriptions, and sends them in one batch. `ingress` is the kernel
    /// engine's handle of the received stream, if the kernel can forward it.
    pub fn advance(
        &self,
        now: Instant,
        subgroup: &Arc<SubgroupStream>,
        pushed: &Pushed,
        ingress: Option<&Arc<dyn OffloadIngress>>,
        outbox: &mut Outbox,
    ) {
        let group = subgroup.header().group;
        if self.data.grew(group, pushed) {
            self.cache.grew(pushed.cost);
        }
        if let Some((Status::EndOfTrack, object)) = pushed.status {
            self.data.ended_at(Location { group, object });
        }
        // The first subscription to be served differs from subgroup to subgroup, so that none is always last. The
        // kernel keeps this order for the subgroup's later packets.
        let subscriptions = self.subscriptions.read();
        let first = subgroup.serial().checked_rem(subscriptions.len() as u64).unwrap_or(0) as usize;
        let (last, front) = subscriptions.split_at(first);
        let mut exclusive = true;
        for subscription in front.iter().chain(last) {
            exclusive &= subscription.offer(self.number, subgroup, SubgroupNews::Grown(ingress), now, outbox);
        }
        drop(subscriptions);
        // If the kernel serves all subscribers, packets of this stream need not wake userspace.
        if let Some(ingress) = ingress {
            ingress.set_exclusive(exclusive);
        }
        outbox.flush();
        self.progress.notify_waiters();
    }

    /// Handles the end of a subgroup, after the last call of [`Self::advance`] for it.
    pub fn settle(
        &self,
        now: Instant,
        subgroup: &Arc<SubgroupStream>,
        ingress: Option<&Arc<dyn OffloadIngress>>,
        outbox: &mut Outbox,
    ) {
        let subscriptions = self.subscriptions.read();
        for subscription in subscriptions.iter() {
            subscription.offer(self.number, subgroup, SubgroupNews::Ended(ingress), now, outbox);
        }
        // A subscription that is added after this call reads the subgroup from the cache, and is not informed about it.
        subgroup.settle();
        drop(subscriptions);
        outbox.flush();
        self.progress.notify_waiters();
        self.settled.notify_waiters();
    }

    /// Adds an object that arrived as a datagram from `upstream`, and sends it to the subscribers. `make` creates the
    /// kernel engine's handle for the track's datagrams.
    pub fn datagram(
        &self,
        upstream: &Arc<UpstreamTrack>,
        object: CachedDatagram,
        places: PlaceProvider<'_>,
        make: impl FnOnce() -> Option<Arc<dyn OffloadIngress>>,
        account: &Arc<Account>,
        outbox: &mut Outbox,
    ) -> Result<(), Duplicate> {
        let now = object.received_at;
        let at = object.location();
        let cost = object.cost();
        // `subscriptions` and `forwarding` stay locked until the object is in the cache, so that the kernel and
        // userspace agree on who forwards it.
        let subscriptions = self.subscriptions.read();
        let forwarding = self.forwarding.lock();
        if !forwarding.takes_datagram(upstream, (at.group, at.object)) {
            return Err(Duplicate::Datagram);
        }
        let (object, fresh) = self.data.add_datagram(object, account)?;
        let ingress = upstream.offers.datagrams(places, make);
        if fresh {
            self.cache.began(now, &Arc::downgrade(&self.data), at.group, account);
        }
        self.cache.grew(cost);
        if let (Some(ingress), Some(largest)) = (&ingress, self.data.last_seen()) {
            ingress.skip_to((largest.group, largest.object));
        }
        for subscription in subscriptions.iter() {
            subscription.offer_datagram(
                self.number,
                &object,
                SubgroupNews::Grown(ingress.as_ref()),
                now,
                outbox,
            );
        }
        drop((forwarding, subscriptions));
        outbox.flush();
        self.progress.notify_waiters();
        Ok(())
    }

    /// Handles a NEW_GROUP_REQUEST. `group` is one more than the largest group that the subscriber knows, or 0 if it
    /// knows none.
    pub fn request_group(&self, group: u64) {
        let largest = self.data.largest().map(|largest| largest.group);
        let mut request = self.group_request.lock();
        // No request is sent if the group exists already, if an equal request is outstanding, or if the publisher does
        // not support the request.
        let stale = group != 0 && largest.is_some_and(|largest| group <= largest);
        let asked = request.outstanding.is_some_and(|(asked, at)| asked >= group && at == largest);
        let dynamic = self.data.parsed_properties().dynamic_groups == Some(true);
        if stale || asked || !dynamic {
            return;
        }
        request.outstanding = Some((group, largest));
        drop(request);
        self.upstreams.lock().iter().for_each(|upstream| upstream.ask(UpstreamRequest::NewGroup(group)));
    }

    /// Stores a NEW_GROUP_REQUEST, to be sent with the SUBSCRIBE that will establish the track.
    pub fn expect_group(&self, group: u64) {
        let mut request = self.group_request.lock();
        request.pending = request.pending.max(Some(group));
    }

    pub fn take_group_request(&self) -> Option<u64> {
        self.group_request.lock().pending.take()
    }
}
