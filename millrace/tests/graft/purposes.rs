//! Tests of rules that match commands and cgroups, and of connections' purposes (traffic classes), both configured and
//! learned.

use std::{
    fs,
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpListener, TcpStream},
    path::Path,
    thread,
};

use millrace_graft::status::{PeerExplanation, PurposeStatus};

use crate::{
    agreement::keys,
    carried::{CARRIERS, connect, exchange, noise, server, verdict, wait_for_state, warm},
    site::{GraftProcess, GraftSite, LONG, PORT, SERVER, congestion, inside, wait_for},
};

/// Returns the client's settings with these rules and no others.
fn client(server: &str, rules: &str) -> String {
    format!(
        "[agreement]\nkey = \"host0.key\"\n[carry]\n[[peer]]\nname = \"server\"\nkey = \"{server}\"\n\
         carry = \"{SERVER}:{CARRIERS}\"\n{rules}"
    )
}

/// Sets the command name of this thread. Threads that it starts later inherit the name.
fn be(command: &str) {
    fs::write("/proc/thread-self/comm", command).unwrap(); // exact: this call only writes the thread's name
}

/// Reports whether a connection to the listener was tunnelled.
fn is_redirected(site: &GraftSite, daemon: &GraftProcess<'_>, listener: &TcpListener) -> bool {
    let before = verdict(daemon, "redirected");
    let (near, far, _) = connect(site, listener);
    exchange(&near, &far, 1000);
    verdict(daemon, "redirected") > before
}

/// Connects as `GraftSite::try_connect` does, but from a process in another cgroup.
fn connect_in(site: &GraftSite, cgroup: &Path, listener: &TcpListener) -> (TcpStream, TcpStream) {
    fs::write(cgroup.join("cgroup.procs"), std::process::id().to_string()).unwrap();
    let to: SocketAddr = listener.local_addr().unwrap();
    let near = inside(&site.namespaces[0], || TcpStream::connect_timeout(&to, LONG).unwrap());
    (near, listener.accept().unwrap().0)
}

#[test]
fn rules_match_commands_and_cgroups_on_the_same_port() {
    let Some(site) = GraftSite::new("whose") else { return };
    let nested = site.cgroup(0).join("nested");
    let known = keys(&site);
    let rules = format!(
        "[[rule]]\nname = \"near\"\nside = \"client\"\nport = {PORT}\ncommand = \"in-place\"\nagree = false\ncongestion = \"reno\"\n\
         [[rule]]\nname = \"copies\"\nside = \"client\"\nport = {PORT}\ncommand = \"copier\"\nagree = false\ntier = \"carried\"\n\
         [[rule]]\nname = \"below\"\nside = \"client\"\nport = {PORT}\ncgroup = {nested:?}\nagree = false\ntier = \"carried\"\n"
    );
    site.configure_on(0, &client(&known[1], &rules));
    site.configure_on(1, &server(&known[0], ""));
    let _far = GraftProcess::start_on(&site, 1);
    let near = GraftProcess::start_on(&site, 0);
    wait_for_state(&near, "warm");
    let listener = site.listen();
    be("copier");
    assert!(is_redirected(&site, &near, &listener));
    be("copie");
    assert!(!is_redirected(&site, &near, &listener), "a connection without a rule was tunnelled");
    // exact: the status shows the rule's cgroup as missing until the test creates the cgroup
    let status = near.status();
    let below = status.rules.iter().find(|rule| rule.name == "below").unwrap();
    assert!(below.missing && below.process == format!("cgroup {}", nested.display()), "{below:?}");
    assert!(near.succeed(&["status"]).contains("command copier"));

    // The rule's cgroup is created after the daemon has started. The connection comes from a cgroup below it.
    let deeper = nested.join("deeper");
    fs::create_dir_all(&deeper).unwrap();
    wait_for("a redirected connection", || {
        let before = verdict(&near, "redirected");
        let (here, there) = connect_in(&site, &deeper, &listener);
        exchange(&here, &there, 1000);
        (verdict(&near, "redirected") > before).then_some(())
    });
    assert!(!is_redirected(&site, &near, &listener), "a connection from the upper cgroup was tunnelled");

    // The first matching rule applies, even if it says that the connection is not tunnelled.
    be("in-place");
    let before = verdict(&near, "redirected");
    let (here, there) = connect_in(&site, &deeper, &listener);
    assert_eq!((congestion(&here), verdict(&near, "redirected")), ("reno".to_owned(), before));
    drop((here, there));
    be("copier");
    assert!(is_redirected(&site, &near, &listener));

    // A reload also changes rules that match commands or cgroups.
    site.configure_on(0, &client(&known[1], &rules.replace("copier", "other")));
    near.succeed(&["reload"]);
    wait_for("the reload", || !is_redirected(&site, &near, &listener));
    be("other");
    wait_for("the reload", || is_redirected(&site, &near, &listener));
    let text = format!(
        "{}\n[[rule]]\nname = \"x\"\nside = \"server\"\nport = 1\ncommand = \"nginx\"\n",
        client(&known[1], &rules)
    );
    site.configure_on(0, &text);
    let refused = near.fail(&["reload"]);
    assert!(refused.contains("rule x: command and cgroup need side = \"client\""), "{refused}");
    fs::remove_dir(&deeper).unwrap();
    fs::remove_dir(&nested).unwrap();
}

fn purpose(daemon: &GraftProcess<'_>, command: &str) -> Option<PurposeStatus> {
    // exact: callers repeat this read until the status has the expected purpose of the command's connections
    daemon.status().purposes.into_iter().find(|it| it.port == PORT && it.command == command)
}

#[test]
fn traffic_class_of_past_connections_is_predicted_for_new_ones() {
    let Some(site) = GraftSite::new("learned") else { return };
    let said = "[[profile]]\nname = \"insensitive\"\ncommand = \"backup\"\nsize-kib = 7\n";
    let [near, far] = warm(&site, [said, ""]);
    let listener = site.listen();
    be("fetcher");
    for _ in 0..4 {
        let (mut here, mut there, _) = connect(&site, &listener);
        here.write_all(b"all of it").unwrap();
        there.read_exact(&mut [0; 9]).unwrap();
        let sender = thread::spawn(move || {
            there.write_all(&noise(3, 2 << 20)).unwrap();
            there
        });
        let mut got = vec![0; 2 << 20];
        here.read_exact(&mut got).unwrap();
        drop((here, sender.join().unwrap()));
    }
    let learned = |daemon: &GraftProcess<'_>, command: &str| {
        let of_all = |it: &PurposeStatus| it.source == "learned" && it.why.starts_with("4 of the latest 4 ");
        wait_for("the learned purpose", || purpose(daemon, command).filter(of_all))
    };
    let here = learned(&near, "fetcher");
    assert_eq!((here.profile.as_str(), here.size_kib, here.side.as_str()), ("loss", Some(2048), "client"));
    assert_eq!(here.why, "4 of the latest 4 were bulk, their median is 2048 KiB");
    let there = learned(&far, "");
    assert_eq!((there.profile.as_str(), there.size_kib, there.side.as_str()), ("loss", Some(2048), "server"));
    let why: PeerExplanation = serde_json::from_str(&near.succeed(&["why", SERVER, "--json"])).unwrap();
    assert_eq!((why.purposes[0].rule.as_str(), why.purposes[0].profile.as_str()), ("client", "loss"));
    let text = near.succeed(&["why", SERVER]);
    assert!(text.contains("profile: of rule client: loss, 2048 KiB (learned): 4 of the latest 4"), "{text}");

    // A purpose (traffic class) in the settings takes precedence over a learned one.
    be("backup");
    let (here, there, _) = connect(&site, &listener);
    exchange(&here, &there, 1000);
    drop((here, there));
    let said = wait_for("the purpose of the settings", || purpose(&near, "backup"));
    assert_eq!(
        (said.profile.as_str(), said.size_kib, said.source.as_str()),
        ("insensitive", Some(7), "configured")
    );
}
