//! How much of a narrow link carries what somebody can use, and in time.

use std::collections::HashMap;

use super::*;

const DELAY: Duration = Duration::from_millis(250);

/// What a publisher sends: objects in groups of one second, unless `hz` and `group` say otherwise.
#[derive(Clone, Copy)]
struct Media {
    hz: u64,
    /// Objects of a group.
    group: u64,
    /// Bytes of its first object, and of each other.
    key: u64,
    delta: u64,
    /// The first object is a subgroup of its own, more urgent than the others.
    subgroups: bool,
}

/// 250 objects a second of one size, 300 kB.
const OBJECTS: Media = Media { hz: 250, group: 100, key: 1200, delta: 1200, subgroups: false };

/// Groups of a second: 84 kB.
const CAMERA: Media = Media { hz: 25, group: 25, key: 12_000, delta: 3000, subgroups: false };

/// 5 Mbit/s, a fifth of it in key frames.
const VIDEO: Media = Media { hz: 30, group: 30, key: 135_000, delta: 17_000, subgroups: false };

struct Object {
    tag: u64,
    is_key: bool,
    /// Where in its stream.
    start: u64,
    end: u64,
    made: Instant,
}

/// What came of it.
struct Run {
    sim: Sim,
    objects: Vec<Object>,
}

fn link(rate: u64, loss: f64) -> Link {
    let queue = (rate / 10).max(8000);
    Link { rate: Some(rate), queue, delay: Duration::from_millis(20), loss, ..Link::default() }
}

impl Media {
    fn run(self, link: Link, groups: u64) -> Run {
        let credit = Credit { data: 1 << 30, stream_data: 1 << 30, streams: 1000 };
        let config = Config { algorithm: Algorithm::Bbr, ..Config::new(CODES) };
        let mut sim = Sim::new(1, link, credit, config);
        let (mut objects, mut open) = (Vec::new(), HashMap::new());
        for (group, index) in (0..groups).flat_map(|group| (0..self.group).map(move |index| (group, index))) {
            let is_key = index == 0;
            let subgroup = u64::from(self.subgroups && !is_key);
            let tag = 2 * group + subgroup;
            let (key, source): &(StreamKey, Arc<Mem>) = open.entry(tag).or_insert_with(|| {
                let source = Mem::new(tag);
                let key = sim.open_with(&source, |stream| {
                    let publisher = subgroup as u8;
                    stream.priority = Priority { subscriber: 128, publisher, group, subgroup };
                    stream.label.group = group;
                    stream.max_delay = Some(DELAY);
                });
                (key, source)
            });
            let start = source.len();
            source.push(if is_key { self.key } else { self.delta }, sim.now);
            if index == self.group - 1 || self.subgroups && is_key {
                source.finish(End::Fin { at: sim.now });
            }
            objects.push(Object { tag, is_key, start, end: source.len(), made: sim.now });
            sim.down.wake(*key);
            sim.transmit();
            sim.run_for(SECOND / self.hz as u32);
        }
        sim.run_for(DELAY);
        Run { sim, objects }
    }
}

impl Run {
    fn arrivals(&self) -> impl Iterator<Item = (&Object, Duration)> {
        let begun = self.sim.peer.streams.values().filter(|stream| stream.had(8).is_some());
        let streams: HashMap<_, _> = begun.map(|stream| (stream.tag(), stream)).collect();
        self.objects.iter().filter_map(move |object| {
            let at = streams.get(&object.tag)?.had(object.end)?;
            Some((object, at - object.made))
        })
    }

    /// Percent of the objects that came, and within 300 ms.
    fn delivered(&self) -> (u64, u64) {
        let percent = |count: usize| (100 * count / self.objects.len()) as u64;
        let in_time = self.arrivals().filter(|(_, age)| *age <= Duration::from_millis(300));
        (percent(self.arrivals().count()), percent(in_time.count()))
    }

    fn key_frames(&self) -> usize {
        self.arrivals().filter(|(object, _)| object.is_key).count()
    }

    /// Percent of what the link carried that is of objects that came. Packets' headers are 3 to 5 % here.
    fn useful(&self) -> u64 {
        let bytes: u64 = self.arrivals().map(|(object, _)| object.end - object.start).sum();
        100 * bytes / self.sim.carried
    }
}

/// A link of 8 Mbit/s. What it takes the sender finds out by key frames alone, and then sends them at that rate.
#[test]
fn key_frames_are_sent_at_the_rate_of_the_path() {
    let rate = 1_000_000;
    let link = Link { rate: Some(rate), queue: 100_000, delay: Duration::from_millis(30), ..Link::default() };
    let run = VIDEO.run(link, 8);
    let paced = run.sim.down.recovery.pacing_rate();
    assert!((rate * 4 / 5..rate * 13 / 10).contains(&paced), "{paced}");
    assert_eq!(run.key_frames(), 8);
}

/// Three fifths of what it takes. What would come too late gives way to the next group, which is in time; as much comes.
#[test]
fn what_cannot_be_through_in_time_does_not_keep_the_next_group_waiting() {
    let run = OBJECTS.run(link(180_000, 0.0), 15);
    let (delivered, in_time) = run.delivered();
    assert!(delivered >= 56 && in_time >= 54, "{delivered} %, {in_time} % in time");
    let resets = run.sim.down.stats().resets;
    assert!(resets.hopeless >= 12, "{resets:?}");
}

#[test]
fn nor_does_it_where_packets_get_lost() {
    let run = OBJECTS.run(link(180_000, 0.02), 15);
    let (delivered, in_time) = run.delivered();
    assert!(delivered >= 54 && in_time >= 48, "{delivered} %, {in_time} % in time");
}

#[test]
fn what_is_given_up_ends_where_an_object_ends() {
    let run = CAMERA.run(link(31_000, 0.0), 15);
    assert!(run.useful() >= 90, "{} %", run.useful());
    assert_eq!(run.key_frames(), 15);
    let (delivered, _) = run.delivered();
    assert!(delivered >= 24, "{delivered} %");
}

/// A key frame that takes longer than a group is sent all the same: better every other one than none.
#[test]
fn key_frames_that_take_longer_than_their_group_arrive() {
    for subgroups in [false, true] {
        let media = Media { key: 36_000, subgroups, ..CAMERA };
        let run = media.run(link(30_000, 0.0), 16);
        assert!(run.key_frames() >= 7, "{}", run.key_frames());
        let oldest = run.arrivals().filter(|(object, _)| object.is_key).map(|(_, age)| age).max();
        assert!(oldest.is_some_and(|age| age < 3 * SECOND), "{oldest:?}");
    }
}

#[test]
fn with_room_enough_all_comes_in_time() {
    for media in [OBJECTS, CAMERA, Media { subgroups: true, ..CAMERA }] {
        let run = media.run(link(400_000, 0.0), 5);
        assert_eq!(run.delivered(), (100, 100));
        assert_eq!(run.sim.down.stats().resets, Resets::default());
    }
}

/// The peer takes no more of the object that has begun, nor acknowledges anything.
#[test]
fn what_is_left_of_a_group_that_is_given_up_does_not_wait_forever() {
    for is_deaf in [false, true] {
        let credit = Credit { stream_data: 5000, ..Credit::default() };
        let mut sim = Sim::new(1, Link::default(), credit, Config::new(CODES));
        sim.peer.is_stingy = true;
        let keys = [0, 1].map(|group| {
            let source = Mem::new(group);
            source.push(10_000, sim.now);
            sim.open_with(&source, |stream| {
                stream.label.group = group;
                stream.priority.group = group;
                stream.max_delay = Some(DELAY);
            })
        });
        sim.link.loss = if is_deaf { 1.0 } else { 0.0 };
        sim.transmit();
        sim.run_for(SECOND);
        assert_eq!(sim.down.stats().resets, Resets::default(), "its first object has begun");
        sim.run_for(2 * SECOND);
        let resets = sim.down.stats().resets;
        assert_eq!(resets.late + resets.hopeless, 1);
        sim.link.loss = 0.0;
        sim.run_for(20 * SECOND);
        assert!(sim.events.contains(&event(keys[0], EventKind::Reset(CODES.late))));
    }
}
