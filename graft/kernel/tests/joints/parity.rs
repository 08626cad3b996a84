//! Parity one frame at a time, beside the same code in plain Rust, and on a wire that loses several packets of each block.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use millrace_graft_kernel::joint::{FRAME_BYTES, Joint, Reason};
use millrace_kernel::xdp::Mode;
use millrace_testkit::wait_until;

use crate::datagrams::{PASS_ON, REDIRECT, datagram, v4, v6};
use crate::functions::{DATA, Pair, RETURNED, kind, kinds, number, payload};
use crate::net::{check_frame, ifindex, inside, root};
use crate::sealed::{Cipher, pair_of};
use crate::traffic::{AtEnd, Fate, Pace, Site, assert_all_once};
use crate::{count, joints_of, other_side};

/// `enum graft_kind`.
const PARITY: u8 = 5;

const PACKETS_MOST: u32 = 63;

fn twice(element: u16) -> u16 {
    element << 1 ^ if element & 0x8000 == 0 { 0 } else { 0x100b }
}

fn times(one: u16, other: u16) -> u16 {
    let shifted = (0..16).scan(one, |power, _| Some(std::mem::replace(power, twice(*power))));
    shifted.enumerate().fold(0, |sum, (bit, power)| if other >> bit & 1 == 1 { sum ^ power } else { sum })
}

/// x to this power.
fn power(exponent: u32) -> u16 {
    (0..exponent).fold(1, |power, _| twice(power))
}

/// What the head of a parity packet says, and what is behind it: the definition, term by term.
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

/// Any n parities make any n packets because each square part of the matrix can be inverted. Its elements are x^(row * packet): those
/// of all four rows, of three in a row, and of one, are Vandermonde's, of elements that differ. The others are looked at here.
#[test]
fn every_square_part_of_the_code_can_be_inverted() {
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
            // Of three packets and the rows 0, 1 and 3, or 0, 2 and 3: Vandermonde's, times what is compared with zero.
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

/// The frames of a block, and its parity packets, which leave behind the last of them.
fn block(pair: &mut Pair, payloads: &[Vec<u8>], parity: u32) -> (Vec<Vec<u8>>, Vec<Vec<u8>>) {
    let (last, others) = payloads.split_last().expect("some");
    let mut frames: Vec<_> = others.iter().map(|payload| pair.frame(payload)).collect();
    let (reason, verdict, mut sent) = pair.send(last);
    assert!(matches!(reason, Reason::Sent | Reason::Protected) && verdict == PASS_ON, "{reason:?}");
    let end = pair.known().next - 1;
    let behind = (0..parity).map(|_| (PARITY, end));
    assert_eq!(kinds(&sent), std::iter::once((DATA, end)).chain(behind).collect::<Vec<_>>());
    assert!(sent.iter().all(|(_, frame)| check_frame(frame)));
    frames.push(sent.remove(0).1);
    (frames, sent.into_iter().map(|(_, frame)| frame).collect())
}

fn pair_for(name: &str, ends: millrace_graft_kernel::joint::Ends, packets: u32, parity: u32) -> Pair {
    let parameters = [("fec", "packets", packets.into()), ("fec", "parity", parity.into())];
    Pair::new(name, ends, &["number", "fec"], &parameters)
}

fn sizes(ends: &millrace_graft_kernel::joint::Ends, round: usize, packets: usize) -> Vec<usize> {
    let most = if ends.local.is_ipv4() { 1424 } else { 1404 };
    (0..packets).map(|at| 1 + (at * 389 + round * 131) % most).collect()
}

#[test]
fn parity_is_what_its_definition_says() {
    if !root("parity_is_what_its_definition_says") {
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

/// What became of packets at the receiver: numbers and payloads of those that it has recovered.
fn recovered(pair: &mut Pair, frame: &[u8]) -> Vec<(u32, Vec<u8>)> {
    let arrival = pair.at_receiver(frame);
    let mut found: Vec<_> = arrival
        .sent
        .iter()
        .filter(|(kind, _)| *kind == RETURNED)
        .map(|(_, frame)| (number(frame), payload(frame)[..payload(frame).len() - FRAME_BYTES].to_vec()))
        .collect();
    if arrival.reason == Reason::Recovered {
        found.push((u32::MAX, payload(&arrival.frame).to_vec()));
    }
    found
}

/// Each set of packets of a block that may be lost, parity packets among them, is.
#[test]
fn any_losses_that_parity_is_for_are_made_up_for() {
    const PACKETS: u32 = 5;
    if !root("any_losses_that_parity_is_for_are_made_up_for") {
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
                // The one that a parity packet has become is the first of them.
                let at = if at == u32::MAX { wanted[0] } else { at - first };
                assert!(
                    wanted.contains(&at) && bytes == payloads[at as usize],
                    "{parity} parities, lost {lost:b}, {at}"
                );
            }
            for frame in &frames {
                assert_eq!(pair.at_receiver(frame).reason, Reason::Duplicate);
            }
            for frame in &parities {
                assert_eq!(pair.at_receiver(frame).reason, Reason::Answered);
            }
            first += PACKETS;
        }
    }
}

/// Four of a large block, and what comes behind its parities.
#[test]
fn what_comes_behind_its_parities_makes_others() {
    if !root("what_comes_behind_its_parities_makes_others") {
        return;
    }
    let mut pair = pair_for("behind", v4(), PACKETS_MOST, 4);
    let payloads = payloads(&sizes(&v4(), 0, PACKETS_MOST as usize), 0);
    let (frames, parities) = block(&mut pair, &payloads, 4);
    for (_, frame) in frames.iter().enumerate().filter(|(at, _)| ![0, 7, 30, 31, 62].contains(at)) {
        assert_eq!(pair.at_receiver(frame).reason, Reason::Delivered);
    }
    for frame in &parities {
        let arrival = pair.at_receiver(frame);
        assert_eq!((arrival.reason, arrival.sent.len()), (Reason::Answered, 0));
    }
    // One of the five was late only: it is delivered as it is, and the others follow it.
    let arrival = pair.at_receiver(&frames[30]);
    assert_eq!((arrival.reason, payload(&arrival.frame)), (Reason::Delivered, &payloads[30][..]));
    let plain = datagram(&v4(), &payloads[30]);
    assert_eq!(arrival.frame[..plain.len()], plain);
    let mut numbers: Vec<_> = arrival.sent.iter().filter(|(kind, _)| *kind == RETURNED).collect();
    numbers.sort_by_key(|(_, frame)| number(frame));
    assert_eq!(numbers.iter().map(|(_, frame)| number(frame)).collect::<Vec<_>>(), [0, 7, 31, 62]);
    for (_, frame) in numbers {
        assert!(check_frame(frame));
        let bytes = payload(frame);
        assert!(bytes[..bytes.len() - FRAME_BYTES] == payloads[number(frame) as usize]);
        // That it is one of this host says its mark alone. From a wire it has none.
        assert_eq!(pair.at_receiver(frame).reason, Reason::Malformed);
    }
}

#[test]
fn parity_is_of_no_use_for_more_than_it_has() {
    if !root("parity_is_of_no_use_for_more_than_it_has") {
        return;
    }
    let payloads: Vec<_> = (0..4u8).map(|at| vec![at; 50]).collect();
    let functions: &[&str] = &["number", "fec", "order"];
    for (arrivals, want) in [
        (&[0usize, 1, 2, 3][..], Reason::Answered),
        (&[0, 3], Reason::Answered),
        (&[], Reason::Answered),
        // What order has no use for any more.
        (&[0, 2, 3], Reason::Late),
        (&[0, 1, 2], Reason::Recovered),
    ] {
        let mut pair = Pair::new("fecs", v4(), functions, &[("fec", "packets", 4)]);
        let (frames, parities) = block(&mut pair, &payloads, 1);
        for at in arrivals {
            assert_eq!(pair.at_receiver(&frames[*at]).reason, Reason::Delivered);
        }
        assert_eq!(pair.at_receiver(&parities[0]).reason, want, "{arrivals:?}");
    }
    // Too long for the interface with what a parity packet has in addition: the packet itself has left, and the
    // others go to no interface.
    for parity in [1, 4] {
        let parameters = [("fec", "packets", 2), ("fec", "parity", parity)];
        let mut pair = Pair::new("fecl", v4(), functions, &parameters);
        pair.frame(b"short");
        let (reason, verdict, sent) = pair.send(&[7; 1456]);
        assert_eq!((reason, verdict, kinds(&sent)), (Reason::Sent, REDIRECT, vec![(DATA, 1)]));
        assert_eq!(count(&mut pair.sender, &v4(), Reason::TooLong), 1);
        // Too long itself: it has no number.
        assert_eq!(pair.send(&[7; 1457]).0, Reason::TooLong);
        assert_eq!(pair.known().next, 2);
    }
}

/// Parity packets that say what cannot be: nothing comes of them, and what is right still works behind them.
#[test]
fn parity_that_makes_no_sense_is_answered_with_nothing() {
    if !root("parity_that_makes_no_sense_is_answered_with_nothing") {
        return;
    }
    let mut pair = pair_for("nonsense", v4(), 4, 2);
    let payloads = payloads(&[100, 200, 300, 400], 5);
    let (frames, parities) = block(&mut pair, &payloads, 2);
    for frame in &frames[2..] {
        pair.at_receiver(frame);
    }
    let at = parities[0].len() - payload(&parities[0]).len();
    // Row, packets, and lengths that no packet can have. Frames do not cover payloads: in clear they can be changed on the way.
    for (offset, value) in [(0, 2), (0, 255), (1, 0), (1, 1), (1, 64), (1, 255)] {
        let mut changed = parities[0].clone();
        changed[at + offset] = value;
        let arrival = pair.at_receiver(&changed);
        assert_eq!(
            (arrival.reason, recovered_kinds(&arrival.sent)),
            (Reason::Answered, 0),
            "{offset} {value}"
        );
    }
    assert_eq!(pair.at_receiver(&parities[0]).reason, Reason::Answered);
    assert_eq!(pair.at_receiver(&parities[1]).reason, Reason::Recovered);
    assert_eq!(pair.at_receiver(&frames[1]).reason, Reason::Duplicate);
}

fn recovered_kinds(sent: &[(u8, Vec<u8>)]) -> usize {
    sent.iter().filter(|(kind, _)| *kind == RETURNED).count()
}

/// Of each block of 8 and its 3 parities three, wherever they are.
fn three_of_eleven(count: u64) -> Fate {
    let (at, block) = (count % 11, count / 11);
    if [block % 11, (3 * block + 1) % 11, (5 * block + 4) % 11].contains(&at) {
        Fate::Lose
    } else {
        Fate::Pass
    }
}

/// Nothing is sent again, and everything comes: as many as are lost of a block, its parity packets are. Sealed or in clear.
#[test]
fn parity_makes_up_for_several_losses_of_a_block() {
    const SENT: u32 = 2000;
    const FUNCTIONS: &[&str] = &["number", "fec"];
    if !root("parity_makes_up_for_several_losses_of_a_block") {
        return;
    }
    let parameters = [("fec", "packets", 8), ("fec", "parity", 3)];
    for (family, is_sealed) in [(4, false), (6, true)] {
        let site = Site::new("fec3", family);
        let (near, far) = site.sockets();
        let there = other_side(&site.ends);
        let make = || joints_of(FUNCTIONS, &parameters);
        let (mut sender, mut receiver) = if is_sealed {
            pair_of(site.ends, Cipher::ChaCha20Poly1305, FUNCTIONS, make)
        } else {
            let [mut sender, mut receiver] = [0, 1].map(|_| make());
            crate::open(&mut sender, site.ends, FUNCTIONS);
            crate::open(&mut receiver, there, FUNCTIONS);
            (sender, receiver)
        };
        for (namespace, joints) in
            [(&site.network.publisher, &mut sender), (&site.network.subscriber, &mut receiver)]
        {
            let eth = ifindex(namespace, "eth");
            inside(namespace, || joints.attach(eth, Mode::Auto).expect("attached"));
        }
        let (stop, pace) = (AtomicBool::new(false), Pace::ahead(20));
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
        assert_eq!(count(&mut sender, &site.ends, Reason::Protected), u64::from(SENT) / 8 * 3);
        // What is recovered comes before it is counted.
        let come = || [Reason::Delivered, Reason::Recovered].map(|it| count(&mut receiver, &there, it));
        let all = u64::from(SENT);
        let [_, recovered] = wait_until("all counts", come, |come| come.iter().sum::<u64>() == all);
        let lost = (0..u64::from(SENT) / 8 * 11)
            .filter(|at| at % 11 < 8 && three_of_eleven(*at) == Fate::Lose)
            .count();
        assert_eq!(recovered, lost as u64, "IPv{family}: {counts:?}");
        for reason in [Reason::Malformed, Reason::Forged, Reason::NoRoom, Reason::Unopened] {
            assert_eq!(count(&mut receiver, &there, reason), 0, "{reason:?}");
        }
    }
}

/// Not a check: `cargo test --release -p millrace-graft-kernel --test joints -- --ignored --nocapture time_of_parity`
#[test]
#[ignore = "soak: measures, on a quiet machine"]
fn time_of_parity() {
    const BLOCKS: usize = 201;
    const PACKETS: u32 = 8;
    const BYTES: usize = 1200;
    if !root("time_of_parity") {
        return;
    }
    let median = |mut times: Vec<u128>| {
        times.sort_unstable();
        times[times.len() / 2]
    };
    for parity in 1..=4 {
        let pair = pair_for("time", v4(), PACKETS, parity);
        let plain = datagram(&v4(), &[7; BYTES]);
        let (mut alone, mut last, mut whole, mut made) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for _ in 0..BLOCKS {
            let mut frames = Vec::new();
            for at in 1..=PACKETS {
                let run = inside(&pair.namespace, || pair.sender.run(Joint::Tx, &plain)).expect("a run");
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
            // As many as there are parities are lost.
            for frame in &frames[parity as usize..] {
                let run = inside(&pair.namespace, || {
                    pair.receiver.run(Joint::Rx, frame).and_then(|_| pair.receiver.run(Joint::Repair, frame))
                });
                whole.push(run.expect("a run").time.as_nanos());
            }
            let times: Vec<_> = parities
                .iter()
                .map(|frame| {
                    inside(&pair.namespace, || pair.receiver.run(Joint::Repair, frame))
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
