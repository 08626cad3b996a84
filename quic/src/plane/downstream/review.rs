//! What waits is looked at now and then: what is late goes, wherever it waits, and what the policy names.

use std::time::{Duration, Instant};

use super::{
    Asked, Cause, Downstream, NewStream, Newest, Owner, StreamKey,
    policy::{Drop, Queue, Reason, Standing, Waiting},
};
use crate::plane::stream::{Head, Stream};

/// What is left to be done of a stream that is given up has so long.
const FINISH: Duration = Duration::from_secs(2);

/// From when something waits until it is looked at.
const FIRST: Duration = Duration::from_millis(10);

/// Between two looks, at least and at most.
const LEAST: Duration = Duration::from_millis(5);
const MOST: Duration = Duration::from_millis(50);

/// And at least this for each stream and datagram that waits, so that looking at them takes little of a processor.
const PER_ONE: Duration = Duration::from_micros(50);

impl Owner {
    /// Returns whether another group is the newest now.
    pub(super) fn open(&mut self, stream: &NewStream) -> bool {
        self.owned.live += 1;
        self.note(stream)
    }

    /// It is known what a stream carries; returns whether another group is the newest now.
    pub(super) fn note(&mut self, stream: &NewStream) -> bool {
        if stream.asked == Asked::All {
            return false;
        }
        let group = stream.label.group;
        let first = (stream.priority.publisher, stream.priority.subgroup);
        match &mut self.newest {
            Some(newest) if newest.group > group => false,
            Some(newest) if newest.group == group => {
                newest.first = newest.first.min(first);
                false
            }
            newest => newest.replace(Newest { group, first }).is_some(),
        }
    }
}

impl Downstream {
    /// After all has been sent that may be: has what is left looked at in time.
    pub(super) fn watch_backlog(&mut self, now: Instant) {
        if self.is_backlogged() {
            self.review_at.get_or_insert(now + FIRST);
        } else if self.review_at.take().is_some() {
            self.policy.rest();
        }
    }

    /// A group has begun: what waits of those before it is looked at again at once, if not only just now.
    pub(super) fn review_superseded(&mut self, now: Instant) {
        if !std::mem::take(&mut self.superseded) || self.review_at.is_none() {
            return;
        }
        match self.reviewed_until {
            Some(until) if now < until => self.review_at = self.review_at.min(Some(until)),
            _ => self.review(now),
        }
    }

    fn is_backlogged(&self) -> bool {
        self.waiting_streams() > 0 || !self.datagrams.is_empty()
    }

    /// Streams that have bytes to send.
    fn waiting_streams(&self) -> usize {
        let queues = [&self.ready, &self.unopened, &self.blocked, &self.starved];
        queues.iter().map(|queues| queues.len()).sum::<usize>() - self.resets_owed
    }

    pub(super) fn review(&mut self, now: Instant) {
        let expires = self.expire(now);
        self.note_asked(now);
        let queue = self.backlog();
        let drops = self.policy.review(now, &queue, &self.config.queue);
        let ordinary = queue.streams.iter().filter(|stream| stream.standing == Standing::Ordinary);
        let late = ordinary.filter_map(|stream| stream.since?.checked_add(stream.max_delay?));
        let next = late.filter(|at| *at > now).chain(expires).min();
        let waiting = queue.streams.len() + self.datagrams.len();
        self.drop_streams(&drops);
        self.set_deadlines(now, &drops);
        let least = LEAST.max(PER_ONE * u32::try_from(waiting).unwrap_or(u32::MAX));
        let next = next.map_or(MOST, |next| next.saturating_duration_since(now)).min(MOST).max(least);
        self.reviewed_until = now.checked_add(least);
        self.review_at = None;
        if self.is_backlogged() {
            self.review_at = now.checked_add(next);
        } else {
            self.policy.rest();
        }
    }

    /// Has streams go if too many have bytes to send.
    pub(super) fn shed(&mut self) {
        if self.waiting_streams() > self.config.queue.streams {
            self.finish_given_up();
            let queue = self.backlog();
            let drops = self.policy.overflow(&queue, &self.config.queue);
            self.drop_streams(&drops);
        }
    }

    fn drop_streams(&mut self, drops: &[Drop]) {
        for Drop { key, reason } in drops {
            let Some(stream) = self.streams.get_mut(*key) else { continue };
            // What was not sent yet needs no end.
            if stream.id.is_some() && *reason != Reason::Streams && stream.give_up(*reason) {
                self.recall(*key);
                self.place(*key);
            } else {
                self.end_for(*key, *reason);
            }
        }
    }

    /// What is left to be done of streams that are given up does not take forever.
    fn set_deadlines(&mut self, now: Instant, drops: &[Drop]) {
        let Some(at) = now.checked_add(FINISH) else { return };
        for Drop { key, .. } in drops {
            if self.streams.get(*key).is_some_and(|stream| stream.given_up().is_some()) {
                self.set_deadline(*key, at);
            }
        }
    }

    fn end_for(&mut self, key: StreamKey, reason: Reason) {
        let codes = self.config.reset_codes;
        let (code, cause) = match reason {
            Reason::Late => (codes.late, Cause::Late),
            Reason::Hopeless => (codes.late, Cause::Hopeless),
            Reason::Bytes => (codes.behind, Cause::QueueFull),
            Reason::Streams => (codes.behind, Cause::Overflow),
        };
        self.begin_reset(key, code, cause);
    }

    /// Resets the stream if it was given up; returns whether it was.
    pub(super) fn finish(&mut self, key: StreamKey) -> bool {
        let reason = self.streams.get(key).and_then(Stream::given_up);
        if let Some(reason) = reason {
            self.end_for(key, reason);
        }
        reason.is_some()
    }

    fn finish_given_up(&mut self) {
        let given_up = self.streams.iter().filter(|(_, stream)| stream.given_up().is_some());
        let keys: Vec<_> = given_up.map(|(key, _)| key).collect();
        keys.into_iter().for_each(|key| {
            self.finish(key);
        });
    }

    /// Drops what its delivery timeout has passed of. Returns when the next one's does.
    fn expire(&mut self, now: Instant) -> Option<Instant> {
        let (overdue, mut next) = self.datagrams.expire(now);
        self.stats.datagrams_expired += overdue.expired;
        self.stats.datagrams_late += overdue.late;
        let mut late: Vec<StreamKey> = Vec::new();
        for (key, stream) in self.streams.iter() {
            let Some(timeout) = stream.object_timeout() else { continue };
            let received = stream.head().and_then(|head| head.received_at);
            let Some(at) = received.and_then(|received| received.checked_add(timeout)) else { continue };
            if at < now {
                late.push(key);
            } else {
                next = next.into_iter().chain([at]).min();
            }
        }
        for key in late {
            self.begin_reset(key, self.config.reset_codes.late, Cause::ObjectTimeout);
        }
        next
    }

    /// How long the oldest of what is sent live has waited.
    pub fn queue_delay(&self, now: Instant) -> Duration {
        if !self.is_backlogged() {
            return Duration::ZERO;
        }
        let queue = self.backlog();
        let live = queue.streams.iter().filter(|stream| stream.standing != Standing::Asked);
        let oldest = live.filter_map(|stream| stream.since).min();
        oldest.map_or(Duration::ZERO, |since| now.saturating_duration_since(since))
    }

    /// Ages of those count from now whose owner still gets what it asked for from the past.
    fn note_asked(&mut self, now: Instant) {
        for (_, stream) in self.streams.iter() {
            if stream.head().is_some_and(|head| head.is_asked)
                && let Some(owner) = self.owners.get_mut(&stream.owner)
            {
                owner.caught_up = Some(now);
            }
        }
    }

    fn backlog(&self) -> Queue {
        let streams = self.streams.iter().filter(|(_, stream)| stream.given_up().is_none());
        let heads = streams.filter_map(|(key, stream)| Some((key, stream, stream.head()?)));
        let repair = 2 * self.recovery.rtt.smoothed();
        let waiting = |(key, stream, head): (StreamKey, &Stream, Head)| {
            let owner = self.owners.get(&stream.owner);
            let caught_up = owner.and_then(|owner| owner.caught_up);
            let newest = owner.and_then(|owner| owner.newest);
            let first = (stream.priority.publisher, stream.priority.subgroup);
            let waits_since = |received: Instant| caught_up.map_or(received, |at| received.max(at));
            let is_newest =
                newest.is_some_and(|newest| newest.group == stream.label.group && newest.first == first);
            let is_superseded = newest.is_some_and(|newest| newest.group > stream.label.group);
            Waiting {
                key,
                owner: stream.owner,
                level: stream.priority.level(),
                order: (stream.priority.group, stream.priority.subgroup),
                subgroup: stream.priority.subgroup,
                bytes: stream.pending(),
                since: head.received_at.map(waits_since),
                superseded: is_superseded.then(|| stream.newest_at().map(waits_since)).flatten(),
                // To learn of a loss and to repair it takes round trips, in which nothing could be done.
                max_delay: stream.max_delay.map(|most| if head.is_repair { most + repair } else { most }),
                standing: match (head.is_asked, is_newest) {
                    (true, _) => Standing::Asked,
                    (false, true) => Standing::Newest,
                    (false, false) => Standing::Ordinary,
                },
            }
        };
        Queue {
            streams: heads.map(waiting).collect(),
            datagram_bytes: self.datagrams.bytes(),
            rate: self.bandwidth(),
        }
    }
}
