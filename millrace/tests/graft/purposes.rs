//! Whose connections rules are for, and what connections are for: said, learned, and by their first bytes.

use std::{
    fs,
    io::{Read as _, Write as _},
    net::{Shutdown, SocketAddr, TcpListener, TcpStream},
    path::Path,
    process::{Command, Stdio},
    thread,
};

use millrace_graft::status::{Chosen, Classify, Purpose, Why};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use crate::{
    agreement::keys,
    carried::{CARRIERS, carry, connect, exchange, noise, rule, server, verdict, wait_for_state, warm},
    choosing::{leaf, model, why},
    site::{Daemon, LONG, PORT, SERVER, Site, congestion, inside, wait_for, wait_until},
};

/// The client's settings, with these rules and no others.
fn client(server: &str, rules: &str) -> String {
    format!(
        "[agreement]\nkey = \"host0.key\"\n[carry]\n[[peer]]\nname = \"server\"\nkey = \"{server}\"\n\
         carry = \"{SERVER}:{CARRIERS}\"\n{rules}"
    )
}

/// What the kernel calls the threads that this one starts from now on.
fn be(command: &str) {
    fs::write("/proc/thread-self/comm", command).unwrap(); // exact: it is written, not read
}

/// Returns whether it was carried.
fn is_led(site: &Site, daemon: &Daemon<'_>, listener: &TcpListener) -> bool {
    let before = verdict(daemon, "led");
    let (near, far, _) = connect(site, listener);
    exchange(&near, &far, 1000);
    verdict(daemon, "led") > before
}

/// As `Site::try_connect`, in another cgroup.
fn connect_in(site: &Site, cgroup: &Path, listener: &TcpListener) -> (TcpStream, TcpStream) {
    fs::write(cgroup.join("cgroup.procs"), std::process::id().to_string()).unwrap();
    let to: SocketAddr = listener.local_addr().unwrap();
    let near = inside(&site.namespaces[0], || TcpStream::connect_timeout(&to, LONG).unwrap());
    (near, listener.accept().unwrap().0)
}

#[test]
fn commands_and_cgroups_of_one_port_go_their_own_ways() {
    let Some(site) = Site::new("whose") else { return };
    let nested = site.cgroup(0).join("nested");
    let known = keys(&site);
    let rules = format!(
        "[[rule]]\nname = \"near\"\nside = \"client\"\nport = {PORT}\ncommand = \"in-place\"\nagree = false\ncongestion = \"reno\"\n\
         [[rule]]\nname = \"copies\"\nside = \"client\"\nport = {PORT}\ncommand = \"copier\"\nagree = false\ntier = \"carried\"\n\
         [[rule]]\nname = \"below\"\nside = \"client\"\nport = {PORT}\ncgroup = {nested:?}\nagree = false\ntier = \"carried\"\n"
    );
    site.configure_on(0, &client(&known[1], &rules));
    site.configure_on(1, &server(&known[0], ""));
    let _far = Daemon::start_on(&site, 1);
    let near = Daemon::start_on(&site, 0);
    wait_for_state(&near, "warm");
    let listener = site.listen();
    be("copier");
    assert!(is_led(&site, &near, &listener));
    be("copie");
    assert!(!is_led(&site, &near, &listener), "no rule is for it");
    let status = near.status(); // exact: nobody has made that cgroup yet
    let below = status.rules.iter().find(|rule| rule.name == "below").unwrap();
    assert!(below.missing && below.who == format!("cgroup {}", nested.display()), "{below:?}");
    assert!(near.succeed(&["status"]).contains("command copier"));

    // A cgroup that comes later, and one below it.
    let deeper = nested.join("deeper");
    fs::create_dir_all(&deeper).unwrap();
    wait_for("one that is led", || {
        let before = verdict(&near, "led");
        let (here, there) = connect_in(&site, &deeper, &listener);
        exchange(&here, &there, 1000);
        (verdict(&near, "led") > before).then_some(())
    });
    assert!(!is_led(&site, &near, &listener), "it is in the cgroup above again");

    // The first rule that fits counts, whichever way it says.
    be("in-place");
    let before = verdict(&near, "led");
    let (here, there) = connect_in(&site, &deeper, &listener);
    assert_eq!((congestion(&here), verdict(&near, "led")), ("reno".to_owned(), before));
    drop((here, there));
    be("copier");
    assert!(is_led(&site, &near, &listener));

    // By a reload, as all rules.
    site.configure_on(0, &client(&known[1], &rules.replace("copier", "other")));
    near.succeed(&["reload"]);
    wait_for("the reload", || !is_led(&site, &near, &listener));
    be("other");
    wait_for("the reload", || is_led(&site, &near, &listener));
    let text = format!(
        "{}\n[[rule]]\nname = \"x\"\nside = \"server\"\nport = 1\ncommand = \"nginx\"\n",
        client(&known[1], &rules)
    );
    site.configure_on(0, &text);
    let refused = near.fail(&["reload"]);
    assert!(refused.contains("rule x: command and cgroup want side = \"client\""), "{refused}");
    fs::remove_dir(&deeper).unwrap();
    fs::remove_dir(&nested).unwrap();
}

fn purpose(daemon: &Daemon<'_>, command: &str) -> Option<Purpose> {
    // exact: a reader, and whoever calls it waits
    daemon.status().purposes.into_iter().find(|it| it.port == PORT && it.command == command)
}

#[test]
fn what_ended_connections_were_is_expected_of_the_next() {
    let Some(site) = Site::new("learned") else { return };
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
    let learned = |daemon: &Daemon<'_>, command: &str| {
        let of_all = |it: &Purpose| it.source == "learned" && it.why.starts_with("4 of the latest 4 ");
        wait_for("what was learned", || purpose(daemon, command).filter(of_all))
    };
    let here = learned(&near, "fetcher");
    assert_eq!((here.profile.as_str(), here.size_kib, here.side.as_str()), ("loss", Some(2048), "client"));
    assert_eq!(here.why, "4 of the latest 4 were bulk, their median is 2048 KiB");
    let there = learned(&far, "");
    assert_eq!((there.profile.as_str(), there.size_kib, there.side.as_str()), ("loss", Some(2048), "server"));
    let why: Why = serde_json::from_str(&near.succeed(&["why", SERVER, "--json"])).unwrap();
    assert_eq!((why.purposes[0].rule.as_str(), why.purposes[0].profile.as_str()), ("client", "loss"));
    let text = near.succeed(&["why", SERVER]);
    assert!(text.contains("profile: of rule client: loss, 2048 KiB (learned): 4 of the latest 4"), "{text}");

    // What the settings say comes first.
    be("backup");
    let (here, there, _) = connect(&site, &listener);
    exchange(&here, &there, 1000);
    drop((here, there));
    let said = wait_for("what is said", || purpose(&near, "backup"));
    assert_eq!(
        (said.profile.as_str(), said.size_kib, said.source.as_str()),
        ("insensitive", Some(7), "configured")
    );
}

fn classify(daemon: &Daemon<'_>) -> Classify {
    // exact: a reader, and whoever calls it waits, or knows why nothing changes
    daemon.status().classify.unwrap()
}

/// `None`: there is no nDPI here, which was said, in words that name the package.
fn ready(daemon: &Daemon<'_>, test: &str) -> Option<Classify> {
    let state = wait_for("the process", || Some(classify(daemon)).filter(|it| it.state != "starting"));
    if state.detail.contains("cannot be opened") {
        assert!(state.detail.contains("the package libndpi-dev brings"), "{}", state.detail);
        println!("SKIP {test}: {}", state.detail);
        return None;
    }
    Some(wait_for("nDPI", || Some(classify(daemon)).filter(|it| it.state == "ready")))
}

const SECRET: &str = "secret-7f3a91";

/// As a page is asked for.
fn ask(site: &Site, listener: &TcpListener) {
    let (mut here, mut there, _) = connect(site, listener);
    let question = format!(
        "GET /{SECRET} HTTP/1.1\r\nHost: {SECRET}.example\r\nUser-Agent: curl/8.0\r\nAccept: */*\r\n\r\n"
    );
    here.write_all(question.as_bytes()).unwrap();
    there.read_exact(&mut vec![0; question.len()]).unwrap();
    let answer = format!(
        "HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: {}\r\n\r\n{SECRET}",
        SECRET.len()
    );
    there.write_all(answer.as_bytes()).unwrap();
    there.shutdown(Shutdown::Write).unwrap();
    let mut got = String::new();
    here.read_to_string(&mut got).unwrap();
    assert_eq!(got, answer);
}

#[test]
fn first_bytes_are_looked_at_by_a_process_that_may_die() {
    let Some(site) = Site::new("bytes") else { return };
    let [near, _far] = warm(&site, ["[classify]\nndpi = true\n", ""]);
    let Some(first) = ready(&near, "first_bytes_are_looked_at_by_a_process_that_may_die") else { return };
    let listener = site.listen();
    be("browser");
    ask(&site, &listener);
    let named = wait_for("a name", || purpose(&near, "browser").filter(|it| it.source == "classified"));
    assert_eq!(
        (named.profile.as_str(), named.why.as_str()),
        ("time-and-loss", "the latest that was looked at spoke HTTP")
    );

    // Bytes that are nothing, through a parser in C.
    be("noise");
    for seed in 0..30 {
        let (here, there, _) = connect(&site, &listener);
        let (mut from, mut to) = (&here, &there);
        for round in 0..5 {
            let bytes = noise(seed * 10 + round, 700);
            from.write_all(&bytes).unwrap();
            to.read_exact(&mut vec![0; 700]).unwrap();
            std::mem::swap(&mut from, &mut to);
        }
    }
    let looked = |it: &Classify| {
        it.counts["classified"] + it.counts["unknown"] + it.counts["dropped"] + it.counts["failed"]
    };
    wait_until("all to be counted", || classify(&near), |it| looked(it) >= 31);

    // Who takes it over, or ends it, has nothing of the daemon.
    let pid = |it: &Classify| Pid::from_raw(it.pid.unwrap().try_into().unwrap());
    kill(pid(&first), Signal::SIGKILL).unwrap();
    let second = wait_for("another process", || {
        Some(classify(&near))
            .filter(|it| it.counts["restarted"] >= 1 && it.state == "ready" && it.pid != first.pid)
    });
    be("again");
    ask(&site, &listener);
    wait_for("a name", || purpose(&near, "again").filter(|it| it.source == "classified"));

    // One that says nothing holds no connection up, and is replaced.
    kill(pid(&second), Signal::SIGSTOP).unwrap();
    ask(&site, &listener);
    wait_until("it to be given up", || classify(&near), |it| it.counts["failed"] >= 1);
    wait_for("another process", || {
        Some(classify(&near)).filter(|it| it.state == "ready" && it.pid != second.pid)
    });
    ask(&site, &listener);

    for told in [near.log(), near.succeed(&["status", "--json"]), near.succeed(&["why", SERVER, "--json"])] {
        assert!(!told.contains(SECRET) && !told.contains("GET /"), "{told}");
    }
    let last = pid(&classify(&near));
    near.kill();
    wait_for("its end with the daemon", || kill(last, None).is_err());
}

fn is_there(program: &str) -> bool {
    let found = Command::new("sh").args(["-c", "command -v \"$0\"", program]).stdout(Stdio::null()).status();
    found.is_ok_and(|status| status.success())
}

/// A program of the client's host asks, and is answered as far as its protocol is seen. Returns the ends of its connection.
fn visit(site: &Site, listener: &TcpListener, program: &str) -> [SocketAddr; 2] {
    let (url, host, port) =
        (format!("http://{SERVER}:{PORT}/"), format!("{SERVER}:{PORT}"), PORT.to_string());
    let (arguments, least, answer): (&[&str], _, &[u8]) = match program {
        "ssh" => (
            &[
                "-F",
                "none",
                "-p",
                &port,
                "-oBatchMode=yes",
                "-oStrictHostKeyChecking=no",
                "-oUserKnownHostsFile=/dev/null",
                SERVER,
                "true",
            ],
            300,
            b"SSH-2.0-OpenSSH_9.2p1 Debian-2\r\n",
        ),
        "curl" => {
            (&["-s", &url], 20, b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 2\r\n\r\nyes")
        }
        // A handshake that fails: an alert.
        "openssl" => (
            &["s_client", "-connect", &host, "-servername", "archive.example"],
            100,
            &[21, 3, 3, 0, 2, 2, 40],
        ),
        other => panic!("{other}"),
    };
    let mut command = site.command(0, program);
    command.args(arguments).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let mut child = site.spawn(0, command);
    let (mut stream, client) = listener.accept().unwrap();
    stream.set_read_timeout(Some(LONG)).unwrap();
    // A server of SSH speaks first.
    if program == "ssh" {
        stream.write_all(answer).unwrap();
    }
    let (mut got, mut buffer) = (0, [0; 4096]);
    while got < least {
        let length = stream.read(&mut buffer).unwrap();
        assert!(length > 0, "{program} ended after {got} bytes");
        got += length;
    }
    if program != "ssh" {
        stream.write_all(answer).unwrap();
    }
    let ends = [client, stream.local_addr().unwrap()];
    drop(stream);
    child.wait().unwrap();
    ends
}

fn chosen(daemon: &Daemon<'_>, rule: &str) -> Option<Chosen> {
    let why: Why = serde_json::from_str(&daemon.succeed(&["why", SERVER, "--json"])).unwrap();
    why.chosen.into_iter().find(|it| it.rule == rule)
}

/// Three applications of one port, of which nothing is known at first: they are carried, and what they speak is seen. Their next connections
/// go as the model has it for that.
#[test]
fn applications_go_by_what_they_have_spoken() {
    const TEST: &str = "applications_go_by_what_they_have_spoken";
    const PROGRAMS: [&str; 3] = ["ssh", "curl", "openssl"];
    if let Some(missing) = PROGRAMS.iter().find(|program| !is_there(program)) {
        return println!("SKIP {TEST}: there is no {missing}");
    }
    let Some(site) = Site::new("spoken") else { return };
    const IN_PLACE: [&str; 2] = ["reno", "carried-warm"];
    const CARRIED: [&str; 2] = ["carried-warm", "reno"];
    let of_profiles =
        [("time", IN_PLACE), ("time-and-loss", CARRIED), ("loss", CARRIED), ("insensitive", IN_PLACE)];
    let leaves = (0..)
        .zip(of_profiles)
        .map(|(number, (name, arms))| format!("\"{name}\":{}", leaf(number, &arms, None)));
    let tree = format!(
        "{{\"branch\":{{\"by\":\"profile\",\"unknown\":\"time-and-loss\",\"to\":{{{}}}}}}}",
        leaves.collect::<Vec<_>>().join(",")
    );
    model(&site, &IN_PLACE, &tree);
    let rules = PROGRAMS.map(|program| {
        format!(
            "[[rule]]\nname = \"{program}\"\nside = \"client\"\nport = {PORT}\ncommand = \"{program}\"\nagree = false\n\
             tier = \"chosen\"\nselect = \"learned\"\n"
        )
    });
    let rest = format!(
        "[[rule]]\nname = \"rest\"\nside = \"client\"\nport = {PORT}\nagree = false\nselect = \"loss\"\n"
    );
    let known = keys(&site);
    let classify = "[classify]\nndpi = true\nprofiles = { HTTP = \"insensitive\" }\n";
    let settings = client(&known[1], &format!("{classify}{}{rest}", rules.concat()));
    site.configure_on(0, &format!("model = \"model.json\"\n{settings}"));
    site.configure_on(1, &server(&known[0], ""));
    let _far = Daemon::start_on(&site, 1);
    let near = Daemon::start_on(&site, 0);
    wait_for_state(&near, "warm");
    if ready(&near, TEST).is_none() {
        return;
    }
    let listener = site.listen();
    be("anybody");
    let (here, there, _) = connect(&site, &listener);
    exchange(&here, &there, 1000);
    drop((here, there));

    let table = [
        ("ssh", "SSH", "time", "in-place", "reno"),
        ("curl", "HTTP", "insensitive", "in-place", "reno"),
        ("openssl", "TLS", "time-and-loss", "carried", "carried-warm"),
    ];
    for (program, protocol, profile, tier, arm) in table {
        wait_for("a choice", || chosen(&near, program).filter(|it| it.arm == "carried-warm"));
        let first = why(&near, visit(&site, &listener, program));
        assert_eq!((first.tier.as_str(), first.rule.as_str()), ("carried", program), "{first:?}");
        let unknown = first.purpose.unwrap();
        assert_eq!((unknown.profile.as_str(), unknown.source.as_str()), ("time-and-loss", "default"));
        let classified =
            wait_for("a name", || purpose(&near, program).filter(|it| it.source == "classified"));
        assert_eq!(classified.why, format!("the latest that was looked at spoke {protocol}"));
        wait_for("another choice", || {
            chosen(&near, program).filter(|it| it.profile == profile && it.arm == arm)
        });
        let ends = visit(&site, &listener, program);
        let next = why(&near, ends);
        assert_eq!((next.tier.as_str(), next.arm.as_str()), (tier, arm), "{next:?}");
        let known = next.purpose.unwrap();
        assert_eq!((known.profile.as_str(), known.source.as_str()), (profile, "classified"));
        let text = near.succeed(&["why", &format!("{}-{}", ends[0], ends[1])]);
        let line = format!("profile: {profile} (classified): {}", classified.why);
        assert!(text.contains(&line), "{text}");
    }
}

#[test]
fn what_is_not_carried_is_not_looked_at() {
    let Some(site) = Site::new("unseen") else { return };
    let [near, far] = warm(&site, ["", ""]);
    // exact: the settings say so
    assert!(near.status().classify.is_none() && far.status().classify.is_none());
    assert_eq!(carry(&near).connections, 0);
    site.configure(&format!(
        "[classify]\nndpi = true\n{}",
        rule("client", PORT).replace("tier = \"carried\"\n", "")
    ));
    let refused = near.fail(&["reload"]);
    assert!(refused.contains("[classify] wants [carry]"), "{refused}");
}
