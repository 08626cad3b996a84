//! Tests with two runtimes, each in a network namespace of its own, with a veth pair between them. They need root.

mod many;
mod paths;
mod sealed;
mod versions;

use std::net::UdpSocket;
use std::process::Command;

use millrace_testkit::StopOnDrop;
use nix::sched::{CloneFlags, setns};
use nix::sys::socket::{setsockopt, sockopt};

use super::*;
use crate::ObjectIdentity;

const LONG: Duration = millrace_testkit::BOUND;
const GRAFTS: &str = r#"
    [sessions]
    interface = ["eth"]
    [[graft]]
    name = "complete"
    functions = ["number", "repair"]
    [[graft]]
    name = "once"
    functions = ["number"]
    fallback = "complete"
"#;

struct RuntimeSite([String; 2]);

impl RuntimeSite {
    /// Creates the network namespaces. Returns `None`, after it has printed SKIP, if the test cannot run on this host.
    fn new(test: &str) -> Option<Self> {
        if !nix::unistd::geteuid().is_root() {
            println!("SKIP {test}: needs root");
            return None;
        }
        let names = ["a", "b"].map(|side| format!("mr-{}-{test}-{side}", std::process::id()));
        names.iter().for_each(|name| ip(&format!("netns add {name}")));
        let [a, b] = &names;
        ip(&format!("-n {a} link add eth type veth peer name eth netns {b}"));
        for (name, host) in [(a, 1), (b, 2)] {
            ip(&format!("-n {name} addr add 10.97.0.{host}/24 dev eth"));
            ip(&format!("-n {name} link set eth up"));
        }
        Some(Self(names))
    }

    fn inside<T: Send>(&self, side: usize, work: impl FnOnce() -> T + Send) -> T {
        std::thread::scope(|scope| {
            let inside = || {
                let file = std::fs::File::open(format!("/run/netns/{}", self.0[side])).expect("a namespace");
                setns(file, CloneFlags::CLONE_NEWNET).expect("setns");
                work()
            };
            scope.spawn(inside).join().expect("work in a namespace")
        })
    }

    fn start(&self, side: usize, grafts: &str) -> Result<PacketRuntime, Error> {
        let settings = settings(side, grafts, "once");
        self.inside(side, || PacketRuntime::start(settings))
    }

    /// Starts both runtimes, and waits until their sessions have keys.
    fn both(&self, grafts: &str) -> [PacketRuntime; 2] {
        let mut runtimes = [0, 1].map(|side| self.start(side, grafts).expect("a runtime"));
        have_keys(self, &mut runtimes);
        runtimes
    }

    fn sockets(&self) -> [UdpSocket; 2] {
        [0, 1].map(|side| {
            let socket = self.inside(side, || UdpSocket::bind(address(side)).expect("bind"));
            socket.connect(address(1 - side)).expect("connect");
            socket.set_read_timeout(Some(LONG)).expect("timeout");
            // A receiver that gets no CPU for a while loses nothing.
            setsockopt(&socket, sockopt::RcvBufForce, &(64 << 20)).expect("room");
            socket
        })
    }

    /// Steps both runtimes until one of them returns the wanted event.
    fn until(
        &self,
        runtimes: &mut [PacketRuntime; 2],
        mut traffic: impl FnMut(),
        wanted: impl Fn(usize, &PacketEvent) -> bool,
    ) -> PacketEvent {
        let until = Instant::now() + LONG;
        while Instant::now() < until {
            traffic();
            relay(runtimes);
            for (side, runtime) in runtimes.iter_mut().enumerate() {
                let events = self.inside(side, || runtime.step(Duration::from_millis(5))).expect("a step");
                if let Some(found) = events.into_iter().find(|event| wanted(side, event)) {
                    return found;
                }
            }
        }
        panic!("it did not happen");
    }
}

impl Drop for RuntimeSite {
    fn drop(&mut self) {
        self.0.iter().for_each(|name| drop(Command::new("ip").args(["netns", "del", name]).status()));
    }
}

/// Replaces the connection between two daemons: messages about keys arrive at once, and a runtime that has just started
/// gets a new connection.
fn relay(runtimes: &mut [PacketRuntime; 2]) {
    if runtimes.iter().any(|runtime| runtime.lines.is_empty()) {
        connect(runtimes);
    }
    for side in 0..2 {
        for (peer, message) in runtimes[side].take_key_messages() {
            runtimes[1 - side].receive_key_message(&peer, &message).expect("heard");
        }
    }
}

/// Makes another connection between the daemons, and returns its secret.
fn connect(runtimes: &mut [PacketRuntime; 2]) -> Exported {
    let exported = Exported(super::sealed::random().expect("random bytes"));
    for runtime in runtimes.iter_mut() {
        runtime.connected("far", &exported).expect("connected");
    }
    exported
}

fn step(site: &RuntimeSite, runtimes: &mut [PacketRuntime; 2]) -> Vec<PacketEvent> {
    relay(runtimes);
    let each = runtimes.iter_mut().enumerate();
    each.flat_map(|(side, runtime)| {
        site.inside(side, || runtime.step(Duration::from_millis(1))).expect("a step")
    })
    .collect()
}

fn have_keys(site: &RuntimeSite, runtimes: &mut [PacketRuntime; 2]) {
    let until = Instant::now() + LONG;
    while !runtimes.iter().all(PacketRuntime::is_open) {
        assert!(Instant::now() < until, "they do not agree on keys");
        step(site, runtimes);
    }
}

fn ip(arguments: &str) {
    let status = Command::new("ip").args(arguments.split(' ')).status().expect("ip");
    assert!(status.success(), "ip {arguments}");
}

fn address(side: usize) -> String {
    format!("10.97.0.{}:7000", side + 1)
}

fn settings(side: usize, grafts: &str, graft: &str) -> Settings {
    settings_with(side, grafts, graft, "clear = true")
}

/// Returns settings with an additional line in `[[session]]`.
fn settings_with(side: usize, grafts: &str, graft: &str, line: &str) -> Settings {
    let local = address(side);
    let remote = address(1 - side);
    let text = format!(
        "{grafts}\n[[session]]\nname = \"s\"\nlocal = \"{local}\"\nremote = \"{remote}\"\npeer = \"far\"\ngraft = \"{graft}\"\n{line}"
    );
    with_peer(side, &text)
}

/// Returns settings in which the other host is a peer.
fn with_peer(side: usize, text: &str) -> Settings {
    let local = side + 1;
    let remote = 2 - side;
    let key = ObjectIdentity::from_image(b"far");
    let text = format!(
        "{text}\n[agreement]\nkey = \"host.key\"\n\
         [[peer]]\nname = \"far\"\nkey = \"{key}\"\n[peer.sessions]\nlocal = \"10.97.0.{local}\"\nremote = \"10.97.0.{remote}\"\nports = \"40000\"\n"
    );
    crate::settings::DaemonSettings::parse(&text, std::path::Path::new(""))
        .and_then(|all| all.into_sessions())
        .expect("settings")
}

/// Returns the status of a runtime. The runtime changes its state only in `step`, which only the test calls. The kernel
/// counts a packet before the packet is sent or delivered.
fn now(runtime: &mut PacketRuntime) -> Status {
    // exact: the runtime's state changes only in `step`, which only this thread calls
    runtime.status().expect("a status")
}

fn graft_of(runtime: &mut PacketRuntime) -> String {
    now(runtime).sessions[0].graft.clone()
}

#[test]
fn datagrams_sent_before_and_after_a_graft_change_arrive() {
    let Some(site) = RuntimeSite::new("swap") else { return };
    let mut runtimes = site.both(GRAFTS);
    let [near, far] = site.sockets();
    near.send(b"before").expect("sent");
    let mut buffer = [0; 100];
    assert_eq!(far.recv(&mut buffer).expect("received"), 6);
    runtimes[0].swap("s", "none").expect_err("no such graft");
    runtimes[0].swap("t", "complete").expect_err("no such session");
    site.inside(0, || runtimes[0].swap("s", "complete")).expect("proposed");
    assert!(matches!(runtimes[0].swap("s", "once"), Err(Error::Busy(_))));
    let swapped = site.until(
        &mut runtimes,
        || (),
        |side, event| side == 0 && matches!(event, PacketEvent::Swapped { .. }),
    );
    assert!(matches!(swapped, PacketEvent::Swapped { graft, took: Some(_), .. } if graft == "complete"));
    assert!(runtimes.iter_mut().all(|runtime| graft_of(runtime) == "complete"));
    for (from, to) in [(&near, &far), (&far, &near)] {
        from.send(b"afterwards").expect("sent");
        let bytes = to.recv(&mut buffer).expect("received");
        assert_eq!(&buffer[..bytes], b"afterwards");
    }
    // A graft (list of packet functions) that an operator's command has chosen stays until the settings change. Even
    // then a change has to wait until no packet of the previous function list can be in flight.
    let apply = |runtimes: &mut [PacketRuntime; 2], graft| {
        let settings = settings(0, GRAFTS, graft);
        site.inside(0, || runtimes[0].apply(settings))
    };
    apply(&mut runtimes, "once").expect("the same");
    assert_eq!(graft_of(&mut runtimes[0]), "complete");
    apply(&mut runtimes, "complete").expect("what is there");
    assert!(matches!(apply(&mut runtimes, "once"), Err(Error::Busy(_))));
    let until = Instant::now() + LONG;
    while apply(&mut runtimes, "once").is_err() {
        assert!(Instant::now() < until, "the epoch before does not end");
        step(&site, &mut runtimes);
    }
    site.until(&mut runtimes, || (), |side, event| side == 0 && matches!(event, PacketEvent::Swapped { .. }));
    assert!(runtimes.iter_mut().all(|runtime| graft_of(runtime) == "once"));
}

#[test]
fn change_to_the_graft_already_in_use_succeeds() {
    let Some(site) = RuntimeSite::new("same") else { return };
    let mut runtimes = site.both(GRAFTS);
    site.inside(0, || runtimes[0].swap("s", "once")).expect("proposed");
    let swapped = site.until(&mut runtimes, || (), |_, event| matches!(event, PacketEvent::Swapped { .. }));
    assert!(matches!(swapped, PacketEvent::Swapped { graft, .. } if graft == "once"));
}

#[test]
fn graft_unknown_to_the_other_end_is_refused() {
    let Some(site) = RuntimeSite::new("refuse") else { return };
    let more = format!("{GRAFTS}\n[[graft]]\nname = \"newest\"\nfunctions = [\"number\", \"order\"]\n");
    let [near, far] = [more.as_str(), GRAFTS];
    let mut runtimes = [site.start(0, near).expect("a runtime"), site.start(1, far).expect("a runtime")];
    site.inside(0, || runtimes[0].swap("s", "newest")).expect("proposed");
    let refused =
        site.until(&mut runtimes, || (), |_, event| matches!(event, PacketEvent::NotSwapped { .. }));
    assert_eq!(
        refused,
        PacketEvent::NotSwapped { session: "s".into(), graft: "newest".into(), why: ListRefusal::Refused }
    );
    assert!(runtimes.iter_mut().all(|runtime| graft_of(runtime) == "once"));
    assert!(now(&mut runtimes[0]).trouble[0].contains("the other end does not have this list"));
}

#[test]
fn graft_over_its_cpu_time_per_packet_is_refused_or_replaced() {
    let Some(site) = RuntimeSite::new("budget") else { return };
    let slow = GRAFTS.replace("fallback", "budget-ns = 1\nfallback");
    let error = site.start(0, &slow).err().expect("over its budget").to_string();
    assert!(error.starts_with("graft once: ") && error.ends_with("and its budget is 1"), "{error}");

    let mut runtimes = site.both(GRAFTS);
    let [near, far] = site.sockets();
    // With a time budget of 1 ns per packet, every function exceeds its budget once packets are sent.
    runtimes[0].live.values_mut().for_each(|live| live.graft.budget_ns = 1);
    let mut buffer = [0; 100];
    let traffic = || {
        for _ in 0..100 {
            near.send(b"payload").expect("sent");
            far.recv(&mut buffer).expect("received");
        }
    };
    let over = site.until(&mut runtimes, traffic, |_, event| matches!(event, PacketEvent::OverBudget { .. }));
    assert!(
        matches!(over, PacketEvent::OverBudget { graft, fallback: Some(fallback), .. } if graft == "once" && fallback == "complete")
    );
    site.until(&mut runtimes, || (), |side, event| side == 0 && matches!(event, PacketEvent::Swapped { .. }));
    assert!(runtimes.iter_mut().all(|runtime| graft_of(runtime) == "complete"));
}

#[test]
fn session_carries_datagrams_again_after_one_end_restarts() {
    let Some(site) = RuntimeSite::new("anew") else { return };
    let mut runtimes = site.both(GRAFTS);
    let sockets = site.sockets();
    let mut buffer = [0; 100];
    let know_each_other = |runtimes: &[PacketRuntime; 2]| {
        runtimes.iter().flat_map(|runtime| runtime.live.values()).all(|live| live.peer.is_some())
    };
    let until = Instant::now() + LONG;
    while !know_each_other(&runtimes) {
        assert!(Instant::now() < until, "they do not hear each other");
        step(&site, &mut runtimes);
    }
    for _ in 0..100 {
        for from in [0, 1] {
            sockets[from].send(b"payload").expect("sent");
            sockets[1 - from].recv(&mut buffer).expect("received");
        }
    }
    let [near, far] = runtimes;
    drop(far);
    let mut runtimes = [near, site.start(1, GRAFTS).expect("a runtime")];
    let restarted =
        site.until(&mut runtimes, || (), |_, event| matches!(event, PacketEvent::Restarted { .. }));
    assert_eq!(restarted, PacketEvent::Restarted { session: "s".into() });
    have_keys(&site, &mut runtimes);
    for from in [0, 1] {
        sockets[from].send(b"afterwards").expect("sent");
        let bytes = sockets[1 - from].recv(&mut buffer).expect("received");
        assert_eq!(&buffer[..bytes], b"afterwards");
    }
}

#[test]
fn dropped_packet_runtime_detaches_its_xdp_program() {
    let Some(site) = RuntimeSite::new("left") else { return };
    let runtime = site.start(0, GRAFTS).expect("a runtime");
    let shows = || {
        let output =
            Command::new("ip").args(["-n", &site.0[0], "link", "show", "dev", "eth"]).output().expect("ip");
        String::from_utf8_lossy(&output.stdout).contains("xdp")
    };
    assert!(shows());
    drop(runtime);
    millrace_testkit::wait_for("nothing to be attached", || !shows());
}

/// The kernel never gives a veth interface the queueing discipline `fq` by default.
#[test]
fn pacing_graft_requires_the_fq_queueing_discipline() {
    let Some(site) = RuntimeSite::new("paces") else { return };
    let paces = format!("{GRAFTS}\n[[graft]]\nname = \"paced\"\nfunctions = [\"pace\", \"number\"]\n");
    let error = site.start(0, &paces).err().expect("another discipline").to_string();
    assert!(
        error.starts_with("graft paced paces, and packets of eth wait in the queueing discipline ")
            && error.ends_with(": `tc qdisc replace dev eth root fq`"),
        "{error}"
    );
    let mut runtime = site.start(0, GRAFTS).expect("nothing paces");
    let trouble = now(&mut runtime).trouble;
    assert_eq!(trouble, Vec::<String>::new());
    let settings = settings(0, &paces, "once");
    let refused = site.inside(0, || runtime.apply(settings)).expect_err("another discipline").to_string();
    assert_eq!(refused, error);
    assert_eq!(now(&mut runtime).trouble, trouble, "all stays as it was");
}
