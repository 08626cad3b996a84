//! Tests of ladders, rendition choices and the decider.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use proptest::prelude::*;

use super::*;
use crate::{Namespace, TrackName, msf};

fn rung(name: &str, bitrate: u64) -> Rung {
    let namespace = Namespace::from_path("live").unwrap();
    Rung { track: TrackName::new(namespace, name.as_bytes().to_vec()).unwrap(), bitrate }
}

fn names(ladder: &Ladder) -> Vec<&[u8]> {
    ladder.rungs().iter().map(|rung| &rung.track.name()[..]).collect()
}

#[test]
fn rendition_ladder_is_sorted_and_has_different_rungs() {
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
fn ladder_from_catalog_has_only_tracks_of_its_namespace() {
    let track = |name: &str, bitrate, namespace: Option<&str>| msf::MsfTrack {
        name: name.to_owned(),
        namespace: namespace.map(str::to_owned),
        packaging: "loc".to_owned(),
        codec: Some("av01".to_owned()),
        alt_group: Some(1),
        bitrate,
        ..msf::MsfTrack::default()
    };
    let catalog = msf::MsfCatalog::new(vec![
        track("hi", Some(9), None),
        track("lo", Some(3), None),
        track("unknown", None, None),
        track("elsewhere", Some(1), Some("other")),
    ]);
    let namespace = Namespace::from_path("live").unwrap();
    let ladder = Ladder::from_catalog(&catalog, &namespace, "hi").unwrap();
    assert_eq!(names(&ladder), [b"lo".as_slice(), b"hi"]);
    assert_eq!(Ladder::from_catalog(&catalog, &namespace, "nothing"), None);
}

#[test]
fn switch_begins_with_first_group_that_has_not_begun() {
    let mut choice = RenditionChoice::new(2, 1);
    assert!(choice.saw(1, 7));
    choice.join(0, Some(7));
    assert!(!choice.saw(0, 7));
    assert_eq!(choice.switch(0), Some(8));
    assert!(choice.saw(1, 7), "a group that has begun continues");
    assert!(!choice.saw(1, 8));
    assert!(choice.saw(0, 8));
    assert_eq!(choice.switch(0), None, "0 is current already");
    assert_eq!(choice.switch(1), Some(9));
    assert_eq!(choice.switch(0), Some(9), "the second switch replaces the first, whose group has not begun");
    assert_eq!(choice.current(), GroupSpan { first: 8, member: 0 });
}

#[test]
fn rendition_switch_waits_for_the_next_complete_group() {
    let mut choice = RenditionChoice::new(2, 1);
    choice.saw(1, 5);
    assert_eq!(choice.switch(0), None, "no object of 0 has arrived");
    choice.join(0, None);
    assert_eq!(choice.switch(0), None);
    choice.saw(0, 6);
    // Group 6 may have begun before the subscription to its rendition did, so the next complete group is 7.
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
fn rendition_without_new_objects_is_replaced_by_the_best_available() {
    let mut choice = RenditionChoice::new(3, 2);
    choice.join(0, None);
    choice.join(1, Some(4));
    choice.saw(2, 4);
    assert_eq!([0, 1, 2].map(|wanted| choice.best(wanted)), [2, 1, 2], "no object of 0 has arrived");
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
enum AdaptStep {
    Saw { member: usize, ahead: u64 },
    Switch(usize),
    Lose(usize),
}

fn steps() -> impl Strategy<Value = Vec<AdaptStep>> {
    let step = prop_oneof![
        6 => (0..3usize, 0..3u64).prop_map(|(member, ahead)| AdaptStep::Saw { member, ahead }),
        3 => (0..3usize).prop_map(AdaptStep::Switch),
        1 => (0..3usize).prop_map(AdaptStep::Lose),
    ];
    prop::collection::vec(step, 0..60)
}

proptest! {
    /// Each group is taken from one rendition as a whole. The first group after a switch began after the subscription
    /// to its rendition did.
    #[test]
    fn every_group_is_forwarded_from_one_rendition_only(steps in steps()) {
        let mut choice = RenditionChoice::new(3, 2);
        let mut newest = [0u64; 3];
        let mut heard = [u64::MAX, u64::MAX, 0];
        let mut decided = BTreeMap::new();
        let mut lost = [false; 3];
        for step in steps {
            match step {
                AdaptStep::Saw { member, ahead } => {
                    newest[member] += ahead;
                    heard[member] = heard[member].min(newest[member] + 1);
                    choice.saw(member, newest[member]);
                    let of = *decided.entry(newest[member]).or_insert_with(|| choice.member_of_group(newest[member]));
                    prop_assert!(newest[member] >= heard[of] || of == 2, "{of} begins inside of a group");
                }
                AdaptStep::Switch(to) => {
                    let ready = choice.is_ready(to);
                    if let Some(first) = choice.switch(to) {
                        prop_assert!(ready && !lost[to]);
                        prop_assert!(decided.range(first..).next().is_none(), "{first} has begun");
                        prop_assert_eq!(choice.member_of_group(first), to);
                    }
                }
                AdaptStep::Lose(member) => {
                    choice.lose(member);
                    lost[member] = true;
                }
            }
            if decided.len() < 30 {
                for (group, of) in &decided {
                    prop_assert_eq!(choice.member_of_group(*group), *of, "group {} changed", group);
                }
            }
        }
    }
}

const LOOK: Duration = Duration::from_millis(50);

const LADDER: [u64; 3] = [800_000, 2_000_000, 5_000_000];

#[test]
fn failed_switch_to_a_higher_rendition_delays_the_next_one() {
    // The bandwidth estimate says that the path has enough capacity for the next higher rendition, but another flow
    // starts whenever the decider selects that rendition.
    let start = Instant::now();
    let mut decider = Decider::new([800_000, 5_000_000], 0);
    let mut delivered = 0;
    let mut climbs = Vec::new();
    let mut rung = 0;
    let mut since = 0;
    for look in 0..12_000u64 {
        let before = rung;
        let crowded = rung == 1 && look - since > 20;
        delivered += if crowded { 12_000 } else { 12_500 };
        rung = decider.look(&ConnectionSample {
            now: start + LOOK * look as u32,
            delivered,
            bandwidth: 1_000_000,
            fastest: 0,
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

/// The change to a higher rendition causes queueing on a path that had no queue before.
#[test]
fn switch_up_that_fills_the_path_is_reverted_at_once() {
    let start = Instant::now();
    let mut decider = Decider::new(LADDER, 0);
    let mut rungs = Vec::new();
    for look in 0..800u32 {
        let queue = if rungs.last() == Some(&1) { LOOK + LOOK / 2 } else { Duration::ZERO };
        rungs.push(decider.look(&ConnectionSample {
            now: start + LOOK * look,
            delivered: 5_000 * u64::from(look),
            bandwidth: 1_000_000,
            fastest: 0,
            waiting: Duration::ZERO,
            round_trip: LOOK + queue,
        }));
    }
    let climbs: Vec<_> =
        rungs.chunk_by(|a, b| a == b).filter(|rungs| rungs[0] == 1).map(<[_]>::len).collect();
    // The capacity measured when the change to the higher rendition failed is remembered for a minute.
    assert!(climbs.len() == 1 && climbs[0] <= 14, "{climbs:?}");
}

#[test]
fn highest_rendition_returns_within_45_s_after_the_route_gets_longer() {
    let start = Instant::now();
    let mut decider = Decider::new(LADDER, 2);
    let mut rungs = Vec::new();
    for look in 0..2400u32 {
        // After ten seconds the path changes to a longer route with the same capacity.
        let round_trip = if look < 200 { LOOK } else { 4 * LOOK };
        rungs.push(decider.look(&ConnectionSample {
            now: start + LOOK * look,
            delivered: 31_250 * u64::from(look),
            bandwidth: 4_000_000,
            fastest: 0,
            waiting: Duration::ZERO,
            round_trip,
        }));
    }
    let longest = rungs.iter().filter(|rung| **rung < 2).count() as u32 * LOOK;
    assert_eq!((rungs[199], rungs.last()), (2, Some(&2)));
    assert!(longest < Duration::from_secs(45), "{longest:?}");
}

#[test]
fn lowest_rendition_is_selected_without_throughput() {
    let start = Instant::now();
    let mut decider = Decider::new(LADDER, 2);
    let looks = (0..10u32).map(|look| {
        decider.look(&ConnectionSample {
            now: start + LOOK * look,
            delivered: 1000,
            bandwidth: 10_000_000,
            fastest: 0,
            waiting: LOOK * look,
            round_trip: LOOK,
        })
    });
    // Unsent media count as a backlog when they are 100 ms old, and the rendition changes when the backlog has lasted
    // for 200 ms.
    assert_eq!(looks.collect::<Vec<_>>(), [2, 2, 2, 2, 2, 2, 0, 0, 0, 0]);
}
