//! Puts the objects of a track's streams into the order of the track.

use std::collections::{BTreeMap, VecDeque};

use bytes::Bytes;
use millrace_moq::Location;

use crate::object::Object;
use crate::receive::Step;

/// Orders objects by location. Groups come one after the other; within a group, an object comes when no
/// open stream can still bring an earlier one. What comes too late is dropped.
#[derive(Debug, Default)]
pub struct Sequencer {
    waiting: BTreeMap<Location, Bytes>,
    /// The last object of each open stream, by group and stream.
    open: BTreeMap<(u64, u64), Option<u64>>,
    /// One past the last object that came out.
    next: Option<Location>,
    /// Where a track that is joined in the middle of a group may begin.
    inside: Option<Location>,
    late: u64,
    /// The last groups whose first object came out.
    begun: VecDeque<u64>,
    /// Objects of a group that shows a publisher which numbers anew, unless one more object comes of a newer group, whose stream has not
    /// ended yet.
    aside: Vec<Object>,
}

/// Groups whose beginnings are remembered, and how far behind no group comes by being late.
const REMEMBERED: usize = 64;
/// Groups that a track leaves out are not waited for if they are more than this.
const JUMP: u64 = 64;
/// Objects that are put aside at most, until a stream has ended.
const ASIDE: usize = 256;

impl Sequencer {
    /// Begins behind `last`: everything up to it came from elsewhere.
    pub fn skip_to(&mut self, last: Location) {
        self.next = Some(Location::new(last.group, last.object.saturating_add(1)));
    }

    /// Lets the track begin at `first` as well as with the first object of a group.
    pub fn may_begin_at(&mut self, first: Location) {
        self.inside = Some(first);
    }

    pub fn push(&mut self, step: Step) {
        match step {
            Step::Opened { group, stream } => {
                self.open.insert((group, stream), None);
            }
            Step::Object { object, stream } => {
                self.open.insert((object.location.group, stream), Some(object.location.object));
                self.wait(object);
            }
            Step::Closed { group, stream } => {
                self.open.remove(&(group, stream));
                if !self.has_newer() {
                    std::mem::take(&mut self.aside).into_iter().for_each(|object| self.wait(object));
                }
            }
            Step::Datagram(object) => self.wait(object),
        }
    }

    fn wait(&mut self, object: Object) {
        let begins_anew = self.begins_anew(object.location);
        if begins_anew && !self.has_newer() {
            tracing::info!(
                group = object.location.group,
                "the publisher was restarted and numbers its groups from the beginning"
            );
            *self = Self { open: std::mem::take(&mut self.open), late: self.late, ..Self::default() };
            self.open.retain(|(group, _), _| *group <= object.location.group);
        }
        if self.next.is_none_or(|next| object.location >= next) {
            // What came before it is only late.
            self.late += std::mem::take(&mut self.aside).len() as u64;
            self.waiting.insert(object.location, object.payload);
        } else if self.aside.len() < ASIDE && (begins_anew || self.is_aside(object.location)) {
            self.aside.push(object);
        } else {
            self.late += 1;
        }
    }

    /// Whether an object may show that its publisher was started again and numbers from the beginning, as a group that has begun begins
    /// once more, or one far behind does. It shows that if nothing newer is on its way.
    fn begins_anew(&self, location: Location) -> bool {
        let Some(next) = self.next.filter(|next| location.object == 0 && location.group < next.group) else {
            return false;
        };
        self.begun.contains(&location.group) || next.group - location.group > REMEMBERED as u64
    }

    /// Whether more may come of the group that the track is at, or of one behind it.
    fn has_newer(&self) -> bool {
        let is_open = |next: Location| self.open.range((next.group, 0)..).next().is_some();
        !self.waiting.is_empty() || self.next.is_some_and(is_open)
    }

    /// Whether an object follows what was put aside.
    fn is_aside(&self, location: Location) -> bool {
        self.aside.last().is_some_and(|last| last.location < location)
    }

    /// Objects that came too late or twice.
    pub fn late(&self) -> u64 {
        self.late
    }

    /// Whether objects wait for others.
    pub fn is_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// The next object in order, or the next one at all if `now`: what is missing is not waited for.
    pub fn pop(&mut self, now: bool) -> Option<Object> {
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
        self.waiting.remove(&location).map(|payload| Object { location, payload })
    }

    fn is_next(&self, location: Location) -> bool {
        let nothing_before = |group| {
            let mut streams = self.open.range((group, 0)..=(group, u64::MAX));
            streams.all(|(_, last)| last.is_some_and(|last| last >= location.object))
        };
        match self.next {
            // The first key frame may be on another stream than what follows it, and come later.
            None => (location.object == 0 || self.inside == Some(location)) && nothing_before(location.group),
            Some(next) if next == location => true,
            Some(next) if next.group == location.group => nothing_before(location.group),
            // A group that follows, once nothing more comes of the one before it. It begins with its first object: that may
            // be on another stream, which a loss holds up.
            Some(next) => {
                let is_over = self.open.range((next.group, 0)..=(next.group, u64::MAX)).next().is_none();
                // A publisher that comes back goes on far behind where it was.
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

    fn object(group: u64, id: u64, stream: u64) -> Step {
        let payload = Bytes::from(format!("{group}.{id}"));
        Step::Object { object: Object { location: Location::new(group, id), payload }, stream }
    }

    fn drain(sequencer: &mut Sequencer, now: bool) -> Vec<String> {
        let text = |object: Object| String::from_utf8_lossy(&object.payload).into_owned();
        std::iter::from_fn(|| sequencer.pop(now)).map(text).collect()
    }

    #[test]
    fn the_next_group_waits_for_the_one_before() {
        let mut sequencer = Sequencer::default();
        sequencer.push(Step::Opened { group: 4, stream: 3 });
        sequencer.push(object(4, 0, 3));
        assert_eq!(drain(&mut sequencer, false), ["4.0"]);
        sequencer.push(Step::Opened { group: 5, stream: 7 });
        sequencer.push(object(5, 0, 7));
        assert!(drain(&mut sequencer, false).is_empty());
        sequencer.push(object(4, 1, 3));
        sequencer.push(Step::Closed { group: 4, stream: 3 });
        assert_eq!(drain(&mut sequencer, false), ["4.1", "5.0"]);
        sequencer.push(object(4, 2, 3));
        assert_eq!(sequencer.late(), 1);
    }

    #[test]
    fn deltas_do_not_overtake_their_key_frame() {
        let mut sequencer = Sequencer::default();
        sequencer.skip_to(Location::new(0, 9));
        sequencer.push(Step::Opened { group: 1, stream: 4 });
        sequencer.push(object(1, 1, 4));
        assert!(drain(&mut sequencer, false).is_empty(), "the key frame's stream was held up");
        sequencer.push(Step::Opened { group: 1, stream: 3 });
        sequencer.push(object(1, 0, 3));
        sequencer.push(Step::Closed { group: 1, stream: 3 });
        assert_eq!(drain(&mut sequencer, false), ["1.0", "1.1"]);
        // The deltas are cut short, and the next key frame does not wait for them.
        sequencer.push(Step::Closed { group: 1, stream: 4 });
        sequencer.push(Step::Opened { group: 2, stream: 5 });
        sequencer.push(object(2, 0, 5));
        assert_eq!(drain(&mut sequencer, false), ["2.0"]);
        assert_eq!(sequencer.late(), 0);
    }

    #[test]
    fn a_track_begins_with_a_group_or_where_it_was_asked_for() {
        let mut sequencer = Sequencer::default();
        sequencer.push(Step::Opened { group: 3, stream: 7 });
        sequencer.push(object(3, 1, 7));
        assert!(drain(&mut sequencer, false).is_empty(), "the key frame's stream was held up");
        sequencer.push(Step::Opened { group: 3, stream: 3 });
        sequencer.push(object(3, 0, 3));
        assert_eq!(drain(&mut sequencer, false), ["3.0", "3.1"]);
        assert_eq!(sequencer.late(), 0);

        let mut inside = Sequencer::default();
        inside.may_begin_at(Location::new(3, 6));
        inside.push(Step::Opened { group: 3, stream: 7 });
        inside.push(object(3, 6, 7));
        assert_eq!(drain(&mut inside, false), ["3.6"]);
    }

    #[test]
    fn a_publisher_that_comes_back_is_not_waited_for() {
        let mut sequencer = Sequencer::default();
        sequencer.push(Step::Opened { group: 7, stream: 1 });
        sequencer.push(object(7, 0, 1));
        sequencer.push(Step::Closed { group: 7, stream: 1 });
        assert_eq!(drain(&mut sequencer, false), ["7.0"]);
        sequencer.push(Step::Opened { group: 5000, stream: 2 });
        sequencer.push(object(5000, 0, 2));
        sequencer.push(object(5000, 1, 2));
        assert_eq!(drain(&mut sequencer, false), ["5000.0", "5000.1"]);
    }

    #[test]
    fn a_publisher_that_numbers_anew_is_followed_and_late_groups_are_not() {
        let mut sequencer = Sequencer::default();
        let send = |sequencer: &mut Sequencer, group: u64, stream: u64| {
            sequencer.push(Step::Opened { group, stream });
            sequencer.push(object(group, 0, stream));
            sequencer.push(Step::Closed { group, stream });
            drain(sequencer, false)
        };
        for group in 0..4 {
            assert_eq!(send(&mut sequencer, group, group).len(), 1);
        }
        // Group 4 is passed over, and comes late.
        sequencer.push(object(5, 0, 5));
        sequencer.push(Step::Closed { group: 5, stream: 5 });
        assert_eq!(drain(&mut sequencer, true), ["5.0"]);
        assert!(send(&mut sequencer, 4, 4).is_empty());
        assert_eq!(sequencer.late(), 1);
        // A copy of what has come, while the track goes on.
        sequencer.push(Step::Opened { group: 6, stream: 6 });
        assert!(send(&mut sequencer, 3, 7).is_empty());
        sequencer.push(Step::Closed { group: 6, stream: 6 });
        assert_eq!(send(&mut sequencer, 0, 8), ["0.0"]);
        assert_eq!(send(&mut sequencer, 1, 9), ["1.0"]);

        let mut joined = Sequencer::default();
        assert_eq!(send(&mut joined, 500, 1), ["500.0"]);
        assert_eq!(send(&mut joined, 0, 2), ["0.0"], "far behind");
    }

    /// The end of its last stream and its first new one come at the same time, and nobody says which is seen first.
    #[test]
    fn a_publisher_that_numbers_anew_is_followed_from_its_first_object() {
        let begun = || {
            let mut sequencer = Sequencer::default();
            for group in 0..3 {
                sequencer.push(Step::Opened { group, stream: group });
                sequencer.push(object(group, 0, group));
                if group < 2 {
                    sequencer.push(Step::Closed { group, stream: group });
                }
            }
            assert_eq!(drain(&mut sequencer, false).len(), 3);
            sequencer.push(Step::Opened { group: 0, stream: 7 });
            sequencer.push(object(0, 0, 7));
            sequencer.push(object(0, 1, 7));
            assert!(drain(&mut sequencer, false).is_empty());
            sequencer
        };
        let mut anew = begun();
        anew.push(Step::Closed { group: 2, stream: 2 });
        assert_eq!(drain(&mut anew, false), ["0.0", "0.1"]);
        anew.push(object(0, 2, 7));
        assert_eq!(drain(&mut anew, false), ["0.2"]);
        assert_eq!(anew.late(), 0);
        // A copy that comes late is none.
        let mut copy = begun();
        copy.push(object(2, 1, 2));
        copy.push(Step::Closed { group: 2, stream: 2 });
        assert_eq!((drain(&mut copy, false), copy.late()), (vec!["2.1".to_owned()], 2));
    }

    #[test]
    fn a_group_that_never_comes_is_passed_on_demand() {
        let mut sequencer = Sequencer::default();
        sequencer.skip_to(Location::new(0, 9));
        sequencer.push(object(2, 0, 1));
        assert!(drain(&mut sequencer, false).is_empty() && sequencer.is_waiting());
        assert_eq!(drain(&mut sequencer, true), ["2.0"]);
    }

    proptest! {
        /// Two subgroups per group, on streams that arrive interleaved in any way.
        #[test]
        fn any_interleaving_comes_out_in_order(choices in prop::collection::vec(any::<prop::sample::Index>(), 60)) {
            let mut streams: Vec<Vec<Step>> = Vec::new();
            let mut expected = Vec::new();
            for group in 0..3 {
                expected.extend((0..6).map(|id| format!("{group}.{id}")));
                for parity in 0..2 {
                    let stream = group * 2 + parity;
                    let mut steps = vec![Step::Opened { group, stream }];
                    steps.extend((0..3).map(|id| object(group, id * 2 + parity, stream)));
                    steps.push(Step::Closed { group, stream });
                    steps.reverse();
                    streams.push(steps);
                }
            }
            let mut sequencer = Sequencer::default();
            // Every stream opens before the first object arrives, so that nothing can be late.
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
            // The first group to have an object begins the track; those before it are not its past.
            let first = expected.iter().position(|text| Some(text) == out.first()).unwrap();
            prop_assert_eq!(&out[..], &expected[first..]);
            prop_assert_eq!(first % 6, 0);
        }
    }
}
