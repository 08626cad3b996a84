//! Tests that firewalls of both hosts accept and refuse tunnelled connections as they do plain TCP.

use std::{
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpListener, TcpStream},
    process::Stdio,
    time::Duration,
};

use nix::unistd::{Gid, Uid, setfsgid, setfsuid};
use socket2::{Domain, SockRef, Socket, Type};

use crate::{
    agreement::keys,
    carried::{CARRIERS, accepted, at, carry, exchange, rule, verdict, wait_for_state},
    site::{CLIENT, CLIENT6, GraftProcess, GraftSite, LONG, PORT, SERVER, SERVER6, inside, wait_until},
};

/// Ports of tunnelled connections, one for each test case. After a refused connection the daemon does not tunnel to
/// that server port for a while, so no port is used twice.
const PORTS: std::ops::RangeInclusive<u16> = PORT..=PORT + 99;
/// Time that a test waits to see that nothing happens.
const SHORT: Duration = Duration::from_millis(200);

/// A connection: the user and group ID of its process, its socket mark (SO_MARK), and whether the firewall must allow
/// it.
#[derive(Clone, Copy)]
struct Try {
    owner: (u32, u32),
    mark: u32,
    passes: bool,
}

const ROOT: (u32, u32) = (0, 0);
const USER: (u32, u32) = (4001, 0);
const MEMBER: (u32, u32) = (0, 4002);

const fn try_as(owner: (u32, u32), mark: u32, passes: bool) -> Try {
    Try { owner, mark, passes }
}

const PASSES: Try = try_as(ROOT, 0, true);
const BLOCKED: Try = try_as(ROOT, 0, false);

/// A test case: the host (0 is the client's), the netfilter hook, the nftables rules, and the connections that are
/// tried in order. A rule that exempts the host's other traffic precedes these rules.
type FirewallCase = (usize, &'static str, &'static str, &'static [Try]);

const CASES: [FirewallCase; 32] = [
    (0, "output", "tcp dport PORT drop", &[BLOCKED]),
    (0, "output", "tcp dport PORT reject with tcp reset", &[BLOCKED]),
    (0, "output", "tcp dport PORT reject with icmpx admin-prohibited", &[BLOCKED]),
    (0, "output", "ip daddr 10.96.0.1 tcp dport PORT drop", &[BLOCKED]),
    (0, "output", "ip saddr 10.96.0.2 tcp dport PORT drop", &[BLOCKED]),
    (0, "output", "ip saddr 10.97.0.0/16 tcp dport PORT drop", &[PASSES]),
    (0, "output", "ip daddr 127.0.0.0/8 tcp dport PORT drop", &[PASSES]),
    (0, "output", "tcp dport PORT meta skuid 4001 drop", &[PASSES, try_as(USER, 0, false)]),
    (0, "output", "tcp dport PORT meta skuid != 4001 drop", &[try_as(USER, 0, true), BLOCKED]),
    (0, "output", "tcp dport PORT meta skgid 4002 drop", &[PASSES, try_as(MEMBER, 0, false)]),
    (0, "output", "tcp dport PORT meta mark 7 drop", &[PASSES, try_as(ROOT, 7, false)]),
    (
        0,
        "output",
        "ct state new tcp dport PORT limit rate over 2/hour burst 2 packets drop",
        &[PASSES, PASSES, BLOCKED],
    ),
    (0, "output", "tcp dport @ports drop", &[BLOCKED]),
    (0, "output", "tcp dport vmap { PORT : drop }", &[BLOCKED]),
    (0, "output", "tcp dport PORT jump away", &[BLOCKED]),
    (0, "output", "ct state new tcp dport PORT counter name seen", &[PASSES, PASSES]),
    (0, "output", "oifname eth tcp dport PORT drop", &[BLOCKED]),
    (0, "postrouting", "tcp dport PORT drop", &[BLOCKED]),
    (0, "input", "iifname eth tcp sport PORT drop", &[BLOCKED]),
    (0, "input", "ct state established,related accept; tcp sport PORT drop", &[PASSES]),
    (1, "input", "tcp dport PORT drop", &[BLOCKED]),
    (1, "input", "tcp dport PORT reject with tcp reset", &[BLOCKED]),
    (1, "input", "ip saddr 10.96.0.2 tcp dport PORT accept; tcp dport PORT drop", &[PASSES]),
    (1, "input", "ip saddr != 10.97.0.0/16 tcp dport PORT drop", &[BLOCKED]),
    (1, "input", "ip saddr @addresses tcp dport PORT drop", &[BLOCKED]),
    (1, "input", "iifname eth tcp dport PORT drop", &[BLOCKED]),
    (1, "input", "iifname != eth tcp dport PORT drop", &[PASSES]),
    (
        1,
        "input",
        "ct state new tcp dport PORT limit rate over 2/hour burst 2 packets drop",
        &[PASSES, PASSES, BLOCKED],
    ),
    (1, "input", "ct state new tcp dport PORT counter name seen", &[PASSES, PASSES]),
    (1, "prerouting", "fib saddr . iif oif 0 tcp dport PORT drop", &[PASSES]),
    (1, "output", "ct state != established tcp sport PORT drop", &[PASSES]),
    (1, "output", "tcp sport PORT meta skuid 0 drop", &[BLOCKED]),
];

const CASES6: [FirewallCase; 4] = [
    (0, "output", "ip6 daddr fd96::1 tcp dport PORT reject", &[BLOCKED]),
    (0, "output", "tcp dport PORT meta skuid 4001 drop", &[PASSES, try_as(USER, 0, false)]),
    (1, "input", "ip6 saddr fd96::2 tcp dport PORT drop", &[BLOCKED]),
    (1, "input", "ip6 saddr fd96::2 tcp dport PORT accept; tcp dport PORT drop", &[PASSES]),
];

fn settings(site: &GraftSite) {
    let known = keys(site);
    let ports = format!("port = \"{}-{}\"", PORTS.start(), PORTS.end());
    let rule = |side| rule(side, PORT).replace(&format!("port = {PORT}"), &ports);
    site.configure_on(
        0,
        &format!(
            "[agreement]\nkey = \"host0.key\"\n[carry]\n[[peer]]\nname = \"server\"\nkey = \"{}\"\n\
             carry = \"{SERVER}:{CARRIERS}\"\naddresses = [\"{SERVER6}\"]\n{}",
            known[1],
            rule("client")
        ),
    );
    site.configure_on(
        1,
        &format!(
            "[agreement]\nkey = \"host1.key\"\n[carry]\nlisten = \"{SERVER}:{CARRIERS}\"\n[[peer]]\nname = \"client\"\n\
             key = \"{}\"\naddresses = [\"{CLIENT}\", \"{CLIENT6}\"]\n{}addresses = [\"{SERVER6}\"]\n",
            known[0],
            rule("server")
        ),
    );
}

/// Starts both daemons, and waits until the carrier between them is established and its congestion window is open.
fn daemons<'a>(site: &'a GraftSite) -> [GraftProcess<'a>; 2] {
    settings(site);
    let far = GraftProcess::start_on(site, 1);
    let near = GraftProcess::start_on(site, 0);
    wait_for_state(&near, "warm");
    [near, far]
}

/// Replaces all nftables rules of a host by one table.
fn only_firewall(site: &GraftSite, host: usize, text: &str) {
    nft(site, host, &format!("flush ruleset\n{text}\n"));
}

/// Adds a test case's table to the nftables rules of a host, or replaces it. Tables of earlier test cases stay: a
/// connection that the caller has given up may still wait for its verdict, and would be let out without them.
fn add_firewall(site: &GraftSite, host: usize, text: &str, port: u16) {
    let name = table_name(port);
    nft(site, host, &format!("table {name}\ndelete table {name}\n{text}\n"));
}

fn nft(site: &GraftSite, host: usize, text: &str) {
    let mut nft = site.command(host, "nft").args(["-f", "-"]).stdin(Stdio::piped()).spawn().unwrap();
    nft.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
    assert!(nft.wait().unwrap().success(), "{text}");
}

/// The table of a test case, which concerns connections to this port.
fn table_name(port: u16) -> String {
    format!("inet t{port}")
}

fn chain(hook: &str, rules: &str) -> String {
    let rules = rules.replace("; ", "\n");
    let kind = format!("type filter hook {hook} priority filter; policy accept;");
    format!("chain {hook} {{\n{kind}\niifname lo accept\noifname lo accept\n{rules}\n}}\n")
}

fn table(hook: &str, rules: &str, port: u16) -> String {
    let sets = "set ports {\ntype inet_service\nelements = { PORT }\n}\n\
                set addresses {\ntype ipv4_addr\nelements = { 10.96.0.2 }\n}\n";
    // In nftables, the output hooks have no input interface, and the input hooks have no output interface.
    let chain = match hook {
        "output" | "postrouting" => chain(hook, rules).replace("iifname lo accept\n", ""),
        _ => chain(hook, rules).replace("oifname lo accept\n", ""),
    };
    let name = table_name(port);
    let table = format!("table {name} {{\ncounter seen {{\n}}\n{sets}chain away {{\ndrop\n}}\n{chain}}}\n");
    table.replace("PORT", &port.to_string())
}

/// Returns the line of nft's output with the number of packets that the counter in the table for `port` has counted.
fn seen(site: &GraftSite, host: usize, port: u16) -> String {
    let table = format!("t{port}");
    let said = site.command(host, "nft").args(["list", "counter", "inet", &table, "seen"]).output().unwrap();
    // exact: the firewall counted the packets before the caller's connection attempt ended
    String::from_utf8(said.stdout).unwrap().lines().find(|line| line.contains("packets")).unwrap().to_owned()
}

/// Reports whether a client process with this owner receives a byte from the server. With `is_redirected` it is in the
/// daemon's cgroup, so its connection may be redirected to the tunnel.
fn hears(site: &GraftSite, is_redirected: bool, attempt: Try, listener: &TcpListener) -> bool {
    let to = listener.local_addr().unwrap();
    let bound = if attempt.passes { LONG } else { SHORT };
    let connect = || {
        inside(&site.namespaces[0], || {
            // setfsuid and setfsgid apply to this thread only, which ends after the attempt to connect.
            setfsgid(Gid::from_raw(attempt.owner.1));
            setfsuid(Uid::from_raw(attempt.owner.0));
            let socket = Socket::new(Domain::for_address(to), Type::STREAM, None)?;
            socket.set_mark(attempt.mark)?;
            socket.connect_timeout(&to.into(), bound)?;
            Ok::<TcpStream, std::io::Error>(socket.into())
        })
    };
    let Ok(mut stream) = (if is_redirected { site.enter(0, connect) } else { connect() }) else {
        return false;
    };
    // The read timeout of a listening socket also applies to accept().
    SockRef::from(listener).set_read_timeout(Some(bound)).unwrap();
    stream.set_read_timeout(Some(bound)).unwrap();
    let Ok((mut served, seen)) = listener.accept() else { return false };
    assert_eq!(seen.ip(), at(if to.is_ipv4() { CLIENT } else { CLIENT6 }, 0).ip());
    served.write_all(b"x").unwrap();
    stream.read_exact(&mut [0]).is_ok()
}

/// Each test case adds firewall rules at one host. A connection that plain TCP allows must be tunnelled, and one that
/// plain TCP refuses must fail. Firewall counters must have the same values as with plain TCP.
#[test]
fn firewalls_filter_tunnelled_connections_like_plain_tcp() {
    let Some(site) = GraftSite::new("firewall") else { return };
    let [near, far] = daemons(&site);
    let mut carried = 0;
    for (port, (host, hook, rules, attempts)) in PORTS.zip(CASES) {
        let listener = site.listen_on(at(SERVER, port));
        let wanted: Vec<_> = attempts.iter().map(|attempt| attempt.passes).collect();
        let [plain, redirected] = [false, true].map(|is_redirected| {
            add_firewall(&site, host, &table(hook, rules, port), port);
            let heard: Vec<_> =
                attempts.iter().map(|attempt| hears(&site, is_redirected, *attempt, &listener)).collect();
            (heard, seen(&site, host, port))
        });
        assert_eq!(plain.0, wanted, "plain TCP, host {host}, {hook}: {rules}");
        assert_eq!(redirected, plain, "host {host}, {hook}: {rules}");
        let passed = wanted.iter().filter(|passes| **passes).count() as u64;
        carried += passed;
        // Only allowed connections were tunnelled.
        let reached = || {
            let ended = carry(&far).ended;
            ["done", "reset", "peer-reset"]
                .map(|how| ended.get(how).copied().unwrap_or_default())
                .iter()
                .sum::<u64>()
        };
        let what = format!("{carried} carried connections to have ended: {rules}");
        wait_until(&what, reached, |count| *count == carried);
    }
    let [here, there] = [&near, &far].map(|daemon| carry(daemon).firewall.unwrap());
    assert_eq!([&here.rules, &there.rules], [&Vec::<String>::new(); 2]);
    for (firewall, verdicts) in
        [(here, ["passes", "output", "input"]), (there, ["passes", "output", "input"])]
    {
        assert!(verdicts.iter().all(|it| firewall.openings[*it] > 0), "{firewall:?}");
    }
}

#[test]
fn firewalls_filter_tunnelled_ipv6_connections_with_strict_connect() {
    let Some(site) = GraftSite::new("firewall6") else { return };
    settings(&site);
    let path = site.path("graft0.toml");
    let text = std::fs::read_to_string(&path).unwrap().replace("tier = ", "connect = \"strict\"\ntier = ");
    std::fs::write(path, text).unwrap();
    let far = GraftProcess::start_on(&site, 1);
    let near = GraftProcess::start_on(&site, 0);
    wait_for_state(&near, "warm");
    for (port, (host, hook, rules, attempts)) in PORTS.zip(CASES6) {
        let listener = site.listen_on(at(SERVER6, port));
        for is_redirected in [false, true] {
            add_firewall(&site, host, &table(hook, rules, port), port);
            for attempt in attempts {
                let heard = hears(&site, is_redirected, *attempt, &listener);
                assert_eq!(heard, attempt.passes, "redirected {is_redirected}, host {host}, {hook}: {rules}");
            }
        }
    }
    // Both allowed connections were tunnelled: one while the client's host had a firewall, and one while the server's
    // host had one.
    let carried = ["passes", "no-firewall"];
    wait_until(
        "the tunnelled connections",
        || carry(&far).firewall.unwrap().openings,
        |openings| carried.iter().all(|verdict| openings[*verdict] == 1),
    );
}

/// Firewall rules about lengths, rates, counts, DSCP or cgroups match more than a connection's SYN and SYN-ACK. While
/// such a rule exists, connections are plain TCP from the start, and the status of the rule's host names the rule.
#[test]
fn firewall_rules_beyond_tcp_setup_disable_tunnelling_and_are_reported() {
    let Some(site) = GraftSite::new("plain") else { return };
    let [near, far] = daemons(&site);
    // The path is relative to the cgroup mount, as nft expects it.
    let cgroup = site.cgroup(0).strip_prefix("/sys/fs/cgroup").unwrap().to_str().unwrap();
    let in_cgroup = format!("socket cgroupv2 level 1 \"{cgroup}\" accept");
    let rules = [
        ("quota over 100 mbytes drop", "quota"),
        ("meta length > 60000 drop", "meta length"),
        ("limit rate over 100/second drop", "limit of all packets"),
        ("limit rate over 100 mbytes/second drop", "limit of bytes"),
        ("ct count over 1000 drop", "connlimit"),
        ("ct original bytes > 100000000 drop", "ct bytes, packets"),
        ("ip dscp 7 drop", "payload"),
        (in_cgroup.as_str(), "socket cgroupv2"),
    ];
    for (redirected, (port, (rule, what))) in (0..).zip(PORTS.zip(rules)) {
        let listener = site.listen_on(at(SERVER, port));
        let named = |daemon: &GraftProcess<'_>| carry(daemon).firewall.unwrap().rules;
        only_firewall(&site, 0, &table("output", &format!("tcp dport PORT {rule}"), port));
        wait_until(rule, || named(&near), |rules| rules.iter().any(|rule| rule.ends_with(what)));
        assert!(near.succeed(&["status"]).contains(&format!(": {what}")), "{what}");
        // The daemon changes the kernel's maps before it changes its status.
        assert!(hears(&site, true, PASSES, &listener), "{rule}");
        assert_eq!(verdict(&near, "redirected"), redirected, "{rule}");
        only_firewall(&site, 0, "");
        wait_until("the rule's end in the status", || named(&near), Vec::is_empty);
        assert!(hears(&site, true, PASSES, &listener), "{rule}");
        wait_until(
            "a redirected connection",
            || verdict(&near, "redirected"),
            |count| *count == redirected + 1,
        );
    }
    // The daemon on the server's host finds the firewall rule when it connects to the server. The client's daemon then
    // connects over plain TCP.
    let port = *PORTS.end();
    let listener = site.listen_on(at(SERVER, port));
    only_firewall(&site, 1, &table("input", "tcp dport PORT quota over 100 mbytes drop", port));
    assert!(hears(&site, true, PASSES, &listener));
    // exact: the daemon finds the firewall rule when it connects to the server, whose answer has arrived
    let there = carry(&far).firewall.unwrap();
    assert_eq!(there.openings["rule"], 1, "{there:?}");
    assert!(there.rules.iter().any(|rule| rule.ends_with(": quota")), "{there:?}");
}

/// The firewall of the server's host has no rule that accepts packets on `lo`, so the daemon on that host cannot
/// connect to the server.
#[test]
fn server_firewall_that_blocks_its_own_loopback_disables_tunnelling() {
    let Some(site) = GraftSite::new("lo") else { return };
    let [_near, far] = daemons(&site);
    let listener = site.listen_on(at(SERVER, PORT));
    let rules = "ip saddr 10.96.0.2 tcp dport PORT accept; tcp dport PORT drop";
    let text = table("input", rules, PORT).replace("iifname lo accept\n", "");
    only_firewall(&site, 1, &text);
    assert!(hears(&site, true, PASSES, &listener));
    let named = wait_until("its name", || carry(&far).firewall.unwrap().rules, |rules| !rules.is_empty());
    assert_eq!(
        named,
        [format!("lo: the firewall does not let this host connect to its own server {SERVER}:{PORT}")]
    );
}

/// The daemons send a SYN and a SYN-ACK of a tunnelled connection only to get the firewalls' verdicts. These packets
/// must reach neither the network nor the server.
#[test]
fn packets_sent_for_firewall_verdicts_reach_only_the_firewall() {
    let Some(site) = GraftSite::new("first") else { return };
    let [near, far] = daemons(&site);
    let listener = site.listen_on(at(SERVER, PORT));
    // Each host's firewall counts packets to or from the server's port that arrive from the other host.
    let count = "counter name seen";
    let wire = |host: usize, rule: &str| {
        let ingress = "type filter hook prerouting priority raw; policy accept;";
        let text = format!(
            "table inet t{PORT} {{\ncounter seen {{\n}}\nchain wire {{\n{ingress}\niifname eth {rule} {count}\n}}\n}}\n"
        );
        only_firewall(&site, host, &text);
    };
    wire(0, &format!("tcp sport {PORT}"));
    wire(1, &format!("tcp dport {PORT}"));
    let to: SocketAddr = at(SERVER, PORT);
    let (here, there, seen_as) = accepted(site.try_connect(to).unwrap(), &listener);
    assert_eq!(seen_as.ip().to_string(), CLIENT);
    exchange(&here, &there, 100_000);
    // Each host's firewall has given a verdict on one packet: the SYN at one host, and the SYN-ACK at the other.
    for (host, daemon) in [(0, &near), (1, &far)] {
        let counted = seen(&site, host, PORT);
        assert!(counted.contains("packets 1 "), "host {host}: {counted}");
        // exact: the daemon's counts of SYN and SYN-ACK packets are final, since the connection is established
        let packets = carry(daemon).firewall.unwrap().packets;
        assert_eq!((packets["out"], packets["in"]), (1, 1), "{packets:?}");
    }
}
