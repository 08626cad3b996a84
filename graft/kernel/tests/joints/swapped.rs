//! Lists that are swapped between any two packets, whatever is lost around: all bytes come, once.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use millrace_graft_kernel::joint::Reason;
use millrace_testkit::wait_until;
use ring::digest::{SHA256, digest};

use crate::datagrams::{v4, v6};
use crate::functions::{DATA, Pair, kind, payload};
use crate::net::root;
use crate::other_side;
use crate::traffic::{GO_BACK, PARTIAL, SELECTIVE};

/// Packets around each swap, none of which are under way before or behind it.
const BLOCK: usize = 12;

/// What becomes of packets of a block whose lists are swapped in front of number `at`: those that are lost, and one that comes last.
type Fate = fn(at: usize) -> (BTreeSet<usize>, Option<usize>);

const FATES: [Fate; 4] = [
    |at| (at.checked_sub(1).into_iter().collect(), None),
    |at| ([at].into(), None),
    |at| ((at.saturating_sub(2)..at + 2).collect(), None),
    |at| ([at + 1].into(), at.checked_sub(1)),
];

/// By number in the block.
type Come = BTreeMap<usize, Vec<u8>>;

/// A packet to the receiver, and all that ends say to each other for it.
fn arrive(pair: &mut Pair, frame: Vec<u8>, come: &mut Come) {
    let mut queue = VecDeque::from([frame]);
    while let Some(frame) = queue.pop_front() {
        let arrival = pair.at_receiver(&frame);
        if arrival.reason == Reason::Delivered && kind(&frame) == DATA {
            let bytes = payload(&arrival.frame).to_vec();
            let before = come.insert(usize::from(bytes[0]), bytes);
            assert!(before.is_none(), "it came twice: {before:?}");
        }
        for (_, said) in arrival.sent {
            let answer = pair.at_sender(&said);
            queue.extend(answer.sent.into_iter().map(|(_, frame)| frame));
            if answer.reason == Reason::Resent {
                queue.push_back(answer.frame);
            }
        }
    }
}

fn hash<'a>(parts: impl IntoIterator<Item = &'a Vec<u8>>) -> Vec<u8> {
    digest(&SHA256, &parts.into_iter().flatten().copied().collect::<Vec<_>>()).as_ref().to_vec()
}

/// A block of which the first `at` packets leave by the list that is there, and the others by `next`.
fn swap_at(pair: &mut Pair, at: usize, next: &[&str], fate: Fate) {
    let sent: Vec<Vec<u8>> = (0..BLOCK)
        .map(|number| (0..40 + 7 * number).map(|byte| (number + byte * (at + 3)) as u8).collect())
        .collect();
    let sent: Vec<Vec<u8>> = (0_u8..).zip(sent).map(|(number, rest)| [vec![number], rest].concat()).collect();
    let (lost, last) = fate(at);
    let (mut come, mut held, mut epoch) = (Come::new(), None, None);
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
    // As the daemon does when nothing is heard.
    let known = || {
        let known = pair.known();
        if known.acked != known.next {
            let word = pair.last(known.next);
            arrive(pair, word, &mut come);
        }
        pair.known()
    };
    wait_until("all", known, |known| known.acked == known.next);
    assert_eq!(come.len(), BLOCK, "{:?}", come.keys());
    assert_eq!(hash(come.values()), hash(&sent));
    let (here, there) = (pair.ends, other_side(&pair.ends));
    pair.sender.retire(&here, epoch ^ 1).expect("retired");
    pair.receiver.retire(&there, epoch ^ 1).expect("retired");
}

#[test]
fn bytes_hash_alike_wherever_lists_are_swapped() {
    if !root("bytes_hash_alike_wherever_lists_are_swapped") {
        return;
    }
    let parameters = [
        ("repair", "retry_us", 1000),
        ("repair", "tries", 0),
        ("gobackn", "retry_us", 1000),
        ("partial", "retry_us", 1000),
        // So that it owes everything.
        ("partial", "give_up_permille", 0),
    ];
    let lists = [GO_BACK, SELECTIVE, PARTIAL];
    let loaded: Vec<_> = lists.concat();
    for ends in [v4(), v6()] {
        let mut pair = Pair::with("offsets", ends, lists[2], &loaded, &parameters);
        // From each list to each other one, and back.
        for (from, to) in [(2, 0), (0, 1), (1, 2)] {
            for at in 0..=BLOCK {
                for fate in FATES {
                    swap_at(&mut pair, at, lists[to], fate);
                    swap_at(&mut pair, BLOCK - at, lists[from], fate);
                }
            }
            // What the next ones are swapped from.
            swap_at(&mut pair, 0, lists[to], FATES[0]);
        }
    }
}
