//! Tests of sessions with two paths between two hosts.

use std::collections::BTreeSet;

use nix::sys::socket::{setsockopt, sockopt};

use super::*;
use crate::packet::PathStatus;
use crate::packet::paths::WEIGHT_MOST;

const LISTS: &str = r#"
    [sessions]
    interface = ["eth", "eth2"]
    [sessions.parameters.repair]
    tries = 0
    retry_us = 20000
    [[graft]]
    name = "once"
    functions = ["window", "number", "repair", "acknowledge"]
"#;

/// Two hosts with two links between them. Each link has a switch in the middle, so that neither host notices when the
/// link is cut.
struct Twofold {
    site: RuntimeSite,
    switches: String,
}

impl Twofold {
    fn new(test: &str) -> Option<Self> {
        let site = RuntimeSite::new(test)?;
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

    /// Assigns the session's own addresses to an interface without a link, so that no neighbour has to be resolved for
    /// them.
    fn put_addresses_aside(&self) {
        for (side, name) in self.site.0.iter().enumerate() {
            ip(&format!("-n {name} addr del 10.97.0.{}/24 dev eth", side + 1));
            ip(&format!("-n {name} addr add 10.99.0.{}/24 dev eth", side + 1));
            // A veth pair replaces `type dummy`, which not every kernel has.
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

    fn both(&self, settings: impl Fn(usize) -> Settings) -> [PacketRuntime; 2] {
        [0, 1].map(|side| {
            let settings = settings(side);
            self.site.inside(side, || PacketRuntime::start(settings)).expect("a runtime")
        })
    }
}

impl Drop for Twofold {
    fn drop(&mut self) {
        drop(Command::new("ip").args(["netns", "del", &self.switches]).status());
    }
}

fn two_paths(side: usize, line: &str) -> Settings {
    // The session's own path is the second one in the settings, since the order of paths must not matter.
    with_paths(side, LISTS, line, &[(98, "eth2"), (97, "eth")])
}

fn with_paths(side: usize, lists: &str, line: &str, paths: &[(u8, &str)]) -> Settings {
    let near = side + 1;
    let far = 2 - side;
    let path = |(net, interface): &(u8, &str)| {
        format!(
            "[[session.path]]\nlocal = \"10.{net}.0.{near}\"\nremote = \"10.{net}.0.{far}\"\ninterface = \"{interface}\"\n"
        )
    };
    let paths: String = paths.iter().map(path).collect();
    settings_with(side, lists, "once", &format!("{line}\n{paths}"))
}

fn paths_of(runtime: &mut PacketRuntime) -> Vec<PathStatus> {
    now(runtime).sessions[0].paths.clone()
}

/// Steps both runtimes while messages pass. `meanwhile` is called each time, with the number of messages that have
/// arrived.
struct PathTraffic<'a> {
    hosts: &'a Twofold,
    runtimes: [PacketRuntime; 2],
    sockets: [UdpSocket; 2],
    sent: u32,
    came: BTreeSet<u32>,
}

impl<'a> PathTraffic<'a> {
    fn new(hosts: &'a Twofold, sockets: &[UdpSocket; 2], line: &str) -> Self {
        Self::between_hosts(hosts, sockets, |side| two_paths(side, line))
    }

    fn between_hosts(
        hosts: &'a Twofold,
        sockets: &[UdpSocket; 2],
        settings: impl Fn(usize) -> Settings,
    ) -> Self {
        let sockets = sockets.each_ref().map(|socket| {
            socket.set_nonblocking(true).expect("a socket");
            // The socket returns an error while the flow-control window is full.
            setsockopt(socket, sockopt::Ipv4RecvErr, &true).expect("a socket");
            socket.try_clone().expect("a socket")
        });
        let runtimes = hosts.both(settings);
        let mut new = Self { hosts, runtimes, sockets, sent: 0, came: BTreeSet::new() };
        // The counts of a path include reports that arrived before the other end was started, so they are subtracted.
        new.until(|it| it.runtimes.iter().all(PacketRuntime::is_open) && it.are_up(2));
        new
    }

    fn are_up(&mut self, wanted: usize) -> bool {
        let up = |runtime: &mut PacketRuntime| {
            paths_of(runtime).iter().filter(|path| path.is_up && path.came > 0).count()
        };
        self.runtimes.iter_mut().all(|runtime| up(runtime) == wanted)
    }

    /// Reports whether this path is not used any more while the other path is.
    fn is_left(&mut self, at: usize) -> bool {
        let paths = paths_of(&mut self.runtimes[0]);
        (paths[at].is_up, paths[at].weight, paths[1 - at].is_up) == (false, 0, true)
    }

    fn step(&mut self) {
        relay(&mut self.runtimes);
        for (side, runtime) in self.runtimes.iter_mut().enumerate() {
            self.hosts.site.inside(side, || runtime.step(Duration::from_millis(2))).expect("a step");
        }
        let mut buffer = [0; 2048];
        while let Ok(bytes) = self.sockets[1].recv(&mut buffer) {
            // Reports that arrived before the other end was started are no messages, so they are subtracted.
            if bytes != 1000 {
                continue;
            }
            let number = u32::from_be_bytes(*buffer.first_chunk().expect("a number"));
            assert_eq!(buffer[4..bytes], message(number)[4..]);
            assert!(self.came.insert(number), "{number} comes twice");
        }
    }

    /// Sends as many messages as fit in the flow-control window.
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

/// Every message arrives once, in an unencrypted and in a sealed session, and both paths carry about as many packets.
#[test]
fn datagrams_of_a_session_are_spread_over_two_paths() {
    let Some(hosts) = Twofold::new("paths") else { return };
    let sockets = hosts.site.sockets();
    for line in ["clear = true", "", "cipher = \"aes-128-gcm\""] {
        let mut traffic = PathTraffic::new(&hosts, &sockets, line);
        // On a busy machine a path may seem to be cut. Counts are therefore compared only over a time in which both
        // paths had their full share.
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

/// No message is lost when either path is cut, and the path is used again after it was restored.
#[test]
fn cut_path_is_avoided_until_it_returns() {
    let Some(hosts) = Twofold::new("cut") else { return };
    let sockets = hosts.site.sockets();
    for cut in ["eth", "eth2"] {
        let mut traffic = PathTraffic::new(&hosts, &sockets, "clear = true");
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

/// The restarted daemon counts packets from zero, and the other end accepts its counts.
#[test]
fn cut_path_is_avoided_after_the_peer_daemon_restarted() {
    let Some(hosts) = Twofold::new("other-anew") else { return };
    let sockets = hosts.site.sockets();
    let mut traffic = PathTraffic::new(&hosts, &sockets, "clear = true");
    traffic.all(500);
    let [near, far] = traffic.runtimes;
    drop(far);
    let settings = two_paths(1, "clear = true");
    let far = hosts.site.inside(1, || PacketRuntime::start(settings)).expect("a runtime");
    traffic.runtimes = [near, far];
    traffic.until(|it| it.runtimes.iter().all(PacketRuntime::is_open) && it.are_up(2));
    hosts.cut("eth2");
    traffic.until(|it| {
        it.send(u32::MAX);
        it.is_left(1)
    });
}

/// The session's own addresses are on an interface without a link. The host then needs no next hop's link address on
/// the link that is cut.
#[test]
fn session_addresses_may_be_on_an_interface_outside_its_paths() {
    let Some(hosts) = Twofold::new("aside") else { return };
    hosts.put_addresses_aside();
    let sockets = hosts.site.sockets();
    let lists = LISTS.replace(r#"["eth", "eth2"]"#, r#"["own", "eth", "eth2"]"#);
    let settings = |side| with_paths(side, &lists, "", &[(97, "own"), (99, "eth"), (98, "eth2")]);
    for cut in ["eth", "eth2"] {
        let mut traffic = PathTraffic::between_hosts(&hosts, &sockets, settings);
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
fn redundant_paths_deliver_datagrams_that_any_one_path_delivers() {
    let Some(hosts) = Twofold::new("twice") else { return };
    let sockets = hosts.site.sockets();
    for more in ["clear = true", ""] {
        let line = &format!("paths = \"redundant\"\n{more}");
        let mut traffic = PathTraffic::new(&hosts, &sockets, line);
        // On a busy machine a path may seem to be cut. Counts are therefore compared only over a time in which no path
        // seemed to be cut.
        let begin = Instant::now();
        loop {
            let before = paths_of(&mut traffic.runtimes[0]);
            let sent = traffic.sent;
            traffic.all(sent + 500);
            let after = paths_of(&mut traffic.runtimes[0]);
            if before.iter().chain(&after).all(|path| path.is_up) {
                let mut pairs = before.iter().zip(&after);
                assert!(pairs.all(|(old, new)| new.sent - old.sent >= 500), "{line}: {before:?} {after:?}");
                break;
            }
            assert!(begin.elapsed() < LONG, "{line}: {after:?}");
        }
        // Each message is sent on both paths. The loop has waited for the first copy of each; the second copies may
        // still be in flight.
        traffic.until(|it| {
            let packets = &now(&mut it.runtimes[1]).sessions[0].packets;
            packets.get("duplicate").or(packets.get("replayed")).is_some_and(|twice| *twice >= 400)
        });
    }
}

/// A datagram that one path could not carry is not sent on the other path either.
#[test]
fn datagram_too_long_for_one_path_is_not_sent() {
    let Some(hosts) = Twofold::new("narrow") else { return };
    let sockets = hosts.site.sockets();
    for name in &hosts.site.0 {
        ip(&format!("-n {name} link set eth2 mtu 800"));
    }
    for line in ["", "clear = true"] {
        let mut traffic = PathTraffic::new(&hosts, &sockets, line);
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
fn path_interface_with_strict_reverse_path_filter_is_refused() {
    let Some(hosts) = Twofold::new("strict") else { return };
    hosts.filter(0, 1);
    let refused =
        hosts.site.inside(0, || PacketRuntime::start(two_paths(0, "")).err().map(|error| error.to_string()));
    let refused = refused.expect("refused");
    assert!(refused.contains("sysctl -w net.ipv4.conf.eth2.rp_filter=2"), "{refused}");
}
