//! Tests of attacks on a host's daemons by strangers, peers and other users. None may have an effect.

use std::{
    io::{ErrorKind, Read as _},
    net::{IpAddr, TcpListener},
    os::fd::AsFd as _,
    sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed},
    thread,
    time::Duration,
};

use millrace_base::control::ControlEnd;
use millrace_graft::settings::CarrierKind;
use millrace_lab::stall::Strangers;
use millrace_testkit::{StopOnDrop, lingering};
use nix::sys::signal::Signal;
use socket2::{Domain, Protocol, Socket, Type};

use crate::{
    agreement::keys,
    carried::{
        CARRIERS, accepted, at, client, connect, ended, exchange, server, wait_for_ended, wait_for_state,
        warm,
    },
    messages::{MessageHost, hosts, pair, socket},
    site::{
        CLIENT, CLIENT6, GraftProcess, GraftSite, PORT, SERVER, SERVER6, inside, ip, pause, signal, wait_for,
        wait_until,
    },
};

/// A user passes sockets whose close takes an hour (SO_LINGER) to the daemon: in a message that the daemon reads, in
/// one that it never reads, and over more connections than a user may have.
#[test]
fn passed_sockets_with_so_linger_delay_neither_sessions_nor_daemon_end() {
    let Some(site) = GraftSite::new("linger") else { return };
    let [mut near, _far] = hosts(&site, "");
    let mut kept = Vec::new();
    // The daemon's process for sessions is stopped while the test closes its own descriptor of the passed socket. So
    // the daemon's descriptor is the last one. Otherwise the test's own close would linger.
    let pass = |near: &MessageHost<'_>, connections: usize, records: usize| {
        let part = near.part();
        pause(part);
        let passed = (0..connections).map(|_| {
            let control = ControlEnd::connect(&socket(&site, 0)).unwrap();
            let (lingers, far) = lingering();
            for _ in 0..records {
                control.send(&"garbage", &[lingers.as_fd()]).unwrap();
            }
            (control, far)
        });
        let passed: Vec<_> = passed.collect();
        signal(part, Signal::SIGCONT);
        wait_until("answers", || near.verb(&["sessions", "status"]), |(done, _)| *done);
        passed
    };
    // The messages are garbage. The first message makes the daemon close the connection, and later messages are never
    // read.
    for records in [1, 3] {
        kept.extend(pass(&near, 2, records));
        for _ in 0..5 {
            let (done, said) = near.verb(&["sessions", "status"]);
            assert!(done, "{said}");
        }
        // Sessions can still be opened, and carry messages.
        let (mut here, mut there) = pair(&site, &["reliability"]);
        here.send(b"goes on").unwrap();
        assert_eq!(crate::messages::message(&mut there), b"goes on");
    }
    // The user opens more connections than the daemon allows for each user, so the daemon closes some.
    for _ in 0..3 {
        kept.extend(pass(&near, 40, 1));
        let (done, said) = near.verb(&["sessions", "status"]);
        assert!(done, "{said}");
    }
    // The lingering sockets must not delay the daemon's end.
    near.signal(Signal::SIGTERM);
    wait_for("the end of the daemon", || near.process.try_wait().unwrap().is_some());
    drop(kept);
}

/// A server that listens on loopback only is not reachable through the tunnel, whatever ports the daemons' settings
/// list for tunnels, unless a rule names the address.
#[test]
fn tunnelled_connections_reach_loopback_only_by_a_rule() {
    const LOOPBACK: &str = "127.0.0.1";
    let Some(site) = GraftSite::new("loopback") else { return };
    let known = keys(&site);
    // The client's settings claim that the loopback address belongs to its peer.
    site.configure_on(0, &client(&known[1], "").replace(SERVER6, LOOPBACK));
    site.configure_on(1, &server(&known[0], ""));
    let far = GraftProcess::start_on(&site, 1);
    let near = GraftProcess::start_on(&site, 0);
    wait_for_state(&near, "warm");
    let listener = site.listen_on(at(LOOPBACK, PORT));
    listener.set_nonblocking(true).unwrap();
    // The connection goes over plain TCP to the client's own loopback, where no server listens.
    let refused = site.try_connect(at(LOOPBACK, PORT)).and_then(|mut stream| stream.read(&mut [0]));
    assert!(!matches!(refused, Ok(1..)), "{refused:?}");
    wait_for_ended([&far], "not-here", 1);
    assert_eq!(listener.accept().unwrap_err().kind(), ErrorKind::WouldBlock);

    let named = server(&known[0], "") + &format!("addresses = [\"{LOOPBACK}\"]\n");
    site.configure_on(1, &named.replace(&format!("addresses = [\"{SERVER6}\"]\n"), ""));
    far.succeed(&["reload"]);
    listener.set_nonblocking(false).unwrap();
    // The connection is repeated, because for a while after the refusal the daemon does not tunnel to the server's
    // address.
    let stream = wait_for("a tunnelled connection", || site.try_connect(at(LOOPBACK, PORT)).ok());
    let (here, there, seen) = accepted(stream, &listener);
    assert_eq!(seen.ip().to_string(), CLIENT);
    exchange(&here, &there, 10_000);
}

/// A server outside the daemon's cgroup would see its own host's address as the client's. Connections to it therefore
/// go over plain TCP, and it sees the true client.
#[test]
fn listener_outside_the_cgroup_is_not_reached_by_carriers() {
    let Some(site) = GraftSite::new("outside") else { return };
    let [_near, far] = warm(&site, ["", ""]);
    let listener = inside(&site.namespaces[1], || TcpListener::bind((SERVER, PORT)).unwrap());
    let (here, there, seen) = connect(&site, &listener);
    assert_eq!(seen.ip().to_string(), CLIENT);
    exchange(&here, &there, 10_000);
    wait_for_ended([&far], "not-listed", 1);
}

/// Returns further addresses of the client's host, from which strangers connect: an IPv4 address, and IPv6 addresses in
/// the /64 of the peer's host.
fn strangers(site: &GraftSite) -> [Vec<IpAddr>; 2] {
    let of_64 = (0x100..0x110).map(|n| format!("fd96::{n:x}"));
    let from = [vec!["10.96.0.50".to_owned()], of_64.collect()];
    for address in from.iter().flatten() {
        let bits = if address.contains(':') { 64 } else { 24 };
        ip(&format!("-n {} addr add {address}/{bits} dev eth nodad", site.namespaces[0]));
    }
    from.map(|all| all.iter().map(|address| address.parse().unwrap()).collect())
}

/// Time between two connection attempts by strangers of one address family: 200 attempts per second.
const PACE: Duration = Duration::from_millis(5);

fn has_sctp(test: &str) -> bool {
    let protocol = Some(Protocol::from(millrace_kernel::sctp::PROTOCOL));
    let is_there = Socket::new(Domain::IPV4, Type::STREAM, protocol).is_ok();
    if !is_there {
        println!("SKIP {test}: no SCTP");
    }
    is_there
}

/// The settings name the peer's address. Strangers connect all the time from other addresses, and send just enough to
/// keep their handshakes open. The daemon limits the number of these handshakes, and must accept the peer's connection
/// nevertheless.
fn peer_is_warm_while_strangers_stall(kind: CarrierKind) {
    let Some(site) = GraftSite::new(&format!("stall-{}", kind.name())) else { return };
    if kind == CarrierKind::Sctp && !has_sctp("sctp_tunnel_of_a_peer_is_established_while_strangers_stall") {
        return;
    }
    let from = strangers(&site);
    let known = keys(&site);
    let with = |text: String| text.replace("[carry]", &format!("[carry]\ncarrier = {:?}", kind.name()));
    site.configure_on(0, &with(client(&known[1], "")));
    let text = with(server(&known[0], "")).replace(&format!("listen = \"{SERVER}:"), "listen = \"[::]:");
    site.configure_on(
        1,
        &text.replace(
            &format!("addresses = [\"{CLIENT6}\"]"),
            &format!("addresses = [\"{CLIENT}\", \"{CLIENT6}\"]"),
        ),
    );
    let far = GraftProcess::start_on(&site, 1);
    let is_over = AtomicBool::new(false);
    let counts = [const { AtomicUsize::new(0) }; 2];
    thread::scope(|scope| {
        let _stops = StopOnDrop(&is_over);
        let site = &site;
        let is_over = &is_over;
        for ((from, begun), to) in from.iter().zip(&counts).zip([SERVER, SERVER6]) {
            let strangers = Strangers { kind, from, to: at(to, CARRIERS), pace: PACE, is_over, begun };
            scope.spawn(move || inside(&site.namespaces[0], || strangers.run().unwrap()));
        }
        let begun = || counts.each_ref().map(|count| count.load(Relaxed));
        wait_until("strangers", begun, |counts| counts.iter().all(|count| *count > 300));
        let near = GraftProcess::start_on(site, 0);
        wait_for_state(&near, "warm");
        // The daemon accepted the peer's first connection attempt.
        assert!(!near.log().contains("no carrier to the peer: "), "{}", near.log());
        let before = begun();
        wait_until("more strangers", begun, |counts| {
            counts.iter().zip(before).all(|(now, before)| *now > before)
        });
    });
    wait_until("strangers that were closed", || ended(&far, "crowded"), |count| *count > 0);
}

#[test]
fn tcp_tunnel_of_a_peer_is_established_while_strangers_stall() {
    peer_is_warm_while_strangers_stall(CarrierKind::Tcp);
}

#[test]
fn quic_tunnel_of_a_peer_is_established_while_strangers_stall() {
    peer_is_warm_while_strangers_stall(CarrierKind::Quic);
}

#[test]
fn sctp_tunnel_of_a_peer_is_established_while_strangers_stall() {
    peer_is_warm_while_strangers_stall(CarrierKind::Sctp);
}
