//! Tests of rules that leave the choice to a model: the chosen candidate (a congestion control, graft or tunnel), the
//! learned results, and the reported reason for each connection's choice.

use std::{
    fs,
    io::{Read as _, Write as _},
    net::{Shutdown, SocketAddr, TcpListener, TcpStream},
};

use millrace_graft::status::{CarrierStatus, GraftConnectionStatus, SelectionStatus};
use millrace_lab::lab::{Directions, Topology};

use crate::{
    agreement::key,
    carried::{CARRIERS, carry},
    site::{GraftProcess, GraftSite, LONG, PORT, congestion, wait_for, wait_for_none_of_ours, wait_until},
};

/// Returns a leaf of a model's decision tree as JSON, which ranks the given candidates (congestion controls, grafts or
/// tunnels), the best first. `usual` is a limit on the measured cost of a connection: at most this cost counts as good.
pub fn leaf(number: u32, candidates: &[&str], usual: Option<f64>) -> String {
    let rank = |(at, candidate): (usize, &&str)| {
        let right = 1.0 / (at + 1) as f64;
        format!("{{\"candidate\":\"{candidate}\",\"right\":{right},\"utility\":{right}}}")
    };
    let ranking: Vec<_> = candidates.iter().enumerate().map(rank).collect();
    let usual = usual.map_or_else(String::new, |usual| format!("\"usual\":{usual},"));
    format!("{{\"leaf\":{{\"number\":{number},\"examples\":1,{usual}\"ranking\":[{}]}}}}", ranking.join(","))
}

pub fn model(site: &GraftSite, candidates: &[&str], tree: &str) {
    let names: Vec<_> = candidates.iter().map(|candidate| format!("\"{candidate}\"")).collect();
    let text = format!(
        "{{\"version\":1,\"about\":\"a test\",\"candidates\":[{}],\"tree\":{tree}}}",
        names.join(",")
    );
    fs::write(site.path("model.json"), text).unwrap();
}

fn rule(tier: &str) -> String {
    format!(
        "[[rule]]\nname = \"web\"\nside = \"client\"\nport = {PORT}\nagree = false\nselect = \"loss\"\nsize-kib = 256\n\
         tier = \"{tier}\"\n"
    )
}

fn selection(daemon: &GraftProcess<'_>) -> SelectionStatus {
    // exact: callers repeat this read of the daemon's selection status, or expect values that do not change
    daemon.status().selection.unwrap()
}

/// Sends `length` bytes over a new connection, and waits until all have arrived. Returns the connection's congestion
/// control, and the addresses of its two ends.
fn send(site: &GraftSite, listener: &TcpListener, length: usize) -> (String, [SocketAddr; 2]) {
    let near = site.try_connect(listener.local_addr().unwrap()).unwrap();
    let (mut far, _) = listener.accept().unwrap();
    for stream in [&near, &far] {
        stream.set_read_timeout(Some(LONG)).unwrap();
        stream.set_write_timeout(Some(LONG)).unwrap();
    }
    let used = congestion(&near);
    let ends = [near.local_addr().unwrap(), near.peer_addr().unwrap()];
    let sender = std::thread::spawn(move || finish(near, &vec![7; length]));
    let mut got = Vec::new();
    far.read_to_end(&mut got).unwrap();
    drop(far);
    sender.join().unwrap();
    assert_eq!(got.len(), length);
    (used, ends)
}

fn finish(mut near: TcpStream, bytes: &[u8]) {
    near.write_all(bytes).unwrap();
    near.shutdown(Shutdown::Write).unwrap();
    assert_eq!(near.read(&mut [0]).unwrap(), 0);
}

pub fn why(daemon: &GraftProcess<'_>, [local, remote]: [SocketAddr; 2]) -> GraftConnectionStatus {
    let said = daemon.succeed(&["why", &format!("{local}-{remote}"), "--json"]);
    serde_json::from_str(&said).unwrap()
}

fn default_control() -> String {
    fs::read_to_string("/proc/sys/net/ipv4/tcp_congestion_control").unwrap().trim().to_owned()
}

fn available_controls() -> String {
    fs::read_to_string("/proc/sys/net/ipv4/tcp_available_congestion_control").unwrap()
}

/// Returns a congestion control of the kernel that is not the default, and that is slow on a path with loss.
fn other_control(test: &str) -> Option<&'static str> {
    let there = available_controls();
    let usual = default_control();
    let is_other = |it: &&str| *it != usual && there.split_whitespace().any(|known| known == *it);
    let other = ["reno", "cubic"].into_iter().find(is_other);
    if other.is_none() {
        println!("SKIP {test}: there is no other congestion control");
    }
    other
}

fn lossy_pair() -> Topology {
    let mut topology = Topology { netem: false, ..Topology::default() };
    topology.connect("client", "far");
    topology.impair("client-far", Directions::Both, "delay=30ms").unwrap();
    topology.impair("client-far", Directions::Forward, "loss=3% rate=20mbit").unwrap();
    topology
}

/// The model prefers a congestion control that halves its window at each loss. The path loses three packets of a
/// hundred.
#[test]
fn measured_results_overrule_a_wrong_model_within_fifty_connections() {
    const TEST: &str = "measured_results_overrule_a_wrong_model_within_fifty_connections";
    if default_control() != "bbr" {
        println!("SKIP {TEST}: plain TCP is not BBR here, so it would be as bad");
        return;
    }
    let Some(wrong) = other_control(TEST) else { return };
    let Some(site) = GraftSite::in_lab("wrong", &lossy_pair()).map(GraftSite::alone) else { return };
    model(&site, &[wrong, "bbr"], &leaf(0, &[wrong, "bbr"], Some(2.0)));
    site.configure(&format!("model = \"model.json\"\n{}", rule("in-place")));
    let daemon = GraftProcess::start(&site);
    let listener = site.listen_on(SocketAddr::new(site.address("far"), PORT));
    let (first, ends) = send(&site, &listener, 256 << 10);
    assert_eq!(first, "bbr", "nothing is known of the path");
    let told = why(&daemon, ends);
    assert_eq!((told.why.as_str(), told.tier.as_str()), ("first", "in-place"), "{told:?}");
    let told = told.ended.unwrap();
    assert!(told.sent >= 256 << 10, "{told:?}");
    wait_until("a choice", || selection(&daemon), |it| it.chosen == 1);

    let mut used = Vec::new();
    while used.len() < 50 {
        let (control, ends) = send(&site, &listener, 256 << 10);
        let told = why(&daemon, ends);
        assert_eq!(told.candidate, control, "{told:?}");
        used.push(control);
        if used.iter().rev().take(4).filter(|control| *control == "bbr").count() == 4 {
            break;
        }
    }
    // The daemon must have recorded for every connection whether the chosen congestion control had a usual or a too
    // high cost.
    let is_all = |now: &SelectionStatus| now.outcomes.values().sum::<u64>() == used.len() as u64 + 1;
    let now = wait_until("all outcomes", || selection(&daemon), is_all);
    assert!(used.iter().any(|control| control == wrong), "the candidate was never tried: {now:?}");
    assert!(used.len() < 50 && used.last().is_some_and(|it| it == "bbr"), "{used:?}: {now:?}");
    println!("recovered within {} connections", used.len());
    assert!(["doubted", "found"].contains(&now.paths[0].why.as_str()), "{now:?}");
    let words = daemon.succeed(&["why", &site.address("far").to_string()]);
    assert!(words.contains("bbr for web, ") && words.contains(&format!("outcomes: {wrong}: ")), "{words}");
    daemon.kill();
    assert_eq!(send(&site, &listener, 1000).0, "bbr");
    wait_for_none_of_ours();
}

/// A restarted daemon uses the results that it has learned before. It renames a file of results that it cannot read,
/// and reports it.
#[test]
fn learned_congestion_control_results_survive_a_daemon_restart() {
    let Some(learned) = other_control("learned_congestion_control_results_survive_a_daemon_restart") else {
        return;
    };
    let Some(site) = GraftSite::new("outlasts") else { return };
    // The model counts a connection as good only if its cost is at most 0, so every connection counts as bad.
    model(&site, &[learned], &leaf(0, &[learned], Some(0.0)));
    site.configure(&format!("model = \"model.json\"\nlearned = \"learned.json\"\n{}", rule("in-place")));
    let listener = site.listen();
    let daemon = GraftProcess::start(&site);
    let mut sent = 0;
    wait_for("doubt", || {
        send(&site, &listener, 64 << 10);
        sent += 1;
        (selection(&daemon).paths.first()?.why != "learned").then_some(())
    });
    let is_all = |it: &SelectionStatus| it.outcomes.values().sum::<u64>() == sent;
    wait_until("all outcomes", || selection(&daemon), is_all);
    let before = selection(&daemon).paths.remove(0);
    // exact: the counts of good and bad connections are final, since every connection has ended
    let kinds = daemon.status().purposes;
    daemon.end();
    let daemon = GraftProcess::start(&site);
    // exact: the daemon restores its learned results from the file before its start is complete
    assert_eq!(daemon.status().purposes, kinds);
    send(&site, &listener, 10);
    let after = wait_for("a choice", || selection(&daemon).paths.pop());
    assert_eq!((&after.candidate, &after.why), (&before.candidate, &before.why));
    // The connection that was sent after the restart may have an outcome already, with another congestion control.
    let restored: Vec<_> = after.tried.iter().filter(|tried| tried.candidate == learned).collect();
    assert_eq!(restored, before.tried.iter().collect::<Vec<_>>());
    daemon.end();
    fs::write(site.path("learned.json"), "no JSON").unwrap();
    let daemon = GraftProcess::start(&site);
    // exact: the daemon reads the file of learned results, and reports failures, before its start is complete
    let trouble = daemon.status().trouble.join("\n");
    assert!(
        trouble.contains("the learned state cannot be read") && trouble.contains("learned.json.unreadable"),
        "{trouble}"
    );
    assert_eq!(selection(&daemon).learned_places, 0);
    assert_eq!(fs::read_to_string(site.path("learned.json.unreadable")).unwrap(), "no JSON");
}

/// This test's model states no cost above which a connection counts as bad. If a connection has another congestion
/// control than the model prefers, the daemon therefore chose it as an experiment (exploration).
#[test]
fn at_most_two_percent_of_connections_explore_another_candidate() {
    let Some(learned) = other_control("at_most_two_percent_of_connections_explore_another_candidate") else {
        return;
    };
    let Some(site) = GraftSite::new("explore") else { return };
    model(&site, &[learned], &leaf(0, &[learned], None));
    site.configure(&format!("model = \"model.json\"\n{}", rule("in-place")));
    let listener = site.listen();
    let daemon = GraftProcess::start(&site);
    wait_for("a choice", || (send(&site, &listener, 10).0 == learned).then_some(()));
    let mut connections = 0_u64;
    let mut explored = 0_u64;
    while explored < 3 {
        assert!(connections < 5000, "{explored} of {connections}: {:?}", selection(&daemon));
        connections += 1;
        let (used, ends) = send(&site, &listener, 10);
        if used != learned {
            explored += 1;
            let told = why(&daemon, ends);
            assert_eq!((told.why.as_str(), &told.candidate), ("explored", &used), "{told:?}");
            assert!(daemon.succeed(&["why", &format!("{} {}", ends[0], ends[1])]).contains("to find out"));
        }
        // The daemon limits explorations (connections that try another candidate) to two percent of all connections. At
        // least one connection was made before this loop, and counts too.
        assert!(explored * 100 <= (connections + 1) * 2, "{explored} of {connections}");
    }
    let now = selection(&daemon);
    // The daemon may already have planned the next connection that tries another candidate (exploration).
    let planned = now.paths[0].explored;
    assert!(now.reasons["explored"] == explored && (explored..=explored + 1).contains(&planned), "{now:?}");
    let other = daemon.fail(&["why", "192.0.2.1:1-192.0.2.2:2"]);
    assert!(other.contains("nothing is known of a connection 192.0.2.1:1-192.0.2.2:2"), "{other}");
    assert!(daemon.fail(&["why", "192.0.2.1:1"]).contains("add the remote end as REMOTE:PORT"));
}

/// A paused daemon reads no events of connections (begin and end) from the kernel, but connections continue. Lost
/// events are counted.
#[test]
fn connection_events_that_a_paused_daemon_misses_are_counted() {
    let Some(learned) = other_control("connection_events_that_a_paused_daemon_misses_are_counted") else {
        return;
    };
    let Some(site) = GraftSite::new("lost") else { return };
    model(&site, &[learned], &leaf(0, &[learned], None));
    site.configure(&format!("model = \"model.json\"\n{}", rule("in-place")));
    let listener = site.listen();
    let daemon = GraftProcess::start(&site);
    wait_for("a choice", || (send(&site, &listener, 10).0 == learned).then_some(()));
    let before: u64 = selection(&daemon).reasons.values().sum();
    daemon.pause();
    const CROWD: u64 = 4000;
    for _ in 0..CROWD {
        drop(site.connect(&listener));
    }
    daemon.go_on();
    let numbers = || {
        // exact: `wait_until` rereads the counts of reported and lost connections until they add up
        let status = daemon.status();
        (status.outcomes["event-lost"], status.selection.unwrap().reasons.values().sum::<u64>() - before)
    };
    let is_all = |(lost, begun): &(u64, u64)| begun + lost >= CROWD;
    let (lost, begun) = wait_until("each connection to be reported or counted as lost", numbers, is_all);
    assert!(lost > 0 && begun < CROWD, "{lost} lost, {begun} reported");
    assert!(
        2 * CROWD >= begun + lost && begun + lost >= CROWD,
        "{begun} connections began, and {lost} were counted as lost"
    );
    // Connections whose end the daemon missed do not stay in its list of live connections.
    wait_until("the end of all connections", || selection(&daemon), |it| it.live.is_empty());
}

fn far_and_near() -> Topology {
    let mut topology = Topology { netem: false, ..Topology::default() };
    topology.connect("client", "far");
    topology.connect("client", "near");
    topology.impair("client-far", Directions::Both, "delay=40ms").unwrap();
    topology.impair("client-far", Directions::Forward, "loss=2% rate=20mbit").unwrap();
    topology
}

/// The client has an established tunnel to each of two hosts, and one rule for both. The model must tunnel connections
/// over the long path with losses, and choose plain TCP for the short path.
#[test]
fn model_tunnels_over_lossy_long_path_and_uses_plain_tcp_on_short_path() {
    if !available_controls().split_whitespace().any(|known| known == "bbr") {
        return println!(
            "SKIP model_tunnels_over_lossy_long_path_and_uses_plain_tcp_on_short_path: there is no BBR"
        );
    }
    let Some(site) = GraftSite::in_lab("tiers", &far_and_near()) else { return };
    let keys = ["host0.key", "host1.key", "host2.key"].map(|name| key(&site, name));
    let short = leaf(0, &["bbr", "carried-warm"], Some(50.0));
    let long = leaf(1, &["carried-warm", "bbr"], Some(50.0));
    let tree = format!(
        "{{\"split\":{{\"by\":\"rtt\",\"at\":40.0,\"unknown\":\"below\",\"below\":{short},\"above\":{long}}}}}"
    );
    model(&site, &["bbr", "carried-warm"], &tree);
    let servers = ["far", "near"];
    let peers: String = (1..)
        .zip(servers)
        .map(|(at, name)| {
            format!(
                "[[peer]]\nname = \"{name}\"\nkey = \"{}\"\ncarry = \"{}:{CARRIERS}\"\n",
                keys[at],
                site.address(name)
            )
        })
        .collect();
    site.configure(&format!(
        "model = \"model.json\"\n[agreement]\nkey = \"host0.key\"\n[carry]\n{peers}{}",
        rule("chosen")
    ));
    for (side, name) in (1..).zip(servers) {
        let rule = crate::carried::rule("server", PORT).replace("carried", "chosen");
        site.configure_on(side, &format!(
            "[agreement]\nkey = \"host{side}.key\"\n[carry]\nlisten = \"{}:{CARRIERS}\"\n[[peer]]\nname = \"client\"\n\
             key = \"{}\"\n{rule}",
            site.address(name), keys[0]
        ));
    }
    let _servers = [GraftProcess::start_on(&site, 1), GraftProcess::start_on(&site, 2)];
    let daemon = GraftProcess::start(&site);
    let are_warm = |all: &Vec<CarrierStatus>| all.iter().all(|it| it.state == "warm");
    wait_until("warm carriers", || carry(&daemon).carriers, are_warm);
    let listeners: Vec<_> = (1..)
        .zip(servers)
        .map(|(side, name)| site.listen_at(side, SocketAddr::new(site.address(name), PORT)))
        .collect();
    let tier = |listener: &TcpListener| {
        let (_, ends) = send(&site, listener, 64 << 10);
        why(&daemon, ends)
    };
    for listener in &listeners {
        let first = tier(listener);
        assert_eq!((first.tier.as_str(), first.why.as_str()), ("in-place", "first"), "{first:?}");
    }
    assert_eq!(carry(&daemon).verdicts["unknown"], 2);
    wait_until("choices", || selection(&daemon), |it| it.chosen == 2);
    for _ in 0..5 {
        let [far, near] = [&listeners[0], &listeners[1]].map(tier);
        assert_eq!((far.tier.as_str(), far.candidate.as_str()), ("carried", "carried-warm"), "{far:?}");
        assert_eq!((far.why.as_str(), far.carrier.is_some()), ("learned", true), "{far:?}");
        assert_eq!(
            (near.tier.as_str(), near.candidate.as_str(), near.why.as_str()),
            ("in-place", "bbr", "learned")
        );
        assert!(far.chosen.unwrap().way[0].contains("more than 40 ms"));
    }
    let carry = carry(&daemon);
    assert_eq!((carry.verdicts["redirected"], carry.verdicts["in-place"]), (5, 5), "{:?}", carry.verdicts);
    let is_judged = |now: &SelectionStatus| now.outcomes["good"] + now.outcomes["bad"] > 0;
    let now = wait_until("tunnelled connections to be judged, too", || selection(&daemon), is_judged);
    // The first two connections came before the model's first choice, and have the host's default congestion control.
    let in_place = if default_control() == "bbr" { 7 } else { 5 };
    let connections = (now.connections["carried/carried-warm"], now.connections["in-place/bbr"]);
    assert_eq!(connections, (5, in_place), "{now:?}");
    // Without the daemon connections are not redirected, and go over plain TCP.
    daemon.kill();
    listeners.iter().for_each(|listener| drop(send(&site, listener, 64 << 10)));
}
