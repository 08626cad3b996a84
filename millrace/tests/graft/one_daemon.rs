//! Tests of one daemon that has processes (parts) for TCP, for agreements with peers, for tunnelled connections, and for
//! sessions. Each part may end, hang or be restarted without an effect on the others.

use std::{
    fs,
    net::UdpSocket,
    process::Command,
    time::{Duration, Instant},
};

use millrace_graft_daemon::control;
use nix::sys::signal::Signal;

use crate::agreement::{NET_BIND_SERVICE, network_sockets, privileges};
use crate::site::{
    CLIENT, GraftProcess, GraftSite, HTTP, PORT, SERVER, congestion, has_ended, inside, part, part_state,
    pause, peer, signal, wait_for, wait_until,
};

const SESSIONS: u16 = 7000;
/// Names of the daemon's child processes (parts).
const PARTS: [&str; 5] = ["grafts", "agreements", "tunnel", "sessions", "peers"];
/// Longest time in which the daemon must answer while one of its child processes hangs. It detects the hang after some
/// 2 s; the rest is a margin for a busy machine.
const BOUNDED: Duration = Duration::from_secs(6);

fn settings(site: &GraftSite, side: usize) -> String {
    let (local, remote) = if side == 0 { (CLIENT, SERVER) } else { (SERVER, CLIENT) };
    // The kernel has one list of TCP congestion controls for all network namespaces. So only one of the two daemons
    // loads a graft for TCP.
    let rule = format!(
        "cgroup = {:?}\n[[rule]]\nname = \"test\"\nside = \"client\"\nport = {PORT}\nagree = false\ngraft = \"longhaul\"\n",
        site.cgroup(0)
    );
    format!(
        "{}[sessions]\ninterface = [\"eth\"]\n\
         [[graft]]\nname = \"complete\"\nfunctions = [\"number\", \"repair\"]\n\
         [[graft]]\nname = \"newest\"\nfunctions = [\"number\", \"order\"]\n\
         {}ports = \"40000\"\n\
         [[session]]\nname = \"s\"\nlocal = \"{local}:{SESSIONS}\"\nremote = \"{remote}:{SESSIONS}\"\n\
         peer = \"other\"\ngraft = \"complete\"\n",
        if side == 0 { rule.as_str() } else { "" },
        peer(local, remote)
            .replace("[agreement]\n", &format!("[carry]\n[agreement]\nlisten = \"{local}:9187\"\n"))
    )
}

fn start(site: &GraftSite, side: usize) -> GraftProcess<'_> {
    site.put_key();
    fs::write(site.path(&format!("graft{side}.toml")), settings(site, side)).unwrap();
    let messages = site.path(&format!("messages{side}.sock"));
    let more = ["--messages-socket", messages.to_str().unwrap(), "--http", HTTP, "--http-token-file=off"];
    GraftProcess::start_with(site, side, &more)
}

fn socket(site: &GraftSite, side: usize) -> UdpSocket {
    let (local, remote) = if side == 0 { (CLIENT, SERVER) } else { (SERVER, CLIENT) };
    let socket = inside(&site.namespaces[side], || UdpSocket::bind((local, SESSIONS)).unwrap());
    socket.connect((remote, SESSIONS)).unwrap();
    socket.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
    socket
}

fn status(daemon: &GraftProcess<'_>) -> control::Status {
    serde_json::from_str(&daemon.succeed(&["status", "--json"])).unwrap()
}

/// Sends over the session until a datagram arrives.
fn exchange([from, to]: [&UdpSocket; 2]) {
    wait_for("a datagram by the session", || {
        from.send(b"by the session").map_err(|error| error.to_string())?;
        to.recv(&mut [0; 64]).map_err(|error| error.to_string())
    });
}

/// Returns the duration of `work`, and its result.
fn time<T>(work: impl FnOnce() -> T) -> (Duration, T) {
    let began = Instant::now();
    let done = work();
    (began.elapsed(), done)
}

#[test]
fn processes_of_the_daemon_share_one_control_socket_and_http_page() {
    let Some(site) = GraftSite::with_controls("one") else { return };
    let listener = site.listen();
    let [near, _far] = [0, 1].map(|side| start(&site, side));
    let sockets = [0, 1].map(|side| socket(&site, side));
    exchange([&sockets[0], &sockets[1]]);
    assert_eq!(congestion(&site.connect(&listener).0), "mr_longhaul");

    // exact: the daemon's rules and sessions are already in use, so their entries in the status exist
    let status = status(&near);
    assert_eq!((status.in_place.rules.len(), status.in_place.loaded.len()), (1, 1));
    assert_eq!(status.sessions.unwrap().sessions[0].name, "s");
    let states: Vec<_> = status.parts.iter().map(|it| (it.name.as_str(), it.state.as_str())).collect();
    assert_eq!(states, PARTS.map(|name| (name, "serving")));
    let parts = "parts: grafts serving, agreements serving, tunnel serving, sessions serving, peers serving";
    for words in [parts, "longhaul", "SESSION"] {
        assert!(near.succeed(&["status"]).contains(words), "{words}");
    }
    wait_until("health", || site.get(0, "/healthz"), |page| page.contains("HTTP/1.1 200"));
    let page = site.get(0, "/metrics");
    for line in [
        r#"millrace_graft_part_up{part="grafts"} 1"#,
        r#"millrace_graft_part_up{part="agreements"} 1"#,
        r#"millrace_graft_part_up{part="tunnel"} 1"#,
        "millrace_graft_carried_connections 0",
        r#"millrace_graft_part_up{part="sessions"} 1"#,
        r#"millrace_graft_part_up{part="peers"} 1"#,
        r#"millrace_graft_connections{graft="longhaul"} "#,
        r#"millrace_packet_graft_session{session="s",graft="complete"} 1"#,
    ] {
        assert!(page.contains(line), "{line} is not in\n{page}");
    }
    assert_eq!(page.matches("# EOF").count(), 1);
    let why = near.succeed(&["why", SERVER]);
    assert!(
        why.contains("session s, ") && why.contains("graft complete") && why.contains("rule: test"),
        "{why}"
    );
    let swapped = near.succeed(&["sessions", "swap", "s", "newest"]);
    assert!(swapped.starts_with("s: both ends use newest"), "{swapped}");

    // A reload ends the child processes (parts) that the settings no longer need, and starts those that they need.
    let both = settings(&site, 0);
    let configure = |text: &str| fs::write(site.path("graft0.toml"), text).unwrap();
    let tcp_alone = both.split("[sessions]").next().unwrap();
    configure(tcp_alone);
    near.succeed(&["reload"]);
    assert_eq!(part_state(&near, "sessions"), "off");
    assert!(near.fail(&["sessions", "status"]).contains("its part `sessions` is off"));
    assert!(near.fail(&["sessions", "swap", "s", "newest"]).contains("want nothing of the part sessions"));
    configure(&both);
    near.succeed(&["reload"]);
    exchange([&sockets[0], &sockets[1]]);
    assert_eq!(congestion(&site.connect(&listener).0), "mr_longhaul");
    near.end();
}

/// A peer's daemon may find a fault in the parser of QUIC or of messages. The process that speaks with it has no
/// capability for BPF, and no right but that to its port.
#[test]
fn process_that_speaks_with_daemons_of_peers_cannot_use_bpf() {
    let Some(site) = GraftSite::with_controls("speaks") else { return };
    let ends = [0, 1].map(|side| start(&site, side));
    for daemon in &ends {
        wait_until(
            "a connection with the peer",
            || status(daemon).sessions.unwrap().peers,
            |peers| peers.iter().all(|peer| peer.is_there && peer.trouble.is_none()),
        );
        let all = daemon.succeed(&["status", "--json"]);
        let (capabilities, is_confined) = privileges(part(&all, "peers"));
        assert_eq!((is_confined, capabilities & !NET_BIND_SERVICE), (true, 0), "{capabilities:x}");
        assert_eq!(network_sockets(part(&all, "peers")), 1);
    }
}

#[test]
fn killed_process_of_the_daemon_restarts_while_the_others_continue() {
    let Some(site) = GraftSite::with_controls("killed") else { return };
    let listener = site.listen();
    let [near, _far] = [0, 1].map(|side| start(&site, side));
    let sockets = [0, 1].map(|side| socket(&site, side));
    exchange([&sockets[0], &sockets[1]]);
    for name in PARTS {
        let all = near.succeed(&["status", "--json"]);
        let killed = part(&all, name);
        signal(killed, Signal::SIGKILL);
        if name != "sessions" {
            exchange([&sockets[0], &sockets[1]]);
        }
        if name != "grafts" {
            assert_eq!(congestion(&site.connect(&listener).0), "mr_longhaul");
        }
        let restarts = |status: &control::Status| {
            status
                .parts
                .iter()
                .filter(|it| it.restarts == 1 && it.state == "serving")
                .any(|it| it.name == name)
        };
        let after = wait_until("the part to be restarted", || status(&near), restarts);
        let now = serde_json::to_string(&after).unwrap();
        for other in PARTS {
            assert_eq!(
                part(&now, other) == part(&all, other),
                other != name,
                "{other}, after the end of {name}"
            );
        }
        assert!(
            near.log().contains(&format!("the part {name} has ended, and is started again")),
            "{}",
            near.log()
        );
    }
    exchange([&sockets[0], &sockets[1]]);
    let next = || congestion(&site.connect(&listener).0);
    wait_until("the rule to apply again", next, |used| used == "mr_longhaul");
}

#[test]
fn hanging_process_of_the_daemon_is_named_and_delays_no_request() {
    let Some(site) = GraftSite::with_controls("hangs") else { return };
    let listener = site.listen();
    let [near, _far] = [0, 1].map(|side| start(&site, side));
    let sockets = [0, 1].map(|side| socket(&site, side));
    exchange([&sockets[0], &sockets[1]]);
    for name in PARTS {
        let stopped = part(&near.succeed(&["status", "--json"]), name);
        pause(stopped);
        let (took, trouble) = time(|| status(&near).in_place.trouble);
        assert!(took < BOUNDED, "{took:?}");
        let words = format!("the part {name} is not answering");
        assert!(trouble.contains(&words), "{trouble:?}");
        let request: &[&str] = match name {
            "grafts" => &["monitor"],
            "agreements" => &["probe", SERVER],
            "tunnel" | "peers" => &["reload"],
            _ => &["sessions", "swap", "s", "newest"],
        };
        let (took, said) = time(|| near.fail(request));
        assert!(took < BOUNDED && said.contains(&words), "{took:?} {said}");
        let (took, page) = time(|| site.get(0, "/metrics"));
        assert!(
            took < BOUNDED && page.contains(&format!(r#"part_up{{part="{name}"}} 0"#)),
            "{took:?} {page}"
        );
        assert!(site.get(0, "/healthz").contains("HTTP/1.1 503"));
        match name {
            "sessions" => {}
            _ => {
                // The peer may not have finished the previous change of the session's graft, so requests are repeated.
                for graft in ["newest", "complete"] {
                    wait_for("the swap", || near.verb(&["sessions", "swap", "s", graft]).status.success());
                }
            }
        }
        if name != "grafts" {
            assert_eq!(congestion(&site.connect(&listener).0), "mr_longhaul");
        }
        signal(stopped, Signal::SIGCONT);
        wait_until("the part to answer", || part_state(&near, name), |state| state == "serving");
    }
    // A hanging process (part) of the daemon must not delay the daemon's end, and must end with the daemon.
    let stopped = part(&near.succeed(&["status", "--json"]), "sessions");
    pause(stopped);
    wait_until("the hang in the status", || part_state(&near, "sessions"), |state| state == "not-answering");
    near.end();
    // exact: a daemon ends only after all of its child processes have ended, and this daemon has ended
    assert!(!fs::exists(format!("/proc/{stopped}")).unwrap());
}

/// The kernel ends the child processes (parts) of a killed daemon, whether they run or are stopped. The next daemon
/// waits until they have ended.
#[test]
fn killed_daemon_leaves_none_of_its_processes() {
    let Some(site) = GraftSite::with_controls("alone") else { return };
    for _ in 0..2 {
        let near = start(&site, 0);
        let all = near.succeed(&["status", "--json"]);
        let parts = PARTS.map(|name| part(&all, name));
        pause(parts[1]);
        near.kill();
        wait_for("the end of the parts", || parts.iter().all(|id| has_ended(*id)));
        let link = || {
            let mut shown = Command::new("ip");
            shown.args(["-n", &site.namespaces[0], "-d", "link", "show", "eth"]);
            String::from_utf8(shown.output().unwrap().stdout).unwrap()
        };
        wait_until("all programs to be detached", link, |link| !link.contains("xdp"));
    }
}

#[test]
fn errors_for_former_settings_name_their_replacement() {
    let directory = tempfile::tempdir().unwrap();
    let config = directory.path().join("packets.toml");
    fs::write(&config, "interface = [\"eth0\"]\nsessions = 9\n[[graft]]\nname = \"a\"\nfunctions = []\n")
        .unwrap();
    let run = |args: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_millrace"))
            .arg("graft")
            .args(args)
            .arg(&config)
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(1), "{args:?}");
        String::from_utf8(output.stderr).unwrap()
    };
    let said = run(&["run", "--check", "--config"]);
    assert!(said.contains("packets.toml:1: interface: has moved"), "{said}");
    assert!(said.contains("write `[sessions]`, and `max-sessions = ...` under it"), "{said}");
    let said = run(&["packets", "run", "--config"]);
    assert!(said.contains("use millrace graft run --config FILE"), "{said}");
    assert!(run(&["packets", "status"]).contains("use millrace graft sessions status"));
    assert!(run(&["packets", "reload"]).contains("use millrace graft reload"));
}
