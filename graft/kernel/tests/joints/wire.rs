//! Datagrams over IP protocol 253, one at a time: what is on the wire, what becomes of it, and what is left alone. What functions make
//! of a path over either protocol is in `traffic.rs` and `sealed.rs`.

use millrace_graft_kernel::joint::{FRAME_BYTES, Joint, Protocol, Reason, Word};

use crate::datagrams::{ETHERNET, PASS_ON, REDIRECT, SHOT, XDP_DROP, XDP_PASS, datagram, v4, v6};
use crate::frames::{framed, reason, run};
use crate::net::{check_frame, root};
use crate::sealed::{Cipher, odd, pair_over};
use crate::{counted, ends, joints, open, open_over, other_side, sides};

const UDP: u8 = 17;
const IP253: u8 = 253;
const HOP_BY_HOP: u8 = 0;

fn ip_bytes(frame: &[u8]) -> usize {
    if frame[12..14] == [8, 0] { 20 } else { 40 }
}

fn protocol_at(frame: &[u8]) -> usize {
    ETHERNET + if ip_bytes(frame) == 20 { 9 } else { 6 }
}

/// The sum of IPv4's header, made anew.
fn sum_header(frame: &mut [u8]) {
    let header = &mut frame[ETHERNET..ETHERNET + 20];
    header[10..12].fill(0);
    let words = header.chunks(2).map(|pair| u32::from(pair[0]) << 8 | u32::from(pair[1]));
    let sum: u32 = words.sum();
    let sum = (sum & 0xffff) + (sum >> 16);
    let check = !(((sum & 0xffff) + (sum >> 16)) as u16);
    header[10..12].copy_from_slice(&check.to_be_bytes());
}

/// What a frame of UDP is on the wire: its length is left out, and nothing is where its checksum was.
pub fn on_the_wire(frame: &[u8]) -> Vec<u8> {
    let mut wire = frame.to_vec();
    let at = ETHERNET + ip_bytes(frame);
    let protocol_at = protocol_at(frame);
    wire[protocol_at] = IP253;
    wire.copy_within(at + 6..at + 8, at + 4);
    wire[at + 6..at + 8].fill(0);
    if ip_bytes(frame) == 20 {
        sum_header(&mut wire);
    }
    wire
}

/// The other way: its length is what IP says.
pub fn as_udp(wire: &[u8]) -> Vec<u8> {
    let mut frame = wire.to_vec();
    let at = ETHERNET + ip_bytes(wire);
    let protocol_at = protocol_at(wire);
    frame[protocol_at] = UDP;
    frame.copy_within(at + 4..at + 6, at + 6);
    let bytes = (wire.len() - at) as u16;
    frame[at + 4..at + 6].copy_from_slice(&bytes.to_be_bytes());
    if ip_bytes(wire) == 20 {
        sum_header(&mut frame);
    }
    frame
}

/// With so many bytes of options in front of what is carried.
fn behind_options(frame: &[u8], options: usize) -> Vec<u8> {
    let mut longer = frame.to_vec();
    let mut header = vec![frame[protocol_at(frame)], (options / 8 - 1) as u8, 1, (options - 4) as u8];
    header.resize(options, 0);
    longer[ETHERNET + 6] = HOP_BY_HOP;
    let length = u16::from_be_bytes([frame[ETHERNET + 4], frame[ETHERNET + 5]]) + options as u16;
    longer[ETHERNET + 4..ETHERNET + 6].copy_from_slice(&length.to_be_bytes());
    longer.splice(ETHERNET + 40..ETHERNET + 40, header);
    longer
}

/// By both ways in: XDP makes UDP of it, and TC where XDP was not there.
#[test]
fn a_datagram_comes_out_as_it_went_in() {
    if !root("a_datagram_comes_out_as_it_went_in") {
        return;
    }
    for ends in [v4(), v6()] {
        let there = other_side(&ends);
        for functions in [&[][..], &["number", "order"], &["number", "repair"]] {
            let [sender, mut receiver] = sides(ends, functions, Protocol::Ip253);
            let mut by_udp = joints();
            open(&mut by_udp, ends, functions);
            for len in [1, 2, 3, 17, 100, 1000, 1437] {
                let payload: Vec<u8> = (0..len).map(|at| at as u8 ^ 0x5a).collect();
                let plain = datagram(&ends, &payload);
                let (wire, udp) = (framed(&sender, &ends, &payload), framed(&by_udp, &ends, &payload));
                assert_eq!(wire, on_the_wire(&udp), "{functions:?} {len}");
                let (why, verdict, after) = reason(&mut receiver, &there, Joint::Rx, &wire);
                assert_eq!((why, verdict), (Reason::LetIn, XDP_PASS));
                assert_eq!(after, udp, "{functions:?} {len}");
                for frame in [&udp, &wire] {
                    let (why, verdict, after) = reason(&mut receiver, &there, Joint::Repair, frame);
                    assert_eq!((why, verdict), (Reason::Delivered, PASS_ON));
                    assert_eq!(after[..plain.len()], plain, "{functions:?} {len}");
                }
            }
        }
    }
}

#[test]
fn a_sealed_datagram_comes_out_as_it_went_in() {
    if !root("a_sealed_datagram_comes_out_as_it_went_in") {
        return;
    }
    for (ends, cipher) in [(v4(), Cipher::Aes128Gcm), (v6(), Cipher::ChaCha20Poly1305)] {
        let there = other_side(&ends);
        let (sender, mut receiver) = pair_over(Protocol::Ip253, ends, cipher, &["number"], joints);
        let (by_udp, _) = pair_over(Protocol::Udp, ends, cipher, &["number"], joints);
        for len in [1, 2, 100, 1413] {
            let payload = vec![0x5a; len];
            let plain = datagram(&ends, &payload);
            let wire = framed(&sender, &ends, &payload);
            assert_eq!(wire, on_the_wire(&framed(&by_udp, &ends, &payload)), "{cipher:?} {len}");
            // TC opens nothing, by whatever protocol it comes.
            let (why, verdict, _) = reason(&mut receiver, &there, Joint::Repair, &wire);
            assert_eq!((why, verdict), (Reason::Malformed, SHOT));
            let (why, verdict, opened) = reason(&mut receiver, &there, Joint::Rx, &wire);
            assert_eq!((why, verdict), (Reason::LetIn, XDP_PASS), "{cipher:?} {len}");
            assert!(check_frame(&opened[..plain.len() + FRAME_BYTES]));
            assert_eq!(reason(&mut receiver, &there, Joint::Rx, &wire).0, Reason::Replayed);
            let (why, verdict, after) = reason(&mut receiver, &there, Joint::Repair, &opened);
            assert_eq!((why, verdict), (Reason::Delivered, PASS_ON));
            assert_eq!(after[..plain.len()], plain, "{cipher:?} {len}");
        }
    }
}

/// What interfaces make of the bytes where UDP has its checksum does not matter; a datagram without one stays so; and IPv6 has its
/// options in front.
#[test]
fn it_is_the_same_datagram_however_it_was_carried() {
    if !root("it_is_the_same_datagram_however_it_was_carried") {
        return;
    }
    for ends in [v4(), v6()] {
        let there = other_side(&ends);
        let [sender, mut receiver] = sides(ends, &[], Protocol::Ip253);
        let plain = datagram(&ends, b"payload");
        let good = framed(&sender, &ends, b"payload");
        let at = ETHERNET + ip_bytes(&good);
        let mut scribbled = good.clone();
        scribbled[at + 6..at + 8].copy_from_slice(&[0xab, 0xcd]);
        let mut padded = good.clone();
        padded.resize(good.len().max(60) + 9, 0);
        let mut frames = vec![(scribbled, plain.clone()), (padded, plain.clone())];
        if ends.local.is_ipv4() {
            let (mut bare, mut of) = (good.clone(), plain.clone());
            bare[at + 4..at + 6].fill(0);
            of[at + 6..at + 8].fill(0);
            frames.push((bare, of));
        } else {
            frames.push((behind_options(&good, 16), behind_options(&plain, 16)));
        }
        for (frame, want) in frames {
            let (why, _, by_xdp) = reason(&mut receiver, &there, Joint::Rx, &frame);
            assert_eq!(why, Reason::LetIn, "{frame:?}");
            for frame in [&frame, &by_xdp] {
                let (why, verdict, after) = reason(&mut receiver, &there, Joint::Repair, frame);
                assert_eq!((why, verdict), (Reason::Delivered, PASS_ON));
                assert_eq!(after[..want.len()], want);
            }
        }
    }
}

/// So that ends with other settings are noticed.
#[test]
fn sessions_take_their_own_protocol_only() {
    if !root("sessions_take_their_own_protocol_only") {
        return;
    }
    for ends in [v4(), v6()] {
        let there = other_side(&ends);
        let [sender, receiver] = sides(ends, &["number"], Protocol::Ip253);
        let (mut udp_sender, mut udp_receiver) = (joints(), joints());
        open(&mut udp_sender, ends, &["number"]);
        open(&mut udp_receiver, there, &["number"]);
        let mut receivers = [receiver, udp_receiver];
        let (wire, udp) = (framed(&sender, &ends, b"payload"), framed(&udp_sender, &ends, b"payload"));
        let word = datagram(&ends, &sender.word(&ends, Word::Says(0, 1)).expect("a word"));
        let table = [
            (0, Joint::Rx, &udp, XDP_DROP),
            (0, Joint::Rx, &word, XDP_DROP),
            (0, Joint::Rx, &datagram(&ends, b""), XDP_DROP),
            (1, Joint::Rx, &wire, XDP_DROP),
            (1, Joint::Rx, &on_the_wire(&word), XDP_DROP),
            (1, Joint::Repair, &wire, SHOT),
        ];
        for (receiver, joint, frame, drop) in table {
            let (why, verdict, _) = reason(&mut receivers[receiver], &there, joint, frame);
            assert_eq!((why, verdict), (Reason::OtherProtocol, drop), "{joint:?} {frame:?}");
        }
        let (sealed, mut opener) =
            pair_over(Protocol::Ip253, ends, Cipher::ChaCha20Poly1305, &["number"], joints);
        let (by_udp, mut by_udp_opener) =
            pair_over(Protocol::Udp, ends, Cipher::ChaCha20Poly1305, &["number"], joints);
        for (sender, opener) in [(&sealed, &mut by_udp_opener), (&by_udp, &mut opener)] {
            let frame = framed(sender, &ends, b"payload");
            let (why, verdict, _) = reason(opener, &there, Joint::Rx, &frame);
            assert_eq!((why, verdict), (Reason::OtherProtocol, XDP_DROP));
        }
    }
}

/// Protocol 253 is everybody's.
#[test]
fn what_is_of_no_session_is_left_alone() {
    if !root("what_is_of_no_session_is_left_alone") {
        return;
    }
    let mut joints = joints();
    open_over(&mut joints, v4(), &["number"], Protocol::Ip253);
    let there = other_side(&v4());
    let mut short = on_the_wire(&datagram(&there, b""));
    short[ETHERNET + 3] = 27;
    let mut negative = short.clone();
    negative[ETHERNET + 3] = 19;
    let strangers = [
        on_the_wire(&datagram(&ends("10.0.0.2:6000", "10.0.0.1:7001"), b"other port")),
        on_the_wire(&datagram(&ends("10.0.0.3:6000", "10.0.0.1:7000"), b"other peer")),
        on_the_wire(&datagram(&v6(), b"other family")),
        short,
        negative,
        on_the_wire(&datagram(&there, b""))[..40].to_vec(),
        datagram(&ends("10.0.0.2:6000", "10.0.0.1:7001"), b"UDP of another port"),
    ];
    for frame in &strangers {
        assert_eq!(run(&joints, Joint::Rx, frame), (XDP_PASS, frame.clone()));
        assert_eq!(run(&joints, Joint::Repair, frame), (PASS_ON, frame.clone()));
        assert_eq!(run(&joints, Joint::Tx, frame), (PASS_ON, frame.clone()));
    }
    // What another program sends by protocol 253 from here is its own business.
    let own = on_the_wire(&datagram(&v4(), b"of another program"));
    assert_eq!(run(&joints, Joint::Tx, &own), (PASS_ON, own.clone()));
    assert_eq!(joints.others().expect("a count"), 3 * strangers.len() as u64 + 1);
    assert_eq!(counted(&mut joints, &v4()), []);
}

/// Fragments of UDP may be the session's, in clear, too: they do not pass. Those of protocol 253 come to no application.
#[test]
fn nothing_passes_in_fragments() {
    if !root("nothing_passes_in_fragments") {
        return;
    }
    for ends in [v4(), v6()] {
        let there = other_side(&ends);
        let [mut sender, mut receiver] = sides(ends, &["number"], Protocol::Ip253);
        for frame in odd(&ends) {
            let (why, verdict, _) = reason(&mut sender, &ends, Joint::Tx, &frame);
            assert_eq!((why, verdict), (Reason::Fragment, SHOT));
            let (why, verdict, _) = reason(&mut receiver, &there, Joint::Repair, &frame);
            assert_eq!((why, verdict), (Reason::Fragment, SHOT));
        }
        let mut fragment = odd(&ends).swap_remove(0);
        fragment[if ends.local.is_ipv4() { 23 } else { 54 }] = IP253;
        assert_eq!(run(&receiver, Joint::Repair, &fragment), (PASS_ON, fragment.clone()));
        assert_eq!(run(&receiver, Joint::Rx, &fragment), (XDP_PASS, fragment.clone()));
        // With the session it ends.
        sender.close(&ends).expect("closed");
        assert_eq!(run(&sender, Joint::Tx, &odd(&ends)[0]).0, PASS_ON);
    }
}

/// Every bit of what is behind IP, every length, and what was sent before: nothing changes but a counter.
#[test]
fn forged_and_replayed_datagrams_change_nothing() {
    if !root("forged_and_replayed_datagrams_change_nothing") {
        return;
    }
    let (near, far) = (v4(), other_side(&v4()));
    let [sender, mut receiver] = sides(near, &["number", "repair"], Protocol::Ip253);
    let good = framed(&sender, &near, b"payload");
    let at = ETHERNET + 20;
    let before = receiver.progress(&far).expect("progress");
    for byte in at..good.len() {
        // UDP's checksum and the payload are not proved: the host and the application do that.
        if (at + 4..good.len() - FRAME_BYTES).contains(&byte) {
            continue;
        }
        for bit in 0..8 {
            let mut bad = good.clone();
            bad[byte] ^= 1 << bit;
            for (joint, drop) in [(Joint::Rx, XDP_DROP), (Joint::Repair, SHOT)] {
                if byte < at + 4 {
                    // Of another port, so of nobody.
                    assert_eq!(run(&receiver, joint, &bad).1, bad);
                    continue;
                }
                let (why, verdict, _) = reason(&mut receiver, &far, joint, &bad);
                assert!(matches!(why, Reason::Malformed | Reason::Forged), "{byte} {bit}: {why:?}");
                assert_eq!(verdict, drop);
            }
        }
    }
    for cut in 1..good.len() - at - 8 {
        let mut bad = good[..good.len() - cut].to_vec();
        let length = (bad.len() - ETHERNET) as u16;
        bad[ETHERNET + 2..ETHERNET + 4].copy_from_slice(&length.to_be_bytes());
        for joint in [Joint::Rx, Joint::Repair] {
            let (why, ..) = reason(&mut receiver, &far, joint, &bad);
            assert!(matches!(why, Reason::Malformed | Reason::Forged), "{cut}: {why:?}");
        }
    }
    assert_eq!(receiver.progress(&far).expect("progress"), before);
    assert_eq!(reason(&mut receiver, &far, Joint::Rx, &good).0, Reason::LetIn);
    assert_eq!(reason(&mut receiver, &far, Joint::Rx, &good).0, Reason::Duplicate);
}

/// A request becomes what it asks for; what leaves then takes the form of the wire where everything does.
#[test]
fn what_is_asked_for_is_sent_again() {
    if !root("what_is_asked_for_is_sent_again") {
        return;
    }
    for ends in [v4(), v6()] {
        let there = other_side(&ends);
        let [mut sender, receiver] = sides(ends, &["number", "repair"], Protocol::Ip253);
        let mut by_udp = joints();
        open(&mut by_udp, ends, &["number", "repair"]);
        for len in [5, 200, 1201] {
            framed(&sender, &ends, &vec![len as u8; len]);
        }
        for number in 0..3 {
            let word = receiver.word(&there, Word::Request(number)).expect("a word");
            let request = on_the_wire(&datagram(&there, &word));
            let (why, verdict, again) = reason(&mut sender, &ends, Joint::Repair, &request);
            assert_eq!((why, verdict), (Reason::Resent, REDIRECT));
            assert!(check_frame(&again), "it is UDP until it leaves");
        }
    }
}

/// Whatever comes, it is judged, and nothing else happens.
#[test]
fn random_frames_are_judged() {
    if !root("random_frames_are_judged") {
        return;
    }
    let mut random = fastrand::Rng::with_seed(253);
    for near in [v4(), v6()] {
        let far = other_side(&near);
        let [_, mut receiver] = sides(near, &["number", "order", "repair"], Protocol::Ip253);
        for _ in 0..3000 {
            let payload: Vec<u8> = (0..random.usize(0..60)).map(|_| random.u8(..)).collect();
            let mut frame = on_the_wire(&datagram(&near, &payload));
            if near.local.is_ipv6() && random.bool() {
                frame = behind_options(&frame, 8 * random.usize(1..4));
            }
            for _ in 0..random.usize(0..4) {
                let at = random.usize(ETHERNET..frame.len());
                frame[at] = random.u8(..);
            }
            // The kernel runs programs on no less than Ethernet's and IP's headers.
            let len = random.usize(ETHERNET + ip_bytes(&frame)..=frame.len());
            let frame = &frame[..len];
            assert!(matches!(run(&receiver, Joint::Rx, frame).0, XDP_DROP | XDP_PASS));
            assert!(matches!(run(&receiver, Joint::Repair, frame).0, PASS_ON | SHOT));
        }
        let counts = counted(&mut receiver, &far);
        let is_refusal = |reason: &Reason| {
            use Reason::{Forged, Fragment, Malformed, OtherProtocol};
            matches!(reason, Malformed | Forged | OtherProtocol | Fragment)
        };
        assert!(!counts.is_empty() && counts.iter().all(|(reason, _)| is_refusal(reason)), "{counts:?}");
    }
}

/// So that the tests above look where they mean to.
#[test]
fn the_form_on_the_wire_is_as_documented() {
    let udp = datagram(&v4(), b"payload");
    let wire = on_the_wire(&udp);
    assert_eq!((udp[23], wire[23]), (UDP, IP253));
    assert_eq!(wire[ETHERNET + 20..ETHERNET + 24], [0x1b, 0x58, 0x17, 0x70], "7000, 6000");
    assert_eq!(wire[ETHERNET + 24..ETHERNET + 26], udp[ETHERNET + 26..ETHERNET + 28], "the checksum");
    assert_eq!(wire[ETHERNET + 26..ETHERNET + 28], [0, 0]);
    assert_eq!(wire[ETHERNET + 28..], *b"payload");
}
