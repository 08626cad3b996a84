//! `bench graft sessions`: the delay of packets and the resources of two daemons, with one session and with many.

mod delay;
mod memory;
mod receive;
mod room;

use std::path::PathBuf;

use anyhow::{Context as _, ensure};
use serde_json::Value;

use super::daemon::DaemonProcess;
use super::line::{self, PEER};
use crate::bench::site::{BenchSite, SUBSCRIBERS_LINK};
use crate::bench::table::write_json;
use crate::bench::usage::warn_if_busy;
use crate::lab::{LabNode, Topology};

#[derive(Debug, clap::Args)]
pub struct SessionArgs {
    /// Measurements to make: the delay of messages, memory, ways to deliver messages to applications, or ways to notify
    /// a sender of space in its send window
    #[arg(
        long,
        value_enum,
        value_delimiter = ',',
        default_value = "delay,memory,receive,room",
        value_name = "PART"
    )]
    parts: Vec<SessionPart>,
    /// Numbers of sessions that the messages are divided among
    #[arg(long, value_delimiter = ',', default_value = "1,64", value_name = "COUNT")]
    sessions: Vec<u16>,
    /// Messages per second, of all sessions together
    #[arg(long, default_value_t = 1000, value_name = "COUNT")]
    rate: u32,
    /// Size of a message, bytes
    #[arg(long, default_value_t = 200)]
    bytes: usize,
    /// Length of each run, seconds
    #[arg(long, default_value_t = 5)]
    seconds: u64,
    /// Number of runs of each measurement
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Numbers of sessions for which memory is measured
    #[arg(long, value_delimiter = ',', default_value = "1,64,10000", value_name = "COUNT")]
    memory_sessions: Vec<u16>,
    /// Round-trip times in the measurement of senders that wait for space in their send window
    #[arg(long, value_delimiter = ',', default_value = "20,100", value_name = "MS")]
    room_rtt_ms: Vec<u32>,
    /// Write the results to this file, as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum SessionPart {
    Delay,
    Memory,
    Receive,
    Room,
}

/// First port of the sending host's sessions. Each session has a port of its own there, and the other host uses `PORT`
/// for all sessions.
const FIRST_PORT: u16 = 20_000;
const PORT: u16 = 7000;
/// Largest number of sessions that a daemon's settings allow.
const SESSIONS_MAX: u16 = 16_384;

pub fn run(args: SessionArgs) -> anyhow::Result<()> {
    ensure!(
        args.rounds > 0 && args.seconds > 0 && args.rate > 0,
        "--rounds, --seconds and --rate must be at least 1"
    );
    ensure!((16..=1400).contains(&args.bytes), "--bytes must be from 16 to 1400");
    let mut counts = args.sessions.iter().chain(&args.memory_sessions);
    ensure!(
        counts.all(|count| (1..=SESSIONS_MAX).contains(count)),
        "--sessions and --memory-sessions must be from 1 to {SESSIONS_MAX}"
    );
    warn_if_busy()?;
    let site = BenchSite::new(&Topology::standard(1, 1))?;
    let mut rows: Vec<Value> = Vec::new();
    for part in &args.parts {
        let (part, text) = match part {
            SessionPart::Delay => delay::run(&args, &site)?,
            SessionPart::Memory => memory::run(&args, &site)?,
            SessionPart::Receive => receive::run(&args, &site)?,
            SessionPart::Room => room::run(&args)?,
        };
        rows.extend(part);
        print!("{text}");
    }
    args.json.as_deref().map_or(Ok(()), |path| write_json(path, &rows))
}

/// Two daemons with many unencrypted sessions of the same graft.
struct SessionPair {
    near: DaemonProcess,
    far: DaemonProcess,
}

impl SessionPair {
    /// Starts both daemons. `head` is prepended to their settings.
    fn start(site: &BenchSite, sessions: u16, functions: &[&str], head: &str) -> anyhow::Result<Self> {
        let near = site.relay()?;
        let far = site.subscribers()?;
        let text = |node: &LabNode, is_near: bool| -> anyhow::Result<String> {
            let other = if is_near { far } else { near };
            let known = line::peer(site.directory(), [node, other].map(|it| it.addr_v4().into()), "40000")?;
            let device = &node.interface(SUBSCRIBERS_LINK).context("no interface")?.device;
            let mut text = format!(
                "[sessions]\ninterface = [{device:?}]\nmax-sessions = {sessions}\n{head}\n\
                 [[graft]]\nname = \"measured\"\nfunctions = {functions:?}\n{known}"
            );
            for at in 0..sessions {
                let ends =
                    [format!("{}:{}", near.addr_v4(), FIRST_PORT + at), format!("{}:{PORT}", far.addr_v4())];
                let [local, remote] = if is_near { [&ends[0], &ends[1]] } else { [&ends[1], &ends[0]] };
                text += &format!(
                    "[[session]]\nname = \"s{at}\"\nlocal = \"{local}\"\nremote = \"{remote}\"\npeer = \"{PEER}\"\n\
                     clear = true\ngraft = \"measured\"\n"
                );
            }
            Ok(text)
        };
        let pair = Self {
            near: DaemonProcess::start(site, "near", near, &text(near, true)?)?,
            far: DaemonProcess::start(site, "far", far, &text(far, false)?)?,
        };
        pair.near.wait_for_keys()?;
        pair.far.wait_for_keys()?;
        Ok(pair)
    }
}
