//! A host with a daemon of grafts, in a cgroup of its own.

use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::ensure;
use serde_json::Value;

use super::cgroup::Cgroup;
use crate::bench::process::Process;
use crate::lab::Node;

pub const LIMIT: Duration = Duration::from_secs(60);

pub struct Host<'a> {
    name: &'static str,
    pub node: &'a Node,
    pub cgroup: Cgroup,
    pub directory: PathBuf,
}

impl<'a> Host<'a> {
    /// What it writes goes into a directory that it makes in another.
    pub fn new(name: &'static str, node: &'a Node, directory: &Path) -> anyhow::Result<Self> {
        fs::create_dir_all(directory)?;
        Ok(Self { name, node, cgroup: Cgroup::new(name)?, directory: directory.to_owned() })
    }

    /// Makes its key: what the other knows it by.
    pub fn key(&self) -> anyhow::Result<String> {
        let mut command = Command::new(std::env::current_exe()?);
        let made = command.args(["graft", "key", "--new"]).arg(self.directory.join("host.key")).output()?;
        ensure!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        Ok(String::from_utf8(made.stdout)?.trim().to_owned())
    }

    /// Settings that begin with its cgroup.
    pub fn configure(&self, rest: &str) -> anyhow::Result<()> {
        let text = format!("cgroup = {:?}\n{rest}", self.cgroup.path());
        Ok(fs::write(self.directory.join("graft.toml"), text)?)
    }

    fn socket(&self) -> PathBuf {
        self.directory.join("graft.sock")
    }

    pub fn start(&self) -> anyhow::Result<Process> {
        let mut daemon = self.node.command(std::env::current_exe()?);
        daemon.args(["graft", "run", "--http=off", "--config"]).arg(self.directory.join("graft.toml"));
        daemon.arg("--socket").arg(self.socket());
        let mut process = Process::start(self.name, self.cgroup.command(&daemon), &self.directory)?;
        process.wait_until("its socket", LIMIT, || UnixStream::connect(self.socket()).is_ok())?;
        Ok(process)
    }

    pub fn status(&self) -> anyhow::Result<Value> {
        let mut stream = BufReader::new(UnixStream::connect(self.socket())?);
        stream.get_mut().write_all(b"{\"do\":\"status\"}\n")?;
        let mut line = String::new();
        stream.read_line(&mut line)?;
        Ok(serde_json::from_str(&line)?)
    }
}
