//! Connections that the gate follows by itself, and what others can do to them: those who hold live connections of
//! their own, who forge addresses, and who see no answers but those that are sent to them.

use std::time::{Duration, Instant};

use millrace_gate::kernel::rules::Mode;
use millrace_gate::kernel::{Config, Counting, Event, Gate, Live, Pass, Policy, Rates, Reason, Rule};
use millrace_testkit::wait_for;

use crate::frame::{Type, initial, long, short};
use crate::state::{
    LIVE, NEW, SERVER_ID, UNKNOWN, V4, V6, answer, burst, handshake, open, published, tracked,
};
use crate::{apply, config, enforce, gate, passed, reason, refused, root, to_client, to_server};

const LIVE_PATH: Reason = passed(Pass::LivePath);
const HANDSHAKE: Reason = passed(Pass::Handshake);
/// An ID that the server issued later: encrypted.
const LATER_ID: [u8; 8] = [0x1a; 8];
const ATTACKER: &str = "203.0.113.66:6666";
const ATTACKERS_ID: [u8; 8] = [0xa7; 8];

/// With room for more handshakes at the same time.
fn roomy(policy: Policy) -> Gate {
    let gate = Gate::load(&Config { max_handshakes: 1024, ..config() }).expect("a gate");
    apply(&gate, policy);
    gate
}

/// Two clients, of whom one means harm, before a gate that knows nothing else.
fn victim_and_attacker(policy: Policy) -> Gate {
    let gate = gate(policy);
    handshake(&gate, V4, 1, &SERVER_ID);
    handshake(&gate, ATTACKER, 1, &ATTACKERS_ID);
    gate
}

fn connections(gate: &Gate, of: &str) -> u32 {
    let client = to_server(of, vec![]).source.ip();
    gate.scope("web").expect("a scope").connections(client).expect("connections")
}

fn send(gate: &Gate, from: &str, id: &[u8]) -> Reason {
    reason(gate, &to_server(from, short(id, 100)))
}

/// A client that sends so often that its connections stay live. Where this machine stands still for too long they may have
/// ended by themselves: then it is `None`, and nothing can be said.
struct Steady<'a> {
    gate: &'a Gate,
    idle: Duration,
    last: Instant,
}

impl<'a> Steady<'a> {
    /// Made before its first packet is sent.
    fn new(gate: &'a Gate, idle: Duration) -> Self {
        Self { gate, idle, last: Instant::now() }
    }

    fn expect(&mut self, id: &[u8], want: Reason) -> Option<()> {
        let now = Instant::now();
        let got = send(self.gate, V4, id);
        let is_in_time = self.last.elapsed() < self.idle / 2;
        self.last = now;
        is_in_time.then(|| assert_eq!(got, want))
    }

    /// For longer than the idle time-out. Returns how many connections have ended.
    fn for_long(&mut self, id: &[u8], want: Reason) -> Option<u64> {
        let (start, mut expired) = (Instant::now(), 0);
        while start.elapsed() < self.idle + self.idle / 2 {
            self.expect(id, want)?;
            expired += self.gate.maintain().expect("maintenance");
            if self.last.elapsed() >= self.idle / 2 {
                return None;
            }
            std::thread::sleep(Duration::from_millis(50)); // exact: paces the sender
        }
        Some(expired)
    }
}

const UNDISTURBED: &str = "a time in which this machine does not stand still";

/// The path is known for as long as the connection is, however long the first ID was enough.
#[test]
fn a_later_id_is_known_after_a_long_time() {
    if !root("a_later_id_is_known_after_a_long_time") {
        return;
    }
    let idle = Duration::from_secs(2);
    wait_for(UNDISTURBED, || {
        let gate = gate(Policy { live: Live::Tracked { idle }, ..tracked(&[]) });
        let mut client = Steady::new(&gate, idle);
        handshake(&gate, V4, 1, &SERVER_ID);
        client.for_long(&SERVER_ID, LIVE)?;
        client.expect(&LATER_ID, LIVE_PATH)?;
        assert_eq!(connections(&gate, V4), 1);
        Some(())
    });
}

/// With an ID that was issued later a connection lives on, on its path. It does not count any more: anybody can send
/// such packets, and the count would hold connections that ended long ago. Shown again, the first ID counts.
#[test]
fn what_a_later_id_keeps_alive_is_not_counted() {
    if !root("what_a_later_id_keeps_alive_is_not_counted") {
        return;
    }
    let idle = Duration::from_secs(2);
    wait_for(UNDISTURBED, || {
        let gate = gate(Policy { live: Live::Tracked { idle }, ..tracked(&[Rule::Quota]) });
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

/// Who has a live connection can send with its ID from any address that he forges. That takes nobody's path away.
#[test]
fn nobody_takes_anothers_path() {
    if !root("nobody_takes_anothers_path") {
        return;
    }
    let gate = victim_and_attacker(tracked(&[]));
    for _ in 0..3 {
        assert_eq!(send(&gate, V4, &ATTACKERS_ID), LIVE);
        assert_eq!(send(&gate, V4, &LATER_ID), LIVE_PATH);
        assert_eq!(send(&gate, ATTACKER, &ATTACKERS_ID), LIVE);
        assert_eq!(send(&gate, V4, &LATER_ID), LIVE_PATH);
    }
    // Nor does it keep his own for him: a connection has one.
    assert_eq!(send(&gate, V6, &ATTACKERS_ID), LIVE);
    assert_eq!(send(&gate, ATTACKER, &LATER_ID), UNKNOWN);
    assert_eq!((connections(&gate, V4), connections(&gate, ATTACKER)), (1, 1));
}

/// Nor can he be there first: who gets the server's answer at an address has the better claim to it, and then who has
/// had it at that client's address.
#[test]
fn nobody_takes_a_path_in_advance() {
    if !root("nobody_takes_a_path_in_advance") {
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
    // The path that the victim left is nobody's.
    assert_eq!(send(&gate, V4, &LATER_ID), UNKNOWN);
}

/// One socket with two connections: the end of one does not end the other's path.
#[test]
fn connections_of_one_socket_share_their_path() {
    if !root("connections_of_one_socket_share_their_path") {
        return;
    }
    let idle = Duration::from_secs(2);
    let other = [0x66; 8];
    wait_for(UNDISTURBED, || {
        let gate = gate(Policy { live: Live::Tracked { idle }, ..tracked(&[]) });
        let mut client = Steady::new(&gate, idle);
        handshake(&gate, V4, 1, &SERVER_ID);
        handshake(&gate, V4, 1, &other);
        assert_eq!(connections(&gate, V4), 2);
        let expired = client.for_long(&other, LIVE)?;
        assert_eq!((expired, connections(&gate, V4)), (1, 1));
        // By now a packet of the other's has made the path its own.
        client.expect(&other, LIVE)?;
        client.for_long(&LATER_ID, LIVE_PATH)?;
        Some(())
    });
}

/// A limit on live connections is the client's to whom they are, whatever addresses their packets come from.
#[test]
fn live_rates_cannot_be_evaded_or_used_up_by_forged_addresses() {
    if !root("live_rates_cannot_be_evaded_or_used_up_by_forged_addresses") {
        return;
    }
    for (rule, live_rates) in [
        (Rule::LivePackets, Rates { packets: burst(7), ..Rates::default() }),
        (Rule::LiveBytes, Rates { bytes: burst(700), ..Rates::default() }),
    ] {
        let gate = victim_and_attacker(tracked(&[]));
        apply(&gate, Policy { live_rates, ..tracked(&[rule]) });
        for n in 0..20 {
            let want = if n < 7 { LIVE } else { refused(rule) };
            assert_eq!(send(&gate, &format!("192.0.2.{}:4000{}", n + 5, n % 3), &ATTACKERS_ID), want);
        }
        assert_eq!(send(&gate, ATTACKER, &ATTACKERS_ID), refused(rule));
        // With another ID somebody else, who forges the address, has part in the path's; not in the connection's.
        for n in 0..10 {
            assert_eq!(send(&gate, V4, &LATER_ID), if n < 7 { LIVE_PATH } else { refused(rule) });
        }
        for n in 0..10 {
            assert_eq!(send(&gate, V4, &SERVER_ID), if n < 7 { LIVE } else { refused(rule) });
        }
    }
}

/// Handshakes that run at the same time: as many as the quota allows get on, once their address is proved.
#[test]
fn the_quota_bounds_parallel_openings() {
    if !root("the_quota_bounds_parallel_openings") {
        return;
    }
    for (from, other) in [(V4, V6), (V6, V4)] {
        // An answer is for Initials that open something: all that is refused here is dropped.
        let answers = [Rule::Quota].into();
        let gate = roomy(Policy { quota: Some(2), answers, ..tracked(&[Rule::Quota]) });
        let id = |n: u32| [n.to_be_bytes(), [0x5e; 4]].concat();
        // What is not proved does not count: anybody could have forged it.
        for n in 0..50 {
            assert_eq!(reason(&gate, &open(from, n)), NEW);
            answer(&gate, from, 1, &id(n));
        }
        assert_eq!(connections(&gate, from), 0);
        for n in 0..50 {
            let (handshake, live) =
                if n < 2 { (HANDSHAKE, LIVE) } else { (refused(Rule::Quota), refused(Rule::Quota)) };
            for payload in
                [initial(1, &id(n), &[2; 4], &[]), long(Type::Handshake, 1, &id(n), &[2; 4], &[], 100)]
            {
                assert_eq!(reason(&gate, &to_server(from, payload)), handshake);
            }
            assert_eq!(send(&gate, from, &id(n)), live);
        }
        assert_eq!((connections(&gate, from), connections(&gate, other)), (2, 0));
        assert_eq!(gate.statistics().expect("statistics").event(Event::ConnectionTracked), 2);
        handshake(&gate, other, 1, &SERVER_ID);
        // A connection that was live is let in again, also if the gate took it for dead.
        assert_eq!(gate.expire_after(Duration::from_secs(31)).expect("expiry"), 3);
        for n in [2, 3, 0, 1] {
            assert_eq!(send(&gate, from, &id(n)), LIVE);
        }
        assert_eq!(send(&gate, from, &id(4)), refused(Rule::Quota));
        assert_eq!(connections(&gate, from), 4);
    }
}

/// The application's count has this connection in it already, perhaps: the gate objects to Initials only.
#[test]
fn a_quota_that_the_application_counts_for_stops_no_handshake() {
    if !root("a_quota_that_the_application_counts_for_stops_no_handshake") {
        return;
    }
    let gate = gate(Policy { counting: Counting::Application, ..tracked(&[Rule::Quota]) });
    assert_eq!(reason(&gate, &open(V4, 1)), NEW);
    answer(&gate, V4, 1, &SERVER_ID);
    let web = gate.scope("web").expect("a scope");
    assert_eq!(web.inc(to_server(V4, vec![]).source.ip()).expect("inc"), 1);
    assert_eq!(send(&gate, V4, &SERVER_ID), LIVE);
    assert_eq!(reason(&gate, &open(V4, 2)), refused(Rule::Quota));
    assert_eq!(connections(&gate, V4), 1);
}

/// A quota that is only watched lets all pass, and counts them.
#[test]
fn a_quota_that_is_watched_counts_on() {
    if !root("a_quota_that_is_watched_counts_on") {
        return;
    }
    let policy = tracked(&[]);
    let gate = gate(Policy { modes: policy.modes.with(Rule::Quota, Mode::Monitor), ..policy });
    for n in 0..3u8 {
        assert_eq!(reason(&gate, &open(V4, n.into())), NEW);
        answer(&gate, V4, 1, &[n + 1; 8]);
        assert_eq!(send(&gate, V4, &[n + 1; 8]), LIVE);
    }
    assert_eq!(connections(&gate, V4), 3);
    let statistics = gate.statistics().expect("statistics");
    // Two Initials and two proofs.
    assert_eq!(statistics.scope("web").expect("a scope").rule(Rule::Quota).monitored, 4);
}

/// A handshake counts from when its address is proved, but not for long if nothing comes of it.
#[test]
fn a_handshake_that_stops_makes_room() {
    if !root("a_handshake_that_stops_makes_room") {
        return;
    }
    let gate = gate(Policy { quota: Some(2), ..tracked(&[Rule::Quota]) });
    handshake(&gate, V4, 1, &SERVER_ID);
    answer(&gate, V4, 1, &[9; 8]);
    let stopped = to_server(V4, long(Type::Handshake, 1, &[9; 8], &[2; 4], &[], 100));
    assert_eq!(reason(&gate, &stopped), HANDSHAKE);
    assert_eq!(reason(&gate, &open(V4, 1)), refused(Rule::Quota));
    assert_eq!(gate.expire_after(Duration::from_secs(9)).expect("expiry"), 0);
    assert_eq!(gate.expire_after(Duration::from_secs(11)).expect("expiry"), 1);
    assert_eq!(connections(&gate, V4), 1);
    assert_eq!(reason(&gate, &open(V4, 1)), NEW);
    assert_eq!(send(&gate, V4, &SERVER_ID), LIVE);
}

/// One client has a part of the tables, not all of them, and the others notice nothing.
#[test]
fn one_client_cannot_fill_the_tables() {
    if !root("one_client_cannot_fill_the_tables") {
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
    // A quota that is higher says that a client may have more.
    apply(&gate, Policy { quota: Some(6), ..tracked(&[Rule::Quota]) });
    for n in 100..110u8 {
        answer(&gate, ATTACKER, 1, &[n + 1; 8]);
        let want = if n < 102 { LIVE } else { refused(Rule::Quota) };
        assert_eq!(send(&gate, ATTACKER, &[n + 1; 8]), want);
    }
}

/// Several servers in one scope, or one that was upgraded: each chooses IDs of its own length.
#[test]
fn ids_of_several_lengths() {
    if !root("ids_of_several_lengths") {
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
    // Where IDs are published their length is known; nothing that a server is seen to choose counts.
    apply(&gate, Policy { modes: enforce(&[Rule::UnknownId]), ..published() });
    gate.run_egress(&to_client(V4, initial(1, &[2; 4], &[3; 6], &[])).bytes()).expect("watched");
    assert_eq!(send(&gate, V4, &[3; 6]), refused(Rule::UnknownId));
}

/// Tables are walked over in parts: none is left out when it comes to marking, nor when it comes to removing.
#[test]
fn large_tables() {
    if !root("large_tables") {
        return;
    }
    const COUNT: u32 = 40_000;
    let gate = Gate::load(&Config { samples_per_second: 0, ..Config::default() }).expect("a gate");
    // Longer than any machine takes for this.
    let idle = Duration::from_secs(3600);
    apply(&gate, Policy { live: Live::Tracked { idle }, ..tracked(&[]) });
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
