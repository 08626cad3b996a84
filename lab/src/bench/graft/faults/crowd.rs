//! Many new connections a second.

use std::time::Instant;

use super::Case;
use super::daemons::note;
use super::outcome::Outcome;
use super::pair::{Pair, Setting};
use super::strangers::{Held, SLACK};
use super::traffic::{Load, Traffic, all_whole};
use crate::bench::process::Process;

/// Each way: what one asks, and what it is answered.
const BYTES: u64 = 2048;
const WAVES: usize = 3;

pub fn connects(case: &Case<'_>) -> anyhow::Result<Outcome> {
    let (mut outcome, kinds) = (case.outcome(), [case.kind]);
    let pair = Pair::new(&case.site, &Setting::of(&kinds))?;
    let daemons = pair.start()?;
    let traffic = Traffic::new(&pair)?;
    let (rate, connections) = (case.args.connects, case.args.connects * case.args.seconds);
    let load = Load { connections, pause_us: 0, bytes: Some(BYTES), per_second: Some(rate) };
    let (mut all, mut after) = (Vec::new(), Vec::new());
    for wave in 1..=WAVES {
        let start = Instant::now();
        let reports = traffic.whole(load)?;
        let rate = connections as f64 / start.elapsed().as_secs_f64();
        outcome.check(all_whole(&reports), || format!("a connection of wave {wave} was not whole"));
        all.push(reports);
        pair.wait_for_end()?;
        let held = held(&daemons)?;
        outcome
            .seen
            .push(format!("wave {wave}: {rate:.0} a second, then client {}, server {}", held[0], held[1]));
        after.push(held);
    }
    // Pools may be larger after the first; what grows with each is a leak.
    for (name, end) in [("client", 0), ("server", 1)] {
        let (second, last) = (after[1][end], after[WAVES - 1][end]);
        outcome.check(last.memory <= second.memory + SLACK, || {
            format!("{name}: memory grows: {second}, {last}")
        });
    }
    outcome.runs = connections * WAVES as u64;
    traffic.end(all, &mut outcome)?;
    note(&pair, &mut outcome)?;
    Ok(outcome)
}

fn held(daemons: &[Process; 2]) -> anyhow::Result<[Held; 2]> {
    let [near, far] = daemons;
    Ok([Held::by(near)?, Held::by(far)?])
}
