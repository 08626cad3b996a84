//! Sessions that applications ask for: two daemons in two namespaces, and applications without a privilege, in Rust and in C.

use std::{
    fs,
    io::Read as _,
    os::fd::AsFd as _,
    path::PathBuf,
    process::{Child, Command},
    thread,
    time::{Duration, Instant},
};

use millrace_graft::message::{
    By, Error, Event, Listener, Preconnection, Received, Session, Want, Why, control,
    wire::{Request, Word},
};
use nix::poll::{PollFd, PollFlags, poll};

use crate::site::{CLIENT, LONG, SERVER, Site, inside, wait_for};

const GRAFTS: &str = r#"
interface = ["eth"]
[parameters.repair]
tries = 0
retry_us = 20000
[[graft]]
name = "selective"
functions = ["window", "number", "repair", "acknowledge"]
[[graft]]
name = "newest"
functions = ["number", "order"]
"#;

/// A daemon in a namespace; killed when dropped.
pub struct Host<'a> {
    pub site: &'a Site,
    pub side: usize,
    process: Child,
}

fn settings(side: usize, more: &str) -> String {
    let (local, remote) = if side == 0 { (CLIENT, SERVER) } else { (SERVER, CLIENT) };
    format!(
        "{GRAFTS}\n[[peer]]\nname = \"other\"\nlocal = \"{local}\"\nremote = \"{remote}\"\nkey-file = \"key\"\n\
         ports = \"41000-41006\"\nusers = [\"nobody\"]\n{more}"
    )
}

impl<'a> Host<'a> {
    pub fn start(site: &'a Site, side: usize, more: &str) -> Self {
        Self::start_with(site, side, &settings(side, more))
    }

    pub fn start_with(site: &'a Site, side: usize, settings: &str) -> Self {
        fs::write(site.path("key"), "00112233445566778899aabbccddeeff").unwrap();
        // Whoever may connect has to come to the socket first.
        let open = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        fs::set_permissions(site.directory.path(), open).unwrap();
        let (config, log) = (site.path(&format!("m{side}.toml")), site.path(&format!("m{side}.log")));
        fs::write(&config, settings).unwrap();
        let mut command = Command::new("nsenter");
        command.arg(format!("--net=/run/netns/{}", site.namespaces[side]));
        command.arg(env!("CARGO_BIN_EXE_millrace")).args([
            "graft",
            "packets",
            "run",
            "--http=off",
            "--config",
        ]);
        command.arg(config).arg("--socket").arg(site.path(&format!("c{side}.sock")));
        command.arg("--messages-socket").arg(socket(site, side)).stderr(fs::File::create(&log).unwrap());
        let mut host = Self { site, side, process: command.spawn().unwrap() };
        wait_for("daemon", || {
            assert!(host.process.try_wait().unwrap().is_none(), "{}", host.log());
            host.log().contains("ready").then_some(())
        });
        host
    }

    pub fn log(&self) -> String {
        fs::read_to_string(self.site.path(&format!("m{}.log", self.side))).unwrap()
    }

    pub fn verb(&self, args: &[&str]) -> (bool, String) {
        let mut command = Command::new(env!("CARGO_BIN_EXE_millrace"));
        command.args(["graft", "packets"]).args(args);
        let output = command.arg("--socket").arg(self.site.path(&format!("c{}.sock", self.side))).output();
        let output = output.unwrap();
        (output.status.success(), String::from_utf8([output.stdout, output.stderr].concat()).unwrap())
    }

    fn status(&self) -> millrace_graft::packet::Status {
        serde_json::from_str(&self.verb(&["status", "--json"]).1).unwrap()
    }

    fn lent(&self) -> usize {
        self.status().peers[0].lent
    }

    fn signal(&self, signal: nix::sys::signal::Signal) {
        let id = nix::unistd::Pid::from_raw(self.process.id().cast_signed());
        nix::sys::signal::kill(id, signal).unwrap();
    }
}

impl Drop for Host<'_> {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
        if thread::panicking() {
            println!("--- {}\n{}", self.side, self.log());
        }
    }
}

fn socket(site: &Site, side: usize) -> PathBuf {
    site.path(&format!("m{side}.sock"))
}

fn asks(site: &Site, side: usize, service: &str) -> Preconnection {
    Preconnection::new("other", service).socket(socket(site, side))
}

/// Both daemons, with keys for all sessions.
fn hosts<'a>(site: &'a Site, more: &str) -> [Host<'a>; 2] {
    let hosts = [0, 1].map(|side| Host::start(site, side, more));
    hosts.iter().for_each(wait_for_keys);
    hosts
}

fn wait_for_keys(host: &Host<'_>) {
    wait_for("keys, and the other end", || {
        let status = host.status();
        let is_ready = status.sessions.iter().all(|session| session.has_keys || session.sealed == "clear");
        (is_ready && status.peers[0].round_trip_us.is_some()).then_some(())
    });
}

fn accept(listener: &Listener) -> Session {
    let mut session = listener.accept().unwrap();
    session.set_timeout(Some(LONG));
    session
}

/// A pair of sessions: of who asks for these services, and of who listens.
fn pair(site: &Site, services: &[&str]) -> (Session, Session) {
    let listener = asks(site, 1, "test").listen().unwrap();
    let asked = services.iter().fold(asks(site, 0, "test"), |asks, service| asks.service(*service));
    let mut near = asked.initiate().unwrap();
    near.set_timeout(Some(LONG));
    (near, accept(&listener))
}

fn message(session: &mut Session) -> Vec<u8> {
    match session.receive().unwrap() {
        Received::Message(bytes) => bytes,
        Received::Finished => panic!("it has finished"),
    }
}

fn event(session: &mut Session, wanted: impl Fn(&Event) -> bool) -> Event {
    wait_for("the event", || session.event().unwrap().filter(&wanted))
}

#[test]
fn messages_go_both_ways_and_both_ends_finish() {
    let Some(site) = Site::new("messages") else { return };
    let hosts = hosts(&site, "");
    let (mut near, mut far) = pair(&site, &["reliability"]);
    let agreed = near.agreed().unwrap().clone();
    assert_eq!((agreed.graft.as_str(), agreed.is_sealed), ("selective", true));
    assert_eq!(far.agreed().unwrap().graft, "selective");
    near.send(b"there").unwrap();
    assert_eq!(message(&mut far), b"there");
    far.send(b"and back").unwrap();
    assert_eq!(message(&mut near), b"and back");
    // Of every length, more than a window of them.
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

    // One direction ends, the other one goes on.
    near.finish().unwrap();
    assert!(matches!(near.send(b"more"), Err(Error::Finished)));
    assert_eq!(far.receive().unwrap(), Received::Finished);
    far.send(b"goes on").unwrap();
    assert_eq!(message(&mut near), b"goes on");
    far.send(b"last").unwrap();
    far.close().unwrap();
    assert_eq!(message(&mut near), b"last");
    assert_eq!(near.receive().unwrap(), Received::Finished);
    event(&mut near, |event| matches!(event, Event::Closed { reason } if reason.contains("has closed it")));
    near.close().unwrap();
    for host in &hosts {
        wait_for("both ends to let go", || (host.lent() == 0).then_some(()));
    }
    // Nothing is left for the next one.
    let (mut near, mut far) = pair(&site, &["partial-order"]);
    assert_eq!(near.agreed().unwrap().graft, "newest");
    near.send(b"anew").unwrap();
    assert_eq!(message(&mut far), b"anew");
}
