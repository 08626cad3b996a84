//! Tests of the gate's programs with single frames, mostly without a network. They need root.

mod attach;
mod bare;
mod form;
mod frame;
mod networks;
mod random;
mod refusal;
mod retry;
mod settings;
mod state;
mod trace;
mod tracking;
mod wireguard;

use millrace_testkit::net;
use std::net::SocketAddr;

use frame::TestFrame;
use millrace_gate::kernel::rules::{RuleMode, ScopeRules};
use millrace_gate::kernel::{
    Config, FrameAction, GateReason, GateRules, GateTotals, LoadedGate, Modes, Pass, PolicyRules, Rule,
    RulePlace,
};
use net::root;

pub const PORT: u16 = 443;

/// Returns settings with small maps, which fill up quickly.
pub fn config() -> Config {
    Config {
        max_ids: 64,
        max_clients: 64,
        max_handshakes: 64,
        max_rates: 64,
        max_prefixes: 64,
        ..Config::default()
    }
}

pub fn scope(name: &str, port: u16, policy: PolicyRules) -> ScopeRules {
    ScopeRules { name: name.to_owned(), places: vec![RulePlace::port(port)], policy, prefixes: Vec::new() }
}

/// Loads a gate with one guarded application (scope), "web".
pub fn gate(policy: PolicyRules) -> LoadedGate {
    let gate = LoadedGate::load(&config()).unwrap_or_else(|error| panic!("{error}"));
    apply(&gate, policy);
    gate
}

pub fn apply(gate: &LoadedGate, policy: PolicyRules) {
    let rules = GateRules { scopes: vec![scope("web", PORT, policy)], ..GateRules::default() };
    gate.apply(&rules).unwrap_or_else(|error| panic!("{error}"));
}

pub fn enforce(rules: &[Rule]) -> Modes {
    rules.iter().fold(Modes::default(), |modes, rule| modes.with(*rule, RuleMode::Enforce))
}

/// Returns a frame from an address and port to [`PORT`] of the server.
pub fn to_server(from: &str, payload: Vec<u8>) -> TestFrame {
    let from: SocketAddr = from.parse().expect("an address");
    let server = if from.is_ipv4() { "198.51.100.1" } else { "2001:db8:1::1" };
    TestFrame::new(from, SocketAddr::new(server.parse().expect("an address"), PORT), payload)
}

/// Returns a frame from [`PORT`] of the server to an address and port.
pub fn to_client(to: &str, payload: Vec<u8>) -> TestFrame {
    let there = to_server(to, payload);
    TestFrame { source: there.destination, destination: there.source, ..there }
}

/// Returns the counters that changed: the scope, the reason, and the difference. Monitored rules are included.
fn changes(before: &GateTotals, after: &GateTotals) -> Vec<(String, GateReason, u64)> {
    let mut changes = Vec::new();
    for scope in &after.scopes {
        let old = before.scope(&scope.name);
        let rules = Rule::ALL.map(|rule| {
            let packets = scope.rule(rule).packets - old.map_or(0, |old| old.rule(rule).packets);
            (GateReason::Refused(rule), packets)
        });
        let passes = Pass::ALL.map(|pass| {
            let packets = scope.pass(pass).packets - old.map_or(0, |old| old.pass(pass).packets);
            (GateReason::Passed(pass), packets)
        });
        let all = rules.into_iter().chain(passes).filter(|(_, packets)| *packets > 0);
        changes.extend(all.map(|(reason, packets)| (scope.name.clone(), reason, packets)));
    }
    changes
}

/// Runs the gate on a frame, and checks that at most one counter changes. Returns the scope and reason of this counter,
/// or `None`, and what the gate does with the frame.
pub fn judge(gate: &LoadedGate, frame: &[u8]) -> (Option<(String, GateReason)>, FrameAction) {
    let before = gate.statistics().expect("statistics");
    let action = gate.run(frame).expect("a run");
    let after = gate.statistics().expect("statistics");
    let mut changes = changes(&before, &after).into_iter();
    let verdict = changes.next().map(|(scope, reason, packets)| {
        assert_eq!(packets, 1);
        (scope, reason)
    });
    assert_eq!(changes.next(), None, "a second verdict beside {verdict:?}");
    (verdict, action)
}

/// Returns the verdict on a frame for scope "web". Checks that a refused packet is dropped, and any other passes.
pub fn reason(gate: &LoadedGate, frame: &TestFrame) -> GateReason {
    let (verdict, action) = judge(gate, &frame.bytes());
    let (scope, reason) = verdict.expect("a verdict");
    assert_eq!(scope, "web");
    let want = if matches!(reason, GateReason::Passed(_)) { FrameAction::Pass } else { FrameAction::Drop };
    assert_eq!(action, want, "{reason:?}");
    reason
}

pub const fn refused(rule: Rule) -> GateReason {
    GateReason::Refused(rule)
}

pub const fn passed(pass: Pass) -> GateReason {
    GateReason::Passed(pass)
}
