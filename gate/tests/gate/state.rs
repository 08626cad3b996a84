//! Tests of verdicts that depend on earlier packets: live connections, quotas, rates.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::time::Duration;

use millrace_gate::kernel::{
    Config, Counting, Event, FrameAction, GateReason, GateRules, LiveRule, LoadedGate, Pass, PolicyRules,
    Rates, Rule, RulePlace, RuleRate,
};
use millrace_kernel::clock::monotonic_ns;
use millrace_kernel::prefix::Prefix;
use millrace_testkit::wait_until;

use crate::frame::{LongPacketType, TestFrame, VERSIONS, initial, long, short};
use crate::{apply, config, enforce, gate, passed, reason, refused, root, scope, to_client, to_server};

pub const V4: &str = "192.0.2.7:40000";
pub const V6: &str = "[2001:db8::7]:40000";
pub const NEW: GateReason = passed(Pass::New);
pub const LIVE: GateReason = passed(Pass::Live);
pub const UNKNOWN: GateReason = passed(Pass::Unknown);
pub const SERVER_ID: [u8; 8] = [0x5e; 8];

/// Returns a rate whose token bucket does not refill while a test runs.
pub fn burst(burst: u64) -> Option<RuleRate> {
    Some(RuleRate { amount: 1, per: Duration::from_secs(1000), burst })
}

/// Returns the Initial of the nth connection from an address. Connections differ in their IDs.
pub fn open(from: &str, n: u32) -> TestFrame {
    let id = [n.to_be_bytes(), [0xc1; 4]].concat();
    to_server(from, initial(VERSIONS[n as usize % 2], &id, &[2; 4], &[]))
}

fn address(text: &str) -> IpAddr {
    text.parse().expect("an address")
}

pub fn published() -> PolicyRules {
    PolicyRules {
        live: LiveRule::Published { id_len: 8 },
        counting: Counting::Application,
        ..PolicyRules::default()
    }
}

#[test]
fn quota_bounds_connections_of_a_client() {
    if !root("quota") {
        return;
    }
    let quota = PolicyRules { modes: enforce(&[Rule::Quota]), quota: Some(2), ..published() };
    let gate = gate(quota);
    let web = gate.scope("web").expect("a scope");
    // The gate counts an IPv4 address, or all addresses of an IPv6 /64, as one client.
    for (from, sibling, other) in [
        ("192.0.2.7:1000", "192.0.2.7:2000", "192.0.2.8:1000"),
        ("[2001:db8::7]:1000", "[2001:db8::8:1]:2000", "[2001:db8:0:1::7]:1000"),
    ] {
        let client = from.parse::<std::net::SocketAddr>().expect("an address").ip();
        assert_eq!(web.inc(client).expect("inc"), 1);
        assert_eq!(reason(&gate, &open(from, 1)), NEW);
        assert_eq!(web.inc(client).expect("inc"), 2);
        assert_eq!(reason(&gate, &open(from, 2)), refused(Rule::Quota));
        assert_eq!(reason(&gate, &open(sibling, 3)), refused(Rule::Quota));
        assert_eq!(reason(&gate, &open(other, 4)), NEW);
        // A client whose first Initial was admitted may repeat it, and send the second half of its ClientHello.
        assert_eq!(reason(&gate, &open(from, 1)), NEW);
        // Packets with a published connection ID are not new connections, not even Initials.
        web.publish(&SERVER_ID).expect("an ID");
        assert_eq!(reason(&gate, &to_server(from, initial(1, &SERVER_ID, &[2; 4], &[]))), LIVE);
        assert_eq!(reason(&gate, &to_server(from, short(&SERVER_ID, 100))), LIVE);
        assert_eq!(reason(&gate, &to_server(from, short(&[9; 8], 100))), UNKNOWN);
        assert_eq!(web.dec(client).expect("dec"), 1);
        assert_eq!(reason(&gate, &open(from, 5)), NEW);
        assert_eq!(web.connections(client).expect("connections"), 1);
        assert_eq!((web.dec(client).expect("dec"), web.dec(client).expect("dec")), (0, 0));
    }
}

/// Adds and removes connections of two clients from several threads at the same time, and checks that the final counts
/// are right.
#[test]
fn connection_counting_is_atomic() {
    if !root("connection_counting_is_atomic") {
        return;
    }
    let gate = gate(published());
    let web = gate.scope("web").expect("a scope");
    let clients = [address("192.0.2.7"), address("2001:db8::7")];
    std::thread::scope(|threads| {
        for _ in 0..4 {
            let web = web.clone();
            threads.spawn(move || {
                for n in 0..2000 {
                    web.inc(clients[n % 2]).expect("inc");
                    if n % 4 < 2 {
                        web.dec(clients[n % 2]).expect("dec");
                    }
                }
            });
        }
    });
    for client in clients {
        assert_eq!(web.connections(client).expect("connections"), 4 * 500);
    }
    let mut all = gate.clients("web").expect("clients");
    all.sort_by_key(|client| client.prefix);
    let want: Vec<Prefix> = ["192.0.2.7", "2001:db8::/64"].map(|p| p.parse().expect("a prefix")).into();
    assert_eq!(all.iter().map(|client| client.prefix).collect::<Vec<_>>(), want);
    assert!(all.iter().all(|client| client.connections == 2000));
}

#[test]
fn packets_with_published_connection_ids_pass() {
    if !root("published_ids") {
        return;
    }
    let gate = gate(PolicyRules { modes: enforce(&[Rule::UnknownId]), ..published() });
    let web = gate.scope("web").expect("a scope");
    for from in [V4, V6] {
        let packet = to_server(from, short(&SERVER_ID, 100));
        assert_eq!(reason(&gate, &packet), refused(Rule::UnknownId));
        web.publish(&SERVER_ID).expect("an ID");
        assert_eq!(reason(&gate, &packet), LIVE);
        for version in VERSIONS {
            let handshake = long(LongPacketType::Handshake, version, &SERVER_ID, &[], &[], 90);
            assert_eq!(reason(&gate, &to_server(from, handshake)), LIVE);
        }
        web.retire(&SERVER_ID).expect("an ID");
        web.retire(&SERVER_ID).expect("also if it is gone");
        assert_eq!(reason(&gate, &packet), refused(Rule::UnknownId));
    }
    // A connection ID that another guarded application (scope) published is unknown for this one.
    let rules = |policy: PolicyRules| GateRules {
        scopes: vec![scope("web", 443, policy.clone()), scope("dns", 853, policy)],
        ..GateRules::default()
    };
    gate.apply(&rules(PolicyRules { modes: enforce(&[Rule::UnknownId]), ..published() })).expect("rules");
    gate.scope("dns").expect("a scope").publish(&SERVER_ID).expect("an ID");
    assert_eq!(reason(&gate, &to_server(V4, short(&SERVER_ID, 100))), refused(Rule::UnknownId));
}

/// Checks packets of 21 bytes and more, as stateless resets are (RFC 9000, section 10.3), with IDs of several lengths.
#[test]
fn stateless_resets_pass() {
    if !root("stateless_resets_pass") {
        return;
    }
    let unknown = PolicyRules { live: LiveRule::Unknown, ..published() };
    let published = |id_len| PolicyRules { live: LiveRule::Published { id_len }, ..published() };
    let strict = PolicyRules { modes: enforce(&[Rule::UnknownId]), ..published(8) };
    let nobodys = refused(Rule::UnknownId);
    for (description, policy, id_len, reset) in [
        ("IDs of no length", unknown, 0, UNKNOWN),
        ("of one byte", published(1), 1, UNKNOWN),
        ("of 8", published(8), 8, UNKNOWN),
        ("of 20", published(20), 20, UNKNOWN),
        ("of 8, and no others", strict, 8, nobodys),
    ] {
        let gate = gate(policy);
        let id = vec![0x5e; id_len];
        if id_len > 0 {
            gate.scope("web").expect("a scope").publish(&id).expect("an ID");
        }
        let live = if id_len > 0 { LIVE } else { UNKNOWN };
        for from in [V4, V6] {
            for (len, reset, live) in [
                (1, refused(Rule::Short), refused(Rule::Short)),
                (20, refused(Rule::Short), refused(Rule::Short)),
                (21, reset, live),
                (21 + id_len, reset, live),
                (42, reset, live),
            ] {
                assert_eq!(reason(&gate, &to_server(from, short(&[], len))), reset, "{description}, {len}");
                let id = &id[..id_len.min(len - 1)];
                assert_eq!(reason(&gate, &to_server(from, short(id, len))), live, "{description}, {len}");
            }
        }
    }
}

#[test]
fn publishing_a_connection_id_into_a_full_map_is_an_error() {
    if !root("publishing_a_connection_id_into_a_full_map_is_an_error") {
        return;
    }
    let gate = gate(published());
    let web = gate.scope("web").expect("a scope");
    let id = |n: u32| [n.to_be_bytes(), [7; 4]].concat();
    let fits = (0..1000).take_while(|n| web.publish(&id(*n)).is_ok()).count() as u32;
    assert_eq!(fits, config().max_ids);
    let error = web.publish(&id(1000)).expect_err("no room").to_string();
    assert_eq!(error, "the kernel's table has no room for more connection IDs");
    for n in 0..fits {
        assert_eq!(reason(&gate, &to_server(V4, short(&id(n), 100))), LIVE);
    }
    for bad in [&[][..], &[1; 21]] {
        assert!(web.publish(bad).is_err());
    }
}

pub fn tracked(rules: &[Rule]) -> PolicyRules {
    PolicyRules {
        modes: enforce(rules),
        live: LiveRule::Tracked { idle: Duration::from_secs(30) },
        quota: Some(1),
        ..PolicyRules::default()
    }
}

/// Sends the server's Initial with its connection ID.
pub fn answer(gate: &LoadedGate, to: &str, version: u32, id: &[u8]) {
    let payload = long(LongPacketType::Initial, version, &[2; 4], id, &[], 1200);
    gate.run_egress(&to_client(to, payload).bytes()).expect("watched");
}

/// Sends the packets of client and server in a handshake, up to the client's first short header.
pub fn handshake(gate: &LoadedGate, from: &str, version: u32, id: &[u8]) {
    assert_eq!(reason(gate, &to_server(from, initial(version, &[0xc0; 8], &[2; 4], &[]))), NEW);
    answer(gate, from, version, id);
    for payload in
        [initial(version, id, &[2; 4], &[]), long(LongPacketType::Handshake, version, id, &[2; 4], &[], 100)]
    {
        assert_eq!(reason(gate, &to_server(from, payload)), passed(Pass::Handshake));
    }
    assert_eq!(reason(gate, &to_server(from, short(id, 100))), LIVE);
}

#[test]
fn connection_is_live_once_its_client_answers_the_servers_handshake() {
    if !root("tracking") {
        return;
    }
    for version in VERSIONS {
        for (from, rebound, elsewhere) in
            [(V4, "192.0.2.7:40001", "192.0.2.9:40000"), (V6, "[2001:db8::7]:40001", "[2001:db8:9::7]:40000")]
        {
            let gate = gate(tracked(&[Rule::Quota]));
            let web = gate.scope("web").expect("a scope");
            let client = to_server(from, vec![]).source.ip();
            assert_eq!(reason(&gate, &to_server(from, short(&SERVER_ID, 100))), UNKNOWN);
            handshake(&gate, from, version, &SERVER_ID);
            assert_eq!(web.connections(client).expect("connections"), 1);
            assert_eq!(reason(&gate, &open(from, 9)), refused(Rule::Quota));
            // A packet with an unknown connection ID passes if it comes from the connection's address and port. A
            // packet with the connection's ID from another port moves the connection there.
            assert_eq!(reason(&gate, &to_server(from, short(&[6; 8], 100))), passed(Pass::LivePath));
            assert_eq!(reason(&gate, &to_server(rebound, short(&[6; 8], 100))), UNKNOWN);
            assert_eq!(reason(&gate, &to_server(rebound, short(&SERVER_ID, 100))), LIVE);
            assert_eq!(reason(&gate, &to_server(rebound, short(&[6; 8], 100))), passed(Pass::LivePath));
            assert_eq!(reason(&gate, &to_server(from, short(&[6; 8], 100))), UNKNOWN);
            // A client that sends the ID of the server's handshake packet is not accepted if that packet was sent to
            // another address.
            answer(&gate, from, version, &[0x77; 8]);
            assert_eq!(reason(&gate, &to_server(elsewhere, short(&[0x77; 8], 100))), UNKNOWN);
            assert_eq!(web.connections(client).expect("connections"), 1);
            let statistics = gate.statistics().expect("statistics");
            assert_eq!(statistics.event(Event::ConnectionTracked), 1);
        }
    }
}

/// Clears old keys from the Bloom filter (`gate_marks.h`) several times, and checks that the BPF program still finds
/// the entries of the maps.
#[test]
fn connections_are_found_after_old_keys_of_the_bloom_filter_are_cleared() {
    if !root("connections_are_found_after_old_keys_of_the_bloom_filter_are_cleared") {
        return;
    }
    let of_gate = gate(tracked(&[Rule::Quota]));
    let of_server = gate(PolicyRules { modes: enforce(&[Rule::UnknownId]), ..published() });
    let web = of_server.scope("web").expect("a scope");
    handshake(&of_gate, V4, VERSIONS[0], &SERVER_ID);
    answer(&of_gate, V6, VERSIONS[0], &[0x77; 8]);
    web.publish(&SERVER_ID).expect("an ID");
    for _ in 0..50 {
        of_gate.maintain().expect("maintenance");
        of_server.maintain().expect("maintenance");
        for from in [V4, V6] {
            assert_eq!(reason(&of_server, &to_server(from, short(&SERVER_ID, 100))), LIVE);
        }
        assert_eq!(reason(&of_gate, &to_server(V4, short(&SERVER_ID, 100))), LIVE);
        assert_eq!(reason(&of_gate, &to_server(V4, short(&[6; 8], 100))), passed(Pass::LivePath));
        assert_eq!(reason(&of_gate, &open(V4, 9)), refused(Rule::Quota));
        // A client whose handshake the server has answered may continue with Initials.
        let more = to_server(V6, initial(VERSIONS[0], &[0x77; 8], &[2; 4], &[]));
        assert_eq!(reason(&of_gate, &more), passed(Pass::Handshake));
    }
    web.retire(&SERVER_ID).expect("an ID");
    assert_eq!(reason(&of_server, &to_server(V4, short(&SERVER_ID, 100))), refused(Rule::UnknownId));
}

/// Checks that a client's packets alone validate no address, and that a server's short headers, Retry and Version
/// Negotiation do not either.
#[test]
fn client_packets_alone_validate_no_address() {
    if !root("client_packets_alone_validate_no_address") {
        return;
    }
    let gate = gate(tracked(&[]));
    let chosen = [0xc1; 8];
    for payload in [
        initial(1, &chosen, &[2; 4], &[]),
        long(LongPacketType::Handshake, 1, &chosen, &[2; 4], &[], 100),
        short(&chosen, 100),
    ] {
        assert!(matches!(
            reason(&gate, &to_server(V4, payload)),
            GateReason::Passed(Pass::New | Pass::Unknown)
        ));
    }
    for payload in [
        short(&chosen, 100),
        long(LongPacketType::Retry, 1, &[2; 4], &chosen, &[], 100),
        crate::frame::long_start(0xc0, 0, &[2; 4], &chosen),
        long(LongPacketType::Initial, 1, &[2; 4], &[], &[], 1200),
        vec![0xc0, 0, 0],
        vec![],
    ] {
        gate.run_egress(&to_client(V4, payload).bytes()).expect("watched");
        assert_eq!(reason(&gate, &to_server(V4, short(&chosen, 100))), UNKNOWN);
    }
    assert_eq!(gate.statistics().expect("statistics").event(Event::ConnectionTracked), 0);
}

#[test]
fn idle_connections_expire() {
    if !root("idle_connections_expire") {
        return;
    }
    let gate = gate(tracked(&[Rule::Quota]));
    let web = gate.scope("web").expect("a scope");
    let client = to_server(V4, vec![]).source.ip();
    handshake(&gate, V4, 1, &SERVER_ID);
    handshake(&gate, V6, VERSIONS[1], &[0x66; 8]);
    web.publish(&[0x99; 8]).expect("an ID");
    assert_eq!(gate.expire_after(Duration::from_secs(29)).expect("expiry"), 0);
    assert_eq!(web.connections(client).expect("connections"), 1);
    assert_eq!(reason(&gate, &open(V4, 9)), refused(Rule::Quota));
    assert_eq!(gate.expire_after(Duration::from_secs(31)).expect("expiry"), 2);
    assert_eq!(web.connections(client).expect("connections"), 0);
    assert_eq!(reason(&gate, &open(V4, 9)), NEW);
    // Published connection IDs stay live after the idle time, until the application retires them.
    assert_eq!(reason(&gate, &to_server(V4, short(&[0x99; 8], 100))), LIVE);
    // The map `handshakes` still has the ID, so the client can validate its address again.
    assert_eq!(reason(&gate, &to_server(V4, short(&[6; 8], 100))), UNKNOWN);
    assert_eq!(reason(&gate, &to_server(V4, short(&SERVER_ID, 100))), LIVE);
    assert_eq!(web.connections(client).expect("connections"), 1);
}

/// Checks for each rule that exactly as many packets as the burst pass.
#[test]
fn rate_limit_passes_exactly_as_many_packets_as_its_burst() {
    if !root("rates") {
        return;
    }
    let one_packet = open(V4, 0).payload.len() as u64;
    let all = |rates: Rates| PolicyRules {
        client_rates: rates,
        unknown_rates: rates,
        live_rates: rates,
        ..published()
    };
    for (rule, rates, each_client, initials_only) in [
        (Rule::ClientInitials, Rates { initials: burst(5), ..Rates::default() }, true, true),
        (Rule::ClientPackets, Rates { packets: burst(5), ..Rates::default() }, true, false),
        (Rule::ClientBytes, Rates { bytes: burst(5 * one_packet), ..Rates::default() }, true, false),
        (Rule::UnknownInitials, Rates { initials: burst(5), ..Rates::default() }, false, true),
        (Rule::UnknownPackets, Rates { packets: burst(5), ..Rates::default() }, false, false),
        (Rule::UnknownBytes, Rates { bytes: burst(5 * one_packet), ..Rates::default() }, false, false),
    ] {
        let gate = gate(PolicyRules { modes: enforce(&[rule]), ..all(rates) });
        let web = gate.scope("web").expect("a scope");
        web.publish(&SERVER_ID).expect("an ID");
        for (round, from) in [V4, V6].into_iter().enumerate() {
            for n in 0..8 {
                let want = if n < 5 && (each_client || round == 0) { NEW } else { refused(rule) };
                assert_eq!(reason(&gate, &open(from, n)), want, "{rule:?} {from} {n}");
                assert_eq!(reason(&gate, &to_server(from, short(&SERVER_ID, 1200))), LIVE, "{rule:?}");
            }
            let other = reason(&gate, &to_server(from, short(&[9; 8], 1200)));
            assert_eq!(other, if initials_only { UNKNOWN } else { refused(rule) }, "{rule:?}");
        }
        // The rules on unknown clients do not apply to a client that has a connection.
        web.inc(to_server(V4, vec![]).source.ip()).expect("inc");
        let want = if each_client { refused(rule) } else { NEW };
        assert_eq!(reason(&gate, &open(V4, 100)), want, "{rule:?}");
    }
}

/// Sends a ClientHello in two Initials, as with a post-quantum key share, and repeats both. Rules that limit
/// connections count the four Initials as one connection. Rules that limit packets count all four.
#[test]
fn initials_of_one_connection_are_counted_once() {
    if !root("initials_of_one_connection_are_counted_once") {
        return;
    }
    let connections = Rates { initials: burst(2), ..Rates::default() };
    for (rule, policy) in [
        (Rule::ClientInitials, PolicyRules { client_rates: connections, ..published() }),
        (Rule::UnknownInitials, PolicyRules { unknown_rates: connections, ..published() }),
    ] {
        let gate = gate(PolicyRules { modes: enforce(&[rule]), ..policy });
        for from in [V4, V6] {
            if from == V6 && rule == Rule::UnknownInitials {
                break;
            }
            for connection in 0..4 {
                let want = if connection < 2 { NEW } else { refused(rule) };
                for packet in ["first", "second", "first again", "second again"] {
                    assert_eq!(
                        reason(&gate, &open(from, connection)),
                        want,
                        "{rule:?} {connection} {packet}"
                    );
                }
            }
        }
        // The same Initial from another address begins another connection.
        let elsewhere = if rule == Rule::ClientInitials { "192.0.2.7:40001" } else { "192.0.2.99:40000" };
        assert_eq!(reason(&gate, &open(elsewhere, 0)), refused(rule), "{rule:?}");
    }
    let packets =
        PolicyRules { client_rates: Rates { packets: burst(3), ..Rates::default() }, ..published() };
    let gate = gate(PolicyRules { modes: enforce(&[Rule::ClientPackets]), ..packets });
    for n in 0..5 {
        let want = if n < 3 { NEW } else { refused(Rule::ClientPackets) };
        assert_eq!(reason(&gate, &open(V4, 0)), want, "packet {n}");
    }
}

/// Sends the same Initial 200 times. The first counts as a new connection and 32 repetitions are free; the next counts
/// as another connection.
#[test]
fn repeated_initial_counts_as_a_new_connection_after_32_repetitions() {
    if !root("repeated_initial_counts_as_a_new_connection_after_32_repetitions") {
        return;
    }
    let client_rates = Rates { initials: burst(2), ..Rates::default() };
    let gate = gate(PolicyRules { modes: enforce(&[Rule::ClientInitials]), client_rates, ..published() });
    let frame = open(V4, 0);
    let passed = (0..200).filter(|_| reason(&gate, &frame) == NEW).count();
    assert_eq!(passed, 2 * 33, "each of the two that are counted, and 32 that repeat it");
}

/// Checks that 0-RTT and Handshake packets of unknown connections count as new connections.
#[test]
fn early_data_and_handshakes_without_connection_count_as_new() {
    if !root("early_data_and_handshakes_without_connection_count_as_new") {
        return;
    }
    let initials = Rates { initials: burst(3), ..Rates::default() };
    let never =
        PolicyRules { client_rates: initials, unknown_rates: initials, quota: Some(0), ..published() };
    let stray = |kind, n: u8| to_server(V4, long(kind, 1, &[n; 8], &[], &[], 1200));
    for (rule, before) in
        [(Rule::ClientInitials, 3), (Rule::UnknownInitials, 3), (Rule::Quota, 0), (Rule::Retry, 0)]
    {
        let gate = gate(PolicyRules { modes: enforce(&[rule]), ..never.clone() });
        let web = gate.scope("web").expect("a scope");
        for n in 0..6 {
            let kind = [LongPacketType::ZeroRtt, LongPacketType::Handshake][usize::from(n) % 2];
            let want = if n < before { UNKNOWN } else { refused(rule) };
            assert_eq!(reason(&gate, &stray(kind, n)), want, "{rule:?}: {kind:?}, the {n}th");
        }
        // A packet of a live connection passes although the same client's new connections are refused.
        web.publish(&[9; 8]).expect("an ID");
        assert_eq!(reason(&gate, &stray(LongPacketType::Handshake, 9)), LIVE, "{rule:?}");
    }
    let gate = gate(PolicyRules { modes: enforce(&[Rule::UnknownId]), ..never });
    assert_eq!(reason(&gate, &stray(LongPacketType::Handshake, 1)), refused(Rule::UnknownId));
    assert_eq!(reason(&gate, &stray(LongPacketType::ZeroRtt, 1)), UNKNOWN, "it has an ID of the client's");
}

/// Checks that 0-RTT packets of a connection whose Initial was admitted do not count as another connection.
#[test]
fn early_data_belongs_to_the_connection_of_its_initial() {
    if !root("early_data_belongs_to_the_connection_of_its_initial") {
        return;
    }
    let rates = Rates { initials: burst(2), ..Rates::default() };
    let gate =
        gate(PolicyRules { modes: enforce(&[Rule::ClientInitials]), client_rates: rates, ..published() });
    let early = |from, n: u8| to_server(from, long(LongPacketType::ZeroRtt, 1, &[n; 8], &[], &[], 1200));
    assert_eq!(reason(&gate, &to_server(V4, initial(1, &[1; 8], &[], &[]))), NEW);
    for _ in 0..9 {
        assert_eq!(reason(&gate, &early(V4, 1)), UNKNOWN);
    }
    assert_eq!(reason(&gate, &early("192.0.2.7:40001", 1)), UNKNOWN, "from elsewhere it is another");
    assert_eq!(reason(&gate, &early(V4, 2)), refused(Rule::ClientInitials));
    assert_eq!(reason(&gate, &early(V4, 1)), UNKNOWN);
}

/// Checks that short headers from a reflector's port pass while they may belong to connections that began before the
/// gate was attached. A NAT may have given such a connection any port. A new connection from such a port is refused.
#[test]
fn reflector_port_rule_spares_connections_begun_before_the_gate_attached() {
    if !root("reflector_port_rule_spares_connections_begun_before_the_gate_attached") {
        return;
    }
    const PORTS: [&str; 2] = ["192.0.2.7:1900", "[2001:db8::7]:1900"];
    let stray = |from: &str| to_server(from, short(&[9; 8], 100));
    let reflected = refused(Rule::SourcePort);
    let with = |live, counting| PolicyRules { live, counting, ..PolicyRules::default() };
    let tracked = |idle| with(LiveRule::Tracked { idle }, Counting::Gate);
    for (live, counting, want) in [
        (LiveRule::Tracked { idle: Duration::from_secs(3600) }, Counting::Gate, UNKNOWN),
        (LiveRule::Unknown, Counting::Application, UNKNOWN),
        (LiveRule::Published { id_len: 8 }, Counting::Application, reflected),
    ] {
        let gate = gate(with(live, counting));
        for from in PORTS {
            assert_eq!(reason(&gate, &stray(from)), want, "{live:?}");
            assert_eq!(reason(&gate, &open(from, 1)), reflected, "{live:?}");
            let mut nobodys = stray(from);
            nobodys.source.set_port(0);
            assert_eq!(reason(&gate, &nobodys), reflected, "{live:?}: nothing comes from port 0");
        }
    }

    // The gate knows all live connections once it has been attached for as long as a connection may be idle.
    let idle = Duration::from_millis(100);
    let begin = std::time::Instant::now();
    let gate = gate(tracked(idle));
    wait_until("a refusal", || reason(&gate, &stray(PORTS[0])), |reason| *reason != UNKNOWN);
    assert!(begin.elapsed() >= idle);
    // A change of rules that does not change how connections are tracked does not restart the idle time that the gate
    // waits for. A change of the tracking does.
    apply(&gate, PolicyRules { modes: enforce(&[Rule::Options]), ..tracked(idle) });
    assert_eq!(reason(&gate, &stray(PORTS[0])), reflected);
    let mut web = scope("web", 444, tracked(Duration::from_secs(3600)));
    web.places.push(RulePlace::port(crate::PORT));
    gate.apply(&GateRules { scopes: vec![web], ..GateRules::default() }).expect("rules");
    assert_eq!(reason(&gate, &stray(PORTS[0])), UNKNOWN);
}

/// Checks that each published connection ID has its own rate limits, whatever addresses its packets come from: only the
/// application knows the ID's client.
#[test]
fn packet_and_byte_rates_limit_each_published_connection_id() {
    if !root("packet_and_byte_rates_limit_each_published_connection_id") {
        return;
    }
    for (rule, live_rates) in [
        (Rule::LivePackets, Rates { packets: burst(7), ..Rates::default() }),
        (Rule::LiveBytes, Rates { bytes: burst(7000), ..Rates::default() }),
    ] {
        let gate = gate(PolicyRules { modes: enforce(&[rule]), live_rates, ..published() });
        let web = gate.scope("web").expect("a scope");
        for (from, other, id) in [(V4, "192.0.2.9:40000", [1; 8]), (V6, "[2001:db8:9::7]:40000", [2; 8])] {
            web.publish(&id).expect("an ID");
            // Packets with unknown connection IDs take nothing from the rates of the published ID, although they have
            // the same address.
            for n in 0..20 {
                assert_eq!(reason(&gate, &open(from, n)), NEW);
            }
            for n in 0..10 {
                let want = if n < 7 { LIVE } else { refused(rule) };
                let from = if n % 2 == 0 { from } else { other };
                assert_eq!(reason(&gate, &to_server(from, short(&id, 1000))), want);
            }
        }
    }
}

/// Checks that token buckets refill as time passes.
#[test]
fn rate_buckets_refill_over_time() {
    if !root("rate_buckets_refill_over_time") {
        return;
    }
    let rate = RuleRate { amount: 20, per: Duration::from_secs(1), burst: 1 };
    let rates = Rates { initials: Some(rate), ..Rates::default() };
    let gate =
        gate(PolicyRules { modes: enforce(&[Rule::ClientInitials]), client_rates: rates, ..published() });
    let begin = std::time::Instant::now();
    let mut numbers = 0..;
    let mut passes = || numbers.next().is_some_and(|n| reason(&gate, &open(V4, n)) == NEW);
    let mut passed = 0;
    while begin.elapsed() < Duration::from_millis(300) {
        passed += u128::from(passes());
    }
    // On a busy machine, the loop above may have sent only one packet, or none.
    let go_on = || {
        passed += u128::from(passes());
        passed
    };
    let passed = wait_until("a second one", go_on, |passed| *passed >= 2);
    // The rate is 20 connections a second with a burst of 1, so one Initial passes at once, and one more every 50 ms.
    let most = begin.elapsed().as_millis() / 50 + 1;
    assert!((2..=most).contains(&passed), "{passed} of at most {most}");
}

/// Checks that a token bucket with a large burst gives the configured rate in the long run. Such a bucket is refilled
/// only once per tick of the kernel's timer.
#[test]
fn large_rate_buckets_refilled_per_tick_give_the_configured_rate() {
    const PER_SECOND: u64 = 200;
    const LENGTH_NS: u64 = 1_000_000_000;
    /// Tolerance of measured times: 10 ms for the kernel's longest timer tick, and 90 ms for pauses of a virtual
    /// machine.
    const SLACK_NS: u64 = 100_000_000;
    if !root("large_rate_buckets_refilled_per_tick_give_the_configured_rate") {
        return;
    }
    // The burst is so large that the token bucket cannot become full during the test. A full bucket gains no more
    // tokens, which would falsify the measured rate.
    let rate = RuleRate::per_second(PER_SECOND, 20 * PER_SECOND);
    let unknown_rates = Rates { initials: Some(rate), ..Rates::default() };
    let gate = gate(PolicyRules { modes: enforce(&[Rule::UnknownInitials]), unknown_rates, ..published() });
    // Each packet opens a connection of its own.
    let mut numbers = 0..;
    let mut next = || open(V4, numbers.next().expect("a number")).bytes();
    // Sends until a packet is refused. Returns the times before and after that packet, between which the token bucket
    // was empty, and the number of packets that had passed.
    let mut drain = || {
        let mut passed = 0;
        loop {
            let frame = next();
            let before = monotonic_ns();
            match gate.run(&frame).expect("a run") {
                FrameAction::Pass => passed += 1,
                _ => return (before, monotonic_ns(), passed),
            }
        }
    };
    let begin = drain();
    let mut end = begin;
    let mut passed = 0;
    while end.0.saturating_sub(begin.1) < LENGTH_NS {
        end = drain();
        passed += end.2;
    }
    let filled = |ns: u64| PER_SECOND * ns / 1_000_000_000;
    let least = filled(end.0 - begin.1 - SLACK_NS);
    let most = filled(end.1 - begin.0 + SLACK_NS);
    assert!((least..=most).contains(&passed), "{passed} of {least} to {most}");
}

/// Returns the nth forged address of an attacker, who uses each address for one packet.
pub fn spoofed(n: u32) -> String {
    let [a, b, c, d] = n.to_be_bytes();
    if n.is_multiple_of(2) {
        format!("10.{b}.{c}.{d}:4000")
    } else {
        format!("[2001:db8:{b:x}{c:02x}:{d:x}{a:x}::1]:4000")
    }
}

/// Floods with all kinds of packets, from far more addresses than any of the gate's maps has room for. Every packet of
/// every live connection must still pass as a packet of a live connection.
#[test]
fn flood_evicts_no_live_connection() {
    if !root("flood_evicts_no_live_connection") {
        return;
    }
    let rates = Rates { initials: burst(1 << 40), packets: burst(1 << 40), bytes: burst(1 << 50) };
    let every = [Rule::ClientInitials, Rule::ClientPackets, Rule::ClientBytes, Rule::Quota];
    let gate = LoadedGate::load(&Config { samples_per_second: 0, ..config() }).expect("a gate");
    let policy = PolicyRules { client_rates: rates, quota: Some(100), ..tracked(&every) };
    apply(&gate, policy);
    let web = gate.scope("web").expect("a scope");
    let live = |n: u32| (format!("203.0.113.{n}:4000"), [n as u8; 8]);
    for n in 0..20 {
        let (from, id) = live(n);
        handshake(&gate, &from, 1, &id);
        web.publish(&[0x80 + n as u8; 8]).expect("an ID");
    }
    for n in 0..3000 {
        let from = spoofed(n);
        gate.run(&open(&from, n).bytes()).expect("a run");
        // The server answers the attacker's Initial, and the attacker guesses the server's ID.
        answer(&gate, &from, 1, &[n.to_be_bytes(), [0x33; 4]].concat());
        gate.run(&to_server(&from, short(&[n.to_be_bytes(), [0x34; 4]].concat(), 100)).bytes())
            .expect("a run");
        gate.run(&to_server(&from, long(LongPacketType::Handshake, 1, &[n as u8; 8], &[], &[], 100)).bytes())
            .expect("a run");
        // The attacker forges packets with the address of a live client.
        let (victim, _) = live(n % 20);
        gate.run(&open(&victim, n).bytes()).expect("a run");
    }
    for n in 0..20 {
        let (from, id) = live(n);
        assert_eq!(reason(&gate, &to_server(&from, short(&id, 100))), LIVE);
        assert_eq!(reason(&gate, &to_server(&from, short(&[0xee; 8], 100))), passed(Pass::LivePath));
        assert_eq!(reason(&gate, &to_server(&from, short(&[0x80 + n as u8; 8], 100))), LIVE);
        assert_eq!(web.connections(to_server(&from, vec![]).source.ip()).expect("connections"), 1);
    }
}

/// Connects more clients than the gate's maps have room for. The first connections stay live. The packets of later
/// clients pass, but their connections are not counted.
#[test]
fn connections_beyond_the_capacity_of_the_map_pass_uncounted() {
    if !root("connections_beyond_the_capacity_of_the_map_pass_uncounted") {
        return;
    }
    let gate = gate(tracked(&[]));
    let client = |n: u32| (format!("203.0.{n}.113:4000"), [n as u8 + 1; 8]);
    let mut live = BTreeSet::new();
    for n in 0..100 {
        let (from, id) = client(n);
        gate.run(&open(&from, n).bytes()).expect("a run");
        answer(&gate, &from, 1, &id);
        match reason(&gate, &to_server(&from, short(&id, 100))) {
            LIVE => assert!(live.insert(n)),
            other => assert_eq!(other, passed(Pass::Handshake)),
        }
    }
    assert_eq!(live, (0..64).collect());
    for n in live {
        let (from, id) = client(n);
        assert_eq!(reason(&gate, &to_server(&from, short(&id, 100))), LIVE);
    }
    let statistics = gate.statistics().expect("statistics");
    assert_eq!(statistics.event(Event::ConnectionTracked), 64);
    assert_eq!(statistics.event(Event::ConnectionsFull), 36);
}
