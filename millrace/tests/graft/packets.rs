//! Tests of sessions between two processes `millrace graft run`: the datagrams at both ends, the packets on the wire,
//! and the programs that stay in the kernel.

use std::{
    collections::BTreeSet,
    fs,
    net::UdpSocket,
    path::PathBuf,
    process::{Child, Command},
    sync::atomic::{AtomicBool, Ordering},
    thread,
};

use millrace_graft::packet::Status;
use millrace_graft_kernel::TALLIES;
use millrace_testkit::show_log_on_panic;

use crate::site::{CLIENT, GraftSite, LONG, SERVER, inside, peer, wait_for, wait_until};

/// A graft daemon in a network namespace; killed when dropped.
struct PacketsDaemon<'a> {
    site: &'a GraftSite,
    side: usize,
    process: Child,
}

fn settings(side: usize, more: &str) -> String {
    let (local, remote) = if side == 0 { (CLIENT, SERVER) } else { (SERVER, CLIENT) };
    format!(
        "[sessions]\ninterface = [\"eth\"]\n\
         [[graft]]\nname = \"complete\"\nfunctions = [\"number\", \"repair\"]\n\
         [[graft]]\nname = \"newest\"\nfunctions = [\"number\", \"order\"]\n\
         {}ports = \"40000\"\n\
         [[session]]\nname = \"test\"\nlocal = \"{local}:7000\"\nremote = \"{remote}:7000\"\n\
         peer = \"other\"\ngraft = \"complete\"\n{more}",
        peer(local, remote)
    )
}

impl<'a> PacketsDaemon<'a> {
    fn start(site: &'a GraftSite, side: usize) -> Self {
        Self::start_with(site, side, &settings(side, ""))
    }

    fn start_with(site: &'a GraftSite, side: usize, settings: &str) -> Self {
        site.put_key();
        let config = site.path(&format!("packets{side}.toml"));
        fs::write(&config, settings).unwrap();
        let mut command = Command::new("nsenter");
        command.arg(format!("--net=/run/netns/{}", site.namespaces[side]));
        command.arg(env!("CARGO_BIN_EXE_millrace"));
        command.args(["graft", "run", "--http-token-file=off", "--config"]).arg(config);
        let process = command.arg("--socket").arg(Self::socket(site, side));
        let process = process.stderr(fs::File::create(site.path(&format!("packets{side}.log"))).unwrap());
        let mut daemon = Self { site, side, process: process.spawn().unwrap() };
        wait_for("a daemon that is ready", || {
            let log = fs::read_to_string(site.path(&format!("packets{side}.log"))).unwrap();
            assert!(daemon.process.try_wait().unwrap().is_none(), "{log}");
            log.contains("ready")
        });
        daemon
    }

    fn socket(site: &GraftSite, side: usize) -> PathBuf {
        site.path(&format!("packets{side}.sock"))
    }

    fn log(&self) -> String {
        fs::read_to_string(self.site.path(&format!("packets{}.log", self.side))).unwrap()
    }

    fn verb(&self, args: &[&str]) -> (bool, String) {
        let mut command = Command::new(env!("CARGO_BIN_EXE_millrace"));
        command.arg("graft").args(args);
        let output = command.arg("--socket").arg(Self::socket(self.site, self.side)).output().unwrap();
        let said = [output.stdout, output.stderr].concat();
        (output.status.success(), String::from_utf8(said).unwrap())
    }
}

/// Waits until the daemon's HTTP page at `path` contains these words.
fn wait_for_words(daemon: &PacketsDaemon<'_>, path: &str, words: &str) {
    wait_until(words, || daemon.site.get(daemon.side, path), |text| text.contains(words));
}

/// Waits until the daemon's status as text contains these words.
fn wait_for_status(daemon: &PacketsDaemon<'_>, words: &str) {
    wait_until(words, || daemon.verb(&["sessions", "status"]).1, |text| text.contains(words));
}

impl Drop for PacketsDaemon<'_> {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
        let side = self.side;
        let log = self.site.path(&format!("packets{side}.log"));
        show_log_on_panic(&format!("the daemon of side {side}"), &log);
    }
}

fn udp(site: &GraftSite, side: usize) -> UdpSocket {
    let (local, remote) = if side == 0 { (CLIENT, SERVER) } else { (SERVER, CLIENT) };
    let socket = inside(&site.namespaces[side], || UdpSocket::bind((local, 7000)).unwrap());
    socket.connect((remote, 7000)).unwrap();
    socket.set_read_timeout(Some(LONG)).unwrap();
    socket
}

#[test]
fn sessions_show_in_status_and_metrics() {
    let Some(site) = GraftSite::new("packets") else { return };
    ["c", "s"].iter().enumerate().for_each(|(side, _)| {
        crate::site::ip(&format!("-n {} link set lo up", site.namespaces[side]));
    });
    let near = PacketsDaemon::start(&site, 0);
    let far = PacketsDaemon::start(&site, 1);
    for daemon in [&near, &far] {
        wait_for_words(daemon, "/status", "\"has_keys\":true");
    }
    let from = udp(&site, 0);
    let to = udp(&site, 1);
    let mut buffer = [0; 64];
    for number in 0..10_u8 {
        from.send(&[number; 40]).unwrap();
        assert_eq!(to.recv(&mut buffer).unwrap(), 40);
        assert_eq!(buffer[..40], [number; 40]);
    }
    let has = |daemon: &PacketsDaemon<'_>, line: &str| wait_for_words(daemon, "/metrics", line);
    has(&near, r#"millrace_packet_graft_packets_total{session="test",reason="sent"} 10"#);
    has(&far, r#"millrace_packet_graft_packets_total{session="test",reason="delivered"} 10"#);
    has(&far, r#"millrace_packet_graft_session{session="test",graft="complete"} 1"#);
    wait_for_words(&far, "/healthz", "HTTP/1.1 200");

    let (done, said) = near.verb(&["sessions", "swap", "test", "newest"]);
    assert!(done, "{said}");
    has(&near, r#"millrace_packet_graft_swaps_total{session="test",outcome="agreed"} 1"#);
    wait_for_words(&far, "/status", "\"graft\":\"newest\"");

    // A refused reload changes nothing, and the status reports it.
    fs::write(site.path("packets1.toml"), settings(1, "mode = \"none\"\n")).unwrap();
    assert!(!far.verb(&["reload"]).0);
    has(&far, "millrace_graft_reload_ok 0");
    wait_for_words(&far, "/healthz", "HTTP/1.1 503");
    fs::write(site.path("packets1.toml"), settings(1, "")).unwrap();
    let (done, said) = far.verb(&["reload"]);
    assert!(done, "{said}");
    has(&far, "millrace_graft_reload_ok 1");

    drop((near, far));
    for namespace in &site.namespaces {
        let link = || {
            let mut shown = Command::new("ip");
            shown.args(["-n", namespace, "-d", "link", "show", "eth"]);
            String::from_utf8(shown.output().unwrap().stdout).unwrap()
        };
        wait_until("all programs to be detached", link, |link| !link.contains("xdp"));
    }
}

/// The hosts' veth interfaces have checksum offload, but no interface completes the checksums.
#[test]
fn sealed_and_clear_sessions_pass_datagrams_of_all_lengths() {
    for (name, more, other) in [("sealedl", "", "clear = true\n"), ("clearl", "clear = true\n", "")] {
        let Some(site) = GraftSite::new(name) else { return };
        site.namespaces.iter().for_each(|name| crate::site::ip(&format!("-n {name} link set lo up")));
        let near = PacketsDaemon::start_with(&site, 0, &settings(0, more));
        wait_for_status(
            &near,
            &format!("peer other: its daemon has not called {CLIENT}:40000/udp of this host yet"),
        );
        let far = PacketsDaemon::start_with(&site, 1, &settings(1, more));
        for daemon in [&near, &far] {
            wait_for_words(daemon, "/healthz", "HTTP/1.1 200");
        }
        let from = udp(&site, 0);
        let to = udp(&site, 1);
        let mut buffer = [0; 2048];
        for length in [1, 40, 1401, 1420] {
            for (from, to) in [(&from, &to), (&to, &from)] {
                let sent: Vec<_> = (0..length).map(|at: u32| at as u8).collect();
                from.send(&sent).unwrap();
                let got = to.recv(&mut buffer).unwrap();
                assert_eq!(buffer[..got], sent);
            }
        }
        let (done, said) = near.verb(&["sessions", "swap", "test", "newest"]);
        assert!(done, "{said}");
        fs::write(site.path("packets0.toml"), settings(0, other)).unwrap();
        let (done, said) = near.verb(&["reload"]);
        assert!(
            !done && said.contains("peer, cipher and paths cannot change while the daemon runs"),
            "{said}"
        );
    }
}

/// Writes a graft that counts packets, in version 1 or 2, into a host's directory of grafts.
fn put_tally(site: &GraftSite, side: usize, version: usize) {
    let pool = site.path(&format!("pool{side}"));
    fs::create_dir_all(&pool).unwrap();
    let image = TALLIES[version - 1];
    let migrates = if version == 2 { "migrates = [1]\n" } else { "" };
    let manifest = format!(
        "abi = 3\nname = \"tally\"\nobject = \"tally.bpf.o\"\nsha256 = \"{}\"\nabout = \"counts\"\n\
         kernel = \"6.1\"\nstate-version = {version}\n{migrates}",
        millrace_graft::ObjectIdentity::from_image(image)
    );
    fs::write(pool.join("tally.bpf.o"), image).unwrap();
    fs::write(pool.join("tally.toml"), manifest).unwrap();
}

#[test]
fn sessions_restart_when_both_peers_load_a_new_packet_function_version() {
    let Some(site) = GraftSite::new("versions") else { return };
    site.namespaces.iter().for_each(|name| crate::site::ip(&format!("-n {name} link set lo up")));
    let [near, far] = [0, 1].map(|side| {
        put_tally(&site, side, 1);
        let text = settings(side, "").replace("\"repair\"]", "\"repair\", \"tally\"]");
        let text = text.replace("[sessions]\n", &format!("[sessions]\npool = [\"pool{side}\"]\n"));
        PacketsDaemon::start_with(&site, side, &text)
    });
    for daemon in [&near, &far] {
        wait_for_words(daemon, "/status", "\"has_keys\":true");
    }
    let from = udp(&site, 0);
    let to = udp(&site, 1);
    let passes = |number: u8| {
        let mut buffer = [0; 64];
        from.send(&[number; 40]).unwrap();
        assert_eq!(to.recv(&mut buffer).unwrap(), 40);
        assert_eq!(buffer[..40], [number; 40]);
    };
    passes(1);
    // The peer does not have the graft's new version yet. The session keeps the old version, and the status says why.
    put_tally(&site, 0, 2);
    assert!(near.verb(&["reload"]).0);
    wait_for_words(&near, "/status", "the other end does not have this list of functions");
    passes(2);
    put_tally(&site, 1, 2);
    assert!(far.verb(&["reload"]).0);
    for daemon in [&near, &far] {
        wait_for_status(daemon, "test: continues with the state of tally");
    }
    passes(3);
    // The daemon refuses to change the session's graft until no packet of the graft's first version can be in flight,
    // so the request is repeated.
    let said = wait_for("the next change", || {
        let (done, said) = near.verb(&["sessions", "swap", "--stateless", "test", "newest"]);
        done.then_some(said)
    });
    let words = "test: restarted; lost datagrams: 0 sent by this end, 0 sent by the peer\n";
    assert!(said.ends_with(words), "{said}");
    passes(4);
    for daemon in [&near, &far] {
        wait_for_status(daemon, words);
        for direction in ["sent", "received"] {
            let line =
                format!(r#"millrace_packet_graft_lost_total{{session="test",direction="{direction}"}} 0"#);
            wait_for_words(daemon, "/metrics", &line);
        }
    }
    // A version of a graft whose manifest has no `migrates` cannot take over the state of another version.
    let pool = site.path("pool0");
    let manifest = fs::read_to_string(pool.join("tally.toml")).unwrap();
    fs::write(pool.join("tally.toml"), manifest.replace("migrates = [1]\n", "")).unwrap();
    let (done, said) = near.verb(&["reload"]);
    assert!(!done && said.contains("`migrates` says from which state-version"), "{said}");
}

/// Datagrams are sent in both directions all the time, while the daemons reconnect and change keys several times.
#[test]
fn no_datagram_is_lost_when_daemons_reconnect() {
    const LEAST: u64 = 50_000;
    const TIMES: usize = 3;
    let Some(site) = GraftSite::new("renewed") else { return };
    let with = |side| settings(side, "").replace("[sessions]\n", "[sessions]\nrenew-s = 5\n");
    let [near, far] = [0, 1].map(|side| PacketsDaemon::start_with(&site, side, &with(side)));
    for daemon in [&near, &far] {
        wait_until("keys", || daemon.log(), |log| log.contains(KEYS));
    }
    let stop = AtomicBool::new(false);
    let sockets = [udp(&site, 0), udp(&site, 1)];
    let sent = thread::scope(|scope| {
        let threads = [0, 1].map(|from| {
            let sends = &sockets[from];
            let receives = &sockets[1 - from];
            let stop = &stop;
            scope.spawn(move || exchange(sends, receives, LEAST, stop))
        });
        for daemon in [&near, &far] {
            wait_until("other keys", || daemon.log(), |log| log.matches(KEYS).count() > TIMES);
        }
        stop.store(true, Ordering::Relaxed);
        threads.map(|thread| thread.join().unwrap())
    });
    println!("{sent:?} datagrams, none lost, keys renewed {TIMES} times");
    for (daemon, sent, came) in [(&near, sent[0], sent[1]), (&far, sent[1], sent[0])] {
        let (_, answer) = daemon.verb(&["sessions", "status", "--json"]);
        // exact: the counts of sent and delivered packets are final, since all sent datagrams have arrived
        let status: Status = serde_json::from_str(&answer).unwrap();
        let packets = &status.sessions[0].packets;
        assert_eq!((packets["sent"], packets["delivered"]), (sent, came), "{packets:?}");
        for reason in ["unopened", "no-keys", "replayed", "forged"] {
            assert_eq!(packets.get(reason), None, "{packets:?}");
        }
    }
}

const KEYS: &str = "both ends of a session have encryption keys";

/// Sends at least `least` numbered datagrams, and more until `stop` is set, with a few always in flight. Returns their
/// number when each has arrived once.
fn exchange(from: &UdpSocket, to: &UdpSocket, least: u64, stop: &AtomicBool) -> u64 {
    const UNDER_WAY: u64 = 32;
    let mut sent = 0;
    let mut came = BTreeSet::new();
    let mut buffer = [0; 64];
    loop {
        let goes_on = sent < least || !stop.load(Ordering::Relaxed);
        if goes_on && sent - (came.len() as u64) < UNDER_WAY {
            from.send(&u64::to_be_bytes(sent)).unwrap();
            sent += 1;
            continue;
        }
        if came.len() as u64 == sent {
            return sent;
        }
        let bytes = to.recv(&mut buffer).unwrap();
        let number = u64::from_be_bytes(buffer[..bytes].try_into().unwrap());
        assert!(number < sent && came.insert(number), "{number} came twice, or was never sent");
    }
}

/// A host with the peer's address and another key than the peer's gets no session. Settings of older versions are
/// refused with the lines that replace them.
#[test]
fn host_with_an_unconfigured_public_key_gets_no_packet_session() {
    let Some(site) = GraftSite::new("stranger") else { return };
    let near = PacketsDaemon::start(&site, 0);
    fs::create_dir(site.path("other")).unwrap();
    crate::agreement::key(&site, "other/host.key");
    let text = settings(1, "").replace("\"host.key\"", "\"other/host.key\"");
    let far = PacketsDaemon::start_with(&site, 1, &text);
    wait_for_status(&near, &format!("{SERVER}:40000/udp was refused"));
    wait_for_status(&far, &format!("its daemon on {CLIENT}:40000/udp refuses this host"));
    let from = udp(&site, 0);
    let to = udp(&site, 1);
    from.send(b"to nobody").unwrap();
    to.set_nonblocking(true).unwrap();
    wait_until(
        "a datagram without keys to be counted",
        || near.site.get(near.side, "/status"),
        |status| status.contains("\"no-keys\":1"),
    );
    assert!(to.recv(&mut [0; 64]).is_err());
    fs::write(site.path("packets0.toml"), settings(0, "key-file = \"session.key\"\n")).unwrap();
    let (done, said) = near.verb(&["reload"]);
    assert!(!done, "{said}");
    for line in ["key-file left Millrace", "millrace graft key --new host.key", "[agreement]", "peer = "] {
        assert!(said.contains(line), "{line}: {said}");
    }
}

/// The daemon that accepts connections is restarted. The other daemon must not wait until its old connection has timed
/// out.
#[test]
fn restarted_daemon_agrees_new_session_keys_before_the_old_ones_time_out() {
    let Some(site) = GraftSite::new("again") else { return };
    let mut hosts = [0, 1].map(|side| Some(PacketsDaemon::start(&site, side)));
    for side in [None, Some(0), Some(1)] {
        if let Some(side) = side {
            hosts[side] = None;
            hosts[side] = Some(PacketsDaemon::start(&site, side));
        }
        let [near, far] = [0, 1].map(|side| hosts[side].as_ref().unwrap());
        for daemon in [near, far] {
            wait_until(
                "keys",
                || daemon.verb(&["sessions", "status"]).1,
                |status| !status.contains("TROUBLE"),
            );
        }
        let from = udp(&site, 0);
        let to = udp(&site, 1);
        to.set_read_timeout(Some(std::time::Duration::from_millis(50))).unwrap();
        // The end that was not restarted learns of the restart from the peer's first message.
        wait_for("a datagram", || {
            from.send(b"again").unwrap();
            to.recv(&mut [0; 64]).is_ok()
        });
    }
}
