//! The objects of a track that a subscriber has received. A new session then goes on where the earlier one ended.

use std::collections::BTreeMap;

use millrace_moq::Location;

/// Number of newest groups that are remembered. An earlier session that is slow may deliver their objects long after the
/// present one did.
const GROUPS: usize = 64;
/// A gap is looked for only in this many newest groups. Earlier groups count as complete.
const RECENT: usize = 8;
/// The most ranges of object IDs that are remembered of a group. Further gaps between them count as received.
const RANGES: usize = 64;
/// A group whose ID is lower than the newest one by at least this much comes from a restarted publisher.
const BEHIND: u64 = 64;

/// The locations of a track's newest objects that have arrived.
#[derive(Clone, Debug, Default)]
pub(crate) struct ReceivedTrack {
    groups: BTreeMap<u64, ReceivedGroup>,
    /// The largest location that earlier sessions have received. The present session may send objects up to it again.
    earlier: Option<Location>,
    /// Number of times that another session went on.
    pub session: u64,
}

#[derive(Clone, Debug, Default)]
struct ReceivedGroup {
    /// The ranges of object IDs that have arrived, in ascending order. Both ends are included.
    ids: Vec<(u64, u64)>,
    /// Number of streams of the group that have begun and have not finished.
    open: usize,
}

impl ReceivedTrack {
    /// Records that a stream of `group` has begun.
    pub fn begin(&mut self, group: u64) {
        if let Some(group) = self.group(group) {
            group.open += 1;
        }
    }

    /// Records that a stream of `group` has finished, in the session with the given number. A stream that was reset has
    /// not.
    pub fn finish(&mut self, group: u64, session: u64) {
        if let Some(group) = self.groups.get_mut(&group).filter(|_| session == self.session) {
            group.open = group.open.saturating_sub(1);
        }
    }

    /// Records that another session goes on where the present one has ended.
    pub fn go_on(&mut self) {
        self.session += 1;
        let newest = self.groups.last_key_value();
        self.earlier = newest.and_then(|(id, group)| Some(Location::new(*id, group.ids.last()?.1)));
    }

    /// Forgets all objects, since their publisher was restarted and may use the same locations for others.
    pub fn begin_anew(&mut self) {
        *self = Self { session: self.session, ..Self::default() };
    }

    /// Records that an object of a subscription has arrived, in the session with the given number. Returns false if
    /// another session has received it. An earlier session may still deliver objects when the present one has begun.
    pub fn is_wanted(&mut self, location: Location, session: u64) -> bool {
        let is_new = self.insert(location);
        if session != self.session {
            self.earlier = self.earlier.max(Some(location));
            return is_new;
        }
        is_new || self.earlier.is_none_or(|earlier| location > earlier)
    }

    /// Records that an object has arrived. Returns false if it is known to have arrived before.
    pub fn insert(&mut self, location: Location) -> bool {
        self.group(location.group).is_none_or(|group| group.insert(location.object))
    }

    /// Returns the group, or `None` if it is older than those that are remembered.
    fn group(&mut self, id: u64) -> Option<&mut ReceivedGroup> {
        if self.groups.last_key_value().is_some_and(|(newest, _)| id.saturating_add(BEHIND) < *newest) {
            self.groups.clear();
        }
        let is_older = self.groups.first_key_value().is_some_and(|(oldest, _)| id < *oldest);
        if is_older && self.groups.len() == GROUPS {
            return None;
        }
        if !self.groups.contains_key(&id) && self.groups.len() == GROUPS {
            self.groups.pop_first();
        }
        Some(self.groups.entry(id).or_default())
    }

    /// Returns the first location that may be missing. Nothing is missing before the first object that has arrived.
    /// Returns `None` if no object has arrived.
    pub fn first_missing(&self) -> Option<Location> {
        let newest = *self.groups.last_key_value()?.0;
        let mut before = None;
        for (id, group) in self.groups.iter().skip(self.groups.len().saturating_sub(RECENT)) {
            let skipped = before.and_then(|before: u64| before.checked_add(1)).filter(|next| next < id);
            if let Some(next) = skipped {
                return Some(Location::new(next, 0));
            }
            let missing = match group.ids.first() {
                None if before.is_none() => continue,
                Some((first, last)) if before.is_none() || *first == 0 => last.saturating_add(1),
                _ => 0,
            };
            if *id == newest || group.open > 0 || group.ids.len() != 1 || missing == 0 {
                return Some(Location::new(*id, missing));
            }
            before = Some(*id);
        }
        None
    }
}

impl ReceivedGroup {
    fn insert(&mut self, id: u64) -> bool {
        let at = self.ids.partition_point(|(_, last)| *last < id);
        if self.ids.get(at).is_some_and(|(first, _)| *first <= id) {
            return false;
        }
        let joins_next = self.ids.get(at).is_some_and(|(first, _)| *first == id.saturating_add(1));
        let joins_last = at > 0 && self.ids[at - 1].1.saturating_add(1) == id;
        match (joins_last, joins_next) {
            (true, true) => self.ids[at - 1].1 = self.ids.remove(at).1,
            (true, false) => self.ids[at - 1].1 = id,
            (false, true) => self.ids[at].0 = id,
            (false, false) => self.ids.insert(at, (id, id)),
        }
        if self.ids.len() > RANGES {
            self.ids[0].1 = self.ids.remove(1).1;
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn received(groups: &[(u64, &[u64], bool)]) -> ReceivedTrack {
        let mut track = ReceivedTrack::default();
        for (group, ids, is_finished) in groups {
            track.begin(*group);
            ids.iter().for_each(|id| assert!(track.insert(Location::new(*group, *id)), "{group} {id}"));
            if *is_finished {
                track.finish(*group, 0);
            }
        }
        track
    }

    #[test]
    fn first_missing_location_is_behind_the_first_gap_that_a_new_session_can_fill() {
        type Groups<'a> = &'a [(u64, &'a [u64], bool)];
        let table: [(Groups<'_>, Option<(u64, u64)>); 9] = [
            (&[], None),
            (&[(5, &[], false)], None),
            (&[(5, &[], false), (6, &[3], false)], Some((6, 4))),
            // Nothing is missing before the object with which the subscription began.
            (&[(5, &[3, 4], false)], Some((5, 5))),
            (&[(5, &[0, 1], true), (6, &[0], false)], Some((6, 1))),
            (&[(5, &[0, 1], false), (6, &[0, 1], true)], Some((5, 2))),
            (&[(5, &[0, 1], true), (7, &[0], true)], Some((6, 0))),
            (&[(5, &[0], true), (6, &[1, 0, 3], true), (7, &[0], true)], Some((6, 2))),
            (&[(5, &[0], true), (6, &[2], true)], Some((6, 0))),
        ];
        for (groups, missing) in table {
            let missing = missing.map(|(group, object)| Location::new(group, object));
            assert_eq!(received(groups).first_missing(), missing, "{groups:?}");
        }
    }

    #[test]
    fn object_that_arrives_twice_is_known() {
        let mut track = received(&[(5, &[0, 1, 4, 2, 7], true)]);
        for (id, is_new) in [(0, false), (2, false), (3, true), (3, false), (5, true), (7, false), (6, true)]
        {
            assert_eq!(track.insert(Location::new(5, id)), is_new, "{id}");
        }
        assert_eq!(track.groups[&5].ids, [(0, 7)]);
    }

    #[test]
    fn object_that_an_earlier_session_has_received_is_not_wanted() {
        let mut track = received(&[(5, &[0, 1], true), (6, &[0, 1], false)]);
        assert!(track.is_wanted(Location::new(6, 1), 0), "the session itself has sent it twice");
        track.go_on();
        assert!(track.is_wanted(Location::new(6, 2), 0), "the earlier session delivers it late");
        let wanted = [(5, 1), (6, 1), (6, 2), (6, 3), (6, 3), (5, 2)]
            .map(|(group, id)| track.is_wanted(Location::new(group, id), 1));
        assert_eq!(wanted, [false, false, false, true, true, true]);
        assert!(!track.is_wanted(Location::new(6, 3), 0));
    }

    /// The present session has fetched an object, and received many groups, when the earlier one delivers the object.
    #[test]
    fn object_that_an_earlier_session_delivers_many_groups_later_is_known() {
        let mut track = received(&[(5, &[0], false)]);
        track.go_on();
        assert!(track.insert(Location::new(5, 1)), "fetched");
        (6..60).for_each(|group| assert!(track.is_wanted(Location::new(group, 0), 1)));
        assert!(!track.is_wanted(Location::new(5, 1), 0));
        assert!(track.is_wanted(Location::new(5, 2), 0));
        // No gap of so old a group is filled any more.
        (52..60).for_each(|group| track.begin(group));
        (52..60).for_each(|group| track.finish(group, 1));
        assert_eq!(track.first_missing(), Some(Location::new(59, 1)));
    }

    #[test]
    fn memory_of_received_objects_is_bounded_and_survives_a_restart_of_the_numbering() {
        let mut track = ReceivedTrack::default();
        for group in 0..100 {
            track.begin(group);
            (0..1000).for_each(|id| assert!(track.insert(Location::new(group, id * 2))));
        }
        assert_eq!((track.groups.len(), track.groups[&99].ids.len()), (GROUPS, RANGES));
        track.insert(Location::new(3, 0));
        assert_eq!(track.first_missing(), Some(Location::new(3, 1)));
    }
}
