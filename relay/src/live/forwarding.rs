//! Chooses the publisher whose new streams and datagrams the kernel forwards.
//!
//! A track may have several publishers with the same objects. The kernel forwards the objects of one, the *forwarded*
//! publisher, and does not see what the others send. Userspace accepts an object from another publisher unless the
//! kernel has forwarded it already. For this, userspace *claims* each of their subgroups and datagrams at the forwarded
//! publisher's [`OffloadOpenings`] or [`OffloadIngress`](millrace_transport::offload::OffloadIngress), which then do
//! not forward it any more. One lock covers the check and the claim, so that no stream begins between them.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use millrace_moq::{SubgroupHeader, SubgroupId};
use millrace_transport::offload::OffloadOpenings;

use crate::upstream::UpstreamTrack;

/// How many subgroups in a row, and for how long, another publisher has to deliver first before the kernel forwards
/// that publisher instead.
const AHEAD: (u32, Duration) = (4, Duration::from_secs(2));

/// The publisher whose streams the kernel forwards, and the observations by which another publisher may replace it.
#[derive(Default)]
pub(super) struct Forwarding {
    upstream: Option<Arc<UpstreamTrack>>,
    /// The newest subgroup that has begun at any publisher, as group and subgroup ID. (0, 0) if there is none.
    newest: (u64, u64),
    /// A publisher that has begun the latest subgroups before all others: its session, the time of the first of these
    /// subgroups, and their number.
    ahead: Option<(u64, Instant, u32)>,
}

impl Forwarding {
    pub fn is(&self, upstream: &Arc<UpstreamTrack>) -> bool {
        self.upstream.as_ref().is_some_and(|forwarded| Arc::ptr_eq(forwarded, upstream))
    }

    pub fn known_openings(&self) -> Option<Arc<dyn OffloadOpenings>> {
        self.upstream.as_ref()?.offers.known_openings()
    }

    /// Makes the kernel forward the publisher `next`. The kernel then opens streams only for subgroups after the newest
    /// one that it has forwarded.
    fn switch_to(&mut self, next: Option<Arc<UpstreamTrack>>) {
        // `withhold` stops the kernel from forwarding further streams of the old publisher. Returns the last subgroup
        // that the kernel forwards from it.
        let last = self.upstream.take().and_then(|upstream| upstream.offers.withhold());
        self.newest = self.newest.max(last.unwrap_or_default());
        self.ahead = None;
        next.iter().for_each(|next| next.offers.allow());
        self.upstream = next;
    }

    /// Returns the newest subgroup that has begun, as group and subgroup ID.
    pub fn newest(&self) -> (u64, u64) {
        self.newest
    }

    /// Chooses the forwarded publisher: the present one, unless it is a standby, whose objects are dropped, or the
    /// track is being moved away from it. If every publisher is a standby or is being replaced, the present one stays.
    pub fn choose(&mut self, upstreams: &[Arc<UpstreamTrack>]) {
        let is_fit = |upstream: &&Arc<UpstreamTrack>| !upstream.is_leaving() && !upstream.stands_by();
        let present = upstreams.iter().find(|upstream| self.is(upstream));
        let best = present.filter(is_fit).or(upstreams.iter().find(is_fit)).or(present).or(upstreams.first());
        if !best.is_some_and(|best| self.is(best)) {
            self.switch_to(best.cloned());
        }
    }

    /// Forgets the newest subgroup, because the track's group numbering starts over.
    pub fn renumber(&mut self) {
        self.newest = (0, 0);
    }

    /// Reports whether the kernel forwards or will forward a copy of this subgroup. If not, claims the subgroup, so
    /// that the kernel never forwards a copy. `upstreams` are all publishers of the track.
    pub fn is_elsewhere(
        &mut self,
        upstream: &Arc<UpstreamTrack>,
        upstreams: &[Arc<UpstreamTrack>],
        header: &SubgroupHeader,
    ) -> bool {
        let others = || upstreams.iter().chain(&self.upstream).filter(|other| !Arc::ptr_eq(other, upstream));
        let is_alone = others().next().is_none();
        let (begun, is_named) = match header.subgroup {
            SubgroupId::Explicit(id) => ((header.group, id), true),
            SubgroupId::Zero => ((header.group, 0), true),
            // The subgroup ID is the ID of the subgroup's first object, which has not been read yet. A claim of the
            // largest ID covers all subgroups of the group.
            SubgroupId::FirstObject => ((header.group, if is_alone { 0 } else { u64::MAX }), false),
        };
        let claimed = self.known_openings().is_none_or(|openings| openings.claim(begun));
        let is_new = claimed && is_named && begun > self.newest;
        // Another publisher has a stream that the track does not know yet. It may be a copy of the same subgroup.
        let is_elsewhere = !is_new && others().any(|other| other.has_entering());
        if !is_elsewhere {
            self.newest = self.newest.max(begun);
        }
        is_elsewhere
    }

    /// Records that `upstream` was the first publisher to begin a subgroup. If the publisher is ahead of the others for
    /// long enough, the kernel forwards its streams instead.
    pub fn came_first(&mut self, upstream: &Arc<UpstreamTrack>, now: Instant) {
        if self.is(upstream) {
            self.ahead = None;
            return;
        }
        let before = self.ahead.filter(|(session, ..)| *session == upstream.publisher);
        let (session, since, count) = before.unwrap_or((upstream.publisher, now, 0));
        self.ahead = Some((session, since, count + 1));
        let is_ahead = count + 1 >= AHEAD.0 && now.saturating_duration_since(since) >= AHEAD.1;
        if is_ahead {
            self.prefer(upstream);
        }
    }

    /// Makes the kernel forward `upstream`, unless it is about to leave or its objects are dropped.
    pub fn prefer(&mut self, upstream: &Arc<UpstreamTrack>) {
        if !self.is(upstream) && !upstream.is_leaving() && !upstream.stands_by() {
            self.switch_to(Some(Arc::clone(upstream)));
        }
    }

    /// Claims an object that arrived as a datagram from `upstream`. Returns false if the kernel has forwarded a copy of
    /// it.
    pub fn takes_datagram(&self, upstream: &Arc<UpstreamTrack>, object: (u64, u64)) -> bool {
        let known = self.upstream.as_ref().and_then(|forwarded| forwarded.offers.known_datagrams());
        self.is(upstream) || known.is_none_or(|known| known.claim_object(object))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{
        Weak,
        atomic::{AtomicBool, Ordering::Relaxed},
    };

    use millrace_moq::{
        Namespace, TrackName,
        tracks::{
            account::Account,
            cache::{CacheLimits, TrackCache},
            subgroup::{SubgroupReceiver, SubgroupStream},
            track::Duplicate,
        },
    };
    use millrace_transport::offload::{OffloadIngress, OffloadResult};
    use parking_lot::Mutex;
    use tokio::sync::Semaphore;

    use super::*;
    use crate::{Delays, live::LiveTrack, subscription::SubscriptionEnd, upstream::UpstreamSession};

    /// A fake of the offload's openings (streams that it may forward by itself). Each test decides which subgroups are
    /// forwarded.
    struct FakeOpenings {
        last: Mutex<(u64, u64)>,
        is_closed: AtomicBool,
        has_bound: AtomicBool,
    }

    impl FakeOpenings {
        /// Makes the fake offload forward a subgroup that userspace has not read.
        fn bind(&self, subgroup: (u64, u64)) {
            assert!(!self.is_closed.load(Relaxed) && self.claim(subgroup));
            self.has_bound.store(true, Relaxed);
        }
    }

    impl OffloadResult for FakeOpenings {
        fn is_over(&self) -> bool {
            false
        }
    }

    impl OffloadOpenings for FakeOpenings {
        fn missing(&self, _subscribers: usize) -> usize {
            0
        }
        fn make(&self) -> Option<Arc<dyn OffloadIngress>> {
            None
        }
        fn put(&self, _opening: Arc<dyn OffloadIngress>) {}
        fn waiting(&self) -> Vec<Arc<dyn OffloadIngress>> {
            Vec::new()
        }
        fn claim(&self, subgroup: (u64, u64)) -> bool {
            let mut last = self.last.lock();
            let is_next = subgroup > *last;
            *last = subgroup.max(*last);
            is_next
        }
        fn close(&self) -> (u64, u64) {
            self.is_closed.store(true, Relaxed);
            *self.last.lock()
        }
        fn has_bound(&self) -> bool {
            self.has_bound.load(Relaxed)
        }
    }

    struct ForwardingScene {
        track: Arc<LiveTrack>,
        account: Arc<Account>,
        now: Instant,
        /// The subgroups that have begun. A subgroup ends when its writer is dropped.
        writers: Mutex<Vec<SubgroupReceiver>>,
    }

    impl ForwardingScene {
        fn new() -> Self {
            let now = Instant::now();
            let namespace = Namespace::from_path("live").unwrap();
            let cache =
                Arc::new(TrackCache::new(CacheLimits { bytes: 1 << 20, age: Duration::from_secs(1) }));
            let delays = Delays::default().namespace_delays(&namespace);
            let track =
                Arc::new(LiveTrack::new(TrackName::new(namespace, "video").unwrap(), cache, delays, now));
            Self { track, account: Arc::default(), now, writers: Mutex::default() }
        }

        fn publisher(&self, session: u64) -> Arc<UpstreamTrack> {
            let place =
                UpstreamSession { session, is_upstream: false, is_relay: false, connection: Weak::new() };
            let upstream = UpstreamTrack::new(place, 1, true).0;
            self.track.add_upstream(Arc::clone(&upstream), None, self.now);
            upstream
        }

        /// Begins a subgroup with this ID, which contains one object.
        fn begin(&self, upstream: &Arc<UpstreamTrack>, group: u64, id: u64) -> Result<(), Duplicate> {
            let header = SubgroupHeader {
                alias: 1,
                group,
                subgroup: SubgroupId::Explicit(id),
                priority: None,
                properties: false,
                end_of_group: false,
                first_object: true,
            };
            let writer = SubgroupStream::begin(header, 3);
            let begun = self.track.begin(self.now, upstream, writer.subgroup(), false, &self.account);
            self.writers.lock().push(writer);
            begun
        }

        /// Returns the fake of the permission to forward a publisher's next streams, or `None` if the kernel may not
        /// forward them.
        fn openings(&self, upstream: &UpstreamTrack) -> Option<Arc<FakeOpenings>> {
            let places = Arc::new(Semaphore::new(1));
            let mut made = None;
            let places = || Arc::clone(&places).try_acquire_owned().ok();
            self.track.openings_of(upstream, &places, |last| {
                let fake = FakeOpenings {
                    last: Mutex::new(last),
                    is_closed: AtomicBool::new(false),
                    has_bound: AtomicBool::new(false),
                };
                Some(made.insert(Arc::new(fake)).clone())
            });
            made
        }
    }

    #[test]
    fn kernel_forwarding_of_a_publisher_survives_a_second_one_that_leaves() {
        let scene = ForwardingScene::new();
        let first = scene.publisher(1);
        scene.begin(&first, 1, 0).unwrap();
        let openings = scene.openings(&first).expect("it is alone");
        let second = scene.publisher(2);
        assert!(scene.openings(&second).is_none() && first.offers.known_openings().is_some());
        let ended = SubscriptionEnd::new(millrace_moq::code::Done::TRACK_ENDED, "");
        scene.track.remove_upstream(&second, &ended, Duration::ZERO, scene.now);
        assert!(first.offers.known_openings().is_some() && !openings.is_closed.load(Relaxed));
    }

    #[test]
    fn second_publishers_subgroup_begins_only_if_not_kernel_forwarded() {
        let scene = ForwardingScene::new();
        let first = scene.publisher(1);
        let second = scene.publisher(2);
        let openings = scene.openings(&first).expect("it leads");
        openings.bind((1, 0));
        assert_eq!(
            scene.begin(&second, 1, 0),
            Err(Duplicate::Arriving),
            "it is not known here what was bound"
        );
        // The track has kept the kernel from forwarding this subgroup before the other publisher's copy of it arrived.
        assert_eq!(scene.begin(&second, 1, 1), Ok(()));
        assert!(!openings.claim((1, 1)));
        let entering = first.enter();
        openings.has_bound.store(false, Relaxed);
        assert_eq!(scene.begin(&second, 1, 0), Err(Duplicate::Arriving), "it is read, and has yet to begin");
        scene.begin(&first, 1, 0).unwrap();
        drop(entering);
        assert_eq!(scene.begin(&second, 1, 0), Err(Duplicate::Arriving), "the track has it");
    }

    #[test]
    fn replacing_publisher_is_forwarded_only_after_the_newest_sent_group() {
        let scene = ForwardingScene::new();
        let old = scene.publisher(1);
        let openings = scene.openings(&old).expect("it is alone");
        openings.bind((5, 3));
        old.leave();
        let new = scene.publisher(2);
        scene.track.hand_over_to(&new, None);
        assert!(openings.is_closed.load(Relaxed) && scene.openings(&old).is_none());
        assert!(!old.has_handed_over(5) && old.has_handed_over(6));
        assert_eq!(*scene.openings(&new).expect("it is the next").last.lock(), (5, 3));
        assert_eq!(
            scene.begin(&new, 5, 3),
            Err(Duplicate::Arriving),
            "the offload has forwarded the old one's"
        );
        // The new publisher disappears before its first group, so the old one continues.
        let ended = SubscriptionEnd::new(millrace_moq::code::Done::TRACK_ENDED, "");
        scene.track.remove_upstream(&new, &ended, Duration::ZERO, scene.now);
        assert!(scene.openings(&old).is_some());
    }

    #[test]
    fn kernel_forwarding_moves_to_the_publisher_that_stays_ahead() {
        let mut scene = ForwardingScene::new();
        let first = scene.publisher(1);
        let second = scene.publisher(2);
        let openings = scene.openings(&first).expect("it leads");
        for group in 1..=AHEAD.0.into() {
            scene.begin(&second, group, 0).unwrap();
        }
        assert!(!openings.is_closed.load(Relaxed), "it has been for a moment only");
        scene.begin(&first, 10, 0).unwrap();
        for group in 11..=10 + u64::from(AHEAD.0) {
            assert!(!openings.is_closed.load(Relaxed));
            scene.begin(&second, group, 0).unwrap();
            scene.now += AHEAD.1;
        }
        assert!(openings.is_closed.load(Relaxed) && scene.openings(&second).is_some());
    }
}
