//! TCP or UDP traffic by iperf3 between a sender and a receiver, on one of several networks.

use std::fmt;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use tempfile::TempDir;

use super::super::process::BenchProcess;
use crate::lab::{Lab, LabNode, Topology};

/// The program that generates the traffic.
pub const LOAD: &str = "iperf3";

const PORT: u16 = 5201;
const READY: Duration = Duration::from_secs(10);
/// Duration given to iperf3, seconds: longer than any measurement. The traffic ends when its handle is dropped.
const TRAFFIC_SECONDS: &str = "86400";
/// Addresses of sender and receiver at the bridge, in a network that the lab does not use.
const BRIDGED: [&str; 2] = ["10.78.0.1", "10.78.0.2"];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NetworkProtocol {
    Tcp,
    Udp,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NetworkRoute {
    /// Sender and receiver are joined by one veth pair.
    Veth,
    /// A bridge is between sender and receiver.
    Bridge,
    /// A router is between sender and receiver.
    Forward,
}

#[derive(Debug, Clone, Copy)]
pub struct NetworkScenario {
    pub way: NetworkRoute,
    pub protocol: NetworkProtocol,
    /// Whether generic receive offload (GRO) is on at every receiving device.
    pub gro: bool,
}

impl NetworkScenario {
    pub fn veth(protocol: NetworkProtocol) -> Self {
        Self { way: NetworkRoute::Veth, protocol, gro: false }
    }

    pub fn all() -> impl Iterator<Item = Self> {
        let ways = [NetworkRoute::Veth, NetworkRoute::Bridge, NetworkRoute::Forward].into_iter();
        let with_protocol =
            |way| [NetworkProtocol::Tcp, NetworkProtocol::Udp].into_iter().map(move |it| (way, it));
        let with_gro =
            |(way, protocol)| [false, true].into_iter().map(move |gro| Self { way, protocol, gro });
        ways.flat_map(with_protocol).flat_map(with_gro)
    }
}

impl fmt::Display for NetworkScenario {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let way = match self.way {
            NetworkRoute::Veth => "veth",
            NetworkRoute::Bridge => "bridge",
            NetworkRoute::Forward => "forward",
        };
        let protocol = match self.protocol {
            NetworkProtocol::Tcp => "tcp",
            NetworkProtocol::Udp => "udp",
        };
        let gro = if self.gro { "on" } else { "off" };
        f.pad(&format!("{way} {protocol} gro={gro}"))
    }
}

/// Traffic at full speed. It runs until it is dropped.
pub struct NetworkTraffic {
    protocol: NetworkProtocol,
    // Fields are dropped in this order: processes must end before their network is removed.
    client: BenchProcess,
    server: BenchProcess,
    lab: Lab,
    _directory: TempDir,
}

impl NetworkTraffic {
    /// Starts the traffic. If there are two CPUs, sender and receiver have one each. Otherwise the scheduler's
    /// placement would cause most of the difference between two runs.
    pub fn start(scenario: NetworkScenario) -> anyhow::Result<Self> {
        needs(LOAD, LOAD)?;
        let lab = Lab::new(&topology(scenario.way))?;
        let address = connect(&lab, scenario)?;
        let directory = tempfile::tempdir()?;
        let sender = lab.node("sender")?;
        let receiver = lab.node("receiver")?;
        let [send_cpu, receive_cpu] = first_and_last_cpu()?;

        let mut command = receiver.command(LOAD);
        command.args(["-s", "-1", "-p", &PORT.to_string(), "-A", &receive_cpu]);
        let mut server = BenchProcess::start("iperf3-server", command, directory.path())?;
        server.wait_until("listening", READY, || receiver.enter(listens).unwrap_or(false))?;

        let mut command = sender.command(LOAD);
        command.args(["-c", &address, "-p", &PORT.to_string(), "-A", &send_cpu, "-t", TRAFFIC_SECONDS]);
        if scenario.protocol == NetworkProtocol::Udp {
            command.args(["-u", "-b", "0"]);
        }
        let client = BenchProcess::start("iperf3-client", command, directory.path())?;
        let mut traffic = Self { protocol: scenario.protocol, client, server, lab, _directory: directory };
        traffic.wait_until_it_flows()?;
        Ok(traffic)
    }

    /// Returns how much has arrived so far: for TCP, bytes at the device; for UDP, datagrams at the socket.
    pub fn delivered(&mut self) -> anyhow::Result<u64> {
        self.client.check_runs()?;
        self.server.check_runs()?;
        let receiver = self.lab.node("receiver")?;
        let count = match self.protocol {
            NetworkProtocol::Tcp => receiver.enter(bytes_received)?,
            NetworkProtocol::Udp => receiver.enter(datagrams_delivered)?,
        };
        count.context("cannot read the kernel's counter of received data")
    }

    /// Waits until data flow steadily: slow start and iperf3's exchange of parameters are over.
    fn wait_until_it_flows(&mut self) -> anyhow::Result<()> {
        const STEP: Duration = Duration::from_millis(500);
        const AT_LEAST: u64 = 1000;
        for _ in 0..20 {
            let before = self.delivered()?;
            std::thread::sleep(STEP);
            if self.delivered()? - before > AT_LEAST {
                std::thread::sleep(STEP);
                return Ok(());
            }
        }
        bail!("iperf3 sends nothing")
    }
}

/// Fails if `program` is not installed, and names the Debian package to install.
pub fn needs(program: &str, package: &str) -> anyhow::Result<()> {
    let there = std::env::var_os("PATH")
        .is_some_and(|path| std::env::split_paths(&path).any(|directory| directory.join(program).is_file()));
    ensure!(there, "{program} is not installed (Debian: apt install {package})");
    Ok(())
}

/// Returns the topology. Segmentation offloads are off, so packets are as large as on a wire, and GRO has packets to
/// merge.
fn topology(way: NetworkRoute) -> Topology {
    let mut topology = Topology::default();
    if way == NetworkRoute::Veth {
        topology.connect("sender", "receiver");
    } else {
        topology.connect("sender", "middle");
        topology.connect("middle", "receiver");
    }
    topology
}

/// Configures bridge and GRO, and returns the receiver's address.
fn connect(lab: &Lab, scenario: NetworkScenario) -> anyhow::Result<String> {
    if scenario.gro {
        for node in lab.nodes() {
            for interface in node.interfaces() {
                run(node, &format!("ethtool -K {} gro on", interface.device))?;
            }
        }
    }
    let receiver = lab.node("receiver")?;
    if scenario.way != NetworkRoute::Bridge {
        return Ok(receiver.addr_v4().to_string());
    }
    let middle = lab.node("middle")?;
    run(middle, "ip link add br0 type bridge")?;
    run(middle, "ip link set br0 up")?;
    for interface in middle.interfaces() {
        run(middle, &format!("ip address flush dev {}", interface.device))?;
        run(middle, &format!("ip link set {} master br0", interface.device))?;
    }
    let [sender_address, receiver_address] = BRIDGED;
    run(lab.node("sender")?, &format!("ip address add {sender_address}/24 dev to-middle"))?;
    run(receiver, &format!("ip address add {receiver_address}/24 dev to-middle"))?;
    Ok(receiver_address.to_owned())
}

pub fn run(node: &LabNode, line: &str) -> anyhow::Result<()> {
    let mut words = line.split(' ');
    let mut command: Command = node.command(words.next().unwrap_or_default());
    let output = command.args(words).output().with_context(|| format!("cannot run {line}"))?;
    ensure!(output.status.success(), "{line}: {}", String::from_utf8_lossy(&output.stderr).trim());
    Ok(())
}

/// Returns the first and the last CPU that this process may use.
fn first_and_last_cpu() -> anyhow::Result<[String; 2]> {
    let cpus = cpus()?;
    let (first, last) = cpus.first().zip(cpus.last()).context("no CPU")?;
    Ok([first.to_string(), last.to_string()])
}

/// Returns the CPUs that this process may use.
pub fn cpus() -> anyhow::Result<Vec<u32>> {
    let all = nix::sched::sched_getaffinity(nix::unistd::Pid::this())?;
    let allowed = (0..nix::sched::CpuSet::count()).filter(|cpu| all.is_set(*cpu).unwrap_or(false));
    allowed.map(|cpu| Ok(u32::try_from(cpu)?)).collect()
}

/// Reports whether a socket listens for TCP on [`PORT`], over IPv4 or IPv6.
pub fn listens() -> bool {
    const LISTEN: &str = "0A";
    let suffix = format!(":{PORT:04X}");
    ["tcp", "tcp6"].iter().any(|table| {
        let text = fs::read_to_string(Path::new("/proc/thread-self/net").join(table)).unwrap_or_default();
        text.lines().skip(1).any(|line| {
            let fields: Vec<&str> = line.split_whitespace().collect();
            matches!(fields[..], [_, local, _, LISTEN, ..] if local.ends_with(&suffix))
        })
    })
}

fn bytes_received() -> Option<u64> {
    let text = fs::read_to_string("/proc/thread-self/net/dev").ok()?;
    let line = text.lines().find_map(|line| line.trim().strip_prefix("to-")?.split_once(':'))?.1;
    line.split_whitespace().next()?.parse().ok()
}

/// Returns the number of UDP datagrams that applications have received.
fn datagrams_delivered() -> Option<u64> {
    let text = fs::read_to_string("/proc/thread-self/net/snmp").ok()?;
    let mut udp = text.lines().filter_map(|line| line.strip_prefix("Udp: "));
    let column = udp.next()?.split(' ').position(|name| name == "InDatagrams")?;
    udp.next()?.split(' ').nth(column)?.parse().ok()
}
