//! `millrace cost` as an operator runs it. Needs root.
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

use millrace_cost::report::{Event, Report, VERSION};
use millrace_daemon::http::fetch;
use millrace_testkit::{BOUND, show_log_on_panic, wait_until};
use nix::fcntl::{FcntlArg, fcntl};
use nix::sys::signal::{Signal, kill};
use nix::sys::stat::Mode;
use nix::unistd::{Pid, mkfifo};
use tempfile::TempDir;
use terminal::Terminal;

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

#[test]
fn a_report_per_line() {
    if !is_root("a_report_per_line") {
        return;
    }
    for mode in ["events", "sampling"] {
        let output = run(&["--json", "--reports", "2", "--period", "200ms", "--mode", mode, "--stacks"]);
        assert!(output.status.success(), "{}", text(&output.stderr));
        let reports: Vec<Report> =
            text(&output.stdout).lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(reports.iter().map(|report| report.sequence).collect::<Vec<_>>(), [0, 1], "{mode}");
        for report in reports {
            assert_eq!((report.version, report.frequency_hz), (VERSION, 1000));
            assert!(report.period_ns > 0 && report.stacks.is_some());
            assert!(!report.cpus.is_empty());
            for cpu in &report.cpus {
                assert_eq!(cpu.events.iter().map(|cost| cost.event).collect::<Vec<_>>(), Event::ALL);
                assert!(cpu.events.iter().all(|cost| cost.calls.is_some() == (mode == "events")), "{mode}");
                assert!(cpu.samples > 0, "CPU {}", cpu.cpu);
            }
        }
    }
}

#[test]
fn once_is_text() {
    if !is_root("once_is_text") {
        return;
    }
    let output = run(&["--duration", "200ms", "--cpus", "0"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let text = text(&output.stdout);
    assert!(text.contains("% of one CPU (1 CPU, ") && text.contains("CPU   networking"), "{text}");
}

#[test]
fn mistakes_are_said() {
    if !is_root("mistakes_are_said") {
        return;
    }
    for (arguments, want) in [
        (&["--duration", "1s", "--cpus", "4000"][..], "CPU 4000 is not online"),
        (&["--duration", "1s", "--frequency", "50000"], "50000 samples a second are more than"),
        (&["--duration", "1s", "--mode", "sampling", "--frequency", "0"], "needs a frequency"),
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
        (&["--duration", "1s", "--frequency", "0", "--profile", "1"], "a profile needs a frequency"),
    ] {
        let output = run(arguments);
        assert!(!output.status.success() && output.stdout.is_empty());
        assert!(text(&output.stderr).contains(want), "{want}: {}", text(&output.stderr));
    }
}

/// A process that ends with the test, which shows what it has said if it fails.
struct Guard {
    child: Child,
    dir: TempDir,
}

impl Guard {
    fn start(command: &mut Command) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let said = File::create(dir.path().join("stderr")).unwrap();
        Self { child: command.stderr(said).spawn().unwrap(), dir }
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        show_log_on_panic(&format!("process {}", self.child.id()), &self.dir.path().join("stderr"));
    }
}

/// The relay is a QUIC server with symbols: its CPU time is in system calls, cryptography, transport, and itself.
#[test]
fn a_quic_server_is_split_into_what_it_does() {
    if !is_root("a_quic_server_is_split_into_what_it_does") {
        return;
    }
    let relay = process::Relay::start(tempfile::tempdir().unwrap(), &["--engine=user"]);
    let url = relay.url();
    let client = |arguments: &[&str]| {
        let command = &mut process::millrace();
        let command = command.args(arguments).args(["--name", "profile", "--tls-disable-verify", &url]);
        Guard::start(command.stdout(Stdio::null()))
    };
    let _publisher = client(&["publish", "--generate", "--rate-hz", "2000", "--duration", "600"]);
    process::wait_for("publisher", || relay.status().sessions.first().map(|_| ()));
    let _subscribers = [(); 3].map(|()| client(&["subscribe", "--track", "objects"]));
    wait_until("objects", || relay.status().totals.send_calls, |calls| *calls > 1000);

    let pid = relay.pid().to_string();
    let mut observer = command(&["--json", "--period", "500ms", "--frequency", "5000", "--profile", &pid]);
    let mut observer = Guard::start(observer.stdout(Stdio::piped()));
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
    assert!(unknown * 4 < all, "it has symbols: {parts:?}");
    println!("{parts:?}");
}

const OTHER_SCREEN: &str = "\x1b[?1049h";
const FIRST_SCREEN: &str = "\x1b[?25h\x1b[?1049l";
/// What begins a picture.
const HOME: &str = "\x1b[H";

/// A terminal with the live view on it.
fn live(columns: u16, arguments: &[&str]) -> Terminal {
    let mut command = terminal::command(env!("CARGO_BIN_EXE_millrace"));
    command.args(["cost", "--period", "100ms"]).args(arguments);
    Terminal::start(command, columns, 30)
}

#[test]
fn the_live_view_leaves_the_terminal_as_it_was() {
    if !is_root("the_live_view_leaves_the_terminal_as_it_was") {
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

/// In reports only if they were asked for, in the live view by a key, and nowhere do they control a terminal.
#[test]
fn command_lines_are_shown_to_who_asks() {
    if !is_root("command_lines_are_shown_to_who_asks") {
        return;
    }
    let script = "while :;do echo >/dev/udp/127.0.0.1/9;sleep 0.02;done 2>/dev/null";
    let arguments = ["-c", script, "server", "--token=s3cret\x1b[2J"];
    let server = Guard::start(Command::new("bash").args(arguments));
    let pid = server.child.id().to_string();
    // The first report that it is in.
    let observe = |more: &[&str]| {
        let mut command = command(&[&["--json", "--period", "200ms", "--pid", &pid], more].concat());
        let mut observer = Guard::start(command.stdout(Stdio::piped()));
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

/// Something to see.
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

/// Log, exports and their replay say the same; a signal ends all of them well.
#[test]
fn what_is_logged_can_be_shown_again() {
    if !is_root("what_is_logged_can_be_shown_again") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let (log, folded, again, profile) = (path("log"), path("folded"), path("again"), path("profile"));
    let stop = Arc::new(AtomicBool::new(false));
    let load = std::thread::spawn(send_and_receive(Arc::clone(&stop)));
    let files = ["--log", &log, "--folded", &folded, "--pprof", &profile];
    let mut observer = command(&[&files[..], &["--json", "--period", "200ms"]].concat());
    let mut observer = Guard::start(observer.stdout(Stdio::piped()));
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
        "nobody asked for them on standard output"
    );
    let replayed = run(&["replay", &log, "--folded", &again]);
    assert!(replayed.status.success());
    assert_eq!(text(&replayed.stderr), format!("millrace: {again} is written\n"));
    let stacks = std::fs::read_to_string(&folded).unwrap();
    assert!(stacks.lines().count() > 0 && stacks == std::fs::read_to_string(&again).unwrap());
    assert!(std::fs::read(&profile).unwrap().starts_with(&[0x1f, 0x8b]));
    let sum = text(&run(&["replay", &log]).stdout);
    assert!(sum.contains("CPU   networking"), "{sum}");

    // As if the writer had been killed.
    let whole = std::fs::read(&log).unwrap();
    std::fs::write(&log, &whole[..whole.len() - 20]).unwrap();
    let torn = run(&["replay", &log, "--json"]);
    assert!(
        torn.status.success() && text(&torn.stderr).contains("ends in the middle"),
        "{}",
        text(&torn.stderr)
    );
    assert!(text(&torn.stdout).lines().eq(printed[..text(&torn.stdout).lines().count()].iter()));
}

/// Starts that fail leave history, directories and exports as they were.
#[test]
fn what_fails_destroys_nothing() {
    if !is_root("what_fails_destroys_nothing") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let (log, flame, inside) = (path("log"), path("flame"), path("inside"));
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
    fails(&["--log", &log, "--http", "192.0.2.1:1"], "http 192.0.2.1:1: ");
    for special in [&inside, &pipe] {
        fails(&["--log", special], &format!("{special}: not a regular file"));
    }
    let none = path("none/log");
    fails(&["--log", &none], &format!("millrace: {none}: No such file or directory (os error 2)\n"));
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 4);
    assert!([&log, &flame].iter().all(|file| std::fs::read_to_string(file).unwrap() == "before"));
}

/// Lines of a child's standard error, in a thread of their own.
fn said(child: &mut Child) -> mpsc::Receiver<String> {
    let (send, said) = mpsc::channel();
    let lines = BufReader::new(child.stderr.take().unwrap()).lines();
    std::thread::spawn(move || lines.map_while(Result::ok).try_for_each(|line| send.send(line)));
    said
}

fn wait_for_line(said: &mpsc::Receiver<String>, want: &str) -> String {
    loop {
        let line = said.recv_timeout(BOUND).unwrap_or_else(|_| panic!("nobody said {want:?}"));
        if line.contains(want) {
            return line;
        }
    }
}

/// Who does not read standard output holds up nobody, and is told by the numbers of the reports.
#[test]
fn a_slow_reader_holds_up_nobody() {
    if !is_root("a_slow_reader_holds_up_nobody") {
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
    wait_for_line(&said, "standard output: it does not keep up");
    let logged = || {
        let reader = millrace_cost::log::Reader::open(&log);
        reader.map_or(0, |reader| reader.map_while(Result::ok).count())
    };
    // The observer and its log go on.
    let before = logged(); // exact: any number will do
    wait_until("more reports in the log", logged, |count| *count >= before + 20);
    let mut sequences = sequences(stdout);
    assert_eq!(sequences.next(), Some(0));
    let (mut last, mut missed) = (0, 0);
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

/// The first word that is one.
fn number(line: &str) -> u64 {
    line.split(' ').find_map(|word| word.parse().ok()).unwrap()
}

/// A disk that is full for a while costs reports, not the observer, and the log is whole afterwards.
#[test]
fn a_full_disk_ends_nothing() {
    if !is_root("a_full_disk_ends_nothing") {
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
    let (said, mut stdin) = (said(&mut child), child.stdin.take().unwrap());
    let mut sequences = sequences(child.stdout.take().unwrap());
    wait_for_line(&said, "log: log: No space left on device");
    // There was room for fewer. Not every one of them needs to be here, too.
    sequences.find(|sequence| *sequence >= 40).unwrap();
    stdin.write_all(b"there is room\n").unwrap();
    wait_for_line(&said, "log: goes on; ");
    stdin.write_all(b"end\n").unwrap();
    let replayed: Vec<u64> = sequences.skip_while(|sequence| *sequence > 0).collect();
    assert!(child.wait().unwrap().success());
    let lost = number(&said.iter().filter(|line| line.starts_with("millrace: log: ")).last().unwrap());
    assert!(replayed.is_sorted() && lost > 0);
    assert_eq!(replayed.last().unwrap() + 1, replayed.len() as u64 + lost);
}

/// The whole way from the kernel to a browser.
#[test]
fn the_dashboard_shows_this_machine() {
    if !is_root("the_dashboard_shows_this_machine") {
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
    assert!(said.contains(named) && !said.contains(token.trim_end()), "no terminal, no secret: {said}");
    let addr = said.strip_prefix("millrace: http://").unwrap().split('/').next().unwrap();
    // exact: it has said that it serves
    assert_eq!(fetch(addr.parse().unwrap(), "/metrics", None).unwrap().0, 401);
    // The browser keeps what it gets for the link, which is not the token.
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

/// In a container PIDs are the container's own: those that are given, and those that are shown.
#[test]
fn pids_are_those_of_the_observers_namespace() {
    if !is_root("pids_are_those_of_the_observers_namespace") {
        return;
    }
    // A process inside that sends, and one outside; the shell becomes the observer, and all inside ends with it.
    let script = "while :; do echo >/dev/udp/127.0.0.1/9; done 2>/dev/null & echo $!
        exec \"$0\" cost --mode events --json --reports 2 --period 1500ms --profile $! \"$@\"";
    let stop = Arc::new(AtomicBool::new(false));
    let load = std::thread::spawn(send_and_receive(Arc::clone(&stop)));
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
    stop.store(true, Ordering::Relaxed);
    load.join().unwrap();

    let [only] = &chosen.processes[..] else { panic!("{:?}", chosen.processes) };
    for process in [only, all.processes.iter().find(|process| process.pid == pid).unwrap()] {
        assert_eq!((process.pid, process.name.as_str()), (pid, "bash"));
        assert!(process.cost.send_ns > 0 && process.cost.send_calls > 0, "{process:?}");
        let profile = process.profile.as_ref().unwrap();
        assert!(profile.samples > 0 && profile.user_samples > profile.unknown_samples, "{profile:?}");
    }
    let own = std::fs::read_to_string("/proc/self/comm").unwrap(); // exact: this thread's own
    let outside =
        all.processes.iter().filter(|process| process.pid == 0).map(|process| process.name.as_str());
    assert!(
        outside.clone().any(|name| own.starts_with(name) || name.contains("pids_are")),
        "{:?}",
        all.processes
    );
}
