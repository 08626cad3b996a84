//! The network of the gate's experiments: `clients - server - attackers`.

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr},
    time::Duration,
};

use anyhow::{Context as _, anyhow};
use millrace_gate::{Gate, Policy, XdpMode};
use nix::unistd::{SysconfVar, sysconf};

use super::{
    super::{
        contender::{ContenderIdentity, PORT},
        process::{BenchProcess, listens},
    },
    defence::{Defence, DefenceLimits, DefencePlace, run},
    http3::Http3Target,
};
use crate::lab::{self, Lab, LabNode, NodeInterface, Topology};

pub const CLIENTS: &str = "clients";
pub const SERVER: &str = "server";
pub const ATTACKERS: &str = "attackers";
/// Number of honest clients, and of attackers, as in the eQUIC paper.
const PEERS: u8 = 4;
/// Last byte of the first client's address. The interface's own address is lower.
const FIRST_PEER: u8 = 101;
/// Policy of a gate that guards no ports and keeps as little state as possible.
const NOTHING: &str = "\
[load]
max_ids = 64
max_clients = 64
max_handshakes = 64
max_rates = 64
[[scope]]
name = \"nothing\"
port = 1
live = \"unknown\"
";
const START_LIMIT: Duration = Duration::from_secs(10);

pub struct GateBenchSite {
    pub lab: Lab,
    pub directory: tempfile::TempDir,
    identity: ContenderIdentity,
    body_bytes: usize,
}

impl GateBenchSite {
    pub fn new(body_bytes: usize) -> anyhow::Result<Self> {
        lab::remove_on_signal()?;
        let mut topology = Topology::default();
        topology.connect(CLIENTS, SERVER);
        topology.connect(SERVER, ATTACKERS);
        let lab = Lab::new(&topology).context("cannot make the lab")?;
        for name in [CLIENTS, ATTACKERS] {
            let node = lab.node(name)?;
            let device = &interface(node, name)?.device;
            for address in addresses(node) {
                run(node, "ip", &["address", "add", &format!("{address}/24"), "dev", device], "")?;
            }
        }
        // With GRO on, a veth uses NAPI and hands XDP frames to XDP programs, as a network card's driver does.
        let attacked = &interface(lab.node(SERVER)?, ATTACKERS)?.device;
        run(lab.node(SERVER)?, "ethtool", &["-K", attacked, "gro", "on"], "").context("GRO")?;
        let directory = tempfile::tempdir()?;
        let identity =
            ContenderIdentity::create(&directory.path().join("identity"), lab.node(SERVER)?.addr_v4())?;
        Ok(Self { lab, directory, identity, body_bytes })
    }

    pub fn node(&self, name: &str) -> anyhow::Result<&LabNode> {
        Ok(self.lab.node(name)?)
    }

    /// Lets attackers receive the gate's answers until the result is dropped. A veth receives redirected XDP frames
    /// only if it has an XDP program itself, even one that passes everything. Enabling GRO instead is not enough: an
    /// answer would stay in the veth's ring buffer until another packet arrives.
    pub fn take_answers(&self) -> anyhow::Result<Gate> {
        let node = self.node(ATTACKERS)?;
        let device = &interface(node, ATTACKERS)?.device;
        let gate = Gate::new(&Policy::parse(NOTHING)?)?;
        node.enter(|| gate.attach(device, XdpMode::Native))??;
        Ok(gate)
    }

    pub fn server(&self) -> anyhow::Result<SocketAddr> {
        Ok(SocketAddr::new(self.node(SERVER)?.addr_v4().into(), PORT))
    }

    pub fn target(&self) -> anyhow::Result<Http3Target> {
        Ok(Http3Target {
            server: self.server()?,
            certificate: self.identity.certificate.clone(),
            body_bytes: self.body_bytes,
        })
    }

    pub fn place(&self) -> anyhow::Result<DefencePlace<'_>> {
        let node = self.node(SERVER)?;
        Ok(DefencePlace {
            node,
            devices: node.interfaces().iter().map(|interface| interface.device.clone()).collect(),
            attacked: interface(node, ATTACKERS)?.device.clone(),
            server: self.server()?,
            directory: self.directory.path().to_owned(),
        })
    }

    pub fn start_server(&self, defence: Defence, limits: DefenceLimits) -> anyhow::Result<BenchProcess> {
        let node = self.node(SERVER)?;
        let mut command = node.command(std::env::current_exe()?);
        command.args(["bench", "http3-server", "--listen", &self.server()?.to_string()]);
        command.arg("--tls-cert").arg(&self.identity.certificate).arg("--tls-key").arg(&self.identity.key);
        command.args(["--body-bytes", &self.body_bytes.to_string()]);
        if defence.is_in_user_space() {
            command.args(limits.user_arguments(defence));
        }
        let mut server = BenchProcess::start("server", command, self.directory.path())?;
        let bound = || node.enter(|| listens(PORT)).unwrap_or(false);
        server.wait_until("listening", START_LIMIT, bound)?;
        Ok(server)
    }
}

/// Returns the addresses of the clients, or attackers, of a node.
pub fn addresses(node: &LabNode) -> Vec<IpAddr> {
    let [a, b, c, _] = node.addr_v4().octets();
    (FIRST_PEER..FIRST_PEER + PEERS).map(|d| IpAddr::V4(Ipv4Addr::new(a, b, c, d))).collect()
}

/// Returns the interface of `node` on the link between the server and `name`. `node` is one of the two.
pub fn interface<'a>(node: &'a LabNode, name: &str) -> anyhow::Result<&'a NodeInterface> {
    let link = if name == CLIENTS { format!("{CLIENTS}-{SERVER}") } else { format!("{SERVER}-{ATTACKERS}") };
    node.interface(&link).ok_or_else(|| anyhow!("{} has no link {link}", node.name()))
}

/// Returns the resident memory of a process, bytes.
pub fn rss_bytes(process: u32) -> std::io::Result<u64> {
    let statm = std::fs::read_to_string(format!("/proc/{process}/statm"))?;
    let pages = statm.split_whitespace().nth(1).and_then(|pages| pages.parse::<u64>().ok());
    let page = sysconf(SysconfVar::PAGE_SIZE).ok().flatten().unwrap_or(4096) as u64;
    pages.map(|pages| pages * page).ok_or_else(|| std::io::Error::other("/proc/PID/statm is not as expected"))
}
