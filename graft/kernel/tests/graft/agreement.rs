//! Tests of the agreement on grafts in TCP options, over real TCP connections between two network namespaces.

use std::time::Duration;

use millrace_graft_kernel::{CallerRule, RuleSide, Settings, TcpOutcome, TcpRule, cgroup_id};
use nix::sys::socket::{getsockopt, sockopt};

use crate::net;
use crate::site::{
    GraftTestSite, LONG, PORT, all, congestion, congestion_of, counted, loaded, rule, transfer,
};

/// Returns a rule that sets the congestion control Reno. Every kernel has Reno, so these tests load no congestion
/// control.
fn reno(side: RuleSide) -> TcpRule {
    rule(side, congestion("reno"))
}

#[test]
fn agreement_by_tcp_option_sets_the_congestion_control_of_each_end() {
    let Some(site) = GraftTestSite::new("agree") else { return };
    let settings = Settings {
        congestion: Some("reno".into()),
        pacing: Some(100_000_000),
        send_buffer: Some(100_000),
        receive_buffer: Some(80_000),
        window: Some(30),
    };
    let (mut client, mut server) =
        site.both(&rule(RuleSide::Client, settings), &rule(RuleSide::Server, congestion("cubic")));
    let listener = site.listen();
    let (near, far) = site.connect(&listener);
    assert_eq!((congestion_of(&near), congestion_of(&far)), ("reno".into(), "cubic".into()));
    assert_eq!(getsockopt(&near, sockopt::SndBuf), Ok(200_000));
    assert_eq!(getsockopt(&near, sockopt::RcvBuf), Ok(160_000));
    transfer(near, far, 1 << 20);
    assert_eq!(counted(&mut client), [(TcpOutcome::Agreed, 1)]);
    assert_eq!(counted(&mut server), [(TcpOutcome::Agreed, 1), (TcpOutcome::Answered, 1)]);
    let peer = client.peer(net::address(4, 1, 1)).expect("readable").expect("a peer");
    assert_eq!((peer.outcome, peer.agreed, peer.rule, peer.graft), (TcpOutcome::Agreed, 1, 0, *b"serv"));
    assert_eq!(server.peers().expect("peers").len(), 1);
}

#[test]
fn agreement_works_when_the_server_sends_first() {
    let Some(site) = GraftTestSite::new("first") else { return };
    let (mut client, mut server) = site.both(&reno(RuleSide::Client), &reno(RuleSide::Server));
    let listener = site.listen();
    let (near, far) = site.connect(&listener);
    transfer(far, near, 1 << 20);
    assert_eq!(counted(&mut client), [(TcpOutcome::Agreed, 1)]);
    assert_eq!(counted(&mut server), [(TcpOutcome::Agreed, 1), (TcpOutcome::Answered, 1)]);
}

#[test]
fn connection_to_peer_without_grafts_is_plain_tcp() {
    let Some(site) = GraftTestSite::new("absent") else { return };
    let mut client = loaded(&site.clients, &reno(RuleSide::Client));
    let listener = site.listen();
    let (near, far) = site.connect(&listener);
    let default = congestion_of(&far);
    assert_eq!(congestion_of(&near), default);
    transfer(near, far, 1 << 20);
    assert_eq!(counted(&mut client), [(TcpOutcome::Absent, 1)]);
    client.detach();
    drop(listener);

    // Only the server has a rule, so the client offers no agreement in its TCP options.
    let mut server = loaded(&site.servers, &reno(RuleSide::Server));
    let listener = site.listen();
    let (near, far) = site.connect(&listener);
    assert_eq!(congestion_of(&far), default);
    transfer(near, far, 1 << 20);
    assert_eq!(counted(&mut server), [(TcpOutcome::Unconfirmed, 1)]);
}

#[test]
fn graft_rule_without_agreement_sends_no_tcp_option() {
    let Some(site) = GraftTestSite::new("onesided") else { return };
    let mut client = loaded(&site.clients, &TcpRule { agree: false, ..reno(RuleSide::Client) });
    let listener = site.listen();
    let (near, far) = site.connect(&listener);
    assert_eq!(congestion_of(&near), "reno");
    assert_ne!(congestion_of(&far), "reno");
    transfer(near, far, 1 << 20);
    assert_eq!(counted(&mut client), [(TcpOutcome::OneSided, 1)]);
}

#[test]
fn peer_that_stops_answering_the_tcp_option_is_reported() {
    let Some(site) = GraftTestSite::new("missed") else { return };
    let (mut client, mut server) = site.both(&reno(RuleSide::Client), &reno(RuleSide::Server));
    let listener = site.listen();
    let (near, far) = site.connect(&listener);
    transfer(near, far, 1000);
    server.set_rules(&[]).expect("no rules");
    let (near, far) = site.connect(&listener);
    assert_ne!(congestion_of(&near), "reno");
    transfer(near, far, 1000);
    assert_eq!(counted(&mut client), [(TcpOutcome::Agreed, 1), (TcpOutcome::Stripped, 1)]);
    assert_eq!(counted(&mut server), [(TcpOutcome::Agreed, 1), (TcpOutcome::Answered, 1)]);
}

#[test]
fn connection_with_syn_cookies_stays_plain_tcp() {
    let Some(site) = GraftTestSite::new("cookies") else { return };
    let always = "echo 2 > /proc/sys/net/ipv4/tcp_syncookies";
    let command = ["netns", "exec", site.server(), "sh", "-c", always];
    assert!(std::process::Command::new("ip").args(command).status().expect("ip").success());
    let (mut client, mut server) = site.both(&reno(RuleSide::Client), &reno(RuleSide::Server));
    let listener = site.listen();
    let (near, far) = site.connect(&listener);
    transfer(near, far, 1 << 20);
    assert_eq!(counted(&mut client), [(TcpOutcome::Absent, 1)]);
    assert_eq!(counted(&mut server), [(TcpOutcome::Unconfirmed, 1), (TcpOutcome::Cookies, 1)]);
}

/// Installs an nftables rule between client and server that removes the TCP option. Returns false if nftables cannot
/// remove options.
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
fn connection_whose_tcp_option_a_middlebox_removes_stays_plain_tcp() {
    let Some(site) = GraftTestSite::new("strip") else { return };
    let (mut client, mut server) = site.both(&reno(RuleSide::Client), &reno(RuleSide::Server));
    let listener = site.listen();
    // First the server's answer is removed on its way to the client, and later the client's offer.
    if !middlebox(site.client(), "reset tcp option 253") {
        println!(
            "SKIP connection_whose_tcp_option_a_middlebox_removes_stays_plain_tcp: nftables cannot take options off here"
        );
        return;
    }
    let (near, far) = site.connect(&listener);
    assert_ne!(congestion_of(&near), "reno");
    transfer(near, far, 1 << 20);
    assert_eq!(counted(&mut client), [(TcpOutcome::Absent, 1)]);
    assert_eq!(counted(&mut server), [(TcpOutcome::Unconfirmed, 1), (TcpOutcome::Answered, 1)]);
    assert!(middlebox(site.server(), "reset tcp option 253"));
    let (near, far) = site.connect(&listener);
    transfer(far, near, 1 << 20);
    assert_eq!(counted(&mut client), [(TcpOutcome::Absent, 2)]);
    assert_eq!(counted(&mut server), [(TcpOutcome::Unconfirmed, 2), (TcpOutcome::Answered, 1)]);
}

#[test]
fn tcp_option_is_withheld_after_a_path_has_dropped_its_syn() {
    let Some(site) = GraftTestSite::new("drop") else { return };
    let (mut client, mut server) = site.both(&reno(RuleSide::Client), &reno(RuleSide::Server));
    let listener = site.listen();
    if !middlebox(site.server(), "tcp option 253 exists drop") {
        println!(
            "SKIP tcp_option_is_withheld_after_a_path_has_dropped_its_syn: nftables does not see options here"
        );
        return;
    }
    for wanted in [vec![(TcpOutcome::Resent, 1)], vec![(TcpOutcome::Resent, 1), (TcpOutcome::Withheld, 1)]] {
        let (near, far) = site.connect(&listener);
        assert_ne!(congestion_of(&near), "reno");
        transfer(near, far, 1 << 20);
        assert_eq!(counted(&mut client), wanted);
    }
    assert_eq!(counted(&mut server), [(TcpOutcome::Unconfirmed, 2)]);
}

#[test]
fn rule_with_an_unavailable_congestion_control_is_counted() {
    let Some(site) = GraftTestSite::new("missing") else { return };
    let mut client =
        loaded(&site.clients, &TcpRule { agree: false, ..rule(RuleSide::Client, congestion("mr_nowhere")) });
    let listener = site.listen();
    let (near, far) = site.connect(&listener);
    transfer(near, far, 1000);
    assert_eq!(counted(&mut client), [(TcpOutcome::OneSided, 1), (TcpOutcome::NoCongestion, 1)]);
}

#[test]
fn connections_that_match_no_rules_port_or_peer_stay_unchanged() {
    let Some(site) = GraftTestSite::new("others") else { return };
    let elsewhere = "192.0.2.0/24".parse().expect("a prefix");
    let rules = [
        TcpRule { ports: PORT + 1..=u16::MAX, ..reno(RuleSide::Client) },
        TcpRule { ports: 0..=PORT - 1, ..reno(RuleSide::Client) },
        TcpRule { peer: elsewhere, ..reno(RuleSide::Client) },
        reno(RuleSide::Server),
    ];
    let mut client = loaded(&site.clients, &rules[0]);
    client.set_rules(&rules).expect("rules");
    let listener = site.listen();
    let (near, far) = site.connect(&listener);
    assert_ne!(congestion_of(&near), "reno");
    transfer(near, far, 1000);
    assert_eq!(counted(&mut client), []);
    // The first rules of the list do not match this connection. The next two do, and the first of them applies.
    let here = "10.98.1.0/24".parse().expect("a prefix");
    let fits = TcpRule { peer: here, agree: false, ..reno(RuleSide::Client) };
    let later = TcpRule { peer: all(), ..rule(RuleSide::Client, congestion("cubic")) };
    client.set_rules(&[&rules[..], &[fits, later]].concat()).expect("rules");
    let (near, far) = site.connect(&listener);
    assert_eq!(congestion_of(&near), "reno");
    transfer(near, far, 1000);
    assert_eq!(counted(&mut client), [(TcpOutcome::OneSided, 1)]);
}

/// A second instance of the programs runs on the same cgroup. The rules of both instances use no TCP option, since a
/// TCP header may contain each option once.
#[test]
fn sock_ops_program_stays_attached_when_another_of_its_cgroup_detaches() {
    let Some(site) = GraftTestSite::new("beside") else { return };
    let mut first = loaded(&site.clients, &TcpRule { agree: false, ..reno(RuleSide::Client) });
    let mut second =
        loaded(&site.clients, &TcpRule { agree: false, ..rule(RuleSide::Client, congestion("cubic")) });
    let listener = site.listen();
    let (near, far) = site.connect(&listener);
    // The programs run in the order of attachment, so the setting that the second program applies remains.
    assert_eq!(congestion_of(&near), "cubic");
    transfer(near, far, 1000);
    second.detach();
    let (near, far) = site.connect(&listener);
    assert_eq!(congestion_of(&near), "reno");
    transfer(near, far, 1000);
    assert_eq!(counted(&mut first), [(TcpOutcome::OneSided, 2)]);
    assert_eq!(counted(&mut second), [(TcpOutcome::OneSided, 1)]);
}

#[test]
fn rule_list_beyond_its_limit_is_refused() {
    let Some(_site) = GraftTestSite::new("room") else { return };
    let mut tcp = millrace_graft_kernel::Tcp::load(None).expect("loads");
    tcp.set_rules(&vec![reno(RuleSide::Client); 64]).expect("room");
    let error = tcp.set_rules(&vec![reno(RuleSide::Client); 65]).expect_err("no room");
    assert_eq!(error.to_string(), "too many rules: 65, at most 64");
}

/// A rule that needs a bound peer sends the option only to that peer, and only while the peer is bound.
#[test]
fn tcp_option_is_sent_only_while_its_peer_is_bound_if_the_rule_asks() {
    let Some(site) = GraftTestSite::new("bound") else { return };
    let bound = |side| TcpRule { bound: true, ..reno(side) };
    let (mut client, mut server) = site.both(&bound(RuleSide::Client), &bound(RuleSide::Server));
    let listener = site.listen();
    let near_address = net::address(4, 1, 2);
    let far_address = net::address(4, 1, 1);
    let connect = || {
        let (near, far) = site.connect(&listener);
        let set = (congestion_of(&near) == "reno", congestion_of(&far) == "reno");
        let seen = far.peer_addr().expect("an address").ip();
        transfer(near, far, 1000);
        (set, seen)
    };
    let (set, seen) = connect();
    assert_eq!((set, seen), ((false, false), near_address));
    assert_eq!(counted(&mut client), [(TcpOutcome::Unbound, 1)]);
    assert_eq!(counted(&mut server), [(TcpOutcome::Unbound, 1)]);

    client.bind(far_address, &[0], LONG).expect("bound");
    assert_eq!(connect().0, (false, false), "the server has not agreed");
    assert_eq!(counted(&mut client), [(TcpOutcome::Absent, 1), (TcpOutcome::Unbound, 1)]);
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
    server.set_rules(&[bound(RuleSide::Server)]).expect("rules");
    assert_eq!(connect().0, (false, false), "it was on other rules");
    server.bind(near_address, &[0], LONG).expect("bound");
    server.unbind(near_address).expect("unbound");
    server.unbind(near_address).expect("unbound already");
    assert_eq!(connect().0, (false, false));
}

/// Both ends of a connection identify it by the sequence numbers of its first data bytes.
#[test]
fn client_and_server_identify_a_connection_by_equal_sequence_numbers() {
    let Some(site) = GraftTestSite::new("remember") else { return };
    let (mut client, mut server) = site.both(&reno(RuleSide::Client), &reno(RuleSide::Server));
    let listener = site.listen();
    for _ in 0..2 {
        let (near, far) = site.connect(&listener);
        transfer(near, far, 1000);
    }
    let near = client.connections().expect("readable");
    let far = server.connections().expect("readable");
    assert_eq!((near.len(), far.len()), (2, 2));
    assert_ne!(near[0].first, near[1].first);
    for (near, far) in near.iter().zip(&far) {
        assert_eq!((near.first, near.port), (far.first, far.port));
        assert_eq!((near.side, far.side), (RuleSide::Client, RuleSide::Server));
        assert_eq!((near.outcome, far.outcome), (TcpOutcome::Agreed, TcpOutcome::Agreed));
        assert!(near.spoke && far.spoke);
        assert_eq!((near.own, near.heard, far.own), (*b"clie", *b"serv", *b"serv"));
        assert_eq!(near.peer, net::address(4, 1, 1));
    }
}

/// Two kinds of servers cannot answer the option: one that listened before the program was attached, and one that uses
/// SYN cookies.
#[test]
fn server_with_earlier_listener_or_syn_cookies_reports_no_tcp_option() {
    let Some(site) = GraftTestSite::new("unable") else { return };
    let listener = site.listen();
    let mut server = loaded(&site.servers, &reno(RuleSide::Server));
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
    let mut client = loaded(&site.clients, &reno(RuleSide::Client));
    let (near, far) = site.connect(&listener);
    transfer(near, far, 1000);
    assert_eq!(counted(&mut client), [(TcpOutcome::Absent, 1)]);
    assert!(!server.connections().expect("readable")[2].spoke);
}

/// The connecting process is in a child of the cgroup that the program is attached to.
#[test]
fn graft_rule_selects_connections_by_command_and_cgroup() {
    let Some(site) = GraftTestSite::new("whose") else { return };
    let listener = site.listen();
    let nested = site.clients.below("nested");
    let mut client = loaded(&site.clients, &reno(RuleSide::Client));
    let default = congestion_of(&site.connect(&listener).1);
    assert_ne!(default, "reno");
    // exact: nothing changes this thread's command name
    let own = std::fs::read_to_string("/proc/thread-self/comm").expect("a name");
    let own = Some(own.trim_end().to_owned());
    let id = |path| Some(cgroup_id(path).expect("a cgroup"));
    let above = id(&site.clients.path);
    let here = id(&nested.path);
    let other = id(&site.servers.path);
    let longer = own.as_ref().map(|name| name[..name.len() - 1].to_owned());
    let table = [
        (own.clone(), None, true),
        (Some("somebody".to_owned()), None, false),
        (longer, None, false),
        (None, here, true),
        (None, above, true),
        (None, other, false),
        (None, Some(CallerRule::NO_CGROUP), false),
        (own.clone(), above, true),
        (own.clone(), other, false),
        (Some("somebody".to_owned()), here, false),
        (None, None, true),
    ];
    let mut fitted = 0;
    for (command, cgroup, wanted) in table {
        let caller = CallerRule { command, cgroup };
        let rule = TcpRule { agree: false, caller: caller.clone(), ..reno(RuleSide::Client) };
        client.set_rules(&[rule]).expect("rules");
        let (near, far) = site.connect_in(&nested, &listener);
        fitted += u64::from(wanted);
        assert_eq!(congestion_of(&near) == "reno", wanted, "{caller:?}");
        transfer(near, far, 1000);
    }
    assert_eq!(counted(&mut client), [(TcpOutcome::OneSided, fitted), (TcpOutcome::Absent, 1)]);
    // A server does not know the connecting process, so a condition on it does not match there.
    let caller = CallerRule { command: own, cgroup: None };
    let mut server = loaded(&site.servers, &TcpRule { agree: false, caller, ..reno(RuleSide::Server) });
    assert_ne!(congestion_of(&site.connect(&listener).1), "reno");
    assert_eq!(counted(&mut server), []);
}
