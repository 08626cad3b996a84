//! Tests of verdicts that depend only on the packet's own contents, not on earlier packets.

use millrace_gate::kernel::rules::RuleMode;
use millrace_gate::kernel::{FrameAction, GateReason, GateRules, Modes, Pass, PolicyRules, Rule, RulePlace};

use crate::frame::{
    self, LongPacketType, TestFrame, VERSIONS, initial, long, long_start, payload_of_answer, short,
};
use crate::{enforce, gate, judge, passed, reason, refused, root, scope, to_server};

const ID: [u8; 8] = [1, 2, 3, 4, 5, 6, 7, 8];
const FROM: [u8; 5] = [9; 5];
const V4: &str = "192.0.2.7:40000";
const V6: &str = "[2001:db8::7]:40000";
const UNKNOWN: GateReason = passed(Pass::Unknown);

const VLAN: u16 = 0x8100;
const SERVICE_VLAN: u16 = 0x88a8;
const HOP_BY_HOP: u8 = 0;
const ROUTING: u8 = 43;
const DESTINATION: u8 = 60;
const TCP: u8 = 6;

type Change = fn(&mut TestFrame);

/// Test cases: a description, the client addresses (IPv4, IPv6) to test, a change to a valid frame, and the expected
/// verdict on the changed frame.
const IP: &[(&str, &[&str], Change, GateReason)] = &[
    ("unchanged", &[V4, V6], |_| {}, passed(Pass::New)),
    ("a VLAN tag", &[V4, V6], |f| f.tags = vec![VLAN], passed(Pass::New)),
    ("two VLAN tags", &[V4, V6], |f| f.tags = vec![SERVICE_VLAN, VLAN], passed(Pass::New)),
    ("Ethernet padding", &[V4, V6], |f| f.trailer = 30, passed(Pass::New)),
    ("IP says less than there is", &[V4, V6], |f| f.wrong_ip_len = -1, refused(Rule::Headers)),
    ("IP says more", &[V4, V6], |f| f.wrong_ip_len = 1, refused(Rule::Headers)),
    ("IP says that there is no UDP", &[V4, V6], |f| f.wrong_ip_len = -1208, refused(Rule::Headers)),
    ("UDP says more", &[V4, V6], |f| f.wrong_udp_len = 1, refused(Rule::Headers)),
    ("UDP says less than its header", &[V4, V6], |f| f.wrong_udp_len = -1201, refused(Rule::Headers)),
    ("UDP says zero", &[V4, V6], |f| f.wrong_udp_len = -1208, refused(Rule::Headers)),
    ("UDP says less, as is allowed", &[V4, V6], |f| f.wrong_udp_len = -1, refused(Rule::Malformed)),
    ("first fragment", &[V4, V6], |f| f.fragment = Some((0, true)), refused(Rule::Fragment)),
    ("atomic fragment", &[V6], |f| f.fragment = Some((0, false)), refused(Rule::Fragment)),
    ("one word of options", &[V4], |f| f.options = 1, passed(Pass::New)),
    ("all options", &[V4], |f| f.options = 10, passed(Pass::New)),
    ("hop-by-hop", &[V6], |f| f.extensions = vec![(HOP_BY_HOP, 0)], passed(Pass::New)),
    (
        "three",
        &[V6],
        |f| f.extensions = vec![(HOP_BY_HOP, 1), (ROUTING, 2), (DESTINATION, 3)],
        passed(Pass::New),
    ),
    ("seven", &[V6], |f| f.extensions = vec![(DESTINATION, 0); 7], passed(Pass::New)),
    ("source port 0", &[V4, V6], |f| f.source.set_port(0), refused(Rule::SourcePort)),
    ("source port of a reflector", &[V4, V6], |f| f.source.set_port(11211), refused(Rule::SourcePort)),
];

#[test]
fn malformed_ip_packets_get_their_reason() {
    if !root("ip") {
        return;
    }
    let gate = gate(PolicyRules::default());
    for (description, families, change, want) in IP {
        for from in *families {
            let mut frame = to_server(from, initial(VERSIONS[0], &ID, &FROM, &[]));
            change(&mut frame);
            assert_eq!(reason(&gate, &frame), *want, "{description}, {from}");
        }
    }
}

/// Test cases: a description, the client's address, a change after which the packet's destination is no guarded
/// application (scope), and the expected verdict.
const NOT_OURS: &[(&str, &str, Change, GateReason)] = &[
    ("another port", V4, |f| f.destination.set_port(444), passed(Pass::Other)),
    ("another port", V6, |f| f.destination.set_port(444), passed(Pass::Other)),
    ("not UDP", V4, |f| f.protocol = TCP, passed(Pass::NotUdp)),
    ("not UDP", V6, |f| f.protocol = TCP, passed(Pass::NotUdp)),
    ("three tags", V4, |f| f.tags = vec![VLAN; 3], passed(Pass::NotUdp)),
    ("a later fragment", V4, |f| f.fragment = Some((1, false)), UNKNOWN),
    ("a later fragment", V6, |f| f.fragment = Some((1, true)), UNKNOWN),
    ("too many headers", V6, |f| f.extensions = vec![(DESTINATION, 0); 9], refused(Rule::Headers)),
    ("too long headers", V6, |f| f.extensions = vec![(DESTINATION, 30)], refused(Rule::Headers)),
    (
        "no UDP behind headers",
        V6,
        |f| (f.extensions, f.protocol) = (vec![(DESTINATION, 0)], TCP),
        passed(Pass::NotUdp),
    ),
];

#[test]
fn packets_outside_guarded_applications_get_the_interface_verdict() {
    if !root("not_ours") {
        return;
    }
    let gate = gate(PolicyRules::default());
    for (description, from, change, want) in NOT_OURS {
        let mut frame = to_server(from, initial(VERSIONS[0], &ID, &FROM, &[]));
        change(&mut frame);
        let (verdict, action) = judge(&gate, &frame.bytes());
        let drop = matches!(want, GateReason::Refused(_));
        assert_eq!(verdict, Some(("interface".to_owned(), *want)), "{description}, {from}");
        assert_eq!(action, if drop { FrameAction::Drop } else { FrameAction::Pass }, "{description}, {from}");
    }
}

/// Cuts a frame at every length, and checks that the verdict depends on the remaining bytes only.
#[test]
fn truncated_frames_are_never_misread() {
    if !root("truncated") {
        return;
    }
    let gate = gate(PolicyRules::default());
    for from in [V4, V6] {
        let mut frame = to_server(from, initial(VERSIONS[0], &ID, &FROM, &[]));
        frame.tags = vec![VLAN];
        let bytes = frame.bytes();
        let headers = bytes.len() - frame::FULL;
        for len in 14..bytes.len() {
            let (verdict, action) = judge(&gate, &bytes[..len]);
            let want = match verdict.map(|(_, reason)| reason) {
                Some(GateReason::Passed(Pass::NotUdp)) => {
                    assert!(len < headers - 8, "{len} bytes are no UDP");
                    FrameAction::Pass
                }
                reason => {
                    assert_eq!(reason, Some(refused(Rule::Headers)), "{len} bytes");
                    FrameAction::Drop
                }
            };
            assert_eq!(action, want, "{len} bytes");
        }
    }
}

fn quic_table() -> Vec<(&'static str, Vec<u8>, GateReason)> {
    let mut table = vec![
        ("nothing", vec![], refused(Rule::Short)),
        ("a byte of a short header", vec![0x40], refused(Rule::Short)),
        ("short header, one byte too short", short(&[], 20), refused(Rule::Short)),
        ("the shortest", short(&[], 21), UNKNOWN),
        ("short header without the fixed bit", vec![0; 40], UNKNOWN),
        ("long header of six bytes", vec![0xc0, 0, 0, 0, 1, 0], refused(Rule::Short)),
        ("Version Negotiation", long_start(0xc0, 0, &ID, &FROM), refused(Rule::Malformed)),
        ("another version", long_start(0xc0, 0x0a0a_0a0a, &ID, &FROM), refused(Rule::Version)),
        (
            "with IDs of 255 bytes",
            long_start(0xc0, 0xff00_001d, &[1; 255], &[2; 255]),
            refused(Rule::Version),
        ),
        ("but without the second", vec![0xc0, 0xff, 0, 0, 29, 2, 1, 1], refused(Rule::Malformed)),
    ];
    for version in VERSIONS {
        let good = |kind| long(kind, version, &ID, &FROM, &[], frame::FULL);
        let with = |id: &[u8], from: &[u8]| initial(version, id, from, &[]);
        let mut long_token = long_start(if version == 1 { 0xc0 } else { 0xd0 }, version, &ID, &FROM);
        long_token.extend(frame::varint(2000));
        long_token.resize(frame::FULL, 1);
        let mut long_length = good(LongPacketType::Handshake);
        long_length.pop();
        let mut coalesced = long(LongPacketType::Initial, version, &ID, &FROM, &[], 200);
        coalesced.extend(long(LongPacketType::Handshake, version, &ID, &FROM, &[], 1000));
        let mut padded = long(LongPacketType::Initial, version, &ID, &FROM, &[], 200);
        padded.resize(frame::FULL, 0);
        let full_token = [7; 900];
        table.extend([
            ("Initial", good(LongPacketType::Initial), passed(Pass::New)),
            ("0-RTT", good(LongPacketType::ZeroRtt), UNKNOWN),
            ("Handshake", good(LongPacketType::Handshake), UNKNOWN),
            ("Retry", good(LongPacketType::Retry), refused(Rule::Malformed)),
            ("Initial with a long token", initial(version, &ID, &FROM, &full_token), passed(Pass::New)),
            ("Initial and Handshake", coalesced, passed(Pass::New)),
            ("Initial and padding", padded, passed(Pass::New)),
            ("IDs of 20 bytes", with(&[1; 20], &[2; 20]), passed(Pass::New)),
            ("no source ID", with(&ID, &[]), passed(Pass::New)),
            ("destination ID of 21 bytes", with(&[1; 21], &[]), refused(Rule::Malformed)),
            ("source ID of 21 bytes", with(&ID, &[1; 21]), refused(Rule::Malformed)),
            ("token past the end", long_token, refused(Rule::Malformed)),
            ("length past the end", long_length, refused(Rule::Malformed)),
            (
                "length without room for a sample",
                long(LongPacketType::Handshake, version, &ID, &FROM, &[], 40),
                refused(Rule::Malformed),
            ),
            (
                "Initial of 1199 bytes",
                long(LongPacketType::Initial, version, &ID, &FROM, &[], 1199),
                refused(Rule::InitialSize),
            ),
            (
                "Handshake of 100 bytes",
                long(LongPacketType::Handshake, version, &ID, &FROM, &[], 100),
                UNKNOWN,
            ),
        ]);
        for len in 7..long_start(0xc0, version, &ID, &FROM).len() {
            let cut = long_start(0xc0, version, &ID, &FROM)[..len].to_vec();
            table.push(("cut inside the IDs", cut, refused(Rule::Malformed)));
        }
    }
    table
}

fn strict() -> PolicyRules {
    PolicyRules { modes: enforce(&[Rule::Version]), ..PolicyRules::default() }
}

#[test]
fn malformed_quic_packets_get_their_reason() {
    if !root("quic") {
        return;
    }
    let gate = gate(strict());
    for from in [V4, V6] {
        for (description, payload, want) in quic_table() {
            let frame = to_server(from, payload);
            assert_eq!(reason(&gate, &frame), want, "{description}, {from}, {:02x?}", frame.payload);
        }
    }
}

/// Checks that in mode "monitor" packets pass and are counted for the rule that would refuse them, and that mode "off"
/// counts nothing.
#[test]
fn rule_in_mode_monitor_counts_and_in_mode_off_is_skipped() {
    if !root("modes") {
        return;
    }
    let gate = gate(PolicyRules { modes: strict().modes.dry_run(), ..strict() });
    let monitored =
        |rule| gate.statistics().expect("statistics").scope("web").expect("web").rule(rule).monitored;
    for (description, payload, want) in quic_table() {
        let GateReason::Refused(rule) = want else { continue };
        let before = monitored(rule);
        assert!(matches!(reason(&gate, &to_server(V4, payload)), GateReason::Passed(_)), "{description}");
        assert_eq!(monitored(rule), before + 1, "{description}");
    }
    let samples = gate.drain_samples().expect("samples");
    assert!(!samples.is_empty() && samples.iter().all(|s| !s.monitored.is_empty()), "{samples:?}");
    crate::apply(&gate, PolicyRules { modes: Modes::OFF, ..strict() });
    let before = gate.statistics().expect("statistics");
    for (description, payload, _) in quic_table() {
        assert!(matches!(reason(&gate, &to_server(V4, payload)), GateReason::Passed(_)), "{description}");
    }
    let after = gate.statistics().expect("statistics");
    let all =
        |s: &millrace_gate::kernel::GateTotals| Rule::ALL.map(|rule| s.scope("web").expect("web").rule(rule));
    assert_eq!(all(&before), all(&after));
}

#[test]
fn unsupported_version_is_negotiated() {
    if !root("unsupported_version_is_negotiated") {
        return;
    }
    let policy = PolicyRules { answers: [Rule::Version].into(), ..strict() };
    let gate = gate(policy.clone());
    for from in [V4, V6] {
        for (id, source_id) in [(&ID[..], &FROM[..]), (&[], &[]), (&[3; 20], &[4; 20])] {
            let mut asked = long_start(0xe5, 0x0a1a_2a3a, id, source_id);
            asked.resize(frame::FULL, 7);
            let mut frame = to_server(from, asked);
            frame.tags = vec![VLAN; source_id.len() % 3];
            let (verdict, action) = judge(&gate, &frame.bytes());
            assert_eq!(verdict, Some(("web".to_owned(), refused(Rule::Version))));
            let FrameAction::Answer(answer) = action else { panic!("{action:?}") };
            let payload = payload_of_answer(&frame, &answer);
            let mut want = long_start(payload[0], 0, source_id, id);
            assert_eq!(payload[0] & 0xc0, 0xc0);
            want.extend(VERSIONS.map(u32::to_be_bytes).concat());
            assert_eq!(payload, want);
        }
    }
    // These packets get no Version Negotiation: too small (RFC 9000, section 6), with IPv4 options, or with a
    // connection ID of more than 20 bytes.
    let mut small = long_start(0xe5, 0x0a1a_2a3a, &ID, &FROM);
    small.resize(frame::FULL - 1, 7);
    let mut big = long_start(0xe5, 0x0a1a_2a3a, &ID, &FROM);
    big.resize(frame::FULL, 7);
    let mut with_options = to_server(V4, big);
    with_options.options = 1;
    let mut long_ids = long_start(0xe5, 0x0a1a_2a3a, &[1; 21], &FROM);
    long_ids.resize(frame::FULL, 7);
    for frame in [to_server(V4, small), with_options, to_server(V6, long_ids)] {
        assert_eq!(reason(&gate, &frame), refused(Rule::Version));
    }
}

#[test]
fn ip_options_and_extension_headers_are_refused_by_rule() {
    if !root("options_by_rule") {
        return;
    }
    let gate = gate(PolicyRules { modes: enforce(&[Rule::Options]), ..PolicyRules::default() });
    let mut options = to_server(V4, initial(1, &ID, &FROM, &[]));
    options.options = 1;
    let mut extensions = to_server(V6, initial(1, &ID, &FROM, &[]));
    extensions.extensions = vec![(DESTINATION, 0)];
    for frame in [options, extensions] {
        assert_eq!(reason(&gate, &frame), refused(Rule::Options));
    }
    assert_eq!(reason(&gate, &to_server(V4, initial(1, &ID, &FROM, &[]))), passed(Pass::New));
}

/// Checks that a packet's guarded application (scope) is looked up by destination address and port, then by address,
/// then by port. Fragments after the first have no port.
#[test]
fn rules_for_address_and_port_precede_those_for_address_or_port() {
    if !root("scopes") {
        return;
    }
    let gate = gate(PolicyRules::default());
    let at = |address: Option<&str>, port| RulePlace {
        address: address.map(|a| a.parse().expect("an address")),
        port,
    };
    let mut scopes = vec![
        scope("both", 0, PolicyRules::default()),
        scope("address", 0, PolicyRules::default()),
        scope("port", 0, PolicyRules::default()),
    ];
    scopes[0].places = vec![at(Some("198.51.100.1"), Some(443)), at(Some("2001:db8:1::1"), Some(443))];
    scopes[1].places = vec![at(Some("198.51.100.1"), None), at(Some("2001:db8:1::1"), None)];
    scopes[2].places = vec![at(None, Some(443)), at(None, Some(8443))];
    gate.apply(&GateRules { scopes, ..GateRules::default() }).expect("rules");
    let off = Modes::default().with(Rule::Fragment, RuleMode::Off);
    assert_ne!(off, Modes::default());
    for (from, to, fragment, want) in [
        (V4, "198.51.100.1:443", None, ("both", passed(Pass::New))),
        (V4, "198.51.100.1:8443", None, ("address", passed(Pass::New))),
        (V4, "198.51.100.1:443", Some((9, false)), ("address", refused(Rule::Fragment))),
        (V4, "198.51.100.2:443", None, ("port", passed(Pass::New))),
        (V4, "198.51.100.2:8443", None, ("port", passed(Pass::New))),
        (V4, "198.51.100.2:443", Some((9, false)), ("interface", UNKNOWN)),
        (V4, "198.51.100.2:444", None, ("interface", passed(Pass::Other))),
        (V6, "[2001:db8:1::1]:443", None, ("both", passed(Pass::New))),
        (V6, "[2001:db8:1::1]:1", None, ("address", passed(Pass::New))),
        (V6, "[2001:db8:1::1]:1", Some((9, true)), ("address", refused(Rule::Fragment))),
        (V6, "[2001:db8:1::2]:443", None, ("port", passed(Pass::New))),
        (V6, "[2001:db8:1::2]:444", None, ("interface", passed(Pass::Other))),
    ] {
        let mut frame = to_server(from, initial(1, &ID, &FROM, &[]));
        frame.destination = to.parse().expect("an address");
        frame.fragment = fragment;
        let (verdict, _) = judge(&gate, &frame.bytes());
        assert_eq!(verdict, Some((want.0.to_owned(), want.1)), "{to} {fragment:?}");
    }
}
