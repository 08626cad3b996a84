//! One frame at a time, without a network.

use millrace_graft_kernel::TALLIES;
use millrace_graft_kernel::joint::{
    Ends, FRAME_BYTES, Function, Joint, Joints, Protocol, Reason, Tick, Word,
};
use millrace_testkit::wait_for;
use nix::sched::{CpuSet, sched_getcpu, sched_setaffinity};
use nix::unistd::Pid;

use crate::datagrams::{ETHERNET, PASS_ON, REDIRECT, SHOT, XDP_DROP, XDP_PASS, datagram, v4, v6};
use crate::net::root;
use crate::{counted, ends, joints, list, open, other_side};

pub fn run(joints: &Joints, joint: Joint, frame: &[u8]) -> (i32, Vec<u8>) {
    let run = joints.run(joint, frame).expect("a run");
    (run.verdict, run.frame)
}

/// As the sender's joint makes it.
pub fn framed(sender: &Joints, ends: &Ends, payload: &[u8]) -> Vec<u8> {
    let (verdict, frame) = run(sender, Joint::Tx, &datagram(ends, payload));
    assert_eq!(verdict, PASS_ON);
    frame
}

/// What became of it, which must be the only thing that is counted.
pub fn reason(joints: &mut Joints, ends: &Ends, joint: Joint, frame: &[u8]) -> (Reason, i32, Vec<u8>) {
    let before = counted(joints, ends);
    let (verdict, after) = run(joints, joint, frame);
    let is_new = |it: &&(Reason, u64)| !before.contains(it);
    let now = counted(joints, ends);
    let mut new = now.iter().filter(is_new);
    let (reason, _) = *new.next().expect("a reason");
    assert_eq!(new.next(), None, "a second reason beside {reason:?}");
    (reason, verdict, after)
}

/// Of thousands of sessions a daemon looks at those that have packets.
#[test]
fn sessions_with_packets_are_known() {
    if !root("sessions_with_packets_are_known") {
        return;
    }
    // Each CPU counts for itself.
    let mut here = CpuSet::new();
    here.set(sched_getcpu().expect("a CPU")).expect("a CPU");
    sched_setaffinity(Pid::from_raw(0), &here).expect("affinity");
    let mut joints = joints();
    let (near, idle) = (v4(), v6());
    for ends in [near, idle] {
        open(&mut joints, ends, &["number"]);
    }
    let send = |joints: &Joints, count: usize| {
        (0..count).for_each(|_| drop(framed(joints, &near, b"payload")));
    };
    assert_eq!(joints.active(), []);
    // Those are seen whose time is taken: the first one, and one of 64 that follow.
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

/// Frames are put on and taken off, and every checksum is right at each step.
#[test]
fn a_datagram_comes_out_as_it_went_in() {
    if !root("a_datagram_comes_out_as_it_went_in") {
        return;
    }
    let lists: [&[&str]; 5] =
        [&[], &["number"], &["number", "order"], &["number", "repair"], &["number", "order", "repair"]];
    for ends in [v4(), v6()] {
        for functions in lists {
            let (mut sender, mut receiver) = (joints(), joints());
            open(&mut sender, ends, functions);
            open(&mut receiver, other_side(&ends), functions);
            for len in [1, 2, 3, 17, 100, 1000, 1437] {
                let payload: Vec<u8> = (0..len).map(|at| at as u8 ^ 0x5a).collect();
                let plain = datagram(&ends, &payload);
                let frame = framed(&sender, &ends, &payload);
                assert_eq!(frame.len(), plain.len() + FRAME_BYTES, "{functions:?} {len}");
                assert!(crate::net::check_frame(&frame));
                assert_eq!(reason(&mut receiver, &other_side(&ends), Joint::Rx, &frame).1, XDP_PASS);
                let (why, verdict, after) = reason(&mut receiver, &other_side(&ends), Joint::Repair, &frame);
                assert_eq!((why, verdict), (Reason::Delivered, PASS_ON));
                assert_eq!(after[..plain.len()], plain, "{functions:?} {len}");
            }
        }
    }
}

#[test]
fn what_is_of_no_session_is_left_alone() {
    if !root("what_is_of_no_session_is_left_alone") {
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
        assert_eq!(run(&joints, Joint::Tx, frame), (PASS_ON, frame.clone()));
        assert_eq!(run(&joints, Joint::Rx, frame), (XDP_PASS, frame.clone()));
        assert_eq!(run(&joints, Joint::Repair, frame), (PASS_ON, frame.clone()));
    }
    assert_eq!(joints.others().expect("a count"), 3 * strangers.len() as u64);
    assert_eq!(counted(&mut joints, &v4()), []);
}

/// Whatever of a frame is changed, nothing of it is believed.
#[test]
fn forged_frames_are_dropped() {
    if !root("forged_frames_are_dropped") {
        return;
    }
    let (mut sender, mut receiver) = (joints(), joints());
    let there = other_side(&v4());
    open(&mut sender, v4(), &["number", "repair"]);
    open(&mut receiver, there, &["number", "repair"]);
    let good = framed(&sender, &v4(), b"payload");
    let tail = good.len() - FRAME_BYTES;
    for at in tail..good.len() {
        for bit in 0..8 {
            let mut bad = good.clone();
            bad[at] ^= 1 << bit;
            for (joint, drop) in [(Joint::Rx, XDP_DROP), (Joint::Repair, SHOT)] {
                let (why, verdict, _) = reason(&mut receiver, &there, joint, &bad);
                assert!(matches!(why, Reason::Malformed | Reason::Forged), "{at} {bit}: {why:?}");
                assert_eq!(verdict, drop);
            }
        }
    }
    // No frame, less than a frame, what came from here, and of another key.
    let mut other = joints();
    let session = millrace_graft_kernel::joint::Session {
        ends: v4(),
        key: [7; 16],
        list: list(&["number", "repair"]),
        budget_ns: 0,
        protocol: Protocol::Udp,
    };
    other.open(session).expect("a session");
    let reflected = {
        let mut back = framed(&receiver, &there, b"payload");
        let mine = datagram(&v4(), &[0; 7 + FRAME_BYTES]);
        back[..ETHERNET + 28].copy_from_slice(&mine[..ETHERNET + 28]);
        back
    };
    let table = [
        (datagram(&v4(), b"payload without a frame behind it"), Reason::Malformed),
        (datagram(&v4(), b""), Reason::Malformed),
        (reflected, Reason::Forged),
        (framed(&other, &v4(), b"payload"), Reason::Forged),
    ];
    for (frame, want) in table {
        for (joint, drop) in [(Joint::Rx, XDP_DROP), (Joint::Repair, SHOT)] {
            let (why, verdict, _) = reason(&mut receiver, &there, joint, &frame);
            assert_eq!((why, verdict), (want, drop));
        }
    }
    // The good one is as good as before.
    assert_eq!(reason(&mut receiver, &there, Joint::Rx, &good).0, Reason::LetIn);
}

/// Whatever comes, it is judged, and nothing else happens.
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
        // The kernel runs programs on no less than Ethernet's and IP's headers.
        let len = random.usize(ETHERNET + 20..=frame.len());
        let frame = &frame[..len];
        assert!(matches!(run(&receiver, Joint::Rx, frame).0, XDP_DROP | XDP_PASS));
        assert!(matches!(run(&receiver, Joint::Repair, frame).0, PASS_ON | SHOT));
    }
    let counts = counted(&mut receiver, &there);
    let is_refusal = |reason: &Reason| matches!(reason, Reason::Malformed | Reason::Forged);
    assert!(!counts.is_empty() && counts.iter().all(|(reason, _)| is_refusal(reason)), "{counts:?}");
}

/// A list; frames by their numbers, in the order of their arrival, and what becomes of them at XDP.
type Case = (&'static [&'static str], &'static [(usize, Reason)]);

#[test]
fn functions_do_what_their_list_says() {
    if !root("functions_do_what_their_list_says") {
        return;
    }
    use Reason::{Delivered, Duplicate, Late, LetIn, Old};
    let table: [Case; 3] = [
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
        let (mut sender, mut receiver) = (joints(), joints());
        open(&mut sender, v4(), functions);
        open(&mut receiver, there, functions);
        let last = arrivals.iter().map(|(number, _)| *number).max().unwrap_or(0);
        let frames: Vec<_> = (0..=last).map(|_| framed(&sender, &v4(), b"payload")).collect();
        for (number, want) in arrivals {
            let (why, verdict, _) = reason(&mut receiver, &there, Joint::Rx, &frames[*number]);
            assert_eq!(why, *want, "{functions:?}, {number}");
            assert_eq!(verdict, if *want == LetIn { XDP_PASS } else { XDP_DROP });
        }
    }
    // Without a function that its list names, framing is what is left, and that is counted.
    let mut sender = joints();
    open(&mut sender, v4(), &["number", "repair"]);
    sender.remove("repair").expect("removed");
    let (why, verdict, _) = reason(&mut sender, &v4(), Joint::Tx, &datagram(&v4(), b"payload"));
    assert_eq!((why, verdict), (Reason::NoFunction, PASS_ON));
    let mut receiver = joints();
    open(&mut receiver, there, &["number", "repair"]);
    let frame = framed(&sender, &v4(), b"payload");
    assert_eq!(reason(&mut receiver, &there, Joint::Repair, &frame).0, Delivered);
}

/// A request becomes the packet that it asks for, byte for byte, and only of what was sent.
#[test]
fn a_request_becomes_what_it_asks_for() {
    if !root("a_request_becomes_what_it_asks_for") {
        return;
    }
    for ends in [v4(), v6()] {
        let there = other_side(&ends);
        let (mut sender, mut receiver) = (joints(), joints());
        open(&mut sender, ends, &["number", "repair"]);
        open(&mut receiver, there, &["number", "repair"]);
        let sent: Vec<_> = [5, 200, 1201].map(|len| framed(&sender, &ends, &vec![len as u8; len])).into();
        for (number, want) in sent.iter().enumerate() {
            let request = request(&receiver, &there, number as u32);
            let (why, verdict, mut got) = reason(&mut sender, &ends, Joint::Repair, &request);
            assert_eq!((why, verdict), (Reason::Resent, REDIRECT));
            assert!(crate::net::check_frame(&got));
            // What was on its way back before.
            got[..12].copy_from_slice(&want[..12]);
            let ip = if ends.local.is_ipv4() { 20 } else { 40 };
            assert_eq!(got[ETHERNET + ip..], want[ETHERNET + ip..], "number {number}");
        }
        let (why, verdict, _) = reason(&mut sender, &ends, Joint::Repair, &request(&receiver, &there, 3));
        assert_eq!((why, verdict), (Reason::Answered, SHOT));
    }
}

/// What was kept for another session, or before the session began anew, is nobody's any more.
#[test]
fn what_was_kept_before_is_not_sent() {
    if !root("what_was_kept_before_is_not_sent") {
        return;
    }
    let there = other_side(&v4());
    let (mut sender, mut receiver) = (joints(), joints());
    open(&mut sender, v6(), &["number", "repair"]);
    framed(&sender, &v6(), b"another session's");
    sender.close(&v6()).expect("closed");
    open(&mut sender, v4(), &["number", "repair"]);
    open(&mut receiver, there, &["number", "repair"]);
    let request = request(&receiver, &there, 0);
    assert_eq!(reason(&mut sender, &v4(), Joint::Repair, &request).0, Reason::Answered);
    framed(&sender, &v4(), b"its own");
    assert_eq!(reason(&mut sender, &v4(), Joint::Repair, &request).0, Reason::Resent);
    sender.replace(&v4(), &list(&["number", "repair"]), 0).expect("replaced");
    assert_eq!(reason(&mut sender, &v4(), Joint::Repair, &request).0, Reason::Answered);
}

/// As the kernel would make it.
pub fn request(from: &Joints, ends: &Ends, number: u32) -> Vec<u8> {
    datagram(ends, &from.word(ends, Word::Request(number)).expect("a frame"))
}

#[test]
fn two_lists_are_taken_while_they_are_swapped() {
    if !root("two_lists_are_taken_while_they_are_swapped") {
        return;
    }
    let there = other_side(&v4());
    let (mut sender, mut receiver) = (joints(), joints());
    open(&mut sender, v4(), &["number", "order"]);
    open(&mut receiver, there, &["number", "order"]);
    let next = list(&["number", "repair"]);
    let old = framed(&sender, &v4(), b"payload");
    let late = framed(&sender, &v4(), b"payload");
    let epoch = receiver.accept(&there, &next).expect("ready");
    assert_eq!((sender.accept(&v4(), &next).expect("ready"), epoch), (1, 1));
    sender.switch(&v4(), epoch).expect("switched");
    let new = framed(&sender, &v4(), b"payload");
    let at_rx = |receiver: &mut Joints, frame: &[u8]| reason(receiver, &there, Joint::Rx, frame).0;
    // Numbers go on, so what is late is known to be, and dropped by the list that it was sent by.
    assert_eq!(at_rx(&mut receiver, &old), Reason::LetIn);
    assert_eq!(at_rx(&mut receiver, &new), Reason::LetIn);
    assert_eq!(at_rx(&mut receiver, &new), Reason::Duplicate);
    assert_eq!(at_rx(&mut receiver, &late), Reason::Late);
    receiver.retire(&there, 0).expect("retired");
    assert_eq!(at_rx(&mut receiver, &late), Reason::Stale);
    // Stateless: numbers begin anew, and nothing of before is taken.
    receiver.replace(&there, &list(&["number"]), 0).expect("replaced");
    assert_eq!(at_rx(&mut receiver, &new), Reason::Stale);
    sender.replace(&v4(), &list(&["number"]), 0).expect("replaced");
    let first = framed(&sender, &v4(), b"payload");
    assert_eq!(at_rx(&mut receiver, &first), Reason::LetIn);
    // Another list in the same epoch.
    let mut other = joints();
    open(&mut other, v4(), &["number", "order", "repair"]);
    let strange = framed(&other, &v4(), b"payload");
    assert_eq!(at_rx(&mut receiver, &strange), Reason::Stale);
}

#[test]
fn what_cannot_be_is_said() {
    if !root("what_cannot_be_is_said") {
        return;
    }
    let mut joints = joints();
    open(&mut joints, v4(), &["number"]);
    let said = |error: millrace_graft_kernel::Error| error.to_string();
    let session = |ends, functions: &[&str]| millrace_graft_kernel::joint::Session {
        ends,
        key: [0; 16],
        list: list(functions),
        budget_ns: 0,
        protocol: Protocol::Udp,
    };
    let table = [
        (session(v4(), &[]), "there is a session"),
        (session(v6(), &["seal"]), "function seal is not loaded"),
        (session(v6(), &["number"; 9]), "9 functions of a list are more than there is room for, 8"),
        (session(ends("10.0.0.1:1", "[::1]:1"), &[]), "different families"),
    ];
    for (session, wanted) in table {
        let error = said(joints.open(session).expect_err(wanted));
        assert!(error.contains(wanted), "{error}");
    }
    assert!(said(joints.accept(&v6(), &list(&[])).expect_err("none")).contains("there is no session"));
    assert!(said(joints.remove("seal").expect_err("none")).contains("seal is not loaded"));
    // All places, and one again.
    for port in 1..64 {
        open(&mut joints, ends("10.0.0.1:7000", &format!("10.0.0.3:{port}")), &["number"]);
    }
    assert!(said(joints.open(session(v6(), &[])).expect_err("full")).contains("65 sessions"));
    framed(&joints, &v4(), b"payload");
    joints.close(&v4()).expect("closed");
    joints.open(session(v6(), &[])).expect("room");
    assert_eq!(counted(&mut joints, &v6()), [], "it counts anew");
}

/// Two versions of a function, whose states are not alike, take each other's place while packets come.
#[test]
fn another_version_goes_on_with_what_the_first_one_knew() {
    if !root("another_version_goes_on_with_what_the_first_one_knew") {
        return;
    }
    let there = other_side(&v4());
    let (mut sender, mut receiver) = (joints(), joints());
    for joints in [&mut sender, &mut receiver] {
        for (version, image) in TALLIES.iter().enumerate() {
            let function = Function::open(image).expect("a function");
            joints.add_as(format!("tally{}", version + 1), function).expect("loaded");
        }
    }
    let words = |receiver: &Joints, function: &str| -> Vec<u64> {
        let state = receiver.state(&there, function).expect("a state").expect("it has one");
        // Of the first version a word of 4 bytes, which the map keeps in 8.
        state
            .chunks(8)
            .map(|word| word.iter().rev().fold(0, |sum, byte| sum << 8 | u64::from(*byte)))
            .collect()
    };
    open(&mut sender, v4(), &["number", "tally1"]);
    open(&mut receiver, there, &["number", "tally1"]);
    let send = |sender: &Joints, receiver: &Joints| {
        let frame = framed(sender, &v4(), b"payload");
        assert_eq!(run(receiver, Joint::Rx, &frame).0, XDP_PASS);
    };
    (0..3).for_each(|_| send(&sender, &receiver));
    let late = framed(&sender, &v4(), b"payload");
    let next = list(&["number", "tally2"]);
    let epoch = receiver.accept(&there, &next).expect("ready");
    receiver.migrate(&there, "tally1", "tally2", &[Joint::Rx, Joint::Repair]).expect("moved");
    sender.accept(&v4(), &next).expect("ready");
    sender.switch(&v4(), epoch).expect("switched");
    (0..2).for_each(|_| send(&sender, &receiver));
    assert_eq!(words(&receiver, "tally2"), [5, 14, 3]);
    // As it is sent by: there is nothing in it about what leaves.
    receiver.migrate(&there, "tally1", "tally2", &[Joint::Tx]).expect("nothing");
    assert_eq!(words(&receiver, "tally2"), [5, 14, 3]);
    // What was sent before is the first one's.
    assert_eq!(run(&receiver, Joint::Rx, &late).0, XDP_PASS);
    assert_eq!((words(&receiver, "tally1"), words(&receiver, "tally2")), (vec![4], vec![5, 14, 3]));
    // There is no way back, nor from what is no version of it.
    for (from, to) in [("tally2", "tally1"), ("repair", "tally2"), ("number", "tally2")] {
        let error = receiver.migrate(&there, from, to, &Joint::ALL).expect_err("no way").to_string();
        assert!(error.contains("cannot be made out of"), "{error}");
    }
}

/// A version whose state is the same has the same state.
#[test]
fn versions_that_are_alike_share_what_they_know() {
    if !root("versions_that_are_alike_share_what_they_know") {
        return;
    }
    let tally = || Function::open(TALLIES[0]).expect("a function");
    let (mut sender, mut receiver, there) = (joints(), joints(), other_side(&v4()));
    for joints in [&mut sender, &mut receiver] {
        joints.add_as("old".to_owned(), tally()).expect("loaded");
        joints.add_version("new".to_owned(), tally(), Some("old")).expect("loaded");
    }
    open(&mut sender, v4(), &["number", "old"]);
    open(&mut receiver, there, &["number", "old"]);
    let arrives = |sender: &Joints, receiver: &Joints| {
        let frame = framed(sender, &v4(), b"payload");
        assert_eq!(run(receiver, Joint::Rx, &frame).0, XDP_PASS);
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

/// So that what is counted before it begins anew is all that there was.
#[test]
fn a_session_that_is_paused_lets_nothing_pass() {
    if !root("a_session_that_is_paused_lets_nothing_pass") {
        return;
    }
    let there = other_side(&v4());
    let (mut sender, mut receiver) = (joints(), joints());
    open(&mut sender, v4(), &["number"]);
    open(&mut receiver, there, &["number"]);
    let came = framed(&sender, &v4(), b"payload");
    let late = framed(&sender, &v4(), b"payload");
    assert_eq!(reason(&mut receiver, &there, Joint::Repair, &came).0, Reason::Delivered);
    sender.pause(&v4()).expect("paused");
    receiver.pause(&there).expect("paused");
    assert_eq!(reason(&mut sender, &v4(), Joint::Tx, &datagram(&v4(), b"x")).0, Reason::Paused);
    assert_eq!(reason(&mut receiver, &there, Joint::Rx, &late).0, Reason::Stale);
    sender.replace(&v4(), &list(&["number"]), 1).expect("replaced");
    receiver.replace(&there, &list(&["number"]), 1).expect("replaced");
    assert_eq!(reason(&mut sender, &v4(), Joint::Tx, &datagram(&v4(), b"x")).0, Reason::Paused);
    sender.resume(&v4()).expect("goes on");
    let first = framed(&sender, &v4(), b"payload");
    assert_eq!(reason(&mut receiver, &there, Joint::Repair, &first).0, Reason::Delivered);
}

/// Congestion controls, and objects with more than one function in them, are not functions.
#[test]
fn objects_that_are_none_are_refused() {
    use millrace_graft_kernel::SHIPPED;
    for (name, image) in SHIPPED {
        let error = Function::open(image).err().expect(name).to_string();
        assert!(error.contains("is of no joint"), "{error}");
    }
    assert!(Function::open(b"ELF").is_err());
}

/// At least so many, as they come.
fn ticks(joints: &mut Joints, enough: usize) -> Vec<Tick> {
    let mut ticks = Vec::new();
    wait_for("ticks", || {
        ticks.extend(joints.ticks().expect("ticks"));
        ticks.len() >= enough
    });
    ticks
}

#[test]
fn clocks_tick() {
    if !root("clocks_tick") {
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

/// Many sessions are many clocks: those of which nothing is to be told do not go.
#[test]
fn clocks_stand_until_something_is_sent() {
    if !root("clocks_stand_until_something_is_sent") {
        return;
    }
    const PERIOD: std::time::Duration = std::time::Duration::from_millis(5);
    let mut joints = joints();
    open(&mut joints, v4(), &["number"]);
    joints.set_clock(&v4(), PERIOD).expect("a clock");
    std::thread::sleep(20 * PERIOD); // exact: it would have ticked often
    assert_eq!(joints.ticks().expect("ticks"), []);
    framed(&joints, &v4(), b"payload");
    let ticks = ticks(&mut joints, 2);
    assert!(ticks.iter().all(|tick| tick.next == 1 && tick.time_ns > tick.sent_ns));
}
