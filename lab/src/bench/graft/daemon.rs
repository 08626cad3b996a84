//! Runs a daemon for packet grafts as users do, by `millrace graft run` on a host.

use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, bail};
use serde_json::{Value, json};

use super::host::wait;
use crate::bench::process::BenchProcess;
use crate::bench::site::BenchSite;
use crate::lab::LabNode;
use crate::program::product;

const START: Duration = Duration::from_secs(120);

pub struct DaemonProcess {
    process: BenchProcess,
    socket: PathBuf,
}

impl DaemonProcess {
    /// Starts a daemon with these settings, which may refer to files that `line::peer` created. Waits until its hooks
    /// are attached.
    pub fn start(
        site: &BenchSite,
        name: &'static str,
        node: &LabNode,
        settings: &str,
    ) -> anyhow::Result<Self> {
        let path = |end: &str| site.directory().join(format!("{name}.{end}"));
        std::fs::write(path("toml"), settings)?;
        let mut command = node.command(product()?);
        command.args(["graft", "run", "--http=off", "--config"]).arg(path("toml"));
        command.arg("--socket").arg(path("sock")).arg("--messages-socket").arg(path("messages"));
        let process = BenchProcess::start(name, command, site.directory())?;
        let mut daemon = Self { process, socket: path("sock") };
        let socket = daemon.socket.clone();
        daemon.process.wait_until("its socket", START, || UnixStream::connect(&socket).is_ok())?;
        // The daemon's control socket exists before the hooks are attached. The daemon answers on it once they are
        // attached.
        daemon.status().with_context(|| daemon.process.last_words())?;
        Ok(daemon)
    }

    /// Waits until this daemon has agreed on keys with the other host's daemon for every graft session. The other
    /// daemon must run for that.
    pub fn wait_for_keys(&self) -> anyhow::Result<()> {
        let have = |status: Value| {
            let all = status["sessions"].as_array();
            all.is_some_and(|all| all.iter().all(|session| session["has_keys"] == true))
        };
        wait("the sessions' keys", || Ok(have(self.status()?))).map(drop)
    }

    pub fn id(&self) -> u32 {
        self.process.id()
    }

    pub fn status(&self) -> anyhow::Result<Value> {
        Ok(self.ask(&json!({ "do": "status" }))?["status"]["sessions"].take())
    }

    pub fn ask(&self, request: &Value) -> anyhow::Result<Value> {
        let mut stream = BufReader::new(UnixStream::connect(&self.socket)?);
        writeln!(stream.get_mut(), "{request}")?;
        let mut line = String::new();
        stream.read_line(&mut line)?;
        let answer: Value = serde_json::from_str(&line)?;
        match answer["ok"].as_bool() {
            Some(true) => Ok(answer),
            _ => bail!("the daemon reports: {}", answer["error"].as_str().unwrap_or("no answer")),
        }
    }
}
