//! Carriers by TCP and MPTCP, and where one kind takes over from another: the same promises, and no byte lost, doubled or out of
//! order.

use std::{
    io::{ErrorKind, Read as _, Write as _},
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};

use socket2::SockRef;

use crate::{
    agreement::{BEFORE, flush, keys, middlebox},
    carried::{
        CARRIERS, at, carrier, carry, client, connect, ended, exchange, exchange_until, server, slow_reader,
        verdict, wait_for_state, write_before_reading,
    },
    site::{CLIENT, CLIENT6, Daemon, PORT, SERVER, SERVER6, Site, wait_for},
};

/// Both daemons, whose carriers are these, before any is warm.
fn started<'a>(site: &'a Site, carriers: &str, more: &str) -> [Daemon<'a>; 2] {
    let known = keys(site);
    let with = |text: String| text.replace("[carry]", &format!("[carry]\ncarrier = {carriers}"));
    site.configure_on(0, &with(client(&known[1], more)));
    site.configure_on(1, &with(server(&known[0], "")));
    let far = Daemon::start_on(site, 1);
    [Daemon::start_on(site, 0), far]
}

fn warm<'a>(site: &'a Site, carriers: &str, more: &str) -> [Daemon<'a>; 2] {
    let ends = started(site, carriers, more);
    wait_for_state(&ends[0], "warm");
    ends
}

fn wait_for_kind(daemon: &Daemon<'_>, kind: &str) {
    let is_used = || Some(carrier(daemon)).filter(|it| it.carrier == kind && it.state == "warm");
    wait_for(kind, is_used);
}

fn has_mptcp() -> bool {
    std::fs::read_to_string("/proc/sys/net/mptcp/enabled").is_ok_and(|text| text.trim() == "1")
}

fn both_ends_see_each_other(kind: &str) {
    let Some(site) = Site::new(&format!("pool-{kind}")) else { return };
    let [near, far] = warm(&site, &format!("{kind:?}"), "pool-warm = 2");
    for (server, client) in [(SERVER, CLIENT), (SERVER6, CLIENT6)] {
        let listener = site.listen_on(at(server, PORT));
        // One after the other, by connections that are used again.
        for length in [3_000_000, 1, 100_000, 0, 3_000_000, 5000] {
            let (here, there, seen) = connect(&site, &listener);
            assert_eq!((seen.ip().to_string(), here.local_addr().unwrap()), (client.to_owned(), seen));
            assert_eq!(here.peer_addr().unwrap(), at(server, PORT));
            assert_eq!(there.local_addr().unwrap(), at(server, PORT));
            exchange(&here, &there, length);
            wait_for("end", || (carry(&near).connections == 0).then_some(()));
        }
    }
    wait_for("end", || (carry(&far).connections == 0).then_some(()));
    let (here, there) = (carry(&near), carry(&far));
    assert_eq!((here.verdicts["led"], ended(&near, "done"), ended(&far, "done")), (12, 12, 12), "{here:?}");
    let bytes = 2 * 6_105_001;
    assert_eq!((here.sent_bytes, here.received_bytes, here.kept_bytes), (bytes, bytes, 0));
    assert_eq!((there.sent_bytes, there.received_bytes, there.kept_bytes), (bytes, bytes, 0));
    let used = carrier(&near);
    assert_eq!(used.carrier, kind);
    // Had each made a connection of its own, there would be more.
    assert!(used.pool_idle + used.pool_busy <= 4, "{used:?}");
    assert!(near.succeed(&["why", SERVER]).contains(&format!("carried by server, {kind} to {SERVER}")));
    assert!(near.succeed(&["status"]).contains("wait, 0 carry"));
}

#[test]
fn by_tcp_both_ends_see_each_other_and_all_bytes() {
    both_ends_see_each_other("tcp");
}

#[test]
fn by_mptcp_both_ends_see_each_other_and_all_bytes() {
    if !has_mptcp() {
        println!("SKIP by_mptcp_both_ends_see_each_other_and_all_bytes: no MPTCP");
        return;
    }
    both_ends_see_each_other("mptcp");
}

/// A connection that was reset is not used again, and those after it are whole.
#[test]
fn by_tcp_a_reset_is_a_reset_at_the_other_end() {
    let Some(site) = Site::new("pool-reset") else { return };
    let [near, far] = warm(&site, "\"tcp\"", "");
    let listener = site.listen();
    for number in 0..6 {
        let (mut here, mut there, _) = connect(&site, &listener);
        here.write_all(b"before").unwrap();
        there.read_exact(&mut [0; 6]).unwrap();
        there.write_all(b"before").unwrap();
        here.read_exact(&mut [0; 6]).unwrap();
        let (resets, mut other) = if number % 2 == 0 { (here, there) } else { (there, here) };
        // Both ways much may be under way.
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
                Ok(0) => panic!("a reset looks like an end"),
                Ok(_) => {}
                Err(error) => break error,
            }
        };
        assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    }
    let (here, there, _) = connect(&site, &listener);
    exchange(&here, &there, 1_000_000);
    wait_for("ends", || (carry(&near).connections + carry(&far).connections == 0).then_some(()));
    let resets = |daemon: &Daemon<'_>| ended(daemon, "reset") + ended(daemon, "peer-reset");
    assert_eq!((resets(&near), resets(&far)), (6, 6), "{:?} {:?}", carry(&near).ended, carry(&far).ended);
    assert_eq!((carry(&near).resumed, ended(&near, "lost"), ended(&far, "lost")), (0, 0, 0));
}

#[test]
fn by_tcp_a_slow_reader_costs_one_window() {
    let Some(site) = Site::new("pool-slow") else { return };
    let ends = warm(&site, "\"tcp\"", "window-kib = 256");
    slow_reader(&site, &ends);
}

#[test]
fn by_tcp_who_writes_before_reading_is_not_stuck() {
    let Some(site) = Site::new("pool-first") else { return };
    let _ends = warm(&site, "\"tcp\"", "");
    write_before_reading(&site);
}

#[test]
fn a_pool_grows_with_what_it_carries_and_no_further_than_it_may() {
    let Some(site) = Site::new("pool-room") else { return };
    let [near, far] = warm(&site, "\"tcp\"", "pool-warm = 2\npool-most = 6");
    let listener = site.listen();
    let mut held = Vec::new();
    for _ in 0..6 {
        wait_for("a free one", || (carrier(&near).pool_idle > 0).then_some(()));
        held.push(connect(&site, &listener));
    }
    wait_for("full", || (carrier(&near).pool_busy == 6).then_some(()));
    // What there is no room for goes in place, and loses nothing.
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
    wait_for("rest", || (carrier(&near).pool_idle == 6).then_some(()));
}

/// A carrier's connection dies in mid-transfer, again and again.
#[test]
fn by_tcp_connections_that_die_take_no_byte_along() {
    let Some(site) = Site::new("pool-cut") else { return };
    cut(&site, 20);
}

#[test]
#[ignore = "a minute: make soak"]
fn by_tcp_two_hundred_connections_that_die_take_no_byte_along() {
    let Some(site) = Site::new("pool-cuts") else { return };
    cut(&site, 200);
}

fn cut(site: &Site, cuts: usize) {
    let [near, far] = warm(site, "\"tcp\"", "window-kib = 512");
    let listener = site.listen();
    let streams: Vec<_> = (0..3).map(|_| connect(site, &listener)).collect();
    let (enough, mut random) = (AtomicBool::new(false), fastrand::Rng::with_seed(7));
    thread::scope(|scope| {
        for (here, there, _) in &streams {
            scope.spawn(|| exchange_until(here, there, &enough));
        }
        for _ in 0..cuts {
            thread::sleep(Duration::from_millis(random.u64(1..60)));
            let before = carry(&near).resumed;
            // All of them, by one of the hosts.
            let killed =
                site.command(random.usize(..2), "ss").args(["-K", "-t"]).args(filter()).output().unwrap();
            assert!(killed.status.success(), "{}", String::from_utf8_lossy(&killed.stderr));
            wait_for("resumption", || (carry(&near).resumed > before).then_some(()));
        }
        enough.store(true, Ordering::Relaxed);
    });
    wait_for("end", || (carry(&near).connections + carry(&far).connections == 0).then_some(()));
    assert_eq!((ended(&near, "done"), ended(&near, "lost"), carry(&near).kept_bytes), (3, 0, 0));
}

/// Connections of carriers, at either end.
fn filter() -> [String; 1] {
    [format!("( dport = :{CARRIERS} or sport = :{CARRIERS} )")]
}

#[test]
fn where_udp_is_blocked_tcp_carries_and_where_nothing_passes_it_goes_in_place() {
    let Some(site) = Site::new("pool-falls") else { return };
    if !middlebox(&site.namespaces[1], BEFORE, &[&format!("udp dport {CARRIERS} drop")]) {
        println!("SKIP where_udp_is_blocked_tcp_carries_and_where_nothing_passes_it_goes_in_place: no nft");
        return;
    }
    let [near, far] = started(&site, "[\"quic\", \"tcp\"]", "");
    wait_for_kind(&near, "tcp");
    let listener = site.listen();
    let (here, there, seen) = connect(&site, &listener);
    assert_eq!(seen.ip().to_string(), CLIENT);
    exchange(&here, &there, 3_000_000);
    assert_eq!(verdict(&near, "led"), 1);
    // It passes again: what is preferred is used.
    assert!(flush(&site.namespaces[1]));
    wait_for_kind(&near, "quic");
    assert_eq!(carry(&near).carriers.len(), 2, "the other waits");
    let (here, there, _) = connect(&site, &listener);
    exchange(&here, &there, 3_000_000);
    assert_eq!(verdict(&near, "led"), 2);
    drop(far);
    wait_for_state(&near, "cold");
    let (here, there, seen) = connect(&site, &listener);
    assert_eq!((seen.ip().to_string(), here.local_addr().unwrap()), (CLIENT.to_owned(), seen));
    exchange(&here, &there, 100_000);
    assert_eq!((verdict(&near, "led"), verdict(&near, "cold")), (2, 1));
}

/// UDP is blocked in mid-transfer: what is carried goes on by TCP, from where it was; and back, when that is cut.
#[test]
fn live_connections_go_on_with_a_carrier_of_another_kind() {
    let Some(site) = Site::new("pool-moves") else { return };
    let [near, far] = warm(&site, "[\"quic\", \"tcp\"]", "window-kib = 512");
    wait_for_kind(&near, "quic");
    wait_for("both", || (carry(&near).carriers.len() == 2).then_some(()));
    let listener = site.listen();
    let streams: Vec<_> = (0..3).map(|_| connect(&site, &listener)).collect();
    let enough = AtomicBool::new(false);
    let moved = thread::scope(|scope| {
        for (here, there, _) in &streams {
            scope.spawn(|| exchange_until(here, there, &enough));
        }
        thread::sleep(Duration::from_millis(200));
        if !middlebox(&site.namespaces[1], BEFORE, &[&format!("udp dport {CARRIERS} drop")]) {
            println!("SKIP live_connections_go_on_with_a_carrier_of_another_kind: no nft");
            enough.store(true, Ordering::Relaxed);
            return false;
        }
        wait_for_kind(&near, "tcp");
        wait_for("resumptions", || (carry(&near).resumed >= 3).then_some(()));
        // By TCP now, which is cut: QUIC is there again, and takes over.
        assert!(flush(&site.namespaces[1]));
        wait_for_kind(&near, "quic");
        let before = carry(&near).resumed;
        let killed = site.command(0, "ss").args(["-K", "-t"]).args(filter()).output().unwrap();
        assert!(killed.status.success());
        wait_for("resumptions", || (carry(&near).resumed >= before + 3).then_some(()));
        enough.store(true, Ordering::Relaxed);
        true
    });
    if moved {
        wait_for("end", || (carry(&near).connections + carry(&far).connections == 0).then_some(()));
        assert_eq!((ended(&near, "done"), ended(&near, "lost"), carry(&near).kept_bytes), (3, 0, 0));
    }
}

#[test]
fn by_tcp_nothing_is_left_of_a_daemon_that_was_killed_and_it_may_come_again() {
    let Some(site) = Site::new("pool-killed") else { return };
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
    let _far = Daemon::start_on(&site, 1);
    wait_for_state(&near, "warm");
    // Its broker knows nothing of what was carried before.
    reset(here);
    let led = verdict(&near, "led");
    let (next, other, _) = connect(&site, &listener);
    exchange(&next, &other, 100_000);
    assert_eq!(verdict(&near, "led"), led + 1);
    // The client's.
    let [here, there] = half();
    near.kill();
    reset(here);
    let (next, other, seen) = connect(&site, &listener);
    assert_eq!((seen.ip().to_string(), next.local_addr().unwrap()), (CLIENT.to_owned(), seen));
    exchange(&next, &other, 100_000);
    reset(there);
}

#[test]
fn a_congestion_control_that_is_not_there_is_named() {
    let Some(site) = Site::new("pool-control") else { return };
    let known = keys(&site);
    let text = client(&known[1], "carrier = \"tcp\"\ncongestion = \"nothing\"");
    site.configure_on(0, &text);
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
