//! Tests the observer on the running kernel. Needs root.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{Read, Write};
use std::net::UdpSocket;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use millrace_cost::report::{Event, Report, ReportMode};
use millrace_cost::{Config, Observer, TimingBudget};
use millrace_testkit::{StopOnDrop, wait_for, wait_until};
use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;

static ALONE: Mutex<()> = Mutex::new(());
const PERIOD: Duration = Duration::from_millis(700);
/// Longest wait for an expected event.
const BOUND: Duration = millrace_testkit::BOUND;

fn alone(test: &str) -> Option<MutexGuard<'static, ()>> {
    if !nix::unistd::geteuid().is_root() {
        println!("SKIP {test}: needs root");
        return None;
    }
    Some(ALONE.lock().unwrap_or_else(PoisonError::into_inner))
}

/// Runs `work` in background threads until `done` has returned or panicked.
fn beside<T>(threads: usize, work: impl Fn(&mut dyn FnMut() -> bool) + Sync, done: impl FnOnce() -> T) -> T {
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        // The scope waits for its threads even if `done` panics, so `stop` must be set after a panic too.
        let _stop = StopOnDrop(&stop);
        for _ in 0..threads {
            scope.spawn(|| work(&mut || !stop.load(Ordering::Relaxed)));
        }
        done()
    })
}

/// Sends datagrams to a socket's own address and receives them while `goes_on` returns true.
fn send_and_receive(goes_on: &mut dyn FnMut() -> bool, bytes: usize) {
    let socket = UdpSocket::bind("127.0.0.1:0").expect("a socket");
    let to = socket.local_addr().expect("an address");
    let mut buffer = vec![0; bytes];
    while goes_on() {
        socket.send_to(&buffer, to).expect("sent");
        socket.recv(&mut buffer).expect("received");
    }
}

fn config() -> Config {
    Config::new().expect("the taxonomy parses")
}

/// Returns a report of a period in which this process sends and receives without pause. Waits for a report for which
/// `wanted` returns true, since other load may keep the process from the CPUs.
fn observe(config: Config, wanted: impl Fn(&Report) -> bool) -> Report {
    beside(
        1,
        |goes_on| send_and_receive(goes_on, 1000),
        || {
            let deadline = Instant::now() + BOUND;
            let mut observer = Observer::start(config).expect("it starts");
            loop {
                let report = observer.next(PERIOD).expect("a report");
                if wanted(&report) || Instant::now() > deadline {
                    return report;
                }
            }
        },
    )
}

fn any(_: &Report) -> bool {
    true
}

/// Reports whether this process has sent and received in the report's period.
fn is_busy(report: &Report) -> bool {
    let own = report.processes.iter().find(|process| process.pid == std::process::id());
    own.is_some_and(|own| own.cost.send_ns > 0 && own.cost.receive_ns > 0)
}

/// Reports whether samples were taken in sends, in receives and in NET_RX softirqs.
fn is_sampled(report: &Report) -> bool {
    let is_seen = |event: &Event| sum(report, *event).1 > 0;
    [Event::Send, Event::Receive, Event::NetRx].iter().all(is_seen)
}

fn sum(report: &Report, event: Event) -> (u64, u64) {
    let events = report.cpus.iter().flat_map(|cpu| &cpu.events).filter(|of| of.event == event);
    events.fold((0, 0), |sum, of| (sum.0 + of.ns, sum.1 + of.samples))
}

fn parts(report: &Report, event: Event) -> BTreeSet<&str> {
    let events = report.cpus.iter().flat_map(|cpu| &cpu.events).filter(|of| of.event == event);
    events.flat_map(|of| &of.parts).map(|part| part.name.as_str()).collect()
}

/// An observer that times calls and one that only samples find the same kinds of kernel work, parts of the network
/// stack and functions of a process.
#[test]
fn timed_and_sampled_reports_find_the_same_parts_of_a_process() {
    let Some(_alone) = alone("timed_and_sampled_reports_find_the_same_parts_of_a_process") else { return };
    for mode in [ReportMode::Events, ReportMode::Sampling] {
        let has_udp = |report: &Report| {
            let stacks = report.stacks.as_ref().expect("they were asked for");
            let has_function = stacks.functions.iter().any(|function| function.contains("udp_sendmsg"));
            is_sampled(report) && parts(report, Event::Send).contains("UDP") && has_function
        };
        let report = observe(Config { mode, stacks: true, ..config() }, has_udp);
        for event in [Event::Send, Event::Receive, Event::NetRx] {
            let (ns, samples) = sum(&report, event);
            assert!(ns > 0 && samples > 0, "{mode:?} {event}: {ns} ns, {samples} samples");
        }
        assert!(parts(&report, Event::Send).contains("UDP"), "{mode:?}: {:?}", parts(&report, Event::Send));
        for of in report.cpus.iter().flat_map(|cpu| &cpu.events).filter(|of| of.samples > 0) {
            let of_parts: u64 = of.parts.iter().map(|part| part.ns).sum();
            assert!(of_parts <= of.ns && of.ns - of_parts <= of.parts.len() as u64, "rounding only: {of:?}");
            assert_eq!(of.parts.iter().map(|part| part.samples).sum::<u64>(), of.samples);
        }
        let stacks = report.stacks.as_ref().expect("they were asked for");
        assert!(stacks.functions.iter().any(|function| function.contains("udp_sendmsg")));
        let functions = u32::try_from(stacks.functions.len()).expect("a number");
        assert!(stacks.stacks.iter().flat_map(|stack| &stack.frames).all(|frame| *frame < functions));
    }
}

#[test]
fn timed_socket_calls_are_charged_to_the_calling_process() {
    let Some(_alone) = alone("timed_socket_calls_are_charged_to_the_calling_process") else { return };
    let report = observe(Config { pids: [std::process::id()].into(), ..config() }, is_busy);
    let [own] = &report.processes[..] else { panic!("{:?}", report.processes) };
    assert_eq!(own.pid, std::process::id());
    assert!(own.cost.send_ns > 0 && own.cost.send_calls > 0, "{own:?}");
    assert!(own.cost.receive_ns > 0 && own.cost.receive_calls > 0, "{own:?}");
    assert_eq!(report.cgroups.len(), 1);
    assert_eq!(report.cgroups[0].cost, own.cost);
}

#[test]
fn observer_reports_its_own_cost() {
    let Some(_alone) = alone("observer_reports_its_own_cost") else { return };
    let has_run = |report: &Report| {
        let programs = report.programs.iter().flatten();
        let has_run = programs.filter(|program| program.own).any(|program| program.run_ns > 0);
        has_run && report.observer.user_ns + report.observer.system_ns > 0
    };
    let report = observe(Config { program_statistics: true, ..config() }, has_run);
    let programs = report.programs.as_ref().expect("statistics");
    let own: Vec<_> = programs.iter().filter(|program| program.own).collect();
    assert!(
        own.iter().any(|program| program.name.starts_with("cost_") && program.run_ns > 0),
        "{programs:?}"
    );
    assert_eq!(report.observer.program_ns, Some(own.iter().map(|program| program.run_ns).sum()));
    assert!(report.observer.user_ns + report.observer.system_ns > 0 && report.observer.share > 0.0);
}

/// The time of the observer's BPF programs is not counted as time of a system call, a softirq or a part of the network
/// stack.
#[test]
fn time_of_observer_programs_counts_in_no_event() {
    let Some(_alone) = alone("time_of_observer_programs_counts_in_no_event") else { return };
    let own: BTreeSet<String> = millrace_cost::kernel::programs()
        .expect("the object opens")
        .into_iter()
        .map(|program| format!("bpf:{program}"))
        .collect();
    // The report is accepted once samples have hit the observer's programs in both `Send` and `Receive`.
    let observer_ns = |report: &Report, event| -> u64 {
        let costs = report.cpus.iter().flat_map(|cpu| &cpu.events);
        costs.filter(|of| of.event == event).map(|of| of.observer_ns).sum()
    };
    let is_met =
        |report: &Report| [Event::Send, Event::Receive].iter().all(|of| observer_ns(report, *of) > 0);
    let report = observe(Config { frequency_hz: 5000, stacks: true, ..config() }, is_met);
    let costs = || report.cpus.iter().flat_map(|cpu| &cpu.events);
    for part in costs().flat_map(|cost| &cost.parts) {
        assert!(!own.contains(&part.name), "{part:?}");
    }
    let stacks = report.stacks.as_ref().expect("they were asked for");
    for stack in stacks.stacks.iter().filter(|stack| stack.event.is_some()) {
        let innermost = stack.frames.last().map(|at| &stacks.functions[*at as usize]);
        assert!(innermost.is_none_or(|function| !own.contains(function)), "{innermost:?}");
    }
    for event in [Event::Send, Event::Receive] {
        assert!(observer_ns(&report, event) > 0, "{event}: {:?}", report.cpus);
    }
    assert_eq!(costs().map(|cost| cost.observer_ns).sum::<u64>(), report.observer.events_ns);
    let share: f64 = report.cpus.iter().map(|cpu| cpu.observer_share).sum();
    assert!((share - report.observer.events_ns as f64 / report.period_ns as f64).abs() < 1e-5, "{share}");
}

/// An observer that only samples also reports the time of each process, but no numbers of calls.
#[test]
fn sampled_socket_calls_are_charged_to_the_calling_process() {
    let Some(_alone) = alone("sampled_socket_calls_are_charged_to_the_calling_process") else { return };
    let config = Config { mode: ReportMode::Sampling, pids: [std::process::id()].into(), ..config() };
    let report = observe(config, is_busy);
    let [own] = &report.processes[..] else { panic!("{:?}", report.processes) };
    assert_eq!(own.pid, std::process::id());
    assert!(own.cost.send_ns > 0 && own.cost.receive_ns > 0, "{own:?}");
    assert_eq!((own.cost.send_calls, own.cost.receive_calls), (0, 0));
    assert_eq!(report.cgroups[0].cost, own.cost);
    assert_eq!(report.sampled_ns, report.period_ns);
    assert!(report.missing.iter().any(|missing| missing.what == "counts of calls"), "{:?}", report.missing);
}

/// Makes calls without pause until `done` has returned, in enough threads to get CPU time despite other load.
fn flood<T>(done: impl FnOnce() -> T) -> T {
    beside(8, |goes_on| send_and_receive(goes_on, 8), done)
}

/// If the timing programs may take almost no CPU time, the observer only samples. If they may take a whole CPU, it uses
/// them.
#[test]
fn near_zero_cpu_budget_selects_sampling_and_one_cpu_timing() {
    const SHORT: Duration = Duration::from_millis(250);
    const PAUSE: Duration = Duration::from_secs(2);
    let Some(_alone) = alone("near_zero_cpu_budget_selects_sampling_and_one_cpu_timing") else { return };
    let nothing = TimingBudget { share: f64::MIN_POSITIVE, pause: PAUSE };
    let all = TimingBudget { share: 1.0, pause: PAUSE };
    let starts = Instant::now();
    let mut observer = Observer::start(Config { budget: Some(all), ..config() }).expect("it starts");
    let started = Instant::now();
    let mut last = started;
    let mut periods = Duration::ZERO;
    let mut networking: BTreeMap<u32, u64> = BTreeMap::new();
    let mut until = |observer: &mut Observer, wanted: &dyn Fn(&Report) -> bool| -> Report {
        let begun = Instant::now();
        let mut number = 0;
        loop {
            number += 1;
            last = Instant::now();
            let report = observer.next(SHORT).expect("a report");
            let auto = report.auto.expect("it has a budget");
            let waited = begun.elapsed();
            let sends = sum(&report, Event::Send);
            assert!(
                waited < BOUND,
                "still {:?} in report {number}, {waited:?}: {auto:?}, sends {sends:?}",
                report.mode
            );
            periods += Duration::from_nanos(report.period_ns);
            for cpu in &report.cpus {
                *networking.entry(cpu.cpu).or_insert(0) +=
                    cpu.events.iter().map(|event| event.ns).sum::<u64>();
            }
            let sampled = if report.mode == ReportMode::Sampling { report.period_ns } else { 0 };
            assert_eq!(report.sampled_ns, sampled);
            assert_eq!(auto.retry_ms.is_some(), report.mode == ReportMode::Sampling);
            assert_eq!(report.method.is_some(), report.mode == ReportMode::Events);
            if wanted(&report) {
                return report;
            }
        }
    };
    let times = |report: &Report| report.mode == ReportMode::Events;
    let samples = |report: &Report| report.mode == ReportMode::Sampling;
    let samples_sends = |report: &Report| {
        let mut processes = report.processes.iter();
        samples(report)
            && sum(report, Event::Send).1 > 0
            && processes.any(|process| process.pid == std::process::id())
    };
    let first = until(&mut observer, &times);
    assert_eq!((first.sequence, first.auto.map(|auto| auto.changes)), (0, Some(0)));
    observer.set_budget(nothing).expect("a budget");
    let (changed, sampled) = flood(|| (until(&mut observer, &samples), until(&mut observer, &samples_sends)));
    assert_eq!(changed.auto.map(|auto| auto.changes), Some(1));
    assert!(sum(&sampled, Event::Send).0 > 0, "{:?}", sampled.cpus);
    assert!(sampled.processes.iter().any(|process| process.pid == std::process::id()));
    observer.set_budget(all).expect("a budget");
    let timed = until(&mut observer, &times);
    // Trials of timing in between do not count as changes between timing and sampling.
    assert_eq!(timed.auto.map(|auto| auto.changes), sampled.auto.map(|auto| auto.changes + 1));
    let socket = UdpSocket::bind("127.0.0.1:0").expect("a socket");
    for _ in 0..100 {
        socket.send_to(&[0; 8], socket.local_addr().expect("an address")).expect("sent");
    }
    let counted = until(&mut observer, &times);
    let sends = counted.cpus.iter().flat_map(|cpu| &cpu.events).filter(|of| of.event == Event::Send);
    assert!(sends.filter_map(|of| of.calls).sum::<u64>() >= 100, "{:?}", counted.cpus);
    // The reports cover all of the time exactly once, from the start until after the last one was requested.
    let least = last - started;
    let most = starts.elapsed();
    assert!((least..=most).contains(&periods), "{periods:?} of {least:?} to {most:?}");
    for (cpu, ns) in networking {
        assert!(u128::from(ns) <= (most + SHORT).as_nanos(), "CPU {cpu}: {ns} ns of {most:?}");
    }
}

#[test]
fn process_selected_for_profiling_has_system_call_samples() {
    let Some(_alone) = alone("process_selected_for_profiling_has_system_call_samples") else { return };
    let config = Config { profile: [std::process::id()].into(), ..config() };
    let report = observe(config, |report| {
        let profiles = report.processes.iter().filter_map(|process| process.profile.as_ref());
        profiles.flat_map(|profile| &profile.parts).any(|part| part.name == "system call")
    });
    let own = report.processes.iter().find(|process| process.pid == std::process::id()).expect("its row");
    let profile = own.profile.as_ref().expect("its profile");
    assert!(profile.samples > 0);
    assert!(profile.parts.iter().any(|part| part.name == "system call"), "{profile:?}");
    assert_eq!(profile.parts.iter().map(|part| part.samples).sum::<u64>(), profile.samples);
}

#[test]
fn only_requested_cpus_are_measured() {
    let Some(_alone) = alone("only_requested_cpus_are_measured") else { return };
    let report = observe(Config { cpus: Some([0].into()), ..config() }, any);
    let cpus: Vec<u32> = report.cpus.iter().map(|cpu| cpu.cpu).collect();
    assert_eq!(cpus, [0]);
    let refused = Observer::start(Config { cpus: Some([1_000_000].into()), ..config() });
    assert!(refused.is_err_and(|error| error.to_string().contains("1000000")));
}

/// A process's calls on CPUs that are not observed are not reported, whether calls are timed or only sampled.
#[test]
fn calls_of_a_process_on_unobserved_cpus_are_not_reported() {
    let Some(_alone) = alone("calls_of_a_process_on_unobserved_cpus_are_not_reported") else { return };
    let cpus = sched_getaffinity(Pid::from_raw(0)).expect("its CPUs");
    let mut cpus = (0..CpuSet::count()).filter(|cpu| cpus.is_set(*cpu).unwrap_or(false));
    let (Some(here), Some(there)) = (cpus.next(), cpus.next()) else {
        return println!("SKIP calls_of_a_process_on_unobserved_cpus_are_not_reported: one CPU");
    };
    let on = |cpu: usize, mode| {
        let asked = [u32::try_from(cpu).expect("a number")].into();
        let mut observer =
            Observer::start(Config { mode, cpus: Some(asked), ..config() }).expect("it starts");
        let mut only = CpuSet::new();
        only.set(here).expect("a CPU");
        let here_only = |goes_on: &mut dyn FnMut() -> bool| {
            sched_setaffinity(Pid::from_raw(0), &only).expect("moved");
            send_and_receive(goes_on, 8);
        };
        beside(1, here_only, || {
            // A second observer, which observes all CPUs, shows when the thread on CPU `here` has run, however busy
            // that CPU is.
            let mut all = Observer::start(Config { mode, ..config() }).expect("it starts");
            wait_until(
                &format!("the calls in mode {mode:?}"),
                || all.next(PERIOD).expect("a report"),
                is_busy,
            );
            is_busy(&observer.report().expect("a report"))
        })
    };
    for mode in [ReportMode::Events, ReportMode::Sampling] {
        assert!(on(here, mode), "{mode:?}");
        assert!(!on(there, mode), "{mode:?}");
    }
}

/// Calls on a pair of AF_UNIX sockets count as local from the call's first instruction on, in separate sums of the
/// process.
#[test]
fn socketpair_calls_do_not_count_as_networking() {
    let Some(_alone) = alone("socketpair_calls_do_not_count_as_networking") else { return };
    for mode in [ReportMode::Events, ReportMode::Sampling] {
        let mut observer = Observer::start(Config { mode, ..config() }).expect("it starts");
        let calls = |goes_on: &mut dyn FnMut() -> bool| {
            let (mut near, mut far) = UnixStream::pair().expect("a pair");
            while goes_on() {
                near.write_all(&[0; 8]).expect("sent");
                far.read_exact(&mut [0; 8]).expect("received");
            }
        };
        // Samples estimate which part of the calls' time the observer's BPF programs took. One second of calls gives
        // enough samples.
        let mut own_ns = 0.0;
        let mut event_ns = 0.0;
        let own = beside(1, calls, || {
            wait_for("a second of its calls", || {
                let report = observer.next(PERIOD).expect("a report");
                let own = report.processes.iter().find(|process| process.pid == std::process::id());
                let cost = own.map(|own| own.cost).filter(|cost| cost.local_ns > 0)?;
                own_ns += cost.local_ns as f64;
                event_ns += report.share_of(Event::Local) * report.period_ns as f64;
                (own_ns > 1e9 && cost.local_ns > 100_000_000).then_some(cost)
            })
        });
        // Calls of other processes on AF_UNIX and netlink sockets may add to `event_ns`.
        assert!(event_ns > 0.9 * own_ns, "{mode:?}: {event_ns} ns, of which its calls took {own_ns}");
        assert!(own.ns() * 100 < own.local_ns, "{mode:?}: {own:?}");
        assert_eq!(own.local_calls > 0, mode == ReportMode::Events, "{own:?}");
        assert_eq!((own.send_calls, own.receive_calls), (0, 0), "{own:?}");
    }
}

/// With the setting `all`, reports contain the kernel's work that is not networking.
#[test]
fn kernel_work_besides_networking_is_reported_with_setting_all() {
    let Some(_alone) = alone("kernel_work_besides_networking_is_reported_with_setting_all") else { return };
    let mut observer = Observer::start(Config { all: true, stacks: true, ..config() }).expect("it starts");
    let reads = |goes_on: &mut dyn FnMut() -> bool| {
        let mut zeros = std::fs::File::open("/dev/zero").expect("zeros");
        let mut buffer = vec![0; 1 << 16];
        while goes_on() {
            zeros.read_exact(&mut buffer).expect("read");
        }
    };
    beside(1, reads, || {
        wait_for("the reads", || {
            let report = observer.next(PERIOD).expect("a report");
            let stacks = report.stacks.as_ref().expect("they were asked for");
            let at = stacks
                .functions
                .iter()
                .position(|function| function == "read_zero" || function == "read_iter_zero")?;
            let of_reads = stacks
                .stacks
                .iter()
                .filter(|stack| stack.frames.contains(&u32::try_from(at).expect("a number")));
            let mut kernel = of_reads.filter(|stack| stack.event == Some(Event::Kernel));
            // The networking share of a CPU never includes the kernel's work that is not networking.
            let networking = |cpu: &millrace_cost::report::CpuCost| -> f64 {
                cpu.events.iter().filter(|of| of.event.is_networking()).map(|of| of.share).sum()
            };
            assert!(report.cpus.iter().all(|cpu| (cpu.networking_share - networking(cpu)).abs() < 1e-5));
            (kernel.any(|stack| stack.samples > 10) && report.share_of(Event::Kernel) > 0.05).then_some(())
        });
    });
}

/// A report printed as JSON can be read again without loss, on which logs rely.
#[test]
fn report_is_unchanged_by_json_round_trip() {
    let Some(_alone) = alone("report_is_unchanged_by_json_round_trip") else { return };
    let report = observe(Config { stacks: true, ..config() }, any);
    let json = serde_json::to_string(&report).expect("JSON");
    let again: Report = serde_json::from_str(&json).expect("a report");
    assert_eq!(serde_json::to_string(&again).expect("JSON"), json);
}
