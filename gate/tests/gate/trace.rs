//! Tests of traces: which packets a trace gets, how many, and how the other packets are counted.

use std::time::Duration;

use millrace_gate::kernel::rules::{RuleMode, ScopeRules};
use millrace_gate::kernel::{
    GateRules, GateTrace, Kind, LoadedGate, PacketTracer, PolicyRules, Rates, RefusedPacket, Rule, RulePlace,
    RuleRate, Traced,
};
use millrace_kernel::prefix::Prefix;
use millrace_testkit::wait_until;

use crate::frame::{LongPacketType, VERSIONS, initial, long, long_start, short};
use crate::{PORT, config, enforce, gate, root, to_server};

const FLOODING: &str = "192.0.2.7:40000";
const QUIET: &str = "198.51.100.9:40000";
const V6: &str = "[2001:db8::7]:40000";

fn everything() -> GateTrace {
    GateTrace { client: None, scopes: Vec::new(), rules: Vec::new(), per_second: GateTrace::PER_SECOND_MAX }
}

fn trace_client(client: &str) -> GateTrace {
    GateTrace { client: Some(prefix(client)), ..everything() }
}

fn prefix(text: &str) -> Prefix {
    text.parse().expect("a prefix")
}

fn policy() -> PolicyRules {
    PolicyRules { modes: enforce(&[Rule::Short, Rule::Malformed]), ..PolicyRules::default() }
}

/// Sends packets that rule `short` refuses.
fn send(gate: &LoadedGate, from: &str, count: usize) {
    let frame = to_server(from, short(&[], 5)).bytes();
    (0..count).for_each(|_| drop(gate.run(&frame).expect("a run")));
}

fn take(tracer: &PacketTracer) -> Traced {
    let traced = tracer.take().expect("samples");
    assert!(traced.samples.len() as u64 + traced.left_out + traced.lost <= traced.matched, "{traced:?}");
    traced
}

fn senders(samples: &[RefusedPacket]) -> Vec<String> {
    samples.iter().map(|sample| sample.source.to_string()).collect()
}

/// Floods until the log gets no more samples, because of its limit per second. A trace of one client must get every
/// packet of this client.
#[test]
fn trace_of_a_client_survives_the_flood_of_another() {
    if !root("a_client_is_followed_through_the_flood_of_another") {
        return;
    }
    let gate = gate(policy());
    let tracer = gate.trace(&trace_client("198.51.100.0/24")).expect("a tracer");
    for _ in 0..50 {
        send(&gate, FLOODING, 500);
        send(&gate, QUIET, 1);
    }
    let logged = gate.drain_samples().expect("samples");
    assert!(logged.iter().filter(|it| it.source.to_string() == QUIET).count() < 50, "a sample of all");
    let Traced { samples, matched, left_out, lost } = take(&tracer);
    assert_eq!(senders(&samples), vec![QUIET; 50]);
    assert_eq!((matched, left_out, lost), (50, 0, 0));
    assert_eq!(take(&tracer), Traced { samples: vec![], matched, left_out, lost }, "nothing comes twice");
}

/// Checks that packets over a trace's rate are counted as left out, and that each packet is either in a sample or in
/// one of the counts.
#[test]
fn trace_counts_packets_that_exceed_its_rate_as_left_out() {
    if !root("trace_counts_packets_that_exceed_its_rate_as_left_out") {
        return;
    }
    let gate = gate(policy());
    let tracer = gate.trace(&GateTrace { per_second: 10, ..everything() }).expect("a tracer");
    send(&gate, FLOODING, 1000);
    let Traced { samples, matched, left_out, lost } = take(&tracer);
    assert_eq!((matched, lost), (1000, 0));
    assert!(samples.len() >= 10 && left_out > 0, "{} {left_out}", samples.len());
    assert_eq!(samples.len() as u64 + left_out, matched);
}

/// Checks that packets for which a trace's queue has no room are counted as lost. A trace that is read in time loses no
/// packets because of another trace.
#[test]
fn trace_counts_packets_not_read_in_time_as_lost() {
    if !root("trace_counts_packets_not_read_in_time_as_lost") {
        return;
    }
    let gate = gate(policy());
    let slow = gate.trace(&everything()).expect("a tracer");
    let quick = gate.trace(&everything()).expect("a tracer");
    // In the end, the test sends more packets than a trace's queue holds: a burst of a thousand and a thousand a
    // second.
    let mut seen = 0;
    let look = || {
        send(&gate, FLOODING, 100);
        seen += take(&quick).samples.len();
        seen
    };
    wait_until("more samples than a queue holds", look, |seen| *seen >= 2500);
    let quick = take(&quick);
    assert_eq!((seen as u64 + quick.left_out, quick.lost), (quick.matched, 0));
    let slow = take(&slow);
    assert_eq!(slow.samples.len() as u64 + slow.left_out + slow.lost, slow.matched);
    assert!(slow.lost > 0, "{} of {}", slow.samples.len(), slow.matched);
}

#[test]
fn trace_filters_select_packets() {
    if !root("filters") {
        return;
    }
    let gate = LoadedGate::load(&config()).expect("a gate");
    let scope = |name: &str, port, modes| ScopeRules {
        name: name.to_owned(),
        places: vec![RulePlace::port(port)],
        policy: PolicyRules { modes, ..PolicyRules::default() },
        prefixes: Vec::new(),
    };
    let strict = enforce(&[Rule::Short, Rule::Malformed]);
    let scopes = vec![scope("web", PORT, strict), scope("watched", PORT + 1, strict.dry_run())];
    gate.apply(&GateRules { scopes, ..GateRules::default() }).expect("rules");
    let frames = || {
        let mut all = Vec::new();
        for from in [FLOODING, QUIET, V6] {
            for payload in [short(&[], 5), long(LongPacketType::Retry, 1, &[7; 8], &[], &[], 1200)] {
                let frame = to_server(from, payload);
                let mut watched = frame.clone();
                watched.destination.set_port(PORT + 1);
                all.extend([frame.bytes(), watched.bytes()]);
            }
        }
        all
    };
    let rules = |rules: &[Rule]| GateTrace { rules: rules.to_vec(), ..everything() };
    let scopes = |names: &[&str]| GateTrace {
        scopes: names.iter().map(|name| (*name).to_owned()).collect(),
        ..everything()
    };
    for (what, want) in [
        (everything(), 12),
        (trace_client("192.0.2.7"), 4),
        (trace_client("192.0.0.0/16"), 4),
        (trace_client("0.0.0.0/0"), 8),
        (trace_client("::/0"), 4),
        (trace_client("2001:db8::/32"), 4),
        (trace_client("2001:db9::/32"), 0),
        (rules(&[Rule::Short]), 6),
        (rules(&[Rule::Short, Rule::Malformed]), 12),
        (rules(&[Rule::Quota]), 0),
        (scopes(&["web"]), 6),
        (scopes(&["web", "watched"]), 12),
        (scopes(&["interface"]), 0),
        (
            GateTrace {
                rules: vec![Rule::Malformed],
                scopes: vec!["watched".into()],
                ..trace_client("192.0.2.7")
            },
            1,
        ),
    ] {
        let tracer = gate.trace(&what).expect("a tracer");
        frames().iter().for_each(|frame| drop(gate.run(frame).expect("a run")));
        let traced = take(&tracer);
        assert_eq!((traced.samples.len(), traced.matched), (want, want as u64), "{what:?}");
        for sample in &traced.samples {
            assert_eq!(sample.scope == "watched", !sample.monitored.is_empty(), "{sample:?}");
        }
    }
    assert!(gate.trace(&scopes(&["wbe"])).is_err());
    for per_second in [0, GateTrace::PER_SECOND_MAX + 1] {
        assert!(gate.trace(&GateTrace { per_second, ..everything() }).is_err());
    }
}

/// Runs as many traces as are allowed. A trace that ends makes room for another trace, which gets none of the first
/// trace's packets or counts.
#[test]
fn traces_start_and_end_independently() {
    if !root("traces_start_and_end_independently") {
        return;
    }
    let gate = gate(policy());
    let mut tracers: Vec<_> =
        (0..GateTrace::TRACERS).map(|_| gate.trace(&everything()).expect("room")).collect();
    let full = gate.trace(&everything()).err().expect("no room").to_string();
    assert!(full.contains("8 are running"), "{full}");
    send(&gate, FLOODING, 1);
    assert!(tracers.iter().all(|tracer| take(tracer).samples.len() == 1));
    // Packets that were sent to a trace that has ended must not appear in the next trace.
    send(&gate, FLOODING, 1);
    drop(tracers.remove(3));
    let other = gate.trace(&trace_client("198.51.100.0/24")).expect("room again");
    send(&gate, FLOODING, 1);
    send(&gate, QUIET, 1);
    assert_eq!(senders(&take(&other).samples), [QUIET]);
    assert!(tracers.iter().all(|tracer| take(tracer).samples.len() == 3));
    drop((tracers, other));
    let tracer = gate.trace(&everything()).expect("room");
    assert_eq!(take(&tracer), Traced::default(), "counts begin anew");
    drop(gate);
    drop(tracer);
}

/// Gives the index of a removed scope to another scope, whose packets must not appear in the old trace.
#[test]
fn trace_of_a_removed_application_shows_no_packets_of_a_new_one() {
    if !root("trace_of_a_removed_application_shows_no_packets_of_a_new_one") {
        return;
    }
    let gate = gate(policy());
    let tracer = gate.trace(&GateTrace { scopes: vec!["web".into()], ..everything() }).expect("a tracer");
    for n in 0..70 {
        let scope = crate::scope(&format!("other{n}"), PORT, policy());
        gate.apply(&GateRules { scopes: vec![scope], ..GateRules::default() }).expect("rules");
    }
    send(&gate, FLOODING, 1);
    assert_eq!(tracer.take().expect_err("gone").to_string(), "the scope does not exist any more");
}

#[test]
fn trace_names_packet_types() {
    if !root("trace_names_packet_types") {
        return;
    }
    let id = [0x1d; 8];
    let all = [Rule::Block, Rule::Short, Rule::Malformed, Rule::Version, Rule::ClientPackets];
    let none = RuleRate { amount: 1, per: Duration::from_secs(1000), burst: 1 };
    let gate = gate(PolicyRules {
        modes: enforce(&all).with(Rule::Quota, RuleMode::Off),
        client_rates: Rates { packets: Some(none), ..Rates::default() },
        ..PolicyRules::default()
    });
    gate.run(&to_server(QUIET, short(&id, 100)).bytes()).expect("uses the rate up");
    let tracer = gate.trace(&everything()).expect("a tracer");
    let version = VERSIONS[0];
    for (payload, rule, want, with_id) in [
        (short(&id, 100), Rule::ClientPackets, Some(Kind::Short), false),
        (initial(version, &id, &[], &[]), Rule::ClientPackets, Some(Kind::Initial), true),
        (
            long(LongPacketType::ZeroRtt, version, &id, &[], &[], 1200),
            Rule::ClientPackets,
            Some(Kind::ZeroRtt),
            true,
        ),
        (
            long(LongPacketType::Handshake, version, &id, &[], &[], 1200),
            Rule::ClientPackets,
            Some(Kind::Handshake),
            true,
        ),
        (long_start(0xc0, 0xbaba_baba, &id, &[]), Rule::Version, Some(Kind::OtherVersion), true),
        (
            long(LongPacketType::Retry, version, &id, &[], &[], 1200),
            Rule::Malformed,
            Some(Kind::Impossible),
            true,
        ),
        (vec![], Rule::Short, None, false),
    ] {
        gate.run(&to_server(QUIET, payload).bytes()).expect("a run");
        let samples = take(&tracer).samples;
        let [sample] = samples.as_slice() else { panic!("{want:?}: {samples:?}") };
        assert_eq!((sample.reason, sample.kind), (crate::refused(rule), want));
        assert_eq!(sample.id == id, with_id, "{want:?}");
    }
}
