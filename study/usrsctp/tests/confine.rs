//! Tests a confined process that tries to escape from its confinement. The test program starts itself again as the
//! confined child process.
//!
//! Harness: its own.
//! Tier: test-all, since it is no part of the product.

use std::{
    collections::BTreeMap,
    fs,
    io::{self, IoSliceMut, Read as _},
    net::UdpSocket,
    os::{
        fd::{AsFd, AsRawFd as _},
        unix::process::CommandExt as _,
    },
    process::{Command, Stdio},
    thread,
    time::Duration,
};

use millrace_base::control::{ControlEnd, ControlReceived};
use millrace_study_usrsctp::confine::{CPU_IDLE, ChildLimits, Confined, Hello, enter, hello, say};
use millrace_testkit::wait_for;
use nix::{
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::{
        ptrace,
        signal::{Signal, kill},
        socket::{AddressFamily, SockFlag, SockType, socket},
        uio::{RemoteIoVec, process_vm_readv},
    },
    unistd::{Pid, geteuid},
};
use serde::{Deserialize, Serialize};

const BOUNDS: ChildLimits = ChildLimits { memory: 32 << 20, descriptors: 8 };
const LONG: Duration = Duration::from_secs(60);

#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "snake_case")]
enum ChildOrder {
    /// Makes the child try to escape. A UDP socket is sent along with this message. `at` is the address of a listening
    /// socket. `parent` and `witness` are IDs of the processes that the child attacks.
    Escape {
        at: String,
        parent: i32,
        witness: i32,
    },
    Abort,
    /// Makes the child use this much CPU time, and report when it is done.
    Work {
        ms: u64,
    },
}

/// The attempts to escape, each with its error; `None` if it succeeded.
type EscapeAttempts = BTreeMap<String, Option<String>>;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.first().map(String::as_str) {
        Some("confined-child") => child(),
        Some("confined-failing") => drop(enter::<()>(BOUNDS, || anyhow::bail!("nothing to load"))),
        Some("parent-to-be-killed") => parent(),
        Some("--list") => {}
        _ => all(),
    }
}

fn all() {
    let tests: [(&str, fn()); 6] = [
        ("confined_process_reaches_nothing", confined_process_reaches_nothing),
        ("confined_process_has_only_what_it_was_given", confined_process_has_only_what_it_was_given),
        ("preparation_error_is_reported", preparation_error_is_reported),
        ("confined_process_dies_with_its_parent", confined_process_dies_with_its_parent),
        ("reason_of_end_is_known", reason_of_end_is_known),
        ("earned_cpu_time_is_granted_and_bounded", earned_cpu_time_is_granted_and_bounded),
    ];
    println!("\nrunning {} tests", tests.len());
    for (name, test) in tests {
        test();
        println!("test {name} ... ok");
    }
    println!("\ntest result: ok. {} passed; 0 failed", tests.len());
}

// --- functions of the child process

fn child() {
    let Ok(((), control)) = enter(BOUNDS, || Ok(())) else { return };
    loop {
        match control.receive() {
            ControlReceived::Record(ChildOrder::Escape { at, parent, witness }, sockets) => {
                let socket = sockets.into_iter().next().map(UdpSocket::from).expect("a socket");
                say(&control, &escape(&socket, &at, parent, witness)).expect("said");
            }
            ControlReceived::Record(ChildOrder::Abort, _) => std::process::abort(),
            ControlReceived::Record(ChildOrder::Work { ms }, _) => {
                work(Duration::from_millis(ms));
                say(&control, &EscapeAttempts::new()).expect("said");
            }
            ControlReceived::Nothing => {
                poll(&mut [PollFd::new(control.as_fd(), PollFlags::POLLIN)], PollTimeout::NONE)
                    .expect("polled");
            }
            ControlReceived::Malformed(_) | ControlReceived::End => return,
        }
    }
}

fn work(cpu: Duration) {
    let clock = nix::time::ClockId::CLOCK_PROCESS_CPUTIME_ID;
    let used = || clock.now().map(Duration::from).expect("a clock");
    let until = used() + cpu;
    while used() < until {}
}

fn escape(given: &UdpSocket, at: &str, parent: i32, witness: i32) -> EscapeAttempts {
    let mut tried = EscapeAttempts::new();
    let mut note =
        |what: &str, outcome: Result<(), String>| drop(tried.insert(what.to_owned(), outcome.err()));
    note("read a file", said(fs::read("/etc/passwd")));
    note("list a directory", said(fs::read_dir("/")));
    note("make a file", said(fs::write("/tmp/escaped", "")));
    note("remove a file", said(fs::remove_file("/tmp/escaped")));
    for (what, family) in
        [("inet", AddressFamily::Inet), ("unix", AddressFamily::Unix), ("netlink", AddressFamily::Netlink)]
    {
        note(what, said(socket(family, SockType::Datagram, SockFlag::empty(), None)));
    }
    note("send to an address", said(given.send_to(b"out", at)));
    note("connect", said(given.connect(at)));
    note("fork", said(Command::new("/bin/true").spawn()));
    note("exec", said(Err::<(), _>(Command::new("/bin/true").exec())));
    note("thread", said(thread::Builder::new().spawn(|| ())));
    note("ptrace", said(ptrace::attach(Pid::from_raw(witness))));
    note("kill the parent", said(kill(Pid::from_raw(parent), Signal::SIGKILL)));
    note("kill another", said(kill(Pid::from_raw(witness), Signal::SIGKILL)));
    let mut byte = [0];
    let remote = RemoteIoVec { base: parent as usize, len: 1 };
    note(
        "read memory",
        said(process_vm_readv(Pid::from_raw(parent), &mut [IoSliceMut::new(&mut byte)], &[remote])),
    );
    note("unshare", said(nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWUSER)));
    note("chroot", said(nix::unistd::chroot("/..")));
    note("root again", said(nix::unistd::setuid(nix::unistd::Uid::from_raw(0))));
    note("memory", said(Vec::<u8>::new().try_reserve_exact(2 * BOUNDS.memory as usize)));
    // This attempt must succeed: otherwise the failures of the other attempts would prove nothing.
    let may = Vec::<u8>::new().try_reserve_exact(BOUNDS.memory as usize / 4);
    note("may have memory", said(may));
    tried
}

fn said<T, E: ToString>(outcome: Result<T, E>) -> Result<(), String> {
    outcome.map(drop).map_err(|error| error.to_string())
}

/// Starts a child, prints its process ID, and waits to be killed.
fn parent() {
    let (child, control) = Confined::start(["confined-child"], CPU_IDLE).expect("started");
    greeted(&control);
    println!("{}", child.pid());
    thread::sleep(2 * LONG); // exact: the test kills this process
}

// --- tests, in the parent process

fn confined_process_reaches_nothing() {
    let (child, control) = started();
    let listens = UdpSocket::bind("127.0.0.1:0").expect("bound");
    listens.set_nonblocking(true).expect("set");
    let given = UdpSocket::bind("127.0.0.1:0").expect("bound");
    let mut witness = Command::new("/bin/sleep").arg("600").spawn().expect("a witness");
    let order = ChildOrder::Escape {
        at: listens.local_addr().expect("bound").to_string(),
        parent: std::process::id().cast_signed(),
        witness: witness.id().cast_signed(),
    };
    control.send(&order, &[given.as_fd()]).expect("ordered");
    let mut tried: EscapeAttempts = record(&control);
    assert_eq!(tried.remove("may have memory"), Some(None));
    assert_eq!(tried.len(), 20, "{tried:?}");
    for (what, outcome) in &tried {
        assert!(outcome.is_some(), "a confined process can {what}");
    }
    // These attempts must fail because of the filter of system calls, and not by chance: the attacked file, address and
    // processes exist, and the parent process may use them.
    const BY_THE_LIST: [&str; 11] = [
        "read a file",
        "remove a file",
        "inet",
        "exec",
        "ptrace",
        "read memory",
        "kill the parent",
        "kill another",
        "unshare",
        "chroot",
        "send to an address",
    ];
    for what in BY_THE_LIST {
        let outcome = tried.get(what).cloned().flatten().unwrap_or_default();
        assert!(outcome.contains("not permitted"), "{what}: {outcome}");
    }
    assert!(matches!(listens.recv(&mut [0; 8]), Err(error) if error.kind() == io::ErrorKind::WouldBlock));
    assert!(matches!(witness.try_wait(), Ok(None)), "the witness lives");
    assert!(child.ended().is_none(), "{:?}", child.ended());
    witness.kill().expect("killed");
    witness.wait().expect("waited for");
}

fn confined_process_has_only_what_it_was_given() {
    // This descriptor is inherited by mistake, as a careless library might leave one.
    let leaked = fs::File::open("/etc/passwd").expect("a file");
    rustix::io::fcntl_setfd(&leaked, rustix::io::FdFlags::empty()).expect("set");
    let (child, control) = Confined::start(["confined-child"], CPU_IDLE).expect("started");
    let without = greeted(&control);
    // exact: the child has sent its `Hello`, and does not change its rights afterwards
    let of = |what: &str| format!("/proc/{}/{what}", child.pid());
    let status = fs::read_to_string(of("status")).expect("a status");
    let has = |line: &str| {
        status
            .lines()
            .find_map(|own| own.strip_prefix(line))
            .map(|value| value.trim().to_owned())
            .unwrap_or_default()
    };
    assert_eq!((has("Seccomp:").as_str(), has("NoNewPrivs:").as_str()), ("2", "1"));
    for set in ["CapInh:", "CapPrm:", "CapEff:", "CapAmb:"] {
        assert_eq!(has(set), "0000000000000000", "{set}");
    }
    if !geteuid().is_root() {
        println!("SKIP: not root, so these layers are missing: {without:?}");
        return;
    }
    assert_eq!(without, Vec::<String>::new());
    assert_eq!(has("CapBnd:"), "0000000000000000");
    let open: Vec<_> = fs::read_dir(of("fd")).expect("its descriptors").collect();
    assert_eq!(open.len(), 4, "standard ones and its socket: {open:?}, without {}", leaked.as_raw_fd());
    let users = has("Uid:");
    let users: Vec<&str> = users.split_whitespace().collect();
    assert!(users.iter().all(|user| *user == (0x6d00_0000 + child.pid()).to_string()), "{users:?}");
    assert_eq!(has("Groups:"), "");
    // exact: the child entered its namespaces before it sent its `Hello`
    assert_ne!(fs::read_link(of("ns/net")).ok(), fs::read_link("/proc/self/ns/net").ok());
    assert_eq!(fs::read_dir(of("root")).expect("its root").count(), 0);
}

fn preparation_error_is_reported() {
    let (_child, control) = Confined::start(["confined-failing"], CPU_IDLE).expect("started");
    wait(&control);
    assert_eq!(hello(&control).expect("a word"), Some(Hello::No { why: "nothing to load".to_owned() }));
    wait(&control);
    assert!(hello(&control).is_err());
}

fn confined_process_dies_with_its_parent() {
    let mut parent = Command::new("/proc/self/exe") // exact: path of this test program
        .arg("parent-to-be-killed")
        .stdout(Stdio::piped())
        .spawn()
        .expect("a parent");
    let mut line = String::new();
    let mut said = parent.stdout.take().expect("its output");
    while !line.ends_with('\n') {
        let mut byte = [0];
        said.read_exact(&mut byte).expect("a line");
        line.push(char::from(byte[0]));
    }
    let pid = line.trim().parse().ok().and_then(rustix::process::Pid::from_raw).expect("a number");
    let child = rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()).expect("the child");
    parent.kill().expect("killed");
    parent.wait().expect("waited for");
    wait(&child);
}

fn reason_of_end_is_known() {
    let (child, control) = started();
    control.send(&ChildOrder::Abort, &[]).expect("ordered");
    assert_eq!(end(&child), "signal 6 has ended it");
    let (child, control) = started();
    drop(control);
    assert_eq!(end(&child), "it has ended");
    let (child, _control) = started();
    kill(Pid::from_raw(child.pid().cast_signed()), Signal::SIGKILL).expect("killed");
    assert_eq!(end(&child), "signal 9 has ended it");
    let (child, control) = started();
    drop(child);
    wait(&control);
    assert!(matches!(control.receive::<EscapeAttempts>(), ControlReceived::End));
}

fn earned_cpu_time_is_granted_and_bounded() {
    const IDLE: Duration = Duration::from_millis(400);
    let started = || {
        let (child, control) = Confined::start(["confined-child"], IDLE).expect("started");
        greeted(&control);
        (child, control)
    };
    let (child, control) = started();
    // In the loop, the child uses three times the CPU time that it may use without a grant. The parent grants more CPU
    // time after each loop iteration, so the child is not killed.
    for _ in 0..12 {
        control.send(&ChildOrder::Work { ms: 100 }, &[]).expect("ordered");
        let _: EscapeAttempts = record(&control);
        child.earn(Duration::from_millis(110));
    }
    assert_eq!(child.ended(), None);
    // Granted CPU time cannot be saved: however much a child was granted, it cannot spin forever.
    child.earn(LONG);
    control.send(&ChildOrder::Work { ms: u64::MAX / 2 }, &[]).expect("ordered");
    let said = "it was killed, since it used 400ms of CPU time without doing any work";
    assert_eq!(end(&child), said);
    // The reason for the child's end is known as soon as its socket is closed.
    let (child, control) = started();
    control.send(&ChildOrder::Work { ms: u64::MAX / 2 }, &[]).expect("ordered");
    wait(&control);
    assert!(matches!(control.receive::<EscapeAttempts>(), ControlReceived::End));
    assert_eq!(child.ended(), Some(said));
}

// --- helpers of the tests

fn started() -> (Confined, ControlEnd) {
    let (child, control) = Confined::start(["confined-child"], CPU_IDLE).expect("started");
    greeted(&control);
    (child, control)
}

/// Waits for the child's `Hello`. Returns the layers of confinement that the child could not apply.
fn greeted(control: &ControlEnd) -> Vec<String> {
    wait(control);
    match hello(control).expect("a word") {
        Some(Hello::Yes { without }) => without,
        other => panic!("{other:?}"),
    }
}

fn record(control: &ControlEnd) -> EscapeAttempts {
    wait(control);
    match control.receive() {
        ControlReceived::Record(record, _) => record,
        other => panic!("{other:?}"),
    }
}

fn wait(descriptor: impl AsFd) {
    let timeout = PollTimeout::try_from(LONG).expect("a minute");
    let ready = poll(&mut [PollFd::new(descriptor.as_fd(), PollFlags::POLLIN)], timeout).expect("polled");
    assert_eq!(ready, 1, "nothing in a minute");
}

fn end(child: &Confined) -> String {
    wait(child);
    wait_for("how it has ended", || child.ended().map(str::to_owned))
}
