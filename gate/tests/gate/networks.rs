//! Tests of the limits on clients and on the networks (shorter prefixes) that contain them: quotas, rates and map
//! entries. The BPF program's decisions are compared with `millrace_base::networks`.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::{Duration, Instant};

use millrace_base::networks::{NetworkFull, NetworkPlaces, levels};
use millrace_gate::kernel::{
    Config, Event, FrameAction, GateReason, LiveRule, LoadedGate, Pass, PolicyRules, Rates, Rule,
};
use millrace_testkit::wait_until;

use crate::frame::{LongPacketType, long, short};
use crate::state::{
    LIVE, NEW, SERVER_ID, UNKNOWN, V4, V6, answer, burst, handshake, open, published, spoofed, tracked,
};
use crate::{apply, config, enforce, gate, passed, reason, refused, root, to_server};

fn from(address: IpAddr) -> String {
    std::net::SocketAddr::new(address, 4000).to_string()
}

fn address(from: &str) -> IpAddr {
    to_server(from, vec![]).source.ip()
}

/// Returns an address in the nth /64 of a /48.
fn of_site(n: u32) -> IpAddr {
    Ipv6Addr::from_bits(0x2001_0db8_0007_u128 << 80 | u128::from(n & 0xffff) << 64 | 1).into()
}

/// Returns settings of a gate whose maps have room for all connections that these tests open from a /48.
fn roomy() -> Config {
    Config { max_clients: 1024, max_handshakes: 1024, max_rates: 4096, samples_per_second: 0, ..config() }
}

#[test]
fn gates_default_prefix_lengths_of_networks_equal_those_of_the_daemons() {
    let Config { client_prefix_v4, client_prefix_v6, network_times, .. } = Config::default();
    for (prefixes, at) in [(client_prefix_v4, V4), (client_prefix_v6, V6)] {
        let times = [1].into_iter().chain(network_times.map(|times| times as usize));
        let want: Vec<_> = levels(address(at)).map(|(network, times)| (network.length, times)).collect();
        assert_eq!(prefixes.into_iter().zip(times).collect::<Vec<_>>(), want);
    }
}

/// Lets each address connect in turn, and compares the program's decisions with those of `millrace_base::networks`.
#[test]
fn gates_connection_quotas_per_network_equal_those_of_the_daemons() {
    const QUOTA: u32 = 2;
    type Nth = fn(u32) -> IpAddr;
    if !root("gates_connection_quotas_per_network_equal_those_of_the_daemons") {
        return;
    }
    let table: [(&str, Nth, usize); 6] = [
        ("one address", |_| Ipv4Addr::new(192, 0, 2, 1).into(), 2),
        ("a /24", |n| Ipv4Addr::new(192, 0, 2, n as u8).into(), 16),
        ("many /24", |n| Ipv4Addr::new(192, 0, (n % 16) as u8, n as u8).into(), 256),
        ("a /64", |n| Ipv6Addr::from_bits(0x2001_0db8_u128 << 96 | u128::from(n)).into(), 2),
        ("a /56", |n| of_site(n & 0xff), 16),
        ("a /48", |n| of_site(n * 61), 128),
    ];
    for (whose, nth, want) in table {
        let gate = LoadedGate::load(&roomy()).expect("a gate");
        apply(&gate, PolicyRules { modes: enforce(&[Rule::Quota]), quota: Some(QUOTA), ..published() });
        let web = gate.scope("web").expect("a scope");
        let mut places = NetworkPlaces::new(usize::MAX, QUOTA as usize);
        let mut taken = Vec::new();
        for n in 0..600 {
            let at = nth(n);
            let decided = places.enter(at);
            let want = match decided {
                Ok(()) => NEW,
                Err(NetworkFull::Client(_)) => refused(Rule::Quota),
                Err(_) => refused(Rule::NetworkQuota),
            };
            assert_eq!(reason(&gate, &open(&from(at), n)), want, "{whose}, {n}");
            if decided.is_ok() {
                web.inc(at).expect("inc");
                taken.push(at);
            }
        }
        assert_eq!(taken.len(), want, "{whose}");
        assert_eq!(reason(&gate, &open("203.0.113.7:4000", 1)), NEW, "{whose}");
        let listed = gate.clients("web").expect("clients");
        assert_eq!(listed.iter().map(|client| client.connections as usize).sum::<usize>(), want, "{whose}");
        // When a connection ends, the quotas of its client and of each network that contains the client allow one more
        // connection.
        for at in &taken {
            web.dec(*at).expect("dec");
        }
        for at in taken {
            assert_eq!(reason(&gate, &open(&from(at), 1000)), NEW, "{whose}");
            web.inc(at).expect("inc");
        }
    }
}

/// Checks that the quota of a network holds for connections whose address is validated, however many Initials were
/// admitted before.
#[test]
fn network_quota_bounds_connections_with_a_validated_address() {
    if !root("network_quota_bounds_connections_with_a_validated_address") {
        return;
    }
    let gate = LoadedGate::load(&roomy()).expect("a gate");
    apply(&gate, tracked(&[Rule::Quota]));
    let id = |n: u32| [n.to_be_bytes(), [0x5e; 4]].concat();
    let client = |n: u32| format!("192.0.2.{n}:4000");
    for n in 0..20 {
        assert_eq!(reason(&gate, &open(&client(n), n)), NEW);
        answer(&gate, &client(n), 1, &id(n));
    }
    for _ in 0..2 {
        for n in 0..20 {
            let want = if n < 8 { LIVE } else { refused(Rule::NetworkQuota) };
            assert_eq!(reason(&gate, &to_server(&client(n), short(&id(n), 100))), want, "{n}");
        }
    }
    assert_eq!(reason(&gate, &open(&client(1), 30)), refused(Rule::Quota));
    assert_eq!(reason(&gate, &open(&client(30), 30)), refused(Rule::NetworkQuota));
    handshake(&gate, V6, 1, &SERVER_ID);
    // Refused connections do not count for the quota, and neither do connections that have ended.
    assert_eq!(gate.expire_after(Duration::from_secs(31)).expect("expiry"), 9);
    for n in 10..18 {
        assert_eq!(reason(&gate, &to_server(&client(n), short(&id(n), 100))), LIVE, "{n}");
    }
    assert_eq!(reason(&gate, &to_server(&client(18), short(&id(18), 100))), refused(Rule::NetworkQuota));
    let web = gate.scope("web").expect("a scope");
    assert_eq!(web.connections(address(&client(18))).expect("connections"), 0, "nor with its client");
}

/// Checks that the connections of one network take at most half of the entries of the map of live connections.
#[test]
fn one_network_takes_at_most_half_of_the_live_connection_map() {
    if !root("one_network_takes_at_most_half_of_the_live_connection_map") {
        return;
    }
    let gate = gate(tracked(&[]));
    let half = config().max_ids / 2;
    let id = |n: u32| [n.to_be_bytes(), [0x5e; 4]].concat();
    for n in 0..100 {
        let at = from(of_site(n * 600));
        answer(&gate, &at, 1, &id(n));
        let want = if n < half { LIVE } else { passed(Pass::Handshake) };
        assert_eq!(reason(&gate, &to_server(&at, short(&id(n), 100))), want, "{n}");
    }
    let event = |event| gate.statistics().expect("statistics").event(event);
    assert_eq!(event(Event::ConnectionTracked), u64::from(half));
    assert_eq!(event(Event::ConnectionsFull), u64::from(100 - half));
    handshake(&gate, V4, 1, &SERVER_ID);
}

fn rates(rule: Rule, size: u64) -> PolicyRules {
    let all = Rates { initials: burst(size), packets: burst(size), bytes: burst(size * 1200) };
    PolicyRules { modes: enforce(&[rule]), client_rates: all, ..published() }
}

/// Time at which a test's token buckets start to refill. A client's bucket gains one token in 1000 s, a network's
/// bucket a multiple of that.
struct BucketStart(Instant);

impl BucketStart {
    fn is_about(&self, passed: usize, want: usize, times: usize) -> bool {
        (want..=want + self.0.elapsed().as_secs() as usize * times / 1000).contains(&passed)
    }
}

/// Checks that a network's rates are a multiple of a client's rates. A client over its own limit must not use up its
/// network's rates.
#[test]
fn each_network_has_its_own_rate_limits() {
    if !root("each_network_has_its_own_rate_limits") {
        return;
    }
    for (of_client, of_network) in [
        (Rule::ClientInitials, Rule::NetworkInitials),
        (Rule::ClientPackets, Rule::NetworkPackets),
        (Rule::ClientBytes, Rule::NetworkBytes),
    ] {
        let gate = LoadedGate::load(&roomy()).expect("a gate");
        apply(&gate, rates(of_client, 3));
        let begin = BucketStart(Instant::now());
        let send = |at: IpAddr, n: u32| reason(&gate, &open(&from(at), n));
        let greedy: Vec<_> = (0..200).map(|n| send(of_site(0), n)).collect();
        assert_eq!(greedy.iter().filter(|it| **it == NEW).count(), 3, "{of_client:?}");
        assert_eq!(greedy.last(), Some(&refused(of_client)));
        // The limit on the /56 is 8 times 3 new connections, of which the greedy client has used 3. The limit on the
        // /48 is 64 times 3.
        let siblings = (1..0x100).filter(|n| send(of_site(*n), *n) == NEW).count();
        assert!(begin.is_about(siblings, 21, 8), "{of_client:?}: {siblings}");
        let others: Vec<_> = (1..400).map(|n| send(of_site(n * 157), n)).collect();
        assert!(others.contains(&refused(of_network)));
        let others = others.iter().filter(|it| **it == NEW).count();
        assert!(begin.is_about(siblings + others, 64 * 3 - 3, 64), "{of_client:?}: {others}");
        assert_eq!(send("2001:db8:8::1".parse().expect("an address"), 1), NEW, "{of_client:?}");
        let of_nat =
            (0..0x100).filter(|n| send(Ipv4Addr::new(192, 0, 2, *n as u8).into(), *n) == NEW).count();
        assert!(begin.is_about(of_nat, 8 * 3, 8), "{of_client:?}: {of_nat}");
    }
}

/// Checks that limits on networks (shorter prefixes than a client's) apply only if the settings name such networks.
#[test]
fn rate_limits_per_network_apply_only_to_configured_prefix_lengths() {
    if !root("rate_limits_per_network_apply_only_to_configured_prefix_lengths") {
        return;
    }
    let sizes = |v4: &[u8], v6: &[u8]| Config {
        client_prefix_v4: v4.to_vec(),
        client_prefix_v6: v6.to_vec(),
        network_times: [4, 16],
        ..roomy()
    };
    let none = sizes(&[32], &[64]);
    let other = sizes(&[24, 16], &[48, 32]);
    for (load, of_nat, of_site_all) in [(none, 200 * 3, 200 * 3), (other, 3, 3)] {
        let gate = LoadedGate::load(&load).expect("a gate");
        apply(&gate, rates(Rule::ClientInitials, 3));
        let begin = Instant::now();
        let passing = |nth: &dyn Fn(u32) -> IpAddr| {
            (0..600).filter(|n| reason(&gate, &open(&from(nth(n / 3)), *n)) == NEW).count()
        };
        assert_eq!(passing(&|n| Ipv4Addr::new(192, 0, 2, n as u8).into()), of_nat);
        assert_eq!(passing(&of_site), of_site_all);
        let wide = passing(&|n| Ipv4Addr::new(198, 51, n as u8, 1).into());
        let begin = BucketStart(begin);
        assert!(begin.is_about(wide, if of_nat == 3 { 4 * 3 } else { 200 * 3 }, 4), "{wide}");
    }
    for bad in [
        sizes(&[], &[64]),
        sizes(&[32], &[56, 64]),
        sizes(&[33], &[64]),
        Config { network_times: [8, 1], ..roomy() },
    ] {
        assert!(LoadedGate::load(&bad).is_err(), "{bad:?}");
    }
}

/// Number of entries of the map of token buckets. Only a flood from more addresses than this evicts entries.
const RATES: u32 = 1 << 14;

/// Sends Initials of new connections from an attacker's address without a pause, and returns how many pass.
fn insists(gate: &LoadedGate, attacker: &str, numbers: std::ops::Range<u32>) -> usize {
    numbers.filter(|n| gate.run(&open(attacker, *n).bytes()).expect("a run") == FrameAction::Pass).count()
}

fn flood(gate: &LoadedGate, addresses: impl Iterator<Item = String>) {
    for (at, n) in addresses.zip(0..) {
        gate.run(&open(&at, n).bytes()).expect("a run");
    }
}

/// Floods from a /48, which contains 65,536 clients. The network's limit refuses their packets before each client gets
/// an entry in the map of token buckets.
#[test]
fn flood_from_one_network_evicts_no_token_bucket_of_other_clients() {
    if !root("flood_from_one_network_evicts_no_token_bucket_of_other_clients") {
        return;
    }
    let gate =
        LoadedGate::load(&Config { max_rates: RATES, samples_per_second: 0, ..config() }).expect("a gate");
    apply(&gate, rates(Rule::ClientInitials, 50));
    let attacker = "203.0.113.66:6666";
    assert_eq!(insists(&gate, attacker, 0..60), 50);
    flood(&gate, (0..3 * RATES).map(|n| from(of_site(n * 5))));
    assert_eq!(insists(&gate, attacker, 60..120), 0, "its bucket is still there, and empty");
    assert_eq!(gate.statistics().expect("statistics").event(Event::RatesCrowded), 0);
}

/// Floods from more addresses than the map of token buckets has room for. An attacker whose entry is evicted does not
/// get full buckets again, and a new client can still open a connection.
#[test]
fn flood_that_evicts_token_buckets_does_not_refill_them() {
    if !root("flood_that_evicts_token_buckets_does_not_refill_them") {
        return;
    }
    let gate =
        LoadedGate::load(&Config { max_rates: RATES, samples_per_second: 0, ..config() }).expect("a gate");
    let limits = rates(Rule::ClientInitials, 50);
    apply(
        &gate,
        PolicyRules { client_rates: limits.client_rates, quota: None, ..tracked(&[Rule::ClientInitials]) },
    );
    let attackers: Vec<_> = (0..20).map(|n| format!("203.0.{n}.66:6666")).collect();
    for attacker in &attackers {
        assert_eq!(insists(&gate, attacker, 0..60), 50);
    }
    let mut spoofs = (0..).map(spoofed);
    for round in 1..=3 {
        flood(&gate, spoofs.by_ref().take(2 * RATES as usize));
        for attacker in &attackers {
            let passed = insists(&gate, attacker, 60 * round..60 * (round + 1));
            assert!(passed <= 2, "{attacker}: {passed} of 50 again");
        }
        let bystander = format!("198.51.{round}.7:4000");
        let id = [round as u8; 8];
        // The second half of a long ClientHello arrives in another Initial with the same connection ID.
        for _ in 0..2 {
            assert_eq!(reason(&gate, &open(&bystander, round)), NEW);
        }
        answer(&gate, &bystander, 1, &id);
        flood(&gate, spoofs.by_ref().take(1000));
        let proof = to_server(&bystander, long(LongPacketType::Handshake, 1, &id, &[2; 4], &[], 100));
        assert_eq!(reason(&gate, &proof), passed(Pass::Handshake));
        assert_eq!(reason(&gate, &to_server(&bystander, short(&id, 100))), LIVE);
    }
    assert!(gate.statistics().expect("statistics").event(Event::RatesCrowded) > 0);
}

/// Attaches a gate during a flood, when it does not know earlier connections. Until it knows all live connections,
/// their packets take nothing from the rates that the flood uses up.
#[test]
fn connections_survive_a_gate_restart_during_a_flood() {
    if !root("connections_survive_a_gate_restart_during_a_flood") {
        return;
    }
    let unknown_rates = Rates { initials: burst(3), packets: burst(3), bytes: burst(1 << 20) };
    let rules = [Rule::UnknownInitials, Rule::UnknownPackets, Rule::UnknownBytes];
    let policy = |idle| PolicyRules { live: LiveRule::Tracked { idle }, unknown_rates, ..tracked(&rules) };
    let before = to_server(V4, short(&[9; 8], 100));
    let gate = gate(policy(Duration::from_secs(3600)));
    for n in 0..20 {
        let flood = reason(&gate, &open(&spoofed(n), n));
        assert_eq!(matches!(flood, GateReason::Refused(_)), n >= 3);
        assert_eq!(reason(&gate, &before), UNKNOWN);
    }
    let idle = Duration::from_millis(100);
    let gate = crate::gate(policy(idle));
    wait_until("a refusal", || reason(&gate, &before), |reason| *reason == refused(Rule::UnknownPackets));
}
