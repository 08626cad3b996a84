//! Tests that the time of calls equals their thread's CPU time, and that timing them is cheap. Needs root.
//!
//! `scripts/kernels/cost.sh` runs these tests on emulated machines whose clock counts instructions. On these machines,
//! the measured times are exact.

use std::net::UdpSocket;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use millrace_cost::kernel::{Config, CostPrograms, CpuSums, KernelEvent, TimingMethod};
use millrace_testkit::wait_until;
use nix::errno::Errno;
use nix::sched::{CpuSet, sched_setaffinity};
use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::socket::{MsgFlags, recv};
use nix::time::{ClockId, clock_gettime};
use nix::unistd::{Pid, getppid};

/// Environment variable that is set if the machine's clock counts instructions, so other load cannot change a duration.
const EXACT: &str = "MILLRACE_EXACT";
/// Largest allowed difference between the counted time of the calls and the thread's CPU time, as a fraction of the CPU
/// time.
const TOLERANCE: f64 = 0.01;
const SPINNING: usize = 4;
/// Number of samples per second on each CPU, the observer's default.
const HZ: u32 = 1000;

static ALONE: Mutex<()> = Mutex::new(());

fn is_exact() -> bool {
    std::env::var_os(EXACT).is_some()
}

/// Runs `test` with each method of timing calls (kernel functions, system calls) that the kernel allows, one test at a
/// time.
fn with_each_method(name: &str, mut test: impl FnMut(&mut CostPrograms)) {
    if !nix::unistd::geteuid().is_root() {
        return println!("SKIP {name}: needs root");
    }
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    for method in [TimingMethod::Functions, TimingMethod::SystemCalls] {
        match CostPrograms::load(&Config { method: Some(method), ..Config::default() }) {
            Ok(mut cost) => test(&mut cost),
            Err(error) if method == TimingMethod::Functions => {
                println!("SKIP {name} with functions: {error}")
            }
            Err(error) => panic!("{error}"),
        }
    }
}

fn on_cpu() -> Duration {
    clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).expect("a clock").into()
}

/// Returns a socket with a received datagram, which calls can peek at repeatedly.
fn socket() -> UdpSocket {
    let socket = UdpSocket::bind("127.0.0.1:0").expect("a socket");
    socket.send_to(&[0; 8], socket.local_addr().expect("an address")).expect("sent");
    wait_until("the datagram", || look(&socket), |result| result.is_ok()).expect("received");
    socket
}

/// Peeks at the datagram: a call that receives and causes no softirq.
fn look(socket: &UdpSocket) -> Result<usize, Errno> {
    recv(socket.as_raw_fd(), &mut [0; 8], MsgFlags::MSG_PEEK | MsgFlags::MSG_DONTWAIT)
}

/// Returns the nanoseconds and the number of this process's calls that receive.
fn received(cost: &mut CostPrograms) -> (u64, u64) {
    // Times and calls are added to the sums of a process when its thread leaves the CPU.
    let left = || getrusage(UsageWho::RUSAGE_THREAD).expect("usage").voluntary_context_switches();
    let before = left();
    wait_until("this thread to leave its CPU", left, |now| *now > before);
    // exact: the count of this thread's calls is complete, because it is updated when the thread leaves its CPU
    let mut processes = cost.processes().expect("processes");
    processes.retain(|process| process.id.pid == std::process::id());
    processes.iter().fold((0, 0), |sum, process| {
        (sum.0 + process.ns(KernelEvent::Receive), sum.1 + process.calls(KernelEvent::Receive))
    })
}

/// The times and the number of consecutive calls, as the thread and the observer have counted them.
#[derive(Debug)]
struct CallStretch {
    on_cpu_ns: f64,
    counted_ns: f64,
    calls: u64,
    counted_calls: u64,
}

impl CallStretch {
    fn run(cost: &mut CostPrograms, length: Duration) -> Self {
        const BATCH: u64 = 64;
        let socket = socket();
        let before = received(cost);
        let start = on_cpu();
        let mut calls = 0;
        while on_cpu() - start < length {
            for _ in 0..BATCH {
                look(&socket).expect("received");
            }
            calls += BATCH;
        }
        let on_cpu_ns = (on_cpu() - start).as_secs_f64() * 1e9;
        let after = received(cost);
        Self { on_cpu_ns, counted_ns: (after.0 - before.0) as f64, calls, counted_calls: after.1 - before.1 }
    }

    /// Returns the counted time of the calls as a fraction of the thread's time on a CPU.
    fn share(&self) -> f64 {
        self.counted_ns / self.on_cpu_ns
    }
}

/// Runs `work` while other threads do nothing but compute.
fn beside_spinning<T>(work: impl FnOnce() -> T) -> T {
    struct StopFlag<'a>(&'a AtomicBool);
    impl Drop for StopFlag<'_> {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Relaxed);
        }
    }
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let _stop = StopFlag(&stop);
        for _ in 0..SPINNING {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            });
        }
        work()
    })
}

/// A thread may be preempted anywhere, even inside the programs that time its calls. The time of other threads that run
/// then must not count as its own.
#[test]
fn preempted_calls_count_only_their_threads_time() {
    let name = "preempted_calls_count_only_their_threads_time";
    let length = Duration::from_millis(if is_exact() { 2000 } else { 200 });
    with_each_method(name, |cost| {
        cost.attach().expect("it attaches");
        for cpu in 0..cost.cpus() {
            // Sampling fails for possible CPUs that are not online.
            let _ = cost.sample(cpu, HZ);
        }
        let networking = |cost: &CostPrograms| -> Vec<u64> {
            let sum = |totals: &CpuSums| KernelEvent::ALL.iter().map(|event| totals.ns(*event)).sum();
            // exact: these CPU times may grow; the test compares their growth with the elapsed time
            cost.totals().iter().map(sum).collect()
        };
        let alone = CallStretch::run(cost, length);
        let start = Instant::now();
        let before = networking(cost);
        let preempted = beside_spinning(|| CallStretch::run(cost, length));
        let after = networking(cost);
        let elapsed = u64::try_from(start.elapsed().as_nanos()).expect("a short time");
        let method = cost.method().expect("events are timed");
        println!(
            "{method:?}: {:.2} % of the time on CPU in {} calls, {:.2} % of it in {} beside {SPINNING} spinning threads",
            alone.share() * 100.0,
            alone.calls,
            preempted.share() * 100.0,
            preempted.calls
        );
        for stretch in [&alone, &preempted] {
            // The observer may also count up to two receive calls from before the measured time: those with which the
            // helper function `socket` waited for its datagram.
            assert!((stretch.calls..=stretch.calls + 2).contains(&stretch.counted_calls), "{stretch:?}");
            assert!(stretch.share() <= 1.0 + TOLERANCE, "{method:?}: {stretch:?}");
        }
        let change = preempted.share() / alone.share() - 1.0;
        assert!(!is_exact() || change.abs() <= TOLERANCE, "{method:?}: {alone:?} {preempted:?}");
        for (cpu, (after, before)) in after.iter().zip(&before).enumerate() {
            assert!(after - before <= elapsed, "CPU {cpu}: {} of {elapsed} ns", after - before);
        }
    });
}

/// Returns the shortest duration of `work` in ns, the mean of the fastest batch. Other load hardly changes a minimum.
fn least(mut work: impl FnMut()) -> f64 {
    const BATCHES: u32 = 50;
    const CALLS: u32 = 64;
    let batch = || {
        let start = Instant::now();
        (0..CALLS).for_each(|_| work());
        start.elapsed()
    };
    let least = std::iter::repeat_with(batch).take(BATCHES as usize).min().expect("batches");
    least.as_nanos() as f64 / f64::from(CALLS)
}

/// The durations of different calls in ns.
#[derive(Debug, Clone, Copy)]
struct CallPriceTable {
    call: f64,
    other_call: f64,
    /// Duration of sending a datagram to the own address: a call with a softirq inside.
    loopback: f64,
    /// Duration of a task switch together with two calls without a socket.
    switch: f64,
}

impl CallPriceTable {
    /// Measures the durations of all kinds of calls on CPU 0.
    fn measure() -> Self {
        let mut first = CpuSet::new();
        first.set(0).expect("a CPU");
        thread::scope(|scope| {
            scope
                .spawn(|| {
                    sched_setaffinity(Pid::from_raw(0), &first).expect("an affinity");
                    let socket = socket();
                    let to = socket.local_addr().expect("an address");
                    let call = least(|| _ = std::hint::black_box(look(&socket)));
                    let other_call = least(|| _ = std::hint::black_box(getppid()));
                    // The socket's buffer fills up, and the datagrams are dropped when they arrive.
                    let loopback = least(|| _ = socket.send_to(&[0; 8], to));
                    Self { call, other_call, loopback, switch: Self::switch(&first) }
                })
                .join()
                .expect("measured")
        })
    }

    /// Returns half the duration of a round in which two threads wake each other: two switches, and two calls of each
    /// thread.
    fn switch(only: &CpuSet) -> f64 {
        let stop = AtomicBool::new(false);
        let waker = thread::current();
        thread::scope(|scope| {
            let other = scope.spawn(|| {
                sched_setaffinity(Pid::from_raw(0), only).expect("an affinity");
                while !stop.load(Ordering::Relaxed) {
                    thread::park();
                    waker.unpark();
                }
            });
            let least = least(|| {
                other.thread().unpark();
                thread::park();
            });
            stop.store(true, Ordering::Relaxed);
            other.thread().unpark();
            least / 2.0
        })
    }
}

/// Limit in ns for the time that timing adds to a call. It is far more than any machine needs, so it catches gross
/// errors only.
const MOST_NS: f64 = 20_000.0;

#[test]
fn timing_overhead_per_call_softirq_and_task_switch_is_bounded() {
    let name = "timing_overhead_per_call_softirq_and_task_switch_is_bounded";
    let unit = if is_exact() { "instructions" } else { "ns" };
    with_each_method(name, |cost| {
        let bare = CallPriceTable::measure();
        cost.attach().expect("it attaches");
        let timed = CallPriceTable::measure();
        let method = cost.method().expect("events are timed");
        let call = timed.call - bare.call;
        let other = timed.other_call - bare.other_call;
        let softirq = timed.loopback - bare.loopback - call;
        let switch = timed.switch - bare.switch - 2.0 * other;
        println!(
            "{method:?}: timing adds {call:.0} {unit} to a call that receives ({:.0} without), {other:.0} to a call without a socket, \
             {softirq:.0} to a softirq and {switch:.0} to a task switch",
            bare.call
        );
        for (what, added) in [("call", call), ("other call", other), ("softirq", softirq), ("switch", switch)]
        {
            assert!(added < MOST_NS, "{method:?}, {what}: {added} ns, {bare:?}, {timed:?}");
        }
    });
}
