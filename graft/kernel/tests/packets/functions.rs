//! Tests of packet functions (BPF), which get one packet at a time: which packets they pass, and which packets they
//! send. Packets that they send are captured on the loopback interface of a network namespace, in which the test runs
//! take place.

use std::collections::BTreeSet;
use std::net::UdpSocket;
use std::time::{Duration, Instant};

use millrace_graft_kernel::packet::{
    FRAME_BYTES, FunctionHook, PacketHooks, PacketReason, SessionEnds, SessionProgress, TalkMessage,
};
use millrace_testkit::{wait_for, wait_until};
use nix::sys::socket::{setsockopt, sockopt};

use crate::datagrams::{ETHERNET, PASS_ON, SHOT, XDP_DROP, datagram, v4, v6};
use crate::net::{PacketCapture, RawSender, check_frame, inside, ip, root, stay_on_this_cpu};
use crate::traffic::PARTIAL;
use crate::{counted, hooks_of, list, open, other_side};

/// Frame kinds (`enum graft_kind` in C).
pub const DATA: u8 = 0;
const REQUEST: u8 = 1;
const ACK: u8 = 3;
const GONE: u8 = 4;
pub const RETURNED: u8 = 6;
const ACK_BYTES: usize = 88;
/// Number of packets that the sender stores for each session (`GRAFT_WINDOW` in C).
const STORED: u32 = 1024;

/// A marker frame of an experimental Ethernet type, which no protocol handles.
const MARKER: [u8; 60] = {
    let mut frame = [0; 60];
    (frame[12], frame[13]) = (0x88, 0xb5);
    frame
};

/// A session with its sender and receiver, and a capture of the packets that their functions send.
pub struct FunctionPair {
    pub namespace: String,
    pub capture: PacketCapture,
    /// Captures the frames that functions send, which arrive on the loopback interface.
    arriving: PacketCapture,
    /// Sends the marker frame. When the capture has the marker, it has all earlier frames.
    marker: RawSender,
    pub sender: PacketHooks,
    pub receiver: PacketHooks,
    pub ends: SessionEnds,
}

impl Drop for FunctionPair {
    fn drop(&mut self) {
        ip(&format!("netns del {}", self.namespace));
    }
}

/// The result of running a packet at the receiver.
#[derive(Debug)]
pub struct FunctionArrival {
    pub reason: PacketReason,
    pub frame: Vec<u8>,
    /// Kinds and Ethernet frames of the packets that the receiver's functions sent in reply.
    pub sent: Vec<(u8, Vec<u8>)>,
}

impl FunctionPair {
    pub fn new(name: &str, ends: SessionEnds, functions: &[&str], parameters: &[(&str, &str, u64)]) -> Self {
        Self::with(name, ends, functions, functions, parameters)
    }

    /// Loads further functions, so that sessions can change to function lists that contain them.
    pub fn with(
        name: &str,
        ends: SessionEnds,
        functions: &[&str],
        loaded: &[&str],
        parameters: &[(&str, &str, u64)],
    ) -> Self {
        let namespace = format!("mr-{}-{name}", std::process::id());
        ip(&format!("netns add {namespace}"));
        ip(&format!("-n {namespace} link set lo mtu 1500 up"));
        let [mut sender, mut receiver] = [0, 1].map(|_| hooks_of(loaded, parameters));
        open(&mut sender, ends, functions);
        open(&mut receiver, other_side(&ends), functions);
        let capture = PacketCapture::on(&namespace, "lo");
        capture.only_outgoing();
        let arriving = PacketCapture::on(&namespace, "lo");
        arriving.only_incoming();
        let marker = RawSender::new(&namespace, "lo");
        Self { capture, arriving, marker, namespace, sender, receiver, ends }
    }

    /// Makes both hosts accept another function list and use it for outgoing packets. Returns the epoch (0 or 1) of the
    /// new list, which packets contain.
    pub fn swap(&mut self, functions: &[&str]) -> u8 {
        let here = self.ends;
        let there = other_side(&self.ends);
        let [epoch, _] = [(&mut self.sender, here), (&mut self.receiver, there)].map(|(hooks, ends)| {
            let epoch = hooks.accept(&ends, &list(functions)).expect("accepted");
            hooks.switch(&ends, epoch).expect("switched");
            epoch
        });
        epoch
    }

    /// Sends a payload as an application does. Returns the reason that the BPF program counted for its verdict, the
    /// verdict, and all packets that were sent.
    pub fn send(&mut self, payload: &[u8]) -> (PacketReason, i32, Vec<(u8, Vec<u8>)>) {
        let before = counted(&mut self.sender, &self.ends);
        let frame = datagram(&self.ends, payload);
        let run = inside(&self.namespace, || self.sender.run(FunctionHook::Tx, &frame)).expect("a run");
        let now = counted(&mut self.sender, &self.ends);
        let reason =
            now.iter().find(|it| !before.contains(it) && it.0 != PacketReason::SentByUs).expect("a reason").0;
        let mut sent = caught(&self.capture);
        if run.verdict == PASS_ON {
            sent.push((kind(&run.frame), run.frame));
        }
        (reason, run.verdict, sent)
    }

    /// Sends a payload, checks that exactly one packet was sent, and returns its frame.
    pub fn frame(&mut self, payload: &[u8]) -> Vec<u8> {
        let (reason, verdict, mut sent) = self.send(payload);
        assert_eq!((reason, verdict, sent.len()), (PacketReason::Sent, PASS_ON, 1));
        sent.remove(0).1
    }

    pub fn at_receiver(&mut self, frame: &[u8]) -> FunctionArrival {
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
        // The kernel queues injected packets in this CPU's backlog. The marker is queued behind them.
        let mut arrived = Vec::new();
        wait_for("the marker", || {
            arrived.extend(self.arriving.frames());
            arrived.iter().any(|frame| frame[12..14] == MARKER[12..14])
        });
        arrival.sent.extend(datagrams(arrived).into_iter().filter(|(kind, _)| *kind == RETURNED));
        arrival
    }

    /// Runs a frame at only one hook of the receiver, as if the kernel queued packets between XDP and TC.
    fn at(&mut self, hook: FunctionHook, frame: &[u8]) -> FunctionArrival {
        let there = other_side(&self.ends);
        let before = counted(&mut self.receiver, &other_side(&self.ends));
        let run = inside(&self.namespace, || self.receiver.run(hook, frame)).expect("a run");
        let now = counted(&mut self.receiver, &there);
        let reason = now.iter().find(|it| !before.contains(it)).expect("a reason").0;
        FunctionArrival { reason, frame: run.frame, sent: caught(&self.capture) }
    }

    pub fn at_sender(&mut self, frame: &[u8]) -> FunctionArrival {
        arrive(&self.namespace, &mut self.sender, &self.ends, frame, &self.capture)
    }

    /// Returns the message GRAFT_LAST, in which the sender's daemon states the number of the next packet.
    pub fn last(&self, next: u32) -> Vec<u8> {
        datagram(
            &self.ends,
            &self.sender.frame_message(&self.ends, TalkMessage::Last(next)).expect("a message"),
        )
    }

    /// Returns the receiving application's socket, which cannot take any more datagram.
    fn full_socket(&self) -> UdpSocket {
        for end in [self.ends.local, self.ends.remote] {
            ip(&format!("-n {} address add {} dev lo", self.namespace, end.ip()));
        }
        let full = inside(&self.namespace, || {
            let socket = UdpSocket::bind(self.ends.remote).expect("a socket");
            setsockopt(&socket, sockopt::RcvBuf, &0).expect("the smallest buffer");
            let other = UdpSocket::bind((self.ends.local.ip(), 0)).expect("a socket");
            for _ in 0..64 {
                other.send_to(&[0; 1000], self.ends.remote).expect("sent");
            }
            socket
        });
        self.capture.frames(); // without the datagrams that fill the socket
        full
    }

    pub fn known(&self) -> SessionProgress {
        self.sender.progress(&self.ends).expect("progress")
    }

    fn come(&self) -> SessionProgress {
        self.receiver.progress(&other_side(&self.ends)).expect("progress")
    }
}

fn arrive(
    namespace: &str,
    hooks: &mut PacketHooks,
    ends: &SessionEnds,
    frame: &[u8],
    capture: &PacketCapture,
) -> FunctionArrival {
    let before = counted(hooks, ends);
    let rx = inside(namespace, || hooks.run(FunctionHook::Rx, frame)).expect("a run");
    let run = match rx.verdict {
        XDP_DROP => rx,
        _ => inside(namespace, || hooks.run(FunctionHook::Repair, frame)).expect("a run"),
    };
    let now = counted(hooks, ends);
    let is_new = |it: &&(PacketReason, u64)| !before.contains(it) && it.0 != PacketReason::LetIn;
    let reason = now.iter().find(is_new).expect("a reason").0;
    FunctionArrival { reason, frame: run.frame, sent: caught(capture) }
}

fn caught(capture: &PacketCapture) -> Vec<(u8, Vec<u8>)> {
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

/// No more packets are in flight than the window allows. A refused packet gets no packet number, and acknowledgements
/// let the sender send again.
#[test]
fn send_window_bounds_packets_in_flight() {
    if !root("send_window_bounds_packets_in_flight") {
        return;
    }
    for (ends, size) in [(v4(), 1), (v4(), 4), (v6(), 4), (v4(), 256)] {
        let mut pair = FunctionPair::new("window", ends, SELECTIVE, &[("window", "packets", size)]);
        let frames: Vec<_> = (0..size).map(|at| pair.frame(&[at as u8; 100])).collect();
        let (reason, verdict, sent) = pair.send(b"one too many");
        assert_eq!((reason, verdict, sent.len()), (PacketReason::WindowFull, SHOT, 0));
        assert_eq!(pair.known().next, size as u32);
        let arrival = pair.at_receiver(&frames[0]);
        assert_eq!(arrival.reason, PacketReason::Delivered);
        assert_eq!(kinds(&arrival.sent), [(ACK, 1)]);
        let plain = datagram(&ends, &[0; 100]);
        assert_eq!(arrival.frame[..plain.len()], plain);
        let heard = pair.at_sender(&arrival.sent[0].1);
        assert_eq!((heard.reason, heard.sent.len()), (PacketReason::Answered, 0));
        let known = pair.known();
        assert_eq!((known.acked, known.delivered, known.losses), (1, 1, 0));
        assert!(known.round_trip.is_some() && known.round_trip == known.least_round_trip);
        pair.frame(b"room for one");
        assert_eq!(pair.send(b"one too many").0, PacketReason::WindowFull);
    }
}

/// A refused sender is notified once, when a quarter of its window is free or nothing is in flight. A sender that did
/// not ask for the notification (`tell_room`) gets none.
#[test]
fn sender_refused_by_a_full_window_is_notified_once_of_free_space() {
    if !root("sender_refused_by_a_full_window_is_notified_once_of_free_space") {
        return;
    }
    for (ends, is_asked) in [(v4(), true), (v6(), true), (v4(), false)] {
        let mut pair = FunctionPair::new("sign", ends, SELECTIVE, &[("window", "packets", 8)]);
        if is_asked {
            pair.sender.tell_room(&ends).expect("told");
        }
        let mut frames: Vec<_> = (0..8).map(|at| pair.frame(&[at; 33])).collect();
        let acknowledge = |pair: &mut FunctionPair, frame: &[u8]| {
            let arrival = pair.at_receiver(frame);
            assert_eq!(pair.at_sender(&arrival.sent[0].1).reason, PacketReason::Answered);
            pair.sender.receive_messages(Duration::ZERO).expect("messages");
            pair.sender.room_for()
        };
        // No packet was refused yet, so no notification is sent.
        assert!(acknowledge(&mut pair, &frames.remove(0)).is_empty());
        frames.push(pair.frame(b"another one"));
        for _ in 0..3 {
            assert_eq!(pair.send(b"one too many").0, PacketReason::WindowFull);
        }
        let signs: Vec<_> =
            frames.drain(..).map(|frame| acknowledge(&mut pair, &frame).contains(&ends)).collect();
        let want = [false, is_asked, false, false, false, false, false, false];
        assert_eq!(signs, want, "{ends:?}");
    }
}

/// Acknowledgements report received, missing and late packets. Repeated and forged acknowledgements change nothing.
#[test]
fn acknowledgements_report_received_packets_and_forged_ones_do_not() {
    if !root("acknowledgements_report_received_packets_and_forged_ones_do_not") {
        return;
    }
    for ends in [v4(), v6()] {
        let mut pair = FunctionPair::new("ack", ends, SELECTIVE, &[]);
        let frames: Vec<_> = (0..8).map(|at| pair.frame(&[at; 33])).collect();
        // Columns: the number of the packet that arrives, the packet number that the receiver acknowledges after that,
        // and how many packets the sender then knows to be received.
        let table = [(0, 1, 1), (2, 1, 2), (3, 1, 3), (1, 4, 4), (7, 4, 5), (6, 4, 6)];
        let mut acks = Vec::new();
        for (which, acked, delivered) in table {
            let arrival = pair.at_receiver(&frames[which]);
            assert_eq!(arrival.reason, PacketReason::Delivered);
            let (_, ack) = arrival.sent.iter().find(|(kind, _)| *kind == ACK).expect("an acknowledgement");
            assert_eq!(pair.at_sender(ack).reason, PacketReason::Answered);
            let known = pair.known();
            assert_eq!((known.acked, known.delivered), (acked, delivered), "behind {which}");
            acks.push(ack.clone());
        }
        let known = pair.known();
        for ack in &acks {
            assert_eq!(pair.at_sender(ack).reason, PacketReason::Answered);
            assert_eq!(pair.known(), known, "an old one says nothing new");
        }
        // A changed bit is detected in the contents of an acknowledgement, in its authentication tag, and in the
        // packet's trailer.
        let ack = acks.last().expect("one");
        let from = ack.len() - FRAME_BYTES - ACK_BYTES;
        for at in from..ack.len() {
            let mut forged = ack.clone();
            forged[at] ^= 1 << (at % 8);
            let reason = pair.at_sender(&forged).reason;
            assert!(matches!(reason, PacketReason::Forged | PacketReason::Malformed), "{at}: {reason:?}");
        }
        // Two forgeries: the contents of one acknowledgement with the trailer of another, and an acknowledgement that
        // is reflected to its sender.
        let mut mixed = acks[0].clone();
        mixed[from..from + ACK_BYTES].copy_from_slice(&ack[from..from + ACK_BYTES]);
        assert_eq!(pair.at_sender(&mixed).reason, PacketReason::Forged);
        let mut back = datagram(&ends, &[0; ACK_BYTES + FRAME_BYTES]);
        let head = back.len() - ACK_BYTES - FRAME_BYTES;
        back[head..].copy_from_slice(&ack[from..]);
        let progress = pair.come();
        assert_eq!(pair.at_receiver(&back).reason, PacketReason::Forged);
        assert_eq!((pair.known(), pair.come()), (known, progress));
    }
}

/// A packet that XDP has accepted and TC has not seen is not acknowledged, since the kernel may still drop it.
#[test]
fn packet_that_xdp_passed_and_tc_has_not_seen_is_not_acknowledged() {
    if !root("packet_that_xdp_passed_and_tc_has_not_seen_is_not_acknowledged") {
        return;
    }
    for ends in [v4(), v6()] {
        let mut pair = FunctionPair::new("between", ends, SELECTIVE, &[]);
        let frames: Vec<_> = (0..6).map(|at| pair.frame(&[at; 33])).collect();
        // Several packets are queued between XDP and TC. Each one is acknowledged when TC sees it.
        frames[..3]
            .iter()
            .for_each(|frame| assert_eq!(pair.at(FunctionHook::Rx, frame).reason, PacketReason::LetIn));
        for (frame, acked) in frames[..3].iter().zip(1..) {
            let arrival = pair.at(FunctionHook::Repair, frame);
            assert_eq!((arrival.reason, kinds(&arrival.sent)), (PacketReason::Delivered, vec![(ACK, acked)]));
            assert_eq!(pair.at_sender(&arrival.sent[0].1).reason, PacketReason::Answered);
            let known = pair.known();
            assert_eq!((known.acked, known.delivered, known.losses), (acked, acked, 0));
        }
        // The first of two packets is lost between XDP and TC. The receiver requests it, and accepts it when it arrives
        // again.
        assert_eq!(pair.at(FunctionHook::Rx, &frames[3]).reason, PacketReason::LetIn);
        let behind = pair.at_receiver(&frames[4]);
        let (_, ack) = behind.sent.iter().find(|(kind, _)| *kind == ACK).expect("an acknowledgement");
        assert_eq!((behind.reason, number(ack)), (PacketReason::Delivered, 3));
        assert_eq!(pair.at_sender(ack).reason, PacketReason::Answered);
        assert_eq!((pair.known().acked, pair.known().delivered), (3, 4));
        let next = pair.at_receiver(&frames[5]);
        assert_eq!(kinds(&next.sent), [(REQUEST, 3), (ACK, 3)]);
        let again = pair.at_sender(&next.sent[0].1);
        assert_eq!(again.reason, PacketReason::Resent);
        let repaired = pair.at_receiver(&again.frame);
        assert_eq!((repaired.reason, kinds(&repaired.sent)), (PacketReason::Delivered, vec![(ACK, 6)]));
        assert_eq!(pair.at_receiver(&frames[3]).reason, PacketReason::Duplicate);
    }
}

#[test]
fn one_acknowledgement_is_sent_per_configured_number_of_packets() {
    if !root("one_acknowledgement_is_sent_per_configured_number_of_packets") {
        return;
    }
    let mut pair = FunctionPair::new("every", v4(), SELECTIVE, &[("acknowledge", "every", 4)]);
    let frames: Vec<_> = (0..9).map(|at| pair.frame(&[at; 33])).collect();
    let acked: Vec<_> = frames[..8].iter().map(|frame| kinds(&pair.at_receiver(frame).sent)).collect();
    assert_eq!(acked.concat(), [(ACK, 4), (ACK, 8)]);
    assert_eq!(acked[3].len() + acked[7].len(), 2);
    assert_eq!(pair.at_receiver(&frames[8]).sent.len(), 0);
    // A message from the sender's daemon requests an acknowledgement.
    let last = pair.last(9);
    assert_eq!(kinds(&pair.at_receiver(&last).sent), [(ACK, 9)]);
}

/// Go-Back-N: the receiver accepts only the next packet in order, and the sender repeats all packets from a
/// missing one on.
#[test]
fn go_back_n_repeats_all_packets_after_a_gap() {
    if !root("go_back_n_repeats_all_packets_after_a_gap") {
        return;
    }
    for ends in [v4(), v6()] {
        let mut pair = FunctionPair::new("gobackn", ends, GO_BACK, &[]);
        let payloads: Vec<_> = (0..6u8).map(|at| vec![at; 20 + 211 * usize::from(at)]).collect();
        let frames: Vec<_> = payloads.iter().map(|payload| pair.frame(payload)).collect();
        let taken = pair.at_receiver(&frames[0]);
        assert_eq!((taken.reason, kinds(&taken.sent)), (PacketReason::Delivered, vec![(ACK, 1)]));
        let gap = pair.at_receiver(&frames[2]);
        assert_eq!((gap.reason, kinds(&gap.sent)), (PacketReason::OutOfTurn, vec![(REQUEST, 1)]));
        // More packets arrive out of order, but they were in flight already, so no second request is sent.
        for frame in &frames[3..] {
            let gap = pair.at_receiver(frame);
            assert_eq!((gap.reason, gap.sent.len()), (PacketReason::OutOfTurn, 0));
        }
        let request = gap.sent[0].1.clone();
        let mut repeated = pair.at_sender(&request);
        assert_eq!(repeated.reason, PacketReason::Resent);
        let last = (DATA, repeated.frame.clone());
        repeated.sent.push(last);
        assert_eq!(kinds(&repeated.sent), (1..6).map(|at| (DATA, at)).collect::<Vec<_>>());
        for (at, (_, frame)) in (1..).zip(&repeated.sent) {
            assert!(check_frame(frame));
            assert_eq!(payload(frame)[..payloads[at].len()], payloads[at]);
        }
        // The first repeated packet is lost, and requested again at once.
        let again = pair.at_receiver(&repeated.sent[1].1);
        assert_eq!((again.reason, kinds(&again.sent)), (PacketReason::OutOfTurn, vec![(REQUEST, 1)]));
        for (at, (_, frame)) in (1..).zip(&repeated.sent) {
            let taken = pair.at_receiver(frame);
            assert_eq!((taken.reason, kinds(&taken.sent)), (PacketReason::Delivered, vec![(ACK, at + 1)]));
            // A packet that arrives twice is delivered only once.
            assert_eq!(pair.at_receiver(frame).reason, PacketReason::Duplicate);
        }
        // Requests for packets that are acknowledged, or were never sent, are ignored.
        let ack = pair.last(6);
        let ack = pair.at_receiver(&ack).sent.remove(0).1;
        assert_eq!(pair.at_sender(&ack).reason, PacketReason::Answered);
        for request in [request, ask(&pair, 6), ask(&pair, 1 << 31)] {
            let answer = pair.at_sender(&request);
            assert_eq!((answer.reason, answer.sent.len()), (PacketReason::Answered, 0));
        }
    }
}

fn ask(pair: &FunctionPair, number: u32) -> Vec<u8> {
    let there = other_side(&pair.ends);
    datagram(&there, &pair.receiver.frame_message(&there, TalkMessage::Request(number)).expect("a message"))
}

/// A repeated request to retransmit a packet is ignored once that packet is acknowledged.
#[test]
fn acknowledged_packet_is_not_sent_again() {
    if !root("acknowledged_packet_is_not_sent_again") {
        return;
    }
    for (ends, functions) in [(v4(), SELECTIVE), (v6(), SELECTIVE), (v4(), PARTIAL), (v4(), GO_BACK)] {
        let mut pair = FunctionPair::new("nack", ends, functions, &[]);
        let frames: Vec<_> = (0..4).map(|at| pair.frame(&[at; 33])).collect();
        pair.at_receiver(&frames[0]);
        let asked = pair.at_receiver(&frames[2]).sent;
        let (_, request) = asked.iter().find(|(kind, _)| *kind == REQUEST).expect("a request").clone();
        let resent = pair.at_sender(&request);
        assert_eq!(resent.reason, PacketReason::Resent);
        let mut acks = Vec::new();
        for frame in [&frames[1], &frames[2], &frames[3]] {
            acks.extend(pair.at_receiver(frame).sent);
        }
        for (_, ack) in acks.iter().filter(|(kind, _)| *kind == ACK) {
            assert_eq!(pair.at_sender(ack).reason, PacketReason::Answered);
        }
        let known = pair.known();
        let come = pair.come();
        assert_eq!(known.acked, 4, "{functions:?}");
        let replayed = pair.at_sender(&request);
        assert_eq!((replayed.reason, replayed.sent.len()), (PacketReason::Answered, 0), "{functions:?}");
        assert_eq!((pair.known(), pair.come()), (known, come));
    }
}

/// If the requested packet is no longer stored, the sender answers GRAFT_GONE, and the receiver gives the packet up.
#[test]
fn receiver_gives_up_packet_that_sender_no_longer_stores() {
    if !root("receiver_gives_up_packet_that_sender_no_longer_stores") {
        return;
    }
    for functions in [SELECTIVE, GO_BACK] {
        let mut pair = FunctionPair::new("gone", v4(), functions, &[]);
        let here = pair.ends;
        let there = other_side(&pair.ends);
        for (hooks, ends) in [(&mut pair.sender, here), (&mut pair.receiver, there)] {
            hooks.close(&ends).expect("closed");
            open(hooks, ends, &["number"]);
        }
        // The first packet is sent with a function list that stores no packets. Then both hosts switch to a list that
        // does.
        let sent = Instant::now();
        let lost = pair.frame(b"lost");
        let next = list(functions);
        pair.receiver.accept(&there, &next).expect("ready");
        pair.sender.accept(&here, &next).expect("ready");
        pair.sender.switch(&here, 1).expect("switched");
        let frame = pair.frame(b"second");
        let asked = pair.at_receiver(&frame).sent;
        assert_eq!(kinds(&asked)[0], (REQUEST, 0));
        // For a second after the packet got its number, another CPU may be about to store it. So it is not gone yet.
        let answer = wait_until(
            "an answer",
            || pair.at_sender(&asked[0].1),
            |answer| answer.reason != PacketReason::Answered,
        );
        assert_eq!(
            (answer.reason, kind(&answer.frame), number(&answer.frame)),
            (PacketReason::Resent, GONE, 0)
        );
        assert!(sent.elapsed() > Duration::from_secs(1), "gone after {:?}", sent.elapsed());
        let heard = pair.at_receiver(&answer.frame);
        assert_eq!(heard.reason, PacketReason::Answered);
        let complete = if functions == SELECTIVE { 2 } else { 1 };
        assert_eq!(kinds(&heard.sent), [(ACK, complete)]);
        // The packet was late and not lost. The receiver still accepts packets that were sent before the switch of
        // function lists.
        assert_eq!(pair.at_receiver(&lost).reason, PacketReason::Delivered);
    }
}

/// A packet that a newer one has replaced in the sender's store, or that is too long for it, is gone at once.
#[test]
fn packet_that_is_replaced_or_too_long_to_be_stored_is_gone_at_once() {
    if !root("packet_that_is_replaced_or_too_long_to_be_stored_is_gone_at_once") {
        return;
    }
    let mut pair = FunctionPair::new("replaced", v4(), &["number", "repair"], &[]);
    ip(&format!("-n {} link set lo mtu 4000", pair.namespace));
    for at in 0..=STORED {
        pair.frame(&at.to_be_bytes());
    }
    pair.frame(&[1; 2100]);
    pair.frame(b"");
    for gone in [0, STORED + 1, STORED + 2] {
        let answer = pair.at_sender(&ask(&pair, gone));
        assert_eq!(
            (answer.reason, kind(&answer.frame), number(&answer.frame)),
            (PacketReason::Resent, GONE, gone)
        );
    }
    let answer = pair.at_sender(&ask(&pair, 3));
    assert_eq!((answer.reason, kind(&answer.frame), number(&answer.frame)), (PacketReason::Resent, DATA, 3));
}

/// A packet that the receiver has given up may arrive when the socket is full. It stays given up, since the sender does
/// not send acknowledged packets again. Later packets are acknowledged.
#[test]
fn given_up_packet_that_is_refused_stays_given_up() {
    if !root("given_up_packet_that_is_refused_stays_given_up") {
        return;
    }
    let mut pair = FunctionPair::new("refused", v4(), SELECTIVE, &[("repair", "tries", 1)]);
    let frames: Vec<_> = (0..4).map(|at| pair.frame(&[at; 33])).collect();
    pair.at_receiver(&frames[0]);
    let given_up = pair.at_receiver(&frames[2]);
    assert_eq!(kinds(&given_up.sent), [(REQUEST, 1), (ACK, 3)]);
    pair.at_sender(&given_up.sent[1].1);
    assert_eq!(pair.known().acked, 3);
    let full = pair.full_socket();
    assert_eq!(pair.at_receiver(&frames[1]).reason, PacketReason::SocketFull);
    drop(full);
    let later = pair.at_receiver(&frames[3]);
    assert_eq!((later.reason, kinds(&later.sent)), (PacketReason::Delivered, vec![(ACK, 4)]));
    pair.at_sender(&later.sent[0].1);
    assert_eq!(pair.known().acked, 4);
}

/// Packet numbers start again when a session restarts, but packets stored before the restart are not sent.
#[test]
fn restarted_session_numbers_anew_and_retransmits_no_old_packets() {
    if !root("restarted_session_numbers_anew_and_retransmits_no_old_packets") {
        return;
    }
    for functions in [SELECTIVE, GO_BACK] {
        let mut pair = FunctionPair::new("anew", v4(), functions, &[]);
        pair.frame(b"before");
        pair.frame(b"before, too");
        let here = pair.ends;
        let there = other_side(&pair.ends);
        pair.sender.replace(&here, &list(functions), 0).expect("anew");
        pair.receiver.replace(&there, &list(functions), 0).expect("anew");
        pair.frame(b"afterwards");
        let again = pair.at_sender(&ask(&pair, 0));
        assert_eq!((again.reason, &payload(&again.frame)[..10]), (PacketReason::Resent, &b"afterwards"[..]));
        let again = pair.at_sender(&ask(&pair, 1));
        assert_eq!((again.reason, again.sent.len()), (PacketReason::Answered, 0));
    }
}

/// A missing packet is requested again whenever a packet arrives, even in order, and not only when a new gap appears.
#[test]
fn missing_packet_is_requested_again_when_packets_arrive_in_order() {
    // `retry_us` is longer than a tick of the coarse clock that functions read.
    const RETRY: Duration = Duration::from_millis(12);
    if !root("missing_packet_is_requested_again_when_packets_arrive_in_order") {
        return;
    }
    let parameters = [("repair", "retry_us", 1000), ("repair", "tries", 0)];
    let mut pair = FunctionPair::new("retry", v4(), SELECTIVE, &parameters);
    let frames: Vec<_> = (0..30).map(|at| pair.frame(&[at; 33])).collect();
    pair.at_receiver(&frames[0]);
    for frame in &frames[2..] {
        let asked = pair.at_receiver(frame).sent;
        assert_eq!(kinds(&asked)[0], (REQUEST, 1));
        // exact: the pause is longer than `retry_us`, so the receiver requests missing packets again
        std::thread::sleep(RETRY);
    }
}

/// No more than the permitted share of packets is abandoned by the receiver after the deadline. Retransmission of all
/// other missing packets is requested without a limit.
#[test]
fn packets_abandoned_after_the_deadline_stay_within_limit_per_mille() {
    const MORE_THAN_A_RETRY: Duration = Duration::from_millis(2);
    if !root("packets_abandoned_after_the_deadline_stay_within_limit_per_mille") {
        return;
    }
    let partial: &[&str] = &["window", "number", "partial", "acknowledge"];
    let parameters = [
        ("partial", "retry_us", 1000),
        ("partial", "deadline_ms", 5),
        ("partial", "give_up_permille", 50),
        ("window", "packets", 256),
    ];
    let mut pair = FunctionPair::new("partial", v4(), partial, &parameters);
    let frames: Vec<_> = (0..101).map(|at| pair.frame(&[at; 33])).collect();
    for frame in frames.iter().enumerate().filter(|(at, _)| at % 10 != 9).map(|(_, frame)| frame) {
        assert_eq!(pair.at_receiver(frame).reason, PacketReason::Delivered);
    }
    // Ten packets are missing: five may be abandoned (5 of 100), and requests for the other five are repeated without a
    // limit.
    let last = pair.last(101);
    let mut asked = || {
        let mut numbers = BTreeSet::new();
        for _ in 0..20 {
            // exact: the pause is longer than `retry_us`, so the receiver requests missing packets again
            std::thread::sleep(MORE_THAN_A_RETRY);
            let sent = kinds(&pair.at_receiver(&last).sent);
            numbers.extend(sent.into_iter().filter(|(kind, _)| *kind == REQUEST).map(|(_, number)| number));
        }
        numbers
    };
    wait_until("as many given up as may be", &mut asked, |numbers| numbers.len() == 5);
    let owed = asked();
    assert_eq!(owed.len(), 5, "more than the bound was given up, or the others are not asked for");
    for number in (9..100_u32).step_by(10) {
        // A packet that arrives after the receiver has abandoned it is dropped as late. Packets that are still
        // requested can be delivered.
        let wanted = if owed.contains(&number) { PacketReason::Delivered } else { PacketReason::Late };
        let copy = pair.at_sender(&ask(&pair, number)).frame;
        assert_eq!((kind(&copy), pair.at_receiver(&copy).reason), (DATA, wanted), "{number}");
    }
    assert_eq!(pair.come().complete, 101);
}

/// Packets that were sent with the previous, reliable function list are requested until they arrive, even if the new
/// list may abandon packets. The same holds after a second swap of lists.
#[test]
fn packets_of_a_reliable_function_list_are_requested_after_replacement() {
    const LATER: Duration = Duration::from_millis(3);
    const GO_BACK: &[&str] = &["window", "gobackn", "number", "acknowledge"];
    if !root("packets_of_a_reliable_function_list_are_requested_after_replacement") {
        return;
    }
    let parameters = [
        ("partial", "retry_us", 1000),
        ("partial", "deadline_ms", 2),
        ("partial", "give_up_permille", 1000),
        ("window", "packets", 256),
    ];
    let all = ["window", "gobackn", "number", "partial", "acknowledge"];
    let mut pair = FunctionPair::with("owed", v4(), GO_BACK, &all, &parameters);
    let frames =
        |pair: &mut FunctionPair, count: u8| (0..count).map(|at| pair.frame(&[at; 33])).collect::<Vec<_>>();
    // Go-Back-N sends packets 0 to 9: packets 3, 8 and 9 are lost, and 4 to 7 arrive out of order.
    let first = frames(&mut pair, 10);
    for (at, frame) in first.iter().enumerate().filter(|(at, _)| *at != 3 && *at < 8) {
        let wanted = if at < 3 { PacketReason::Delivered } else { PacketReason::OutOfTurn };
        assert_eq!(pair.at_receiver(frame).reason, wanted, "{at}");
    }
    // A function list with partial reliability sends packets 10 to 19: 10 and 14 are lost. The receiver cannot know
    // whether the sender used the old list, which is reliable, or the new one for packet 10.
    pair.swap(PARTIAL);
    let second = frames(&mut pair, 10);
    for frame in second.iter().enumerate().filter(|(at, _)| ![0, 4].contains(at)).map(|(_, frame)| frame) {
        assert_eq!(pair.at_receiver(frame).reason, PacketReason::Delivered);
    }
    let last = pair.last(20);
    let asked = |pair: &mut FunctionPair, message: &[u8]| {
        let mut numbers = BTreeSet::new();
        for _ in 0..20 {
            // exact: the pause is longer than `deadline_ms`, after which the receiver may abandon missing packets
            std::thread::sleep(LATER);
            let sent = kinds(&pair.at_receiver(message).sent);
            numbers.extend(sent.into_iter().filter(|(kind, _)| *kind == REQUEST).map(|(_, number)| number));
        }
        numbers
    };
    // The receiver requests the retransmission of packet 14 until the packet's deadline has passed.
    asked(&mut pair, &last);
    let owed: BTreeSet<u32> = (3..=10).collect();
    assert_eq!(asked(&mut pair, &last), owed);
    for number in owed {
        let copy = pair.at_sender(&ask(&pair, number)).frame;
        assert_eq!(pair.at_receiver(&copy).reason, PacketReason::Delivered, "{number}");
    }
    assert_eq!(pair.come().complete, 20);
    // Go-Back-N sends packets 20 to 22: 20 is lost. A message from the sender's daemon before the swap of function
    // lists must not make the receiver abandon packet 20.
    let message = pair.last(20);
    pair.swap(GO_BACK);
    let third = frames(&mut pair, 3);
    assert_eq!(pair.at_receiver(&third[1]).reason, PacketReason::OutOfTurn);
    for _ in 0..5 {
        // exact: the pause is longer than `deadline_ms`, after which the receiver may abandon missing packets
        std::thread::sleep(LATER);
        pair.at_receiver(&message);
    }
    assert_eq!(pair.come().complete, 20);
    for frame in &third {
        assert_eq!(pair.at_receiver(frame).reason, PacketReason::Delivered);
    }
    assert_eq!(pair.come().complete, 23);
}

/// The congestion window starts with a few packets, and grows when packets are delivered. Other properties of this
/// congestion control are tested in tests/parsers.rs, without the kernel.
#[test]
fn congestion_window_starts_with_ten_packets_and_doubles_on_delivery() {
    if !root("congestion_window_starts_with_ten_packets_and_doubles_on_delivery") {
        return;
    }
    let functions: &[&str] = &["congestion", "window", "number", "repair", "acknowledge"];
    let mut pair = FunctionPair::new("cc", v4(), functions, &[("window", "packets", 256)]);
    let frames = fill(&mut pair);
    assert_eq!(frames.len(), 10);
    deliver(&mut pair, &frames);
    assert_eq!(fill(&mut pair).len(), 20);
}

/// Sends packets until the congestion window is full. Returns their Ethernet frames.
fn fill(pair: &mut FunctionPair) -> Vec<Vec<u8>> {
    let plain = datagram(&pair.ends, b"payload");
    let runs = || {
        let sent = std::iter::repeat_with(|| pair.sender.run(FunctionHook::Tx, &plain).expect("a run"));
        sent.take_while(|run| run.verdict == PASS_ON).map(|run| run.frame).collect()
    };
    inside(&pair.namespace, runs)
}

/// Delivers Ethernet frames to the receiver, and the receiver's acknowledgements to the sender.
fn deliver(pair: &mut FunctionPair, frames: &[Vec<u8>]) {
    for frame in frames {
        let sent = pair.at_receiver(frame).sent;
        for (_, ack) in sent.iter().filter(|(kind, _)| *kind == ACK) {
            assert_eq!(pair.at_sender(ack).reason, PacketReason::Answered);
        }
    }
}
