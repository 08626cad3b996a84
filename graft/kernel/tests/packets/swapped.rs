//! Tests swaps of function lists between any two packets, with any losses before and after: every payload is delivered
//! exactly once.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use millrace_graft_kernel::packet::PacketReason;
use millrace_testkit::wait_until;
use ring::digest::{SHA256, digest};

use crate::datagrams::{v4, v6};
use crate::functions::{DATA, FunctionPair, kind, payload};
use crate::net::root;
use crate::other_side;
use crate::traffic::{GO_BACK, PARTIAL, SELECTIVE};

/// Number of packets in a block. Lists are swapped within each block, and one block is delivered completely before the
/// next begins.
const BLOCK: usize = 12;

/// A test case: the lost packets of a block, the packet that arrives last, and the packet `at` before which lists are
/// swapped.
type SwapFate = fn(at: usize) -> (BTreeSet<usize>, Option<usize>);

const FATES: [SwapFate; 4] = [
    |at| (at.checked_sub(1).into_iter().collect(), None),
    |at| ([at].into(), None),
    |at| ((at.saturating_sub(2)..at + 2).collect(), None),
    |at| ([at + 1].into(), at.checked_sub(1)),
];

/// Received payloads, by the packet's index in the block.
type Come = BTreeMap<usize, Vec<u8>>;

/// Delivers a packet to the receiver, and all packets that both hosts send in reply.
fn arrive(pair: &mut FunctionPair, frame: Vec<u8>, come: &mut Come) {
    let mut queue = VecDeque::from([frame]);
    while let Some(frame) = queue.pop_front() {
        let arrival = pair.at_receiver(&frame);
        if arrival.reason == PacketReason::Delivered && kind(&frame) == DATA {
            let bytes = payload(&arrival.frame).to_vec();
            let before = come.insert(usize::from(bytes[0]), bytes);
            assert!(before.is_none(), "it came twice: {before:?}");
        }
        for (_, said) in arrival.sent {
            let answer = pair.at_sender(&said);
            queue.extend(answer.sent.into_iter().map(|(_, frame)| frame));
            if answer.reason == PacketReason::Resent {
                queue.push_back(answer.frame);
            }
        }
    }
}

fn hash<'a>(parts: impl IntoIterator<Item = &'a Vec<u8>>) -> Vec<u8> {
    digest(&SHA256, &parts.into_iter().flatten().copied().collect::<Vec<_>>()).as_ref().to_vec()
}

/// Sends a block: the first `at` packets with the current list of functions, and the others with the list `next`.
fn swap_at(pair: &mut FunctionPair, at: usize, next: &[&str], fate: SwapFate) {
    let sent: Vec<Vec<u8>> = (0..BLOCK)
        .map(|number| (0..40 + 7 * number).map(|byte| (number + byte * (at + 3)) as u8).collect())
        .collect();
    let sent: Vec<Vec<u8>> = (0_u8..).zip(sent).map(|(number, rest)| [vec![number], rest].concat()).collect();
    let (lost, last) = fate(at);
    let mut come = Come::new();
    let mut held = None;
    let mut epoch = None;
    for (number, payload) in sent.iter().enumerate() {
        if number == at {
            epoch = Some(pair.swap(next));
        }
        let frame = pair.frame(payload);
        match () {
            () if last == Some(number) => held = Some(frame),
            () if !lost.contains(&number) => arrive(pair, frame, &mut come),
            () => {}
        }
    }
    let epoch = epoch.unwrap_or_else(|| pair.swap(next));
    held.into_iter().for_each(|frame| arrive(pair, frame, &mut come));
    // The daemon sends GRAFT_LAST when it receives nothing, which reveals that the latest packets were lost.
    let known = || {
        let known = pair.known();
        if known.acked != known.next {
            let message = pair.last(known.next);
            arrive(pair, message, &mut come);
        }
        pair.known()
    };
    wait_until("all", known, |known| known.acked == known.next);
    assert_eq!(come.len(), BLOCK, "{:?}", come.keys());
    assert_eq!(hash(come.values()), hash(&sent));
    let here = pair.ends;
    let there = other_side(&pair.ends);
    pair.sender.retire(&here, epoch ^ 1).expect("retired");
    pair.receiver.retire(&there, epoch ^ 1).expect("retired");
}

#[test]
fn function_list_change_at_any_point_of_a_transfer_keeps_its_bytes() {
    if !root("function_list_change_at_any_point_of_a_transfer_keeps_its_bytes") {
        return;
    }
    let parameters = [
        ("repair", "retry_us", 1000),
        ("repair", "tries", 0),
        ("gobackn", "retry_us", 1000),
        ("partial", "retry_us", 1000),
        // With a bound of 0 ‰, the function `partial` may abandon no packet, so every packet has to arrive.
        ("partial", "give_up_permille", 0),
    ];
    let lists = [GO_BACK, SELECTIVE, PARTIAL];
    let loaded: Vec<_> = lists.concat();
    for ends in [v4(), v6()] {
        let mut pair = FunctionPair::with("offsets", ends, lists[2], &loaded, &parameters);
        // Each function list is replaced by each other list, and back.
        for (from, to) in [(2, 0), (0, 1), (1, 2)] {
            for at in 0..=BLOCK {
                for fate in FATES {
                    swap_at(&mut pair, at, lists[to], fate);
                    swap_at(&mut pair, BLOCK - at, lists[from], fate);
                }
            }
            // Switches to the list of functions that the next round of the loop replaces.
            swap_at(&mut pair, 0, lists[to], FATES[0]);
        }
    }
}
