//! Tests of sealed sessions between two runtimes.

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};

use nix::sys::socket::{
    AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, recv, setsockopt, socket, sockopt,
};

use super::*;

fn start(site: &RuntimeSite, side: usize, line: &str) -> PacketRuntime {
    let settings = settings_with(side, GRAFTS, "once", line);
    site.inside(side, || PacketRuntime::start(settings)).expect("a runtime")
}

/// Captures the packets on the veth link at one host. Incoming packets are captured after XDP, which has already opened
/// them.
struct CableCapture(OwnedFd);

impl CableCapture {
    fn new(site: &RuntimeSite, side: usize) -> Self {
        let open = || {
            let family = AddressFamily::Packet;
            let kind = SockType::Raw;
            let flags = SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC;
            let socket = socket(family, kind, flags, SockProtocol::EthAll).expect("a packet socket");
            setsockopt(&socket, sockopt::RcvBufForce, &(64 << 20)).expect("room");
            socket
        };
        Self(site.inside(side, open))
    }

    /// Returns the payloads of UDP packets from the host's own address.
    fn payloads(&self, side: usize) -> Vec<Vec<u8>> {
        let mut buffer = [0; 4096];
        let mut payloads = Vec::new();
        while let Ok(bytes) = recv(self.0.as_raw_fd(), &mut buffer, MsgFlags::empty()) {
            let frame = &buffer[..bytes];
            if bytes > 42 && frame[12..14] == [8, 0] && frame[23] == 17 && frame[29] == side as u8 + 1 {
                payloads.push(frame[42..].to_vec());
            }
        }
        payloads
    }
}

fn message(number: u32) -> Vec<u8> {
    let text = format!("message {number}: nobody else is to read this. ");
    text.repeat(1 + number as usize % 20).into_bytes()
}

/// Checks that all datagrams arrive once and unchanged, while `meddle` is called between two datagrams.
fn assert_all_pass(
    site: &RuntimeSite,
    runtimes: &mut [PacketRuntime; 2],
    sockets: [&UdpSocket; 2],
    count: u32,
    mut meddle: impl FnMut(u32, &mut [PacketRuntime; 2]),
) {
    let mut buffer = [0; 2048];
    for number in 0..count {
        meddle(number, runtimes);
        sockets[0].send(&message(number)).expect("sent");
        let bytes = sockets[1].recv(&mut buffer).unwrap_or_else(|error| panic!("message {number}: {error}"));
        assert!(
            buffer[..bytes] == message(number),
            "message {number} is another one: {} {:?}",
            bytes,
            String::from_utf8_lossy(&buffer[..bytes])
        );
        if number.is_multiple_of(8) {
            step(site, runtimes);
        }
    }
}

/// Function lists change and keys are renewed while datagrams pass. No payload on the link can be read, and no packet
/// occurs twice.
#[test]
fn datagrams_on_the_wire_are_sealed() {
    for cipher in ["chacha20-poly1305", "aes-128-gcm"] {
        let Some(site) = RuntimeSite::new("sealed") else { return };
        let line = format!("cipher = \"{cipher}\"");
        let mut runtimes = [0, 1].map(|side| start(&site, side, &line));
        let [near, far] = site.sockets();
        let capture = CableCapture::new(&site, 0);
        // No datagram leaves before both ends have keys.
        near.send(b"too early, and nobody else is to read this").expect("taken");
        have_keys(&site, &mut runtimes);
        let mut renewed = 0;
        let meddle = |number: u32, runtimes: &mut [PacketRuntime; 2]| {
            let graft = if number.is_multiple_of(400) { "complete" } else { "once" };
            if number.is_multiple_of(200) {
                // The session refuses to change its function list until packets of its previous function list can no
                // longer be in flight.
                let _ = site.inside(0, || runtimes[0].swap("s", graft));
            }
            if number % 500 == 499 {
                let side = renewed % 2;
                let now = runtimes[renewed % 2].now();
                let live = runtimes[side].live.values_mut().next().expect("a session");
                let line = live.keying.line.as_mut().expect("connected");
                line.agreement.renew(now, [number as u8; 32]);
                renewed += 1;
            }
        };
        assert_all_pass(&site, &mut runtimes, [&near, &far], 3000, meddle);
        assert_all_pass(&site, &mut runtimes, [&far, &near], 100, |_, _| ());
        let payloads = capture.payloads(0);
        assert!(payloads.len() > 3000);
        let has_text = |payload: &&Vec<u8>| payload.windows(9).any(|window| window == b"nobody el");
        assert_eq!(payloads.iter().filter(has_text).count(), 0);
        let status = runtimes.each_mut().map(now);
        for status in &status {
            let session = &status.sessions[0];
            assert_eq!((session.sealed.as_str(), session.has_keys), (cipher, true));
            assert_eq!(status.trouble, Vec::<String>::new());
            for reason in ["unopened", "replayed", "malformed", "forged"] {
                assert_eq!(session.packets.get(reason), None, "{reason}");
            }
        }
        assert_eq!(status[0].sessions[0].packets["no-keys"], 1, "the first one");
    }
}

/// Drops one runtime and starts it again.
fn restart(site: &RuntimeSite, [one, other]: [PacketRuntime; 2], side: usize) -> [PacketRuntime; 2] {
    if side == 0 {
        drop(one);
        [start(site, 0, ""), other]
    } else {
        drop(other);
        [one, start(site, 1, "")]
    }
}

/// First each runtime restarts in turn, and then both restart together. The keys are new after each restart.
#[test]
fn restarted_ends_get_new_keys() {
    let Some(site) = RuntimeSite::new("sealed-anew") else { return };
    let mut runtimes = [0, 1].map(|side| start(&site, side, ""));
    let [near, far] = site.sockets();
    let capture = CableCapture::new(&site, 0);
    let mut sealed = Vec::new();
    for sides in [&[][..], &[0], &[1], &[0, 1]] {
        for &side in sides {
            runtimes = restart(&site, runtimes, side);
        }
        have_keys(&site, &mut runtimes);
        // Each end learns that the other one was restarted, although no application sends anything.
        let until = Instant::now() + LONG;
        let know = |runtimes: &[PacketRuntime; 2], side: usize| {
            runtimes[side].live.values().all(|live| live.peer == Some(runtimes[1 - side].started))
        };
        while !know(&runtimes, 0) || !know(&runtimes, 1) {
            assert!(Instant::now() < until, "they do not know of each other");
            step(&site, &mut runtimes);
        }
        until_it_passes(&site, &mut runtimes, [&near, &far]);
        assert_all_pass(&site, &mut runtimes, [&near, &far], 50, |_, _| ());
        sealed.extend(capture.payloads(0));
    }
    assert!(sealed.len() > 200);
    let different: std::collections::BTreeSet<_> = sealed.iter().collect();
    assert_eq!(different.len(), sealed.len(), "no datagram is like another one, whenever it was sent");
}

/// Waits until datagrams pass. An end may still have keys that the other end has lost in a restart, and learns of the
/// restart within seconds.
fn until_it_passes(site: &RuntimeSite, runtimes: &mut [PacketRuntime; 2], [near, far]: [&UdpSocket; 2]) {
    let until = Instant::now() + LONG;
    let mut buffer = [0; 100];
    far.set_read_timeout(Some(Duration::from_millis(20))).expect("a time limit");
    while {
        near.send(b"the same message each time").expect("sent");
        far.recv(&mut buffer).is_err()
    } {
        assert!(Instant::now() < until, "nothing passes");
        step(site, runtimes);
    }
    while far.recv(&mut buffer).is_ok() {}
    far.set_read_timeout(Some(LONG)).expect("a time limit");
}

/// No datagram passes between ends with different settings, and the status says why.
#[test]
fn hosts_with_different_session_settings_exchange_no_datagram() {
    let Some(site) = RuntimeSite::new("sealed-other") else { return };
    let mut other_session = settings_with(1, GRAFTS, "once", "");
    other_session.sessions[0].ends.local.set_port(7001);
    let table = [
        (settings_with(1, GRAFTS, "once", "cipher = \"aes-128-gcm\""), "has another cipher"),
        (other_session, "does not have this session"),
        (settings_with(1, GRAFTS, "once", "clear = true"), "has another cipher"),
    ];
    let sockets = site.sockets();
    for (settings, why) in table {
        let far = site.inside(1, || PacketRuntime::start(settings)).expect("a runtime");
        let mut runtimes = [start(&site, 0, ""), far];
        let until = Instant::now() + LONG;
        let said = |runtime: &mut PacketRuntime| now(runtime).trouble.concat();
        while !said(&mut runtimes[0]).contains(why) {
            assert!(Instant::now() < until, "{}", said(&mut runtimes[0]));
            step(&site, &mut runtimes);
        }
        for (from, to) in [(0, 1), (1, 0)] {
            sockets[from].send(b"to nobody").expect("taken");
            sockets[to].set_nonblocking(true).expect("a socket");
            step(&site, &mut runtimes);
            assert!(sockets[to].recv(&mut [0; 100]).is_err(), "{why}");
        }
        assert!(!runtimes[0].is_open());
    }
    let clear = settings_with(0, GRAFTS, "once", "clear = true");
    let mut runtime = start(&site, 0, "");
    let error = site.inside(0, || runtime.apply(clear)).expect_err("it would be in clear").to_string();
    assert!(error.contains("cipher and paths cannot change"), "{error}");
}

/// Only the peer of a session may change the session's keys.
#[test]
fn key_message_about_another_peers_session_is_ignored() {
    let Some(site) = RuntimeSite::new("sealed-whose") else { return };
    let mut runtimes = [0, 1].map(|side| start(&site, side, ""));
    connect(&mut runtimes);
    for side in [0, 1] {
        for (_, message) in runtimes[side].take_key_messages() {
            runtimes[1 - side].receive_key_message("stranger", &message).expect("passed over");
        }
    }
    assert!(runtimes.iter_mut().all(|runtime| runtime.take_key_messages().is_empty() && !runtime.is_open()));
    have_keys(&site, &mut runtimes);
}

/// New connections replace the present one while datagrams pass in both directions without a pause. Each datagram
/// arrives once.
#[test]
fn no_datagram_is_lost_when_keys_are_rolled_over() {
    const LEAST: u64 = 50_000;
    const ROLLOVERS: u64 = 5;
    let Some(site) = RuntimeSite::new("rolled") else { return };
    for cipher in ["chacha20-poly1305", "aes-128-gcm"] {
        let mut runtimes = [0, 1].map(|side| start(&site, side, &format!("cipher = \"{cipher}\"")));
        have_keys(&site, &mut runtimes);
        // Discards the events that happened before the new connections.
        step(&site, &mut runtimes);
        let sockets = site.sockets();
        let stop = AtomicBool::new(false);
        let sent = std::thread::scope(|scope| {
            let threads = [0, 1].map(|from| {
                let sends = &sockets[from];
                let receives = &sockets[1 - from];
                let stop = &stop;
                scope.spawn(move || exchange(sends, receives, LEAST, stop))
            });
            let stops = StopOnDrop(&stop);
            let until = Instant::now() + LONG;
            for rollover in 0..ROLLOVERS {
                connect(&mut runtimes);
                let mut keys = 0;
                while keys < 2 {
                    let goes_on = threads.iter().all(|thread| !thread.is_finished());
                    assert!(goes_on && Instant::now() < until, "datagrams stopped at rollover {rollover}");
                    let events = step(&site, &mut runtimes);
                    keys += events.iter().filter(|event| matches!(event, PacketEvent::Keys { .. })).count();
                }
            }
            drop(stops);
            threads.map(|thread| thread.join().expect("all came"))
        });
        println!("{cipher}: {sent:?} datagrams, {ROLLOVERS} rollovers");
        for (side, runtime) in runtimes.iter_mut().enumerate() {
            let packets = now(runtime).sessions[0].packets.clone();
            assert_eq!((packets["sent"], packets["delivered"]), (sent[side], sent[1 - side]), "{packets:?}");
            for reason in ["unopened", "replayed", "malformed", "forged", "no-keys"] {
                assert_eq!(packets.get(reason), None, "{reason}");
            }
        }
    }
}

/// Sends at least `least` numbered datagrams, and more until `stop` is set, with some always in flight. Returns how
/// many were sent, once each has arrived once.
fn exchange(from: &UdpSocket, to: &UdpSocket, least: u64, stop: &AtomicBool) -> u64 {
    const UNDER_WAY: u64 = 32;
    let mut sent = 0;
    let mut came = BTreeSet::new();
    let mut buffer = [0; 100];
    loop {
        let goes_on = sent < least || !stop.load(Ordering::Relaxed);
        if goes_on && sent - (came.len() as u64) < UNDER_WAY {
            from.send(&u64::to_be_bytes(sent)).expect("sent");
            sent += 1;
            continue;
        }
        if came.len() as u64 == sent {
            return sent;
        }
        let bytes =
            to.recv(&mut buffer).unwrap_or_else(|error| panic!("{sent} sent, {}: {error}", came.len()));
        let number = u64::from_be_bytes(buffer[..bytes].try_into().expect("a number"));
        assert!(number < sent && came.insert(number), "{number} came twice, or was never sent");
    }
}
