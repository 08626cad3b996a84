//! Sessions with several paths: by which one a datagram leaves, with which addresses, and what is taken of them at the other end.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use millrace_graft_kernel::joint::{Ends, Joint, Joints, PATH_SESSIONS, Path, Protocol, Reason, Room};
use millrace_testkit::wait_for;
use nix::sched::{CloneFlags, unshare};

use crate::datagrams::{PASS_ON, REDIRECT, SHOT, XDP_DROP, XDP_PASS, datagram, v4, v6};
use crate::frames::{reason, run};
use crate::net::{check_frame, ip as net_ip, root};
use crate::wire::{as_udp, on_the_wire};
use crate::{count, joints, open, open_over, other_side, sides};

/// Calls `work` with the index of an interface that has two queues, in a namespace of its own.
fn with_two_queues(work: impl FnOnce(u32) + Send) {
    let in_own = || {
        unshare(CloneFlags::CLONE_NEWNET).expect("a namespace");
        net_ip("link add two numrxqueues 2 numtxqueues 2 type veth peer name other");
        net_ip("link set two up");
        work(nix::net::if_::if_nametoindex("two").expect("an index"));
    };
    std::thread::scope(|scope| scope.spawn(in_own).join().expect("work in a namespace"));
}

/// Of a run without a network.
const LOOPBACK: u32 = 1;

fn ip(text: &str) -> IpAddr {
    text.parse().expect("an address")
}

/// The session's own, by `own`, and another pair, by `other`.
fn paths(ends: &Ends, [own, other]: [u32; 2], weights: [u32; 2]) -> [Path; 2] {
    let (local, remote) = match ends.local.is_ipv4() {
        true => (ip("192.0.2.1"), ip("198.51.100.77")),
        false => (ip("2001:db8::1"), ip("2001:db8:ffff::77")),
    };
    let first = Path { local: ends.local.ip(), remote: ends.remote.ip(), ifindex: own, weight: weights[0] };
    [first, Path { local, remote, ifindex: other, weight: weights[1] }]
}

fn turned(paths: [Path; 2]) -> [Path; 2] {
    paths.map(|path| Path { local: path.remote, remote: path.local, ..path })
}

/// As the frame has them.
fn addresses(ends: &Ends, frame: &[u8]) -> [IpAddr; 2] {
    match ends.local.is_ipv4() {
        true => [26, 30].map(|at| IpAddr::from(<[u8; 4]>::try_from(&frame[at..at + 4]).expect("IPv4"))),
        false => [22, 38].map(|at| IpAddr::from(<[u8; 16]>::try_from(&frame[at..at + 16]).expect("IPv6"))),
    }
}

/// By both families, and both protocols on the wire.
fn kinds() -> impl Iterator<Item = (Ends, Protocol)> {
    [v4(), v6()].into_iter().flat_map(|ends| [Protocol::Udp, Protocol::Ip253].map(|over| (ends, over)))
}

/// With the paths' addresses outside and the session's inside, and every checksum right.
#[test]
fn a_datagram_goes_by_each_path() {
    if !root("a_datagram_goes_by_each_path") {
        return;
    }
    with_two_queues(|ifindex| {
        for (ends, over) in kinds() {
            let there = other_side(&ends);
            let [mut sender, mut receiver] = sides(ends, &["number"], over);
            let near = paths(&ends, [LOOPBACK, ifindex], [1, 1]);
            sender.set_paths(&ends, &near, false).expect("paths");
            let far = turned(paths(&ends, [ifindex, ifindex], [1, 1]));
            receiver.set_paths(&there, &far, false).expect("paths");
            for at in 0..6 {
                let payload = vec![at as u8; 1 + 97 * at];
                let plain = datagram(&ends, &payload);
                let path = near[at % 2];
                let (why, verdict, frame) = reason(&mut sender, &ends, Joint::Tx, &plain);
                assert_eq!(why, Reason::Sent);
                assert_eq!(verdict, if at % 2 == 0 { PASS_ON } else { REDIRECT });
                assert_eq!(addresses(&ends, &frame), [path.local, path.remote]);
                let udp = if over == Protocol::Ip253 { as_udp(&frame) } else { frame.clone() };
                assert!(check_frame(&udp), "{at}");
                let came = receiver.run_at((ifindex, 0), &frame).expect("a run");
                assert_eq!(came.verdict, XDP_PASS);
                assert_eq!(addresses(&ends, &came.frame), [ends.local.ip(), ends.remote.ip()]);
                assert!(check_frame(&came.frame), "{at}");
                let (why, verdict, after) = reason(&mut receiver, &there, Joint::Repair, &came.frame);
                assert_eq!((why, verdict), (Reason::Delivered, PASS_ON));
                assert_eq!(after[..plain.len()], plain);
            }
            let sent = sender.path_counts(&ends).expect("counts").map(|count| count.sent);
            let came = receiver.path_counts(&there).expect("counts").map(|count| count.came);
            assert_eq!((sent, came), ([3, 3, 0, 0], [3, 3, 0, 0]));
        }
    });
}

/// Nobody else gets in by a path: not by another interface, nor with other addresses or without the key. What is not believed does not
/// count as having come.
#[test]
fn a_path_lets_in_its_session_only() {
    if !root("a_path_lets_in_its_session_only") {
        return;
    }
    with_two_queues(|ifindex| {
        for (ends, over) in kinds() {
            let there = other_side(&ends);
            let [mut sender, mut receiver] = sides(ends, &["number"], over);
            sender.set_paths(&ends, &paths(&ends, [LOOPBACK, ifindex], [0, 1]), false).expect("paths");
            let far = turned(paths(&ends, [ifindex, ifindex], [1, 1]));
            receiver.set_paths(&there, &far, false).expect("paths");
            let (_, frame) = run(&sender, Joint::Tx, &datagram(&ends, b"by the second"));
            let others = receiver.others().expect("others");
            // By the loopback interface, and from somebody else.
            assert_eq!(receiver.run_at((LOOPBACK, 0), &frame).expect("a run").verdict, XDP_PASS);
            let mut foreign = frame.clone();
            foreign[29] ^= 1;
            assert_eq!(receiver.run_at((ifindex, 0), &foreign).expect("a run").frame, foreign);
            assert_eq!(receiver.others().expect("others"), others + 2);
            let mut forged = frame.clone();
            *forged.last_mut().expect("a frame") ^= 1;
            assert_eq!(receiver.run_at((ifindex, 0), &forged).expect("a run").verdict, XDP_DROP);
            assert_eq!(count(&mut receiver, &there, Reason::Forged), 1);
            assert_eq!(receiver.path_counts(&there).expect("counts")[1].came, 0);
            assert_eq!(receiver.run_at((ifindex, 0), &frame).expect("a run").verdict, XDP_PASS);
            assert_eq!(receiver.path_counts(&there).expect("counts")[1].came, 1);
            // A session that has gone leaves nothing.
            receiver.close(&there).expect("closed");
            let others = receiver.others().expect("others");
            assert_eq!(receiver.run_at((ifindex, 0), &frame).expect("a run").frame, frame);
            assert_eq!(receiver.others().expect("others"), others + 1);
            open_over(&mut receiver, there, &["number"], over);
            receiver.set_paths(&there, &far, false).expect("the same again");
            // By the other protocol nothing is the session's.
            let (_, frame) = run(&sender, Joint::Tx, &datagram(&ends, b"by the second"));
            let other = if over == Protocol::Ip253 { as_udp(&frame) } else { on_the_wire(&frame) };
            assert_eq!(receiver.run_at((ifindex, 0), &other).expect("a run").verdict, XDP_DROP);
            assert_eq!(count(&mut receiver, &there, Reason::OtherProtocol), 1);
        }
    });
}

/// Each carries as much as its weight says; where none has any, the first one carries all.
#[test]
fn paths_carry_by_their_weights() {
    if !root("paths_carry_by_their_weights") {
        return;
    }
    let table = [
        ([1, 1], [60, 60]),
        ([3, 1], [90, 30]),
        ([0, 1], [0, 120]),
        ([5, 0], [120, 0]),
        ([0, 0], [120, 0]),
        ([1, 14], [8, 112]),
    ];
    for (weights, want) in table {
        let (ends, mut sender) = (v4(), joints());
        open(&mut sender, ends, &["number"]);
        sender.set_paths(&ends, &paths(&ends, [LOOPBACK, LOOPBACK], weights), false).expect("paths");
        for _ in 0..120 {
            run(&sender, Joint::Tx, &datagram(&ends, b"by one of them"));
        }
        let [first, second, ..] = sender.path_counts(&ends).expect("counts");
        assert_eq!([first.sent, second.sent], want, "{weights:?}");
    }
}

#[test]
fn what_has_no_path_is_counted() {
    if !root("what_has_no_path_is_counted") {
        return;
    }
    let (ends, mut sender) = (v4(), joints());
    open(&mut sender, ends, &["number"]);
    sender.set_paths(&ends, &paths(&ends, [LOOPBACK, 0], [0, 1]), false).expect("paths");
    let (why, verdict, _) = reason(&mut sender, &ends, Joint::Tx, &datagram(&ends, b"nowhere"));
    assert_eq!((why, verdict), (Reason::NoPath, SHOT));
    let many = vec![paths(&ends, [LOOPBACK, LOOPBACK], [1, 1])[0]; 5];
    let refused = sender.set_paths(&ends, &many, false).expect_err("too many").to_string();
    assert!(refused.contains("paths of a session"), "{refused}");
}

/// An interface that comes again has another number. What has been counted goes on, and as many sessions have paths as may.
#[test]
fn paths_of_a_session_change() {
    if !root("paths_of_a_session_change") {
        return;
    }
    let room = Room { sessions: 128, ..Room::default() };
    let mut sender = Joints::load_for(room).expect("joints");
    let ends: Vec<_> = (0..PATH_SESSIONS as u16 + 1)
        .map(|at| Ends { local: (v4().local.ip(), 6000 + at).into(), remote: v4().remote })
        .collect();
    ends.iter().for_each(|ends| open(&mut sender, *ends, &[]));
    let (last, all) = ends.split_last().expect("some");
    let of = |ends: &Ends, other| paths(ends, [LOOPBACK, other], [0, 1]);
    all.iter().for_each(|ends| sender.set_paths(ends, &of(ends, LOOPBACK), false).expect("paths"));
    let refused = sender.set_paths(last, &of(last, LOOPBACK), false).expect_err("one too many").to_string();
    assert!(refused.contains("sessions with paths"), "{refused}");
    let first = &all[0];
    run(&sender, Joint::Tx, &datagram(first, b"by the second"));
    for other in [0, LOOPBACK] {
        sender.set_paths(first, &of(first, other), false).expect("the same with another number");
        assert_eq!(sender.path_counts(first).expect("counts")[1].sent, 1);
    }
    // One whose interface is not there leaves nothing either, and makes room.
    sender.set_paths(first, &of(first, 0), false).expect("without the interface");
    sender.close(first).expect("closed");
    sender.set_paths(last, &of(last, LOOPBACK), false).expect("room");
}

/// What a path is about to bring is neither asked for nor lost.
#[test]
fn what_another_path_may_bring_is_not_missing() {
    if !root("what_another_path_may_bring_is_not_missing") {
        return;
    }
    // With what is the newest then. The second path is not known at first; behind 7, 5 and 6 are not on their way any more; and what comes
    // late says nothing.
    let come = [(0, 1), (1, 1), (2, 2), (4, 2), (8, 2), (3, 4), (7, 8), (5, 8)];
    with_two_queues(|ifindex| {
        let (ends, there) = (v4(), other_side(&v4()));
        wait_for("a time in which this machine does not stand still", || {
            let [mut sender, mut receiver] = sides(ends, &["number"], Protocol::Udp);
            sender.set_paths(&ends, &paths(&ends, [LOOPBACK, ifindex], [1, 1]), false).expect("paths");
            let far = turned(paths(&ends, [ifindex, ifindex], [1, 1]));
            receiver.set_paths(&there, &far, false).expect("paths");
            // Even numbers by the first path, odd ones by the second.
            let frames: Vec<_> =
                (0..13u8).map(|at| run(&sender, Joint::Tx, &datagram(&ends, &[at])).1).collect();
            let newest = |number: usize| {
                assert_eq!(receiver.run_at((ifindex, 0), &frames[number]).expect("a run").verdict, XDP_PASS);
                receiver.progress(&there).expect("progress").newest
            };
            let begin = Instant::now();
            let got = come.map(|(number, _)| (number, newest(number)));
            // On a machine that is busy with something else a path may have been silent for too long.
            if begin.elapsed() > Duration::from_millis(100) {
                return None;
            }
            assert_eq!(got, come);
            // And so it has nothing under way.
            std::thread::sleep(Duration::from_millis(400)); // exact: longer than a path that brings something is silent
            assert_eq!([10, 12].map(newest), [11, 13]);
            Some(())
        });
    });
}
