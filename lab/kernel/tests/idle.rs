//! Compares idle time with work whose CPU and length are known. Needs root.
//! Runs: alone, since the test needs times in which a CPU is idle.

use std::time::{Duration, Instant};

use millrace_kernel::clock::monotonic_ns;
use millrace_lab_kernel::idle::Idle;
use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::time::{ClockId, clock_gettime};
use nix::unistd::Pid;

/// Time after which a CPU that other programs keep busy is not waited for.
const BOUND: Duration = Duration::from_secs(20);
const WORK: Duration = Duration::from_millis(200);
/// Idle time that `/proc/stat` must report before the test compares idle times.
const ENOUGH: Duration = Duration::from_millis(100);

fn worked() -> Duration {
    clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).expect("a clock").into()
}

/// Pins this thread to the first CPU that the process may use.
fn pinned() -> usize {
    let allowed = sched_getaffinity(Pid::from_raw(0)).expect("affinity");
    let cpu = (0..CpuSet::count()).find(|cpu| allowed.is_set(*cpu) == Ok(true)).expect("a CPU");
    let mut set = CpuSet::new();
    set.set(cpu).expect("a CPU");
    sched_setaffinity(Pid::from_raw(0), &set).expect("it may run there");
    cpu
}

#[test]
fn busy_cpu_has_no_idle_time() {
    if !nix::unistd::geteuid().is_root() {
        println!("SKIP busy_cpu_has_no_idle_time: needs root");
        return;
    }
    let cpu = pinned();
    let mut idle = Idle::attach().expect("it attaches");
    let mut time = || {
        let before = monotonic_ns();
        let idle_ns = idle.times().expect("times")[cpu];
        (before, idle_ns, monotonic_ns())
    };
    let (first, idle_before, _) = time();
    let start = worked();
    while worked() - start < WORK {}
    let work_ns = u64::try_from((worked() - start).as_nanos()).expect("a short time");
    let (_, idle_after, last) = time();
    // Other programs on this CPU shorten the idle time, so only an upper bound holds.
    assert!(
        idle_after - idle_before <= last - first - work_ns,
        "{idle_before} {idle_after}, {work_ns} of work"
    );

    // Wait until `/proc/stat` reports `ENOUGH` idle time, which takes longer if another program keeps the CPU busy.
    let stat = idle_by_kernel(cpu);
    let (_, before, _) = time();
    let deadline = Instant::now() + BOUND;
    while idle_by_kernel(cpu) < stat + ENOUGH && Instant::now() < deadline {
        // exact: the CPU is idle during this pause, and the test measures the idle time
        std::thread::sleep(Duration::from_millis(5));
    }
    let kernel = idle_by_kernel(cpu) - stat;
    let (_, after, _) = time();
    if kernel < ENOUGH {
        println!("SKIP busy_cpu_has_no_idle_time, second part: the CPU was never idle");
        return;
    }
    // Idle time by the BPF program includes hardware interrupts. That of `/proc/stat` does not, and has steps of 10 ms.
    let idle = Duration::from_nanos(after - before);
    assert!(idle + Duration::from_millis(20) >= kernel, "{idle:?}, by the kernel {kernel:?}");
}

/// Returns the sum of `idle` and `iowait` in `/proc/stat`.
fn idle_by_kernel(cpu: usize) -> Duration {
    // exact: the CPU's idle time always grows, so the test only compares two readings
    let text = std::fs::read_to_string("/proc/stat").expect("/proc/stat");
    let line = text.lines().find_map(|line| line.strip_prefix(&format!("cpu{cpu} "))).expect("the CPU");
    let fields: Vec<u64> = line.split_whitespace().map(|field| field.parse().expect("a number")).collect();
    Duration::from_millis((fields[3] + fields[4]) * 10)
}
