//! Traffic loads. Each makes the kernel run networking in one context (such as NET_RX), until it is dropped.

use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use millrace_cost::report::Event;
use millrace_lab_kernel::contexts::{self, Cpumap};
use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::{Pid, gettid};
use tempfile::TempDir;

use super::super::process::BenchProcess;
use super::network::{self, NetworkProtocol, NetworkRoute, NetworkScenario, NetworkTraffic, needs, run};
use crate::lab::{Lab, LabNode, Topology};

/// A traffic load, and the kernel contexts (such as NET_RX) and network stack layers that the observer must report for
/// it.
pub struct CostLoad {
    pub name: &'static str,
    pub shows: &'static [(Event, &'static str)],
    /// Programs that the load calls, and the Debian package of each.
    programs: &'static [(&'static str, &'static str)],
    /// Smallest number of CPUs between which the load can run.
    cpus: usize,
    start: fn(&mut RunningLoad) -> anyhow::Result<()>,
}

const ETHTOOL: (&str, &str) = ("ethtool", "ethtool");
const IP: (&str, &str) = ("ip", "iproute2");
const IPERF3: (&str, &str) = ("iperf3", "iperf3");
const NFT: (&str, &str) = ("nft", "nftables");
const SYSCTL: (&str, &str) = ("sysctl", "procps");
const TC: (&str, &str) = ("tc", "iproute2");

pub const ALL: [CostLoad; 12] = [
    CostLoad {
        name: "tun",
        shows: &[(Event::Devices, "TUN"), (Event::Devices, "IP receive v4"), (Event::Devices, "UDP")],
        programs: &[IP],
        cpus: 1,
        start: tun,
    },
    CostLoad {
        name: "bbr",
        shows: &[(Event::Timers, "TCP"), (Event::NetRx, "TCP")],
        programs: &[IPERF3],
        cpus: 1,
        start: bbr,
    },
    CostLoad {
        name: "connections",
        shows: &[(Event::Sockets, "TCP"), (Event::Sockets, "connections")],
        programs: &[SYSCTL],
        cpus: 1,
        start: connections,
    },
    CostLoad {
        name: "socketpair",
        shows: &[(Event::Local, "local sockets")],
        programs: &[],
        cpus: 1,
        start: socketpair,
    },
    CostLoad {
        name: "busy poll",
        shows: &[(Event::Poll, "busy poll"), (Event::Receive, "UDP")],
        programs: &[ETHTOOL],
        cpus: 1,
        start: busy_poll,
    },
    CostLoad {
        name: "vxlan",
        shows: &[(Event::NetRx, "tunnel receive"), (Event::Send, "tunnel transmit")],
        programs: &[IP],
        cpus: 1,
        start: vxlan,
    },
    CostLoad {
        name: "cpumap",
        shows: &[(Event::Workers, "UDP"), (Event::Workers, "XDP native")],
        programs: &[ETHTOOL],
        cpus: 1,
        start: cpumap,
    },
    CostLoad {
        name: "sqpoll",
        shows: &[(Event::IoUring, "io_uring")],
        programs: &[],
        cpus: 1,
        start: sqpoll,
    },
    CostLoad {
        name: "migration",
        shows: &[(Event::Send, "UDP"), (Event::Receive, "UDP")],
        programs: &[],
        cpus: 2,
        start: migration,
    },
    CostLoad {
        name: "nat",
        shows: &[(Event::NetRx, "conntrack"), (Event::NetRx, "forwarding v4")],
        programs: &[NFT],
        cpus: 1,
        start: nat,
    },
    CostLoad { name: "tc", shows: &[(Event::NetRx, "TC")], programs: &[TC], cpus: 1, start: tc },
    CostLoad { name: "gro", shows: &[(Event::NetRx, "GRO")], programs: &[IPERF3], cpus: 1, start: gro },
];

impl CostLoad {
    /// Returns the kernel contexts with their network stack layers that the observer must report and for which
    /// `is_seen` is false.
    pub fn absent(&self, is_seen: impl Fn(Event, &str) -> bool) -> Vec<String> {
        let absent = self.shows.iter().filter(|(event, part)| !is_seen(*event, part));
        absent.map(|(event, part)| format!("{event}: {part}")).collect()
    }

    /// Fails if a program that the load calls is not installed, or this process may use too few CPUs.
    pub fn check(&self) -> anyhow::Result<()> {
        self.programs.iter().try_for_each(|(program, package)| needs(program, package))?;
        let cpus = network::cpus()?.len();
        ensure!(cpus >= self.cpus, "it needs {} CPUs, and this process may use {cpus}", self.cpus);
        Ok(())
    }

    /// Starts the load. Its first packets may flow only after this function returns.
    pub fn launch(&self) -> anyhow::Result<RunningLoad> {
        self.check()?;
        let mut running = RunningLoad::default();
        (self.start)(&mut running).with_context(|| format!("cannot make the load {}", self.name))?;
        Ok(running)
    }

    /// Starts the load, and waits until it runs steadily.
    pub fn start(&self) -> anyhow::Result<RunningLoad> {
        let running = self.launch()?;
        // Wait until the processes run and devices have learned their neighbours' addresses.
        thread::sleep(SETTLE);
        running.check()?;
        Ok(running)
    }
}

const SETTLE: Duration = Duration::from_millis(500);

/// A running load. Dropping it ends its threads and processes and removes its network.
#[derive(Default)]
pub struct RunningLoad {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<anyhow::Result<()>>>,
    traffic: Option<NetworkTraffic>,
    // Fields are dropped in this order: processes must end before their network is removed.
    processes: Vec<BenchProcess>,
    program: Option<Cpumap>,
    lab: Option<Lab>,
    _directory: Option<TempDir>,
}

impl RunningLoad {
    /// Fails if a thread that makes the traffic load has ended.
    pub fn check(&self) -> anyhow::Result<()> {
        ensure!(!self.threads.iter().any(JoinHandle::is_finished), "a thread of the load has ended");
        Ok(())
    }

    /// Runs `work` in a new thread again and again until the load ends.
    fn repeat(&mut self, mut work: impl FnMut() -> anyhow::Result<()> + Send + 'static) {
        let stop = Arc::clone(&self.stop);
        self.threads.push(thread::spawn(move || {
            while !stop.load(Ordering::Relaxed) {
                work()?;
            }
            Ok(())
        }));
    }

    /// Runs `work` in a new thread `per_second` times a second, or as often as the machine can.
    fn pace(&mut self, per_second: f64, mut work: impl FnMut() -> anyhow::Result<()> + Send + 'static) {
        const BURST: u32 = 16;
        const PAUSE: Duration = Duration::from_micros(100);
        let mut start = Instant::now();
        let mut done = 0u32;
        self.repeat(move || {
            let due = start.elapsed().as_secs_f64() * per_second;
            if f64::from(done) >= due {
                thread::sleep(PAUSE);
                return Ok(());
            }
            for _ in 0..BURST {
                work()?;
            }
            done += BURST;
            // After a second the pace restarts, so work that fell behind is not caught up.
            if start.elapsed() > Duration::from_secs(1) {
                (start, done) = (Instant::now(), 0);
            }
            Ok(())
        });
    }

    /// Sends datagrams at a rate from one socket to another, and reads them there.
    fn datagrams(&mut self, near: UdpSocket, far: UdpSocket, per_second: f64) -> anyhow::Result<()> {
        let to = far.local_addr()?;
        // The time-out lets the receiving thread notice the end of the load.
        far.set_read_timeout(Some(Duration::from_millis(100)))?;
        self.pace(per_second, move || {
            // Errors are expected: the neighbour's address may not be known yet, or a queue may be full.
            let _ = near.send_to(&[0; 1000], to);
            Ok(())
        });
        self.repeat(move || match far.recv(&mut [0; 1500]) {
            Err(error) if error.kind() != ErrorKind::WouldBlock => Err(error.into()),
            _ => Ok(()),
        });
        Ok(())
    }

    fn lab(&mut self, nodes: &[&str]) -> anyhow::Result<&Lab> {
        let mut topology = Topology::default();
        nodes.windows(2).for_each(|pair| {
            if let [a, b] = pair {
                topology.connect(a, b);
            }
        });
        Ok(self.lab.insert(Lab::new(&topology)?))
    }
}

impl Drop for RunningLoad {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            // An error is ignored here, since `check` has already reported it.
            let _ = thread.join();
        }
    }
}

const ENDS: [&str; 2] = ["sender", "receiver"];

fn bind(node: &LabNode, address: IpAddr) -> anyhow::Result<UdpSocket> {
    Ok(node.enter(|| UdpSocket::bind((address, 0)))??)
}

fn ends(lab: &Lab) -> anyhow::Result<[UdpSocket; 2]> {
    let [near, far] = [lab.node("sender")?, lab.node("receiver")?];
    Ok([bind(near, near.addr_v4().into())?, bind(far, far.addr_v4().into())?])
}

/// Writes 200,000 packets a second to a TUN device, which a socket receives.
fn tun(running: &mut RunningLoad) -> anyhow::Result<()> {
    const DEVICE: &str = "tun0";
    let own = Ipv4Addr::new(10, 99, 0, 1);
    let other = Ipv4Addr::new(10, 99, 0, 2);
    let lab = running.lab(&ENDS)?;
    let node = lab.node("sender")?;
    let mut device = node.enter(|| contexts::tun(DEVICE))?.context("cannot make a TUN device")?;
    run(node, &format!("ip address add {own}/24 dev {DEVICE}"))?;
    run(node, &format!("ip link set {DEVICE} up"))?;
    let socket = bind(node, own.into())?;
    socket.set_read_timeout(Some(Duration::from_millis(100)))?;
    let packet = datagram(other, own, socket.local_addr()?.port());
    running.pace(200_000.0, move || Ok(device.write_all(&packet)?));
    running.repeat(move || match socket.recv(&mut [0; 1500]) {
        Err(error) if error.kind() != ErrorKind::WouldBlock => Err(error.into()),
        _ => Ok(()),
    });
    Ok(())
}

/// Builds an IPv4 and UDP packet with 64 bytes of payload and without UDP checksum.
fn datagram(from: Ipv4Addr, to: Ipv4Addr, port: u16) -> Vec<u8> {
    const HEADERS: u16 = 28;
    const PAYLOAD: u16 = 64;
    let mut packet = vec![0x45, 0];
    packet.extend((HEADERS + PAYLOAD).to_be_bytes());
    packet.extend([0, 0, 0x40, 0, 64, 17, 0, 0]);
    packet.extend(from.octets());
    packet.extend(to.octets());
    let words = packet.as_chunks::<2>().0.iter().map(|word| u32::from(u16::from_be_bytes(*word)));
    let sum: u32 = words.sum();
    let sum = (sum & 0xffff) + (sum >> 16);
    let checksum = !(((sum & 0xffff) + (sum >> 16)) as u16);
    packet.splice(10..12, checksum.to_be_bytes());
    packet.extend(4000u16.to_be_bytes());
    packet.extend(port.to_be_bytes());
    packet.extend((PAYLOAD + 8).to_be_bytes());
    packet.extend([0, 0]);
    packet.extend([0; PAYLOAD as usize]);
    packet
}

/// Runs 30 TCP connections with BBR, whose packets are paced by timers.
fn bbr(running: &mut RunningLoad) -> anyhow::Result<()> {
    let directory = tempfile::tempdir()?;
    let lab = running.lab(&ENDS)?;
    let sender = lab.node("sender")?;
    let receiver = lab.node("receiver")?;
    let mut command = receiver.command("iperf3");
    command.args(["-s", "-1"]);
    let mut server = BenchProcess::start("iperf3-server", command, directory.path())?;
    server.wait_until("listening", Duration::from_secs(10), || {
        receiver.enter(network::listens).unwrap_or(false)
    })?;
    let mut command = sender.command("iperf3");
    command.args([
        "-c",
        &receiver.addr_v4().to_string(),
        "-P",
        "30",
        "-C",
        "bbr",
        "--fq-rate",
        "20M",
        "-t",
        "86400",
    ]);
    let client = BenchProcess::start("iperf3-client", command, directory.path())?;
    running.processes.extend([client, server]);
    running._directory = Some(directory);
    Ok(())
}

/// Makes 7,000 TCP connections a second and sends nothing on them.
fn connections(running: &mut RunningLoad) -> anyhow::Result<()> {
    let lab = running.lab(&ENDS)?;
    let sender = lab.node("sender")?;
    let receiver = lab.node("receiver")?;
    run(sender, "sysctl -qw net.ipv4.tcp_tw_reuse=1")?;
    sender.enter(|| std::fs::write("/proc/sys/net/ipv4/ip_local_port_range", "1024 65000"))??;
    let listener = receiver.enter(|| TcpListener::bind((receiver.addr_v4(), 0)))??;
    let to = listener.local_addr()?;
    listener.set_nonblocking(true)?;
    running.repeat(move || match listener.accept() {
        Ok(_) => Ok(()),
        Err(error) if error.kind() == ErrorKind::WouldBlock => {
            thread::sleep(Duration::from_micros(100));
            Ok(())
        }
        Err(error) => Err(error.into()),
    });
    let namespace =
        std::fs::File::open(running.lab.as_ref().context("no lab")?.node("sender")?.netns().path())?;
    let mut inside = false;
    running.pace(7000.0, move || {
        if !std::mem::replace(&mut inside, true) {
            nix::sched::setns(&namespace, nix::sched::CloneFlags::CLONE_NEWNET)?;
        }
        // An error is expected: the listener's queue may be full.
        let _ = TcpStream::connect_timeout(&to, Duration::from_millis(200));
        Ok(())
    });
    Ok(())
}

/// Runs two threads that exchange data over a pair of Unix sockets, which reach no network.
fn socketpair(running: &mut RunningLoad) -> anyhow::Result<()> {
    let (mut near, mut far) = UnixStream::pair()?;
    far.set_read_timeout(Some(Duration::from_millis(100)))?;
    near.set_read_timeout(Some(Duration::from_millis(100)))?;
    let waits = |result: std::io::Result<()>| match result {
        Err(error) if error.kind() != ErrorKind::WouldBlock => Err(error.into()),
        _ => Ok(()),
    };
    running.repeat(move || {
        near.write_all(&[0; 8])?;
        waits(near.read_exact(&mut [0; 8]))
    });
    running.repeat(move || {
        waits(far.read_exact(&mut [0; 8]))?;
        far.write_all(&[0; 8]).map_err(Into::into)
    });
    Ok(())
}

/// Runs a receiver that busy-polls the network device while it waits (`epoll` with `busy_poll_usecs`).
fn busy_poll(running: &mut RunningLoad) -> anyhow::Result<()> {
    let lab = running.lab(&ENDS)?;
    for node in lab.nodes() {
        for interface in node.interfaces() {
            run(node, &format!("ethtool -K {} gro on", interface.device))?;
        }
    }
    let [near, far] = ends(lab)?;
    far.set_nonblocking(true)?;
    let to = far.local_addr()?;
    let epoll = contexts::epoll()?;
    contexts::epoll_add(epoll.as_fd(), &far)?;
    contexts::busy_poll(epoll.as_fd(), 1000).context("this kernel's epoll does not poll devices")?;
    running.pace(20_000.0, move || {
        let _ = near.send_to(&[0; 200], to);
        Ok(())
    });
    running.repeat(move || {
        contexts::epoll_wait(epoll.as_fd(), 100)?;
        while far.recv(&mut [0; 1500]).is_ok() {}
        Ok(())
    });
    Ok(())
}

fn vxlan(running: &mut RunningLoad) -> anyhow::Result<()> {
    let lab = running.lab(&ENDS)?;
    let [near, far] = [lab.node("sender")?, lab.node("receiver")?];
    let inner = [Ipv4Addr::new(10, 98, 0, 1), Ipv4Addr::new(10, 98, 0, 2)];
    for (node, peer, address) in [(near, far, inner[0]), (far, near, inner[1])] {
        let device = &node.interfaces().first().context("no interface")?.device;
        let local = node.addr_v4();
        let remote = peer.addr_v4();
        run(
            node,
            &format!(
                "ip link add vx type vxlan id 7 local {local} remote {remote} dstport 4789 dev {device}"
            ),
        )?;
        run(node, &format!("ip address add {address}/24 dev vx"))?;
        run(node, "ip link set vx up")?;
    }
    let sockets = [bind(near, inner[0].into())?, bind(far, inner[1].into())?];
    let [near, far] = sockets;
    running.datagrams(near, far, 50_000.0)
}

fn cpumap(running: &mut RunningLoad) -> anyhow::Result<()> {
    let lab = running.lab(&ENDS)?;
    let sender = lab.node("sender")?;
    let receiver = lab.node("receiver")?;
    // XDP frames of a veth have no checksum state, so the sender must compute checksums itself.
    for node in [sender, receiver] {
        let device = &node.interfaces().first().context("no interface")?.device;
        run(node, &format!("ethtool -K {device} tx off"))?;
    }
    let device = receiver.interfaces().first().context("no interface")?.device.clone();
    let program = receiver.enter(|| -> anyhow::Result<Cpumap> {
        let number = nix::net::if_::if_nametoindex(device.as_str())?;
        Ok(Cpumap::attach(i32::try_from(number)?)?)
    })??;
    let [near, far] = ends(lab)?;
    running.program = Some(program);
    running.datagrams(near, far, 50_000.0)
}

/// Runs an io_uring whose kernel thread polls for requests without pause.
fn sqpoll(running: &mut RunningLoad) -> anyhow::Result<()> {
    let ring = contexts::polling_ring().context("io_uring has no polling thread here")?;
    running.repeat(move || {
        // The polling thread sleeps at first, and again after an hour without requests.
        contexts::wake(ring.as_fd())?;
        thread::sleep(Duration::from_millis(50));
        Ok(())
    });
    Ok(())
}

/// Sends a datagram back and forth between two sockets. One of their two threads is moved from CPU to CPU, even during
/// its system calls.
fn migration(running: &mut RunningLoad) -> anyhow::Result<()> {
    let lab = running.lab(&ENDS)?;
    let [near, far] = ends(lab)?;
    near.set_read_timeout(Some(Duration::from_millis(100)))?;
    far.set_read_timeout(Some(Duration::from_millis(100)))?;
    let cpus = network::cpus()?;
    let to = far.local_addr()?;
    let allowed = sched_getaffinity(Pid::from_raw(0))?;
    let (sender, thread_id) = std::sync::mpsc::channel::<Pid>();
    running.repeat(move || {
        let _ = sender.send(gettid());
        near.send_to(&[0; 8], to)?;
        let _ = near.recv(&mut [0; 8]);
        Ok(())
    });
    running.repeat(move || {
        if let Ok((_, from)) = far.recv_from(&mut [0; 8]) {
            far.send_to(&[0; 8], from)?;
        }
        Ok(())
    });
    let thread_id = thread_id.recv()?;
    let mut turn = 0;
    running.repeat(move || {
        thread::sleep(Duration::from_micros(500));
        let mut only = CpuSet::new();
        only.set(*cpus.get(turn % cpus.len()).context("no CPU")? as usize)?;
        turn += 1;
        // An error is ignored here: `check` reports a thread that has ended.
        let _ = sched_setaffinity(thread_id, if turn % 64 == 0 { &allowed } else { &only });
        Ok(())
    });
    Ok(())
}

/// Sends through a router with network address translation (masquerading).
fn nat(running: &mut RunningLoad) -> anyhow::Result<()> {
    let lab = running.lab(&["sender", "middle", "receiver"])?;
    let middle = lab.node("middle")?;
    run(middle, "nft add table ip nat")?;
    run(middle, "nft add chain ip nat post { type nat hook postrouting priority 100 ; }")?;
    run(middle, "nft add rule ip nat post masquerade")?;
    let [near, far] = ends(lab)?;
    running.datagrams(near, far, 50_000.0)
}

/// Sends packets through 60 `tc` filters.
fn tc(running: &mut RunningLoad) -> anyhow::Result<()> {
    let lab = running.lab(&ENDS)?;
    let receiver = lab.node("receiver")?;
    let device = &receiver.interfaces().first().context("no interface")?.device;
    run(receiver, &format!("tc qdisc add dev {device} clsact"))?;
    for priority in 1..=60 {
        let rule = "u32 match ip dport 1 0xffff flowid 1:1";
        run(receiver, &format!("tc filter add dev {device} ingress protocol ip prio {priority} {rule}"))?;
    }
    let [near, far] = ends(lab)?;
    running.datagrams(near, far, 50_000.0)
}

fn gro(running: &mut RunningLoad) -> anyhow::Result<()> {
    let scenario = NetworkScenario { way: NetworkRoute::Veth, protocol: NetworkProtocol::Tcp, gro: true };
    match NetworkTraffic::start(scenario) {
        Ok(traffic) => running.traffic = Some(traffic),
        Err(error) => bail!("{error:#}"),
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn datagram_has_the_right_checksum() {
        let packet = datagram(Ipv4Addr::new(10, 99, 0, 2), Ipv4Addr::new(10, 99, 0, 1), 9);
        let words = packet[..20].as_chunks::<2>().0.iter().map(|word| u32::from(u16::from_be_bytes(*word)));
        let sum = words.sum::<u32>();
        assert_eq!((sum & 0xffff) + (sum >> 16), 0xffff);
        assert_eq!(packet.len(), 28 + 64);
    }
}
