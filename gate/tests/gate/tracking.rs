//! Tests of tracked connections, and of attacks on them. Attackers have live connections of their own, or forge
//! addresses and see only packets that are sent to their own address.

use std::time::{Duration, Instant};

use millrace_gate::kernel::rules::RuleMode;
use millrace_gate::kernel::{
    Config, Counting, Event, GateReason, LiveRule, LoadedGate, Pass, PolicyRules, Rates, Rule,
};
use millrace_testkit::wait_for;

use crate::frame::{LongPacketType, initial, long, short};
use crate::state::{
    LIVE, NEW, SERVER_ID, UNKNOWN, V4, V6, answer, burst, handshake, open, published, tracked,
};
use crate::{apply, config, enforce, gate, passed, reason, refused, root, to_client, to_server};

const LIVE_PATH: GateReason = passed(Pass::LivePath);
const HANDSHAKE: GateReason = passed(Pass::Handshake);
/// A connection ID that the server issued after the handshake, in an encrypted packet that the gate cannot read.
const LATER_ID: [u8; 8] = [0x1a; 8];
const ATTACKER: &str = "203.0.113.66:6666";
const ATTACKERS_ID: [u8; 8] = [0xa7; 8];

/// Loads a gate with room for 1024 handshakes at the same time, more than the other tests need.
fn roomy(policy: PolicyRules) -> LoadedGate {
    let gate = LoadedGate::load(&Config { max_handshakes: 1024, ..config() }).expect("a gate");
    apply(&gate, policy);
    gate
}

/// Loads a gate and connects two clients through it, a victim and an attacker.
fn victim_and_attacker(policy: PolicyRules) -> LoadedGate {
    let gate = gate(policy);
    handshake(&gate, V4, 1, &SERVER_ID);
    handshake(&gate, ATTACKER, 1, &ATTACKERS_ID);
    gate
}

fn connections(gate: &LoadedGate, of: &str) -> u32 {
    let client = to_server(of, vec![]).source.ip();
    gate.scope("web").expect("a scope").connections(client).expect("connections")
}

fn send(gate: &LoadedGate, from: &str, id: &[u8]) -> GateReason {
    reason(gate, &to_server(from, short(id, 100)))
}

/// A client that sends often enough to keep its connections live. If the machine pauses for too long, the connections
/// may expire. Methods then return `None`, and the test has no result.
struct Steady<'a> {
    gate: &'a LoadedGate,
    idle: Duration,
    last: Instant,
}

impl<'a> Steady<'a> {
    /// Makes a sender. Call it before the client's first packet is sent.
    fn new(gate: &'a LoadedGate, idle: Duration) -> Self {
        Self { gate, idle, last: Instant::now() }
    }

    fn expect(&mut self, id: &[u8], want: GateReason) -> Option<()> {
        let now = Instant::now();
        let got = send(self.gate, V4, id);
        let is_in_time = self.last.elapsed() < self.idle / 2;
        self.last = now;
        is_in_time.then(|| assert_eq!(got, want))
    }

    /// Sends packets with this connection ID for longer than the idle time-out. Returns how many connections have
    /// expired.
    fn for_long(&mut self, id: &[u8], want: GateReason) -> Option<u64> {
        let start = Instant::now();
        let mut expired = 0;
        while start.elapsed() < self.idle + self.idle / 2 {
            self.expect(id, want)?;
            expired += self.gate.maintain().expect("maintenance");
            if self.last.elapsed() >= self.idle / 2 {
                return None;
            }
            // exact: this pause between two packets sets the sending rate
            std::thread::sleep(Duration::from_millis(50));
        }
        Some(expired)
    }
}

const UNDISTURBED: &str = "a time in which this machine does not stand still";

/// Checks that a packet with a connection ID issued after the handshake passes from the connection's address and port,
/// even after a long time with the first ID.
#[test]
fn unseen_connection_id_of_live_connection_passes_beyond_idle_timeout() {
    if !root("unseen_connection_id_of_live_connection_passes_beyond_idle_timeout") {
        return;
    }
    let idle = Duration::from_secs(2);
    wait_for(UNDISTURBED, || {
        let gate = gate(PolicyRules { live: LiveRule::Tracked { idle }, ..tracked(&[]) });
        let mut client = Steady::new(&gate, idle);
        handshake(&gate, V4, 1, &SERVER_ID);
        client.for_long(&SERVER_ID, LIVE)?;
        client.expect(&LATER_ID, LIVE_PATH)?;
        assert_eq!(connections(&gate, V4), 1);
        Some(())
    });
}

/// Checks that packets with connection IDs issued after the handshake keep passing from the connection's address and
/// port, but that the connection no longer counts for the quota. Anybody can forge such packets, and could otherwise
/// keep the quota full. The connection counts again when its first ID is used.
#[test]
fn connection_that_uses_only_later_ids_does_not_count_for_the_quota() {
    if !root("connection_that_uses_only_later_ids_does_not_count_for_the_quota") {
        return;
    }
    let idle = Duration::from_secs(2);
    wait_for(UNDISTURBED, || {
        let gate = gate(PolicyRules { live: LiveRule::Tracked { idle }, ..tracked(&[Rule::Quota]) });
        let mut client = Steady::new(&gate, idle);
        handshake(&gate, V4, 1, &SERVER_ID);
        assert_eq!(client.for_long(&LATER_ID, LIVE_PATH)?, 0);
        assert_eq!(connections(&gate, V4), 0);
        client.expect(&LATER_ID, LIVE_PATH)?;
        assert_eq!(reason(&gate, &open(V4, 9)), NEW);
        client.expect(&SERVER_ID, LIVE)?;
        assert_eq!(connections(&gate, V4), 1);
        assert_eq!(gate.expire_after(idle + idle).expect("expiry"), 1);
        assert_eq!(connections(&gate, V4), 0);
        assert_eq!(send(&gate, V4, &LATER_ID), UNKNOWN);
        Some(())
    });
}

/// Sends the connection ID of an attacker's live connection from a victim's address and port. Packets of the victim's
/// connection from there must still pass.
#[test]
fn packets_of_a_victim_pass_though_an_attacker_sends_from_its_address() {
    if !root("packets_of_a_victim_pass_though_an_attacker_sends_from_its_address") {
        return;
    }
    let gate = victim_and_attacker(tracked(&[]));
    for _ in 0..3 {
        assert_eq!(send(&gate, V4, &ATTACKERS_ID), LIVE);
        assert_eq!(send(&gate, V4, &LATER_ID), LIVE_PATH);
        assert_eq!(send(&gate, ATTACKER, &ATTACKERS_ID), LIVE);
        assert_eq!(send(&gate, V4, &LATER_ID), LIVE_PATH);
    }
    // Packets with unknown IDs from the attacker's old address no longer pass, since a connection has only one address
    // and port at a time.
    assert_eq!(send(&gate, V6, &ATTACKERS_ID), LIVE);
    assert_eq!(send(&gate, ATTACKER, &LATER_ID), UNKNOWN);
    assert_eq!((connections(&gate, V4), connections(&gate, ATTACKER)), (1, 1));
}

/// Lets an attacker's connection take a victim's path (address and port) before the victim connects. The victim gets
/// the path when it completes a handshake there. It also gets the path when it moves there from another port of the
/// same address.
#[test]
fn victims_packets_pass_from_an_address_that_an_attacker_used_before() {
    if !root("victims_packets_pass_from_an_address_that_an_attacker_used_before") {
        return;
    }
    let gate = gate(tracked(&[]));
    handshake(&gate, ATTACKER, 1, &ATTACKERS_ID);
    let rebound = "192.0.2.7:40001";
    for (path, prove) in [(V4, true), (rebound, false)] {
        assert_eq!(send(&gate, path, &ATTACKERS_ID), LIVE);
        assert_eq!(send(&gate, path, &LATER_ID), LIVE_PATH);
        if prove {
            handshake(&gate, path, 1, &SERVER_ID);
        } else {
            assert_eq!(send(&gate, path, &SERVER_ID), LIVE);
        }
        assert_eq!(send(&gate, ATTACKER, &ATTACKERS_ID), LIVE);
        assert_eq!(send(&gate, path, &LATER_ID), LIVE_PATH);
    }
    // No connection owns the path (address and port) that the victim has left.
    assert_eq!(send(&gate, V4, &LATER_ID), UNKNOWN);
}

/// Opens two connections on one socket, and checks that the end of one does not remove the path of the other.
#[test]
fn expired_connection_keeps_the_address_of_another_on_the_socket_known() {
    if !root("expired_connection_keeps_the_address_of_another_on_the_socket_known") {
        return;
    }
    let idle = Duration::from_secs(2);
    let other = [0x66; 8];
    wait_for(UNDISTURBED, || {
        let gate = gate(PolicyRules { live: LiveRule::Tracked { idle }, ..tracked(&[]) });
        let mut client = Steady::new(&gate, idle);
        handshake(&gate, V4, 1, &SERVER_ID);
        handshake(&gate, V4, 1, &other);
        assert_eq!(connections(&gate, V4), 2);
        let expired = client.for_long(&other, LIVE)?;
        assert_eq!((expired, connections(&gate, V4)), (1, 1));
        // The path now belongs to the other connection, because one of its packets came after the first connection had
        // expired.
        client.expect(&other, LIVE)?;
        client.for_long(&LATER_ID, LIVE_PATH)?;
        Some(())
    });
}

/// Checks that the rate limits for packets of live connections apply to the client that opened the connection, whatever
/// address a packet has.
#[test]
fn forged_addresses_neither_evade_nor_use_up_rates_of_live_connections() {
    if !root("forged_addresses_neither_evade_nor_use_up_rates_of_live_connections") {
        return;
    }
    for (rule, live_rates) in [
        (Rule::LivePackets, Rates { packets: burst(7), ..Rates::default() }),
        (Rule::LiveBytes, Rates { bytes: burst(700), ..Rates::default() }),
    ] {
        let gate = victim_and_attacker(tracked(&[]));
        apply(&gate, PolicyRules { live_rates, ..tracked(&[rule]) });
        for n in 0..20 {
            let want = if n < 7 { LIVE } else { refused(rule) };
            assert_eq!(send(&gate, &format!("192.0.2.{}:4000{}", n + 5, n % 3), &ATTACKERS_ID), want);
        }
        assert_eq!(send(&gate, ATTACKER, &ATTACKERS_ID), refused(rule));
        // An attacker that sends another ID from the client's address uses up only the rates that belong to this
        // address and port, not those of the connection.
        for n in 0..10 {
            assert_eq!(send(&gate, V4, &LATER_ID), if n < 7 { LIVE_PATH } else { refused(rule) });
        }
        for n in 0..10 {
            assert_eq!(send(&gate, V4, &SERVER_ID), if n < 7 { LIVE } else { refused(rule) });
        }
    }
}

/// Starts more handshakes at the same time than the quota allows. Only the allowed number continues once the address is
/// validated.
#[test]
fn quota_bounds_parallel_handshakes_with_a_validated_address() {
    if !root("quota_bounds_parallel_handshakes_with_a_validated_address") {
        return;
    }
    for (from, other) in [(V4, V6), (V6, V4)] {
        // Only Initials that open a connection are answered, so the packets that are refused here are dropped.
        let answers = [Rule::Quota].into();
        let gate = roomy(PolicyRules { quota: Some(2), answers, ..tracked(&[Rule::Quota]) });
        let id = |n: u32| [n.to_be_bytes(), [0x5e; 4]].concat();
        // Connections without a validated address do not count, since anybody could have forged them.
        for n in 0..50 {
            assert_eq!(reason(&gate, &open(from, n)), NEW);
            answer(&gate, from, 1, &id(n));
        }
        assert_eq!(connections(&gate, from), 0);
        for n in 0..50 {
            let (handshake, live) =
                if n < 2 { (HANDSHAKE, LIVE) } else { (refused(Rule::Quota), refused(Rule::Quota)) };
            for payload in [
                initial(1, &id(n), &[2; 4], &[]),
                long(LongPacketType::Handshake, 1, &id(n), &[2; 4], &[], 100),
            ] {
                assert_eq!(reason(&gate, &to_server(from, payload)), handshake);
            }
            assert_eq!(send(&gate, from, &id(n)), live);
        }
        assert_eq!((connections(&gate, from), connections(&gate, other)), (2, 0));
        assert_eq!(gate.statistics().expect("statistics").event(Event::ConnectionTracked), 2);
        handshake(&gate, other, 1, &SERVER_ID);
        // A connection that the gate has forgotten was live before, so its next packet passes even if the client is at
        // its quota.
        assert_eq!(gate.expire_after(Duration::from_secs(31)).expect("expiry"), 3);
        for n in [2, 3, 0, 1] {
            assert_eq!(send(&gate, from, &id(n)), LIVE);
        }
        assert_eq!(send(&gate, from, &id(4)), refused(Rule::Quota));
        assert_eq!(connections(&gate, from), 4);
    }
}

/// Checks that the gate refuses only Initials if the application counts connections: its count may already include the
/// connection that a later packet belongs to.
#[test]
fn quota_counted_by_the_application_refuses_no_handshake_packets() {
    if !root("quota_counted_by_the_application_refuses_no_handshake_packets") {
        return;
    }
    let gate = gate(PolicyRules { counting: Counting::Application, ..tracked(&[Rule::Quota]) });
    assert_eq!(reason(&gate, &open(V4, 1)), NEW);
    answer(&gate, V4, 1, &SERVER_ID);
    let web = gate.scope("web").expect("a scope");
    assert_eq!(web.inc(to_server(V4, vec![]).source.ip()).expect("inc"), 1);
    assert_eq!(send(&gate, V4, &SERVER_ID), LIVE);
    assert_eq!(reason(&gate, &open(V4, 2)), refused(Rule::Quota));
    assert_eq!(connections(&gate, V4), 1);
}

/// Checks that packets over the quota pass in mode "monitor", and that connections are still counted.
#[test]
fn quota_in_mode_monitor_passes_excess_and_counts_connections() {
    if !root("quota_in_mode_monitor_passes_excess_and_counts_connections") {
        return;
    }
    let policy = tracked(&[]);
    let gate = gate(PolicyRules { modes: policy.modes.with(Rule::Quota, RuleMode::Monitor), ..policy });
    for n in 0..3u8 {
        assert_eq!(reason(&gate, &open(V4, n.into())), NEW);
        answer(&gate, V4, 1, &[n + 1; 8]);
        assert_eq!(send(&gate, V4, &[n + 1; 8]), LIVE);
    }
    assert_eq!(connections(&gate, V4), 3);
    let statistics = gate.statistics().expect("statistics");
    // The quota is one connection, so the Initials and the validated handshakes of the second and third connection
    // exceeded it.
    assert_eq!(statistics.scope("web").expect("a scope").rule(Rule::Quota).monitored, 4);
}

/// Checks that a handshake counts once its address is validated, but is forgotten soon if it does not complete.
#[test]
fn incomplete_handshake_soon_expires_and_no_longer_counts() {
    if !root("incomplete_handshake_soon_expires_and_no_longer_counts") {
        return;
    }
    let gate = gate(PolicyRules { quota: Some(2), ..tracked(&[Rule::Quota]) });
    handshake(&gate, V4, 1, &SERVER_ID);
    answer(&gate, V4, 1, &[9; 8]);
    let stopped = to_server(V4, long(LongPacketType::Handshake, 1, &[9; 8], &[2; 4], &[], 100));
    assert_eq!(reason(&gate, &stopped), HANDSHAKE);
    assert_eq!(reason(&gate, &open(V4, 1)), refused(Rule::Quota));
    assert_eq!(gate.expire_after(Duration::from_secs(9)).expect("expiry"), 0);
    assert_eq!(gate.expire_after(Duration::from_secs(11)).expect("expiry"), 1);
    assert_eq!(connections(&gate, V4), 1);
    assert_eq!(reason(&gate, &open(V4, 1)), NEW);
    assert_eq!(send(&gate, V4, &SERVER_ID), LIVE);
}

/// Checks that the connections of one client take only a part of the entries of the gate's maps, and that other clients
/// are not affected.
#[test]
fn one_client_takes_at_most_a_sixteenth_of_the_live_connection_map() {
    if !root("one_client_takes_at_most_a_sixteenth_of_the_live_connection_map") {
        return;
    }
    let gate = roomy(tracked(&[]));
    let most = u64::from(config().max_ids / 16);
    for n in 0..100u8 {
        let from = format!("203.0.113.66:666{}", n % 10);
        answer(&gate, &from, 1, &[n + 1; 8]);
        let want = if u64::from(n) < most { LIVE } else { HANDSHAKE };
        assert_eq!(send(&gate, &from, &[n + 1; 8]), want);
    }
    assert_eq!(u64::from(connections(&gate, ATTACKER)), most);
    let statistics = gate.statistics().expect("statistics");
    assert_eq!(statistics.event(Event::ConnectionTracked), most);
    assert_eq!(statistics.event(Event::ConnectionsFull), 100 - most);
    handshake(&gate, V4, 1, &SERVER_ID);
    assert_eq!(send(&gate, V4, &LATER_ID), LIVE_PATH);
    // With a higher quota, the gate's maps may have entries for more connections of a client.
    apply(&gate, PolicyRules { quota: Some(6), ..tracked(&[Rule::Quota]) });
    for n in 100..110u8 {
        answer(&gate, ATTACKER, 1, &[n + 1; 8]);
        let want = if n < 102 { LIVE } else { refused(Rule::Quota) };
        assert_eq!(send(&gate, ATTACKER, &[n + 1; 8]), want);
    }
}

/// Uses connection IDs of several lengths for one guarded application (scope), as several servers or an upgraded server
/// may have.
#[test]
fn connection_ids_of_several_lengths_are_tracked() {
    if !root("connection_ids_of_several_lengths_are_tracked") {
        return;
    }
    let gate = roomy(tracked(&[]));
    let client = |n: usize| format!("192.0.2.{}:4000", n + 1);
    let lengths = [8, 16, 1, 20, 5, 4, 18, 12];
    for (n, len) in lengths.into_iter().enumerate() {
        handshake(&gate, &client(n), 1, &vec![0x10 + n as u8; len]);
    }
    for (n, len) in lengths.into_iter().enumerate() {
        let rebound = client(n).replace(":4000", ":4001");
        assert_eq!(send(&gate, &rebound, &vec![0x10 + n as u8; len]), LIVE, "{len}");
    }
    // With published connection IDs, the configured length decides, whatever lengths the servers' packets have.
    apply(&gate, PolicyRules { modes: enforce(&[Rule::UnknownId]), ..published() });
    gate.run_egress(&to_client(V4, initial(1, &[2; 4], &[3; 6], &[])).bytes()).expect("watched");
    assert_eq!(send(&gate, V4, &[3; 6]), refused(Rule::UnknownId));
}

/// Checks that maintenance keeps live entries and removes idle ones in all parts of a map, even if it takes several
/// runs of the BPF program.
#[test]
fn maintenance_expires_idle_entries_in_all_parts_of_a_large_map() {
    if !root("large_tables") {
        return;
    }
    const COUNT: u32 = 40_000;
    let gate = LoadedGate::load(&Config { samples_per_second: 0, ..Config::default() }).expect("a gate");
    // The idle time-out is longer than any machine takes for this test.
    let idle = Duration::from_secs(3600);
    apply(&gate, PolicyRules { live: LiveRule::Tracked { idle }, ..tracked(&[]) });
    let from = |n: u32| format!("10.{}.{}.7:4000", n >> 8, n & 0xff);
    let id = |n: u32| [n.to_be_bytes(), [0x5e; 4]].concat();
    let pass =
        |pass| gate.statistics().expect("statistics").scope("web").expect("a scope").pass(pass).packets;
    for n in 0..COUNT {
        answer(&gate, &from(n), 1, &id(n));
        gate.run(&to_server(&from(n), short(&id(n), 100)).bytes()).expect("a run");
    }
    assert_eq!(pass(Pass::Live), u64::from(COUNT));
    for _ in 0..20 {
        assert_eq!(gate.maintain().expect("maintenance"), 0);
    }
    for n in 0..COUNT {
        gate.run(&to_server(&from(n), short(&id(n), 100)).bytes()).expect("a run");
        gate.run(&to_server(&from(n), short(&LATER_ID, 100)).bytes()).expect("a run");
    }
    assert_eq!((pass(Pass::Live), pass(Pass::LivePath)), (2 * u64::from(COUNT), COUNT.into()));
    assert_eq!(gate.expire_after(idle + Duration::from_secs(1)).expect("expiry"), u64::from(COUNT));
    assert_eq!(gate.expire_after(idle + Duration::from_secs(3)).expect("expiry"), 0);
    assert_eq!(gate.clients("web").expect("clients"), []);
    gate.run(&to_server(&from(0), short(&LATER_ID, 100)).bytes()).expect("a run");
    assert_eq!(pass(Pass::LivePath), u64::from(COUNT));
}
