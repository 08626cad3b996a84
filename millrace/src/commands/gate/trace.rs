//! `millrace gate trace`: polls a running gate for the packets that it refuses, and prints each as a line.

use std::{
    io,
    os::fd::AsFd as _,
    time::{Duration, Instant},
};

use clap::builder::PossibleValuesParser;
use millrace_cost_daemon::signals::CostSignals;
use millrace_daemon::{
    expect_answer,
    render::{line, print, width},
};
use millrace_gate::{GateTrace, Prefix, Rule};
use millrace_gate_daemon::{
    control::{self, GateReply, GateRequest},
    trace::{GateTraceFilter, GateTraceLine, TraceUpdate},
};
use millrace_relay_daemon::config::DurationValue;
use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, PollTimeout, poll},
};
use serde::Serialize;

use super::GateSocketArg;

#[derive(Debug, clap::Args)]
#[command(
    after_help = "The kernel selects packets by client, scope and rule, and each trace has its own --rate. A trace of one client \
therefore shows its packets during floods of others. Up to 8 traces may run at the same time."
)]
pub(super) struct GateTraceArgs {
    /// Trace only packets of clients in this prefix: 192.0.2.7, 2001:db8::/32
    #[arg(long, value_name = "PREFIX")]
    client: Option<Prefix>,
    /// Trace only packets for this scope (group of guarded ports) of the policy, repeatable
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    scope: Vec<String>,
    /// Trace only packets that this rule refuses, or would refuse if it were not in mode `monitor`, repeatable
    #[arg(long, value_name = "NAME", value_delimiter = ',', value_parser = PossibleValuesParser::new(Rule::ALL.map(Rule::name)))]
    rule: Vec<String>,
    /// Limit of traced packets per second; the number of packets beyond it is printed each second and at the end
    #[arg(
        long,
        value_name = "N",
        default_value_t = GateTraceFilter::PER_SECOND,
        value_parser = clap::value_parser!(u32).range(1..=i64::from(GateTrace::PER_SECOND_MAX))
    )]
    rate: u32,
    /// Stop after this number of traced packets
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    count: Option<u64>,
    /// Stop after this time: 90s, 10m, or a number of seconds
    #[arg(long, value_name = "TIME")]
    duration: Option<DurationValue>,
    /// Print packets as JSON, one per line
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    socket: GateSocketArg,
}

/// Interval between two polls of the gate.
const PERIOD: Duration = Duration::from_millis(250);
/// Shortest interval between two output lines that count the traced packets that were not shown.
const SUMS: Duration = Duration::from_secs(1);

pub(super) fn run(args: GateTraceArgs) -> anyhow::Result<()> {
    let signals = CostSignals::block()?;
    let mut gate = control::open(&args.socket.socket)?;
    let follow = GateTraceFilter {
        client: args.client.map(|client| client.to_string()),
        scope: args.scope.clone(),
        rule: args.rule.clone(),
        per_second: Some(args.rate),
    };
    control::ask_more(&mut gate, &GateRequest::Trace(follow))?;
    let mut shown = ShownPackets::begin(&args)?;
    let end = args.duration.and_then(|DurationValue(time)| Instant::now().checked_add(time));
    let is_over = || end.is_some_and(|end| Instant::now() >= end);
    loop {
        // The deadline is checked before the poll, so that the last poll still gets the packets up to the deadline.
        let over = is_over();
        let seen = expect_answer!(control::ask_more(&mut gate, &GateRequest::Traced)?, GateReply::Traced)?;
        shown.show(seen)?;
        if over || shown.is_enough() {
            break;
        }
        let left = end.map_or(PERIOD, |end| end.saturating_duration_since(Instant::now()).min(PERIOD));
        match wait(&signals, left)? {
            Waited::Out => {}
            Waited::ForSignal => {
                // A last poll gets the packets that arrived before the signal that ends the command.
                let seen =
                    expect_answer!(control::ask_more(&mut gate, &GateRequest::Traced)?, GateReply::Traced)?;
                shown.show(seen)?;
                break;
            }
            Waited::ForNobody => return Ok(()),
        }
    }
    shown.end()
}

enum Waited {
    /// The time to wait has passed without a signal.
    Out,
    /// A signal that ends the command has arrived.
    ForSignal,
    /// The reader of standard output has closed the pipe.
    ForNobody,
}

fn wait(signals: &CostSignals, time: Duration) -> anyhow::Result<Waited> {
    let stdout = io::stdout();
    // Standard output is polled without requested events: the kernel reports POLLERR in any case, when the pipe's
    // reader has closed it.
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

/// A line of the output with `--json`.
#[derive(Serialize)]
#[serde(tag = "event", rename_all = "snake_case")]
enum GateTraceEvent<'a> {
    /// The first line of the output, printed when the trace has started.
    Start {
        per_second: u32,
    },
    Packet(&'a GateTraceLine),
    /// How many traced packets were not shown since the previous line of this type.
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

/// Counts the packets that were printed, left out or lost since the trace started.
struct ShownPackets<'a> {
    args: &'a GateTraceArgs,
    packets: u64,
    /// Packets beyond `--rate`, as of the last poll.
    left_out: u64,
    /// Packets lost because the trace's queue was full before a poll emptied it, as of the last poll.
    lost: u64,
    said: UnshownLine,
}

/// The latest output line that counted packets that were not shown: its time, and the totals at that time.
struct UnshownLine {
    at: Instant,
    left_out: u64,
    lost: u64,
}

impl<'a> ShownPackets<'a> {
    fn begin(args: &'a GateTraceArgs) -> anyhow::Result<Self> {
        if args.json {
            print(&(serde_json::to_string(&GateTraceEvent::Start { per_second: args.rate })? + "\n"))?;
        } else {
            let whose = args.client.map_or("everybody".to_owned(), |client| client.to_string());
            let mut text =
                format!("# packets of {whose} that the gate refuses, up to {} per second\n", args.rate);
            line(&mut text, width(), GateTraceLine::HEAD);
            print(&text)?;
        }
        let said = UnshownLine { at: Instant::now(), left_out: 0, lost: 0 };
        Ok(Self { args, packets: 0, left_out: 0, lost: 0, said })
    }

    fn is_enough(&self) -> bool {
        self.args.count.is_some_and(|count| self.packets >= count)
    }

    fn show(&mut self, seen: TraceUpdate) -> anyhow::Result<()> {
        let left = self.args.count.map_or(u64::MAX, |count| count - self.packets);
        let room = usize::try_from(left).unwrap_or(usize::MAX);
        let width = width();
        let mut text = String::new();
        for packet in seen.packets.iter().take(room) {
            match self.args.json {
                true => text.push_str(&(serde_json::to_string(&GateTraceEvent::Packet(packet))? + "\n")),
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

    /// Returns a line that says how many traced packets were not shown since the last call, or an empty text if all
    /// were shown.
    fn sum(&mut self) -> anyhow::Result<String> {
        let left_out = self.left_out - self.said.left_out;
        let lost = self.lost - self.said.lost;
        self.said = UnshownLine { at: Instant::now(), left_out: self.left_out, lost: self.lost };
        Ok(match (left_out + lost, self.args.json) {
            (0, _) => String::new(),
            (_, true) => serde_json::to_string(&GateTraceEvent::NotShown { left_out, lost })? + "\n",
            (_, false) => {
                format!("# more than --rate {} a second: {left_out} left out, {lost} lost\n", self.args.rate)
            }
        })
    }

    fn end(self) -> anyhow::Result<()> {
        let Self { packets, left_out, lost, .. } = self;
        print(&match self.args.json {
            true => serde_json::to_string(&GateTraceEvent::End { packets, left_out, lost })? + "\n",
            false => format!("# packets: {packets} shown, {left_out} left out, {lost} lost\n"),
        })
    }
}
