//! Tests of parity packets: single frames are compared with the same erasure code in plain Rust, and a path loses
//! several packets of each block.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use millrace_graft_kernel::packet::{FRAME_BYTES, FunctionHook, PacketReason};
use millrace_kernel::xdp::XdpMode;
use millrace_testkit::wait_until;

use crate::datagrams::{PASS_ON, REDIRECT, datagram, v4, v6};
use crate::functions::{DATA, FunctionPair, RETURNED, kind, kinds, number, payload};
use crate::net::{check_frame, ifindex, inside, root};
use crate::sealed::{SealedCipher, pair_of};
use crate::traffic::{AtEnd, DatagramFate, PacketHook, TrafficPace, assert_all_once};
use crate::{count, hooks_of, other_side};

/// Frame kinds (`enum graft_kind` in C).
const PARITY: u8 = 5;

const PACKETS_MOST: u32 = 63;

fn twice(element: u16) -> u16 {
    element << 1 ^ if element & 0x8000 == 0 { 0 } else { 0x100b }
}

fn times(one: u16, other: u16) -> u16 {
    let shifted = (0..16).scan(one, |power, _| Some(std::mem::replace(power, twice(*power))));
    shifted.enumerate().fold(0, |sum, (bit, power)| if other >> bit & 1 == 1 { sum ^ power } else { sum })
}

/// Returns the generator x to the power of `exponent`, in the finite field of gf16.h.
fn power(exponent: u32) -> u16 {
    (0..exponent).fold(1, |power, _| twice(power))
}

/// Returns header and payload of a parity packet, computed term by term from the code's definition.
fn parity_of(row: u8, payloads: &[Vec<u8>]) -> Vec<u8> {
    let longest = payloads.iter().map(Vec::len).max().expect("some");
    let mut length = 0;
    let mut elements = vec![0u16; longest.div_ceil(2)];
    for (at, payload) in (0..).zip(payloads) {
        let factor = power(u32::from(row) * at);
        length ^= times(factor, payload.len() as u16);
        for (element, pair) in elements.iter_mut().zip(payload.chunks(2)) {
            *element ^= times(factor, u16::from_le_bytes([pair[0], pair.get(1).copied().unwrap_or(0)]));
        }
    }
    let bytes: Vec<_> = elements.iter().flat_map(|element| element.to_le_bytes()).collect();
    [&[row, payloads.len() as u8][..], &length.to_be_bytes(), &bytes].concat()
}

/// Tests that every square part of the code's matrix is invertible, so that n parities recover n packets, whichever
/// they are. The matrix element for a row and a packet is x to the power of row times packet. Parts of all four rows,
/// of three consecutive rows or of one row are Vandermonde matrices of distinct elements, which are invertible. This
/// test checks all other parts.
#[test]
fn every_square_submatrix_of_the_parity_code_is_invertible() {
    let elements: Vec<u16> = (0..PACKETS_MOST).map(power).collect();
    let raised = |element: u16, exponent: usize| (0..exponent).fold(1, |product, _| times(product, element));
    for (at, &one) in elements.iter().enumerate() {
        for (next, &two) in elements[..at].iter().enumerate() {
            for [first, second] in [[0, 1], [0, 2], [0, 3], [1, 2], [1, 3], [2, 3]] {
                let cross = [
                    times(raised(one, first), raised(two, second)),
                    times(raised(one, second), raised(two, first)),
                ];
                assert_ne!(cross[0], cross[1], "{at} and {next}, {first} and {second}");
            }
            // Parts of rows 0, 1, 3 or 0, 2, 3 have a Vandermonde determinant times this term, so the term must not be
            // zero.
            for &three in &elements[..next] {
                assert_ne!(one ^ two ^ three, 0);
                assert_ne!(times(one, two) ^ times(two, three) ^ times(three, one), 0);
            }
        }
    }
}

fn payloads(sizes: &[usize], seed: usize) -> Vec<Vec<u8>> {
    let byte =
        |packet: usize, at: usize| (at.wrapping_mul(31) ^ (at >> 3) ^ packet.wrapping_mul(97) ^ seed) as u8;
    sizes.iter().enumerate().map(|(packet, &size)| (0..size).map(|at| byte(packet, at)).collect()).collect()
}

/// Sends a block of data packets. Returns their Ethernet frames, and the parity packets that the sender adds after the
/// last of them.
fn block(pair: &mut FunctionPair, payloads: &[Vec<u8>], parity: u32) -> (Vec<Vec<u8>>, Vec<Vec<u8>>) {
    let (last, others) = payloads.split_last().expect("some");
    let mut frames: Vec<_> = others.iter().map(|payload| pair.frame(payload)).collect();
    let (reason, verdict, mut sent) = pair.send(last);
    assert!(
        matches!(reason, PacketReason::Sent | PacketReason::Protected) && verdict == PASS_ON,
        "{reason:?}"
    );
    let end = pair.known().next - 1;
    let behind = (0..parity).map(|_| (PARITY, end));
    assert_eq!(kinds(&sent), std::iter::once((DATA, end)).chain(behind).collect::<Vec<_>>());
    assert!(sent.iter().all(|(_, frame)| check_frame(frame)));
    frames.push(sent.remove(0).1);
    (frames, sent.into_iter().map(|(_, frame)| frame).collect())
}

fn pair_for(
    name: &str,
    ends: millrace_graft_kernel::packet::SessionEnds,
    packets: u32,
    parity: u32,
) -> FunctionPair {
    let parameters = [("fec", "packets", packets.into()), ("fec", "parity", parity.into())];
    FunctionPair::new(name, ends, &["number", "fec"], &parameters)
}

fn sizes(ends: &millrace_graft_kernel::packet::SessionEnds, round: usize, packets: usize) -> Vec<usize> {
    let most = if ends.local.is_ipv4() { 1424 } else { 1404 };
    (0..packets).map(|at| 1 + (at * 389 + round * 131) % most).collect()
}

#[test]
fn kernel_parity_packets_equal_those_computed_from_the_definition() {
    if !root("kernel_parity_packets_equal_those_computed_from_the_definition") {
        return;
    }
    for (ends, packets, parity) in
        [(v4(), 2, 1), (v4(), 3, 4), (v6(), 4, 2), (v4(), 8, 3), (v6(), 63, 4), (v4(), 63, 1)]
    {
        let mut pair = pair_for("parity", ends, packets, parity);
        for round in 0..4 {
            let payloads = payloads(&sizes(&ends, round, packets as usize), round);
            let (_, parities) = block(&mut pair, &payloads, parity);
            for (row, frame) in (0..).zip(&parities) {
                let sent = payload(frame);
                assert!(
                    sent[..sent.len() - FRAME_BYTES] == parity_of(row, &payloads),
                    "{packets} {row} {round}"
                );
            }
        }
    }
}

/// Delivers a frame to the receiver. Returns packet number and payload of each packet that the receiver recovered from
/// it.
fn recovered(pair: &mut FunctionPair, frame: &[u8]) -> Vec<(u32, Vec<u8>)> {
    let arrival = pair.at_receiver(frame);
    let mut found: Vec<_> = arrival
        .sent
        .iter()
        .filter(|(kind, _)| *kind == RETURNED)
        .map(|(_, frame)| (number(frame), payload(frame)[..payload(frame).len() - FRAME_BYTES].to_vec()))
        .collect();
    if arrival.reason == PacketReason::Recovered {
        found.push((u32::MAX, payload(&arrival.frame).to_vec()));
    }
    found
}

/// Tests every set of lost packets in a block; lost packets may be parity packets, too.
#[test]
fn losses_up_to_the_number_of_parities_are_recovered() {
    const PACKETS: u32 = 5;
    if !root("losses_up_to_the_number_of_parities_are_recovered") {
        return;
    }
    for (ends, parity) in [(v4(), 1), (v6(), 2), (v4(), 3), (v6(), 4)] {
        let mut pair = pair_for("losses", ends, PACKETS, parity);
        let mut first = 0;
        for lost in (0..1u32 << (PACKETS + parity)).filter(|lost| lost.count_ones() <= parity) {
            let payloads = payloads(&sizes(&ends, lost as usize, PACKETS as usize), lost as usize);
            let (frames, parities) = block(&mut pair, &payloads, parity);
            let mut found = Vec::new();
            for (_, frame) in (0..).zip(frames.iter().chain(&parities)).filter(|(at, _)| lost >> at & 1 == 0)
            {
                found.extend(recovered(&mut pair, frame));
            }
            let wanted: Vec<_> = (0..PACKETS).filter(|at| lost >> at & 1 == 1).collect();
            assert_eq!(found.len(), wanted.len(), "{parity} parities, lost {lost:b}");
            for (at, bytes) in found {
                // The BPF function wrote the first recovered packet into the buffer of the parity packet.
                let at = if at == u32::MAX { wanted[0] } else { at - first };
                assert!(
                    wanted.contains(&at) && bytes == payloads[at as usize],
                    "{parity} parities, lost {lost:b}, {at}"
                );
            }
            for frame in &frames {
                assert_eq!(pair.at_receiver(frame).reason, PacketReason::Duplicate);
            }
            for frame in &parities {
                assert_eq!(pair.at_receiver(frame).reason, PacketReason::Answered);
            }
            first += PACKETS;
        }
    }
}

/// Four packets of a large block are lost, and a fifth packet arrives after the parities.
#[test]
fn data_packet_after_its_parities_recovers_lost_packets() {
    if !root("data_packet_after_its_parities_recovers_lost_packets") {
        return;
    }
    let mut pair = pair_for("behind", v4(), PACKETS_MOST, 4);
    let payloads = payloads(&sizes(&v4(), 0, PACKETS_MOST as usize), 0);
    let (frames, parities) = block(&mut pair, &payloads, 4);
    for (_, frame) in frames.iter().enumerate().filter(|(at, _)| ![0, 7, 30, 31, 62].contains(at)) {
        assert_eq!(pair.at_receiver(frame).reason, PacketReason::Delivered);
    }
    for frame in &parities {
        let arrival = pair.at_receiver(frame);
        assert_eq!((arrival.reason, arrival.sent.len()), (PacketReason::Answered, 0));
    }
    // The fifth packet is delivered unchanged, and the four recovered packets follow it.
    let arrival = pair.at_receiver(&frames[30]);
    assert_eq!((arrival.reason, payload(&arrival.frame)), (PacketReason::Delivered, &payloads[30][..]));
    let plain = datagram(&v4(), &payloads[30]);
    assert_eq!(arrival.frame[..plain.len()], plain);
    let mut numbers: Vec<_> = arrival.sent.iter().filter(|(kind, _)| *kind == RETURNED).collect();
    numbers.sort_by_key(|(_, frame)| number(frame));
    assert_eq!(numbers.iter().map(|(_, frame)| number(frame)).collect::<Vec<_>>(), [0, 7, 31, 62]);
    for (_, frame) in numbers {
        assert!(check_frame(frame));
        let bytes = payload(frame);
        assert!(bytes[..bytes.len() - FRAME_BYTES] == payloads[number(frame) as usize]);
        // A host recognises packets that it has injected only by their mark, which packets from the network never have.
        assert_eq!(pair.at_receiver(frame).reason, PacketReason::Malformed);
    }
}

#[test]
fn more_losses_than_parity_packets_are_not_recovered() {
    if !root("more_losses_than_parity_packets_are_not_recovered") {
        return;
    }
    let payloads: Vec<_> = (0..4u8).map(|at| vec![at; 50]).collect();
    let functions: &[&str] = &["number", "fec", "order"];
    for (arrivals, want) in [
        (&[0usize, 1, 2, 3][..], PacketReason::Answered),
        (&[0, 3], PacketReason::Answered),
        (&[], PacketReason::Answered),
        // The recovered packet is counted as late, since `order` has already delivered a newer one.
        (&[0, 2, 3], PacketReason::Late),
        (&[0, 1, 2], PacketReason::Recovered),
    ] {
        let mut pair = FunctionPair::new("fecs", v4(), functions, &[("fec", "packets", 4)]);
        let (frames, parities) = block(&mut pair, &payloads, 1);
        for at in arrivals {
            assert_eq!(pair.at_receiver(&frames[*at]).reason, PacketReason::Delivered);
        }
        assert_eq!(pair.at_receiver(&parities[0]).reason, want, "{arrivals:?}");
    }
    // With its header, the parity packet is too long for the interface. The data packet has been sent already, so the
    // parity packet is dropped by redirecting it to interface 0.
    for parity in [1, 4] {
        let parameters = [("fec", "packets", 2), ("fec", "parity", parity)];
        let mut pair = FunctionPair::new("fecl", v4(), functions, &parameters);
        pair.frame(b"short");
        let (reason, verdict, sent) = pair.send(&[7; 1456]);
        assert_eq!((reason, verdict, kinds(&sent)), (PacketReason::Sent, REDIRECT, vec![(DATA, 1)]));
        assert_eq!(count(&mut pair.sender, &v4(), PacketReason::TooLong), 1);
        // A data packet that is too long gets no packet number.
        assert_eq!(pair.send(&[7; 1457]).0, PacketReason::TooLong);
        assert_eq!(pair.known().next, 2);
    }
}

/// Malformed parity packets have no effect, and valid ones still work after them.
#[test]
fn malformed_parity_recovers_nothing() {
    if !root("malformed_parity_recovers_nothing") {
        return;
    }
    let mut pair = pair_for("nonsense", v4(), 4, 2);
    let payloads = payloads(&[100, 200, 300, 400], 5);
    let (frames, parities) = block(&mut pair, &payloads, 2);
    for frame in &frames[2..] {
        pair.at_receiver(frame);
    }
    let at = parities[0].len() - payload(&parities[0]).len();
    // The changed headers of parity packets have impossible matrix rows, packet counts and lengths. A packet's trailer
    // does not authenticate the payload, so without sealing a path can change it.
    for (offset, value) in [(0, 2), (0, 255), (1, 0), (1, 1), (1, 64), (1, 255)] {
        let mut changed = parities[0].clone();
        changed[at + offset] = value;
        let arrival = pair.at_receiver(&changed);
        assert_eq!(
            (arrival.reason, recovered_kinds(&arrival.sent)),
            (PacketReason::Answered, 0),
            "{offset} {value}"
        );
    }
    assert_eq!(pair.at_receiver(&parities[0]).reason, PacketReason::Answered);
    assert_eq!(pair.at_receiver(&parities[1]).reason, PacketReason::Recovered);
    assert_eq!(pair.at_receiver(&frames[1]).reason, PacketReason::Duplicate);
}

fn recovered_kinds(sent: &[(u8, Vec<u8>)]) -> usize {
    sent.iter().filter(|(kind, _)| *kind == RETURNED).count()
}

/// Makes the path lose three packets of each block of 8 data and 3 parity packets, at varying positions.
fn three_of_eleven(count: u64) -> DatagramFate {
    let at = count % 11;
    let block = count / 11;
    if [block % 11, (3 * block + 1) % 11, (5 * block + 4) % 11].contains(&at) {
        DatagramFate::Lose
    } else {
        DatagramFate::Pass
    }
}

/// If a block loses at most as many packets as it has parities, all are recovered without a retransmission, with and
/// without sealing.
#[test]
fn parity_recovers_several_losses_of_a_block() {
    const SENT: u32 = 2000;
    const FUNCTIONS: &[&str] = &["number", "fec"];
    if !root("parity_recovers_several_losses_of_a_block") {
        return;
    }
    let parameters = [("fec", "packets", 8), ("fec", "parity", 3)];
    for (family, is_sealed) in [(4, false), (6, true)] {
        let site = PacketHook::new("fec3", family);
        let (near, far) = site.sockets();
        let there = other_side(&site.ends);
        let make = || hooks_of(FUNCTIONS, &parameters);
        let (mut sender, mut receiver) = if is_sealed {
            pair_of(site.ends, SealedCipher::ChaCha20Poly1305, FUNCTIONS, make)
        } else {
            let [mut sender, mut receiver] = [0, 1].map(|_| make());
            crate::open(&mut sender, site.ends, FUNCTIONS);
            crate::open(&mut receiver, there, FUNCTIONS);
            (sender, receiver)
        };
        for (namespace, hooks) in
            [(&site.network.publisher, &mut sender), (&site.network.subscriber, &mut receiver)]
        {
            let eth = ifindex(namespace, "eth");
            inside(namespace, || hooks.attach(eth, XdpMode::Auto).expect("attached"));
        }
        let stop = AtomicBool::new(false);
        let pace = TrafficPace::ahead(20);
        let wire = site.wire();
        let got = thread::scope(|scope| {
            let _end = AtEnd(&stop, true);
            scope.spawn(|| wire.run(&stop, three_of_eleven));
            scope.spawn(|| pace.send(&near, SENT));
            let got = pace.receive(&far, SENT);
            stop.store(true, Ordering::Relaxed);
            got
        });
        let counts = crate::counted(&mut receiver, &there);
        assert_eq!(got.len(), SENT as usize, "IPv{family}: {counts:?}");
        assert_all_once(&got, SENT);
        assert_eq!(count(&mut sender, &site.ends, PacketReason::Protected), u64::from(SENT) / 8 * 3);
        // The application may receive a recovered packet before the kernel has counted it as recovered.
        let come =
            || [PacketReason::Delivered, PacketReason::Recovered].map(|it| count(&mut receiver, &there, it));
        let all = u64::from(SENT);
        let [_, recovered] = wait_until("all counts", come, |come| come.iter().sum::<u64>() == all);
        let lost = (0..u64::from(SENT) / 8 * 11)
            .filter(|at| at % 11 < 8 && three_of_eleven(*at) == DatagramFate::Lose)
            .count();
        assert_eq!(recovered, lost as u64, "IPv{family}: {counts:?}");
        for reason in
            [PacketReason::Malformed, PacketReason::Forged, PacketReason::NoRoom, PacketReason::Unopened]
        {
            assert_eq!(count(&mut receiver, &there, reason), 0, "{reason:?}");
        }
    }
}

/// A measurement, not a check: `cargo test --release -p millrace-graft-kernel --test packets -- --ignored --nocapture
/// processing_time_of_parity_is_measured`
#[test]
#[ignore = "soak: measures, on a quiet machine"]
fn processing_time_of_parity_is_measured() {
    const BLOCKS: usize = 201;
    const PACKETS: u32 = 8;
    const BYTES: usize = 1200;
    if !root("processing_time_of_parity_is_measured") {
        return;
    }
    let median = |mut times: Vec<u128>| {
        times.sort_unstable();
        times[times.len() / 2]
    };
    for parity in 1..=4 {
        let pair = pair_for("time", v4(), PACKETS, parity);
        let plain = datagram(&v4(), &[7; BYTES]);
        let mut alone = Vec::new();
        let mut last = Vec::new();
        let mut whole = Vec::new();
        let mut made = Vec::new();
        for _ in 0..BLOCKS {
            let mut frames = Vec::new();
            for at in 1..=PACKETS {
                let run =
                    inside(&pair.namespace, || pair.sender.run(FunctionHook::Tx, &plain)).expect("a run");
                if at < PACKETS {
                    alone.push(run.time.as_nanos())
                } else {
                    last.push(run.time.as_nanos())
                }
                frames.push(run.frame);
            }
            let end = frames.pop();
            let left = pair.capture.frames().into_iter().chain(end).filter(|frame| check_frame(frame));
            let (data, parities): (Vec<_>, Vec<_>) = left.partition(|frame| kind(frame) == DATA);
            frames.extend(data);
            // The block loses as many packets as it has parities.
            for frame in &frames[parity as usize..] {
                let run = inside(&pair.namespace, || {
                    pair.receiver
                        .run(FunctionHook::Rx, frame)
                        .and_then(|_| pair.receiver.run(FunctionHook::Repair, frame))
                });
                whole.push(run.expect("a run").time.as_nanos());
            }
            let times: Vec<_> = parities
                .iter()
                .map(|frame| {
                    inside(&pair.namespace, || pair.receiver.run(FunctionHook::Repair, frame))
                        .expect("a run")
                        .time
                        .as_nanos()
                })
                .collect();
            made.extend(times.last());
        }
        println!(
            "{parity} behind {PACKETS} of {BYTES} bytes, ns: a packet out {}, the last with all parities {}, a packet in {}, recovery of {parity} {}",
            median(alone),
            median(last),
            median(whole),
            median(made)
        );
    }
}
