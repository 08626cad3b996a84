//! Tests how much of a narrow link's traffic is useful and in time.

use std::collections::HashMap;

use super::*;

const DELAY: Duration = Duration::from_millis(250);

/// Media of a publisher: `hz` objects per second in groups of `group` objects.
#[derive(Clone, Copy)]
struct RoomMedia {
    /// Objects per second.
    hz: u64,
    /// Objects per group.
    group: u64,
    /// Bytes of a group's first object.
    key: u64,
    /// Bytes of each object after a group's first one.
    delta: u64,
    /// True if a group's first object is a separate subgroup, more urgent than the other objects.
    subgroups: bool,
}

/// Objects of one size, 250 per second: 300 kB per second.
const OBJECTS: RoomMedia = RoomMedia { hz: 250, group: 100, key: 1200, delta: 1200, subgroups: false };

/// A camera with groups of one second and 84 kB.
const CAMERA: RoomMedia = RoomMedia { hz: 25, group: 25, key: 12_000, delta: 3000, subgroups: false };

/// Video of 5 Mbit/s. Key frames are a fifth of its bytes.
const VIDEO: RoomMedia = RoomMedia { hz: 30, group: 30, key: 135_000, delta: 17_000, subgroups: false };

struct RoomObject {
    tag: u64,
    is_key: bool,
    /// Stream offset of the object's first byte. `end` is the offset of the first byte after the object.
    start: u64,
    end: u64,
    made: Instant,
}

/// The simulator and the objects, after all of the media was simulated.
struct RoomRun {
    sim: Sim,
    objects: Vec<RoomObject>,
}

fn link(rate: u64, loss: f64) -> SimLink {
    let queue = (rate / 10).max(8000);
    SimLink { rate: Some(rate), queue, delay: Duration::from_millis(20), loss, ..SimLink::default() }
}

impl RoomMedia {
    fn run(self, link: SimLink, groups: u64) -> RoomRun {
        let credit = ReceiverCredit { data: 1 << 30, stream_data: 1 << 30, streams: 1000 };
        let config = Config { algorithm: CongestionAlgorithm::Bbr, ..Config::new(CODES) };
        let mut sim = Sim::new(1, link, credit, config);
        let mut objects = Vec::new();
        let mut open = HashMap::new();
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
                source.finish(SourceEnd::Fin { at: sim.now });
            }
            objects.push(RoomObject { tag, is_key, start, end: source.len(), made: sim.now });
            sim.down.wake(*key);
            sim.transmit();
            sim.run_for(SECOND / self.hz as u32);
        }
        sim.run_for(DELAY);
        RoomRun { sim, objects }
    }
}

impl RoomRun {
    fn arrivals(&self) -> impl Iterator<Item = (&RoomObject, Duration)> {
        let begun = self.sim.peer.streams.values().filter(|stream| stream.had(8).is_some());
        let streams: HashMap<_, _> = begun.map(|stream| (stream.tag(), stream)).collect();
        self.objects.iter().filter_map(move |object| {
            let at = streams.get(&object.tag)?.had(object.end)?;
            Some((object, at - object.made))
        })
    }

    /// Returns the percentage of objects that arrived, and the percentage that arrived within 300 ms.
    fn delivered(&self) -> (u64, u64) {
        let percent = |count: usize| (100 * count / self.objects.len()) as u64;
        let in_time = self.arrivals().filter(|(_, age)| *age <= Duration::from_millis(300));
        (percent(self.arrivals().count()), percent(in_time.count()))
    }

    fn key_frames(&self) -> usize {
        self.arrivals().filter(|(object, _)| object.is_key).count()
    }

    /// Returns the percentage of the link's bytes that belong to objects that arrived. Packet headers take 3 to 5 %.
    fn useful(&self) -> u64 {
        let bytes: u64 = self.arrivals().map(|(object, _)| object.end - object.start).sum();
        100 * bytes / self.sim.carried
    }
}

/// The link has 8 Mbit/s. Only key frames are large enough to fill the link. The sender measures the link's rate by
/// them, and then sends key frames at that rate.
#[test]
fn key_frames_are_sent_at_the_rate_of_the_path() {
    let rate = 1_000_000;
    let link =
        SimLink { rate: Some(rate), queue: 100_000, delay: Duration::from_millis(30), ..SimLink::default() };
    let run = VIDEO.run(link, 8);
    let paced = run.sim.down.recovery.pacing_rate();
    assert!((rate * 4 / 5..rate * 13 / 10).contains(&paced), "{paced}");
    assert_eq!(run.key_frames(), 8);
}

/// The link carries three fifths of the media. Data that would be late is dropped so that the next group arrives in
/// time. About as many objects arrive as if late data were sent.
#[test]
fn data_that_would_be_late_is_dropped_for_the_next_group() {
    let run = OBJECTS.run(link(180_000, 0.0), 15);
    let (delivered, in_time) = run.delivered();
    assert!(delivered >= 56 && in_time >= 54, "{delivered} %, {in_time} % in time");
    let resets = run.sim.down.stats().resets;
    assert!(resets.hopeless >= 12, "{resets:?}");
}

#[test]
fn data_that_would_be_late_is_dropped_on_a_lossy_path() {
    let run = OBJECTS.run(link(180_000, 0.02), 15);
    let (delivered, in_time) = run.delivered();
    assert!(delivered >= 54 && in_time >= 48, "{delivered} %, {in_time} % in time");
}

#[test]
fn abandoned_stream_ends_with_a_whole_object() {
    let run = CAMERA.run(link(31_000, 0.0), 15);
    assert!(run.useful() >= 90, "{} %", run.useful());
    assert_eq!(run.key_frames(), 15);
    let (delivered, _) = run.delivered();
    assert!(delivered >= 24, "{delivered} %");
}

/// A key frame whose sending takes longer than a group lasts is still sent, because every second key frame is better
/// than none.
#[test]
fn key_frames_that_take_longer_than_their_group_arrive() {
    for subgroups in [false, true] {
        let media = RoomMedia { key: 36_000, subgroups, ..CAMERA };
        let run = media.run(link(30_000, 0.0), 16);
        assert!(run.key_frames() >= 7, "{}", run.key_frames());
        let oldest = run.arrivals().filter(|(object, _)| object.is_key).map(|(_, age)| age).max();
        assert!(oldest.is_some_and(|age| age < 3 * SECOND), "{oldest:?}");
    }
}

#[test]
fn link_with_spare_capacity_delivers_everything_in_time() {
    for media in [OBJECTS, CAMERA, RoomMedia { subgroups: true, ..CAMERA }] {
        let run = media.run(link(400_000, 0.0), 5);
        assert_eq!(run.delivered(), (100, 100));
        assert_eq!(run.sim.down.stats().resets, Resets::default());
    }
}

/// The peer gives stream credit for only half of each object. If `is_deaf`, the peer also acknowledges nothing.
#[test]
fn abandoned_stream_is_reset_at_its_deadline() {
    for is_deaf in [false, true] {
        let credit = ReceiverCredit { stream_data: 5000, ..ReceiverCredit::default() };
        let mut sim = Sim::new(1, SimLink::default(), credit, Config::new(CODES));
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
        assert_eq!(
            sim.down.stats().resets,
            Resets::default(),
            "the first object has begun, so it is finished"
        );
        sim.run_for(2 * SECOND);
        let resets = sim.down.stats().resets;
        assert_eq!(resets.late + resets.hopeless, 1);
        sim.link.loss = 0.0;
        sim.run_for(20 * SECOND);
        assert!(sim.events.contains(&event(keys[0], EventKind::Reset(CODES.late))));
    }
}
