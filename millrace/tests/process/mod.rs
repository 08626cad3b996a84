//! A relay as a process.
#![allow(dead_code, reason = "each test file uses a part")]

use std::{
    fs,
    net::{Ipv4Addr, SocketAddr, TcpListener},
    path::PathBuf,
    process::{Child, Command},
    time::{Duration, Instant},
};

use millrace::relay::status::{Status, fetch};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use tempfile::TempDir;

const BOUND: Duration = Duration::from_secs(60);

pub fn millrace() -> Command {
    Command::new(env!("CARGO_BIN_EXE_millrace"))
}

/// Waits until `found` finds something, and fails with `what` when it takes too long.
pub fn wait_for<T>(what: &str, mut found: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(it) = found() {
            return it;
        }
        assert!(start.elapsed() < BOUND, "no {what} in {BOUND:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

pub struct Relay {
    process: Child,
    pub http: SocketAddr,
    pub dir: TempDir,
}

impl Relay {
    /// Starts a relay on ports of its own; `{dir}` in an argument is its directory.
    pub fn start(dir: TempDir, args: &[&str]) -> Self {
        Self::start_on("127.0.0.1:0", dir, args)
    }

    /// The same, on this address.
    pub fn start_on(listen: &str, dir: TempDir, args: &[&str]) -> Self {
        let http = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap();
        let process = millrace()
            .args(["relay", &format!("--listen={listen}"), &format!("--http={http}"), "--log-format=json"])
            .arg("--max-delay=off")
            .arg(format!("--http-token-file={}", dir.path().join("token").display()))
            .args(args.iter().map(|arg| arg.replace("{dir}", dir.path().to_str().unwrap())))
            .stderr(fs::File::create(dir.path().join("stderr")).unwrap())
            .spawn()
            .unwrap();
        let relay = Self { process, http, dir };
        wait_for("relay", || relay.health());
        relay
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub fn health(&self) -> Option<u16> {
        fetch(self.http, "/healthz", None).ok().map(|(code, _)| code)
    }

    pub fn status(&self) -> Status {
        serde_json::from_str(&self.get("/status")).unwrap()
    }

    /// What HTTP answers to whoever has the token.
    pub fn get(&self, path: &str) -> String {
        let token = fs::read_to_string(self.path("token")).unwrap();
        fetch(self.http, path, Some(token.trim_end())).unwrap().1
    }

    /// Whether a line of the log has all of `words`. Lines are written by a thread of its own: wait for them.
    pub fn logged(&self, words: &[&str]) -> bool {
        let log = fs::read_to_string(self.path("stderr")).unwrap();
        log.lines().any(|line| words.iter().all(|word| line.contains(word)))
    }

    /// What clients are given.
    pub fn url(&self) -> String {
        format!("moqt://{}", self.status().listen[0])
    }

    pub fn pid(&self) -> u32 {
        self.process.id()
    }

    pub fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.process.id().try_into().unwrap()), signal).unwrap();
    }

    pub fn exit_code(&mut self) -> Option<i32> {
        wait_for("end of the relay", || self.process.try_wait().unwrap()).code()
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
