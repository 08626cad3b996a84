//! A relay as a process, for tests.
#![allow(dead_code, reason = "each test file uses a part")]

use std::{
    fs,
    net::{Ipv4Addr, SocketAddr, TcpListener},
    path::PathBuf,
    process::{Child, Command, ExitStatus},
};

use millrace_daemon::http::fetch;
use millrace_relay_daemon::status::Status;
use millrace_testkit::show_log_on_panic;
pub use millrace_testkit::wait_for;
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use tempfile::TempDir;

pub fn millrace() -> Command {
    Command::new(env!("CARGO_BIN_EXE_millrace"))
}

pub struct RunningRelay {
    process: Child,
    pub http: SocketAddr,
    pub dir: TempDir,
}

impl RunningRelay {
    /// Starts a relay on ports of its own. `{dir}` in an argument stands for its directory.
    pub fn start(dir: TempDir, args: &[&str]) -> Self {
        Self::start_on("127.0.0.1:0", dir, args)
    }

    /// Starts a relay on this address.
    pub fn start_on(listen: &str, dir: TempDir, args: &[&str]) -> Self {
        Self::start_as(Some(listen), dir, args)
    }

    /// Starts a relay with the settings file `relay.toml` in the relay's directory. The file must name the listen
    /// address.
    pub fn start_by_file(dir: TempDir, args: &[&str]) -> Self {
        Self::start_as(None, dir, &[&["--config={dir}/relay.toml"], args].concat())
    }

    fn start_as(listen: Option<&str>, dir: TempDir, args: &[&str]) -> Self {
        // The relay's log on standard error has the HTTP port that the kernel has chosen. A relay that logs to a file
        // gets a port that was free before.
        let is_silent = args.iter().any(|arg| arg.starts_with("--log-file"));
        let anywhere = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        let http =
            if is_silent { TcpListener::bind(anywhere).unwrap().local_addr().unwrap() } else { anywhere };
        let process = millrace()
            .args(["relay", &format!("--http={http}"), "--log-format=json"])
            .args(listen.map(|listen| format!("--listen={listen}")))
            .arg("--max-delay=off")
            .arg(format!("--http-token-file={}", dir.path().join("token").display()))
            .args(args.iter().map(|arg| arg.replace("{dir}", dir.path().to_str().unwrap())))
            .stderr(fs::File::create(dir.path().join("stderr")).unwrap())
            .spawn()
            .unwrap();
        let mut relay = Self { process, http, dir };
        if !is_silent {
            relay.http = wait_for("the relay's HTTP", || {
                assert_eq!(relay.process.try_wait().unwrap(), None, "the relay has ended");
                relay.logged_http()
            });
        }
        wait_for("the relay", || relay.health());
        // The relay writes this file last, when HTTP answers already.
        for name in args.iter().filter_map(|arg| arg.strip_prefix("--tls-self-signed-out={dir}/")) {
            wait_for("the certificate", || relay.path(name).exists().then_some(()));
        }
        relay
    }

    fn logged_http(&self) -> Option<SocketAddr> {
        let log = fs::read_to_string(self.path("stderr")).unwrap();
        let mut whole = log.split_inclusive('\n').filter(|line| line.ends_with('\n'));
        let line = whole.find(|line| line.contains("metrics, health and status"))?;
        line.split_once(r#""addr":""#)?.1.split('"').next()?.parse().ok()
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

    /// Returns the answer to an HTTP request for `path` that presents the relay's HTTP token.
    pub fn get(&self, path: &str) -> String {
        let token = fs::read_to_string(self.path("token")).unwrap();
        fetch(self.http, path, Some(token.trim_end())).unwrap().1
    }

    /// Reports whether a line of the relay's log has all of `words`. A background thread writes the lines, so callers
    /// must wait for them.
    pub fn logged(&self, words: &[&str]) -> bool {
        let log = fs::read_to_string(self.path("stderr")).unwrap();
        log.lines().any(|line| words.iter().all(|word| line.contains(word)))
    }

    /// Returns the relay's first listen address.
    pub fn listen(&self) -> SocketAddr {
        self.status().listen[0] // exact: the listen address is fixed when the relay starts
    }

    /// Returns the URL for clients.
    pub fn url(&self) -> String {
        format!("moqt://{}", self.listen())
    }

    pub fn pid(&self) -> u32 {
        self.process.id()
    }

    pub fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.process.id().try_into().unwrap()), signal).unwrap();
    }

    /// Returns the relay's exit status, or `None` while it runs.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        self.process.try_wait().unwrap()
    }

    pub fn exit_code(&mut self) -> Option<i32> {
        wait_for("the end of the relay", || self.process.try_wait().unwrap()).code()
    }
}

impl Drop for RunningRelay {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
        show_log_on_panic("relay", &self.path("stderr"));
    }
}
