//! Handles publishers that disappear and return. Subscriptions wait for the next publisher, which may number its groups
//! differently.
//!
//! A track is *established* while it has publishers, and *waiting* from the loss of the last publisher until another
//! one comes or the wait times out. Otherwise it has no publisher and no live subscriptions.
//! [`LiveTrack::remove_upstream`] and [`LiveTrack::supersede`] begin a wait, [`LiveTrack::add_upstream`] and
//! [`LiveTrack::end_wait`] end it.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use millrace_moq::{code, tracks::track::GROUP_SLACK};
use millrace_quic::plane::source::SourceEnd;
use tracing::info;

use super::LiveTrack;
use crate::{
    subscription::{SubgroupNews, SubscriptionEnd},
    upstream::{Unfinished, UpstreamRequest, UpstreamTrack},
};
use millrace_access::policy::RightHolder;
use millrace_transport::Outbox;

/// The shortest wait of subscriptions for a publisher, after a publisher that no longer answered was replaced by
/// another one.
const TAKEOVER: Duration = Duration::from_secs(1);

/// How many groups one upstream relay may lag behind another. A group within this distance is a copy; an older group
/// shows that the publisher was restarted.
const UPSTREAM_LAG: u64 = 1;

/// The state of a track that waits for a publisher.
pub(super) struct Absence {
    since: Instant,
    until: Instant,
    /// The reason with which the subscriptions end if no publisher appears in time.
    ended: SubscriptionEnd,
    /// True if the publisher that was lost is the configured upstream relay.
    was_upstream: bool,
    /// The owner of the track when its publisher was lost. Only a publisher with the same owner may continue the
    /// subscriptions.
    owner: Option<RightHolder>,
    /// Open streams of a silent publisher, which another publisher may complete.
    pub(super) unfinished: Option<Unfinished>,
}

/// The relation of a publisher's group to the groups that the track has already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Numbering {
    /// The group continues the track, or is a copy of one that the track has.
    Follows,
    /// The track starts over with this group, because the publisher was restarted and numbers its groups from the
    /// beginning.
    Anew,
    /// The publisher's group IDs are far from those of the leading publisher. It becomes a standby: its objects are
    /// dropped until it becomes the leading publisher.
    StandsBy,
}

impl LiveTrack {
    /// Reports whether the track has no publisher and its subscriptions wait for one.
    pub fn is_waiting(&self) -> bool {
        self.absence.lock().is_some()
    }

    /// Returns the remaining time of the wait, if the lost publisher was the configured upstream relay.
    pub fn waits_for_upstream(&self, now: Instant) -> Option<Duration> {
        let absence = self.absence.lock();
        let absence = absence.as_ref().filter(|absence| absence.was_upstream)?;
        Some(absence.until.saturating_duration_since(now))
    }

    /// Reports whether the configured upstream relay may be asked for the track. It may not be asked while
    /// subscriptions wait for a publisher of this relay, since the upstream relay would get the track from this relay.
    pub fn may_come_from_upstream(&self) -> bool {
        self.absence.lock().as_ref().is_none_or(|absence| absence.was_upstream)
    }

    /// Begins the wait after the loss of the last publisher. The caller holds the lock of `upstreams`, so that no
    /// publisher is added in between.
    pub(super) fn begin_wait(
        &self,
        upstream: &UpstreamTrack,
        unfinished: Option<Unfinished>,
        ended: &SubscriptionEnd,
        now: Instant,
        wait: Duration,
    ) {
        let was_upstream = upstream.is_of_upstream;
        let ended = ended.clone();
        let owner = self.owner();
        let until = now + wait;
        *self.absence.lock() = Some(Absence { since: now, until, ended, was_upstream, owner, unfinished });
    }

    /// Ends the wait for a publisher if the track has a different owner now. Returns the reason with which the waiting
    /// subscriptions end.
    pub(super) fn give_up_waiting(&self) -> Option<SubscriptionEnd> {
        let owner = self.owner();
        // A publisher may have moved to another relay of the cluster, which then announces the same track, from such a
        // relay to this one, or to the other process of a takeover, which claims no track.
        let is_cluster = |owner: &Option<RightHolder>| *owner == Some(RightHolder::Cluster);
        self.absence
            .lock()
            .take_if(|absence| {
                let is_owned = owner.is_some() && absence.owner.is_some();
                is_owned && absence.owner != owner && !is_cluster(&owner) && !is_cluster(&absence.owner)
            })
            .map(|absence| absence.ended)
    }

    /// Ends the wait because the track has a publisher again.
    pub(super) fn end_absence(&self, now: Instant) -> Option<Absence> {
        let absence = self.absence.lock().take()?;
        let seconds = now.saturating_duration_since(absence.since).as_secs_f64();
        info!(track = %self.name().typed(), seconds, "the track has a publisher again: its subscriptions go on");
        Some(absence)
    }

    /// Ends the subscriptions if their wait for a publisher has timed out. Returns whether they still wait.
    pub fn end_wait(&self, now: Instant) -> bool {
        if !self.is_waiting() {
            return false;
        }
        let over = {
            // The lock keeps a publisher from being added while the wait ends. Either a publisher serves the
            // subscriptions, or they end.
            let _upstreams = self.upstreams.lock();
            let mut absence = self.absence.lock();
            match absence.take_if(|absence| absence.until <= now) {
                Some(over) => over,
                None => return absence.is_some(),
            }
        };
        info!(track = %self.name().typed(), "no publisher came for the track in time: its subscriptions end");
        self.close_gap();
        self.end_subscriptions(&over.ended);
        false
    }

    pub(super) fn end_subscriptions(&self, ended: &SubscriptionEnd) {
        for subscription in self.subscriptions.read().iter() {
            subscription.end_of(self.number, ended);
        }
    }

    /// Gives up a silent publisher because another one answers. Later streams of the silent publisher are dropped. The
    /// subscriptions wait for the time `wait`, since the other publisher may not have the track yet; streams that are
    /// open stay open for the same time. Returns false if the silent publisher did not have the track.
    pub fn supersede(&self, silent: &UpstreamTrack, wait: Duration, now: Instant) -> bool {
        let mut upstreams = self.upstreams.lock();
        let Some(silent) = self.take_source(&mut upstreams, silent) else { return false };
        let unfinished = Unfinished::new(Arc::clone(&silent));
        match upstreams.first() {
            Some(_) => {}
            None => {
                let ended = SubscriptionEnd::new(code::Done::INTERNAL_ERROR, "the publisher is silent");
                self.begin_wait(&silent, Some(unfinished), &ended, now, wait.max(TAKEOVER));
            }
        }
        drop(upstreams);
        silent.ask(UpstreamRequest::Cancel);
        true
    }

    /// Returns how a group of `upstream` relates to the track; called before anything of the group is processed. If the
    /// group shows a restart, the track starts over. If the group ID is far from the leading publisher's, `upstream`
    /// becomes a standby, whose objects are dropped.
    pub fn place(&self, upstream: &UpstreamTrack, group: u64, now: Instant) -> Numbering {
        if upstream.stands_by() {
            return Numbering::StandsBy;
        }
        if upstream.is_rival() {
            let largest = self.data.largest().map_or(group, |largest| largest.group);
            if largest.abs_diff(group) > GROUP_SLACK {
                upstream.stand_by();
                let upstreams = self.upstreams.lock();
                self.forwarding.lock().choose(&upstreams);
                return Numbering::StandsBy;
            }
        }
        // This closure is called only for the first group of a publisher that took over from another one.
        let anew = upstream.number(|claimed, may_lag| {
            let Some(last) = self.data.last_seen() else { return false };
            let is_behind = match claimed {
                Some(claimed) if may_lag => is_beyond_lag(claimed.group, last.group),
                // If the publisher named no location, the relay may have subscribed just now. Group 0 or an old group
                // then means that the publisher was restarted.
                None if may_lag => group == 0 || is_beyond_lag(group, last.group),
                Some(claimed) => claimed < last,
                None => group <= last.group,
            };
            if is_behind {
                self.begin_anew(now);
            }
            is_behind
        });
        if anew { Numbering::Anew } else { Numbering::Follows }
    }

    /// Forgets all groups of the track. Subscriptions continue with the next group, whatever its ID is.
    fn begin_anew(&self, now: Instant) {
        let mut outbox = Outbox::default();
        self.conclude_groups(now, &mut outbox);
        self.cache.forget(&self.data);
        self.data.renumber();
        self.forwarding.lock().renumber();
        let subscriptions = self.subscriptions.read();
        for subscription in subscriptions.iter() {
            // The previous publisher's groups are gone from the cache, so their streams are reset.
            subscription.drop_evicted(now, &mut outbox);
            subscription.begin_anew(now);
        }
        drop(subscriptions);
        self.close_gap();
        outbox.flush();
    }

    /// Ends the subgroups that the previous publisher left open. Their group IDs will be reused for other groups, so
    /// missing objects can never be fetched. A subgroup without an incomplete object counts as complete.
    fn conclude_groups(&self, now: Instant, outbox: &mut Outbox) {
        let groups = self.data.groups(0, u64::MAX);
        let subscriptions = self.subscriptions.read();
        for subgroup in groups.iter().flat_map(|(_, group)| &group.subgroups) {
            if subgroup.extent().end != SourceEnd::Open {
                continue;
            }
            subgroup.conclude(now);
            for subscription in subscriptions.iter() {
                subscription.offer(self.number, subgroup, SubgroupNews::Ended(None), now, outbox);
            }
        }
    }
}

/// Reports whether a group is more than [`UPSTREAM_LAG`] groups behind the track's newest group.
fn is_beyond_lag(group: u64, last: u64) -> bool {
    group.saturating_add(UPSTREAM_LAG) < last
}

#[cfg(test)]
mod tests {
    use std::{
        net::{IpAddr, Ipv4Addr},
        sync::{Arc, Weak},
    };

    use bytes::Bytes;
    use millrace_moq::{
        Location, Namespace, ObjectDatagram, TrackName,
        tracks::{
            cache::{CacheLimits, TrackCache},
            track::CachedDatagram,
        },
    };

    use super::*;
    use crate::{Delays, upstream::UpstreamSession};

    const WAIT: Duration = Duration::from_secs(5);

    fn track(now: Instant) -> Arc<LiveTrack> {
        let namespace = Namespace::from_path("live").unwrap();
        let cache = Arc::new(TrackCache::new(CacheLimits { bytes: 1 << 20, age: Duration::from_secs(1) }));
        let delays = Delays::default().namespace_delays(&namespace);
        Arc::new(LiveTrack::new(TrackName::new(namespace, "video").unwrap(), cache, delays, now))
    }

    fn owner(number: u8) -> RightHolder {
        RightHolder::Client(IpAddr::V4(Ipv4Addr::new(192, 0, 2, number)))
    }

    fn upstream(session: u64) -> Arc<UpstreamTrack> {
        UpstreamTrack::new(
            UpstreamSession { session, is_upstream: false, is_relay: false, connection: Weak::new() },
            1,
            false,
        )
        .0
    }

    fn object(group: u64, received_at: Instant) -> CachedDatagram {
        let datagram = ObjectDatagram {
            alias: 1,
            group,
            object: 0,
            priority: None,
            end_of_group: false,
            properties: Bytes::new(),
            status: None,
            payload: Bytes::from_static(b"media"),
        };
        CachedDatagram { datagram, received_at }
    }

    fn publisher_gone() -> SubscriptionEnd {
        SubscriptionEnd { absent: true, ..SubscriptionEnd::new(code::Done::INTERNAL_ERROR, "gone") }
    }

    #[test]
    fn track_without_publisher_is_resumed_only_by_the_same_client() {
        let now = Instant::now();
        for (next, waits) in [(1, true), (2, false)] {
            let track = track(now);
            let first = upstream(1);
            let claim = track.claim(owner(1)).unwrap();
            track.prepare(1);
            track.add_upstream(Arc::clone(&first), None, now);
            track.remove_upstream(&first, &publisher_gone(), WAIT, now);
            drop(claim);
            assert!(track.is_waiting());
            let _claim = track.claim(owner(next)).unwrap();
            track.prepare(2);
            assert_eq!(track.is_waiting(), waits);
        }
    }

    #[test]
    fn track_passes_between_the_cluster_and_a_client_once_it_leaves_its_publishers() {
        let now = Instant::now();
        for (first, next, passes) in [
            (RightHolder::Cluster, owner(1), true),
            (owner(1), RightHolder::Cluster, true),
            (owner(1), owner(2), false),
        ] {
            let track = track(now);
            let old = upstream(1);
            let claim = track.claim(first).unwrap();
            track.add_upstream(Arc::clone(&old), None, now);
            assert!(!track.is_open_to(&next) && track.claim(next.clone()).is_none(), "it works");
            old.leave();
            assert_eq!(track.is_open_to(&next), passes);
            let Some(passed) = track.claim(next.clone()) else {
                assert!(!passes);
                continue;
            };
            let more = track.claim(next.clone()).expect("it is the owner's");
            assert!(passed.has_passed && !more.has_passed);
            drop((claim, passed));
            assert_eq!(track.owner(), Some(next), "the earlier owner's claim does not count");
            drop(more);
            assert_eq!(track.owner(), None);
        }
    }

    #[test]
    fn track_that_waits_for_the_cluster_is_resumed_by_a_publisher_of_this_relay() {
        let now = Instant::now();
        let track = track(now);
        let first = upstream(1);
        let claim = track.claim(RightHolder::Cluster).unwrap();
        track.add_upstream(Arc::clone(&first), None, now);
        track.remove_upstream(&first, &publisher_gone(), WAIT, now);
        drop(claim);
        let _claim = track.claim(owner(1)).unwrap();
        track.prepare(2);
        assert!(track.is_waiting());
    }

    #[test]
    fn track_wait_for_a_new_publisher_ends_on_timeout_or_arrival() {
        let now = Instant::now();
        let track = track(now);
        let first = upstream(1);
        track.add_upstream(Arc::clone(&first), None, now);
        track.remove_upstream(&first, &publisher_gone(), WAIT, now);
        assert!(track.end_wait(now + WAIT / 2) && !track.end_wait(now + WAIT) && !track.is_waiting());
        track.add_upstream(Arc::clone(&first), None, now);
        track.remove_upstream(&first, &SubscriptionEnd::new(code::Done::TRACK_ENDED, "over"), WAIT, now);
        assert!(!track.is_waiting(), "it has said that it is over");
        track.add_upstream(Arc::clone(&first), None, now);
        track.remove_upstream(&first, &publisher_gone(), WAIT, now);
        track.add_upstream(upstream(2), None, now);
        assert!(!track.is_waiting() && track.is_established());
    }

    #[test]
    fn older_groups_of_a_lagging_upstream_relay_do_not_restart_the_track() {
        let now = Instant::now();
        let at = |group| Some(Location { group, object: 0 });
        for (is_upstream, claimed, group, numbering) in [
            (true, None, 7, Numbering::Follows),
            (true, None, 6, Numbering::Follows),
            (true, at(6), 6, Numbering::Follows),
            (true, at(5), 6, Numbering::Anew),
            (true, None, 5, Numbering::Anew),
            (true, None, 0, Numbering::Anew),
            (true, None, 8, Numbering::Follows),
            (false, None, 7, Numbering::Anew),
            (false, at(6), 7, Numbering::Anew),
            (false, at(7), 7, Numbering::Follows),
            (false, None, 8, Numbering::Follows),
        ] {
            let track = track(now);
            let first = upstream(1);
            track.add_upstream(Arc::clone(&first), None, now);
            assert_eq!(track.place(&first, 7, now), Numbering::Follows);
            track.data.add_datagram(object(7, now), &Arc::default()).unwrap();
            track.remove_upstream(&first, &publisher_gone(), WAIT, now);
            let next = UpstreamTrack::new(
                UpstreamSession { session: 2, is_upstream, is_relay: false, connection: Weak::new() },
                1,
                false,
            )
            .0;
            track.add_upstream(Arc::clone(&next), claimed, now);
            assert_eq!(track.place(&next, group, now), numbering, "{is_upstream} {claimed:?} {group}");
        }
    }

    #[test]
    fn standby_publisher_is_forwarded_when_the_active_one_is_silent() {
        let now = Instant::now();
        let track = track(now);
        let first = upstream(1);
        let second = upstream(2);
        track.add_upstream(Arc::clone(&first), None, now);
        track.add_upstream(Arc::clone(&second), None, now);
        assert!(second.is_rival() && !first.is_rival());
        second.stand_by();
        assert_eq!(track.place(&second, 7, now), Numbering::StandsBy);
        assert!(track.supersede(&first, WAIT, now) && !track.supersede(&first, WAIT, now));
        assert!(!second.is_rival() && !second.stands_by() && !track.is_waiting());
        assert_eq!(track.place(&second, 7, now), Numbering::Follows, "nothing has come before");
    }

    /// The second source was to deliver what the first one left to it, and leaves as well.
    #[test]
    fn source_that_replaces_a_leaving_one_takes_its_handover() {
        let now = Instant::now();
        let track = track(now);
        let sources = [upstream(1), upstream(2), upstream(3)];
        for (source, largest) in sources.iter().zip([None, Some(5), Some(9)]) {
            track.upstreams().iter().for_each(|earlier| earlier.leave());
            track.add_upstream(Arc::clone(source), None, now);
            track.hand_over_to(source, largest.map(|group| Location { group, object: 0 }));
            if largest == Some(5) {
                assert!(!sources[0].has_handed_over(5) && sources[0].has_handed_over(6));
            }
        }
        for left in &sources[..2] {
            assert!(!left.has_handed_over(9) && left.has_handed_over(10));
        }
    }

    /// The path to the first source is back before the track has moved away from it.
    #[test]
    fn track_returns_to_a_source_that_it_was_leaving() {
        let now = Instant::now();
        let track = track(now);
        let connection = Weak::new();
        let place = UpstreamSession { session: 1, is_upstream: false, is_relay: true, connection };
        let (first, mut asks) = UpstreamTrack::new(place, 1, true);
        let second = upstream(2);
        track.add_upstream(Arc::clone(&first), None, now);
        track.data.add_datagram(object(7, now), &Arc::default()).unwrap();
        first.leave();
        track.add_upstream(Arc::clone(&second), None, now);
        track.hand_over_to(&second, None);
        assert!(first.has_handed_over(8));
        second.leave();
        let openings = track.gap.state.lock().openings();
        assert!(!track.return_to(3) && track.return_to(1));
        assert_ne!(
            track.gap.state.lock().openings(),
            openings,
            "what was asked for before does not close the gap"
        );
        assert!(!first.is_leaving() && !first.has_handed_over(8) && second.has_handed_over(8));
        assert_eq!(asks.try_recv(), Ok(UpstreamRequest::FillGap));
        assert!(track.gap.is_open());
    }
}
