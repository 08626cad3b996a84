//! What becomes of connections whose ends agree, or do not.

use std::time::Duration;

use millrace_graft_kernel::{Caller, Outcome, Rule, Settings, Side, cgroup_id};
use nix::sys::socket::{getsockopt, sockopt};

use crate::net;
use crate::site::{LONG, PORT, Site, all, congestion, congestion_of, counted, loaded, rule, transfer};

/// The kernel's own, so that these tests need no graft.
fn reno(side: Side) -> Rule {
    rule(side, congestion("reno"))
}

#[test]
fn both_sides_agree_and_set_their_own() {
    let Some(site) = Site::new("agree") else { return };
    let settings = Settings {
        congestion: Some("reno".into()),
        pacing: Some(100_000_000),
        send_buffer: Some(100_000),
        receive_buffer: Some(80_000),
        window: Some(30),
    };
    let (mut client, mut server) =
        site.both(&rule(Side::Client, settings), &rule(Side::Server, congestion("cubic")));
    let listener = site.listen();
    let (near, far) = site.connect(&listener);
    assert_eq!((congestion_of(&near), congestion_of(&far)), ("reno".into(), "cubic".into()));
    assert_eq!(getsockopt(&near, sockopt::SndBuf), Ok(200_000));
    assert_eq!(getsockopt(&near, sockopt::RcvBuf), Ok(160_000));
    transfer(near, far, 1 << 20);
    assert_eq!(counted(&mut client), [(Outcome::Agreed, 1)]);
    assert_eq!(counted(&mut server), [(Outcome::Agreed, 1), (Outcome::Answered, 1)]);
    let peer = client.peer(net::address(4, 1, 1)).expect("readable").expect("a peer");
    assert_eq!((peer.outcome, peer.agreed, peer.rule, peer.graft), (Outcome::Agreed, 1, 0, *b"serv"));
    assert_eq!(server.peers().expect("peers").len(), 1);
}

#[test]
fn the_server_may_speak_first() {
    let Some(site) = Site::new("first") else { return };
    let (mut client, mut server) = site.both(&reno(Side::Client), &reno(Side::Server));
    let listener = site.listen();
    let (near, far) = site.connect(&listener);
    transfer(far, near, 1 << 20);
    assert_eq!(counted(&mut client), [(Outcome::Agreed, 1)]);
    assert_eq!(counted(&mut server), [(Outcome::Agreed, 1), (Outcome::Answered, 1)]);
}

#[test]
fn without_a_peer_it_is_plain_tcp() {
    let Some(site) = Site::new("absent") else { return };
    let mut client = loaded(&site.clients, &reno(Side::Client));
    let listener = site.listen();
    let (near, far) = site.connect(&listener);
    let default = congestion_of(&far);
    assert_eq!(congestion_of(&near), default);
    transfer(near, far, 1 << 20);
    assert_eq!(counted(&mut client), [(Outcome::Absent, 1)]);
    client.detach();
    drop(listener);

    // The other way round: a server whose client offers nothing.
    let mut server = loaded(&site.servers, &reno(Side::Server));
    let listener = site.listen();
    let (near, far) = site.connect(&listener);
    assert_eq!(congestion_of(&far), default);
    transfer(near, far, 1 << 20);
    assert_eq!(counted(&mut server), [(Outcome::Unconfirmed, 1)]);
}

#[test]
fn a_rule_may_ask_nobody() {
    let Some(site) = Site::new("onesided") else { return };
    let mut client = loaded(&site.clients, &Rule { agree: false, ..reno(Side::Client) });
    let listener = site.listen();
    let (near, far) = site.connect(&listener);
    assert_eq!(congestion_of(&near), "reno");
    assert_ne!(congestion_of(&far), "reno");
    transfer(near, far, 1 << 20);
    assert_eq!(counted(&mut client), [(Outcome::OneSided, 1)]);
}

#[test]
fn a_peer_that_answered_before_is_missed() {
    let Some(site) = Site::new("missed") else { return };
    let (mut client, mut server) = site.both(&reno(Side::Client), &reno(Side::Server));
    let listener = site.listen();
    let (near, far) = site.connect(&listener);
    transfer(near, far, 1000);
    server.set_rules(&[]).expect("no rules");
    let (near, far) = site.connect(&listener);
    assert_ne!(congestion_of(&near), "reno");
    transfer(near, far, 1000);
    assert_eq!(counted(&mut client), [(Outcome::Agreed, 1), (Outcome::Stripped, 1)]);
    assert_eq!(counted(&mut server), [(Outcome::Agreed, 1), (Outcome::Answered, 1)]);
}

#[test]
fn syn_cookies_leave_plain_tcp() {
    let Some(site) = Site::new("cookies") else { return };
    let always = "echo 2 > /proc/sys/net/ipv4/tcp_syncookies";
    let command = ["netns", "exec", site.server(), "sh", "-c", always];
    assert!(std::process::Command::new("ip").args(command).status().expect("ip").success());
    let (mut client, mut server) = site.both(&reno(Side::Client), &reno(Side::Server));
    let listener = site.listen();
    let (near, far) = site.connect(&listener);
    transfer(near, far, 1 << 20);
    assert_eq!(counted(&mut client), [(Outcome::Absent, 1)]);
    assert_eq!(counted(&mut server), [(Outcome::Unconfirmed, 1), (Outcome::Cookies, 1)]);
}

/// Something on the way to the server that does not like the option.
fn middlebox(namespace: &str, rule: &str) -> bool {
    let nft = |line: &str| {
        let command = ["netns", "exec", namespace, "nft", line];
        std::process::Command::new("ip").args(command).output().is_ok_and(|output| output.status.success())
    };
    nft("add table inet graft")
        && nft("add chain inet graft in { type filter hook prerouting priority -300; }")
        && nft(&format!("add rule inet graft in {rule}"))
}

#[test]
fn an_option_that_is_taken_off_leaves_plain_tcp() {
    let Some(site) = Site::new("strip") else { return };
    let (mut client, mut server) = site.both(&reno(Side::Client), &reno(Side::Server));
    let listener = site.listen();
    // First the answer, then the offer.
    if !middlebox(site.client(), "reset tcp option 253") {
        println!("SKIP an_option_that_is_taken_off_leaves_plain_tcp: nftables cannot take options off here");
        return;
    }
    let (near, far) = site.connect(&listener);
    assert_ne!(congestion_of(&near), "reno");
    transfer(near, far, 1 << 20);
    assert_eq!(counted(&mut client), [(Outcome::Absent, 1)]);
    assert_eq!(counted(&mut server), [(Outcome::Unconfirmed, 1), (Outcome::Answered, 1)]);
    assert!(middlebox(site.server(), "reset tcp option 253"));
    let (near, far) = site.connect(&listener);
    transfer(far, near, 1 << 20);
    assert_eq!(counted(&mut client), [(Outcome::Absent, 2)]);
    assert_eq!(counted(&mut server), [(Outcome::Unconfirmed, 2), (Outcome::Answered, 1)]);
}

#[test]
fn a_path_that_drops_the_option_is_found_out_once() {
    let Some(site) = Site::new("drop") else { return };
    let (mut client, mut server) = site.both(&reno(Side::Client), &reno(Side::Server));
    let listener = site.listen();
    if !middlebox(site.server(), "tcp option 253 exists drop") {
        println!("SKIP a_path_that_drops_the_option_is_found_out_once: nftables does not see options here");
        return;
    }
    for wanted in [vec![(Outcome::Resent, 1)], vec![(Outcome::Resent, 1), (Outcome::Withheld, 1)]] {
        let (near, far) = site.connect(&listener);
        assert_ne!(congestion_of(&near), "reno");
        transfer(near, far, 1 << 20);
        assert_eq!(counted(&mut client), wanted);
    }
    assert_eq!(counted(&mut server), [(Outcome::Unconfirmed, 2)]);
}

#[test]
fn a_congestion_control_that_is_not_there_is_counted() {
    let Some(site) = Site::new("missing") else { return };
    let mut client =
        loaded(&site.clients, &Rule { agree: false, ..rule(Side::Client, congestion("mr_nowhere")) });
    let listener = site.listen();
    let (near, far) = site.connect(&listener);
    transfer(near, far, 1000);
    assert_eq!(counted(&mut client), [(Outcome::OneSided, 1), (Outcome::NoCongestion, 1)]);
}

#[test]
fn other_ports_and_peers_are_left_alone() {
    let Some(site) = Site::new("others") else { return };
    let elsewhere = "192.0.2.0/24".parse().expect("a prefix");
    let rules = [
        Rule { ports: PORT + 1..=u16::MAX, ..reno(Side::Client) },
        Rule { ports: 0..=PORT - 1, ..reno(Side::Client) },
        Rule { peer: elsewhere, ..reno(Side::Client) },
        reno(Side::Server),
    ];
    let mut client = loaded(&site.clients, &rules[0]);
    client.set_rules(&rules).expect("rules");
    let listener = site.listen();
    let (near, far) = site.connect(&listener);
    assert_ne!(congestion_of(&near), "reno");
    transfer(near, far, 1000);
    assert_eq!(counted(&mut client), []);
    // The same with a rule that fits behind them, and one more behind that.
    let here = "10.98.1.0/24".parse().expect("a prefix");
    let fits = Rule { peer: here, agree: false, ..reno(Side::Client) };
    let later = Rule { peer: all(), ..rule(Side::Client, congestion("cubic")) };
    client.set_rules(&[&rules[..], &[fits, later]].concat()).expect("rules");
    let (near, far) = site.connect(&listener);
    assert_eq!(congestion_of(&near), "reno");
    transfer(near, far, 1000);
    assert_eq!(counted(&mut client), [(Outcome::OneSided, 1)]);
}

/// Another program on the same cgroup: here a second instance, whose option the kernel refuses as a duplicate.
#[test]
fn another_program_of_the_cgroup_stays() {
    let Some(site) = Site::new("beside") else { return };
    let mut first = loaded(&site.clients, &Rule { agree: false, ..reno(Side::Client) });
    let mut second = loaded(&site.clients, &Rule { agree: false, ..rule(Side::Client, congestion("cubic")) });
    let listener = site.listen();
    let (near, far) = site.connect(&listener);
    // Both ran, in the order in which they were attached.
    assert_eq!(congestion_of(&near), "cubic");
    transfer(near, far, 1000);
    second.detach();
    let (near, far) = site.connect(&listener);
    assert_eq!(congestion_of(&near), "reno");
    transfer(near, far, 1000);
    assert_eq!(counted(&mut first), [(Outcome::OneSided, 2)]);
    assert_eq!(counted(&mut second), [(Outcome::OneSided, 1)]);
}

#[test]
fn there_is_room_for_so_many_rules() {
    let Some(_site) = Site::new("room") else { return };
    let mut tcp = millrace_graft_kernel::Tcp::load().expect("loads");
    tcp.set_rules(&vec![reno(Side::Client); 64]).expect("room");
    let error = tcp.set_rules(&vec![reno(Side::Client); 65]).expect_err("no room");
    assert_eq!(error.to_string(), "65 rules are more than there is room for, 64");
}

/// A rule that wants a bound peer asks nobody else, and nobody longer than it is bound.
#[test]
fn only_a_bound_peer_is_asked() {
    let Some(site) = Site::new("bound") else { return };
    let bound = |side| Rule { bound: true, ..reno(side) };
    let (mut client, mut server) = site.both(&bound(Side::Client), &bound(Side::Server));
    let listener = site.listen();
    let (near_address, far_address) = (net::address(4, 1, 2), net::address(4, 1, 1));
    let connect = || {
        let (near, far) = site.connect(&listener);
        let set = (congestion_of(&near) == "reno", congestion_of(&far) == "reno");
        let seen = far.peer_addr().expect("an address").ip();
        transfer(near, far, 1000);
        (set, seen)
    };
    let (set, seen) = connect();
    assert_eq!((set, seen), ((false, false), near_address));
    assert_eq!(counted(&mut client), [(Outcome::Unbound, 1)]);
    assert_eq!(counted(&mut server), [(Outcome::Unbound, 1)]);

    client.bind(far_address, &[0], LONG).expect("bound");
    assert_eq!(connect().0, (false, false), "the server has not agreed");
    assert_eq!(counted(&mut client), [(Outcome::Absent, 1), (Outcome::Unbound, 1)]);
    server.bind(near_address, &[0], LONG).expect("bound");
    assert_eq!(connect().0, (true, true));

    for rules in [&[][..], &[1, 63]] {
        server.bind(near_address, rules, LONG).expect("bound");
        assert_eq!(connect().0, (false, false), "on other rules: {rules:?}");
    }
    server.bind(near_address, &[0], Duration::ZERO).expect("bound");
    assert_eq!(connect().0, (false, false), "it is over");
    server.bind(near_address, &[0], LONG).expect("bound");
    assert_eq!(connect().0, (true, true));
    server.set_rules(&[bound(Side::Server)]).expect("rules");
    assert_eq!(connect().0, (false, false), "it was on other rules");
    server.bind(near_address, &[0], LONG).expect("bound");
    server.unbind(near_address).expect("unbound");
    server.unbind(near_address).expect("unbound already");
    assert_eq!(connect().0, (false, false));
}

/// By their first bytes' numbers, which are the same at both ends.
#[test]
fn both_ends_remember_the_same_connection() {
    let Some(site) = Site::new("remember") else { return };
    let (mut client, mut server) = site.both(&reno(Side::Client), &reno(Side::Server));
    let listener = site.listen();
    for _ in 0..2 {
        let (near, far) = site.connect(&listener);
        transfer(near, far, 1000);
    }
    let (near, far) = (client.connections().expect("readable"), server.connections().expect("readable"));
    assert_eq!((near.len(), far.len()), (2, 2));
    assert_ne!(near[0].first, near[1].first);
    for (near, far) in near.iter().zip(&far) {
        assert_eq!((near.first, near.port), (far.first, far.port));
        assert_eq!((near.side, far.side), (Side::Client, Side::Server));
        assert_eq!((near.outcome, far.outcome), (Outcome::Agreed, Outcome::Agreed));
        assert!(near.spoke && far.spoke);
        assert_eq!((near.own, near.heard, far.own), (*b"clie", *b"serv", *b"serv"));
        assert_eq!(near.peer, net::address(4, 1, 1));
    }
}

/// Who began to listen before the program was there, or answers with cookies, would not have answered.
#[test]
fn a_server_that_could_not_answer_says_so() {
    let Some(site) = Site::new("unable") else { return };
    let listener = site.listen();
    let mut server = loaded(&site.servers, &reno(Side::Server));
    let (near, far) = site.connect(&listener);
    transfer(near, far, 1000);
    assert!(!server.connections().expect("readable")[0].spoke);
    drop(listener);
    let listener = site.listen();
    let (near, far) = site.connect(&listener);
    transfer(near, far, 1000);
    assert!(server.connections().expect("readable")[1].spoke);

    let always = "echo 2 > /proc/sys/net/ipv4/tcp_syncookies";
    let command = ["netns", "exec", site.server(), "sh", "-c", always];
    assert!(std::process::Command::new("ip").args(command).status().expect("ip").success());
    let mut client = loaded(&site.clients, &reno(Side::Client));
    let (near, far) = site.connect(&listener);
    transfer(near, far, 1000);
    assert_eq!(counted(&mut client), [(Outcome::Absent, 1)]);
    assert!(!server.connections().expect("readable")[2].spoke);
}

/// Of a process in a cgroup below that of the client's program.
#[test]
fn a_rule_may_be_for_a_command_and_a_cgroup() {
    let Some(site) = Site::new("whose") else { return };
    let listener = site.listen();
    let nested = site.clients.below("nested");
    let mut client = loaded(&site.clients, &reno(Side::Client));
    let default = congestion_of(&site.connect(&listener).1);
    assert_ne!(default, "reno");
    let own = std::fs::read_to_string("/proc/thread-self/comm").expect("a name"); // exact: its own
    let own = Some(own.trim_end().to_owned());
    let id = |path| Some(cgroup_id(path).expect("a cgroup"));
    let (above, here, other) = (id(&site.clients.path), id(&nested.path), id(&site.servers.path));
    let longer = own.as_ref().map(|name| name[..name.len() - 1].to_owned());
    let table = [
        (own.clone(), None, true),
        (Some("somebody".to_owned()), None, false),
        (longer, None, false),
        (None, here, true),
        (None, above, true),
        (None, other, false),
        (None, Some(Caller::NO_CGROUP), false),
        (own.clone(), above, true),
        (own.clone(), other, false),
        (Some("somebody".to_owned()), here, false),
        (None, None, true),
    ];
    let mut fitted = 0;
    for (command, cgroup, wanted) in table {
        let caller = Caller { command, cgroup };
        let rule = Rule { agree: false, caller: caller.clone(), ..reno(Side::Client) };
        client.set_rules(&[rule]).expect("rules");
        let (near, far) = site.connect_in(&nested, &listener);
        fitted += u64::from(wanted);
        assert_eq!(congestion_of(&near) == "reno", wanted, "{caller:?}");
        transfer(near, far, 1000);
    }
    assert_eq!(counted(&mut client), [(Outcome::OneSided, fitted), (Outcome::Absent, 1)]);
    // Whoever is at the other end of what is accepted is not known.
    let caller = Caller { command: own, cgroup: None };
    let mut server = loaded(&site.servers, &Rule { agree: false, caller, ..reno(Side::Server) });
    assert_ne!(congestion_of(&site.connect(&listener).1), "reno");
    assert_eq!(counted(&mut server), []);
}
