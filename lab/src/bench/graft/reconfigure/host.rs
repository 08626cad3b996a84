//! A host with a daemon for packet grafts: its settings, and requests to the daemon.

use anyhow::Context as _;
use serde_json::{Value, json};

use super::super::daemon::DaemonProcess;
use super::super::line::{self, PEER};
use super::ReconfigureArgs;
use crate::bench::site::{BenchSite, SUBSCRIBERS_LINK};
use crate::lab::LabNode;

pub const PORT: u16 = 7000;
const SESSION: &str = "bench";
/// Largest share of messages that partial reliability may leave undelivered, per mille.
pub const GIVE_UP: u64 = 20;
const DEADLINE_MS: u32 = 100;

/// Name of the graft for short round-trip times, with full reliability. The next constant, `PARTIAL`, is the name of
/// the graft for long ones, with partial reliability.
pub const FULL: &str = "full";
pub const PARTIAL: &str = "partial";

pub struct ReconfigureHost(DaemonProcess);

/// The session's state, as the daemon reports it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct HostSession {
    pub graft: String,
    pub changing: bool,
    pub rtt_ms: Option<f64>,
    /// Reason of the latest graft change, if a rule made it.
    pub why: Option<String>,
    /// Problems that the daemon reports.
    pub trouble: Vec<String>,
}

impl ReconfigureHost {
    /// Starts the daemon. With `has_rule`, a rule makes the daemon change the graft itself.
    pub fn start(
        site: &BenchSite,
        name: &'static str,
        [node, peer]: [&LabNode; 2],
        args: &ReconfigureArgs,
        has_rule: bool,
    ) -> anyhow::Result<Self> {
        let rule = if has_rule { rule(args) } else { String::new() };
        Ok(Self(DaemonProcess::start(site, name, node, &(settings(site, node, peer, args)? + &rule))?))
    }

    pub fn wait_for_keys(&self) -> anyhow::Result<()> {
        self.0.wait_for_keys()
    }

    pub fn session(&self) -> anyhow::Result<HostSession> {
        let status = self.0.status()?;
        let session = &status["sessions"][0];
        let text = |value: &Value| value.as_str().map(str::to_owned);
        Ok(HostSession {
            graft: text(&session["graft"]).context("the daemon does not know the session")?,
            changing: !session["changing_to"].is_null(),
            rtt_ms: session["round_trip_us"].as_f64().map(|us| us / 1e3),
            why: text(&session["changed"]["why"]),
            trouble: status["trouble"].as_array().into_iter().flatten().filter_map(text).collect(),
        })
    }

    /// Returns the daemon's counters of the session's packets, by the reason why they were passed or dropped.
    pub fn packets(&self) -> anyhow::Result<Value> {
        Ok(self.0.status()?["sessions"][0]["packets"].take())
    }

    /// Requests a change of the graft. Returns `false` if an earlier change is still under way.
    pub fn swap(&self, graft: &str) -> anyhow::Result<bool> {
        let busy = millrace_graft::Error::Busy(SESSION.to_owned()).to_string();
        match self.0.ask(&json!({ "do": "swap_session", "session": SESSION, "graft": graft })) {
            Ok(_) => Ok(true),
            Err(error) if error.to_string().contains(&busy) => Ok(false),
            Err(error) => Err(error),
        }
    }
}

fn settings(
    site: &BenchSite,
    node: &LabNode,
    peer: &LabNode,
    args: &ReconfigureArgs,
) -> anyhow::Result<String> {
    let known = line::peer(site.directory(), [node, peer].map(|it| it.addr_v4().into()), "40000")?;
    let device = &node.interface(SUBSCRIBERS_LINK).context("no interface")?.device;
    Ok(format!(
        "[sessions]\ninterface = [{device:?}]\n\
         [sessions.parameters.window]\npackets = {window}\n\
         [sessions.parameters.gobackn]\nretry_us = {retry}\n\
         [sessions.parameters.partial]\nretry_us = {retry}\ndeadline_ms = {DEADLINE_MS}\ngive_up_permille = {GIVE_UP}\n\
         [[graft]]\nname = \"{FULL}\"\nfunctions = [\"window\", \"gobackn\", \"number\", \"acknowledge\"]\n\
         [[graft]]\nname = \"{PARTIAL}\"\nfunctions = [\"window\", \"number\", \"partial\", \"acknowledge\"]\n\
         {known}[[session]]\nname = \"{SESSION}\"\nlocal = \"{}:{PORT}\"\nremote = \"{}:{PORT}\"\npeer = \"{PEER}\"\n\
         clear = true\ngraft = \"{FULL}\"\n",
        node.addr_v4(),
        peer.addr_v4(),
        window = args.window,
        retry = u64::from(args.far_rtt_ms) * 1500 + 20_000,
    ))
}

fn rule(args: &ReconfigureArgs) -> String {
    let from = args.at_rtt_ms;
    let until = args.until_rtt_ms();
    format!(
        "[[session.when]]\nrtt-ms = {from}\nuntil-rtt-ms = {until}\nfor-ms = 500\ngraft = \"{PARTIAL}\"\n"
    )
}
