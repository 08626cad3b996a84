//! Tests of TCP connections that the graft daemons of two hosts tunnel. A tunnelled connection must deliver all bytes
//! in order, or end with a reset, whatever happens to the daemons and to the connections between them (carriers). Both
//! ends must see each other's true addresses.

use std::{
    collections::BTreeSet,
    fs,
    io::{ErrorKind, Read, Write as _},
    net::{IpAddr, Shutdown, SocketAddr, TcpListener, TcpStream},
    process::{Command, Stdio},
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use millrace_graft::status::{CarrierStatus, CarryStatus, PeerExplanation};
use millrace_graft_daemon::control;
use millrace_testkit::StopOnDrop;
use nix::sys::signal::Signal;
use ring::digest::{Context, SHA256};
use socket2::SockRef;

use crate::{
    agreement::{
        BEFORE, NET_ADMIN, NET_BIND_SERVICE, NET_RAW, SETGID, SETUID, flush, key, keys, middlebox,
        network_sockets, privileges,
    },
    site::{
        CLIENT, CLIENT6, GraftProcess, GraftSite, LONG, PORT, SERVER, SERVER6, inside, ip, part, part_state,
        pause, signal, wait_for, wait_until,
    },
};

pub const CARRIERS: u16 = 9188;

pub fn client(server: &str, rest: &str) -> String {
    format!(
        "[agreement]\nkey = \"host0.key\"\n[carry]\n{rest}\n[[peer]]\nname = \"server\"\nkey = \"{server}\"\n\
         carry = \"{SERVER}:{CARRIERS}\"\naddresses = [\"{SERVER6}\"]\n{}",
        rule("client", PORT)
    )
}

pub fn server(client: &str, rest: &str) -> String {
    format!(
        "[agreement]\nkey = \"host1.key\"\n[carry]\nlisten = \"{SERVER}:{CARRIERS}\"\n[[peer]]\nname = \"client\"\n\
         key = \"{client}\"\naddresses = [\"{CLIENT6}\"]\n{rest}{}addresses = [\"{SERVER6}\"]\n",
        rule("server", PORT)
    )
}

pub fn rule(side: &str, port: u16) -> String {
    format!(
        "[[rule]]\nname = \"{side}\"\nside = \"{side}\"\nport = {port}\ntier = \"carried\"\nagree = false\n"
    )
}

pub fn carry(daemon: &GraftProcess<'_>) -> CarryStatus {
    // exact: callers repeat this read of the tunnel status, or expect values that do not change
    daemon.status().carry.unwrap()
}

pub fn carrier(daemon: &GraftProcess<'_>) -> CarrierStatus {
    carry(daemon).carriers.remove(0)
}

pub fn wait_for_state(daemon: &GraftProcess<'_>, state: &str) {
    wait_until(&format!("a carrier that is {state}"), || carrier(daemon), |it| it.state == state);
}

/// Returns how many connections got this verdict from the kernel's program, for example `redirected`: to the
/// tunnel. The kernel counts a verdict during connect(), so the figure is exact.
pub fn verdict(daemon: &GraftProcess<'_>, verdict: &str) -> u64 {
    carry(daemon).verdicts[verdict]
}

pub fn ended(daemon: &GraftProcess<'_>, how: &str) -> u64 {
    carry(daemon).ended.get(how).copied().unwrap_or_default()
}

/// Waits until each daemon has counted `count` connections that ended in the way `how`, such as `reset`. A daemon
/// counts a connection's end only after the application has seen it.
pub fn wait_for_ended<const N: usize>(daemons: [&GraftProcess<'_>; N], how: &str, count: u64) {
    let counts = || daemons.map(|daemon| ended(daemon, how));
    wait_until(&format!("{count} that ended as {how}"), counts, |counts| *counts == [count; N]);
}

/// Waits until each daemon has counted this many connections that were reset by either end.
pub fn wait_for_resets<const N: usize>(daemons: [&GraftProcess<'_>; N], count: u64) {
    let counts = || daemons.map(|daemon| ended(daemon, "reset") + ended(daemon, "peer-reset"));
    wait_until(&format!("{count} resets"), counts, |counts| *counts == [count; N]);
}

/// Starts both daemons, and waits until the carrier (the connection between the daemons that transports tunnelled
/// connections) is warm: it is established, and its congestion window is open.
pub fn warm<'a>(site: &'a GraftSite, more: [&str; 2]) -> [GraftProcess<'a>; 2] {
    let known = keys(site);
    site.configure_on(0, &client(&known[1], more[0]));
    site.configure_on(1, &server(&known[0], more[1]));
    let far = GraftProcess::start_on(site, 1);
    let near = GraftProcess::start_on(site, 0);
    wait_for_state(&near, "warm");
    [near, far]
}

pub fn at(ip: &str, port: u16) -> SocketAddr {
    SocketAddr::new(ip.parse::<IpAddr>().unwrap(), port)
}

/// Waits until neither daemon has a tunnelled connection any more.
pub fn wait_for_end(near: &GraftProcess<'_>, far: &GraftProcess<'_>) {
    let connections = || [near, far].map(|daemon| carry(daemon).connections);
    wait_until("the end of all connections", connections, |counts| *counts == [0, 0]);
}

pub fn connect(site: &GraftSite, listener: &TcpListener) -> (TcpStream, TcpStream, SocketAddr) {
    accepted(site.try_connect(listener.local_addr().unwrap()).unwrap(), listener)
}

/// Accepts the connection `near` at the listener. Returns both ends, and the client's address as the server sees it.
pub fn accepted(near: TcpStream, listener: &TcpListener) -> (TcpStream, TcpStream, SocketAddr) {
    let (far, seen) = listener.accept().unwrap();
    for stream in [&near, &far] {
        stream.set_read_timeout(Some(LONG)).unwrap();
        stream.set_write_timeout(Some(LONG)).unwrap();
    }
    (near, far, seen)
}

/// Connects, and checks that each end sees the other one's true address.
pub fn connect_seen(site: &GraftSite, listener: &TcpListener, client: &str) -> (TcpStream, TcpStream) {
    let (here, there, seen) = connect(site, listener);
    let server = listener.local_addr().unwrap();
    assert_eq!((seen.ip().to_string(), here.local_addr().unwrap()), (client.to_owned(), seen));
    assert_eq!((here.peer_addr().unwrap(), there.local_addr().unwrap()), (server, server));
    (here, there)
}

/// Connects to a server that resets the connection at once, and returns the error. Either connect() or the first read
/// may report the error.
pub fn reset(site: &GraftSite, at: SocketAddr) -> ErrorKind {
    site.try_connect(at).and_then(|mut stream| stream.read(&mut [0])).unwrap_err().kind()
}

/// Returns random bytes, so that a lost or repeated piece changes their hash.
pub fn noise(seed: u64, length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    fastrand::Rng::with_seed(seed).fill(&mut bytes);
    bytes
}

pub fn hash(bytes: &[u8]) -> Vec<u8> {
    let mut context = Context::new(&SHA256);
    context.update(bytes);
    context.finish().as_ref().to_vec()
}

pub fn read_all(mut from: &TcpStream) -> Vec<u8> {
    let mut got = Vec::new();
    let mut latest = Instant::now();
    loop {
        let before = got.len();
        match from.read_to_end(&mut got) {
            Ok(_) => return got,
            // On loopback, a read may time out a little before its timeout has passed.
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                latest = if got.len() > before { Instant::now() } else { latest };
                assert!(latest.elapsed() < LONG, "nothing more after {} bytes", got.len());
            }
            Err(error) => panic!("{error} after {} bytes", got.len()),
        }
    }
}

/// Sends different bytes in both directions at once, closes the two directions one by one, and checks that all bytes
/// arrived.
pub fn exchange(near: &TcpStream, far: &TcpStream, length: usize) {
    let sent = [noise(1, length), noise(2, length)];
    thread::scope(|scope| {
        for (mut stream, bytes) in [(near, &sent[0]), (far, &sent[1])] {
            scope.spawn(move || {
                stream.write_all(bytes).unwrap();
                stream.shutdown(Shutdown::Write).unwrap();
            });
        }
        let got = [near, far].map(|stream| scope.spawn(move || read_all(stream)));
        let [to_near, to_far] = got.map(|it| it.join().unwrap());
        assert_eq!([to_near.len(), to_far.len()], [length; 2]);
        assert_eq!([hash(&to_far), hash(&to_near)], [hash(&sent[0]), hash(&sent[1])]);
    });
}

#[test]
fn carrier_grows_its_congestion_window_before_connections_use_it() {
    let Some(site) = GraftSite::new("warmth") else { return };
    let ends = warm(&site, ["warm-kib = 64", ""]);
    for (end, bytes) in ends.iter().zip([64 << 10, 256 << 10]) {
        wait_until("an open window", || carrier(end), |it| it.sent_bytes > bytes);
    }
    assert!(carrier(&ends[0]).sent_bytes < 128 << 10, "the read returned more bytes than expected");
    assert_eq!(carry(&ends[0]).connections + carry(&ends[1]).connections, 0);
}

#[test]
fn quic_carrier_delivers_all_bytes_and_true_addresses() {
    let Some(site) = GraftSite::new("carried") else { return };
    let [near, far] = warm(&site, ["", ""]);
    for (server, client) in [(SERVER, CLIENT), (SERVER6, CLIENT6)] {
        let listener = site.listen_on(at(server, PORT));
        let (here, there, seen) = connect(&site, &listener);
        assert_eq!(seen.ip().to_string(), client, "accept()");
        assert_eq!(there.peer_addr().unwrap(), seen);
        assert_eq!(there.local_addr().unwrap(), at(server, PORT));
        assert_eq!(here.peer_addr().unwrap(), at(server, PORT));
        assert_eq!(here.local_addr().unwrap(), seen);
        exchange(&here, &there, 3_000_000);
    }
    wait_for_end(&near, &far);
    wait_for_ended([&near, &far], "done", 2);
    let here = carry(&near);
    let there = carry(&far);
    assert_eq!(here.verdicts["redirected"], 2, "{here:?}");
    assert_eq!((here.sent_bytes, here.received_bytes, here.kept_bytes), (6_000_000, 6_000_000, 0));
    assert_eq!((there.sent_bytes, there.received_bytes, there.kept_bytes), (6_000_000, 6_000_000, 0));
    let why: PeerExplanation = serde_json::from_str(&near.succeed(&["why", SERVER, "--json"])).unwrap();
    assert_eq!(why.carrier.unwrap().state, "warm");
    assert!(near.succeed(&["why", SERVER]).contains(&format!("{SERVER}: carried by server")));
    assert!(near.succeed(&["status"]).contains("CARRIER TO"));
}

/// Most clients send first. Their first bytes travel through the tunnel together with the message that opens the
/// tunnelled connection.
#[test]
fn data_that_a_client_sends_right_after_connecting_arrives() {
    let Some(site) = GraftSite::new("early") else { return };
    let [_near, _far] = warm(&site, ["", ""]);
    let listener = site.listen();
    for length in [1, 1000, 100_000] {
        let said = noise(8, length);
        let mut here = site.try_connect(at(SERVER, PORT)).unwrap();
        here.write_all(&said).unwrap();
        let (mut there, _) = listener.accept().unwrap();
        let mut heard = vec![0; length];
        there.set_read_timeout(Some(LONG)).unwrap();
        there.read_exact(&mut heard).unwrap();
        assert_eq!(hash(&heard), hash(&said));
    }
}

/// Java and many other programs connect to IPv4 addresses with IPv6 sockets.
#[test]
fn connections_with_ipv4_mapped_addresses_are_tunnelled() {
    let Some(site) = GraftSite::new("mapped") else { return };
    let [near, _far] = warm(&site, ["", ""]);
    let listener = site.listen_on(at("::", PORT));
    let mapped = at(&format!("::ffff:{SERVER}"), PORT);
    let here = site.try_connect(mapped).unwrap();
    let (there, seen) = listener.accept().unwrap();
    assert_eq!(seen.ip().to_canonical().to_string(), CLIENT);
    assert_eq!(here.peer_addr().unwrap(), mapped);
    exchange(&here, &there, 100_000);
    assert_eq!(verdict(&near, "redirected"), 1);
}

#[test]
fn connection_without_a_carrier_stays_plain_tcp() {
    let Some(site) = GraftSite::new("absent") else { return };
    let known = keys(&site);
    site.configure_on(0, &client(&known[1], ""));
    let near = GraftProcess::start_on(&site, 0);
    let listener = site.listen();
    let (here, there, seen) = connect(&site, &listener);
    assert_eq!((seen.ip().to_string(), here.local_addr().unwrap()), (CLIENT.to_owned(), seen));
    exchange(&here, &there, 100_000);
    let cold = verdict(&near, "cold");
    let state = carrier(&near);
    assert_eq!((cold, state.state.as_str()), (1, "cold"));
    assert!(near.succeed(&["why", SERVER]).contains("in place, since the carrier server is cold"));

    // The server's settings have a wrong key for the client, so the server's daemon refuses the connection of the
    // client's daemon.
    key(&site, "other.key");
    let stranger = key(&site, "stranger.key");
    site.configure_on(1, &server(&stranger, ""));
    let far = GraftProcess::start_on(&site, 1);
    wait_for("a refusal", || ended(&far, "unknown-caller") > 0);
    let (here, there, seen) = connect(&site, &listener);
    assert_eq!(seen.ip().to_string(), CLIENT);
    exchange(&here, &there, 100_000);
    assert_eq!((verdict(&near, "redirected"), carry(&far).connections), (0, 0));
    assert_eq!(carrier(&far).state, "cold");

    // The server's daemon gets the right key. The next connection must be tunnelled.
    site.configure_on(1, &server(&known[0], ""));
    far.succeed(&["reload"]);
    wait_for_state(&near, "warm");
    let (here, there, _) = connect(&site, &listener);
    exchange(&here, &there, 100_000);
    assert_eq!(verdict(&near, "redirected"), 1);
    // The server's daemon is killed. New connections must go over plain TCP, and tunnelled ones must end with a reset,
    // not with a FIN.
    let (mut here, _there, _) = connect(&site, &listener);
    far.kill();
    wait_for_state(&near, "cold");
    let (next, there, seen) = connect(&site, &listener);
    assert_eq!((seen.ip().to_string(), next.local_addr().unwrap()), (CLIENT.to_owned(), seen));
    exchange(&next, &there, 100_000);
    assert_eq!(verdict(&near, "cold"), 3);
    let error = here.read(&mut [0]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
}

#[test]
fn tcp_reset_passes_through_the_tunnel() {
    let Some(site) = GraftSite::new("reset") else { return };
    let [near, far] = warm(&site, ["", ""]);
    let listener = site.listen();
    for resets_here in [true, false] {
        let (mut here, mut there, _) = connect(&site, &listener);
        here.write_all(b"before").unwrap();
        there.read_exact(&mut [0; 6]).unwrap();
        there.write_all(b"before").unwrap();
        here.read_exact(&mut [0; 6]).unwrap();
        let (resets, mut other) = if resets_here { (here, there) } else { (there, here) };
        SockRef::from(&resets).set_linger(Some(Duration::ZERO)).unwrap();
        drop(resets);
        assert_eq!(other.read(&mut [0]).unwrap_err().kind(), ErrorKind::ConnectionReset);
    }
    wait_for_resets([&near, &far], 2);
}

/// Time for which connections to a server go over plain TCP, after the daemon on the server's host could not connect to
/// the server.
const AVOIDED: Duration = Duration::from_secs(2);

#[test]
fn server_refusal_is_passed_on_and_broker_refusal_falls_back_to_plain_tcp() {
    let Some(site) = GraftSite::new("refuse") else { return };
    let [near, _far] = warm(&site, ["", ""]);
    // The server does not listen. The first connection is tunnelled and gets a reset. For a while, later ones go over
    // plain TCP, and the server's host refuses them. On a busy machine that time may be over before the next
    // connection.
    let mut redirected = 0;
    let mut latest = None::<Instant>;
    wait_for("a connection that goes over plain TCP", || {
        let begin = Instant::now();
        let kind = reset(&site, at(SERVER, PORT));
        if kind == ErrorKind::ConnectionRefused {
            return redirected > 0;
        }
        assert_eq!(kind, ErrorKind::ConnectionReset);
        assert!(
            latest.is_none_or(|latest| latest.elapsed() >= AVOIDED),
            "a connection was tunnelled although the server is avoided"
        );
        (redirected, latest) = (redirected + 1, Some(begin));
        false
    });
    // The daemon counts each refused connection before it resets the application's socket.
    assert_eq!((ended(&near, "refused"), verdict(&near, "refused")), (redirected, 1));

    // Only the client's settings list this port. The server's daemon refuses to tunnel a connection to a port that its
    // own settings do not list, so the connection goes over plain TCP.
    let known = std::fs::read_to_string(site.path("graft0.toml")).unwrap();
    let known = known.split_once('\n').unwrap().1.to_owned();
    site.configure_on(
        0,
        &format!("{known}{}", rule("client", PORT + 1).replace("\"client\"\ns", "\"more\"\ns")),
    );
    near.succeed(&["reload"]);
    wait_for_state(&near, "warm");
    let listener = site.listen_on(at(SERVER, PORT + 1));
    wait_for("two connections within the time that a server is avoided", || {
        let begin = Instant::now();
        let (here, there, seen) = connect(&site, &listener);
        assert_eq!(seen.ip().to_string(), CLIENT);
        exchange(&here, &there, 1_000_000);
        let redirected = verdict(&near, "redirected");
        let (here, there, _) = connect(&site, &listener);
        let is_late = begin.elapsed() >= AVOIDED;
        let is_same = verdict(&near, "redirected") == redirected;
        exchange(&here, &there, 1000);
        assert!(is_same || is_late, "a connection was tunnelled although the server is avoided");
        is_same
    });
}

/// Starts both daemons like [`warm`], with `connect = "strict"` in the client's rule: connect() returns only after the
/// server has answered.
fn strict<'a>(site: &'a GraftSite) -> [GraftProcess<'a>; 2] {
    let known = keys(site);
    let early = client(&known[1], "");
    site.configure_on(0, &early.replace("tier = \"carried\"", "tier = \"carried\"\nconnect = \"strict\""));
    site.configure_on(1, &server(&known[0], ""));
    let far = GraftProcess::start_on(site, 1);
    let near = GraftProcess::start_on(site, 0);
    wait_for_state(&near, "warm");
    [near, far]
}

/// Returns how many connections, among those whose SYN was held back, the kernel's program has given the outcome
/// `verdict`. The program counts them when further packets arrive, so callers wait for the number.
fn held(daemon: &GraftProcess<'_>, verdict: &str) -> u64 {
    carry(daemon).held[verdict]
}

#[test]
fn tunnelled_strict_connect_returns_the_servers_refusal() {
    let Some(site) = GraftSite::new("strict") else { return };
    let [near, far] = strict(&site);
    for (server, client) in [(SERVER, CLIENT), (SERVER6, CLIENT6)] {
        let refused = ended(&near, "refused");
        let done = ended(&near, "done");
        for _ in 0..3 {
            let error = site.try_connect(at(server, PORT)).unwrap_err();
            assert_eq!(
                error.kind(),
                ErrorKind::ConnectionRefused,
                "a connection without a listener was opened at {server}"
            );
        }
        wait_for_ended([&near], "refused", refused + 3);
        let listener = site.listen_on(at(server, PORT));
        for length in [10, 3_000_000] {
            let (here, there) = connect_seen(&site, &listener, client);
            exchange(&here, &there, length);
        }
        wait_for_ended([&near], "done", done + 2);
    }
    assert_eq!(
        (verdict(&near, "redirected"), verdict(&near, "refused")),
        (10, 0),
        "a connection went over plain TCP"
    );
    assert_eq!((held(&near, "asked"), held(&near, "malformed"), held(&near, "no-room")), (10, 0, 0));
    assert!(held(&near, "let-in") >= 4);
    wait_for_ended([&far], "done", 4);
    wait_for_ended([&far], "refused", 6);
    let mapped = at(&format!("::ffff:{SERVER}"), PORT);
    let listener = site.listen_on(at(SERVER, PORT));
    let here = site.try_connect(mapped).unwrap();
    let (there, _) = listener.accept().unwrap();
    exchange(&here, &there, 1000);
    assert_eq!(verdict(&near, "redirected"), 11);
}

#[test]
fn tunnelled_strict_connect_completes_only_after_the_server_accepted() {
    let Some(site) = GraftSite::new("waits") else { return };
    let [near, far] = strict(&site);
    let listener = site.listen();
    let crowd = crowd(&site, &listener);
    let here = site.begin_to_connect(at(SERVER, PORT));
    wait_for("the question", || held(&near, "asked") == 1);
    assert_eq!(here.peer_addr().unwrap_err().kind(), ErrorKind::NotConnected);
    assert_eq!(held(&near, "let-in"), 0);
    crowd.iter().for_each(|_| drop(listener.accept().unwrap()));
    let (there, seen) = listener.accept().unwrap();
    wait_for("connection", || here.peer_addr().ok());
    here.set_nonblocking(false).unwrap();
    assert_eq!(seen, here.local_addr().unwrap());
    exchange(&here, &there, 100_000);
    // A client that gives up connecting must leave no connection at the daemons.
    let crowd = self::crowd(&site, &listener);
    drop(site.begin_to_connect(at(SERVER, PORT)));
    wait_for("the question", || held(&near, "asked") == 2);
    crowd.iter().for_each(|_| drop(listener.accept().unwrap()));
    wait_for_end(&near, &far);
    wait_for_ended([&near], "reset", 1);
}

/// Fills the queue of connections that wait to be accepted. The server's kernel drops further SYNs, and their senders
/// repeat them, until the returned connections are accepted.
fn crowd(site: &GraftSite, listener: &TcpListener) -> [TcpStream; 2] {
    SockRef::from(listener).listen(1).unwrap();
    // The queue has room for one connection more than its length.
    [(); 2]
        .map(|()| inside(&site.namespaces[1], || TcpStream::connect(listener.local_addr().unwrap()).unwrap()))
}

/// Connections that the daemon on the server's host does not tunnel go over plain TCP, and connect() returns the
/// server's own answer.
#[test]
fn strict_connect_over_plain_tcp_returns_the_servers_answer() {
    let Some(site) = GraftSite::new("strictly") else { return };
    let known = keys(&site);
    let early = format!(
        "{}{}",
        client(&known[1], ""),
        rule("client", PORT + 1).replace("\"client\"\ns", "\"more\"\ns")
    );
    site.configure_on(0, &early.replace("tier = \"carried\"", "tier = \"carried\"\nconnect = \"strict\""));
    site.configure_on(1, &server(&known[0], ""));
    let far = GraftProcess::start_on(&site, 1);
    let near = GraftProcess::start_on(&site, 0);
    wait_for_state(&near, "warm");
    let error = site.try_connect(at(SERVER, PORT + 1)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionRefused);
    let listener = site.listen_on(at(SERVER, PORT + 1));
    let (here, there, seen) = connect(&site, &listener);
    assert_eq!(seen.ip().to_string(), CLIENT);
    exchange(&here, &there, 1_000_000);
    assert_eq!(verdict(&near, "redirected"), 2);
    wait_for_ended([&far], "not-listed", 2);
    // The client's daemon is killed. A connection whose SYN it held back is refused, and later connections are not
    // redirected.
    far.pause();
    let held_back = site.begin_to_connect(at(SERVER, PORT));
    wait_for("the question", || held(&near, "asked") == 3);
    near.kill();
    wait_for("refusal", || held_back.take_error().unwrap());
    far.go_on();
    let (here, there, _) = connect(&site, &listener);
    exchange(&here, &there, 1000);
}

/// A process that connects directly to the ports of the client's broker (the proxy in the daemon) must be refused or
/// reset.
#[test]
fn connections_to_the_brokers_own_address_are_refused() {
    let Some(site) = GraftSite::new("proxy") else { return };
    let [near, _far] = warm(&site, ["", ""]);
    let listeners = site.command(0, "ss").args(["-Hltn"]).output().unwrap().stdout;
    let listeners = String::from_utf8(listeners).unwrap();
    let local = listeners.lines().filter_map(|line| line.split_whitespace().nth(3));
    let ports = local.filter_map(|at| at.strip_prefix("127.0.0.1:"));
    let mut ends: Vec<_> = ports.map(|port| reset(&site, at("127.0.0.1", port.parse().unwrap()))).collect();
    ends.sort_by_key(ToString::to_string);
    // The broker (the daemon's proxy) has two ports. One accepts a connection and resets it, and the other one holds a
    // connection's SYN back and then refuses it.
    assert_eq!(ends, [ErrorKind::ConnectionRefused, ErrorKind::ConnectionReset]);
    wait_for_ended([&near], "stranger", 2);
}

/// Flow-control window of a tunnelled connection in the tests of slow readers, in bytes.
const WINDOW: u64 = 256 << 10;

#[test]
fn daemon_buffers_at_most_window_kib_for_a_slow_reader() {
    let Some(site) = GraftSite::new("slow") else { return };
    let ends = warm(&site, ["window-kib = 256", ""]);
    slow_reader(&site, &ends);
}

/// Tests that the client's daemon buffers at most [`WINDOW`] bytes of a connection whose server reads slowly.
pub fn slow_reader(site: &GraftSite, [near, far]: &[GraftProcess<'_>; 2]) {
    let listener = site.listen();
    let (mut here, there, _) = connect(site, &listener);
    let sent = noise(3, 64 << 20);
    let written = fill(&mut here, &sent, || carry(near).kept_bytes > WINDOW / 2);
    let kept = carry(near).kept_bytes;
    assert!(kept > 0 && kept <= WINDOW, "{kept}");
    // Bytes that the daemons do not buffer are in the kernels' socket buffers, two on each host.
    assert!(written < 32 << 20, "{written}");
    // While one connection's server reads slowly, another connection is not delayed.
    let (other, others, _) = connect(site, &listener);
    exchange(&other, &others, 1_000_000);
    here.shutdown(Shutdown::Write).unwrap();
    assert_eq!(hash(&read_all(&there)), hash(&sent[..written]));
    // The peer acknowledges data after it has arrived, so the daemon frees its copy of the data a moment later.
    let kept = || [near, far].map(|daemon| carry(daemon).kept_bytes);
    wait_until("nothing to be kept", kept, |kept| *kept == [0, 0]);
}

/// Writes until `is_full` is true and the socket has accepted nothing for a second. Returns the number of bytes
/// written.
pub fn fill(to: &mut TcpStream, bytes: &[u8], is_full: impl Fn() -> bool) -> usize {
    to.set_nonblocking(true).unwrap();
    let begin = Instant::now();
    let mut written = 0;
    let mut latest = Instant::now();
    while latest.elapsed() < Duration::from_secs(1) || !is_full() {
        match to.write(&bytes[written..]) {
            Ok(length) => (written, latest) = (written + length, Instant::now()),
            Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock),
        }
        assert!(begin.elapsed() < LONG, "{written} bytes have gone, and it is not full");
        // exact: the pause between two attempts to write to the socket
        thread::sleep(Duration::from_millis(1));
    }
    to.set_nonblocking(false).unwrap();
    written
}

#[test]
fn tunnelled_writer_that_does_not_read_makes_progress() {
    let Some(site) = GraftSite::new("first") else { return };
    let _ends = warm(&site, ["", ""]);
    write_before_reading(&site);
}

/// The client writes everything before it reads, so acknowledgements must arrive although the server has not read the
/// client's data yet.
pub fn write_before_reading(site: &GraftSite) {
    let listener = site.listen();
    let (mut here, there, _) = connect(site, &listener);
    let to = noise(4, 20 << 20);
    let back = noise(5, 2 << 20);
    thread::scope(|scope| {
        // The server reads while it writes. The client reads only after it has written everything.
        scope.spawn(|| {
            (&there).write_all(&back).unwrap();
            there.shutdown(Shutdown::Write).unwrap();
        });
        let got = scope.spawn(|| read_all(&there));
        here.write_all(&to).unwrap();
        here.shutdown(Shutdown::Write).unwrap();
        assert_eq!(hash(&read_all(&here)), hash(&back));
        assert_eq!(hash(&got.join().unwrap()), hash(&to));
    });
}

#[test]
fn urgent_tcp_data_keeps_its_position() {
    let Some(site) = GraftSite::new("urgent") else { return };
    let [_near, _far] = warm(&site, ["", ""]);
    let listener = site.listen();
    let (mut here, there, _) = connect(&site, &listener);
    here.write_all(b"before").unwrap();
    SockRef::from(&here).send_out_of_band(b"!").unwrap();
    here.write_all(b"after").unwrap();
    here.shutdown(Shutdown::Write).unwrap();
    assert_eq!(read_all(&there), b"before!after");
}

/// Sends random bytes in both directions until `enough` is set, and checks that they arrive. Each direction has another
/// random seed.
pub fn exchange_until(near: &TcpStream, far: &TcpStream, enough: &AtomicBool) {
    const PIECE: usize = 64 << 10;
    let send = |mut to: &TcpStream, seed: u64| {
        let mut context = Context::new(&SHA256);
        let mut pieces = 0;
        while !enough.load(Ordering::Relaxed) {
            let piece = noise(seed + pieces, PIECE);
            context.update(&piece);
            to.write_all(&piece).unwrap();
            pieces += 1;
        }
        to.shutdown(Shutdown::Write).unwrap();
        (context.finish(), pieces as usize * PIECE)
    };
    let receive = |mut from: &TcpStream| {
        let mut context = Context::new(&SHA256);
        let mut length = 0;
        let mut piece = vec![0; PIECE];
        loop {
            match from.read(&mut piece).unwrap() {
                0 => return (context.finish(), length),
                got => (context.update(&piece[..got]), length += got),
            };
        }
    };
    thread::scope(|scope| {
        let sent = [(near, 0), (far, 1 << 32)].map(|(to, seed)| scope.spawn(move || send(to, seed)));
        let got = [far, near].map(|from| scope.spawn(move || receive(from)));
        for (sent, got) in sent.into_iter().zip(got) {
            let sent = sent.join().unwrap();
            let got = got.join().unwrap();
            assert_eq!((got.0.as_ref(), got.1), (sent.0.as_ref(), sent.1));
        }
    });
}

/// The link carries much less than the server sends. Acknowledgements of the client's few bytes must not wait behind
/// the server's data.
#[test]
fn tunnel_acknowledgements_overtake_data_queued_for_a_slow_carrier() {
    let Some(site) = GraftSite::new("behind") else { return };
    let far = "window-kib = 16384";
    let known = keys(&site);
    site.configure_on(0, &client(&known[1], "window-kib = 64"));
    site.configure_on(1, &server(&known[0], "").replace("[carry]", &format!("[carry]\n{far}")));
    let _far = GraftProcess::start_on(&site, 1);
    let near = GraftProcess::start_on(&site, 0);
    wait_for_state(&near, "warm");
    let listener = site.listen();
    let (here, there, _) = connect(&site, &listener);
    for namespace in &site.namespaces {
        ip(&format!("netns exec {namespace} tc qdisc add dev eth root tbf rate 8mbit burst 16k limit 60k"));
    }
    const MANY: u64 = 16;
    let enough = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| exchange_until(&here, &there, &enough));
        let _stops = StopOnDrop(&enough);
        // If acknowledgements waited behind a full window of the server's data, sending this many windows of the
        // client's data would take four minutes, longer than the test waits.
        let is_enough = |bytes: &u64| *bytes >= MANY * (64 << 10);
        wait_until("bytes to be confirmed", || carry(&near).sent_bytes, is_enough);
        for namespace in &site.namespaces {
            ip(&format!("netns exec {namespace} tc qdisc del dev eth root"));
        }
    });
}

/// Changes the peer's entry in the settings `cuts` times while four connections send in both directions. Each change
/// closes the carrier (the connection between the daemons) and opens another.
fn cut(site: &GraftSite, cuts: usize) {
    let [near, far] = warm(site, ["window-kib = 512", ""]);
    let listener = site.listen();
    let settings = |side: usize| {
        let text = std::fs::read_to_string(site.path(&format!("graft{side}.toml"))).unwrap();
        text.split_once('\n').unwrap().1.to_owned()
    };
    let before = [settings(0), settings(1)];
    let mut random = fastrand::Rng::with_seed(7);
    let mut entry = [0; 2];
    let streams: Vec<_> = (0..4).map(|_| connect(site, &listener)).collect();
    let enough = AtomicBool::new(false);
    thread::scope(|scope| {
        for (here, there, _) in &streams {
            scope.spawn(|| exchange_until(here, there, &enough));
        }
        let _stops = StopOnDrop(&enough);
        for _ in 0..cuts {
            // exact: this random pause varies the time at which the test cuts the connections
            thread::sleep(Duration::from_millis(random.u64(1..60)));
            let side = random.usize(..2);
            let resumed = carry(&near).resumed;
            // The peer's entry must differ from the previous one: a reload keeps the carriers of peers whose entries do
            // not change.
            entry[side] = 1 - entry[side];
            let other =
                before[side].replace("[[peer]]\n", &format!("[[peer]]\nmin-cpus = {}\n", entry[side]));
            site.configure_on(side, &other);
            [&near, &far][side].succeed(&["reload"]);
            wait_for("a resumption", || carry(&near).resumed > resumed);
        }
    });
    wait_for_end(&near, &far);
    wait_for_ended([&near], "done", 4);
    assert_eq!((ended(&near, "lost"), carry(&near).kept_bytes), (0, 0));
}

#[test]
fn twenty_carrier_closures_lose_no_byte_of_tunnelled_connections() {
    let Some(site) = GraftSite::new("cut") else { return };
    cut(&site, 20);
}

#[test]
#[ignore = "soak: takes a minute"]
fn two_hundred_carrier_closures_lose_no_byte_of_tunnelled_connections() {
    let Some(site) = GraftSite::new("cuts") else { return };
    cut(&site, 200);
}

/// The server does not listen, and the broker (the server's daemon, which connects to the server for clients) may use
/// the server's port as a source port. The broker must not connect to itself.
#[test]
fn a_broker_does_not_connect_to_itself() {
    let Some(site) = GraftSite::new("itself") else { return };
    let range = format!("{PORT} {}", PORT + 1);
    inside(&site.namespaces[1], || fs::write("/proc/sys/net/ipv4/ip_local_port_range", range).unwrap());
    let [near, far] = warm(&site, ["", ""]);
    assert_eq!(reset(&site, at(SERVER, PORT)), ErrorKind::ConnectionReset);
    wait_for_ended([&near, &far], "refused", 1);
}

/// The broker (the daemon on the server's host) connects to the server, and has eight usable source ports. A port must
/// be usable again immediately after its connection has ended. No two connections may use one port at the same time.
#[test]
fn ports_of_closed_connections_are_reused_at_once() {
    let Some(site) = GraftSite::new("ports") else { return };
    inside(&site.namespaces[1], || {
        fs::write("/proc/sys/net/ipv4/ip_local_port_range", "40000 40009").unwrap();
        fs::write("/proc/sys/net/ipv4/ip_local_reserved_ports", "40003-40004").unwrap();
    });
    let listener = site.listen();
    let [near, far] = warm(&site, ["", ""]);
    let mut ports = BTreeSet::new();
    let mut seen = |server: &TcpStream| {
        // `ss` shows the source port of the daemon's connection to the server. The server process itself sees the
        // client's address.
        let output = site.command(1, "ss").args(["-Htn", "state", "established"]).output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        let own = format!(":{}", server.local_addr().unwrap().port());
        let pairs = text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
        ports.extend(pairs.filter(|ends| ends[2].ends_with(&own)).map(|ends| ends[3].to_owned()));
    };
    for number in 0..40_usize {
        let (mut client, mut server, client_seen) = connect(&site, &listener);
        seen(&server);
        assert_eq!(client_seen, client.local_addr().unwrap());
        client.write_all(&[number as u8; 100]).unwrap();
        client.shutdown(Shutdown::Write).unwrap();
        assert_eq!(read_all(&server), [number as u8; 100]);
        server.write_all(b"done").unwrap();
        drop(server);
        assert_eq!(read_all(&client), b"done");
    }
    // All connections must have ended, so that eight new ones find a free port each.
    wait_for_end(&near, &far);
    let live: Vec<_> = (0..8).map(|_| connect(&site, &listener)).collect();
    // The ninth connection finds no free source port, and is reset.
    let refused = reset(&site, at(SERVER, PORT));
    assert_eq!(refused, ErrorKind::ConnectionReset);
    for (client, server, _) in &live {
        seen(server);
        exchange(client, server, 1000);
    }
    assert_eq!(ports.len(), 8, "{ports:?}");
    wait_for_ended([&far], "unreachable", 1);
}

#[test]
fn connection_over_the_tunnel_connection_limit_uses_plain_tcp() {
    let Some(site) = GraftSite::new("room") else { return };
    let [near, _far] = warm(&site, ["connections = 4", ""]);
    let listener = site.listen();
    let carried: Vec<_> = (0..4).map(|_| connect(&site, &listener)).collect();
    wait_for_state(&near, "full");
    let (here, there, seen) = connect(&site, &listener);
    assert_eq!(seen.ip().to_string(), CLIENT);
    exchange(&here, &there, 1000);
    assert_eq!((verdict(&near, "redirected"), verdict(&near, "cold"), carry(&near).connections), (4, 1, 4));
    drop(carried);
    wait_for_state(&near, "warm");
}

/// The carrier (the connection between the daemons) does not deliver packets any more. The first tunnelled connection
/// detects this, and later connections go over plain TCP. When the carrier delivers packets again, the first connection
/// continues.
#[test]
fn carrier_that_delivers_nothing_is_avoided_until_it_works_again() {
    let Some(site) = GraftSite::new("blocked") else { return };
    let [near, _far] = warm(&site, ["", ""]);
    let listener = site.listen();
    let drops = format!("udp dport {CARRIERS} drop");
    if !middlebox(&site.namespaces[1], BEFORE, &[&drops]) {
        println!("SKIP carrier_that_delivers_nothing_is_avoided_until_it_works_again: no nft");
        return;
    }
    let mut first = site.try_connect(at(SERVER, PORT)).unwrap();
    first.write_all(b"first").unwrap();
    wait_for_state(&near, "suspect");
    let (here, there, seen) = connect(&site, &listener);
    assert_eq!(seen.ip().to_string(), CLIENT);
    exchange(&here, &there, 100_000);
    assert_eq!((verdict(&near, "redirected"), verdict(&near, "cold")), (1, 1));
    assert!(flush(&site.namespaces[1]));
    let (mut there, seen) = listener.accept().unwrap();
    there.set_read_timeout(Some(LONG)).unwrap();
    there.read_exact(&mut [0; 5]).unwrap();
    assert_eq!(seen.ip().to_string(), CLIENT);
    wait_for_state(&near, "warm");
}

/// Packets pass from the server to the client, and none pass the other way. The server's data, and a QUIC peer's
/// keep-alives, are no answers to what the client asks.
#[test]
fn carrier_that_delivers_in_one_direction_only_is_suspect() {
    let Some(site) = GraftSite::new("oneway") else { return };
    let [near, _far] = warm(&site, ["", ""]);
    let listener = site.listen();
    let (_here, mut there, _) = connect(&site, &listener);
    let is_over = AtomicBool::new(false);
    thread::scope(|threads| {
        threads.spawn(|| {
            while !is_over.load(Ordering::Relaxed) && there.write_all(b"data").is_ok() {
                thread::sleep(Duration::from_millis(20)); // exact: something arrives before an answer is overdue
            }
        });
        let _stops = StopOnDrop(&is_over);
        if middlebox(&site.namespaces[1], BEFORE, &[&format!("udp dport {CARRIERS} drop")]) {
            let mut first = site.try_connect(at(SERVER, PORT)).unwrap();
            first.write_all(b"first").unwrap();
            // The state passes when the carrier ends, so the log is read.
            wait_until("a suspicion", || near.log(), |log| log.contains("a carrier is suspected"));
        } else {
            println!("SKIP carrier_that_delivers_in_one_direction_only_is_suspect: no nft");
        }
    });
}

#[test]
fn reload_cannot_change_tunnel_limits_and_keeps_open_connections() {
    let Some(site) = GraftSite::new("limits") else { return };
    let [near, far] = warm(&site, ["", ""]);
    let listener = site.listen();
    let (here, there, _) = connect(&site, &listener);
    let text = std::fs::read_to_string(site.path("graft1.toml")).unwrap();
    let text = text.split_once('\n').unwrap().1.to_owned();
    site.configure_on(1, &text.replace("[carry]", "[carry]\nconnections = 7"));
    assert!(far.fail(&["reload"]).contains("[carry] cannot change while the daemon runs"));
    exchange(&here, &there, 100_000);
    // A reload of settings without `[carry]` ends the broker (the daemon's proxy). A reload of the old settings starts
    // it again.
    let without = "[agreement]\nkey = \"host0.key\"\n";
    let before = std::fs::read_to_string(site.path("graft0.toml")).unwrap();
    site.configure_on(0, without);
    near.succeed(&["reload"]);
    wait_for("the end of its broker", || near.status().carry.is_none());
    let (here, there, seen) = connect(&site, &listener);
    assert_eq!((seen.ip().to_string(), here.local_addr().unwrap()), (CLIENT.to_owned(), seen));
    exchange(&here, &there, 100_000);
    site.configure_on(0, before.split_once('\n').unwrap().1);
    near.succeed(&["reload"]);
    wait_for("another broker", || near.status().carry.is_some());
    wait_for_state(&near, "warm");
    let (here, there, _) = connect(&site, &listener);
    exchange(&here, &there, 100_000);
    assert_eq!(verdict(&near, "redirected"), 1);
}

#[test]
fn killed_daemon_resets_tunnelled_connections_and_later_use_plain_tcp() {
    let Some(site) = GraftSite::new("killed") else { return };
    let [near, _far] = warm(&site, ["", ""]);
    let listener = site.listen();
    let (mut here, mut there, _) = connect(&site, &listener);
    here.write_all(b"half of ").unwrap();
    there.read_exact(&mut [0; 8]).unwrap();
    there.write_all(b"half of ").unwrap();
    here.read_exact(&mut [0; 8]).unwrap();
    near.kill();
    // The connection ends with a reset at both ends, so no end can mistake the incomplete data for all of the data.
    assert_eq!(here.read(&mut [0]).unwrap_err().kind(), ErrorKind::ConnectionReset);
    let (next, other, seen) = connect(&site, &listener);
    assert_eq!((seen.ip().to_string(), next.local_addr().unwrap()), (CLIENT.to_owned(), seen));
    assert_eq!(next.peer_addr().unwrap(), at(SERVER, PORT));
    exchange(&next, &other, 100_000);
    assert_eq!(there.read(&mut [0]).unwrap_err().kind(), ErrorKind::ConnectionReset);
}

/// A peer's broker may find a fault in the parser of its messages. So the process that runs it has no CAP_BPF, and the
/// process that loads the programs of the rules has no socket by which a host could reach it.
#[test]
fn process_that_tunnels_connections_cannot_load_bpf_programs() {
    let Some(site) = GraftSite::new("rights") else { return };
    let ends = warm(&site, ["", ""]);
    let listener = site.listen();
    let (here, there, _) = connect(&site, &listener);
    for daemon in &ends {
        let all = daemon.succeed(&["status", "--json"]);
        let (capabilities, is_confined) = privileges(part(&all, "tunnel"));
        let kept = NET_BIND_SERVICE | NET_ADMIN | NET_RAW | SETUID | SETGID;
        assert_eq!((is_confined, capabilities & !kept), (true, 0), "{capabilities:x}");
        assert!(network_sockets(part(&all, "tunnel")) > 0);
        assert_eq!(network_sockets(part(&all, "grafts")), 0);
    }
    exchange(&here, &there, 100_000);
}

/// The process that holds the rules may end or hang: connections stay in the tunnel, and new ones are tunnelled.
#[test]
fn tunnelled_connections_outlive_the_process_that_holds_the_rules() {
    let Some(site) = GraftSite::new("outlive") else { return };
    let [near, far] = warm(&site, ["", ""]);
    let listener = site.listen();
    let (mut here, mut there, _) = connect(&site, &listener);
    let mut echo = || {
        here.write_all(b"question").unwrap();
        there.read_exact(&mut [0; 8]).unwrap();
        there.write_all(b"answer").unwrap();
        here.read_exact(&mut [0; 6]).unwrap();
    };
    for daemon in [&near, &far] {
        let all = daemon.succeed(&["status", "--json"]);
        signal(part(&all, "grafts"), Signal::SIGKILL);
        echo();
        let (next, other) = connect_seen(&site, &listener, CLIENT);
        exchange(&next, &other, 100_000);
        // exact: the process of the tunnel was not started again
        assert_eq!(part(&daemon.succeed(&["status", "--json"]), "tunnel"), part(&all, "tunnel"));
        let again = || part_state(daemon, "grafts");
        wait_until("the part to serve again", again, |state| state == "serving");
        let hanging = part(&daemon.succeed(&["status", "--json"]), "grafts");
        pause(hanging);
        let (next, other) = connect_seen(&site, &listener, CLIENT);
        exchange(&next, &other, 100_000);
        echo();
        signal(hanging, Signal::SIGCONT);
    }
    // The process of the rules gets reports from the process of the tunnel again.
    let (here, _there, _) = connect(&site, &listener);
    let ends = format!("{}-{}", here.local_addr().unwrap(), here.peer_addr().unwrap());
    wait_for("what is known of a new connection", || near.verb(&["why", &ends]).status.success());
    assert_eq!(verdict(&near, "redirected"), 6);
}

/// While the process of the tunnel does not run, connections are plain TCP. Its rules come back with the next process.
#[test]
fn killed_process_of_the_tunnel_resets_its_connections_and_returns() {
    let Some(site) = GraftSite::new("returns") else { return };
    let [near, far] = warm(&site, ["", ""]);
    let listener = site.listen();
    for daemon in [&near, &far] {
        let (mut here, mut there, _) = connect(&site, &listener);
        here.write_all(b"half of ").unwrap();
        there.read_exact(&mut [0; 8]).unwrap();
        let all = daemon.succeed(&["status", "--json"]);
        signal(part(&all, "tunnel"), Signal::SIGKILL);
        assert_eq!(here.read(&mut [0]).unwrap_err().kind(), ErrorKind::ConnectionReset);
        assert_eq!(there.read(&mut [0]).unwrap_err().kind(), ErrorKind::ConnectionReset);
        let (next, other) = connect_seen(&site, &listener, CLIENT);
        exchange(&next, &other, 100_000);
        wait_until("the part to serve again", || part_state(daemon, "tunnel"), |state| state == "serving");
        wait_for_state(&near, "warm");
        // exact: the process of the rules was not started again
        assert_eq!(part(&daemon.succeed(&["status", "--json"]), "grafts"), part(&all, "grafts"));
        let before = verdict(&near, "redirected");
        let (next, other) = connect_seen(&site, &listener, CLIENT);
        exchange(&next, &other, 100_000);
        assert_eq!(verdict(&near, "redirected"), before + 1);
    }
}

/// curl and a web server run unmodified, each as a command of `graft hook`.
#[test]
fn graft_hook_tunnels_connections_of_a_command() {
    let Some(site) = GraftSite::new("hook") else { return };
    const WEB: u16 = 7180;
    let [near, far] = warm(&site, ["", ""]);
    let page = noise(6, 5_000_000);
    std::fs::write(site.path("page"), &page).unwrap();
    let hooked = |side: usize, more: &[&str]| {
        let mut command = site.command(side, env!("CARGO_BIN_EXE_millrace"));
        let socket = site.path(&format!("graft{side}.sock"));
        command.args(["graft", "hook", "--port", &WEB.to_string(), "--socket"]).arg(socket).args(more);
        command
    };
    let log = site.path("web.log");
    let mut web = hooked(1, &["--serve", "--", "python3", "-u", "-m", "http.server", "7180"]);
    web.current_dir(site.directory.path()).stderr(std::fs::File::create(&log).unwrap()).stdout(Stdio::null());
    let mut web = site.spawn(1, web);
    let url = format!("http://{SERVER}:{WEB}/page");
    wait_for("web server", || site.try_connect(at(SERVER, WEB)).ok());
    assert_eq!(verdict(&near, "redirected"), 0, "a connection outside the command was tunnelled");
    let mut curl =
        hooked(0, &["--", "curl", "-fsS", "--max-time", "120", "-o", "got", "-w", "%{remote_ip}", &url]);
    curl.current_dir(site.directory.path()).stdout(Stdio::piped());
    let output = site.spawn(0, curl).wait_with_output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(String::from_utf8(output.stdout).unwrap(), SERVER);
    assert_eq!(hash(&std::fs::read(site.path("got")).unwrap()), hash(&page));
    assert_eq!(verdict(&near, "redirected"), 1);
    wait_for_ended([&far], "done", 1);
    // The web server logs a request before it answers, so the log is complete here.
    let seen = std::fs::read_to_string(&log).unwrap();
    assert!(seen.contains(&format!("{CLIENT} - -")) && !seen.contains(&format!("{SERVER} - -")), "{seen}");
    // The exit code of `graft hook` is that of its command, and the hook's cgroup is removed.
    let mut fails = hooked(0, &["--", "sh", "-c", "exit 7"]);
    fails.stdin(Stdio::null());
    assert_eq!(site.spawn(0, fails).wait().unwrap().code(), Some(7));
    let left = |side: usize| {
        let children = std::fs::read_dir(site.cgroup(side)).unwrap().filter_map(Result::ok);
        children.filter(|child| child.file_name().to_string_lossy().starts_with("millrace-hook")).count()
    };
    wait_for("the end of curl's hook", || left(0) == 0);
    assert_eq!(verdict(&near, "redirected"), 1, "counters were lost with the hook");
    assert_eq!(left(1), 1);
    web.kill().unwrap();
    web.wait().unwrap();
    wait_for("the end of the server's hook", || left(1) == 0);
}

/// Returns a command that runs Python code on the client's host, outside of the settings' cgroup. Its connections to this
/// port are tunnelled.
fn hooked_python(site: &GraftSite, port: u16, code: &str) -> Command {
    let mut command = site.command(0, env!("CARGO_BIN_EXE_millrace"));
    command.args(["graft", "hook", "--port", &port.to_string(), "--socket"]);
    command.arg(site.path("graft0.sock")).args(["--", "python3", "-c", code]);
    command
}

/// Rules of the settings hold in the cgroup of the settings, and those of a command in the command's cgroup, wherever it
/// is.
#[test]
fn graft_hook_tunnels_only_its_port_for_a_command_outside_the_cgroup_of_the_settings() {
    let Some(site) = GraftSite::new("outside") else { return };
    const OTHER: u16 = 7181;
    let other = rule("server", OTHER).replace("name = \"server\"", "name = \"other\"");
    let [near, _far] = warm(&site, ["", &other]);
    let listeners = [PORT, OTHER].map(|port| site.listen_on(at(SERVER, port)));
    let connect = |port: u16| {
        let code = format!("import socket; socket.create_connection(('{SERVER}', {port})).recv(1)");
        hooked_python(&site, OTHER, &code).stdin(Stdio::null()).spawn().unwrap()
    };
    for (listener, redirected) in listeners.iter().zip([0, 1]) {
        let mut command = connect(listener.local_addr().unwrap().port());
        let (there, seen) = listener.accept().unwrap();
        assert_eq!((seen.ip().to_string(), verdict(&near, "redirected")), (CLIENT.to_owned(), redirected));
        drop(there);
        assert!(command.wait().unwrap().success());
    }
    // The rules of a command end with it, and those of the settings stay.
    let (here, there) = connect_seen(&site, &listeners[0], CLIENT);
    exchange(&here, &there, 100_000);
    assert_eq!(verdict(&near, "redirected"), 2);
}

/// The rules of a command return when the process that tunnels its connections is started again.
#[test]
fn graft_hook_tunnels_connections_of_a_command_after_a_restart_of_the_tunnel() {
    let Some(site) = GraftSite::new("again") else { return };
    const OTHER: u16 = 7182;
    let other = rule("server", OTHER).replace("name = \"server\"", "name = \"other\"");
    let [near, _far] = warm(&site, ["", &other]);
    let listener = site.listen_on(at(SERVER, OTHER));
    let code = format!(
        "import socket, sys\nfor line in sys.stdin: socket.create_connection(('{SERVER}', {OTHER})).recv(1)"
    );
    let mut command = hooked_python(&site, OTHER, &code).stdin(Stdio::piped()).spawn().unwrap();
    let mut lines = command.stdin.take().unwrap();
    // Lets the command connect, and returns how many of its connections the present process has tunnelled.
    let mut connect = || {
        lines.write_all(b"connect\n").unwrap();
        drop(listener.accept().unwrap());
        verdict(&near, "redirected")
    };
    assert_eq!(connect(), 1);
    signal(part(&near.succeed(&["status", "--json"]), "tunnel"), Signal::SIGKILL);
    wait_until(
        "a further process to serve",
        || near.succeed(&["status", "--json"]),
        |status| {
            let status: control::Status = serde_json::from_str(status).unwrap();
            status.parts.iter().any(|it| it.name == "tunnel" && it.restarts == 1 && it.state == "serving")
        },
    );
    wait_for_state(&near, "warm");
    wait_for("a tunnelled connection", || connect() > 0);
    drop(lines);
    assert!(command.wait().unwrap().success());
}
