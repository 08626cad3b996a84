//! Choices hold to what was decided, and the decider keeps a simulated picture live.

use std::{
    collections::{BTreeMap, VecDeque},
    time::{Duration, Instant},
};

use proptest::prelude::*;

use super::*;
use crate::moq::{Namespace, TrackName, msf};

fn rung(name: &str, bitrate: u64) -> Rung {
    let namespace = Namespace::from_path("live").unwrap();
    Rung { track: TrackName::new(namespace, name.as_bytes().to_vec()).unwrap(), bitrate }
}

fn names(ladder: &Ladder) -> Vec<&[u8]> {
    ladder.rungs().iter().map(|rung| &rung.track.name()[..]).collect()
}

#[test]
fn a_ladder_is_sorted_and_has_different_rungs() {
    let ladder = Ladder::new(vec![rung("hi", 5), rung("lo", 1), rung("mid", 2)]).unwrap();
    assert_eq!(names(&ladder), [b"lo".as_slice(), b"mid", b"hi"]);
    assert_eq!(names(&ladder.up_to(&rung("mid", 0).track).unwrap()), [b"lo".as_slice(), b"mid"]);
    assert_eq!(ladder.up_to(&rung("lo", 0).track), None, "nothing is below it");
    assert_eq!(ladder.up_to(&rung("other", 0).track), None);
    assert_eq!(Ladder::new(vec![rung("a", 1)]), None);
    assert_eq!(Ladder::new(vec![rung("a", 1), rung("a", 2)]), None);
    assert_eq!(Ladder::new(vec![rung("a", 1), rung("b", 1)]), None);
    assert_eq!(Ladder::new(vec![rung("a", 0), rung("b", 1)]), None);
    let many = (1..=MAX_RUNGS as u64 + 1).map(|rate| rung(&rate.to_string(), rate)).collect();
    assert_eq!(Ladder::new(many), None);
}

#[test]
fn a_catalog_makes_a_ladder_of_the_namespace_only() {
    let track = |name: &str, bitrate, namespace: Option<&str>| msf::Track {
        name: name.to_owned(),
        namespace: namespace.map(str::to_owned),
        packaging: "loc".to_owned(),
        codec: Some("av01".to_owned()),
        alt_group: Some(1),
        bitrate,
        ..msf::Track::default()
    };
    let catalog = msf::Catalog::new(vec![
        track("hi", Some(9), None),
        track("lo", Some(3), None),
        track("unknown", None, None),
        track("elsewhere", Some(1), Some("other")),
    ]);
    let namespace = Namespace::from_path("live").unwrap();
    let ladder = Ladder::of_catalog(&catalog, &namespace, "hi").unwrap();
    assert_eq!(names(&ladder), [b"lo".as_slice(), b"hi"]);
    assert_eq!(Ladder::of_catalog(&catalog, &namespace, "nothing"), None);
}

#[test]
fn a_switch_begins_with_the_first_group_that_has_not_begun() {
    let mut choice = Choice::new(2, 1);
    assert!(choice.saw(1, 7));
    choice.join(0, Some(7));
    assert!(!choice.saw(0, 7));
    assert_eq!(choice.switch(0), Some(8));
    assert!(choice.saw(1, 7), "what has begun goes on");
    assert!(!choice.saw(1, 8));
    assert!(choice.saw(0, 8));
    assert_eq!(choice.switch(0), None, "it is there");
    assert_eq!(choice.switch(1), Some(9));
    assert_eq!(choice.switch(0), Some(9), "before the switch has begun it is taken back");
    assert_eq!(choice.current(), Span { first: 8, member: 0 });
}

#[test]
fn what_cannot_be_had_whole_is_not_switched_to() {
    let mut choice = Choice::new(2, 1);
    choice.saw(1, 5);
    assert_eq!(choice.switch(0), None, "nothing is known of it");
    choice.join(0, None);
    assert_eq!(choice.switch(0), None);
    choice.saw(0, 6);
    // Group 6 of it may have begun before it was listened to; the next one is 7.
    assert_eq!(choice.switch(0), Some(7));
    assert!(!choice.saw(0, 6) && choice.saw(1, 6));
    choice.saw(1, 7);
    choice.saw(1, 8);
    assert!(choice.is_stuck(), "0 does not go on");
    assert!(!choice.is_ready(0) && choice.is_ready(1));
    assert_eq!(choice.switch(1), Some(9));
    choice.lose(1);
    assert!(choice.is_stuck());
}

#[test]
fn the_best_that_can_be_had_is_chosen() {
    let mut choice = Choice::new(3, 2);
    choice.join(0, None);
    choice.join(1, Some(4));
    choice.saw(2, 4);
    assert_eq!([0, 1, 2].map(|wanted| choice.best(wanted)), [2, 1, 2], "of 0 nothing has come");
    choice.saw(0, 4);
    assert_eq!(choice.best(0), 0);
    choice.switch(0);
    choice.saw(0, 5);
    choice.saw(2, 7);
    choice.saw(1, 7);
    assert_eq!([0, 1, 2].map(|wanted| choice.best(wanted)), [1, 1, 2], "0 does not go on");
    choice.lose(1);
    assert_eq!(choice.best(0), 2);
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Saw { member: usize, ahead: u64 },
    Switch(usize),
    Lose(usize),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        6 => (0..3usize, 0..3u64).prop_map(|(member, ahead)| Step::Saw { member, ahead }),
        3 => (0..3usize).prop_map(Step::Switch),
        1 => (0..3usize).prop_map(Step::Lose),
    ];
    prop::collection::vec(step, 0..60)
}

proptest! {
    /// Each group is from one rendition from its beginning to its end, and each rendition was heard of before its first.
    #[test]
    fn a_group_is_wholly_of_one_rendition(steps in steps()) {
        let mut choice = Choice::new(3, 2);
        let mut newest = [0u64; 3];
        let mut heard = [u64::MAX, u64::MAX, 0];
        let mut decided = BTreeMap::new();
        let mut lost = [false; 3];
        for step in steps {
            match step {
                Step::Saw { member, ahead } => {
                    newest[member] += ahead;
                    heard[member] = heard[member].min(newest[member] + 1);
                    choice.saw(member, newest[member]);
                    let of = *decided.entry(newest[member]).or_insert_with(|| choice.of(newest[member]));
                    prop_assert!(newest[member] >= heard[of] || of == 2, "{of} begins inside of a group");
                }
                Step::Switch(to) => {
                    let ready = choice.is_ready(to);
                    if let Some(first) = choice.switch(to) {
                        prop_assert!(ready && !lost[to]);
                        prop_assert!(decided.range(first..).next().is_none(), "{first} has begun");
                        prop_assert_eq!(choice.of(first), to);
                    }
                }
                Step::Lose(member) => {
                    choice.lose(member);
                    lost[member] = true;
                }
            }
            if decided.len() < 30 {
                for (group, of) in &decided {
                    prop_assert_eq!(choice.of(*group), *of, "group {} changed", group);
                }
            }
        }
    }
}

const FRAME: Duration = Duration::from_micros(33_333);
const LOOK: Duration = Duration::from_millis(50);
const MAX_DELAY: Duration = Duration::from_millis(250);
const FPS: u64 = 30;

/// A path and what is sent on it, one millisecond at a time: a queue at the sender, in front of a link of some rate. Frames that
/// have waited for too long go, but for key frames, as policy says.
struct Path {
    rates: Vec<u64>,
    queue: VecDeque<(Duration, f64, bool)>,
    delivered: f64,
    /// Fastest delivery in the seconds that an estimate keeps.
    peaks: VecDeque<(Duration, f64)>,
    sent: VecDeque<(Duration, f64)>,
    dropped: Vec<Duration>,
    late_keys: Vec<u64>,
}

impl Path {
    fn new(rates: &[u64]) -> Self {
        Self {
            rates: rates.to_vec(),
            queue: VecDeque::new(),
            delivered: 0.0,
            peaks: VecDeque::new(),
            sent: VecDeque::new(),
            dropped: Vec::new(),
            late_keys: Vec::new(),
        }
    }

    /// A frame of a rung: a key frame is as large as 8 others.
    fn publish(&mut self, at: Duration, rung: usize, frame: u64) {
        let bytes = self.rates[rung] as f64 / 8.0 / (FPS + 7) as f64;
        let is_key = frame.is_multiple_of(FPS);
        self.queue.push_back((at, if is_key { 8.0 * bytes } else { bytes }, is_key));
    }

    fn step(&mut self, now: Duration, link: u64) {
        let dropped = &mut self.dropped;
        self.queue.retain(|(at, _, is_key)| {
            let keep = *is_key || now - *at <= MAX_DELAY;
            if !keep {
                dropped.push(now);
            }
            keep
        });
        let mut room = link as f64 / 8.0 / 1000.0;
        let mut went = 0.0;
        while let Some((at, left, is_key)) = self.queue.front_mut().filter(|_| room > 0.0) {
            let part = left.min(room);
            *left -= part;
            room -= part;
            went += part;
            if *left <= 0.0 {
                if *is_key && now - *at > MAX_DELAY {
                    self.late_keys.push(now.as_secs());
                }
                self.queue.pop_front();
            }
        }
        self.delivered += went;
        self.sent.push_back((now, went));
        while self.sent.len() > 100 {
            self.sent.pop_front();
        }
        let rate = self.sent.iter().map(|(_, bytes)| bytes).sum::<f64>() / 0.1;
        self.peaks.push_back((now, rate));
        while self.peaks.front().is_some_and(|(at, _)| now - *at > Duration::from_secs(6)) {
            self.peaks.pop_front();
        }
    }

    fn sample(&self, start: Instant, now: Duration, link: u64) -> Sample {
        let peak = self.peaks.iter().map(|(_, rate)| *rate).fold(0.0, f64::max);
        Sample {
            now: start + now,
            delivered: self.delivered as u64,
            // The controller probes for a quarter more than it has seen.
            bandwidth: (1.25 * peak).min(link as f64 / 8.0) as u64,
            waiting: self.queue.front().map_or(Duration::ZERO, |(at, ..)| now - *at),
            round_trip: LOOK,
        }
    }
}

/// Runs a link of `rate(second)` bits per second; the rungs that groups were of, the seconds in which frames were dropped, and
/// those in which key frames came late.
fn simulate(rates: &[u64], seconds: u64, rate: impl Fn(u64) -> u64) -> (Vec<usize>, Vec<u64>, Vec<u64>) {
    let start = Instant::now();
    let mut path = Path::new(rates);
    let mut decider = Decider::new(rates.iter().copied(), rates.len() - 1);
    let (mut wanted, mut rung, mut frame, mut groups) = (rates.len() - 1, rates.len() - 1, 0u32, Vec::new());
    for ms in 0..seconds * 1000 {
        let now = Duration::from_millis(ms);
        while FRAME * frame <= now {
            if u64::from(frame) % FPS == 0 {
                rung = wanted;
                groups.push(rung);
            }
            path.publish(now, rung, u64::from(frame));
            frame += 1;
        }
        path.step(now, rate(ms / 1000));
        if ms % LOOK.as_millis() as u64 == 0 {
            wanted = decider.look(&path.sample(start, now, rate(ms / 1000)));
        }
    }
    (groups, path.dropped.iter().map(|at| at.as_secs()).collect(), path.late_keys)
}

const LADDER: [u64; 3] = [800_000, 2_000_000, 5_000_000];

#[test]
fn on_a_path_with_room_nothing_is_changed() {
    let (groups, dropped, late_keys) = simulate(&LADDER, 120, |_| 8_000_000);
    assert!(groups.iter().all(|rung| *rung == 2), "{groups:?}");
    assert_eq!((dropped, late_keys), (vec![], vec![]));
}

#[test]
fn down_at_the_next_group_and_up_again_when_there_is_room() {
    let (groups, dropped, late_keys) = simulate(&LADDER, 60, |second| match second {
        15..35 => 2_000_000,
        _ => 8_000_000,
    });
    let mut rungs = groups.clone();
    rungs.dedup();
    assert_eq!(rungs, [2, 0, 1, 2], "{groups:?}");
    assert!(groups[17..35].iter().all(|rung| *rung == 0), "{groups:?}");
    // The 2 seconds after the change.
    assert!(dropped.iter().chain(&late_keys).all(|at| (15..17).contains(at)), "{dropped:?} {late_keys:?}");
}

#[test]
fn what_was_too_much_is_not_tried_again_soon() {
    // The estimate says that there is room, and there is not: another flow comes whenever the rung is climbed.
    let start = Instant::now();
    let mut decider = Decider::new([800_000, 5_000_000], 0);
    let (mut delivered, mut climbs, mut rung, mut since) = (0, Vec::new(), 0, 0);
    for look in 0..12_000u64 {
        let before = rung;
        let crowded = rung == 1 && look - since > 20;
        delivered += if crowded { 12_000 } else { 12_500 };
        rung = decider.look(&Sample {
            now: start + LOOK * look as u32,
            delivered,
            bandwidth: 1_000_000,
            waiting: if crowded { Duration::from_millis(300) } else { Duration::ZERO },
            round_trip: LOOK,
        });
        if rung > before {
            since = look;
            climbs.push(look);
        }
    }
    let waits: Vec<_> = climbs.windows(2).map(|pair| (pair[1] - pair[0]) / 20).collect();
    assert!(waits.windows(2).all(|pair| pair[0] <= pair[1]), "{waits:?}");
    assert!(waits.last().is_some_and(|last| *last >= 80), "{waits:?}");
}

#[test]
fn a_longer_way_is_not_taken_for_a_queue_for_ever() {
    let start = Instant::now();
    let mut decider = Decider::new(LADDER, 2);
    let mut rungs = Vec::new();
    for look in 0..2400u32 {
        // From the tenth second on the path takes another way, and carries as much as before.
        let round_trip = if look < 200 { LOOK } else { 4 * LOOK };
        rungs.push(decider.look(&Sample {
            now: start + LOOK * look,
            delivered: 31_250 * u64::from(look),
            bandwidth: 4_000_000,
            waiting: Duration::ZERO,
            round_trip,
        }));
    }
    let longest = rungs.iter().filter(|rung| **rung < 2).count() as u32 * LOOK;
    assert_eq!((rungs[199], rungs.last()), (2, Some(&2)));
    assert!(longest < Duration::from_secs(45), "{longest:?}");
}

#[test]
fn a_path_that_carries_nothing_leads_to_the_lowest_rung() {
    let start = Instant::now();
    let mut decider = Decider::new(LADDER, 2);
    let looks = (0..10u32).map(|look| {
        decider.look(&Sample {
            now: start + LOOK * look,
            delivered: 1000,
            bandwidth: 10_000_000,
            waiting: LOOK * look,
            round_trip: LOOK,
        })
    });
    // 100 ms until it is a backlog, and 200 ms of that.
    assert_eq!(looks.collect::<Vec<_>>(), [2, 2, 2, 2, 2, 2, 0, 0, 0, 0]);
}
