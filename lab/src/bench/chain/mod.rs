//! `millrace-lab bench relay --chain`: relays in a row between publisher and subscribers, and what each of them adds.

mod figures;
mod links;
mod table;

use std::net::IpAddr;
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use millrace_kernel::programs::Statistics;
use millrace_lab_kernel::probe::{self, PacketProbe, PacketSample};
use nix::net::if_::if_nametoindex;

pub use self::links::ChainBy;

use self::figures::{ChainFigures, ChainRow, HopFigures};
use super::contender::Contender;
use super::engine::EngineReading;
use super::figures::{KernelWork, RowLoad, ensure_measured};
use super::process::BenchProcess;
use super::run::{FLOWING, SPARE_SECONDS, WARM_UP, drain, flow_detector};
use super::site::{BenchSite, address, device};
use super::traffic::RelayTraffic;
use super::usage::{UsageReading, Used, peak_rss_bytes};
use super::wire::{self, WireFigures, WireHosts};
use crate::lab::{LabNode, Topology};
use crate::progress::BenchProgress;
use crate::stats::Percentiles;

/// The chains to measure.
pub struct ChainPlan {
    pub relays: Vec<Contender>,
    pub by: ChainBy,
    /// Numbers of relays in a row, each measured in a lab of its own.
    pub lengths: Vec<usize>,
    /// The loads of the last relay, each measured with every chain.
    pub loads: Vec<RowLoad>,
    /// Length of the period without instruments, seconds. Periods with instruments last a fraction of it.
    pub seconds: f64,
    pub rounds: usize,
}

impl ChainPlan {
    /// Runs all measurements, prints them as a table, and returns them as JSON.
    pub fn run(&self) -> anyhow::Result<Vec<serde_json::Value>> {
        self.check()?;
        let benches = self.lengths.iter().map(|length| ChainBench::new(*length, self.by, self.seconds));
        let benches = benches.collect::<anyhow::Result<Vec<_>>>()?;
        let mut rows = self.rows();
        let progress = BenchProgress::with_steps(self.rounds * rows.len());
        for round in 1..=self.rounds {
            for row in &mut rows {
                let bench = benches.iter().find(|bench| bench.nodes.len() == row.length);
                let bench = bench.context("a lab for each length")?;
                progress.begin(format!("round {round}, {}", row.label()));
                let figures = bench.run(row.contender, &row.load).map_err(|error| format!("{error:#}"));
                progress.end(&table::told(&figures))?;
                row.rounds.push(figures);
            }
        }
        drop((progress, benches));
        print!("{}", table::render(&rows));
        ensure_measured(rows.iter().map(|row| row.rounds.as_slice()))?;
        Ok(rows.iter().map(|row| row.json(&rows)).collect())
    }

    fn check(&self) -> anyhow::Result<()> {
        /// A longer chain on one machine measures its scheduler above all.
        const LONGEST: usize = 8;
        ensure!(
            self.lengths.iter().all(|length| (1..=LONGEST).contains(length)),
            "--chain must be 1 to {LONGEST} relays"
        );
        ensure!(
            !self.relays.iter().any(|relay| relay.is_plain()),
            "plain UDP has no chains: leave it out of --relays"
        );
        Ok(())
    }

    /// Lists the result rows. Consecutive rows have different relays, so that a machine that becomes slower or faster
    /// during the benchmark affects all relays alike.
    fn rows(&self) -> Vec<ChainRow> {
        let mut rows = Vec::new();
        for load in &self.loads {
            for length in &self.lengths {
                rows.extend(self.relays.iter().map(|contender| ChainRow {
                    contender: *contender,
                    by: self.by,
                    length: *length,
                    load: *load,
                    rounds: Vec::new(),
                }));
            }
        }
        rows
    }
}

/// The lab with a chain of one length.
struct ChainBench {
    site: BenchSite,
    by: ChainBy,
    /// Names of all nodes with relays, the publisher's first.
    nodes: Vec<String>,
    seconds: f64,
}

impl ChainBench {
    fn new(length: usize, by: ChainBy, seconds: f64) -> anyhow::Result<Self> {
        let topology = Topology::standard(length, 1);
        let nodes = topology.nodes().into_iter().filter(|node| node.starts_with("relay"));
        let nodes = nodes.map(str::to_owned).collect();
        Ok(Self { site: BenchSite::new(&topology)?, by, nodes, seconds })
    }

    fn run(&self, contender: Contender, load: &RowLoad) -> anyhow::Result<ChainFigures> {
        let relays = self.start_relays(contender)?;
        let mut traffic = self.start_traffic(contender, load)?;
        let used = self.undisturbed(&relays)?;
        // Each instrument has a period of its own, so that it does not affect what another one measures.
        let (total, hops) = self.probed(load)?;
        let kernel = self.counted(contender, &relays)?;
        traffic.check_runs().context("traffic ended before it was measured")?;
        // Read the relays' memory while they still run.
        let memory = relays.iter().map(|relay| peak_rss_bytes(relay.id())).collect::<Result<Vec<_>, _>>()?;
        let received = traffic.finish()?;
        // A relay that ends would wait for the relays behind it, so the last relay ends first.
        relays.into_iter().rev().for_each(drop);

        let per_object = |ns: u64, elapsed: u64| ns as f64 / (received.rate_hz * elapsed as f64 / 1e9);
        let hop = |(((wire, kernel), used), rss_bytes): (((WireFigures, _), &Used), _)| HopFigures {
            wire_latency_us: Percentiles::from_ns(wire.latencies_ns),
            wire: wire.matched,
            cpu_ns_per_object: per_object(used.process_ns, used.elapsed_ns),
            rss_bytes,
            kernel,
        };
        let hops = hops.into_iter().zip(kernel).zip(&used).zip(memory).map(hop).collect();
        let machine = used.first().context("a chain has a relay")?;
        Ok(ChainFigures {
            delivered: received.delivered,
            lost: received.lost,
            latency_us: received.latency_us,
            wire_latency_us: Percentiles::from_ns(total.latencies_ns),
            wire: total.matched,
            machine_ns_per_object: per_object(machine.machine_ns, machine.elapsed_ns),
            hops,
        })
    }

    /// Starts all relays, the publisher's first. Each connects to the one before it.
    fn start_relays(&self, contender: Contender) -> anyhow::Result<Vec<BenchProcess>> {
        let start = |(name, arguments): (&String, Vec<String>)| {
            let arguments: Vec<_> = arguments.iter().map(String::as_str).collect();
            self.site.start_relay_on(name, contender, &arguments)
        };
        let arguments = self.arguments(contender)?;
        self.nodes.iter().zip(arguments).map(start).collect()
    }

    /// Returns the arguments of each relay. A chain of one relay is the relay by itself, in no cluster.
    fn arguments(&self, contender: Contender) -> anyhow::Result<Vec<Vec<String>>> {
        if self.nodes.len() == 1 {
            return Ok(vec![Vec::new()]);
        }
        let mut before = None;
        let mut arguments = Vec::new();
        for name in &self.nodes {
            arguments.push(self.by.arguments(contender, before)?);
            before = Some(address(self.site.node(name)?));
        }
        Ok(arguments)
    }

    /// Starts traffic, and waits until it flows and the warm-up is over.
    fn start_traffic(&self, contender: Contender, load: &RowLoad) -> anyhow::Result<RelayTraffic> {
        let edge = self.nodes.last().context("a chain has a relay")?;
        let route = self.site.route_through(edge)?;
        let node = self.site.node(edge)?;
        let flows = flow_detector(node, device(node, &format!("{edge}-sub1"))?, load, FLOWING);
        let instruments = self.probe_time() + self.count_time();
        let seconds = self.seconds + instruments.as_secs_f64() + SPARE_SECONDS;
        let traffic = RelayTraffic::start(contender, &route, load, seconds, self.site.directory(), flows)?;
        std::thread::sleep(WARM_UP);
        Ok(traffic)
    }

    fn probe_time(&self) -> Duration {
        Duration::from_secs_f64((self.seconds / 2.0).max(1.0))
    }

    fn count_time(&self) -> Duration {
        Duration::from_secs_f64((self.seconds / 5.0).max(1.0))
    }

    /// Measures CPU time without any instrument attached: of each relay, and each time of the whole machine.
    fn undisturbed(&self, relays: &[BenchProcess]) -> anyhow::Result<Vec<Used>> {
        let take =
            || relays.iter().map(|relay| UsageReading::take(relay.id())).collect::<Result<Vec<_>, _>>();
        let before = take()?;
        std::thread::sleep(Duration::from_secs_f64(self.seconds));
        let after = take()?;
        Ok(after.iter().zip(&before).map(|(after, before)| after.used_since(before)).collect())
    }

    /// Measures with the packet probe how long objects take: through the whole chain, and through each relay.
    fn probed(&self, load: &RowLoad) -> anyhow::Result<(WireFigures, Vec<WireFigures>)> {
        let mut probe = self.attach_probe(load)?;
        let samples = drain(&mut probe, self.probe_time())?;
        let hosts = self.hosts()?;
        let [publisher, first, ..] = hosts[..] else { bail!("a chain has a relay") };
        let [.., edge, subscribers] = hosts[..] else { bail!("a chain has a relay") };
        let neighbours = hosts.windows(3).filter_map(|three| <[IpAddr; 3]>::try_from(three).ok());
        let hop = |[before, relay, after]: [IpAddr; 3]| {
            // A relay subscribes once for all that ask it.
            let flows = if after == subscribers { load.subscribers } else { 1 };
            matched_between(
                &samples,
                [before, relay],
                [relay, after],
                &RowLoad { subscribers: flows, ..*load },
            )
        };
        let total = matched_between(&samples, [publisher, first], [edge, subscribers], load);
        Ok((total, neighbours.map(hop).collect()))
    }

    /// Measures the work of each relay's BPF programs, with their run-time statistics. It is `None` for a relay without
    /// such programs.
    fn counted(
        &self,
        contender: Contender,
        relays: &[BenchProcess],
    ) -> anyhow::Result<Vec<Option<KernelWork>>> {
        let _statistics = Statistics::enable()?;
        let earlier = self.readings(contender, relays)?;
        std::thread::sleep(self.count_time());
        let later = self.readings(contender, relays)?;
        let work = |(later, earlier): (Option<EngineReading>, Option<EngineReading>)| {
            later.zip(earlier).and_then(|(later, earlier)| later.since(&earlier).kernel)
        };
        Ok(later.into_iter().zip(earlier).map(work).collect())
    }

    /// Reads the counters of each relay; `None` for a relay that is not Millrace.
    fn readings(
        &self,
        contender: Contender,
        relays: &[BenchProcess],
    ) -> anyhow::Result<Vec<Option<EngineReading>>> {
        let read = |(name, relay): (&String, &BenchProcess)| {
            let node = self.site.node(name)?;
            contender.engine().map(|_| EngineReading::take(node, relay.id())).transpose()
        };
        self.nodes.iter().zip(relays).map(read).collect()
    }

    /// Attaches the packet probe to all interfaces of all relays. The last link comes first, so that an object that the
    /// probe sees on its arrival at any relay is also seen when it leaves this relay and those behind it.
    fn attach_probe(&self, load: &RowLoad) -> anyhow::Result<PacketProbe> {
        let copies = load.subscribers + 2 * self.nodes.len();
        let mut probe = PacketProbe::load(&probe::Config {
            min_payload_bytes: load.object_bytes,
            capacity: load.rate_hz * copies as u32 * 4,
            mechanism: None,
        })?;
        for name in self.nodes.iter().rev() {
            let node = self.site.node(name)?;
            for interface in node.interfaces().iter().rev() {
                let device = interface.device.as_str();
                node.enter(|| anyhow::Ok(probe.attach(if_nametoindex(device)?.cast_signed())?))??;
            }
        }
        Ok(probe)
    }

    /// Returns the addresses of publisher, relays and subscribers, in this order.
    fn hosts(&self) -> anyhow::Result<Vec<IpAddr>> {
        let relays = self.nodes.iter().map(String::as_str);
        let names = std::iter::once("pub").chain(relays).chain(["sub1"]);
        names.map(|name| Ok(IpAddr::V4(self.site.node(name).map(LabNode::addr_v4)?))).collect()
    }
}

/// Matches the objects that `came` over one link, from its first host to its second, with the copies that `went` over
/// another link.
fn matched_between(
    samples: &[PacketSample],
    came: [IpAddr; 2],
    went: [IpAddr; 2],
    load: &RowLoad,
) -> WireFigures {
    // A packet is seen at both ends of a link between two relays, and matching looks at one host and the direction.
    // Packets that go the other way, such as large path MTU probes, are left out here.
    let ends = |sample: &PacketSample| [sample.source.ip(), sample.destination.ip()];
    let inside: Vec<_> = samples.iter().filter(|it| [came, went].contains(&ends(it))).copied().collect();
    let [publisher, _] = came;
    let [_, subscribers] = went;
    let ends = WireHosts { publisher, subscribers, flows: load.subscribers, object_bytes: load.object_bytes };
    wire::matched(&inside, &ends)
}

#[cfg(test)]
mod tests;
