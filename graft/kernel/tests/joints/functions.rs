//! Functions one frame at a time: what they let through, and what they send themselves, which is caught on the loopback
//! interface of a namespace, where test runs take place.

use std::collections::BTreeSet;
use std::time::Duration;

use millrace_graft_kernel::joint::{Ends, FRAME_BYTES, Joint, Joints, Progress, Reason, Word};
use millrace_testkit::{wait_for, wait_until};

use crate::datagrams::{ETHERNET, PASS_ON, SHOT, XDP_DROP, datagram, v4, v6};
use crate::net::{Capture, RawSender, check_frame, inside, ip, root, stay_on_this_cpu};
use crate::traffic::PARTIAL;
use crate::{counted, joints_of, list, open, other_side};

/// `enum graft_kind`.
pub const DATA: u8 = 0;
const REQUEST: u8 = 1;
const ACK: u8 = 3;
const GONE: u8 = 4;
pub const RETURNED: u8 = 6;
const ACK_BYTES: usize = 88;

/// A frame to nobody: of a type that is for experiments.
const MARKER: [u8; 60] = {
    let mut frame = [0; 60];
    (frame[12], frame[13]) = (0x88, 0xb5);
    frame
};

/// Two ends, and what their functions send.
pub struct Pair {
    pub namespace: String,
    pub capture: Capture,
    /// What arrives on the interface, as it has left or as a function has it arrive.
    arriving: Capture,
    /// Sends what shows that all before it has arrived.
    marker: RawSender,
    pub sender: Joints,
    pub receiver: Joints,
    pub ends: Ends,
}

impl Drop for Pair {
    fn drop(&mut self) {
        ip(&format!("netns del {}", self.namespace));
    }
}

/// What became of a packet at the receiver.
#[derive(Debug)]
pub struct Arrival {
    pub reason: Reason,
    pub frame: Vec<u8>,
    /// Kinds and frames of what the receiver has sent.
    pub sent: Vec<(u8, Vec<u8>)>,
}

impl Pair {
    pub fn new(name: &str, ends: Ends, functions: &[&str], parameters: &[(&str, &str, u64)]) -> Self {
        Self::with(name, ends, functions, functions, parameters)
    }

    /// With functions that are loaded, too, for other lists.
    pub fn with(
        name: &str,
        ends: Ends,
        functions: &[&str],
        loaded: &[&str],
        parameters: &[(&str, &str, u64)],
    ) -> Self {
        let namespace = format!("mr-{}-{name}", std::process::id());
        ip(&format!("netns add {namespace}"));
        ip(&format!("-n {namespace} link set lo mtu 1500 up"));
        let [mut sender, mut receiver] = [0, 1].map(|_| joints_of(loaded, parameters));
        open(&mut sender, ends, functions);
        open(&mut receiver, other_side(&ends), functions);
        let capture = Capture::on(&namespace, "lo");
        capture.only_outgoing();
        let arriving = Capture::on(&namespace, "lo");
        arriving.only_incoming();
        let marker = RawSender::new(&namespace, "lo");
        Self { capture, arriving, marker, namespace, sender, receiver, ends }
    }

    /// Both ends take the other list, too, and send by it. Returns its epoch.
    pub fn swap(&mut self, functions: &[&str]) -> u8 {
        let (here, there) = (self.ends, other_side(&self.ends));
        let [epoch, _] = [(&mut self.sender, here), (&mut self.receiver, there)].map(|(joints, ends)| {
            let epoch = joints.accept(&ends, &list(functions)).expect("accepted");
            joints.switch(&ends, epoch).expect("switched");
            epoch
        });
        epoch
    }

    /// An application sends; with what a function sends beside it.
    pub fn send(&mut self, payload: &[u8]) -> (Reason, i32, Vec<(u8, Vec<u8>)>) {
        let before = counted(&mut self.sender, &self.ends);
        let frame = datagram(&self.ends, payload);
        let run = inside(&self.namespace, || self.sender.run(Joint::Tx, &frame)).expect("a run");
        let now = counted(&mut self.sender, &self.ends);
        let reason =
            now.iter().find(|it| !before.contains(it) && it.0 != Reason::SentByUs).expect("a reason").0;
        let mut sent = caught(&self.capture);
        if run.verdict == PASS_ON {
            sent.push((kind(&run.frame), run.frame));
        }
        (reason, run.verdict, sent)
    }

    /// What must leave alone, with its frame.
    pub fn frame(&mut self, payload: &[u8]) -> Vec<u8> {
        let (reason, verdict, mut sent) = self.send(payload);
        assert_eq!((reason, verdict, sent.len()), (Reason::Sent, PASS_ON, 1));
        sent.remove(0).1
    }

    pub fn at_receiver(&mut self, frame: &[u8]) -> Arrival {
        self.arriving.frames();
        let there = other_side(&self.ends);
        let mut arrival = std::thread::scope(|scope| {
            let run = || {
                stay_on_this_cpu();
                let arrival = arrive(&self.namespace, &mut self.receiver, &there, frame, &self.capture);
                self.marker.send(&MARKER);
                arrival
            };
            scope.spawn(run).join().expect("an arrival")
        });
        // What a function has arrive waits in the queue of that CPU, and the marker behind it.
        let mut arrived = Vec::new();
        wait_for("the marker", || {
            arrived.extend(self.arriving.frames());
            arrived.iter().any(|frame| frame[12..14] == MARKER[12..14])
        });
        arrival.sent.extend(datagrams(arrived).into_iter().filter(|(kind, _)| *kind == RETURNED));
        arrival
    }

    /// At one joint of the receiver, as in a batch.
    fn at(&mut self, joint: Joint, frame: &[u8]) -> Arrival {
        let (there, before) = (other_side(&self.ends), counted(&mut self.receiver, &other_side(&self.ends)));
        let run = inside(&self.namespace, || self.receiver.run(joint, frame)).expect("a run");
        let now = counted(&mut self.receiver, &there);
        let reason = now.iter().find(|it| !before.contains(it)).expect("a reason").0;
        Arrival { reason, frame: run.frame, sent: caught(&self.capture) }
    }

    pub fn at_sender(&mut self, frame: &[u8]) -> Arrival {
        arrive(&self.namespace, &mut self.sender, &self.ends, frame, &self.capture)
    }

    /// As the sender's daemon says it.
    pub fn last(&self, next: u32) -> Vec<u8> {
        datagram(&self.ends, &self.sender.word(&self.ends, Word::Last(next)).expect("a word"))
    }

    pub fn known(&self) -> Progress {
        self.sender.progress(&self.ends).expect("progress")
    }

    fn come(&self) -> Progress {
        self.receiver.progress(&other_side(&self.ends)).expect("progress")
    }
}

fn arrive(namespace: &str, joints: &mut Joints, ends: &Ends, frame: &[u8], capture: &Capture) -> Arrival {
    let before = counted(joints, ends);
    let rx = inside(namespace, || joints.run(Joint::Rx, frame)).expect("a run");
    let run = match rx.verdict {
        XDP_DROP => rx,
        _ => inside(namespace, || joints.run(Joint::Repair, frame)).expect("a run"),
    };
    let now = counted(joints, ends);
    let is_new = |it: &&(Reason, u64)| !before.contains(it) && it.0 != Reason::LetIn;
    let reason = now.iter().find(is_new).expect("a reason").0;
    Arrival { reason, frame: run.frame, sent: caught(capture) }
}

fn caught(capture: &Capture) -> Vec<(u8, Vec<u8>)> {
    datagrams(capture.frames())
}

fn datagrams(frames: Vec<Vec<u8>>) -> Vec<(u8, Vec<u8>)> {
    frames.into_iter().filter(|frame| check_frame(frame)).map(|frame| (kind(&frame), frame)).collect()
}

fn udp_at(frame: &[u8]) -> usize {
    ETHERNET + if frame[12..14] == [8, 0] { 20 } else { 40 }
}

pub fn payload(frame: &[u8]) -> &[u8] {
    let at = udp_at(frame);
    let bytes = usize::from(u16::from_be_bytes([frame[at + 4], frame[at + 5]]));
    &frame[at + 8..at + bytes]
}

pub fn kind(frame: &[u8]) -> u8 {
    let payload = payload(frame);
    payload[payload.len() - FRAME_BYTES + 1] >> 1 & 15
}

pub fn number(frame: &[u8]) -> u32 {
    let payload = payload(frame);
    let at = payload.len() - FRAME_BYTES + 4;
    u32::from_be_bytes(*payload[at..].first_chunk().expect("a number"))
}

pub fn kinds(sent: &[(u8, Vec<u8>)]) -> Vec<(u8, u32)> {
    sent.iter().map(|(kind, frame)| (*kind, number(frame))).collect()
}

const SELECTIVE: &[&str] = &["window", "number", "repair", "acknowledge"];
const GO_BACK: &[&str] = &["window", "gobackn", "number", "acknowledge"];

/// No more leaves than may be under way, what is refused has no number, and acknowledgements make room.
#[test]
fn a_window_bounds_what_is_under_way() {
    if !root("a_window_bounds_what_is_under_way") {
        return;
    }
    for (ends, size) in [(v4(), 1), (v4(), 4), (v6(), 4), (v4(), 256)] {
        let mut pair = Pair::new("window", ends, SELECTIVE, &[("window", "packets", size)]);
        let frames: Vec<_> = (0..size).map(|at| pair.frame(&[at as u8; 100])).collect();
        let (reason, verdict, sent) = pair.send(b"one too many");
        assert_eq!((reason, verdict, sent.len()), (Reason::WindowFull, SHOT, 0));
        assert_eq!(pair.known().next, size as u32);
        let arrival = pair.at_receiver(&frames[0]);
        assert_eq!(arrival.reason, Reason::Delivered);
        assert_eq!(kinds(&arrival.sent), [(ACK, 1)]);
        let plain = datagram(&ends, &[0; 100]);
        assert_eq!(arrival.frame[..plain.len()], plain);
        let heard = pair.at_sender(&arrival.sent[0].1);
        assert_eq!((heard.reason, heard.sent.len()), (Reason::Answered, 0));
        let known = pair.known();
        assert_eq!((known.acked, known.delivered, known.losses), (1, 1, 0));
        assert!(known.round_trip.is_some() && known.round_trip == known.least_round_trip);
        pair.frame(b"room for one");
        assert_eq!(pair.send(b"one too many").0, Reason::WindowFull);
    }
}

/// Who was refused is told of room once, when a quarter of the window is free, or all of it; who does not ask is told nothing.
#[test]
fn a_sign_of_room_comes_once_for_who_was_refused() {
    if !root("a_sign_of_room_comes_once_for_who_was_refused") {
        return;
    }
    for (ends, is_asked) in [(v4(), true), (v6(), true), (v4(), false)] {
        let mut pair = Pair::new("sign", ends, SELECTIVE, &[("window", "packets", 8)]);
        if is_asked {
            pair.sender.tell_room(&ends).expect("told");
        }
        let mut frames: Vec<_> = (0..8).map(|at| pair.frame(&[at; 33])).collect();
        let acknowledge = |pair: &mut Pair, frame: &[u8]| {
            let arrival = pair.at_receiver(frame);
            assert_eq!(pair.at_sender(&arrival.sent[0].1).reason, Reason::Answered);
            pair.sender.words(Duration::ZERO).expect("words");
            pair.sender.room_for()
        };
        // Nobody was refused yet.
        assert!(acknowledge(&mut pair, &frames.remove(0)).is_empty());
        frames.push(pair.frame(b"another one"));
        for _ in 0..3 {
            assert_eq!(pair.send(b"one too many").0, Reason::WindowFull);
        }
        let signs: Vec<_> =
            frames.drain(..).map(|frame| acknowledge(&mut pair, &frame).contains(&ends)).collect();
        let want = [false, is_asked, false, false, false, false, false, false];
        assert_eq!(signs, want, "{ends:?}");
    }
}

/// What has come, what is missing, and what came late; then the same acknowledgements again, and others that somebody made.
#[test]
fn acknowledgements_say_what_has_come_and_nothing_else_does() {
    if !root("acknowledgements_say_what_has_come_and_nothing_else_does") {
        return;
    }
    for ends in [v4(), v6()] {
        let mut pair = Pair::new("ack", ends, SELECTIVE, &[]);
        let frames: Vec<_> = (0..8).map(|at| pair.frame(&[at; 33])).collect();
        // Arrivals; what is acknowledged then, and what is known to have come.
        let table = [(0, 1, 1), (2, 1, 2), (3, 1, 3), (1, 4, 4), (7, 4, 5), (6, 4, 6)];
        let mut acks = Vec::new();
        for (which, acked, delivered) in table {
            let arrival = pair.at_receiver(&frames[which]);
            assert_eq!(arrival.reason, Reason::Delivered);
            let (_, ack) = arrival.sent.iter().find(|(kind, _)| *kind == ACK).expect("an acknowledgement");
            assert_eq!(pair.at_sender(ack).reason, Reason::Answered);
            let known = pair.known();
            assert_eq!((known.acked, known.delivered), (acked, delivered), "behind {which}");
            acks.push(ack.clone());
        }
        let known = pair.known();
        for ack in &acks {
            assert_eq!(pair.at_sender(ack).reason, Reason::Answered);
            assert_eq!(pair.known(), known, "an old one says nothing new");
        }
        // Every bit of what it says, of its tag, and of the frame.
        let ack = acks.last().expect("one");
        let from = ack.len() - FRAME_BYTES - ACK_BYTES;
        for at in from..ack.len() {
            let mut forged = ack.clone();
            forged[at] ^= 1 << (at % 8);
            let reason = pair.at_sender(&forged).reason;
            assert!(matches!(reason, Reason::Forged | Reason::Malformed), "{at}: {reason:?}");
        }
        // What one said, in the frame of another; and back to where it came from.
        let mut mixed = acks[0].clone();
        mixed[from..from + ACK_BYTES].copy_from_slice(&ack[from..from + ACK_BYTES]);
        assert_eq!(pair.at_sender(&mixed).reason, Reason::Forged);
        let mut back = datagram(&ends, &[0; ACK_BYTES + FRAME_BYTES]);
        let head = back.len() - ACK_BYTES - FRAME_BYTES;
        back[head..].copy_from_slice(&ack[from..]);
        let progress = pair.come();
        assert_eq!(pair.at_receiver(&back).reason, Reason::Forged);
        assert_eq!((pair.known(), pair.come()), (known, progress));
    }
}

/// What XDP has let in and TC has not seen has not come: it may wait in a batch, or be lost there.
#[test]
fn between_xdp_and_tc_nothing_has_come() {
    if !root("between_xdp_and_tc_nothing_has_come") {
        return;
    }
    for ends in [v4(), v6()] {
        let mut pair = Pair::new("between", ends, SELECTIVE, &[]);
        let frames: Vec<_> = (0..6).map(|at| pair.frame(&[at; 33])).collect();
        // A batch at XDP: each is acknowledged when it comes to TC.
        frames[..3].iter().for_each(|frame| assert_eq!(pair.at(Joint::Rx, frame).reason, Reason::LetIn));
        for (frame, acked) in frames[..3].iter().zip(1..) {
            let arrival = pair.at(Joint::Repair, frame);
            assert_eq!((arrival.reason, kinds(&arrival.sent)), (Reason::Delivered, vec![(ACK, acked)]));
            assert_eq!(pair.at_sender(&arrival.sent[0].1).reason, Reason::Answered);
            let known = pair.known();
            assert_eq!((known.acked, known.delivered, known.losses), (acked, acked, 0));
        }
        // The first of two is lost on the way to TC: it is asked for, and taken when it comes again.
        assert_eq!(pair.at(Joint::Rx, &frames[3]).reason, Reason::LetIn);
        let behind = pair.at_receiver(&frames[4]);
        let (_, ack) = behind.sent.iter().find(|(kind, _)| *kind == ACK).expect("an acknowledgement");
        assert_eq!((behind.reason, number(ack)), (Reason::Delivered, 3));
        assert_eq!(pair.at_sender(ack).reason, Reason::Answered);
        assert_eq!((pair.known().acked, pair.known().delivered), (3, 4));
        let next = pair.at_receiver(&frames[5]);
        assert_eq!(kinds(&next.sent), [(REQUEST, 3), (ACK, 3)]);
        let again = pair.at_sender(&next.sent[0].1);
        assert_eq!(again.reason, Reason::Resent);
        let repaired = pair.at_receiver(&again.frame);
        assert_eq!((repaired.reason, kinds(&repaired.sent)), (Reason::Delivered, vec![(ACK, 6)]));
        assert_eq!(pair.at_receiver(&frames[3]).reason, Reason::Duplicate);
    }
}

#[test]
fn an_acknowledgement_is_for_so_many_packets() {
    if !root("an_acknowledgement_is_for_so_many_packets") {
        return;
    }
    let mut pair = Pair::new("every", v4(), SELECTIVE, &[("acknowledge", "every", 4)]);
    let frames: Vec<_> = (0..9).map(|at| pair.frame(&[at; 33])).collect();
    let acked: Vec<_> = frames[..8].iter().map(|frame| kinds(&pair.at_receiver(frame).sent)).collect();
    assert_eq!(acked.concat(), [(ACK, 4), (ACK, 8)]);
    assert_eq!(acked[3].len() + acked[7].len(), 2);
    assert_eq!(pair.at_receiver(&frames[8]).sent.len(), 0);
    // A word of the sender's daemon asks for it.
    let last = pair.last(9);
    assert_eq!(kinds(&pair.at_receiver(&last).sent), [(ACK, 9)]);
}

/// The receiver takes what is next; the sender repeats everything from what is missing on.
#[test]
fn go_back_n_repeats_everything_from_a_gap_on() {
    if !root("go_back_n_repeats_everything_from_a_gap_on") {
        return;
    }
    for ends in [v4(), v6()] {
        let mut pair = Pair::new("gobackn", ends, GO_BACK, &[]);
        let payloads: Vec<_> = (0..6u8).map(|at| vec![at; 20 + 211 * usize::from(at)]).collect();
        let frames: Vec<_> = payloads.iter().map(|payload| pair.frame(payload)).collect();
        let taken = pair.at_receiver(&frames[0]);
        assert_eq!((taken.reason, kinds(&taken.sent)), (Reason::Delivered, vec![(ACK, 1)]));
        let gap = pair.at_receiver(&frames[2]);
        assert_eq!((gap.reason, kinds(&gap.sent)), (Reason::OutOfTurn, vec![(REQUEST, 1)]));
        // Once: the others were under way when it was noticed.
        for frame in &frames[3..] {
            let gap = pair.at_receiver(frame);
            assert_eq!((gap.reason, gap.sent.len()), (Reason::OutOfTurn, 0));
        }
        let request = gap.sent[0].1.clone();
        let mut repeated = pair.at_sender(&request);
        assert_eq!(repeated.reason, Reason::Resent);
        let last = (DATA, repeated.frame.clone());
        repeated.sent.push(last);
        assert_eq!(kinds(&repeated.sent), (1..6).map(|at| (DATA, at)).collect::<Vec<_>>());
        for (at, (_, frame)) in (1..).zip(&repeated.sent) {
            assert!(check_frame(frame));
            assert_eq!(payload(frame)[..payloads[at].len()], payloads[at]);
        }
        // The first of the repetition is lost: asked for again at once.
        let again = pair.at_receiver(&repeated.sent[1].1);
        assert_eq!((again.reason, kinds(&again.sent)), (Reason::OutOfTurn, vec![(REQUEST, 1)]));
        for (at, (_, frame)) in (1..).zip(&repeated.sent) {
            let taken = pair.at_receiver(frame);
            assert_eq!((taken.reason, kinds(&taken.sent)), (Reason::Delivered, vec![(ACK, at + 1)]));
            // Not twice.
            assert_eq!(pair.at_receiver(frame).reason, Reason::Duplicate);
        }
        // Requests for what has come or was never sent do nothing.
        let ack = pair.last(6);
        let ack = pair.at_receiver(&ack).sent.remove(0).1;
        assert_eq!(pair.at_sender(&ack).reason, Reason::Answered);
        for request in [request, ask(&pair, 6), ask(&pair, 1 << 31)] {
            let answer = pair.at_sender(&request);
            assert_eq!((answer.reason, answer.sent.len()), (Reason::Answered, 0));
        }
    }
}

fn ask(pair: &Pair, number: u32) -> Vec<u8> {
    let there = other_side(&pair.ends);
    datagram(&there, &pair.receiver.word(&there, Word::Request(number)).expect("a word"))
}

/// A request that somebody has recorded, and sends again when the packet has been acknowledged.
#[test]
fn what_has_come_is_not_sent_again() {
    if !root("what_has_come_is_not_sent_again") {
        return;
    }
    for (ends, functions) in [(v4(), SELECTIVE), (v6(), SELECTIVE), (v4(), PARTIAL), (v4(), GO_BACK)] {
        let mut pair = Pair::new("nack", ends, functions, &[]);
        let frames: Vec<_> = (0..4).map(|at| pair.frame(&[at; 33])).collect();
        pair.at_receiver(&frames[0]);
        let asked = pair.at_receiver(&frames[2]).sent;
        let (_, request) = asked.iter().find(|(kind, _)| *kind == REQUEST).expect("a request").clone();
        let resent = pair.at_sender(&request);
        assert_eq!(resent.reason, Reason::Resent);
        let mut acks = Vec::new();
        for frame in [&frames[1], &frames[2], &frames[3]] {
            acks.extend(pair.at_receiver(frame).sent);
        }
        for (_, ack) in acks.iter().filter(|(kind, _)| *kind == ACK) {
            assert_eq!(pair.at_sender(ack).reason, Reason::Answered);
        }
        let (known, come) = (pair.known(), pair.come());
        assert_eq!(known.acked, 4, "{functions:?}");
        let replayed = pair.at_sender(&request);
        assert_eq!((replayed.reason, replayed.sent.len()), (Reason::Answered, 0), "{functions:?}");
        assert_eq!((pair.known(), pair.come()), (known, come));
    }
}

/// What is not kept is said to be gone, and not waited for.
#[test]
fn what_is_gone_is_not_waited_for() {
    if !root("what_is_gone_is_not_waited_for") {
        return;
    }
    for functions in [SELECTIVE, GO_BACK] {
        let mut pair = Pair::new("gone", v4(), functions, &[]);
        let (here, there) = (pair.ends, other_side(&pair.ends));
        for (joints, ends) in [(&mut pair.sender, here), (&mut pair.receiver, there)] {
            joints.close(&ends).expect("closed");
            open(joints, ends, &["number"]);
        }
        // Sent without being kept; then by another list.
        let lost = pair.frame(b"lost");
        let next = list(functions);
        pair.receiver.accept(&there, &next).expect("ready");
        pair.sender.accept(&here, &next).expect("ready");
        pair.sender.switch(&here, 1).expect("switched");
        let frame = pair.frame(b"second");
        let asked = pair.at_receiver(&frame).sent;
        assert_eq!(kinds(&asked)[0], (REQUEST, 0));
        let answer = pair.at_sender(&asked[0].1);
        assert_eq!((answer.reason, kind(&answer.frame), number(&answer.frame)), (Reason::Resent, GONE, 0));
        let heard = pair.at_receiver(&answer.frame);
        assert_eq!(heard.reason, Reason::Answered);
        let complete = if functions == SELECTIVE { 2 } else { 1 };
        assert_eq!(kinds(&heard.sent), [(ACK, complete)]);
        // It may have been late only: the list that it was sent by is still taken.
        assert_eq!(pair.at_receiver(&lost).reason, Reason::Delivered);
    }
}

/// Numbers come again when a session begins anew; what was kept of them before does not.
#[test]
fn a_session_that_begins_anew_keeps_nothing_of_before() {
    if !root("a_session_that_begins_anew_keeps_nothing_of_before") {
        return;
    }
    for functions in [SELECTIVE, GO_BACK] {
        let mut pair = Pair::new("anew", v4(), functions, &[]);
        pair.frame(b"before");
        pair.frame(b"before, too");
        let (here, there) = (pair.ends, other_side(&pair.ends));
        pair.sender.replace(&here, &list(functions), 0).expect("anew");
        pair.receiver.replace(&there, &list(functions), 0).expect("anew");
        pair.frame(b"afterwards");
        let again = pair.at_sender(&ask(&pair, 0));
        assert_eq!((again.reason, &payload(&again.frame)[..10]), (Reason::Resent, &b"afterwards"[..]));
        let again = pair.at_sender(&ask(&pair, 1));
        assert_eq!((again.reason, again.sent.len()), (Reason::Answered, 0));
    }
}

/// What is missing is looked at again and again while others come, not only where those have gaps, too.
#[test]
fn what_comes_in_order_has_the_missing_asked_for_again() {
    // And more than a tick of the clock that functions go by.
    const RETRY: Duration = Duration::from_millis(12);
    if !root("what_comes_in_order_has_the_missing_asked_for_again") {
        return;
    }
    let parameters = [("repair", "retry_us", 1000), ("repair", "tries", 0)];
    let mut pair = Pair::new("retry", v4(), SELECTIVE, &parameters);
    let frames: Vec<_> = (0..30).map(|at| pair.frame(&[at; 33])).collect();
    pair.at_receiver(&frames[0]);
    for frame in &frames[2..] {
        let asked = pair.at_receiver(frame).sent;
        assert_eq!(kinds(&asked)[0], (REQUEST, 1));
        std::thread::sleep(RETRY); // exact: longer than it waits before it asks again
    }
}

/// After the deadline as many are given up as the bound allows, and the others are asked for without end.
#[test]
fn no_more_is_given_up_than_the_bound_allows() {
    const MORE_THAN_A_RETRY: Duration = Duration::from_millis(2);
    if !root("no_more_is_given_up_than_the_bound_allows") {
        return;
    }
    let partial: &[&str] = &["window", "number", "partial", "acknowledge"];
    let parameters = [
        ("partial", "retry_us", 1000),
        ("partial", "deadline_ms", 5),
        ("partial", "give_up_permille", 50),
        ("window", "packets", 256),
    ];
    let mut pair = Pair::new("partial", v4(), partial, &parameters);
    let frames: Vec<_> = (0..101).map(|at| pair.frame(&[at; 33])).collect();
    for frame in frames.iter().enumerate().filter(|(at, _)| at % 10 != 9).map(|(_, frame)| frame) {
        assert_eq!(pair.at_receiver(frame).reason, Reason::Delivered);
    }
    // 5 of 100, the first one not counted: of ten that are missing five are asked for on and on.
    let last = pair.last(101);
    let mut asked = || {
        let mut numbers = BTreeSet::new();
        for _ in 0..20 {
            std::thread::sleep(MORE_THAN_A_RETRY); // exact: longer than it waits before it asks again
            let sent = kinds(&pair.at_receiver(&last).sent);
            numbers.extend(sent.into_iter().filter(|(kind, _)| *kind == REQUEST).map(|(_, number)| number));
        }
        numbers
    };
    wait_until("as many given up as may be", &mut asked, |numbers| numbers.len() == 5);
    let owed = asked();
    assert_eq!(owed.len(), 5, "more than the bound was given up, or the others are not asked for");
    for number in (9..100_u32).step_by(10) {
        // What was given up is late from then on. The others are still there to be sent.
        let wanted = if owed.contains(&number) { Reason::Delivered } else { Reason::Late };
        let copy = pair.at_sender(&ask(&pair, number)).frame;
        assert_eq!((kind(&copy), pair.at_receiver(&copy).reason), (DATA, wanted), "{number}");
    }
    assert_eq!(pair.come().complete, 101);
}

/// What the list before has sent is owed as that one has promised, whatever the next one may give up; and so is what the next list
/// sends once that one's time is over.
#[test]
fn only_its_own_packets_are_given_up() {
    const LATER: Duration = Duration::from_millis(3);
    const GO_BACK: &[&str] = &["window", "gobackn", "number", "acknowledge"];
    if !root("only_its_own_packets_are_given_up") {
        return;
    }
    let parameters = [
        ("partial", "retry_us", 1000),
        ("partial", "deadline_ms", 2),
        ("partial", "give_up_permille", 1000),
        ("window", "packets", 256),
    ];
    let all = ["window", "gobackn", "number", "partial", "acknowledge"];
    let mut pair = Pair::with("owed", v4(), GO_BACK, &all, &parameters);
    let frames = |pair: &mut Pair, count: u8| (0..count).map(|at| pair.frame(&[at; 33])).collect::<Vec<_>>();
    // 0 to 9, of which 3 is lost, and the latest two: what is behind it is out of turn.
    let first = frames(&mut pair, 10);
    for (at, frame) in first.iter().enumerate().filter(|(at, _)| *at != 3 && *at < 8) {
        let wanted = if at < 3 { Reason::Delivered } else { Reason::OutOfTurn };
        assert_eq!(pair.at_receiver(frame).reason, wanted, "{at}");
    }
    // 10 to 19: 10 and 14 are lost. 10 may have been the other list's, as far as anybody knows.
    pair.swap(PARTIAL);
    let second = frames(&mut pair, 10);
    for frame in second.iter().enumerate().filter(|(at, _)| ![0, 4].contains(at)).map(|(_, frame)| frame) {
        assert_eq!(pair.at_receiver(frame).reason, Reason::Delivered);
    }
    let last = pair.last(20);
    let asked = |pair: &mut Pair, word: &[u8]| {
        let mut numbers = BTreeSet::new();
        for _ in 0..20 {
            std::thread::sleep(LATER); // exact: longer than the deadline, which is under test
            let sent = kinds(&pair.at_receiver(word).sent);
            numbers.extend(sent.into_iter().filter(|(kind, _)| *kind == REQUEST).map(|(_, number)| number));
        }
        numbers
    };
    // A first round, in which 14 is asked for until its deadline is over.
    asked(&mut pair, &last);
    let owed: BTreeSet<u32> = (3..=10).collect();
    assert_eq!(asked(&mut pair, &last), owed);
    for number in owed {
        let copy = pair.at_sender(&ask(&pair, number)).frame;
        assert_eq!(pair.at_receiver(&copy).reason, Reason::Delivered, "{number}");
    }
    assert_eq!(pair.come().complete, 20);
    // 20 to 22 by Go-Back-N again, of which 20 is lost. A word of before, still under way, gives nothing of it up.
    let word = pair.last(20);
    pair.swap(GO_BACK);
    let third = frames(&mut pair, 3);
    assert_eq!(pair.at_receiver(&third[1]).reason, Reason::OutOfTurn);
    for _ in 0..5 {
        std::thread::sleep(LATER); // exact: longer than the deadline, which is under test
        pair.at_receiver(&word);
    }
    assert_eq!(pair.come().complete, 20);
    for frame in &third {
        assert_eq!(pair.at_receiver(frame).reason, Reason::Delivered);
    }
    assert_eq!(pair.come().complete, 23);
}

/// It begins with a few packets, and what has come makes it grow. What else it does is native: tests/parsers.rs.
#[test]
fn congestion_bounds_a_window() {
    if !root("congestion_bounds_a_window") {
        return;
    }
    let functions: &[&str] = &["congestion", "window", "number", "repair", "acknowledge"];
    let mut pair = Pair::new("cc", v4(), functions, &[("window", "packets", 256)]);
    let frames = fill(&mut pair);
    assert_eq!(frames.len(), 10);
    deliver(&mut pair, &frames);
    assert_eq!(fill(&mut pair).len(), 20);
}

/// As many packets as the window lets through.
fn fill(pair: &mut Pair) -> Vec<Vec<u8>> {
    let plain = datagram(&pair.ends, b"payload");
    let runs = || {
        let sent = std::iter::repeat_with(|| pair.sender.run(Joint::Tx, &plain).expect("a run"));
        sent.take_while(|run| run.verdict == PASS_ON).map(|run| run.frame).collect()
    };
    inside(&pair.namespace, runs)
}

/// To the receiver, and its acknowledgements back.
fn deliver(pair: &mut Pair, frames: &[Vec<u8>]) {
    for frame in frames {
        let sent = pair.at_receiver(frame).sent;
        for (_, ack) in sent.iter().filter(|(kind, _)| *kind == ACK) {
            assert_eq!(pair.at_sender(ack).reason, Reason::Answered);
        }
    }
}
