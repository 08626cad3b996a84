//! Publishers and players as processes, whose output tests read while they run.

use std::{
    env,
    fs::{self, File},
    io::Write as _,
    path::PathBuf,
    process::{Child, ChildStdin, Command, ExitStatus, Stdio},
    thread::sleep,
    time::{Duration, Instant},
};

use millrace_lab::lab::LabNode;
use millrace_testkit::{show_log_on_panic, wait_for, wait_until};
use tempfile::TempDir;

/// Peers that `scripts/peers.sh` builds only if it is asked for all.
const OF_ALL: [&str; 3] = ["moq-relay-ietf", "moq-relay", "moq-cli"];

/// A program or right without which a test cannot run.
#[derive(Clone, Copy)]
pub enum TestNeed {
    /// A peer that `scripts/peers.sh` builds, or `scripts/peers.sh all` if it is in [`OF_ALL`].
    Peer(&'static str),
    Ffmpeg,
    Root,
}

/// Returns the name of a requirement that is missing.
pub fn missing(need: TestNeed) -> Option<String> {
    match need {
        TestNeed::Peer(name) => {
            let path = peer(name);
            let all = if OF_ALL.contains(&name) { " all" } else { "" };
            (!path.is_file()).then(|| format!("no {}: scripts/peers.sh{all} builds it", path.display()))
        }
        TestNeed::Ffmpeg => {
            let started = Command::new("ffprobe").arg("-version").stdout(Stdio::null()).status();
            started.is_err().then(|| "no ffmpeg".into())
        }
        TestNeed::Root => (!nix::unistd::geteuid().is_root()).then(|| "needs root".into()),
    }
}

fn peer(name: &str) -> PathBuf {
    let default = || PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../target/peers");
    env::var_os("MILLRACE_PEERS").map_or_else(default, PathBuf::from).join("bin").join(name)
}

/// A running program. Killed when it is dropped.
pub struct InteropProcess {
    name: String,
    child: Child,
    input: Option<ChildStdin>,
    dir: TempDir,
}

/// The network namespace where programs run: that of this machine, or of a node in a lab.
pub type ProgramHost<'a> = Option<&'a LabNode>;

impl InteropProcess {
    /// Starts a peer (an unmodified program of another project) with its arguments for the broadcast at `url`, followed
    /// by `more`.
    pub fn peer(host: ProgramHost, name: &str, url: &str, more: &[&str]) -> Self {
        let broadcast = ["--name", super::relay::BROADCAST, "--tls-disable-verify", url];
        Self::start(host, name, peer(name), &[&broadcast, more].concat())
    }

    /// Starts our own publisher or subscriber.
    pub fn ours(host: ProgramHost, verb: &str, url: &str, more: &[&str]) -> Self {
        let broadcast = [verb, "--name", super::relay::BROADCAST, "--tls-disable-verify", url];
        // Groups are numbered from 0, since tests refer to groups by number.
        let numbers: &[&str] = if verb == "publish" { &["--first-group=0"] } else { &[] };
        Self::start(host, verb, env!("CARGO_BIN_EXE_millrace").into(), &[&broadcast, numbers, more].concat())
    }

    /// Returns whether the program is our own publisher or subscriber, not a peer's.
    pub fn is_ours(&self) -> bool {
        self.name == "subscribe"
    }

    pub fn start_peer(name: &str, args: &[&str]) -> Self {
        Self::start(None, name, peer(name), args)
    }

    fn start(host: ProgramHost, name: &str, program: PathBuf, args: &[&str]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut command = match host {
            Some(node) => node.command(program),
            None => Command::new(program),
        };
        let file = |name| File::create(dir.path().join(name)).unwrap();
        // The waits below read the peers' logs; colours would disturb them.
        command.args(args).env("NO_COLOR", "1").env_remove("RUST_LOG");
        command.stdin(Stdio::piped()).stdout(file("stdout")).stderr(file("stderr"));
        let mut child = command.spawn().unwrap();
        let input = child.stdin.take();
        Self { name: name.into(), child, input, dir }
    }

    /// Writes to the program's standard input.
    pub fn write(&mut self, bytes: &[u8]) {
        let input = self.input.as_mut().expect("the input is open");
        if let Err(error) = input.write_all(bytes).and_then(|()| input.flush()) {
            panic!("{} does not read: {error}\n{}", self.name, self.log());
        }
    }

    /// Writes the pieces at a steady pace, as a live source does.
    pub fn feed(&mut self, pieces: &[Vec<u8>], pace: Duration) {
        let start = Instant::now();
        for (piece, count) in pieces.iter().zip(0..) {
            // exact: this pause sets the rate of the live source
            sleep((pace * count).saturating_sub(start.elapsed()));
            self.write(piece);
        }
    }

    pub fn output(&self) -> Vec<u8> {
        fs::read(self.dir.path().join("stdout")).unwrap()
    }

    pub fn log(&self) -> String {
        String::from_utf8_lossy(&fs::read(self.dir.path().join("stderr")).unwrap()).into_owned()
    }

    /// Waits until the program's log contains `text`.
    pub fn wait_logged(&self, text: &str) {
        wait_for(&format!("{text:?} in the log of {}", self.name), || self.log().contains(text));
    }

    /// Waits until the program has written more than `len` bytes.
    pub fn wait_beyond(&self, len: usize) {
        let written = || fs::metadata(self.dir.path().join("stdout")).unwrap().len();
        wait_until(&format!("more than {len} bytes of {}", self.name), written, |bytes| *bytes > len as u64);
    }

    /// Closes the program's input, waits until it has ended successfully, and returns its output.
    pub fn finish(mut self) -> Vec<u8> {
        self.input = None;
        let status = self.wait();
        assert!(status.success(), "{}: {status}\n{}", self.name, self.log());
        self.output()
    }

    /// Waits until the program has ended in any way, and returns its output.
    pub fn last_output(mut self) -> Vec<u8> {
        self.wait();
        self.output()
    }

    fn wait(&mut self) -> ExitStatus {
        wait_for(&format!("the end of {}", self.name), || self.child.try_wait().unwrap())
    }
}

impl Drop for InteropProcess {
    fn drop(&mut self) {
        let _ = self.child.kill(); // The process may already have ended.
        let _ = self.child.wait();
        show_log_on_panic(&self.name, &self.dir.path().join("stderr"));
    }
}
