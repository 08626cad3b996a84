//! Tests of carriers (connections between two graft daemons, which transport tunnelled connections) over TCP and MPTCP,
//! and of changes between TCP, MPTCP and QUIC carriers. With each of them, no byte of a tunnelled connection may be
//! lost, repeated or out of order.

use std::{
    io::{ErrorKind, Read as _, Write as _},
    net::{Shutdown, SocketAddr, TcpListener, TcpStream},
    sync::atomic::AtomicBool,
    thread,
    time::{Duration, Instant},
};

use millrace_graft::status::CarrierStatus;
use millrace_graft_proto::carry::frame::{ALPN, ALPN_ASKS, CarryFrame, CarryReason, Decoder, OpenFrame};
use millrace_testkit::StopOnDrop;
use socket2::SockRef;

use crate::{
    agreement::{BEFORE, Tls, flush, keys, middlebox, pretend_at},
    carried::{
        CARRIERS, at, carrier, carry, client, connect, ended, exchange, exchange_until, read_all, server,
        slow_reader, verdict, wait_for_end, wait_for_ended, wait_for_resets, wait_for_state,
        write_before_reading,
    },
    site::{
        CLIENT, CLIENT6, GraftProcess, GraftSite, PORT, SERVER, SERVER6, inside, ip, wait_for, wait_until,
    },
};

/// Addresses of both hosts on a second link.
const SERVER2: &str = "10.97.0.1";
const CLIENT2: &str = "10.97.0.2";
/// A second address of the server on the first link.
const SERVER3: &str = "10.96.0.3";

/// Starts both daemons, and does not wait until they have a connection to each other. `carriers` is the TOML value of
/// the setting `carrier`.
fn started<'a>(site: &'a GraftSite, carriers: &str, more: &str) -> [GraftProcess<'a>; 2] {
    let known = keys(site);
    let with = |text: String| text.replace("[carry]", &format!("[carry]\ncarrier = {carriers}"));
    site.configure_on(0, &with(client(&known[1], more)));
    site.configure_on(1, &with(server(&known[0], "")));
    let far = GraftProcess::start_on(site, 1);
    [GraftProcess::start_on(site, 0), far]
}

fn warm<'a>(site: &'a GraftSite, carriers: &str, more: &str) -> [GraftProcess<'a>; 2] {
    let ends = started(site, carriers, more);
    wait_for_state(&ends[0], "warm");
    ends
}

fn wait_for_kind(daemon: &GraftProcess<'_>, kind: &str) {
    let is_used = |it: &CarrierStatus| it.carrier == kind && it.state == "warm";
    wait_until(&format!("a warm carrier by {kind}"), || carrier(daemon), is_used);
}

fn has_mptcp(test: &str) -> bool {
    let has = std::fs::read_to_string("/proc/sys/net/mptcp/enabled").is_ok_and(|text| text.trim() == "1");
    if !has {
        println!("SKIP {test}: no MPTCP");
    }
    has
}

fn both_ends_see_each_other(kind: &str) {
    let Some(site) = GraftSite::new(&format!("pool-{kind}")) else { return };
    let [near, far] = warm(&site, &format!("{kind:?}"), "pool-warm = 2");
    for (server, client) in [(SERVER, CLIENT), (SERVER6, CLIENT6)] {
        let listener = site.listen_on(at(server, PORT));
        // The daemons keep a pool of connections for tunnelled connections. The test's connections follow one another,
        // so each reuses a connection of the pool.
        for length in [3_000_000, 1, 100_000, 0, 3_000_000, 5000] {
            let (here, there, seen) = connect(&site, &listener);
            assert_eq!((seen.ip().to_string(), here.local_addr().unwrap()), (client.to_owned(), seen));
            assert_eq!(here.peer_addr().unwrap(), at(server, PORT));
            assert_eq!(there.local_addr().unwrap(), at(server, PORT));
            exchange(&here, &there, length);
            wait_for("its end", || carry(&near).connections == 0);
        }
    }
    wait_for_end(&near, &far);
    wait_for_ended([&near, &far], "done", 12);
    let here = carry(&near);
    let there = carry(&far);
    assert_eq!(here.verdicts["redirected"], 12, "{here:?}");
    let bytes = 2 * 6_105_001;
    assert_eq!((here.sent_bytes, here.received_bytes, here.kept_bytes), (bytes, bytes, 0));
    assert_eq!((there.sent_bytes, there.received_bytes, there.kept_bytes), (bytes, bytes, 0));
    let used = carrier(&near);
    assert_eq!(used.carrier, kind);
    // If each tunnelled connection had used a new connection of the pool, the pool would have more than four
    // connections.
    assert!(used.pool_idle + used.pool_busy <= 4, "{used:?}");
    assert!(near.succeed(&["why", SERVER]).contains(&format!("carried by server, {kind} to {SERVER}")));
    let status = || near.succeed(&["status"]);
    wait_until("all pooled connections to be idle", status, |text| text.contains("wait, 0 carry"));
}

#[test]
fn tcp_carrier_delivers_all_bytes_and_true_addresses() {
    both_ends_see_each_other("tcp");
}

#[test]
fn mptcp_carrier_delivers_all_bytes_and_true_addresses() {
    if has_mptcp("mptcp_carrier_delivers_all_bytes_and_true_addresses") {
        both_ends_see_each_other("mptcp");
    }
}

/// A pooled connection that was reset is not used again, and later connections get all their bytes.
#[test]
fn tcp_reset_is_a_reset_at_the_other_end() {
    let Some(site) = GraftSite::new("pool-reset") else { return };
    let [near, far] = warm(&site, "\"tcp\"", "");
    let listener = site.listen();
    for number in 0..6 {
        let (mut here, mut there, _) = connect(&site, &listener);
        here.write_all(b"before").unwrap();
        there.read_exact(&mut [0; 6]).unwrap();
        there.write_all(b"before").unwrap();
        here.read_exact(&mut [0; 6]).unwrap();
        let (resets, mut other) = if number % 2 == 0 { (here, there) } else { (there, here) };
        // Many bytes are in flight in both directions at the time of the reset.
        if number > 1 {
            resets.set_nonblocking(true).unwrap();
            other.set_nonblocking(true).unwrap();
            while (&resets).write(&[7; 100_000]).is_ok() {}
            while (&other).write(&[7; 100_000]).is_ok() {}
            other.set_nonblocking(false).unwrap();
        }
        SockRef::from(&resets).set_linger(Some(Duration::ZERO)).unwrap();
        drop(resets);
        let mut piece = vec![0; 1 << 20];
        let error = loop {
            match other.read(&mut piece) {
                Ok(0) => panic!("a reset looks like a regular end"),
                Ok(_) => {}
                Err(error) => break error,
            }
        };
        assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    }
    let (here, there, _) = connect(&site, &listener);
    exchange(&here, &there, 1_000_000);
    wait_for_end(&near, &far);
    wait_for_resets([&near, &far], 6);
    assert_eq!((carry(&near).resumed, ended(&near, "lost"), ended(&far, "lost")), (0, 0, 0));
}

#[test]
fn tcp_carrier_buffers_at_most_window_kib_for_a_slow_reader() {
    let Some(site) = GraftSite::new("pool-slow") else { return };
    let ends = warm(&site, "\"tcp\"", "window-kib = 256");
    slow_reader(&site, &ends);
}

#[test]
fn tcp_carrier_passes_data_to_a_client_that_writes_all_before_it_reads() {
    let Some(site) = GraftSite::new("pool-first") else { return };
    let _ends = warm(&site, "\"tcp\"", "");
    write_before_reading(&site);
}

#[test]
fn carrier_pool_grows_with_load_up_to_its_limit() {
    let Some(site) = GraftSite::new("pool-room") else { return };
    let [near, far] = warm(&site, "\"tcp\"", "pool-warm = 2\npool-most = 6");
    let listener = site.listen();
    let mut held = Vec::new();
    for count in 1..=6 {
        held.push(wait_for("a tunnelled connection", || {
            wait_until("an idle pooled connection", || carrier(&near), |it| it.pool_idle > 0);
            let one = connect(&site, &listener);
            // A tunnelled connection makes one more connection of the pool busy. On a busy machine the connection may
            // have gone over plain TCP, and is repeated.
            (carrier(&near).pool_busy == count).then_some(one)
        }));
    }
    // When all connections of the pool are busy, a further connection goes over plain TCP, and all its bytes arrive.
    let (here, there, seen) = connect(&site, &listener);
    assert_eq!(seen.ip().to_string(), CLIENT);
    exchange(&here, &there, 100_000);
    let used = carrier(&near);
    assert_eq!((used.pool_idle, used.pool_busy), (0, 6), "{used:?}");
    assert_eq!(carry(&far).connections, 6);
    for (here, there, _) in &held {
        exchange(here, there, 10_000);
    }
    drop(held);
    wait_until("all pooled connections to be idle", || carrier(&near), |it| it.pool_idle == 6);
}

/// Pooled connections are killed again and again during a transfer.
#[test]
fn killed_tcp_carriers_lose_no_byte() {
    let Some(site) = GraftSite::new("pool-cut") else { return };
    cut(&site, 20);
}

#[test]
#[ignore = "soak: takes a minute"]
fn two_hundred_killed_tcp_carriers_lose_no_byte() {
    let Some(site) = GraftSite::new("pool-cuts") else { return };
    cut(&site, 200);
}

fn cut(site: &GraftSite, cuts: usize) {
    let [near, far] = warm(site, "\"tcp\"", "window-kib = 512");
    let listener = site.listen();
    let streams: Vec<_> = (0..3).map(|_| connect(site, &listener)).collect();
    let enough = AtomicBool::new(false);
    let mut random = fastrand::Rng::with_seed(7);
    thread::scope(|scope| {
        for (here, there, _) in &streams {
            scope.spawn(|| exchange_until(here, there, &enough));
        }
        let _stops = StopOnDrop(&enough);
        for _ in 0..cuts {
            // exact: this random pause varies the time at which the test cuts the connections
            thread::sleep(Duration::from_millis(random.u64(1..60)));
            let before = carry(&near).resumed;
            // All pooled connections are killed, at one of the hosts.
            let killed =
                site.command(random.usize(..2), "ss").args(["-K", "-t"]).args(filter()).output().unwrap();
            assert!(killed.status.success(), "{}", String::from_utf8_lossy(&killed.stderr));
            wait_for("a resumption", || carry(&near).resumed > before);
        }
    });
    wait_for_end(&near, &far);
    wait_for_ended([&near], "done", 3);
    assert_eq!((ended(&near, "lost"), carry(&near).kept_bytes), (0, 0));
}

/// Returns the filter of `ss` for pooled connections, at either end.
fn filter() -> [String; 1] {
    [format!("( dport = :{CARRIERS} or sport = :{CARRIERS} )")]
}

#[test]
fn blocked_udp_falls_back_to_tcp_carrier_and_then_plain_tcp() {
    let Some(site) = GraftSite::new("pool-falls") else { return };
    if !middlebox(&site.namespaces[1], BEFORE, &[&format!("udp dport {CARRIERS} drop")]) {
        println!("SKIP blocked_udp_falls_back_to_tcp_carrier_and_then_plain_tcp: no nft");
        return;
    }
    let [near, far] = started(&site, "[\"quic\", \"tcp\"]", "");
    wait_for_kind(&near, "tcp");
    let listener = site.listen();
    let (here, there, seen) = connect(&site, &listener);
    assert_eq!(seen.ip().to_string(), CLIENT);
    exchange(&here, &there, 3_000_000);
    assert_eq!(verdict(&near, "redirected"), 1);
    // The firewall no longer blocks UDP, so the preferred kind of carrier (QUIC) is used again.
    assert!(flush(&site.namespaces[1]));
    wait_for_kind(&near, "quic");
    wait_until("the other carrier to wait", || carry(&near).carriers, |all| all.len() == 2);
    let (here, there, _) = connect(&site, &listener);
    exchange(&here, &there, 3_000_000);
    assert_eq!(verdict(&near, "redirected"), 2);
    drop(far);
    wait_for_state(&near, "cold");
    let (here, there, seen) = connect(&site, &listener);
    assert_eq!((seen.ip().to_string(), here.local_addr().unwrap()), (CLIENT.to_owned(), seen));
    exchange(&here, &there, 100_000);
    assert_eq!((verdict(&near, "redirected"), verdict(&near, "cold")), (2, 1));
}

/// UDP is blocked during a transfer, and tunnelled connections continue over TCP carriers from the next byte. When TCP
/// is cut, they continue over QUIC.
#[test]
fn tunnelled_connections_move_between_quic_and_tcp_carriers_when_blocked() {
    let Some(site) = GraftSite::new("pool-moves") else { return };
    let [near, far] = warm(&site, "[\"quic\", \"tcp\"]", "window-kib = 512");
    wait_for_kind(&near, "quic");
    wait_until("both", || carry(&near).carriers, |all| all.len() == 2);
    let listener = site.listen();
    let streams: Vec<_> = (0..3).map(|_| connect(&site, &listener)).collect();
    let enough = AtomicBool::new(false);
    let moved = thread::scope(|scope| {
        for (here, there, _) in &streams {
            scope.spawn(|| exchange_until(here, there, &enough));
        }
        let _stops = StopOnDrop(&enough);
        wait_for("bytes by QUIC", || carry(&near).sent_bytes > 1 << 20);
        if !middlebox(&site.namespaces[1], BEFORE, &[&format!("udp dport {CARRIERS} drop")]) {
            println!("SKIP tunnelled_connections_move_between_quic_and_tcp_carriers_when_blocked: no nft");
            return false;
        }
        wait_for_kind(&near, "tcp");
        wait_for("resumptions", || (carry(&near).resumed >= 3).then_some(()));
        // The firewall no longer blocks UDP, and a QUIC carrier is established. Then the TCP carriers are killed.
        assert!(flush(&site.namespaces[1]));
        wait_for_kind(&near, "quic");
        let killed = site.command(0, "ss").args(["-K", "-t"]).args(filter()).output().unwrap();
        assert!(killed.status.success());
        // Connections may have moved before: a carrier whose peer was not scheduled for a while is suspected as well.
        let before = carrier(&near).sent_bytes;
        wait_for("bytes by QUIC", || (carrier(&near).sent_bytes > before + (1 << 20)).then_some(()));
        true
    });
    if moved {
        wait_for_end(&near, &far);
        wait_for_ended([&near], "done", 3);
        assert_eq!((ended(&near, "lost"), carry(&near).kept_bytes), (0, 0));
    }
}

/// Adds a second link between the hosts.
fn second_link(site: &GraftSite) {
    let [client, server] = &site.namespaces[..] else { unreachable!("two") };
    ip(&format!("-n {client} link add second type veth peer name second netns {server}"));
    for (namespace, address) in [(client, CLIENT2), (server, SERVER2)] {
        ip(&format!("-n {namespace} addr add {address}/24 dev second"));
        ip(&format!("-n {namespace} link set second up"));
    }
}

/// The first link drops all packets during a transfer, and passes them again later. Then the second link goes down.
fn live_connections_move_between_addresses(kind: &str) {
    let test = format!("by_{kind}_live_connections_move_between_addresses_of_a_peer");
    let Some(site) = GraftSite::new(&format!("ways-{kind}")) else { return };
    second_link(&site);
    let known = keys(&site);
    let two = format!("[\"{SERVER}:{CARRIERS}\", \"{SERVER2}:{CARRIERS}\"]");
    let near = client(&known[1], &format!("carrier = {kind:?}\nwindow-kib = 512"));
    site.configure_on(0, &near.replace(&format!("\"{SERVER}:{CARRIERS}\""), &two));
    let far = server(&known[0], "").replace("[carry]", &format!("[carry]\ncarrier = {kind:?}"));
    let far = far.replace(&format!("\"{SERVER}:{CARRIERS}\""), &format!("\"0.0.0.0:{CARRIERS}\""));
    let addresses = |more: &str| format!("addresses = [\"{CLIENT6}\"{more}]");
    site.configure_on(1, &far.replace(&addresses(""), &addresses(&format!(", \"{CLIENT}\", \"{CLIENT2}\""))));
    let far = GraftProcess::start_on(&site, 1);
    let near = GraftProcess::start_on(&site, 0);
    let ways = [SERVER, SERVER2].map(|to| format!("{kind} to {to}:{CARRIERS}"));
    let is_used = |way: &str| {
        wait_for(way, || Some(carrier(&near)).filter(|it| it.way == way && it.state == "warm"));
    };
    wait_until("both", || carry(&near).carriers, |all| all.len() == 2);
    is_used(&ways[0]);
    let listener = site.listen();
    let streams: Vec<_> = (0..3).map(|_| connect(&site, &listener)).collect();
    assert!(streams.iter().all(|(.., seen)| seen.ip().to_string() == CLIENT));
    let enough = AtomicBool::new(false);
    let carried = |way: &str| {
        let all = carry(&near).carriers;
        all.iter().find(|it| it.way == way).map_or(0, |it| it.sent_bytes + it.received_bytes)
    };
    let moved = thread::scope(|scope| {
        for (here, there, _) in &streams {
            scope.spawn(|| exchange_until(here, there, &enough));
        }
        let _stops = StopOnDrop(&enough);
        wait_for("bytes over the first link", || (carried(&ways[0]) > 1 << 20).then_some(()));
        if !middlebox(&site.namespaces[1], BEFORE, &["iif eth drop"]) {
            println!("SKIP {test}: no nft");
            return false;
        }
        is_used(&ways[1]);
        wait_for("resumptions", || (carry(&near).resumed >= 3).then_some(()));
        let before = carried(&ways[1]);
        wait_for("bytes over the second link", || (carried(&ways[1]) > before + (1 << 20)).then_some(()));
        // The first link passes packets again, and is preferred. Tunnelled connections that moved to the second link
        // stay there until that link goes down, or until the carrier there is suspected: a peer that was not scheduled
        // for a while is, too.
        assert!(flush(&site.namespaces[1]));
        is_used(&ways[0]);
        ip(&format!("-n {} link set second down", site.namespaces[0]));
        let before = carried(&ways[0]);
        wait_for("bytes over the first link", || (carried(&ways[0]) > before + (1 << 20)).then_some(()));
        true
    });
    if moved {
        wait_for_end(&near, &far);
        wait_for_ended([&near, &far], "done", 3);
        for daemon in [&near, &far] {
            assert_eq!((ended(daemon, "lost"), carry(daemon).kept_bytes), (0, 0));
        }
        assert_eq!(verdict(&near, "redirected"), 3, "a connection went over plain TCP");
    }
}

#[test]
fn connections_over_quic_carriers_move_between_addresses_of_a_peer() {
    live_connections_move_between_addresses("quic");
}

#[test]
fn connections_over_tcp_carriers_move_between_addresses_of_a_peer() {
    live_connections_move_between_addresses("tcp");
}

#[test]
fn connections_over_mptcp_carriers_move_between_addresses_of_a_peer() {
    if has_mptcp("connections_over_mptcp_carriers_move_between_addresses_of_a_peer") {
        live_connections_move_between_addresses("mptcp");
    }
}

/// The daemon on the server's host has a carrier (a connection to the other daemon) to each of two addresses. When one
/// carrier is gone, connections that the server's host opens use the other carrier.
#[test]
fn carriers_of_one_client_to_two_addresses_are_separate() {
    let Some(site) = GraftSite::new("two-ends") else { return };
    ip(&format!("-n {} addr add {SERVER3}/24 dev eth", site.namespaces[1]));
    let known = keys(&site);
    let two = format!("[\"{SERVER}:{CARRIERS}\", \"{SERVER3}:{CARRIERS}\"]");
    site.configure_on(0, &client(&known[1], "").replace(&format!("\"{SERVER}:{CARRIERS}\""), &two));
    let any = format!("\"0.0.0.0:{CARRIERS}\"");
    let far = server(&known[0], "").replace(&format!("\"{SERVER}:{CARRIERS}\""), &any);
    site.configure_on(1, &far);
    let far = GraftProcess::start_on(&site, 1);
    let _near = GraftProcess::start_on(&site, 0);
    let ways = || carry(&far).carriers.into_iter().map(|it| it.way).collect::<Vec<_>>();
    let wanted = [SERVER, SERVER3].map(|to| format!("quic from {CLIENT} to {to}"));
    wait_for("both", || (ways() == wanted).then_some(()));
    ip(&format!("-n {} addr del {SERVER3}/24 dev eth", site.namespaces[1]));
    wait_for("the other", || (ways() == wanted[..1]).then_some(()));
    wait_for_state(&far, "warm");
}

/// Returns the local ports of the client host's connections to the other daemon, with the bytes that each has sent, in
/// ascending order of bytes.
fn connections(site: &GraftSite) -> Vec<(u64, String)> {
    let said = site.command(0, "ss").args(["-OHtni", &format!("dport = :{CARRIERS}")]).output().unwrap();
    let said = String::from_utf8(said.stdout).unwrap();
    let of = |line: &str| {
        let sent = line.split_whitespace().find_map(|word| word.strip_prefix("bytes_sent:")?.parse().ok());
        let (_, port) = line.split_whitespace().nth(3)?.rsplit_once(':')?;
        Some((sent.unwrap_or_default(), port.to_owned()))
    };
    let mut connections: Vec<_> = said.lines().filter_map(of).collect();
    connections.sort();
    connections
}

/// Formats ports as a set for nftables.
fn ports(connections: &[(u64, String)]) -> String {
    connections.iter().map(|(_, port)| port.as_str()).collect::<Vec<_>>().join(", ")
}

/// A NAT loses its state: packets of existing connections are dropped, and only new connections pass. The hosts have no
/// other path.
fn carriers_forgotten_by_a_nat_are_replaced(kind: &str) {
    let test = format!("{kind}_carriers_forgotten_by_a_nat_are_replaced");
    let Some(site) = GraftSite::new(&format!("nat-{kind}")) else { return };
    let [near, far] = warm(&site, &format!("{kind:?}"), "window-kib = 512");
    let listener = site.listen();
    let streams: Vec<_> = (0..3).map(|_| connect(&site, &listener)).collect();
    let enough = AtomicBool::new(false);
    let moved = thread::scope(|scope| {
        for (here, there, _) in &streams {
            scope.spawn(|| exchange_until(here, there, &enough));
        }
        let _stops = StopOnDrop(&enough);
        for _ in 0..2 {
            let before = carry(&near).resumed;
            let known = ports(&connections(&site));
            if !middlebox(&site.namespaces[1], BEFORE, &[&format!("tcp sport {{ {known} }} drop")]) {
                println!("SKIP {test}: no nft");
                return false;
            }
            wait_for("resumptions", || (carry(&near).resumed >= before + 3).then_some(()));
            let sent = carry(&near).sent_bytes;
            wait_for("bytes", || (carry(&near).sent_bytes > sent + (1 << 20)).then_some(()));
            assert!(flush(&site.namespaces[1]));
        }
        true
    });
    if moved {
        wait_for_end(&near, &far);
        wait_for_ended([&near], "done", 3);
        assert_eq!((ended(&near, "lost"), carry(&near).kept_bytes), (0, 0));
    }
}

#[test]
fn tcp_carriers_forgotten_by_a_nat_are_replaced() {
    carriers_forgotten_by_a_nat_are_replaced("tcp");
}

#[test]
fn mptcp_carriers_forgotten_by_a_nat_are_replaced() {
    if has_mptcp("mptcp_carriers_forgotten_by_a_nat_are_replaced") {
        carriers_forgotten_by_a_nat_are_replaced("mptcp");
    }
}

/// The idle pooled connections are dropped by a NAT, while a busy one still works. A client that gets an idle one must
/// reach the server nevertheless.
fn carriers_forgotten_by_a_nat_before_use_are_replaced(kind: &str) {
    let test = format!("{kind}_carriers_forgotten_by_a_nat_before_use_are_replaced");
    let Some(site) = GraftSite::new(&format!("new-{kind}")) else { return };
    let [near, far] = warm(&site, &format!("{kind:?}"), "window-kib = 512\npool-warm = 2");
    let listener = site.listen();
    let first = connect(&site, &listener);
    // The busy connection answers liveness probes, so the daemon does not consider the whole carrier dead.
    let used = carry(&near).resumed;
    let enough = AtomicBool::new(false);
    thread::scope(|scope| {
        let stops = StopOnDrop(&enough);
        scope.spawn(|| exchange_until(&first.0, &first.1, &enough));
        wait_for("bytes", || (carry(&near).sent_bytes > 1 << 20).then_some(()));
        wait_for("a full pool", || (carrier(&near).pool_idle == 2).then_some(()));
        let mut idle = connections(&site);
        idle.pop();
        let idle = ports(&idle);
        if !middlebox(&site.namespaces[1], BEFORE, &[&format!("tcp sport {{ {idle} }} drop")]) {
            println!("SKIP {test}: no nft");
            return;
        }
        listener.set_nonblocking(true).unwrap();
        let here = site.try_connect(listener.local_addr().unwrap()).unwrap();
        let (there, _) = wait_for("the server", || listener.accept().ok());
        there.set_nonblocking(false).unwrap();
        drop(stops);
        exchange(&here, &there, 1 << 20);
        assert!(flush(&site.namespaces[1]));
        assert!(carry(&near).resumed > used, "the client did not get an idle connection");
    });
    wait_for_end(&near, &far);
    assert_eq!((ended(&near, "lost"), carry(&near).kept_bytes), (0, 0));
}

#[test]
fn tcp_carriers_forgotten_by_a_nat_before_use_are_replaced() {
    carriers_forgotten_by_a_nat_before_use_are_replaced("tcp");
}

#[test]
fn mptcp_carriers_forgotten_by_a_nat_before_use_are_replaced() {
    if has_mptcp("mptcp_carriers_forgotten_by_a_nat_before_use_are_replaced") {
        carriers_forgotten_by_a_nat_before_use_are_replaced("mptcp");
    }
}

/// Reads until a whole frame of the protocol between the daemons has arrived.
fn next_frame(from: &mut Tls, decoder: &mut Decoder) -> std::io::Result<CarryFrame> {
    loop {
        if let Some(frame) = decoder.frame().unwrap() {
            return Ok(frame);
        }
        let mut piece = [0; 1024];
        let length = from.read(&mut piece)?;
        if length == 0 {
            return Err(ErrorKind::UnexpectedEof.into());
        }
        decoder.push(piece[..length].to_vec().into());
    }
}

/// Reads the next frame of the protocol between the daemons, and skips liveness probes and their answers.
fn next_word(from: &mut Tls, decoder: &mut Decoder) -> CarryFrame {
    loop {
        match next_frame(from, decoder).unwrap() {
            CarryFrame::Ask | CarryFrame::Answer => {}
            word => return word,
        }
    }
}

fn say(to: &mut Tls, frame: &CarryFrame) {
    let mut bytes = Vec::new();
    frame.encode(&mut bytes);
    to.write_all(&bytes).unwrap();
}

/// Connects to the daemon as its peer would, and exchanges the Hello frames. `run` is the number in the Hello frame
/// that tells a restarted peer from the one before.
fn greeted(site: &GraftSite, run: u64) -> (Tls, Decoder) {
    let mut tls = pretend_at(site, CARRIERS, ALPN_ASKS);
    let mut decoder = Decoder::default();
    say(&mut tls, &CarryFrame::Hello { run });
    assert!(matches!(next_word(&mut tls, &mut decoder), CarryFrame::Hello { .. }));
    (tls, decoder)
}

/// Connects to the daemon as its peer would, with this protocol version, and opens one tunnelled connection.
fn carried_by(site: &GraftSite, version: &[u8], listener: &TcpListener) -> (Tls, Decoder, TcpStream) {
    let mut tls = pretend_at(site, CARRIERS, version);
    let mut decoder = Decoder::default();
    say(&mut tls, &CarryFrame::Hello { run: 7 });
    assert!(matches!(next_frame(&mut tls, &mut decoder).unwrap(), CarryFrame::Hello { .. }));
    say(&mut tls, &CarryFrame::Open(OpenFrame { id: 1, server: at(SERVER, PORT), client: at(CLIENT, 5000) }));
    let (there, seen) = listener.accept().unwrap();
    assert_eq!(seen, at(CLIENT, 5000));
    assert_eq!(next_frame(&mut tls, &mut decoder).unwrap(), CarryFrame::Accepted { received: 0 });
    (tls, decoder, there)
}

/// A peer with the previous protocol version gets no liveness probes, and its connections work as before. A peer with
/// the new version that answers no probe is dropped.
#[test]
fn peer_with_an_older_protocol_version_gets_no_liveness_probes() {
    let Some(site) = GraftSite::new("pool-version") else { return };
    let known = keys(&site);
    site.configure_on(1, &server(&known[0], "").replace("[carry]", "[carry]\ncarrier = \"tcp\""));
    let far = GraftProcess::start_on(&site, 1);
    let listener = site.listen();
    let (mut asked, mut decoder, _there) = carried_by(&site, ALPN_ASKS, &listener);
    assert_eq!(next_frame(&mut asked, &mut decoder).unwrap(), CarryFrame::Ask);
    // The peer answers the first liveness probe, and its connection is kept. It does not answer the next one, and its
    // connection is closed.
    say(&mut asked, &CarryFrame::Answer);
    assert_eq!(next_frame(&mut asked, &mut decoder).unwrap(), CarryFrame::Ask);
    let (mut before, mut decoder, mut there) = carried_by(&site, ALPN, &listener);
    let gone = next_frame(&mut asked, &mut Decoder::default()).unwrap_err().kind();
    assert!(!matches!(gone, ErrorKind::WouldBlock | ErrorKind::TimedOut), "{gone}");
    // By now the daemon would have sent a liveness probe to a peer with the new version.
    say(&mut before, &CarryFrame::Data(b"as before".to_vec().into()));
    there.read_exact(&mut [0; 9]).unwrap();
    assert_eq!(next_frame(&mut before, &mut decoder).unwrap(), CarryFrame::Confirm { delivered: 9 });
    assert_eq!(carry(&far).ended.get("malformed"), None);
}

fn full_after_one(at: SocketAddr) -> TcpListener {
    let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
    socket.bind(&at.into()).unwrap();
    socket.listen(0).unwrap();
    socket.into()
}

/// A carrier (a connection between the daemons) ends before the daemon at its end has reached a slow server. After the
/// carrier was resumed, there must be only one connection to the server, which gets the first bytes once.
#[test]
fn connection_resumed_on_a_new_carrier_reaches_its_slow_server_once() {
    let Some(site) = GraftSite::new("pool-slowly") else { return };
    let known = keys(&site);
    site.configure_on(1, &server(&known[0], "").replace("[carry]", "[carry]\ncarrier = \"tcp\""));
    let far = GraftProcess::start_on(&site, 1);
    // The listener's backlog is full with one connection, until the test accepts it.
    let listener = site.enter(1, || inside(&site.namespaces[1], || full_after_one(at(SERVER, PORT))));
    let _first = inside(&site.namespaces[0], || TcpStream::connect((SERVER, PORT)).unwrap());
    let (mut tls, _) = greeted(&site, 7);
    say(&mut tls, &CarryFrame::Open(OpenFrame { id: 1, server: at(SERVER, PORT), client: at(CLIENT, 5000) }));
    say(&mut tls, &CarryFrame::Data(b"once".to_vec().into()));
    wait_for("the connection", || (carry(&far).connections == 1).then_some(()));
    drop(tls);
    let (mut tls, mut decoder) = greeted(&site, 7);
    say(&mut tls, &CarryFrame::Resume { id: 1, received: 0 });
    thread::sleep(Duration::from_millis(200)); // exact: the daemon would refuse an unknown connection within this pause
    drop(listener.accept().unwrap());
    let CarryFrame::Accepted { received } = next_word(&mut tls, &mut decoder) else { panic!("not resumed") };
    let rest = b"once".get(received as usize..).unwrap();
    if !rest.is_empty() {
        say(&mut tls, &CarryFrame::Data(rest.to_vec().into()));
    }
    say(&mut tls, &CarryFrame::End);
    let (there, _) = listener.accept().unwrap();
    assert_eq!(read_all(&there), b"once");
    there.shutdown(Shutdown::Write).unwrap();
    listener.set_nonblocking(true).unwrap();
    assert_eq!(listener.accept().unwrap_err().kind(), ErrorKind::WouldBlock);
}

/// When both directions of a connection to a server have ended, the kernel would let another connection use the source
/// port of the daemon on the server's host. That daemon keeps the port until the client has acknowledged the last byte,
/// so that no server sees a wrong client's address. Then the port is free immediately.
#[test]
fn source_port_to_a_server_is_reused_only_after_the_last_byte_is_acked() {
    let Some(site) = GraftSite::new("pool-port") else { return };
    let known = keys(&site);
    site.configure_on(1, &server(&known[0], "").replace("[carry]", "[carry]\ncarrier = \"tcp\""));
    let range = "net.ipv4.ip_local_port_range=40000 40001";
    assert!(site.command(1, "sysctl").args(["-qw", range]).status().unwrap().success());
    let far = GraftProcess::start_on(&site, 1);
    let listener = site.listen();
    let (mut tls, mut decoder, mut there) = carried_by(&site, ALPN_ASKS, &listener);
    there.shutdown(Shutdown::Write).unwrap();
    say(&mut tls, &CarryFrame::End);
    assert_eq!(there.read(&mut [0]).unwrap(), 0);
    let mut heard = [(); 2].map(|()| next_word(&mut tls, &mut decoder));
    heard.sort_by_key(|frame| *frame == CarryFrame::End);
    assert_eq!(heard, [CarryFrame::Confirm { delivered: 1 }, CarryFrame::End]);
    let open = |port: u16| {
        let (mut next, mut more) = greeted(&site, port.into());
        say(
            &mut next,
            &CarryFrame::Open(OpenFrame { id: 2, server: at(SERVER, PORT), client: at(CLIENT, port) }),
        );
        let answer = next_word(&mut next, &mut more);
        (next, answer)
    };
    let (_second, answer) = open(5001);
    assert_eq!(answer, CarryFrame::Accepted { received: 0 });
    let (_none, answer) = open(5002);
    assert_eq!(
        answer,
        CarryFrame::Refused(CarryReason::Unreachable),
        "a connection was opened although both ports are in use"
    );
    say(&mut tls, &CarryFrame::Confirm { delivered: 1 });
    wait_for_ended([&far], "done", 1);
    let (_third, answer) = open(5003);
    assert_eq!(answer, CarryFrame::Accepted { received: 0 });
    let mut seen = [(); 2].map(|()| listener.accept().unwrap().1);
    seen.sort();
    assert_eq!(seen, [5001, 5003].map(|port| at(CLIENT, port)));
}

/// A peer whose last message was acknowledged may reuse the pooled connection immediately. Its next request may arrive
/// together with the last frame of the connection before.
#[test]
fn next_request_may_arrive_with_the_last_frame_of_the_previous_connection() {
    let Some(site) = GraftSite::new("pool-next") else { return };
    let known = keys(&site);
    site.configure_on(1, &server(&known[0], "").replace("[carry]", "[carry]\ncarrier = \"tcp\""));
    let far = GraftProcess::start_on(&site, 1);
    let listener = site.listen();
    let (mut tls, mut decoder, mut there) = carried_by(&site, ALPN_ASKS, &listener);
    there.shutdown(Shutdown::Write).unwrap();
    say(&mut tls, &CarryFrame::End);
    assert_eq!(there.read(&mut [0]).unwrap(), 0);
    let mut heard = [(); 2].map(|()| next_word(&mut tls, &mut decoder));
    heard.sort_by_key(|frame| *frame == CarryFrame::End);
    assert_eq!(heard, [CarryFrame::Confirm { delivered: 1 }, CarryFrame::End]);
    // The last frame of one connection and the first frame of the next one are written in one call, as two TLS records.
    let next = OpenFrame { id: 2, server: at(SERVER, PORT), client: at(CLIENT, 5001) };
    for frame in [CarryFrame::Confirm { delivered: 1 }, CarryFrame::Open(next)] {
        let mut bytes = Vec::new();
        frame.encode(&mut bytes);
        tls.conn.writer().write_all(&bytes).unwrap();
    }
    tls.flush().unwrap();
    assert_eq!(next_word(&mut tls, &mut decoder), CarryFrame::Accepted { received: 0 });
    assert_eq!(listener.accept().unwrap().1, at(CLIENT, 5001));
    wait_for_ended([&far], "done", 1);
    assert_eq!(ended(&far, "malformed"), 0);
}

#[test]
fn killed_daemon_with_tcp_carriers_leaves_nothing_and_may_restart() {
    let Some(site) = GraftSite::new("pool-killed") else { return };
    let [near, far] = warm(&site, "\"tcp\"", "");
    let listener = site.listen();
    let half = || {
        let (mut here, mut there, _) = connect(&site, &listener);
        here.write_all(b"half of ").unwrap();
        there.read_exact(&mut [0; 8]).unwrap();
        there.write_all(b"half of ").unwrap();
        here.read_exact(&mut [0; 8]).unwrap();
        [here, there]
    };
    let reset = |mut stream: std::net::TcpStream| {
        assert_eq!(stream.read(&mut [0]).unwrap_err().kind(), ErrorKind::ConnectionReset);
    };
    let [here, there] = half();
    far.kill();
    reset(there);
    wait_for_state(&near, "cold");
    let (next, other, _) = connect(&site, &listener);
    exchange(&next, &other, 100_000);
    let _far = GraftProcess::start_on(&site, 1);
    wait_for_state(&near, "warm");
    // The restarted daemon does not know the connections of the killed one.
    reset(here);
    let redirected = verdict(&near, "redirected");
    let (next, other, _) = connect(&site, &listener);
    exchange(&next, &other, 100_000);
    assert_eq!(verdict(&near, "redirected"), redirected + 1);
    // The second round kills the client's daemon instead of the server's.
    let [here, there] = half();
    near.kill();
    reset(here);
    let (next, other, seen) = connect(&site, &listener);
    assert_eq!((seen.ip().to_string(), next.local_addr().unwrap()), (CLIENT.to_owned(), seen));
    exchange(&next, &other, 100_000);
    reset(there);
}

#[test]
fn missing_congestion_control_is_named() {
    let Some(site) = GraftSite::new("pool-control") else { return };
    let known = keys(&site);
    let text = client(&known[1], "carrier = \"tcp\"\ncongestion = \"nothing\"");
    site.configure_on(0, &text);
    site.share();
    let mut daemon = site.command(0, env!("CARGO_BIN_EXE_millrace"));
    daemon.args(["graft", "run", "--http=off", "--config"]).arg(site.path("graft0.toml"));
    daemon.arg("--socket").arg(site.path("graft0.sock")).stderr(std::process::Stdio::piped());
    let output = site.spawn(0, daemon).wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(
        !output.status.success() && said.contains("congestion \"nothing\" is not on this host"),
        "{said}"
    );
}

/// The peer accepts fewer pooled connections than this host wants. This host must not try to open another one all the
/// time.
#[test]
fn retries_to_a_peer_with_a_full_carrier_pool_are_rate_limited() {
    let Some(site) = GraftSite::new("pool-full") else { return };
    let known = keys(&site);
    let with = |text: String, most: u32| {
        text.replace("[carry]", &format!("[carry]\ncarrier = \"tcp\"\npool-warm = 2\npool-most = {most}"))
    };
    site.configure_on(0, &with(client(&known[1], ""), 6));
    site.configure_on(1, &with(server(&known[0], ""), 2));
    let far = GraftProcess::start_on(&site, 1);
    let near = GraftProcess::start_on(&site, 0);
    wait_for("two", || (carrier(&near).pool_idle == 2).then_some(()));
    let listener = site.listen();
    let _carried = [(); 2].map(|()| connect(&site, &listener));
    let refused = |at_least: u64| {
        let count = ended(&far, "pool-full");
        (count >= at_least).then_some(count)
    };
    // The clock is read before the counter of refused connections. Connections that are refused between these two reads
    // would otherwise make the measured time too short.
    let mut begin = Instant::now();
    let first = wait_for("a refusal", || {
        begin = Instant::now();
        refused(1)
    });
    // This host wants two more pooled connections, so it may try to open two at a time.
    wait_for("more", || refused(first + 6));
    assert!(begin.elapsed() >= Duration::from_secs(1), "{:?}", begin.elapsed());
    assert_eq!(ended(&far, "unknown-caller"), 0);
}
