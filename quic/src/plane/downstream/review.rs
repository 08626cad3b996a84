//! Regular checks of the backlog, which is the data that waits to be sent. A check drops late data, and streams that
//! the drop policy selects.

use std::time::{Duration, Instant};

use super::{
    AskedRange, Cause, Downstream, NewStream, Newest, StreamKey, StreamOwner,
    policy::{Drop, DropReason, StreamImportance, WaitingQueue, WaitingStream},
};
use crate::plane::stream::{PlaneStream, StreamHead};

/// A stream that is to be dropped after its current object is reset after this time, even if that object is not
/// finished.
const FINISH: Duration = Duration::from_secs(2);

/// Time between the moment when data begins to wait to be sent and the first check for late data.
const FIRST: Duration = Duration::from_millis(10);

/// Shortest time between two checks of the data that waits to be sent.
const LEAST: Duration = Duration::from_millis(5);
/// Longest time between two checks of the data that waits to be sent.
const MOST: Duration = Duration::from_millis(50);

/// The shortest time between two checks of the waiting data is at least this time multiplied by the number of waiting
/// streams and datagrams. This limits the CPU time of the checks.
const PER_ONE: Duration = Duration::from_micros(50);

impl StreamOwner {
    /// Notes a new stream. Returns true if its group is newer than all earlier groups of this owner (a subscription).
    pub(super) fn open(&mut self, stream: &NewStream) -> bool {
        self.owned.live += 1;
        self.note(stream)
    }

    /// Notes the group of a stream. Returns true if the group is newer than all earlier groups of this owner (a
    /// subscription).
    pub(super) fn note(&mut self, stream: &NewStream) -> bool {
        if stream.asked == AskedRange::All {
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
            // The owner's first group replaces no older group, so the result is false.
            newest => newest.replace(Newest { group, first }).is_some(),
        }
    }
}

impl Downstream {
    /// Schedules a check for late data if data waits to be sent, else cancels it.
    pub(super) fn watch_backlog(&mut self, now: Instant) {
        if self.is_backlogged() {
            self.review_at.get_or_insert(now + FIRST);
        } else if self.review_at.take().is_some() {
            self.policy.rest();
        }
    }

    /// Checks waiting streams for late data if a subscription has begun a newer group. The check runs at once, or when
    /// the shortest time between checks has passed.
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

    /// Returns the number of streams that have bytes to send.
    fn waiting_streams(&self) -> usize {
        let queues = [&self.ready, &self.unopened, &self.blocked, &self.starved];
        queues.iter().map(|queues| queues.len()).sum::<usize>() - self.resets_owed
    }

    pub(super) fn review(&mut self, now: Instant) {
        let expires = self.expire(now);
        self.note_asked(now);
        let queue = self.backlog();
        let drops = self.policy.review(now, &queue, &self.config.queue);
        let ordinary = queue.streams.iter().filter(|stream| stream.standing == StreamImportance::Ordinary);
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

    /// Drops streams if more of them have bytes to send than the limit allows.
    pub(super) fn shed(&mut self) {
        if self.waiting_streams() > self.config.queue.streams {
            // Streams that are to be dropped after their current object still count towards the limit. They are reset
            // first, before the policy selects further streams.
            self.finish_given_up();
            let queue = self.backlog();
            let drops = self.policy.overflow(&queue, &self.config.queue);
            self.drop_streams(&drops);
        }
    }

    fn drop_streams(&mut self, drops: &[Drop]) {
        for Drop { key, reason } in drops {
            let Some(stream) = self.streams.get_mut(*key) else { continue };
            // A stream without an ID has sent nothing, so no partly sent object has to be finished before the stream is
            // dropped.
            if stream.id.is_some() && *reason != DropReason::Streams && stream.give_up(*reason) {
                self.recall(*key);
                self.place(*key);
            } else {
                self.end_for(*key, *reason);
            }
        }
    }

    /// Sets deadlines for streams that are dropped after their current object, so that they are reset even if the peer
    /// acknowledges nothing.
    fn set_deadlines(&mut self, now: Instant, drops: &[Drop]) {
        let Some(at) = now.checked_add(FINISH) else { return };
        for Drop { key, .. } in drops {
            if self.streams.get(*key).is_some_and(|stream| stream.given_up().is_some()) {
                self.set_deadline(*key, at);
            }
        }
    }

    fn end_for(&mut self, key: StreamKey, reason: DropReason) {
        let codes = self.config.reset_codes;
        let (code, cause) = match reason {
            DropReason::Late => (codes.late, Cause::Late),
            DropReason::Hopeless => (codes.late, Cause::Hopeless),
            DropReason::Bytes => (codes.behind, Cause::QueueFull),
            DropReason::Streams => (codes.behind, Cause::Overflow),
        };
        self.begin_reset(key, code, cause);
    }

    /// Resets the stream if it was to be dropped after its current object. Returns whether it was reset.
    pub(super) fn finish(&mut self, key: StreamKey) -> bool {
        let reason = self.streams.get(key).and_then(PlaneStream::given_up);
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

    /// Drops streams and datagrams whose delivery timeout has expired. Returns when the next delivery timeout expires.
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

    /// Returns how long the oldest waiting data has waited to be sent, not counting old objects that the receiver
    /// requested.
    pub fn queue_delay(&self, now: Instant) -> Duration {
        if !self.is_backlogged() {
            return Duration::ZERO;
        }
        let queue = self.backlog();
        let live = queue.streams.iter().filter(|stream| stream.standing != StreamImportance::Asked);
        let oldest = live.filter_map(|stream| stream.since).min();
        oldest.map_or(Duration::ZERO, |since| now.saturating_duration_since(since))
    }

    /// Notes the subscriptions that wait for old objects that the receiver requested. The waiting time of newer data of
    /// these subscriptions is counted only from now on, because the old objects have delayed it.
    fn note_asked(&mut self, now: Instant) {
        for (_, stream) in self.streams.iter() {
            if stream.head().is_some_and(|head| head.is_asked)
                && let Some(owner) = self.owners.get_mut(&stream.owner)
            {
                owner.caught_up = Some(now);
            }
        }
    }

    fn backlog(&self) -> WaitingQueue {
        let streams = self.streams.iter().filter(|(_, stream)| stream.given_up().is_none());
        let heads = streams.filter_map(|(key, stream)| Some((key, stream, stream.head()?)));
        let repair = 2 * self.recovery.rtt.smoothed();
        let waiting = |(key, stream, head): (StreamKey, &PlaneStream, StreamHead)| {
            let owner = self.owners.get(&stream.owner);
            let caught_up = owner.and_then(|owner| owner.caught_up);
            let newest = owner.and_then(|owner| owner.newest);
            let first = (stream.priority.publisher, stream.priority.subgroup);
            let waits_since = |received: Instant| caught_up.map_or(received, |at| received.max(at));
            let is_newest =
                newest.is_some_and(|newest| newest.group == stream.label.group && newest.first == first);
            let is_superseded = newest.is_some_and(|newest| newest.group > stream.label.group);
            WaitingStream {
                key,
                owner: stream.owner,
                level: stream.priority.level(),
                order: (stream.priority.group, stream.priority.subgroup),
                subgroup: stream.priority.subgroup,
                bytes: stream.pending(),
                since: head.received_at.map(waits_since),
                superseded: is_superseded.then(|| stream.newest_at().map(waits_since)).flatten(),
                // Detecting and retransmitting lost data takes about two round trips, which are added to the time that
                // lost data may wait.
                max_delay: stream.max_delay.map(|most| if head.is_repair { most + repair } else { most }),
                standing: match (head.is_asked, is_newest) {
                    (true, _) => StreamImportance::Asked,
                    (false, true) => StreamImportance::Newest,
                    (false, false) => StreamImportance::Ordinary,
                },
            }
        };
        WaitingQueue {
            streams: heads.map(waiting).collect(),
            datagram_bytes: self.datagrams.bytes(),
            rate: self.bandwidth(),
        }
    }
}
