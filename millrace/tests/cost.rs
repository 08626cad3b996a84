//! Tests of the process `millrace cost` as an operator runs it. They need root.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod process;
mod terminal;

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpStream, UdpSocket};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Instant;

use millrace_cost::report::{Event, Report, VERSION};
use millrace_daemon::http::fetch;
use millrace_testkit::{BOUND, StopOnDrop, show_log_on_panic, wait_until};
use nix::fcntl::{FcntlArg, fcntl};
use nix::sched::{CpuSet, sched_setaffinity};
use nix::sys::signal::{Signal, kill};
use nix::sys::stat::Mode;
use nix::unistd::{Pid, mkfifo};
use tempfile::TempDir;
use terminal::PseudoTerminal;

fn command(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_millrace"));
    command.arg("cost").args(arguments);
    command
}

fn run(arguments: &[&str]) -> Output {
    command(arguments).output().unwrap()
}

fn is_root(test: &str) -> bool {
    let root = nix::unistd::geteuid().is_root();
    if !root {
        println!("SKIP {test}: needs root");
    }
    root
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Runs `work` while each CPU is busy. A CPU that is idle all the time takes no samples.
fn while_all_cpus_are_busy<T>(work: impl FnOnce() -> T) -> T {
    // exact: no test takes a CPU offline
    let stat = std::fs::read_to_string("/proc/stat").unwrap();
    let cpus = stat.lines().filter(|line| line.starts_with("cpu") && !line.starts_with("cpu ")).count();
    let ends = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _ends = StopOnDrop(&ends);
        for cpu in 0..cpus {
            let ends = &ends;
            scope.spawn(move || {
                let mut only = CpuSet::new();
                only.set(cpu).unwrap();
                sched_setaffinity(Pid::from_raw(0), &only).unwrap();
                while !ends.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            });
        }
        work()
    })
}

/// Reports whether the text has the head of the table of CPUs. Columns may have any width.
fn has_head_of_cpus(text: &str) -> bool {
    text.lines().any(|line| line.split_whitespace().take(3).eq(["CPU", "networking", "net_rx"]))
}

#[test]
fn cost_prints_one_json_report_per_line() {
    if !is_root("cost_prints_one_json_report_per_line") {
        return;
    }
    for mode in ["events", "sampling"] {
        let args = ["--json", "--reports", "2", "--period", "200ms", "--mode", mode, "--stacks"];
        let output = while_all_cpus_are_busy(|| run(&args));
        assert!(output.status.success(), "{}", text(&output.stderr));
        let reports: Vec<Report> =
            text(&output.stdout).lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(reports.iter().map(|report| report.sequence).collect::<Vec<_>>(), [0, 1], "{mode}");
        for report in reports {
            assert_eq!((report.version, report.frequency_hz), (VERSION, 1000));
            assert!(report.period_ns > 0 && report.stacks.is_some());
            assert!(!report.cpus.is_empty());
            for cpu in &report.cpus {
                let of: Vec<Event> = cpu.events.iter().map(|cost| cost.event).collect();
                assert_eq!(
                    of,
                    Event::ALL[..Event::ALL.len() - 1],
                    "columns of all events except `kernel`, which needs --all"
                );
                let counted = cpu.events.iter().filter(|cost| cost.calls.is_some());
                assert_eq!(counted.count(), if mode == "events" { 6 } else { 0 }, "{mode}");
                assert!(cpu.samples > 0, "CPU {}", cpu.cpu);
            }
        }
    }
}

#[test]
fn cost_over_one_duration_prints_text() {
    if !is_root("cost_over_one_duration_prints_text") {
        return;
    }
    let output = run(&["--duration", "200ms", "--cpus", "0"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let text = text(&output.stdout);
    assert!(text.contains("% of one CPU (1 CPU, ") && has_head_of_cpus(&text), "{text}");
}

#[test]
fn cost_reports_wrong_arguments() {
    if !is_root("cost_reports_wrong_arguments") {
        return;
    }
    for (arguments, want) in [
        (&["--duration", "1s", "--cpus", "4000"][..], "CPU 4000 is not online"),
        (&["--duration", "1s", "--frequency", "50000"], "50000 samples a second are more than"),
        (&["--duration", "1s", "--mode", "sampling", "--frequency", "0"], "set a frequency above 0"),
        (&["--duration", "1s", "--idle-watts=-5"], "not -5"),
        (&["--duration", "1s", "--idle-watts=NaN"], "not NaN"),
        (&["--duration", "1s", "--taxonomy", "/nonexistent"], "cannot read /nonexistent"),
        (&["--duration", "1s", "--pid", "999999999"], "there is no process 999999999"),
        (&["--duration", "1s", "--profile", "999999999"], "there is no process 999999999"),
        (&["--duration", "1s", "--cgroup", "/nonexistent"], "there is no cgroup /nonexistent under /"),
        (
            &["--duration", "1s", "--mode", "sampling", "--method", "functions"],
            "mode `sampling` times no calls",
        ),
        (&["--duration", "1s", "--frequency", "0", "--flame", "/tmp/none"], "--flame needs samples"),
        (&["--duration", "1s", "--frequency", "0", "--profile", "1"], "a profile needs samples"),
    ] {
        let output = run(arguments);
        assert!(!output.status.success() && output.stdout.is_empty());
        assert!(text(&output.stderr).contains(want), "{want}: {}", text(&output.stderr));
    }
}

/// A process that ends with the test. A failed test shows the process's output.
struct ProcessGuard {
    child: Child,
    dir: TempDir,
}

impl ProcessGuard {
    fn start(command: &mut Command) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let said = File::create(dir.path().join("stderr")).unwrap();
        Self { child: command.stderr(said).spawn().unwrap(), dir }
    }
}

impl Drop for ProcessGuard {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        show_log_on_panic(&format!("process {}", self.child.id()), &self.dir.path().join("stderr"));
    }
}

/// The observed process is a relay with symbols: its CPU time must be split into system calls, cryptography, transport
/// and its own code.
#[test]
fn quic_server_cpu_time_is_split_by_activity() {
    if !is_root("quic_server_cpu_time_is_split_by_activity") {
        return;
    }
    let relay = process::RunningRelay::start(tempfile::tempdir().unwrap(), &["--engine=user"]);
    let url = relay.url();
    let client = |arguments: &[&str]| {
        let command = &mut process::millrace();
        let command = command.args(arguments).args(["--name", "profile", "--tls-disable-verify", &url]);
        ProcessGuard::start(command.stdout(Stdio::null()))
    };
    let _publisher = client(&["publish", "--generate", "--rate-hz", "2000", "--duration", "600"]);
    process::wait_for("publisher", || relay.status().sessions.first().map(|_| ()));
    let _subscribers = [(); 3].map(|()| client(&["subscribe", "--track", "objects"]));
    wait_until("objects", || relay.status().totals.send_calls, |calls| *calls > 1000);

    let pid = relay.pid().to_string();
    let mut observer = command(&["--json", "--period", "500ms", "--frequency", "5000", "--profile", &pid]);
    let mut observer = ProcessGuard::start(observer.stdout(Stdio::piped()));
    let lines = BufReader::new(observer.child.stdout.take().unwrap()).lines();
    let mut parts: BTreeMap<String, u64> = BTreeMap::new();
    let often =
        |parts: &BTreeMap<String, u64>, part: &str| parts.get(part).is_some_and(|samples| *samples >= 10);
    let want = ["system call", "crypto", "transport", "application"];
    for line in lines.take(240) {
        let report: Report = serde_json::from_str(&line.unwrap()).unwrap();
        let own = report.processes.iter().find(|process| process.pid.to_string() == pid);
        let Some(profile) = own.and_then(|process| process.profile.as_ref()) else { continue };
        assert_eq!(profile.parts.iter().map(|part| part.samples).sum::<u64>(), profile.samples);
        for part in &profile.parts {
            *parts.entry(part.name.clone()).or_default() += part.samples;
        }
        if want.iter().all(|part| often(&parts, part)) {
            break;
        }
    }
    assert!(want.iter().all(|part| often(&parts, part)), "{parts:?}");
    let all: u64 = parts.values().sum();
    let unknown = parts.get("unknown").copied().unwrap_or(0);
    assert!(unknown * 4 < all, "the relay's symbols were not found: {parts:?}");
    println!("{parts:?}");
}

const OTHER_SCREEN: &str = "\x1b[?1049h";
const FIRST_SCREEN: &str = "\x1b[?25h\x1b[?1049l";
/// The control sequence with which the live view begins each redraw.
const HOME: &str = "\x1b[H";

/// Starts the live view on a terminal of its own.
fn live(columns: u16, arguments: &[&str]) -> PseudoTerminal {
    let mut command = terminal::command(env!("CARGO_BIN_EXE_millrace"));
    command.args(["cost", "--period", "100ms"]).args(arguments);
    PseudoTerminal::start(command, columns, 30)
}

#[test]
fn cost_live_view_restores_the_terminal_when_it_ends() {
    if !is_root("cost_live_view_restores_the_terminal_when_it_ends") {
        return;
    }
    const CTRL_C: &str = "\x03";
    for end in [Some("q"), Some(CTRL_C), None] {
        let mut live = live(120, &[]);
        live.wait_for(OTHER_SCREEN);
        live.wait_for("last minute");
        assert!(!live.echoes());
        terminal::assert_fits(&live.picture_with(HOME, "CPU"), 120, 30);
        live.resize(80, 24);
        live.picture_within(HOME, 80, 24);
        // 80 columns have no room for the last column if other columns are wide, as with long names of processes.
        live.resize(160, 24);
        live.types("\t\t");
        live.wait_for("receives/s");
        match end {
            Some(key) => live.types(key),
            None => live.signal(Signal::SIGTERM),
        }
        live.wait_for(FIRST_SCREEN);
        assert!(live.ends().success());
        assert!(live.echoes());
    }
}

/// Reports contain the command lines of processes only on request, and the live view shows them after a key is pressed.
/// Control characters in command lines never reach the terminal.
#[test]
fn process_command_lines_are_reported_only_on_request() {
    if !is_root("process_command_lines_are_reported_only_on_request") {
        return;
    }
    let script = "while :;do echo >/dev/udp/127.0.0.1/9;sleep 0.02;done 2>/dev/null";
    let arguments = ["-c", script, "server", "--token=s3cret\x1b[2J"];
    let server = ProcessGuard::start(Command::new("bash").args(arguments));
    let pid = server.child.id().to_string();
    // Reports are read until the first one that contains the server process.
    let observe = |more: &[&str]| {
        let mut command = command(&[&["--json", "--period", "200ms", "--pid", &pid], more].concat());
        let mut observer = ProcessGuard::start(command.stdout(Stdio::piped()));
        let lines = BufReader::new(observer.child.stdout.take().unwrap()).lines();
        lines.map(Result::unwrap).find(|line| line.contains("\"name\":\"bash\"")).unwrap()
    };
    let hidden = observe(&[]);
    assert!(!hidden.contains("s3cret"), "{hidden}");
    let shown = observe(&["--arguments"]);
    assert!(shown.contains("server --token=s3cret?[2J"), "{shown}");
    let mut live = live(160, &["--pid", &pid]);
    live.wait_for("last minute");
    live.types("\t\t");
    live.wait_for("receives/s");
    live.types("a");
    live.wait_for("s3cret?[2J");
    live.types("q");
    live.wait_for(FIRST_SCREEN);
    assert!(live.ends().success());
}

/// Sends and receives packets until `stop` is set, so that there is networking to measure.
fn send_and_receive(stop: Arc<AtomicBool>) -> impl FnOnce() + Send {
    move || {
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        let to = socket.local_addr().unwrap();
        while !stop.load(Ordering::Relaxed) {
            socket.send_to(&[0; 1000], to).unwrap();
            socket.recv(&mut [0; 1000]).unwrap();
        }
    }
}

/// The log, the exported files and a replay of the log must have equal figures. After a signal has ended the observer,
/// the log and the exported files must be complete.
#[test]
fn replay_of_a_cost_log_has_the_figures_of_the_live_reports() {
    if !is_root("replay_of_a_cost_log_has_the_figures_of_the_live_reports") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let log = path("log");
    let folded = path("folded");
    let again = path("again");
    let profile = path("profile");
    let stop = Arc::new(AtomicBool::new(false));
    let load = std::thread::spawn(send_and_receive(Arc::clone(&stop)));
    let files = ["--log", &log, "--folded", &folded, "--pprof", &profile];
    let mut observer = command(&[&files[..], &["--json", "--period", "200ms"]].concat());
    let mut observer = ProcessGuard::start(observer.stdout(Stdio::piped()));
    let child = &mut observer.child;
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let printed: Vec<String> = lines.by_ref().take(3).map(Result::unwrap).collect();
    kill(Pid::from_raw(i32::try_from(child.id()).unwrap()), Signal::SIGTERM).unwrap();
    stop.store(true, Ordering::Relaxed);
    load.join().unwrap();
    let printed: Vec<String> = printed.into_iter().chain(lines.map(Result::unwrap)).collect();
    assert!(child.wait().unwrap().success());

    let replayed = run(&["replay", &log, "--json"]);
    assert_eq!(text(&replayed.stderr), "");
    assert_eq!(text(&replayed.stdout).lines().collect::<Vec<_>>(), printed);
    assert!(
        printed.iter().all(|line| !line.contains("\"stacks\":{")),
        "reports were printed on standard output"
    );
    let replayed = run(&["replay", &log, "--folded", &again]);
    assert!(replayed.status.success());
    assert_eq!(text(&replayed.stderr), format!("millrace: {again} is written\n"));
    let stacks = std::fs::read_to_string(&folded).unwrap();
    assert!(stacks.lines().count() > 0 && stacks == std::fs::read_to_string(&again).unwrap());
    assert!(std::fs::read(&profile).unwrap().starts_with(&[0x1f, 0x8b]));
    let sum = text(&run(&["replay", &log]).stdout);
    assert!(has_head_of_cpus(&sum), "{sum}");

    // Replaying a range of the log into a new log must give a complete log that refers to no line of the first log.
    let part = path("part");
    let whole = text(&run(&["replay", &log, "--json", "--stacks"]).stdout);
    let second: serde_json::Value = serde_json::from_str(whole.lines().nth(1).unwrap()).unwrap();
    let from = second["time_unix_ms"].to_string();
    let cut = run(&["replay", &log, "--from", &from, "--log", &part]);
    assert!(cut.status.success() && cut.stdout.is_empty(), "{cut:?}");
    let replayed = text(&run(&["replay", &part, "--json", "--stacks"]).stdout);
    assert!(replayed.contains("\"stacks\":{") && replayed.lines().eq(whole.lines().skip(1)));

    // The test cuts off the end of the log's last report, as happens when the log's writer is killed.
    let whole = std::fs::read(&log).unwrap();
    std::fs::write(&log, &whole[..whole.len() - 20]).unwrap();
    let torn = run(&["replay", &log, "--json"]);
    assert!(
        torn.status.success() && text(&torn.stderr).contains("ends within a report"),
        "{}",
        text(&torn.stderr)
    );
    assert!(text(&torn.stdout).lines().eq(printed[..text(&torn.stdout).lines().count()].iter()));
}

/// With `--all`, the exported files contain the stacks of the whole kernel. Without it, they contain the stacks of
/// networking only.
#[test]
fn exported_stacks_contain_the_whole_kernel_only_on_request() {
    if !is_root("exported_stacks_contain_the_whole_kernel_only_on_request") {
        return;
    }
    let stop = Arc::new(AtomicBool::new(false));
    let sender = std::thread::spawn(send_and_receive(Arc::clone(&stop)));
    let stopped = Arc::clone(&stop);
    let reader = std::thread::spawn(move || {
        let mut zeros = File::open("/dev/zero").unwrap();
        while !stopped.load(Ordering::Relaxed) {
            zeros.read_exact(&mut [0; 1 << 16]).unwrap();
        }
    });
    for all in [true, false] {
        let dir = tempfile::tempdir().unwrap();
        let [folded, flame] = ["folded", "flame.svg"].map(|name| dir.path().join(name));
        let mut observer = command(&["--json", "--period", "200ms"]);
        observer.arg("--folded").arg(&folded).arg("--flame").arg(&flame).args(all.then_some("--all"));
        let mut observer = ProcessGuard::start(observer.stdout(Stdio::piped()));
        let child = &mut observer.child;
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut samples = BTreeMap::<Event, u64>::new();
        let deadline = Instant::now() + BOUND;
        let has =
            |samples: &BTreeMap<Event, u64>, event| samples.get(&event).is_some_and(|count| *count > 10);
        while !(has(&samples, Event::Send) && (has(&samples, Event::Kernel) || !all)) {
            assert!(Instant::now() < deadline, "{samples:?}");
            let report: Report = serde_json::from_str(&lines.next().unwrap().unwrap()).unwrap();
            for cost in report.cpus.iter().flat_map(|cpu| &cpu.events) {
                *samples.entry(cost.event).or_default() += cost.samples;
            }
        }
        kill(Pid::from_raw(i32::try_from(child.id()).unwrap()), Signal::SIGTERM).unwrap();
        lines.for_each(|line| drop(line.unwrap()));
        assert!(child.wait().unwrap().success());
        assert_eq!(samples.contains_key(&Event::Kernel), all, "{samples:?}");
        let [folded, flame] = [folded, flame].map(|path| std::fs::read_to_string(path).unwrap());
        for (event, want) in [("send", true), ("kernel", all)] {
            let stack = format!("{event};");
            assert_eq!(
                folded.lines().any(|line| line.starts_with(&stack)),
                want,
                "{event}, all: {all}\n{folded}"
            );
            assert_eq!(flame.contains(&format!("<title>{event}: ")), want, "{event}, all: {all}");
        }
    }
    stop.store(true, Ordering::Relaxed);
    sender.join().unwrap();
    reader.join().unwrap();
}

/// A `millrace cost` that fails to start must leave existing logs, directories and exported files unchanged.
#[test]
fn failed_start_leaves_existing_files_unchanged() {
    if !is_root("failed_start_leaves_existing_files_unchanged") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let log = path("log");
    let flame = path("flame");
    let inside = path("inside");
    for file in [&log, &flame] {
        std::fs::write(file, "before").unwrap();
    }
    std::fs::create_dir(&inside).unwrap();
    let pipe = path("pipe");
    mkfifo(pipe.as_str(), Mode::S_IRWXU).unwrap();
    let fails = |arguments: &[&str], want: &str| {
        let output = run(&[&["--json", "--reports", "1", "--period", "10ms"], arguments].concat());
        assert!(!output.status.success() && output.stdout.is_empty(), "{arguments:?}");
        assert!(text(&output.stderr).contains(want), "{want}: {}", text(&output.stderr));
    };
    for _ in 0..2 {
        fails(&["--log", &log, "--log-files", "2", "--cpus", "4000"], "CPU 4000 is not online");
    }
    fails(&["--flame", &flame, "--cpus", "4000"], "CPU 4000 is not online");
    fails(&["--log", &log, "--http", "192.0.2.1:1"], "cannot serve HTTP on 192.0.2.1:1: ");
    for special in [&inside, &pipe] {
        fails(&["--log", special], &format!("{special}: not a regular file"));
    }
    let none = path("none/log");
    fails(&["--log", &none], &format!("millrace: {none}: No such file or directory (os error 2)\n"));
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 4);
    assert!([&log, &flame].iter().all(|file| std::fs::read_to_string(file).unwrap() == "before"));
}

/// Returns the lines of a child's standard error, which a thread reads.
fn said(child: &mut Child) -> mpsc::Receiver<String> {
    let (send, said) = mpsc::channel();
    let lines = BufReader::new(child.stderr.take().unwrap()).lines();
    std::thread::spawn(move || lines.map_while(Result::ok).try_for_each(|line| send.send(line)));
    said
}

fn wait_for_line(said: &mpsc::Receiver<String>, want: &str) -> String {
    loop {
        let line = said.recv_timeout(BOUND).unwrap_or_else(|_| panic!("standard error has no {want:?}"));
        if line.contains(want) {
            return line;
        }
    }
}

/// If a process does not read the reports that `millrace cost` prints, the measurement and the log must not be delayed.
/// When the process reads again, the reports' sequence numbers show the gap.
#[test]
fn slow_reader_of_reports_does_not_delay_the_observer() {
    if !is_root("slow_reader_of_reports_does_not_delay_the_observer") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let log = dir.path().join("log");
    let mut child = command(&["--json", "--stacks", "--period", "20ms", "--log", log.to_str().unwrap()])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let stdout = child.stdout.take().unwrap();
    fcntl(&stdout, FcntlArg::F_SETPIPE_SZ(4096)).unwrap();
    let said = said(&mut child);
    wait_for_line(&said, "standard output: too slow, so reports are dropped");
    let logged = || {
        let reader = millrace_cost::log::ReportReader::open(&log);
        reader.map_or(0, |reader| reader.map_while(Result::ok).count())
    };
    // The measurement and the log continue while nobody reads standard output.
    let before = logged(); // exact: the test only checks that the number of reports in the log grows
    wait_until("more reports in the log", logged, |count| *count >= before + 20);
    let mut sequences = sequences(stdout);
    assert_eq!(sequences.next(), Some(0));
    let mut last = 0;
    let mut missed = 0;
    let mut take = |sequence: u64| {
        missed += sequence - last - 1;
        last = sequence;
        missed
    };
    while take(sequences.next().unwrap()) == 0 {}
    kill(Pid::from_raw(i32::try_from(child.id()).unwrap()), Signal::SIGTERM).unwrap();
    for sequence in sequences {
        take(sequence);
    }
    assert!(child.wait().unwrap().success());
    let told = number(&wait_for_line(&said, "reports are not in it"));
    assert!(told >= missed, "{told} {missed}");
}

fn sequences(stdout: impl Read) -> impl Iterator<Item = u64> {
    let lines = BufReader::new(stdout).lines();
    lines.map(|line| serde_json::from_str::<Report>(&line.unwrap()).unwrap().sequence)
}

/// Returns the first number in the line that stands as a word of its own.
fn number(line: &str) -> u64 {
    line.split(' ').find_map(|word| word.parse().ok()).unwrap()
}

/// While the disk is full, reports are missing in the log, but the observer continues. The log is readable afterwards.
#[test]
fn full_disk_does_not_end_the_cost_observer() {
    if !is_root("full_disk_does_not_end_the_cost_observer") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let script = "mount -t tmpfs -o size=64k none $PWD && cd $PWD && head -c 60k /dev/zero >filler
        \"$0\" cost --json --period 50ms --log log </dev/null &
        read -r && rm filler && read -r && kill $! && wait $! && exec \"$0\" cost replay --json log";
    let mut child = Command::new("unshare")
        .args(["--mount", "bash", "-c", script, env!("CARGO_BIN_EXE_millrace")])
        .current_dir(dir.path())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let said = said(&mut child);
    let mut stdin = child.stdin.take().unwrap();
    let mut sequences = sequences(child.stdout.take().unwrap());
    wait_for_line(&said, "log: log: No space left on device");
    // The pipe on standard output has room for fewer than 40 reports, so some of the later reports may be dropped.
    sequences.find(|sequence| *sequence >= 40).unwrap();
    stdin.write_all(b"there is room\n").unwrap();
    wait_for_line(&said, "log: works again; ");
    stdin.write_all(b"end\n").unwrap();
    let replayed: Vec<u64> = sequences.skip_while(|sequence| *sequence > 0).collect();
    assert!(child.wait().unwrap().success());
    let lost = number(&said.iter().filter(|line| line.starts_with("millrace: log: ")).last().unwrap());
    assert!(replayed.is_sorted() && lost > 0);
    assert_eq!(replayed.last().unwrap() + 1, replayed.len() as u64 + lost);
}

/// The dashboard must show values that the observer's BPF programs have measured on this machine.
#[test]
fn cost_dashboard_shows_measurements_of_this_machine() {
    if !is_root("cost_dashboard_shows_measurements_of_this_machine") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("token");
    let named = file.to_str().unwrap();
    let mut child = command(&["--http", "127.0.0.1:0", "--http-token-file", named, "--period", "100ms"]);
    let mut child = child.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut said = String::new();
    BufReader::new(child.stderr.take().unwrap()).read_line(&mut said).unwrap();
    let token = std::fs::read_to_string(&file).unwrap();
    assert!(
        said.contains(named) && !said.contains(token.trim_end()),
        "the token was printed although standard error is no terminal: {said}"
    );
    let addr = said.strip_prefix("millrace: http://").unwrap().split('/').next().unwrap();
    // exact: the server has logged its address, so it accepts connections
    assert_eq!(fetch(addr.parse().unwrap(), "/metrics", None).unwrap().0, 401);
    // The token in the URL of the dashboard is exchanged for a cookie, which differs from the token.
    let mut stream = TcpStream::connect(addr).unwrap();
    write!(stream, "GET /?token={} HTTP/1.0\r\nHost: {addr}\r\n\r\n", token.trim_end()).unwrap();
    let answer: Vec<_> = BufReader::new(stream).lines().map(Result::unwrap).collect();
    let cookie = answer.iter().find_map(|line| line.strip_prefix("set-cookie: ")).unwrap();
    let cookie = cookie.split(';').next().unwrap();
    assert!(!cookie.contains(token.trim_end()), "{cookie}");
    let mut stream = TcpStream::connect(addr).unwrap();
    write!(stream, "GET /api/reports HTTP/1.0\r\nHost: {addr}\r\nCookie: {cookie}\r\n\r\n").unwrap();
    let mut reports = BufReader::new(stream).lines().map(Result::unwrap).filter_map(|line| {
        serde_json::from_str::<Report>(line.strip_prefix("data: ").unwrap_or_default()).ok()
    });
    let first = reports.next().unwrap();
    assert!(reports.next().unwrap().sequence > first.sequence && !first.cpus.is_empty());
    kill(Pid::from_raw(i32::try_from(child.id()).unwrap()), Signal::SIGTERM).unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success() && output.stdout.is_empty(), "{}", text(&output.stdout));
}

/// Returns a field of /proc/PID/task/*/status of each thread of a process, without the field's name.
fn status(pid: u32, field: &str) -> Vec<String> {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    let threads = tasks.map(|task| std::fs::read_to_string(task.unwrap().path().join("status")).unwrap());
    let line = |status: String| {
        let line = status.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(":\t")).unwrap();
        line.to_owned()
    };
    threads.map(line).collect()
}

const DAC_OVERRIDE: u64 = 1 << 1;
const SYS_PTRACE: u64 = 1 << 19;
const SYS_ADMIN: u64 = 1 << 21;
const DAC_READ_SEARCH: u64 = 1 << 2;
/// Bits of the capabilities CAP_SYSLOG, CAP_PERFMON and CAP_BPF.
const THREE: u64 = 1 << 34 | 1 << 38 | 1 << 39;
const NOBODY: &str = "65534\t65534\t65534\t65534";

/// An attacker who takes over the HTTP server gets a process whose threads may measure the kernel, and have no other
/// right. With these reduced rights the process must still measure, in mode `events` and in mode `sampling`.
#[test]
fn cost_http_server_keeps_only_needed_capabilities() {
    if !is_root("cost_http_server_keeps_only_needed_capabilities") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let log = dir.path().join("log");
    let log = ["--log", log.to_str().unwrap()];
    let own = std::process::id().to_string();
    for (arguments, capabilities, user) in [
        (&["--mode", "events"][..], THREE, NOBODY),
        (&["--mode", "sampling"], THREE, NOBODY),
        (&["--profile", &own], THREE | SYS_PTRACE | DAC_READ_SEARCH, NOBODY),
        (&["--programs"], THREE | SYS_ADMIN, NOBODY),
        (&log, THREE | DAC_OVERRIDE, "0\t0\t0\t0"),
    ] {
        let mut observe =
            command(&["--http", "127.0.0.1:0", "--http-token-file", "off", "--json", "--period", "200ms"]);
        let mut server = ProcessGuard::start(observe.args(arguments).stdout(Stdio::piped()));
        let mut lines = BufReader::new(server.child.stdout.take().unwrap()).lines();
        let first: Report = serde_json::from_str(&lines.next().unwrap().unwrap()).unwrap();
        let pid = server.child.id();
        // exact: the process drops its capabilities before its first report, which has arrived
        for (field, want) in [
            ("CapEff", format!("{capabilities:016x}")),
            ("CapPrm", format!("{capabilities:016x}")),
            ("CapInh", format!("{:016x}", 0)),
            ("Uid", user.to_owned()),
            ("NoNewPrivs", "1".to_owned()),
            ("Seccomp", "2".to_owned()),
        ] {
            let has = status(pid, field);
            assert!(has.len() > 1 && has.iter().all(|has| *has == want), "{arguments:?} {field}: {has:?}");
        }
        // The load comes from processes of another user, so that names of foreign processes are resolved.
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        let to = socket.local_addr().unwrap();
        let is_seen = |report: &Report| {
            let own = report.processes.iter().find(|process| process.pid == std::process::id());
            let parts = report.cpus.iter().flat_map(|cpu| &cpu.events).flat_map(|event| &event.parts);
            own.is_some_and(|own| !own.name.is_empty()) && parts.into_iter().any(|part| part.name != "other")
        };
        let seen = lines.map(|line| serde_json::from_str::<Report>(&line.unwrap()).unwrap()).any(|report| {
            for _ in 0..20_000 {
                socket.send_to(&[0; 1000], to).unwrap();
                socket.recv(&mut [0; 1000]).unwrap();
            }
            is_seen(&report)
        });
        assert!(seen && first.lost.processes == 0, "{arguments:?}");
        let later =
            first.missing.iter().any(|missing| missing.what == "names of BPF programs that are loaded later");
        assert_eq!(later, capabilities & SYS_ADMIN == 0, "{:?}", first.missing);
    }
}

/// A process that serves a log's dashboard needs no capabilities, and drops all of them.
#[test]
fn dashboard_of_a_replayed_cost_log_drops_all_capabilities() {
    if !is_root("dashboard_of_a_replayed_cost_log_drops_all_capabilities") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let log = dir.path().join("log");
    std::fs::write(&log, run(&["--json", "--duration", "100ms"]).stdout).unwrap();
    let mut replay = command(&["replay", "--http", "127.0.0.1:0", "--http-token-file", "off"]);
    let mut child = replay.arg(&log).stderr(Stdio::piped()).spawn().unwrap();
    let said = said(&mut child);
    let line = wait_for_line(&said, "http://");
    let addr = line.split("http://").nth(1).unwrap().trim_end_matches('/').parse().unwrap();
    wait_until(
        "its report",
        || fetch(addr, "/api/report", None).map_err(|error| error.to_string()),
        |answer| answer.as_ref().is_ok_and(|(code, _)| *code == 200),
    )
    .unwrap();
    // exact: the server drops its capabilities before it answers requests, and it has answered one
    for (field, want) in [("CapEff", "0000000000000000"), ("Uid", NOBODY), ("Seccomp", "2")] {
        assert!(status(child.id(), field).iter().all(|has| has == want), "{field}");
    }
    kill(Pid::from_raw(i32::try_from(child.id()).unwrap()), Signal::SIGTERM).unwrap();
    assert!(child.wait().unwrap().success());
}

/// A running Prometheus that scrapes `target` every second.
struct Prometheus {
    addr: std::net::SocketAddr,
    _process: ProcessGuard,
    _data: TempDir,
}

impl Prometheus {
    fn start(target: &str) -> Self {
        let data = tempfile::tempdir().unwrap();
        let config = data.path().join("prometheus.yml");
        let scrape = format!("- job_name: cost\n  static_configs: [{{targets: ['{target}']}}]\n");
        std::fs::write(&config, format!("global: {{scrape_interval: 1s}}\nscrape_configs:\n{scrape}"))
            .unwrap();
        let mut command = Command::new("prometheus");
        command.arg("--config.file").arg(&config).arg("--storage.tsdb.path").arg(data.path().join("data"));
        let process = ProcessGuard::start(command.arg("--web.listen-address=127.0.0.1:0"));
        let log = process.dir.path().join("stderr");
        let listening = || {
            let said = std::fs::read_to_string(&log).unwrap_or_default();
            let line = said.lines().find(|line| line.contains("\"Listening on\""))?.to_owned();
            line.rsplit_once("address=")?.1.parse().ok()
        };
        let addr = wait_until("Prometheus", listening, Option::is_some).unwrap();
        Self { addr, _process: process, _data: data }
    }

    /// Returns the values of a query, or Prometheus's error as text.
    fn ask(&self, query: &str) -> Result<Vec<f64>, String> {
        let escaped: String = query.bytes().map(|byte| format!("%{byte:02X}")).collect();
        // exact: callers repeat this Prometheus query until it returns the expected values
        let (_, text) = fetch(self.addr, &format!("/api/v1/query?query={escaped}"), None)
            .map_err(|error| error.to_string())?;
        let answer: serde_json::Value =
            serde_json::from_str(&text).map_err(|error| format!("{error}: {text}"))?;
        let result = answer["data"]["result"].as_array().ok_or_else(|| text.clone())?;
        Ok(result.iter().filter_map(|series| series["value"][1].as_str()?.parse().ok()).collect())
    }
}

/// Every query of the Grafana dashboards must return data from a Prometheus that scrapes a running observer.
#[test]
fn grafana_dashboards_have_data() {
    const TEST: &str = "grafana_dashboards_have_data";
    if !is_root(TEST) {
        return;
    }
    if Command::new("prometheus").arg("--version").output().is_err() {
        println!("SKIP {TEST}: no prometheus");
        return;
    }
    let stop = Arc::new(AtomicBool::new(false));
    let load = std::thread::spawn(send_and_receive(Arc::clone(&stop)));
    // If the observer may itself use a whole CPU (`--budget 100`), it never falls back to sampling, so events are
    // counted all the time.
    let arguments =
        ["--http", "127.0.0.1:0", "--http-token-file", "off", "--period", "200ms", "--budget", "100"];
    let mut observer = ProcessGuard::start(command(&arguments).stdout(Stdio::null()));
    let stderr = observer.dir.path().join("stderr");
    let said = || std::fs::read_to_string(&stderr).unwrap_or_default();
    let said = wait_until("the observer", said, |said| said.contains("http://"));
    let target = said.split("http://").nth(1).unwrap().split('/').next().unwrap();
    let prometheus = Prometheus::start(target);
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../contrib/grafana");
    let mut queries = 0;
    for file in std::fs::read_dir(folder).unwrap() {
        let dashboard: serde_json::Value =
            serde_json::from_str(&std::fs::read_to_string(file.unwrap().path()).unwrap()).unwrap();
        for panel in dashboard["panels"].as_array().unwrap() {
            for target in panel["targets"].as_array().unwrap() {
                let query = target["expr"].as_str().unwrap();
                let query = query.replace("$__rate_interval", "10s").replace("$instance", ".+");
                let ask = || prometheus.ask(&query);
                // Machines without RAPL measure no energy, so queries for energy may return no data.
                if query.contains("_energy_")
                    && !std::path::Path::new("/sys/class/powercap/intel-rapl:0").exists()
                {
                    assert_eq!(ask().map(|values| values.len()), Ok(0), "{query}");
                    continue;
                }
                let are_figures = |values: &Result<Vec<f64>, String>| {
                    values.as_ref().is_ok_and(|values| {
                        !values.is_empty() && values.iter().any(|value| value.is_finite())
                    })
                };
                wait_until(&format!("{}: {query}", panel["title"]), ask, are_figures).unwrap();
                queries += 1;
            }
        }
    }
    assert!(queries > 10, "{queries}");
    // The time per send call must include only calls that were counted. If it included the time of calls that were
    // sampled but not counted, it would be far larger.
    let each = "rate(millrace_cost_event_counted_seconds_total{event=\"send\"}[10s]) / rate(millrace_cost_event_calls_total{event=\"send\"}[10s]) > 0";
    let each = wait_until(
        "the time of a call",
        || prometheus.ask(each),
        |values| values.as_ref().is_ok_and(|values| !values.is_empty()),
    );
    assert!(each.as_ref().unwrap().iter().all(|seconds| (100e-9..1e-3).contains(seconds)), "{each:?}");
    stop.store(true, Ordering::Relaxed);
    load.join().unwrap();
    observer.child.kill().unwrap();
}

/// PIDs on the command line and in reports of a container are those of the container's own PID namespace.
#[test]
fn process_ids_are_those_of_the_observers_pid_namespace() {
    if !is_root("process_ids_are_those_of_the_observers_pid_namespace") {
        return;
    }
    // One process sends inside of the PID namespace, and one outside. The shell execs the observer as PID 1 of the
    // namespace, so all processes inside end with it.
    let script = "while :; do echo >/dev/udp/127.0.0.1/9; done 2>/dev/null & echo $!
        exec \"$0\" cost --mode events --json --reports 2 --period 1500ms --profile $! \"$@\"";
    // The process outside runs the shell through a symbolic link, whose name becomes the process's name. If threads of
    // this test program sent, all of them would be reported under the name of the thread that sent first.
    const OUTSIDE: &str = "sends_outside";
    let folder = tempfile::tempdir().unwrap();
    let link = folder.path().join(OUTSIDE);
    std::os::unix::fs::symlink("/bin/bash", &link).unwrap();
    let sends = "while :; do echo >/dev/udp/127.0.0.1/9; done 2>/dev/null";
    let outside = ProcessGuard::start(Command::new(link).args(["-c", sends]));
    let inside = |arguments: &[&str]| {
        let output = Command::new("unshare")
            .args(["--pid", "--fork", "--mount-proc", "bash", "-c", script, env!("CARGO_BIN_EXE_millrace")])
            .args(arguments)
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", text(&output.stderr));
        let said = text(&output.stdout);
        let (pid, reports) = said.split_once('\n').unwrap();
        let last: Report = serde_json::from_str(reports.lines().last().unwrap()).unwrap();
        (pid.parse::<u32>().unwrap(), last)
    };
    let (pid, all) = inside(&[]);
    let (_, chosen) = inside(&["--pid", &pid.to_string()]);
    drop(outside);

    let [only] = &chosen.processes[..] else { panic!("{:?}", chosen.processes) };
    for process in [only, all.processes.iter().find(|process| process.pid == pid).unwrap()] {
        assert_eq!((process.pid, process.name.as_str()), (pid, "bash"));
        assert!(process.cost.send_ns > 0 && process.cost.send_calls > 0, "{process:?}");
        let profile = process.profile.as_ref().unwrap();
        assert!(profile.samples > 0 && profile.user_samples > profile.unknown_samples, "{profile:?}");
    }
    let mut others = all.processes.iter().filter(|process| process.pid == 0);
    assert!(others.any(|process| process.name == OUTSIDE), "{:?}", all.processes);
}
