//! Tests of sessions that applications request: two daemons in two namespaces, and unprivileged applications in Rust
//! and in C.

use std::{
    fs,
    os::fd::AsFd as _,
    path::PathBuf,
    process::{Child, Command},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use millrace_base::control;
use millrace_graft::packet::Status;
use millrace_messages::{
    ChangeOrigin, Error, Listener, Preconnection, Received, Session, SessionEvent, SessionRefusal, Want,
    wire::{BrokerReply, BrokerRequest},
};
use millrace_testkit::show_log_on_panic;
use nix::poll::{PollFd, PollFlags, poll};

use crate::site::{CLIENT, GraftSite, LONG, SERVER, inside, peer, wait_for, wait_until};

pub const GRAFTS: &str = r#"
[sessions]
interface = ["eth"]
[sessions.parameters.repair]
tries = 0
retry_us = 20000
[[graft]]
name = "selective"
functions = ["window", "number", "repair", "acknowledge"]
[[graft]]
name = "newest"
functions = ["number", "order"]
"#;

/// A graft daemon in a network namespace; killed when dropped.
pub struct MessageHost<'a> {
    pub site: &'a GraftSite,
    pub side: usize,
    pub process: Child,
}

fn settings(side: usize, more: &str) -> String {
    let (local, remote) = if side == 0 { (CLIENT, SERVER) } else { (SERVER, CLIENT) };
    format!("{GRAFTS}\n{}ports = \"41000-41006\"\nusers = [\"nobody\"]\n{more}", peer(local, remote))
}

impl<'a> MessageHost<'a> {
    pub fn start(site: &'a GraftSite, side: usize, more: &str) -> Self {
        Self::start_with(site, side, &settings(side, more))
    }

    pub fn start_with(site: &'a GraftSite, side: usize, settings: &str) -> Self {
        Self::start_in(site, side, settings, &[])
    }

    /// Starts the daemon through the command `before`, which runs the rest of its command line.
    pub fn start_in(site: &'a GraftSite, side: usize, settings: &str, before: &[&str]) -> Self {
        site.put_key();
        // An unprivileged application must be able to reach the socket's directory.
        let open = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        fs::set_permissions(site.directory.path(), open).unwrap();
        let config = site.path(&format!("m{side}.toml"));
        let log = site.path(&format!("m{side}.log"));
        fs::write(&config, settings).unwrap();
        let mut command = Command::new("nsenter");
        command.arg(format!("--net=/run/netns/{}", site.namespaces[side])).args(before);
        command.arg(env!("CARGO_BIN_EXE_millrace")).args(["graft", "run", "--http=off", "--config"]);
        command.arg(config).arg("--socket").arg(site.path(&format!("c{side}.sock")));
        command.arg("--messages-socket").arg(socket(site, side)).stderr(fs::File::create(&log).unwrap());
        let mut host = Self { site, side, process: command.spawn().unwrap() };
        wait_for("a daemon that is ready", || {
            assert!(host.process.try_wait().unwrap().is_none(), "{}", host.log());
            host.log().contains("ready")
        });
        host
    }

    pub fn log(&self) -> String {
        fs::read_to_string(self.site.path(&format!("m{}.log", self.side))).unwrap()
    }

    pub fn verb(&self, args: &[&str]) -> (bool, String) {
        let mut command = Command::new(env!("CARGO_BIN_EXE_millrace"));
        command.arg("graft").args(args);
        let output = command.arg("--socket").arg(self.site.path(&format!("c{}.sock", self.side))).output();
        let output = output.unwrap();
        (output.status.success(), String::from_utf8([output.stdout, output.stderr].concat()).unwrap())
    }

    pub fn status(&self) -> Status {
        // A daemon that has just started may not answer yet, so the request is repeated.
        let answer = wait_for("an answer", || match self.verb(&["sessions", "status", "--json"]) {
            (true, answer) => Ok(answer),
            (false, error) => Err(error),
        });
        serde_json::from_str(&answer).unwrap_or_else(|error| panic!("{error}: {answer}"))
    }

    pub fn lent(&self) -> usize {
        // exact: callers repeat this read until the number of sockets that applications use is as expected
        self.status().peers[0].lent
    }

    /// Returns the process ID of the daemon's child process (part) that handles sessions.
    pub fn part(&self) -> u32 {
        crate::site::part(&self.verb(&["status", "--json"]).1, "sessions")
    }

    pub fn signal(&self, signal: nix::sys::signal::Signal) {
        let id = nix::unistd::Pid::from_raw(self.process.id().cast_signed());
        nix::sys::signal::kill(id, signal).unwrap();
    }
}

impl Drop for MessageHost<'_> {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
        let side = self.side;
        show_log_on_panic(&format!("the daemon of side {side}"), &self.site.path(&format!("m{side}.log")));
    }
}

pub fn socket(site: &GraftSite, side: usize) -> PathBuf {
    site.path(&format!("m{side}.sock"))
}

pub fn asks(site: &GraftSite, side: usize, service: &str) -> Preconnection {
    Preconnection::new("other", service).socket(socket(site, side))
}

/// Starts both daemons, and waits until they have keys for all sessions.
pub fn hosts<'a>(site: &'a GraftSite, more: &str) -> [MessageHost<'a>; 2] {
    let hosts = [0, 1].map(|side| MessageHost::start(site, side, more));
    hosts.iter().for_each(wait_for_keys);
    hosts
}

pub fn wait_for_keys(host: &MessageHost<'_>) {
    let is_ready = |status: &Status| {
        let have_keys = status.sessions.iter().all(|session| session.has_keys);
        have_keys && status.peers[0].round_trip_us.is_some()
    };
    wait_until("keys, and the other end", || host.status(), is_ready);
}

pub fn accept(listener: &Listener) -> Session {
    let mut session = listener.accept().unwrap();
    session.set_timeout(Some(LONG));
    session
}

/// Opens a message session that requests `services`, for example `reliability`. Returns both ends; the end that
/// requested the session is first.
pub fn pair(site: &GraftSite, services: &[&str]) -> (Session, Session) {
    // The daemon may not have noticed yet that the listener of an earlier pair has ended.
    let listener = wait_for("the service to be free", || asks(site, 1, "test").listen());
    let asked = services.iter().fold(asks(site, 0, "test"), |asks, service| asks.service(*service));
    let mut near = asked.initiate().unwrap();
    near.set_timeout(Some(LONG));
    (near, accept(&listener))
}

pub fn message(session: &mut Session) -> Vec<u8> {
    match session.receive().unwrap() {
        Received::Message(bytes) => bytes,
        Received::Finished => panic!("the session has finished"),
    }
}

pub fn event(session: &mut Session, wanted: impl Fn(&SessionEvent) -> bool) -> SessionEvent {
    let mut others = Vec::new();
    wait_for("an event", || match session.event().unwrap() {
        Some(event) if wanted(&event) => Ok(event),
        other => {
            others.extend(other);
            Err(format!("only {others:?}"))
        }
    })
}

/// Waits until all events of a message session (such as a change of its graft) were read and no more arrive.
pub fn wait_for_silence(session: &mut Session) {
    wait_for("silence", || {
        let mut is_silent = true;
        while poll(&mut [PollFd::new(session.as_fd(), PollFlags::POLLIN)], 50_u16).unwrap() == 1 {
            assert!(session.event().unwrap().is_none());
            is_silent = false;
        }
        is_silent
    });
}

#[test]
fn messages_pass_in_both_directions_until_both_ends_finish() {
    let Some(site) = GraftSite::new("messages") else { return };
    let hosts = hosts(&site, "");
    let (mut near, mut far) = pair(&site, &["reliability"]);
    let agreed = near.agreed().unwrap().clone();
    assert_eq!((agreed.graft.as_str(), agreed.is_sealed), ("selective", true));
    assert_eq!(far.agreed().unwrap().graft, "selective");
    near.send(b"there").unwrap();
    assert_eq!(message(&mut far), b"there");
    far.send(b"and back").unwrap();
    assert_eq!(message(&mut near), b"and back");
    // Messages of many lengths are sent. Together they are larger than the session's window.
    let long: Vec<u8> = (0..1 << 20).map(|at: u32| (at % 251) as u8).collect();
    let sent = long.clone();
    let sender = thread::spawn(move || {
        for length in [0, 1, 1190, 1191, 100_000, 1 << 20] {
            near.send(&sent[..length]).unwrap();
        }
        near
    });
    let mut got: Vec<_> = (0..6).map(|_| message(&mut far).len()).collect();
    let mut near = sender.join().unwrap();
    got.sort_unstable();
    assert_eq!(got, [0, 1, 1190, 1191, 100_000, 1 << 20]);
    assert!(matches!(near.send(&vec![0; (1 << 20) + 1]), Err(Error::TooLong { .. })));

    // One end of the session stops sending, and the opposite direction continues.
    near.finish().unwrap();
    assert!(matches!(near.send(b"more"), Err(Error::Finished)));
    assert_eq!(far.receive().unwrap(), Received::Finished);
    far.send(b"goes on").unwrap();
    assert_eq!(message(&mut near), b"goes on");
    far.send(b"last").unwrap();
    far.close().unwrap();
    assert_eq!(message(&mut near), b"last");
    assert_eq!(near.receive().unwrap(), Received::Finished);
    event(
        &mut near,
        |event| matches!(event, SessionEvent::Closed { reason } if reason.contains("has closed it")),
    );
    near.close().unwrap();
    for host in &hosts {
        wait_until("both ends to release the session", || host.lent(), |lent| *lent == 0);
    }
    // The next session must start without state or packets of the session before.
    let (mut near, mut far) = pair(&site, &["partial-order"]);
    assert_eq!(near.agreed().unwrap().graft, "newest");
    near.send(b"anew").unwrap();
    assert_eq!(message(&mut far), b"anew");
}

#[test]
fn impossible_session_services_are_refused_and_a_session_changes_graft() {
    let Some(site) = GraftSite::new("renegotiate") else { return };
    let _hosts = hosts(&site, "");
    let refused = |asks: Preconnection, wanted: SessionRefusal, words: &str| match asks.initiate() {
        Err(Error::Refused { why, reason }) => {
            assert_eq!(why, wanted, "{reason}");
            assert!(reason.contains(words), "{reason}");
        }
        other => panic!("{other:?}"),
    };
    let asks = |service: &str| asks(&site, 0, "test").service(service);
    refused(asks("recovery"), SessionRefusal::Impossible, "no graft of the settings has recovery");
    refused(asks("teleport"), SessionRefusal::Impossible, "there is no service teleport");
    refused(asks("encryption"), SessionRefusal::Redundant, "sealed anyway");
    refused(
        asks("reliability").service("partial-reliability"),
        SessionRefusal::Redundant,
        "includes partial-reliability",
    );
    refused(
        asks("once").max_delay_ms(0),
        SessionRefusal::Impossible,
        "half of the round trip that was measured",
    );
    refused(asks("once").max_loss_percent(-1.0), SessionRefusal::Malformed, "max_loss");
    refused(asks("reliability"), SessionRefusal::Unknown, "no application listens for test");
    let nobody = Preconnection::new("nobody", "test").socket(socket(&site, 0));
    refused(nobody, SessionRefusal::Unknown, "there are: other");

    let (mut near, mut far) = pair(&site, &["partial-order"]);
    let want = |service: &str| Want { services: [service.to_owned()].into(), ..Want::default() };
    for (service, graft) in [("reliability", "selective"), ("partial-order", "newest")] {
        let before = Instant::now();
        near.renegotiate(want(service)).unwrap();
        let mut sent = 0_u32;
        let mut got = Vec::new();
        far.set_nonblocking(true);
        let mut read = |got: &mut Vec<_>| {
            while let Ok(Received::Message(bytes)) = far.receive() {
                got.push(u32::from_be_bytes(bytes.try_into().unwrap()));
            }
        };
        // The change of the graft must lose no message that was sent before, during or after it.
        let changed = loop {
            near.send(&sent.to_be_bytes()).unwrap();
            sent += 1;
            read(&mut got);
            match near.event().unwrap() {
                Some(SessionEvent::Changed { graft, by, .. }) => break (graft, by),
                Some(other) => panic!("{other:?}"),
                // exact: this pause between two messages sets the sending rate
                None => thread::sleep(Duration::from_millis(1)),
            }
            assert!(before.elapsed() < LONG);
        };
        assert_eq!(changed, (graft.to_owned(), ChangeOrigin::Application));
        for _ in 0..10 {
            near.send(&sent.to_be_bytes()).unwrap();
            sent += 1;
        }
        wait_for("all messages", || {
            read(&mut got);
            got.len() >= sent as usize
        });
        got.sort_unstable();
        assert!(got.iter().copied().eq(0..sent), "{sent} sent, {} came", got.len());
        let theirs = event(&mut far, |event| matches!(event, SessionEvent::Changed { .. }));
        assert!(
            matches!(theirs, SessionEvent::Changed { by: ChangeOrigin::Other, graft: name, .. } if name == graft)
        );
    }
    near.renegotiate(want("partial-order")).unwrap();
    let refused = event(&mut near, |event| matches!(event, SessionEvent::Refused { .. }));
    assert!(matches!(refused, SessionEvent::Refused { why: SessionRefusal::Redundant, .. }), "{refused:?}");
}

/// Each user gets only the sessions that the settings allow, whatever services (such as reliability) the listening
/// application offers.
#[test]
fn sessions_are_limited_to_allowed_users() {
    let Some(site) = GraftSite::new("allowed") else { return };
    let [near, _far] = hosts(&site, "sessions-per-user = 2\n");
    assert!(unprivileged(&site, "daemon", "others").contains("NotAllowed"));
    let listener = asks(&site, 1, "test").listen().unwrap();
    let again = asks(&site, 1, "test").listen().expect_err("one listens");
    assert!(matches!(again, Error::Refused { why: SessionRefusal::Exhausted, .. }), "{again}");
    let mut open: Vec<_> = (0..2).map(|_| asks(&site, 0, "test").initiate().unwrap()).collect();
    let one_more = asks(&site, 0, "test").initiate().expect_err("a third session was opened");
    let reason = one_more.to_string();
    assert!(reason.contains("sessions-per-user of the daemon's settings is 2"), "{reason}");
    let mut theirs: Vec<_> = open.iter().map(|_| accept(&listener)).collect();
    open.pop();
    theirs.clear();
    wait_until("room", || near.lent(), |lent| *lent <= 1);
    open.clear();
    wait_until("all sockets to be given back", || near.lent(), |lent| *lent == 0);
}

/// With a pool of six sockets, each host can open three sessions at the same time. When some end, others can be opened.
#[test]
fn exhausted_session_pool_recovers() {
    let Some(site) = GraftSite::new("exhausted") else { return };
    let [near, far] = hosts(&site, "");
    let listener = asks(&site, 1, "test").listen().unwrap();
    let mut open: Vec<_> = (0..3).map(|_| asks(&site, 0, "test").initiate().unwrap()).collect();
    let theirs: Vec<_> = open.iter().map(|_| accept(&listener)).collect();
    let one_more = asks(&site, 0, "test").initiate().expect_err("a fourth session was opened");
    assert!(matches!(one_more, Error::Refused { why: SessionRefusal::Exhausted, .. }), "{one_more}");
    drop(theirs);
    let closed = event(&mut open[0], |event| matches!(event, SessionEvent::Closed { .. }));
    assert!(matches!(closed, SessionEvent::Closed { reason } if reason.contains("has gone")));
    assert!(matches!(open[0].send(b"x"), Err(Error::Over(_))));
    open.clear();
    for host in [&near, &far] {
        wait_until("all sockets to be given back", || host.lent(), |lent| *lent == 0);
    }
    let (mut near, mut far) = {
        let near = asks(&site, 0, "test").initiate().unwrap();
        (near, accept(&listener))
    };
    near.send(b"again").unwrap();
    assert_eq!(message(&mut far), b"again");
}

/// An application that keeps a session's socket open after the session can send nothing with it, and no other session
/// gets the socket's port.
#[test]
fn socket_kept_after_its_session_sends_nothing() {
    let Some(site) = GraftSite::new("kept") else { return };
    let [near, _far] = hosts(&site, "");
    let listener = asks(&site, 1, "test").listen().unwrap();
    let (control, kept) = raw(&site, 0, "test");
    let mut far = accept(&listener);
    drop(control);
    assert!(matches!(far.receive(), Err(Error::Over(_))));
    wait_for("the end", || kept.send(b"more").is_err());
    drop(far);
    wait_until("the other end", || near.lent(), |lent| *lent == 0);
    // Two of the pool's sockets are free. The application still holds the third one.
    let open: Vec<_> = (0..2).map(|_| asks(&site, 0, "test").initiate().unwrap()).collect();
    let one_more =
        asks(&site, 0, "test").initiate().expect_err("a session was opened although all sockets are held");
    assert!(matches!(one_more, Error::Refused { why: SessionRefusal::Exhausted, .. }), "{one_more}");
    drop(kept);
    let third = wait_for("the third socket to be free", || asks(&site, 0, "test").initiate().ok());
    drop((open, third));
}

/// Opens a session's socket without the library.
pub fn raw(site: &GraftSite, side: usize, service: &str) -> (control::ControlEnd, std::net::UdpSocket) {
    let control = control::ControlEnd::connect(&socket(site, side)).unwrap();
    let peer = "other".to_owned();
    let service = service.to_owned();
    let want = Want::default();
    control.send(&BrokerRequest::Open { peer, service, want }, &[]).unwrap();
    let socket = wait_for("a session", || match control.receive::<BrokerReply>() {
        control::ControlReceived::Record(BrokerReply::Opened(_), mut descriptors) => descriptors.pop(),
        control::ControlReceived::Nothing => None,
        other => panic!("{other:?}"),
    });
    (control, socket.into())
}

/// Garbage arrives at the daemon's socket, and in a session from a peer with a valid key. The daemon and the session
/// must continue.
#[test]
fn malformed_local_and_peer_messages_end_neither_daemon_nor_session() {
    use rustix::net::{AddressFamily, SendFlags, SocketAddrUnix, SocketType, connect, send, socket as make};
    let Some(site) = GraftSite::new("garbage") else { return };
    let [near, _far] = hosts(&site, "");
    let address = SocketAddrUnix::new(socket(&site, 0)).unwrap();
    let mut kept = Vec::new();
    for record in [&b"{"[..], b"\xff\xff", b"{\"do\":\"finish\",\"messages\":1}", &[b'x'; 60_000], b"[]"] {
        let one = make(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
        connect(&one, &address).unwrap();
        send(&one, record, SendFlags::empty()).unwrap();
        kept.push(one);
    }
    // A user opens more connections to the daemon than the limit per user. The daemon closes the connections beyond the
    // limit.
    kept.extend((0..200).map(|_| {
        let one = make(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
        let _ = connect(&one, &address);
        one
    }));
    // exact: garbage messages add nothing to the daemon's list of problems, so the list stays empty
    let trouble = || near.status().trouble;
    assert_eq!(trouble(), Vec::<String>::new());
    drop(kept);
    let listener = asks(&site, 1, "test").listen().unwrap();
    let (control, hostile) = wait_for("room", || {
        let asked = asks(&site, 0, "test").initiate();
        drop(asked.ok()?);
        Some(raw(&site, 0, "test"))
    });
    assert_eq!(trouble(), Vec::<String>::new());
    let mut far = accept(&listener);
    event(&mut far, |event| matches!(event, SessionEvent::Closed { .. }));
    let mut far = accept(&listener);
    far.set_nonblocking(true);
    // The peer sends the first datagrams of messages whose other datagrams never follow, and datagrams that belong to
    // no message.
    let mut random = fastrand::Rng::with_seed(7);
    for number in 0..3000_u32 {
        let mut datagram = vec![1, 0, 0, 0, 0xff, 0xff];
        datagram.extend(number.to_be_bytes());
        datagram.extend([0; 1000]);
        let _ = hostile.send(&datagram);
        let _ = hostile.send(&std::iter::repeat_with(|| random.u8(..)).take(40).collect::<Vec<_>>());
        let _ = hostile.send(&[]);
        match far.receive() {
            Err(Error::WouldBlock) | Ok(Received::Message(_)) => {}
            other => panic!("{other:?}"),
        }
    }
    let lost = wait_for("messages that are given up", || {
        let _ = far.receive();
        far.event().unwrap()
    });
    assert!(matches!(lost, SessionEvent::Lost(1..)), "{lost:?}");
    hostile.send(&[&[1, 0, 0, 0, 0, 1, 0, 0, 0x0b, 0xb8][..], b"whole"].concat()).unwrap();
    wait_for(
        "a whole message",
        || matches!(far.receive(), Ok(Received::Message(bytes)) if bytes == b"whole"),
    );
    drop(control);
}

#[test]
fn nonblocking_session_returns_would_block_until_poll_reports_it_ready() {
    let Some(site) = GraftSite::new("polled") else { return };
    let _hosts = hosts(&site, "");
    let (mut near, mut far) = pair(&site, &["reliability"]);
    near.set_nonblocking(true);
    far.set_nonblocking(true);
    assert!(matches!(far.receive(), Err(Error::WouldBlock)));
    let readable = |session: &Session, ms: u16| {
        poll(&mut [PollFd::new(session.as_fd(), PollFlags::POLLIN)], ms).unwrap() == 1
    };
    wait_for_silence(&mut far);
    assert!(!readable(&far, 50), "the session is readable without a message");
    // The peer does not read, so after some messages the session's flow-control window is full.
    let mut sent = 0_u32;
    let message = |number: u32| [&number.to_be_bytes()[..], &[7; 5000]].concat();
    let begin = Instant::now();
    loop {
        match near.send(&message(sent)) {
            Ok(()) => sent += 1,
            Err(Error::WouldBlock) => break,
            Err(error) => panic!("{error}"),
        }
        assert!(begin.elapsed() < LONG, "the window never fills");
    }
    assert!(readable(&near, 60_000), "the session did not become readable for another try");
    // All messages must arrive, although nobody has read so far.
    let mut got = std::collections::BTreeSet::new();
    let mut to_send = sent..sent + 200;
    let until = Instant::now() + LONG;
    let mut next = to_send.next();
    while got.len() < sent as usize + 200 {
        assert!(Instant::now() < until, "{} of {}", got.len(), sent + 200);
        if let Some(number) = next
            && near.send(&message(number)).is_ok()
        {
            next = to_send.next();
        }
        let _ = near.receive();
        match far.receive() {
            Ok(Received::Message(bytes)) => {
                let number = u32::from_be_bytes(*bytes.first_chunk().unwrap());
                assert!(bytes == message(number) && got.insert(number), "message {number}");
            }
            Err(Error::WouldBlock) => {}
            other => panic!("{other:?}"),
        }
    }
    near.set_nonblocking(false);
    near.set_timeout(Some(Duration::from_millis(20)));
    assert!(matches!(near.receive(), Err(Error::TimedOut)));
}

// --- Applications without privileges, and sessions whose daemon has ended ---

/// Runs this test program as another user, and returns its output. `what` selects the action of
/// `application_process_of_the_messages_tests`.
pub fn unprivileged(site: &GraftSite, user: &str, what: &str) -> String {
    let program = site.path("application");
    if !program.exists() {
        fs::copy(std::env::current_exe().unwrap(), &program).unwrap();
    }
    let mut command = Command::new("setpriv");
    command.args(["--reuid", user, "--regid", "nogroup", "--clear-groups", "--no-new-privs"]).arg(program);
    command.args([
        "--exact",
        "messages::application_process_of_the_messages_tests",
        "--ignored",
        "--nocapture",
    ]);
    command.env("APPLICATION", what).env("SOCKETS", site.directory.path());
    let output = command.output().unwrap();
    let said = String::from_utf8([output.stdout, output.stderr].concat()).unwrap();
    assert!(output.status.success(), "{said}");
    said
}

/// Runs as the application process that `unprivileged` starts.
#[test]
#[ignore = "helper: other tests run it as another user"]
fn application_process_of_the_messages_tests() {
    let Ok(what) = std::env::var("APPLICATION") else { return };
    let directory = PathBuf::from(std::env::var("SOCKETS").unwrap());
    let asks =
        |side: usize| Preconnection::new("other", "test").socket(directory.join(format!("m{side}.sock")));
    assert_ne!(nix::unistd::geteuid().as_raw(), 0);
    if what == "others" {
        let refused = asks(0).initiate().expect_err("not allowed");
        assert!(refused.to_string().contains("may not open sessions with peer"), "{refused}");
        return println!("{refused:?}");
    }
    let listener = asks(1).listen().unwrap();
    let mut near = asks(0).service("reliability").initiate().unwrap();
    let mut far = accept(&listener);
    near.send(&[7; 50_000]).unwrap();
    assert_eq!(message(&mut far), [7; 50_000]);
    near.close().unwrap();
    assert_eq!(far.receive().unwrap(), Received::Finished);
    println!("all of it as user {}", nix::unistd::geteuid());
}

#[test]
fn an_unprivileged_application_has_sessions() {
    let Some(site) = GraftSite::new("nobody") else { return };
    let _hosts = hosts(&site, "");
    assert!(unprivileged(&site, "nobody", "pair").contains("all of it as user 65534"));
}

/// Captures all packets that leave an interface.
pub struct InterfaceCapture(std::os::fd::OwnedFd);

impl InterfaceCapture {
    pub fn new(site: &GraftSite, side: usize) -> Self {
        use nix::sys::socket::{
            AddressFamily, SockFlag, SockProtocol, SockType, setsockopt, socket, sockopt,
        };
        let made = inside(&site.namespaces[side], || {
            socket(AddressFamily::Packet, SockType::Raw, SockFlag::SOCK_NONBLOCK, SockProtocol::EthAll)
                .unwrap()
        });
        setsockopt(&made, sockopt::RcvBufForce, &(64 << 20)).unwrap();
        Self(made)
    }

    /// Returns the number of captured packets, and of those that contain these bytes.
    pub fn count(&self, bytes: &[u8]) -> (usize, usize) {
        let mut all = 0;
        let mut with = 0;
        let mut buffer = [0; 2048];
        while let Ok(got) = nix::sys::socket::recv(
            std::os::fd::AsRawFd::as_raw_fd(&self.0),
            &mut buffer,
            nix::sys::socket::MsgFlags::empty(),
        ) {
            all += 1;
            with += usize::from(buffer[..got].windows(bytes.len()).any(|window| window == bytes));
        }
        (all, with)
    }
}

/// An application sends with the session's socket as fast as it can, without the library. No packet may be in clear,
/// neither while the daemon dies nor afterwards.
#[test]
fn killed_daemon_sends_nothing_in_clear() {
    const SECRET: &[u8] = b"what nobody else is to read";
    let Some(site) = GraftSite::new("killed") else { return };
    let [near, _far] = hosts(&site, "");
    let listener = asks(&site, 1, "test").listen().unwrap();
    let mut session = asks(&site, 0, "test").initiate().unwrap();
    let mut far = accept(&listener);
    let (control, socket) = raw(&site, 0, "test");
    let local = socket.local_addr().unwrap();
    let remote = socket.peer_addr().unwrap();
    let capture = InterfaceCapture::new(&site, 0);
    let sent = Arc::new(AtomicU64::new(0));
    let counts = sent.clone();
    let sender = thread::spawn(move || {
        loop {
            match socket.send(SECRET) {
                Ok(_) => counts.fetch_add(1, Ordering::Relaxed),
                Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => return,
                // Any error except EPIPE means that the window is full, or that the peer has closed its socket.
                Err(_) => continue,
            };
        }
    });
    session.send(SECRET).unwrap();
    assert_eq!(message(&mut far), SECRET);
    wait_for("something to be sent", || sent.load(Ordering::Relaxed) > 0);
    near.signal(nix::sys::signal::Signal::SIGKILL);
    sender.join().unwrap();
    let over = wait_for("the library to notice", || session.send(SECRET).err());
    assert!(matches!(over, Error::Over(_)), "{over}");
    event(
        &mut session,
        |event| matches!(event, SessionEvent::Closed { reason } if reason.contains("daemon has closed")),
    );
    let (all, clear) = capture.count(SECRET);
    assert!(all > 0 && clear == 0, "{clear} of {all} packets in clear");
    // A check of the capture itself: a packet sent without the daemon must be found in clear.
    drop((session, control));
    let plain =
        inside(&site.namespaces[0], || wait_for("the port", || std::net::UdpSocket::bind(local).ok()));
    wait_for("the sealing program to be detached", || {
        let _ = plain.send_to(SECRET, remote);
        capture.count(SECRET).1 > 0
    });
    // The peer must close its end of the session when it receives no messages for some time.
    event(
        &mut far,
        |event| matches!(event, SessionEvent::Closed { reason } if reason.contains("no message came")),
    );
}

/// The peer's daemon is restarted, and has no state of the session any more.
#[test]
fn session_ends_when_the_peers_daemon_restarts() {
    let Some(site) = GraftSite::new("anew") else { return };
    let [near, far] = hosts(&site, "");
    let (mut ours, _theirs) = pair(&site, &["reliability"]);
    drop(far);
    let far = MessageHost::start(&site, 1, "");
    event(&mut ours, |event| matches!(event, SessionEvent::Closed { .. }));
    drop(ours);
    wait_for_keys(&far);
    wait_until("the first session's socket to be given back", || near.lent(), |lent| *lent == 0);
    let (mut near, mut far) = pair(&site, &["reliability"]);
    near.send(b"again").unwrap();
    assert_eq!(message(&mut far), b"again");
}

/// A short queue loses packets of a fast sender. The loss exceeds the session's limit, so the session changes to a
/// graft that retransmits.
#[test]
fn session_that_exceeds_its_loss_limit_changes_its_graft() {
    let Some(site) = GraftSite::new("violated") else { return };
    let _hosts = hosts(&site, "");
    let listener = asks(&site, 1, "test").listen().unwrap();
    let asked = asks(&site, 0, "test").service("once").max_loss_percent(1.0).adapt(true);
    let mut near = asked.initiate().unwrap();
    let mut far = accept(&listener);
    assert_eq!(near.agreed().unwrap().graft, "newest");
    let tc = |arguments: &str| {
        let inside = format!("netns exec {} tc {arguments}", site.namespaces[0]);
        crate::site::ip(&inside);
    };
    tc("qdisc add dev eth root tbf rate 1mbit burst 4k limit 6k");
    let begin = Instant::now();
    let mut seen = Vec::new();
    near.set_nonblocking(true);
    far.set_nonblocking(true);
    while !seen.iter().any(|event| matches!(event, SessionEvent::Changed { .. })) {
        let _ = near.send(&[7; 1000]);
        let _ = far.receive();
        seen.extend(near.event().unwrap());
        // exact: this pause between two messages sets the sending rate
        thread::sleep(Duration::from_millis(1));
        assert!(begin.elapsed() < LONG, "{seen:?}");
    }
    let violated = |event: &SessionEvent| matches!(event, SessionEvent::Violated(it) if it.what == "max_loss" && it.measured > 1.0);
    assert!(seen.iter().any(violated), "{seen:?}");
    let changed = seen.iter().find(|event| matches!(event, SessionEvent::Changed { .. }));
    assert!(
        matches!(changed, Some(SessionEvent::Changed { graft, by: ChangeOrigin::Adaption, .. }) if graft == "selective"),
        "{seen:?}"
    );
    tc("qdisc del dev eth root");
    near.set_nonblocking(false);
    far.set_nonblocking(false);
    near.send(b"goes on").unwrap();
    while message(&mut far) != b"goes on" {}
}
