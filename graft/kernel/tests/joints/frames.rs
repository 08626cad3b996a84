//! Tests of the dispatcher with one frame at a time (BPF_PROG_TEST_RUN), without a network.

use millrace_graft_kernel::TALLIES;
use millrace_graft_kernel::joint::{
    FRAME_BYTES, FunctionJoint, JointReason, Joints, OpenedFunction, SessionEnds, TalkMessage, Tick,
    WireProtocol,
};
use millrace_testkit::wait_for;
use nix::sched::{CpuSet, sched_getcpu, sched_setaffinity};
use nix::unistd::Pid;

use crate::datagrams::{ETHERNET, PASS_ON, REDIRECT, SHOT, XDP_DROP, XDP_PASS, datagram, v4, v6};
use crate::net::root;
use crate::{counted, ends, joints, list, open, other_side};

pub fn run(joints: &Joints, joint: FunctionJoint, frame: &[u8]) -> (i32, Vec<u8>) {
    let run = joints.run(joint, frame).expect("a run");
    (run.verdict, run.frame)
}

/// Returns the frame of a payload, as the sender's TC egress hook makes it.
pub fn framed(sender: &Joints, ends: &SessionEnds, payload: &[u8]) -> Vec<u8> {
    let (verdict, frame) = run(sender, FunctionJoint::Tx, &datagram(ends, payload));
    assert_eq!(verdict, PASS_ON);
    frame
}

/// Runs a frame at a hook. Returns its reason, verdict and bytes, and checks that no other reason was counted.
pub fn reason(
    joints: &mut Joints,
    ends: &SessionEnds,
    joint: FunctionJoint,
    frame: &[u8],
) -> (JointReason, i32, Vec<u8>) {
    let before = counted(joints, ends);
    let (verdict, after) = run(joints, joint, frame);
    let is_new = |it: &&(JointReason, u64)| !before.contains(it);
    let now = counted(joints, ends);
    let mut new = now.iter().filter(is_new);
    let (reason, _) = *new.next().expect("a reason");
    assert_eq!(new.next(), None, "a second reason beside {reason:?}");
    (reason, verdict, after)
}

/// A daemon with thousands of sessions reads the statistics only of those that had packets.
#[test]
fn session_is_found_by_its_packets() {
    if !root("session_is_found_by_its_packets") {
        return;
    }
    // Every CPU times its own first packet, so the test stays on one CPU.
    let mut here = CpuSet::new();
    here.set(sched_getcpu().expect("a CPU")).expect("a CPU");
    sched_setaffinity(Pid::from_raw(0), &here).expect("affinity");
    let mut joints = joints();
    let near = v4();
    let idle = v6();
    for ends in [near, idle] {
        open(&mut joints, ends, &["number"]);
    }
    let send = |joints: &Joints, count: usize| {
        (0..count).for_each(|_| drop(framed(joints, &near, b"payload")));
    };
    assert_eq!(joints.active(), []);
    // Only timed packets mark a session as active: the first one, and every 64th after it.
    for count in [1, 64, 64] {
        send(&joints, count);
        assert_eq!(joints.active(), [near]);
        assert_eq!(joints.active(), []);
    }
    send(&joints, 64);
    joints.close(&near).expect("closed");
    open(&mut joints, near, &["number"]);
    assert_eq!(joints.active(), [], "who has its place begins anew");
}

/// Frames are added and removed again, and all checksums are correct at each step.
#[test]
fn datagram_arrives_unchanged() {
    if !root("datagram_arrives_unchanged") {
        return;
    }
    let lists: [&[&str]; 5] =
        [&[], &["number"], &["number", "order"], &["number", "repair"], &["number", "order", "repair"]];
    for ends in [v4(), v6()] {
        for functions in lists {
            let mut sender = joints();
            let mut receiver = joints();
            open(&mut sender, ends, functions);
            open(&mut receiver, other_side(&ends), functions);
            for len in [1, 2, 3, 17, 100, 1000, 1437] {
                let payload: Vec<u8> = (0..len).map(|at| at as u8 ^ 0x5a).collect();
                let plain = datagram(&ends, &payload);
                let frame = framed(&sender, &ends, &payload);
                assert_eq!(frame.len(), plain.len() + FRAME_BYTES, "{functions:?} {len}");
                assert!(crate::net::check_frame(&frame));
                assert_eq!(reason(&mut receiver, &other_side(&ends), FunctionJoint::Rx, &frame).1, XDP_PASS);
                let (why, verdict, after) =
                    reason(&mut receiver, &other_side(&ends), FunctionJoint::Repair, &frame);
                assert_eq!((why, verdict), (JointReason::Delivered, PASS_ON));
                assert_eq!(after[..plain.len()], plain, "{functions:?} {len}");
            }
        }
    }
}

#[test]
fn packet_of_no_session_is_left_alone() {
    if !root("packet_of_no_session_is_left_alone") {
        return;
    }
    let mut joints = joints();
    open(&mut joints, v4(), &["number"]);
    let strangers = [
        datagram(&ends("10.0.0.1:7001", "10.0.0.2:6000"), b"other port"),
        datagram(&ends("10.0.0.1:7000", "10.0.0.3:6000"), b"other peer"),
        datagram(&v6(), b"other family"),
        vec![0; 60],
        datagram(&v4(), b"cut")[..40].to_vec(),
    ];
    for frame in &strangers {
        assert_eq!(run(&joints, FunctionJoint::Tx, frame), (PASS_ON, frame.clone()));
        assert_eq!(run(&joints, FunctionJoint::Rx, frame), (XDP_PASS, frame.clone()));
        assert_eq!(run(&joints, FunctionJoint::Repair, frame), (PASS_ON, frame.clone()));
    }
    assert_eq!(joints.others().expect("a count"), 3 * strangers.len() as u64);
    assert_eq!(counted(&mut joints, &v4()), []);
}

/// A frame with any changed bit is dropped.
#[test]
fn forged_frames_are_dropped() {
    if !root("forged_frames_are_dropped") {
        return;
    }
    let mut sender = joints();
    let mut receiver = joints();
    let there = other_side(&v4());
    open(&mut sender, v4(), &["number", "repair"]);
    open(&mut receiver, there, &["number", "repair"]);
    let good = framed(&sender, &v4(), b"payload");
    let tail = good.len() - FRAME_BYTES;
    for at in tail..good.len() {
        for bit in 0..8 {
            let mut bad = good.clone();
            bad[at] ^= 1 << bit;
            for (joint, drop) in [(FunctionJoint::Rx, XDP_DROP), (FunctionJoint::Repair, SHOT)] {
                let (why, verdict, _) = reason(&mut receiver, &there, joint, &bad);
                assert!(matches!(why, JointReason::Malformed | JointReason::Forged), "{at} {bit}: {why:?}");
                assert_eq!(verdict, drop);
            }
        }
    }
    // Further cases: no frame, a cut frame, a frame that is reflected to its sender, and one with another key.
    let mut other = joints();
    let session = millrace_graft_kernel::joint::FunctionSession {
        ends: v4(),
        key: [7; 16],
        list: list(&["number", "repair"]),
        budget_ns: 0,
        protocol: WireProtocol::Udp,
    };
    other.open(session).expect("a session");
    let reflected = {
        let mut back = framed(&receiver, &there, b"payload");
        let mine = datagram(&v4(), &[0; 7 + FRAME_BYTES]);
        back[..ETHERNET + 28].copy_from_slice(&mine[..ETHERNET + 28]);
        back
    };
    let table = [
        (datagram(&v4(), b"payload without a frame behind it"), JointReason::Malformed),
        (datagram(&v4(), b""), JointReason::Malformed),
        (reflected, JointReason::Forged),
        (framed(&other, &v4(), b"payload"), JointReason::Forged),
    ];
    for (frame, want) in table {
        for (joint, drop) in [(FunctionJoint::Rx, XDP_DROP), (FunctionJoint::Repair, SHOT)] {
            let (why, verdict, _) = reason(&mut receiver, &there, joint, &frame);
            assert_eq!((why, verdict), (want, drop));
        }
    }
    // The unchanged frame is still accepted afterwards.
    assert_eq!(reason(&mut receiver, &there, FunctionJoint::Rx, &good).0, JointReason::LetIn);
}

/// Random frames get a verdict and a reason, and change nothing else.
#[test]
fn random_frames_are_judged() {
    if !root("random_frames_are_judged") {
        return;
    }
    let mut random = fastrand::Rng::with_seed(14);
    let mut receiver = joints();
    let there = other_side(&v4());
    open(&mut receiver, there, &["number", "order", "repair"]);
    for _ in 0..3000 {
        let payload: Vec<u8> = (0..random.usize(0..60)).map(|_| random.u8(..)).collect();
        let mut frame = datagram(&v4(), &payload);
        for _ in 0..random.usize(0..4) {
            let at = random.usize(..frame.len());
            frame[at] = random.u8(..);
        }
        // BPF_PROG_TEST_RUN needs at least the headers of Ethernet and IP.
        let len = random.usize(ETHERNET + 20..=frame.len());
        let frame = &frame[..len];
        assert!(matches!(run(&receiver, FunctionJoint::Rx, frame).0, XDP_DROP | XDP_PASS));
        assert!(matches!(run(&receiver, FunctionJoint::Repair, frame).0, PASS_ON | SHOT));
    }
    let counts = counted(&mut receiver, &there);
    let is_refusal = |reason: &JointReason| matches!(reason, JointReason::Malformed | JointReason::Forged);
    assert!(!counts.is_empty() && counts.iter().all(|(reason, _)| is_refusal(reason)), "{counts:?}");
}

/// A list of functions, and frames in the order of arrival: the packet number and the reason at XDP.
type FrameCase = (&'static [&'static str], &'static [(usize, JointReason)]);

#[test]
fn functions_run_in_the_order_of_their_list() {
    if !root("functions_run_in_the_order_of_their_list") {
        return;
    }
    use JointReason::{Delivered, Duplicate, Late, LetIn, Old};
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
        let mut sender = joints();
        let mut receiver = joints();
        open(&mut sender, v4(), functions);
        open(&mut receiver, there, functions);
        let last = arrivals.iter().map(|(number, _)| *number).max().unwrap_or(0);
        let frames: Vec<_> = (0..=last).map(|_| framed(&sender, &v4(), b"payload")).collect();
        for (number, want) in arrivals {
            let (why, verdict, _) = reason(&mut receiver, &there, FunctionJoint::Rx, &frames[*number]);
            assert_eq!(why, *want, "{functions:?}, {number}");
            assert_eq!(verdict, if *want == LetIn { XDP_PASS } else { XDP_DROP });
        }
    }
    // If a function of the list is not loaded, packets pass with framing only, which is counted.
    let mut sender = joints();
    open(&mut sender, v4(), &["number", "repair"]);
    sender.remove("repair").expect("removed");
    let (why, verdict, _) = reason(&mut sender, &v4(), FunctionJoint::Tx, &datagram(&v4(), b"payload"));
    assert_eq!((why, verdict), (JointReason::NoFunction, PASS_ON));
    let mut receiver = joints();
    open(&mut receiver, there, &["number", "repair"]);
    let frame = framed(&sender, &v4(), b"payload");
    assert_eq!(reason(&mut receiver, &there, FunctionJoint::Repair, &frame).0, Delivered);
}

/// A request is turned into the requested packet, byte for byte, if that was sent.
#[test]
fn request_for_a_packet_becomes_that_packet() {
    if !root("request_for_a_packet_becomes_that_packet") {
        return;
    }
    for ends in [v4(), v6()] {
        let there = other_side(&ends);
        let mut sender = joints();
        let mut receiver = joints();
        open(&mut sender, ends, &["number", "repair"]);
        open(&mut receiver, there, &["number", "repair"]);
        let sent: Vec<_> = [5, 200, 1201].map(|len| framed(&sender, &ends, &vec![len as u8; len])).into();
        for (number, want) in sent.iter().enumerate() {
            let request = request(&receiver, &there, number as u32);
            let (why, verdict, mut got) = reason(&mut sender, &ends, FunctionJoint::Repair, &request);
            assert_eq!((why, verdict), (JointReason::Resent, REDIRECT));
            assert!(crate::net::check_frame(&got));
            // The link addresses were swapped, since the request was turned around.
            got[..12].copy_from_slice(&want[..12]);
            let ip = if ends.local.is_ipv4() { 20 } else { 40 };
            assert_eq!(got[ETHERNET + ip..], want[ETHERNET + ip..], "number {number}");
        }
        let (why, verdict, _) =
            reason(&mut sender, &ends, FunctionJoint::Repair, &request(&receiver, &there, 3));
        assert_eq!((why, verdict), (JointReason::Answered, SHOT));
    }
}

/// A request does not return packets that were kept for another session, or before the session restarted.
#[test]
fn packets_kept_before_a_restart_are_not_sent() {
    if !root("packets_kept_before_a_restart_are_not_sent") {
        return;
    }
    let there = other_side(&v4());
    let mut sender = joints();
    let mut receiver = joints();
    open(&mut sender, v6(), &["number", "repair"]);
    framed(&sender, &v6(), b"another session's");
    sender.close(&v6()).expect("closed");
    open(&mut sender, v4(), &["number", "repair"]);
    open(&mut receiver, there, &["number", "repair"]);
    let request = request(&receiver, &there, 0);
    assert_eq!(reason(&mut sender, &v4(), FunctionJoint::Repair, &request).0, JointReason::Answered);
    framed(&sender, &v4(), b"its own");
    assert_eq!(reason(&mut sender, &v4(), FunctionJoint::Repair, &request).0, JointReason::Resent);
    sender.replace(&v4(), &list(&["number", "repair"]), 0).expect("replaced");
    assert_eq!(reason(&mut sender, &v4(), FunctionJoint::Repair, &request).0, JointReason::Answered);
}

/// Returns a request for a packet, as the BPF functions make it.
pub fn request(from: &Joints, ends: &SessionEnds, number: u32) -> Vec<u8> {
    datagram(ends, &from.word(ends, TalkMessage::Request(number)).expect("a frame"))
}

#[test]
fn packets_of_both_lists_are_accepted_during_a_swap() {
    if !root("packets_of_both_lists_are_accepted_during_a_swap") {
        return;
    }
    let there = other_side(&v4());
    let mut sender = joints();
    let mut receiver = joints();
    open(&mut sender, v4(), &["number", "order"]);
    open(&mut receiver, there, &["number", "order"]);
    let next = list(&["number", "repair"]);
    let old = framed(&sender, &v4(), b"payload");
    let late = framed(&sender, &v4(), b"payload");
    let epoch = receiver.accept(&there, &next).expect("ready");
    assert_eq!((sender.accept(&v4(), &next).expect("ready"), epoch), (1, 1));
    sender.switch(&v4(), epoch).expect("switched");
    let new = framed(&sender, &v4(), b"payload");
    let at_rx = |receiver: &mut Joints, frame: &[u8]| reason(receiver, &there, FunctionJoint::Rx, frame).0;
    // Packet numbers continue across the swap, so duplicates and late packets are recognised in both epochs.
    assert_eq!(at_rx(&mut receiver, &old), JointReason::LetIn);
    assert_eq!(at_rx(&mut receiver, &new), JointReason::LetIn);
    assert_eq!(at_rx(&mut receiver, &new), JointReason::Duplicate);
    assert_eq!(at_rx(&mut receiver, &late), JointReason::Late);
    receiver.retire(&there, 0).expect("retired");
    assert_eq!(at_rx(&mut receiver, &late), JointReason::Stale);
    // The list is replaced without its state: numbers restart, and no earlier frame is accepted.
    receiver.replace(&there, &list(&["number"]), 0).expect("replaced");
    assert_eq!(at_rx(&mut receiver, &new), JointReason::Stale);
    sender.replace(&v4(), &list(&["number"]), 0).expect("replaced");
    let first = framed(&sender, &v4(), b"payload");
    assert_eq!(at_rx(&mut receiver, &first), JointReason::LetIn);
    // A frame with another list's identifier in the same epoch is dropped.
    let mut other = joints();
    open(&mut other, v4(), &["number", "order", "repair"]);
    let strange = framed(&other, &v4(), b"payload");
    assert_eq!(at_rx(&mut receiver, &strange), JointReason::Stale);
}

#[test]
fn invalid_session_changes_are_refused() {
    if !root("invalid_session_changes_are_refused") {
        return;
    }
    let mut joints = joints();
    open(&mut joints, v4(), &["number"]);
    let said = |error: millrace_graft_kernel::Error| error.to_string();
    let session = |ends, functions: &[&str]| millrace_graft_kernel::joint::FunctionSession {
        ends,
        key: [0; 16],
        list: list(functions),
        budget_ns: 0,
        protocol: WireProtocol::Udp,
    };
    let table = [
        (session(v4(), &[]), "there is a session"),
        (session(v6(), &["seal"]), "function seal is not loaded"),
        (session(v6(), &["number"; 9]), "too many functions of a list: 9, at most 8"),
        (session(ends("10.0.0.1:1", "[::1]:1"), &[]), "different families"),
    ];
    for (session, wanted) in table {
        let error = said(joints.open(session).expect_err(wanted));
        assert!(error.contains(wanted), "{error}");
    }
    assert!(said(joints.accept(&v6(), &list(&[])).expect_err("none")).contains("there is no session"));
    assert!(said(joints.remove("seal").expect_err("none")).contains("seal is not loaded"));
    // All 64 sessions are opened, and one more is refused.
    for port in 1..64 {
        open(&mut joints, ends("10.0.0.1:7000", &format!("10.0.0.3:{port}")), &["number"]);
    }
    assert!(said(joints.open(session(v6(), &[])).expect_err("full")).contains("too many sessions: 65"));
    framed(&joints, &v4(), b"payload");
    joints.close(&v4()).expect("closed");
    joints.open(session(v6(), &[])).expect("room");
    assert_eq!(counted(&mut joints, &v6()), [], "it counts anew");
}

/// Two versions of a function with different states replace each other while packets arrive.
#[test]
fn new_function_version_continues_with_the_old_state() {
    if !root("new_function_version_continues_with_the_old_state") {
        return;
    }
    let there = other_side(&v4());
    let mut sender = joints();
    let mut receiver = joints();
    for joints in [&mut sender, &mut receiver] {
        for (version, image) in TALLIES.iter().enumerate() {
            let function = OpenedFunction::open(image).expect("a function");
            joints.add_as(format!("tally{}", version + 1), function).expect("loaded");
        }
    }
    let words = |receiver: &Joints, function: &str| -> Vec<u64> {
        let state = receiver.state(&there, function).expect("a state").expect("it has one");
        // The state of version 1 has 4 bytes, which the map pads to 8.
        state
            .chunks(8)
            .map(|word| word.iter().rev().fold(0, |sum, byte| sum << 8 | u64::from(*byte)))
            .collect()
    };
    open(&mut sender, v4(), &["number", "tally1"]);
    open(&mut receiver, there, &["number", "tally1"]);
    let send = |sender: &Joints, receiver: &Joints| {
        let frame = framed(sender, &v4(), b"payload");
        assert_eq!(run(receiver, FunctionJoint::Rx, &frame).0, XDP_PASS);
    };
    (0..3).for_each(|_| send(&sender, &receiver));
    let late = framed(&sender, &v4(), b"payload");
    let next = list(&["number", "tally2"]);
    let epoch = receiver.accept(&there, &next).expect("ready");
    receiver.migrate(&there, "tally1", "tally2", &[FunctionJoint::Rx, FunctionJoint::Repair]).expect("moved");
    sender.accept(&v4(), &next).expect("ready");
    sender.switch(&v4(), epoch).expect("switched");
    (0..2).for_each(|_| send(&sender, &receiver));
    assert_eq!(words(&receiver, "tally2"), [5, 14, 3]);
    // Converting the part for outgoing packets changes nothing, since the state has no such part.
    receiver.migrate(&there, "tally1", "tally2", &[FunctionJoint::Tx]).expect("nothing");
    assert_eq!(words(&receiver, "tally2"), [5, 14, 3]);
    // Packets of the old epoch are still handled by version 1.
    assert_eq!(run(&receiver, FunctionJoint::Rx, &late).0, XDP_PASS);
    assert_eq!((words(&receiver, "tally1"), words(&receiver, "tally2")), (vec![4], vec![5, 14, 3]));
    // Version 1 cannot convert the state of version 2, and version 2 not that of another function.
    for (from, to) in [("tally2", "tally1"), ("repair", "tally2"), ("number", "tally2")] {
        let error = receiver.migrate(&there, from, to, &FunctionJoint::ALL).expect_err("no way").to_string();
        assert!(error.contains("cannot take over the state"), "{error}");
    }
}

/// A version whose state has the same layout shares the map of states with the old one.
#[test]
fn function_versions_with_equal_state_share_it() {
    if !root("function_versions_with_equal_state_share_it") {
        return;
    }
    let tally = || OpenedFunction::open(TALLIES[0]).expect("a function");
    let mut sender = joints();
    let mut receiver = joints();
    let there = other_side(&v4());
    for joints in [&mut sender, &mut receiver] {
        joints.add_as("old".to_owned(), tally()).expect("loaded");
        joints.add_version("new".to_owned(), tally(), Some("old")).expect("loaded");
    }
    open(&mut sender, v4(), &["number", "old"]);
    open(&mut receiver, there, &["number", "old"]);
    let arrives = |sender: &Joints, receiver: &Joints| {
        let frame = framed(sender, &v4(), b"payload");
        assert_eq!(run(receiver, FunctionJoint::Rx, &frame).0, XDP_PASS);
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

/// While a session is paused no packet passes, so its counters are complete before a restart.
#[test]
fn paused_session_passes_no_packet() {
    if !root("paused_session_passes_no_packet") {
        return;
    }
    let there = other_side(&v4());
    let mut sender = joints();
    let mut receiver = joints();
    open(&mut sender, v4(), &["number"]);
    open(&mut receiver, there, &["number"]);
    let came = framed(&sender, &v4(), b"payload");
    let late = framed(&sender, &v4(), b"payload");
    assert_eq!(reason(&mut receiver, &there, FunctionJoint::Repair, &came).0, JointReason::Delivered);
    sender.pause(&v4()).expect("paused");
    receiver.pause(&there).expect("paused");
    assert_eq!(reason(&mut sender, &v4(), FunctionJoint::Tx, &datagram(&v4(), b"x")).0, JointReason::Paused);
    assert_eq!(reason(&mut receiver, &there, FunctionJoint::Rx, &late).0, JointReason::Stale);
    sender.replace(&v4(), &list(&["number"]), 1).expect("replaced");
    receiver.replace(&there, &list(&["number"]), 1).expect("replaced");
    assert_eq!(reason(&mut sender, &v4(), FunctionJoint::Tx, &datagram(&v4(), b"x")).0, JointReason::Paused);
    sender.resume(&v4()).expect("goes on");
    let first = framed(&sender, &v4(), b"payload");
    assert_eq!(reason(&mut receiver, &there, FunctionJoint::Repair, &first).0, JointReason::Delivered);
}

/// Object files of congestion controls, and objects with more than one function, are refused.
#[test]
fn objects_that_hold_no_single_function_are_refused() {
    use millrace_graft_kernel::SHIPPED;
    for (name, image) in SHIPPED {
        let error = OpenedFunction::open(image).err().expect(name).to_string();
        assert!(error.contains("is of no joint"), "{error}");
    }
    assert!(OpenedFunction::open(b"ELF").is_err());
}

/// Waits until at least `enough` clock events have arrived. Returns them in their order.
fn ticks(joints: &mut Joints, enough: usize) -> Vec<Tick> {
    let mut ticks = Vec::new();
    wait_for("ticks", || {
        ticks.extend(joints.ticks().expect("ticks"));
        ticks.len() >= enough
    });
    ticks
}

#[test]
fn function_clock_ticks_are_delivered() {
    if !root("function_clock_ticks_are_delivered") {
        return;
    }
    let mut joints = joints();
    open(&mut joints, v4(), &["number"]);
    framed(&joints, &v4(), b"payload");
    joints.set_clock(&v4(), std::time::Duration::from_millis(5)).expect("a clock");
    let ticks = ticks(&mut joints, 3);
    assert!(ticks.iter().all(|tick| tick.ends == v4() && tick.next == 1 && tick.newest == 0));
    assert!(ticks.windows(2).all(|pair| pair[1].time_ns - pair[0].time_ns >= 4_000_000), "{ticks:?}");
    joints.set_clock(&v4(), std::time::Duration::ZERO).expect("stopped");
}

/// Each session has a clock. A clock with nothing to report stands still.
#[test]
fn function_clock_stands_still_until_something_is_sent() {
    if !root("function_clock_stands_still_until_something_is_sent") {
        return;
    }
    const PERIOD: std::time::Duration = std::time::Duration::from_millis(5);
    let mut joints = joints();
    open(&mut joints, v4(), &["number"]);
    joints.set_clock(&v4(), PERIOD).expect("a clock");
    std::thread::sleep(20 * PERIOD); // exact: time for several ticks
    assert_eq!(joints.ticks().expect("ticks"), []);
    framed(&joints, &v4(), b"payload");
    let ticks = ticks(&mut joints, 2);
    assert!(ticks.iter().all(|tick| tick.next == 1 && tick.time_ns > tick.sent_ns));
}
