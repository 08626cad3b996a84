//! A fan-out that takes several runs.

use super::*;

/// Offset of the mark in the context of a run.
const MARK: usize = 8;

/// Runs the program once; returns its verdict, the packet's mark after it, and how many copies were tried.
fn run(bench: &Bench, frame: &[u8], mark: u32) -> (u32, u32, u64) {
    let mut context = context(0);
    context[MARK..MARK + 4].copy_from_slice(&mark.to_ne_bytes());
    bench.rewind();
    let before = bench.egresses_tried();
    let verdict = bench.test_run(frame, &mut context);
    let after = u32::from_ne_bytes(*context[MARK..].first_chunk().expect("a mark"));
    (verdict, after, bench.egresses_tried() - before)
}

/// A packet of the publisher with this number.
fn frame(bench: &Bench, number: u64) -> Vec<u8> {
    let packet = bench.publisher.seal((0, number), 2, &stream(100));
    ethernet(0x0800, &ipv4(0, &udp(PORT, &packet)))
}

/// A fan-out to five, two in a run.
fn five_by_two() -> Bench {
    let bench = Bench::with_config(Config { max_copies_per_run: 2, ..Config::default() });
    for _ in 1..5 {
        bench.slot.borrow_mut().add(&bench.downstream, &EGRESS).expect("an egress");
    }
    bench
}

/// The mark names where a packet's next run goes on, is used up by it, and the packet gets its own back.
#[test]
fn a_further_run_goes_on_where_the_last_ended() {
    if !root("a_further_run_goes_on_where_the_last_ended") {
        return;
    }
    let mut bench = five_by_two();
    let (one, other) = (frame(&bench, 0), frame(&bench, 300));
    let (verdict, first, egresses) = run(&bench, &one, 77);
    assert_eq!((verdict, egresses), (DROP, 2));
    // Meanwhile others come, among them far later numbers and this one again.
    let (verdict, second, egresses) = run(&bench, &other, 0);
    assert_eq!((verdict, egresses), (DROP, 2));
    assert_eq!(run(&bench, &one, 77), (PASS_ON, 77, 0), "replayed");
    let (verdict, third, egresses) = run(&bench, &one, first);
    assert_eq!((verdict, egresses), (DROP, 2));
    assert_eq!(run(&bench, &one, third), (PASS_ON, 77, 1), "the fifth egress");
    // What is used up is a mark like any other.
    assert_eq!(run(&bench, &one, third), (PASS_ON, third, 0));
    // A cursor is of no use to another packet.
    assert_eq!(run(&bench, &one, second), (PASS_ON, 0, 0));
    let counters = bench.counted();
    assert_eq!(FurtherRun::ALL.map(|outcome| counters.further_runs(outcome)), [1, 1, 1]);
    assert_eq!(counters.packets(Outcome::Replayed), 2);
    // Interrupted by another run: it is not lost, and has its mark.
    let (_, mark, _) = run(&bench, &frame(&bench, 302), 88);
    bench.set_busy(1);
    assert_eq!(run(&bench, &frame(&bench, 302), mark), (PASS_ON, 88, 0));
    bench.set_busy(0);
    // Removed meanwhile.
    let (_, mark, _) = run(&bench, &frame(&bench, 301), 0);
    bench.slot = RefCell::new(bench.upstream.slot(STREAM));
    assert_eq!(run(&bench, &frame(&bench, 301), mark), (PASS_ON, 0, 0));
}

/// More packets wait than there are cursors: each has its own as long as it waits, and whoever finds none is left for userspace.
#[test]
fn a_cursor_is_its_packets_as_long_as_that_waits() {
    const CURSORS: u64 = 4096;
    if !root("a_cursor_is_its_packets_as_long_as_that_waits") {
        return;
    }
    let bench = five_by_two();
    let frames: Vec<_> = (0..=CURSORS).map(|number| frame(&bench, 2 * number)).collect();
    let (verdict, first, _) = run(&bench, &frames[0], 77);
    assert_eq!(verdict, DROP);
    for other in &frames[1..CURSORS as usize] {
        assert_eq!(run(&bench, other, 0).0, DROP, "there is one for each");
    }
    assert_eq!(run(&bench, &frames[CURSORS as usize], 88), (PASS_ON, 88, 2), "and no further one");
    let (verdict, second, copies) = run(&bench, &frames[0], first);
    assert_eq!((verdict, copies), (DROP, 2), "the first goes on where it was");
    assert_eq!(run(&bench, &frames[0], second), (PASS_ON, 77, 1));
}
