//! Tests of sessions that applications request, over two paths at once.

use std::{
    fs,
    process::Command,
    thread,
    time::{Duration, Instant},
};

use millrace_graft::packet::{PathStatus, PeerStatus, SessionStatus};
use millrace_messages::Session;

use crate::messages::{GRAFTS, MessageHost, message, pair, wait_for_keys};
use crate::site::{GraftSite, inside, ip, wait_for, wait_until};

/// The largest weight of a path. It means that the path's share of the session's packets is not reduced.
const WEIGHT_MOST: u32 = 16;

#[derive(Clone, Copy)]
enum PathFamily {
    V4,
    V6,
}

impl PathFamily {
    /// Returns the address of a host at an interface.
    fn address(self, interface: &str, side: usize) -> String {
        let net = if interface == "eth" { 96 } else { 98 };
        match self {
            Self::V4 => format!("10.{net}.0.{}", 2 - side),
            Self::V6 => format!("fd{net}::{}", 2 - side),
        }
    }
}

/// A namespace with two switches, one in each path between the hosts. A cut behind a switch is not visible as a link
/// failure at either host.
struct Switches(String);

impl Switches {
    fn between(site: &GraftSite) -> Self {
        let switches = Self(format!("{}-w", site.namespaces[0]));
        let name = &switches.0;
        ip(&format!("netns add {name}"));
        ip(&format!("-n {} link del eth", site.namespaces[0]));
        for interface in ["eth", "eth2"] {
            ip(&format!("-n {name} link add {interface} type bridge"));
            ip(&format!("-n {name} link set {interface} up"));
            for (side, host) in site.namespaces.iter().enumerate() {
                let port = format!("{interface}-{side}");
                ip(&format!("-n {host} link add {interface} type veth peer name {port} netns {name}"));
                ip(&format!("-n {name} link set {port} master {interface} up"));
                ip(&format!("-n {host} link set {interface} up"));
                for (family, more) in [(PathFamily::V4, "/24"), (PathFamily::V6, "/64 nodad")] {
                    let address = family.address(interface, side);
                    ip(&format!("-n {host} addr add {address}{more} dev {interface}"));
                }
            }
        }
        for host in &site.namespaces {
            inside(host, || {
                for of in ["all", "eth", "eth2"] {
                    fs::write(format!("/proc/sys/net/ipv4/conf/{of}/rp_filter"), "0").unwrap();
                }
                // In this test the kernel forgets a neighbour that does not answer after three seconds instead of a
                // minute.
                for family in ["ipv4", "ipv6"] {
                    for (time, value) in [
                        ("base_reachable_time_ms", "1000"),
                        ("delay_first_probe_time", "1"),
                        ("retrans_time_ms", "200"),
                    ] {
                        fs::write(format!("/proc/sys/net/{family}/neigh/eth/{time}"), value).unwrap();
                    }
                }
            });
        }
        switches
    }

    fn cut(&self, interface: &str) {
        ip(&format!("-n {} link set {interface}-1 nomaster", self.0));
    }

    /// Cuts the path at one host's interface, so that this host sees the link failure.
    fn unplug(&self, interface: &str) {
        ip(&format!("-n {} link set {interface}-1 down", self.0));
    }
}

impl Drop for Switches {
    fn drop(&mut self) {
        let _ = Command::new("ip").args(["netns", "del", &self.0]).status();
    }
}

fn start<'a>(site: &'a GraftSite, side: usize, family: PathFamily, more: &str) -> MessageHost<'a> {
    let grafts = GRAFTS.replace(r#"["eth"]"#, r#"["eth", "eth2"]"#);
    let ends = |interface: &str| {
        let [local, remote] = [side, 1 - side].map(|side| family.address(interface, side));
        format!("local = \"{local}\"\nremote = \"{remote}\"\n")
    };
    let path =
        |interface| format!("[[peer.sessions.path]]\n{}interface = \"{interface}\"\n", ends(interface));
    MessageHost::start_with(
        site,
        side,
        &format!(
            "{grafts}\n{}ports = \"41000-41002\"\n{more}{}{}",
            crate::site::peer_with(&ends("eth")),
            path("eth"),
            path("eth2")
        ),
    )
}

/// Returns the paths of the session that has sent most packets.
fn paths(host: &MessageHost<'_>) -> Vec<PathStatus> {
    let busiest = |session: &SessionStatus| session.paths.iter().map(|path| path.sent).sum::<u64>();
    // exact: callers repeat this read of the packet counts per path, or have received all sent messages
    host.status().sessions.into_iter().max_by_key(busiest).unwrap().paths
}

fn are_up(hosts: &[MessageHost<'_>; 2], wanted: [bool; 2]) {
    for host in hosts {
        let is_so = |session: &SessionStatus| session.paths.iter().map(|path| path.is_up).eq(wanted);
        wait_until("the paths", || host.status().sessions, |all| all.iter().all(is_so));
    }
}

/// Returns the number of packets that each path has sent while `go` ran. The measurement is repeated until both paths
/// are up, with at least the weight `weight`, before and after it, since a busy host may miss probes and consider a
/// path down.
fn by_each(host: &MessageHost<'_>, weight: u32, mut go: impl FnMut()) -> Vec<u64> {
    let most = |paths: &[PathStatus]| paths.iter().all(|path| path.is_up && path.weight >= weight);
    // The first messages make this session the busiest one.
    go();
    let look = || {
        let before = paths(host);
        go();
        let after = paths(host);
        let sent = before.iter().zip(&after).map(|(before, after)| after.sent - before.sent).collect();
        if most(&before) && most(&after) { Ok(sent) } else { Err((before, after)) }
    };
    wait_for("two paths that are up at their full weight", look)
}

/// Sends numbered messages, and checks that each arrives once.
fn go(near: &mut Session, far: &mut Session, messages: u32) {
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut bytes = vec![7; 1000];
            for number in 0..messages {
                bytes[..4].copy_from_slice(&number.to_be_bytes());
                near.send(&bytes).unwrap();
            }
        });
        let number = |bytes: Vec<u8>| u32::from_be_bytes(bytes[..4].try_into().unwrap());
        let mut got: Vec<_> = (0..messages).map(|_| number(message(far))).collect();
        got.sort_unstable();
        assert!(got.into_iter().eq(0..messages));
    });
}

#[test]
fn messages_use_two_network_paths_and_lose_none_when_one_is_cut() {
    type Cut = fn(&Switches);
    let table: [(_, _, Cut, usize); 4] = [
        (PathFamily::V4, "", |it| it.cut("eth2"), 0),
        (PathFamily::V4, "clear = true\n", |it| it.cut("eth"), 1),
        (PathFamily::V6, "", |it| it.cut("eth"), 1),
        (PathFamily::V4, "", |it| it.unplug("eth"), 1),
    ];
    for (family, more, cut, left) in table {
        let Some(site) = GraftSite::new("ways") else { return };
        let switches = Switches::between(&site);
        let hosts = [0, 1].map(|side| start(&site, side, family, more));
        hosts.iter().for_each(wait_for_keys);
        are_up(&hosts, [true, true]);
        let (mut near, mut far) = pair(&site, &["reliability"]);
        let used = by_each(&hosts[0], WEIGHT_MOST, || go(&mut near, &mut far, 2000));
        assert!(used.iter().all(|sent| *sent >= 100), "{more}{used:?}");
        cut(&switches);
        go(&mut near, &mut far, 2000);
        are_up(&hosts, [left == 0, left == 1]);
        // Messages must also pass after the hosts' neighbour entries of the cut path have expired.
        let cut = Instant::now();
        while cut.elapsed() < Duration::from_secs(4) {
            go(&mut far, &mut near, 100);
        }
        wait_until("no packet on the cut path", || paths(&hosts[0]), |all| all[1 - left].weight == 0);
        let is_heard = |peers: &Vec<PeerStatus>| peers[0].round_trip_us.is_some();
        wait_until("the daemons' own messages to take the other path", || hosts[1].status().peers, is_heard);
    }
}

/// With `redundant`, each message is sent over both paths and must arrive once.
#[test]
fn messages_sent_over_two_redundant_paths_arrive_once_when_one_is_cut() {
    let Some(site) = GraftSite::new("twice") else { return };
    let switches = Switches::between(&site);
    let hosts = [0, 1].map(|side| start(&site, side, PathFamily::V4, "paths = \"redundant\"\n"));
    hosts.iter().for_each(wait_for_keys);
    are_up(&hosts, [true, true]);
    let (mut near, mut far) = pair(&site, &["partial-order"]);
    let mut go = |round: &str| {
        for number in 0..500_u32 {
            near.send(&number.to_be_bytes()).unwrap();
            assert_eq!(message(&mut far), number.to_be_bytes(), "{round}");
        }
    };
    let used = by_each(&hosts[0], 1, || go("by both"));
    assert!(used.iter().all(|sent| *sent >= 500), "{used:?}");
    switches.cut("eth2");
    go("by one");
}
