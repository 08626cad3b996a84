//! What is between the hosts and meddles with options of TCP: those by which connections in place agree (kind 253), and MPTCP's.

use std::time::Duration;

use super::Case;
use super::daemons::note;
use super::outcome::Outcome;
use super::pair::{CARRIERS, Middlebox, Pair, Setting, count};
use super::recorded::{Packet, Recorded};
use super::traffic::{Load, Traffic, all_whole};

/// Of connections in place.
const IN_PLACE: u16 = 7101;
const REPEATS: u64 = 20;
/// So that repeated packets come at all times of a connection.
const APART: Duration = Duration::from_millis(50);

/// Of both hosts' graft options, in words.
fn agreed(pair: &Pair<'_>) -> anyhow::Result<u64> {
    let status = pair.client.status()?;
    Ok(status.pointer("/status/outcomes/agreed").and_then(serde_json::Value::as_u64).unwrap_or_default())
}

pub fn stripped(case: &Case<'_>) -> anyhow::Result<Outcome> {
    let rules = ["reset tcp option 253", "reset tcp option mptcp", "reset tcp option sack-perm"];
    meddled(case, &rules.map(str::to_owned), true)
}

/// Another graft's name in agreements, and another key in MPTCP's. The option is a hint that nobody signs: connections may agree by it, and are whole.
pub fn forged(case: &Case<'_>) -> anyhow::Result<Outcome> {
    let rules = [
        "tcp option @253,64,32 set 0x12345678".to_owned(),
        "tcp flags & (syn | ack) == (syn | ack) tcp option @30,32,32 set 0x12345678".to_owned(),
    ];
    meddled(case, &rules, false)
}

/// In both directions.
fn meddled(case: &Case<'_>, rules: &[String], is_stripped: bool) -> anyhow::Result<Outcome> {
    let (mut outcome, kinds) = (case.outcome(), [case.kind]);
    let setting = Setting { in_place: Some(IN_PLACE), ..Setting::of(&kinds) };
    let pair = Pair::new(&case.site, &setting)?;
    let both = |rule: &String| [("prerouting", rule.clone()), ("postrouting", rule.clone())];
    let rules: Vec<_> = rules.iter().flat_map(both).collect();
    let _between = Middlebox::new(pair.server.node, &rules)?;
    let _far = pair.server.start()?;
    let _near = pair.client.start()?;
    // With an option that is forged a carrier of MPTCP may be none: then nothing is led.
    let state = pair.wait_warm();
    outcome.seen.push(match &state {
        Ok(_) => "the carrier is warm".to_owned(),
        Err(_) => format!("the carrier is {}", pair.state()?),
    });
    let traffic = Traffic::new(&pair)?;
    let in_place = Traffic::between(&pair.client, &pair.server, pair.at(IN_PLACE)?)?;
    let carried = traffic.whole(Load::of(5, 3_000_000))?;
    outcome.check(all_whole(&carried), || "a carried connection was not whole".into());
    let plain = in_place.whole(Load::of(5, 3_000_000))?;
    outcome.check(all_whole(&plain), || "a connection in place was not whole".into());
    let agreed = agreed(&pair)?;
    outcome.check(!is_stripped || agreed == 0, || {
        format!("{agreed} connections agreed by options that do not come through")
    });
    outcome.seen.push(format!("{agreed} of 5 connections in place agreed"));
    if state.is_ok() {
        let led = count(&pair.client, "verdicts/led")?;
        outcome.check(led >= 5, || format!("{led} of 5 were carried"));
    }
    in_place.end([plain], &mut outcome)?;
    traffic.end([carried], &mut outcome)?;
    note(&pair, &mut outcome)?;
    Ok(outcome)
}

/// First packets of connections, options and all, come again and again, while other connections are there.
pub fn replayed(case: &Case<'_>) -> anyhow::Result<Outcome> {
    let (mut outcome, kinds) = (case.outcome(), [case.kind]);
    let setting = Setting { in_place: Some(IN_PLACE), ..Setting::of(&kinds) };
    let pair = Pair::new(&case.site, &setting)?;
    let recording =
        Recorded::begin_with(&pair, |frame| Packet::of(frame).is_some_and(|it| it.is_first_of_tcp()))?;
    let _daemons = pair.start()?;
    let traffic = Traffic::new(&pair)?;
    let in_place = Traffic::between(&pair.client, &pair.server, pair.at(IN_PLACE)?)?;
    let first = [traffic.whole(Load::of(5, 100_000))?, in_place.whole(Load::of(5, 100_000))?];
    let recorded = recording.end()?;
    outcome.check(recorded.frames.len() >= 5, || {
        format!("only {} first packets were recorded", recorded.frames.len())
    });
    let [carried, plain] = [traffic.begin(Load::steady(3))?, in_place.begin(Load::steady(3))?];
    for _ in 0..REPEATS {
        recorded.repeat(&pair)?;
        std::thread::sleep(APART);
    }
    let second = [carried.end()?, plain.end()?];
    let third = [traffic.whole(Load::of(5, 100_000))?, in_place.whole(Load::of(5, 100_000))?];
    outcome.check(first.iter().chain(&second).chain(&third).all(all_whole), || {
        "a connection was not whole".into()
    });
    outcome.seen.push(format!("sent {REPEATS} times: {recorded}"));
    outcome.runs = REPEATS;
    let ([carried1, plain1], [carried2, plain2], [carried3, plain3]) = (first, second, third);
    in_place.end([plain1, plain2, plain3], &mut outcome)?;
    traffic.end([carried1, carried2, carried3], &mut outcome)?;
    pair.wait_for_end()?;
    outcome
        .check(pair.state()? == "warm", || format!("the carrier to port {CARRIERS} is {:?}", pair.state()));
    note(&pair, &mut outcome)?;
    Ok(outcome)
}
