//! `millrace gate trace`: asks a running gate again and again for the packets that it refuses, and shows them line by line.

use std::{
    io,
    os::fd::AsFd as _,
    time::{Duration, Instant},
};

use clap::builder::PossibleValuesParser;
use millrace_cost_daemon::signals::Signals;
use millrace_daemon::{
    expect_answer,
    render::{line, print, width},
};
use millrace_gate::{Prefix, Rule, Trace};
use millrace_gate_daemon::{
    control::{self, Answer, Request},
    trace::{Follow, Packet, Seen},
};
use millrace_relay_daemon::config::Seconds;
use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, PollTimeout, poll},
};
use serde::Serialize;

use super::SocketArg;

#[derive(Debug, clap::Args)]
#[command(
    after_help = "The kernel chooses by client, scope and rule, and has --rate for each who follows: packets of one client \
are seen through the floods of others. Up to 8 may follow at the same time."
)]
pub(super) struct Args {
    /// Only of clients in this prefix: 192.0.2.7, 2001:db8::/32
    #[arg(long, value_name = "PREFIX")]
    client: Option<Prefix>,
    /// Only to these scopes, repeatable
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    scope: Vec<String>,
    /// Only what these rules refuse, or would, repeatable
    #[arg(long, value_name = "NAME", value_delimiter = ',', value_parser = PossibleValuesParser::new(Rule::ALL.map(Rule::name)))]
    rule: Vec<String>,
    /// Packets a second at most; how many more there were is said each second, and at the end
    #[arg(
        long,
        value_name = "N",
        default_value_t = Follow::PER_SECOND,
        value_parser = clap::value_parser!(u32).range(1..=i64::from(Trace::PER_SECOND_MAX))
    )]
    rate: u32,
    /// End after so many packets
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

/// How often the gate is asked.
const PERIOD: Duration = Duration::from_millis(250);
/// How often it is said what is not shown.
const SUMS: Duration = Duration::from_secs(1);

pub(super) fn run(args: Args) -> anyhow::Result<()> {
    let signals = Signals::block()?;
    let mut gate = control::open(&args.socket.socket)?;
    let follow = Follow {
        client: args.client.map(|client| client.to_string()),
        scope: args.scope.clone(),
        rule: args.rule.clone(),
        per_second: Some(args.rate),
    };
    control::ask_more(&mut gate, &Request::Trace(follow))?;
    let mut shown = Shown::begin(&args)?;
    let end = args.duration.and_then(|Seconds(time)| Instant::now().checked_add(time));
    let is_over = || end.is_some_and(|end| Instant::now() >= end);
    loop {
        // Asked before the look, so that the last look is after the end.
        let over = is_over();
        let seen = expect_answer!(control::ask_more(&mut gate, &Request::Traced)?, Answer::Traced)?;
        shown.show(seen)?;
        if over || shown.is_enough() {
            break;
        }
        let left = end.map_or(PERIOD, |end| end.saturating_duration_since(Instant::now()).min(PERIOD));
        match wait(&signals, left)? {
            Waited::Out => {}
            Waited::ForSignal => {
                // What came until now.
                let seen = expect_answer!(control::ask_more(&mut gate, &Request::Traced)?, Answer::Traced)?;
                shown.show(seen)?;
                break;
            }
            Waited::ForNobody => return Ok(()),
        }
    }
    shown.end()
}

enum Waited {
    Out,
    ForSignal,
    /// Nobody reads what is printed any more.
    ForNobody,
}

fn wait(signals: &Signals, time: Duration) -> anyhow::Result<Waited> {
    let stdout = io::stdout();
    let mut ready =
        [PollFd::new(signals.as_fd(), PollFlags::POLLIN), PollFd::new(stdout.as_fd(), PollFlags::empty())];
    match poll(&mut ready, PollTimeout::try_from(time).unwrap_or(PollTimeout::MAX)) {
        Ok(_) => {}
        Err(Errno::EINTR) => return Ok(Waited::Out),
        Err(error) => return Err(error.into()),
    }
    Ok(match ready.map(|fd| fd.any().unwrap_or(false)) {
        [true, _] => Waited::ForSignal,
        [false, true] => Waited::ForNobody,
        [false, false] => Waited::Out,
    })
}

/// A line of JSON.
#[derive(Serialize)]
#[serde(tag = "event", rename_all = "snake_case")]
enum Event<'a> {
    /// The first line: packets are followed.
    Start {
        per_second: u32,
    },
    Packet(&'a Packet),
    /// Since the last of these.
    NotShown {
        left_out: u64,
        lost: u64,
    },
    End {
        packets: u64,
        left_out: u64,
        lost: u64,
    },
}

/// What was shown, and what was not.
struct Shown<'a> {
    args: &'a Args,
    packets: u64,
    /// As of the latest look.
    left_out: u64,
    lost: u64,
    said: Said,
}

/// What was said of packets that are not shown, and when.
struct Said {
    at: Instant,
    left_out: u64,
    lost: u64,
}

impl<'a> Shown<'a> {
    fn begin(args: &'a Args) -> anyhow::Result<Self> {
        if args.json {
            print(&(serde_json::to_string(&Event::Start { per_second: args.rate })? + "\n"))?;
        } else {
            let whose = args.client.map_or("everybody".to_owned(), |client| client.to_string());
            let mut text =
                format!("# what the gate refuses of {whose}, up to {} packets a second\n", args.rate);
            line(&mut text, width(), Packet::HEAD);
            print(&text)?;
        }
        let said = Said { at: Instant::now(), left_out: 0, lost: 0 };
        Ok(Self { args, packets: 0, left_out: 0, lost: 0, said })
    }

    fn is_enough(&self) -> bool {
        self.args.count.is_some_and(|count| self.packets >= count)
    }

    fn show(&mut self, seen: Seen) -> anyhow::Result<()> {
        let left = self.args.count.map_or(u64::MAX, |count| count - self.packets);
        let room = usize::try_from(left).unwrap_or(usize::MAX);
        let width = width();
        let mut text = String::new();
        for packet in seen.packets.iter().take(room) {
            match self.args.json {
                true => text.push_str(&(serde_json::to_string(&Event::Packet(packet))? + "\n")),
                false => line(&mut text, width, &packet.to_string()),
            }
            self.packets += 1;
        }
        (self.left_out, self.lost) = (seen.left_out, seen.lost);
        if self.said.at.elapsed() >= SUMS {
            text.push_str(&self.sum()?);
        }
        if text.is_empty() { Ok(()) } else { print(&text) }
    }

    /// What was not shown since this was last asked; empty: nothing.
    fn sum(&mut self) -> anyhow::Result<String> {
        let (left_out, lost) = (self.left_out - self.said.left_out, self.lost - self.said.lost);
        self.said = Said { at: Instant::now(), left_out: self.left_out, lost: self.lost };
        Ok(match (left_out + lost, self.args.json) {
            (0, _) => String::new(),
            (_, true) => serde_json::to_string(&Event::NotShown { left_out, lost })? + "\n",
            (_, false) => {
                format!("# more than --rate {} a second: {left_out} left out, {lost} lost\n", self.args.rate)
            }
        })
    }

    fn end(self) -> anyhow::Result<()> {
        let Self { packets, left_out, lost, .. } = self;
        print(&match self.args.json {
            true => serde_json::to_string(&Event::End { packets, left_out, lost })? + "\n",
            false => format!("# packets: {packets} shown, {left_out} left out, {lost} lost\n"),
        })
    }
}
