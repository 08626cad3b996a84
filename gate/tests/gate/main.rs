//! The gate's programs, frame by frame, most of it without a network. Needs root.

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

use frame::Frame;
use millrace_gate::kernel::rules::{Mode, Scope};
use millrace_gate::kernel::{
    Action, Config, Gate, Modes, Pass, Place, Policy, Reason, Rule, Rules, Statistics,
};
use net::root;

pub const PORT: u16 = 443;

/// Small maps, so that they fill up.
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

pub fn scope(name: &str, port: u16, policy: Policy) -> Scope {
    Scope { name: name.to_owned(), places: vec![Place::port(port)], policy, prefixes: Vec::new() }
}

/// One scope, "web".
pub fn gate(policy: Policy) -> Gate {
    let gate = Gate::load(&config()).unwrap_or_else(|error| panic!("{error}"));
    apply(&gate, policy);
    gate
}

pub fn apply(gate: &Gate, policy: Policy) {
    let rules = Rules { scopes: vec![scope("web", PORT, policy)], ..Rules::default() };
    gate.apply(&rules).unwrap_or_else(|error| panic!("{error}"));
}

pub fn enforce(rules: &[Rule]) -> Modes {
    rules.iter().fold(Modes::default(), |modes, rule| modes.with(*rule, Mode::Enforce))
}

/// From an address and port to [`PORT`] of the server.
pub fn to_server(from: &str, payload: Vec<u8>) -> Frame {
    let from: SocketAddr = from.parse().expect("an address");
    let server = if from.is_ipv4() { "198.51.100.1" } else { "2001:db8:1::1" };
    Frame::new(from, SocketAddr::new(server.parse().expect("an address"), PORT), payload)
}

/// The other way.
pub fn to_client(to: &str, payload: Vec<u8>) -> Frame {
    let there = to_server(to, payload);
    Frame { source: there.destination, destination: there.source, ..there }
}

/// Which counters changed: scope, reason, and by how much; and monitored rules.
fn changes(before: &Statistics, after: &Statistics) -> Vec<(String, Reason, u64)> {
    let mut changes = Vec::new();
    for scope in &after.scopes {
        let old = before.scope(&scope.name);
        let rules = Rule::ALL.map(|rule| {
            let packets = scope.rule(rule).packets - old.map_or(0, |old| old.rule(rule).packets);
            (Reason::Refused(rule), packets)
        });
        let passes = Pass::ALL.map(|pass| {
            let packets = scope.pass(pass).packets - old.map_or(0, |old| old.pass(pass).packets);
            (Reason::Passed(pass), packets)
        });
        let all = rules.into_iter().chain(passes).filter(|(_, packets)| *packets > 0);
        changes.extend(all.map(|(reason, packets)| (scope.name.clone(), reason, packets)));
    }
    changes
}

/// The verdict on a frame, which must be the only thing that is counted. `None`: it is none of the gate's business.
pub fn judge(gate: &Gate, frame: &[u8]) -> (Option<(String, Reason)>, Action) {
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

/// The verdict on a frame for "web". What is refused must be dropped, what passes must pass.
pub fn reason(gate: &Gate, frame: &Frame) -> Reason {
    let (verdict, action) = judge(gate, &frame.bytes());
    let (scope, reason) = verdict.expect("a verdict");
    assert_eq!(scope, "web");
    let want = if matches!(reason, Reason::Passed(_)) { Action::Pass } else { Action::Drop };
    assert_eq!(action, want, "{reason:?}");
    reason
}

pub const fn refused(rule: Rule) -> Reason {
    Reason::Refused(rule)
}

pub const fn passed(pass: Pass) -> Reason {
    Reason::Passed(pass)
}
