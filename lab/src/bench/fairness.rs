//! `millrace-lab bench fairness`: one saturating flow of a relay competes with one TCP CUBIC flow on a shared
//! bottleneck, with equal round-trip times.

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, ensure};
use nix::sys::socket::{setsockopt, sockopt};
use serde_json::{Value, json};

use super::at_once::at_once;
use super::contender::Contender;
use super::figures::RowLoad;
use super::process::BenchProcess;
use super::run::flow_detector;
use super::site::{BenchSite, SUBSCRIBERS_LINK, device};
use super::table::{columns, write_json};
use super::traffic::RelayTraffic;
use super::usage::warn_if_busy;
use crate::lab::{Directions, LabNode, Topology};
use crate::progress::BenchProgress;
use crate::stats::Spread;
use crate::transport::LabTransport;

#[derive(Debug, clap::Args)]
pub struct FairnessArgs {
    /// Relays whose flow is measured, in interleaved runs
    #[arg(long, value_enum, value_delimiter = ',', default_value = "kernel,user,kernel-cubic,user-cubic")]
    relays: Vec<Contender>,
    /// TCP flows to measure in place of a relay's, by their congestion control
    #[arg(long, value_delimiter = ',', default_value = "cubic,bbr", value_name = "NAME")]
    tcp: Vec<String>,
    /// Flows that are sent neither by a relay nor over TCP. Each competes with a TCP CUBIC flow, as the flows of the
    /// option `tcp` do.
    #[arg(skip)]
    others: Vec<Other>,
    #[command(flatten)]
    bottleneck: Bottleneck,
}

#[derive(Debug, clap::Args)]
pub struct Bottleneck {
    /// Rate of the bottleneck
    #[arg(long, default_value_t = 20, value_name = "MBIT")]
    rate_mbit: u32,
    /// Round-trip time while the queue is empty
    #[arg(long, default_value_t = 40, value_name = "MS")]
    rtt_ms: u32,
    /// Size of the bottleneck's queue, in bandwidth-delay products
    #[arg(long, value_delimiter = ',', default_value = "1,4", value_name = "BDP")]
    buffers: Vec<f64>,
    /// Length of the measurement, seconds
    #[arg(long, default_value_t = 120.0)]
    seconds: f64,
    /// Number of runs of every flow with every size of the bottleneck's queue
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Number of runs at the same time, each in its own lab; only for low rates and without relays
    #[arg(long, default_value_t = 1)]
    labs: usize,
    /// Write the results to this file, as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

impl FairnessArgs {
    /// Returns the arguments for `bench graft fairness`, which measures no relays.
    pub fn from_grafts(controls: Vec<String>, others: Vec<Other>, bottleneck: Bottleneck) -> Self {
        Self { relays: Vec::new(), tcp: controls, others, bottleneck }
    }
}

/// Time that both flows run before the measurement, so that slow start is over.
const WARM_UP: Duration = Duration::from_secs(5);
/// A flow of type [`Other`] has begun once this many bytes have arrived: more than its session's set-up takes.
const BEGUN_BYTES: u64 = 64 << 10;
/// Longest wait until a flow of type [`Other`] has begun.
const BEGIN: Duration = Duration::from_secs(60);
const LOOK: Duration = Duration::from_millis(10);
/// Extra time that the publisher sends, seconds: for the subscriber to join, and for publisher and subscriber to end.
const SPARE_SECONDS: f64 = 6.0;
/// Rate of the published media, as a multiple of the bottleneck's rate. It keeps the relay's queue full.
const OVERLOAD: u32 = 2;
const OBJECT_BYTES: u32 = 1200;
/// Media count as flowing once at least this share of the published packet rate arrives.
const FLOWING: f64 = 0.1;

pub fn run(args: FairnessArgs) -> anyhow::Result<()> {
    ensure!(
        args.bottleneck.rate_mbit > 0 && args.bottleneck.rtt_ms > 0,
        "--rate-mbit and --rtt-ms must be at least 1"
    );
    ensure!(
        args.bottleneck.rounds > 0 && args.bottleneck.seconds >= 1.0,
        "--rounds and --seconds must be at least 1"
    );
    ensure!(args.bottleneck.buffers.iter().all(|buffer| *buffer > 0.0), "--buffers must be more than 0");
    ensure!(
        !args.relays.iter().any(|relay| relay.is_plain()),
        "plain UDP has no congestion control: leave it out of --relays"
    );
    ensure!(args.bottleneck.labs > 0, "--labs must be at least 1");
    ensure!(
        args.bottleneck.labs == 1 || args.relays.is_empty(),
        "--labs must be 1 with relays: they need the CPUs for themselves"
    );
    warn_if_busy()?;
    let rows = args.measure()?;
    print!("{}", render(&rows));
    let json: Vec<_> = rows.iter().map(|row| row.json(&args)).collect();
    args.bottleneck.json.as_deref().map_or(Ok(()), |path| write_json(path, &json))?;
    ensure!(rows.iter().any(|row| row.rounds.iter().any(Result::is_ok)), "no flow could be measured");
    Ok(())
}

/// The flow that competes with TCP CUBIC.
#[derive(Debug, Clone)]
enum CompetingFlow {
    Relay(Contender),
    /// A TCP flow with this congestion control.
    Tcp(String),
    Other(Other),
}

/// A flow that is sent neither by a relay nor over TCP.
#[derive(Debug, Clone, Copy)]
pub struct Other {
    pub label: &'static str,
    /// Kind of the flow in the JSON output.
    pub kind: &'static str,
    pub control: &'static str,
    /// Function that saturates the path over IPv4 for the given time, from the relay's host to the subscribers' host of
    /// the lab network. Its argument of type `u32` is the round-trip time in ms.
    pub send: fn(&BenchSite, u32, Duration) -> anyhow::Result<()>,
}

impl CompetingFlow {
    fn label(&self) -> String {
        match self {
            Self::Relay(contender) => contender.label(),
            Self::Tcp(control) => format!("tcp ({control})"),
            Self::Other(other) => other.label.to_owned(),
        }
    }
}

/// Rates of the IP packets that arrived for each of the two flows, Mbit/s.
#[derive(Debug, Clone, Copy)]
struct SharedRates {
    flow: f64,
    cubic: f64,
}

impl SharedRates {
    fn percent(self) -> f64 {
        100.0 * self.flow / (self.flow + self.cubic)
    }
}

struct FairnessRow {
    flow: CompetingFlow,
    buffer: f64,
    rounds: Vec<Result<SharedRates, String>>,
}

impl FairnessRow {
    fn spread(&self, of: impl Fn(SharedRates) -> f64) -> Option<Spread> {
        Spread::from_values(&self.rounds.iter().flatten().map(|shared| of(*shared)).collect::<Vec<_>>())
    }

    fn json(&self, args: &FairnessArgs) -> Value {
        let (relay, engine, control) = match &self.flow {
            CompetingFlow::Relay(relay) => (relay.relay(), relay.engine(), relay.congestion_control()),
            CompetingFlow::Tcp(control) => ("tcp", None, Some(control.as_str())),
            CompetingFlow::Other(other) => (other.kind, None, Some(other.control)),
        };
        let round = |round: &Result<SharedRates, String>| match round {
            Ok(shared) => json!({
                "flow_mbit": shared.flow, "cubic_mbit": shared.cubic, "share_percent": shared.percent()
            }),
            Err(error) => json!({ "error": error }),
        };
        json!({
            "relay": relay, "engine": engine, "congestion_control": control,
            "rate_mbit": args.bottleneck.rate_mbit, "rtt_ms": args.bottleneck.rtt_ms, "buffer_bdp": self.buffer, "seconds": args.bottleneck.seconds,
            "share_percent": self.spread(SharedRates::percent),
            "flow_mbit": self.spread(|shared| shared.flow), "cubic_mbit": self.spread(|shared| shared.cubic),
            "rounds": self.rounds.iter().map(round).collect::<Vec<_>>(),
        })
    }
}

fn told(shared: &Result<SharedRates, String>) -> String {
    match shared {
        Ok(shared) => {
            format!("{:.1} %, {:.1} Mbit/s beside CUBIC's {:.1}", shared.percent(), shared.flow, shared.cubic)
        }
        Err(error) => error.clone(),
    }
}

fn render(rows: &[FairnessRow]) -> String {
    let head = ["flow", "buffer, BDP", "share %", "least", "most", "Mbit/s", "CUBIC Mbit/s"];
    let mut lines = vec![head.map(str::to_owned).to_vec()];
    for row in rows {
        let share = row.spread(SharedRates::percent);
        let flow = row.spread(|shared| shared.flow);
        let cubic = row.spread(|shared| shared.cubic);
        let (Some(share), Some(flow), Some(cubic)) = (share, flow, cubic) else { continue };
        let figures = [share.median, share.min, share.max, flow.median, cubic.median];
        let mut line = vec![row.flow.label(), row.buffer.to_string()];
        line.extend(figures.map(|figure| format!("{figure:.1}")));
        lines.push(line);
    }
    let mut text = columns(&lines);
    for row in rows {
        if let Some(error) = super::figures::error(&row.rounds) {
            text += &format!("{} at {} BDP: {error}\n", row.flow.label(), row.buffer);
        }
    }
    text
}

impl FairnessArgs {
    /// Measures all rows. Consecutive runs measure different flows, so that a drift of the machine affects all flows
    /// alike.
    fn measure(&self) -> anyhow::Result<Vec<FairnessRow>> {
        let mut rows = self.rows();
        let jobs: Vec<(usize, usize)> = (1..=self.bottleneck.rounds)
            .flat_map(|round| (0..rows.len()).map(move |row| (round, row)))
            .collect();
        let progress = BenchProgress::with_lanes(jobs.len(), self.bottleneck.labs);
        let done = at_once(self.bottleneck.labs, &jobs, |(round, row)| {
            let FairnessRow { flow, buffer, .. } = rows.get(*row).context("a row for each job")?;
            let site = self.site(*buffer)?;
            let work = || self.round(&site, flow).map_err(|error| format!("{error:#}"));
            Ok(progress.step(&format!("round {round}, {} at {buffer} BDP", flow.label()), work, told)?)
        })?;
        for ((_, row), shared) in jobs.iter().zip(done) {
            rows[*row].rounds.push(shared);
        }
        Ok(rows)
    }

    fn rows(&self) -> Vec<FairnessRow> {
        let relays = self.relays.iter().map(|relay| CompetingFlow::Relay(*relay));
        let others = self.others.iter().copied().map(CompetingFlow::Other);
        let flows: Vec<CompetingFlow> =
            relays.chain(self.tcp.iter().cloned().map(CompetingFlow::Tcp)).chain(others).collect();
        let row = |buffer: f64, flow: &CompetingFlow| FairnessRow {
            flow: flow.clone(),
            buffer,
            rounds: Vec::new(),
        };
        let buffers = self.bottleneck.buffers.iter();
        buffers.flat_map(|buffer| flows.iter().map(move |flow| row(*buffer, flow))).collect()
    }

    fn site(&self, buffer: f64) -> anyhow::Result<BenchSite> {
        let bdp = f64::from(self.bottleneck.rate_mbit) * 1e6 / 8.0 * f64::from(self.bottleneck.rtt_ms) / 1e3;
        let one_way_us = self.bottleneck.rtt_ms * 500;
        let bottleneck =
            format!("rate={}mbit queue-bytes={}", self.bottleneck.rate_mbit, (bdp * buffer) as u64);
        let mut topology = Topology::standard(1, 1);
        topology.impair(SUBSCRIBERS_LINK, Directions::Both, &format!("delay={one_way_us}us"))?;
        topology.impair(SUBSCRIBERS_LINK, Directions::Forward, &bottleneck)?;
        BenchSite::new(&topology)
    }

    fn round(&self, site: &BenchSite, flow: &CompetingFlow) -> anyhow::Result<SharedRates> {
        if let CompetingFlow::Other(other) = flow {
            let seconds = WARM_UP.as_secs_f64() + self.bottleneck.seconds + SPARE_SECONDS;
            let sending = Duration::from_secs_f64(seconds);
            return std::thread::scope(|scope| {
                let before = Octets::read(site.subscribers()?)?.v4;
                let other = scope.spawn(|| (other.send)(site, self.bottleneck.rtt_ms, sending));
                let begun = await_bytes(site.subscribers()?, before + BEGUN_BYTES, || other.is_finished());
                let shared = begun.and_then(|()| self.run_with_cubic(site, flow));
                other.join().map_err(|_| anyhow!("the sender panicked"))??;
                shared
            });
        }
        self.run_with_cubic(site, flow)
    }

    /// Measures the rates of the given flow and of the TCP CUBIC flow that competes with it. The caller runs a flow of
    /// type [`Other`] in a thread of its own.
    fn run_with_cubic(&self, site: &BenchSite, flow: &CompetingFlow) -> anyhow::Result<SharedRates> {
        let relay = match flow {
            CompetingFlow::Relay(contender) => Some(self.start_relay(site, *contender)?),
            CompetingFlow::Tcp(_) | CompetingFlow::Other(_) => None,
        };
        let from = site.relay()?;
        let to = site.subscribers()?;
        // The measured flow uses IPv4 and CUBIC uses IPv6, so the receiving host's counters separate them.
        let measured = match flow {
            CompetingFlow::Tcp(control) => Some(Saturating::start(from, to, to.addr_v4().into(), control)?),
            CompetingFlow::Relay(_) | CompetingFlow::Other(_) => None,
        };
        let cubic = Saturating::start(from, to, to.addr_v6().into(), "cubic")?;
        std::thread::sleep(WARM_UP);
        let start = Instant::now();
        let before = Octets::read(to)?;
        std::thread::sleep(Duration::from_secs_f64(self.bottleneck.seconds));
        let after = Octets::read(to)?;
        let seconds = start.elapsed().as_secs_f64();
        [Some(cubic), measured].into_iter().flatten().try_for_each(Saturating::stop)?;
        if let Some((_relay, mut traffic)) = relay {
            traffic.check_runs().context("traffic ended before it was measured")?;
        }
        let mbit = |octets: u64| octets as f64 * 8.0 / 1e6 / seconds;
        Ok(SharedRates { flow: mbit(after.v4 - before.v4), cubic: mbit(after.v6 - before.v6) })
    }

    fn start_relay(
        &self,
        site: &BenchSite,
        contender: Contender,
    ) -> anyhow::Result<(BenchProcess, RelayTraffic)> {
        let relay = site.start_relay(contender)?;
        let rate_hz = OVERLOAD * self.bottleneck.rate_mbit * 1_000_000 / 8 / OBJECT_BYTES;
        let load =
            RowLoad { transport: LabTransport::Raw, subscribers: 1, object_bytes: OBJECT_BYTES, rate_hz };
        let seconds = self.bottleneck.seconds + WARM_UP.as_secs_f64() + SPARE_SECONDS;
        let node = site.relay()?;
        let flows = flow_detector(node, device(node, SUBSCRIBERS_LINK)?, &load, FLOWING);
        let traffic =
            RelayTraffic::start(contender, &site.route()?, &load, seconds, site.directory(), flows)?;
        Ok((relay, traffic))
    }
}

/// Bytes of IP packets that a host has received from other hosts.
#[derive(Debug, Clone, Copy)]
struct Octets {
    v4: u64,
    v6: u64,
}

impl Octets {
    fn read(node: &LabNode) -> anyhow::Result<Self> {
        node.enter(|| {
            let netstat = fs::read_to_string("/proc/thread-self/net/netstat")?;
            let snmp6 = fs::read_to_string("/proc/thread-self/net/snmp6")?;
            let devices = fs::read_to_string("/proc/thread-self/net/dev")?;
            let within = loopback_octets(&devices).context("no lo in dev")?;
            // A tunnel passes received data to its server over loopback IPv4. Loopback traffic is subtracted, so that
            // the data count once.
            let v4 = ip_in_octets(&netstat).context("netstat has no InOctets")?.saturating_sub(within);
            let v6 = ip6_in_octets(&snmp6).context("snmp6 has no Ip6InOctets")?;
            Ok(Self { v4, v6 })
        })?
    }
}

/// Waits until the host has received this many bytes over IPv4 since its start. Fails after [`BEGIN`], and when `is_over`
/// returns true before.
fn await_bytes(host: &LabNode, bytes: u64, is_over: impl Fn() -> bool) -> anyhow::Result<()> {
    let start = Instant::now();
    while Octets::read(host)?.v4 < bytes {
        ensure!(!is_over() && start.elapsed() < BEGIN, "the flow did not begin within {BEGIN:?}");
        std::thread::sleep(LOOK);
    }
    Ok(())
}

/// Returns `InOctets` of the two `IpExt:` lines of /proc/net/netstat, one with names and one with values.
fn ip_in_octets(netstat: &str) -> Option<u64> {
    let mut lines = netstat.lines().filter_map(|line| line.strip_prefix("IpExt:"));
    let names = lines.next()?;
    let values = lines.next()?;
    let mut pairs = names.split_whitespace().zip(values.split_whitespace());
    pairs.find(|(name, _)| *name == "InOctets")?.1.parse().ok()
}

/// Returns the bytes of IP packets on the loopback interface. The kernel counts each with an Ethernet header, which is
/// subtracted.
fn loopback_octets(devices: &str) -> Option<u64> {
    let mut counts =
        devices.lines().find_map(|line| line.trim_start().strip_prefix("lo:"))?.split_whitespace();
    let bytes: u64 = counts.next()?.parse().ok()?;
    let packets: u64 = counts.next()?.parse().ok()?;
    Some(bytes.saturating_sub(14 * packets))
}

fn ip6_in_octets(snmp6: &str) -> Option<u64> {
    snmp6.lines().find_map(|line| line.strip_prefix("Ip6InOctets")?.trim().parse().ok())
}

/// A TCP connection that sends as fast as it can until it is stopped.
struct Saturating {
    stop: Arc<AtomicBool>,
    sender: JoinHandle<()>,
    receiver: JoinHandle<()>,
}

impl Saturating {
    fn start(from: &LabNode, to: &LabNode, address: IpAddr, control: &str) -> anyhow::Result<Self> {
        let any: IpAddr =
            if address.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
        let listener = to.enter(|| TcpListener::bind((any, 0)))??;
        let to = SocketAddr::new(address, listener.local_addr()?.port());
        let connection =
            from.enter(|| TcpStream::connect(to))?.with_context(|| format!("cannot connect to {to}"))?;
        setsockopt(&connection, sockopt::TcpCongestion, &control.into()).map_err(|error| {
            anyhow!("TCP with {control}: {error} (see net.ipv4.tcp_available_congestion_control)")
        })?;
        let (received, _) = listener.accept()?;
        let stop = Arc::new(AtomicBool::new(false));
        let asked = stop.clone();
        Ok(Self {
            stop,
            sender: std::thread::spawn(move || send_until(connection, &asked)),
            receiver: std::thread::spawn(move || drain(received)),
        })
    }

    fn stop(self) -> anyhow::Result<()> {
        self.stop.store(true, Ordering::Relaxed);
        let joined = [self.sender, self.receiver].map(JoinHandle::join);
        ensure!(joined.iter().all(Result::is_ok), "a thread of the TCP flow panicked");
        Ok(())
    }
}

fn send_until(mut connection: TcpStream, stop: &AtomicBool) {
    let block = [0; 1 << 16];
    // A write error ends the flow too. The measured rates then show that nothing arrived.
    while !stop.load(Ordering::Relaxed) && connection.write_all(&block).is_ok() {}
}

fn drain(mut connection: TcpStream) {
    let mut buffer = [0; 1 << 16];
    while connection.read(&mut buffer).is_ok_and(|read| read > 0) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn received_octets_are_parsed_from_the_kernels_proc_files() {
        let netstat = "TcpExt: A InOctets\nTcpExt: 1 2\nIpExt: InNoRoutes InOctets Out\nIpExt: 0 4711 3\n";
        assert_eq!(ip_in_octets(netstat), Some(4711));
        let devices = "Inter-|   Receive\n face |bytes packets\n  eth0: 1 2 3\n    lo: 1028    2    0 0\n";
        assert_eq!(loopback_octets(devices), Some(1000));
        assert_eq!(ip_in_octets("IpExt: Other\nIpExt: 1\n"), None);
        assert_eq!(ip6_in_octets("Ip6InReceives 3\nIp6InOctets                     \t42\n"), Some(42));
    }

    #[test]
    fn bandwidth_shares_are_computed() {
        let row = |rounds| FairnessRow { flow: CompetingFlow::Tcp("bbr".into()), buffer: 4.0, rounds };
        let some = row(vec![
            Ok(SharedRates { flow: 5.0, cubic: 15.0 }),
            Err("gone".into()),
            Ok(SharedRates { flow: 10.0, cubic: 10.0 }),
        ]);
        let spread = some.spread(SharedRates::percent).unwrap();
        assert_eq!((spread.median, spread.min, spread.max), (37.5, 25.0, 50.0));
        let text = render(&[some, row(vec![Err("gone".into())])]);
        assert!(text.contains("37.5") && text.contains("25.0"), "{text}");
        assert!(text.contains("tcp (bbr) at 4 BDP: 1 of 3 rounds: gone"), "{text}");
    }
}
