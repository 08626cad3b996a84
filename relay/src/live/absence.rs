//! Publishers that go and come back: subscriptions wait for the next one, which may number its groups in another way.
//!
//! A track is *established* while it has publishers, *waiting* from the loss of the last one until another one comes or the wait is over, and without a publisher otherwise. [`LiveTrack::remove_upstream`] and [`LiveTrack::supersede`] begin a wait,
//! [`LiveTrack::add_upstream`] and [`LiveTrack::end_wait`] end it.

use std::time::{Duration, Instant};

use millrace_moq::{Location, code, tracks::track::GROUP_SLACK};
use millrace_quic::plane::source::End;
use tracing::info;

use super::LiveTrack;
use crate::{
    access::policy::Identity,
    outbox::Outbox,
    subscription::{Ended, News},
    upstream::{Ask, Unfinished, Upstream},
};

/// How long subscriptions wait at least for the publisher that takes over from a silent one.
const TAKEOVER: Duration = Duration::from_secs(1);

/// A wait for a publisher.
pub(super) struct Absence {
    since: Instant,
    until: Instant,
    /// The end of the subscriptions if nobody comes.
    ended: Ended,
    /// The last publisher was the configured upstream relay.
    was_upstream: bool,
    /// The owner of the track: nobody else takes over its subscriptions.
    owner: Option<Identity>,
    /// Streams that a silent publisher has not ended.
    pub(super) unfinished: Option<Unfinished>,
}

/// How a publisher's group relates to the track.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Numbering {
    /// The group is one of the track, or a copy of one.
    Follows,
    /// The track starts over with the group: the publisher was restarted and numbers from the beginning.
    Anew,
    /// Another publisher leads, whose groups are elsewhere: this publisher is not needed now.
    StandsBy,
}

impl LiveTrack {
    /// Whether the track has no publisher, and its subscriptions wait for one.
    pub fn is_waiting(&self) -> bool {
        self.absence.lock().is_some()
    }

    /// How long subscriptions still wait for a publisher, if they do and the configured upstream relay was the last one.
    pub fn waits_for_upstream(&self, now: Instant) -> Option<Duration> {
        let absence = self.absence.lock();
        let absence = absence.as_ref().filter(|absence| absence.was_upstream)?;
        Some(absence.until.saturating_duration_since(now))
    }

    /// Whether the configured upstream relay may be asked for the track. While subscriptions wait for a publisher of this relay, it
    /// may not: what the upstream has of the track it has from here.
    pub fn may_come_from_upstream(&self) -> bool {
        self.absence.lock().as_ref().is_none_or(|absence| absence.was_upstream)
    }

    /// The last publisher is gone. Called with the upstreams locked, so that no other one comes between.
    pub(super) fn begin_wait(
        &self,
        upstream: &Upstream,
        unfinished: Option<Unfinished>,
        ended: &Ended,
        (now, wait): (Instant, Duration),
    ) {
        let was_upstream = upstream.is_of_upstream;
        let (ended, owner) = (ended.clone(), self.owner());
        let until = now + wait;
        *self.absence.lock() = Some(Absence { since: now, until, ended, was_upstream, owner, unfinished });
    }

    /// Ends the wait if the track belongs to another owner by now. Returns the end of the subscriptions that have waited.
    pub(super) fn give_up_waiting(&self) -> Option<Ended> {
        let owner = self.owner();
        self.absence.lock().take_if(|absence| absence.owner != owner).map(|absence| absence.ended)
    }

    /// Ends the wait, if there is one, as a publisher has come.
    pub(super) fn end_absence(&self, now: Instant) -> Option<Absence> {
        let absence = self.absence.lock().take()?;
        let seconds = now.saturating_duration_since(absence.since).as_secs_f64();
        info!(track = %self.name().typed(), seconds, "another publisher has come");
        Some(absence)
    }

    /// Ends the subscriptions if they have waited for a publisher for too long. Returns whether they go on waiting.
    pub fn end_wait(&self, now: Instant) -> bool {
        if !self.is_waiting() {
            return false;
        }
        let over = {
            // As a publisher that comes takes them, so that it is either here or there.
            let _upstreams = self.upstreams.lock();
            let mut absence = self.absence.lock();
            match absence.take_if(|absence| absence.until <= now) {
                Some(over) => over,
                None => return absence.is_some(),
            }
        };
        info!(track = %self.name().typed(), "no publisher has come back: the subscriptions end");
        self.end_subscriptions(&over.ended);
        false
    }

    pub(super) fn end_subscriptions(&self, ended: &Ended) {
        for subscription in self.subscriptions.read().iter() {
            subscription.end_of(self.number, ended);
        }
    }

    /// Takes the track from a silent publisher, for one that answers. What the silent one still begins is dropped. Subscriptions `wait`
    /// for so long, as the other one may not have the track yet, and so long what is unfinished stays so. Returns whether the silent
    /// one had the track.
    pub fn supersede(&self, silent: &Upstream, wait: Duration, now: Instant) -> bool {
        let mut upstreams = self.upstreams.lock();
        let Some(place) = upstreams.iter().position(|other| std::ptr::eq(&**other, silent)) else {
            return false;
        };
        let unfinished = Unfinished::new(upstreams.remove(place));
        silent.withhold();
        match upstreams.first() {
            Some(first) if place == 0 => first.lead(),
            Some(_) => {}
            None => {
                let ended = Ended::new(code::Done::INTERNAL_ERROR, "the publisher is silent");
                self.begin_wait(silent, Some(unfinished), &ended, (now, wait.max(TAKEOVER)));
            }
        }
        drop(upstreams);
        silent.ask(Ask::Cancel);
        true
    }

    /// Returns how a group of `upstream` relates to the track, before anything of the group is taken. Makes the track start over, or the
    /// publisher stand by, where the group shows that.
    pub fn place(&self, upstream: &Upstream, group: u64, now: Instant) -> Numbering {
        if upstream.stands_by() {
            return Numbering::StandsBy;
        }
        if upstream.is_rival() {
            let largest = self.data.largest().map_or(group, |largest| largest.group);
            if largest.abs_diff(group) > GROUP_SLACK {
                upstream.stand_by();
                return Numbering::StandsBy;
            }
        }
        let anew = upstream.number(|claimed| {
            let Some(last) = self.data.last_seen() else { return false };
            let is_behind = claimed.map_or(group <= last.group, |claimed: Location| claimed < last);
            if is_behind {
                self.begin_anew(now);
            }
            is_behind
        });
        if anew { Numbering::Anew } else { Numbering::Follows }
    }

    /// Forgets all groups. Subscriptions go on with whatever group comes next.
    fn begin_anew(&self, now: Instant) {
        let mut outbox = Outbox::default();
        self.conclude_groups(now, &mut outbox);
        self.cache.forget(&self.data);
        self.data.renumber();
        let subscriptions = self.subscriptions.read();
        for subscription in subscriptions.iter() {
            // What was is gone, and its streams end.
            subscription.drop_evicted(now, &mut outbox);
            subscription.begin_anew(now);
        }
        drop(subscriptions);
        outbox.flush();
    }

    /// Ends what the publisher before has left unfinished. Its group IDs stand for other groups from now on, so that nobody can ever
    /// have the rest, by FETCH or from another publisher: what is whole is complete.
    fn conclude_groups(&self, now: Instant, outbox: &mut Outbox) {
        let groups = self.data.groups(0, u64::MAX);
        let subscriptions = self.subscriptions.read();
        for subgroup in groups.iter().flat_map(|(_, group)| &group.subgroups) {
            if subgroup.extent().end != End::Open {
                continue;
            }
            subgroup.conclude(now);
            for subscription in subscriptions.iter() {
                subscription.offer(self.number, subgroup, News::Ended(None), now, outbox);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        net::{IpAddr, Ipv4Addr},
        sync::{Arc, Weak},
    };

    use millrace_moq::{
        Namespace, TrackName,
        tracks::cache::{Cache, Limits},
    };

    use super::*;
    use crate::{Delays, upstream::Place};

    const WAIT: Duration = Duration::from_secs(5);

    fn track(now: Instant) -> Arc<LiveTrack> {
        let namespace = Namespace::from_path("live").unwrap();
        let cache = Arc::new(Cache::new(Limits { bytes: 1 << 20, age: Duration::from_secs(1) }));
        let delays = Delays::default().of(&namespace);
        Arc::new(LiveTrack::new(TrackName::new(namespace, "video").unwrap(), cache, delays, now))
    }

    fn owner(number: u8) -> Identity {
        Identity::Client(IpAddr::V4(Ipv4Addr::new(192, 0, 2, number)))
    }

    fn upstream(session: u64) -> Arc<Upstream> {
        Upstream::new(Place { session, is_upstream: false, connection: Weak::new() }, 1, false).0
    }

    fn gone() -> Ended {
        Ended { absent: true, ..Ended::new(code::Done::INTERNAL_ERROR, "gone") }
    }

    #[test]
    fn only_the_owner_takes_over_what_waits_for_it() {
        let now = Instant::now();
        for (next, waits) in [(1, true), (2, false)] {
            let track = track(now);
            let (first, claim) = (upstream(1), track.claim(owner(1)).unwrap());
            track.prepare(1);
            track.add_upstream(Arc::clone(&first), None, now);
            track.remove_upstream(&first, &gone(), WAIT, now);
            drop(claim);
            assert!(track.is_waiting());
            let _claim = track.claim(owner(next)).unwrap();
            track.prepare(2);
            assert_eq!(track.is_waiting(), waits);
        }
    }

    #[test]
    fn wait_is_over_in_time_and_when_somebody_comes() {
        let now = Instant::now();
        let track = track(now);
        let first = upstream(1);
        track.add_upstream(Arc::clone(&first), None, now);
        track.remove_upstream(&first, &gone(), WAIT, now);
        assert!(track.end_wait(now + WAIT / 2) && !track.end_wait(now + WAIT) && !track.is_waiting());
        track.add_upstream(Arc::clone(&first), None, now);
        track.remove_upstream(&first, &Ended::new(code::Done::TRACK_ENDED, "over"), WAIT, now);
        assert!(!track.is_waiting(), "it has said that it is over");
        track.add_upstream(Arc::clone(&first), None, now);
        track.remove_upstream(&first, &gone(), WAIT, now);
        track.add_upstream(upstream(2), None, now);
        assert!(!track.is_waiting() && track.is_established());
    }

    #[test]
    fn standby_leads_once_the_others_are_silent() {
        let now = Instant::now();
        let track = track(now);
        let (first, second) = (upstream(1), upstream(2));
        track.add_upstream(Arc::clone(&first), None, now);
        track.add_upstream(Arc::clone(&second), None, now);
        assert!(second.is_rival() && !first.is_rival());
        second.stand_by();
        assert_eq!(track.place(&second, 7, now), Numbering::StandsBy);
        assert!(track.supersede(&first, WAIT, now) && !track.supersede(&first, WAIT, now));
        assert!(!second.is_rival() && !second.stands_by() && !track.is_waiting());
        assert_eq!(track.place(&second, 7, now), Numbering::Follows, "nothing has come before");
    }
}
