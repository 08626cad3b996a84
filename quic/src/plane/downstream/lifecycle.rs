//! Moves streams between the scheduler's queues, sets their deadlines, and resets and ends them.

use std::time::Instant;

use super::{Cause, Downstream, DownstreamEvent, EventKind, Priority, StreamKey};
use crate::plane::{
    queues::StreamQueues,
    stream::{PlaneStream, SchedulerQueue, StreamNeed},
};

impl Downstream {
    pub(super) fn begin_reset(&mut self, key: StreamKey, code: u64, cause: Cause) {
        if self.streams.get(key).is_none_or(PlaneStream::is_reset) {
            return;
        }
        self.unplace(key);
        let Some(stream) = self.streams.get_mut(key) else { return };
        // A stream on which the kernel offload may send counts as opened even without an ID, because the offload may be
        // about to open it.
        let opened = stream.id.is_some() || stream.delegated;
        stream.reset(code);
        self.recall(key);
        self.disarm(key);
        // RESET_STREAM is small and frees the peer's resources, so it is sent with the highest priority.
        self.set_priority(key, Priority::default());
        let resets = &mut self.stats.resets;
        *match cause {
            Cause::Source => &mut resets.source,
            Cause::Requested => &mut resets.requested,
            Cause::Stopped => &mut resets.stopped,
            Cause::ObjectTimeout => &mut resets.object_timeout,
            Cause::SubgroupTimeout => &mut resets.subgroup_timeout,
            Cause::Evicted => &mut resets.evicted,
            Cause::Overflow => &mut resets.overflow,
            Cause::Late => &mut resets.late,
            Cause::Hopeless => &mut resets.hopeless,
            Cause::QueueFull => &mut resets.queue_full,
        } += 1;
        if opened {
            return self.place(key);
        }
        resets.unopened += 1;
        self.close(key, EventKind::Reset(code));
    }

    pub(super) fn close(&mut self, key: StreamKey, kind: EventKind) {
        self.unplace(key);
        self.disarm(key);
        self.recall(key);
        let Some(stream) = self.streams.remove(key) else { return };
        if let Some(id) = stream.id {
            self.by_id.remove(&id);
        }
        if let Some(owner) = self.owners.get_mut(&stream.owner) {
            owner.owned.live -= 1;
        }
        self.events.push_back(DownstreamEvent { key, owner: stream.owner, kind });
    }

    /// Starts the stream's subgroup delivery timeout, unless it is already running.
    pub(super) fn arm(&mut self, key: StreamKey, fin_at: Instant) {
        let Some(stream) = self.streams.get(key) else { return };
        if stream.deadline.is_none()
            && let Some(timeout) = stream.subgroup_timeout()
            && let Some(at) = fin_at.checked_add(timeout)
        {
            self.set_deadline(key, at);
        }
    }

    /// Sets the time at which the stream is reset if it has not ended, unless an earlier time is set.
    pub(super) fn set_deadline(&mut self, key: StreamKey, at: Instant) {
        let Some(stream) = self.streams.get_mut(key) else { return };
        let before = stream.deadline;
        let at = before.map_or(at, |before| before.min(at));
        stream.deadline = Some(at);
        if let Some(before) = before {
            self.deadlines.remove(&(before, key));
        }
        self.deadlines.insert((at, key));
    }

    fn disarm(&mut self, key: StreamKey) {
        if let Some(at) = self.streams.get_mut(key).and_then(|stream| stream.deadline.take()) {
            self.deadlines.remove(&(at, key));
        }
    }

    /// Moves the stream to the queue that its data and the peer's limits require.
    pub(super) fn place(&mut self, key: StreamKey) {
        let Some(stream) = self.streams.get_mut(key) else { return };
        let queue = match stream.need() {
            StreamNeed::Nothing => SchedulerQueue::None,
            // The kernel offload is about to open this stream, so the data plane must not open it.
            _ if stream.id.is_none() && stream.delegated => SchedulerQueue::None,
            _ if stream.id.is_none() && self.next_stream >= self.peer.max_streams_uni => {
                SchedulerQueue::Unopened
            }
            StreamNeed::Credit => SchedulerQueue::Starved,
            StreamNeed::Fresh if self.data_sent >= self.peer.max_data => SchedulerQueue::Blocked,
            StreamNeed::Fresh | StreamNeed::Repair => SchedulerQueue::Ready,
        };
        if queue == stream.queue {
            return;
        }
        self.unplace(key);
        let Some(stream) = self.streams.get_mut(key) else { return };
        stream.queue = queue;
        let place = stream.place(key);
        let is_reset = stream.is_reset();
        self.resets_owed += usize::from(is_reset && queue != SchedulerQueue::None);
        if let Some(queues) = self.queue(queue) {
            queues.insert(place);
        }
    }

    pub(super) fn unplace(&mut self, key: StreamKey) {
        let Some(stream) = self.streams.get_mut(key) else { return };
        let place = stream.place(key);
        let is_reset = stream.is_reset();
        let old = std::mem::take(&mut stream.queue);
        self.resets_owed -= usize::from(is_reset && old != SchedulerQueue::None);
        if let Some(queues) = self.queue(old) {
            queues.remove(place);
        }
    }

    fn queue(&mut self, queue: SchedulerQueue) -> Option<&mut StreamQueues> {
        match queue {
            SchedulerQueue::None => None,
            SchedulerQueue::Ready => Some(&mut self.ready),
            SchedulerQueue::Unopened => Some(&mut self.unopened),
            SchedulerQueue::Blocked => Some(&mut self.blocked),
            SchedulerQueue::Starved => Some(&mut self.starved),
        }
    }
}
