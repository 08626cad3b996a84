//! The fault `connects`: many new connections per second.

use std::time::Instant;

use super::FaultCase;
use super::daemons::note;
use super::outcome::FaultOutcome;
use super::pair::{FaultPair, Setting};
use super::strangers::{HeldResources, SLACK};
use super::traffic::{FaultTraffic, TrafficLoad, all_whole};
use crate::bench::process::BenchProcess;

/// Bytes that each connection sends in each direction.
const BYTES: u64 = 2048;
const WAVES: usize = 3;

pub fn connects(case: &FaultCase<'_>) -> anyhow::Result<FaultOutcome> {
    let mut outcome = case.outcome();
    let kinds = [case.kind];
    let pair = FaultPair::new(&case.site, &Setting::from_kinds(&kinds))?;
    let daemons = pair.start()?;
    let traffic = FaultTraffic::new(&pair)?;
    let rate = case.args.connects;
    let connections = case.args.connects * case.args.seconds;
    let load = TrafficLoad { connections, pause_us: 0, bytes: Some(BYTES), per_second: Some(rate) };
    let mut all = Vec::new();
    let mut after = Vec::new();
    for wave in 1..=WAVES {
        let start = Instant::now();
        let reports = traffic.whole(load)?;
        let rate = connections as f64 / start.elapsed().as_secs_f64();
        outcome
            .check(all_whole(&reports), || format!("a connection of wave {wave} did not deliver all data"));
        all.push(reports);
        pair.wait_for_end()?;
        let held = held(&daemons)?;
        outcome
            .seen
            .push(format!("wave {wave}: {rate:.0} a second, then client {}, server {}", held[0], held[1]));
        after.push(held);
    }
    // Connections come in waves. In the first two waves, the daemons may allocate memory that they keep for reuse. If
    // their memory grows after the second wave, it is a leak.
    for (name, end) in [("client", 0), ("server", 1)] {
        let second = after[1][end];
        let last = after[WAVES - 1][end];
        outcome.check(last.memory <= second.memory + SLACK, || {
            format!("{name}: memory grew from {second} to {last}")
        });
    }
    outcome.runs = connections * WAVES as u64;
    traffic.end(all, &mut outcome)?;
    note(&pair, &mut outcome)?;
    Ok(outcome)
}

fn held(daemons: &[BenchProcess; 2]) -> anyhow::Result<[HeldResources; 2]> {
    let [near, far] = daemons;
    Ok([HeldResources::by(near)?, HeldResources::by(far)?])
}
