//! Tests of a relay process that is replaced by its successor, with sessions at both of them.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

#[allow(dead_code)]
#[path = "relay/peer.rs"]
mod peer;
mod process;
#[path = "support/site.rs"]
mod site;

use std::{
    fs,
    os::unix::net::UnixDatagram,
    path::Path,
    process::{Command, Output},
    time::{Duration, Instant},
};

use millrace_client::session::Error;
use millrace_moq::{Message, Namespace, Parameters, message::PublishNamespace};
use millrace_testkit::{async_wait_for, wait_until};
use nix::{
    sys::{
        signal::{Signal, kill},
        stat::Mode,
    },
    unistd::{Pid, mkfifo},
};
use peer::{PeerStreamEnd, TestPeer, header, track};
use process::{RunningRelay, millrace, wait_for};

/// A relay, and the processes that have replaced it.
struct UpgradedRelay {
    relay: RunningRelay,
    successors: Vec<u32>,
    url: url::Url,
}

fn write_pair(dir: &Path) {
    let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    fs::write(dir.join("key.pem"), made.signing_key.serialize_pem()).unwrap();
    fs::write(dir.join("cert.pem"), made.cert.pem()).unwrap();
}

fn kill_process(pid: u32) {
    let _ = kill(Pid::from_raw(pid.try_into().unwrap()), Signal::SIGKILL); // fails if it has ended already
}

impl UpgradedRelay {
    /// Starts a relay. A `{drain}` of seconds is the time that sessions have to leave.
    fn start(drain: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        write_pair(dir.path());
        let settings = format!("listen = [\"127.0.0.1:0\"]\ndrain-timeout = \"{drain}\"\ngate = \"off\"\n");
        let secret =
            "reset-key-file = \"{dir}/reset\"\ntls-cert = \"{dir}/cert.pem\"\ntls-key = \"{dir}/key.pem\"\n";
        let secret = secret.replace("{dir}", dir.path().to_str().unwrap());
        fs::write(dir.path().join("relay.toml"), settings + &secret).unwrap();
        let relay = RunningRelay::start_by_file(dir, &[]);
        let url = relay.url().parse().unwrap();
        Self { relay, successors: Vec::new(), url }
    }

    fn ask_upgrade(&self) -> Command {
        let mut command = millrace();
        let token = self.relay.path("token");
        command.args(["relay", "upgrade"]).arg(format!("--http={}", self.relay.http));
        command.arg(format!("--http-token-file={}", token.display()));
        command
    }

    /// Upgrades the relay, and returns the process ID of the successor.
    fn upgrade(&mut self) -> u32 {
        let before = self.pid();
        let output = self.ask_upgrade().output().unwrap();
        assert!(output.status.success(), "{}", text(&output));
        let pid = self.pid();
        assert!(pid != before && text(&output).contains(&format!("process {pid} serves new clients")));
        self.successors.push(pid);
        pid
    }

    fn refuse_upgrade(&self) -> String {
        let before = self.pid();
        let output = self.ask_upgrade().output().unwrap();
        assert!(!output.status.success(), "{}", text(&output));
        assert_eq!(self.pid(), before);
        text(&output)
    }

    /// Returns the ID of the process that serves HTTP, and new clients.
    fn pid(&self) -> u32 {
        self.relay.status().pid // exact: a command that has ended has changed it
    }

    async fn peer(&self) -> TestPeer {
        TestPeer::connect(self.url.clone()).await
    }
}

impl Drop for UpgradedRelay {
    fn drop(&mut self) {
        self.successors.iter().for_each(|pid| kill_process(*pid));
    }
}

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&[&output.stdout[..], &output.stderr[..]].concat()).into_owned()
}

async fn publish(publisher: &TestPeer, group: u64) {
    let mut subgroup = publisher.subgroup(header(ALIAS, group)).await;
    for id in 0..3 {
        subgroup.object(id, 700).await;
    }
    subgroup.finish();
}

const ALIAS: u64 = 1;

async fn expect_group(viewer: &mut TestPeer, group: u64) {
    let received = viewer.next_subgroup().await;
    assert_eq!((received.header.group, received.all().await), (group, (vec![0, 1, 2], PeerStreamEnd::Fin)));
}

/// Subscribes as soon as somebody publishes the track.
async fn subscribe(viewer: &TestPeer) -> millrace_client::session::SessionRequest {
    let waiting = Parameters { rendezvous_timeout: Some(60_000), ..Parameters::default() };
    viewer.try_subscribe(&track("live", "video"), waiting).await.unwrap().0
}

/// A publisher at the relay, whose subscription by the relay is accepted, and a viewer.
async fn broadcast(
    relay: &UpgradedRelay,
) -> (TestPeer, Vec<millrace_client::session::SessionRequest>, TestPeer) {
    let mut publisher = relay.peer().await;
    let namespace = publisher.publish_namespace("live").await;
    let viewer = relay.peer().await;
    let name = track("live", "video");
    let (subscribed, (upstream, _)) =
        tokio::join!(subscribe(&viewer), publisher.accept_subscribe(&name, ALIAS));
    (publisher, vec![subscribed, namespace, upstream], viewer)
}

#[tokio::test(flavor = "multi_thread")]
async fn clients_that_ignore_goaway_lose_nothing_until_the_drain_is_over() {
    let mut relay = UpgradedRelay::start("4s");
    let (publisher, _requests, mut viewer) = broadcast(&relay).await;
    publish(&publisher, 0).await;
    expect_group(&mut viewer, 0).await;
    let began = Instant::now();
    relay.upgrade();
    async_wait_for("GOAWAY", || viewer.session.goaway().borrow().clone()).await;
    // The new viewer is at the successor, which gets the media from the old process.
    let mut newcomer = relay.peer().await;
    let _subscribed = subscribe(&newcomer).await;
    expect_group(&mut newcomer, 0).await;
    for group in 1..50 {
        publish(&publisher, group).await;
        expect_group(&mut viewer, group).await;
        expect_group(&mut newcomer, group).await;
    }
    viewer.expect_no_stream().await;
    newcomer.expect_no_stream().await;
    let ended = viewer.ended().await;
    assert!(matches!(ended, Error::Closed(quinn::ConnectionError::ApplicationClosed(_))), "{ended:?}");
    assert!(began.elapsed() > Duration::from_secs(3), "the drain timeout ends the session");
    assert_eq!(tokio::task::block_in_place(|| relay.relay.exit_code()), Some(0));
    drop(newcomer);
}

#[tokio::test(flavor = "multi_thread")]
async fn viewers_at_both_processes_get_media_of_a_publisher_that_moves() {
    let mut relay = UpgradedRelay::start("60s");
    let (publisher, mut requests, mut viewer) = broadcast(&relay).await;
    publish(&publisher, 0).await;
    expect_group(&mut viewer, 0).await;
    relay.upgrade();
    let mut newcomer = relay.peer().await;
    let _subscribed = subscribe(&newcomer).await;
    expect_group(&mut newcomer, 0).await;
    publish(&publisher, 1).await;
    expect_group(&mut viewer, 1).await;
    expect_group(&mut newcomer, 1).await;
    // The publisher is at both processes for a while, as after any GOAWAY.
    let mut moved = relay.peer().await;
    let _namespace = moved.publish_namespace("live").await;
    let (_upstream, _) = moved.accept_subscribe(&track("live", "video"), ALIAS).await;
    for publisher in [&publisher, &moved] {
        publish(publisher, 2).await;
    }
    expect_group(&mut viewer, 2).await;
    expect_group(&mut newcomer, 2).await;
    requests.truncate(1); // what remains is the viewer's subscription
    publisher.session.close(millrace_moq::code::Session::NO_ERROR, "moved");
    let is_linked = |status: &millrace_relay_daemon::status::Status| status.tracks[0].subscribers == 2;
    wait_until("the old process's subscription", || relay.relay.status(), is_linked);
    for group in 3..20 {
        publish(&moved, group).await;
        expect_group(&mut viewer, group).await;
        expect_group(&mut newcomer, group).await;
    }
    viewer.expect_no_stream().await;
    newcomer.expect_no_stream().await;
    // The successor gets the track from its publisher alone.
    let is_alone = |status: &millrace_relay_daemon::status::Status| status.tracks[0].publishers == 1;
    wait_until("one publisher", || relay.relay.status(), is_alone);
}

#[tokio::test(flavor = "multi_thread")]
async fn successor_that_cannot_start_changes_nothing_and_its_reason_is_printed() {
    let mut relay = UpgradedRelay::start("60s");
    let (publisher, _requests, mut viewer) = broadcast(&relay).await;
    let settings = fs::read_to_string(relay.relay.path("relay.toml")).unwrap();
    let broken = [
        (settings.clone() + "listne = 7\n", "listne"),
        (settings.replace("cert.pem", "gone.pem"), "gone.pem"),
        (settings.replace("127.0.0.1:0", "127.0.0.1:1"), "an upgrade cannot change that"),
        (
            settings
                .replace("\"off\"", "\"on\"")
                .replace("gate", "interface = [\"nowhere\"]\nengine = \"kernel\"\ngate"),
            "engine kernel cannot run",
        ),
    ];
    for (text, reason) in broken {
        fs::write(relay.relay.path("relay.toml"), text).unwrap();
        let said = relay.refuse_upgrade();
        assert!(
            said.contains("goes on, since its successor cannot take over") && said.contains(reason),
            "{said}"
        );
    }
    // The successor is killed before it is ready: it waits for its settings.
    fs::remove_file(relay.relay.path("relay.toml")).unwrap();
    mkfifo(&relay.relay.path("relay.toml"), Mode::S_IRWXU).unwrap();
    let asked = relay
        .ask_upgrade()
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    // exact: the process ID stays the same
    let children = format!("/proc/{0}/task", relay.relay.pid());
    let child = || {
        let tasks = fs::read_dir(&children).unwrap().map(|task| task.unwrap().path().join("children"));
        let mut all = tasks.map(|task| fs::read_to_string(task).unwrap_or_default());
        all.find_map(|children| children.split_whitespace().next()?.parse::<u32>().ok())
    };
    kill_process(wait_for("the successor", child));
    let said = text(&asked.wait_with_output().unwrap());
    assert!(said.contains("it has ended"), "{said}");
    // Nothing has changed, and with its settings back the relay is upgraded.
    assert!(viewer.session.goaway().borrow().is_none());
    publish(&publisher, 0).await;
    expect_group(&mut viewer, 0).await;
    fs::remove_file(relay.relay.path("relay.toml")).unwrap();
    fs::write(relay.relay.path("relay.toml"), settings).unwrap();
    relay.upgrade();
}

#[tokio::test(flavor = "multi_thread")]
async fn clients_of_a_killed_old_process_are_reset_and_served_by_the_successor() {
    let mut relay = UpgradedRelay::start("60s");
    let (publisher, _requests, mut viewer) = broadcast(&relay).await;
    publish(&publisher, 0).await;
    expect_group(&mut viewer, 0).await;
    relay.upgrade();
    kill_process(relay.relay.pid());
    relay.relay.exit_code();
    let _ = publisher.session.request(namespace_request(&publisher)).await; // any packet of the client is answered by a reset
    let ended = publisher.ended().await;
    assert!(matches!(ended, Error::Closed(quinn::ConnectionError::Reset)), "{ended:?}");
    let (publisher, _requests, mut viewer) = broadcast(&relay).await;
    publish(&publisher, 0).await;
    expect_group(&mut viewer, 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn old_process_serves_again_when_its_successor_is_killed() {
    let mut relay = UpgradedRelay::start("60s");
    let (publisher, _requests, mut viewer) = broadcast(&relay).await;
    let old = relay.pid();
    let successor = relay.upgrade();
    let newcomer = relay.peer().await;
    kill_process(successor);
    wait_for("the old process", || (relay.relay.health() == Some(200) && relay.pid() == old).then_some(()));
    publish(&publisher, 0).await;
    expect_group(&mut viewer, 0).await;
    let _ = newcomer.session.request(namespace_request(&newcomer)).await;
    let ended = newcomer.ended().await;
    assert!(matches!(ended, Error::Closed(quinn::ConnectionError::Reset)), "{ended:?}");
    let mut newcomer = relay.peer().await;
    let _subscribed = subscribe(&newcomer).await;
    expect_group(&mut newcomer, 0).await;
    publish(&publisher, 1).await;
    expect_group(&mut newcomer, 1).await;
    relay.upgrade();
}

fn namespace_request(peer: &TestPeer) -> PublishNamespace {
    let namespace = Namespace::from_path("other").unwrap();
    PublishNamespace {
        request_id: peer.session.next_request_id(),
        namespace,
        parameters: Parameters::default(),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn successor_is_upgraded_in_its_turn_once_its_predecessor_has_ended() {
    let mut relay = UpgradedRelay::start("60s");
    let first = relay.peer().await;
    relay.upgrade();
    let said = relay.refuse_upgrade();
    assert!(said.contains("the process before this one still serves clients"), "{said}");
    let second = relay.peer().await;
    first.session.close(millrace_moq::code::Session::NO_ERROR, "");
    assert_eq!(tokio::task::block_in_place(|| relay.relay.exit_code()), Some(0));
    relay.upgrade();
    let third = relay.peer().await;
    for peer in [&second, &third] {
        let mut request = peer.session.request(namespace_request(peer)).await.unwrap();
        let answer = peer::patiently(request.answer()).await;
        // The second client's process drains, so it refuses new requests.
        assert_eq!(matches!(answer, Ok(Message::RequestOk(_))), std::ptr::eq(peer, &third), "{answer:?}");
    }
}

#[test]
fn service_manager_is_told_the_successors_process_id() {
    let dir = tempfile::tempdir().unwrap();
    write_pair(dir.path());
    let manager = UnixDatagram::bind(dir.path().join("notify")).unwrap();
    let told = || {
        let mut text = [0; 200];
        let bytes = manager.recv(&mut text).unwrap();
        String::from_utf8_lossy(&text[..bytes]).into_owned()
    };
    let at = |name: &str| dir.path().join(name).display().to_string();
    let mut relay = millrace()
        .args(["relay", "--listen=127.0.0.1:0", "--http=off", "--gate=off", "--drain-timeout=1s"])
        .args([format!("--tls-cert={}", at("cert.pem")), format!("--tls-key={}", at("key.pem"))])
        .env("NOTIFY_SOCKET", dir.path().join("notify"))
        .stderr(std::process::Stdio::null())
        .spawn()
        .unwrap();
    let signal = |pid: u32, signal| kill(Pid::from_raw(pid.try_into().unwrap()), signal).unwrap();
    assert_eq!(told(), "READY=1");
    signal(relay.id(), Signal::SIGUSR2);
    assert!(told().starts_with("RELOADING=1\nMONOTONIC_USEC="));
    // The successor's own message may come first.
    let both = [told(), told()];
    let main = both.iter().find_map(|one| one.strip_prefix("MAINPID=")).unwrap();
    assert!(both.contains(&"READY=1".to_owned()), "{both:?}");
    let successor = main.strip_suffix("\nREADY=1").unwrap().parse().unwrap();
    assert!(relay.wait().unwrap().success(), "without clients the old process ends");
    signal(successor, Signal::SIGTERM);
    assert_eq!(told(), "STOPPING=1");
}
