//! One run of a relay and its traffic, in several measured periods. Each instrument (the packet probe in BPF, the
//! counters of system calls) has a period of its own, so that it does not affect what another instrument measures.

use std::net::IpAddr;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow};
use millrace_kernel::clock::monotonic_ns;
use millrace_kernel::programs::Statistics;
use millrace_lab_kernel::probe::{self, PacketProbe, PacketSample};
use millrace_lab_kernel::softirqs::Softirqs;
use millrace_lab_kernel::syscalls::Syscalls;
use nix::net::if_::if_nametoindex;

use super::contender::Contender;
use super::engine;
use super::figures::{CpuPerObject, PacketsPerObject, ProgramWork, RelayFigures, RowLoad};
use super::process::{BenchProcess, InterfacePackets};
use super::profile::LinkProfile;
use super::replay::replay;
use super::site::{BenchSite, PUBLISHER_LINK, SUBSCRIBERS_LINK, device};
use super::traffic::{ReceivedObjects, RelayTraffic, joining};
use super::usage::{UsageReading, Used, peak_rss_bytes};
use super::wire::{self, WireFigures, WireHosts};
use crate::lab::LabNode;

/// Time after the first objects in which path MTU discovery and congestion windows settle.
pub const WARM_UP: Duration = Duration::from_secs(2);
/// Extra time that the publisher sends, seconds: for start, warm-up, and loading of BPF programs.
pub const SPARE_SECONDS: f64 = 15.0;
/// Extra time that the publisher sends in a trial (a short run that only shows whether a relay keeps up), seconds.
/// Trials load fewer BPF programs than other runs.
const TRIAL_SPARE_SECONDS: f64 = 3.5;
const DRAIN_INTERVAL: Duration = Duration::from_millis(500);
/// Least share of the expected packet rate at which a benchmark considers its traffic to flow.
pub const FLOWING: f64 = 0.8;
/// Share of the expected packet rate at which traffic counts as flowing, for links that do not carry that rate.
const NARROW_FLOWING: f64 = 0.3;
/// Share of the expected packet rate at which traffic counts as flowing in trials, whose rate may be too high for the
/// relay.
const TRIAL_FLOWING: f64 = 0.05;

/// The lab and the settings of all runs.
pub struct BenchRun {
    site: BenchSite,
    /// Length of the period without instruments (packet probe, counters of system calls), seconds. Periods with
    /// instruments last a fraction of it.
    seconds: f64,
    profile: LinkProfile,
    /// Rate of media to one subscriber, bits per second.
    offered: u64,
}

/// Objects delivered and CPU time used in a short run, from which follows whether the relay keeps up with the load.
pub struct LoadTrial {
    pub received: ReceivedObjects,
    pub used: Used,
    /// Number of CPUs that the relay keeps busy; see [`BenchRun::trial`].
    pub relay_cpus: f64,
}

impl BenchRun {
    /// Creates the lab. `offered` is the rate of media to one subscriber, bits per second.
    pub fn new(seconds: f64, profile: LinkProfile, offered: u64) -> anyhow::Result<Self> {
        let site = BenchSite::new(&profile.topology(SUBSCRIBERS_LINK, offered)?)?;
        Ok(Self { site, seconds, profile, offered })
    }

    pub fn run(&self, contender: Contender, load: &RowLoad) -> anyhow::Result<RelayFigures> {
        let Some(changes) = self.profile.changes(self.offered) else {
            return self.run_on_link(contender, load);
        };
        let link = self.site.link(SUBSCRIBERS_LINK)?;
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let replaying = scope.spawn(|| replay(link, changes, || is_over.load(Ordering::Relaxed)));
            let figures = self.run_on_link(contender, load);
            is_over.store(true, Ordering::Relaxed);
            replaying.join().map_err(|_| anyhow!("the trace's thread panicked"))??;
            figures
        })
    }

    fn run_on_link(&self, contender: Contender, load: &RowLoad) -> anyhow::Result<RelayFigures> {
        let relay = self.site.start_relay(contender)?;
        let seconds = self.seconds + self.wire_time().as_secs_f64() + self.calls_time().as_secs_f64();
        let seconds = seconds + joining(load).as_secs_f64();
        let flowing = if self.profile.is_narrow() { NARROW_FLOWING } else { FLOWING };
        let mut traffic = self.start_traffic(contender, load, seconds + SPARE_SECONDS, flowing)?;

        let before = self.packets()?;
        let (undisturbed, used) = self.undisturbed(&relay)?;
        let after = self.packets()?;
        // The instruments (packet probe, counters of system calls) run after the period without instruments, one at a
        // time.
        let (probed, wire) = self.probed(load)?;
        let (syscalls_per_object, programs) = self.counted(contender, &relay, load)?;
        traffic.check_runs().context("traffic ended before it was measured")?;
        // Read the relay's memory while the relay still runs.
        let rss_bytes = peak_rss_bytes(relay.id())?;
        let received = traffic.finish()?;

        let objects = |ns: u64| received.rate_hz * ns as f64 / 1e9;
        // Compare the median latency with and without the packet probe. The difference shows the delay that the probe
        // itself adds.
        let probe_adds_us = (received.latency_of(&probed))
            .zip(received.latency_of(&undisturbed))
            .map(|(with, without)| with.p50 - without.p50);
        Ok(RelayFigures {
            delivered: received.delivered,
            lost: received.lost,
            latency_us: received.latency_of(&undisturbed).or(received.latency_us),
            owed: received.owed,
            wire_latency_us: crate::stats::Percentiles::from_ns(wire.latencies_ns),
            cpu_ns_per_object: CpuPerObject {
                machine: used.machine_ns as f64 / objects(used.elapsed_ns),
                relay: used.process_ns as f64 / objects(used.elapsed_ns),
            },
            syscalls_per_object,
            packets_per_object: PacketsPerObject {
                from_publisher: (after.0 - before.0) as f64 * load.subscribers as f64
                    / objects(used.elapsed_ns),
                to_subscriber: (after.1 - before.1) as f64 / objects(used.elapsed_ns),
            },
            kernel: programs.kernel,
            gate_ns_per_packet: programs.gate_ns_per_packet,
            rss_bytes,
            wire: wire.matched,
            probe_adds_us,
        })
    }

    /// Measures whether the relay keeps up with a load, and how many CPUs it needs.
    pub fn trial(&self, contender: Contender, load: &RowLoad) -> anyhow::Result<LoadTrial> {
        let relay = self.site.start_relay(contender)?;
        let seconds = self.seconds + self.attribution_time().as_secs_f64() + TRIAL_SPARE_SECONDS;
        let seconds = seconds + joining(load).as_secs_f64();
        let mut traffic = self.start_traffic(contender, load, seconds, TRIAL_FLOWING)?;
        let (_, used) = self.undisturbed(&relay)?;
        let relay_cpus = self.attributed(&relay)?;
        traffic.check_runs().context("traffic ended before it was measured")?;
        let received = traffic.finish()?;
        Ok(LoadTrial { received, used, relay_cpus })
    }

    /// Starts traffic for `seconds`, and waits until it flows and the warm-up is over. Traffic counts as flowing once
    /// the share `flowing` of the packet rate arrives.
    fn start_traffic(
        &self,
        contender: Contender,
        load: &RowLoad,
        seconds: f64,
        flowing: f64,
    ) -> anyhow::Result<RelayTraffic> {
        let route = self.site.route()?;
        let node = self.site.relay()?;
        let flows = flow_detector(node, device(node, SUBSCRIBERS_LINK)?, load, flowing);
        let traffic = RelayTraffic::start(contender, &route, load, seconds, self.site.directory(), flows)?;
        std::thread::sleep(WARM_UP);
        Ok(traffic)
    }

    fn wire_time(&self) -> Duration {
        Duration::from_secs_f64((self.seconds / 2.0).max(1.0))
    }

    fn attribution_time(&self) -> Duration {
        Duration::from_secs_f64((self.seconds / 4.0).max(0.5))
    }

    fn calls_time(&self) -> Duration {
        Duration::from_secs_f64((self.seconds / 5.0).max(1.0))
    }

    /// Returns the numbers of packets so far: from the publisher, and towards the subscribers.
    fn packets(&self) -> anyhow::Result<(u64, u64)> {
        let node = self.site.relay()?;
        let of = |link| {
            let device = device(node, link)?;
            node.enter(|| InterfacePackets::read_device(&device))?
                .with_context(|| format!("the kernel has no packet counters for {device}"))
        };
        Ok((of(PUBLISHER_LINK)?.received, of(SUBSCRIBERS_LINK)?.sent))
    }

    /// Measures CPU time and application latency without any instrument attached.
    fn undisturbed(&self, relay: &BenchProcess) -> anyhow::Result<(Range<u64>, Used)> {
        let start = monotonic_ns();
        let before = UsageReading::take(relay.id())?;
        std::thread::sleep(Duration::from_secs_f64(self.seconds));
        let used = UsageReading::take(relay.id())?.used_since(&before);
        Ok((start..monotonic_ns(), used))
    }

    /// Returns the number of CPUs that the relay keeps busy: its process without the softirqs that interrupted it, plus
    /// the networking softirqs of all CPUs.
    fn attributed(&self, relay: &BenchProcess) -> anyhow::Result<f64> {
        let mut softirqs = Softirqs::attach(relay.id())?;
        let earlier = softirqs.times()?;
        let before = UsageReading::take(relay.id())?;
        std::thread::sleep(self.attribution_time());
        let later = softirqs.times()?;
        let used = UsageReading::take(relay.id())?.used_since(&before);
        let all_ns = later.all_ns - earlier.all_ns;
        let own_ns = later.own_ns - earlier.own_ns;
        // The relay's CPU time contains the softirqs that interrupted it. They are subtracted, since `all_ns` contains
        // them as well.
        Ok((used.process_ns.saturating_sub(own_ns) + all_ns) as f64 / used.elapsed_ns.max(1) as f64)
    }

    /// Measures the wire latency with the BPF packet probe attached.
    fn probed(&self, load: &RowLoad) -> anyhow::Result<(Range<u64>, WireFigures)> {
        let mut probe = self.attach_probe(load)?;
        let start = monotonic_ns();
        let wire = self.sample(&mut probe, load, self.wire_time())?;
        Ok((start..monotonic_ns(), wire))
    }

    /// Measures the relay's system calls per object and the work of its BPF programs. The packet probe counts the
    /// objects.
    fn counted(
        &self,
        contender: Contender,
        relay: &BenchProcess,
        load: &RowLoad,
    ) -> anyhow::Result<(Option<f64>, ProgramWork)> {
        let node = self.site.relay()?;
        let reading = || contender.engine().map(|_| engine::EngineReading::take(node, relay.id()));
        let mut syscalls = Syscalls::attach(relay.id())?;
        let mut probe = self.attach_probe(load)?;
        let _statistics = Statistics::enable()?;
        let earlier = reading().transpose()?;
        let before: u64 = syscalls.counts()?.iter().sum();
        let wire = self.sample(&mut probe, load, self.calls_time())?;
        let after: u64 = syscalls.counts()?.iter().sum();
        let later = reading().transpose()?;
        let programs = later.zip(earlier).map(|(later, earlier)| later.since(&earlier)).unwrap_or_default();
        let copies = wire.latencies_ns.len();
        Ok(((copies > 0).then(|| (after - before) as f64 / copies as f64), programs))
    }

    fn attach_probe(&self, load: &RowLoad) -> anyhow::Result<PacketProbe> {
        let packets_per_s = load.rate_hz * (load.subscribers as u32 + 1);
        let mut probe = PacketProbe::load(&probe::Config {
            min_payload_bytes: load.object_bytes,
            capacity: packets_per_s * 4,
            mechanism: None,
        })?;
        let node = self.site.relay()?;
        // The packet probe is attached to the publisher's interface last, so that every object that it sees on arrival
        // is also seen when it leaves.
        for link in [SUBSCRIBERS_LINK, PUBLISHER_LINK] {
            let device = device(node, link)?;
            node.enter(|| {
                let ifindex = if_nametoindex(device.as_str())?;
                probe.attach(ifindex.cast_signed())?;
                anyhow::Ok(())
            })??;
        }
        Ok(probe)
    }

    fn sample(&self, probe: &mut PacketProbe, load: &RowLoad, time: Duration) -> anyhow::Result<WireFigures> {
        let samples = drain(probe, time)?;
        let ends = WireHosts {
            publisher: IpAddr::V4(self.site.node("pub")?.addr_v4()),
            subscribers: IpAddr::V4(self.site.node("sub1")?.addr_v4()),
            flows: load.subscribers,
            object_bytes: load.object_bytes,
        };
        Ok(wire::matched(&samples, &ends))
    }
}

/// Returns a function that reports whether traffic flows. It flows if the node's interface to the subscribers has sent
/// at least the share `flowing` of the expected packet rate since the function's last call.
pub fn flow_detector(node: &LabNode, device: String, load: &RowLoad, flowing: f64) -> impl FnMut() -> bool {
    let wanted = flowing * f64::from(load.rate_hz) * load.subscribers as f64;
    let mut last = None;
    move || {
        let Ok(Some(packets)) = node.enter(|| InterfacePackets::read_device(&device)) else { return false };
        let now = Instant::now();
        let (before, then) = last.replace((packets.sent, now)).unwrap_or((packets.sent, now));
        let elapsed = now.duration_since(then).as_secs_f64();
        elapsed > 0.0 && (packets.sent - before) as f64 / elapsed >= wanted
    }
}

/// Reads the probe's samples for `time`. Fails if the probe lost samples.
pub fn drain(probe: &mut PacketProbe, time: Duration) -> anyhow::Result<Vec<PacketSample>> {
    let start = Instant::now();
    let mut samples = Vec::new();
    while start.elapsed() < time {
        std::thread::sleep(DRAIN_INTERVAL);
        samples.extend(probe.read()?);
    }
    let dropped = probe.counters()?.ring_full;
    if dropped > 0 {
        return Err(anyhow!("the probe lost {dropped} packets because its ring buffer was full"));
    }
    Ok(samples)
}
