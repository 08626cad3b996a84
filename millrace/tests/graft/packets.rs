//! `millrace graft packets` as two processes: datagrams between them, what is seen of both from outside, and what is left.

use std::{
    fs,
    io::{Read as _, Write as _},
    net::{TcpStream, UdpSocket},
    path::PathBuf,
    process::{Child, Command},
};

use millrace_graft_kernel::TALLIES;
use millrace_testkit::show_log_on_panic;

use crate::site::{CLIENT, LONG, SERVER, Site, inside, wait_for, wait_until};

const HTTP: &str = "127.0.0.1:9188";

/// A daemon in a namespace; killed when dropped.
struct Packets<'a> {
    site: &'a Site,
    side: usize,
    process: Child,
}

fn settings(side: usize, more: &str) -> String {
    let (local, remote) = if side == 0 { (CLIENT, SERVER) } else { (SERVER, CLIENT) };
    format!(
        "interface = [\"eth\"]\n\
         [[graft]]\nname = \"complete\"\nfunctions = [\"number\", \"repair\"]\n\
         [[graft]]\nname = \"newest\"\nfunctions = [\"number\", \"order\"]\n\
         [[session]]\nname = \"test\"\nlocal = \"{local}:7000\"\nremote = \"{remote}:7000\"\n\
         key-file = \"key\"\ngraft = \"complete\"\n{more}"
    )
}

impl<'a> Packets<'a> {
    fn start(site: &'a Site, side: usize) -> Self {
        Self::start_with(site, side, &settings(side, ""))
    }

    fn start_with(site: &'a Site, side: usize, settings: &str) -> Self {
        fs::write(site.path("key"), "00112233445566778899aabbccddeeff").unwrap();
        let config = site.path(&format!("packets{side}.toml"));
        fs::write(&config, settings).unwrap();
        let mut command = Command::new("nsenter");
        command.arg(format!("--net=/run/netns/{}", site.namespaces[side]));
        command.arg(env!("CARGO_BIN_EXE_millrace"));
        command.args(["graft", "packets", "run", "--http-token-file=off", "--config"]).arg(config);
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

    fn socket(site: &Site, side: usize) -> PathBuf {
        site.path(&format!("packets{side}.sock"))
    }

    fn verb(&self, args: &[&str]) -> (bool, String) {
        let mut command = Command::new(env!("CARGO_BIN_EXE_millrace"));
        command.args(["graft", "packets"]).args(args);
        let output = command.arg("--socket").arg(Self::socket(self.site, self.side)).output().unwrap();
        let said = [output.stdout, output.stderr].concat();
        (output.status.success(), String::from_utf8(said).unwrap())
    }

    fn get(&self, path: &str) -> String {
        inside(&self.site.namespaces[self.side], || {
            let mut stream = TcpStream::connect(HTTP).unwrap();
            stream.set_read_timeout(Some(LONG)).unwrap();
            write!(stream, "GET {path} HTTP/1.1\r\nHost: {HTTP}\r\nConnection: close\r\n\r\n").unwrap();
            let mut answer = String::new();
            stream.read_to_string(&mut answer).unwrap();
            answer
        })
    }
}

/// In what it says at an address.
fn wait_for_words(daemon: &Packets<'_>, path: &str, words: &str) {
    wait_until(words, || daemon.get(path), |text| text.contains(words));
}

/// In its status for people.
fn wait_for_status(daemon: &Packets<'_>, words: &str) {
    wait_until(words, || daemon.verb(&["status"]).1, |text| text.contains(words));
}

impl Drop for Packets<'_> {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
        let side = self.side;
        let log = self.site.path(&format!("packets{side}.log"));
        show_log_on_panic(&format!("the daemon of side {side}"), &log);
    }
}

fn udp(site: &Site, side: usize) -> UdpSocket {
    let (local, remote) = if side == 0 { (CLIENT, SERVER) } else { (SERVER, CLIENT) };
    let socket = inside(&site.namespaces[side], || UdpSocket::bind((local, 7000)).unwrap());
    socket.connect((remote, 7000)).unwrap();
    socket.set_read_timeout(Some(LONG)).unwrap();
    socket
}

#[test]
fn sessions_are_seen_from_outside() {
    let Some(site) = Site::new("packets") else { return };
    ["c", "s"].iter().enumerate().for_each(|(side, _)| {
        crate::site::ip(&format!("-n {} link set lo up", site.namespaces[side]));
    });
    let (near, far) = (Packets::start(&site, 0), Packets::start(&site, 1));
    for daemon in [&near, &far] {
        wait_for_words(daemon, "/status", "\"has_keys\":true");
    }
    let (from, to) = (udp(&site, 0), udp(&site, 1));
    let mut buffer = [0; 64];
    for number in 0..10_u8 {
        from.send(&[number; 40]).unwrap();
        assert_eq!(to.recv(&mut buffer).unwrap(), 40);
        assert_eq!(buffer[..40], [number; 40]);
    }
    let has = |daemon: &Packets<'_>, line: &str| wait_for_words(daemon, "/metrics", line);
    has(&near, r#"millrace_packet_graft_packets_total{session="test",reason="sent"} 10"#);
    has(&far, r#"millrace_packet_graft_packets_total{session="test",reason="delivered"} 10"#);
    has(&far, r#"millrace_packet_graft_session{session="test",graft="complete"} 1"#);
    wait_for_words(&far, "/healthz", "HTTP/1.1 200");

    let (done, said) = near.verb(&["swap", "test", "newest"]);
    assert!(done, "{said}");
    has(&near, r#"millrace_packet_graft_swaps_total{session="test",outcome="agreed"} 1"#);
    wait_for_words(&far, "/status", "\"graft\":\"newest\"");

    // A reload that is refused leaves all as it was, and is seen.
    fs::write(site.path("packets1.toml"), settings(1, "mode = \"none\"\n")).unwrap();
    assert!(!far.verb(&["reload"]).0);
    has(&far, "millrace_packet_graft_reload_ok 0");
    wait_for_words(&far, "/healthz", "HTTP/1.1 503");
    fs::write(site.path("packets1.toml"), settings(1, "")).unwrap();
    let (done, said) = far.verb(&["reload"]);
    assert!(done, "{said}");
    has(&far, "millrace_packet_graft_reload_ok 1");

    drop((near, far));
    for namespace in &site.namespaces {
        let link = || {
            let mut shown = Command::new("ip");
            shown.args(["-n", namespace, "-d", "link", "show", "eth"]);
            String::from_utf8(shown.output().unwrap().stdout).unwrap()
        };
        wait_until("nothing to stay attached", link, |link| !link.contains("xdp"));
    }
}

/// On a cable on which checksums are left to interfaces that do not complete them.
#[test]
fn sessions_go_over_protocol_253_when_both_ends_say_so() {
    for (name, more) in [("sealed253", ""), ("clear253", "clear = true\n")] {
        let Some(site) = Site::new(name) else { return };
        site.namespaces.iter().for_each(|name| crate::site::ip(&format!("-n {name} link set lo up")));
        let by = |side, protocol| settings(side, &format!("{more}protocol = \"{protocol}\"\n"));
        let near = Packets::start_with(&site, 0, &by(0, "253"));
        wait_for_status(&near, "the path does not let IP protocol 253 through");
        let far = Packets::start_with(&site, 1, &by(1, "udp"));
        for (daemon, protocol) in [(&near, "253"), (&far, "udp")] {
            let said = format!("what comes does not come by protocol = \"{protocol}\"");
            wait_for_status(daemon, &said);
        }
        drop(far);
        let far = Packets::start_with(&site, 1, &by(1, "253"));
        for daemon in [&near, &far] {
            wait_for_words(daemon, "/healthz", "HTTP/1.1 200");
            wait_for_words(daemon, "/status", "\"protocol\":\"253\"");
        }
        let (from, to) = (udp(&site, 0), udp(&site, 1));
        let mut buffer = [0; 2048];
        for length in [1, 40, 1401, 1420] {
            for (from, to) in [(&from, &to), (&to, &from)] {
                let sent: Vec<_> = (0..length).map(|at: u32| at as u8).collect();
                from.send(&sent).unwrap();
                let got = to.recv(&mut buffer).unwrap();
                assert_eq!(buffer[..got], sent);
            }
        }
        let (done, said) = near.verb(&["swap", "test", "newest"]);
        assert!(done, "{said}");
        // It is what it was when it was opened.
        fs::write(site.path("packets0.toml"), by(0, "udp")).unwrap();
        let (done, said) = near.verb(&["reload"]);
        assert!(
            !done && said.contains("key, cipher, protocol and paths do not change while it runs"),
            "{said}"
        );
    }
}

/// A function that counts, in one of two versions.
fn put_tally(site: &Site, side: usize, version: usize) {
    let pool = site.path(&format!("pool{side}"));
    fs::create_dir_all(&pool).unwrap();
    let image = TALLIES[version - 1];
    let migrates = if version == 2 { "migrates = [1]\n" } else { "" };
    let manifest = format!(
        "abi = 3\nname = \"tally\"\nobject = \"tally.bpf.o\"\nsha256 = \"{}\"\nabout = \"counts\"\n\
         kernel = \"6.1\"\nstate-version = {version}\n{migrates}",
        millrace_graft::Identity::of(image)
    );
    fs::write(pool.join("tally.bpf.o"), image).unwrap();
    fs::write(pool.join("tally.toml"), manifest).unwrap();
}

#[test]
fn functions_come_in_other_versions_and_sessions_begin_anew() {
    let Some(site) = Site::new("versions") else { return };
    site.namespaces.iter().for_each(|name| crate::site::ip(&format!("-n {name} link set lo up")));
    let [near, far] = [0, 1].map(|side| {
        put_tally(&site, side, 1);
        let text = settings(side, "").replace("\"repair\"]", "\"repair\", \"tally\"]");
        Packets::start_with(&site, side, &format!("pool = [\"pool{side}\"]\n{text}"))
    });
    for daemon in [&near, &far] {
        wait_for_words(daemon, "/status", "\"has_keys\":true");
    }
    let (from, to) = (udp(&site, 0), udp(&site, 1));
    let passes = |number: u8| {
        let mut buffer = [0; 64];
        from.send(&[number; 40]).unwrap();
        assert_eq!(to.recv(&mut buffer).unwrap(), 40);
        assert_eq!(buffer[..40], [number; 40]);
    };
    passes(1);
    // The other end does not have it yet: all stays as it was, and is said.
    put_tally(&site, 0, 2);
    assert!(near.verb(&["reload"]).0);
    wait_for_words(&near, "/status", "the other end has no such list of the same functions");
    passes(2);
    put_tally(&site, 1, 2);
    assert!(far.verb(&["reload"]).0);
    for daemon in [&near, &far] {
        wait_for_status(daemon, "test: goes on with the state of tally");
    }
    passes(3);
    // As soon as nothing of the first version can be under way any more.
    let said = wait_for("the next change", || {
        let (done, said) = near.verb(&["swap", "--stateless", "test", "newest"]);
        done.then_some(said)
    });
    let words = "test: begun anew; lost of what was sent 0, of what was to come 0\n";
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
    // There is no way back with the state.
    let pool = site.path("pool0");
    let manifest = fs::read_to_string(pool.join("tally.toml")).unwrap();
    fs::write(pool.join("tally.toml"), manifest.replace("migrates = [1]\n", "")).unwrap();
    let (done, said) = near.verb(&["reload"]);
    assert!(!done && said.contains("`migrates` says from which state-version"), "{said}");
}
