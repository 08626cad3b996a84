//! What a user sees of `millrace publish` and `subscribe`: waiting, leaving, coming back. Real processes.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod process;

use std::{
    fs,
    io::{BufRead as _, BufReader},
    net::UdpSocket,
    path::PathBuf,
    process::{Child, Stdio},
};

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
        let dir = tempfile::tempdir().unwrap();
        let said = dir.path().join("stderr");
        let stderr = fs::File::create(&said).unwrap();
        let mut command = millrace();
        command.args(args).stdin(Stdio::null()).stdout(Stdio::null()).stderr(stderr);
        Self { process: command.spawn().unwrap(), said, _dir: dir }
    }

    fn said(&self) -> String {
        fs::read_to_string(&self.said).unwrap()
    }

    fn wait_for(&self, words: &str) {
        wait_for(words, || self.said().contains(words).then_some(()));
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
    }
}

const PUBLISH: [&str; 5] = ["publish", "--name=live", "--generate", "--rate-hz=50", "--tls-disable-verify"];
const SUBSCRIBE: [&str; 5] =
    ["subscribe", "--name=live", "--track=objects", "--stats", "--tls-disable-verify"];

#[test]
fn where_nobody_listens_is_said_at_once() {
    let port = UdpSocket::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let url = format!("moqt://127.0.0.1:{port}");
    let mut subscriber = Client::start(&[&SUBSCRIBE[..], &[&url]].concat());
    assert_eq!(subscriber.exit_code(), Some(1));
    let said = subscriber.said();
    for part in ["connecting", &format!("127.0.0.1:{port}"), "nobody listens on that UDP port"] {
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
    let (url, listen) = (relay.url(), relay.status().listen[0].to_string());
    let publisher = Client::start(&[&PUBLISH[..], &[&url]].concat());
    publisher.wait_for("publishing");
    let subscriber = Client::start(&[&SUBSCRIBE[..], &["--reconnect", &url]].concat());
    subscriber.wait_for(" delivered, ");
    relay.signal(Signal::SIGTERM);
    assert_eq!(relay.exit_code(), Some(0));
    drop(relay);
    subscriber.wait_for("trying again");

    let relay = Relay::start_on(&listen, tempfile::tempdir().unwrap(), &[]);
    let total = || {
        let said = subscriber.said();
        let last = said
            .lines()
            .rev()
            .find_map(|line| line.split_once(" delivered, ")?.0.rsplit(' ').next()?.parse().ok());
        last.unwrap_or(0_u64)
    };
    wait_for("media through the new relay", || (relay.status().totals.data_plane.packets > 0).then_some(()));
    let before = total();
    wait_for("objects that are counted", || (total() > before).then_some(()));
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
