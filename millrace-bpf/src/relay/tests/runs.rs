//! A fan-out that takes several runs.

use super::*;

/// The mark names where a packet's next run goes on, is used up by it, and the packet gets its own back.
#[test]
fn a_further_run_goes_on_where_the_last_ended() {
    const MARK: usize = 8;
    if !root("a_further_run_goes_on_where_the_last_ended") {
        return;
    }
    let mut bench = Bench::with_config(Config { max_copies_per_run: 2, ..Config::default() });
    for _ in 1..5 {
        bench.slot.borrow_mut().add(&bench.downstream, &EGRESS).expect("an egress");
    }
    let frame = |bench: &Bench, number| {
        let packet = bench.publisher.seal((0, number), 2, &stream(100));
        ethernet(0x0800, &ipv4(0, &udp(PORT, &packet)))
    };
    let run = |bench: &Bench, frame: &[u8], mark: u32| {
        let mut context = context(0);
        context[MARK..MARK + 4].copy_from_slice(&mark.to_ne_bytes());
        bench.rewind();
        let before = bench.egresses_tried();
        let verdict = bench.test_run(frame, &mut context);
        let after = u32::from_ne_bytes(*context[MARK..].first_chunk().expect("a mark"));
        (verdict, after, bench.egresses_tried() - before)
    };
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
