//! `millrace fanout`.

use std::{
    net::SocketAddr,
    num::NonZero,
    path::PathBuf,
    time::{Duration, Instant},
};

use clap::Subcommand;
use millrace_cost_daemon::signals::Signals;
use millrace_daemon::{
    expect_answer,
    render::{line, print, width},
};
use millrace_fanout_daemon::{
    DEFAULT_SOCKET,
    config::Settings,
    daemon::{Answer, Request, Setup, ask, run as serve},
    receive::{self, Source},
    text,
    trace::{Follow, Packet, Seen},
};
use millrace_relay_daemon::config::Seconds;

use super::daemon;

#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Fan out streams in the kernel, as a settings file says
    Run(Run),
    /// Check a settings file and exit
    Check {
        /// TOML file with interfaces and streams
        #[arg(long, value_name = "FILE")]
        config: PathBuf,
    },
    /// Show streams, who receives them, and what was not sent
    Status {
        #[command(flatten)]
        socket: SocketArg,
        #[arg(long)]
        json: bool,
    },
    /// Have the settings read again: streams and receivers come, go and change while others go on
    Reload {
        #[command(flatten)]
        socket: SocketArg,
    },
    /// Follow single packets of senders, and what became of each copy
    Trace(Trace),
    /// Ask for a stream, and hand its packets over to a player here
    Receive(Receive),
}

#[derive(Debug, clap::Args)]
#[command(
    mut_arg("socket", |arg| arg.default_value(DEFAULT_SOCKET)),
    mut_arg("http", |arg| arg.default_value("127.0.0.1:9189"))
)]
struct Run {
    /// TOML file with interfaces and streams
    #[arg(long, value_name = "FILE")]
    config: PathBuf,
    #[command(flatten)]
    daemon: daemon::Flags,
}

#[derive(Debug, clap::Args)]
struct SocketArg {
    /// Socket of the running fan-out
    #[arg(long, value_name = "PATH", default_value = DEFAULT_SOCKET)]
    socket: PathBuf,
}

#[derive(Debug, clap::Args)]
struct Trace {
    /// Only of this stream
    #[arg(long, value_name = "NAME")]
    stream: Option<String>,
    /// Of copies, only those for this receiver of the stream
    #[arg(long, value_name = "ADDR:PORT", requires = "stream")]
    receiver: Option<SocketAddr>,
    /// Only packets whose sequence number is a multiple of this
    #[arg(long, value_name = "N", default_value = "1")]
    every: NonZero<u32>,
    /// End after so many lines
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    count: Option<u64>,
    /// End after this time: 90s, 10m, or a number of seconds
    #[arg(long, value_name = "TIME")]
    duration: Option<Seconds>,
    /// Print packets as JSON, one per line
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    socket: SocketArg,
}

#[derive(Debug, clap::Args)]
struct Receive {
    /// HOST:PORT/STREAM
    source: Source,
    /// Where a player listens for RTP, mostly 127.0.0.1:PORT
    #[arg(long, value_name = "ADDR:PORT")]
    to: SocketAddr,
    /// Where it listens for RTCP, if not there
    #[arg(long, value_name = "ADDR:PORT")]
    to_rtcp: Option<SocketAddr>,
    /// How long the relay goes on when this has ended without a word; it is asked again in time
    #[arg(long, value_name = "TIME", default_value = "30s")]
    lease: Seconds,
    /// End after this time: 90s, 10m, or a number of seconds
    #[arg(long, value_name = "TIME")]
    duration: Option<Seconds>,
}

pub fn run(args: Args) -> anyhow::Result<()> {
    match args.verb {
        Verb::Run(args) => {
            let front = args.daemon.front();
            args.daemon.run(serve(Setup { config: args.config, front }))
        }
        Verb::Check { config } => {
            Settings::read(&config)?;
            print("the settings are usable\n")
        }
        Verb::Status { socket, json } => {
            let status = expect_answer!(ask(&socket.socket, &Request::Status)?, Answer::Status)?;
            print(&match json {
                true => serde_json::to_string_pretty(&status)? + "\n",
                false => text::status(&status, width()),
            })
        }
        Verb::Reload { socket } => {
            ask(&socket.socket, &Request::Reload)?;
            print("the settings were read again\n")
        }
        Verb::Trace(args) => trace(&args),
        Verb::Receive(args) => {
            let setup = receive::Setup {
                source: args.source,
                to: args.to,
                to_rtcp: args.to_rtcp,
                lease: args.lease.0,
                duration: args.duration.map(|Seconds(time)| time),
            };
            receive::run(&setup, &Signals::block()?)
        }
    }
}

/// How often the fan-out is asked.
const PERIOD: Duration = Duration::from_millis(250);

fn trace(args: &Trace) -> anyhow::Result<()> {
    let signals = Signals::block()?;
    let follow = Follow { stream: args.stream.clone(), receiver: args.receiver, every: Some(args.every) };
    let look = || -> anyhow::Result<Seen> {
        expect_answer!(ask(&args.socket.socket, &Request::Trace(follow.clone()))?, Answer::Traced)
    };
    look()?;
    if !args.json {
        let mut head = String::new();
        line(&mut head, width(), Packet::HEAD);
        print(&head)?;
    }
    let end = args.duration.and_then(|Seconds(time)| Instant::now().checked_add(time));
    let (mut shown, mut lost) = (0, 0);
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
    ask(&args.socket.socket, &Request::Untrace(follow.clone()))?;
    if lost > 0 {
        eprintln!("note: {lost} more were lost for want of room; follow fewer with --every or --stream");
    }
    Ok(())
}

fn lines<'a>(packets: impl Iterator<Item = &'a Packet>, json: bool) -> anyhow::Result<String> {
    let mut text = String::new();
    for packet in packets {
        match json {
            true => text.push_str(&(serde_json::to_string(packet)? + "\n")),
            false => line(&mut text, width(), &packet.to_string()),
        }
    }
    Ok(text)
}
