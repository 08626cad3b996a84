//! Sessions with two paths between two hosts.

use std::collections::BTreeSet;

use nix::sys::socket::{setsockopt, sockopt};

use super::*;
use crate::packet::PathStatus;
use crate::packet::paths::WEIGHT_MOST;

const LISTS: &str = r#"
    interface = ["eth", "eth2"]
    [parameters.repair]
    tries = 0
    retry_us = 20000
    [[graft]]
    name = "once"
    functions = ["window", "number", "repair", "acknowledge"]
"#;

/// Two hosts, and between them two ways through a switch each: that one is cut, neither host sees.
struct Twofold {
    site: Site,
    switches: String,
}

impl Twofold {
    fn new(test: &str) -> Option<Self> {
        let site = Site::new(test)?;
        let switches = format!("mr-{}-{test}-s", std::process::id());
        ip(&format!("netns add {switches}"));
        ip(&format!("-n {} link del eth", site.0[0]));
        for (net, interface) in [(97, "eth"), (98, "eth2")] {
            ip(&format!("-n {switches} link add {interface} type bridge"));
            ip(&format!("-n {switches} link set {interface} up"));
            for (side, name) in site.0.iter().enumerate() {
                let port = format!("{interface}-{side}");
                ip(&format!("-n {name} link add {interface} type veth peer name {port} netns {switches}"));
                ip(&format!("-n {switches} link set {port} master {interface} up"));
                ip(&format!("-n {name} addr add 10.{net}.0.{}/24 dev {interface}", side + 1));
                ip(&format!("-n {name} link set {interface} up"));
            }
        }
        let new = Self { site, switches };
        [0, 1].into_iter().for_each(|side| new.filter(side, 0));
        Some(new)
    }

    fn cut(&self, interface: &str) {
        ip(&format!("-n {} link set {interface}-1 nomaster", self.switches));
    }

    fn mend(&self, interface: &str) {
        ip(&format!("-n {} link set {interface}-1 master {interface}", self.switches));
    }

    /// The session's own addresses are on no cable then, so that nobody has to be found there.
    fn put_addresses_aside(&self) {
        for (side, name) in self.site.0.iter().enumerate() {
            ip(&format!("-n {name} addr del 10.97.0.{}/24 dev eth", side + 1));
            ip(&format!("-n {name} addr add 10.99.0.{}/24 dev eth", side + 1));
            // As `type dummy`, which not every kernel has.
            ip(&format!("-n {name} link add own type veth peer name nowhere"));
            ip(&format!("-n {name} link set nowhere up"));
            ip(&format!("-n {name} addr add 10.97.0.{}/24 dev own", side + 1));
            ip(&format!("-n {name} link set own arp off up"));
        }
    }

    fn filter(&self, side: usize, value: u8) {
        self.site.inside(side, || {
            for of in ["all", "eth", "eth2"] {
                let file = format!("/proc/sys/net/ipv4/conf/{of}/rp_filter");
                std::fs::write(file, value.to_string()).expect("rp_filter");
            }
        });
    }

    fn both(&self, settings: impl Fn(usize) -> Settings) -> [Runtime; 2] {
        [0, 1].map(|side| {
            let settings = settings(side);
            self.site.inside(side, || Runtime::start(settings)).expect("a runtime")
        })
    }
}

impl Drop for Twofold {
    fn drop(&mut self) {
        drop(Command::new("ip").args(["netns", "del", &self.switches]).status());
    }
}

fn two_paths(side: usize, line: &str) -> Settings {
    // In any order.
    with_paths(side, LISTS, line, &[(98, "eth2"), (97, "eth")])
}

fn with_paths(side: usize, lists: &str, line: &str, paths: &[(u8, &str)]) -> Settings {
    let (near, far) = (side + 1, 2 - side);
    let path = |(net, interface): &(u8, &str)| {
        format!(
            "[[session.path]]\nlocal = \"10.{net}.0.{near}\"\nremote = \"10.{net}.0.{far}\"\ninterface = \"{interface}\"\n"
        )
    };
    let paths: String = paths.iter().map(path).collect();
    settings_with(side, lists, "once", &format!("{line}\n{paths}"))
}

fn paths_of(runtime: &mut Runtime) -> Vec<PathStatus> {
    now(runtime).sessions[0].paths.clone()
}

/// Both work, and messages go from one to the other. `meanwhile` is called each time, with how many have come.
struct Traffic<'a> {
    hosts: &'a Twofold,
    runtimes: [Runtime; 2],
    sockets: [UdpSocket; 2],
    sent: u32,
    came: BTreeSet<u32>,
}

impl<'a> Traffic<'a> {
    fn new(hosts: &'a Twofold, sockets: &[UdpSocket; 2], line: &str) -> Self {
        Self::of(hosts, sockets, |side| two_paths(side, line))
    }

    fn of(hosts: &'a Twofold, sockets: &[UdpSocket; 2], settings: impl Fn(usize) -> Settings) -> Self {
        let sockets = sockets.each_ref().map(|socket| {
            socket.set_nonblocking(true).expect("a socket");
            // It is told when there is no room in the window.
            setsockopt(socket, sockopt::Ipv4RecvErr, &true).expect("a socket");
            socket.try_clone().expect("a socket")
        });
        let runtimes = hosts.both(settings);
        let mut new = Self { hosts, runtimes, sockets, sent: 0, came: BTreeSet::new() };
        // Words of before the other end was there.
        new.until(|it| it.runtimes.iter().all(Runtime::is_open) && it.are_up(2));
        new
    }

    fn are_up(&mut self, wanted: usize) -> bool {
        let up = |runtime: &mut Runtime| {
            paths_of(runtime).iter().filter(|path| path.is_up && path.came > 0).count()
        };
        self.runtimes.iter_mut().all(|runtime| up(runtime) == wanted)
    }

    /// This path is not used any more, and the other one is.
    fn is_left(&mut self, at: usize) -> bool {
        let paths = paths_of(&mut self.runtimes[0]);
        (paths[at].is_up, paths[at].weight, paths[1 - at].is_up) == (false, 0, true)
    }

    fn step(&mut self) {
        for (side, runtime) in self.runtimes.iter_mut().enumerate() {
            self.hosts.site.inside(side, || runtime.step(Duration::from_millis(2))).expect("a step");
        }
        let mut buffer = [0; 2048];
        while let Ok(bytes) = self.sockets[1].recv(&mut buffer) {
            // Not a message: words of before the other end was there.
            if bytes != 1000 {
                continue;
            }
            let number = u32::from_be_bytes(*buffer.first_chunk().expect("a number"));
            assert_eq!(buffer[4..bytes], message(number)[4..]);
            assert!(self.came.insert(number), "{number} comes twice");
        }
    }

    /// As much as there is room for.
    fn send(&mut self, until: u32) {
        let most = self.sent + 20;
        while self.sent < until.min(most) {
            if self.sockets[0].send(&message(self.sent)).is_err() {
                return;
            }
            self.sent += 1;
        }
    }

    fn until(&mut self, wanted: impl Fn(&mut Self) -> bool) {
        let until = Instant::now() + LONG;
        while !wanted(self) {
            assert!(
                Instant::now() < until,
                "{} sent, {} came, {:?}",
                self.sent,
                self.came.len(),
                self.runtimes.each_mut().map(paths_of)
            );
            self.step();
        }
    }

    fn all(&mut self, messages: u32) {
        let until = Instant::now() + LONG;
        while self.came.len() < messages as usize {
            assert!(Instant::now() < until, "{} sent, {} came", self.sent, self.came.len());
            self.send(messages);
            self.step();
        }
    }
}

fn message(number: u32) -> Vec<u8> {
    let mut message = number.to_be_bytes().to_vec();
    message.resize(1000, number as u8);
    message
}

/// In clear and sealed: every message once, and about as many by each.
#[test]
fn two_paths_carry_a_session() {
    let Some(hosts) = Twofold::new("paths") else { return };
    let sockets = hosts.site.sockets();
    for line in [
        "clear = true",
        "",
        "cipher = \"aes-128-gcm\"",
        "protocol = \"253\"",
        "protocol = \"253\"\nclear = true",
    ] {
        let mut traffic = Traffic::new(&hosts, &sockets, line);
        // A machine that is busy with something else may take a path for cut: as many are asked of each where both carried all they could.
        let begin = Instant::now();
        loop {
            let before = traffic.runtimes.each_mut().map(paths_of);
            let sent = traffic.sent;
            traffic.all(sent + 1000);
            let after = traffic.runtimes.each_mut().map(paths_of);
            let is_whole = |path: &PathStatus| path.is_up && path.weight == WEIGHT_MOST;
            if [&before[0], &after[0]].into_iter().flatten().all(is_whole) {
                assert_eq!(after[0][0].interface, "eth", "the session's own is the first");
                let [sent, came] = [0, 1].map(|side| {
                    let pairs = before[side].iter().zip(&after[side]);
                    let more = pairs.map(|(old, new)| [new.sent - old.sent, new.came - old.came][side]);
                    more.collect::<Vec<_>>()
                });
                assert!(sent.iter().chain(&came).all(|more| *more >= 300), "{line}: {sent:?} {came:?}");
                break;
            }
            assert!(begin.elapsed() < LONG, "{line}: {after:?}");
        }
    }
}

/// Nothing is lost when one goes, either of them, and it is used again when it is back.
#[test]
fn a_path_that_is_cut_is_left_and_taken_again() {
    let Some(hosts) = Twofold::new("cut") else { return };
    let sockets = hosts.site.sockets();
    for cut in ["eth", "eth2"] {
        let mut traffic = Traffic::new(&hosts, &sockets, "clear = true");
        traffic.all(300);
        hosts.cut(cut);
        traffic.all(1500);
        let at = usize::from(cut == "eth2");
        traffic.until(|it| {
            it.send(u32::MAX);
            it.is_left(at)
        });
        hosts.mend(cut);
        traffic.until(|it| it.are_up(2));
        let sent = traffic.sent;
        traffic.all(sent + 500);
    }
}

/// It counts from the beginning then, and what it says is believed nevertheless.
#[test]
fn a_path_that_is_cut_is_left_after_the_other_daemon_was_started_anew() {
    let Some(hosts) = Twofold::new("other-anew") else { return };
    let sockets = hosts.site.sockets();
    let mut traffic = Traffic::new(&hosts, &sockets, "clear = true");
    traffic.all(500);
    let [near, far] = traffic.runtimes;
    drop(far);
    let settings = two_paths(1, "clear = true");
    let far = hosts.site.inside(1, || Runtime::start(settings)).expect("a runtime");
    traffic.runtimes = [near, far];
    traffic.until(|it| it.runtimes.iter().all(Runtime::is_open) && it.are_up(2));
    hosts.cut("eth2");
    traffic.until(|it| {
        it.send(u32::MAX);
        it.is_left(1)
    });
}

/// With the session's own addresses on an interface of their own, neither cable is anything special: the host need not find the other
/// one's link address by the one that is cut.
#[test]
fn a_sessions_own_addresses_may_be_on_no_path() {
    let Some(hosts) = Twofold::new("aside") else { return };
    hosts.put_addresses_aside();
    let sockets = hosts.site.sockets();
    let lists = LISTS.replace(r#"["eth", "eth2"]"#, r#"["own", "eth", "eth2"]"#);
    let settings = |side| with_paths(side, &lists, "", &[(97, "own"), (99, "eth"), (98, "eth2")]);
    for cut in ["eth", "eth2"] {
        let mut traffic = Traffic::of(&hosts, &sockets, settings);
        traffic.all(300);
        hosts.cut(cut);
        traffic.all(1000);
        traffic.until(|it| {
            it.send(u32::MAX);
            let paths = paths_of(&mut it.runtimes[0]);
            (paths[0].is_up, paths[0].weight) == (false, 0)
        });
        hosts.mend(cut);
        traffic.until(|it| it.are_up(2));
    }
}

#[test]
fn redundant_paths_lose_nothing_that_one_of_them_brings() {
    let Some(hosts) = Twofold::new("twice") else { return };
    let sockets = hosts.site.sockets();
    for more in ["clear = true", "", "protocol = \"253\"", "protocol = \"253\"\nclear = true"] {
        let line = &format!("paths = \"redundant\"\n{more}");
        let mut traffic = Traffic::new(&hosts, &sockets, line);
        // As above: of a time in which neither was taken for cut.
        let begin = Instant::now();
        loop {
            let (before, sent) = (paths_of(&mut traffic.runtimes[0]), traffic.sent);
            traffic.all(sent + 500);
            let after = paths_of(&mut traffic.runtimes[0]);
            if before.iter().chain(&after).all(|path| path.is_up) {
                let mut pairs = before.iter().zip(&after);
                assert!(pairs.all(|(old, new)| new.sent - old.sent >= 500), "{line}: {before:?} {after:?}");
                break;
            }
            assert!(begin.elapsed() < LONG, "{line}: {after:?}");
        }
        // What comes second comes after what was waited for.
        traffic.until(|it| {
            let packets = &now(&mut it.runtimes[1]).sessions[0].packets;
            packets.get("duplicate").or(packets.get("replayed")).is_some_and(|twice| *twice >= 400)
        });
    }
}

/// Nothing is sent by the one path that the other one could not carry.
#[test]
fn what_is_too_long_for_one_of_the_paths_is_not_sent() {
    let Some(hosts) = Twofold::new("narrow") else { return };
    let sockets = hosts.site.sockets();
    for name in &hosts.site.0 {
        ip(&format!("-n {name} link set eth2 mtu 800"));
    }
    for line in ["", "protocol = \"253\""] {
        let mut traffic = Traffic::new(&hosts, &sockets, line);
        let mut sent = |bytes: usize| {
            let before = now(&mut traffic.runtimes[0]).sessions[0].packets.clone();
            drop(sockets[0].send(&vec![1; bytes]));
            let after = now(&mut traffic.runtimes[0]).sessions[0].packets.clone();
            let more = |reason: &str| after.get(reason).unwrap_or(&0) - before.get(reason).unwrap_or(&0);
            (more("sent"), more("too-long"))
        };
        assert_eq!((sent(700), sent(1000)), ((1, 0), (0, 1)), "{line}");
    }
}

#[test]
fn an_interface_that_would_drop_them_is_refused() {
    let Some(hosts) = Twofold::new("strict") else { return };
    hosts.filter(0, 1);
    let refused =
        hosts.site.inside(0, || Runtime::start(two_paths(0, "")).err().map(|error| error.to_string()));
    let refused = refused.expect("refused");
    assert!(refused.contains("sysctl -w net.ipv4.conf.eth2.rp_filter=2"), "{refused}");
}
