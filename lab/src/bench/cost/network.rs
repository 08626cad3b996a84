//! A sender and a receiver with iperf3 between them, over one of several ways.

use std::fmt;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use tempfile::TempDir;

use super::super::process::Process;
use crate::lab::{Lab, Node, Topology};

const PORT: u16 = 5201;
const READY: Duration = Duration::from_secs(10);
/// Longer than any measurement; the traffic ends with its handle.
const TRAFFIC_SECONDS: &str = "86400";
/// Not of the lab's addresses.
const BRIDGED: [&str; 2] = ["10.78.0.1", "10.78.0.2"];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Protocol {
    Tcp,
    Udp,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// One pair of veth.
    Veth,
    /// A bridge in between.
    Bridge,
    /// A router in between.
    Forward,
}

#[derive(Debug, Clone, Copy)]
pub struct Scenario {
    pub way: Way,
    pub protocol: Protocol,
    /// Generic receive offload on every receiving device.
    pub gro: bool,
}

impl Scenario {
    pub fn veth(protocol: Protocol) -> Self {
        Self { way: Way::Veth, protocol, gro: false }
    }

    pub fn all() -> impl Iterator<Item = Self> {
        let ways = [Way::Veth, Way::Bridge, Way::Forward].into_iter();
        let with_protocol = |way| [Protocol::Tcp, Protocol::Udp].into_iter().map(move |it| (way, it));
        let with_gro =
            |(way, protocol)| [false, true].into_iter().map(move |gro| Self { way, protocol, gro });
        ways.flat_map(with_protocol).flat_map(with_gro)
    }
}

impl fmt::Display for Scenario {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let way = match self.way {
            Way::Veth => "veth",
            Way::Bridge => "bridge",
            Way::Forward => "forward",
        };
        let protocol = match self.protocol {
            Protocol::Tcp => "tcp",
            Protocol::Udp => "udp",
        };
        let gro = if self.gro { "on" } else { "off" };
        f.pad(&format!("{way} {protocol} gro={gro}"))
    }
}

/// Traffic at full speed, until it is dropped.
pub struct Traffic {
    protocol: Protocol,
    // Order of removal: the processes, then what they run in.
    client: Process,
    server: Process,
    lab: Lab,
    _directory: TempDir,
}

impl Traffic {
    /// Sender and receiver have a CPU each, if there are two: where the scheduler puts them is most of the
    /// difference between two runs.
    pub fn start(scenario: Scenario) -> anyhow::Result<Self> {
        needs("iperf3", "iperf3")?;
        let lab = Lab::new(&topology(scenario.way))?;
        let address = connect(&lab, scenario)?;
        let directory = tempfile::tempdir()?;
        let (sender, receiver) = (lab.node("sender")?, lab.node("receiver")?);
        let [send_cpu, receive_cpu] = first_and_last_cpu()?;

        let mut command = receiver.command("iperf3");
        command.args(["-s", "-1", "-p", &PORT.to_string(), "-A", &receive_cpu]);
        let mut server = Process::start("iperf3-server", command, directory.path())?;
        server.wait_until("listening", READY, || receiver.enter(listens).unwrap_or(false))?;

        let mut command = sender.command("iperf3");
        command.args(["-c", &address, "-p", &PORT.to_string(), "-A", &send_cpu, "-t", TRAFFIC_SECONDS]);
        if scenario.protocol == Protocol::Udp {
            command.args(["-u", "-b", "0"]);
        }
        let client = Process::start("iperf3-client", command, directory.path())?;
        let mut traffic = Self { protocol: scenario.protocol, client, server, lab, _directory: directory };
        traffic.wait_until_it_flows()?;
        Ok(traffic)
    }

    /// What arrived so far: bytes of TCP at the device, datagrams of UDP at the socket.
    pub fn delivered(&mut self) -> anyhow::Result<u64> {
        self.client.check_runs()?;
        self.server.check_runs()?;
        let receiver = self.lab.node("receiver")?;
        let count = match self.protocol {
            Protocol::Tcp => receiver.enter(bytes_received)?,
            Protocol::Udp => receiver.enter(datagrams_delivered)?,
        };
        count.context("the kernel's counters are not as expected")
    }

    /// Past slow start and the control connection.
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

/// An error that says what to install, if `program` is not there.
pub fn needs(program: &str, package: &str) -> anyhow::Result<()> {
    let there = std::env::var_os("PATH")
        .is_some_and(|path| std::env::split_paths(&path).any(|directory| directory.join(program).is_file()));
    ensure!(there, "{program} is not installed (Debian: apt install {package})");
    Ok(())
}

/// Offloads off, so that packets are those of a wire and GRO has something to merge.
fn topology(way: Way) -> Topology {
    let mut topology = Topology::default();
    if way == Way::Veth {
        topology.connect("sender", "receiver");
    } else {
        topology.connect("sender", "middle");
        topology.connect("middle", "receiver");
    }
    topology
}

/// Sets up bridge and GRO; the receiver's address.
fn connect(lab: &Lab, scenario: Scenario) -> anyhow::Result<String> {
    if scenario.gro {
        for node in lab.nodes() {
            for interface in node.interfaces() {
                run(node, &format!("ethtool -K {} gro on", interface.device))?;
            }
        }
    }
    let receiver = lab.node("receiver")?;
    if scenario.way != Way::Bridge {
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

fn run(node: &Node, line: &str) -> anyhow::Result<()> {
    let mut words = line.split(' ');
    let mut command: Command = node.command(words.next().unwrap_or_default());
    let output = command.args(words).output().with_context(|| format!("cannot run {line}"))?;
    ensure!(output.status.success(), "{line}: {}", String::from_utf8_lossy(&output.stderr).trim());
    Ok(())
}

/// The first and the last CPU that this process may use.
fn first_and_last_cpu() -> anyhow::Result<[String; 2]> {
    let cpus = cpus()?;
    let (first, last) = cpus.first().zip(cpus.last()).context("no CPU")?;
    Ok([first.to_string(), last.to_string()])
}

/// Those that this process may use.
pub fn cpus() -> anyhow::Result<Vec<u32>> {
    let all = nix::sched::sched_getaffinity(nix::unistd::Pid::this())?;
    let allowed = (0..nix::sched::CpuSet::count()).filter(|cpu| all.is_set(*cpu).unwrap_or(false));
    allowed.map(|cpu| Ok(u32::try_from(cpu)?)).collect()
}

/// Whether something listens for TCP on [`PORT`], over IPv4 or IPv6.
fn listens() -> bool {
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

/// Counted when the application takes them.
fn datagrams_delivered() -> Option<u64> {
    let text = fs::read_to_string("/proc/thread-self/net/snmp").ok()?;
    let mut udp = text.lines().filter_map(|line| line.strip_prefix("Udp: "));
    let column = udp.next()?.split(' ').position(|name| name == "InDatagrams")?;
    udp.next()?.split(' ').nth(column)?.parse().ok()
}
