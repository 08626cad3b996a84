//! Tests that no time counts twice if a program is interrupted between reading the clock and storing the result.
//!
//! `src/bpf/tasks.native.c` runs the programs on functions, which may be preempted, natively in this process.

#![allow(unsafe_code)]

/// The result of a run, in ns. Mirrors `struct tasks_result` of the C side.
#[repr(C)]
#[derive(Debug, Default)]
struct TaskSums {
    call_ns: u64,
    worker_ns: u64,
    cpu_ns: u64,
    clock_ns: u64,
    left: u64,
}

unsafe extern "C" {
    fn tasks_run(what: i32, at: i32, is_behind: i32, worker: i32, call_ns: u64, result: *mut TaskSums);
}

const CALL_NS: u64 = 50_000;
const OTHER_NS: u64 = 10_000_000;
/// Allowed difference in ns between expected and counted time, which covers a few readings of the simulated clock.
const TOLERANCE_NS: u64 = 500;

#[derive(Debug, Clone, Copy)]
enum Intruder {
    Preemption = 1,
    Sampler = 2,
}

fn run(intruder: Intruder, at: i32, behind: bool, worker: bool) -> TaskSums {
    let mut sums = TaskSums::default();
    // SAFETY: `TaskSums` has the layout of the C side's structure.
    unsafe {
        tasks_run(intruder as i32, at, behind.into(), worker.into(), CALL_NS, &raw mut sums);
    }
    sums
}

#[test]
fn time_of_preempting_tasks_is_not_charged_to_a_call() {
    for intruder in [Intruder::Preemption, Intruder::Sampler] {
        for (worker, behind) in [(false, false), (false, true), (true, false), (true, true)] {
            let mut places = 0;
            for at in 0.. {
                let sums = run(intruder, at, behind, worker);
                if sums.left != 0 {
                    break;
                }
                places += 1;
                let of = format!("{intruder:?} at {at}, behind {behind}, worker {worker}: {sums:?}");
                assert!(sums.call_ns.abs_diff(CALL_NS) <= TOLERANCE_NS, "{of}");
                assert!(sums.worker_ns <= TOLERANCE_NS, "{of}");
                assert!(sums.cpu_ns <= CALL_NS + 2 * TOLERANCE_NS, "{of}");
                let other = if matches!(intruder, Intruder::Preemption) { OTHER_NS } else { 0 };
                assert!(sums.clock_ns >= CALL_NS + other, "the other task ran: {of}");
            }
            // A program reads the clock twice at the start of a call, and at least once at its end.
            assert!(places >= 3, "{places} readings of the clock");
        }
    }
}
