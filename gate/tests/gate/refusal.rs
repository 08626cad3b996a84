//! Tests of new connections that are refused by an answer: Version Negotiation with a version that nothing implements.

use std::time::Duration;

use millrace_gate::kernel::rules::{Error, RuleMode, ScopeRules};
use millrace_gate::kernel::{
    Counting, Event, FrameAction, GateRules, LiveRule, LoadedGate, Pass, PolicyRules, Rates, Rule, RulePlace,
    RuleRate,
};

use crate::frame::{
    FULL, LongPacketType, TestFrame, VERSIONS, initial, long, long_start, payload_of_answer, short,
};
use crate::{apply, enforce, gate, judge, passed, reason, refused, root, to_server};

const V4: &str = "192.0.2.7:40000";
const V6: &str = "[2001:db8::7]:40000";
const SERVER_ID: [u8; 8] = [0x5e; 8];
const REFUSING: [Rule; 3] = [Rule::Quota, Rule::UnknownInitials, Rule::ClientInitials];

/// Returns a policy that enforces only this rule. A rule that limits rates admits one connection and refuses the next.
/// The rule `quota` refuses already the first connection.
fn policy(rule: Rule) -> PolicyRules {
    let once = RuleRate { amount: 1, per: Duration::from_secs(1000), burst: 1 };
    let rates = Rates { initials: Some(once), ..Rates::default() };
    PolicyRules {
        modes: enforce(&[rule]),
        live: LiveRule::Published { id_len: SERVER_ID.len() },
        counting: Counting::Application,
        quota: Some(0),
        unknown_rates: rates,
        client_rates: rates,
        answers: [rule].into(),
        ..PolicyRules::default()
    }
}

fn events(gate: &LoadedGate) -> [u64; 2] {
    let statistics = gate.statistics().expect("statistics");
    [Event::Answered, Event::NotAnswered].map(|event| statistics.event(event))
}

/// Checks a Version Negotiation that answers a packet: its version is reserved (RFC 9000, section 15), it has the
/// source and destination connection IDs of the packet, and it is shorter than the packet.
fn assert_refusal(gate: &LoadedGate, asked: &TestFrame, rule: Rule, id: &[u8], from: &[u8]) {
    let (verdict, action) = judge(gate, &asked.bytes());
    assert_eq!(verdict, Some(("web".to_owned(), refused(rule))));
    let FrameAction::Answer(answer) = action else { panic!("{rule:?}: {action:?}") };
    let payload = payload_of_answer(asked, &answer);
    let start = long_start(payload[0], 0, from, id);
    assert_eq!((payload[0] & 0xc0, &payload[..start.len()]), (0xc0, &start[..]));
    let versions = &payload[start.len()..];
    assert_eq!(versions.iter().map(|byte| byte & 0x0f).collect::<Vec<_>>(), [0x0a; 4]);
    assert!(answer.len() * 4 < asked.bytes().len());
}

#[test]
fn refused_initials_get_version_negotiation() {
    if !root("refused_initials_get_version_negotiation") {
        return;
    }
    for rule in REFUSING {
        for from in [V4, V6] {
            let gate = gate(policy(rule));
            let mut first = to_server(from, initial(1, &[0xf1; 8], &[], &[]));
            if rule != Rule::Quota {
                assert_eq!(reason(&gate, &first), passed(Pass::New));
                // A repeated Initial is not counted as another connection, because the server may be about to answer
                // the first one.
                assert_eq!(reason(&gate, &first), passed(Pass::New));
                // The same Initial from another source port counts as another connection.
                first.source.set_port(40001);
                assert_refusal(&gate, &first, rule, &[0xf1; 8], &[]);
            }
            let before = events(&gate)[0];
            for (tags, version) in [(vec![], VERSIONS[0]), (vec![0x8100], VERSIONS[1])] {
                for len in 0..=20 {
                    let id = vec![0xd0; len];
                    let source_id = vec![0x50; 20 - len];
                    let mut asked = to_server(from, initial(version, &id, &source_id, &[]));
                    asked.tags.clone_from(&tags);
                    assert_refusal(&gate, &asked, rule, &id, &source_id);
                }
            }
            assert_eq!(events(&gate), [before + 2 * 21, 0]);
        }
    }
}

/// Checks that a refused Initial gets no Version Negotiation if the policy does not ask for it, and none in mode
/// "monitor". Packets other than Initials, and packets that are too small or have IP options, get none either.
#[test]
fn refused_initial_is_not_answered_unless_the_policy_asks_for_an_answer() {
    if !root("refused_initial_is_not_answered_unless_the_policy_asks_for_an_answer") {
        return;
    }
    let asked = to_server(V4, initial(1, &[1; 8], &[2; 8], &[]));
    for rule in REFUSING {
        let gate = gate(PolicyRules { answers: [].into(), ..policy(rule) });
        let other = to_server(V4, initial(1, &[9; 8], &[2; 8], &[]));
        let verdicts = [reason(&gate, &other), reason(&gate, &asked)];
        assert_eq!(verdicts[1], refused(rule));
        assert_eq!(events(&gate), [0, 0]);
    }
    let small = PolicyRules {
        modes: enforce(&[Rule::Quota]).with(Rule::InitialSize, RuleMode::Off),
        ..policy(Rule::Quota)
    };
    let gate = gate(small.clone());
    let mut options = asked.clone();
    options.options = 1;
    let short_one = to_server(V4, long(LongPacketType::Initial, 1, &[1; 8], &[2; 8], &[], FULL - 1));
    for (unanswered, frame) in [options, short_one].iter().enumerate() {
        assert_eq!(reason(&gate, frame), refused(Rule::Quota));
        assert_eq!(events(&gate), [0, unanswered as u64 + 1]);
    }
    for kind in [LongPacketType::ZeroRtt, LongPacketType::Handshake] {
        let other = to_server(V4, long(kind, 1, &[6; 8], &[], &[], FULL));
        assert_eq!(reason(&gate, &other), refused(Rule::Quota));
    }
    apply(&gate, PolicyRules { modes: small.modes.with(Rule::Quota, RuleMode::Monitor), ..small });
    assert_eq!(reason(&gate, &asked), passed(Pass::New));
    assert_eq!(events(&gate), [0, 2]);
}

/// Checks that packets of a live connection pass without an answer while its client is refused new connections.
#[test]
fn packets_of_live_connections_pass_without_a_refusal_answer() {
    if !root("packets_of_live_connections_pass_without_a_refusal_answer") {
        return;
    }
    let gate = gate(policy(Rule::Quota));
    let web = gate.scope("web").expect("a scope");
    web.publish(&SERVER_ID).expect("an ID");
    for from in [V4, V6] {
        let packets = [
            initial(1, &SERVER_ID, &[2; 8], &[]),
            long(LongPacketType::Handshake, 1, &SERVER_ID, &[2; 8], &[], FULL),
            short(&SERVER_ID, FULL),
        ];
        for packet in packets {
            assert_eq!(reason(&gate, &to_server(from, packet)), passed(Pass::Live));
        }
        assert_eq!(reason(&gate, &to_server(from, short(&[7; 8], FULL))), passed(Pass::Unknown));
        let new = to_server(from, initial(1, &[7; 8], &[2; 8], &[]));
        assert_refusal(&gate, &new, Rule::Quota, &[7; 8], &[2; 8]);
    }
}

#[test]
fn only_rules_on_new_connections_may_have_a_refusal_answer() {
    let with = |rule| {
        let policy = PolicyRules { answers: [rule].into(), ..PolicyRules::default() };
        let web =
            ScopeRules { name: "web".into(), places: vec![RulePlace::port(443)], policy, prefixes: vec![] };
        GateRules { scopes: vec![web], ..GateRules::default() }.check()
    };
    for rule in Rule::ALL {
        let answers = REFUSING.contains(&rule) || rule == Rule::Version;
        assert_eq!(with(rule).is_ok(), answers, "{}", rule.name());
        assert!(answers || matches!(with(rule), Err(Error::Value { .. })));
    }
}
