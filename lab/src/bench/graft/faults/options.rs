//! Middleboxes that alter TCP options: the option by which connections agree on a graft (kind 253), and MPTCP's.

use std::time::Duration;

use super::FaultCase;
use super::daemons::note;
use super::outcome::FaultOutcome;
use super::pair::{CARRIERS, FaultPair, Middlebox, Setting, count};
use super::recorded::{Recorded, RecordedPacket};
use super::traffic::{FaultTraffic, TrafficLoad, all_whole};

/// Port whose connections are not tunnelled.
const IN_PLACE: u16 = 7101;
const REPEATS: u64 = 20;
/// Interval between two repetitions of the recorded SYN packets. It is short, so that they arrive during the handshake,
/// the transfer and the end of connections.
const APART: Duration = Duration::from_millis(50);

/// Returns how many connections agreed on a graft by TCP options, according to the status of the client's daemon.
fn agreed(pair: &FaultPair<'_>) -> anyhow::Result<u64> {
    let status = pair.client.status()?;
    Ok(status.pointer("/status/outcomes/agreed").and_then(serde_json::Value::as_u64).unwrap_or_default())
}

pub fn stripped(case: &FaultCase<'_>) -> anyhow::Result<FaultOutcome> {
    let rules = ["reset tcp option 253", "reset tcp option mptcp", "reset tcp option sack-perm"];
    meddled(case, &rules.map(str::to_owned), true)
}

/// Writes another graft's name into the TCP option by which hosts agree on a graft, and another key into MPTCP's
/// options. The graft option is an unsigned hint: connections may agree on the other graft, but must deliver all data.
pub fn forged(case: &FaultCase<'_>) -> anyhow::Result<FaultOutcome> {
    let rules = [
        "tcp option @253,64,32 set 0x12345678".to_owned(),
        "tcp flags & (syn | ack) == (syn | ack) tcp option @30,32,32 set 0x12345678".to_owned(),
    ];
    meddled(case, &rules, false)
}

/// Applies the nftables rules to both directions, and checks the connections.
fn meddled(case: &FaultCase<'_>, rules: &[String], is_stripped: bool) -> anyhow::Result<FaultOutcome> {
    let mut outcome = case.outcome();
    let kinds = [case.kind];
    let setting = Setting { in_place: Some(IN_PLACE), ..Setting::from_kinds(&kinds) };
    let pair = FaultPair::new(&case.site, &setting)?;
    let both = |rule: &String| [("prerouting", rule.clone()), ("postrouting", rule.clone())];
    let rules: Vec<_> = rules.iter().flat_map(both).collect();
    let _between = Middlebox::new(pair.server.node, &rules)?;
    let _far = pair.server.start()?;
    let _near = pair.client.start()?;
    // With forged options, no MPTCP tunnel may come up. Then no connection is tunnelled.
    let state = pair.wait_warm();
    outcome.seen.push(match &state {
        Ok(_) => "the carrier is warm".to_owned(),
        Err(_) => format!("the carrier is {}", pair.state()?),
    });
    let traffic = FaultTraffic::new(&pair)?;
    let in_place = FaultTraffic::between(&pair.client, &pair.server, pair.at(IN_PLACE)?)?;
    let carried = traffic.whole(TrafficLoad::with_size(5, 3_000_000))?;
    outcome.check(all_whole(&carried), || "a tunnelled connection did not deliver all data".into());
    let plain = in_place.whole(TrafficLoad::with_size(5, 3_000_000))?;
    outcome.check(all_whole(&plain), || "a connection outside of the tunnel did not deliver all data".into());
    let agreed = agreed(&pair)?;
    outcome.check(!is_stripped || agreed == 0, || {
        format!("{agreed} connections agreed by options that the middlebox removes")
    });
    outcome.seen.push(format!("{agreed} of 5 connections in place agreed"));
    if state.is_ok() {
        let redirected = count(&pair.client, "verdicts/redirected")?;
        outcome.check(redirected >= 5, || format!("{redirected} of 5 connections were tunnelled"));
    }
    in_place.end([plain], &mut outcome)?;
    traffic.end([carried], &mut outcome)?;
    note(&pair, &mut outcome)?;
    Ok(outcome)
}

/// Sends recorded SYN packets, with their options, again and again while other connections are open.
pub fn replayed(case: &FaultCase<'_>) -> anyhow::Result<FaultOutcome> {
    let mut outcome = case.outcome();
    let kinds = [case.kind];
    let setting = Setting { in_place: Some(IN_PLACE), ..Setting::from_kinds(&kinds) };
    let pair = FaultPair::new(&case.site, &setting)?;
    let recording = Recorded::begin_with(&pair, |frame| {
        RecordedPacket::from_frame(frame).is_some_and(|it| it.is_first_of_tcp())
    })?;
    let _daemons = pair.start()?;
    let traffic = FaultTraffic::new(&pair)?;
    let in_place = FaultTraffic::between(&pair.client, &pair.server, pair.at(IN_PLACE)?)?;
    let first = [
        traffic.whole(TrafficLoad::with_size(5, 100_000))?,
        in_place.whole(TrafficLoad::with_size(5, 100_000))?,
    ];
    let recorded = recording.end()?;
    outcome.check(recorded.frames.len() >= 5, || {
        format!("only {} SYN packets were recorded", recorded.frames.len())
    });
    let [carried, plain] = [traffic.begin(TrafficLoad::steady(3))?, in_place.begin(TrafficLoad::steady(3))?];
    for _ in 0..REPEATS {
        recorded.repeat(&pair)?;
        std::thread::sleep(APART);
    }
    let second = [carried.end()?, plain.end()?];
    let third = [
        traffic.whole(TrafficLoad::with_size(5, 100_000))?,
        in_place.whole(TrafficLoad::with_size(5, 100_000))?,
    ];
    outcome.check(first.iter().chain(&second).chain(&third).all(all_whole), || {
        "a connection did not deliver all data".into()
    });
    outcome.seen.push(format!("sent {REPEATS} times: {recorded}"));
    outcome.runs = REPEATS;
    let [carried1, plain1] = first;
    let [carried2, plain2] = second;
    let [carried3, plain3] = third;
    in_place.end([plain1, plain2, plain3], &mut outcome)?;
    traffic.end([carried1, carried2, carried3], &mut outcome)?;
    pair.wait_for_end()?;
    outcome.check(pair.state()? == "warm", || {
        format!("the carrier to port {CARRIERS} should be warm, but is {:?}", pair.state())
    });
    note(&pair, &mut outcome)?;
    Ok(outcome)
}
