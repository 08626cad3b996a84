//! Initials of forged addresses, as fast as one core makes them.

use std::{
    io::IoSlice,
    net::{Ipv4Addr, SocketAddrV4},
    os::fd::AsRawFd as _,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Context as _, anyhow, bail, ensure};
use millrace_bpf::{clock::monotonic_ns, programs::Statistics};
use nix::{
    errno::Errno,
    sys::socket::{self, AddressFamily, LinkAddr, MsgFlags, MultiHeaders, SockFlag, SockType},
    time::{ClockId, clock_gettime},
};
use serde::{Deserialize, Serialize};

use super::{
    super::{process::Process, usage::Reading},
    defence::{Defence, Guard, Limits, run as command},
    http3::{self, Got},
    quota::rate,
    site::{ATTACKERS, CLIENTS, SERVER, Site, addresses, interface},
};

/// Of each honest client: what leaves the machine half idle, so that there is something to keep.
const HONEST_INTERVAL: Duration = Duration::from_millis(40);
const LIMITS: Limits = Limits::New { client: 10, all: 2000 };
const SETTLE: Duration = Duration::from_millis(500);
/// For processes to start and end beyond their time.
const GRACE: Duration = Duration::from_secs(10);
/// A device that forgets what it gets: a bridge without ports.
const SINK: &str = "sink";

const BATCH: usize = 64;
const ETHERNET: usize = 14;
const IP: usize = 20;
const UDP: usize = 8;
const INITIAL: usize = 1200;
const FRAME: usize = ETHERNET + IP + UDP + INITIAL;

#[derive(Debug, clap::Args)]
pub struct Send {
    #[arg(long)]
    device: String,
    #[arg(long)]
    to: SocketAddrV4,
    #[arg(long)]
    to_mac: String,
    #[arg(long)]
    seconds: f64,
}

/// What the generator did.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
struct Sent {
    packets: u64,
    elapsed_ns: u64,
    /// Of the process: sending, and what the receiving side does in the same context, as veth pairs do.
    cpu_ns: u64,
}

impl Sent {
    fn per_second(&self) -> f64 {
        self.packets as f64 / (self.elapsed_ns.max(1) as f64 / 1e9)
    }
}

/// Floods, and prints what it did.
pub fn send(args: Send) -> anyhow::Result<()> {
    let socket = output(&args.device).with_context(|| args.device.clone())?;
    let mac = parse_mac(&args.to_mac).ok_or_else(|| anyhow!("{} is no MAC address", args.to_mac))?;
    let mut frames = vec![frame(mac, args.to); BATCH];
    let mut headers = MultiHeaders::<()>::preallocate(BATCH, None);
    let mut random = fastrand::Rng::with_seed(1);
    let length = Duration::from_secs_f64(args.seconds);
    let (start, cpu_start, mut packets) = (Instant::now(), cpu_ns()?, 0);
    while start.elapsed() < length {
        frames.iter_mut().for_each(|frame| vary(frame, &mut random));
        let slices: Vec<[IoSlice; 1]> = frames.iter().map(|frame| [IoSlice::new(frame)]).collect();
        let nowhere = vec![None; BATCH];
        match socket::sendmmsg(socket.as_raw_fd(), &mut headers, &slices, nowhere, [], MsgFlags::empty()) {
            Ok(sent) => packets += sent.count() as u64,
            Err(Errno::ENOBUFS | Errno::EINTR) => {}
            Err(error) => bail!("{}: {error}", args.device),
        }
    }
    let sent = Sent { packets, elapsed_ns: start.elapsed().as_nanos() as u64, cpu_ns: cpu_ns()? - cpu_start };
    println!("{}", serde_json::to_string(&sent)?);
    Ok(())
}

/// A packet socket that sends and receives nothing.
fn output(device: &str) -> nix::Result<std::os::fd::OwnedFd> {
    let socket = socket::socket(AddressFamily::Packet, SockType::Raw, SockFlag::SOCK_CLOEXEC, None)?;
    let of_device = nix::ifaddrs::getifaddrs()?.filter(|entry| entry.interface_name == device);
    let address: Option<LinkAddr> =
        of_device.filter_map(|entry| entry.address?.as_link_addr().copied()).next();
    socket::bind(socket.as_raw_fd(), &address.ok_or(Errno::ENODEV)?)?;
    Ok(socket)
}

fn cpu_ns() -> nix::Result<u64> {
    clock_gettime(ClockId::CLOCK_PROCESS_CPUTIME_ID).map(|time| Duration::from(time).as_nanos() as u64)
}

fn parse_mac(text: &str) -> Option<[u8; 6]> {
    let bytes: Option<Vec<u8>> = text.split(':').map(|byte| u8::from_str_radix(byte, 16).ok()).collect();
    bytes?.try_into().ok()
}

/// Ethernet, IPv4, UDP without checksum, and an Initial of QUIC version 1 (RFC 9000, section 17.2.2) that nothing can
/// tell from a client's without its keys. Lacks what [`vary`] fills in.
fn frame(mac: [u8; 6], to: SocketAddrV4) -> Vec<u8> {
    let mut frame = Vec::with_capacity(FRAME);
    frame.extend(mac);
    frame.extend([2, 0, 0, 0, 0, 1, 8, 0]);
    frame.extend([0x45, 0]);
    frame.extend(((IP + UDP + INITIAL) as u16).to_be_bytes());
    frame.extend([0, 0, 0x40, 0, 64, 17, 0, 0]);
    frame.extend([0; 4]);
    frame.extend(to.ip().octets());
    frame.extend([0; 2]);
    frame.extend(to.port().to_be_bytes());
    frame.extend(((UDP + INITIAL) as u16).to_be_bytes());
    frame.extend([0, 0]);
    frame.extend([0xc3, 0, 0, 0, 1, 8]);
    frame.extend([0; 8]);
    // No source ID, no token, the length of the rest.
    frame.extend([0, 0]);
    let rest = (FRAME - frame.len() - 2) as u16;
    frame.extend((0x4000 | rest).to_be_bytes());
    frame.resize(FRAME, 0xa5);
    frame
}

/// Another client (198.18.0.0/15, which RFC 2544 sets aside for measurements), port and connection ID.
fn vary(frame: &mut [u8], random: &mut fastrand::Rng) {
    const SOURCE: usize = ETHERNET + 12;
    const CHECKSUM: usize = ETHERNET + 10;
    const PORT: usize = ETHERNET + IP;
    const ID: usize = ETHERNET + IP + UDP + 6;
    let client = Ipv4Addr::from(u32::from_be_bytes([198, 18, 0, 0]) | random.u32(..1 << 17));
    let mut put = |at: usize, bytes: &[u8]| {
        if let Some(place) = frame.get_mut(at..at + bytes.len()) {
            place.copy_from_slice(bytes);
        }
    };
    put(SOURCE, &client.octets());
    put(PORT, &random.u16(1024..).to_be_bytes());
    put(ID, &random.u64(..).to_be_bytes());
    put(CHECKSUM, &[0, 0]);
    let checksum = ip_checksum(frame.get(ETHERNET..ETHERNET + IP).unwrap_or_default());
    if let Some(place) = frame.get_mut(CHECKSUM..CHECKSUM + 2) {
        place.copy_from_slice(&checksum.to_be_bytes());
    }
}

/// RFC 1071.
fn ip_checksum(header: &[u8]) -> u16 {
    let words = header.chunks_exact(2).map(|pair| u32::from(pair[0]) << 8 | u32::from(pair[1]));
    let sum: u32 = words.sum();
    let sum = (sum & 0xffff) + (sum >> 16);
    !(((sum & 0xffff) + (sum >> 16)) as u16)
}

/// One defence, once. What does not apply is `null`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Figures {
    /// The flood of which the following is, with honest traffic: bodies that honest clients got per second, during and
    /// before.
    pub requests_per_second: f64,
    pub calm_requests_per_second: f64,
    pub mean_duration_ms: f64,
    pub honest_goodput_ratio: f64,
    /// The rest is of a second flood, without honest traffic. Sent, and dropped by the defence's own count.
    pub flood_packets_per_second: f64,
    pub dropped_packets_per_second: Option<f64>,
    /// CPU time of generator, softirq threads and server, for each packet; and without the generator's own.
    pub cpu_ns_per_packet_with_generator: f64,
    pub generator_ns_per_packet: f64,
    pub cpu_ns_per_refused_packet: f64,
    pub drops_per_second_per_core: Option<f64>,
    /// Run time of the gate's BPF programs, in a third and shorter flood.
    pub bpf_ns_per_packet: Option<f64>,
    /// From the idle time of all CPUs in place of the processes' own, everything else that ran included.
    pub machine_ns_per_packet: f64,
}

pub fn run(site: &Site, defence: Defence, calm: Duration, length: Duration) -> anyhow::Result<Figures> {
    let place = site.place()?;
    let generator = generator_alone(site, length)?;
    let guard = Guard::install(&place, defence, LIMITS)?;
    let mut server = site.start_server(defence, LIMITS)?;
    let (got, calm_ns, flood_ns) = with_honest_clients(site, calm, length)?;
    server.check_runs()?;
    std::thread::sleep(SETTLE);
    let cost = Cost::measure(site, &guard, &server, length)?;
    let calm = rate(&got, calm_ns);
    ensure!(calm > 0.0, "honest clients got nothing before the flood");
    let flooded: Vec<&Got> =
        got.iter().filter(|got| (flood_ns.0..flood_ns.1).contains(&got.done_ns)).collect();
    let duration_ns: u64 = flooded.iter().map(|got| got.done_ns - got.asked_ns).sum();
    let requests_per_second = rate(&got, flood_ns);
    let per_packet = |ns: u64| ns as f64 / cost.sent.packets.max(1) as f64;
    let own = generator.cpu_ns as f64 / generator.packets.max(1) as f64;
    let with_generator = per_packet(cost.cpu_ns);
    let refusing = with_generator - own;
    Ok(Figures {
        requests_per_second,
        calm_requests_per_second: calm,
        mean_duration_ms: duration_ns as f64 / flooded.len().max(1) as f64 / 1e6,
        honest_goodput_ratio: requests_per_second / calm,
        flood_packets_per_second: cost.sent.per_second(),
        dropped_packets_per_second: cost.dropped.map(|n| n as f64 / (cost.sent.elapsed_ns as f64 / 1e9)),
        cpu_ns_per_packet_with_generator: with_generator,
        generator_ns_per_packet: own,
        cpu_ns_per_refused_packet: refusing,
        drops_per_second_per_core: (defence != Defence::None).then(|| 1e9 / refusing.max(1.0)),
        bpf_ns_per_packet: bpf_ns_per_packet(site, &guard, length)?,
        machine_ns_per_packet: per_packet(cost.machine_ns),
    })
}

/// The generator into a device that only forgets.
fn generator_alone(site: &Site, length: Duration) -> anyhow::Result<Sent> {
    let node = site.node(ATTACKERS)?;
    // It may be there from the last run.
    let _ = command(node, "ip", &["link", "add", SINK, "type", "bridge"], "");
    command(node, "ip", &["link", "set", SINK, "up"], "").context("the generator's sink")?;
    let generator = start(site, SINK, length / 3)?;
    finish(generator, length)
}

/// From, to; `CLOCK_MONOTONIC`, ns.
type Span = (u64, u64);

/// What honest clients got, and when there was calm and when flood.
fn with_honest_clients(
    site: &Site,
    calm: Duration,
    length: Duration,
) -> anyhow::Result<(Vec<Got>, Span, Span)> {
    let (target, clients) = (site.target()?, site.node(CLIENTS)?);
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
            let device = &interface(site.node(ATTACKERS)?, ATTACKERS)?.device;
            let generator = start(site, device, length)?;
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

/// A flood on a server that does nothing else.
struct Cost {
    sent: Sent,
    dropped: Option<u64>,
    cpu_ns: u64,
    machine_ns: u64,
}

impl Cost {
    fn measure(site: &Site, guard: &Guard<'_>, server: &Process, length: Duration) -> anyhow::Result<Self> {
        let device = &interface(site.node(ATTACKERS)?, ATTACKERS)?.device;
        let refused = guard.refused()?;
        let (softirq, before) = (softirq_threads_ns()?, Reading::take(server.id())?);
        let sent = finish(start(site, device, length)?, length)?;
        let used = Reading::take(server.id())?.used_since(&before);
        let softirq_ns = softirq_threads_ns()?.saturating_sub(softirq);
        let dropped = guard.refused()?.zip(refused).map(|(after, before)| after - before);
        Ok(Self {
            sent,
            dropped,
            cpu_ns: sent.cpu_ns + softirq_ns + used.process_ns,
            machine_ns: used.machine_ns,
        })
    }
}

/// Statistics cost time: they are a flood of their own.
fn bpf_ns_per_packet(site: &Site, guard: &Guard<'_>, length: Duration) -> anyhow::Result<Option<f64>> {
    let _statistics = Statistics::enable()?;
    let Some(before) = guard.bpf_time()? else { return Ok(None) };
    let device = &interface(site.node(ATTACKERS)?, ATTACKERS)?.device;
    let sent = finish(start(site, device, length / 3)?, length)?;
    let used = guard.bpf_time()?.map(|after| after.since(before));
    Ok(used.map(|used| used.ns as f64 / sent.packets as f64))
}

fn start(site: &Site, device: &str, length: Duration) -> anyhow::Result<Process> {
    let mac = &interface(site.node(SERVER)?, ATTACKERS)?.mac;
    let mut generator = site.node(ATTACKERS)?.command(std::env::current_exe()?);
    generator.args(["bench", "flood", "--device", device, "--to", &site.server()?.to_string()]);
    generator.args(["--to-mac", mac, "--seconds", &length.as_secs_f64().to_string()]);
    Process::start("flood", generator, site.directory.path())
}

fn finish(generator: Process, length: Duration) -> anyhow::Result<Sent> {
    let sent: Sent =
        serde_json::from_str(&generator.finish(length + GRACE)?).context("the generator's figures")?;
    ensure!(sent.packets > 0, "the generator could send nothing");
    Ok(sent)
}

/// CPU time of all `ksoftirqd`, which take over what would keep a process from its work.
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
    fn frames_are_initials() {
        let to = SocketAddrV4::new(Ipv4Addr::new(10, 0, 0, 1), 4433);
        let mut frame = frame([1; 6], to);
        let mut random = fastrand::Rng::with_seed(7);
        vary(&mut frame, &mut random);
        assert_eq!(frame.len(), FRAME);
        // With its checksum the header sums to zero.
        assert_eq!(ip_checksum(&frame[ETHERNET..ETHERNET + IP]), 0);
        let source = &frame[ETHERNET + 12..ETHERNET + 16];
        assert!(source[0] == 198 && (18..20).contains(&source[1]), "{source:?}");
        let quic = &frame[ETHERNET + IP + UDP..];
        let length = usize::from(u16::from_be_bytes([quic[16], quic[17]]) & 0x3fff);
        assert_eq!((quic.len(), length), (INITIAL, INITIAL - 18));
        let id = quic[6..14].to_vec();
        vary(&mut frame, &mut random);
        assert_ne!(frame[ETHERNET + IP + UDP + 6..][..8], id);
    }

    #[test]
    fn mac_addresses() {
        assert_eq!(parse_mac("02:00:00:00:00:ff"), Some([2, 0, 0, 0, 0, 255]));
        assert_eq!(parse_mac("02:00"), None);
        assert_eq!(parse_mac("x"), None);
    }
}
