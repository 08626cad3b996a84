//! Counts duplicates and gaps among the objects of a track that arrived, in little memory even for a long track.

use std::collections::VecDeque;

use millrace_moq::Location;
use millrace_quic::ranges::Ranges;
use serde::Serialize;

/// Number of groups whose objects are counted at the same time. An object of an older group counts as late.
const GROUPS: usize = 4;
/// Largest number of ranges of objects in a group that are remembered. If there are more, the objects in the first gap
/// count as missing, even if they arrive later.
const RANGES: usize = 32;

/// Numbers of objects that arrived, and of those that did not.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct SequenceCounts {
    /// Number of distinct objects that arrived.
    pub objects: u64,
    pub duplicates: u64,
    /// Objects that never arrived, although later ones of their group did.
    pub missing: u64,
    /// Objects that were not counted because their group is too old: only the newest groups are tracked.
    pub late: u64,
}

impl SequenceCounts {
    pub fn add(&mut self, other: Self) {
        self.objects += other.objects;
        self.duplicates += other.duplicates;
        self.missing += other.missing;
        self.late += other.late;
    }
}

/// The objects of one subscription, from the first one that arrived.
///
/// Objects may be inserted in any order. [`Sequence::finish`] is called last.
#[derive(Debug, Default)]
pub struct Sequence {
    /// Groups whose objects are still counted, in ascending order.
    groups: VecDeque<SequenceGroup>,
    /// The newest group whose objects are no longer counted.
    closed: Option<u64>,
    counts: SequenceCounts,
}

#[derive(Debug)]
struct SequenceGroup {
    id: u64,
    /// Whether the subscription started inside this group, so that the group's first objects do not count as missing.
    is_joined: bool,
    came: Ranges,
}

impl Sequence {
    /// Records an object that arrived.
    pub fn insert(&mut self, at: Location) {
        if self.closed.is_some_and(|closed| at.group <= closed) {
            self.counts.late += 1;
            return;
        }
        let place = self.place_of(at.group);
        let Some(group) = self.groups.get_mut(place) else { return };
        if group.came.contains(at.object) {
            self.counts.duplicates += 1;
            return;
        }
        group.came.insert(at.object..at.object.saturating_add(1));
        self.counts.objects += 1;
        self.counts.missing += group.give_up();
        while self.groups.len() > GROUPS {
            self.close_first();
        }
    }

    /// Returns the index of a group, and adds the group if it is new.
    fn place_of(&mut self, id: u64) -> usize {
        self.groups.binary_search_by_key(&id, |group| group.id).unwrap_or_else(|place| {
            // The subscription can have started only inside the oldest group of all.
            let is_joined = place == 0 && self.closed.is_none();
            self.groups.insert(place, SequenceGroup { id, is_joined, came: Ranges::default() });
            place
        })
    }

    fn close_first(&mut self) {
        if let Some(group) = self.groups.pop_front() {
            self.counts.missing += group.missing();
            self.closed = Some(group.id);
        }
    }

    /// Ends the counting. `end` is the location after the track's last object, if it is known.
    pub fn finish(mut self, end: Option<Location>) -> SequenceCounts {
        if let Some(end) = end
            && let Ok(place) = self.groups.binary_search_by_key(&end.group, |group| group.id)
            && let Some(last) = self.groups.get(place).and_then(|group| group.came.last())
        {
            self.counts.missing += end.object.saturating_sub(last.end);
        }
        while !self.groups.is_empty() {
            self.close_first();
        }
        self.counts
    }
}

impl SequenceGroup {
    /// Returns the number of missing objects before the last object of this group that arrived.
    fn missing(&self) -> u64 {
        let (Some(first), Some(last)) = (self.came.first(), self.came.last()) else { return 0 };
        let begin = if self.is_joined { first.start } else { 0 };
        last.end - begin - self.came.total()
    }

    /// While there are more than [`RANGES`] ranges of objects, counts the objects in the first gap as missing for good.
    /// Returns the number of objects in these gaps.
    fn give_up(&mut self) -> u64 {
        let mut missing = 0;
        while self.came.len() > RANGES {
            let mut ranges = self.came.iter();
            let (Some(first), Some(second)) = (ranges.next(), ranges.next()) else { break };
            drop(ranges);
            missing += second.start - first.end;
            // Marking the gap's objects as arrived merges the ranges before and after it. If an object from the gap
            // arrives later, it counts as a duplicate.
            self.came.insert(first.end..second.start);
        }
        missing
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(objects: impl IntoIterator<Item = (u64, u64)>, end: Option<(u64, u64)>) -> [u64; 4] {
        let mut sequence = Sequence::default();
        objects.into_iter().for_each(|(group, object)| sequence.insert(Location::new(group, object)));
        let SequenceCounts { objects, duplicates, missing, late } =
            sequence.finish(end.map(|(group, object)| Location::new(group, object)));
        [objects, duplicates, missing, late]
    }

    #[test]
    fn whole_track_has_no_gap() {
        assert_eq!(counts([], None), [0; 4]);
        let track = (0..100).flat_map(|group| (0..10).map(move |object| (group, object)));
        assert_eq!(counts(track, Some((99, 10))), [1000, 0, 0, 0]);
    }

    #[test]
    fn objects_before_the_first_received_one_do_not_count_as_missing() {
        assert_eq!(counts([(7, 5), (7, 6), (8, 0)], None), [3, 0, 0, 0]);
        // Objects of another subgroup or of an earlier group may arrive later.
        assert_eq!(counts([(7, 5), (7, 3), (6, 9)], None), [3, 0, 1, 0]);
    }

    #[test]
    fn gaps_and_duplicates_are_counted_in_any_order() {
        assert_eq!(counts([(0, 0), (0, 3), (0, 1), (0, 3)], None), [3, 1, 1, 0]);
        assert_eq!(
            counts([(0, 0), (1, 2)], None),
            [2, 0, 2, 0],
            "a later group begins with its first object"
        );
        assert_eq!(counts([(0, 0), (0, 1)], Some((0, 5))), [2, 0, 3, 0]);
    }

    #[test]
    fn object_of_a_group_that_is_no_longer_tracked_counts_as_late() {
        let groups = GROUPS as u64 + 1;
        let track = (0..groups).map(|group| (group, 0)).chain([(0, 1)]);
        assert_eq!(counts(track, None), [groups, 0, 0, 1]);
    }

    #[test]
    fn gap_tracking_memory_is_bounded_with_every_second_object_missing() {
        let mut sequence = Sequence::default();
        for object in 0..10_000 {
            sequence.insert(Location::new(0, object * 2));
        }
        assert!(sequence.groups[0].came.len() <= RANGES);
        assert_eq!(
            sequence.finish(None),
            SequenceCounts { objects: 10_000, missing: 9_999, ..SequenceCounts::default() }
        );
    }

    #[test]
    fn largest_object_id_is_accepted() {
        assert_eq!(counts([(0, u64::MAX - 1), (u64::MAX, u64::MAX)], None)[0], 2);
    }
}
