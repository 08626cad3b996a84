//! Two runtimes, each in a namespace of its own, with a cable between them. Needs root.

mod hearing;
mod many;
mod paths;
mod sealed;
mod versions;

use std::net::{SocketAddr, UdpSocket};
use std::process::Command;

use nix::sched::{CloneFlags, setns};

use super::*;

const LONG: Duration = millrace_testkit::BOUND;
const GRAFTS: &str = r#"
    interface = ["eth"]
    [[graft]]
    name = "complete"
    functions = ["number", "repair"]
    [[graft]]
    name = "once"
    functions = ["number"]
    fallback = "complete"
"#;

struct Site([String; 2]);

impl Site {
    /// `None`: not here, which was said.
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

    fn start(&self, side: usize, grafts: &str) -> Result<Runtime, Error> {
        let settings = settings(side, grafts, "once");
        self.inside(side, || Runtime::start(settings))
    }

    fn sockets(&self) -> [UdpSocket; 2] {
        [0, 1].map(|side| {
            let socket = self.inside(side, || UdpSocket::bind(address(side)).expect("bind"));
            socket.connect(address(1 - side)).expect("connect");
            socket.set_read_timeout(Some(LONG)).expect("timeout");
            socket
        })
    }

    /// Both work until one of them says what is wanted.
    fn until(
        &self,
        runtimes: &mut [Runtime; 2],
        mut traffic: impl FnMut(),
        wanted: impl Fn(usize, &Event) -> bool,
    ) -> Event {
        let until = Instant::now() + LONG;
        while Instant::now() < until {
            traffic();
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

impl Drop for Site {
    fn drop(&mut self) {
        self.0.iter().for_each(|name| drop(Command::new("ip").args(["netns", "del", name]).status()));
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

/// With another line of the session.
fn settings_with(side: usize, grafts: &str, graft: &str, line: &str) -> Settings {
    let directory = tempfile::tempdir().expect("a directory");
    std::fs::write(directory.path().join("key"), "00112233445566778899aabbccddeeff").expect("a key");
    let (local, remote) = (address(side), address(1 - side));
    let text = format!(
        "{grafts}\n[[session]]\nname = \"s\"\nlocal = \"{local}\"\nremote = \"{remote}\"\nkey-file = \"key\"\ngraft = \"{graft}\"\n{line}"
    );
    Settings::parse(&text, directory.path()).expect("settings")
}

/// What a runtime knows changes with its next step, which a test makes. The kernel counts a packet before it is sent, or comes.
fn now(runtime: &mut Runtime) -> Status {
    runtime.status().expect("a status") // exact: nobody makes a step, and what is counted has been read
}

fn graft_of(runtime: &mut Runtime) -> String {
    now(runtime).sessions[0].graft.clone()
}

#[test]
fn both_ends_change_and_what_was_sent_before_arrives() {
    let Some(site) = Site::new("swap") else { return };
    let mut runtimes = [0, 1].map(|side| site.start(side, GRAFTS).expect("a runtime"));
    let [near, far] = site.sockets();
    near.send(b"before").expect("sent");
    let mut buffer = [0; 100];
    assert_eq!(far.recv(&mut buffer).expect("received"), 6);
    runtimes[0].swap("s", "none").expect_err("no such graft");
    runtimes[0].swap("t", "complete").expect_err("no such session");
    site.inside(0, || runtimes[0].swap("s", "complete")).expect("proposed");
    assert!(matches!(runtimes[0].swap("s", "once"), Err(Error::Busy(_))));
    let swapped =
        site.until(&mut runtimes, || (), |side, event| side == 0 && matches!(event, Event::Swapped { .. }));
    assert!(matches!(swapped, Event::Swapped { graft, took: Some(_), .. } if graft == "complete"));
    assert!(runtimes.iter_mut().all(|runtime| graft_of(runtime) == "complete"));
    for (from, to) in [(&near, &far), (&far, &near)] {
        from.send(b"afterwards").expect("sent");
        let bytes = to.recv(&mut buffer).expect("received");
        assert_eq!(&buffer[..bytes], b"afterwards");
    }
    // What a command has changed stays, until the settings change: then as soon as the epoch before is over.
    let apply = |runtimes: &mut [Runtime; 2], graft| {
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
        for (side, runtime) in runtimes.iter_mut().enumerate() {
            site.inside(side, || runtime.step(Duration::from_millis(5))).expect("a step");
        }
    }
    site.until(&mut runtimes, || (), |side, event| side == 0 && matches!(event, Event::Swapped { .. }));
    assert!(runtimes.iter_mut().all(|runtime| graft_of(runtime) == "once"));
}

#[test]
fn who_asks_for_the_graft_that_is_there_is_told_so() {
    let Some(site) = Site::new("same") else { return };
    let mut runtimes = [0, 1].map(|side| site.start(side, GRAFTS).expect("a runtime"));
    site.inside(0, || runtimes[0].swap("s", "once")).expect("proposed");
    let swapped = site.until(&mut runtimes, || (), |_, event| matches!(event, Event::Swapped { .. }));
    assert!(matches!(swapped, Event::Swapped { graft, .. } if graft == "once"));
}

#[test]
fn what_the_other_end_does_not_have_is_refused() {
    let Some(site) = Site::new("refuse") else { return };
    let more = format!("{GRAFTS}\n[[graft]]\nname = \"newest\"\nfunctions = [\"number\", \"order\"]\n");
    let [near, far] = [more.as_str(), GRAFTS];
    let mut runtimes = [site.start(0, near).expect("a runtime"), site.start(1, far).expect("a runtime")];
    site.inside(0, || runtimes[0].swap("s", "newest")).expect("proposed");
    let refused = site.until(&mut runtimes, || (), |_, event| matches!(event, Event::NotSwapped { .. }));
    assert_eq!(refused, Event::NotSwapped { session: "s".into(), graft: "newest".into(), why: Why::Refused });
    assert!(runtimes.iter_mut().all(|runtime| graft_of(runtime) == "once"));
    assert!(now(&mut runtimes[0]).trouble[0].contains("the other end has no such list"));
}

#[test]
fn what_is_over_its_budget_is_not_started_or_is_replaced() {
    let Some(site) = Site::new("budget") else { return };
    let slow = GRAFTS.replace("fallback", "budget-ns = 1\nfallback");
    let error = site.start(0, &slow).err().expect("over its budget").to_string();
    assert!(error.starts_with("graft once: ") && error.ends_with("and its budget is 1"), "{error}");

    let mut runtimes = [0, 1].map(|side| site.start(side, GRAFTS).expect("a runtime"));
    let [near, far] = site.sockets();
    // In use it takes longer than when it was tried.
    runtimes[0].live.values_mut().for_each(|live| live.graft.budget_ns = 1);
    let mut buffer = [0; 100];
    let traffic = || {
        for _ in 0..100 {
            near.send(b"payload").expect("sent");
            far.recv(&mut buffer).expect("received");
        }
    };
    let over = site.until(&mut runtimes, traffic, |_, event| matches!(event, Event::OverBudget { .. }));
    assert!(
        matches!(over, Event::OverBudget { graft, fallback: Some(fallback), .. } if graft == "once" && fallback == "complete")
    );
    site.until(&mut runtimes, || (), |side, event| side == 0 && matches!(event, Event::Swapped { .. }));
    assert!(runtimes.iter_mut().all(|runtime| graft_of(runtime) == "complete"));
}

#[test]
fn an_end_that_is_started_anew_is_understood() {
    let Some(site) = Site::new("anew") else { return };
    let mut runtimes = [0, 1].map(|side| site.start(side, GRAFTS).expect("a runtime"));
    let sockets = site.sockets();
    let mut buffer = [0; 100];
    let know_each_other = |runtimes: &[Runtime; 2]| {
        runtimes.iter().flat_map(|runtime| runtime.live.values()).all(|live| live.peer.is_some())
    };
    let until = Instant::now() + LONG;
    while !know_each_other(&runtimes) {
        assert!(Instant::now() < until, "they do not hear each other");
        for (side, runtime) in runtimes.iter_mut().enumerate() {
            site.inside(side, || runtime.step(Duration::from_millis(5))).expect("a step");
        }
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
    let restarted = site.until(&mut runtimes, || (), |_, event| matches!(event, Event::Restarted { .. }));
    assert_eq!(restarted, Event::Restarted { session: "s".into() });
    for from in [0, 1] {
        sockets[from].send(b"afterwards").expect("sent");
        let bytes = sockets[1 - from].recv(&mut buffer).expect("received");
        assert_eq!(&buffer[..bytes], b"afterwards");
    }
}

#[test]
fn nothing_is_left_behind() {
    let Some(site) = Site::new("left") else { return };
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

/// No kernel gives an interface between namespaces `fq` by itself.
#[test]
fn a_graft_that_paces_wants_fq() {
    let Some(site) = Site::new("paces") else { return };
    let paces = format!("{GRAFTS}\n[[graft]]\nname = \"paced\"\nfunctions = [\"pace\", \"number\"]\n");
    let error = site.start(0, &paces).err().expect("another discipline").to_string();
    assert!(
        error.starts_with("graft paced paces, and packets of eth wait in the queueing discipline ")
            && error.ends_with(": `tc qdisc replace dev eth root fq`"),
        "{error}"
    );
    let mut runtime = site.start(0, GRAFTS).expect("nothing paces");
    let trouble = now(&mut runtime).trouble;
    assert!(trouble.len() == 1 && trouble[0].contains("the other end is not heard"), "{trouble:?}");
    let settings = settings(0, &paces, "once");
    let refused = site.inside(0, || runtime.apply(settings)).expect_err("another discipline").to_string();
    assert_eq!(refused, error);
    assert_eq!(now(&mut runtime).trouble, trouble, "all stays as it was");
}
