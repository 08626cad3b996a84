//! Tests of sessions with several paths: path and addresses of outgoing datagrams, and which incoming datagrams are
//! accepted.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use millrace_graft_kernel::packet::{
    FunctionHook, PATH_SESSIONS, PacketHooks, PacketReason, SessionEnds, SessionPath, SessionRoom,
};
use millrace_testkit::wait_for;
use nix::sched::{CloneFlags, unshare};

use crate::datagrams::{PASS_ON, REDIRECT, SHOT, XDP_DROP, XDP_PASS, datagram, v4, v6};
use crate::frames::{reason, run};
use crate::net::{check_frame, ip as net_ip, root};
use crate::{count, hooks, open, other_side, sides};

/// Calls `work` with the index of an interface with two queues, in a new network namespace.
fn with_two_queues(work: impl FnOnce(u32) + Send) {
    let in_own = || {
        unshare(CloneFlags::CLONE_NEWNET).expect("a namespace");
        net_ip("link add two numrxqueues 2 numtxqueues 2 type veth peer name other");
        net_ip("link set two up");
        work(nix::net::if_::if_nametoindex("two").expect("an index"));
    };
    std::thread::scope(|scope| scope.spawn(in_own).join().expect("work in a namespace"));
}

/// Index of the loopback interface, at which BPF_PROG_TEST_RUN runs programs by default.
const LOOPBACK: u32 = 1;

fn ip(text: &str) -> IpAddr {
    text.parse().expect("an address")
}

/// Returns two paths: the session's own addresses by the interface `own`, and another address pair by the interface
/// `other`.
fn paths(ends: &SessionEnds, [own, other]: [u32; 2], weights: [u32; 2]) -> [SessionPath; 2] {
    let (local, remote) = match ends.local.is_ipv4() {
        true => (ip("192.0.2.1"), ip("198.51.100.77")),
        false => (ip("2001:db8::1"), ip("2001:db8:ffff::77")),
    };
    let first =
        SessionPath { local: ends.local.ip(), remote: ends.remote.ip(), ifindex: own, weight: weights[0] };
    [first, SessionPath { local, remote, ifindex: other, weight: weights[1] }]
}

fn turned(paths: [SessionPath; 2]) -> [SessionPath; 2] {
    paths.map(|path| SessionPath { local: path.remote, remote: path.local, ..path })
}

/// Returns the IP addresses in a frame.
fn addresses(ends: &SessionEnds, frame: &[u8]) -> [IpAddr; 2] {
    match ends.local.is_ipv4() {
        true => [26, 30].map(|at| IpAddr::from(<[u8; 4]>::try_from(&frame[at..at + 4]).expect("IPv4"))),
        false => [22, 38].map(|at| IpAddr::from(<[u8; 16]>::try_from(&frame[at..at + 16]).expect("IPv6"))),
    }
}

/// A datagram has its path's addresses on the wire, and the session's addresses at both hosts. All checksums are
/// correct.
#[test]
fn datagram_of_a_redundant_session_is_sent_on_each_path() {
    if !root("datagram_of_a_redundant_session_is_sent_on_each_path") {
        return;
    }
    with_two_queues(|ifindex| {
        for ends in [v4(), v6()] {
            let there = other_side(&ends);
            let [mut sender, mut receiver] = sides(ends, &["number"]);
            let near = paths(&ends, [LOOPBACK, ifindex], [1, 1]);
            sender.set_paths(&ends, &near, false).expect("paths");
            let far = turned(paths(&ends, [ifindex, ifindex], [1, 1]));
            receiver.set_paths(&there, &far, false).expect("paths");
            for at in 0..6 {
                let payload = vec![at as u8; 1 + 97 * at];
                let plain = datagram(&ends, &payload);
                let path = near[at % 2];
                let (why, verdict, frame) = reason(&mut sender, &ends, FunctionHook::Tx, &plain);
                assert_eq!(why, PacketReason::Sent);
                assert_eq!(verdict, if at % 2 == 0 { PASS_ON } else { REDIRECT });
                assert_eq!(addresses(&ends, &frame), [path.local, path.remote]);
                assert!(check_frame(&frame), "{at}");
                let came = receiver.run_at((ifindex, 0), &frame).expect("a run");
                assert_eq!(came.verdict, XDP_PASS);
                assert_eq!(addresses(&ends, &came.frame), [ends.local.ip(), ends.remote.ip()]);
                assert!(check_frame(&came.frame), "{at}");
                let (why, verdict, after) = reason(&mut receiver, &there, FunctionHook::Repair, &came.frame);
                assert_eq!((why, verdict), (PacketReason::Delivered, PASS_ON));
                assert_eq!(after[..plain.len()], plain);
            }
            let sent = sender.path_counts(&ends).expect("counts").map(|count| count.sent);
            let came = receiver.path_counts(&there).expect("counts").map(|count| count.came);
            assert_eq!((sent, came), ([3, 3, 0, 0], [3, 3, 0, 0]));
        }
    });
}

/// A path of a session does not accept packets that arrive at another interface, have other addresses, or are not
/// authenticated with the session's key. The path does not count such packets as received.
#[test]
fn network_path_refuses_packets_of_other_interfaces_addresses_or_keys() {
    if !root("network_path_refuses_packets_of_other_interfaces_addresses_or_keys") {
        return;
    }
    with_two_queues(|ifindex| {
        for ends in [v4(), v6()] {
            let there = other_side(&ends);
            let [mut sender, mut receiver] = sides(ends, &["number"]);
            sender.set_paths(&ends, &paths(&ends, [LOOPBACK, ifindex], [0, 1]), false).expect("paths");
            let far = turned(paths(&ends, [ifindex, ifindex], [1, 1]));
            receiver.set_paths(&there, &far, false).expect("paths");
            let (_, frame) = run(&sender, FunctionHook::Tx, &datagram(&ends, b"by the second"));
            let others = receiver.others().expect("others");
            // The path must not accept a packet that arrives at another interface, or a packet from another host.
            assert_eq!(receiver.run_at((LOOPBACK, 0), &frame).expect("a run").verdict, XDP_PASS);
            let mut foreign = frame.clone();
            foreign[29] ^= 1;
            assert_eq!(receiver.run_at((ifindex, 0), &foreign).expect("a run").frame, foreign);
            assert_eq!(receiver.others().expect("others"), others + 2);
            let mut forged = frame.clone();
            *forged.last_mut().expect("a frame") ^= 1;
            assert_eq!(receiver.run_at((ifindex, 0), &forged).expect("a run").verdict, XDP_DROP);
            assert_eq!(count(&mut receiver, &there, PacketReason::Forged), 1);
            assert_eq!(receiver.path_counts(&there).expect("counts")[1].came, 0);
            assert_eq!(receiver.run_at((ifindex, 0), &frame).expect("a run").verdict, XDP_PASS);
            assert_eq!(receiver.path_counts(&there).expect("counts")[1].came, 1);
            // A closed session leaves no entries in the maps.
            receiver.close(&there).expect("closed");
            let others = receiver.others().expect("others");
            assert_eq!(receiver.run_at((ifindex, 0), &frame).expect("a run").frame, frame);
            assert_eq!(receiver.others().expect("others"), others + 1);
            open(&mut receiver, there, &["number"]);
            receiver.set_paths(&there, &far, false).expect("the same again");
        }
    });
}

/// Packets are distributed over paths by the paths' weights. If no path has a weight, all packets use the first one.
#[test]
fn paths_share_packets_by_their_weights() {
    if !root("paths_share_packets_by_their_weights") {
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
        let ends = v4();
        let mut sender = hooks();
        open(&mut sender, ends, &["number"]);
        sender.set_paths(&ends, &paths(&ends, [LOOPBACK, LOOPBACK], weights), false).expect("paths");
        for _ in 0..120 {
            run(&sender, FunctionHook::Tx, &datagram(&ends, b"by one of them"));
        }
        let [first, second, ..] = sender.path_counts(&ends).expect("counts");
        assert_eq!([first.sent, second.sent], want, "{weights:?}");
    }
}

#[test]
fn packet_for_missing_path_interface_is_counted() {
    if !root("packet_for_missing_path_interface_is_counted") {
        return;
    }
    let ends = v4();
    let mut sender = hooks();
    open(&mut sender, ends, &["number"]);
    sender.set_paths(&ends, &paths(&ends, [LOOPBACK, 0], [0, 1]), false).expect("paths");
    let (why, verdict, _) = reason(&mut sender, &ends, FunctionHook::Tx, &datagram(&ends, b"nowhere"));
    assert_eq!((why, verdict), (PacketReason::NoPath, SHOT));
    let many = vec![paths(&ends, [LOOPBACK, LOOPBACK], [1, 1])[0]; 5];
    let refused = sender.set_paths(&ends, &many, false).expect_err("too many").to_string();
    assert!(refused.contains("paths of a session"), "{refused}");
}

/// An interface that was deleted and created again has another index. The packet counts of its path continue, and the
/// limit of sessions with paths still holds.
#[test]
fn packet_counts_of_a_session_path_continue_on_a_new_interface() {
    if !root("packet_counts_of_a_session_path_continue_on_a_new_interface") {
        return;
    }
    let room = SessionRoom { sessions: 128, ..SessionRoom::default() };
    let mut sender = PacketHooks::load_for(room).expect("hooks");
    let ends: Vec<_> = (0..PATH_SESSIONS as u16 + 1)
        .map(|at| SessionEnds { local: (v4().local.ip(), 6000 + at).into(), remote: v4().remote })
        .collect();
    ends.iter().for_each(|ends| open(&mut sender, *ends, &[]));
    let (last, all) = ends.split_last().expect("some");
    let of = |ends: &SessionEnds, other| paths(ends, [LOOPBACK, other], [0, 1]);
    all.iter().for_each(|ends| sender.set_paths(ends, &of(ends, LOOPBACK), false).expect("paths"));
    let refused = sender.set_paths(last, &of(last, LOOPBACK), false).expect_err("one too many").to_string();
    assert!(refused.contains("sessions with paths"), "{refused}");
    let first = &all[0];
    run(&sender, FunctionHook::Tx, &datagram(first, b"by the second"));
    for other in [0, LOOPBACK] {
        sender.set_paths(first, &of(first, other), false).expect("the same with another number");
        assert_eq!(sender.path_counts(first).expect("counts")[1].sent, 1);
    }
    // Setting paths with a missing interface fails and leaves no map entries, so another session can still get paths.
    sender.set_paths(first, &of(first, 0), false).expect("without the interface");
    sender.close(first).expect("closed");
    sender.set_paths(last, &of(last, LOOPBACK), false).expect("room");
}

/// The receiver neither requests the retransmission of a packet that a slower path may still deliver, nor counts it as
/// lost.
#[test]
fn packet_that_a_slower_path_may_deliver_is_not_requested_again() {
    if !root("packet_that_a_slower_path_may_deliver_is_not_requested_again") {
        return;
    }
    // Columns: the number of the packet that arrives, and the number below which the receiver then considers no packet
    // to be in flight. No packet of the second path is known at first. When packet 7 arrives, packets 5 and 6 are no
    // longer in flight, and a late packet changes nothing.
    let come = [(0, 1), (1, 1), (2, 2), (4, 2), (8, 2), (3, 4), (7, 8), (5, 8)];
    with_two_queues(|ifindex| {
        let ends = v4();
        let there = other_side(&v4());
        wait_for("a time in which this machine does not stand still", || {
            let [mut sender, mut receiver] = sides(ends, &["number"]);
            sender.set_paths(&ends, &paths(&ends, [LOOPBACK, ifindex], [1, 1]), false).expect("paths");
            let far = turned(paths(&ends, [ifindex, ifindex], [1, 1]));
            receiver.set_paths(&there, &far, false).expect("paths");
            // Packets with even numbers arrive by the first path, those with odd numbers by the second.
            let frames: Vec<_> =
                (0..13u8).map(|at| run(&sender, FunctionHook::Tx, &datagram(&ends, &[at])).1).collect();
            let newest = |number: usize| {
                assert_eq!(receiver.run_at((ifindex, 0), &frames[number]).expect("a run").verdict, XDP_PASS);
                receiver.progress(&there).expect("progress").newest
            };
            let begin = Instant::now();
            let got = come.map(|(number, _)| (number, newest(number)));
            // On a busy machine a path may count as silent too early; then the test is repeated.
            if begin.elapsed() > Duration::from_millis(100) {
                return None;
            }
            assert_eq!(got, come);
            // After a path has delivered no packet for PATH_SILENT_NS, none of its packets counts as in flight. Each
            // packet that arrives then advances the newest number.
            // exact: longer than PATH_SILENT_NS, after which a network path without packets counts as silent
            std::thread::sleep(Duration::from_millis(400));
            assert_eq!([10, 12].map(newest), [11, 13]);
            Some(())
        });
    });
}
