//! A function that is a process: sessions by SCTP, over a path that loses, and what becomes of them when a process, its library, or the sense
//! of what comes is gone.

use std::{
    fs,
    os::{
        fd::{AsFd, AsRawFd as _, OwnedFd},
        unix::net::UnixDatagram,
    },
    path::Path,
    process::{Child, Command, Stdio},
    sync::atomic::{AtomicBool, Ordering},
    thread,
};

use millrace_base::control;
use millrace_daemon::confine::Hello;
use millrace_graft::message::{Error, Event, Received, Want, Why};
use nix::sys::signal::{Signal, kill};

use crate::{
    messages::{Capture, GRAFTS, Host, accept, asks, event, message, pair, wait_for_keys},
    site::{CLIENT, SERVER, Site, ip, wait_for, wait_until},
};

const SECRET: &[u8] = b"what nobody else is to read";
const LIBRARY: &str = "/usr/lib/x86_64-linux-gnu/libusrsctp.so.2";
const SCTP: &str = r#"
[[graft]]
name = "sctp"
functions = ["sctp"]
"#;
/// Order is cheaper by waiting in the library, so this is chosen where both are there.
const LOOSE: &str = "[[graft]]\nname = \"loose\"\nfunctions = [\"sctp-unordered\"]\n";

fn is_there(test: &str) -> bool {
    let is_there = Path::new(LIBRARY).exists();
    if !is_there {
        println!("SKIP {test}: {LIBRARY} is not there (libusrsctp2)");
    }
    is_there
}

fn settings(side: usize, more: &str) -> String {
    let (local, remote) = if side == 0 { (CLIENT, SERVER) } else { (SERVER, CLIENT) };
    format!(
        "{GRAFTS}{SCTP}{more}\n[[peer]]\nname = \"other\"\nlocal = \"{local}\"\nremote = \"{remote}\"\nkey-file = \"key\"\n\
         ports = \"41000-41006\"\n"
    )
}

/// Both daemons, with a process each that waits.
fn hosts<'a>(site: &'a Site, more: [&str; 2]) -> [Host<'a>; 2] {
    let hosts = [0, 1].map(|side| Host::start_with(site, side, &settings(side, more[side])));
    hosts.iter().for_each(wait_for_keys);
    hosts.iter().for_each(wait_for_process);
    hosts
}

fn wait_for_process(host: &Host<'_>) {
    wait_until("a process that waits", || host.status().processes, |all| all[0].is_ready);
}

/// So many processes of this daemon: one waits, besides those of sessions, and is started when the one before has a session.
fn wait_for_processes(host: &Host<'_>, count: usize) -> Vec<i32> {
    wait_until(&format!("{count} processes"), || processes(host), |all| all.len() == count)
}

/// All sessions are over, and none has ended otherwise than its ends wanted.
fn wait_for_good_ends(host: &Host<'_>) {
    wait_until("both ends to let go", || host.lent(), |lent| *lent == 0);
    let process = wait_until("its end", || host.status().processes[0].clone(), |it| it.running == 0);
    assert_eq!(process.ended.get("failed"), None, "{process:?}");
}

/// Processes of this daemon that functions are.
fn processes(host: &Host<'_>) -> Vec<i32> {
    let all =
        fs::read_dir("/proc").unwrap().filter_map(|entry| entry.unwrap().file_name().to_str()?.parse().ok());
    let parent = format!("PPid:\t{}\n", host.process.id());
    let is_its = |pid: &i32| {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        let command = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        status.contains(&parent) && String::from_utf8_lossy(&command).contains("process\0sctp")
    };
    all.filter(is_its).collect()
}

/// Queues too short for what SCTP has under way, both ways.
fn make_lossy(site: &Site) {
    for namespace in &site.namespaces {
        ip(&format!("netns exec {namespace} tc qdisc add dev eth root tbf rate 20mbit burst 8k limit 20k"));
    }
}

fn dropped(site: &Site) -> u64 {
    let args =
        ["netns", "exec", &site.namespaces[0], "tc", "-s", "-j", "qdisc", "show", "dev", "eth", "root"];
    let output = Command::new("ip").args(args).output().unwrap();
    let all: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    all[0]["drops"].as_u64().unwrap()
}

/// A message of one of the two ends.
fn written(side: u32, number: u32) -> Vec<u8> {
    let length = (number as usize * 7919) % 6000;
    let rest = (0..length).map(|at| (at as u32 ^ number) as u8);
    // What comes to the near one is open where it is captured.
    let secret = if side == 0 { SECRET } else { &[] };
    number.to_be_bytes().into_iter().chain(secret.iter().copied()).chain(rest).collect()
}

#[test]
fn all_comes_in_order_over_a_path_that_loses_and_nothing_in_clear() {
    const SENT: u32 = 600;
    if !is_there("sctp") {
        return;
    }
    let Some(site) = Site::new("sctp") else { return };
    let hosts = hosts(&site, [""; 2]);
    let capture = Capture::new(&site, 0);
    let (mut near, mut far) = pair(&site, &["order", "congestion-control"]);
    for session in [&mut near, &mut far] {
        let agreed = session.agreed().unwrap();
        assert_eq!((agreed.graft.as_str(), agreed.is_process, agreed.in_order), ("sctp", true, false));
        assert!(agreed.is_sealed && agreed.services.iter().any(|service| service == "order"), "{agreed:?}");
    }
    make_lossy(&site);
    thread::scope(|scope| {
        let both = [(&mut near, 0), (&mut far, 1)].map(|(session, side)| {
            scope.spawn(move || {
                session.set_nonblocking(true);
                let (mut sent, mut got) = (0, 0);
                wait_for(&format!("all of them at {side}"), || {
                    while sent < SENT && session.send(&written(side, sent)).is_ok() {
                        sent += 1;
                    }
                    while let Ok(Received::Message(bytes)) = session.receive() {
                        assert!(bytes == written(1 - side, got), "message {got} at {side}");
                        got += 1;
                    }
                    sent == SENT && got == SENT
                });
                session.set_nonblocking(false);
            })
        });
        both.into_iter().for_each(|one| one.join().unwrap());
    });
    assert!(dropped(&site) > 0, "nothing was lost");
    let (seen, in_clear) = capture.count(SECRET);
    assert!(seen > 0 && in_clear == 0, "{in_clear} of {seen} in clear");
    // Everything comes before the end, which the processes bring about by themselves.
    near.send(b"last").unwrap();
    near.close().unwrap();
    assert_eq!(message(&mut far), b"last");
    assert_eq!(far.receive().unwrap(), Received::Finished);
    far.close().unwrap();
    hosts.iter().for_each(wait_for_good_ends);
}

/// One that does not read holds back who sends, and loses nothing by it.
#[test]
fn who_does_not_read_is_waited_for() {
    if !is_there("backpressure") {
        return;
    }
    let Some(site) = Site::new("backpressure") else { return };
    let more = format!("{LOOSE}[parameters.sctp-unordered]\nbuffer_kib = 64");
    let _hosts = hosts(&site, [&more; 2]);
    let (mut near, mut far) = pair(&site, &["once", "reliability", "congestion-control"]);
    assert_eq!(near.agreed().unwrap().graft, "loose");
    near.set_nonblocking(true);
    let mut sent = 0_u32;
    let mut stuck = 0;
    // Nothing is taken for a good while: sockets and buffers between them are full.
    while stuck < 100 {
        match near.send(&[&sent.to_be_bytes()[..], &[7; 996]].concat()) {
            Ok(()) => (sent, stuck) = (sent + 1, 0),
            Err(Error::WouldBlock) => {
                stuck += 1;
                thread::sleep(std::time::Duration::from_millis(20)); // exact: the gap between two attempts to send
            }
            Err(error) => panic!("{error}"),
        }
        assert!(sent < 20_000, "there is no end to what is taken");
    }
    let mut got: Vec<u32> =
        (0..sent).map(|_| u32::from_be_bytes(message(&mut far)[..4].try_into().unwrap())).collect();
    got.sort_unstable();
    assert!(got.into_iter().eq(0..sent));
}

/// One process waits at a time, and applications that come together have one each.
#[test]
fn sessions_that_are_opened_at_once_have_a_process_each() {
    if !is_there("crowd") {
        return;
    }
    let Some(site) = Site::new("crowd") else { return };
    let hosts = hosts(&site, [""; 2]);
    let listener = asks(&site, 1, "test").listen().unwrap();
    let open = || asks(&site, 0, "test").service("order").service("congestion-control").initiate().unwrap();
    let mut near: Vec<_> = thread::scope(|scope| {
        let opening: Vec<_> = (0..3).map(|_| scope.spawn(open)).collect();
        opening.into_iter().map(|one| one.join().unwrap()).collect()
    });
    near.iter_mut().zip(0_u32..).for_each(|(session, number)| session.send(&number.to_be_bytes()).unwrap());
    let mut far: Vec<_> = near.iter().map(|_| accept(&listener)).collect();
    let mut came: Vec<_> = far.iter_mut().map(message).collect();
    came.sort_unstable();
    assert_eq!(came, (0_u32..3).map(|number| number.to_be_bytes().to_vec()).collect::<Vec<_>>());
    // exact: messages have come through all of them
    assert!(hosts.iter().all(|host| host.status().processes[0].running == 3));
}

/// Nor is what came lost where this end has more to say after the other has finished.
#[test]
fn what_is_said_after_the_end_costs_nothing_that_came() {
    const SENT: u32 = 600;
    if !is_there("late") {
        return;
    }
    let Some(site) = Site::new("late") else { return };
    let hosts = hosts(&site, [""; 2]);
    let (mut near, mut far) = pair(&site, &["order", "congestion-control"]);
    // More than the application's socket holds: the rest waits in the library, which has confirmed it.
    (0..SENT).for_each(|number| near.send(&written(0, number)[..4]).unwrap());
    let far_daemon = nix::unistd::Pid::from_raw(hosts[1].process.id().cast_signed());
    // The other end's daemon does not say that this one has closed it.
    kill(far_daemon, Signal::SIGSTOP).unwrap();
    near.close().unwrap();
    wait_until("this end to have finished", || hosts[0].status().processes, |all| all[0].running == 0);
    far.send(b"late").unwrap();
    kill(far_daemon, Signal::SIGCONT).unwrap();
    for number in 0..SENT {
        assert_eq!(message(&mut far), number.to_be_bytes());
    }
    assert_eq!(far.receive().unwrap(), Received::Finished);
    far.close().unwrap();
    hosts.iter().rev().for_each(wait_for_good_ends);
}

#[test]
fn a_process_that_is_killed_ends_its_session_in_words() {
    if !is_there("killedprocess") {
        return;
    }
    let Some(site) = Site::new("killedprocess") else { return };
    let [near_host, far_host] = hosts(&site, [""; 2]);
    let process = wait_for_processes(&near_host, 1)[0];
    let status = fs::read_to_string(format!("/proc/{process}/status")).unwrap(); // exact: it is confined before it is ready
    assert!(status.contains("Seccomp:\t2") && status.contains("CapEff:\t0000000000000000"), "{status}");
    let listener = asks(&site, 1, "test").listen().unwrap();
    let open = || asks(&site, 0, "test").service("order").service("congestion-control").initiate().unwrap();
    let mut near = open();
    let mut far = accept(&listener);
    near.send(SECRET).unwrap();
    assert_eq!(message(&mut far), SECRET);
    let capture = Capture::new(&site, 0);
    kill(nix::unistd::Pid::from_raw(process), Signal::SIGKILL).unwrap();
    // Whoever goes on to send does so into nothing.
    let closed = wait_for("the end", || {
        let _ = near.send(SECRET);
        near.event().unwrap()
    });
    let Event::Closed { reason } = closed else { panic!("{closed:?}") };
    assert!(reason.contains("graft sctp: its process is gone: signal 9 has ended it"), "{reason}");
    let Event::Closed { reason } = event(&mut far, |event| matches!(event, Event::Closed { .. })) else {
        panic!("closed");
    };
    assert!(reason.contains("signal 9 has ended it"), "{reason}");
    assert_eq!(capture.count(SECRET).1, 0);
    // exact: it is counted before the session is closed
    assert_eq!(near_host.status().processes[0].ended["failed"], 1);
    drop((near, far));
    for host in [&near_host, &far_host] {
        wait_until("room", || host.lent(), |lent| *lent == 0);
        wait_for_process(host);
    }
    // The next one has another.
    let mut near = open();
    let mut far = accept(&listener);
    near.send(b"again").unwrap();
    assert_eq!(message(&mut far), b"again");
    // They end with their daemon, however that ends.
    let of_near = wait_for_processes(&near_host, 2);
    drop(near_host);
    wait_for("its processes to end", || {
        let gone = |pid: &i32| !Path::new(&format!("/proc/{pid}/root")).exists();
        of_near.iter().all(gone)
    });
}

#[test]
fn an_end_without_the_library_refuses_in_words() {
    if !is_there("without") {
        return;
    }
    let Some(site) = Site::new("without") else { return };
    let near_host = Host::start_with(&site, 0, &settings(0, ""));
    let hidden = format!("mount --bind /dev/null $(readlink -f {LIBRARY}) && exec \"$@\"");
    let far_host = Host::start_in(&site, 1, &settings(1, ""), &["unshare", "-m", "sh", "-c", &hidden, "sh"]);
    [&near_host, &far_host].into_iter().for_each(wait_for_keys);
    wait_for_process(&near_host);
    let trouble = wait_for("trouble", || far_host.status().processes[0].trouble.clone());
    assert!(trouble.contains("install Debian's package libusrsctp2"), "{trouble}");
    let (_, text) = far_host.verb(&["status"]);
    assert!(text.contains("none can be had: libusrsctp.so.2 cannot be loaded"), "{text}");
    for (side, wanted) in [(0, Why::Unreachable), (1, Why::Impossible)] {
        let _listener = asks(&site, 1 - side, "test").listen().unwrap();
        let asked = asks(&site, side, "test").service("order").service("congestion-control").initiate();
        let Err(Error::Refused { why, reason }) = asked else { panic!("{asked:?}") };
        assert_eq!(why, wanted, "{reason}");
        assert!(reason.contains("libusrsctp2"), "{reason}");
    }
    // What needs no process is there.
    let (mut near, mut far) = pair(&site, &["reliability"]);
    near.send(b"there").unwrap();
    assert_eq!(message(&mut far), b"there");
}

#[test]
fn no_session_changes_to_a_process_and_both_ends_need_the_same() {
    if !is_there("changes") {
        return;
    }
    let Some(site) = Site::new("changes") else { return };
    let other = format!("{LOOSE}[parameters.sctp-unordered]\nstreams = 4\nordered = 1");
    let [near_host, _far_host] = hosts(&site, [LOOSE, &other]);
    let (mut near, _far) = pair(&site, &["reliability"]);
    assert_eq!(near.agreed().unwrap().graft, "selective");
    let services = ["reliability".to_owned(), "congestion-control".to_owned()];
    near.renegotiate(Want { services: services.into(), ..Want::default() }).unwrap();
    let refused = event(&mut near, |event| matches!(event, Event::Refused { .. } | Event::Changed { .. }));
    let is_told =
        matches!(&refused, Event::Refused { reason, .. } if reason.contains("graft loose is a process"));
    assert!(is_told, "{refused:?}");
    let session = near_host.status().sessions[1].name.clone(); // exact: the settings say so
    for args in [&["swap", &session, "sctp"][..], &["swap", "--stateless", &session, "sctp"]] {
        let (ok, said) = near_host.verb(args);
        assert!(!ok && said.contains("graft sctp is a process"), "{said}");
    }
    drop(near);
    let _listener = asks(&site, 1, "test").listen().unwrap();
    let asked = asks(&site, 0, "test").service("reliability").service("congestion-control").initiate();
    let Err(Error::Refused { reason, .. }) = asked else { panic!("{asked:?}") };
    assert!(reason.contains("other values of parameters"), "{reason}");
}

// --- processes without daemons

/// A confined process, with its socket.
struct Process {
    child: Child,
    control: control::Control,
    application: OwnedFd,
}

impl Process {
    fn start(wire: impl AsFd) -> Self {
        let (control, theirs) = control::Control::pair().unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_millrace"));
        command.args(["graft", "packets", "process", "sctp"]).stdout(Stdio::null());
        let child = command.stdin(theirs.as_fd().try_clone_to_owned().unwrap()).spawn().unwrap();
        drop((theirs, command));
        let hello = wait_for("hello", || match control.receive::<Hello>() {
            control::Received::Record(hello, _) => Some(hello),
            control::Received::Nothing => None,
            other => panic!("{other:?}"),
        });
        assert!(matches!(hello, Hello::Yes { .. }), "{hello:?}");
        let (own, other) = control::Control::pair().unwrap();
        let serve = serde_json::json!({ "packet_bytes": 1200, "parameters": { "rto_min_ms": 20 } });
        control.send(&serve, &[wire.as_fd(), other.as_fd()]).unwrap();
        Self { child, control, application: own.as_fd().try_clone_to_owned().unwrap() }
    }

    fn try_send(&self, bytes: &[u8]) -> bool {
        use nix::sys::socket::{MsgFlags, send};
        send(self.application.as_raw_fd(), bytes, MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL).is_ok()
    }

    fn try_receive(&self) -> Option<Vec<u8>> {
        use nix::sys::socket::{MsgFlags, recv};
        let mut buffer = vec![0; 2048];
        let got = recv(self.application.as_raw_fd(), &mut buffer, MsgFlags::MSG_DONTWAIT).ok()?;
        buffer.truncate(got);
        Some(buffer)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Between two processes: loses some, and has others in their place, some of which look as if they were right.
fn pass(from: &UnixDatagram, to: &UnixDatagram, random: &mut fastrand::Rng) -> bool {
    let mut packet = [0; 2048];
    let Ok(got) = from.recv(&mut packet) else { return false };
    let packet = &mut packet[..got];
    if random.u8(..) < 12 {
        return true;
    }
    let _ = to.send(packet);
    if random.u8(..) < 60 {
        let mut noise = vec![0; random.usize(1..1400)];
        random.fill(&mut noise);
        let _ = to.send(&noise);
        // Ports and tag are right; a part of the rest is not, and so is its check sum.
        let at = random.usize(..packet.len());
        packet[at] ^= 1 << random.u8(..8);
        let _ = to.send(packet);
        let _ = to.send(&packet[..random.usize(1..=packet.len())]);
    }
    true
}

#[test]
fn whatever_comes_by_the_wire_ends_nothing() {
    const SENT: u32 = 400;
    if !is_there("hostile") {
        return;
    }
    let [(near_wire, near_end), (far_wire, far_end)] = [(); 2].map(|()| UnixDatagram::pair().unwrap());
    for socket in [&near_wire, &near_end, &far_wire, &far_end] {
        socket.set_nonblocking(true).unwrap();
    }
    let mut both = [Process::start(&near_wire), Process::start(&far_wire)];
    drop((near_wire, far_wire));
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut random = fastrand::Rng::with_seed(7);
            while !is_over.load(Ordering::Relaxed) {
                let passed = [pass(&near_end, &far_end, &mut random), pass(&far_end, &near_end, &mut random)];
                if passed == [false; 2] {
                    thread::sleep(std::time::Duration::from_micros(200)); // exact: the gap between two looks at the wire
                }
            }
        });
        let number = |number: u32| [&number.to_be_bytes()[..], &[number as u8; 900]].concat();
        let (mut sent, mut got) = ([0_u32; 2], [0_u32; 2]);
        let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            wait_for("all of them", || {
                for (at, process) in both.iter().enumerate() {
                    while sent[at] < SENT && process.try_send(&number(sent[at])) {
                        sent[at] += 1;
                    }
                    while let Some(bytes) = process.try_receive() {
                        assert!(bytes == number(got[at]), "message {} at {at}", got[at]);
                        got[at] += 1;
                    }
                }
                got == [SENT; 2]
            });
        }));
        is_over.store(true, Ordering::Relaxed);
        done.unwrap();
    });
    for process in &mut both {
        assert!(matches!(process.child.try_wait(), Ok(None)));
        // It says nothing but that it goes on.
        loop {
            match process.control.receive::<serde_json::Value>() {
                control::Received::Record(word, _) => {
                    assert_eq!(word, serde_json::json!({ "tell": "alive" }))
                }
                control::Received::Nothing => break,
                other => panic!("{other:?}"),
            }
        }
    }
}
