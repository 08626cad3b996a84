//! A host with a daemon of packet grafts: its settings, and what it is asked.

use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, bail};
use serde_json::{Value, json};

use super::Args;
use crate::bench::process::Process;
use crate::bench::site::{SUBSCRIBERS_LINK, Site};
use crate::lab::Node;

pub const PORT: u16 = 7000;
const SESSION: &str = "bench";
const START: Duration = Duration::from_secs(60);
/// Of the messages that may be given up, per mille.
pub const GIVE_UP: u64 = 20;
const DEADLINE_MS: u32 = 100;

/// The graft for short paths, and that for long ones.
pub const FULL: &str = "full";
pub const PARTIAL: &str = "partial";

pub struct Host {
    process: Process,
    socket: PathBuf,
}

/// What the daemon knows of the session.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Session {
    pub graft: String,
    pub changing: bool,
    pub rtt_ms: Option<f64>,
    /// The latest change's, if a rule made it.
    pub why: Option<String>,
    /// Troubles of the daemon.
    pub trouble: Vec<String>,
}

impl Host {
    /// `has_rule`: it changes the graft itself.
    pub fn start(
        site: &Site,
        name: &'static str,
        [node, peer]: [&Node; 2],
        args: &Args,
        has_rule: bool,
    ) -> anyhow::Result<Self> {
        let path = |end: &str| site.directory().join(format!("{name}.{end}"));
        std::fs::write(site.directory().join("key"), "00112233445566778899aabbccddeeff")?;
        let rule = if has_rule { rule(args) } else { String::new() };
        std::fs::write(path("toml"), settings(node, peer, args)? + &rule)?;
        let mut command: Command = node.command(std::env::current_exe()?);
        command.args(["graft", "packets", "run", "--http=off", "--config"]).arg(path("toml"));
        command.arg("--socket").arg(path("sock"));
        let process = Process::start(name, command, site.directory())?;
        let mut host = Self { process, socket: path("sock") };
        let socket = host.socket.clone();
        host.process.wait_until("its socket", START, || UnixStream::connect(&socket).is_ok())?;
        // The socket is there before the joints are; it is answered when they are.
        host.session().with_context(|| host.process.last_words())?;
        Ok(host)
    }

    pub fn session(&self) -> anyhow::Result<Session> {
        let answer = self.ask(&json!({ "do": "status" }))?;
        let status = &answer["status"];
        let session = &status["sessions"][0];
        let text = |value: &Value| value.as_str().map(str::to_owned);
        Ok(Session {
            graft: text(&session["graft"]).context("the daemon does not know the session")?,
            changing: !session["changing_to"].is_null(),
            rtt_ms: session["round_trip_us"].as_f64().map(|us| us / 1e3),
            why: text(&session["changed"]["why"]),
            trouble: status["trouble"].as_array().into_iter().flatten().filter_map(text).collect(),
        })
    }

    /// What became of its packets, by the names of the reasons.
    pub fn packets(&self) -> anyhow::Result<Value> {
        Ok(self.ask(&json!({ "do": "status" }))?["status"]["sessions"][0]["packets"].clone())
    }

    /// `false`: another change is not over yet.
    pub fn swap(&self, graft: &str) -> anyhow::Result<bool> {
        match self.ask(&json!({ "do": "swap", "session": SESSION, "graft": graft })) {
            Ok(_) => Ok(true),
            Err(error) if error.to_string().contains("under way") => Ok(false),
            Err(error) => Err(error),
        }
    }

    fn ask(&self, request: &Value) -> anyhow::Result<Value> {
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

fn settings(node: &Node, peer: &Node, args: &Args) -> anyhow::Result<String> {
    let device = &node.interface(SUBSCRIBERS_LINK).context("no interface")?.device;
    Ok(format!(
        "interface = [{device:?}]\n\
         [parameters.window]\npackets = {window}\n\
         [parameters.gobackn]\nretry_us = {retry}\n\
         [parameters.partial]\nretry_us = {retry}\ndeadline_ms = {DEADLINE_MS}\ngive_up_permille = {GIVE_UP}\n\
         [[graft]]\nname = \"{FULL}\"\nfunctions = [\"window\", \"gobackn\", \"number\", \"acknowledge\"]\n\
         [[graft]]\nname = \"{PARTIAL}\"\nfunctions = [\"window\", \"number\", \"partial\", \"acknowledge\"]\n\
         [[session]]\nname = \"{SESSION}\"\nlocal = \"{}:{PORT}\"\nremote = \"{}:{PORT}\"\nkey-file = \"key\"\n\
         clear = true\ngraft = \"{FULL}\"\n",
        node.addr_v4(),
        peer.addr_v4(),
        window = args.window,
        retry = u64::from(args.far_rtt_ms) * 1500 + 20_000,
    ))
}

fn rule(args: &Args) -> String {
    let (from, until) = (args.at_rtt_ms, args.until_rtt_ms());
    format!(
        "[[session.when]]\nrtt-ms = {from}\nuntil-rtt-ms = {until}\nfor-ms = 500\ngraft = \"{PARTIAL}\"\n"
    )
}
