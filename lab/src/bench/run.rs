//! One run: a relay, its traffic, and one stretch of time after the other for what is measured, so that no
//! instrument is part of what another one sees.

use std::net::IpAddr;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow};
use millrace_kernel::clock::monotonic_ns;
use millrace_kernel::programs::Statistics;
use millrace_lab_kernel::probe::{self, Probe, Sample};
use millrace_lab_kernel::softirqs::Softirqs;
use millrace_lab_kernel::syscalls::Syscalls;
use nix::net::if_::if_nametoindex;

use super::contender::Contender;
use super::engine;
use super::figures::{Cpu, Figures, Load, PacketsPerObject, Programs};
use super::process::{Packets, Process};
use super::profile::Profile;
use super::replay::replay;
use super::site::{PUBLISHER_LINK, SUBSCRIBERS_LINK, Site, device};
use super::traffic::{Received, Traffic};
use super::usage::{Reading, Used, peak_rss_bytes};
use super::wire::{self, Ends, Wire};
use crate::lab::Node;

/// From the first objects on: path MTU discovery and congestion windows settle.
const WARM_UP: Duration = Duration::from_secs(2);
/// What the publisher sends beyond the measured stretches: for start-up, warm-up, loading of programs.
const SPARE_SECONDS: f64 = 15.0;
/// The same where fewer programs are loaded.
const TRIAL_SPARE_SECONDS: f64 = 3.5;
const DRAIN_INTERVAL: Duration = Duration::from_millis(500);
/// Of the asked packet rate, from which on traffic counts as flowing.
const FLOWING: f64 = 0.8;
/// The same where the link does not take that rate.
const NARROW_FLOWING: f64 = 0.3;
/// The same where it is not known whether it can ever flow at that rate.
const TRIAL_FLOWING: f64 = 0.05;

/// The network in which every relay is measured, and what they share.
pub struct Bench {
    site: Site,
    /// Of the undisturbed stretch; the ones with instruments are parts of it.
    seconds: f64,
    profile: Profile,
    /// Bits per second of media to one subscriber.
    offered: u64,
}

/// A relay under a load: whether it keeps up.
pub struct Trial {
    pub received: Received,
    pub used: Used,
    /// Busy with what is the relay's: see [`Bench::trial`].
    pub relay_cpus: f64,
}

impl Bench {
    /// `offered`: bits per second of media to one subscriber.
    pub fn new(seconds: f64, profile: Profile, offered: u64) -> anyhow::Result<Self> {
        let site = Site::new(&profile.topology(SUBSCRIBERS_LINK, offered)?)?;
        Ok(Self { site, seconds, profile, offered })
    }

    pub fn run(&self, contender: Contender, load: &Load) -> anyhow::Result<Figures> {
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

    fn run_on_link(&self, contender: Contender, load: &Load) -> anyhow::Result<Figures> {
        let relay = self.site.start_relay(contender)?;
        let seconds = self.seconds + self.wire_time().as_secs_f64() + self.calls_time().as_secs_f64();
        let flowing = if self.profile.is_narrow() { NARROW_FLOWING } else { FLOWING };
        let mut traffic = self.start_traffic(contender, load, seconds + SPARE_SECONDS, flowing)?;

        let before = self.packets()?;
        let (undisturbed, used) = self.undisturbed(&relay)?;
        let after = self.packets()?;
        let (probed, wire) = self.probed(load)?;
        let (syscalls_per_object, programs) = self.counted(contender, &relay, load)?;
        traffic.check_runs().context("traffic ended before it was measured")?;
        let rss_bytes = peak_rss_bytes(relay.id())?;
        let received = traffic.finish()?;

        let objects = |ns: u64| received.rate_hz * ns as f64 / 1e9;
        let probe_adds_us = (received.latency_of(&probed))
            .zip(received.latency_of(&undisturbed))
            .map(|(with, without)| with.p50 - without.p50);
        Ok(Figures {
            delivered: received.delivered,
            lost: received.lost,
            latency_us: received.latency_of(&undisturbed).or(received.latency_us),
            owed: received.owed,
            wire_latency_us: crate::stats::Percentiles::of_ns(wire.latencies_ns),
            cpu_ns_per_object: Cpu {
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

    /// Whether the relay keeps up with a load, and what that costs.
    pub fn trial(&self, contender: Contender, load: &Load) -> anyhow::Result<Trial> {
        let relay = self.site.start_relay(contender)?;
        let seconds = self.seconds + self.attribution_time().as_secs_f64() + TRIAL_SPARE_SECONDS;
        let mut traffic = self.start_traffic(contender, load, seconds, TRIAL_FLOWING)?;
        let (_, used) = self.undisturbed(&relay)?;
        let relay_cpus = self.attributed(&relay)?;
        traffic.check_runs().context("traffic ended before it was measured")?;
        let received = traffic.finish()?;
        Ok(Trial { received, used, relay_cpus })
    }

    /// Traffic for `seconds`, of which the warm-up is over; `flowing`: the part of the asked rate that is waited for.
    fn start_traffic(
        &self,
        contender: Contender,
        load: &Load,
        seconds: f64,
        flowing: f64,
    ) -> anyhow::Result<Traffic> {
        let route = self.site.route()?;
        let node = self.site.relay()?;
        let flows = flow_detector(node, device(node, SUBSCRIBERS_LINK)?, load, flowing);
        let traffic = Traffic::start(contender, &route, load, seconds, self.site.directory(), flows)?;
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

    /// Packets that came from the publisher and left towards the subscribers so far.
    fn packets(&self) -> anyhow::Result<(u64, u64)> {
        let node = self.site.relay()?;
        let of = |link| {
            let device = device(node, link)?;
            node.enter(|| Packets::of(&device))?
                .with_context(|| format!("no packets of {device} are counted"))
        };
        Ok((of(PUBLISHER_LINK)?.received, of(SUBSCRIBERS_LINK)?.sent))
    }

    /// CPU and application latency, with nothing attached.
    fn undisturbed(&self, relay: &Process) -> anyhow::Result<(Range<u64>, Used)> {
        let start = monotonic_ns();
        let before = Reading::take(relay.id())?;
        std::thread::sleep(Duration::from_secs_f64(self.seconds));
        let used = Reading::take(relay.id())?.used_since(&before);
        Ok((start..monotonic_ns(), used))
    }

    /// CPUs that the relay keeps busy: its process, without softirqs that run on top of it, and the networking
    /// softirqs of all CPUs.
    fn attributed(&self, relay: &Process) -> anyhow::Result<f64> {
        let mut softirqs = Softirqs::attach(relay.id())?;
        let (earlier, before) = (softirqs.times()?, Reading::take(relay.id())?);
        std::thread::sleep(self.attribution_time());
        let (later, used) = (softirqs.times()?, Reading::take(relay.id())?.used_since(&before));
        let (all_ns, own_ns) = (later.all_ns - earlier.all_ns, later.own_ns - earlier.own_ns);
        Ok((used.process_ns.saturating_sub(own_ns) + all_ns) as f64 / used.elapsed_ns.max(1) as f64)
    }

    /// Wire latency.
    fn probed(&self, load: &Load) -> anyhow::Result<(Range<u64>, Wire)> {
        let mut probe = self.attach_probe(load)?;
        let start = monotonic_ns();
        let wire = self.sample(&mut probe, load, self.wire_time())?;
        Ok((start..monotonic_ns(), wire))
    }

    /// System calls of the relay per object, with the probe as the counter of objects, and what its BPF programs do.
    fn counted(
        &self,
        contender: Contender,
        relay: &Process,
        load: &Load,
    ) -> anyhow::Result<(Option<f64>, Programs)> {
        let node = self.site.relay()?;
        let reading = || contender.engine().map(|_| engine::Reading::take(node, relay.id()));
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

    fn attach_probe(&self, load: &Load) -> anyhow::Result<Probe> {
        let packets_per_s = load.rate_hz * (load.subscribers as u32 + 1);
        let mut probe = Probe::load(&probe::Config {
            min_payload_bytes: load.object_bytes,
            capacity: packets_per_s * 4,
            mechanism: None,
        })?;
        let node = self.site.relay()?;
        // The publisher's side last, so that every object that is seen coming is also seen leaving.
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

    fn sample(&self, probe: &mut Probe, load: &Load, time: Duration) -> anyhow::Result<Wire> {
        let samples = drain(probe, time)?;
        let ends = Ends {
            publisher: IpAddr::V4(self.site.node("pub")?.addr_v4()),
            subscribers: IpAddr::V4(self.site.node("sub1")?.addr_v4()),
            object_bytes: load.object_bytes,
        };
        Ok(wire::matched(&samples, &ends))
    }
}

/// Tells, each time it is asked, whether since the last time packets left a node's interface towards the subscribers at
/// this part of the asked rate.
pub fn flow_detector(node: &Node, device: String, load: &Load, flowing: f64) -> impl FnMut() -> bool {
    let wanted = flowing * f64::from(load.rate_hz) * load.subscribers as f64;
    let mut last = None;
    move || {
        let Ok(Some(packets)) = node.enter(|| Packets::of(&device)) else { return false };
        let now = Instant::now();
        let (before, then) = last.replace((packets.sent, now)).unwrap_or((packets.sent, now));
        let elapsed = now.duration_since(then).as_secs_f64();
        elapsed > 0.0 && (packets.sent - before) as f64 / elapsed >= wanted
    }
}

fn drain(probe: &mut Probe, time: Duration) -> anyhow::Result<Vec<Sample>> {
    let start = Instant::now();
    let mut samples = Vec::new();
    while start.elapsed() < time {
        std::thread::sleep(DRAIN_INTERVAL);
        samples.extend(probe.read()?);
    }
    let dropped = probe.counters()?.ring_full;
    if dropped > 0 {
        return Err(anyhow!("the probe's ring was full {dropped} times"));
    }
    Ok(samples)
}
