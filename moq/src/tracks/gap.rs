//! The gap of a track: the objects that it has missed while its source was away or changed.

use std::time::{Duration, Instant};

use super::track::Track;
use crate::Location;

/// How many requests in a row may stay without an answer before the track's sources are not asked for [`REST`]. Sources
/// that break when they are asked would otherwise be kept from serving the track.
const UNANSWERED: u32 = 3;
const REST: Duration = Duration::from_secs(60);

/// The gap of a track. It is *open* from [`Self::open`] until [`Self::close`].
#[derive(Debug, Default)]
pub struct GapState {
    from: Option<Location>,
    /// The first group that the source sends, once it is known.
    until: Option<u64>,
    known: Option<Location>,
    /// Number of requests in a row without an answer, and the time of the last one.
    unanswered: u32,
    asked_at: Option<Instant>,
}

impl GapState {
    /// Opens the gap behind the largest object of the track, unless it is open already or nothing has arrived. The
    /// cache does not answer for the gap from then on. An open gap in which nothing is missing is replaced.
    pub fn open(&mut self, data: &Track) {
        if let Some(from) = data.position() {
            self.open_at(data, from);
        }
    }

    /// Opens the gap at `from` and not behind the largest object, since later objects have come from another source.
    pub fn open_at(&mut self, data: &Track, from: Location) {
        let until = self.until.map(|group| Location { group, object: 0 });
        match self.from.zip(until).map(|(from, until)| data.first_missing(from, until)) {
            Some(None) => {}
            _ if self.from.is_some() => return,
            _ => self.known = data.known_from(),
        }
        self.from = Some(from);
        self.until = None;
        data.missed_before(None);
    }

    /// Records the first group that the source sends.
    pub fn ends_at(&mut self, group: u64) {
        self.until = Some(group);
    }

    /// Returns the first location that may be missing, if the gap is open.
    pub fn from(&self) -> Option<Location> {
        self.from
    }

    /// Closes the gap. If it was filled, the cache of the track answers for it again.
    pub fn close(&mut self, data: &Track, is_filled: bool) {
        let is_open = self.from.take().is_some();
        self.until = None;
        let known = self.known.take().filter(|_| is_open && is_filled);
        known.into_iter().for_each(|known| data.bridged(known));
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
    fn open_gap_without_missing_objects_is_replaced_by_the_next() {
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
        publish(20);
        gap.open(&data);
        assert_eq!(gap.from(), Some(Location::new(10, 1)), "it is not known what comes next");
        gap.ends_at(20);
        gap.open(&data);
        assert_eq!(gap.from(), Some(Location::new(10, 1)), "groups 11 to 19 may be missing");
        gap.ends_at(11);
        gap.open(&data);
        assert_eq!(gap.from(), Some(Location::new(20, 1)));
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
