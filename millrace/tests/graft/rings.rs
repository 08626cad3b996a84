//! Rings of sessions: what comes passes the socket, and comes by it again wherever there can be no ring.

use std::{
    os::fd::OwnedFd,
    thread,
    time::{Duration, Instant},
};

use millrace_base::control;
use millrace_graft::message::{
    By, Error, Event, Listener, Preconnection, Received, Receives, Session, Want,
    wire::{Request, Word},
};
use millrace_kernel::xsk;
use nix::sys::signal::Signal;

use crate::{
    messages::{
        Capture, GRAFTS, Host, accept, asks, event, hosts, message, socket, unprivileged, wait_for_keys,
        wait_for_silence,
    },
    site::{CLIENT, CLIENT6, LONG, SERVER, SERVER6, Site, inside, wait_for, wait_until},
};

const RINGS: &str = "rings = true\n";

fn settings(ends: (&str, &str), more: &str) -> String {
    let (local, remote) = ends;
    format!(
        "{GRAFTS}\n[[graft]]\nname = \"once\"\nfunctions = [\"number\"]\n[[peer]]\nname = \"other\"\nlocal = \"{local}\"\n\
         remote = \"{remote}\"\nkey-file = \"key\"\nports = \"41000-41006\"\nusers = [\"nobody\"]\n{RINGS}{more}"
    )
}

/// As `hosts`, but these addresses.
fn hosts_at<'a>(site: &'a Site, near: &str, far: &str, more: &str) -> [Host<'a>; 2] {
    let hosts = [(near, far), (far, near)];
    let start = |(side, ends): (usize, _)| Host::start_with(site, side, &settings(ends, more));
    let [near, far] = [(0, hosts[0]), (1, hosts[1])].map(start);
    [near, far].map(|host| {
        wait_for_keys(&host);
        host
    })
}

/// A pair of sessions for a service.
fn pair_of(site: &Site, listener: &Listener, service: &str) -> (Session, Session) {
    let mut near = asks(site, 0, "test").service(service).initiate().unwrap();
    near.set_timeout(Some(LONG));
    (near, accept(listener))
}

/// As soon as the kernel has let go of the rings before.
fn with_rings(mut open: impl FnMut() -> (Session, Session)) -> (Session, Session) {
    wait_for("rings", || {
        let (mut near, mut far) = open();
        let have = [receives(&mut near), receives(&mut far)].iter().all(|it| *it == Receives::Ring);
        have.then_some((near, far))
    })
}

fn receives(session: &mut Session) -> Receives {
    session.agreed().unwrap().receives.clone()
}

fn why_socket(session: &mut Session) -> String {
    match receives(session) {
        Receives::Socket { why } => why,
        Receives::Ring => panic!("it has a ring"),
    }
}

/// What a host has counted of a session, by the port that both ends have. The kernel counts a datagram as it comes, before it can be read.
fn counted(host: &Host<'_>, session: &mut Session, reason: &str) -> u64 {
    let local = session.agreed().unwrap().local.clone();
    let port = local.rsplit(':').next().unwrap();
    let status = host.status(); // exact: a reader, and whoever calls it waits, or has read what is counted
    let found = status.sessions.iter().find(|session| session.local.ends_with(&format!(":{port}")));
    found.unwrap().packets.get(reason).copied().unwrap_or_default()
}

fn want(service: &str) -> Want {
    Want { services: [service.to_owned()].into(), ..Want::default() }
}

fn changed(session: &mut Session) -> (String, By) {
    match event(session, |event| matches!(event, Event::Changed { .. })) {
        Event::Changed { graft, by, .. } => (graft, by),
        _ => unreachable!(),
    }
}

/// All that was sent is there, as it was; each datagram came by the ring, and none by the socket.
#[test]
fn what_comes_passes_the_socket_by_a_ring() {
    let Some(site) = Site::new("ring") else { return };
    let addresses = [(CLIENT, SERVER), (CLIENT6, SERVER6)];
    for (near, far) in addresses {
        for more in ["", "clear = true\n", "cipher = \"aes-128-gcm\"\n"] {
            let [near_host, far_host] = hosts_at(&site, near, far, more);
            let listener = asks(&site, 1, "test").listen().unwrap();
            for (service, graft) in [("partial-order", "newest"), ("once", "once")] {
                let (mut near, mut far) = with_rings(|| pair_of(&site, &listener, service));
                assert_eq!(near.agreed().unwrap().graft, graft);
                let ringed = counted(&far_host, &mut far, "in-ring");
                let delivered = counted(&far_host, &mut far, "delivered");
                let sent = counted(&near_host, &mut near, "sent");
                // Datagrams shorter than Ethernet has, as long as they may be, and messages of many.
                for length in [0, 1, 5, 17, 18, 19, 40, 100, 1189, 1190, 1191, 5000, 200_000] {
                    let bytes: Vec<u8> = (0..length).map(|at: u32| (at * 7 + length) as u8).collect();
                    near.send(&bytes).unwrap();
                    assert_eq!(message(&mut far), bytes, "{more} {length}");
                    far.send(&bytes).unwrap();
                    assert_eq!(message(&mut near), bytes, "{more} {length}");
                }
                let sent = counted(&near_host, &mut near, "sent") - sent;
                assert!(sent > 180, "{sent} datagrams");
                assert_eq!(counted(&far_host, &mut far, "in-ring") - ringed, sent, "{more}");
                assert_eq!(counted(&far_host, &mut far, "delivered"), delivered, "{more}: by the socket");
                assert_eq!(counted(&far_host, &mut far, "ring-full"), 0);
                near.close().unwrap();
                assert_eq!(far.receive().unwrap(), Received::Finished);
                drop(far);
                let lent = || [&near_host, &far_host].map(Host::lent);
                wait_until("the end", lent, |lent| *lent == [0, 0]);
            }
        }
    }
}

/// What has no room is lost, and counted as that; another session goes on, and so does this one when it is read.
#[test]
fn a_ring_that_is_not_read_loses_what_is_counted() {
    const SENT: u32 = 2000;
    let Some(site) = Site::new("full") else { return };
    let [_near_host, far_host] = hosts_at(&site, CLIENT, SERVER, "");
    let listener = asks(&site, 1, "test").listen().unwrap();
    let (mut near, mut far) = pair_of(&site, &listener, "once");
    let (mut other, mut theirs) = pair_of(&site, &listener, "reliability");
    assert_eq!(receives(&mut far), Receives::Ring);
    for number in 0..SENT {
        near.send(&number.to_be_bytes()).unwrap();
        if number % 100 == 0 {
            other.send(&number.to_be_bytes()).unwrap();
            assert_eq!(message(&mut theirs), number.to_be_bytes());
        }
    }
    let full = u64::from(SENT - xsk::FRAMES);
    let counts = || ["in-ring", "ring-full"].map(|reason| counted(&far_host, &mut far, reason));
    wait_until("all to be counted", counts, |counts| *counts == [u64::from(SENT), full]);
    // Those that came first.
    for number in 0..xsk::FRAMES {
        assert_eq!(message(&mut far), number.to_be_bytes());
    }
    far.set_nonblocking(true);
    assert!(matches!(far.receive(), Err(Error::WouldBlock)));
    far.set_nonblocking(false);
    // More than one time around.
    for number in 0..3 * xsk::FRAMES {
        near.send(&number.to_be_bytes()).unwrap();
        assert_eq!(message(&mut far), number.to_be_bytes());
    }
    assert_eq!(counted(&far_host, &mut far, "ring-full"), full);
}

/// A queue has room for one ring: who comes second gets the socket, is told, and gets the ring when the first one has gone.
#[test]
fn two_sessions_on_one_queue() {
    let Some(site) = Site::new("queue") else { return };
    let [near_host, far_host] = hosts_at(&site, CLIENT, SERVER, "");
    let listener = asks(&site, 1, "test").listen().unwrap();
    let (mut first, mut first_far) = pair_of(&site, &listener, "once");
    let (mut second, mut second_far) = pair_of(&site, &listener, "once");
    assert_eq!((receives(&mut first), receives(&mut first_far)), (Receives::Ring, Receives::Ring));
    for session in [&mut second, &mut second_far] {
        assert_eq!(
            why_socket(session),
            "eth: queue 0 of the interface has a ring already, and has room for one"
        );
    }
    for round in 0..100_u8 {
        for (near, far) in [(&mut first, &mut first_far), (&mut second, &mut second_far)] {
            near.send(&[round; 3000]).unwrap();
            assert_eq!(message(far), [round; 3000]);
        }
    }
    // exact: both sessions have passed messages
    let told: Vec<_> = far_host.status().peers[0].receives.values().cloned().collect();
    assert_eq!(told.len(), 2);
    assert!(told.iter().any(|line| line == "ring"), "{told:?}");
    assert!(told.iter().any(|line| line.starts_with("socket: eth: queue 0")), "{told:?}");
    assert!(far_host.verb(&["status"]).1.contains("receives by socket: eth: queue 0"));
    drop((first, first_far));
    for host in [&near_host, &far_host] {
        wait_until("the first to be gone", || host.lent(), |lent| *lent == 1);
    }
    let (mut third, mut third_far) = with_rings(|| pair_of(&site, &listener, "once"));
    third.send(b"third").unwrap();
    assert_eq!(message(&mut third_far), b"third");
    second.send(b"second").unwrap();
    assert_eq!(message(&mut second_far), b"second");
}

/// A graft with functions behind XDP has the socket, one without the ring: back and forth, and nothing is lost.
#[test]
fn the_ring_stops_and_goes_on_with_the_graft() {
    let Some(site) = Site::new("change") else { return };
    let [_near_host, far_host] = hosts_at(&site, CLIENT, SERVER, "");
    let listener = asks(&site, 1, "test").listen().unwrap();
    let (mut near, mut far) = pair_of(&site, &listener, "reliability");
    assert_eq!(why_socket(&mut far), "graft selective has functions that run behind XDP");
    far.set_nonblocking(true);
    let (mut sent, mut got) = (0_u32, Vec::new());
    let wait_for_all = |far: &mut Session, got: &mut Vec<u32>, least: u32| {
        wait_for("all of them", || {
            while let Ok(Received::Message(bytes)) = far.receive() {
                got.push(u32::from_be_bytes(bytes.try_into().unwrap()));
            }
            got.len() >= least as usize
        });
    };
    for (service, graft) in [
        ("partial-order", "newest"),
        ("reliability", "selective"),
        ("once", "once"),
        ("reliability", "selective"),
        ("partial-order", "newest"),
    ] {
        let begin = Instant::now();
        near.renegotiate(want(service)).unwrap();
        let mut send = |near: &mut Session, far: &mut Session, got: &mut Vec<u32>| {
            near.send(&sent.to_be_bytes()).unwrap();
            sent += 1;
            // Never more than there is room for.
            wait_for_all(far, got, sent.saturating_sub(99));
            sent
        };
        let mut all = 0;
        while !matches!(near.event().unwrap(), Some(Event::Changed { .. })) {
            all = send(&mut near, &mut far, &mut got);
            assert!(begin.elapsed() < LONG);
        }
        assert_eq!(changed(&mut far), (graft.to_owned(), By::Other));
        assert_eq!(receives(&mut far) == Receives::Ring, service != "reliability", "{graft}");
        // What was sent before it changed is counted by then.
        wait_for_all(&mut far, &mut got, all);
        let before = ["in-ring", "delivered"].map(|reason| counted(&far_host, &mut far, reason));
        for _ in 0..200 {
            all = send(&mut near, &mut far, &mut got);
        }
        wait_for_all(&mut far, &mut got, all);
        let after = ["in-ring", "delivered"].map(|reason| counted(&far_host, &mut far, reason));
        let is_by_ring = service != "reliability";
        assert_eq!(after[0] > before[0], is_by_ring, "{graft}: {before:?} {after:?}");
        assert!(after[usize::from(!is_by_ring)] - before[usize::from(!is_by_ring)] >= 200);
    }
    got.sort_unstable();
    assert!(got.iter().copied().eq(0..sent), "{sent} sent, {} came", got.len());
    assert_eq!(counted(&far_host, &mut far, "ring-full"), 0);
}

/// Another program's ring, here: the session does with its socket.
#[test]
fn where_there_can_be_no_ring_is_a_socket() {
    let Some(site) = Site::new("none") else { return };
    let index =
        |side: usize| inside(&site.namespaces[side], || nix::net::if_::if_nametoindex("eth").unwrap());
    let ifindex = index(1);
    let theirs = inside(&site.namespaces[1], || xsk::Ring::new(ifindex, 0).unwrap());
    let wrong = inside(&site.namespaces[1], || xsk::Ring::new(ifindex, 77).err().unwrap());
    assert_eq!(wrong, "queue 77 of the interface: there is no such queue (any more)");
    let _hosts = hosts_at(&site, CLIENT, SERVER, "");
    let listener = asks(&site, 1, "test").listen().unwrap();
    let (mut near, mut far) = pair_of(&site, &listener, "once");
    assert_eq!(receives(&mut near), Receives::Ring);
    assert!(why_socket(&mut far).contains("has a ring already"));
    near.send(b"by the socket").unwrap();
    assert_eq!(message(&mut far), b"by the socket");
    // It is asked for again with each change.
    drop(theirs);
    let mut others = ["partial-order", "once"].into_iter().cycle();
    wait_for("a ring", || {
        near.renegotiate(want(others.next().unwrap())).unwrap();
        changed(&mut far);
        changed(&mut near);
        (receives(&mut far) == Receives::Ring).then_some(())
    });
    near.send(b"by the ring").unwrap();
    assert_eq!(message(&mut far), b"by the ring");
}

/// Nobody has a ring whose settings do not say so.
#[test]
fn without_the_setting_there_are_no_rings() {
    let Some(site) = Site::new("off") else { return };
    let _hosts = hosts(&site, "");
    let listener = asks(&site, 1, "test").listen().unwrap();
    let (_near, mut far) = pair_of(&site, &listener, "partial-order");
    assert!(why_socket(&mut far).contains("`rings = true`"));
}

/// Of a session without the library: its connection, and the descriptors of its ring.
fn raw_ring(site: &Site, side: usize) -> (control::Control, [OwnedFd; 2], u32) {
    let control = control::Control::connect(&socket(site, side)).unwrap();
    let (peer, service) = ("other".to_owned(), "test".to_owned());
    control.send(&Request::Open { peer, service, want: want("once") }, &[]).unwrap();
    let (opened, mut descriptors) = wait_for("a session", || match control.receive::<Word>() {
        control::Received::Record(Word::Opened(opened), descriptors) => Some((opened, descriptors)),
        control::Received::Nothing => None,
        other => panic!("{other:?}"),
    });
    let (memory, ring) = (descriptors.pop().unwrap(), descriptors.pop().unwrap());
    assert_eq!(descriptors.len(), 1);
    (control, [ring, memory], opened.ring.unwrap())
}

/// Who keeps the descriptors keeps the queue, and gets nothing by it; what they write to its memory is their own loss.
#[test]
fn who_keeps_a_ring_has_nothing_by_it() {
    let Some(site) = Site::new("ringkept") else { return };
    let [near_host, _far_host] = hosts_at(&site, CLIENT, SERVER, "");
    let listener = asks(&site, 1, "test").listen().unwrap();
    let (control, descriptors, frames) = raw_ring(&site, 0);
    let mut far = accept(&listener);
    let mut kept = xsk::Reader::new(descriptors, frames).unwrap();
    far.send(b"before").unwrap();
    let mut buffer = [0; 2048];
    wait_for("what is theirs", || kept.next(&mut buffer));
    drop(control);
    event(&mut far, |event| matches!(event, Event::Closed { .. }));
    drop(far);
    wait_until("the end", || near_host.lent(), |lent| *lent == 0);
    let (mut near, mut far) = pair_of(&site, &listener, "once");
    assert!(why_socket(&mut near).contains("has a ring already"));
    for _ in 0..100 {
        far.send(b"not for whoever was before").unwrap();
        assert_eq!(message(&mut near), b"not for whoever was before");
    }
    assert_eq!(kept.next(&mut buffer), None);
    drop((near, far, kept));
    wait_until("the end", || near_host.lent(), |lent| *lent == 0);
    let (mut near, mut far) = with_rings(|| pair_of(&site, &listener, "once"));
    far.send(b"anew").unwrap();
    assert_eq!(message(&mut near), b"anew");
}

/// Run as a user without a privilege, by `messages::as_an_application`: until it is killed.
pub fn as_an_application(listener: &Listener, asks: &Preconnection) {
    let mut near = asks.clone().service("once").initiate().unwrap();
    let mut far = accept(listener);
    assert_eq!((receives(&mut near), receives(&mut far)), (Receives::Ring, Receives::Ring));
    for round in 0..50_u8 {
        near.send(&[round; 20_000]).unwrap();
        assert_eq!(message(&mut far), [round; 20_000]);
    }
    println!("by a ring as user {}", nix::unistd::geteuid());
    // As if it had crashed.
    near.send(b"not read").unwrap();
    let _ = nix::sys::signal::raise(Signal::SIGKILL);
}

/// Killed with its ring in its hands: the queue is free for the next one.
#[test]
fn an_unprivileged_application_is_killed() {
    let Some(site) = Site::new("ringkilled") else { return };
    let [near_host, far_host] = hosts_at(&site, CLIENT, SERVER, "");
    let said = unprivileged(&site, "nobody", "ring");
    assert!(said.contains("by a ring as user 65534"), "{said}");
    for host in [&near_host, &far_host] {
        wait_until("the end", || host.lent(), |lent| *lent == 0);
    }
    let listener = asks(&site, 1, "test").listen().unwrap();
    let (mut near, mut far) = with_rings(|| pair_of(&site, &listener, "once"));
    near.send(b"next").unwrap();
    assert_eq!(message(&mut far), b"next");
}

/// The daemon is killed while what it has lent is in use: nothing leaves in clear, nothing is attached any more, and what had come can be
/// read. A daemon that is started anew lends rings again.
#[test]
fn nothing_is_left_when_the_daemon_is_killed() {
    const SECRET: &[u8] = b"what nobody else is to read";
    let Some(site) = Site::new("ringdead") else { return };
    let [near_host, far_host] = hosts_at(&site, CLIENT, SERVER, "");
    let listener = asks(&site, 1, "test").listen().unwrap();
    let (mut near, mut far) = pair_of(&site, &listener, "once");
    assert_eq!(receives(&mut far), Receives::Ring);
    let capture = Capture::new(&site, 0);
    for _ in 0..10 {
        near.send(SECRET).unwrap();
    }
    wait_until("it to have come", || counted(&far_host, &mut far, "in-ring"), |count| *count == 10);
    far_host.signal(Signal::SIGKILL);
    event(&mut far, |event| matches!(event, Event::Closed { reason } if reason.contains("daemon is gone")));
    for _ in 0..10 {
        assert_eq!(message(&mut far), SECRET);
    }
    let _ = near.send(SECRET);
    assert!(far.send(SECRET).is_err());
    let link = || {
        let mut shown = std::process::Command::new("ip");
        shown.args(["-n", &site.namespaces[1], "link", "show", "eth"]);
        String::from_utf8(shown.output().unwrap().stdout).unwrap()
    };
    wait_until("nothing to be attached", link, |link| !link.contains("xdp"));
    let (all, clear) = capture.count(SECRET);
    assert!(all > 0 && clear == 0, "{clear} of {all} packets in clear");
    drop((near, far, listener, far_host));
    let far_host = Host::start_with(&site, 1, &settings((SERVER, CLIENT), ""));
    wait_for_keys(&far_host);
    wait_until("the first one to have let go", || near_host.lent(), |lent| *lent == 0);
    let listener = asks(&site, 1, "test").listen().unwrap();
    let (mut near, mut far) = with_rings(|| pair_of(&site, &listener, "once"));
    near.send(b"again").unwrap();
    assert_eq!(message(&mut far), b"again");
}

/// What is pollable is readable when something is in the ring, and not before; a child has nothing of it.
#[test]
fn a_ring_is_polled_and_is_the_parents() {
    use nix::poll::{PollFd, PollFlags, poll};
    use std::os::fd::AsFd as _;
    let Some(site) = Site::new("ringpoll") else { return };
    let _hosts = hosts_at(&site, CLIENT, SERVER, "");
    let listener = asks(&site, 1, "test").listen().unwrap();
    let (mut near, mut far) = pair_of(&site, &listener, "once");
    far.set_nonblocking(true);
    let readable = |session: &Session, ms: u16| {
        poll(&mut [PollFd::new(session.as_fd(), PollFlags::POLLIN)], ms).unwrap() == 1
    };
    wait_for_silence(&mut far);
    for round in 0..20_u8 {
        assert!(!readable(&far, 10), "nothing has come");
        near.send(&[round]).unwrap();
        assert!(readable(&far, 60_000));
        assert_eq!(far.receive().unwrap(), Received::Message(vec![round]));
        assert!(matches!(far.receive(), Err(Error::WouldBlock)));
    }
    let sender = thread::spawn(move || {
        thread::sleep(Duration::from_millis(50)); // exact: who reads waits by then, mostly, and is right either way
        near.send(b"waited for").unwrap();
        near
    });
    far.set_nonblocking(false);
    assert_eq!(message(&mut far), b"waited for");
    let _near = sender.join().unwrap();
}
