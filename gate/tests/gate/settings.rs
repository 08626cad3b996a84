//! Tests of the rules that the gate accepts or refuses, and of changes of the rules in use.

use std::net::IpAddr;
use std::time::Duration;

use millrace_gate::kernel::rules::{RuleMode, ScopeRules};
use millrace_gate::kernel::{
    Counting, FrameAction, GateReason, GateRules, ListEntry, LiveRule, LoadedGate, Pass, PolicyRules, Rates,
    Rule, RulePlace, RuleRate,
};
use millrace_kernel::prefix::Prefix;

use crate::frame::{initial, short};
use crate::{apply, config, enforce, gate, judge, passed, reason, refused, root, scope, to_server};

const V4: &str = "192.0.2.7:40000";
const V6: &str = "[2001:db8::7]:40000";
const NEW: GateReason = passed(Pass::New);
const BLOCKED: GateReason = refused(Rule::Block);
const ALLOWED: GateReason = passed(Pass::Allowed);

fn prefix(text: &str) -> Prefix {
    text.parse().expect("a prefix")
}

fn open(gate: &LoadedGate, from: &str) -> GateReason {
    reason(gate, &to_server(from, initial(1, &[1; 8], &[], &[])))
}

#[test]
fn block_or_allow_entry_with_the_longest_prefix_decides() {
    if !root("lists") {
        return;
    }
    let gate = LoadedGate::load(&config()).expect("a gate");
    let mut web =
        scope("web", 443, PolicyRules { modes: enforce(&[Rule::SourcePort]), ..PolicyRules::default() });
    web.prefixes = vec![
        (prefix("192.0.2.0/24"), ListEntry::Allow),
        (prefix("203.0.113.0/24"), ListEntry::Block),
        (prefix("192.0.2.10"), ListEntry::Block),
        (prefix("192.0.2.10"), ListEntry::Allow),
        (prefix("192.0.2.11"), ListEntry::Allow),
    ];
    let rules = GateRules {
        scopes: vec![web, scope("other", 444, PolicyRules::default())],
        prefixes: vec![
            (prefix("192.0.0.0/16"), ListEntry::Block),
            (prefix("192.0.2.0/24"), ListEntry::Allow),
            (prefix("192.0.2.9"), ListEntry::Block),
            (prefix("203.0.113.9"), ListEntry::Allow),
            (prefix("2001:db8::/32"), ListEntry::Block),
            (prefix("2001:db8:1::/48"), ListEntry::Allow),
        ],
        ..GateRules::default()
    };
    gate.apply(&rules).expect("rules");
    for (from, want) in [
        ("192.0.2.7:5", ALLOWED),
        ("192.0.2.7:53", ALLOWED),
        ("192.0.3.7:5", BLOCKED),
        ("192.0.2.9:5", BLOCKED),
        ("192.0.2.10:5", BLOCKED),
        ("192.0.2.11:5", ALLOWED),
        ("203.0.113.9:5", ALLOWED),
        ("203.0.113.1:5", BLOCKED),
        ("10.0.0.1:5", NEW),
        ("10.0.0.1:53", refused(Rule::SourcePort)),
        ("[2001:db8::1]:5", BLOCKED),
        ("[2001:db8:1::1]:5", ALLOWED),
        ("[2001:db9::1]:5", NEW),
    ] {
        assert_eq!(open(&gate, from), want, "{from}");
    }
    // Packets too short for QUIC are refused, even from an address on the allow list.
    assert_eq!(reason(&gate, &to_server("192.0.2.7:5", short(&[], 5))), refused(Rule::Short));
    // The scope "other" has no block and allow list of its own, so only the list for all scopes applies.
    let mut frame = to_server("192.0.2.7:5", initial(1, &[1; 8], &[], &[]));
    frame.destination.set_port(444);
    assert_eq!(judge(&gate, &frame.bytes()), (Some(("other".to_owned(), ALLOWED)), FrameAction::Pass));
    frame.source.set_ip("192.0.3.7".parse().expect("an address"));
    assert_eq!(judge(&gate, &frame.bytes()), (Some(("other".to_owned(), BLOCKED)), FrameAction::Drop));
    // The list entry `::/0` matches every IPv6 address, and no IPv4 address.
    gate.list(None, prefix("::/0"), ListEntry::Block).expect("a block");
    assert_eq!(open(&gate, "[2001:db9::1]:5"), BLOCKED);
    assert_eq!(open(&gate, "10.0.0.1:5"), NEW);
}

/// Checks that a block or allow entry that is added at run time stays when the rules change. Until it is removed, it
/// replaces the rules' own entry for the same prefix.
#[test]
fn block_added_at_run_time_replaces_the_policys_entry_for_its_prefix() {
    if !root("lists_at_run_time") {
        return;
    }
    let gate = gate(PolicyRules::default());
    let host = prefix("192.0.2.7");
    let rules = |entries: &[(Prefix, ListEntry)]| {
        let mut web = scope("web", 443, PolicyRules::default());
        web.prefixes = entries.to_vec();
        GateRules { scopes: vec![web], ..GateRules::default() }
    };
    assert_eq!(open(&gate, V4), NEW);
    gate.list(Some("web"), host, ListEntry::Block).expect("a block");
    assert_eq!(open(&gate, V4), BLOCKED);
    gate.apply(&rules(&[(host, ListEntry::Allow)])).expect("rules");
    assert_eq!(open(&gate, V4), BLOCKED);
    assert_eq!(gate.listed(), [(Some("web".to_owned()), host, ListEntry::Block)]);
    gate.unlist(Some("web"), host).expect("no block");
    assert_eq!(open(&gate, V4), ALLOWED);
    gate.apply(&rules(&[])).expect("rules");
    assert_eq!((open(&gate, V4), gate.listed()), (NEW, vec![]));
    gate.unlist(Some("web"), host).expect("nothing to do");
    assert!(gate.list(Some("nobody"), host, ListEntry::Block).is_err());
    assert_eq!(open(&gate, V4), NEW);
}

/// Checks that a block for all scopes also applies in a scope that allows the same prefix or a shorter one. The call
/// that adds the block must return the entries that override the block.
#[test]
fn global_block_applies_to_every_application_and_returns_its_exceptions() {
    if !root("global_block_applies_to_every_application_and_returns_its_exceptions") {
        return;
    }
    let gate = gate(PolicyRules::default());
    let mut web = scope("web", 443, PolicyRules::default());
    web.prefixes =
        ["192.0.0.0/16", "192.0.2.8", "198.51.100.1"].map(|it| (prefix(it), ListEntry::Allow)).into();
    let rules =
        GateRules { scopes: vec![web, scope("other", 444, PolicyRules::default())], ..GateRules::default() };
    gate.apply(&rules).expect("rules");
    let exceptions =
        |scope, to: &str, entry| gate.exceptions(scope, &[prefix(to)], entry).expect("exceptions");
    assert_eq!(open(&gate, V4), ALLOWED);
    for (block, then) in [("192.0.2.7", BLOCKED), ("192.0.0.0/16", BLOCKED), ("192.0.0.0/8", ALLOWED)] {
        gate.list(None, prefix(block), ListEntry::Block).expect("a block");
        assert_eq!(open(&gate, V4), then, "{block}");
        gate.unlist(None, prefix(block)).expect("no block");
    }
    let web = Some("web".to_owned());
    let all = None;
    let host = (web.clone(), prefix("192.0.2.8"), ListEntry::Allow);
    assert_eq!(exceptions(None, "192.0.2.0/24", ListEntry::Block), [host]);
    assert_eq!(exceptions(Some("web"), "192.0.2.0/24", ListEntry::Block).len(), 1);
    assert_eq!(exceptions(Some("other"), "192.0.2.0/24", ListEntry::Block), []);
    assert_eq!(exceptions(None, "192.0.2.8", ListEntry::Block), [], "a block wins");
    assert_eq!(exceptions(None, "192.0.2.0/24", ListEntry::Allow), []);
    gate.list(None, prefix("203.0.113.7"), ListEntry::Block).expect("a block");
    let blocked = (all, prefix("203.0.113.7"), ListEntry::Block);
    assert_eq!(exceptions(Some("web"), "203.0.113.7", ListEntry::Allow), std::slice::from_ref(&blocked));
    assert_eq!(exceptions(Some("web"), "203.0.113.0/24", ListEntry::Allow), [blocked]);
    assert!(gate.exceptions(Some("nobody"), &[prefix("::/0")], ListEntry::Block).is_err());
}

/// Applies rules that contradict each other or do not fit into the BPF maps, and checks that nothing changes.
#[test]
fn invalid_gate_rules_leave_the_rules_in_force_unchanged() {
    if !root("all_or_nothing") {
        return;
    }
    let gate = gate(PolicyRules { modes: enforce(&[Rule::Quota]), quota: Some(0), ..PolicyRules::default() });
    let before = gate.rules();
    let with =
        |policy: PolicyRules| GateRules { scopes: vec![scope("web", 443, policy)], ..GateRules::default() };
    let on = |rule| enforce(&[rule]);
    let rates = |rate| Rates { packets: Some(rate), ..Rates::default() };
    let second = Duration::from_secs(1);
    let wide = ScopeRules {
        places: vec![RulePlace { address: None, port: None }],
        ..scope("any", 1, PolicyRules::default())
    };
    let many: Vec<_> =
        (0..200).map(|n| (Prefix::from(IpAddr::from([10, 0, 0, n])), ListEntry::Block)).collect();
    for (rules, error) in [
        (
            with(PolicyRules { modes: on(Rule::Quota), ..PolicyRules::default() }),
            "rule quota is on, but the quota is not set",
        ),
        (
            with(PolicyRules { modes: on(Rule::ClientBytes), ..PolicyRules::default() }),
            "rule client_bytes is on",
        ),
        (
            with(PolicyRules { modes: on(Rule::UnknownId), ..PolicyRules::default() }),
            "needs published connection IDs",
        ),
        (
            with(PolicyRules { live: LiveRule::Published { id_len: 21 }, ..PolicyRules::default() }),
            "1 to 20 bytes",
        ),
        (
            with(PolicyRules { live: LiveRule::Published { id_len: 8 }, ..PolicyRules::default() }),
            "counts only connections that it tracks",
        ),
        (
            with(PolicyRules { live: LiveRule::Unknown, ..PolicyRules::default() }),
            "counts only connections that it tracks",
        ),
        (
            with(PolicyRules {
                live: LiveRule::Unknown,
                counting: Counting::Application,
                modes: on(Rule::ClientPackets),
                ..PolicyRules::default()
            }),
            "need `live` to be tracked or published",
        ),
        (
            with(PolicyRules { live: LiveRule::Tracked { idle: Duration::ZERO }, ..PolicyRules::default() }),
            "idle time",
        ),
        (with(PolicyRules { versions: vec![1; 5], ..PolicyRules::default() }), "more than 4 versions"),
        (with(PolicyRules { reflectors: vec![1; 33], ..PolicyRules::default() }), "more than 32 reflectors"),
        (
            with(PolicyRules { client_rates: rates(RuleRate::per_second(0, 1)), ..PolicyRules::default() }),
            "rate of zero",
        ),
        (
            with(PolicyRules {
                client_rates: rates(RuleRate { amount: 1, per: 2000 * second, burst: 1 }),
                ..PolicyRules::default()
            }),
            "18 minutes",
        ),
        (
            GateRules {
                scopes: vec![scope("a", 1, PolicyRules::default()), scope("b", 1, PolicyRules::default())],
                ..GateRules::default()
            },
            "a and b",
        ),
        (
            GateRules {
                scopes: vec![scope("a", 1, PolicyRules::default()), scope("a", 2, PolicyRules::default())],
                ..GateRules::default()
            },
            "\"a\"",
        ),
        (
            GateRules { scopes: vec![scope("interface", 1, PolicyRules::default())], ..GateRules::default() },
            "\"interface\"",
        ),
        (GateRules { scopes: vec![wide], ..GateRules::default() }, "needs a port"),
        (
            GateRules { scopes: vec![scope("web", 0, PolicyRules::default())], ..GateRules::default() },
            "port 0",
        ),
        (
            GateRules {
                scopes: (0..64).map(|n| scope(&n.to_string(), n + 1, PolicyRules::default())).collect(),
                ..GateRules::default()
            },
            "more than 63 scopes",
        ),
        (GateRules { prefixes: many, ..with(PolicyRules::default()) }, "cannot change prefixes"),
    ] {
        let said = gate.apply(&rules).expect_err(error).to_string();
        assert!(said.contains(error), "{said}: {error}");
        assert_eq!(gate.rules(), before);
        assert_eq!(open(&gate, V4), refused(Rule::Quota), "{error}");
    }
    apply(&gate, PolicyRules::default());
    assert_eq!(open(&gate, V4), NEW);
    gate.apply(&GateRules::default()).expect("no scopes");
    let (verdict, action) = judge(&gate, &to_server(V4, initial(1, &[1; 8], &[], &[])).bytes());
    assert_eq!((verdict, action), (Some(("interface".to_owned(), passed(Pass::Other))), FrameAction::Pass));
}

/// Replaces guarded applications (scopes) more often than there are scope indexes. A scope that stays keeps its state.
/// A new scope gets no state of the scope that had its index before. The old scope's handle does not affect the new
/// scope.
#[test]
fn state_of_a_removed_application_is_not_inherited_by_a_new_one() {
    if !root("state_of_a_removed_application_is_not_inherited_by_a_new_one") {
        return;
    }
    let gate = LoadedGate::load(&config()).expect("a gate");
    let published = PolicyRules {
        modes: enforce(&[Rule::Quota]),
        quota: Some(1),
        live: LiveRule::Published { id_len: 8 },
        counting: Counting::Application,
        ..PolicyRules::default()
    };
    let client = V4.parse::<std::net::SocketAddr>().expect("an address").ip();
    let apply = |n: u32| {
        let scopes =
            vec![scope("kept", 444, published.clone()), scope(&n.to_string(), 443, published.clone())];
        gate.apply(&GateRules { scopes, ..GateRules::default() })
            .unwrap_or_else(|error| panic!("{n}: {error}"));
    };
    let verdict = |name: &str, payload: Vec<u8>| {
        let (verdict, _) = judge(&gate, &to_server(V4, payload).bytes());
        let (scope, reason) = verdict.expect("a verdict");
        assert_eq!(scope, name);
        reason
    };
    apply(0);
    let kept = gate.scope("kept").expect("a scope");
    kept.inc(client).expect("inc");
    kept.publish(&[9; 8]).expect("an ID");
    let mut others = Vec::new();
    for n in 0..150 {
        apply(n);
        let name = n.to_string();
        assert_eq!(verdict(&name, initial(1, &[1; 8], &[], &[])), NEW, "{n}: a count of another's");
        assert_eq!(verdict(&name, short(&[7; 8], 100)), passed(Pass::Unknown), "{n}: an ID of another's");
        let web = gate.scope(&name).expect("a scope");
        web.inc(client).expect("inc");
        web.publish(&[7; 8]).expect("an ID");
        assert_eq!(verdict(&name, initial(1, &[2; 8], &[], &[])), refused(Rule::Quota));
        assert_eq!(verdict(&name, short(&[7; 8], 100)), passed(Pass::Live));
        let counted = gate.statistics().expect("statistics").scope(&name).expect("it").clone();
        assert_eq!((counted.rule(Rule::Quota).packets, counted.pass(Pass::New).packets), (1, 1), "{n}");
        others.push(web);
    }
    let (now, before) = others.split_last().expect("scopes");
    assert!(before.iter().any(|scope| scope.dec(client).is_err()), "none was given up");
    assert_eq!(now.connections(client).expect("connections"), 1, "another's handle reached it");
    assert_eq!(kept.connections(client).expect("connections"), 1);
    let mut frame = to_server(V4, short(&[9; 8], 100));
    frame.destination.set_port(444);
    assert_eq!(judge(&gate, &frame.bytes()).0, Some(("kept".to_owned(), passed(Pass::Live))));

    // All scopes are replaced at once. The number of old and new ones together is limited; above the limit, an error
    // changes nothing.
    let many = |prefix: &str, count: u16| GateRules {
        scopes: (1..=count).map(|n| scope(&format!("{prefix}{n}"), n, published.clone())).collect(),
        ..GateRules::default()
    };
    gate.apply(&many("a", 40)).expect("forty");
    let error = gate.apply(&many("b", 40)).expect_err("forty others").to_string();
    assert!(error.contains("no room for more scopes while"), "{error}");
    assert_eq!(gate.rules().scopes.len(), 40);
    gate.apply(&many("a", 10)).expect("ten");
    gate.apply(&many("b", 40)).expect("forty others");
}

/// Changes the rules a thousand times while packets of a live connection and of a blocked client arrive. Each packet
/// must be checked against one set of rules, not against parts of two.
#[test]
fn rules_change_atomically_under_load() {
    if !root("rules_change_atomically_under_load") {
        return;
    }
    let gate = LoadedGate::load(&config()).expect("a gate");
    let id = [7; 8];
    let rules = |n: u32| {
        let live = LiveRule::Published { id_len: 8 };
        let policy = PolicyRules {
            live,
            counting: Counting::Application,
            modes: enforce(&[Rule::UnknownId]),
            ..PolicyRules::default()
        };
        let mut web = scope("web", 443, policy);
        // Successive rules differ: they match the scope with or without its address, and they block a client's address
        // or its whole /24.
        let address = [None, Some("198.51.100.1".parse().expect("an address"))];
        web.places = vec![RulePlace { address: address[n as usize % 2], port: Some(443) }];
        let blocked = ["203.0.113.0/24", "203.0.113.5"];
        web.prefixes = vec![(prefix(blocked[n as usize / 2 % 2]), ListEntry::Block)];
        GateRules { scopes: vec![web], ..GateRules::default() }
    };
    gate.apply(&rules(0)).expect("rules");
    gate.scope("web").expect("a scope").publish(&id).expect("an ID");
    let done = std::sync::atomic::AtomicBool::new(false);
    let live = to_server(V4, short(&id, 100)).bytes();
    let blocked = to_server("203.0.113.5:40000", short(&id, 100)).bytes();
    let unknown = to_server(V4, short(&[8; 8], 100)).bytes();
    std::thread::scope(|threads| {
        let worker = threads.spawn(|| {
            let mut rounds = 0;
            while !done.load(std::sync::atomic::Ordering::Relaxed) {
                assert_eq!(gate.run(&live).expect("a run"), FrameAction::Pass);
                assert_eq!(gate.run(&blocked).expect("a run"), FrameAction::Drop);
                assert_eq!(gate.run(&unknown).expect("a run"), FrameAction::Drop);
                rounds += 1;
            }
            rounds
        });
        for n in 0..200 {
            gate.apply(&rules(n)).expect("rules");
        }
        done.store(true, std::sync::atomic::Ordering::Relaxed);
        assert!(worker.join().expect("no packet was misjudged") > 0);
    });
    let statistics = gate.statistics().expect("statistics");
    let web = statistics.scope("web").expect("web");
    assert_eq!(web.pass(Pass::Live).packets, web.rule(Rule::Block).packets);
    assert_eq!(web.pass(Pass::Live).packets, web.rule(Rule::UnknownId).packets);
}

#[test]
fn gate_reports_fill_levels_of_its_tables() {
    if !root("gate_reports_fill_levels_of_its_tables") {
        return;
    }
    let policy = PolicyRules {
        live: LiveRule::Published { id_len: 8 },
        counting: Counting::Application,
        ..PolicyRules::default()
    };
    let gate = gate(policy);
    let web = gate.scope("web").expect("a scope");
    for n in 0..3 {
        web.publish(&[n; 8]).expect("an ID");
    }
    // Each of the two clients has an entry in the table `clients`, and so has the network that contains both.
    for client in ["192.0.2.7", "192.0.2.8"] {
        web.inc(client.parse().expect("an address")).expect("inc");
    }
    gate.list(None, prefix("10.0.0.0/8"), ListEntry::Block).expect("a block");
    gate.maintain().expect("upkeep");
    let said: Vec<_> = gate.tables().iter().map(|it| (it.name, it.entries, it.room)).collect();
    let want = [
        ("connections", 3, 64),
        ("paths", 0, 64),
        ("clients", 3, 3 * 64),
        ("handshakes", 0, 64),
        ("openings", 0, 64),
        ("prefixes", 1, 64),
    ];
    assert_eq!(said, want);
}

#[test]
fn logged_refused_packets_are_limited_per_guarded_application() {
    if !root("samples") {
        return;
    }
    let gate = gate(PolicyRules {
        modes: enforce(&[Rule::Quota]).with(Rule::SourcePort, RuleMode::Monitor),
        quota: Some(0),
        ..PolicyRules::default()
    });
    let mut frame = to_server(V6, initial(1, &[1, 2, 3], &[], &[]));
    frame.source.set_port(53);
    for _ in 0..3 {
        assert_eq!(reason(&gate, &frame), refused(Rule::Quota));
    }
    let samples = gate.drain_samples().expect("samples");
    // The gate samples at most ten packets a second, so of these three only one.
    assert_eq!(samples.len(), 1);
    let sample = &samples[0];
    assert_eq!((sample.scope.as_str(), sample.reason), ("web", refused(Rule::Quota)));
    assert_eq!(sample.monitored, [Rule::SourcePort]);
    assert_eq!((sample.source, sample.destination), (frame.source, frame.destination));
    assert_eq!((sample.bytes, sample.version, sample.id.as_slice()), (1200, Some(1), &[1, 2, 3][..]));
    assert!(gate.drain_samples().expect("samples").is_empty());
}
