//! Tests that the program decides about arbitrary bytes and never fails.

use std::time::Duration;

use fastrand::Rng;
use millrace_gate::kernel::rules::{ANSWERING, RuleMode};
use millrace_gate::kernel::{
    Config, FrameAction, GateRules, ListEntry, LoadedGate, Modes, PolicyRules, Rates, Rule, RuleRate,
};

use crate::frame::{LongPacketType, TestFrame, VERSIONS, initial, long, long_start, short};
use crate::{config, root, scope, to_client, to_server};

/// Returns all rules, in random modes.
fn rules(rng: &mut Rng) -> GateRules {
    // The rates are so low that a used-up token bucket does not refill during the test, even on a slow machine.
    let rate = |burst| Some(RuleRate { amount: 1, per: Duration::from_secs(100), burst });
    let rates = Rates { initials: rate(10), packets: rate(20), bytes: rate(20_000) };
    let modes =
        Rule::ALL.into_iter().filter(|rule| *rule != Rule::UnknownId).fold(Modes::OFF, |modes, rule| {
            modes.with(rule, [RuleMode::Off, RuleMode::Monitor, RuleMode::Enforce][rng.usize(..3)])
        });
    let policy = PolicyRules {
        modes,
        quota: Some(rng.u32(..3)),
        answers: ANSWERING.into_iter().filter(|_| rng.bool()).collect(),
        retry_above: rng.bool().then_some(RuleRate::per_second(1, 1)),
        client_rates: rates,
        unknown_rates: rates,
        live_rates: rates,
        ..PolicyRules::default()
    };
    let mut web = scope("web", 443, policy);
    web.prefixes = vec![("192.0.2.128/25".parse().expect("a prefix"), ListEntry::Block)];
    GateRules { scopes: vec![web], interface: modes, ..GateRules::default() }
}

fn some_packet(rng: &mut Rng) -> Vec<u8> {
    let id = vec![rng.u8(..4); rng.usize(..=20)];
    let from = vec![rng.u8(..); rng.usize(..=20)];
    let version = VERSIONS[rng.usize(..2)];
    match rng.u32(..5) {
        0 => initial(version, &id, &from, &vec![1; rng.usize(..100)]),
        1 => {
            let kind = [
                LongPacketType::Initial,
                LongPacketType::ZeroRtt,
                LongPacketType::Handshake,
                LongPacketType::Retry,
            ][rng.usize(..4)];
            long(kind, version, &id, &from, &[], rng.usize(60..1400))
        }
        2 => short(&id, rng.usize(20..1400)),
        3 => {
            let mut packet = long_start(0x80 | rng.u8(..), rng.u32(..), &id, &from);
            packet.resize(rng.usize(packet.len()..1400), 0);
            packet
        }
        _ => (0..rng.usize(..1400)).map(|_| rng.u8(..)).collect(),
    }
}

fn some_frame(rng: &mut Rng) -> TestFrame {
    let from =
        if rng.bool() { format!("192.0.2.{}:4000", rng.u8(..)) } else { "[2001:db8::1]:4000".to_owned() };
    let payload = some_packet(rng);
    let mut frame = to_server(&from, payload);
    if rng.u32(..8) == 0 {
        frame = to_client(&from, frame.payload);
    }
    frame.source.set_port([0, 53, 4000, rng.u16(..)][rng.usize(..4)]);
    frame.tags = vec![0x8100; [0, 0, 0, 1, 2, 3][rng.usize(..6)]];
    frame.options = [0, 0, 0, rng.usize(..=10)][rng.usize(..4)];
    frame.extensions =
        vec![([0, 43, 60][rng.usize(..3)], rng.usize(..4)); [0, 0, 0, rng.usize(..10)][rng.usize(..4)]];
    frame.fragment = [None, None, None, Some((rng.u16(..4), rng.bool()))][rng.usize(..4)];
    frame.trailer = rng.usize(..3);
    frame
}

fn mutate(frame: &mut Vec<u8>, rng: &mut Rng) {
    for _ in 0..[0, 0, 1, 3, 10][rng.usize(..5)] {
        let at = rng.usize(..frame.len().min(120));
        frame[at] = if rng.bool() { rng.u8(..) } else { frame[at] ^ 1 << rng.u32(..8) };
    }
    if rng.u32(..8) == 0 {
        frame.truncate(rng.usize(14..=frame.len()));
    }
}

fn check(gate: &LoadedGate, frame: &[u8]) {
    match gate.run(frame).expect("a verdict") {
        FrameAction::Pass | FrameAction::Drop => {}
        FrameAction::Answer(answer) => {
            assert!(answer.len() * 4 < frame.len(), "an answer of {} bytes to {frame:02x?}", answer.len());
        }
    }
    // BPF_PROG_TEST_RUN refuses packets without an IP header for programs at TC.
    if frame.len() >= 14 + 40 {
        gate.run_egress(frame).expect("watched");
    }
}

#[test]
fn gate_xdp_program_gives_a_verdict_on_arbitrary_bytes() {
    if !root("never_fails") {
        return;
    }
    let seed = std::env::var("SEED").map_or(1, |seed| seed.parse().expect("a number"));
    let cases = std::env::var("CASES").map_or(10_000, |cases| cases.parse().expect("a number"));
    let mut rng = Rng::with_seed(seed);
    // A network's limits are twice a client's, so a few clients are enough to reach them.
    let gate = LoadedGate::load(&Config { network_times: [2, 2], ..config() }).expect("a gate");
    let mut kinds = [0; 2];
    for case in 0..cases {
        if case % 100 == 0 {
            gate.apply(&rules(&mut rng)).expect("rules");
        }
        let mut frame = some_frame(&mut rng).bytes();
        mutate(&mut frame, &mut rng);
        check(&gate, &frame);
        kinds[usize::from(frame.len() > 200)] += 1;
    }
    assert!(kinds.iter().all(|count| *count > cases / 20), "{kinds:?}");
    for _ in 0..cases / 4 {
        let len = rng.usize(14..300);
        let frame: Vec<u8> = (0..len).map(|_| rng.u8(..)).collect();
        check(&gate, &frame);
    }
    let web = gate.statistics().expect("statistics");
    let web = web.scope("web").expect("web");
    let idle: Vec<_> = Rule::ALL
        .into_iter()
        .filter(|rule| web.rule(*rule).packets + web.rule(*rule).monitored == 0)
        .filter(|rule| !matches!(rule, Rule::UnknownId | Rule::LivePackets | Rule::LiveBytes))
        .collect();
    assert!(idle.is_empty(), "never reached: {idle:?}");
}
