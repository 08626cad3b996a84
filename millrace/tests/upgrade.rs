//! Tests of a relay process that is replaced by its successor, with sessions at both of them.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

#[allow(dead_code)]
#[path = "relay/peer.rs"]
mod peer;
mod process;
#[path = "support/site.rs"]
mod site;

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    os::unix::net::UnixDatagram,
    path::Path,
    process::{Child, Command, Output, Stdio},
    thread,
    time::{Duration, Instant},
};

use millrace_client::session::{Error, SessionRequest};
use millrace_lab::lab::{Lab, LabNode, Topology};
use millrace_moq::{Message, Namespace, Parameters, Properties, message::PublishNamespace};
use millrace_relay_daemon::status::Status;
use millrace_testkit::{async_wait_for, show_log_on_panic, wait_until};
use nix::{
    sys::{
        signal::{Signal, kill},
        stat::Mode,
    },
    unistd::{Pid, mkfifo},
};
use peer::{PeerStreamEnd, TestPeer, at, header, track};
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
    /// Starts a relay.
    fn start(drain: &str) -> Self {
        Self::start_with(drain, "")
    }

    /// Starts a relay with further settings.
    fn start_with(drain: &str, further: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        write_pair(dir.path());
        let settings = format!("listen = [\"127.0.0.1:0\"]\ndrain-timeout = \"{drain}\"\ngate = \"off\"\n");
        let secret =
            "reset-key-file = \"{dir}/reset\"\ntls-cert = \"{dir}/cert.pem\"\ntls-key = \"{dir}/key.pem\"\n";
        let secret = secret.replace("{dir}", dir.path().to_str().unwrap());
        fs::write(dir.path().join("relay.toml"), settings + &secret + further).unwrap();
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

/// Receives one of the `missing` groups, whichever comes first.
async fn take_group(viewer: &mut TestPeer, missing: &mut BTreeSet<u64>) {
    let received = viewer.next_subgroup().await;
    let group = received.header.group;
    assert!(missing.remove(&group), "{group}");
    assert_eq!(received.all().await, (vec![0, 1, 2], PeerStreamEnd::Fin), "{group}");
}

/// Subscribes as soon as somebody publishes the track.
async fn subscribe(viewer: &TestPeer) -> millrace_client::session::SessionRequest {
    let waiting = Parameters { rendezvous_timeout: Some(60_000), ..Parameters::default() };
    viewer.try_subscribe(&track("live", "video"), waiting).await.unwrap().0
}

/// A publisher at the relay, whose subscription by the relay is accepted, and a viewer.
async fn broadcast(relay: &UpgradedRelay) -> (TestPeer, Vec<SessionRequest>, TestPeer) {
    let mut publisher = relay.peer().await;
    let namespace = publisher.publish_namespace("live").await;
    let viewer = relay.peer().await;
    let name = track("live", "video");
    let (subscribed, (upstream, _)) =
        tokio::join!(subscribe(&viewer), publisher.accept_subscribe(&name, ALIAS));
    (publisher, vec![subscribed, namespace, upstream], viewer)
}

/// A publisher at the relay, and a viewer that has received group 0.
async fn watched_broadcast(relay: &UpgradedRelay) -> (TestPeer, Vec<SessionRequest>, TestPeer) {
    let (publisher, requests, mut viewer) = broadcast(relay).await;
    publish(&publisher, 0).await;
    expect_group(&mut viewer, 0).await;
    (publisher, requests, viewer)
}

#[tokio::test(flavor = "multi_thread")]
async fn clients_that_ignore_goaway_lose_nothing_until_the_drain_is_over() {
    let mut relay = UpgradedRelay::start("4s");
    let (publisher, _requests, mut viewer) = watched_broadcast(&relay).await;
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
    let (publisher, mut requests, mut viewer) = watched_broadcast(&relay).await;
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
    let is_linked = |status: &Status| status.tracks[0].subscribers == 2;
    wait_until("the old process's subscription", || relay.relay.status(), is_linked);
    for group in 3..20 {
        publish(&moved, group).await;
        expect_group(&mut viewer, group).await;
        expect_group(&mut newcomer, group).await;
    }
    viewer.expect_no_stream().await;
    newcomer.expect_no_stream().await;
    // The successor gets the track from its publisher alone.
    let is_alone = |status: &Status| status.tracks[0].publishers == 1;
    wait_until("one publisher", || relay.relay.status(), is_alone);
}

/// The publisher leaves the old process in the middle of a group. It has sent the group's beginning there, and sends the
/// whole group to the successor.
#[tokio::test(flavor = "multi_thread")]
async fn group_in_whose_middle_the_publisher_moves_is_whole_at_both_processes() {
    let mut relay = UpgradedRelay::start("60s");
    let (publisher, _requests, mut viewer) = watched_broadcast(&relay).await;
    relay.upgrade();
    let mut newcomer = relay.peer().await;
    let _subscribed = subscribe(&newcomer).await;
    expect_group(&mut newcomer, 0).await;
    let mut begun = publisher.subgroup(header(ALIAS, 1)).await;
    begun.object(0, 700).await;
    let mut streams = [viewer.next_subgroup().await, newcomer.next_subgroup().await];
    for stream in &mut streams {
        assert_eq!(stream.objects(1).await, [0]);
    }
    let mut moved = relay.peer().await;
    let _namespace = moved.publish_namespace("live").await;
    let largest = Parameters { largest_object: Some(at(1, 0)), ..Parameters::default() };
    let name = track("live", "video");
    let accepted = moved.accept_subscribe_with(&name, ALIAS, largest, Properties::default());
    let (_upstream, _) = accepted.await;
    publisher.session.close(millrace_moq::code::Session::NO_ERROR, "moved");
    publish(&moved, 1).await;
    for stream in streams {
        assert_eq!(stream.all().await, (vec![1, 2], PeerStreamEnd::Fin));
    }
    for group in 2..5 {
        publish(&moved, group).await;
        expect_group(&mut viewer, group).await;
        expect_group(&mut newcomer, group).await;
    }
    viewer.expect_no_stream().await;
    newcomer.expect_no_stream().await;
}

/// The old process stays until the successor has what has come to the old one only: this publisher answers no FETCH.
#[tokio::test(flavor = "multi_thread")]
async fn objects_that_have_come_to_the_old_process_only_reach_viewers_of_the_successor() {
    let mut relay = UpgradedRelay::start("60s");
    let (publisher, _requests, mut viewer) = broadcast(&relay).await;
    relay.upgrade();
    let mut newcomer = relay.peer().await;
    let _subscribed = subscribe(&newcomer).await;
    for group in 0..30 {
        publish(&publisher, group).await;
    }
    let mut missing: BTreeSet<_> = (0..30).collect();
    take_group(&mut newcomer, &mut missing).await;
    let mut moved = relay.peer().await;
    let _namespace = moved.publish_namespace("live").await;
    let largest = Parameters { largest_object: Some(at(29, 2)), ..Parameters::default() };
    let name = track("live", "video");
    let accepted = moved.accept_subscribe_with(&name, ALIAS, largest, Properties::default());
    let (_upstream, _) = accepted.await;
    // The old process has all groups once its own viewer has them.
    let mut missing_there: BTreeSet<_> = (0..30).collect();
    while !missing_there.is_empty() {
        take_group(&mut viewer, &mut missing_there).await;
    }
    publisher.session.close(millrace_moq::code::Session::NO_ERROR, "moved");
    viewer.session.close(millrace_moq::code::Session::NO_ERROR, "moved");
    while !missing.is_empty() {
        take_group(&mut newcomer, &mut missing).await;
    }
    publish(&moved, 30).await;
    expect_group(&mut newcomer, 30).await;
    assert_eq!(tokio::task::block_in_place(|| relay.relay.exit_code()), Some(0));
    newcomer.expect_no_stream().await;
}

/// Both processes have the same hop ID in the cluster, and yet exchange media by the private link.
#[tokio::test(flavor = "multi_thread")]
async fn successor_has_the_hop_id_of_its_predecessor_in_a_cluster() {
    let other =
        RunningRelay::start(tempfile::tempdir().unwrap(), &["--gate=off", "--cluster", "--cluster-hop=9"]);
    let peer = format!("cluster-peer = [\"{}\"]\n", other.url());
    let trust = "upstream-tls-disable-verify = true\n";
    let mut relay = UpgradedRelay::start_with("60s", &(peer + trust));
    let hop = |status: &Status| status.cluster.as_ref().unwrap().hop;
    let is_linked =
        |status: &Status| status.cluster.as_ref().unwrap().peers.iter().any(|peer| peer.session.is_some());
    let before = wait_until("the session", || relay.relay.status(), is_linked);
    let (publisher, _requests, mut viewer) = watched_broadcast(&relay).await;
    relay.upgrade();
    let after = wait_until("the session", || relay.relay.status(), is_linked);
    assert_eq!(hop(&after), hop(&before));
    let mut newcomer = relay.peer().await;
    let _subscribed = subscribe(&newcomer).await;
    expect_group(&mut newcomer, 0).await;
    let mut behind = TestPeer::connect(other.url().parse().unwrap()).await;
    let _subscribed = subscribe(&behind).await;
    expect_group(&mut behind, 0).await;
    for group in 1..5 {
        publish(&publisher, group).await;
        for viewer in [&mut viewer, &mut newcomer, &mut behind] {
            expect_group(viewer, group).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn subscribe_at_the_successor_waits_for_a_publisher_that_moves_later() {
    let mut relay = UpgradedRelay::start("60s");
    let stays = relay.peer().await;
    relay.upgrade();
    let viewer = relay.peer().await;
    let wanted = track("live", "video");
    let publisher = async {
        async_wait_for("the track that is waited for", || {
            (relay.relay.status().tracks.len() == 1).then_some(())
        })
        .await;
        let mut publisher = relay.peer().await;
        let namespace = publisher.publish_namespace("live").await;
        let (upstream, _) = publisher.accept_subscribe(&wanted, ALIAS).await;
        (publisher, namespace, upstream)
    };
    let (subscribed, (publisher, _namespace, _upstream)) =
        tokio::join!(viewer.try_subscribe(&wanted, Parameters::default()), publisher);
    let mut viewer = viewer;
    let _subscribed = subscribed.unwrap();
    publish(&publisher, 0).await;
    expect_group(&mut viewer, 0).await;
    drop(stays);
}

/// `millrace publish` or `millrace subscribe`, whose output goes to files.
struct RunningClient {
    process: Child,
    dir: tempfile::TempDir,
}

impl RunningClient {
    fn start(mut command: Command, arguments: &str, url: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let file = |name| fs::File::create(dir.path().join(name)).unwrap();
        command.args(arguments.split_whitespace()).args(["--name=live", "--tls-disable-verify", url]);
        let process = command
            .current_dir(dir.path())
            .stdin(Stdio::null())
            .stdout(file("stdout"))
            .stderr(file("stderr"))
            .spawn()
            .unwrap();
        Self { process, dir }
    }

    fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.process.id().try_into().unwrap()), signal).unwrap();
    }

    /// Ends a client that measures, and returns the numbers of objects that it has received, missed, and received twice.
    /// Objects of the last second may still be on their way: on another stream a later one may have arrived already.
    fn measured(&mut self) -> [u64; 3] {
        self.signal(Signal::SIGINT);
        let ended = wait_for("the end of the client", || self.process.try_wait().unwrap());
        assert!(ended.success(), "{ended:?}");
        let text = fs::read_to_string(self.dir.path().join("stdout")).unwrap();
        let figures: serde_json::Value = serde_json::from_str(&text).unwrap();
        let mut viewers = BTreeMap::<u64, BTreeMap<u64, u64>>::new();
        for line in fs::read_to_string(self.dir.path().join(SERIES)).unwrap().lines().skip(1) {
            let numbers: Vec<u64> = line.split(',').map(|number| number.parse().unwrap()).collect();
            viewers.entry(numbers[0]).or_default().insert(numbers[1], numbers[2]);
        }
        let missed = |objects: &BTreeMap<u64, u64>| {
            let first = objects.keys().next().unwrap();
            let (last, sent_ns) = objects.last_key_value().unwrap();
            let is_settled =
                |number: &u64| objects.range(number..).next().unwrap().1 + 1_000_000_000 < *sent_ns;
            (*first..*last).filter(|number| !objects.contains_key(number) && is_settled(number)).count()
                as u64
        };
        let lost = viewers.values().map(missed).sum();
        let count = |name: &str| figures[name].as_u64().unwrap();
        [count("delivered"), lost, count("duplicates")]
    }

    /// Ends a player. Returns the numbers of the objects before and after each place where its output leaves out objects,
    /// or repeats any.
    fn gaps(&mut self) -> Vec<[u64; 2]> {
        self.signal(Signal::SIGINT);
        wait_for("the end of the player", || self.process.try_wait().unwrap());
        let played = fs::read(self.dir.path().join("stdout")).unwrap();
        let sequence = |object: &[u8]| millrace_client::payload::check(object).unwrap().sequence;
        let numbers: Vec<_> = played.chunks_exact(OBJECT_BYTES as usize).map(sequence).collect();
        numbers.windows(2).map(|pair| [pair[0], pair[1]]).filter(|[one, next]| *next != one + 1).collect()
    }
}

impl Drop for RunningClient {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
        show_log_on_panic("a client", &self.dir.path().join("stderr"));
    }
}

const PUBLISH: &str = "publish --generate --rate-hz=200 --objects-per-group=40 --reconnect";
/// The default size of generated objects.
const OBJECT_BYTES: u64 = 1200;
const SUBSCRIBE: &str = "subscribe --track=objects --json --series=series.csv --subscribers=2 --reconnect";
/// The file of `--series`, in the client's directory.
const SERIES: &str = "series.csv";

/// Returns the number of sessions that are not the private link.
fn clients(status: &Status) -> usize {
    status.sessions.iter().filter(|session| !session.relay).count()
}

/// Upgrades a relay while a client, if any, is stopped. The others move to the successor first.
fn upgrade_with_clients(stopped: Option<usize>) {
    let mut relay = UpgradedRelay::start("60s");
    let url = relay.url.to_string();
    let mut clients_of =
        [PUBLISH, SUBSCRIBE].map(|arguments| RunningClient::start(millrace(), arguments, &url));
    let has_media = |status: &Status| clients(status) == 3 && status.totals.data_plane.packets > 100;
    wait_until("media", || relay.relay.status(), has_media);
    let stopped = stopped.map(|place| &clients_of[place]);
    stopped.iter().for_each(|client| client.signal(Signal::SIGSTOP));
    relay.upgrade();
    if let Some(stopped) = stopped {
        let others = 3 - if std::ptr::eq(stopped, &clients_of[0]) { 1 } else { 2 };
        wait_until(
            "the clients that move first",
            || relay.relay.status(),
            |status| clients(status) == others,
        );
        stopped.signal(Signal::SIGCONT);
    }
    assert_eq!(relay.relay.exit_code(), Some(0));
    // The successor has all clients, and its media flow.
    let all = wait_until("the clients", || relay.relay.status(), |status| clients(status) == 3);
    let more = all.totals.data_plane.packets + 100;
    wait_until("media", || relay.relay.status(), |status| status.totals.data_plane.packets > more);
    let [delivered, lost, duplicates] = clients_of[1].measured();
    assert!(
        delivered > 200 && (lost, duplicates) == (0, 0),
        "{delivered} delivered, {lost} lost, {duplicates} twice"
    );
}

#[test]
fn viewers_and_publisher_that_follow_goaway_lose_nothing() {
    upgrade_with_clients(None);
}

#[test]
fn viewers_that_follow_goaway_before_their_publisher_lose_nothing() {
    upgrade_with_clients(Some(0));
}

#[test]
fn viewers_that_follow_goaway_after_their_publisher_lose_nothing() {
    upgrade_with_clients(Some(1));
}

/// The player writes each object once and in order, across its sessions with both processes.
#[test]
fn player_that_follows_goaway_leaves_out_nothing_and_repeats_nothing() {
    let mut relay = UpgradedRelay::start("60s");
    let url = relay.url.to_string();
    let _publisher = RunningClient::start(millrace(), PUBLISH, &url);
    let mut player = RunningClient::start(millrace(), "subscribe --track=objects --reconnect", &url);
    let output = player.dir.path().join("stdout");
    let written = || fs::metadata(&output).unwrap().len() / OBJECT_BYTES;
    wait_until("played objects", written, |objects| *objects > 50);
    relay.upgrade();
    assert_eq!(relay.relay.exit_code(), Some(0));
    let before = written(); // exact: the lower bound for what the next line waits for
    wait_until("played objects", written, |objects| *objects > before + 50);
    assert_eq!(player.gaps(), [[0; 2]; 0]);
}

/// The relay is killed, and comes back after two seconds. Viewers and player get what was published meanwhile from the
/// publisher's history.
#[test]
fn viewers_of_a_killed_relay_get_what_was_published_until_it_was_back() {
    let keys = tempfile::tempdir().unwrap();
    write_pair(keys.path());
    let files = [("tls-cert", "cert.pem"), ("tls-key", "key.pem"), ("reset-key-file", "reset.key")];
    let options = files.map(|(option, file)| format!("--{option}={}", keys.path().join(file).display()));
    let start = |listen: &str| {
        let options = options.each_ref().map(String::as_str);
        RunningRelay::start_on(listen, tempfile::tempdir().unwrap(), &options)
    };
    let has_media = |status: &Status| {
        clients(status) == 4 && status.totals.data_plane.packets > 300 && status.tracks.len() == 1
    };
    let relay = start("127.0.0.1:0");
    let listen = relay.listen().to_string();
    let url = relay.url();
    let _publisher = RunningClient::start(millrace(), &format!("{PUBLISH} --history=60s"), &url);
    let mut viewers = RunningClient::start(millrace(), SUBSCRIBE, &url);
    let mut player = RunningClient::start(millrace(), "subscribe --track=objects --reconnect", &url);
    wait_until("media", || relay.status(), has_media);
    relay.signal(Signal::SIGKILL);
    drop(relay);
    // exact: the time without a relay
    thread::sleep(Duration::from_secs(2));
    let relay = start(&listen);
    wait_until("media again", || relay.status(), has_media);
    let [delivered, lost, duplicates] = viewers.measured();
    assert!(
        delivered > 400 && (lost, duplicates) == (0, 0),
        "{delivered} delivered, {lost} lost, {duplicates} twice"
    );
    assert_eq!(player.gaps(), [[0; 2]; 0]);
}

/// Two hosts with a link between them, and a relay on one of them that forwards in the kernel.
struct KernelSite {
    lab: Lab,
    relay: Child,
    successor: Option<u32>,
    dir: tempfile::TempDir,
}

const KERNEL_HTTP: &str = "127.0.0.1:9184";

impl KernelSite {
    fn start() -> Self {
        let lab = Lab::new(&Topology::standard(1, 1)).unwrap();
        let dir = tempfile::tempdir().unwrap();
        write_pair(dir.path());
        let node = lab.node("relay").unwrap();
        let devices: Vec<_> = node.interfaces().iter().map(|interface| interface.device.as_str()).collect();
        let settings = format!(
            "relay --public --engine=kernel --gate=on --interface={} --listen=0.0.0.0:4443 --http={KERNEL_HTTP} --http-token-file=off --drain-timeout=60s --max-delay=off --tls-cert={1}/cert.pem --tls-key={1}/key.pem",
            devices.join(","),
            dir.path().display(),
        );
        let mut command = node.command(env!("CARGO_BIN_EXE_millrace"));
        command
            .args(settings.split_whitespace())
            .stderr(fs::File::create(dir.path().join("stderr")).unwrap());
        let relay = command.spawn().unwrap();
        Self { lab, relay, successor: None, dir }
    }

    fn node(&self) -> &LabNode {
        self.lab.node("relay").unwrap()
    }

    /// Returns the status of the process that serves HTTP, and the process ID in it, if any process does.
    fn status(&self) -> Option<Status> {
        let fetch = || millrace_daemon::http::fetch(KERNEL_HTTP.parse().unwrap(), "/status", None);
        let (_, text) = self.node().enter(fetch).unwrap().ok()?;
        serde_json::from_str(&text).ok()
    }

    fn client(&self, node: &str, arguments: &str) -> RunningClient {
        let command = self.lab.node(node).unwrap().command(env!("CARGO_BIN_EXE_millrace"));
        RunningClient::start(command, arguments, &format!("moqt://{}:4443", self.node().addr_v4()))
    }

    fn until(&self, what: &str, is: impl Fn(&Status) -> bool) -> Status {
        wait_for(what, || self.status().filter(&is))
    }
}

impl Drop for KernelSite {
    fn drop(&mut self) {
        self.successor.into_iter().for_each(kill_process);
        let _ = self.relay.kill();
        let _ = self.relay.wait();
        show_log_on_panic("the relay", &self.dir.path().join("stderr"));
    }
}

/// The gate guards the relay's port, and the kernel forwards, before and after the upgrade.
#[test]
fn kernel_forwards_and_gate_guards_again_after_an_upgrade() {
    if !nix::unistd::geteuid().is_root() {
        println!("SKIP kernel_forwards_and_gate_guards_again_after_an_upgrade: needs root");
        return;
    }
    let mut site = KernelSite::start();
    site.until("the relay", |status| status.gate.on && status.engine.name == "kernel");
    let _publisher = site.client("pub", PUBLISH);
    let mut viewers = site.client("sub1", SUBSCRIBE);
    let is_forwarded = |status: &Status| status.totals.kernel.packets > 100;
    let before = site.until("packets that the kernel forwards", is_forwarded);
    let mut upgrade = site.node().command(env!("CARGO_BIN_EXE_millrace"));
    let output =
        upgrade.args(["relay", "upgrade", "--http", KERNEL_HTTP, "--http-token-file=off"]).output().unwrap();
    assert!(output.status.success(), "{}", text(&output));
    let after = site.until("the successor", |status| status.pid != before.pid);
    site.successor = Some(after.pid);
    assert!(wait_for("the end of the old process", || site.relay.try_wait().unwrap()).success());
    let settled = site.until("all clients", |status| clients(status) == 3);
    // The successor has counted from zero.
    let more = settled.totals.kernel.packets + 100;
    let status = site.until("packets that the kernel forwards", |status| status.totals.kernel.packets > more);
    assert!(status.gate.on, "{}", status.gate.reason);
    let admitted = |status: &Status| {
        status.gate.scopes.iter().flat_map(|scope| &scope.passed).map(|passed| passed.packets).sum::<u64>()
    };
    site.until("packets that pass the gate", |status| admitted(status) > 0);
    let [delivered, lost, duplicates] = viewers.measured();
    assert!(
        delivered > 200 && (lost, duplicates) == (0, 0),
        "{delivered} delivered, {lost} lost, {duplicates} twice"
    );
}

/// The old process goes on answering at its HTTP address, where the command learns of the successor.
#[test]
fn upgrade_that_changes_the_http_address_succeeds() {
    let dir = tempfile::tempdir().unwrap();
    write_pair(dir.path());
    let free = [(); 2].map(|()| std::net::TcpListener::bind("127.0.0.1:0").unwrap());
    let [old, new] = free.map(|listener| listener.local_addr().unwrap());
    let settings = dir.path().join("relay.toml");
    let write = |http| {
        let pair = "tls-cert = \"{dir}/cert.pem\"\ntls-key = \"{dir}/key.pem\"\n";
        let rest = format!(
            "http = \"{http}\"\nhttp-token-file = \"off\"\nlisten = [\"127.0.0.1:0\"]\ngate = \"off\"\n"
        );
        fs::write(&settings, rest + &pair.replace("{dir}", dir.path().to_str().unwrap())).unwrap();
    };
    write(old);
    let mut relay = millrace()
        .arg("relay")
        .arg(format!("--config={}", settings.display()))
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let status = |addr| {
        // exact: the callers wait for an answer, and a process's ID does not change
        let (_, text) = millrace_daemon::http::fetch(addr, "/status", None).ok()?;
        serde_json::from_str::<Status>(&text).ok()
    };
    assert_eq!(wait_for("the relay", || status(old)).pid, relay.id());
    write(new);
    let mut command = millrace();
    command.args(["relay", "upgrade", "--http-token-file=off"]).arg(format!("--http={old}"));
    let output = command.output().unwrap();
    assert!(
        output.status.success() && text(&output).contains("with another HTTP address"),
        "{}",
        text(&output)
    );
    let successor = wait_for("the successor", || status(new));
    assert_ne!(successor.pid, relay.id());
    assert!(relay.wait().unwrap().success(), "without clients the old process ends");
    kill_process(successor.pid);
}

/// The upstream relay is restarted while the relay drains. The relay connects to it again once its successor is killed.
#[tokio::test(flavor = "multi_thread")]
async fn old_process_connects_to_its_upstream_again_when_its_successor_is_killed() {
    let keys = tempfile::tempdir().unwrap();
    let key = format!("--reset-key-file={}", keys.path().join("reset").display());
    let start =
        |listen: &str| RunningRelay::start_on(listen, tempfile::tempdir().unwrap(), &["--gate=off", &key]);
    let upstream = start("127.0.0.1:0");
    let further = format!("upstream = [\"{}\"]\nupstream-tls-disable-verify = true\n", upstream.url());
    let mut relay = UpgradedRelay::start_with("60s", &further);
    let has_upstream =
        |status: &Status| status.upstream.as_ref().is_some_and(|upstream| upstream.session.is_some());
    wait_until("the upstream relay", || relay.relay.status(), has_upstream);
    let old = relay.pid();
    let viewer = relay.peer().await;
    let successor = relay.upgrade();
    wait_until("the upstream relay", || relay.relay.status(), has_upstream);
    let listen = upstream.listen().to_string();
    upstream.signal(Signal::SIGKILL);
    drop(upstream);
    let _upstream = start(&listen);
    let log = relay.relay.path("stderr");
    let restarts = || fs::read_to_string(&log).unwrap().matches("reset by peer").count();
    wait_until("the ends of both processes' sessions", restarts, |restarts| *restarts == 2);
    kill_process(successor);
    wait_for("the old process", || (relay.relay.health() == Some(200) && relay.pid() == old).then_some(()));
    wait_until("the upstream relay", || relay.relay.status(), has_upstream);
    drop(viewer);
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
    let (publisher, _requests, _viewer) = watched_broadcast(&relay).await;
    relay.upgrade();
    kill_process(relay.relay.pid());
    relay.relay.exit_code();
    let _ = publisher.session.request(namespace_request(&publisher)).await; // any packet of the client is answered by a reset
    let ended = publisher.ended().await;
    assert!(matches!(ended, Error::Closed(quinn::ConnectionError::Reset)), "{ended:?}");
    watched_broadcast(&relay).await;
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
