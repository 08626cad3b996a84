//! Tests of `millrace gate trace`.

use std::{
    io::{BufRead as _, BufReader, Read as _},
    net::UdpSocket,
    process::{Child, ChildStdout, Command, Stdio},
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::{Value, json};

use crate::{
    policy,
    process::GateProcess,
    support::{GateSite, PORT, SERVER, inside, is_root, wait_for, wait_until},
    unix_time,
};

/// Address of the client whose packets are traced. The client that is not traced has 10.97.0.2.
const QUIET: &str = "10.97.0.3";

/// A running `millrace gate trace`; killed when dropped.
struct TraceProcess {
    process: Child,
    /// The process's output, or `None` when the test has closed the pipe.
    out: Option<BufReader<ChildStdout>>,
}

impl TraceProcess {
    fn spawn(site: &GateSite, args: &[&str]) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_millrace"));
        command.args(["gate", "trace"]).args(args).arg("--socket").arg(site.path("gate.sock"));
        let mut process = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let out = process.stdout.take().map(BufReader::new);
        Self { process, out }
    }

    /// Starts a trace, and returns when it has begun.
    fn start(site: &GateSite, args: &[&str]) -> Self {
        let mut follower = Self::spawn(site, args);
        let first = follower.line();
        assert!(first.contains("that the gate refuses") || first.contains(r#""event":"start""#), "{first:?}");
        follower
    }

    /// Reads a line, or an empty text at the end of the output.
    fn line(&mut self) -> String {
        let mut line = String::new();
        self.out.as_mut().unwrap().read_line(&mut line).unwrap();
        line
    }

    fn lines(&mut self) -> Vec<String> {
        std::iter::from_fn(|| Some(self.line()).filter(|line| !line.is_empty())).collect()
    }

    fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.process.id().try_into().unwrap()), signal).unwrap();
    }

    fn exit_code(&mut self) -> Option<i32> {
        wait_for("end of the trace", || self.process.try_wait().unwrap()).code()
    }
}

impl Drop for TraceProcess {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn ip(args: &[&str]) {
    assert!(Command::new("ip").args(args).status().unwrap().success(), "{args:?}");
}

/// Makes network namespaces of a server and of clients, with the addresses of two clients.
fn site(name: &str) -> GateSite {
    let site = GateSite::new(name, &policy(2));
    ip(&["-n", &site.clients, "addr", "add", &format!("{QUIET}/24"), "dev", "eth"]);
    site
}

fn client(site: &GateSite, address: &str) -> UdpSocket {
    let socket = inside(&site.clients, || UdpSocket::bind((address, 0)).unwrap());
    socket.connect((SERVER, PORT)).unwrap();
    socket
}

/// A payload that is too short for a QUIC packet, so that the rule `short` refuses it.
const SHORT: &[u8] = &[0x40; 5];

fn send(socket: &UdpSocket, count: usize) {
    for _ in 0..count {
        socket.send(SHORT).unwrap();
    }
}

/// Returns the error of a trace that cannot start.
fn refused(site: &GateSite, args: &[&str]) -> String {
    let mut follower = TraceProcess::spawn(site, args);
    assert_eq!(follower.exit_code(), Some(1));
    let mut said = String::new();
    follower.process.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    said
}

/// The gate's log only has samples of refused packets. A trace of one client must get each of the client's packets.
#[test]
fn trace_of_a_client_survives_the_flood_of_another() {
    if !is_root() {
        return;
    }
    let site = site("follow");
    let _gate = GateProcess::start(&site, &["--policy=gate.toml", "--http=off"]);
    let mut follower = TraceProcess::start(&site, &["--client", QUIET, "--json", "--count=30"]);
    let flooding = client(&site, "10.97.0.2");
    let quiet = client(&site, QUIET);
    // The flood may fill the queues in front of the gate, so it continues until thirty packets of the quiet client have
    // passed.
    wait_for("end of the trace", || {
        send(&flooding, 500);
        send(&quiet, 1);
        follower.process.try_wait().unwrap()
    });
    let lines: Vec<Value> = follower.lines().iter().map(|line| serde_json::from_str(line).unwrap()).collect();
    let (end, packets) = lines.split_last().unwrap();
    assert_eq!(*end, json!({"event": "end", "packets": 30, "left_out": 0, "lost": 0}));
    assert_eq!(packets.len(), 30);
    let from = format!("{QUIET}:{}", quiet.local_addr().unwrap().port());
    for packet in packets {
        let want = json!({
            "event": "packet", "time_us": packet["time_us"], "client": from, "to": format!("{SERVER}:{PORT}"),
            "scope": "web", "rules": ["short"], "refused": true, "bytes": SHORT.len(), "packet": "short",
        });
        assert_eq!(*packet, want);
    }
    let us = packets[0]["time_us"].as_u64().unwrap();
    assert!(unix_time().as_secs().abs_diff(us / 1_000_000) < 600, "{us} is the time of day");
    assert_eq!(follower.exit_code(), Some(0));
}

/// A trace prints at most --rate packets a second. Lines during the trace and at its end give the number of packets
/// left out. The printed packets and these numbers must add up to all packets.
#[test]
fn packets_over_the_trace_rate_are_reported() {
    if !is_root() {
        return;
    }
    let site = site("left-out");
    let gate = GateProcess::start(&site, &["--policy=gate.toml", "--http=off"]);
    let mut follower = TraceProcess::start(&site, &["--rate=5", "--rule=short,malformed", "--scope=web"]);
    assert!(follower.line().starts_with("TIME, UTC     CLIENT "));
    let flooding = client(&site, "10.97.0.2");
    send(&flooding, 2000);
    let mut shown = 0;
    loop {
        let line = follower.line();
        if line.starts_with("# more than --rate 5 a second: ") {
            assert!(line.ends_with(" left out, 0 lost\n"), "{line}");
            break;
        }
        assert!(
            line.contains("  10.97.0.2:")
                && line.ends_with("  web       short          refused, short, 5 B\n"),
            "{line}"
        );
        shown += 1;
    }
    // The test waits until no packet of the flood is in flight: it sends one packet twice, and each must raise the
    // gate's count of refused packets by exactly one.
    let count = || gate.counted("short").0;
    wait_for("the end of the flood", || {
        (0..2).all(|_| {
            let before = count();
            send(&flooding, 1);
            wait_until("another one", count, |now| *now > before) == before + 1
        })
    });
    follower.signal(Signal::SIGINT);
    let rest = follower.lines();
    shown += rest.iter().filter(|line| !line.starts_with('#')).count() as u64;
    let left_out = gate.counted("short").0 - shown;
    assert!(left_out > 0);
    assert_eq!(rest.last().unwrap(), &format!("# packets: {shown} shown, {left_out} left out, 0 lost\n"));
    assert_eq!(follower.exit_code(), Some(0));
}

/// Whether a trace ends by a signal, a kill or a closed pipe, another trace must be able to start in its place, and
/// other traces must continue.
#[test]
fn ended_traces_leave_nothing_behind() {
    if !is_root() {
        return;
    }
    let site = site("leave");
    let gate = GateProcess::start(&site, &["--policy=gate.toml", "--http=off"]);
    let full = || {
        assert_eq!(
            refused(&site, &[]),
            "millrace: the kernel's table has no room for more traces: 8 are running\n"
        )
    };
    let room = |what: &str| {
        wait_for(what, || {
            let mut follower = TraceProcess::spawn(&site, &[]);
            follower.line().contains("that the gate refuses").then_some(follower)
        })
    };
    let mut followers: Vec<_> = (0..8).map(|_| TraceProcess::start(&site, &[])).collect();
    full();

    // The first trace is killed.
    let killed = followers.pop().unwrap();
    killed.signal(Signal::SIGKILL);
    followers.push(room("room after SIGKILL"));
    full();

    // The second trace gets Ctrl-C.
    let mut ended = followers.pop().unwrap();
    ended.signal(Signal::SIGINT);
    assert_eq!(ended.exit_code(), Some(0));
    followers.push(room("room after SIGINT"));
    full();

    // The reader of the third trace's output leaves, which is no error.
    let mut unread = followers.pop().unwrap();
    unread.out = None;
    assert_eq!(unread.exit_code(), Some(0));
    followers.push(room("room after the reader left"));

    // The traces that were not ended must still receive packets.
    send(&client(&site, QUIET), 1);
    for follower in &mut followers {
        let line = loop {
            let line = follower.line();
            if !line.starts_with('#') && !line.starts_with("TIME") {
                break line;
            }
        };
        assert!(line.contains(QUIET), "{line}");
    }
    drop(gate);
    for follower in &mut followers {
        assert_eq!(follower.exit_code(), Some(1), "the gate has gone");
    }
}

/// Packets that rules in mode "monitor" would refuse are marked as such.
#[test]
fn gate_traces_packets_that_would_be_refused_in_dry_run() {
    if !is_root() {
        return;
    }
    let site = site("watched");
    let _gate = GateProcess::start(&site, &["--policy=gate.toml", "--http=off", "--dry-run"]);
    let mut follower = TraceProcess::start(&site, &["--client", "10.97.0.0/24", "--count=1"]);
    follower.line();
    send(&client(&site, QUIET), 1);
    let line = follower.line();
    assert!(line.ends_with("  web       short          would be refused, short, 5 B\n"), "{line}");
    assert_eq!(follower.line(), "# packets: 1 shown, 0 left out, 0 lost\n");
    let wrong = refused(&site, &["--scope=wbe"]);
    assert_eq!(wrong, "millrace: there is no scope \"wbe\"; there are web\n");
}
