//! A daemon of packet grafts, as users have it: `millrace graft packets run` on a host.

use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, bail};
use serde_json::{Value, json};

use crate::bench::process::Process;
use crate::bench::site::Site;
use crate::lab::Node;
use crate::program::product;

const START: Duration = Duration::from_secs(120);

pub struct Daemon {
    process: Process,
    socket: PathBuf,
}

impl Daemon {
    /// With these settings, which may name a file `key`; until its joints are there.
    pub fn start(site: &Site, name: &'static str, node: &Node, settings: &str) -> anyhow::Result<Self> {
        let path = |end: &str| site.directory().join(format!("{name}.{end}"));
        std::fs::write(site.directory().join("key"), "00112233445566778899aabbccddeeff")?;
        std::fs::write(path("toml"), settings)?;
        let mut command = node.command(product()?);
        command.args(["graft", "packets", "run", "--http=off", "--config"]).arg(path("toml"));
        command.arg("--socket").arg(path("sock")).arg("--messages-socket").arg(path("messages"));
        let process = Process::start(name, command, site.directory())?;
        let mut daemon = Self { process, socket: path("sock") };
        let socket = daemon.socket.clone();
        daemon.process.wait_until("its socket", START, || UnixStream::connect(&socket).is_ok())?;
        // The socket is there before the joints are; it is answered when they are.
        daemon.status().with_context(|| daemon.process.last_words())?;
        Ok(daemon)
    }

    pub fn id(&self) -> u32 {
        self.process.id()
    }

    pub fn status(&self) -> anyhow::Result<Value> {
        Ok(self.ask(&json!({ "do": "status" }))?["status"].take())
    }

    pub fn ask(&self, request: &Value) -> anyhow::Result<Value> {
        let mut stream = BufReader::new(UnixStream::connect(&self.socket)?);
        writeln!(stream.get_mut(), "{request}")?;
        let mut line = String::new();
        stream.read_line(&mut line)?;
        let answer: Value = serde_json::from_str(&line)?;
        match answer["ok"].as_bool() {
            Some(true) => Ok(answer),
            _ => bail!("the daemon: {}", answer["error"].as_str().unwrap_or("no answer")),
        }
    }
}
