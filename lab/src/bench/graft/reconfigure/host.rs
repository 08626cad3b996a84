//! A host with a daemon of packet grafts: its settings, and what it is asked.

use anyhow::Context as _;
use serde_json::{Value, json};

use super::super::daemon::Daemon;
use super::Args;
use crate::bench::site::{SUBSCRIBERS_LINK, Site};
use crate::lab::Node;

pub const PORT: u16 = 7000;
const SESSION: &str = "bench";
/// Of the messages that may be given up, per mille.
pub const GIVE_UP: u64 = 20;
const DEADLINE_MS: u32 = 100;

/// The graft for short paths, and that for long ones.
pub const FULL: &str = "full";
pub const PARTIAL: &str = "partial";

pub struct Host(Daemon);

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
        let rule = if has_rule { rule(args) } else { String::new() };
        Ok(Self(Daemon::start(site, name, node, &(settings(node, peer, args)? + &rule))?))
    }

    pub fn session(&self) -> anyhow::Result<Session> {
        let status = self.0.status()?;
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
        Ok(self.0.status()?["sessions"][0]["packets"].take())
    }

    /// `false`: another change is not over yet.
    pub fn swap(&self, graft: &str) -> anyhow::Result<bool> {
        let busy = millrace_graft::Error::Busy(SESSION.to_owned()).to_string();
        match self.0.ask(&json!({ "do": "swap", "session": SESSION, "graft": graft })) {
            Ok(_) => Ok(true),
            Err(error) if error.to_string().contains(&busy) => Ok(false),
            Err(error) => Err(error),
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
