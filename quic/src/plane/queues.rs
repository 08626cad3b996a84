//! The order of sending: by priority, and round robin among owners (subscriptions) of the same priority level. MoQ
//! Transport draft-18, section "Scheduling Algorithm", expects that each owner of a level sends some data.

use std::collections::{BTreeMap, BTreeSet};

use super::types::{Priority, PriorityLevel, StreamKey};

/// Largest number of empty queues that are kept in memory with their round-robin position.
const IDLE_QUEUES: usize = 64;

/// The identity of a queue: the priority level and the owner that all its streams have.
type QueueId = (PriorityLevel, u64);

/// Streams that wait for the same thing, such as flow control credit. Each pair of owner and priority level has a
/// queue, sorted by group and subgroup.
#[derive(Default)]
pub struct StreamQueues {
    queues: BTreeMap<QueueId, OwnerQueue>,
    /// Queues that have streams, as (priority level, number of the last round-robin turn, owner). Within a level, the
    /// queue that was served longest ago comes first.
    order: BTreeSet<(PriorityLevel, u64, u64)>,
    /// Number of round-robin turns so far, over all queues.
    turns: u64,
    len: usize,
}

struct OwnerQueue {
    /// Number of the last round-robin turn in which this queue was served.
    turn: u64,
    /// The queue's streams, ordered by group and subgroup.
    streams: BTreeSet<(u64, u64, StreamKey)>,
}

/// The values that determine a stream's position in the queues.
#[derive(Clone, Copy, Debug)]
pub struct QueuePosition {
    pub priority: Priority,
    pub owner: u64,
    pub key: StreamKey,
}

impl StreamQueues {
    /// Returns the number of streams.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether no queue has a stream.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the stream to send next.
    pub fn first(&self) -> Option<(PriorityLevel, StreamKey)> {
        let (level, _, owner) = self.order.first()?;
        let (_, _, key) = self.queues.get(&(*level, *owner))?.streams.first()?;
        Some((*level, *key))
    }

    /// Adds a stream.
    pub fn insert(&mut self, place: QueuePosition) {
        let id = place.queue();
        let turn = self.turns;
        let queue = self.queues.entry(id).or_insert_with(|| OwnerQueue { turn, streams: BTreeSet::new() });
        if queue.streams.is_empty() {
            self.order.insert((id.0, queue.turn, id.1));
        }
        self.len += usize::from(queue.streams.insert(place.in_queue()));
    }

    /// Removes a stream.
    pub fn remove(&mut self, place: QueuePosition) {
        let id = place.queue();
        let Some(queue) = self.queues.get_mut(&id) else { return };
        if !queue.streams.remove(&place.in_queue()) {
            return;
        }
        self.len -= 1;
        if queue.streams.is_empty() {
            self.order.remove(&(id.0, queue.turn, id.1));
            if self.queues.len() > IDLE_QUEUES {
                self.queues.remove(&id);
            }
        }
    }

    /// Ends the round-robin turn of the queue that contains the position `place`, so that the other queues of its
    /// priority level are served next.
    pub fn rotate(&mut self, place: QueuePosition) {
        let id = place.queue();
        if self.order.len() < 2 {
            return;
        }
        let Some(queue) = self.queues.get_mut(&id) else { return };
        self.turns += 1;
        if self.order.remove(&(id.0, queue.turn, id.1)) {
            self.order.insert((id.0, self.turns, id.1));
        }
        queue.turn = self.turns;
    }

    /// Removes all streams, queue by queue, and returns them.
    pub fn drain(&mut self) -> Vec<StreamKey> {
        self.len = 0;
        self.order.clear();
        let queues = std::mem::take(&mut self.queues);
        queues.into_values().flat_map(|queue| queue.streams).map(|(_, _, key)| key).collect()
    }
}

impl QueuePosition {
    fn queue(&self) -> QueueId {
        (self.priority.level(), self.owner)
    }

    fn in_queue(&self) -> (u64, u64, StreamKey) {
        (self.priority.group, self.priority.subgroup, self.key)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(key: u64, owner: u64, publisher: u8, group: u64) -> QueuePosition {
        let priority = Priority { subscriber: 128, publisher, group, subgroup: 0 };
        QueuePosition { priority, owner, key: StreamKey(key) }
    }

    /// Serves `count` streams, one in each round-robin turn, and returns their keys.
    fn serve(queues: &mut StreamQueues, places: &[QueuePosition], count: usize) -> Vec<u64> {
        (0..count)
            .map_while(|_| {
                let (_, key) = queues.first()?;
                queues.rotate(*places.iter().find(|place| place.key == key)?);
                Some(key.0)
            })
            .collect()
    }

    #[test]
    fn streams_are_sent_by_priority_then_round_robin_then_group() {
        let places = [place(0, 1, 9, 5), place(1, 1, 9, 4), place(2, 2, 8, 99), place(3, 3, 10, 0)];
        let mut queues = StreamQueues::default();
        places.iter().for_each(|place| queues.insert(*place));
        assert_eq!(queues.len(), 4);
        assert_eq!(serve(&mut queues, &places, 3), [2, 2, 2]);
        queues.remove(places[2]);
        assert_eq!(serve(&mut queues, &places, 1), [1]);
        queues.remove(places[1]);
        assert_eq!(serve(&mut queues, &places, 1), [0]);
        assert_eq!(queues.drain(), [StreamKey(0), StreamKey(3)]);
        assert!(queues.is_empty() && queues.first().is_none());
    }

    #[test]
    fn queues_of_equal_priority_are_served_round_robin() {
        let places = [place(0, 1, 9, 1), place(1, 2, 9, 1_000_000), place(2, 3, 9, !7)];
        let mut queues = StreamQueues::default();
        places.iter().for_each(|place| queues.insert(*place));
        let served = serve(&mut queues, &places, 9);
        assert!(served.chunks(3).all(|round| round.iter().sum::<u64>() == 3 && round[0] != round[1]));
        // A queue that was empty for a while is served first, but then waits for its next turn.
        queues.remove(places[0]);
        serve(&mut queues, &places, 4);
        queues.insert(places[0]);
        let served = serve(&mut queues, &places, 6);
        assert_eq!(served[0], 0);
        assert_eq!(served.iter().filter(|key| **key == 0).count(), 2);
    }

    #[test]
    fn number_of_remembered_empty_stream_queues_is_bounded() {
        let mut queues = StreamQueues::default();
        for owner in 0..1000 {
            queues.insert(place(owner, owner, 1, 1));
            queues.remove(place(owner, owner, 1, 1));
        }
        assert!(queues.queues.len() <= IDLE_QUEUES && queues.order.is_empty());
    }
}
