//! Tests of datagrams over IP protocol 253, one at a time: their form on the wire, their verdicts, and packets of other
//! programs, which pass unchanged. Traffic over a whole path is tested in `traffic.rs` and `sealed.rs`.

use millrace_graft_kernel::packet::{FRAME_BYTES, FunctionHook, PacketReason, TalkMessage, WireProtocol};

use crate::datagrams::{ETHERNET, PASS_ON, REDIRECT, SHOT, XDP_DROP, XDP_PASS, datagram, v4, v6};
use crate::frames::{framed, reason, run};
use crate::net::{check_frame, root};
use crate::sealed::{SealedCipher, odd, pair_over};
use crate::{counted, ends, hooks, open, open_over, other_side, sides};

const UDP: u8 = 17;
const IP253: u8 = 253;
const HOP_BY_HOP: u8 = 0;

fn ip_bytes(frame: &[u8]) -> usize {
    if frame[12..14] == [8, 0] { 20 } else { 40 }
}

fn protocol_at(frame: &[u8]) -> usize {
    ETHERNET + if ip_bytes(frame) == 20 { 9 } else { 6 }
}

/// Recomputes the checksum of the IPv4 header.
fn sum_header(frame: &mut [u8]) {
    let header = &mut frame[ETHERNET..ETHERNET + 20];
    header[10..12].fill(0);
    let words = header.chunks(2).map(|pair| u32::from(pair[0]) << 8 | u32::from(pair[1]));
    let sum: u32 = words.sum();
    let sum = (sum & 0xffff) + (sum >> 16);
    let check = !(((sum & 0xffff) + (sum >> 16)) as u16);
    header[10..12].copy_from_slice(&check.to_be_bytes());
}

/// Converts a UDP frame to its form on the wire: the UDP length is removed, and the checksum is stored in its place.
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

/// Restores the UDP header of a frame in wire form; the length is computed from the IP header.
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

/// Returns an IPv6 frame with `options` bytes of destination options before the payload.
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

/// Two receive paths are tested: XDP restores the UDP header, or TC restores it if no XDP program is attached.
#[test]
fn datagram_arrives_unchanged() {
    if !root("datagram_arrives_unchanged") {
        return;
    }
    for ends in [v4(), v6()] {
        let there = other_side(&ends);
        for functions in [&[][..], &["number", "order"], &["number", "repair"]] {
            let [sender, mut receiver] = sides(ends, functions, WireProtocol::Ip253);
            let mut by_udp = hooks();
            open(&mut by_udp, ends, functions);
            for len in [1, 2, 3, 17, 100, 1000, 1437] {
                let payload: Vec<u8> = (0..len).map(|at| at as u8 ^ 0x5a).collect();
                let plain = datagram(&ends, &payload);
                let wire = framed(&sender, &ends, &payload);
                let udp = framed(&by_udp, &ends, &payload);
                assert_eq!(wire, on_the_wire(&udp), "{functions:?} {len}");
                let (why, verdict, after) = reason(&mut receiver, &there, FunctionHook::Rx, &wire);
                assert_eq!((why, verdict), (PacketReason::LetIn, XDP_PASS));
                assert_eq!(after, udp, "{functions:?} {len}");
                for frame in [&udp, &wire] {
                    let (why, verdict, after) = reason(&mut receiver, &there, FunctionHook::Repair, frame);
                    assert_eq!((why, verdict), (PacketReason::Delivered, PASS_ON));
                    assert_eq!(after[..plain.len()], plain, "{functions:?} {len}");
                }
            }
        }
    }
}

#[test]
fn encrypted_datagram_arrives_unchanged() {
    if !root("encrypted_datagram_arrives_unchanged") {
        return;
    }
    for (ends, cipher) in [(v4(), SealedCipher::Aes128Gcm), (v6(), SealedCipher::ChaCha20Poly1305)] {
        let there = other_side(&ends);
        let (sender, mut receiver) = pair_over(WireProtocol::Ip253, ends, cipher, &["number"], hooks);
        let (by_udp, _) = pair_over(WireProtocol::Udp, ends, cipher, &["number"], hooks);
        for len in [1, 2, 100, 1413] {
            let payload = vec![0x5a; len];
            let plain = datagram(&ends, &payload);
            let wire = framed(&sender, &ends, &payload);
            assert_eq!(wire, on_the_wire(&framed(&by_udp, &ends, &payload)), "{cipher:?} {len}");
            // TC does not open sealed datagrams of either protocol.
            let (why, verdict, _) = reason(&mut receiver, &there, FunctionHook::Repair, &wire);
            assert_eq!((why, verdict), (PacketReason::Malformed, SHOT));
            let (why, verdict, opened) = reason(&mut receiver, &there, FunctionHook::Rx, &wire);
            assert_eq!((why, verdict), (PacketReason::LetIn, XDP_PASS), "{cipher:?} {len}");
            assert!(check_frame(&opened[..plain.len() + FRAME_BYTES]));
            assert_eq!(reason(&mut receiver, &there, FunctionHook::Rx, &wire).0, PacketReason::Replayed);
            let (why, verdict, after) = reason(&mut receiver, &there, FunctionHook::Repair, &opened);
            assert_eq!((why, verdict), (PacketReason::Delivered, PASS_ON));
            assert_eq!(after[..plain.len()], plain, "{cipher:?} {len}");
        }
    }
}

/// Interfaces may overwrite the bytes where UDP has its checksum, without effect. A datagram without a checksum keeps
/// none, and IPv6 packets may have options before the header.
#[test]
fn datagram_is_restored_after_interface_overwrites_checksum() {
    if !root("datagram_is_restored_after_interface_overwrites_checksum") {
        return;
    }
    for ends in [v4(), v6()] {
        let there = other_side(&ends);
        let [sender, mut receiver] = sides(ends, &[], WireProtocol::Ip253);
        let plain = datagram(&ends, b"payload");
        let good = framed(&sender, &ends, b"payload");
        let at = ETHERNET + ip_bytes(&good);
        let mut scribbled = good.clone();
        scribbled[at + 6..at + 8].copy_from_slice(&[0xab, 0xcd]);
        let mut padded = good.clone();
        padded.resize(good.len().max(60) + 9, 0);
        let mut frames = vec![(scribbled, plain.clone()), (padded, plain.clone())];
        if ends.local.is_ipv4() {
            let mut bare = good.clone();
            let mut of = plain.clone();
            bare[at + 4..at + 6].fill(0);
            of[at + 6..at + 8].fill(0);
            frames.push((bare, of));
        } else {
            frames.push((behind_options(&good, 16), behind_options(&plain, 16)));
        }
        for (frame, want) in frames {
            let (why, _, by_xdp) = reason(&mut receiver, &there, FunctionHook::Rx, &frame);
            assert_eq!(why, PacketReason::LetIn, "{frame:?}");
            for frame in [&frame, &by_xdp] {
                let (why, verdict, after) = reason(&mut receiver, &there, FunctionHook::Repair, frame);
                assert_eq!((why, verdict), (PacketReason::Delivered, PASS_ON));
                assert_eq!(after[..want.len()], want);
            }
        }
    }
}

/// A session over UDP drops packets of IP protocol 253, and vice versa, so operators notice if the settings of both
/// hosts differ.
#[test]
fn udp_session_drops_ip_protocol_253_packets_and_vice_versa() {
    if !root("udp_session_drops_ip_protocol_253_packets_and_vice_versa") {
        return;
    }
    for ends in [v4(), v6()] {
        let there = other_side(&ends);
        let [sender, receiver] = sides(ends, &["number"], WireProtocol::Ip253);
        let mut udp_sender = hooks();
        let mut udp_receiver = hooks();
        open(&mut udp_sender, ends, &["number"]);
        open(&mut udp_receiver, there, &["number"]);
        let mut receivers = [receiver, udp_receiver];
        let wire = framed(&sender, &ends, b"payload");
        let udp = framed(&udp_sender, &ends, b"payload");
        let message =
            datagram(&ends, &sender.frame_message(&ends, TalkMessage::Says(0, 1)).expect("a message"));
        let table = [
            (0, FunctionHook::Rx, &udp, XDP_DROP),
            (0, FunctionHook::Rx, &message, XDP_DROP),
            (0, FunctionHook::Rx, &datagram(&ends, b""), XDP_DROP),
            (1, FunctionHook::Rx, &wire, XDP_DROP),
            (1, FunctionHook::Rx, &on_the_wire(&message), XDP_DROP),
            (1, FunctionHook::Repair, &wire, SHOT),
        ];
        for (receiver, hook, frame, drop) in table {
            let (why, verdict, _) = reason(&mut receivers[receiver], &there, hook, frame);
            assert_eq!((why, verdict), (PacketReason::OtherProtocol, drop), "{hook:?} {frame:?}");
        }
        let (sealed, mut opener) =
            pair_over(WireProtocol::Ip253, ends, SealedCipher::ChaCha20Poly1305, &["number"], hooks);
        let (by_udp, mut by_udp_opener) =
            pair_over(WireProtocol::Udp, ends, SealedCipher::ChaCha20Poly1305, &["number"], hooks);
        for (sender, opener) in [(&sealed, &mut by_udp_opener), (&by_udp, &mut opener)] {
            let frame = framed(sender, &ends, b"payload");
            let (why, verdict, _) = reason(opener, &there, FunctionHook::Rx, &frame);
            assert_eq!((why, verdict), (PacketReason::OtherProtocol, XDP_DROP));
        }
    }
}

/// Other programs may use protocol 253 as well, and their packets pass unchanged.
#[test]
fn packet_without_session_passes_unchanged() {
    if !root("packet_without_session_passes_unchanged") {
        return;
    }
    let mut hooks = hooks();
    open_over(&mut hooks, v4(), &["number"], WireProtocol::Ip253);
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
        assert_eq!(run(&hooks, FunctionHook::Rx, frame), (XDP_PASS, frame.clone()));
        assert_eq!(run(&hooks, FunctionHook::Repair, frame), (PASS_ON, frame.clone()));
        assert_eq!(run(&hooks, FunctionHook::Tx, frame), (PASS_ON, frame.clone()));
    }
    // Packets of another program over protocol 253 pass unchanged.
    let own = on_the_wire(&datagram(&v4(), b"of another program"));
    assert_eq!(run(&hooks, FunctionHook::Tx, &own), (PASS_ON, own.clone()));
    assert_eq!(hooks.others().expect("a count"), 3 * strangers.len() as u64 + 1);
    assert_eq!(counted(&mut hooks, &v4()), []);
}

/// Fragments of UDP between the session's addresses are dropped even without sealing, since they may belong to the
/// session. Fragments of protocol 253 never reach an application.
#[test]
fn fragments_between_session_addresses_are_dropped() {
    if !root("fragments_between_session_addresses_are_dropped") {
        return;
    }
    for ends in [v4(), v6()] {
        let there = other_side(&ends);
        let [mut sender, mut receiver] = sides(ends, &["number"], WireProtocol::Ip253);
        for frame in odd(&ends) {
            let (why, verdict, _) = reason(&mut sender, &ends, FunctionHook::Tx, &frame);
            assert_eq!((why, verdict), (PacketReason::Fragment, SHOT));
            let (why, verdict, _) = reason(&mut receiver, &there, FunctionHook::Repair, &frame);
            assert_eq!((why, verdict), (PacketReason::Fragment, SHOT));
        }
        let mut fragment = odd(&ends).swap_remove(0);
        fragment[if ends.local.is_ipv4() { 23 } else { 54 }] = IP253;
        assert_eq!(run(&receiver, FunctionHook::Repair, &fragment), (PASS_ON, fragment.clone()));
        assert_eq!(run(&receiver, FunctionHook::Rx, &fragment), (XDP_PASS, fragment.clone()));
        // After the session is closed, fragments pass again.
        sender.close(&ends).expect("closed");
        assert_eq!(run(&sender, FunctionHook::Tx, &odd(&ends)[0]).0, PASS_ON);
    }
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
    let [sender, mut receiver] = sides(near, &["number", "repair"], WireProtocol::Ip253);
    let good = framed(&sender, &near, b"payload");
    let at = ETHERNET + 20;
    let before = receiver.progress(&far).expect("progress");
    for byte in at..good.len() {
        // The packet's trailer authenticates neither UDP's checksum nor the payload. The host's kernel checks the
        // former, and the application the latter.
        if (at + 4..good.len() - FRAME_BYTES).contains(&byte) {
            continue;
        }
        for bit in 0..8 {
            let mut bad = good.clone();
            bad[byte] ^= 1 << bit;
            for (hook, drop) in [(FunctionHook::Rx, XDP_DROP), (FunctionHook::Repair, SHOT)] {
                if byte < at + 4 {
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
    for cut in 1..good.len() - at - 8 {
        let mut bad = good[..good.len() - cut].to_vec();
        let length = (bad.len() - ETHERNET) as u16;
        bad[ETHERNET + 2..ETHERNET + 4].copy_from_slice(&length.to_be_bytes());
        for hook in [FunctionHook::Rx, FunctionHook::Repair] {
            let (why, ..) = reason(&mut receiver, &far, hook, &bad);
            assert!(matches!(why, PacketReason::Malformed | PacketReason::Forged), "{cut}: {why:?}");
        }
    }
    assert_eq!(receiver.progress(&far).expect("progress"), before);
    assert_eq!(reason(&mut receiver, &far, FunctionHook::Rx, &good).0, PacketReason::LetIn);
    assert_eq!(reason(&mut receiver, &far, FunctionHook::Rx, &good).0, PacketReason::Duplicate);
}

/// A request for a retransmission is turned into the requested packet in place. That packet is then converted to its
/// form on the wire like every outgoing packet.
#[test]
fn retransmission_request_is_turned_into_the_requested_packet() {
    if !root("retransmission_request_is_turned_into_the_requested_packet") {
        return;
    }
    for ends in [v4(), v6()] {
        let there = other_side(&ends);
        let [mut sender, receiver] = sides(ends, &["number", "repair"], WireProtocol::Ip253);
        let mut by_udp = hooks();
        open(&mut by_udp, ends, &["number", "repair"]);
        for len in [5, 200, 1201] {
            framed(&sender, &ends, &vec![len as u8; len]);
        }
        for number in 0..3 {
            let message = receiver.frame_message(&there, TalkMessage::Request(number)).expect("a message");
            let request = on_the_wire(&datagram(&there, &message));
            let (why, verdict, again) = reason(&mut sender, &ends, FunctionHook::Repair, &request);
            assert_eq!((why, verdict), (PacketReason::Resent, REDIRECT));
            assert!(check_frame(&again), "it is UDP until it leaves");
        }
    }
}

/// Packets of random bytes get a verdict, and the program raises exactly one of its counters of reasons for verdicts.
#[test]
fn packets_of_random_bytes_get_a_verdict_and_raise_one_counter() {
    if !root("packets_of_random_bytes_get_a_verdict_and_raise_one_counter") {
        return;
    }
    let mut random = fastrand::Rng::with_seed(253);
    for near in [v4(), v6()] {
        let far = other_side(&near);
        let [_, mut receiver] = sides(near, &["number", "order", "repair"], WireProtocol::Ip253);
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
            // The kernel accepts only frames with complete Ethernet and IP headers in BPF_PROG_TEST_RUN.
            let len = random.usize(ETHERNET + ip_bytes(&frame)..=frame.len());
            let frame = &frame[..len];
            assert!(matches!(run(&receiver, FunctionHook::Rx, frame).0, XDP_DROP | XDP_PASS));
            assert!(matches!(run(&receiver, FunctionHook::Repair, frame).0, PASS_ON | SHOT));
        }
        let counts = counted(&mut receiver, &far);
        let is_refusal = |reason: &PacketReason| {
            use PacketReason::{Forged, Fragment, Malformed, OtherProtocol};
            matches!(reason, Malformed | Forged | OtherProtocol | Fragment)
        };
        assert!(!counts.is_empty() && counts.iter().all(|(reason, _)| is_refusal(reason)), "{counts:?}");
    }
}

/// Checks byte by byte how a datagram over IP protocol 253 looks on the wire, since other tests rely on this format.
#[test]
fn wire_format_matches_the_documentation() {
    let udp = datagram(&v4(), b"payload");
    let wire = on_the_wire(&udp);
    assert_eq!((udp[23], wire[23]), (UDP, IP253));
    assert_eq!(wire[ETHERNET + 20..ETHERNET + 24], [0x1b, 0x58, 0x17, 0x70], "7000, 6000");
    assert_eq!(wire[ETHERNET + 24..ETHERNET + 26], udp[ETHERNET + 26..ETHERNET + 28], "the checksum");
    assert_eq!(wire[ETHERNET + 26..ETHERNET + 28], [0, 0]);
    assert_eq!(wire[ETHERNET + 28..], *b"payload");
}
