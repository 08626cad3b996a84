//! `millrace fanout`: runs the RTP fan-out, sends requests to a running one (status, reload, trace), and receives its
//! streams.

use std::{
    net::SocketAddr,
    num::NonZero,
    path::PathBuf,
    time::{Duration, Instant},
};

use clap::Subcommand;
use millrace_cost_daemon::signals::CostSignals;
use millrace_daemon::{
    expect_answer,
    render::{line, print, width},
};
use millrace_fanout_daemon::{
    DEFAULT_SOCKET,
    config::Settings,
    daemon::{FanoutAnswer, FanoutRequest, FanoutSetup, ask, run as serve},
    receive::{self, ReceiverSource},
    text,
    trace::{FanoutTraceFilter, FanoutTraceLine, TraceEvents},
};
use millrace_relay_daemon::config::DurationValue;

use super::daemon;

#[derive(Debug, clap::Args)]
pub struct FanoutCommandArgs {
    #[command(subcommand)]
    verb: FanoutVerb,
}

#[derive(Debug, Subcommand)]
enum FanoutVerb {
    /// Run the fan-out: forward the RTP streams that a settings file names
    Run(FanoutRunArgs),
    /// Check a settings file and exit
    Check {
        /// TOML file with the fan-out's interfaces and streams
        #[arg(long, value_name = "FILE")]
        config: PathBuf,
    },
    /// Show the streams of a running fan-out, their receivers, and packets that were not sent
    Status {
        #[command(flatten)]
        socket: FanoutSocketArg,
        /// Print the result as JSON
        #[arg(long)]
        json: bool,
    },
    /// Make a running fan-out read its settings again; streams that the new settings also have are not interrupted
    Reload {
        #[command(flatten)]
        socket: FanoutSocketArg,
    },
    /// Trace single packets of RTP senders, and each copy for a receiver
    Trace(FanoutTraceArgs),
    /// Request a stream from a fan-out, and pass its packets to a player on this host
    Receive(FanoutReceiveArgs),
}

#[derive(Debug, clap::Args)]
#[command(
    mut_arg("socket", |arg| arg.default_value(DEFAULT_SOCKET)),
    mut_arg("http", |arg| arg.default_value("127.0.0.1:9189"))
)]
struct FanoutRunArgs {
    /// TOML file with the fan-out's interfaces and streams
    #[arg(long, value_name = "FILE")]
    config: PathBuf,
    #[command(flatten)]
    daemon: daemon::DaemonFlags,
}

#[derive(Debug, clap::Args)]
struct FanoutSocketArg {
    /// Control socket of the running fan-out
    #[arg(long, value_name = "PATH", default_value = DEFAULT_SOCKET)]
    socket: PathBuf,
}

#[derive(Debug, clap::Args)]
struct FanoutTraceArgs {
    /// Trace only packets of this stream
    #[arg(long, value_name = "NAME")]
    stream: Option<String>,
    /// Trace only copies for this receiver of the stream
    #[arg(long, value_name = "ADDR:PORT", requires = "stream")]
    receiver: Option<SocketAddr>,
    /// Trace only packets whose RTP sequence number is a multiple of N
    #[arg(long, value_name = "N", default_value = "1")]
    every: NonZero<u32>,
    /// Stop after this number of traced packets and copies
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    count: Option<u64>,
    /// Stop after this time: 90s, 10m, or a number of seconds
    #[arg(long, value_name = "TIME")]
    duration: Option<DurationValue>,
    /// Print packets as JSON, one per line
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    socket: FanoutSocketArg,
}

#[derive(Debug, clap::Args)]
struct FanoutReceiveArgs {
    /// The stream, as HOST:PORT/STREAM
    source: ReceiverSource,
    /// Address where the player listens for RTP, usually 127.0.0.1:PORT
    #[arg(long, value_name = "ADDR:PORT")]
    to: SocketAddr,
    /// Address where the player listens for RTCP [default: the same as --to]
    #[arg(long, value_name = "ADDR:PORT")]
    to_rtcp: Option<SocketAddr>,
    /// Time that the fan-out continues to send after the last request; this command renews its request until it ends
    #[arg(long, value_name = "TIME", default_value = "30s")]
    lease: DurationValue,
    /// Stop after this time: 90s, 10m, or a number of seconds
    #[arg(long, value_name = "TIME")]
    duration: Option<DurationValue>,
}

pub fn run(args: FanoutCommandArgs) -> anyhow::Result<()> {
    match args.verb {
        FanoutVerb::Run(args) => {
            let front = args.daemon.front();
            args.daemon.run(serve(FanoutSetup { config: args.config, front }))
        }
        FanoutVerb::Check { config } => {
            Settings::read(&config)?;
            print("the settings are usable\n")
        }
        FanoutVerb::Status { socket, json } => {
            let status = expect_answer!(ask(&socket.socket, &FanoutRequest::Status)?, FanoutAnswer::Status)?;
            print(&match json {
                true => serde_json::to_string_pretty(&status)? + "\n",
                false => text::status(&status, width()),
            })
        }
        FanoutVerb::Reload { socket } => {
            ask(&socket.socket, &FanoutRequest::Reload)?;
            print("the settings were read again\n")
        }
        FanoutVerb::Trace(args) => trace(&args),
        FanoutVerb::Receive(args) => {
            let setup = receive::ReceiverSetup {
                source: args.source,
                to: args.to,
                to_rtcp: args.to_rtcp,
                lease: args.lease.0,
                duration: args.duration.map(|DurationValue(time)| time),
            };
            receive::run(&setup, &CostSignals::block()?)
        }
    }
}

/// Interval at which the command fetches new events of the trace from the daemon.
const PERIOD: Duration = Duration::from_millis(250);

fn trace(args: &FanoutTraceArgs) -> anyhow::Result<()> {
    let signals = CostSignals::block()?;
    let follow =
        FanoutTraceFilter { stream: args.stream.clone(), receiver: args.receiver, every: Some(args.every) };
    let look = || -> anyhow::Result<TraceEvents> {
        expect_answer!(ask(&args.socket.socket, &FanoutRequest::Trace(follow.clone()))?, FanoutAnswer::Traced)
    };
    // The first request starts the trace in the daemon.
    look()?;
    if !args.json {
        let mut head = String::new();
        line(&mut head, width(), FanoutTraceLine::HEAD);
        print(&head)?;
    }
    let end = args.duration.and_then(|DurationValue(time)| Instant::now().checked_add(time));
    let mut shown = 0;
    let mut lost = 0;
    loop {
        let is_over = signals.wait(PERIOD)? || end.is_some_and(|end| Instant::now() >= end);
        let seen = look()?;
        lost += seen.lost;
        let left = args.count.map_or(u64::MAX, |count| count - shown);
        let some = seen.packets.iter().take(usize::try_from(left).unwrap_or(usize::MAX));
        let text = lines(some, args.json)?;
        shown += seen.packets.len().min(usize::try_from(left).unwrap_or(usize::MAX)) as u64;
        print(&text)?;
        if is_over || args.count.is_some_and(|count| shown >= count) {
            break;
        }
    }
    ask(&args.socket.socket, &FanoutRequest::Untrace(follow.clone()))?;
    if lost > 0 {
        eprintln!(
            "note: {lost} more trace lines were lost because a buffer was full; trace fewer packets with --every or --stream"
        );
    }
    Ok(())
}

fn lines<'a>(packets: impl Iterator<Item = &'a FanoutTraceLine>, json: bool) -> anyhow::Result<String> {
    let mut text = String::new();
    for packet in packets {
        match json {
            true => text.push_str(&(serde_json::to_string(packet)? + "\n")),
            false => line(&mut text, width(), &packet.to_string()),
        }
    }
    Ok(text)
}
