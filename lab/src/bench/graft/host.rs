//! A host with a graft daemon, in a cgroup of its own.

use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use serde_json::Value;

use super::cgroup::HostCgroup;
use crate::bench::process::BenchProcess;
use crate::lab::LabNode;
use crate::program::product;

pub const LIMIT: Duration = Duration::from_secs(60);

/// Interval between two checks of the condition for which the benchmark waits, such as a state of the daemon.
const LOOK: Duration = Duration::from_millis(5);

pub struct GraftHost<'a> {
    name: &'static str,
    pub node: &'a LabNode,
    pub cgroup: HostCgroup,
    pub directory: PathBuf,
}

impl<'a> GraftHost<'a> {
    /// Creates a host, whose files are in the new directory `directory`.
    pub fn new(name: &'static str, node: &'a LabNode, directory: &Path) -> anyhow::Result<Self> {
        fs::create_dir_all(directory)?;
        Ok(Self { name, node, cgroup: HostCgroup::new(name)?, directory: directory.to_owned() })
    }

    /// Generates the host's key, and returns its public part.
    pub fn key(&self) -> anyhow::Result<String> {
        let mut command = Command::new(product()?);
        let made = command.args(["graft", "key", "--new"]).arg(self.directory.join("host.key")).output()?;
        ensure!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        Ok(String::from_utf8(made.stdout)?.trim().to_owned())
    }

    /// Writes the daemon's settings: the host's cgroup, followed by `rest`.
    pub fn configure(&self, rest: &str) -> anyhow::Result<()> {
        let text = format!("cgroup = {:?}\n{rest}", self.cgroup.path());
        Ok(fs::write(self.directory.join("graft.toml"), text)?)
    }

    fn socket(&self) -> PathBuf {
        self.directory.join("graft.sock")
    }

    pub fn start(&self) -> anyhow::Result<BenchProcess> {
        self.start_of(&product()?, &[])
    }

    /// Starts the daemon from the given program file, with additional arguments.
    pub fn start_of(&self, program: &Path, further: &[&str]) -> anyhow::Result<BenchProcess> {
        let mut daemon = self.node.command(program);
        daemon.args(["graft", "run", "--http=off", "--config"]).arg(self.directory.join("graft.toml"));
        daemon.arg("--socket").arg(self.socket()).args(further);
        let mut process = BenchProcess::start(self.name, self.cgroup.command(&daemon), &self.directory)?;
        process.wait_until("its socket", LIMIT, || UnixStream::connect(self.socket()).is_ok())?;
        Ok(process)
    }

    pub fn status(&self) -> anyhow::Result<Value> {
        self.ask("status")
    }

    /// Waits until the daemon answers and its status satisfies `is_so`.
    pub fn wait_for(&self, what: &str, is_so: impl Fn(&Value) -> bool) -> anyhow::Result<()> {
        let waited = wait(what, || Ok(self.status().is_ok_and(|status| is_so(&status))));
        waited.map(drop).with_context(|| {
            let status = self.status().map_or_else(|error| error.to_string(), |it| it.to_string());
            format!("{}: {status}", self.name)
        })
    }

    /// Waits until at least `ways` of the daemon's tunnels (carriers) are warm, that is, ready for connections.
    pub fn wait_warm(&self, ways: usize) -> anyhow::Result<()> {
        self.wait_for("warm carriers", |status| {
            let carriers = status.pointer("/status/carry/carriers").and_then(Value::as_array);
            let is_warm = |carrier: &&Value| carrier["state"] == "warm";
            carriers.is_some_and(|all| all.iter().filter(is_warm).count() >= ways)
        })
    }

    /// Returns how many connections the daemon has tunnelled since its start.
    pub fn redirected(&self) -> anyhow::Result<u64> {
        self.status()?
            .pointer("/status/carry/verdicts/redirected")
            .and_then(Value::as_u64)
            .context("verdicts")
    }

    pub fn ask(&self, what: &str) -> anyhow::Result<Value> {
        let mut stream = BufReader::new(UnixStream::connect(self.socket())?);
        writeln!(stream.get_mut(), "{{\"do\":\"{what}\"}}")?;
        let mut line = String::new();
        stream.read_line(&mut line)?;
        Ok(serde_json::from_str(&line)?)
    }
}

/// Waits until `ready` returns true. Returns how long that took.
pub fn wait(what: &str, mut ready: impl FnMut() -> anyhow::Result<bool>) -> anyhow::Result<Duration> {
    let start = Instant::now();
    while !ready()? {
        if start.elapsed() > LIMIT {
            bail!("timed out after {LIMIT:?} waiting for {what}");
        }
        std::thread::sleep(LOOK);
    }
    Ok(start.elapsed())
}
