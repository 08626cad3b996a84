//! Floods a server with QUIC Initials from forged addresses, at the rate that one CPU core can generate.

use std::{
    net::SocketAddrV4,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Context as _, anyhow, ensure};
use millrace_kernel::{clock::monotonic_ns, programs::Statistics};
use millrace_lab_kernel::flood::Flood;
use nix::{
    net::if_::if_nametoindex,
    sched::{CpuSet, sched_getcpu, sched_setaffinity},
    time::{ClockId, clock_gettime},
    unistd::Pid,
};
use serde::{Deserialize, Serialize};

use super::{
    super::{process::BenchProcess, usage::UsageReading},
    defence::{Defence, DefenceGuard, DefenceLimits, run as command},
    http3::{self, BodyTimes},
    quota::rate,
    site::{ATTACKERS, CLIENTS, GateBenchSite, SERVER, addresses, interface},
};

/// Interval between two requests of an honest client. With this interval, the machine is half idle before the flood, so
/// that an effect of the flood can be seen.
const HONEST_INTERVAL: Duration = Duration::from_millis(40);
const LIMITS: DefenceLimits = DefenceLimits::New { client: 10, all: 2000 };
const SETTLE: Duration = Duration::from_millis(500);
/// Extra time that processes may take to start and to end.
const GRACE: Duration = Duration::from_secs(10);
/// Number of packets in each run of the BPF program that sends the flood. It is large, since the kernel waits for some
/// ms at the start and end of a run.
const CHUNK: u32 = 1 << 18;

#[derive(Debug, clap::Args)]
pub struct Send {
    /// Interface to send on; if absent, packets are built and dropped
    #[arg(long)]
    device: Option<String>,
    #[arg(long)]
    to: SocketAddrV4,
    #[arg(long)]
    to_mac: String,
    #[arg(long)]
    seconds: f64,
}

/// The result that the flood generator prints.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
struct FloodResult {
    /// Number of packets that were built.
    packets: u64,
    elapsed_ns: u64,
    /// CPU time of the generator's process. With veth pairs it includes the work of receiving the packets, since the
    /// kernel does that work in the generator's context.
    cpu_ns: u64,
}

impl FloodResult {
    fn seconds(&self) -> f64 {
        self.elapsed_ns.max(1) as f64 / 1e9
    }
}

/// Floods for the given time and prints the result as JSON.
pub fn send(args: Send) -> anyhow::Result<()> {
    let mac = parse_mac(&args.to_mac).ok_or_else(|| anyhow!("{} is not a MAC address", args.to_mac))?;
    let index = |device: String| if_nametoindex(device.as_str()).with_context(|| device);
    let flood = Flood::load(args.device.map(index).transpose()?, mac, args.to)?;
    stay_here().context("cannot pin the thread to one CPU")?;
    let length = Duration::from_secs_f64(args.seconds);
    let start = Instant::now();
    let cpu_start = cpu_ns()?;
    let mut packets = 0;
    while start.elapsed() < length {
        flood.send(CHUNK)?;
        packets += u64::from(CHUNK);
    }
    let sent =
        FloodResult { packets, elapsed_ns: start.elapsed().as_nanos() as u64, cpu_ns: cpu_ns()? - cpu_start };
    println!("{}", serde_json::to_string(&sent)?);
    Ok(())
}

/// Keeps this thread on its current CPU. Packets of a veth pair are received on the CPU that sends them. If the thread
/// moved to another CPU, the receiver would stay behind and could not keep up.
fn stay_here() -> nix::Result<()> {
    let mut here = CpuSet::new();
    here.set(sched_getcpu()?)?;
    sched_setaffinity(Pid::from_raw(0), &here)
}

fn cpu_ns() -> nix::Result<u64> {
    clock_gettime(ClockId::CLOCK_PROCESS_CPUTIME_ID).map(|time| Duration::from(time).as_nanos() as u64)
}

fn parse_mac(text: &str) -> Option<[u8; 6]> {
    let bytes: Option<Vec<u8>> = text.split(':').map(|byte| u8::from_str_radix(byte, 16).ok()).collect();
    bytes?.try_into().ok()
}

/// Measured values of one run with a defence. Values that do not apply are `null`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct FloodFigures {
    /// HTTP response bodies that honest clients got per second, during the first flood. Only the first flood runs while
    /// honest clients send requests. `calm_requests_per_second` is the rate before it.
    pub requests_per_second: f64,
    pub calm_requests_per_second: f64,
    pub mean_duration_ms: f64,
    pub honest_goodput_ratio: f64,
    /// Packets per second that arrived in a second flood, without honest traffic. This field and the fields after it
    /// are measured in the second flood, unless their comments say otherwise. `dropped_packets_per_second` is the
    /// defence's own count.
    pub flood_packets_per_second: f64,
    pub dropped_packets_per_second: Option<f64>,
    /// CPU time of flood generator, ksoftirqd threads and server, per packet, ns. It is the sum of the two fields
    /// below.
    pub cpu_ns_per_packet_with_generator: f64,
    pub generator_ns_per_packet: f64,
    pub cpu_ns_per_refused_packet: f64,
    pub drops_per_second_per_core: Option<f64>,
    /// Run time of the gate's BPF programs per packet, ns, measured in a third, shorter flood.
    pub bpf_ns_per_packet: Option<f64>,
    /// CPU time per packet, computed from the idle time of all CPUs. It includes all other work on the machine.
    pub machine_ns_per_packet: f64,
}

pub fn run(
    site: &GateBenchSite,
    defence: Defence,
    calm: Duration,
    length: Duration,
) -> anyhow::Result<FloodFigures> {
    let place = site.place()?;
    let generator = generator_alone(site, length)?;
    let guard = DefenceGuard::install(&place, defence, LIMITS)?;
    let mut server = site.start_server(defence, LIMITS)?;
    let (got, calm_ns, flood_ns) = with_honest_clients(site, calm, length)?;
    server.check_runs()?;
    std::thread::sleep(SETTLE);
    let cost = FloodCost::measure(site, &guard, &server, length)?;
    let calm = rate(&got, calm_ns);
    ensure!(calm > 0.0, "honest clients got nothing before the flood");
    let flooded: Vec<&BodyTimes> =
        got.iter().filter(|got| (flood_ns.0..flood_ns.1).contains(&got.done_ns)).collect();
    let duration_ns: u64 = flooded.iter().map(|got| got.done_ns - got.asked_ns).sum();
    let requests_per_second = rate(&got, flood_ns);
    let per_packet = |ns: f64| ns / cost.arrived.max(1) as f64;
    let per_second = |packets: u64| packets as f64 / cost.sent.seconds();
    let own = generator.cpu_ns as f64 / generator.packets.max(1) as f64;
    // Subtract the generator's own work. What remains is the cost of refusing packets.
    let refusing = per_packet(cost.cpu_ns as f64 - own * cost.sent.packets as f64);
    Ok(FloodFigures {
        requests_per_second,
        calm_requests_per_second: calm,
        mean_duration_ms: duration_ns as f64 / flooded.len().max(1) as f64 / 1e6,
        honest_goodput_ratio: requests_per_second / calm,
        flood_packets_per_second: per_second(cost.arrived),
        dropped_packets_per_second: cost.dropped.map(per_second),
        cpu_ns_per_packet_with_generator: per_packet(cost.cpu_ns as f64),
        generator_ns_per_packet: own,
        cpu_ns_per_refused_packet: refusing,
        drops_per_second_per_core: (defence != Defence::None).then(|| 1e9 / refusing.max(1.0)),
        bpf_ns_per_packet: bpf_ns_per_packet(site, &guard, length)?,
        machine_ns_per_packet: per_packet(cost.machine_ns as f64),
    })
}

/// Measures the generator's own cost: it builds packets and sends none.
fn generator_alone(site: &GateBenchSite, length: Duration) -> anyhow::Result<FloodResult> {
    finish(start(site, None, length / 3)?, length)
}

/// Start and end of a period by `CLOCK_MONOTONIC`, ns.
type TimeSpan = (u64, u64);

/// Runs honest clients through a calm period and a flood. Returns the times of the response bodies that the clients
/// got, and the start and end of both periods.
fn with_honest_clients(
    site: &GateBenchSite,
    calm: Duration,
    length: Duration,
) -> anyhow::Result<(Vec<BodyTimes>, TimeSpan, TimeSpan)> {
    let target = site.target()?;
    let clients = site.node(CLIENTS)?;
    let stop = Arc::new(AtomicBool::new(false));
    let stopped = {
        let stop = stop.clone();
        move || stop.load(Ordering::Relaxed)
    };
    std::thread::scope(|scope| {
        let honest = scope.spawn(move || {
            clients.enter(|| http3::honest(&target, &addresses(clients), HONEST_INTERVAL, stopped))?
        });
        let stages = || {
            std::thread::sleep(SETTLE);
            let begun = monotonic_ns();
            std::thread::sleep(calm);
            let calm_ns = (begun, monotonic_ns());
            let generator = start(site, Some(attackers_device(site)?), length)?;
            let begun = monotonic_ns();
            let sent = finish(generator, length)?;
            anyhow::Ok((calm_ns, (begun, begun + sent.elapsed_ns)))
        };
        let spans = stages();
        stop.store(true, Ordering::Relaxed);
        let got = honest.join().map_err(|_| anyhow!("a client panicked"))?;
        let (calm_ns, flood_ns) = spans?;
        Ok((got?, calm_ns, flood_ns))
    })
}

/// Numbers of packets, and CPU times, of a flood on a server that has no honest clients.
struct FloodCost {
    sent: FloodResult,
    arrived: u64,
    dropped: Option<u64>,
    cpu_ns: u64,
    machine_ns: u64,
}

impl FloodCost {
    fn measure(
        site: &GateBenchSite,
        guard: &DefenceGuard<'_>,
        server: &BenchProcess,
        length: Duration,
    ) -> anyhow::Result<Self> {
        let refused = guard.refused()?;
        let arrived = arrivals(site)?;
        let softirq = softirq_threads_ns()?;
        let before = UsageReading::take(server.id())?;
        let sent = finish(start(site, Some(attackers_device(site)?), length)?, length)?;
        let used = UsageReading::take(server.id())?.used_since(&before);
        let softirq_ns = softirq_threads_ns()?.saturating_sub(softirq);
        let dropped = guard.refused()?.zip(refused).map(|(after, before)| after - before);
        Ok(Self {
            sent,
            arrived: arrivals(site)? - arrived,
            dropped,
            cpu_ns: sent.cpu_ns + softirq_ns + used.process_ns,
            machine_ns: used.machine_ns,
        })
    }
}

/// Measures the run time of the packet gate's BPF programs in a separate flood, since the kernel's run-time statistics
/// cost time.
fn bpf_ns_per_packet(
    site: &GateBenchSite,
    guard: &DefenceGuard<'_>,
    length: Duration,
) -> anyhow::Result<Option<f64>> {
    let _statistics = Statistics::enable()?;
    let Some(before) = guard.bpf_time()? else { return Ok(None) };
    let arrived = arrivals(site)?;
    finish(start(site, Some(attackers_device(site)?), length / 3)?, length)?;
    let arrived = arrivals(site)? - arrived;
    let used = guard.bpf_time()?.map(|after| after.since(before));
    Ok(used.map(|used| used.ns as f64 / arrived.max(1) as f64))
}

/// Returns how many packets arrived on the attackers' interface, including dropped ones.
fn arrivals(site: &GateBenchSite) -> anyhow::Result<u64> {
    let node = site.node(SERVER)?;
    let device = &interface(node, ATTACKERS)?.device;
    let links: serde_json::Value =
        serde_json::from_str(&command(node, "ip", &["-j", "-s", "link", "show", "dev", device], "")?)?;
    links
        .pointer("/0/stats64/rx/packets")
        .and_then(|packets| packets.as_u64())
        .context("statistics of ip link")
}

fn attackers_device(site: &GateBenchSite) -> anyhow::Result<&str> {
    Ok(&interface(site.node(ATTACKERS)?, ATTACKERS)?.device)
}

fn start(site: &GateBenchSite, device: Option<&str>, length: Duration) -> anyhow::Result<BenchProcess> {
    let mac = &interface(site.node(SERVER)?, ATTACKERS)?.mac;
    let mut generator = site.node(ATTACKERS)?.command(std::env::current_exe()?);
    generator.args(["bench", "flood", "--to", &site.server()?.to_string()]);
    generator.args(device.map(|device| ["--device", device]).into_iter().flatten());
    generator.args(["--to-mac", mac, "--seconds", &length.as_secs_f64().to_string()]);
    BenchProcess::start("flood", generator, site.directory.path())
}

fn finish(generator: BenchProcess, length: Duration) -> anyhow::Result<FloodResult> {
    let sent: FloodResult = serde_json::from_str(&generator.finish(length + GRACE)?)
        .context("cannot parse the generator's figures")?;
    ensure!(sent.packets > 0, "the generator could send nothing");
    Ok(sent)
}

/// Returns the CPU time of all `ksoftirqd` threads, ns. They take over softirqs that would otherwise starve processes.
fn softirq_threads_ns() -> anyhow::Result<u64> {
    let mut total = 0;
    for entry in std::fs::read_dir("/proc")? {
        let path = entry?.path();
        let name = std::fs::read_to_string(path.join("comm")).unwrap_or_default();
        if name.starts_with("ksoftirqd/") {
            let times = std::fs::read_to_string(path.join("schedstat"))?;
            total += times.split_whitespace().next().and_then(|ns| ns.parse::<u64>().ok()).unwrap_or(0);
        }
    }
    Ok(total)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mac_addresses_are_parsed() {
        assert_eq!(parse_mac("02:00:00:00:00:ff"), Some([2, 0, 0, 0, 0, 255]));
        assert_eq!(parse_mac("02:00"), None);
        assert_eq!(parse_mac("x"), None);
    }
}
