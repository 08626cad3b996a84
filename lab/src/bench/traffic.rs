//! Publisher and subscribers of one run: Millrace's clients for MoQ relays, plain UDP programs for the forwarder.

use std::env;
use std::net::SocketAddr;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, ensure};
use serde::Deserialize;

use super::contender::Contender;
use super::figures::RowLoad;
use super::owed::{Late, OwedFigures};
use super::process::BenchProcess;
use super::udp;
use crate::lab::LabNode;
use crate::program::product;
use crate::receivers::report::ReceiversReport;
use crate::stats::Percentiles;
use crate::transport::LabTransport;

const NAMESPACE: &str = "bench";
/// Name of the RTP stream.
pub const STREAM: &str = "bench";
const TRACK: &str = "objects";
/// Least number of objects in a group. At high rates a group has a fifth of a second's objects. Groups are short, so
/// that a new subscriber does not wait long for the start of one. They are long enough that the cost of opening streams
/// does not affect the results.
const OBJECTS_PER_GROUP: u32 = 100;
/// Least number of subscribers for which those of `lab receivers` are used, since one process holds thousands of them.
/// Fewer subscribers are clients as in applications.
pub const MANY: usize = 500;
/// Number of sockets of these subscribers.
const SOCKETS: usize = 32;
/// Number of these subscribers that connect per second at least. Programs of a development build are slow.
const JOINS_PER_SECOND: f64 = if cfg!(debug_assertions) { 50.0 } else { 500.0 };
/// Longest wait from the start of publisher and subscribers until objects flow.
const FLOW_LIMIT: Duration = Duration::from_secs(60);
const FLOW_POLL: Duration = Duration::from_millis(250);
const FLOW_TIMES: u32 = 4;
/// Longest wait from the end of the measured time until publisher and subscribers have ended. Objects that arrive later
/// do not count.
const END_LIMIT: Duration = Duration::from_secs(30);

pub struct RelayTraffic {
    publisher: BenchProcess,
    subscribers: BenchProcess,
    contender: Contender,
    /// Whether the subscribers are those of `lab receivers`.
    is_many: bool,
    /// Time by which the publisher sends longer, since the subscribers may have needed it to connect.
    joining: Duration,
}

/// Objects that the subscribers received.
pub struct ReceivedObjects {
    pub delivered: u64,
    pub lost: u64,
    /// Rate at which objects were delivered, summed over all subscribers, objects per second.
    pub rate_hz: f64,
    pub latency_us: Option<Percentiles>,
    /// Objects that the subscribers should have received (owed objects), and their latency; `None` for the plain UDP
    /// sinks.
    pub owed: Option<OwedFigures>,
    /// Objects per second that the publisher made. It is less than requested on a busy machine. `None` for the plain
    /// UDP source.
    pub offered_hz: Option<f64>,
    /// Time of sending and latency of each object, ns. Only the plain UDP sinks report it.
    pub objects: Vec<(u64, u64)>,
}

impl ReceivedObjects {
    /// Returns the latency of the objects sent in a period; `None` if the latencies of single objects were not
    /// recorded.
    pub fn latency_of(&self, sent: &Range<u64>) -> Option<Percentiles> {
        let inside = self.objects.iter().filter(|(at, _)| sent.contains(at));
        Percentiles::from_ns(inside.map(|(_, latency)| *latency).collect())
    }
}

/// The hosts of publisher and subscribers, and the relays that they connect to.
pub struct TrafficRoute<'lab> {
    pub publisher: &'lab LabNode,
    /// Address of the publisher's relay.
    pub relay: SocketAddr,
    /// Address of the subscribers' relay, which is another one in a chain of relays.
    pub edge: SocketAddr,
    pub subscribers: &'lab LabNode,
}

/// A subscriber that joins while traffic already flows.
pub struct ExtraSubscriber(BenchProcess);

impl ExtraSubscriber {
    pub fn start(name: &'static str, route: &TrafficRoute<'_>, directory: &Path) -> anyhow::Result<Self> {
        let command = (product()?, subscribing(1, LabTransport::Raw, route.edge));
        start(name, route.subscribers, command.0, command.1, directory).map(Self)
    }

    /// Waits for the end of the traffic. Returns latency and delivery of the objects that this subscriber should have
    /// received.
    pub fn finish(self) -> anyhow::Result<Option<OwedFigures>> {
        let output = self.0.finish_or_interrupt(END_LIMIT)?;
        Ok(received_by_clients(&output, 0.0)?.owed)
    }
}

impl RelayTraffic {
    /// Starts publisher and subscribers, and waits until `flows` returns true. The publisher sends for `seconds`.
    pub fn start(
        contender: Contender,
        route: &TrafficRoute<'_>,
        load: &RowLoad,
        seconds: f64,
        directory: &Path,
        flows: impl FnMut() -> bool,
    ) -> anyhow::Result<Self> {
        let commands = Commands { contender, route, load, seconds, directory };
        // Plain UDP sinks must register with the forwarder first. MoQ subscribers need a track that is already
        // published.
        let (publisher, subscribers) = if contender.is_plain() {
            let subscribers = commands.subscribers()?;
            (commands.publisher()?, subscribers)
        } else {
            let publisher = commands.publisher()?;
            (publisher, commands.subscribers()?)
        };
        let mut traffic =
            Self { publisher, subscribers, contender, is_many: commands.is_many(), joining: joining(load) };
        traffic.wait_until(flows, FLOW_LIMIT + joining(load), || commands.subscribers())?;
        Ok(traffic)
    }

    /// Waits until traffic has flowed for a second. Subscribers that join before the relay knows the track are started
    /// again. Their handshakes look like traffic for a moment, so a single positive check is not enough.
    fn wait_until(
        &mut self,
        mut flows: impl FnMut() -> bool,
        limit: Duration,
        again: impl Fn() -> anyhow::Result<BenchProcess>,
    ) -> anyhow::Result<()> {
        let start = Instant::now();
        let mut times = 0;
        loop {
            times = if flows() { times + 1 } else { 0 };
            self.publisher.check_runs()?;
            let refused = self.subscribers.check_runs().err();
            if refused.is_none() && times >= FLOW_TIMES {
                return Ok(());
            }
            if start.elapsed() > limit {
                return Err(refused.unwrap_or_else(|| {
                    anyhow!("traffic did not reach the requested rate within {limit:?}")
                }));
            }
            if refused.is_some() {
                (self.subscribers, times) = (again()?, 0);
            }
            std::thread::sleep(FLOW_POLL);
        }
    }

    /// Gives publisher and subscribers real-time priority, as if they had machines of their own.
    pub fn go_first(&self) -> anyhow::Result<()> {
        for end in [&self.publisher, &self.subscribers] {
            let mut command = std::process::Command::new("chrt");
            command.args(["--all-tasks", "--fifo", "--pid", "1"]).arg(end.id().to_string());
            let status = command.status().context("cannot run chrt (util-linux)")?;
            ensure!(status.success(), "chrt cannot give a process a real-time priority");
        }
        Ok(())
    }

    /// Fails if the publisher or the subscribers have ended already.
    pub fn check_runs(&mut self) -> anyhow::Result<()> {
        self.publisher.check_runs()?;
        self.subscribers.check_runs()
    }

    /// Waits for the end of the traffic. Returns what the subscribers received.
    pub fn finish(self) -> anyhow::Result<ReceivedObjects> {
        let published = self.publisher.finish(END_LIMIT + self.joining)?;
        let output = self.subscribers.finish_or_interrupt(END_LIMIT)?;
        let received = match self.contender {
            plain if plain.is_plain() => received_by_sinks(&output),
            _ if self.is_many => {
                offered(&published).and_then(|offered_hz| received_by_many(&output, offered_hz))
            }
            _ => offered(&published).and_then(|offered_hz| received_by_clients(&output, offered_hz)),
        };
        received.with_context(|| {
            format!("cannot parse the output of publisher and subscribers: {published:.200} {output:.200}")
        })
    }
}

fn received_by_sinks(output: &str) -> anyhow::Result<ReceivedObjects> {
    let sinks: udp::UdpReceived = serde_json::from_str(output)?;
    let latencies = sinks.objects.iter().map(|(_, latency)| *latency).collect();
    let first = sinks.objects.iter().map(|(sent, _)| *sent).min().unwrap_or(0);
    let last = sinks.objects.iter().map(|(sent, _)| *sent).max().unwrap_or(0);
    Ok(ReceivedObjects {
        delivered: sinks.delivered,
        lost: sinks.lost,
        rate_hz: sinks.delivered as f64 * 1e9 / (last - first).max(1) as f64,
        latency_us: Percentiles::from_ns(latencies),
        owed: None,
        offered_hz: None,
        objects: sinks.objects,
    })
}

fn offered(published: &str) -> anyhow::Result<f64> {
    #[derive(Deserialize)]
    struct PublishedRate {
        objects_per_second: f64,
    }
    let published: PublishedRate = serde_json::from_str(published)?;
    Ok(published.objects_per_second)
}

fn received_by_clients(output: &str, offered_hz: f64) -> anyhow::Result<ReceivedObjects> {
    #[derive(Deserialize)]
    struct SubscriberStats {
        delivered: u64,
        lost: u64,
        rate_hz: f64,
        latency_us: Option<Percentiles>,
        owed: Option<OwedFigures>,
    }
    let stats: SubscriberStats = serde_json::from_str(output)?;
    Ok(ReceivedObjects {
        delivered: stats.delivered,
        lost: stats.lost,
        rate_hz: stats.rate_hz,
        latency_us: stats.latency_us,
        owed: stats.owed,
        offered_hz: Some(offered_hz),
        objects: Vec::new(),
    })
}

fn received_by_many(output: &str, offered_hz: f64) -> anyhow::Result<ReceivedObjects> {
    let report: ReceiversReport = serde_json::from_str(output)?;
    ensure!(report.ended_early.is_empty(), "subscribers ended early: {:?}", report.ended_early);
    let [p50, p90, p99] = report.owed_ms.map(|ms| ms.map(|ms| ms * 1e3));
    let owed = OwedFigures {
        objects: report.measured + report.missing,
        delivered: report.measured,
        on_time: report.on_time,
        latency_us: Late { p50, p90, p99 },
    };
    let us = |ms: Percentiles| Percentiles {
        p50: ms.p50 * 1e3,
        p90: ms.p90 * 1e3,
        p99: ms.p99 * 1e3,
        max: ms.max * 1e3,
    };
    Ok(ReceivedObjects {
        delivered: report.objects,
        lost: report.missing,
        rate_hz: report.rate_hz,
        latency_us: report.latency_ms.map(us),
        owed: Some(owed),
        offered_hz: Some(offered_hz),
        objects: Vec::new(),
    })
}

/// Returns the time in which all subscribers connect, if they are many.
pub fn joining(load: &RowLoad) -> Duration {
    match load.subscribers {
        many if many >= MANY => Duration::from_secs_f64(many as f64 / JOINS_PER_SECOND),
        _ => Duration::ZERO,
    }
}

struct Commands<'run> {
    contender: Contender,
    route: &'run TrafficRoute<'run>,
    load: &'run RowLoad,
    seconds: f64,
    directory: &'run Path,
}

impl Commands<'_> {
    fn is_many(&self) -> bool {
        !self.contender.is_plain() && self.load.subscribers >= MANY
    }

    fn publisher(&self) -> anyhow::Result<BenchProcess> {
        let RowLoad { transport, object_bytes, rate_hz, .. } = self.load;
        let common = format!("--object-bytes {object_bytes} --rate-hz {rate_hz}");
        let relay = self.route.relay;
        let objects_per_group = OBJECTS_PER_GROUP.max(rate_hz / 5);
        let command = match self.contender {
            plain if plain.is_plain() => {
                let arguments = format!("bench udp source --to {relay} {common} --seconds {}", self.seconds);
                (env::current_exe()?, arguments)
            }
            _ => (
                product()?,
                format!(
                    "publish --reconnect=false --generate --wait --json --name {NAMESPACE} --track {TRACK} {common} \
                 --objects-per-group {objects_per_group} --duration {} --tls-disable-verify {}://{relay}",
                    self.seconds,
                    transport.scheme()
                ),
            ),
        };
        start("publisher", self.route.publisher, command.0, command.1, self.directory)
    }

    fn subscribers(&self) -> anyhow::Result<BenchProcess> {
        let subscribers = self.load.subscribers;
        let relay = self.route.edge;
        let sink = format!("bench udp sink --from {relay} --subscribers {subscribers}");
        let command = match self.contender {
            Contender::Fanout => (env::current_exe()?, format!("{sink} --stream {STREAM}")),
            plain if plain.is_plain() => (env::current_exe()?, sink),
            _ if self.is_many() => {
                let to = format!("--name {NAMESPACE} --track {TRACK} --json moqt://{relay}");
                let many = format!("lab receivers --sessions {subscribers} --sockets {SOCKETS} {to}");
                (env::current_exe()?, many)
            }
            _ => (product()?, subscribing(subscribers, self.load.transport, relay)),
        };
        start("subscribers", self.route.subscribers, command.0, command.1, self.directory)
    }
}

fn subscribing(subscribers: usize, transport: LabTransport, relay: SocketAddr) -> String {
    format!(
        "subscribe --name {NAMESPACE} --track {TRACK} --stats --json --subscribers {subscribers} \
         --tls-disable-verify {}://{relay}",
        transport.scheme()
    )
}

/// Starts a program. `arguments` are separated by spaces, and none contains a space.
fn start(
    name: &'static str,
    node: &LabNode,
    program: PathBuf,
    arguments: String,
    directory: &Path,
) -> anyhow::Result<BenchProcess> {
    let mut command = node.command(program);
    command.args(arguments.split_whitespace());
    BenchProcess::start(name, command, directory)
}
