//! Sessions that applications ask for, by two paths at once.

use std::{fs, process::Command, thread};

use millrace_graft::{message::Session, packet::PathStatus};

use crate::messages::{GRAFTS, Host, message, pair, wait_for_keys};
use crate::site::{CLIENT, SERVER, Site, inside, ip, wait_for};

/// Two ways between both hosts, through a switch each: that one is cut, neither host sees.
struct Switches(String);

impl Switches {
    fn between(site: &Site) -> Self {
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
                let net = if interface == "eth" { 96 } else { 98 };
                ip(&format!("-n {host} addr add 10.{net}.0.{}/24 dev {interface}", 2 - side));
                ip(&format!("-n {host} link set {interface} up"));
            }
        }
        for host in &site.namespaces {
            inside(host, || {
                for of in ["all", "eth", "eth2"] {
                    fs::write(format!("/proc/sys/net/ipv4/conf/{of}/rp_filter"), "0").unwrap();
                }
                // The other one's link address is known by a cable that is cut; on a slow machine for long.
                fs::write("/proc/sys/net/ipv4/neigh/eth/base_reachable_time_ms", "600000").unwrap();
            });
        }
        switches
    }

    fn cut(&self, interface: &str) {
        ip(&format!("-n {} link set {interface}-1 nomaster", self.0));
    }
}

impl Drop for Switches {
    fn drop(&mut self) {
        let _ = Command::new("ip").args(["netns", "del", &self.0]).status();
    }
}

fn start<'a>(site: &'a Site, side: usize, more: &str) -> Host<'a> {
    let (local, remote, [near, far]) = match side {
        0 => (CLIENT, SERVER, [2, 1]),
        _ => (SERVER, CLIENT, [1, 2]),
    };
    let grafts = GRAFTS.replace(r#"["eth"]"#, r#"["eth", "eth2"]"#);
    Host::start_with(
        site,
        side,
        &format!(
            "{grafts}\n[[peer]]\nname = \"other\"\nlocal = \"{local}\"\nremote = \"{remote}\"\nkey-file = \"key\"\n\
             ports = \"41000-41002\"\n{more}\
             [[peer.path]]\nlocal = \"{local}\"\nremote = \"{remote}\"\ninterface = \"eth\"\n\
             [[peer.path]]\nlocal = \"10.98.0.{near}\"\nremote = \"10.98.0.{far}\"\ninterface = \"eth2\"\n"
        ),
    )
}

/// Of the session that is lent.
fn paths(host: &Host<'_>) -> Vec<PathStatus> {
    let busiest = |session: &millrace_graft::packet::SessionStatus| {
        session.paths.iter().map(|path| path.sent).sum::<u64>()
    };
    host.status().sessions.into_iter().max_by_key(busiest).unwrap().paths
}

fn are_up(hosts: &[Host<'_>; 2], wanted: [bool; 2]) {
    wait_for("the paths", || {
        let is_so = |host: &Host<'_>| {
            let sessions = host.status().sessions;
            sessions.iter().all(|session| session.paths.iter().map(|path| path.is_up).eq(wanted))
        };
        hosts.iter().all(is_so).then_some(())
    });
}

/// Every one comes, once.
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
fn messages_go_by_both_paths_and_by_the_one_that_is_left() {
    for (more, gone, left) in [("", "eth2", 0), ("protocol = \"253\"\n", "eth", 1)] {
        let Some(site) = Site::new("ways") else { return };
        let switches = Switches::between(&site);
        let hosts = [0, 1].map(|side| start(&site, side, more));
        hosts.iter().for_each(wait_for_keys);
        are_up(&hosts, [true, true]);
        let (mut near, mut far) = pair(&site, &["reliability"]);
        go(&mut near, &mut far, 2000);
        let used = paths(&hosts[0]);
        assert!(used.iter().all(|path| path.sent >= 100), "{more}{used:?}");
        switches.cut(gone);
        go(&mut near, &mut far, 2000);
        are_up(&hosts, [left == 0, left == 1]);
        go(&mut far, &mut near, 500);
        let (near_paths, status) = (paths(&hosts[0]), hosts[1].status());
        assert_eq!(near_paths[1 - left].weight, 0, "{near_paths:?}");
        assert!(status.peers[0].round_trip_us.is_some(), "the daemons' own words go there, too");
    }
}

/// What goes by both comes once.
#[test]
fn redundant_paths_lose_nothing_when_one_is_cut() {
    let Some(site) = Site::new("twice") else { return };
    let switches = Switches::between(&site);
    let hosts = [0, 1].map(|side| start(&site, side, "protocol = \"253\"\npaths = \"redundant\"\n"));
    hosts.iter().for_each(wait_for_keys);
    are_up(&hosts, [true, true]);
    let (mut near, mut far) = pair(&site, &["partial-order"]);
    for round in 0..2 {
        for number in 0..500_u32 {
            near.send(&number.to_be_bytes()).unwrap();
            assert_eq!(message(&mut far), number.to_be_bytes(), "{round}");
        }
        let used = paths(&hosts[0]);
        assert!(used.iter().all(|path| path.sent >= 500), "{used:?}");
        switches.cut("eth2");
    }
}
