//! The cost programs on the running kernel. Needs root.

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

/// One test at a time, since each counts what the whole process does.
static ALONE: Mutex<()> = Mutex::new(());

fn alone(test: &str) -> Option<MutexGuard<'static, ()>> {
    if !nix::unistd::geteuid().is_root() {
        println!("SKIP {test}: needs root");
        return None;
    }
    Some(ALONE.lock().unwrap_or_else(PoisonError::into_inner))
}

/// Runs a test with each method that the kernel allows.
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

/// Calls that send and that receive, of this process.
fn calls(cost: &mut CostPrograms) -> (u64, u64) {
    let sums = own(cost);
    (sums(KernelEvent::Send).1, sums(KernelEvent::Receive).1)
}

/// Calls of this process on AF_UNIX and netlink sockets.
fn local_calls(cost: &mut CostPrograms) -> u64 {
    own(cost)(KernelEvent::Local).1
}

/// Nanoseconds and calls of this process by event.
fn own(cost: &mut CostPrograms) -> impl Fn(KernelEvent) -> (u64, u64) + use<> {
    // Sums reach a process when its thread leaves the CPU.
    let before = left_cpu();
    wait_until("this thread to leave its CPU", left_cpu, |now| *now > before);
    let mut processes = cost.processes().expect("processes"); // exact: this thread has left its CPU
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

/// Returns a sum over the whole machine.
fn total(cost: &CostPrograms, of: impl Fn(&CpuSums) -> u64) -> u64 {
    cost.totals().iter().map(of).sum() // exact: callers wait for it, or know that it stands still
}

fn cpus(cost: &CostPrograms) -> usize {
    cost.totals().len() // exact: fixed at start-up
}

#[test]
fn every_way_to_send_and_to_receive_counts_exactly() {
    let test = "every_way_to_send_and_to_receive_counts_exactly";
    let Some(_alone) = alone(test) else { return };
    with_each_method(test, |cost, missing| {
        let sockets = SocketPair::new().expect("sockets");
        for way in WAYS {
            let missing = missing.iter().find(|missing| missing.what == way.name);
            if cost.method() == Some(TimingMethod::SystemCalls) && way.name.starts_with("aio ") {
                // Known to be seen at functions alone, and said.
                assert!(missing.is_some_and(|it| it.reason.contains("io_submit")), "{missing:?}");
                continue;
            }
            if let Some(missing) = missing {
                // The kernel lacks this way altogether.
                assert!(missing.reason.contains("a trial call failed"), "{missing:?}");
                println!("SKIP {test}, {}: {}", way.name, missing.reason);
                continue;
            }
            let before = (calls(cost), local_calls(cost));
            for _ in 0..CALLS {
                sockets.call(&way).expect("a call");
            }
            // Each call is followed or preceded by its opposite. That it went the right way is seen when it is
            // attached.
            assert_eq!(local_calls(cost) - before.1, 2 * CALLS, "{}", way.name);
            assert_eq!(calls(cost), before.0, "AF_UNIX is no networking: {}", way.name);
        }
    });
}

/// Netlink reaches no network either; the same calls on a network's socket count as what they are.
#[test]
fn family_of_the_socket_decides() {
    let test = "family_of_the_socket_decides";
    let Some(_alone) = alone(test) else { return };
    with_each_method(test, |cost, _| {
        let netlink =
            socket(AddressFamily::Netlink, SockType::Raw, SockFlag::empty(), SockProtocol::NetlinkRoute);
        let netlink = netlink.expect("a netlink socket");
        let before = (calls(cost), local_calls(cost));
        for _ in 0..CALLS {
            // The kernel answers nothing to a message that is too short.
            let sent = send(netlink.as_raw_fd(), &[0; 4], MsgFlags::empty());
            assert_eq!(sent, Ok(4));
        }
        assert_eq!((calls(cost), local_calls(cost) - before.1), (before.0, CALLS));
    });
}

/// Returns how often a program of the observer ran so far.
fn runs(cost: &CostPrograms, statistics: &Statistics, name: &str) -> u64 {
    let own = cost.program_ids();
    let programs = statistics.read();
    programs
        .iter()
        .find(|program| own.contains(&program.id) && program.name == name)
        .expect("it is there")
        .runs
}

/// And not only at the end of the system call, which may go on to something else.
#[test]
fn requests_of_io_uring_end_when_they_are_done() {
    let test = "requests_of_io_uring_end_when_they_are_done";
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

/// Attached again, the programs know nothing of calls that began before.
#[test]
fn a_call_across_a_pause_is_not_counted() {
    let Some(_alone) = alone("a_call_across_a_pause_is_not_counted") else { return };
    with_each_method("a_call_across_a_pause_is_not_counted", |cost, _| {
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
                // In user mode, 200 ms on a CPU: this thread's word must not be open.
                let start = on_cpu();
                while on_cpu() - start < Duration::from_millis(200) {}
            });
            wait_until("the call", || own(cost)(KernelEvent::Receive).1, |calls| *calls > before.1);
            cost.detach();
            // A program that another CPU was running then may still count.
            let paused = wait_for("the end of the last programs", || {
                let counted = receives(cost);
                thread::sleep(Duration::from_millis(20)); // exact: far longer than a program runs
                (receives(cost) == counted).then_some(counted)
            });
            near.send_to(b"millrace", to).expect("sent");
            wait_for("the datagram", || has_received.load(Ordering::Acquire));
            assert_eq!(receives(cost), paused, "detached, nothing is counted");
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

/// Neither files nor other calls are networking.
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

/// The call lasts for as long as it blocks, and costs only the time on CPU.
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
            thread::sleep(WAIT); // exact: how long the call blocks, which is under test
            near.send_to(b"millrace", to).expect("sent");
        });
        let after = own(cost)(KernelEvent::Receive);
        assert_eq!(after.1 - before.1, 1);
        let ns = after.0 - before.0;
        assert!(ns > 0 && u128::from(ns) < WAIT.as_nanos() / 4, "{ns} ns");
    });
}

/// Over loopback the receiving softirq interrupts the send: no nanosecond counts twice.
#[test]
fn events_never_take_more_than_a_cpu_has() {
    let Some(_alone) = alone("events_never_take_more_than_a_cpu_has") else { return };
    with_each_method("events_never_take_more_than_a_cpu_has", |cost, _| {
        for cpu in 0..cpus(cost) {
            // Possible CPUs need not be online.
            let _ = cost.sample(u32::try_from(cpu).expect("a number"), 1000);
        }
        let sum = |cost: &CostPrograms| -> Vec<u64> {
            let totals = cost.totals(); // exact: between two readings of the clock
            totals.iter().map(|totals| KernelEvent::ALL.iter().map(|event| totals.ns(*event)).sum()).collect()
        };
        let before = (Instant::now(), sum(cost), own(cost)(KernelEvent::Send).0);
        let socket = UdpSocket::bind("127.0.0.1:0").expect("a socket");
        let to = socket.local_addr().expect("an address");
        // On a CPU, however busy that is.
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
fn workers_of_io_uring_are_an_event() {
    let test = "workers_of_io_uring_are_an_event";
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

/// The kernel leaves `splice` to them. Functions are timed there too, system calls are not.
#[test]
fn workers_of_io_uring_splice() {
    let test = "workers_of_io_uring_splice";
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
        // The last sums come when the worker leaves its CPU.
        let counted = || (local_calls(cost) - before, own(cost)(KernelEvent::IoUring).0);
        wait_until("all calls", counted, |(moved, ns)| *moved == want && *ns > 0);
    });
}

/// Function names by address, as far as these tests need them.
fn name_of(symbols: &[(u64, String)], address: u64) -> &str {
    let at = symbols.partition_point(|(start, _)| *start <= address);
    at.checked_sub(1).map_or("", |at| &symbols[at].1)
}

fn symbols() -> Vec<(u64, String)> {
    let text = std::fs::read_to_string("/proc/kallsyms").expect("kallsyms"); // exact: its caller looks for symbols from before
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
fn both_stack_transports_deliver_all_stacks() {
    let Some(_alone) = alone("both_stack_transports_deliver_all_stacks") else { return };
    let symbols = symbols();
    for transport in [StackTransport::DoubleBuffer, StackTransport::RingBuffer] {
        // Room for all of them, whenever this thread gets to read them.
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
        // The others fall in what leads to the programs, and in those of other observers; few on the very edges.
        assert!(in_calls * 2 >= sends, "{in_calls} of {sends}, {transport:?}");
        assert_eq!(total(&cost, |totals| totals.lost_samples), 0, "{transport:?}");
    }
}

#[test]
fn a_full_buffer_counts_what_it_loses() {
    let Some(_alone) = alone("a_full_buffer_counts_what_it_loses") else { return };
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
fn a_watched_process_shows_its_own_functions() {
    let Some(_alone) = alone("a_watched_process_shows_its_own_functions") else { return };
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
fn programs_have_run_times() {
    let Some(_alone) = alone("programs_have_run_times") else { return };
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

/// A process for the next test to kill; it tests nothing itself.
#[test]
fn process_that_the_next_test_kills() {
    if std::env::var_os(VICTIM).is_none() {
        return;
    }
    let mut cost = attached(&Config::default());
    sample_all(&mut cost, 100);
    println!("\nattached {:?}", cost.program_ids());
    thread::sleep(10 * BOUND); // exact: it is killed before
}

#[test]
fn killed_observer_leaves_nothing_behind() {
    let Some(_alone) = alone("killed_observer_leaves_nothing_behind") else { return };
    let mut victim = Command::new(std::env::current_exe().expect("this test"))
        .args(["--exact", "process_that_the_next_test_kills", "--nocapture"])
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
    // Programs go after a grace period.
    wait_until("the end of its programs", left, |left| *left == 0);
}

/// The kernel's own list, which has no lengths, agrees.
#[test]
fn functions_of_programs_are_where_the_kernel_has_them() {
    let Some(_alone) = alone("functions_of_programs_are_where_the_kernel_has_them") else { return };
    let mut functions = ProgramFunctions::default();
    functions.refresh().expect("a list");
    let cost = attached(&Config::default());
    assert!(functions.refresh().expect("a list"), "programs came");
    // Others load programs and end meanwhile, and those of one object may get the same places twice: once nobody does,
    // the lists agree.
    let wrong = || {
        let mut functions = ProgramFunctions::default();
        functions.refresh().expect("a list");
        let of_kernel: HashMap<u64, String> = symbols().into_iter().collect();
        let is_right = |function: &ProgramFunction| {
            // One address may have several names: bpf_prog_TAG_NAME is the program's.
            let name =
                of_kernel.get(&function.start).and_then(|name| name.strip_prefix("bpf_prog_")?.get(16..));
            let name = name.map(|name| name.strip_prefix('_').unwrap_or(name));
            function.bytes > 0 && name.is_some_and(|name| name.is_empty() || name == function.name)
        };
        functions.iter().filter(|function| !is_right(function)).cloned().collect::<Vec<_>>()
    };
    wait_until("lists that agree", wrong, Vec::is_empty);
    let named = |name: &str| functions.iter().filter(|function| function.name == name).count();
    // In full, and functions that are not programs too.
    assert!(named("cost_sched_switch") > 0 && named("cost_softirq_entry") > 0);
    drop(cost);
}
