//! Tests the BPF programs that measure networking's CPU time, on the running kernel with known loads. Needs root.

use std::collections::{HashMap, HashSet};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::os::fd::AsRawFd;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use libbpf_rs::query::ProgInfoIter;
use millrace_cost::kernel::{
    Config, CostPrograms, CpuSums, KernelEvent, MissingPoint, SocketPair, StackTransport, TimingMethod, WAYS,
};
use millrace_kernel::programs::{ProgramFunction, ProgramFunctions, Statistics};
use millrace_testkit::{wait_for, wait_until};
use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::socket::{AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, send, socket};
use nix::time::{ClockId, clock_gettime};

const CALLS: u64 = 100;
const BOUND: Duration = millrace_testkit::BOUND;

/// Lock that runs one test at a time, since each counts the calls of the whole process.
static ALONE: Mutex<()> = Mutex::new(());

fn alone(test: &str) -> Option<MutexGuard<'static, ()>> {
    if !nix::unistd::geteuid().is_root() {
        println!("SKIP {test}: needs root");
        return None;
    }
    Some(ALONE.lock().unwrap_or_else(PoisonError::into_inner))
}

/// Runs a test with each method of timing calls (kernel functions, system calls) that the kernel allows.
fn with_each_method(test: &str, mut run: impl FnMut(&mut CostPrograms, &[MissingPoint])) {
    for method in [TimingMethod::Functions, TimingMethod::SystemCalls] {
        match CostPrograms::load(&Config { method: Some(method), ..Config::default() }) {
            Ok(mut cost) => {
                let missing = cost.attach().expect("it attaches");
                run(&mut cost, &missing);
            }
            Err(error) if method == TimingMethod::Functions => {
                println!("SKIP {test} with functions: {error}")
            }
            Err(error) => panic!("{error}"),
        }
    }
}

fn attached(config: &Config) -> CostPrograms {
    let mut cost = CostPrograms::load(config).expect("it loads");
    if config.events {
        cost.attach().expect("it attaches");
    }
    cost
}

/// Returns this process's number of calls that send, and that receive.
fn calls(cost: &mut CostPrograms) -> (u64, u64) {
    let sums = own(cost);
    (sums(KernelEvent::Send).1, sums(KernelEvent::Receive).1)
}

/// Returns this process's number of calls on AF_UNIX and netlink sockets.
fn local_calls(cost: &mut CostPrograms) -> u64 {
    own(cost)(KernelEvent::Local).1
}

/// Returns a function that gives this process's nanoseconds and calls for a kind of kernel work, such as sends.
fn own(cost: &mut CostPrograms) -> impl Fn(KernelEvent) -> (u64, u64) + use<> {
    // Times and calls are added to the sums of a process when its thread leaves the CPU.
    let before = left_cpu();
    wait_until("this thread to leave its CPU", left_cpu, |now| *now > before);
    // exact: the count of this thread's calls is complete, because it is updated when the thread leaves its CPU
    let mut processes = cost.processes().expect("processes");
    processes.retain(|process| process.id.pid == std::process::id());
    move |event| {
        processes
            .iter()
            .fold((0, 0), |sum, process| (sum.0 + process.ns(event), sum.1 + process.calls(event)))
    }
}

/// Returns how often this thread has left its CPU.
fn left_cpu() -> i64 {
    let usage = getrusage(UsageWho::RUSAGE_THREAD).expect("usage");
    usage.voluntary_context_switches() + usage.involuntary_context_switches()
}

/// Returns the sum of a figure of each CPU over all CPUs.
fn total(cost: &CostPrograms, of: impl Fn(&CpuSums) -> u64) -> u64 {
    // exact: these sums only grow; callers repeat the read until a sum is as expected, or check that it is still 0
    cost.totals().iter().map(of).sum()
}

fn cpus(cost: &CostPrograms) -> usize {
    cost.totals().len() // exact: the number of CPUs is fixed when the BPF programs are loaded
}

#[test]
fn every_send_and_receive_call_is_counted_exactly() {
    let test = "every_send_and_receive_call_is_counted_exactly";
    let Some(_alone) = alone(test) else { return };
    with_each_method(test, |cost, missing| {
        let sockets = SocketPair::new().expect("sockets");
        for way in WAYS {
            let missing = missing.iter().find(|missing| missing.what == way.name);
            if cost.method() == Some(TimingMethod::SystemCalls) && way.name.starts_with("aio ") {
                // Linux AIO can be timed only at kernel functions. The reported reason names its system call.
                assert!(missing.is_some_and(|it| it.reason.contains("io_submit")), "{missing:?}");
                continue;
            }
            if let Some(missing) = missing {
                // The kernel does not support this system call or request at all, so its trial call failed.
                assert!(missing.reason.contains("a trial call failed"), "{missing:?}");
                println!("SKIP {test}, {}: {}", way.name, missing.reason);
                continue;
            }
            let before = (calls(cost), local_calls(cost));
            for _ in 0..CALLS {
                sockets.call(&way).expect("a call");
            }
            // Each send has a matching receive and the reverse. attach() has already checked that each call is counted.
            assert_eq!(local_calls(cost) - before.1, 2 * CALLS, "{}", way.name);
            assert_eq!(calls(cost), before.0, "AF_UNIX does not count as networking: {}", way.name);
        }
    });
}

/// Calls on a netlink socket count as local, as those on AF_UNIX sockets do.
#[test]
fn netlink_calls_count_as_calls_on_local_sockets() {
    let test = "netlink_calls_count_as_calls_on_local_sockets";
    let Some(_alone) = alone(test) else { return };
    with_each_method(test, |cost, _| {
        let netlink =
            socket(AddressFamily::Netlink, SockType::Raw, SockFlag::empty(), SockProtocol::NetlinkRoute);
        let netlink = netlink.expect("a netlink socket");
        let before = (calls(cost), local_calls(cost));
        for _ in 0..CALLS {
            // The kernel does not answer a netlink message that is too short.
            let sent = send(netlink.as_raw_fd(), &[0; 4], MsgFlags::empty());
            assert_eq!(sent, Ok(4));
        }
        assert_eq!((calls(cost), local_calls(cost) - before.1), (before.0, CALLS));
    });
}

/// Returns how often the observer's program `name` has run since it was loaded.
fn runs(cost: &CostPrograms, statistics: &Statistics, name: &str) -> u64 {
    let own = cost.program_ids();
    let programs = statistics.read();
    programs
        .iter()
        .find(|program| own.contains(&program.id) && program.name == name)
        .expect("the program is loaded")
        .runs
}

/// The time of an io_uring request ends before the end of the system call, which may continue with other requests.
#[test]
fn io_uring_request_timing_ends_at_completion_or_queueing() {
    let test = "io_uring_request_timing_ends_at_completion_or_queueing";
    let Some(_alone) = alone(test) else { return };
    let statistics = Statistics::enable().expect("statistics");
    let mut cost =
        CostPrograms::load(&Config { method: Some(TimingMethod::SystemCalls), ..Config::default() })
            .expect("it loads");
    cost.attach().expect("it attaches");
    let sockets = SocketPair::new().expect("sockets");
    for (program, to_worker) in [("cost_completed", false), ("cost_queued", true)] {
        let before = runs(&cost, &statistics, program);
        for _ in 0..CALLS {
            let done = match to_worker {
                true => sockets.send_by_worker(),
                false => {
                    let way = WAYS.iter().find(|way| way.name == "io_uring send").expect("a way");
                    sockets.call(way).map(|()| 8)
                }
            };
            match done {
                Ok(bytes) => assert_eq!(bytes, 8),
                Err(error) => return println!("SKIP {test}: {error}"),
            }
        }
        assert!(runs(&cost, &statistics, program) >= before + CALLS, "{program}");
    }
}

/// Returns this thread's time on CPU.
fn on_cpu() -> Duration {
    clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).expect("a clock").into()
}

/// A call that began before a detach must not be continued after the next attach.
#[test]
fn call_that_began_before_detach_is_not_counted() {
    let Some(_alone) = alone("call_that_began_before_detach_is_not_counted") else { return };
    with_each_method("call_that_began_before_detach_is_not_counted", |cost, _| {
        let near = UdpSocket::bind("127.0.0.1:0").expect("a socket");
        let far = UdpSocket::bind("127.0.0.1:0").expect("a socket");
        let to = far.local_addr().expect("an address");
        let receives = |cost: &CostPrograms| total(cost, |totals| totals.calls(KernelEvent::Receive));
        let has_received = AtomicBool::new(false);
        let before = own(cost)(KernelEvent::Receive);
        let attached = thread::scope(|scope| {
            let waiting = scope.spawn(|| {
                far.recv(&mut [0; 16]).expect("received");
                has_received.store(true, Ordering::Release);
                // Run for 200 ms in user mode. If the programs still counted the call as running, this time would be
                // added to it.
                let start = on_cpu();
                while on_cpu() - start < Duration::from_millis(200) {}
            });
            wait_until("the call", || own(cost)(KernelEvent::Receive).1, |calls| *calls > before.1);
            cost.detach();
            // A BPF program that was running on another CPU during detach() may still add to the sums.
            let paused = wait_for("the end of the last programs", || {
                let counted = receives(cost);
                // exact: this pause between two reads of the call count is far longer than any run of a BPF program
                thread::sleep(Duration::from_millis(20));
                (receives(cost) == counted).then_some(counted)
            });
            near.send_to(b"millrace", to).expect("sent");
            wait_for("the datagram", || has_received.load(Ordering::Acquire));
            assert_eq!(receives(cost), paused, "detached programs count no calls");
            let attached = own(cost)(KernelEvent::Receive);
            cost.attach().expect("it attaches again");
            waiting.join().expect("it ends");
            attached
        });
        let after = own(cost)(KernelEvent::Receive);
        assert!(after.0 - attached.0 < 50_000_000, "{} ns", after.0 - attached.0);
        near.send_to(b"millrace", to).expect("sent");
        far.recv(&mut [0; 16]).expect("received");
        assert!(own(cost)(KernelEvent::Receive).1 > after.1, "it counts again");
    });
}

#[test]
fn packets_are_counted_by_protocol() {
    let Some(_alone) = alone("packets_are_counted_by_protocol") else { return };
    with_each_method("packets_are_counted_by_protocol", |cost, _| {
        for host in ["127.0.0.1", "::1"] {
            let near = UdpSocket::bind((host, 0)).expect("a socket");
            let far = UdpSocket::bind((host, 0)).expect("a socket");
            let to = far.local_addr().expect("an address");
            let before = calls(cost);
            for _ in 0..CALLS {
                near.send_to(b"millrace", to).expect("sent");
                far.recv(&mut [0; 16]).expect("received");
            }
            let after = calls(cost);
            assert_eq!((after.0 - before.0, after.1 - before.1), (CALLS, CALLS), "UDP, {host}");

            let listener = TcpListener::bind((host, 0)).expect("a socket");
            let mut near = TcpStream::connect(listener.local_addr().expect("an address")).expect("connected");
            let mut far = listener.accept().expect("accepted").0;
            let before = calls(cost);
            for _ in 0..CALLS {
                near.write_all(b"millrace").expect("sent");
                far.read_exact(&mut [0; 8]).expect("received");
            }
            let after = calls(cost);
            assert_eq!((after.0 - before.0, after.1 - before.1), (CALLS, CALLS), "TCP, {host}");
        }
    });
}

/// Reads and writes of files do not count as socket calls.
#[test]
fn file_reads_do_not_count_as_networking() {
    let Some(_alone) = alone("file_reads_do_not_count_as_networking") else { return };
    with_each_method("file_reads_do_not_count_as_networking", |cost, _| {
        let before = calls(cost);
        let mut null = std::fs::OpenOptions::new().read(true).write(true).open("/dev/null").expect("a file");
        for _ in 0..CALLS {
            null.write_all(b"millrace").expect("written");
            assert_eq!(null.read(&mut [0; 8]).expect("read"), 0);
        }
        assert_eq!(calls(cost), before);
    });
}

/// A call that blocks counts only with its time on a CPU.
#[test]
fn time_blocked_in_a_call_is_not_counted() {
    const WAIT: Duration = Duration::from_millis(400);
    let Some(_alone) = alone("time_blocked_in_a_call_is_not_counted") else { return };
    with_each_method("time_blocked_in_a_call_is_not_counted", |cost, _| {
        let near = UdpSocket::bind("127.0.0.1:0").expect("a socket");
        let far = UdpSocket::bind("127.0.0.1:0").expect("a socket");
        let to = far.local_addr().expect("an address");
        let before = own(cost)(KernelEvent::Receive);
        thread::scope(|scope| {
            scope.spawn(|| far.recv(&mut [0; 16]).expect("received"));
            wait_until("the call", || own(cost)(KernelEvent::Receive).1, |calls| *calls > before.1);
            // exact: the receive call blocks for this time, which must not count as CPU time of the call
            thread::sleep(WAIT);
            near.send_to(b"millrace", to).expect("sent");
        });
        let after = own(cost)(KernelEvent::Receive);
        assert_eq!(after.1 - before.1, 1);
        let ns = after.0 - before.0;
        assert!(ns > 0 && u128::from(ns) < WAIT.as_nanos() / 4, "{ns} ns");
    });
}

/// Over loopback, the receiving softirq interrupts the sending call. No nanosecond may count for both.
#[test]
fn event_times_of_a_cpu_never_exceed_elapsed_time() {
    let Some(_alone) = alone("event_times_of_a_cpu_never_exceed_elapsed_time") else { return };
    with_each_method("event_times_of_a_cpu_never_exceed_elapsed_time", |cost, _| {
        for cpu in 0..cpus(cost) {
            // Sampling fails for possible CPUs that are not online.
            let _ = cost.sample(u32::try_from(cpu).expect("a number"), 1000);
        }
        let sum = |cost: &CostPrograms| -> Vec<u64> {
            // exact: these CPU times may grow; the test compares their growth with the elapsed time
            let totals = cost.totals();
            totals.iter().map(|totals| KernelEvent::ALL.iter().map(|event| totals.ns(*event)).sum()).collect()
        };
        let before = (Instant::now(), sum(cost), own(cost)(KernelEvent::Send).0);
        let socket = UdpSocket::bind("127.0.0.1:0").expect("a socket");
        let to = socket.local_addr().expect("an address");
        // Measure time on a CPU, so that other load does not matter.
        let start = on_cpu();
        while on_cpu() - start < Duration::from_millis(300) {
            socket.send_to(&[0; 1000], to).expect("sent");
        }
        let sent = own(cost)(KernelEvent::Send).0 - before.2;
        let after = sum(cost);
        let elapsed = u64::try_from(before.0.elapsed().as_nanos()).expect("a short time");
        assert!(sent > 0 && sent < elapsed, "{sent} of {elapsed}");
        let networking: Vec<u64> =
            after.iter().zip(&before.1).map(|(after, before)| after - before).collect();
        assert!(networking.iter().all(|ns| *ns <= elapsed), "{networking:?} of {elapsed}");
        wait_until("softirqs", || total(cost, |totals| totals.ns(KernelEvent::NetRx)), |ns| *ns > 0);
    });
}

#[test]
fn io_uring_worker_time_is_an_event() {
    let test = "io_uring_worker_time_is_an_event";
    let Some(_alone) = alone(test) else { return };
    with_each_method(test, |cost, _| {
        let sockets = SocketPair::new().expect("sockets");
        match sockets.send_by_worker() {
            Ok(bytes) => assert_eq!(bytes, 8),
            Err(error) => return println!("SKIP {test}: {error}"),
        }
        wait_until("time of a worker", || own(cost)(KernelEvent::IoUring).0, |ns| *ns > 0);
    });
}

/// The kernel executes io_uring's `splice` in worker threads. Programs on functions see its calls, those on system
/// calls do not.
#[test]
fn io_uring_worker_splice_is_counted_only_by_function_probes() {
    let test = "io_uring_worker_splice_is_counted_only_by_function_probes";
    let Some(_alone) = alone(test) else { return };
    with_each_method(test, |cost, _| {
        let sockets = SocketPair::new().expect("sockets");
        let before = local_calls(cost);
        for _ in 0..CALLS {
            match sockets.splice_by_worker() {
                Ok(bytes) => assert_eq!(bytes, 8),
                Err(error) => return println!("SKIP {test}: {error}"),
            }
        }
        let want = if cost.method() == Some(TimingMethod::Functions) { 2 * CALLS } else { 0 };
        // The last calls are added to the process's sums only when io_uring's worker thread leaves its CPU.
        let counted = || (local_calls(cost) - before, own(cost)(KernelEvent::IoUring).0);
        wait_until("all calls", counted, |(moved, ns)| *moved == want && *ns > 0);
    });
}

/// Returns the name of the last symbol at or before an address, without checking that the address is inside the
/// symbol's function.
fn name_of(symbols: &[(u64, String)], address: u64) -> &str {
    let at = symbols.partition_point(|(start, _)| *start <= address);
    at.checked_sub(1).map_or("", |at| &symbols[at].1)
}

fn symbols() -> Vec<(u64, String)> {
    // exact: callers look up only kernel symbols that were in `/proc/kallsyms` before this read
    let text = std::fs::read_to_string("/proc/kallsyms").expect("kallsyms");
    let mut symbols: Vec<_> = text
        .lines()
        .filter_map(|line| {
            let mut fields = line.split_whitespace();
            let address = u64::from_str_radix(fields.next()?, 16).ok()?;
            Some((address, fields.nth(1)?.to_owned()))
        })
        .collect();
    symbols.sort();
    symbols
}

fn flood(until: impl Fn() -> bool) {
    let socket = UdpSocket::bind("127.0.0.1:0").expect("a socket");
    let to = socket.local_addr().expect("an address");
    let deadline = Instant::now() + BOUND;
    while !until() && Instant::now() < deadline {
        for _ in 0..100 {
            socket.send_to(&[0; 1000], to).expect("sent");
        }
    }
}

fn sample_all(cost: &mut CostPrograms, hz: u32) {
    let sampled = (0..cpus(cost)).filter(|cpu| cost.sample(*cpu as u32, hz).is_ok()).count();
    assert!(sampled > 0, "no CPU could be sampled");
}

#[test]
fn double_buffer_and_ring_buffer_deliver_all_sampled_stacks() {
    let Some(_alone) = alone("double_buffer_and_ring_buffer_deliver_all_sampled_stacks") else { return };
    let symbols = symbols();
    for transport in [StackTransport::DoubleBuffer, StackTransport::RingBuffer] {
        // The stack buffer has room for all stacks, even if this thread reads them late.
        let mut cost = attached(&Config { transport, buffer_bytes: 1 << 22, ..Config::default() });
        sample_all(&mut cost, 1000);
        let samples = |cost: &CostPrograms| total(cost, |totals| totals.samples);
        let own = std::process::id();
        let mut sends = 0;
        let mut right = 0;
        let mut in_calls = 0;
        let deadline = Instant::now() + BOUND;
        while right < 50 && Instant::now() < deadline {
            let before = samples(&cost);
            flood(|| samples(&cost) > before + 50);
            cost.drain(|record| {
                if record.pid != own || record.event != Some(KernelEvent::Send) {
                    return;
                }
                sends += 1;
                let within = |parts: &[&str]| {
                    let of_call =
                        |frame: &u64| parts.iter().any(|part| name_of(&symbols, *frame).contains(part));
                    usize::from(record.kernel.iter().any(of_call))
                };
                right += within(&["sys_sendto"]);
                in_calls += within(&["sys_sendto", "syscall", "el0_svc"]);
            });
        }
        assert!(right >= 50, "{right} of {sends}, {transport:?}");
        // Samples within the system call whose stacks lack `sys_sendto` were taken in the kernel's code that calls BPF
        // programs, or in programs of other observers.
        assert!(in_calls * 2 >= sends, "{in_calls} of {sends}, {transport:?}");
        assert_eq!(total(&cost, |totals| totals.lost_samples), 0, "{transport:?}");
    }
}

#[test]
fn full_stack_buffer_counts_lost_samples() {
    let Some(_alone) = alone("full_stack_buffer_counts_lost_samples") else { return };
    for transport in [StackTransport::DoubleBuffer, StackTransport::RingBuffer] {
        let buffer_bytes = 1 << 13;
        let mut cost = attached(&Config { events: false, transport, buffer_bytes, ..Config::default() });
        sample_all(&mut cost, 10_000);
        let lost = |cost: &CostPrograms| total(cost, |totals| totals.lost_samples);
        flood(|| lost(&cost) > 100);
        assert!(lost(&cost) > 100, "{transport:?}");
        let mut bytes = vec![0; cpus(&cost)];
        cost.drain(|record| {
            assert!(record.kernel.iter().all(|frame| *frame >= 1 << 63), "{record:?}");
            bytes[record.cpu as usize] += 40 + 8 * (record.kernel.len() + record.user.len());
        });
        assert!(bytes.iter().any(|bytes| *bytes > 0));
        if transport == StackTransport::DoubleBuffer {
            assert!(bytes.iter().all(|bytes| *bytes <= buffer_bytes as usize), "{bytes:?}");
        }
    }
}

#[test]
fn watched_process_has_user_mode_stacks() {
    let Some(_alone) = alone("watched_process_has_user_mode_stacks") else { return };
    let mut cost = attached(&Config { watch: true, ..Config::default() });
    let own = std::process::id();
    cost.watch(own, true).expect("watched");
    sample_all(&mut cost, 1000);
    let deadline = Instant::now() + BOUND;
    let mut in_user = 0;
    let mut others = 0;
    while in_user < 20 && Instant::now() < deadline {
        std::hint::black_box((0..1_000_000_u64).fold(0, |sum, n| sum ^ std::hint::black_box(n)));
        cost.drain(|record| match record.watched {
            true => {
                in_user +=
                    usize::from(record.pid == own && record.kernel.is_empty() && !record.user.is_empty())
            }
            false => others += usize::from(!record.user.is_empty()),
        });
    }
    assert!(in_user >= 20, "{in_user}");
    assert_eq!(others, 0);
    cost.watch(own, false).expect("no longer watched");
}

#[test]
fn observer_programs_have_run_times() {
    let Some(_alone) = alone("observer_programs_have_run_times") else { return };
    let statistics = Statistics::enable().expect("statistics");
    let cost = attached(&Config::default());
    let own: HashSet<u32> = cost.program_ids().into_iter().collect();
    assert!(own.len() >= 4, "{own:?}");
    let ran = |name: &str| {
        let programs = statistics.read();
        let program = programs.iter().find(|program| own.contains(&program.id) && program.name == name);
        let program = program.expect("the program").clone();
        assert_eq!(program.kind, "tracing");
        program.run_ns > 0 && program.runs > 0
    };
    wait_for("a run", || ran("cost_sched_swit"));
}

const VICTIM: &str = "MILLRACE_COST_VICTIM";

/// Runs an observer in a process that the next test kills. Checks nothing itself.
#[test]
fn helper_process_of_the_kill_test_runs_an_observer() {
    if std::env::var_os(VICTIM).is_none() {
        return;
    }
    let mut cost = attached(&Config::default());
    sample_all(&mut cost, 100);
    println!("\nattached {:?}", cost.program_ids());
    thread::sleep(10 * BOUND); // exact: another test kills this process before this pause ends
}

#[test]
fn killed_observer_leaves_no_bpf_programs_loaded() {
    let Some(_alone) = alone("killed_observer_leaves_no_bpf_programs_loaded") else { return };
    let mut victim = Command::new(std::env::current_exe().expect("this test"))
        .args(["--exact", "helper_process_of_the_kill_test_runs_an_observer", "--nocapture"])
        .env(VICTIM, "1")
        .stdout(Stdio::piped())
        .spawn()
        .expect("it starts");
    let lines = BufReader::new(victim.stdout.take().expect("its output")).lines();
    let attached =
        lines.map_while(Result::ok).find(|line| line.starts_with("attached")).expect("it attaches");
    let ids: HashSet<u32> =
        attached.split(|c: char| !c.is_ascii_digit()).filter_map(|id| id.parse().ok()).collect();
    let left = || ProgInfoIter::default().filter(|program| ids.contains(&program.id)).count();
    assert!(!ids.is_empty() && left() == ids.len(), "{attached}");
    victim.kill().expect("killed");
    victim.wait().expect("gone");
    // The kernel frees programs after an RCU grace period.
    wait_until("the end of its programs", left, |left| *left == 0);
}

/// Compares the functions' addresses with kallsyms, which has no lengths.
#[test]
fn bpf_program_addresses_match_kallsyms() {
    let Some(_alone) = alone("bpf_program_addresses_match_kallsyms") else { return };
    let mut functions = ProgramFunctions::default();
    functions.refresh().expect("a list");
    let cost = attached(&Config::default());
    assert!(functions.refresh().expect("a list"), "the list has the new programs");
    // Other processes load and unload programs meanwhile, so the list of loaded programs and kallsyms may differ for a
    // while.
    let wrong = || {
        let mut functions = ProgramFunctions::default();
        functions.refresh().expect("a list");
        let of_kernel: HashMap<u64, String> = symbols().into_iter().collect();
        let is_right = |function: &ProgramFunction| {
            // kallsyms has the name bpf_prog_TAG_NAME.
            let name =
                of_kernel.get(&function.start).and_then(|name| name.strip_prefix("bpf_prog_")?.get(16..));
            let name = name.map(|name| name.strip_prefix('_').unwrap_or(name));
            function.bytes > 0 && name.is_some_and(|name| name.is_empty() || name == function.name)
        };
        functions.iter().filter(|function| !is_right(function)).cloned().collect::<Vec<_>>()
    };
    wait_until("lists that agree", wrong, Vec::is_empty);
    let named = |name: &str| functions.iter().filter(|function| function.name == name).count();
    // The observer's list of BPF functions has whole names, while the kernel's program names are cut to 15 characters.
    assert!(named("cost_sched_switch") > 0 && named("cost_softirq_entry") > 0);
    drop(cost);
}
