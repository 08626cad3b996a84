//! Tests of two graft daemons that agree over TLS which congestion controls or grafts their hosts use, and of
//! disturbances of this agreement.

use std::{
    collections::BTreeMap,
    fs,
    io::{Read as _, Write as _},
    net::{TcpListener, TcpStream},
    process::Command,
    sync::Arc,
};

use millrace_client::tls::CertificateTrust;
use millrace_graft::status::{GraftPeerStatus, NatReport, PeerExplanation, Status};
use millrace_graft_proto::message::{
    ALPN, AgreementMessage, Hash, HostOffer, OfferSide, PathVerdict, RefusalReason, RuleOffer, Statement,
};
use nix::sys::signal::Signal;
use rustls::{
    ClientConnection, StreamOwned,
    pki_types::{PrivateKeyDer, ServerName, pem::PemObject as _},
    sign::{CertifiedKey, SingleCertAndKey},
};

use crate::site::{
    CLIENT, GraftProcess, GraftSite, LONG, PORT, SERVER, congestion, inside, part, pause, signal, transfer,
    wait_for, wait_until,
};

const CONTROL: u16 = 9187;

/// Makes the keys of both hosts, and returns the hashes of the public keys, by which the hosts identify each other.
pub fn keys(site: &GraftSite) -> [String; 2] {
    [0, 1].map(|side| key(site, &format!("host{side}.key")))
}

pub fn key(site: &GraftSite, name: &str) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_millrace"));
    let output = command.args(["graft", "key", "--new"]).arg(site.path(name)).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

fn caller(server: &str, rest: &str) -> String {
    format!(
        "[agreement]\nkey = \"host0.key\"\ninterval-s = 1\n[[peer]]\nname = \"server\"\naddress = \"{SERVER}:{CONTROL}\"\n\
         key = \"{server}\"\n{rest}"
    )
}

fn called(client: &str, rest: &str) -> String {
    format!(
        "[agreement]\nkey = \"host1.key\"\nlisten = \"{SERVER}:{CONTROL}\"\ninterval-s = 1\n[[peer]]\nname = \"client\"\n\
         key = \"{client}\"\n{rest}"
    )
}

/// Returns a rule with `reno` for the client or `cubic` for the server. Neither is the default, so a test sees whether
/// the rule applies.
fn rule(side: &str, agree: &str) -> String {
    let congestion = if side == "client" { "reno" } else { "cubic" };
    format!(
        "[[rule]]\nname = \"test\"\nside = \"{side}\"\nport = {PORT}\nagree = {agree}\ncongestion = \"{congestion}\"\n"
    )
}

const BOUND: &str = "\"bound\"";

fn peer(daemon: &GraftProcess<'_>) -> GraftPeerStatus {
    // While the process that knows the agreement is started again, there is no status of the peer.
    // exact: callers repeat this read until the agreement with the peer is as expected, or expect no change
    daemon.status().peers.pop().unwrap_or_default()
}

fn wait_for_peer(
    daemon: &GraftProcess<'_>,
    what: &str,
    ready: impl FnMut(&GraftPeerStatus) -> bool,
) -> GraftPeerStatus {
    wait_until(what, || peer(daemon), ready)
}

fn wait_for_state(daemon: &GraftProcess<'_>, state: &str) -> GraftPeerStatus {
    wait_for_peer(daemon, state, |peer| peer.state == state)
}

fn why(daemon: &GraftProcess<'_>, peer: &str) -> PeerExplanation {
    serde_json::from_str(&daemon.succeed(&["why", peer, "--json"])).unwrap()
}

/// Reports for the client's and the server's end of a new connection whether it has the rule's congestion control.
fn is_set(site: &GraftSite, listener: &TcpListener) -> (bool, bool) {
    let (near, far) = site.connect(listener);
    let set = (congestion(&near) == "reno", congestion(&far) == "cubic");
    transfer(near, far);
    set
}

/// Adds firewall rules to a host, which make it act as a middlebox. Returns false without nft.
pub fn middlebox(namespace: &str, hook: &str, rules: &[&str]) -> bool {
    let nft = |line: String| {
        let output = Command::new("ip").args(["netns", "exec", namespace, "nft", &line]).output();
        output.is_ok_and(|output| output.status.success())
    };
    nft("add table inet graft".into())
        && nft(format!("add chain inet graft way {{ type {hook}; }}"))
        && rules.iter().all(|rule| nft(format!("add rule inet graft way {rule}")))
}

/// Removes the middlebox's firewall rules.
pub fn flush(namespace: &str) -> bool {
    let output = Command::new("ip").args(["netns", "exec", namespace, "nft", "flush ruleset"]).output();
    output.is_ok_and(|output| output.status.success())
}

pub const BEFORE: &str = "filter hook prerouting priority -300";

#[test]
fn graft_agreement_lasts_until_one_daemon_ends() {
    let Some(site) = GraftSite::new("bound") else { return };
    let [client, server] = keys(&site);
    site.configure_on(0, &caller(&server, &rule("client", BOUND)));
    site.configure_on(1, &called(&client, &rule("server", BOUND)));
    let near = GraftProcess::start_on(&site, 0);
    let listener_before = site.listen();
    assert_eq!(
        is_set(&site, &listener_before),
        (false, false),
        "a connection was set although the peer has no daemon"
    );
    // exact: before connect() returns, the kernel counts whether both ends agreed in TCP options
    assert_eq!(near.status().outcomes["unbound"], 1);
    let absent = wait_for_state(&near, "absent");
    assert!(absent.detail.contains("no daemon of grafts answers on 10.96.0.1:9187"), "{absent:?}");
    drop(listener_before);

    let far = GraftProcess::start_on(&site, 1);
    let listener = site.listen();
    let known = wait_for_state(&near, "agreed");
    let host = known.host.clone().unwrap();
    assert_eq!((host.abi, known.rules.as_slice(), known.functions), (1, &["test".to_owned()][..], 2));
    assert!(known.negotiated.tls_us > 0 && known.negotiated.offer_us > 0, "{known:?}");
    let known = wait_for_state(&far, "agreed");
    assert_eq!(known.address.unwrap().to_string(), CLIENT);
    assert_eq!(is_set(&site, &listener), (true, true));
    let because = why(&near, SERVER);
    assert_eq!(because.outcome.as_deref(), Some("agreed"));
    assert_eq!(because.agreement.unwrap().state, "agreed");
    for daemon in [&near, &far] {
        let path = wait_for_peer(daemon, "path", |peer| peer.path.mtu.is_some());
        let wanted =
            PathVerdict { options: Some(true), udp: Some(true), mtu: Some(1500), nat: Some(NatReport::None) };
        assert_eq!((path.path, path.downgrades), (wanted, 0));
    }

    // The server's daemon is killed, and started again later.
    far.kill();
    let gone = wait_for_peer(&near, "its end", |peer| peer.state != "agreed");
    assert!(["ended", "absent"].contains(&gone.state.as_str()), "{gone:?}");
    assert_eq!(is_set(&site, &listener), (false, false));
    drop(listener);
    let far = GraftProcess::start_on(&site, 1);
    let listener = site.listen();
    // Of the two daemons that agree, the one that opened the TLS connection is the first to report the agreement. The
    // daemon that accepted the connection reports the agreement later.
    wait_for_state(&near, "agreed");
    wait_for_state(&far, "agreed");
    assert_eq!(is_set(&site, &listener), (true, true));
    // The daemon that connects is restarted. Its new run must not wait until the connection of the old run has timed
    // out.
    near.kill();
    let near = GraftProcess::start_on(&site, 0);
    wait_for_state(&near, "agreed");
    wait_for_state(&far, "agreed");
    assert_eq!(is_set(&site, &listener), (true, true));

    // The server's daemon reads new rules. The agreement between the daemons ends, and both report why.
    site.configure_on(1, &called(&client, &rule("server", "false")));
    far.succeed(&["reload"]);
    let refused = wait_for_peer(&near, "a refusal", |peer| peer.state == "refused");
    assert!(refused.detail.contains("(no-rule)"), "{refused:?}");
    assert!(!is_set(&site, &listener).0);
    site.configure_on(1, &called(&client, &rule("server", BOUND)));
    far.succeed(&["reload"]);
    site.configure_on(0, &caller(&server, &rule("client", BOUND)));
    near.succeed(&["reload"]);
    wait_for_state(&near, "agreed");
    wait_for_state(&far, "agreed");
    assert_eq!(is_set(&site, &listener), (true, true));
}

/// Returns the capabilities that one thread of a process at least has or may get, and whether `no_new_privs` and a
/// filter of system calls are set for all threads.
pub fn privileges(process: u32) -> (u64, bool) {
    let mut capabilities = 0;
    let mut is_confined = true;
    // exact: the sets of a thread only shrink, and threads have those of the thread that started them
    for task in fs::read_dir(format!("/proc/{process}/task")).unwrap() {
        // A thread may have ended since it was listed.
        let Ok(status) = fs::read_to_string(task.unwrap().path().join("status")) else { continue };
        let field = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
            line.trim_start_matches(':').trim().to_owned()
        };
        for set in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
            capabilities |= u64::from_str_radix(&field(set), 16).unwrap();
        }
        is_confined &= field("NoNewPrivs") == "1" && field("Seccomp") == "2";
    }
    (capabilities, is_confined)
}

pub const SETGID: u64 = 1 << 6;
pub const SETUID: u64 = 1 << 7;
pub const NET_BIND_SERVICE: u64 = 1 << 10;
pub const NET_ADMIN: u64 = 1 << 12;
pub const NET_RAW: u64 = 1 << 13;
const SYS_ADMIN: u64 = 1 << 21;
const BPF: u64 = 1 << 39;

/// Returns the number of a process's sockets of TCP, UDP or IP.
pub fn network_sockets(process: u32) -> usize {
    let tables = ["tcp", "tcp6", "udp", "udp6", "raw", "raw6"];
    // exact: a process of an agreement keeps its sockets, and the other one never has any
    let tables = tables.map(|table| fs::read_to_string(format!("/proc/{process}/net/{table}")).unwrap());
    let inodes: Vec<_> = tables
        .iter()
        .flat_map(|table| table.lines().skip(1))
        .filter_map(|line| Some(format!("socket:[{}]", line.split_whitespace().nth(9)?)))
        .collect();
    // exact: a process of an agreement keeps its sockets, and the other one never has any
    let open = fs::read_dir(format!("/proc/{process}/fd")).unwrap();
    let targets = open.filter_map(|entry| fs::read_link(entry.ok()?.path()).ok());
    targets.filter(|target| inodes.iter().any(|inode| target.as_os_str() == inode.as_str())).count()
}

/// A fault in a parser of peers' messages could let a peer control its process. So that process cannot get CAP_BPF. The
/// process with CAP_BPF has no socket by which a host could reach it.
#[test]
fn process_that_parses_messages_of_peers_cannot_load_bpf_programs() {
    let Some(site) = GraftSite::new("caps") else { return };
    let [client, server] = keys(&site);
    site.configure_on(0, &caller(&server, &rule("client", BOUND)));
    site.configure_on(1, &called(&client, &rule("server", BOUND)));
    let [near, far] = [0, 1].map(|side| GraftProcess::start_on(&site, side));
    for daemon in [&near, &far] {
        wait_for_state(daemon, "agreed");
        let all = daemon.succeed(&["status", "--json"]);
        let (capabilities, is_confined) = privileges(part(&all, "agreements"));
        assert!(is_confined);
        assert_eq!(capabilities & !(NET_BIND_SERVICE | NET_RAW), 0, "{capabilities:x}");
        assert!(network_sockets(part(&all, "agreements")) > 0);
        // The process that loads the programs needs what the other one must not have.
        let (capabilities, _) = privileges(part(&all, "grafts"));
        assert_eq!(capabilities & (SYS_ADMIN | BPF), SYS_ADMIN | BPF);
        assert_eq!(network_sockets(part(&all, "grafts")), 0);
    }
}

/// The agreement ends with the process that renews it, and comes back with the next one. If the process that holds the
/// rules ends, the agreement is negotiated again, too.
#[test]
fn agreement_returns_after_either_process_of_a_daemon_was_killed_or_has_hung() {
    let Some(site) = GraftSite::new("ends") else { return };
    let [client, server] = keys(&site);
    site.configure_on(0, &caller(&server, &rule("client", BOUND)));
    site.configure_on(1, &called(&client, &rule("server", BOUND)));
    let [near, far] = [0, 1].map(|side| GraftProcess::start_on(&site, side));
    let listener = site.listen();
    for daemon in [&near, &far] {
        for name in ["agreements", "grafts"] {
            wait_for_state(&near, "agreed");
            wait_for_state(&far, "agreed");
            signal(part(&daemon.succeed(&["status", "--json"]), name), Signal::SIGKILL);
            wait_until("agreed rules", || is_set(&site, &listener), |set| *set == (true, true));
        }
    }
    // While the process that talks to the peer hangs, the agreement ends at both hosts.
    let hanging = part(&near.succeed(&["status", "--json"]), "agreements");
    pause(hanging);
    wait_for_peer(&far, "its end", |peer| peer.state != "agreed");
    wait_until("plain TCP", || is_set(&site, &listener), |set| *set == (false, false));
    signal(hanging, Signal::SIGCONT);
    wait_until("agreed rules", || is_set(&site, &listener), |set| *set == (true, true));
}

/// Both daemons connect to each other. Only one of the two agreements may remain, and it must last.
#[test]
fn either_daemon_may_open_the_connection_that_negotiates_grafts() {
    let Some(site) = GraftSite::new("both") else { return };
    let [client, server] = keys(&site);
    let listens = caller(&server, &rule("client", BOUND))
        .replace("interval-s", &format!("listen = \"{CLIENT}:{CONTROL}\"\ninterval-s"));
    let calls = called(&client, &rule("server", BOUND))
        .replace("name = \"client\"", &format!("name = \"client\"\naddress = \"{CLIENT}:{CONTROL}\""));
    site.configure_on(0, &listens);
    site.configure_on(1, &calls);
    let near = GraftProcess::start_on(&site, 0);
    let far = GraftProcess::start_on(&site, 1);
    let listener = site.listen();
    wait_for_state(&near, "agreed");
    wait_for_state(&far, "agreed");
    assert_eq!(is_set(&site, &listener), (true, true));
    // Three intervals after the latest change, no connection is left that could replace the agreement's.
    for daemon in [&near, &far] {
        wait_for_peer(daemon, "three intervals", |peer| peer.state == "agreed" && peer.age_s >= 3.0);
    }
    let agreed = |daemon: &GraftProcess<'_>| {
        // exact: nothing is being negotiated any more
        let counts = daemon.status().negotiations;
        counts.get("agreed").copied().unwrap_or_default()
    };
    // One host decides between two simultaneous connections. The other one may have chosen otherwise, and follows.
    let counts = [agreed(&near), agreed(&far)];
    assert!(counts.contains(&1) && counts.iter().all(|count| (1..=2).contains(count)), "{counts:?}");
}

#[test]
fn stripped_tcp_option_is_reported_as_a_downgrade() {
    let Some(site) = GraftSite::new("downgrade") else { return };
    let [client, server] = keys(&site);
    if !middlebox(&site.namespaces[0], BEFORE, &["reset tcp option 253"]) {
        println!(
            "SKIP stripped_tcp_option_is_reported_as_a_downgrade: nftables cannot take options off here"
        );
        return;
    }
    site.configure_on(0, &caller(&server, &rule("client", "true")));
    site.configure_on(1, &called(&client, &rule("server", "true")));
    let near = GraftProcess::start_on(&site, 0);
    let far = GraftProcess::start_on(&site, 1);
    let listener = site.listen();
    for daemon in [&near, &far] {
        // The middlebox also strips the graft daemon's TCP option from the connection over which the daemons agree. So
        // this connection is the first that both daemons count as a downgrade (a connection without the option).
        let is_agreed = |peer: &GraftPeerStatus| peer.downgrades > 0 && peer.state == "agreed";
        let first = wait_for_peer(daemon, "downgrade", is_agreed);
        assert_eq!(first.path.options, Some(false), "{first:?}");
    }
    assert_eq!(is_set(&site, &listener), (false, false));
    for (daemon, other) in [(&near, SERVER), (&far, CLIENT)] {
        wait_for_peer(daemon, "the connection", |peer| {
            peer.latest_downgrades.iter().any(|it| it.port == PORT)
        });
        let because = why(daemon, other).agreement.unwrap();
        assert!(because.latest_downgrades.iter().all(|it| it.kind == "stripped"), "{because:?}");
        wait_until(
            "both downgrades to be counted",
            || daemon.status().downgrades,
            |counts| counts["stripped"] >= 2,
        );
        wait_for("the downgrade in the log", || daemon.log().contains("TCP option that negotiates grafts"));
    }
}

/// A middlebox changes the TCP option in the server's answer, so the option names another congestion control than the
/// one agreed on.
#[test]
fn changed_tcp_option_is_reported_as_a_downgrade() {
    let Some(site) = GraftSite::new("altered") else { return };
    let [client, server] = keys(&site);
    let change = format!("tcp sport {PORT} tcp option @253,64,32 set 0x12345678");
    if !middlebox(&site.namespaces[0], BEFORE, &[&change]) {
        println!("SKIP changed_tcp_option_is_reported_as_a_downgrade: nftables cannot change options here");
        return;
    }
    site.configure_on(0, &caller(&server, &rule("client", "true")));
    site.configure_on(1, &called(&client, &rule("server", "true")));
    let near = GraftProcess::start_on(&site, 0);
    let far = GraftProcess::start_on(&site, 1);
    let listener = site.listen();
    wait_for_state(&near, "agreed");
    wait_for_state(&far, "agreed");
    is_set(&site, &listener);
    for daemon in [&near, &far] {
        let found = wait_for_peer(daemon, "downgrade", |peer| peer.downgrades > 0);
        assert_eq!(
            found.latest_downgrades.iter().map(|it| it.kind.as_str()).collect::<Vec<_>>(),
            ["altered"]
        );
    }
}

#[test]
fn refused_agreements_are_reported_at_both_ends() {
    let Some(site) = GraftSite::new("refuse") else { return };
    let [client, server] = keys(&site);
    let other = key(&site, "other.key");
    let ours = rule("client", BOUND);
    let theirs = rule("server", BOUND);
    let wants = ours.replace("congestion = \"reno\"", "congestion = \"reno\"\npeer-graft = \"longhaul\"");
    let table = [
        (caller(&server, &format!("min-cpus = 100000\n{ours}")), called(&client, &theirs), "resources"),
        (
            caller(&server, &ours),
            called(&client, &format!("min-memory-mib = 100000000\n{theirs}")),
            "resources",
        ),
        (caller(&server, &format!("min-kernel = \"99.0\"\n{ours}")), called(&client, &theirs), "kernel"),
        (caller(&server, &wants), called(&client, &theirs), "unknown-function"),
        (caller(&server, &ours), called(&client, &theirs.replace("7100", "7101")), "no-rule"),
        (caller(&server, &ours), called(&client, &ours), "no-rule"),
        (caller(&server, &ours), called(&client, &format!("{theirs}peer = \"192.0.2.0/24\"\n")), "no-rule"),
        (caller(&other, &ours), called(&client, &theirs), "untrusted"),
        (caller(&server, &ours), called(&other, &theirs), "untrusted"),
    ];
    for (here, there, reason) in table {
        site.configure_on(0, &here);
        site.configure_on(1, &there);
        let far = GraftProcess::start_on(&site, 1);
        let near = GraftProcess::start_on(&site, 0);
        let is_so =
            |peer: &GraftPeerStatus| peer.state == reason || peer.detail.contains(&format!("({reason})"));
        let said = wait_for_peer(&near, reason, is_so);
        assert!(!said.detail.is_empty() && said.rules.is_empty(), "{said:?}");
        let is_counted = |counts: &BTreeMap<String, u64>| counts.get(reason).is_some_and(|count| *count > 0);
        wait_until("its count", || near.status().negotiations, is_counted);
        if reason == "untrusted" {
            let strangers = |status: Status| status.negotiations.get("stranger").copied();
            wait_for("stranger", || strangers(far.status()));
            assert_eq!(peer(&far).state, "waiting");
        } else {
            wait_for_peer(&far, reason, is_so);
        }
    }
}

/// A NAT translates addresses at one host, and then at both hosts.
#[test]
fn one_nat_is_reported_and_nats_at_two_hosts_are_refused() {
    let Some(site) = GraftSite::new("nat") else { return };
    let [client, server] = keys(&site);
    let nat = |side: usize, hook: &str, rule: &str| middlebox(&site.namespaces[side], hook, &[rule]);
    let called_as = "10.96.0.7";
    for (side, address) in [(1, called_as), (0, "10.96.0.9")] {
        crate::site::ip(&format!("-n {} addr add {address}/24 dev eth", site.namespaces[side]));
    }
    let there = format!("ip daddr {called_as} dnat ip to {SERVER}");
    if !nat(1, "nat hook prerouting priority -100", &there) {
        println!(
            "SKIP one_nat_is_reported_and_nats_at_two_hosts_are_refused: nftables cannot translate here"
        );
        return;
    }
    let calls = caller(&server, &rule("client", BOUND)).replace(SERVER, called_as);
    site.configure_on(0, &calls);
    site.configure_on(1, &called(&client, &rule("server", BOUND)));
    let near = GraftProcess::start_on(&site, 0);
    let far = GraftProcess::start_on(&site, 1);
    wait_for_peer(&near, "a report of the address translation", |peer| {
        peer.path.nat == Some(NatReport::Theirs) && peer.state == "agreed"
    });
    wait_for_peer(&far, "a translation", |peer| peer.path.nat == Some(NatReport::Ours));
    near.kill();
    assert!(nat(
        0,
        "nat hook postrouting priority 100",
        &format!("ip daddr {called_as} snat ip to 10.96.0.9")
    ));
    let near = GraftProcess::start_on(&site, 0);
    for daemon in [&near, &far] {
        let refused = wait_for_peer(daemon, "a refusal", |peer| peer.detail.contains("(nat)"));
        assert!(refused.detail.contains("both ends are behind a translation"), "{refused:?}");
    }
}

#[test]
fn signed_graft_is_downloaded_from_a_peer_by_hash() {
    let Some(site) = GraftSite::with_controls("fetch") else { return };
    let [client, server] = keys(&site);
    let (identity, signer) = signed_graft(&site);
    let fetches = |trusted: &str, identity: &str| {
        format!(
            "{}[[fetch]]\ngraft = \"longhaul2\"\nsha256 = \"{identity}\"\n{}",
            caller(&server, "").replace("interval-s", "fetch-to = \"fetched\"\ninterval-s"),
            rule("client", BOUND).replace("congestion = \"reno\"", "graft = \"longhaul2\""),
        )
        .replace("[agreement]", &format!("trusted-keys = [\"{trusted}\"]\n[agreement]"))
    };
    fs::create_dir(site.path("fetched")).unwrap();
    let gives = |give: &str| {
        called(&client, &rule("server", BOUND))
            .replace("[agreement]", &format!("pool = [\"pool\"]\n[agreement]\n{give}"))
    };
    site.configure_on(1, &gives("give = true"));
    let far = GraftProcess::start_on(&site, 1);
    // The trusted key is not the key that signed the graft.
    site.configure_on(0, &fetches(&"00".repeat(32), &identity));
    let near = GraftProcess::start_on(&site, 0);
    wait_for("its refusal", || near.log().contains("its signature was made by none"));
    assert_eq!(fs::read_dir(site.path("fetched")).unwrap().count(), 0);
    // exact: the rule still waits for the graft that it names, since the daemon refused the fetched graft
    assert!(near.status().rules[0].waits);
    near.kill();

    site.configure_on(0, &fetches(&signer, &identity));
    let near = GraftProcess::start_on(&site, 0);
    wait_for_state(&near, "agreed");
    // exact: the rule no longer waits for the graft that it names, since daemons fetch missing grafts before they agree
    assert!(!near.status().rules[0].waits);
    let listener = site.listen();
    let (one, other) = site.connect(&listener);
    assert_eq!(congestion(&one), "mr_longhaul");
    transfer(one, other);
    near.kill();
    // The graft is in the directory already, so the peer need not send it.
    site.configure_on(1, &gives(""));
    far.succeed(&["reload"]);
    let near = GraftProcess::start_on(&site, 0);
    wait_for_state(&near, "agreed");
    near.kill();
    // The peer no longer offers the graft that the rule names. The rule must not apply yet, although the daemons have
    // agreed.
    fs::remove_dir_all(site.path("fetched")).unwrap();
    fs::create_dir(site.path("fetched")).unwrap();
    let near = GraftProcess::start_on(&site, 0);
    wait_for_state(&near, "agreed");
    // exact: the rule keeps waiting for the graft that it names, since no peer offers that graft
    assert!(near.status().rules[0].waits);
    let (one, other) = site.connect(&listener);
    assert_ne!(congestion(&one), "mr_longhaul");
    transfer(one, other);
}

/// Puts a copy of the graft `longhaul` into the graft directory `pool` under another name. Returns the hash that
/// identifies the copy, and the public key that signed it.
fn signed_graft(site: &GraftSite) -> (String, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_millrace"));
    let output = command.args(["graft", "export"]).arg(site.path("pool")).arg("longhaul").output().unwrap();
    assert!(output.status.success());
    let text = fs::read_to_string(site.path("pool/longhaul.toml")).unwrap();
    fs::remove_file(site.path("pool/longhaul.toml")).unwrap();
    let text = text.replace("name = \"longhaul\"", "name = \"longhaul2\"");
    let identity = text.lines().find_map(|line| line.strip_prefix("sha256 = \"")).unwrap();
    let identity = identity.trim_end_matches('"').to_owned();
    use ::ring::signature::{Ed25519KeyPair, KeyPair as _};
    let pair = Ed25519KeyPair::from_seed_unchecked(&[7; 32]).unwrap();
    let hex = millrace_graft::identity::hex;
    let line = format!("signature = \"{}\"\n", hex(pair.sign(text.as_bytes()).as_ref()));
    fs::write(site.path("pool/longhaul2.toml"), format!("{line}{text}")).unwrap();
    (identity, hex(pair.public_key().as_ref()))
}

pub type Tls = StreamOwned<ClientConnection, TcpStream>;

fn pretend(site: &GraftSite) -> Tls {
    pretend_at(site, CONTROL, ALPN)
}

/// Connects to the daemon's agreement port as a client that is not our daemon but has the client's key.
pub fn pretend_at(site: &GraftSite, port: u16, alpn: &[u8]) -> Tls {
    let pem = fs::read_to_string(site.path("host0.key")).unwrap();
    let pair = rcgen::KeyPair::from_pem(&pem).unwrap();
    let certificate = rcgen::CertificateParams::new(["c".to_owned()]).unwrap().self_signed(&pair).unwrap();
    let key = PrivateKeyDer::from_pem_slice(pem.as_bytes()).unwrap();
    let mut config = CertificateTrust::Anyone.client_config(&[alpn]).unwrap();
    let own = CertifiedKey::from_der(vec![certificate.der().clone()], key, config.crypto_provider()).unwrap();
    config.client_auth_cert_resolver = Arc::new(SingleCertAndKey::from(own));
    let name = ServerName::try_from("c").unwrap();
    let tcp = call(site, port);
    StreamOwned::new(ClientConnection::new(Arc::new(config), name).unwrap(), tcp)
}

fn call(site: &GraftSite, port: u16) -> TcpStream {
    let stream = inside(&site.namespaces[0], || TcpStream::connect((SERVER, port)).unwrap());
    stream.set_read_timeout(Some(LONG)).unwrap();
    stream
}

fn send(tls: &mut Tls, bytes: &[u8]) {
    tls.write_all(&u32::try_from(bytes.len()).unwrap().to_be_bytes()).unwrap();
    tls.write_all(bytes).unwrap();
}

fn receive(tls: &mut Tls) -> AgreementMessage {
    let mut length = [0; 4];
    tls.read_exact(&mut length).unwrap();
    let mut bytes = vec![0; u32::from_be_bytes(length) as usize];
    tls.read_exact(&mut bytes).unwrap();
    AgreementMessage::decode(&bytes).unwrap()
}

fn offer(tls: &Tls, change: impl FnOnce(&mut Statement)) -> Vec<u8> {
    let mut statement = Statement {
        versions: vec![1],
        epoch: 1,
        hold_s: 30,
        host: HostOffer { program: "x".into(), kernel: "6.18".into(), abi: 1, cpus: 1, memory_mib: 1 },
        local: tls.sock.local_addr().unwrap(),
        remote: tls.sock.peer_addr().unwrap(),
        functions: Vec::new(),
        rules: vec![RuleOffer {
            side: OfferSide::Client,
            first_port: PORT,
            last_port: PORT,
            graft: None,
            wants: None,
        }],
        connections: Vec::new(),
        path: PathVerdict::default(),
    };
    change(&mut statement);
    serde_json::to_vec(&AgreementMessage::Offer(Box::new(statement))).unwrap()
}

/// A peer with the right key violates the protocol in several ways, and strangers connect without the key.
#[test]
fn peer_that_violates_the_agreement_protocol_changes_nothing() {
    let Some(site) = GraftSite::new("hostile") else { return };
    let [client, _] = keys(&site);
    site.configure_on(1, &called(&client, &rule("server", BOUND)));
    let far = GraftProcess::start_on(&site, 1);
    let refused = |change: fn(&mut Statement)| {
        let mut tls = pretend(&site);
        let bytes = offer(&tls, change);
        send(&mut tls, &bytes);
        let AgreementMessage::Refuse(refusal) = receive(&mut tls) else { panic!("no refusal") };
        // The daemon sends the refusal before it stores the reason in its status.
        wait_for_peer(&far, "its note", |peer| peer.detail.ends_with(&refusal.detail));
        refusal.reason
    };
    assert_eq!(refused(|it| it.versions = vec![2]), RefusalReason::Version);
    assert_eq!(refused(|it| it.host.abi = 9), RefusalReason::Abi);
    assert_eq!(refused(|it| it.rules[0].wants = Some(Hash([1; 32]))), RefusalReason::UnknownFunction);
    assert_eq!(refused(|it| it.rules.clear()), RefusalReason::NoRule);

    let many: fn(&mut Statement) = |it| it.rules = vec![it.rules[0].clone(); 65];
    let mut tls = pretend(&site);
    let too_many = offer(&tls, many);
    send(&mut tls, &too_many);
    let state = wait_for_state(&far, "malformed");
    assert!(state.detail.contains("too many rules"), "{state:?}");
    for (bytes, wanted) in [
        (&b"{"[..], "not a message"),
        (
            &serde_json::to_vec(&AgreementMessage::Confirm).unwrap()[..],
            "the peer sent confirm instead of offer",
        ),
    ] {
        send(&mut pretend(&site), bytes);
        wait_for_peer(&far, wanted, |peer| peer.detail.contains(wanted));
    }
    let mut tls = pretend(&site);
    tls.write_all(&u32::MAX.to_be_bytes()).unwrap();
    wait_for_peer(&far, "length", |peer| peer.detail.contains("the message has 4294967295 bytes"));
    // A connected peer of the daemon completes the TLS handshake, and then sends nothing.
    let mut tls = pretend(&site);
    tls.conn.complete_io(&mut tls.sock).unwrap();
    wait_for_state(&far, "timed-out");

    // The peer offers congestion controls and grafts, but does not confirm the daemon's answer, so the daemon must not
    // report an agreement.
    let mut tls = pretend(&site);
    let bytes = offer(&tls, |_| ());
    send(&mut tls, &bytes);
    assert!(matches!(receive(&mut tls), AgreementMessage::Accept(_)));
    assert_ne!(peer(&far).state, "agreed");
    send(&mut tls, &AgreementMessage::Confirm.encode().unwrap());
    wait_for_state(&far, "agreed");
    // The peer requests a graft that the daemon does not offer. The daemon must refuse with a reason.
    send(&mut tls, &bytes);
    assert!(matches!(receive(&mut tls), AgreementMessage::Accept(_)));
    send(&mut tls, &AgreementMessage::Fetch { identity: Hash([1; 32]) }.encode().unwrap());
    assert!(
        matches!(receive(&mut tls), AgreementMessage::Refuse(refusal) if refusal.reason == RefusalReason::NotGiven)
    );
    wait_for_peer(&far, "its end", |peer| peer.state != "agreed");

    // Strangers send bytes that are not TLS, or an incomplete handshake, over many connections at the same time.
    let mut silent: Vec<_> = (0..100).map(|_| call(&site, CONTROL)).collect();
    for stream in &mut silent {
        let _ = stream.write_all(b"GET / HTTP/1.1\r\n\r\n");
    }
    wait_for("strangers", || far.status().negotiations.get("stranger").filter(|count| **count > 0).copied());
    drop(silent);
    let mut tls = wait_for("room", || {
        let mut tls = pretend(&site);
        let bytes = offer(&tls, |_| ());
        tls.write_all(&u32::try_from(bytes.len()).unwrap().to_be_bytes()).ok()?;
        tls.write_all(&bytes).ok()?;
        Some(tls)
    });
    assert!(matches!(receive(&mut tls), AgreementMessage::Accept(_)));
}
