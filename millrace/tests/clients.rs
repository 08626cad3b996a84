//! What a user sees of `millrace publish` and `subscribe`: waiting, leaving, coming back. Real processes.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod process;

use std::{
    fs,
    io::{BufRead as _, BufReader},
    net::UdpSocket,
    path::PathBuf,
    process::{Child, Command, Stdio},
};

use millrace_testkit::{show_log_on_panic, wait_until};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use process::{Relay, millrace, wait_for};
use tempfile::TempDir;

/// A command that says something to a file.
struct Client {
    process: Child,
    said: PathBuf,
    _dir: TempDir,
}

impl Client {
    fn start(args: &[&str]) -> Self {
        let mut command = millrace();
        command.args(args);
        Self::of(command)
    }

    fn of(command: Command) -> Self {
        Self::with_input(command, Stdio::null())
    }

    fn with_input(mut command: Command, input: Stdio) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let said = dir.path().join("stderr");
        let stderr = fs::File::create(&said).unwrap();
        command.stdin(input).stdout(Stdio::null()).stderr(stderr);
        Self { process: command.spawn().unwrap(), said, _dir: dir }
    }

    fn said(&self) -> String {
        fs::read_to_string(&self.said).unwrap()
    }

    fn wait_for(&self, words: &str) {
        wait_for(words, || self.said().contains(words).then_some(()));
    }

    /// Objects, by the last of its figures.
    fn delivered(&self) -> u64 {
        let said = self.said();
        let last = said
            .lines()
            .rev()
            .find_map(|line| line.split_once(" delivered, ")?.0.rsplit(' ').next()?.parse().ok());
        last.unwrap_or_default()
    }

    fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.process.id().try_into().unwrap()), signal).unwrap();
    }

    fn exit_code(&mut self) -> Option<i32> {
        wait_for("end of the command", || self.process.try_wait().unwrap()).code()
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
        show_log_on_panic("a client", &self.said);
    }
}

const PUBLISH: [&str; 5] = ["publish", "--name=live", "--generate", "--rate-hz=50", "--tls-disable-verify"];
const SUBSCRIBE: [&str; 5] =
    ["subscribe", "--name=live", "--track=objects", "--stats", "--tls-disable-verify"];

#[test]
fn where_nobody_listens_is_said_at_once() {
    // Nobody else gets the port, and what comes from others than its peer comes to nobody.
    let held = UdpSocket::bind("127.0.0.1:0").unwrap();
    held.connect("127.0.0.1:9").unwrap();
    let port = held.local_addr().unwrap().port();
    let url = format!("moqt://127.0.0.1:{port}");
    let mut subscriber = Client::start(&[&SUBSCRIBE[..], &[&url]].concat());
    assert_eq!(subscriber.exit_code(), Some(1));
    let said = subscriber.said();
    for part in [
        "connecting",
        &format!("127.0.0.1:{port}"),
        "nobody listens on that UDP port; --reconnect goes on trying",
    ] {
        assert!(said.contains(part), "{part} is not in\n{said}");
    }
    // It would wait for the relay.
    let mut publisher = Client::start(&[&PUBLISH[..], &[&url]].concat());
    publisher.wait_for("nobody listens on that UDP port; trying again in");
    publisher.signal(Signal::SIGTERM);
    assert_eq!(publisher.exit_code(), Some(0));
    let mut publisher = Client::start(&[&PUBLISH[..], &["--reconnect=false", &url]].concat());
    assert_eq!(publisher.exit_code(), Some(1));
}

#[test]
fn publisher_whose_input_is_silent_ends_when_it_is_told_to() {
    let relay = Relay::start(tempfile::tempdir().unwrap(), &[]);
    let mut command = millrace();
    command.args(["publish", "--name=live", "--tls-disable-verify", &relay.url()]);
    // The pipe stays open without a byte.
    let mut publisher = Client::with_input(command, Stdio::piped());
    publisher.wait_for("publishing");
    publisher.signal(Signal::SIGTERM);
    assert_eq!(publisher.exit_code(), Some(0));
}

/// By the idle time-outs they would be back in half a minute, and would not say what has happened.
#[test]
fn relay_that_is_killed_and_comes_back_is_found_at_once() {
    let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    let start = |listen: &str, dir: TempDir| {
        fs::write(dir.path().join("cert.pem"), made.cert.pem()).unwrap();
        fs::write(dir.path().join("key.pem"), made.signing_key.serialize_pem()).unwrap();
        let key = "--reset-key-file={dir}/reset.key";
        Relay::start_on(listen, dir, &["--tls-cert={dir}/cert.pem", "--tls-key={dir}/key.pem", key])
    };
    let relay = start("127.0.0.1:0", tempfile::tempdir().unwrap());
    let (listen, url) = (relay.listen().to_string(), relay.url());
    let secret = fs::read(relay.path("reset.key")).unwrap();
    let publisher = Client::start(&[&PUBLISH[..], &[&url]].concat());
    publisher.wait_for("publishing");
    let subscriber = Client::start(&[&SUBSCRIBE[..], &["--reconnect", &url]].concat());
    // Long enough to be live.
    wait_for("media", || (subscriber.delivered() >= 150).then_some(()));
    relay.signal(Signal::SIGKILL);
    drop(relay);
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("reset.key"), secret).unwrap();
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o600);
    fs::set_permissions(dir.path().join("reset.key"), mode).unwrap();
    let _again = start(&listen, dir);
    for client in [&publisher, &subscriber] {
        client.wait_for("the relay was restarted");
    }
    let before = subscriber.delivered(); // exact: less or more, media go on from here
    wait_for("media again", || (subscriber.delivered() > before + 50).then_some(()));
}

#[test]
fn who_waits_says_what_may_be_wrong_and_can_be_interrupted() {
    let silent = UdpSocket::bind("127.0.0.1:0").unwrap();
    let url = format!("moqt://{}", silent.local_addr().unwrap());
    let mut subscriber = Client::start(&[&SUBSCRIBE[..], &[&url]].concat());
    subscriber.wait_for("no answer yet");
    assert!(!subscriber.said().contains("delivered"), "no figures of what is not connected");
    subscriber.signal(Signal::SIGINT);
    assert_eq!(subscriber.exit_code(), Some(0));
}

#[test]
fn who_leaves_is_gone_at_once_and_logged_with_the_reason() {
    let relay = Relay::start(tempfile::tempdir().unwrap(), &["--idle-timeout=600"]);
    let url = relay.url();
    let mut publisher = Client::start(&[&PUBLISH[..], &[&url]].concat());
    publisher.wait_for("publishing");
    let mut subscriber = Client::start(&[&SUBSCRIBE[..], &[&url]].concat());
    subscriber.wait_for(" delivered, ");
    for (client, signal, reason) in [
        (&mut subscriber, Signal::SIGINT, "the subscriber leaves"),
        (&mut publisher, Signal::SIGTERM, "the publisher leaves"),
    ] {
        client.signal(signal);
        assert_eq!(client.exit_code(), Some(0), "{}", client.said());
        wait_for(reason, || relay.logged(&["session over", reason]).then_some(()));
    }
    wait_for("end of all sessions", || relay.status().sessions.is_empty().then_some(()));
}

#[test]
fn both_come_back_after_the_relay_has_been_restarted() {
    let mut relay = Relay::start(tempfile::tempdir().unwrap(), &["--drain-timeout=0.5"]);
    let (url, listen) = (relay.url(), relay.listen().to_string());
    let publisher = Client::start(&[&PUBLISH[..], &[&url]].concat());
    publisher.wait_for("publishing");
    let subscriber = Client::start(&[&SUBSCRIBE[..], &["--reconnect", &url]].concat());
    subscriber.wait_for(" delivered, ");
    relay.signal(Signal::SIGTERM);
    assert_eq!(relay.exit_code(), Some(0));
    drop(relay);
    subscriber.wait_for("trying again");

    let relay = Relay::start_on(&listen, tempfile::tempdir().unwrap(), &[]);
    wait_for("media through the new relay", || (relay.status().totals.data_plane.packets > 0).then_some(()));
    let before = subscriber.delivered();
    wait_for("objects that are counted", || (subscriber.delivered() > before).then_some(()));
}

/// A publisher that is killed, and comes back.
#[test]
fn who_reconnects_waits_for_the_publisher_too() {
    let relay = Relay::start(tempfile::tempdir().unwrap(), &["--linger=0"]);
    let url = relay.url();
    let mut publisher = Client::start(&[&PUBLISH[..], &[&url]].concat());
    publisher.wait_for("publishing");
    let patient = Client::start(&[&SUBSCRIBE[..], &["--reconnect", &url]].concat());
    let mut other = Client::start(&[&SUBSCRIBE[..], &[&url]].concat());
    patient.wait_for(" delivered, ");
    other.wait_for(" delivered, ");
    publisher.signal(Signal::SIGTERM);
    assert_eq!(publisher.exit_code(), Some(0));
    assert_eq!(other.exit_code(), Some(0));
    assert!(other.said().contains("ended early: the publisher is gone"), "{}", other.said());
    patient.wait_for("trying again");
    let publisher = Client::start(&[&PUBLISH[..], &[&url]].concat());
    publisher.wait_for("publishing");
    let before = patient.delivered();
    wait_for("objects of the new publisher", || (patient.delivered() > before).then_some(()));
}

/// The publisher and the subscriber are at this relay now, and objects come from there.
fn both_go_on(subscriber: &Client, relay: &Relay) {
    wait_for("media through it", || relay.status().totals.data_plane.packets > 0);
    let before = subscriber.delivered();
    wait_until("more objects", || subscriber.delivered(), |delivered| *delivered > before);
    wait_until("both of them", || relay.status().sessions.len(), |sessions| *sessions == 2);
}

#[test]
fn both_go_on_where_goaway_says_and_the_drain_is_over_with_that() {
    let second = Relay::start(tempfile::tempdir().unwrap(), &[]);
    let goaway = format!("--goaway-uri={}", second.url());
    let mut first = Relay::start(tempfile::tempdir().unwrap(), &["--drain-timeout=600", &goaway]);
    let url = first.url();
    let publisher = Client::start(&[&PUBLISH[..], &["--reconnect=false", &url]].concat());
    publisher.wait_for("publishing");
    let subscriber = Client::start(&[&SUBSCRIBE[..], &[&url]].concat());
    subscriber.wait_for(" delivered, ");
    first.signal(Signal::SIGTERM);
    assert_eq!(first.exit_code(), Some(0));
    both_go_on(&subscriber, &second);
}

/// Both are sent to the same relay, and nobody says who gets there first.
#[test]
fn a_subscriber_that_goaway_sends_ahead_of_its_publisher_waits_for_it() {
    let second = Relay::start(tempfile::tempdir().unwrap(), &[]);
    let goaway = format!("--goaway-uri={}", second.url());
    let first = Relay::start(tempfile::tempdir().unwrap(), &["--drain-timeout=600", &goaway]);
    let url = first.url();
    let publisher = Client::start(&[&PUBLISH[..], &["--reconnect=false", &url]].concat());
    publisher.wait_for("publishing");
    let subscriber = Client::start(&[&SUBSCRIBE[..], &[&url]].concat());
    subscriber.wait_for(" delivered, ");
    publisher.signal(Signal::SIGSTOP);
    first.signal(Signal::SIGTERM);
    subscriber.wait_for("its publisher may still be on the way, trying again in");
    publisher.signal(Signal::SIGCONT);
    both_go_on(&subscriber, &second);
}

/// As behind a load balancer: a name with two addresses.
#[test]
fn without_a_uri_both_go_on_with_whoever_answers_under_the_name() {
    if !nix::unistd::geteuid().is_root() {
        println!("SKIP without_a_uri_both_go_on_with_whoever_answers_under_the_name: needs root, for a name");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let hosts = dir.path().join("hosts");
    fs::write(&hosts, "127.0.0.1 relay.test\n127.0.0.2 relay.test\n").unwrap();
    let mut first = Relay::start(tempfile::tempdir().unwrap(), &["--drain-timeout=600"]);
    let port = first.listen().port();
    let second = Relay::start_on(&format!("127.0.0.2:{port}"), tempfile::tempdir().unwrap(), &[]);
    let url = format!("moqt://relay.test:{port}");
    let mounted = format!("mount --bind {} /etc/hosts && exec \"$0\" \"$@\"", hosts.display());
    let start = |args: &[&str]| {
        let mut command = Command::new("unshare");
        command.args(["--mount", "sh", "-c", &mounted, env!("CARGO_BIN_EXE_millrace")]).args(args);
        Client::of(command)
    };
    let publisher = start(&[&PUBLISH[..], &["--reconnect=false", &url]].concat());
    publisher.wait_for("publishing");
    let subscriber = start(&[&SUBSCRIBE[..], &[&url]].concat());
    subscriber.wait_for(" delivered, ");
    // exact: media has come all the way
    assert_eq!((first.status().sessions.len(), second.status().sessions.len()), (2, 0));
    first.signal(Signal::SIGTERM);
    assert_eq!(first.exit_code(), Some(0));
    both_go_on(&subscriber, &second);
}

/// Nobody else answers at that address: they are served to the end, and then they come back.
#[test]
fn both_stay_where_goaway_says_nothing_and_come_back() {
    let mut relay = Relay::start(tempfile::tempdir().unwrap(), &["--drain-timeout=600"]);
    let (url, listen) = (relay.url(), relay.listen().to_string());
    let publisher = Client::start(&[&PUBLISH[..], &[&url]].concat());
    publisher.wait_for("publishing");
    let subscriber = Client::start(&[&SUBSCRIBE[..], &["--reconnect", &url]].concat());
    subscriber.wait_for(" delivered, ");
    relay.signal(Signal::SIGTERM);
    for client in [&publisher, &subscriber] {
        client.wait_for("still with the peer that is going away");
        assert!(!client.said().contains("the session ended"), "{}", client.said());
    }
    // For a second it is the same wish.
    let end = wait_for("the end of the relay", || {
        relay.signal(Signal::SIGTERM);
        relay.ended()
    });
    assert_eq!(end.code(), Some(1));
    drop(relay);
    let relay = Relay::start_on(&listen, tempfile::tempdir().unwrap(), &[]);
    both_go_on(&subscriber, &relay);
}

#[test]
fn who_has_read_enough_ends_it() {
    let relay = Relay::start(tempfile::tempdir().unwrap(), &[]);
    let url = relay.url();
    let publisher = Client::start(&[&PUBLISH[..], &[&url]].concat());
    publisher.wait_for("publishing");
    let mut subscriber =
        millrace().args(SUBSCRIBE).arg(&url).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(subscriber.stderr.take().unwrap()).read_line(&mut line).unwrap();
    assert!(line.contains("connecting"), "{line}");
    let status = wait_for("end of the subscriber", || subscriber.try_wait().unwrap());
    assert_eq!(status.code(), Some(0));
}

#[test]
fn a_relay_is_trusted_by_its_file_or_by_its_fingerprint() {
    let relay = Relay::start(tempfile::tempdir().unwrap(), &["--tls-self-signed-out={dir}/relay.pem"]);
    let port = relay.listen().port();
    let (url, root) = (format!("moqt://localhost:{port}"), relay.path("relay.pem"));
    let root = format!("--tls-root={}", root.display());
    let publish = ["publish", "--name=live", "--generate", "--rate-hz=50", "--reconnect=false", &url];
    let publisher = Client::start(&[&publish[..], &[&root]].concat());
    publisher.wait_for("publishing");
    let shown = relay.get("/certificate.sha256"); // exact: fixed at start-up
    let subscribe = ["subscribe", "--name=live", "--track=objects", "--stats", &url];
    let by =
        |fingerprint: &str| Client::start(&[&subscribe[..], &["--tls-fingerprint", fingerprint]].concat());
    by(shown.trim()).wait_for(" delivered, ");
    let mut other = by(&"ab".repeat(32));
    assert_eq!(other.exit_code(), Some(1));
    assert!(
        other
            .said()
            .contains(&format!("another certificate than that of --tls-fingerprint: {}", shown.trim())),
        "{}",
        other.said()
    );
    // It leads to nobody who is trusted.
    let other = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    fs::write(relay.path("other.pem"), other.cert.pem()).unwrap();
    let other = format!("--tls-root={}", relay.path("other.pem").display());
    let mut nobody = Client::start(&[&subscribe[..], &[&other]].concat());
    assert_eq!(nobody.exit_code(), Some(1));
    assert!(nobody.said().contains(&format!("--tls-fingerprint {}", shown.trim())), "{}", nobody.said());
    drop(publisher);
}

#[test]
fn the_certificate_of_an_authority_is_explained_before_and_after() {
    let dir = tempfile::tempdir().unwrap();
    let mut params = rcgen::CertificateParams::new(vec!["localhost".to_owned()]).unwrap();
    params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    let key = rcgen::KeyPair::generate().unwrap();
    fs::write(dir.path().join("cert.pem"), params.self_signed(&key).unwrap().pem()).unwrap();
    fs::write(dir.path().join("key.pem"), key.serialize_pem()).unwrap();
    let files = ["cert", "key"]
        .map(|name| format!("--tls-{name}={}", dir.path().join(format!("{name}.pem")).display()));
    let checked = millrace().args(["relay", "--check"]).args(&files).output().unwrap();
    let said = String::from_utf8(checked.stdout).unwrap();
    assert!(
        checked.status.success() && said.contains("CA:TRUE") && said.contains("basicConstraints"),
        "{said}"
    );

    let relay = Relay::start(dir, &["--tls-cert={dir}/cert.pem", "--tls-key={dir}/key.pem"]);
    wait_for("warning in the log", || relay.logged(&["WARN", "CA:TRUE"]).then_some(()));
    let url = format!("moqt://localhost:{}", relay.listen().port());
    let root = format!("--tls-root={}", relay.path("cert.pem").display());
    let mut subscriber = Client::start(&["subscribe", "--name=live", &root, &url]);
    assert_eq!(subscriber.exit_code(), Some(1));
    let said = subscriber.said();
    assert!(said.contains("CA:TRUE") && said.contains("basicConstraints=critical,CA:FALSE"), "{said}");
}

#[test]
fn a_track_that_is_not_there_is_named_and_so_are_those_that_are() {
    let relay = Relay::start(tempfile::tempdir().unwrap(), &[]);
    let url = relay.url();
    let mut nothing = Client::start(&["subscribe", "--name=live", "--stats", "--tls-disable-verify", &url]);
    assert_eq!(nothing.exit_code(), Some(1));
    let said = nothing.said();
    for part in [
        "track=\"objects\"",
        "no track objects: the peer refused: ",
        "the broadcast may not be published yet",
    ] {
        assert!(said.contains(part), "{part} is not in\n{said}");
    }

    let Some(_publisher) = media(&url) else { return };
    let asked = |args: &[&str]| {
        let mut subscriber =
            Client::start(&[&["subscribe", "--name=live", "--tls-disable-verify", &url], args].concat());
        (subscriber.exit_code(), subscriber.said())
    };
    let (code, said) = asked(&["--stats"]);
    assert_eq!(code, Some(1));
    assert!(
        said.contains("the broadcast has 1.m4s (name one with --track, or take them with --catalog)"),
        "{said}"
    );
    let (code, said) = asked(&["--track=video"]);
    assert_eq!(code, Some(1));
    assert!(
        said.contains("no track video: ") && said.contains("the broadcast has 1.m4s (name one"),
        "{said}"
    );
    let (code, said) = asked(&["--stats", "--catalog", "--count=1"]);
    assert_eq!((code, said.contains("track=\"1.m4s\"")), (Some(0), true), "{said}");
}

/// A live video as a broadcast, if there is an ffmpeg.
fn media(url: &str) -> Option<[Client; 1]> {
    let dir = tempfile::tempdir().unwrap();
    let clip = dir.path().join("clip.mp4");
    let made = Command::new("ffmpeg")
        .args(["-loglevel", "error", "-f", "lavfi", "-i", "testsrc2=size=160x90:rate=10", "-t", "120"])
        .args([
            "-c:v",
            "libx264",
            "-preset",
            "ultrafast",
            "-pix_fmt",
            "yuv420p",
            "-g",
            "10",
            "-f",
            "mp4",
            "-movflags",
        ])
        .args(["cmaf+separate_moof+delay_moov+skip_trailer+frag_every_frame", clip.to_str().unwrap()])
        .status();
    let Ok(status) = made else {
        println!("SKIP a_track_that_is_not_there_is_named_and_so_are_those_that_are: no ffmpeg");
        return None;
    };
    assert!(status.success());
    // Not live, and not at its own pace: that is over at once, and said.
    let clip = clip.to_str().unwrap();
    let mut hasty = Client::start(&["publish", "--name=hasty", "--tls-disable-verify", url, clip]);
    assert_eq!(hasty.exit_code(), Some(0));
    assert!(hasty.said().contains("for input that is not live there is --realtime"), "{}", hasty.said());
    let publisher =
        Client::start(&["publish", "--name=live", "--realtime", "--tls-disable-verify", url, clip]);
    publisher.wait_for("publishing");
    Some([publisher])
}

#[test]
fn what_is_no_fragmented_mp4_is_refused_with_what_makes_it() {
    let relay = Relay::start(tempfile::tempdir().unwrap(), &[]);
    let url = relay.url();
    // As a camera writes it: what there is comes at the end, if at all.
    let whole = b"\0\0\0\x10ftypisom\0\0\0\0\0\0\0\x10mdat01234567";
    fs::write(relay.path("whole.mp4"), whole).unwrap();
    fs::write(relay.path("empty.mp4"), "").unwrap();
    for (file, why) in [
        ("token", "the input is not MP4"),
        ("whole.mp4", "the MP4 is not fragmented"),
        ("empty.mp4", "there is no media in the input"),
    ] {
        let file = relay.path(file);
        let mut publisher =
            Client::start(&["publish", "--name=live", "--tls-disable-verify", &url, file.to_str().unwrap()]);
        assert_eq!(publisher.exit_code(), Some(1));
        let said = publisher.said();
        assert!(said.contains(why) && said.contains("-movflags cmaf+separate_moof"), "{said}");
    }
}

#[test]
fn media_is_neither_read_from_a_terminal_nor_written_to_one() {
    let binary = env!("CARGO_BIN_EXE_millrace");
    for (command, why) in [("publish", "--generate"), ("subscribe", "| ffplay -")] {
        let line = format!("{binary} {command} --name live --tls-disable-verify moqt://127.0.0.1:1");
        let Ok(output) = Command::new("script").args(["-qec", &line, "/dev/null"]).output() else {
            println!("SKIP media_is_neither_read_from_a_terminal_nor_written_to_one: no script");
            return;
        };
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        assert_eq!(output.status.code(), Some(1), "{command}: {said}");
        assert!(said.contains(why) && !said.contains("connecting"), "{command}: {said}");
    }
}

#[test]
fn a_relay_reads_its_settings_again_when_it_is_told() {
    let relay = Relay::start(tempfile::tempdir().unwrap(), &[]);
    let ask = |args: &[&str]| {
        let http = relay.http.to_string();
        let token = relay.path("token");
        millrace().args(args).args(["--http", &http, "--http-token-file"]).arg(token).output().unwrap()
    };
    let told = ask(&["relay", "reload"]);
    assert!(
        String::from_utf8_lossy(&told.stdout).starts_with(&format!("process {} reads", relay.pid())),
        "{told:?}"
    );
    wait_for("settings read again", || relay.logged(&["settings read again"]).then_some(()));
    let traced = ask(&["trace", "--session=7", "--count=1"]);
    assert_eq!(traced.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&traced.stderr).contains("there is no session 7"), "{traced:?}");
}
