//! The gap of a track: the objects that it has missed while its source was away or changed.

use std::time::{Duration, Instant};

use super::track::Track;
use crate::Location;

/// How many requests in a row may stay without an answer before the track's sources are not asked for [`REST`]. Sources
/// that break when they are asked would otherwise be kept from serving the track.
const UNANSWERED: u32 = 3;
const REST: Duration = Duration::from_secs(60);
/// When a source is lost, objects of this many latest groups may have been on their way. Each group has a stream of its
/// own, so a later group may have arrived before an earlier one.
const UNDELIVERED: u64 = 8;

/// The gap of a track. It is *open* from [`Self::open`] until [`Self::close`].
#[derive(Debug, Default)]
pub struct GapState {
    from: Option<Location>,
    /// The first group that the source sends, once it is known.
    until: Option<u64>,
    /// Objects from here on may be missing although no gap is open, since a source was silent or lost: it may not have
    /// delivered them, and the next source may have lacked them itself.
    doubted: Option<Location>,
    /// Start of the range for which the cache answered before the gap was opened.
    known: Option<Location>,
    /// Number of times that the gap was opened, or opened again while it was open.
    openings: u64,
    /// Number of requests in a row without an answer, and the time of the last one.
    unanswered: u32,
    asked_at: Option<Instant>,
}

/// How a gap ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GapEnd {
    /// A source has given everything in the gap that exists.
    Filled,
    /// The track has every object before the first group of the source.
    Bridged,
    /// Some of the objects in the gap did not come.
    Unfilled,
    /// The track starts over or ends.
    Over,
}

impl GapState {
    /// Records that the track's source is silent or lost. Until a source has filled a gap, the next gap begins where the
    /// first object is missing among those of the latest groups and of later ones.
    pub fn doubt(&mut self, data: &Track) {
        let Some(last) = data.last_seen().filter(|_| self.doubted.is_none()) else { return };
        // While the gap is open, the cache does not answer for what it had before.
        let known = self.known.or_else(|| data.known_from());
        let groups = known.map_or(1, |_| UNDELIVERED);
        self.doubted = known.max(Some(Location { group: last.group.saturating_sub(groups), object: 0 }));
    }

    /// Reports whether a source was silent or lost, and nothing has been filled since.
    pub fn is_doubted(&self) -> bool {
        self.doubted.is_some()
    }

    /// Opens the gap behind the largest object of the track, or where an earlier object is missing that the open gap or
    /// a silent source may owe. The cache does not answer for the gap from then on. A track without objects has no gap.
    pub fn open(&mut self, data: &Track) {
        if let Some(from) = data.position() {
            self.open_at(data, from);
        }
    }

    /// Opens the gap like [`Self::open`], with `from` in place of the end of the track: later objects have come from
    /// another source.
    pub fn open_at(&mut self, data: &Track, from: Location) {
        if self.from.is_none() {
            self.known = data.known_from();
        }
        self.openings += 1;
        let until = self.until.take().map(|group| Location { group, object: 0 });
        let gap = self.from.zip(until).filter(|_| self.doubted.is_none());
        let is_bridged = gap.is_some_and(|(from, until)| data.first_missing(from, until).is_none());
        // A source may number its groups with gaps, so nothing is looked for between groups of a source that answered.
        let since = self.from.into_iter().chain(self.doubted).min().filter(|_| !is_bridged);
        self.from = since.and_then(|since| data.first_missing(since, from)).or(Some(from));
        data.missed_before(None);
    }

    /// Records the first group that the source sends.
    pub fn ends_at(&mut self, group: u64) {
        self.until = Some(group);
    }

    /// Returns a number that changes when the gap is opened, again or not. What is asked for after that counts: an answer
    /// to an earlier request must not close the gap.
    pub fn openings(&self) -> u64 {
        self.openings
    }

    /// Returns the first location that may be missing, if the gap is open.
    pub fn from(&self) -> Option<Location> {
        self.from
    }

    /// Closes the gap. If nothing is missing any more, the cache of the track answers for it again.
    pub fn close(&mut self, data: &Track, end: GapEnd) {
        let from = self.from.take();
        let known = self.known.take().filter(|_| from.is_some());
        self.doubted.take_if(|_| matches!(end, GapEnd::Filled | GapEnd::Over));
        if matches!(end, GapEnd::Filled | GapEnd::Bridged) {
            known.into_iter().for_each(|known| data.bridged(known));
        }
    }

    /// Reports whether a source may be asked now, and counts the request as unanswered.
    pub fn may_ask(&mut self, now: Instant) -> bool {
        let rests = self.asked_at.is_some_and(|at| now.saturating_duration_since(at) < REST);
        if self.unanswered >= UNANSWERED && rests {
            return false;
        }
        self.unanswered += 1;
        self.asked_at = Some(now);
        true
    }

    /// Records that a source has answered.
    pub fn answered(&mut self) {
        self.unanswered = 0;
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::{Namespace, SubgroupHeader, SubgroupId, TrackName, tracks::subgroup::SubgroupStream};

    #[test]
    fn gap_begins_where_something_is_missing_since_the_gaps_before_it() {
        let now = Instant::now();
        let name = TrackName::new(Namespace::from_path("live").unwrap(), "video").unwrap();
        let data = Track::new(name);
        let header = |group| SubgroupHeader {
            alias: 1,
            group,
            subgroup: SubgroupId::Zero,
            priority: None,
            properties: false,
            end_of_group: false,
            first_object: true,
        };
        let publish = |group| {
            let mut writer = SubgroupStream::begin(header(group), 3);
            data.add_subgroup(now, Arc::clone(writer.subgroup()), &Arc::default()).unwrap();
            let pushed = writer.push(now, &[0, 1, 7], |_| Ok(())).unwrap();
            data.grew(group, &pushed);
            writer.finish(now).unwrap();
        };
        let mut gap = GapState::default();
        gap.open(&data);
        assert_eq!(gap.from(), None, "nothing has arrived");
        publish(10);
        gap.open(&data);
        assert_eq!(gap.from(), Some(Location::new(10, 1)));
        publish(20);
        gap.open(&data);
        assert_eq!(gap.from(), Some(Location::new(11, 0)), "groups 11 to 19 may be missing");
        gap.ends_at(11);
        gap.open(&data);
        assert_eq!(gap.from(), Some(Location::new(20, 1)), "a source may number its groups with gaps");
        // The source was silent, and the next one lacks some groups itself.
        publish(21);
        gap.doubt(&data);
        publish(25);
        gap.close(&data, GapEnd::Bridged);
        gap.open(&data);
        assert_eq!(
            gap.from(),
            Some(Location::new(13, 0)),
            "eight groups before the last one of the silent source"
        );
        for (end, from) in [(GapEnd::Unfilled, (13, 0)), (GapEnd::Filled, (25, 1)), (GapEnd::Over, (25, 1))] {
            gap.close(&data, end);
            assert_eq!(gap.from(), None);
            gap.open(&data);
            assert_eq!(gap.from(), Some(Location::new(from.0, from.1)), "{end:?}");
        }
        // A source may have had later objects before the gap was noticed.
        gap.open_at(&data, Location::new(10, 1));
        assert_eq!(gap.from(), Some(Location::new(10, 1)));
    }

    #[test]
    fn sources_that_never_answer_are_asked_three_times_and_then_once_a_minute() {
        let now = Instant::now();
        let mut gap = GapState::default();
        assert!((0..UNANSWERED).all(|_| gap.may_ask(now)) && !gap.may_ask(now + REST / 2));
        assert!(gap.may_ask(now + REST) && !gap.may_ask(now + REST));
        gap.answered();
        assert!(gap.may_ask(now + REST));
    }
}
