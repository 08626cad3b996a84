//! `bench graft sessions`: what packets wait and daemons take, with one session and with many, between two daemons as users have them.

mod delay;
mod memory;
mod receive;
mod room;

use std::path::PathBuf;

use anyhow::{Context as _, ensure};
use serde_json::Value;

use super::daemon::Daemon;
use crate::bench::site::{SUBSCRIBERS_LINK, Site};
use crate::bench::table::write_json;
use crate::bench::usage::warn_if_busy;
use crate::lab::{Node, Topology};

#[derive(Debug, clap::Args)]
pub struct Args {
    /// What is measured: the delay of messages, memory, how what comes gets to applications, or how they learn of room to send
    #[arg(
        long,
        value_enum,
        value_delimiter = ',',
        default_value = "delay,memory,receive,room",
        value_name = "PART"
    )]
    parts: Vec<Part>,
    /// Sessions that share the messages
    #[arg(long, value_delimiter = ',', default_value = "1,64", value_name = "COUNT")]
    sessions: Vec<u16>,
    /// Messages a second, of all sessions together
    #[arg(long, default_value_t = 1000, value_name = "COUNT")]
    rate: u32,
    /// Of a message
    #[arg(long, default_value_t = 200)]
    bytes: usize,
    /// Of each run
    #[arg(long, default_value_t = 5)]
    seconds: u64,
    /// Runs of each
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Sessions that memory is looked at with
    #[arg(long, value_delimiter = ',', default_value = "1,64,10000", value_name = "COUNT")]
    memory_sessions: Vec<u16>,
    /// Round trips of senders that wait for room
    #[arg(long, value_delimiter = ',', default_value = "20,100", value_name = "MS")]
    room_rtt_ms: Vec<u32>,
    /// Write the rows here
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Part {
    Delay,
    Memory,
    Receive,
    Room,
}

/// Of the one host; the other one has `PORT` for all of them.
const FIRST_PORT: u16 = 20_000;
const PORT: u16 = 7000;
/// As settings have it.
const SESSIONS_MAX: u16 = 16_384;

pub fn run(args: Args) -> anyhow::Result<()> {
    ensure!(
        args.rounds > 0 && args.seconds > 0 && args.rate > 0,
        "--rounds, --seconds and --rate are at least 1"
    );
    ensure!((16..=1400).contains(&args.bytes), "--bytes are from 16 to 1400");
    let mut counts = args.sessions.iter().chain(&args.memory_sessions);
    ensure!(
        counts.all(|count| (1..=SESSIONS_MAX).contains(count)),
        "--sessions and --memory-sessions are from 1 to {SESSIONS_MAX}"
    );
    warn_if_busy()?;
    let site = Site::new(&Topology::standard(1, 1))?;
    let mut rows: Vec<Value> = Vec::new();
    for part in &args.parts {
        let (part, text) = match part {
            Part::Delay => delay::run(&args, &site)?,
            Part::Memory => memory::run(&args, &site)?,
            Part::Receive => receive::run(&args, &site)?,
            Part::Room => room::run(&args)?,
        };
        rows.extend(part);
        print!("{text}");
    }
    args.json.as_deref().map_or(Ok(()), |path| write_json(path, &rows))
}

/// So many sessions with one graft, in clear, and a daemon at either end.
struct Pair {
    near: Daemon,
    far: Daemon,
}

impl Pair {
    /// `head`: what settings have in front.
    fn start(site: &Site, sessions: u16, functions: &[&str], head: &str) -> anyhow::Result<Self> {
        let (near, far) = (site.relay()?, site.subscribers()?);
        let text = |node: &Node, is_near: bool| -> anyhow::Result<String> {
            let device = &node.interface(SUBSCRIBERS_LINK).context("no interface")?.device;
            let mut text = format!(
                "interface = [{device:?}]\nsessions = {sessions}\n{head}\n\
                 [[graft]]\nname = \"measured\"\nfunctions = {functions:?}\n"
            );
            for at in 0..sessions {
                let ends =
                    [format!("{}:{}", near.addr_v4(), FIRST_PORT + at), format!("{}:{PORT}", far.addr_v4())];
                let [local, remote] = if is_near { [&ends[0], &ends[1]] } else { [&ends[1], &ends[0]] };
                text += &format!(
                    "[[session]]\nname = \"s{at}\"\nlocal = \"{local}\"\nremote = \"{remote}\"\nkey-file = \"key\"\n\
                     clear = true\ngraft = \"measured\"\n"
                );
            }
            Ok(text)
        };
        Ok(Self {
            near: Daemon::start(site, "near", near, &text(near, true)?)?,
            far: Daemon::start(site, "far", far, &text(far, false)?)?,
        })
    }
}
