//! Tests of packets that are copied in several runs of the program.

use super::*;

/// Offset of the field `mark` in `struct __sk_buff`.
const MARK: usize = 8;

/// Runs the program once. Returns its verdict, the packet's firewall mark (`skb->mark`) afterwards, and the number of
/// copies tried.
fn run(bench: &ProgramBench, frame: &[u8], mark: u32) -> (u32, u32, u64) {
    let mut context = context(0);
    context[MARK..MARK + 4].copy_from_slice(&mark.to_ne_bytes());
    bench.rewind();
    let before = bench.egresses_tried();
    let verdict = bench.test_run(frame, &mut context);
    let after = u32::from_ne_bytes(*context[MARK..].first_chunk().expect("a mark"));
    (verdict, after, bench.egresses_tried() - before)
}

/// Returns a frame with the publisher's packet of this number.
fn frame(bench: &ProgramBench, number: u64) -> Vec<u8> {
    let packet = bench.publisher.seal(0, number, 2, &stream(100));
    ethernet(0x0800, &ipv4(0, &udp(PORT, &packet)))
}

/// Returns a test bench with five subscribers' copies (egresses). Its BPF program makes at most two copies in each run.
fn five_by_two() -> ProgramBench {
    let bench = ProgramBench::with_config(Config { max_copies_per_run: 2, ..Config::default() });
    for _ in 1..5 {
        bench.slot.borrow_mut().add(&bench.downstream, &EGRESS).expect("an egress");
    }
    bench
}

/// Between two runs, the packet's firewall mark has a cursor ID, which tells the next run where to continue. That run
/// frees the cursor, and the last run restores the original mark.
#[test]
fn next_program_run_for_a_packet_copies_to_the_remaining_subscribers() {
    if !root("next_program_run_for_a_packet_copies_to_the_remaining_subscribers") {
        return;
    }
    let mut bench = five_by_two();
    let one = frame(&bench, 0);
    let other = frame(&bench, 300);
    let (verdict, first, egresses) = run(&bench, &one, 77);
    assert_eq!((verdict, egresses), (DROP, 2));
    // Between the two runs, other packets arrive: one with a much larger packet number, and a duplicate.
    let (verdict, second, egresses) = run(&bench, &other, 0);
    assert_eq!((verdict, egresses), (DROP, 2));
    assert_eq!(run(&bench, &one, 77), (PASS_ON, 77, 0), "replayed");
    let (verdict, third, egresses) = run(&bench, &one, first);
    assert_eq!((verdict, egresses), (DROP, 2));
    assert_eq!(run(&bench, &one, third), (PASS_ON, 77, 1), "the fifth egress");
    // A firewall mark with a cursor ID that was already used is treated as an ordinary firewall mark.
    assert_eq!(run(&bench, &one, third), (PASS_ON, third, 0));
    // One packet's cursor, which says where its next run continues, cannot be used for another packet.
    assert_eq!(run(&bench, &one, second), (PASS_ON, 0, 0));
    let counters = bench.counted();
    assert_eq!(FurtherRun::ALL.map(|outcome| counters.further_runs(outcome)), [1, 1, 1]);
    assert_eq!(counters.packets(Outcome::Replayed), 2);
    // A run that interrupts another run must not lose the packet or its firewall mark (`skb->mark`).
    let (_, mark, _) = run(&bench, &frame(&bench, 302), 88);
    bench.set_busy(1);
    assert_eq!(run(&bench, &frame(&bench, 302), mark), (PASS_ON, 88, 0));
    bench.set_busy(0);
    // Userspace stops the forwarding of the stream between two runs for one packet.
    let (_, mark, _) = run(&bench, &frame(&bench, 301), 0);
    bench.slot = RefCell::new(bench.upstream.slot(STREAM));
    assert_eq!(run(&bench, &frame(&bench, 301), mark), (PASS_ON, 0, 0));
}

/// Each packet that waits for its next run keeps its cursor, which says where that run continues. A packet that finds the
/// next cursor in use is left to userspace.
#[test]
fn fan_out_cursor_of_a_packet_awaiting_its_next_run_is_not_reused() {
    if !root("fan_out_cursor_of_a_packet_awaiting_its_next_run_is_not_reused") {
        return;
    }
    let bench = five_by_two();
    let frames: Vec<_> = (0..3).map(|number| frame(&bench, 2 * number)).collect();
    let (verdict, first, _) = run(&bench, &frames[0], 77);
    assert_eq!(verdict, DROP);
    copy_cursor(&bench, first, first + 1);
    assert_eq!(run(&bench, &frames[1], 88), (PASS_ON, 88, 2), "the next cursor is in use");
    assert_eq!(run(&bench, &frames[2], 0).0, DROP, "the one after it is free");
    let (verdict, second, copies) = run(&bench, &frames[0], first);
    assert_eq!((verdict, copies), (DROP, 2), "the first goes on where it was");
    assert_eq!(run(&bench, &frames[0], second), (PASS_ON, 77, 1));
}

/// Puts a copy of a waiting packet's cursor where the cursor with the ID `to` belongs, as if a packet with that ID waited
/// as well.
fn copy_cursor(bench: &ProgramBench, from: u32, to: u32) {
    const CURSORS: u32 = 4096;
    let mut object = lock(&bench.relay.object);
    let cursors = object.map("cursors").expect("a map");
    let key = |id: u32| (id % CURSORS).to_ne_bytes();
    let mut cursor = cursors.lookup(&key(from), MapFlags::ANY).expect("read").expect("a cursor");
    assert_eq!(cursor[..4], from.to_ne_bytes());
    cursor[..4].copy_from_slice(&to.to_ne_bytes());
    cursors.update(&key(to), &cursor, MapFlags::ANY).expect("written");
}
