//! Tests which packets the program forwards.

use millrace_quic::frame::{self, Frame, Walker};

use super::*;

#[test]
fn program_passes_unparsable_packets_to_userspace() {
    if !root("program_passes_unparsable_packets_to_userspace") {
        return;
    }
    let bench = ProgramBench::new();
    let mut number = 0;
    let mut good = |bench: &ProgramBench| {
        number += 1;
        bench.publisher.seal(0, number - 1, 4, &stream(1000))
    };
    let v4 = |packet: &[u8]| ethernet(0x0800, &ipv4(0, &udp(PORT, packet)));
    let extended = [&[17, 0, 0, 0, 0, 0, 0, 0], udp(PORT, &good(&bench)).as_slice()].concat();
    let tag = [&[0, 7, 0x08, 0], ipv4(0, &udp(PORT, &good(&bench))).as_slice()].concat();
    let mut fragment = ipv4(0, &udp(PORT, &good(&bench)));
    fragment[6] = 0x20;
    let mut long_udp = v4(&good(&bench));
    long_udp[14 + 20 + 4] ^= 0x10;
    let padded = [v4(&good(&bench)), vec![0xee; 9]].concat();
    let cases = [
        ("IPv4", v4(&good(&bench)), 0, Outcome::Forwarded),
        ("IPv6", ethernet(0x86dd, &ipv6(17, &udp(PORT, &good(&bench)))), 0, Outcome::Forwarded),
        ("bytes behind the datagram", padded, 0, Outcome::Forwarded),
        ("super-packet", v4(&good(&bench)), 600, Outcome::SuperPacket),
        ("other port", ethernet(0x0800, &ipv4(0, &udp(4444, &good(&bench)))), 0, Outcome::OtherPort),
        ("port 0", ethernet(0x0800, &ipv4(0, &udp(0, &good(&bench)))), 0, Outcome::OtherPort),
        ("IPv4 options", ethernet(0x0800, &ipv4(1, &udp(PORT, &good(&bench)))), 0, Outcome::OddHeaders),
        ("IPv6 extension", ethernet(0x86dd, &ipv6(60, &extended)), 0, Outcome::OddHeaders),
        ("a tag in the frame", ethernet(0x8100, &tag), 0, Outcome::OddHeaders),
        ("ARP", ethernet(0x0806, &[0; 46]), 0, Outcome::NotUdp),
        ("fragment", ethernet(0x0800, &fragment), 0, Outcome::Fragment),
        ("cut in the UDP header", ethernet(0x0800, &ipv4(0, &[0; 7])), 0, Outcome::Malformed),
        ("UDP length past the end", long_udp, 0, Outcome::Malformed),
        ("empty datagram", v4(&[]), 0, Outcome::BadSize),
        ("long header", v4(&[&[0xc0], good(&bench)[1..].as_ref()].concat()), 0, Outcome::LongHeader),
        (
            "another fixed bit than was sealed",
            v4(&[&[0], good(&bench)[1..].as_ref()].concat()),
            0,
            Outcome::NotAuthentic,
        ),
        ("unknown connection ID", v4(&[0x40; 100]), 0, Outcome::UnknownId),
        ("only a header", v4(&good(&bench)[..9]), 0, Outcome::BadSize),
        ("one byte short of a sample", v4(&good(&bench)[..1 + ID_LEN + 19]), 0, Outcome::BadSize),
        ("just a sample", v4(&good(&bench)[..1 + ID_LEN + 20]), 0, Outcome::NotAuthentic),
        ("too long", v4(&bench.publisher.seal(0, 90, 4, &stream(1600))), 0, Outcome::TooLong),
        ("other key phase", v4(&bench.publisher.seal(1, 91, 4, &stream(9))), 0, Outcome::NoKeys),
        ("reserved bit", v4(&bench.publisher.seal_with_bits(8, 0, 92, 4, &stream(9))), 0, Outcome::BadFrames),
        ("no frames", v4(&bench.publisher.seal(0, 93, 4, &[])), 0, Outcome::NoSlot),
        ("no stream", v4(&bench.publisher.seal(0, 94, 4, &[1; 20])), 0, Outcome::NoSlot),
        ("unknown frame", v4(&bench.publisher.seal(0, 95, 4, &[0x21; 20])), 0, Outcome::BadFrames),
        ("nothing of a stream", v4(&bench.publisher.seal(0, 96, 4, &stream(0))), 0, Outcome::NoSlot),
    ];
    for (description, frame, gso_size, want) in cases {
        let before = bench.egresses_tried();
        assert_eq!(bench.run(&frame, gso_size), want, "{description}");
        assert_eq!(bench.egresses_tried() - before, u64::from(want == Outcome::Forwarded), "{description}");
    }
    bench.upstream.set_keys(1, &bench.publisher.kernel_keys(1)).expect("keys");
    let updated = bench.publisher.seal(1, 97, 4, &stream(9));
    assert_eq!(bench.run_packet(&updated), Outcome::Forwarded, "other key phase, with keys");
}

#[test]
fn program_forwards_authentic_bytes_only() {
    if !root("program_forwards_authentic_bytes_only") {
        return;
    }
    let mut bench = ProgramBench::new();
    let packet = bench.publisher.seal(0, 5, 2, &stream(40));
    for at in 0..packet.len() * 8 {
        let mut forged = packet.clone();
        forged[at / 8] ^= 1 << (at % 8);
        let outcome = bench.run_packet(&forged);
        let id = 1..=ID_LEN;
        let want: &[_] = match at / 8 {
            // A flipped key phase bit or header form bit gives a different outcome than a wrong tag. The other bits of
            // the first byte are authenticated.
            0 => &[Outcome::NotAuthentic, Outcome::NoKeys, Outcome::LongHeader],
            byte if id.contains(&byte) => &[Outcome::UnknownId],
            // A changed header protection sample gives a different mask, which may flip the key phase bit.
            _ => &[Outcome::NotAuthentic, Outcome::NoKeys],
        };
        assert!(want.contains(&outcome), "bit {at}: {outcome:?}");
    }
    for len in 0..packet.len() {
        let outcome = bench.run_packet(&packet[..len]);
        assert_ne!(outcome, Outcome::Forwarded, "{len} bytes");
    }
    for _ in 0..1000 {
        let len = bench.rng.usize(40..1400);
        let mut garbage = quic::bytes(len, &mut bench.rng);
        garbage[0] = garbage[0] & 0x3f | 0x40;
        garbage[1..=ID_LEN].copy_from_slice(&bench.publisher.id);
        let outcome = bench.run_packet(&garbage);
        assert!([Outcome::NotAuthentic, Outcome::NoKeys].contains(&outcome), "{outcome:?}");
    }
    assert_eq!(bench.egresses_tried(), 0);
    assert_eq!(bench.run_packet(&packet), Outcome::Forwarded);
}

#[test]
fn program_forwards_no_packet_number_twice() {
    if !root("program_forwards_no_packet_number_twice") {
        return;
    }
    let mut bench = ProgramBench::new();
    let run = |bench: &ProgramBench, number, len| {
        bench.run_packet(&bench.publisher.seal(0, number, len, &stream(10)))
    };
    assert_eq!(run(&bench, 0, 1), Outcome::Forwarded);
    assert_eq!(run(&bench, 0, 1), Outcome::Replayed);
    // Packets that are reordered within the replay window are forwarded once each, in any order.
    let mut numbers: Vec<u64> = (1..129).collect();
    bench.rng.shuffle(&mut numbers);
    for number in &numbers {
        assert_eq!(run(&bench, *number, 2), Outcome::Forwarded, "{number}");
    }
    for number in 0..129 {
        assert_eq!(run(&bench, number, 2), Outcome::Replayed, "{number}");
    }
    // After a jump of the packet number, numbers older than the replay window count as seen. quinn's window is larger
    // by one number.
    assert_eq!(run(&bench, 10_000, 4), Outcome::Forwarded);
    assert_eq!(run(&bench, 10_000 - 127, 4), Outcome::Forwarded);
    assert_eq!(run(&bench, 10_000 - 127, 4), Outcome::Replayed);
    assert_eq!(run(&bench, 10_000 - 128, 4), Outcome::Replayed);
    // The packet number grows by so much that a number encoded in one byte is decoded wrongly.
    assert_eq!(run(&bench, 20_000, 1), Outcome::NotAuthentic);
    // A packet that userspace has decrypted is not forwarded later. Its number also sets how later short numbers are
    // decoded.
    bench.upstream.observe(20_000);
    assert_eq!(run(&bench, 20_000, 2), Outcome::Replayed);
    assert_eq!(run(&bench, 20_001, 1), Outcome::Forwarded);

    // The program takes over a connection that has been in use for a while.
    for expected in [1, 31, 32, 33, 300, 1 << 40] {
        bench.upstream = bench.relay.upstream(expected).expect("an upstream");
        bench.upstream.add_id(&bench.publisher.id).expect("an ID");
        bench.upstream.set_keys(0, &bench.publisher.kernel_keys(0)).expect("keys");
        for number in expected.saturating_sub(300)..expected {
            assert_eq!(run(&bench, number, 4), Outcome::Replayed, "{number} of {expected}");
        }
        assert_ne!(run(&bench, expected, 4), Outcome::Replayed, "{expected}");
    }
}

/// A program run that interrupts another one on the same CPU cannot use that CPU's scratch memory. It passes the packet
/// to userspace.
#[test]
fn nested_program_run_on_a_cpu_passes_the_packet_to_userspace() {
    if !root("nested_program_run_on_a_cpu_passes_the_packet_to_userspace") {
        return;
    }
    let bench = ProgramBench::new();
    let run = |number| bench.run_packet(&bench.publisher.seal(0, number, 2, &stream(10)));
    assert_eq!(run(0), Outcome::Forwarded);
    assert!(bench.set_busy(1).iter().all(|was| *was == 0), "each run gives it back");
    assert_eq!((run(1), bench.egresses_tried()), (Outcome::Busy, 1));
    assert!(bench.set_busy(0).iter().all(|was| *was == 1), "whose it is not leaves it alone");
    assert_eq!((run(1), bench.egresses_tried()), (Outcome::Forwarded, 2));
}

/// Runs the program on random payloads, most of them almost valid. It must find the same STREAM frames as userspace's
/// parser of QUIC frames.
#[test]
fn program_parses_frames_like_userspace() {
    const CASES: u64 = 20_000;
    if !root("program_parses_frames_like_userspace") {
        return;
    }
    let mut bench = ProgramBench::new();
    let mut seen = [0; 3];
    for number in 0..CASES {
        let frames = random_frames(&mut bench.rng);
        let Some(want) = expected(&frames) else { continue };
        let before = bench.egresses_tried();
        let counted = bench.counted();
        let outcome = bench.run_packet(&bench.publisher.seal(0, number, 4, &frames));
        let tried = bench.egresses_tried() - before;
        let counted = bench.counted().since(&counted);
        let judged: u64 = FrameOutcome::ALL.iter().map(|one| counted.frames(*one)).sum();
        assert_eq!(tried, if outcome == Outcome::Forwarded { counted.frames(FrameOutcome::Good) } else { 0 });
        match outcome {
            Outcome::Forwarded | Outcome::Declined => assert_eq!((Outcome::Forwarded, judged), want),
            Outcome::BadStream => assert!(want.0 == Outcome::Forwarded && judged <= want.1),
            _ => assert_eq!((outcome, judged), want, "{frames:02x?}"),
        }
        seen[(outcome != Outcome::BadFrames) as usize + (judged > 0) as usize] += 1;
    }
    assert!(seen.iter().all(|count| *count > CASES / 20), "bad, without, with streams: {seen:?}");
}

fn random_frames(rng: &mut Rng) -> Vec<u8> {
    let mut frames = Vec::new();
    for _ in 0..rng.usize(1..6) {
        if rng.u32(..3) > 0 {
            frames.extend(quic::any_other(rng));
            continue;
        }
        let stream = STREAM + rng.u64(..2);
        let bits = rng.u32(..61);
        let len = rng.usize(..60);
        let offset = rng.u64(..1 << bits);
        let chunk = StreamPart { stream, offset, data: quic::bytes(len, rng), fin: rng.bool() };
        let last = rng.u32(..4) == 0;
        frames.extend(quic::any_stream(&chunk, last, rng));
    }
    match rng.u32(..4) {
        0 => frames.truncate(rng.usize(..=frames.len())),
        1 => {
            let at = rng.usize(..frames.len());
            frames[at] ^= 1 << rng.u32(..8);
        }
        _ => {}
    }
    frames
}

/// Returns the expected outcome and number of copies, according to userspace's parser of QUIC frames (`Walker`).
/// Returns `None` for payloads that only userspace rejects, such as an ACK of negative packet numbers.
fn expected(frames: &[u8]) -> Option<(Outcome, u64)> {
    let frames: Result<Vec<_>, _> = Walker::new(frames).map(|item| item.map(|(_, frame)| frame)).collect();
    let frames = match frames {
        Ok(frames) => frames,
        Err(frame::Error::Malformed(0x02 | 0x03)) => return None,
        Err(_) => return Some((Outcome::BadFrames, 0)),
    };
    let forwarded = |frame: &&Frame<'_>| matches!(frame, Frame::Stream(stream) if stream.id == STREAM && (stream.fin || !stream.data.is_empty()));
    Some(match frames.iter().filter(forwarded).count() as u64 {
        0 => (Outcome::NoSlot, 0),
        streams => (Outcome::Forwarded, streams),
    })
}
