//! Order of sending: by priority, and in turns among subscriptions of the same priority (draft-18, section
//! "Scheduling Algorithm": all of them are expected to send some data).

use std::collections::{BTreeMap, BTreeSet};

use super::types::{Level, Priority, StreamKey};

/// Lanes without streams that are kept for their turn and their allocation.
const IDLE_LANES: usize = 64;

/// A set of streams: a lane for each owner and level, and in a lane the order of groups and subgroups.
#[derive(Default)]
pub struct Lanes {
    lanes: BTreeMap<(Level, u64), Lane>,
    /// Lanes with streams, by level and by whose turn was longest ago.
    order: BTreeSet<(Level, u64, u64)>,
    turns: u64,
    len: usize,
}

struct Lane {
    /// When the lane last had its turn.
    turn: u64,
    streams: BTreeSet<(u64, u64, StreamKey)>,
}

/// A stream's place.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    pub priority: Priority,
    pub owner: u64,
    pub key: StreamKey,
}

impl Lanes {
    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The stream to send next.
    pub fn first(&self) -> Option<(Level, StreamKey)> {
        let (level, _, owner) = self.order.first()?;
        let (_, _, key) = self.lanes.get(&(*level, *owner))?.streams.first()?;
        Some((*level, *key))
    }

    /// The stream that would be sent last.
    pub fn last(&self) -> Option<(Level, StreamKey)> {
        let (level, _, owner) = self.order.last()?;
        let (_, _, key) = self.lanes.get(&(*level, *owner))?.streams.last()?;
        Some((*level, *key))
    }

    pub fn insert(&mut self, place: Place) {
        let id = (place.level(), place.owner);
        let turn = self.turns;
        let lane = self.lanes.entry(id).or_insert_with(|| Lane { turn, streams: BTreeSet::new() });
        if lane.streams.is_empty() {
            self.order.insert((id.0, lane.turn, id.1));
        }
        self.len += usize::from(lane.streams.insert(place.in_lane()));
    }

    pub fn remove(&mut self, place: Place) {
        let id = (place.level(), place.owner);
        let Some(lane) = self.lanes.get_mut(&id) else { return };
        if !lane.streams.remove(&place.in_lane()) {
            return;
        }
        self.len -= 1;
        if lane.streams.is_empty() {
            self.order.remove(&(id.0, lane.turn, id.1));
            if self.lanes.len() > IDLE_LANES {
                self.lanes.remove(&id);
            }
        }
    }

    /// The lane of this place had its turn: the others of its level come first now.
    pub fn rotate(&mut self, place: Place) {
        let id = (place.level(), place.owner);
        if self.order.len() < 2 {
            return;
        }
        let Some(lane) = self.lanes.get_mut(&id) else { return };
        self.turns += 1;
        if self.order.remove(&(id.0, lane.turn, id.1)) {
            self.order.insert((id.0, self.turns, id.1));
        }
        lane.turn = self.turns;
    }

    /// Takes all streams out, in the order of their lanes.
    pub fn drain(&mut self) -> Vec<StreamKey> {
        self.len = 0;
        self.order.clear();
        let lanes = std::mem::take(&mut self.lanes);
        lanes.into_values().flat_map(|lane| lane.streams).map(|(_, _, key)| key).collect()
    }
}

impl Place {
    fn level(&self) -> Level {
        self.priority.level()
    }

    fn in_lane(&self) -> (u64, u64, StreamKey) {
        (self.priority.group, self.priority.subgroup, self.key)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(key: u64, owner: u64, publisher: u8, group: u64) -> Place {
        let priority = Priority { subscriber: 128, publisher, group, subgroup: 0 };
        Place { priority, owner, key: StreamKey(key) }
    }

    /// The next `count` streams, each served once per turn.
    fn serve(lanes: &mut Lanes, places: &[Place], count: usize) -> Vec<u64> {
        (0..count)
            .map_while(|_| {
                let (_, key) = lanes.first()?;
                lanes.rotate(*places.iter().find(|place| place.key == key)?);
                Some(key.0)
            })
            .collect()
    }

    #[test]
    fn priority_before_turns_and_groups_within_a_lane() {
        let places = [place(0, 1, 9, 5), place(1, 1, 9, 4), place(2, 2, 8, 99), place(3, 3, 10, 0)];
        let mut lanes = Lanes::default();
        places.iter().for_each(|place| lanes.insert(*place));
        assert_eq!(lanes.len(), 4);
        assert_eq!(serve(&mut lanes, &places, 3), [2, 2, 2]);
        assert_eq!(lanes.last(), Some(((128, 10), StreamKey(3))));
        lanes.remove(places[2]);
        assert_eq!(serve(&mut lanes, &places, 1), [1]);
        lanes.remove(places[1]);
        assert_eq!(serve(&mut lanes, &places, 1), [0]);
        assert_eq!(lanes.drain(), [StreamKey(0), StreamKey(3)]);
        assert!(lanes.is_empty() && lanes.first().is_none());
    }

    #[test]
    fn equal_priorities_take_turns_whatever_their_groups() {
        let places = [place(0, 1, 9, 1), place(1, 2, 9, 1_000_000), place(2, 3, 9, !7)];
        let mut lanes = Lanes::default();
        places.iter().for_each(|place| lanes.insert(*place));
        let served = serve(&mut lanes, &places, 9);
        assert!(served.chunks(3).all(|round| round.iter().sum::<u64>() == 3 && round[0] != round[1]));
        // A lane that was idle for a while goes first once, not more.
        lanes.remove(places[0]);
        serve(&mut lanes, &places, 4);
        lanes.insert(places[0]);
        let served = serve(&mut lanes, &places, 6);
        assert_eq!(served[0], 0);
        assert_eq!(served.iter().filter(|key| **key == 0).count(), 2);
    }

    #[test]
    fn idle_lanes_are_forgotten() {
        let mut lanes = Lanes::default();
        for owner in 0..1000 {
            lanes.insert(place(owner, owner, 1, 1));
            lanes.remove(place(owner, owner, 1, 1));
        }
        assert!(lanes.lanes.len() <= IDLE_LANES && lanes.order.is_empty());
    }
}
