//! Tests of the processes `millrace publish` and `millrace subscribe` as users see them: waiting, redirection, and
//! reconnecting.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod process;

use std::{
    fs,
    io::{BufRead as _, BufReader},
    net::UdpSocket,
    path::PathBuf,
    process::{Child, Command, Stdio},
};

use millrace_relay_daemon::status::Status;
use millrace_testkit::{show_log_on_panic, wait_until};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use process::{RunningRelay, millrace, wait_for};
use tempfile::TempDir;

/// A running client whose output goes to files.
struct FileClient {
    process: Child,
    said: PathBuf,
    _dir: TempDir,
}

impl FileClient {
    fn start(args: &[&str]) -> Self {
        let mut command = millrace();
        command.args(args);
        Self::from_command(command)
    }

    fn from_command(command: Command) -> Self {
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

    /// Returns the number of delivered objects in the latest line of statistics that the client has printed.
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

impl Drop for FileClient {
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
fn relay_port_that_is_closed_is_reported_at_once() {
    // The relay's port is taken by a socket that accepts packets only from its own peer, so a client never gets an
    // answer.
    let held = UdpSocket::bind("127.0.0.1:0").unwrap();
    held.connect("127.0.0.1:9").unwrap();
    let port = held.local_addr().unwrap().port();
    let url = format!("moqt://127.0.0.1:{port}");
    let mut subscriber = FileClient::start(&[&SUBSCRIBE[..], &[&url]].concat());
    assert_eq!(subscriber.exit_code(), Some(1));
    let said = subscriber.said();
    for part in [
        "connecting",
        &format!("127.0.0.1:{port}"),
        "no program listens on that UDP port; --reconnect keeps trying",
    ] {
        assert!(said.contains(part), "{part} is not in\n{said}");
    }
    // A publisher reconnects by default, so it does not end without a relay.
    let mut publisher = FileClient::start(&[&PUBLISH[..], &[&url]].concat());
    publisher.wait_for("no program listens on that UDP port; trying again in");
    publisher.signal(Signal::SIGTERM);
    assert_eq!(publisher.exit_code(), Some(0));
    let mut publisher = FileClient::start(&[&PUBLISH[..], &["--reconnect=false", &url]].concat());
    assert_eq!(publisher.exit_code(), Some(1));
}

#[test]
fn publisher_with_silent_input_ends_on_signal() {
    let relay = RunningRelay::start(tempfile::tempdir().unwrap(), &[]);
    let mut command = millrace();
    command.args(["publish", "--name=live", "--tls-disable-verify", &relay.url()]);
    // The input pipe stays open and never delivers a byte.
    let mut publisher = FileClient::with_input(command, Stdio::piped());
    publisher.wait_for("publishing");
    publisher.signal(Signal::SIGTERM);
    assert_eq!(publisher.exit_code(), Some(0));
}

/// The restarted relay sends a stateless reset. An idle timeout would take half a minute and name no reason.
#[test]
fn clients_reconnect_immediately_to_a_restarted_relay() {
    let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    let start = |listen: &str, dir: TempDir| {
        fs::write(dir.path().join("cert.pem"), made.cert.pem()).unwrap();
        fs::write(dir.path().join("key.pem"), made.signing_key.serialize_pem()).unwrap();
        let key = "--reset-key-file={dir}/reset.key";
        RunningRelay::start_on(listen, dir, &["--tls-cert={dir}/cert.pem", "--tls-key={dir}/key.pem", key])
    };
    let relay = start("127.0.0.1:0", tempfile::tempdir().unwrap());
    let listen = relay.listen().to_string();
    let url = relay.url();
    let secret = fs::read(relay.path("reset.key")).unwrap();
    let publisher = FileClient::start(&[&PUBLISH[..], &[&url]].concat());
    publisher.wait_for("publishing");
    let subscriber = FileClient::start(&[&SUBSCRIBE[..], &["--reconnect", &url]].concat());
    // After 150 objects the handshakes of publisher and subscriber with the relay are long over.
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
    // exact: the count of delivered objects may grow; the test then waits for 50 more objects
    let before = subscriber.delivered();
    wait_for("media again", || (subscriber.delivered() > before + 50).then_some(()));
}

#[test]
fn waiting_client_logs_likely_reason_and_can_be_interrupted() {
    let silent = UdpSocket::bind("127.0.0.1:0").unwrap();
    let url = format!("moqt://{}", silent.local_addr().unwrap());
    let mut subscriber = FileClient::start(&[&SUBSCRIBE[..], &[&url]].concat());
    subscriber.wait_for("no answer from the relay yet");
    assert!(!subscriber.said().contains("delivered"), "figures were printed without a connection");
    subscriber.signal(Signal::SIGINT);
    assert_eq!(subscriber.exit_code(), Some(0));
}

#[test]
fn leaving_client_is_logged_at_once_with_the_reason() {
    let relay = RunningRelay::start(tempfile::tempdir().unwrap(), &["--idle-timeout=600"]);
    let url = relay.url();
    let mut publisher = FileClient::start(&[&PUBLISH[..], &[&url]].concat());
    publisher.wait_for("publishing");
    let mut subscriber = FileClient::start(&[&SUBSCRIBE[..], &[&url]].concat());
    subscriber.wait_for(" delivered, ");
    for (client, signal, reason) in [
        (&mut subscriber, Signal::SIGINT, "the subscriber leaves"),
        (&mut publisher, Signal::SIGTERM, "the publisher leaves"),
    ] {
        client.signal(signal);
        assert_eq!(client.exit_code(), Some(0), "{}", client.said());
        wait_for(reason, || relay.logged(&["session ended", reason]).then_some(()));
    }
    wait_for("end of all sessions", || relay.status().sessions.is_empty().then_some(()));
}

#[test]
fn clients_reconnect_after_relay_restart() {
    let mut relay = RunningRelay::start(tempfile::tempdir().unwrap(), &["--drain-timeout=0.5"]);
    let url = relay.url();
    let listen = relay.listen().to_string();
    let publisher = FileClient::start(&[&PUBLISH[..], &[&url]].concat());
    publisher.wait_for("publishing");
    let subscriber = FileClient::start(&[&SUBSCRIBE[..], &["--reconnect", &url]].concat());
    subscriber.wait_for(" delivered, ");
    relay.signal(Signal::SIGTERM);
    assert_eq!(relay.exit_code(), Some(0));
    drop(relay);
    subscriber.wait_for("trying again");

    let relay = RunningRelay::start_on(&listen, tempfile::tempdir().unwrap(), &[]);
    wait_for("media through the new relay", || (relay.status().totals.data_plane.packets > 0).then_some(()));
    let before = subscriber.delivered();
    wait_for("counted objects", || (subscriber.delivered() > before).then_some(()));
}

/// The publisher is killed and started again while the subscriber keeps running.
#[test]
fn reconnecting_subscriber_waits_for_the_publisher() {
    let relay = RunningRelay::start(tempfile::tempdir().unwrap(), &["--linger=0"]);
    let url = relay.url();
    let mut publisher = FileClient::start(&[&PUBLISH[..], &[&url]].concat());
    publisher.wait_for("publishing");
    let patient = FileClient::start(&[&SUBSCRIBE[..], &["--reconnect", &url]].concat());
    let mut other = FileClient::start(&[&SUBSCRIBE[..], &[&url]].concat());
    patient.wait_for(" delivered, ");
    other.wait_for(" delivered, ");
    publisher.signal(Signal::SIGTERM);
    assert_eq!(publisher.exit_code(), Some(0));
    assert_eq!(other.exit_code(), Some(0));
    assert!(other.said().contains("ended early: the publisher is gone"), "{}", other.said());
    patient.wait_for("trying again");
    let publisher = FileClient::start(&[&PUBLISH[..], &[&url]].concat());
    publisher.wait_for("publishing");
    let before = patient.delivered();
    wait_for("objects of the new publisher", || (patient.delivered() > before).then_some(()));
}

/// Waits until publisher and subscriber have sessions with this relay, and the subscriber receives objects from it.
fn both_go_on(subscriber: &FileClient, relay: &RunningRelay) {
    wait_for("media through the new relay", || relay.status().totals.data_plane.packets > 0);
    let before = subscriber.delivered();
    wait_until("more objects", || subscriber.delivered(), |delivered| *delivered > before);
    wait_until("both", || relay.status().sessions.len(), |sessions| *sessions == 2);
}

#[test]
fn clients_move_to_goaway_uri_and_drain_ends() {
    let second = RunningRelay::start(tempfile::tempdir().unwrap(), &[]);
    let goaway = format!("--goaway-uri={}", second.url());
    let mut first = RunningRelay::start(tempfile::tempdir().unwrap(), &["--drain-timeout=600", &goaway]);
    let url = first.url();
    let publisher = FileClient::start(&[&PUBLISH[..], &["--reconnect=false", &url]].concat());
    publisher.wait_for("publishing");
    let subscriber = FileClient::start(&[&SUBSCRIBE[..], &[&url]].concat());
    subscriber.wait_for(" delivered, ");
    first.signal(Signal::SIGTERM);
    assert_eq!(first.exit_code(), Some(0));
    both_go_on(&subscriber, &second);
}

/// GOAWAY redirects publisher and subscriber to the same relay, and either of them may arrive there first.
#[test]
fn redirected_subscriber_waits_for_its_publisher() {
    let second = RunningRelay::start(tempfile::tempdir().unwrap(), &[]);
    let goaway = format!("--goaway-uri={}", second.url());
    let first = RunningRelay::start(tempfile::tempdir().unwrap(), &["--drain-timeout=600", &goaway]);
    let url = first.url();
    let publisher = FileClient::start(&[&PUBLISH[..], &["--reconnect=false", &url]].concat());
    publisher.wait_for("publishing");
    let subscriber = FileClient::start(&[&SUBSCRIBE[..], &[&url]].concat());
    subscriber.wait_for(" delivered, ");
    publisher.signal(Signal::SIGSTOP);
    first.signal(Signal::SIGTERM);
    subscriber.wait_for("the track's publisher may arrive later, trying again in");
    publisher.signal(Signal::SIGCONT);
    both_go_on(&subscriber, &second);
}

/// The host name in the relay's URL has two addresses, as behind a load balancer.
#[test]
fn clients_move_to_another_dns_address_after_goaway_without_uri() {
    if !nix::unistd::geteuid().is_root() {
        println!("SKIP clients_move_to_another_dns_address_after_goaway_without_uri: needs root, for a name");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let hosts = dir.path().join("hosts");
    fs::write(&hosts, "127.0.0.1 relay.test\n127.0.0.2 relay.test\n").unwrap();
    let mut first = RunningRelay::start(tempfile::tempdir().unwrap(), &["--drain-timeout=600"]);
    let port = first.listen().port();
    let second = RunningRelay::start_on(&format!("127.0.0.2:{port}"), tempfile::tempdir().unwrap(), &[]);
    let url = format!("moqt://relay.test:{port}");
    let mounted = format!("mount --bind {} /etc/hosts && exec \"$0\" \"$@\"", hosts.display());
    let start = |args: &[&str]| {
        let mut command = Command::new("unshare");
        command.args(["--mount", "sh", "-c", &mounted, env!("CARGO_BIN_EXE_millrace")]).args(args);
        FileClient::from_command(command)
    };
    let publisher = start(&[&PUBLISH[..], &["--reconnect=false", &url]].concat());
    publisher.wait_for("publishing");
    let subscriber = start(&[&SUBSCRIBE[..], &[&url]].concat());
    subscriber.wait_for(" delivered, ");
    // exact: media has passed from the publisher to the subscriber, so both sessions exist
    assert_eq!((first.status().sessions.len(), second.status().sessions.len()), (2, 0));
    first.signal(Signal::SIGTERM);
    assert_eq!(first.exit_code(), Some(0));
    both_go_on(&subscriber, &second);
}

#[test]
fn clients_go_on_at_the_next_relay_of_their_list_when_one_is_killed() {
    let relay = || RunningRelay::start(tempfile::tempdir().unwrap(), &[]);
    let first = relay();
    let second = relay();
    let listen = first.listen().to_string();
    let urls = format!("{},{}", first.url(), second.url());
    let publisher = FileClient::start(&[&PUBLISH[..], &[&urls]].concat());
    publisher.wait_for("publishing");
    let subscriber = FileClient::start(&[&SUBSCRIBE[..], &[&urls]].concat());
    // Twelve packets make a peer live, whose silence is noticed soon.
    wait_until("media", || subscriber.delivered(), |delivered| *delivered >= 100);
    // exact: the first relay has all sessions, since media has passed through it
    assert_eq!((first.status().sessions.len(), second.status().sessions.len()), (2, 0));
    first.signal(Signal::SIGKILL);
    both_go_on(&subscriber, &second);
    subscriber.wait_for("the relay does not answer: looking for another one");
    // The relay that comes back at the first address is the next one, when the second is gone.
    drop(first);
    let again = RunningRelay::start_on(&listen, tempfile::tempdir().unwrap(), &[]);
    second.signal(Signal::SIGKILL);
    both_go_on(&subscriber, &again);
}

/// Clients come back to the relay that GOAWAY has named, and to their list when it is gone.
#[test]
fn clients_return_to_the_relay_that_goaway_has_named_until_it_is_gone() {
    let start =
        |listen: &str, args: &[&str]| RunningRelay::start_on(listen, tempfile::tempdir().unwrap(), args);
    let named = start("127.0.0.1:0", &[]);
    let goaway = format!("--goaway-uri={}", named.url());
    let mut first = start("127.0.0.1:0", &["--drain-timeout=600", &goaway]);
    let last = start("127.0.0.1:0", &[]);
    let [first_url, named_url, last_url] = [&first, &named, &last].map(RunningRelay::url);
    drop(last);
    let urls = format!("{first_url},{last_url}");
    let publisher = FileClient::start(&[&PUBLISH[..], &[&urls]].concat());
    publisher.wait_for("publishing");
    let subscriber = FileClient::start(&[&SUBSCRIBE[..], &[&urls]].concat());
    subscriber.wait_for(" delivered, ");
    first.signal(Signal::SIGTERM);
    assert_eq!(first.exit_code(), Some(0));
    both_go_on(&subscriber, &named);

    let listen = |url: &str| url.replace("moqt://", "");
    drop(named);
    let named = start(&listen(&named_url), &[]);
    both_go_on(&subscriber, &named);

    let last = start(&listen(&last_url), &[]);
    drop(named);
    both_go_on(&subscriber, &last);
    subscriber.wait_for("back at one that was given");
}

/// The test kills each of two publishers of the same media in turn. The subscriber gets each object once.
#[test]
fn replica_goes_on_when_the_other_publisher_is_killed() {
    let relay = RunningRelay::start(tempfile::tempdir().unwrap(), &[]);
    let url = relay.url();
    let publish = || {
        let publisher =
            FileClient::start(&[&PUBLISH[..], &["--replica", "--objects-per-group=50", &url]].concat());
        publisher.wait_for("publishing");
        publisher
    };
    let both = || {
        let is_both = |status: &Status| status.tracks.first().is_some_and(|track| track.publishers == 2);
        wait_until("both publishers", || relay.status(), is_both);
    };
    let mut publishers = [publish(), publish()];
    let mut subscriber = FileClient::start(&[&SUBSCRIBE[..], &[&url]].concat());
    for round in 0..4 {
        both();
        let before = subscriber.delivered();
        wait_until("media", || subscriber.delivered(), |delivered| *delivered >= before + 120);
        publishers[round % 2].signal(Signal::SIGKILL);
        let before = subscriber.delivered();
        wait_until("media again", || subscriber.delivered(), |delivered| *delivered >= before + 120);
        publishers[round % 2] = publish();
    }
    subscriber.signal(Signal::SIGINT);
    assert_eq!(subscriber.exit_code(), Some(0));
    let said = subscriber.said();
    assert!(!said.contains("ended early"), "{said}");
    let last = said.lines().rev().find(|line| line.contains(" delivered, ")).unwrap();
    assert!(last.contains(" 0 lost in 0 gaps, 0 duplicates, 0 corrupted, 0 resets"), "{last}");
}

/// GOAWAY redirects to an address where no relay answers. Clients keep their sessions with the first relay until it
/// ends, and then reconnect.
#[test]
fn clients_keep_sessions_until_relay_end_if_goaway_uri_is_unreachable() {
    let mut relay = RunningRelay::start(tempfile::tempdir().unwrap(), &["--drain-timeout=600"]);
    let url = relay.url();
    let listen = relay.listen().to_string();
    let publisher = FileClient::start(&[&PUBLISH[..], &[&url]].concat());
    publisher.wait_for("publishing");
    let subscriber = FileClient::start(&[&SUBSCRIBE[..], &["--reconnect", &url]].concat());
    subscriber.wait_for(" delivered, ");
    relay.signal(Signal::SIGTERM);
    for client in [&publisher, &subscriber] {
        client.wait_for("staying with the peer that sent GOAWAY");
        assert!(!client.said().contains("the session ended"), "{}", client.said());
    }
    // Signals within a second count as one, so the signal is repeated until the relay has ended.
    let end = wait_for("the end of the relay", || {
        relay.signal(Signal::SIGTERM);
        relay.ended()
    });
    assert_eq!(end.code(), Some(1));
    drop(relay);
    let relay = RunningRelay::start_on(&listen, tempfile::tempdir().unwrap(), &[]);
    both_go_on(&subscriber, &relay);
}

#[test]
fn reader_that_closes_output_ends_subscriber() {
    let relay = RunningRelay::start(tempfile::tempdir().unwrap(), &[]);
    let url = relay.url();
    let publisher = FileClient::start(&[&PUBLISH[..], &[&url]].concat());
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
fn relay_is_trusted_by_file_or_fingerprint() {
    let relay = RunningRelay::start(tempfile::tempdir().unwrap(), &["--tls-self-signed-out={dir}/relay.pem"]);
    let port = relay.listen().port();
    let url = format!("moqt://localhost:{port}");
    let root = relay.path("relay.pem");
    let root = format!("--tls-root={}", root.display());
    let publish = ["publish", "--name=live", "--generate", "--rate-hz=50", "--reconnect=false", &url];
    let publisher = FileClient::start(&[&publish[..], &[&root]].concat());
    publisher.wait_for("publishing");
    let shown = relay.get("/certificate.sha256"); // exact: the certificate is made when the relay starts
    let subscribe = ["subscribe", "--name=live", "--track=objects", "--stats", &url];
    let by = |fingerprint: &str| {
        FileClient::start(&[&subscribe[..], &["--tls-fingerprint", fingerprint]].concat())
    };
    by(shown.trim()).wait_for(" delivered, ");
    let mut other = by(&"ab".repeat(32));
    assert_eq!(other.exit_code(), Some(1));
    assert!(
        other.said().contains(&format!(
            "its certificate has another fingerprint than --tls-fingerprint: {}",
            shown.trim()
        )),
        "{}",
        other.said()
    );
    // GOAWAY's URI leads to a server with another certificate, which the clients do not trust.
    let other = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    fs::write(relay.path("other.pem"), other.cert.pem()).unwrap();
    let other = format!("--tls-root={}", relay.path("other.pem").display());
    let mut nobody = FileClient::start(&[&subscribe[..], &[&other]].concat());
    assert_eq!(nobody.exit_code(), Some(1));
    assert!(nobody.said().contains(&format!("--tls-fingerprint {}", shown.trim())), "{}", nobody.said());
    drop(publisher);
}

#[test]
fn certificate_with_ca_true_is_explained_by_relay_and_client() {
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

    let relay = RunningRelay::start(dir, &["--tls-cert={dir}/cert.pem", "--tls-key={dir}/key.pem"]);
    wait_for("warning in the log", || relay.logged(&["WARN", "CA:TRUE"]).then_some(()));
    let url = format!("moqt://localhost:{}", relay.listen().port());
    let root = format!("--tls-root={}", relay.path("cert.pem").display());
    let mut subscriber = FileClient::start(&["subscribe", "--name=live", &root, &url]);
    assert_eq!(subscriber.exit_code(), Some(1));
    let said = subscriber.said();
    assert!(said.contains("CA:TRUE") && said.contains("basicConstraints=critical,CA:FALSE"), "{said}");
}

#[test]
fn missing_track_is_reported_with_existing_ones() {
    let relay = RunningRelay::start(tempfile::tempdir().unwrap(), &[]);
    let url = relay.url();
    let mut nothing =
        FileClient::start(&["subscribe", "--name=live", "--stats", "--tls-disable-verify", &url]);
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
            FileClient::start(&[&["subscribe", "--name=live", "--tls-disable-verify", &url], args].concat());
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

/// Publishes a live video, if ffmpeg is installed.
fn media(url: &str) -> Option<[FileClient; 1]> {
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
        println!("SKIP missing_track_is_reported_with_existing_ones: no ffmpeg");
        return None;
    };
    assert!(status.success());
    // Without --realtime the input is published as fast as it can be read. The log says so.
    let clip = clip.to_str().unwrap();
    let mut hasty = FileClient::start(&["publish", "--name=hasty", "--tls-disable-verify", url, clip]);
    assert_eq!(hasty.exit_code(), Some(0));
    assert!(hasty.said().contains("for input that is not live, use --realtime"), "{}", hasty.said());
    let publisher =
        FileClient::start(&["publish", "--name=live", "--realtime", "--tls-disable-verify", url, clip]);
    publisher.wait_for("publishing");
    Some([publisher])
}

#[test]
fn input_other_than_fragmented_mp4_is_refused_with_a_remedy() {
    let relay = RunningRelay::start(tempfile::tempdir().unwrap(), &[]);
    let url = relay.url();
    // This file is not fragmented MP4: mdat comes first, and the moov box would follow at the end, as in a camera's
    // recording that was cut off.
    let whole = b"\0\0\0\x10ftypisom\0\0\0\0\0\0\0\x10mdat01234567";
    fs::write(relay.path("whole.mp4"), whole).unwrap();
    fs::write(relay.path("empty.mp4"), "").unwrap();
    for (file, why) in [
        ("token", "the input is not MP4"),
        ("whole.mp4", "the MP4 is not fragmented"),
        ("empty.mp4", "there is no media in the input"),
    ] {
        let file = relay.path(file);
        let mut publisher = FileClient::start(&[
            "publish",
            "--name=live",
            "--tls-disable-verify",
            &url,
            file.to_str().unwrap(),
        ]);
        assert_eq!(publisher.exit_code(), Some(1));
        let said = publisher.said();
        assert!(said.contains(why) && said.contains("-movflags cmaf+separate_moof"), "{said}");
    }
}

#[test]
fn media_is_not_read_from_or_written_to_a_terminal() {
    let binary = env!("CARGO_BIN_EXE_millrace");
    for (command, why) in [("publish", "--generate"), ("subscribe", "| ffplay -")] {
        let line = format!("{binary} {command} --name live --tls-disable-verify moqt://127.0.0.1:1");
        let Ok(output) = Command::new("script").args(["-qec", &line, "/dev/null"]).output() else {
            println!("SKIP media_is_not_read_from_or_written_to_a_terminal: no script");
            return;
        };
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        assert_eq!(output.status.code(), Some(1), "{command}: {said}");
        assert!(said.contains(why) && !said.contains("connecting"), "{command}: {said}");
    }
}

#[test]
fn relay_reload_reads_settings_again() {
    let relay = RunningRelay::start(tempfile::tempdir().unwrap(), &[]);
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
    wait_for("settings read again", || relay.logged(&["the settings were read again"]).then_some(()));
    let traced = ask(&["trace", "--session=7", "--count=1"]);
    assert_eq!(traced.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&traced.stderr).contains("there is no session 7"), "{traced:?}");
}
