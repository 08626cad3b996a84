//! The same, sealed.

use std::os::fd::{AsRawFd, OwnedFd};

use nix::sys::socket::{
    AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, recv, setsockopt, socket, sockopt,
};

use super::*;

fn start(site: &Site, side: usize, line: &str) -> Runtime {
    let settings = settings_with(side, GRAFTS, "once", line);
    site.inside(side, || Runtime::start(settings)).expect("a runtime")
}

fn have_keys(site: &Site, runtimes: &mut [Runtime; 2]) {
    let until = Instant::now() + LONG;
    while !runtimes.iter().all(Runtime::is_open) {
        assert!(Instant::now() < until, "they do not agree on keys");
        work(site, runtimes);
    }
}

fn work(site: &Site, runtimes: &mut [Runtime; 2]) -> Vec<Event> {
    let mut events = Vec::new();
    for (side, runtime) in runtimes.iter_mut().enumerate() {
        events.extend(site.inside(side, || runtime.step(Duration::from_millis(5))).expect("a step"));
    }
    events
}

/// What passes on the cable, from this side: what comes in, is seen behind XDP, which has opened it.
struct Capture(OwnedFd);

impl Capture {
    fn new(site: &Site, side: usize) -> Self {
        let open = || {
            let (family, kind) = (AddressFamily::Packet, SockType::Raw);
            let flags = SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC;
            let socket = socket(family, kind, flags, SockProtocol::EthAll).expect("a packet socket");
            setsockopt(&socket, sockopt::RcvBufForce, &(64 << 20)).expect("room");
            socket
        };
        Self(site.inside(side, open))
    }

    /// Payloads of UDP from the side's address.
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

/// All of them arrive as they were sent, each once, while `meddle` is called between them.
fn assert_all_pass(
    site: &Site,
    runtimes: &mut [Runtime; 2],
    sockets: [&UdpSocket; 2],
    count: u32,
    mut meddle: impl FnMut(u32, &mut [Runtime; 2]),
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
            work(site, runtimes);
        }
    }
}

/// Lists are swapped and keys renewed under way; on the wire there is nothing to be read, and nothing twice.
#[test]
fn what_passes_is_sealed() {
    for cipher in ["chacha20-poly1305", "aes-128-gcm"] {
        let Some(site) = Site::new("sealed") else { return };
        let line = format!("cipher = \"{cipher}\"");
        let mut runtimes = [0, 1].map(|side| start(&site, side, &line));
        let [near, far] = site.sockets();
        let capture = Capture::new(&site, 0);
        // Before there are keys nothing leaves.
        near.send(b"too early, and nobody else is to read this").expect("taken");
        have_keys(&site, &mut runtimes);
        let mut renewed = 0;
        let meddle = |number: u32, runtimes: &mut [Runtime; 2]| {
            let graft = if number.is_multiple_of(400) { "complete" } else { "once" };
            if number.is_multiple_of(200) {
                // The one before may not be over.
                let _ = site.inside(0, || runtimes[0].swap("s", graft));
            }
            if number % 500 == 499 {
                let (side, now) = (renewed % 2, runtimes[renewed % 2].now());
                let live = runtimes[side].live.values_mut().next().expect("a session");
                live.sealed.as_mut().expect("sealed").agreement.renew(now, [number as u8; 32]);
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

/// One end ends before it is started again.
fn restart(site: &Site, [one, other]: [Runtime; 2], side: usize) -> [Runtime; 2] {
    if side == 0 {
        drop(one);
        [start(site, 0, ""), other]
    } else {
        drop(other);
        [one, start(site, 1, "")]
    }
}

/// Each end in turn, and both; every time with keys that were never used.
#[test]
fn ends_that_are_started_anew_get_other_keys() {
    let Some(site) = Site::new("sealed-anew") else { return };
    let mut runtimes = [0, 1].map(|side| start(&site, side, ""));
    let [near, far] = site.sockets();
    let capture = Capture::new(&site, 0);
    let mut sealed = Vec::new();
    for sides in [&[][..], &[0], &[1], &[0, 1]] {
        for &side in sides {
            runtimes = restart(&site, runtimes, side);
        }
        have_keys(&site, &mut runtimes);
        until_it_passes(&site, &mut runtimes, [&near, &far]);
        assert_all_pass(&site, &mut runtimes, [&near, &far], 50, |_, _| ());
        let is_word = |payload: &Vec<u8>| payload[payload.len() - 7] & 2 != 0;
        sealed.extend(capture.payloads(0).into_iter().filter(|payload| !is_word(payload)));
    }
    assert!(sealed.len() > 200);
    let different: std::collections::BTreeSet<_> = sealed.iter().collect();
    assert_eq!(different.len(), sealed.len(), "no datagram is like another one, whenever it was sent");
}

/// An end may have keys that the other one, started anew, has not; it learns of that within seconds.
fn until_it_passes(site: &Site, runtimes: &mut [Runtime; 2], [near, far]: [&UdpSocket; 2]) {
    let until = Instant::now() + LONG;
    let mut buffer = [0; 100];
    far.set_read_timeout(Some(Duration::from_millis(20))).expect("a time limit");
    while {
        near.send(b"the same message each time").expect("sent");
        far.recv(&mut buffer).is_err()
    } {
        assert!(Instant::now() < until, "nothing passes");
        work(site, runtimes);
    }
    while far.recv(&mut buffer).is_ok() {}
    far.set_read_timeout(Some(LONG)).expect("a time limit");
}

/// Nothing passes, and it is said why.
#[test]
fn ends_that_are_not_alike_do_not_understand_each_other() {
    let Some(site) = Site::new("sealed-other") else { return };
    let mut other_key = settings_with(1, GRAFTS, "once", "");
    other_key.sessions[0].key = [7; 16];
    let table = [
        (settings_with(1, GRAFTS, "once", "cipher = \"aes-128-gcm\""), "has another cipher"),
        (other_key, "has another key"),
        (settings_with(1, GRAFTS, "once", "clear = true"), "has it in clear"),
    ];
    let sockets = site.sockets();
    for (settings, why) in table {
        let far = site.inside(1, || Runtime::start(settings)).expect("a runtime");
        let mut runtimes = [start(&site, 0, ""), far];
        let until = Instant::now() + LONG;
        let said = |runtime: &mut Runtime| now(runtime).trouble.concat();
        while !said(&mut runtimes[0]).contains(why) {
            assert!(Instant::now() < until, "{}", said(&mut runtimes[0]));
            work(&site, &mut runtimes);
        }
        for (from, to) in [(0, 1), (1, 0)] {
            sockets[from].send(b"to nobody").expect("taken");
            sockets[to].set_nonblocking(true).expect("a socket");
            work(&site, &mut runtimes);
            assert!(sockets[to].recv(&mut [0; 100]).is_err(), "{why}");
        }
        assert!(!runtimes[0].is_open());
    }
    let clear = settings_with(0, GRAFTS, "once", "clear = true");
    let mut runtime = start(&site, 0, "");
    let error = site.inside(0, || runtime.apply(clear)).expect_err("it would be in clear").to_string();
    assert!(error.contains("cipher, protocol and paths do not change"), "{error}");
}
