//! Sorts the objects that arrive on a track's streams by group and object ID.

use std::collections::{BTreeMap, VecDeque};

use bytes::Bytes;
use millrace_moq::Location;

use crate::object::ReceivedObject;
use crate::receive::TrackEvent;

/// A queue that returns objects in the order of their locations.
///
/// Groups are returned one after the other. Within a group, an object is returned when no open stream can still carry
/// an earlier one. Objects that arrive too late are dropped. [`push`](Self::push) every event of the
/// receiver's queue, and call [`pop`](Self::pop) until it returns `None`. If [`is_waiting`](Self::is_waiting) lasts too
/// long, call `pop` with `now`, which skips the missing objects.
#[derive(Debug, Default)]
pub struct Sequencer {
    waiting: BTreeMap<Location, Bytes>,
    /// The ID of the last object that arrived on each open stream, by group ID and stream ID.
    open: BTreeMap<(u64, u64), Option<u64>>,
    /// The location after the last object that was returned.
    next: Option<Location>,
    /// The location at which the subscription began, if it is within a group. An object at this location may be the
    /// first one that is returned.
    inside: Option<Location>,
    /// IDs of the latest groups whose first object was returned. If such a group begins again, the publisher may have
    /// restarted.
    begun: VecDeque<u64>,
    /// Objects with lower locations than those returned, which may come from a restarted publisher. These objects are
    /// dropped if another object arrives that continues the old numbering.
    aside: Vec<ReceivedObject>,
}

/// Number of latest groups whose IDs are remembered. An object whose group is more than this number of groups behind
/// the last returned object is not just late: its publisher has restarted.
const REMEMBERED: usize = 64;
/// If the group ID rises by more than this number between two objects, the queue does not wait for the groups in
/// between.
const JUMP: u64 = 64;
/// Largest number of objects that are kept while it is not known whether the publisher has restarted.
const ASIDE: usize = 256;

impl Sequencer {
    /// Makes the queue return only objects after `last`. The subscriber has received the objects up to `last` in
    /// another way: in a FETCH response, or in the stream of earlier objects that FILL_PARAMETERS requests.
    pub fn skip_to(&mut self, last: Location) {
        self.next = Some(Location::new(last.group, last.object.saturating_add(1)));
    }

    /// Makes the queue go on at `next`: a session before this one has returned the objects before it.
    pub(crate) fn go_on_at(&mut self, next: Location) {
        self.next = self.next.max(Some(next));
    }

    /// Allows `first` to be the first object that is returned. By default only the first object of a group may be.
    pub fn may_begin_at(&mut self, first: Location) {
        self.inside = Some(first);
    }

    /// Processes an event, such as an arrived object, from the receiver's queue of the track.
    pub fn push(&mut self, step: TrackEvent) {
        match step {
            TrackEvent::Opened { group, stream } => {
                self.open.insert((group, stream), None);
            }
            TrackEvent::Object { object, stream } => {
                self.open.insert((object.location.group, stream), Some(object.location.object));
                self.wait(object);
            }
            TrackEvent::Closed { group, stream } => {
                self.open.remove(&(group, stream));
                if !self.has_newer() {
                    std::mem::take(&mut self.aside).into_iter().for_each(|object| self.wait(object));
                }
            }
            TrackEvent::Datagram(object) => self.wait(object),
        }
    }

    fn wait(&mut self, object: ReceivedObject) {
        let begins_anew = self.begins_anew(object.location);
        if begins_anew && !self.has_newer() {
            tracing::info!(
                group = object.location.group,
                "the publisher was restarted and numbers its groups from the beginning"
            );
            *self = Self { open: std::mem::take(&mut self.open), ..Self::default() };
            self.open.retain(|(group, _), _| *group <= object.location.group);
        }
        if self.next.is_none_or(|next| object.location >= next) {
            // `object` continues the old group numbering, so the publisher was not restarted. The objects in `aside`,
            // which were kept in case it was restarted, were merely late.
            self.aside.clear();
            self.waiting.insert(object.location, object.payload);
        } else if self.aside.len() < ASIDE && (begins_anew || self.is_aside(object.location)) {
            self.aside.push(object);
        }
    }

    /// Reports whether an object may come from a restarted publisher that counts groups from the beginning again. The
    /// object then begins a group that has begun before, or that is far behind the current group. The restart is
    /// certain only if no object with the old numbering can arrive any more.
    fn begins_anew(&self, location: Location) -> bool {
        let Some(next) = self.next.filter(|next| location.object == 0 && location.group < next.group) else {
            return false;
        };
        self.begun.contains(&location.group) || next.group - location.group > REMEMBERED as u64
    }

    /// Reports whether objects wait in the queue, or streams are open, of the group that is being returned or of later
    /// groups.
    fn has_newer(&self) -> bool {
        let is_open = |next: Location| self.open.range((next.group, 0)..).next().is_some();
        !self.waiting.is_empty() || self.next.is_some_and(is_open)
    }

    /// Reports whether an object at `location` may come from a restarted publisher, because it follows the last object
    /// in `aside`. Objects that may come from a restarted publisher are kept there.
    fn is_aside(&self, location: Location) -> bool {
        self.aside.last().is_some_and(|last| last.location < location)
    }

    /// Reports whether any object waits for an object with a lower location.
    pub fn is_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Returns the next object in order, or `None` if an earlier object may still arrive. If `now` is true, returns the
    /// waiting object with the lowest location, and skips the missing objects before it.
    pub fn pop(&mut self, now: bool) -> Option<ReceivedObject> {
        let (location, _) = self.waiting.first_key_value()?;
        let location = *location;
        if !now && !self.is_next(location) {
            return None;
        }
        self.next = Some(Location::new(location.group, location.object.saturating_add(1)));
        if location.object == 0 {
            if self.begun.len() == REMEMBERED {
                self.begun.pop_front();
            }
            self.begun.push_back(location.group);
        }
        self.waiting.remove(&location).map(|payload| ReceivedObject { location, payload })
    }

    fn is_next(&self, location: Location) -> bool {
        let nothing_before = |group| {
            let mut streams = self.open.range((group, 0)..=(group, u64::MAX));
            streams.all(|(_, last)| last.is_some_and(|last| last >= location.object))
        };
        match self.next {
            // A group's first object, a key frame, may be on another stream than the objects after it, and arrive after
            // them.
            None => (location.object == 0 || self.inside == Some(location)) && nothing_before(location.group),
            Some(next) if next == location => true,
            Some(next) if next.group == location.group => nothing_before(location.group),
            // The next group begins when no stream of the current group is open. The queue waits for the next group's
            // first object, because packet loss may delay that object's stream.
            Some(next) => {
                let is_over = self.open.range((next.group, 0)..=(next.group, u64::MAX)).next().is_none();
                // A publisher that is restarted continues with a much larger group ID.
                let follows =
                    location.group == next.group + 1 || location.group > next.group.saturating_add(JUMP);
                is_over && location.object == 0 && follows
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn object(group: u64, id: u64, stream: u64) -> TrackEvent {
        let payload = Bytes::from(format!("{group}.{id}"));
        TrackEvent::Object { object: ReceivedObject { location: Location::new(group, id), payload }, stream }
    }

    fn drain(sequencer: &mut Sequencer, now: bool) -> Vec<String> {
        let text = |object: ReceivedObject| String::from_utf8_lossy(&object.payload).into_owned();
        std::iter::from_fn(|| sequencer.pop(now)).map(text).collect()
    }

    #[test]
    fn next_group_waits_for_the_end_of_the_previous_group() {
        let mut sequencer = Sequencer::default();
        sequencer.push(TrackEvent::Opened { group: 4, stream: 3 });
        sequencer.push(object(4, 0, 3));
        assert_eq!(drain(&mut sequencer, false), ["4.0"]);
        sequencer.push(TrackEvent::Opened { group: 5, stream: 7 });
        sequencer.push(object(5, 0, 7));
        assert!(drain(&mut sequencer, false).is_empty());
        sequencer.push(object(4, 1, 3));
        sequencer.push(TrackEvent::Closed { group: 4, stream: 3 });
        assert_eq!(drain(&mut sequencer, false), ["4.1", "5.0"]);
        sequencer.push(object(4, 2, 3));
        assert!(drain(&mut sequencer, false).is_empty());
    }

    #[test]
    fn delta_frames_do_not_overtake_their_key_frame() {
        let mut sequencer = Sequencer::default();
        sequencer.skip_to(Location::new(0, 9));
        sequencer.push(TrackEvent::Opened { group: 1, stream: 4 });
        sequencer.push(object(1, 1, 4));
        assert!(drain(&mut sequencer, false).is_empty(), "the key frame's stream was held up");
        sequencer.push(TrackEvent::Opened { group: 1, stream: 3 });
        sequencer.push(object(1, 0, 3));
        sequencer.push(TrackEvent::Closed { group: 1, stream: 3 });
        assert_eq!(drain(&mut sequencer, false), ["1.0", "1.1"]);
        // The stream of the delta frames ends early. The next key frame does not wait for the missing delta frames.
        sequencer.push(TrackEvent::Closed { group: 1, stream: 4 });
        sequencer.push(TrackEvent::Opened { group: 2, stream: 5 });
        sequencer.push(object(2, 0, 5));
        assert_eq!(drain(&mut sequencer, false), ["2.0"]);
    }

    #[test]
    fn playback_begins_at_object_0_unless_a_later_start_location_is_allowed() {
        let mut sequencer = Sequencer::default();
        sequencer.push(TrackEvent::Opened { group: 3, stream: 7 });
        sequencer.push(object(3, 1, 7));
        assert!(drain(&mut sequencer, false).is_empty(), "the key frame's stream was held up");
        sequencer.push(TrackEvent::Opened { group: 3, stream: 3 });
        sequencer.push(object(3, 0, 3));
        assert_eq!(drain(&mut sequencer, false), ["3.0", "3.1"]);

        let mut inside = Sequencer::default();
        inside.may_begin_at(Location::new(3, 6));
        inside.push(TrackEvent::Opened { group: 3, stream: 7 });
        inside.push(object(3, 6, 7));
        assert_eq!(drain(&mut inside, false), ["3.6"]);
    }

    #[test]
    fn group_after_a_large_jump_of_the_group_id_is_played_at_once() {
        let mut sequencer = Sequencer::default();
        sequencer.push(TrackEvent::Opened { group: 7, stream: 1 });
        sequencer.push(object(7, 0, 1));
        sequencer.push(TrackEvent::Closed { group: 7, stream: 1 });
        assert_eq!(drain(&mut sequencer, false), ["7.0"]);
        sequencer.push(TrackEvent::Opened { group: 5000, stream: 2 });
        sequencer.push(object(5000, 0, 2));
        sequencer.push(object(5000, 1, 2));
        assert_eq!(drain(&mut sequencer, false), ["5000.0", "5000.1"]);
    }

    #[test]
    fn restarted_group_numbering_is_distinguished_from_a_late_group() {
        let mut sequencer = Sequencer::default();
        let send = |sequencer: &mut Sequencer, group: u64, stream: u64| {
            sequencer.push(TrackEvent::Opened { group, stream });
            sequencer.push(object(group, 0, stream));
            sequencer.push(TrackEvent::Closed { group, stream });
            drain(sequencer, false)
        };
        for group in 0..4 {
            assert_eq!(send(&mut sequencer, group, group).len(), 1);
        }
        // Group 5 is returned while group 4 is missing. Group 4 then arrives too late and is dropped.
        sequencer.push(object(5, 0, 5));
        sequencer.push(TrackEvent::Closed { group: 5, stream: 5 });
        assert_eq!(drain(&mut sequencer, true), ["5.0"]);
        assert!(send(&mut sequencer, 4, 4).is_empty());
        assert!(drain(&mut sequencer, false).is_empty());
        // A copy of an earlier group arrives while the track continues.
        sequencer.push(TrackEvent::Opened { group: 6, stream: 6 });
        assert!(send(&mut sequencer, 3, 7).is_empty());
        sequencer.push(TrackEvent::Closed { group: 6, stream: 6 });
        assert_eq!(send(&mut sequencer, 0, 8), ["0.0"]);
        assert_eq!(send(&mut sequencer, 1, 9), ["1.0"]);

        let mut joined = Sequencer::default();
        assert_eq!(send(&mut joined, 500, 1), ["500.0"]);
        assert_eq!(send(&mut joined, 0, 2), ["0.0"], "far behind");
    }

    /// The first stream with the restarted group numbering begins before the last stream with the old numbering has
    /// ended. No object of either stream is lost.
    #[test]
    fn restart_of_the_group_numbering_loses_no_object() {
        let begun = || {
            let mut sequencer = Sequencer::default();
            for group in 0..3 {
                sequencer.push(TrackEvent::Opened { group, stream: group });
                sequencer.push(object(group, 0, group));
                if group < 2 {
                    sequencer.push(TrackEvent::Closed { group, stream: group });
                }
            }
            assert_eq!(drain(&mut sequencer, false).len(), 3);
            sequencer.push(TrackEvent::Opened { group: 0, stream: 7 });
            sequencer.push(object(0, 0, 7));
            sequencer.push(object(0, 1, 7));
            assert!(drain(&mut sequencer, false).is_empty());
            sequencer
        };
        let mut anew = begun();
        anew.push(TrackEvent::Closed { group: 2, stream: 2 });
        assert_eq!(drain(&mut anew, false), ["0.0", "0.1"]);
        anew.push(object(0, 2, 7));
        assert_eq!(drain(&mut anew, false), ["0.2"]);
        // A late copy of an earlier group does not count as a restart of the numbering.
        let mut copy = begun();
        copy.push(object(2, 1, 2));
        copy.push(TrackEvent::Closed { group: 2, stream: 2 });
        assert_eq!(drain(&mut copy, false), ["2.1"]);
    }

    #[test]
    fn sequencer_that_stops_waiting_skips_a_missing_group() {
        let mut sequencer = Sequencer::default();
        sequencer.skip_to(Location::new(0, 9));
        sequencer.push(object(2, 0, 1));
        assert!(drain(&mut sequencer, false).is_empty() && sequencer.is_waiting());
        assert_eq!(drain(&mut sequencer, true), ["2.0"]);
    }

    proptest! {
        /// Each group has two subgroups, on streams whose data arrive interleaved in any way.
        #[test]
        fn interleaved_streams_come_out_in_order(choices in prop::collection::vec(any::<prop::sample::Index>(), 60)) {
            let mut streams: Vec<Vec<TrackEvent>> = Vec::new();
            let mut expected = Vec::new();
            for group in 0..3 {
                expected.extend((0..6).map(|id| format!("{group}.{id}")));
                for parity in 0..2 {
                    let stream = group * 2 + parity;
                    let mut steps = vec![TrackEvent::Opened { group, stream }];
                    steps.extend((0..3).map(|id| object(group, id * 2 + parity, stream)));
                    steps.push(TrackEvent::Closed { group, stream });
                    steps.reverse();
                    streams.push(steps);
                }
            }
            let mut sequencer = Sequencer::default();
            // All streams open before the first object arrives, so no object can be late.
            streams.iter_mut().for_each(|steps| steps.pop().into_iter().for_each(|step| sequencer.push(step)));
            let mut out = Vec::new();
            for choice in choices {
                streams.retain(|steps| !steps.is_empty());
                if streams.is_empty() {
                    break;
                }
                let index = choice.index(streams.len());
                streams[index].pop().into_iter().for_each(|step| sequencer.push(step));
                out.extend(drain(&mut sequencer, false));
            }
            streams.into_iter().flat_map(|steps| steps.into_iter().rev()).for_each(|step| sequencer.push(step));
            out.extend(drain(&mut sequencer, false));
            // The track begins with the first group that has an object. Empty groups before it do not count.
            let first = expected.iter().position(|text| Some(text) == out.first()).unwrap();
            prop_assert_eq!(&out[..], &expected[first..]);
            prop_assert_eq!(first % 6, 0);
        }
    }
}
