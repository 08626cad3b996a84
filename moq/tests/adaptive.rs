//! A picture with several renditions on a path whose room comes and goes.

use std::{
    collections::HashMap,
    sync::Arc,
    time::{Duration, Instant},
};

use millrace_moq::tracks::adapt::{Decider, Sample};
use millrace_quic::plane::{
    congestion::Algorithm,
    downstream::{
        Config, Priority, StreamKey,
        sim::{CODES, Credit, Link, Sim},
    },
    source::{End, mem::Mem},
};

const SECOND: Duration = Duration::from_secs(1);

const FPS: u64 = 30;
const LADDER: [u64; 3] = [800_000, 2_000_000, 5_000_000];
const LOOK: Duration = Duration::from_millis(50);
/// After a change of the path, nobody can help it.
const GRACE: Duration = Duration::from_secs(2);
const STALL: Duration = Duration::from_millis(250);

struct Frame {
    tag: u64,
    end: u64,
    number: u64,
}

/// Which rendition each group was of, and since when nothing was shown for too long, in ms.
#[derive(Debug)]
struct Seen {
    rungs: Vec<usize>,
    stalls: Vec<(u64, u64)>,
}

fn link(bits: u64) -> Link {
    let rate = bits / 8;
    Link { rate: Some(rate), queue: rate / 10, delay: Duration::from_millis(30), ..Link::default() }
}

/// Groups of a second: a key frame as large as 8 others, and those as a subgroup of their own.
fn watch(seconds: u64, jitter: Duration, bits: impl Fn(u64) -> u64) -> Seen {
    let credit = Credit { data: 1 << 30, stream_data: 1 << 30, streams: 1000 };
    let config = Config { algorithm: Algorithm::Bbr, ..Config::new(CODES) };
    let mut sim = Sim::new(1, Link { jitter, ..link(bits(0)) }, credit, config);
    let began = sim.now;
    let mut decider = Decider::new(LADDER, LADDER.len() - 1);
    let (mut wanted, mut rung) = (LADDER.len() - 1, 0);
    let (mut rungs, mut frames, mut open) = (Vec::new(), Vec::new(), HashMap::new());
    let (mut looked, mut changes) = (sim.now, Vec::new());
    for number in 0..seconds * FPS {
        let (group, index) = (number / FPS, number % FPS);
        if index == 0 {
            rung = wanted;
            rungs.push(rung);
            if group > 0 && bits(group) != bits(group - 1) {
                sim.link = Link { jitter, ..link(bits(group)) };
                changes.push(sim.now);
            }
        }
        let delta = LADDER[rung] / 8 / (FPS + 7);
        let tag = 2 * group + u64::from(index > 0);
        let (key, source): &(StreamKey, Arc<Mem>) = open.entry(tag).or_insert_with(|| {
            let source = Mem::new(tag);
            let key = sim.open_with(&source, |stream| {
                let subgroup = tag % 2;
                stream.priority = Priority { subscriber: 128, publisher: subgroup as u8, group, subgroup };
                stream.label.group = group;
                stream.max_delay = Some(STALL);
            });
            (key, source)
        });
        source.push(if index == 0 { 8 * delta } else { delta }, sim.now);
        if index == 0 || index == FPS - 1 {
            source.finish(End::Fin { at: sim.now });
        }
        frames.push(Frame { tag, end: source.len(), number });
        sim.down.wake(*key);
        sim.transmit();
        let next = sim.now + SECOND / FPS as u32;
        while sim.now < next {
            sim.run_for((looked + LOOK).min(next) - sim.now);
            if sim.now >= looked + LOOK {
                looked = sim.now;
                wanted = decider.look(&Sample::of(&sim.down.room(sim.now), sim.now));
            }
        }
    }
    sim.run_for(SECOND);
    let shown = shown(&sim, &frames);
    let gaps = shown.windows(2).filter_map(|pair| {
        let graces = changes
            .iter()
            .map(|change| pair[1].min(*change + GRACE).saturating_duration_since(pair[0].max(*change)));
        let gap = (pair[1] - pair[0]).saturating_sub(graces.sum());
        let since = pair[0].saturating_duration_since(began).as_millis() as u64;
        (gap > STALL && since > 1000).then_some((since, gap.as_millis() as u64))
    });
    Seen { rungs, stalls: gaps.collect() }
}

/// When each frame is shown: once it and all before it in its group have come, and none after a later one.
fn shown(sim: &Sim, frames: &[Frame]) -> Vec<Instant> {
    let begun = sim.peer.streams.values().filter(|stream| stream.had(8).is_some());
    let streams: HashMap<_, _> = begun.map(|stream| (stream.tag(), stream)).collect();
    let mut shown = Vec::new();
    for group in frames.chunks(FPS as usize) {
        let mut latest = None;
        for frame in group {
            let Some(at) = streams.get(&frame.tag).and_then(|stream| stream.had(frame.end)) else { break };
            latest = latest.max(Some(at));
            shown.extend(latest.map(|at| (at, frame.number)));
        }
    }
    shown.sort_unstable();
    let mut last = None;
    shown.retain(|(_, number)| {
        let goes_on = last < Some(*number);
        last = last.max(Some(*number));
        goes_on
    });
    shown.into_iter().map(|(at, _)| at).collect()
}

/// What a sender of little learns of the path is old: after the room has gone nothing more is tried until more is seen to arrive.
#[test]
fn down_at_the_next_group_and_up_again_when_there_is_room() {
    let dips = |second| if (15..33).contains(&second) { 2_000_000 } else { 8_000_000 };
    let Seen { rungs, stalls } = watch(48, Duration::from_millis(3), dips);
    let mut changes = rungs.clone();
    changes.dedup();
    assert_eq!(changes, [2, 0, 1, 2], "{rungs:?}");
    assert!(rungs[..16].iter().all(|rung| *rung == 2), "{rungs:?}");
    assert!(rungs[16..33].iter().all(|rung| *rung == 0), "{rungs:?}");
    assert_eq!(stalls, []);
}
