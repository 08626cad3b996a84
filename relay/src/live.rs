//! A track: its publishers, its objects in the cache, its subscriptions.

mod absence;

use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use millrace_moq::{
    Location, Status, TrackName, code,
    tracks::{
        account::Account,
        cache::Cache,
        malformed::Malformed,
        subgroup::{Pushed, Subgroup},
        track::{DatagramObject, Duplicate, Group, SUBGROUP_COST, Track},
    },
};
use millrace_transport::offload::{Ingress, Openings};
use parking_lot::{Mutex, RwLock};
use tokio::sync::{Notify, watch};
use tracing::info;

use self::absence::Absence;
pub use self::absence::Numbering;
use super::{
    access::policy::Identity,
    catalog::Parsed,
    delays::{Delays, TrackDelays},
    outbox::Outbox,
    subscription::{Ended, News, Subscription, TrackRef},
    upstream::{Ask, Upstream},
};

/// A track with its publishers and subscriptions.
pub struct LiveTrack {
    /// Stands for the track in traces. Never 0.
    pub number: u32,
    pub data: Arc<Track>,
    cache: Arc<Cache>,
    delays: TrackDelays,
    subscriptions: RwLock<Vec<Arc<Subscription>>>,
    /// The first leads: the others send copies, or stand by.
    upstreams: Mutex<Vec<Arc<Upstream>>>,
    /// Locked behind `upstreams`.
    absence: Mutex<Option<Absence>>,
    /// One attempt at a time to subscribe upstream.
    pub connecting: tokio::sync::Mutex<()>,
    /// Objects became complete or a subgroup ended.
    pub progress: Notify,
    /// A subgroup ended.
    pub settled: Notify,
    /// How often it was found malformed.
    failures: watch::Sender<u64>,
    idle_since: Mutex<Instant>,
    group_request: Mutex<GroupRequest>,
    /// The publisher from which we unsubscribed, if the track has been without one since.
    paused_at: Mutex<Option<u64>>,
    owner: Mutex<Option<Owner>>,
    /// What it says if it is a catalog.
    pub catalog: Parsed,
}

/// Whose track it is, while somebody of that identity publishes it.
struct Owner {
    identity: Identity,
    claims: usize,
}

/// A part in a track's ownership; given back when dropped.
pub struct Claim(Arc<LiveTrack>);

impl Drop for Claim {
    fn drop(&mut self) {
        let mut owner = self.0.owner.lock();
        if let Some(one) = owner.as_mut() {
            one.claims -= 1;
        }
        owner.take_if(|owner| owner.claims == 0);
    }
}

/// NEW_GROUP_REQUESTs of subscribers (draft-18, "NEW GROUP REQUEST Parameter").
#[derive(Default)]
struct GroupRequest {
    /// To go with the next SUBSCRIBE upstream.
    pending: Option<u64>,
    /// Sent, and the largest group at the time: outstanding until that grows.
    outstanding: Option<(u64, Option<u64>)>,
}

impl LiveTrack {
    pub fn new(name: TrackName, cache: Arc<Cache>, delays: TrackDelays, now: Instant) -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(1);
        Self {
            number: NEXT.fetch_add(1, Relaxed).max(1),
            data: Arc::new(Track::new(name)),
            cache,
            delays,
            subscriptions: RwLock::default(),
            upstreams: Mutex::default(),
            absence: Mutex::default(),
            connecting: tokio::sync::Mutex::default(),
            progress: Notify::new(),
            settled: Notify::new(),
            failures: watch::Sender::new(0),
            idle_since: Mutex::new(now),
            group_request: Mutex::default(),
            paused_at: Mutex::default(),
            owner: Mutex::default(),
            catalog: Parsed::default(),
        }
    }

    pub fn name(&self) -> &TrackName {
        &self.data.name
    }

    /// How long its media may wait from now on.
    pub fn set_delays(&self, delays: &Delays) {
        self.delays.change(delays, self.name().namespace());
    }

    /// What its subscriptions know of it.
    pub fn reference(&self) -> TrackRef {
        TrackRef { number: self.number, data: Arc::clone(&self.data), delays: self.delays.clone() }
    }

    pub fn subscription_count(&self) -> usize {
        self.subscriptions.read().len()
    }

    pub fn is_established(&self) -> bool {
        !self.upstreams.lock().is_empty()
    }

    pub fn upstreams(&self) -> Vec<Arc<Upstream>> {
        self.upstreams.lock().clone()
    }

    /// Whether `identity` may publish it: it belongs to whom published it first, as long as that goes on.
    pub fn is_open_to(&self, identity: &Identity) -> bool {
        self.owner.lock().as_ref().is_none_or(|owner| owner.identity == *identity)
    }

    /// Who publishes it.
    pub fn owner(&self) -> Option<Identity> {
        self.owner.lock().as_ref().map(|owner| owner.identity.clone())
    }

    /// `identity` publishes it from now on; `None` if it is another's. Asked before [`Self::prepare`].
    pub fn claim(self: &Arc<Self>, identity: Identity) -> Option<Claim> {
        let mut owner = self.owner.lock();
        let owner = owner.get_or_insert(Owner { identity: identity.clone(), claims: 0 });
        if owner.identity != identity {
            return None;
        }
        owner.claims += 1;
        Some(Claim(Arc::clone(self)))
    }

    /// A publisher is about to publish the track. With the first one the track starts over. Only a gap is left if subscriptions have
    /// waited for it, or if we unsubscribed from it for want of subscribers.
    pub fn prepare(&self, publisher: u64) {
        let upstreams = self.upstreams.lock();
        if !upstreams.is_empty() {
            return;
        }
        let given_up = self.give_up_waiting();
        if *self.paused_at.lock() == Some(publisher) || self.is_waiting() {
            return self.data.missed();
        }
        self.cache.forget(&self.data);
        self.data.restart();
        drop(upstreams);
        given_up.iter().for_each(|ended| self.end_subscriptions(ended));
    }

    /// An upstream subscription was established, whose publisher says that it is at `claimed`. The kernel forwards datagrams and
    /// opens streams only while there is no other: it cannot tell that another publisher has sent the same before.
    pub fn add_upstream(&self, upstream: Arc<Upstream>, claimed: Option<Location>, now: Instant) {
        let mut upstreams = self.upstreams.lock();
        if let Some(absence) = self.end_absence(now) {
            upstream.returns(claimed, absence.unfinished);
        }
        let leads = upstreams.iter().all(|other| other.is_leaving());
        upstream.set_rival(!leads);
        upstreams.push(upstream);
        if upstreams.len() > 1 {
            upstreams.iter().for_each(|upstream| upstream.withhold());
        }
    }

    /// Has `new`, whose publisher is at `largest`, go on where those end whose publishers want to be left: with the group
    /// behind all that any of them has begun.
    pub fn hand_over_to(&self, new: &Arc<Upstream>, largest: Option<Location>) {
        let begun = self.data.largest().max(largest);
        let group = begun.map_or(0, |begun| begun.group.saturating_add(1));
        let upstreams = self.upstreams.lock();
        for old in upstreams.iter().filter(|old| old.is_leaving() && !Arc::ptr_eq(old, new)) {
            old.hand_over(group, new);
        }
    }

    /// An upstream subscription is over. With the last one, the subscriptions end as it did; if its publisher is gone without a
    /// word, they `wait` for so long for another one first.
    pub fn remove_upstream(&self, upstream: &Arc<Upstream>, ended: &Ended, wait: Duration, now: Instant) {
        let mut upstreams = self.upstreams.lock();
        let Some(place) = upstreams.iter().position(|other| Arc::ptr_eq(other, upstream)) else {
            return; // another publisher has taken over
        };
        upstreams.remove(place);
        upstream.withhold();
        if let Some(first) = upstreams.first() {
            return if place == 0 {
                first.lead()
            };
        }
        let waits = ended.absent && !wait.is_zero();
        if waits {
            self.begin_wait(upstream, None, ended, (now, wait));
        }
        *self.idle_since.lock() = now;
        *self.paused_at.lock() = ended.paused.then_some(upstream.publisher);
        drop(upstreams);
        if !waits {
            self.end_subscriptions(ended);
        } else if self.subscription_count() > 0 {
            let (track, seconds) = (self.name().typed(), wait.as_secs_f64());
            info!(%track, seconds, "the publisher is gone: subscriptions wait for another one for so long (linger)");
        }
    }

    /// A publisher has shown that the track is malformed: it ends for everybody, and nothing is kept of it (draft-18,
    /// "Malformed Tracks").
    pub fn fail(&self, malformed: Malformed, now: Instant, outbox: &mut Outbox) {
        let ended = Ended::new(code::Done::MALFORMED_TRACK, malformed.to_string());
        for subscription in self.subscriptions.read().iter() {
            subscription.end_of(self.number, &ended);
            // Of who gets another rendition, the streams of this one end as their groups go.
            if subscription.track.number == self.number {
                subscription.cancel(code::Reset::MALFORMED_TRACK);
            }
            subscription.transmit(now, outbox);
        }
        for upstream in self.upstreams() {
            upstream.revoke();
            upstream.withhold();
            upstream.ask(Ask::Cancel);
        }
        self.failures.send_modify(|failures| *failures += 1);
        self.cache.forget(&self.data);
        self.data.restart();
        outbox.flush();
    }

    /// Changes when the track is found malformed.
    pub fn failures(&self) -> watch::Receiver<u64> {
        self.failures.subscribe()
    }

    /// Sends to `subscription` what the cache holds of its window, and from now on all that comes.
    pub fn subscribe(&self, subscription: Arc<Subscription>, now: Instant, outbox: &mut Outbox) {
        let mut subscriptions = self.subscriptions.write();
        let groups = self.cached(&subscription);
        self.offer_subgroups(&groups, &subscription, now, outbox);
        for object in groups.iter().flat_map(|group| group.datagrams.values()) {
            subscription.offer_datagram(self.number, object, News::Cached, now, outbox);
        }
        if !self.is_established() && !self.is_waiting() {
            subscription.end(Ended::new(code::Done::TRACK_ENDED, "the track ended"));
        }
        self.offer_openings(&subscription);
        subscriptions.push(subscription);
        drop(subscriptions);
        self.openings().iter().for_each(|openings| self.replenish(openings));
    }

    /// Tells `subscription`, which is of another rendition, of what comes from now on. Returns whether anything will.
    pub fn join(&self, subscription: &Arc<Subscription>) -> bool {
        let mut subscriptions = self.subscriptions.write();
        if !self.is_established() {
            return false;
        }
        subscription.join(self.number, self.data.largest().map(|largest| largest.group));
        subscriptions.push(Arc::clone(subscription));
        true
    }

    /// What the offload may open streams for, if it has been told.
    fn openings(&self) -> Option<Arc<dyn Openings>> {
        self.upstreams.lock().first().and_then(|upstream| upstream.known_openings())
    }

    /// Has the offload open streams for a subscription where it may do so for others already.
    pub fn offer_openings(&self, subscription: &Subscription) {
        for opening in self.openings().iter().flat_map(|openings| openings.waiting()) {
            if !subscription.prepare(self.number, &opening) {
                opening.set_exclusive(false);
            }
        }
    }

    /// Has the offload open streams for those that begin next.
    pub fn replenish(&self, openings: &Arc<dyn Openings>) {
        let subscriptions = self.subscriptions.read();
        for _ in 0..openings.missing(subscriptions.len()) {
            let Some(opening) = openings.make() else { return };
            let mut exclusive = true;
            for subscription in subscriptions.iter() {
                exclusive &= subscription.prepare(self.number, &opening);
            }
            opening.set_exclusive(exclusive);
            openings.put(opening);
        }
    }

    /// Offers every cached subgroup of the subscription's window again, after it was widened or resumed.
    pub fn offer_cached(&self, subscription: &Arc<Subscription>, now: Instant, outbox: &mut Outbox) {
        self.offer_subgroups(&self.cached(subscription), subscription, now, outbox);
    }

    fn offer_subgroups(
        &self,
        groups: &[Group],
        subscription: &Subscription,
        now: Instant,
        outbox: &mut Outbox,
    ) {
        for subgroup in groups.iter().flat_map(|group| &group.subgroups) {
            subscription.offer(self.number, subgroup, News::Cached, now, outbox);
        }
    }

    /// What the cache holds of the subscription's window. Nothing while the publisher has taken over from another one and has not shown
    /// whether its groups are those: who comes then begins with the publisher's next group.
    fn cached(&self, subscription: &Subscription) -> Vec<Group> {
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

    /// Ends the subscriptions' streams over what the cache has dropped.
    pub fn drop_evicted(&self, now: Instant, outbox: &mut Outbox) {
        for subscription in self.subscriptions.read().iter() {
            subscription.drop_evicted(now, outbox);
        }
    }

    /// Since when nobody has been subscribed; `None` while somebody is.
    pub fn idle_since(&self) -> Option<Instant> {
        self.subscriptions.read().is_empty().then(|| *self.idle_since.lock())
    }

    /// A subgroup stream began; the memory is counted against `account`, its publisher's.
    ///
    /// # Errors
    /// It is a second copy of one that is here.
    pub fn begin(
        &self,
        now: Instant,
        subgroup: &Arc<Subgroup>,
        account: &Arc<Account>,
    ) -> Result<(), Duplicate> {
        if self.data.add_subgroup(now, Arc::clone(subgroup), account)? {
            self.cache.began(now, &Arc::downgrade(&self.data), subgroup.header().group, account);
        }
        self.cache.grew(SUBGROUP_COST);
        Ok(())
    }

    /// A subgroup grew: offers it to every subscription, and sends in one batch. `ingress` is the stream that it arrives on,
    /// if the kernel can forward that.
    pub fn advance(
        &self,
        now: Instant,
        subgroup: &Arc<Subgroup>,
        pushed: &Pushed,
        ingress: Option<&Arc<dyn Ingress>>,
        outbox: &mut Outbox,
    ) {
        let group = subgroup.header().group;
        if self.data.grew(group, pushed) {
            self.cache.grew(pushed.cost);
        }
        if let Some((Status::EndOfTrack, object)) = pushed.status {
            self.data.ended_at(Location { group, object });
        }
        // Who comes first is another one in every subgroup, in which the kernel follows the order of this.
        let subscriptions = self.subscriptions.read();
        let first = subgroup.serial().checked_rem(subscriptions.len() as u64).unwrap_or(0) as usize;
        let (last, front) = subscriptions.split_at(first);
        let mut exclusive = true;
        for subscription in front.iter().chain(last) {
            exclusive &= subscription.offer(self.number, subgroup, News::Grown(ingress), now, outbox);
        }
        drop(subscriptions);
        if let Some(ingress) = ingress {
            ingress.set_exclusive(exclusive);
        }
        outbox.flush();
        self.progress.notify_waiters();
    }

    /// A subgroup ended, after it had grown for the last time.
    pub fn settle(
        &self,
        now: Instant,
        subgroup: &Arc<Subgroup>,
        ingress: Option<&Arc<dyn Ingress>>,
        outbox: &mut Outbox,
    ) {
        let subscriptions = self.subscriptions.read();
        for subscription in subscriptions.iter() {
            subscription.offer(self.number, subgroup, News::Ended(ingress), now, outbox);
        }
        // Who subscribes from now on will not hear of it.
        subgroup.settle();
        drop(subscriptions);
        outbox.flush();
        self.progress.notify_waiters();
        self.settled.notify_waiters();
    }

    /// An object came as a datagram. `ingress` is what it came with, if the offload can forward that.
    pub fn datagram(
        &self,
        object: DatagramObject,
        ingress: Option<&Arc<dyn Ingress>>,
        account: &Arc<Account>,
        outbox: &mut Outbox,
    ) -> Result<(), Duplicate> {
        let now = object.received_at;
        let cost = object.cost();
        let (object, fresh) = self.data.add_datagram(object, account)?;
        if fresh {
            self.cache.began(now, &Arc::downgrade(&self.data), object.location().group, account);
        }
        self.cache.grew(cost);
        for subscription in self.subscriptions.read().iter() {
            subscription.offer_datagram(self.number, &object, News::Grown(ingress), now, outbox);
        }
        outbox.flush();
        self.progress.notify_waiters();
        Ok(())
    }

    /// A subscriber wants a new group to begin, and knows of none from `group` on (0: of none at all).
    pub fn request_group(&self, group: u64) {
        let largest = self.data.largest().map(|largest| largest.group);
        let mut request = self.group_request.lock();
        let stale = group != 0 && largest.is_some_and(|largest| group <= largest);
        let asked = request.outstanding.is_some_and(|(asked, at)| asked >= group && at == largest);
        let dynamic = self.data.parsed_properties().dynamic_groups == Some(true);
        if stale || asked || !dynamic {
            return;
        }
        request.outstanding = Some((group, largest));
        drop(request);
        self.upstreams.lock().iter().for_each(|upstream| upstream.ask(Ask::NewGroup(group)));
    }

    /// Keeps a NEW_GROUP_REQUEST for the SUBSCRIBE that will establish the track.
    pub fn expect_group(&self, group: u64) {
        let mut request = self.group_request.lock();
        request.pending = request.pending.max(Some(group));
    }

    pub fn take_group_request(&self) -> Option<u64> {
        self.group_request.lock().pending.take()
    }
}
