//! Simulates a video with several renditions on a path whose capacity changes.

use std::{
    collections::HashMap,
    sync::Arc,
    time::{Duration, Instant},
};

use millrace_moq::tracks::adapt::{ConnectionSample, Decider};
use millrace_quic::plane::{
    congestion::CongestionAlgorithm,
    downstream::{
        Config, Priority, StreamKey,
        sim::{CODES, ReceiverCredit, Sim, SimLink},
    },
    source::{SourceEnd, mem::Mem},
};

const SECOND: Duration = Duration::from_secs(1);

const FPS: u64 = 30;
const LADDER: [u64; 3] = [800_000, 2_000_000, 5_000_000];
const LOOK: Duration = Duration::from_millis(50);
/// Time after a change of the path's capacity during which stalls are not counted as failures, because no choice of
/// renditions can avoid them.
const GRACE: Duration = Duration::from_secs(2);
const STALL: Duration = Duration::from_millis(250);

struct AdaptiveFrame {
    tag: u64,
    end: u64,
    number: u64,
}

/// The rendition of each group, and the stalls: periods longer than `STALL` in which the viewer saw no new frame. A
/// stall is given as its begin and length in milliseconds.
#[derive(Debug)]
struct ShownGroups {
    rungs: Vec<usize>,
    stalls: Vec<(u64, u64)>,
}

fn link(bits: u64) -> SimLink {
    let rate = bits / 8;
    SimLink { rate: Some(rate), queue: rate / 10, delay: Duration::from_millis(30), ..SimLink::default() }
}

/// Simulates a viewer of groups of one second. A key frame is as large as 8 other frames. The other frames have a
/// separate subgroup.
fn watch(seconds: u64, jitter: Duration, bits: impl Fn(u64) -> u64) -> ShownGroups {
    let credit = ReceiverCredit { data: 1 << 30, stream_data: 1 << 30, streams: 1000 };
    let config = Config { algorithm: CongestionAlgorithm::Bbr, ..Config::new(CODES) };
    let mut sim = Sim::new(1, SimLink { jitter, ..link(bits(0)) }, credit, config);
    let began = sim.now;
    let mut decider = Decider::new(LADDER, LADDER.len() - 1);
    let mut wanted = LADDER.len() - 1;
    let mut rung = 0;
    let mut rungs = Vec::new();
    let mut frames = Vec::new();
    let mut open = HashMap::new();
    let mut looked = sim.now;
    let mut changes = Vec::new();
    for number in 0..seconds * FPS {
        let group = number / FPS;
        let index = number % FPS;
        if index == 0 {
            rung = wanted;
            rungs.push(rung);
            if group > 0 && bits(group) != bits(group - 1) {
                sim.link = SimLink { jitter, ..link(bits(group)) };
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
            source.finish(SourceEnd::Fin { at: sim.now });
        }
        frames.push(AdaptiveFrame { tag, end: source.len(), number });
        sim.down.wake(*key);
        sim.transmit();
        let next = sim.now + SECOND / FPS as u32;
        while sim.now < next {
            sim.run_for((looked + LOOK).min(next) - sim.now);
            if sim.now >= looked + LOOK {
                looked = sim.now;
                wanted = decider.look(&ConnectionSample::from_room(&sim.down.room(sim.now), sim.now));
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
    ShownGroups { rungs, stalls: gaps.collect() }
}

/// Returns the times at which frames are shown. A frame is shown when it and all earlier frames of its group have
/// arrived, but never after a later frame.
fn shown(sim: &Sim, frames: &[AdaptiveFrame]) -> Vec<Instant> {
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

/// A sender below the path's capacity gets no new bandwidth estimates. After the capacity has dropped, the decider
/// therefore selects no higher rendition until it measures a higher throughput.
#[test]
fn rendition_follows_capacity_down_and_up() {
    let dips = |second| if (15..33).contains(&second) { 2_000_000 } else { 8_000_000 };
    let ShownGroups { rungs, stalls } = watch(48, Duration::from_millis(3), dips);
    let mut changes = rungs.clone();
    changes.dedup();
    assert_eq!(changes, [2, 0, 1, 2], "{rungs:?}");
    assert!(rungs[..16].iter().all(|rung| *rung == 2), "{rungs:?}");
    assert!(rungs[16..33].iter().all(|rung| *rung == 0), "{rungs:?}");
    assert_eq!(stalls, []);
}
