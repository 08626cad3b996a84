//! Rules: what is accepted, and how they change.

use std::net::IpAddr;
use std::time::Duration;

use millrace_gate::kernel::rules::{Mode, Scope};
use millrace_gate::kernel::{
    Action, Counting, Entry, Gate, Live, Pass, Place, Policy, Rate, Rates, Reason, Rule, Rules,
};
use millrace_kernel::prefix::Prefix;

use crate::frame::{initial, short};
use crate::{apply, config, enforce, gate, judge, passed, reason, refused, root, scope, to_server};

const V4: &str = "192.0.2.7:40000";
const V6: &str = "[2001:db8::7]:40000";
const NEW: Reason = passed(Pass::New);
const BLOCKED: Reason = refused(Rule::Block);
const ALLOWED: Reason = passed(Pass::Allowed);

fn prefix(text: &str) -> Prefix {
    text.parse().expect("a prefix")
}

fn open(gate: &Gate, from: &str) -> Reason {
    reason(gate, &to_server(from, initial(1, &[1; 8], &[], &[])))
}

#[test]
fn lists() {
    if !root("lists") {
        return;
    }
    let gate = Gate::load(&config()).expect("a gate");
    let mut web = scope("web", 443, Policy { modes: enforce(&[Rule::SourcePort]), ..Policy::default() });
    web.prefixes = vec![
        (prefix("192.0.2.0/24"), Entry::Allow),
        (prefix("203.0.113.0/24"), Entry::Block),
        (prefix("192.0.2.10"), Entry::Block),
        (prefix("192.0.2.10"), Entry::Allow),
        (prefix("192.0.2.11"), Entry::Allow),
    ];
    let rules = Rules {
        scopes: vec![web, scope("other", 444, Policy::default())],
        prefixes: vec![
            (prefix("192.0.0.0/16"), Entry::Block),
            (prefix("192.0.2.0/24"), Entry::Allow),
            (prefix("192.0.2.9"), Entry::Block),
            (prefix("203.0.113.9"), Entry::Allow),
            (prefix("2001:db8::/32"), Entry::Block),
            (prefix("2001:db8:1::/48"), Entry::Allow),
        ],
        ..Rules::default()
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
    // What no server wants is refused from everybody.
    assert_eq!(reason(&gate, &to_server("192.0.2.7:5", short(&[], 5))), refused(Rule::Short));
    // The other scope has no list of its own.
    let mut frame = to_server("192.0.2.7:5", initial(1, &[1; 8], &[], &[]));
    frame.destination.set_port(444);
    assert_eq!(judge(&gate, &frame.bytes()), (Some(("other".to_owned(), ALLOWED)), Action::Pass));
    frame.source.set_ip("192.0.3.7".parse().expect("an address"));
    assert_eq!(judge(&gate, &frame.bytes()), (Some(("other".to_owned(), BLOCKED)), Action::Drop));
    // All of one family, and none of the other.
    gate.list(None, prefix("::/0"), Entry::Block).expect("a block");
    assert_eq!(open(&gate, "[2001:db9::1]:5"), BLOCKED);
    assert_eq!(open(&gate, "10.0.0.1:5"), NEW);
}

/// What is listed at run time outlives the rules, goes before them, and leaves no trace when it is taken back.
#[test]
fn lists_at_run_time() {
    if !root("lists_at_run_time") {
        return;
    }
    let gate = gate(Policy::default());
    let host = prefix("192.0.2.7");
    let rules = |entries: &[(Prefix, Entry)]| {
        let mut web = scope("web", 443, Policy::default());
        web.prefixes = entries.to_vec();
        Rules { scopes: vec![web], ..Rules::default() }
    };
    assert_eq!(open(&gate, V4), NEW);
    gate.list(Some("web"), host, Entry::Block).expect("a block");
    assert_eq!(open(&gate, V4), BLOCKED);
    gate.apply(&rules(&[(host, Entry::Allow)])).expect("rules");
    assert_eq!(open(&gate, V4), BLOCKED);
    assert_eq!(gate.listed(), [(Some("web".to_owned()), host, Entry::Block)]);
    gate.unlist(Some("web"), host).expect("no block");
    assert_eq!(open(&gate, V4), ALLOWED);
    gate.apply(&rules(&[])).expect("rules");
    assert_eq!((open(&gate, V4), gate.listed()), (NEW, vec![]));
    gate.unlist(Some("web"), host).expect("nothing to do");
    assert!(gate.list(Some("nobody"), host, Entry::Block).is_err());
    assert_eq!(open(&gate, V4), NEW);
}

/// A block for all is one for a scope that allows a shorter prefix, or the same; what it does not reach is told.
#[test]
fn a_block_counts_in_every_scope_and_exceptions_are_told() {
    if !root("a_block_counts_in_every_scope_and_exceptions_are_told") {
        return;
    }
    let gate = gate(Policy::default());
    let mut web = scope("web", 443, Policy::default());
    web.prefixes = ["192.0.0.0/16", "192.0.2.8", "198.51.100.1"].map(|it| (prefix(it), Entry::Allow)).into();
    let rules = Rules { scopes: vec![web, scope("other", 444, Policy::default())], ..Rules::default() };
    gate.apply(&rules).expect("rules");
    let exceptions =
        |scope, to: &str, entry| gate.exceptions(scope, &[prefix(to)], entry).expect("exceptions");
    assert_eq!(open(&gate, V4), ALLOWED);
    for (block, then) in [("192.0.2.7", BLOCKED), ("192.0.0.0/16", BLOCKED), ("192.0.0.0/8", ALLOWED)] {
        gate.list(None, prefix(block), Entry::Block).expect("a block");
        assert_eq!(open(&gate, V4), then, "{block}");
        gate.unlist(None, prefix(block)).expect("no block");
    }
    let (web, all) = (Some("web".to_owned()), None);
    let host = (web.clone(), prefix("192.0.2.8"), Entry::Allow);
    assert_eq!(exceptions(None, "192.0.2.0/24", Entry::Block), [host]);
    assert_eq!(exceptions(Some("web"), "192.0.2.0/24", Entry::Block).len(), 1);
    assert_eq!(exceptions(Some("other"), "192.0.2.0/24", Entry::Block), []);
    assert_eq!(exceptions(None, "192.0.2.8", Entry::Block), [], "a block wins");
    assert_eq!(exceptions(None, "192.0.2.0/24", Entry::Allow), []);
    gate.list(None, prefix("203.0.113.7"), Entry::Block).expect("a block");
    let blocked = (all, prefix("203.0.113.7"), Entry::Block);
    assert_eq!(exceptions(Some("web"), "203.0.113.7", Entry::Allow), std::slice::from_ref(&blocked));
    assert_eq!(exceptions(Some("web"), "203.0.113.0/24", Entry::Allow), [blocked]);
    assert!(gate.exceptions(Some("nobody"), &[prefix("::/0")], Entry::Block).is_err());
}

/// Rules that make no sense, or do not fit, change nothing.
#[test]
fn all_or_nothing() {
    if !root("all_or_nothing") {
        return;
    }
    let gate = gate(Policy { modes: enforce(&[Rule::Quota]), quota: Some(0), ..Policy::default() });
    let before = gate.rules();
    let with = |policy: Policy| Rules { scopes: vec![scope("web", 443, policy)], ..Rules::default() };
    let on = |rule| enforce(&[rule]);
    let rates = |rate| Rates { packets: Some(rate), ..Rates::default() };
    let second = Duration::from_secs(1);
    let wide =
        Scope { places: vec![Place { address: None, port: None }], ..scope("any", 1, Policy::default()) };
    let many: Vec<_> = (0..200).map(|n| (Prefix::from(IpAddr::from([10, 0, 0, n])), Entry::Block)).collect();
    for (rules, error) in [
        (
            with(Policy { modes: on(Rule::Quota), ..Policy::default() }),
            "rule quota is on, but the quota is not set",
        ),
        (with(Policy { modes: on(Rule::ClientBytes), ..Policy::default() }), "rule client_bytes is on"),
        (with(Policy { modes: on(Rule::UnknownId), ..Policy::default() }), "needs published connection IDs"),
        (with(Policy { live: Live::Published { id_len: 21 }, ..Policy::default() }), "1 to 20 bytes"),
        (
            with(Policy { live: Live::Published { id_len: 8 }, ..Policy::default() }),
            "only counts connections that it tracks",
        ),
        (with(Policy { live: Live::Unknown, ..Policy::default() }), "only counts connections that it tracks"),
        (
            with(Policy {
                live: Live::Unknown,
                counting: Counting::Application,
                modes: on(Rule::ClientPackets),
                ..Policy::default()
            }),
            "need live connections to be known",
        ),
        (with(Policy { live: Live::Tracked { idle: Duration::ZERO }, ..Policy::default() }), "idle time"),
        (with(Policy { versions: vec![1; 5], ..Policy::default() }), "more than 4 versions"),
        (with(Policy { reflectors: vec![1; 33], ..Policy::default() }), "more than 32 reflectors"),
        (with(Policy { client_rates: rates(Rate::per_second(0, 1)), ..Policy::default() }), "rate of zero"),
        (
            with(Policy {
                client_rates: rates(Rate { amount: 1, per: 2000 * second, burst: 1 }),
                ..Policy::default()
            }),
            "18 minutes",
        ),
        (
            Rules {
                scopes: vec![scope("a", 1, Policy::default()), scope("b", 1, Policy::default())],
                ..Rules::default()
            },
            "a and b",
        ),
        (
            Rules {
                scopes: vec![scope("a", 1, Policy::default()), scope("a", 2, Policy::default())],
                ..Rules::default()
            },
            "\"a\"",
        ),
        (
            Rules { scopes: vec![scope("interface", 1, Policy::default())], ..Rules::default() },
            "\"interface\"",
        ),
        (Rules { scopes: vec![wide], ..Rules::default() }, "found by nothing"),
        (Rules { scopes: vec![scope("web", 0, Policy::default())], ..Rules::default() }, "port 0"),
        (
            Rules {
                scopes: (0..64).map(|n| scope(&n.to_string(), n + 1, Policy::default())).collect(),
                ..Rules::default()
            },
            "more than 63 scopes",
        ),
        (Rules { prefixes: many, ..with(Policy::default()) }, "cannot change prefixes"),
    ] {
        let said = gate.apply(&rules).expect_err(error).to_string();
        assert!(said.contains(error), "{said}: {error}");
        assert_eq!(gate.rules(), before);
        assert_eq!(open(&gate, V4), refused(Rule::Quota), "{error}");
    }
    apply(&gate, Policy::default());
    assert_eq!(open(&gate, V4), NEW);
    gate.apply(&Rules::default()).expect("no scopes");
    let (verdict, action) = judge(&gate, &to_server(V4, initial(1, &[1; 8], &[], &[])).bytes());
    assert_eq!((verdict, action), (Some(("interface".to_owned(), passed(Pass::Other))), Action::Pass));
}

/// Names come and go without end. What keeps its name keeps its state; a new one has nothing of who had its place, and
/// nobody's handle reaches another's.
#[test]
fn names_are_given_up_for_others() {
    if !root("names_are_given_up_for_others") {
        return;
    }
    let gate = Gate::load(&config()).expect("a gate");
    let published = Policy {
        modes: enforce(&[Rule::Quota]),
        quota: Some(1),
        live: Live::Published { id_len: 8 },
        counting: Counting::Application,
        ..Policy::default()
    };
    let client = V4.parse::<std::net::SocketAddr>().expect("an address").ip();
    let apply = |n: u32| {
        let scopes =
            vec![scope("kept", 444, published.clone()), scope(&n.to_string(), 443, published.clone())];
        gate.apply(&Rules { scopes, ..Rules::default() }).unwrap_or_else(|error| panic!("{n}: {error}"));
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

    // All at once others: there is room for both or an error, which changes nothing.
    let many = |prefix: &str, count: u16| Rules {
        scopes: (1..=count).map(|n| scope(&format!("{prefix}{n}"), n, published.clone())).collect(),
        ..Rules::default()
    };
    gate.apply(&many("a", 40)).expect("forty");
    let error = gate.apply(&many("b", 40)).expect_err("forty others").to_string();
    assert!(error.contains("no room for more scopes while"), "{error}");
    assert_eq!(gate.rules().scopes.len(), 40);
    gate.apply(&many("a", 10)).expect("ten");
    gate.apply(&many("b", 40)).expect("forty others");
}

/// Rules change a thousand times while packets of a live connection and of a blocked client arrive: each is judged by
/// one set of rules, and no half of one.
#[test]
fn changes_under_load() {
    if !root("changes_under_load") {
        return;
    }
    let gate = Gate::load(&config()).expect("a gate");
    let id = [7; 8];
    let rules = |n: u32| {
        let live = Live::Published { id_len: 8 };
        let policy = Policy {
            live,
            counting: Counting::Application,
            modes: enforce(&[Rule::UnknownId]),
            ..Policy::default()
        };
        let mut web = scope("web", 443, policy);
        // By address or by port, blocked one by one or all at once; always one of them.
        let address = [None, Some("198.51.100.1".parse().expect("an address"))];
        web.places = vec![Place { address: address[n as usize % 2], port: Some(443) }];
        let blocked = ["203.0.113.0/24", "203.0.113.5"];
        web.prefixes = vec![(prefix(blocked[n as usize / 2 % 2]), Entry::Block)];
        Rules { scopes: vec![web], ..Rules::default() }
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
                assert_eq!(gate.run(&live).expect("a run"), Action::Pass);
                assert_eq!(gate.run(&blocked).expect("a run"), Action::Drop);
                assert_eq!(gate.run(&unknown).expect("a run"), Action::Drop);
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
fn tables_say_how_full_they_are() {
    if !root("tables_say_how_full_they_are") {
        return;
    }
    let policy =
        Policy { live: Live::Published { id_len: 8 }, counting: Counting::Application, ..Policy::default() };
    let gate = gate(policy);
    let web = gate.scope("web").expect("a scope");
    for n in 0..3 {
        web.publish(&[n; 8]).expect("an ID");
    }
    // Two clients, and the network that they are in.
    for client in ["192.0.2.7", "192.0.2.8"] {
        web.inc(client.parse().expect("an address")).expect("inc");
    }
    gate.list(None, prefix("10.0.0.0/8"), Entry::Block).expect("a block");
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
fn samples() {
    if !root("samples") {
        return;
    }
    let gate = gate(Policy {
        modes: enforce(&[Rule::Quota]).with(Rule::SourcePort, Mode::Monitor),
        quota: Some(0),
        ..Policy::default()
    });
    let mut frame = to_server(V6, initial(1, &[1, 2, 3], &[], &[]));
    frame.source.set_port(53);
    for _ in 0..3 {
        assert_eq!(reason(&gate, &frame), refused(Rule::Quota));
    }
    let samples = gate.drain_samples().expect("samples");
    // Ten each second at most: not all three.
    assert_eq!(samples.len(), 1);
    let sample = &samples[0];
    assert_eq!((sample.scope.as_str(), sample.reason), ("web", refused(Rule::Quota)));
    assert_eq!(sample.monitored, [Rule::SourcePort]);
    assert_eq!((sample.source, sample.destination), (frame.source, frame.destination));
    assert_eq!((sample.bytes, sample.version, sample.id.as_slice()), (1200, Some(1), &[1, 2, 3][..]));
    assert!(gate.drain_samples().expect("samples").is_empty());
}
