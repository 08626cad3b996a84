//! Tests of the dispatcher with one frame at a time (BPF_PROG_TEST_RUN), without a network.

use millrace_graft_kernel::TALLIES;
use millrace_graft_kernel::packet::{
    FRAME_BYTES, FunctionHook, OpenedFunction, PacketHooks, PacketReason, SessionEnds, TalkMessage, Tick,
};
use millrace_testkit::wait_for;
use nix::sched::{CpuSet, sched_getcpu, sched_setaffinity};
use nix::unistd::Pid;

use crate::datagrams::{ETHERNET, PASS_ON, REDIRECT, SHOT, XDP_DROP, XDP_PASS, datagram, v4, v6};
use crate::net::root;
use crate::{counted, ends, hooks, list, open, other_side, sides};

pub fn run(hooks: &PacketHooks, hook: FunctionHook, frame: &[u8]) -> (i32, Vec<u8>) {
    let run = hooks.run(hook, frame).expect("a run");
    (run.verdict, run.frame)
}

/// Returns the Ethernet frame of a payload after the sender's TC egress hook.
pub fn framed(sender: &PacketHooks, ends: &SessionEnds, payload: &[u8]) -> Vec<u8> {
    let (verdict, frame) = run(sender, FunctionHook::Tx, &datagram(ends, payload));
    assert_eq!(verdict, PASS_ON);
    frame
}

/// Runs the BPF program of a hook on a frame. Returns the counter that the program raised (one per reason for its
/// verdict), the verdict and the frame's bytes. Checks that the program raised no other counter.
pub fn reason(
    hooks: &mut PacketHooks,
    ends: &SessionEnds,
    hook: FunctionHook,
    frame: &[u8],
) -> (PacketReason, i32, Vec<u8>) {
    let before = counted(hooks, ends);
    let (verdict, after) = run(hooks, hook, frame);
    let is_new = |it: &&(PacketReason, u64)| !before.contains(it);
    let now = counted(hooks, ends);
    let mut new = now.iter().filter(is_new);
    let (reason, _) = *new.next().expect("a reason");
    assert_eq!(new.next(), None, "a second reason beside {reason:?}");
    (reason, verdict, after)
}

/// Finds by activity counters which sessions had packets, so that a daemon with thousands of sessions need not read the
/// statistics of all.
#[test]
fn activity_counters_show_which_sessions_had_packets() {
    if !root("activity_counters_show_which_sessions_had_packets") {
        return;
    }
    // Every CPU times the first packet that it handles, so the test stays on one CPU.
    let mut here = CpuSet::new();
    here.set(sched_getcpu().expect("a CPU")).expect("a CPU");
    sched_setaffinity(Pid::from_raw(0), &here).expect("affinity");
    let mut hooks = hooks();
    let near = v4();
    let idle = v6();
    for ends in [near, idle] {
        open(&mut hooks, ends, &["number"]);
    }
    let send = |hooks: &PacketHooks, count: usize| {
        (0..count).for_each(|_| drop(framed(hooks, &near, b"payload")));
    };
    assert_eq!(hooks.active(), []);
    // Only packets whose processing is timed change a session's activity counter: the session's first packet, and then
    // every 64th.
    for count in [1, 64, 64] {
        send(&hooks, count);
        assert_eq!(hooks.active(), [near]);
        assert_eq!(hooks.active(), []);
    }
    send(&hooks, 64);
    hooks.close(&near).expect("closed");
    open(&mut hooks, near, &["number"]);
    assert_eq!(hooks.active(), [], "who has its place begins anew");
}

/// The sender's program adds a trailer to a datagram, and the receiver's program removes it. All checksums are correct
/// at each step.
#[test]
fn datagram_arrives_unchanged() {
    if !root("datagram_arrives_unchanged") {
        return;
    }
    let lists: [&[&str]; 5] =
        [&[], &["number"], &["number", "order"], &["number", "repair"], &["number", "order", "repair"]];
    for ends in [v4(), v6()] {
        for functions in lists {
            let mut sender = hooks();
            let mut receiver = hooks();
            open(&mut sender, ends, functions);
            open(&mut receiver, other_side(&ends), functions);
            for len in [1, 2, 3, 17, 100, 1000, 1437] {
                let payload: Vec<u8> = (0..len).map(|at| at as u8 ^ 0x5a).collect();
                let plain = datagram(&ends, &payload);
                let frame = framed(&sender, &ends, &payload);
                assert_eq!(frame.len(), plain.len() + FRAME_BYTES, "{functions:?} {len}");
                assert!(crate::net::check_frame(&frame));
                assert_eq!(reason(&mut receiver, &other_side(&ends), FunctionHook::Rx, &frame).1, XDP_PASS);
                let (why, verdict, after) =
                    reason(&mut receiver, &other_side(&ends), FunctionHook::Repair, &frame);
                assert_eq!((why, verdict), (PacketReason::Delivered, PASS_ON));
                assert_eq!(after[..plain.len()], plain, "{functions:?} {len}");
            }
        }
    }
}

#[test]
fn packet_without_session_passes_unchanged() {
    if !root("packet_without_session_passes_unchanged") {
        return;
    }
    let mut hooks = hooks();
    open(&mut hooks, v4(), &["number"]);
    let strangers = [
        datagram(&ends("10.0.0.1:7001", "10.0.0.2:6000"), b"other port"),
        datagram(&ends("10.0.0.1:7000", "10.0.0.3:6000"), b"other peer"),
        datagram(&v6(), b"other family"),
        vec![0; 60],
        datagram(&v4(), b"cut")[..40].to_vec(),
    ];
    for frame in &strangers {
        assert_eq!(run(&hooks, FunctionHook::Tx, frame), (PASS_ON, frame.clone()));
        assert_eq!(run(&hooks, FunctionHook::Rx, frame), (XDP_PASS, frame.clone()));
        assert_eq!(run(&hooks, FunctionHook::Repair, frame), (PASS_ON, frame.clone()));
    }
    assert_eq!(hooks.others().expect("a count"), 3 * strangers.len() as u64);
    assert_eq!(counted(&mut hooks, &v4()), []);
}

/// A packet is dropped if any bit of the trailer that the sender has added to it is changed.
#[test]
fn forged_frames_are_dropped() {
    if !root("forged_frames_are_dropped") {
        return;
    }
    let mut sender = hooks();
    let mut receiver = hooks();
    let there = other_side(&v4());
    open(&mut sender, v4(), &["number", "repair"]);
    open(&mut receiver, there, &["number", "repair"]);
    let good = framed(&sender, &v4(), b"payload");
    let tail = good.len() - FRAME_BYTES;
    for at in tail..good.len() {
        for bit in 0..8 {
            let mut bad = good.clone();
            bad[at] ^= 1 << bit;
            for (hook, drop) in [(FunctionHook::Rx, XDP_DROP), (FunctionHook::Repair, SHOT)] {
                let (why, verdict, _) = reason(&mut receiver, &there, hook, &bad);
                assert!(matches!(why, PacketReason::Malformed | PacketReason::Forged), "{at} {bit}: {why:?}");
                assert_eq!(verdict, drop);
            }
        }
    }
    // Other forged datagrams are dropped: without a trailer, with a truncated one, reflected to their sender, or
    // authenticated with another key.
    let mut other = hooks();
    let session = millrace_graft_kernel::packet::FunctionSession {
        ends: v4(),
        key: [7; 16],
        list: list(&["number", "repair"]),
        budget_ns: 0,
    };
    other.open(session).expect("a session");
    let reflected = {
        let mut back = framed(&receiver, &there, b"payload");
        let mine = datagram(&v4(), &[0; 7 + FRAME_BYTES]);
        back[..ETHERNET + 28].copy_from_slice(&mine[..ETHERNET + 28]);
        back
    };
    let table = [
        (datagram(&v4(), b"payload without a frame behind it"), PacketReason::Malformed),
        (datagram(&v4(), b""), PacketReason::Malformed),
        (reflected, PacketReason::Forged),
        (framed(&other, &v4(), b"payload"), PacketReason::Forged),
    ];
    for (frame, want) in table {
        for (hook, drop) in [(FunctionHook::Rx, XDP_DROP), (FunctionHook::Repair, SHOT)] {
            let (why, verdict, _) = reason(&mut receiver, &there, hook, &frame);
            assert_eq!((why, verdict), (want, drop));
        }
    }
    // The unchanged datagram is still accepted after the forged ones.
    assert_eq!(reason(&mut receiver, &there, FunctionHook::Rx, &good).0, PacketReason::LetIn);
}

/// Packets with a changed bit behind the IP header or with another length, and replayed packets, change nothing but
/// counters.
#[test]
fn forged_and_replayed_packets_change_only_counters() {
    if !root("forged_and_replayed_packets_change_only_counters") {
        return;
    }
    let near = v4();
    let far = other_side(&v4());
    let [sender, mut receiver] = sides(near, &["number", "repair"]);
    let good = framed(&sender, &near, b"payload");
    let ports = ETHERNET + 20;
    let before = receiver.progress(&far).expect("progress");
    // The packet's trailer authenticates neither UDP's checksum nor the payload. The host's kernel checks the former,
    // and the application the latter.
    for byte in (ports..ports + 4).chain(good.len() - FRAME_BYTES..good.len()) {
        for bit in 0..8 {
            let mut bad = good.clone();
            bad[byte] ^= 1 << bit;
            for (hook, drop) in [(FunctionHook::Rx, XDP_DROP), (FunctionHook::Repair, SHOT)] {
                if byte < ports + 4 {
                    // A packet with another port belongs to no session.
                    assert_eq!(run(&receiver, hook, &bad).1, bad);
                    continue;
                }
                let (why, verdict, _) = reason(&mut receiver, &far, hook, &bad);
                assert!(
                    matches!(why, PacketReason::Malformed | PacketReason::Forged),
                    "{byte} {bit}: {why:?}"
                );
                assert_eq!(verdict, drop);
            }
        }
    }
    for cut in 1..good.len() - ports - 8 {
        let mut bad = good[..good.len() - cut].to_vec();
        let ip_bytes = (bad.len() - ETHERNET) as u16;
        bad[ETHERNET + 2..ETHERNET + 4].copy_from_slice(&ip_bytes.to_be_bytes());
        bad[ports + 4..ports + 6].copy_from_slice(&(ip_bytes - 20).to_be_bytes());
        for hook in [FunctionHook::Rx, FunctionHook::Repair] {
            let (why, ..) = reason(&mut receiver, &far, hook, &bad);
            assert!(matches!(why, PacketReason::Malformed | PacketReason::Forged), "{cut}: {why:?}");
        }
    }
    assert_eq!(receiver.progress(&far).expect("progress"), before);
    assert_eq!(reason(&mut receiver, &far, FunctionHook::Rx, &good).0, PacketReason::LetIn);
    assert_eq!(reason(&mut receiver, &far, FunctionHook::Rx, &good).0, PacketReason::Duplicate);
}

/// Packets of random bytes get a verdict, and the program raises exactly one of its counters of reasons for verdicts.
#[test]
fn random_frames_get_a_verdict() {
    if !root("random_frames_get_a_verdict") {
        return;
    }
    let mut random = fastrand::Rng::with_seed(14);
    let mut receiver = hooks();
    let there = other_side(&v4());
    open(&mut receiver, there, &["number", "order", "repair"]);
    for _ in 0..3000 {
        let payload: Vec<u8> = (0..random.usize(0..60)).map(|_| random.u8(..)).collect();
        let mut frame = datagram(&v4(), &payload);
        for _ in 0..random.usize(0..4) {
            let at = random.usize(..frame.len());
            frame[at] = random.u8(..);
        }
        // The kernel accepts only frames with complete Ethernet and IP headers in BPF_PROG_TEST_RUN.
        let len = random.usize(ETHERNET + 20..=frame.len());
        let frame = &frame[..len];
        assert!(matches!(run(&receiver, FunctionHook::Rx, frame).0, XDP_DROP | XDP_PASS));
        assert!(matches!(run(&receiver, FunctionHook::Repair, frame).0, PASS_ON | SHOT));
    }
    let counts = counted(&mut receiver, &there);
    let is_refusal = |reason: &PacketReason| matches!(reason, PacketReason::Malformed | PacketReason::Forged);
    assert!(!counts.is_empty() && counts.iter().all(|(reason, _)| is_refusal(reason)), "{counts:?}");
}

/// A test case: a list of packet functions, and packets in the order of arrival. Each packet is given by its packet
/// number and by the reason for its verdict that the receiver's XDP program is expected to count.
type FrameCase = (&'static [&'static str], &'static [(usize, PacketReason)]);

#[test]
fn functions_run_in_the_order_of_their_list() {
    if !root("functions_run_in_the_order_of_their_list") {
        return;
    }
    use PacketReason::{Delivered, Duplicate, Late, LetIn, Old};
    let table: [FrameCase; 3] = [
        (&[], &[(0, LetIn), (0, LetIn), (1, LetIn), (0, LetIn)]),
        (
            &["number"],
            &[(0, LetIn), (0, Duplicate), (2, LetIn), (1, LetIn), (1, Duplicate), (1500, LetIn), (3, Old)],
        ),
        (
            &["number", "order"],
            &[(1, LetIn), (0, Late), (0, Duplicate), (2, LetIn), (1, Duplicate), (900, LetIn), (3, Late)],
        ),
    ];
    let there = other_side(&v4());
    for (functions, arrivals) in table {
        let mut sender = hooks();
        let mut receiver = hooks();
        open(&mut sender, v4(), functions);
        open(&mut receiver, there, functions);
        let last = arrivals.iter().map(|(number, _)| *number).max().unwrap_or(0);
        let frames: Vec<_> = (0..=last).map(|_| framed(&sender, &v4(), b"payload")).collect();
        for (number, want) in arrivals {
            let (why, verdict, _) = reason(&mut receiver, &there, FunctionHook::Rx, &frames[*number]);
            assert_eq!(why, *want, "{functions:?}, {number}");
            assert_eq!(verdict, if *want == LetIn { XDP_PASS } else { XDP_DROP });
        }
    }
    // If a packet function of the session's list is not loaded, packets pass with the session's framing but without any
    // function. They are counted as `NoFunction`.
    let mut sender = hooks();
    open(&mut sender, v4(), &["number", "repair"]);
    sender.remove("repair").expect("removed");
    let (why, verdict, _) = reason(&mut sender, &v4(), FunctionHook::Tx, &datagram(&v4(), b"payload"));
    assert_eq!((why, verdict), (PacketReason::NoFunction, PASS_ON));
    let mut receiver = hooks();
    open(&mut receiver, there, &["number", "repair"]);
    let frame = framed(&sender, &v4(), b"payload");
    assert_eq!(reason(&mut receiver, &there, FunctionHook::Repair, &frame).0, Delivered);
}

/// The sender's program turns a retransmission request into the requested packet, byte for byte, if the sender has sent
/// that packet.
#[test]
fn retransmission_request_is_answered_with_the_same_packet() {
    if !root("retransmission_request_is_answered_with_the_same_packet") {
        return;
    }
    for ends in [v4(), v6()] {
        let there = other_side(&ends);
        let mut sender = hooks();
        let mut receiver = hooks();
        open(&mut sender, ends, &["number", "repair"]);
        open(&mut receiver, there, &["number", "repair"]);
        let sent: Vec<_> = [5, 200, 1201].map(|len| framed(&sender, &ends, &vec![len as u8; len])).into();
        for (number, want) in sent.iter().enumerate() {
            let request = request(&receiver, &there, number as u32);
            let (why, verdict, mut got) = reason(&mut sender, &ends, FunctionHook::Repair, &request);
            assert_eq!((why, verdict), (PacketReason::Resent, REDIRECT));
            assert!(crate::net::check_frame(&got));
            // The Ethernet addresses are swapped in the retransmitted packet, since it is made in the buffer of the
            // request.
            got[..12].copy_from_slice(&want[..12]);
            let ip = if ends.local.is_ipv4() { 20 } else { 40 };
            assert_eq!(got[ETHERNET + ip..], want[ETHERNET + ip..], "number {number}");
        }
        let (why, verdict, _) =
            reason(&mut sender, &ends, FunctionHook::Repair, &request(&receiver, &there, 3));
        assert_eq!((why, verdict), (PacketReason::Answered, SHOT));
    }
}

/// A retransmission request is not answered with packets that were stored for another session, or before the session
/// restarted.
#[test]
fn packets_stored_before_a_session_restart_are_not_retransmitted() {
    if !root("packets_stored_before_a_session_restart_are_not_retransmitted") {
        return;
    }
    let there = other_side(&v4());
    let mut sender = hooks();
    let mut receiver = hooks();
    open(&mut sender, v6(), &["number", "repair"]);
    framed(&sender, &v6(), b"another session's");
    sender.close(&v6()).expect("closed");
    open(&mut sender, v4(), &["number", "repair"]);
    open(&mut receiver, there, &["number", "repair"]);
    let request = request(&receiver, &there, 0);
    assert_eq!(reason(&mut sender, &v4(), FunctionHook::Repair, &request).0, PacketReason::Answered);
    framed(&sender, &v4(), b"its own");
    assert_eq!(reason(&mut sender, &v4(), FunctionHook::Repair, &request).0, PacketReason::Resent);
    sender.replace(&v4(), &list(&["number", "repair"]), 0).expect("replaced");
    assert_eq!(reason(&mut sender, &v4(), FunctionHook::Repair, &request).0, PacketReason::Answered);
}

/// Returns the Ethernet frame of the packet by which the receiver's BPF functions request a retransmission.
pub fn request(from: &PacketHooks, ends: &SessionEnds, number: u32) -> Vec<u8> {
    datagram(ends, &from.frame_message(ends, TalkMessage::Request(number)).expect("a frame"))
}

#[test]
fn packets_of_old_and_new_function_list_are_accepted_during_a_change() {
    if !root("packets_of_old_and_new_function_list_are_accepted_during_a_change") {
        return;
    }
    let there = other_side(&v4());
    let mut sender = hooks();
    let mut receiver = hooks();
    open(&mut sender, v4(), &["number", "order"]);
    open(&mut receiver, there, &["number", "order"]);
    let next = list(&["number", "repair"]);
    let old = framed(&sender, &v4(), b"payload");
    let late = framed(&sender, &v4(), b"payload");
    let epoch = receiver.accept(&there, &next).expect("ready");
    assert_eq!((sender.accept(&v4(), &next).expect("ready"), epoch), (1, 1));
    sender.switch(&v4(), epoch).expect("switched");
    let new = framed(&sender, &v4(), b"payload");
    let at_rx =
        |receiver: &mut PacketHooks, frame: &[u8]| reason(receiver, &there, FunctionHook::Rx, frame).0;
    // Packet numbers continue after the list of functions is replaced, so duplicates and late packets are recognised
    // whether they were sent before or after the replacement.
    assert_eq!(at_rx(&mut receiver, &old), PacketReason::LetIn);
    assert_eq!(at_rx(&mut receiver, &new), PacketReason::LetIn);
    assert_eq!(at_rx(&mut receiver, &new), PacketReason::Duplicate);
    assert_eq!(at_rx(&mut receiver, &late), PacketReason::Late);
    receiver.retire(&there, 0).expect("retired");
    assert_eq!(at_rx(&mut receiver, &late), PacketReason::Stale);
    // The session restarts with another list of packet functions: packet numbers begin at 0, and no packet from before
    // the restart is accepted.
    receiver.replace(&there, &list(&["number"]), 0).expect("replaced");
    assert_eq!(at_rx(&mut receiver, &new), PacketReason::Stale);
    sender.replace(&v4(), &list(&["number"]), 0).expect("replaced");
    let first = framed(&sender, &v4(), b"payload");
    assert_eq!(at_rx(&mut receiver, &first), PacketReason::LetIn);
    // A packet with the current epoch (the number, 0 or 1, of the function list) is dropped if its trailer contains the
    // identifier of another function list.
    let mut other = hooks();
    open(&mut other, v4(), &["number", "order", "repair"]);
    let strange = framed(&other, &v4(), b"payload");
    assert_eq!(at_rx(&mut receiver, &strange), PacketReason::Stale);
}

#[test]
fn invalid_session_changes_are_refused() {
    if !root("invalid_session_changes_are_refused") {
        return;
    }
    let mut hooks = hooks();
    open(&mut hooks, v4(), &["number"]);
    let said = |error: millrace_graft_kernel::Error| error.to_string();
    let session = |ends, functions: &[&str]| millrace_graft_kernel::packet::FunctionSession {
        ends,
        key: [0; 16],
        list: list(functions),
        budget_ns: 0,
    };
    let table = [
        (session(v4(), &[]), "there is a session"),
        (session(v6(), &["seal"]), "function seal is not loaded"),
        (session(v6(), &["number"; 9]), "too many functions of a list: 9, at most 8"),
        (session(ends("10.0.0.1:1", "[::1]:1"), &[]), "different families"),
    ];
    for (session, wanted) in table {
        let error = said(hooks.open(session).expect_err(wanted));
        assert!(error.contains(wanted), "{error}");
    }
    assert!(said(hooks.accept(&v6(), &list(&[])).expect_err("none")).contains("there is no session"));
    assert!(said(hooks.remove("seal").expect_err("none")).contains("seal is not loaded"));
    // All 64 sessions that the maps have space for are opened, and one more is refused.
    for port in 1..64 {
        open(&mut hooks, ends("10.0.0.1:7000", &format!("10.0.0.3:{port}")), &["number"]);
    }
    assert!(said(hooks.open(session(v6(), &[])).expect_err("full")).contains("too many sessions: 65"));
    framed(&hooks, &v4(), b"payload");
    hooks.close(&v4()).expect("closed");
    hooks.open(session(v6(), &[])).expect("room");
    assert_eq!(counted(&mut hooks, &v6()), [], "it counts anew");
}

/// Two versions of a function with different state layouts replace each other while packets arrive.
#[test]
fn new_function_version_continues_with_the_old_state() {
    if !root("new_function_version_continues_with_the_old_state") {
        return;
    }
    let there = other_side(&v4());
    let mut sender = hooks();
    let mut receiver = hooks();
    for hooks in [&mut sender, &mut receiver] {
        for (version, image) in TALLIES.iter().enumerate() {
            let function = OpenedFunction::open(image).expect("a function");
            hooks.add_as(format!("tally{}", version + 1), function).expect("loaded");
        }
    }
    let words = |receiver: &PacketHooks, function: &str| -> Vec<u64> {
        let state = receiver.state(&there, function).expect("a state").expect("it has one");
        // The state of version 1 has 4 bytes, which the map pads to 8.
        state
            .chunks(8)
            .map(|word| word.iter().rev().fold(0, |sum, byte| sum << 8 | u64::from(*byte)))
            .collect()
    };
    open(&mut sender, v4(), &["number", "tally1"]);
    open(&mut receiver, there, &["number", "tally1"]);
    let send = |sender: &PacketHooks, receiver: &PacketHooks| {
        let frame = framed(sender, &v4(), b"payload");
        assert_eq!(run(receiver, FunctionHook::Rx, &frame).0, XDP_PASS);
    };
    (0..3).for_each(|_| send(&sender, &receiver));
    let late = framed(&sender, &v4(), b"payload");
    let next = list(&["number", "tally2"]);
    let epoch = receiver.accept(&there, &next).expect("ready");
    receiver.migrate(&there, "tally1", "tally2", &[FunctionHook::Rx, FunctionHook::Repair]).expect("moved");
    sender.accept(&v4(), &next).expect("ready");
    sender.switch(&v4(), epoch).expect("switched");
    (0..2).for_each(|_| send(&sender, &receiver));
    assert_eq!(words(&receiver, "tally2"), [5, 14, 3]);
    // The function stores no state for its `Tx` hook, so converting that state from version 1 to version 2 changes
    // nothing.
    receiver.migrate(&there, "tally1", "tally2", &[FunctionHook::Tx]).expect("nothing");
    assert_eq!(words(&receiver, "tally2"), [5, 14, 3]);
    // Version 1 still handles packets that were sent before the switch to version 2.
    assert_eq!(run(&receiver, FunctionHook::Rx, &late).0, XDP_PASS);
    assert_eq!((words(&receiver, "tally1"), words(&receiver, "tally2")), (vec![4], vec![5, 14, 3]));
    // Version 1 cannot convert the state of version 2, and version 2 cannot convert the state of another function.
    for (from, to) in [("tally2", "tally1"), ("repair", "tally2"), ("number", "tally2")] {
        let error = receiver.migrate(&there, from, to, &FunctionHook::ALL).expect_err("no way").to_string();
        assert!(error.contains("cannot take over the state"), "{error}");
    }
}

/// Two versions of a function whose states have the same layout use one map of states.
#[test]
fn function_versions_with_equal_state_layout_share_their_state_map() {
    if !root("function_versions_with_equal_state_layout_share_their_state_map") {
        return;
    }
    let tally = || OpenedFunction::open(TALLIES[0]).expect("a function");
    let mut sender = hooks();
    let mut receiver = hooks();
    let there = other_side(&v4());
    for hooks in [&mut sender, &mut receiver] {
        hooks.add_as("old".to_owned(), tally()).expect("loaded");
        hooks.add_version("new".to_owned(), tally(), Some("old")).expect("loaded");
    }
    open(&mut sender, v4(), &["number", "old"]);
    open(&mut receiver, there, &["number", "old"]);
    let arrives = |sender: &PacketHooks, receiver: &PacketHooks| {
        let frame = framed(sender, &v4(), b"payload");
        assert_eq!(run(receiver, FunctionHook::Rx, &frame).0, XDP_PASS);
    };
    arrives(&sender, &receiver);
    let next = list(&["number", "new"]);
    let epoch = receiver.accept(&there, &next).expect("ready");
    sender.accept(&v4(), &next).expect("ready");
    sender.switch(&v4(), epoch).expect("switched");
    (0..2).for_each(|_| arrives(&sender, &receiver));
    let known = ["old", "new"].map(|name| receiver.state(&there, name).expect("a state").expect("one"));
    assert_eq!(known[0], known[1]);
    assert_eq!(known[0][..4], 3u32.to_ne_bytes());
}

/// A paused session passes no packet, so its counters are complete before it restarts.
#[test]
fn paused_session_passes_no_packet() {
    if !root("paused_session_passes_no_packet") {
        return;
    }
    let there = other_side(&v4());
    let mut sender = hooks();
    let mut receiver = hooks();
    open(&mut sender, v4(), &["number"]);
    open(&mut receiver, there, &["number"]);
    let came = framed(&sender, &v4(), b"payload");
    let late = framed(&sender, &v4(), b"payload");
    assert_eq!(reason(&mut receiver, &there, FunctionHook::Repair, &came).0, PacketReason::Delivered);
    sender.pause(&v4()).expect("paused");
    receiver.pause(&there).expect("paused");
    assert_eq!(reason(&mut sender, &v4(), FunctionHook::Tx, &datagram(&v4(), b"x")).0, PacketReason::Paused);
    assert_eq!(reason(&mut receiver, &there, FunctionHook::Rx, &late).0, PacketReason::Stale);
    sender.replace(&v4(), &list(&["number"]), 1).expect("replaced");
    receiver.replace(&there, &list(&["number"]), 1).expect("replaced");
    assert_eq!(reason(&mut sender, &v4(), FunctionHook::Tx, &datagram(&v4(), b"x")).0, PacketReason::Paused);
    sender.resume(&v4()).expect("goes on");
    let first = framed(&sender, &v4(), b"payload");
    assert_eq!(reason(&mut receiver, &there, FunctionHook::Repair, &first).0, PacketReason::Delivered);
}

/// Object files of congestion controls, and objects with more than one function, are refused.
#[test]
fn bpf_objects_without_exactly_one_function_are_refused() {
    use millrace_graft_kernel::{SHIPPED, ShippedObject};
    for &ShippedObject { name, image, .. } in SHIPPED {
        let error = OpenedFunction::open(image).err().expect(name).to_string();
        assert!(error.contains("belongs to no hook"), "{error}");
    }
    assert!(OpenedFunction::open(b"ELF").is_err());
}

/// Waits until the kernel's periodic session timers have reported at least `enough` expiries (ticks). Returns the
/// reports in the order of arrival.
fn ticks(hooks: &mut PacketHooks, enough: usize) -> Vec<Tick> {
    let mut ticks = Vec::new();
    wait_for("ticks", || {
        ticks.extend(hooks.ticks().expect("ticks"));
        ticks.len() >= enough
    });
    ticks
}

#[test]
fn session_timer_reports_each_period_to_the_daemon() {
    if !root("session_timer_reports_each_period_to_the_daemon") {
        return;
    }
    let mut hooks = hooks();
    open(&mut hooks, v4(), &["number"]);
    framed(&hooks, &v4(), b"payload");
    hooks.set_clock(&v4(), std::time::Duration::from_millis(5)).expect("a clock");
    let ticks = ticks(&mut hooks, 3);
    assert!(ticks.iter().all(|tick| tick.ends == v4() && tick.next == 1 && tick.newest == 0));
    assert!(ticks.windows(2).all(|pair| pair[1].time_ns - pair[0].time_ns >= 4_000_000), "{ticks:?}");
    hooks.set_clock(&v4(), std::time::Duration::ZERO).expect("stopped");
}

/// Each session has its own periodic timer in the kernel. The timer stops while the session has nothing to report.
#[test]
fn session_timer_does_not_run_until_a_packet_is_sent() {
    if !root("session_timer_does_not_run_until_a_packet_is_sent") {
        return;
    }
    const PERIOD: std::time::Duration = std::time::Duration::from_millis(5);
    let mut hooks = hooks();
    open(&mut hooks, v4(), &["number"]);
    hooks.set_clock(&v4(), PERIOD).expect("a clock");
    // exact: the timer of a session would expire several times within this pause
    std::thread::sleep(20 * PERIOD);
    assert_eq!(hooks.ticks().expect("ticks"), []);
    framed(&hooks, &v4(), b"payload");
    let ticks = ticks(&mut hooks, 2);
    assert!(ticks.iter().all(|tick| tick.next == 1 && tick.time_ns > tick.sent_ns));
}
