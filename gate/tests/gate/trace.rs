//! Following what is refused: who gets which packets, how many, and what is said of the others.

use std::time::Duration;

use millrace_gate::kernel::rules::{Mode, Scope};
use millrace_gate::kernel::{
    Gate, Kind, Place, Policy, Rate, Rates, Rule, Rules, Sample, Trace, Traced, Tracer,
};
use millrace_kernel::prefix::Prefix;
use millrace_testkit::wait_until;

use crate::frame::{Type, VERSIONS, initial, long, long_start, short};
use crate::{PORT, config, enforce, gate, root, to_server};

const FLOODING: &str = "192.0.2.7:40000";
const QUIET: &str = "198.51.100.9:40000";
const V6: &str = "[2001:db8::7]:40000";

fn everything() -> Trace {
    Trace { client: None, scopes: Vec::new(), rules: Vec::new(), per_second: Trace::PER_SECOND_MAX }
}

fn of(client: &str) -> Trace {
    Trace { client: Some(prefix(client)), ..everything() }
}

fn prefix(text: &str) -> Prefix {
    text.parse().expect("a prefix")
}

fn policy() -> Policy {
    Policy { modes: enforce(&[Rule::Short, Rule::Malformed]), ..Policy::default() }
}

/// Packets that rule `short` refuses.
fn send(gate: &Gate, from: &str, count: usize) {
    let frame = to_server(from, short(&[], 5)).bytes();
    (0..count).for_each(|_| drop(gate.run(&frame).expect("a run")));
}

fn take(tracer: &Tracer) -> Traced {
    let traced = tracer.take().expect("samples");
    assert!(traced.samples.len() as u64 + traced.left_out + traced.lost <= traced.matched, "{traced:?}");
    traced
}

fn senders(samples: &[Sample]) -> Vec<String> {
    samples.iter().map(|sample| sample.source.to_string()).collect()
}

/// The log's samples are used up by the flood; who follows one client gets every packet of it.
#[test]
fn a_client_is_followed_through_the_flood_of_another() {
    if !root("a_client_is_followed_through_the_flood_of_another") {
        return;
    }
    let gate = gate(policy());
    let tracer = gate.trace(&of("198.51.100.0/24")).expect("a tracer");
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

/// Beyond the rate packets are counted, and all of them are one or the other.
#[test]
fn what_is_beyond_the_rate_is_counted() {
    if !root("what_is_beyond_the_rate_is_counted") {
        return;
    }
    let gate = gate(policy());
    let tracer = gate.trace(&Trace { per_second: 10, ..everything() }).expect("a tracer");
    send(&gate, FLOODING, 1000);
    let Traced { samples, matched, left_out, lost } = take(&tracer);
    assert_eq!((matched, lost), (1000, 0));
    assert!(samples.len() >= 10 && left_out > 0, "{} {left_out}", samples.len());
    assert_eq!(samples.len() as u64 + left_out, matched);
}

/// What does not fit is counted as lost; who looks loses nothing by those who do not.
#[test]
fn what_nobody_looks_at_in_time_is_counted() {
    if !root("what_nobody_looks_at_in_time_is_counted") {
        return;
    }
    let gate = gate(policy());
    let slow = gate.trace(&everything()).expect("a tracer");
    let quick = gate.trace(&everything()).expect("a tracer");
    // A thousand at once and a thousand a second: more than wait for anybody.
    let mut seen = 0;
    let look = || {
        send(&gate, FLOODING, 100);
        seen += take(&quick).samples.len();
        seen
    };
    wait_until("more than wait for anybody", look, |seen| *seen >= 2500);
    let quick = take(&quick);
    assert_eq!((seen as u64 + quick.left_out, quick.lost), (quick.matched, 0));
    let slow = take(&slow);
    assert_eq!(slow.samples.len() as u64 + slow.left_out + slow.lost, slow.matched);
    assert!(slow.lost > 0, "{} of {}", slow.samples.len(), slow.matched);
}

#[test]
fn filters() {
    if !root("filters") {
        return;
    }
    let gate = Gate::load(&config()).expect("a gate");
    let scope = |name: &str, port, modes| Scope {
        name: name.to_owned(),
        places: vec![Place::port(port)],
        policy: Policy { modes, ..Policy::default() },
        prefixes: Vec::new(),
    };
    let strict = enforce(&[Rule::Short, Rule::Malformed]);
    let scopes = vec![scope("web", PORT, strict), scope("watched", PORT + 1, strict.dry_run())];
    gate.apply(&Rules { scopes, ..Rules::default() }).expect("rules");
    let frames = || {
        let mut all = Vec::new();
        for from in [FLOODING, QUIET, V6] {
            for payload in [short(&[], 5), long(Type::Retry, 1, &[7; 8], &[], &[], 1200)] {
                let frame = to_server(from, payload);
                let mut watched = frame.clone();
                watched.destination.set_port(PORT + 1);
                all.extend([frame.bytes(), watched.bytes()]);
            }
        }
        all
    };
    let rules = |rules: &[Rule]| Trace { rules: rules.to_vec(), ..everything() };
    let scopes = |names: &[&str]| Trace {
        scopes: names.iter().map(|name| (*name).to_owned()).collect(),
        ..everything()
    };
    for (what, want) in [
        (everything(), 12),
        (of("192.0.2.7"), 4),
        (of("192.0.0.0/16"), 4),
        (of("0.0.0.0/0"), 8),
        (of("::/0"), 4),
        (of("2001:db8::/32"), 4),
        (of("2001:db9::/32"), 0),
        (rules(&[Rule::Short]), 6),
        (rules(&[Rule::Short, Rule::Malformed]), 12),
        (rules(&[Rule::Quota]), 0),
        (scopes(&["web"]), 6),
        (scopes(&["web", "watched"]), 12),
        (scopes(&["interface"]), 0),
        (Trace { rules: vec![Rule::Malformed], scopes: vec!["watched".into()], ..of("192.0.2.7") }, 1),
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
    for per_second in [0, Trace::PER_SECOND_MAX + 1] {
        assert!(gate.trace(&Trace { per_second, ..everything() }).is_err());
    }
}

/// Several at once, each for itself; the bound holds, and whoever goes makes room and leaves nothing behind.
#[test]
fn tracers_come_and_go() {
    if !root("tracers_come_and_go") {
        return;
    }
    let gate = gate(policy());
    let mut tracers: Vec<_> = (0..Trace::TRACERS).map(|_| gate.trace(&everything()).expect("room")).collect();
    let full = gate.trace(&everything()).err().expect("no room").to_string();
    assert!(full.contains("8 follow already"), "{full}");
    send(&gate, FLOODING, 1);
    assert!(tracers.iter().all(|tracer| take(tracer).samples.len() == 1));
    // What is on its way to one that goes is not the next one's.
    send(&gate, FLOODING, 1);
    drop(tracers.remove(3));
    let other = gate.trace(&of("198.51.100.0/24")).expect("room again");
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

/// A scope that is gone gives its place to others: who followed it is not shown theirs.
#[test]
fn a_scope_that_is_gone_is_not_another_one() {
    if !root("a_scope_that_is_gone_is_not_another_one") {
        return;
    }
    let gate = gate(policy());
    let tracer = gate.trace(&Trace { scopes: vec!["web".into()], ..everything() }).expect("a tracer");
    for n in 0..70 {
        let scope = crate::scope(&format!("other{n}"), PORT, policy());
        gate.apply(&Rules { scopes: vec![scope], ..Rules::default() }).expect("rules");
    }
    send(&gate, FLOODING, 1);
    assert_eq!(tracer.take().expect_err("gone").to_string(), "the scope is gone");
}

#[test]
fn kinds_of_packets() {
    if !root("kinds_of_packets") {
        return;
    }
    let id = [0x1d; 8];
    let all = [Rule::Block, Rule::Short, Rule::Malformed, Rule::Version, Rule::ClientPackets];
    let none = Rate { amount: 1, per: Duration::from_secs(1000), burst: 1 };
    let gate = gate(Policy {
        modes: enforce(&all).with(Rule::Quota, Mode::Off),
        client_rates: Rates { packets: Some(none), ..Rates::default() },
        ..Policy::default()
    });
    gate.run(&to_server(QUIET, short(&id, 100)).bytes()).expect("uses the rate up");
    let tracer = gate.trace(&everything()).expect("a tracer");
    let version = VERSIONS[0];
    for (payload, rule, want, with_id) in [
        (short(&id, 100), Rule::ClientPackets, Some(Kind::Short), false),
        (initial(version, &id, &[], &[]), Rule::ClientPackets, Some(Kind::Initial), true),
        (long(Type::ZeroRtt, version, &id, &[], &[], 1200), Rule::ClientPackets, Some(Kind::ZeroRtt), true),
        (
            long(Type::Handshake, version, &id, &[], &[], 1200),
            Rule::ClientPackets,
            Some(Kind::Handshake),
            true,
        ),
        (long_start(0xc0, 0xbaba_baba, &id, &[]), Rule::Version, Some(Kind::OtherVersion), true),
        (long(Type::Retry, version, &id, &[], &[], 1200), Rule::Malformed, Some(Kind::Impossible), true),
        (vec![], Rule::Short, None, false),
    ] {
        gate.run(&to_server(QUIET, payload).bytes()).expect("a run");
        let samples = take(&tracer).samples;
        let [sample] = samples.as_slice() else { panic!("{want:?}: {samples:?}") };
        assert_eq!((sample.reason, sample.kind), (crate::refused(rule), want));
        assert_eq!(sample.id == id, with_id, "{want:?}");
    }
}
